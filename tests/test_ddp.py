"""Gradients of ddp.py against one process on the whole batch, and against torch.nn.parallel."""

import copy
import io
import re
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddp
from collectives import count_bytes, gather_objects, rank_and_size
from ddp import DistributedDataParallel, FlatLayout, average_gradients, ddp_bytes
from zero import FullyShardedDataParallel

from gpu_counts import waits
from ranks import least_bytes, on_ranks, run

CAPS = [1e-9, 3e-3, 25]  # MiB: a bucket for each parameter, a few buckets, one bucket


class _Net(nn.Module):
    """A tied weight, a frozen one, a scalar, and branches run in any order or not at all."""

    def __init__(self, width=12):
        super().__init__()
        self.embed = nn.Linear(width, width, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, width)
        self.head.weight = self.embed.weight

    def forward(self, x, branches=(0, 1, 2)):
        x = self.scale * self.embed(x)
        for i in branches:
            x = self.branches[i](x).tanh()
        return self.head(self.frozen(x))


def _net(seed=0):
    torch.manual_seed(seed)
    return _Net().double()


def _data(examples, seed=1):
    return torch.randn(examples, 12, generator=torch.Generator().manual_seed(seed)).double()


def _gradients(module):
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.requires_grad}


def _one_process(net, loss):
    """The gradients of loss(net), with zeros for parameters that it does not reach."""
    net = copy.deepcopy(net)
    net.zero_grad()
    loss(net).backward()
    for p in net.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
    return _gradients(net)


def _whole_batch(net, x):
    return _one_process(net, lambda net: net(x).square().mean())


def _own_part(x, group=None):
    rank, world_size = rank_and_size(group)
    return x.chunk(world_size)[rank]


def _close(actual, expected, tolerance=1e-12):
    assert len(expected) > 0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@contextmanager
def _reductions(note=lambda tensor: None):
    """The tensors that ddp.py has all-reduced; calls note() with each when that begins."""
    tensors, all_reduce = [], ddp.all_reduce

    def watched(tensor, *args, **kwargs):
        tensors.append(tensor)
        note(tensor)
        return all_reduce(tensor, *args, **kwargs)

    with patch.object(ddp, "all_reduce", watched):
        yield tensors


def _sizes(tensors):
    return [tensor.numel() for tensor in tensors]


# ---- the layout of a flat tensor -----------------------------------------------------------------


def test_tensors_shards_and_their_pieces_begin_on_128_bytes():
    shapes = [(7, 7), (), (0, 3), (65,), (64,), (1, 300), (15,)]
    tensors = [torch.rand(shape) for shape in shapes]
    for shards in range(1, 6):
        layout = FlatLayout(tensors, shards)
        flat = torch.full((layout.length,), float("nan"))
        for view, tensor in zip(layout.views(flat), tensors):
            assert view.storage_offset() % 64 == 0 and view.shape == tensor.shape
            view.copy_(tensor)
        assert layout.length - flat.isnan().sum() == sum(t.numel() for t in tensors)
        assert flat.isnan().sum() <= 63 * len(shapes) + 64 * (shards - 1)
        assert torch.equal(layout.pack(tensors), flat.nan_to_num(0))
        assert layout.length == shards * layout.shard_size and layout.shard_size % 64 == 0
        wholes = [[] for _ in tensors]
        for rank, shard in enumerate(flat.split(layout.shard_size)):
            for whole, tensor, (begin, end), piece in zip(
                wholes, tensors, layout.ranges(rank), layout.pieces(shard, rank), strict=True
            ):
                assert torch.equal(piece, tensor.flatten()[begin:end])
                assert piece.storage_offset() % 64 == 0 or not len(piece)
                whole.append(piece)
        for whole, tensor in zip(wholes, tensors):
            assert torch.equal(torch.cat(whole), tensor.flatten())


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_and_what_is_sent_begin_on_128_bytes(dtype):
    net = _Net(7).to(dtype)
    model = DistributedDataParallel(net, bucket_cap_mb=1e-3)
    with _reductions() as starts:
        model(torch.ones(2, 7, dtype=dtype)).sum().backward()
    starts += [p.grad for p in net.parameters() if p.requires_grad]
    begins = [start.storage_offset() * start.itemsize for start in starts]
    assert any(begins) and all(begin % 128 == 0 for begin in begins)


# ---- the gradient of the whole batch -------------------------------------------------------------


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("cap, few", list(zip(CAPS, (9, 4, 1))))
def test_gradients_are_those_of_one_process_on_the_whole_batch(cap, few):
    net, x = _net(), _data(4 * dist.get_world_size())
    expected = _whole_batch(net, x)
    model = DistributedDataParallel(net, bucket_cap_mb=cap)
    with _reductions() as calls:
        model(_own_part(x)).square().mean().backward()
    _close(_gradients(net), expected)
    assert net.frozen.weight.grad is None
    trained = [p for p in net.parameters() if p.requires_grad]
    buckets = {p.grad.untyped_storage().data_ptr() for p in trained}
    assert len(buckets) == len(calls) == few  # gradients are views
    assert sum(_sizes(calls)) == sum(-(-p.numel() // 64) * 64 for p in trained)
    if 1 < few < len(trained):
        assert max(_sizes(calls)) <= cap * 2**20 / 8


@on_ranks(1, 2, 3, 4)
def test_gradients_are_those_of_torch():
    """Of the idea, of the middle step, where every parameter has one, and of the real one."""
    x = _data(2 * dist.get_world_size())
    theirs, ours, naive, plain = _net(), _net(), _net(), _net()
    torchs = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True)
    model = DistributedDataParallel(ours, bucket_cap_mb=CAPS[1])
    assert [*model.state_dict()] == [*torchs.state_dict()]
    unused = {"branches.1.weight", "branches.1.bias"}
    used = [p for name, p in plain.named_parameters() if name not in unused and p.requires_grad]
    buckets = [ddp.Bucket(used[half::2]) for half in range(2)]
    for trained in (torchs, model, naive, plain, plain):
        trained.zero_grad()
        trained(_own_part(x), (2, 0)).square().mean().backward()
        for bucket in buckets if trained is plain else ():
            bucket.finish()
    average_gradients(naive)
    for name in unused:  # ours have zeros
        assert theirs.get_parameter(name).grad is None
        for net in (theirs, plain):
            net.get_parameter(name).grad = torch.zeros_like(theirs.get_parameter(name))
    for net in (ours, naive, plain):
        _close(_gradients(net), _gradients(theirs))


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_under_recomputation(use_reentrant):
    """Of a layer, and around the wrapper."""
    net, x = _net(), _data(2 * dist.get_world_size())
    expected, model = _whole_batch(net, x), DistributedDataParallel(net)
    again = partial(checkpoint, use_reentrant=use_reentrant)
    again(model, _own_part(x).requires_grad_()).square().mean().backward()
    _close(_gradients(net), expected)
    net.branches[1].forward = partial(again, net.branches[1].forward)
    model.zero_grad()
    model(_own_part(x)).square().mean().backward()
    _close(_gradients(net), expected)


# ---- over several backward passes ----------------------------------------------------------------


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("cap", CAPS)
def test_no_sync_accumulates_microbatches_and_the_next_backward_reduces_their_sum(
    cap, set_to_none
):
    world_size = dist.get_world_size()
    net = _net()
    model = DistributedDataParallel(net, bucket_cap_mb=cap)
    for step in range(3):
        x = _data(6 * world_size, seed=step)
        net.zero_grad(set_to_none)
        *first, last = _own_part(x).chunk(3)
        with model.no_sync(), count_bytes() as traffic:
            with model.no_sync():
                pass
            for microbatch in first:
                (model(microbatch).square().mean() / 3).backward()
        assert not traffic.sent
        (model(last).square().mean() / 3).backward()
        _close(_gradients(net), _whole_batch(net, x))


@on_ranks(2)
def test_the_flag_of_no_sync_may_be_set_by_hand_and_survives_an_exception():
    """As loops that accumulate over microbatches set it, before forward."""
    net, x = _net(), _data(4 * dist.get_world_size())
    model = DistributedDataParallel(net)
    with pytest.raises(KeyError):
        with model.no_sync(), model.no_sync():
            raise KeyError
    assert model.require_backward_grad_sync
    for i, part in enumerate(_own_part(x).chunk(2)):
        model.require_backward_grad_sync = i == 1
        with count_bytes() as traffic:
            (model(part).square().mean() / 2).backward()
        assert bool(traffic.sent) == (i == 1)
    _close(_gradients(net), _whole_batch(net, x))


@on_ranks(2)
def test_a_forward_between_forward_and_backward_leaves_no_gradient_unreduced():
    """Of an evaluation, and of a second pass whose backward comes first."""
    net, x = _net(), _data(4 * dist.get_world_size())
    model = DistributedDataParallel(net, bucket_cap_mb=CAPS[1])
    first, second = _own_part(x).chunk(2)
    loss = model(first).square().mean() / 2
    with torch.no_grad():
        model(second)
    (model(second).square().mean() / 2).backward()
    loss.backward()
    _close(_gradients(net), _whole_batch(net, x))


# ---- parameters without gradient, and other orders (trap 5) --------------------------------------


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("cap", CAPS)
def test_ranks_may_use_other_parameters_in_another_order(cap):
    """Each of two microbatches runs other branches, and others again in the next step."""
    rank, world_size = rank_and_size()
    net = _net()
    model = DistributedDataParallel(net, bucket_cap_mb=cap)
    orders = [(0, 1, 2), (2, 0), (), (2, 1, 0)]
    for step in range(4):
        x = _data(4 * world_size, seed=step)
        used = [orders[(i + step) % 4] for i in range(2 * world_size)]
        expected = _one_process(net, lambda net: sum(
            net(part, order).square().sum() / world_size for part, order in zip(x.split(2), used)
        ))
        net.zero_grad(set_to_none=step % 2 == 0)
        (first, last), own = _own_part(x).split(2), used[2 * rank : 2 * rank + 2]
        with model.no_sync():
            model(first, own[0]).square().sum().backward()
            if step == 3:  # the idea: whole gradients, averaged at the end
                model(last, own[1]).square().sum().backward()
        if step == 3:
            average_gradients(net)
        else:
            model(last, own[1]).square().sum().backward()
        _close(_gradients(net), expected, 1e-11)


class _Shelf(nn.Module):
    """Layers of 64, 128, 192 and 256 elements, used in a given order, or not."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, n, bias=False) for n in (1, 2, 3, 4))

    def forward(self, x, order):
        return {"outputs": [self.layers[i](x) for i in order], "x": x.clone()}


@on_ranks(4)
@pytest.mark.parametrize("cap, sent", [(CAPS[0], [256, 192, 128, 64]), (CAPS[2], [640])])
def test_buckets_go_out_in_one_order_on_every_rank(cap, sent):
    """The elements of each all-reduce, where every rank finishes its gradients in another order."""
    rank = dist.get_rank()
    model = DistributedDataParallel(_Shelf(), bucket_cap_mb=cap)
    x = torch.ones(1, 64, requires_grad=True)
    for order in ([(i + rank) % 4 for i in range(4)], [rank], []):
        model.zero_grad()
        result = model(x, order)
        loss = sum((output.sum() for output in result["outputs"]), result["x"].sum())
        with _reductions() as calls:
            loss.backward()
            assert bool(calls) == bool(order)
            model.finish_grad_sync()  # for a loss that reaches no parameter
        assert _sizes(calls) == sent
        for layer in model.module.layers:
            assert (layer.weight.grad == len(order) / 4).all()


# ---- overlap -------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_bucket_leaves_while_backward_still_runs():
    layers = nn.Sequential(*[nn.Linear(12, 12, bias=False) for _ in range(4)]).double()
    model = DistributedDataParallel(layers, bucket_cap_mb=1e-9)
    events = []
    for i, layer in enumerate(layers):
        layer.weight.register_hook(lambda grad, i=i: events.append(f"gradient {i}"))
    with _reductions(lambda tensor: events.append("reduce")):
        model(_own_part(_data(4))).square().mean().backward()
    assert events == [event for i in (3, 2, 1, 0) for event in (f"gradient {i}", "reduce")]


@on_ranks(2)
@pytest.mark.parametrize("cap", CAPS)
def test_backward_may_leave_the_waiting_to_the_caller(cap):
    net, x = _net(), _data(4 * dist.get_world_size())
    model = DistributedDataParallel(net, bucket_cap_mb=cap, wait_in_backward=False)
    model.finish_grad_sync()  # nothing was started: nothing to wait for
    for _ in range(2):
        net.zero_grad()
        model(_own_part(x)).square().mean().backward()
        with count_bytes() as traffic:
            model.finish_grad_sync()
        assert not traffic.sent  # all have left
        model.finish_grad_sync()
        _close(_gradients(net), _whole_batch(net, x))


@on_ranks(2)
@pytest.mark.parametrize("cap, few", list(zip(CAPS, (9, 4, 1))))
def test_gradients_that_come_outside_of_backward_are_reduced_as_they_come(cap, few):
    """As weight gradients that were put off: some are there, some follow."""
    net, x = _net(), _data(4 * dist.get_world_size())
    own = _one_process(net, lambda net: net(_own_part(x)).square().mean())
    model = DistributedDataParallel(net, bucket_cap_mb=cap)
    named = {n: p for n, p in net.named_parameters() if p.requires_grad}
    late = {n: p for n, p in named.items() if n.startswith("branches")}
    for _ in range(3):
        net.zero_grad()
        with model.no_sync():
            for name in named.keys() - late.keys():
                torch.autograd.backward(named[name], own[name])
        with _reductions() as calls:
            model.start_grad_sync(awaited=late.values())
            begun = len(calls)
            for name, parameter in late.items():
                torch.autograd.backward(parameter, own[name])
            model.finish_grad_sync()
        _close(_gradients(net), _whole_batch(net, x))
    assert begun < len(calls) == few


# ---- dtypes --------------------------------------------------------------------------------------


class _Mixed(nn.Module):
    """Weights of many dtypes; the gradient of each element is the input."""

    def __init__(self):
        super().__init__()
        dtypes = [torch.float32, torch.bfloat16, torch.bfloat16, torch.float64, torch.float16]
        self.weights = nn.ParameterList(torch.zeros(7 + i, dtype=t) for i, t in enumerate(dtypes))

    def forward(self, x):
        return sum((x * weight.double()).sum() for weight in self.weights)


@on_ranks(1, 3)
@pytest.mark.parametrize("cap", CAPS[::2])
def test_a_bucket_holds_one_dtype(cap):
    rank, world_size = rank_and_size()
    for factor in (None, 1):
        net = _Mixed()
        model = DistributedDataParallel(net, bucket_cap_mb=cap, gradient_divide_factor=factor)
        with _reductions() as calls:
            model(torch.tensor(rank + 1.0)).backward()
        total = sum(range(1, world_size + 1)) / (factor or world_size)
        for p in net.parameters():
            assert p.grad.dtype == p.dtype
            torch.testing.assert_close(p.grad, torch.full_like(p.grad, total), rtol=1e-2, atol=0)
        of_16_bits = [torch.bfloat16] if cap > 1 else 2 * [torch.bfloat16]
        dtypes = [torch.float16, torch.float64, *of_16_bits, torch.float32]
        assert [tensor.dtype for tensor in calls] == dtypes


@on_ranks(3)
def test_gradients_of_bfloat16_parameters_add_up_and_travel_in_float32():
    """Trap 6: four microbatches. Also those of the idea keep their dtype."""
    make = lambda: nn.Sequential(*[nn.Linear(12, 12).bfloat16() for _ in range(3)])
    rank, world_size = rank_and_size()
    net, x = make(), _data(8 * world_size).bfloat16()
    for parameter in net.parameters():
        parameter.grad_dtype = torch.float32
    model = DistributedDataParallel(net, bucket_cap_mb=CAPS[1] / 4)
    loss = lambda net, part: net(part).float().exp().mean()
    expected = dict.fromkeys(net.state_dict(), 0)
    for part in x.chunk(4 * world_size):
        gradients = torch.autograd.grad(loss(net, part), list(net.parameters()))
        for name, gradient in zip(expected, gradients):
            expected[name] += gradient.double() / world_size
    with _reductions() as calls, least_bytes(), count_bytes() as traffic:
        *first, last = _own_part(x).chunk(4)
        with model.no_sync():
            for part in first:
                loss(model, part).backward()
        loss(model, last).backward()
    assert {tensor.dtype for tensor in calls} == {torch.float32} and len(calls) > 1
    assert sum(gather_objects(traffic.bytes("all_reduce"))) // 3 == ddp_bytes(net, 3)
    _close({name: gradient.double() for name, gradient in _gradients(net).items()}, expected, 1e-6)
    model.zero_grad()
    with model.no_sync():
        for part in _own_part(x).chunk(4):
            loss(model, part).backward()
    average_gradients(net)
    assert {gradient.dtype for gradient in _gradients(net).values()} == {torch.float32}
    _close({name: gradient.double() for name, gradient in _gradients(net).items()}, expected, 1e-6)


# ---- clipping ------------------------------------------------------------------------------------


@on_ranks(1, 3)
@pytest.mark.parametrize("norm_type", [2.0, 1, 0.5, 3.0, "inf", float("inf")])
def test_the_norm_of_what_ranks_have_and_clipping_are_those_of_torch(norm_type):
    rank, world_size = rank_and_size()
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.complex128)
    wholes = [torch.randn(9, dtype=dtype, generator=generator) for dtype in 2 * dtypes]
    parts = [whole.chunk(world_size)[rank].clone() for whole in wholes]
    parts.append(torch.zeros(0))
    like = [whole.to(torch.promote_types(whole.dtype, torch.float64)) for whole in wholes]
    expected = nn.utils.get_total_norm(like, float(norm_type)).item()
    norm = ddp.get_total_norm(parts, norm_type, [None])
    assert norm.shape == () and norm.item() == pytest.approx(expected, rel=1e-6)
    nested = [*parts[4:], ddp.get_total_norm(parts[:4], norm_type)]
    assert ddp.get_total_norm(nested, norm_type, [None]).item() == pytest.approx(norm.item())
    for max_norm in (0.3 * expected, 2 * expected):
        factor = min(1, max_norm / (norm.item() + 1e-6))
        clipped = [part.clone() for part in parts]
        with waits() as found:
            ddp.clip_grads_with_norm_(clipped, max_norm, norm)
        assert not found
        for actual, part in zip(clipped, parts):
            rtol = {2: 2**-8, 4: 1e-6}.get(part.itemsize, 1e-9)
            torch.testing.assert_close(actual, part * factor, rtol=rtol, atol=0)


@on_ranks(4)
def test_a_norm_goes_over_several_groups_one_after_the_other():
    rank = dist.get_rank()
    rows = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    columns = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    groups = rows[rank // 2], columns[rank % 2]
    part = torch.tensor([rank + 1.0])
    for norm_type, expected in ((2.0, 30**0.5), (1.0, 10), ("inf", 4)):
        assert ddp.get_total_norm([part], norm_type, groups).item() == pytest.approx(expected)
    with pytest.raises(ValueError, match="norm_type=-1.0 must be positive"):
        ddp.get_total_norm([part], -1)


# ---- cost ----------------------------------------------------------------------------------------


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("width, cap", [(48, 1e-9), (48, 25), (7, 1e-9), (7, CAPS[1] / 4), (7, 25)])
def test_a_step_sends_each_gradient_once_around_the_ring(width, cap):
    """P = 1 to 4 divide 48 x 48 into parts of whole 128 bytes."""
    net = nn.Sequential(*[nn.Linear(width, width, bias=width != 48) for _ in range(3)])
    net[1].requires_grad_(False)
    model = DistributedDataParallel(net, bucket_cap_mb=cap)
    with least_bytes(), _reductions() as calls, count_bytes() as traffic:
        model(torch.ones(2, width)).sum().backward()
    assert traffic.bytes() == traffic.bytes("all_reduce")
    world_size = dist.get_world_size()
    gradient_bytes = 2 * 4 * (48 * 48 if width == 48 else 64 + 64)
    counted = gather_objects(traffic.bytes())
    assert sum(counted) == 2 * (world_size - 1) * gradient_bytes
    assert ddp_bytes(net, world_size) == sum(counted) // world_size
    if width == 48:
        assert traffic.bytes() == 2 * (world_size - 1) * gradient_bytes // world_size
        assert len(traffic.sent) == 2 * (world_size - 1) * len(calls)


@on_ranks(4)
def test_the_demonstration_counts_what_it_claims():
    with redirect_stdout(io.StringIO()) as printed:
        ddp._demonstrate()
    printed, *others = gather_objects(printed.getvalue())
    claimed, counted = re.search(r"claimed (\d+) bytes, counted (\d+)", printed).groups()
    assert claimed == counted and not any(others)
    assert float(printed.split()[-1]) < 1e-14


# ---- buffers -------------------------------------------------------------------------------------


PASSES = "reduce reduce no_sync no_sync reduce eval eval reduce no_grad no_grad reduce reduce"


def _normalise(wrap, broadcast_buffers):
    """The running mean after each pass."""
    model = wrap(nn.BatchNorm1d(1), broadcast_buffers=broadcast_buffers)
    means, x = [], torch.full((4, 1), 1.0 + dist.get_rank())
    for step, kind in enumerate(PASSES.split(), 1):
        model.train(kind != "eval")
        with model.no_sync() if kind == "no_sync" else nullcontext():
            with torch.set_grad_enabled(kind in ("reduce", "no_sync")):
                loss = model(x * step).sum()
            if loss.requires_grad:
                loss.backward()
        means.append(model.module.running_mean.item())
    return means


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_buffers_are_the_first_ranks_in_the_passes_in_which_pytorchs_are(broadcast_buffers):
    theirs = run(3, _normalise, nn.parallel.DistributedDataParallel, broadcast_buffers)
    assert run(3, _normalise, DistributedDataParallel, broadcast_buffers) == theirs
    alike = {step for step, means in enumerate(zip(*theirs)) if len(set(means)) == 1}
    assert alike == ({5, 6} if broadcast_buffers else set())


# ---- what would be wrong in silence --------------------------------------------------------------


UNLIKE = {
    "'1.weight' (5, 2) torch.float32 True cpu": lambda: nn.Linear(2, 5),
    "'1.weight' (4, 2) torch.float64 True cpu": lambda: nn.Linear(2, 4).double(),
    "'1.weight' (4, 2) torch.float32 False cpu": lambda: nn.Linear(2, 4).requires_grad_(False),
    "nothing": lambda: nn.Linear(2, 4, bias=False),
}


@on_ranks(3)
@pytest.mark.parametrize("here", UNLIKE)
def test_models_that_differ_are_an_error_on_every_rank(here):
    last = UNLIKE[here]() if dist.get_rank() == 2 else nn.Linear(2, 4)
    there = "'1.bias' (4,)" if here == "nothing" else "'1.weight' (4, 2)"
    with pytest.raises(ValueError) as raised:
        DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), last))
    assert str(raised.value) == (
        f"rank 2 of the group has {here}, rank 0 has {there} torch.float32 True cpu"
    )


def _fail(module, gradients, outputs):
    raise KeyError("backward fails here")


@pytest.mark.parametrize("failing", [(0, 1), (1,)])
@on_ranks(2)
def test_after_a_backward_that_failed_finish_grad_sync_goes_on(failing):
    """Also where one rank alone has failed, for whose gradients the others wait."""
    net, x, rank = _net(), _data(4), dist.get_rank()
    model = DistributedDataParallel(net, bucket_cap_mb=CAPS[0])
    handle = net.branches[0].register_full_backward_hook(_fail)
    if rank not in failing:
        handle.remove()
    loss = model(_own_part(x)).square().mean()
    with pytest.raises(KeyError) if rank in failing else nullcontext():
        loss.backward()
    handle.remove()
    if rank in failing:
        with pytest.raises(RuntimeError, match=r"If it failed, finish_grad_sync\(\) ends it"):
            model(_own_part(x))
    model.finish_grad_sync()
    model.zero_grad()
    model(_own_part(x)).square().mean().backward()
    _close(_gradients(net), _whole_batch(net, x))


class _Twice(nn.Linear):
    """Gives two gradients to each parameter in one pass."""

    def forward(self, x):
        again = super().forward
        return checkpoint(again, checkpoint(again, x, use_reentrant=True), use_reentrant=True)


@on_ranks(2)
def test_what_a_wrapper_cannot_do_is_refused():
    net, x, pieces = _net(), _own_part(_data(4)), nn.Linear(4, 4)
    FullyShardedDataParallel(pieces)
    with pytest.raises(ValueError, match="FullyShardedDataParallel has cut these parameters"):
        DistributedDataParallel(nn.Sequential(pieces))
    model = DistributedDataParallel(net)
    for copied in (lambda: copy.deepcopy(model), lambda: torch.save(model, io.BytesIO())):
        with pytest.raises(RuntimeError, match="copy its module, and wrap the copy"):
            copied()
    with pytest.raises(RuntimeError, match="create_graph=True: gradients of gradients"):
        model(x).square().mean().backward(create_graph=True)
    twice = DistributedDataParallel(nn.Sequential(nn.Linear(12, 12), _Twice(12, 12)).double())
    with pytest.raises(RuntimeError, match=r"two gradients in one backward, of \(12"):
        twice(x).sum().backward()
    for name, trained in (("frozen.weight", True), ("head.bias", False)):
        net = _net()
        model = DistributedDataParallel(net)
        net.get_parameter(name).requires_grad_(trained)
        with pytest.raises(RuntimeError, match=f"'{name}' was frozen, thawed or replaced"):
            model(x).sum().backward()
    net = _net()
    models = DistributedDataParallel(net), DistributedDataParallel(net)
    with pytest.raises(RuntimeError, match="taken while it was reduced: by a second wrapper"):
        models[0](x).square().mean().backward()
    sparse = DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
    with pytest.raises((RuntimeError, NotImplementedError), match="[Ss]parse"):
        sparse(torch.tensor([1, 2])).sum().backward()


@on_ranks(2)
def test_buffers_are_the_first_ranks_after_a_reduction_though_its_forward_was_under_no_sync():
    model, x = DistributedDataParallel(nn.BatchNorm1d(1)), torch.full((4, 1), 1.0 + dist.get_rank())
    for reduces in (False, True):
        with model.no_sync():
            loss = model(x).sum()
        with nullcontext() if reduces else model.no_sync():
            loss.backward()
        with torch.no_grad():
            model.eval()(x)  # broadcasts, if at all
        means = gather_objects(model.train().module.running_mean.item())
        assert (len(set(means)) == 1) == reduces
