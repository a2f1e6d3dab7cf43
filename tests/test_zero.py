"""ZeRO's stages train as one process on the whole batch; what they send and hold is counted."""

import copy
import gc
import inspect
import re
from collections import Counter, OrderedDict, deque
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tensor_parallel
import zero
from collectives import (
    all_reduce, all_reduce_bytes, count_bytes, gather_objects, observe, rank_and_size,
    reduce_scatter_bytes,
)
from ddp import Bucket, DistributedDataParallel, backward_in_buckets
from pipeline import WeightGradStore
from sequence_parallel import recompute_groups
from tensor_parallel import column_parallel_linear
from zero import (
    AdamW, FullyShardedDataParallel, ZeroRedundancyOptimizer, zero_bytes, zero_memory,
    zero_rounds,
)

from gpu_counts import waits
from ranks import least_bytes, on_ranks, shifted, soak
from replicas import (
    Block, assert_close, demonstration, fail, gradients_alone, make_data, make_net, mean_square,
    interleaved_group, own_part, whole_gradients,
)
from transformer import Peak, bytes_of_new_tensors

STAGES = (1, 2, 3)
ALL = (0, "optimizer", *STAGES)  # 0: DDP; "optimizer": DDP with ZeroRedundancyOptimizer


def stack(blocks=4):
    """Make a net of blocks that P = 1, 2, 3, 4 and 6 shard without padding (96 x 96 = 64 x 144)."""
    layers = [nn.Linear(96, 96, bias=False) for _ in range(blocks)]
    return nn.Sequential(OrderedDict(blocks=nn.Sequential(*layers)))


def groups_of(parameters):
    """Make two parameter groups, as for a GPT: only matrices and their pieces have weight decay."""
    parameters = list(parameters)
    is_matrix = lambda p: p.dim() == 2
    return [
        {"params": [p for p in parameters if is_matrix(p)], "weight_decay": 0.1},
        {"params": [p for p in parameters if not is_matrix(p)], "weight_decay": 0.0, "lr": 0.02},
    ]


def shard(net, stage, optimizer_class=torch.optim.AdamW, defaults=None, group=None, **how):
    """Return a model and an optimizer that train `net` with a stage in ALL."""
    defaults = defaults or {"lr": 0.01}
    if stage in STAGES:
        model = FullyShardedDataParallel(net, group, units=net.blocks, stage=stage, **how)
    else:
        model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=2e-3, **how)
    if stage == "optimizer":
        groups = groups_of(net.parameters())
        return model, ZeroRedundancyOptimizer(groups, optimizer_class, group, **defaults)
    optimizer = optimizer_class(groups_of(net.parameters()), **defaults)
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
    """Train on one process; return its weights and its losses."""
    alone = make_net(dtype)
    optimizer = optimizer_class(groups_of(alone.parameters()), **defaults or {"lr": 0.01})
    losses = train(alone, optimizer, batches)
    return alone.state_dict(), losses


def whole(model):
    """Return the full weights by the plain module's names."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


# ---- training ------------------------------------------------------------------------------------

RUNS = [
    (torch.optim.AdamW, {}, torch.float64, 1e-10),
    soak(torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, torch.float64, 1e-10),
    (torch.optim.Adam, {"amsgrad": True, "fused": True}, torch.float32, 1e-5),
    soak(torch.optim.Adagrad, {}, torch.bfloat16, 0.2),
    (AdamW, {"moments_dtype": torch.bfloat16}, torch.float64, 1e-10),
]


@on_ranks(2, *map(soak, (1, 3, 4)))
@pytest.mark.parametrize("optimizer, defaults, dtype, tolerance", RUNS)
def test_ten_steps_of_every_stage_are_those_of_one_process(optimizer, defaults, dtype, tolerance):
    """All ranks have bitwise equal weights, and so have stages that sum in the same order.

    Training starts from the first rank's weights, or from a state dict of one process. The state
    dict of the result has the names that one process would save.
    """
    world_size = dist.get_world_size()
    batches = [make_data(2 * world_size, seed, dtype) for seed in range(10)]
    how, weights = (optimizer, {"lr": 0.01} | defaults), []
    expected, losses_alone = train_alone(batches, *how, dtype)
    for stage in ALL:
        net = make_net(dtype, seed=dist.get_rank() + (stage in STAGES))
        model, optimizer = shard(net, stage, *how)
        if stage in STAGES:
            model.load_state_dict(make_net(dtype).state_dict())
        losses = train(model, optimizer, [own_part(x) for x in batches])
        dist.all_reduce(losses)
        assert_close(losses / world_size, losses_alone, tolerance)
        weights.append(whole(model))
        assert_close(weights[-1], expected, tolerance)
        assert [*weights[-1]] == [*expected]
    assert all(equal(*pair) for pair in zip(weights, gather_objects(weights)[0]))
    ddp, optimizer, first, second, third = weights
    assert equal(ddp, optimizer) and equal(first, second) and equal(first, third)
    assert equal(ddp, first) or world_size > 2  # a + b is b + a


def poisoned(*args, new_empty=torch.Tensor.new_empty, **kwargs):
    """Make new_empty() return memory that is full of nan."""
    tensor = new_empty(*args, **kwargs)
    return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor


@on_ranks(3)
@pytest.mark.parametrize("reset", [{}, {"set_to_none": False}, soak(None)])
@patch("torch.Tensor.new_empty", poisoned)
def test_gradients_accumulate_and_are_clipped_by_their_global_norm(reset):
    """A step has three backwards. reset: arguments of zero_grad(), or None not to call it."""
    alone = make_net()
    trainers = {None: (alone, torch.optim.AdamW(groups_of(alone.parameters()), lr=0.01))}
    trainers |= {stage: shard(make_net(), stage) for stage in ALL}
    norms = {stage: [] for stage in trainers}
    for step in range(3):
        x = make_data(6 * dist.get_world_size(), step)
        for stage, (model, optimizer) in trainers.items():
            if reset is not None:
                optimizer.zero_grad(**reset)
            for i, part in enumerate((x if stage is None else own_part(x)).chunk(3)):
                only_adds = i < 2 and stage in (0, "optimizer", 1)
                with model.no_sync() if only_adds else nullcontext():
                    (mean_square(model, part) / 3).backward()
            clip, own = nn.utils.clip_grad_norm_, (model.parameters(),)
            if stage in STAGES:
                clip, own = model.clip_grad_norm_, ()
            norms[stage].append(clip(*own, 0.05).item())
            optimizer.step()
    for stage in ALL:
        assert norms[stage] == pytest.approx(norms[None], rel=1e-12) and min(norms[None]) > 0.05
        assert_close(whole(trainers[stage][0]), alone.state_dict(), 1e-10)


class Pair(nn.ModuleList):
    """Two blocks, of which forward runs one."""

    def forward(self, x):
        return self[self.used](x)


@on_ranks(3)
def test_ranks_may_use_different_parameters():
    """Rank r runs block r % 2 of each pair. The other block's gradient counts as zero there."""
    rank, world_size = rank_and_size()
    torch.manual_seed(shifted(0))
    start = nn.Sequential(*(Pair([Block(7), Block(7)]) for _ in range(2))).double()
    parts = make_data(2 * world_size).chunk(world_size)

    def loss(net, r):
        for module in net.modules():
            module.used = r % 2
        return mean_square(net, parts[r])

    expected = gradients_alone(start, lambda net: sum(loss(net, r) for r in range(3)) / world_size)
    for stage in STAGES:
        net = copy.deepcopy(start)
        loss(FullyShardedDataParallel(net, units=net, stage=stage), rank).backward()
        assert_close(whole_gradients(net), expected)


class Skips(nn.Module):
    """Layers of which forward runs those in `order`, each in a checkpoint if `how` says so."""

    def __init__(self, layers=6):
        super().__init__()
        self.first = nn.Linear(7, 7)  # it is in no unit
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(layers))

    def forward(self, x, order, how):
        x = self.first(x)
        for number in order:
            block = self.blocks[number]
            if how is None:
                y = block(x)
            else:
                y = checkpoint(block, x, use_reentrant=how == "reentrant")
            x = x + y.tanh()
        return x


ORDERS = [  # the units that each of two ranks runs
    ("012345", "01245"),
    ("012345", "045"),
    ("012345", "012"),
    ("012345", "345"),
    ("012345", ""),
    ("012", "345"),
    ("05", "0135"),
    ("012345", "01233345"),
]
OUT_OF_ORDER = ("01202345", "01202345")  # which reentrant checkpoints do not take


@on_ranks(2)
@pytest.mark.parametrize("how", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("stage", [soak(1), soak(2), 3])
def test_ranks_may_skip_different_units_or_repeat_one(stage, how):
    """Layer drop and conditional computation. Each step has one backward through two passes."""
    rank = dist.get_rank()
    torch.manual_seed(shifted(0))
    start = Skips().double()
    rows = make_data(8).requires_grad_().chunk(2)

    def loss(net, r, orders):
        order = [int(digit) for digit in orders[r]]
        passes = [net(x, order, how) for x in rows[r].chunk(2)]
        return sum(x.square().mean() for x in passes)

    for orders in ORDERS if how == "reentrant" else [*ORDERS, OUT_OF_ORDER]:
        expected = gradients_alone(start, lambda net: sum(loss(net, r, orders) for r in (0, 1)) / 2)
        net = copy.deepcopy(start)
        model = FullyShardedDataParallel(net, units=net.blocks, stage=stage)
        with torch.no_grad():
            loss(model, rank, orders)
        model.reshard()
        loss(model, rank, orders).backward()
        assert_close(whole_gradients(net), expected)


class Small(nn.Module):
    """A module with tensors smaller than the group, an empty one, integers, and an unused dtype."""

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
def test_tensors_smaller_than_a_group_start_as_its_first_ranks_and_are_trained(members):
    """Buffers start as the first rank's, too."""
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
@pytest.mark.parametrize("stage", [0, *STAGES])
def test_parameters_may_have_groups_of_their_own_and_sums_a_divisor(stage):
    """The first block is replicated in pairs of ranks, as an expert is; the rest, on all ranks."""
    rank, net, x = dist.get_rank(), make_net(), make_data(8)
    pair = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    with torch.no_grad():
        for parameter in net.blocks[0].parameters():
            parameter += rank // 2
    total = []
    for start, part in zip(gather_objects(net), x.chunk(4)):
        total.append(gradients_alone(start, lambda net: net(part).square().sum()))
    own = {"process_group": pair, "replicate_group": None} if stage else pair
    own = dict.fromkeys(net.blocks[0].parameters(), own)
    how = {"per_parameter" if stage else "groups": own, "gradient_divide_factor": 5.0}
    model, _ = shard(net, stage, **how)
    model(own_part(x)).square().sum().backward()
    for name in total[0]:
        ranks = (2 * (rank // 2), 2 * (rank // 2) + 1) if "blocks.0" in name else range(4)
        piece, expected = net.get_parameter(name), sum(total[r][name] for r in ranks) / 5
        begin = getattr(piece, "offset", 0)
        own = expected.flatten()[begin : begin + piece.detach().numel()]
        assert_close(piece.grad.detach().flatten(), own)
    if stage:
        with pytest.raises(RuntimeError, match="clip_grad_norm_.. of parameters that have groups"):
            model.clip_grad_norm_(1.0)


# ---- the ideas -----------------------------------------------------------------------------------


def _update_with_momentum():
    momentum = {}

    def update(weights, gradient):
        momentum["sum"] = 0.9 * momentum.get("sum", 0) + gradient
        weights.sub_(0.1 * momentum["sum"])

    return momentum, update


@on_ranks(1, 3)
def test_the_short_form_of_stage_2_frees_the_gradients_of_a_unit_before_the_next_ones_exist():
    (rank, P), net, alone = rank_and_size(), stack(), stack()
    alone.load_state_dict(net.state_dict())
    kept = []
    for parameter in net.parameters():
        count = lambda _: kept.append(sum(p.grad is not None for p in net.parameters()))
        parameter.register_post_accumulate_grad_hook(count)
    buckets = [zero.ShardedBucket([*unit.parameters()]) for unit in net.blocks]
    momenta, updates = zip(*[_update_with_momentum() for _ in buckets])
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        (sum(mean_square(alone, torch.ones(2, 96) + r) for r in range(P)) / P).backward()
        optimizer.step()
        with least_bytes(), count_bytes() as traffic:
            backward_in_buckets(mean_square(net, torch.ones(2, 96) + rank), buckets)
            held = [bucket.shard_gradient.untyped_storage().nbytes() for bucket in buckets]
            for bucket, update in zip(buckets, updates, strict=True):
                bucket.step(update)
        assert traffic.bytes() == zero_bytes(2, 4 * 96 * 96 * 4, P)
        assert held == [96 * 96 * 4 // P] * 4
    assert kept == [1] * 12
    assert [momentum["sum"].numel() for momentum in momenta] == [96 * 96 // P] * 4
    assert_close(net.state_dict(), alone.state_dict(), 1e-5)


@on_ranks(2)
def test_the_straight_path_of_stage_3_refuses_a_block_that_a_checkpoint_runs_again():
    """Its weights would stay after backward."""
    net = stack()
    zero.StoredSequence(net.blocks)
    y = torch.ones(2, 96, requires_grad=True)
    for block in net.blocks:
        y = checkpoint(block, y, use_reentrant=False)
    with pytest.raises(AssertionError, match="before finish"):
        y.sum().backward()


@on_ranks(2)
def test_the_straight_path_of_stage_3_refuses_a_second_backward_before_the_sums_are_finished():
    """It would replace the gradients of the first one."""
    net = stack()
    sequence = zero.StoredSequence(net.blocks)
    first, second = [net(torch.ones(2, 96)).sum() for _ in range(2)]
    first.backward()
    with pytest.raises(AssertionError, match="one backward, and then finish"):
        second.backward()
    sequence.finish()


@on_ranks(1, 3)
def test_the_straight_path_of_stage_3_trains_as_one_process_and_holds_two_units_at_a_time():
    (rank, P), net, alone = rank_and_size(), stack(), stack()
    alone.load_state_dict(net.state_dict())
    sequence = zero.StoredSequence(net.blocks)
    held = []

    def count(*arguments):
        held.append(sum(u.flat.untyped_storage().nbytes() > 0 for u in sequence.units))

    for block in net.blocks:
        block.register_forward_pre_hook(count)
        block.register_full_backward_hook(count)
    optimizer = torch.optim.SGD([unit.shard for unit in sequence.units], lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        plain.zero_grad()
        (sum(mean_square(alone, torch.ones(2, 96) + r) for r in range(P)) / P).backward()
        plain.step()
        with least_bytes(), count_bytes() as traffic:
            mean_square(net, torch.ones(2, 96) + rank).backward()
            sequence.finish()
        assert traffic.bytes() == zero_bytes(3, 4 * 96 * 96 * 4, P)
        optimizer.step()
    assert max(held) == 2
    for unit in sequence.units:
        assert unit.flat.untyped_storage().nbytes() == 0
        unit.gather()
        unit.use()
    for saved, weight in zip(net.parameters(), alone.parameters(), strict=True):
        assert_close(saved, weight, 1e-5)
    for unit, weight in zip(sequence.units, alone.parameters(), strict=True):
        unit.free()
        assert_close(unit.shard.detach(), weight.detach().flatten().chunk(P)[rank], 1e-5)


@on_ranks(2)
def test_the_straight_path_frees_the_gradients_of_a_unit_while_backward_goes_on():
    """The sums here keep the tensors until they are waited for, as those of GPUs may."""
    net = stack(6)
    sequence = zero.StoredSequence(net.blocks)
    packed = []
    left = []

    def scatter(total, flat, scatter=zero.reduce_scatter_single, async_op=True, **how):
        packed.append(StorageWeakRef(flat.untyped_storage()))
        left.append(sum(not storage.expired() for storage in packed))
        calls = [partial(scatter, total, flat, **how)]
        return SimpleNamespace(wait=lambda: calls and calls.pop()())

    with patch.object(zero, "reduce_scatter_single", scatter):
        mean_square(net, torch.ones(2, 96)).backward()
        sequence.finish()
    assert left == [1, 2, 2, 2, 2, 2]  # this unit's, and those of the unit before it in backward


@on_ranks(2)
def test_the_straight_path_refuses_a_loss_that_does_not_use_all_parameters():
    units = nn.Linear(3, 3), Pair([nn.Linear(3, 3), nn.Linear(3, 3)])
    units[1].used = 0
    sequence = zero.StoredSequence(units)
    units[1](units[0](torch.ones(1, 3))).sum().backward()
    with pytest.raises(AssertionError, match="the loss has not used all parameters of this unit"):
        sequence.finish()


@pytest.mark.parametrize("kind", [Bucket, zero.ShardedBucket])
@on_ranks(1)
def test_a_bucket_refuses_a_loss_that_does_not_use_all_of_its_parameters_in_a_later_step_too(kind):
    """It still has the sum of the step before."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    buckets = [kind([*net.parameters()])]
    backward_in_buckets(net(torch.ones(1, 3)).sum(), buckets)
    with pytest.raises(AssertionError, match="the loss has not used all parameters of this bucket"):
        backward_in_buckets(net[0](torch.ones(1, 3)).sum(), buckets)


@on_ranks(1)
def test_short_forms_refuse_units_of_two_dtypes_instead_of_converting_one():
    unit = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.bfloat16))
    for make in (zero.StoredUnit, lambda unit: zero.shard_units([unit])):
        with pytest.raises(ValueError, match="the tensors differ in dtype"):
            make(unit)
    assert unit[1].weight.dtype == torch.bfloat16 and unit[1].weight.shape == (3, 3)


@on_ranks(2)
def test_a_clipping_norm_of_a_tensor_parallel_ranks_part_alone_is_refused():
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    layer = tensor_parallel.ColumnParallelLinear(4, 4, group=dist.group.WORLD)
    model = FullyShardedDataParallel(layer, process_group=alone)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="clip_grad_norm_.. of parameters that have groups"):
        model.clip_grad_norm_(1.0)


# ---- replicas of shards, and 32-bit copies of them -----------------------------------------------


@on_ranks(4)
def test_hsdp_shards_inside_a_group_and_sums_gradients_across_replicas():
    rank = dist.get_rank()
    shards = [dist.new_group(members) for members in ([0, 1], [2, 3])][rank // 2]
    replicas = [dist.new_group(members) for members in ([0, 2], [1, 3])][rank % 2]
    batches = [make_data(8, s) for s in range(2)]
    for stage in STAGES:
        model, optimizer = shard(make_net(seed=rank), stage, group=shards, replicate_group=replicas)
        with least_bytes(), count_bytes() as traffic:
            train(model, optimizer, [own_part(x) for x in batches])
        assert_close(whole(model), train_alone(batches)[0], 1e-9)
        nbytes = 8 * sum(flat.layout.shard_size for flat in model.flats if flat.kind.is_trained)
        # Each step all-reduces a shard of the gradients between two replicas.
        across = traffic.bytes("all_reduce", replicas)
        assert across == traffic.bytes(group=replicas) == 2 * all_reduce_bytes(nbytes, 2)
        assert traffic.bytes("all_reduce", shards) == 0
        alone = zero_bytes(stage, 2 * nbytes, 2)  # the bytes of a step without replicas
        assert across == 2 * (zero_bytes(stage, 2 * nbytes, 2, replicas=2) - alone)
        with count_bytes() as traffic, least_bytes():
            for i in range(3):
                with model.no_sync() if stage == 1 and i < 2 else nullcontext():
                    mean_square(model, own_part(batches[0])).backward()
        microbatches = partial(zero_bytes, stage, 2 * nbytes, 2, 3)
        across = traffic.bytes(group=replicas)
        assert across == microbatches(replicas=2) - microbatches()
        net = make_net()
        net.head.bias.requires_grad_(rank < 2)  # equal in a group of shards, not among replicas
        with pytest.raises(ValueError, match=r"rank 1 of the group has .* False cpu \(1,\), rank"):
            shard(net, stage, group=shards, replicate_group=replicas)


DTYPES = [  # of parameters, of gathered parameters, of sums; and 256 + 1 in the dtype of sums
    (torch.float32, torch.bfloat16, None, 257),
    (torch.float32, torch.bfloat16, torch.bfloat16, 256),
    (torch.bfloat16, None, None, 257),
]


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype, param_dtype, reduce_dtype, total", DTYPES)
def test_gradients_of_16_bit_weights_add_up_in_32_bits_and_update_a_32_bit_copy(
    stage, dtype, param_dtype, reduce_dtype, total
):
    """Two passes on all ranks add up to 257, which needs nine bits; bfloat16 has eight."""
    for only_adds in (False, True):
        net = nn.Sequential(nn.Linear(1, 1, bias=False, dtype=dtype))
        nn.init.ones_(net[0].weight).grad_dtype = torch.float32
        how = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
        model, seen = FullyShardedDataParallel(net, units=net, stage=stage, **how), []
        net[0].register_forward_pre_hook(lambda layer, args: seen.append(layer.weight.grad_dtype))
        for x in (256.0, 1.0):
            with model.no_sync() if only_adds and x > 1 else nullcontext():
                y = model(torch.full((1, 1), x, dtype=dtype, requires_grad=True))
                model.reshard()  # so backward gathers the weight again
                y.sum().backward()
        # Products are added to .grad of the computing parameter, which accepts every dtype.
        assert seen == 2 * [None]
        assert net[0].weight.dtype == dtype and net[0].weight.grad.dtype == torch.float32
        expected = total if only_adds else 257
        assert whole_gradients(net)["0.weight"].item() == expected
        if dtype == torch.float32:
            torch.optim.SGD(model.parameters(), lr=2**-16).step()
            assert model.state_dict()["0.weight"].item() == 1 - expected * 2**-16
            assert model(torch.ones(1, 1)).item() == 1 - 2**-8  # rounded to bfloat16


class ThreeProducts(nn.Module):
    """Three weights of different sizes. Two are used once, one of which has a hook, one twice."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.once = nn.Parameter(torch.randn(6, 4))
        self.twice = nn.Parameter(torch.randn(6, 6))
        self.hooked = nn.Parameter(torch.randn(5, 6))

    def forward(self, x):
        if not self.hooked._backward_hooks:
            self.hooked.register_hook(lambda gradient: 3 * gradient)
        x = self.linear(x, self.once).tanh()
        x = self.linear(x, self.twice).tanh()
        return self.linear(self.linear(x, self.twice), self.hooked)


class PassesOver(TorchDispatchMode):
    """Counts the copies and sums of tensors of a size, as {size: their number}."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        if name in ("copy_", "add_", "add", "_to_copy", "clone"):
            self.counts[args[0].numel()] += 1
        return operation(*args, **kwargs or {})

    def __enter__(self):
        self.counts = Counter()
        return super().__enter__()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["fp64", "bf16", "bf16 of fp32"])
@on_ranks(2)
def test_a_layer_writes_its_weights_gradient_where_the_sum_is_taken_from(kind, stage):
    """Nothing is copied in any microbatch, also if a weight has several products.

    A weight's tensor hook sees the gradient of its microbatch alone. In 16 bits, a product is added
    to the sum in 32 bits. bf16 of fp32: param_dtype is bf16, and the parameters are in fp32.
    """
    dtypes = {"fp64": (torch.float64, torch.float64), "bf16": (torch.bfloat16, torch.float32)}
    dtype, wide = dtypes[kind[:4]]
    how = {"stage": stage}
    store = WeightGradStore()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    torch.manual_seed(shifted(0))
    net = ThreeProducts(partial(column_parallel_linear, group=alone, defer=store)).to(dtype)
    batches = torch.randn(4, 2, 7, 4).to(dtype)
    expected = {name: torch.zeros(p.shape, dtype=wide) for name, p in net.named_parameters()}
    for x in batches.flatten(0, 1):
        once, twice, hooked = (p.detach().requires_grad_() for p in net.parameters())
        y = F.linear(F.linear(F.linear(F.linear(x, once).tanh(), twice).tanh(), twice), hooked)
        gradients = torch.autograd.grad(y.square().mean(), (once, twice, hooked))
        for total, gradient, factor in zip(expected.values(), gradients, (1, 1, 3)):
            total += factor * gradient / 2

    if kind == "bf16 of fp32":
        net = net.float()
        how |= {"param_dtype": dtype, "reduce_dtype": wide}
    else:
        for parameter in net.parameters():
            parameter.grad_dtype = wide
    pieces = dict(net.named_parameters())
    model = FullyShardedDataParallel(net, **how)
    for i, own in enumerate(batches[:, dist.get_rank()]):
        is_last = i == len(batches) - 1
        with nullcontext() if is_last else model.no_sync(), store.during():
            loss = model(own).square().mean()
            with PassesOver() as passes:
                loss.backward()
        assert passes.counts[24] == (dtype is torch.bfloat16)  # which a GPU's product saves, too
        assert passes.counts[36] == 2 * (dtype is torch.bfloat16)
    for name, piece in pieces.items():
        part = expected[name].flatten()[piece.offset :][: len(piece)]
        assert_close(piece.grad.detach().flatten(), part, 1e-12 if dtype is torch.float64 else 3e-2)


class InsideAndOutside(nn.Module):
    """Uses a weight, then again in a reentrant checkpoint, and then once more."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.unused = nn.Parameter(torch.ones(4))
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        layer = lambda x: self.linear(x, self.weight)
        return layer(checkpoint(layer, layer(x), use_reentrant=True))


@on_ranks(1)
def test_products_of_any_layer_are_added_in_the_dtype_of_the_sum():
    """If autograd converted the sum to the dtype of a product, it would be rounded."""
    for linear in F.linear, partial(column_parallel_linear, defer=WeightGradStore()):
        net = nn.Linear(1, 1, bias=False)
        net.forward = lambda x: linear(x, net.weight)
        model = FullyShardedDataParallel(net, stage=1, param_dtype=torch.bfloat16,
                                         reduce_dtype=torch.float32)  # fmt: skip
        for x in (256.0, 1.0):
            with nullcontext() if x == 1 else model.no_sync():
                model(torch.full((1, 1), x)).sum().backward()
        assert net.weight.grad.detach().item() == 257


@on_ranks(1)
def test_a_sum_in_16_bits_does_not_round_the_32_bit_gradients_that_are_added_to_it():
    """256 + (1 + 2^-9) becomes 258. It would be 256 if 1 + 2^-9 became 1 first."""
    store = WeightGradStore()
    net = nn.Linear(1, 1, bias=False)
    model = FullyShardedDataParallel(net, stage=1, reduce_dtype=torch.bfloat16)

    def forward(x):
        if not net.weight._backward_hooks:  # with a hook, autograd adds
            net.weight.register_hook(lambda gradient: gradient)
        return column_parallel_linear(x, net.weight, defer=store)

    net.forward = forward
    for x in (256.0, 1 + 2**-9):
        with nullcontext() if x < 2 else model.no_sync():
            model(torch.full((1, 1), x)).sum().backward()
    assert net.weight.grad.detach().item() == 258


@on_ranks(1)
def test_outside_of_a_pipeline_autograd_grad_returns_one_gradient():
    store, weights = WeightGradStore(), []
    net = nn.Linear(4, 4, bias=False)
    model = FullyShardedDataParallel(net, stage=1)

    def forward(x):
        weights.append(net.weight)
        return column_parallel_linear(x, net.weight, defer=store)

    net.forward = forward
    with model.no_sync():
        model(torch.ones(1, 4)).sum().backward()
        (gradient,) = torch.autograd.grad(model(torch.ones(1, 4)).sum(), weights[-1])
    assert gradient.eq(1).all()
    model(torch.ones(1, 4)).sum().backward()
    assert net.weight.grad.detach().eq(2).all()


@on_ranks(1)
def test_a_weight_may_be_used_by_a_backward_and_by_another_inside_it():
    store = WeightGradStore()
    net = InsideAndOutside(partial(column_parallel_linear, defer=store)).double()
    alone = copy.deepcopy(net)
    model = FullyShardedDataParallel(net, stage=1)
    x = torch.randn(3, 4, dtype=torch.float64)
    with store.during():
        model(x).square().mean().backward()
    alone(x).square().mean().backward()
    assert_close(net.weight.grad.detach().view(4, 4), alone.weight.grad, 1e-12)


# ---- the optimizer of shards ---------------------------------------------------------------------


@on_ranks(2)
def test_each_rank_saves_its_own_optimizer_state_and_a_resumed_run_has_the_same_bits():
    """The state has the current learning rates. Gradients may differ in dtype from parameters.

    The parameters start as the first rank's.
    """
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
    weight = nn.Parameter(torch.full([200], 1.0, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    weight.grad = torch.ones(200)
    ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=0.5).step()
    assert weight.tolist() == 200 * [0.5]


# ---- AdamW with moments in 16 bits ---------------------------------------------------------------

SHAPES = (7, 9), (), (200,), (0,), (3, 5)
OPTIONS = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2}


def random_weights(dtype):
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def adamw_step(weight, gradient, state, rounding):
    """Take a step of AdamW by the paper's formulas. state: (t, m, v), of which m and v are rounded.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """
    t, m, v = state
    beta1, beta2 = OPTIONS["betas"]
    t += 1
    m = beta1 * m + (1 - beta1) * gradient
    v = beta2 * v + (1 - beta2) * gradient**2
    update = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + OPTIONS["eps"])
    weight = weight - OPTIONS["lr"] * (update + OPTIONS["weight_decay"] * weight)
    return weight, (t, rounding(m), rounding(v))


@pytest.mark.parametrize("moments_dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [50, AdamW.CHUNK])
def test_adamw_takes_the_step_of_the_paper_with_moments_rounded_after_it(moments_dtype, size):
    """Tensors are larger and smaller than a chunk, one is empty, and one has no dimension."""
    torch.manual_seed(shifted(0))
    weights = random_weights(torch.float64)
    expected = [weight.detach().clone() for weight in weights]
    states = [(0, 0.0, 0.0) for _ in weights]
    optimizer = AdamW(weights, **OPTIONS, moments_dtype=moments_dtype)
    rounding = lambda x: x.to(moments_dtype).double()
    with patch.object(AdamW, "CHUNK", size):
        for _ in range(6):
            for i, weight in enumerate(weights):
                weight.grad = torch.randn_like(weight)
                expected[i], states[i] = adamw_step(expected[i], weight.grad, states[i], rounding)
            optimizer.step()
    for weight, right, (t, m, v) in zip(weights, expected, states):
        torch.testing.assert_close(weight.detach(), right, rtol=1e-13, atol=1e-14)
        state = optimizer.state[weight]
        assert state["step"] == t and state["exp_avg"].dtype == moments_dtype
        torch.testing.assert_close(state["exp_avg"].double(), m, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(state["exp_avg_sq"].double(), v, rtol=1e-13, atol=1e-14)


def test_adamw_with_fp32_moments_has_the_bits_of_pytorchs_also_where_found_inf_forbids_a_step():
    torch.manual_seed(shifted(0))
    pairs = [(weight, copy.deepcopy(weight)) for weight in random_weights(torch.float32)]
    ours, theirs = zip(*pairs)
    optimizers = [AdamW(ours, **OPTIONS, moments_dtype=torch.float32)]
    optimizers += [torch.optim.AdamW(theirs, **OPTIONS, fused=True)]
    for step in range(4):
        for own, other in pairs:
            own.grad = torch.randn_like(own)
            other.grad = own.grad.clone()
        for optimizer in optimizers:
            optimizer.grad_scale = torch.tensor(8.0)
            optimizer.found_inf = torch.tensor(float(step == 2))
            optimizer.step()
        for own, other in pairs:
            found, expected = optimizers[0].state[own], optimizers[1].state[other]
            assert torch.equal(own, other) and found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in found)
            assert found["step"] == step + (step < 2)


def test_adamw_copies_no_moments_of_the_weights_dtype_and_calls_each_hook_once():
    weights = [nn.Parameter(torch.ones(size)) for size in (2500, 400)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    torch.optim.AdamW(weights, fused=True)  # PyTorch wraps step() of a class with its first object
    optimizer = AdamW(weights, **OPTIONS, moments_dtype=torch.float32)
    optimizer.step()
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    held = sum(4 + 4 * weight.nbytes for weight in weights)
    kernels = Counter()

    class Watch(Peak):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            kernels[function.overloadpacket.__name__] += 1
            return super().__torch_dispatch__(function, types, args, kwargs)

    with patch.object(AdamW, "CHUNK", 1000), Watch() as peak:
        optimizer.step()
    assert {name: n for name, n in kernels.items() if name.startswith("_f")} == {
        "_foreach_add_": 1, "_fused_adamw_": 1,
    }  # fmt: skip
    assert peak.bytes <= held
    assert calls == ["pre", "post"]


def test_adamw_changes_nothing_of_bf16_moments_if_found_inf_is_set():
    weight = nn.Parameter(torch.randn(300))
    optimizer = AdamW([weight], **OPTIONS)
    weight.grad = torch.randn(300)
    optimizer.step()
    before = copy.deepcopy([weight, *optimizer.state[weight].values()])
    weight.grad[7] = torch.nan
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(map(torch.equal, before, [weight, *optimizer.state[weight].values()]))


def test_states_of_adamw_are_exchanged_with_pytorchs_and_copied_with_their_dtype():
    weight = nn.Parameter(torch.randn(300))
    weight.grad = torch.randn(300)
    narrow, wide = AdamW([weight], **OPTIONS), torch.optim.AdamW([weight], **OPTIONS, fused=True)
    wide.step()
    exact = wide.state[weight]["exp_avg_sq"]
    for optimizer in narrow, copy.deepcopy(narrow):
        optimizer.load_state_dict(copy.deepcopy(wide.state_dict()))
        (state,) = optimizer.state.values()
        assert state["step"] == 1 and torch.equal(state["exp_avg_sq"], exact.bfloat16())
        optimizer.step()
    wide.load_state_dict(narrow.state_dict())
    moment = wide.state[weight]["exp_avg_sq"]
    assert moment.dtype == torch.float32
    assert torch.equal(moment, narrow.state[weight]["exp_avg_sq"].float())


def test_betas_with_which_a_moment_could_not_shrink_are_rejected():
    """All bf16 numbers are a power of 2 times one of 128 mantissas."""
    mantissas = (1 + torch.arange(128) / 128).bfloat16()
    shrunk = lambda beta: (beta * mantissas.double()).bfloat16() < mantissas
    assert shrunk(0.996).all() and not shrunk(0.997).all() and not shrunk(0.999)[1:].any()
    weights = [nn.Parameter(torch.zeros(1))]
    AdamW(weights, betas=(0.9, 0.996))
    AdamW(weights, betas=(0.9, 0.9999), moments_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"betas=\(0.9, 0.997\): a moment in torch.bfloat16 would"):
        AdamW(weights, betas=(0.9, 0.997))
    with pytest.raises(ValueError, match="moments_dtype=torch.float16 is not bfloat16, float32 or"):
        AdamW(weights, moments_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"betas=\(0.9, 0.999\): a moment in torch.bfloat16 would"):
        AdamW([{"params": weights, "betas": (0.9, 0.999)}])
    small = [weights[0].detach().bfloat16()]
    with pytest.raises(ValueError, match=r"betas=\(0.9, 0.999\): a moment in torch.bfloat16 would"):
        AdamW(small, betas=(0.9, 0.999), moments_dtype=torch.float32)  # computed in the weights' dtype
    optimizer = AdamW(weights)
    with pytest.raises(ValueError, match="amsgrad=True is not supported"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "amsgrad": True})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match=r"betas=\(0.9, 0.999\): a moment in torch.bfloat16 would"):
        optimizer.load_state_dict(torch.optim.AdamW(weights).state_dict())


def test_updates_with_bf16_moments_are_right_to_8_percent_also_after_the_gradient_turns():
    gradient = torch.linspace(1, 2, 513)[:-1]
    updates = []
    for dtype in (torch.bfloat16, torch.float32):
        weight = nn.Parameter(torch.zeros(512))
        optimizer = AdamW([weight], lr=1.0, weight_decay=0.0, moments_dtype=dtype)
        for factor in [-2] * 200 + [1] * 200:
            weight.grad = factor * gradient
            before = weight.detach().clone()
            optimizer.step()
        updates.append(weight.detach() - before)
    errors = (updates[0] / updates[1] - 1).abs()
    assert 0.04 < errors.max() < 0.08


def test_the_host_waits_for_no_tensor_in_a_step_of_adamw():
    weight = nn.Parameter(torch.ones(4))
    optimizer = AdamW([weight], **OPTIONS)
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.ones(())
    for _ in range(2):
        weight.grad = torch.ones(4)
        with waits() as found:
            optimizer.step()
    assert not found


def test_a_step_of_adamw_needs_three_kernels_and_two_moments_in_fp32_for_each_chunk():
    weights = [nn.Parameter(torch.ones(size)) for size in [2500, *10 * [400]]]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = AdamW(weights, **OPTIONS)
    optimizer.step()
    held = sum(4 + weight.nbytes + weight.grad.nbytes + 2 * 2 * len(weight) for weight in weights)
    kernels = Counter()

    class Watch(Peak):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            kernels[function.overloadpacket.__name__] += 1
            return super().__torch_dispatch__(function, types, args, kwargs)

    with patch.object(AdamW, "CHUNK", 1000), Watch() as peak:
        optimizer.step()
    chunks = 8  # 1000, 1000, 500 + 400, four of 2 x 400, and 400
    expected = {"_foreach_add_": 1, "_foreach_copy_": 2 * chunks, "_fused_adamw_": chunks}
    assert {name: n for name, n in kernels.items() if name.startswith("_f")} == expected
    others = {"detach", "view", "split", "empty_like"}  # these compute nothing
    assert kernels.keys() - expected - others <= {n for n in kernels if "record_function" in n}
    assert peak.bytes <= held + 2 * 4 * 1000


# ---- what is sent, and what is held --------------------------------------------------------------


@on_ranks(1, soak(2), 3, soak(4), soak(6))
@pytest.mark.parametrize("stage", ALL)
def test_stages_send_2_2_2_and_3_times_the_parameters(stage):
    """DDP with ZeroRedundancyOptimizer sends 3 times. zero_rounds() has the factors of m."""
    model, optimizer = shard(stack(), stage)
    x, nbytes = torch.ones(2, 96), sum(p.nbytes for p in stack().parameters())
    train(model, optimizer, [x])
    one = reduce_scatter_bytes(nbytes, dist.get_world_size())
    for m in (1, 3) if stage in STAGES else (1,):
        with least_bytes(), count_bytes() as traffic:
            for i in range(m):
                with model.no_sync() if stage == 1 and i < m - 1 else nullcontext():
                    model(x).sum().backward()
            optimizer.step()
        times = {0: 2, "optimizer": 3, 1: 2, 2: 1 + m, 3: 3 * m}
        assert traffic.bytes() == times[stage] * one
        if stage in STAGES:
            assert traffic.bytes() == zero_bytes(stage, nbytes, dist.get_world_size(), m)
            assert traffic.bytes("all_gather_single") == zero_rounds(stage, m)[1] * one


@pytest.mark.parametrize("all_in_optimizer", [False, True])
@on_ranks(2)
def test_stage_2_gathers_frozen_weights_once_and_trained_ones_after_each_step(all_in_optimizer):
    net = stack()
    for block in net.blocks[1:]:
        block.requires_grad_(False)
    model = FullyShardedDataParallel(net, units=net.blocks, stage=2)
    parameters = [p for p in model.parameters() if all_in_optimizer or p.requires_grad]
    optimizer = torch.optim.AdamW(parameters)
    half = 96 * 96 * 4 // 2  # of one block, which is what a rank of two sends to gather or sum it
    for gathered in (4, 1, 1):
        with count_bytes() as traffic:
            train(model, optimizer, torch.ones(1, 2, 96))
        assert traffic.bytes("all_gather_single") == gathered * half
        assert traffic.bytes("reduce_scatter_single") == half


@on_ranks(2)
def test_ranks_may_change_different_trained_parameters_between_passes_of_stage_2():
    """As those optimizers do that hold only the pieces which have elements on their rank."""
    rank, _ = rank_and_size()
    net = stack(2)
    model = FullyShardedDataParallel(net, units=net.blocks, stage=2)
    x = torch.eye(96)
    model(x)
    with torch.no_grad():
        net.blocks[rank].weight.mul_(2)
    whole = model.state_dict()
    expected = x @ whole["blocks.0.weight"].T @ whole["blocks.1.weight"].T
    assert_close(model(x).detach(), expected)


@on_ranks(2)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_units_recomputed_as_one_are_gathered_in_turn_and_two_at_a_time(size):
    """Of 6 units, groups of 4 leave a last one of 2. The formula is for groups of equal size."""
    net, held = stack(6), []
    net.forward = lambda x: recompute_groups(net.blocks, size, x)
    model = FullyShardedDataParallel(net, units=net.blocks)
    gathered = lambda: sum(flat.gathering is not None for flat in model.flats)
    for block in net.blocks:
        block.register_forward_hook(lambda *_: held.append(gathered()))
    x, nbytes = torch.ones(2, 96, requires_grad=True), sum(p.nbytes for p in stack(6).parameters())
    with count_bytes() as traffic:
        for _ in range(2):
            model(x).sum().backward()
    groups = [min(size, 6 - begin) for begin in range(0, 6, size)]
    gathers = 6 + sum(group if group < 3 else 2 * group - 1 for group in groups)
    one = reduce_scatter_bytes(nbytes, dist.get_world_size())
    assert traffic.bytes("all_gather_single") == 2 * gathers * one // 6
    assert traffic.bytes("reduce_scatter_single") == 2 * one
    if 6 % size == 0:
        claimed = zero_bytes(3, nbytes, dist.get_world_size(), 2, recomputed=size)
        assert traffic.bytes() == pytest.approx(claimed)
    assert max(held) == 2 and len(held) == 2 * (6 + 6)  # after each forward, and the next one


def bytes_held(stage, **how):
    """Return the bytes per parameter that a rank holds after a backward that is not the last.

    At that point stage 1 holds whole gradients. All tensors must be freed with the model.
    """
    gc.freeze()
    model, optimizer = shard(stack(), stage, **how)
    x = torch.ones(1, 96)
    train(model, optimizer, [x])
    optimizer.zero_grad()
    with model.no_sync() if stage == 1 else nullcontext():
        model(x).sum().backward()
    del x
    held = bytes_of_new_tensors() / (4 * 96 * 96)
    del model, optimizer
    assert bytes_of_new_tensors() == 0
    return held


@on_ranks(1, 2, soak(3), soak(4))
@pytest.mark.parametrize("stage, half", [(0, False), *product(STAGES, (False, True))])
def test_a_rank_holds_16_bytes_per_parameter_or_its_shard_of_them_in_a_stage(stage, half):
    sizes = (2, 4, 12) if half else (4, 4, 8)
    if stage == 3 and half:  # the pieces of parameters are the 32-bit copy
        sizes = (0, 4, 12)
    how = {"param_dtype": torch.bfloat16} if half else {}
    how |= {} if stage else {"gradient_as_bucket_view": True}
    P = dist.get_world_size()
    claim = zero_memory(stage, P, *sizes)
    assert bytes_held(stage, **how) == pytest.approx(claim, abs=2e-3)  # step counters are small
    assert [zero_memory(stage, P) for stage in range(4)] == [16, 4 + 12 / P, 2 + 14 / P, 16 / P]


@on_ranks(2)
@pytest.mark.parametrize("stage", ALL)
def test_zero_grad_frees_the_memory_of_all_gradients(stage):
    gc.freeze()
    model, optimizer = shard(stack(), stage, torch.optim.SGD)
    x = torch.ones(1, 96)
    before = bytes_of_new_tensors()
    for _ in range(2):
        mean_square(model, x).backward()
        assert bytes_of_new_tensors() > before
        optimizer.step()
        optimizer.zero_grad()
        assert bytes_of_new_tensors() == before


@on_ranks(8)
def test_with_bf16_moments_a_rank_holds_14_7_3_and_a_half_or_1_and_a_half_bytes():
    """They are 2 + 4 + 8: zero_memory() says why, and why stage 3 keeps 0 + 4 + 8."""
    how = {"optimizer_class": AdamW, "param_dtype": torch.bfloat16}
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    held = [bytes_held(1, group=alone, replicate_group=dist.group.WORLD, **how)]  # as with DDP
    held += [bytes_held(stage, **how) for stage in STAGES]
    assert held == pytest.approx([14, 7, 3.5, 1.5], abs=2e-3)
    claims = [zero_memory(stage, 8, 2 * (stage < 3), 4, 8) for stage in range(4)]
    assert claims == [14, 7, 3.5, 1.5]
    assert [zero_memory(stage, 8, 2, 2, 8) for stage in range(4)] == [12, 5, 3.25, 1.5]


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_of_their_own_dtype_are_gathered_in_it_and_the_others_in_param_dtype(stage):
    """Bytes are counted in a step after the first one. Gradients travel in fp32."""
    net = stack(2)
    exact = net.blocks[1].weight
    with torch.no_grad():
        exact.fill_(1 + 2**-20)  # bf16 would round this to 1
    how = {"param_dtype": torch.bfloat16, "per_parameter": {exact: {"param_dtype": None}}}
    net.blocks[1].forward = lambda x: x.float() @ net.blocks[1].weight.t()
    model, optimizer = shard(net, stage, torch.optim.SGD, {"lr": 0.0}, **how)
    x = torch.ones(2, 96)
    seen = []
    net.blocks[1].register_forward_pre_hook(lambda block, _: seen.append(block.weight.clone()))
    with least_bytes(), count_bytes() as traffic:
        train(model, optimizer, [x])
    assert seen[0].dtype == torch.float32 and (seen[0] == 1 + 2**-20).all()
    gathers = zero_rounds(stage)[1]
    assert traffic.bytes("all_gather_single") == gathers * reduce_scatter_bytes(96 * 96 * (2 + 4), 2)
    assert traffic.bytes("reduce_scatter_single") == reduce_scatter_bytes(96 * 96 * (4 + 4), 2)


# ---- overlap and order ---------------------------------------------------------------------------


class Mixed(nn.Module):
    """A unit whose parameters form three flat buffers."""

    def __init__(self):
        super().__init__()
        make = lambda: nn.Linear(96, 96, bias=False)
        self.dense, self.apart, self.expert = make(), make(), make()

    def forward(self, x):
        return self.dense(self.apart(self.expert(x)))


@on_ranks(4)
@pytest.mark.parametrize("stage", STAGES)
def test_a_unit_computes_before_its_neighbours_collectives_are_waited_for(stage):
    """In two chunks of a pipeline, count the flat buffers in flight while each unit computes.

    Experts are replicated in pairs of ranks. Other parameters are sharded in a pair and replicated
    across pairs, so their gradients are summed twice, during the next two units' backward. The test
    also counts the gathered parameters during each computation, and after the step.
    """
    rank, under_way, pending, seen, held = dist.get_rank(), deque(), set(), [], []
    pair = [dist.new_group(members) for members in ([0, 1], [2, 3])][rank // 2]
    across = [dist.new_group(members) for members in ([0, 2], [1, 3])][rank % 2]

    def listen(event, operation, *messages):
        if event == "begin" and operation.async_op:
            pending.add(operation)
        elif event == "wait":
            pending.discard(operation)

    def note(*_):
        seen.append(Counter(operation.name for operation in pending))
        held.append(gathered())

    def gathered():
        storages = [flat.flat.untyped_storage() for chunk in chunks for flat in chunk.flats]
        sizes = {storage._cdata: storage.nbytes() for storage in storages}
        return sum(sizes.values()) // (3 * 96 * 96 * 4)

    def make_chunk():
        net = nn.Sequential(*(Mixed() for _ in range(4)))
        for unit in net:
            unit.dense.register_forward_hook(note)
            unit.dense.register_full_backward_hook(note)
        own = {unit.expert.weight: {"replicate_group": None} for unit in net}
        own |= {unit.apart.weight: {"apart": True} for unit in net}
        how = {"replicate_group": across, "per_parameter": own, "stage": stage}
        how |= {"under_way": under_way, "wait_in_backward": False}
        return FullyShardedDataParallel(net, pair, units=net, **how)

    chunks = make_chunk(), make_chunk()
    with observe(listen):
        chunks[1](chunks[0](torch.ones(1, 96, requires_grad=True))).sum().backward()
        for chunk in chunks:
            chunk.finish_grad_sync()
    gathers = [Counter(all_gather_single=3 * (unit < 3)) for unit in range(4)]
    assert seen[:8] == 2 * gathers
    for turn, found in enumerate(seen[8:]):
        sums = Counter(reduce_scatter_single=3 * (turn > 0), all_reduce=2 * (turn > 1))
        assert found == (sums + gathers[turn % 4] if stage == 3 else sums), turn
    assert not pending and not under_way
    # These are numbers of gathered units. Backward drops all units of a chunk at its end.
    assert (held, gathered()) == ((12 * [2] + 4 * [4], 0) if stage == 3 else (16 * [8], 8))


@on_ranks(2)
def test_the_last_unit_is_gathered_while_backward_runs_the_layers_after_it():
    """These layers belong to the root, which is gathered at the same time."""
    net, log = make_net(), []
    net.head.register_full_backward_hook(lambda *_: log.append("head"))
    model = FullyShardedDataParallel(net, units=net.blocks)

    def listen(event, operation, *_):
        if event == "begin" and operation.name == "all_gather_single":
            log.append("gather")

    loss = mean_square(model, own_part(make_data(4)))
    with observe(listen):
        loss.backward()
    assert log.index("head") == len(model._units[-1].flats) + len(model._root.flats)


@on_ranks(2)
def test_in_backward_the_next_unit_is_gathered_before_the_last_ones_gradients_are_summed():
    """The next computation waits for the former only. G: gather, S: sum."""
    net, log = stack(), []
    model = FullyShardedDataParallel(net, units=net.blocks)

    def listen(event, operation, *_):
        if event == "begin":
            log.append({"all_gather_single": "G", "reduce_scatter_single": "S"}[operation.name])

    loss = model(torch.ones(2, 96)).sum()
    with observe(listen):
        loss.backward()
    assert "".join(log) == "GG" + "GS" + "GS" + "SS"


# ---- what modules do -----------------------------------------------------------------------------


class PassOn(Block):
    """A block that returns one of its inputs beside its output."""

    def forward(self, x):
        return x | {"out": super().forward(x["out"])}


WAYS = {  # how a module uses its units
    **dict.fromkeys(("plain", "backwards", "two passes", "of a unit"), lambda block, x: block(x)),
    "twice": lambda block, x: block(block(x)),
    "in place": lambda block, x: block(x * 1.0).add_(1),
    "passed on": lambda block, x: sum(block({"out": x, "skip": x / 2}).values()),
    "recomputed": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    **{f"{n} recomputed as one": None for n in (2, 3, 4)},  # so that groups have 2 + 2, 3 + 1 and 4
}


class Odd(nn.Module):
    def __init__(self, how):
        super().__init__()
        kind = PassOn if how == "passed on" else Block
        self.blocks = nn.ModuleList(kind(7) for _ in range(4))
        self.last, self.how = nn.Linear(7, 7), how  # a layer in no unit
        self.blocks[3].norm.weight = self.blocks[0].norm.weight  # a weight in two units
        self.blocks[3].up.weight.requires_grad_(False)  # a unit of two flat buffers

    def forward(self, x):
        if self.how.endswith("as one"):
            return {"x": (self.last(recompute_groups(self.blocks, int(self.how[0]), x)), 3)}
        for block in self.blocks[:: -1 if self.how == "backwards" else 1]:
            x = WAYS[self.how](block, x)
        return {"x": (self.last(x), 3)}


@contextmanager
def gathers_that_are_late():
    """Delay each gather until its wait(); its memory is nan until then."""
    pending, gather = {}, zero.all_gather_single

    def begin(output, input, group, async_op=False):
        if not async_op:
            return gather(output, input, group)
        own = input.clone() if overlap(output, input) else input
        assert not any(overlap(output, other) for other in pending.values())
        pending[id(output)] = output.fill_(torch.nan)

        def wait():
            if pending.pop(id(output), None) is not None:
                assert output.untyped_storage().nbytes() > 0  # it has not been freed
                gather(output, own, group)

        return SimpleNamespace(wait=wait)

    with patch.object(zero, "all_gather_single", begin):
        yield
    assert not pending


def overlap(a, b):
    begins, ends = zip(*[(t.data_ptr(), t.data_ptr() + t.nbytes) for t in (a, b)])
    return max(begins) < min(ends)


@on_ranks(2)
@pytest.mark.parametrize("stage", [soak(1), 3])
@gathers_that_are_late()
def test_units_may_be_used_in_any_way_that_all_ranks_share(stage):
    """Gathers are waited for before parameters are used, and before their memory is reused.

    This also holds if a prefetched unit is never used, and after a pass that failed.
    """
    x = make_data(2 * dist.get_world_size()).requires_grad_()
    for how, number in product(WAYS, (0, 4)):  # number of units
        if how == "of a unit" and not number:
            continue
        torch.manual_seed(shifted(0))
        seen, net = [], Odd(how).double()

        def loss(model, x):
            if how == "two passes":  # two forwards, and one backward through both
                return sum(model(half)["x"][0].square().mean() for half in x.chunk(2)) / 2
            found = model(x)["x"][0]
            return (seen[-1] if how == "of a unit" else found).square().mean()

        net.blocks[1].register_forward_hook(lambda *args: seen.append(args[-1]))
        expected = gradients_alone(net, lambda net: loss(net, x))
        model = FullyShardedDataParallel(net, units=net.blocks[:number], stage=stage)
        net.blocks[1].register_forward_hook(lambda *args: seen.append(args[-1]))
        handle = net.blocks[1].register_forward_hook(fail)
        with pytest.raises(KeyError):
            model(x)
        handle.remove()
        model.finish_grad_sync()
        for _ in range(2):
            model.zero_grad()
            loss(model, own_part(x)).backward()
            assert_close(whole_gradients(net), expected, 1e-11)
            with torch.no_grad():
                model(x)


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_weights_loaded_after_a_forward_are_used_and_earlier_hooks_see_them_whole(stage):
    (net, other), shapes, x = (make_net(seed=0), make_net(seed=1)), [], own_part(make_data(4))
    hook = lambda block, _: shapes.append([p.shape for p in block.parameters()])
    net.blocks[0].register_forward_pre_hook(hook)
    model, _ = shard(net, stage)
    model(x)
    known = other.state_dict() | {"other": x}
    assert model.load_state_dict(known, strict=False) == ([], ["other"])
    assert_close(model(x), other(x))
    assert_close(model.state_dict(prefix="a."), other.state_dict(prefix="a."))
    assert shapes == 2 * [[p.shape for p in other.blocks[0].parameters()]]


@on_ranks(2)
def test_finish_grad_sync_waits_for_sums_that_are_all_still_under_way():
    """Until then, a first step has no gradient in any .grad."""
    net, x = make_net(), make_data(4)
    model = FullyShardedDataParallel(net, wait_in_backward=False)
    mean_square(model, own_part(x)).backward()
    model.finish_grad_sync()
    expected = gradients_alone(make_net(), lambda net: mean_square(net, x))
    assert_close(whole_gradients(net), expected)


@on_ranks(2)
@pytest.mark.parametrize("stage", [soak(1), soak(2), 3])
def test_finish_grad_sync_sums_gradients_of_passes_that_were_all_under_no_sync(stage):
    net, x = make_net(), make_data(4)
    model = FullyShardedDataParallel(net, units=net.blocks, stage=stage)
    with model.no_sync():
        for _ in range(2):
            mean_square(model, own_part(x)).backward()
    for _ in range(2):  # the second call finds nothing to do
        model.finish_grad_sync()
    expected = gradients_alone(make_net(), lambda net: 2 * mean_square(net, x))
    assert_close(whole_gradients(net), expected)


@on_ranks(2)
def test_a_sum_frees_whole_gradients_when_the_next_begins_or_at_the_end_of_a_forward():
    """A forward pass advances the sums: a reduce-scatter, then an all-reduce over replicas."""
    alone, under_way = [dist.new_group([r]) for r in range(2)][dist.get_rank()], deque()
    net, x, flats = make_net(), make_data(4), []
    how = {"replicate_group": alone, "wait_in_backward": False, "under_way": under_way}
    model = FullyShardedDataParallel(net, **how)

    def scatter(total, flat, reduce=zero.reduce_scatter_single, **how):
        flats.append(StorageWeakRef(flat.untyped_storage()))
        return reduce(total, flat, **how)

    with patch.object(zero, "reduce_scatter_single", scatter):
        losses = [mean_square(model, own_part(x)) for _ in range(2)]
        for loss in losses:
            loss.backward()
            assert [flat.expired() for flat in flats] == [True] * (len(flats) - 1) + [False]
        for left in (1, 0):
            mean_square(model, own_part(x))
            assert len(under_way) == left and flats[-1].expired()
    model.finish_grad_sync()
    expected = gradients_alone(make_net(), lambda net: 2 * mean_square(net, x))
    assert_close(whole_gradients(net), expected)


@on_ranks(2)
def test_a_gather_that_is_dropped_is_waited_for_so_that_it_cannot_write_later():
    flat = FullyShardedDataParallel(stack()).flats[0]
    with gathers_that_are_late():  # asserts at its end that no gather is pending
        flat.gather()
        flat.drop()


# ---- errors instead of silently wrong results ----------------------------------------------------


def late_all_reduce(*args, async_op=False, **kwargs):
    """Stand in for all_reduce(), but begin only in wait()."""
    run = lru_cache(partial(all_reduce, *args, **kwargs))
    return SimpleNamespace(wait=run) if async_op else run()


@on_ranks(2)
@pytest.mark.parametrize("failing, only_adds", [((1,), False), ((1,), True), soak((0, 1), True)])
@pytest.mark.parametrize("stage", [0, *STAGES])
@patch("ddp.all_reduce", late_all_reduce)
def test_training_continues_after_a_pass_that_failed(stage, failing, only_adds):
    """A forward fails on all ranks, and then a backward on all ranks or on one.

    If it is one, the other ranks wait for its messages. only_adds: the pass is under no_sync().
    """
    model, _ = shard(make_net(), stage)
    x, block, here = make_data(4), model.module.blocks[1], dist.get_rank() in failing
    handle = block.register_forward_hook(fail)
    with pytest.raises(KeyError):
        model(own_part(x))
    handle.remove()
    if stage:
        model.finish_grad_sync()
    handle = block.register_full_backward_hook(fail if here else lambda *_: None)
    loss = mean_square(model, own_part(x))
    with pytest.raises(KeyError) if here else nullcontext():
        with model.no_sync() if only_adds else nullcontext():
            loss.backward()
    handle.remove()
    is_refused = here and (stage or not only_adds)
    if is_refused:
        with pytest.raises(RuntimeError, match=r"failed[:,] finish_grad_sync\(\) ends it"):
            model(own_part(x))
    if is_refused or stage:  # a sharded module's ranks call it together
        model.finish_grad_sync()
    model.zero_grad()
    mean_square(model, own_part(x)).backward()
    expected = gradients_alone(make_net(), lambda net: mean_square(net, x))
    assert_close(whole_gradients(model.module), expected)


@on_ranks(2)
def test_a_backward_that_fails_inside_forward_is_ended_by_finish_grad_sync():
    net, x = make_net(), make_data(4)
    model = FullyShardedDataParallel(net, units=net.blocks)
    handles = [
        net.blocks[0].register_full_backward_hook(fail),
        net.blocks[1].register_forward_hook(lambda *arguments: arguments[-1].sum().backward()),
    ]
    with pytest.raises(KeyError):
        model(own_part(x))
    for handle in handles:
        handle.remove()
    with pytest.raises(RuntimeError, match=r"failed: finish_grad_sync\(\) ends it"):
        model(own_part(x))
    model.finish_grad_sync()
    model.zero_grad()
    mean_square(model, own_part(x)).backward()
    expected = gradients_alone(make_net(), lambda net: mean_square(net, x))
    assert_close(whole_gradients(net), expected)


@on_ranks(2)
def test_optimizers_that_are_wrong_on_shards_are_rejected():
    model, plain = FullyShardedDataParallel(make_net()), nn.Linear(2, 2)
    for name in ("LBFGS", "Adafactor", "Muon"):
        with pytest.raises(ValueError, match=f"{name} is wrong on shards"):
            ZeroRedundancyOptimizer(plain.parameters(), getattr(torch.optim, name))
    torch.optim.LBFGS(plain.parameters()).step(lambda: torch.zeros(()))
    with pytest.raises(ValueError, match="LBFGS is wrong on shards"):
        torch.optim.LBFGS(model.parameters()).step(lambda: torch.zeros(()))
    with pytest.warns(UserWarning, match="OwnSGD on shards must treat each element"):
        ZeroRedundancyOptimizer(plain.parameters(), type("OwnSGD", (torch.optim.SGD,), {}))


def move(parameter):
    parameter.data = parameter.data.clone()


def _convert(parameter):
    parameter.data = parameter.data.double()


CHANGES = {
    "converted": lambda net: _convert(net.blocks[1].up.weight),
    "replaced": lambda net: setattr(net.head, "bias", nn.Parameter(torch.zeros(7))),
    "frozen": lambda net: net.head.bias.requires_grad_(False),
    "moved": lambda net: move(net.blocks[1].up.weight),
    "thawed": lambda net: net.blocks[1].up.weight.requires_grad_(True),
}


class ReturnsAParameter(nn.Linear):
    def forward(self, x):
        return super().forward(x), self.weight[:1]


class Hides(nn.Linear):
    """A layer with a second output, which a script finds past the outputs of the model."""

    def forward(self, x):
        self.hidden = super().forward(x).tanh() @ self.weight
        return super().forward(x)


def around(forward, kind=nn.Linear, units=4, **how):
    """Return a sharded stack with the given forward and the given kind of first block."""
    net = stack()
    net.blocks[0] = kind(96, 96)
    net.forward = lambda x: forward(net.blocks, x)
    return FullyShardedDataParallel(net, units=net.blocks[:units], **how)


@on_ranks(2)
def test_uses_that_would_give_wrong_results_are_rejected():
    x, net = own_part(make_data(4)).requires_grad_(), make_net()
    y = torch.ones(1, 96, requires_grad=True)
    for name, change in CHANGES.items():
        model = FullyShardedDataParallel(make_net(torch.float32))
        change(model.module)
        with pytest.raises(RuntimeError, match=f"was .*{name}.*, and is sharded"):
            model(x.float())
    for units in ([net.blocks, net.blocks[0]], [net], [nn.Linear(1, 1)], [net.head, net.head]):
        with pytest.raises(ValueError, match=r"units\[\d\] is not a submodule, or inside of"):
            FullyShardedDataParallel(net, units=units)
    model, _ = shard(net, 1)
    loss, state = model(x).sum(), model.state_dict()
    with torch.no_grad():
        net.scale.mul_(2)
    recompute = partial(checkpoint, use_reentrant=False)
    parameter = around(lambda blocks, y: blocks[0](y)[0], ReturnsAParameter)
    inside, outside = around(recompute), around(lambda blocks, y: blocks(y))
    pair = around(lambda blocks, y: recompute(blocks[2:], recompute(blocks[:2], y)))
    three_of_four = lambda blocks: lambda y: blocks[3](blocks[2](blocks[0](y)))
    skipping = around(lambda blocks, y: checkpoint(three_of_four(blocks), y, use_reentrant=True))
    past = around(lambda blocks, y: blocks[1:](blocks[0](y).detach()), Hides)
    past_model = lambda: past(y).sum() + past.module.blocks[0].hidden.sum()
    # A set hides its tensor from pytree.
    hidden = around(lambda blocks, y: (blocks(y), {blocks(y)}), units=0, stage=1)
    for refused, message in (
        (loss.backward, "were changed between forward and backward"),
        (lambda: net.head.bias.register_hook(print), "'head.bias' is sharded, and register_hook"),
        (lambda: net.half(), "is sharded, and half may need it whole"),
        (lambda: FullyShardedDataParallel(net), "Parallel has cut these parameters"),
        (lambda: DistributedDataParallel(net), "Parallel has cut these parameters"),
        (lambda: ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD), "has cut these"),
        (lambda: copy.deepcopy(model), r"is not copied or pickled: state_dict\(\) is"),
        (lambda: model(x).sum().backward(create_graph=True), "has no gradients of gradients"),
        (lambda: model.load_state_dict(state | {"scale": torch.zeros(2)}), r"scale: \(2,\), not"),
        (lambda: model.load_state_dict(state | {"head.bias": torch.zeros(7, 1)}), r"\(7, 1\), not"),
        (lambda: model.load_state_dict(state | {"other": x}), 'Unexpected key.*: "other"'),
        (lambda: nn.Sequential(model).state_dict(), r"call state_dict\(\) of the sharded module"),
        (lambda: around(lambda blocks, y: {blocks(y)})(y), "return tensors that a pytree holds"),
        (lambda: parameter(y), r"units\[0\] returns a parameter, or its view: clone 'blocks.0"),
        (lambda: inside(y).sum().backward(), r"units\[\d\] is recomputed out of turn"),
        (lambda: pair(y).sum().backward(), "out of turn: .* or several with use_reentrant=True"),
        (lambda: skipping(y).sum().backward(), r"units\[1\] was skipped, and several are recomputed"),
        (lambda: outside.module.blocks[2](y), r"units\[2\] runs outside of the wrapped forward"),
        (lambda: recompute(outside, y).sum().backward(), "forward inside a pass"),
        (lambda: hidden(y)[1].pop().sum().backward(), "'blocks.3.weight' got a gradient past"),
        (lambda: past_model().backward(), "'blocks.0.* got a gradient past"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=message):
            refused()


@on_ranks(2)
def test_units_that_only_an_earlier_forward_has_run_count_as_skipped():
    y, orders = torch.ones(1, 96, requires_grad=True), iter([(0, 1, 2, 3), (0, 2, 3)])

    def forward(blocks, y):
        layers = nn.Sequential(*(blocks[number] for number in next(orders)))
        return checkpoint(layers, y, use_reentrant=True)

    model = around(forward)
    with torch.no_grad():
        model(y)
    with pytest.raises(RuntimeError, match=r"units\[1\] was skipped, and several are recomputed"):
        model(y).sum().backward()


class Learner(nn.Module):
    """A net whose forward changes its own weights in one of the ways of CHANGES_IN_FORWARD."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(shifted(0))
        self.embed, self.how = nn.Embedding(5, 7), how
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))

    def forward(self, tokens):
        if self.how == "max norm":
            x = nn.functional.embedding(tokens, self.embed.weight, max_norm=0.1)
        else:
            x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.how in CHANGES_IN_FORWARD:
            with torch.no_grad():
                CHANGES_IN_FORWARD[self.how](self)
        return x


CHANGES_IN_FORWARD = {  # {name: how forward changes a weight}
    "codebook": lambda net: net.embed.weight.copy_(2 * net.embed.weight),
    "codebook's data": lambda net: net.embed.weight.data.mul_(2),
    "codebook replaced": lambda net: setattr(net.embed, "weight", nn.Parameter(torch.ones(5, 7))),
    "a unit's data": lambda net: net.blocks[0].weight.data.mul_(2),
    "a unit's data replaced": lambda net: setattr(net.blocks[1].bias, "data", torch.ones(7)),
}


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_forward_that_changes_its_own_weights_is_rejected_on_every_rank(stage):
    changed = {"a unit's data": "blocks.0.weight", "a unit's data replaced": "blocks.1.bias"}
    for how in ("max norm", *CHANGES_IN_FORWARD):
        net = Learner(how)
        model = FullyShardedDataParallel(net, units=net.blocks, stage=stage)
        name = re.escape(changed.get(how, "embed.weight"))
        refused = "(forward has changed it|__set__ may need it whole)"
        with pytest.raises(RuntimeError, match=f"'{name}' is sharded, and {refused}"):
            model(torch.arange(5))
        if "replaced" not in how:
            net.how = "no change"
            model.finish_grad_sync()
            model(torch.arange(5))  # the earlier change is not held against a later forward


class Versioned(nn.Linear):
    """A layer whose saved weights say in which version of the class they were saved."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self.loaded_version = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_weights_are_saved_and_loaded_with_the_versions_of_their_modules(stage):
    net = nn.Sequential(Versioned(3, 3), nn.Linear(3, 3))
    model = FullyShardedDataParallel(net, units=[net[0]], stage=stage)
    saved = model.state_dict()
    assert saved._metadata == net.state_dict()._metadata
    model.load_state_dict(saved)
    assert net[0].loaded_version == 2
    model.load_state_dict(dict(saved))
    assert net[0].loaded_version is None


class WithExtraState(nn.Linear):
    extra = {"scale": 2}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_extra_state_is_saved_and_loaded_and_a_norm_without_gradients_is_zero(stage):
    net = nn.Sequential(WithExtraState(3, 3), nn.Linear(3, 3))
    model = FullyShardedDataParallel(net, units=[net[0]], stage=stage)
    assert model.clip_grad_norm_(1.0) == 0
    saved = model.state_dict()
    assert saved["0._extra_state"] == {"scale": 2}
    model.load_state_dict(saved | {"0._extra_state": "other"})
    assert net[0].extra == "other"


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_that_a_unit_shares_with_a_module_outside_of_units_is_in_the_root(stage):
    torch.manual_seed(shifted(0))
    embedding, block, head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    net, tokens = nn.Sequential(embedding, block, head).double(), torch.arange(7)
    alone = copy.deepcopy(net)
    model = FullyShardedDataParallel(net, units=[net[1], net[2]], stage=stage)
    for module in (model, alone):
        module(tokens).square().sum().backward()
    for piece, whole in zip(model.parameters(), alone.parameters(), strict=True):
        part = whole.grad.flatten()[piece.offset : piece.offset + len(piece)]
        assert_close(piece.grad.detach().flatten(), part)


class Counting(torch.optim.SGD):
    """An optimizer that keeps a number in its groups, as schedule-free ones do."""

    elementwise = True

    def step(self):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()


@on_ranks(2)
def test_what_an_optimizer_of_shards_writes_into_its_groups_is_kept():
    weight = nn.Parameter(torch.zeros(5))
    optimizer = ZeroRedundancyOptimizer([weight], Counting, lr=0.1)
    for _ in range(3):
        weight.grad = torch.ones(5)
        optimizer.step()
    assert optimizer.param_groups[0]["k"] == optimizer.state_dict()["param_groups"][0]["k"] == 3
    optimizer.param_groups[0]["lr"] = 0.5  # as a scheduler does
    weight.grad = torch.ones(5)
    optimizer.step()
    assert_close(weight, torch.full((5,), -0.8), 1e-6)


def test_a_stage_that_does_not_exist_is_refused():
    for stage in (0, 4, "3"):
        with pytest.raises(ValueError, match=rf"stage={stage!r} is not 1, 2 or 3"):
            FullyShardedDataParallel(nn.Linear(1, 1), stage=stage)


def _fused_step(parameter):
    """Double a parameter by a fused optimizer, which does not change its version counter."""
    gradient = parameter.grad
    parameter.grad = -parameter.detach()
    torch.optim.SGD([parameter], lr=1.0, fused=True).step()
    parameter.grad = gradient


WRITES = {  # ways in which scripts change a weight by hand
    "in place": lambda p: p.mul_(2),
    "data": lambda p: p.data.mul_(2),
    "data, copied into": lambda p: p.data.copy_(2 * p.data),
    "detached": lambda p: p.detach().mul_(2),
    "a view": lambda p: p.detach().view(-1)[:].mul_(2),
    "fused": lambda p: _fused_step(p),
    "for each": lambda p: torch._foreach_mul_([p.data], 2),
}


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("replaces", [False, True], ids=["step", "load"])
def test_backward_of_a_forward_before_the_last_step_is_rejected_also_after_another_forward(
    stage, replaces
):
    x = own_part(make_data(4))
    model, optimizer = shard(make_net(), stage)
    state = model.state_dict()
    model(x).sum().backward()
    loss = model(x).square().sum()
    if replaces:
        model.load_state_dict(state)
    else:
        optimizer.step()
    model(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_ranks(2)
def test_finish_grad_sync_sums_gradients_of_no_sync_also_beside_sums_that_are_under_way():
    x = own_part(make_data(4))
    net = make_net()
    alone = gradients_alone(make_net(), lambda net: net(make_data(4)).sum() * 2 / 2)
    model = FullyShardedDataParallel(net, wait_in_backward=False)
    losses = [model(x).sum() for _ in range(2)]
    losses[0].backward()
    with model.no_sync():
        losses[1].backward()
    model.finish_grad_sync()
    assert_close(whole_gradients(model.module), alone)


@on_ranks(2)
@pytest.mark.parametrize("owes", ["a backward in no_sync()", "sums under way"])
def test_a_step_and_a_clip_before_gradients_are_summed_are_refused(owes):
    """Otherwise the step would lack gradients in silence."""
    x = own_part(make_data(4))
    net = make_net()
    before = copy.deepcopy(net.state_dict())
    model = FullyShardedDataParallel(net, wait_in_backward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync() if owes == "a backward in no_sync()" else nullcontext():
        mean_square(model, x).backward()
    for early in (optimizer.step, partial(model.clip_grad_norm_, 1.0)):
        with pytest.raises(RuntimeError, match="are not summed yet: run a step's last backward"):
            early()
    assert_close({**model.state_dict()}, {**before})
    model.finish_grad_sync()
    model.clip_grad_norm_(1.0)
    optimizer.step()


class MaySkip(nn.Module):
    """A module whose only trained layer a rank may skip."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False)
        self.skips = False

    def forward(self, x):
        return x if self.skips else self.layer(x)


@on_ranks(2)
def test_a_rank_without_gradients_sums_what_the_others_have_kept_in_no_sync():
    """Its pieces have gradients of the step before."""
    net = MaySkip()
    model = FullyShardedDataParallel(net, units=[net.layer])
    x = torch.ones(2, 3, requires_grad=True)
    model(x).sum().backward()
    net.skips = dist.get_rank() == 1
    with model.no_sync():
        model(x).sum().backward()
    model.finish_grad_sync()
    assert whole_gradients(net)["layer.weight"].eq(2 + 2 / 2).all()


@on_ranks(2)
def test_sums_whose_gradients_never_came_are_ended_before_others_begin():
    """Otherwise this rank's next sums would meet those that its peers have sent already."""
    net = nn.Linear(3, 3)
    model = FullyShardedDataParallel(net, wait_in_backward=False)
    loss = model(torch.ones(1, 3)).sum()
    model.start_grad_sync(awaited=set(model.flats[0].whole))
    for begin in (model.start_grad_sync, loss.backward):
        with pytest.raises(RuntimeError, match="were to await have not come: call finish_grad_sync"):
            begin()
    model.finish_grad_sync()
    model(torch.ones(1, 3)).sum().backward()
    model.finish_grad_sync()
    assert whole_gradients(net)["bias"].eq(1).all()


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_weights_changed_by_hand_are_used_or_the_pass_is_rejected(stage):
    """Averages, swaps and optimizers of one's own write through .data.

    After a write between forward and backward, no stage can compute gradients.
    """
    x = own_part(make_data(4))
    for how, write in WRITES.items():
        net, alone = make_net(), make_net()
        model, _ = shard(net, stage)
        loss = model(x).sum()
        with torch.no_grad():
            for parameter in (*net.parameters(), *alone.parameters()):
                write(parameter)
        with pytest.raises(RuntimeError, match="were changed between forward and backward"):
            loss.backward()
        assert_close(model(x), alone(x))
        assert_close(model.state_dict(), alone.state_dict())


@on_ranks(4)
def test_an_overflow_in_one_ranks_part_skips_the_step_of_all_that_split_or_shard_the_module():
    """tensor_parallel.py splits it over ranks 0, 2 and 1, 3, and each part has two shards."""
    tp_group, number = interleaved_group(2, 2)
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    layers = [
        tensor_parallel.ColumnParallelLinear(8, 12, group=tp_group),
        tensor_parallel.RowParallelLinear(12, 8, group=tp_group),
    ]
    model = FullyShardedDataParallel(nn.Sequential(*layers), pairs[dist.get_rank() // 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scaler.scale(mean_square(model, torch.ones(5, 8))).backward()
    if dist.get_rank() == 0:
        layers[0].weight.grad.fill_(torch.inf)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**7
    assert all(map(torch.equal, before, (p.detach() for p in model.parameters())))


@on_ranks(2)
def test_a_step_of_the_optimizer_of_shards_between_forward_and_backward_is_noticed():
    """Autograd compares versions of what it has saved, here a weight; the step is not in place."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    net(torch.ones(1, 3)).sum().backward()
    loss = net(torch.ones(1, 3)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_ranks(2)
def test_a_sharded_module_may_be_freed_while_an_optimizer_steps():
    models = [FullyShardedDataParallel(nn.Linear(4, 4))]

    def free(*_):
        models.clear()
        gc.collect()

    hooks = [register_optimizer_step_pre_hook(hook) for hook in (free, lambda *_: None)]
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=1.0).step()
    for hook in hooks:
        hook.remove()
    assert weight.item() == -1 and not models


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_another_ranks_state_of_an_optimizer_is_rejected_at_the_step_and_ones_own_resumes(stage):
    batches = [own_part(make_data(4, seed)) for seed in range(3)]
    model, optimizer = shard(make_net(), stage)
    train(model, optimizer, batches[:2])
    saved = copy.deepcopy((whole(model), optimizer.state_dict()))
    train(model, optimizer, batches[2:])
    other, optimizer = shard(make_net(), stage)
    other.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(other, optimizer, batches[2:])
    assert equal(whole(other), whole(model))
    rank = dist.get_rank()
    _, optimizer = shard(make_net(), stage)
    optimizer.load_state_dict(gather_objects(saved[1])[1 - rank])
    own = rf"of the shards \['{1 - rank} of 2'\], not \['{rank} of 2'\]"
    with pytest.raises(ValueError, match=own):
        optimizer.step()


@on_ranks(4)
def test_another_tensor_parallel_parts_state_of_an_optimizer_is_rejected_at_the_step():
    """Ranks 0, 1 and 2, 3 split a weight. Ranks 0, 2 and 1, 3 shard a part of it."""
    rank = dist.get_rank()
    splits, shards = [
        [dist.new_group(ranks) for ranks in pairs][which]
        for pairs, which in ((([0, 1], [2, 3]), rank // 2), (([0, 2], [1, 3]), rank % 2))
    ]

    def train_once(state=None):
        layer = tensor_parallel.ColumnParallelLinear(8, 8, group=splits)
        model = FullyShardedDataParallel(layer, shards)
        optimizer = torch.optim.AdamW(model.parameters())
        if state is not None:
            optimizer.load_state_dict(state)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        return optimizer.state_dict()

    saved = gather_objects(train_once())
    train_once(saved[rank])
    with pytest.raises(ValueError, match="the optimizer's state is of the shards"):
        train_once(saved[rank ^ 1])


@on_ranks(2)
def test_the_shape_of_a_piece_does_not_pass_for_that_of_the_whole():
    """For example, muP divides the learning rate of a matrix by its number of columns."""
    net = nn.Linear(8, 8)
    model = FullyShardedDataParallel(net)
    model(torch.ones(2, 8)).sum().backward()
    for of in net.weight, net.weight.grad:
        for use in (
            lambda p: 0.1 / p.shape[-1], lambda p: p.size(-1), lambda p: p.numel(),
            lambda p: p.nelement(), lambda p: p.stride(0), lambda p: p.nbytes,
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="'weight' is sharded, and .*whole_shape"):
                use(of)
        assert of.dim() == of.ndim == 2
    assert net.weight.whole_shape == (8, 8)


@on_ranks(2)
def test_a_sum_that_found_no_memory_to_begin_is_begun_by_finish_grad_sync():
    """Otherwise this rank's next sums would meet the one that its peers have begun."""
    net, x = make_net(torch.float32), make_data(4).float()
    model = FullyShardedDataParallel(net, units=net.blocks)
    sizes = {flat.layout.shard_size for flat in model.flats}
    failing = [True]

    def new_empty(tensor, *size, make=torch.Tensor.new_empty, **how):
        if failing and size[0] in sizes:
            failing.clear()
            raise MemoryError
        return make(tensor, *size, **how)

    loss = mean_square(model, own_part(x))
    with count_bytes() as traffic, patch("torch.Tensor.new_empty", new_empty):
        with pytest.raises(MemoryError):
            loss.backward()
        model.finish_grad_sync()
    failed = traffic.bytes("reduce_scatter_single")
    model.zero_grad()
    with count_bytes() as traffic:
        mean_square(model, own_part(x)).backward()
    assert failed == traffic.bytes("reduce_scatter_single")
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_forward_that_failed_is_remembered_until_finish_grad_sync_says_that_all_have(stage):
    """If one rank went on alone, its next gathers would meet others of their ranks."""
    net, x = make_net(), make_data(4)
    model = FullyShardedDataParallel(net, units=net.blocks, stage=stage)
    handle = net.blocks[1].register_forward_hook(fail)
    for mode in (nullcontext, torch.no_grad):
        with pytest.raises(KeyError), mode():
            model(own_part(x))
        with pytest.raises(RuntimeError, match=r"failed: finish_grad_sync\(\) ends it"):
            model(own_part(x))
        model.finish_grad_sync()
    handle.remove()
    mean_square(model, own_part(x)).backward()
    expected = gradients_alone(make_net(), lambda net: mean_square(net, x))
    assert_close(whole_gradients(net), expected)


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_of_the_module_drops_what_no_sync_has_kept(stage):
    """For example, after a microbatch whose loss is not a number on one rank."""
    net, x = make_net(), make_data(4)
    model = FullyShardedDataParallel(net, units=net.blocks, stage=stage)
    with model.no_sync():
        (mean_square(model, own_part(x)) * float("nan")).backward()
    if dist.get_rank() == 0:
        model.zero_grad()
    else:
        model.zero_grad(set_to_none=False)
    mean_square(model, own_part(x)).backward()
    expected = gradients_alone(make_net(), lambda net: mean_square(net, x))
    assert_close(whole_gradients(net), expected)


class Calls(nn.Linear):
    """A layer that calls a layer of another module, to which it has a plain reference."""

    def forward(self, x):
        weight = self.weight
        return self.other[0](x) @ weight.T


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_unit_calls_another_but_not_in_stage_3(stage):
    """There units 0 and 2 share their memory, so weight would be that of unit 0."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Calls(4, 4, bias=False))
    net[2].other = [net[0]]
    x = torch.ones(1, 4)
    expected = net(x).detach()
    model = FullyShardedDataParallel(net, units=net, stage=stage)
    if stage == 3:
        with pytest.raises(RuntimeError, match=r"units\[0\] is called inside units\[2\]"):
            model(x)
    else:
        assert_close(model(x), expected)


optimizer_of_torch = inspect.getmodule(torch.optim.Optimizer)


@on_ranks(1)
def test_optimizers_choose_the_same_kernels_for_pieces_as_for_parameters():
    """On GPUs, the default is the _foreach kernel for exact types that PyTorch knows."""
    net = nn.Linear(3, 3)
    model, chosen = FullyShardedDataParallel(net), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    choose = optimizer_of_torch._default_to_fused_or_foreach
    seen = lambda *args, **how: chosen.append(choose(*args, **how)) or chosen[-1]
    model(torch.ones(1, 3)).sum().backward()
    kernels = patch.object(
        optimizer_of_torch, "_get_foreach_kernels_supported_devices", lambda: ["cpu"]
    )
    with kernels, patch("torch.optim.sgd._default_to_fused_or_foreach", seen):
        optimizer.step()
    assert chosen == [(False, True)]


class Headed(nn.Module):
    """A net that may return its head's weight, for a loss outside."""

    def __init__(self, hold):
        super().__init__()
        torch.manual_seed(shifted(0))
        self.hold, self.head = hold, nn.Linear(7, 9, bias=False)
        self.blocks = nn.ModuleList([Block(7)])

    def forward(self, x):
        return self.blocks[0](x), self.hold(self.head.weight)


def outside(use):
    """Return a loss that uses the head's weight itself, by use(hidden, weight)."""
    return lambda net, out: use(out[0], net.head.weight).square().mean()


returned = lambda net, out: (out[0] @ out[1].view(9, 7).t()).square().mean()
SHARDED = "'head.weight' is sharded, and .* may need it whole: use it in the wrapped forward"
RETURNED = "the module returns a parameter, or its view: clone 'head.weight'"
LOSSES = {  # (what forward returns of the weight, the loss, why stage 3 rejects it)
    "clone": (torch.clone, returned, None),
    "weight": (lambda weight: weight, returned, RETURNED),
    "view": (lambda weight: weight.t().t(), returned, RETURNED),
    "rows": (lambda weight: weight[3:], lambda net, out: out[1].sum(), RETURNED),
    "linear": (torch.sum, outside(nn.functional.linear), SHARDED),
    "matmul": (torch.sum, outside(lambda x, weight: x @ weight), SHARDED),
    "t": (torch.sum, outside(lambda x, weight: x @ weight.t()), SHARDED),
    "T": (torch.sum, outside(lambda x, weight: x @ weight.T), SHARDED),
    "normalized": (torch.sum, outside(lambda x, w: w / w.norm(dim=1, keepdim=True)), SHARDED),
}


@on_ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_loss_outside_gets_a_clone_of_a_weight_or_is_rejected_with_its_name(stage):
    """Stages 1 and 2 keep what forward returns. The pieces can be used as usual after backward."""
    x = make_data(4)
    for hold, loss, message in LOSSES.values():
        net = Headed(hold).double()
        expected = gradients_alone(net, lambda net: loss(net, net(x))) if message != SHARDED else 0
        model = FullyShardedDataParallel(net, units=net.blocks, stage=stage)
        if message == SHARDED or (message and stage == 3):
            with pytest.raises(RuntimeError, match=message):
                loss(net, model(own_part(x)))
        elif message != RETURNED or loss is returned:
            loss(net, model(own_part(x))).backward()
            assert_close(whole_gradients(net), expected)


@on_ranks(3)
def test_the_demonstration_measures_what_it_claims():
    for stage, line in zip(STAGES, demonstration(zero).splitlines(), strict=True):
        sent, claimed = map(int, re.findall(r"\d+", line.split(":")[1])[:2])
        assert line.startswith(f"stage {stage}")
        assert sent == claimed == (3 if stage == 3 else 2) * 6 * 480 * 480 * 4 * 2 // 3
        assert float(line.split()[-1]) < 1e-5
