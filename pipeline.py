"""Pipeline parallelism: layers are cut into stages, one per rank; microbatches flow through them.

With one batch only one stage works at a time. Cut into m microbatches, the batch fills the
pipeline, and what stays idle is the filling and the draining, the bubble. Here p = 3 stages and
m = 5 microbatches; a forward (F) takes one slot of time, a backward (B) two, a dot is an idle slot:

    GPipe: all forward, then all backward          1F1B: a backward as soon as there is one to do
    F0F1F2F3F4............B0B0B1B1B2B2B3B3B4B4     F0F1F2........B0B0F3B1B1F4B2B2..B3B3..B4B4
    ..F0F1F2F3F4......B0B0B1B1B2B2B3B3B4B4....     ..F0F1....B0B0F2B1B1F3B2B2F4B3B3..B4B4....
    ....F0F1F2F3F4B0B0B1B1B2B2B3B3B4B4........     ....F0B0B0F1B1B1F2B2B2F3B3B3F4B4B4........

The bubble is the same, (p-1)(F+B) on every rank, (p-1)/m of the ideal time m(F+B). What 1F1B saves
is memory: a stage holds the activations of min(m, p - stage) microbatches, here of 3, 2 and 1, and
not of m = 5.

Of a backward only the gradient of its input (I) is waited for by others; that of the weights (W),
about half of the work, can fill idle slots. Other schedules cut a rank's layers into chunks, or let
microbatches enter from both ends.

A schedule is data: the list of each rank's actions, and the routes that microbatches take. One
simulator times it, checks it, and derives the one global order of messages; one executor runs it.
A message is a microbatch's activations, batch x sequence x width elements, or their gradient: one
each way per microbatch and boundary. A rank holds its stages' parameters, and the activations of
the microbatches whose forward is done and whose backward is not.

Huang et al., "GPipe", 2019. Narayanan et al., "PipeDream", 2019 and "Memory-Efficient
Pipeline-Parallel DNN Training", 2021 (PipeDream-flush, called 1F1B here and in Megatron-LM).
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021
(interleaved). Qi et al., "Zero Bubble Pipeline Parallelism", 2024, and "Pipeline Parallelism with
Controllable Memory", 2024 (ZB-V). DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024 (DualPipe).

    torchrun --nproc-per-node 4 pipeline.py           bubble, peak, bytes: claimed and found
    python pipeline.py --schedule zb-h2 --stages 4 --microbatches 8 [--trace FILE]    one, drawn
    python pipeline.py --stages 4 --microbatches 8                                    all, compared
"""

import argparse
import json
import os
from collections import Counter, defaultdict, deque
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from collectives import autocasted, count_bytes, exchange, gather_objects, rank_and_size, run_ranks

# ---- the idea ------------------------------------------------------------------------------------


def gpipe_step(stage, inputs, targets, loss_fn, group=None):
    """A step of GPipe in plain words: microbatches go forward, then their gradients come back.

    inputs, targets: lists of microbatches, given to every rank; a stage's output has the shape and
    the dtype, a floating one, of its inputs. Gradients add up in the parameters. Returns the
    microbatches' losses on the last rank.
    """
    rank, world_size = rank_and_size(group)
    passes = []
    for x, target in zip(inputs, targets):
        if rank > 0:
            x = torch.empty_like(x).requires_grad_()
            exchange([], [(x.data, rank - 1)], group)
        output = stage(x).contiguous()
        if rank < world_size - 1:
            exchange([(output.detach(), rank + 1)], [], group)
        else:
            output = loss_fn(output, target)
        passes.append((x, output))
    for x, output in passes:
        grad_output = torch.empty_like(output) if rank < world_size - 1 else None
        if rank < world_size - 1:
            exchange([], [(grad_output, rank + 1)], group)
        output.backward(grad_output)
        if rank > 0:
            exchange([(x.grad, rank - 1)], [], group)
    return [loss.detach() for _, loss in passes] if rank == world_size - 1 else None


# ---- schedules -----------------------------------------------------------------------------------
#
# Any other order is data: a Schedule (a class of the next part) is a list of actions per rank, and
# has the routes of the microbatches. A route lists the (rank, chunk) pairs that a microbatch passes
# on its way forward; by default it is chunk 0 of every rank. Sizes are at least 1. In the formulas
# F, B, I and W are times of all of a rank's layers, and peak activations count microbatches whose F
# is done and whose B, or W, is not: in chunks, where it says so, of which a rank has v.


class Action(NamedTuple):
    """One slot of a schedule, of one microbatch and one chunk of the rank's layers.

    kind: "F" forward, "B" backward, or its halves, "I" the gradient of the input and "W" that of
    the weights.
    """

    kind: str
    microbatch: int
    chunk: int = 0


def _actions(letters, *microbatches):
    """A rank's actions, written in letters: F B I W of chunk 0, f b i w of chunk 1.

    microbatches: those of chunk 0, and those of chunk 1, if there is one. A letter takes the first
    of them that its kind has not taken yet, where B is an I and a W: "FFIWB" is F0 F1 I0 W0 B1.
    Once a kind has taken all, its letters are left out.
    """
    actions, turns = [], Counter()
    for letter in letters:
        kind, chunk = letter.upper(), int(letter.islower())
        halves = "IW" if kind == "B" else kind
        turn = turns[halves[0], chunk]
        if turn < len(microbatches[chunk]):
            actions.append(Action(kind, microbatches[chunk][turn], chunk))
        for half in halves:
            turns[half, chunk] += 1
    return actions


def _schedule(num_stages, num_microbatches, letters, routes=None):
    """The Schedule in which rank r does letters(r), and each of its chunks every microbatch."""
    every = range(num_microbatches)
    return Schedule([_actions(letters(r), every, every) for r in range(num_stages)], routes)


def naive(num_stages, num_microbatches):
    """One microbatch at a time, forward and back: one rank works at a time. Peak activations: 1."""
    return _schedule(num_stages, num_microbatches, lambda rank: "FB" * num_microbatches)


def gpipe(num_stages, num_microbatches):
    """All forwards, then all backwards, on every rank. Peak activations: m microbatches."""
    m = num_microbatches
    return _schedule(num_stages, m, lambda rank: "F" * m + "B" * m)


def one_f_one_b(num_stages, num_microbatches):
    """Warm up by as many forwards as stages follow; then forward and backward in turn; cool down.

        rank 0   F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5        p = 4, m = 6: the orders, not the times
        rank 1   F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
        rank 2   F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
        rank 3   F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

    Peak activations: min(m, p - stage).
    """
    p, m = num_stages, num_microbatches

    def letters(rank):
        warmup = cooldown = min(p - rank - 1, m)
        return "F" * warmup + "FB" * (m - warmup) + "B" * cooldown

    return _schedule(p, m, letters)


def interleaved(num_stages, num_microbatches, num_chunks=2):
    """1F1B where a rank has v chunks of layers, p stages apart: a bubble of only (p-1)(F+B)/v.

    Microbatches go round in groups of p: a group takes chunk 0 of all ranks, then chunk 1 ...

    p = 2, m = 4, v = 2; small letters are chunk 1:

        rank 0   F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3
        rank 1   F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3

    Peak activations of rank r: min(2(p-r-1) + (v-1)p + 1, mv) chunks. Raises ValueError if p does
    not divide m.
    """
    p, m, v = num_stages, num_microbatches, num_chunks
    if m % p:
        raise ValueError(f"num_microbatches={m} is not a multiple of num_stages={p}")
    forwards, backwards, schedule = [], [], []
    for first in range(0, m, p):
        for chunk in range(v):
            forwards += [Action("F", i, chunk) for i in range(first, first + p)]
            backwards += [Action("B", i, v - 1 - chunk) for i in range(first, first + p)]
    for rank in range(p):
        warmup = 2 * (p - rank - 1) + (v - 1) * p
        steady = [action for pair in zip(forwards[warmup:], backwards) for action in pair]
        cooldown = backwards[len(steady) // 2 :]
        schedule.append(forwards[:warmup] + steady + cooldown)
    return Schedule(schedule, [[(rank, chunk) for chunk in range(v) for rank in range(p)]])


def zb_h1(num_stages, num_microbatches):
    """1F1B with halved backwards: rank r does W r microbatches late, and so fills its waiting.

    p = 4, m = 6:

        rank 0   F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
        rank 1   F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
        rank 2   F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
        rank 3   F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

    Bubble (p-1)(F+B-2W) for m >= p, W <= F, W <= I. Peak activations: min(m, p).
    """
    p, m = num_stages, num_microbatches
    # "IWF" * m is too long: at its end first F is used up, then I, and W is left
    return _schedule(p, m, lambda rank: "F" * (p - rank) + "IF" * rank + "IWF" * m)


def zb_h2(num_stages, num_microbatches):
    """ZB-H1 with about twice the warmup: where F = I = W no rank waits between its first and last.

    p = 2, m = 4:

        rank 0   F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1   F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Idle time of a rank between its first and last action: (p-1)(F+B-3W), for m >= 2p-1, W <= F, I.
    The paper's ranks then begin their next step; ours meet. Peak activations: min(m, 2p-1).
    """
    p, m = num_stages, num_microbatches
    return _schedule(p, m, lambda r: "F" * (2 * (p - r) - 1) + "IF" * (2 * r) + "IWF" * m)


def zb_v(num_stages, num_microbatches):
    """Two chunks a rank, down the ranks and up again in a V: no bubble, at 1F1B's memory, if I = W.

    Rank 0 has the first and the last layers, so that backward begins there. p = 2, m = 4:

        rank 0   F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3
        rank 1   F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3

    Idle time of a rank between its first and last action: (p-1)(I-W), for m >= 2p, W <= F <= I.
    Peak activations: min(2m, 2p) chunks.
    """
    p, m = num_stages, num_microbatches

    def letters(rank):
        warmup = "F" * (2 * (p - rank) - 1) + "fF" * rank + "fiw" * (p - rank)
        steady = "FIWfiw" * max(m - p, p)
        cooldown = "Ii" * rank + "IW" * (p - rank) + "w" * m + "W" * m  # nobody waits for a W
        return warmup + steady + cooldown

    down = [(rank, 0) for rank in range(p)]
    return _schedule(p, m, letters, [down + [(rank, 1) for rank in reversed(range(p))]])


def dualpipe(num_stages, num_microbatches):
    """Two replicas, two directions: half of the microbatches enter at rank 0, half at rank p - 1.

    Chunk 0 of rank r is stage r of the one replica, chunk 1 stage p-1-r of the other. p = 4, m = 8:

        rank 0   F0 F1 F2 f4 i4 w4 f5 F3 b5 f6 B0 b6 f7 B1 b7 I2 W2 I3 W3
        rank 1   F0 f4 F1 f5 F2 b4 f6 B0 F3 b5 f7 B1 b6 B2 i7 I3 w7 W3
        rank 2   f4 F0 f5 F1 f6 B0 F2 b4 f7 B1 F3 b5 B2 b6 I3 i7 W3 w7
        rank 3   f4 f5 f6 F0 I0 W0 F1 f7 B1 F2 b4 B2 F3 b5 B3 i6 w6 i7 w7

    Bubble at most (p/2-1)(F&B+B-3W), of a chunk's times, F&B being that of a forward and a backward
    that overlap; here, where they do not, half of that with F&B = F+B, if F = I = W. Peak
    activations: p+1. Raises ValueError if p is odd, m is odd, or m < 2p.
    """
    p, m, pairs = num_stages, num_microbatches, num_microbatches // 2
    if p % 2 or m % 2 or m < 2 * p:
        raise ValueError(f"num_stages={p} and num_microbatches={m}: both must be even, and m >= 2p")
    halves = range(pairs), range(pairs, m)
    schedule = [_actions(_dualpipe_letters(rank, p, pairs), *halves) for rank in range(p)]
    return Schedule(schedule, [[(r, 0) for r in range(p)], [(r, 1) for r in reversed(range(p))]])


def _dualpipe_letters(rank, p, pairs):
    """In the eight steps of DeepSeek's code. Capitals: what enters at the end that is nearer."""
    depth = min(rank, p - 1 - rank)  # ranks between this one and the nearer end
    inner = p // 2 - 1 - depth  # and the middle
    backwards = "bB" * (depth + 1)
    whole, split = backwards[: depth + 1], backwards[depth + 1 :]
    split = split.replace("b", "i").replace("B", "I")
    late = (split + "I" * inner).replace("i", "w").replace("I", "W")  # W for an I put off, in order
    letters = (
        "F" * (2 * inner)  # step 1: fill the ranks up to the middle
        + "Ff" * (depth + 1)  # step 2: what entered at the other end is here, too
        + "iwf" * inner  # step 3: halved, so that the other end waits less for its gradient
        + "FbfB" * (pairs - p + depth + 1)  # step 4, the main one: a forward beside each backward
        + "bfB" * inner  # step 5: no forward of the nearer end is left
        + (whole + split)  # step 6: nor of the other; W is put off from the middle of it on
        + "".join(weight + "I" for weight in late[:inner])  # step 7: W while a gradient comes
        + late[inner:]  # step 8
    )
    return letters if rank < p // 2 else letters.swapcase()


def forward_only(num_stages, num_microbatches, route=None):
    """Evaluation: the forwards alone, along one route. No graph is kept; inputs may wait."""
    route = route or [(rank, 0) for rank in range(num_stages)]
    # a place of the route works on a microbatch one turn after the place before it
    turns = [(i + turn, turn, i) for i in range(num_microbatches) for turn in range(len(route))]
    schedule = [[] for _ in range(num_stages)]
    for _, turn, microbatch in sorted(turns):
        rank, chunk = route[turn]
        schedule[rank].append(Action("F", microbatch, chunk))
    return Schedule(schedule, [route])


# ---- what passes from action to action -----------------------------------------------------------


class Transfer(NamedTuple):
    """What `action` on rank `source` makes, for an action of rank `destination` that waits for it.

    action: an F, whose output it is, or a B, whose input's gradient it is. Where I and W are in
    place of the B, I makes the gradient, and the Transfer has the B's name all the same.
    """

    action: Action
    source: int
    destination: int


class Schedule(list):
    """A list of actions per rank, and the routes of microbatches through (rank, chunk) places.

    routes: by default one, from rank to rank; of two the first has half of the microbatches, those
        from 0 on.
    needed, made: {(action, rank): the Transfer that it waits for, and that it gives rise to}; there
        is none for W, nor at the ends of a route. Raises ValueError for a rank without actions.
    """

    def __init__(self, actions, routes=None):
        super().__init__(actions)
        if not all(self):
            raise ValueError(f"rank {self.index([])} has no actions")
        self.routes = routes or [[(rank, 0) for rank in range(len(self))]]
        self.num_microbatches = 1 + max(action.microbatch for row in self for action in row)
        self.needed, self.made = {}, {}
        for microbatch in range(self.num_microbatches):
            route = self.route(microbatch)
            self._link("F", microbatch, route)
            self._link("BI", microbatch, route[::-1])

    def route(self, microbatch):
        """The places that a microbatch visits on its way forward: of two routes half take each."""
        return self.routes[microbatch * len(self.routes) // self.num_microbatches]

    def _link(self, kinds, microbatch, places):
        for (source, chunk), (destination, next_chunk) in zip(places, places[1:]):
            transfer = Transfer(Action(kinds[0], microbatch, chunk), source, destination)
            for kind in kinds:
                self.made[Action(kind, microbatch, chunk), source] = transfer
                self.needed[Action(kind, microbatch, next_chunk), destination] = transfer


# ---- simulator -----------------------------------------------------------------------------------


@dataclass
class Timeline:
    """What a schedule does in time."""

    start: list  # per rank, {action: time}
    end: list
    total: float  # the end of the last action
    bubble: list  # per rank, its idle time in total
    idle: list  # per rank, that between its first and its last action
    peak: list  # per rank, most (microbatch, chunk) pairs with forward done and backward not
    transfers: list  # all between ranks in one global order, by the time at which they arrive


def simulate(schedule, forward=1.0, backward=2.0, message=0.0, weight=1.0):
    """Time a schedule. Every rank does its actions in order, each as soon as its input has arrived.

    forward, backward: times of F and B of one chunk; weight: the part of B that is W; message: the
    time from a rank to another. Raises ValueError if a rank does not have each of its microbatches'
    actions once and in order, and if a schedule cannot finish, naming where each rank is stuck.
    """
    _check_actions(schedule)
    duration = {"F": forward, "B": backward, "I": backward - weight, "W": weight}
    start, end, left = [{} for _ in schedule], [{} for _ in schedule], list(map(deque, schedule))
    free = [0.0] * len(schedule)  # when a rank has done what it has begun
    there = {None: 0.0}  # when a Transfer has arrived; None is where there is nothing to wait for
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(left):
            while actions and (needed := schedule.needed.get((actions[0], rank))) in there:
                action = actions.popleft()
                start[rank][action] = max(free[rank], there[needed])
                free[rank] = end[rank][action] = start[rank][action] + duration[action.kind]
                if made := schedule.made.get((action, rank)):
                    there[made] = free[rank] + (message if made.destination != rank else 0)
                progress = True
    if any(left):
        stuck = [(rank, actions[0]) for rank, actions in enumerate(left) if actions]
        where = ", ".join(f"rank {rank} at {a.kind}{a.microbatch}" for rank, a in stuck)
        raise ValueError(f"the schedule cannot finish: {where} waiting for what never comes")
    held = {"F": 1, "B": -1, "I": 0, "W": -1}
    peak = [max(accumulate(held[action.kind] for action in actions)) for actions in schedule]
    work = [sum(duration[action.kind] for action in actions) for actions in schedule]
    begun = [start[rank][actions[0]] for rank, actions in enumerate(schedule)]
    bubble = [max(free) - own for own in work]
    idle = [done - first - own for done, first, own in zip(free, begun, work)]
    transfers = [t for t in there if t is not None and t.source != t.destination]
    transfers.sort(key=lambda transfer: (there[transfer], transfer))
    return Timeline(start, end, max(free), bubble, idle, peak, transfers)


def _check_actions(schedule):
    """Along its route a microbatch has F and B, or F, I and W, in order; or all have F alone."""
    kinds = defaultdict(str)
    for rank, actions in enumerate(schedule):
        for kind, microbatch, chunk in actions:
            kinds[rank, microbatch, chunk] += kind
    right = ("FB", "FIW") if any(found != "F" for found in kinds.values()) else ("F",)
    for microbatch in range(schedule.num_microbatches):
        for rank, chunk in schedule.route(microbatch):
            if (found := kinds.pop((rank, microbatch, chunk), "")) not in right:
                where = f"rank {rank}, {microbatch=}, {chunk=}"
                raise ValueError(f"{where}: {found!r} is none of {right}")
    if kinds:
        raise ValueError(f"(rank, microbatch, chunk) on no route: {list(kinds)}")


def draw(schedule):
    """The timeline as text: a row per rank, a cell per slot of time; chunk 0 in large letters."""
    width = len(f"F{schedule.num_microbatches - 1}")
    timeline, rows = simulate(schedule), []
    for rank, start in enumerate(timeline.start):
        cells = ["." * width] * int(timeline.total)
        for action, begin in start.items():
            letter = action.kind.lower() if action.chunk else action.kind
            for slot in range(int(begin), int(timeline.end[rank][action])):
                cells[slot] = f"{letter}{action.microbatch}".ljust(width)
        rows.append(f"rank {rank}  " + "".join(cells))
    return "\n".join(rows)


def trace_events(timeline, slot=1000):
    """The timeline as events of Chrome's trace format; a unit of time is `slot` microseconds."""
    events = []
    for rank, (start, end) in enumerate(zip(timeline.start, timeline.end)):
        for action, begin in start.items():
            times = {"ts": begin * slot, "dur": (end[action] - begin) * slot}
            name, args = f"{action.kind}{action.microbatch}", {"chunk": action.chunk}
            events.append({"name": name, "ph": "X", "pid": 0, "tid": rank, "args": args, **times})
    return events


# ---- the halves of a backward --------------------------------------------------------------------


class WeightGradStore:
    """Where the first half of a backward, I, leaves the products of weights' gradients for W.

    While it is open, which is while an I runs, a layer may put(parameter, product) in place of
    computing the parameter's gradient, which is what product() returns. While it `adds`, a layer
    may add a weight's gradient to .grad itself, which saves autograd a pass over it: that is not in
    the action that completes a stage's gradients, since hooks of replicas wait for autograd.
    """

    products, adds = None, False

    @property
    def open(self):
        return self.products is not None

    def put(self, parameter, product):
        self.products.append((parameter, product))

    @contextmanager
    def during(self, products=None, adds=False):
        """Open for `products`, a list to which put() appends; closed if it is None."""
        self.products, self.adds = products, adds
        try:
            yield
        finally:
            self.products, self.adds = None, False


class DeferredLinear(nn.Linear):
    """A linear layer that knows the store. Its bias, and other layers, get their gradients in I."""

    def __init__(self, *sizes, defer):
        super().__init__(*sizes)
        self.defer = defer

    def forward(self, x):
        return _DeferredLinear.apply(autocasted(x), self.weight, self.bias, self.defer)


class _DeferredLinear(torch.autograd.Function):
    """forward: y = x W^T + b; backward: the gradients of x and b, and that of W, or this later"""

    @staticmethod
    def forward(ctx, x, weight, bias, defer):
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.defer = weight, defer
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad_y):
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        x, rows = x.flatten(0, -2), grad_y.flatten(0, -2)
        put_off, product = ctx.defer.open, lambda: rows.t() @ x
        if wants_weight and put_off:
            ctx.defer.put(ctx.weight, product)
        grad_x = grad_y @ weight.to(grad_y.dtype) if wants_x else None
        grad_weight = product() if wants_weight and not put_off else None
        return grad_x, grad_weight, rows.sum(0) if wants_bias else None, None


def _add_products(products):
    """Empty the list, adding each parameter's gradient to it once, so that its hooks run once."""
    uses, sums = Counter(parameter for parameter, _ in products), {}
    while products:  # a product is let go, and the activations with it, once it is computed
        parameter, product = products.pop(0)
        dtype = parameter.grad_dtype if parameter.is_leaf else None  # may be fp32 of a bf16 weight
        gradient = product().to(dtype or parameter.dtype)
        sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
        uses[parameter] -= 1
        if not uses[parameter]:
            torch.autograd.backward(parameter, sums.pop(parameter))


# ---- messages ------------------------------------------------------------------------------------
#
# Transfers have one global order, and a rank posts its own in that order: a receive as soon as all
# before it are posted, a send as soon as its tensor exists as well. Nothing deadlocks then, whether
# sends are buffered (gloo) or meet their receive in issue order (NCCL). To see it, take the first
# transfer that is not done. All before it are done, so its receive is posted. Its tensor depends on
# transfers before it alone, since an action's result leaves after its input has arrived: so the
# tensor comes to exist, and the send is posted.
#
# The order is that of arrival in a simulation where messages take a little time. If they took none,
# a send and a receive of one moment could come in either order: a receive behind a send whose
# tensor the rank is yet to make would be posted an action late, and the other rank wait.

SHORT = 1 / 128  # that little time, as a part of a forward's


class _Messenger:
    """Posts one rank's transfers of one step.

    transfers: this rank's, in the global order. like: size, dtype and device of what travels.
    leaving: {transfer: tensor} of what the rank has made, for others or its own other chunk.
    """

    def __init__(self, transfers, like, group):
        self.like, self.group = like, group
        self.rank, self.num_stages = rank_and_size(group)
        self.unposted, self.sent = deque(transfers), deque()
        self.leaving, self.arriving = {}, {}  # the latter: transfer -> (buffer, its message)

    def post(self):
        """Post what can be posted without waiting for a tensor of this rank."""
        while self.unposted:
            transfer = self.unposted[0]
            if transfer.destination == self.rank:
                buffer = torch.empty(**self.like)
                message = exchange([], [(buffer, transfer.source)], self.group, async_op=True)
                self.arriving[transfer] = buffer, message
            elif transfer in self.leaving:
                sends = [(self.leaving.pop(transfer), transfer.destination)]
                self.sent.append(exchange(sends, [], self.group, async_op=True))
                if len(self.sent) > self.num_stages:  # a tensor lives until its send is waited for
                    self.sent.popleft().wait()
            else:
                return
            self.unposted.popleft()

    def receive(self, transfer):
        """The tensor of a transfer, once it is there; None of None, where a route begins."""
        if transfer is None:
            return None
        if transfer.source == self.rank:  # from the rank's own other chunk
            return self.leaving.pop(transfer)
        buffer, message = self.arriving.pop(transfer)
        message.wait()
        return buffer

    def finish(self):
        """Post and wait for what is left."""
        self.post()
        for message in self.sent:
            message.wait()


# ---- executor ------------------------------------------------------------------------------------
#
# What a rank does in an action of a stage that is neither the first nor the last:
#
#     F   waits for x from the stage before; runs the stage; keeps x and the graph of the output;
#         sends the output to the next stage
#     B   waits for the output's gradient from the next stage; autograd goes back through the graph,
#         adds to the parameters' gradients and frees the graph; x's gradient is sent to the stage
#         before
#     I   the same, but layers put products of weights off, and keep what these need
#     W   computes them and adds to the parameters' gradients; has no message of the pipeline
#
# The last stage has the loss in place of the output. Where there are replicas, a stage is in
# DistributedDataParallel or FullyShardedDataParallel: in its last B or W the sums over them begin,
# and all others run under no_sync().
#
# The overlap: messages travel while ranks compute. Receives are posted ahead, and a send is waited
# for when num_stages later ones are posted; else a rank waits in its schedule's bubble alone.
#
# How torch.distributed.pipelining differs: each schedule is a class; shapes are sent ahead in the
# first step; messages are exchanged between two actions and waited for there, or are items of a
# rank's list; any module's backward is halved, by walking its graph twice, while here a layer knows
# what to put off; gradients are divided by the number of microbatches, while here loss_fn returns a
# share; its pipeline() splits a model, while here a stage is any module.


class Pipeline:
    """Runs one rank of a schedule.

    stage: its module, or a list of one per chunk; one without layers passes on what it gets.
    schedule: a Schedule, the same on all ranks of the group.
    loss_fn: loss_fn(output, target, *loss_arguments of step()), called at the end of a route,
        returns the microbatch's share of the loss; the step's is their sum, divided by nothing.
    shape, dtype, device: of what each stage but the last makes of a microbatch; the last two are
        PyTorch's defaults if not given.
    defer: the WeightGradStore into which layers of the stages put products off.
    sync_each: gradients are summed over replicas with every microbatch (ZeRO-2, -3), not the last.

    To keep the inputs of a stage alone, and run it again in backward, as GPipe does, give
    checkpoints (torch.utils.checkpoint) as stages. Of two routes (DualPipe) each has a replica of
    all layers: see sum_replicas().

    Collective. Raises ValueError on all ranks if their schedules differ; on one if there is not one
    stage per chunk, or a stage is PyTorch's DistributedDataParallel.
    """

    def __init__(
        self, stage, schedule, loss_fn, group=None, *, shape, dtype=None, device=None, defer=None,
        sync_each=False,
    ):
        self.rank, _ = rank_and_size(group)
        self.stages = list(stage) if isinstance(stage, (list, tuple, nn.ModuleList)) else [stage]
        self.schedule, self.loss_fn, self.group = schedule, loss_fn, group
        self.defer, self.sync_each = defer or WeightGradStore(), sync_each
        _check_schedule(schedule, self.stages, group)
        dtype = dtype or torch.get_default_dtype()
        self.like = {"size": torch.Size(shape), "dtype": dtype, "device": device}
        self.actions, routes = schedule[self.rank], schedule.routes
        # the action that completes a stage's gradients: the last one stays
        self.last_backward = {self.stages[a.chunk]: a for a in self.actions if a.kind != "F"}
        self.training = bool(self.last_backward)  # or else an evaluation, forward_only()
        # the chunks of this rank where routes begin, and end
        self.first_chunks = {chunk for (rank, chunk), *_ in routes if rank == self.rank}
        self.last_chunks = {chunk for *_, (rank, chunk) in routes if rank == self.rank}
        transfers = simulate(schedule, message=SHORT).transfers
        self.transfers = [t for t in transfers if self.rank in (t.source, t.destination)]
        self.midway = False

    def step(self, inputs=None, targets=None, *loss_arguments):
        """Do every action once.

        inputs, targets: (B, ...), cut along B into microbatches; needed by ranks where routes
        begin, and end. loss_arguments: passed to loss_fn. Gradients are added to the parameters'.
        Returns the summed loss, detached, on ranks where routes end and None on the others.
        Raises ValueError for batches of a B that m does not divide, and for a stage's output of
        another shape or dtype; RuntimeError after a step that failed amid its messages.
        """
        _check_batches(self, inputs, targets)
        if self.midway:
            raise RuntimeError("an earlier step() failed: its messages are still under way")
        m = self.schedule.num_microbatches
        self.inputs, self.targets = ([] if x is None else x.chunk(m) for x in (inputs, targets))
        self.loss, self.loss_arguments = None, loss_arguments
        # by action[1:], which is (microbatch, chunk):
        self.in_flight = {}  # (input, start of backward), until then
        self.put_off = {}  # products of the weights' gradients, until W
        messenger = _Messenger(self.transfers, self.like, self.group)
        self.midway = bool(self.transfers)
        for action in self.actions:
            messenger.post()
            needed = self.schedule.needed.get((action, self.rank))
            result = self.perform(action, messenger.receive(needed))
            if made := self.schedule.made.get((action, self.rank)):
                messenger.leaving[made] = result
        messenger.finish()
        self.midway, self.inputs, self.targets, self.loss_arguments = False, (), (), ()
        return self.loss

    def perform(self, action, received):
        """Do an action with what it has waited for; returns what leaves. A tracer may wrap it."""
        method = {"F": self._forward, "W": self._weights}.get(action.kind, self._backward)
        return method(action, received)

    def _forward(self, action, x):
        if x is None:
            x = self.inputs[action.microbatch]
        elif self.training:
            x.requires_grad_()
        output = self.stages[action.chunk](x)
        is_last = action.chunk in self.last_chunks
        if is_last:
            output = self.loss_fn(output, self.targets[action.microbatch], *self.loss_arguments)
            self.loss = output.detach() if self.loss is None else self.loss + output.detach()
        elif (output.shape, output.dtype) != (self.like["size"], self.like["dtype"]):
            made = f"{tuple(output.shape)} {output.dtype}"
            raise ValueError(f"rank {self.rank} made {made}, to be sent like {self.like}")
        if self.training:
            # its place in the graph, not the output itself, which need not live once it is sent;
            # there is none where all layers before it are frozen
            start = get_gradient_edge(output) if output.requires_grad or is_last else None
            self.in_flight[action[1:]] = x, start
        return output.detach().contiguous()

    def _backward(self, action, grad_output):
        """B, or I, during which the store is open: then there is a list for its products."""
        x, start = self.in_flight.pop(action[1:])
        products = [] if action.kind == "I" else None
        with self._no_sync(action), self.defer.during(products, adds=not self._syncs(action)):
            if start is not None:
                torch.autograd.backward(start, grad_output)
        if products is not None:
            self.put_off[action[1:]] = products
        return None if action.chunk in self.first_chunks else x.grad

    def _weights(self, action, _):
        products, stage = self.put_off.pop(action[1:]), self.stages[action.chunk]
        if self._syncs(action) and hasattr(stage, "start_grad_sync"):  # all others are complete
            stage.start_grad_sync(awaited={parameter for parameter, _ in products})
        with self._no_sync(action):
            _add_products(products)

    def _syncs(self, action):
        """Whether the sums over replicas begin in this action, of a halved backward in its W."""
        is_last = action == self.last_backward[self.stages[action.chunk]]
        return is_last or (self.sync_each and action.kind != "I")

    def _no_sync(self, action):
        stage = self.stages[action.chunk]
        return nullcontext() if self._syncs(action) else getattr(stage, "no_sync", nullcontext)()


def _check_schedule(schedule, stages, group):
    """Raise on all ranks if their schedules differ. Also all ranks' first batch, as NCCL wants."""
    rank, num_stages = rank_and_size(group)
    every = gather_objects((list(schedule), schedule.routes), group)
    if any(other != every[0] for other in every):
        raise ValueError("the ranks of the group have different schedules")
    if len(schedule) != num_stages:
        raise ValueError(f"a schedule for {len(schedule)} stages in a group of {num_stages} ranks")
    num_chunks = 1 + max(action.chunk for action in schedule[rank])
    if len(stages) != num_chunks:
        raise ValueError(f"rank {rank} has {len(stages)} stages for num_chunks={num_chunks}")
    if any(isinstance(stage, nn.parallel.DistributedDataParallel) for stage in stages):
        raise ValueError("torch's DistributedDataParallel sums what later microbatches add to")


def _check_batches(pipeline, inputs, targets):
    m, first, last = pipeline.schedule.num_microbatches, pipeline.first_chunks, pipeline.last_chunks
    for name, batch, needed in (("inputs", inputs, first), ("targets", targets, last)):
        rows = 0 if batch is None else len(batch)
        if rows % m or needed and not rows:
            where = f"on rank {pipeline.rank}, not divisible by num_microbatches={m}"
            raise ValueError(f"{name} has {rows} rows {where}")


# ---- replicas ------------------------------------------------------------------------------------


def sum_replicas(stages, group=None):
    """Sum the gradients of DualPipe's replicas: chunk 0 here is chunk 1 of the mirrored rank.

    stages: those of a Pipeline, of which both replicas train the same parameters. Collective; to be
    called once the gradients of a batch are complete, be it of one step or several. Both replicas
    then have the same bits.
    """
    rank, world_size = rank_and_size(group)
    first, second = ([p.grad for p in stage.parameters() if p.requires_grad] for stage in stages)
    if first + second:
        flat = torch.cat([grad.flatten() for grad in first + second])
        other, mirror = torch.empty_like(flat), world_size - 1 - rank
        exchange([(flat, mirror)], [(other, mirror)], group)
        parts = other.split([grad.numel() for grad in second + first])
        for grad, part in zip(second + first, parts):
            grad.add_(part.view_as(grad))


# ---- cost ----------------------------------------------------------------------------------------


SCHEDULES = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe": dualpipe,
}


def bubble_time(
    schedule, num_stages, num_microbatches, forward=1.0, backward=2.0, weight=1.0, num_chunks=2
):
    """A rank's idle time, where F, B and its part W take these times for all of a rank's layers.

    Ranks of zb-h2 and zb-v begin and end one after the other: there it is the idle time between a
    rank's first and last action. dualpipe's is an upper bound. zb-h1, zb-h2 and zb-v are so from p,
    2 p - 1 and 2 p microbatches on, if W <= F and W <= B - W, of zb-v if F <= B - W.
    """
    rounds, F, B, W = num_stages - 1, forward, backward, weight
    return {
        "naive": rounds * num_microbatches * (F + B),
        "gpipe": rounds * (F + B),
        "1f1b": rounds * (F + B),
        "interleaved": rounds * (F + B) / num_chunks,
        "zb-h1": rounds * (F + B - 2 * W),
        "zb-h2": rounds * (F + B - 3 * W),
        "zb-v": rounds * (B - 2 * W),
        "dualpipe": (num_stages / 2 - 1) * (F + B + B - 3 * W),
    }[schedule]


def peak_activations(schedule, num_stages, num_microbatches, num_chunks=2):
    """The most microbatches, each through all of a rank's layers, that the fullest rank holds."""
    p, m, v = num_stages, num_microbatches, num_chunks
    return {
        "naive": 1,
        "gpipe": m,
        "1f1b": min(m, p),
        "interleaved": min(2 * (p - 1) + (v - 1) * p + 1, m * v) / v,
        "zb-h1": min(m, p),
        "zb-h2": min(m, 2 * p - 1),
        "zb-v": min(m, p),
        "dualpipe": p + 1,
    }[schedule]


def pipeline_bytes(stage, num_stages, num_microbatches, microbatch_bytes):
    """Bytes `stage`, a rank of one chunk, sends in a step: to the next and to the previous one."""
    boundaries = (stage < num_stages - 1) + (stage > 0)
    return boundaries * num_microbatches * microbatch_bytes


# ---- demonstration -------------------------------------------------------------------------------


def _demonstrate():
    rank, world_size = rank_and_size()
    B, D, m = 16, 32, 8
    torch.manual_seed(0)
    store = WeightGradStore()
    make_stage = lambda: nn.Sequential(DeferredLinear(D, D, defer=store), nn.Tanh())
    model = nn.Sequential(*[make_stage() for _ in range(world_size)]).double()
    stage = model[rank]
    inputs, targets = torch.randn(2, B, D, dtype=torch.float64)
    loss_fn = lambda output, target: (output - target).square().sum() / (B * D)
    loss_fn(model(inputs), targets).backward()
    expected = [parameter.grad for parameter in stage.parameters()]
    like = {"shape": (B // m, D), "dtype": inputs.dtype}
    for name in ("gpipe", "1f1b", "zb-h1"):
        model.zero_grad()
        pipeline = Pipeline(stage, SCHEDULES[name](world_size, m), loss_fn, defer=store, **like)
        with count_bytes() as traffic:
            pipeline.step(inputs, targets)
        pairs = zip(stage.parameters(), expected)
        error = max((parameter.grad - grad).abs().max().item() for parameter, grad in pairs)
        claimed = pipeline_bytes(rank, world_size, m, inputs.nbytes // m)
        if rank == 0:
            print(name)
            _show(*figures(name, world_size, m))
            print(f"rank 0 sent {traffic.bytes()} bytes, claimed {claimed}")
            print(f"largest difference from one process's gradients: {error:.1e}\n")


def figures(name, num_stages, num_microbatches):
    """A schedule, its timeline, and (claimed, simulated) bubble and peak, if F, I and W take 1."""
    schedule = SCHEDULES[name](num_stages, num_microbatches)
    parts = 2 if name in ("interleaved", "zb-v") else 1  # into which a rank's layers are cut
    timeline = simulate(schedule, 1 / parts, 2 / parts, weight=1 / parts)
    bubble = max(timeline.idle if name in ("zb-h2", "zb-v") else timeline.bubble)
    bubbles = bubble_time(name, num_stages, num_microbatches), bubble
    peaks = peak_activations(name, num_stages, num_microbatches), max(timeline.peak) / parts
    return schedule, timeline, bubbles, peaks


def _show(schedule, _, bubbles, peaks):
    print(draw(schedule))
    print("bubble, F of all layers of a rank = 1: claimed {:g}, simulated {:g}".format(*bubbles))
    print("peak activations, in microbatches: claimed {:g}, simulated {:g}".format(*peaks))


def _compare(num_stages, num_microbatches):
    print(f"{num_stages} stages, {num_microbatches} microbatches; F = 1, B = 2, of which W = 1\n")
    print(f"{'':12}{'bubble':>18}{'peak activations':>24}{'total':>9}")
    print(f"{'':12}{'claimed simulated':>18}{'claimed simulated':>24}")
    for name in SCHEDULES:
        try:
            _, timeline, bubbles, peaks = figures(name, num_stages, num_microbatches)
        except ValueError as error:
            print(f"{name:12}{error}")
            continue
        numbers = *bubbles, *peaks, timeline.total
        print("{:12}{:8.1f}{:10.1f}{:14.1f}{:10.1f}{:9.1f}".format(name, *numbers))


def main():
    """The command line: draw one schedule, or compare all."""
    parser = argparse.ArgumentParser(description="Draw or compare pipeline schedules.")
    parser.add_argument("--schedule", choices=SCHEDULES)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--trace", metavar="FILE", help="write the timeline for Perfetto")
    args = parser.parse_args()
    if args.schedule is None:
        _compare(args.stages, args.microbatches)
        return
    try:
        found = figures(args.schedule, args.stages, args.microbatches)
    except ValueError as error:
        parser.error(str(error))
    _show(*found)
    if args.trace:
        with open(args.trace, "w") as file:
            json.dump({"traceEvents": trace_events(found[1])}, file)


if __name__ == "__main__":
    run_ranks(_demonstrate) if "RANK" in os.environ else main()
