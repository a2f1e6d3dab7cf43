"""What a GPU would have to do for code that runs on CPUs here: waits of the host, batches of NCCL.

    with waits() as count: ...      Counter, by name, of what would hold up the host
    with batches() as count: ...    Counter: "batches" that NCCL would be given, and of their
                                    messages those "off 16" bytes, which it copies byte by byte
    with as_on_nccl(): ...          the collectives go as they do on NCCL, over gloo
    with nccl_over_gloo(): ...      the same, under the strictest reading of NCCL's rules
    with as_alone(): ...            messages go nowhere, and other ranks have what this one has
"""

import copy
import sys
import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import collectives
from collectives import observe


BY_VALUE = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "bincount", "masked_select"}
BY_VALUE |= {"_unique2"}


def host_waits_for(function, args, kwargs):
    """Return whether the host has to know the result of an operator, or its size."""
    name = function.overloadpacket.__name__
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_"):
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return name in BY_VALUE


class _Waits(TorchDispatchMode):
    """Counts operators for which the host waits, and tensors made of lists."""

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
    """Also of `tolist`, `cpu` and `numpy`, which are no operations."""
    with ExitStack() as stack:
        mode = stack.enter_context(_Waits())
        for name in ("tolist", "cpu", "numpy"):

            def counted(tensor, method=getattr(torch.Tensor, name), name=name):
                mode.count[name] += 1
                return method(tensor)

            stack.enter_context(patch.object(torch.Tensor, name, counted))
        yield mode.count


class Stream:
    """In place of torch.cuda's: all has happened as soon as it is launched. Its own event, too."""

    def __init__(self, *arguments, **options):
        pass

    wait = wait_stream = wait_event = record = synchronize = lambda self, *arguments: None
    record_event = lambda self, event=None: event or self
    query = lambda self: True
    elapsed_time = lambda self, other: 0.0


def post_over_gloo(group, sends, receives):
    """In place of collectives.post_batch(): one Work that waits for each of gloo's messages."""
    works = [group.recv([tensor], peer, 0) for tensor, peer in receives]
    works += [group.send([tensor], peer, 0) for tensor, peer in sends]
    batch = Stream()
    batch.wait = lambda: [work.wait() for work in works]
    return batch


def post_nowhere(group, sends, receives):
    """In place of collectives.post_batch(): the batch is done at once, and nothing travels."""
    return Stream()


@contextmanager
def as_on_nccl(post_batch=post_over_gloo, config="cpu:nccl,meta:nccl"):
    """Groups have NCCL for every tensor, batches go to post_batch(), and torch has streams.

    config: the carriers of every group, as get_backend_config() has them.
    """
    known = weakref.WeakKeyDictionary()  # other carriers: new queues
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
    """as_on_nccl(), where each batch blocks until both ends of its messages have posted them.

    On NCCL, batches of different groups may run side by side. Here they run in the order in which
    they are posted, so an order that could hang there hangs here. A group's first batch makes its
    communicator, and waits until every rank of the group posts one. Both ends of a message have the
    same size. Tags tell nothing apart. Yields a list of the batches' numbers of messages.
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
        assert sizes[-1] <= 256  # beyond that NCCL may hang
        return Stream()

    with as_on_nccl(post_and_block):
        yield sizes


@contextmanager
def as_alone():
    """as_on_nccl() of one rank, whose messages go nowhere; the others have what it has."""
    alike = lambda value, group=None: [value] * dist.get_world_size(group)
    with ExitStack() as stack:
        stack.enter_context(as_on_nccl(post_nowhere))
        for module in [m for m in sys.modules.values() if hasattr(m, "gather_objects")]:
            stack.enter_context(patch.object(module, "gather_objects", alike))
        yield


@contextmanager
def batches(**options):
    """Of what runs as on NCCL, over gloo. options: as for as_on_nccl()."""
    count = Counter()

    def listen(event, operation, sends=(), receives=()):
        if event == "post":
            tensors = [tensor for tensor, _ in (*sends, *receives)]
            assert all(tensor.is_contiguous() for tensor in tensors)
            count["batches"] += 1
            count["off 16"] += sum(tensor.data_ptr() % 16 != 0 for tensor in tensors)

    with as_on_nccl(**options), observe(listen):
        yield count
