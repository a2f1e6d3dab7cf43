"""Expert parallelism: each token uses k of E experts, which are spread over the ranks of a group.

A mixture-of-experts layer takes the MLP's place. A router scores the experts for each token; the
token goes to the ranks of the best k, is computed there, comes back, and the results are summed
with the router's weights. Parameters grow with E, the work per token with k alone.

    rank 0   t0 t1 t2   sort by expert   all-to-all   group by expert   E0: t1 t4   E1: t0 t3
    rank 1   t3 t4 t5                    ---------->                    E2: t2      E3: t5
             the same way back, then    y(t) = sum over its k experts of weight x expert(t)

A rank holds E/P experts, whole, and a copy of the router and of the experts that every token uses.
Nothing is padded: ranks first exchange how many rows they will send, and an expert computes as many
as there are. Only a capacity (Switch) drops tokens. Bytes that a rank sends in a layer's forward,
where N tokens a rank of width h are evenly routed over P ranks, dispatch and combine together:
2 N k h (P-1)/P elements; as many in backward. In two hops a token crosses to another node once,
however many of its experts are there.

Left alone, a router sends more and more tokens to fewer and fewer experts. Three remedies: a loss
E sum f_i P_i of the fraction of tokens and the mean probability of each expert (Switch); a loss of
the logits' size (ST-MoE); a bias on the choice alone, moved against each expert's load (DeepSeek).

Shazeer et al., "Outrageously Large Neural Networks", 2017. Fedus et al., "Switch Transformers",
2021. Zoph et al., "ST-MoE", 2022. Wang et al., "Auxiliary-Loss-Free Load Balancing", 2024.
DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024.

    torchrun --nproc-per-node 4 expert_parallel.py      claimed and counted bytes; balance;
                                                        the error against a loop over the experts
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from collectives import (
    all_reduce, all_to_all_in_group, all_to_all_single, autocasted, count_bytes, dist,
    gather_from_group, rank_and_size, run_ranks, scatter_to_group,
)

# ---- dispatch and combine ------------------------------------------------------------------------
#
# What each rank sends to each other one, and when. Every message is awaited before the next begins:
#
#     forward    counts      rows for each of the receiver's experts; here the host waits, and only
#                            here: the sizes of what follows are not known before
#                dispatch    a row of width D for each token and expert
#                combine     as many, back
#     backward   1. y's gradient goes to each row, times its weight; times the row it is the weight's
#                2. combine, reversed: the rows' gradients go to the experts
#                3. experts: gradients of their inputs and matrices. These are sums over the tokens
#                   of all ranks already: nothing is left to be summed over the group
#                4. dispatch, reversed: the gradients of their inputs come back
#                5. a token's gradient is the sum of its rows'; the router's came by the weights
#
# Nothing overlaps: a rank computes or sends. DeepEP's kernels and DualPipe send while another
# microbatch computes; that takes streams that share the GPU, and a schedule that has two at hand.
#
# PyTorch has no such layer. Megatron-LM's (MoELayer, its all-to-all dispatcher) has the same steps,
# and can also split each expert over ranks; here tp only deals out the tokens (see MoE).


class Load(NamedTuple):
    """How many rows each of a rank's G experts has: (G,) on the device, and as a list on the host.

    A kernel takes the one, a loop the other, for which the host need not wait for the device again.
    """

    tokens_per_expert: torch.Tensor
    sizes: list


def dispatch_and_combine(x, experts, weights, num_experts, compute, group=None, along=()):
    """Send each token to the ranks of its experts, compute there, and sum up what comes back.

    x: (N, D). experts: (N, k), where expert e is on rank e P // num_experts, and -1 is none.
    weights: (N, k), of the results; None where each counts 1.
    compute(rows, load, *along): this rank's experts, on (M, D) rows sorted by expert.
    along: tensors of N rows that go with x's, to ranks of one expert. Returns (N, D).
    """
    (N, k), (_, P) = experts.shape, rank_and_size(group)
    experts = experts.flatten()  # a row is sent for each of the N k, but for -1
    counts = count_choices(experts, num_experts).view(P, -1)  # (P, G): to each rank, by its experts
    arriving, sent, received = exchange_counts(counts, group)
    splits = [sum(counts) for counts in received], [sum(counts) for counts in sent]
    order = experts.argsort(stable=True)[N * k - sum(splits[1]) :]  # by expert, and so by rank
    token = order // k

    def dispatch(tensor):
        return all_to_all_in_group(tensor.index_select(0, token), *splits, group)

    rows, *along = (dispatch(tensor) for tensor in (x, *along))  # (M, D): by source, and by expert
    load = Load(arriving.sum(0), [sum(counts) for counts in zip(*received)])
    if len(load.sizes) > 1:
        source_and_expert = torch.repeat_interleave(arriving.flatten(), output_size=len(rows))
        by_expert = (source_and_expert % len(load.sizes)).argsort(stable=True)
        rows = compute(rows.index_select(0, by_expert), load)
        rows = rows.index_select(0, by_expert.argsort())  # by source again
    else:
        rows = compute(rows, load, *along)

    rows = all_to_all_in_group(rows, *splits[::-1], group)  # combine: in `order`, as they left
    if weights is not None:
        rows = rows * weights.flatten().index_select(0, order).to(rows.dtype).unsqueeze(1)
    # index_add() would keep the rows for its backward
    return rows.new_zeros(N, rows.shape[1]).scatter_add_(0, token.unsqueeze(1).expand_as(rows), rows)


def count_choices(experts, num_experts):
    """How often each expert is in `experts`, where -1 is none: (num_experts,)."""
    # bincount() would have the host wait
    experts = experts.flatten() % (num_experts + 1)
    counts = experts.new_zeros(num_experts + 1)
    return counts.scatter_add_(0, experts, torch.ones_like(experts))[:-1]


def exchange_counts(counts, group=None):
    """Tell each rank how many rows it will get for each expert: counts, (P, G) on the device.

    Returns those received, on the device, then as lists those sent and those received.
    """
    G = counts.shape[1]
    sent = F.pad(counts, (0, G % 2))  # what goes to a rank begins on 16 bytes
    received = torch.empty_like(sent)
    all_to_all_single(received, sent, group=group)
    on_host = torch.stack([sent, received])[:, :, :G].tolist()  # the host waits for the device
    return received[:, :G], *on_host


def two_hops(x, experts, weights, num_experts, compute, node_group=None, cross_group=None):
    """dispatch_and_combine(), with each token crossing to a node once, and its results as one.

    node_group: the ranks of this node; cross_group: those of all nodes that have the same rank in
    theirs. The first hop is one across the nodes, each of which is one expert; this computes by a
    second hop, within the node. Zhao et al., "Insights into DeepSeek-V3", 2025.
    """
    node, nodes = rank_and_size(cross_group)
    per_node = num_experts // nodes

    def within_node(rows, load, experts, weights):
        local = experts - node * per_node
        local = local.masked_fill((local < 0) | (local >= per_node), -1)
        return dispatch_and_combine(rows, local, weights, per_node, compute, node_group)

    node_of = experts.div(per_node, rounding_mode="floor").unsqueeze(2)  # (N, k, 1)
    number = torch.arange(nodes, device=x.device)
    wanted = number.where((node_of == number).any(1), -1)  # (N, nodes): each node at most once
    along = experts, weights
    return dispatch_and_combine(x, wanted, None, nodes, within_node, cross_group, along)


# ---- router --------------------------------------------------------------------------------------


class Routing(NamedTuple):
    """Of N tokens: experts (N, k), weights (N, k), probabilities (N, E), logits (N, E)."""

    experts: torch.Tensor
    weights: torch.Tensor
    probabilities: torch.Tensor
    logits: torch.Tensor


class Router(nn.Module):
    """Chooses the k experts of each token, and the weights of their results. In fp32 at least.

    top_k: k; among equal scores the lowest expert wins.
    score: "softmax" of the logits, or "sigmoid" of each, which DeepSeek-V3 does.
    normalize: whether weights are scores divided by their sum over the chosen; by default unless
        k = 1, where that would leave the router without gradient.
    n_group, topk_group: experts come in groups, of nodes, and a token may use at most so many of
        them: those with the highest sum of their two best.

    Its buffer `bias` is added for the choice and is not in the weights. Raises ValueError for a
    score that is not known, groups that do not divide the experts, and a top_k out of reach.
    """

    def __init__(
        self,
        hidden,
        num_experts,
        top_k=1,
        score="softmax",
        normalize=None,
        n_group=1,
        topk_group=None,
    ):
        super().__init__()
        topk_group = topk_group or n_group
        if score not in ("softmax", "sigmoid"):
            raise ValueError(f"score={score!r} is neither 'softmax' nor 'sigmoid'")
        if n_group < 1 or num_experts % n_group:
            raise ValueError(f"num_experts={num_experts} cannot form n_group={n_group}")
        reachable = min(topk_group, n_group) * num_experts // n_group
        if not 1 <= top_k <= reachable:
            raise ValueError(
                f"top_k={top_k} is not from 1 to {reachable}, the experts that a token can reach: "
                f"num_experts={num_experts}, n_group={n_group}, topk_group={topk_group}"
            )
        self.top_k, self.score = top_k, score
        self.normalize = top_k > 1 if normalize is None else normalize
        self.n_group, self.topk_group = n_group, topk_group
        self.weight = nn.Parameter(torch.randn(num_experts, hidden) * hidden**-0.5)
        self.register_buffer("bias", torch.zeros(num_experts))

    def forward(self, x):
        """x: (N, D). Returns a Routing."""
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, torch.float32)
            logits = F.linear(x.to(dtype), self.weight.to(dtype))  # (N, E)
            if self.score == "softmax":
                scores = probabilities = logits.softmax(-1)
            else:
                scores = logits.sigmoid()
                probabilities = _normalized(scores)
            experts = self.choose(scores.detach() + self.bias)
            weights = scores.gather(1, experts)
            weights = _normalized(weights) if self.normalize else weights
        return Routing(experts, weights, probabilities, logits)

    def choose(self, scores):
        """(N, E) -> (N, k), best first."""
        if self.topk_group < self.n_group:
            grouped = scores.unflatten(1, (self.n_group, -1))  # (N, G, E/G)
            best = grouped.topk(min(2, grouped.shape[2]), -1).values.sum(-1)  # (N, G)
            far = _best(best, self.n_group)[:, self.topk_group :].unsqueeze(-1)
            far = far.expand(-1, -1, grouped.shape[2])
            scores = grouped.scatter(1, far, -math.inf).flatten(1)
        return _best(scores, self.top_k)

    def _apply(self, function, recurse=True):
        super()._apply(function, recurse)
        self.bias = self.bias.float()  # in 16 bit it would soon not move any more
        return self

    def update_bias(self, tokens_per_expert, rate=0.001):
        """After a step: raise the bias of experts with less than the mean load, lower the others'.

        tokens_per_expert: (E,), over all ranks and microbatches of the step.
        """
        excess = tokens_per_expert - tokens_per_expert.double().mean()
        self.bias.sub_(rate * excess.sign().to(self.bias.dtype))


def _normalized(scores):
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)  # which may all have underflowed


def _best(scores, count):
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


# ---- balance -------------------------------------------------------------------------------------


def balance_loss(probabilities, tokens_per_expert, tokens, top_k):
    """This rank's part of Switch's E sum_i f_i P_i: 1 where all experts have the same load.

    probabilities: (n, E) of this rank's tokens; tokens_per_expert: (E,) choices of all ranks;
    tokens: of all ranks. The sum of the ranks' parts is the loss of all tokens.
    """
    fractions = tokens_per_expert.to(probabilities.dtype) / (tokens * top_k)
    return len(fractions) * (fractions * probabilities.sum(0)).sum() / tokens


def router_z_loss(logits, tokens):
    """This rank's part of the mean over all tokens of log^2 sum exp(logits)."""
    return logits.logsumexp(-1).square().sum() / tokens


# ---- experts -------------------------------------------------------------------------------------


class Experts(nn.Module):
    """This rank's experts: each an MLP, D -> F -> D with GELU, without biases."""

    def __init__(self, num_local, hidden, ffn_hidden):
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(num_local, ffn_hidden, hidden) * hidden**-0.5)
        self.w_out = nn.Parameter(torch.randn(num_local, hidden, ffn_hidden) * ffn_hidden**-0.5)

    def forward(self, x, load):
        """x: (M, D), sorted by expert; load: how many rows each has."""
        w_in, w_out = self.w_in.to(x.dtype), self.w_out.to(x.dtype)
        if _has_kernel(x, *w_in.shape[1:]):
            x = F.gelu(_grouped(x, w_in, load), approximate="tanh")
            return _grouped(x, w_out, load)
        mlps = zip(x.split(load.sizes), w_in, w_out)
        return torch.cat([_mlp(*mlp) for mlp in mlps])


def _mlp(x, w_in, w_out):
    return F.linear(F.gelu(F.linear(x, w_in), approximate="tanh"), w_out)


def _has_kernel(x, *widths):
    """Whether PyTorch computes all experts at once, without a wait of the host."""
    known = x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and x.device.type == "cpu")
    return known and len(x) > 0 and not any(width * x.itemsize % 16 for width in widths)


def _grouped(x, weight, load):
    """Rows of each expert times its own matrix: (M, a), (G, b, a) -> (M, b)."""
    matrices = weight.transpose(1, 2)
    if 0 in load.sizes and matrices.requires_grad:
        # gradients of matrices without rows, which the kernel leaves as it finds them on some GPUs
        idle = (load.tokens_per_expert == 0).view(-1, 1, 1)
        matrices.register_hook(lambda grad: grad.masked_fill(idle, 0))
    return F.grouped_mm(x, matrices, offs=load.tokens_per_expert.cumsum(0, dtype=torch.int32))


# ---- the layer -----------------------------------------------------------------------------------


class AuxLossAutoScaler(torch.autograd.Function):
    """forward: x; backward: gives `loss` its gradient, 1, and adds `counted` to `tally`

    So a loss that arises within a model need not be carried to its end; and what is counted counts
    once where forward runs twice, for recomputation, and not at all without a backward.
    """

    @staticmethod
    def forward(ctx, x, loss, counted, tally):
        ctx.counted, ctx.tally = counted, tally
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        ctx.tally.add_(ctx.counted)
        return grad_output, grad_output.new_ones((), dtype=torch.float32), None, None


class MoE(nn.Module):
    """A mixture of experts over the ranks of `group`: (..., D) -> (..., D) of this rank's tokens.

    tp_group: ranks that have the same tokens, (T, ..., D), and are to have the same results: each
        does chunk `rank` of T, and then all gather; a parameter's gradient is their sum. None, as
        with sequence parallelism: every rank has tokens of its own.
    capacity_factor: an expert takes at most ceil(n k / E x capacity_factor) of a rank's n tokens,
        the first ones; a token that finds no room gets nothing, and passes by in the residual.
    shared_experts: how many more every token uses.
    balance_coefficient, z_coefficient: of the losses, whose gradients are added in backward.
    loss_scale: of these losses: 1 where gradients are summed over the ranks, their number where
        they are averaged.
    balance_groups: the groups whose ranks have different tokens; the losses are those of all.
    nodes: (node_group, cross_group), for two_hops().
    router: further options of the Router.

    `tally`, (E + 3,), grows with every backward: how many choices fell on each expert; how many of
    them were dropped; this rank's parts of the two losses, without coefficients, or 0. Its view
    `counts`, (E,), is the load, for update_bias(). What is not finite travels on, to the loss.

    Raises ValueError if P does not divide the experts, for a capacity that holds no token, and for
    nodes that are not neighbours in the group.
    """

    def __init__(
        self,
        hidden,
        ffn_hidden,
        num_experts,
        top_k=1,
        group=None,
        tp_group=None,
        capacity_factor=None,
        shared_experts=0,
        balance_coefficient=0.0,
        z_coefficient=0.0,
        loss_scale=1.0,
        balance_groups=(),
        nodes=None,
        **router,
    ):
        super().__init__()
        _, P = rank_and_size(group)
        if num_experts % P:
            raise ValueError(f"num_experts={num_experts} is not divisible by ep={P}")
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"capacity_factor={capacity_factor} leaves no room for a token")
        if nodes:
            _check_nodes(*nodes, group)
        self.num_experts, self.group, self.nodes, self.tp_group = num_experts, group, nodes, tp_group
        self.capacity_factor, self.balance_groups = capacity_factor, balance_groups
        self.balance, self.z = balance_coefficient * loss_scale, z_coefficient * loss_scale
        self.router = Router(hidden, num_experts, top_k, **router)
        self.experts = Experts(num_experts // P, hidden, ffn_hidden)
        self.shared = None
        if shared_experts:
            up = nn.Linear(hidden, shared_experts * ffn_hidden, bias=False)
            down = nn.Linear(shared_experts * ffn_hidden, hidden, bias=False)
            self.shared = nn.Sequential(up, nn.GELU(approximate="tanh"), down)
        # this rank's: not a buffer, and filled with zeros also where parameters have no memory yet
        self.tally = torch.zeros(num_experts + 3, dtype=torch.float64, device="cpu")

    @property
    def counts(self):
        return self.tally[: self.num_experts]

    def forward(self, x):
        if self.tp_group is not None:
            x = scatter_to_group(x, 0, self.tp_group)  # (T/tp, ..., D)
        tokens = x.reshape(-1, x.shape[-1])  # (N, D)
        routing = self.router(tokens)
        tokens = autocasted(tokens)  # before they travel
        experts = self._within_capacity(routing.experts)
        hops, groups = (two_hops, self.nodes) if self.nodes else (dispatch_and_combine, [self.group])
        y = hops(tokens, experts, routing.weights, self.num_experts, self.experts, *groups)
        if self.shared is not None:
            y = y + self.shared(tokens)
        if torch.is_grad_enabled():
            y = self._with_losses(y, routing, experts)
        y = y.view(x.shape)
        return y if self.tp_group is None else gather_from_group(y, 0, self.tp_group)

    def _with_losses(self, y, routing, experts):
        """y, in whose backward the gradients of the losses begin, and the tally grows."""
        counts = count_choices(routing.experts, self.num_experts)
        losses = torch.zeros(2, device=y.device)
        if self.balance or self.z:
            losses = self._losses(routing, counts)
        loss = self.balance * losses[0] + self.z * losses[1]
        counted = torch.cat([counts.double(), (experts < 0).sum().view(1), losses.detach()])
        self.tally = self.tally.to(y.device)
        return AuxLossAutoScaler.apply(y, loss, counted, self.tally)

    def _losses(self, routing, counts):
        """The losses of balance and of the logits' size, of this rank's part of the tokens."""
        totals = F.pad(counts, (0, 1), value=len(routing.logits))
        for group in self.balance_groups:
            all_reduce(totals, group=group)
        counts, tokens = totals[:-1], totals[-1]
        balance = balance_loss(routing.probabilities, counts, tokens, self.router.top_k)
        return torch.stack([balance, router_z_loss(routing.logits, tokens)])

    def _within_capacity(self, experts):
        """The experts, or -1 in place of those that have as many tokens already as they may."""
        if self.capacity_factor is None:
            return experts
        chosen = experts.flatten()
        average = len(chosen) / self.num_experts
        capacity = math.ceil(min(average * self.capacity_factor, len(chosen)))
        order = chosen.argsort(stable=True)
        counts = count_choices(chosen, self.num_experts)
        first = (counts.cumsum(0) - counts)[chosen[order]]  # of the same expert, in `order`
        number = torch.arange(len(chosen), device=chosen.device) - first
        late = torch.empty_like(chosen, dtype=torch.bool)
        late[order] = number >= capacity
        return experts.masked_fill(late.view_as(experts), -1)


def tally_metrics(tallies, num_microbatches, with_losses):
    """{name: number on the device} of a step, from the tallies (layers, E + 3) of all its tokens.

    expert_load: the largest load of an expert / the mean, of the worst layer. expert_dropped: the
    fraction of the choices that a capacity dropped. balance_loss, z_loss: means over layers and
    microbatches, without coefficients.
    """
    counts, dropped, losses = tallies.split([tallies.shape[1] - 3, 1, 2], 1)
    metrics = {
        "expert_load": (counts.amax(1) / counts.mean(1)).max(),
        "expert_dropped": dropped.sum() / counts.sum(),
    }
    if with_losses:
        metrics["balance_loss"], metrics["z_loss"] = losses.mean(0) / num_microbatches
    return metrics


def _check_nodes(node_group, cross_group, group):
    """ValueError unless experts lie on the nodes' ranks in the order of those of `group`."""
    of = lambda group: dist.get_process_group_ranks(group or dist.group.WORLD)
    (rank, _), ranks, node, cross = rank_and_size(group), of(group), of(node_group), of(cross_group)
    begin, place = rank - rank % len(node), rank % len(node)
    if node != ranks[begin : begin + len(node)] or cross != ranks[place :: len(node)]:
        raise ValueError(f"nodes: {node}, and across {cross}, are not neighbours among {ranks}")


# ---- cost ----------------------------------------------------------------------------------------


def expert_parallel_bytes(tokens, top_k, hidden, ep, itemsize=4):
    """Bytes that a rank sends in a layer's forward for evenly routed tokens: 2 N k h (P-1)/P.

    Backward sends the same. The counts of rows come on top, once: to each other rank 8 bytes for
    each of its experts, whose number is made even.
    """
    return 2 * tokens * top_k * hidden * (ep - 1) // ep * itemsize


def expert_activation_bytes(tokens, top_k, hidden, ffn, itemsize=2, shared_experts=0):
    """Bytes that a layer keeps of so many tokens, without the scores of the router.

    Of each row that goes to an expert: itself, what GELU takes and makes, and the result, as it
    comes back; of shared experts what GELU takes and makes; of each token what the router takes,
    in 32 bit, and what shared experts take, in 16 bit.
    """
    rows = 2 * top_k * hidden + 2 * (top_k + shared_experts) * ffn
    rows += hidden * (shared_experts > 0 and itemsize < 4)
    return tokens * (rows * itemsize + 4 * hidden)


# ---- demonstration -------------------------------------------------------------------------------


def _demonstrate():
    rank, P = rank_and_size()
    N, D, E, k = 64, 32, 2 * P, 2
    torch.manual_seed(0)
    layer = MoE(D, 4 * D, E, k).double()
    shapes = [(E, *w.shape[1:]) for w in layer.experts.parameters()]
    w_in, w_out = (torch.randn(shape).double() * D**-0.5 for shape in shapes)
    mine = slice(rank * E // P, (rank + 1) * E // P)
    layer.experts.w_in.data, layer.experts.w_out.data = w_in[mine], w_out[mine]
    x = torch.randn(P, N, D).double()[rank]
    with count_bytes() as traffic:
        y = layer(x)
    routing, expected = layer.router(x), torch.zeros_like(x)
    for token, (experts, weights) in enumerate(zip(routing.experts, routing.weights)):
        for expert, weight in zip(experts, weights):
            up = F.gelu(w_in[expert] @ x[token], approximate="tanh")
            expected[token] += weight * (w_out[expert] @ up)
    if rank == 0:
        error = (y - expected).abs().max().item()
        balanced = expert_parallel_bytes(N, k, D, P, 8)
        print(f"{P} ranks, {E} experts, top {k}: {traffic.bytes()} bytes sent, {balanced} if even")
        print(f"largest difference from a loop over tokens and experts: {error:.1e}")
        one, two = _crossings(8, 4)
        print(f"rows between nodes, top 8 over at most 4 of 8: two hops / one = {two / one:.2f}\n")
        print(f"{'balance':8}{'largest load / mean, before':>30}{'after 100 steps':>18}")
    for balance in ("none", "aux", "bias"):
        before, after = _balance(balance)
        if rank == 0:
            print(f"{balance:8}{before:30.2f}{after:18.2f}")


def _crossings(nodes, most, tokens=4096):
    """Rows that leave node 0 in one hop and in two, for DeepSeek-V3's choice of experts."""
    router = Router(64, 256, 8, "sigmoid", n_group=nodes, topk_group=most)
    node = router(torch.randn(tokens, 64)).experts * nodes // 256
    copies = F.one_hot(node, nodes).amax(1)  # (N, nodes)
    return (node > 0).sum().item(), copies[:, 1:].sum().item()


def _balance(how, steps=100):
    """Largest load / mean, before and after training a router that begins skewed."""
    rank, P = rank_and_size()
    torch.manual_seed(rank)
    D, E = 16, 8
    score = "sigmoid" if how == "bias" else "softmax"
    coefficient = 1.0 if how == "aux" else 0.0
    options = {"balance_coefficient": coefficient, "balance_groups": (None,)}
    layer = MoE(D, D, E, 2, score=score, **options)
    weight = torch.randn(E, D, generator=torch.Generator().manual_seed(0)) * D**-0.5
    weight[:, 0] = torch.linspace(-1, 1, E)  # with x[:, 0] = 1: tokens like the last experts best
    layer.router.weight.data.copy_(weight)
    optimizer, loads = torch.optim.Adam([layer.router.weight], 0.02), []
    for _ in range(steps):
        x = torch.randn(2048, D)
        x[:, 0] = 1
        layer(x).sum().mul(0).backward()
        all_reduce(layer.router.weight.grad)
        all_reduce(layer.counts)
        loads.append((layer.counts.max() / layer.counts.double().mean()).item())
        if how == "bias":
            layer.router.update_bias(layer.counts, 0.005)
        layer.counts.zero_()
        optimizer.step()
        optimizer.zero_grad()
    return loads[0], sum(loads[-10:]) / 10


if __name__ == "__main__":
    run_ranks(_demonstrate)
