"""Where would a step's time go on GPUs? A model's answer, without a GPU, for the real code.

    python tests/gpu_time.py --gpus 8 --dtype bf16 --dp 8 --zero 3      flags of hybrid.py
    python tests/gpu_time.py --gpus 8 --gpu a100 --json --trace FILE --dtype bf16 --tp 8 --sp

Rank 0 takes two steps on the pretended device of fake_cuda.py, and the second one is timed. The
kernels, messages, streams, events and waits are those of the code; their durations are modelled:

    host           launches kernels and batches, and runs ahead of the device until it waits for it
    stream         runs its kernels in the order in which they were launched
    event          is a moment of a stream, which other streams, or the host, wait for
    communicator   one for each group, runs its batches in order, on a stream of its own

    kernel         its bytes at 80% of the memory's speed or its FLOPs at 65% of the peak, whichever
                   takes longer, and at least 2 us
    batch          12 us, and its bytes at 80% of the speed of NVLink or of the network
    host           5 us for a kernel, 1.5 us for a view, --batch-us and --message-us for messages

All ranks are taken to be alike, so peers meet at once, and a pipeline has no bubble (plan.py has
it). Messages take no SMs from kernels. The speeds are those of data sheets, and the other constants
are estimates: compare two versions of the code by them, and do not expect a real machine's time.

The main stream's step is the sum of four parts: products, other kernels, "exposed" waits for the
messages of an axis, and "starved" waits for the host. An axis is named by the groups of hybrid's
Mesh that share its communicator, the first two of them. The memory's peak is told twice: as if
freed memory were free at once, and by PyTorch's rule for point-to-point messages, which reuses
their tensors' memory once the host has seen their batch's end ("recorded"). NCCL's own buffers come
on top: 12 MB for each channel to each peer to which a group has sent.
"""

import argparse
import heapq
import itertools
import json
import os
import sys
import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import fake_cuda  # before torch, which it gives a device
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import hybrid
from models import GPUS, Gpu

aten = torch.ops.aten
LAUNCH_US, VIEW_US = 5.0, 1.5  # of the host
KERNEL_US, ROUND_US = 2.0, 12.0  # the least of a kernel, and of a batch
CHANNELS = 32  # to a peer; a variable of NCCL's limits them
CHANNEL_BYTES = 12e6


# ---- the model -----------------------------------------------------------------------------------


class Host:
    """The thread that launches, and its clock. All moments and durations are in microseconds."""

    def __init__(self):
        self.now = 0.0
        self.spans = []  # (lane, name, begin, end) of all that anybody did
        self.main = self.current = Stream(self, lane="main stream")

    def work(self, name, duration):
        self.spans.append(("host", name, self.now, self.now + duration))
        self.now += duration

    def wait_until(self, moment):
        if moment > self.now:
            self.work("wait", moment - self.now)

    @contextmanager
    def stream(self, stream):
        """Launch on this stream inside. In place of torch.cuda.stream()."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Stream:
    """Kernels that run in the order in which they were launched. In place of torch.cuda.Stream."""

    numbers = itertools.count(1)

    def __init__(self, host, lane=None, **options):
        self.host = host
        self.lane = lane or f"side stream {next(self.numbers)}"
        self.ready = 0.0  # the end of all that it has been given
        self.axis = "streams"  # of the messages for which it waited last
        self.parts = Counter()  # how long it ran, and waited for the host
        self.exposed = Counter()  # {axis: how long it waited for messages}

    def run(self, name, duration, part="other"):
        begin = max(self.ready, self.host.now)
        self.parts["starved"] += begin - self.ready
        self.parts[part] += duration
        self.ready = begin + duration
        self.host.spans.append((self.lane, name, begin, self.ready))

    def wait_until(self, moment, axis):
        """Begin no later kernel before this moment, for which messages of this axis are blamed."""
        begin = max(self.ready, self.host.now)
        self.axis = axis
        if moment > begin:
            self.parts["starved"] += begin - self.ready
            self.exposed[axis] += moment - begin
            self.ready = moment

    def wait_stream(self, other):
        self.wait_until(other.ready, other.axis)

    def wait_event(self, event):
        event.wait(self)

    def record_event(self, event=None):
        event = event or Event(self.host)
        event.record(self)
        return event

    def query(self):
        return self.host.now >= self.ready

    def synchronize(self):
        self.host.wait_until(self.ready)


class Event:
    """A moment of a stream, or the end of a batch. In place of torch.cuda.Event."""

    def __init__(self, host, moment=0.0, axis="streams", **options):
        self.host, self.moment, self.axis = host, moment, axis

    def record(self, stream=None):
        stream = stream or self.host.current
        self.moment = max(stream.ready, self.host.now)
        self.axis = stream.axis

    def wait(self, stream=None):
        """Have a stream wait, which is also what Work.wait() does: the host goes on."""
        (stream or self.host.current).wait_until(self.moment, self.axis)

    def query(self):
        return self.host.now >= self.moment

    def synchronize(self):
        self.host.wait_until(self.moment)

    def elapsed_time(self, other):
        return (other.moment - self.moment) / 1e3


class Communicator:
    """A group's batches, which run in the order in which they were posted."""

    def __init__(self, host, axis):
        self.host, self.axis = host, axis
        self.ready = 0.0
        self.peers = set()

    def post(self, name, duration):
        """Begin a batch after all that the current stream has been given; returns its end."""
        begin = max(self.host.now, self.ready, self.host.current.ready)
        self.ready = begin + duration
        self.host.spans.append((f"NCCL {self.axis}", name, begin, self.ready))
        return Event(self.host, self.ready, self.axis)


class Memory:
    """Bytes of storages: those in use, and those freed that a message holds back.

    peak: of those in use. recorded: of both, where memory that a message has had is reused only
    when the host sees, at a later allocation, that the batch has ended.
    """

    def __init__(self, host):
        self.host, self.records, self.pending = host, {}, []
        self.used = self.held_back = self.peak = self.recorded = 0

    def resize(self, storage, nbytes):
        """Take note of a storage's new size, and of its end."""
        key = storage._cdata
        if key not in self.records:
            self.records[key] = SimpleNamespace(nbytes=0, until=0.0)
            weakref.finalize(storage, lambda: self.change(self.records.pop(key), 0))
        self.change(self.records[key], nbytes)

    def hold(self, storage, moment):
        """Take note of a message that has this storage until then."""
        record = self.records[storage._cdata]
        record.until = max(record.until, moment)

    def change(self, record, nbytes):
        while self.pending and self.pending[0][0] <= self.host.now:
            self.held_back -= heapq.heappop(self.pending)[1]
        freed, record.nbytes = record.nbytes - nbytes, nbytes
        self.used -= freed
        if freed > 0 and record.until > self.host.now:
            self.held_back += freed
            heapq.heappush(self.pending, (record.until, freed))
        self.peak = max(self.peak, self.used)
        self.recorded = max(self.recorded, self.used + self.held_back)


class Machine(NamedTuple):
    """How long things take, and what costs the host the time it takes to post messages."""

    gpu: Gpu
    batch_us: float = 25.0
    message_us: float = 3.0
    dtype: str = "bf16"

    def kernel(self, nbytes, flops, itemsize):
        peak = self.gpu.tflops * 1e6  # FLOPs of a microsecond
        if itemsize > 2:
            peak /= 2 if self.dtype == "tf32" else 15
        return max(KERNEL_US, nbytes / (0.8 * self.gpu.memory_speed * 1e3), flops / (0.65 * peak))

    def batch(self, inside, outside):
        """inside, outside: bytes in one direction to ranks of this node and of others."""
        links = (inside, self.gpu.node), (outside, self.gpu.network)
        return ROUND_US + max(nbytes / (0.8 * speed * 1e3) for nbytes, speed in links)


# ---- the code under the model --------------------------------------------------------------------

WITHOUT_KERNEL = {  # operators that are no views, either
    *(aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided),
    *(aten.detach, aten.alias, aten._unsafe_view, aten._reshape_alias, aten.resize_, aten.set_),
    *(aten.lift_fresh, aten._local_scalar_dense, aten._pin_memory, aten.is_pinned),
}


def grouped_flops(rows, matrices, *arguments, **options):
    return 2 * rows.shape[-2] * rows.shape[-1] * matrices.shape[-1]


FLOPS = {**flop_registry, aten.addmm_: flop_registry[aten.addmm], aten._grouped_mm: grouped_flops}


def flops_of(function, arguments, options, result):
    """FLOPs of an operator's matrix products, of which causal attention computes one half."""
    formula = FLOPS.get(function.overloadpacket)
    if formula is None:
        return 0
    names = [argument.name for argument in function._schema.arguments]
    is_causal = {**dict(zip(names, arguments)), **options}.get("is_causal", False)
    flops = formula(*arguments, **options, out_val=result)
    return flops / 2 if is_causal else flops


def fused_attention(q, k, v, dropout_p=0.0, is_causal=False, **options):
    """In place of F.scaled_dot_product_attention(), which finds no fused kernel for this device."""
    return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]


class Timer(fake_cuda.Watch):
    """Gives a duration to everything that reaches the device."""

    def __init__(self, args, machine):
        super().__init__(args)
        self.machine, self.host = machine, Host()
        self.memory = Memory(self.host)
        self.axes, self.communicators = {}, {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        result = super().__torch_dispatch__(function, types, arguments, options)
        tensors = [t for t in tree_leaves((arguments, options)) if isinstance(t, torch.Tensor)]
        tensors += [t for t in tree_leaves(result) if not any(t is x for x in tensors)]
        tensors = list(filter(is_on_device, tensors))
        if not tensors or function.namespace == "prim":  # prim.device asks a tensor for its device
            return result
        for tensor in filter(is_on_device, tree_leaves(result)):
            storage = tensor.untyped_storage()
            self.memory.resize(storage, storage.nbytes())
        name = function.overloadpacket.__name__
        if function.is_view or function.overloadpacket in WITHOUT_KERNEL:
            self.host.work(name, VIEW_US)
            return result
        self.host.work(name, LAUNCH_US)
        flops = flops_of(function, arguments, options, result)
        itemsize = min(t.element_size() for t in tensors if t.numel()) if flops else 4
        duration = self.machine.kernel(sum(tensor.nbytes for tensor in tensors), flops, itemsize)
        self.host.current.run(name, duration, "products" if flops else "other")
        return result

    def note_wait(self, what):
        super().note_wait(what)
        self.host.current.synchronize()

    def post(self, group, sends, receives):
        """In place of collectives.post_batch()."""
        super().post(group, sends, receives)
        messages = len(sends) + len(receives)
        self.host.work("post", self.machine.batch_us + messages * self.machine.message_us)
        if group not in self.communicators:
            self.communicators[group] = Communicator(self.host, self.axes.get(group, "world"))
        communicator = self.communicators[group]
        communicator.peers.update(peer for _, peer in (*sends, *receives))
        duration = max(self.duration(group, sends), self.duration(group, receives))
        batch = communicator.post(f"{messages} messages", duration)
        for tensor, _ in (*sends, *receives):
            self.memory.hold(tensor.untyped_storage(), batch.moment)
        return batch

    def duration(self, group, messages):
        """Of the messages of one direction."""
        ranks, nbytes = dist.get_process_group_ranks(group), Counter()
        for tensor, peer in messages:
            nbytes[ranks[peer] < self.machine.gpu.per_node] += tensor.nbytes  # as rank 0 is
        return self.machine.batch(nbytes[True], nbytes[False])

    def patches(self):
        """What stands for CUDA, on top of fake_cuda's patches."""
        host, cuda = self.host, torch.cuda
        yield from fake_cuda.patches(self)
        yield patch.multiple(cuda, Stream=partial(Stream, host), Event=partial(Event, host))
        yield patch.object(cuda, "current_stream", lambda device=None: host.current)
        yield patch.object(cuda, "stream", host.stream)
        yield patch.object(F, "scaled_dot_product_attention", fused_attention)
        yield patch.object(torch.UntypedStorage, "resize_", self.resize(torch.UntypedStorage.resize_))

    def resize(self, real):
        def resize_(storage, nbytes):
            self.memory.resize(storage, nbytes)
            return real(storage, nbytes)

        return resize_


def is_on_device(x):
    return isinstance(x, torch.Tensor) and fake_cuda.is_on_device(x)


def axes_of(mesh):
    """{group: the first two names under which the mesh has it}"""
    names = {}
    for name, group in vars(mesh).items():
        if group is not None:
            names.setdefault(group, []).append(name.removesuffix("_group"))
    return {group: "+".join(of[:2]) for group, of in names.items()}


def measure(args, machine):
    """The second step of rank 0: what --json prints, and the trace's spans."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world_size)
    timer = Timer(args, machine)
    host, memory = timer.host, timer.memory
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        for patched in timer.patches():
            stack.enter_context(patched)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(timer)
        trainer, step = fake_cuda.hybrid_step(args, torch.device("cuda", 0))
        timer.axes = axes_of(trainer.mesh)
        for group, communicator in timer.communicators.items():
            communicator.axis = timer.axes.get(group, "world")
        step()
        # the second step begins on an idle device
        main, communicators = host.main, timer.communicators.values()
        begin = max([host.now, main.ready, *(each.ready for each in communicators)])
        host.now = main.ready = begin
        memory.peak = memory.recorded = memory.used
        for of_last in (host.spans, main.parts, main.exposed):
            of_last.clear()
        timer.counts = fake_cuda.Counts()
        step()
        main.run("end", 0.0)  # after whatever the host did last
    step_us = main.ready - begin
    flops = hybrid.flops_per_token(args) * args.batch_size * args.seq_len / args.world_size
    connected = sum(len(communicator.peers) for communicator in communicators)
    milliseconds = lambda counter: {name: of / 1e3 for name, of in counter.most_common()}
    found = {
        "step_ms": step_us / 1e3,
        "mfu": flops / step_us / (machine.gpu.tflops * 1e6),
        "products_ms": main.parts["products"] / 1e3,
        "other_ms": main.parts["other"] / 1e3,
        "exposed_ms": milliseconds(main.exposed),
        "starved_ms": main.parts["starved"] / 1e3,
        "batches": timer.counts.batches.total(),
        "messages": timer.counts.messages.total(),
        "peak_gb": memory.peak / 1e9,
        "peak_recorded_gb": memory.recorded / 1e9,
        "nccl_gb": connected * CHANNELS * CHANNEL_BYTES / 1e9,
    }
    return found, [(*of, first - begin, last - begin) for *of, first, last in host.spans]


# ---- the command ---------------------------------------------------------------------------------


def parse(argv):
    """The command's own flags, and hybrid's Args. Raises ValueError."""
    parser = argparse.ArgumentParser(Path(__file__).name, description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gpus", type=hybrid.at_least(1), required=True, help="how many")
    parser.add_argument("--gpu", choices=GPUS, default="h100", help="of which kind")
    parser.add_argument("--trace", help="a file for https://ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--batch-us", type=float, default=25.0, help="of the host, for a batch")
    parser.add_argument("--message-us", type=float, default=3.0, help="and for each message in it")
    own, flags = parser.parse_known_args(argv)
    return own, hybrid.parse(flags, own.gpus, min(own.gpus, GPUS[own.gpu].per_node))


def show(found):
    print(f"step {found['step_ms']:.2f} ms, MFU {found['mfu']:.1%}")
    exposed = ", ".join(f"{axis} {of:.2f}" for axis, of in found["exposed_ms"].items())
    for name, of in {
        "products": f"{found['products_ms']:.2f}",
        "other kernels": f"{found['other_ms']:.2f}",
        "exposed": f"{sum(found['exposed_ms'].values()):.2f} ms  {exposed}",
        "starved": f"{found['starved_ms']:.2f}",
        "messages": f"{found['messages']} in {found['batches']} batches",
        "memory's peak": f"{found['peak_gb']:.2f} GB, recorded {found['peak_recorded_gb']:.2f}",
        "NCCL's buffers": f"{found['nccl_gb']:.2f}",
    }.items():
        print(f"    {name:14}  {of}")


def write_trace(path, spans):
    lanes = {"ph": "X", "pid": "rank 0"}
    events = [
        {"name": name, "tid": lane, "ts": begin, "dur": end - begin, **lanes}
        for lane, name, begin, end in spans
    ]
    Path(path).write_text(json.dumps(events))


def main():
    own, args = parse(sys.argv[1:])
    if "FAKE_CUDA" not in os.environ:
        with TemporaryDirectory() as folder:
            return fake_cuda.run(fake_cuda.build(folder), sys.argv).returncode
    found, spans = measure(args, Machine(GPUS[own.gpu], own.batch_us, own.message_us, args.dtype))
    if own.trace:
        write_trace(own.trace, spans)
    if own.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
