"""A transformer layer with the papers' unfused attention, and measures of memory."""

import gc
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import hybrid
from sequence_parallel import dropout, recompute
from tensor_parallel import mark_sum_over_tp


def unfused_attention(q, k, v, p=0.0):
    """Causal attention with dropout of its weights, which stores scores of (B, H, T, T).

    q and the result: (B, H, T, K); k, v: (B, KV, T, K).
    """
    T, K = q.shape[-2:]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    future = torch.full((T, T), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    weights = (q @ k.transpose(-2, -1) * K**-0.5 + future).softmax(-1)
    return dropout(weights, p) @ v


class TransformerLayer(hybrid.Block):
    """hybrid.Block of these sizes, with unfused attention by default.

    p: the probability of dropout. mode: what backward recomputes, "none", "selective" or "full".
    """

    def __init__(
        self, hidden, heads, kv_heads=None, p=0.0, attention_fn=unfused_attention, mode="none",
        sequence_parallel=False, group=None,
    ):
        sizes = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "dropout": p}
        how = {"sp": sequence_parallel, "recompute": mode}
        config = hybrid.GPTConfig(**sizes, **how)
        super().__init__(config, hybrid.Parallel(group, attention_fn=attention_fn))
        for norm in (self.ln_1, self.ln_2) if sequence_parallel else ():
            mark_sum_over_tp(norm)

    def forward(self, x):
        forward = super().forward
        return recompute(forward, x) if self.config.recompute == "full" else forward(x)


def norm_bytes(batch, seq_len, tp=1, sequence_parallel=False, recompute="none", itemsize=2):
    """Return the bytes of the norms' mean and deviation, which activation_bytes() leaves out."""
    tokens = seq_len * batch // (tp if sequence_parallel else 1)
    return 0 if recompute == "full" else 2 * 2 * itemsize * tokens


def bytes_of_new_tensors():
    """Return the bytes of all tensors that were made since gc.freeze() and are alive."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@contextmanager
def saved_bytes(parameters=()):
    """Yield count(), which returns the bytes that autograd keeps of what was computed inside.

    Each storage counts once; the storages of `parameters` do not count.
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept = {}  # {a storage's address: a tensor in it, so that the address is not reused}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(t.untyped_storage().nbytes() for a, t in kept.items() if a not in own)


class Kept:
    """A tensor that autograd keeps, and that counts in `sizes` until autograd frees it."""

    def __init__(self, tensor, sizes):
        self.tensor, self.sizes = tensor, sizes
        storage = tensor.untyped_storage()
        self.address = storage.data_ptr()
        sizes.setdefault(self.address, [storage.nbytes(), 0])[1] += 1

    def __del__(self):
        self.sizes[self.address][1] -= 1
        if not self.sizes[self.address][1]:
            del self.sizes[self.address]


@contextmanager
def most_saved_bytes(parameters=()):
    """Yield count(), which returns the most bytes that autograd kept at one time inside.

    Storages count as in saved_bytes().
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    sizes, most = {}, [0]

    def pack(tensor):
        kept = Kept(tensor, sizes)
        most.append(sum(nbytes for address, (nbytes, _) in sizes.items() if address not in own))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        yield lambda: max(most)


class Peak(TorchDispatchMode):
    """Measures the storages that operations inside it make or change.

    bytes: the most that were alive at one time. now(): those that are alive now.
    """

    def __init__(self):
        super().__init__()
        self.storages, self.bytes = {}, 0

    def now(self):
        self.storages = {k: e for k, e in self.storages.items() if not e[0].expired()}
        return sum(size for _, size in self.storages.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if torch.is_tensor(tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.bytes = max(self.bytes, self.now())
        return output
