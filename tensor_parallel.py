"""Tensor parallelism: every matrix is split over a group's ranks, which work on the same tokens.

A linear layer can be split by its outputs (columns) or by its inputs (rows). Columns first and rows
next need no communication in between, so a non-linearity, or attention over heads, fits there:

    X  --f-->  X A_r  -- GeLU -->  Y_r B_r  --g-->  Z = sum over r of Y_r B_r      A = [A_0 A_1]
               column-parallel      row-parallel                                   B = [B_0; B_1]

    f   forward: identity      backward: all-reduce   X's gradient is a sum over the columns' owners
    g   forward: all-reduce    backward: identity     Z is a sum over the rows' owners

With sequence parallelism (sequence_parallel.py) X and Z are split along the sequence, dim 0: then
f is an all-gather, with a reduce-scatter as backward, and g the opposite.

A rank holds   1/t of every matrix and of the vocabulary (t ranks; P below, tp in errors), of their
               gradients and optimizer states, of Y and the logits; all of norms, X and Z
It sends       per transformer layer and microbatch 4 all-reduces, 2 f and 2 g, of b s h elements
               (batch, sequence, width): 8 b s h (t-1)/t; embedding, head: one each; loss: those of
               3 b s elements. With sequence parallelism 10 b s h (t-1)/t, as backward gathers X
               again, and once a step gradients of norms and biases
Overlap        in backward f runs beside the product for the weight (see _ParallelLinear, a list of
               events); in forward there is none, as what follows needs what f and g bring
PyTorch's      DTensor and parallelize_module() split the same matrices: a parameter knows the whole
               there, and each operation finds out what to send. Here it is a plain tensor, a table
               of its module, `shards`, says which part, and the layer says what it sends.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", 2022 (sequence parallelism). Krizhevsky et al., "ImageNet Classification with Deep
Convolutional Neural Networks", 2012 (the same idea, ten years before: alexnet()).

    torchrun --nproc-per-node 4 tensor_parallel.py    bytes, claimed and counted, and the error
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from collectives import (
    ReduceOp, all_gather_single, all_gather_to_group, all_reduce, all_reduce_bytes,
    autocasted, copy_to_group, count_bytes, dist, gather_objects, rank_and_size,
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


# ---- shards --------------------------------------------------------------------------------------
#
# A parameter is a plain tensor, this rank's part of the whole. Its module has a table, `shards`:
# {name: Shard}, which says which part. Each rank has a copy of a parameter without a Shard.


@dataclass(frozen=True)
class Shard:
    """How a parameter is split over `group` along `dim`: each rank has a part of every block.

    blocks: the number of rows of each block. A fused matrix has one each for q, k and v.

        whole, two blocks     0 1 2 3 | 4 5          of 4 and 2 rows
        rank 0 of 2           0 1     | 4            runs() = [(0, 2), (4, 1)]
        rank 1 of 2               2 3 |   5          runs() = [(2, 2), (5, 1)]
    """

    dim: int
    blocks: tuple
    group: dist.ProcessGroup | None = None

    def runs(self):
        """Return (first row in the whole, number of rows) of this rank's part of each block."""
        rank, world_size = rank_and_size(self.group)
        runs = []
        begin = 0
        for block in self.blocks:
            low, high = rank * block // world_size, (rank + 1) * block // world_size
            runs.append((begin + low, high - low))
            begin += block
        return runs

    def cut(self, full):
        """Return this rank's part of `full`."""
        parts = [full.narrow(self.dim, begin, rows) for begin, rows in self.runs()]
        return torch.cat(parts, self.dim)


def set_shard(module, name, full, shard):
    """Make this rank's part of `full` the module's parameter of this name.

    Every rank draws the same `full`, so initial weights depend on the seed and not on P.
    """
    setattr(module, name, nn.Parameter(shard.cut(full.detach())))
    module.shards = getattr(module, "shards", {}) | {name: shard}


def shards_of(model):
    """Return {name: Shard} of the model's split parameters. Each rank has a copy of the others."""
    return {
        f"{path}.{name}" if path else name: shard
        for path, module in model.named_modules()
        for name, shard in getattr(module, "shards", {}).items()
    }


# ---- linear layers -------------------------------------------------------------------------------
#
# What a real layer adds: the communication of backward goes on beside the product for the weight;
# with sequence parallelism a rank keeps its own part of X alone; and that product may come later.


class _ParallelLinear(torch.autograd.Function):
    """forward: [all-gather x] -> x W^T + b -> [all-reduce or reduce-scatter y]

    backward, by columns                    backward, by rows
      (sp) begin to gather x again            (sp) all-gather y's gradient
      x's gradient = y's @ W                  x's gradient = y's @ W
      begin to reduce, or scatter, it         those of W and b, or put them off
      (sp) wait for x
      W's gradient = y's^T @ x, or put that off, and the gathering of x with it
      b's gradient = the sum of y's, or put that off
      wait for x's gradient
    """

    @staticmethod
    def forward(ctx, x, weight, bias, column, split, group, defer):
        ctx.column, ctx.split, ctx.group, ctx.defer = column, split, group, defer
        # the parameters themselves: hooks and the store go by identity
        ctx.gathers, ctx.parameters = column and split, (weight, bias)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        whole = all_gather_to_group(x, 0, group) if ctx.gathers else x
        y = F.linear(whole, weight, bias)
        return y if column else _reduce(y, split, group)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        (x, weight), group, defer = ctx.saved_tensors, ctx.group, ctx.defer
        put_off = defer is not None and defer.open
        whole, gathering, grad_x, reducing = x, None, None, None
        if ctx.split and not ctx.column:
            grad_y = all_gather_to_group(grad_y, 0, group)
        if ctx.gathers and ctx.needs_input_grad[1] and not put_off:
            whole = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
            gathering = all_gather_single(whole, x, group, async_op=True)
        if ctx.needs_input_grad[0]:
            grad_x = grad_y @ weight.to(grad_y.dtype)
            if ctx.column:
                grad_x, reducing = _reduce(grad_x, ctx.split, group, async_op=True)
        if gathering:
            gathering.wait()
        rows = grad_y.reshape(-1, grad_y.shape[-1])

        def weight_product():
            inputs = all_gather_to_group(x, 0, group) if put_off and ctx.gathers else whole
            inputs = inputs.reshape(-1, inputs.shape[-1])
            parameter, adds = ctx.parameters[0], defer is not None and defer.adds
            adds = adds and parameter.is_leaf and not parameter._backward_hooks
            if adds and getattr(parameter.grad, "dtype", None) == rows.dtype:
                parameter.grad.addmm_(rows.t(), inputs)  # autograd has nothing left to add
                return None
            return (rows.t() @ inputs).to(parameter.dtype)

        bias_sum = lambda: rows.sum(0).to(ctx.parameters[1].dtype)
        grads, gradients = [None, None], (weight_product, bias_sum)
        for i, (parameter, gradient) in enumerate(zip(ctx.parameters, gradients)):
            if ctx.needs_input_grad[1 + i]:
                if put_off and not parameter._backward_hooks:
                    defer.put(parameter, gradient)
                else:
                    grads[i] = gradient()
        if reducing:
            reducing.wait()
        return grad_x, *grads, *4 * [None]


def _reduce(y, split, group, async_op=False):
    """The sum of every rank's y, or this rank's part of its dim 0; and the work to wait for."""
    if not split:
        return y, all_reduce(y, group=group, async_op=async_op)
    output = y.new_empty(len(y) // dist.get_world_size(group), *y.shape[1:])
    return output, reduce_scatter_single(output, y, group=group, async_op=async_op)


def parallel_linear(
    x, weight, bias=None, column=True, group=None, sequence_parallel=False, defer=None
):
    """A linear layer of which this rank has some of the outputs (column) or of the inputs.

    x: (..., in), weight: (out, in), this rank's part. column: as column_linear(), or else as
        row_linear(), where a bias would be in every summand.
    sequence_parallel: whether X and Z are split, too, along dim 0: by columns x is this rank's part
        of what is gathered, by rows each rank gets a part of the sum.
    defer: where a pipeline halves its backwards, its WeightGradStore (see pipeline.py). A backward
        that finds it open computes the gradient of X, and puts a function there for the weight's;
        one that finds `adds` true adds the weight's gradient to .grad itself. A weight with a hook
        has its gradient at once.
    Raises ValueError for a sequence that P does not divide.
    """
    x = autocasted(x)  # before it is kept and sent
    return _ParallelLinear.apply(x, weight, bias, column, sequence_parallel, group, defer)


class ColumnParallelLinear(nn.Module):
    """Y_r = X A_r + b_r: X (..., in) is equal on every rank, Y_r (..., out/P) this rank's outputs.

    With sequence_parallel X is (T/P, ..., in), Y_r (T, ..., out/P).
    out_features: or a tuple, where they are several things, such as queries, keys and values, of
        each of which a rank has its part.
    options: group, sequence_parallel and defer of parallel_linear().

    Raises ValueError if P does not divide out_features, or one of these.
    """

    def __init__(self, in_features, out_features, bias=True, **options):
        super().__init__()
        self.options, group = options, options.get("group")
        blocks = out_features if isinstance(out_features, tuple) else (out_features,)
        _, tp = rank_and_size(group)
        if any(block % tp for block in blocks):
            raise ValueError(f"{out_features=} is not divisible by tp={tp}")
        shard = Shard(0, blocks, group)
        rows = sum(blocks)
        set_shard(self, "weight", torch.randn(rows, in_features) * in_features**-0.5, shard)
        self.bias = None
        if bias:
            set_shard(self, "bias", torch.zeros(rows), shard)

    def forward(self, x):
        return parallel_linear(x, self.weight, self.bias, **self.options)


class RowParallelLinear(nn.Module):
    """Z = sum_r (X_r B_r) + b: X_r (..., in/P) is this rank's inputs, Z (..., out) the same on all.

    With sequence_parallel X_r is (T, ..., in/P) and Z (T/P, ..., out).
    options: group, sequence_parallel and defer of parallel_linear().

    Raises ValueError if P does not divide in_features, and in forward if it does not divide T.
    """

    def __init__(self, in_features, out_features, bias=True, **options):
        super().__init__()
        self.options, group = options, options.get("group")
        _, tp = rank_and_size(group)
        if in_features % tp:
            raise ValueError(f"in_features={in_features} is not divisible by tp={tp}")
        weight = torch.randn(out_features, in_features) * in_features**-0.5
        set_shard(self, "weight", weight, Shard(1, (in_features,), group))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        if bias and options.get("sequence_parallel"):  # each rank's gradient is of its own tokens
            self.sums_over_tp = ("bias",)

    def forward(self, x):
        z = parallel_linear(x, self.weight, column=False, **self.options)
        return z if self.bias is None else z.add_(self.bias.to(z.dtype))


# ---- attention -----------------------------------------------------------------------------------


class ParallelSelfAttention(nn.Module):
    """Causal self-attention, split by heads: q, k, v column-parallel, projection row-parallel.

    x: (T, B, D) -> (T, B, D), both (T/P, B, D) with sequence_parallel.
    kv_heads: grouped-query attention, where heads / kv_heads queries share a key and a value.
    attention_fn(q, k, v): attention itself, from (B, H/P, T, K) and (B, KV/P, T, K) to
        (B, H/P, T, K).
    options: group, sequence_parallel and defer of parallel_linear().

    Raises ValueError if P does not divide kv_heads, kv_heads heads, or heads hidden.
    """

    def __init__(self, hidden, heads, kv_heads=None, attention_fn=None, **options):
        super().__init__()
        kv_heads = kv_heads or heads
        _, tp = rank_and_size(options.get("group"))
        if kv_heads % tp:
            raise ValueError(f"kv_heads={kv_heads} is not divisible by tp={tp}")
        if hidden % heads or heads % kv_heads:
            raise ValueError(f"{kv_heads=}, {heads=} and {hidden=}: each must divide the next")
        self.heads, self.kv_heads, self.K = heads // tp, kv_heads // tp, hidden // heads
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
    """PyTorch's fused causal attention. Heads of k and v serve several of q's."""
    if q.shape[1] != k.shape[1] and q.is_cuda and q.element_size() > 2:  # its kernel has no groups
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    options = {"dropout_p": dropout, "is_causal": True, "enable_gqa": q.shape[1] != k.shape[1]}
    return F.scaled_dot_product_attention(q, k, v, **options)


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
    tokens it owns and puts zeros for the others; the sum over the ranks is complete. If P does not
    divide V, parts differ by one. A token outside of it gets NaN: an error would have the host
    wait for the device. Raises ValueError in forward if P does not divide sequence_parallel's T.
    """

    def __init__(self, num_embeddings, embedding_dim, group=None, sequence_parallel=False):
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.num_embeddings = num_embeddings
        shard = Shard(0, (num_embeddings,), group)
        set_shard(self, "weight", torch.randn(num_embeddings, embedding_dim), shard)
        ((self.start, _),) = shard.runs()

    def forward(self, tokens):
        local = tokens - self.start
        out_of_range = (local < 0) | (local >= len(self.weight))
        rows = _Lookup.apply(local.masked_fill(out_of_range, 0), self.weight)
        unknown = (tokens < 0) | (tokens >= self.num_embeddings)
        others = rows.new_zeros(()).masked_fill(unknown, math.nan)  # (T, ...): 0, or NaN
        rows = torch.where(out_of_range.unsqueeze(-1), others.unsqueeze(-1), rows)
        if not self.sequence_parallel:
            return reduce_from_group(rows, self.group)
        return reduce_scatter_to_group(rows, 0, self.group)


class _CrossEntropy(torch.autograd.Function):
    """forward: log sum exp(logits) - logits[target], over all ranks' columns;
    backward: softmax - one-hot, which forward leaves, in the dtype of the logits
    """

    @staticmethod
    def forward(ctx, logits, target, start, ignore_index, group, inplace):
        maximum = logits.amax(-1)  # (N,)
        all_reduce(maximum, ReduceOp.MAX, group)
        grad = logits.to(torch.promote_types(logits.dtype, torch.float32))
        grad = grad.clone() if grad is logits and not inplace else grad
        grad.sub_(maximum.unsqueeze(-1))  # (N, V/P), to become exp, softmax and gradient in place

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
        minus_one = out_of_range.to(grad.dtype).sub_(1)  # at this rank's targets, else 0
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
    return _CrossEntropy.apply(logits, target, vocab_start, ignore_index, group, inplace)


# ---- dropout -------------------------------------------------------------------------------------


class ShardedRandomState:
    """Random numbers of its own for each rank: `with state: F.dropout(...)`.

    What all ranks hold must lose the same elements on each: PyTorch's global state, seeded alike
    over the group, draws for that. Of what each has a part, heads or tokens, equal masks would
    repeat: there this replaces the global state. It is seeded by the rank and by a draw from the
    global state, so that recomputation, which restores that, restores this. Uses do not nest.
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


# ---- copies that each rank uses for tokens of its own --------------------------------------------
#
# With sequence parallelism a rank's gradient of a norm or a bias covers only its own tokens, and is
# still to be summed over tp. A module's `sums_over_tp` names its parameters of this kind.


def mark_sum_over_tp(module):
    """Mark the gradients of all parameters in the module as still to be summed over tp."""
    for part in module.modules():
        part.sums_over_tp = tuple(name for name, _ in part.named_parameters(recurse=False))
    return module


def parameters_to_sum_over_tp(model):
    """Return the model's marked parameters, or ZeRO's pieces of them."""
    modules = [module for module in model.modules() if hasattr(module, "sums_over_tp")]
    marked = [getattr(module, name) for module in modules for name in module.sums_over_tp]
    return [parameter for parameter in marked if parameter.requires_grad]


@torch.no_grad()
def sum_gradients_over_tp(parameters, group=None, check=True):
    """After backward, sum the gradients over the group, in one all-reduce for all of them.

    parameters: as from parameters_to_sum_over_tp(). One that a rank has not used counts as zero.
    check: whether to compare, in one more message, the pieces that ZeRO has cut on all ranks. They
        differ if parameters before them do, and then ValueError is raised on all ranks.
    """
    if dist.get_world_size(group) == 1 or not parameters:
        return
    if check and any(hasattr(parameter, "whole_shape") for parameter in parameters):
        own = [(*part_of(parameter), parameter.numel()) for parameter in parameters]
        if any(pieces != own for pieces in gather_objects(own, group)):
            raise ValueError(f"other ranks have other pieces, (shape, first element, size): {own}")
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    gradients = [parameter.grad for parameter in parameters]
    flat = torch.cat([gradient.flatten() for gradient in gradients])  # of their widest dtype
    all_reduce(flat, group=group)
    sums = flat.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [total.view_as(of) for total, of in zip(sums, gradients)])


# ---- where a part lies in the whole: for initial values and checkpoints --------------------------


def part_of(parameter):
    """(Shape of this rank's part, its first element that is here).

    ZeRO leaves a flat piece of the part: a parameter with `whole_shape`, the part's, and `offset`.
    """
    return getattr(parameter, "whole_shape", parameter.shape), getattr(parameter, "offset", 0)


def rows_held(parameter, shard=None):
    """Return (dim, runs, size of the whole along dim), where runs are as in Shard.runs().

    parameter: this rank's part, or ZeRO's piece of it. Without a Shard each rank has a copy.
    """
    if shard is None:
        rows = part_of(parameter)[0][0]
        return 0, [(0, rows)], rows
    return shard.dim, shard.runs(), sum(shard.blocks)


def boxes_between(shape, begin, end):
    """Elements begin to end of a flattened tensor as boxes, in order: (first index, sizes) of each.

    Of (4, 2) from 1 to 7: the rest of a row, whole rows, the beginning of a row.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    while begin < end:
        first = [begin // stride % size for stride, size in zip(strides, shape)]
        fits = lambda stride: begin % stride == 0 and begin + stride <= end
        dim = next(dim for dim, stride in enumerate(strides) if fits(stride))
        count = min((end - begin) // strides[dim], shape[dim] - first[dim])
        yield tuple(first), (*[1] * dim, count, *shape[dim + 1 :])
        begin += count * strides[dim]


def views_in_whole(parameter, tensor, shard=None):
    """(Shape of the whole, {first index: view}): what a rank has, as boxes of the whole.

    tensor: the parameter, or ZeRO's piece of it, or what is laid out alike, such as .grad.
    Of rows 0, 1 and 4, of 2 elements each, the piece from 1 on is

        row 0   . 1     {(0, 1): view of (1, 1),
        row 1   2 3      (1, 0): of (1, 2),
        row 4   4 5      (4, 0): of (1, 2)}
    """
    shape, begin = part_of(parameter)
    dim, runs, total = rows_held(parameter, shard)
    flat, views, end = tensor.detach().view(-1), {}, begin + tensor.numel()
    for start, count in runs:  # several of them lie one behind the other: along dim 0
        sizes = *shape[:dim], count, *shape[dim + 1 :]
        for first, box in boxes_between(sizes, max(begin, 0), min(end, math.prod(sizes))):
            index = *first[:dim], start + first[dim], *first[dim + 1 :]
            views[index], flat = flat[: math.prod(box)].view(box), flat[math.prod(box) :]
        begin, end = begin - math.prod(sizes), end - math.prod(sizes)
    return (*shape[:dim], total, *shape[dim + 1 :]), views


# ---- 2012: AlexNet on two GPUs -------------------------------------------------------------------
#
# Each GPU has half of every layer's filters. Those of conv2, 4 and 5 read only the channels of
# their own GPU, which costs nothing; conv3 and the dense layers read both. On one device a layer
# that reads its own half is a convolution in two groups, and a norm is over a half's channels.
#
#               conv1    conv2    conv3    conv4    conv5    dense    dense    dense
#     GPU 0   image-48 --- 128 -\ / 192 --- 192 --- 128 -\ / 2048 -\ / 2048 -\ / 500
#                                X                        X         X         X
#     GPU 1   image-48 --- 128 -/ \ 192 --- 192 --- 128 -/ \ 2048 -/ \ 2048 -/ \ 500


class _Halved(nn.Module):
    """A layer with this rank's filters. It reads all channels of x, or those of its own rank."""

    def __init__(self, reads_all, group, layer):
        super().__init__()
        self.layer, self.reads_all, self.group = layer, reads_all, group
        for name, full in list(layer.named_parameters()):
            set_shard(layer, name, full, Shard(0, (len(full),), group))
        layer.groups = 1  # those of another rank are not here

    def forward(self, x):
        return self.layer(all_gather_to_group(x, 1, self.group) if self.reads_all else x)


def alexnet(filters=(96, 256, 384, 384, 256), dense=4096, classes=1000, group=None):
    """AlexNet over the group's ranks, two in the paper: (B, 3, 224, 224) -> (B, classes / P).

    Images are the same on every rank, logits those of its classes. Without the paper's dropout.
    Weights are those of the layers on one device, for the same seed, cut. P divides each size.
    """
    _, P = rank_and_size(group)
    own, both = partial(_Halved, False, group), partial(_Halved, True, group)
    a, b, c, d, e = filters
    relu, pool, norm = nn.ReLU(), nn.MaxPool2d(3, 2), nn.LocalResponseNorm(5, k=2.0)
    return nn.Sequential(
        *(own(nn.Conv2d(3, a, 11, 4, 2)), relu, norm, pool),
        *(own(nn.Conv2d(a, b, 5, 1, 2, groups=P)), relu, norm, pool),
        *(both(nn.Conv2d(b, c, 3, 1, 1)), relu),
        *(own(nn.Conv2d(c, d, 3, 1, 1, groups=P)), relu),
        *(own(nn.Conv2d(d, e, 3, 1, 1, groups=P)), relu, pool, nn.Flatten()),
        *(both(nn.Linear(36 * e, dense)), relu),
        *(both(nn.Linear(dense, dense)), relu),
        both(nn.Linear(dense, classes)),
    )


# ---- cost ----------------------------------------------------------------------------------------


def tensor_parallel_layer_bytes(batch, seq_len, hidden, tp, itemsize=4, regather=False):
    """Bytes a rank sends per transformer layer, forward and backward: 8 b s h (t-1)/t elements.

    With sequence parallelism 10, if backward gathers the inputs again, as here.
    """
    return (5 if regather else 4) * all_reduce_bytes(batch * seq_len * hidden * itemsize, tp)


# ---- demonstration -------------------------------------------------------------------------------


def _demonstrate():
    rank, P = rank_and_size()
    B, T, D = 8, 128, 64 * P
    torch.manual_seed(0)
    full = [nn.Linear(*sizes, bias=False).double() for sizes in ((D, 4 * D), (4 * D, D))]
    x = torch.randn(T, B, D, dtype=torch.float64)
    full[1](F.gelu(full[0](x))).square().mean().backward()

    column, row = ColumnParallelLinear(D, 4 * D, False), RowParallelLinear(4 * D, D, False)
    own = lambda layer, whole: layer.shards["weight"].cut(whole.detach())
    for layer, linear in zip((column, row), full):
        layer.weight.data = own(layer, linear.weight)
    with count_bytes() as traffic:
        y = row(F.gelu(column(x)))
    y.square().mean().backward()
    pairs = zip((column, row), full)
    errors = [layer.weight.grad - own(layer, linear.weight.grad) for layer, linear in pairs]
    if rank == 0:
        claimed, error = all_reduce_bytes(B * T * D * 8, P), max(e.abs().max() for e in errors)
        print(f"{P} ranks, MLP forward: claimed {claimed} bytes, counted {traffic.bytes()}")
        print(f"largest difference from one process's gradients: {error:.1e}\n")


if __name__ == "__main__":
    run_ranks(_demonstrate)
