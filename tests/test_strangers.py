"""Ordinary and odd scripts written for PyTorch's wrappers train with ours, and exit normally."""

import copy
import io
import json
import subprocess
import sys
import textwrap
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer as TheirOptimizer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from collectives import count_bytes, gather_objects
from ddp import DistributedDataParallel
from zero import AdamW, FullyShardedDataParallel, ZeroRedundancyOptimizer

from ranks import PROJECT, on_ranks, shifted, soak, torchrun
from replicas import assert_close


def launch(folder, world_size, script, *arguments, **options):
    """Write a script to a file in `folder` and run it under torchrun."""
    file = folder / "script.py"
    file.write_text(textwrap.dedent(script))
    return torchrun(world_size, file, *arguments, cwd=folder, **options)


# ---- ddp.py and zero.py: scripts with the import swapped -----------------------------------------


def make_net(seed=0):
    torch.manual_seed(shifted(seed))
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)).double()


def parts_of_batch(step=1):
    """Return each rank's rows of a batch."""
    generator = torch.Generator().manual_seed(shifted(step))
    x = torch.randn(3 * dist.get_world_size(), 6, generator=generator)
    return x.double().chunk(dist.get_world_size())


def own_rows(step=1):
    return parts_of_batch(step)[dist.get_rank()]


def train(model, optimizer, steps=3, loss=lambda model, x: model(x).square().mean()):
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, own_rows(step)).backward()
        optimizer.step()


def accumulated(wrap):
    """Accumulate gradients, by no_sync() and by the flag that nanoGPT sets."""
    net = make_net()
    model = wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        first, last = own_rows(step), own_rows(step + 10)
        if step % 2:
            with model.no_sync():
                model(first).square().mean().backward()
        else:
            model.require_backward_grad_sync = False
            model(first).square().mean().backward()
            model.require_backward_grad_sync = True
        model(last).square().mean().backward()
        optimizer.step()
    return net


def scaled(wrap, make_scaler=torch.amp.GradScaler):
    """Train with autocast and GradScaler; an overflow on one rank skips the step on all ranks."""
    net = make_net().float()
    model = wrap(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = make_scaler("cpu", init_scale=8.0, growth_interval=100)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(own_rows(step).float()).float().square().mean()
        overflow = float("inf") if step == 1 and dist.get_rank() == 1 else 1.0
        (scaler.scale(loss) * overflow).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4
    return net


class Odd(nn.Module):
    """A net with BatchNorm, a frozen, a tied and an unused weight, and recomputed blocks."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.last = make_net(seed=1), make_net()
        self.blocks = nn.ModuleList([make_net(), make_net()])
        self.first[0].weight.requires_grad_(False)
        self.last[2].weight = self.first[2].weight
        self.norm, self.use_reentrant = nn.BatchNorm1d(6).double(), use_reentrant
        if not use_reentrant:  # PyTorch's DDP does not support both
            self.unused = nn.Linear(2, 2)

    def forward(self, x):
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.last(x)


def recomputed(wrap, use_reentrant):
    net = Odd(use_reentrant)
    model = wrap(net, find_unused_parameters=not use_reentrant)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return net


def held(wrap, hold):
    """Train a net whose output is in another object, or is None; the loss uses the real output."""
    net, found = make_net(), []
    forward = net.forward
    net.forward = lambda x: hold(found.append(forward(x)) or found[-1])
    model = wrap(net)
    loss = lambda model, x: (model(x), found[-1].square().mean())[1]
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    return net


def two_wrappers(wrap):
    """Train a generator and a discriminator; the steps of each also reach the other."""
    nets = make_net(), make_net(seed=5)
    models = [wrap(net) for net in nets]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    make, judge = models
    for step in range(3):
        optimizers[1].zero_grad()
        (judge(make(own_rows(step)).detach()) - judge(own_rows(step))).mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        judge(make(own_rows(step))).mean().neg().backward()
        optimizers[0].step()
    return nn.ModuleList(nets)


def saved_and_loaded(wrap):
    model = wrap(make_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    net = make_net(seed=dist.get_rank() + 3)
    other = wrap(net)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    for target, state in zip((other, optimizer), torch.load(file)):
        target.load_state_dict(state)
    train(other, optimizer)
    return net


def fused_in_another_order(wrap):
    """Train weights in channels_last order with a fused optimizer, which runs through memory."""
    torch.manual_seed(shifted(0))
    net = nn.Conv2d(4, 3, 3).double().to(memory_format=torch.channels_last)
    model = wrap(net, None, None, static_graph=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, fused=True)
    generator = torch.Generator().manual_seed(shifted(dist.get_rank()))
    images = lambda model, x: model(torch.randn(2, 4, 5, 5, generator=generator).double())
    train(model, optimizer, loss=lambda model, x: images(model, x).square().sum())
    return net


def with_gradients_of_inputs(wrap):
    """Call autograd.grad() through the wrapper before backward()."""
    net = make_net()
    model = wrap(net)

    def loss(model, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x)
        return model(x - 0.1 * slope).square().mean()

    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    return net


SCRIPTS = {
    "accumulate": accumulated,
    "scaler": scaled,
    "recompute": partial(recomputed, use_reentrant=False),
    "recompute reentrant": partial(recomputed, use_reentrant=True),
    "dict": partial(held, hold=lambda y: {"logits": [y]}),
    "hidden": partial(held, hold=lambda y: lambda: y),
    "none": partial(held, hold=lambda y: None),
    "two wrappers": two_wrappers,
    "save and load": saved_and_loaded,
    "channels last": fused_in_another_order,
    "autograd.grad": with_gradients_of_inputs,
}


@pytest.mark.parametrize("script", SCRIPTS)
@on_ranks(2)
def test_a_script_of_pytorchs_ddp_trains_the_same_with_ours(script):
    train = SCRIPTS[script]
    theirs, ours = train(nn.parallel.DistributedDataParallel), train(DistributedDataParallel)
    assert_close(ours.state_dict(), theirs.state_dict())
    weights = [p.detach() for p in ours.parameters()]
    assert_close(weights, gather_objects(weights)[0])


@pytest.mark.parametrize("script", ["accumulate", "scaler", "two wrappers"])
@on_ranks(2)
def test_a_script_of_pytorchs_ddp_trains_the_same_with_our_shards(script):
    models, train = [], SCRIPTS[script]
    if script == "scaler":
        train = partial(scaled, make_scaler=ShardedGradScaler)
    theirs = train(nn.parallel.DistributedDataParallel)

    def wrap(net, **options):
        models.append(FullyShardedDataParallel(net, units=[net[0], net[2]]))
        return models[-1]

    train(wrap)
    ours = {f"{i}.{n}": x for i, model in enumerate(models) for n, x in model.state_dict().items()}
    theirs = theirs if len(models) > 1 else nn.ModuleList([theirs])
    assert_close(ours, theirs.state_dict(), 1e-6 if script == "scaler" else 1e-12)


@on_ranks(1, 2, 3)
def test_our_zero_redundancy_optimizer_trains_as_pytorchs_does():
    """Both optimizers train under both wrappers, with clipping and learning-rate schedules."""
    weights = []
    for wrap in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
        for shard in (ZeroRedundancyOptimizer, TheirOptimizer):
            net = make_net()
            model = wrap(net)
            optimizer = shard(model.parameters(), torch.optim.AdamW, lr=0.05)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            for step in range(4):
                train(model, optimizer, 1)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                assert optimizer.step(lambda: torch.tensor(3.0)) == 3
                schedule.step()
            weights.append(net.state_dict())
    for other in weights[1:]:
        assert_close(other, weights[0], 1e-10)
    own = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.05)
    torch.optim.lr_scheduler.OneCycleLR(own, 0.1, 10)
    own.step()
    assert own.optimizer.param_groups[0]["betas"] == own.param_groups[0]["betas"] != (0.9, 0.999)
    with pytest.raises(RuntimeError, match="gets all of its parameters at the beginning"):
        own = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
        own.add_param_group({"params": nn.Linear(2, 2).parameters()})
    net.float()
    with pytest.raises(RuntimeError, match="a parameter was moved or converted since"):
        own.step()


class Block(nn.Module):
    """A unit of two layers; one may be normalised, used by a hook, recurrent, or recomputed."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how = nn.Linear(6, 6), nn.Linear(6, 6), how
        if how == "weight norm":
            nn.utils.weight_norm(self.b)
        if how == "hook":
            self.b.register_forward_pre_hook(lambda module, args: (args[0] * module.weight[0],))
        if how == "recurrent":
            self.a = nn.LSTM(6, 6)  # a module that keeps its own list of its parameters

    def forward(self, state):
        h = self.a(state["x"].unsqueeze(0))  # a sequence of one
        h = (h[0] if self.how == "recurrent" else h).squeeze(0).tanh()
        if self.how == "recompute":
            h = checkpoint(self.b, h, use_reentrant=False)
        state["x"] = state["x"] + self.b(h)
        return state


class Blocks(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(shifted(0))
        self.first, self.blocks = nn.Linear(6, 6), nn.ModuleList(Block(how) for _ in range(3))
        self.double()

    def forward(self, x):
        state = {"x": self.first(x)}
        for block in self.blocks:
            state = block(state)
        return state["x"]


@pytest.mark.parametrize("how", ["recompute", "weight norm", "hook", "recurrent"])
@on_ranks(2)
def test_a_sharded_model_trains_clips_saves_and_resumes_as_one_process_does(how):
    """Between passes, names, copies and averages of parameters see this rank's pieces."""

    def go_on(model, optimizer, clip, rows, first):
        for step in range(first, first + 3):
            optimizer.zero_grad()
            model(rows(step)).square().mean().backward()
            clip(0.1)
            optimizer.step()

    alone, saved = Blocks(how), None
    optimizer_alone = torch.optim.AdamW(alone.parameters(), lr=0.05)
    clip = partial(nn.utils.clip_grad_norm_, [*alone.parameters()])
    for first in (0, 3):
        go_on(alone, optimizer_alone, clip, lambda step: torch.cat(parts_of_batch(step)), first)
        net = Blocks(how)
        before = dict(net.named_parameters())
        model = FullyShardedDataParallel(net, units=net.blocks)
        assert all(p is before[name] for name, p in net.named_parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        if saved:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        go_on(model, optimizer, model.clip_grad_norm_, own_rows, first)
        averages = [torch.zeros_like(p).lerp_(p, 0.5) for p in model.parameters()]
        assert all(average.isfinite().all() for average in averages) and repr(model)
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    assert [*saved[0]] == [*alone.state_dict()]
    assert_close(saved[0], alone.state_dict(), 1e-10)


@on_ranks(2)
def test_a_sharded_module_works_with_autograd_grad_and_inside_other_modules():
    """A net under DDP precedes it. autograd.grad() of its input, under no_sync(), sums nothing."""
    net, plain = make_net(), make_net(seed=3)
    model = FullyShardedDataParallel(net, units=[net[0], net[2]])
    first = DistributedDataParallel(plain)
    alone = nn.Sequential(make_net(seed=3), make_net())
    alone(torch.cat(parts_of_batch())).square().mean().backward()
    x = own_rows().requires_grad_()
    with model.no_sync(), count_bytes() as traffic:
        torch.autograd.grad(model(x).square().mean(), x)
    assert traffic.bytes("reduce_scatter_single") == 0
    both = nn.Sequential(first, model)
    both(x).square().mean().backward()
    assert_close(plain[0].weight.grad, alone[0][0].weight.grad)
    piece = net[0].weight
    expected = alone[1][0].weight.grad.flatten()[piece.offset : piece.offset + len(piece)]
    assert_close(piece.grad.detach().flatten(), expected)


# ---- pieces are not whole, and no rank decides alone ---------------------------------------------


class Scaled(nn.Parameter):
    """A user's class of parameters."""


class Features(nn.Module):
    """Two layers, of which each rank owns a part. The first weight's class and gain are a user's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(shifted(0))
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Linear(32, 6))
        self.layers[0].weight = Scaled(self.layers[0].weight.detach())
        self.layers[0].weight.gain = 2.0
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.seen = []

    def forward(self, x):
        weight = self.layers[0].weight
        self.seen.append((isinstance(weight, Scaled), weight.gain, *weight.shape))
        return self.layers(x) * self.scale * weight.gain


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "zero.AdamW": lambda p: AdamW(p, lr=0.1, moments_dtype=torch.float32),
}


def train_scaled(model, optimizer, scaler, rows, clip=None):
    """Take four steps, in whose second a gradient of one row of the first weight overflows.

    Return the scales after each step.
    """
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        y = model(rows)
        scaler.scale((y[:, 0] * 1e36).sum() if step == 1 else y.square().mean()).backward()
        if clip:
            scaler.unscale_(optimizer)
            clip(1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("is_clipped", [False, True])
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ShardedGradScaler])
@pytest.mark.parametrize("stage", [soak(1), soak(2), 3])
@on_ranks(3)
def test_a_gradient_that_overflows_in_one_ranks_shard_skips_the_step_on_all(
    stage, kind, is_clipped
):
    """PyTorch's gradient scalers, with optimizers that skip and with fused ones, which are told."""
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(shifted(1)))
    for name, make in OPTIMIZERS.items():
        if is_clipped and kind is ShardedGradScaler and name in ("fused", "zero.AdamW"):
            continue  # whose found_inf has a shape that PyTorch's own fused optimizers reject
        torch.manual_seed(shifted(0))
        alone = nn.Linear(6, 5)
        net = copy.deepcopy(alone)
        optimizer = make(alone.parameters())
        clip = partial(nn.utils.clip_grad_norm_, [*alone.parameters()]) if is_clipped else None
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        expected = train_scaled(alone, optimizer, scaler, rows, clip)
        assert expected == [1024, 512, 512, 512]
        model = FullyShardedDataParallel(net, stage=stage)
        clip = model.clip_grad_norm_ if is_clipped else None
        optimizer = make(model.parameters())
        scaler = kind("cpu", init_scale=2.0**10)
        if kind is ShardedGradScaler:
            scaler.process_group = None  # its default is the world in which it was imported
        scales = train_scaled(model, optimizer, scaler, rows, clip)
        assert scales == expected, name
        assert_close(model.state_dict(), alone.state_dict(), 1e-5, name)


@pytest.mark.parametrize("names", ["replicas", "experts"])
@on_ranks(4)
def test_what_one_rank_finds_reaches_replicas_and_ranks_with_other_experts(names):
    """The gradient of one rank is infinite. Pieces of two dtypes are checked by two calls."""
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    net = nn.ModuleList([nn.Linear(32, 32).bfloat16(), nn.Linear(32, 32)])
    net.forward = lambda x: (net[1](x) + net[0](x.bfloat16())).sum()
    if names == "replicas":
        model = FullyShardedDataParallel(net, pairs[rank // 2], replicate_group=across[rank % 2])
    else:  # the first layer is an expert, which another pair of ranks does not have
        own = dict.fromkeys(net[0].parameters(), {"process_group": pairs[rank // 2]})
        model = FullyShardedDataParallel(net, per_parameter=own)
    model(torch.ones(1, 32)).backward()
    for bad in range(4):
        for layer in net:
            layer.weight.grad = torch.full_like(layer.weight, float("inf") if rank == bad else 1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        scaler.step(torch.optim.SGD(model.parameters(), lr=0.0))
        scaler.update()
        assert scaler.get_scale() == 2


@pytest.mark.parametrize("stage", [soak(1), 2, soak(3)])
@on_ranks(2)
def test_weight_decay_by_the_number_of_dimensions_is_that_of_one_process(stage):
    """Convolutions, matrices, vectors and a number: each piece has as many dims as its whole."""

    def make():
        torch.manual_seed(shifted(0))
        layers = nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 4), nn.LayerNorm(4), nn.PReLU(1)
        net = nn.Sequential(*layers).double()
        net.number = nn.Parameter(torch.ones((), dtype=torch.float64))
        return net

    def groups(parameters):
        parameters = [*parameters]
        decayed = [p for p in parameters if p.dim() >= 2]
        rest = [p for p in parameters if p.dim() < 2]
        return [{"params": decayed, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]

    x = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(shifted(1))).double()
    alone, net = make(), make()
    dims = [max(p.dim(), 1) for p in net.parameters()]
    model = FullyShardedDataParallel(net, units=[net[2]], stage=stage)
    assert [p.dim() for p in model.parameters()] == dims
    for model, rows in ((alone, x), (model, x.chunk(2)[dist.get_rank()])):
        optimizer = torch.optim.SGD(groups(model.parameters()), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            if model is alone:  # where it stays without one
                alone.number.grad = torch.zeros_like(alone.number)
            optimizer.step()
    assert_close(model.state_dict(), alone.state_dict(), 1e-12)


ALLOWED = {  # what writes each element by itself, or sees shapes only
    "in place": lambda p: p.mul_(2).sub_(0.1 * p.detach()),
    "by operators": lambda p: _add_and_halve(p),
    "clipped by value": lambda p: p.clamp_(-0.1, 0.1),
    "an average": lambda p: torch.zeros_like(p).lerp_(p, 0.25),
    "averages": lambda p: _average(torch._foreach_lerp_, p),
    "for each": lambda p: torch._foreach_mul_([p], 2)[0],
    "filled": lambda p: p.fill_(3.0),
    "like": lambda p: torch.zeros_like(p),
    "moved to where it is": lambda p: p.to(p.device, torch.float32),
    "detached": lambda p: p.detach().cumsum(0),
    "shown": lambda p: torch.tensor(len(repr(p)) + len(str(p)) + len(p) + p.dim()),
}
REFUSED = {  # what needs other elements, too, or equal random numbers; and results that might
    "shape": lambda p: 0.1 / p.shape[-1],
    "size": lambda p: p.size(-1),
    "number": lambda p: p.numel(),
    "stride": lambda p: p.stride(0),
    "sum": lambda p: p.sum(),
    "penalty": lambda p: 0.1 * (p**2).sum(),
    "norm of rows": lambda p: p.norm(dim=-1, keepdim=True),
    "normalized": lambda p: nn.functional.normalize(p, dim=-1),
    "softmax": lambda p: p.softmax(-1),
    "clipped": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "is finite": lambda p: bool(p.isfinite().all()),
    "drawn": lambda p: nn.init.xavier_uniform_(p),
    "normal": lambda p: p.normal_(),
    "dropout": lambda p: nn.functional.dropout(p),
    "noise": lambda p: p.add_(torch.randn_like(p)),
    "linear": lambda p: nn.functional.linear(torch.ones(1, 1), p),
    "embedding": lambda p: nn.functional.embedding(torch.zeros(1, dtype=torch.long), p),
    "broadcast": lambda p: p * torch.ones(1, 5),
    "row": lambda p: p[:2],
    "flattened": lambda p: p.view(-1),
    "transposed": lambda p: p.T,
    "equal": lambda p: torch.equal(p, p),
    "half": lambda p: p / 2,
    "converted": lambda p: p.double(),
    "copied": copy.deepcopy,
    "data of a gradient": lambda p: p.data.norm(),
    "an average of rows": lambda p: torch.zeros(len(p), 6).lerp_(p, 0.25),
}


def _add_and_halve(p):
    p += 1
    p /= 2
    return p


def _average(kernel, p):
    average = torch.zeros_like(p)
    kernel([average], [p], 0.25)
    return average


@on_ranks(2)
def test_pieces_and_their_gradients_serve_element_by_element_and_are_refused_otherwise():
    net = Features()
    model = FullyShardedDataParallel(net, units=[net.layers[1]], stage=2)
    model(torch.ones(3, 6)).sum().backward()
    piece = net.layers[0].weight
    assert 0 < len(piece) < 192
    for of in (lambda: piece, lambda: piece.grad):
        for name, use in ALLOWED.items():
            plain = of().detach().clone()
            with torch.no_grad():
                found = use(of()).detach()
            assert name == "shown" or found.equal(use(plain)), name
    with torch.no_grad():
        for of in (lambda: piece, lambda: piece.grad):
            before = of().detach().clone()
            for name, use in REFUSED.items():
                if name == ("data of a gradient" if of() is piece else "clipped"):
                    continue
                with pytest.raises(RuntimeError) as error:
                    use(of())
                    pytest.fail(name)
                assert "'layers.0.weight' is sharded, and" in str(error.value), name
            assert torch.equal(of().detach(), before)
    with pytest.raises(RuntimeError, match="'layers.0.weight' is sharded, and square"):
        (model(torch.ones(3, 6)).sum() + 0.1 * piece.square().sum()).backward()


@pytest.mark.parametrize("stage", [soak(1), 2, 3])
@on_ranks(2)
def test_forward_sees_the_class_and_the_attributes_of_the_users_parameters(stage):
    net = Features()
    model = FullyShardedDataParallel(net, units=[net.layers[1]], stage=stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 6)).sum().backward()
        optimizer.step()
        net.layers[0].weight.gain += 1  # also one that is set later
        assert isinstance(net.layers[0].weight, Scaled)
    assert net.seen == [(True, 2.0, 32, 6), (True, 3.0, 32, 6)]


class Allocations(TorchDispatchMode):
    """Notes the storages of copies in 16 bits."""

    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **kwargs or {})
        if operator is torch.ops.aten._to_copy.default and result.shape == (64, 64):
            self.storages.append(StorageWeakRef(result.untyped_storage()))
        return result


@pytest.mark.parametrize("has_grad", [False, True])
@on_ranks(2)
def test_no_16_bit_copy_of_a_whole_weight_outlives_a_pass_of_stage_3(has_grad):
    """Autocast would keep copies of weights until its block ends."""
    net = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)])
    model = FullyShardedDataParallel(net, units=[*net][:-1], stage=3)
    at_once = []

    def count(*arguments):
        at_once.append(sum(not storage.expired() for storage in made.storages))

    for layer in net:
        layer.register_forward_hook(count)
    with torch.autocast("cpu", torch.bfloat16), Allocations() as made:
        for _ in range(2):
            with torch.set_grad_enabled(has_grad):
                loss = model(torch.ones(2, 64)).float().sum()
            if has_grad:
                loss.backward()
            del loss
            assert all(storage.expired() for storage in made.storages) and made.storages
    assert has_grad or max(at_once) <= 3  # two units and the root


# ---- scripts -------------------------------------------------------------------------------------

ENDS = """
    import gc, os, sys
    import torch
    import torch._dynamo, torch.multiprocessing
    import torch.distributed as dist
    from torch import nn
    sys.path.append(os.path.join(os.environ["PYTHONPATH"], "tests", "support"))
    from collectives import all_reduce
    from ddp import DistributedDataParallel as DDP
    from pipeline import Pipeline, zb_h1
    from ranks import shifted
    from tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from zero import FullyShardedDataParallel as FSDP, ZeroRedundancyOptimizer

    def not_awaited():
        group = dist.new_group([0, 1])
        for _ in range(3):
            all_reduce(torch.ones(1000), group=group, async_op=True)

    def pending():
        x = torch.ones(1 << 20)
        works = [all_reduce(x, async_op=True) for _ in range(20)]

    def never_destroyed():
        pending()
        dist.destroy_process_group = lambda: None

    def train(wrap, make_optimizer=torch.optim.SGD, **how):
        model = wrap(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
        optimizer = make_optimizer(model.parameters(), lr=0.1, **how)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()

    def split(model):
        model[0] = ColumnParallelLinear(64, 64, group=dist.group.WORLD)
        model[2] = RowParallelLinear(64, 8, group=dist.group.WORLD)
        return model

    def pipeline_with_a_rank_that_fails():
        torch.manual_seed(shifted(0))
        tokens, labels = torch.randint(50, (8, 6)), torch.randint(5, (8,))
        layers = nn.Embedding(50, 16), nn.Flatten(), nn.Linear(96, 32), nn.Linear(32, 5)
        stage = nn.Sequential(*(layers[3:] if rank else layers[:3]))
        optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
        share = lambda logits, labels: nn.functional.cross_entropy(logits, labels) / 4
        pipeline, losses = Pipeline(stage, zb_h1(2, 4), share, shape=(2, 32)), []
        for _ in range(20):
            optimizer.zero_grad()
            losses.append(pipeline.step(tokens, labels))
            optimizer.step()
        assert rank == 0 or losses[-1] < losses[0] / 2, losses
        try:
            pipeline.step(tokens, labels if rank == 0 else labels + 5)  # there are 5 classes
        except (IndexError, RuntimeError) as error:  # its own error, or a lost connection
            print(f"rank {rank}: {type(error).__name__}: {error}\\n", end="", flush=True)

    uses = [
        not_awaited,
        pending,
        never_destroyed,
        lambda: train(DDP),
        lambda: train(DDP, ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD),
        lambda: train(FSDP),
        lambda: train(lambda model: FSDP(model, units=[model[0], model[2]])),
        lambda: train(split),
    ]
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    gc.freeze()  # so that a process exits faster
    for number, use in enumerate([*uses * int(sys.argv[1]), pipeline_with_a_rank_that_fails]):
        if os.fork() == 0:  # the new process leaves the loop
            break
        _, status = os.wait()
        # One write, so that the other rank's output does not cut the line in two.
        print(f"{number} ended with status {status}\\n", end="", flush=True)
    else:
        sys.exit()
    store = dist.FileStore(f"{number}.store")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    use()
    dist.destroy_process_group()
"""


@pytest.mark.soak
@pytest.mark.parametrize("times", [1, 5])
def test_scripts_exit_with_0_and_a_rank_that_fails_in_a_pipeline_does_not_hang_the_other(
    times, tmp_path
):
    """Each use runs in a process of its own, on two ranks of one torchrun."""
    done = launch(tmp_path, 2, ENDS, times, timeout=240)
    assert done.returncode == 0, done.stderr
    ended = [line for line in done.stdout.splitlines() if " ended with " in line]
    ends = [f"{number} ended with status 0" for number in range(8 * times + 1)]
    assert sorted(ended) == sorted(2 * ends), done.stderr
    assert "\nrank 1: IndexError: Target " in done.stdout, done.stderr
    assert "\nrank 0: DistBackendError: " in done.stdout, done.stderr


# ---- hybrid.py -----------------------------------------------------------------------------------


HYBRID = (PROJECT / "hybrid.py").read_text()
SMALL = f"--hidden 16 --heads 2 --seq-len 16 --data {PROJECT / 'ddp.py'}"


def said(done):
    """Return the errors that hybrid.main() printed to stderr."""
    return [x.split(": ", 1)[1] for x in done.stderr.splitlines() if ".py: error: " in x]


def read_metrics(file):
    """Return the objects of a metrics file, which must be strict JSON."""
    wrong = lambda constant: pytest.fail(f"{constant} is not JSON")
    return [json.loads(line, parse_constant=wrong) for line in file.read_text().splitlines()]


@pytest.mark.soak
def test_torchrun_and_one_process_write_the_same_metrics(tmp_path):
    flags = f"{SMALL} --microbatches 4 --layers 4 --steps 3 --sample 0 --metrics".split()
    command = [sys.executable, PROJECT / "hybrid.py", *flags, "one"]
    one = subprocess.run(command, cwd=tmp_path, timeout=120, capture_output=True, text=True)
    two = launch(tmp_path, 2, HYBRID, *flags, "two", "--pp", 2, "--schedule", "zb-v")
    words = "step loss grad_norm lr tokens_per_s tflops memory_mb".split()
    for done in (one, two):
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert " parameters on " in lines[0]
        assert "\nvalidation loss " in done.stdout
        steps = [line.split() for line in lines if line.startswith("step ")]
        assert [line[:4] for line in steps] == [f"step {k} of 3".split() for k in (1, 2, 3)]
        assert {*words} <= {*steps[0]}
    metrics = [read_metrics(tmp_path / name) for name in ("one", "two")]
    assert [lines[0]["flags"]["pp"] for lines in metrics] == [1, 2]
    for ours, theirs in zip(*(lines[1:] for lines in metrics), strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("loss", "grad_norm", "validation_loss"):
            assert ours.get(name, 0) == pytest.approx(theirs.get(name, 0), rel=1e-5)
    times = {"tokens_seen", "elapsed_s", "left_s"}
    assert len(metrics[0]) == 5 and metrics[0][1].keys() == {*words} | times
    assert [line.get("tokens_seen") for line in metrics[0][1:4]] == [256, 512, 768]
    assert len(str(metrics[0][1]["loss"])) > 8  # more than the four digits that are printed


@pytest.mark.soak
def test_an_error_on_one_machine_is_printed_once(tmp_path):
    script = """
        import os, sys
        import hybrid

        os.environ["LOCAL_WORLD_SIZE"] = "1"
        flags = ["--tp", "3", "--heads", "3", "--hidden", "48"]
        sys.exit(hybrid.main(flags + ["--data", "MISSING"] * (os.environ["RANK"] == "2")))
    """
    done = launch(tmp_path, 3, script)
    assert done.returncode != 0
    missing = "rank 2: there is no file or folder MISSING"
    assert said(done) == [f"error: --data (default): {missing}"]
    assert 'hybrid.py", line' not in done.stderr and 'script.py", line' not in done.stderr
