"""What a GPU would have to do for code that runs on CPUs here: waits of the host, batches of NCCL.

    with waits() as count: ...      Counter, by name, of what would hold up the host
    with batches() as count: ...    Counter: "batches" that NCCL would be given, and of their
                                    messages those "off 16" bytes, which it copies byte by byte
"""

from collections import Counter
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import collectives


class _Waits(TorchDispatchMode):
    """Counts operations whose result, or its size, the host has to know; and tensors of lists."""

    ALWAYS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "bincount", "masked_select"}
    ALWAYS |= {"lift_fresh"}

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masked = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
        unknown = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in self.ALWAYS or masked or unknown:
            self.count[name] += 1
        return function(*args, **kwargs)


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


class _AtOnce:
    """In place of a group's CUDA stream."""

    def __init__(self, group):
        pass

    def submit(self, run, link, tensors):
        self.last = collectives.Work(run, link)
        self.last.run()
        return self.last


@contextmanager
def batches():
    """The collectives go as they do on NCCL, over gloo."""
    batch, count = collectives._batch, Counter()

    def counted(sends, receives, group):
        messages = [tensor for tensor, _ in (*sends, *receives)]
        assert all(tensor.is_contiguous() for tensor in messages)
        count["batches"] += bool(messages)
        count["off 16"] += sum(tensor.data_ptr() % 16 != 0 for tensor in messages)
        return batch(sends, receives, group)

    with (
        patch.object(collectives, "_on_stream", lambda tensor, group: True),
        patch.object(collectives, "_WorkStream", _AtOnce),
        patch.object(collectives, "_batch", counted),
    ):
        yield count
