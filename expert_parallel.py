"""Expert parallelism: each token uses k of E experts, which are spread over the ranks of a group.

A mixture-of-experts layer takes the MLP's place. A router scores the experts for each token; the
token goes to the ranks of the best k, is computed there, comes back, and the results are summed
with the router's weights. Parameters grow with E, the work per token with k alone.

    rank 0   t0 t1 t2   sort by expert   all-to-all   group by expert   E0: t1 t4   E1: t0 t3
    rank 1   t3 t4 t5                    ---------->                    E2: t2      E3: t5
             the same way back, then    y(t) = sum over its k experts of weight x expert(t)

Nothing is padded: ranks first exchange how many rows they will send, and one grouped product
computes all experts of a rank, whatever their loads. Only a capacity (Switch) drops tokens. Bytes
of a layer's forward, where N tokens a rank of width h are evenly routed over P ranks, dispatch and
combine together: 2 N k h (P-1)/P elements; as many in backward. In two hops a token crosses to
another node once, however many of its experts are there.

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
from torch.autograd.function import once_differentiable

from collectives import (
    all_reduce, all_to_all_in_group, all_to_all_single, autocasted, count_bytes, dist,
    rank_and_size, run_ranks,
)

# ---- the idea ------------------------------------------------------------------------------------


class Load(NamedTuple):
    """Rows of each of a rank's G experts: (G,) on the device, and the same on the host.

    A kernel takes the one, a loop the other, for which the host need not wait for the device again.
    """

    tokens_per_expert: torch.Tensor
    sizes: list


def dispatch_and_combine(x, experts, weights, num_experts, compute, group=None):
    """Send each token to the ranks of its experts, compute there, and sum up what comes back.

    x: (N, D); experts, weights: (N, k), where expert e is on rank e P // num_experts;
    compute(rows, load): this rank's experts, on (M, D) rows sorted by expert. Returns (N, D).
    one_hop() does the same in the way that a GPU wants it, also where a token loses an expert.
    """
    (N, k), (_, P) = experts.shape, rank_and_size(group)
    order = experts.flatten().argsort(stable=True)  # of N k copies: by expert, and so by rank
    sent = experts.flatten().bincount(minlength=num_experts).view(P, -1)
    received = torch.empty_like(sent)  # (P, G): from each rank, for each expert
    all_to_all_single(received, sent, group=group)
    splits = received.sum(1).tolist(), sent.sum(1).tolist()  # rows from each rank, and to each
    rows = all_to_all_in_group(x[order // k], *splits, group)  # dispatch: (M, D), by source

    expert_of = torch.arange(received.shape[1]).repeat(P).repeat_interleave(received.flatten())
    by_expert = expert_of.argsort(stable=True)
    load = Load(received.sum(0), received.sum(0).tolist())
    rows = compute(rows[by_expert], load)[by_expert.argsort()]

    rows = all_to_all_in_group(rows, *splits[::-1], group)  # combine: (N k, D), as they left
    copies = rows[order.argsort()].view(N, k, x.shape[1])
    return (weights.unsqueeze(2) * copies).sum(1)


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


class _GroupedLinear(torch.autograd.Function):
    """forward: rows of each group times its own matrix; backward: the same, twice

    x: (M, in), sorted by group; weight: (G, out, in).
    """

    @staticmethod
    def forward(ctx, x, weight, load):
        ends = load.tokens_per_expert.cumsum(0).to(torch.int32)  # where each group's rows end
        ctx.groups = ends, load.sizes
        ctx.save_for_backward(x, weight)
        return _grouped(x, weight.to(x.dtype).transpose(1, 2), *ctx.groups)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        grad_weight = _grouped_weights(grad_output, x, *ctx.groups).to(weight.dtype)
        return _grouped(grad_output, weight.to(x.dtype), *ctx.groups), grad_weight, None


def _is_fused(x, *widths):
    """Whether PyTorch's kernel takes these: bf16, rows of multiples of 16 bytes."""
    return len(x) and x.dtype == torch.bfloat16 and not any(width % 8 for width in widths)


def _grouped(x, matrices, ends, sizes):
    """(M, a), (G, a, b) -> (M, b)."""
    if _is_fused(x, *matrices.shape[1:]):
        return F.grouped_mm(x, matrices, offs=ends)
    output = x.new_empty(len(x), matrices.shape[2])
    for rows, matrix, out in zip(x.split(sizes), matrices, output.split(sizes)):
        torch.mm(rows, matrix, out=out)
    return output


def _grouped_weights(grad, x, ends, sizes):
    """(M, b), (M, a) -> (G, b, a): the sum over each group's rows."""
    if _is_fused(x, x.shape[1], grad.shape[1]):
        output = F.grouped_mm(grad.t(), x, offs=ends)
        for matrix, size in zip(output, sizes):
            if not size:
                matrix.zero_()  # which the kernel leaves as it finds it on some GPUs
        return output
    output = x.new_empty(len(sizes), grad.shape[1], x.shape[1])
    for matrix, rows, inputs in zip(output, grad.split(sizes), x.split(sizes)):
        torch.mm(rows.t(), inputs, out=matrix)
    return output


def grouped_linear(x, weight, load):
    """x: (M, in), sorted by group; weight: (G, out, in); load: of the groups -> (M, out)."""
    return _GroupedLinear.apply(autocasted(x).contiguous(), weight, load)


class Experts(nn.Module):
    """This rank's experts: each an MLP, D -> F -> D with GELU, without biases."""

    def __init__(self, num_local, hidden, ffn_hidden):
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(num_local, ffn_hidden, hidden) * hidden**-0.5)
        self.w_out = nn.Parameter(torch.randn(num_local, hidden, ffn_hidden) * ffn_hidden**-0.5)

    def forward(self, x, load):
        """x: (M, D), sorted by expert; load: how many rows each has."""
        x = F.gelu(grouped_linear(x, self.w_in, load), approximate="tanh")
        return grouped_linear(x, self.w_out, load)


# ---- dispatch and combine ------------------------------------------------------------------------


class _Copies(torch.autograd.Function):
    """forward: row i // k of x, for each i of `order`; backward: the sum of each row's copies

    PyTorch's own gradient of x[order] would sort the indices, or add atomically.
    """

    @staticmethod
    def forward(ctx, x, order, k):
        ctx.save_for_backward(order)
        ctx.shape, ctx.k = x.shape, k
        return x[order // k] if k > 1 else x[order]

    @staticmethod
    def backward(ctx, grad_output):
        (order,), (N, D), k = ctx.saved_tensors, ctx.shape, ctx.k
        missing = len(order) < N * k
        copies = grad_output.new_zeros(N * k, D) if missing else grad_output.new_empty(N * k, D)
        copies.index_copy_(0, order, grad_output)
        return copies.view(N, k, D).sum(1) if k > 1 else copies, None, None


class _WeightedSums(torch.autograd.Function):
    """forward: (N, D), each token's rows, those that are its copies by `order`, by weights (N, k)

    Keeps the rows. k places for each token would be more, where experts of other nodes have some.
    """

    @staticmethod
    def forward(ctx, rows, weights, order):
        ctx.save_for_backward(rows, weights, order)
        copies = rows.new_zeros(weights.numel(), rows.shape[1]).index_copy_(0, order, rows)
        copies = copies.view(*weights.shape, rows.shape[1])
        return torch.bmm(weights.unsqueeze(1), copies).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        rows, weights, order = ctx.saved_tensors
        gradients, own = grad_output[order // weights.shape[1]], weights.flatten()[order]
        products = torch.bmm(gradients.unsqueeze(1), rows.unsqueeze(2)).flatten()
        to_weights = torch.zeros_like(weights).flatten().index_copy_(0, order, products)
        return gradients.mul_(own.unsqueeze(1)), to_weights.view_as(weights), None


class _Sums(torch.autograd.Function):
    """forward: (N, D), the sum of the rows that are each token's; backward: each row its token's

    PyTorch's own index_add() would keep the rows.
    """

    @staticmethod
    def forward(ctx, rows, token, N):
        ctx.save_for_backward(token)
        return rows.new_zeros(N, rows.shape[1]).index_add_(0, token, rows)

    @staticmethod
    def backward(ctx, grad_output):
        (token,) = ctx.saved_tensors
        return grad_output[token], None, None


def _histogram(chosen, num_experts):
    """How often each expert is in `chosen`, where -1 is none: (num_experts,)."""
    # bincount() would have the host wait
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(0, chosen % len(counts), torch.ones_like(chosen))[:-1]


def exchange_counts(counts, group=None, fault=None):
    """Tell each rank how many rows of each kind it will get: counts, (P, kinds) on the device.

    Returns those received, on the device, then as lists those sent and those received. To read them
    is the one time that the host waits for the device, so an error travels with them.
    fault: None, or (a flag on the device, a function that tells what is wrong). Raises ValueError
        on every rank if one has its flag set.
    """
    kinds = counts.shape[1]
    counts = F.pad(counts, (0, kinds % 2))  # what is sent begins on 16 bytes
    sent = counts.masked_fill(fault[0], -1) if fault else counts
    received = torch.empty_like(sent)
    all_to_all_single(received, sent, group=group)
    received = received[:, :kinds]
    sent_rows, received_rows = torch.stack([sent[:, :kinds], received]).tolist()
    faulty = [rank for rank, row in enumerate(received_rows) if row[0] < 0]
    if faulty:
        _raise(faulty, fault, group)
    return received, sent_rows, received_rows


def _raise(faulty, fault, group):
    rank, _ = rank_and_size(group)
    if rank in faulty:
        raise ValueError(fault[1]())
    text = f"ranks {faulty} of its group have an error in routing"
    raise ValueError(f"rank {rank} cannot go on: {text}")


def one_hop(x, experts, weights, num_experts, compute, group=None, fault=None):
    """dispatch_and_combine(), with expert -1 for none, where the host waits once.

    fault, errors: see exchange_counts().
    """
    (N, k), (_, P) = experts.shape, rank_and_size(group)
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)  # by expert; those without come first
    counts = _histogram(chosen, num_experts).view(P, -1)
    arriving, sent, received = exchange_counts(counts, group, fault)  # by rank and its experts
    splits = [sum(row) for row in received], [sum(row) for row in sent]
    order = order[len(order) - sum(splits[1]) :]
    rows = all_to_all_in_group(_Copies.apply(x, order, k), *splits, group)  # by source, by expert

    place = torch.repeat_interleave(arriving.flatten(), output_size=len(rows))
    by_expert = (place % arriving.shape[1]).argsort(stable=True)
    load = Load(arriving.sum(0), [sum(column) for column in zip(*received)])
    rows = compute(_Copies.apply(rows, by_expert, 1), load)
    by_source = torch.empty_like(by_expert)
    by_source[by_expert] = torch.arange(len(by_expert), device=x.device)
    rows = _Copies.apply(rows, by_source, 1)
    rows = all_to_all_in_group(rows, *splits[::-1], group)  # back, in the order of `order`

    return _WeightedSums.apply(rows, weights.to(rows.dtype), order)


def two_hops(
    x, experts, weights, num_experts, compute, node_group=None, cross_group=None, fault=None
):
    """one_hop(), with each token crossing to a node once, and its results coming back as one.

    node_group: the ranks of this node; cross_group: those of all nodes that have this one's place
    in theirs. The token goes to the rank of the other node that has the place of its own, which
    then does one_hop() within the node. Zhao et al., "DeepEP", 2025.
    """
    (N, k), (_, nodes) = experts.shape, rank_and_size(cross_group)
    per_node = num_experts // nodes
    node_of = experts.div(per_node, rounding_mode="floor")  # (N, k), negative where there is none
    wanted = node_of.unsqueeze(-1) == torch.arange(nodes, device=x.device)  # (N, k, nodes)
    wanted = wanted.any(1).t()  # (nodes, N): where a copy is needed
    order = wanted.flatten().byte().argsort(descending=True, stable=True)  # those first, by node
    try:
        _, *counts = exchange_counts(wanted.sum(1, keepdim=True), cross_group, fault)
    except ValueError as error:
        _raise_on_node(error, node_group, per_node, x.device)
    sent, received = ([count for (count,) in rows] for rows in counts)
    splits = received, sent
    order = order[: sum(sent)]
    node, token = order // max(1, N), order % max(1, N)  # of each copy

    here = node_of[token] == node.unsqueeze(1)  # (copies, k)
    local = (experts[token] - node.unsqueeze(1) * per_node).masked_fill(~here, -1)
    experts = local.new_empty(sum(received), k)
    all_to_all_single(experts, local.contiguous(), *splits, cross_group)
    weights = all_to_all_in_group(weights[token], *splits, cross_group)
    rows = all_to_all_in_group(x.index_select(0, token), *splits, cross_group)
    rows = one_hop(rows, experts, weights, per_node, compute, node_group)
    rows = all_to_all_in_group(rows, *splits[::-1], cross_group)
    return _Sums.apply(rows, token, N)


def _raise_on_node(error, group, num_experts, device):
    """Raise it on every rank of the node: the others are about to exchange counts in one_hop()."""
    _, P = rank_and_size(group)
    counts = torch.zeros(P, num_experts // P, dtype=torch.int64, device=device)
    exchange_counts(counts, group, (counts.new_ones((), dtype=torch.bool), lambda: error.args[0]))


# ---- the layer -----------------------------------------------------------------------------------


class AuxLossAutoScaler(torch.autograd.Function):
    """forward: x; backward: gives `loss` its gradient, 1, and adds `found` to `tally`

    So a loss that arises within a model need not be carried to its end; and what is found counts
    once where forward runs twice, for recomputation, and not at all without a backward.
    """

    @staticmethod
    def forward(ctx, x, loss, found, tally):
        ctx.found, ctx.tally = found, tally
        ctx.shape = loss.shape if loss is not None else None
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        ctx.tally.add_(ctx.found)
        one = None if ctx.shape is None else grad_output.new_ones(ctx.shape, dtype=torch.float32)
        return grad_output, one, None, None


class MoE(nn.Module):
    """A mixture of experts over the ranks of `group`: (..., D) -> (..., D) of this rank's tokens.

    capacity_factor: an expert takes at most ceil(n k / E x capacity_factor) of a rank's n tokens,
        the first ones; a token that finds no place gets nothing, and passes by in the residual.
    shared_experts: how many more every token uses.
    balance_coefficient, z_coefficient: of the losses, whose gradients are added in backward.
    loss_scale: of these losses: 1 where gradients are summed over the ranks, their number where
        they are averaged.
    balance_groups: the groups whose ranks have different tokens; the losses are those of all.
    nodes: (node_group, cross_group), for two_hops().
    router: further options of the Router.

    `tally`, (E + 3,), grows with every backward: how many choices fell on each expert; how many of
    them were dropped; this rank's parts of the two losses, without coefficients, or 0. Its view
    `counts`, (E,), is the load, for update_bias().

    Raises ValueError if P does not divide the experts, for a capacity that holds no token, for
    nodes that are not neighbours in the group, and, on every rank of the group, for logits that are
    not finite.
    """

    def __init__(
        self,
        hidden,
        ffn_hidden,
        num_experts,
        top_k=1,
        group=None,
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
        self.num_experts, self.group, self.nodes = num_experts, group, nodes
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
        tokens = x.reshape(-1, x.shape[-1])  # (N, D)
        routing = self.router(tokens)
        tokens = autocasted(tokens)  # before they travel
        experts = self._within_capacity(routing.experts)
        hops, groups = (two_hops, self.nodes) if self.nodes else (one_hop, [self.group])
        arguments = (tokens, experts, routing.weights, self.num_experts, self.experts)
        y = hops(*arguments, *groups, self._fault(routing.logits))
        if self.shared is not None:
            y = y + self.shared(tokens)
        if torch.is_grad_enabled():
            y = self._with_losses(y, routing, experts)
        return y.view(x.shape)

    def _with_losses(self, y, routing, experts):
        """y, in whose backward the gradients of the losses begin, and the tally grows."""
        counts = _histogram(routing.experts.flatten(), self.num_experts)
        losses, loss = counts.new_zeros(2), None
        if self.balance or self.z:
            losses = self._losses(routing, counts)
            loss = self.balance * losses[0] + self.z * losses[1]
        found = torch.cat([counts.double(), (experts < 0).sum().view(1), losses.detach()])
        self.tally = self.tally.to(y.device)
        return AuxLossAutoScaler.apply(y, loss, found, self.tally)

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
        share = len(chosen) / self.num_experts * self.capacity_factor
        capacity = math.ceil(min(share, len(chosen)))
        order = chosen.argsort(stable=True)
        counts = _histogram(chosen, self.num_experts)
        first = (counts.cumsum(0) - counts)[chosen[order]]
        place = torch.arange(len(chosen), device=chosen.device) - first  # among its expert's tokens
        late = torch.empty_like(chosen, dtype=torch.bool)
        late[order] = place >= capacity
        return chosen.masked_fill(late, -1).view_as(experts)

    def _fault(self, logits):
        """A flag on the device, and a function that tells what is wrong; None checks nothing."""
        infinite = ~logits.isfinite()

        def describe():
            token, expert = infinite.nonzero()[0].tolist()
            what = f"logit of token {token} for expert {expert} is {logits[token, expert].item()}"
            return f"rank {rank_and_size(self.group)[0]}: the router's {what}"

        return infinite.any(), describe


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
