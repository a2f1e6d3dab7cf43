"""ZeRO's stages against one process on the whole batch, and what they send and hold, counted."""

import copy
import gc
import io
import re
import weakref
from contextlib import nullcontext, redirect_stdout
from functools import partial
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
    FullyShardedDataParallel, ZeroRedundancyOptimizer, largest_model, memory_ledger, zero_bytes,
    zero_memory,
)

from hybrid import GPT, GPTConfig, initial_value, initialize
from tensor_parallel import partial_parameters, shards_of, sum_partial_gradients

from gpu_counts import waits
from nccl_replay import record, replay
from ranks import least_bytes, on_ranks, run

STAGES = (1, 2, 3)  # 0 is DistributedDataParallel
CAP = 2e-3  # MiB: several rows


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
    """(model, optimizer) of a stage, whose step() trains `net`; stage 0 is DDP."""
    defaults = defaults or {"lr": 0.01}
    if stage in (0, 3):
        if stage == 3:
            model = FullyShardedDataParallel(net, group, units=net.blocks, **how)
        else:
            model = DistributedDataParallel(net, group, bucket_cap_mb=CAP, **how)
        return model, optimizer_class(_groups(net.parameters()), **defaults)
    optimizer = ZeroRedundancyOptimizer(
        _groups(net.parameters()),
        optimizer_class,
        group,
        shard_gradients=stage == 2,
        bucket_cap_mb=CAP,
        **how,
        **defaults,
    )
    return net, optimizer


def _trainers(stages=STAGES, optimizer_class=torch.optim.SGD, lr=0.1):
    """[(model, optimizer, what it takes of a batch)] of one process alone and of each stage."""
    alone = _net()
    plain = optimizer_class(_groups(alone.parameters()), lr=lr)
    shards = [_shard(_net(), stage, optimizer_class, {"lr": lr}) for stage in stages]
    return [(alone, plain, lambda x: x), *((*shard, _own_part) for shard in shards)]


def _flats(model, optimizer):
    if isinstance(model, FullyShardedDataParallel):
        return model._units.rows
    return optimizer._shards.rows if hasattr(optimizer, "_shards") else []


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


def _whole(model):
    """The weights, full, by the plain module's names."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: value.clone() for name, value in model.state_dict().items()}


def _close(actual, expected, tolerance=1e-12):
    assert len(expected) > 0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# ---- training ------------------------------------------------------------------------------------


def _equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def _train_all(dtype, tolerance):
    """Ten steps by one process, by DDP and by each stage; their weights, alike on all ranks."""
    world_size = dist.get_world_size()
    batches = [_data(2 * world_size, seed, dtype) for seed in range(10)]
    alone = _net(dtype)
    optimizer = torch.optim.AdamW(_groups(alone.parameters()), lr=0.01)
    expected = _train(alone, optimizer, batches)
    weights = []
    for stage in (0, *STAGES):
        net = _net(dtype, seed=dist.get_rank())  # all start as the first rank's
        model, optimizer = _shard(net, stage)
        losses = _train(model, optimizer, [_own_part(x) for x in batches])
        dist.all_reduce(losses)
        _close(losses / world_size, expected, tolerance)
        weights.append(_whole(model))
        _close(weights[-1], alone.state_dict(), tolerance)
    assert all(_equal(*pair) for pair in zip(weights, gather_objects(weights)[0]))
    return weights


@on_ranks(1, 2, 3, 4)
def test_ten_steps_of_every_stage_are_those_of_one_process():
    _train_all(torch.float64, 1e-10)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 0.2)])
def test_stages_that_sum_in_the_same_order_have_the_same_bits(dtype, tolerance):
    ddp, first, second, third = _train_all(dtype, tolerance)
    assert _equal(first, second)
    if dist.get_world_size() <= 2:  # a + b is b + a
        assert _equal(ddp, first) and _equal(first, third)


OPTIMIZERS = [
    ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("AdamW", {"lr": 0.01, "foreach": True}),
    ("Adagrad", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5}),
    ("Adadelta", {"lr": 0.5}),
    ("NAdam", {"lr": 0.01}),
    ("RAdam", {"lr": 0.01}),
    ("Adamax", {"lr": 0.01}),
    ("ASGD", {"lr": 0.01}),
    ("Rprop", {"lr": 0.01}),
]


@on_ranks(2)
def test_any_optimizer_that_treats_elements_alone_runs_on_shards():
    batches = [_data(6, seed) for seed in range(3)]
    for name, defaults in OPTIMIZERS:
        optimizer_class, alone = getattr(torch.optim, name), _net()
        groups = [{"params": [p]} for p in alone.parameters()] if name == "Rprop" else None
        if name == "Rprop":  # has no weight decay
            _train(alone, optimizer_class(groups, **defaults), batches)
            net = _net()
            optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class, **defaults)
            _train(net, optimizer, [_own_part(x) for x in batches])
            _close(net.state_dict(), alone.state_dict(), 1e-9)
            continue
        _train(alone, optimizer_class(_groups(alone.parameters()), **defaults), batches)
        for stage in STAGES:
            model, optimizer = _shard(_net(), stage, optimizer_class, defaults)
            _train(model, optimizer, [_own_part(x) for x in batches])
            _close(_whole(model), alone.state_dict(), 1e-9)


def _accumulate(set_to_none):
    """Three backward passes a step, clipping, a schedule of rates, and a closure."""
    world_size = dist.get_world_size()
    alone = _net()
    optimizer = torch.optim.AdamW(_groups(alone.parameters()), lr=0.01)
    trainers = {None: (alone, optimizer)}
    trainers |= {stage: _shard(_net(), stage) for stage in STAGES}
    schedules = {
        stage: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for stage, (_, optimizer) in trainers.items()
    }
    norms = {stage: [] for stage in trainers}
    for step, norm_type in enumerate((2.0, 1.0, float("inf"), 2.0)):
        x = _data(6 * world_size, step)
        for stage, (model, optimizer) in trainers.items():
            optimizer.zero_grad(set_to_none=set_to_none)

            def closure():
                loss = torch.tensor(0.0)
                for part in (x if stage is None else _own_part(x)).chunk(3):
                    (model(part).square().mean() / 3).backward()
                    loss += 1
                return loss

            if step == 3:
                assert optimizer.step(closure) == 3
                continue
            closure()
            if stage is None:
                trained = [p for p in alone.parameters() if p.requires_grad]
                norm = nn.utils.clip_grad_norm_(trained, 0.05, norm_type)
            else:
                norm = (model if stage == 3 else optimizer).clip_grad_norm_(0.05, norm_type)
            norms[stage].append(norm.item())
            optimizer.step()
            schedules[stage].step()
    for stage in STAGES:
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
    """Two steps without zero_grad(): the second sees the sum; module.zero_grad() in place of it."""
    x = _data(4 * dist.get_world_size())
    (alone, *_), *_ = trainers = _trainers(range(4))
    for stage, (model, optimizer, part) in enumerate(trainers, -1):
        for step in range(3):
            model(part(x)).square().mean().backward()
            optimizer.step()
            if step == 1 and stage != 2:
                model.zero_grad()
            elif step == 1:  # a module does not know of stage 2's shards
                optimizer.zero_grad()
    for model, *_ in trainers[1:]:
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
    """Rank r uses branch r % 2 of each block: the other one counts as zero there."""
    rank, world_size = rank_and_size()
    x = _data(2 * world_size)
    torch.manual_seed(0)
    alone = _Branches().double()
    parts = enumerate(x.chunk(world_size))
    sum(alone(part, r % 2).square().mean() / world_size for r, part in parts).backward()
    for stage in STAGES:
        net = copy.deepcopy(alone)
        net.zero_grad()
        model, optimizer = _shard(net, stage, torch.optim.SGD, {"lr": 1.0})
        model(_own_part(x), rank % 2).square().mean().backward()
        optimizer.step()
        expected = {
            name: p.detach() - (1 if p.ndim == 2 else 0.02) * (
                p.grad + (0.1 if p.ndim == 2 else 0) * p.detach()
            )
            for name, p in alone.named_parameters()
        }
        _close(_whole(model), expected)


class _Small(nn.Module):
    """Fewer elements than ranks, an empty tensor, and no gradient for a whole row."""

    def __init__(self):
        super().__init__()
        self.blocks = ()
        self.a, self.b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(0, 3))
        self.c, self.d = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(5).bfloat16())

    def forward(self):
        return self.a.sum() + self.b.sum() + 2 * self.c.sum()


@on_ranks(4)
def test_tensors_smaller_than_the_group():
    for stage in STAGES:
        model, optimizer = _shard(_Small(), stage, torch.optim.SGD, {"lr": 0.5})
        model().backward()
        optimizer.step()
        weights = _whole(model)
        assert weights["a"].item() == pytest.approx(0.98) and weights["b"].shape == (0, 3)
        assert weights["c"].tolist() == pytest.approx([0.96, 0.96])
        assert weights["d"].tolist() == [1] * 5 and weights["d"].dtype == torch.bfloat16


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
    for stage in (0, *STAGES):
        net = _State(10.0 + rank)
        model, _ = _shard(net, stage, group=group)
        start = _whole(model) | (dict(net.named_buffers()) if stage in (0, 3) else {})
        for name, tensor in start.items():
            if stage in (0, 3) or name in dict(net.named_parameters()):  # optimizers see no buffers
                assert (tensor == 10 + (members or [0])[0]).all(), (stage, name)


class _Cast(nn.Module):
    """Notes the dtypes that its forward sees."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, scale, index):
        self.seen = [t.dtype for t in (x, scale["s"], index, self.layer.weight)]
        return self.layer(x * scale["s"])[index]


@on_ranks(2)
def test_inputs_are_cast_to_the_dtype_of_gathered_parameters():
    model = FullyShardedDataParallel(_Cast(), param_dtype=torch.bfloat16)
    index = torch.tensor([0])
    output = model(torch.ones(2, 3), scale={"s": torch.ones(3)}, index=index)
    assert output.dtype == torch.bfloat16
    assert model.module.seen == [torch.bfloat16, torch.bfloat16, torch.int64, torch.bfloat16]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@on_ranks(3)
@pytest.mark.parametrize("factor", [1, 5.0])
def test_gradients_are_divided_by_the_given_factor(factor):
    """SGD's step is the sum of the ranks' gradients over the factor."""
    x = _data(2 * dist.get_world_size())
    alone = _net()
    for part in x.chunk(dist.get_world_size()):
        alone(part).square().sum().backward()
    torch.optim.SGD(alone.parameters(), lr=0.001 / factor).step()
    for stage in STAGES:
        model, optimizer = _shard(
            _net(), stage, torch.optim.SGD, {"lr": 0.001}, gradient_divide_factor=factor
        )
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.001, 0.0
        model(_own_part(x)).square().sum().backward()
        optimizer.step()
        _close(_whole(model), alone.state_dict())


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, *STAGES])
def test_a_subgroup_trains_by_itself(stage):
    group = [dist.new_group(members) for members in ([0, 2], [1, 3])][dist.get_rank() % 2]
    batches, alone = [_data(4, seed) for seed in range(2)], _net()
    _train(alone, torch.optim.AdamW(_groups(alone.parameters()), lr=0.01), batches)
    model, optimizer = _shard(_net(), stage, group=group)
    _train(model, optimizer, [_own_part(x, group) for x in batches])
    _close(_whole(model), alone.state_dict(), 1e-9)


@on_ranks(4)
def test_replicas_of_shards_that_differ_are_an_error():
    """Alike inside each group of shards, not across."""
    rank = dist.get_rank()
    shards = [dist.new_group(members) for members in ([0, 1], [2, 3])][rank // 2]
    replicas = [dist.new_group(members) for members in ([0, 2], [1, 3])][rank % 2]
    for stage in STAGES:
        net = _net()
        net.head.bias.requires_grad_(rank < 2)
        with pytest.raises(ValueError, match=r"rank 1 of the group has .*\(7,\) .* False, rank 0"):
            _shard(net, stage, group=shards, replicate_group=replicas)


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
        row = layout.pack(list(unit.parameters()))
        shards.append((row.chunk(world_size)[rank].clone().requires_grad_(), layout))
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
    batches, alone = [_data(8, s) for s in range(2)], _net()
    _train(alone, torch.optim.AdamW(_groups(alone.parameters()), lr=0.01), batches)
    for stage in STAGES:
        net = _net(seed=rank)
        model, optimizer = _shard(net, stage, group=shards, replicate_group=replicas)
        with least_bytes(), count_bytes() as traffic:
            _train(model, optimizer, [_own_part(x) for x in batches])
        _close(_whole(model), alone.state_dict(), 1e-9)
        flats = [flat for flat in _flats(model, optimizer) if flat.pieces[0].requires_grad]
        shard = 8 * sum(flat.layout.shard_size for flat in flats)
        # a shard of the gradients, all-reduced between two replicas, in each step
        across = traffic.bytes("all_reduce", replicas)
        assert across == traffic.bytes(group=replicas) == 2 * all_reduce_bytes(shard, 2)
        assert traffic.bytes("all_reduce", shards) == 0


# ---- stage 3 across tensor and sequence parallelism ----------------------------------------------


def _gpt(config, group):
    model = GPT(config, group).double()
    initialize(model, partial(initial_value, layers=config.layers, seed=0))
    return model


def _loss(gpt, model, tokens, count):
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return gpt.token_losses(model(inputs), targets).sum() / count


@on_ranks(4)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_pieces_of_a_split_model_sum_and_count_as_their_wholes(kv_heads):
    """2 replicas of 2 tensor-parallel ranks; neither divides the vocabulary."""
    rank = dist.get_rank()
    tp_group = [dist.new_group(members) for members in ([0, 1], [2, 3])][rank // 2]
    dp_group = [dist.new_group(members) for members in ([0, 2], [1, 3])][rank % 2]
    alone = [dist.new_group([r]) for r in range(4)][rank]
    dist.barrier()
    sizes = {"layers": 2, "hidden": 12, "heads": 4, "seq_len": 8, "vocab_size": 7}
    plain = _gpt(GPTConfig(**sizes, kv_heads=kv_heads), alone)
    tokens = torch.randint(7, (4, 9), generator=torch.Generator().manual_seed(0))
    _loss(plain, plain, tokens, 32).backward()
    split = _gpt(GPTConfig(**sizes, kv_heads=kv_heads, sequence_parallel=True), tp_group)
    blocks, shards = split.transformer["h"].values(), shards_of(split)
    for name, parameter in split.named_parameters():
        if name in shards:
            parameter.sharded = True  # so that copies have a row of their own, cut alike
    model = FullyShardedDataParallel(split, dp_group, units=blocks, gradient_divide_factor=1)
    for _ in range(2):
        model.zero_grad()
        _loss(split, model, tokens.chunk(2)[rank // 2], 32).backward()
        sum_partial_gradients(partial_parameters(split), tp_group)
    square, expected = torch.zeros((), dtype=torch.float64), dict(plain.named_parameters())
    for name, piece in model.named_parameters():
        if name in shards or dist.get_rank(tp_group) == 0:
            square += piece.grad.square().sum()
        whole = torch.zeros(piece.whole_shape.numel(), dtype=torch.float64)
        whole[piece.first : piece.first + len(piece)] = piece.grad
        dist.all_reduce(whole, group=dp_group)
        wanted = expected.pop(name).grad
        wanted = shards[name].cut(wanted, tp_group) if name in shards else wanted
        _close(whole.view(piece.whole_shape), wanted, 1e-11)
    assert not expected
    dist.all_reduce(square)
    norm = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert square.sqrt().item() == pytest.approx(norm.item(), rel=1e-11)


# ---- 16-bit parameters, 32-bit copies ------------------------------------------------------------


def _exact_weights(batches, parts, wide):
    """The oracle: fp32 weights after AdamW's steps with the gradients of a bfloat16 copy.

    Of each part of a batch alone; wide: a part's own are added up in fp32, too.
    """
    exact = _net(torch.float32)
    optimizer = torch.optim.AdamW(_groups(exact.parameters()), lr=0.01)
    for x in batches:
        rounded = copy.deepcopy(exact).bfloat16()
        for p in rounded.parameters():
            p.grad_dtype = torch.float32 if wide else None
        for part in x.bfloat16().chunk(parts):
            rounded.zero_grad()
            rounded(part).square().mean().backward()
            for p, q in zip(exact.parameters(), rounded.parameters()):
                if p.requires_grad:
                    p.grad = (0 if p.grad is None else p.grad) + q.grad.float() / parts
        optimizer.step()
        optimizer.zero_grad()
    return exact


def _rounded_net(seed=0):
    """An fp32 net without what an optimizer does not convert."""
    net = _net(torch.float32, seed)
    net.shift = net.shift.bfloat16()
    net.blocks[1].up.weight.data = net.blocks[1].up.weight.bfloat16()
    return net


@on_ranks(1, 3)
@pytest.mark.parametrize("reduce_dtype", [torch.float32, None])
def test_a_32_bit_copy_of_the_shard_is_updated_by_16_bit_gradients(reduce_dtype):
    world_size, steps = dist.get_world_size(), 5
    batches = [_data(2 * world_size, s, torch.float32) for s in range(steps)]
    exacts = [_exact_weights(batches, world_size, wide) for wide in (False, True)]
    for stage in STAGES:  # in stage 1 the two gradients of a tied weight meet in .grad
        exact = exacts[stage == 1 and reduce_dtype == torch.float32]
        net = _net(torch.float32) if stage == 3 else _rounded_net()
        how = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
        model, optimizer = _shard(net, stage, **how)
        inner = model.module if stage == 3 else model
        inner.shift = inner.shift.bfloat16()
        _train(model, optimizer, [_own_part(x).bfloat16() for x in batches])
        whole = model.state_dict() if stage == 3 else _masters(model, optimizer)
        for name, expected in exact.named_parameters():
            if not expected.requires_grad and stage < 3:
                continue
            assert whole[name].dtype == torch.float32
            tolerance = 1e-5 if reduce_dtype == torch.float32 or world_size == 1 else 0.02
            torch.testing.assert_close(whole[name], expected, rtol=tolerance, atol=tolerance)
            if stage < 3:  # the module computes with the rounded ones
                assert torch.equal(model.get_parameter(name), whole[name].bfloat16())


def _masters(net, optimizer):
    """The exact weights by name; frozen ones have no copy."""
    state = optimizer.state_dict()["state"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    exact = {p: state[i]["master"] if i in state else p.float() for i, p in enumerate(parameters)}
    return {name: exact[p] for name, p in net.named_parameters()}


@on_ranks(1, 3)
@pytest.mark.parametrize("how", ["ZeRO", "DDP", "before", "after", "stage 2"])
def test_16_bit_weights_with_32_bit_gradients_and_copies_train_as_the_plain_formula(how):
    """Ten steps of two microbatches; rows, or under DDP gradients, travel in fp32."""
    world_size = dist.get_world_size()
    batches = [_data(4 * world_size, s, torch.float32) for s in range(10)]
    exact = _exact_weights(batches, 2 * world_size, wide=True)
    net, group, stage = _rounded_net(), None, 2 if how == "stage 2" else 1
    if how in ("before", "stage 2"):
        for p in net.parameters():
            p.grad_dtype = torch.float32
    if how == "DDP":  # and its own masters on every rank
        group = [dist.new_group([r]) for r in range(world_size)][dist.get_rank()]
    types = {"param_dtype": torch.bfloat16}
    if how in ("ZeRO", "DDP"):
        types["reduce_dtype"] = torch.float32
    model, optimizer = _shard(net, stage, group=group, **types)
    if how == "after":
        for p in net.parameters():
            p.grad_dtype = torch.float32
    if how == "DDP":
        model = DistributedDataParallel(net, bucket_cap_mb=CAP)
    for x in batches:
        optimizer.zero_grad()
        parts = _own_part(x.bfloat16()).chunk(2)
        with model.no_sync() if how == "DDP" else nullcontext():
            (model(parts[0]).square().mean() / 2).backward()
        (model(parts[1]).square().mean() / 2).backward()
        assert all(p.grad.dtype == torch.float32 for p in net.parameters() if p.requires_grad)
        optimizer.step()
    found = _masters(net, optimizer)
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            _close({name: found[name]}, {name: exact.get_parameter(name).detach()}, 2e-6)
            assert torch.equal(parameter, found[name].bfloat16())


@on_ranks(2)
def test_the_copies_start_from_what_was_not_rounded():
    """The copies before a step, and after one of rate zero."""
    start, masters = _net(torch.float32), []
    for stage in (1, 2):
        for reduce_dtype in (None, torch.float32):
            how = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
            model, optimizer = _shard(_rounded_net(), stage, **how)
            masters.append(_masters(model, optimizer))
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            _train(model, optimizer, [_own_part(_data(4).bfloat16())])
            masters.append(_masters(model, optimizer))
    for found in masters:
        for name, parameter in start.named_parameters():
            if parameter.requires_grad:
                assert torch.equal(found[name], parameter)


@on_ranks(2)
def test_pieces_have_gradients_of_the_dtype_that_their_parameters_ask_for():
    """FSDP of bfloat16 parameters, four passes: the fp32 sum of their bfloat16 gradients."""
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
    piece = net[0].weight
    assert piece.dtype == torch.bfloat16 and piece.grad.dtype == torch.float32
    own = expected.flatten()[piece.first : piece.first + len(piece)]
    torch.testing.assert_close(piece.grad.double(), own, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_complex_parameters_travel_as_they_are():
    """reduce_dtype and param_dtype are for real numbers."""
    x = torch.randn(4, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    for stage in STAGES:
        torch.manual_seed(0)
        alone = nn.Module()
        alone.blocks = nn.ModuleList([nn.Linear(3, 5, dtype=torch.complex128)])
        net = copy.deepcopy(alone)
        model, optimizer = _shard(
            net,
            stage,
            reduce_dtype=torch.float32,
            param_dtype=torch.bfloat16,
            error_if_nonfinite=True,
        )
        net.forward = lambda x: net.blocks[0](x)
        plain = torch.optim.AdamW(_groups(alone.parameters()), lr=0.01)
        for _ in range(3):
            for trained, step, part in (
                (alone.blocks[0], plain, x), (model, optimizer, _own_part(x))
            ):
                step.zero_grad()
                trained(part).abs().square().mean().backward()
            norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            clip = (model if stage == 3 else optimizer).clip_grad_norm_
            assert clip(0.1).item() == pytest.approx(norm.item(), rel=1e-12)
            plain.step()
            optimizer.step()
        _close(_whole(model), alone.state_dict(), 1e-10)


# ---- state dicts ---------------------------------------------------------------------------------


def _gather_state(model, optimizer, stage):
    return model.optimizer_state_dict(optimizer) if stage == 3 else optimizer.state_dict()


def _load(model, optimizer, weights, state, stage):
    model.load_state_dict(weights)
    if stage == 3:
        model.load_optimizer_state_dict(optimizer, state)
    else:
        optimizer.load_state_dict(state)


def _save_and_go_on(stage, saved, at):
    """Weights and state after two steps, or after two more from what is `saved`."""
    batches = [_data(12, seed) for seed in range(at, at + 2)]
    net = _net(seed=at)
    if stage is None:
        model, optimizer = net, torch.optim.AdamW(_groups(net.parameters()), lr=0.01)
        if saved:
            net.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        _train(model, optimizer, batches)
        return net.state_dict(), optimizer.state_dict()
    model, optimizer = _shard(net, stage)
    if saved:
        _load(model, optimizer, *saved, stage)
    _train(model, optimizer, [_own_part(x) for x in batches])
    return _whole(model), _gather_state(model, optimizer, stage)


def _same_state(actual, expected):
    assert actual[0].keys() == expected[0].keys()
    _close(actual[0], expected[0], 1e-9)
    assert [g["params"] for g in actual[1]["param_groups"]] == [
        g["params"] for g in expected[1]["param_groups"]
    ]
    assert [g["lr"] for g in actual[1]["param_groups"]] == [0.01, 0.02]
    _close(actual[1]["state"], expected[1]["state"], 1e-9)


@pytest.mark.parametrize("stage", STAGES)
def test_state_dicts_are_those_of_one_process_and_move_between_group_sizes(stage):
    begun = run(1, _save_and_go_on, None, None, 0)[0]
    ended = run(1, _save_and_go_on, None, begun, 2)[0]
    for saved in run(3, _save_and_go_on, stage, None, 0):
        _same_state(saved, begun)
    for world_size in (1, 2, 4):
        for result in run(world_size, _save_and_go_on, stage, saved, 2):
            _same_state(result, ended)
    _same_state(run(1, _save_and_go_on, None, saved, 2)[0], ended)


@on_ranks(2)
def test_exact_weights_are_part_of_the_state():
    """With 16-bit parameters: resumed training is bit for bit that without a break."""
    batches = [_own_part(_data(4, s, torch.float32).bfloat16()) for s in range(4)]
    results = []
    for stage in (1, 2):
        for broken in (False, True):
            model, optimizer = _shard(_rounded_net(), stage, param_dtype=torch.bfloat16)
            _train(model, optimizer, batches[:2])
            if broken:
                saved = copy.deepcopy((_whole(model), optimizer.state_dict()))
                model, optimizer = _shard(_rounded_net(7), stage, param_dtype=torch.bfloat16)
                _load(model, optimizer, *saved, stage)
            _train(model, optimizer, batches[2:])
            results.append(_masters(model, optimizer))
    for other in results[1:]:
        assert _equal(results[0], other)


@on_ranks(2)
def test_a_state_that_does_not_fit_is_an_error():
    x = _own_part(_data(4))
    for stage in (1, 3):
        model, optimizer = _shard(_net(), stage)
        _train(model, optimizer, [x])
        state = _gather_state(model, optimizer, stage)
        state["state"][0]["exp_avg"] = torch.zeros(3, 3)
        with pytest.raises(ValueError, match=r"exp_avg of 'embed.weight' is \(3, 3\), not \(7, 7\)"
                           if stage == 3 else r"exp_avg of '0 of group 0' is \(3, 3\), not"):
            _load(model, optimizer, _whole(model), state, stage)
        state["param_groups"].pop()
        with pytest.raises(ValueError, match=r"groups of \[\d+\] parameters, the optimizer of"):
            _load(model, optimizer, _whole(model), state, stage)
    weights = _whole(model)
    some = {name: value for name, value in weights.items() if name != "shift"}
    with pytest.raises(RuntimeError, match='Missing key.* in state_dict: "module.shift"'):
        model.load_state_dict(some)
    model.load_state_dict(some, strict=False)
    with pytest.raises(RuntimeError, match=r"size mismatch for scale: \(2,\), not \(\)"):
        model.load_state_dict(weights | {"scale": torch.zeros(2)})


# ---- what is sent --------------------------------------------------------------------------------


class _Stack(nn.Module):
    """Blocks only, which P = 1, 2, 3, 4 and 6 cut without padding: 96 x 96 = 64 x 12 x 12."""

    def __init__(self, blocks=4):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Linear(96, 96, bias=False) for _ in range(blocks)])
        self.forward = self.blocks.forward


@on_ranks(1, 2, 3, 4, 6)
@pytest.mark.parametrize("stage", [0, *STAGES])
def test_stages_send_2_2_2_and_3_times_the_parameters(stage):
    model, optimizer = _shard(_Stack(), stage)
    x = torch.ones(2, 96)
    _train(model, optimizer, [x])
    with least_bytes(), count_bytes() as traffic:
        _train(model, optimizer, [x])
    world_size, nbytes = dist.get_world_size(), sum(p.nbytes for p in _Stack().parameters())
    assert traffic.bytes() == zero_bytes(stage, nbytes, world_size)
    assert traffic.bytes() == (3 if stage == 3 else 2) * reduce_scatter_bytes(nbytes, world_size)


# ---- what is held --------------------------------------------------------------------------------


def _bytes_of_new_tensors():
    """Of those made since gc.freeze()."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


SOAK_3_AND_4 = [pytest.param(world_size, marks=pytest.mark.soak) for world_size in (3, 4)]


@on_ranks(1, 2, *SOAK_3_AND_4)
@pytest.mark.parametrize("stage", [0, *STAGES])
def test_a_rank_holds_16_and_4_12_2_14_and_16_bytes_per_parameter(stage):
    """Of all tensors that a step leaves; the first stage is that of a group of one rank."""
    gc.freeze()
    net = _Stack()
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    model, optimizer = _shard(
        net, stage or 1, group=None if stage else alone, param_dtype=torch.bfloat16
    )
    parameters, P = 4 * 96 * 96, dist.get_world_size()
    _train(model, optimizer, [torch.ones(1, 96).bfloat16()])
    ledger = memory_ledger(model, optimizer)
    exists = _bytes_of_new_tensors()
    kinds = {0: (2, 2, 12), 1: (2, 2, 12 / P), 2: (2, 2 / P, 12 / P), 3: (4 / P, 4 / P, 8 / P)}
    claim = (16, 4 + 12 / P, 2 + 14 / P, 16 / P)[stage]
    assert zero_memory(stage, P) == claim
    held = [n / parameters for n in ledger.values()]
    assert held == pytest.approx(kinds[stage], abs=2e-3)  # counts of steps
    assert sum(held) == pytest.approx(claim, abs=2e-3)
    assert exists / parameters == pytest.approx(claim, abs=2e-2)


@on_ranks(1, 2, 3)
def test_with_32_bit_gradients_a_rank_holds_2_and_4_and_12_bytes_over_p():
    """An odd net in one row."""
    net = _rounded_net()
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.AdamW, param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    _train(net, optimizer, [_data(2).bfloat16()] * 2)
    ledger, world_size = memory_ledger(net, optimizer), dist.get_world_size()
    assert zero_memory(1, 1, gradient=4) == 18
    sizes = {name: p.numel() for name, p in net.named_parameters()}
    frozen = sizes.pop("blocks.1.up.weight")
    shard = 64 * -(-sum(-(-size // 64) for size in sizes.values()) // world_size)
    assert ledger["parameters"] == 2 * shard * world_size + 2 * frozen
    assert ledger["gradients"] == 4 * sum(sizes.values())
    # less the copy and counts of steps, two moments, which torch's optimizers do not pad
    moments = gather_objects(ledger["optimizer"] - 4 * shard - 4 * len(sizes))
    assert sum(moments) == 8 * sum(sizes.values())


@on_ranks(4)
@pytest.mark.parametrize("stage", [1, 2])
def test_stage_2_never_holds_all_gradients(stage):
    net = _Stack(blocks=8)
    model, optimizer = _shard(net, stage)
    most = []
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: most.append(memory_ledger(model, optimizer)["gradients"])
        )
    for _ in range(2):
        net(torch.ones(1, 96)).sum().backward()
    whole = sum(p.nbytes for p in net.parameters())
    shards = -(-whole // dist.get_world_size())
    if stage == 2:
        assert shards < max(most) <= shards + 2 * 96 * 96 * 4 * (1 + 1 / 4) < whole
    else:
        assert max(most) >= whole


class _OnStream:
    """A Work that holds its tensors until it is waited for, as NCCL's do."""

    def __init__(self, work, tensors):
        self.work, self.tensors = work, tensors

    def wait(self):
        self.tensors = None
        self.work.wait()


@on_ranks(2)
@pytest.mark.parametrize("stage, clip", [(1, False), (1, True), (2, False), (3, False)])
def test_two_rows_of_gradients_and_two_shards_are_under_way_at_most(stage, clip):
    """The rows of gradients, and the copies of shards, that live when another one leaves."""
    model, optimizer = _shard(_Stack(blocks=6), stage, param_dtype=torch.bfloat16)
    living = {"reduce_scatter_single": [], "all_gather_single": []}

    def watched(name, function, made):
        def call(output, input, *args, **kwargs):
            made.append(weakref.ref(input))
            living[name].append(sum(reference() is not None for reference in made))
            return _OnStream(function(output, input, *args, **kwargs), [output, input])

        return patch.object(zero, name, call)

    with (
        watched("reduce_scatter_single", zero.reduce_scatter_single, []),
        watched("all_gather_single", zero.all_gather_single, []),
    ):
        model(torch.ones(1, 96).bfloat16()).sum().backward()
        if clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    assert living["reduce_scatter_single"] == [1, 2, 2, 2, 2, 2]
    if stage == 3:
        assert max(living["all_gather_single"]) == 2
    else:
        assert living["all_gather_single"] == [1, 2, 2, 2, 2, 2]


@on_ranks(3)
def test_stage_3_holds_its_shard_and_at_most_two_units():
    """Bytes of gathered parameters: at rest, and the most in forward and backward."""
    net = _Stack(blocks=8)
    model, optimizer = _shard(net, 3)
    memories = model._units.memories
    gathered = lambda: sum(memory.bytes.untyped_storage().nbytes() for memory in memories)
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


def test_the_largest_model_on_8_gpus_of_80_gb():
    sizes = [largest_model(stage, 8, 80e9) / 1e9 for stage in range(4)]
    assert sizes == pytest.approx([6.66, 16, 24.62, 53.33], abs=0.01)


# ---- overlap and order ---------------------------------------------------------------------------


FORWARD = "forward 0 forward 1 forward 2 "
EVENTS = {
    1: FORWARD + "backward 2 backward 1 backward 0 step"
    " scatter scatter gather scatter gather gather",  # row 1 leaves before row 0 is updated
    2: FORWARD + "backward 2 scatter backward 1 scatter backward 0 scatter step" + 3 * " gather",
    3: "gather gather forward 0 gather forward 1 forward 2 "  # the next one, before computing
    "gather gather backward 2 gather scatter backward 1 scatter backward 0 scatter step",
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
@pytest.mark.parametrize("error_if_nonfinite", [False, True])
@pytest.mark.parametrize("stage", [0, *STAGES])
def test_no_stage_has_the_host_wait_for_a_gpu_but_to_name_a_gradient(stage, error_if_nonfinite):
    sgd = {"lr": 0.1, "momentum": 0.9}
    how = {"error_if_nonfinite": error_if_nonfinite}
    model, optimizer = _shard(_net(torch.float32), stage, torch.optim.SGD, sgd, **how)
    x = _own_part(_data(8, dtype=torch.float32))
    _train(model, optimizer, [x])
    with waits() as found:
        for _ in range(2):
            model(x).square().mean().backward()
        if stage:
            (model if stage == 3 else optimizer).clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    once = 1 if stage == 1 else 2  # in step(), or at the end of each backward
    assert found == ({"tolist": once} if error_if_nonfinite else {})


HALF = {"param_dtype": torch.bfloat16}


@on_ranks(3)
@pytest.mark.parametrize("how", [{}, HALF, HALF | {"reduce_dtype": torch.float32}])
@pytest.mark.parametrize("stage", STAGES)
def test_views_shards_pieces_and_what_is_sent_begin_on_128_bytes(stage, how):
    """Where what is computed with, updated and sent begins in its row, in bytes."""
    tensors, functions = [], ("all_gather_single", "reduce_scatter_single")

    def watched(function):
        def call(output, input, *args, **kwargs):
            tensors.extend((output, input))
            return function(output, input, *args, **kwargs)

        return call

    net = _net(torch.float32)
    with (
        patch.object(zero, functions[0], watched(zero.all_gather_single)),
        patch.object(zero, functions[1], watched(zero.reduce_scatter_single)),
    ):
        model, optimizer = _shard(net, stage, **how)
        net.shift = net.shift.to(how.get("param_dtype"))
        x = _own_part(_data(6, dtype=how.get("param_dtype", torch.float32)))
        if stage == 3:
            for unit in model._units.all:
                unit.unshard()
                tensors += [whole.data for flat in unit.rows for whole in flat.whole]
                unit.reshard()
        elif "param_dtype" in how:
            net.blocks[1].up.weight.data = net.blocks[1].up.weight.bfloat16()
        model(x).square().mean().backward()
        if stage != 2:
            tensors += [piece.grad for piece in net.parameters() if piece.grad is not None]
        optimizer.step()
        model(x).square().mean().backward()
    for flat in _flats(model, optimizer):
        tensors += [flat.unsharded_param, flat.sharded_param, *flat.pieces, *flat.parameters]
        tensors += [*flat.gradient_pieces()] if flat.sharded_grad is not None else []
    frozen = net.blocks[1].up.weight if stage < 3 else None
    begins = [t.storage_offset() * t.itemsize for t in tensors if t.numel() and t is not frozen]
    assert any(begins) and all(begin % 128 == 0 for begin in begins)


def _record_steps(stage):
    with record() as events:
        model, optimizer = _shard(_net(), stage)
        for seed in range(2):
            _train(model, optimizer, [_own_part(_data(8, seed))])
            if stage:
                (model if stage == 3 else optimizer).clip_grad_norm_(1.0)
    return events


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_no_stage_would_hang_on_nccl(world_size):
    for stage in (0, *STAGES):
        replay(run(world_size, _record_steps, stage))


# ---- stage 3: what modules do --------------------------------------------------------------------


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
        self.how = how

    def forward(self, x):
        for block in self.blocks:
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
            elif self.how == "backwards":
                continue
            else:
                x = block(x)
        if self.how == "backwards":
            for block in list(self.blocks)[::-1]:
                x = block(x)
        return {"x": (x, 3)} if self.how == "nested" else x


@on_ranks(2)
@pytest.mark.parametrize(
    "how",
    ["plain", "twice", "nested", "in place", "view in place", "passed on", "backwards"]
    + ["two passes", False, True],
)
def test_units_may_be_used_in_any_way_that_all_ranks_share(how):
    x = _data(2 * dist.get_world_size()).requires_grad_()
    torch.manual_seed(0)
    alone = _Odd(how).double()
    model = FullyShardedDataParallel(copy.deepcopy(alone), units=[])
    models = [alone, model]
    net = copy.deepcopy(alone)
    models.append(FullyShardedDataParallel(net, units=net.blocks))
    for model, part in zip(models, (x, _own_part(x), _own_part(x))):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(2):
            optimizer.zero_grad()
            if how == "two passes":
                outputs = torch.cat([model(half) for half in part.chunk(2)])
            else:
                outputs = model(part)
            outputs = outputs["x"][0] if how == "nested" else outputs
            outputs.square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model(part)
    for model in models[1:]:
        _close(_whole(model), alone.state_dict(), 1e-10)


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
            self.gather()


def _overlap(a, b):
    begins, ends = zip(*[(t.data_ptr(), t.data_ptr() + t.nbytes) for t in (a, b)])
    return max(begins) < min(ends)


@on_ranks(2)
@pytest.mark.parametrize("how", ["plain", "backwards"])
def test_parameters_are_waited_for_before_their_use_and_before_their_memory_is_used_again(how):
    """Also in an order in which what is fetched ahead is never used."""
    pending, gather, free = [], zero.all_gather_single, zero._Memory.free

    def late_gather(output, input, group=None, async_op=False):
        if not async_op:
            return gather(output, input, group)
        return _Late(gather, pending, output, input, group)

    def checked_free(memory):
        assert not any(_overlap(memory.bytes, late.output) for late in pending)
        free(memory)

    x = _data(2 * dist.get_world_size())
    torch.manual_seed(0)
    alone = _Odd(how).double()
    alone.last = nn.Linear(7, 7).double()  # in no unit
    forward = lambda net: lambda x: net.last(_Odd.forward(net, x))
    net = copy.deepcopy(alone)
    with (
        patch.object(zero, "all_gather_single", late_gather),
        patch.object(zero._Memory, "free", checked_free),
    ):
        model = FullyShardedDataParallel(net, units=net.blocks)
        alone.forward, net.forward = forward(alone), forward(net)
        for trained, part in ((alone, x), (model, _own_part(x))):
            optimizer = torch.optim.SGD(trained.parameters(), lr=1.0)
            for _ in range(2):
                trained(part).square().mean().backward()
                optimizer.step()
                with torch.no_grad():
                    trained(part)
        assert not pending
    _close(_whole(model), alone.state_dict(), 1e-10)


@on_ranks(2)
def test_a_forward_that_failed_does_not_spoil_the_next():
    """After a forward pass that failed half-way, the next one has the newest parameters."""
    x = _data(2 * dist.get_world_size())
    (alone, *_), *_ = trainers = _trainers([3])
    for model, optimizer, part in trainers:
        model(part(x)).square().mean().backward()
        with pytest.raises(RuntimeError):
            model(torch.zeros(1, 3).double())
        optimizer.step()
        _train(model, optimizer, [part(x)])
    _close(_whole(model), alone.state_dict())


@on_ranks(2)
def test_ways_around_the_units_are_errors():
    """What stage 3 cannot see is an error and no wrong number."""
    x, net = _own_part(_data(4)).requires_grad_(), _Odd("plain").double()
    with pytest.raises(ValueError, match=r"units\[0\] has no forward of its own"):
        FullyShardedDataParallel(net, units=[net.blocks])
    net = _Odd("plain").double()
    model = FullyShardedDataParallel(net, units=net.blocks)
    with pytest.raises(RuntimeError, match="recomputed in its own backward"):
        checkpoint(model, x, use_reentrant=False).sum().backward()
    net = _Odd("plain").double()
    model = FullyShardedDataParallel(net, units=net.blocks)
    net.forward = lambda x: checkpoint(nn.Sequential(*net.blocks), x, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"units\[\d\] is recomputed before its turn"):
        model(x).sum().backward()


@on_ranks(3)
def test_gradients_may_be_set_by_hand():
    """A piece's gradient set to None, or to another, counts as such; the others accumulate."""
    x = _data(2 * dist.get_world_size())
    alone = _Odd("plain").double()
    net = copy.deepcopy(alone)
    model = FullyShardedDataParallel(net, units=net.blocks)
    for trained, part in ((alone, x), (model, _own_part(x))):
        trained(part).square().mean().backward()
        named = dict(trained.named_parameters())
        named["blocks.1.up.weight"].grad = None
        named["blocks.2.up.bias"].grad = named["blocks.2.up.bias"].grad * 3
        trained(part).square().mean().backward()
        torch.optim.SGD(trained.parameters(), lr=0.1).step()
    _close(_whole(model), alone.state_dict())


@on_ranks(2)
def test_two_gradients_of_one_pass_add_up():
    """Recomputed in a nested backward, a weight in no unit gets two gradients in one pass."""
    x, alone = _data(2 * dist.get_world_size()).requires_grad_(), _Odd("plain").double()
    forward = lambda net, x: net.blocks[0](checkpoint(net.blocks[0], x, use_reentrant=True))
    model = FullyShardedDataParallel(copy.deepcopy(alone))
    model.module.forward = partial(forward, model.module)
    alone.forward = partial(forward, alone)
    for trained, part in ((alone, x), (model, _own_part(x))):
        trained(part).square().mean().backward()
        torch.optim.SGD(trained.parameters(), lr=0.1).step()
    _close(_whole(model), alone.state_dict())


@on_ranks(2)
def test_a_late_gradient_is_an_error():
    """A recomputed use of a weight gives a second gradient in one backward pass."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, shard_gradients=True, bucket_cap_mb=1e-9, lr=0.1
    )
    optimizer.zero_grad()
    x = net[1](checkpoint(net[1], net[0](torch.ones(1, 3)), use_reentrant=True))
    with pytest.raises(RuntimeError, match="a gradient came after those of its row were summed"):
        x.sum().backward()


@on_ranks(2)
def test_clipping_scales_what_later_passes_add_to():
    """Clipped, then more gradients, then clipped twice, as torch has it."""
    x = _data(2 * dist.get_world_size())
    (alone, *_), *_ = trainers = _trainers()
    norms = []
    for model, optimizer, part in trainers:
        trained = [p for p in alone.parameters() if p.requires_grad]
        clip = partial(nn.utils.clip_grad_norm_, trained)
        if model is not alone:
            clip = getattr(optimizer, "clip_grad_norm_", getattr(model, "clip_grad_norm_", None))
            with pytest.raises(RuntimeError, match="no parameter has a gradient"):
                clip(1.0)
        model(part(x)).square().mean().backward()
        clip(0.1)
        model(part(x)).square().mean().backward()
        norms.append([clip(0.2).item(), clip(0.5).item()])
        model(part(x)).square().mean().backward()
        optimizer.step()
    for (model, *_), found in zip(trainers, norms):
        assert found == pytest.approx(norms[0], rel=1e-12)
        _close(_whole(model), alone.state_dict(), 1e-12)


@on_ranks(4)
def test_clipping_goes_over_all_dtypes():
    """Clipping over float32, float64 and bfloat16, and over nothing."""
    for stage in STAGES:
        net = nn.Module()
        net.blocks = nn.ModuleList()
        dtypes = torch.float32, torch.float64, torch.bfloat16
        net.weights = nn.ParameterList(torch.ones(3, dtype=dtype) for dtype in dtypes)
        net.empty = nn.Parameter(torch.ones(0, dtype=torch.float16))
        net.forward = lambda: sum(w.double().sum() for w in net.weights) + net.empty.sum()
        model, optimizer = _shard(net, stage, torch.optim.SGD, {"lr": 0.1}, error_if_nonfinite=True)
        for norm_type, norm in ((2.0, 3.0), (1.0, 9.0), (float("inf"), 1.0)):
            optimizer.zero_grad()
            (model() if stage == 3 else net.forward()).backward()
            clip = (model if stage == 3 else optimizer).clip_grad_norm_
            assert clip(100.0, norm_type).item() == pytest.approx(norm)


class _Warming(torch.optim.Optimizer):
    """Has a count in its groups, a state of one element, and none for empty parameters."""

    def __init__(self, parameters, lr, **defaults):
        super().__init__(parameters, {"lr": lr, "count": 0, **defaults})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    state = self.state[p]
                    if not state:
                        state["scale"] = torch.ones(1, dtype=torch.float64)
                        state["mean"] = torch.zeros_like(p)
                    state["scale"] *= 0.9
                    state["mean"].mul_(0.5).add_(p.grad)
                    p -= group["lr"] / group["count"] * state["scale"].item() * state["mean"]


@on_ranks(3)
@pytest.mark.parametrize("optimizer_class", [torch.optim.NAdam, torch.optim.ASGD, _Warming])
def test_any_state_is_gathered_and_loaded(optimizer_class):
    """Save after two steps, on all ranks alike; load; a third step."""
    x = _data(4 * dist.get_world_size())
    alone = _net()
    plain = optimizer_class(_groups(alone.parameters()), lr=0.01)
    _train(alone, plain, [x, x])
    begun = copy.deepcopy((alone.state_dict(), plain.state_dict()))
    _train(alone, plain, [x])
    for stage in STAGES:
        model, optimizer = _shard(_net(), stage, optimizer_class)
        _train(model, optimizer, [_own_part(x)] * 2)
        saved = _whole(model), copy.deepcopy(_gather_state(model, optimizer, stage))
        _close(saved[1]["state"], begun[1]["state"], 1e-9)
        assert saved[1]["param_groups"][0].items() >= begun[1]["param_groups"][0].items()
        for model, optimizer in ((model, optimizer), _shard(_net(seed=3), stage, optimizer_class)):
            _load(model, optimizer, *copy.deepcopy(saved), stage)
            _train(model, optimizer, [_own_part(x)])
            _close(_whole(model), alone.state_dict(), 1e-9)


@on_ranks(2)
def test_what_is_no_longer_used_is_freed():
    """Weak references to what was made, dropped and collected."""
    made = []
    for stage in (0, *STAGES):
        net = _net()
        model, optimizer = _shard(net, stage)
        _train(model, optimizer, [_data(2)])
        made += [weakref.ref(x) for x in (net.scale, model, optimizer)]
        del net, model, optimizer
    gc.collect()
    assert all(reference() is None for reference in made)


@on_ranks(2)
def test_groups_may_be_frozen_or_refused():
    """A group of frozen parameters only; frozen ones are converted as well."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    net[0].requires_grad_(False)
    groups = [{"params": layer.parameters()} for layer in net]
    sgd = torch.optim.SGD
    optimizer = ZeroRedundancyOptimizer(groups, sgd, param_dtype=torch.bfloat16, lr=0.5)
    net(torch.ones(1, 3).bfloat16()).sum().backward()
    optimizer.step()
    assert net[1].bias.dtype == net[0].bias.dtype == torch.bfloat16
    other = nn.Linear(2, 2 + dist.get_rank())
    with pytest.raises(ValueError, match="rank 1 of the group has"):
        optimizer.add_param_group({"params": other.parameters()})
    assert len(optimizer.param_groups) == 2


# ---- stage 3 that keeps what it has gathered: stages 2 and 1 -------------------------------------


def _kept(net, **how):
    """(model, optimizer)"""
    model = FullyShardedDataParallel(net, units=net.blocks, keep_unsharded=True, **how)
    optimizer = torch.optim.AdamW(_groups(model.parameters()), lr=0.01, fused=True)
    optimizer.register_step_post_hook(lambda *_: model.reshard())
    return model, optimizer


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("wait_in_backward", [True, False])
@on_ranks(1, 3)
def test_what_is_kept_is_gathered_once_a_step_and_trains_as_one_process(stage, wait_in_backward):
    (rank, world_size), plain, m = rank_and_size(), _net(), 3
    expected = torch.optim.AdamW(_groups(plain.parameters()), lr=0.01)
    model, optimizer = _kept(_net(), wait_in_backward=wait_in_backward)
    nbytes = sum(8 * row.layout.length for row in model._schedule.order)  # of what is trained
    frozen = sum(8 * row.layout.length for row in model._units.rows) - nbytes
    for step in range(3):
        data = _data(m * 4 * world_size, seed=step).chunk(m)
        expected.zero_grad()
        for part in data:
            (plain(part).square().mean() / m).backward()
        expected.step()
        optimizer.zero_grad()
        with count_bytes() as traffic:
            for i, part in enumerate(data):
                with model.no_sync() if stage == 1 and i < m - 1 else nullcontext():
                    (model(part.chunk(world_size)[rank]).square().mean() / m).backward()
            model.finish_grad_sync()
        claimed = zero_bytes(stage, nbytes, world_size, m)
        assert traffic.bytes() == claimed + reduce_scatter_bytes(frozen, world_size)
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=0, atol=1e-12)


@on_ranks(2)
def test_a_row_that_leaves_again_before_it_was_waited_for_adds_up():
    rank, plain, data = dist.get_rank(), _net(), _data(12).chunk(3)
    model = FullyShardedDataParallel(_net(), wait_in_backward=False)  # one unit
    for part in data:
        plain(part).square().sum().backward()
        (model(part.chunk(2)[rank]).square().sum() * 2).backward()  # the mean over two ranks
    model.finish_grad_sync()
    for row in model._schedule.order:
        for name, whole in zip(row.names, row.join([piece.grad for piece in row.pieces])):
            wanted = dict(plain.named_parameters())[name].grad
            torch.testing.assert_close(whole, wanted, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_parameters_that_were_changed_while_they_are_kept_are_an_error():
    model, _ = _kept(_net())
    model(_data(4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="changed and kept: call reshard"):
        model(_data(4))
    model.reshard()
    model(_data(4)).sum().backward()


@on_ranks(2)
def test_what_is_kept_is_held_once_and_the_shard_is_part_of_it():
    model, optimizer = _kept(_net())
    model(_data(4)).sum().backward()
    held = sum(memory.nbytes for memory in model._units.memories)
    assert held == sum(8 * row.layout.length for row in model._units.rows)
    assert memory_ledger(model, optimizer)["parameters"] == held


@on_ranks(4)
def test_parameters_may_have_groups_of_their_own():
    rank, plain = dist.get_rank(), _net()
    inputs = _data(8)
    plain(inputs).square().sum().backward()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    net = _net()
    own = dict.fromkeys(net.blocks[0].parameters(), (pairs[rank // 2], None))
    how = {"gradient_divide_factor": 1, "groups": own}
    model = FullyShardedDataParallel(net, units=net.blocks, **how)
    outputs = model(inputs.chunk(4)[rank])
    outputs.square().sum().backward()
    halves = _net()  # what the pair alone has computed
    halves(inputs.chunk(2)[rank // 2]).square().sum().backward()
    for row in model._units.rows:
        alone = any(name.startswith("blocks.0") for name in row.names)
        wanted = dict((halves if alone else plain).named_parameters())
        trained = row.pieces[0].requires_grad
        wholes = row.join([piece.grad for piece in row.pieces]) if trained else ()
        for name, whole in zip(row.names, wholes):
            torch.testing.assert_close(whole, wanted[name].grad, rtol=1e-12, atol=1e-12)
        assert dist.get_world_size(row.group) == (2 if alone else 4)
    with pytest.raises(RuntimeError, match="clip_grad_norm_.. of parameters that have groups"):
        model.clip_grad_norm_(1.0)


# ---- errors --------------------------------------------------------------------------------------


@on_ranks(3)
def test_bad_input_gets_a_line_that_names_it():
    rank, sgd = dist.get_rank(), torch.optim.SGD
    for name in ("LBFGS", "Adafactor"):
        with pytest.raises(ValueError, match=f"{name} does not update each element by itself"):
            ZeroRedundancyOptimizer(_net().parameters(), getattr(torch.optim, name))
    with pytest.raises(ValueError, match="bucket_cap_mb=0 must be positive"):
        ZeroRedundancyOptimizer(_net().parameters(), sgd, bucket_cap_mb=0)
    frozen = _net().requires_grad_(False)
    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    longer = nn.Linear(2, 3 + rank // 2)
    for wrap in (
        lambda net: ZeroRedundancyOptimizer(net.parameters(), sgd, lr=0.1),
        FullyShardedDataParallel,
        DistributedDataParallel,
    ):
        with pytest.raises(ValueError, match="no trainable parameters"):
            wrap(frozen)
        with pytest.raises(ValueError, match="several devices: .* on cpu, .* on meta"):
            wrap(two)
        with pytest.raises(ValueError, match=r"rank 2 of the group has .* \(4, 2\)"):
            wrap(longer)
    net = _net()
    for units in ([net.blocks, net.blocks[0]], [net], [nn.Linear(1, 1)], [net.head, net.head]):
        with pytest.raises(ValueError, match=r"units\[\d\] is not a submodule, or inside of"):
            FullyShardedDataParallel(net, units=units)
    for stage in (1, 2):
        _, optimizer = _shard(_net(), stage)
        with pytest.raises(RuntimeError, match=r"step\(\) before backward\(\)"):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"cannot be copied or pickled: call state_dict\(\)"):
            copy.deepcopy(optimizer)
        net(_data(1)).sum().backward()
        optimizer = ZeroRedundancyOptimizer(net.parameters(), sgd, lr=0.1)
        with pytest.raises(ValueError, match="norm_type=0.0 must be positive"):
            optimizer.clip_grad_norm_(1, 0)
        assert optimizer.clip_grad_norm_(1, "inf") > 0


@on_ranks(3)
@pytest.mark.parametrize("stage", [0, *STAGES])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_named_where_it_arose(stage, value):
    rank = dist.get_rank()
    model, optimizer = _shard(_net(), stage, error_if_nonfinite=True)
    _train(model, optimizer, [_data(2)])
    inner = getattr(model, "module", model)
    if rank == 1:
        up = inner.blocks[0].up  # in stage 3 another bias is there in each forward pass
        up.register_forward_pre_hook(
            lambda *_: up.bias.register_hook(lambda grad: torch.full_like(grad, value)) and None
        )
    optimizer.zero_grad()
    loss = model(_data(2)).square().mean()
    if rank == 1:
        name = "blocks.0.up.bias" if stage in (0, 3) else r"\d+ of group 1"
        with pytest.raises(RuntimeError, match=f"rank 1: gradient not finite for {name}$"):
            loss.backward()
            optimizer.step()
    else:
        loss.backward()
        if stage == 1:
            optimizer.step()
    for name, parameter in inner.named_parameters() if stage == 0 else ():  # the sum, on all ranks
        if parameter.requires_grad:
            finite = parameter.grad.isfinite()
            assert finite.all() if name != "blocks.0.up.bias" else not finite.any(), name


@on_ranks(3)
def test_a_parameter_group_can_be_added():
    x = _data(2 * dist.get_world_size())
    alone = _net()
    optimizers = []
    nets = [alone, _net(), _net()]
    for stage, net in enumerate(nets):
        groups = _groups(net.parameters())
        if stage:
            optimizer = ZeroRedundancyOptimizer(
                groups[0]["params"], torch.optim.AdamW, shard_gradients=stage == 2, lr=0.01
            )
        else:
            optimizer = torch.optim.AdamW(groups[0]["params"], lr=0.01)
        optimizer.add_param_group(groups[1])
        optimizers.append(optimizer)
    for net, optimizer, part in zip(nets, optimizers, (x, _own_part(x), _own_part(x))):
        _train(net, optimizer, [part, part])
        _close(net.state_dict(), alone.state_dict(), 1e-9)
        assert [g["lr"] for g in optimizer.param_groups] == [0.01, 0.02]


@on_ranks(3)
def test_the_demonstration_measures_what_it_claims():
    with redirect_stdout(io.StringIO()) as printed, least_bytes():
        zero._demonstrate()
    printed, *others = gather_objects(printed.getvalue())
    assert not any(others)
    for stage, line in zip(STAGES, printed.splitlines(), strict=True):
        sent, claimed, held, expected = re.findall(r"[\d.]+", line.split(":")[1])[:4]
        assert sent == claimed and held == expected and line.startswith(f"stage {stage}")
        assert float(line.split()[-1]) < 1e-5
