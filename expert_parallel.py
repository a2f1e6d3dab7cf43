"""Expert parallelism: each token uses k of E experts, which are spread over a group of P ranks.

A mixture-of-experts layer replaces a transformer block's MLP with E MLPs, the experts. A router
scores them for each token t, which is sent once to each of the k best. The results come back, and
y(t) is their sum, weighted by the router. Parameters grow with E, but work per token only with k.

Each rank has tokens of its own, as in data parallelism, and copies of all other layers. Only the
experts are divided, since one rank would have no room for all of them. Here k = 1, and there are
P = 2 ranks with one expert each. The token t0(E1) uses expert E1, which is on rank 1. A bar
separates rows to, or from, different ranks:

             tokens                  sorted by expert    after all-to-all    results, back again
    rank 0   t0(E1) t1(E0) t2(E0) -> t1 t2 | t0       -> t1 t2 | t3 t5    -> t1 t2 | t0
    rank 1   t3(E0) t4(E1) t5(E0) -> t3 t5 | t4       -> t0 | t4          -> t3 t5 | t4

A router tends to overuse a few experts, and then all ranks wait for those that hold them. So the
upper floor keeps it balanced.

A rank holds   E/P whole experts and a copy of the router
It sends       2 N k D (P-1)/P elements in a layer's forward and as many in its backward, if each
               rank has N tokens of width D and routing is even
Overlap        on the upper floor, some tokens travel while experts compute others, and while
               another microbatch computes, as in DeepSeek's DualPipe
PyTorch's      torch has no such layer. Megatron-LM's MoELayer takes the same steps. It can also
               split one expert over several ranks. DeepEP has kernels for both all-to-alls, and
               sends a token only once to a rank that has several of its experts. Here, as in
               Megatron-LM's all-to-all, a token travels once for each of them

Shazeer et al., "Outrageously Large Neural Networks", 2017. Lepikhin et al., "GShard", 2021. Fedus
et al., "Switch Transformers", 2021. Zoph et al., "ST-MoE", 2022. Wang et al., "Auxiliary-Loss-Free
Load Balancing", 2024. DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024.

    torchrun --nproc-per-node 4 expert_parallel.py      bytes, and the error against one process
"""

import math
from collections import namedtuple
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from collectives import (
    all_reduce, all_to_all_in_group, all_to_all_single, autocasted, count_bytes, gather_from_group,
    rank_and_size, run_ranks, scatter_to_group,
)

# ---- the idea ------------------------------------------------------------------------------------


def switch(x, experts, compute, group=None):
    """Send each token to its expert and back, with one expert on each rank and k = 1.

    A rank sorts its tokens by expert, which sorts them by rank, too. First the ranks exchange
    counts, since none knows how many rows it will receive. Then rows go to their experts, and
    results return. In backward, autograd runs two more all-to-alls: the gradients of the results go
    to the experts, and those of the rows return to the tokens' ranks.
    On rank 0 of the picture at the top, experts = 1 0 0, order = 1 2 0, rows_to = [2, 1] and
    rows_from = [2, 2]. At the end, order.argsort() = 2 0 1 turns t1 t2 t0 into t0 t1 t2.

    x: (N, D), this rank's tokens, whose sequences are flattened.
    experts: (N,), the expert of each token. Expert i is on rank i.
    compute: this rank's expert, (M, D) -> (M, D). It keeps the order of rows, and M may be 0.
    All ranks must call switch() and run its backward, also one without tokens, or others wait. So x
    needs a gradient on all ranks or on none.
    """
    _, world_size = rank_and_size(group)
    send_counts = experts.bincount(minlength=world_size)
    receive_counts = all_to_all_in_group(send_counts, group=group)
    rows_to = send_counts.tolist()  # Python's integers, for which the CPU waits if x is on a GPU
    rows_from = receive_counts.tolist()
    order = experts.argsort(stable=True)
    # The first rows_to[0] rows go to rank 0, the next rows_to[1] to rank 1 and so on. On the way
    # back, what was received is sent, so the sizes change places.
    rows = all_to_all_in_group(
        x[order], output_split_sizes=rows_from, input_split_sizes=rows_to, group=group
    )
    results = all_to_all_in_group(
        compute(rows), output_split_sizes=rows_to, input_split_sizes=rows_from, group=group
    )
    return results[order.argsort()]  # in the order of x


def switch_layer(x, router, compute, group=None):
    """Return each token's result from its likeliest expert, times its probability (Switch).

        mlp = nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D))  # this rank's expert
        y = switch_layer(x, router, mlp)

    router: (P, D), for one expert on each rank, and equal on all ranks. The choice has no gradient,
        so the router learns through the probability alone.
    compute: see switch(). Seed the ranks differently for it, or all experts would be equal.

    Each rank runs backward from the loss of its own tokens. The gradient of its copy of the router
    then covers these tokens only, so the caller must sum it over the group. Its expert has computed
    for tokens of all ranks, and their gradients have come to it, so its gradient is the sum
    already. It must not be summed, since the other ranks' experts are other weights. If the loss is
    the mean of the ranks' losses, divide both gradients by P.
    """
    probabilities = F.linear(x, router).softmax(-1)  # (N, P)
    weights, experts = probabilities.max(-1)  # (N,) each
    return weights.unsqueeze(1) * switch(x, experts, compute, group)


# ==== upper floor =================================================================================
#
# This is expert parallelism: a router's choice, and two all-to-alls around the experts. What
# follows sends a token to k experts, of which a rank has several. plain_dispatch() does so in the
# shortest way, and PlainMoE is a layer around it. A reader who wants the technique alone may stop
# after these.
#
# MoE, at the end of the file, is the class to use. Without options, its forward is
#
#     routing = self.router(x)
#     experts = within_capacity(routing.experts, ...)
#     y = dispatch_and_combine(x, experts, routing.weights, ..., self.experts, ...)
#     return self.losses.attach(y, routing, experts)
#
# The sections before it lead there, and each rests on those above it:
#
#     the experts            their MLPs
#     the router             how it chooses, and what keeps it balanced
#     rows under way         an all-to-all that begins in one place and ends in another
#     dispatch and combine   what plain_dispatch() does, with less memory, one wait, and overlap
#     two hops               the same, but a token crosses to each node only once
#     the router's losses    two losses whose gradients backward adds, and a tally of the choices
#     the layer              MoE
#
# Docstrings name the types of tensors over the group, which collectives.py explains. V (varying) is
# a rank's own. I (invariant) is equal on all ranks, and so is its gradient. R (replicated) is
# equal, too, but each rank's gradient is a part, and the parts must be summed.

# ---- k experts per token -------------------------------------------------------------------------
#
# A choice is a pair of a token and one of its k experts. One row travels for each choice. A rank
# has G = E/P experts, and sorts the rows that it receives by expert. Here are four tokens on P = 2
# ranks, with k = 2 and G = 2. So rank 0 has E0 and E1, and rank 1 has E2 and E3:
#
#            tokens and choices    sorted by expert  after all-to-all  grouped by expert
#   rank 0   t0(E2 E0) t1(E0 E1) -> t0 t1 t1 | t0 -> t0 t1 t1 | t2 t3 -> E0: t0 t1 t2 t3  E1: t1
#   rank 1   t2(E3 E0) t3(E2 E0) -> t2 t3 | t3 t2 -> t0 | t3 t2       -> E2: t0 t3        E3: t2
#
# The results return the same way, from the right to the left. Then a token's k results, weighted by
# the router, are added up. In plain_dispatch(), rank 0 has
#
#     choices     2 0 0 1           the experts of its tokens. Choice i is one of token i // k
#     order       1 2 3 0           the choices, sorted by expert
#     token       0 1 1 0           whose rows they are
#     sent        [2 1] [1 0]       rows for E0 and E1 of rank 0, and for E2 and E3 of rank 1
#     received    [2 1] [2 0]       rows for E0 and E1 from rank 0, and from rank 1
#     by_expert   0 1 3 4 2         the order that groups the rows t0 t1 t1 t2 t3 by expert
#     sizes       4 1               the rows of E0 and of E1


def plain_dispatch(x, experts, weights, num_experts, compute, group=None):
    """Send each token to its k experts, and return the sums of their weighted results, (N, D).

    x: (N, D), this rank's tokens. experts, weights: (N, k). Expert e is on rank e // G. As with
        switch(), all ranks must call it, and x needs a gradient on all of them or on none.
    compute: compute(rows, sizes, sizes_on_device) applies this rank's G experts to (M, D) rows,
        which are grouped by expert. Both sizes, a list and a tensor, are the experts' row counts.
    Types: x, weights and parameters of experts V -> V.
    """
    _, world_size = rank_and_size(group)
    num_local = num_experts // world_size
    choices = experts.flatten()
    sent = choices.bincount(minlength=num_experts).view(world_size, num_local)
    received = all_to_all_in_group(sent, group=group)
    rows_to = sent.sum(1).tolist()
    rows_from = received.sum(1).tolist()
    order = choices.argsort(stable=True)  # sorted by expert, so by rank, too
    token = order // experts.shape[1]
    rows = all_to_all_in_group(
        x[token], output_split_sizes=rows_from, input_split_sizes=rows_to, group=group
    )
    # The rows of each rank have arrived sorted by expert, E0 E0 E1 | E0 E0 in the example.
    local = torch.arange(num_local, device=x.device).repeat(world_size)
    expert_of_row = local.repeat_interleave(received.flatten())  # 0 0 1 0 0
    by_expert = expert_of_row.argsort(stable=True)
    sizes = received.sum(0)
    results = compute(rows[by_expert], sizes.tolist(), sizes)
    as_arrived = by_expert.argsort()  # the inverse: 0 1 4 2 3
    results = results[as_arrived]
    results = all_to_all_in_group(
        results, output_split_sizes=rows_to, input_split_sizes=rows_from, group=group
    )
    weighted = weights.flatten()[order].unsqueeze(1) * results
    return weighted.new_zeros(x.shape).index_add(0, token, weighted)


class PlainMoE(nn.Module):
    """The layer without anything else: maps this rank's tokens, (N, D), to (N, D).

    experts: a module for this rank's experts, `compute` of plain_dispatch(), such as Experts below.
    Seed all ranks alike, so that the copies of the router are equal. Experts draws those of all
    ranks and keeps its own; a module of another kind would begin equal on all ranks. The gradients
    of the router's copies must be summed over the group.

    The layer sets the attribute spread_over of the experts to `group`. So DistributedDataParallel
    (ddp.py) and FullyShardedDataParallel (zero.py) raise ValueError rather than copy one rank's
    experts to ranks that have others. Their arguments `groups` and `per_parameter` say which ranks
    have the same experts.

    Types: x and parameters of experts V, the router R -> V.
    """

    def __init__(self, hidden, num_experts, top_k, experts, group=None):
        super().__init__()
        self.router = nn.Linear(hidden, num_experts, bias=False)
        self.experts = experts
        self.experts.spread_over = group
        self.top_k = top_k
        self.group = group

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)  # (N, E)
        weights, experts = probabilities.topk(self.top_k)  # (N, k) each
        if self.top_k > 1:  # a single weight would become 1, and the router would not learn
            weights = weights / weights.sum(-1, keepdim=True)
        num_experts = self.router.out_features
        return plain_dispatch(x, experts, weights, num_experts, self.experts, self.group)


# ---- the experts ---------------------------------------------------------------------------------


class Experts(nn.Module):
    """This rank's experts. Each is an MLP, D -> ffn_hidden -> D, without biases.

    own: the range of their numbers among num_experts.
    activation: a module for what lies between the matrices w_in and w_out. By default it is GELU,
        approximated by tanh.
    gated: whether it maps 2 ffn_hidden numbers, a gate and a value for each, to ffn_hidden, as GELU
        does not.

    The zero-bubble schedules of pipeline.py do not defer the gradients of these matrices.
    """

    def __init__(self, own, num_experts, hidden, ffn_hidden, activation=None, gated=False):
        super().__init__()
        rows = 2 * ffn_hidden if gated else ffn_hidden
        self.w_in = nn.Parameter(draw_experts(own, num_experts, rows, hidden))
        self.w_out = nn.Parameter(draw_experts(own, num_experts, hidden, ffn_hidden))
        self.activation = activation or nn.GELU(approximate="tanh")

    def forward(self, x, sizes, sizes_on_device):
        """Apply each expert to its rows of x, (M, D). See `compute` of plain_dispatch()."""
        w_in = self.w_in.to(x.dtype)
        w_out = self.w_out.to(x.dtype)
        # F.grouped_mm() has a fast kernel for bfloat16, if rows have a multiple of 8 elements (16
        # bytes). Other dtypes and lengths take a product for each expert.
        is_aligned = all(width % 8 == 0 for width in w_out.shape[1:])
        if x.dtype == torch.bfloat16 and is_aligned and len(x) > 0:
            x = self.activation(_grouped(x, w_in, sizes, sizes_on_device))
            return _grouped(x, w_out, sizes, sizes_on_device)
        mlp = lambda rows, up, down: F.linear(self.activation(F.linear(rows, up)), down)
        return torch.cat([*map(mlp, x.split(sizes), w_in, w_out)])


def draw_experts(own, num_experts, rows, columns):
    """Draw a random matrix for each of num_experts. Return those of `own`, (G, rows, columns).

    Every rank draws all of them, one after another, so the ranks' generators stay alike.
    """
    kept = torch.empty(len(own), rows, columns)
    for expert in range(num_experts):
        matrix = torch.randn(rows, columns)
        if expert in own:
            kept[expert - own.start] = matrix
    return kept.mul_(columns**-0.5)


def _grouped(x, weight, sizes, sizes_on_device):
    """Multiply each expert's rows by its matrix, in one kernel: (M, a), (G, b, a) -> (M, b)."""
    matrices = weight.transpose(1, 2)
    if 0 in sizes and matrices.requires_grad:
        # on some GPUs the kernel does not write the gradients of experts that have no rows
        is_idle = (sizes_on_device == 0).view(-1, 1, 1)
        matrices.register_hook(lambda grad: grad.masked_fill(is_idle, 0))
    return F.grouped_mm(x, matrices, offs=sizes_on_device.cumsum(0, dtype=torch.int32))


# ---- the router ----------------------------------------------------------------------------------
#
# A router tends to overuse a few experts, and its logits tend to grow. There are four remedies. The
# losses have a section of their own, before the layer.
#
#     capacity      the most rows that an expert takes from a rank. Others are dropped (GShard)
#     bias          a number per expert, added to its score for the choice only, not for the weight.
#                   It is lowered for busy experts and raised for less busy ones (DeepSeek)
#     balance loss  E sum_i f_i p_i, where f_i is the fraction of choices that fall on expert i, and
#                   p_i is the mean probability of expert i (Switch, where k = 1; GShard counts each
#                   token's first choice only)
#     z-loss        the mean of logsumexp(logits)^2, which keeps the logits small (ST-MoE)

# The routing of N tokens: (N, k) experts and their weights, (N, E) probabilities and logits.
Routing = namedtuple("Routing", "experts weights probabilities logits")


class Router(nn.Module):
    """Choose the k experts of each token and the weights of their results, in fp32 or higher.

    top_k: k. Among equal scores the expert with the lowest number wins.
    score: "softmax" of the logits, or "sigmoid" of each, as in DeepSeek-V3. Weights are the scores
        of the chosen experts divided by their sum; for k = 1 the weight is the score itself, since
        the quotient would always be 1 and the router would get no gradient. DeepSeek-V3 also
        multiplies the weights by 2.5, and adds a small balance loss within each sequence. Both are
        absent here.
    n_group, topk_group: the experts form n_group groups, such as one per node. A token uses only
        experts of topk_group groups, those in which the two highest scores have the largest sum.

    The buffer `bias` is added to scores for the choice only. It begins as 0, but to_empty() leaves
    it undefined, as it does all tensors. Raises ValueError if score is unknown, n_group does not
    divide the experts, there are no topk_group groups, or they have fewer than top_k experts.
    """

    def __init__(self, hidden, num_experts, top_k=1, score="softmax", n_group=1, topk_group=None):
        super().__init__()
        topk_group = n_group if topk_group is None else topk_group
        if score not in ("softmax", "sigmoid"):
            raise ValueError(f"{score=} is neither 'softmax' nor 'sigmoid'")
        if num_experts % n_group:
            raise ValueError(f"{n_group=} does not divide {num_experts=}")
        if not 1 <= topk_group <= n_group:
            raise ValueError(f"{topk_group=} is not from 1 to {n_group=}")
        reachable = topk_group * num_experts // n_group
        if not 1 <= top_k <= reachable:
            where = f"{num_experts=}, {n_group=}, {topk_group=}"
            raise ValueError(f"{top_k=} is not from 1 to {reachable}: {where}")
        self.top_k = top_k
        self.score = score
        self.n_group = n_group
        self.topk_group = topk_group
        self.weight = nn.Parameter(torch.randn(num_experts, hidden) * hidden**-0.5)
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32))

    def forward(self, x):
        """Return the Routing of x, (N, D)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        logits = FullPrecisionLinear.apply(x.to(dtype), self.weight.to(dtype))  # (N, E)
        if self.score == "softmax":
            scores = probabilities = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            probabilities = _normalized(scores)
        experts = self.choose(scores.detach() + self.bias)
        weights = scores.gather(1, experts)
        if self.top_k > 1:
            weights = _normalized(weights)
        return Routing(experts, weights, probabilities, logits)

    def choose(self, scores):
        """Return the experts (N, k) that have the highest of the scores (N, E), best first."""
        if self.topk_group < self.n_group:
            groups = scores.unflatten(1, (self.n_group, -1))  # (N, n_group, E/n_group)
            sums = groups.topk(min(2, groups.shape[2])).values.sum(2)
            chosen = _best(sums, self.topk_group)
            left_out = torch.ones_like(sums, dtype=bool).scatter(1, chosen, False)
            scores = groups.masked_fill(left_out.unsqueeze(2), -torch.inf).flatten(1)
        return _best(scores, self.top_k)

    def update_bias(self, loads, rate=0.001):
        """Raise the bias of experts with less than the mean load, and lower it for those with more.

        loads: (E,), how often all ranks chose each expert, in all microbatches of a step.
        """
        excess = loads - loads.double().mean()
        # a bias in 16 bits, such as after .bfloat16(), would lose changes as small as this
        self.bias = self.bias.to(torch.promote_types(self.bias.dtype, torch.float32))
        self.bias.sub_(rate * excess.sign().to(self.bias.dtype))


def _normalized(scores):
    # all scores may have underflowed to 0
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def _best(scores, count):
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


class FullPrecisionLinear(torch.autograd.Function):
    """Return x W^T, (N, E), for x (N, D) and W (E, D), in full precision also in backward.

    TF32, or autocast, would round the factors to 10 or 7 bits of mantissa, and tokens with close
    scores would change their experts.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        with full_precision(x.device):
            return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        with full_precision(x.device):
            return dy @ weight, dy.t() @ x


@contextmanager
def full_precision(device):
    """Compute products inside in the dtype of their factors, without TF32 and without autocast.

    PyTorch has one setting for TF32, which it reads when it launches a product. So it is changed
    while those inside are launched. If it was inherited from torch.backends, it is set explicitly
    afterwards, to the same value.
    """
    products = torch.backends.cuda.matmul
    precision = products.fp32_precision
    products.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        products.fp32_precision = precision


def count_choices(experts, num_experts):
    """Return how often each expert is chosen, (E,). bincount() would make the host wait."""
    choices = experts.flatten()
    counts = choices.new_zeros(num_experts)
    return counts.scatter_add_(0, choices.clamp(min=0), (choices >= 0).long())


def within_capacity(experts, num_experts, capacity_factor):
    """Return the experts (N, k), with -1 for the choices that a full expert drops.

    Each expert takes the first ceil(capacity_factor N k / E) of the choices that fall on it from
    this rank's N tokens, in the order of the tokens. (GShard takes all first choices before second
    ones.) A choice that is dropped adds nothing to the result, and the weights of a token's other
    choices stay as they are. With room for one choice per expert:

        choices   1 1 0 1     of experts
        order     2 0 1 3     the choices, sorted by expert
        begins    0 1         the experts' first places in this order
        places    0 0 1 2     each one's place among the choices of its expert. 1 and 2 are too many
        returned  1 -1 0 -1
    """
    if capacity_factor is None:
        return experts
    choices = experts.flatten()
    # rounded, since in floating point 1.1 * 50 is larger than 55
    capacity = math.ceil(round(capacity_factor * len(choices) / num_experts, 6))
    order = choices.argsort(stable=True)
    loads = count_choices(choices, num_experts)
    begins = loads.cumsum(0) - loads
    places = torch.arange(len(choices), device=choices.device) - begins[choices[order]]
    is_dropped = (places >= capacity)[order.argsort()]  # in the order of the choices again
    return experts.masked_fill(is_dropped.view_as(experts), -1)


# ---- rows under way ------------------------------------------------------------------------------
#
# Rows can travel while something else is computed that does not need them. For this, an all-to-all
# begins at one point of forward, _Post, and ends at a later one, _Await. In backward, where the
# gradients of the rows travel the other way, it begins at _Await and ends at _Post. A Journey is
# what the two have in common. It holds the rows while they travel. Here tokens travel in two parts,
# beside the experts of the other part:
#
#     computes            experts 1    experts 2
#     travels   part 1    part 2       results 1    results 2


class Journey:
    """An all-to-all of rows that is under way for a while, in forward and again in backward.

    If a rank sends 3 rows and receives 4, then

                    _Post                        _Await
        forward     begins to send 3 rows        waits for 4 rows, and returns them
        backward    waits for 3 gradients,       begins to send 4 gradients
                    and returns them

    The rows go from _Post to _Await in the Journey, which autograd does not see. It must still run
    _Await's backward before that of _Post. So _Post returns an empty tensor, and _Await takes it.

    received, sent: how many rows come from and go to each rank in forward
    hand_over: None, or a function to call before rows are waited for, in both directions
    """

    def __init__(self, received, sent, group, hand_over):
        self.received = received
        self.sent = sent
        self.group = group
        self.hand_over = hand_over
        self.operation = None
        self.arriving = None

    def begin(self, rows, coming, going):
        """Begin to send `going` of the rows to each rank, and to receive `coming` from each."""
        self.arriving = rows.new_empty(sum(coming), *rows.shape[1:])
        self.operation = all_to_all_single(
            self.arriving, rows.contiguous(), coming, going, self.group, async_op=True
        )

    def end(self):
        """Wait for the rows that arrive, and return them."""
        if self.hand_over is not None:
            self.hand_over()
        self.operation.wait()
        rows = self.arriving
        self.arriving = None  # so that its memory is freed after use
        return rows


class _Post(torch.autograd.Function):
    """Begin to send rows. Backward waits for their gradients."""

    @staticmethod
    def forward(ctx, rows, journey):
        ctx.journey = journey
        journey.begin(rows, journey.received, journey.sent)
        return rows.new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, empty):
        return ctx.journey.end(), None


class _Await(torch.autograd.Function):
    """Wait for rows. Backward begins to send their gradients back."""

    @staticmethod
    def forward(ctx, empty, journey):
        ctx.journey = journey
        return journey.end()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradients):
        journey = ctx.journey
        journey.begin(gradients, journey.sent, journey.received)
        return gradients.new_empty(0), None


# ---- dispatch and combine ------------------------------------------------------------------------
#
# dispatch_and_combine() returns what plain_dispatch() does. It adds
#
#     dropped choices   an expert of -1 is none. No row travels for such a choice
#     less memory       backward needs fewer tensors of N k rows: _Permuted and _WeightedSums
#     one wait          the host waits once, for all counts
#     overlap           shared experts are computed while tokens travel
#     parts             some tokens travel while others are computed
#
# The tokens of a rank are divided into parts. A DispatchPlan counts how many rows of each part go
# between which ranks and experts. A Part takes the rows of its tokens to the experts and back, each
# way by a Journey. With two parts, what a rank computes (above) runs beside what travels (below):
#
#     forward    router            shared       experts 1    experts 2    sums 1      sums 2
#                         counts   dispatch 1   dispatch 2   combine 1    combine 2
#
#     backward   sums 2   sums 1       experts 2    experts 1     shared       router
#                         combine 2    combine 1    dispatch 2    dispatch 1
#
# In backward, a dispatch or a combine carries the gradients of its rows the other way. The order is
# autograd's: of the nodes whose gradients are complete, it runs the one that forward made last. In
# both directions, only dispatch 1 and combine 2 are exposed, as far as the shared experts and the
# sums do not hide them. All ranks post the same number of messages, also for parts in which they
# have no token. Choices, capacity and the order in which a token's results are added do not depend
# on the parts. Each part needs kernels and messages of its own, so parts pay if messages are long,
# and if an expert's rows of a part still fill a GPU.
#
# Step by step, backward computes and sends
#
#     1. for each choice, d result = weight * dy and d weight = result . dy
#     2. combine in reverse: the results' gradients go to the experts
#     3. the experts' backward. An expert has processed tokens of all ranks, so the gradients of its
#        matrices need no reduction over the group
#     4. dispatch in reverse: the gradients of the experts' inputs come back
#     5. a token's dx is the sum of its rows' gradients; d weight goes to the router
#
# On a GPU, rows are added by atomic operations, in any order. Two terms have the same sum in either
# order, but for k > 2 the last bits may vary.


class _Permuted(torch.autograd.Function):
    """Return rows[order]. Backward applies the inverse permutation.

    Autograd's own would add to zeros, since for all it knows a row is taken several times.
    """

    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(order, inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, grad_output):
        order, inverse = ctx.saved_tensors
        return _Permuted.apply(grad_output, inverse, order), None, None


class _WeightedSums(torch.autograd.Function):
    """Add weights[i] * rows[i] to y[token[i]]. Autograd would need two more (N k, D) tensors."""

    @staticmethod
    def forward(ctx, rows, weights, token, num_tokens):
        ctx.save_for_backward(rows, weights, token)
        y = rows.new_zeros(num_tokens, rows.shape[1])
        return y.index_add_(0, token, rows * weights.unsqueeze(1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        rows, weights, token = ctx.saved_tensors
        drows = dy.index_select(0, token)
        dweights = torch.bmm(drows.unsqueeze(1), rows.unsqueeze(2)).flatten()
        return drows.mul_(weights.unsqueeze(1)), dweights, None, None


class DispatchPlan:
    """Tells each rank how many rows each of its experts gets from each rank, for all parts at once.

    experts: (N, k), in which -1 is no expert. parts: the number of parts. hand_over: see Journey.
    Part i of N tokens has num_tokens[i] of them, which may be none. Its counts have the indices
    [rank][local expert]: on rank 0 of the example "k experts per token", sent = [[2, 1], [1, 0]]
    and received = [[2, 1], [2, 0]]. With two parts of one token each, sent is [[1, 0], [1, 0]] for
    t0, and [[1, 1], [0, 0]] for t1.
    """

    def __init__(self, experts, num_experts, group=None, parts=1, hand_over=None):
        _, world_size = rank_and_size(group)
        self.group = group
        self.k = experts.shape[1]
        self.hand_over = hand_over
        each, left_over = divmod(len(experts), parts)
        self.num_tokens = [each + (part < left_over) for part in range(parts)]
        choices = self.divided(experts)
        counts = [count_choices(part, num_experts).view(world_size, -1) for part in choices]
        sent = torch.stack(counts, 1)  # (P, parts, G): sent[r] is for rank r
        received = all_to_all_in_group(sent, group=group)  # received[r] is from rank r
        both = torch.stack([sent, received]).transpose(1, 2)  # (sent and received, parts, P, G)
        self.received = both[1]
        # From a GPU, this launches a copy to pinned memory, and does not wait for it. The event
        # marks its end, so wait_for_counts() waits for no kernel that is launched later.
        self.on_host = both.to("cpu", non_blocking=True)
        if experts.is_cuda:
            self.copied = torch.cuda.current_stream(experts.device).record_event()
        self.orders = [part.flatten().argsort(stable=True) for part in choices]

    def divided(self, tensor):
        """Return the parts of a tensor of N rows; if there is only one, the tensor itself."""
        return tensor.split(self.num_tokens) if len(self.num_tokens) > 1 else [tensor]

    def wait_for_counts(self):
        """Wait until the host knows the counts. Return a list of Parts."""
        if self.received.is_cuda:
            self.copied.synchronize()
        sent, received = self.on_host.tolist()
        return [
            Part(self, num_tokens, self.orders[i], sent[i], received[i], self.received[i])
            for i, num_tokens in enumerate(self.num_tokens)
        ]


class Part:
    """Takes a part of the tokens to the ranks of their experts, and the results back.

    On rank 0 of the example "k experts per token":

        begin_dispatch()  sends t0 t1 t1 | t0
        end_dispatch()    receives t0 t1 t1 | t2 t3, returns t0 t1 t2 t3 t1
        begin_combine()   takes results in this order, sends t0 t1 t1 | t2 t3 back
        end_combine()     receives t0 t1 t1 | t0, returns sums in the order t0 t1
    """

    def __init__(self, plan, num_tokens, order, sent, received, received_on_device):
        """plan: the DispatchPlan. sent, received: counts, lists [rank][local expert]."""
        self.plan = plan
        self.num_tokens = num_tokens
        self.rows_to = [sum(of_rank) for of_rank in sent]  # [3, 1] in the example
        self.rows_from = [sum(of_rank) for of_rank in received]  # [3, 2]
        self.sizes = [sum(of_expert) for of_expert in zip(*received)]  # [4, 1]
        self.received = received_on_device
        self.sizes_on_device = received_on_device.sum(0)
        # choices of -1 come first in the order, and are removed
        self.order = order[len(order) - sum(self.rows_to) :]
        self.token = self.order // plan.k  # choice i is one of token i // k
        self.under_way = []  # (_Post's empty tensor, Journey) of all that nobody has waited for

    def begin_dispatch(self, x, *others):
        """Begin to send rows of x, (N, ...), to experts, and then rows of other tensors."""
        self.post(x.index_select(0, self.token), self.rows_from, self.rows_to, self.plan.hand_over)
        for tensor in others:
            self.post(tensor.index_select(0, self.token), self.rows_from, self.rows_to)
        if len(self.sizes) > 1:
            self.find_orders()  # while the rows travel

    def end_dispatch(self):
        """Return compute()'s arguments: rows grouped by expert, both sizes, rows of others."""
        tensors = self.arrived()
        if len(self.sizes) > 1:  # the rows of a single expert are grouped already
            tensors = [_Permuted.apply(rows, self.by_expert, self.by_rank) for rows in tensors]
        rows, *others = tensors
        return rows, self.sizes, self.sizes_on_device, *others

    def begin_combine(self, results):
        """Begin to send results, (M, D), back."""
        if len(self.sizes) > 1:
            results = _Permuted.apply(results, self.by_rank, self.by_expert)
        self.post(results, self.rows_to, self.rows_from, self.plan.hand_over)

    def end_combine(self, weights=None):
        """Return sums per token, (N, D), of the results, times weights, (N, k), if given."""
        (rows,) = self.arrived()
        if weights is not None:
            weights = weights.flatten().index_select(0, self.order).to(rows.dtype)
            return _WeightedSums.apply(rows, weights, self.token, self.num_tokens)
        # unlike index_add_(), scatter_add_() does not keep the rows for backward
        y = rows.new_zeros(self.num_tokens, rows.shape[1])
        return y.scatter_add_(0, self.token.unsqueeze(1).expand_as(rows), rows)

    def post(self, rows, received, sent, hand_over=None):
        journey = Journey(received, sent, self.plan.group, hand_over)
        self.under_way.append((_Post.apply(rows, journey), journey))

    def arrived(self):
        """Wait for all rows under way, and return them, a tensor for each post()."""
        under_way = self.under_way
        self.under_way = []
        return [_Await.apply(empty, journey) for empty, journey in under_way]

    def find_orders(self):
        """Find by_expert, which groups the received rows by expert, and its inverse, by_rank.

        In the example, rows arrive for E0 E0 E1 | E0 E0, so by_expert is 0 1 3 4 2, and by_rank is
        0 1 4 2 3.
        """
        world_size, num_local = self.received.shape
        local = torch.arange(num_local, device=self.received.device).repeat(world_size)
        counts = self.received.flatten()  # [2, 1, 2, 0], for `local` experts 0 1 0 1
        experts = local.repeat_interleave(counts, output_size=sum(self.sizes))
        self.by_expert = experts.argsort(stable=True)
        self.by_rank = self.by_expert.argsort()


def dispatch_and_combine(
    x, experts, weights, num_experts, compute, group=None, shared=None, parts=1, hand_over=None,
    others=(),
):
    """Send each token to its k experts, and return the sums of their weighted results, (N, D).

    x, experts, num_experts: those of plain_dispatch(); an expert may be -1.
    weights: (N, k), or None for a plain sum.
    compute: that of plain_dispatch(). It is called for each part.
    shared: a module whose output for x is added.
    parts: the number of parts in which tokens travel.
    hand_over: None, or a function to call before rows of x or results are waited for. It may run a
        pass of another microbatch (pipeline.py), and returns when that pass has to wait, too.
    others: short tensors, (N, ...). Their rows travel, too, and are compute()'s last arguments.
    Types: x, weights and parameters of experts V, parameters of `shared` R -> V.
    """
    plan = DispatchPlan(experts, num_experts, group, parts, hand_over)
    all_parts = plan.wait_for_counts()
    tensors_of_parts = zip(*[plan.divided(tensor) for tensor in (x, *others)])
    for part, tensors in zip(all_parts, tensors_of_parts):
        part.begin_dispatch(*tensors)
    if shared is not None:
        shared_y = shared(x)  # is computed while the first part travels
    for part in all_parts:
        part.begin_combine(compute(*part.end_dispatch()))
    if weights is None:
        sums = [part.end_combine() for part in all_parts]
    else:
        sums = [part.end_combine(own) for part, own in zip(all_parts, plan.divided(weights))]
    y = torch.cat(sums) if len(sums) > 1 else sums[0]  # cat() would copy a single tensor
    return y if shared is None else y + shared_y


# ---- two hops ------------------------------------------------------------------------------------


def two_hops(
    x, experts, weights, num_experts, compute, node_group, cross_group, shared=None, parts=1,
    hand_over=None,
):
    """Do what dispatch_and_combine() does, but let a token cross to each node at most once.

    node_group: the ranks of this node. cross_group: the ranks at this rank's place in all nodes.

    First hop: each token goes once to every node that holds one of its experts, together with its
    choices and weights. Second hop: an ordinary dispatch inside the node. The weighted results are
    summed there, and one row per token and node returns (DeepSeek-V3's report, section 3.2.2).

    The first hop is a dispatch, too, in which a token chooses nodes in place of experts, and whose
    compute() is the second hop. With 2 nodes of 4 experts each, two tokens have

        choices of 3 of the 8 experts     1 5 6      7 4 5
        choices of the first hop          0 1        -1 1       of nodes; -1 means that none goes
        choices inside node 0             1 -1 -1               of its experts 0 to 3
        choices inside node 1             -1 1 2     3 0 1      of its experts 4 to 7

    Of the N k rows in each direction, at most N min(k, nodes) cross between nodes. Each part that
    crosses is dispatched inside the node in as many parts again, and has counts of its own there,
    for which the host waits. Types over all ranks are those of dispatch_and_combine().
    """
    node, num_nodes = rank_and_size(cross_group)
    per_node = num_experts // num_nodes
    nodes = torch.arange(num_nodes, device=x.device)
    node_of = experts // per_node  # (N, k); -1 stays -1
    is_needed = (node_of.unsqueeze(2) == nodes).any(1)  # (N, num_nodes)

    def in_node(rows, sizes, sizes_on_device, experts, weights):
        is_here = experts // per_node == node
        experts = (experts % per_node).where(is_here, -1)
        args = rows, experts, weights, per_node, compute, node_group
        return dispatch_and_combine(*args, parts=parts, hand_over=hand_over)

    return dispatch_and_combine(
        x, nodes.where(is_needed, -1), None, num_nodes, in_node, cross_group, shared, parts,
        hand_over, others=(experts, weights),
    )


# ---- the router's losses -------------------------------------------------------------------------
#
# The losses belong to the loss from which the caller runs backward. But a layer is deep inside a
# model, of which the caller, or the next stage of a pipeline, gets only the output. So the layer
# does not return its losses. It gives its output through AddLossAndTally, whose backward adds the
# gradients that there would be if the caller's loss contained
#
#     scale * (balance_coefficient * balance loss + z_coefficient * z-loss)
#
# Only backward counts choices, in a tally. So evaluations are not counted, and what is recomputed
# (sequence_parallel.py) is counted once.


def balance_loss(probabilities, loads, tokens):
    """Return this rank's part of Switch's loss E sum_i f_i p_i, which is 1 if all loads are equal.

    The parts of all ranks add up to the loss. probabilities: (N, E), of this rank's tokens. loads:
    (E,), how often all ranks chose each expert. tokens: the number of tokens of all ranks.
    """
    fractions = loads.to(probabilities.dtype) / loads.sum().clamp(min=1)  # there may be no token
    return len(loads) * (fractions * probabilities.sum(0)).sum() / tokens


def router_z_loss(logits, tokens):
    """Return this rank's part of the mean of logsumexp(logits)^2 over all ranks' tokens."""
    return logits.logsumexp(-1).square().sum() / tokens


class AddLossAndTally(torch.autograd.Function):
    """Return x. In backward, give `loss` the gradient losses.scale, and add `counted` to the tally.

    losses: the RouterLosses. (Megatron-LM has the same in its MoEAuxLossAutoScaler.)
    """

    @staticmethod
    def forward(ctx, x, loss, counted, losses):
        ctx.counted = counted
        ctx.losses = losses
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        ctx.losses.tally.add_(ctx.counted)
        return dy, ctx.losses.scale * ctx.counted.new_ones(()), None, None


class RouterLosses:
    """The balance loss and the z-loss of a layer's router, and a tally of what it chooses.

    balance_coefficient, z_coefficient: the factors of balance_loss() and router_z_loss(), or 0.
    scale: the factor of the caller's own loss, such as 1/n if it is divided by n microbatches. It
        is a number, or a tensor () on x's device. As an attribute it may be set before each
        backward(). With a GradScaler:
        layer.losses.scale = scaler.scale(torch.ones((), device=x.device)) / n
        With 0, set before forward, a batch does not count, neither in the losses of any rank nor in
        the tally. So a rank without a batch takes any batch, multiplies its loss by 0, and sets
        losses.scale = 0.
    groups: With (), the losses are means over this rank's tokens, as the caller's loss mostly is.
        With groups, they are means over the tokens of all W ranks in them, and a rank adds its part
        of each mean. If the caller then averages gradients over the W ranks, and does not sum them,
        it multiplies scale by W. E counts are summed over one group after another, such as this
        rank's row and its column in a grid of ranks. Only a forward with gradients sends counts, so
        the ranks must enable gradients alike, or some would wait forever.

    The attribute `tally`, (E + 3,), says how often each of the E experts was chosen, how many
    choices were dropped, and this rank's parts of the two losses. After a step the caller sums the
    tallies over the ranks, gives the counts to router.update_bias() if it uses a bias, and sets the
    tally to 0. It moves to the device of x in forward, so read the attribute anew in each step.
    """

    def __init__(self, num_experts, top_k, balance_coefficient, z_coefficient, scale, groups):
        self.num_experts = num_experts
        self.top_k = top_k
        self.balance_coefficient = balance_coefficient
        self.z_coefficient = z_coefficient
        self.scale = scale
        self.groups = groups
        # This is not a buffer of the layer, which DDP would broadcast. It is on the CPU also if
        # "meta" is the default device, because to_empty() would not give it memory.
        self.tally = torch.zeros(num_experts + 3, dtype=torch.float64, device="cpu")

    def attach(self, y, routing, experts):
        """Return y. Its backward also adds the losses' gradients, and counts in the tally.

        experts: routing.experts, with -1 for dropped choices.
        """
        if not torch.is_grad_enabled():
            return y
        is_counted = self.scale != 0
        loads = count_choices(routing.experts, self.num_experts) * is_counted
        balance = z = loss = torch.zeros((), dtype=torch.float64, device=y.device)
        if self.balance_coefficient or self.z_coefficient:
            total = loads.clone()
            for group in self.groups:
                all_reduce(total, group=group)
            tokens = (total.sum() // self.top_k).clamp(min=1)  # a rank may have none
            balance = balance_loss(routing.probabilities, total, tokens).double()
            z = router_z_loss(routing.logits, tokens).double()
            loss = self.balance_coefficient * balance + self.z_coefficient * z
        dropped = (experts < 0).sum()
        counted = torch.cat([loads, torch.stack([dropped, balance.detach(), z.detach()])])
        counted = counted * is_counted
        self.tally = self.tally.to(y.device)
        return AddLossAndTally.apply(y, loss, counted, self)


# ---- the layer -----------------------------------------------------------------------------------


class MoE(nn.Module):
    """A mixture of experts over the ranks of `group`; maps this rank's tokens (..., D) to (..., D).

    hidden, ffn_hidden, num_experts, top_k: D, the width of an expert, E and k.
    activation, gated: those of Experts. The activation must not have parameters.
    shared_experts: the number of experts that every token uses in addition.
    router: further arguments of Router. capacity_factor: that of within_capacity(), or None.
    balance_coefficient, z_coefficient, loss_scale, balance_groups: see RouterLosses.
    group: the ranks over which the experts are spread.
    tp_group: ranks that have the same tokens, (T, ..., D). Each routes its chunk of dim 0, and the
        results are gathered. With None, every rank has tokens of its own.
    nodes: (node_group, cross_group) of two_hops(). `group` must list its ranks node after node.
    parts: the number of parts in which tokens travel, the same on all ranks of `group`.

    The attribute `losses` is the layer's RouterLosses. The attribute hand_over, None at first, is
    that of dispatch_and_combine(). It must post the same messages on all ranks of `group`.

    Seed PyTorch's generator alike on all ranks before making the layer. Then the copies of its
    router are equal, and no two experts are. As with switch(), all ranks of `group` must call the
    layer and run its backward, also one without tokens, and x needs a gradient on all or on none.
    Padding is routed, counted and takes room like any token; leave it out of x if it should not.

    In 16 bits and under autocast, the router's weights and the sums of the k results are rounded to
    16 bits, since sums in fp32 would need N k rows in fp32. In bf16 with k = 8, y therefore errs by
    0.3 to 0.4% in place of 0.2%.

    Types: x V -> V; over tp_group, if given, I -> I. Parameters of experts are V, and those of the
    router and of the shared experts are R: the gradients of their copies must be summed.

    Raises ValueError if P does not divide num_experts, if capacity_factor is not positive, or if
    this rank's place in `group` is not the one that it has by `nodes`.
    """

    def __init__(
        self, hidden, ffn_hidden, num_experts, top_k=1, group=None, tp_group=None, *,
        nodes=None, parts=1, activation=None, gated=False, shared_experts=0, capacity_factor=None,
        balance_coefficient=0.0, z_coefficient=0.0, loss_scale=1.0, balance_groups=(), **router,
    ):
        super().__init__()
        rank, world_size = rank_and_size(group)
        if num_experts % world_size:
            raise ValueError(f"{num_experts=} is not divisible by ep={world_size}")
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"{capacity_factor=} leaves no room for a token")
        if nodes:
            place, per_node = rank_and_size(nodes[0])
            node, num_nodes = rank_and_size(nodes[1])
            if (node * per_node + place, num_nodes * per_node) != (rank, world_size):
                where = f"place {place} of {per_node} in node {node} of {num_nodes}"
                raise ValueError(f"rank {rank} of {world_size} in `group` has {where}")
        self.num_experts = num_experts
        self.capacity_factor = capacity_factor
        self.group = group
        self.tp_group = tp_group
        self.nodes = nodes
        self.parts = parts
        self.hand_over = None
        self.router = Router(hidden, num_experts, top_k, **router)
        self.losses = RouterLosses(
            num_experts, top_k, balance_coefficient, z_coefficient, loss_scale, balance_groups
        )
        num_local = num_experts // world_size
        own = range(rank * num_local, (rank + 1) * num_local)
        self.experts = Experts(own, num_experts, hidden, ffn_hidden, activation, gated)
        self.experts.spread_over = group  # see PlainMoE
        self.shared = None
        if shared_experts:
            width = shared_experts * ffn_hidden
            up = nn.Linear(hidden, 2 * width if gated else width, bias=False)
            down = nn.Linear(width, hidden, bias=False)
            self.shared = nn.Sequential(up, activation or nn.GELU(approximate="tanh"), down)

    def forward(self, x):
        if self.tp_group is not None:
            x = scatter_to_group(x, 0, self.tp_group)  # (T/tp, ..., D)
        tokens = x.reshape(-1, x.shape[-1])  # (N, D)
        routing = self.router(tokens)
        experts = within_capacity(routing.experts, self.num_experts, self.capacity_factor)
        # under autocast the elements of rows have 16 bits, which halves the messages
        args = autocasted(tokens), experts, routing.weights, self.num_experts, self.experts
        if self.nodes:
            y = two_hops(*args, *self.nodes, self.shared, self.parts, self.hand_over)
        else:
            y = dispatch_and_combine(*args, self.group, self.shared, self.parts, self.hand_over)
        y = self.losses.attach(y, routing, experts).view(x.shape)
        if self.tp_group is None:
            return y
        return gather_from_group(y, 0, self.tp_group)


# ---- cost, and a demonstration -------------------------------------------------------------------


def expert_parallel_bytes(tokens, top_k, hidden, ep, itemsize=4):
    """Return the bytes that a rank sends in a forward if routing is even: 2 N k D (P-1)/P elements.

    Backward sends as many. Not included are counts, 8 (P-1) E/P bytes in forward for each part.
    """
    return 2 * tokens * top_k * hidden * (ep - 1) // ep * itemsize


def _demonstrate():
    rank, P = rank_and_size()
    N, D = 64, 32
    torch.manual_seed(0)  # all ranks draw the same
    router = torch.randn(P, D).double().requires_grad_()
    tokens = torch.randn(P, N, D).double()
    mlp = lambda: nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)).double()
    experts = [mlp() for _ in range(P)]
    parameters = [router, *experts[rank].parameters()]
    x = tokens[rank].clone().requires_grad_()
    with count_bytes() as traffic:
        y = switch_layer(x, router, experts[rank])
    found = [y, *torch.autograd.grad(y.square().sum(), [x, *parameters])]
    all_reduce(found[2])  # the router's gradient; an expert's is the sum already

    whole_x = tokens.flatten(0, 1).requires_grad_()  # all ranks' tokens, in one process
    probabilities = F.linear(whole_x, router).softmax(-1)
    weights, chosen = probabilities.max(-1)
    results = torch.stack([expert(whole_x) for expert in experts], 1)  # (P N, P, D)
    whole_y = weights.unsqueeze(1) * results[torch.arange(P * N), chosen]
    dx, *gradients = torch.autograd.grad(whole_y.square().sum(), [whole_x, *parameters])
    expected = [whole_y.chunk(P)[rank], dx.chunk(P)[rank], *gradients]
    error = _difference(found, expected)
    in_parts, in_hops = _compare_layers(x)
    if rank == 0:
        even = expert_parallel_bytes(N, 1, D, P, 8)
        sent = f"{traffic.bytes()} bytes sent, {even} without counts if even"
        print(f"switch_layer() over {P} ranks, one expert each: {sent}")
        print(f"largest difference from one process's results and gradients: {error:.1e}")
        print(f"of MoE in 2 parts from PlainMoE's results and gradients: {in_parts:.1e}")
        print(f"of MoE in two hops from PlainMoE's results and gradients: {in_hops:.1e}")


def _compare_layers(x):
    """Return how much MoE in 2 parts, and in two hops, differs from PlainMoE."""
    rank, P = rank_and_size()
    D = x.shape[1]
    layer = MoE(D, 4 * D, 2 * P, top_k=2, parts=2).double()
    plain = PlainMoE(D, 2 * P, 2, layer.experts).double()
    plain.router.weight = layer.router.weight

    def run(layer):
        y = layer(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *plain.parameters()])]

    expected = run(plain)
    in_parts = _difference(run(layer), expected)
    alone = [dist.new_group([other]) for other in range(P)][rank]
    layer.nodes = alone, None  # each rank is a node of its own, and the nodes are all ranks
    return in_parts, _difference(run(layer), expected)


def _difference(found, expected):
    return max((a - b).abs().max() for a, b in zip(found, expected))


if __name__ == "__main__":
    run_ranks(_demonstrate)
