"""Where does a step's time go? Takes three steps, or --steps, and traces the last one on all ranks.

    torchrun --nproc-per-node 8 tests/trace.py FILE --tp 2 --pp 2 --microbatches 4

FILE opens in https://ui.perfetto.dev or chrome://tracing: a process per rank; its lane "compute"
has the pipeline's actions (F3 is the forward of microbatch 3) and what they waited for, and each
axis a lane of its operations, of several rows where they overlap. An axis is that of a group: tp,
cp, ep, pp, dp, or several, as "tp+ep", where these have the same ranks. Prints

    the last step took 97.18 ms: compute 61.90, tp 12.04, bubble 14.55, dp 3.61, rest 5.08 (...)

the means over the ranks of: compute, the actions without their waits; each axis, what was waited
for it, on the axis pp the bubble; the rest: data, clipping norm, optimizer. They add up to the
step. On a GPU moments are those of its streams, not the host's.
"""

import json
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
import torch.distributed as dist

import hybrid
from collectives import barrier, gather_objects, observe

AXES = {
    "tp": ("tp_group", "expert_tp_group"),
    "cp": ("cp_group",),
    "ep": ("ep_group", "node_group", "cross_group"),
    "pp": ("pp_group", "embedding_group"),
    "dp": ("dp_group", *hybrid.GRADIENT_GROUPS),
}
PART_OF = {"pp": "bubble"}  # to wait on pp is to wait for other stages


def axes_of(mesh):
    """{group: the axes that it is of}, of those that have several ranks."""
    axes = {}
    for axis, names in AXES.items():
        for group in {getattr(mesh, name) for name in names} - {None}:
            if dist.get_world_size(group) > 1:
                axes[group] = f"{axes[group]}+{axis}" if group in axes else axis
    return axes


class Trace:
    """What this rank does in a step, as observe() and the pipeline tell it.

    told: {an operation: its moments, its last one at the end, and the bytes that it sent}.
    """

    def __init__(self, trainer):
        self.device, self.pipeline = trainer.device, trainer.pipeline
        self.axes, self.told, self.began = axes_of(trainer.mesh), {}, self.now()

    def now(self):
        """A moment of the thread that asks, or of its stream."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))  # a thread has a device of its own
        return event

    def since(self, moment):
        """Seconds from the beginning. The host waits for the device."""
        if self.device.type == "cpu":
            return moment - self.began
        moment.synchronize()
        return self.began.elapsed_time(moment) / 1e3

    def listen(self, event, operation, *messages):
        moments, sent = self.told.setdefault(operation, ([], []))
        moments.append(self.now())
        for tensor, _ in messages[0] if messages else ():
            sent.append(tensor.nbytes)

    def read(self, ended):
        """([event of Chrome's format], {part: seconds}) of the step."""
        spans = self.pipeline.clock.spans.items()
        actions = [(*map(self.since, span), f"{a.kind}{a.microbatch}", a) for a, span in spans]
        lanes, parts = {"compute": []}, Counter(compute=0.0)
        for begin, end, name, action in actions:
            known = {"microbatch": action.microbatch, "chunk": action.chunk}
            lanes["compute"].append((begin, end, name, known))
            parts["compute"] += end - begin
        for operation, (moments, sent) in self.told.items():
            axis = self.axes.get(operation.group)
            if axis is None:  # of one rank, or of no axis
                continue
            begin, *posted, end = map(self.since, moments)
            if operation.of is None:
                known = {"messages": len(sent), "bytes": sum(sent)}
                span = (posted or [begin])[0], end, operation.name, known
                lanes.setdefault(axis, []).append(span)
            if not operation.async_op:
                lanes["compute"].append((begin, end, f"wait for {axis}", {}))
                parts[PART_OF.get(axis, axis)] += end - begin
                if any(first <= begin < last for first, last, *_ in actions):
                    parts["compute"] -= end - begin
        parts["rest"] = self.since(ended) - parts.total()
        return list(events_of(lanes)), parts


def events_of(lanes):
    """Chrome's events of this rank's {lane: [(begin, end, name, what is known of it)]}."""
    rank, name = dist.get_rank(), "process_name"
    yield {"name": name, "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    for number, (lane, spans) in enumerate(lanes.items()):
        ends = []  # of rows: what overlaps has several; compute's spans are nested
        for begin, end, what, known in sorted(spans, key=lambda span: (span[0], -span[1])):
            row = next((i for i, last in enumerate(ends) if last <= begin), len(ends))
            row = 0 if lane == "compute" else row
            place = {"pid": rank, "tid": 100 * number + row}
            if row == len(ends):
                yield {"name": "thread_name", "ph": "M", **place, "args": {"name": lane}}
            ends[row : row + 1] = [end]
            span = {"name": what, "cat": lane, "ph": "X", "args": known}
            yield span | place | {"ts": begin * 1e6, "dur": (end - begin) * 1e6}


def traced(trainer, step):
    """The trace of step(): [(events, {part: seconds})] of all ranks. Collective."""
    barrier()  # they begin together
    trace = Trace(trainer)
    with observe(trace.listen):
        step()
        ended = trace.now()
    return gather_objects(trace.read(ended))


def describe(parts):
    """The ranks' parts of a step in a line: their means, which add up to the step's."""
    names = dict.fromkeys(name for own in parts for name in own)
    means = {name: 1e3 * sum(own[name] for own in parts) / len(parts) for name in names}
    shown = ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())
    return f"the last step took {sum(means.values()):.2f} ms: {shown} (means of {len(parts)} ranks)"


def create(path):
    """The file of the trace, on rank 0. Raises OSError, or ValueError without a name."""
    if not path:
        raise ValueError("say FILE first, then flags: the file to write")
    return open(path if dist.get_rank() == 0 else os.devnull, "w")


def work(path, args, device):
    """Train, and write the trace of the last step. Raises TrainingError."""
    file = hybrid.on_all_ranks(create, path)
    data = hybrid.on_all_ranks(hybrid.load_data, args.data, args.seq_len, args.vocab_size)
    trainer = hybrid.Trainer(args, hybrid.make_mesh(args), device)
    of_step = args.batch_size, args.seq_len, args.seed, trainer.own_rows()
    for number in range(args.steps - 1):
        trainer.step(*data.batch(number, *of_step))
    every = traced(trainer, lambda: trainer.step(*data.batch(args.steps - 1, *of_step)))
    if dist.get_rank() == 0:
        events, parts = [event for own, _ in every for event in own], [own for _, own in every]
        with file:
            json.dump({"traceEvents": events, "otherData": {"seconds": parts}}, file)
        print(describe(parts), flush=True)


def main(argv=None):
    """FILE and the flags of hybrid.py. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    path, flags = ("", argv) if not argv or argv[0].startswith("-") else (argv[0], argv[1:])
    if {"-h", "--help"} & set(argv) and int(os.environ.get("RANK", 0)) == 0:
        print(f"{__doc__}\nThe flags of hybrid.py:\n")
    return hybrid.main(["--steps", "3", *flags], partial(work, path))


if __name__ == "__main__":
    sys.exit(main())
