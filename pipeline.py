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
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from collectives import (
    RandomState,
    autocasted,
    count_bytes,
    exchange,
    gather_objects,
    rank_and_size,
    run_ranks,
)

# ---- schedules -----------------------------------------------------------------------------------


class Action(NamedTuple):
    """One slot of a schedule, of one microbatch and one chunk of the rank's layers.

    kind: "F" forward, "B" backward, or its halves, "I" the gradient of the input and "W" that of
    the weights.
    """

    kind: str
    microbatch: int
    chunk: int = 0


class Schedule(list):
    """A list of actions per rank, and the routes of microbatches through (rank, chunk) places.

    routes: the first takes the first m / len(routes) microbatches, and so on; by default one, from
    rank to rank. Raises ValueError for a rank without actions, and what is not an action.
    """

    def __init__(self, actions, routes=None):
        super().__init__([_as_action(rank, a) for a in row] for rank, row in enumerate(actions))
        if [] in self or not self:
            raise ValueError(f"rank {self.index([]) if self else 0} of {len(self)} has no actions")
        self.routes = routes or [[(rank, 0) for rank in range(len(self))]]
        self.num_microbatches = 1 + max(action.microbatch for row in self for action in row)

    def route(self, microbatch):
        """The places that a microbatch visits on its way forward."""
        return self.routes[microbatch * len(self.routes) // self.num_microbatches]

    def neighbours(self, action, rank):
        """The places before and after this one on the way of the action; None at an end."""
        route = self.route(action.microbatch)
        if action.kind != "F":
            route = route[::-1]
        place = route.index((rank, action.chunk))
        before = route[place - 1] if place else None
        return before, route[place + 1] if place + 1 < len(route) else None

    def input_transfer(self, action, rank):
        """The transfer that `action` waits for; None for W and at the begin of the route."""
        before, _ = (None, None) if action.kind == "W" else self.neighbours(action, rank)
        return before and Transfer(_made_by(action, before[1]), before[0], rank)

    def output_transfer(self, action, rank):
        """The transfer that `action` gives rise to; None for W and at the end of the route."""
        _, after = (None, None) if action.kind == "W" else self.neighbours(action, rank)
        return after and Transfer(_made_by(action, action.chunk), rank, after[0])


class Transfer(NamedTuple):
    """What `action` on rank `source` makes, and rank `destination` waits for; I counts as B."""

    action: Action
    source: int
    destination: int


def _made_by(action, chunk):
    return Action("F" if action.kind == "F" else "B", action.microbatch, chunk)


def _as_action(rank, action):
    """An Action of one, or of a tuple like one."""
    if isinstance(action, tuple) and len(action) in (2, 3) and action[0] in tuple("FBIW"):
        if all(isinstance(number, int) and number >= 0 for number in action[1:]):
            return Action(*action)
    raise ValueError(f"rank {rank} has {action!r}, which is no Action(kind, microbatch, chunk)")


def _check_sizes(num_stages, num_microbatches):
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            f"num_stages={num_stages} and num_microbatches={num_microbatches} must be at least 1"
        )


def naive(num_stages, num_microbatches):
    """One microbatch at a time, forward and back: a single rank works at any moment.

    Returns a Schedule. Peak activations: 1. Raises ValueError for sizes below 1.
    """
    _check_sizes(num_stages, num_microbatches)
    turns = [Action(kind, m) for m in range(num_microbatches) for kind in "FB"]
    return Schedule([turns for _ in range(num_stages)])


def gpipe(num_stages, num_microbatches):
    """All forwards, then all backwards, on every rank. Returns a Schedule.

    Peak activations: m microbatches. Raises ValueError for sizes below 1.
    """
    _check_sizes(num_stages, num_microbatches)
    forwards = [Action("F", microbatch) for microbatch in range(num_microbatches)]
    backwards = [Action("B", microbatch) for microbatch in range(num_microbatches)]
    return Schedule([forwards + backwards for _ in range(num_stages)])


def one_f_one_b(num_stages, num_microbatches):
    """Warm up by as many forwards as stages follow; then forward and backward in turn; cool down.

        rank 0   F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5        p = 4, m = 6: the orders, not the times
        rank 1   F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
        rank 2   F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
        rank 3   F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

    Returns a Schedule. Peak activations: min(m, p - stage). Raises ValueError for sizes below 1.
    """
    _check_sizes(num_stages, num_microbatches)
    schedule = []
    for stage in range(num_stages):
        warmup = min(num_stages - stage - 1, num_microbatches)
        actions = [Action("F", microbatch) for microbatch in range(warmup)]
        for microbatch in range(num_microbatches - warmup):
            actions += [Action("F", warmup + microbatch), Action("B", microbatch)]
        cooldown = range(num_microbatches - warmup, num_microbatches)
        schedule.append(actions + [Action("B", microbatch) for microbatch in cooldown])
    return Schedule(schedule)


def interleaved(num_stages, num_microbatches, num_chunks=2):
    """1F1B where a rank has v chunks of layers, p stages apart: a bubble of only (p-1)(F+B)/v.

    Microbatches go round in groups of p: a group takes chunk 0 of all ranks, then chunk 1 ...

    p = 2, m = 4, v = 2; small letters are chunk 1:

        rank 0   F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3
        rank 1   F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3

    Returns a Schedule. Peak activations of rank r: min(2(p-r-1) + (v-1)p + 1, mv) chunks. Raises
    ValueError for sizes below 1 and if p does not divide m.
    """
    _check_sizes(num_stages, num_microbatches)
    if num_chunks < 1 or num_microbatches % num_stages:
        raise ValueError(
            f"num_microbatches={num_microbatches} is not a multiple of num_stages={num_stages}, "
            f"or num_chunks={num_chunks} is not at least 1"
        )
    forwards, backwards = [], []
    for first in range(0, num_microbatches, num_stages):
        for chunk in range(num_chunks):
            group = range(first, first + num_stages)
            forwards += [Action("F", microbatch, chunk) for microbatch in group]
            backwards += [Action("B", microbatch, num_chunks - 1 - chunk) for microbatch in group]
    schedule = []
    for rank in range(num_stages):
        warmup = 2 * (num_stages - rank - 1) + (num_chunks - 1) * num_stages
        warmup = min(warmup, len(forwards))
        actions = forwards[:warmup]
        for pair in zip(forwards[warmup:], backwards):
            actions += pair
        schedule.append(actions + backwards[len(backwards) - warmup :])
    route = [(rank, chunk) for chunk in range(num_chunks) for rank in range(num_stages)]
    return Schedule(schedule, [route])


def zb_h1(num_stages, num_microbatches):
    """1F1B with halved backwards: rank r does W r microbatches late, and so fills its waiting.

    p = 4, m = 6:

        rank 0   F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
        rank 1   F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
        rank 2   F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
        rank 3   F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

    Returns a Schedule. Bubble (p-1)(F+B-2W) for m >= p. Peak activations: min(m, p). Raises
    ValueError for sizes below 1.
    """
    _check_sizes(num_stages, num_microbatches)
    return _late_weights(num_microbatches, [(num_stages - r, r) for r in range(num_stages)])


def zb_h2(num_stages, num_microbatches):
    """ZB-H1 with about twice the warmup: where F = I = W no rank waits between its first and last.

    p = 2, m = 4:

        rank 0   F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1   F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Returns a Schedule. Idle time of a rank between its first and last action: (p-1)(F+B-3W), for
    m >= 2p-1. Peak activations: min(m, 2p-1). Raises ValueError for sizes below 1.
    """
    _check_sizes(num_stages, num_microbatches)
    delays = [(2 * (num_stages - r) - 1, 2 * r) for r in range(num_stages)]
    return _late_weights(num_microbatches, delays)


def _late_weights(num_microbatches, ranks):
    """ranks: (forwards before the first backward, microbatches by which W is late)."""
    schedule = []
    for warmup, late in ranks:
        actions = [Action("F", microbatch) for microbatch in range(min(warmup, num_microbatches))]
        for microbatch in range(num_microbatches):
            actions.append(Action("I", microbatch))
            if microbatch >= late:
                actions.append(Action("W", microbatch - late))
            if microbatch + warmup < num_microbatches:
                actions.append(Action("F", microbatch + warmup))
        rest = range(max(0, num_microbatches - late), num_microbatches)
        schedule.append(actions + [Action("W", microbatch) for microbatch in rest])
    return Schedule(schedule)


class _Counted(list):
    """Actions of which each kind and chunk takes the microbatches one after the other."""

    def __init__(self, first=(0, 0)):
        self.first, self.counts = first, Counter()

    def do(self, text, times=1):
        """ "F0 I1": a forward of chunk 0, then the input's gradient of chunk 1, so many times."""
        for kind, chunk in text.split() * times:
            counted = "I" if kind == "B" else kind, chunk
            microbatch = self.first[int(chunk)] + self.counts[counted]
            self.append(Action(kind, microbatch, int(chunk)))
            self.counts[counted] += 1


def zb_v(num_stages, num_microbatches):
    """Two chunks a rank, down the ranks and up again in a V: ZB-H2's bubble at 1F1B's memory.

    Rank 0 has the first and the last layers, so that backward begins there. p = 2, m = 4:

        rank 0   F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3
        rank 1   F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3

    Returns a Schedule. Idle time of a rank between its first and last action: (p-1)(I-W) for
    m >= 2p, W <= F <= I. Peak activations: min(2m, 2p) chunks. Raises ValueError for sizes below 1.
    """
    _check_sizes(num_stages, num_microbatches)
    p, m, schedule = num_stages, max(num_microbatches, 2 * num_stages), []
    for rank in range(p):
        actions = _Counted()
        actions.do("F0", 2 * (p - rank) - 1)
        actions.do("F1 F0", rank)
        actions.do("F1 I1 W1", p - rank)
        while actions.counts["F", "1"] < m:
            if actions.counts["F", "0"] < m:
                actions.do("F0")
            actions.do("I0 W0 F1 I1 W1")
        actions.do("I0 I1", rank)
        actions.do("I0 W0", p - rank)
        actions.do("W1", m - actions.counts["W", "1"])
        actions.do("W0", m - actions.counts["W", "0"])
        schedule.append([action for action in actions if action.microbatch < num_microbatches])
    down = [(rank, 0) for rank in range(p)]
    return Schedule(schedule, [down + [(rank, 1) for rank in reversed(range(p))]])


def dualpipe(num_stages, num_microbatches):
    """Two replicas, two directions: half of the microbatches enter at rank 0, half at rank p - 1.

    Chunk 0 of rank r is stage r of the one replica, chunk 1 stage p-1-r of the other. p = 4, m = 8:

        rank 0   F0 F1 F2 f4 i4 w4 f5 F3 b5 f6 B0 b6 f7 B1 b7 I2 W2 I3 W3
        rank 1   F0 f4 F1 f5 F2 b4 f6 B0 F3 b5 f7 B1 b6 B2 i7 I3 w7 W3
        rank 2   f4 F0 f5 F1 f6 B0 F2 b4 f7 B1 F3 b5 B2 b6 I3 i7 W3 w7
        rank 3   f4 f5 f6 F0 I0 W0 F1 f7 B1 F2 b4 B2 F3 b5 B3 i6 w6 i7 w7

    Returns a Schedule. Bubble (p/2-1)(F&B+B-3W), where F&B is the time of a forward and a backward
    that overlap; less where, as here, one comes after the other. Peak activations: p+1. Raises
    ValueError if p is odd, m is odd, or m < 2p.
    """
    _check_sizes(num_stages, num_microbatches)
    if num_stages % 2 or num_microbatches % 2 or num_microbatches < 2 * num_stages:
        raise ValueError(
            f"num_stages={num_stages} and num_microbatches={num_microbatches}: DualPipe needs both "
            "even, and two microbatches a stage or more"
        )
    schedule, pairs = [], num_microbatches // 2
    for rank in range(num_stages):
        depth = min(rank, num_stages - 1 - rank)  # from the nearer end, whose direction is first
        above = num_stages // 2 - 1 - depth  # ranks between this one and the middle
        near, far = ("0", "1") if rank < num_stages // 2 else ("1", "0")
        actions, late = _Counted(first=(0, pairs)), deque()

        def halve(chunk):
            actions.do(f"I{chunk}")
            late.append(actions[-1]._replace(kind="W"))

        # the eight steps of DeepSeek's code
        actions.do(f"F{near}", 2 * above)  # step 1
        actions.do(f"F{near} F{far}", depth + 1)  # step 2
        for _ in range(above):  # step 3: a backward in halves, so that the other end waits less
            halve(far)
            actions.append(late.popleft())
            actions.do(f"F{far}")
        actions.do(f"F{near} B{far} F{far} B{near}", pairs - num_stages + depth + 1)  # step 4: main
        actions.do(f"B{far} F{far} B{near}", above)  # step 5
        actions.do(f"B{far} B{near}", (depth + 1) // 2)  # step 6; then halves, their W put off
        if depth % 2 == 0:
            actions.do(f"B{far}")
            halve(near)
        for _ in range((depth + 1) // 2):
            halve(far)
            halve(near)
        for _ in range(above):  # step 7
            actions.append(late.popleft())
            halve(near)
        schedule.append(list(actions) + list(late))  # step 8: the late W
    ranks = range(num_stages)
    return Schedule(schedule, [[(r, 0) for r in ranks], [(r, 1) for r in reversed(ranks)]])


def forward_only(num_stages, num_microbatches, route=None):
    """Evaluation: the forwards alone, along one route; the executor keeps no activations.

    Raises ValueError for sizes below 1.
    """
    _check_sizes(num_stages, num_microbatches)
    route = route or [(rank, 0) for rank in range(num_stages)]
    # a place of the route works on a microbatch one turn after the place before it
    turns = [(m + turn, turn, m) for m in range(num_microbatches) for turn in range(len(route))]
    schedule = [[] for _ in range(num_stages)]
    for _, turn, microbatch in sorted(turns):
        rank, chunk = route[turn]
        schedule[rank].append(Action("F", microbatch, chunk))
    return Schedule(schedule, [route])


# ---- simulator -----------------------------------------------------------------------------------


@dataclass
class Timeline:
    """What a schedule does in time.

    start, end: per rank, {action: time}; total: the end of the last action; bubble: per rank, its
    idle time in total; idle: that between its first and its last action; peak: most microbatches
    (of a chunk) whose forward is done and whose backward is not; transfers: all messages between
    ranks in one global order, by the time at which they can leave.
    """

    start: list
    end: list
    total: float
    bubble: list
    idle: list
    peak: list
    transfers: list


SHORT = 1 / 128  # a message's time, as a part of a forward's, by which a step orders its messages


def simulate(schedule, forward=1.0, backward=2.0, message=0.0, weight=1.0):
    """Time a schedule. Every rank does its actions in order, each as soon as its input has arrived.

    forward, backward: times of F and B of one chunk; weight: the part of B that is W; message: the
    time from a rank to another. Raises ValueError if a rank does not have each of its microbatches'
    actions once, and if the schedule cannot finish, naming the action that each rank is stuck at.
    """
    schedule = schedule if isinstance(schedule, Schedule) else Schedule(schedule)
    _check_actions(schedule)
    duration = {"F": forward, "B": backward, "I": backward - weight, "W": weight}
    start, end, arrival = [{} for _ in schedule], [{} for _ in schedule], {}
    busy_until, position = [0.0] * len(schedule), [0] * len(schedule)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                needed = schedule.input_transfer(action, rank)
                if needed is not None and needed not in arrival:
                    break
                earlier = {"F": None, "W": "I"}.get(action.kind, "F")
                if earlier and action._replace(kind=earlier) not in end[rank]:
                    break
                begin = max(busy_until[rank], arrival.get(needed, 0.0))
                busy_until[rank] = begin + duration[action.kind]
                start[rank][action], end[rank][action] = begin, busy_until[rank]
                if made := schedule.output_transfer(action, rank):
                    between = message if made.destination != rank else 0
                    arrival[made] = busy_until[rank] + between
                position[rank] += 1
                progress = True
    stuck = {r: a[position[r]] for r, a in enumerate(schedule) if position[r] < len(a)}
    if stuck:
        where = ", ".join(f"rank {r} at {a.kind}{a.microbatch}" for r, a in stuck.items())
        raise ValueError(f"the schedule cannot finish: {where} waiting for what never comes")
    between = [transfer for transfer in arrival if transfer.source != transfer.destination]
    between.sort(key=lambda transfer: (arrival[transfer], transfer))
    return _timeline(schedule, start, end, between)


def _timeline(schedule, start, end, transfers):
    total = max(max(times.values()) for times in end)
    work, idle = [], []
    for first, last in zip(start, end):
        work.append(sum(last[action] - first[action] for action in first))
        idle.append(max(last.values()) - min(first.values()) - work[-1])
    peak = [_peak_activations(actions) for actions in schedule]
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


def _peak_activations(actions):
    live = peak = 0
    for action in actions:
        live += {"F": 1, "I": 0}.get(action.kind, -1)
        peak = max(peak, live)
    return peak


COLORS = {"F": 44, "B": 42, "I": 46, "W": 43}  # backgrounds on a terminal


def draw(schedule, forward=1, backward=2, weight=1, color=False):
    """The timeline as text: a row per rank, a cell per slot of time; chunk 0 in large letters."""
    duration = {"F": forward, "B": backward, "I": backward - weight, "W": weight}
    width = len(f"F{max(action.microbatch for actions in schedule for action in actions)}")
    timeline, rows = simulate(schedule, forward, backward, weight=weight), []
    for rank, start in enumerate(timeline.start):
        cells = ["." * width] * int(timeline.total)
        for action, begin in start.items():
            letter = action.kind.lower() if action.chunk else action.kind
            cell = f"{letter}{action.microbatch}".ljust(width)
            cell = f"\033[{COLORS[action.kind]};30m{cell}\033[0m" if color else cell
            for slot in range(int(begin), int(begin) + duration[action.kind]):
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
    of computing the parameter's gradient, which is what product() returns.
    """

    def __init__(self):
        self.products = None  # of the half that runs

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


# ---- executor ------------------------------------------------------------------------------------

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HEADER = 9  # int64s that announce a tensor: rows of its inputs, dtype, number of dims, shape


class _Entry(torch.autograd.Function):
    """The identity: a stage may write in what it gives, as autograd lets nobody write in a leaf."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output


class Pipeline:
    """Runs one rank of a schedule.

    stage: its module, or a list of one per chunk. In a DistributedDataParallel no_sync() holds for
        all its backwards but the last; where that one is split, start_grad_sync() comes before W.
    schedule: the same on all ranks of the group, a Schedule or a list of actions per rank.
    loss_fn: loss_fn(output, target, *loss_arguments of step()), called at the end of a route,
        returns the microbatch's share of the loss: the sum over microbatches is the step's; nothing
        here divides by their number.
    recompute: a stage keeps nothing between forward and backward but its input and the state of the
        random generators, and runs forward again.
    defer: the WeightGradStore into which layers of the stages put products off; by default its own.

    Where backwards are split, those of linear layers are: what other parameters get is computed
    with the first half, unless their layers use the store as well. Of two routes (DualPipe) each
    has a replica of all layers: see sum_replicas().

    The transfers of a rank are posted in their global order: a receive as soon as all before it are
    posted, a send as soon as its tensor exists as well. So both ends of every link agree, the first
    transfer that is not done always has both its ends posted, and nothing deadlocks, whether sends
    are buffered (gloo) or meet their receive in issue order (NCCL). The order is that of messages
    that take a little time: if they took none, a receive could come after a send of the same moment
    and so be posted an action late.

    Collective. Raises ValueError on all ranks if their schedules differ, or replicas do not train
    parameters of the same shapes; on one if the schedule is not made for the group's size, the list
    of stages does not have one per chunk, or a stage is PyTorch's DistributedDataParallel, which
    takes part in one backward per forward.
    """

    def __init__(self, stage, schedule, loss_fn, group=None, recompute=False, defer=None):
        self.rank, self.num_stages = rank_and_size(group)
        self.stages = list(stage) if isinstance(stage, (list, tuple, nn.ModuleList)) else [stage]
        self.loss_fn, self.group, self.recompute = loss_fn, group, recompute
        self.defer = defer or WeightGradStore()
        self.schedule = schedule if isinstance(schedule, Schedule) else Schedule(schedule)
        self.num_microbatches = self.schedule.num_microbatches
        self.device = _device_of(self.stages, group)
        self._check_schedule()
        self.actions = self.schedule[self.rank]
        self._check_stages()
        if len(self.schedule.routes) == 2:
            self._check_replicas()
        # stage -> the action that completes its gradients; an evaluation has none
        self.last = {self.stages[a.chunk]: a for a in self.actions if a.kind != "F"}
        self.split_backward = {action[1:] for action in self.actions if action.kind == "W"}
        transfers = simulate(self.schedule, message=SHORT).transfers
        self.transfers = [t for t in transfers if self.rank in (t.source, t.destination)]
        ends = [(route[0][0], route[-1][0]) for route in self.schedule.routes]
        self.needed = {
            "inputs": self.rank in [first for first, _ in ends],
            "targets": self.rank in [last for _, last in ends],
        }
        self.formats = {}  # (source, chunk) of a boundary -> (rows of inputs, dtype, shape) there
        self.midway, self.times = False, {}

    def _check_schedule(self):
        """Raise on all ranks if their schedules differ. NCCL wants all in a group's first batch."""
        sizes = len(self.schedule), self.num_microbatches
        own = sizes, list(self.schedule), self.schedule.routes
        first, *others = gather_objects(own, self.group)
        for rank, other in enumerate(others, 1):
            if other != first:
                raise ValueError(
                    f"rank {rank} of the group has another schedule than rank 0, theirs for "
                    f"(stages, microbatches) = {other[0]} and {first[0]}"
                )
        if len(self.schedule) != self.num_stages:
            raise ValueError(
                f"a schedule for {len(self.schedule)} stages in a group of {self.num_stages} ranks"
            )

    def _check_stages(self):
        num_chunks = 1 + max(action.chunk for action in self.actions)
        if len(self.stages) != num_chunks:
            raise ValueError(
                f"rank {self.rank} has {len(self.stages)} stages for num_chunks={num_chunks} "
                "of the schedule, one each"
            )
        if any(isinstance(stage, nn.parallel.DistributedDataParallel) for stage in self.stages):
            raise ValueError(
                f"rank {self.rank}: torch's DistributedDataParallel reduces gradients to which "
                "later microbatches still add; ddp.DistributedDataParallel does not"
            )

    def _check_replicas(self):
        """Raise on all ranks unless the routes' chunks train parameters of the same shapes."""
        own = [[(tuple(p.shape), p.dtype) for p in _trained(stage)] for stage in self.stages]
        every = gather_objects(own, self.group)
        for (rank, chunk), (other, replica) in zip(*self.schedule.routes):
            if every[rank][chunk] != every[other][replica]:
                raise ValueError(
                    f"chunk {chunk} of rank {rank} and its replica, chunk {replica} of rank "
                    f"{other}, do not train parameters of the same shapes"
                )

    def step(self, inputs=None, targets=None, *loss_arguments):
        """Run every action once.

        inputs, targets: (B, ...), cut along B into microbatches; needed by ranks where routes
        begin, and end. loss_arguments: passed to loss_fn. Gradients are added to the parameters',
        and to inputs that require one.
        Returns the summed loss, detached, on ranks where routes end and None on the others. Raises
        ValueError for batches that are missing, of different B, or of one that the number of
        microbatches does not divide; for a stage that does not return a tensor, or not one of the
        shape and dtype that it first returned; for a loss that is not a scalar tensor, and under
        no_grad() where the schedule has backwards; RuntimeError after a step that failed midway.
        """
        self._check_step(inputs, targets)
        self.midway = bool(self.transfers)
        self.in_flight = {}  # (microbatch, chunk) -> (input, output, random state), until backward
        self.put_off = {}  # (microbatch, chunk) -> products of its weights' gradients, until W
        self.unposted = deque(self.transfers)
        self.leaving, self.arriving, self.sent = {}, {}, deque()
        self.loss, self.loss_arguments = None, loss_arguments
        m = self.num_microbatches
        wants_grad = bool(self.last) and self.needed["inputs"] and inputs.requires_grad
        self.targets = () if targets is None else targets.chunk(m)
        # of .data, so that a stage may write in one microbatch while another is in flight
        self.inputs = () if inputs is None else [part.data for part in inputs.detach().chunk(m)]
        for x in self.inputs if wants_grad else ():
            x.requires_grad_()
        self.rows = {k: len(x) for k, x in enumerate(self.inputs)}
        self.began, self.times = self._now(), {}
        backward = self._backward
        perform = {"F": self._forward, "B": backward, "I": backward, "W": self._weights}
        for action in self.actions:
            self._post_transfers()
            received = self._receive(self.schedule.input_transfer(action, self.rank))
            began = self._now()
            result = perform[action.kind](action, received)
            self.times[action] = began, self._now()
            if made := self.schedule.output_transfer(action, self.rank):
                self.leaving[made] = result
        self._post_transfers()
        for messages in self.sent:
            messages.wait()
        self.midway = False
        if wants_grad:
            grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in self.inputs]
            torch.autograd.backward(inputs, torch.cat(grads))
        self.inputs = self.targets = self.loss_arguments = ()
        return self.loss

    def _check_step(self, inputs, targets):
        batches = {"inputs": inputs, "targets": targets}
        for name, batch in batches.items():
            if batch is None:
                if self.needed[name]:
                    end = "begins" if name == "inputs" else "ends"
                    raise ValueError(f"{name}=None on rank {self.rank}, where a route {end}")
            elif not torch.is_tensor(batch) or not batch.ndim:
                raise ValueError(f"{name} is not a tensor of rows, but {type(batch).__name__}")
            elif not len(batch) or len(batch) % self.num_microbatches:
                raise ValueError(
                    f"{name} has {len(batch)} rows, "
                    f"not divisible by num_microbatches={self.num_microbatches}"
                )
        if inputs is not None and targets is not None and len(inputs) != len(targets):
            raise ValueError(f"inputs has {len(inputs)} rows, targets has {len(targets)}")
        if self.last and not torch.is_grad_enabled():
            raise ValueError("step() under no_grad(): of a schedule that is not forward_only()")
        if self.midway:
            raise RuntimeError("an earlier step() failed midway: its messages are still under way")

    def _forward(self, action, received):
        x = self.inputs[action.microbatch] if received is None else received
        if received is not None and self.last:
            x.requires_grad_()
        state = RandomState(self.device) if self.recompute and self.last else None
        if state:
            with torch.no_grad():
                output = self._run(action, x.clone())  # x itself is what backward begins with
        else:
            output = self._run(action, x)
        if self.schedule.neighbours(action, self.rank)[1] is None:
            self.loss = output.detach() + (0 if self.loss is None else self.loss)
        if self.last:
            self.in_flight[action[1:]] = x, None if state else output, state
        return output.detach().contiguous()

    def _run(self, action, x):
        """What the chunk makes of x; at the end of a route, the loss of it."""
        microbatch, chunk = place = action[1:]
        deferring = _DeferWeights(self.defer) if place in self.split_backward else None
        with deferring or nullcontext():
            output = self.stages[chunk](_Entry.apply(x))
        if not torch.is_tensor(output):
            raise ValueError(f"stage {self.rank} returned {type(output).__name__}, not a tensor")
        if self.schedule.neighbours(action._replace(kind="F"), self.rank)[1] is None:
            output = self._loss_of(output, self.targets[microbatch], self.rows[microbatch])
        return output

    def _loss_of(self, output, target, rows):
        if len(target) != rows:
            raise ValueError(f"a microbatch has {rows} rows of inputs, {len(target)} of targets")
        loss = self.loss_fn(output, target, *self.loss_arguments)
        if not torch.is_tensor(loss):
            raise ValueError(f"loss_fn returned {type(loss).__name__}, not a tensor")
        if loss.numel() != 1 and self.last:
            raise ValueError(f"loss_fn returned {tuple(loss.shape)}, not a scalar")
        return loss

    def _backward(self, action, grad_output):
        x, output, state = self.in_flight.pop(action[1:])
        if state:
            with state:
                output = self._run(action, x)
        halved = self.defer.collect() if action.kind == "I" else nullcontext()
        with self._no_sync(action), halved as products:
            if output.requires_grad or grad_output is None:  # not so if all before it is frozen
                torch.autograd.backward(output, grad_output)
        if action.kind == "I":
            self.put_off[action[1:]] = products
        if self.schedule.output_transfer(action, self.rank) is None:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad

    def _weights(self, action, _):
        products, stage = self.put_off.pop(action[1:]), self.stages[action.chunk]
        if action == self.last[stage] and hasattr(stage, "start_grad_sync"):
            stage.start_grad_sync(awaited={parameter for parameter, _ in products})
        with self._no_sync(action):
            _add_products(products)

    def _no_sync(self, action):
        """Gradients are reduced once, with the last backward of a module."""
        stage = self.stages[action.chunk]
        if action == self.last[stage]:
            return nullcontext()
        return getattr(stage, "no_sync", nullcontext)()

    def _now(self):
        """This moment; on a GPU, that at which it gets here."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timeline(self):
        """What the last step did in time, as simulate() would say it, in seconds. Collective.

        Each rank's time begins with its step: a barrier before that makes them the same.
        RuntimeError if no step has ended.
        """
        if len(self.times) < len(self.actions):
            raise RuntimeError("timeline() of a step that has not ended")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            since = lambda moment: self.began.elapsed_time(moment) / 1e3
        else:
            since = lambda moment: moment - self.began
        mine = [tuple(map(since, self.times[action])) for action in self.actions]
        start, end = [], []
        for actions, times in zip(self.schedule, gather_objects(mine, self.group)):
            start.append({action: first for action, (first, _) in zip(actions, times)})
            end.append({action: last for action, (_, last) in zip(actions, times)})
        return _timeline(self.schedule, start, end, simulate(self.schedule).transfers)

    def _post_transfers(self):
        """Post what can be posted without waiting, in the global order."""
        while self.unposted:
            transfer = self.unposted[0]
            if transfer.source == self.rank:
                if transfer not in self.leaving:
                    return
                self._send(self.leaving.pop(transfer), transfer)
            else:
                self._post_receive(transfer)
            self.unposted.popleft()

    def _send(self, tensor, transfer):
        if transfer.action.kind == "F":
            self._send_meta(tensor, transfer)
        messages = exchange([(tensor, transfer.destination)], [], self.group, async_op=True)
        self.sent.append(messages)
        if len(self.sent) > self.num_stages:  # sent tensors live until waited for: keep only a few
            self.sent.popleft().wait()

    def _post_receive(self, transfer):
        boundary = transfer.source, transfer.action.chunk
        if transfer.action.kind == "F":
            if boundary not in self.formats:
                self.formats[boundary] = self._recv_meta(transfer)
            self.rows[transfer.action.microbatch] = self.formats[boundary][0]
        else:  # the gradient of what this rank has sent
            _, boundary = self.schedule.neighbours(transfer.action, transfer.source)
        _, dtype, shape = self.formats[boundary]
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        messages = exchange([], [(buffer, transfer.source)], self.group, async_op=True)
        self.arriving[transfer] = buffer, messages

    def _send_meta(self, tensor, transfer):
        """Ahead of the first tensor of a boundary, tell the next rank its format."""
        boundary = self.rank, transfer.action.chunk
        found = self.rows[transfer.action.microbatch], tensor.dtype, tensor.shape
        if boundary not in self.formats:
            if tensor.dtype not in _DTYPES or tensor.ndim > _HEADER - 3:
                raise ValueError(
                    f"stage {self.rank} cannot send {tensor.dtype} of {tensor.ndim} dims"
                )
            header = [found[0], _DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
            header = torch.tensor(header + [0] * (_HEADER - len(header)), device=self.device)
            exchange([(header, transfer.destination)], [], self.group)
        (_, dtype, shape), first = found, self.formats.setdefault(boundary, found)
        if found != first:
            raise ValueError(
                f"stage {self.rank} made {tuple(shape)} {dtype} of {found[0]} rows of inputs after "
                f"its first output was {tuple(first[2])} {first[1]} of {first[0]}"
            )

    def _recv_meta(self, transfer):
        header = torch.zeros(_HEADER, dtype=torch.int64, device=self.device)
        exchange([], [(header, transfer.source)], self.group)
        rows, dtype, ndim, *shape = header.tolist()
        return rows, _DTYPES[dtype], torch.Size(shape[:ndim])

    def _receive(self, transfer):
        if transfer is None:
            return None
        if transfer.source == self.rank:  # from the rank's own other chunk
            return self.leaving.pop(transfer)
        buffer, messages = self.arriving.pop(transfer)
        messages.wait()
        return buffer


def sum_replicas(stages, group=None):
    """Sum the gradients of DualPipe's replicas: chunk 0 here is chunk 1 of the mirrored rank.

    stages: this rank's two, as a Pipeline has them, none of whose parameters was frozen or thawed
    since. Collective; to be called once the gradients of a batch are complete, be it of one step
    or several. Both replicas then have the same bits.
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


def _device_of(stages, group):
    """Where the stages are; if they hold no tensor, where the group's backend wants messages."""
    tensors = [t for stage in stages for t in (*stage.parameters(), *stage.buffers())]
    backends = "cuda" if "cuda:nccl" in dist.get_backend_config(group) else "cpu"
    return tensors[0].device if tensors else torch.device(backends)


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

    Of zb-h2 and zb-v, whose ranks begin and end one after the other, that between its first and its
    last action, zb-v's where W <= F <= B - W; dualpipe's is an upper bound; naive's grows with the
    number of microbatches.
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


def _simulated(name, num_stages, num_microbatches):
    """A schedule, its timeline, bubble and peak; F, I and W of all of a rank's layers take 1."""
    schedule = SCHEDULES[name](num_stages, num_microbatches)
    chunks = {action.chunk for actions in schedule for action in actions}
    parts = 1 if name == "dualpipe" else len(chunks)  # there a chunk is a replica of all layers
    timeline = simulate(schedule, 1 / parts, 2 / parts, weight=1 / parts)
    bubble = max(timeline.idle if name in ("zb-h2", "zb-v") else timeline.bubble)
    return schedule, timeline, bubble, max(timeline.peak) / parts


def _compare(num_stages, num_microbatches):
    print(f"{num_stages} stages, {num_microbatches} microbatches; F = 1, B = 2, of which W = 1\n")
    print(f"{'':12}{'bubble':>18}{'peak activations':>24}{'total':>9}")
    print(f"{'':12}{'claimed simulated':>18}{'claimed simulated':>24}")
    for name in SCHEDULES:
        claimed = bubble_time(name, num_stages, num_microbatches)
        peak = peak_activations(name, num_stages, num_microbatches)
        try:
            _, timeline, bubble, held = _simulated(name, num_stages, num_microbatches)
        except ValueError as error:
            print(f"{name:12}{error}")
            continue
        numbers = f"{claimed:8.1f}{bubble:10.1f}{peak:14.1f}{held:10.1f}{timeline.total:9.1f}"
        print(f"{name:12}{numbers}")


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
        simulated = _simulated(args.schedule, args.stages, args.microbatches)
        schedule, timeline, bubble, peak = simulated
        if args.trace:
            with open(args.trace, "w") as file:
                json.dump({"traceEvents": trace_events(timeline)}, file)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(draw(schedule, color=sys.stdout.isatty()))
    claimed = bubble_time(args.schedule, args.stages, args.microbatches)
    print(f"bubble: claimed {claimed:g}, simulated {bubble:g}")
    claimed = peak_activations(args.schedule, args.stages, args.microbatches)
    print(f"peak activations, in microbatches: claimed {claimed:g}, simulated {peak:g}")


if __name__ == "__main__":
    run_ranks(_demonstrate) if "RANK" in os.environ else main()
