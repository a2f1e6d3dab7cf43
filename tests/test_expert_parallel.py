"""Mixtures of experts agree with a loop over tokens and experts; bytes and loads are counted."""

import re
from collections import Counter
from functools import partial
from unittest.mock import Mock, call, patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

import expert_parallel
from collectives import count_bytes, gather_objects, observe, rank_and_size
from ddp import DistributedDataParallel
from expert_parallel import (
    DispatchPlan, Experts, FullPrecisionLinear, MoE, PlainMoE, Router, dispatch_and_combine,
    expert_parallel_bytes, plain_dispatch, switch, two_hops, within_capacity,
)
from gpu_counts import batches, nccl_over_gloo, waits
from layouts import soak_but
from ranks import least_bytes, on_ranks, run, shifted, soak
from replicas import assert_close, demonstration
from reference_gpt import MoE as ReferenceMoE
from sequence_parallel import recompute, recompute_groups
from transformer import saved_bytes
from zero import FullyShardedDataParallel


def _groups(size):
    """Return this rank's group of `size` neighbours, and the group of ranks with its group rank."""
    if not size:
        return None
    rank, rows = dist.get_rank(), torch.arange(dist.get_world_size()).view(-1, size)
    groups = [[dist.new_group(ranks) for ranks in grid.tolist()] for grid in (rows, rows.t())]
    dist.barrier()
    return groups[0][rank // size], groups[1][rank % size]


def _close(found, expected, name=""):
    assert (found.double() - expected).norm() <= 0.03 * expected.norm(), name


# ---- a layer against the loop --------------------------------------------------------------------


def _reference(layer, E, idle=False, dtype=torch.float64, **options):
    """Return a random ReferenceMoE of E experts, and copy this rank's part of it into `layer`.

    idle: all tokens choose the first k experts. dtype: parameters are rounded to this dtype.
    """
    torch.manual_seed(shifted(99))
    router = layer.router
    hidden, top_k, score = router.weight.shape[1], router.top_k, router.score
    plain = ReferenceMoE(hidden, E, top_k, score, **options).double()
    for parameter in plain.parameters():
        parameter.data.normal_(std=0.4).copy_(parameter.data.to(dtype))
    if idle:
        nn.init.zeros_(plain.router.weight)  # scores are equal, and the first experts win
    elif score == "sigmoid":
        router.bias.copy_(torch.randn(E) / 8)  # only the choice uses it
        plain.bias.copy_(router.bias)
    layer.double()
    rank, ep = rank_and_size(layer.group)
    full = plain.state_dict()
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(full[name].chunk(ep)[rank] if "experts" in name else full[name])
    return plain


CASES = {
    "top-1, with drops": dict(E=12, top_k=1, capacity_factor=0.7),
    "top-1, from softmax of all": dict(E=12, top_k=1),
    "top-1, all to one": dict(E=12, top_k=1, idle=True),
    "top-2": dict(E=12, top_k=2),
    "top-3, with drops": dict(E=12, top_k=3, capacity_factor=1.0),
    "top-8 of 64, sigmoid, shared": dict(E=64, top_k=8, score="sigmoid", shared_experts=2),
    "of 2 of 4 groups": dict(E=12, top_k=4, score="sigmoid", n_group=4, topk_group=2),
    "losses": dict(E=12, top_k=2, losses=(0.3, 0.2)),
}
LOW = dict(E=24, top_k=2, losses=(0.3, 0.2), shared_experts=1)
CASES |= {how: LOW for how in ("autocast", "bf16", "bf16, summed in fp32")}
CASES |= {
    "2 parts, with drops": dict(E=12, top_k=3, capacity_factor=1.0, shared_experts=1, parts=2),
    "3 parts, all to one": dict(E=12, top_k=1, idle=True, parts=3),
    "3 parts, losses": dict(E=12, top_k=2, losses=(0.3, 0.2), shared_experts=1, parts=3),
    "autocast, 2 parts": LOW | {"parts": 2},
    "bf16, 2 parts": LOW | {"parts": 2},
}


# (ep, dp, ep's ranks on one node or 0 for one hop, neighbours that have the same tokens)
LAYOUTS = [(1, 1, 0, 1), (2, 1, 0, 1), (3, 1, 0, 1), (1, 2, 0, 1), (2, 2, 0, 1), (3, 2, 0, 1)]
LAYOUTS += [(4, 1, 2, 1), (6, 1, 2, 1), (2, 1, 0, 2), (1, 2, 0, 2), (2, 2, 0, 2), (4, 1, 2, 2)]
SEVERAL = (2, 1, 0, 2), (4, 1, 2, 1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "ep, dp, per_node, tp", soak_but(lambda _, row: row in SEVERAL, LAYOUTS)
)
@on_ranks(lambda ep, dp, **_: ep * dp)
def test_output_and_gradients_are_those_of_a_loop(ep, dp, per_node, tp, case):
    """The gradients are those of the input and of every parameter; ranks have 5, 0, 3 ... tokens.

    In bf16 they differ by a few per cent. The router stays in fp32; its losses and loads are exact.
    """
    rank, world_size = rank_and_size()
    ep_group, same_group = _groups(ep)
    options = dict(CASES[case])
    E, losses = options.pop("E"), options.pop("losses", (0, 0))
    E -= E % ep  # 63 instead of 64 on 3 ranks
    autocast = case.startswith("autocast")
    is_low = autocast or case.startswith("bf16")
    dtype = torch.bfloat16 if is_low else torch.float64
    D, factor = 16 if is_low else 4, options.get("capacity_factor")
    of_plain = {"dtype": dtype, "idle": options.pop("idle", False), "losses": losses}
    of_plain |= {"shared": options.get("shared_experts", 0), "factor": factor}
    of_plain["groups"] = options.get("n_group", 1), options.get("topk_group", 1)
    options |= {"balance_coefficient": losses[0] / 2, "z_coefficient": losses[1] / 2}
    options |= {"loss_scale": 2.0, "balance_groups": (None,), "nodes": _groups(per_node)}
    options["tp_group"] = _groups(tp)[0] if tp > 1 else None
    layer = MoE(D, 4 * D, E, group=ep_group, **options)
    uneven = losses == (0, 0) and tp == 1
    sizes = [(5, 0, 3, 8, 1, 2)[r % 6] if uneven else 4 for r in range(world_size)]
    torch.manual_seed(shifted(7))
    whole, grad = torch.randn(2, sum(sizes), D).to(dtype).double()
    plain = _reference(layer, E, **of_plain)
    layer.to(torch.float32 if autocast else dtype)
    summed = torch.promote_types(dtype, torch.float32)
    if case in ("bf16", "bf16, 2 parts"):
        summed = torch.bfloat16
    for parameter in layer.parameters():
        parameter.grad_dtype = summed
    calls = sizes if factor else [sum(sizes)]  # the capacity limits each rank's tokens separately
    inputs = [x.clone().requires_grad_() for x in whole.split(calls)]
    outputs = torch.cat([plain(x) for x in inputs if len(x)])
    (outputs * grad).sum().add(plain.loss).backward()
    input_grad = torch.cat([x.grad for x in inputs if len(x)])

    first = rank - rank % tp
    mine = slice(sum(sizes[:first]), sum(sizes[: first + tp]))
    x = whole[mine].to(torch.float32 if autocast else dtype, copy=True).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
    assert y.dtype == dtype
    y.backward(grad[mine].to(dtype))
    compare = _close if is_low else partial(assert_close, tolerance=1e-11)
    compare(y, outputs[mine].detach(), name="output")
    compare(x.grad, input_grad[mine], name="input")
    for name, parameter in layer.named_parameters():
        assert parameter.grad.dtype == summed
        total, full = parameter.grad.double(), plain.get_parameter(name).grad
        dist.all_reduce(total, group=same_group if "experts" in name else None)
        local = full.chunk(ep)[rank_and_size(ep_group)[0]] if "experts" in name else full
        compare(total, local, name=name)
    if factor is None:
        tally = layer.losses.tally.clone()
        dist.all_reduce(tally)
        losses = torch.stack([plain.balance, plain.z]) if any(losses) else torch.zeros(2)
        exact = torch.cat([plain.counts, torch.zeros(1), losses.detach()]).double()
        assert_close(tally, exact, 1e-5 if is_low else 1e-11, "tally")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("D, width", [(16, 24), (5, 3)])  # PyTorch's kernel takes the first
@pytest.mark.parametrize("sizes", [[3, 0, 4, 1], [0, 0, 0, 0], [0, 7, 0, 0]])
def test_each_expert_is_an_mlp_and_idle_experts_have_gradients_of_zero(dtype, D, width, sizes):
    check_experts(dtype, D, width, sizes)


def check_experts(dtype, D, width, sizes, device="cpu"):
    torch.manual_seed(shifted(0))
    experts = Experts(range(4), 4, D, width).to(device, dtype)
    counts = torch.tensor(sizes, device=device)
    x, grad = torch.randn(2, sum(sizes), D).to(device, dtype)
    exact = [t.detach().double().requires_grad_() for t in (x, *experts.parameters())]
    mlps = zip(exact[0].split(sizes), *exact[1:])
    expected = torch.cat([F.gelu(r @ a.t(), approximate="tanh") @ b.t() for r, a, b in mlps])
    expected.backward(grad.double())
    idle, product = counts == 0, F.grouped_mm

    def unwritten(x, matrices, offs):  # some GPUs leave an idle expert's gradient unwritten
        matrices = matrices.clone()
        matrices.register_hook(lambda grad: grad.masked_fill(idle.view(-1, 1, 1), torch.nan))
        return product(x, matrices, offs=offs)

    with patch.object(F, "grouped_mm", side_effect=unwritten) as used:
        y = experts(x.requires_grad_(), sizes, counts)
        y.backward(grad)
    assert used.called == (dtype == torch.bfloat16 and D == 16 and sum(sizes) > 0)
    tolerance = {torch.bfloat16: 3e-2, torch.float32: 1e-5}.get(dtype, 1e-12)
    found = [y, *(t.grad for t in (x, *experts.parameters()))]
    for one, other in zip(found, [expected, *(t.grad for t in exact)]):
        assert_close(one.double(), other, tolerance)
    assert not any(w.grad[idle].any() for w in experts.parameters())


@on_ranks(1, 2, 3)
def test_the_short_forms_and_the_full_dispatch_give_the_same_bits():
    rank, P = rank_and_size()
    torch.manual_seed(shifted(rank))
    x, grad = torch.randn(2, 7 * rank, 4)
    experts, expert = torch.randint(P, (7 * rank,)), nn.Linear(4, 4)
    choices = experts.unsqueeze(1), torch.ones(len(x), 1)
    found = []
    for send in (
        lambda x: switch(x, experts, expert),
        lambda x: plain_dispatch(x, *choices, P, lambda rows, *_: expert(rows)),
        lambda x: dispatch_and_combine(x, *choices, P, lambda rows, *_: expert(rows)),
    ):
        own = x.clone().requires_grad_()
        y = send(own)
        found.append((y, *torch.autograd.grad(y, (own, *expert.parameters()), grad)))
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others)) and (rank == 0 or others[1].any())


@on_ranks(1, 2, 3)
def test_the_plain_dispatch_gives_the_results_and_gradients_of_one_process():
    """Ranks have 3, 5 and 0 tokens, which choose 3 of 2 P experts."""
    rank, P = rank_and_size()
    torch.manual_seed(shifted(0))
    counts = [3, 5, 0][:P]
    N, D, E, k = sum(counts), 4, 2 * P, min(3, 2 * P)
    experts = torch.rand(N, E).argsort(1)[:, :k]
    shapes = (N, D), (N, k), (E, D, D)
    x, weights, matrices = [torch.randn(*s).double().requires_grad_() for s in shapes]
    grad = torch.randn(N, D).double()
    expected = torch.einsum("nk,nd,nkde->ne", weights, x, matrices[experts])
    expected.backward(grad)
    cuts = [tensor.split(counts)[rank] for tensor in (x, weights)] + [matrices.chunk(P)[rank]]
    own = [cut.detach().clone().requires_grad_() for cut in cuts]

    def compute(rows, sizes, sizes_on_device):
        assert sizes_on_device.tolist() == sizes
        return torch.cat([rows @ matrix for rows, matrix in zip(rows.split(sizes), own[2])])

    y = plain_dispatch(own[0], experts.split(counts)[rank], own[1], E, compute)
    y.backward(grad.split(counts)[rank])
    assert_close(y, expected.split(counts)[rank].detach(), 1e-12)
    cuts = [tensor.grad.split(counts)[rank] for tensor in (x, weights)]
    for tensor, gradient in zip(own, [*cuts, matrices.grad.chunk(P)[rank]]):
        assert_close(tensor.grad, gradient, 1e-12)


@pytest.mark.parametrize("top_k", [1, 3])
@on_ranks(soak(1), 2)
def test_the_plain_layer_has_the_results_and_gradients_of_the_real_one(top_k):
    torch.manual_seed(shifted(0))
    real = MoE(4, 8, 6, top_k).double()
    plain = PlainMoE(4, 6, top_k, real.experts).double()
    plain.router.weight.data.copy_(real.router.weight)
    rank, _ = rank_and_size()
    x = torch.randn(3, 5, 4, dtype=torch.float64)[rank].requires_grad_()
    found = []
    for layer in (real, plain):
        y = layer(x)
        leaves = [x, layer.router.weight, *layer.experts.parameters()]
        found.append([y, *torch.autograd.grad(y.sin().sum(), leaves)])
    for one, other in zip(*found):
        assert_close(one, other, 1e-12)


@on_ranks(2)
def test_the_example_of_four_tokens_is_what_experts_get_and_the_plan_counts():
    rank, _ = rank_and_size()
    experts = torch.tensor([[[2, 0], [0, 1]], [[3, 0], [2, 0]]])[rank]
    tokens = torch.tensor([0.0, 1.0]).unsqueeze(1) + 2 * rank  # ti is i
    (part,) = DispatchPlan(experts, 4).wait_for_counts()
    part.find_orders()
    buffers = [part.order, part.token, part.by_expert, part.by_rank]
    if rank == 0:
        told = [[1, 2, 3, 0], [0, 1, 1, 0], [0, 1, 3, 4, 2], [0, 1, 4, 2, 3]]
        assert [buffer.tolist() for buffer in buffers] == told
        assert (part.rows_to, part.rows_from, part.sizes) == ([3, 1], [3, 2], [4, 1])
    grouped = [([0, 1, 2, 3, 1], [4, 1]), ([0, 3, 2], [2, 1])][rank]
    for send in plain_dispatch, dispatch_and_combine:
        arrived = []

        def compute(rows, sizes, _):
            arrived.append((rows.flatten().tolist(), sizes))
            return rows

        y = send(tokens, experts, torch.ones(2, 2), 4, compute)
        assert arrived == [grouped] and torch.equal(y, 2 * tokens)


class Moved(TorchDispatchMode):
    """Counts the operators inside that write a matrix with rows of this width, by name."""

    def __init__(self, width):
        super().__init__()
        self.width, self.count = width, Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[1:] == (self.width,):
            self.count[function.overloadpacket.__name__] += 1
        return result


@pytest.mark.parametrize("num_local", [1, 2])
@on_ranks(2)
def test_backward_undoes_a_permutation_by_the_inverse_and_one_expert_needs_none(num_local):
    """Gradients are added only where a token has several rows: in dispatch."""
    rank, P = rank_and_size()
    torch.manual_seed(shifted(rank))
    x, weights = torch.randn(9, 4, requires_grad=True), torch.rand(9, 2)
    experts = torch.rand(9, num_local * P).argsort(1)[:, :2]
    with Moved(4) as forward:
        y = dispatch_and_combine(x, experts, weights, num_local * P, lambda rows, *_: rows * 2)
    with Moved(4) as backward:
        y.sum().backward()
    assert_close(x.grad, 2 * weights.sum(1, keepdim=True).expand_as(x), 1e-6)
    permutations = 2 * (num_local > 1)
    assert forward.count["index_select"] == 1 + permutations  # one takes the rows of x
    assert backward.count["index_select"] == 1 + permutations  # one takes the rows of dy
    assert backward.count["index_add"] + backward.count["index_add_"] == 1


# ---- initial values, copies ----------------------------------------------------------------------


def _whole(layer):
    """Return {name: value} of the layer's parameters, and all experts of its group for one name."""
    whole = {}
    for name, parameter in layer.named_parameters():
        own = parameter.detach()
        whole[name] = own
        if "experts" in name:
            assert own.untyped_storage().nbytes() == own.nbytes, "other ranks' experts are kept"
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size(layer.group))]
            dist.all_gather(parts, own, group=layer.group)
            whole[name] = torch.cat(parts)
    return whole


@pytest.mark.parametrize("tp", [1, 2])
@on_ranks(4)
def test_initial_values_differ_between_experts_and_do_not_depend_on_how_these_are_spread(tp):
    """Afterwards all generators are alike, so that layers made later have equal copies, too."""
    tp_group = _groups(2)[0] if tp == 2 else None
    values, states = [], []
    for ep in (1, 2, 4):
        group, _ = _groups(ep)
        torch.manual_seed(shifted(0))
        layer = MoE(5, 7, 8, 2, group, tp_group, shared_experts=1, gated=True, activation=nn.GLU())
        values.append(_whole(layer))
        states += gather_objects(torch.get_rng_state())
    for found in values[1:]:
        for name, value in values[0].items():
            assert torch.equal(found[name], value), name
    for state in states:
        assert torch.equal(state, states[0])
    for name in ("experts.w_in", "experts.w_out"):
        assert len(values[0][name].unique()) == values[0][name].numel()


@pytest.mark.parametrize("per_node, tp", [(0, 1), (2, 1), (0, 2)])
@on_ranks(4)
def test_a_deep_copy_has_the_same_groups_and_counts_for_itself(per_node, tp):
    torch.manual_seed(shifted(0))
    options = {"nodes": _groups(per_node), "balance_groups": (None,), "balance_coefficient": 0.1}
    options["tp_group"] = _groups(2)[0] if tp == 2 else None
    layer = MoE(4, 16, 8, 2, dist.group.WORLD, shared_experts=1, **options)
    average = AveragedModel(nn.Sequential(layer))
    (copied,) = average.module
    x = torch.randn(6, 4)
    expected = layer(x)
    assert torch.equal(average(x), expected)
    expected.sum().backward()
    assert layer.losses.tally.any() and not copied.losses.tally.any()
    assert all(parameter.grad is None for parameter in average.parameters())
    copied.losses.scale = 3.0
    assert layer.losses.scale == 1


@pytest.mark.parametrize("wrap", [DistributedDataParallel, FullyShardedDataParallel])
@on_ranks(4)
def test_a_wrapper_does_not_replicate_experts_over_ranks_that_have_others(wrap):
    """Ranks 0 and 2 have the same experts, and so have ranks 1 and 3."""
    ep_group, same = _groups(2)
    layer = lambda group: nn.Sequential(MoE(4, 8, 4, 2, group))
    torch.manual_seed(shifted(0))
    net = layer(ep_group)
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    is_unchanged = lambda named: all(torch.equal(before[name], named[name]) for name in before)
    with pytest.raises(ValueError, match=r"over ranks \[0, 1\].*`groups`.*`per_parameter`"):
        wrap(net)
    assert is_unchanged(net.state_dict())

    own = net[0].experts.parameters()
    if wrap is DistributedDataParallel:
        wrap(net, groups=dict.fromkeys(own, same))
        assert is_unchanged(net.state_dict())
    else:
        model = wrap(net, per_parameter={p: {"process_group": same} for p in own})
        assert is_unchanged(model.state_dict())

    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    model = wrap(layer(alone))  # all ranks have copies of all experts
    model(torch.randn(3, 4)).sum().backward()
    if wrap is FullyShardedDataParallel:
        assert model.clip_grad_norm_(1.0) > 0

    first = 2 * dist.get_rank(ep_group)
    experts = Experts(range(first, first + 2), 4, 4, 8)
    with pytest.raises(ValueError, match=r"over ranks \[0, 1\]"):
        wrap(PlainMoE(4, 4, 2, experts, ep_group))


# ---- waits and launches of the host --------------------------------------------------------------


@pytest.mark.parametrize("per_node", [0, 2])
@on_ranks(4)
def test_shared_experts_are_launched_while_the_first_rows_travel(per_node):
    layer, events = MoE(16, 64, 8, 2, shared_experts=1, nodes=_groups(per_node)), []
    layer.shared.register_forward_hook(lambda *_: events.append("shared"))
    layer.experts.register_forward_hook(lambda *_: events.append("experts"))
    tolist, to = torch.Tensor.tolist, torch.Tensor.to

    def note(event, operation, *_):
        if event == "begin":
            events.append("send")

    def copied(tensor, *args, **options):
        events.extend(["copy"] * (args[:1] == ("cpu",) and options == {"non_blocking": True}))
        return to(tensor, *args, **options)

    with (
        observe(note),
        patch.object(torch.Tensor, "tolist", lambda x: events.append("wait") or tolist(x)),
        patch.object(torch.Tensor, "to", copied),
    ):
        layer(torch.randn(5, 16))
    counts = ["send", "copy", "wait"]
    inside = [*counts, "send"] if per_node else []
    back = ["send"] * (2 if per_node else 1)
    rows = ["send"] * (3 if per_node else 1)  # of tokens, choices and weights
    expected = [*counts, *rows, "shared", *inside, "experts", *back]
    assert events == expected

ALL_OPTIONS = {"capacity_factor": 1.0, "shared_experts": 1, "score": "sigmoid", "n_group": 2}
ALL_OPTIONS |= {"balance_coefficient": 0.1, "z_coefficient": 0.1, "balance_groups": (None,)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, soak(torch.float32)])
@pytest.mark.parametrize("options", [soak({}), ALL_OPTIONS])
@pytest.mark.parametrize(
    "per_node, parts, launched, waiting",
    [(0, 1, (3, 2), 1), (2, 1, (8, 5), 2), (0, 3, (7, 6), 1), (2, 2, (19, 14), 3)],
)
@on_ranks(4)
def test_the_host_waits_once_per_hop_in_forward_and_not_in_backward(
    per_node, parts, launched, waiting, options, dtype
):
    """A layer launches 3 batches in forward and 2 in backward; with two hops, 8 and 5.

    In n parts it launches 1 + 2 n and 2 n; with two hops, 1 + 4 n + n (1 + 2 n) and 3 n + 2 n^2,
    and the host waits for the first hop and n times for the second one.
    """
    once = {"tolist": waiting}
    layer = MoE(16, 64, 16, 2, nodes=_groups(per_node), parts=parts, **options).to(dtype)
    x = torch.randn(48, 16, dtype=dtype, requires_grad=True)  # all ranks have rows for all
    layer(x).sum().backward()
    for again in (False, True):
        with waits() as forward, batches() as before:
            y = recompute(layer, x) if again else layer(x)
        with waits() as backward, batches() as after:
            y.sum().backward()
        assert forward == once and backward == (once if again else {})
        counts = int(bool(options))  # if a backward follows, one batch all-reduces the loads
        total = launched[0] + counts * (not again), launched[1] + (launched[0] + counts) * again
        assert (before["batches"], after["batches"]) == total
        assert per_node or not before["off 16"] + after["off 16"]
    with waits() as update:
        layer.router.update_bias(layer.losses.tally[:16])
    assert not update


@on_ranks(1)
def test_the_copy_of_counts_is_awaited_on_the_stream_of_their_device_not_of_the_current_one():
    """A process may never call torch.cuda.set_device(), and use cuda:1 by its tensors alone."""
    experts = torch.tensor([[0], [1]])
    streams = Mock()
    on_gpu = patch.object(torch.Tensor, "is_cuda", property(lambda x: True), create=True)
    with on_gpu, patch.object(torch.cuda, "current_stream", streams):
        DispatchPlan(experts, 2).wait_for_counts()
    assert streams.mock_calls[0] == call(experts.device)


@on_ranks(4)
def test_nan_in_tokens_or_weights_is_dispatched_and_reaches_the_output():
    options = {"n_group": 2, "topk_group": 1, "capacity_factor": 2.0, "balance_coefficient": 0.1}
    layer, x = MoE(16, 64, 8, 2, nodes=_groups(2), **options), torch.randn(50, 16)
    for poisoned in (x, layer.router.weight.data, layer.experts.w_in.data):
        if dist.get_rank() == 3:
            poisoned.view(-1)[::2] = torch.nan
        own = x.clone().requires_grad_()
        y = layer(own)
        y.sum().backward()
        reached = torch.tensor([float(y.isnan().any()), float(own.grad.isnan().any())])
        dist.all_reduce(reached)
        assert (reached > 0).all()


# ---- a layer in parts ----------------------------------------------------------------------------


class Noting(torch.autograd.Function):
    """Returns x, and adds a name to `events` in forward and in backward."""

    @staticmethod
    def forward(ctx, x, name, events):
        ctx.name, ctx.events = name, events
        events.append(name)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.events.append(ctx.name)
        return grad, None, None


def note_journeys(events, names):
    """Return a listener that adds "> name" to events when a message is posted, "< name" at its wait.

    names: those of the asynchronous messages, in the order in which they are posted.
    """
    names, posted = iter(names), {}

    def listen(event, operation, *_):
        if event == "wait":
            events.append(f"< {posted[operation]}")
        elif event == "begin" and operation.async_op:
            posted[operation] = next(names)
            events.append(f"> {posted[operation]}")
        elif event == "begin":
            events.append("counts")

    return listen


def _order_of_a_layer(parts):
    """Return the order of events in the drawing of expert_parallel.py, for any number of parts."""
    numbers = range(1, parts + 1)
    forward = ["counts", *(f"> dispatch {i}" for i in numbers), "shared"]
    for i in numbers:
        forward += [f"< dispatch {i}", "experts", f"> combine {i}"]
    forward += [f"< combine {i}" for i in numbers]
    swapped = {">": "<", "<": ">"}
    backward = [swapped.get(event[0], event[0]) + event[1:] for event in forward[:0:-1]]
    return forward, backward


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("parts", [1, 2, soak(3)])
@on_ranks(2)
def test_a_part_travels_beside_another_ones_experts_and_backward_mirrors_forward(parts, tokens):
    """So it is on all ranks, though one of them has `tokens` tokens, and another one has 7."""
    rank, P = rank_and_size()
    torch.manual_seed(shifted(rank))
    x = torch.randn(tokens if rank == 0 else 7, 4, requires_grad=True)
    experts, weights = torch.randint(4, (len(x), 2)), torch.rand(len(x), 2, requires_grad=True)
    events = []
    compute = lambda rows, *_: Noting.apply(rows, "experts", events)
    shared = lambda rows: Noting.apply(rows, "shared", events)
    forward, backward = _order_of_a_layer(parts)
    names = [event[2:] for event in forward + backward if event[0] == ">"]
    with observe(note_journeys(events, names)):
        y = dispatch_and_combine(x, experts, weights, 4, compute, shared=shared, parts=parts)
        assert events == forward
        events.clear()
        y.square().sum().backward()
    assert events == backward
    expected = x * (1 + weights.sum(1, keepdim=True))
    assert_close(y, expected, 1e-6)
    expected = torch.autograd.grad(expected.square().sum(), (x, weights))
    for found, wanted in zip((x.grad, weights.grad), expected):
        assert_close(found, wanted, 1e-5)


@on_ranks(2)
def test_rows_of_a_part_are_freed_as_soon_as_they_have_been_used():
    """In evaluation these are the experts' inputs, and in backward the gradients that arrive."""
    x = torch.randn(6, 4, requires_grad=True)
    experts, weights = torch.tensor([[0, 1]]).expand(6, 2), torch.ones(6, 2)
    given, arrived, held = [], [], []

    def compute(rows, *_):
        given.append(StorageWeakRef(rows.untyped_storage()))
        return 2 * rows

    def begin_combine(part, results, right=expert_parallel.Part.begin_combine):
        held.append(not given[-1].expired())
        return right(part, results)

    def begin(journey, *rows, right=expert_parallel.Journey.begin):
        right(journey, *rows)
        arrived.append(StorageWeakRef(journey.arriving.untyped_storage()))

    with patch.object(expert_parallel.Part, "begin_combine", begin_combine), torch.no_grad():
        dispatch_and_combine(x, experts, weights, 2, compute, parts=3)
    assert held == [False, False, False]
    y = dispatch_and_combine(x, experts, weights, 2, compute, parts=3)
    with patch.object(expert_parallel.Journey, "begin", begin):
        y.sum().backward()  # y keeps the nodes of the graph
    assert len(arrived) == 6 and all(gradient.expired() for gradient in arrived)


@on_ranks(4)
def test_a_part_crosses_nodes_beside_another_ones_second_hop():
    events, (node_group, cross_group) = [], _groups(2)
    layer = MoE(4, 8, 8, 2, nodes=(node_group, cross_group), parts=2, shared_experts=1)
    layer.shared.register_forward_hook(lambda *_: events.append("shared"))

    def listen(event, operation, *_):
        if operation.group is cross_group and event == "wait":
            events.append("wait")
        elif operation.group is cross_group and event == "begin":
            events.append("post" if operation.async_op else "counts")
        elif event == "begin" and not operation.async_op:
            events.append("counts in node")

    with observe(listen):
        layer(torch.randn(6, 4, requires_grad=True)).sum().backward()
    forward = ["counts", *6 * ["post"], "shared"]  # tokens, choices and weights of two parts
    forward += 2 * [*3 * ["wait"], "counts in node", "post"] + 2 * ["wait"]
    backward = 2 * ["post"] + 2 * ["wait", *2 * ["post"]] + 4 * ["wait"]  # choices have no gradient
    assert events == forward + backward


def _loads(rank, how):
    """Return choices (N, 3) of 8 experts, -1 for those that are dropped."""
    N = {"no token": 0, "fewer tokens than parts": 2 * rank, "all dropped": 5}.get(how, 9)
    experts = torch.rand(N, 8).argsort(1)[:, :3]
    if how == "all dropped":
        return experts.fill_(-1)
    if how == "dropped on some ranks":
        return experts.masked_fill(torch.rand(N, 3) < rank / 3, -1)
    return experts


LOADS = "random", "no token", "fewer tokens than parts", "all dropped", "dropped on some ranks"


@pytest.mark.parametrize("how", LOADS)
@pytest.mark.parametrize("per_node", [0, 2])
@on_ranks(4)
def test_a_layer_in_parts_has_the_results_and_sends_the_bytes_of_one_that_is_whole(per_node, how):
    """A part adds only counts, which are sent with those of other parts."""
    rank, P = rank_and_size()
    torch.manual_seed(shifted(rank))
    experts = _loads(rank, how)
    x, grad = torch.randn(2, len(experts), 4, dtype=torch.float64)
    groups = _groups(per_node) or [None]
    send = two_hops if per_node else dispatch_and_combine
    scales = torch.arange(1.0, 3.0, dtype=torch.float64) + 2 * rank  # of this rank's experts
    results, sent = [], []
    for parts, hand_over in (1, None), (2, None), (3, None), (1, lambda: None):
        leaves = x.clone(), torch.linspace(0, 1, 3).double().repeat(len(x), 1), scales.clone()
        own, weights, factors = [leaf.requires_grad_() for leaf in leaves]

        def compute(rows, sizes, sizes_on_device):
            assert len(rows) == sum(sizes) == sizes_on_device.sum()
            return rows.sin() * factors.repeat_interleave(sizes_on_device).unsqueeze(1)

        with least_bytes(), count_bytes() as traffic:
            options = {"parts": parts, "hand_over": hand_over}
            y = send(own, experts, weights, 8, compute, *groups, **options)
            y.backward(grad)
        results.append((y, *(leaf.grad for leaf in leaves)))
        # one hop has 2 experts per rank; of two, the first has 1 node per rank
        counts = 8 * (P - 1) * 2 * parts
        if per_node:
            counts = 8 * parts + parts * 8 * 2 * parts
        sent.append(traffic.bytes() - counts)
    for found in results[1:]:
        for one, whole in zip(found, results[0]):
            assert_close(one, whole, 1e-13)
    assert len(set(sent)) == 1


@pytest.mark.parametrize("per_node", [0, 2])
@on_ranks(4)
def test_a_layer_in_parts_does_not_hang_under_the_rules_of_nccl(per_node):
    options = {"balance_coefficient": 0.1, "balance_groups": (None,)}
    layer = MoE(4, 16, 8, 2, parts=3, nodes=_groups(per_node), **options)
    x = torch.randn(5 if dist.get_rank() else 0, 4, requires_grad=True)
    layer(x).sum().backward()
    expected, x.grad = x.grad, None
    with nccl_over_gloo():
        recompute(layer, x).sum().backward()
    assert_close(x.grad, expected, 1e-6)


@on_ranks(2)
def test_counts_of_the_losses_are_sent_when_no_row_travels_and_not_in_evaluation():
    """On a group that they share with the experts they would wait for long messages."""
    layer, sent = MoE(4, 16, 4, 2, parts=2, balance_coefficient=0.1, balance_groups=(None,)), []
    under_way = set()

    def listen(event, operation, *_):
        if event == "wait":
            under_way.discard(operation)
        elif event == "begin":
            assert not (operation.name == "all_reduce" and under_way)
            sent.append(operation.name)
            if operation.async_op:
                under_way.add(operation)

    with observe(listen):
        layer(torch.randn(6, 4))
    assert Counter(sent) == {"all_to_all_single": 5, "all_reduce": 1}
    sent.clear()
    with observe(listen), torch.no_grad():
        layer(torch.randn(6, 4))
    assert Counter(sent) == {"all_to_all_single": 5}


# ---- router --------------------------------------------------------------------------------------


def test_underflowing_scores_give_no_nan():
    router = Router(4, 8, 3, "sigmoid")
    router.weight.data.fill_(-100.0)
    routing = router(torch.ones(2, 4))
    assert routing.weights.isfinite().all() and routing.probabilities.isfinite().all()


def test_a_bias_moves_by_its_rate_against_the_load_though_16_bits_would_round_it_away():
    router = Router(4, 8).bfloat16()
    for _ in range(2):
        router.update_bias(torch.tensor([9, 3, 4, 4, 5, 5, 5, 5]), 0.5)  # the mean is 5
    assert router.bias.tolist() == [-1, 1, 1, 1, 0, 0, 0, 0]
    bias = router.bias.double()
    router.update_bias(torch.tensor([9, 3, 4, 4, 5, 5, 5, 5]), 2**-15)
    moved = (router.bias.double() - bias) * 2**15
    assert moved.tolist() == [-1, 1, 1, 1, 0, 0, 0, 0]


class Products(TorchDispatchMode):
    """Lists (the setting for TF32, the dtypes of the factors) of each matrix product inside."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket is torch.ops.aten.mm:
            setting = torch.backends.cuda.matmul.fp32_precision
            self.found.append((setting, *(factor.dtype for factor in args)))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("autocast", [False, True])
def test_the_routers_products_are_in_full_precision_where_others_are_in_tf32(autocast):
    """CUDA reads the setting when a product is launched, in forward and in backward."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        other, router, products = nn.Linear(6, 6, bias=False), Router(6, 4, 2), Products()
        x = torch.ones(5, 6, requires_grad=True)
        with products, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            router(other(x)).weights.square().sum().backward()
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            router(torch.ones(5, 7))
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)
    of_router = 3 * [("ieee", torch.float32, torch.float32)]
    dtype = torch.bfloat16 if autocast else torch.float32
    of_other = ("tf32", dtype, dtype)
    assert products.found == [of_other, *of_router, of_other, of_other]


def test_the_router_has_the_bits_and_second_derivatives_of_pytorchs_product():
    x, weight = torch.randn(37, 24, requires_grad=True), torch.randn(8, 24, requires_grad=True)
    found, expected = FullPrecisionLinear.apply(x, weight), F.linear(x, weight)
    dy = torch.randn(37, 8)
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(y, [x, weight], dy) for y in (found, expected)]
    assert all(map(torch.equal, *gradients))
    wide = [t.detach()[:3, :5].double().requires_grad_() for t in (x, weight)]
    assert torch.autograd.gradgradcheck(FullPrecisionLinear.apply, wide)


# ---- bytes ---------------------------------------------------------------------------------------


def _routed(rank, N, k, E, even):
    """Return the experts of a rank's tokens: each expert equally often, or at random."""
    if even:
        return (torch.arange(N * k).view(N, k) + rank) % E
    generator = torch.Generator().manual_seed(shifted(rank))
    return torch.rand(N, E, generator=generator).argsort(-1)[:, :k]


@pytest.mark.parametrize("even", [True, False])
@on_ranks(1, 2, 3, 4)
def test_dispatch_and_combine_send_the_routed_tokens(even):
    rank, P = rank_and_size()
    N, k, E, D = 24, 2, 12, 8
    routed = [_routed(r, N, k, E, even) for r in range(P)]
    crossing = torch.stack([(chosen * P // E).flatten().bincount(minlength=P) for chosen in routed])
    crossing.fill_diagonal_(0)  # rows that cross from one rank to another
    rows = int(crossing[rank].sum() + crossing[:, rank].sum()) * D * 4  # own rows, others' results
    counts = 8 * E // P * (P - 1)
    x, weights = torch.randn(N, D, requires_grad=True), torch.rand(N, k)
    with least_bytes(), count_bytes() as traffic:
        y = dispatch_and_combine(x, routed[rank], weights, E, lambda rows, *_: rows * 2)
        forward = traffic.bytes()
        y.sum().backward()
    assert_close(y, 2 * x * weights.sum(-1, keepdim=True), 1e-5)
    assert (forward, traffic.bytes() - forward) == (rows + counts, rows)
    assert not even or rows == expert_parallel_bytes(N, k, D, P)


@on_ranks(2, 4)
def test_the_demonstration_prints_the_bytes_of_the_formula_and_those_that_are_sent():
    rank, P = rank_and_size()
    torch.manual_seed(0)  # not shifted: the demonstration draws the same numbers
    router, tokens = torch.randn(P, 32), torch.randn(P, 64, 32)
    chosen = (tokens.double() @ router.double().T).argmax(-1)
    rows = (chosen[0] != 0).sum() + (chosen[1:] == 0).sum()  # that rank 0 sends, and returns
    printed = demonstration(expert_parallel)
    if rank == 0:
        words = re.search(r"(\d+) bytes sent, (\d+) without counts if even", printed)
        assert int(words[1]) == rows * 32 * 8 + (P - 1) * 8
        assert int(words[2]) == 2 * (64 * 32 * 8) * (P - 1) // P
    errors = re.findall(r"gradients: (.*)", printed)
    assert len(errors) == 3 and max(map(float, errors)) < 1e-12


@on_ranks(2)
def test_a_rank_without_tokens_adds_zeros_to_its_tally():
    """Its balance losses are means over no token, if its grid is itself."""
    layer = MoE(4, 8, 4, 2, balance_coefficient=0.1, z_coefficient=0.1)
    x = torch.randn(3 * (1 - dist.get_rank()), 4, requires_grad=True)
    layer(x).sum().backward()
    tally = layer.losses.tally
    assert tally.isfinite().all() and tally.any() == (dist.get_rank() == 0)


@on_ranks(1)
def test_combining_without_weights_keeps_no_rows_for_backward():
    (part,) = DispatchPlan(torch.zeros(64, 1, dtype=torch.long), 1).wait_for_counts()
    rows = torch.randn(64, 8, requires_grad=True)
    with saved_bytes() as kept:
        part.begin_combine(rows)
        y = part.end_combine()
    assert kept() <= 2 * 64 * 8  # the order and the tokens
    assert torch.equal(y, rows)


@on_ranks(2)
def test_under_autocast_rows_travel_in_16_bits():
    torch.manual_seed(shifted(0))
    layer, x, sent = MoE(4, 16, 2), torch.randn(2, 8, 4)[dist.get_rank()], []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), count_bytes() as traffic:
            layer(x)
        sent.append(traffic.bytes() - 8)  # the count of the other rank's expert
    assert sent[0] == 2 * sent[1] > 0


def _across(nodes, N, k, E, D, topk_group, dropped):
    """Return the rows that leave a node with one hop and with two, and the bytes with two."""
    rank, P = rank_and_size()
    node, groups = rank * nodes // P, _groups(P // nodes)
    torch.manual_seed(shifted(rank))
    router = Router(D, E, k, "sigmoid", n_group=nodes, topk_group=topk_group).double()
    x = torch.randn(N, D, dtype=torch.float64)
    routing, is_dropped = router(x), torch.rand(N, k) < dropped
    experts = routing.experts.masked_fill(is_dropped, -1)
    with least_bytes(), count_bytes() as traffic:
        y = two_hops(x, experts, routing.weights, E, lambda rows, *_: rows, *groups)
    assert_close(y, x * routing.weights.masked_fill(is_dropped, 0).sum(1, keepdim=True), 1e-12)
    node_of = [[e * nodes // E for e in row if e >= 0] for row in experts.tolist()]
    assert max(len(set(row)) for row in node_of) <= topk_group
    one = sum(other != node for row in node_of for other in row)
    two = sum(len({*row} - {node}) for row in node_of)
    return one, two, traffic.bytes(group=groups[1])


@pytest.mark.parametrize(
    "nodes, local, dropped", [(2, 2, 0), (2, 2, 1), (2, 1, 0.5), (1, 3, 0), (4, 2, 0), (3, 2, 0.5)]
)
def test_with_two_hops_a_token_is_sent_once_to_each_node_of_its_kept_choices(nodes, local, dropped):
    P, N, k, D = nodes * local, 10, 3, 4
    one, two, nbytes = zip(*run(P, _across, nodes, N, k, 2 * P, D, nodes, dropped))
    # A row is sent with its experts and weights; only the row returns.
    per_row, counts = 8 * (D + 2 * k) + 8 * D, 8 * (nodes - 1) * P
    assert sum(nbytes) == sum(two) * per_row + counts
    assert sum(two) <= sum(one)
    if P == 8:  # DeepSeek-V3's top 8 of 256, on 4 of 8 nodes, halves the rows
        one, two, _ = zip(*run(P, _across, 8, 32, 8, 256, 8, 4, 0))
        assert 0.45 < sum(two) / sum(one) < 0.6


# ---- the scale of the losses ---------------------------------------------------------------------


def _backward(layer, x, grad, how):
    """Give the layer the gradients of (y * grad).sum() and of its losses, by a scaled main loss."""
    main_loss = lambda: (layer(x) * grad).sum()
    if how == "a GradScaler, and microbatches":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        layer.losses.scale = scaler.scale(torch.ones(())) / 4
        for _ in range(4):
            (scaler.scale(main_loss()) / 4).backward()
        scaler.unscale_(torch.optim.SGD(layer.parameters()))
    elif how == "set after forward":
        loss = -3 * main_loss()
        layer.losses.scale = -3.0
        loss.backward()
        for parameter in layer.parameters():
            parameter.grad /= -3
    else:
        for scale in (8.0, 0.5):  # the second one replaces the first
            layer.losses.scale = scale
        again = recompute if how == "recomputed" else lambda layer, x: layer(x)
        for _ in range(2):
            (again(layer, x.requires_grad_()) * grad).sum().div(2).backward()


@pytest.mark.parametrize(
    "how", ["a GradScaler, and microbatches", "set after forward", "halves", "recomputed"]
)
@on_ranks(1)
def test_the_losses_have_the_scale_of_the_main_loss_once_it_is_set(how):
    layer = MoE(4, 16, 12, 2, balance_coefficient=0.3, z_coefficient=0.2)
    plain = _reference(layer, 12, losses=(0.3, 0.2))
    x, grad = torch.randn(2, 20, 4, dtype=torch.float64)
    (plain(x) * grad).sum().add(plain.loss).backward()
    _backward(layer, x, grad, how)
    for name, parameter in layer.named_parameters():
        assert_close(parameter.grad, plain.get_parameter(name).grad, 1e-11, name)
    passes = {"set after forward": 1, "halves": 2, "recomputed": 2}.get(how, 4)
    balance, z = layer.losses.tally[-2:]
    assert_close(balance * 0.3 + z * 0.2, passes * plain.loss.detach())


@pytest.mark.parametrize("scale", [0, 0.0, torch.zeros(())])
@on_ranks(2)
def test_a_batch_with_a_scale_of_0_counts_on_no_rank(scale):
    """A rank without a batch takes any batch, and multiplies its loss by 0."""
    rank, _ = rank_and_size()
    torch.manual_seed(shifted(0))
    options = {"balance_coefficient": 0.3, "z_coefficient": 0.2, "capacity_factor": 0.5}
    layer = MoE(4, 8, 4, 2, balance_groups=(None,), **options).double()
    x = torch.randn(2, 5, 4, dtype=torch.float64)[rank]
    found = []
    for rows in (x, x[: 0 if rank else None]):  # rank 1 has a batch that must not count, then none
        layer.zero_grad()
        layer.losses.tally.zero_()
        layer.losses.scale = scale if rank and len(rows) else 1.0
        (layer(rows) * (0 if rank else 1)).sum().backward()
        found.append([layer.losses.tally.clone(), layer.router.weight.grad])
    for one, other in zip(*found):
        assert_close(one, other, 1e-12)
        assert one.any() == (rank == 0)


# ---- capacity, errors ----------------------------------------------------------------------------


@pytest.mark.parametrize("top_k, factor, dropped", [(1, 2.0, 4), (2, 1.0, 8), (1, 4.0, 0)])
@on_ranks(1)
def test_a_capacity_takes_the_first_tokens_and_a_backward_counts_once(top_k, factor, dropped):
    """All 8 tokens choose the first k of 4 experts. Loads are counted in backward, and only once.

    So a forward alone, an evaluation and a recomputation do not count.
    """
    layer, x = MoE(4, 16, 4, top_k, capacity_factor=factor), torch.randn(8, 4, requires_grad=True)
    layer.router.weight.data.zero_()
    y = layer(x)
    room = 8 - dropped // top_k
    assert y[:room].any(-1).all() and not y[room:].any() and not layer.losses.tally.any()
    counts = torch.tensor([8.0, 8.0 * (top_k == 2), 0, 0, dropped], dtype=torch.float64)
    y.sum().backward()
    assert layer.losses.tally[:5].equal(counts)  # the load includes dropped choices
    recompute(layer, x).sum().backward()
    recompute_groups([layer, layer], 2, x).sum().backward()  # two uses as one
    with torch.no_grad():
        layer(x)
    assert layer.losses.tally[:5].equal(4 * counts)


@pytest.mark.parametrize("factor, places", [(1.1, 55), (1.101, 56), (0.7, 35), (2, 100), (9, 100)])
def test_a_capacity_is_the_exact_product_rounded_up(factor, places):
    """All 100 choices fall on one of 2 experts. In floating point 50 * 1.1 is larger than 55."""
    kept = within_capacity(torch.zeros(100, 1, dtype=torch.long), 2, factor) >= 0
    assert kept.flatten().tolist() == [i < places for i in range(100)]


@on_ranks(1)
def test_the_z_loss_has_a_gradient_without_the_balance_loss():
    layer, x = MoE(8, 16, 4, z_coefficient=0.5), torch.randn(6, 8)
    (0 * layer(x)).sum().backward()
    weight = layer.router.weight
    loss = 0.5 * F.linear(x, weight).logsumexp(-1).square().mean()
    assert_close(weight.grad, *torch.autograd.grad(loss, weight), 1e-5)


@on_ranks(4)
def test_errors_name_invalid_sizes_and_groups_on_every_rank():
    wrong = [
        (lambda: MoE(4, 16, 6), "num_experts=6 is not divisible by ep=4"),
        (lambda: MoE(4, 16, 8, capacity_factor=0.0), "capacity_factor=0.0 leaves no room"),
        (lambda: Router(4, 8, 5, n_group=2, topk_group=1), "top_k=5 is not from 1 to 4: .*=1"),
        (lambda: Router(4, 8, 2, n_group=3), "n_group=3 does not divide num_experts=8"),
        (lambda: Router(4, 8, 9), "top_k=9 is not from 1 to 8"),
        (lambda: Router(4, 8, 1, n_group=2, topk_group=0), "topk_group=0 is not from 1 to n_group=2"),
        (lambda: Router(4, 8, 1, n_group=2, topk_group=3), "topk_group=3 is not from 1 to n_group=2"),
        (lambda: Router(4, 8, 1, "relu"), "score='relu'"),
    ]
    for make, message in wrong:
        with pytest.raises(ValueError, match=message):
            make()


@on_ranks(4)
def test_nodes_in_another_order_than_the_group_are_refused():
    """Tokens would go to the wrong experts. Ranks 0 and 3 have the same places in either order."""
    node_group, cross_group = _groups(2)
    MoE(4, 16, 4, nodes=(node_group, cross_group))
    rank = dist.get_rank()
    if rank in (1, 2):
        message = f"rank {rank} of 4 in `group` has place {rank // 2} of 2"
        with pytest.raises(ValueError, match=message):
            MoE(4, 16, 4, nodes=(cross_group, node_group))
    with pytest.raises(ValueError, match="in `group` has place . of 4 in node . of 4"):
        MoE(4, 16, 4, nodes=(None, None))
