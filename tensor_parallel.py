"""Tensor parallelism: every matrix is split over a group's ranks, which work on the same tokens.

A linear layer can be split by its outputs (columns) or by its inputs (rows). Columns first and rows
next need no communication in between, so a non-linearity, or attention over heads, fits there:

    X  --f-->  X A_r  -- GeLU -->  Y_r B_r  --g-->  Z = sum over r of Y_r B_r      A = [A_0 A_1]
               column-parallel      row-parallel                                   B = [B_0; B_1]

    f   forward: identity      backward: all-reduce   X's gradient is a sum over the columns' owners
    g   forward: all-reduce    backward: identity     Z is a sum over the rows' owners

With sequence parallelism X and Z, and all between one layer's Z and the next one's X, are split
along the sequence, which is dim 0. An all-reduce is a reduce-scatter and an all-gather, so that
this costs no more (see sequence_parallel.py for what it saves):

    f   forward: all-gather    backward: reduce-scatter
    g   forward: reduce-scatter                backward: all-gather

Cost per transformer layer (attention and MLP) and step: 2 f and 2 g, so 4 all-reduces of b s h
elements (batch x sequence x width), 8 b s h (t-1)/t elements sent by each of t ranks (P below, tp
in errors). Weights, gradients and optimizer state are divided by t. The vocabulary of V tokens is
split as well, and the loss is taken where the logits are: 3 b s numbers are reduced, not b s V
gathered.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", 2022 (sequence parallelism). Krizhevsky et al., "ImageNet Classification with Deep
Convolutional Neural Networks", 2012 (the same idea, ten years before: alexnet()).

    torchrun --nproc-per-node 4 tensor_parallel.py      claimed and counted bytes;
                                                        the error against one process
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from collectives import (
    ReduceOp, all_gather, all_gather_single, all_gather_to_group, all_reduce, all_reduce_bytes,
    autocasted, check_parameters, copy_to_group, count_bytes, dist, rank_and_size,
    reduce_from_group, reduce_scatter_single, reduce_scatter_to_group, run_ranks,
)

# ---- the idea ------------------------------------------------------------------------------------


def column_linear(x, weight, bias=None, group=None):
    """Y_r = f(X) A_r + b_r: X is equal on every rank, Y_r is this rank's outputs."""
    return F.linear(copy_to_group(x, group), weight, bias)


def row_linear(x, weight, bias=None, group=None):
    """Z = g(Y_r B_r) + b, from this rank's inputs Y_r. Added before g, b would count P times."""
    z = reduce_from_group(F.linear(x, weight), group)
    return z if bias is None else z + bias


# ---- linear layers -------------------------------------------------------------------------------
#
# What a real layer adds: the communication of backward goes on beside the product for the weight;
# with sequence parallelism a rank keeps its own part of X alone; and that product may come later.
# A Shard, below, says which part of a weight is this rank's; set_shard() cuts it.


@dataclass(frozen=True)
class ParallelOptions:
    """What a layer takes by keyword, and passes on to the layers inside.

    group: the ranks over which it is split; None for all.
    sequence_parallel: whether X and Z are split as well, along dim 0.
    save_gathered: whether backward finds all of a gathered X, rather than gathers it again: more
        memory, less communication.
    defer: where a pipeline halves its backwards, its WeightGradStore (see pipeline.py). A backward
        that finds it open computes the gradient of X, and puts a function there for the weight's;
        one that finds that it `adds` adds the weight's to .grad as it computes it.
    """

    group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    save_gathered: bool = False
    defer: object = None


class _ParallelLinear(torch.autograd.Function):
    """forward: [all-gather x] -> x W^T + b -> [all-reduce or reduce-scatter y]
    backward: [all-gather y's gradient] -> [all-reduce or reduce-scatter x's], beside W's product
    """

    @staticmethod
    def forward(ctx, x, weight, bias, column, options):
        ctx.column, ctx.options, ctx.parameters = column, options, (weight, bias)
        gather = column and options.sequence_parallel
        ctx.regather = gather and not options.save_gathered
        whole = all_gather_to_group(x, 0, options.group) if gather else x
        kept = x if ctx.regather else whole
        ctx.save_for_backward(kept if ctx.needs_input_grad[1] else None, weight)
        y = F.linear(whole, weight, bias)
        return y if column else _reduce(y, options)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        (x, weight), group, defer = ctx.saved_tensors, ctx.options.group, ctx.options.defer
        put_off = defer is not None and defer.open
        gathering = grad_x = reducing = None
        if ctx.options.sequence_parallel and not ctx.column:
            grad_y = all_gather_to_group(grad_y, 0, group)
        if ctx.regather and ctx.needs_input_grad[1] and not put_off:
            own, x = x, x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
            gathering = all_gather_single(x, own, group, async_op=True)
        if ctx.needs_input_grad[0]:
            grad_x = grad_y @ weight.to(grad_y.dtype)
            if ctx.column:
                grad_x, reducing = _reduce(grad_x, ctx.options, async_op=True)
        if gathering:
            gathering.wait()
        rows = _rows(grad_y)

        def weight_product():
            whole = all_gather_to_group(x, 0, group) if ctx.regather and not gathering else x
            weight, adds = ctx.parameters[0], defer is not None and defer.adds
            adds = adds and weight.is_leaf and not weight._backward_hooks  # which want the product
            if adds and getattr(weight.grad, "dtype", None) == rows.dtype:
                weight.grad.addmm_(rows.t(), _rows(whole))
                return None
            return (rows.t() @ _rows(whole)).to(weight.dtype)

        def bias_sum():
            return rows.sum(0).to(ctx.parameters[1].dtype)

        grads = [None, None]
        for i, gradient in enumerate((weight_product, bias_sum)):
            if ctx.needs_input_grad[1 + i] and put_off:
                defer.put(ctx.parameters[i], gradient)
            elif ctx.needs_input_grad[1 + i]:
                grads[i] = gradient()
        if reducing:
            reducing.wait()
        return grad_x, *grads, None, None


def _rows(x):
    return x.reshape(-1, x.shape[-1])


def _reduce(y, options, async_op=False):
    """The sum of every rank's y, or this rank's part of its dim 0; and the work to wait for."""
    if not options.sequence_parallel:
        return y, all_reduce(y, group=options.group, async_op=async_op)
    _, world_size = rank_and_size(options.group)
    _check_sequence(len(y), world_size)
    output = y.new_empty(len(y) // world_size, *y.shape[1:])
    return output, reduce_scatter_single(output, y, group=options.group, async_op=async_op)


def _check_sequence(length, world_size):
    if length % world_size:
        raise ValueError(f"sequence length {length} is not divisible by tp={world_size}")


def parallel_linear(x, weight, bias=None, column=True, **options):
    """A linear layer of which this rank has some of the outputs (column) or of the inputs.

    x: (..., in), weight: (out, in), this rank's part. column: as column_linear(), where with
    sequence_parallel x is this rank's part along dim 0 of what is gathered. Otherwise as
    row_linear(), where with sequence_parallel each rank gets a part of the sum along dim 0; a bias
    would be in every summand. options: those of ParallelOptions.
    Raises ValueError for a sequence that P does not divide.
    """
    x = autocasted(x)  # before it is kept and sent
    return _ParallelLinear.apply(x, weight, bias, column, ParallelOptions(**options))


class ColumnParallelLinear(nn.Module):
    """Y_r = X A_r + b_r: X (..., in) is equal on every rank, Y_r (..., out/P) this rank's outputs.

    With sequence_parallel X is (T/P, ..., in), Y_r (T, ..., out/P).
    blocks: ((outputs, parts), ...) where the outputs are several things, such as queries, keys and
        values, each to be cut into its parts (see Shard); by default one, in P parts.
    options: those of ParallelOptions.

    Raises ValueError if a number of parts does not divide its block, or is above P, and if the
    blocks are not out_features together.
    """

    def __init__(self, in_features, out_features, bias=True, blocks=None, **options):
        super().__init__()
        self.options = ParallelOptions(**options)
        group, (_, tp) = self.options.group, rank_and_size(self.options.group)
        shard = Shard(0, blocks or ((out_features, tp),))
        for rows, parts in shard.blocks:
            if rows % parts:
                raise ValueError(f"out_features={rows} is not divisible by tp={parts}")
        rows, parts = zip(*shard.blocks)
        if sum(rows) != out_features or max(parts) > tp:
            raise ValueError(f"blocks={blocks} for out_features={out_features} and tp={tp}")
        weight = torch.randn(out_features, in_features) * in_features**-0.5
        set_shard(self, "weight", weight, shard, group)
        self.bias = None
        if bias:
            set_shard(self, "bias", torch.zeros(out_features), shard, group)

    def forward(self, x):
        return parallel_linear(x, self.weight, self.bias, **vars(self.options))


class RowParallelLinear(nn.Module):
    """Z = sum_r (X_r B_r) + b: X_r (..., in/P) is this rank's inputs, Z (..., out) the same on all.

    With sequence_parallel X_r is (T, ..., in/P) and Z (T/P, ..., out).
    options: those of ParallelOptions.

    Raises ValueError if P does not divide in_features, and in forward if it does not divide T.
    """

    def __init__(self, in_features, out_features, bias=True, **options):
        super().__init__()
        self.options = ParallelOptions(**options)
        group, (_, tp) = self.options.group, rank_and_size(self.options.group)
        if in_features % tp:
            raise ValueError(f"in_features={in_features} is not divisible by tp={tp}")
        weight = torch.randn(out_features, in_features) * in_features**-0.5
        set_shard(self, "weight", weight, Shard(1, ((in_features, tp),)), group)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        if bias and self.options.sequence_parallel:  # each rank's gradient is of its own tokens
            mark_parameter(self, "bias", partial=True)

    def forward(self, x):
        z = parallel_linear(x, self.weight, column=False, **vars(self.options))
        return z if self.bias is None else z.add_(self.bias.to(z.dtype))


# ---- attention -----------------------------------------------------------------------------------


class ParallelSelfAttention(nn.Module):
    """Causal self-attention, split by heads: q, k, v column-parallel, projection row-parallel.

    x: (T, B, D) -> (T, B, D), both (T/P, B, D) with sequence_parallel.
    kv_heads: grouped-query attention, where heads / kv_heads queries share a key and a value. Of
        fewer than P neighbouring ranks hold, and compute, the same one, whose gradient
        sum_partial_gradients() then sums.
    attention_fn(q, k, v): attention itself, from (B, H/P, T, K) and (B, KV/P, T, K) to
        (B, H/P, T, K).
    options: those of ParallelOptions.

    Raises ValueError if kv_heads does not divide heads, P heads, or one of P and kv_heads the
    other.
    """

    def __init__(self, hidden, heads, kv_heads=None, attention_fn=None, **options):
        super().__init__()
        kv_heads = kv_heads or heads
        _, tp = rank_and_size(options.get("group"))
        if hidden % heads or heads % tp or heads % kv_heads or (kv_heads % tp and tp % kv_heads):
            raise ValueError(
                f"hidden={hidden}, heads={heads}, kv_heads={kv_heads} and tp={tp}: heads must "
                "divide hidden, tp and kv_heads heads, and one of tp and kv_heads the other"
            )
        K, kv_parts = hidden // heads, min(tp, kv_heads)
        self.heads, self.kv_heads, self.K = heads // tp, kv_heads // kv_parts, K
        self.attention_fn = attention_fn or attention
        blocks = (hidden, tp), (kv_heads * K, kv_parts), (kv_heads * K, kv_parts)
        out_features = sum(rows for rows, _ in blocks)
        self.c_attn = ColumnParallelLinear(hidden, out_features, blocks=blocks, **options)
        self.c_proj = RowParallelLinear(hidden, hidden, **options)

    def forward(self, x):
        qkv = self.c_attn(x)  # (T, B, (H + 2 KV) K / P)
        T, B, _ = qkv.shape
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        qkv = qkv.view(T, B, sum(sizes), self.K).permute(1, 2, 0, 3)  # (B, (H + 2 KV) / P, T, K)
        y = self.attention_fn(*qkv.split(sizes, 1)).permute(2, 0, 1, 3)  # (T, B, H/P, K)
        return self.c_proj(y.reshape(T, B, self.heads * self.K))  # (T, B, D/P) -> (T, B, D)


def attention(q, k, v, dropout=0.0, causal=True):
    """PyTorch's fused attention, causal or of all keys. Heads of k and v serve several of q's."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and q.element_size() > 2:  # the only kernel for these takes no groups
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=causal, enable_gqa=grouped
    )


# ---- vocabulary: embedding and loss --------------------------------------------------------------


class _Lookup(torch.autograd.Function):
    """forward: F.embedding; backward: each row's gradients are summed in fp32 at least"""

    @staticmethod
    def forward(ctx, ids, weight):
        ctx.save_for_backward(ids)
        ctx.rows = len(weight)
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (ids,) = ctx.saved_tensors
        grad = grad_output.to(torch.promote_types(grad_output.dtype, torch.float32))
        return None, torch.ops.aten.embedding_dense_backward(grad, ids, ctx.rows, -1, False)


class VocabParallelEmbedding(nn.Module):
    """An embedding (V, D) of which a rank holds the rows of its part of the vocabulary.

    tokens: (T, ...) -> (T, ..., D), or (T/P, ..., D) with sequence_parallel. A rank looks up the
    tokens it owns and puts zeros for the others; the sum over the ranks is complete. P need not
    divide V: parts then differ by one. A token outside the vocabulary gets NaN, since for an error
    a GPU would have to stop.
    Raises ValueError if V < P, and in forward if P does not divide the T of sequence_parallel.
    """

    def __init__(self, num_embeddings, embedding_dim, group=None, sequence_parallel=False):
        super().__init__()
        rank, world_size = rank_and_size(group)
        if num_embeddings < world_size:
            raise ValueError(f"num_embeddings={num_embeddings} is less than tp={world_size}")
        self.group, self.sequence_parallel = group, sequence_parallel
        self.num_embeddings = num_embeddings
        shard = Shard(0, ((num_embeddings, world_size),))
        set_shard(self, "weight", torch.randn(num_embeddings, embedding_dim), shard, group)
        ((self.start, _),) = shard.rows_of(rank, world_size)

    def forward(self, tokens):
        local = tokens - self.start
        out_of_range = (local < 0) | (local >= len(self.weight))
        rows = _Lookup.apply(local.masked_fill(out_of_range, 0), self.weight)
        unknown = (tokens < 0) | (tokens >= self.num_embeddings)
        others = rows.new_zeros(()).masked_fill(unknown, math.nan)  # (T, ...): 0, or NaN
        rows = torch.where(out_of_range.unsqueeze(-1), others.unsqueeze(-1), rows)
        if not self.sequence_parallel:
            return reduce_from_group(rows, self.group)
        _check_sequence(len(rows), dist.get_world_size(self.group))
        return reduce_scatter_to_group(rows, 0, self.group)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """forward: log sum exp(logits) - logits[target], over all ranks' columns;
    backward: softmax - one-hot, which forward leaves, in the dtype of the logits
    """

    @staticmethod
    def forward(ctx, logits, target, start, ignore_index, group, inplace):
        maximum = logits.amax(-1)  # (N,)
        all_reduce(maximum, ReduceOp.MAX, group)
        grad = logits.to(torch.promote_types(logits.dtype, torch.float32))
        grad = grad.clone() if grad is logits and not inplace else grad
        grad.sub_(maximum.unsqueeze(-1))  # (N, V/P); every exponential is at most 1

        local = target - start
        out_of_range = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(out_of_range, 0).unsqueeze(-1)  # (N, 1)
        own_target = grad.gather(-1, local).squeeze(-1).masked_fill(out_of_range, 0)
        rank, world_size = rank_and_size(group)
        unknown = (target < start) & (rank == 0)
        unknown |= (target >= start + logits.shape[-1]) & (rank == world_size - 1)
        own_target.masked_fill_(unknown, math.nan)

        grad.exp_()
        sums = torch.stack([grad.sum(-1), own_target])  # (2, N): one message for both
        all_reduce(sums, group=group)
        normalizer, target_logit = sums
        grad.div_(normalizer.unsqueeze(-1))
        minus_one = out_of_range.to(grad.dtype).sub_(1)  # of this rank's targets, or else 0
        grad.scatter_add_(-1, local, minus_one.unsqueeze(-1))

        ctx.ignored = target == ignore_index
        ctx.grad = logits.copy_(grad) if inplace else grad.to(logits.dtype)
        return (normalizer.log() - target_logit).masked_fill(ctx.ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        grad, ctx.grad = ctx.grad, None
        if grad is None:
            raise RuntimeError("the gradient of vocab_parallel_cross_entropy is there only once")
        scale = grad_output.masked_fill(ctx.ignored, 0).unsqueeze(-1)  # (N, 1)
        return grad.mul_(scale), *5 * [None]


def vocab_parallel_cross_entropy(
    logits, target, vocab_start=0, ignore_index=-100, group=None, inplace=False
):
    """Cross-entropy of each token, from logits that stay split over the vocabulary.

    logits: (N, V_r), the columns from vocab_start on, in the order of the ranks.
    target: (N,) token ids, the same on every rank.
    inplace: whether backward finds the logits' gradient in the logits, which are lost, rather than
        in a copy of their dtype. It is computed in fp32 at least: of 16 bit logits forward has
        such a copy for a while.

    Returns (N,) losses in fp32 at least, the same on every rank: 0 where target is ignore_index,
    NaN where it is otherwise outside the vocabulary. 3 N numbers are reduced over the group.
    Backward runs once: RuntimeError, if it does so again.
    """
    return _VocabParallelCrossEntropy.apply(
        logits, target, vocab_start, ignore_index, group, inplace
    )


def vocab_parallel_max(logits, start, group=None):
    """[the largest of all logits, its token], of one token's logits (V/P,) from `start` on."""
    value, index = logits.max(0)
    own = torch.stack([value, (start + index).to(value)])
    every = own.new_empty(rank_and_size(group)[1], 2)
    all_gather_single(every, own, group)
    return every[every[:, 0].argmax()].clone()


# ---- dropout -------------------------------------------------------------------------------------


class ShardedRandomState:
    """Random numbers of its own for each rank: `with state: F.dropout(...)`.

    Activations that all ranks hold must lose the same elements on each: they use PyTorch's global
    state, seeded alike over the group. Inside attention each rank has heads of its own, and equal
    masks would repeat one pattern over the heads; with sequence parallelism each has its own part
    of the sequence. There this replaces the global state for a while. It is seeded by the rank and
    by a draw from the global state, so that whoever replays that (recomputation) replays both. Uses
    do not nest.
    """

    def __init__(self, device, group=None):
        self.rank, self.world_size = rank_and_size(group)
        on_gpu = torch.device(device).type == "cuda"
        self.module = torch.cuda if on_gpu else torch
        self.manual_seed = torch.cuda.manual_seed if on_gpu else torch.default_generator.manual_seed

    def __enter__(self):
        seed = torch.randint(2**40, ()).item()
        self.outside = self.module.get_rng_state()
        self.manual_seed(seed * self.world_size + self.rank)

    def __exit__(self, *exception):
        self.module.set_rng_state(self.outside)


# ---- 2012: AlexNet on two GPUs -------------------------------------------------------------------
#
# Each GPU has half of every layer's filters. Those of conv2, 4 and 5 read only the channels of
# their own GPU, which costs nothing; conv3 and the dense layers read both. On one device a layer
# that reads its own half is a convolution in two groups.
#
#               conv1    conv2    conv3    conv4    conv5    dense    dense    dense
#     GPU 0   image-48 --- 128 -\ / 192 --- 192 --- 128 -\ / 2048 -\ / 2048 -\ / 500
#                                X                        X         X         X
#     GPU 1   image-48 --- 128 -/ \ 192 --- 192 --- 128 -/ \ 2048 -/ \ 2048 -/ \ 500


class _Halved(nn.Module):
    """A convolution or dense layer whose outputs are split over the group, with what follows it.

    reads_all: whether it reads all channels, gathered from the group, or its own rank's.
    """

    def __init__(self, layer, after, reads_all, group):
        super().__init__()
        _, world_size = rank_and_size(group)
        self.layer, self.after, self.reads_all, self.group = layer, after, reads_all, group
        for name, full in list(layer.named_parameters()):
            set_shard(layer, name, full, Shard(0, ((len(full), world_size),)), group)
        if isinstance(layer, nn.Conv2d):
            layer.groups = 1

    def forward(self, x):
        if self.reads_all:
            x = all_gather_to_group(x, 1, self.group)
        return self.after(self.layer(x))


def alexnet(width=96, dense=4096, classes=1000, group=None):
    """AlexNet over the group's ranks, two in the paper, as nn.Sequential of its eight layers.

    Images (B, 3, 224, 224), on every rank, -> logits (B, classes / P) of this rank's classes.
    width: filters of the first layer; the others have 8/3, 4, 4 and 8/3 times as many. Without the
    paper's dropout. A layer's `layer` is what nn.Conv2d with groups=P or nn.Linear would be, cut,
    for the same seed. Raises ValueError if P does not divide a layer.
    """
    _, P = rank_and_size(group)
    filters = [width, width * 8 // 3, width * 4, width * 4, width * 8 // 3]
    outputs = [*filters, dense, dense, classes]
    if any(n % P for n in outputs):
        raise ValueError(f"layers of {outputs} filters: world_size={P} does not divide them all")
    norm = lambda: nn.LocalResponseNorm(5, k=2.0)
    pool = lambda: nn.MaxPool2d(3, 2)
    relu, flat = nn.ReLU, nn.Flatten()
    layers = [  # the layer, what follows it, and whether it reads all channels
        (nn.Conv2d(3, filters[0], 11, 4, 2), [relu(), norm(), pool()], False),
        (nn.Conv2d(filters[0], filters[1], 5, 1, 2, groups=P), [relu(), norm(), pool()], False),
        (nn.Conv2d(filters[1], filters[2], 3, 1, 1), [relu()], True),
        (nn.Conv2d(filters[2], filters[3], 3, 1, 1, groups=P), [relu()], False),
        (nn.Conv2d(filters[3], filters[4], 3, 1, 1, groups=P), [relu(), pool(), flat], False),
        (nn.Linear(filters[4] * 36, dense), [relu()], True),
        (nn.Linear(dense, dense), [relu()], True),
        (nn.Linear(dense, classes), [], True),
    ]
    parts = [_Halved(layer, nn.Sequential(*then), reads, group) for layer, then, reads in layers]
    return nn.Sequential(*parts)


# ---- what a rank holds of a parameter ------------------------------------------------------------


def shard_sizes(size, world_size):
    """How `size` rows are dealt out: as evenly as can be, the first ranks taking the remainder."""
    return [size // world_size + (rank < size % world_size) for rank in range(world_size)]


@dataclass(frozen=True)
class Shard:
    """How a parameter is split along `dim`.

    blocks: (rows, parts) of each of the blocks it consists of, such as the queries', the keys' and
    the values' of a fused matrix. A block is cut into `parts`; where there are fewer than ranks,
    neighbouring ranks hold the same part. It is an attribute of the parameter, `shard`.
    """

    dim: int
    blocks: tuple

    def rows_of(self, rank, world_size):
        """(first row in the whole, rows) of the rank's part of each block."""
        found, begin = [], 0
        for rows, parts in self.blocks:
            sizes, part = shard_sizes(rows, parts), rank * parts // world_size
            found.append((begin + sum(sizes[:part]), sizes[part]))
            begin += rows
        return found

    def cut(self, full, group=None):
        """This rank's part of `full`."""
        found = self.rows_of(*rank_and_size(group))
        return torch.cat([full.narrow(self.dim, begin, rows) for begin, rows in found], self.dim)


class _Marked(dict):
    """nn.Module's dict of parameters, where what takes a parameter's place takes its attributes.

    So `shard` and `partial` outlive copy.deepcopy, load_state_dict(assign=True) and to_empty(), all
    of which put in other parameters. marks: {name: {attribute: value}}.
    """

    marks = {}

    def __setitem__(self, name, parameter):
        super().__setitem__(name, parameter)
        if parameter is not None:
            for mark, value in self.marks.get(name, {}).items():
                vars(parameter).setdefault(mark, value)


def mark_parameter(module, name, **marks):
    """Set attributes of the module's parameter of this name, and of what takes its place."""
    if not isinstance(module._parameters, _Marked):
        module._parameters = _Marked(module._parameters)
    parameters = module._parameters
    parameters.marks = parameters.marks | {name: parameters.marks.get(name, {}) | marks}
    parameters[name] = parameters[name]  # marks the one that is there


def mark_partial(module):
    """Mark parameters of which each rank uses its copy for a part of the tokens only."""
    for part in module.modules():
        for name, _ in part.named_parameters(recurse=False):
            mark_parameter(part, name, partial=True)
    return module


def set_shard(module, name, full, shard, group=None):
    """Have the module's parameter of this name be this rank's part of `full`.

    `full` is drawn on every rank alike: so initial weights depend on the seed and not on P.
    """
    setattr(module, name, nn.Parameter(shard.cut(full.detach(), group)))
    mark_parameter(module, name, shard=shard)


def is_sharded(parameter):
    """Whether the ranks hold different parts of this parameter, rather than copies of it."""
    return hasattr(parameter, "shard")


# FSDP cuts a rank's part further, into flat pieces. Such a parameter has two more attributes:
# `whole_shape`, of the part, and `first`, where in the flat part the piece begins.


def part_of(parameter):
    """(Shape of this rank's part, its first element that is here): ZeRO leaves a flat piece."""
    return getattr(parameter, "whole_shape", parameter.shape), getattr(parameter, "first", 0)


def take_shard(full, parameter, group=None):
    """This rank's part of `full`, laid out as `parameter` is. Copies are returned whole."""
    part = parameter.shard.cut(full, group) if is_sharded(parameter) else full
    if not hasattr(parameter, "whole_shape"):
        return part
    return part.flatten()[parameter.first : parameter.first + parameter.numel()]


def gather_shards(local, parameter, group=None):
    """The inverse: the full tensor from every rank's `local`, say `parameter` or its gradient.

    Raises ValueError for a piece of a part: FSDP's group has to gather that first.
    """
    shape = list(getattr(parameter, "whole_shape", local.shape))
    if list(local.shape) != shape:
        raise ValueError(f"a piece {tuple(local.shape)} of {tuple(shape)} cannot be gathered alone")
    if not is_sharded(parameter):
        return local.detach().clone()
    dim, (_, world_size) = parameter.shard.dim, rank_and_size(group)
    places = [parameter.shard.rows_of(rank, world_size) for rank in range(world_size)]
    empty = lambda sizes: local.new_empty([*shape[:dim], sum(sizes), *shape[dim + 1 :]])
    parts = [empty(rows for _, rows in place) for place in places]
    all_gather(parts, local.detach().contiguous(), group)
    full = empty(rows for rows, _ in parameter.shard.blocks)
    for place, part in zip(places, parts):
        blocks = part.split([rows for _, rows in place], dim)
        for (begin, rows), block in zip(place, blocks):
            full.narrow(dim, begin, rows).copy_(block)
    return full


class _Range(NamedTuple):
    """Elements `begin` to `end` of a rank's flat part: number `part` of the `parts` of a block."""

    begin: int
    end: int
    part: int
    parts: int
    largest: int  # elements of the largest part


def _ranges(parameter, rank, world_size):
    """What a rank has of each block. Where all have copies, that is one block in one part."""
    shape, _ = part_of(parameter)
    if not is_sharded(parameter):
        return [_Range(0, shape.numel(), 0, 1, shape.numel())]
    dim, blocks = parameter.shard.dim, parameter.shard.blocks
    if dim > 0 and len(blocks) > 1:
        raise ValueError(f"blocks {blocks} along dim={dim} of {tuple(shape)} are not ranges of it")
    width, begin, ranges = math.prod(shape[:dim] + shape[dim + 1 :]), 0, []  # width: of a row
    for (whole, parts), (_, rows) in zip(blocks, parameter.shard.rows_of(rank, world_size)):
        largest, part = shard_sizes(whole, parts)[0] * width, rank * parts // world_size
        ranges.append(_Range(begin, begin + rows * width, part, parts, largest))
        begin += rows * width
    return ranges


def unique_ranges(parameter, group=None):
    """[(begin, end)] of the flattened elements that no lower rank of the group has too.

    Over the ranks they are the whole, once: what a norm has to count. They are counted in this
    rank's part; one of FSDP's pieces has what is between its `first` element and its last.
    """
    rank, world_size = rank_and_size(group)
    below = lambda parts: (rank - 1) * parts // world_size  # the part of the rank below, or -1
    ranges = _ranges(parameter, rank, world_size)
    return [(found.begin, found.end) for found in ranges if below(found.parts) < found.part]


@torch.no_grad()
def sum_partial_gradients(parameters, group=None, check=True):
    """After backward: sum over the group what each rank has only a part of. One all-reduce.

    That is the gradient of what is marked as partial, and of what several ranks hold of a sharded
    parameter; one that a rank has not used counts as zero. FSDP's pieces must be the same ranges on
    all ranks, which one message more makes sure of: ValueError on all of them if they are not.
    check: False where they are known to be.
    """
    rank, world_size = rank_and_size(group)
    shared = _shared_ranges(parameters, rank, world_size) if world_size > 1 else []
    if not shared:
        return
    if check:
        _check_pieces([parameter for parameter, _ in shared], group)
    own, places = [], []
    for parameter, (begin, end, part, parts, largest) in shared:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        parameter.grad, (_, first) = parameter.grad.contiguous(), part_of(parameter)
        own.append(parameter.grad.view(-1)[max(0, begin - first) : max(0, end - first)])
        # a row for each part: the ranks that hold a part meet in its row, and others add zeros
        places.append((part, parts, len(own[-1]) + largest - (end - begin)))
    lengths = [parts * length for _, parts, length in places]
    dtype = max((gradient.dtype for gradient in own), key=lambda dtype: dtype.itemsize)
    flat = own[0].new_zeros(sum(lengths), dtype=dtype)
    rows = [
        total.view(parts, length)[part, : len(gradient)]
        for gradient, total, (part, parts, length) in zip(own, flat.split(lengths), places)
    ]
    torch._foreach_copy_(rows, own)
    all_reduce(flat, group=group)
    torch._foreach_copy_(own, rows)


def _shared_ranges(parameters, rank, world_size):
    """[(parameter, a range of it)] for which other ranks have a gradient, too."""
    shared = []
    for parameter in parameters:
        is_shared = is_sharded(parameter) or getattr(parameter, "partial", False)
        if parameter.requires_grad and is_shared:
            ranges = _ranges(parameter, rank, world_size)
            shared += [(parameter, found) for found in ranges if found.parts < world_size]
    return shared


def _check_pieces(parameters, group):
    if any(hasattr(parameter, "whole_shape") for parameter in parameters):
        where = lambda p: f"elements from {part_of(p)[1]} of {tuple(part_of(p)[0])}"
        check_parameters([(where(parameter), parameter) for parameter in parameters], group)


def boxes_of(shape, begin, end):
    """The elements begin to end of a flattened tensor as boxes: [(place of the first, sizes)].

    In order: what there is of a row's tail, whole rows, what there is of a row's head.
    """
    if len(shape) == 1:
        return [((begin,), (end - begin,))] if begin < end else []
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    inside = lambda number, begin, end: [
        ((number, *place), (1, *sizes)) for place, sizes in boxes_of(shape[1:], begin, end)
    ]
    if first > last:
        return inside(last, begin - last * row, end - last * row)
    whole = ((first, *[0] * len(shape[1:])), (last - first, *shape[1:]))
    head = inside(first - 1, begin - (first - 1) * row, row) if begin < first * row else []
    return head + [whole] * (first < last) + inside(last, 0, end - last * row)


def views_in_whole(parameter, tensor, ranges, dim, parts, rows):
    """(Shape of the whole, {place in it: view}) of ranges of this rank's part.

    tensor: the parameter, or one like it. Along `dim` this rank has `parts`, [(first row, rows)],
    of the whole's rows.
    """
    shape, first = part_of(parameter)
    flat, views = tensor.detach().view(-1), {}
    for begin, end in ranges:
        for place, sizes in boxes_of(shape, begin, end):
            box, row = flat[begin - first :][: math.prod(sizes)].view(sizes), 0
            for start, count in parts:
                low, high = max(place[dim], row), min(place[dim] + sizes[dim], row + count)
                if low < high:
                    there = *place[:dim], start + low - row, *place[dim + 1 :]
                    views[there] = box.narrow(dim, low - place[dim], high - low)
                row += count
            begin += box.numel()
    return (*shape[:dim], rows, *shape[dim + 1 :]), views


# ---- cost ----------------------------------------------------------------------------------------


def tensor_parallel_layer_bytes(batch, seq_len, hidden, tp, itemsize=4, regather=False):
    """Bytes a rank sends per transformer layer, forward and backward: 8 b s h (t-1)/t elements.

    With sequence parallelism they are the same, or 10 if backward gathers the inputs again.
    """
    all_reduces = 5 if regather else 4
    return all_reduces * all_reduce_bytes(batch * seq_len * hidden * itemsize, tp)


def compute_bound_degree(ffn, flops, bandwidth, itemsize=2):
    """Up to which degree an MLP of that width computes for longer than it sends.

    flops, bandwidth: a rank's, per second. Forward: 4 h F / t FLOPs per token, for an all-reduce of
    about 2 h elements. Austin et al., "How to Scale Your Model", 2025.
    """
    return 2 * ffn / itemsize * bandwidth / flops


# ---- demonstration -------------------------------------------------------------------------------


def _demonstrate():
    rank, world_size = rank_and_size()
    B, T, D, V = 8, 128, 64 * world_size, 101
    torch.manual_seed(0)
    shapes = {"up": (4 * D, D), "down": (D, 4 * D), "head": (V, D)}
    weights = [torch.randn(shape, dtype=torch.float64) * D**-0.5 for shape in shapes.values()]
    up, down, head = (weight.requires_grad_() for weight in weights)
    x, target = torch.randn(T * B, D, dtype=torch.float64), torch.randint(V, (T * B,))
    y = x + F.linear(F.gelu(F.linear(x, up)), down)
    loss = F.cross_entropy(F.linear(y, head), target)
    expected = torch.autograd.grad(loss, [up, down, head])

    layers = [ColumnParallelLinear(D, 4 * D, False), RowParallelLinear(4 * D, D, False)]
    layers.append(VocabParallelEmbedding(V, D).double())
    for layer, weight in zip(layers, weights):
        layer.weight.data = take_shard(weight.detach(), layer.weight)
    column, row, embedding = layers
    with count_bytes() as traffic:
        y = x.clone().requires_grad_()
        y = y + row(F.gelu(column(y)))
        counted = traffic.bytes()
        logits = parallel_linear(y, embedding.weight)
        losses = vocab_parallel_cross_entropy(logits, target, embedding.start, inplace=True)
        losses.mean().backward()
    gathered = [gather_shards(layer.weight.grad, layer.weight) for layer in layers]
    error = max((a - b).abs().max().item() for a, b in zip(gathered, expected))
    if rank == 0:
        claimed = all_reduce_bytes(B * T * D * 8, world_size)
        print(f"{world_size} ranks, MLP forward: claimed {claimed} bytes, counted {counted}")
        print(f"largest difference from one process's gradients: {error:.1e}\n")
    if world_size == 2:
        _demonstrate_alexnet(rank)


def _demonstrate_alexnet(rank):
    torch.manual_seed(0)
    net, x, names = alexnet(), torch.randn(2, 3, 224, 224), "conv1 conv2 conv3 conv4 conv5".split()
    for name, part in zip([*names, *3 * ["dense"]], net):
        with count_bytes() as traffic:
            x = part(x.detach().requires_grad_())
            torch.autograd.grad(x.sum(), list(part.parameters()))
        reads = "both halves" if part.reads_all else "its own half"
        if rank == 0:
            print(f"{name}: {tuple(x.shape)} a rank, reads {reads}: {traffic.bytes():9} bytes sent")


if __name__ == "__main__":
    run_ranks(_demonstrate)
