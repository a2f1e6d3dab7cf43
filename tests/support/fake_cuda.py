"""Run one rank of hybrid.py on a pretended GPU, and count what it launches.

    library = build(folder)           compile the device of fake_cuda.cpp
    count(library, jobs, processes)   return the Counts of a step for each (world_size, rank, flags)
    run(library, command)             run a Python command that has the device

Tensors are fake: they have shapes but no memory, so one process can be any rank of a model of any
size. The device takes CUDA's branches in the code, autograd runs its own thread for it, and the
process group is called "nccl" but sends nothing. Fake tensors have no values; where the code reads
numbers of rows, they are those of experts with even loads, chosen at random. The device must be
loaded before torch is imported, so it needs a new process.
"""

import ctypes
import importlib.util
import math
import os
import pickle
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

SUPPORT = Path(__file__).resolve().parent
PROJECT = SUPPORT.parents[1]
TORCH = Path(importlib.util.find_spec("torch").origin).parent


def load(library):
    """Load the device into this process, before Python imports torch."""
    ctypes.CDLL(TORCH / "lib" / "libtorch.so", mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


if "FAKE_CUDA" in os.environ:  # run() started this process
    load(os.environ["FAKE_CUDA"])
sys.path[:0] = [str(PROJECT), str(SUPPORT), str(SUPPORT.parent / "tools")]

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import collectives
import ddp
import expert_parallel
import hybrid
import pipeline
from gpu_counts import Stream, as_on_nccl, fused_rms_norm, host_waits_for, turns_in_same_modes

# ---- outside -------------------------------------------------------------------------------------


def build(folder):
    """Compile the device into `folder`; return the library's path, or None without a compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    library = Path(folder) / "libfake_cuda.so"
    command = [compiler, "-shared", "-fPIC", "-std=c++20", f"-I{TORCH / 'include'}"]
    command += [str(SUPPORT / "fake_cuda.cpp"), "-o", str(library)]
    return library if compiler and subprocess.run(command, check=True) else None


@dataclass
class Counts:
    """What one rank did in one step. Keys are places: the project's innermost "file.py function".

    refused: tensors in a batch that NCCL does not accept. misaligned: {bytes: tensors that do not
    begin on a multiple of so many bytes}; storages begin on 512. peers: the ranks with which this
    one has exchanged messages since the start; NCCL sets up memory for each of them.
    """

    batches: Counter = field(default_factory=Counter)
    messages: Counter = field(default_factory=Counter)
    synchronisations: Counter = field(default_factory=Counter)  # the host waits
    copies: Counter = field(default_factory=Counter)  # between host and device
    refused: Counter = field(default_factory=Counter)
    misaligned: dict = field(default_factory=lambda: {16: Counter(), 128: Counter()})
    peers: dict = field(default_factory=dict)  # {name of a group: ranks in it}
    error: str = ""  # the traceback of an error that ended the step


def count(library, jobs, processes):
    """Return the Counts of each job (world_size, rank, flags of hybrid.py)."""
    options = {"timeout": 600, "stdout": subprocess.PIPE, "check": True}

    def of(part):
        done = run(library, [str(SUPPORT / "fake_cuda.py")], input=pickle.dumps(part), **options)
        return [Counts(**fields) for fields in pickle.loads(done.stdout)]

    with ThreadPoolExecutor(processes) as pool:
        found = list(pool.map(of, [jobs[i::processes] for i in range(processes)]))
    return [found[i % processes][i // processes] for i in range(len(jobs))]


def run(library, command, **options):
    """Run a Python command in a process whose torch has the device; return a CompletedProcess."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FAKE_CUDA": str(library)}
    return subprocess.run([sys.executable, *command], env=environment, **options)


# ---- in the process with the device --------------------------------------------------------------


def place():
    """Return the innermost running function of the project, outside collectives.py."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent == PROJECT and path.name != "collectives.py":
            return f"{path.name} {frame.f_code.co_qualname.replace('<locals>.', '')}"
        frame = frame.f_back
    return "autograd"


aten = torch.ops.aten


class Watch(TorchDispatchMode):
    """Counts what reaches the device, and invents the values that the host reads from it."""

    def __init__(self, args):
        super().__init__()
        self.peers = {}  # since the start
        self.counts = Counts(peers=self.peers)
        self.per_node, self.top_k = args.per_node, args.top_k
        # two_hops() sends a token to each node that has some of its experts, but to topk_nodes
        experts, nodes = args.experts, args.ep_nodes
        in_none = math.comb(experts - experts // nodes, args.top_k)
        missed = in_none / max(1, math.comb(experts, args.top_k))
        self.nodes_of_token = min(args.topk_nodes, nodes * (1 - missed))
        self.rows = 0  # of the hop that waits for its counts

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        given = [x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)]
        device = any(map(is_on_device, given))
        if device and host_waits_for(function, arguments, options):
            self.note_wait(function.__name__)
        if function is aten._local_scalar_dense.default:
            dtype = given[0].dtype
            return device if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0
        if function is aten._pin_memory.default:
            return given[0]
        if (result := self.made_up(function, arguments, options)) is not None:
            return result
        result = function(*arguments, **options)
        if function is aten.copy_.default:
            self.note_copy(given[1], given[0], options)
        elif function is aten._to_copy.default:
            self.note_copy(given[0], result, options)
        return result

    def note_wait(self, what):
        self.counts.synchronisations[f"{what} {place()}"] += 1

    def note_copy(self, source, target, options):
        leaves, arrives = is_on_device(source), is_on_device(target)
        if leaves != arrives:
            self.counts.copies[f"{'from' if leaves else 'to'} device {place()}"] += 1
            if leaves and not options.get("non_blocking"):
                self.note_wait("copy")

    def made_up(self, function, arguments, options):
        """Return a result for an operator whose shape depends on values, and None for others."""
        first = arguments[0] if arguments else None
        if function is aten.bincount.default:
            length = arguments[2] if len(arguments) > 2 else options.get("minlength", 0)
            return first.new_empty(length, dtype=torch.int64)
        if function is aten.nonzero.default:
            return first.new_empty(1, first.ndim, dtype=torch.int64)
        if function is aten.repeat_interleave.Tensor and options.get("output_size") is None:
            return first.new_empty(self.rows)
        if function is aten.addmm.dtype_out:
            return options["out"]  # the fake tensors of torch 2.11 fail with it
        return None

    def tolist(self, tensor):
        """Stand in for FakeTensor.tolist(): the counts sent, or received, add up to all rows."""
        if tensor.is_cuda and tensor.numel():
            self.note_wait("tolist")
        shape = tensor.shape
        number = True if tensor.dtype == torch.bool else self.rows // max(1, math.prod(shape[1:]))
        number = 0.0 if tensor.dtype.is_floating_point else number
        nest = lambda rest: [nest(rest[1:]) for _ in range(rest[0])] if rest else number
        return nest(shape)

    def parts_of(self, plan, parts=expert_parallel.DispatchPlan.wait_for_counts):
        """Stand in for wait_for_counts(): loads are even, so a rank sends as many rows as it receives.

        Of two hops the second one starts with as many tokens as have arrived in the first one.
        """
        ranks = dist.get_process_group_ranks(plan.group)
        crosses = len({rank // self.per_node for rank in ranks}) > 1
        of_token = self.nodes_of_token if crosses else self.top_k / self.nodes_of_token
        self.rows = round(sum(plan.num_tokens) * of_token)
        return parts(plan)

    def streams(self):
        """Return stand-ins for torch.cuda's streams; work is done as soon as it is launched."""
        wait = lambda *_: self.note_wait("synchronize")
        stream = type("Stream", (Stream,), {"synchronize": wait})
        return {"Stream": stream, "Event": stream, "current_stream": stream}

    def post(self, group, sends, receives):
        """Stand in for collectives.post_batch()."""
        counts, where = self.counts, place()
        counts.batches[where] += 1
        peers = self.peers.setdefault(group.group_name, set())
        for tensor, peer in (*receives, *sends):
            peers.add(peer)
            counts.messages[where] += 1
            if not (tensor.is_cuda and tensor.is_contiguous() and tensor.numel()):
                what = f"{tensor.device.type} {tuple(tensor.shape)}, strides {tensor.stride()}"
                counts.refused[f"{where}: {what}"] += 1
            begin = tensor.storage_offset() * tensor.element_size()
            for multiple, places in counts.misaligned.items():
                if begin % multiple:
                    places[where] += 1
        return Stream()  # the batch is done, too


def is_on_device(x):
    """Return whether x is a tensor on the device. Asking the tensor itself would dispatch."""
    device = getattr(x, "fake_device", None) or getattr(x, "device", None)
    return isinstance(x, torch.Tensor) and device.type == "cuda"


def _address(tensor):
    """Stand in for data_ptr(): each storage has an address range of its own."""
    begin = tensor.storage_offset() * tensor.element_size()
    return (tensor.untyped_storage()._cdata << 40) + begin


def _apply(module, function, recurse=True):
    """Stand in for Module._apply() by new parameters, because fake memory cannot be swapped."""
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


def _attention(q, k, v, dropout_p, is_causal, enable_gqa):
    """Stand in for F.scaled_dot_product_attention(), which finds no fused kernel for the device."""
    return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]


def _patches(watch):
    """Yield patches that replace CUDA and the other ranks."""
    cuda, ignore = torch.cuda, lambda *_, **__: None
    yield patch.object(cuda.amp.common, "amp_definitely_not_available", lambda: False)
    yield patch.object(cuda, "is_bf16_supported", lambda *_, **__: True)
    yield as_on_nccl(watch.post, "cuda:nccl")
    yield patch.multiple(cuda, **watch.streams())
    yield patch.object(cuda, "synchronize", lambda *_: watch.note_wait("synchronize"))
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "max_memory_allocated"):
        yield patch.object(cuda, name, ignore)
    yield patch.object(cuda, "device", lambda *_: nullcontext())
    yield patch.object(torch.random, "fork_rng", lambda *_, **__: nullcontext())
    yield patch.object(hybrid, "initialize", ignore)  # it draws real numbers
    yield patch.object(torch.nn.Module, "_apply", _apply)
    plan = expert_parallel.DispatchPlan
    yield patch.object(plan, "wait_for_counts", lambda plan: watch.parts_of(plan))
    yield patch.object(FakeTensor, "tolist", lambda tensor: watch.tolist(tensor))
    yield patch.object(FakeTensor, "data_ptr", _address)
    yield patch.object(torch.nn.functional, "scaled_dot_product_attention", _attention)
    yield patch.object(torch.nn.functional, "rms_norm", fused_rms_norm)
    yield turns_in_same_modes()
    yield patch.object(dist, "get_backend", lambda group=None: "nccl")
    alike = lambda value, group=None: [value] * dist.get_world_size(group)
    for module in (collectives, pipeline, ddp, hybrid):
        yield patch.object(module, "gather_objects", alike)


@contextmanager
def pretended(watch, rank, world_size):
    """Make this process a rank of a world inside; `watch` sees all that reaches its device."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        for patched in _patches(watch):
            stack.enter_context(patched)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(watch)
        yield


def hybrid_step(args, device):
    """Return hybrid's Trainer, and a function that takes one step with it."""
    with patch.object(hybrid, "barrier"), unset_fake_temporarily():  # a mesh has real tensors
        mesh = hybrid.make_mesh(args)
    trainer = hybrid.Trainer(args, mesh, device)
    tokens = torch.zeros(args.batch_size // args.dp, args.seq_len, dtype=torch.int64)
    return trainer, lambda: trainer.step(tokens, tokens)


def count_step(world_size, rank, flags):
    """Return the Counts of the second step. The first one also creates the optimizer's state."""
    per_node = world_size // 2 if "--topk-nodes" in flags else None
    args = hybrid.parse(flags.split(), world_size, per_node)
    watch = Watch(args)
    with pretended(watch, rank, world_size):
        _, step = hybrid_step(args, torch.device("cuda", 0))
        step()
        watch.counts = Counts(peers=watch.peers)
        step()
    return watch.counts


def _attempt(*job):
    """Return a job's Counts as a dict, with the traceback if it failed."""
    try:
        return vars(count_step(*job))
    except Exception:
        return vars(Counts(error=traceback.format_exc()))


def settle():
    """Wait for autograd's thread, which releases a backward's modes only after backward returns.

    The thread needs Python's lock to release them, and if the interpreter is exiting, the process
    aborts. This is a race in PyTorch, lost by half of the runs that end with backward(). The
    backward here holds no Python objects, so the thread has nothing to release after it.
    """
    with FakeTensorMode():
        leaf, gradient = (torch.empty(1, device="cuda", requires_grad=i) for i in (True, False))
    run = torch.autograd.Variable._execution_engine.run_backward
    run((leaf,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


if __name__ == "__main__":
    found = [_attempt(*job) for job in pickle.load(sys.stdin.buffer)]
    pickle.dump(found, sys.stdout.buffer)
    settle()
