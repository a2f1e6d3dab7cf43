"""Tensor parallelism against plain torch.nn: outputs, every gradient, bytes, dropout masks."""

import random
from itertools import combinations

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from collectives import copy_to_group, count_bytes, rank_and_size
from ranks import least_bytes, run
from tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    ShardedRandomState,
    VocabParallelEmbedding,
    gather_shards,
    is_sharded,
    mark_sharded,
    shard_sizes,
    take_shard,
    tensor_parallel_layer_bytes,
    vocab_parallel_cross_entropy,
)

# Ranks, and the size of a tensor-parallel group. Several groups are interleaved: with (4, 2) they
# are ranks 0, 2 and ranks 1, 3, and they see different data.
LAYOUTS = [(1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (4, 2), (6, 3)]
every_layout = pytest.mark.parametrize("world_size, tp", LAYOUTS)


def _group(tp):
    """This rank's tensor-parallel group, and the number of the replica that the group is."""
    world_size = dist.get_world_size()
    replicas = world_size // tp
    if replicas == 1:
        return None, 0
    groups = [dist.new_group(list(range(r, world_size, replicas))) for r in range(replicas)]
    dist.barrier()  # to a rank that still connects, one that has already left is a failure
    replica = dist.get_rank() % replicas
    return groups[replica], replica


def _shard(full, dim, group, blocks=1):
    """numpy's idea of this rank's part of `full`."""
    rank, world_size = rank_and_size(group)
    whole = np.split(full.detach().numpy(), blocks, dim)
    own = [np.array_split(block, world_size, dim)[rank] for block in whole]
    return torch.from_numpy(np.concatenate(own, dim))


def _equal(found, expected, tolerance=1e-12, name=""):
    message = lambda text: f"{name} {text}"
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=message)


# ---- layers --------------------------------------------------------------------------------------


def _check(plain, parallel, x, group, x_blocks=None, y_blocks=None):
    """Output, input gradient and every parameter gradient of `parallel` are those of `plain`.

    x_blocks, y_blocks: the input or output is split along its last dim, in that many blocks.
    """
    shard = lambda full, blocks: _shard(full, full.ndim - 1, group, blocks) if blocks else full
    plain.double(), parallel.double()
    with torch.no_grad():
        for full, local in zip(plain.parameters(), parallel.parameters(), strict=True):
            local.copy_(take_shard(full, local, group))

    full_x, local_x = x.clone(), shard(x, x_blocks).clone()
    if x.is_floating_point():
        full_x.requires_grad_(), local_x.requires_grad_()
    full_y, local_y = plain(full_x), parallel(local_x)
    # The default generators may differ by now: they have drawn initial weights of uneven sizes.
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(full_y.shape, dtype=torch.float64, generator=generator)
    local_grad = shard(grad, y_blocks).clone()
    full_y.backward(grad)
    local_y.backward(local_grad)

    _equal(local_y, shard(full_y.detach(), y_blocks))
    assert torch.equal(local_x, shard(x, x_blocks)), "the input was changed"
    assert torch.equal(local_grad, shard(grad, y_blocks)), "grad_output was changed"
    if x.is_floating_point():
        _equal(local_x.grad, shard(full_x.grad, x_blocks))
    expected, found = dict(plain.named_parameters()), dict(parallel.named_parameters())
    assert list(found) == list(expected)
    for name, full in expected.items():
        gathered = gather_shards(found[name].grad, found[name], full.shape, group)
        _equal(gathered, full.grad, name=name)


def _cases(number, replica):
    """Random sizes, the same on all ranks, and torch seeded alike in a tensor-parallel group."""
    for case in range(number):
        torch.manual_seed(100 * replica + case)
        yield random.Random(case)


def _linear_layers(tp):
    group, replica = _group(tp)
    for sizes in _cases(6, replica):
        shape = [sizes.randint(1, 5) for _ in range(sizes.randint(0, 2))]
        bias, blocks = sizes.random() < 0.7, sizes.choice([1, 3])
        in_features, out_features = sizes.randint(1, 7), blocks * tp * sizes.randint(1, 4)
        x = torch.randn(*shape, in_features, dtype=torch.float64)
        plain = nn.Linear(in_features, out_features, bias)
        column = ColumnParallelLinear(in_features, out_features, bias, blocks, group)
        assert [is_sharded(p) for p in column.parameters()] == [True] * (1 + bias)
        _check(plain, column, x, group, y_blocks=blocks)

        x = torch.randn(*shape, out_features, dtype=torch.float64)
        plain = nn.Linear(out_features, in_features, bias)
        row = RowParallelLinear(out_features, in_features, bias, group)
        assert [is_sharded(p) for p in row.parameters()] == [True, False][: 1 + bias]
        _check(plain, row, x, group, x_blocks=1)


@every_layout
def test_column_and_row_linears_are_parts_of_one_linear(world_size, tp):
    run(world_size, _linear_layers, tp)


def _mlp(up, down):
    return nn.Sequential(up, nn.GELU(), down)


class Attention(nn.Module):
    """Causal attention over the heads that `qkv` computes: all of them, or one rank's."""

    def __init__(self, qkv, out, head_dim):
        super().__init__()
        self.qkv, self.out, self.head_dim = qkv, out, head_dim

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)  # (B, T, H K) each
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, K)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A transformer layer: attention and MLP, each with its norm and residual."""

    def __init__(self, D, attention, mlp):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attention, self.mlp = attention, mlp

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def _plain_layer(D, head_dim):
    attention = Attention(nn.Linear(D, 3 * D), nn.Linear(D, D), head_dim)
    return Layer(D, attention, _mlp(nn.Linear(D, 4 * D), nn.Linear(4 * D, D)))


def _parallel_layer(D, head_dim, group):
    qkv = ColumnParallelLinear(D, 3 * D, blocks=3, group=group)
    attention = Attention(qkv, RowParallelLinear(D, D, group=group), head_dim)
    up = ColumnParallelLinear(D, 4 * D, group=group)
    return Layer(D, attention, _mlp(up, RowParallelLinear(4 * D, D, group=group)))


def _mlp_attention_layer(tp):
    group, replica = _group(tp)
    for sizes in _cases(3, replica):
        head_dim = sizes.randint(1, 4)
        D, B, T = tp * sizes.randint(1, 2) * head_dim, sizes.randint(1, 3), sizes.randint(1, 5)
        x = torch.randn(B, T, D, dtype=torch.float64)
        plain, parallel = _plain_layer(D, head_dim), _parallel_layer(D, head_dim, group)
        _check(plain.mlp, parallel.mlp, x, group)
        _check(plain.attention, parallel.attention, x, group)
        plain.zero_grad(), parallel.zero_grad()
        _check(plain, parallel, x, group)


@every_layout
def test_mlp_attention_and_a_whole_layer(world_size, tp):
    run(world_size, _mlp_attention_layer, tp)


def _single_rank_layers():
    x = torch.randn(2, 5, 64)
    column, row = ColumnParallelLinear(64, 48), RowParallelLinear(64, 48)
    for layer in (column, row):
        plain = nn.Linear(64, 48)
        layer.load_state_dict(plain.state_dict())
        outputs = plain(x), layer(x)
        for output in outputs:
            output.square().sum().backward()
        assert torch.equal(*outputs)
        assert torch.equal(plain.weight.grad, layer.weight.grad)
        assert torch.equal(plain.bias.grad, layer.bias.grad)
    plain, embedding = nn.Embedding(11, 6), VocabParallelEmbedding(11, 6)
    embedding.load_state_dict(plain.state_dict())
    tokens = torch.randint(11, (2, 5))
    assert torch.equal(plain(tokens), embedding(tokens))


def test_one_rank_computes_the_very_bits_of_torch_nn():
    run(1, _single_rank_layers)


# ---- what a rank holds of a parameter ------------------------------------------------------------


def _shards_round_trip(tp):
    group, replica = _group(tp)
    rank = rank_and_size(group)[0]
    for sizes in _cases(20, replica):
        shape = [sizes.randint(1, 4) for _ in range(sizes.randint(1, 4))]
        dim, blocks = sizes.randrange(len(shape)), sizes.choice([1, 1, 2, 3])
        shape[dim] = blocks * sizes.randint(1, 3 * tp)  # uneven, and smaller than the group
        dtype = sizes.choice([torch.float64, torch.float32, torch.int64])
        parameter = nn.Parameter(torch.empty(0))
        full = torch.randn(shape).mul(100).to(dtype)

        assert not is_sharded(parameter)
        assert torch.equal(take_shard(full, parameter, group), full)
        copy = gather_shards(full, parameter, full.shape, group)
        assert torch.equal(copy, full) and copy.data_ptr() != full.data_ptr()

        mark_sharded(parameter, dim, blocks)
        local = take_shard(full, parameter, group)
        assert is_sharded(parameter) and torch.equal(local, _shard(full, dim, group, blocks))
        assert local.shape[dim] == blocks * shard_sizes(shape[dim] // blocks, tp)[rank]
        assert torch.equal(gather_shards(local, parameter, full.shape, group), full)
        other = torch.randn(local.shape).mul(100).to(dtype) + 1000 * rank
        gathered = gather_shards(other, parameter, full.shape, group)
        assert torch.equal(take_shard(gathered, parameter, group), other)


@every_layout
def test_take_shard_and_gather_shards_are_inverse(world_size, tp):
    run(world_size, _shards_round_trip, tp)


# ---- vocabulary ----------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """Embedding and head that share their weight; per-token losses of the next token."""

    def __init__(self, embedding, losses):
        super().__init__()
        self.embedding, self.losses = embedding, losses

    def forward(self, tokens):
        x = self.embedding(tokens).tanh().flatten(0, -2)
        return self.losses(x, self.embedding.weight, tokens.roll(-1).flatten())


def _vocabulary(tp):
    group, replica = _group(tp)
    for sizes in _cases(4, replica):
        V, D = sizes.choice([tp, 2 * tp + 1, 101, 6 * tp]), sizes.randint(1, 5)
        tokens = torch.cat([torch.randperm(V), torch.randint(V, (V,))]).view(2, V)
        plain, embedding = nn.Embedding(V, D), VocabParallelEmbedding(V, D, group)
        _check(plain, embedding, tokens, group)

        def plain_losses(x, weight, target):
            return F.cross_entropy(F.linear(x, weight), target, reduction="none")

        def parallel_losses(x, weight, target):
            logits = F.linear(copy_to_group(x, group), weight)
            return vocab_parallel_cross_entropy(logits, target, embedding.start, group=group)

        plain.zero_grad(), embedding.zero_grad()
        models = LanguageModel(plain, plain_losses), LanguageModel(embedding, parallel_losses)
        _check(*models, tokens, group)


@every_layout
def test_embedding_and_a_tied_head_with_its_loss(world_size, tp):
    run(world_size, _vocabulary, tp)


def _loss_of_shards(full, target, group, ignore_index):
    """The leaf of this rank's columns of the `full` logits, and the losses computed from it."""
    rank, world_size = rank_and_size(group)
    columns = np.array_split(np.arange(full.shape[-1]), world_size)[rank]
    logits = full[:, columns].clone().requires_grad_()
    before = logits.detach().clone(), target.clone()
    losses = vocab_parallel_cross_entropy(logits, target, int(columns[0]), ignore_index, group)
    assert torch.equal(logits, before[0]) and torch.equal(target, before[1]), "an input was changed"
    return logits, columns, losses


def _gradient(losses, logits, grad_output):
    before = grad_output.clone()
    grad = torch.autograd.grad(losses, logits, grad_output, retain_graph=True)[0]
    assert torch.equal(grad_output, before), "grad_output was changed"
    return grad


def _cross_entropy(tp):
    group, replica = _group(tp)
    for sizes in _cases(12, replica):
        V, N = sizes.choice([tp, 2 * tp + 1, 101]), sizes.randint(1, 9)
        full, target = torch.randn(N, V, dtype=torch.float64), torch.randint(V, (N,))
        if sizes.random() < 0.5:  # exp(1e4) and exp(-1e4) are infinity and zero, in fp64 too
            full += torch.tensor([1e4, -1e4])[torch.randint(2, (N, V))]
        ignore_index, ignored = sizes.choice([-100, V // 2]), sizes.choice([0.0, 0.4, 1.0])
        target[torch.rand(N) < ignored] = ignore_index

        whole = full.clone().requires_grad_()
        expected = F.cross_entropy(whole, target, ignore_index=ignore_index, reduction="none")
        logits, columns, losses = _loss_of_shards(full, target, group, ignore_index)
        _equal(losses, expected)
        assert losses.dtype == torch.float64 and losses[target == ignore_index].eq(0).all()
        for _ in range(2):  # the second time shows that backward leaves what it saved as it was
            grad_output = torch.randn(N, dtype=torch.float64)
            grad = torch.autograd.grad(expected, whole, grad_output, retain_graph=True)[0]
            _equal(_gradient(losses, logits, grad_output), grad[:, columns])


@every_layout
def test_cross_entropy_of_split_logits(world_size, tp):
    run(world_size, _cross_entropy, tp)


def _cross_entropy_dtypes(tp):
    group, _ = _group(tp)
    target = torch.tensor([0, 12, 5, -100, 7])
    for dtype, tolerance in (torch.bfloat16, 2**-8), (torch.float32, 1e-6):
        full = torch.randn(5, 13).mul(10).to(dtype)
        whole = full.float().requires_grad_()
        expected = F.cross_entropy(whole, target, reduction="none")
        expected_grad = torch.autograd.grad(expected, whole, torch.arange(5.0))[0]
        logits, columns, losses = _loss_of_shards(full, target, group, -100)
        assert losses.dtype == torch.float32
        _equal(losses, expected, 1e-6)
        grad = _gradient(losses, logits, torch.arange(5.0))
        assert grad.dtype == dtype
        _equal(grad.float(), expected_grad[:, columns], tolerance)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_cross_entropy_is_computed_in_fp32_and_its_gradient_is_in_the_dtype_of_the_logits(tp):
    run(tp, _cross_entropy_dtypes, tp)


# ---- bytes ---------------------------------------------------------------------------------------


def _layer_bytes(tp, B, T, D, head_dim):
    group, _ = _group(tp)
    counted = {}
    for name in ("attention", "mlp", "layer"):
        layer = _parallel_layer(D, head_dim, group)
        module = layer if name == "layer" else getattr(layer, name)
        with least_bytes(), count_bytes() as traffic:
            y = module(torch.randn(B, T, D, requires_grad=True))
            forward = traffic.bytes()
            y.sum().backward()
        assert traffic.bytes() == traffic.bytes("all_reduce", group or dist.group.WORLD)
        counted[name] = forward, traffic.bytes() - forward
    return counted


@every_layout
def test_a_layer_sends_8_b_s_h_elements_times_t_minus_1_over_t(world_size, tp):
    B, T, head_dim = 2, 6, 4
    D = 6 // tp * tp * head_dim
    elements = 8 * B * T * D * (tp - 1) // tp
    assert tensor_parallel_layer_bytes(B, T, D, tp) == 4 * elements
    assert tensor_parallel_layer_bytes(B, T, D, tp, itemsize=2) == 2 * elements
    for counted in run(world_size, _layer_bytes, tp, B, T, D, head_dim):
        half, quarter = 4 * elements // 2, 4 * elements // 4  # bytes of fp32
        assert counted["attention"] == counted["mlp"] == (quarter, quarter)
        assert counted["layer"] == (half, half)


def _loss_bytes(tp, N):
    group, _ = _group(tp)
    logits = torch.randn(N, 5, requires_grad=True)
    with least_bytes(), count_bytes() as traffic:
        losses = vocab_parallel_cross_entropy(logits, torch.arange(N), group=group)
        forward = traffic.bytes(), traffic.messages()
        losses.sum().backward()
    assert traffic.bytes() == forward[0], "backward needs no message"
    return forward


@every_layout
def test_the_loss_reduces_3_floats_per_token(world_size, tp):
    N = 12
    nbytes = 2 * 3 * N * 4 * (tp - 1) // tp  # a maximum of N floats and a sum of 2 N
    messages = 2 * 2 * (tp - 1)
    assert run(world_size, _loss_bytes, tp, N) == [(nbytes, messages)] * world_size


# ---- dropout -------------------------------------------------------------------------------------


def _mask():
    return F.dropout(torch.ones(64)).bool().tolist()


def _masks(tp):
    group, replica = _group(tp)
    torch.manual_seed(1000 + replica)
    undisturbed = [_mask(), _mask(), _mask()]

    torch.manual_seed(1000 + replica)
    state = ShardedRandomState(replica, "cpu", group)
    outside, inside = [_mask()], []
    with state:
        inside += [_mask()]
    outside += [_mask()]
    with pytest.raises(KeyError), state:
        inside += [_mask()]
        raise KeyError
    outside += [_mask()]
    assert outside == undisturbed

    with ShardedRandomState(replica, "cpu", group):
        assert [_mask(), _mask()] == inside, "two uses draw what one longer use draws"
    with ShardedRandomState(seed=17, device="cpu", group=group):
        same_seed = _mask()
    return replica, outside, inside, same_seed


@every_layout
def test_masks_are_equal_over_the_group_except_inside_the_sharded_state(world_size, tp):
    masks = run(world_size, _masks, tp)
    for (rank, mine), (other_rank, other) in combinations(enumerate(masks), 2):
        replica, outside, _, same_seed = mine
        assert (outside == other[1]) == (replica == other[0])
        same_rank_in_group = rank // (world_size // tp) == other_rank // (world_size // tp)
        assert (same_seed == other[3]) == same_rank_in_group
    outside = {tuple(mask) for _, uses, _, _ in masks for mask in uses}
    inside = [tuple(mask) for _, _, uses, _ in masks for mask in uses]
    assert len(set(inside)) == len(inside) == 2 * world_size
    assert not outside & set(inside)


# ---- errors --------------------------------------------------------------------------------------


def _errors():
    with pytest.raises(ValueError, match="out_features=10 .*tp=3"):
        ColumnParallelLinear(4, 10)
    with pytest.raises(ValueError, match="out_features=.*tp=3"):
        ColumnParallelLinear(3, 12, blocks=3)
    with pytest.raises(ValueError, match="in_features=4 .*tp=3"):
        RowParallelLinear(4, 3)
    with pytest.raises(ValueError, match="num_embeddings=2 .*tp=3"):
        VocabParallelEmbedding(2, 4)


def test_sizes_that_cannot_be_split_are_named():
    run(3, _errors)
