"""Pipeline parallelism: a model's layers are divided into stages, and microbatches flow through.

A stage consists of consecutive layers. Each rank, a process that usually has a GPU of its own, has
one stage, so the model can be larger than the memory of a GPU. Ranks send little: activations to
the next rank, and their gradients to the previous one.

If a batch passes through in one piece, only one stage works at a time. If the batch is cut into m
microbatches, the stages work side by side. At the start, a rank is idle until the first microbatch
reaches its stage. At the end, it is idle while the last gradient goes on to earlier stages. In
between, it may wait for gradients. This idle time is called the bubble. Here are p = 3 stages and
m = 5 microbatches. Each row is a rank. F2 is the forward of microbatch 2, and takes one slot of
time; B2B2 is its backward, and takes two. A message takes no time, and dots are idle:

    GPipe: all forward, then all backward          1F1B: one forward, one backward, in turn
    F0F1F2F3F4............B0B0B1B1B2B2B3B3B4B4     F0F1F2........B0B0F3B1B1F4B2B2..B3B3..B4B4
    ..F0F1F2F3F4......B0B0B1B1B2B2B3B3B4B4....     ..F0F1....B0B0F2B1B1F3B2B2F4B3B3..B4B4....
    ....F0F1F2F3F4B0B0B1B1B2B2B3B3B4B4........     ....F0B0B0F1B1B1F2B2B2F3B3B3F4B4B4........

The bubble is the same. If a stage's forward takes the time F and its backward B, the bubble is
(p-1)(F+B). The last rank shows why: its first input has been through p-1 forwards, then it works
without a pause, and its last gradient still has p-1 backwards to go through. The other ranks do the
same work, m(F+B), in the same step, so they are idle for as long. The bubble is (p-1)/m of this
work, or (p-1)/(m+p-1) of the whole step. 1F1B saves memory: rank r, counted from 0, holds
activations of at most min(m, p - r) microbatches, here 3, 2 and 1. GPipe holds all m = 5. Below the
line "upper floor" stand other schedules, which also shorten the bubble.

Microbatches do not change the result of layers that treat each sample by itself, such as attention
and LayerNorm. BatchNorm would use the mean and variance of a microbatch instead of the batch's.

A rank holds   the parameters of its stages, their gradients and optimizer state; the activations of
               every microbatch whose forward is done and whose backward is not
It sends       per microbatch, activations to the next stage and a gradient to the previous one;
               each has b s h elements (microbatch size, sequence length, width)
Overlap        on the upper floor, messages travel while ranks compute, and a rank begins to receive
               before it needs the data. In 1F1B, ranks still wait for some messages, because a rank
               often needs what its neighbour has just made. GPipe hides more of them
PyTorch's      torch.distributed.pipelining has GPipe, 1F1B, interleaved 1F1B, ZB-V, DualPipeV and
               others, and also cuts models into stages. By default, it divides gradients by the
               number of microbatches; here loss_fn returns a microbatch's share of the loss

Huang et al., "GPipe", 2019. Narayanan et al., "PipeDream", 2019 and "Memory-Efficient
Pipeline-Parallel DNN Training", 2021 (PipeDream-flush, called 1F1B here and in Megatron-LM).
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021
(interleaved). Qi et al., "Zero Bubble Pipeline Parallelism", 2024 (ZB-V only in the arXiv version).
DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024 (DualPipe). Sea AI Lab, "Cut-in-half", 2025, and
DeepSeek's code (DualPipeV).

    torchrun --nproc-per-node 4 pipeline.py           print claimed and counted costs
    python pipeline.py --schedule zb-h2 --stages 4 --microbatches 8       draw a schedule
    python pipeline.py --stages 4 --microbatches 8                        compare all schedules
"""

import argparse
import os
import threading
from collections import Counter, defaultdict, deque
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from collectives import autocasted, count_bytes, exchange, gather_objects, rank_and_size, run_ranks

# ---- the idea ------------------------------------------------------------------------------------


def gpipe_step(stage, inputs, targets, loss_fn, group=None):
    """One step of GPipe: all microbatches go forward, then their gradients come back.

        stage = stages[rank]  # of a list of modules, one for each rank
        optimizer = torch.optim.AdamW(stage.parameters())
        for inputs, targets in batches:  # the same on all ranks
            gpipe_step(stage, inputs.chunk(m), targets.chunk(m), lambda y, t: loss(y, t) / m)
            optimizer.step()  # each rank updates its own stage, without messages
            optimizer.zero_grad()

    inputs, targets: lists of microbatches. In the example m divides the batch, so they are equal,
        and each has 1/m of the loss. The first rank uses the values of inputs. The others use only
        their shape, floating-point dtype and device, which must be those of the tensors they
        receive. So if stages keep the shape of their input, all ranks can pass the same inputs. If
        the first stage embeds tokens, the others pass tensors made by torch.empty() (see
        plain_step() in hybrid.py). Only the last rank uses targets.
    loss_fn returns a microbatch's share of the loss, such as its mean divided by the number of
        microbatches, because the gradients of the shares are summed. If some targets are masked, it
        divides the microbatch's sum by the batch's number of targets.
    group: the ranks of the pipeline, or None for all that torchrun has started. With NCCL, give
        init_process_group() a device_id, or run a collective in the group before the first step.
        Otherwise the group's first exchange, between two of its ranks, hangs.

    No stage may change its input in place, and its output must depend on its input. Gradients
    accumulate in the parameters. Returns the losses of the microbatches on the last rank, and None
    on the others.
    """
    # Autograd knows nothing of messages, so each rank has a graph of its own, from x to output. If
    # g is the gradient of the loss with respect to output, output.backward(g) continues the chain
    # rule. It leaves the gradient with respect to x in x.grad, and that is the previous rank's g.
    # exchange() of collectives.py takes two lists of (tensor, peer), what to send and where to
    # receive, and returns when all has arrived; plain_exchange() there is its plain form.
    rank, world_size = rank_and_size(group)
    last = world_size - 1
    passes = []  # (input, output) of each microbatch; on the last rank its loss is the output
    for i, x in enumerate(inputs):
        if rank > 0:
            x = x.new_empty(x.shape)  # contiguous, as messages must be
            exchange([], [(x, rank - 1)], group)
            x.requires_grad_()  # a leaf, whose gradient goes back
        output = stage(x)
        if rank < last:
            exchange([(output.detach().contiguous(), rank + 1)], [], group)
        else:
            output = loss_fn(output, targets[i])  # a scalar, whose backward needs no gradient
        passes.append((x, output))
    for x, output in passes:
        grad_output = None
        if rank < last:
            grad_output = output.new_empty(output.shape)
            exchange([], [(grad_output, rank + 1)], group)
        output.backward(grad_output)
        if rank > 0:
            exchange([(x.grad, rank - 1)], [], group)
    return [loss.detach() for _, loss in passes] if rank == last else None


def one_f_one_b_step(stage, inputs, targets, loss_fn, group=None):
    """One step of 1F1B: gpipe_step() in another order, which keeps fewer activations.

    It takes the same arguments, and returns the same.

    A rank first goes forward once per later stage, or m times if m is smaller: this is its warm-up.
    If m allows, it then goes forward once more and waits for its first gradient. The last stage has
    no warm-up and need not wait, because its backward begins with its own loss. After a shorter
    warm-up, too few microbatches would be on their way, and the last stage would wait for inputs. A
    longer one would hold more activations, and would not shorten the step if messages take no time,
    because the last stage is already busy from its first forward to its last backward.

    From then on a rank goes backward after each forward, which frees the activations of one
    microbatch before it makes those of another: this is the steady phase. The backwards that are
    left are the cooldown. Here are p = 3 and m = 5. Bars enclose the steady phase, and the two ends
    of an exchange stand in one column:

        rank 0   F > F   > | F      >< B F    >< B F    >< B |    < B     < B
        rank 1     ) F > ) | F >< B () F >< B () F >< B () F >< B ( | < B (
        rank 2         ) | F B () F B    () F B    () F B    () F B   ( |

        )  receive an input from the previous rank        (  send it this input's gradient
        >  send an output to the next rank                <  receive this output's gradient

    So rank 1 receives an input, goes forward and sends the output; receives an input, goes forward,
    swaps the output for a gradient, goes backward and swaps the input's gradient for an input; and
    so on. A swap, >< or (), is one exchange. In it, two neighbours send to each other at the same
    time. If each waited for its send before it received, neither would go on.
    """
    rank, world_size = rank_and_size(group)
    last = world_size - 1
    m = len(inputs)
    warmup = min(m, last - rank)
    next_inputs = [*inputs, None]  # forwards receive tensors like these; None follows the last
    passes = deque()  # (input, output) of each microbatch that has gone forward and not back
    losses = []

    def swap(peer, *send, like=None):
        """Exchange with a peer: send a tensor, or none, and receive one like `like`, if given.

        Returns what was received, or None. Beyond the ends of the pipeline there is no peer, so
        nothing happens.
        """
        if not 0 <= peer <= last:
            return None
        received = None if like is None else like.new_empty(like.shape)
        sends = [(tensor.contiguous(), peer) for tensor in send]
        receives = [] if like is None else [(received, peer)]
        exchange(sends, receives, group)
        return received

    def forward(i, x):
        if rank == 0:
            x = inputs[i]
        else:
            x.requires_grad_()  # a leaf, whose gradient goes back
        output = stage(x)
        if rank == last:
            output = loss_fn(output, targets[i])
            losses.append(output.detach())
        passes.append((x, output))
        return output.detach()

    def backward(grad_output):
        x, output = passes.popleft()
        output.backward(grad_output)
        return x.grad

    for i in range(warmup):  # forwards alone; on rank 0 x is None, and forward() takes inputs[i]
        x = swap(rank - 1, like=next_inputs[i])
        swap(rank + 1, forward(i, x))
    x = swap(rank - 1, like=next_inputs[warmup])  # for the first forward below, if there is one
    for i in range(warmup, m):  # the steady phase: one forward, one backward
        output = forward(i, x)
        grad_output = swap(rank + 1, output, like=passes[0][1])  # like the oldest output
        grad_x = backward(grad_output)  # the last rank has received None: it begins at its loss
        x = swap(rank - 1, grad_x, like=next_inputs[i + 1])
    while passes:  # the cooldown: the backwards that are left
        grad_output = swap(rank + 1, like=passes[0][1])
        swap(rank - 1, backward(grad_output))
    return losses if rank == last else None


# ==== upper floor =================================================================================
#
# The two functions above are two schedules. Below, a schedule is data: lists of actions, one list
# for each rank. schedule_step() runs any schedule, with exchanges that block. A reader who wants
# the technique alone may stop after it. The rest adds to it:
#
#     schedules              seven of them, and formulas for the bubble and the peak of each
#     simulator              the time of each action, and the order in which messages arrive
#     program                the order in which a rank posts messages, computes and waits
#     halves of a backward   layers whose weights' gradients are computed later, in idle time
#     executor               Pipeline, the class to use: messages travel while ranks compute
#     DualPipe               two more schedules, for models with experts: a forward and a backward
#                            hide each other's messages
#
# Schedules shorten the bubble in three ways. They divide a backward, so that the part for which no
# other rank waits can fill idle time; they cut a rank's layers into chunks, so that microbatches
# reach the last rank sooner; or, as DualPipe does, they fill the pipeline from both ends.

# ---- what a schedule is --------------------------------------------------------------------------
#
# A rank's row lists what it does, from left to right. Here is 1F1B for p = 2 ranks and m = 3
# microbatches, first as a schedule, which says nothing about time, and then drawn to scale, with
# dots where a rank waits. F takes one slot and B two:
#
#     rank 0   F0 F1 B0 F2 B1 B2        F0F1....B0B0F2B1B1..B2B2
#     rank 1   F0 B0 F1 B1 F2 B2        ..F0B0B0F1B1B1F2B2B2....
#
# The letters are
#
#     F   the forward of a microbatch. Rank 1's F0 needs the output of rank 0's F0
#     B   its backward. Rank 0's B0 needs the gradient that rank 1's B0 makes
#     I   the half of a backward that computes the gradient of the stage's input. The previous stage
#         waits for it. (The paper on zero bubbles writes B for I)
#     W   the other half, for the gradients of the stage's weights. No other stage waits for it
#
# If a rank has two chunks of layers, small letters stand for the second one: f0 is the forward of
# microbatch 0 in chunk 1.


class Action(NamedTuple):
    """What a rank does with one microbatch in one chunk of its layers. kind: one of F B I W."""

    kind: str
    microbatch: int
    chunk: int = 0

    @property
    def key(self):
        """What the F and the B, or I and W, of a microbatch in a chunk have in common."""
        return self.microbatch, self.chunk


class Transfer(NamedTuple):
    """A tensor that an action on rank `source` makes and an action on rank `destination` needs.

    action: the F that makes this output, or the B that makes this gradient. If an I makes it, a B
        is written all the same. If a rank has several chunks, source and destination may be the
        same rank.
    """

    action: Action
    source: int
    destination: int


class Schedule(list):
    """A row for each rank, and the route that microbatches take through the ranks.

    A row lists a rank's Actions in order. If F0 is Action("F", 0), the example above is
    [[F0, F1, B0, F2, B1, B2], [F0, B0, F1, B1, F2, B2]].

    routes: a list of routes, mostly of one. A route lists the places (rank, chunk) that a forward
        visits, in order; its backward visits them in reverse. The default is (0, 0), (1, 0), (2, 0)
        and so on. With two routes, the first half of the microbatches takes the first.
    needs, makes: {(action, rank): [Transfer]}, what must arrive before an action begins, and what
        can leave when it ends. Rank 1's F0 needs what rank 0's F0 makes, so in the example,
        needs[F0, 1] and makes[F0, 0] are both [Transfer(F0, 0, 1)]. A list has one Transfer or
        none: where a route begins, F needs nothing and B makes nothing; where it ends, F makes
        nothing and B needs nothing; and a W never needs or makes anything.

    Raises ValueError if a rank has no actions, or a microbatch lacks an action at a place of its
    route, repeats one or has them out of order.
    """

    def __init__(self, rows, routes=None):
        super().__init__(rows)
        if not all(self):
            raise ValueError(f"rank {self.index([])} has no actions")
        self.routes = routes or [[(rank, 0) for rank in range(len(self))]]
        self.num_microbatches = 1 + max(action.microbatch for row in self for action in row)
        _check_actions(self)
        self.needs = defaultdict(list)
        self.makes = defaultdict(list)
        for microbatch in range(self.num_microbatches):
            route = self.route(microbatch)
            for (rank, chunk), (next_rank, next_chunk) in zip(route, route[1:]):
                output = Transfer(Action("F", microbatch, chunk), rank, next_rank)
                self.makes[Action("F", microbatch, chunk), rank] = [output]
                self.needs[Action("F", microbatch, next_chunk), next_rank] = [output]
                gradient = Transfer(Action("B", microbatch, next_chunk), next_rank, rank)
                for kind in "BI":
                    self.makes[Action(kind, microbatch, next_chunk), next_rank] = [gradient]
                    self.needs[Action(kind, microbatch, chunk), rank] = [gradient]

    def route(self, microbatch):
        """Return the places that a microbatch visits on its way forward."""
        return self.routes[microbatch * len(self.routes) // self.num_microbatches]


# ---- any schedule, one exchange at a time --------------------------------------------------------
#
# All ranks go through one list of all ranks' actions. A rank performs those that are its own. If
# one makes what another rank needs, these two ranks exchange it before they go on. So no rank waits
# forever: of all exchanges that are not done, take the first in the list. Both of its ranks have
# done whatever the list has before it, so both come to it.


def in_order(schedule):
    """Yield (rank, action) for all actions of all rows, each after those that make what it needs.

    The ranks take turns. In its turn, a rank performs its next action unless it must wait. The
    example begins: rank 0 F0, rank 1 F0, rank 0 F1, rank 1 B0, rank 0 B0. Raises ValueError if all
    ranks wait; the error then says at what.
    """
    queues = [deque(row) for row in schedule]
    made = set()
    while any(queues):
        progress = False
        for rank, queue in enumerate(queues):
            if queue and made.issuperset(schedule.needs[queue[0], rank]):
                action = queue.popleft()
                yield rank, action
                made.update(schedule.makes[action, rank])
                progress = True
        if not progress:
            stuck = [(rank, queue[0]) for rank, queue in enumerate(queues) if queue]
            where = ", ".join(f"rank {rank} at {a.kind}{a.microbatch}" for rank, a in stuck)
            raise ValueError(f"the schedule cannot finish: {where} waiting for missing inputs")


def schedule_step(stages, schedule, inputs, targets, loss_fn, like, group=None):
    """One step of any schedule: gpipe_step() and one_f_one_b_step() made general.

        stages = chunks[rank]  # this rank's modules: one, or two for zb_v(), which is below
        losses = schedule_step(stages, zb_v(p, m), inputs.chunk(m), targets.chunk(m), loss_fn, like)

    inputs, targets, loss_fn, group: as in gpipe_step(), but only ranks where a route begins need
        inputs.
    like: a tensor with the shape, dtype and device that everything has that ranks send.

    Layers of torch.nn compute the gradients of input and weights together. So here an I is a whole
    backward, and a W does nothing. Returns the losses of microbatches whose routes end here.
    """
    rank, _ = rank_and_size(group)
    tensors = {}  # {Transfer: tensor}, from when it is made or received until it is used or sent
    passes = {}  # {(microbatch, chunk): (input, output)}, as in gpipe_step()
    losses = []
    for batch, end in ((inputs, 0), (targets, -1)):
        is_used = any(route[end][0] == rank for route in schedule.routes)
        if is_used and len(batch) != schedule.num_microbatches:
            what = f"{len(batch)} microbatches"
            raise ValueError(f"{what}, but the schedule has {schedule.num_microbatches}")

    def perform(action, received=None):
        if action.kind == "F":
            x = inputs[action.microbatch] if received is None else received.requires_grad_()
            output = stages[action.chunk](x)
            if (rank, action.chunk) == schedule.route(action.microbatch)[-1]:
                output = loss_fn(output, targets[action.microbatch])
                losses.append(output.detach())
            passes[action.key] = x, output
            return output.detach().contiguous()  # as messages must be
        if action.kind == "W":
            return None
        x, output = passes.pop(action.key)
        output.backward(received)  # None where a route ends, since there the output is the loss
        return x.grad

    for actor, action in in_order(schedule):
        made = schedule.makes[action, actor]
        if actor == rank:
            received = [tensors.pop(transfer) for transfer in schedule.needs[action, rank]]
            result = perform(action, *received)
            for transfer in made:
                tensors[transfer] = result
        for transfer in made:
            if transfer.source == transfer.destination:
                continue  # it is for another chunk of the same rank
            if rank == transfer.source:
                exchange([(tensors.pop(transfer), transfer.destination)], [], group)
            elif rank == transfer.destination:
                tensors[transfer] = like.new_empty(like.shape)
                exchange([], [(tensors[transfer], transfer.source)], group)
    return losses


def _check_actions(schedule):
    """Raise ValueError unless each place of a microbatch's route has FB or FIW (evaluation: F)."""
    kinds = defaultdict(str)
    for rank, row in enumerate(schedule):
        for kind, microbatch, chunk in row:
            kinds[rank, microbatch, chunk] += kind
    allowed = ("F",) if set(kinds.values()) == {"F"} else ("FB", "FIW")
    for microbatch in range(schedule.num_microbatches):
        for rank, chunk in schedule.route(microbatch):
            if (performed := kinds.pop((rank, microbatch, chunk), "")) not in allowed:
                where = f"rank {rank}, {microbatch=}, {chunk=}"
                raise ValueError(f"{where}: {performed!r} is none of {allowed}")
    if kinds:
        raise ValueError(f"(rank, microbatch, chunk) on no route: {list(kinds)}")


# ---- schedules -----------------------------------------------------------------------------------
#
# p = num_stages is the number of ranks, even if a rank has several stages, called chunks; m is
# num_microbatches. claim(), in the next section, says what each schedule costs.


def _schedule(p, m, letters_of, routes=None):
    """Return the Schedule whose rank r does what letters_of(r) spells."""
    return Schedule([_actions(letters_of(rank), m) for rank in range(p)], routes)


def _actions(letters, m):
    """Return the actions that letters spell: F B I W act on chunk 0, f b i w on chunk 1.

    A chunk's first F is that of microbatch 0, the second that of 1, and so on. So are its
    backwards, each a B or an I, and its Ws. A B counts as an I and as a W: "FFIWB" is
    F0 F1 I0 W0 B1. Letters beyond microbatch m - 1 are left out.
    """
    counts = Counter()  # {(F, I or W, chunk): how many have been spelled}
    actions = []
    for letter in letters:
        kind = letter.upper()
        chunk = int(letter.islower())
        halves = "IW" if kind == "B" else kind
        microbatch = counts[halves[0], chunk]
        for half in halves:
            counts[half, chunk] += 1
        if microbatch < m:
            actions.append(Action(kind, microbatch, chunk))
    return actions


def naive(num_stages, num_microbatches):
    """One microbatch at a time, so only one rank works at a time."""
    return _schedule(num_stages, num_microbatches, lambda rank: "FB" * num_microbatches)


def gpipe(num_stages, num_microbatches):
    """All forwards, then all backwards, on every rank, which keeps the activations of all m."""
    m = num_microbatches
    return _schedule(num_stages, m, lambda rank: "F" * m + "B" * m)


def one_f_one_b(num_stages, num_microbatches):
    """Warm up with one forward per later stage, alternate forward and backward, then cool down.

    The bubble is GPipe's, but rank r keeps the activations of at most p - r microbatches.

        rank 0   F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5        p = 4, m = 6; idle slots are not drawn
        rank 1   F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
        rank 2   F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
        rank 3   F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
    """
    p, m = num_stages, num_microbatches

    def letters(rank):
        warmup = min(p - rank - 1, m)
        return "F" * warmup + "FB" * (m - warmup) + "B" * warmup

    return _schedule(p, m, letters)


def interleaved(num_stages, num_microbatches, num_chunks=2):
    """1F1B with v chunks per rank: chunk c of rank r is stage c*p + r.

    The bubble is 1/v of 1F1B's. The price is v times as many messages (of a rank with two
    neighbours), and activations: ((v+1)p - 1)/v microbatches of them on rank 0, where 1F1B has p.
    Microbatches go in groups of p: a group passes chunk 0 of all ranks, then chunk 1, and so on.

        rank 0   F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3        p = 2, m = 4, v = 2;
        rank 1   F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3        small letters: chunk 1

    Raises ValueError if m % p != 0.
    """
    p, m, v = num_stages, num_microbatches, num_chunks
    if m % p:
        raise ValueError(f"num_microbatches={m} is not a multiple of num_stages={p}")
    groups = [range(first, first + p) for first in range(0, m, p)]
    order = [(i, chunk) for group in groups for chunk in range(v) for i in group]
    forwards = [Action("F", i, chunk) for i, chunk in order]
    backwards = [Action("B", i, v - 1 - chunk) for i, chunk in order]
    rows = []
    for rank in range(p):
        # The last rank's first backward follows the first F of its last chunk, before which it has
        # (v-1)p Fs. Each rank before it goes forward twice more: while that microbatch is on its
        # way to the next rank, and while its gradient is on the way back.
        warmup = 2 * (p - rank - 1) + (v - 1) * p
        steady = [action for pair in zip(forwards[warmup:], backwards) for action in pair]
        cooldown = backwards[len(steady) // 2 :]
        rows.append(forwards[:warmup] + steady + cooldown)
    return Schedule(rows, [[(rank, chunk) for chunk in range(v) for rank in range(p)]])


def zb_h1(num_stages, num_microbatches):
    """1F1B with I and W in place of B. Rank r defers each W by r microbatches, to fill idle slots.

    When rank r has done its last I, the gradient goes on through the r ranks before it. This is
    when 1F1B's ranks are idle. Rank 0 ends with a W, and here rank r still has r + 1 Ws to do.

        rank 0   F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5        p = 4, m = 6
        rank 1   F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
        rank 2   F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
        rank 3   F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

    If F = I = W, the bubble is a third of 1F1B's. Each rank keeps as many activations as rank 0 of
    1F1B, as Claim counts them.
    """
    p, m = num_stages, num_microbatches
    return _schedule(p, m, lambda rank: _deferring(p - rank, rank, max(m, p)))


def zb_h2(num_stages, num_microbatches):
    """ZB-H1 with a longer warmup. If F = I = W and m >= 2p-1, no rank waits once it has begun.

    It keeps the activations of up to 2p - 1 microbatches, nearly twice as many as 1F1B.

        rank 0   F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3        p = 2, m = 4
        rank 1   F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    After F0, 2(p-r-1) slots pass on rank r until its gradient arrives, because it goes through
    p-r-1 more ranks, and the gradient comes back through them. Forwards fill these slots. Rank r
    begins r slots after rank 0, and so also ends r slots later, but its last I is r slots earlier.
    So 2r Ws are deferred.

    A rank can begin its next step while others finish this one, unless its update needs the norm of
    all gradients. In the paper, ranks update first, and redo the update if the norm was too large.
    """
    p, m = num_stages, num_microbatches
    n = max(m, 2 * p - 1)
    return _schedule(p, m, lambda rank: _deferring(2 * (p - rank) - 1, 2 * rank, n))


def _deferring(warmup, deferred, n):
    """Spell a row that has `warmup` forwards before its first I, and then leaves `deferred` Ws.

    n: the number of microbatches, or as many as such a row needs, if there are fewer. _actions()
    then leaves out the rest.
    """
    letters = "F" * warmup
    letters += "IF" * deferred
    letters += "IWF" * (n - warmup - deferred)  # each W is that of `deferred` microbatches before
    letters += "IW" * warmup  # no F is left
    letters += "W" * deferred
    return letters


def zb_v(num_stages, num_microbatches):
    """Two chunks on each rank: the route goes down the ranks and up again, like a V.

    If F = I = W and m >= 2p, no rank waits once it has begun. No rank keeps more activations than
    rank 0 of 1F1B, as Claim counts them. Rank 0 has the first and last layers, so backward begins
    there. p = 2, m = 4:

        rank 0   F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3
        rank 1   F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3
    """
    p, m = num_stages, num_microbatches
    n = max(m, 2 * p)  # as in _deferring()

    def letters(rank):
        below = p - rank - 1  # ranks that F0 still goes down
        # F0 passes them twice, on its way down and, as f0, up. Fs fill the time until it is back.
        row = "F" * (2 * below + 1)
        # f0 has `rank` more stages to go, and its gradient comes back through as many.
        row += "fF" * rank
        # From now on an i and a w follow each f, so that no more activations are kept, until the
        # first gradient has been down chunk 1 and up chunk 0. On the last rank this takes a round
        # of three slots. Each rank further up needs a round more: its i0 is a slot earlier, and its
        # I0 at least one later.
        row += "fiw" * (below + 1)
        row += "FIWfiw" * (n - 2 * p + rank + 1)  # all that a microbatch needs, until no F is left
        row += "IWfiw" * below  # until no f is left
        # p Is and `rank` is are left. Other ranks wait for these, and none for a W.
        row += "Ii" * rank + "IW" * (below + 1) + "w" * rank + "W" * rank
        return row

    return _schedule(p, m, letters, [_down_and_up(p)])


def _down_and_up(p):
    """Return the route down chunk 0 of all ranks, and up chunk 1 of the same ranks."""
    return [(r, 0) for r in range(p)] + [(r, 1) for r in reversed(range(p))]


def forward_only(num_stages, num_microbatches, route=None):
    """Evaluation: only the forwards, along one route. Pipeline keeps none of their graphs."""
    route = route or [(rank, 0) for rank in range(num_stages)]
    rows = [[] for _ in range(num_stages)]
    for time in range(num_microbatches + len(route) - 1):
        for index, (rank, chunk) in enumerate(route):
            if 0 <= time - index < num_microbatches:  # this microbatch is here at this time
                rows[rank].append(Action("F", time - index, chunk))
    return Schedule(rows, [route])


# ---- what the schedules cost ---------------------------------------------------------------------
#
# The formulas of claim() for the bubble. F, B, I and W are a microbatch's times on a rank:
#
#     naive          The other p - 1 ranks work on each microbatch, one after another.
#     gpipe, 1f1b    The last rank waits for its first input, (p-1)F, and at the end until the last
#                    gradient has reached rank 0, (p-1)B.
#     interleaved    The same for chunks, which take 1/v of the time.
#     zb-h1, zb-h2   The last rank begins at (p-1)F, and works without a pause. By the end of its
#                    last I, it has done its work, m(F+B), but for n Ws: those that it has deferred,
#                    and one. The last gradient takes (p-1)I to go through the other ranks, and
#                    rank 0 ends with a W. Rank 0 began at 0 and has as much work, so it was idle
#                    for (p-1)F - nW + (p-1)I + W. In zb-h1 n = p, and this is (p-1)(F+I-W). In
#                    zb-h2 n = 2p - 1, and it is (p-1)(F+I-2W).
#     zb-v           The same with halves of F, I and W, and n = 2p - 1: (p-1)(F+I-2W)/2. But here,
#                    the last rank pauses once. Its first gradient comes (p-1)(F+I)/2 after its
#                    forward of this microbatch, and in between it has 2(p-1) forwards of F/2 to do.
#                    The pause, (p-1)(I-F)/2, brings the sum to (p-1)(I-W).


class Claim(NamedTuple):
    """What a schedule costs.

    bubble: the idle time of the rank that waits longest, in the unit of the times that claim() is
        given. In zb-h2 and zb-v, it is that between a rank's first and last action, because ranks
        begin the next step while others finish this one.
    peak: the most activations that a rank keeps at a time. Those of a microbatch in 1/p of the
        model's layers count as 1, from F to B or W. After an I, layers keep other tensors for W,
        which count the same: the inputs and output gradients of the deferred products, 32 s b h
        bytes in a layer of GPT in 16 bits. Before it, they keep 34 s b h and the attention's scores
        (Qi et al.), or much less if they recompute them. In this case, schedules with I and W need
        more memory than peak says.
    holds: whether the bubble holds for these p and m.
    """

    bubble: float
    peak: float
    holds: bool


def claim(
    name, num_stages, num_microbatches, num_chunks=2, rank=0, forward=1.0, backward=2.0, weight=1.0
):
    """Return what a schedule of SCHEDULES costs by the formulas above.

    num_chunks: what the caller of interleaved() chooses.
    rank: whose peak it is. In 1f1b and interleaved later ranks keep less; else all keep the same.
    forward, backward, weight: a microbatch's times in all layers of a rank (dualpipe: in one
        chunk); weight is the part of backward that is W. Experts do not defer it
        (expert_parallel.py), so with them W is the time of the other layers' products alone. The
        comments say for which times the bubble holds.

    If m < 2p, the peak of zb-v is an upper bound.
    """
    p = num_stages
    m = num_microbatches
    v = num_chunks
    F = forward
    B = backward
    W = weight
    I = B - W
    begun = min(2 * (p - rank - 1) + (v - 1) * p + 1, m * v)  # the warm-up, and one more chunk
    claims = {
        # for any times
        "naive": Claim((p - 1) * m * (F + B), 1, True),
        "gpipe": Claim((p - 1) * (F + B), m, True),
        "1f1b": Claim((p - 1) * (F + B), min(m, p - rank), True),
        "interleaved": Claim((p - 1) * (F + B) / v, begun / v, m % p == 0),
        # if W <= F and W <= I
        "zb-h1": Claim((p - 1) * (F + B - 2 * W), min(m, p), m >= p),
        "zb-h2": Claim((p - 1) * (F + B - 3 * W), min(m, 2 * p - 1), m >= 2 * p - 1),
        # if W <= F <= I
        "zb-v": Claim((p - 1) * (I - W), min(m, p), m >= 2 * p),
        # upper bounds: see "DualPipe"
        "dualpipe": Claim(
            (p / 2 - 1) * (F + 2 * B - 3 * W), p + 1, m >= 2 * p and p % 2 == m % 2 == 0
        ),
        "dualpipe-v": Claim((p - 1) * (F + 2 * B - 3 * W) / 2, p + 1 / 2, m >= 2 * p),
    }
    return claims[name]


def pipeline_bytes(rank, num_stages, num_microbatches, microbatch_bytes):
    """Return the bytes that a rank with one chunk sends to its neighbours in a step."""
    boundaries = (rank < num_stages - 1) + (rank > 0)
    return boundaries * num_microbatches * microbatch_bytes


# ---- simulator -----------------------------------------------------------------------------------


@dataclass
class Timeline:
    """When each action of a schedule runs, and what follows from these times."""

    start: list  # per rank, {action: time}
    end: list
    total: float  # the end of the last action
    bubble: list  # per rank, its idle time in total
    idle: list  # per rank, its idle time between its first and its last action
    peak: list  # per rank, the most (microbatch, chunk) whose activations it keeps for backward
    transfers: list  # all transfers between ranks in one global order, by the time of arrival


def simulate(schedule, forward=1.0, backward=2.0, message=0.0, weight=1.0):
    """Time a schedule. Every rank does its actions in order, each as soon as its input has arrived.

    forward, backward: times of F and B of one chunk. weight: the part of B that is W. message: the
    time a tensor travels between ranks. Raises ValueError where in_order() does.
    """
    duration = {"F": forward, "B": backward, "I": backward - weight, "W": weight}
    start = [{} for _ in schedule]
    end = [{} for _ in schedule]
    free = [0.0] * len(schedule)  # per rank, the end of its latest action
    arrived = {}  # {Transfer: time}
    for rank, action in in_order(schedule):
        needed = [arrived[transfer] for transfer in schedule.needs[action, rank]]
        start[rank][action] = max([free[rank], *needed])
        free[rank] = start[rank][action] + duration[action.kind]
        end[rank][action] = free[rank]
        for made in schedule.makes[action, rank]:
            arrived[made] = free[rank] + (message if made.destination != rank else 0)
    work = [sum(duration[action.kind] for action in row) for row in schedule]
    bubble = [max(free) - busy for busy in work]
    idle = [last - min(begun.values()) - busy for last, begun, busy in zip(free, start, work)]
    keeps = any(action.kind != "F" for row in schedule for action in row)
    change = {"F": int(keeps), "B": -1, "I": 0, "W": -1}
    peak = [max(accumulate(change[action.kind] for action in row)) for row in schedule]
    transfers = [t for t in arrived if t.source != t.destination]
    transfers.sort(key=lambda transfer: (arrived[transfer], transfer))
    return Timeline(start, end, max(free), bubble, idle, peak, transfers)


def draw(schedule):
    """Return the timeline as text: a row per rank, a cell per slot, capital letters for chunk 0."""
    width = len(f"F{schedule.num_microbatches - 1}")
    timeline = simulate(schedule)
    rows = []
    for rank, start in enumerate(timeline.start):
        cells = ["." * width] * int(timeline.total)
        for action, begin in start.items():
            letter = action.kind.lower() if action.chunk else action.kind
            for slot in range(int(begin), int(timeline.end[rank][action])):
                cells[slot] = f"{letter}{action.microbatch}".ljust(width)
        rows.append(f"rank {rank}  " + "".join(cells))
    return "\n".join(rows)


# ---- the program of a rank -----------------------------------------------------------------------
#
# In schedule_step() a rank waits for each message. Here it posts messages ahead and goes on, and it
# waits for a message only when an action needs it. All transfers have one global order. A rank
# posts its own in this order, each as soon as it may:
#
#     a send      once its tensor is made
#     a receive   while fewer than p receives are pending, that is, posted and not waited for, or if
#                 the next action needs this one or a later one
#
# It waits for its oldest send when more than p are pending. These limits bound the memory that
# messages take. p is the number of ranks.
#
# No rank waits forever, whether a message waits for its own receive alone (gloo) or also for all
# that its two ranks posted before it (NCCL). Proof:
#
#     1. A rank waits only for what it has posted. For if an action needs a transfer, the receives
#        before it may be posted, and the sends before it are made: in the simulation that gives
#        the order, what this action and later ones make arrives after what this action needs.
#     2. Suppose that some transfers are never done, and take the first of them, T. By 1, a rank
#        that has not posted T waits only for earlier transfers. These are done, so it goes on.
#     3. So the sender makes the tensor of T and posts it, and the receiver posts its receive. With
#        both posted, T is done, against 2.
#
# The order is that of arrival in a simulation in which B takes twice F's time, and messages take a
# little. If they took none, a rank's receive would often tie with one of its sends. If the send
# came first, the receive would be posted only after the send's tensor is made, and the peer's
# message would have to wait. If a peer is later than in the simulation, NCCL, which runs a rank's
# messages in the order of their posts, delays the sends that follow the receive from this peer.

SHORT = 1 / 128  # a message's time in that simulation, where a forward takes 1


def program(schedule, rank):
    """Return all that a rank does in a step, in order: a list of (verb, Transfer or Action).

        receive, send   post the message of a Transfer, and go on while it travels
        wait            wait until the message is done
        do              perform an Action

    On rank 0 of one_f_one_b(2, 2): do F0, send F0, do F1, send F1, receive B0, receive B1, wait B0,
    do B0, wait B1, do B1, wait F0, wait F1.
    """
    transfers = simulate(schedule, message=SHORT).transfers
    unposted = deque(t for t in transfers if rank in (t.source, t.destination))
    most = len(schedule)  # of sends, and of receives, that are pending
    steps = []
    made = set()
    sent = deque()
    arriving = set()

    def may_post(transfer):
        if transfer.source == rank:
            return transfer in made
        return len(arriving) < most

    def post(needed=None):
        """Post the next transfers while they may be posted, and in any case up to `needed`."""
        while unposted and (may_post(unposted[0]) or needed in unposted):
            transfer = unposted.popleft()
            if transfer.source == rank:
                steps.append(("send", transfer))
                sent.append(transfer)
                if len(sent) > most:
                    steps.append(("wait", sent.popleft()))
            else:
                steps.append(("receive", transfer))
                arriving.add(transfer)

    post()
    for action in schedule[rank]:
        for needed in schedule.needs[action, rank]:
            if needed.source != rank:  # else it comes from another chunk of this rank
                post(needed)
                steps.append(("wait", needed))
                arriving.remove(needed)
        steps.append(("do", action))
        made.update(schedule.makes[action, rank])
        post()
    return steps + [("wait", transfer) for transfer in sent]


# ---- the halves of a backward --------------------------------------------------------------------
#
# Autograd computes the gradients of input and weights in one backward. To leave those of weights
# for later, a layer must help: during an I, it gives the products for its weights to the
# Pipeline's WeightGradStore, which computes them in W. The layers of tensor_parallel.py do so. In
# stages of your own, DeferredLinear does so in the place of nn.Linear. All other layers, such as
# the experts of expert_parallel.py, compute their weights' gradients in I.


class WeightGradStore:
    """Collects what layers defer from I to W: the matrix products for their weights' gradients.

    The store is open during an I. A layer may then call put(parameter, product) and return no
    gradient for the parameter; W calls product() to compute it.

    accumulates: true in B, I and W. This file only sets it. The layers of tensor_parallel.py then
        add a weight's gradient to .grad themselves, and return none to autograd, which saves a
        buffer. Hooks that wait for the gradient run in any case, but no hook may call
        torch.autograd.grad().
    """

    products = None
    accumulates = False

    @property
    def open(self):
        return self.products is not None

    def put(self, parameter, product):
        self.products.append((parameter, product))

    @contextmanager
    def during(self, products=None):
        """Let layers accumulate, and open the store with a list for put(); None keeps it closed."""
        self.products = products
        self.accumulates = True
        try:
            yield
        finally:
            self.products = None
            self.accumulates = False


class DeferredLinear(nn.Linear):
    """nn.Linear for stages of your own, whose weight's gradient can wait until W.

    defer: the WeightGradStore that the Pipeline of these stages has, too:

        store = WeightGradStore()
        stage = nn.Sequential(DeferredLinear(512, 512, defer=store), nn.GELU())
        pipeline = Pipeline(stage, zb_h1(4, 8), loss_fn, shape=(2, 128, 512), defer=store)
    """

    def __init__(self, *sizes, defer):
        super().__init__(*sizes)
        self.defer = defer

    def forward(self, x):
        return _DeferredLinear.apply(autocasted(x), self.weight, self.bias, self.defer)


class _DeferredLinear(torch.autograd.Function):
    """Compute y = x W^T + b. Backward: dx = dy W, db = sum of dy; dW = dy^T x, now or deferred."""

    @staticmethod
    def forward(ctx, x, weight, bias, defer):
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight  # saved_tensors has a detached copy under a checkpoint
        ctx.defer = defer
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad_y):
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        x = x.reshape(-1, x.shape[-1])
        rows = grad_y.reshape(-1, grad_y.shape[-1])
        grad_x = grad_y @ weight.to(grad_y.dtype) if wants_x else None
        grad_bias = rows.sum(0) if wants_bias else None
        grad_weight = None
        # If a product is deferred, autograd gets no gradient of the weight in this backward. So the
        # graph that has computed the weight must not need it, nor a hook.
        weight_can_wait = ctx.parameter.is_leaf and not ctx.parameter._backward_hooks
        if wants_weight and ctx.defer.open and weight_can_wait:
            ctx.defer.put(ctx.parameter, lambda: rows.t() @ x)
        elif wants_weight:
            grad_weight = rows.t() @ x
        return grad_x, grad_weight, grad_bias, None


class _Deferred(torch.autograd.Function):
    """A node of autograd whose backward computes a deferred product, the parameter's gradient.

    So autograd adds it to .grad and runs the hooks that wait for that, as in any backward. The
    scalar that forward returns has no other use than to begin a backward at this node.
    """

    @staticmethod
    def forward(ctx, parameter, product):
        ctx.product = product
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        product = ctx.product
        ctx.product = None  # so that its activations are freed after it
        return product(), None


def _add_products(products):
    """Compute the products in one backward, so that a parameter's hooks run once."""
    # Autograd begins with the node that was made last, so products run in the order of put().
    scalars = [_Deferred.apply(*item) for item in reversed(products)]
    products.clear()  # from here on only its node holds what a product needs
    torch.autograd.backward(scalars)


# ---- executor ------------------------------------------------------------------------------------
#
# Pipeline.step() does what schedule_step() does, but a rank follows its program. In a stage that is
# neither the first nor the last, an action means:
#
#     F   waits for x from the previous stage; runs the stage; keeps x and the graph of the output;
#         sends the output to the next stage
#     B   waits for the output's gradient from the next stage; runs autograd, which adds to the
#         parameters' gradients and frees the graph; sends x's gradient to the previous stage
#     I   does the same, but layers defer the products for weights, and keep what these need
#     W   computes the deferred products and adds them to the parameters' gradients; no message
#
# On the last stage F also computes the loss from the output, and B begins at the loss.


class Pipeline:
    """Runs one rank of a schedule. An example with 4 ranks and 8 microbatches of 2 sequences:

        pipeline = Pipeline(stage, one_f_one_b(4, 8), loss_fn, shape=(2, 128, 512))
        loss = pipeline.step(inputs, targets)  # None on ranks 0 to 2

    stage: this rank's module, or a list with one module per chunk. A stage without layers may
        return its input. No stage may change its input in place.
    schedule: a Schedule, the same on all ranks of the group.
    loss_fn: loss_fn(output, target, *loss_arguments) returns a microbatch's share of the loss; the
        loss of a step is the sum of the shares. It is called where a route ends.
    shape, dtype, device: those of every stage's output for one microbatch, except the last stage's.
        dtype and device default to PyTorch's default dtype and device.
    defer: the WeightGradStore to which layers of the stages defer products.
    sync_each: reduce gradients over replicas after each microbatch, as ZeRO-2 and ZeRO-3 do.

    A stage may use torch.utils.checkpoint, as in the GPipe paper.

    Collective. Raises ValueError on all ranks if their schedules differ or do not fit the group, or
    if a rank does not have one stage per chunk or uses PyTorch's own DDP.
    """

    def __init__(
        self, stage, schedule, loss_fn, group=None, *, shape, dtype=None, device=None, defer=None,
        sync_each=False,
    ):
        self.rank, _ = rank_and_size(group)
        self.stages = list(stage) if isinstance(stage, (list, tuple, nn.ModuleList)) else [stage]
        self.schedule = schedule
        self.loss_fn = loss_fn
        self.group = group
        self.defer = defer or WeightGradStore()
        dtype = dtype or torch.get_default_dtype()
        self.like = {"size": torch.Size(shape), "dtype": dtype, "device": device}
        _check_schedule(self)
        actions = schedule[self.rank]
        self.reducing = reducing_actions(actions, self.stages, sync_each)
        self.program = program(schedule, self.rank)
        self.training = any(action.kind != "F" for action in actions)
        # the chunks of this rank where routes begin, and where they end
        self.first_chunks = {chunk for (rank, chunk), *_ in schedule.routes if rank == self.rank}
        self.last_chunks = {chunk for *_, (rank, chunk) in schedule.routes if rank == self.rank}
        self.step_is_pending = False

    def step(self, inputs=None, targets=None, *loss_arguments):
        """Run the schedule once, and accumulate gradients in the parameters.

        inputs, targets: whole batches, cut along dimension 0 into microbatches. Ranks where routes
        begin need inputs; ranks where routes end need the targets of these inputs, in the same
        order, and pass loss_arguments to loss_fn.

        To accumulate over several steps, run all but the last inside no_sync() of every stage.

        Returns the loss of the route that ends on this rank, detached, or None if none does. Raises
        ValueError if a batch is missing or not divisible into microbatches, if inputs and targets
        are both given and differ in rows, or if a stage's output is not of the declared shape and
        dtype; RuntimeError if an earlier step() failed midway. A batch that this rank does not need
        is checked, too, so that ranks that are given the same batches all raise. If one rank raises
        an error alone, its neighbours wait for its messages until their group's timeout.
        """
        _check_batches(self, inputs, targets)
        if self.step_is_pending:
            raise RuntimeError("an earlier step() failed: its messages are still pending")
        self.inputs = () if inputs is None else inputs.chunk(self.schedule.num_microbatches)
        self.targets = () if targets is None else targets.chunk(self.schedule.num_microbatches)
        self.loss = None
        self.loss_arguments = loss_arguments
        self.saved = {}  # {(microbatch, chunk): (input, GradientEdge of the output)}
        self.deferred = defaultdict(list)  # {(microbatch, chunk): [(parameter, product)]}
        self.tensors = {}  # {Transfer: what an action made, or the buffer that receives it}
        messages = {}  # {Transfer: its message, until it is waited for}
        self.step_is_pending = len(self.schedule) > 1
        post = partial(exchange, group=self.group, async_op=True)
        for verb, subject in self.program:
            if verb == "receive":
                self.tensors[subject] = torch.empty(**self.like)
                messages[subject] = post([], [(self.tensors[subject], subject.source)])
            elif verb == "send":
                messages[subject] = post([(self.tensors.pop(subject), subject.destination)], [])
            elif verb == "wait":
                messages.pop(subject).wait()
            else:
                self.do(subject)
        self.step_is_pending = False
        self.inputs = self.targets = self.loss_arguments = ()
        return self.loss

    def do(self, action):
        """Perform an action with the tensor that it needs, if any, and keep the one it makes."""
        needed = self.schedule.needs[action, self.rank]
        received = [self.tensors.pop(transfer) for transfer in needed]
        result = self.perform(action, action in self.reducing, *received)
        for transfer in self.schedule.makes[action, self.rank]:
            self.tensors[transfer] = result

    def perform(self, action, reduces, received=None):
        """Perform an action on the tensor that it needs, if any, and return its result.

        reduces: whether it starts to reduce gradients over replicas, see "replicas of stages".
        """
        if action.kind == "F":
            return self._forward(action, received)
        if action.kind == "W":
            return self._weights(action, reduces)
        return self._backward(action, received, reduces)

    def _forward(self, action, x):
        if x is None:
            x = self.inputs[action.microbatch]
        elif self.training:
            x.requires_grad_()
        output = self.stages[action.chunk](x)
        is_last = action.chunk in self.last_chunks
        if is_last:
            output = self.loss_fn(output, self.targets[action.microbatch], *self.loss_arguments)
            share = output.detach()
            self.loss = share if self.loss is None else self.loss + share
        elif (output.shape, output.dtype) != (self.like["size"], self.like["dtype"]):
            made = f"{tuple(output.shape)} {output.dtype}"
            raise ValueError(f"rank {self.rank} made {made}, to be sent like {self.like}")
        if self.training:
            # Keep the output's edge in the graph, not the output, whose memory is freed soon after
            # it is sent. A frozen first stage has no graph. If a loss has none, an error is raised.
            edge = get_gradient_edge(output) if output.requires_grad or is_last else None
            self.saved[action.key] = x, edge
        return output.detach().contiguous()

    def _backward(self, action, grad_output, reduces):
        """Run B or I. During I the store is open, and collects this microbatch's products."""
        x, edge = self.saved.pop(action.key)
        products = self.deferred[action.key] if action.kind == "I" else None
        with _syncing(self.stages[action.chunk], reduces), self.defer.during(products):
            if edge is not None:
                torch.autograd.backward(edge, grad_output)
        if action.chunk in self.first_chunks:
            return None
        # there is no gradient if the output does not depend on x
        return torch.zeros_like(x) if x.grad is None else x.grad

    def _weights(self, action, reduces):
        """Run W: compute the deferred products."""
        products = self.deferred.pop(action.key)
        stage = self.stages[action.chunk]
        # a wrapper's require_backward_grad_sync is false inside its no_sync()
        if reduces and getattr(stage, "require_backward_grad_sync", False):
            # all gradients but those of these products are complete, so their reduction begins
            stage.start_grad_sync(awaited={parameter for parameter, _ in products})
        with _syncing(stage, reduces), self.defer.during():
            _add_products(products)


def _check_schedule(pipeline):
    """Raise ValueError on all ranks if schedules differ, or if a rank's stages do not fit."""
    schedule = pipeline.schedule
    stages = pipeline.stages
    own_rank, num_stages = rank_and_size(pipeline.group)
    num_chunks = 0
    if own_rank < len(schedule):
        num_chunks = 1 + max(action.chunk for action in schedule[own_rank])
    fault = None
    if len(stages) != num_chunks:
        fault = f"rank {own_rank} has {len(stages)} stages for num_chunks={num_chunks}"
    elif any(isinstance(stage, nn.parallel.DistributedDataParallel) for stage in stages):
        fault = "torch's DistributedDataParallel reduces before the last microbatch"
    sent = pipeline.like["size"], pipeline.like["dtype"]
    own = type(pipeline).__name__, list(schedule), schedule.routes, *sent
    # In a group that has only NCCL, all ranks must take part in the first operation, so this gather
    # must precede step().
    gathered = gather_objects((own, fault), pipeline.group)
    if any(theirs != gathered[0][0] for theirs, _ in gathered):
        raise ValueError("the ranks of the group have different schedules, shapes or dtypes")
    if len(schedule) != num_stages:
        raise ValueError(f"a schedule for {len(schedule)} stages in a group of {num_stages} ranks")
    for _, fault in gathered:
        if fault is not None:
            raise ValueError(fault)


def _check_batches(pipeline, inputs, targets):
    m = pipeline.schedule.num_microbatches
    first, last = pipeline.first_chunks, pipeline.last_chunks
    for name, batch, needed in (("inputs", inputs, first), ("targets", targets, last)):
        rows = 0 if batch is None else len(batch)
        if rows % m or needed and not rows:
            where = f"on rank {pipeline.rank}, not a positive multiple of num_microbatches={m}"
            raise ValueError(f"{name} has {rows} rows {where}")
    if inputs is not None and targets is not None and len(inputs) != len(targets):
        raise ValueError(f"inputs has {len(inputs)} rows, and targets {len(targets)}")


# ---- replicas of stages --------------------------------------------------------------------------
#
# With data parallelism, a stage is wrapped in DistributedDataParallel (ddp.py) or in
# FullyShardedDataParallel (zero.py), which sums gradients over its replicas:
#
#     stage = DistributedDataParallel(stage, process_group=replicas, wait_in_backward=False)
#     pipeline = Pipeline(stage, one_f_one_b(4, 8), loss_fn, shape=(2, 128, 512))
#     loss = pipeline.step(inputs, targets)
#     stage.finish_grad_sync()  # waits for the sums, which the last backward has begun
#
# The wrapper begins these sums in every backward outside its no_sync(). A step has a backward for
# each microbatch, so Pipeline runs all but the last B or W of a stage inside no_sync(), or none of
# them if sync_each is true. A W computes the last gradients after backward, so it first tells the
# wrapper by start_grad_sync() which ones are to come. If the caller runs step() inside no_sync() of
# the stage, no sums begin.


def reducing_actions(actions, stages, sync_each=False):
    """Return the Bs and Ws of a rank that start to reduce gradients over a stage's replicas.

    They are the last ones of each stage, or all of them if sync_each is true. A module may be the
    stage of several chunks.
    """
    if sync_each:
        return {action for action in actions if action.kind in "BW"}
    # later actions replace earlier ones
    last = {stages[action.chunk]: action for action in actions if action.kind != "F"}
    return set(last.values())


def _syncing(stage, reduces):
    """Return the context of a backward, in which a wrapped stage reduces gradients or does not."""
    if reduces:
        return nullcontext()
    return getattr(stage, "no_sync", nullcontext)()


# ==== DualPipe ====================================================================================
#
# A layer of experts (expert_parallel.py) waits while its rows travel to experts on other ranks, and
# again while they return. DualPipe hides these messages, too: on every rank, forwards meet
# backwards of other microbatches, and the two take turns, so that one computes while the other's
# rows travel. A pair is such an F and the B of another chunk that follows it.
#
# claim() has the bubble of DeepSeek's report, (p/2-1)(X + B - 3W) for dualpipe, where X is the time
# of a pair. It takes F + B for X. dualpipe-v is dualpipe on 2p ranks whose stages take half of the
# time. These are upper bounds: without pairs if F <= B and W <= I, with pairs if F <= I. If F > I,
# pairs may exceed them by up to (p/2-1)(F-I), or (p-1)(F-I)/2 in dualpipe-v. They pay if their
# passes take less time in turns than one after the other, as they do if messages take long.

# ---- two schedules for pairs ---------------------------------------------------------------------


def dualpipe_v(num_stages, num_microbatches):
    """ZB-V's route, in an order in which most Fs are in a pair. p = 2, m = 4:

        rank 0   F0 F1 F2 f0 i0 w0 f1 F3 b1 f2 B0 b2 f3 B1 b3 I2 W2 I3 W3
        rank 1   F0 f0 F1 f1 F2 b0 f2 B0 F3 b1 f3 B1 b2 B2 i3 I3 w3 W3

    Raises ValueError if m < 2p.
    """
    p, m = num_stages, num_microbatches
    if m < 2 * p:
        raise ValueError(f"num_microbatches={m} is less than 2 x num_stages={p}")

    # A row has eight steps. Here they stand below the first ranks of p = 3, for m = 6, if F, I and
    # W take one slot each, and B two:
    #
    #     rank 0   F0F1F2F3F4f0i0w0f1i1w1f2F5b2b2f3B0B0b3b3f4..B1B1b4b4f5..B2B2b5b5I3W3I4W4I5W5
    #              1       2   3           4           5                       6     7       8
    #     rank 1   ..F0F1F2f0F3f1i0w0f2F4b1b1f3B0B0F5b2b2f4B1B1b3b3f5..B2B2b4b4B3B3i5I4w5I5W4W5
    #                1   2       3     4                       5           6           7   8
    def letters(rank):
        below = p - rank - 1  # ranks that F0 still goes down
        above = rank + 1  # this rank, and those that f0 still goes up
        row = "F" * (2 * below)  # 1: until F0 has been down and, as f0, comes up again
        row += "Ff" * above  # 2: until f0 has been up, and its gradient comes down
        row += "iwf" * below  # 3: until the gradient of F0 comes up; see "fiw" in zb_v()
        row += "FbfB" * (m - 2 * below - above)  # 4: the main step, until no F is left
        row += "bfB" * below  # 5: until no f is left
        # 6: until no b is left. The second half is divided, so that Ws are left for step 7.
        row += ("bB" * above)[:above] + ("iI" * above)[above:]
        # The Ws of the Is in steps 6 and 7, in the same order.
        deferred = ("wW" * above)[above:] + "W" * below
        for weight in deferred[:below]:
            row += weight + "I"  # 7: until no I is left; a W fills the wait for its gradient
        return row + deferred[below:]  # 8: the Ws that are left

    return _schedule(p, m, letters, [_down_and_up(p)])


def dualpipe(num_stages, num_microbatches):
    """Two replicas, two directions: half of the microbatches enter at rank 0, half at rank p - 1.

    Chunk 0 of rank r is stage r of one replica; chunk 1 is stage p-1-r of the other. Each has the
    gradients of half of the microbatches: call sum_replicas() after a step. p = 4, m = 8:

        rank 0   F0 F1 F2 f4 i4 w4 f5 F3 b5 f6 B0 b6 f7 B1 b7 I2 W2 I3 W3
        rank 1   F0 f4 F1 f5 F2 b4 f6 B0 F3 b5 f7 B1 b6 B2 i7 I3 w7 W3
        rank 2   f4 F0 f5 F1 f6 B0 F2 b4 f7 B1 F3 b5 B2 b6 I3 i7 W3 w7
        rank 3   f4 f5 f6 F0 I0 W0 F1 f7 B1 F2 b4 B2 F3 b5 B3 i6 w6 i7 w7

    Raises ValueError if p or m is odd, or m < 2p.
    """
    p, m = num_stages, num_microbatches
    if p % 2 or m % 2 or m < 2 * p:
        sizes = f"num_stages={p} and num_microbatches={m}"
        raise ValueError(f"{sizes}: both must be even, and num_microbatches >= 2 x num_stages")
    # The first p/2 ranks do what those of dualpipe_v() do. But the microbatches of chunk 0 do not
    # come up as those of chunk 1. They go on, and the other half of them comes from rank p-1. The
    # last p/2 ranks mirror the first: they swap chunks, and halves of the microbatches.
    half = m // 2
    rows = [
        [Action(kind, i + chunk * half, chunk) for kind, i, chunk in row]
        for row in dualpipe_v(p // 2, half)
    ]
    rows += [
        [Action(kind, (i + half) % m, 1 - chunk) for kind, i, chunk in row]
        for row in reversed(rows)
    ]
    return Schedule(rows, [[(r, 0) for r in range(p)], [(r, 1) for r in reversed(range(p))]])


# ---- pairs ---------------------------------------------------------------------------------------


def pairs_of(row):
    """Return the pairs of a row, {F: B}."""
    return {
        first: second
        for first, second in zip(row, row[1:])
        if first.kind + second.kind == "FB" and first.chunk != second.chunk
    }


class PairedSchedule(list):
    """A Schedule for simulate() and program() in which each rank does its pairs in turns.

    A pair begins when the inputs of both its actions have arrived, and sends both results at its
    end. So its F needs what either needs, and its B makes what either makes. In the simulation, the
    B begins when the F has ended.

    Ranks finish with the pairs of dualpipe(), dualpipe_v() and interleaved(). Other schedules here
    have no pairs, as their Fs and the next Bs are of one chunk.
    """

    def __init__(self, schedule):
        super().__init__(schedule)
        self.needs = schedule.needs.copy()
        self.makes = schedule.makes.copy()
        for rank, row in enumerate(schedule):
            for forward, backward in pairs_of(row).items():
                first = forward, rank
                second = backward, rank
                self.needs[first] = schedule.needs[first] + schedule.needs[second]
                self.needs[second] = []
                self.makes[first] = []
                self.makes[second] = schedule.makes[first] + schedule.makes[second]


class PairedPipeline(Pipeline):
    """A Pipeline that does the pairs of its schedule in turns. It takes the same arguments.

    Each layer of experts, an MoE of expert_parallel.py, must be told how to let the other pass run,
    on all ranks:

        pipeline = PairedPipeline(stages, dualpipe_v(4, 8), loss_fn, shape=(2, 128, 512))
        layer.hand_over = pipeline.turns.hand_over
    """

    def __init__(self, stage, schedule, loss_fn, group=None, *, device=None, **options):
        super().__init__(stage, schedule, loss_fn, group, device=device, **options)
        self.program = program(PairedSchedule(schedule), self.rank)
        self.pairs = pairs_of(schedule[self.rank])
        self.done_in_pairs = set(self.pairs.values())
        self.turns = Turns(device)

    def do(self, action):
        if action in self.pairs:
            backward = self.pairs[action]
            self.turns.together(partial(super().do, action), partial(super().do, backward))
        elif action not in self.done_in_pairs:
            super().do(action)


# ---- two passes in turns -------------------------------------------------------------------------


class Turns:
    """Lets a forward and a backward take turns, so that one computes while the other's rows travel.

    together() gives the backward a thread of its own, but only one of the two runs at a time. A
    layer that has posted a message calls hand_over() before it waits for it. The call returns when
    the other pass has come to its own next wait, or to its end. Here, a layer of experts sends its
    rows to experts (dispatch) and back (combine), one line after the other:

        backward   posts combine's gradients
        forward    attention, router, posts dispatch        beside combine's gradients
        backward   experts, posts dispatch's gradients      beside dispatch
        forward    experts, posts combine                   beside dispatch's gradients
        backward   router, attention, the layer before      beside combine

    The backward begins, because its first message follows hardly any work. Ranks that run the same
    two passes post their messages in the same order, and a GPU has the kernels of both in one
    stream.

    On a GPU, autograd has one thread for all backwards, which waits in hand_over(), too. So the
    forward must not call backward(), and two backwards cannot take turns.

    device: that of the tensors; None is PyTorch's default. Its random generators belong to the
        process, and a recomputation in the backward sets them back for a while. So each pass has
        random states of its own, and afterwards the generators have those of the forward.
    """

    def __init__(self, device=None):
        self.device = torch.get_default_device() if device is None else torch.device(device)
        self.may_run = []  # a semaphore for each pass; 0 is the forward, 1 the backward
        self.states = []  # the random states of each pass
        self.running = 0  # passes that have begun and not ended
        self.turn = 0  # whose turn it is
        self.errors = []

    def together(self, forward, backward):
        """Call forward() in this thread, and in turns with it backward() in another.

        If one fails, the other fails at its next turn; the first error is raised here.
        """
        self.may_run = [threading.Semaphore(0), threading.Semaphore(0)]
        self.states = [self._random_states(), self._random_states()]
        self.running = 2
        self.errors = []
        thread = threading.Thread(target=self._run, args=(1, backward, self._modes()), daemon=True)
        thread.start()
        self.may_run[1].release()
        self._run(0, forward, [])
        thread.join()
        self._set_random_states(0)
        errors = self.errors
        self.errors = []
        if errors:
            raise errors[0]

    def hand_over(self):
        """Let the other pass run until it hands over, or ends. Without another, return at once."""
        if self.running == 2:
            own = self.turn  # the caller's, since no other pass runs
            self.states[own] = self._random_states()
            self.may_run[1 - own].release()
            self._begin_turn(own)
        if self.errors:
            raise RuntimeError("the pass that takes turns with this one has failed")

    def _run(self, number, task, modes):
        try:
            with ExitStack() as stack:
                for mode in modes:  # first, as random states are those of the current device
                    stack.enter_context(mode())
                self._begin_turn(number)
                if not self.errors:
                    task()
                self.states[number] = self._random_states()
        except BaseException as error:
            self.errors.append(error)
        self.running -= 1
        self.may_run[1 - number].release()

    def _modes(self):
        """Return functions for another thread, whose contexts have the modes of this thread."""
        kind = self.device.type
        autocast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        modes = [
            partial(torch.set_grad_enabled, torch.is_grad_enabled()),
            partial(torch.autocast, kind, *autocast, torch.is_autocast_cache_enabled()),
        ]
        if kind == "cuda":
            modes.append(partial(torch.cuda.stream, torch.cuda.current_stream(self.device)))
        return modes

    def _begin_turn(self, number):
        self.may_run[number].acquire()
        self.turn = number
        self._set_random_states(number)

    def _random_states(self):
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        return states

    def _set_random_states(self, number):
        torch.set_rng_state(self.states[number][0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.states[number][1], self.device)


# ---- replicas ------------------------------------------------------------------------------------


def sum_replicas(stages, group=None):
    """Sum the gradients of DualPipe's replicas: chunk 0 of rank r and chunk 1 of rank p-1-r.

    stages: the stages of this rank's Pipeline. Rank p-1-r has the same two in the opposite order,
        and both replicas must train the same parameters. A missing gradient counts as zero.
    Collective. Call it when the gradients of a batch are complete, whether they come from one step
    or several. Afterwards both replicas' gradients have the same bits. Until it returns, two copies
    of the gradients take memory.
    """
    rank, world_size = rank_and_size(group)
    mirror = world_size - 1 - rank
    for stage in stages:
        for parameter in stage.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    grads_of = lambda stage: [w.grad.detach() for w in stage.parameters() if w.requires_grad]
    first, second = map(grads_of, stages)
    if first + second:
        flat = torch.cat([grad.flatten() for grad in first + second])
        other = torch.empty_like(flat)
        exchange([(flat, mirror)], [(other, mirror)], group)
        parts = other.split([grad.numel() for grad in second + first])
        for grad, part in zip(second + first, parts):
            grad.add_(part.view_as(grad))


# ==== names and command ===========================================================================

# The names by which the command and hybrid.py know the schedules.
SCHEDULES = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
}

# Into how many chunks a rank's share of the model is cut, or None if the caller chooses. The ranks
# of dualpipe have two chunks, but each is a whole share, of another replica of the model.
NUM_CHUNKS = dict.fromkeys(SCHEDULES, 1) | {"interleaved": None, "zb-v": 2, "dualpipe-v": 2}


def measure(name, num_stages, num_microbatches):
    """Return (bubble, peak, total time) of a simulation with F = I = W = 1, and 2 chunks if any.

    Bubble and peak are the largest of any rank, and in the units of claim().
    """
    schedule = SCHEDULES[name](num_stages, num_microbatches)
    v = NUM_CHUNKS[name] or 2
    timeline = simulate(schedule, 1 / v, 2 / v, weight=1 / v)
    bubble = max(timeline.idle if name in ("zb-h2", "zb-v") else timeline.bubble)
    return bubble, max(timeline.peak) / v, timeline.total


def _demonstrate():
    rank, world_size = rank_and_size()
    rows, width, m = 16, 32, 8
    torch.manual_seed(0)
    store = WeightGradStore()
    make_stage = lambda: nn.Sequential(DeferredLinear(width, width, defer=store), nn.Tanh())
    model = nn.Sequential(*[make_stage() for _ in range(world_size)]).double()
    stage = model[rank]
    inputs, targets = torch.randn(2, rows, width, dtype=torch.float64)
    loss_fn = lambda output, target: (output - target).square().sum() / (rows * width)
    loss_fn(model(inputs), targets).backward()
    expected = [parameter.grad for parameter in stage.parameters()]
    microbatches = inputs.chunk(m), targets.chunk(m)
    like = {"shape": (rows // m, width), "dtype": inputs.dtype}
    claimed = pipeline_bytes(rank, world_size, m, inputs.nbytes // m)

    def run(what, step):
        model.zero_grad()
        with count_bytes() as traffic:
            step()
        pairs = zip(stage.parameters(), expected)
        error = max((parameter.grad - grad).abs().max().item() for parameter, grad in pairs)
        error = max(gather_objects(error))  # of all ranks
        if rank == 0:
            print(f"{what}: rank 0 sent {traffic.bytes()} bytes, claimed {claimed}")
            print(f"    largest difference from one process's gradients: {error:.1e}")

    run("gpipe_step()", lambda: gpipe_step(stage, *microbatches, loss_fn))
    run("one_f_one_b_step()", lambda: one_f_one_b_step(stage, *microbatches, loss_fn))
    names = "gpipe", "1f1b", "zb-h1"
    for name in names:
        schedule = SCHEDULES[name](world_size, m)
        if rank == 0:
            print(f"\n{name}\n{draw(schedule)}")
        pipeline = Pipeline(stage, schedule, loss_fn, defer=store, **like)
        run("Pipeline", lambda: pipeline.step(inputs, targets))
    if rank == 0:
        print()
        _print_costs(names, world_size, m)


def _print_costs(names, num_stages, num_microbatches):
    """Print a table of what schedules cost, by claim() and by measure()."""
    print(f"{num_stages} stages, {num_microbatches} microbatches; F = 1, B = 2, of which W = 1\n")
    print(f"{'':12}{'bubble':>18}{'peak activations':>24}{'total':>9}")
    print(f"{'':12}{'claimed simulated':>18}{'claimed simulated':>24}")
    for name in names:
        try:
            bubble, peak, total = measure(name, num_stages, num_microbatches)
        except ValueError as error:
            print(f"{name:12}{error}")
            continue
        claimed = claim(name, num_stages, num_microbatches)
        text = f"{claimed.bubble:.1f}" if claimed.holds else "-"
        print(f"{name:12}{text:>8}{bubble:10.1f}{claimed.peak:14.1f}{peak:10.1f}{total:9.1f}")
    print("\n-: the formula does not hold for so few microbatches")
    print("dualpipe, dualpipe-v: claimed for F and B in pairs, simulated without pairs")


def main():
    """The command line: draw one schedule, or compare all."""
    parser = argparse.ArgumentParser(description="Draw or compare pipeline schedules.")
    parser.add_argument("--schedule", choices=SCHEDULES)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    args = parser.parse_args()
    for flag, number in (("--stages", args.stages), ("--microbatches", args.microbatches)):
        if number < 1:
            parser.error(f"{flag} {number} is less than 1")
    names = SCHEDULES
    if args.schedule is not None:
        names = [args.schedule]
        try:
            schedule = SCHEDULES[args.schedule](args.stages, args.microbatches)
        except ValueError as error:
            parser.error(str(error))
        print(draw(schedule) + "\n")
    _print_costs(names, args.stages, args.microbatches)


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_ranks(_demonstrate)
    else:
        main()
