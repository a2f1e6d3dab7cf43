"""What users of PyTorch write, ordinary and odd; scripts run under torchrun, and end normally."""

import copy
import io
import json
import os
import subprocess
import sys
import textwrap
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.checkpoint import checkpoint

from collectives import count_bytes, gather_objects
from ddp import DistributedDataParallel
from pipeline import simulate, trace_events, zb_v
from zero import FullyShardedDataParallel, ZeroRedundancyOptimizer

from ranks import PROJECT, on_ranks


def launch(folder, world_size, script, *arguments, timeout=120):
    """Run the text of a script under torchrun; returns its CompletedProcess, with text output.

    The script finds the project's modules; its own file lies in `folder`.
    """
    file = folder / "script.py"
    file.write_text(textwrap.dedent(script))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={world_size}", str(file), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=environment, cwd=folder, timeout=timeout, capture_output=True, text=True
    )


# ---- ddp.py --------------------------------------------------------------------------------------


def _net(width=6, seed=0):
    torch.manual_seed(seed)
    first, last = nn.Linear(width, width + 1), nn.Linear(width + 1, width)
    return nn.Sequential(first, nn.Tanh(), last).double()


def _parts(examples=3, width=6, seed=1):
    """Each rank's rows of a batch."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(examples * dist.get_world_size(), width, generator=generator)
    return x.double().chunk(dist.get_world_size())


def _gradients(module):
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def _expected(net, loss=lambda net, x: net(x).square().mean()):
    """The gradients of one process: of the mean over the ranks' parts. net: a new one."""
    parts = _parts()
    (sum(loss(net, part) for part in parts) / len(parts)).backward()
    return _gradients(net)


def _own():
    return _parts()[dist.get_rank()]


def _close(actual, expected, tolerance=1e-12):
    assert len(expected) > 0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@dataclass
class _Fields:
    y: torch.Tensor


class _Ordered(OrderedDict):
    pass


class _Attributes:
    def __init__(self, y):
        self.y = y


class _Hidden:
    """Holds a tensor where nobody can find it."""

    __slots__ = ("y",)

    def __init__(self, y):
        self.y = y


class _Returns(nn.Module):
    """A net that returns its output in some object, or None and keeps its loss as an attribute."""

    def __init__(self, wrap, width=6):
        super().__init__()
        self.net, self.wrap = _net(width), wrap

    def forward(self, x):
        y = self.net(x)
        if self.wrap is None:
            self.loss = y.square().mean()
            return None
        return self.wrap(y)


KINDS = {
    "dataclass": (_Fields, lambda output: output.y),
    "ordered": (lambda y: _Ordered(y=y), lambda output: output["y"]),
    "object": (_Attributes, lambda output: output.y),
    "nested": (lambda y: [_Fields({"y": (y,)})], lambda output: output[0].y["y"][0]),
    "hidden": (_Hidden, lambda output: output.y),
    "none": (None, None),
}


def _loss_of(kind, model, x):
    wrap, unwrap = KINDS[kind]
    output = model(x)
    return model.module.loss if wrap is None else unwrap(output).square().mean()


def _whole_gradients(model):
    """The gradients of a sharded module by name, put together by torch's own all_gather."""
    whole = {}
    for name, piece in model.named_parameters():
        row = torch.zeros(piece.whole_shape.numel(), dtype=piece.dtype)
        if piece.grad is not None:
            row[piece.first : piece.first + piece.numel()] = piece.grad
        dist.all_reduce(row)
        whole[name] = row.view(piece.whole_shape)
    return whole


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrapper", [DistributedDataParallel, FullyShardedDataParallel])
@on_ranks(2)
def test_a_wrapper_reduces_whatever_its_module_returns(wrapper, kind):
    model = wrapper(_Returns(KINDS[kind][0]))
    for _ in range(2):
        model.zero_grad()
        _loss_of(kind, model, _own()).backward()
    if wrapper is DistributedDataParallel:
        _close(_gradients(model.module.net), _expected(_net()))
    else:
        expected = {f"net.{name}": grad for name, grad in _expected(_net()).items()}
        _close(_whole_gradients(model), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@on_ranks(2)
def test_a_ddp_module_may_be_recomputed(use_reentrant):
    net = _net()
    model = DistributedDataParallel(net)
    for _ in range(2):
        net.zero_grad()
        x = _own().requires_grad_()
        checkpoint(model, x, use_reentrant=use_reentrant).square().mean().backward()
        _close(_gradients(net), _expected(_net()))


@on_ranks(2)
def test_ddp_can_be_copied_and_saved_after_a_step():
    """A copy and a loaded file train like the original, and apart from it."""
    net = _net()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    model(_own()).square().mean().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    group = dist.new_group(range(dist.get_world_size()))
    of_a_group = DistributedDataParallel(_net(), group)
    assert copy.deepcopy(of_a_group).process_group is group
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        before = _gradients(net)
        other.zero_grad()
        other(_own()).square().mean().backward()
        _close(_gradients(other.module), _expected(_net()))
        with torch.no_grad():
            other.module[0].weight.zero_()
        assert net[0].weight.abs().min() > 0
        _close(_gradients(net), before)


@on_ranks(2)
def test_autograd_grad_through_ddp_sends_nothing_and_backward_through_it_reduces():
    """A gradient penalty: autograd.grad() through the wrapper, then backward through that."""
    net = _net()

    def loss(net, x):
        x = x.clone().requires_grad_()
        y = net(x)
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y.mean() + slope.square().mean()

    model = DistributedDataParallel(net)
    x = _own().requires_grad_()
    with count_bytes() as traffic:
        (slope,) = torch.autograd.grad(model(x).sum(), x)
        (slopes,) = torch.autograd.grad(model(x).sum(), net[0].bias)
    assert traffic.messages() == 0 and net[0].bias.grad is None
    for _ in range(2):
        net.zero_grad()
        loss(model, _own()).backward()
        _close(_gradients(net), _expected(_net(), loss))
    net.zero_grad()
    with pytest.raises(RuntimeError, match=r"of '2\.\w+' is part of a graph \(create_graph=True"):
        model(_own()).square().mean().backward(create_graph=True)


@on_ranks(2)
def test_a_backward_past_the_wrapper_is_this_ranks_own():
    """The module called itself, on one rank alone: its gradients stay there."""
    net = _net()
    model = DistributedDataParallel(net)
    model(_own()).square().mean().backward()
    net.zero_grad()
    if dist.get_rank() == 1:
        with count_bytes() as traffic:
            net(_own()).square().mean().backward()
        assert traffic.messages() == 0
        _close(_gradients(net), _expected(_net(), lambda net, x: net(_own()).square().mean()))
    net.zero_grad()
    model(_own()).square().mean().backward()
    _close(_gradients(net), _expected(_net()))


class _Undefined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x.clone()

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None


class _NoGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.weight = _net(), nn.Parameter(torch.ones(3).double())

    def forward(self, x):
        return _Undefined.apply(self.net(x), self.weight)


@on_ranks(2)
def test_an_undefined_gradient_stays_none_as_in_torch():
    theirs, ours = _NoGradient(), _NoGradient()
    models = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True), (
        DistributedDataParallel(ours, find_unused_parameters=True)
    )
    for model in models:
        model(_own()).square().mean().backward()
    assert theirs.weight.grad is None and ours.weight.grad is None
    _close(_gradients(ours.net), _gradients(theirs.net))


@on_ranks(2)
def test_two_wrappers_of_one_module_and_sparse_gradients_are_refused():
    net = _net()
    models = DistributedDataParallel(net), DistributedDataParallel(net)
    with pytest.raises(RuntimeError, match="somebody took the gradient of .*0.weight.* another"):
        models[0](_own()).square().mean().backward()
    sharded = FullyShardedDataParallel(_net())
    for wrap in (DistributedDataParallel, FullyShardedDataParallel):
        with pytest.raises(ValueError, match="'.*0.weight' is sharded by FullySharded"):
            wrap(nn.Sequential(sharded, nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="'0 of group 0' is sharded by FullySharded"):
        ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="holds a DistributedDataParallel"):
        FullyShardedDataParallel(nn.Sequential(DistributedDataParallel(_net())))
    with pytest.raises(ValueError, match=r"device_ids=\['meta'\], '0.weight' on cpu"):
        DistributedDataParallel(_net(), device_ids=["meta"])
    DistributedDataParallel(_net(), device_ids=["cpu"])
    for factor in (0, -1.0, float("nan")):
        for wrap in (DistributedDataParallel, FullyShardedDataParallel):
            with pytest.raises(ValueError, match=f"gradient_divide_factor={factor} must be"):
                wrap(_net(), gradient_divide_factor=factor)
    sparse = DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(RuntimeError, match="the gradient of 'weight' is sparse"):
        sparse(torch.tensor([1, 2])).sum().backward()


# ---- zero.py -------------------------------------------------------------------------------------


def _train(model, optimizer, steps=3, clip=None):
    for step in range(steps):
        optimizer.zero_grad()
        model(_parts(seed=step)[dist.get_rank()]).square().mean().backward()
        if clip:
            clip()
        optimizer.step()


def _train_alone(net, steps=3, clip=None, **defaults):
    """One process on the whole batch."""
    optimizer = torch.optim.AdamW(net.parameters(), **{"lr": 0.05} | defaults)
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.cat(_parts(seed=step))).square().mean().backward()
        if clip:
            clip()
        optimizer.step()
    return net.state_dict()


@on_ranks(1, 2, 3)
def test_ddp_with_the_zero_optimizer_trains_as_one_process_does():
    """PyTorch's documented pair, theirs and ours in all combinations; Adam sees equal gradients."""
    expected = _train_alone(_net())
    for wrap in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
        net = _net()
        model = wrap(net)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
        _train(model, optimizer)
        _close(net.state_dict(), expected, 1e-10)


@pytest.mark.parametrize("wrap_first", [True, False])
@pytest.mark.parametrize("wrap", [DistributedDataParallel, nn.parallel.DistributedDataParallel])
@on_ranks(2)
def test_stage_2_under_ddp_is_refused(wrap, wrap_first):
    net = _net()
    make = partial(ZeroRedundancyOptimizer, net.parameters(), torch.optim.SGD, lr=0.1)
    model = wrap(net) if wrap_first else None
    optimizer = make(shard_gradients=True)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(RuntimeError, match="ZeRO-2.* (DistributedDataParallel|wrapper)|or ZeRO-2"):
        _train(model or wrap(net), optimizer)
    _close(net.state_dict(), before)


@on_ranks(3)
def test_stage_2_knows_what_the_module_has_zeroed():
    """Stage 2: between steps the module zeroes its gradients; in a further one nobody does."""
    for set_to_none in (True, False):
        alone, net = _net(), _net()
        optimizers = [torch.optim.SGD(alone.parameters(), lr=0.1), ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.SGD, shard_gradients=True, bucket_cap_mb=1e-6, lr=0.1
        )]
        for trained, optimizer, parts in (
            (alone, optimizers[0], lambda step: torch.cat(_parts(seed=step))),
            (net, optimizers[1], lambda step: _parts(seed=step)[dist.get_rank()]),
        ):
            for step in range(5):
                if step != 2:
                    trained.zero_grad(set_to_none)
                trained(parts(step)).square().mean().backward()
                if step == 3:
                    trained[0].bias.grad = None
                optimizer.step()
        _close(net.state_dict(), alone.state_dict())
    with pytest.raises(RuntimeError, match="under ZeRO-2 .grad has left for its owner"):
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)


@on_ranks(2)
def test_weights_changed_by_hand_are_what_training_goes_on_from():
    """Weights that are loaded or clamped after the optimizer was made, in 16 and in 64 bits."""
    for stage_2 in (False, True):
        for param_dtype in (None, torch.bfloat16):
            net = _net().float()
            optimizer = ZeroRedundancyOptimizer(
                net.parameters(),
                torch.optim.SGD,
                shard_gradients=stage_2,
                param_dtype=param_dtype,
                lr=0.0,
            )
            dtype = param_dtype or torch.float32
            other = _net(seed=5).to(dtype)
            net.load_state_dict(other.state_dict())
            with torch.no_grad():
                net[0].weight.clamp_(-0.1, 0.1)
            net[2].bias.data = torch.full_like(net[2].bias, 3.0)  # other memory
            net(_own().to(dtype)).square().mean().backward()
            optimizer.step()
            assert torch.equal(net[0].weight, other[0].weight.clamp(-0.1, 0.1))
            assert (net[2].bias == 3).all() and torch.equal(net[2].weight, other[2].weight)
            optimizer.param_groups[0]["lr"] = 1.0
            optimizer.step()
            assert (net[2].bias != 3).any()
            with pytest.raises(RuntimeError, match=r"has become .* torch.float64, its|ZeRO-2"):
                net.double()
                optimizer.step()


@on_ranks(2)
def test_a_plain_state_leaves_the_exact_weights_alone():
    """Adam's state of plain fp32 training: the exact weights stay exact."""
    alone = _net().float()
    _train_alone(alone.double())
    plain = torch.optim.AdamW(alone.float().parameters(), lr=0.05)
    alone(torch.cat(_parts()).float()).square().mean().backward()
    plain.step()
    exact = copy.deepcopy(alone.state_dict())
    optimizer = ZeroRedundancyOptimizer(
        alone.parameters(), torch.optim.AdamW, param_dtype=torch.bfloat16, lr=0.05
    )
    optimizer.load_state_dict(plain.state_dict())
    masters = [values["master"] for values in optimizer.state_dict()["state"].values()]
    for master, expected, rounded in zip(masters, exact.values(), alone.parameters()):
        assert torch.equal(master, expected) and torch.equal(rounded, expected.bfloat16())


def _stage_1(net):
    return net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)


def _stage_3(net):
    model = FullyShardedDataParallel(net, units=[net[0]])
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("make", [_stage_1, _stage_3])
@on_ranks(2)
def test_the_sharded_grad_scaler_of_torch_skips_on_all_ranks(make):
    """One rank's gradients overflow once: every rank skips that step, and all others it takes."""
    nets = _net(), _net()
    models, optimizers = zip(*[make(net) for net in nets])
    scaler = ShardedGradScaler(device="cpu", init_scale=8.0, growth_interval=100)
    for step in range(3):
        for model, optimizer, scaled in zip(models, optimizers, (True, False)):
            optimizer.zero_grad()
            loss = model(_parts(seed=step)[dist.get_rank()]).square().mean()
            if not scaled and step != 1:
                loss.backward()
                optimizer.step()
            elif scaled:
                overflow = float("inf") if step == 1 and dist.get_rank() == 1 else 1.0
                (scaler.scale(loss) * overflow).backward()
                scaler.step(optimizer)
                scaler.update()
    whole = [model.state_dict() for model in models]
    _close(whole[0], whole[1])
    assert scaler.get_scale() == 4


class _Parent(nn.Module):
    """A plain layer before a sharded net."""

    def __init__(self, wrap):
        super().__init__()
        torch.manual_seed(3)
        self.plain = nn.Linear(6, 6).double()
        self.inner = wrap(_net())
        self.register_buffer("scale", torch.ones(()).double())

    def forward(self, x):
        return self.inner(self.plain(x)) * self.scale


@on_ranks(2)
def test_a_sharded_module_may_be_part_of_another():
    wrap = lambda net: FullyShardedDataParallel(net, units=[net[0], net[2]])
    alone, model = _Parent(nn.Identity()), _Parent(wrap)
    alone.inner = _net()
    names = [name for name, _ in alone.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    assert len(list(model.parameters())) == len(names)
    sizes = gather_objects(sum(p.numel() for p in model.inner.parameters()))
    assert sum(sizes) == sum(p.numel() for p in _net().parameters()) and 0 not in sizes
    plain = DistributedDataParallel(model.plain)
    model.plain = plain
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    _train(model, optimizer)
    model.plain = plain.module
    expected = _train_alone(alone)
    state = model.state_dict()
    assert list(state) == list(expected) and state._metadata.keys() >= {"", "plain", "inner"}
    _close(state, expected, 1e-10)
    prefixed = {}
    model.inner.state_dict(destination=prefixed, prefix="a.b.")
    assert set(prefixed) == {f"a.b.{name}" for name in _net().state_dict()}
    other = _Parent(wrap)
    missing = other.load_state_dict({k: v for k, v in state.items() if "inner.2" not in k}, False)
    assert set(missing.missing_keys) == {"inner.module.2.weight", "inner.module.2.bias"}
    for assign in (False, True):
        other = _Parent(wrap)
        other.load_state_dict(state, assign=assign)
        _close(other.state_dict(), expected, 1e-10)
        _close(other(_own()), alone(_own()), 1e-10)
    with pytest.raises(RuntimeError, match="Unexpected key.* \"inner.module.other\""):
        other.load_state_dict(state | {"inner.other": torch.ones(1)})


@on_ranks(2)
def test_parameters_of_a_sharded_module_can_be_read_between_passes():
    """Norms, repr, copies of parameters and moving averages see this rank's pieces."""
    net = _net()
    before = list(net.parameters())
    whole = {name: p.detach().clone() for name, p in net.named_parameters()}
    model = FullyShardedDataParallel(net, units=[net[0], net[2]])
    optimizer = torch.optim.AdamW(before, lr=0.05)  # the same objects as before
    assert all(a is b for a, b in zip(before, net.parameters()))
    for step in range(2):
        for name, p in net.named_parameters():
            end = p.first + p.numel()
            if step == 0:
                assert torch.equal(p, whole[name].flatten()[p.first : end])
            assert p.norm().isfinite() and repr(p) and copy.deepcopy(p).shape == p.shape
        averages = [p.detach().clone() for p in model.parameters()]
        repr(model), sum(p.sum() for p in net.parameters())
        _train(model, optimizer, 1)
        with torch.no_grad():
            for average, p in zip(averages, model.parameters()):
                average.lerp_(p, 0.5)
    for copied in (lambda: copy.deepcopy(model), lambda: torch.save(model, io.BytesIO())):
        with pytest.raises(RuntimeError, match="cannot be copied or pickled: call state_dict"):
            copied()
    with pytest.raises(RuntimeError, match=r"'0.weight' has become .* this rank's piece is"):
        model.float()(_own())


@on_ranks(3)
def test_pieces_may_be_changed_by_hand():
    """Pieces that are set by hand, or replaced, are what the next pass computes with."""
    net = _net()
    model = FullyShardedDataParallel(net, units=[net[0], net[2]])
    with torch.no_grad():
        net[0].weight.mul_(2)
    net[0].bias.data = net[0].bias.data * 3
    net[2].weight = nn.Parameter(net[2].weight.detach() * 4)
    expected = _net()
    with torch.no_grad():
        for parameter, factor in zip(expected.parameters(), (2, 3, 4, 1)):
            parameter.mul_(factor)
        _close(model(_own()), expected(_own()))
    _close(model.state_dict(), expected.state_dict())
    _train(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    _close(model.state_dict(), _train_alone(expected), 1e-10)


class _Layers(nn.Module):
    """Units that return their output in some object."""

    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList(_Returns(KINDS[kind][0]) for _ in range(3))
        self.kind = kind

    def forward(self, x):
        for layer in self.layers:
            x = KINDS[self.kind][1](layer(x))
        return x


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
@on_ranks(2)
def test_units_may_return_objects_and_what_hides_its_tensors_is_refused(kind):
    torch.manual_seed(0)
    alone = _Layers(kind)
    net = copy.deepcopy(alone)
    model = FullyShardedDataParallel(net, units=net.layers)
    loss = model(_own()).square().mean()
    if kind == "hidden":
        with pytest.raises(RuntimeError, match="on a way other than through the outputs of their"):
            loss.backward()
        return
    loss.backward()
    _close(_whole_gradients(model), _expected(alone))


@on_ranks(2)
def test_autograd_grad_through_a_sharded_module_reduces_nothing():
    net = _net()
    model = FullyShardedDataParallel(net, units=[net[0], net[2]])
    x = _own().requires_grad_()
    (expected,) = torch.autograd.grad(_net()(x).square().mean(), x)
    for _ in range(2):
        with count_bytes() as traffic:
            (found,) = torch.autograd.grad(model(x).square().mean(), x)
        _close(found, expected)
        assert traffic.bytes("reduce_scatter_single") == 0
        assert all(piece.grad is None for piece in model.parameters())
        model(_own()).square().mean().backward()
        _close(_whole_gradients(model), _expected(_net()))
        model.zero_grad()
    with pytest.raises(RuntimeError, match="create_graph=True: a sharded module has no gradients"):
        torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    model(_own()).square().mean().backward()
    _close(_whole_gradients(model), _expected(_net()))


@on_ranks(2)
def test_a_recurrent_layer_can_be_sharded():
    """A module with a list of its own of its parameters."""
    torch.manual_seed(0)
    alone = nn.LSTM(6, 5).double()
    net = copy.deepcopy(alone)
    model = FullyShardedDataParallel(nn.ModuleDict({"lstm": net}), units=[net])
    model.module.forward = lambda x: net(x)[0]
    loss = lambda lstm, x: lstm(x)[0].square().mean()
    model(_own()).square().mean().backward()
    expected = {f"lstm.{name}": g for name, g in _expected(alone, loss).items()}
    _close(_whole_gradients(model), expected)


class _Inside(nn.Module):
    """A unit of two layers that recomputes, normalises its weight, or changes what it is given."""

    def __init__(self, how, width=6):
        super().__init__()
        self.a, self.b, self.how = nn.Linear(width, width), nn.Linear(width, width), how
        if how == "weight norm":
            nn.utils.weight_norm(self.b)
        if how == "post hook":
            self.b.register_forward_pre_hook(lambda module, args: (args[0] * module.weight[0],))

    def forward(self, state):
        x = state["x"]
        if isinstance(self.how, bool):
            h = checkpoint(self.a, x, use_reentrant=self.how).tanh()
        else:
            h = self.a(x).tanh()
        state["x"] = x + self.b(h)
        return state


class _Stack(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(_Inside(how) for _ in range(3))
        self.double()

    def forward(self, x):
        state = {"x": self.first(x)}
        for layer in self.layers:
            state = layer(state)
        return state["x"]


@pytest.mark.parametrize("how", [False, True, "weight norm", "post hook", "plain"])
@on_ranks(2)
def test_units_may_recompute_normalise_weights_and_change_their_inputs(how):
    net, expected = _Stack(how), _expected(_Stack(how))
    model = FullyShardedDataParallel(net, units=net.layers)
    for _ in range(2):
        model.zero_grad()
        model(_own()).square().mean().backward()
        _close(_whole_gradients(model), expected)


@on_ranks(2)
def test_a_hook_of_a_unit_sees_whole_parameters():
    """The unit itself has a hook, registered before, that makes its weight."""
    alone, net = _net(), _net()
    for module in (alone, net):
        nn.utils.weight_norm(module[2])
    model = FullyShardedDataParallel(net, units=[net[0], net[2]])
    model(_own()).square().mean().backward()
    _close(_whole_gradients(model), _expected(alone))


def _fail(grad):
    raise KeyError("backward fails here")


@on_ranks(2)
def test_after_a_backward_that_failed_gradients_can_be_zeroed_and_training_go_on():
    """A backward that fails, the module's zero_grad(), and another one."""
    for kind in ("ddp", 2, 3):
        net = _net()
        model, optimizer = net, None
        if kind == "ddp":
            model = DistributedDataParallel(net, bucket_cap_mb=1e-6)
        elif kind == 3:
            model = FullyShardedDataParallel(net, units=[net[0]])
        else:
            optimizer = ZeroRedundancyOptimizer(
                net.parameters(), torch.optim.SGD, shard_gradients=True, bucket_cap_mb=1e-6, lr=1.0
            )
        model(_own()).square().mean().backward()
        loss = model(_own())
        handle = net[0].register_full_backward_hook(lambda *_: _fail(None))
        loss, other = model(_own()).square().mean(), model(_own()).square().mean()
        with pytest.raises(KeyError):
            loss.backward()
        assert {p.ndim for p in net.parameters()} == ({1} if kind == 3 else {1, 2})
        handle.remove()
        model.zero_grad()
        model(_own()).square().mean().backward()
        expected = _expected(_net())
        if kind == 2:
            before = copy.deepcopy(net.state_dict())
            optimizer.step()
            after = net.state_dict()
            _close({name: before[name] - after[name] for name in before}, expected)
        else:
            _close(_gradients(net) if kind == "ddp" else _whole_gradients(model), expected)


@on_ranks(2)
def test_the_weight_decay_of_pieces_may_be_part_of_the_loss():
    """Gradients that are there before the first backward, and a loss on the parameters."""
    alone = _net()
    sum(p.square().sum() for p in alone.parameters()).backward()
    torch.cat([alone(part).square().mean().view(1) for part in _parts()]).mean().backward()
    net = _net()
    model = FullyShardedDataParallel(net, units=[net[0]])
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    loss = model(_own()).square().mean() + sum(p.square().sum() for p in model.parameters())
    loss.backward()
    _close(_whole_gradients(model), _gradients(alone))


@on_ranks(2)
def test_fused_optimizers_see_gradients_in_the_order_of_their_weights():
    """Weights in another order in memory, and optimizers that go through memory."""
    for wrap in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
        torch.manual_seed(0)
        conv = nn.Conv2d(4, 3, 3).double().to(memory_format=torch.channels_last)
        model = wrap(conv)
        optimizer = torch.optim.Adam(conv.parameters(), lr=0.1, fused=True)
        for step in range(2):
            generator = torch.Generator().manual_seed(dist.get_rank())
            model(torch.randn(2, 4, 5, 5, generator=generator).double()).square().sum().backward()
            optimizer.step()
        if wrap is DistributedDataParallel:
            ours = copy.deepcopy(conv.state_dict())
    _close(ours, conv.state_dict())


@on_ranks(2)
def test_autograd_grad_beside_stage_2_sends_nothing():
    net = _net()
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, shard_gradients=True, foreach=True, lr=0.1
    )
    with count_bytes() as traffic:
        torch.autograd.grad(net(_own()).sum(), list(net.parameters()))
    assert traffic.messages() == 0
    _train(net, optimizer, 1)
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        optimizer.step()


class _Gives(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Parameter(torch.ones(4, 6)), nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x), self.table[:1]


@on_ranks(2)
def test_changes_that_a_wrapper_cannot_follow_are_refused():
    """What cannot be right is a sentence, at the next use."""

    def sharded():
        net = _net()
        return net, FullyShardedDataParallel(net, units=[net[0]])

    net, model = sharded()
    net[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="'0.weight' was frozen, thawed or given a hook"):
        model(_own())
    net, model = sharded()
    net[2].weight.register_hook(lambda grad: 3 * grad)
    with pytest.raises(RuntimeError, match="'2.weight' was frozen, thawed or given a hook"):
        model(_own())
    net, model = sharded()
    loss = model(_own()).sum()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    loss.backward()
    loss = model(_own()).sum()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="parameters were changed between forward and backward"):
        loss.backward()
    model(_own())  # whose parameters are those of now
    with pytest.raises(RuntimeError, match="parameters were changed between forward and backward"):
        loss.backward()
    linear = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = FullyShardedDataParallel(linear)
    linear[1].bias = linear[0].bias
    with pytest.raises(RuntimeError, match="tied after they were sharded|has become"):
        model(torch.ones(1, 4))
    gives = _Gives()
    model = FullyShardedDataParallel(nn.Sequential(gives), units=[gives])
    with pytest.raises(RuntimeError, match="what holds '0.table' returns a parameter, or a view"):
        model(torch.ones(1, 6))
    with pytest.raises(RuntimeError, match="what holds 'table' returns a parameter, or a view of"):
        FullyShardedDataParallel(_Gives())(torch.ones(1, 6))
    shared = nn.Linear(3, 3)
    shared.other = nn.Parameter(shared.weight.data)
    for wrap in (FullyShardedDataParallel, lambda net: _stage_1(net)):
        with pytest.raises(ValueError, match="share memory: tie them, or copy one"):
            wrap(shared)
    net, optimizer = _stage_1(_net())
    net(_own()).sum().backward()
    net[0].bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="parameter 1 was frozen, or thawed, after it was shar"):
        optimizer.step()
    net = _net()
    net[0].bias.requires_grad_(False)
    model = DistributedDataParallel(net)
    net[0].bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match="'0.bias' came, or was unfrozen, after the module was"):
        model(_own()).sum().backward()


@on_ranks(2)
def test_an_optimizer_may_step_in_backward():
    """Hooks of pieces run once their gradients are summed: an optimizer for each parameter."""
    net = _net()
    model = FullyShardedDataParallel(net, units=[net[0], net[2]])
    for piece in model.parameters():
        own = torch.optim.AdamW([piece], lr=0.05)
        piece.register_post_accumulate_grad_hook(
            lambda p, own=own: (own.step(), own.zero_grad()) and None
        )
    for step in range(3):
        model(_parts(seed=step)[dist.get_rank()]).square().mean().backward()
    state = model.state_dict()
    _close(state, _train_alone(_net()), 1e-10)
    for _ in range(2):
        model.load_state_dict(state, assign=True)
    _close(model.state_dict(), state)
    assert all(hasattr(p, "first") for p in model.parameters())
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match="the optimizer has 1 parameters of other modules"):
        model.optimizer_state_dict(optimizer)


# ---- scripts -------------------------------------------------------------------------------------

EACH = """
    import functools, gc, os, sys
    import torch
    import torch._dynamo, torch.multiprocessing
    import torch.distributed as dist
    import pipeline, sequence_parallel, zero

    torch.set_num_threads(1)
    gc.freeze()  # a process that ends has less to look at
    for number, name in enumerate(sys.argv[1:]):
        if (pid := os.fork()) == 0:  # each in a process of its own, which goes on below
            break
        _, status = os.waitpid(pid, 0)
        # in one write, which the other rank's cannot cut in two
        print(f"{number} ended with status {status}\\n", end="", flush=True)
    else:
        sys.exit()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = {"store": dist.FileStore(f"{name}.store"), "rank": rank, "world_size": world_size}
    dist.init_process_group = functools.partial(dist.init_process_group, **own)
    exec(compile(open(name).read(), name, "exec"))
"""
ENDS = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from collectives import all_reduce, report_stalls
    from ddp import DistributedDataParallel
    from tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from zero import FullyShardedDataParallel, ZeroRedundancyOptimizer

    def awaited():
        for _ in range(10):
            all_reduce(torch.ones(1000), async_op=True).wait()

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

    def train(wrap, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)):
        model = wrap(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
        optimizer = optimizer(model)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()

    def zero(**how):
        optimizer = ZeroRedundancyOptimizer
        sgd = torch.optim.SGD
        train(lambda model: model, lambda m: optimizer(m.parameters(), sgd, lr=1, **how))

    def split(model):
        model[0] = ColumnParallelLinear(64, 64, group=dist.group.WORLD)
        model[2] = RowParallelLinear(64, 8, group=dist.group.WORLD)
        return model

    uses = [
        awaited,
        not_awaited,
        pending,
        never_destroyed,
        lambda: train(DistributedDataParallel),
        zero,
        lambda: zero(shard_gradients=True),
        lambda: train(lambda model: FullyShardedDataParallel(model, units=[model[0], model[2]])),
        lambda: train(split),
    ]
    dist.init_process_group("gloo")
    report_stalls(30)
    uses[number % len(uses)]()
    dist.destroy_process_group()
"""
NUMBER_OF_ENDS = 18  # each use twice
# what PyTorch's documentation and courses show
DOCUMENTED = """
    import copy
    import os

    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    import torch.nn as nn
    import torch.optim as optim

    from ddp import DistributedDataParallel as DDP
    from zero import FullyShardedDataParallel as FSDP
    from zero import ZeroRedundancyOptimizer


    def basic(rank, world_size):
        model = nn.Linear(10, 10)
        ddp_model = DDP(model)
        loss_fn = nn.MSELoss()
        optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)
        outputs = ddp_model(torch.randn(20, 10))
        labels = torch.randn(20, 10)
        loss_fn(outputs, labels).backward()
        optimizer.step()
        print_equal("basic", model)


    def print_equal(name, model):
        # the same on all ranks, by torch's own collectives
        for value in model.state_dict().values():
            least, most = value.clone(), value.clone()
            dist.all_reduce(least, dist.ReduceOp.MIN)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            assert torch.equal(least, most), name
        if dist.get_rank() == 0:
            print(f"{name} is equal\\n", end="", flush=True)


    def zero(rank, world_size, use_zero):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(20, 20) for _ in range(20)])
        ddp_model = DDP(model)
        loss_fn = nn.MSELoss()
        if use_zero:
            optimizer = ZeroRedundancyOptimizer(
                ddp_model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
            )
        else:
            optimizer = torch.optim.Adam(ddp_model.parameters(), lr=0.01)
        torch.manual_seed(rank)
        for _ in range(3):
            outputs = ddp_model(torch.randn(20, 20))
            labels = torch.randn(20, 20)
            loss_fn(outputs, labels).backward()
            optimizer.step()
        print_equal("zero", model)
        return model.state_dict()


    def fsdp(rank, world_size):
        torch.manual_seed(0)
        my_module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        sharded_module = FSDP(my_module)
        optim = torch.optim.Adam(sharded_module.parameters(), lr=0.0001)
        x = sharded_module(torch.ones(2, 8))
        loss = x.sum()
        loss.backward()
        optim.step()
        print_equal("fsdp", sharded_module)


    class ToyModelWithTiedWeights(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(10, 10, bias=False)
            self.ln = nn.LayerNorm(10)
            self.fc2 = nn.Linear(10, 50, bias=False)
            self.fc3 = nn.Linear(50, 10, bias=False)
            self.fc4 = nn.Linear(10, 50, bias=False)
            self.fc5 = nn.Linear(50, 5, bias=False)
            self.fc4.weight = self.fc2.weight
            self.no_grad_fixed_param = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)

        def forward(self, x):
            x = torch.relu(self.fc2(self.ln(torch.relu(self.fc1(x)))))
            return self.fc5(torch.relu(self.fc4(torch.relu(self.fc3(x)))))


    def course(rank, world_size):
        # a wrapped copy on parts of the batch beside a plain one on all of it
        torch.manual_seed(rank)
        plain = ToyModelWithTiedWeights()
        ddp_model = DDP(copy.deepcopy(plain))
        plain.load_state_dict(ddp_model.module.state_dict())
        optimizers = [optim.SGD(model.parameters(), lr=0.1) for model in (plain, ddp_model)]
        generator = torch.Generator().manual_seed(42)
        for _ in range(5):
            x = torch.randn(20, 10, generator=generator)
            y = torch.randn(20, 5, generator=generator)
            part = slice(rank * 20 // world_size, (rank + 1) * 20 // world_size)
            for model, optimizer, rows in zip((plain, ddp_model), optimizers, (slice(None), part)):
                optimizer.zero_grad()
                nn.MSELoss()(model(x[rows]), y[rows]).backward()
                optimizer.step()
        for a, b in zip(plain.parameters(), ddp_model.module.parameters()):
            assert torch.allclose(a, b, atol=1e-6)
        sharded, whole = copy.deepcopy(plain), copy.deepcopy(plain)
        optimizers = [
            optim.AdamW(whole.parameters(), lr=0.1, weight_decay=0.1, betas=(0.9, 0.999), eps=1e-8),
            ZeroRedundancyOptimizer(sharded.parameters(), optim.AdamW, lr=0.1, weight_decay=0.1,
                                    betas=(0.9, 0.999), eps=1e-8),
        ]
        for _ in range(5):
            x, y = torch.rand(32, 10, generator=generator), torch.rand(32, 5, generator=generator)
            for model, optimizer in zip((whole, sharded), optimizers):
                optimizer.zero_grad()
                ((model(x) - y) ** 2).sum().backward()
                optimizer.step()
        for a, b in zip(whole.parameters(), sharded.parameters()):
            assert torch.allclose(a, b, atol=1e-5)
        print_equal("course", sharded)


    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    basic(rank, world_size)
    for a, b in zip(zero(rank, world_size, True).values(), zero(rank, world_size, False).values()):
        assert torch.allclose(a, b, atol=1e-6)
    fsdp(rank, world_size)
    course(rank, world_size)
    dist.destroy_process_group()
"""
PIPELINE = """
    import torch, torch.distributed as dist
    from torch import nn
    from pipeline import Pipeline, forward_only, one_f_one_b, zb_h1

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    tokens, labels = torch.randint(50, (8, 6)), torch.randint(5, (8,))
    embed = nn.Embedding(50, 16).requires_grad_(False)
    model = nn.Sequential(embed, nn.Flatten(), nn.Linear(96, 32), nn.ReLU(inplace=True),
                          nn.Dropout(0.1), nn.Linear(32, 5))
    stage = model[:3] if rank == 0 else model[3:]
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    share = lambda logits, labels: nn.functional.cross_entropy(logits, labels) / 4
    losses = []
    for make_schedule in (one_f_one_b, zb_h1):
        pipeline = Pipeline(stage.train(), make_schedule(2, 4), share)
        for _ in range(20):
            optimizer.zero_grad()
            losses.append(pipeline.step(tokens, labels))
            optimizer.step()
        stage.eval()
        with torch.inference_mode():
            loss = Pipeline(stage, forward_only(2, 4), share).step(tokens, labels)
        if rank == 1:
            assert max(loss, losses[-1]) < losses[0] / 2, (loss, losses)
    try:
        pipeline.step(tokens, labels if rank == 0 else labels[:4])
    except (ValueError, RuntimeError) as error:  # of its own, or of the connection that was closed
        print(f"rank {rank}: {type(error).__name__}: {error}\\n", end="", flush=True)
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """What all these scripts said, on two ranks of one torchrun, of which each ends by itself."""
    folder, names = tmp_path_factory.mktemp("scripts"), []
    for text in NUMBER_OF_ENDS * [ENDS] + [PIPELINE, DOCUMENTED]:
        names.append(folder / f"{len(names)}.py")
        names[-1].write_text(textwrap.dedent(text))
    return launch(folder, 2, EACH, *names, timeout=240)


def test_scripts_that_leave_the_normal_way_exit_with_0(done):
    assert done.returncode == 0, done.stderr
    ended = [line for line in done.stdout.splitlines() if " ended with " in line]
    ends = [f"{number} ended with status 0" for number in range(NUMBER_OF_ENDS + 2)]
    assert sorted(ended) == sorted(2 * ends), done.stderr


def test_documented_examples_run_with_our_imports(done):
    names = ["basic", "zero", "zero", "fsdp", "course"]
    lines = [line for line in done.stdout.splitlines() if line.endswith(" is equal")]
    assert lines == [f"{name} is equal" for name in names], done.stderr
    assert done.stdout.count(f"{NUMBER_OF_ENDS + 1} ended with status 0\n") == 2, done.stderr


def test_a_pipeline_of_two_trains_and_one_that_fails_does_not_hang_the_other(done):
    assert "\nrank 1: ValueError: inputs has 8 rows, targets has 4" in done.stdout, done.stderr
    assert "\nrank 0: RuntimeError: " in done.stdout, done.stderr


# ---- hybrid.py -----------------------------------------------------------------------------------


HYBRID = (PROJECT / "hybrid.py").read_text()
SMALL = f"--hidden 16 --heads 2 --seq-len 16 --data {PROJECT / 'ddp.py'}"


def complaints(done):
    """What hybrid.main() says on stderr; that there is no traceback out of it."""
    assert 'hybrid.py", line' not in done.stderr and 'script.py", line' not in done.stderr
    return [x.split(": ", 1)[1] for x in done.stderr.splitlines() if ".py: error: " in x]


def read_metrics(file):
    """The objects of a file of metrics; only what JSON knows of is in it."""
    wrong = lambda constant: pytest.fail(f"{constant} is not JSON")
    return [json.loads(line, parse_constant=wrong) for line in file.read_text().splitlines()]


def test_torchrun_and_one_process_write_the_same_metrics_and_a_trace(tmp_path):
    flags = f"{SMALL} --schedule zb-v --microbatches 4 --layers 4 --steps 3 --metrics".split()
    command = [sys.executable, PROJECT / "hybrid.py", *flags, tmp_path / "one"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as one:  # beside the others
        two = launch(tmp_path, 2, HYBRID, *flags, "two", "--pp", 2, "--trace", "trace")
        output, errors = one.communicate(timeout=120)
    assert one.returncode == two.returncode == 0, errors + two.stderr
    for lines in (output.splitlines(), two.stdout.splitlines()):
        assert " parameters on " in lines[0] and " FLOPs of the model" in lines[0]
        steps = [line for line in lines if line.startswith("step ")]
        wanted = [f"step {k} of 3".split() for k in (1, 2, 3)]
        assert [line.split()[:4] for line in steps] == wanted
        words = "left", "loss", "grad norm", "lr", "tokens/s", "TFLOP/s", "MB"
        assert all(word in steps[0] for word in words)
        assert "---- continuation" in lines and any(x.startswith("validation loss ") for x in lines)
    metrics = [read_metrics(tmp_path / name) for name in ("one", "two")]
    headers, ends = zip(*[(lines.pop(0), lines.pop()) for lines in metrics])
    assert headers[0]["parameters"] == headers[1]["parameters"] and headers[1]["world_size"] == 2
    assert headers[1]["flags"]["pp"] == 2 and headers[0]["torch"] == torch.__version__
    assert ends[0]["validation_loss"] == pytest.approx(ends[1]["validation_loss"], rel=1e-5)
    names = {"step", "loss", "grad_norm", "lr", "skipped", "tokens_per_s", "memory_mb"}
    for ours, theirs in zip(*metrics, strict=True):
        assert ours.keys() == theirs.keys() == names
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    # full precision, not the printed four digits
    assert len(metrics[0]) == 3 and len(str(metrics[0][0]["loss"])) > 8
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    simulated = trace_events(simulate(zb_v(2, 4)))
    actions = [e for e in events if e.get("cat") == "compute" and "chunk" in e["args"]]
    what = lambda events, rank: sorted((e[rank], e["name"], *e["args"].values()) for e in events)
    assert what(actions, "pid") == what(simulated, "tid")
    assert {e["cat"] for e in events if e["ph"] == "X"} == {"compute", "pp"}
    begun = {(e["pid"], e["name"][0], *e["args"].values()): e["ts"] for e in actions}
    assert begun[0, "F", 0, 0] < begun[1, "F", 0, 0] < begun[1, "F", 0, 1] < begun[0, "I", 0, 1]
    assert all(event["dur"] > 0 for event in actions)


@pytest.mark.soak
def test_three_processes_train_to_the_end_on_a_full_disk_with_more_tokens_than_bytes(tmp_path):
    flags = f"{SMALL} --steps 2 --vocab-size 300 --metrics /dev/full".split()
    done = launch(tmp_path, 3, HYBRID, *flags)
    assert done.returncode == 0, done.stderr
    (line,) = complaints(done)
    assert line == "error: --metrics /dev/full: No space left on device"
    assert "\nvalidation loss " in done.stdout and "\n---- continuation\n" in done.stdout


def test_a_restart_writes_the_metrics_anew_and_divergence_ends_in_one_line(tmp_path, monkeypatch):
    script = """
        import os, signal, sys
        import torch
        import hybrid

        attempt, step, steps = os.environ["TORCHELASTIC_RESTART_COUNT"], torch.optim.AdamW.step, []

        def die_in_second_step(self, *arguments):
            steps.append(None)
            if len(steps) == 2 and attempt == "0" and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self, *arguments)

        torch.optim.AdamW.step = die_in_second_step
        os._exit(hybrid.main([*sys.argv[1:], "--lr", "0.001" if attempt == "0" else "1e30"]))
    """
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")  # torchrun's --max-restarts
    flags = f"{SMALL} --steps 4 --warmup 0 --metrics {tmp_path / 'metrics'}".split()
    done = launch(tmp_path, 2, script, *flags)
    assert done.returncode != 0
    steps = [line.get("step") for line in read_metrics(tmp_path / "metrics")]
    assert steps == [None, 1]  # the flags, and a step
    (line,) = [x.split(": ", 1)[1] for x in done.stderr.splitlines() if ".py: error: " in x]
    assert line == "error: step 2 is not finite: loss nan, grad norm nan; 1 in a row"


def test_help_and_faults_of_one_machine_are_said_once(tmp_path):
    script = """
        import os, sys
        import hybrid

        hybrid.main(["--help"])
        sys.exit(hybrid.main(["--data", "MISSING"] if os.environ["RANK"] == "2" else []))
    """
    done = launch(tmp_path, 3, script)
    assert done.returncode != 0 and done.stdout.count("usage: hybrid.py") == 1
    missing = "rank 2: [Errno 2] No such file or directory: 'MISSING'"
    assert complaints(done) == [f"error: {missing}"]
