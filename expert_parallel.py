"""Expert parallelism: each token uses k of E experts, which are spread over the ranks of a group.

A mixture-of-experts layer takes the MLP's place. A router scores the experts for each token; the
token goes to the ranks of the best k, is computed there, comes back, and the results are summed
with the router's weights. Parameters grow with E, the work per token with k alone.

    rank 0   t0 t1 t2   sort by expert   all-to-all   group by expert   E0: t1 t4   E1: t0 t3    k=1
    rank 1   t3 t4 t5                    ---------->                    E2: t2      E3: t5
             the same way back, then    y(t) = sum over its k experts of weight x expert(t)

A rank holds E/P experts, whole, and a copy of the router and of the experts that every token uses.
Nothing is padded: ranks first exchange how many rows they will send, and an expert computes those
that there are. Only a capacity (Switch) drops tokens. Where the N tokens of each rank, of width D,
are evenly routed over P ranks, a rank sends 2 N k D (P-1)/P elements in a layer's forward, dispatch
and combine together; as many in backward. In two hops a token crosses to another node once, however
many of its experts are there.

Left alone, a router sends more and more tokens to fewer and fewer experts. Three remedies: a loss
E sum f_i p_i of the fraction of tokens and the mean probability of each expert (Switch); a loss of
the logits' size (ST-MoE); a bias on the choice alone, moved against each expert's load (DeepSeek).

Shazeer et al., "Outrageously Large Neural Networks", 2017. Fedus et al., "Switch Transformers",
2021. Zoph et al., "ST-MoE", 2022. Wang et al., "Auxiliary-Loss-Free Load Balancing", 2024.
DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024.

    torchrun --nproc-per-node 4 expert_parallel.py      bytes, and the error against a loop
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from collectives import (
    all_reduce, all_to_all_in_group, all_to_all_single, autocasted, count_bytes,
    gather_from_group, rank_and_size, run_ranks, scatter_to_group,
)

# ---- dispatch and combine ------------------------------------------------------------------------
#
# What a rank sends to each other rank of the group, and when; each is awaited before the next:
#
#     forward     counts      how many rows come for each of the receiver's E/P experts. The host
#                             waits for them, and for nothing else: they are sizes of what follows
#                 dispatch    a row of width D for each choice of one of the receiver's experts
#                 combine     as many rows back, the experts' results
#     backward    1. a row's gradient is its weight x y's; a weight's is its row . y's
#                 2. combine, the other way round: the rows' gradients go to the experts
#                 3. experts: the gradients of their inputs, and of their matrices, which are sums
#                    over the tokens of all ranks already: nothing is left to reduce in the group
#                 4. dispatch, the other way round: gradients of their inputs come back
#                 5. a token's gradient is the sum of its rows'; the router's is that of the weights
#
# MoE adds, for a loss of balance, an all-reduce of E + 1 counts in each of balance_groups; where
# ranks of tp have the same tokens, an all-gather of results in forward, of gradients in backward.
#
# There is no overlap: a rank sends or computes. DualPipe and DeepEP send the rows of one
# microbatch while another one computes, on a part of the GPU that is set aside for it. Nor do
# experts put off products of their weights: in a zero-bubble schedule these are a part of I.
#
# PyTorch has no such layer. Megatron-LM's MoELayer takes the same steps, and can also split each
# expert over ranks and pad it to a capacity; DeepEP has kernels in place of sort and all-to-all. On
# a GPU rows are added by atomic operations here, as in Megatron-LM: for k > 2 last bits may vary.


def dispatch_and_combine(x, experts, weights, num_experts, compute, group=None):
    """Send each token to the ranks of its experts, compute there, and sum up what comes back.

    x: (N, D); experts, weights: (N, k), where expert e is on rank e P // num_experts, and -1 is
    none; compute(rows, load): this rank's experts, on (M, D) rows sorted by expert. Returns (N, D).
    """
    hop = Hop(experts, num_experts, group)
    return hop.combine(compute(hop.dispatch(x), hop.load), weights)


class Load(NamedTuple):
    """How many rows each of a rank's G experts has, twice: (G,) on the device, and a list."""

    tokens_per_expert: torch.Tensor
    sizes: list


class Hop:
    """The way of tokens to the ranks of their experts, and of results back.

    experts, num_experts: see dispatch_and_combine(). load: of this rank's G experts.
    """

    def __init__(self, experts, num_experts, group=None):
        (self.num_tokens, k), (_, P) = experts.shape, rank_and_size(group)
        self.group, G = group, num_experts // P
        experts = experts.flatten()  # a row is sent for each choice
        counts = count_choices(experts, num_experts).view(P, G)
        sent = F.pad(counts, (0, G % 2))  # NCCL is quick where a message begins on 16 bytes
        received = torch.empty_like(sent)
        all_to_all_single(received, sent, group=group)
        to_each, from_each = torch.stack([sent, received])[:, :, :G].tolist()  # the host waits
        self.received = [sum(sizes) for sizes in from_each]  # rows from each rank
        self.sent = [sum(sizes) for sizes in to_each]
        self.load = Load(received[:, :G].sum(0), [sum(sizes) for sizes in zip(*from_each)])

        # numbers, token x k + which, of the choices that are sent: sorted by expert, and so by
        # rank; those of -1, which come first, are cut off
        order = experts.argsort(stable=True)
        self.order = order[len(order) - sum(self.sent) :]
        self.token = self.order // k
        # what arrives is sorted by source, and what comes from one source by expert
        counts, num_rows = received[:, :G].flatten(), sum(self.received)
        expert = torch.repeat_interleave(counts, output_size=num_rows) % G  # of (source, expert)
        self.by_expert = expert.argsort(stable=True) if G > 1 else None

    def dispatch(self, x):
        """(N, ...) of this rank's tokens -> (M, ...), a row for each choice of its experts."""
        rows = x.index_select(0, self.token)
        rows = all_to_all_in_group(rows, self.received, self.sent, self.group)
        return rows if self.by_expert is None else rows.index_select(0, self.by_expert)

    def combine(self, rows, weights=None):
        """(M, D) -> (N, D): back, and each token's added up, by weights, (N, k), if there are."""
        if self.by_expert is not None:
            rows = rows.index_select(0, self.by_expert.argsort())
        rows = all_to_all_in_group(rows, self.sent, self.received, self.group)
        if weights is not None:
            weights = weights.flatten().index_select(0, self.order).to(rows.dtype)
            return _WeightedSums.apply(rows, weights, self.token, self.num_tokens)
        y = rows.new_zeros(self.num_tokens, rows.shape[1])
        token = self.token.unsqueeze(1).expand_as(rows)
        return y.scatter_add_(0, token, rows)  # index_add_() would keep the rows for backward


class _WeightedSums(torch.autograd.Function):
    """forward: (N, D), sums of each token's rows, by weights (M,); backward: the same gradients as
    autograd's, with one buffer of the rows' size in place of three
    """

    @staticmethod
    def forward(ctx, rows, weights, token, num_tokens):
        ctx.save_for_backward(rows, weights, token)
        y = rows.new_zeros(num_tokens, rows.shape[1])
        return y.index_add_(0, token, rows * weights.unsqueeze(1))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        rows, weights, token = ctx.saved_tensors
        grad_rows = grad_output.index_select(0, token)
        grad_weights = torch.bmm(grad_rows.unsqueeze(1), rows.unsqueeze(2)).flatten()
        return grad_rows.mul_(weights.unsqueeze(1)), grad_weights, None, None


def count_choices(experts, num_experts):
    """How often each expert is in `experts`, where -1 is none: (num_experts,)."""
    experts = experts.flatten() % (num_experts + 1)
    counts = experts.new_zeros(num_experts + 1)  # bincount() would have the host wait
    return counts.scatter_add_(0, experts, torch.ones_like(experts))[:-1]


def two_hops(x, experts, weights, num_experts, compute, node_group=None, cross_group=None):
    """dispatch_and_combine(), with each token crossing to a node once, and one sum of results back.

    node_group: the ranks of this node; cross_group: those of all nodes that have the same rank in
    theirs. For the first hop a node is one expert: counts cross, then x, choices and weights, to
    each node where a token has experts. The second is within the node; and the sums of its results,
    which have their weights by then, cross back. Zhao et al., "DeepEP", 2025.
    """
    node, nodes = rank_and_size(cross_group)
    per_node, number = num_experts // nodes, torch.arange(nodes, device=x.device)
    node_of = experts.div(per_node, rounding_mode="floor")  # (N, k)
    needed = (node_of.unsqueeze(2) == number).any(1)  # (N, nodes)
    across = Hop(number.where(needed, -1), nodes, cross_group)

    rows, chosen, weights = (across.dispatch(tensor) for tensor in (x, experts, weights))
    local = chosen - node * per_node
    local = local.masked_fill((local < 0) | (local >= per_node), -1)
    rows = dispatch_and_combine(rows, local, weights, per_node, compute, node_group)
    return across.combine(rows)


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
        Weights are scores divided by their sum over the chosen, except for k = 1: the weight would
        be 1 and the router get no gradient.
    n_group, topk_group: experts lie in n_group groups, as of nodes, and a token uses at most
        topk_group of them: those with the highest sum of their two best.

    Its buffer `bias` is added for the choice and is not in the weights. Raises ValueError for a
    score that is not known, and a top_k out of reach.
    """

    def __init__(self, hidden, num_experts, top_k=1, score="softmax", n_group=1, topk_group=None):
        super().__init__()
        topk_group = topk_group or n_group
        if score not in ("softmax", "sigmoid"):
            raise ValueError(f"score={score!r} is neither 'softmax' nor 'sigmoid'")
        reachable = min(topk_group, n_group) * num_experts // n_group
        if not 1 <= top_k <= reachable or num_experts % n_group:
            where = f"{num_experts=}, {n_group=}, {topk_group=}"
            raise ValueError(f"{top_k=} is not from 1 to {reachable}, in whole groups: {where}")
        self.top_k, self.score = top_k, score
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
            weights = _normalized(weights) if self.top_k > 1 else weights
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
    """This rank's part of Switch's E sum_i f_i p_i: 1 where all experts have the same load.

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
        aligned = not any(width * x.itemsize % 16 for width in w_in.shape[1:])
        if x.dtype == torch.bfloat16 and aligned and len(x) > 0:  # all at once, without a wait
            x = F.gelu(_grouped(x, w_in, load), approximate="tanh")
            return _grouped(x, w_out, load)
        outputs = []
        for rows, up, down in zip(x.split(load.sizes), w_in, w_out):
            rows = F.gelu(F.linear(rows, up), approximate="tanh")
            outputs.append(F.linear(rows, down))
        return torch.cat(outputs)


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
        computes chunk `rank` of T, then they gather; gradients of parameters are of that chunk, and
        still to be summed. None, as with sequence parallelism: every rank has tokens of its own.
    capacity_factor: an expert takes at most ceil(n k / E x capacity_factor) of a rank's n tokens,
        the first ones; a choice that finds no room adds nothing: without any, x passes by alone.
    shared_experts: how many more every token uses.
    balance_coefficient, z_coefficient: of the losses, whose gradients are added in backward.
    loss_scale: of these losses: 1 where gradients are summed over the ranks, their number where
        they are averaged.
    balance_groups: the groups whose ranks have different tokens; the losses are those of all.
    nodes: (node_group, cross_group), for two_hops(): a row and a column of group's ranks, in order.
    router: further options of the Router.

    `tally`, (E + 3,), grows with every backward: how many choices fell on each expert; how many of
    them were dropped; this rank's parts of the two losses, without coefficients, or 0. The first E,
    summed over the ranks, are for update_bias(). What is not finite travels on, to the loss.

    Raises ValueError if P does not divide the experts, and for a capacity that holds no token.
    """

    def __init__(
        self, hidden, ffn_hidden, num_experts, top_k=1, group=None, tp_group=None,
        capacity_factor=None, shared_experts=0, balance_coefficient=0.0, z_coefficient=0.0,
        loss_scale=1.0, balance_groups=(), nodes=None, **router,
    ):
        super().__init__()
        _, P = rank_and_size(group)
        if num_experts % P:
            raise ValueError(f"num_experts={num_experts} is not divisible by ep={P}")
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"capacity_factor={capacity_factor} leaves no room for a token")
        self.num_experts, self.group, self.nodes = num_experts, group, nodes
        self.tp_group, self.balance_groups = tp_group, balance_groups
        self.capacity_factor = capacity_factor
        self.balance, self.z = balance_coefficient * loss_scale, z_coefficient * loss_scale
        self.router = Router(hidden, num_experts, top_k, **router)
        self.experts = Experts(num_experts // P, hidden, ffn_hidden)
        self.shared = None
        if shared_experts:
            up = nn.Linear(hidden, shared_experts * ffn_hidden, bias=False)
            down = nn.Linear(shared_experts * ffn_hidden, hidden, bias=False)
            self.shared = nn.Sequential(up, nn.GELU(approximate="tanh"), down)
        # this rank's: not a buffer, and filled with zeros also under torch.device("meta")
        self.tally = torch.zeros(num_experts + 3, dtype=torch.float64, device="cpu")

    def forward(self, x):
        if self.tp_group is not None:
            x = scatter_to_group(x, 0, self.tp_group)  # (T/tp, ..., D)
        tokens = x.reshape(-1, x.shape[-1])  # (N, D)
        routing = self.router(tokens)
        tokens = autocasted(tokens)  # before they travel
        experts = self._within_capacity(routing.experts)
        routed = tokens, experts, routing.weights, self.num_experts, self.experts
        if self.nodes:
            y = two_hops(*routed, *self.nodes)
        else:
            y = dispatch_and_combine(*routed, self.group)
        if self.shared is not None:
            y = y + self.shared(tokens)
        if torch.is_grad_enabled():
            y = self._with_losses(y, routing, experts)
        y = y.view(x.shape)
        return y if self.tp_group is None else gather_from_group(y, 0, self.tp_group)

    def _with_losses(self, y, routing, experts):
        """y, in whose backward the gradients of the losses begin, and the tally grows."""
        counts, losses = count_choices(routing.experts, self.num_experts), y.new_zeros(2)
        if self.balance or self.z:
            totals = F.pad(counts, (0, 1), value=len(routing.logits))  # and this rank's tokens
            for group in self.balance_groups:
                all_reduce(totals, group=group)
            of_all = totals[:-1], totals[-1], self.router.top_k
            z_loss = router_z_loss(routing.logits, totals[-1])
            losses = torch.stack([balance_loss(routing.probabilities, *of_all), z_loss])
        dropped = (experts < 0).sum().view(1)
        counted = torch.cat([counts.double(), dropped, losses.detach()])
        self.tally = self.tally.to(y.device)
        loss = self.balance * losses[0] + self.z * losses[1]
        return AuxLossAutoScaler.apply(y, loss, counted, self.tally)

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


# ---- cost ----------------------------------------------------------------------------------------


def expert_parallel_bytes(tokens, top_k, hidden, ep, itemsize=4):
    """Bytes that a rank sends in a layer's forward for evenly routed tokens: 2 N k D (P-1)/P.

    Backward sends the same. The counts of rows come on top, once: to each other rank 8 bytes for
    each of its experts, whose number is made even.
    """
    return 2 * tokens * top_k * hidden * (ep - 1) // ep * itemsize


# ---- demonstration -------------------------------------------------------------------------------


def _demonstrate():
    rank, P = rank_and_size()
    N, D, E, k = 64, 32, 2 * P, 2
    torch.manual_seed(0)
    layer, x = MoE(D, D, E, k).double(), torch.randn(P, N, D).double()[rank]
    w_in, w_out = torch.randn(2, E, D, D).double() * D**-0.5
    layer.experts.w_in.data, layer.experts.w_out.data = w_in.chunk(P)[rank], w_out.chunk(P)[rank]
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


if __name__ == "__main__":
    run_ranks(_demonstrate)
