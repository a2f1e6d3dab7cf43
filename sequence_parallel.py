"""Sequence parallelism: the sequence is split, first outside of attention, then everywhere.

Over t ranks tensor parallelism splits the inside of attention and MLP, but every rank holds the
norms, dropouts and the residual stream of all tokens. These treat each token alone, so each rank
may have 1/t of the sequence there, which is dim 0 of (T, B, D):

           split along the sequence |  split by heads or by columns    | along the sequence
    x_r ---- LayerNorm ---- all-gather ---- QKV, attention, out ---- reduce-scatter ---- dropout, +
           backward:        reduce-scatter                           all-gather

It sends 10 b s h (t-1)/t elements per layer, tensor parallelism's 8 and 2 as backward gathers
inputs again, of which a rank keeps its part; and once per step, by an all-reduce, gradients of
norms and biases. (PyTorch's SequenceParallel splits DTensors.) Bytes of activations that a rank
keeps of a layer in 16 bit (b batch, s sequence, h width, a heads; masks: 1 byte an element):

    tensor parallelism                     s b h (10 + 24/t + 5 a s / (h t))
    and sequence parallelism               s b h (34/t + 5 a s / (h t))
    with selective recomputation           the same without 5 a s / (h t)
    with full recomputation                2 s b h, with sequence parallelism 2 s b h / t

Recomputation keeps a function's inputs and runs it again in backward: full, the layer; selective,
the attention core, whose s x s scores take most memory and little time (fused attention has none).

With context parallelism attention crosses the split, in one of three ways. Elements that each of P
ranks sends for an attention, where h_kv is the width of the keys, and what it holds of keys and
values beside 1/P of all activations:

                 forward                         backward, as many    held of keys and values
    all-gather   2 (P-1)/P b s h_kv              of gradients         all
    ring         2 (P-1)/P b s h_kv              and of gradients     3/P, then 3/P of gradients
    Ulysses      2 (P-1)/P b s/P (h + h_kv)      again                1/P: some heads, whole

For Ulysses h_kv counts P heads at least. Gradients are in fp32. Only the ring computes while it
sends (see _RingAttention). PyTorch's context_parallel() has the ring and the all-gather, in a
context that replaces scaled_dot_product_attention; these are functions of q, k and v. They are
causal: neither other masks nor packed documents.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022. Llama
Team, "The Llama 3 Herd of Models", 2024. Liu et al., "Ring Attention with Blockwise Transformers
for Near-Infinite Context", 2023. Jacobs et al., "DeepSpeed Ulysses", 2023.

    torchrun --nproc-per-node 4 sequence_parallel.py     bytes, claimed and counted; the error
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from collectives import (
    all_gather_single, all_gather_to_group, all_to_all_in_group, autocasted, count_bytes, exchange,
    rank_and_size, reduce_scatter_single, reduce_scatter_to_group, run_ranks,
)
from tensor_parallel import attention

# ---- the idea ------------------------------------------------------------------------------------


def sequence_parallel_mlp(x, norm, up, down, group=None):
    """x + MLP(norm(x)) of this rank's tokens x, (T/P, B, D); up: (F/P, D) and down: (D, F/P)."""
    whole = all_gather_to_group(norm(x), 0, group)  # (T, B, D), kept; backward: reduce-scatter
    y = F.linear(F.gelu(F.linear(whole, up), approximate="tanh"), down)  # a summand of (T, B, D)
    return x + reduce_scatter_to_group(y, 0, group)  # (T/P, B, D); backward: all-gather


# tensor_parallel.py keeps norm(x), not `whole`; sum_gradients_over_tp() sums gradients of `norm`.


# ---- recomputation -------------------------------------------------------------------------------


class _Hollow(torch.autograd.Function):
    """forward: a tensor of x's shape without memory, so that x is freed; backward: identity"""

    @staticmethod
    def forward(ctx, x):
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output


def recompute(function, *inputs):
    """function(*inputs), which keeps nothing for backward but its inputs, and runs there again.

    PyTorch's checkpoint(), for a function of tensors that returns one. It differs in that the
    second run's output, which nobody reads, is not kept. Random numbers are the same again, as is
    autocast. Raises ValueError where gradients are enabled and no input requires one;
    autograd.grad() and backward(inputs=...) raise RuntimeError. Chen et al., "Training Deep Nets
    with Sublinear Memory Cost", 2016.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    if not any(x.requires_grad for x in inputs):
        raise ValueError("recompute() of inputs none of which requires a gradient")

    def run(*inputs):
        output = function(*inputs)
        return _Hollow.apply(output) if torch.is_grad_enabled() else output  # in the second run

    return checkpoint(run, *inputs, use_reentrant=True)


# ---- what a layer keeps --------------------------------------------------------------------------


def dropout(x, p, training=True):
    """F.dropout, whose mask takes a byte per element also on CPUs."""
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


def activation_bytes(
    batch, seq_len, hidden, heads, tp=1, sequence_parallel=False, recompute="none",
    kv_heads=None, ffn=None, masks=True, itemsize=2
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


# ---- context parallelism: the idea ---------------------------------------------------------------
#
# Now the sequence is split inside attention, too: a rank has T/P positions of q, k and v. A softmax
# has weights exp(score) / (sum of exp(score)); sums over keys may be taken in parts, so that keys
# and values can come by on a ring.


def simple_ring_attention(q, k, v, group=None):
    """Causal attention of T/P queries, from position rank T/P on, to all keys. Forward alone.

    q, k, v: (B, H, T/P, K), and so the result.
    """
    rank, P = rank_and_size(group)
    kv, positions = torch.stack([k, v]), torch.arange(q.shape[2], device=q.device)
    arriving, output, total = torch.empty_like(kv), torch.zeros_like(q), 0
    for step in range(P):
        source = (rank - step) % P  # whose keys and values these are
        queries, keys = (r * len(positions) + positions for r in (rank, source))
        scores = q @ kv[0].mT * q.shape[-1] ** -0.5  # (B, H, T/P, T/P)
        weights = scores.masked_fill(keys > queries.unsqueeze(1), -math.inf).exp()
        output, total = output + weights @ kv[1], total + weights.sum(-1, keepdim=True)
        if step < P - 1:
            exchange([(kv, (rank + 1) % P)], [(arriving, (rank - 1) % P)], group)
            kv, arriving = arriving, kv
    return output / total


# The real one adds an order in which all work alike, fused kernels that skip what a mask hides and
# whose results merge without overflow, messages while it computes, and backward.


# ---- context parallelism: the zig-zag order ------------------------------------------------------
#
# Under a causal mask the last positions have most keys: in the plain order the last rank works
# 2 - 1/P times the average. In the zig-zag order rank r has chunks r and 2P-1-r of 2P: all alike.
#
#     P = 4      chunk   0 1 2 3 4 5 6 7
#     plain      rank    0 0 1 1 2 2 3 3
#     zig-zag    rank    0 1 2 3 3 2 1 0


def context_positions(seq_len, group=None):
    """The positions (T/P,) in the whole sequence of what this rank has, in order.

    Raises ValueError if seq_len cannot be cut into 2P equal chunks.
    """
    rank, P = rank_and_size(group)
    _check_chunks(seq_len, P)
    chunks = torch.arange(seq_len).chunk(2 * P)
    return torch.cat([chunks[rank], chunks[2 * P - 1 - rank]])


def _check_chunks(seq_len, P):
    if seq_len % (2 * P):
        raise ValueError(f"seq_len={seq_len} is not {2 * P} equal chunks for cp={P}")


class Block(NamedTuple):
    """Local queries and the keys that they see: all of them, or causally in a square."""

    queries: slice
    keys: slice
    causal: bool


def ring_block(rank, source, length):
    """What the queries of `rank` see of the keys of `source`, T/P = length positions each.

    P = 4, chunks as rank 1 sees them: x seen, c causally, . hidden: half of a block, always.

        source      1 (itself)     0 (before)     2 (after)      3 (after)
        keys        1   6          0   7          2   5          3   4
        queries 1   c   .          x   .          .   .          .   .
                6   x   c          x   .          x   x          x   x
    """
    whole, half = slice(0, length), length // 2
    if source == rank:
        return Block(whole, whole, True)
    if source < rank:
        return Block(whole, slice(0, half), False)
    return Block(slice(half, length), whole, False)


def gathered_blocks(rank, P, length):
    """What a rank's queries see of the whole sequence: each chunk what is before it, and itself."""
    blocks, size = [], length // 2
    for number, chunk in enumerate((rank, 2 * P - 1 - rank)):
        queries, first = slice(number * size, (number + 1) * size), chunk * size
        if chunk > 0:
            blocks.append(Block(queries, slice(0, first), False))
        blocks.append(Block(queries, slice(first, first + size), True))
    return blocks


# The all-gather and Ulysses need the sequence's order. Gathered rank by rank, P = 2, chunks come as
# 0 3 1 2; these two put them in order and back.


def _by_position(parts, dim):
    """(P, 2, ...), two chunks of each rank, -> the sequence, joined along `dim` of a chunk."""
    return torch.cat([*parts[:, 0], *reversed(parts[:, 1].unbind())], dim)


def _by_rank(whole, P, dim):
    """The inverse: the sequence -> (P, 2, ...)."""
    chunks = whole.chunk(2 * P, dim)
    pairs = zip(chunks[:P], reversed(chunks))
    return torch.stack([chunk for pair in pairs for chunk in pair]).unflatten(0, (P, 2))


# ---- context parallelism: attention to blocks ----------------------------------------------------


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
    """Gradients of q, k, v by output and lse over *all* keys, as exp(score - lse) is the weight."""
    aten = torch.ops.aten
    if q.device.type == "cpu":
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(grad, q, k, v, output, lse, 0.0, causal)
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # of dropout, which there is not
    if q.dtype in (torch.float16, torch.bfloat16):
        kernel, sizes = aten._scaled_dot_product_flash_attention_backward, (q.shape[2], k.shape[2])
        arguments = (grad, q, k, v, output, lse.contiguous(), None, None, *sizes, 0.0, causal)
        return kernel(*arguments, seed, seed)
    shape, lse = k.shape, F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)  # as forward pads it
    kernel, mask = aten._scaled_dot_product_efficient_attention_backward, (True, True, True, False)
    k, v = _repeated(k, q), _repeated(v, q)
    grads = kernel(grad, q, k, v, None, output, lse, seed, seed, 0.0, mask, causal)
    return grads[0], *[g.unflatten(1, (shape[1], -1)).sum(2) for g in grads[1:3]]


def _repeated(k, q):
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def _attend(block, q, k, v, output, lse):
    """Add to output (B, H, T, K) and lse (B, H, T), of the keys so far, what these keys bring.

    lse is the log of a query's sum of exp(score). Softmaxes over parts of the keys merge as a
    softmax over the parts: with weights exp(lse of the part - lse).
    """
    queries, keys, causal = block
    part, part_lse = block_attention(q[:, :, queries], k[:, :, keys], v[:, :, keys], causal)
    so_far, own = lse[:, :, queries], output[:, :, queries]
    total = torch.logaddexp(so_far, part_lse)
    own.mul_((so_far - total).exp_().unsqueeze(-1))
    own.add_(part * (part_lse - total).exp_().unsqueeze(-1))
    so_far.copy_(total)


def _attend_backward(block, grad, q, k, v, output, lse, grad_q, grad_k, grad_v):
    """Add to the three gradients what these keys bring."""
    queries, keys, causal = block
    grad, q, output, lse = (x[:, :, queries] for x in (grad, q, output, lse))
    parts = block_attention_backward(grad, q, k[:, :, keys], v[:, :, keys], output, lse, causal)
    grad_q[:, :, queries] += parts[0]
    grad_k[:, :, keys] += parts[1]
    grad_v[:, :, keys] += parts[2]


def _precise(x, *shape):
    """Zeros to sum up in, fp32 at least."""
    return x.new_zeros(shape or x.shape, dtype=torch.promote_types(x.dtype, torch.float32))


# ---- context parallelism: three ways for attention to cross the split ----------------------------


def _checked(q, k, v, group):
    """q, k, v as the kernels, which check nothing, want them."""
    q, k, v = (autocasted(x).contiguous() for x in (q, k, v))
    (B, H, length, K), KV = q.shape, k.shape[1]
    alike = k.shape == v.shape == (B, KV, length, K) and q.dtype == k.dtype == v.dtype
    if not alike or H % KV:
        found = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (q, k, v))
        raise ValueError(f"q, k and v are {found}: not alike but for heads that KV divides")
    _, P = rank_and_size(group)
    _check_chunks(P * length, P)
    return q, k, v


class _AllGatherAttention(torch.autograd.Function):
    """forward: all-gather k, v; attend. backward: gradients of all k, v; reduce-scatter these"""

    @staticmethod
    def forward(ctx, q, k, v, group):
        rank, P = rank_and_size(group)
        ctx.group, ctx.dtype, ctx.blocks = group, k.dtype, gathered_blocks(rank, P, q.shape[2])
        kv = torch.stack([k, v]).unflatten(3, (2, -1)).movedim(3, 0)  # (chunks, 2, B, KV, T/2P, K)
        parts = kv.new_empty(P, *kv.shape)
        all_gather_single(parts, kv.contiguous(), group)
        whole = _by_position(parts, 3)  # (2, B, KV, T, K)
        output, lse = _precise(q), _precise(q, *q.shape[:3]).fill_(-math.inf)
        for block in ctx.blocks:
            _attend(block, q, *whole, output, lse)
        output = output.to(q.dtype)
        ctx.save_for_backward(q, whole, output, lse)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (q, whole, output, lse), (_, P) = ctx.saved_tensors, rank_and_size(ctx.group)
        grad_q, grad_whole = _precise(q), _precise(whole)
        for block in ctx.blocks:
            _attend_backward(block, grad_output, q, *whole, output, lse, grad_q, *grad_whole)
        parts = _by_rank(grad_whole, P, 3)  # (P, 2, 2, B, KV, T/2P, K)
        own = parts.new_empty(parts.shape[1:])
        reduce_scatter_single(own, parts, group=ctx.group)
        grad_k, grad_v = own.movedim(0, 3).flatten(3, 4).to(ctx.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None


def allgather_attention(q, k, v, group=None):
    """Causal attention of local queries to all keys and values, which every rank gathers.

    q: (B, H, T/P, K), k, v: (B, KV, T/P, K), KV dividing H; in the order of context_positions().
    Returns (B, H, T/P, K). On a GPU of fp32 or 16 bit, and K of a multiple of 16 bytes. Raises
    ValueError if that order does not exist for this T, or shapes and dtypes do not fit.
    """
    q, k, v = _checked(q, k, v, group)
    return _AllGatherAttention.apply(q, k, v, group)


class _RingAttention(torch.autograd.Function):
    """Keys and values go round the ring; in backward they do once more, and their gradients follow.

        step     0     1     2     3      P = 4: whose keys and values rank r attends to
        keys of  r    r-1   r-2   r-3

    forward, step 0 to P-1       | backward, begin to send the own k, v; then step 1 to P-1
      begin to send k, v on (*)  |   wait for k, v; begin to send them on (*)
      attend to them             |   their gradients, of these queries
      wait for what comes (*)    |   from step 2 on: wait for the sum of the ranks before; add it
    (*) but in step P-1          |   begin to send the sum on: after step P-1 it goes home, and
                                 | beside that step 0, the gradients of the own k, v: add it
    """

    @staticmethod
    def forward(ctx, q, k, v, group):
        ctx.group, (rank, P) = group, rank_and_size(group)
        output, lse = _precise(q), _precise(q, *q.shape[:3]).fill_(-math.inf)
        kv, arriving = torch.stack([k, v]), None
        for step in range(P):
            if step < P - 1:
                arriving, kv_work = _send_recv(kv, arriving, group)
            block = ring_block(rank, (rank - step) % P, q.shape[2])
            _attend(block, q, *kv, output, lse)
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
        rank, P = rank_and_size(group)
        kv, grad_q, sums = torch.stack([k, v]), _precise(q), None
        if P > 1:
            arriving, kv_work = _send_recv(kv, None, group)
        for step in range(1, P):
            kv_work.wait()
            kv, arriving = arriving, kv
            if step < P - 1:
                arriving, kv_work = _send_recv(kv, arriving, group)
            grad_kv, block = _precise(kv), ring_block(rank, (rank - step) % P, q.shape[2])
            _attend_backward(block, grad_output, q, *kv, output, lse, grad_q, *grad_kv)
            if step > 1:
                grad_work.wait()
                grad_kv += sums
            sums, grad_work = _send_recv(grad_kv, sums, group)
        grad_kv, block = _precise(kv), ring_block(rank, rank, q.shape[2])
        _attend_backward(block, grad_output, q, k, v, output, lse, grad_q, *grad_kv)
        if P > 1:
            grad_work.wait()
            grad_kv += sums
        grad_k, grad_v = grad_kv.to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None


def _send_recv(tensor, buffer, group):
    """Begin to send to the next rank and to receive from the one before: buffer, and work."""
    rank, P = rank_and_size(group)
    buffer = torch.empty_like(tensor) if buffer is None else buffer
    sends, receives = [(tensor, (rank + 1) % P)], [(buffer, (rank - 1) % P)]
    return buffer, exchange(sends, receives, group, async_op=True)


def ring_attention(q, k, v, group=None):
    """Causal attention of local queries to keys and values that come by on the ring, P - 1 times.

    Shapes and errors as of allgather_attention(). The zig-zag order is that of Zhu's
    ring-flash-attention, 2024.
    """
    q, k, v = _checked(q, k, v, group)
    return _RingAttention.apply(q, k, v, group)


def ulysses_attention(q, k, v, group=None):
    """Causal attention of some heads to the whole sequence: all-to-alls change the split, and back.

    Forward: all-to-all, attend, all-to-all; backward: the same in reverse; each is waited for.
    Shapes and errors as of allgather_attention(), and ValueError if P does not divide H, or neither
    of P and KV divides the other. KV < P: a head of keys goes to P / KV ranks.
    """
    q, k, v = _checked(q, k, v, group)
    _, P = rank_and_size(group)
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads % P or (kv_heads % P and P % kv_heads):
        raise ValueError(f"{heads=} and {kv_heads=} cannot be dealt out to cp={P} ranks")
    if kv_heads < P:
        k, v = (x.repeat_interleave(P // kv_heads, 1) for x in (k, v))
    # n = (H + 2 KV) / P heads for each rank, KV being P at least by now: (B, P, n, T/P, K)
    parts = torch.cat([x.unflatten(1, (P, -1)) for x in (q, k, v)], 2)
    parts = parts.unflatten(3, (2, -1)).permute(1, 3, 0, 2, 4, 5)  # (P, 2, B, n, T/2P, K)
    parts = all_to_all_in_group(parts.contiguous(), group=group)
    whole = _by_position(parts, 2)  # (B, n, T, K)
    own = whole.split([x.shape[1] // P for x in (q, k, v)], 1)
    y = _by_rank(attention(*own), P, 2)  # (B, H/P, T, K) -> (P, 2, B, H/P, T/2P, K)
    y = all_to_all_in_group(y, group=group)
    return y.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).flatten(1, 2)  # (B, H, T/P, K)


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
    nbytes = 2 * (heads + max(kv_heads, cp)) * token * (cp - 1) // cp * itemsize
    return nbytes, nbytes


# ---- demonstration -------------------------------------------------------------------------------


def _demonstrate():
    rank, cp = rank_and_size()
    B, T, H, KV, K = 1, 256 * cp, 2 * cp, cp, 16
    torch.manual_seed(0)
    whole = [torch.randn(B, heads, T, K, dtype=torch.float64) for heads in (H, KV, KV)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    positions = context_positions(T)
    own = [x[:, :, positions].requires_grad_() for x in whole]
    for method in (allgather_attention, ring_attention, ulysses_attention):
        name = method.__name__.removesuffix("_attention")
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
