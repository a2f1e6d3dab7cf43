"""Sequence parallelism splits the sequence in part of a layer, context parallelism in all of it.

Tensor parallelism over t ranks (tensor_parallel.py) splits the inside of attention and MLP. The
norms, dropouts and residual additions around them treat each token by itself, yet every rank does
them for all tokens. With sequence parallelism rank r does them for x_r, 1/t of the tokens (dim 0):

           split along the sequence |  split by heads or by columns  | along the sequence
    x_r ---- LayerNorm ---- all-gather ---- attention or MLP ---- reduce-scatter ---- dropout, +
           backward:        reduce-scatter                        all-gather

Context parallelism over P ranks splits the sequence in attention, too, where a query needs the keys
and values of all earlier tokens. Either each rank gathers them all, or they pass from rank to rank
on a ring, or each rank gets the whole sequence for 1/P of the heads (Ulysses).

A rank holds   1/t of a layer's activations with sequence parallelism, by the layers of
               tensor_parallel.py. The plain form below also keeps the inputs of attention and of
               the MLP whole. With context parallelism 1/P of the activations, but all-gather
               attention keeps the k and v of all tokens
It sends       10 B T D (t-1)/t elements per layer with sequence parallelism, for B sequences of T
               tokens of width D: 8 as with tensor parallelism alone, and 2 since backward gathers
               the inputs that the plain form keeps. Each step also sums gradients: of norms and
               row-parallel biases over t ranks, of all parameters over P ranks. For the costs of
               context parallelism, see "what a model calls"
Overlap        a ring computes while keys, values and their gradients travel, except that backward
               waits for the first keys and values. All other methods wait for their messages. For
               linear layers, see tensor_parallel.py
PyTorch's      SequenceParallel runs norms and dropouts on DTensors, and context_parallel() patches
               scaled_dot_product_attention(). Here the model calls one of three functions instead

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022. Llama
Team, "The Llama 3 Herd of Models", 2024. Liu et al., "Ring Attention with Blockwise Transformers
for Near-Infinite Context", 2023. Jacobs et al., "DeepSpeed Ulysses", 2023. Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018 (how parts of attention are merged).

    torchrun --nproc-per-node 4 sequence_parallel.py    prints claimed and counted bytes, and errors
"""

import math
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from collectives import (
    all_gather_single, all_gather_to_group, all_reduce, all_to_all_in_group, autocasted,
    count_bytes, exchange, plain_exchange, rank_and_size, reduce_scatter_single,
    reduce_scatter_to_group, run_ranks,
)
from tensor_parallel import attention

# ---- sequence parallelism: the idea --------------------------------------------------------------
#
# In a step, rank r of t takes the r-th of t chunks of T positions, where t divides T. The matrices
# of a layer are split as in split_attention() and split_mlp() of tensor_parallel.py. Each rank has
# copies of all other parameters, and applies them to its own tokens only. So it has only a part of
# their gradients, and the parts must be summed:
#
#     own_tokens = tokens.chunk(t)[rank]  # (T, B) -> (T/t, B)
#     own_targets = targets.chunk(t)[rank]
#     x = embedding(own_tokens)  # (T/t, B, D)
#     for layer in layers:
#         x = sequence_parallel_attention(x, layer.norm_1, layer.qkv, layer.out, K)
#         x = sequence_parallel_mlp(x, layer.norm_2, layer.up, layer.down)
#     logits = F.linear(norm(x), embedding.weight)  # (T/t, B, vocabulary)
#     loss = F.cross_entropy(logits.flatten(0, 1), own_targets.flatten(), reduction="sum")
#     (loss / tokens.numel()).backward()  # the mean over all tokens is the sum of all ranks' parts
#     sum_gradients(copies)  # embedding.weight, and the parameters of all norms


def sequence_parallel_block(x, norm, inner, group=None, p=0.0):
    """Return x + dropout(inner(norm(x))) for this rank's tokens x, (T/t, B, D), as in the picture.

    inner: attention or an MLP, of which each rank has a part: (T, B, D) -> (T, B, D), this rank's
        term of the result.
    norm: a module, of which each rank has a copy: see sum_gradients().
    p: the probability of dropout, 0 in evaluation. Ranks drop elements of different tokens, so the
        generators must differ here. Seed ranks differently once all have made the same model, or
        keep their generators alike and call this `with` a ShardedRandomState (tensor_parallel.py).
    """
    whole = all_gather_to_group(norm(x), 0, group)  # (T, B, D); backward: reduce-scatter
    term = inner(whole)  # (T, B, D)
    y = reduce_scatter_to_group(term, 0, group)  # (T/t, B, D); backward: all-gather
    return x + F.dropout(y, p)


def sequence_parallel_mlp(x, norm, up, down, group=None, p=0.0):
    """Do sequence_parallel_block() with this rank's part of an MLP of width 4 D.

    up: (4 D/t, D) and down: (D, 4 D/t). Types (see "the idea" in tensor_parallel.py): x, up, down:
    V; parameters of norm: R; result: V.
    """

    def mlp(x):
        hidden = F.gelu(F.linear(x, up), approximate="tanh")  # (T, B, 4 D/t)
        return F.linear(hidden, down)

    return sequence_parallel_block(x, norm, mlp, group, p)


def sequence_parallel_attention(x, norm, qkv, out, K, group=None, p=0.0):
    """Do sequence_parallel_block() with causal attention of 1/t of the heads, of width K.

    qkv: (3, D/t, D) and out: (D, D/t). Types: x, qkv, out: V; parameters of norm: R; result: V.
    """

    def heads(x):
        columns = F.linear(x, qkv.flatten(0, 1))  # (T, B, 3 D/t)
        q, k, v = columns.unflatten(2, (3, -1, K)).permute(2, 1, 3, 0, 4)  # (B, heads/t, T, K) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(y.permute(2, 0, 1, 3).flatten(2), out)  # (T, B, D/t) -> (T, B, D)

    return sequence_parallel_block(x, norm, heads, group, p)


def sum_gradients(parameters, group=None):
    """Sum the gradients of parameters that each rank has applied to its own tokens only.

    Each needs a gradient on all ranks. A rank without one raises AttributeError; the others wait.
    """
    for parameter in parameters:
        all_reduce(parameter.grad, group=group)


# ---- context parallelism: the idea ---------------------------------------------------------------
#
# Each rank has all parameters, and q, k and v of its own T/P positions, for H heads of width K.
# Other layers treat each token by itself, so only attention needs anything from other ranks: the
# keys and values of all earlier tokens. The shortest way is to gather those of all ranks. In the
# three simple_...() functions, rank r has positions r T/P to (r+1) T/P - 1, the plain order. The
# zigzag_...() functions of the upper floor have another.


def simple_allgather_attention(q, k, v, group=None):
    """Causal attention of this rank's T/P queries to the keys of all ranks, which it gathers.

    q, k, v and the result: (B, H, T/P, K), of the r-th of P equal parts of the sequence on rank r.
    Types: V, V, V -> V.
    """
    rank, _ = rank_and_size(group)
    k = all_gather_to_group(k, 2, group)  # (B, H, T, K); backward: reduce-scatter
    v = all_gather_to_group(v, 2, group)
    scores = q @ k.mT * q.shape[-1] ** -0.5  # (B, H, T/P, T)
    start = rank * q.shape[2]  # query i is at position start + i, and key j at position j
    later = torch.ones_like(scores, dtype=torch.bool).triu(start + 1)  # where j > start + i
    return scores.masked_fill(later, -math.inf).softmax(-1) @ v


# Here each rank holds the keys and values of the whole sequence. It need not: a query's output is
# the sum of exp(score) * value over its keys, divided by the sum of exp(score). Both sums can be
# computed part by part, while keys and values arrive from one rank after another, on a ring.


def simple_ring_attention(q, k, v, group=None):
    """Do the same as simple_allgather_attention(), but with one rank's keys and values at a time.

    plain_exchange() of collectives.py sends and receives, and returns when both are done. Autograd
    does not follow it, so there is no backward: call this under torch.no_grad().
    zigzag_ring_attention() has one, overlaps messages with computation, skips what the mask hides,
    and does not overflow in exp().
    """
    assert not torch.is_grad_enabled(), "its backward would be wrong"
    rank, world_size = rank_and_size(group)
    kv = torch.stack([k, v])
    arriving = torch.empty_like(kv)
    output = torch.zeros_like(q)
    total = 0
    for step in range(world_size):
        source = (rank - step) % world_size  # the rank whose keys and values kv holds
        scores = q @ kv[0].mT * q.shape[-1] ** -0.5  # (B, H, T/P, T/P)
        # Query i, at position rank T/P + i, sees key j, at source T/P + j, if this is not later,
        # that is, if j - i <= (rank - source) T/P. tril() sets the weights of other keys to 0.
        weights = scores.exp().tril((rank - source) * q.shape[2])
        output = output + weights @ kv[1]
        total = total + weights.sum(-1, keepdim=True)
        if step < world_size - 1:
            receives = [(arriving, (rank - 1) % world_size)]
            plain_exchange([(kv, (rank + 1) % world_size)], receives, group)
            kv, arriving = arriving, kv
    return output / total


# Ulysses does not split attention over positions, but over heads, which are independent. Before and
# after it, an all-to-all exchanges positions for heads.


def simple_ulysses_attention(q, k, v, group=None):
    """Do the same as simple_allgather_attention(), but for all positions of 1/P of the heads.

    P must divide the number of heads. Types: V, V, V -> V.
    """
    _, world_size = rank_and_size(group)

    def regrouped(x, cut, joined):  # cut along one dim, and joined along another
        parts = torch.stack(x.chunk(world_size, cut))  # part j is for rank j
        parts = all_to_all_in_group(parts, group=group)  # part j is from rank j
        return torch.cat(parts.unbind(), joined)

    q, k, v = (regrouped(x, cut=1, joined=2) for x in (q, k, v))  # (B, H, T/P, K) -> (B, H/P, T, K)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return regrouped(y, cut=2, joined=1)  # (B, H/P, T, K) -> (B, H, T/P, K)


# ==== upper floor =================================================================================
#
# The layers of sequence parallelism are in tensor_parallel.py. Here the three methods of context
# parallelism get equal work for all ranks, and a backward. All-gather and ring compute attention
# block by block. A last part, with a banner of its own, is about what a layer keeps for backward.

# ---- context parallelism: what a model calls -----------------------------------------------------
#
# Under a causal mask later positions see more keys. In the plain order the last rank would do
# 2 - 1/P times the average work. In the zig-zag order each rank has an early and a late chunk, and
# all ranks do equal work (Zhu, ring-flash-attention, 2024):
#
#     P = 4      chunk   0 1 2 3 4 5 6 7
#     plain      rank    0 0 1 1 2 2 3 3
#     zig-zag    rank    0 1 2 3 3 2 1 0
#
# A model takes its tokens in this order, and calls one of three functions in each layer:
#
#     positions = context_positions(T, group)  # (T/P,), on the CPU
#     x = embedding(tokens[:, positions]) + embedding_of_positions(positions.to(device))
#     y = zigzag_ring_attention(q, k, v, group)
#     logits = head(x).flatten(0, 1)  # (B T/P, vocabulary)
#     losses = F.cross_entropy(logits, next_tokens[:, positions].flatten(), reduction="none")
#
# Rotary embeddings, too, turn q and k by these positions, before the call. The loss is the sum of
# all ranks' token losses, divided by the number of tokens on all ranks.
# Ranks have copies of parameters, so gradients are summed over the group, as in ddp.py. Attention
# has no dropout, and no mask of documents: if a sequence is packed from several of them, tokens
# also see the documents before their own.
#
# All heads have width K. q has H heads, so D = H K; k and v have KV heads, and D_kv = KV K. In
# backward the ring sends k and v again, and their gradients. One attention costs a rank:
#
#     elements     sent in forward              sent in backward             k, v kept for backward
#     all-gather   2 (P-1)/P B T D_kv           2 (P-1)/P B T D_kv           2 B T D_kv
#     ring         2 (P-1)/P B T D_kv           4 (P-1)/P B T D_kv           2 B T D_kv / P
#     Ulysses      2 (P-1)/P B T (D + D_kv)/P   2 (P-1)/P B T (D + D_kv)/P   2 B T D_kv / P
#
# While a backward runs, it also has gradients of k and v in fp32: in all-gather those of all tokens
# and a copy in the order of the ranks, 4 B T D_kv elements, and in the ring 6 B T D_kv / P.


def context_positions(seq_len, group=None):
    """Return the positions (T/P,) of this rank's tokens in a sequence of 2P equal chunks."""
    rank, world_size = rank_and_size(group)
    _check_chunks(seq_len, world_size)
    chunks = torch.arange(seq_len, device="cpu").chunk(2 * world_size)
    return torch.cat([chunks[rank], chunks[2 * world_size - 1 - rank]])


def _check_chunks(seq_len, cp):
    if seq_len % (2 * cp) or not seq_len:
        raise ValueError(f"{seq_len=} is not {2 * cp} equal chunks for {cp=}")


# ---- context parallelism: the blocks under the mask ----------------------------------------------
#
# What a rank's queries see is cut into blocks of queries and keys, in which the mask hides either
# nothing or the keys after each query.


class AttentionBlock(NamedTuple):
    """A slice of a rank's queries, and the slice of keys that these queries attend to."""

    queries: slice
    keys: slice
    causal: bool  # whether query i of `queries` sees only keys 0 to i of `keys`


def ring_block(rank, source, length):
    """Return the block of `rank`'s queries and `source`'s keys that the mask does not hide.

    length: T/P. Either all queries see half of another rank's keys, or half of the queries see all
    of them, so each step is equal work for all ranks. For P = 4, in the zig-zag order, rank r has
    chunks r and 7 - r. Rank 1 sees (x: all keys of the chunk; c: those up to the query's position):

        source      1 (itself)     0 (before)     2 (after)      3 (after)
        key chunks  1   6          0   7          2   5          3   4
        query    1  c   .          x   .          .   .          .   .
        chunks   6  x   c          x   .          x   x          x   x
    """
    whole = slice(0, length)
    half = length // 2
    if source == rank:
        return AttentionBlock(whole, whole, causal=True)
    if source < rank:
        return AttentionBlock(whole, slice(0, half), causal=False)
    return AttentionBlock(slice(half, length), whole, causal=False)


def gathered_blocks(rank, world_size, length):
    """Yield each chunk of a rank's queries with all earlier keys, then with that chunk's keys."""
    size = length // 2  # T/2P tokens per chunk
    for i, chunk in enumerate((rank, 2 * world_size - 1 - rank)):
        queries = slice(i * size, (i + 1) * size)
        start = chunk * size
        if chunk > 0:
            yield AttentionBlock(queries, slice(0, start), causal=False)
        yield AttentionBlock(queries, slice(start, start + size), causal=True)


# ---- context parallelism: attention, block by block ----------------------------------------------
#
# block_attention() (see "kernels") returns the attention in a block and its lse, the log of the sum
# of exp(score) over the block's keys. With lse, outputs over two sets of keys can be merged, and no
# exp() overflows:
#
#     lse    = log(exp(lse_1) + exp(lse_2))      by torch.logaddexp(); lse >= lse_1, lse_2
#     output = exp(lse_1 - lse) output_1 + exp(lse_2 - lse) output_2


def _attend(block, q, k, v, output, lse):
    """Merge the attention in a block into output (B, H, T/P, K) and lse (B, H, T/P), in place."""
    queries, keys, causal = block
    part, part_lse = block_attention(q[:, :, queries], k[:, :, keys], v[:, :, keys], causal)
    so_far = output[:, :, queries]  # a view, and so is the next
    so_far_lse = lse[:, :, queries]
    merged_lse = torch.logaddexp(so_far_lse, part_lse)
    so_far.mul_((so_far_lse - merged_lse).exp_().unsqueeze(-1))
    so_far.add_(part * (part_lse - merged_lse).exp_().unsqueeze(-1))
    so_far_lse.copy_(merged_lse)


def _attend_backward(block, grad_output, q, k, v, output, lse, grad_q, grad_k, grad_v):
    """Add a block's gradients to grad_q, grad_k and grad_v. output and lse cover all keys."""
    # exp(score - lse) is the softmax over all keys, so a block's gradients need no other block.
    queries, keys, causal = block
    grad_output, q, output, lse = (x[:, :, queries] for x in (grad_output, q, output, lse))
    k, v = k[:, :, keys], v[:, :, keys]
    dq, dk, dv = block_attention_backward(grad_output, q, k, v, output, lse, causal)
    grad_q[:, :, queries] += dq
    grad_k[:, :, keys] += dk
    grad_v[:, :, keys] += dv


def _no_keys_yet(q):
    """Return the output and lse of queries that have not seen any key."""
    return _zeros(q, q.shape), _zeros(q, q.shape[:3]).fill_(-math.inf)


def _zeros(x, shape):
    """Return zeros for a sum, in x's dtype if that is at least fp32, else in fp32."""
    return x.new_zeros(shape, dtype=torch.promote_types(x.dtype, torch.float32))


# ---- context parallelism: all-gather -------------------------------------------------------------


def zigzag_allgather_attention(q, k, v, group=None):
    """Causal attention of local queries to all keys and values, which every rank gathers.

    q and the result: (B, H, T/P, K); k, v: (B, KV, T/P, K), where KV divides H. The shapes are the
    same on all ranks. The tokens are those at context_positions(): with others the result is wrong,
    and nothing shows it. On a GPU the dtype must be fp32, fp16 or bf16, and K elements must take a
    multiple of 16 bytes. Raises ValueError if this rank's shapes or dtypes do not fit; ranks
    where they fit then wait for this one until the group's timeout. Types: V, V, V -> V.
    """
    q, k, v = _checked(q, k, v, group)
    return _AllGatherAttention.apply(q, k, v, group)


def _checked(q, k, v, group):
    """Return q, k and v, contiguous and cast by autocast; raise ValueError if they do not match."""
    q, k, v = (autocasted(x).contiguous() for x in (q, k, v))
    B, H, length, K = q.shape
    fits = k.shape == v.shape == (B, k.shape[1], length, K) and q.dtype == k.dtype == v.dtype
    if not fits or H % k.shape[1]:
        shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (q, k, v))
        raise ValueError(f"q, k and v are {shapes}: only heads may differ, and KV must divide H")
    _, world_size = rank_and_size(group)
    _check_chunks(world_size * length, world_size)
    return q, k, v


class _AllGatherAttention(torch.autograd.Function):
    """forward: all-gather k and v, then attend. backward: reduce-scatter the gradients of k and v.

    If the gather were its own Function, autograd would round gradients to k's dtype before the sum.
    """

    @staticmethod
    def forward(ctx, q, k, v, group):
        rank, world_size = rank_and_size(group)
        kv = torch.stack([k, v])  # (2, B, KV, T/P, K)
        kv = torch.stack(kv.chunk(2, -2))  # its early and late chunk: (2, 2, B, KV, T/2P, K)
        gathered = kv.new_empty(world_size, *kv.shape)  # (P, 2, 2, B, KV, T/2P, K)
        all_gather_single(gathered, kv, group)
        gathered = _by_position(gathered)  # (2, B, KV, T, K)
        ctx.blocks = list(gathered_blocks(rank, world_size, q.shape[2]))
        output, lse = _no_keys_yet(q)
        for block in ctx.blocks:
            _attend(block, q, *gathered, output, lse)
        output = output.to(q.dtype)
        ctx.save_for_backward(q, gathered, output, lse)
        ctx.group = group
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        q, kv, output, lse = ctx.saved_tensors
        _, world_size = rank_and_size(ctx.group)
        grad_q, grad_kv = (_zeros(x, x.shape) for x in (q, kv))
        for block in ctx.blocks:
            _attend_backward(block, grad_output, q, *kv, output, lse, grad_q, *grad_kv)
        grad_kv = _by_rank(grad_kv, world_size)  # (2, B, KV, T, K) -> (P, 2, 2, B, KV, T/2P, K)
        own = grad_kv.new_empty(grad_kv.shape[1:])  # (2, 2, B, KV, T/2P, K)
        reduce_scatter_single(own, grad_kv, group=ctx.group)
        grad_k, grad_v = torch.cat(own.unbind(), -2).to(kv.dtype)  # (B, KV, T/P, K) each
        return grad_q.to(q.dtype), grad_k, grad_v, None


def _by_position(parts):
    """Join all ranks' chunks in the order of positions: for P = 2, [[0, 3], [1, 2]] to 0 1 2 3.

    parts: each rank's early and late chunk, (P, 2, ..., T/2P, K) -> (..., T, K).
    """
    early, late = parts.unbind(1)
    return torch.cat([*early, *reversed(late.unbind())], -2)


def _by_rank(whole, world_size):
    """Undo _by_position(): cut 0 1 2 3 into [[0, 3], [1, 2]], two chunks for each rank."""
    chunks = whole.chunk(2 * world_size, -2)
    of_ranks = []
    for rank in range(world_size):
        of_ranks += [chunks[rank], chunks[2 * world_size - 1 - rank]]
    return torch.stack(of_ranks).unflatten(0, (world_size, 2))


# ---- context parallelism: ring -------------------------------------------------------------------


def zigzag_ring_attention(q, k, v, group=None):
    """Do the same as zigzag_allgather_attention(), but pass k and v around the ring, in P-1 steps.

    They travel while attention to those of the step before is computed. Types: V, V, V -> V.
    """
    q, k, v = _checked(q, k, v, group)
    return _RingAttention.apply(q, k, v, group)


class _RingAttention(torch.autograd.Function):
    """Attend to the k and v that visit a rank, its own first; in backward its own come last."""

    @staticmethod
    def forward(ctx, q, k, v, group):
        rank, _ = rank_and_size(group)
        output, lse = _no_keys_yet(q)
        for source, kv in _visitors(k, v, group):
            _attend(ring_block(rank, source, q.shape[2]), q, *kv, output, lse)
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.group = group
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        q, k, v, output, lse = ctx.saved_tensors
        rank, _ = rank_and_size(ctx.group)
        # G_i, the gradients of rank i's k and v, travel one step behind k and v. Each rank adds its
        # part and sends the sum on. Rank i computes its own part while the others' sum arrives. For
        # rank 0 of P = 3:
        #
        #     k, v of    computes       adds from rank 2    sends to rank 1
        #     rank 2     part of G_2                        1 of 3 parts of G_2
        #     rank 1     part of G_1    1 part of G_1       2 of 3 parts of G_1
        #     rank 0     part of G_0    2 parts of G_0      nothing: G_0 is complete
        grad_q = _zeros(q, q.shape)
        received = _zeros(k, (2, *k.shape))  # what the previous rank has summed
        work = None
        visits = _visitors(k, v, ctx.group)
        next(visits)  # begins to send this rank's own k and v, whose turn comes at the end
        for source, kv in chain(visits, [(rank, (k, v))]):
            block = ring_block(rank, source, q.shape[2])
            grad_kv = _zeros(k, (2, *k.shape))
            _attend_backward(block, grad_output, q, *kv, output, lse, grad_q, *grad_kv)
            if work is not None:
                work.wait()
                grad_kv += received
            if source != rank:
                work = _send_on(grad_kv, received, ctx.group)
        grad_k, grad_v = grad_kv.to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None


def _visitors(k, v, group):
    """Yield (source, its k and v) as they visit rank r: its own, then those of r-1, r-2 and so on.

    During each visit but the last, k and v travel on: they are sent before the yield, and the next
    ones are waited for after it. A rank then holds its own k and v, the visiting ones and the
    arriving ones: 6 B T D_kv / P elements.
    """
    rank, world_size = rank_and_size(group)
    visiting = torch.stack([k, v])
    arriving = torch.empty_like(visiting)
    for step in range(world_size - 1):
        work = _send_on(visiting, arriving, group)
        yield (rank - step) % world_size, visiting
        work.wait()
        visiting, arriving = arriving, visiting
    yield (rank + 1) % world_size, visiting


def _send_on(tensor, buffer, group):
    """Start sending `tensor` to the next rank and receiving the previous rank's into `buffer`."""
    rank, world_size = rank_and_size(group)
    sends = [(tensor, (rank + 1) % world_size)]
    return exchange(sends, [(buffer, (rank - 1) % world_size)], group, async_op=True)


# ---- context parallelism: Ulysses ----------------------------------------------------------------


def zigzag_ulysses_attention(q, k, v, group=None):
    """Causal attention over the whole sequence in 1/P of the heads, between two all-to-alls.

    The first all-to-all turns T/P positions of all heads into all positions of 1/P of the heads;
    the second one turns the result back. P must divide H, and either P divides KV or KV divides P;
    if KV < P, k and v are repeated to P heads (D_kv = P K). For shapes and tokens, see
    zigzag_allgather_attention(). Types: V, V, V -> V.
    """
    q, k, v = _checked(q, k, v, group)
    _, world_size = rank_and_size(group)
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads % world_size or (kv_heads % world_size and world_size % kv_heads):
        raise ValueError(f"{heads=} and {kv_heads=} cannot be dealt out to cp={world_size} ranks")
    if kv_heads < world_size:
        k, v = (x.repeat_interleave(world_size // kv_heads, 1) for x in (k, v))
    # Each rank gets n = (H + 2 KV)/P heads of q, k and v together. KV is now at least P.
    parts = torch.cat([x.unflatten(1, (world_size, -1)) for x in (q, k, v)], 2)  # (B, P, n, T/P, K)
    parts = parts.movedim(1, 0)  # (P, B, n, T/P, K): part j is for rank j
    parts = torch.stack(parts.chunk(2, -2), 1)  # its early and late chunk: (P, 2, B, n, T/2P, K)
    parts = all_to_all_in_group(parts, group=group)  # part j is from rank j
    whole = _by_position(parts)  # (B, n, T, K)
    qkv = whole.split([x.shape[1] // world_size for x in (q, k, v)], 1)
    y = attention(*qkv)  # (B, H/P, T, K)
    parts = _by_rank(y, world_size)  # (P, 2, B, H/P, T/2P, K): part j is for rank j
    parts = all_to_all_in_group(parts, group=group)  # part j has the heads of rank j
    parts = parts.movedim(0, 2)  # early chunks and late ones: (2, B, P, H/P, T/2P, K)
    return torch.cat(parts.unbind(), -2).flatten(1, 2)  # (B, P, H/P, T/P, K) -> (B, H, T/P, K)


# ---- kernels -------------------------------------------------------------------------------------
#
# F.scaled_dot_product_attention() does not return lse, so these functions call its kernels:
#
#     on a CPU           flash attention for CPUs
#     16 bits on a GPU   flash attention
#     fp32 on a GPU      memory-efficient attention, which needs as many heads of k and v as of q,
#                        and pads lse to a multiple of 32 queries

aten = torch.ops.aten


def block_attention(q, k, v, causal):
    """Return the attention of q to k and v, shaped like q, and its lse, shaped like q[..., 0]."""
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal)
    if q.dtype in (torch.float16, torch.bfloat16):
        return aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)[:2]
    output, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, _repeated(k, q), _repeated(v, q), attn_bias=None, compute_log_sumexp=True,
        is_causal=causal,
    )  # fmt: skip
    return output, lse.narrow(2, 0, q.shape[2])


def block_attention_backward(grad_output, q, k, v, output, lse, causal):
    """Return a block's part of the gradients of q, k and v, given output and lse over all keys."""
    options = {"dropout_p": 0.0, "is_causal": causal}
    if q.device.type == "cpu":
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(grad_output, q, k, v, output, lse, **options)
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the random state of dropout
    options |= {"philox_seed": unused, "philox_offset": unused}
    if q.dtype in (torch.float16, torch.bfloat16):
        kernel = aten._scaled_dot_product_flash_attention_backward
        options |= {"cum_seq_q": None, "cum_seq_k": None}  # for sequences of unlike lengths
        options |= {"max_q": q.shape[2], "max_k": k.shape[2]}
        return kernel(grad_output, q, k, v, output, lse.contiguous(), **options)
    kernel = aten._scaled_dot_product_efficient_attention_backward
    padded = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)  # exp(score - lse) is 0 there
    options |= {"out": output, "logsumexp": padded}
    options |= {"attn_bias": None, "grad_input_mask": (True, True, True, False)}
    grad_q, *grads, _ = kernel(grad_output, q, _repeated(k, q), _repeated(v, q), **options)
    return grad_q, *[grad.unflatten(1, (k.shape[1], -1)).sum(2) for grad in grads]


def _repeated(k, q):
    """Repeat the heads of k, or v, so that each head of q has its own."""
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1)


# ---- context parallelism: cost -------------------------------------------------------------------


def context_parallel_bytes(
    method, batch, seq_len, heads, kv_heads, head_dim, cp, itemsize=4, grad_itemsize=4
):
    """Return the bytes that a rank sends for one attention: (forward, backward).

    method: "allgather", "ring" or "ulysses".
    grad_itemsize: bytes per element of gradients of k and v in "allgather" and "ring", at least 4.
    """
    head = batch * seq_len // cp * head_dim  # elements of one head on a rank
    kv = 2 * kv_heads * head
    if method == "allgather":
        return (cp - 1) * kv * itemsize, (cp - 1) * kv * grad_itemsize
    if method == "ring":
        return (cp - 1) * kv * itemsize, (cp - 1) * kv * (itemsize + grad_itemsize)
    if method != "ulysses":
        raise ValueError(f"{method=} is not 'allgather', 'ring' or 'ulysses'")
    nbytes = 2 * (heads + max(kv_heads, cp)) * head * (cp - 1) // cp * itemsize
    return nbytes, nbytes


# ==== what a layer keeps for backward =============================================================
#
# A subject of its own, which needs no group: recomputation, and the bytes that a layer keeps. A
# reader who wants sequence and context parallelism alone may stop here.

# ---- recomputation -------------------------------------------------------------------------------
#
# Full recomputation keeps only a layer's input, and runs the layer again in backward. Selective
# recomputation runs only the core of attention again, whose T x T scores take most of the memory
# and little of the time. Fused attention keeps no scores in the first place.
#
# Full recomputation can also treat n layers as one. Forward then keeps only every n-th layer's
# input, and backward runs n layers again before it begins with the last of them. For n = 3:
#
#     forward    layers 0 1 2, 3 4 5           keeps the inputs of layers 0 and 3
#     backward   forward of 3 4 5 again        keeps all that these three layers need
#                backward of 5 4 3             frees it
#                forward of 0 1 2 again, backward of 2 1 0
#
# With c bytes for a layer's input, a bytes for all that a layer keeps, and L layers, this needs
# c L/n for the inputs and a n for the layers that run again. The sum is least for n = sqrt(c L/a).
# If a = c, n is the well-known sqrt(L). But a transformer's layer keeps a = 17 c, by
# activation_bytes() without tp, with dropout and fused attention. So n = 2, with c L/2 + 34 c,
# needs less than n = 1, with c L + 17 c, only from 35 layers on. A pipeline stage keeps the inputs
# of m microbatches in flight, but recomputes one at a time: c L becomes m c L.


def recompute(function, *inputs):
    """Return function(*inputs), keep only the inputs, and run the function again in backward.

    The inputs and the result are tensors. This is PyTorch's reentrant checkpoint(), but the second
    run's output, which backward does not need, is freed at once. Raises ValueError if gradients are
    enabled and no input requires one; autograd.grad() and backward(inputs=...) raise RuntimeError.
    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    if not any(x.requires_grad for x in inputs):
        raise ValueError("no input of recompute() requires a gradient")

    def run(*inputs):  # checkpoint() enables gradients only in the second run
        output = function(*inputs)
        return _Hollow.apply(output) if torch.is_grad_enabled() else output

    return checkpoint(run, *inputs, use_reentrant=True)


def recompute_groups(layers, size, x):
    """Return x after all layers, of which backward recomputes `size` (n, above) at a time as one.

    Only the input of each group of n layers is kept. If n does not divide the number of layers, the
    last group is shorter, since backward recomputes it first, while all inputs are kept.
    """
    for begin in range(0, len(layers), size):
        x = recompute(partial(run_layers, layers[begin : begin + size]), x)
    return x


def run_layers(layers, x):
    """Return x after all layers, one after the other."""
    for layer in layers:
        x = layer(x)
    return x


class _Hollow(torch.autograd.Function):
    """forward: return a tensor of x's shape that holds one element. backward: identity.

    Backward begins with the gradient of this output, and never reads its values.
    """

    @staticmethod
    def forward(ctx, x):
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output


# ---- the bytes that a layer keeps ----------------------------------------------------------------


def dropout(x, p, training=True):
    """Apply dropout with a mask of bytes, as activation_bytes() counts it, also on a CPU.

    There F.dropout() keeps a mask in x's dtype.
    """
    if not training or p == 0:
        return x
    return torch.native_dropout(x, p, True)[0]


def activation_bytes(
    batch, seq_len, hidden, heads, tp=1, sequence_parallel=False, recomputation="none",
    kv_heads=None, ffn=None, masks=True, itemsize=2
):
    """Return the bytes of a layer's activations on a rank, by default as in Korthikanti's table 2.

        tensor parallelism           B T D (10 + 24/t + 5 H T / (D t))   H: the number of heads
        + sequence parallelism       B T D (34/t + 5 H T / (D t))
        + selective recomputation    B T D (34/t)
        full recomputation           2 B T D, with sequence parallelism 2 B T D / t

    recomputation: "none", "selective" (also for fused attention) or "full".
    kv_heads, ffn: the heads of k and v and the width of the MLP, by default `heads` and 4 * hidden.
    masks: whether there is dropout, in attention, and after it and the MLP. Dropout masks have one
        byte per element.
    itemsize: bytes per element of everything except dropout masks.
    """
    elements = batch * seq_len * hidden
    split = tp if sequence_parallel else 1
    if recomputation == "full":
        return itemsize * elements / split
    # All in bytes per element of (B, T, D). The inputs of 2 norms and of 2 column-parallel layers,
    # and 2 masks:
    outside = 4 * itemsize + 2 * masks
    # q and attention's output; k and v; the input and output of GeLU:
    inside = 2 + 2 * (kv_heads or heads) / heads + 2 * (4 if ffn is None else ffn / hidden)
    inside *= itemsize
    # softmax's output, and the output and the mask of the dropout after it:
    scores = (itemsize + masks * (itemsize + 1)) * heads * seq_len / hidden
    if recomputation == "selective":
        scores = 0
    return elements * (outside / split + (inside + scores) / tp)


def recomputation_bytes(layers, size, layer_input, whole_layer, microbatches=1):
    """Return the most bytes of activations of a stage that recomputes `size` layers as one.

    This is m c L/n + a n - c, in the letters above: a group's input, which is one of the tensors
    that its first layer keeps, is counted once.

    layers, size: L, the stage's layers, and n. If n does not divide L, the last group is shorter.
    layer_input, whole_layer: c and a, which are activation_bytes() of full and of no recomputation.
    microbatches: m, the most whose forward is done and whose backward is not.
    """
    groups = math.ceil(layers / size)
    last = layers - (groups - 1) * size
    inputs = layer_input * (microbatches * groups - 1)
    # Backward frees the last group's input before it recomputes the group before.
    return inputs + max(whole_layer * last, (whole_layer * size - layer_input) * (groups > 1))


# ---- demonstration -------------------------------------------------------------------------------


def _demonstrate():
    torch.manual_seed(0)  # every rank draws the whole tensors
    _demonstrate_sequence_parallelism()
    _demonstrate_context_parallelism()


def _demonstrate_sequence_parallelism():
    rank, t = rank_and_size()
    T = 64 * t
    D = 16 * t
    norm = torch.nn.LayerNorm(D, dtype=torch.float64)
    x = torch.randn(T, 2, D, dtype=torch.float64, requires_grad=True)  # 2 sequences
    up = torch.randn(4 * D, D, dtype=torch.float64) / D
    down = torch.randn(D, 4 * D, dtype=torch.float64) / D
    whole_y = x + F.linear(F.gelu(F.linear(norm(x), up), approximate="tanh"), down)
    dx, *of_norm = torch.autograd.grad(whole_y.square().sum(), (x, *norm.parameters()))
    own_x = x.detach().chunk(t)[rank].requires_grad_()
    with count_bytes() as traffic:
        y = sequence_parallel_mlp(own_x, norm, up.chunk(t)[rank], down.chunk(t, 1)[rank])
        y.square().sum().backward()
        counted = traffic.bytes()
    sum_gradients(norm.parameters())
    found = y, own_x.grad, *[parameter.grad for parameter in norm.parameters()]
    error = _largest_error(found, (whole_y.chunk(t)[rank], dx.chunk(t)[rank], *of_norm))
    if rank == 0:
        claimed = 4 * x.nbytes * (t - 1) // t  # half of a layer's
        name = "sequence_parallel_mlp"
        print(f"{name:26} bytes sent, claimed {claimed}, counted {counted}; error {error:.0e}")


def _demonstrate_context_parallelism():
    rank, cp = rank_and_size()
    B, T, H, K = 1, 256 * cp, 2 * cp, 16
    whole = [torch.randn(B, H, T, K, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    whole_y = F.scaled_dot_product_attention(*whole, is_causal=True)
    gradients = torch.autograd.grad(whole_y.square().sum(), whole)
    in_order = torch.arange(T).chunk(cp)[rank]
    in_zigzag = context_positions(T)
    for name, method, positions in (
        ("allgather", simple_allgather_attention, in_order),
        ("ring", simple_ring_attention, in_order),
        ("ulysses", simple_ulysses_attention, in_order),
        ("allgather", zigzag_allgather_attention, in_zigzag),
        ("ring", zigzag_ring_attention, in_zigzag),
        ("ulysses", zigzag_ulysses_attention, in_zigzag),
    ):
        own = [x.detach()[:, :, positions].requires_grad_() for x in whole]
        claimed = list(context_parallel_bytes(name, B, T, H, H, K, cp, 8, 8))
        has_backward = method is not simple_ring_attention
        with count_bytes() as traffic, torch.set_grad_enabled(has_backward):
            found = [method(*own)]
            counted = [traffic.bytes()]
            if has_backward:
                found += torch.autograd.grad(found[0].square().sum(), own)
                counted.append(traffic.bytes() - counted[0])
        error = _largest_error(found, [x[:, :, positions] for x in (whole_y, *gradients)])
        if rank == 0:
            sent = f"claimed {claimed[: len(counted)]}, counted {counted}"
            print(f"{method.__name__:26} bytes sent, {sent}; error {error:.0e}")


def _largest_error(found, expected):
    return max((a - b).abs().max().item() for a, b in zip(found, expected))


if __name__ == "__main__":
    run_ranks(_demonstrate)
