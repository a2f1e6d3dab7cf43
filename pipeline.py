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

A schedule is data: the list of each rank's actions. One simulator times it, checks it, and derives
the one global order of messages; one executor runs it. A message is a microbatch's activations,
batch x sequence x width elements, or their gradient: one each way per microbatch and boundary.

Huang et al., "GPipe", 2019. Narayanan et al., "PipeDream", 2019 and "Memory-Efficient
Pipeline-Parallel DNN Training", 2021 (PipeDream-flush, called 1F1B here and in Megatron-LM).

    torchrun --nproc-per-node 4 pipeline.py   simulated and claimed bubble and memory; counted bytes
"""

from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from collectives import barrier, count_bytes, exchange, rank_and_size, run_ranks

# ---- schedules -----------------------------------------------------------------------------------


class Action(NamedTuple):
    """One slot of a schedule: kind "F" (forward) or "B" (backward), of one microbatch."""

    kind: str
    microbatch: int


def _check_sizes(num_stages, num_microbatches):
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            f"num_stages={num_stages} and num_microbatches={num_microbatches} must be at least 1"
        )


def gpipe(num_stages, num_microbatches):
    """All forwards, then all backwards, on every rank. Returns a list of actions per rank.

    Peak activations: m microbatches. Raises ValueError for sizes below 1.
    """
    _check_sizes(num_stages, num_microbatches)
    forwards = [Action("F", microbatch) for microbatch in range(num_microbatches)]
    backwards = [Action("B", microbatch) for microbatch in range(num_microbatches)]
    return [forwards + backwards for _ in range(num_stages)]


def one_f_one_b(num_stages, num_microbatches):
    """Warm up by as many forwards as stages follow; then forward and backward in turn; cool down.

        rank 0   F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5        p = 4, m = 6: the orders, not the times
        rank 1   F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
        rank 2   F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
        rank 3   F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

    Returns a list of actions per rank. Peak activations: min(m, p - stage). Raises ValueError for
    sizes below 1.
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
    return schedule


def forward_only(num_stages, num_microbatches):
    """Evaluation: the forwards alone; the executor keeps no activations.

    Raises ValueError for sizes below 1.
    """
    _check_sizes(num_stages, num_microbatches)
    return [[Action("F", m) for m in range(num_microbatches)] for _ in range(num_stages)]


# ---- simulator -----------------------------------------------------------------------------------


class Transfer(NamedTuple):
    """The output of `action` on stage `source`, which stage `destination` waits for."""

    action: Action
    source: int
    destination: int


@dataclass
class Timeline:
    """What a schedule does in time.

    start: per rank, {action: start time}; total: the end of the last action; bubble: idle time per
    rank; peak: most microbatches per rank whose forward is done and whose backward is not;
    transfers: all messages in one global order, by the time at which they can leave.
    """

    start: list
    total: float
    bubble: list
    peak: list
    transfers: list


def _needs(action, stage, num_stages):
    """The transfer that must have arrived before `action`; None where the stage has its input."""
    source = stage - 1 if action.kind == "F" else stage + 1
    return Transfer(action, source, stage) if 0 <= source < num_stages else None


def _makes(action, stage, num_stages):
    """The transfer that `action` gives rise to, or None at the end of the pipeline."""
    destination = stage + 1 if action.kind == "F" else stage - 1
    return Transfer(action, stage, destination) if 0 <= destination < num_stages else None


def simulate(schedule, forward=1.0, backward=2.0, message=0.0):
    """Time a schedule. Every rank does its actions in order, each as soon as its input has arrived.

    Raises ValueError if ranks do not have the same actions, each once, and if the schedule cannot
    finish, naming the action that each rank is stuck at.
    """
    for stage, actions in enumerate(schedule):
        if sorted(actions) != sorted(set(schedule[0])):
            raise ValueError(
                f"rank {stage} does not have the actions of rank 0, each once: {actions}"
            )
    num_stages, duration = len(schedule), {"F": forward, "B": backward}
    start, arrival = [{} for _ in schedule], {}
    busy_until, position = [0.0] * num_stages, [0] * num_stages
    progress = True
    while progress:
        progress = False
        for stage, actions in enumerate(schedule):
            while position[stage] < len(actions):
                action = actions[position[stage]]
                needed, own_forward = _needs(action, stage, num_stages), action._replace(kind="F")
                if needed is not None and needed not in arrival:
                    break
                if action.kind == "B" and own_forward not in start[stage]:
                    break
                begin = max(busy_until[stage], arrival.get(needed, 0.0))
                start[stage][action] = begin
                busy_until[stage] = begin + duration[action.kind]
                if made := _makes(action, stage, num_stages):
                    arrival[made] = busy_until[stage] + message
                position[stage] += 1
                progress = True
    stuck = {s: a[position[s]] for s, a in enumerate(schedule) if position[s] < len(a)}
    if stuck:
        where = ", ".join(f"rank {s} at {a.kind}{a.microbatch}" for s, a in stuck.items())
        raise ValueError(f"the schedule cannot finish: {where} waiting for what never comes")
    total = max(busy_until)
    work = [sum(duration[action.kind] for action in actions) for actions in schedule]
    return Timeline(
        start=start,
        total=total,
        bubble=[total - done for done in work],
        peak=[_peak_activations(actions) for actions in schedule],
        transfers=sorted(arrival, key=lambda transfer: (arrival[transfer], transfer)),
    )


def _peak_activations(actions):
    live = peak = 0
    for action in actions:
        live += 1 if action.kind == "F" else -1
        peak = max(peak, live)
    return peak


def draw(schedule, forward=1, backward=2):
    """The timeline as text: a row per rank, a cell per slot of time."""
    width = len(f"F{max(action.microbatch for action in schedule[0])}")
    timeline, rows = simulate(schedule, forward, backward), []
    for rank, start in enumerate(timeline.start):
        cells = ["." * width] * int(timeline.total)
        for action, begin in start.items():
            length = forward if action.kind == "F" else backward
            for slot in range(int(begin), int(begin) + length):
                cells[slot] = f"{action.kind}{action.microbatch}".ljust(width)
        rows.append(f"rank {rank}  " + "".join(cells))
    return "\n".join(rows)


# ---- executor ------------------------------------------------------------------------------------

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HEADER = 8  # int64s that announce a tensor: its dtype, the number of its dims, its shape


class Pipeline:
    """Runs one stage of a schedule: `stage` is this rank's module, `group` has one rank per stage.

    loss_fn(output, target) is called on the last stage and returns the microbatch's share of the
    loss: the loss of a step is the sum over microbatches, and nothing here divides by their number.
    no_sync: a context for every backward but the last, such as DistributedDataParallel.no_sync.

    The transfers of a rank are posted in their global order: a receive as soon as all before it are
    posted, a send as soon as its tensor exists as well. So both ends of every link agree, the first
    transfer that is not done always has both its ends posted, and nothing deadlocks, whether sends
    are buffered (gloo) or meet their receive in issue order (NCCL).
    Raises ValueError if the schedule is not made for the group's size.
    """

    def __init__(self, stage, schedule, loss_fn, group=None, no_sync=nullcontext):
        self.rank, self.num_stages = rank_and_size(group)
        if len(schedule) != self.num_stages:
            raise ValueError(
                f"a schedule for {len(schedule)} stages in a group of {self.num_stages} ranks"
            )
        self.stage, self.loss_fn, self.group, self.no_sync = stage, loss_fn, group, no_sync
        self.actions = schedule[self.rank]
        self.num_microbatches = 1 + max(action.microbatch for action in self.actions)
        self.last_backward = next((a for a in reversed(self.actions) if a.kind == "B"), None)
        transfers = simulate(schedule).transfers
        self.transfers = [t for t in transfers if self.rank in (t.source, t.destination)]
        self.device = next((p.device for p in stage.parameters()), torch.device("cpu"))
        barrier(group)  # NCCL wants all ranks of a group in its first batch
        # (shape, dtype) of a microbatch at the boundary
        self.input_format = self.output_format = None

    def step(self, inputs=None, targets=None):
        """Run every action once.

        inputs, targets: (B, ...), cut along B into microbatches; the first stage uses inputs, the
        last one targets. Gradients are added to the parameters'. Returns the summed loss, detached,
        on the last stage and None on the others. Raises ValueError if the number of microbatches
        does not divide B, or what a stage passes on is not of the shape and dtype that it first
        passed on.
        """
        self.inputs, self.targets = self._cut("inputs", inputs), self._cut("targets", targets)
        self.alive = {}  # microbatch -> (input, output) between its forward and its backward
        self.unposted = deque(self.transfers)
        self.leaving, self.arriving, self.sent = {}, {}, deque()
        self.loss = None
        for action in self.actions:
            self._post_transfers()
            received = self._receive(_needs(action, self.rank, self.num_stages))
            result = (self._forward if action.kind == "F" else self._backward)(action, received)
            if made := _makes(action, self.rank, self.num_stages):
                self.leaving[made] = result
        self._post_transfers()
        for messages in self.sent:
            messages.wait()
        return self.loss

    def _cut(self, name, batch):
        if batch is None:
            return None
        if len(batch) % self.num_microbatches:
            raise ValueError(
                f"{name} has {len(batch)} rows, "
                f"not divisible by num_microbatches={self.num_microbatches}"
            )
        return batch.chunk(self.num_microbatches)

    def _forward(self, action, received):
        x = self.inputs[action.microbatch] if received is None else received
        if received is not None and self.last_backward:
            x.requires_grad_()
        output = self.stage(x)
        if self.rank == self.num_stages - 1:
            output = self.loss_fn(output, self.targets[action.microbatch])
            self.loss = output.detach() + (0 if self.loss is None else self.loss)
        if self.last_backward:
            self.alive[action.microbatch] = x, output
        return output.detach().contiguous()

    def _backward(self, action, grad_output):
        x, output = self.alive.pop(action.microbatch)
        with nullcontext() if action == self.last_backward else self.no_sync():
            torch.autograd.backward(output, grad_output)
        if self.rank == 0:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad

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
            self._announce(tensor, transfer.destination)
        messages = exchange([(tensor, transfer.destination)], [], self.group, async_op=True)
        self.sent.append(messages)
        if len(self.sent) > self.num_stages:  # sent tensors live until waited for: keep only a few
            self.sent.popleft().wait()

    def _post_receive(self, transfer):
        if transfer.action.kind == "F":
            shape, dtype = self.input_format = self.input_format or self._learn(transfer.source)
            buffer = torch.empty(shape, dtype=dtype, device=self.device)
        else:
            _, output = self.alive[transfer.action.microbatch]
            buffer = torch.empty_like(output, memory_format=torch.contiguous_format)
        messages = exchange([], [(buffer, transfer.source)], self.group, async_op=True)
        self.arriving[transfer] = buffer, messages

    def _announce(self, tensor, destination):
        """Ahead of the first tensor ever, tell the next stage its shape and dtype."""
        if self.output_format is None:
            if tensor.dtype not in _DTYPES or tensor.ndim > _HEADER - 2:
                raise ValueError(
                    f"stage {self.rank} cannot send {tensor.dtype} of {tensor.ndim} dims"
                )
            self.output_format = tensor.shape, tensor.dtype
            header = [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
            header = torch.tensor(header + [0] * (_HEADER - len(header)), device=self.device)
            exchange([(header, destination)], [], self.group)
        if self.output_format != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"stage {self.rank} made {tuple(tensor.shape)} {tensor.dtype} "
                f"after its first output was {tuple(self.output_format[0])} {self.output_format[1]}"
            )

    def _learn(self, source):
        header = torch.zeros(_HEADER, dtype=torch.int64, device=self.device)
        exchange([], [(header, source)], self.group)
        dtype, ndim, *shape = header.tolist()
        return torch.Size(shape[:ndim]), _DTYPES[dtype]

    def _receive(self, transfer):
        if transfer is None:
            return None
        buffer, messages = self.arriving.pop(transfer)
        messages.wait()
        return buffer


# ---- cost ----------------------------------------------------------------------------------------


def bubble_time(num_stages, forward=1.0, backward=2.0):
    """Idle time of every rank under GPipe and 1F1B: (p-1)(F+B), for any number of microbatches."""
    return (num_stages - 1) * (forward + backward)


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
            print(f"bubble: claimed {bubble_time(world_size)}, simulated {timeline.bubble}")
            print(f"peak activations, in microbatches: {timeline.peak}")
            print(f"rank 0 sent {traffic.bytes()} bytes, claimed {claimed}")
            print(f"largest difference from one process's gradients: {error:.1e}\n")


if __name__ == "__main__":
    run_ranks(_demonstrate)
