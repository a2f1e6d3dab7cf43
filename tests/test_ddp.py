"""Gradients of ddp.py against one process on the whole batch, and against torch.nn.parallel."""

import copy
import io
import re
from contextlib import contextmanager, nullcontext, redirect_stdout
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddp
from collectives import count_bytes, gather_objects, rank_and_size
from ddp import DistributedDataParallel, FlatLayout, average_gradients, ddp_bytes

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


def _own_part(x):
    rank, world_size = rank_and_size()
    return x.chunk(world_size)[rank]


def _padded(elements):
    return -(-elements // 64) * 64


def _close(actual, expected, tolerance=1e-12):
    assert len(expected) > 0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@contextmanager
def _watched_reductions(note):
    """Calls note(tensor) for each all-reduce that ddp.py begins."""
    all_reduce = ddp.all_reduce

    def watched(tensor, *args, **kwargs):
        note(tensor)
        return all_reduce(tensor, *args, **kwargs)

    with patch.object(ddp, "all_reduce", watched):
        yield


@contextmanager
def _recorded_reductions():
    """(elements, dtype) of each."""
    calls = []
    with _watched_reductions(lambda tensor: calls.append((tensor.numel(), tensor.dtype))):
        yield calls


@contextmanager
def _held_reductions():
    """The reductions that were waited for."""
    waited, all_reduce = [], ddp.all_reduce

    def held(*args, **kwargs):
        work = all_reduce(*args, **kwargs)
        wait = work.wait
        work.wait = lambda: (waited.append(work), wait())
        return work

    with patch.object(ddp, "all_reduce", held):
        yield waited


# ---- the layout of a row -------------------------------------------------------------------------


def test_tensors_shards_and_their_pieces_begin_on_128_bytes():
    shapes = [(7, 7), (), (0, 3), (65,), (64,), (1, 300), (15,)]
    tensors = [torch.rand(shape) for shape in shapes]
    for shards in range(1, 6):
        layout = FlatLayout(tensors, shards)
        row = torch.full((layout.length,), float("nan"))
        for view, tensor in zip(layout.views(row), tensors):
            assert view.storage_offset() % 64 == 0 and view.shape == tensor.shape
            view.copy_(tensor)
        assert layout.length - row.isnan().sum() == sum(t.numel() for t in tensors)
        assert row.isnan().sum() <= 63 * len(shapes) + 64 * (shards - 1)
        assert torch.equal(layout.pack(tensors), row.nan_to_num(0))
        assert layout.length == shards * layout.shard_size and layout.shard_size % 64 == 0
        wholes = [[] for _ in tensors]
        for rank, shard in enumerate(row.split(layout.shard_size)):
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
    net, starts = _Net(7).to(dtype), []
    model = DistributedDataParallel(net, bucket_cap_mb=1e-3, find_unused_parameters=True)
    with _watched_reductions(starts.append):
        for _ in range(2):
            model(torch.ones(2, 7, dtype=dtype)).sum().backward()
    starts += [p.grad for p in net.parameters() if p.requires_grad]
    starts += [bucket.flags for bucket in model._gradients.buckets]
    begins = [start.storage_offset() * start.itemsize for start in starts]
    assert any(begins) and all(begin % 128 == 0 for begin in begins)


# ---- the gradient of the whole batch -------------------------------------------------------------


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("cap, few", list(zip(CAPS, (9, 4, 1))))
def test_gradients_are_those_of_one_process_on_the_whole_batch(cap, few):
    net, x = _net(), _data(4 * dist.get_world_size())
    expected = _whole_batch(net, x)
    model = DistributedDataParallel(net, bucket_cap_mb=cap)
    with _recorded_reductions() as calls:
        model(_own_part(x)).square().mean().backward()
    _close(_gradients(net), expected)
    assert net.frozen.weight.grad is None
    trained = [p for p in net.parameters() if p.requires_grad]
    buckets = {p.grad.untyped_storage().data_ptr() for p in trained}
    assert len(buckets) == len(calls) == few  # gradients are views
    elements = [elements for elements, _ in calls]
    assert sum(elements) == sum(_padded(p.numel()) for p in trained)
    if 1 < few < len(trained):
        assert max(elements) <= cap * 2**20 / 8


@on_ranks(1, 2, 3, 4)
def test_bucketed_and_naive_gradients_are_those_of_torch():
    """Also those of the middle step, where every parameter has one."""
    x = _data(2 * dist.get_world_size())
    theirs, ours, naive, plain = _net(), _net(), _net(), _net()
    model = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True)
    model(_own_part(x), (2, 0)).square().mean().backward()
    model = DistributedDataParallel(ours, bucket_cap_mb=CAPS[1], find_unused_parameters=True)
    model(_own_part(x), (2, 0)).square().mean().backward()
    naive(_own_part(x), (2, 0)).square().mean().backward()
    average_gradients(naive)
    unused = {name for name, p in theirs.named_parameters() if p.grad is None and p.requires_grad}
    assert unused == {"branches.1.weight", "branches.1.bias"}
    assert unused == {name for name in unused if ours.get_parameter(name).grad is None}
    for name in unused:  # the naive version has zeros
        for net in (ours, theirs):
            net.get_parameter(name).grad = torch.zeros_like(theirs.get_parameter(name))
    _close(_gradients(ours), _gradients(theirs))
    _close(_gradients(naive), _gradients(theirs))
    assert [*model.state_dict()] == [f"module.{name}" for name in theirs.state_dict()]
    used = [p for name, p in plain.named_parameters() if name not in unused and p.requires_grad]
    buckets = [ddp.Bucket(used[half::2]) for half in range(2)]
    for _ in range(2):
        plain.zero_grad()
        plain(_own_part(x), (2, 0)).square().mean().backward()
        for bucket in buckets:
            bucket.finish()
    for name in unused:
        plain.get_parameter(name).grad = torch.zeros_like(plain.get_parameter(name))
    _close(_gradients(plain), _gradients(theirs))


@on_ranks(4)
def test_gradients_are_averaged_over_the_group():
    groups = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    group = groups[dist.get_rank() % 2]
    rank, world_size = rank_and_size(group)
    net, x = _net(), _data(8, seed=dist.get_rank() % 2)
    expected = _whole_batch(net, x)
    for model in (DistributedDataParallel(net, group, bucket_cap_mb=CAPS[1]), net):
        net.zero_grad()
        model(x.chunk(world_size)[rank]).square().mean().backward()
        if model is net:
            average_gradients(net, group)
        _close(_gradients(net), expected)


@on_ranks(1, 2, 3)
def test_gradients_are_summed_and_divided_by_the_given_factor():
    rank, world_size = rank_and_size()
    sizes = [r + 1 for r in range(world_size)]
    net, x = _net(), _data(sum(sizes))
    expected = _whole_batch(net, x)
    model = DistributedDataParallel(net, bucket_cap_mb=CAPS[1], gradient_divide_factor=1)
    (model(x.split(sizes)[rank]).square().sum() / (12 * len(x))).backward()
    _close(_gradients(net), expected)
    model = DistributedDataParallel(_net(), gradient_divide_factor=4)
    model(x.split(sizes)[rank]).square().sum().backward()
    expected = {name: gradient * 12 * len(x) / 4 for name, gradient in expected.items()}
    _close(_gradients(model.module), expected, 1e-11)


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
        expected = _whole_batch(net, x)
        net.zero_grad(set_to_none)
        *first, last = _own_part(x).chunk(3)
        with model.no_sync(), count_bytes() as traffic:
            with model.no_sync():
                pass
            for microbatch in first:
                (model(microbatch).square().mean() / 3).backward()
        assert traffic.messages() == 0
        (model(last).square().mean() / 3).backward()
        _close(_gradients(net), expected)


@on_ranks(3)
def test_a_gradient_of_an_earlier_microbatch_alone_is_reduced():
    """Only the first microbatch, and only on rank 0, uses branch 1."""
    rank, world_size = rank_and_size()
    net, x = _net(), _data(4 * world_size)
    used = [[(0, 1, 2) if r == 0 else (0, 2), (2, 0)] for r in range(world_size)]
    parts = [part.chunk(2) for part in x.chunk(world_size)]
    expected = _one_process(net, lambda net: sum(
        net(parts[r][k], used[r][k]).square().sum() for r in range(world_size) for k in range(2)
    ))
    for cap in CAPS:
        model = DistributedDataParallel(
            _net(), bucket_cap_mb=cap, gradient_divide_factor=1, find_unused_parameters=True
        )
        with model.no_sync():
            model(parts[rank][0], used[rank][0]).square().sum().backward()
        model(parts[rank][1], used[rank][1]).square().sum().backward()
        _close(_gradients(model.module), expected, 1e-11)


@on_ranks(2)
def test_no_sync_ends_with_an_exception():
    net, x = _net(), _data(4 * dist.get_world_size())
    model = DistributedDataParallel(net)
    with pytest.raises(KeyError):
        with model.no_sync(), model.no_sync():
            raise KeyError
    model(_own_part(x)).square().mean().backward()
    _close(_gradients(net), _whole_batch(net, x))


# ---- parameters without gradient, and other orders (trap 5) --------------------------------------


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("cap", CAPS)
def test_ranks_may_use_other_parameters_in_another_order(cap):
    """Each rank runs other branches, in another order, and others again in the next step."""
    rank, world_size = rank_and_size()
    net = _net()
    model = DistributedDataParallel(net, bucket_cap_mb=cap, find_unused_parameters=True)
    for step in range(4):
        orders = [[(0, 1, 2), (2, 0), (), (2, 1, 0)][(r + step) % 4] for r in range(world_size)]
        x = _data(2 * world_size, seed=step)
        expected = _one_process(net, lambda net: sum(
            net(part, order).square().sum() / world_size
            for part, order in zip(x.chunk(world_size), orders)
        ))
        net.zero_grad(set_to_none=step % 2 == 0)
        model(_own_part(x), orders[rank]).square().sum().backward()
        for name, p in net.named_parameters():
            if p.requires_grad and p.grad is None:  # it was None, and no rank has used it
                assert step % 2 == 0 and not any(int(name.split(".")[1]) in o for o in orders)
                p.grad = torch.zeros_like(p)
        _close(_gradients(net), expected, 1e-11)


class _Shelf(nn.Module):
    """Layers of 64, 128, 192 and 256 elements, used in a given order, or not."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, n, bias=False) for n in (1, 2, 3, 4))

    def forward(self, x, order):
        return {"outputs": [self.layers[i](x) for i in order], "x": x.clone()}


@on_ranks(4)
@pytest.mark.parametrize("cap", CAPS[::2])
def test_buckets_go_out_in_one_order_on_every_rank(cap):
    """The elements of each all-reduce, where every rank finishes its gradients in another order."""
    rank, calls = dist.get_rank(), []
    model = DistributedDataParallel(_Shelf(), bucket_cap_mb=cap, find_unused_parameters=True)
    x = torch.ones(1, 64, requires_grad=True)
    for order in ([(i + rank) % 4 for i in range(4)], [rank], []):
        result = model(x, order)
        loss = sum((output.sum() for output in result["outputs"]), result["x"].sum())
        with _recorded_reductions() as reductions:
            loss.backward()
        calls.append(reductions)
        used = (0, 1, 2, 3) if order else ()
        for i, layer in enumerate(model.module.layers):
            assert (layer.weight.grad is not None) == (i in used)
            layer.weight.grad = None
    for reductions in calls:
        assert sum(elements for elements, _ in reductions) == 640 + 4  # a flag for each parameter
    assert all(other == calls for other in gather_objects(calls))


@on_ranks(3)
def test_buckets_are_rebuilt_once_in_the_order_of_arrival_on_the_first_rank():
    """Registered 0 1 2 3; on rank r layer r comes first in forward, and so last in backward."""
    rank, orders = dist.get_rank(), []
    model = DistributedDataParallel(_Shelf(), bucket_cap_mb=1e-9)
    x = torch.ones(1, 64)
    for step in range(3):
        outputs = model(x, [(2 + i + rank) % 4 for i in range(4)])["outputs"]
        model.zero_grad()
        with _recorded_reductions() as calls:
            sum(output.sum() for output in outputs).backward()
        orders.append([elements // 64 - 1 for elements, _ in calls])
        for layer in model.module.layers:
            assert (layer.weight.grad == 1).all()
    assert orders[0] == [3, 2, 1, 0] != orders[1] == orders[2]
    assert sorted(orders[1]) == [0, 1, 2, 3]
    assert all(other == orders for other in gather_objects(orders))


@on_ranks(3)
@pytest.mark.parametrize("find", [True, False])
def test_a_parameter_without_gradient_is_named_or_counts_as_zero(find):
    """Rank 1 does not use branch 1; nobody uses branch 2."""
    rank, world_size = rank_and_size()
    net, x = _net(), _data(2 * world_size)
    model = DistributedDataParallel(
        net, bucket_cap_mb=CAPS[1], find_unused_parameters=find, gradient_divide_factor=1
    )
    orders = [(0,) if r == 1 else (0, 1) for r in range(world_size)]
    expected = _one_process(net, lambda net: sum(
        net(part, order).square().sum() for part, order in zip(x.chunk(world_size), orders)
    ))
    loss = model(_own_part(x), orders[rank]).square().sum()
    if find:
        loss.backward()
        for name in ("branches.2.weight", "branches.2.bias"):
            assert net.get_parameter(name).grad is None
            net.get_parameter(name).grad = torch.zeros_like(net.get_parameter(name))
    else:
        names = {f"branches.{i}.{kind}" for i in range(3) for kind in ("weight", "bias")
                 if i not in orders[rank]}
        with pytest.raises(RuntimeError, match=f"rank {rank}: no gradient for ") as raised:
            loss.backward()
        assert set(re.findall(r"branches\.\d\.\w+", str(raised.value))) == names
    _close(_gradients(net), expected, 1e-11)


@on_ranks(3)
def test_naively_an_unused_parameter_counts_as_zero():
    net, x = _net(), _data(2 * dist.get_world_size())
    orders = [(0, 2) if r else (0, 1, 2) for r in range(dist.get_world_size())]
    net(_own_part(x), orders[dist.get_rank()]).square().mean().backward()
    average_gradients(net)
    expected = _one_process(net, lambda net: sum(
        net(part, order).square().mean() / len(orders)
        for part, order in zip(x.chunk(len(orders)), orders)
    ))
    _close(_gradients(net), expected)


# ---- overlap -------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_bucket_leaves_while_backward_still_runs():
    rank, world_size = rank_and_size()
    layers = nn.Sequential(*[nn.Linear(12, 12, bias=False) for _ in range(4)]).double()
    model = DistributedDataParallel(layers, bucket_cap_mb=1e-9)
    events = []
    for i, layer in enumerate(layers):
        layer.weight.register_hook(lambda grad, i=i: events.append(f"gradient {i}"))
    with _watched_reductions(lambda tensor: events.append("reduce")):
        model(_data(2 * world_size).chunk(world_size)[rank]).square().mean().backward()
    assert events == [event for i in (3, 2, 1, 0) for event in (f"gradient {i}", "reduce")]


@on_ranks(2)
@pytest.mark.parametrize("cap", CAPS)
def test_backward_may_leave_the_waiting_to_the_caller(cap):
    net, x = _net(), _data(4 * dist.get_world_size())
    expected = _whole_batch(net, x)
    model = DistributedDataParallel(net, bucket_cap_mb=cap, wait_in_backward=False)
    model.finish_grad_sync()  # nothing was started: nothing to wait for
    for _ in range(2):
        net.zero_grad()
        with _held_reductions() as waited:
            model(_own_part(x)).square().mean().backward()
            assert not waited
            model.finish_grad_sync()
            assert waited
        _close(_gradients(net), expected)


@on_ranks(2)
@pytest.mark.parametrize("cap, few", list(zip(CAPS, (9, 4, 1))))
def test_gradients_that_come_outside_of_backward_are_reduced_as_they_come(cap, few):
    """Gradients that come outside of any backward of the module: some are there, some follow."""
    net, x = _net(), _data(4 * dist.get_world_size())
    expected = _whole_batch(net, x)
    own = _one_process(net, lambda net: net(_own_part(x)).square().mean())
    model = DistributedDataParallel(net, bucket_cap_mb=cap)
    for _ in range(3):
        net.zero_grad()
        named = {n: p for n, p in net.named_parameters() if p.requires_grad}
        late = {n: p for n, p in named.items() if n.startswith("branches")}
        with model.no_sync():
            for name in named.keys() - late.keys():
                torch.autograd.backward(named[name], own[name])
        with _recorded_reductions() as calls:
            model.start_grad_sync(awaited=late.values())
            begun = len(calls)
            for name, parameter in late.items():
                torch.autograd.backward(parameter, own[name])
            model.finish_grad_sync()
        _close(_gradients(net), expected)
    assert begun < len(calls) == few


@on_ranks(4)
@pytest.mark.parametrize("cap", CAPS)
def test_some_parameters_may_have_a_group_of_their_own(cap):
    """The branches are replicated over pairs of ranks, the rest over all four."""
    rank, world_size = rank_and_size()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    dist.barrier()
    net, pair = _net(), pairs[rank % 2]
    own = {p for name, p in net.named_parameters() if name.startswith("branches")}
    for parameter in own:
        parameter.data += rank  # the model starts as the first rank's of the group
    x = _data(4 * world_size)
    model = DistributedDataParallel(net, bucket_cap_mb=cap, groups=dict.fromkeys(own, pair))
    expected = _one_process(net, lambda net: net(_own_part(x)).square().mean())
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            dist.all_reduce(expected[name], group=pair if parameter in own else None)
            expected[name] /= world_size
    starts = [torch.empty(()) for _ in range(world_size)]
    dist.all_gather(starts, net.branches[0].bias[0].detach().float())
    for _ in range(2):
        net.zero_grad()
        model(_own_part(x)).square().mean().backward()
        _close(_gradients(net), expected)
    assert [round((start - starts[0]).item()) for start in starts] == [0, 1, 0, 1]


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
        with _recorded_reductions() as calls:
            model(torch.tensor(rank + 1.0)).backward()
        total = sum(range(1, world_size + 1)) / (factor or world_size)
        for p in net.parameters():
            assert p.grad.dtype == p.dtype
            torch.testing.assert_close(p.grad, torch.full_like(p.grad, total), rtol=1e-2, atol=0)
        assert calls == ([(64, torch.float16), (64, torch.float64)] + (
            [(128, torch.bfloat16)] if cap > 1 else 2 * [(64, torch.bfloat16)]
        ) + [(64, torch.float32)])


@on_ranks(4)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_bfloat16_gradients_are_reduced_in_the_given_dtype(reduce_dtype):
    """In float32 the error of a mean is at most one of their own precision."""
    rank, world_size = rank_and_size()
    net = nn.Linear(50, 1, bias=False).bfloat16()
    x = torch.randn(world_size, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    model = DistributedDataParallel(net, reduce_dtype=reduce_dtype)
    with _recorded_reductions() as calls:
        model(x[rank : rank + 1]).sum().backward()
    assert calls == [(_padded(50), reduce_dtype or torch.bfloat16)]
    assert net.weight.grad.dtype == torch.bfloat16
    exact = x.double().mean(0)
    error = (net.weight.grad[0].double() - exact).abs() / (2**-8 * exact.abs())
    assert (error.max() > 1.01) == (reduce_dtype is None)
    assert all(torch.equal(other, net.weight.grad) for other in gather_objects(net.weight.grad))


@on_ranks(2)
def test_float32_gradients_can_travel_as_bfloat16():
    net = nn.Linear(64, 4, bias=False)
    model = DistributedDataParallel(net, reduce_dtype=torch.bfloat16)
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    with least_bytes(), count_bytes() as traffic:
        model(x).sum().backward()
    assert net.weight.grad.dtype == torch.float32
    assert traffic.bytes("all_reduce") == 2 * 256  # 2(P-1)/P of 2 bytes for each element
    gradients, inputs = zip(*gather_objects((net.weight.grad, x)))
    assert torch.equal(*gradients)
    torch.testing.assert_close(gradients[0][0], torch.cat(inputs).mean(0), rtol=0.02, atol=0.02)


class _Branches(nn.Module):
    """The i-th branch, in bfloat16 with gradients in float32, or the sum of all."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(12, 12).bfloat16() for _ in range(3))
        for parameter in self.parameters():
            parameter.grad_dtype = torch.float32

    def forward(self, x, i=None):
        return sum(b(x) for b in self.branches) if i is None else self.branches[i](x)


@on_ranks(3)
@pytest.mark.parametrize("find, copied", [(False, False), (True, False), (False, True)])
def test_gradients_of_bfloat16_parameters_add_up_and_travel_in_float32(find, copied):
    """Four microbatches; branch 2 has no gradient with `find`."""
    torch.manual_seed(0)
    rank, world_size = rank_and_size()
    net, x = _Branches(), _data(8 * world_size).bfloat16()
    model = DistributedDataParallel(net, bucket_cap_mb=CAPS[1] / 4, find_unused_parameters=find)
    if copied:
        model = copy.deepcopy(model)
        net = model.module
    branches = [0, 1] if find else [None]
    loss = lambda part, i: net(part, i).float().exp().mean()
    expected = dict.fromkeys(net.state_dict(), 0)
    for part in x.chunk(4 * world_size):
        for i in branches:
            named = {n: p for n, p in net.named_parameters() if i is None or f".{i}." in n}
            for name, gradient in zip(named, torch.autograd.grad(loss(part, i), named.values())):
                expected[name] += gradient.double() / world_size
    for step in range(2):  # the second time with buckets in the order of arrival
        model.zero_grad()
        with _recorded_reductions() as calls, least_bytes(), count_bytes() as traffic:
            *first, last = [(part, i) for i in branches for part in _own_part(x).chunk(4)]
            with model.no_sync():
                for part, i in first:
                    model(part, i).float().exp().mean().backward()
            model(*last).float().exp().mean().backward()
        assert {dtype for _, dtype in calls} == {torch.float32} and len(calls) > 1
        for name, parameter in net.named_parameters():
            if find and ".2." in name:
                assert parameter.grad is None
                continue
            assert parameter.grad.dtype == torch.float32
            _close(parameter.grad.double(), expected[name], 1e-6)
    if not find:
        counts = gather_objects(traffic.bytes("all_reduce"))
        assert sum(counts) // 3 == ddp_bytes(_Branches(), 3) == 4 * 4 * 3 * (192 + 64) // 3


@on_ranks(2)
def test_naively_too_gradients_are_averaged_in_their_own_dtype():
    net = _Branches()
    net(torch.full((1, 12), 1 + 2.0**-7 * dist.get_rank()).bfloat16(), 0).sum().backward()
    average_gradients(net)
    for i, branch in enumerate(net.branches):  # 1 + 2**-8 is none of bfloat16's
        assert (branch.weight.grad == (0 if i else 1 + 2.0**-8)).all()
        assert branch.weight.grad.dtype == torch.float32


@on_ranks(2)
def test_complex_gradients_travel_as_they_are():
    rank, world_size = rank_and_size()
    net = nn.Linear(3, 2, bias=False, dtype=torch.complex128)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(world_size, 3, dtype=torch.complex128, generator=generator)
    how = {"gradient_divide_factor": 1, "error_if_nonfinite": True}
    model = DistributedDataParallel(net, reduce_dtype=torch.float32, **how)
    model(x[rank : rank + 1]).abs().square().sum().backward()
    expected = sum(2 * x[r].mul(net.weight).sum(1, keepdim=True) * x[r].conj() for r in range(2))
    _close(net.weight.grad, expected.detach())
    net.zero_grad()
    infinite = torch.full((2, 3), float("inf"), dtype=torch.float64)
    net.weight.register_hook(lambda grad: torch.complex(grad.real, infinite))
    with pytest.raises(RuntimeError, match="gradient not finite for weight"):
        model(x[rank : rank + 1]).abs().square().sum().backward()


# ---- synchronisation -----------------------------------------------------------------------------


@on_ranks(1, 2)
@pytest.mark.parametrize("find", [False, True])
def test_the_host_waits_for_a_gpu_once_if_it_must_know_what_is_unused_and_else_never(find):
    net, x = _net(), _own_part(_data(2 * dist.get_world_size()))
    model = DistributedDataParallel(net, bucket_cap_mb=CAPS[1], find_unused_parameters=find)
    branches = (2, 0) if find else (0, 1, 2)
    model(x, branches).square().mean().backward()  # then the order of the buckets is known
    with waits() as found:
        with model.no_sync():
            model(x, branches).square().mean().backward()
        model(x, branches).square().mean().backward()
    assert found == ({"tolist": 1} if find else {})


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


def _partly_frozen(width):
    """P = 1 to 4 divide 48 x 48 into parts of whole 128 bytes."""
    net = nn.Sequential(*[nn.Linear(width, width, bias=width != 48) for _ in range(3)])
    net[1].requires_grad_(False)
    return net


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("width, cap", [(48, 1e-9), (48, 25), (7, 1e-9), (7, CAPS[1] / 4), (7, 25)])
def test_a_step_sends_each_gradient_once_around_the_ring(width, cap):
    net = _partly_frozen(width)
    model = DistributedDataParallel(net, bucket_cap_mb=cap)
    model(torch.ones(2, width)).sum().backward()  # after which the order of the buckets is known
    with least_bytes(), _recorded_reductions() as calls, count_bytes() as traffic:
        model(torch.ones(2, width)).sum().backward()
    assert traffic.bytes() == traffic.bytes("all_reduce")
    world_size = dist.get_world_size()
    gradient_bytes = 2 * 4 * (48 * 48 if width == 48 else 64 + 64)
    counted = gather_objects(traffic.bytes())
    assert sum(counted) == 2 * (world_size - 1) * gradient_bytes
    assert ddp_bytes(_partly_frozen(width), world_size) == sum(counted) // world_size
    if width == 48:
        assert traffic.bytes() == 2 * (world_size - 1) * gradient_bytes // world_size
        assert traffic.messages() == 2 * (world_size - 1) * len(calls)


@on_ranks(4)
def test_the_demonstration_counts_what_it_claims():
    with redirect_stdout(io.StringIO()) as printed:
        ddp._demonstrate()
    printed, *others = gather_objects(printed.getvalue())
    claimed, counted = re.search(r"claimed (\d+) bytes, counted (\d+)", printed).groups()
    assert claimed == counted and not any(others)
    assert float(printed.split()[-1]) < 1e-14


# ---- errors --------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_bucket_has_a_positive_size():
    for cap in (0, -1, float("nan")):
        with pytest.raises(ValueError, match=f"bucket_cap_mb={cap}"):
            DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=cap)


@on_ranks(3)
@pytest.mark.parametrize("case, here, there", [
    ("shape", "'1.weight' (5, 2) torch.float32 True", "'1.weight' (4, 2) torch.float32 True"),
    ("dtype", "'1.weight' (4, 2) torch.float64 True", "'1.weight' (4, 2) torch.float32 True"),
    ("frozen", "'1.weight' (4, 2) torch.float32 False", "'1.weight' (4, 2) torch.float32 True"),
    ("missing", "nothing", "'1.bias' (4,) torch.float32 True"),
    ("more", "'2.weight' (1, 1) torch.float32 True", "nothing"),
])
def test_models_that_differ_are_an_error_on_every_rank(case, here, there):
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4))
    if rank == 2:
        net = {
            "shape": lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5)),
            "dtype": lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4).double()),
            "frozen": lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4).requires_grad_(False)),
            "missing": lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4, bias=False)),
            "more": lambda: nn.Sequential(*net, nn.Linear(1, 1, bias=False)),
        }[case]()
    with pytest.raises(ValueError) as raised:
        DistributedDataParallel(net)
    assert str(raised.value) == f"rank 2 of the group has {here}, rank 0 has {there}"


@on_ranks(1)
def test_a_second_gradient_in_one_backward_is_an_error():
    shared = nn.Linear(3, 3)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = shared

        def forward(self, x):
            for _ in range(2):
                x = checkpoint(self.shared, x, use_reentrant=True)
            return x

    loss = DistributedDataParallel(Twice())(torch.ones(1, 3, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match="'shared.(weight|bias)' got two gradients"):
        loss.backward()


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


class _Recomputed(nn.Module):
    def __init__(self, net, use_reentrant):
        super().__init__()
        self.branches, self.use_reentrant = net.branches, use_reentrant

    def forward(self, x):
        later = lambda y: self.branches[1](self.branches[0](y).tanh())
        return checkpoint(later, self.branches[2](x), use_reentrant=self.use_reentrant)


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_under_recomputation(use_reentrant):
    net, x = _net(), _data(2 * dist.get_world_size())
    expected = _one_process(
        net.branches,
        lambda branches: branches[1](branches[0](branches[2](x)).tanh()).square().sum(),
    )
    model = DistributedDataParallel(_Recomputed(net, use_reentrant), gradient_divide_factor=1)
    model(_own_part(x).requires_grad_()).square().sum().backward()
    _close(_gradients(net.branches), expected, 1e-11)
