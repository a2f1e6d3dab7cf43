"""ZeRO's stages against one process on the whole batch, and what they send and hold, counted."""

import copy
import gc
import re
import weakref
from collections import deque
from contextlib import nullcontext
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

from ledger import memory_ledger
from ranks import least_bytes, on_ranks, run
from replicas import (
    Block, assert_close, demonstration, fail, gradients_alone, make_data, make_net, mean_square,
    own_part, whole_gradients,
)

STAGES = (1, 2, 3)
ALL = (0, "optimizer", *STAGES)  # 0 is DDP; "optimizer" is DDP with the optimizer of shards


class Stack(nn.Module):
    """Blocks only, which P = 1, 2, 3, 4 and 6 cut without padding: 96 x 96 = 64 x 12 x 12."""

    def __init__(self, blocks=4):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Linear(96, 96, bias=False) for _ in range(blocks)])

    def forward(self, x):
        return self.blocks(x)


def groups_of(parameters):
    """Two parameter groups, as those of a GPT: matrices decay, or their pieces."""
    matrices, others = [], []
    for p in parameters:
        (matrices if len(getattr(p, "whole_shape", p.shape)) == 2 else others).append(p)
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 0.02},
    ]


def shard(net, stage, optimizer_class=torch.optim.AdamW, defaults=None, group=None, **how):
    """(model, optimizer) that train `net`, one of ALL."""
    defaults = defaults or {"lr": 0.01}
    if stage in STAGES:
        model = FullyShardedDataParallel(net, group, units=net.blocks, stage=stage, **how)
    else:
        model = DistributedDataParallel(net, group, bucket_cap_mb=2e-3, **how)
    if stage == "optimizer":
        groups = groups_of(net.parameters())
        return model, ZeroRedundancyOptimizer(groups, optimizer_class, group, **defaults)
    optimizer = optimizer_class(groups_of(net.parameters()), **defaults)
    if stage in (1, 2):
        optimizer.register_step_post_hook(lambda *_: model.reshard())
    return model, optimizer


def train(model, optimizer, batches):
    losses = []
    for x in batches:
        optimizer.zero_grad()
        loss = mean_square(model, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def train_alone(batches, optimizer_class=torch.optim.AdamW, defaults=None, dtype=torch.float64):
    """The weights of one process, and its losses."""
    alone = make_net(dtype)
    optimizer = optimizer_class(groups_of(alone.parameters()), **defaults or {"lr": 0.01})
    losses = train(alone, optimizer, batches)
    return alone.state_dict(), losses


def whole(model):
    """The weights, full, by the plain module's names."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


# ---- training ------------------------------------------------------------------------------------


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-6), (torch.bfloat16, 0.2)]
)
def test_ten_steps_of_every_stage_are_those_of_one_process(dtype, tolerance):
    """All ranks have the same weights, and so have stages that sum in one order, to the bit."""
    world_size = dist.get_world_size()
    batches = [make_data(2 * world_size, seed, dtype) for seed in range(10)]
    expected, losses_alone = train_alone(batches, dtype=dtype)
    weights = []
    for stage in ALL:
        net = make_net(dtype, seed=dist.get_rank())  # all start as the first rank's
        model, optimizer = shard(net, stage)
        losses = train(model, optimizer, [own_part(x) for x in batches])
        dist.all_reduce(losses)
        assert_close(losses / world_size, losses_alone, tolerance)
        weights.append(whole(model))
        assert_close(weights[-1], expected, tolerance)
    assert all(equal(*pair) for pair in zip(weights, gather_objects(weights)[0]))
    ddp, optimizer, first, second, third = weights
    assert equal(ddp, optimizer) and equal(first, second) and equal(first, third)
    assert equal(ddp, first) or world_size > 2  # a + b is b + a


OPTIMIZERS = [
    ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("AdamW", {"lr": 0.01, "foreach": True}),
    ("AdamW", {"lr": 0.01, "fused": True}),
    ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5}),
    ("Adadelta", {"lr": 0.5}),
    *((name, {"lr": 0.01}) for name in ("Adagrad", "NAdam", "RAdam", "Adamax", "ASGD")),
]


@on_ranks(2)
def test_any_optimizer_that_treats_elements_alone_runs_on_shards():
    batches = [make_data(6, seed) for seed in range(3)]
    for name, defaults in OPTIMIZERS:
        optimizer_class = getattr(torch.optim, name)
        expected, _ = train_alone(batches, optimizer_class, defaults)
        for stage in ("optimizer", 2, 3):
            model, optimizer = shard(make_net(), stage, optimizer_class, defaults)
            train(model, optimizer, [own_part(x) for x in batches])
            assert_close(whole(model), expected, 1e-9)


def poisoned(*args, new_empty=torch.Tensor.new_empty, **kwargs):
    tensor = new_empty(*args, **kwargs)
    return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor


@on_ranks(3)
@pytest.mark.parametrize("set_to_none, nan", [(True, False), (False, False), (True, True)])
def test_gradients_accumulate_and_are_clipped_by_their_global_norm(set_to_none, nan):
    """Three backwards a step, a schedule of rates, a closure; nan: what new memory has in it."""
    alone = make_net()
    trainers = {None: (alone, torch.optim.AdamW(groups_of(alone.parameters()), lr=0.01))}
    with patch.object(torch.Tensor, "new_empty", poisoned) if nan else nullcontext():
        trainers |= {stage: shard(make_net(), stage) for stage in ALL}
        decay = torch.optim.lr_scheduler.ExponentialLR
        schedules = {stage: decay(optimizer, 0.5) for stage, (_, optimizer) in trainers.items()}
        norms = {stage: [] for stage in trainers}
        for step, norm_type in enumerate((2.0, 1.0, float("inf"), 2.0)):
            x = make_data(6 * dist.get_world_size(), step)
            for stage, (model, optimizer) in trainers.items():
                optimizer.zero_grad(set_to_none=set_to_none)

                def closure():
                    for i, part in enumerate((x if stage is None else own_part(x)).chunk(3)):
                        only_adds = i < 2 and stage in (0, "optimizer", 1)
                        with model.no_sync() if only_adds else nullcontext():
                            (mean_square(model, part) / 3).backward()
                    return torch.tensor(3.0)

                if step == 3:
                    assert optimizer.step(closure) == 3
                    continue
                closure()
                clip, own = nn.utils.clip_grad_norm_, (model.parameters(),)
                if stage in STAGES:
                    clip, own = model.clip_grad_norm_, ()
                norms[stage].append(clip(*own, 0.05, norm_type).item())
                optimizer.step()
                schedules[stage].step()
        for stage in ALL:
            assert norms[stage] == pytest.approx(norms[None], rel=1e-12) and min(norms[None]) > 0.05
            assert_close(whole(trainers[stage][0]), alone.state_dict(), 1e-10)


@on_ranks(2)
def test_gradients_that_are_not_zeroed_add_up():
    """Two steps without zero_grad(); then module.zero_grad(); then one gradient set by hand."""
    x, alone = make_data(4 * dist.get_world_size()), make_net()
    trainers = [(alone, torch.optim.SGD(groups_of(alone.parameters()), lr=0.1), x)]
    for stage in ALL:
        trainers.append((*shard(make_net(), stage, torch.optim.SGD, {"lr": 0.1}), own_part(x)))
    for model, optimizer, part in trainers:
        for step in range(5):
            mean_square(model, part).backward()
            optimizer.step()
            if step == 1:
                model.zero_grad()
            if step == 3:
                getattr(model, "module", model).blocks[2].up.bias.grad = None
        assert_close(whole(model), alone.state_dict())


class Pair(nn.Module):
    """Two blocks, of which it runs one."""

    def __init__(self):
        super().__init__()
        self.branches, self.used = nn.ModuleList([Block(7), Block(7)]), 0

    def forward(self, x):
        return self.branches[self.used](x)


@on_ranks(3)
def test_ranks_may_use_other_parameters():
    """Trap 5: rank r uses branch r % 2 of each unit: the other one counts as zero there."""
    rank, world_size = rank_and_size()
    torch.manual_seed(0)
    start = nn.Sequential(Pair(), Pair()).double()
    parts = make_data(2 * world_size).chunk(world_size)

    def loss(net, r):
        for pair in (net[0], net[1]) if isinstance(net, nn.Sequential) else net.module:
            pair.used = r % 2
        return mean_square(net, parts[r])

    expected = gradients_alone(start, lambda net: sum(loss(net, r) for r in range(3)) / world_size)
    for stage in STAGES:
        net = copy.deepcopy(start)
        loss(FullyShardedDataParallel(net, units=net, stage=stage), rank).backward()
        assert_close(whole_gradients(net), expected)


class Small(nn.Module):
    """Fewer elements than ranks, an empty tensor, integers, a whole dtype without gradient."""

    def __init__(self, value):
        super().__init__()
        self.blocks = ()
        make = lambda *shape, **of: nn.Parameter(torch.full(shape, value, **of))
        self.a, self.b, self.c, self.d = make(1), make(0, 3), make(2), make(5, dtype=torch.bfloat16)
        self.e = nn.Parameter(torch.full((3,), int(value)), requires_grad=False)
        self.register_buffer("steps", torch.tensor(int(value)))
        self.register_buffer("hidden", torch.full((2, 3), value).T, persistent=False)

    def forward(self):
        return self.a.sum() + self.b.sum() + 2 * self.c.sum()


@on_ranks(4)
@pytest.mark.parametrize("members", [(0, 1, 2, 3), (1, 3)])
def test_tensors_smaller_than_a_group_start_as_its_first_ranks(members):
    """Trap 19. Also buffers; and a step."""
    group, first = dist.new_group(members), 10 + members[0]
    for stage in ALL if dist.get_rank() in members else ():
        net = Small(10.0 + dist.get_rank())
        model, optimizer = shard(net, stage, torch.optim.SGD, {"lr": 0.5}, group)
        for name, tensor in (whole(model) | dict(net.named_buffers())).items():
            assert (tensor == first).all(), (stage, name)
        model().backward()
        optimizer.step()
        weights = whole(model)
        assert weights["a"].item() == pytest.approx(first - 0.02)
        assert weights["c"].tolist() == pytest.approx([first - 0.04] * 2)
        assert weights["b"].shape == (0, 3) and weights["d"].tolist() == [first] * 5
        assert weights["d"].dtype == torch.bfloat16 and weights["e"].tolist() == [first] * 3


@on_ranks(4)
@pytest.mark.parametrize("stage", ALL)
def test_a_subgroup_trains_by_itself(stage):
    group = [dist.new_group(members) for members in ([0, 2], [1, 3])][dist.get_rank() % 2]
    batches = [make_data(4, seed) for seed in range(2)]
    model, optimizer = shard(make_net(), stage, group=group)
    train(model, optimizer, [own_part(x, group) for x in batches])
    assert_close(whole(model), train_alone(batches)[0], 1e-9)


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, *STAGES])
@pytest.mark.parametrize("factor", [1, 5.0])
def test_parameters_may_have_groups_of_their_own_and_sums_a_factor(stage, factor):
    """The first block is replicated over pairs of ranks, as an expert is, the rest over all."""
    rank, net, x = dist.get_rank(), make_net(), make_data(8)
    pair = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    with torch.no_grad():
        for parameter in net.blocks[0].parameters():
            parameter += rank // 2
    total = []
    for start, part in zip(gather_objects(net), x.chunk(4)):
        total.append(gradients_alone(start, lambda net: net(part).square().sum()))
    own = dict.fromkeys(net.blocks[0].parameters(), (pair, None) if stage else pair)
    model, _ = shard(net, stage, groups=own, gradient_divide_factor=factor)
    model(own_part(x)).square().sum().backward()
    for name in total[0]:
        ranks = (2 * (rank // 2), 2 * (rank // 2) + 1) if "blocks.0" in name else range(4)
        piece, expected = net.get_parameter(name), sum(total[r][name] for r in ranks) / factor
        begin = getattr(piece, "first", 0)
        own = expected.flatten()[begin : begin + piece.numel()]
        torch.testing.assert_close(piece.grad.flatten(), own, rtol=1e-12, atol=1e-12)
    if stage:
        with pytest.raises(RuntimeError, match="clip_grad_norm_.. of parameters that have groups"):
            model.clip_grad_norm_(1.0)


# ---- the ideas -----------------------------------------------------------------------------------


@on_ranks(1, 3)
def test_stage_1_in_full_is_a_step_of_one_process():
    x, net, alone = make_data(2 * dist.get_world_size()), make_net(), make_net()
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(2):
        for model, part in ((alone, x), (net, own_part(x))):
            model.zero_grad()
            mean_square(model, part).backward()
        optimizer.step()
        zero.sharded_step(trained, lambda weights, gradient: weights.sub_(0.1 * gradient))
    assert_close(net.state_dict(), alone.state_dict())


@on_ranks(1, 3)
def test_a_unit_that_is_gathered_used_and_dropped_has_the_gradients_of_stage_3():
    """And stage 3's bytes: two gathers and a reduce-scatter."""
    (rank, world_size), net = rank_and_size(), Stack()
    x, sharded, shards = torch.ones(2, 96) + rank, copy.deepcopy(net), []
    model = FullyShardedDataParallel(sharded, units=sharded.blocks)
    for unit in net.blocks:
        layout = FlatLayout(list(unit.parameters()), world_size)
        flat = layout.pack(list(unit.parameters()))
        shards.append((flat.chunk(world_size)[rank].clone().requires_grad_(), layout))

    def run_units(x):
        for unit, (shard, layout) in zip(net.to("meta").blocks, shards):
            x = zero.sharded_forward(unit, x, shard, layout)
        return x

    counts = []
    for forward in (model, run_units):
        with least_bytes(), count_bytes() as traffic:
            (mean_square(forward, x) / world_size).backward()
        counts.append(traffic.bytes())
    assert counts[0] == counts[1]
    for unit, (shard, layout) in zip(sharded.blocks, shards):
        assert_close(shard.grad / world_size, unit.weight.grad, 1e-5)


# ---- replicas of shards, 16-bit parameters, 32-bit copies ----------------------------------------


@on_ranks(4)
def test_shards_inside_a_group_and_replicas_across():
    rank = dist.get_rank()
    shards = [dist.new_group(members) for members in ([0, 1], [2, 3])][rank // 2]
    replicas = [dist.new_group(members) for members in ([0, 2], [1, 3])][rank % 2]
    batches = [make_data(8, s) for s in range(2)]
    for stage in STAGES:
        model, optimizer = shard(make_net(seed=rank), stage, group=shards, replicate_group=replicas)
        with least_bytes(), count_bytes() as traffic:
            train(model, optimizer, [own_part(x) for x in batches])
        assert_close(whole(model), train_alone(batches)[0], 1e-9)
        nbytes = 8 * sum(flat.layout.shard_size for flat in model.flats if flat.trainable)
        # a shard of the gradients, all-reduced between two replicas, in each step
        across = traffic.bytes("all_reduce", replicas)
        assert across == traffic.bytes(group=replicas) == 2 * all_reduce_bytes(nbytes, 2)
        assert traffic.bytes("all_reduce", shards) == 0
        net = make_net()
        net.head.bias.requires_grad_(rank < 2)  # alike inside each group of shards, not across
        with pytest.raises(ValueError, match=r"rank 1 of the group has .* \(7,\) .* False cpu,"):
            shard(net, stage, group=shards, replicate_group=replicas)


def exact_weights(batches, parts):
    """The oracle: fp32 weights after AdamW's steps with the gradients of a bfloat16 copy.

    Of each part of a batch alone, added up in fp32.
    """
    exact = make_net(torch.float32)
    optimizer = torch.optim.AdamW(groups_of(exact.parameters()), lr=0.01)
    for x in batches:
        optimizer.zero_grad()
        rounded = copy.deepcopy(exact).bfloat16()
        for part in x.bfloat16().chunk(parts):
            found = gradients_alone(rounded, lambda net: mean_square(net, part))
            for name, gradient in found.items():
                p = exact.get_parameter(name)
                p.grad = (0 if p.grad is None else p.grad) + gradient.float() / parts
        optimizer.step()
    return exact.state_dict()


@on_ranks(1, 3)
@pytest.mark.parametrize("reduce_dtype", [torch.float32, None])
def test_a_32_bit_copy_of_the_shard_is_updated_by_16_bit_gradients(reduce_dtype):
    """Trap 6: those of two microbatches add up in reduce_dtype."""
    world_size = dist.get_world_size()
    batches = [make_data(4 * world_size, s, torch.float32) for s in range(5)]
    expected = exact_weights(batches, 2 * world_size)
    how = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
    for stage in STAGES:
        model, optimizer = shard(make_net(torch.float32), stage, **how)
        model.module.shift = model.module.shift.bfloat16()
        for x in batches:
            optimizer.zero_grad()
            first, last = own_part(x).chunk(2)
            with model.no_sync() if stage == 1 else nullcontext():
                (mean_square(model, first) / 2).backward()
            (mean_square(model, last) / 2).backward()
            optimizer.step()
        weights = model.state_dict()
        weights["shift"] = expected["shift"]
        assert {value.dtype for value in weights.values()} == {torch.float32}
        assert_close(weights, expected, 1e-5 if reduce_dtype == torch.float32 else 0.02)


@on_ranks(2)
def test_pieces_have_gradients_of_the_dtype_that_their_parameters_ask_for():
    """Trap 6: bfloat16 parameters, four passes: the fp32 sum of their bfloat16 gradients."""
    torch.manual_seed(0)
    net, x = nn.Sequential(*(nn.Linear(7, 7) for _ in range(3))).bfloat16(), make_data(8).bfloat16()
    for p in net.parameters():
        p.grad_dtype = torch.float32
    loss = lambda net, part: net(part).float().exp().mean()
    found = [gradients_alone(net, lambda net: loss(net, part)) for part in x.chunk(8)]
    expected = sum(gradients["0.weight"].double() / 2 for gradients in found)
    model = FullyShardedDataParallel(net, units=[net[0]])
    seen = []  # of what computes: products that are put off add to its .grad themselves
    net[0].register_forward_pre_hook(lambda layer, args: seen.append(layer.weight.grad_dtype))
    for part in own_part(x).chunk(4):
        loss(model, part).backward()
    assert seen == 4 * [torch.float32]
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}
    assert_close(whole_gradients(net)["0.weight"].double(), expected, 1e-5)


# ---- state dicts ---------------------------------------------------------------------------------


def state_after_two_steps(stage, weights):
    model, optimizer = shard(make_net(seed=dist.get_rank() + 5), stage, torch.optim.SGD)
    model.load_state_dict(weights)
    train(model, optimizer, [own_part(make_data(12, seed)) for seed in (0, 1)])
    return model.state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_state_dicts_are_those_of_one_process_and_move_between_group_sizes(stage):
    begun, batches = make_net().state_dict(), [make_data(12, seed) for seed in (0, 1)]
    expected, _ = train_alone(batches, torch.optim.SGD)
    for world_size in (1, 2, 3):
        for found in run(world_size, state_after_two_steps, stage, begun):
            assert [*found] == [*begun]
            assert_close(found, expected)


@on_ranks(2)
def test_the_state_of_the_optimizer_of_shards_is_each_ranks_own():
    """With rates as they are now; a run that goes on from it has the same bits."""
    batches = [own_part(make_data(8, seed)) for seed in range(4)]
    model, optimizer = shard(make_net(), "optimizer")
    train(model, optimizer, batches[:2])
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).step()
    saved = copy.deepcopy((whole(model), optimizer.state_dict()))
    train(model, optimizer, batches[2:])
    other, optimizer = shard(make_net(seed=3), "optimizer", defaults={"lr": 0.5})
    other.module.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.01]
    train(other, optimizer, batches[2:])
    assert equal(whole(other), whole(model))
    theirs = gather_objects(saved[1])[1 - dist.get_rank()]
    with pytest.raises(ValueError, match=r"of the shard \(rank, world size\) \(\d, 2\), not"):
        optimizer.load_state_dict(theirs)


# ---- what is sent, and what is held --------------------------------------------------------------


@on_ranks(1, 2, 3, 4, 6)
@pytest.mark.parametrize("stage", ALL)
def test_stages_send_2_2_2_and_3_times_the_parameters(stage):
    """And the optimizer beside DDP 3 times. D = 1, of m microbatches as zero_rounds() has it."""
    model, optimizer = shard(Stack(), stage)
    x, nbytes = torch.ones(2, 96), sum(p.nbytes for p in Stack().parameters())
    train(model, optimizer, [x])
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


def bytes_of_new_tensors():
    """Of those made since gc.freeze()."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@on_ranks(1, 2, *[pytest.param(size, marks=pytest.mark.soak) for size in (3, 4)])
@pytest.mark.parametrize("stage, half", [(0, False), *product(STAGES, (False, True))])
def test_a_rank_holds_16_bytes_per_parameter_of_which_a_stage_shares_out(stage, half):
    """Of all tensors, after one of several backwards, in which stage 1 adds up whole gradients."""
    gc.freeze()
    sizes = (2, 4, 12) if half else (4, 4, 8)
    if stage == 3 and half:  # the pieces are the 32-bit copy
        sizes = (0, 4, 12)
    model, optimizer = shard(Stack(), stage, **{"param_dtype": torch.bfloat16} if half else {})
    parameters, P, x = 4 * 96 * 96, dist.get_world_size(), torch.ones(1, 96)
    train(model, optimizer, [x])
    optimizer.zero_grad()
    with model.no_sync() if stage == 1 else nullcontext():
        model(x).sum().backward()
    claim = zero_memory(stage, P, *sizes)
    held = memory_ledger(model, optimizer).total() / parameters
    assert held == pytest.approx(claim, abs=2e-3)  # counts of steps
    assert bytes_of_new_tensors() / parameters == pytest.approx(claim, abs=2e-2)
    assert [zero_memory(stage, P) for stage in range(4)] == [16, 4 + 12 / P, 2 + 14 / P, 16 / P]


class OnStream:
    """A Work that holds its tensors until it is waited for, as NCCL's do."""

    def __init__(self, work, tensors):
        self.work, self.tensors = work, tensors

    def wait(self):
        self.tensors = None
        self.work.wait()


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_two_flat_gradients_are_under_way_at_most(stage):
    """Those that live when another one leaves, of six units, or of modules that take turns."""
    made, living, scatter = [], [], zero.reduce_scatter_single

    def watched(output, input, *args, **kwargs):
        made.append(weakref.ref(input))
        living.append(sum(reference() is not None for reference in made))
        return OnStream(scatter(output, input, *args, **kwargs), [output, input])

    x, chunks = torch.ones(1, 96), {"under_way": deque(), "wait_in_backward": False}
    for count, how in ((1, {}), (3, chunks)):
        models = [shard(Stack(6 // count), stage, **how)[0] for _ in range(count)]
        made.clear(), living.clear()
        with patch.object(zero, "reduce_scatter_single", watched):
            for model in models:
                model(x).sum().backward()
        assert living == [1, 2, 2, 2, 2, 2]
        for model in models:
            model.finish_grad_sync()
            assert all(parameter.grad is not None for parameter in model.parameters())


@on_ranks(3)
def test_stage_3_holds_its_shard_and_at_most_two_units():
    """Bytes of gathered parameters: at rest, and the most in forward and backward."""
    net = Stack(blocks=8)
    model, optimizer = shard(net, 3)
    storages = {flat.unsharded_param.untyped_storage() for flat in model.flats}
    gathered = lambda: sum({s._cdata: s.nbytes() for s in storages}.values())
    rest, most = [gathered()], []
    for block in net.blocks:
        block.register_forward_hook(lambda *_: most.append(gathered()))
        block.register_full_backward_hook(lambda *_: most.append(gathered()))
    for _ in range(2):
        train(model, optimizer, [torch.ones(1, 96, requires_grad=True)])
        rest.append(gathered())
        with torch.no_grad():
            model(torch.ones(1, 96))
        rest.append(gathered())
    assert sum(p.numel() for p in net.parameters()) == 8 * 96 * 96 / dist.get_world_size()
    assert rest == [0] * 5 and max(most) == 2 * 96 * 96 * 4


# ---- overlap and order ---------------------------------------------------------------------------


FORWARD = "gather gather forward 0 gather forward 1 forward 2"  # the next one, before computing
BACKWARD = "backward 2 {}scatter backward 1 scatter backward 0 scatter step"
EVENTS = [f"{FORWARD} {BACKWARD}".format("")] * 2
EVENTS.append(f"{FORWARD} gather gather {BACKWARD}".format("gather "))


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_leave_and_parameters_come_while_others_are_computed(stage):
    """What begins in which order during one step."""
    net, events = Stack(blocks=3), []
    model, optimizer = shard(net, stage)
    for i, block in enumerate(net.blocks):
        block.register_forward_hook(lambda *_, i=i: events.append(f"forward {i}"))
        backward = lambda grad, i=i: events.append(f"backward {i}")
        block.register_forward_pre_hook(
            lambda block, *_, hook=backward: block.weight.register_hook(hook) and None
        )
    def watched(name, function):
        return lambda *args, **of: events.append(name) or function(*args, **of)

    gather, scatter = zero.all_gather_single, zero.reduce_scatter_single
    with (
        patch.object(zero, "all_gather_single", watched("gather", gather)),
        patch.object(zero, "reduce_scatter_single", watched("scatter", scatter)),
    ):
        model(torch.ones(1, 96, requires_grad=True)).sum().backward()
        events.append("step")
        optimizer.step()
    assert " ".join(events) == EVENTS[stage - 1]


# ---- what modules do -----------------------------------------------------------------------------


class PassOn(Block):
    """Returns one of its inputs beside its output."""

    def forward(self, x):
        return x | {"out": super().forward(x["out"])}


class Views(Block):
    def forward(self, x):
        return super().forward(x).view(len(x), 1, -1)


WAYS = {  # in which a module uses its units
    "plain": lambda block, x: block(x),
    "backwards": lambda block, x: block(x),
    "two passes": lambda block, x: block(x),
    "of a unit": lambda block, x: block(x),
    "twice": lambda block, x: block(block(x)),
    "in place": lambda block, x: block(x * 1.0).add_(1),
    "view in place": lambda block, x: block(x).mul_(2).view_as(x).tanh(),
    "passed on": lambda block, x: sum(block({"out": x, "skip": x / 2}).values()),
    "recomputed": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
}


class Odd(nn.Module):
    def __init__(self, how):
        super().__init__()
        kind = {"passed on": PassOn, "view in place": Views}.get(how, Block)
        self.blocks = nn.ModuleList(kind(7) for _ in range(4))
        self.last, self.how = nn.Linear(7, 7), how  # in no unit
        self.blocks[3].norm.weight = self.blocks[0].norm.weight  # in two

    def forward(self, x):
        for block in self.blocks[:: -1 if self.how == "backwards" else 1]:
            x = WAYS[self.how](block, x)
        return {"x": (self.last(x), 3)}


def make_odd(how):
    torch.manual_seed(0)
    return Odd(how).double()


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_units_may_be_used_in_any_way_that_all_ranks_share(stage):
    x = make_data(2 * dist.get_world_size()).requires_grad_()
    for how, number in product(WAYS, (0, 4)):  # of units
        seen = []

        def loss(model, x):
            if how == "two passes":  # forward, forward, backward of both
                return sum(model(half)["x"][0].square().mean() for half in x.chunk(2)) / 2
            found = model(x)["x"][0]
            return (seen[-1] if how == "of a unit" else found).square().mean()

        net = make_odd(how)
        net.blocks[1].register_forward_hook(lambda *args: seen.append(args[-1]))
        expected = gradients_alone(net, lambda net: loss(net, x))
        model = FullyShardedDataParallel(net, units=net.blocks[:number], stage=stage)
        net.blocks[1].register_forward_hook(lambda *args: seen.append(args[-1]))
        if how == "of a unit" and not number:
            continue
        for _ in range(2):
            model.zero_grad()
            loss(model, own_part(x)).backward()
            assert_close(whole_gradients(net), expected, 1e-11)
            with torch.no_grad():
                model(x)


class LateGather:
    """The work of a gather that comes in its own wait(), into memory that is NaN until then."""

    def __init__(self, gather, pending, output, *arguments):
        self.output, self.pending = output, pending
        self.gather = lambda: gather(output, *arguments)
        assert not any(overlap(output, other.output) for other in pending)
        output.fill_(float("nan"))
        pending.append(self)

    def wait(self):
        if self in self.pending:
            self.pending.remove(self)
            assert self.output.untyped_storage().nbytes() > 0  # is still there
            self.gather()


def overlap(a, b):
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
        return LateGather(gather, pending, output, input, group)

    x, alone = make_data(2 * dist.get_world_size()), make_odd(how)
    alone.blocks[3].up.weight.requires_grad_(False)  # a unit of two flat tensors
    net = copy.deepcopy(alone)
    with patch.object(zero, "all_gather_single", late_gather):
        model = FullyShardedDataParallel(net, units=net.blocks)
        handle = net.blocks[1].register_forward_hook(fail)
        with pytest.raises(KeyError):
            model(x)
        handle.remove()
        for trained, part in ((alone, x), (model, own_part(x))):
            optimizer = torch.optim.SGD(trained.parameters(), lr=1.0)
            for _ in range(2):
                trained(part)["x"][0].square().mean().backward()
                optimizer.step()
                with torch.no_grad():
                    trained(part)
        assert not pending
    assert_close(whole(model), alone.state_dict(), 1e-10)


@on_ranks(2)
def test_what_is_no_longer_used_is_freed():
    """Weak references to what was made, dropped and collected."""
    made = []
    for stage in ALL:
        net = make_net()
        model, optimizer = shard(net, stage)
        train(model, optimizer, [make_data(2)])
        made += [weakref.ref(x) for x in (net.scale, model, optimizer)]
        del net, model, optimizer
    gc.collect()
    assert all(reference() is None for reference in made)


# ---- what would be wrong in silence --------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize(
    "failing, how", [((1,), ""), ((0, 1), ""), ((0, 1), "a step"), ((0, 1), "no_sync")]
)
@pytest.mark.parametrize("stage", STAGES)
def test_after_a_pass_that_failed_training_goes_on(stage, failing, how):
    """A forward, and a backward, on all ranks or on one, for whose messages the others wait.

    how: also if the optimizer takes a step with the gradients that have come, or only adds them.
    """
    model, optimizer = shard(make_net(), stage, torch.optim.SGD)
    x, block = make_data(4), model.module.blocks[1]
    handle = block.register_forward_hook(fail)
    with pytest.raises(KeyError):
        model(own_part(x))
    handle.remove()
    here = dist.get_rank() in failing
    handle = block.register_full_backward_hook(fail if here else lambda *_: None)
    loss = mean_square(model, own_part(x))
    with pytest.raises(KeyError) if here else nullcontext():
        with model.no_sync() if how == "no_sync" else nullcontext():
            loss.backward()
    handle.remove()
    if how == "a step":
        optimizer.step()
    if here:
        with pytest.raises(RuntimeError, match=r"that has failed: finish_grad_sync\(\) ends it"):
            model(own_part(x))
    model.finish_grad_sync()
    model.zero_grad()
    now = make_net()
    now.load_state_dict(model.state_dict())
    mean_square(model, own_part(x)).backward()
    expected = gradients_alone(now, lambda net: mean_square(net, x))
    assert_close(whole_gradients(model.module), expected)


class OwnOptimizer(torch.optim.SGD):
    pass


@on_ranks(2)
def test_optimizers_that_are_wrong_on_shards_are_refused():
    for name in ("LBFGS", "Adafactor", "Muon"):
        with pytest.raises(ValueError, match=f"{name} is wrong on shards"):
            ZeroRedundancyOptimizer(make_net().parameters(), getattr(torch.optim, name))
    model = FullyShardedDataParallel(make_net())
    for optimizer_class in (torch.optim.LBFGS, torch.optim.Adafactor):
        with pytest.raises(ValueError, match="is wrong on shards"):
            optimizer_class(model.parameters(), lr=0.1).step(lambda: model(make_data(1)).sum())
        optimizer_class(nn.Linear(2, 2).parameters(), lr=0.1).step(lambda: torch.zeros(()))
    for optimizer in (
        lambda: OwnOptimizer(model.parameters(), lr=0.1).step(),
        lambda: ZeroRedundancyOptimizer(make_net().parameters(), OwnOptimizer, lr=0.1),
    ):
        with pytest.warns(UserWarning, match="OwnOptimizer on shards must treat each element"):
            optimizer()


CHANGES = {
    "converted": lambda net: net.double(),
    "replaced": lambda net: setattr(net.head, "bias", nn.Parameter(torch.zeros(7))),
    "frozen": lambda net: net.head.bias.requires_grad_(False),
    "hook": lambda net: net.head.bias.register_hook(lambda gradient: 2 * gradient),
}


@on_ranks(2)
def test_what_cannot_be_right_is_refused():
    x, net = own_part(make_data(4)).requires_grad_(), make_net()
    for name, change in CHANGES.items():
        model = FullyShardedDataParallel(make_net(torch.float32))
        change(model.module)
        with pytest.raises(RuntimeError, match=f"was .*{name}.*, and is sharded"):
            model(x.float())
    for units in ([net.blocks, net.blocks[0]], [net], [nn.Linear(1, 1)], [net.head, net.head]):
        with pytest.raises(ValueError, match=r"units\[\d\] is not a submodule, or inside of"):
            FullyShardedDataParallel(net, units=units)
    model, optimizer = shard(net, 1)
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
    with pytest.raises(RuntimeError, match=r"changed and kept: call reshard\(\)"):
        model(x)
    model.reshard()
    with pytest.raises(RuntimeError, match="were changed between forward and backward"):
        loss.backward()
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"is not copied or pickled: state_dict\(\) is"):
        copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="create_graph=True: a sharded module has no"):
        model(x).sum().backward(create_graph=True)
    with pytest.raises(ValueError, match="names differ: shift"):
        model.load_state_dict({n: x for n, x in model.state_dict().items() if n != "shift"})
    with pytest.raises(ValueError, match=r"scale: \(2,\), not \(\)"):
        model.load_state_dict(model.state_dict() | {"scale": torch.zeros(2)})


class ReturnsAParameter(nn.Linear):
    def forward(self, x):
        return super().forward(x), self.weight[:1]


def wrap_stack(forward, net=None, units=4, **how):
    net = net or Stack()
    net.forward = lambda x: forward(net, x)
    return FullyShardedDataParallel(net, units=net.blocks[:units], **how)


@on_ranks(2)
def test_ways_around_the_units_are_refused():
    """Sets are unknown to a pytree."""
    x = torch.ones(1, 96, requires_grad=True)
    with pytest.raises(RuntimeError, match="must return tensors that a pytree holds"):
        wrap_stack(lambda net, x: {net.blocks(x)})(x)
    given = Stack()
    given.blocks[0] = ReturnsAParameter(96, 96)
    with pytest.raises(RuntimeError, match=r"units\[0\] returns a parameter, or its view"):
        wrap_stack(lambda net, x: net.blocks[0](x)[0], given)(x)
    inside = wrap_stack(lambda net, x: checkpoint(net.blocks, x, use_reentrant=False))
    with pytest.raises(RuntimeError, match=r"units\[\d\] is recomputed before its turn"):
        inside(x).sum().backward()
    around = wrap_stack(lambda net, x: net.blocks(x))
    with pytest.raises(RuntimeError, match="forward inside of the module's backward"):
        checkpoint(around, x, use_reentrant=False).sum().backward()
    half_hidden = wrap_stack(lambda net, x: (net.blocks(x), {net.blocks(x)}), units=0, stage=1)
    with pytest.raises(RuntimeError, match="'blocks.3.weight' got a gradient past the out"):
        half_hidden(x)[1].pop().sum().backward()


@on_ranks(3)
def test_the_demonstration_measures_what_it_claims():
    for stage, line in zip(STAGES, demonstration(zero).splitlines(), strict=True):
        sent, claimed = re.findall(r"\d+", line.split(":")[1])[:2]
        assert sent == claimed and line.startswith(f"stage {stage}")
        assert float(line.split()[-1]) < 1e-5
