"""Tensor parallelism against plain torch.nn: outputs, every gradient, bytes, dropout masks."""

import copy
import io
import random
from contextlib import nullcontext
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import reference_gpt
import tensor_parallel
from pipeline import RandomState
from collectives import copy_to_group, count_bytes, rank_and_size
from gpu_counts import batches, waits
from pipeline import Pipeline, WeightGradStore, one_f_one_b
from ranks import least_bytes, on_ranks, run
from sequence_parallel import TransformerLayer, saved_bytes
from tensor_parallel import (
    ColumnParallelLinear, ParallelSelfAttention, RowParallelLinear, Shard, ShardedRandomState,
    VocabParallelEmbedding, alexnet, attention, column_linear, gather_shards, is_sharded,
    mark_partial, parallel_linear, row_linear, shard_sizes, sum_partial_gradients, take_shard,
    tensor_parallel_layer_bytes, unique_ranges, vocab_parallel_cross_entropy,
)

# Sizes of tensor-parallel groups, and how many there are. They are interleaved: with (2, 2) they
# are ranks 0, 2 and ranks 1, 3, and they see different data.
LAYOUTS = [(1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (2, 2), (3, 2)]


def in_layouts(*layouts):
    """Like on_ranks(), for a body of (tp, replicas, ...)."""
    ranks = on_ranks(lambda tp, replicas, **_: tp * replicas)
    return lambda body: pytest.mark.parametrize("tp, replicas", layouts)(ranks(body))


def _group(tp, replicas):
    """This rank's tensor-parallel group, and the number of the replica that the group is."""
    if replicas == 1:
        return None, 0
    groups = [dist.new_group(list(range(r, tp * replicas, replicas))) for r in range(replicas)]
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


def _error(found, expected):
    return (found.double() - expected).norm() / expected.norm()


# ---- layers --------------------------------------------------------------------------------------


def _check(plain, parallel, x, group, x_split=None, y_split=None, batch_first=False):
    """Output, input gradient and every parameter gradient of `parallel` are those of `plain`.

    x_split, y_split: (dim, blocks) along which the input or output is split. batch_first: whether
    `plain` wants the first two dims of x in the other order.
    """
    part = lambda full, dim, blocks: _shard(full, dim % full.ndim, group, blocks)
    shard = lambda full, split: part(full, *split) if split else full
    plain.double(), parallel.double()
    plain.zero_grad(), parallel.zero_grad()
    with torch.no_grad():
        for full, local in zip(plain.parameters(), parallel.parameters(), strict=True):
            local.copy_(take_shard(full, local, group))

    full_x, local_x = x.clone(), shard(x, x_split).clone()
    if x.is_floating_point():
        full_x.requires_grad_(), local_x.requires_grad_()
    flip = lambda tensor: tensor.transpose(0, 1) if batch_first else tensor
    full_y, local_y = flip(plain(flip(full_x))), parallel(local_x)
    grad = torch.randn(full_y.shape, dtype=torch.float64)
    local_grad = shard(grad, y_split).clone()
    full_y.backward(grad)
    local_y.backward(local_grad)
    sum_partial_gradients(parallel.parameters(), group)

    _equal(local_y, shard(full_y.detach(), y_split))
    assert torch.equal(local_x, shard(x, x_split)), "the input was changed"
    assert torch.equal(local_grad, shard(grad, y_split)), "grad_output was changed"
    if x.is_floating_point():
        _equal(local_x.grad, shard(full_x.grad, x_split))
    expected, found = dict(plain.named_parameters()), dict(parallel.named_parameters())
    assert list(found) == list(expected)
    for name, full in expected.items():
        gathered = gather_shards(found[name].grad, found[name], group)
        _equal(gathered, full.grad, name=name)


def _cases(number, replica):
    """Random sizes, the same on all ranks, and torch seeded alike in a tensor-parallel group."""
    for case in range(number):
        torch.manual_seed(100 * replica + case)
        yield random.Random(case)


@in_layouts(*LAYOUTS)
def test_column_and_row_linears_are_parts_of_one_linear(tp, replicas):
    group, replica = _group(tp, replicas)
    for sizes in _cases(8, replica):
        shape = [sizes.randint(1, 5) for _ in range(sizes.randint(0, 2))]
        along_sequence = sizes.random() < 0.5
        if along_sequence:
            shape[:1] = [tp * sizes.randint(1, 3)]
        bias, blocks = sizes.random() < 0.7, sizes.choice([1, 3])
        in_features, out_features = sizes.randint(1, 7), blocks * tp * sizes.randint(1, 4)
        options = {"group": group, "sequence_parallel": along_sequence}
        options["save_gathered"] = sizes.random() < 0.5
        whole = (0, 1) if along_sequence else None
        x = torch.randn(*shape, in_features, dtype=torch.float64)
        plain = nn.Linear(in_features, out_features, bias)
        parts = ((out_features // blocks, tp),) * blocks
        column = ColumnParallelLinear(in_features, out_features, bias, parts, **options)
        assert [is_sharded(p) for p in column.parameters()] == [True] * (1 + bias)
        _check(plain, column, x, group, x_split=whole, y_split=(-1, blocks))

        x = torch.randn(*shape, out_features, dtype=torch.float64)
        plain = nn.Linear(out_features, in_features, bias)
        row = RowParallelLinear(out_features, in_features, bias, **options)
        assert [is_sharded(p) for p in row.parameters()] == [True, False][: 1 + bias]
        _check(plain, row, x, group, x_split=(-1, 1), y_split=whole)


@on_ranks(1, 3)
def test_the_idea_of_a_linear_is_the_real_one():
    rank, _ = rank_and_size()
    column, row = ColumnParallelLinear(4, 6), RowParallelLinear(6, 5)
    own = torch.randn(7, row.weight.shape[1]) + rank
    for layer, idea, x in ((column, column_linear, torch.randn(7, 4)), (row, row_linear, own)):
        layer.bias.data.normal_()
        x, found = x.requires_grad_(), []
        for y in (layer(x), idea(x, layer.weight, layer.bias)):
            found.append([y, *torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()])])
        for real, simple in zip(*found):
            _equal(real, simple, 1e-6)


@on_ranks(1, 2, 3)
def test_weight_products_can_be_put_off():
    """They go to an open store, and give the same bits later; frozen parameters, too."""
    _, tp = rank_and_size()
    for column, along_sequence in product((True, False), (False, True)):
        store, grads = WeightGradStore(), []
        torch.manual_seed(0)
        x = torch.randn(2 * tp, 3, 4)
        weight, bias = torch.randn(5, 4), torch.randn(5)
        for defer, opened in ((None, False), (store, False), (store, True)):
            leaves = [p.clone().requires_grad_() for p in (x, weight, bias)]
            y = parallel_linear(*leaves, column, sequence_parallel=along_sequence, defer=defer)
            with store.collect() if opened else nullcontext([]) as put_off:
                y.sin().sum().backward()
            if opened:
                assert leaves[1].grad is None and leaves[2].grad is None
                assert [parameter for parameter, _ in put_off] == leaves[1:]
            for parameter, product_of in put_off:
                parameter.grad = product_of()
            grads.append([leaf.grad for leaf in leaves])
        for other in grads[1:]:
            assert all(map(torch.equal, grads[0], other))
        leaf = bias.clone().requires_grad_()
        y = parallel_linear(x, weight, leaf, column, sequence_parallel=along_sequence)
        y.sum().backward()
        assert weight.grad is None and leaf.grad is not None


@on_ranks(1)
def test_microbatches_but_the_last_add_products_to_the_gradient_that_there_is():
    layer = ColumnParallelLinear(4, 3, defer=WeightGradStore()).double()
    loss_fn = lambda y, target: (y - target).square().sum()
    pipeline = Pipeline(layer, one_f_one_b(1, 4), loss_fn, defer=layer.options.defer)
    x, target = torch.randn(8, 5, 4).double(), torch.randn(8, 5, 3).double()
    expected = torch.autograd.grad(loss_fn(layer(x), target), list(layer.parameters()))
    added = []

    class Sums(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            added.append(function is torch.ops.aten.addmm_.default)
            return function(*args, **(kwargs or {}))

    step, backward = pipeline.step, lambda x, target: loss_fn(layer(x), target).backward()
    for run_once, found in ((step, 2), (step, 3), (backward, 0)):  # the very first makes it
        added.clear()
        with Sums():
            run_once(x, target)
        assert sum(added) == found
        for parameter, gradient in zip(layer.parameters(), expected):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-13, atol=1e-13)
        layer.zero_grad(set_to_none=False)


@on_ranks(2)
def test_layers_treat_hooks_frozen_weights_autocast_and_empty_batches_as_torch_nn_does():
    layer = RowParallelLinear(8, 4, defer=WeightGradStore())
    with torch.autograd.graph.save_on_cpu():
        y = layer(torch.randn(3, 4, requires_grad=True))
    with layer.options.defer.collect() as put_off:
        y.sum().backward()
    assert [parameter for parameter, _ in put_off] == [layer.weight]
    layer = ColumnParallelLinear(8, 4)
    layer.weight.requires_grad_(False)
    with saved_bytes(layer.parameters()) as count:
        layer(torch.randn(3, 8, requires_grad=True))
    assert count() == 0
    for layer, width in ((ColumnParallelLinear(8, 4), 8), (RowParallelLinear(8, 4), 4)):
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.randn(3, width)).dtype == torch.bfloat16
            assert layer.double()(torch.randn(3, width).double()).dtype == torch.float64
    assert ParallelSelfAttention(8, 2)(torch.zeros(3, 0, 8)).shape == (3, 0, 8)


def _overlap(along_sequence):
    """The order of what happens in a column-parallel backward."""
    _, tp = rank_and_size()
    events, names = [], ("all_gather_single", "all_reduce", "reduce_scatter_single")
    originals = {name: getattr(tensor_parallel, name) for name in names}

    def logged(name):
        def operation(*args, async_op=False, **kwargs):
            events.append(f"begin {name}")
            work = originals[name](*args, **kwargs, async_op=async_op)
            if async_op:
                wait = work.wait
                work.wait = lambda: (events.append(f"wait for {name}"), wait())
            return work

        return operation

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "mm" in str(function):
                events.append("product")
            return function(*args, **(kwargs or {}))

    layer = ColumnParallelLinear(4, 4 * tp, sequence_parallel=along_sequence)
    y = layer(torch.randn(2, 3, 4, requires_grad=True))
    with patch.multiple(tensor_parallel, **{name: logged(name) for name in names}), Products():
        y.sum().backward()
    return events


@on_ranks(2)
def test_communication_in_backward_runs_beside_the_products():
    reduced = ["product", "begin all_reduce", "product", "wait for all_reduce"]
    assert _overlap(False) == reduced
    gather, scatter = "all_gather_single", "reduce_scatter_single"
    begin = [f"begin {gather}", "product", f"begin {scatter}", f"wait for {gather}"]
    assert _overlap(True) == [*begin, "product", f"wait for {scatter}"]


@pytest.mark.parametrize("along_sequence", [False, True])
@in_layouts(*LAYOUTS)
def test_mlp_attention_and_a_whole_layer_recomputed_or_not(tp, replicas, along_sequence):
    group, replica = _group(tp, replicas)
    for case, sizes in enumerate(_cases(6, replica)):
        heads = tp * sizes.randint(1, 2)
        fits = lambda kv: heads % kv == 0 and (kv % tp == 0 or tp % kv == 0)
        kv_heads = sizes.choice([kv for kv in range(1, heads + 1) if fits(kv)])
        D, B, T = heads * sizes.randint(1, 4), sizes.randint(1, 3), tp * sizes.randint(1, 3)
        x = torch.randn(T, B, D, dtype=torch.float64)
        plain = reference_gpt.Layer(D, heads, kv_heads)
        options = {"group": group, "sequence_parallel": along_sequence}
        options |= {"save_gathered": sizes.random() < 0.5, "attention_fn": attention}
        options["mode"] = ("none", "selective", "full")[case % 3]
        parallel = TransformerLayer(D, heads, kv_heads, **options)
        split = {"x_split": (0, 1), "y_split": (0, 1)} if along_sequence else {}
        _check(plain.mlp, parallel.mlp, x, group, **split)
        _check(plain.attn, parallel.attn, x, group, **split, batch_first=True)
        _check(plain, parallel, x, group, **split, batch_first=True)
        squares = torch.zeros((), dtype=torch.float64) + sum(
            parameter.grad.flatten()[begin:end].square().sum()
            for parameter in parallel.parameters()
            for begin, end in unique_ranges(parameter, group)
        )
        dist.all_reduce(squares, group=group)
        _equal(squares, sum(p.grad.square().sum() for p in plain.parameters()), name="norm")


@on_ranks(1, 2, 3)
def test_gradients_in_bf16_are_those_of_fp64_but_for_a_few_per_cent():
    """Of each parameter, and of the input."""
    _, tp = rank_and_size()
    D, heads, kv_heads, T, low = 8 * tp, 2 * tp, tp, 2 * tp, torch.bfloat16
    hows = "autocast", "bf16", "bf16, summed in fp32"
    for along_sequence, defer, how in product((False, True), (None, WeightGradStore()), hows):
        sums = low if how == "bf16" else torch.float32
        torch.manual_seed(0)
        plain = reference_gpt.Layer(D, heads, kv_heads).double()
        options = {"sequence_parallel": along_sequence, "defer": defer}
        layer = TransformerLayer(D, heads, kv_heads, attention_fn=attention, **options)
        for parameter, own in zip(plain.parameters(), layer.parameters(), strict=True):
            parameter.data = torch.randn(parameter.shape).mul(D**-0.5).to(low).double()
            own.data = take_shard(parameter.detach(), own).to(torch.float32)
        x, grad = torch.randn(2, T, 3, D).to(low).double()
        x.requires_grad_()
        y = plain(x.transpose(0, 1)).transpose(0, 1)
        y.backward(grad)
        part = lambda full: _shard(full, 0, None) if along_sequence else full
        local = part(x.detach()).to(torch.float32 if how == "autocast" else low).requires_grad_()
        layer.to(local.dtype)
        for parameter in layer.parameters():
            parameter.grad_dtype = sums
        with torch.autocast("cpu", low, enabled=how == "autocast"):
            found = layer(local)
        assert found.dtype == local.dtype
        with defer.collect() if defer else nullcontext([]) as put_off:
            found.backward(part(grad).to(found.dtype))
        assert len(put_off) == 6 * (defer is not None)  # 4 matrices, 2 column-parallel biases
        for parameter, product_of in put_off:
            torch.autograd.backward(parameter, product_of())
        sum_partial_gradients(layer.parameters())
        assert {parameter.grad.dtype for parameter in layer.parameters()} == {sums}
        pairs = {"output": (found, part(y)), "input": (local.grad, part(x.grad))}
        for (name, parameter), own in zip(plain.named_parameters(), layer.parameters()):
            pairs[name] = own.grad, take_shard(parameter.grad, own)
        for name, pair in pairs.items():
            assert _error(*pair) < 0.03, f"{name}, {how}, {options}: {_error(*pair)}"


@on_ranks(2)
def test_a_partial_parameter_may_be_unused_on_a_rank():
    rank, _ = rank_and_size()
    norm, scalar = mark_partial(nn.LayerNorm(4)), nn.Parameter(torch.tensor(2.0))
    columns = nn.Parameter(torch.randn(4, 3).t())  # whose gradient is not contiguous either
    scalar.partial = columns.partial = True
    parameters = [*norm.parameters(), scalar, columns]
    (norm(torch.randn(3, 4)) * scalar * columns).sum().backward()
    expected = [p.grad.clone() for p in parameters]
    for parameter in parameters if rank == 1 else ():
        parameter.grad = None
    sum_partial_gradients(parameters)
    assert all(map(torch.equal, expected, [p.grad for p in parameters]))


@on_ranks(2)
def test_partial_gradients_of_bf16_weights_are_summed_in_fp32():
    """One rank has not used one."""
    rank, _ = rank_and_size()
    norm = mark_partial(nn.LayerNorm(4)).bfloat16()
    for parameter in norm.parameters():
        parameter.grad_dtype = torch.float32
    norm.weight.grad = torch.full((4,), (256.0, 1.0)[rank])
    if rank == 0:
        norm.bias.grad = torch.full((4,), 1 / 3)
    with waits() as waited:
        sum_partial_gradients(norm.parameters())
    assert not waited
    assert torch.equal(norm.weight.grad, torch.full((4,), 257.0))
    assert torch.equal(norm.bias.grad, torch.full((4,), 1 / 3))


@pytest.mark.parametrize(
    "dtype, device, repeated",
    [(torch.float32, "cuda", True), (torch.bfloat16, "cuda", False), (torch.float32, "cpu", False)],
)
def test_on_a_gpu_keys_and_values_of_fp32_are_repeated_for_its_only_kernel(dtype, device, repeated):
    with FakeTensorMode(), patch.object(F, "scaled_dot_product_attention") as kernel:
        make = lambda heads: torch.empty(1, heads, 4, 8, dtype=dtype, device=device)
        attention(make(4), make(2), make(2))
    q, k, v = kernel.call_args.args
    assert k.shape == v.shape and (k.shape == q.shape) == repeated
    assert kernel.call_args.kwargs["enable_gqa"] != repeated


@on_ranks(1)
def test_one_rank_computes_the_very_bits_of_torch_nn():
    x = torch.randn(2, 5, 64)
    for layer in (ColumnParallelLinear(64, 48), RowParallelLinear(64, 48)):
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


# ---- what a rank holds of a parameter ------------------------------------------------------------


@in_layouts(*LAYOUTS)
def test_take_shard_and_gather_shards_are_inverse(tp, replicas):
    group, replica = _group(tp, replicas)
    rank, _ = rank_and_size(group)
    for sizes in _cases(20, replica):
        shape = [sizes.randint(1, 4) for _ in range(sizes.randint(1, 4))]
        dim, blocks = sizes.randrange(len(shape)), sizes.choice([1, 1, 2, 3])
        rows = sizes.randint(1, 3 * tp)  # uneven, and smaller than the group
        shape[dim] = blocks * rows
        dtype = sizes.choice([torch.float64, torch.float32, torch.int64])
        parameter = nn.Parameter(torch.empty(0))
        full = torch.randn(shape).mul(100).to(dtype)

        assert not is_sharded(parameter)
        assert torch.equal(take_shard(full, parameter, group), full)
        same = gather_shards(full, parameter, group)
        assert torch.equal(same, full) and same.data_ptr() != full.data_ptr()

        parameter.shard = Shard(dim, ((rows, tp),) * blocks)
        local = take_shard(full, parameter, group)
        assert is_sharded(parameter) and torch.equal(local, _shard(full, dim, group, blocks))
        assert local.shape[dim] == blocks * shard_sizes(shape[dim] // blocks, tp)[rank]
        assert torch.equal(gather_shards(local, parameter, group), full)
        other = torch.randn(local.shape).mul(100).to(dtype) + 1000 * rank
        gathered = gather_shards(other, parameter, group)
        assert torch.equal(take_shard(gathered, parameter, group), other)


def test_a_block_in_fewer_parts_than_ranks_is_held_by_neighbours():
    shard = Shard(0, ((8, 4), (4, 2), (3, 1)))
    assert [shard.rows_of(rank, 4) for rank in range(4)] == [
        [(0, 2), (8, 2), (12, 3)],
        [(2, 2), (8, 2), (12, 3)],
        [(4, 2), (10, 2), (12, 3)],
        [(6, 2), (10, 2), (12, 3)],
    ]


def _marks(module):
    return {name: (getattr(p, "shard", None), getattr(p, "partial", False))
            for name, p in module.named_parameters()}


@on_ranks(2)
def test_copies_and_whatever_takes_the_place_of_a_parameter_have_its_shard_and_partial():
    layer = TransformerLayer(12, 6, 2, attention_fn=attention, sequence_parallel=True)
    del layer.attn.attention_fn  # a lambda, which cannot be pickled
    layer.embedding = VocabParallelEmbedding(7, 4)
    expected = _marks(layer)
    kinds = {(shard is not None, partial) for shard, partial in expected.values()}
    assert kinds == {(True, False), (False, True)}
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [copy.deepcopy(layer), torch.load(file, weights_only=False)]
    copies += [copy.deepcopy(copies[1]), layer]
    copies[0].load_state_dict(copies[1].state_dict(), assign=True)
    for other in copies:
        assert _marks(other) == expected
    assert all(p is not q for p, q in zip(copies[0].parameters(), layer.parameters()))
    layer.to("meta").to_empty(device="cpu").half()
    layer.mlp.c_fc.weight = nn.Parameter(torch.zeros_like(layer.mlp.c_fc.weight))
    assert _marks(layer) == expected


def _pieces_of(parameter, cut):
    """The parameter as FSDP over two ranks would have it: two flat ranges of it, maybe empty."""
    pieces = []
    for first, end in ((0, cut), (cut, parameter.numel())):
        piece = nn.Parameter(parameter.detach().flatten()[first:end])
        vars(piece).update(vars(parameter), first=first, whole_shape=parameter.shape)
        piece.grad = parameter.grad.flatten()[first:end].clone()
        pieces.append(piece)
    return pieces


@on_ranks(1, 2, 4, 6)
def test_gradients_norms_and_shards_of_fsdps_pieces_are_those_of_the_whole():
    rank, tp = rank_and_size()
    for sizes in (random.Random(case) for case in range(3)):
        layer = TransformerLayer(24, 12, 2, attention_fn=attention, sequence_parallel=True)
        halves = []
        for parameter in layer.parameters():
            parameter.grad = torch.randn(parameter.shape) + rank
            cut = sizes.choice([0, parameter.numel(), sizes.randint(0, parameter.numel())])
            halves.append(_pieces_of(parameter, cut))
        for pieces in zip(*halves):
            sum_partial_gradients(pieces)
        sum_partial_gradients(layer.parameters())
        for (name, parameter), pieces in zip(layer.named_parameters(), halves):
            flat = parameter.grad.flatten()
            _equal(torch.cat([piece.grad for piece in pieces]), flat, name=name)
            counted = [
                piece.grad[max(0, begin - piece.first) : max(0, end - piece.first)]
                for piece in pieces
                for begin, end in unique_ranges(piece)
            ]
            expected = [flat[begin:end] for begin, end in unique_ranges(parameter)]
            squares = lambda parts: sum(part.square().sum() for part in parts)
            _equal(squares(counted), squares(expected), 1e-6, name)
            full = torch.randn(gather_shards(parameter, parameter).shape)
            own = torch.cat([take_shard(full, piece) for piece in pieces])
            assert torch.equal(own, take_shard(full, parameter).flatten())
            assert torch.equal(gather_shards(take_shard(full, parameter), pieces[0]), full)
    weight = layer.attn.c_proj.weight
    with pytest.raises(ValueError, match=rf"a piece \(5,\) of \(24, {24 // tp}\) cannot be gath"):
        gather_shards(torch.zeros(5), _pieces_of(weight, 5)[0])


@on_ranks(2)
def test_pieces_that_differ_between_ranks_are_an_error_on_all_of_them():
    rank, _ = rank_and_size()
    weight = mark_partial(nn.LayerNorm(6)).weight
    weight.grad = torch.ones(6)
    message = r"rank 1 .*elements from 0 of \(6,\)' \(3,\).*rank 0 .* \(2,\)"
    with pytest.raises(ValueError, match=message):
        sum_partial_gradients(_pieces_of(weight, 2 + rank)[:1])


def _initial_weights():
    torch.manual_seed(5)
    layers = [
        ParallelSelfAttention(24, 12, 2),
        RowParallelLinear(12, 5),
        VocabParallelEmbedding(13, 4),
    ]
    drawn = torch.rand(3)
    return [gather_shards(p, p) for layer in layers for p in layer.parameters()], drawn


def test_initial_weights_do_not_depend_on_the_number_of_ranks():
    one, drawn = run(1, _initial_weights)[0]
    for tp in (2, 6):
        for weights, again in run(tp, _initial_weights):
            assert torch.equal(drawn, again) and all(map(torch.equal, weights, one))


# ---- vocabulary ----------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """Embedding and head that share their weight; per-token losses of the next token."""

    def __init__(self, embedding, losses):
        super().__init__()
        self.embedding, self.losses = embedding, losses

    def forward(self, tokens):
        x = self.embedding(tokens).tanh().flatten(0, -2)
        return self.losses(x, self.embedding.weight, tokens.roll(-1).flatten())


@in_layouts(*LAYOUTS)
def test_embedding_and_a_tied_head_with_its_loss(tp, replicas):
    group, replica = _group(tp, replicas)
    for sizes in _cases(4, replica):
        V, D = sizes.choice([tp, 2 * tp + 1, 101, 6 * tp]), sizes.randint(1, 5)
        tokens = torch.cat([torch.randperm(V), torch.randint(V, (V,))]).view(2, V)
        plain, embedding = nn.Embedding(V, D), VocabParallelEmbedding(V, D, group)
        _check(plain, embedding, tokens, group)
        along = VocabParallelEmbedding(V, D, group, sequence_parallel=True)
        _check(plain, along, tokens.view(-1)[: V // tp * tp], group, y_split=(0, 1))

        def plain_losses(x, weight, target):
            return F.cross_entropy(F.linear(x, weight), target, reduction="none")

        def parallel_losses(x, weight, target):
            logits = parallel_linear(x, weight, group=group)
            start = embedding.start
            return vocab_parallel_cross_entropy(logits, target, start, group=group, inplace=True)

        models = LanguageModel(plain, plain_losses), LanguageModel(embedding, parallel_losses)
        _check(*models, tokens, group)


@on_ranks(2)
def test_the_gradient_of_a_token_that_comes_often_is_summed_in_fp32():
    """bf16 counts to 256. 600 is one of its numbers."""
    embedding = VocabParallelEmbedding(4, 3).bfloat16()
    expected = torch.zeros(4, 3)
    expected[1] = 600
    for dtype in (torch.bfloat16, torch.float32):
        embedding.weight.grad_dtype = dtype
        embedding(torch.tensor([1]).repeat(600)).sum().backward()
        whole = gather_shards(embedding.weight.grad, embedding.weight)
        assert whole.dtype == dtype and torch.equal(whole.float(), expected)
        embedding.weight.grad = None


def _loss_of_shards(full, target, group, ignore_index, inplace):
    """The leaf of this rank's columns of the `full` logits, and the losses computed from it."""
    rank, world_size = rank_and_size(group)
    columns = np.array_split(np.arange(full.shape[-1]), world_size)[rank]
    logits = full[:, columns].clone().requires_grad_()
    before = logits.detach().clone(), target.clone()
    losses = vocab_parallel_cross_entropy(
        logits, target, int(columns[0]), ignore_index, group, inplace
    )
    kept = torch.equal(logits, before[0])
    assert kept != inplace or world_size > logits.shape[1]
    assert torch.equal(target, before[1]), "an input was changed"
    return logits, columns, losses


def _gradient(losses, logits, grad_output):
    before = grad_output.clone()
    grad = torch.autograd.grad(losses, logits, grad_output, retain_graph=True)[0]
    assert torch.equal(grad_output, before), "grad_output was changed"
    return grad


@in_layouts(*LAYOUTS)
def test_cross_entropy_of_split_logits(tp, replicas):
    group, replica = _group(tp, replicas)
    for sizes in _cases(12, replica):
        V, N = sizes.choice([tp, 2 * tp + 1, 101]), sizes.randint(1, 9)
        full, target = torch.randn(N, V, dtype=torch.float64), torch.randint(V, (N,))
        if sizes.random() < 0.5:  # exp(1e4) and exp(-1e4) are infinity and zero, in fp64 too
            full += torch.tensor([1e4, -1e4])[torch.randint(2, (N, V))]
        ignore_index, ignored = sizes.choice([-100, V // 2]), sizes.choice([0.0, 0.4, 1.0])
        target[torch.rand(N) < ignored] = ignore_index

        whole = full.clone().requires_grad_()
        expected = F.cross_entropy(whole, target, ignore_index=ignore_index, reduction="none")
        inplace = sizes.random() < 0.5
        logits, columns, losses = _loss_of_shards(full, target, group, ignore_index, inplace)
        _equal(losses, expected)
        assert losses.dtype == torch.float64 and losses[target == ignore_index].eq(0).all()
        grad_output = torch.randn(N, dtype=torch.float64)
        grad = torch.autograd.grad(expected, whole, grad_output)[0]
        _equal(_gradient(losses, logits, grad_output), grad[:, columns])
        with pytest.raises(RuntimeError, match="there only once"):
            _gradient(losses, logits, grad_output)


@on_ranks(1, 3)
def test_ids_outside_of_the_vocabulary_are_nan():
    embedding, logits = VocabParallelEmbedding(7, 2), torch.randn(5, 7)
    ids = torch.tensor([0, 7, 6, -1, -100])
    y = embedding(ids)
    assert y.isnan().any(-1).tolist() == y.isnan().all(-1).tolist() == [0, 1, 0, 1, 1]
    start = embedding.start
    own = logits[:, start : start + len(embedding.weight)]
    losses = vocab_parallel_cross_entropy(own, ids, start)
    assert losses.isnan().tolist() == [0, 1, 0, 1, 0] and losses[4] == 0


@on_ranks(1, 3)
def test_cross_entropy_is_computed_in_fp32_and_its_gradient_is_in_the_dtype_of_the_logits():
    target, bounds = torch.tensor([0, 12, 5, -100, 7]), {torch.bfloat16: 2**-7, torch.float32: 1e-6}
    for dtype, inplace in product(bounds, (False, True)):
        full = torch.randn(5, 13).mul(10).to(dtype)
        whole = full.double().requires_grad_()
        expected = F.cross_entropy(whole, target, reduction="none")
        expected_grad = torch.autograd.grad(expected, whole, torch.arange(5.0).double())[0]
        logits, columns, losses = _loss_of_shards(full, target, None, -100, inplace)
        assert losses.dtype == torch.float32
        _equal(losses.double(), expected, 1e-5)
        grad = _gradient(losses, logits, torch.arange(5.0))
        assert grad.dtype == dtype
        torch.testing.assert_close(
            grad.double(), expected_grad[:, columns], rtol=bounds[dtype], atol=1e-6
        )


def _peak_of_loss(inplace, dtype):
    """The most bytes of tensors as large as the logits, beside those, that were alive at a time.

    And what was alive between forward and backward.
    """
    N, V, large, peak = 64, 512, [], 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal peak
            output = function(*args, **(kwargs or {}))
            for tensor in output if isinstance(output, (tuple, list)) else [output]:
                if torch.is_tensor(tensor) and tensor.numel() >= N * V // 2:
                    storage = tensor.untyped_storage()
                    large.append((storage.data_ptr(), storage.nbytes(), StorageWeakRef(storage)))
            large[:] = [entry for entry in large if not entry[2].expired()]
            peak = max(peak, sum({address: n for address, n, _ in large}.values()))
            return output

    leaf = torch.randn(N, V, dtype=dtype, requires_grad=True)
    logits = leaf * 1
    own = logits.untyped_storage().data_ptr(), logits.nbytes
    with Watch():
        losses = vocab_parallel_cross_entropy(logits, torch.arange(N), inplace=inplace)
        del logits
        kept = {address: n for address, n, alive in large if not alive.expired()}
        losses.sum().backward()
    return peak - own[1] * inplace, sum(kept.values())


@on_ranks(1)
def test_the_gradient_of_the_logits_takes_one_copy_of_them_or_their_place():
    nbytes = 64 * 512 * 4
    # the leaf's gradient is a copy, too
    assert _peak_of_loss(False, torch.float32) == (2 * nbytes, nbytes)
    assert _peak_of_loss(True, torch.float32) == (nbytes, nbytes)
    for inplace in (False, True):  # the copy in fp32 is gone when forward ends
        peaked, kept = _peak_of_loss(inplace, torch.bfloat16)
        assert kept == nbytes // 2 and peaked <= nbytes + nbytes // 2


@on_ranks(1)
def test_logits_that_others_still_need_are_not_lost_in_silence():
    logits = torch.randn(3, 5, requires_grad=True).exp()  # exp's backward wants what it returned
    losses = vocab_parallel_cross_entropy(logits, torch.arange(3), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


# ---- bytes ---------------------------------------------------------------------------------------

# 8 b s h (t-1)/t of which half in forward; 10 where inputs are gathered again
WAYS = [(False, False, 4, 4), (True, True, 4, 4), (True, False, 4, 6)]
every_way = pytest.mark.parametrize("along_sequence, save_gathered, forward, backward", WAYS)


@every_way
@in_layouts((1, 1), (2, 1), (3, 1), (6, 1), (2, 2))
def test_a_layer_sends_8_b_s_h_elements_times_t_minus_1_over_t_or_10(
    tp, replicas, along_sequence, save_gathered, forward, backward
):
    B, T, heads = 2, 12, 12
    D = 2 * heads
    elements, again = B * T * D * (tp - 1) // tp, forward + backward == 10
    claimed = tensor_parallel_layer_bytes(B, T, D, tp, regather=again)
    assert claimed == 4 * (forward + backward) * elements
    assert tensor_parallel_layer_bytes(B, T, D, tp, 2, again) == claimed / 2
    options = {"sequence_parallel": along_sequence, "save_gathered": save_gathered}
    layer = TransformerLayer(D, heads, group=_group(tp, replicas)[0], **options)
    for module, share in ((layer.attn, 0.5), (layer.mlp, 0.5), (layer, 1)):
        with least_bytes(), count_bytes() as traffic:
            y = module(torch.randn(T // tp if along_sequence else T, B, D, requires_grad=True))
            sent = traffic.bytes()
            y.sum().backward()
        assert sent == 4 * forward * elements * share  # bytes of fp32
        assert traffic.bytes() - sent == 4 * backward * elements * share


@pytest.mark.parametrize("deferred", [False, True])
@every_way
@on_ranks(2, 4)
def test_a_layer_launches_four_batches_forward_and_six_backward(
    along_sequence, save_gathered, forward, backward, deferred
):
    """Those of bytes above: one for each gather or reduce-scatter, two for each all-reduce."""
    _, tp = rank_and_size()
    defer = WeightGradStore() if deferred else None
    options = {"sequence_parallel": along_sequence, "save_gathered": save_gathered, "defer": defer}
    layer = TransformerLayer(8 * tp, 2 * tp, tp, attention_fn=attention, **options)
    x = torch.randn(2 if along_sequence else 2 * tp, 4, 8 * tp, requires_grad=True)
    with batches() as count, waits() as waited:
        y = layer(x)
        launched = count["batches"]
        with defer.collect() if deferred else nullcontext([]) as put_off:
            y.sum().backward()
        assert not deferred or count["batches"] - launched == 4  # what is put off gathers later
        for _, product_of in put_off:
            product_of()
    assert not waited and not count["off 16"]
    assert (launched, count["batches"] - launched) == (forward, backward)


@in_layouts(*LAYOUTS)
def test_the_loss_reduces_3_floats_per_token(tp, replicas):
    N = 384  # any tp of these cuts it on 128 bytes
    logits, group = torch.randn(N, 5, requires_grad=True), _group(tp, replicas)[0]
    with least_bytes(), count_bytes() as traffic:
        losses = vocab_parallel_cross_entropy(logits, torch.arange(N) % 5, group=group)
        forward = traffic.bytes(), traffic.messages()
        losses.sum().backward()
    assert traffic.bytes() == forward[0], "backward needs no message"
    # a maximum of N floats and a sum of 2 N, in two all-reduces
    assert forward == (2 * 3 * N * 4 * (tp - 1) // tp, 2 * 2 * (tp - 1))


# ---- dropout -------------------------------------------------------------------------------------


@in_layouts(*LAYOUTS)
def test_masks_are_equal_over_the_group_except_inside_the_sharded_state(tp, replicas):
    group, replica = _group(tp, replicas)
    state, mask = ShardedRandomState("cpu", group), lambda: F.dropout(torch.ones(64)).tolist()
    torch.manual_seed(1000 + replica)
    begun, outside, inside = RandomState(torch.device("cpu")), [mask()], []
    with state:
        inside += [mask()]
    outside += [mask()]
    with pytest.raises(KeyError), state:
        inside += [mask()]
        raise KeyError
    outside += [mask()]
    after = torch.get_rng_state()
    with begun:  # replayed, as recomputation does
        assert mask() == outside[0]
        with ShardedRandomState("cpu", group):
            assert mask() == inside[0]
    assert torch.equal(torch.get_rng_state(), after)
    masks = [None] * (tp * replicas)
    dist.all_gather_object(masks, (replica, outside, inside))
    for other, theirs, _ in masks:
        assert (theirs == outside) == (other == replica)
    outside = {tuple(mask) for _, uses, _ in masks for mask in uses}
    inside = [tuple(mask) for _, _, uses in masks for mask in uses]
    assert len(set(inside)) == len(inside) == 2 * tp * replicas
    assert not outside & set(inside)


# ---- 2012 ----------------------------------------------------------------------------------------


class PlainAlexNet(nn.Module):
    """Convolutions in two groups where a GPU reads only its own channels; norms of each half."""

    def __init__(self, w, dense, classes):
        super().__init__()
        self.convolutions = nn.ModuleList([
            nn.Conv2d(3, w, 11, 4, 2),
            nn.Conv2d(w, w * 8 // 3, 5, 1, 2, groups=2),
            nn.Conv2d(w * 8 // 3, 4 * w, 3, 1, 1),
            nn.Conv2d(4 * w, 4 * w, 3, 1, 1, groups=2),
            nn.Conv2d(4 * w, w * 8 // 3, 3, 1, 1, groups=2),
        ])
        self.dense = nn.ModuleList([
            nn.Linear(w * 8 // 3 * 36, dense), nn.Linear(dense, dense), nn.Linear(dense, classes)
        ])

    def forward(self, x):
        for i, convolution in enumerate(self.convolutions):
            x = convolution(x).relu()
            if i < 2:
                halves = [F.local_response_norm(half, 5, k=2.0) for half in x.chunk(2, 1)]
                x = torch.cat(halves, 1)
            if i in (0, 1, 4):
                x = F.max_pool2d(x, 3, 2)
        x = x.flatten(1)
        for layer in self.dense[:2]:
            x = layer(x).relu()
        return self.dense[2](x)


@on_ranks(2)
def test_alexnet_on_two_ranks_is_the_model_with_grouped_convolutions():
    rank, _ = rank_and_size()
    B, w, dense = 2, 12, 16
    torch.manual_seed(0)
    plain = PlainAlexNet(w, dense, 10).double()
    torch.manual_seed(0)
    net = alexnet(w, dense, 10).double()
    for part, layer in zip(net, [*plain.convolutions, *plain.dense], strict=True):
        for local, full in zip(part.parameters(), layer.parameters(), strict=True):
            assert torch.equal(local, take_shard(full, local))
    images = torch.randn(B, 3, 224, 224, dtype=torch.float64).requires_grad_()
    y, sent = copy_to_group(images), []
    for part in net:
        with count_bytes() as traffic:
            y = part(y)
        sent.append(traffic.bytes())
    reference = images.detach().requires_grad_()
    expected = plain(reference)
    grad = torch.randn(expected.shape, dtype=torch.float64)
    expected.backward(grad)
    with count_bytes() as traffic:
        y.backward(grad.chunk(2, 1)[rank])
    _equal(y, expected.chunk(2, 1)[rank])
    _equal(images.grad, reference.grad)
    for part, layer in zip(net, [*plain.convolutions, *plain.dense]):
        for local, full in zip(part.parameters(), layer.parameters()):
            _equal(local.grad, take_shard(full.grad, local))
    own = [w * 8 // 6 * 13 * 13, w * 8 // 6 * 36, dense // 2, dense // 2]  # what a rank passes on
    third, *of_dense = [8 * B * n for n in own]
    assert sent == [0, 0, third, 0, 0, *of_dense]
    assert traffic.bytes("reduce_scatter_single") == sum(sent)


# ---- errors --------------------------------------------------------------------------------------


@on_ranks(3)
def test_sizes_that_cannot_be_split_are_named():
    with pytest.raises(ValueError, match="out_features=10 .*tp=3"):
        ColumnParallelLinear(4, 10)
    with pytest.raises(ValueError, match="out_features=4 .*tp=3"):
        ColumnParallelLinear(3, 12, blocks=((4, 3), (8, 1)))
    for blocks in (((12, 6),), ((6, 3), (3, 3))):
        with pytest.raises(ValueError, match=rf"blocks=.*{blocks[0][1]}.* out_features=12 .*tp=3"):
            ColumnParallelLinear(3, 12, blocks=blocks)
    with pytest.raises(ValueError, match="heads=4, kv_heads=4 and tp=3"):
        ParallelSelfAttention(24, 4)
    with pytest.raises(ValueError, match="heads=6, kv_heads=2 and tp=3"):
        ParallelSelfAttention(24, 6, 2)
    with pytest.raises(ValueError, match="sequence length 4 is not divisible by tp=3"):
        RowParallelLinear(3, 2, sequence_parallel=True)(torch.zeros(4, 2, 1))
    with pytest.raises(ValueError, match="sequence length 5 is not divisible by tp=3"):
        VocabParallelEmbedding(7, 2, sequence_parallel=True)(torch.zeros(5, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\[10, .*world_size=3 does not divide"):
        alexnet(10, 9, 9)
    with pytest.raises(ValueError, match="in_features=4 .*tp=3"):
        RowParallelLinear(4, 3)
    with pytest.raises(ValueError, match="num_embeddings=2 .*tp=3"):
        VocabParallelEmbedding(2, 4)
