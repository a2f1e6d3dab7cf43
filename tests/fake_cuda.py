"""hybrid on GPUs that are not there: one rank of any world runs, and what it launches is counted.

    library = build(folder)                          the pretended device of fake_cuda.cpp, compiled
    count(library, [(world_size, rank, flags), ...])     the Counts of a step each, in a new process

The tensors are fake: they have shapes, and no memory. So a rank of a model of any size runs in any
process, on a device with CUDA's branches, autograd's own thread for it, and a group called "nccl"
whose messages go nowhere. Of what has no value here, numbers of rows are taken as if experts had
even loads. The device has to be there before torch is imported: hence the process.

    python tests/fake_cuda.py LIBRARY WORLD_SIZE RANK FLAGS...           to look at one, by line
"""

import ctypes
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

TESTS = Path(__file__).resolve().parent
PROJECT = TESTS.parent
TORCH = Path(importlib.util.find_spec("torch").origin).parent


def compiler():
    """The C++ compiler, or None."""
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def build(folder):
    """Compile the device into `folder`: its library's path. RuntimeError with what is wrong."""
    library = Path(folder) / "libfake_cuda.so"
    command = [compiler(), "-shared", "-fPIC", "-std=c++20", f"-I{TORCH / 'include'}"]
    command += [str(TESTS / "fake_cuda.cpp"), "-o", str(library)]
    if sys.platform == "darwin":
        command += ["-undefined", "dynamic_lookup"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return library


@dataclass
class Counts:
    """What one rank did in one step. Places are "file.py function", the innermost of the project's.

    misaligned: of what is sent, by place, that does not begin on a multiple of so many bytes in its
    storage, which itself begins on 512. refused: tensors in a batch that NCCL does not take.
    """

    batches: int = 0
    messages: int = 0
    nbytes: int = 0  # sent
    kernels: Counter = field(default_factory=Counter)  # by operator
    by_place: Counter = field(default_factory=Counter)  # batches
    synchronisations: Counter = field(default_factory=Counter)  # by place: the host waits
    copies: Counter = field(default_factory=Counter)  # by place: between host and device
    refused: Counter = field(default_factory=Counter)
    misaligned: dict = field(default_factory=lambda: {"16": Counter(), "128": Counter()})
    error: str = ""  # what ended it

    @classmethod
    def of_json(cls, found):
        counters = {name: Counter(value) for name, value in found.items() if type(value) is dict}
        counts = cls(**found | counters)
        counts.misaligned = {n: Counter(places) for n, places in counts.misaligned.items()}
        return counts


def count(library, jobs, processes=2, timeout=600):
    """The Counts of each (world_size, rank, flags of hybrid.py)."""
    command = [sys.executable, str(TESTS / "fake_cuda.py"), str(library)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    options = {"capture_output": True, "text": True, "timeout": timeout, "env": environment}

    def of(part):
        done = subprocess.run(command, input=json.dumps(part), **options)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return [Counts.of_json(found) for found in json.loads(done.stdout)]

    parts = [jobs[i::processes] for i in range(processes)]
    with ThreadPoolExecutor(processes) as pool:
        found = list(pool.map(of, parts))
    return [found[i % processes][i // processes] for i in range(len(jobs))]


# ---- in the process with the device --------------------------------------------------------------


def load(library):
    """Bring the device into this process, before Python's torch."""
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(TORCH / "lib" / name, mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def place(skip=("collectives.py",)):
    """The innermost function of the project that is running, outside of some files."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent == PROJECT and path.name not in skip:
            return f"{path.name} {frame.f_code.co_qualname.replace('<locals>.', '')}"
        frame = frame.f_back
    return "autograd"


class _Inline:
    """A stream or an event where everything has happened as soon as it is asked for."""

    def __init__(self, *arguments, **options):
        pass

    wait_stream = wait_event = wait = record = lambda self, *arguments: None
    record_event = lambda self, event=None: event or _Inline()
    query = lambda self: True
    elapsed_time = lambda self, other: 0.0


def _shape(tensor):
    return tuple(tensor.shape)


def _watch(counts, args):
    """A mode that counts what reaches the device into counts(), and values what is read of it."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten, prims = torch.ops.aten, torch.ops.prim
    free = {  # no kernel
        aten.detach.default, aten.empty.memory_format, aten.empty_like.default,
        aten.empty_strided.default, aten.new_empty.default, aten._unsafe_view.default,
        aten.set_.source_Storage, aten.lift_fresh.default, prims.device.default,
    }  # fmt: skip
    sized_by_values = {
        aten.nonzero.default, aten.bincount.default, aten.masked_select.default,
        aten.repeat_interleave.Tensor, aten._unique2.default, aten.equal.default,
    }  # fmt: skip

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            options = options or {}
            if function in free or function.is_view:
                return function(*arguments, **options)
            given, found = list(_tensors(arguments)), counts()
            device = any(map(_is_on_device, given))
            if function is aten._local_scalar_dense.default:
                if device:
                    found.synchronisations[f"item {place(())}"] += 1
                dtype = given[0].dtype
                return device if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0
            if device and function in sized_by_values and not _has_size(function, options):
                found.synchronisations[f"{function.__name__} {place(())}"] += 1
            if device and function in (aten.index.Tensor, aten.index_put_.default):
                if any(i is not None and i.dtype == torch.bool for i in arguments[1]):
                    found.synchronisations[f"boolean index {place(())}"] += 1
            if function is aten._pin_memory.default:
                return given[0]
            if (value := _valued(function, arguments, options)) is not None:
                return value
            result = function(*arguments, **options)
            made = list(_tensors([result]))
            if device or any(map(_is_on_device, made)):
                found.kernels[function.__name__] += 1
                if function in (aten._to_copy.default, aten.copy_.default):
                    source, target = (given[-1], given[0]) if made[0] is given[0] else (given[0], made[0])
                    _note_copy(found, source, target, options)
            return result

    def _has_size(function, options):
        return function is aten.repeat_interleave.Tensor and options.get("output_size") is not None

    def _valued(function, arguments, options):
        """What has a shape that depends on values."""
        first = arguments[0] if arguments else None
        if function is aten.bincount.default:
            length = arguments[2] if len(arguments) > 2 else options.get("minlength", 0)
            return first.new_empty(length, dtype=torch.int64)
        if function is aten.nonzero.default:
            return first.new_empty(1, first.ndim, dtype=torch.int64)
        if function is aten.repeat_interleave.Tensor and not _has_size(function, options):
            return first.new_empty(_rows(args))
        return None

    def _note_copy(found, source, target, options):
        leaves, arrives = _is_on_device(source), _is_on_device(target)
        if leaves != arrives:
            found.copies[f"{'from' if leaves else 'to'} device {place(())}"] += 1
            if leaves and not options.get("non_blocking"):
                found.synchronisations[f"copy {place(())}"] += 1

    return Watch()


def _tensors(values):
    """The tensors among an operator's arguments, or in lists of them."""
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _is_on_device(tensor):
    """Without asking the tensor, which would dispatch."""
    return (getattr(tensor, "fake_device", None) or tensor.device).type == "cuda"


def _rows(args):
    """Choices of experts that a rank has to do with in a microbatch, where loads are even."""
    rows = args.batch_size // args.dp // args.microbatches
    return rows * (args.seq_len // args.cp // args.tp) * args.top_k


def _even(shape, total):
    """Nested lists of a shape, each of whose matrices, or vectors, adds up to about `total`."""
    number = total // max(1, math.prod(shape[-2:]))
    nest = lambda rest: [nest(rest[1:]) for _ in range(rest[0])] if rest else number
    return nest(shape)


def _patches(counts, args):
    """What stands for CUDA and for the other ranks while a trainer is made and takes steps."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensor

    import collectives
    import pipeline

    class Done:
        def wait(self):
            pass

    def batch(operations):
        found, where = counts(), place()
        found.batches += 1
        found.messages += len(operations)
        found.by_place[where] += 1
        for operation in operations:
            tensor = operation.tensor
            if operation.op is dist.isend:
                found.nbytes += tensor.nbytes
            if not tensor.is_cuda or not tensor.is_contiguous() or not tensor.numel():
                what = f"{tensor.device.type} {_shape(tensor)} of strides {tensor.stride()}"
                found.refused[f"{where}: {what}"] += 1
            begin = tensor.storage_offset() * tensor.element_size()
            for multiple, places in found.misaligned.items():
                places[where] += begin % int(multiple) != 0
        return [Done()]

    def synchronise(*_):
        counts().synchronisations[f"stream {place(())}"] += 1

    class Stream(_Inline):
        synchronize = synchronise

    def tolist(tensor):
        if tensor.is_cuda and tensor.numel():
            counts().synchronisations[f"tolist {place(())}"] += 1
        if tensor.dtype == torch.bool:
            return _even(tensor.shape, math.prod(tensor.shape[-2:]))
        return _even(tensor.shape, 0 if tensor.dtype.is_floating_point else _rows(args))

    def address(tensor):
        """Memory of its own for each storage."""
        begin = tensor.storage_offset() * tensor.element_size()
        return (tensor.untyped_storage()._cdata << 40) + begin

    def header(self, transfer):
        """Of the activations that another stage is about to send."""
        counts().synchronisations[f"tolist {place(())}"] += 1
        rows = args.batch_size // args.dp // self.num_microbatches
        length = args.seq_len // args.cp // (args.tp if args.sp else 1)
        dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
        return rows, dtype, torch.Size([length, rows, args.hidden])

    cuda, nothing = torch.cuda, lambda *_, **__: None
    yield patch.object(cuda.amp.common, "amp_definitely_not_available", lambda: False)
    yield patch.object(cuda, "is_bf16_supported", lambda *_, **__: True)
    yield patch.object(cuda, "Stream", Stream)
    yield patch.object(cuda, "Event", Stream)
    yield patch.object(cuda, "stream", lambda stream: nullcontext())
    yield patch.object(cuda, "current_stream", lambda device=None: Stream())
    yield patch.object(cuda, "synchronize", synchronise)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "max_memory_allocated"):
        yield patch.object(cuda, name, nothing)
    yield patch.object(torch.random, "fork_rng", lambda *_, **__: nullcontext())
    yield patch.object(torch.nn.Module, "_apply", _apply)
    yield patch.object(FakeTensor, "tolist", tolist)
    yield patch.object(FakeTensor, "data_ptr", address)
    yield patch.object(dist, "get_backend", lambda group=None: "nccl")
    yield patch.object(dist, "get_backend_config", lambda group=None: "cuda:nccl")
    yield patch.object(dist, "batch_isend_irecv", batch)
    alike = lambda value, group=None: [value] * dist.get_world_size(group)
    yield patch.object(collectives, "gather_objects", alike)
    yield patch.object(pipeline.Pipeline, "_recv_meta", header)


def _apply(module, function, recurse=True):
    """Module._apply(), which cannot swap a fake tensor's memory: new parameters take their place."""
    import torch

    for child in module.children() if recurse else ():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            new = torch.nn.Parameter(function(parameter.detach()), parameter.requires_grad)
            new.__dict__.update(parameter.__dict__ | new.__dict__)
            module._parameters[name] = new
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else function(buffer)
    return module


def count_step(world_size, rank, flags):
    """The Counts of the second step: the first one also makes what later ones use."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import hybrid

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    phases = [Counts()]
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        args = hybrid.parse_args(flags.split(), world_size)
        for patched in _patches(lambda: phases[-1], args):
            stack.enter_context(patched)
        with patch.object(hybrid, "barrier"):  # its token would be a real tensor
            mesh = hybrid.make_mesh(args.pp, args.dp, args.cp, args.tp, args.ep)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_watch(lambda: phases[-1], args))
        trainer = hybrid.Trainer(args, mesh, torch.device("cuda", 0))
        tokens = torch.zeros(args.batch_size // args.dp, args.seq_len, dtype=torch.int64)
        trainer.step(tokens, tokens)
        phases.append(Counts())
        trainer.step(tokens, tokens)
    return phases[-1]


def main(library, *job):
    load(library)
    sys.path.insert(0, str(PROJECT))
    if job:
        world_size, rank, *flags = job
        found = count_step(int(world_size), int(rank), " ".join(flags))
        print(json.dumps(vars(found), indent=1))
    else:
        print(json.dumps([_attempt(*job) for job in json.load(sys.stdin)]))


def _attempt(*job):
    """The fields of its Counts, or why there are none."""
    try:
        return vars(count_step(*job))
    except Exception:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    main(*sys.argv[1:])
