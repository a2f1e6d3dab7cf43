"""Where would a step's time go on GPUs? A model's answer for the real code, without a GPU.

    python tests/gpu_time.py --gpus 8 --dtype bf16 --dp 8 --zero 3       flags of hybrid.py
    python tests/gpu_time.py --gpus 8 --gpu a100 --json --trace FILE --dtype bf16 --tp 8 --sp

Rank 0 takes two steps on the pretended device of fake_cuda.py, and the second one is timed. The
kernels, messages, events and waits are those of the code; how long they take is a model:

    host      launches kernels and batches, ahead of the device until it waits for it: 5 us for a
              kernel, 1.5 us for a view, --batch-us for a batch and --message-us for each message
    stream    runs its kernels in the order of their launches: each takes its bytes at 80% of the
              memory's speed or its FLOPs at 65% of the peak, whichever is longer, or 2 us
    group     has a communicator, a stream of batches: each takes 12 us, and its bytes at 80% of the
              speed of NVLink, or of the network if a message leaves the node
    event     is a moment of a stream, for which other streams and the host can wait

All ranks are alike and meet at once, so a pipeline has no bubble (plan.py has it), and messages
take no SMs from kernels. Speeds are those of data sheets and the other constants are estimates:
compare versions of the code by them, and do not expect a real machine to take the same time.

A step of the main stream consists of products, other kernels, waits for messages ("exposed", by the
first two names that hybrid's Mesh has for their group) and waits for the host ("starved"). peak_gb
is what tensors need. By PyTorch's rule, memory that a message has touched is free only once the
host has seen the end of its batch: peak_recorded_gb counts that, too. NCCL's buffers come on top:
12 MB for each of 32 channels to each peer of each group with which rank 0 has had messages.
"""

import argparse
import json
import os
import sys
import weakref
from collections import Counter, defaultdict
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

import fake_cuda  # before torch, which it gives a device
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import hybrid
from models import GPUS

# ---- the model: all moments and durations are in microseconds ------------------------------------


class Host:
    """The thread that launches, and its clock."""

    def __init__(self):
        self.now, self.streams = 0.0, []
        self.spans = []  # (lane, name, begin, duration), for the trace
        self.main = self.current = Stream(self, "main stream")

    def work(self, name, duration):
        self.spans.append(("host", name, self.now, duration))
        self.now += duration


class Event:
    """A moment of a stream, or the end of a batch, and the axis whose messages came before it."""

    def __init__(self, host, moment, axis):
        self.host, self.moment, self.axis = host, moment, axis

    def wait(self):
        self.host.current.wait_event(self)

    def query(self):
        return self.moment <= self.host.now

    def synchronize(self):
        self.host.work("wait", max(0.0, self.moment - self.host.now))


class Stream(Event):
    """In place of torch.cuda.Stream; the moment is the end of all that it was given."""

    def __init__(self, host, lane=None, **options):
        super().__init__(host, 0.0, lane)
        self.lane = lane or f"stream {len(host.streams)}"
        self.parts, self.exposed = Counter(), Counter()
        host.streams.append(self)

    def run(self, name, duration, part="other"):
        begin = max(self.moment, self.host.now)
        self.parts["starved"] += begin - self.moment
        self.parts[part] += duration
        self.moment = begin + duration
        self.host.spans.append((self.lane, name, begin, duration))

    def wait_event(self, event):
        """Begin no later kernel before the event."""
        begin, self.axis = max(self.moment, self.host.now), event.axis
        if event.moment > begin:
            self.parts["starved"] += begin - self.moment
            self.exposed[event.axis] += event.moment - begin
            self.moment = event.moment

    wait_stream = wait_event

    def record_event(self):
        return Event(self.host, max(self.moment, self.host.now), self.axis)

    def __enter__(self):  # of `with torch.cuda.stream(self)`
        self.before, self.host.current = self.host.current, self

    def __exit__(self, *error):
        self.host.current = self.before


class Communicator(Stream):
    """NCCL's stream of a group. Its lane is the axis."""

    def post(self, name, duration):
        """Begin a batch after all that the current stream was given; returns its end."""
        self.wait_stream(self.host.current)
        self.run(name, duration)
        return Event(self.host, self.moment, self.lane)


class Memory:
    """The bytes of storages, and the moment from which each change of them counts.

    in_use_until: the end of the last batch that has a storage, before which it is not free.
    """

    def __init__(self, host):
        self.host, self.records, self.changes = host, {}, []

    def resize(self, storage, nbytes):
        key = storage._cdata
        if key not in self.records:
            self.records[key] = SimpleNamespace(nbytes=0, in_use_until=0.0)
            weakref.finalize(storage, lambda: self.change(self.records.pop(key), 0))
        self.change(self.records[key], nbytes)

    def change(self, record, nbytes):
        more, record.nbytes = nbytes - record.nbytes, nbytes
        moment = self.host.now if more > 0 else max(self.host.now, record.in_use_until)
        self.changes.append((moment, more))

    def peaks(self):
        """GB at most: of tensors, and of what is not free."""
        recorded = sorted(self.changes, key=lambda change: change[0])
        return [max(accumulate(more for _, more in of)) / 1e9 for of in (self.changes, recorded)]


# ---- the code on the model -----------------------------------------------------------------------

aten = torch.ops.aten
NO_KERNEL = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.detach}
NO_KERNEL |= {aten.new_empty_strided, aten._unsafe_view, aten.set_, aten._local_scalar_dense}
FLOPS = flop_registry | {  # of products, by shapes
    aten.addmm_: flop_registry[aten.addmm],
    aten._grouped_mm: lambda x, w, *_, **options: 2 * x.shape[-2] * x.shape[-1] * w.shape[-1],
}


class Timer(fake_cuda.Watch):
    """Gives a duration to all that reaches the device."""

    def __init__(self, args, own):
        super().__init__(args)
        self.own, self.gpu, self.host = own, GPUS[own.gpu], Host()
        self.memory = Memory(self.host)
        self.axes, self.communicators, self.peers = {}, {}, defaultdict(set)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = super().__torch_dispatch__(function, types, arguments, options)
        given = list(filter(fake_cuda.is_on_device, tree_leaves((arguments, options))))
        made = list(filter(fake_cuda.is_on_device, tree_leaves(result)))
        if not given + made or function.namespace == "prim":  # which asks a tensor what it is
            return result
        for tensor in made:
            self.memory.resize(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        operator = function.overloadpacket
        if function.is_view or operator in NO_KERNEL:
            self.host.work(operator.__name__, 1.5)
            return result
        self.host.work(operator.__name__, 5.0)
        tensors = given + [tensor for tensor in made if not any(tensor is t for t in given)]
        moving = sum(tensor.nbytes for tensor in tensors) / (0.8e3 * self.gpu.memory_speed)
        computing = self.computing(function, arguments, options or {}, result)
        part = "products" if computing else "other"
        self.host.current.run(operator.__name__, max(2.0, moving, computing), part)
        return result

    def computing(self, function, arguments, options, result):
        """Duration of a product's FLOPs. Causal attention computes half of the scores."""
        if function.overloadpacket not in FLOPS:
            return 0
        flops = FLOPS[function.overloadpacket](*arguments, **options, out_val=result)
        names = [argument.name for argument in function._schema.arguments]
        if dict(zip(names, arguments)).get("is_causal"):
            flops /= 2
        sizes = [x.itemsize for x in arguments if isinstance(x, torch.Tensor)]
        slower = 15 if min(sizes) > 2 else 1  # products of fp32
        return flops * slower / (0.65e6 * self.gpu.tflops)

    def note_wait(self, what):
        super().note_wait(what)
        self.host.current.synchronize()

    def post(self, group, sends, receives):
        """In place of collectives.post_batch()."""
        super().post(group, sends, receives)
        messages, ranks = [*sends, *receives], dist.get_process_group_ranks(group)
        self.host.work("post", self.own.batch_us + len(messages) * self.own.message_us)
        if group not in self.communicators:
            self.communicators[group] = Communicator(self.host, self.axes.get(group, "world"))
        peers = {peer for _, peer in messages}
        self.peers[group] |= peers
        is_near = all(ranks[peer] < self.gpu.per_node for peer in peers)  # as rank 0 is
        speed = 0.8e3 * (self.gpu.node if is_near else self.gpu.network)
        nbytes = max(sum(tensor.nbytes for tensor, _ in side) for side in (sends, receives))
        batch = self.communicators[group].post(f"{len(messages)} messages", 12 + nbytes / speed)
        for tensor, _ in messages:
            record = self.memory.records[tensor.untyped_storage()._cdata]
            record.in_use_until = max(record.in_use_until, batch.moment)
        return batch

    def patches(self):
        """What stands for CUDA and for the other ranks."""
        resize_ = torch.UntypedStorage.resize_

        def resize(storage, nbytes):
            self.memory.resize(storage, nbytes)
            return resize_(storage, nbytes)

        yield from fake_cuda.patches(self)
        yield patch.object(torch.cuda, "Stream", partial(Stream, self.host))
        yield patch.object(torch.cuda, "current_stream", lambda device=None: self.host.current)
        yield patch.object(torch.cuda, "stream", lambda stream: stream)
        yield patch.object(torch.UntypedStorage, "resize_", resize)
        yield FakeTensorMode(allow_non_fake_inputs=True)
        yield self


def measure(args, own):
    """Time the second step of rank 0; returns what --json prints, and the trace's spans."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world_size)
    timer, names = Timer(args, own), defaultdict(list)
    host, main, memory = timer.host, timer.host.main, timer.memory
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        for patched in timer.patches():
            stack.enter_context(patched)
        trainer, step = fake_cuda.hybrid_step(args, torch.device("cuda", 0))
        for name, group in vars(trainer.mesh).items():
            names[group].append(name.removesuffix("_group"))
        timer.axes = {group: "+".join(own[:2]) for group, own in names.items()}
        timer.communicators.clear()  # whose lanes had no names yet
        step()
        begin = max(host.now, *(stream.moment for stream in host.streams))
        host.now = main.moment = begin
        host.spans, timer.counts = [], fake_cuda.Counts()
        main.parts, main.exposed = Counter(), Counter()
        memory.changes = [(0.0, sum(record.nbytes for record in memory.records.values()))]
        step()
        main.run("end", 0.0)  # no earlier than the host's last work
    step_us, peaks = main.moment - begin, memory.peaks()
    flops = hybrid.flops_per_token(args) * args.batch_size * args.seq_len / args.world_size
    found = {
        "step_ms": step_us / 1e3,
        "mfu": flops / step_us / (1e6 * timer.gpu.tflops),
        "products_ms": main.parts["products"] / 1e3,
        "other_ms": main.parts["other"] / 1e3,
        "exposed_ms": {axis: waited / 1e3 for axis, waited in main.exposed.items()},
        "starved_ms": main.parts["starved"] / 1e3,
        "batches": timer.counts.batches.total(),
        "messages": timer.counts.messages.total(),
        "peak_gb": peaks[0],
        "peak_recorded_gb": peaks[1],
        "nccl_gb": sum(map(len, timer.peers.values())) * 32 * 12e6 / 1e9,
    }
    return found, [dict(tid=t, name=n, ts=b - begin, dur=d) for t, n, b, d in host.spans]


def main():
    """Run the command, in a process that has the device. Returns the exit status."""
    parser = argparse.ArgumentParser(Path(__file__).name, description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gpus", type=hybrid.at_least(1), required=True, help="how many")
    parser.add_argument("--gpu", choices=GPUS, default="h100", help="of which kind")
    parser.add_argument("--batch-us", type=float, default=25.0)
    parser.add_argument("--message-us", type=float, default=3.0)
    parser.add_argument("--trace", metavar="FILE", help="for https://ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print one object")
    own, flags = parser.parse_known_args()
    try:
        args = hybrid.parse(flags, own.gpus, min(own.gpus, GPUS[own.gpu].per_node))
    except ValueError as error:
        parser.error(str(error))
    if "FAKE_CUDA" not in os.environ:
        with TemporaryDirectory() as folder:
            library = fake_cuda.build(folder) or parser.error("there is no C++ compiler")
            return fake_cuda.run(library, ["-W", "ignore", *sys.argv]).returncode
    found, spans = measure(args, own)
    fake_cuda.settle()
    if own.trace:
        Path(own.trace).write_text(json.dumps([span | {"ph": "X", "pid": "0"} for span in spans]))
    if own.json:
        print(json.dumps(found))
        return 0
    for name, value in found.items():
        print(f"{name:18}{value if isinstance(value, dict) else round(value, 3)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
