"""ddp.py gives the gradients of one process on the whole batch, and behaves as PyTorch's DDP."""

import copy
import os
import re
import signal
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import ddp
from collectives import count_bytes, gather_objects, observe, rank_and_size
from ddp import DistributedDataParallel, average_gradients, ddp_bytes
from tensor_parallel import ColumnParallelLinear
from zero import FullyShardedDataParallel, ShardedLayout, ZeroRedundancyOptimizer

from gpu_counts import waits
from ranks import least_bytes, on_ranks, run, shifted, soak, spawn
from replicas import (
    assert_close, demonstration, gradients_alone, make_data, make_net, mean_square, own_part,
    whole_gradients,
)

# (MiB, the number of buckets of Net()): a bucket for each parameter, a few buckets, one bucket
CAPS = [(1e-9, 17), (3e-3, 4), (25, 1)]


def whole_batch(net, x):
    return gradients_alone(net, lambda net: mean_square(net, x))


@contextmanager
def reductions(note=lambda tensor: None):
    """Yield a list of the tensors that ddp.py all-reduces; call note() before each all-reduce."""
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
        layouts = [ShardedLayout(tensors, rank, shards) for rank in range(shards)]
        layout = layouts[0]
        flat = layout.pack(tensors)
        assert len(flat) - sum(t.numel() for t in tensors) <= 63 * len(shapes) + 64 * (shards - 1)
        assert flat.count_nonzero() == sum(tensor.count_nonzero() for tensor in tensors)
        assert layout.shard_size % 64 == 0
        for view, tensor in zip(layout.views(flat), tensors, strict=True):
            assert view.storage_offset() % 64 == 0 and torch.equal(view, tensor)
        pieces = []
        for layout in layouts:
            pieces.append(layout.pieces(layout.shard(flat)))
            for tensor, offset, piece in zip(tensors, layout.offsets, pieces[-1], strict=True):
                assert piece.flatten().equal(tensor.flatten()[offset : offset + len(piece)])
                assert piece.shape[1:] == (1,) * (tensor.dim() - 1)
                assert piece.storage_offset() % 64 == 0 or not len(piece)
        for tensor, parts in zip(tensors, zip(*pieces, strict=True), strict=True):
            assert torch.equal(torch.cat(parts).flatten(), tensor.flatten())


# ---- the gradient of the whole batch -------------------------------------------------------------


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("cap, few", CAPS)
def test_gradients_are_those_of_one_process_on_the_whole_batch(cap, few):
    """They are views of buckets, which are sent whole; all begin on 128 bytes, also in 16 bits."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 0.05)):
        net, x = make_net(dtype), make_data(4 * dist.get_world_size(), dtype=dtype)
        expected = whole_batch(net, x)
        model = DistributedDataParallel(net, bucket_cap_mb=cap, gradient_as_bucket_view=True)
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


@pytest.mark.parametrize("wrap", [DistributedDataParallel, FullyShardedDataParallel])
@on_ranks(3)
def test_ranks_with_unlike_numbers_of_targets_sum_losses_over_the_number_of_all(wrap):
    """One has no target that counts. A mean of the ranks' means would be another gradient."""
    rank, _ = rank_and_size()
    torch.manual_seed(shifted(0))
    net, x = nn.Linear(5, 4).double(), torch.randn(12, 5, dtype=torch.float64)
    target = torch.tensor([0, 1, 2, 3, 3, -100, -100, -100, -100, -100, -100, -100])
    right = gradients_alone(net, lambda net: nn.functional.cross_entropy(net(x), target))
    means = {name: torch.zeros_like(gradient) for name, gradient in right.items()}
    for part, own in zip(x.chunk(3)[:2], target.chunk(3)):
        mean = gradients_alone(net, lambda net: nn.functional.cross_entropy(net(part), own))
        means = {name: means[name] + mean[name] / 2 for name in means}
    assert all((means[name] - right[name]).norm() > 0.1 * right[name].norm() for name in right)

    model, own = wrap(net, gradient_divide_factor=1), target.chunk(3)[rank]
    counted = (own != -100).sum()
    dist.all_reduce(counted)
    total = nn.functional.cross_entropy(model(x.chunk(3)[rank]), own, reduction="sum")
    (total / counted).backward()
    assert_close(whole_gradients(net), right)


WRAPPERS = {
    "ddp": lambda net, group: DistributedDataParallel(net, process_group=group),
    "fsdp": FullyShardedDataParallel,
    "hsdp": lambda net, group: FullyShardedDataParallel(net, group, replicate_group=group),
    "zero-1": lambda net, group: ZeroRedundancyOptimizer(net.parameters(), SGD, group, lr=0.1),
}


@pytest.mark.parametrize("kind", WRAPPERS)
@on_ranks(4)
def test_a_group_of_ranks_that_hold_different_parts_of_a_parameter_is_refused_on_all_ranks(kind):
    """Rank 0's part would overwrite the others'. On the last net only ranks 0 and 1 see it."""
    rank, _ = rank_and_size()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [2], [3])]
    tp_group, dp_group = groups[rank // 2], groups[2 + rank % 2]

    def net_over(group):
        """Return a net that has loaded its parameters, which are new, and have no attributes."""
        net = nn.Sequential(nn.Linear(2, 2), ColumnParallelLinear(3, 4, group=group))
        net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
        return net

    experts = net_over(dp_group)  # each is split over a group, and other ranks have others
    experts[1].spread_over = tp_group
    for wrong, net in (
        (tp_group, experts),
        (None, net_over(None)),
        (None, net_over(tp_group)),
        (tp_group, net_over(tp_group)),
        (None, net_over(tp_group if rank < 2 else groups[2 + rank])),
    ):
        before = [parameter.detach().clone() for parameter in net.parameters()]
        sentence = r" is split over ranks \[0, 1(, 2, 3)?\], which are no replicas: pass"
        if wrong is tp_group:
            sentence = rf" is split over ranks \{dist.get_process_group_ranks(tp_group)}, which"
        if kind == "zero-1":
            if net is experts:
                continue  # it has parameters alone, and modules know what is split
            sentence = "the parameters' values differ between ranks: pass the process_group"
        with pytest.raises(ValueError, match=sentence):
            WRAPPERS[kind](net, wrong)
        assert all(map(torch.equal, before, net.parameters()))
    if kind != "hsdp":
        WRAPPERS[kind](net_over(tp_group), dp_group)


@on_ranks(4)
def test_a_fault_of_one_rank_is_raised_on_all_ranks_of_a_table():
    rank, _ = rank_and_size()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    axes = groups[rank // 2], groups[2 + rank % 2]  # this rank's row and its column
    for guilty in range(4):
        with pytest.raises(ValueError, match=f"^by rank {guilty}$"):
            ddp.raise_on_all_ranks(f"by rank {guilty}" if rank == guilty else "", axes)


@on_ranks(2)
def test_gradients_that_a_script_keeps_do_not_change_and_those_that_it_sets_are_filled():
    """PyTorch's wrapper does the same."""
    for wrap in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
        model = wrap(nn.Linear(1, 1, bias=False))
        weight = model.module.weight
        model(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()
        kept = weight.grad
        model.zero_grad()
        weight.grad = own = torch.zeros(1, 1)
        model(torch.full((1, 1), 7.0)).sum().backward()
        assert kept.item() == 1.5 and weight.grad is own and own.item() == 7


@on_ranks(2)
def test_a_parameter_that_is_not_dense_in_memory_gets_its_gradient():
    factor = 1 + dist.get_rank()
    for as_views in (False, True):
        net = nn.Module()
        net.weight = nn.Parameter(torch.ones(64, 8)[:, ::2])
        net.bias = nn.Parameter(torch.ones(64))
        net.forward = lambda: factor * ((net.weight * torch.arange(4)).sum() + 5 * net.bias.sum())
        model = DistributedDataParallel(net, gradient_as_bucket_view=as_views)
        model().backward()
        assert torch.equal(net.weight.grad, 1.5 * torch.arange(4.0).expand(64, 4))
        assert torch.equal(net.bias.grad, torch.full((64,), 7.5))


def test_a_bucket_is_filled_to_its_cap_and_buckets_have_the_order_in_which_they_are_completed():
    parameters = [nn.Parameter(torch.ones(64)) for _ in range(5)]  # 256 bytes each
    for cap, sizes in ((511, [1] * 5), (512, [2, 2, 1]), (1, [1] * 5)):
        buckets = ddp.fill_buckets(parameters, cap, kind=lambda parameter: None)
        assert list(map(len, buckets)) == sizes
    a, b, c, *_ = parameters
    assert ddp.fill_buckets([a, b, c], 512, kind=lambda p: p is b) == [[b], [a, c]]


@on_ranks(2)
def test_a_wrapper_is_a_module_with_the_state_of_pytorchs():
    make = lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model, theirs = DistributedDataParallel(make()), nn.parallel.DistributedDataParallel(make())
    model.load_state_dict(theirs.state_dict())
    assert_close(model.state_dict(), theirs.state_dict())
    sharded = FullyShardedDataParallel(make())
    for wrapper in (model, sharded):
        for name, value in vars(nn.Module()).items():
            assert type(vars(wrapper)[name]) is type(value), name
        assert [*wrapper.buffers()] == [*wrapper.module.buffers()]
        wrapper.cpu().register_buffer("own", torch.zeros(1))


# ---- over several backward passes ----------------------------------------------------------------


def under_no_sync(model, parts):
    with count_bytes() as traffic:
        with model.no_sync():
            with model.no_sync():
                pass  # leaving it does not end the outer no_sync()
            (mean_square(model, parts[0]) / 3).backward()
        model.require_backward_grad_sync = False  # as nanoGPT does
        (mean_square(model, parts[1]) / 3).backward()
        model.require_backward_grad_sync = True
    assert traffic.bytes("all_reduce") == 0
    (mean_square(model, parts[-1]) / 3).backward()


def two_forwards(model, parts):
    """Run all forwards, an evaluation, and then all backwards."""
    losses = [mean_square(model, part) / 3 for part in parts]
    with torch.no_grad():
        model(parts[0])
    for loss in losses[::-1]:
        loss.backward()


def recomputed(model, parts):
    """Recompute the whole wrapper."""
    x = torch.cat(parts).requires_grad_()
    checkpoint(model, x, use_reentrant=False).square().mean().backward()


def outside_of_backward(model, parts):
    """Start the reduction while some gradients are still to come, as deferred weight gradients."""
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
    model.sync_without_batch()  # reduces zeros, because there are no gradients
    under_no_sync(model, parts)
    with count_bytes() as traffic:
        model.finish_grad_sync()
    assert not traffic.sent  # all buckets were sent before
    model.wait_in_backward = True


PASSES = [under_no_sync, two_forwards, outside_of_backward, waited_for_by_the_caller, recomputed]


@on_ranks(2)
def test_a_first_gradient_from_a_reentrant_checkpoint_is_refused_and_a_later_one_is_summed():
    """The inner backward ends before the gradients of the layers below it have come."""
    layers = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(3)])
    net = nn.Module()
    net.layers = layers
    net.forward = lambda x: layers[2](checkpoint(layers[1], layers[0](x), use_reentrant=True))
    for parameter in layers.parameters():
        parameter.data.fill_(1)
    x = torch.full((1, 1), dist.get_rank() + 1.0)
    model = DistributedDataParallel(net)
    model(x).sum().backward()
    assert all(parameter.grad.item() == 1.5 for parameter in layers.parameters())
    layers[2].requires_grad_(False)
    model = DistributedDataParallel(net)
    with pytest.raises(RuntimeError, match="from a reentrant checkpoint: .*use_reentrant=False"):
        model(x).sum().backward()
    model.finish_grad_sync()  # ends the round, as after any backward that failed


class Failing:
    """A kind of sum that finds no memory at first."""

    def __init__(self):
        self.begun = []

    def start(self, flat, group):
        self.begun.append(flat)
        if len(self.begun) == 2:
            raise MemoryError

    def wait(self, started):
        pass


@on_ranks(1)
def test_a_sum_that_found_no_memory_to_begin_is_begun_by_finish_grad_sync():
    """Otherwise this rank's next sum would meet the one that its peers have begun."""
    sums = Failing()
    model = DistributedDataParallel(make_net(), bucket_cap_mb=1e-9, gradient_sum=sums)
    with pytest.raises(MemoryError):
        mean_square(model, make_data(4)).backward()
    model.finish_grad_sync()
    first, failed, again, *others = sums.begun
    assert failed is again and len(others) == len(model.buckets) - 2


@on_ranks(soak(1), soak(2), 3)
@pytest.mark.parametrize("cap, as_views", [(1e-9, True), (3e-3, False), (25, True), (25, False)])
def test_gradients_of_several_passes_are_those_of_the_whole_batch(cap, as_views):
    """Each way runs twice: with gradients that are None at first, and with zeros."""
    net = make_net()
    model = DistributedDataParallel(net, bucket_cap_mb=cap, gradient_as_bucket_view=as_views)
    for seed, passes in enumerate(2 * PASSES):
        x = make_data(6 * dist.get_world_size(), seed)
        net.zero_grad(set_to_none=seed < len(PASSES))
        passes(model, own_part(x).chunk(3))
        assert_close(whole_gradients(net), whole_batch(net, x), 1e-11)


# ---- another kind of sum -------------------------------------------------------------------------


class Fp16Sum:
    """The example beside "another kind of sum". It notes the buckets that start and that end."""

    def __init__(self):
        self.events = []

    def start(self, flat, group):
        self.events.append(("start", flat.data_ptr(), group))
        compressed = flat.half()
        self.compressed = weakref.ref(compressed)
        return flat, compressed, ddp.all_reduce(compressed, group=group, async_op=True)

    def wait(self, started):
        flat, compressed, work = started
        work.wait()
        flat.copy_(compressed)
        self.events.append(("wait", flat.data_ptr(), None))


class BlockingSum:
    """A sum by gloo, of which nothing is left to wait for."""

    def start(self, flat, group):
        dist.all_reduce(flat, group=group)

    def wait(self, started):
        assert started is None


@pytest.mark.parametrize("as_views", [False, True])
@on_ranks(1, 2, 3)
def test_another_kind_of_sum_is_one_object_and_the_only_one_that_sums(as_views):
    _, P = rank_and_size()
    for kind, tolerance in ((BlockingSum(), 1e-12), (Fp16Sum(), 2e-3)):
        net = make_net()
        how = {"bucket_cap_mb": 3e-3, "gradient_as_bucket_view": as_views, "gradient_sum": kind}
        model = DistributedDataParallel(net, **how)
        for seed in range(2):
            x = make_data(4 * P, seed)
            net.zero_grad()
            with least_bytes(), count_bytes() as traffic:
                with model.no_sync():
                    (mean_square(model, own_part(x).chunk(2)[0]) / 2).backward()
                (mean_square(model, own_part(x).chunk(2)[1]) / 2).backward()
            assert_close(whole_gradients(net), whole_batch(net, x), tolerance)
            gradients = sum(-(-p.numel() // 64) * 64 for p in net.parameters() if p.requires_grad)
            sent = 2 * (P - 1) * 2 * gradients if isinstance(kind, Fp16Sum) else 0
            assert sum(gather_objects(traffic.bytes("all_reduce"))) == sent


@on_ranks(2)
def test_a_sum_gets_each_bucket_with_its_group_in_one_order_and_keeps_its_tensor():
    """It starts while backward still runs, and is waited for when all have started.

    What it has returned from start() is freed when it ends.
    """
    rank, _ = rank_and_size()
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    net = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(3)]).double()
    kind = Fp16Sum()
    expert = net[1].weight
    how = {"bucket_cap_mb": 1e-9, "gradient_divide_factor": 1, "groups": {expert: alone}}
    model = DistributedDataParallel(net, gradient_sum=kind, **how)
    net[0].weight.register_hook(lambda gradient: kind.events.append(("backward", 0, None)))
    for _ in range(2):
        for layer in net:
            layer.weight.data.fill_(1)
        net.zero_grad()
        model(torch.full((1, 1), rank + 1.0, dtype=torch.float64)).backward()
        assert [layer.weight.grad.item() for layer in net] == [3, rank + 1, 3]
        assert kind.compressed() is None
    half = len(kind.events) // 2
    assert kind.events[:half] == kind.events[half:]
    starts = [event for event in kind.events[:half] if event[0] == "start"]
    waits = [("wait", pointer, None) for _, pointer, _ in starts]
    assert kind.events[:half] == [*starts[:2], ("backward", 0, None), starts[2], *waits]
    assert [group for *_, group in starts] == [None, alone, None]


@on_ranks(2)
def test_what_a_sum_needs_until_it_ends_is_freed_with_its_round():
    held = []

    class Watched(Fp16Sum):
        def start(self, flat, group):
            started = super().start(flat, group)
            held.append(weakref.ref(started[1]))
            return started

    model = DistributedDataParallel(make_net(), bucket_cap_mb=3e-3, gradient_sum=Watched())
    mean_square(model, make_data(4)).backward()
    assert len(held) > 1 and not any(compressed() is not None for compressed in held)


# ---- parameters without gradient, and other orders -----------------------------------------------


@on_ranks(1, 2, 3, soak(4))
@pytest.mark.parametrize("cap", [cap for cap, _ in CAPS])
def test_ranks_may_use_different_parameters_in_different_orders(cap):
    """The blocks and their order change with the rank, the microbatch and the step.

    None means that the loss reaches no parameter; then the rank starts and finishes the round.
    """
    rank, world_size = rank_and_size()
    net = make_net()
    model = DistributedDataParallel(net, bucket_cap_mb=cap)
    orders = [(0, 1, 2), (2, 0), None, (), (2, 1, 0)]
    for step in range(6):
        x = make_data(4 * world_size, seed=step)
        used = [orders[(i + step) % 5] for i in range(2 * world_size)]
        every = [(part, order) for part, order in zip(x.split(2), used) if order is not None]
        expected = gradients_alone(net, lambda net: sum(
            net(part, order).square().sum() / world_size for part, order in every
        ) + 0 * net.scale)
        net.zero_grad(set_to_none=step % 2 == 1)
        for i, part in enumerate(own_part(x).split(2)):
            order, is_last = used[2 * rank + i], i == 1 and step < 5
            with nullcontext() if is_last else model.no_sync():
                loss = model(part, order or ()).square().sum()
                with torch.no_grad():
                    model(part)  # an evaluation does not disturb the backward that follows
                if order is not None:
                    loss.backward()
                elif is_last:
                    model.start_grad_sync()
                    model.finish_grad_sync()
        if step == 5:  # the last step is the simplest one: it averages whole gradients at the end
            average_gradients(net)
        assert_close(whole_gradients(net), expected, 1e-11)


@on_ranks(2)
@pytest.mark.parametrize("wait_in_backward", [True, False])
def test_a_bucket_is_reduced_while_backward_still_runs(wait_in_backward):
    """Nothing is waited for before the last gradient."""
    layers = nn.Sequential(*[nn.Linear(7, 7, bias=False) for _ in range(4)]).double()
    how = {"bucket_cap_mb": 1e-9, "wait_in_backward": wait_in_backward}
    model, events = DistributedDataParallel(layers, **how), []
    for i, layer in enumerate(layers):
        layer.weight.register_hook(lambda grad, i=i: events.append(f"gradient {i}"))

    def listen(event, operation, *_):
        if event in ("begin", "wait"):
            events.append({"begin": "reduce"}.get(event, event))

    loss = mean_square(model, own_part(make_data(4)))
    with observe(listen):
        loss.backward()
        expected = [event for i in (3, 2, 1, 0) for event in (f"gradient {i}", "reduce")]
        assert events == expected + 4 * wait_in_backward * ["wait"]
        if not wait_in_backward:
            model.finish_grad_sync()
    assert events == expected + 4 * ["wait"]


@on_ranks(2)
def test_a_gradient_that_is_a_view_of_its_bucket_is_not_copied_if_nothing_divides_it():
    net = nn.Linear(7, 7)
    how = {"gradient_as_bucket_view": True, "gradient_divide_factor": 1}
    model = DistributedDataParallel(net, **how)
    model(torch.ones(1, 7)).sum().backward()
    net.zero_grad(set_to_none=False)
    with patch("torch.div", side_effect=AssertionError):
        model(torch.ones(1, 7)).sum().backward()
    assert net.weight.grad.eq(2).all()


# ---- ranks with different numbers of batches -----------------------------------------------------


@on_ranks(2)
def test_a_round_that_the_caller_began_outlasts_backwards_also_after_one_that_ended_its_own():
    net = nn.Linear(1, 1)
    model = DistributedDataParallel(net, gradient_divide_factor=1)
    model(torch.ones(1, 1)).sum().backward()  # ends its own round
    net.zero_grad()
    model.start_grad_sync(awaited={net.weight, net.bias})
    for parameter in (net.weight, net.bias):
        (parameter.sum() * dist.get_rank()).backward()
    model.finish_grad_sync()
    assert [net.weight.grad.item(), net.bias.grad.item()] == [1, 1]  # summed once


@on_ranks(2)
@pytest.mark.parametrize("wait_in_backward", [True, False])
def test_no_pass_begins_while_sums_are_under_way(wait_in_backward):
    """The gradients of another would join them."""
    model = DistributedDataParallel(nn.Linear(1, 1), wait_in_backward=wait_in_backward)
    if wait_in_backward:
        model.start_grad_sync()
    else:
        model(torch.ones(1, 1)).sum().backward()
    for begin in (partial(model, torch.ones(1, 1)), model.sync_without_batch):
        with pytest.raises(RuntimeError, match=r"call finish_grad_sync\(\) first"):
            begin()
    model.finish_grad_sync()
    assert model.module.weight.grad.item() == 1 - wait_in_backward


@on_ranks(2)
def test_a_backward_in_no_sync_while_sums_are_under_way_is_refused():
    """A gradient that is added to a sum under way would be lost."""
    model = DistributedDataParallel(nn.Linear(2, 2), wait_in_backward=False)
    losses = [model(torch.ones(1, 2)).sum() for _ in range(2)]
    losses[0].backward()
    with model.no_sync(), pytest.raises(RuntimeError, match=r"call finish_grad_sync\(\) first"):
        losses[1].backward()
    model.finish_grad_sync()


@on_ranks(2)
def test_a_wrapper_that_is_deleted_is_freed_and_reduces_nothing():
    net = nn.Linear(2, 2)
    model = DistributedDataParallel(net)
    alive = weakref.ref(model)
    del model
    assert alive() is None
    with reductions() as tensors:
        net(torch.ones(1, 2)).sum().backward()
    assert not tensors


@on_ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_rank_without_a_batch_calls_sync_without_batch(set_to_none):
    net = make_net()
    model = DistributedDataParallel(net, bucket_cap_mb=3e-3)
    for step, users in enumerate([{1}, {0, 1}, {0}, set()]):
        net.zero_grad(set_to_none)
        parts = [make_data(3, 10 * step + r) for r in users]
        loss = lambda net: sum(mean_square(net, part) for part in parts) / 2 + 0 * net.scale
        if dist.get_rank() in users:
            mean_square(model, make_data(3, 10 * step + dist.get_rank())).backward()
        else:
            model.sync_without_batch()
        assert_close(whole_gradients(net), gradients_alone(net, loss))


@on_ranks(2)
def test_gradients_that_a_rank_without_a_batch_has_kept_count_as_they_are():
    model = DistributedDataParallel(nn.Linear(3, 2), gradient_divide_factor=1)
    model(torch.ones(1, 3)).sum().backward()
    if dist.get_rank() == 0:
        model(torch.ones(1, 3)).sum().backward()
    else:
        model.sync_without_batch()
    assert model.module.bias.grad.eq(5).all()  # of 2 on each rank, which rank 0 adds 1 to


@on_ranks(2)
def test_a_rank_that_finishes_a_round_which_it_has_not_begun_gets_an_error_and_sends_nothing():
    """Its peer waits for it meanwhile. Nothing is inferred from forwards, or from gradients."""
    model = DistributedDataParallel(nn.Linear(3, 2), gradient_divide_factor=1)
    wrong = r"without a round.* call start_grad_sync\(\) first"
    output = model(torch.ones(1, 3))
    with model.no_sync():
        output.sum().backward(retain_graph=True)
    with reductions() as calls:
        for step in range(2):
            if dist.get_rank() == 0:
                output.sum().backward(retain_graph=True)
            else:
                with pytest.raises(RuntimeError, match=wrong):
                    model.finish_grad_sync()
                model.start_grad_sync()
                model.finish_grad_sync()
            assert len(calls) == step + 1
        with pytest.raises(RuntimeError, match=wrong):
            model.finish_grad_sync()  # backward() has ended the round
    assert len(calls) == 2 and model.module.bias.grad.eq(7).all()  # 2 + 1, and then 3 + 1 + 3
    frozen = DistributedDataParallel(nn.Linear(3, 2).requires_grad_(False))
    frozen.finish_grad_sync()  # has no sums


@on_ranks(2)
def test_a_rank_without_a_batch_runs_a_sharded_pass_whose_loss_counts_zero():
    x = make_data(3)
    sharded = FullyShardedDataParallel(make_net())
    with pytest.raises(RuntimeError, match="no parameter has a gradient: every rank must run each pass"):
        sharded.finish_grad_sync()
    frozen = FullyShardedDataParallel(make_net().requires_grad_(False))
    frozen.finish_grad_sync()  # no pass gives it gradients
    (mean_square(sharded, x) * dist.get_rank()).backward()  # rank 0 has no batch
    loss = lambda net: mean_square(net, x) / 2
    assert_close(whole_gradients(sharded.module), gradients_alone(make_net(), loss))


def _take_unlike_numbers_of_steps(kind, leave):
    """Rank 1 calls leave() after one step, and rank 0 goes on."""
    net = make_net()
    model = DistributedDataParallel(net) if kind == "ddp" else FullyShardedDataParallel(net)
    for _ in range(3):
        mean_square(model, make_data(3)).backward()
        if dist.get_rank() == 1:
            leave()


LEAVE = {"exits": partial(os._exit, 0), "is silent": partial(signal.raise_signal, signal.SIGSTOP)}


@pytest.mark.parametrize("how", ["exits", soak("is silent")])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_rank_that_leaves_its_loop_early_ends_its_peers_with_an_error(kind, how):
    limits = {"timeout": 20, "group_timeout": 3}
    peer, _ = spawn(2, _take_unlike_numbers_of_steps, kind, LEAVE[how], check=False, **limits)
    assert peer.exitcode == 1 and "rank 0 lost rank 1" in peer.error_text, peer.error_text


# ---- dtypes --------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A module with weights of many dtypes; the gradient of each element is the input."""

    def __init__(self):
        super().__init__()
        dtypes = [torch.float32, torch.bfloat16, torch.bfloat16, torch.float64, torch.float16]
        self.weights = nn.ParameterList(torch.zeros(7 + i, dtype=t) for i, t in enumerate(dtypes))
        self.weights[1].grad_dtype = torch.float32

    def forward(self, x):
        return sum((x * weight.double()).sum() for weight in self.weights)


@on_ranks(2)
def test_the_plain_mean_takes_a_missing_gradient_for_zeros_of_the_gradients_own_dtype():
    """The mean of 256 + 1 and 0 needs nine bits."""
    net = Mixed()
    if dist.get_rank() == 0:
        net(torch.tensor(256.0)).backward()
        net(torch.tensor(1.0)).backward()
    average_gradients(net)
    for i, p in enumerate(net.parameters()):
        assert p.grad.dtype == (torch.float32 if i == 1 else p.dtype)
        exact = torch.full_like(p.grad, 128.5)
        torch.testing.assert_close(p.grad, exact, rtol=0.01 if i in (2, 4) else 0, atol=0)


@on_ranks(1, 3)
@pytest.mark.parametrize("cap, per_bucket", [(1e-9, [1] * 5), (25, [1, 1, 1, 2])])
def test_a_bucket_holds_gradients_of_one_dtype_which_may_differ_from_the_weights(cap, per_bucket):
    """Two passes add 256 + 1, which needs nine bits; bfloat16 has eight."""
    net, world_size = Mixed(), dist.get_world_size()
    model = DistributedDataParallel(net, bucket_cap_mb=cap, gradient_divide_factor=1)
    with model.no_sync():
        model(torch.tensor(256.0)).backward()
    with reductions() as calls, least_bytes(), count_bytes() as traffic:
        model(torch.tensor(1.0)).backward()
    assert sum(gather_objects(traffic.bytes())) // world_size == ddp_bytes(net, world_size)
    assert sizes(calls) == [64 * count for count in per_bucket]
    single, half, double = torch.float32, torch.float16, torch.float64
    assert [x.dtype for x in calls] == [half, double, torch.bfloat16, single, single][: len(calls)]
    for i, p in enumerate(net.parameters()):
        assert p.grad.dtype == (single if i == 1 else p.dtype)
        exact = torch.full_like(p.grad, world_size * 257)
        torch.testing.assert_close(p.grad, exact, rtol=0 if i in (0, 1, 3) else 0.01, atol=0)


# ---- clipping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_views", [False, True])
@on_ranks(2)
def test_gradients_and_buffers_that_are_conjugated_when_they_are_read_are_averaged(as_views):
    """The gradient of a weight that is used as weight.conj() is such a one."""
    torch.manual_seed(shifted(0))
    rank, P = rank_and_size()
    net = nn.Module()
    net.weight = nn.Parameter(torch.randn(5, dtype=torch.complex128))
    net.register_buffer("shift", torch.randn(5, dtype=torch.complex128).conj())
    net.forward = lambda x: (x * (net.weight.conj() + net.shift)).real.sum()
    inputs = torch.randn(P, 5, dtype=torch.complex128)
    expected = torch.autograd.grad(sum(map(net, inputs)) / P, net.weight)[0]
    model = DistributedDataParallel(net, gradient_as_bucket_view=as_views)
    model(inputs[rank]).backward()
    torch.testing.assert_close(net.weight.grad, expected)
    net.weight.grad = None
    net(inputs[rank]).backward()
    net.weight.grad = net.weight.grad.conj().resolve_conj().conj()
    average_gradients(net)
    torch.testing.assert_close(net.weight.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("sizes", [[1], [500, 60], [9_000], [33_000, 0], [10**6, 900, 70_001]])
def test_a_norm_of_millions_of_elements_is_as_exact_as_that_of_a_few(sizes, dtype):
    """In rows, n squares are added in fp32, each rounding is half an eps, and the root halves their
    sum. Its own rounding, and those of complex magnitudes, are less than 4. All else is in fp64.
    """
    generator = torch.Generator().manual_seed(shifted(0))
    tensors = [torch.randn(n, dtype=dtype, generator=generator) for n in sizes]
    tensors[-1] = tensors[-1].expand(2, -1).t()  # a tensor that is not contiguous
    wide = torch.promote_types(dtype, torch.float64)
    exact = sum(tensor.to(wide).abs().square().sum() for tensor in tensors).sqrt().item()
    squares = ddp.ROW * (1 + dtype.is_complex)
    in_rows = (squares / 2 + 4) * torch.finfo(torch.float32).eps / 2
    bound = 1e-12 if max(sizes) < 256 * ddp.ROW else in_rows
    assert ddp.get_total_norm(tensors).item() == pytest.approx(exact, rel=bound, abs=0)


@on_ranks(1, 3, 4)
def test_the_norm_of_distributed_parts_and_clipping_agree_with_torch():
    """The parts are spread over all ranks; four ranks sum over rows, and then over columns."""
    (rank, world_size), groups = rank_and_size(), [None]
    if world_size == 4:
        rows = [dist.new_group(members) for members in ([0, 1], [2, 3])]
        columns = [dist.new_group(members) for members in ([0, 2], [1, 3])]
        groups = rows[rank // 2], columns[rank % 2]
    generator = torch.Generator().manual_seed(shifted(0))
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.complex128)
    wholes = [torch.randn(9, dtype=dtype, generator=generator) for dtype in 2 * dtypes]
    parts = [whole.tensor_split(world_size)[rank].clone() for whole in wholes]
    parts.append(torch.zeros(0))
    like = [whole.to(torch.promote_types(whole.dtype, torch.float64)) for whole in wholes]
    expected = nn.utils.get_total_norm(like).item()
    norm = ddp.get_total_norm(parts, groups)
    assert norm.shape == () and norm.item() == pytest.approx(expected, rel=1e-6)
    nested = [*parts[4:], ddp.get_total_norm(parts[:4])]
    assert ddp.get_total_norm(nested, groups).item() == pytest.approx(norm.item())
    for max_norm in (0.3 * expected, 2 * expected):
        factor = min(1, max_norm / (norm.item() + 1e-6))
        clipped = [part.clone() for part in parts]
        with waits() as found:
            ddp.clip_grads_with_norm_(clipped, max_norm, norm)
        assert not found
        for actual, part in zip(clipped, parts):
            rtol = {2: 2**-8, 4: 1e-6}.get(part.itemsize, 1e-9)
            torch.testing.assert_close(actual, part * factor, rtol=rtol, atol=0)


# ---- cost ----------------------------------------------------------------------------------------


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("cap", [1e-9, 25])
def test_a_step_sends_each_gradient_once_around_the_ring(cap):
    """P = 1 to 4 divide 48 x 48 elements into parts of a multiple of 128 bytes."""
    net = nn.Sequential(*[nn.Linear(48, 48, bias=False) for _ in range(3)])
    net[1].requires_grad_(False)
    model, P = DistributedDataParallel(net, bucket_cap_mb=cap), dist.get_world_size()
    with least_bytes(), reductions() as calls, count_bytes() as traffic:
        model(torch.ones(2, 48)).sum().backward()
    assert traffic.bytes() == traffic.bytes("all_reduce") == ddp_bytes(net, P)
    assert traffic.bytes() == 2 * (P - 1) * 2 * 48 * 48 * 4 // P
    assert len(traffic.sent) == 2 * (P - 1) * len(calls)


@on_ranks(4)
def test_the_demonstration_counts_what_it_claims():
    printed = demonstration(ddp)
    plain, error, wrapper, other_error = printed.splitlines()
    nbytes = 2 * 3 * 4 * 480 * 480 * 8 // 4
    assert plain == f"backward_in_buckets(): claimed {nbytes} bytes, counted {nbytes}"
    assert wrapper == f"the wrapper, 2 buckets: claimed {nbytes} bytes, counted {nbytes}"
    assert max(float(error.split()[-1]), float(other_error.split()[-1])) < 1e-14


# ---- buffers -------------------------------------------------------------------------------------


KINDS = "reduce reduce no_sync no_sync reduce eval eval reduce no_grad no_grad reduce reduce"


def normalise(wrap, broadcast_buffers):
    """Return the running mean after each pass."""
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
def test_buffers_are_broadcast_in_the_same_passes_as_pytorchs(broadcast_buffers):
    theirs = run(3, normalise, nn.parallel.DistributedDataParallel, broadcast_buffers)
    assert run(3, normalise, DistributedDataParallel, broadcast_buffers) == theirs
    alike = {step for step, means in enumerate(zip(*theirs)) if len(set(means)) == 1}
    assert alike == ({5, 6} if broadcast_buffers else set())


@on_ranks(2)
def test_buffers_are_broadcast_after_a_reduction_whose_forward_was_under_no_sync():
    model, x = DistributedDataParallel(nn.BatchNorm1d(1)), torch.full((4, 1), 1.0 + dist.get_rank())
    with model.no_sync():
        loss = model(x).sum()
    loss.backward()
    with torch.no_grad():
        model.eval()(x)  # this forward should broadcast
    assert len(set(gather_objects(model.module.running_mean.item()))) == 1


class Cached(nn.Module):
    """A linear layer with a table that grows with the longest input, or is made when needed."""

    def __init__(self, lazy, ignore):
        super().__init__()
        torch.manual_seed(shifted(0))
        self.linear = nn.Linear(3, 3).double()
        self.register_buffer("scale", torch.full((3,), 2.0).double())
        if not lazy:
            self.register_buffer("table", self.make_table(2), persistent=False)
        if ignore:
            self._ddp_params_and_buffers_to_ignore = ["table"]

    def make_table(self, rows):
        return torch.arange(3.0 * rows).double().view(rows, 3).cos()

    def forward(self, x):
        if not hasattr(self, "table") or len(self.table) < len(x):
            self.register_buffer("table", self.make_table(len(x)), persistent=False)
        return self.linear(x + self.table[: len(x)]) * self.scale


@on_ranks(2)
@pytest.mark.parametrize("longest", [0, 1])
def test_buffers_that_one_rank_grows_are_refused_on_all_unless_they_are_ignored_or_new(longest):
    """The oracle is the mean gradient of each rank's own input. The table grows in step 1."""
    for lazy, ignore in ((False, False), (False, True), (True, False)):
        net = Cached(lazy, ignore)
        model = DistributedDataParallel(net)
        for step in range(3):
            rows = [5 if step and r == longest else 2 for r in range(2)]
            parts = [make_data(n, seed=r)[:, :3] for r, n in enumerate(rows)]
            loss = lambda net: sum(map(partial(mean_square, net), parts)) / 2
            expected = gradients_alone(Cached(False, False), loss)
            if step == 2 and not lazy and not ignore:
                wrong = r"rank 1 of the group has 'table' \(\d, 3\).*, rank 0 has 'table' \(\d, 3\)"
                for _ in range(2):  # the first error changes nothing
                    with pytest.raises(ValueError, match=wrong):
                        model(parts[dist.get_rank()])
                continue
            model.zero_grad()
            mean_square(model, parts[dist.get_rank()]).backward()
            assert_close(whole_gradients(net), expected)


def operations_of(call):
    """Return {operation: (messages, bytes)} that this rank sends in call()."""
    with count_bytes() as traffic:
        call()
    names = {name for name, *_ in traffic.sent}
    count = lambda name: sum(message[0] == name for message in traffic.sent)
    return {name: (count(name), traffic.bytes(name)) for name in names}


@on_ranks(2)
def test_buffers_travel_together_after_a_byte_and_are_compared_only_after_a_change():
    rank = dist.get_rank()
    net = nn.Sequential(*(nn.BatchNorm1d(5) for _ in range(3)))  # 6 buffers in fp32, 3 in int64
    model = DistributedDataParallel(net)
    x = torch.randn(4, 5) + rank
    together = {"broadcast": (2, 4 * 6 * 64 + 8 * 3 * 64)} if rank == 0 else {}
    unchanged = {"all_gather_single": (1, 1)} | together
    for _ in range(2):
        assert operations_of(lambda: model(x)) == unchanged
    grown = DistributedDataParallel(Cached(lazy=False, ignore=False))
    x = make_data(5)[:, :3]  # longer than the table, on both ranks
    messages = [operations_of(lambda: grown(x))["all_gather_single"][0] for _ in range(3)]
    assert messages == [1, 3, 1]


@on_ranks(2)
def test_a_broadcast_between_a_forward_and_its_backward_leaves_saved_buffers_as_they_are():
    model, x = DistributedDataParallel(nn.BatchNorm1d(7).double()).eval(), make_data(4)
    loss = lambda net: net(x).sum() + net(2 * x).square().sum()
    expected = gradients_alone(model.module, loss)
    loss(model).backward()
    assert_close(whole_gradients(model.module), expected)


@on_ranks(2)
def test_what_a_module_lists_to_be_ignored_stays_each_ranks_own_as_with_pytorchs():
    rank = dist.get_rank()
    for wrap in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
        net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1), nn.Linear(1, 1))
        nn.init.constant_(net[0].weight, 1 + rank)
        net._ddp_params_and_buffers_to_ignore = ["0.weight", "1.running_mean"]
        model = wrap(net)
        for _ in range(2):
            model(torch.tensor([[1.0], [3.0]]) + rank).square().sum().backward()
        own = net[0].weight, net[0].weight.grad, net[1].running_mean
        common = net[2].weight, net[2].weight.grad
        for tensors, different in ((own, 2), (common, 1)):
            for values in zip(*gather_objects([tensor.item() for tensor in tensors])):
                assert len(set(values)) == different


@on_ranks(2)
def test_the_claimed_bytes_leave_out_what_is_ignored():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net._ddp_params_and_buffers_to_ignore = ["0.weight"]
    model = DistributedDataParallel(net)
    with least_bytes(), count_bytes() as traffic:
        model(torch.ones(1, 8)).sum().backward()
    assert traffic.bytes() == ddp_bytes(net, 2) == 3 * 64 * 4


@on_ranks(2)
def test_sharded_modules_whose_buffers_differ_are_an_error_on_every_rank():
    net = nn.BatchNorm1d(3)
    net.register_buffer("table", torch.zeros(2 + dist.get_rank()))
    with pytest.raises(ValueError, match=r"rank 1 of the group has 'table' \(3,\)"):
        FullyShardedDataParallel(net)


# ---- errors instead of silently wrong results ----------------------------------------------------


def frozen_layer():
    return nn.Linear(2, 4).requires_grad_(False)


def transposed_in_memory():
    """A layer with its weight in the order of memory that channels_last gives a convolution's."""
    layer = nn.Linear(2, 4)
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return layer


UNLIKE = {
    "'1.weight' (5, 2) torch.float32 True cpu (2, 1)": lambda: nn.Linear(2, 5),
    "'1.weight' (4, 2) torch.float64 True cpu (2, 1)": lambda: nn.Linear(2, 4).double(),
    "'1.weight' (4, 2) torch.float32 False cpu (2, 1)": frozen_layer,
    "'1.weight' (4, 2) torch.float32 True cpu (1, 4)": transposed_in_memory,
    "nothing": lambda: nn.Linear(2, 4, bias=False),
}


@on_ranks(3)
def test_models_that_differ_are_an_error_on_every_rank():
    for here, make in UNLIKE.items():
        last = make() if dist.get_rank() == 2 else nn.Linear(2, 4)
        there = "'1.weight' (4, 2) torch.float32 True cpu (2, 1)"
        if here == "nothing":
            there = "'1.bias' (4,) torch.float32 True cpu (1,)"
        wrong = f"rank 2 of the group has {here}, rank 0 has {there}"
        with pytest.raises(ValueError, match=f"^{re.escape(wrong)}$"):
            DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), last))


class Twice(nn.Linear):
    """A layer that gives each parameter two gradients in one backward."""

    def forward(self, x):
        again = super().forward
        return checkpoint(again, checkpoint(again, x, use_reentrant=True), use_reentrant=True)


@on_ranks(2)
def test_unsupported_uses_of_the_wrapper_are_rejected():
    x, pieces, net = own_part(make_data(4)), nn.Sequential(nn.Linear(4, 4)), make_net()
    FullyShardedDataParallel(pieces[0])
    model, other = DistributedDataParallel(net), make_net()
    layers = nn.Linear(7, 7), Twice(7, 7), nn.Linear(7, 7)
    twice = DistributedDataParallel(nn.Sequential(*layers).double())
    models = [DistributedDataParallel(other, gradient_as_bucket_view=True) for _ in range(2)]
    late = DistributedDataParallel(make_net())
    late.wait_in_backward = False
    apart = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    sparse = DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
    frozen, thawed, converted = (DistributedDataParallel(make_net()) for _ in range(3))
    frozen.module.head.bias.requires_grad_(False)
    thawed.module.blocks[1].up.weight.requires_grad_(True)
    for refused, message in (
        (lambda: DistributedDataParallel(pieces), "FullyShardedDataParallel has cut these"),
        (lambda: copy.deepcopy(model), "copy its module, and wrap the copy"),
        (lambda: mean_square(model, x).backward(create_graph=True), "create_graph=True are not"),
        (lambda: twice(x).sum().backward(), r"a second gradient of \(7.*: two in one backward"),
        (lambda: [mean_square(late, x).backward() for _ in "12"], r"call finish_grad_sync\(\) first"),
        (lambda: DistributedDataParallel(apart), r"on \['cpu', 'meta'\]: put them on one device"),
        (lambda: FullyShardedDataParallel(apart), r"on \['cpu', 'meta'\]: put them on one device"),
        (lambda: mean_square(frozen, x).backward(), "'head.bias' was frozen, thawed"),
        (lambda: mean_square(thawed, x).backward(), "'blocks.1.up.weight' was frozen"),
        (lambda: mean_square(converted.float(), x.float()).backward(), "' was frozen.* cast"),
        (lambda: mean_square(models[0], x).backward(), "wrapper took .grad away from its"),
        (lambda: sparse(torch.tensor([1, 2])).sum().backward(), "sparse gradients and"),
    ):
        with pytest.raises((RuntimeError, ValueError, NotImplementedError), match=message):
            refused()
