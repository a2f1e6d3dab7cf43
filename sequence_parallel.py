"""Sequence parallelism: the sequence is split, first outside of attention, then everywhere.

Over t ranks tensor parallelism splits the inside of attention and MLP, but every rank holds the
norms, dropouts and the residual stream of all tokens. These treat each token alone, so each rank
may have 1/t of the sequence there, which is dim 0 of (T, B, D):

           split along the sequence |  split by heads or by columns    | along the sequence
    x_r ---- LayerNorm ---- all-gather ---- QKV, attention, out ---- reduce-scatter ---- dropout, +
           backward:        reduce-scatter                           all-gather

The bytes sent are those of tensor parallelism, 8 b s h (t-1)/t elements per layer, or 10 if
backward gathers its inputs again, since each rank has kept only its part. Bytes of activations kept
per layer in 16 bit (b batch, s sequence, h width, a heads; a mask of dropout takes a byte per
element):

    tensor parallelism                     s b h (10 + 24/t + 5 a s / (h t))
    and sequence parallelism               s b h (34/t + 5 a s / (h t))
    with selective recomputation           the same without 5 a s / (h t)
    with full recomputation                2 s b h, with sequence parallelism 2 s b h / t

Recomputation keeps the inputs of a function and runs it again in backward: selective, the attention
core, whose s x s scores take the most memory and little time (fused attention never makes them);
full, the whole layer.

With context parallelism attention crosses the split, in one of three ways. Elements that each of P
ranks sends for an attention, forward, where h_kv is the width of the keys:

    all-gather   everyone gets all keys and values            2 (P-1)/P b s h_kv
    ring         keys and values come by, a part at a time    2 (P-1)/P b s h_kv, while it computes
    Ulysses      split by heads instead, and back             2 (P-1)/P b s/P (h + h_kv), where
                                                              h_kv counts P heads at least

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022. Llama
Team, "The Llama 3 Herd of Models", 2024. Liu et al., "Ring Attention with Blockwise Transformers
for Near-Infinite Context", 2023. Jacobs et al., "DeepSpeed Ulysses", 2023.

    torchrun --nproc-per-node 4 sequence_parallel.py     memory and bytes, claimed and measured
"""

import math
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import accumulate, product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from collectives import (
    all_gather_to_group, all_to_all_in_group, autocasted, count_bytes, exchange,
    rank_and_size, reduce_scatter_single, reduce_scatter_to_group, run_ranks,
)
from tensor_parallel import (
    ColumnParallelLinear, ParallelSelfAttention, RowParallelLinear, attention, mark_partial,
)

# ---- the idea ------------------------------------------------------------------------------------


def sequence_parallel_mlp(x, norm, up, down, group=None):
    """x + MLP(norm(x)) of this rank's tokens x, (T/P, B, D); up: (F/P, D) and down: (D, F/P)."""
    whole = all_gather_to_group(norm(x), 0, group)  # (T, B, D); backward: reduce-scatter
    y = F.linear(F.gelu(F.linear(whole, up), approximate="tanh"), down)  # a summand of (T, B, D)
    return x + reduce_scatter_to_group(y, 0, group)  # (T/P, B, D); backward: all-gather


# tensor_parallel.py's layers do the same with sequence_parallel=True, and keep norm(x) in place of
# `whole`; its mark_partial() and sum_partial_gradients() sum what each rank's tokens give a norm.


# ---- recomputation -------------------------------------------------------------------------------


class _Recompute(torch.autograd.Function):
    """forward: function(*inputs), keeping only the inputs; backward: again, and its gradient"""

    @staticmethod
    def forward(ctx, function, *inputs):
        device = inputs[0].device.type
        ctx.function, ctx.state = function, RandomState(inputs[0].device)
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.save_for_backward(*inputs)
        output = function(*inputs)
        if not torch.is_tensor(output):
            raise ValueError(f"recompute() of a function that returns a {type(output).__name__}")
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        # what PyTorch's own reentrant checkpoint asks: is this a backward() to all .grad?
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("recompute() is for backward(): it leaves gradients in .grad")
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad(), ctx.state, torch.autocast(*ctx.autocast):
            start = get_gradient_edge(ctx.function(*inputs))  # of an output that nobody needs
        torch.autograd.backward(start, grad_output)
        return None, *[x.grad for x in inputs]


def recompute(function, *inputs):
    """function(*inputs), which keeps nothing for backward but its inputs, and runs there again.

    inputs: tensors, the first on the device of all; function returns a tensor. The random numbers
    that it draws are the same again. Parameters that function uses get their gradient as soon as
    backward comes here. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
    Raises ValueError for an input or output that is not a tensor, and where gradients are enabled
    and no input requires one; autograd.grad() and backward(inputs=...) raise RuntimeError.
    """
    others = [type(x).__name__ for x in inputs if not torch.is_tensor(x)]
    if others:
        raise ValueError(f"recompute() of inputs that are not tensors: {', '.join(others)}")
    if torch.is_grad_enabled() and not any(x.requires_grad for x in inputs):
        raise ValueError("recompute() of inputs none of which requires a gradient")
    return _Recompute.apply(function, *inputs)


# ---- a layer, and what it keeps ------------------------------------------------------------------


def dropout(x, p, training=True):
    """F.dropout, whose mask takes a byte per element also on CPUs."""
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


def unfused_attention(q, k, v, p=0.0):
    """Causal attention with dropout of its weights, in its steps: it makes (B, H, T, T) scores.

    q, k, v: (B, H, T, K), and so the result.
    """
    T, K = q.shape[-2:]
    future = torch.full((T, T), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    weights = (q @ k.transpose(-2, -1) * K**-0.5 + future).softmax(-1)
    return dropout(weights, p) @ v


class TransformerLayer(nn.Module):
    """A layer of tensor_parallel.py's parts, (T, B, D) -> (T, B, D): whose memory the table gives.

    kv_heads: see ParallelSelfAttention.
    p: the probability of dropout, in attention's weights and before each residual connection.
    attention_fn(q, k, v, p): attention itself.
    mode: what is recomputed, "none", "selective" or "full".
    options: those of tensor_parallel.ParallelOptions; with sequence_parallel T is a rank's part.
    """

    def __init__(
        self,
        hidden,
        heads,
        kv_heads=None,
        p=0.0,
        attention_fn=unfused_attention,
        mode="none",
        **options,
    ):
        super().__init__()
        self.p, self.mode = p, mode
        core = lambda q, k, v: attention_fn(q, k, v, p)
        attend = partial(recompute, core) if mode == "selective" else core
        self.ln_1 = nn.LayerNorm(hidden)
        self.attn = ParallelSelfAttention(hidden, heads, kv_heads, attend, **options)
        self.ln_2 = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential()
        self.mlp.c_fc = ColumnParallelLinear(hidden, 4 * hidden, **options)
        self.mlp.gelu = nn.GELU(approximate="tanh")
        self.mlp.c_proj = RowParallelLinear(4 * hidden, hidden, **options)
        if self.mlp.c_fc.options.sequence_parallel:
            for norm in (self.ln_1, self.ln_2):
                mark_partial(norm)

    def forward(self, x):
        return recompute(self._forward, x) if self.mode == "full" else self._forward(x)

    def _forward(self, x):
        x = x + dropout(self.attn(self.ln_1(x)), self.p)
        return x + dropout(self.mlp(self.ln_2(x)), self.p)


def activation_bytes(
    batch,
    seq_len,
    hidden,
    heads,
    tp=1,
    sequence_parallel=False,
    recompute="none",
    kv_heads=None,
    ffn=None,
    masks=True,
    itemsize=2,
):
    """Bytes of activations that a rank keeps of a layer, with unfused attention.

    recompute: "none", "selective", which is also what fused attention keeps, or "full". kv_heads,
    ffn: where they are not heads and 4 h. masks: whether there is dropout, outside of the scores.
    itemsize: of all but masks, which take a byte.
    Korthikanti et al., 2022, table 2, for the defaults.
    """
    sbh, split = seq_len * batch * hidden, tp if sequence_parallel else 1
    if recompute == "full":
        return itemsize * sbh / split
    scores = (2 * itemsize + 1) * heads * seq_len / (hidden * tp) if recompute == "none" else 0
    whole = 4 * itemsize + 2 * masks
    inside = 2 + 2 * (kv_heads or heads) / heads + 2 * (4 if ffn is None else ffn / hidden)
    return sbh * (whole / split + itemsize * inside / tp + scores)


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


# ---- context parallelism: which positions a rank has ---------------------------------------------
#
# Now the sequence is split everywhere, also inside attention: rank r of P has T/P positions of q, k
# and v, and attention crosses the split. Under a causal mask a query has as many keys as positions
# before it, so in the plain order the last rank works 2 - 1/P times the average. In the zig-zag
# order rank r has chunks r and 2P-1-r of 2P, one with few keys and one with many: all work alike.
#
#     P = 4      chunk   0 1 2 3 4 5 6 7
#     plain      rank    0 0 1 1 2 2 3 3
#     zig-zag    rank    0 1 2 3 3 2 1 0


def chunk_ranges(rank, world_size, seq_len, zigzag=True):
    """(first position, how many) of each run of positions that a rank has, in order.

    Raises ValueError if seq_len cannot be cut into equal chunks, two for each of several ranks.
    """
    zigzag = zigzag and world_size > 1
    chunks = 2 * world_size if zigzag else world_size
    if seq_len % chunks:
        raise ValueError(f"seq_len={seq_len} is not {chunks} equal chunks for cp={world_size}")
    size = seq_len // chunks
    if zigzag and rank < world_size - 1:
        return [(rank * size, size), ((chunks - 1 - rank) * size, size)]
    return [(rank * size, 2 * size if zigzag else size)]  # the last rank's two are neighbours


def context_positions(seq_len, group=None, zigzag=True):
    """The positions (T/P,) in the whole sequence of what this rank has. ValueError as above."""
    runs = chunk_ranges(*rank_and_size(group), seq_len, zigzag)
    return torch.cat([torch.arange(begin, begin + size) for begin, size in runs])


class Block(NamedTuple):
    """Local queries and the local keys that they see: all of them, or causally in a square."""

    queries: slice
    keys: slice
    causal: bool


def context_blocks(queries, keys, causal=True, documents=None):
    """The Blocks of queries and keys whose positions are given as runs; see chunk_ranges().

    Two runs are the same, apart, or that of the queries is within that of the keys.
    documents: lengths of the documents that are packed into the sequence; attention stays in each.
    """
    if causal and queries == keys and not documents:  # runs are in the order of positions
        own = slice(0, sum(size for _, size in queries))
        return [Block(own, own, True)]
    ends = list(accumulate(documents)) if documents else [math.inf]
    local = lambda positions, shift: slice(positions.start + shift, positions.stop + shift)
    blocks = []
    for q_start, (q_first, q_size) in zip(_starts(queries), queries):
        for k_start, (k_first, k_size) in zip(_starts(keys), keys):
            q_shift, k_shift = q_start - q_first, k_start - k_first
            for begin, end in zip([0, *ends], ends):
                q = range(max(q_first, begin), min(q_first + q_size, end))
                k = range(max(k_first, begin), min(k_first + k_size, end))
                blocks += [
                    Block(local(seeing, q_shift), local(seen, k_shift), is_square)
                    for seeing, seen, is_square in _visible(q, k, causal)
                    if seeing and seen
                ]
    return _joined(blocks)


def _visible(queries, keys, causal):
    """[(queries, keys, causal)] of two ranges: the keys before all queries, and a causal square."""
    if not causal:
        return [(queries, keys, False)]
    before = range(keys.start, min(queries.start, keys.stop))
    both = range(max(queries.start, keys.start), min(queries.stop, keys.stop))
    return [(queries, before, False), (both, both, True)]


def _starts(runs):
    return accumulate((size for _, size in runs), initial=0)


def _joined(blocks):
    """Neighbouring rectangles as one, for which a kernel runs once."""
    joined = []
    for block in blocks:
        last = joined[-1] if joined else None
        if last and not last.causal and not block.causal:
            if last.queries == block.queries and last.keys.stop == block.keys.start:
                block = Block(block.queries, slice(last.keys.start, block.keys.stop), False)
                joined.pop()
            elif last.keys == block.keys and last.queries.stop == block.queries.start:
                block = Block(slice(last.queries.start, block.queries.stop), block.keys, False)
                joined.pop()
        joined.append(block)
    return joined


def attended_pairs(blocks):
    """Pairs of a query and a key that the blocks consist of: the work of attention."""
    size = lambda s: s.stop - s.start
    half = lambda n: n * (n + 1) // 2
    return sum(half(size(t.keys)) if t.causal else size(t.queries) * size(t.keys) for t in blocks)


# ---- context parallelism: attention to some blocks -----------------------------------------------


def _attend(blocks, q, k, v, output, lse):
    """Add to output (B, H, T, K) and lse (B, H, T), of the keys so far, what these keys bring.

    lse is the log of a query's sum of exp(score). Softmaxes over parts of the keys merge as a
    softmax over the parts: with weights exp(lse of the part - lse).
    """
    for queries, keys, causal in blocks:
        part, part_lse = block_attention(q[:, :, queries], k[:, :, keys], v[:, :, keys], causal)
        so_far, own = lse[:, :, queries], output[:, :, queries]
        total = torch.logaddexp(so_far, part_lse)
        own.mul_((so_far - total).exp_().unsqueeze(-1))
        own.add_(part * (part_lse - total).exp_().unsqueeze(-1))
        so_far.copy_(total)


def _attend_backward(blocks, grad, q, k, v, output, lse, grad_q, grad_k, grad_v):
    """Add to the three gradients what these keys bring."""
    for queries, keys, causal in blocks:
        grad_part, q_part = grad[:, :, queries], q[:, :, queries]
        known = output[:, :, queries], lse[:, :, queries]
        kv = k[:, :, keys], v[:, :, keys]
        parts = block_attention_backward(grad_part, q_part, *kv, *known, causal)
        grad_q[:, :, queries] += parts[0]
        grad_k[:, :, keys] += parts[1]
        grad_v[:, :, keys] += parts[2]


def _precise(x, *shape):
    """Zeros to sum up in, fp32 at least."""
    return x.new_zeros(shape or x.shape, dtype=torch.promote_types(x.dtype, torch.float32))


# ---- context parallelism: three ways for attention to cross the split ----------------------------
#
# Two of them put all ranks' chunks in the sequence's order, and back: _by_position(), _by_rank().


class _AllGatherAttention(torch.autograd.Function):
    """forward: all-gather k and v, attend; backward: reduce-scatter their gradients"""

    @staticmethod
    def forward(ctx, q, k, v, group, causal, zigzag, documents):
        rank, P = rank_and_size(group)
        T = P * q.shape[2]
        own, first = (chunk_ranges(r, P, T, zigzag) for r in (rank, 0))
        ctx.group, ctx.dtype = group, k.dtype
        ctx.chunks = len(first)  # of every rank, where the last one's two are one run
        ctx.blocks = context_blocks(own, [(0, T)], causal, documents)
        kv = torch.stack([k, v]).unflatten(3, (ctx.chunks, -1)).movedim(3, 0).contiguous()
        kv = all_gather_to_group(kv, 0, group)  # (chunks, 2, B, KV, T/chunks, K)
        whole = _by_position(kv, P, 3)  # (2, B, KV, T, K)
        output, lse = _precise(q), _precise(q, *q.shape[:3]).fill_(-math.inf)
        _attend(ctx.blocks, q, *whole, output, lse)
        output = output.to(q.dtype)
        ctx.save_for_backward(q, whole, output, lse)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (q, whole, output, lse), (_, P) = ctx.saved_tensors, rank_and_size(ctx.group)
        grad_q, grad_whole = _precise(q), _precise(whole)
        _attend_backward(ctx.blocks, grad_output, q, *whole, output, lse, grad_q, *grad_whole)
        parts = _by_rank(grad_whole, P, ctx.chunks, 3)  # (chunks, 2, B, KV, T/chunks, K)
        own = parts.new_empty(ctx.chunks, *parts.shape[1:])
        reduce_scatter_single(own, parts, group=ctx.group)
        grad_k, grad_v = own.movedim(0, 3).flatten(3, 4).to(ctx.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, *4 * [None]


def allgather_attention(q, k, v, group=None, causal=True, zigzag=True, documents=None):
    """Attention of local queries to all keys and values, which every rank gathers.

    q: (B, H, T/P, K), k, v: (B, KV, T/P, K), KV dividing H; in the order of context_positions().
    Returns (B, H, T/P, K). documents: lengths of those packed into the sequence (of every row of
    the batch). Raises ValueError if the order does not exist for this T, documents do not add up,
    or shapes and dtypes do not fit; on a GPU also for fp64 and for K off a multiple of 16 bytes.
    """
    q, k, v = _checked(q, k, v, documents, group)
    _check_kernel(q)
    return _AllGatherAttention.apply(q, k, v, group, causal, zigzag, documents)


def _checked(q, k, v, documents, group):
    """q, k, v as the kernels, which check nothing, want them."""
    q, k, v = (autocasted(x).contiguous() for x in (q, k, v))
    (B, H, length, K), KV = q.shape, k.shape[1]
    alike = k.shape == v.shape == (B, KV, length, K) and q.dtype == k.dtype == v.dtype
    if not alike or H % KV:
        found = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (q, k, v))
        raise ValueError(f"q, k and v are {found}: not alike but for heads that KV divides")
    T = length * rank_and_size(group)[1]
    if documents is not None and (sum(documents) != T or min(documents) < 0):
        found = f"{sum(documents)} positions, the shortest of {min(documents)}"
        raise ValueError(f"documents of {found}, in a sequence of {T}")
    return q, k, v


def _check_kernel(q):
    if q.is_cuda and (q.dtype == torch.float64 or q.shape[-1] * q.element_size() % 16):
        raise ValueError(
            f"attention in parts, of {q.dtype} and head size {q.shape[-1]}: on a GPU it takes fp32 "
            "and 16 bit, and heads of a multiple of 16 bytes"
        )


@lru_cache(maxsize=64)
def _ring_blocks(rank, world_size, seq_len, causal, zigzag, documents):
    """The blocks of each step; kept, as Python takes longer for them than for the messages."""
    runs = [chunk_ranges(r, world_size, seq_len, zigzag) for r in range(world_size)]
    sources = [(rank - step) % world_size for step in range(world_size)]
    return [context_blocks(runs[rank], runs[source], causal, documents) for source in sources]


class _RingAttention(torch.autograd.Function):
    """forward: k and v go round the ring; backward: and their gradients with them, and home

        step     0     1     2     3     P = 4: whose keys and values rank r attends to; those of
        keys of  r    r-1   r-2   r-3    the next step arrive meanwhile

    In backward step 0 comes last, while the gradients go home.
    """

    @staticmethod
    def forward(ctx, q, k, v, group, causal, zigzag, documents):
        rank, P = rank_and_size(group)
        documents = documents and tuple(documents)
        ctx.blocks = _ring_blocks(rank, P, P * q.shape[2], causal, zigzag, documents)
        ctx.group = group
        output, lse = _precise(q), _precise(q, *q.shape[:3]).fill_(-math.inf)
        kv, arriving = torch.stack([k, v]).contiguous(), None
        for step, blocks in enumerate(ctx.blocks):
            if step < P - 1:
                arriving, kv_work = _send_recv(kv, arriving, group)
            _attend(blocks, q, *kv, output, lse)
            if step < P - 1:
                kv_work.wait()
                kv, arriving = arriving, kv
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, lse)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (q, k, v, output, lse), group = ctx.saved_tensors, ctx.group
        _, P = rank_and_size(group)
        kv, grad_q = torch.stack([k, v]).contiguous(), _precise(q)
        if P > 1:
            arriving, kv_work = _send_recv(kv, None, group)
        for step, blocks in enumerate(ctx.blocks[1:], 1):
            kv_work.wait()
            kv, arriving = arriving, kv
            if step < P - 1:
                arriving, kv_work = _send_recv(kv, arriving, group)
            grad_kv = _precise(kv)
            _attend_backward(blocks, grad_output, q, *kv, output, lse, grad_q, *grad_kv)
            if step > 1:  # what the ranks before this one have found for these keys
                grad_work.wait()
                grad_kv += sums
            sums, grad_work = _send_recv(grad_kv, None, group)
        grad_kv = _precise(kv)
        _attend_backward(ctx.blocks[0], grad_output, q, k, v, output, lse, grad_q, *grad_kv)
        if P > 1:
            grad_work.wait()  # home
            grad_kv += sums
        grad_k, grad_v = grad_kv.to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, *4 * [None]


def _send_recv(tensor, buffer, group):
    """Begin to send to the next rank and to receive from the one before: buffer, and work."""
    rank, P = rank_and_size(group)
    buffer = torch.empty_like(tensor) if buffer is None else buffer
    sends, receives = [(tensor, (rank + 1) % P)], [(buffer, (rank - 1) % P)]
    return buffer, exchange(sends, receives, group, async_op=True)


def ring_attention(q, k, v, group=None, causal=True, zigzag=True, documents=None):
    """Attention of local queries to the keys and values that come by, P - 1 times a neighbour's.

    Shapes, documents and errors as of allgather_attention(). Beside its own a rank has two parts of
    the keys and values at most. The zig-zag order is that of Zhu's ring-flash-attention, 2024.
    """
    q, k, v = _checked(q, k, v, documents, group)
    _check_kernel(q)
    return _RingAttention.apply(q, k, v, group, causal, zigzag, documents)


def ulysses_attention(q, k, v, group=None, causal=True, zigzag=True):
    """Attention of some heads to the whole sequence: all-to-alls exchange the splits, and back.

    Shapes as of allgather_attention(). KV < P: a head of keys and values goes to P / KV ranks.
    Raises ValueError if P does not divide H, or neither of P and KV divides the other, and for T as
    there.
    """
    q, k, v = _checked(q, k, v, None, group)
    _, P = rank_and_size(group)
    heads, kv_heads, length = q.shape[1], k.shape[1], q.shape[2]
    if heads % P or (kv_heads % P and P % kv_heads):
        raise ValueError(
            f"heads={heads} and kv_heads={kv_heads} cannot be dealt out to cp={P} ranks"
        )
    if kv_heads < P:
        k, v = (x.repeat_interleave(P // kv_heads, 1) for x in (k, v))
    each = len(chunk_ranges(0, P, P * length, zigzag))  # chunks of a rank
    # h = (H + 2 KV) / P heads for each rank: (B, P, h, T/P, K)
    parts = torch.cat([x.unflatten(1, (P, -1)) for x in (q, k, v)], 2)
    parts = parts.unflatten(3, (each, -1)).permute(1, 3, 0, 2, 4, 5)  # (P, each, B, h, ., K)
    parts = parts.flatten(0, 1)  # (chunks, B, h, ., K)
    parts = all_to_all_in_group(parts.contiguous(), group=group)
    whole = _by_position(parts, P, 2)  # (B, h, T, K)
    own = whole.split([x.shape[1] // P for x in (q, k, v)], 1)
    y = _by_rank(attention(*own, causal=causal), P, each, 2)  # (B, H/P, T, K) -> (chunks, ...)
    y = all_to_all_in_group(y, group=group).unflatten(0, (P, each))  # (P, each, B, H/P, ., K)
    return y.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).flatten(1, 2)


# ---- context parallelism: chunks in the order of ranks and of the sequence -----------------------


def _places(world_size, each):
    """Where the sequence's chunks are in the order of ranks, which have `each` of them: 1 or 2.

    P = 2, zig-zag: the ranks have chunks 0 3, 1 2, so that chunks 0 1 2 3 are in places 0 2 3 1.
    """
    places = list(range(each * world_size))
    return places if each == 1 else places[::2] + places[:0:-2]


def _by_position(parts, world_size, dim):
    """Chunks (C, ...) by rank -> the sequence, along `dim`. Slices: no index goes to the device."""
    places, parts = _places(world_size, len(parts) // world_size), parts.unbind(0)
    return torch.cat([parts[place] for place in places], dim)


def _by_rank(whole, world_size, each, dim):
    """The reverse: the sequence, along `dim`, -> (C, ...), chunks of each rank side by side."""
    places = _places(world_size, each)
    chunks = whole.unflatten(dim, (len(places), -1)).unbind(dim)
    return torch.stack([chunks[places.index(i)] for i in range(len(places))])


# ---- context parallelism: kernels of a block -----------------------------------------------------


def block_attention(q, k, v, causal):
    """Output, and log-sum-exp of the scores (B, H, T), which only PyTorch's own kernels return."""
    aten = torch.ops.aten
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if q.dtype in (torch.float16, torch.bfloat16):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    k, v = _repeated(k, q), _repeated(v, q)
    output, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return output, lse.narrow(2, 0, q.shape[2])


def block_attention_backward(grad, q, k, v, output, lse, causal):
    """The gradients of q, k and v, from the output and log-sum-exp over *all* keys of a query."""
    aten = torch.ops.aten
    if q.device.type == "cpu":
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(grad, q, k, v, output, lse, 0.0, causal)
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # of dropout, which there is not
    if q.dtype in (torch.float16, torch.bfloat16):
        kernel, sizes = aten._scaled_dot_product_flash_attention_backward, (q.shape[2], k.shape[2])
        arguments = (grad, q, k, v, output, lse.contiguous(), None, None, *sizes, 0.0, causal)
        return kernel(*arguments, seed, seed)
    shape, lse = k.shape, F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)  # as it was made
    kernel, mask = aten._scaled_dot_product_efficient_attention_backward, (True, True, True, False)
    k, v = _repeated(k, q), _repeated(v, q)
    grads = kernel(grad, q, k, v, None, output, lse, seed, seed, 0.0, mask, causal)
    return grads[0], *[g.unflatten(1, (shape[1], -1)).sum(2) for g in grads[1:3]]


def _repeated(k, q):
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1)


# ---- context parallelism: cost -------------------------------------------------------------------


def context_parallel_bytes(
    method, batch, seq_len, heads, kv_heads, head_dim, cp, itemsize=4, grad_itemsize=4
):
    """Bytes that a rank sends for one attention: (forward, backward).

    method: "allgather", "ring" or "ulysses". grad_itemsize: of the gradients of k and v, which are
    summed in fp32 at least.
    """
    token = batch * seq_len // cp * head_dim  # elements of one head on a rank
    kv = 2 * kv_heads * token
    if method == "allgather":
        return (cp - 1) * kv * itemsize, (cp - 1) * kv * grad_itemsize
    if method == "ring":
        return (cp - 1) * kv * itemsize, (cp - 1) * kv * (itemsize + grad_itemsize)
    heads_sent = 2 * heads + 2 * max(kv_heads, cp)
    nbytes = heads_sent * token * (cp - 1) // cp * itemsize
    return nbytes, nbytes


def context_activation_bytes(method, batch, seq_len, heads, kv_heads, head_dim, cp, itemsize=2):
    """Bytes that attention across cp keeps and attention inside a rank does not.

    A copy of its output; of others' keys and values all (allgather), or what heads are repeated.
    """
    if cp == 1:
        return 0
    copies = {"ring": 1, "allgather": cp, "ulysses": max(1, cp / kv_heads)}[method]
    token = batch * seq_len / cp * head_dim * itemsize
    return token * (heads + 2 * kv_heads * (copies - 1))


# ---- chance ----


class RandomState:
    """What the random generators would draw from now on: `with state:` has it drawn once more."""

    def __init__(self, device):
        self.devices = [device] if device.type == "cuda" else []
        self.state = torch.get_rng_state()
        self.device_states = [torch.cuda.get_rng_state(device) for device in self.devices]

    def __enter__(self):
        self.outside = torch.random.fork_rng(self.devices)
        self.outside.__enter__()
        torch.set_rng_state(self.state)
        for device, state in zip(self.devices, self.device_states):
            torch.cuda.set_rng_state(state, device)

    def __exit__(self, *exception):
        self.outside.__exit__(*exception)


# ---- demonstration -------------------------------------------------------------------------------


def _demonstrate():
    rank, tp = rank_and_size()
    B, T, D, H = 2, 64 * tp, 32 * tp, 4 * tp
    torch.manual_seed(rank)
    if rank == 0:
        print(f"b={B} s={T} h={D} a={H} t={tp}: bytes of activations per layer")
        print(f"{'':24}{'claimed':>12}{'norms':>8}{'kept':>12}")
    for sequence_parallel, mode in product((False, True), ("none", "selective", "full")):
        layer = TransformerLayer(D, H, p=0.1, mode=mode, sequence_parallel=sequence_parallel)
        layer.bfloat16()
        x = torch.randn(T // tp if sequence_parallel else T, B, D, dtype=torch.bfloat16)
        with saved_bytes(layer.parameters()) as kept:
            layer(x.requires_grad_())
        claimed = activation_bytes(B, T, D, H, tp, sequence_parallel, mode)
        norms = norm_bytes(B, T, tp, sequence_parallel, mode)
        if rank == 0:
            name = f"tp{' + sp' if sequence_parallel else ''}, recompute {mode}"
            print(f"{name:24}{claimed:12.0f}{norms:8}{kept():12}")
    _demonstrate_context(rank, tp)


def _demonstrate_context(rank, cp):
    B, T, H, KV, K = 1, 256 * cp, 2 * cp, cp, 16
    print(f"\nattention of b={B} s={T}, {H} heads and {KV} of keys, cp={cp}" * (rank == 0))
    torch.manual_seed(0)
    whole = [torch.randn(B, heads, T, K, dtype=torch.float64) for heads in (H, KV, KV)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    positions = context_positions(T)
    own = [x[:, :, positions].requires_grad_() for x in whole]
    methods = {"allgather": allgather_attention, "ring": ring_attention}
    methods["ulysses"] = ulysses_attention
    for name, method in methods.items():
        with count_bytes() as traffic:
            y = method(*own)
            forward = traffic.bytes()
            y.sum().backward()
        claimed = context_parallel_bytes(name, B, T, H, KV, K, cp, 8, 8)
        error = (y - expected[:, :, positions]).abs().max().item()
        if rank == 0:
            counted = forward, traffic.bytes() - forward
            print(f"{name:10} bytes sent, claimed {claimed}, counted {counted}; error {error:.0e}")


if __name__ == "__main__":
    run_ranks(_demonstrate)
