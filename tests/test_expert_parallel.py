"""Mixtures of experts against a loop over tokens and experts; bytes, balance, errors."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import expert_parallel
from collectives import count_bytes, rank_and_size
from expert_parallel import (
    Load, MoE, Router, balance_loss, dispatch_and_combine, expert_parallel_bytes,
    router_z_loss, two_hops,
)
from gpu_counts import batches, waits
from nccl_replay import record, replay
from ranks import least_bytes, on_ranks, run
from reference_gpt import MoE as ReferenceMoE
from sequence_parallel import recompute, saved_bytes


def _groups(size):
    """This rank's group of `size` neighbours, and that of ranks with its place in theirs."""
    rank, rows, mine = dist.get_rank(), torch.arange(dist.get_world_size()).view(-1, size), []
    for slices in (rows, rows.t()):
        for ranks in slices.tolist():
            group = dist.new_group(ranks)
            if rank in ranks:
                mine.append(group)
    dist.barrier()
    return mine


def _equal(found, expected, name="", tolerance=1e-11):
    message = lambda text: f"{name} {text}"
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=message)


# ---- a layer against the loop --------------------------------------------------------------------


def _reference(layer, x, E, **options):
    """A ReferenceMoE of E experts with random parameters, of which `layer` takes its part."""
    torch.manual_seed(99)
    plain = ReferenceMoE(x.shape[-1], E, layer.router.top_k, layer.router.score, **options).double()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.4)
    layer.double()
    rank, ep = rank_and_size(layer.group)
    own = dict(layer.named_parameters())
    for name, parameter in plain.named_parameters():
        full = parameter.detach()
        own[name].data.copy_(full.chunk(ep)[rank] if "experts" in name else full)
    return plain


CASES = {
    "top-1, with drops": dict(E=12, top_k=1, capacity_factor=0.7),
    "top-1, from softmax of all": dict(E=12, top_k=1),
    "top-2": dict(E=12, top_k=2),
    "top-3, with drops": dict(E=12, top_k=3, capacity_factor=1.0),
    "top-8 of 64, sigmoid, shared": dict(E=64, top_k=8, score="sigmoid", shared_experts=2),
    "of 2 of 4 groups": dict(E=12, top_k=4, score="sigmoid", n_group=4, topk_group=2),
    "losses": dict(E=12, top_k=2, losses=(0.3, 0.2)),
}


# ranks of ep and dp, and how many of ep's share a node
LAYOUTS = [(1, 1, 0), (2, 1, 0), (3, 1, 0), (1, 2, 0), (2, 2, 0), (3, 2, 0), (4, 1, 2), (6, 1, 2)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ep, dp, per_node", LAYOUTS)
@on_ranks(lambda ep, dp, **_: ep * dp)
def test_output_and_gradients_are_those_of_a_loop(ep, dp, per_node, case):
    """Output, input gradient and every parameter's, of ranks with 5, 0, 3 ... tokens."""
    rank, world_size = rank_and_size()
    ep_group, same_group = _groups(ep)
    options = dict(CASES[case])
    E, losses = options.pop("E"), options.pop("losses", (0, 0))
    E -= E % ep  # 63 of 64 over 3 ranks
    D, factor = 4, options.get("capacity_factor")
    of_plain = {
        "shared": options.get("shared_experts", 0),
        "factor": factor,
        "losses": losses,
        "groups": (options.get("n_group", 1), options.get("topk_group", 1)),
    }
    options |= {"balance_coefficient": losses[0] / 2, "z_coefficient": losses[1] / 2}
    options |= {"loss_scale": 2.0, "balance_groups": (None,)}
    options["nodes"] = per_node and _groups(per_node)
    layer = MoE(D, 4 * D, E, group=ep_group, **options)
    sizes = [(5, 0, 3, 8, 1, 2)[r % 6] if losses == (0, 0) else 4 for r in range(world_size)]
    torch.manual_seed(7)
    whole, grad = torch.randn(2, sum(sizes), D, dtype=torch.float64)
    plain = _reference(layer, whole, E, **of_plain)
    calls = sizes if factor else [sum(sizes)]  # capacity is of each rank's tokens
    inputs = [x.clone().requires_grad_() for x in whole.split(calls)]
    outputs = torch.cat([plain(x) for x in inputs if len(x)])
    (outputs * grad).sum().add(plain.loss).backward()
    input_grad = torch.cat([x.grad for x in inputs if len(x)])

    x = whole.split(sizes)[rank].clone().requires_grad_()
    y = layer(x)
    y.backward(grad.split(sizes)[rank])
    _equal(y, outputs.split(sizes)[rank].detach(), "output")
    _equal(x.grad, input_grad.split(sizes)[rank], "input")
    expected, place = dict(plain.named_parameters()), rank_and_size(ep_group)[0]
    for name, parameter in layer.named_parameters():
        is_expert = name.startswith("experts")
        dist.all_reduce(parameter.grad, group=same_group if is_expert else None)
        full = expected[name].grad
        _equal(parameter.grad, full.chunk(ep)[place] if is_expert else full, name)


@on_ranks(1, 3)
def test_the_idea_is_dispatch_and_combine():
    """dispatch_and_combine() as it stands at the file's top: results and gradients."""
    rank, P = rank_and_size()
    torch.manual_seed(rank)
    N, k, E, D = (5, 0, 7)[rank], 2, 4 * P, 6
    experts, found = torch.rand(N, E).argsort(-1)[:, :k], []
    scale = torch.randn(4, 1, dtype=torch.float64, requires_grad=True)

    def compute(rows, load):
        assert load.tokens_per_expert.tolist() == load.sizes
        return rows.sin() * scale.repeat_interleave(load.tokens_per_expert, 0)

    x, weights = torch.randn(N, D, dtype=torch.float64), torch.rand(N, k, dtype=torch.float64)
    for function in (dispatch_and_combine, one_hop):
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_(), scale]
        y = function(leaves[0], experts, leaves[1], E, compute)
        found.append([y, *torch.autograd.grad(y.cos().sum(), leaves)])
    for one, other in zip(*found):
        _equal(one, other)


@pytest.mark.parametrize("how", ["autocast", "bf16", "bf16, summed in fp32"])
@on_ranks(2)
def test_gradients_in_bf16_are_those_of_the_loop_but_for_a_few_per_cent(how):
    """Of each parameter, and of the input: the loop's in fp64, but for a few per cent."""
    rank, ep = rank_and_size()
    torch.manual_seed(3)
    options = {"balance_coefficient": 0.3, "z_coefficient": 0.2, "balance_groups": (None,)}
    layer = MoE(16, 64, 8, 2, shared_experts=1, **options)
    whole = torch.randn(12 * ep, 16).bfloat16().double()
    grad = torch.randn(12 * ep, 16).bfloat16().double()
    plain = _reference(layer, whole, 8, shared=1, losses=(0.3, 0.2))
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16().double()
    whole.requires_grad_()
    expected = plain(whole)
    torch.autograd.backward([expected, plain.loss], [grad, None])
    layer.bfloat16()
    x = whole.detach().chunk(ep)[rank].bfloat16()
    if how == "autocast":
        x, layer = x.float(), layer.float()
    for parameter in layer.parameters() if how == "bf16, summed in fp32" else ():
        parameter.grad_dtype = torch.float32
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        y = layer(x.requires_grad_())
    assert y.dtype == torch.bfloat16
    y.backward(grad.chunk(ep)[rank].bfloat16())
    pairs = {"output": (y, expected.chunk(ep)[rank]), "input": (x.grad, whole.grad.chunk(ep)[rank])}
    for name, parameter in layer.named_parameters():
        assert parameter.grad.dtype == (torch.bfloat16 if how == "bf16" else torch.float32)
        full = dict(plain.named_parameters())[name].grad
        own = parameter.grad.double()
        if not name.startswith("experts"):
            dist.all_reduce(own)
        pairs[name] = own, full.chunk(ep)[rank] if name.startswith("experts") else full
    for name, (found, correct) in pairs.items():
        error = (found.double() - correct).norm() / correct.norm()
        assert error < 0.03, f"{name}: {error}"


@on_ranks(2)
def test_all_tokens_may_go_to_one_expert_and_a_rank_may_have_none():
    """All tokens choose the first expert, and rank 1 has none of its own."""
    rank, _ = rank_and_size()
    layer = MoE(4, 16, 4).double()
    layer.router.weight.data.zero_()  # ties: the lowest wins
    x = torch.randn((3, 0)[rank], 4, dtype=torch.float64, requires_grad=True)
    plain = _reference(layer, x, 4)
    plain.router.weight.data.zero_()
    layer.router.weight.data.zero_()
    y = layer(x)
    y.sum().backward()
    assert layer.experts.w_in.grad.shape == (2, 16, 4)
    if rank == 0:
        expected = plain(x.detach())
        _equal(y, expected.detach())
        assert layer.experts.w_in.grad[0].any() and not layer.experts.w_in.grad[1].any()
    else:
        assert y.shape == (0, 4) and not layer.experts.w_in.grad.any()
    assert layer.counts.tolist() == [len(x), 0, 0, 0]


@on_ranks(2)
def test_experts_run_under_autocast_and_the_router_in_fp32():
    layer = MoE(16, 64, 4, 2)
    x = torch.randn(24, 16)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
        routing = layer.router(x.bfloat16())
    assert found.dtype == torch.bfloat16
    assert routing.logits.dtype == routing.weights.dtype == torch.float32
    assert (found - expected).norm() < 0.02 * expected.norm()
    found.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    with saved_bytes(layer.experts.parameters()) as count:
        with torch.autocast("cpu", torch.bfloat16):
            layer.experts(torch.randn(4, 16), Load(torch.tensor([3, 1]), [3, 1]))
    assert count() < layer.experts.w_in.nbytes // 2  # rows, and no copy of the matrices


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width, out", [(16, 24), (5, 3)])
def test_a_grouped_linear_is_a_linear_for_each_group(dtype, width, out):
    for counts in ([3, 0, 4, 1], [0, 0, 0, 0], [0, 7, 0, 0]):
        torch.manual_seed(0)
        x = torch.randn(sum(counts), width).to(dtype).requires_grad_()
        weight = torch.randn(4, out, width).to(dtype).requires_grad_()
        y = grouped_linear(x, weight, Load(torch.tensor(counts), counts))
        grad = torch.randn(sum(counts), out).to(dtype)
        y.backward(grad)
        found = y.detach(), x.grad, weight.grad
        x.grad = weight.grad = None
        loop = torch.cat([nn.functional.linear(r, w) for r, w in zip(x.split(counts), weight)])
        loop.backward(grad)
        expected = loop.detach(), x.grad, weight.grad
        for a, b in zip(found, expected):
            _equal(a, b, tolerance={torch.bfloat16: 2e-2, torch.float32: 1e-5}.get(dtype, 1e-12))


def test_an_expert_without_tokens_has_a_gradient_of_zero_whatever_the_kernel_leaves():
    product, counts = F.grouped_mm, [3, 0, 4, 0]

    def poisoned(a, b, offs):
        output = product(a, b, offs=offs)
        if b.ndim == 2:  # the gradient of the matrices
            output[torch.tensor(counts) == 0] = torch.nan
        return output

    x, weight = torch.randn(7, 16).bfloat16(), torch.randn(4, 24, 16).bfloat16().requires_grad_()
    with patch.object(F, "grouped_mm", poisoned):
        grouped_linear(x, weight, Load(torch.tensor(counts), counts)).sum().backward()
    assert weight.grad[[0, 2]].isfinite().all() and weight.grad[[0, 2]].any()
    assert not weight.grad[[1, 3]].any()


# ---- what holds up the host, and what it launches ------------------------------------------------


OPTIONS = [
    {},
    {"capacity_factor": 1.0, "shared_experts": 1, "score": "sigmoid", "n_group": 2},
    {"balance_coefficient": 0.1, "z_coefficient": 0.1, "balance_groups": (None,)},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("per_node", [0, 2])
@on_ranks(lambda per_node, **_: per_node * 2 or 2)
def test_the_host_waits_once_a_hop_in_forward_and_not_in_backward(per_node, options, dtype):
    once = {"tolist": 2 if per_node else 1}
    layer = MoE(16, 64, 8, 2, nodes=per_node and _groups(per_node), **options).to(dtype)
    x = torch.randn(5, 16, dtype=dtype, requires_grad=True)
    layer(x).sum().backward()
    for again in (False, True):
        with waits() as forward:
            y = recompute(layer, x) if again else layer(x)
        with waits() as backward:
            y.sum().backward()
        assert forward == once and backward == (once if again else {})
    with waits() as update:
        layer.router.update_bias(layer.counts)
    assert not update


@pytest.mark.parametrize("per_node, expected", [(0, (3, 2)), (2, (8, 5))])
@on_ranks(4)
def test_a_layer_launches_three_batches_forward_and_two_backward_or_eight_and_five_in_two_hops(
    per_node, expected
):
    layer = MoE(16, 64, 12, 3, nodes=per_node and _groups(per_node))
    x = torch.randn(5, 16, requires_grad=True)
    with batches() as count:
        y = layer(x)
        forward = count["batches"]
        y.sum().backward()
    assert not count["off 16"] or per_node
    assert (forward, count["batches"] - forward) == expected


@pytest.mark.parametrize("poisoned", ["router.weight", "experts.w_in", None])
@pytest.mark.parametrize("per_node", [0, 2])
@on_ranks(4)
def test_what_is_not_finite_and_not_refused_is_dispatched_and_reaches_the_output(
    per_node, poisoned
):
    options = {"n_group": 2, "topk_group": 1, "capacity_factor": 2.0, "balance_coefficient": 0.1}
    layer = MoE(16, 64, 8, 2, nodes=per_node and _groups(per_node), **options)
    layer._fault = lambda logits: None
    x = torch.randn(50, 16, requires_grad=True)
    if dist.get_rank() == 3:
        values = dict(layer.named_parameters())[poisoned].data if poisoned else x.data
        values.view(-1)[::2] = torch.nan
    y = layer(x)
    y.sum().backward()
    reached = torch.tensor([float(y.isnan().any()), float(x.grad.isnan().any())])
    dist.all_reduce(reached)
    assert (reached > 0).all()


# ---- router --------------------------------------------------------------------------------------


def test_equal_scores_go_to_the_lowest_experts():
    router = Router(4, 8, 3)
    router.weight.data.zero_()
    assert router(torch.randn(5, 4)).experts.tolist() == [[0, 1, 2]] * 5


def test_weights_are_normalized_over_the_chosen_and_not_for_one():
    x = torch.randn(6, 4)
    for score in ("softmax", "sigmoid"):
        several = Router(4, 8, 3, score)(x).weights
        torch.testing.assert_close(several.sum(-1), torch.ones(6))
        one = Router(4, 8, 1, score)(x)
        assert (one.weights < 1).all()
        one.weights.sum().backward()  # the router has a gradient
    assert Router(4, 8, 3, normalize=False)(x).weights.sum(-1).max() < 1


def test_the_router_computes_in_fp32_what_comes_in_16_bit():
    router, x = Router(64, 8, 2), torch.randn(6, 64).bfloat16()
    torch.testing.assert_close(router(x).logits, x.float() @ router.weight.t())


@on_ranks(1)
def test_balance_losses_are_computed_in_fp32_where_the_weights_are_bf16():
    layer = MoE(16, 64, 8, 2, balance_coefficient=0.5, z_coefficient=0.5).bfloat16()
    routing = layer.router(torch.randn(64, 16).bfloat16())
    counts = F.one_hot(routing.experts, 8).sum((0, 1))
    assert {x.dtype for x in routing[1:]} == {torch.float32}
    losses = layer._losses(routing, counts)
    exact = layer._losses(routing._replace(
        probabilities=routing.logits.double().softmax(-1), logits=routing.logits.double()
    ), counts)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), exact, rtol=1e-6, atol=0)


def test_scores_that_underflow_give_no_nan_and_the_bias_stays_in_fp32():
    router = Router(4, 8, 3, "sigmoid")
    router.weight.data.fill_(-100.0)
    routing = router(torch.ones(2, 4))
    assert routing.weights.isfinite().all() and routing.probabilities.isfinite().all()
    assert router.bfloat16().bias.dtype == torch.float32
    assert router.weight.dtype == torch.bfloat16


def test_a_bias_moves_the_choice_and_not_the_weights():
    router, x = Router(4, 8, 2, "sigmoid", normalize=False), torch.randn(6, 4)
    router.bias[5] = 10
    routing = router(x)
    assert (routing.experts[:, 0] == 5).all()
    scores = (x @ router.weight.t()).sigmoid()
    torch.testing.assert_close(routing.weights, scores.gather(1, routing.experts))


def test_a_token_uses_the_groups_of_the_highest_two_best_and_no_more():
    """DeepSeek-V3: 8 of 256 experts, in 4 of 8 groups."""
    torch.manual_seed(0)
    router = Router(16, 256, 8, "sigmoid", n_group=8, topk_group=4)
    router.bias.copy_(torch.randn(256) * 0.1)
    x = torch.randn(40, 16)
    scores = (x @ router.weight.t()).sigmoid() + router.bias
    for row, chosen in zip(scores.tolist(), router(x).experts.tolist()):
        groups = [sorted(row[g * 32 : (g + 1) * 32])[-2:] for g in range(8)]
        allowed = sorted(range(8), key=lambda g: -sum(groups[g]))[:4]
        reachable = [e for e in range(256) if e // 32 in allowed]
        assert chosen == sorted(reachable, key=lambda e: -row[e])[:8]


# ---- bytes ---------------------------------------------------------------------------------------


def _routed(rank, P, N, k, E, even, seed=0):
    """Experts of each of a rank's tokens: the same number of times each, or at random."""
    if even:
        return (torch.arange(N * k).view(N, k) + rank) % E
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.rand(N, E, generator=generator).argsort(-1)[:, :k]


@pytest.mark.parametrize("even", [True, False])
@on_ranks(1, 2, 3, 4)
def test_dispatch_and_combine_send_the_routed_tokens(even):
    own, P = rank_and_size()
    N, k, E, D = 24, 2, 12, 8
    routed = [_routed(rank, P, N, k, E, even) for rank in range(P)]
    crossing = torch.zeros(P, P, dtype=torch.int64)  # rows from one rank to another
    for rank in range(P):
        crossing[rank] = (routed[rank] * P // E).flatten().bincount(minlength=P)
    crossing.fill_diagonal_(0)
    rows = int(crossing[own].sum() + crossing[:, own].sum()) * D * 4  # out and, of others, back
    counts = 8 * (E // P + E // P % 2) * (P - 1)
    x, weights = torch.randn(N, D, requires_grad=True), torch.rand(N, k)
    with least_bytes(), count_bytes() as traffic:
        y = dispatch_and_combine(x, routed[own], weights, E, lambda rows, load: rows * 2)
        forward = traffic.bytes()
        y.sum().backward()
    _equal(y, 2 * x * weights.sum(-1, keepdim=True), tolerance=1e-5)
    assert (forward, traffic.bytes() - forward) == (rows + counts, rows)
    assert not even or rows == expert_parallel_bytes(N, k, D, P)


def _both_ways(nodes, N, k, E, D, max_nodes):
    """One hop and two of the same tokens: results, gradients, bytes between nodes."""
    rank, P = rank_and_size()
    local, groups = P // nodes, _groups(P // nodes)
    torch.manual_seed(rank)
    router = Router(D, E, k, "sigmoid", n_group=nodes, topk_group=max_nodes)
    x = torch.randn(N, D, dtype=torch.float64)
    routing = router(x)
    experts, weights = routing.experts, routing.weights.detach()
    scale = torch.arange(1, E + 1, dtype=torch.float64)[rank * E // P : (rank + 1) * E // P]
    results = []

    def compute(rows, load):
        return rows.sin() * scale.repeat_interleave(load.tokens_per_expert).unsqueeze(1)

    for way in (dispatch_and_combine, two_hops):
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        where = (None,) if way is dispatch_and_combine else groups
        with least_bytes(), count_bytes() as traffic:
            y = way(leaves[0], experts, leaves[1], E, compute, *where)
        y.cos().sum().backward()
        results.append([y.detach(), *[leaf.grad for leaf in leaves]])
    for one, two in zip(*results):
        _equal(two, one)
    node_of = experts * nodes // E
    far = node_of != rank // local
    crossing = [len(set(row.tolist()) - {rank // local}) for row in node_of]
    return int(far.sum()), sum(crossing), traffic.bytes(group=groups[1])


@pytest.mark.parametrize("nodes, local", [(2, 2), (2, 1), (1, 3), (4, 2), (3, 2)])
def test_two_hops_have_the_same_result_and_cross_to_a_node_once(nodes, local):
    P, N, k, D = nodes * local, 10, 3, 4
    E = 2 * P
    results = run(P, _both_ways, nodes, N, k, E, D, nodes)
    # what goes out: the row, its experts and weights; what comes back: the row
    per_copy, per_return = 8 * (D + 2 * k), 8 * D
    counts = 16 * (nodes - 1) * P
    crossing = sum(copies for _, copies, _ in results)
    assert sum(n for *_, n in results) == crossing * (per_copy + per_return) + counts
    assert crossing <= sum(far for far, _, _ in results)


def test_top_8_over_4_of_8_nodes_sends_half_of_the_rows_between_nodes():
    results = run(8, _both_ways, 8, 32, 8, 256, 8, 4)
    one, two = sum(far for far, _, _ in results), sum(copies for _, copies, _ in results)
    print(f"rows between nodes, two hops / one: {two / one:.2f}")
    assert 0.45 < two / one < 0.6


# ---- balance -------------------------------------------------------------------------------------


def test_the_balance_loss_is_1_when_even_and_e_when_one_expert_has_all():
    E, N = 8, 16
    even = torch.full((N, E), 1 / E)
    assert balance_loss(even, torch.full((E,), 2 * N // E), N, 2).item() == pytest.approx(1)
    one = torch.zeros(N, E)
    one[:, 3] = 1
    counts = torch.zeros(E)
    counts[3] = N
    assert balance_loss(one, counts, N, 1).item() == pytest.approx(E)
    logits = torch.randn(N, E)
    expected = logits.exp().sum(-1).log().square().mean()
    torch.testing.assert_close(router_z_loss(logits, N), expected)


@on_ranks(1)
def test_loads_are_counted_once_for_each_backward():
    """Not in a forward alone, once if that is recomputed, and not in an evaluation."""
    layer, x = MoE(4, 16, 4, 2), torch.randn(6, 4, requires_grad=True)
    y = layer(x)
    assert layer.counts.sum() == 0
    y.sum().backward()
    assert layer.counts.sum() == 12
    recompute(layer, x).sum().backward()
    assert layer.counts.sum() == 24
    with torch.no_grad():
        layer(x)
    assert layer.counts.sum() == 24


@pytest.mark.parametrize("how, steps", [("none", 12), ("aux", 100), ("bias", 100)])
@on_ranks(2)
def test_a_skewed_router_is_balanced_within_100_steps_or_left_alone(how, steps):
    before, after = expert_parallel._balance(how, steps)
    assert before > 1.9
    assert after > 1.9 if how == "none" else after < 1.1


def test_the_bias_moves_by_its_rate_against_the_load():
    router = Router(4, 5)
    router.update_bias(torch.tensor([9, 3, 4, 4, 5]), 0.001)  # the mean is 5, the median 4
    torch.testing.assert_close(router.bias, torch.tensor([-0.001, 0.001, 0.001, 0.001, 0.0]))


# ---- DeepSeek-V3's shape, NCCL's rules, errors ---------------------------------------------------


@on_ranks(8)
def test_deepseek_v3s_256_experts_run_over_8_ranks():
    rank, _ = rank_and_size()
    options = {"score": "sigmoid", "n_group": 8, "topk_group": 4}
    layer = MoE(16, 8, 256, 8, shared_experts=1, **options).double()
    assert len(layer.experts.w_in) == 32
    torch.manual_seed(rank)
    x = torch.randn(12, 16, dtype=torch.float64, requires_grad=True)
    layer(x).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    nodes = layer.router(x).experts // 32
    assert max(len(set(row)) for row in nodes.tolist()) <= 4
    assert layer.counts.sum() == 12 * 8


def _recorded(two):
    rank, _ = rank_and_size()
    nodes = _groups(2) if two else None
    layer = MoE(4, 16, 8, 2, nodes=nodes, balance_coefficient=0.1, balance_groups=(None,))
    torch.manual_seed(rank)
    with record() as events:
        for _ in range(2):
            layer(torch.randn(5, 4, requires_grad=True)).sum().backward()
    return events


@pytest.mark.parametrize("two", [False, True])
def test_no_exchange_would_hang_on_nccl(two):
    replay(run(4, _recorded, two))


@on_ranks(2)
def test_logits_that_are_not_finite_are_an_error_on_every_rank():
    rank, _ = rank_and_size()
    layer = MoE(4, 16, 4, 2)
    layer.router.weight.data.abs_()
    for value in ("nan", "inf"):
        x = torch.randn(3, 4)
        if rank == 1:
            x[2] = float(value)
        message = f"rank 1: the router's logit of token 2 for expert 0 is {value}"
        if rank != 1:
            message = rf"rank {rank} cannot go on: ranks \[1\] of its group have an error"
        with pytest.raises(ValueError, match=message):
            layer(x)
    x = torch.randn(3, 4)
    assert layer(x).isfinite().all()  # nothing is left under way


@on_ranks(4)
def test_logits_that_are_not_finite_are_an_error_in_two_hops_too_and_so_are_other_nodes():
    rank, _ = rank_and_size()
    node, cross = _groups(2)
    layer, x = MoE(4, 16, 8, 2, nodes=(node, cross)), torch.randn(3, 4)
    x[1] = float("inf") if rank == 2 else x[1]
    with pytest.raises(ValueError, match="logit of token 1" if rank == 2 else "cannot go on: rank"):
        layer(x)
    assert layer(torch.randn(3, 4)).isfinite().all()
    for wrong in ((cross, node), (node, node), (None, cross), (node, None)):
        with pytest.raises(ValueError, match=r"nodes: \[.*, and across \[.* among \[0, 1, 2, 3\]"):
            MoE(4, 16, 8, nodes=wrong)


@on_ranks(2)
def test_sizes_that_cannot_be_are_named():
    with pytest.raises(ValueError, match="num_experts=5 is not divisible by ep=2"):
        MoE(4, 16, 5)
    with pytest.raises(ValueError, match="capacity_factor=0.0 leaves no room"):
        MoE(4, 16, 4, capacity_factor=0.0)
    with pytest.raises(ValueError, match="top_k=5 is not from 1 to 4, .*topk_group=1"):
        Router(4, 8, 5, n_group=2, topk_group=1)
    with pytest.raises(ValueError, match="top_k=9 is not from 1 to 8"):
        Router(4, 8, 9)
    with pytest.raises(ValueError, match="num_experts=8 cannot form n_group=3"):
        Router(4, 8, 1, n_group=3)
    with pytest.raises(ValueError, match="num_experts=8 cannot form n_group=0"):
        Router(4, 8, 1, n_group=0)
    with pytest.raises(ValueError, match="score='relu'"):
        Router(4, 8, 1, "relu")


@on_ranks(1)
def test_a_capacity_takes_the_first_tokens_and_counts_the_others():
    assert MoE(4, 16, 4, capacity_factor=float("inf"))(torch.randn(8, 4)).any(-1).all()
    layer = MoE(4, 16, 4, capacity_factor=2.0)
    layer.router.weight.data.zero_()  # all to expert 0, which takes 8 / 4 x 2 = 4 of 8
    x = torch.randn(8, 4)
    y = layer(x)
    assert y[:4].any(-1).all() and not y[4:].any()
    y.sum().backward()
    assert layer.tally[:5].tolist() == [8, 0, 0, 0, 4]  # the load is what was asked for
    twice = MoE(4, 16, 4, 2, capacity_factor=1.0)
    twice.router.weight.data.zero_()  # to experts 0 and 1, which take 16 / 4 of 8 each
    twice(x).sum().backward()
    assert twice.tally[:5].tolist() == [8, 8, 0, 0, 8]
    layer.router.bias[1] = 1
    recompute(layer, x.requires_grad_()).sum().backward()
    with torch.no_grad():
        layer(x)
    assert layer.tally[:5].tolist() == [8, 8, 0, 0, 8]  # two backwards
