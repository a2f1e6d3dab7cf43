"""Tensor parallelism gives plain torch.nn's outputs and gradients; bytes and masks are checked."""

import copy
import math
import random
import re
from contextlib import contextmanager, nullcontext
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

import reference_gpt
import tensor_parallel
from collectives import count_bytes, gather_objects, observe, rank_and_size
from gpu_counts import batches, waits
from pipeline import SCHEDULES, DeferredLinear, Pipeline, WeightGradStore
from ranks import least_bytes, on_ranks, shifted, soak
from replicas import assert_close, code_below, demonstration, interleaved_group
from sequence_parallel import recompute
from tensor_parallel import (
    AlexNet, ColumnParallelLinear, ParallelSelfAttention, RowParallelLinear, Shard,
    ShardedRandomState, VocabParallelEmbedding, alexnet_bytes, attention,
    check_gradients_over_tp, column_linear, column_parallel_linear, mark_sum_over_tp,
    parameters_to_sum_over_tp, row_linear, row_parallel_linear, set_shard, shards_of,
    split_cross_entropy, split_embedding, sum_gradients_over_tp,
    tensor_parallel_layer_bytes, vocab_parallel_cross_entropy,
)
from transformer import Peak, TransformerLayer, saved_bytes
from zero import FullyShardedDataParallel

# (the size of tensor-parallel groups, the number of groups, each of which has its own data)
LAYOUTS = [(1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (2, 2), (3, 2)]
SEVERAL = [soak(*row) if row not in ((3, 1), (2, 2)) else row for row in LAYOUTS]
BY_CHUNKS = "by chunks"  # split along the sequence; the products of chunks overlap messages
split_or_not = pytest.mark.parametrize("along_sequence", [False, True, BY_CHUNKS])


@contextmanager
def chunks_of_any_size(on=True):
    with patch.dict(tensor_parallel.CHUNK_BYTES, cpu=0 if on else 1 << 60):
        yield


def in_layouts(*layouts):
    """Do what on_ranks() does, for a body with the parameters (tp, replicas, ...)."""
    ranks = on_ranks(lambda tp, replicas, **_: tp * replicas)
    return lambda body: pytest.mark.parametrize("tp, replicas", layouts)(ranks(body))


def _part(full, shard, group=None):
    """Return this rank's part of `full`, cut by numpy."""
    if shard is None:
        return full.detach()
    rank, P = rank_and_size(group)
    blocks = np.split(full.detach().numpy(), np.cumsum(shard.blocks)[:-1], shard.dim)
    own = lambda rows: range(rank * rows // P, (rank + 1) * rows // P)
    parts = [block.take(own(block.shape[shard.dim]), shard.dim) for block in blocks]
    return torch.from_numpy(np.concatenate(parts, shard.dim))


def _close(found, expected, name=""):
    """Compare with a tolerance for 16 bits."""
    assert (found.double() - expected).norm() < 0.03 * expected.norm(), name


# ---- layers --------------------------------------------------------------------------------------


def _check(
    plain, parallel, x, group, x_split=None, y_split=None, batch_first=False, dtype=torch.float64,
    defer=None,
):
    """Compare the output, the input gradient and all parameter gradients of `parallel` and `plain`.

    x_split, y_split: (dim, blocks) along which the input or output is split. batch_first: whether
    `plain` takes the first two dims of x in the other order. dtype: the dtype of `parallel`, whose
    gradients are summed in fp32 or wider. defer: a WeightGradStore that defers weight products.
    """

    def part(full, split):
        dim, blocks = split or (0, 0)
        shard = Shard(dim % full.ndim, (full.shape[dim] // blocks,) * blocks) if split else None
        return _part(full, shard, group)

    is_real = x.is_floating_point()
    cast = lambda full: full.to(dtype if full.is_floating_point() else full.dtype, copy=True)
    compare, rounded = assert_close if dtype is torch.float64 else _close, lambda x: cast(x).to(x)
    plain.double(), parallel.to(dtype)
    expected, found = dict(plain.named_parameters()), dict(parallel.named_parameters())
    assert list(found) == list(expected)
    shards = shards_of(parallel)
    for name, full in expected.items():
        full.data, full.grad, found[name].grad = rounded(full.data), None, None
        found[name].data.copy_(_part(full, shards.get(name), group))
        found[name].requires_grad_(full.requires_grad)
        found[name].grad_dtype = torch.promote_types(dtype, torch.float32)

    full_x, local_x = rounded(x).requires_grad_(is_real), cast(part(x, x_split))
    flip = lambda tensor: tensor.transpose(0, 1) if batch_first else tensor
    full_y, local_y = flip(plain(flip(full_x))), parallel(local_x.requires_grad_(is_real))
    grad = rounded(torch.randn(full_y.shape, dtype=torch.float64))
    local_grad = cast(part(grad, y_split))
    full_y.backward(grad)
    deferred = []
    with nullcontext() if defer is None else defer.during(deferred):
        local_y.backward(local_grad)
    assert bool(deferred) == (defer is not None and expected["weight"].requires_grad)
    for parameter, product_of in deferred:
        assert parameter.grad is None
        parameter.grad = product_of().to(parameter.grad_dtype)
    sum_gradients_over_tp(parameters_to_sum_over_tp(parallel), group)

    compare(local_y, part(full_y, y_split))
    assert torch.equal(local_x, cast(part(x, x_split))), "the input was changed"
    assert torch.equal(local_grad, cast(part(grad, y_split))), "grad_output was changed"
    if is_real:
        compare(local_x.grad, part(full_x.grad, x_split))
    for name, full in expected.items():
        if not full.requires_grad:
            assert found[name].grad is None
            continue
        assert found[name].grad.dtype == found[name].grad_dtype
        compare(found[name].grad, _part(full.grad, shards.get(name), group), name=name)


def _cases(number, replica):
    """Yield generators of sizes, the same on all ranks; seed torch equally in each group."""
    for case in range(number):
        torch.manual_seed(shifted(100 * replica + case))
        yield random.Random(shifted(case))


@in_layouts(*SEVERAL)
def test_column_and_row_linears_and_their_short_forms_are_parts_of_one_linear(tp, replicas):
    """Weights may be frozen, and their products deferred."""
    group, replica = interleaved_group(tp, replicas)
    for sizes in _cases(12, replica):
        shape = [sizes.randint(1, 5) for _ in range(sizes.randint(0, 2))]
        along_sequence = sizes.random() < 0.5
        if along_sequence:
            shape[:1] = [tp * sizes.randint(1, 3)]
        by_chunks = chunks_of_any_size(along_sequence and sizes.random() < 0.7)
        bias, blocks = sizes.random() < 0.7, sizes.choice([1, 3])
        frozen = sizes.random() < 0.2
        in_features, out_features = sizes.randint(1, 7), blocks * tp * sizes.randint(1, 4)
        store = WeightGradStore() if sizes.random() < 0.5 else None
        options = {"group": group, "sequence_parallel": along_sequence, "defer": store}
        whole = (0, 1) if along_sequence else None
        x = torch.randn(*shape, in_features, dtype=torch.float64)
        plain, parts = nn.Linear(in_features, out_features, bias), (out_features // blocks,)
        column = ColumnParallelLinear(in_features, parts * blocks, bias, **options)
        plain.weight.requires_grad_(not frozen)
        with by_chunks:
            _check(plain, column, x, group, x_split=whole, y_split=(-1, blocks), defer=store)

        if not along_sequence:
            idea = lambda x: column_linear(x, column.weight, column.bias, group)
            with patch.object(column, "forward", idea):
                _check(plain, column, x, group, y_split=(-1, blocks))

        x = torch.randn(*shape, out_features, dtype=torch.float64)
        plain = nn.Linear(out_features, in_features, bias)
        row = RowParallelLinear(out_features, in_features, bias, **options)
        plain.weight.requires_grad_(not frozen)
        by_chunks = chunks_of_any_size(along_sequence and sizes.random() < 0.7)
        with by_chunks:
            _check(plain, row, x, group, x_split=(-1, 1), y_split=whole, defer=store)
        if not along_sequence:
            idea = lambda x: row_linear(x, row.weight, row.bias, group)
            with patch.object(row, "forward", idea):
                _check(plain, row, x, group, x_split=(-1, 1))


# ---- the step that opens the upper floor ---------------------------------------------------------


def _losses_of_one_process(model, tokens, targets, depth, heads):
    """Compute the same GPT's losses, (T, B), with torch alone. model: {name: whole parameter}."""
    T, B = tokens.shape

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], model[f"{name}.weight"], model[f"{name}.bias"])

    def linear(x, name):
        return F.linear(x, model[f"{name}.weight"], model[f"{name}.bias"])

    x = model["0.weight"][tokens] + model["1.weight"].unsqueeze(1)
    for layer in (f"2.{i}" for i in range(depth)):
        qkv = linear(norm(x, f"{layer}.norm_1"), f"{layer}.attention.c_attn")
        q, k, v = qkv.view(T, B, 3, heads, -1).permute(2, 1, 3, 0, 4)  # (B, heads, T, K) each
        scores = q @ k.mT * q.shape[-1] ** -0.5
        later = torch.ones(T, T, dtype=torch.bool).triu(1)
        y = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        x = x + linear(y.permute(2, 0, 1, 3).flatten(2), f"{layer}.attention.c_proj")
        y = F.gelu(linear(norm(x, f"{layer}.norm_2"), f"{layer}.up"), approximate="tanh")
        x = x + linear(y, f"{layer}.down")
    logits = norm(x, "3") @ model["0.weight"].t()
    return -logits.log_softmax(-1).gather(2, targets.unsqueeze(2)).squeeze(2)


@in_layouts((2, 1), soak(3, 1), soak(2, 2))
def test_the_step_that_opens_the_upper_floor_is_that_of_one_process(tp, replicas):
    """The comment's code runs as it stands. Names in it are looked up in the file."""
    group, replica = interleaved_group(tp, replicas)
    torch.manual_seed(shifted(replica))
    sizes = {"vocabulary": 6 * tp, "D": 4 * tp, "heads": 2 * tp, "depth": 2, "T": 3 * tp}
    rank, P = rank_and_size(group)
    names = dict(vars(tensor_parallel), group=group, rank=rank, P=P, **sizes)
    make, step = code_below(tensor_parallel, "# ==== upper floor")
    exec(make, names)
    model = names["model"].double()
    shards = shards_of(model)
    whole = {}
    for name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        if name in shards:
            shape[shards[name].dim] *= P
        whole[name] = torch.randn(shape, dtype=torch.float64).mul_(0.3).requires_grad_()
        parameter.data.copy_(_part(whole[name], shards.get(name), group))
    tokens = torch.randint(sizes["vocabulary"], (sizes["T"] + 1, 2))
    names.update(tokens=tokens[:-1], targets=tokens[1:])
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(step, names)

    depth, heads = sizes["depth"], sizes["heads"]
    losses = _losses_of_one_process(whole, tokens[:-1], tokens[1:], depth, heads)
    assert_close(names["losses"], losses.flatten())
    losses.mean().backward()
    for name, parameter in model.named_parameters():
        full = whole[name]
        assert_close(parameter.grad, _part(full.grad, shards.get(name), group), name=name)
        moved = full - 0.1 * full.grad
        assert_close(parameter, _part(moved, shards.get(name), group), name=name)


class _Operations(TorchDispatchMode):
    """Passes the name of each operator to a function."""

    def __init__(self, tell):
        super().__init__()
        self.tell = tell

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.tell(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@on_ranks(1)
def test_later_microbatches_add_to_the_gradient_in_place_unless_it_is_hooked(name, hooked):
    """The first one creates it. A hook sees all, also with zb-h1."""
    store, seen, names = WeightGradStore(), [], []
    layer = ColumnParallelLinear(4, 3, defer=store).double()
    x, target = torch.randn(8, 5, 4).double(), torch.randn(8, 5, 3).double()
    loss_fn = lambda y, target: (y - target).square().sum()
    (expected,) = torch.autograd.grad(loss_fn(layer(x), target), layer.weight)
    if hooked:
        layer.weight.register_hook(seen.append)
    with _Operations(names.append):
        Pipeline(layer, SCHEDULES[name](1, 4), loss_fn, shape=(), defer=store).step(x, target)
    assert names.count("addmm_") == (0 if hooked else 3) and len(seen) == 4 * hooked
    assert_close(layer.weight.grad, expected)
    if hooked:
        assert_close(sum(seen), expected)


@pytest.mark.parametrize("make", [ColumnParallelLinear, RowParallelLinear, DeferredLinear])
@on_ranks(1)
def test_w_does_not_come_too_late_for_a_weight_that_is_computed(make):
    torch.set_default_dtype(torch.float64)
    store = WeightGradStore()
    layer = torch.nn.utils.parametrizations.weight_norm(make(4, 3, defer=store))
    x, target = torch.randn(8, 5, 4), torch.randn(8, 5, 3)
    loss_fn = lambda y, target: (y - target).square().sum()
    own = [*layer.parameters()]
    expected = torch.autograd.grad(loss_fn(layer(x), target), own)
    Pipeline(layer, SCHEDULES["zb-h1"](1, 4), loss_fn, shape=(), defer=store).step(x, target)
    for parameter, gradient in zip(own, expected, strict=True):
        assert_close(parameter.grad, gradient)


@on_ranks(2)
def test_layers_treat_autocast_and_empty_batches_as_torch_nn_does():
    for layer, width in ((ColumnParallelLinear(8, 4), 8), (RowParallelLinear(8, 4), 4)):
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.randn(3, width)).dtype == torch.bfloat16
            assert layer.double()(torch.randn(3, width).double()).dtype == torch.float64
    assert ParallelSelfAttention(8, 2)(torch.zeros(3, 0, 8)).shape == (3, 0, 8)


GATHER, SCATTER, REDUCE = "all_gather_single", "reduce_scatter_single", "all_reduce"
MULTIPLY, SEND = "product", "exchange"
BACKWARD = {  # {whether and how a layer is split along the sequence: the events of its backward}
    False: [MULTIPLY, REDUCE, MULTIPLY, f"wait {REDUCE}"],
    True: [GATHER, MULTIPLY, SCATTER, f"wait {GATHER}", MULTIPLY, f"wait {SCATTER}"],
    "deferred": [MULTIPLY, SCATTER, f"wait {SCATTER}", GATHER, MULTIPLY],
    "rows by chunks": [SEND, MULTIPLY, f"wait {SEND}", MULTIPLY, MULTIPLY],
}
BACKWARD[BY_CHUNKS] = BACKWARD[True]
FORWARD = {
    BY_CHUNKS: [SEND, MULTIPLY, f"wait {SEND}", MULTIPLY],
    "rows by chunks": [MULTIPLY, SEND, MULTIPLY, f"wait {SEND}"],
}


@pytest.mark.parametrize("how", BACKWARD)
@on_ranks(2)
def test_communication_overlaps_the_products(how):
    events, store, deferred = [], WeightGradStore(), []

    def listen(event, operation, *_):
        if event in ("begin", "wait"):
            events.append(f"wait {operation.name}" if event == "wait" else operation.name)

    kind = RowParallelLinear if how == "rows by chunks" else ColumnParallelLinear
    layer = kind(8, 8, sequence_parallel=bool(how), defer=store)
    x = torch.randn(4, layer.weight.shape[1], requires_grad=True)
    multiplies = _Operations(lambda name: events.extend([MULTIPLY] * ("mm" in name)))
    with chunks_of_any_size(how in FORWARD), observe(listen), multiplies:
        y = layer(x)
        assert events == FORWARD.get(how, events)
        events.clear()
        with store.during(deferred if how == "deferred" else None):
            y.sum().backward()
        for _, product_of in deferred:
            product_of()
    assert events == BACKWARD[how]


@on_ranks(2)
def test_products_are_sent_by_chunks_if_a_rank_s_chunk_of_z_has_the_bytes_of_the_bound():
    layer = RowParallelLinear(8, 6, sequence_parallel=True)
    x = torch.randn(4, 3, 4)  # a chunk of Z has 2 x 3 x 6 numbers of 4 bytes
    for bound, is_by_chunks in ((144, True), (145, False)):
        by_chunks = patch.object(
            tensor_parallel, "scatter_by_chunks", wraps=tensor_parallel.scatter_by_chunks
        )
        with patch.dict(tensor_parallel.CHUNK_BYTES, cpu=bound), by_chunks as called:
            layer(x)
        assert called.called == is_by_chunks


@on_ranks(3)
def test_with_two_peers_no_message_is_waited_for_before_the_last_one_is_sent():
    column = ColumnParallelLinear(8, 12, sequence_parallel=True)
    row = RowParallelLinear(12, 8, sequence_parallel=True)
    log, (x, y) = [], (torch.randn(2, 8), torch.randn(6, 4))

    def listen(event, operation, *_):
        if event in ("begin", "wait"):
            log.append(f"wait {SEND}" if event == "wait" else operation.name)

    multiplies = _Operations(lambda name: log.extend([MULTIPLY] * ("mm" in name)))
    with chunks_of_any_size(), observe(listen), multiplies:
        column(x)
        assert log == [SEND, SEND, MULTIPLY] + 2 * [f"wait {SEND}", MULTIPLY]
        log.clear()
        row(y)
        assert log == 2 * [MULTIPLY, SEND] + [MULTIPLY] + 2 * [f"wait {SEND}"]


@on_ranks(3)
def test_the_sum_of_16_bit_chunks_is_rounded_once():
    """In bfloat16, 256 + 1 is 256, and 256 + 1 + 1 is 258 if only the sum is rounded."""
    row = RowParallelLinear(3, 1, bias=False, sequence_parallel=True).bfloat16()
    nn.init.ones_(row.weight)
    x = torch.full((3, 1), [256.0, 1, 1][dist.get_rank()], dtype=torch.bfloat16)
    with chunks_of_any_size():
        assert row(x).tolist() == [[258]]


@on_ranks(1)
def test_a_row_parallel_bias_is_added_in_place():
    layer, x = RowParallelLinear(8, 8), torch.randn(64, 8)
    with Peak() as peak:
        y = layer(x)
    assert peak.bytes == y.nbytes + layer.weight.nbytes  # of which F.linear() makes a view


@pytest.mark.parametrize("make", [ColumnParallelLinear, RowParallelLinear])
@on_ranks(2)
def test_a_frozen_weight_keeps_only_itself_for_backward(make):
    layer = make(8, 8).requires_grad_(False)
    x = torch.randn(64, layer.weight.shape[1], requires_grad=True)
    with saved_bytes() as count:
        layer(x)
    assert count() == layer.weight.nbytes


@split_or_not
@in_layouts(*SEVERAL)
def test_mlp_attention_and_a_whole_layer_agree_with_torch_nn(tp, replicas, along_sequence):
    """Backward recomputes nothing, attention, or the whole layer. The last case is in bf16."""
    group, replica = interleaved_group(tp, replicas)
    for case, sizes in enumerate(_cases(7, replica)):
        dtype = torch.bfloat16 if case == 6 else torch.float64
        shared, K = (2, 4) if case == 6 else (sizes.randint(1, 3), sizes.randint(1, 4))
        kv_heads, B, T = tp * sizes.randint(1, 2), sizes.randint(1, 3), tp * sizes.randint(1, 3)
        heads, D = kv_heads * shared, kv_heads * shared * K
        x = torch.randn(T, B, D, dtype=torch.float64)
        plain = reference_gpt.Layer(D, heads, kv_heads)
        for parameter in plain.parameters():
            parameter.data.normal_(0, D**-0.5)
        options = {"group": group, "sequence_parallel": bool(along_sequence)}
        options["attention_fn"] = attention
        options["mode"] = ("none", "selective", "full")[case % 3]
        parallel = TransformerLayer(D, heads, kv_heads, **options)
        how = {"x_split": (0, 1), "y_split": (0, 1)} if along_sequence else {}
        how["dtype"] = dtype
        with chunks_of_any_size(along_sequence == BY_CHUNKS):
            _check(plain.mlp, parallel.mlp, x, group, **how)
            _check(plain.attn, parallel.attn, x, group, **how, batch_first=True)
            _check(plain, parallel, x, group, **how, batch_first=True)


@on_ranks(2)
def test_gradients_of_several_dtypes_are_summed_over_tp_in_the_widest():
    """One rank lacks one; one is not contiguous. bf16 cannot hold 257, nor fp32 2**24 + 1."""
    rank, _ = rank_and_size()
    dtypes = torch.bfloat16, torch.float64, torch.bfloat16, torch.float32
    tensors = [nn.Parameter(torch.zeros(3, 4, dtype=dtype).t()) for dtype in dtypes]
    low, double, unused, columns = tensors
    low.grad_dtype = unused.grad_dtype = torch.float32
    low.grad = torch.full((4, 3), (256.0, 1.0)[rank])
    double.grad = torch.full((4, 3), (2.0**24, 1.0)[rank], dtype=torch.float64)
    if rank == 0:
        unused.grad = torch.full((4, 3), 1 / 3)
    columns.grad = torch.arange(12.0).view(3, 4).t() + rank
    with waits() as waited, batches() as count:
        sum_gradients_over_tp(dict.fromkeys(tensors))
    assert not waited and count["batches"] == 1
    assert low.grad.eq(257).all() and double.grad.eq(2**24 + 1).all()
    assert unused.grad.eq(torch.tensor(1 / 3)).all()
    assert torch.equal(columns.grad, 2 * torch.arange(12.0).view(3, 4).t() + 1)
    norm = mark_sum_over_tp(nn.LayerNorm(4))
    norm.bias.requires_grad_(False)
    assert parameters_to_sum_over_tp(norm) == {norm.weight: None}


@on_ranks(2)
def test_gradients_of_zeros_pieces_are_summed_over_tp_if_all_ranks_have_the_same_pieces():
    rank, piece = dist.get_rank(), nn.Parameter(torch.zeros(4))
    piece.grad, piece.offset, piece.whole_shape = torch.ones(4) + rank, 2, (6,)
    sum_gradients_over_tp({piece: None})
    assert piece.grad.tolist() == 4 * [3]
    piece.offset = rank
    with pytest.raises(ValueError, match=r"rank 1 .*\(\(6,\), 1\).*\(\(6,\), 0\)"):
        sum_gradients_over_tp({piece: None})


def _loaded(layer):
    """Let the layer load its own values as new parameters."""
    values = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.load_state_dict(values, assign=True)
    return layer


@on_ranks(4)
def test_a_marked_parameter_may_be_split_over_another_group_but_not_over_that_of_the_sum():
    """The sum would mix unlike parts. An expert may be split over one group and copied over tp.

    This holds for parameters that were made anew, and so have lost their attributes, too.
    """
    rank = dist.get_rank()
    group, _ = interleaved_group(2, 2)  # ranks 0, 2 and 1, 3
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    dist.barrier()  # no rank may end while another still connects
    to_empty = lambda layer: layer.to("meta").to_empty(device="cpu")
    for make_anew in nn.Identity(), to_empty, _loaded, copy.deepcopy:
        layer = nn.LayerNorm(8)  # a module that has a split parameter and a copy
        set_shard(layer, "weight", torch.ones(8), Shard(0, (8,), pairs[rank // 2]))
        marked = parameters_to_sum_over_tp(make_anew(mark_sum_over_tp(layer)))
        for parameter in marked:
            parameter.grad = torch.full_like(parameter, rank)
        sum_gradients_over_tp(marked, group)
        expected = [0 + 2, 1 + 3][rank % 2]
        assert all(parameter.grad.eq(expected).all() for parameter in marked)
        for wrong in (pairs[rank // 2], None):
            with pytest.raises(ValueError, match="by mark_sum_over_tp.. is split over the group"):
                sum_gradients_over_tp(marked, wrong)
        assert all(parameter.grad.eq(expected).all() for parameter in marked)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@on_ranks(4)
def test_an_overflow_on_one_rank_skips_the_step_on_all_if_they_share_it(fused, is_shared):
    """GradScaler decides for each optimizer alone. The comment's code runs as it stands."""
    group, replica = interleaved_group(2, 2)
    torch.manual_seed(shifted(replica))
    layers = ColumnParallelLinear(8, 12, group=group), RowParallelLinear(12, 8, group=group)
    model = nn.Sequential(*layers)
    optimizers = [torch.optim.AdamW(layer.parameters(), fused=fused) for layer in layers]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    (share,) = code_below(tensor_parallel, "# ---- fp16")
    x = torch.randn(5, 8)
    seen = []
    for step in range(3):
        model.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        if step == 1 and dist.get_rank() == 0:
            model[1].weight.grad[0, 0] = torch.inf  # in this rank's part only
        if is_shared:
            exec(share, dict(vars(tensor_parallel), model=model, group=group))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        has_moved = [not torch.equal(*pair) for pair in zip(before, model.parameters())]
        seen.append((scaler.get_scale(), has_moved))
    if is_shared:
        skips = replica == 0  # the group of rank 0
        expected = [(256.0, 4 * [True]), (128.0, 4 * [False]), (128.0, 4 * [True])]
        assert seen == (expected if skips else 3 * [(256.0, 4 * [True])])
    moved, others = gather_objects([has_moved for _, has_moved in seen], group)
    assert (moved == others) == (is_shared or replica == 1)


# ---- a model of one's own ------------------------------------------------------------------------


class OwnBlock(nn.Module):
    """A norm, and attention with a norm of q and a scale for each head.

    forgotten: the parameter's module or name that is neither marked nor split as it should be.
    """

    def __init__(self, hidden, heads, group=None, sp=False, forgotten=""):
        super().__init__()
        options = {"group": group, "sequence_parallel": sp}
        self.norm = nn.LayerNorm(hidden)
        self.attn = ParallelSelfAttention(hidden, heads, attention_fn=self.attention, **options)
        # The norm divides by the root of eps if a head's two elements are equal. With the usual
        # 1e-5, its derivatives would then amplify rounding by up to 1e5.
        self.q_norm = nn.LayerNorm(hidden // heads, eps=1.0)
        self.scale = nn.Parameter(torch.ones(heads // dist.get_world_size(group)))
        if forgotten != "scale":
            set_shard(self, "scale", torch.ones(heads), Shard(0, (heads,), group))
        if forgotten != "q_norm":
            mark_sum_over_tp(self.q_norm)  # also without sp
        if sp and forgotten != "norm":
            mark_sum_over_tp(self.norm)

    def attention(self, q, k, v):
        return attention(self.q_norm(q), k, v) * self.scale.view(-1, 1, 1)

    def forward(self, x):
        return self.attn(self.norm(x))


def _trained(x, group, sp, forgotten="", steps=1):
    """Train the block; return it, with the last step's gradients."""
    torch.manual_seed(shifted(0))
    block = OwnBlock(8, 4, group, sp, forgotten).double()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.001)
    for _ in range(steps):
        optimizer.zero_grad()
        (block(x) - 1).square().sum().backward()
        sum_gradients_over_tp(parameters_to_sum_over_tp(block), group)
        optimizer.step()
    return block


@pytest.mark.parametrize("sp, forgotten", [(0, "q_norm"), (1, "q_norm"), (1, "norm"), (0, "scale")])
@on_ranks(2)
def test_a_parameter_that_is_not_marked_or_split_drifts_apart_and_is_named(sp, forgotten):
    rank, P = rank_and_size()
    alone = [dist.new_group([other]) for other in range(P)][rank]
    full = torch.randn(6, 3, 8, dtype=torch.float64)
    x = full.chunk(P)[rank] if sp else full
    expected = dict(_trained(full, alone, False).named_parameters())

    right = _trained(x, None, bool(sp))
    check_gradients_over_tp(right)
    for name, parameter in right.named_parameters():
        assert_close(parameter.grad, _part(expected[name].grad, shards_of(right).get(name)))

    wrong = _trained(x, None, bool(sp), forgotten)
    names = rf"{forgotten}\S*(, {forgotten}\S*)?"
    with pytest.raises(ValueError, match=f"^gradients of {names} differ between ranks of tp: use"):
        check_gradients_over_tp(wrong)
    wrong = _trained(x, None, bool(sp), forgotten, steps=10)
    own = [p.detach() for name, p in wrong.named_parameters() if name.startswith(forgotten)]
    first, second = gather_objects(torch.cat(own))
    assert (first - second).norm() > 1e-2 * first.norm()


@on_ranks(2)
def test_a_tied_weight_is_split_under_all_of_its_names():
    """Otherwise it would be taken for a copy, and its unlike parts for copies that differ."""
    embedding = VocabParallelEmbedding(6, 4)
    head = nn.Linear(4, len(embedding.weight), bias=False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"head": head, "embedding": embedding})  # it is found in the head first
    shard = embedding.shards["weight"]
    assert shards_of(model) == {"head.weight": shard, "embedding.weight": shard}
    head(embedding(torch.arange(6))).sum().backward()
    assert check_gradients_over_tp(model)


@on_ranks(4)
def test_a_deep_copy_is_split_and_marked_alike_over_the_same_group_and_has_its_own_weights():
    """AveragedModel copies a model, and updates the copy."""
    group, _ = interleaved_group(2, 2)
    row = RowParallelLinear(8, 8, group=group, sequence_parallel=True)
    column = ColumnParallelLinear(8, 8, group=group)
    column.bias = None
    head = torch.nn.utils.parametrizations.weight_norm(ColumnParallelLinear(8, 4, group=group))
    layers = VocabParallelEmbedding(6, 8, group), OwnBlock(8, 4, group), column, row, head
    net, tokens = nn.Sequential(*layers), torch.randint(6, (4, 3))
    average = AveragedModel(net)
    copied = average.module
    assert torch.equal(copied(tokens), net(tokens))
    assert shards_of(copied) == shards_of(net)
    marked = [
        [name for name, p in model.named_parameters() if any(p is q for q in summed)]
        for model, summed in ((m, parameters_to_sum_over_tp(m)) for m in (net, copied))
    ]
    assert marked[0] == marked[1] == ["1.q_norm.weight", "1.q_norm.bias", "3.bias"]
    seen = []
    for _ in range(2):
        net(tokens).square().sum().backward()
        torch.optim.SGD(net.parameters(), 0.01).step()
        average.update_parameters(net)
        seen.append([parameter.detach().clone() for parameter in net.parameters()])
    for found, one, other in zip(copied.parameters(), *seen, strict=True):
        assert_close(found, (one + other) / 2, 1e-6)


@on_ranks(3)
def test_copies_in_16_bits_may_differ_in_the_last_bit_but_not_by_more():
    rank, _ = rank_and_size()
    layer = RowParallelLinear(3, 4).bfloat16()
    layer.weight.grad = torch.zeros_like(layer.weight)
    for difference, is_fault in (2**-7, False), (2**-5, True):  # the last bit of 1.0 is 2^-7
        layer.bias.grad = torch.full((4,), 1 + difference * (rank == 1), dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="bias differ") if is_fault else nullcontext():
            check_gradients_over_tp(layer)


@on_ranks(3)
def test_only_relative_differences_above_a_thousandth_between_copies_are_a_fault():
    """The rank with the largest difference tells the others."""
    rank, _ = rank_and_size()
    layer = RowParallelLinear(3, 4)  # its weight is split, its bias is a copy
    layer.weight.grad = torch.full((4, 1), float(rank))

    def gradients(*values):
        layer.bias.grad = None if values[rank] is None else torch.full((4,), values[rank])

    for differ in (1.0, 1.0017, 1.0), (1.0, None, 1.0), (1.0, -1.0, 0.0):  # None counts as zero
        gradients(*differ)
        with pytest.raises(ValueError, match="gradients of bias differ"):
            check_gradients_over_tp(layer)
    for alike in (1.0, 1.0013, 1.0), 3 * [0.0], 3 * [None]:
        gradients(*alike)
        assert check_gradients_over_tp(layer) is True
    for not_finite in 3 * [torch.inf], (1.0, torch.nan, 1.0), (torch.inf, 1.0, -torch.inf):
        gradients(*not_finite)
        assert check_gradients_over_tp(layer) is False  # so the next step is checked, too


@on_ranks(3)
def test_copies_that_begin_unlike_are_named_although_their_summed_gradients_are_equal():
    """The weights of a forgotten seed, and one of three ranks' that is 1% off."""
    rank, _ = rank_and_size()
    layer = mark_sum_over_tp(nn.Linear(64, 8))
    seeds = 5, 5 + rank, 5
    factors = 1.0, 1.0, 1.01 if rank == 1 else 1.0
    for seed, factor, is_fault in zip(seeds, factors, (False, True, True)):
        generator = torch.Generator().manual_seed(shifted(seed))
        with torch.no_grad():
            layer.weight.normal_(generator=generator).mul_(factor)
            layer.bias.fill_(1.0)
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, rank + 1.0)
        sum_gradients_over_tp(parameters_to_sum_over_tp(layer))
        sentence = "^weights of weight differ between ranks of tp: seed"
        with pytest.raises(ValueError, match=sentence) if is_fault else nullcontext():
            assert check_gradients_over_tp(layer) is True


def test_on_a_gpu_fp32_keys_and_values_are_repeated_because_no_kernel_shares_heads():
    for dtype, device in product((torch.float32, torch.bfloat16), ("cuda", "cpu")):
        repeated = (dtype, device) == (torch.float32, "cuda")
        with FakeTensorMode(), patch.object(F, "scaled_dot_product_attention") as kernel:
            make = lambda heads: torch.empty(1, heads, 4, 8, dtype=dtype, device=device)
            attention(make(4), make(2), make(2))
        q, k, v = kernel.call_args.args
        assert k.shape == v.shape and (k.shape == q.shape) == repeated
        assert kernel.call_args.kwargs["enable_gqa"] != repeated


# ---- vocabulary ----------------------------------------------------------------------------------


def _language_model(embedding, losses):
    """Return a model with a tied head, which computes the per-token losses of the next token."""
    model = nn.Sequential(embedding)
    end = lambda x, tokens: losses(x.flatten(0, -2), embedding.weight, tokens.roll(-1).flatten())
    model.forward = lambda tokens: end(embedding(tokens).tanh(), tokens)
    return model


@in_layouts(*LAYOUTS)
def test_embedding_and_a_tied_head_with_its_loss_agree_with_torch_nn(tp, replicas):
    group, replica = interleaved_group(tp, replicas)
    for sizes in _cases(4, replica):
        V, D = sizes.choice([tp, 2 * tp + 1, 101, 6 * tp]), sizes.randint(1, 5)
        tokens = torch.cat([torch.randperm(V), torch.randint(V, (V,))]).view(2, V)
        plain, embedding = nn.Embedding(V, D), VocabParallelEmbedding(V, D, group)
        _check(plain, embedding, tokens, group)
        along = VocabParallelEmbedding(V, D, group, sequence_parallel=True)
        _check(plain, along, tokens.view(-1)[: V // tp * tp], group, y_split=(0, 1))

        def parallel_losses(x, weight, target):
            logits = column_parallel_linear(x, weight, group=group)
            return vocab_parallel_cross_entropy(logits, target, V, group=group, inplace=True)

        losses = lambda x, weight, target: F.cross_entropy(x @ weight.t(), target, reduction="none")
        models = _language_model(plain, losses), _language_model(embedding, parallel_losses)
        _check(*models, tokens, group)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@on_ranks(2)
def test_the_gradient_of_a_frequent_token_is_summed_in_fp32(dtype):
    """A sum of ones in bf16 stops at 256, although bf16 can hold 600."""
    embedding, expected = VocabParallelEmbedding(4, 3).bfloat16(), torch.zeros(4, 3, dtype=dtype)
    expected[1], embedding.weight.grad_dtype = 600, dtype
    embedding(torch.tensor([1]).repeat(600)).sum().backward()
    assert embedding.weight.grad.dtype == dtype
    assert torch.equal(embedding.weight.grad.float(), _part(expected.float(), Shard(0, (4,))))


class Tied(nn.Module):
    """An embedding in 16 bits, and a head that computes its gradient where .grad is to be."""

    def __init__(self, vocab_size, width):
        super().__init__()
        self.store = WeightGradStore()
        self.embedding = VocabParallelEmbedding(vocab_size, width).bfloat16()

    def forward(self, tokens):
        x = self.embedding(tokens)
        return column_parallel_linear(x, self.embedding.weight, defer=self.store)


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(1)
def test_the_second_gradient_of_a_tied_weight_is_added_to_the_first_one_in_32_bits(stage):
    """The head's is 4 bytes, where .grad is. A CPU has the embedding's in 4 bytes, and in 2."""
    model = FullyShardedDataParallel(Tied(4096, 64), stage=stage, reduce_dtype=torch.float32)
    for _ in range(2):
        with model.no_sync(), model.module.store.during():
            loss = model(torch.arange(8)).square().mean()
            with Peak() as peak:
                loss.backward()
        assert peak.bytes / (4096 * 64) == pytest.approx(4 + 4 + 2, rel=1e-3)


@in_layouts(*LAYOUTS)
def test_cross_entropy_of_split_logits_is_that_of_the_whole_ones_in_fp64(tp, replicas):
    """For bf16 logits the loss is computed in fp32."""
    group, replica = interleaved_group(tp, replicas)
    dtypes = {torch.bfloat16: (1e-5, 2**-7), torch.float64: (1e-12, 1e-12)}
    for sizes, (dtype, (loss_error, grad_error)) in product(_cases(12, replica), dtypes.items()):
        V, N = sizes.choice([tp, 2 * tp + 1, 101]), sizes.randint(1, 9)
        inplace = sizes.random() < 0.5
        full, target = torch.randn(N, V).double().mul(10).to(dtype), torch.randint(V, (N,))
        if dtype is torch.float64 and sizes.random() < 0.5:  # exp(+-1e4) is infinity or zero
            full += torch.tensor([1e4, -1e4])[torch.randint(2, (N, V))]
        ignored, ignore_index = sizes.choice([0.0, 0.4, 1.0]), sizes.choice([-100, V // 2])
        target[torch.rand(N) < ignored] = ignore_index
        rank = dist.get_rank(group)
        own = slice(rank * V // tp, (rank + 1) * V // tp)

        whole = full.double().requires_grad_()
        expected = F.cross_entropy(whole, target, ignore_index=ignore_index, reduction="none")
        grad_output = torch.randn_like(expected).to(torch.promote_types(dtype, torch.float32))
        (grad,) = torch.autograd.grad(expected, whole, grad_output.double())
        logits, before = full[:, own].clone().requires_grad_(), (target.clone(), 1 * grad_output)
        arguments = logits, target, V, ignore_index, group, inplace
        losses = vocab_parallel_cross_entropy(*arguments)
        assert torch.equal(logits, full[:, own]) != inplace or tp > logits.shape[1]
        assert losses.dtype == grad_output.dtype and losses[target == ignore_index].eq(0).all()
        assert_close(losses.double(), expected, loss_error)
        (found,) = torch.autograd.grad(losses, logits, grad_output, retain_graph=True)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), grad[:, own], rtol=grad_error, atol=1e-6)
        assert all(map(torch.equal, before, (target, grad_output))), "an input was changed"
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(losses, logits, grad_output)  # backward has used the gradient up


@pytest.mark.parametrize("inplace", [False, True])
@on_ranks(2)
def test_gradients_of_fp16_logits_are_scaled_before_they_are_rounded(inplace):
    """With a scale of 2^16, fp16 can hold gradients down to 2^-40. They take the memory of fp32."""
    rank, P = rank_and_size()
    torch.manual_seed(shifted(0))
    whole, target = 4 * torch.randn(16, 4000), torch.randint(4000, (16,))
    exact = whole.half().double().requires_grad_()
    F.cross_entropy(exact, target).mul(2**16).backward()
    expected = exact.grad.chunk(P, 1)[rank]
    own = whole.half().chunk(P, 1)[rank].contiguous()
    logits = own.clone().requires_grad_()
    with Peak() as peak:
        losses = vocab_parallel_cross_entropy(logits, target, 4000, inplace=inplace)
        kept = peak.now()
    losses.mean().mul(2**16).backward()
    assert logits.grad.dtype == torch.float16 and torch.equal(logits, own)
    assert_close(logits.grad.double(), expected, 2**-11)
    assert not logits.grad[expected.abs() >= 2**-24].eq(0).any()  # the least number of fp16
    assert round(kept / own.nbytes) == 2


@on_ranks(2, 3)
def test_the_loss_of_logits_that_have_been_gathered_is_refused():
    """Otherwise each rank would count every column, and the loss would be too large by log(P)."""
    rank, P = rank_and_size()
    logits, target = torch.randn(9, 4 * P), torch.arange(9) % 4
    own = logits.chunk(P, 1)[rank]
    sentence = f"logits have {4 * P} columns, and 4 are this rank's part of vocab_size={4 * P}: do"
    with pytest.raises(ValueError, match=sentence):
        vocab_parallel_cross_entropy(logits, target, 4 * P)
    losses = vocab_parallel_cross_entropy(own, target, 4 * P)
    assert_close(losses.mean(), F.cross_entropy(logits, target), 1e-6)


@on_ranks(3)
def test_a_vocabulary_with_fewer_rows_than_ranks_is_refused():
    with pytest.raises(ValueError, match="num_embeddings=2 is less than tp=3"):
        VocabParallelEmbedding(2, 4)


@on_ranks(1, 3)
def test_ids_outside_the_vocabulary_give_nan():
    embedding, logits = VocabParallelEmbedding(7, 2), torch.randn(5, 7)
    ids, start = torch.tensor([0, 7, 6, -1, -100]), embedding.start
    y = embedding(ids)
    assert y.isnan().any(-1).tolist() == y.isnan().all(-1).tolist() == [0, 1, 0, 1, 1]
    own = logits[:, start : start + len(embedding.weight)]
    own.requires_grad_()
    losses = vocab_parallel_cross_entropy(own, ids, 7)
    assert losses.isnan().tolist() == [0, 1, 0, 1, 0] and losses[4] == 0
    (grad,) = torch.autograd.grad(losses.sum(), own)
    assert grad.isnan().any(1).tolist() == grad.isnan().all(1).tolist() == [0, 1, 0, 1, 0]
    rank, P = rank_and_size()
    losses = split_cross_entropy(logits[:, :6].chunk(P, 1)[rank], torch.tensor([0, 6, 5, -1, -100]))
    assert losses.isnan().tolist() == [0, 1, 0, 1, 1]


@split_or_not
@on_ranks(2)
def test_the_results_of_linear_layers_may_be_changed_in_place(along_sequence):
    """Autograd would refuse it if a result were a view of the chunks that it consists of."""
    with chunks_of_any_size(along_sequence == BY_CHUNKS):
        for function, width in (column_parallel_linear, 6), (row_parallel_linear, 3):
            weight = torch.randn(4, width, requires_grad=True)
            make = lambda: function(torch.ones(4, width), weight, sequence_parallel=along_sequence)
            (expected,) = torch.autograd.grad(F.relu(make()).sum(), weight)
            make().relu_().sum().backward()
            assert torch.equal(weight.grad, expected)


@split_or_not
@on_ranks(2)
def test_mixed_dtypes_are_refused_whether_or_not_products_are_made_by_chunks(along_sequence):
    x = torch.randn(4, 6).bfloat16()
    with chunks_of_any_size(along_sequence == BY_CHUNKS):
        for function in (column_parallel_linear, row_parallel_linear):
            with pytest.raises(RuntimeError, match="dtype"):
                function(x, torch.randn(8, 6), sequence_parallel=bool(along_sequence))


@pytest.mark.parametrize(
    "dtype, inplace, expected",
    [
        (torch.float32, False, (1, 1)),  # copies of the logits at the end, and at the peak
        (torch.float32, True, (0, 0)),
        (torch.bfloat16, False, (1, 3)),  # forward has a copy in fp32, which is two in bf16
        (torch.bfloat16, True, (0, 2)),
    ],
)
@on_ranks(1)
def test_the_gradient_of_the_logits_takes_one_copy_or_none_in_place(dtype, inplace, expected):
    logits = torch.randn(64, 4096, dtype=dtype, requires_grad=True) * 1
    with Peak() as peak:
        losses = vocab_parallel_cross_entropy(logits, torch.arange(64), 4096, inplace=inplace)
        (grad,) = torch.autograd.grad(losses.sum(), logits)
    copies = lambda nbytes: round(nbytes / logits.nbytes) - inplace  # without the logits' memory
    assert (grad.data_ptr() == logits.data_ptr()) == inplace
    assert (copies(peak.now()), copies(peak.bytes)) == expected
    needed = logits.detach().requires_grad_().exp()  # the backward of exp() needs its output
    losses = vocab_parallel_cross_entropy(needed, torch.arange(64), 4096, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@split_or_not
@in_layouts(soak(1, 1), soak(2, 1), (3, 1), soak(6, 1), (2, 2))
def test_a_layer_sends_8_b_s_h_elements_times_t_minus_1_over_t_or_10(
    tp, replicas, along_sequence, mode
):
    """Forward sends 4; backward sends 4, or 6 if it gathers inputs again; recomputation sends 4."""
    B, T, heads = 2, 12, 12
    D, (group, _) = 2 * heads, interleaved_group(tp, replicas)
    elements = B * T * D * (tp - 1) // tp
    backward = 6 if along_sequence else 4
    claimed = tensor_parallel_layer_bytes(B, T, D, tp, 4, along_sequence)
    assert claimed == 4 * (4 + backward) * elements
    options = {"group": group, "sequence_parallel": bool(along_sequence), "mode": mode}
    layer = TransformerLayer(D, heads, **options)
    for module, share in ((layer.attn, 0.5), (layer.mlp, 0.5), (layer, 1)):
        chunks = chunks_of_any_size(along_sequence == BY_CHUNKS)
        with chunks, least_bytes(), count_bytes() as traffic:
            y = module(torch.randn(T // tp if along_sequence else T, B, D, requires_grad=True))
            sent = traffic.bytes()
            y.sum().backward()
        assert sent == 4 * 4 * elements * share  # an element has 4 bytes
        again = 4 * (mode == "full" and module is layer)
        assert traffic.bytes() - sent == 4 * (backward + again) * elements * share


@in_layouts(*LAYOUTS)
def test_the_loss_reduces_3_floats_per_token(tp, replicas):
    N = 384  # each tp divides it into parts of a multiple of 128 bytes
    logits, group = torch.randn(N, 5, requires_grad=True), interleaved_group(tp, replicas)[0]
    arguments = logits, torch.arange(N) % 5, 5 * tp, -100, group
    with least_bytes(), count_bytes() as traffic:
        losses = vocab_parallel_cross_entropy(*arguments)
        forward = traffic.bytes(), len(traffic.sent)
        losses.sum().backward()
    assert traffic.bytes() == forward[0], "backward needs no message"
    # an all-reduce of a maximum of N floats, and one of two sums
    assert forward == (2 * 3 * N * 4 * (tp - 1) // tp, 2 * 2 * (tp - 1))


# ---- dropout -------------------------------------------------------------------------------------


@in_layouts(*LAYOUTS)
def test_masks_are_equal_over_the_group_except_inside_the_sharded_state(tp, replicas):
    """Recomputation draws the same masks again. A layer that has the state can be copied."""
    group, replica = interleaved_group(tp, replicas)
    state, drawn = copy.deepcopy(ShardedRandomState("cpu", group)), []
    mask = lambda: F.dropout(torch.ones(64)).tolist()

    def draw(x):
        before = mask()
        with state:
            inside = mask()
        drawn.append((before + mask(), inside))
        return 2 * x

    torch.manual_seed(shifted(1000 + replica))
    y = recompute(draw, torch.ones(1, requires_grad=True))
    after = torch.get_rng_state()
    y.backward()
    assert drawn[0] == drawn[1] and torch.equal(torch.get_rng_state(), after)
    masks = [None] * (tp * replicas)
    dist.all_gather_object(masks, (replica, *drawn[0]))
    for other, outside, inside in masks:
        assert (outside == drawn[0][0]) == (other == replica)
        assert inside not in (outside[:64], outside[64:])
    assert len({tuple(inside) for *_, inside in masks}) == tp * replicas


@on_ranks(2)
def test_the_sharded_state_draws_on_the_host_whatever_the_default_device_is():
    """On a GPU the host would wait for the number, and checkpoint() may not restore it."""
    torch.manual_seed(shifted(0))
    state = ShardedRandomState("cpu")
    with state:
        expected = torch.get_rng_state()
    torch.manual_seed(shifted(0))
    with torch.device("meta"), state:
        assert torch.equal(torch.get_rng_state(), expected)


@on_ranks(2)
def test_a_sharded_state_may_be_entered_twice_and_leaves_equal_generators():
    torch.manual_seed(shifted(0))
    state = ShardedRandomState("cpu")
    with state:
        before = torch.get_rng_state()
        with state:
            torch.rand(1)
        assert not torch.equal(before, torch.get_rng_state())  # the inner one has drawn its seed
    first, second = gather_objects(torch.get_rng_state())
    assert torch.equal(first, second)


@on_ranks(1)
def test_a_sharded_state_draws_on_the_gpu_that_it_is_given():
    """Another one may be current."""
    current, touched = ["cuda:0"], []

    @contextmanager
    def device(chosen):
        current.append(str(chosen))
        yield
        current.pop()

    stand_ins = {
        "device": device,
        "get_rng_state": lambda device="cuda": touched.append(("get", str(device))),
        "set_rng_state": lambda state, device="cuda": touched.append(("set", str(device))),
        "manual_seed": lambda seed: touched.append(("seed", current[-1])),
    }
    with patch.multiple(torch.cuda, **stand_ins), ShardedRandomState("cuda:1"):
        pass
    assert touched == [("get", "cuda:1"), ("seed", "cuda:1"), ("set", "cuda:1")]


# ---- AlexNet -------------------------------------------------------------------------------------


class PlainAlexNet(nn.Module):
    """AlexNet in one process, with convolutions in groups, and with PyTorch's initial values."""

    def __init__(self, sizes, groups):
        super().__init__()
        c1, c2, c3, c4, c5, d1, d2, d3 = sizes
        self.conv1 = nn.Conv2d(3, c1, 11, 4, 2)
        self.conv2 = nn.Conv2d(c1, c2, 5, 1, 2, groups=groups)
        self.conv3 = nn.Conv2d(c2, c3, 3, 1, 1)
        self.conv4 = nn.Conv2d(c3, c4, 3, 1, 1, groups=groups)
        self.conv5 = nn.Conv2d(c4, c5, 3, 1, 1, groups=groups)
        self.dense1 = nn.Linear(36 * c5, d1)
        self.dense2 = nn.Linear(d1, d2)
        self.dense3 = nn.Linear(d2, d3)
        self.groups = groups

    def norm(self, x):
        """Follow the paper: b_i = a_i / (2 + 1e-4 sum of a_j^2)^0.75, |i - j| <= 2."""
        halves = []
        for a in x.chunk(self.groups, 1):
            padded = F.pad(a**2, (0, 0, 0, 0, 2, 2))
            total = sum(padded[:, i : i + a.shape[1]] for i in range(5))
            halves.append(a / (2 + 1e-4 * total) ** 0.75)
        return torch.cat(halves, 1)

    def forward(self, x):
        pool = nn.MaxPool2d(3, 2)
        x = pool(self.norm(self.conv1(x).relu()))
        x = pool(self.norm(self.conv2(x).relu()))
        x = self.conv5(self.conv4(self.conv3(x).relu()).relu()).relu()
        x = F.dropout(self.dense1(pool(x).flatten(1)).relu())
        return self.dense3(F.dropout(self.dense2(x).relu()))


SMALL = (12, 24, 36, 24, 12, 24, 36, 12)


def _alexnets(tp, group):
    """Return AlexNet in one process, and over the group with the same weights."""
    plain = PlainAlexNet(SMALL, groups=tp).double()
    parallel = AlexNet(SMALL, group=group).double()
    with torch.no_grad():
        for own, full in zip(parallel.parameters(), plain.parameters(), strict=True):
            own.copy_(full.chunk(tp)[rank_and_size(group)[0]])
    return plain, parallel


@pytest.mark.parametrize("tp, replicas", [soak(1, 1), soak(2, 1), (2, 2), (3, 1)])
@on_ranks(lambda tp, replicas, **_: tp * replicas)
def test_alexnet_trains_as_one_process_with_convolutions_in_groups(tp, replicas):
    """Both steps drop activations. The second one shows that the first one left equal weights."""
    group, replica = interleaved_group(tp, replicas)
    torch.manual_seed(shifted(replica))
    nets = _alexnets(tp, group)
    plain, parallel = nets
    rank, _ = rank_and_size(group)
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, 0.9) for net in nets]
    images = 20 * torch.randn(2, 3, 224, 224, dtype=torch.float64)
    target = torch.randint(12, (2,))
    for step in range(2):
        results = []
        for net, optimizer in zip(nets, optimizers):
            torch.manual_seed(shifted(step))  # for the dropout masks
            x = images.clone().requires_grad_()
            optimizer.zero_grad()
            logits = net(x)
            F.cross_entropy(logits, target).backward()
            results.append((logits, x.grad))
        assert_close(*results)
        for parameter, (name, full) in zip(parallel.parameters(), plain.named_parameters()):
            assert full.grad.norm() > 1e-4, name
            assert_close(parameter.grad, full.grad.chunk(tp)[rank], name=name)
        for optimizer in optimizers:
            optimizer.step()


@on_ranks(1, 2, 4)
def test_alexnet_sends_what_conv3_and_the_dense_layers_read_and_the_logits():
    P = dist.get_world_size()
    net = AlexNet(SMALL)
    images = torch.randn(3, 3, 224, 224)
    with count_bytes() as traffic:
        logits = net(images)
        forward = traffic.bytes()
        logits.sum().backward()
    read = 24 * 13 * 13 + 12 * 6 * 6 + 24 + 36  # numbers per image
    assert forward == traffic.bytes("all_gather_single") == 4 * 3 * (read + 12) * (P - 1) // P
    assert traffic.bytes() == alexnet_bytes(3, SMALL, P)
    assert traffic.bytes() - forward == traffic.bytes("reduce_scatter_single")


@on_ranks(2)
def test_alexnet_has_the_papers_size_and_each_rank_draws_filters_of_its_own():
    with FakeTensorMode():
        with patch.object(tensor_parallel, "ShardedRandomState", lambda *arguments: nullcontext()):
            whole = sum(parameter.numel() for parameter in AlexNet().parameters()) * 2
    assert whole == 60_965_224  # "60 million parameters"
    torch.manual_seed(shifted(0))
    for parameter in AlexNet(SMALL).parameters():
        first, second = gather_objects(parameter.detach())
        assert (first != second).float().mean() > 0.9


@on_ranks(3)
def test_the_demonstration_prints_the_bytes_of_an_mlp_and_of_alexnet():
    _, P = rank_and_size()
    printed = demonstration(tensor_parallel)
    figures = re.findall(r"claimed (\d+) bytes, counted (\d+)", printed)
    all_reduce = 2 * (P - 1) * 256 * 64 * P * 8
    read = 8 * P * 13 * 13 + 8 * P * 6 * 6 + 2 * 64 * P  # numbers that are gathered per image
    alexnet = (2 * read + 10 * P) * 2 * 4 * (P - 1) // P
    # f and g; with sequence parallelism backward also gathers X again
    claimed = 2 * all_reduce, 5 * all_reduce // 2, alexnet
    assert figures == [(str(nbytes), str(nbytes)) for nbytes in claimed]
    errors = re.findall(r"and gradients: (.*)", printed)
    assert len(errors) == 2 and max(map(float, errors)) < 1e-10


# ---- errors --------------------------------------------------------------------------------------


@on_ranks(3)
def test_errors_name_sizes_that_cannot_be_split():
    row = RowParallelLinear(3, 2, sequence_parallel=True)
    for make, message in (
        (lambda: ColumnParallelLinear(4, 10), "out_features=10 .*tp=3"),
        (lambda: ColumnParallelLinear(3, (6, 4)), r"out_features=\(6, 4\) .*tp=3"),
        (lambda: RowParallelLinear(4, 3), "in_features=4 .*tp=3"),
        (lambda: ParallelSelfAttention(24, 4), "kv_heads=4 is not divisible by tp=3"),
        (lambda: ParallelSelfAttention(24, 6, 2), "kv_heads=2 is not divisible by tp=3"),
        (lambda: ParallelSelfAttention(18, 9, 6), "kv_heads=6, heads=9 and hidden=18"),
        (lambda: row(torch.zeros(4, 2, 1)), "T=4 is not divisible by tp=3"),
        (lambda: AlexNet((96, 10)), r"tp=3 does not divide each of sizes=\(96, 10\)"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@on_ranks(2)
def test_the_plain_vocabulary_ignores_what_is_not_finite_in_a_row_that_no_token_has():
    """Tokens of the other rank look row 0 up, which may overflow, or is a logit that is masked."""
    rank, group = dist.get_rank(), None
    table = torch.ones(4, 3)
    table[[0, 2]] = torch.inf
    x = split_embedding(torch.tensor([1, 3]), table.chunk(2)[rank], group)
    assert x.eq(1).all()
    logits = torch.zeros(2, 4)
    logits[:, [0, 2]] = -torch.inf
    losses = split_cross_entropy(logits.chunk(2, 1)[rank], torch.tensor([1, 3]), group)
    torch.testing.assert_close(losses, torch.full((2,), math.log(2)))
