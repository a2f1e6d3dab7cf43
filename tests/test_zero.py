"""ZeRO's stages against one process on the whole batch, and what they send and hold, counted."""

import copy
import gc
import io
import re
import weakref
from contextlib import nullcontext, redirect_stdout
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
from collectives import (
    all_reduce_bytes, count_bytes, gather_objects, rank_and_size, reduce_scatter_bytes,
)
from ddp import DistributedDataParallel, FlatLayout
from zero import (
    FullyShardedDataParallel, ZeroRedundancyOptimizer, zero_bytes, zero_memory, zero_rounds,
)

from gpu_counts import waits
from ledger import memory_ledger
from nccl_replay import record, replay
from ranks import least_bytes, on_ranks, run

STAGES = (1, 2, 3)
ALL = (0, "optimizer", *STAGES)  # 0 is DDP; "optimizer" is DDP with the optimizer of shards
CAP = 2e-3  # MiB: several buckets


class _Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class _Net(nn.Module):
    """A tied weight, a frozen one, a scalar, odd sizes and blocks."""

    def __init__(self, width=7, blocks=3):
        super().__init__()
        self.embed = nn.Linear(width, width, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList(_Block(width) for _ in range(blocks))
        self.blocks[1].up.weight.requires_grad_(False)
        self.head = nn.Linear(width, width)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.full((width,), 0.1))

    def forward(self, x):
        x = self.scale * self.embed(x) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Stack(nn.Module):
    """Blocks only, which P = 1, 2, 3, 4 and 6 cut without padding: 96 x 96 = 64 x 12 x 12."""

    def __init__(self, blocks=4):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Linear(96, 96, bias=False) for _ in range(blocks)])

    def forward(self, x):
        return self.blocks(x)


def _net(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return _Net().to(dtype)


def _data(examples, seed=1, dtype=torch.float64):
    return torch.randn(examples, 7, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _groups(parameters):
    """Two parameter groups, as those of a GPT: matrices decay, or their pieces."""
    matrices, others = [], []
    for p in parameters:
        (matrices if len(getattr(p, "whole_shape", p.shape)) == 2 else others).append(p)
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 0.02},
    ]


def _shard(net, stage, optimizer_class=torch.optim.AdamW, defaults=None, group=None, **how):
    """(model, optimizer) that train `net`, one of ALL."""
    defaults = defaults or {"lr": 0.01}
    if stage in STAGES:
        model = FullyShardedDataParallel(net, group, units=net.blocks, stage=stage, **how)
    else:
        model = DistributedDataParallel(net, group, bucket_cap_mb=CAP, **how)
    if stage == "optimizer":
        groups = _groups(net.parameters())
        return model, ZeroRedundancyOptimizer(groups, optimizer_class, group, **defaults)
    optimizer = optimizer_class(_groups(net.parameters()), **defaults)
    if stage in (1, 2):
        optimizer.register_step_post_hook(lambda *_: model.reshard())
    return model, optimizer


def _own_part(x, group=None):
    rank, world_size = rank_and_size(group)
    return x.chunk(world_size)[rank]


def _train(model, optimizer, batches):
    losses = []
    for x in batches:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def _train_alone(batches, optimizer_class=torch.optim.AdamW, defaults=None, dtype=torch.float64):
    """The weights of one process, and its losses."""
    alone = _net(dtype)
    optimizer = optimizer_class(_groups(alone.parameters()), **defaults or {"lr": 0.01})
    losses = _train(alone, optimizer, batches)
    return alone.state_dict(), losses


def _whole(model):
    """The weights, full, by the plain module's names."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: value.clone() for name, value in model.state_dict().items()}


def _gradients(model):
    """The gradients of a sharded module, put together by torch's own all_reduce."""
    whole = {}
    for name, piece in model.module.named_parameters():
        if piece.requires_grad:
            flat = torch.zeros(piece.whole_shape.numel(), dtype=piece.grad.dtype)
            flat[piece.first : piece.first + piece.numel()] = piece.grad
            dist.all_reduce(flat)
            whole[name] = flat.view(piece.whole_shape)
    return whole


def _gradients_alone(net, loss):
    """Those of one process, with zeros for parameters without."""
    loss(net).backward()
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()}


def _close(actual, expected, tolerance=1e-12):
    assert len(expected) > 0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def _equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


# ---- training ------------------------------------------------------------------------------------


def _train_all(dtype, tolerance):
    """Ten steps by one process and by all; their weights, alike on all ranks."""
    world_size = dist.get_world_size()
    batches = [_data(2 * world_size, seed, dtype) for seed in range(10)]
    expected, losses_alone = _train_alone(batches, dtype=dtype)
    weights = []
    for stage in ALL:
        net = _net(dtype, seed=dist.get_rank())  # all start as the first rank's
        model, optimizer = _shard(net, stage)
        losses = _train(model, optimizer, [_own_part(x) for x in batches])
        dist.all_reduce(losses)
        _close(losses / world_size, losses_alone, tolerance)
        weights.append(_whole(model))
        _close(weights[-1], expected, tolerance)
    assert all(_equal(*pair) for pair in zip(weights, gather_objects(weights)[0]))
    return weights


@on_ranks(1, 2, 3, 4)
def test_ten_steps_of_every_stage_are_those_of_one_process():
    _train_all(torch.float64, 1e-10)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 0.2)])
def test_stages_that_sum_in_the_same_order_have_the_same_bits(dtype, tolerance):
    ddp, optimizer, first, second, third = _train_all(dtype, tolerance)
    assert _equal(ddp, optimizer) and _equal(first, second) and _equal(first, third)
    if dist.get_world_size() <= 2:  # a + b is b + a
        assert _equal(ddp, first)


OPTIMIZERS = [
    ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("AdamW", {"lr": 0.01, "foreach": True}),
    ("AdamW", {"lr": 0.01, "fused": True}),
    ("Adagrad", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5}),
    ("Adadelta", {"lr": 0.5}),
    ("NAdam", {"lr": 0.01}),
    ("RAdam", {"lr": 0.01}),
    ("Adamax", {"lr": 0.01}),
    ("ASGD", {"lr": 0.01}),
]


@on_ranks(2)
def test_any_optimizer_that_treats_elements_alone_runs_on_shards():
    batches = [_data(6, seed) for seed in range(3)]
    for name, defaults in OPTIMIZERS:
        optimizer_class = getattr(torch.optim, name)
        expected, _ = _train_alone(batches, optimizer_class, defaults)
        for stage in ("optimizer", 2, 3):
            model, optimizer = _shard(_net(), stage, optimizer_class, defaults)
            _train(model, optimizer, [_own_part(x) for x in batches])
            _close(_whole(model), expected, 1e-9)


def _accumulate(set_to_none):
    """Three backward passes a step, clipping, a schedule of rates, and a closure."""
    alone = _net()
    trainers = {None: (alone, torch.optim.AdamW(_groups(alone.parameters()), lr=0.01))}
    trainers |= {stage: _shard(_net(), stage) for stage in ALL}
    schedules = {
        stage: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for stage, (_, optimizer) in trainers.items()
    }
    norms = {stage: [] for stage in trainers}
    for step, norm_type in enumerate((2.0, 1.0, float("inf"), 2.0)):
        x = _data(6 * dist.get_world_size(), step)
        for stage, (model, optimizer) in trainers.items():
            optimizer.zero_grad(set_to_none=set_to_none)

            def closure():
                loss = torch.tensor(0.0)
                for i, part in enumerate((x if stage is None else _own_part(x)).chunk(3)):
                    waits = model.no_sync() if i < 2 and stage in (0, "optimizer", 1) else None
                    with waits or nullcontext():
                        (model(part).square().mean() / 3).backward()
                    loss += 1
                return loss

            if step == 3:
                assert optimizer.step(closure) == 3
                continue
            closure()
            if stage in STAGES:
                norm = model.clip_grad_norm_(0.05, norm_type)
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
            norms[stage].append(norm.item())
            optimizer.step()
            schedules[stage].step()
    for stage in ALL:
        assert norms[stage] == pytest.approx(norms[None], rel=1e-12) and min(norms[None]) > 0.05
        _close(_whole(trainers[stage][0]), alone.state_dict(), 1e-10)


@on_ranks(3)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate_and_are_clipped_by_their_global_norm(set_to_none):
    _accumulate(set_to_none)


@on_ranks(2)
def test_padding_is_no_part_of_a_sum_or_norm():
    new_empty = torch.Tensor.new_empty

    def poisoned(*args, **kwargs):
        tensor = new_empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    with patch.object(torch.Tensor, "new_empty", poisoned):
        _accumulate(True)


@on_ranks(2)
def test_gradients_that_are_not_zeroed_add_up():
    """Two steps without zero_grad(); then module.zero_grad(); then one gradient set by hand."""
    x, alone = _data(4 * dist.get_world_size()), _net()
    plain = torch.optim.SGD(_groups(alone.parameters()), lr=0.1)
    trainers = [(alone, plain, x)]
    for stage in ALL:
        trainers.append((*_shard(_net(), stage, torch.optim.SGD, {"lr": 0.1}), _own_part(x)))
    for model, optimizer, part in trainers:
        for step in range(4):
            model(part).square().mean().backward()
            optimizer.step()
            if step == 1:
                model.zero_grad()
        getattr(model, "module", model).blocks[2].up.bias.grad = None
        model(part).square().mean().backward()
        optimizer.step()
        _close(_whole(model), alone.state_dict())


class _Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([_Block(7), _Block(7)])

    def forward(self, x, i):
        return self.branches[i](x)


class _Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Pair() for _ in range(2))

    def forward(self, x, i):
        for block in self.blocks:
            x = block(x, i)
        return x


@on_ranks(3)
def test_ranks_may_use_other_parameters():
    """Trap 5: rank r uses branch r % 2 of each block: the other one counts as zero there."""
    rank, world_size = rank_and_size()
    parts = _data(2 * world_size).chunk(world_size)
    torch.manual_seed(0)
    start = _Branches().double()
    expected = _gradients_alone(copy.deepcopy(start), lambda net: sum(
        net(part, r % 2).square().mean() / world_size for r, part in enumerate(parts)
    ))
    for stage in STAGES:
        model, _ = _shard(copy.deepcopy(start), stage)
        model(parts[rank], rank % 2).square().mean().backward()
        _close(_gradients(model), expected)


class _Small(nn.Module):
    """Fewer elements than ranks, an empty tensor, integers, no gradient for a whole dtype."""

    def __init__(self):
        super().__init__()
        self.blocks = ()
        self.a, self.b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(0, 3))
        self.c, self.d = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(5).bfloat16())
        self.e = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)

    def forward(self):
        return self.a.sum() + self.b.sum() + 2 * self.c.sum()


@on_ranks(4)
def test_tensors_smaller_than_the_group():
    """Trap 19."""
    for stage in ALL:
        model, optimizer = _shard(_Small(), stage, torch.optim.SGD, {"lr": 0.5})
        model().backward()
        optimizer.step()
        weights = _whole(model)
        assert weights["a"].item() == pytest.approx(0.98) and weights["b"].shape == (0, 3)
        assert weights["c"].tolist() == pytest.approx([0.96, 0.96])
        assert weights["d"].tolist() == [1] * 5 and weights["d"].dtype == torch.bfloat16
        assert weights["e"].tolist() == [1] * 3 and weights["e"].dtype == torch.int64


class _State(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.blocks = ()
        self.weight = nn.Parameter(torch.full((3, 2), value))
        self.fixed = nn.Parameter(torch.full((4,), value), requires_grad=False)
        self.short = nn.Parameter(torch.full((1,), value, dtype=torch.bfloat16))
        self.register_buffer("mean", torch.full((5,), value))
        self.register_buffer("steps", torch.tensor(int(value)))
        self.register_buffer("hidden", torch.full((2, 3), value).T, persistent=False)


@on_ranks(4)
@pytest.mark.parametrize("members", [None, (1, 3)])
def test_parameters_and_buffers_start_as_those_of_the_first_rank_of_the_group(members):
    group, rank = dist.new_group(members) if members else None, dist.get_rank()
    if members and rank not in members:
        return
    for stage in ALL:
        net = _State(10.0 + rank)
        model, _ = _shard(net, stage, group=group)
        for name, tensor in (_whole(model) | dict(net.named_buffers())).items():
            assert (tensor == 10 + (members or [0])[0]).all(), (stage, name)


@on_ranks(4)
@pytest.mark.parametrize("stage", ALL)
def test_a_subgroup_trains_by_itself(stage):
    group = [dist.new_group(members) for members in ([0, 2], [1, 3])][dist.get_rank() % 2]
    batches = [_data(4, seed) for seed in range(2)]
    model, optimizer = _shard(_net(), stage, group=group)
    _train(model, optimizer, [_own_part(x, group) for x in batches])
    _close(_whole(model), _train_alone(batches)[0], 1e-9)


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, *STAGES])
@pytest.mark.parametrize("factor", [1, 5.0])
def test_parameters_may_have_groups_of_their_own_and_sums_a_factor(stage, factor):
    """The first block is replicated over pairs of ranks, as an expert is, the rest over all."""
    rank, net, x = dist.get_rank(), _net(), _data(8)
    pair = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    with torch.no_grad():
        for parameter in net.blocks[0].parameters():
            parameter += rank // 2
    starts = gather_objects(net.state_dict())
    own = dict.fromkeys(net.blocks[0].parameters(), (pair, None) if stage else pair)
    model, _ = _shard(net, stage, groups=own, gradient_divide_factor=factor)
    model(_own_part(x)).square().sum().backward()
    total = []
    for start, part in zip(starts, x.chunk(4)):
        copied = _net()
        copied.load_state_dict(start)
        total.append(_gradients_alone(copied, lambda net: net(part).square().sum()))
    for name in total[0]:
        ranks = (2 * (rank // 2), 2 * (rank // 2) + 1) if "blocks.0" in name else range(4)
        expected = sum(total[r][name] for r in ranks) / factor
        piece = net.get_parameter(name)
        begin = getattr(piece, "first", 0)
        own = expected.flatten()[begin : begin + piece.numel()]
        torch.testing.assert_close(piece.grad.flatten(), own, rtol=1e-12, atol=1e-12)
    if stage:
        with pytest.raises(RuntimeError, match="clip_grad_norm_.. of parameters that have groups"):
            model.clip_grad_norm_(1.0)


@on_ranks(1, 3)
def test_stage_1_in_full_is_a_step_of_one_process():
    x, net, alone = _data(2 * dist.get_world_size()), _net(), _net()
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(2):
        for model, part in ((alone, x), (net, _own_part(x))):
            model.zero_grad()
            model(part).square().mean().backward()
        optimizer.step()
        zero.sharded_step(trained, lambda weights, gradient: weights.sub_(0.1 * gradient))
    _close(net.state_dict(), alone.state_dict())


@on_ranks(1, 3)
def test_a_unit_that_is_gathered_used_and_dropped_has_the_gradients_of_stage_3():
    """And stage 3's bytes: two gathers and a reduce-scatter."""
    (rank, world_size), net = rank_and_size(), _Stack()
    x, sharded, shards = torch.ones(2, 96) + dist.get_rank(), copy.deepcopy(net), []
    model = FullyShardedDataParallel(sharded, units=sharded.blocks)
    for unit in net.blocks:
        layout = FlatLayout(list(unit.parameters()), world_size)
        flat = layout.pack(list(unit.parameters()))
        shards.append((flat.chunk(world_size)[rank].clone().requires_grad_(), layout))
    counts = []
    for forward in (model, lambda x: _run_units(net.to("meta").blocks, x, shards)):
        with least_bytes(), count_bytes() as traffic:
            (forward(x).square().mean() / world_size).backward()
        counts.append(traffic.bytes())
    assert counts[0] == counts[1]
    for unit, (shard, layout) in zip(sharded.blocks, shards):
        _close(shard.grad / world_size, unit.weight.grad, 1e-5)


def _run_units(units, x, shards):
    for unit, (shard, layout) in zip(units, shards):
        x = zero.sharded_forward(unit, x, shard, layout)
    return x


# ---- hybrid sharding -----------------------------------------------------------------------------


@on_ranks(4)
def test_shards_inside_a_group_and_replicas_across():
    rank = dist.get_rank()
    shards = [dist.new_group(members) for members in ([0, 1], [2, 3])][rank // 2]
    replicas = [dist.new_group(members) for members in ([0, 2], [1, 3])][rank % 2]
    batches = [_data(8, s) for s in range(2)]
    for stage in STAGES:
        net = _net(seed=rank)
        model, optimizer = _shard(net, stage, group=shards, replicate_group=replicas)
        with least_bytes(), count_bytes() as traffic:
            _train(model, optimizer, [_own_part(x) for x in batches])
        _close(_whole(model), _train_alone(batches)[0], 1e-9)
        trained = [flat for flat in model.flats if flat.trainable]
        shard = 8 * sum(flat.layout.shard_size for flat in trained)
        # a shard of the gradients, all-reduced between two replicas, in each step
        across = traffic.bytes("all_reduce", replicas)
        assert across == traffic.bytes(group=replicas) == 2 * all_reduce_bytes(shard, 2)
        assert traffic.bytes("all_reduce", shards) == 0
        net = _net()
        net.head.bias.requires_grad_(rank < 2)  # alike inside each group of shards, not across
        with pytest.raises(ValueError, match=r"rank 1 of the group has .*\(7,\) .* False cpu, rank 0"):
            _shard(net, stage, group=shards, replicate_group=replicas)


# ---- 16-bit parameters, 32-bit copies ------------------------------------------------------------


def _exact_weights(batches, parts):
    """The oracle: fp32 weights after AdamW's steps with the gradients of a bfloat16 copy.

    Of each part of a batch alone, added up in fp32.
    """
    exact = _net(torch.float32)
    optimizer = torch.optim.AdamW(_groups(exact.parameters()), lr=0.01)
    for x in batches:
        rounded = copy.deepcopy(exact).bfloat16()
        for part in x.bfloat16().chunk(parts):
            rounded.zero_grad()
            rounded(part).square().mean().backward()
            for p, q in zip(exact.parameters(), rounded.parameters()):
                if p.requires_grad:
                    p.grad = (0 if p.grad is None else p.grad) + q.grad.float() / parts
        optimizer.step()
        optimizer.zero_grad()
    return exact.state_dict()


@on_ranks(1, 3)
@pytest.mark.parametrize("reduce_dtype", [torch.float32, None])
def test_a_32_bit_copy_of_the_shard_is_updated_by_16_bit_gradients(reduce_dtype):
    """Trap 6: those of two microbatches add up in reduce_dtype."""
    world_size = dist.get_world_size()
    batches = [_data(4 * world_size, s, torch.float32) for s in range(5)]
    expected = _exact_weights(batches, 2 * world_size)
    how = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
    for stage in STAGES:
        model, optimizer = _shard(_net(torch.float32), stage, **how)
        model.module.shift = model.module.shift.bfloat16()
        for x in batches:
            optimizer.zero_grad()
            first, last = _own_part(x).chunk(2)
            with model.no_sync() if stage == 1 else nullcontext():
                (model(first).square().mean() / 2).backward()
            (model(last).square().mean() / 2).backward()
            optimizer.step()
        weights = model.state_dict()
        weights["shift"] = weights["shift"].float()
        expected["shift"] = weights["shift"]
        assert {value.dtype for value in weights.values()} == {torch.float32}
        _close(weights, expected, 1e-5 if reduce_dtype == torch.float32 else 0.02)


@on_ranks(2)
def test_pieces_have_gradients_of_the_dtype_that_their_parameters_ask_for():
    """Trap 6: bfloat16 parameters, four passes: the fp32 sum of their bfloat16 gradients."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(9, 9).bfloat16() for _ in range(3)))
    for p in net.parameters():
        p.grad_dtype = torch.float32
    x, expected = torch.randn(8, 9, generator=torch.Generator().manual_seed(0)).bfloat16(), 0
    plain = copy.deepcopy(net)
    for part in x.chunk(8):
        plain.zero_grad()
        plain(part).float().exp().mean().backward()
        expected = expected + plain[0].weight.grad.double() / 2
    model = FullyShardedDataParallel(net, units=[net[0]])
    for part in _own_part(x).chunk(4):
        model(part).float().exp().mean().backward()
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}
    _close(_gradients(model)["0.weight"].double(), expected, 1e-5)


# ---- state dicts ---------------------------------------------------------------------------------


def _state_after_two_steps(stage, weights):
    model, optimizer = _shard(_net(seed=dist.get_rank() + 5), stage, torch.optim.SGD)
    if weights:
        model.load_state_dict(weights)
    _train(model, optimizer, [_own_part(_data(12, seed)) for seed in (0, 1)])
    return model.state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_state_dicts_are_those_of_one_process_and_move_between_group_sizes(stage):
    begun, batches = _net().state_dict(), [_data(12, seed) for seed in (0, 1)]
    expected, _ = _train_alone(batches, torch.optim.SGD)
    for world_size in (1, 2, 3):
        for found in run(world_size, _state_after_two_steps, stage, begun):
            assert [*found] == [*begun]
            _close(found, expected)


@on_ranks(2)
def test_the_state_of_the_optimizer_of_shards_is_each_ranks_own():
    """A run that goes on from it has the same bits."""
    batches = [_own_part(_data(8, seed)) for seed in range(4)]
    model, optimizer = _shard(_net(), "optimizer")
    _train(model, optimizer, batches[:2])
    saved = copy.deepcopy((_whole(model), optimizer.state_dict()))
    _train(model, optimizer, batches[2:])
    other, optimizer = _shard(_net(seed=3), "optimizer", defaults={"lr": 0.5})
    other.module.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    _train(other, optimizer, batches[2:])
    assert _equal(_whole(other), _whole(model))
    theirs = gather_objects(saved[1])[1 - dist.get_rank()]
    with pytest.raises(ValueError, match=r"of the shard \(rank, world size\) \(\d, 2\), not"):
        optimizer.load_state_dict(theirs)


# ---- what is sent, and what is held --------------------------------------------------------------


@on_ranks(1, 2, 3, 4, 6)
@pytest.mark.parametrize("stage", ALL)
def test_stages_send_2_2_2_and_3_times_the_parameters(stage):
    """And the optimizer beside DDP 3 times. D = 1, of m microbatches as zero_rounds() has it."""
    model, optimizer = _shard(_Stack(), stage)
    x, nbytes = torch.ones(2, 96), sum(p.nbytes for p in _Stack().parameters())
    _train(model, optimizer, [x])
    one = reduce_scatter_bytes(nbytes, dist.get_world_size())
    for m in (1, 3) if stage in STAGES else (1,):
        with least_bytes(), count_bytes() as traffic:
            for i in range(m):
                with model.no_sync() if stage == 1 and i < m - 1 else nullcontext():
                    model(x).sum().backward()
            optimizer.step()
        if stage == "optimizer":
            assert traffic.bytes() == 3 * one
            continue
        assert traffic.bytes() == zero_bytes(stage, nbytes, dist.get_world_size(), m)
        assert traffic.bytes() == (2, 2, 1 + m, 3 * m)[stage] * one
        if stage:
            assert traffic.bytes("all_gather_single") == zero_rounds(stage, m)[1] * one


def _bytes_of_new_tensors():
    """Of those made since gc.freeze()."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


SOAK_3_AND_4 = [pytest.param(world_size, marks=pytest.mark.soak) for world_size in (3, 4)]


@on_ranks(1, 2, *SOAK_3_AND_4)
@pytest.mark.parametrize("stage, half", [(0, False), *product(STAGES, (False, True))])
def test_a_rank_holds_16_bytes_per_parameter_of_which_a_stage_shares_out(stage, half):
    """Of all tensors, after one of several backwards, in which stage 1 adds up whole gradients."""
    gc.freeze()
    sizes = (2, 4, 12) if half else (4, 4, 8)
    if stage == 3 and half:  # the pieces are the 32-bit copy
        sizes = (0, 4, 12)
    how = {"param_dtype": torch.bfloat16} if half else {}
    model, optimizer = _shard(_Stack(), stage, **how)
    parameters, P, x = 4 * 96 * 96, dist.get_world_size(), torch.ones(1, 96)
    _train(model, optimizer, [x])
    optimizer.zero_grad()
    with model.no_sync() if stage == 1 else nullcontext():
        model(x).sum().backward()
    claim = zero_memory(stage, P, *sizes)
    held = memory_ledger(model, optimizer).total() / parameters
    assert held == pytest.approx(claim, abs=2e-3)  # counts of steps
    assert _bytes_of_new_tensors() / parameters == pytest.approx(claim, abs=2e-2)
    assert [zero_memory(stage, P) for stage in range(4)] == [16, 4 + 12 / P, 2 + 14 / P, 16 / P]


class _OnStream:
    """A Work that holds its tensors until it is waited for, as NCCL's do."""

    def __init__(self, work, tensors):
        self.work, self.tensors = work, tensors

    def wait(self):
        self.tensors = None
        self.work.wait()


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_two_flat_gradients_are_under_way_at_most(stage):
    """Those that live when another one leaves, of six units."""
    model, optimizer = _shard(_Stack(blocks=6), stage)
    made, living, scatter = [], [], zero.reduce_scatter_single

    def watched(output, input, *args, **kwargs):
        made.append(weakref.ref(input))
        living.append(sum(reference() is not None for reference in made))
        return _OnStream(scatter(output, input, *args, **kwargs), [output, input])

    with patch.object(zero, "reduce_scatter_single", watched):
        model(torch.ones(1, 96)).sum().backward()
    assert living == [1, 2, 2, 2, 2, 2]


@on_ranks(3)
def test_stage_3_holds_its_shard_and_at_most_two_units():
    """Bytes of gathered parameters: at rest, and the most in forward and backward."""
    net = _Stack(blocks=8)
    model, optimizer = _shard(net, 3)
    storages = {flat.unsharded_param.untyped_storage() for flat in model.flats}
    gathered = lambda: sum({s._cdata: s.nbytes() for s in storages}.values())
    rest, most = [gathered()], []
    for block in net.blocks:
        block.register_forward_hook(lambda *_: most.append(gathered()))
        block.register_full_backward_hook(lambda *_: most.append(gathered()))
    for _ in range(2):
        _train(model, optimizer, [torch.ones(1, 96, requires_grad=True)])
        rest.append(gathered())
        with torch.no_grad():
            model(torch.ones(1, 96))
        rest.append(gathered())
    assert sum(p.numel() for p in net.parameters()) == 8 * 96 * 96 / dist.get_world_size()
    assert rest == [0] * 5 and max(most) == 2 * 96 * 96 * 4


# ---- overlap and order ---------------------------------------------------------------------------


FORWARD = "gather gather forward 0 gather forward 1 forward 2"  # the next one, before computing
BACKWARD = "backward 2 {}scatter backward 1 scatter backward 0 scatter step"
EVENTS = {
    1: f"{FORWARD} {BACKWARD}".format(""),
    2: f"{FORWARD} {BACKWARD}".format(""),
    3: f"{FORWARD} gather gather {BACKWARD}".format("gather "),
}


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_leave_and_parameters_come_while_others_are_computed(stage):
    """What begins in which order during one step."""
    net = _Stack(blocks=3)
    model, optimizer = _shard(net, stage)
    events = []

    def watched(name, function):
        def call(*args, **kwargs):
            events.append(name)
            return function(*args, **kwargs)

        return call

    for i, block in enumerate(net.blocks):
        block.register_forward_hook(lambda *_, i=i: events.append(f"forward {i}"))
        backward = lambda grad, i=i: events.append(f"backward {i}")
        block.register_forward_pre_hook(
            lambda block, *_, hook=backward: block.weight.register_hook(hook) and None
        )
    gather, scatter = zero.all_gather_single, zero.reduce_scatter_single
    with (
        patch.object(zero, "all_gather_single", watched("gather", gather)),
        patch.object(zero, "reduce_scatter_single", watched("scatter", scatter)),
    ):
        model(torch.ones(1, 96, requires_grad=True)).sum().backward()
        events.append("step")
        optimizer.step()
    assert " ".join(events) == EVENTS[stage]


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", ALL)
def test_no_stage_has_the_host_wait_for_a_gpu(stage):
    sgd = {"lr": 0.1, "momentum": 0.9}
    model, optimizer = _shard(_net(torch.float32), stage, torch.optim.SGD, sgd)
    x = _own_part(_data(8, dtype=torch.float32))
    _train(model, optimizer, [x])
    with waits() as found:
        with model.no_sync():
            model(x).square().mean().backward()
        model(x).square().mean().backward()
        if stage in STAGES:
            model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert not found


HALF = {"param_dtype": torch.bfloat16}


@on_ranks(3)
@pytest.mark.parametrize("how", [{}, HALF, HALF | {"reduce_dtype": torch.float32}])
@pytest.mark.parametrize("stage", [2, 3])
def test_views_shards_pieces_and_what_is_sent_begin_on_128_bytes(stage, how):
    """Where what is computed with, updated and sent begins in its storage, in bytes."""
    tensors, net = [], _net(torch.float32)

    def watched(function):
        def call(output, input, *args, **kwargs):
            tensors.extend((output, input))
            return function(output, input, *args, **kwargs)

        return call

    with (
        patch.object(zero, "all_gather_single", watched(zero.all_gather_single)),
        patch.object(zero, "reduce_scatter_single", watched(zero.reduce_scatter_single)),
    ):
        model, _ = _shard(net, stage, **how)
        net.shift = net.shift.to(how.get("param_dtype"))
        model(_own_part(_data(6, dtype=torch.float32))).square().mean().backward()
    for flat in model.flats:
        tensors += [flat.unsharded_param, flat.sharded_param, *flat.pieces]
        tensors += [whole.data for whole in flat.whole]
    tensors += [piece.grad for piece in net.parameters() if piece.grad is not None]
    begins = [t.storage_offset() * t.itemsize for t in tensors if t.numel()]
    assert any(begins) and all(begin % 128 == 0 for begin in begins)


def _record_steps(stage):
    with record() as events:
        model, optimizer = _shard(_net(), stage)
        for seed in range(2):
            _train(model, optimizer, [_own_part(_data(8, seed))])
            if stage in STAGES:
                model.clip_grad_norm_(1.0)
    return events


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_no_stage_would_hang_on_nccl(world_size):
    for stage in ALL:
        replay(run(world_size, _record_steps, stage))


# ---- what modules do -----------------------------------------------------------------------------


class _PassOn(_Block):
    """Returns one of its inputs beside its output."""

    def forward(self, x):
        return x | {"out": super().forward(x["out"])}


class _Views(_Block):
    def forward(self, x):
        return super().forward(x).view(len(x), 1, -1)


class _Odd(nn.Module):
    """Units that return tuples, are used twice, recompute, or are changed in place afterwards."""

    def __init__(self, how):
        super().__init__()
        kind = _PassOn if how == "passed on" else _Views if how == "view in place" else _Block
        self.blocks = nn.ModuleList(kind(7) for _ in range(4))
        self.last, self.how = nn.Linear(7, 7), how  # in no unit

    def forward(self, x):
        for block in self.blocks[:: -1 if self.how == "backwards" else 1]:
            if self.how == "twice":
                x = block(block(x))
            elif self.how in (False, True):
                x = checkpoint(block, x, use_reentrant=self.how)
            elif self.how == "in place":
                x = block(x * 1.0)
                x += 1
            elif self.how == "view in place":
                y = block(x)
                y *= 2
                x = y.view_as(x).tanh()
            elif self.how == "passed on":
                x = sum(block({"out": x, "skip": x / 2}).values())
            else:
                x = block(x)
        return {"x": (self.last(x), 3)}


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "how",
    ["plain", "twice", "in place", "view in place", "passed on", "backwards", "two passes"]
    + ["of a unit", False, True],
)
def test_units_may_be_used_in_any_way_that_all_ranks_share(how, stage):
    x = _data(2 * dist.get_world_size()).requires_grad_()
    torch.manual_seed(0)
    start, seen = _Odd(how).double(), []
    handle = lambda net: net.blocks[1].register_forward_hook(lambda *args: seen.append(args[-1]))

    def loss(model, x):
        if how == "two passes":  # forward, forward, backward of both
            return sum(model(half)["x"][0].square().mean() for half in x.chunk(2)) / 2
        found = model(x)["x"][0]
        return (seen[-1] if how == "of a unit" else found).square().mean()

    alone = copy.deepcopy(start)
    handle(alone)
    expected = _gradients_alone(alone, lambda net: loss(net, x))
    for number in (0, 4):  # of units
        net = copy.deepcopy(start)
        model = FullyShardedDataParallel(net, units=net.blocks[:number], stage=stage)
        handle(net)
        if how == "of a unit" and not number:
            continue
        for _ in range(2):
            model.zero_grad()
            loss(model, _own_part(x)).backward()
            _close(_gradients(model), expected, 1e-11)
            with torch.no_grad():
                model(x)


def _fail(*arguments):
    raise KeyError("fails here")


class _Late:
    """The work of a gather that comes in its own wait(), into memory that is NaN until then."""

    def __init__(self, gather, pending, output, *arguments):
        self.output, self.pending = output, pending
        self.gather = lambda: gather(output, *arguments)
        assert not any(_overlap(output, other.output) for other in pending)
        output.fill_(float("nan"))
        pending.append(self)

    def wait(self):
        if self in self.pending:
            self.pending.remove(self)
            assert self.output.untyped_storage().nbytes() > 0  # is still there
            self.gather()


def _overlap(a, b):
    begins, ends = zip(*[(t.data_ptr(), t.data_ptr() + t.nbytes) for t in (a, b)])
    return max(begins) < min(ends)


@on_ranks(2)
@pytest.mark.parametrize("how", ["plain", "backwards"])
def test_parameters_are_waited_for_before_their_use_and_before_their_memory_is_used_again(how):
    """Also in an order in which what is fetched ahead is never used."""
    pending, gather = [], zero.all_gather_single

    def late_gather(output, input, group=None, async_op=False):
        if not async_op:
            return gather(output, input, group)
        return _Late(gather, pending, output, input, group)

    x = _data(2 * dist.get_world_size())
    torch.manual_seed(0)
    alone = _Odd(how).double()
    alone.blocks[3].up.weight.requires_grad_(False)  # a unit of two flat tensors
    net = copy.deepcopy(alone)
    with patch.object(zero, "all_gather_single", late_gather):
        model = FullyShardedDataParallel(net, units=net.blocks)
        handle = net.blocks[1].register_forward_hook(_fail)
        with pytest.raises(KeyError):
            model(x)
        handle.remove()
        for trained, part in ((alone, x), (model, _own_part(x))):
            optimizer = torch.optim.SGD(trained.parameters(), lr=1.0)
            for _ in range(2):
                trained(part)["x"][0].square().mean().backward()
                optimizer.step()
                with torch.no_grad():
                    trained(part)
        assert not pending
    _close(_whole(model), alone.state_dict(), 1e-10)


@on_ranks(2)
def test_what_is_no_longer_used_is_freed():
    """Weak references to what was made, dropped and collected."""
    made = []
    for stage in ALL:
        net = _net()
        model, optimizer = _shard(net, stage)
        _train(model, optimizer, [_data(2)])
        made += [weakref.ref(x) for x in (net.scale, model, optimizer)]
        del net, model, optimizer
    gc.collect()
    assert all(reference() is None for reference in made)


# ---- what would be wrong in silence --------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("failing", [(0, 1), (1,)])
@pytest.mark.parametrize("stage", STAGES)
def test_after_a_pass_that_failed_training_goes_on(stage, failing):
    """A forward, and a backward, on all ranks or on one, for whose messages the others wait."""
    model, optimizer = _shard(_net(), stage)
    x, block = _data(4), model.module.blocks[1]
    handle = block.register_forward_hook(_fail)
    with pytest.raises(KeyError):
        model(_own_part(x))
    handle.remove()
    if dist.get_rank() in failing:
        handle = block.register_full_backward_hook(_fail)
    loss = model(_own_part(x)).square().mean()
    with pytest.raises(KeyError) if dist.get_rank() in failing else nullcontext():
        loss.backward()
    handle.remove()
    if dist.get_rank() in failing:
        with pytest.raises(RuntimeError, match=r"that has failed: finish_grad_sync\(\) ends it"):
            model(_own_part(x))
    model.finish_grad_sync()
    model.zero_grad()
    model(_own_part(x)).square().mean().backward()
    _close(_gradients(model), _gradients_alone(_net(), lambda net: net(x).square().mean()))


class _OwnOptimizer(torch.optim.SGD):
    pass


@on_ranks(2)
def test_optimizers_that_are_wrong_on_shards_are_refused():
    for name in ("LBFGS", "Adafactor", "Muon"):
        optimizer_class = getattr(torch.optim, name)
        with pytest.raises(ValueError, match=f"{name} is wrong on shards"):
            ZeroRedundancyOptimizer(_net().parameters(), optimizer_class)
    model = FullyShardedDataParallel(_net())
    for optimizer_class in (torch.optim.LBFGS, torch.optim.Adafactor):
        with pytest.raises(ValueError, match="is wrong on shards"):
            optimizer_class(model.parameters(), lr=0.1).step(lambda: model(_data(1)).sum())
        optimizer_class(nn.Linear(2, 2).parameters(), lr=0.1).step(lambda: torch.zeros(()))
    for optimizer in (
        lambda: _OwnOptimizer(model.parameters(), lr=0.1).step(),
        lambda: ZeroRedundancyOptimizer(_net().parameters(), _OwnOptimizer, lr=0.1),
    ):
        with pytest.warns(UserWarning, match="_OwnOptimizer on shards must treat each element"):
            optimizer()


def _changes():
    """{what it says: what somebody does to a sharded net before forward}"""
    def convert(net):
        net.double()

    def replace(net):
        net.head.bias = nn.Parameter(torch.zeros(7))

    def freeze(net):
        net.head.bias.requires_grad_(False)

    def hook(net):
        net.head.bias.register_hook(lambda gradient: 2 * gradient)

    moved = hooked = "was moved, converted, replaced, frozen, thawed or given a hook"
    return [(convert, moved), (replace, moved), (freeze, hooked), (hook, hooked)]


@on_ranks(2)
def test_what_cannot_be_right_is_refused():
    x = _own_part(_data(4)).requires_grad_()
    for change, message in _changes():
        model = FullyShardedDataParallel(_net(torch.float32))
        change(model.module)
        with pytest.raises(RuntimeError, match=message):
            model(x.float())
    net = _net()
    for units in ([net.blocks, net.blocks[0]], [net], [nn.Linear(1, 1)], [net.head, net.head]):
        with pytest.raises(ValueError, match=r"units\[\d\] is not a submodule, or inside of"):
            FullyShardedDataParallel(net, units=units)
    model, _ = _shard(net, 1)
    for wrap in (
        FullyShardedDataParallel,
        DistributedDataParallel,
        lambda net: ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD),
    ):
        with pytest.raises(ValueError, match="FullyShardedDataParallel has cut these parameters"):
            wrap(net)
    loss = model(x).sum()
    with torch.no_grad():
        net.scale.mul_(2)
    with pytest.raises(RuntimeError, match="were changed between forward and backward"):
        loss.backward()
    with pytest.raises(RuntimeError, match=r"changed and kept: call reshard\(\)"):
        model(x)
    model.reshard()
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"is not copied or pickled: state_dict\(\) is"):
        copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="create_graph=True: a sharded module has no"):
        model(x).sum().backward(create_graph=True)
    with pytest.raises(ValueError, match="names differ: shift"):
        model.load_state_dict({n: x for n, x in model.state_dict().items() if n != "shift"})
    with pytest.raises(ValueError, match=r"scale: \(2,\), not \(\)"):
        model.load_state_dict(model.state_dict() | {"scale": torch.zeros(2)})


class _Unit(nn.Linear):
    def forward(self, x):
        return super().forward(x), self.weight[:1]


@on_ranks(2)
def test_ways_around_the_units_are_refused():
    """Sets are unknown to a pytree."""
    x = torch.ones(1, 96, requires_grad=True)

    def wrap(forward, net=None, units=4, **how):
        net = net or _Stack()
        net.forward = lambda x: forward(net, x)
        return FullyShardedDataParallel(net, units=net.blocks[:units], **how)

    with pytest.raises(RuntimeError, match="must return tensors that a pytree holds"):
        wrap(lambda net, x: {net.blocks(x)})(x)
    given = _Stack()
    given.blocks[0] = _Unit(96, 96)
    with pytest.raises(RuntimeError, match=r"units\[0\] returns a parameter, or its view"):
        wrap(lambda net, x: net.blocks[0](x)[0], given)(x)
    inside = wrap(lambda net, x: checkpoint(net.blocks, x, use_reentrant=False))
    with pytest.raises(RuntimeError, match=r"units\[\d\] is recomputed before its turn"):
        inside(x).sum().backward()
    around = wrap(lambda net, x: net.blocks(x))
    with pytest.raises(RuntimeError, match="forward inside of the module's backward"):
        checkpoint(around, x, use_reentrant=False).sum().backward()
    half_hidden = wrap(lambda net, x: (net.blocks(x), {net.blocks(x)}), units=0, stage=1)
    with pytest.raises(RuntimeError, match="'blocks.3.weight' got a gradient past the out"):
        half_hidden(x)[1].pop().sum().backward()


@on_ranks(3)
def test_the_demonstration_measures_what_it_claims():
    with redirect_stdout(io.StringIO()) as printed, least_bytes():
        zero._demonstrate()
    printed, *others = gather_objects(printed.getvalue())
    assert not any(others)
    for stage, line in zip(STAGES, printed.splitlines(), strict=True):
        sent, claimed = re.findall(r"\d+", line.split(":")[1])[:2]
        assert sent == claimed and line.startswith(f"stage {stage}")
        assert float(line.split()[-1]) < 1e-5
