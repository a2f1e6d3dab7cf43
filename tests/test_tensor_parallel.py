"""Tensor parallelism against plain torch.nn: outputs, every gradient, bytes, dropout masks."""

import copy
import io
import random
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import reference_gpt
import tensor_parallel
from collectives import copy_to_group, count_bytes, rank_and_size
from gpu_counts import batches, waits
from pipeline import SCHEDULES, Pipeline, WeightGradStore
from ranks import least_bytes, on_ranks, run
from sequence_parallel import recompute
from tensor_parallel import (
    ColumnParallelLinear, ParallelSelfAttention, RowParallelLinear, Shard, ShardedRandomState,
    VocabParallelEmbedding, alexnet, attention, boxes_of, column_linear, mark_partial,
    parallel_linear, partial_parameters, row_linear, rows_held, shards_of, sum_partial_gradients,
    tensor_parallel_layer_bytes, views_in_whole, vocab_parallel_cross_entropy,
)
from transformer import Peak, TransformerLayer, saved_bytes

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


def _part(full, shard, group=None):
    """numpy's idea of this rank's part of `full`."""
    if shard is None:
        return full.detach()
    rank, world_size = rank_and_size(group)
    blocks = np.split(full.detach().numpy(), np.cumsum(shard.blocks)[:-1], shard.dim)
    own = lambda n: range(rank * n // world_size, (rank + 1) * n // world_size)
    parts = [block.take(own(block.shape[shard.dim]), shard.dim) for block in blocks]
    return torch.from_numpy(np.concatenate(parts, shard.dim))


def _along_sequence(full, group=None):
    return _part(full, Shard(0, (len(full),)), group)


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

    def part(full, split):
        dim, blocks = split or (0, 0)
        shard = Shard(dim % full.ndim, (full.shape[dim] // blocks,) * blocks) if split else None
        return _part(full, shard, group)

    plain.double(), parallel.double()
    plain.zero_grad(), parallel.zero_grad()
    expected, found = dict(plain.named_parameters()), dict(parallel.named_parameters())
    assert list(found) == list(expected)
    shards = shards_of(parallel)
    for name, full in expected.items():
        found[name].data.copy_(_part(full, shards.get(name), group))

    full_x, local_x = x.clone(), part(x, x_split).clone()
    if x.is_floating_point():
        full_x.requires_grad_(), local_x.requires_grad_()
    flip = lambda tensor: tensor.transpose(0, 1) if batch_first else tensor
    full_y, local_y = flip(plain(flip(full_x))), parallel(local_x)
    grad = torch.randn(full_y.shape, dtype=torch.float64)
    local_grad = part(grad, y_split).clone()
    full_y.backward(grad)
    local_y.backward(local_grad)
    sum_partial_gradients(partial_parameters(parallel), group)

    _equal(local_y, part(full_y, y_split))
    assert torch.equal(local_x, part(x, x_split)), "the input was changed"
    assert torch.equal(local_grad, part(grad, y_split)), "grad_output was changed"
    if x.is_floating_point():
        _equal(local_x.grad, part(full_x.grad, x_split))
    for name, full in expected.items():
        _equal(found[name].grad, _part(full.grad, shards.get(name), group), name=name)


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
        whole = (0, 1) if along_sequence else None
        x = torch.randn(*shape, in_features, dtype=torch.float64)
        plain = nn.Linear(in_features, out_features, bias)
        parts = (out_features // blocks,) * blocks
        column = ColumnParallelLinear(in_features, out_features, bias, parts, **options)
        assert list(shards_of(column)) == ["weight", "bias"][: 1 + bias]
        _check(plain, column, x, group, x_split=whole, y_split=(-1, blocks))

        x = torch.randn(*shape, out_features, dtype=torch.float64)
        plain = nn.Linear(out_features, in_features, bias)
        row = RowParallelLinear(out_features, in_features, bias, **options)
        assert list(shards_of(row)) == ["weight"]
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


@pytest.mark.parametrize("column, along_sequence", product((True, False), (False, True)))
@on_ranks(1, 2, 3)
def test_weight_products_can_be_put_off(column, along_sequence):
    """They go to an open store, and give the same bits later; frozen weights have none."""
    (_, tp), store, grads = rank_and_size(), WeightGradStore(), []
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2 * tp, 3, 4), torch.randn(5, 4), torch.randn(5)
    options = {"sequence_parallel": along_sequence, "defer": store}
    for opened in (False, True):
        leaves = [p.clone().requires_grad_() for p in (x, weight, bias)]
        with torch.autograd.graph.save_on_cpu():
            y = parallel_linear(*leaves, column, **options)
        with store.collect() if opened else nullcontext([]) as put_off:
            y.sin().sum().backward()
        assert [parameter for parameter, _ in put_off] == leaves[1:] * opened
        for parameter, product_of in put_off:
            assert parameter.grad is None
            parameter.grad = product_of()
        grads.append([leaf.grad for leaf in leaves])
    assert all(map(torch.equal, *grads))
    leaf = bias.clone().requires_grad_()
    parallel_linear(x, weight, leaf, column, **options).sum().backward()
    assert weight.grad is None and leaf.grad is not None


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("name, added", [("1f1b", 2), ("zb-h1", 0)])
@on_ranks(1)
def test_microbatches_but_the_last_add_to_the_gradient_unless_a_hook_wants_it(name, added, hooked):
    """The first makes the gradient. A hook sees every product, also where others are put off."""
    store, seen, sums = WeightGradStore(), [], []
    layer = ColumnParallelLinear(4, 3, defer=store).double()
    if hooked:
        layer.weight.register_hook(seen.append)
    loss_fn = lambda y, target: (y - target).square().sum()
    x, target = torch.randn(8, 5, 4).double(), torch.randn(8, 5, 3).double()
    expected = torch.autograd.grad(loss_fn(F.linear(x, *layer.parameters()), target), layer.weight)
    pipeline = Pipeline(layer, SCHEDULES[name](1, 4), loss_fn, defer=store)
    seen.clear()

    class Sums(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            sums.append(function is torch.ops.aten.addmm_.default)
            return function(*args, **(kwargs or {}))

    with Sums():
        pipeline.step(x, target)
    assert sum(sums) == (0 if hooked else added) and len(seen) == 4 * hooked
    _equal(layer.weight.grad, expected[0])
    if hooked:
        _equal(sum(seen), expected[0])


@on_ranks(2)
def test_layers_treat_frozen_weights_autocast_and_empty_batches_as_torch_nn_does():
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


GATHER, SCATTER, REDUCE = "all_gather_single", "reduce_scatter_single", "all_reduce"


@pytest.mark.parametrize(
    "along_sequence, expected",
    [
        (False, ["product", f"begin {REDUCE}", "product", f"wait {REDUCE}"]),
        (True, [f"begin {GATHER}", "product", f"begin {SCATTER}", f"wait {GATHER}", "product",
                f"wait {SCATTER}"]),
    ],
)
@on_ranks(2)
def test_communication_in_backward_runs_beside_the_products(along_sequence, expected):
    events = []

    def logged(name, right):
        def operation(*args, async_op=False, **kwargs):
            events.append(f"begin {name}")
            work = right(*args, **kwargs, async_op=async_op)
            wait = lambda: (events.append(f"wait {name}"), work.wait())
            return SimpleNamespace(wait=wait) if async_op else work

        return operation

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            events.extend(["product"] * ("mm" in str(function)))
            return function(*args, **(kwargs or {}))

    y = ColumnParallelLinear(4, 8, sequence_parallel=along_sequence)(torch.randn(2, 4, requires_grad=True))
    logs = {name: logged(name, getattr(tensor_parallel, name)) for name in (GATHER, SCATTER, REDUCE)}
    with patch.multiple(tensor_parallel, **logs), Products():
        y.sum().backward()
    assert events == expected


@pytest.mark.parametrize("along_sequence", [False, True])
@in_layouts(*LAYOUTS)
def test_mlp_attention_and_a_whole_layer_recomputed_or_not(tp, replicas, along_sequence):
    group, replica = _group(tp, replicas)
    for case, sizes in enumerate(_cases(6, replica)):
        heads = tp * sizes.randint(1, 2)
        fits = lambda kv: heads % kv == 0 and kv % tp == 0
        kv_heads = sizes.choice([kv for kv in range(1, heads + 1) if fits(kv)])
        D, B, T = heads * sizes.randint(1, 4), sizes.randint(1, 3), tp * sizes.randint(1, 3)
        x = torch.randn(T, B, D, dtype=torch.float64)
        plain = reference_gpt.Layer(D, heads, kv_heads)
        options = {"group": group, "sequence_parallel": along_sequence}
        options |= {"attention_fn": attention, "mode": ("none", "selective", "full")[case % 3]}
        parallel = TransformerLayer(D, heads, kv_heads, **options)
        split = {"x_split": (0, 1), "y_split": (0, 1)} if along_sequence else {}
        _check(plain.mlp, parallel.mlp, x, group, **split)
        _check(plain.attn, parallel.attn, x, group, **split, batch_first=True)
        _check(plain, parallel, x, group, **split, batch_first=True)
        counted = shards_of(parallel)  # copies count on one rank
        squares = torch.zeros((), dtype=torch.float64) + sum(
            parameter.grad.square().sum()
            for name, parameter in parallel.named_parameters()
            if name in counted or dist.get_rank(group) == 0
        )
        dist.all_reduce(squares, group=group)
        _equal(squares, sum(p.grad.square().sum() for p in plain.parameters()), name="norm")


@pytest.mark.parametrize("how", ["autocast", "bf16", "bf16, summed in fp32"])
@pytest.mark.parametrize("along_sequence, deferred", product((False, True), repeat=2))
@on_ranks(1, 2, 3)
def test_gradients_in_bf16_are_those_of_fp64_but_for_a_few_per_cent(along_sequence, deferred, how):
    """Of each parameter, and of the input."""
    (_, tp), low, store = rank_and_size(), torch.bfloat16, WeightGradStore()
    D, T, sums = 8 * tp, 2 * tp, low if how == "bf16" else torch.float32
    torch.manual_seed(0)
    plain = reference_gpt.Layer(D, 2 * tp, tp).double()
    options = {"sequence_parallel": along_sequence, "defer": store}
    layer = TransformerLayer(D, 2 * tp, tp, attention_fn=attention, **options)
    shards, own = shards_of(layer), dict(layer.named_parameters())
    for name, parameter in plain.named_parameters():
        parameter.data = torch.randn(parameter.shape).mul(D**-0.5).to(low).double()
        own[name].data = _part(parameter, shards.get(name)).float()
    x, grad = torch.randn(2, T, 3, D).to(low).double()
    x.requires_grad_()
    y = plain(x.transpose(0, 1)).transpose(0, 1)
    y.backward(grad)
    part = _along_sequence if along_sequence else torch.Tensor.detach
    local = part(x).to(torch.float32 if how == "autocast" else low).requires_grad_()
    layer.to(local.dtype)
    for parameter in layer.parameters():
        parameter.grad_dtype = sums
    with torch.autocast("cpu", low, enabled=how == "autocast"):
        found = layer(local)
    assert found.dtype == local.dtype
    with store.collect() if deferred else nullcontext([]) as put_off:
        found.backward(part(grad).to(found.dtype))
    assert len(put_off) == 6 * deferred  # 4 matrices, 2 column-parallel biases
    for parameter, product_of in put_off:
        torch.autograd.backward(parameter, product_of())
    sum_partial_gradients(partial_parameters(layer))
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {sums}
    pairs = {"output": (found, part(y)), "input": (local.grad, part(x.grad))}
    for name, parameter in plain.named_parameters():
        pairs[name] = own[name].grad, _part(parameter.grad, shards.get(name))
    for name, (one, other) in pairs.items():
        assert (one.double() - other).norm() < 0.03 * other.norm(), name


@on_ranks(2)
def test_a_partial_parameter_may_be_unused_on_a_rank_and_not_contiguous():
    rank, _ = rank_and_size()
    norm, columns = mark_partial(nn.LayerNorm(4)), nn.Parameter(torch.randn(4, 3).t())
    parameters = [*partial_parameters(norm), columns]
    (norm(torch.randn(3, 4)) * columns).sum().backward()
    expected = [p.grad.clone() for p in parameters]
    for parameter in parameters if rank == 1 else ():
        parameter.grad = None
    sum_partial_gradients(parameters)
    assert all(map(torch.equal, expected, [p.grad for p in parameters]))
    norm.weight.requires_grad_(False)
    assert partial_parameters(norm) == [norm.bias]


@pytest.mark.parametrize("reverse", [False, True])
@on_ranks(2)
def test_partial_gradients_of_several_dtypes_are_summed_in_the_widest(reverse):
    """One rank has not used one. 257 is no bf16, 2**24 + 1 no fp32."""
    rank, _ = rank_and_size()
    low, single, double = (mark_partial(nn.LayerNorm(4)) for _ in range(3))
    low.bfloat16(), double.double()
    for parameter in low.parameters():
        parameter.grad_dtype = torch.float32
    low.weight.grad = torch.full((4,), (256.0, 1.0)[rank])
    double.weight.grad = torch.full((4,), (2.0**24, 1.0)[rank], dtype=torch.float64)
    if rank == 0:
        single.bias.grad = torch.full((4,), 1 / 3)
    parameters = [p for norm in (low, single, double) for p in partial_parameters(norm)]
    with waits() as waited, batches() as count:
        sum_partial_gradients(parameters[::-1] if reverse else parameters)
    assert not waited and count["batches"] == 2
    assert torch.equal(low.weight.grad, torch.full((4,), 257.0))
    assert torch.equal(single.bias.grad, torch.full((4,), 1 / 3))
    assert torch.equal(double.weight.grad, torch.full((4,), 2.0**24 + 1, dtype=torch.float64))


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
    plain = nn.Linear(64, 48), nn.Linear(64, 48), nn.Embedding(11, 64)
    ours = ColumnParallelLinear(64, 48), RowParallelLinear(64, 48), VocabParallelEmbedding(11, 64)
    for layer, own, x in zip(plain, ours, (*torch.randn(2, 5, 64), torch.randint(11, (2, 5)))):
        own.load_state_dict(layer.state_dict())
        grads = []
        for y, module in ((layer(x), layer), (own(x), own)):
            grads.append([y, *torch.autograd.grad(y.square().sum(), list(module.parameters()))])
        assert all(map(torch.equal, *grads))


# ---- what a rank holds of a parameter ------------------------------------------------------------


@in_layouts(*LAYOUTS)
def test_the_parts_of_all_ranks_are_the_whole_once(tp, replicas):
    group, replica = _group(tp, replicas)
    for sizes in _cases(20, replica):
        shape = [sizes.randint(1, 4) for _ in range(sizes.randint(1, 4))]
        dim, blocks = sizes.randrange(len(shape)), [sizes.randint(1, 3 * tp) for _ in range(3)]
        shape[dim] = sum(blocks)  # uneven, and smaller than the group
        shard, full = Shard(dim, tuple(blocks)), torch.randn(shape)
        assert torch.equal(shard.cut(full, group), _part(full, shard, group))
        runs = sorted(run for rank in range(tp) for run in shard.rows_of(rank, tp))
        rows = [row for first, count in runs for row in range(first, first + count)]
        assert rows == list(range(shard.rows))


def _tables(module):
    partial = {id(parameter) for parameter in partial_parameters(module)}
    names = [name for name, parameter in module.named_parameters() if id(parameter) in partial]
    return shards_of(module), names


@on_ranks(2)
def test_the_tables_say_what_is_split_and_partial_whatever_takes_the_place_of_a_parameter():
    layer = TransformerLayer(12, 6, 2, attention_fn=attention, sequence_parallel=True)
    layer.embedding = VocabParallelEmbedding(7, 4)
    shards, partial = expected = _tables(layer)
    qkv, sixth = Shard(0, (12, 4, 4)), Shard(0, (48,))
    assert shards == {
        **{"attn.c_attn.weight": qkv, "attn.c_attn.bias": qkv},
        **{"attn.c_proj.weight": Shard(1, (12,)), "mlp.c_fc.weight": sixth, "mlp.c_fc.bias": sixth},
        **{"mlp.c_proj.weight": Shard(1, (48,)), "embedding.weight": Shard(0, (7,))},
    }
    norms = [f"ln_{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")]
    assert sorted(partial) == sorted([*norms, "attn.c_proj.bias", "mlp.c_proj.bias"])
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [copy.deepcopy(layer), torch.load(file, weights_only=False), layer]
    copies[0].load_state_dict(copies[1].state_dict(), assign=True)
    layer.to("meta").to_empty(device="cpu").half()
    layer.mlp.c_fc.weight = nn.Parameter(torch.zeros_like(layer.mlp.c_fc.weight))
    assert all(_tables(other) == expected for other in copies)


def test_a_range_is_the_rest_of_a_row_whole_rows_and_the_beginning_of_a_row():
    assert list(boxes_of((4, 2), 1, 7)) == [((0, 1), (1, 1)), ((1, 0), (2, 2)), ((3, 0), (1, 1))]
    for sizes in (random.Random(case) for case in range(50)):
        shape = [sizes.randint(1, 4) for _ in range(sizes.randint(1, 4))]
        numbers = np.arange(np.prod(shape)).reshape(shape)
        begin, end = sorted(sizes.choices(range(numbers.size + 1), k=2))
        boxes = list(boxes_of(shape, begin, end))
        cuts = [tuple(slice(f, f + n) for f, n in zip(first, size)) for first, size in boxes]
        found = [number for cut in cuts for number in numbers[cut].flatten()]
        assert found == list(range(begin, end)) and len(boxes) < 2 * len(shape)


def _pieces_of(parameter, cut):
    """The parameter as ZeRO over two ranks would have it: two flat ranges of it, maybe empty."""
    pieces = []
    for first, end in ((0, cut), (cut, parameter.numel())):
        piece = nn.Parameter(parameter.detach().flatten()[first:end])
        piece.first, piece.whole_shape = first, parameter.shape
        if parameter.grad is not None:
            piece.grad = parameter.grad.flatten()[first:end].clone()
        pieces.append(piece)
    return pieces


def _views(case):
    """The whole parameters of a layer, and {name: [(shape, {index: view})]} of this rank's."""
    torch.manual_seed(0)
    sizes, layer = random.Random(case), TransformerLayer(24, 12, 6, attention_fn=attention)
    layer.embedding, found, whole = VocabParallelEmbedding(7, 4), {}, {}
    shards, (rank, _) = shards_of(layer), rank_and_size()
    for name, parameter in layer.named_parameters():
        shard, size = shards.get(name), parameter.numel()
        rows = rows_held(parameter, shard)
        shape = list(parameter.shape)
        shape[rows[0]] = rows[2]
        whole[name] = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
        parameter.data = _part(whole[name], shard)
        cut = sizes.choice([0, size, sizes.randint(0, size)])
        here = shard is not None or rank == 0  # copies count on one rank
        found[name] = [
            views_in_whole(piece, piece, piece.first, piece.first + len(piece), rows)
            for piece in _pieces_of(parameter, cut)
            if here
        ]
    return whole, found


def test_the_views_of_all_ranks_pieces_are_the_whole_once():
    for tp in (1, 2, 3, 6):
        ranks = run(tp, _views, tp)
        for name, expected in ranks[0][0].items():
            filled = torch.full_like(expected, torch.nan)
            for shape, views in (found for _, views in ranks for found in views[name]):
                assert shape == expected.shape
                for index, view in views.items():
                    box = tuple(slice(i, i + size) for i, size in zip(index, view.shape))
                    assert filled[box].isnan().all()
                    filled[box] = view
            assert torch.equal(filled, expected), name


@on_ranks(2)
def test_partial_gradients_of_zeros_pieces_are_those_of_the_whole_if_they_are_cut_alike():
    rank, _ = rank_and_size()
    weight = mark_partial(nn.LayerNorm(6)).weight
    weight.grad = torch.randn(6) + rank
    pieces = _pieces_of(weight, 4)
    sum_partial_gradients(pieces)
    sum_partial_gradients([weight])
    assert torch.equal(torch.cat([piece.grad for piece in pieces]), weight.grad)
    with pytest.raises(ValueError, match=rf"other pieces.*\[6\]\), 0, {2 + rank}\)"):
        sum_partial_gradients(_pieces_of(weight, 2 + rank)[:1])


def _initial_weights():
    torch.manual_seed(5)
    layers = nn.ModuleList([
        ParallelSelfAttention(24, 12, 6), RowParallelLinear(12, 5), VocabParallelEmbedding(13, 4)
    ])
    return {name: p.detach() for name, p in layers.named_parameters()}, shards_of(layers)


@on_ranks(2, 6)
def test_initial_weights_do_not_depend_on_the_number_of_ranks():
    own, shards = _initial_weights()
    drawn, alone = torch.rand(3), [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    with patch.object(tensor_parallel, "rank_and_size", lambda group: (0, 1)):
        whole, _ = _initial_weights()
    assert torch.equal(drawn, torch.rand(3))
    for name, full in whole.items():
        assert torch.equal(own[name], _part(full, shards.get(name))), name


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
        found = embedding.weight.grad
        assert found.dtype == dtype
        assert torch.equal(found.float(), _part(expected, embedding.shards["weight"]))
        embedding.weight.grad = None


def _loss_of_shards(full, target, group, ignore_index, inplace):
    """The leaf of this rank's columns of the `full` logits, its columns, and the losses."""
    rank, world_size = rank_and_size(group)
    columns = np.array_split(np.arange(full.shape[-1]), world_size)[rank]
    logits = full[:, columns].clone().requires_grad_()
    before = logits.detach().clone(), target.clone()
    start = int(columns[0])
    losses = vocab_parallel_cross_entropy(logits, target, start, ignore_index, group, inplace)
    assert torch.equal(logits, before[0]) != inplace or world_size > logits.shape[1]
    assert torch.equal(target, before[1]), "an input was changed"
    return logits, columns, losses


def _gradient(losses, logits, grad_output):
    before = grad_output.clone()
    (grad,) = torch.autograd.grad(losses, logits, grad_output, retain_graph=True)
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


@pytest.mark.parametrize("dtype, inplace", product((torch.float32, torch.bfloat16), (False, True)))
@on_ranks(1)
def test_the_gradient_of_the_logits_takes_one_copy_of_them_or_their_place(dtype, inplace):
    """In 16 bit there is one more in fp32, until forward ends."""
    N, V = 64, 4096
    leaf = torch.randn(N, V, dtype=dtype, requires_grad=True)
    with Peak() as peak:
        logits = leaf * 1
        losses = vocab_parallel_cross_entropy(logits, torch.arange(N), inplace=inplace)
        del logits
        kept = peak.now
        losses.sum().backward()
    copies = lambda nbytes: round(nbytes / leaf.nbytes, 1)
    assert copies(kept) == (1 if inplace else 2) - (dtype == torch.bfloat16 and not inplace) * 0
    assert copies(peak.bytes) == 0


@on_ranks(1)
def test_logits_that_others_still_need_are_not_lost_in_silence():
    logits = torch.randn(3, 5, requires_grad=True).exp()  # exp's backward wants what it returned
    losses = vocab_parallel_cross_entropy(logits, torch.arange(3), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


# ---- bytes ---------------------------------------------------------------------------------------

# 8 b s h (t-1)/t of which half in forward; 10 where inputs are gathered again
every_way = pytest.mark.parametrize("along_sequence, backward", [(False, 4), (True, 6)])


@every_way
@in_layouts((1, 1), (2, 1), (3, 1), (6, 1), (2, 2))
def test_a_layer_sends_8_b_s_h_elements_times_t_minus_1_over_t_or_10(
    tp, replicas, along_sequence, backward
):
    B, T, heads = 2, 12, 12
    D = 2 * heads
    elements = B * T * D * (tp - 1) // tp
    claimed = tensor_parallel_layer_bytes(B, T, D, tp, regather=along_sequence)
    assert claimed == 4 * (4 + backward) * elements
    assert tensor_parallel_layer_bytes(B, T, D, tp, 2, along_sequence) == claimed / 2
    layer = TransformerLayer(
        D, heads, group=_group(tp, replicas)[0], sequence_parallel=along_sequence
    )
    for module, share in ((layer.attn, 0.5), (layer.mlp, 0.5), (layer, 1)):
        with least_bytes(), count_bytes() as traffic:
            y = module(torch.randn(T // tp if along_sequence else T, B, D, requires_grad=True))
            sent = traffic.bytes()
            y.sum().backward()
        assert sent == 4 * 4 * elements * share  # bytes of fp32
        assert traffic.bytes() - sent == 4 * backward * elements * share


@pytest.mark.parametrize("deferred", [False, True])
@every_way
@on_ranks(2, 4)
def test_a_layer_launches_four_batches_forward_and_six_backward(along_sequence, backward, deferred):
    """Those of bytes above: one for each gather or reduce-scatter, two for each all-reduce."""
    _, tp = rank_and_size()
    defer = WeightGradStore() if deferred else None
    options = {"sequence_parallel": along_sequence, "defer": defer}
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
    assert (launched, count["batches"] - launched) == (4, backward)


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
    """Also where they are drawn again."""
    group, replica = _group(tp, replicas)
    state, drawn = ShardedRandomState("cpu", group), []

    def draw(x):
        masks = [F.dropout(torch.ones(64)).tolist()]
        with state:
            masks.append(F.dropout(torch.ones(64)).tolist())
        drawn.append([*masks, F.dropout(torch.ones(64)).tolist()])
        return 2 * x

    torch.manual_seed(1000 + replica)
    y = recompute(draw, torch.ones(1, requires_grad=True))
    with pytest.raises(KeyError), state:
        raise KeyError
    after = torch.get_rng_state()
    y.backward()
    assert drawn[0] == drawn[1] and torch.equal(torch.get_rng_state(), after)
    masks = [None] * (tp * replicas)
    before, inside, behind = drawn[0]
    dist.all_gather_object(masks, (replica, (before, behind), inside))
    for other, theirs, _ in masks:
        assert (theirs == (before, behind)) == (other == replica)
    outside = {tuple(mask) for _, uses, _ in masks for mask in uses}
    inside = [tuple(mask) for _, _, mask in masks]
    assert len(set(inside)) == len(inside) == tp * replicas
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
    net = alexnet((w, w * 8 // 3, 4 * w, 4 * w, w * 8 // 3), dense, 10).double()
    shards, own = shards_of(net), dict(net.named_parameters())
    whole = [p for layer in (*plain.convolutions, *plain.dense) for p in layer.parameters()]
    whole = dict(zip(own, whole, strict=True))
    for name, full in whole.items():
        assert torch.equal(own[name], _part(full, shards[name]))
    images = torch.randn(B, 3, 224, 224, dtype=torch.float64).requires_grad_()
    y, sent = copy_to_group(images), []
    for part in net:
        with count_bytes() as traffic:
            y = part(y)
        if hasattr(part, "layer"):
            sent.append(traffic.bytes())
    reference = images.detach().requires_grad_()
    expected = plain(reference)
    grad = torch.randn(expected.shape, dtype=torch.float64)
    expected.backward(grad)
    with count_bytes() as traffic:
        y.backward(grad.chunk(2, 1)[rank])
    _equal(y, expected.chunk(2, 1)[rank])
    _equal(images.grad, reference.grad)
    for name, full in whole.items():
        _equal(own[name].grad, _part(full.grad, shards[name]), name=name)
    passed_on = [w * 8 // 6 * 13 * 13, w * 8 // 6 * 36, dense // 2, dense // 2]
    third, *of_dense = [8 * B * n for n in passed_on]
    assert sent == [0, 0, third, 0, 0, *of_dense]
    assert traffic.bytes("reduce_scatter_single") == sum(sent)


# ---- errors --------------------------------------------------------------------------------------


@on_ranks(3)
def test_sizes_that_cannot_be_split_are_named():
    with pytest.raises(ValueError, match="out_features=10 .*tp=3"):
        ColumnParallelLinear(4, 10)
    with pytest.raises(ValueError, match="out_features=4 .*tp=3"):
        ColumnParallelLinear(3, 10, blocks=(6, 4))
    with pytest.raises(ValueError, match=r"blocks=\(6, 3\) are not out_features=12"):
        ColumnParallelLinear(3, 12, blocks=(6, 3))
    with pytest.raises(ValueError, match="kv_heads=4 is not divisible by tp=3"):
        ParallelSelfAttention(24, 4)
    with pytest.raises(ValueError, match="kv_heads=2 is not divisible by tp=3"):
        ParallelSelfAttention(24, 6, 2)
    with pytest.raises(ValueError, match="kv_heads=6, heads=9 and hidden=18"):
        ParallelSelfAttention(18, 9, 6)
    with pytest.raises(ValueError, match="sequence length 4 is not divisible by tp=3"):
        RowParallelLinear(3, 2, sequence_parallel=True)(torch.zeros(4, 2, 1))
    with pytest.raises(ValueError, match="sequence length 5 is not divisible by tp=3"):
        VocabParallelEmbedding(7, 2, sequence_parallel=True)(torch.zeros(5, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"filters=\(10, .*world_size=3 does not divide"):
        alexnet((10, 9, 9, 9, 9), 9, 9)
    with pytest.raises(ValueError, match="in_features=4 .*tp=3"):
        RowParallelLinear(4, 3)
    with pytest.raises(ValueError, match="num_embeddings=2 .*tp=3"):
        VocabParallelEmbedding(2, 4)
