"""Tensor parallelism: matrices are split over the ranks of a group, which process the same tokens.

So a layer can be larger than the memory of one GPU, and its ranks (processes that each have one)
compute it together. An MLP computes Z = GeLU(X A) C. Rank r of P holds A_r, some columns of A, and
C_r, the matching rows of C. GeLU treats each element by itself, so rank r computes the columns
Y_r = GeLU(X A_r) without sending anything. If A were split by rows, and X by columns, each rank
would have a term of X A, and the terms would have to be added before GeLU, since GeLU(u + v) is not
GeLU(u) + GeLU(v). Attention treats each head by itself, so the matrices that make q, k and v are
split by columns, whole heads to each rank, and the output projection by rows.

With P = 2, A = [A_0 A_1], side by side, and C = [C_0; C_1], one above the other. An all-reduce
gives every rank the sum of all ranks' tensors:

    X  --f-->  X  --A_r-->  U_r  --GeLU-->  Y_r  --C_r-->  Z_r  --g-->  Z
               column-parallel                row-parallel

    f = copy_to_group()       forward: identity     backward: all-reduce   dX = dX_0 + dX_1
    g = reduce_from_group()   forward: all-reduce   backward: identity     Z = Z_0 + Z_1

F.linear() takes a matrix transposed, which is written A' here. So columns of A are rows (dim 0) of
its weight A', and rows of C are columns (dim 1) of C'.

After g all ranks compute the same, up to the loss, and each rank calls backward() on its own copy
of it. So dZ, the gradient of the loss with respect to Z, is whole and equal on all ranks. g passes
it on as it is, since a sum would count it P times. Then each rank computes the gradient dU_r of its
own columns, and dU_r A_r', a term of dX. f adds the terms, so dX is whole and equal on all ranks,
too, for the layer before. Every MLP and every attention begins with an f and ends with a g.

No other rank has A_r and C_r, and after backward rank r has their whole gradients. So these are not
summed over ranks, and each rank's optimizer updates its own part. All ranks have copies of a
parameter that is not split. Their gradients are equal, so copies that begin equal stay equal. On a
GPU their last bits may come to differ, since some kernels add in no fixed order. Dropout outside
of f and g must draw the same random numbers on all ranks, as long as X and Z are not split.

With sequence parallelism (sequence_parallel.py) X and Z are split along the sequence. Then f is an
all-gather, whose backward is a reduce-scatter, and g is the reverse.

A rank holds   1/P of each split matrix, its gradient, its optimizer states, the activations between
               f and g (U, Y, q, k, v) and the logits; all of each other parameter (norms,
               row-parallel biases, embedding of positions), and of X and Z unless these are split
It sends       8 B T D (P-1)/P elements per transformer layer in forward and backward: 4 all-reduces
               (2 of f, 2 of g) of B sequences of T tokens of width D, each of which sends 2 (P-1)/P
               of its tensor. The embedding and the product that gives the logits add an all-reduce
               each, and the loss reduces 3 B T numbers. For sequence parallelism, see its file
Overlap        on the upper floor, backward computes dW while dX is summed. With sequence
               parallelism a large forward product, or the product dY = dZ C' in the backward of a
               row-parallel layer, runs chunk by chunk while other chunks travel
PyTorch's      DTensor and parallelize_module() split the same matrices. Each operation derives what
               to send from the placements of its DTensors. Here a parameter is a plain tensor

Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks", 2012. Shoeybi
et al., "Megatron-LM", 2019. Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022. Wang et al., "Overlap Communication with Dependent Computation via
Decomposition in Large Deep Learning Models", 2023.

    torchrun --nproc-per-node 4 tensor_parallel.py    prints bytes and the largest numerical error
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from collectives import (
    ReduceOp, all_gather_single, all_gather_to_group, all_reduce, all_reduce_bytes, autocasted,
    check_parameters, copy_to_group, count_bytes, dist, exchange, gather_from_group, rank_and_size,
    ranks_in_both, reduce_from_group, reduce_scatter_bytes, reduce_scatter_single,
    reduce_scatter_to_group, run_ranks,
)

# ---- the idea ------------------------------------------------------------------------------------
#
# This is a step of a GPT. Every rank has the same tokens, and its own parts of the matrices:
#
#     x = split_embedding(tokens, table)  # (B, T, D), equal on all ranks
#     for layer in layers:
#         x = x + split_attention(norm(x), layer.qkv, layer.out, K)
#         x = x + split_mlp(norm(x), layer.up, layer.down)
#     logits = column_linear(norm(x).flatten(0, 1), table)  # (B T, vocabulary/P)
#     split_cross_entropy(logits, targets.flatten()).mean().backward()  # on every rank
#     optimizer.step()  # on this rank's parts, and on its copies of norms
#
# f and g are autograd functions of collectives.py. f returns x, and its backward all-reduces the
# gradient. g all-reduces x, and its backward returns the gradient.
#
# A tensor has one of four types over the ranks (see "derivatives" in collectives.py). Ranks use a
# tensor identically if all compute the same from it, so that each has its whole gradient. They use
# it differently if each computes something of its own from it, say f(X) A_r, so that each has only
# a term of its gradient. Docstrings give types by their first letters. P is a type only there; in
# sizes and in code it is the number of ranks.
#
#                      on the ranks                      gradient    for example
#     I  invariant     equal, and used identically       I           X, Z, the loss, norms
#     R  replicated    equal, but used differently       P           f(X)
#     V  varying       each rank's own                   V           A_r, C_r, U_r, Y_r, logits
#     P  partial       terms, of which the sum counts    R           Z_r
#
# They show where a message is missing. In split_mlp(), f takes X from I to R. The product of an R
# with A_r, a V, is U_r, a V. GeLU takes V to V. The product of Y_r and C_r, both V, is a P, and g
# takes it to I. Without f the types do not fit: X is I, but each rank multiplies it by its own A_r.
# Z would still be right, but rank r's gradient of X would be dU_r A_r' alone, without a sum.


def column_linear(x, weight, bias=None, group=None):
    """Return f(X) A_r + b_r, this rank's columns of X A + b. X is the same on every rank.

    Types of x, weight and bias -> the result: I, V, V -> V.
    """
    return F.linear(copy_to_group(x, group), weight, bias)


def row_linear(x, weight, bias=None, group=None):
    """Return Z = g(Y_r C_r) + b for x = Y_r, this rank's columns of Y. b is added once, after g.

    Types of x, weight and bias -> the result: V, V, I -> I.
    """
    z = reduce_from_group(F.linear(x, weight), group)
    return z if bias is None else z + bias


def split_mlp(x, up, down, group=None):
    """Return Z = GeLU(X A) C for this rank's up = A_r' and down = C_r'. Types: I, V, V -> I.

    GeLU is that of GPT-2, approximated by tanh. For B sequences of T tokens:

        up = whole_up.chunk(P, 0)[rank].clone()  # (4 D, D) -> (4 D/P, D), for an MLP of width 4 D
        down = whole_down.chunk(P, 1)[rank].clone()  # (D, 4 D) -> (D, 4 D/P)
        z = split_mlp(x, up, down)  # (B, T, D) -> (B, T, D)
    """
    y = F.gelu(column_linear(x, up, group=group), approximate="tanh")
    return row_linear(y, down, group=group)


def split_attention(x, qkv, out, K, group=None):
    """Return causal attention of x, (B, T, D), of whose heads each rank computes 1/P.

        qkv = whole_qkv.chunk(P, 1)[rank].clone()  # (3, D, D) -> (3, D/P, D): heads of q, k and v
        out = whole_out.chunk(P, 1)[rank].clone()  # (D, D) -> (D, D/P)
        z = split_attention(x, qkv, out, K)  # with heads of K columns, (B, T, D) -> (B, T, D)

    P divides the number of heads. Types: I, V, V -> I.
    """
    weight = qkv.flatten(0, 1)  # (3 D/P, D): rows of q, then of k, then of v
    columns = column_linear(x, weight, group=group)  # (B, T, 3 D/P)
    heads = columns.unflatten(2, (3, -1, K))  # (B, T, 3, heads/P, K)
    q, k, v = heads.permute(2, 0, 3, 1, 4)  # (3, B, heads/P, T, K)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads/P, T, K)
    y = y.transpose(1, 2).flatten(2)  # (B, T, D/P)
    return row_linear(y, out, group=group)


def own_part(indices, start, size):
    """Return indices - start, and a mask of the indices that lie in start:start+size.

    All other indices become 0, which is a valid index.
    """
    local = indices - start
    is_here = (local >= 0) & (local < size)
    return local.masked_fill(~is_here, 0), is_here


def split_embedding(tokens, weight, group=None):
    """Look tokens up in an embedding of which rank r has the r-th of P equal parts.

        weight = table.unflatten(0, (P, -1))[rank].clone()  # (vocabulary, D) -> (vocabulary/P, D)
        x = split_embedding(tokens, weight)  # (B, T) -> (B, T, D)

    P divides the vocabulary, or unflatten() raises an error. chunk() would make unequal parts, with
    which results are wrong. A rank takes zeros for tokens whose rows it does not have, and the
    results are summed. For a token outside the vocabulary the sum is zero. Types: weight V -> I.
    """
    rank, _ = rank_and_size(group)
    local, is_here = own_part(tokens, rank * len(weight), len(weight))
    rows = F.embedding(local, weight).masked_fill(~is_here.unsqueeze(-1), 0)
    return reduce_from_group(rows, group)


def split_cross_entropy(logits, target, group=None):
    """Return the loss of each of N tokens, (N,), from this rank's columns of the logits.

        logits = column_linear(x.flatten(0, 1), weight)  # (B, T, D) -> (N, vocabulary/P)
        losses = split_cross_entropy(logits, targets.flatten())  # targets: (B, T), as those of x

    Targets are in the order of the logits' rows. The weight is split into equal parts as that of
    split_embedding(), or is the same one (a tied head). The loss of a token with the whole logits
    `row` is log(sum(exp(row))) - row[target]. The logits stay split, and ranks exchange three
    numbers for each token. Do not gather them: of whole logits, every rank's sum would be whole,
    and the normalizer P times too large. Sums are in the dtype of the logits, so pass them in fp32
    at least. There is no ignore_index: for a target outside the vocabulary, such as -100, the loss
    is NaN, and its gradient is zero. Types: logits V -> I.
    """
    rank, P = rank_and_size(group)
    largest = logits.detach().amax(1)  # (N,)
    all_reduce(largest, ReduceOp.MAX, group)
    # Now exp() cannot overflow. The losses do not depend on `largest`, so it needs no gradient.
    logits = logits - largest.unsqueeze(1)
    normalizer = reduce_from_group(logits.exp().sum(1), group)
    width = logits.size(1)
    local, is_here = own_part(target, rank * width, width)
    of_target = logits.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(~is_here, 0)
    losses = normalizer.log() - reduce_from_group(of_target, group)
    return losses.masked_fill((target < 0) | (target >= P * width), math.nan)


# ==== upper floor =================================================================================
#
# The functions above are tensor parallelism. This is the same GPT, made of the modules below, with
# biases, positions and sequence parallelism. Every rank has all sequences, but outside of f and g
# only the r-th of P chunks of their tokens. Here they lie along dim 0, (T, B, D), so that a chunk
# is contiguous. Seed all ranks alike first: each draws every whole matrix, and keeps its part.
#
#     split = {"group": group, "sequence_parallel": True}
#     embedding = VocabParallelEmbedding(vocabulary, D, **split)  # its weight serves the head, too
#     positions = mark_sum_over_tp(nn.Embedding(T, D))
#     layers = nn.ModuleList()
#     for _ in range(depth):
#         layer = nn.Module()
#         layer.norm_1 = mark_sum_over_tp(nn.LayerNorm(D))
#         layer.attention = ParallelSelfAttention(D, heads, **split)
#         layer.norm_2 = mark_sum_over_tp(nn.LayerNorm(D))
#         layer.up = ColumnParallelLinear(D, 4 * D, **split)
#         layer.down = RowParallelLinear(4 * D, D, **split)
#         layers.append(layer)
#     norm = mark_sum_over_tp(nn.LayerNorm(D))
#     model = nn.ModuleList([embedding, positions, layers, norm])
#
# What mark_sum_over_tp() marks is not split, but is applied to this rank's chunk only. So gradients
# of its copies are parts, and must be summed. In a step, tokens and targets are (T, B), the same on
# every rank:
#
#     x = embedding(tokens)  # (T/P, B, D), this rank's chunk
#     own_positions = torch.arange(T, device=tokens.device).chunk(P)[rank]
#     x = x + positions(own_positions).unsqueeze(1)
#     for layer in layers:
#         x = x + layer.attention(layer.norm_1(x))  # attention sees all T positions
#         y = F.gelu(layer.up(layer.norm_2(x)), approximate="tanh")  # (T, B, 4 D/P)
#         x = x + layer.down(y)
#     logits = column_parallel_linear(norm(x), embedding.weight, **split)  # (T, B, vocabulary/P)
#     logits = logits.flatten(0, 1)  # in the order of targets.flatten()
#     losses = vocab_parallel_cross_entropy(logits, targets.flatten(), vocabulary, group=group)
#     losses.mean().backward()  # on every rank
#     sum_gradients_over_tp(parameters_to_sum_over_tp(model), group)
#     check_gradients_over_tp(model, group)  # in the first step: has a mark been forgotten?
#     optimizer.step()
#
# Without sequence_parallel x is (T, B, D) on every rank, and nothing in this model is marked. To
# train for long, scale the embedding's weights by 0.02, because they are also the head's, and the
# first losses would be large. A norm for clipping counts each parameter once. Let `parts` be the
# gradients of split parameters, and `copies` those of the others. get_total_norm() of ddp.py sums
# squares over groups that it is given, so first of_parts = get_total_norm(parts, [group]), then the
# norm is get_total_norm([of_parts, *copies]).
#
# Sections follow on linear layers, split parameters, modules, vocabulary and loss, copies whose
# gradients are parts, fp16, and cost. Behind a banner of its own stands what large chunks and
# pipelines add to the linear layers.

# ---- linear layers -------------------------------------------------------------------------------
#
# column_parallel_linear() and row_parallel_linear() compute what column_linear() and row_linear()
# do, and send while they compute. With sequence parallelism f gathers the chunks of X, and its
# backward is a reduce-scatter, which sums dX and gives each rank its chunk. g is the reverse. A
# weight W is (out, in), as in nn.Linear, and W' is its transpose, by which F.linear() multiplies:
#
#     column    forward     gather X;    Y = X W' + b
#               backward    gather X;    dX = dY W, and scatter its sum;    dW = dY' X
#     row       forward     Z = Y W', and scatter its sum
#               backward    gather dZ;   dY = dZ W;                         dW = dZ' Y
#
# A column-parallel layer keeps only its chunk of X for backward, which gathers X again while it
# computes dY W. It computes dW while dX is summed. Without sequence parallelism, nothing is
# gathered, and sums are all-reduces.
#
# A function begin_...() returns a function that waits for the result and returns it.
#
# The section is complete without what the end of this file adds for large chunks and for pipelines.
# Three lines marked as additions lead there. For pipelines alone are the argument `defer` and what
# the Functions keep as for_pipelines.


def column_parallel_linear(x, weight, bias=None, group=None, sequence_parallel=False, defer=None):
    """Do what column_linear() does, with messages beside products. weight: (out/P, in).

    sequence_parallel: whether x is this rank's chunk of X, along dim 0. Chunks must have the same
        size on all ranks, or gloo ends the process, and NCCL may hang.
    defer: in a pipeline, its WeightGradStore, see "where a weight's gradient goes".
    Types of x, weight and bias: I, V, V -> V; with sequence_parallel V, V, V -> V.
    """
    x = autocasted(x)  # before x is saved and sent
    return _ColumnLinear.apply(x, weight, bias, group, sequence_parallel, defer)


def row_parallel_linear(x, weight, group=None, sequence_parallel=False, defer=None):
    """Do what row_linear() does without a bias, with messages beside products. weight: (out, in/P).

    sequence_parallel: whether to return this rank's chunk of Z, along dim 0. ValueError is raised
        if P does not divide this dim.
    defer: as in column_parallel_linear().
    Types of x and weight: V, V -> I; with sequence_parallel V, V -> V.
    """
    P = dist.get_world_size(group)
    if sequence_parallel and len(x) % P:
        raise ValueError(f"T={len(x)} is not divisible by tp={P}")
    return _RowLinear.apply(autocasted(x), weight, group, sequence_parallel, defer)


class _ColumnLinear(torch.autograd.Function):
    """Compute y = x W' + b, where x is gathered first if `split`."""

    @staticmethod
    def forward(ctx, x, weight, bias, group, split, defer):
        ctx.arguments = group, split
        ctx.for_pipelines = weight, defer
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        _, y = gather_and_multiply(x, weight, bias, split, group)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        group, split = ctx.arguments
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        dx = dweight = dbias = None
        if wants_weight:
            get_dweight = begin_weight_gradient(dy, x, split, group, *ctx.for_pipelines)
        if wants_x:  # dY W is computed while X is gathered
            get_dx = begin_sum(dy @ weight.to(dy.dtype), split, group, async_op=True)
        if wants_weight:  # dW is computed while dX is summed
            dweight = get_dweight()
        if wants_bias:
            dbias = _rows(dy).sum(0)
        if wants_x:
            dx = get_dx()
        return dx, dweight, dbias, None, None, None


class _RowLinear(torch.autograd.Function):
    """Compute y = the sum of x W' over the ranks, or, if `split`, this rank's chunk of it."""

    @staticmethod
    def forward(ctx, x, weight, group, split, defer):
        ctx.arguments = group, split
        ctx.for_pipelines = weight, defer
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return multiply_and_sum(x, weight, split, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        group, split = ctx.arguments
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        dx = dweight = None
        if wants_x:
            transposed = weight.to(dy.dtype).t()  # F.linear() transposes it back: dX = dY W
            dy, dx = gather_and_multiply(dy, transposed, None, split, group)
        else:
            dy = begin_gather(dy, split, group)()
        if wants_weight:
            get_dweight = begin_weight_gradient(dy, x, False, group, *ctx.for_pipelines)
            dweight = get_dweight()
        return dx, dweight, None, None, None


def gather_and_multiply(x, weight, bias, split, group=None):
    """Return X, which is x, or gathered from all ranks' x if `split`, and X W' + b."""
    if split and by_chunks(x.nbytes, x.device, group):
        return gather_by_chunks(x, weight, bias, group)  # addition: "products by chunks"
    x = begin_gather(x, split, group)()
    return x, F.linear(x, weight, bias)


def multiply_and_sum(x, weight, split, group=None):
    """Return the sum of x W' over the ranks or, if `split`, this rank's chunk of it."""
    if split:
        rows = x.shape[:-1].numel() // dist.get_world_size(group)
        if by_chunks(rows * len(weight) * x.itemsize, x.device, group):
            return scatter_by_chunks(x, weight, group)  # addition: "products by chunks"
    return begin_sum(F.linear(x, weight), split, group)()


def begin_weight_gradient(dy, x, split, group, parameter, defer):
    """Begin to gather x if `split`. Return a function that returns dW = dy' X.

    parameter: the weight itself. The tensor that autograd saves may lack its hooks.
    """
    if defer is not None and is_plain_leaf(parameter):
        # addition: "where a weight's gradient goes"
        return begin_in_pipeline(dy, x, split, group, parameter, defer)
    get_x = begin_gather(x, split, group, async_op=True)
    return lambda: weight_gradient(dy, get_x())


def weight_gradient(dy, x):
    """Return dW = dy' x: (..., out) and (..., in) to (out, in)."""
    return _rows(dy).t() @ _rows(x)


def _rows(x):
    return x.reshape(-1, x.shape[-1])


def begin_gather(x, split, group=None, async_op=False):
    """Gather x along dim 0 if `split`. Return a function that waits for and returns the result."""
    if not split:
        return lambda: x
    whole = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
    work = all_gather_single(whole, x.contiguous(), group=group, async_op=async_op)
    return partial(_when_done, work, whole)


def begin_sum(y, split, group=None, async_op=False):
    """All-reduce y or, if `split`, reduce-scatter it. Return a function as begin_gather() does."""
    if not split:
        return partial(_when_done, all_reduce(y, group=group, async_op=async_op), y)
    chunk = y.new_empty(len(y) // dist.get_world_size(group), *y.shape[1:])
    work = reduce_scatter_single(chunk, y, group=group, async_op=async_op)
    return partial(_when_done, work, chunk)


def _when_done(work, result):
    if work is not None:
        work.wait()
    return result


# ---- parameters that are split -------------------------------------------------------------------
#
# A split parameter is a plain tensor, this rank's part of the whole. Its module's `shards`, a dict
# {name: Shard}, says which part. Every rank has a copy of each parameter without a Shard.


@dataclass(frozen=True)
class Shard:
    """How a parameter is split over `group` along `dim`: each rank has a part of every block.

    blocks: the size of each block in rows (slices along `dim`). Most parameters are one block. A
        matrix that computes several outputs has one for each, say 4 rows for q, 2 for k, 2 for v:

        rows of the whole    0 1 2 3 | 4 5 | 6 7      blocks = (4, 2, 2)
                             q         k     v
        rank 0 of 2          0 1     | 4   | 6        runs() = [(0, 2), (4, 1), (6, 1)]
        rank 1 of 2              2 3 |   5 |   7      runs() = [(2, 2), (5, 1), (7, 1)]

        As one block, rank 0 would have rows 0 to 3, all of q and nothing else. If P does not divide
        a block, parts differ by one row: of 5 rows, rank 0 of 2 has 2, and rank 1 has 3.
    """

    dim: int
    blocks: tuple
    group: dist.ProcessGroup | None = None

    def runs(self):
        """Return (first row in the whole, number of rows) of this rank's part of each block."""
        rank, P = rank_and_size(self.group)
        runs = []
        start = 0
        for block in self.blocks:
            low = rank * block // P
            high = (rank + 1) * block // P
            runs.append((start + low, high - low))
            start += block
        return runs

    def cut(self, full):
        """Return this rank's part of `full`."""
        parts = [full.narrow(self.dim, start, rows) for start, rows in self.runs()]
        return torch.cat(parts, self.dim)


def set_shard(module, name, full, shard):
    """Set parameter `name` to this rank's part of `full`, which must be the same on all ranks.

    The modules below draw one `full` after another from PyTorch's generator, so seed it alike on
    all ranks, and one whole matrix must fit in memory.
    """
    setattr(module, name, nn.Parameter(shard.cut(full.detach())))
    module.shards = getattr(module, "shards", {}) | {name: shard}


def shards_of(model):
    """Return {name: Shard} of the model's split parameters, with all names of one that is tied.

    Each rank has a copy of the other parameters.
    """
    shard_of = {}
    for module in model.modules():
        for name, shard in getattr(module, "shards", {}).items():
            shard_of[getattr(module, name)] = shard
    named = model.named_parameters(remove_duplicate=False)
    return {name: shard_of[parameter] for name, parameter in named if parameter in shard_of}


# ---- modules: linear layers, attention and dropout -----------------------------------------------


class ColumnParallelLinear(nn.Module):
    """A linear layer split by its outputs, which computes X A_r + b_r.

    (..., in) -> (..., out/P); with sequence_parallel (T/P, ..., in) -> (T, ..., out/P).
    out_features: a number, or a tuple if one matrix computes several outputs, such as q, k and v,
        each of which is split. Raises ValueError if P does not divide each number.
    options: group, sequence_parallel and defer of column_parallel_linear().
    Types: x I (V with sequence_parallel) -> V. The weight and the bias are V.
    """

    def __init__(self, in_features, out_features, bias=True, **options):
        super().__init__()
        self.options = options
        blocks = out_features if isinstance(out_features, tuple) else (out_features,)
        shard = Shard(0, blocks, options.get("group"))
        P = dist.get_world_size(shard.group)
        if any(block % P for block in blocks):
            raise ValueError(f"{out_features=} is not divisible by tp={P}")
        weight = torch.randn(sum(blocks), in_features) * in_features**-0.5
        set_shard(self, "weight", weight, shard)
        self.bias = None
        if bias:
            set_shard(self, "bias", torch.zeros(len(weight)), shard)

    def forward(self, x):
        return column_parallel_linear(x, self.weight, self.bias, **self.options)


class RowParallelLinear(nn.Module):
    """A linear layer split by its inputs, which computes Z = (sum over r of Y_r C_r) + b.

    (..., in/P) -> (..., out); with sequence_parallel (T, ..., in/P) -> (T/P, ..., out).
    options: as in ColumnParallelLinear. Raises ValueError if P does not divide in_features.
    Types: x V -> I, the weight is V, the bias I. With sequence_parallel V -> V, and the bias is R.
    """

    def __init__(self, in_features, out_features, bias=True, **options):
        super().__init__()
        self.options = options
        shard = Shard(1, (in_features,), options.get("group"))
        P = dist.get_world_size(shard.group)
        if in_features % P:
            raise ValueError(f"in_features={in_features} is not divisible by tp={P}")
        weight = torch.randn(out_features, in_features) * in_features**-0.5
        set_shard(self, "weight", weight, shard)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        if bias and options.get("sequence_parallel"):  # see mark_sum_over_tp()
            self.sums_over_tp = ("bias",)

    def forward(self, x):
        z = row_parallel_linear(x, self.weight, **self.options)
        return z if self.bias is None else z.add_(self.bias.to(z.dtype))


class ParallelSelfAttention(nn.Module):
    """Causal self-attention split by heads: q, k and v by columns, the output projection by rows.

    x: (T, B, D) -> (T, B, D), both (T/P, B, D) with sequence_parallel. D is hidden, H is heads.
    kv_heads: KV, for grouped-query attention, where H/KV query heads share a key and a value head.
    attention_fn: maps q (B, H/P, T, K) and k, v (B, KV/P, T, K) to (B, H/P, T, K), where K = D/H.
        If it has dropout, it must draw inside a ShardedRandomState, or all ranks' heads get the
        same mask.
    options: group, sequence_parallel and defer of column_parallel_linear().
    Types: x I -> I, with sequence_parallel V -> V. For parameters, see the two linear layers.
    Raises ValueError unless P divides kv_heads, kv_heads divides heads, and heads divides hidden.
    """

    def __init__(self, hidden, heads, kv_heads=None, attention_fn=None, **options):
        super().__init__()
        kv_heads = kv_heads or heads
        P = dist.get_world_size(options.get("group"))
        if kv_heads % P:
            raise ValueError(f"kv_heads={kv_heads} is not divisible by tp={P}")
        if hidden % heads or heads % kv_heads:
            raise ValueError(f"{kv_heads=}, {heads=} and {hidden=}: each must divide the next")
        self.heads = heads // P  # of this rank
        self.kv_heads = kv_heads // P
        self.K = hidden // heads
        self.attention_fn = attention_fn or attention
        qkv = hidden, kv_heads * self.K, kv_heads * self.K
        self.c_attn = ColumnParallelLinear(hidden, qkv, **options)
        self.c_proj = RowParallelLinear(hidden, hidden, **options)

    def forward(self, x):
        qkv = self.c_attn(x)  # (T, B, (H + 2 KV) K / P)
        T, B, _ = qkv.shape
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        qkv = qkv.view(T, B, sum(sizes), self.K).permute(1, 2, 0, 3)  # (B, (H + 2 KV) / P, T, K)
        y = self.attention_fn(*qkv.split(sizes, 1)).permute(2, 0, 1, 3)  # (T, B, H/P, K)
        return self.c_proj(y.reshape(T, B, self.heads * self.K))  # (T, B, D/P) -> (T, B, D)


def attention(q, k, v, dropout=0.0):
    """Apply PyTorch's fused causal attention. Several heads of q may share a head of k and v."""
    if q.shape[1] != k.shape[1] and q.is_cuda and q.element_size() > 2:  # fused GQA needs 16 bits
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    options = {"dropout_p": dropout, "is_causal": True, "enable_gqa": q.shape[1] != k.shape[1]}
    return F.scaled_dot_product_attention(q, k, v, **options)


class ShardedRandomState:
    """Lets ranks, whose generators are seeded alike, draw different random numbers for a while.

        state = ShardedRandomState(device, group)
        x = F.dropout(x, p)  # equal on all ranks, and so is the mask
        with state:
            y = F.dropout(y, p)  # this rank's heads or tokens: each rank has a mask of its own

    `with` seeds the device's generator by the rank and a number that all ranks draw alike from the
    CPU generator. At its end the device's generator is again what it was. checkpoint() restores the
    CPU generator before it runs a function again, so the masks are the same again, too.
    """

    def __init__(self, device, group=None):
        self.rank, self.world_size = rank_and_size(group)
        self.device = torch.device(device)
        self.outside = []  # a generator's states before each `with`, which may be nested

    def __enter__(self):
        seed = torch.randint(2**40, (), device="cpu").item() * self.world_size + self.rank
        if self.device.type == "cuda":
            self.outside.append(torch.cuda.get_rng_state(self.device))
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)
        else:
            self.outside.append(torch.get_rng_state())
            torch.default_generator.manual_seed(seed)  # torch.manual_seed() would seed GPUs, too

    def __exit__(self, *exception):
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.outside.pop(), self.device)
        else:
            torch.set_rng_state(self.outside.pop())


# ---- vocabulary: embedding and loss --------------------------------------------------------------


class VocabParallelEmbedding(nn.Module):
    """An embedding of which each rank holds the rows of its part of the vocabulary.

    tokens: (T, ...) -> (T, ..., D), or (T/P, ..., D) with sequence_parallel, where P must divide T.
    P need not divide num_embeddings. A token outside the vocabulary gives NaN, since an error would
    make the host wait for the device. Types: the weight V -> I, with sequence_parallel V -> V.
    Raises ValueError if there are fewer rows than ranks.
    """

    def __init__(self, num_embeddings, embedding_dim, group=None, sequence_parallel=False):
        super().__init__()
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.num_embeddings = num_embeddings
        P = dist.get_world_size(group)
        if num_embeddings < P:
            raise ValueError(f"{num_embeddings=} is less than tp={P}: a rank would have no rows")
        shard = Shard(0, (num_embeddings,), group)
        set_shard(self, "weight", torch.randn(num_embeddings, embedding_dim), shard)
        self.start, _ = shard.runs()[0]

    def forward(self, tokens):
        local, is_here = own_part(tokens, self.start, len(self.weight))
        table = self.weight
        if not table.is_cuda:  # a CPU would sum the gradients of a row in 16 bits
            table = table.to(torch.promote_types(table.dtype, torch.float32))
        rows = F.embedding(local, table).to(self.weight.dtype)
        unknown = (tokens < 0) | (tokens >= self.num_embeddings)
        fill = rows.new_zeros(()).masked_fill(unknown, math.nan)  # (T, ...): 0, or NaN
        rows = torch.where(is_here.unsqueeze(-1), rows, fill.unsqueeze(-1))
        if not self.sequence_parallel:
            return reduce_from_group(rows, self.group)
        return reduce_scatter_to_group(rows, 0, self.group)


def vocab_parallel_cross_entropy(
    logits, target, vocab_size, ignore_index=-100, group=None, inplace=False
):
    """Compute each token's cross-entropy as split_cross_entropy() does, but in less memory.

    logits: (N, vocab_size/P), this rank's columns, as VocabParallelEmbedding divides them.
    target: (N,) token ids in the order of the logits, the same on every rank. For logits flattened
        from (T, B, vocab_size/P), that is (T, B), too.
    inplace: whether forward writes the gradient over the logits, which no other loss and no metric
        can then use. If not, it takes as much memory as they do.
    Types: logits V -> losses I, so all ranks must use all losses identically.

    Return (N,) losses in fp32 at least: 0 where target is ignore_index, and NaN, as is the
    gradient, where it is otherwise outside the vocabulary. To train on the mean, divide their sum
    by the number of targets that count on all data-parallel ranks: DistributedDataParallel (ddp.py)
    shows how. 3 N numbers are reduced over the group.

    Forward computes the logits' gradient in fp32 at least, and keeps it for backward in their
    dtype. For fp16 logits it stays in fp32, and inplace has no effect, since small numbers would
    be 0 in fp16 before backward multiplies them by the loss scale. Backward overwrites it, so a
    second backward, after one with retain_graph=True, raises RuntimeError.

    Raises ValueError unless logits has as many columns as this rank's part, say if it was gathered.
    """
    (start, width), *_ = Shard(0, (vocab_size,), group).runs()
    if logits.shape[-1] != width:
        part = f"{width} are this rank's part of {vocab_size=}"
        raise ValueError(f"logits have {logits.shape[-1]} columns, and {part}: do not gather them")
    return _CrossEntropy.apply(logits, target, start, vocab_size, ignore_index, group, inplace)


class _CrossEntropy(torch.autograd.Function):
    """Compute log(sum(exp(row))) - row[target] for each row of logits that are split by columns.

    The gradient of a row is softmax(row) - one_hot(target), times that of its loss. Forward turns
    the logits into it step by step, in a tensor x, and keeps it for backward:

        logits       x is                                what is kept
        fp32, fp64   a copy, or with inplace the logits  x
        bf16         a copy in fp32                      a copy in bf16, or with inplace the logits
        fp16         a copy in fp32                      x: fp16 would round small numbers to 0
    """

    @staticmethod
    def forward(ctx, logits, target, start, vocab_size, ignore_index, group, inplace):
        maximum = logits.amax(-1)  # (N,)
        all_reduce(maximum, ReduceOp.MAX, group)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        x = logits.to(dtype, copy=not inplace)  # (N, vocab_size/P)
        x.sub_(maximum.unsqueeze(-1))  # so that exp() cannot overflow
        local, is_here = own_part(target, start, logits.shape[-1])
        local = local.unsqueeze(-1)  # (N, 1)
        of_target = x.gather(-1, local).squeeze(-1).masked_fill(~is_here, 0)
        unknown = (target < 0) | (target >= vocab_size)
        of_target = of_target.masked_fill(unknown, math.nan)
        x.exp_()
        sums = torch.stack([x.sum(-1), of_target])  # (2, N), in one all-reduce
        all_reduce(sums, group=group)
        normalizer, of_target = sums
        x.div_(normalizer.unsqueeze(-1))  # softmax(row)
        minus_one = is_here.to(dtype).neg_()  # at this rank's targets, else 0
        x.scatter_add_(-1, local, minus_one.unsqueeze(-1))  # softmax(row) - one_hot(target)
        ctx.ignored = target == ignore_index
        x.masked_fill_((unknown & ~ctx.ignored).unsqueeze(-1), math.nan)
        if logits.dtype == torch.bfloat16:
            x = logits.copy_(x) if inplace else x.to(logits.dtype)
        ctx.save_for_backward(x.detach())  # without the graph that the logits have
        ctx.dtype = logits.dtype
        return (normalizer.log() - of_target).masked_fill(ctx.ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (grad,) = ctx.saved_tensors
        scale = grad_output.masked_fill(ctx.ignored, 0).unsqueeze(-1)  # (N, 1)
        return grad.mul_(scale).to(ctx.dtype), None, None, None, None, None, None


# ---- copies whose gradients are parts ------------------------------------------------------------
#
# Copies of a parameter have the same gradient if they are used outside of f and g, and every rank
# uses them for all tokens. Two kinds are not used so. A parameter between f and g, such as a norm
# of q, sees this rank's heads only. With sequence parallelism, one outside of them sees this rank's
# tokens only. Then each rank has a part of its gradient, and the parts must be summed once per
# step, as under "upper floor".


def mark_sum_over_tp(module):
    """Mark all parameters of the module as ones whose gradients must be summed over the group.

    Mark a parameter if every rank has a copy of it, but applies it to its own part of the tokens,
    heads or columns only:

        copied parameter                         without sequence parallelism    with it
        norms outside f and g, and positions     no                              yes
        norm of q or k                           yes                             yes
        bias of RowParallelLinear                no                              its class does it
        router and shared experts of MoE         if it has a tp_group            yes

    Nothing finds a parameter that is marked and should not be: the sum of complete gradients is P
    times too large, on all ranks alike. check_gradients_over_tp() finds what is not marked and
    should be. A parameter with elements for each head or column is split: use set_shard(). If a
    module has such parameters and copies, set sums_over_tp to the copies' names, as
    RowParallelLinear does.
    """
    for layer in module.modules():
        layer.sums_over_tp = tuple(name for name, _ in layer.named_parameters(recurse=False))
    return module


def parameters_to_sum_over_tp(model):
    """Return {parameter: Shard or None} of the marked parameters that require a gradient.

    With FullyShardedDataParallel (zero.py) a parameter here is a piece, the part of the flattened
    parameter that this data-parallel rank keeps. Its whole_shape and offset say which part.
    """
    marked = {}
    for module in model.modules():
        shards = getattr(module, "shards", {})
        for name in getattr(module, "sums_over_tp", ()):
            parameter = getattr(module, name)
            if parameter.requires_grad:
                marked[parameter] = shards.get(name)
    return marked


@torch.no_grad()
def sum_gradients_over_tp(parameters, group=None, check=True):
    """Once per step, after its backwards, sum gradients over the group in a single all-reduce.

    A second call would sum what is a sum already, and make it P times too large.

    parameters: from parameters_to_sum_over_tp(), the same on all ranks, also if there are none. A
        gradient that is None counts as zero.
    check: whether to raise ValueError on all ranks if the sum would mix unlike parts, since a
        parameter is split over the group, or since ranks have different pieces of it.
    """
    if dist.get_world_size(group) == 1 or not parameters:
        return
    if check:
        for shard in parameters.values():
            if shard is not None and len(ranks_in_both(group, shard.group)) > 1:
                raise ValueError("a parameter marked by mark_sum_over_tp() is split over the group")
        pieces = [parameter for parameter in parameters if hasattr(parameter, "whole_shape")]
        if pieces:
            named = [((piece.whole_shape, piece.offset), piece.detach()) for piece in pieces]
            check_parameters(named, group)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    gradients = [parameter.grad.detach() for parameter in parameters]
    flat = torch.cat([grad.flatten() for grad in gradients])  # in their widest dtype
    all_reduce(flat, group=group)
    sums = flat.split([grad.numel() for grad in gradients])
    torch._foreach_copy_(gradients, [total.view_as(grad) for total, grad in zip(sums, gradients)])


def check_gradients_over_tp(model, group=None, tolerance=1e-3):
    """Raise ValueError on all ranks if copies of a parameter, or their gradients, differ.

    Copies with different gradients drift apart. Copies that begin unlike stay so. Every parameter
    that no Shard splits over the group is a copy. Kernels may round differently. So a rank's
    gradient, or weight, counts as different if its distance from the mean of all ranks' is a larger
    fraction of the mean's norm than `tolerance`, and than the eps of the parameter's dtype, which
    is 0.008 for bf16.

    Return whether all gradients are finite, since others count as equal: in fp16 the first steps
    may overflow. Each mean takes an all-reduce, so call this on all ranks after the sums of a step,
    until it returns True. Gradients that are all zero do not show a forgotten mark. They occur
    before a projection that is initialised to zero, until its first update. If there is one, call
    this once more in a later step. With zero.py, ranks must have the same pieces: see `apart`
    there.
    """
    if dist.get_world_size(group) == 1:
        return True
    copies = _copies_over(model, group)
    if not copies:
        return True
    of_gradients = _distances_from_mean(map(_gradient_of, copies.values()), group)
    of_weights = _distances_from_mean(copies.values(), group)
    fault = ""
    if names := _too_far(copies, of_gradients, tolerance):
        cure = "use mark_sum_over_tp() or, if each rank has its own part, set_shard()"
        fault += f"gradients of {names} differ between ranks of tp: {cure}. "
        fault += "If they have been clipped, all ranks must use one norm. "
    if names := _too_far(copies, of_weights, tolerance):
        cure = "seed the ranks alike before they create the model"
        fault += f"weights of {names} differ between ranks of tp: {cure}. "
    if fault:
        raise ValueError(fault.strip())
    return not any(map(math.isnan, of_gradients))


def _copies_over(model, group):
    """Return {name: parameter} of the parameters of which all ranks of the group have copies.

    Raises ValueError on all ranks if they have different ones.
    """
    shards = shards_of(model)
    copies = {}
    described = []
    for name, parameter in model.named_parameters():
        # A Shard over another group has only this rank in common with this one.
        is_copy = name not in shards or len(ranks_in_both(group, shards[name].group)) == 1
        if is_copy and parameter.requires_grad:
            copies[name] = parameter
            whole_shape = getattr(parameter, "whole_shape", None)  # of zero.py's piece
            offset = getattr(parameter, "offset", 0)
            described.append(((name, whole_shape, offset), parameter.detach()))
    check_parameters(described, group)
    return copies


def _too_far(copies, distances, tolerance):
    """Return the names of the copies whose distances are too large, joined by commas."""
    names = []
    for (name, parameter), distance in zip(copies.items(), distances):
        if distance > max(tolerance, torch.finfo(parameter.dtype).eps):
            names.append(name)
    return ", ".join(names)


def _gradient_of(parameter):
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@torch.no_grad()
def _distances_from_mean(tensors, group):
    """Return the largest distance of a rank's tensor from the mean, relative to the mean's norm."""
    distances = []
    for tensor in tensors:
        own = tensor.detach()
        own = own.to(torch.promote_types(own.dtype, torch.float32))
        mean = own.clone(memory_format=torch.contiguous_format)
        all_reduce(mean, ReduceOp.AVG, group)
        norm = torch.linalg.vector_norm(mean).clamp(min=1e-30)  # 0 / 1e-30 is 0, inf / inf is NaN
        distances.append(torch.linalg.vector_norm(mean.sub_(own)) / norm)
    distances = torch.stack(distances)
    all_reduce(distances, ReduceOp.MAX, group)  # so that all ranks come to the same conclusion
    return distances.tolist()


# ---- fp16: skip a step on all ranks --------------------------------------------------------------
#
# In fp16 a gradient may overflow on one rank only. torch.amp.GradScaler then skips the step there,
# and copies differ from then on. zero.py's wrapper prevents this. Without it, let ranks share what
# they find, before scaler.unscale_() or scaler.step(). `group` has all ranks of the model, those of
# other pipeline stages, too. Each must have a gradient, or it fails and the others wait for it:
#
#     gradients = [p.grad for p in model.parameters() if p.grad is not None]
#     norm = torch.nn.utils.get_total_norm(gradients)  # not finite if one of them is not
#     all_reduce(norm, group=group)
#     for gradient in gradients:
#         gradient.add_(0 * norm)  # NaN if a rank's norm is infinite or NaN, and 0 otherwise

# ---- cost ----------------------------------------------------------------------------------------


def tensor_parallel_layer_bytes(batch, seq_len, hidden, tp, itemsize=4, regather=False):
    """Return the bytes a rank sends per layer: 8 B T D (P-1)/P elements, 10 if X is regathered."""
    return (5 if regather else 4) * all_reduce_bytes(batch * seq_len * hidden * itemsize, tp)


# ==== additions to the linear layers ==============================================================
#
# Large chunks allow more overlap. A pipeline wants dW later, or where the sum of earlier ones is.

# ---- products by chunks --------------------------------------------------------------------------
#
# With sequence parallelism, a product either needs every rank's chunk of X, or is summed over the
# ranks into chunks of Z. If chunks are large, the linear layers compute one while others travel
# directly between two ranks. For P = 4, where x1 is chunk 1 of X, and y1 a summand of chunk 1 of Z:
#
#             gather_by_chunks(): rank r multiplies         scatter_by_chunks(): rank r computes
#             chunk r - s, then waits for (r - s - 1)       its summand of chunk r + s + 1, sends it
#
#             rank 0    rank 1    rank 2    rank 3          rank 0    rank 1    rank 2    rank 3
#     s = 0   x0 (x3)   x1 (x0)   x2 (x1)   x3 (x2)         y1 -> 1   y2 -> 2   y3 -> 3   y0 -> 0
#     s = 1   x3 (x2)   x0 (x3)   x1 (x0)   x2 (x1)         y2 -> 2   y3 -> 3   y0 -> 0   y1 -> 1
#     s = 2   x2 (x1)   x3 (x2)   x0 (x3)   x1 (x0)         y3 -> 3   y0 -> 0   y1 -> 1   y2 -> 2
#     s = 3   x1        x2        x3        x0              y0        y1        y2        y3
#
# On the left all messages are posted before the first product. On the right, one operation at the
# end adds the four summands of a chunk, so in 16 bits their sum is rounded only once. Either way a
# rank sends (P-1)/P of the whole, as in an all-gather or a reduce-scatter.

# Smaller chunks cost more than they hide, as measured over gloo, and by tests/tools/gpu_time.py.
CHUNK_BYTES = {"cpu": 1 << 21, "cuda": 1 << 24}


def by_chunks(nbytes, device, group):
    """Return whether to multiply by chunks, if each chunk that travels takes so many bytes."""
    return nbytes >= CHUNK_BYTES[device.type] and dist.get_world_size(group) > 1


def gather_by_chunks(x, weight, bias=None, group=None):
    """Gather every rank's x into X. Return X and F.linear(X, weight, bias)."""
    rank, P = rank_and_size(group)
    weight = autocasted(weight)
    whole = x.new_empty(P, *x.shape)
    whole[rank] = x
    y = x.new_empty(P * len(x), *x.shape[1:-1], len(weight))
    parts = y.view(P, *x.shape[:-1], len(weight))
    works = {}
    for step in range(1, P):
        target = (rank + step) % P
        source = (rank - step) % P
        works[source] = exchange(
            [(whole[rank], target)], [(whole[source], source)], group, async_op=True
        )
    _linear_into(parts[rank], x, weight, bias)
    for source, work in works.items():
        work.wait()
        _linear_into(parts[source], whole[source], weight, bias)
    return whole.flatten(0, 1), y  # y is no view, so the layer's caller may change it in place


def scatter_by_chunks(x, weight, group=None):
    """Return this rank's chunk of the sum of F.linear(x, weight) over the ranks."""
    rank, P = rank_and_size(group)
    weight = autocasted(weight)
    inputs = x.chunk(P)
    parts = x.new_empty(P, *inputs[0].shape[:-1], len(weight))  # summands of this rank's chunk
    works = []
    for step in range(1, P):
        target = (rank + step) % P
        source = (rank - step) % P
        part = torch.empty_like(parts[source])
        _linear_into(part, inputs[target], weight)
        works.append(exchange([(part, target)], [(parts[source], source)], group, async_op=True))
    _linear_into(parts[rank], inputs[rank], weight)
    for work in works:
        work.wait()
    return parts.sum(0)


def _linear_into(output, x, weight, bias=None):
    """Write F.linear(x, weight, bias) into `output`. The weight has the dtype of x."""
    operands = x.flatten(0, -2), weight.t()
    if bias is None:
        torch.mm(*operands, out=output.flatten(0, -2))
    else:
        torch.addmm(autocasted(bias), *operands, out=output.flatten(0, -2))


# ---- where a weight's gradient goes --------------------------------------------------------------
#
# A step of a pipeline (pipeline.py) runs the backwards of several microbatches. Its WeightGradStore
# is the argument `defer` of layers, and changes in backward what becomes of dW:
#
#     defer.open          Other stages wait for dX, but nobody for dW. So the store gets a function
#                         that gathers X and computes dW. The pipeline calls it when it would
#                         otherwise wait for messages
#     defer.accumulates   True whenever the pipeline computes dW. If there is a .grad, as from the
#                         second microbatch on, the product itself adds dW to it. This saves memory
#                         for dW, and a pass over it
#
# In both cases autograd gets None for dW, so nothing but .grad may need it: see is_plain_leaf(). A
# function that waits in the store keeps dY, and that of a row-parallel layer with sequence
# parallelism dZ as it was gathered, which takes P times the memory of a chunk.


def begin_in_pipeline(dy, x, split, group, parameter, defer):
    """Do what begin_weight_gradient() does, but return a function that may return None for dW."""

    def compute_later():
        get_x = begin_gather(x, split, group)
        return add_weight_gradient(parameter, defer, dy, get_x())

    if defer.open:
        defer.put(parameter, compute_later)
        return lambda: None  # no gradient in this backward
    get_x = begin_gather(x, split, group, async_op=True)
    return lambda: add_weight_gradient(parameter, defer, dy, get_x())


def is_plain_leaf(weight):
    """Return whether nothing but .grad uses the weight's gradient.

    A hook of register_hook(), or the graph that has computed the weight, needs dW itself, and
    during this backward. Hooks that run after .grad has been accumulated, as those of DDP and ZeRO,
    need only .grad, and autograd calls them also if it gets None.
    """
    return weight.is_leaf and not weight._backward_hooks


def add_weight_gradient(parameter, defer, dy, x):
    """Add dW = dy' x to .grad and return None, if `defer` accumulates. Otherwise return dW.

    A parameter of zero.py has grad_view(), which returns the memory that its .grad is to have.
    """
    has_memory = parameter.grad is not None or hasattr(parameter, "grad_view")
    if not (defer.accumulates and has_memory):
        return weight_gradient(dy, x)  # autograd adds it to .grad, or makes the first .grad of it
    beta = 1
    if parameter.grad is None:
        parameter.grad = parameter.grad_view()
        beta = 0  # this memory is not yet written
    _multiply_into(parameter.grad, _rows(dy).t(), _rows(x), beta)
    return None


def _multiply_into(total, a, b, beta):
    """Set `total` to beta * total + a @ b. beta: 1, or 0 if `total` is yet to be written."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=beta)
    elif a.is_cuda and a.itemsize == 2 and total.dtype == torch.float32:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    elif beta == 0:
        total.copy_(a @ b)  # here, and below, a 16-bit product is rounded first
    else:
        total.add_(a @ b)


# ==== appendix: AlexNet on two GPUs, 2012 =========================================================
#
# A rank has 1/P of every layer's filters. Those of conv2, conv4 and conv5 read this rank's channels
# only, so nothing is sent. Those of conv3 and of the dense layers read all channels, which are
# gathered where the lines cross. In one process, conv2, conv4 and conv5 have groups=P.
#
#               conv1    conv2      conv3    conv4    conv5      dense1     dense2    dense3
#     rank 0     48 ----- 128 -\ /- 192 ---- 192 ---- 128 -\ /- 2048 -\ /- 2048 -\ /- 500
#                               X                           X          X          X
#     rank 1     48 ----- 128 -/ \- 192 ---- 192 ---- 128 -/ \- 2048 -/ \- 2048 -/ \- 500


class AlexNet(nn.Sequential):
    """The network of Krizhevsky, Sutskever and Hinton: (B, 3, 224, 224) -> logits (B, classes).

    sizes: the filters of each layer on all ranks. P must divide them, or ValueError is raised.
    Types: I -> I, parameters are V.
    """

    def __init__(self, sizes=(96, 256, 384, 384, 256, 4096, 4096, 1000), group=None):
        P = dist.get_world_size(group)
        if any(size % P for size in sizes):
            raise ValueError(f"tp={P} does not divide each of {sizes=}")
        c1, c2, c3, c4, c5, d1, d2, d3 = (size // P for size in sizes)  # on this rank
        copy = Apply(copy_to_group, group=group)
        gather = Apply(all_gather_to_group, dim=1, group=group)  # ranks use it differently
        result = Apply(gather_from_group, dim=1, group=group)  # all ranks compute the same loss
        norm = nn.LocalResponseNorm(5, alpha=5e-4, k=2.0)  # over 5 channels
        pool = nn.MaxPool2d(3, stride=2)
        drop = nn.Dropout()  # of gathered values: the same mask on all ranks
        relu = nn.ReLU()
        with ShardedRandomState(torch.get_default_device(), group):  # ranks draw different filters
            super().__init__(
                copy, nn.Conv2d(3, c1, 11, stride=4, padding=2), relu, norm, pool,
                nn.Conv2d(c1, c2, 5, padding=2), relu, norm, pool,  # (B, c2, 13, 13)
                gather, nn.Conv2d(P * c2, c3, 3, padding=1), relu,
                nn.Conv2d(c3, c4, 3, padding=1), relu,
                nn.Conv2d(c4, c5, 3, padding=1), relu, pool, nn.Flatten(),  # (B, 36 c5)
                gather, nn.Linear(P * 36 * c5, d1), relu,
                gather, drop, nn.Linear(P * d1, d2), relu,
                gather, drop, nn.Linear(P * d2, d3), result,
            )  # fmt: skip


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function, **options):
        super().__init__()
        self.function = partial(function, **options)

    def forward(self, x):
        return self.function(x)


def alexnet_bytes(batch, sizes, world_size, itemsize=4):
    """Return the bytes that a rank sends for AlexNet(sizes) in forward and backward."""
    _, c2, _, _, c5, d1, d2, classes = sizes
    read = c2 * 13 * 13 + c5 * 6 * 6 + d1 + d2  # by conv3 and the dense layers
    # It is gathered, and its gradient is reduce-scattered. The logits are gathered only.
    return reduce_scatter_bytes((2 * read + classes) * batch * itemsize, world_size)


# ---- demonstration -------------------------------------------------------------------------------


def _demonstrate():
    rank, P = rank_and_size()
    T = 256 * P
    D = 64 * P
    torch.manual_seed(0)  # every rank draws the whole tensors
    x = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    up = torch.randn(4 * D, D, dtype=torch.float64).div_(D).requires_grad_()
    down = torch.randn(D, 4 * D, dtype=torch.float64, requires_grad=True)
    z = F.linear(F.gelu(F.linear(x, up), approximate="tanh"), down)
    dx, dup, ddown = torch.autograd.grad(z.sum(), (x, up, down))

    def with_sequence_parallel(x, up, down):
        u = column_parallel_linear(x, up, sequence_parallel=True)
        return row_parallel_linear(F.gelu(u, approximate="tanh"), down, sequence_parallel=True)

    for mlp, split in ((split_mlp, False), (with_sequence_parallel, True)):
        own = lambda whole: whole.chunk(P)[rank] if split else whole
        parts = own(x), up.chunk(P)[rank], down.chunk(P, 1)[rank]
        with count_bytes() as traffic:
            own_z = mlp(*parts)
            gradients = torch.autograd.grad(own_z.sum(), parts)
        expected = own(z), own(dx), dup.chunk(P)[rank], ddown.chunk(P, 1)[rank]
        error = max((a - b).abs().max() for a, b in zip((own_z, *gradients), expected))
        claimed = tensor_parallel_layer_bytes(1, T, D, P, 8, regather=split) // 2
        if rank == 0:
            name = "MLP with sequence parallelism" if split else "MLP"
            print(f"{P} ranks, {name}: claimed {claimed} bytes, counted {traffic.bytes()}")
            print(f"largest difference from one process's results and gradients: {error:.1e}")

    sizes = [8 * P] * 5 + [64 * P, 64 * P, 10 * P]
    with count_bytes() as traffic:
        AlexNet(sizes)(torch.randn(2, 3, 224, 224)).sum().backward()
    if rank == 0:
        claimed = alexnet_bytes(2, sizes, P)
        print(f"{P} ranks, AlexNet: claimed {claimed} bytes, counted {traffic.bytes()}")


if __name__ == "__main__":
    run_ranks(_demonstrate)
