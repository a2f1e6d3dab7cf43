"""Expert parallelism: each token uses k of E experts, which are spread over the ranks of a group.

A mixture-of-experts layer takes the place of the MLP. A router scores the experts for each token.
The token is sent to the ranks of its k best experts and computed there; the results come back and
are summed with the router's weights. Parameters grow with E, the work per token only with k.

    rank 0   t0 t1 t2   sort by expert   all-to-all   group by expert   E0: t1 t4   E1: t0 t3    k=1
    rank 1   t3 t4 t5                    ---------->                    E2: t2      E3: t5
             the same way back, then    y(t) = sum over its k experts of weight x expert(t)

Left alone, a router sends more and more tokens to fewer and fewer experts. Three remedies are a
loss E sum f_i p_i of each expert's fraction of tokens and mean probability (GShard, Switch), a loss
on the logits' size (ST-MoE), and a bias on the choice alone, moved against the load (DeepSeek).

A rank holds   E/P whole experts, and a copy of the router and of shared experts, which all tokens
               use. Nothing is padded, and only a capacity (GShard, Switch) drops tokens
It sends       in a layer's forward 2 N k D (P-1)/P elements, for dispatch and combine, if the N
               tokens of each rank, of width D, are evenly routed; as many in backward. In two hops
               a token crosses to another node once, however many of its experts are there
Overlap        shared experts compute while the host waits for counts; else a rank sends or
               computes. DualPipe and DeepEP compute one microbatch while another's rows travel
PyTorch's      has no such layer. Megatron-LM's MoELayer takes the same steps, and can also split an
               expert over ranks and pad it; DeepEP has kernels in place of sort and all-to-all

Shazeer et al., "Outrageously Large Neural Networks", 2017. Lepikhin et al., "GShard", 2021. Fedus
et al., "Switch Transformers", 2021. Zoph et al., "ST-MoE", 2022. Wang et al., "Auxiliary-Loss-Free
Load Balancing", 2024. DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024.

    torchrun --nproc-per-node 4 expert_parallel.py      bytes, and the error against one process
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

# ---- the idea ------------------------------------------------------------------------------------


def switch(x, experts, compute, group=None):
    """Send each token to its expert and back, with one expert on each rank and k = 1.

    x: (N, D). experts: (N,), the rank of each token's expert. compute: this rank's. Returns (N, D).
    """
    _, world_size = rank_and_size(group)
    send_counts = experts.bincount(minlength=world_size)
    receive_counts = torch.empty_like(send_counts)
    all_to_all_single(receive_counts, send_counts, group=group)
    rows_to = send_counts.tolist()
    rows_from = receive_counts.tolist()
    order = experts.argsort(stable=True)
    rows = all_to_all_in_group(x[order], rows_from, rows_to, group)
    rows = all_to_all_in_group(compute(rows), rows_to, rows_from, group)
    return rows[order.argsort()]


# ---- dispatch and combine ------------------------------------------------------------------------
#
# With k choices per token and G = E/P experts per rank, a row travels for each choice, and the rows
# that arrive are grouped by expert. A rank sends to each other rank, one after the other:
#
#     forward     counts      the number of rows for each of the receiver's G experts. The host
#                             waits for these alone, as they are the sizes of what follows
#                 dispatch    a row of width D for each choice of one of the receiver's experts
#                 combine     as many rows back, the experts' results
#     backward    1. per choice, d row = weight * dy and d weight = row . dy
#                 2. combine in reverse: the rows' gradients go to the experts
#                 3. the experts' backward, which sums the gradients of their matrices over the
#                    tokens of all ranks, so the group has nothing left to reduce
#                 4. dispatch in reverse: the gradients of the experts' inputs come back
#                 5. dx is the sum over a token's rows; the weights' gradients go to the router
#
# MoE adds an all-reduce of E + 1 counts in each of balance_groups, for a loss of balance; where tp
# ranks have the same tokens, an all-gather of results in forward, and of gradients in backward.
# Experts do not defer products for weights: in a zero-bubble schedule these are a part of I. On a
# GPU rows are added by atomic operations, as in Megatron-LM: for k > 2 the last bits may vary.


def dispatch_and_combine(x, experts, weights, num_experts, compute, group=None, shared=None):
    """Send each token to the ranks of its experts, compute there, and sum up what comes back.

    x: (N, D). experts, weights: (N, k); expert e is on rank e P // num_experts, and -1 is none.
    compute: compute(rows, load) applies this rank's experts to (M, D) rows sorted by expert.
    shared: a module for every token, launched before the host waits, whose result is added.
    """
    hop = Hop(experts, num_experts, group)
    of_shared = shared(x) if shared is not None else None
    hop.wait()
    y = hop.combine(compute(hop.dispatch(x), hop.load), weights)
    return y if shared is None else y + of_shared


class Load(NamedTuple):
    """How many rows each of a rank's G experts has: a tensor (G,) on the device, and a list."""

    tokens_per_expert: torch.Tensor
    sizes: list


class Hop:
    """The routes of tokens to the ranks of their experts, and of results back.

    experts, num_experts: see above. Call wait() first; it sets `load`, that of this rank's experts.
    """

    def __init__(self, experts, num_experts, group=None):
        _, P = rank_and_size(group)
        G = num_experts // P
        self.group = group
        self.num_tokens, self.k = experts.shape
        experts = experts.flatten()  # (N k,)
        send_counts = count_choices(experts, num_experts).view(P, G)
        send_counts = F.pad(send_counts, (0, G % 2))  # NCCL is quick if messages begin on 16 bytes
        receive_counts = torch.empty_like(send_counts)
        all_to_all_single(receive_counts, send_counts, group=group)
        self.counts = torch.stack([send_counts, receive_counts])[:, :, :G]
        # copied to the host before any kernel that is launched between here and wait()
        self.on_host = self.counts.to("cpu", non_blocking=True)
        self.copied = torch.cuda.current_stream().record_event() if experts.is_cuda else None
        self.order = experts.argsort(stable=True)  # by expert, and so by rank

    def wait(self):
        """Wait for the counts, and find out which rows go where."""
        if self.copied is not None:
            self.copied.synchronize()
        send_counts, receive_counts = self.on_host.tolist()  # [rank][local expert]
        self.rows_to = [sum(counts) for counts in send_counts]
        self.rows_from = [sum(counts) for counts in receive_counts]
        _, received = self.counts  # (P, G)
        self.load = Load(received.sum(0), [sum(counts) for counts in zip(*receive_counts)])
        # choices are numbered token * k + choice; those of -1, which sort first, are cut off
        self.order = self.order[len(self.order) - sum(self.rows_to) :]
        self.token = self.order // self.k
        # rows arrive sorted by source rank, and by expert within a source: if 2 ranks send 2 + 1
        # and 1 + 2 rows to 2 experts, these are 0 0 1 0 1 1, and by_expert is 0 1 3 2 4 5
        G = received.shape[1]
        expert = torch.repeat_interleave(received.flatten(), output_size=sum(self.rows_from)) % G
        self.by_expert = expert.argsort(stable=True) if G > 1 else None

    def dispatch(self, x):
        """(N, ...) of this rank's tokens -> (M, ...), a row for each choice of its experts."""
        rows = x.index_select(0, self.token)
        rows = all_to_all_in_group(rows, self.rows_from, self.rows_to, self.group)
        return rows if self.by_expert is None else rows.index_select(0, self.by_expert)

    def combine(self, rows, weights=None):
        """(M, D) -> (N, D): send rows back, and sum each token's, times weights (N, k) if given."""
        if self.by_expert is not None:
            rows = rows.index_select(0, self.by_expert.argsort())
        rows = all_to_all_in_group(rows, self.rows_to, self.rows_from, self.group)
        if weights is not None:
            weights = weights.flatten().index_select(0, self.order).to(rows.dtype)
            return _WeightedSums.apply(rows, weights, self.token, self.num_tokens)
        y = rows.new_zeros(self.num_tokens, rows.shape[1])
        token = self.token.unsqueeze(1).expand_as(rows)
        return y.scatter_add_(0, token, rows)  # index_add_() would keep the rows for backward


class _WeightedSums(torch.autograd.Function):
    """forward: (N, D), the sum of each token's rows times weights (M,); backward: the gradients
    that autograd would give, with one buffer of the rows' size in place of three
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
    """Return how often each expert is chosen: (num_experts,). A choice of -1 is not counted."""
    experts = experts.flatten() % (num_experts + 1)  # -1 becomes one more expert, which is cut off
    counts = experts.new_zeros(num_experts + 1)  # bincount() would make the host wait
    return counts.scatter_add_(0, experts, torch.ones_like(experts))[:-1]


def two_hops(x, experts, weights, num_experts, compute, node_group, cross_group, shared=None):
    """dispatch_and_combine() in which a token crosses to a node once, and one sum comes back.

    First hop: each token goes once to every node that holds one of its experts, together with its
    choices and weights. The ranks with this one's number in other nodes are cross_group. Second
    hop: an ordinary dispatch inside the node, node_group. The weighted results are summed there,
    and one row per token and node returns. Zhao et al., "DeepEP", 2025.
    """
    node, num_nodes = rank_and_size(cross_group)
    per_node = num_experts // num_nodes
    nodes = torch.arange(num_nodes, device=x.device)
    node_of = experts.div(per_node, rounding_mode="floor")  # (N, k), and -1 for -1
    needed = (node_of.unsqueeze(2) == nodes).any(1)  # (N, num_nodes)
    across = Hop(nodes.where(needed, -1), num_nodes, cross_group)
    of_shared = shared(x) if shared is not None else None
    across.wait()
    rows, chosen, weights = (across.dispatch(tensor) for tensor in (x, experts, weights))
    local = chosen - node * per_node
    local = local.masked_fill((local < 0) | (local >= per_node), -1)
    rows = dispatch_and_combine(rows, local, weights, per_node, compute, node_group)
    y = across.combine(rows)
    return y if shared is None else y + of_shared


# ---- router and balance --------------------------------------------------------------------------


class Routing(NamedTuple):
    """The routing of N tokens: (N, k) experts and weights, (N, E) probabilities and logits."""

    experts: torch.Tensor
    weights: torch.Tensor
    probabilities: torch.Tensor
    logits: torch.Tensor


class Router(nn.Module):
    """Chooses the k experts of each token, and the weights of their results, in fp32 at least.

    top_k: k. Among equal scores the expert with the lowest number wins.
    score: "softmax" of the logits, or "sigmoid" of each, as in DeepSeek-V3. Weights are scores
        divided by their sum over the chosen experts; not with k = 1, where the weight would always
        be 1 and the router get no gradient.
    n_group, topk_group: experts lie in n_group groups, such as nodes, and a token uses at most
        topk_group of them: those whose two best experts have the highest sum.

    The buffer `bias` is added to the scores for the choice, and does not enter the weights. Raises
    ValueError if the score is unknown, or if top_k experts cannot be reached.
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
        """Return the Routing of x, (N, D)."""
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
            far = _best(best, self.n_group)[:, self.topk_group :, None]
            far = far.expand(-1, -1, grouped.shape[2])
            scores = grouped.scatter(1, far, -math.inf).flatten(1)
        return _best(scores, self.top_k)

    def _apply(self, function, recurse=True):
        super()._apply(function, recurse)
        self.bias = self.bias.float()  # in 16 bits a small update would soon be rounded away
        return self

    def update_bias(self, tokens_per_expert, rate=0.001):
        """Raise the bias of experts with less than the mean load, and lower that of the others.

        tokens_per_expert: (E,), of all ranks and microbatches of a step.
        """
        excess = tokens_per_expert - tokens_per_expert.double().mean()
        self.bias.sub_(rate * excess.sign().to(self.bias.dtype))


def _normalized(scores):
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)  # all scores may have underflowed


def _best(scores, count):
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def balance_loss(probabilities, tokens_per_expert, tokens, top_k):
    """Return this rank's part of Switch's loss E sum_i f_i p_i; the sum over ranks is the loss.

    It is 1 if all loads are equal. probabilities: (N, E), of this rank's tokens. tokens_per_expert,
    tokens: (E,) choices, and the number of tokens, of all ranks.
    """
    fractions = tokens_per_expert.to(probabilities.dtype) / (tokens * top_k)
    return len(fractions) * (fractions * probabilities.sum(0)).sum() / tokens


def router_z_loss(logits, tokens):
    """Return this rank's part of the mean of log^2 sum exp(logits) over the tokens of all ranks."""
    return logits.logsumexp(-1).square().sum() / tokens


# ---- experts and the layer -----------------------------------------------------------------------


class Experts(nn.Module):
    """This rank's experts. Each is an MLP, D -> F -> D with GELU, without biases."""

    def __init__(self, num_local, hidden, ffn_hidden):
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(num_local, ffn_hidden, hidden) * hidden**-0.5)
        self.w_out = nn.Parameter(torch.randn(num_local, hidden, ffn_hidden) * ffn_hidden**-0.5)

    def forward(self, x, load):
        """Apply each expert to its rows of x, (M, D), sorted by expert. load: their Load."""
        w_in = self.w_in.to(x.dtype)
        w_out = self.w_out.to(x.dtype)
        aligned = not any(width * x.itemsize % 16 for width in w_in.shape[1:])
        if x.dtype == torch.bfloat16 and aligned and len(x) > 0:  # all experts in one kernel
            x = F.gelu(_grouped(x, w_in, load), approximate="tanh")
            return _grouped(x, w_out, load)
        outputs = []
        for rows, up, down in zip(x.split(load.sizes), w_in, w_out):
            rows = F.gelu(F.linear(rows, up), approximate="tanh")
            outputs.append(F.linear(rows, down))
        return torch.cat(outputs)


def _grouped(x, weight, load):
    """Multiply each expert's rows by its own matrix: (M, a), (G, b, a) -> (M, b)."""
    matrices = weight.transpose(1, 2)
    if 0 in load.sizes and matrices.requires_grad:
        # on some GPUs the kernel does not write the gradients of matrices that have no rows
        idle = (load.tokens_per_expert == 0).view(-1, 1, 1)
        matrices.register_hook(lambda grad: grad.masked_fill(idle, 0))
    return F.grouped_mm(x, matrices, offs=load.tokens_per_expert.cumsum(0, dtype=torch.int32))


class AddLossAndTally(torch.autograd.Function):
    """forward: x; backward: `loss` gets the gradient 1, and `counted` is added to `tally`

    So a loss inside the model need not be carried to its end, as in Megatron-LM's
    AuxLossAutoScaler; and what is counted counts once even if recomputation runs forward twice.
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

    tp_group: ranks with the same tokens, (T, ..., D). Each computes chunk `rank` of T, then they
        gather; gradients of parameters are the chunk's, and have to be summed over tp_group. With
        None every rank has tokens of its own.
    capacity_factor: each expert takes at most ceil(N k / E x capacity_factor) of a rank's N tokens,
        the first ones. The other choices are dropped: they add nothing to the result.
    shared_experts: the number of experts that every token uses in addition.
    balance_coefficient, z_coefficient: those of the losses, whose gradients are added in backward.
    loss_scale: 1 if gradients are summed over the ranks, the number of ranks if they are averaged.
    balance_groups: the groups whose ranks have different tokens; the losses are over all of them.
    nodes: (node_group, cross_group) for two_hops(), a row and a column of group's ranks, in order.
    router: further options of the Router.

    Every backward adds to `tally`, (E + 3,): how many choices fell on each expert, how many were
    dropped, and this rank's parts of the two losses, without coefficients, or 0. The first E,
    summed over ranks, are for update_bias(). Values that are not finite reach the output. Raises
    ValueError if P does not divide the experts, or if the capacity holds no token.
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
        # each rank has its own: not a buffer, and filled with zeros also under torch.device("meta")
        self.tally = torch.zeros(num_experts + 3, dtype=torch.float64, device="cpu")

    def forward(self, x):
        if self.tp_group is not None:
            x = scatter_to_group(x, 0, self.tp_group)  # (T/tp, ..., D)
        tokens = x.reshape(-1, x.shape[-1])  # (N, D)
        routing = self.router(tokens)
        tokens = autocasted(tokens)  # a row in 16 bits is half as large a message
        experts = self._within_capacity(routing.experts)
        routed = tokens, experts, routing.weights, self.num_experts, self.experts
        if self.nodes:
            y = two_hops(*routed, *self.nodes, shared=self.shared)
        else:
            y = dispatch_and_combine(*routed, self.group, shared=self.shared)
        if torch.is_grad_enabled():
            y = self._with_losses(y, routing, experts)
        y = y.view(x.shape)
        return y if self.tp_group is None else gather_from_group(y, 0, self.tp_group)

    def _with_losses(self, y, routing, experts):
        """Return y, whose backward adds the gradients of the losses and to the tally."""
        counts = count_choices(routing.experts, self.num_experts)
        losses = y.new_zeros(2)
        if self.balance or self.z:
            totals = F.pad(counts, (0, 1), value=len(routing.logits))  # choices, and tokens
            for group in self.balance_groups:
                all_reduce(totals, group=group)
            of_all = totals[:-1], totals[-1], self.router.top_k
            z_loss = router_z_loss(routing.logits, totals[-1])
            losses = torch.stack([balance_loss(routing.probabilities, *of_all), z_loss])
        counted = torch.cat([counts.double(), (experts < 0).sum().view(1), losses.detach()])
        self.tally = self.tally.to(y.device)
        loss = self.balance * losses[0] + self.z * losses[1]
        return AddLossAndTally.apply(y, loss, counted, self.tally)

    def _within_capacity(self, experts):
        """Return the experts, with -1 for the choices that a full expert drops."""
        if self.capacity_factor is None:
            return experts
        average = experts.numel() / self.num_experts
        capacity = math.ceil(min(average * self.capacity_factor, experts.numel()))
        return experts.masked_fill(place_in_queue(experts, self.num_experts) >= capacity, -1)


def place_in_queue(experts, num_experts):
    """Return for each choice how many earlier ones fell on the same expert: (N, k)."""
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    counts = count_choices(chosen, num_experts)
    begins = counts.cumsum(0) - counts  # (E,), where each expert's choices begin in `order`
    places = torch.empty_like(chosen)
    places[order] = torch.arange(len(chosen), device=chosen.device) - begins[chosen[order]]
    return places.view_as(experts)


def tally_metrics(tallies, num_microbatches, with_losses):
    """Return {name: number on the device} of a step from its tallies, (layers, E + 3).

    expert_load: the largest load divided by the mean, in the worst layer. expert_dropped: the
    fraction of choices dropped. balance_loss, z_loss: means over layers and microbatches.
    """
    counts, dropped, losses = tallies.split([tallies.shape[1] - 3, 1, 2], 1)
    metrics = {
        "expert_load": (counts.amax(1) / counts.mean(1)).max(),
        "expert_dropped": dropped.sum() / counts.sum(),
    }
    if with_losses:
        metrics["balance_loss"], metrics["z_loss"] = losses.mean(0) / num_microbatches
    return metrics


# ---- cost, and a demonstration -------------------------------------------------------------------


def expert_parallel_bytes(tokens, top_k, hidden, ep, itemsize=4):
    """Return the bytes a rank sends in a layer's forward if routing is even: 2 N k D (P-1)/P items.

    Backward sends as many. The counts add 8 bytes per expert of each other rank (an even number).
    """
    return 2 * tokens * top_k * hidden * (ep - 1) // ep * itemsize


def _demonstrate():
    rank, P = rank_and_size()
    N, D, E, k = 64, 32, 2 * P, 2
    torch.manual_seed(0)
    matrices = torch.randn(E, D, D).double()  # in place of MLPs
    x = torch.randn(P, N, D).double()[rank]
    routing = Router(D, E, k).double()(x)
    own = matrices.chunk(P)[rank]
    compute = lambda rows, load: torch.cat([*map(torch.mm, rows.split(load.sizes), own)])
    with count_bytes() as traffic:
        y = dispatch_and_combine(x, routing.experts, routing.weights, E, compute)
    expected = torch.einsum("nk,nd,nkde->ne", routing.weights, x, matrices[routing.experts])
    if rank == 0:
        error = (y - expected).abs().max().item()
        even = expert_parallel_bytes(N, k, D, P, 8)
        print(f"{P} ranks, {E} experts, top {k}: {traffic.bytes()} bytes sent, {even} if even")
        print(f"largest difference from one process: {error:.1e}")


if __name__ == "__main__":
    run_ranks(_demonstrate)
