"""Tensor parallelism: every matrix is split over a group's ranks, which work on the same tokens.

A linear layer can be split by its outputs (columns) or by its inputs (rows). Columns first and rows
next need no communication in between, so a non-linearity, or attention over heads, fits there:

    X  --f-->  X A_r  -- GeLU -->  Y_r B_r  --g-->  Z = sum over r of Y_r B_r      A = [A_0 A_1]
               column-parallel      row-parallel                                   B = [B_0; B_1]

    f   forward: identity      backward: all-reduce   X's gradient is a sum over the columns' owners
    g   forward: all-reduce    backward: identity     Z is a sum over the rows' owners

Cost per transformer layer (attention and MLP) and step: 2 f and 2 g, so 4 all-reduces of b s h
elements (batch x sequence x width), 8 b s h (t-1)/t elements sent by each of t ranks. Weights,
gradients and optimizer state are divided by t. The vocabulary of V tokens is split as well, and the
loss is taken where the logits are: 3 b s numbers are reduced, not b s V gathered.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019.

    torchrun --nproc-per-node 4 tensor_parallel.py      claimed and counted bytes;
                                                        the error against one process
"""

import torch
import torch.nn.functional as F
from torch import nn

from collectives import (
    ReduceOp,
    all_gather,
    all_reduce,
    all_reduce_bytes,
    copy_to_group,
    count_bytes,
    rank_and_size,
    reduce_from_group,
    run_ranks,
)

# ---- what a rank holds of a parameter ------------------------------------------------------------


def shard_sizes(size, world_size):
    """How `size` rows are dealt out: as evenly as can be, the first ranks taking the remainder."""
    return [size // world_size + (rank < size % world_size) for rank in range(world_size)]


def mark_sharded(parameter, dim, blocks=1):
    """Note that `parameter` is this rank's part along `dim`, of each of `blocks` equal blocks.

    blocks is 3 for a fused query-key-value matrix: each of the three is split, by heads.
    """
    parameter.shard_dim, parameter.shard_blocks = dim, blocks


def is_sharded(parameter):
    """Whether the ranks hold different parts of this parameter, rather than copies of it."""
    return hasattr(parameter, "shard_dim")


def take_shard(full, parameter, group=None):
    """This rank's part of `full`, laid out as `parameter` is. Copies are returned whole."""
    if not is_sharded(parameter):
        return full
    rank, world_size = rank_and_size(group)
    dim, blocks = parameter.shard_dim, parameter.shard_blocks
    parts = full.unflatten(dim, (blocks, -1)).split(
        shard_sizes(full.shape[dim] // blocks, world_size), dim + 1
    )
    return parts[rank].flatten(dim, dim + 1)


def gather_shards(local, parameter, full_shape, group=None):
    """The inverse: the full tensor from every rank's `local`, say `parameter` or its gradient."""
    if not is_sharded(parameter):
        return local.detach().clone()
    _, world_size = rank_and_size(group)
    dim, blocks = parameter.shard_dim, parameter.shard_blocks
    sizes = shard_sizes(full_shape[dim] // blocks, world_size)
    shapes = [[*full_shape[:dim], blocks, size, *full_shape[dim + 1 :]] for size in sizes]
    parts = [local.new_empty(shape) for shape in shapes]
    all_gather(parts, local.detach().unflatten(dim, (blocks, -1)).contiguous(), group)
    return torch.cat(parts, dim + 1).flatten(dim, dim + 1)


# ---- linear layers -------------------------------------------------------------------------------


class ColumnParallelLinear(nn.Module):
    """Y_r = X A_r + b_r: X (..., in) is equal on every rank, Y_r (..., out/P) this rank's outputs.

    blocks: how many equal blocks the outputs consist of, each of which is split (3 for fused q, k,
    v). Raises ValueError if blocks x P does not divide out_features.
    """

    def __init__(self, in_features, out_features, bias=True, blocks=1, group=None):
        super().__init__()
        self.group = group
        _, tp = rank_and_size(group)
        if out_features % (blocks * tp):
            raise ValueError(
                f"out_features={out_features} is not divisible by blocks={blocks} x tp={tp}"
            )
        local = out_features // tp
        self.weight = nn.Parameter(torch.empty(local, in_features))
        self.bias = nn.Parameter(torch.empty(local)) if bias else None
        mark_sharded(self.weight, 0, blocks)
        nn.init.normal_(self.weight, std=in_features**-0.5)
        if bias:
            mark_sharded(self.bias, 0, blocks)
            nn.init.zeros_(self.bias)

    def forward(self, x):
        return F.linear(copy_to_group(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Z = sum_r (X_r B_r) + b: X_r (..., in/P) is this rank's inputs, Z (..., out) the same on all.

    Raises ValueError if P does not divide in_features.
    """

    def __init__(self, in_features, out_features, bias=True, group=None):
        super().__init__()
        self.group = group
        _, tp = rank_and_size(group)
        if in_features % tp:
            raise ValueError(f"in_features={in_features} is not divisible by tp={tp}")
        self.weight = nn.Parameter(torch.empty(out_features, in_features // tp))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        mark_sharded(self.weight, 1)
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def forward(self, x):
        output = reduce_from_group(F.linear(x, self.weight), self.group)
        # Every rank holds the whole bias: added before the sum it would count P times.
        return output if self.bias is None else output + self.bias


# ---- vocabulary: embedding and loss --------------------------------------------------------------


class VocabParallelEmbedding(nn.Module):
    """An embedding (V, D) of which a rank holds the rows of its part of the vocabulary.

    A rank looks up the tokens it owns and puts zeros for the others; the sum over the ranks is
    complete. Any V will do: sizes differ by one where P does not divide it. Tokens are not checked:
    one outside the vocabulary has a zero embedding. Raises ValueError if V < P.
    """

    def __init__(self, num_embeddings, embedding_dim, group=None):
        super().__init__()
        rank, world_size = rank_and_size(group)
        if num_embeddings < world_size:
            raise ValueError(f"num_embeddings={num_embeddings} is less than tp={world_size}")
        sizes = shard_sizes(num_embeddings, world_size)
        self.group, self.start = group, sum(sizes[:rank])
        self.weight = nn.Parameter(torch.randn(sizes[rank], embedding_dim))
        mark_sharded(self.weight, 0)

    def forward(self, tokens):
        local = tokens - self.start
        foreign = (local < 0) | (local >= len(self.weight))
        rows = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return reduce_from_group(rows.masked_fill(foreign.unsqueeze(-1), 0), self.group)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """forward: log sum exp(logits) - logits[target], over all ranks' columns;
    backward: softmax - one-hot
    """

    @staticmethod
    def forward(ctx, logits, target, start, ignore_index, group):
        logits = logits if logits.dtype == torch.float64 else logits.float()
        maximum = logits.amax(-1)  # (N,)
        all_reduce(maximum, ReduceOp.MAX, group)
        shifted = logits - maximum.unsqueeze(-1)  # (N, V/P); every exponential is at most 1

        local = target - start
        foreign = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(foreign, 0).unsqueeze(-1)  # (N, 1)
        own_target = shifted.gather(-1, local).squeeze(-1).masked_fill(foreign, 0)

        probabilities = shifted.exp_()
        sums = torch.stack([probabilities.sum(-1), own_target])  # (2, N): one message for both
        all_reduce(sums, group=group)
        normalizer, target_logit = sums
        probabilities.div_(normalizer.unsqueeze(-1))

        ignored = target == ignore_index
        ctx.save_for_backward(probabilities, local, foreign, ignored)
        return (normalizer.log() - target_logit).masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx, grad_output):
        probabilities, local, foreign, ignored = ctx.saved_tensors
        scale = grad_output.masked_fill(ignored, 0).unsqueeze(-1)  # (N, 1)
        grad = probabilities * scale
        grad.scatter_add_(-1, local, -scale.masked_fill(foreign.unsqueeze(-1), 0))
        return grad, None, None, None, None


def vocab_parallel_cross_entropy(logits, target, vocab_start=0, ignore_index=-100, group=None):
    """Cross-entropy of each token, from logits that stay split over the vocabulary.

    logits: (N, V_r), the columns from `vocab_start` on; target: (N,) token ids, the same on every
    rank. Returns (N,) losses, in fp32 or better, the same on every rank; zero where target is
    `ignore_index`. 3 N numbers are reduced over the group; the logits are never gathered.
    """
    return _VocabParallelCrossEntropy.apply(logits, target, vocab_start, ignore_index, group)


# ---- dropout -------------------------------------------------------------------------------------


class ShardedRandomState:
    """A second random state, for what is split over the group: `with state: F.dropout(...)`.

    Activations that all ranks hold must lose the same elements on each: they use PyTorch's global
    state, seeded alike over the group. Inside attention each rank has heads of its own, and equal
    masks would repeat one pattern over the heads: there this state replaces the global one, seeded
    by rank as well. Uses do not nest.
    """

    def __init__(self, seed, device, group=None):
        rank, world_size = rank_and_size(group)
        self.module = torch.cuda if torch.device(device).type == "cuda" else torch
        self.state = (
            torch.Generator(device).manual_seed(2**40 + seed * world_size + rank).get_state()
        )

    def __enter__(self):
        self.outside = self.module.get_rng_state()
        self.module.set_rng_state(self.state)

    def __exit__(self, *exception):
        self.state = self.module.get_rng_state()
        self.module.set_rng_state(self.outside)


# ---- cost ----------------------------------------------------------------------------------------


def tensor_parallel_layer_bytes(batch, seq_len, hidden, tp, itemsize=4):
    """Bytes a rank sends per transformer layer, forward and backward: 8 b s h (t-1)/t elements."""
    return 4 * all_reduce_bytes(batch * seq_len * hidden * itemsize, tp)


# ---- demonstration -------------------------------------------------------------------------------


def _demonstrate():
    rank, world_size = rank_and_size()
    B, T, D, V = 8, 128, 64 * world_size, 101
    torch.manual_seed(0)
    weights = {
        "up": torch.randn(4 * D, D),
        "down": torch.randn(D, 4 * D),
        "head": torch.randn(V, D),
    }
    weights = {name: (w * D**-0.5).double().requires_grad_() for name, w in weights.items()}
    x, target = torch.randn(B * T, D, dtype=torch.float64), torch.randint(V, (B * T,))
    y = x + F.linear(F.gelu(F.linear(x, weights["up"])), weights["down"])
    loss = F.cross_entropy(F.linear(y, weights["head"]), target)
    expected = torch.autograd.grad(loss, list(weights.values()))

    layers = nn.ModuleDict(
        {
            "up": ColumnParallelLinear(D, 4 * D, bias=False),
            "down": RowParallelLinear(4 * D, D, bias=False),
            "head": VocabParallelEmbedding(V, D),
        }
    ).double()
    for name, layer in layers.items():
        layer.weight.data.copy_(take_shard(weights[name].detach(), layer.weight))
    with count_bytes() as traffic:
        y = x.clone().requires_grad_()
        y = y + layers["down"](F.gelu(layers["up"](y)))
        counted_forward = traffic.bytes()
        logits = F.linear(copy_to_group(y), layers["head"].weight)
        losses = vocab_parallel_cross_entropy(logits, target, layers["head"].start)
        losses.mean().backward()
    gathered = [gather_shards(l.weight.grad, l.weight, weights[n].shape) for n, l in layers.items()]
    error = max((a - b).abs().max().item() for a, b in zip(gathered, expected))
    if rank == 0:
        claimed = all_reduce_bytes(B * T * D * 8, world_size)
        print(
            f"{world_size} ranks, MLP forward: claimed {claimed} bytes, counted {counted_forward}"
        )
        print(f"largest difference from one process's gradients: {error:.1e}")


if __name__ == "__main__":
    run_ranks(_demonstrate)
