"""Where would a step's time go on GPUs? A model's estimate for the real code, without a GPU.

    python tests/tools/gpu_time.py --gpus 8 --dtype bf16 --dp 8 --zero 3       flags of hybrid.py
    python tests/tools/gpu_time.py --gpus 8 --gpu a100 --json --trace FILE --dtype bf16 --tp 8 --sp

One rank takes two steps on the pretended device of fake_cuda.py, and the second one is timed. By
default it is the first rank of the costliest place in the pipeline, whose layers and head take the
most FLOPs. The kernels, messages, events and waits are those of the real code. Their durations come
from a model:

    host      It launches kernels and batches, and runs ahead of the device until it waits for it. A
              kernel costs it 5 us, a view 1.5 us, a batch --batch-us and --message-us per message.
    stream    It runs its kernels in launch order. A kernel takes at least 2 us, or its bytes at 80%
              of the memory's speed, or its FLOPs at 65% of the peak, whichever is longest.
    group     It has a communicator: a stream that runs its batches in order. A batch takes 12 us,
              and its bytes at 80% of the speed of NVLink, or of the network if it leaves the node.
    event     It marks a moment of a stream. Other streams and the host can wait for it.

All ranks are assumed to keep the same pace, so no rank waits for a late peer. step_ms and mfu leave
the pipeline's bubble out. bubble_ms is what the simulated schedule adds to step_ms if a stage costs
the same on all ranks and a backward twice a forward. Messages take no SMs from kernels. Speeds are
those of data sheets, and the other constants are estimates: compare versions of the code, but do
not predict the time on a real machine.

A step of the main stream consists of matrix products, other kernels, waits for messages (exposed)
and waits for the host (starved). An axis is named by the group's first two names in hybrid's Mesh.
peak_gb is the peak of the tensors' memory. PyTorch reuses memory that a message has touched only
once the host has seen the end of its batch; peak_recorded_gb is the peak under this rule. nccl_gb
is NCCL's own memory, 12 MB for each of 32 channels to each peer of a group, on top of either peak.
"""

import argparse
import json
import os
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support"), str(TESTS / "tools")]

import fake_cuda  # before torch, because it prepares a device for torch
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import hybrid
from models import GPUS
from pipeline import PairedSchedule, simulate
from progress import progress, say_actions
from timeline import Host, Memory, Stream

LAUNCH_US, VIEW_US = 5.0, 1.5  # the host's time for an operator with a kernel, and without
KERNEL_US, ROUND_US = 2.0, 12.0  # the device's time for a kernel, at least, and for a batch
PRODUCTS, MOVES = 0.65, 0.8  # the fractions of the data sheet's FLOP/s and GB/s that are reached
CHANNELS, CHANNEL_BYTES = 32, 12e6  # NCCL's buffers for each peer
aten = torch.ops.aten
NO_KERNEL = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.detach}
NO_KERNEL |= {aten.new_empty_strided, aten._unsafe_view, aten.set_, aten._local_scalar_dense}
NO_INPUT = {aten.new_zeros, aten.new_full, aten.zeros_like, aten.ones_like, aten.full_like}
FLOPS = flop_registry | {  # FLOPs of matrix products
    aten.addmm: lambda total, *factors, **_: flop_registry[aten.mm](*factors[:2]),
    aten.addmm_: lambda total, *factors, **_: flop_registry[aten.mm](*factors[:2]),
    aten._grouped_mm: lambda x, w, *_, **options: 2 * x.shape[-2] * x.shape[-1] * w.shape[-1],
}


class Timer(fake_cuda.Watch):
    """Assigns a duration to each operator and each batch that reaches the device."""

    def __init__(self, args, own):
        super().__init__(args)
        self.own, self.gpu, self.host = own, GPUS[own.gpu], Host()
        self.memory = Memory(self.host)
        self.names = defaultdict(list)
        self.communicators = {}

    def streams(self):
        current = lambda device=None: self.host.current
        new = partial(Stream, self.host)
        return {"Stream": new, "current_stream": current, "stream": lambda stream: stream}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = super().__torch_dispatch__(function, types, arguments, options)
        given = list(filter(fake_cuda.is_on_device, tree_leaves((arguments, options))))
        made = list(filter(fake_cuda.is_on_device, tree_leaves(result)))
        if not given + made or function.namespace == "prim":  # "prim" only reads an attribute
            return result
        for tensor in made:
            self.memory.resize(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        operator = function.overloadpacket
        if function.is_view or operator in NO_KERNEL:
            self.host.work(operator.__name__, VIEW_US)
            return result
        self.host.work(operator.__name__, LAUNCH_US)
        if operator in NO_INPUT:  # it looks at a tensor's shape, and reads nothing
            given = []
        tensors = given + [tensor for tensor in made if not any(tensor is t for t in given)]
        moving = sum(tensor.nbytes for tensor in tensors) / (MOVES * 1e3 * self.gpu.memory_speed)
        computing = self.computing(function, arguments, options or {}, result)
        part = "products" if computing else "other"
        self.host.current.run(operator.__name__, max(KERNEL_US, moving, computing), part)
        return result

    def computing(self, function, arguments, options, result):
        """Return the duration of a matrix product's FLOPs, and 0 for other operators.

        Causal attention computes half of the scores.
        """
        if function.overloadpacket not in FLOPS:
            return 0
        flops = FLOPS[function.overloadpacket](*arguments, **options, out_val=result)
        names = [argument.name for argument in function._schema.arguments]
        if dict(zip(names, arguments)).get("is_causal"):
            flops /= 2
        in_fp32 = min(x.itemsize for x in arguments if isinstance(x, torch.Tensor)) > 2
        return flops * (15 if in_fp32 else 1) / (PRODUCTS * 1e6 * self.gpu.tflops)

    def note_wait(self, what):
        super().note_wait(what)
        self.host.current.synchronize()

    def post(self, group, sends, receives):
        super().post(group, sends, receives)
        messages, ranks = [*sends, *receives], dist.get_process_group_ranks(group)
        self.host.work("post", self.own.batch_us + len(messages) * self.own.message_us)
        if group not in self.communicators:
            lane = "+".join(self.names[group][:2])
            self.communicators[group] = Stream(self.host, lane)
        node = self.own.rank // self.gpu.per_node
        is_near = all(ranks[peer] // self.gpu.per_node == node for _, peer in messages)
        speed = MOVES * 1e3 * (self.gpu.node if is_near else self.gpu.network)
        nbytes = max(sum(tensor.nbytes for tensor, _ in side) for side in (sends, receives))
        duration = ROUND_US + nbytes / speed
        batch = self.communicators[group].post(f"{len(messages)} messages", duration)
        for tensor, _ in messages:
            record = self.memory.records[tensor.untyped_storage()._cdata]
            record.in_use_until = max(record.in_use_until, batch.moment)
        return batch


def costliest_rank(args):
    """Return the first rank of the place in the pipeline whose layers and head take most FLOPs."""
    flops = [0] * args.pp
    again = 4 / 3 if args.recompute == "full" else 1  # a layer has 4 passes instead of 3
    routes = hybrid.schedule_of(args).routes
    for route in routes:
        for layers, (place, _) in zip(hybrid.divide_layers(args, routes), route):
            for i in layers:
                flops[place] += again * sum(hybrid.forward_flops(args, args.has_experts(i)))
        flops[place] += 2 * args.hidden * args.vocab_size  # the last stage has the head
    return flops.index(max(flops)) * (args.world_size // args.pp)


def bubble_share(place, args):
    """Return how long a place in the pipeline is idle, as a part of the time that it works."""
    backward = 3.0 if args.recompute == "full" else 2.0  # in units of a forward
    schedule = hybrid.schedule_of(args)
    if args.overlap:
        schedule = PairedSchedule(schedule)
    timeline = simulate(schedule, 1.0, backward)
    return timeline.bubble[place] / (timeline.total - timeline.bubble[place])


def measure(args, own):
    """Time a rank's second step; return the dict that --json prints and the trace's events."""
    timer = Timer(args, own)
    host, main, memory = timer.host, timer.host.main, timer.memory
    resize_ = torch.UntypedStorage.resize_

    def resize(storage, nbytes):
        memory.resize(storage, nbytes)
        return resize_(storage, nbytes)

    resized = patch.object(torch.UntypedStorage, "resize_", resize)
    one = fake_cuda.pretended(timer, own.rank, args.world_size)
    with progress("builds the model") as say, one, resized:
        trainer, step = fake_cuda.hybrid_step(args, torch.device("cuda", 0))
        say_actions(trainer.pipeline, say)
        for name, group in vars(trainer.mesh).items():
            timer.names[group].append(name.removesuffix("_group"))
        timer.communicators.clear()  # those that the Trainer used have no names yet
        step()
        begin = max(host.now, *(stream.moment for stream in host.streams))
        host.now = main.moment = begin  # the device is idle
        for of_first in (host.spans, main.parts, main.exposed):
            of_first.clear()
        timer.counts = fake_cuda.Counts()
        memory.changes = [(0.0, sum(record.nbytes for record in memory.records.values()))]
        step()
        main.run("end", 0.0)  # the step ends no earlier than the host's last work
    step_us, peaks = main.moment - begin, memory.peaks()
    flops = hybrid.flops_per_token(args) * args.batch_size * args.seq_len / args.world_size
    found = {
        "rank": own.rank,
        "step_ms": step_us / 1e3,
        "bubble_ms": step_us / 1e3 * bubble_share(own.rank * args.pp // args.world_size, args),
        "mfu": flops / step_us / (1e6 * timer.gpu.tflops),
        "products_ms": main.parts["products"] / 1e3,
        "other_ms": main.parts["other"] / 1e3,
        "exposed_ms": {axis: waited / 1e3 for axis, waited in main.exposed.items()},
        "starved_ms": main.parts["starved"] / 1e3,
        "batches": timer.counts.batches.total(),
        "messages": timer.counts.messages.total(),
        "peak_gb": peaks[0] / 1e9,
        "peak_recorded_gb": peaks[1] / 1e9,
        "nccl_gb": sum(map(len, timer.peers.values())) * CHANNELS * CHANNEL_BYTES / 1e9,
    }
    names = "tid", "name", "ts", "dur"
    return found, [dict(zip(names, span), ph="X", pid=f"rank {own.rank}") for span in host.spans]


def parse(argv):
    """Return this command's own flags, and hybrid's Args, parsed from the other flags."""
    parser = argparse.ArgumentParser(Path(__file__).name, description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gpus", type=hybrid.at_least(1), required=True, help="number of GPUs")
    parser.add_argument("--gpu", choices=GPUS, default="h100", help="model of GPU")
    rank = {"type": hybrid.at_least(0), "help": "rank to time (default: the costliest)"}
    parser.add_argument("--rank", **rank)
    time = {"type": hybrid.at_least(0, float), "help": "default: %(default)s"}
    parser.add_argument("--batch-us", default=25.0, **time)
    parser.add_argument("--message-us", default=3.0, **time)
    parser.add_argument("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    own, flags = parser.parse_known_args(argv)
    try:
        args = hybrid.parse(flags, own.gpus, min(own.gpus, GPUS[own.gpu].per_node))
        if own.rank is None:
            own.rank = costliest_rank(args)
        hybrid.need(own.rank < own.gpus, f"--rank {own.rank} is not below --gpus {own.gpus}")
        if own.trace:
            Path(own.trace).touch()  # fails now rather than after the measurement
        return own, args
    except (OSError, ValueError) as error:
        parser.error(str(error))


def main():
    """Run the command in a process that has the device; return the exit status."""
    own, args = parse(sys.argv[1:])
    if "FAKE_CUDA" not in os.environ:
        with TemporaryDirectory() as folder:
            if library := fake_cuda.build(folder):
                return fake_cuda.run(library, ["-W", "ignore", *sys.argv]).returncode
        print(f"{Path(__file__).name}: error: there is no C++ compiler", file=sys.stderr)
        return 1
    found, events = measure(args, own)
    fake_cuda.settle()
    if own.trace:
        Path(own.trace).write_text(json.dumps(events))
    if own.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            parts = value if isinstance(value, dict) else {"": value}
            print(f"{name:18}", *(f"{part} {round(number, 3)} " for part, number in parts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
