"""Show where the time of a training step goes: trace the last of three, or --steps, on all ranks.

    torchrun --nproc-per-node 8 tests/tools/trace.py FILE --tp 2 --pp 2 --microbatches 4

Open FILE in https://ui.perfetto.dev. Each rank is a process. Its lane "compute" shows the actions
of the pipeline (F3 is the forward of microbatch 3) with the waits below them. Each axis (tp, cp,
ep, pp, dp) has a lane for its operations, with several rows where they overlap; "tp+ep" is one
lane if both have the same ranks. The printed line splits the step's milliseconds into parts, each
a mean over the ranks: compute, which is the actions without their waits; the waits for each axis,
called "bubble" for pp; and the rest, which is data, clipping norm and optimizer. On a GPU the
times are those of its streams.
"""

import json
import os
import sys
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from unittest.mock import patch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support"), str(TESTS / "tools")]

import torch
import torch.distributed as dist

import hybrid
from collectives import barrier, gather_objects, observe

REFUSED = "checkpoint", "eval_every", "print_every", "metrics", "sample", "prompt", "temperature"
AXES = {"tp_group": "tp", "expert_tp_group": "tp", "pp_group": "pp", "embedding_group": "pp"}
AXES |= {"cp_group": "cp", "ep_group": "ep", "node_group": "ep", "cross_group": "ep"}  # others: dp


def axes_of(mesh):
    """Return {group: its axes, joined by "+"} for all groups of several ranks."""
    axes = defaultdict(dict)
    for name, group in vars(mesh).items():
        if group and dist.get_world_size(group) > 1:
            axes[group][AXES.get(name, "dp")] = True
    return {group: "+".join(own) for group, own in axes.items()}


def now(device):
    """Return the present moment: a time on a CPU, an event on this thread's stream on a GPU."""
    if device.type == "cpu":
        return time.perf_counter()
    return torch.cuda.current_stream(device).record_event(torch.cuda.Event(enable_timing=True))


def microseconds(began, moment):
    """Return the microseconds between two moments; the host waits for the second."""
    if isinstance(moment, float):
        return 1e6 * (moment - began)
    moment.synchronize()
    return 1e3 * began.elapsed_time(moment)


def covered(spans):
    """Return the time that spans (begin, end) cover. Two passes that take turns have one time."""
    total = last = 0.0
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


def traced(trainer, *batch):
    """Take a step; return {lane: [(begin, end, name, details)]} and {part: microseconds}."""
    axes, told, spans = axes_of(trainer.mesh), {}, []

    def listen(event, operation, sends=(), receives=()):
        moments, sent = told.setdefault((operation, event.startswith("wait")), ([], []))
        moments.append(now(trainer.device))
        sent += [tensor.nbytes for tensor, _ in sends]

    def timed(action, *given, perform=trainer.pipeline.perform):
        begin, result = now(trainer.device), perform(action, *given)
        spans.append((action, begin, now(trainer.device)))
        return result

    barrier()  # all ranks begin together
    since = partial(microseconds, now(trainer.device))
    with observe(listen), patch.object(trainer.pipeline, "perform", timed):
        trainer.step(*batch)
        ended = now(trainer.device)
    actions = [
        (*map(since, span), f"{action.kind}{action.microbatch}", {"chunk": action.chunk})
        for action, *span in spans
    ]
    lanes = {"compute": actions[:]}
    parts = Counter(compute=covered((begin, end) for begin, end, *_ in actions))
    of_axes = [(*key, *value) for key, value in told.items() if key[0].group in axes]
    for operation, is_wait, moments, sent in of_axes:
        axis, moments = axes[operation.group], [*map(since, moments)]
        begin, *posts, end = moments
        if not is_wait:  # a queued operation is posted later than it is called
            known = {"messages": len(sent), "bytes": sum(sent)}
            span = posts[0] if posts else begin, end, operation.name, known
            lanes.setdefault(axis, []).append(span)
        waits = [] if operation.async_op else [(begin, end)]
        for begin, end in zip(moments[::2], moments[1::2]) if is_wait else waits:
            lanes["compute"].append((begin, end, f"wait for {axis}", {}))
            parts["bubble" if axis == "pp" else axis] += end - begin
            if any(first <= begin < last for first, last, *_ in actions):
                parts["compute"] -= end - begin
    parts["rest"] = since(ended) - parts.total()
    return lanes, parts


def events_of(rank, lanes):
    """Yield a rank's lanes as events of Chrome's trace format."""
    for lane, spans in lanes.items():
        ends = []  # the end of each row's last span
        for begin, end, name, known in sorted(spans, key=lambda span: (span[0], -span[1])):
            row = next((row for row, last in enumerate(ends) if last <= begin), len(ends))
            ends[row : row + 1] = [end]
            place = {"ph": "X", "pid": f"rank {rank}", "tid": f"{lane} {row}" if row else lane}
            span = {"name": name, "cat": lane, "ts": begin, "dur": end - begin, "args": known}
            yield place | span


def work(path, flags, args, device):
    """Train, write the trace of the last step, and print its parts. May raise TrainingError.

    flags: the command line, from which hybrid.main() has parsed args.
    """
    if path is None:
        raise hybrid.TrainingError("FILE is missing: its name comes before the flags", 2)
    given = vars(hybrid.Parser().parse_args(flags))
    for name in REFUSED:
        if name in given:
            raise hybrid.TrainingError(f"{hybrid.as_typed(name, given[name])} has no use here", 2)
    file = hybrid.on_all_ranks(open, path if dist.get_rank() == 0 else os.devnull, "w")
    data, _ = hybrid.read_data(args)
    trainer = hybrid.Trainer(args, hybrid.make_mesh(args, device=device), device)
    sizes = args.batch_size, args.seq_len, args.seed, trainer.own_rows()
    for step in range(args.steps - 1):
        trainer.step(*data.batch(step, *sizes))
    lanes, parts = zip(*gather_objects(traced(trainer, *data.batch(args.steps - 1, *sizes))))
    with file:
        json.dump([event for own in enumerate(lanes) for event in events_of(*own)], file)
    if dist.get_rank() == 0:
        means = {name: of / len(parts) / 1e3 for name, of in sum(parts, Counter()).items()}
        shown = ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())
        print(f"the last step took {sum(means.values()):.2f} ms: {shown}", flush=True)


def main(argv=None):
    """Run with FILE and the flags of hybrid.py; return the exit status."""
    flags, path = list(sys.argv[1:] if argv is None else argv), None
    if {"-h", "--help"} & {*flags}:
        print(__doc__)
    elif flags and not flags[0].startswith("-"):
        path = flags.pop(0)
    return hybrid.main(["--steps", "3", *flags], partial(work, path, flags))


if __name__ == "__main__":
    sys.exit(main())
