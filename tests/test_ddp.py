"""Gradients of ddp.py against one process on the whole batch, and against torch.nn.parallel."""

import copy
import io
import re
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from types import SimpleNamespace
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
from replicas import (
    assert_close, demonstration, fail, gradients_alone, make_data, make_net, mean_square, own_part,
    whole_gradients,
)

# MiB: a bucket for each parameter, a few buckets, one bucket; and how many they are of Net()
CAPS = [(1e-9, 17), (3e-3, 4), (25, 1)]


def whole_batch(net, x):
    return gradients_alone(net, lambda net: mean_square(net, x))


@contextmanager
def reductions(note=lambda tensor: None):
    """The tensors that ddp.py has all-reduced; calls note() with each when that begins."""
    tensors, all_reduce = [], ddp.all_reduce

    def watched(tensor, *args, **kwargs):
        tensors.append(tensor)
        note(tensor)
        return all_reduce(tensor, *args, **kwargs)

    with patch.object(ddp, "all_reduce", watched):
        yield tensors


def sizes(tensors):
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


# ---- the gradient of the whole batch -------------------------------------------------------------


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("cap, few", CAPS)
def test_gradients_are_those_of_one_process_on_the_whole_batch(cap, few):
    """And views of buckets, which are sent whole; all begin on 128 bytes, of 16 bits, too."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 0.05)):
        net, x = make_net(dtype), make_data(4 * dist.get_world_size(), dtype=dtype)
        expected = whole_batch(net, x)
        model = DistributedDataParallel(net, bucket_cap_mb=cap)
        with reductions() as calls:
            mean_square(model, own_part(x)).backward()
        assert_close(whole_gradients(net), expected, tolerance)
        assert net.blocks[1].up.weight.grad is None
        trained = [p for p in net.parameters() if p.requires_grad]
        buckets = {p.grad.untyped_storage().data_ptr() for p in trained}
        assert len(buckets) == len(calls) <= few
        assert sum(sizes(calls)) == sum(-(-p.numel() // 64) * 64 for p in trained)
        begins = [x.storage_offset() * x.itemsize for x in (*calls, *(p.grad for p in trained))]
        assert all(begin % 128 == 0 for begin in begins) and any(begins) == (few < len(trained))
        if dtype == torch.float64:
            assert len(calls) == few
            assert max(sizes(calls)) <= cap * 2**20 / 8 or few != 4


@on_ranks(1, 2, 3, 4)
def test_gradients_are_those_of_torch():
    """Of the idea, of the middle step, where every parameter has one, and of the real one."""
    x = make_data(2 * dist.get_world_size())
    theirs, ours, naive, plain = (make_net() for _ in range(4))
    torchs = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True)
    model = DistributedDataParallel(ours, bucket_cap_mb=3e-3)
    assert [*model.state_dict()] == [*torchs.state_dict()]
    is_used = lambda name, p: p.requires_grad and "blocks.0" not in name
    used = [p for name, p in plain.named_parameters() if is_used(name, p)]
    buckets = [ddp.Bucket(used[half::2]) for half in range(2)]
    for trained in (torchs, model, naive, plain, plain):
        trained.zero_grad()
        trained(own_part(x), (2, 1)).square().mean().backward()
        for bucket in buckets if trained is plain else ():
            bucket.finish()
    average_gradients(naive)
    for net in (theirs, plain):
        for parameter in net.blocks[0].parameters():  # ours have zeros
            assert parameter.grad is None
            parameter.grad = torch.zeros_like(parameter)
    for net in (ours, naive, plain):
        assert_close(whole_gradients(net), whole_gradients(theirs))


# ---- over several backward passes ----------------------------------------------------------------


def under_no_sync(model, parts):
    with model.no_sync(), count_bytes() as traffic:
        with model.no_sync():
            pass
        for part in parts[:-1]:
            (mean_square(model, part) / 3).backward()
    assert traffic.bytes("all_reduce") == 0
    (mean_square(model, parts[-1]) / 3).backward()


def with_a_flag(model, parts):
    """As loops that accumulate over microbatches set it, before forward."""
    with pytest.raises(KeyError), model.no_sync(), model.no_sync():
        fail()
    assert model.require_backward_grad_sync
    for i, part in enumerate(parts):
        model.require_backward_grad_sync = i == 2
        with count_bytes() as traffic:
            (mean_square(model, part) / 3).backward()
        reduces = i == 2 and dist.get_world_size() > 1
        assert (traffic.bytes("all_reduce") > 0) == reduces


def two_forwards(model, parts):
    """Then two backwards, and an evaluation between."""
    losses = [mean_square(model, part) / 3 for part in parts]
    with torch.no_grad():
        model(parts[0])
    for loss in losses[::-1]:
        loss.backward()


def hidden_outputs(model, parts):
    """Which nobody can find in what the module returns."""
    outputs, forward = [], model.module.forward
    model.module.forward = lambda x: outputs.append(forward(x))
    for part in parts:
        assert model(part) is None
        with torch.no_grad():
            model(part)
    (sum(y.square().mean() for y in outputs[::2]) / 3).backward()
    model.module.forward = forward


def recomputed(model, parts, use_reentrant):
    """Around the wrapper."""
    x = torch.cat(parts).requires_grad_()
    checkpoint(model, x, use_reentrant=use_reentrant).square().mean().backward()


def outside_of_backward(model, parts):
    """As weight gradients that were put off: some are there, some follow."""
    net, x = model.module, torch.cat(parts)
    own = whole_batch(net, x)
    named = {name: net.get_parameter(name) for name in own}
    late = {name: p for name, p in named.items() if name.startswith("blocks")}
    with model.no_sync():
        for name in named.keys() - late.keys():
            torch.autograd.backward(named[name], own[name])
    with reductions() as calls:
        model.start_grad_sync(awaited=late.values())
        begun = len(calls)
        for name, parameter in late.items():
            torch.autograd.backward(parameter, own[name])
        assert begun < len(calls) or len(calls) == 1
        model.finish_grad_sync()


def waited_for_by_the_caller(model, parts):
    model.wait_in_backward = False
    model.finish_grad_sync()  # nothing was started: nothing to wait for
    under_no_sync(model, parts)
    with count_bytes() as traffic:
        model.finish_grad_sync()
    assert not traffic.sent  # all have left
    model.finish_grad_sync()
    model.wait_in_backward = True


PASSES = [under_no_sync, with_a_flag, two_forwards, hidden_outputs, outside_of_backward]
PASSES += [waited_for_by_the_caller]
PASSES += [partial(recomputed, use_reentrant=use_reentrant) for use_reentrant in (False, True)]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("cap", [cap for cap, _ in CAPS])
def test_gradients_of_several_passes_are_those_of_the_whole_batch(cap):
    """Each twice, from gradients that are None and from zeros; sums of sums where all reduce."""
    net = make_net()
    model = DistributedDataParallel(net, bucket_cap_mb=cap)
    for seed, passes in enumerate(2 * PASSES):
        x = make_data(6 * dist.get_world_size(), seed)
        net.zero_grad(set_to_none=seed < len(PASSES))
        passes(model, own_part(x).chunk(3))
        assert_close(whole_gradients(net), whole_batch(net, x), 1e-11)


# ---- parameters without gradient, and other orders (trap 5) --------------------------------------


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("cap", [cap for cap, _ in CAPS])
def test_ranks_may_use_other_parameters_in_another_order(cap):
    """Each of two microbatches runs other blocks, and others again in the next step."""
    rank, world_size = rank_and_size()
    net = make_net()
    model = DistributedDataParallel(net, bucket_cap_mb=cap)
    orders = [(0, 1, 2), (2, 0), (), (2, 1, 0)]
    for step in range(4):
        x = make_data(4 * world_size, seed=step)
        used = [orders[(i + step) % 4] for i in range(2 * world_size)]
        expected = gradients_alone(net, lambda net: sum(
            net(part, order).square().sum() / world_size for part, order in zip(x.split(2), used)
        ))
        net.zero_grad(set_to_none=step % 2 == 0)
        (first, last), own = own_part(x).split(2), used[2 * rank : 2 * rank + 2]
        with model.no_sync():
            model(first, own[0]).square().sum().backward()
            if step == 3:  # the idea: whole gradients, averaged at the end
                model(last, own[1]).square().sum().backward()
        if step == 3:
            average_gradients(net)
        else:
            model(last, own[1]).square().sum().backward()
        assert_close(whole_gradients(net), expected, 1e-11)


class Shelf(nn.Module):
    """Layers of 64, 128, 192 and 256 elements, used in a given order, or not."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, n, bias=False) for n in (1, 2, 3, 4))

    def forward(self, x, order):
        return {"outputs": [self.layers[i](x) for i in order], "x": x.clone()}


@on_ranks(4)
@pytest.mark.parametrize("cap, sent", [(1e-9, [256, 192, 128, 64]), (25, [640])])
def test_buckets_go_out_in_one_order_on_every_rank(cap, sent):
    """The elements of each all-reduce, where every rank finishes its gradients in another order."""
    rank = dist.get_rank()
    model = DistributedDataParallel(Shelf(), bucket_cap_mb=cap)
    x = torch.ones(1, 64, requires_grad=True)
    for order in ([(i + rank) % 4 for i in range(4)], [rank], []):
        model.zero_grad()
        result = model(x, order)
        loss = sum((output.sum() for output in result["outputs"]), result["x"].sum())
        with torch.no_grad():
            model(x, order)  # which expects no backward, and forgets none
        with reductions() as calls:
            loss.backward()
            assert bool(calls) == bool(order)
            model.finish_grad_sync()  # for a loss that reaches no parameter
        assert sizes(calls) == sent
        for layer in model.module.layers:
            assert (layer.weight.grad == len(order) / 4).all()


@on_ranks(2)
def test_a_bucket_leaves_while_backward_still_runs():
    layers = nn.Sequential(*[nn.Linear(7, 7, bias=False) for _ in range(4)]).double()
    model, events = DistributedDataParallel(layers, bucket_cap_mb=1e-9), []
    for i, layer in enumerate(layers):
        layer.weight.register_hook(lambda grad, i=i: events.append(f"gradient {i}"))
    with reductions(lambda tensor: events.append("reduce")):
        mean_square(model, own_part(make_data(4))).backward()
    assert events == [event for i in (3, 2, 1, 0) for event in (f"gradient {i}", "reduce")]


# ---- dtypes --------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Weights of many dtypes; the gradient of each element is the input."""

    def __init__(self):
        super().__init__()
        dtypes = [torch.float32, torch.bfloat16, torch.bfloat16, torch.float64, torch.float16]
        self.weights = nn.ParameterList(torch.zeros(7 + i, dtype=t) for i, t in enumerate(dtypes))

    def forward(self, x):
        return sum((x * weight.double()).sum() for weight in self.weights)


@on_ranks(1, 3)
@pytest.mark.parametrize("cap", [1e-9, 25])
def test_a_bucket_holds_one_dtype(cap):
    rank, world_size = rank_and_size()
    for factor in (None, 1):
        net = Mixed()
        model = DistributedDataParallel(net, bucket_cap_mb=cap, gradient_divide_factor=factor)
        with reductions() as calls:
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
    """Trap 6: four microbatches, of the real one and of the idea."""
    net = nn.Sequential(*[nn.Linear(7, 7) for _ in range(3)]).bfloat16()
    x = make_data(24).bfloat16()
    for parameter in net.parameters():
        parameter.grad_dtype = torch.float32
    model = DistributedDataParallel(net, bucket_cap_mb=1e-3 / 2)
    loss = lambda net, part: net(part).float().exp().mean()
    expected = dict.fromkeys(net.state_dict(), 0)
    for part in x.chunk(12):
        gradients = torch.autograd.grad(loss(net, part), list(net.parameters()))
        for name, gradient in zip(expected, gradients):
            expected[name] += gradient.double() / 3
    for average in (None, average_gradients):
        model.zero_grad()
        with reductions() as calls, least_bytes(), count_bytes() as traffic:
            for i, part in enumerate(own_part(x).chunk(4)):
                with model.no_sync() if average or i < 3 else nullcontext():
                    loss(model, part).backward()
            if average:
                average(net)
        assert {tensor.dtype for tensor in calls} == {torch.float32} and len(calls) > 1
        found = {name: gradient.double() for name, gradient in whole_gradients(net).items()}
        assert_close(found, expected, 1e-6)
        if not average:
            assert sum(gather_objects(traffic.bytes("all_reduce"))) // 3 == ddp_bytes(net, 3)


# ---- clipping ------------------------------------------------------------------------------------


@on_ranks(1, 3, 4)
@pytest.mark.parametrize("norm_type", [2.0, 1, 0.5, 3.0, "inf", float("inf")])
def test_the_norm_of_what_ranks_have_and_clipping_are_those_of_torch(norm_type):
    """Over all ranks, or over rows of them and then columns."""
    (rank, world_size), groups = rank_and_size(), [None]
    if world_size == 4:
        rows = [dist.new_group(members) for members in ([0, 1], [2, 3])]
        columns = [dist.new_group(members) for members in ([0, 2], [1, 3])]
        groups = rows[rank // 2], columns[rank % 2]
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.complex128)
    wholes = [torch.randn(9, dtype=dtype, generator=generator) for dtype in 2 * dtypes]
    parts = [whole.tensor_split(world_size)[rank].clone() for whole in wholes]
    parts.append(torch.zeros(0))
    like = [whole.to(torch.promote_types(whole.dtype, torch.float64)) for whole in wholes]
    expected = nn.utils.get_total_norm(like, float(norm_type)).item()
    norm = ddp.get_total_norm(parts, norm_type, groups)
    assert norm.shape == () and norm.item() == pytest.approx(expected, rel=1e-6)
    nested = [*parts[4:], ddp.get_total_norm(parts[:4], norm_type)]
    assert ddp.get_total_norm(nested, norm_type, groups).item() == pytest.approx(norm.item())
    for max_norm in (0.3 * expected, 2 * expected):
        factor = min(1, max_norm / (norm.item() + 1e-6))
        clipped = [part.clone() for part in parts]
        with waits() as found:
            ddp.clip_grads_with_norm_(clipped, max_norm, norm)
        assert not found
        for actual, part in zip(clipped, parts):
            rtol = {2: 2**-8, 4: 1e-6}.get(part.itemsize, 1e-9)
            torch.testing.assert_close(actual, part * factor, rtol=rtol, atol=0)
    with pytest.raises(ValueError, match="norm_type=-1.0 must be positive"):
        ddp.get_total_norm(parts, -1)


# ---- cost ----------------------------------------------------------------------------------------


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("width, cap", [(48, 1e-9), (48, 25), (7, 1e-9), (7, 8e-4), (7, 25)])
def test_a_step_sends_each_gradient_once_around_the_ring(width, cap):
    """P = 1 to 4 divide 48 x 48 into parts of whole 128 bytes."""
    net = nn.Sequential(*[nn.Linear(width, width, bias=width != 48) for _ in range(3)])
    net[1].requires_grad_(False)
    model = DistributedDataParallel(net, bucket_cap_mb=cap)
    with least_bytes(), reductions() as calls, count_bytes() as traffic:
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
    printed = demonstration(ddp)
    claimed, counted = re.search(r"claimed (\d+) bytes, counted (\d+)", printed).groups()
    assert claimed == counted
    assert float(printed.split()[-1]) < 1e-14


# ---- buffers -------------------------------------------------------------------------------------


KINDS = "reduce reduce no_sync no_sync reduce eval eval reduce no_grad no_grad reduce reduce"


def normalise(wrap, broadcast_buffers):
    """The running mean after each pass."""
    model = wrap(nn.BatchNorm1d(1), broadcast_buffers=broadcast_buffers)
    means, x = [], torch.full((4, 1), 1.0 + dist.get_rank())
    for step, kind in enumerate(KINDS.split(), 1):
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
    theirs = run(3, normalise, nn.parallel.DistributedDataParallel, broadcast_buffers)
    assert run(3, normalise, DistributedDataParallel, broadcast_buffers) == theirs
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


@pytest.mark.parametrize("failing", [(0, 1), (1,)])
@pytest.mark.parametrize("late", [False, True])
@on_ranks(2)
def test_after_a_backward_that_failed_finish_grad_sync_goes_on(failing, late):
    """Also where one rank alone has failed, for whose gradients the others wait.

    late: what the failed pass has sent comes when it is waited for, not before.
    """
    net, x, rank = make_net(), make_data(4), dist.get_rank()
    model = DistributedDataParallel(net, bucket_cap_mb=1e-9)
    handle = net.blocks[0].register_full_backward_hook(fail)
    if rank not in failing:
        handle.remove()
    with late_messages() if late else nullcontext():
        loss = mean_square(model, own_part(x))
        with pytest.raises(KeyError) if rank in failing else nullcontext():
            loss.backward()
        handle.remove()
        if rank in failing:
            with pytest.raises(RuntimeError, match=r"If it failed, finish_grad_sync\(\) ends it"):
                model(own_part(x))
        model.finish_grad_sync()
        model.zero_grad()
        mean_square(model, own_part(x)).backward()
    assert_close(whole_gradients(net), whole_batch(net, x))


def late_messages():
    """Sums that only begin when they are waited for."""
    all_reduce = ddp.all_reduce

    def begin(*args, async_op=False, **kwargs):
        run = lru_cache(lambda: all_reduce(*args, **kwargs))
        return SimpleNamespace(wait=run) if async_op else run()

    return patch.object(ddp, "all_reduce", begin)


class Twice(nn.Linear):
    """Gives two gradients to each parameter in one pass."""

    def forward(self, x):
        again = super().forward
        return checkpoint(again, checkpoint(again, x, use_reentrant=True), use_reentrant=True)


@on_ranks(2)
def test_what_a_wrapper_cannot_do_is_refused():
    net, x, pieces = make_net(), own_part(make_data(4)), nn.Linear(4, 4)
    FullyShardedDataParallel(pieces)
    with pytest.raises(ValueError, match="FullyShardedDataParallel has cut these parameters"):
        DistributedDataParallel(nn.Sequential(pieces))
    model = DistributedDataParallel(net)
    for copied in (lambda: copy.deepcopy(model), lambda: torch.save(model, io.BytesIO())):
        with pytest.raises(RuntimeError, match="copy its module, and wrap the copy"):
            copied()
    with pytest.raises(RuntimeError, match="create_graph=True: gradients of gradients"):
        mean_square(model, x).backward(create_graph=True)
    twice = DistributedDataParallel(nn.Sequential(nn.Linear(7, 7), Twice(7, 7)).double())
    with pytest.raises(RuntimeError, match=r"two gradients in one backward, of \(7"):
        twice(x).sum().backward()
    for name, trained in (("blocks.1.up.weight", True), ("head.bias", False)):
        model = DistributedDataParallel(make_net())
        model.module.get_parameter(name).requires_grad_(trained)
        with pytest.raises(RuntimeError, match=f"'{name}' was frozen, thawed or replaced"):
            model(x).sum().backward()
    net = make_net()
    models = DistributedDataParallel(net), DistributedDataParallel(net)
    with pytest.raises(RuntimeError, match="taken while it was reduced: by a second wrapper"):
        mean_square(models[0], x).backward()
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
