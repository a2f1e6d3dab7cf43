"""Sequence parallelism: what tensor parallelism leaves whole is split along the sequence.

Tensor parallelism over t ranks splits the inside of attention and MLP, but every rank holds the
norms, the dropouts and the residual stream of all tokens. These treat each token alone, so each
rank may have 1/t of the sequence there. To enter a split matrix the sequence is gathered, to leave
it the partial sums are reduce-scattered:

           split along the sequence |  split by heads or by columns    | along the sequence
    x_r ---- LayerNorm ---- all-gather ---- QKV, attention, out ---- reduce-scatter ---- dropout, +
           backward:        reduce-scatter                           all-gather

An all-reduce is a reduce-scatter and an all-gather: the bytes are those of tensor parallelism,
8 b s h (t-1)/t elements per layer, or 10 if backward gathers the inputs again that it needs, since
each rank has kept only its part. Bytes of activations kept per layer in 16 bit, for batch b,
sequence s, width h, a heads, a mask of dropout being one byte per element:

    tensor parallelism                     s b h (10 + 24/t + 5 a s / (h t))
    and sequence parallelism               s b h (34/t + 5 a s / (h t))
    with selective recomputation           the same without 5 a s / (h t)
    with full recomputation                2 s b h, or 2 s b h / t

Recomputation keeps the inputs of a function and runs it again in backward. Selective recomputation
does that to the attention core alone, whose s x s scores take the most memory and little time;
fused attention never makes them. Tensors are (T, B, D): the sequence is dim 0.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.

    torchrun --nproc-per-node 4 sequence_parallel.py      activation memory, claimed and measured
"""

from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F

from collectives import (
    RandomState,
    all_gather_single,
    copy_to_group,
    rank_and_size,
    reduce_from_group,
    reduce_scatter_single,
    reduce_scatter_to_group,
    run_ranks,
)

# ---- into a split matrix -------------------------------------------------------------------------


class _GatherLinear(torch.autograd.Function):
    """forward: all-gather x -> x W^T + b, keeping x; backward: all-gather x; reduce-scatter"""

    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return F.linear(_gathered(x, group), weight, bias)

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        grad_whole = grad_output @ weight
        grad_x = torch.empty_like(x)
        reduce_scatter_single(grad_x, grad_whole, group=ctx.group)
        rows = grad_output.flatten(0, -2)
        grad_weight = rows.t() @ _gathered(x, ctx.group).flatten(0, -2)
        return grad_x, grad_weight, rows.sum(0), None


def _gathered(x, group):
    _, world_size = rank_and_size(group)
    whole = x.new_empty(world_size * len(x), *x.shape[1:])
    all_gather_single(whole, x, group)
    return whole


def gather_linear(x, weight, bias, group=None):
    """A column-parallel linear layer of a sequence in parts; only this rank's part is kept.

    x: (T/P, B, in), weight: (out/P, in), bias: (out/P,) -> (T, B, out/P). The idea alone:
    tensor_parallel.parallel_linear() does the same and computes while it communicates.
    """
    return _GatherLinear.apply(x, weight, bias, group)


# ---- recomputation -------------------------------------------------------------------------------


class _Recompute(torch.autograd.Function):
    """forward: function(*inputs), keeping only the inputs; backward: again, and its gradient"""

    @staticmethod
    def forward(ctx, function, *inputs):
        device = inputs[0].device.type
        ctx.function, ctx.state = function, RandomState(inputs[0].device)
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx, grad_output):
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad(), ctx.state, torch.autocast(*ctx.autocast):
            output = ctx.function(*inputs)
        torch.autograd.backward(output, grad_output)
        return None, *[x.grad for x in inputs]


def recompute(function, *inputs):
    """function(*inputs), which keeps nothing for backward but its inputs, and runs there again.

    inputs: tensors, of which one must require a gradient; function returns a tensor. The random
    numbers that it draws are the same again. Chen et al., "Training Deep Nets with Sublinear Memory
    Cost", 2016.
    """
    return _Recompute.apply(function, *inputs)


# ---- what a layer is made of ---------------------------------------------------------------------


def dropout(x, p, training=True):
    """F.dropout, whose mask takes a byte per element also on CPUs."""
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


def unfused_attention(q, k, v, p=0.0):
    """Causal attention with dropout of its weights, in its steps: it makes (B, H, T, T) scores.

    q, k, v: (B, H, T, K), also returned.
    """
    T, K = q.shape[-2:]
    future = torch.full((T, T), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    weights = (q @ k.transpose(-2, -1) * K**-0.5 + future).softmax(-1)
    return dropout(weights, p) @ v


# ---- cost ----------------------------------------------------------------------------------------


def activation_bytes(
    batch, seq_len, hidden, heads, tp=1, sequence_parallel=False, recompute="none"
):
    """Bytes of activations that a rank keeps of a layer in 16 bit, with unfused attention.

    recompute: "none", "selective" or "full". Korthikanti et al., 2022, table 2.
    """
    sbh, split = seq_len * batch * hidden, tp if sequence_parallel else 1
    if recompute == "full":
        return 2 * sbh / split
    scores = 5 * heads * seq_len / (hidden * tp) if recompute == "none" else 0
    return sbh * (10 / split + 24 / tp + scores)


def norm_bytes(batch, seq_len, tp=1, sequence_parallel=False, recompute="none", itemsize=2):
    """Bytes of the mean and deviation per token of a layer's two norms, not counted there."""
    tokens = seq_len * batch // (tp if sequence_parallel else 1)
    return 0 if recompute == "full" else 2 * 2 * itemsize * tokens


@contextmanager
def saved_bytes(parameters=()):
    """Counts what autograd keeps: `with saved_bytes(parameters) as count: ...; count()`.

    Each storage counts once, and those of parameters do not.
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept = {}  # address of a storage -> a tensor in it, which keeps it from being reused

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(t.untyped_storage().nbytes() for a, t in kept.items() if a not in own)


# ---- demonstration -------------------------------------------------------------------------------


def make_weights(hidden, tp, dtype=torch.bfloat16):
    """Parameters of a layer's shard, in the order in which transformer_layer() uses them."""
    D = hidden
    shapes = [(D,), (D,), (3 * D // tp, D), (3 * D // tp,), (D, D // tp), (D,)]
    shapes += [(D,), (D,), (4 * D // tp, D), (4 * D // tp,), (D, 4 * D // tp), (D,)]
    return [(torch.randn(s, dtype=dtype) * D**-0.5).requires_grad_() for s in shapes]


def transformer_layer(x, weights, heads, p, group=None, sequence_parallel=False, mode="none"):
    """A layer with dropout p, split by matrices and, if so asked, along the sequence.

    x: (T, B, D), or (T/P, B, D). mode: what is recomputed, "none", "selective" or "full".
    """
    if mode == "full":
        again = partial(transformer_layer, heads=heads, p=p, group=group)
        again = partial(again, sequence_parallel=sequence_parallel)
        return recompute(lambda x, *weights: again(x, weights), x, *weights)
    _, tp = rank_and_size(group)

    def into(x, weight, bias):
        if sequence_parallel:
            return gather_linear(x, weight, bias, group)
        return F.linear(copy_to_group(x, group), weight, bias)

    def out_of(x, weight, bias):
        y = F.linear(x, weight)
        split = partial(reduce_scatter_to_group, dim=0, group=group)
        y = split(y) if sequence_parallel else reduce_from_group(y, group)
        return dropout(y + bias, p)

    def attend(q, k, v):
        return unfused_attention(q, k, v, p)

    w = iter(weights)
    take = lambda count: [next(w) for _ in range(count)]
    D = x.shape[-1]
    qkv = into(F.layer_norm(x, (D,), *take(2)), *take(2))  # (T, B, 3 D/P)
    T, B, _ = qkv.shape
    q, k, v = qkv.view(T, B, 3, heads // tp, -1).permute(2, 1, 3, 0, 4)  # (B, H/P, T, K) each
    y = recompute(attend, q, k, v) if mode == "selective" else attend(q, k, v)
    x = x + out_of(y.permute(2, 0, 1, 3).reshape(T, B, -1), *take(2))
    y = F.gelu(into(F.layer_norm(x, (D,), *take(2)), *take(2)))  # (T, B, 4 D/P)
    return x + out_of(y, *take(2))


def _demonstrate():
    rank, tp = rank_and_size()
    B, T, D, H = 2, 64 * tp, 32 * tp, 4 * tp
    torch.manual_seed(rank)
    weights = make_weights(D, tp)
    if rank == 0:
        print(f"b={B} s={T} h={D} a={H} t={tp}: bytes of activations per layer")
        print(f"{'':24}{'claimed':>12}{'norms':>8}{'kept':>12}")
    for sequence_parallel in (False, True):
        for mode in ("none", "selective", "full"):
            x = torch.randn(T // tp if sequence_parallel else T, B, D, dtype=torch.bfloat16)
            x.requires_grad_()
            with saved_bytes(weights) as kept:
                transformer_layer(x, weights, H, 0.1, None, sequence_parallel, mode)
            claimed = activation_bytes(B, T, D, H, tp, sequence_parallel, mode)
            norms = norm_bytes(B, T, tp, sequence_parallel, mode)
            if rank == 0:
                name = f"tp{' + sp' if sequence_parallel else ''}, recompute {mode}"
                print(f"{name:24}{claimed:12.0f}{norms:8}{kept():12}")


if __name__ == "__main__":
    run_ranks(_demonstrate)
