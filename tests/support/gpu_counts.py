"""Count on CPUs what the code would do on GPUs: waits of the host, and batches of NCCL.

    with waits() as count: ...      counts, by name, operators that would make the host wait
    with batches() as count: ...    counts NCCL's "batches", and their messages "off 16": those
                                    not aligned to 16 bytes, which NCCL copies byte by byte
    with as_on_nccl(): ...          runs the collectives as on NCCL, over gloo
    with nccl_over_gloo(): ...      the same, under the strictest reading of NCCL's rules
    with as_alone(): ...            sends nothing; other ranks have the same values as this one
    with turns_in_same_modes(): ... a backward in turns with a forward (pipeline.py) is counted, too
"""

import copy
import sys
import threading
import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import collectives
import pipeline
from collectives import observe


BY_VALUE = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "bincount", "masked_select"}
BY_VALUE |= {"_unique2"}


def host_waits_for(function, args, kwargs):
    """Return whether the host needs an operator's result, or the size of the result."""
    name = function.overloadpacket.__name__
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_"):
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return name in BY_VALUE


class _Waits(TorchDispatchMode):
    """Counts operators for which the host waits, and tensors made from lists."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name == "lift_fresh" or host_waits_for(function, args, kwargs or {}):
            self.count[name] += 1
        return function(*args, **kwargs or {})


@contextmanager
def waits():
    """Count the waits of the host, also in `tolist`, `cpu` and `numpy`, which are no operators."""
    with ExitStack() as stack:
        mode = stack.enter_context(_Waits())
        for name in ("tolist", "cpu", "numpy"):

            def counted(tensor, method=getattr(torch.Tensor, name), name=name):
                mode.count[name] += 1
                return method(tensor)

            stack.enter_context(patch.object(torch.Tensor, name, counted))
        yield mode.count


class Stream:
    """Stands in for a stream or an event of torch.cuda: work is done as soon as it is launched."""

    def __init__(self, *arguments, **options):
        pass

    wait = wait_stream = wait_event = record = synchronize = lambda self, *arguments: None
    record_event = lambda self, event=None: event or self
    query = lambda self: True
    elapsed_time = lambda self, other: 0.0


def fused_rms_norm(x, shape, weight, eps):
    """Stand in for F.rms_norm(), for which GPUs have a kernel that keeps x and a number per token.

    A CPU has none, and keeps several tensors like x. Its kernel for LayerNorm keeps two numbers.
    """
    return F.layer_norm(x, shape, weight, None, eps)


def post_over_gloo(group, sends, receives):
    """Stand in for collectives.post_batch(): return one Work that waits for all gloo messages."""
    works = [group.recv([tensor], peer, 0) for tensor, peer in receives]
    works += [group.send([tensor], peer, 0) for tensor, peer in sends]
    batch = Stream()
    batch.wait = lambda: [work.wait() for work in works]
    return batch


def post_nowhere(group, sends, receives):
    """Stand in for collectives.post_batch(): send nothing, and finish at once."""
    return Stream()


@contextmanager
def as_on_nccl(post_batch=post_over_gloo, config="cpu:nccl,meta:nccl"):
    """Let groups use NCCL for every tensor, pass batches to post_batch(), and replace streams.

    config: the backends of every group, as get_backend_config() returns them.
    """
    known = weakref.WeakKeyDictionary()  # other backends need new queues
    for group, members in collectives._MEMBERSHIPS.items():
        known[group] = copy.copy(members)
        known[group].queues = {}
    with (
        patch.object(collectives, "_MEMBERSHIPS", known),
        patch.object(dist, "get_backend_config", lambda group=None: config),
        patch.object(collectives, "post_batch", post_batch),
        patch.multiple(torch.cuda, Stream=Stream, Event=Stream, current_stream=Stream),
        patch.object(torch.cuda, "stream", lambda stream: nullcontext()),
    ):
        yield


@contextmanager
def nccl_over_gloo():
    """Do what as_on_nccl() does, but block each batch until all its messages have been exchanged.

    On NCCL, batches of different groups may run side by side. Here they run in the order in which
    they are posted, so an order that could hang there hangs here. A group's first batch creates the
    communicator, and waits until every rank of the group posts one. Both ends of a message must
    have the same size. Tags are ignored. Yield a list of the number of messages in each batch.
    """
    sizes, connected = [], set()

    def post_and_block(group, sends, receives):
        assert all(tensor.is_contiguous() and tensor.numel() for tensor, _ in (*sends, *receives))
        if group not in connected:
            connected.add(group)
            group.barrier().wait()
        given = [(torch.tensor([tensor.nbytes]), peer) for tensor, peer in sends]
        expected = [(torch.zeros(1, dtype=torch.int64), peer) for _, peer in receives]
        post_over_gloo(group, given, expected).wait()
        assert [x.nbytes for x, _ in receives] == [n.item() for n, _ in expected], "unlike sizes"
        post_over_gloo(group, sends, receives).wait()
        sizes.append(len(sends) + len(receives))
        assert sizes[-1] <= 256  # NCCL may hang on larger batches
        return Stream()

    with as_on_nccl(post_and_block):
        yield sizes


@contextmanager
def as_alone():
    """Run one rank alone, as on NCCL: nothing is sent, and other ranks have the same values."""
    alike = lambda value, group=None: [value] * dist.get_world_size(group)
    with ExitStack() as stack:
        stack.enter_context(as_on_nccl(post_nowhere))
        for module in [m for m in sys.modules.values() if hasattr(m, "gather_objects")]:
            stack.enter_context(patch.object(module, "gather_objects", alike))
        yield


@contextmanager
def batches(**options):
    """Count batches in code that runs as on NCCL, over gloo. options: arguments of as_on_nccl()."""
    count = Counter()

    def listen(event, operation, sends=(), receives=()):
        if event == "post":
            tensors = [tensor for tensor, _ in (*sends, *receives)]
            assert all(tensor.is_contiguous() for tensor in tensors)
            count["batches"] += 1
            count["off 16"] += sum(tensor.data_ptr() % 16 != 0 for tensor in tensors)

    with as_on_nccl(**options), observe(listen):
        yield count


class _Thread(threading.Thread):
    """A thread with the dispatch modes of the thread that makes it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.modes = _get_current_dispatch_mode_stack()

    def run(self):
        with ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(mode)
            super().run()


def turns_in_same_modes():
    """Let both passes of pipeline.Turns have the dispatch modes, such as a counter's."""
    threads = SimpleNamespace(Thread=_Thread, Semaphore=threading.Semaphore)
    return patch.object(pipeline, "threading", threads)
