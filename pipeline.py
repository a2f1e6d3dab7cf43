"""Pipeline parallelism: layers are cut into stages, one per rank; microbatches flow through them.

With one batch only one stage works at a time. Cut into m microbatches, the batch fills the
pipeline, and what stays idle is the filling and the draining, the bubble. Here p = 4 stages and
m = 4 microbatches; a forward (F) takes one slot of time, a backward (B) two, a dot is an idle slot:

    GPipe: all forward, then all backward          1F1B: a backward as soon as there is one to do
    F0F1F2F3..................B0B0B1B1B2B2B3B3     F0F1F2F3............B0B0..B1B1..B2B2..B3B3
    ..F0F1F2F3............B0B0B1B1B2B2B3B3....     ..F0F1F2........B0B0F3B1B1..B2B2..B3B3....
    ....F0F1F2F3......B0B0B1B1B2B2B3B3........     ....F0F1....B0B0F2B1B1F3B2B2..B3B3........
    ......F0F1F2F3B0B0B1B1B2B2B3B3............     ......F0B0B0F1B1B1F2B2B2F3B3B3............

The bubble is the same, (p-1)(F+B) on every rank, (p-1)/m of the ideal time m(F+B). What 1F1B saves
is memory: a stage holds the activations of min(m, p - stage) microbatches, not of m.

Of a backward only the gradient of its input (I) is waited for by others; that of the weights (W),
about half of the work, can fill idle slots. Other schedules cut a rank's layers into chunks, or let
microbatches enter from both ends.

A schedule is data: the list of each rank's actions, and the routes that microbatches take. One
simulator times it, checks it, and derives the one global order of messages; one executor runs it.
A message is a microbatch's activations, batch x sequence x width elements, or their gradient: one
each way per microbatch and boundary.

Huang et al., "GPipe", 2019. Narayanan et al., "PipeDream", 2019 and "Memory-Efficient
Pipeline-Parallel DNN Training", 2021 (PipeDream-flush, called 1F1B here and in Megatron-LM).
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021
(interleaved). Qi et al., "Zero Bubble Pipeline Parallelism", 2024, and "Pipeline Parallelism with
Controllable Memory", 2024 (ZB-V). DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024 (DualPipe).

    torchrun --nproc-per-node 4 pipeline.py   simulated and claimed bubble and memory; counted bytes
    python pipeline.py --schedule zb-h2 --stages 4 --microbatches 8 [--trace FILE]    one, drawn
    python pipeline.py --stages 4 --microbatches 8                                    all, compared
"""

import argparse
import json
import os
import sys
import time
from collections import Counter, deque
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from collectives import (
    autocasted, count_bytes, exchange, gather_objects, rank_and_size, run_ranks,
)

# ---- the idea ------------------------------------------------------------------------------------


def gpipe_step(stage, inputs, targets, loss_fn, group=None):
    """A step of GPipe in plain words: microbatches go forward, then their gradients come back.

    inputs, targets: lists of microbatches, given to every rank; each stage keeps the inputs' shape.
    Gradients add up in the parameters. Returns the microbatches' losses on the last rank.
    """
    rank, world_size = rank_and_size(group)
    passes = []
    for x, target in zip(inputs, targets):
        if rank > 0:
            x = torch.empty_like(x).requires_grad_()
            exchange([], [(x.data, rank - 1)], group)
        output = stage(x)
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


# ---- stages --------------------------------------------------------------------------------------


def cheapest_cuts(costs, parts):
    """The places [0, ..., len(costs)] between runs of a list, none empty, whose sums are smallest.

    First the largest sum is as small as can be, then the second, and so on; of equals the runs in
    front are the shortest.
    """
    sums = [0, *accumulate(costs)]
    best = {0: ([], [0])}  # {length: (sums of its runs, largest first, their places)}
    for left in reversed(range(parts)):  # runs to come
        best = {
            end: min(
                (sorted([*found, sums[end] - sums[cuts[-1]]], reverse=True), [*cuts, end])
                for found, cuts in best.values()
                if cuts[-1] < end
            )
            for end in range(parts - left, len(costs) - left + 1)
        }
    return best[len(costs)][1]


# ---- schedules -----------------------------------------------------------------------------------
#
# Any order instead of that one, as data: a list of actions per rank. A Schedule, below, has beside
# it the routes of microbatches, as (rank, chunk) by (rank, chunk): by default from rank to rank.


class Action(NamedTuple):
    """One slot of a schedule, of one microbatch and one chunk of the rank's layers.

    kind: "F" forward, "B" backward, or its halves, "I" the gradient of the input and "W" that of
    the weights.
    """

    kind: str
    microbatch: int
    chunk: int = 0


def _check_sizes(num_stages, num_microbatches):
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            f"num_stages={num_stages} and num_microbatches={num_microbatches} must be at least 1"
        )


def _actions(letters, *microbatches):
    """A rank's actions, written in letters: F B I W of chunk 0, f b i w of chunk 1.

    Each is of its kind's next microbatch, of those of its chunk: "FFIWB" is F0 F1 I0 W0 B1. Where
    none is left it is nothing.
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
    _check_sizes(num_stages, num_microbatches)
    every = range(num_microbatches)
    return Schedule([_actions(letters(r), every, every) for r in range(num_stages)], routes)


# Each of the following returns a Schedule, and raises ValueError for sizes below 1.


def naive(num_stages, num_microbatches):
    """One microbatch at a time, forward and back: a single rank works. Peak activations: 1."""
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
    _check_sizes(num_stages, num_microbatches)
    if num_chunks < 1 or num_microbatches % num_stages:
        raise ValueError(
            f"num_microbatches={num_microbatches} is not a multiple of num_stages={num_stages}, "
            f"or num_chunks={num_chunks} is not at least 1"
        )
    p, m, v = num_stages, num_microbatches, num_chunks
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

    Bubble (p-1)(F+B-2W) for m >= p. Peak activations: min(m, p).
    """
    p, m = num_stages, num_microbatches
    # "IWF" * m is too long: at its end first F is used up, then I, and W is left
    return _schedule(p, m, lambda rank: "F" * (p - rank) + "IF" * rank + "IWF" * m)


def zb_h2(num_stages, num_microbatches):
    """ZB-H1 with about twice the warmup: where F = I = W no rank waits between its first and last.

    p = 2, m = 4:

        rank 0   F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1   F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Idle time of a rank between its first and last action: (p-1)(F+B-3W), for m >= 2p-1. Peak
    activations: min(m, 2p-1).
    """
    p, m = num_stages, num_microbatches
    return _schedule(p, m, lambda r: "F" * (2 * (p - r) - 1) + "IF" * (2 * r) + "IWF" * m)


def zb_v(num_stages, num_microbatches):
    """Two chunks a rank, down the ranks and up again in a V: ZB-H2's bubble at 1F1B's memory.

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

    Bubble (p/2-1)(F&B+B-3W), where F&B is the time of a forward and a backward that overlap; less
    where, as here, one comes after the other. Peak activations: p+1. Raises ValueError if p is odd,
    m is odd, or m < 2p.
    """
    _check_sizes(num_stages, num_microbatches)
    p, pairs = num_stages, num_microbatches // 2
    if p % 2 or num_microbatches % 2 or num_microbatches < 2 * p:
        raise ValueError(
            f"num_stages={num_stages} and num_microbatches={num_microbatches}: DualPipe needs both "
            "even, and two microbatches a stage or more"
        )
    halves = range(pairs), range(pairs, 2 * pairs)
    schedule = [_actions(_dualpipe_letters(rank, p, pairs), *halves) for rank in range(p)]
    return Schedule(schedule, [[(r, 0) for r in range(p)], [(r, 1) for r in reversed(range(p))]])


def _dualpipe_letters(rank, p, pairs):
    """In the eight steps of DeepSeek's code. Capitals: what enters at the end that is nearer."""
    depth = min(rank, p - 1 - rank)  # ranks between this one and the nearer end
    above = p // 2 - 1 - depth  # and the middle
    backwards = "bB" * (depth + 1)
    whole, halves = backwards[: depth + 1], backwards[depth + 1 :]
    halves = halves.replace("b", "i").replace("B", "I")
    late = (halves + "I" * above).replace("i", "w").replace("I", "W")  # each I's, in their order
    letters = (
        "F" * (2 * above)  # step 1: fill the ranks up to the middle
        + "Ff" * (depth + 1)  # step 2: what entered at the other end is here, too
        + "iwf" * above  # step 3: halved, so that the other end waits less for its gradient
        + "FbfB" * (pairs - p + depth + 1)  # step 4, the main one: a forward beside each backward
        + "bfB" * above  # step 5: no forward of the nearer end is left
        + (whole + halves)  # step 6: nor of the other; W is put off from the middle of it on
        + "".join(weight + "I" for weight in late[:above])  # step 7: W while a gradient comes
        + late[above:]  # step 8
    )
    return letters if rank < p // 2 else letters.swapcase()


def forward_only(num_stages, num_microbatches, route=None):
    """Evaluation: the forwards alone, along one route; the executor keeps no activations."""
    _check_sizes(num_stages, num_microbatches)
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
    """What `action`, F or B, on rank `source` makes, and `chunk` of rank `destination` waits for.

    A gradient is said to be of the B, also where it is an I that makes it.
    """

    action: Action
    source: int
    destination: int
    chunk: int


class Schedule(list):
    """A list of actions per rank, and the routes of microbatches through (rank, chunk) places.

    routes: by default one, from rank to rank; of two the first has half of the microbatches, those
        from 0 on.
    needed, made: {(action, rank): the Transfer that it waits for, and that it gives rise to}; there
    is none for W, nor at the ends of a route.
    Raises ValueError for a rank without actions, and what is not an action.
    """

    def __init__(self, actions, routes=None):
        super().__init__([_as_action(rank, a) for a in row] for rank, row in enumerate(actions))
        if [] in self or not self:
            raise ValueError(f"rank {self.index([]) if self else 0} of {len(self)} has no actions")
        self.routes = routes or [[(rank, 0) for rank in range(len(self))]]
        self.num_microbatches = 1 + max(action.microbatch for row in self for action in row)
        self.needed, self.made = {}, {}
        for microbatch in range(self.num_microbatches):
            route = self.route(microbatch)
            self._link("F", microbatch, route)
            self._link("BI", microbatch, route[::-1])

    def route(self, microbatch):
        """The places that a microbatch visits on its way forward."""
        return self.routes[microbatch * len(self.routes) // self.num_microbatches]

    def _link(self, kinds, microbatch, places):
        for (source, chunk), (destination, next_chunk) in zip(places, places[1:]):
            action = Action(kinds[0], microbatch, chunk)
            transfer = Transfer(action, source, destination, next_chunk)
            for kind in kinds:
                self.made[Action(kind, microbatch, chunk), source] = transfer
                self.needed[Action(kind, microbatch, next_chunk), destination] = transfer


def _as_action(rank, action):
    """An Action of one, or of a tuple like one."""
    if isinstance(action, tuple) and len(action) in (2, 3) and action[0] in tuple("FBIW"):
        if all(isinstance(number, int) and number >= 0 for number in action[1:]):
            return Action(*action)
    raise ValueError(f"rank {rank} has {action!r}, which is no Action(kind, microbatch, chunk)")


# ---- simulator -----------------------------------------------------------------------------------


@dataclass
class Timeline:
    """What a schedule does in time."""

    start: list  # per rank, {action: time}
    end: list
    total: float  # the end of the last action
    bubble: list  # per rank, its idle time in total
    idle: list  # per rank, that between its first and its last action
    peak: list  # per rank, most microbatches of a chunk whose forward is done and backward is not
    transfers: list  # all between ranks in one global order, by the time at which they arrive


def simulate(schedule, forward=1.0, backward=2.0, message=0.0, weight=1.0):
    """Time a schedule. Every rank does its actions in order, each as soon as its input has arrived.

    forward, backward: times of F and B of one chunk; weight: the part of B that is W; message: the
    time from a rank to another. Raises ValueError if a rank does not have each of its microbatches'
    actions once, and if the schedule cannot finish, naming the action that each rank is stuck at.
    """
    schedule = schedule if isinstance(schedule, Schedule) else Schedule(schedule)
    _check_actions(schedule)
    duration = {"F": forward, "B": backward, "I": backward - weight, "W": weight}
    start, end, left = [{} for _ in schedule], [{} for _ in schedule], list(map(deque, schedule))
    free = [0.0] * len(schedule)  # when a rank has done what it has begun
    there = {None: 0.0}  # when a Transfer has arrived, and an (action, rank) is done; None: nothing
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(left):
            while actions and (needed := _needed(schedule, actions[0], rank)) in there:
                action = actions.popleft()
                start[rank][action] = max(free[rank], there[needed])
                free[rank] = start[rank][action] + duration[action.kind]
                there[action, rank] = end[rank][action] = free[rank]
                if made := schedule.made.get((action, rank)):
                    there[made] = free[rank] + (message if made.destination != rank else 0)
                progress = True
    if any(left):
        stuck = [(rank, actions[0]) for rank, actions in enumerate(left) if actions]
        where = ", ".join(f"rank {rank} at {a.kind}{a.microbatch}" for rank, a in stuck)
        raise ValueError(f"the schedule cannot finish: {where} waiting for what never comes")
    transfers = [t for t in there if isinstance(t, Transfer) and t.source != t.destination]
    transfers.sort(key=lambda transfer: (there[transfer], transfer))
    return _timeline(schedule, start, end, transfers)


def _needed(schedule, action, rank):
    """The Transfer that `action` waits for; else the F before its B or I, the I before its W."""
    earlier = {"F": None, "W": "I"}.get(action.kind, "F")
    own = earlier and (action._replace(kind=earlier), rank)
    return schedule.needed.get((action, rank), own)


def _timeline(schedule, start, end, transfers):
    """The Timeline of these times."""
    total = max(max(times.values()) for times in end)
    work, idle = [], []
    for first, last in zip(start, end):
        work.append(sum(last[action] - first[action] for action in first))
        idle.append(max(last.values()) - min(first.values()) - work[-1])
    held = {"F": 1, "B": -1, "I": 0, "W": -1}
    peak = [max(accumulate(held[action.kind] for action in actions)) for actions in schedule]
    return Timeline(start, end, total, [total - done for done in work], idle, peak, transfers)


def _check_actions(schedule):
    """Every microbatch has, at each place of its route, F alone, F and B, or F, I and W."""
    training = any(action.kind != "F" for actions in schedule for action in actions)
    for rank, actions in enumerate(schedule):
        expected, found = Counter(), Counter(actions)
        for microbatch in range(schedule.num_microbatches):
            for place, chunk in schedule.route(microbatch):
                if place == rank:
                    split = any(Action(kind, microbatch, chunk) in found for kind in "IW")
                    kinds = "F" + training * ("IW" if split else "B")
                    expected.update(Action(kind, microbatch, chunk) for kind in kinds)
        wrong = [f"lacks {action}" for action in expected - found]
        wrong += [f"has {action} once too often" for action in found - expected]
        if wrong:
            raise ValueError(f"rank {rank} {wrong[0]}")


COLORS = {"F": 44, "B": 42, "I": 46, "W": 43}  # backgrounds on a terminal


def draw(schedule, forward=1, backward=2, weight=1, color=False):
    """The timeline as text: a row per rank, a cell per slot of time; chunk 0 in large letters."""
    width = len(f"F{max(action.microbatch for actions in schedule for action in actions)}")
    timeline, rows = simulate(schedule, forward, backward, weight=weight), []
    for rank, start in enumerate(timeline.start):
        cells = ["." * width] * int(timeline.total)
        for action, begin in start.items():
            letter = action.kind.lower() if action.chunk else action.kind
            cell = f"{letter}{action.microbatch}".ljust(width)
            cell = f"\033[{COLORS[action.kind]};30m{cell}\033[0m" if color else cell
            for slot in range(int(begin), int(timeline.end[rank][action])):
                cells[slot] = cell
        rows.append(f"rank {rank}  " + "".join(cells))
    return "\n".join(rows)


def trace_events(timeline, slot=1000):
    """The timeline as events of Chrome's trace format; a unit of time is `slot` microseconds."""
    return [
        {
            "name": f"{action.kind}{action.microbatch}",
            "cat": action.kind,
            "ph": "X",
            "ts": begin * slot,
            "dur": (timeline.end[rank][action] - begin) * slot,
            "pid": 0,
            "tid": rank,
            "args": {"microbatch": action.microbatch, "chunk": action.chunk},
        }
        for rank, start in enumerate(timeline.start)
        for action, begin in start.items()
    ]


# ---- the halves of a backward --------------------------------------------------------------------


class WeightGradStore:
    """Where the first half of a backward, I, leaves the products of weights' gradients for W.

    While it is open, which is while such a half runs, a layer may put(parameter, product) in place
    of computing the parameter's gradient, which is what product() returns. While it `adds`, which
    is in a microbatch's whole backward that another follows, a layer may add to .grad by itself:
    autograd would write the product and read it again. Hooks wait for the last.
    """

    def __init__(self):
        self.products, self.adds = None, False  # of the half that runs

    @property
    def open(self):
        return self.products is not None

    def put(self, parameter, product):
        self.products.append((parameter, product))

    @contextmanager
    def collect(self):
        """Open it; gives the list of what is put."""
        self.products = products = []
        try:
            yield products
        finally:
            self.products = None

    @contextmanager
    def add(self, adds):
        self.adds = adds
        try:
            yield
        finally:
            self.adds = False


class _DeferredLinear(torch.autograd.Function):
    """forward: x W^T + b; backward: the gradient of x; put in the store: how to get those of W, b.

    Autograd does not see the parameters, whose hooks would run too early; it sees `anchor`, which
    needs a gradient where x does not.
    """

    @staticmethod
    def forward(ctx, x, anchor, parameters, store):
        ctx.save_for_backward(x)
        ctx.parameters, ctx.store = parameters, store
        return nn.functional.linear(x, *parameters)

    @staticmethod
    def backward(ctx, grad_output):
        (x,), (weight, bias) = ctx.saved_tensors, ctx.parameters
        x = x.detach().reshape(-1, x.shape[-1])  # what came before x is done with
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        ctx.store.put(weight, lambda: rows.t() @ x)
        if bias is not None and bias.requires_grad:
            ctx.store.put(bias, lambda: rows.sum(0))
        grad_x = grad_output @ weight.to(grad_output.dtype) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None


class _DeferWeights(TorchFunctionMode):
    """Plain linear layers that run inside put their weights' products off, into `store`."""

    def __init__(self, store):
        super().__init__()
        self.store = store

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            return self._linear(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _linear(self, input, weight, bias=None):
        if weight.requires_grad and weight.is_leaf and torch.is_grad_enabled():
            anchor = torch.empty(0, requires_grad=True)
            return _DeferredLinear.apply(autocasted(input), anchor, (weight, bias), self.store)
        return nn.functional.linear(input, weight, bias)


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

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HEADER = 9  # int64s that announce a tensor: rows of its inputs, dtype, number of dims, shape


class _Messenger:
    """Posts one rank's transfers of one step.

    A receive needs a buffer. So ahead of the first tensor from a chunk to the next goes its format,
    (rows of the microbatch's inputs, dtype, shape), which holds for all later ones.

    transfers: this rank's, in the global order.
    formats: {(rank, chunk) that makes a tensor: its format}; it outlives the step.
    rows: {microbatch: rows of its inputs}; where no route begins they come with the format.
    """

    def __init__(self, transfers, formats, rows, device, group):
        self.formats, self.rows, self.device, self.group = formats, rows, device, group
        self.rank, self.num_stages = rank_and_size(group)
        self.unposted, self.sent = deque(transfers), deque()
        self.leaving, self.arriving = {}, {}  # transfer -> tensor; (buffer, its message)

    def post(self):
        """Post what can be posted without waiting for a tensor of this rank."""
        while self.unposted:
            transfer = self.unposted[0]
            if transfer.destination == self.rank:
                self._post_receive(transfer)
            elif transfer in self.leaving:
                self._post_send(self.leaving.pop(transfer), transfer)
            else:
                return
            self.unposted.popleft()

    def send(self, tensor, transfer):
        """Have it leave in its turn; nothing does at the end of a route, where transfer is None."""
        if transfer is not None:
            self.leaving[transfer] = tensor

    def receive(self, transfer):
        """The tensor of a transfer, once it is there; None of None, where a route begins."""
        if transfer is None:
            return None
        if transfer.source == self.rank:  # from the rank's own other chunk
            return self.leaving.pop(transfer)
        buffer, messages = self.arriving.pop(transfer)
        messages.wait()
        return buffer

    def finish(self):
        """Post and wait for what is left."""
        self.post()
        for messages in self.sent:
            messages.wait()

    def _post_send(self, tensor, transfer):
        if transfer.action.kind == "F":
            self._tell_format(tensor, transfer)
        messages = exchange([(tensor, transfer.destination)], [], self.group, async_op=True)
        self.sent.append(messages)
        if len(self.sent) > self.num_stages:  # sent tensors live until waited for: keep only a few
            self.sent.popleft().wait()

    def _post_receive(self, transfer):
        maker = self.rank, transfer.chunk  # a gradient is like the activations that it is of
        if transfer.action.kind == "F":
            maker = transfer.source, transfer.action.chunk
            if maker not in self.formats:
                self.formats[maker] = self._recv_meta(transfer)
            self.rows[transfer.action.microbatch] = self.formats[maker][0]
        _, dtype, shape = self.formats[maker]
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        messages = exchange([], [(buffer, transfer.source)], self.group, async_op=True)
        self.arriving[transfer] = buffer, messages

    def _tell_format(self, tensor, transfer):
        maker, rows = (self.rank, transfer.action.chunk), self.rows[transfer.action.microbatch]
        found = rows, tensor.dtype, tensor.shape
        if maker not in self.formats:
            self._send_meta(*found, transfer.destination)
        first = self.formats.setdefault(maker, found)
        if found != first:
            raise ValueError(
                f"stage {self.rank} made {tuple(tensor.shape)} {tensor.dtype} of {rows} rows of "
                f"inputs after its first output was {tuple(first[2])} {first[1]} of {first[0]}"
            )

    def _send_meta(self, rows, dtype, shape, destination):
        if dtype not in _DTYPES or len(shape) > _HEADER - 3:
            raise ValueError(f"stage {self.rank} cannot send {dtype} of {len(shape)} dims")
        header = [rows, _DTYPES.index(dtype), len(shape), *shape]
        header = torch.tensor(header + [0] * (_HEADER - len(header)), device=self.device)
        exchange([(header, destination)], [], self.group)

    def _recv_meta(self, transfer):
        """The host may wait here: what the sender needs was posted before this transfer."""
        header = torch.zeros(_HEADER, dtype=torch.int64, device=self.device)
        exchange([], [(header, transfer.source)], self.group)
        rows, dtype, ndim, *shape = header.tolist()
        return rows, _DTYPES[dtype], torch.Size(shape[:ndim])


# ---- executor ------------------------------------------------------------------------------------


class _Entry(torch.autograd.Function):
    """The identity, after which a stage may write in its input: in a leaf autograd forbids it."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output


def _device_of(stages, group):
    """Where the stages are; if they hold no tensor, where the group's backend wants messages."""
    tensors = [t for stage in stages for t in (*stage.parameters(), *stage.buffers())]
    of_backend = "cuda" if "cuda:nccl" in dist.get_backend_config(group) else "cpu"
    return tensors[0].device if tensors else torch.device(of_backend)


def _start_of_backward(output):
    """Its place in the graph, not the output itself, which need not live once it is sent."""
    return get_gradient_edge(output) if output.requires_grad else output


class Pipeline:
    """Runs one rank of a schedule.

    stage: its module, or a list of one per chunk. Of a DistributedDataParallel and a
        FullyShardedDataParallel all backwards but the last run under no_sync(); if the last is
        split, its W begins with start_grad_sync().
    schedule: the same on all ranks of the group, a Schedule or a list of actions per rank.
    loss_fn: loss_fn(output, target, *loss_arguments of step()), called at the end of a route,
        returns the microbatch's share of the loss; the step's is their sum, divided by nothing.
    recompute: a stage keeps for backward its input and the random generators' state alone, and runs
        forward again.
    defer: the WeightGradStore into which layers of the stages put products off; by default its own.
    sync_each: gradients are summed over replicas with every microbatch (ZeRO-2, -3), not the last.

    The half W of a backward is for plain linear layers and for those that have the store; other
    parameters get their gradients in the first half. Of two routes (DualPipe) each has a replica of
    all layers: see sum_replicas().

    Collective. Raises ValueError on all ranks if their schedules differ, or replicas do not train
    parameters of the same shapes; on one if the schedule is not of the group's size, there is not
    one stage per chunk, or a stage is PyTorch's DistributedDataParallel.
    """

    def __init__(
        self, stage, schedule, loss_fn, group=None, recompute=False, defer=None, sync_each=False
    ):
        self.rank, _ = rank_and_size(group)
        self.stages = list(stage) if isinstance(stage, (list, tuple, nn.ModuleList)) else [stage]
        self.schedule = schedule if isinstance(schedule, Schedule) else Schedule(schedule)
        self.loss_fn, self.group, self.recompute = loss_fn, group, recompute
        self.sync_each, self.defer = sync_each, defer or WeightGradStore()
        _check_schedule(self.schedule, group)
        _check_stages(self.stages, self.schedule, self.rank)
        self.actions, routes = self.schedule[self.rank], self.schedule.routes
        _check_replicas(self.stages, routes, group)
        self.device = _device_of(self.stages, group)
        # the action that completes a stage's gradients
        self.last_backward = {self.stages[a.chunk]: a for a in self.actions if a.kind != "F"}
        self.training = bool(self.last_backward)  # or else an evaluation, forward_only()
        self.split_backward = {action[1:] for action in self.actions if action.kind == "W"}
        # the chunks of this rank where routes begin, and end
        self.first_chunks = {chunk for (rank, chunk), *_ in routes if rank == self.rank}
        self.last_chunks = {chunk for *_, (rank, chunk) in routes if rank == self.rank}
        transfers = simulate(self.schedule, message=SHORT).transfers
        self.transfers = [t for t in transfers if self.rank in (t.source, t.destination)]
        self.formats, self.midway, self.clock = {}, False, None

    def step(self, inputs=None, targets=None, *loss_arguments):
        """Run every action once.

        inputs, targets: (B, ...), cut along B into microbatches; needed by ranks where routes
        begin, and end. loss_arguments: passed to loss_fn. Gradients are added to the parameters',
        and to inputs that require one.
        Returns the summed loss, detached, on ranks where routes end and None on the others.
        Raises ValueError for batches that are missing, of different B, or of one that m does not
        divide; for a stage's output that is no tensor, or not of the first one's shape and dtype;
        for a loss that is not a scalar tensor; under no_grad(), if the schedule has backwards.
        RuntimeError after a step that failed midway.
        """
        _check_batches(self, inputs, targets)
        if self.training and not torch.is_grad_enabled():
            raise ValueError("step() under no_grad(): of a schedule that is not forward_only()")
        if self.midway:
            raise RuntimeError("an earlier step() failed midway: its messages are still under way")
        self._begin(inputs, targets, loss_arguments)
        backward = self._backward
        perform = {"F": self._forward, "B": backward, "I": backward, "W": self._weights}
        for action in self.actions:
            self.messages.post()
            received = self.messages.receive(self.schedule.needed.get((action, self.rank)))
            began = self.clock.now()
            result = perform[action.kind](action, received)
            self.clock.spans[action] = began, self.clock.now()
            self.messages.send(result, self.schedule.made.get((action, self.rank)))
            del received, result  # the next action need not find their memory in use
        self.messages.finish()
        self.midway = False
        if any(x.requires_grad for x in self.inputs):
            grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in self.inputs]
            torch.autograd.backward(inputs, torch.cat(grads))
        self.inputs = self.targets = self.loss_arguments = ()
        return self.loss

    def _begin(self, inputs, targets, loss_arguments):
        """The state of one step."""
        m = self.schedule.num_microbatches
        # .data: autograd then counts writes by microbatch, and a stage may write in its own
        self.inputs = () if inputs is None else [x.data for x in inputs.detach().chunk(m)]
        if self.training and self.first_chunks and inputs.requires_grad:
            for x in self.inputs:
                x.requires_grad_()
        self.targets = () if targets is None else targets.chunk(m)
        self.loss, self.loss_arguments = None, loss_arguments
        # by action[1:], which is (microbatch, chunk):
        self.in_flight = {}  # (input, start of backward, random state), until then
        self.put_off = {}  # products of the weights' gradients, until W
        rows = {microbatch: len(x) for microbatch, x in enumerate(self.inputs)}
        self.messages = _Messenger(self.transfers, self.formats, rows, self.device, self.group)
        self.clock, self.midway = Clock(self.device), bool(self.transfers)

    def _forward(self, action, received):
        """F: returns what the next chunk receives."""
        x = self.inputs[action.microbatch] if received is None else received
        if received is not None and self.training:
            x.requires_grad_()
        runs_again = self.recompute and self.training
        state = RandomState(self.device) if runs_again else None
        with torch.no_grad() if runs_again else nullcontext():
            # a copy, where the stage may write: x itself is what backward begins with
            output = self._run(action, x.clone() if runs_again else x)
        if action.chunk in self.last_chunks:
            self.loss = output.detach() + (0 if self.loss is None else self.loss)
        if self.training:
            start = None if runs_again else _start_of_backward(output)
            self.in_flight[action[1:]] = x, start, state
        return output.detach().contiguous()

    def _run(self, action, x):
        """The chunk's output, or at the end of a route its loss."""
        split = action[1:] in self.split_backward
        with _DeferWeights(self.defer) if split else nullcontext():
            output = self.stages[action.chunk](_Entry.apply(x))
        if not torch.is_tensor(output):
            raise ValueError(f"stage {self.rank} returned {type(output).__name__}, not a tensor")
        return self._loss(action, output) if action.chunk in self.last_chunks else output

    def _loss(self, action, output):
        target, rows = self.targets[action.microbatch], self.messages.rows[action.microbatch]
        if len(target) != rows:
            raise ValueError(f"a microbatch has {rows} rows of inputs, {len(target)} of targets")
        loss = self.loss_fn(output, target, *self.loss_arguments)
        if not torch.is_tensor(loss):
            raise ValueError(f"loss_fn returned {type(loss).__name__}, not a tensor")
        if loss.numel() != 1 and self.training:
            raise ValueError(f"loss_fn returned {tuple(loss.shape)}, not a scalar")
        return loss

    def _backward(self, action, grad_output):
        """B, or with the store open I: returns the gradient of the chunk's input."""
        x, start, state = self.in_flight.pop(action[1:])
        if state:
            # before autograd's backward, whose thread for a GPU no TorchFunctionMode reaches
            with state:
                start = _start_of_backward(self._run(action, x))
        store, last = self.defer, self._syncs(action)
        into = store.collect() if action.kind == "I" else store.add(not last)
        with self._no_sync(action), into as products:
            # a tensor is one without graph: all layers before it are frozen
            if not torch.is_tensor(start) or grad_output is None:
                torch.autograd.backward(start, grad_output)
        if action.kind == "I":
            self.put_off[action[1:]] = products
        if action.chunk in self.first_chunks:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad

    def _weights(self, action, _):
        """W: adds the products that its I has put off."""
        products, stage = self.put_off.pop(action[1:]), self.stages[action.chunk]
        if self._syncs(action) and hasattr(stage, "start_grad_sync"):
            stage.start_grad_sync(awaited={parameter for parameter, _ in products})
        with self._no_sync(action):
            _add_products(products)

    def _syncs(self, action):
        """Whether gradients are summed over replicas with this action, of a split one with W."""
        is_last = action == self.last_backward[self.stages[action.chunk]]
        return is_last or (self.sync_each and action.kind != "I")

    def _no_sync(self, action):
        stage = self.stages[action.chunk]
        return nullcontext() if self._syncs(action) else getattr(stage, "no_sync", nullcontext)()


def _check_schedule(schedule, group):
    """Raise on all ranks if their schedules differ. Also all ranks' first batch, as NCCL wants."""
    sizes = len(schedule), schedule.num_microbatches
    first, *others = gather_objects((sizes, list(schedule), schedule.routes), group)
    for rank, other in enumerate(others, 1):
        if other != first:
            raise ValueError(
                f"rank {rank} of the group has another schedule than rank 0, theirs for "
                f"(stages, microbatches) = {other[0]} and {first[0]}"
            )
    _, num_stages = rank_and_size(group)
    if len(schedule) != num_stages:
        raise ValueError(f"a schedule for {len(schedule)} stages in a group of {num_stages} ranks")


def _check_stages(stages, schedule, rank):
    num_chunks = 1 + max(action.chunk for action in schedule[rank])
    if len(stages) != num_chunks:
        raise ValueError(
            f"rank {rank} has {len(stages)} stages for num_chunks={num_chunks} of the schedule, "
            "one each"
        )
    if any(isinstance(stage, nn.parallel.DistributedDataParallel) for stage in stages):
        raise ValueError(
            f"rank {rank}: torch's DistributedDataParallel reduces gradients to which "
            "later microbatches still add; ddp.DistributedDataParallel does not"
        )


def _check_replicas(stages, routes, group):
    """Raise on all ranks unless two routes' chunks train parameters of the same shapes."""
    if len(routes) != 2 or dist.get_backend(group) == "fake":  # where others are like this one
        return
    own = [[(tuple(p.shape), p.dtype) for p in _trained(stage)] for stage in stages]
    every = gather_objects(own, group)
    for (rank, chunk), (other, replica) in zip(*routes):
        if every[rank][chunk] != every[other][replica]:
            raise ValueError(
                f"chunk {chunk} of rank {rank} and its replica, chunk {replica} of rank "
                f"{other}, do not train parameters of the same shapes"
            )


def _check_batches(pipeline, inputs, targets):
    begins, ends = pipeline.first_chunks and "begins", pipeline.last_chunks and "ends"
    m = pipeline.schedule.num_microbatches
    for name, batch, route in (("inputs", inputs, begins), ("targets", targets, ends)):
        if batch is None:
            if route:
                raise ValueError(f"{name}=None on rank {pipeline.rank}, where a route {route}")
        elif not torch.is_tensor(batch) or not batch.ndim:
            raise ValueError(f"{name} is not a tensor of rows, but {type(batch).__name__}")
        elif not len(batch) or len(batch) % m:
            raise ValueError(f"{name} has {len(batch)} rows, not divisible by num_microbatches={m}")
    if inputs is not None and targets is not None and len(inputs) != len(targets):
        raise ValueError(f"inputs has {len(inputs)} rows, targets has {len(targets)}")


class Clock:
    """When a step's actions began and ended; on a GPU by its own clock, not the host's."""

    def __init__(self, device):
        self.device, self.spans = device, {}
        self.began = self.now()

    def now(self):
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))  # a thread has a device of its own
        return event

    def since(self, moment):
        """Seconds from the clock's beginning to what now() gave. The host waits for the device."""
        if self.device.type == "cpu":
            return moment - self.began
        moment.synchronize()
        return self.began.elapsed_time(moment) / 1e3

    def seconds(self):
        """{action: (begin, end)}, since the step began."""
        return {action: tuple(map(self.since, span)) for action, span in self.spans.items()}


def timeline_of(pipeline):
    """The last step as a Timeline of seconds, each rank's from its own beginning. Collective.

    A barrier before the step makes the beginnings the same. RuntimeError if no step has ended.
    """
    clock, schedule = pipeline.clock, pipeline.schedule
    if clock is None or len(clock.spans) < len(pipeline.actions):
        raise RuntimeError("timeline of a step that has not ended")
    spans = gather_objects(clock.seconds(), pipeline.group)
    start = [{action: begin for action, (begin, _) in own.items()} for own in spans]
    end = [{action: end for action, (_, end) in own.items()} for own in spans]
    return _timeline(schedule, start, end, simulate(schedule).transfers)


# ---- replicas ------------------------------------------------------------------------------------


def sum_replicas(stages, group=None):
    """Sum the gradients of DualPipe's replicas: chunk 0 here is chunk 1 of the mirrored rank.

    stages: those of a Pipeline, since whose making no parameter was frozen or thawed. Collective;
    to be called once the gradients of a batch are complete, be it of one step or several. Both
    replicas then have the same bits.
    Raises ValueError if the group is odd or there is another number of stages.
    """
    rank, world_size = rank_and_size(group)
    if len(stages) != 2 or world_size % 2:
        raise ValueError(f"{len(stages)} stages on a rank of {world_size}: replicas need 2 of even")
    first, second = map(_trained, stages)
    for parameter in first + second:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    if not first + second:
        return
    row = torch.cat([parameter.grad.flatten() for parameter in first + second])
    other, mirror = torch.empty_like(row), world_size - 1 - rank
    exchange([(row, mirror)], [(other, mirror)], group)
    parts = other.split([parameter.numel() for parameter in second + first])
    for parameter, part in zip(second + first, parts):
        parameter.grad.add_(part.view_as(parameter))


def _trained(stage):
    return [parameter for parameter in stage.parameters() if parameter.requires_grad]


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
    rank's first and last action, of zb-v if W <= F <= B - W. dualpipe's is an upper bound.
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
    """Bytes `stage` sends in a step: activations to the next, gradients to the previous stage."""
    boundaries = (stage < num_stages - 1) + (stage > 0)
    return boundaries * num_microbatches * microbatch_bytes


# ---- chance ----


class RandomState:
    """What the random generators would draw from now on: `with state:` has it drawn once more."""

    def __init__(self, device):
        self.devices = [device] if device.type == "cuda" else []
        self.state = torch.get_rng_state()
        self.device_states = [torch.cuda.get_rng_state(device) for device in self.devices]

    def __enter__(self):
        self.outside = torch.random.fork_rng(self.devices)
        self.outside.__enter__()
        torch.set_rng_state(self.state)
        for device, state in zip(self.devices, self.device_states):
            torch.cuda.set_rng_state(state, device)

    def __exit__(self, *exception):
        self.outside.__exit__(*exception)


# ---- demonstration -------------------------------------------------------------------------------


def _demonstrate():
    rank, world_size = rank_and_size()
    B, D, num_microbatches = 16, 32, 8
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(D, D), nn.Tanh()).double() for _ in range(world_size)]
    inputs, targets = torch.randn(2, B, D, dtype=torch.float64)
    loss_fn = lambda output, target: (output - target).square().sum() / (B * D)
    expected = torch.autograd.grad(
        loss_fn(nn.Sequential(*layers)(inputs), targets), list(layers[rank].parameters())
    )
    for make_schedule in (gpipe, one_f_one_b):
        schedule = make_schedule(world_size, num_microbatches)
        pipeline = Pipeline(layers[rank], schedule, loss_fn)
        pipeline.step(inputs, targets)
        layers[rank].zero_grad()
        with count_bytes() as traffic:
            pipeline.step(inputs, targets)
        found = [parameter.grad for parameter in layers[rank].parameters()]
        error = max((a - b).abs().max().item() for a, b in zip(found, expected))
        claimed = pipeline_bytes(
            rank, world_size, num_microbatches, inputs.nbytes // num_microbatches
        )
        timeline = simulate(schedule)
        if rank == 0:
            print(f"{make_schedule.__name__}\n{draw(schedule)}")
            claim = bubble_time("1f1b", world_size, num_microbatches)  # GPipe's is the same
            print(f"bubble: claimed {claim}, simulated {timeline.bubble}")
            print(f"peak activations, in microbatches: {timeline.peak}")
            print(f"rank 0 sent {traffic.bytes()} bytes, claimed {claimed}")
            print(f"largest difference from one process's gradients: {error:.1e}\n")


def figures(name, num_stages, num_microbatches):
    """Of a schedule: itself, its timeline, bubble and peak, each as claimed and as simulated.

    F, I and W of all of a rank's layers take 1.
    """
    schedule = SCHEDULES[name](num_stages, num_microbatches)
    chunks = {action.chunk for actions in schedule for action in actions}
    parts = 1 if name == "dualpipe" else len(chunks)  # there a chunk is a replica of all layers
    timeline = simulate(schedule, 1 / parts, 2 / parts, weight=1 / parts)
    bubble = max(timeline.idle if name in ("zb-h2", "zb-v") else timeline.bubble)
    bubbles = bubble_time(name, num_stages, num_microbatches), bubble
    peaks = peak_activations(name, num_stages, num_microbatches), max(timeline.peak) / parts
    return schedule, timeline, bubbles, peaks


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
    if args.trace and args.schedule is None:
        parser.error(f"--trace {args.trace} is of one schedule: which --schedule?")
    try:
        if args.schedule is None:
            _compare(args.stages, args.microbatches)
            return
        found = figures(args.schedule, args.stages, args.microbatches)
        schedule, timeline, bubbles, peaks = found
        if args.trace:
            with open(args.trace, "w") as file:
                json.dump({"traceEvents": trace_events(timeline)}, file)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(draw(schedule, color=sys.stdout.isatty()))
    print("bubble: claimed {:g}, simulated {:g}".format(*bubbles))
    print("peak activations, in microbatches: claimed {:g}, simulated {:g}".format(*peaks))


if __name__ == "__main__":
    run_ranks(_demonstrate) if "RANK" in os.environ else main()
