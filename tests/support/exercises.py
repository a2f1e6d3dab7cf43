"""The workbook's exercises: functions of the ground floors, each with a judge.

    @exercise("collectives", "what the judge checks")
    def ring_all_reduce(mine, group): ...

registers the judge of collectives.ring_all_reduce(). It runs on each rank of `group`, and `mine` is
that function, or a reader's. It compares what `mine` computes with one process, and what it sends
with a formula. It returns a sentence about its costs, or raises Wrong, with what is wrong in a
sentence for whoever has written the function. It compares only after its last message, so that no
rank waits for one that has found a fault.
"""

import inspect
import math

import torch
import torch.nn.functional as F
from torch import nn

import hybrid
from collectives import (
    all_reduce_bytes, all_reduce_cost, observe, rank_and_size, reduce_scatter_bytes,
)
from ddp import backward_in_buckets
from faults import IN_BACKWARD
from judging import (
    IN_BACKWARD_ONLY, Exercise, Wrong, advice, check_bytes, check_parts, check_same, gathered,
    watched,
)
from layouts import GRID, counterpart, leaves_of, loss_by_one_process, whole_weights
from reference_gpt import attention
from replicas import gradients_alone, make_data, make_net, mean_square, own_part

EXERCISES = {}  # {name: Exercise}, in the order of README
SIZES = (1,), (2,), (3,), (4,)


def exercise(module, checked, helpers=(), sizes=SIZES):
    """Register a judge of the module's function with the judge's name, and of its helpers."""

    def register(judge):
        name = judge.__name__
        EXERCISES[name] = Exercise(module, (name, *helpers), checked, sizes, judge)
        return judge

    return register


# ---- collectives.py ------------------------------------------------------------------------------


def all_reduces(mine, group, algorithm, rule):
    rank, P = rank_and_size(group)
    everyone = [torch.randint(-9, 10, (P, *shape)).float() for shape in ((P, 65536), (5,))]
    long, short = (tensor[rank].clone() for tensor in everyone)
    sums = [tensor.sum(0) for tensor in everyone]
    with watched("all_reduce") as traffic:
        mine(long, group=group)
    if all(gathered(long.equal(sums[0]), group)):
        with watched("all_reduce"):
            mine(short, group=group)
    for found, expected, of_ranks in zip((long, short), sums, everyone):
        mistakes = [(of_ranks[rank], "it is as it was before the call")]
        check_same(f"the tensor of {found.numel():,} elements", found, expected, P, mistakes)
    _, expected = all_reduce_cost(algorithm, long.nbytes, P, rank=rank)
    return check_bytes(traffic.bytes(), expected, P, f"{rule} {long.nbytes:,}")


@exercise("collectives", "sums, bytes")
def ring_all_reduce(mine, group):
    return all_reduces(mine, group, "ring", "2(P-1)/P of")


def copies(mine, group, builds, make):
    """make(everyone, rank): the input and the output of a rank, for everyone's (P, P, elements)."""
    rank, P = rank_and_size(group)
    calls = []
    for elements, dtype in (65536, torch.float32), (5, torch.int64), (1, torch.bfloat16), (0, int):
        everyone = torch.randint(-9, 10, (P, P, elements)).to(dtype)
        given, expected = make(everyone.clone(), rank)
        unchanged, _ = make(everyone, rank)
        output = torch.full_like(expected, 99)
        with watched(builds) as traffic:
            mine(output, given, group=group)
        nbytes = max(given.nbytes, output.nbytes)
        calls.append((output, expected, given, unchanged, nbytes, traffic.bytes()))
    for output, expected, given, unchanged, nbytes, sent in reversed(calls):
        check_same("output", output, expected, P)
        check_same("input, after the call,", given, unchanged, P)
        said = check_bytes(sent, reduce_scatter_bytes(nbytes, P), P, f"(P-1)/P of {nbytes:,}")
    return said


@exercise("collectives", "sums, bytes")
def plain_reduce_scatter(mine, group):
    make = lambda everyone, rank: (everyone[rank], everyone.sum(0)[rank])
    return copies(mine, group, "reduce_scatter", make)


@exercise("collectives", "values, bytes")
def plain_all_gather(mine, group):
    make = lambda everyone, rank: (everyone[rank, 0], everyone[:, 0])
    return copies(mine, group, "all_gather", make)


@exercise("collectives", "values, bytes")
def plain_all_to_all(mine, group):
    make = lambda everyone, rank: (everyone[rank], everyone[:, rank])
    return copies(mine, group, "all_to_all", make)


@exercise("collectives", "sums, and bytes of the algorithm that `algorithm` names by default")
def plain_all_reduce(mine, group):
    name = inspect.signature(mine).parameters["algorithm"].default
    return all_reduces(mine, group, name, f"by all_reduce_cost() of {name!r} for")


# ---- ddp.py --------------------------------------------------------------------------------------

LAYERS = 3


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64)


def make_layers(P):
    """Return layers, whose parameters have multiples of 128 P bytes, and the data of P ranks."""
    width = 16 * P
    pairs = [(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS)]
    layers = nn.Sequential(*[module for pair in pairs for module in pair]).double()
    return layers, draw(P, 2, width)


def check_gradients(net, expected, P, mistakes=()):
    """mistakes: pairs ({name: gradient}, a sentence)"""
    for name, parameter in net.named_parameters():
        if name in expected:
            known = [(gradients[name], text) for gradients, text in mistakes]
            check_same(f"the gradient of {name}", parameter.grad, expected[name], P, known)


@exercise("ddp", "every named gradient, bytes")
def average_gradients(mine, group):
    rank, P = rank_and_size(group)
    net, x = make_layers(P)
    net[0].bias.requires_grad_(False)
    loss = lambda net, r: (net[:-2] if r else net)(x[r]).square().mean()  # only rank 0 uses all
    mean = gradients_alone(net, lambda net: sum(loss(net, r) for r in range(P)) / P)
    own = gradients_alone(net, lambda net: loss(net, rank))
    loss(net, rank).backward()
    with watched() as traffic:
        mine(net, group=group)
    check_gradients(net, mean, P, [(own, "it is this rank's own: no mean is taken")])
    if net[0].bias.grad is not None:
        raise Wrong("0.bias, which is not trained, gets a gradient")
    nbytes = sum(gradient.nbytes for gradient in mean.values())
    return check_bytes(traffic.bytes(), all_reduce_bytes(nbytes, P), P, f"2(P-1)/P of {nbytes:,}")


@exercise("ddp", "every named gradient, bytes, that all-reduces begin in backward")
def Bucket(mine, group):
    _, P = rank_and_size(group)
    net, x = make_layers(P)
    expected = gradients_alone(net, lambda net: mean_square(net, x))
    parameters = [*net.parameters()][::-1]
    begun = []

    def listen(event, operation, *_):
        if event == "begin" and operation.name == "all_reduce":
            begun.append((IN_BACKWARD() >= 0, operation.async_op))

    buckets = [mine(parameters[i : i + 2], group=group) for i in range(0, len(parameters), 2)]
    for _ in range(2):
        net.zero_grad()
        with watched() as traffic, observe(listen):
            backward_in_buckets(mean_square(net, own_part(x, group)), buckets)
    check_gradients(net, expected, P)
    if not all(in_backward for in_backward, _ in begun):
        raise Wrong("an all-reduce begins after backward, when nothing is left to overlap with: "
                    "begin it in the hook of the bucket's last gradient")  # fmt: skip
    if not all(async_op for _, async_op in begun):
        raise Wrong("backward waits for an all-reduce: pass async_op=True, and wait in finish()")
    nbytes = sum(gradient.nbytes for gradient in expected.values())
    return check_bytes(traffic.bytes(), all_reduce_bytes(nbytes, P), P, f"2(P-1)/P of {nbytes:,}")


# ---- zero.py -------------------------------------------------------------------------------------


def whole_of(shards, shapes, group):
    """Return tensors of these shapes, which lie one after the other in the ranks' flat shards."""
    flat = torch.cat(gathered(shards, group))
    sizes = [shape.numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat[: sum(sizes)].split(sizes), shapes)]


@exercise("zero", "gradients and weights of 3 steps, bytes, 1/P of the optimizer's state")
def sharded_step(mine, group):
    """A net of odd sizes with a tied weight, so that shards are padded."""
    _, P = rank_and_size(group)
    x, net, alone = make_data(2 * P), make_net(), make_net()
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    elements = sum(p.numel() for p in trained.values())
    shard = math.ceil(elements / P)
    momentum, given, expected = {}, [], []

    def update(weights, gradient):
        if gradient.shape != (shard,):
            raise Wrong(f"update() gets a gradient of shape {tuple(gradient.shape)}, where a flat "
                        f"shard is right, 1/{P} of {elements:,}: {shard:,}")  # fmt: skip
        given.append(gradient.clone())
        momentum["sum"] = 0.9 * momentum.get("sum", 0) + gradient
        weights.sub_(0.1 * momentum["sum"])

    for _ in range(3):
        for model, part in ((alone, x), (net, own_part(x, group))):
            model.zero_grad()
            mean_square(model, part).backward()
        if not expected:
            expected = [p.grad.clone() for p in alone.parameters() if p.requires_grad]
        optimizer.step()
        with watched() as traffic:
            mine([*trained.values()], update, group=group)
    gradients = whole_of(given[0], [p.shape for p in trained.values()], group)
    for name, gradient, right in zip(trained, gradients, expected):
        check_same(f"the gradient of {name} that update() gets", gradient, right, P)
    for name, weight in net.state_dict().items():
        check_same(f"the weight {name} after 3 steps", weight, alone.state_dict()[name], P)
    nbytes = 8 * P * shard
    said = check_bytes(traffic.bytes(), all_reduce_bytes(nbytes, P), P, f"2(P-1)/P of {nbytes:,}")
    return f"{said}; state for {shard:,} of {elements:,} elements on each"


@exercise("zero", "every named gradient, bytes, 1/P of the weights", helpers=("shard_units",))
def fsdp_forward(mine, shard_units, group):
    rank, P = rank_and_size(group)
    layers, x = make_layers(P)
    expected = gradients_alone(layers, lambda net: sum(mean_square(net, x[r]) for r in range(P)))
    units = [layers[i : i + 2] for i in range(0, len(layers), 2)]
    shards, layouts = shard_units(units, group=group)
    held = sum(shard.untyped_storage().nbytes() for shard in shards)
    held += sum(p.untyped_storage().nbytes() for p in layers.parameters())
    nbytes = sum(gradient.nbytes for gradient in expected.values())
    with watched() as traffic:
        mine(units, x[rank], shards, layouts, group=group).square().mean().backward()
    for i, (unit, shard) in enumerate(zip(units, shards)):
        names = [f"{2 * i}.{name}" for name in ("weight", "bias")]
        gradients = whole_of(shard.grad, [expected[name].shape for name in names], group)
        for name, gradient in zip(names, gradients):
            check_same(f"the gradient of {name}", gradient, expected[name], P)
    if held > nbytes // P:
        raise Wrong(f"{held:,} bytes of weights are kept: 1/{P} of {nbytes:,} is {nbytes // P:,}")
    sent = traffic.bytes()
    expected = 3 * reduce_scatter_bytes(nbytes, P)
    with advice(". 2(P-1)/P are sent if backward does not gather again" if sent < expected else ""):
        said = check_bytes(sent, expected, P, f"3(P-1)/P of {nbytes:,}")
    return f"{said}; {held:,} bytes of weights on each"


# ---- tensor_parallel.py --------------------------------------------------------------------------


def linear(x, weight, bias):
    return F.linear(x, weight, bias)


def mlp(x, up, down):
    return F.linear(F.gelu(F.linear(x, up), approximate="tanh"), down)


def self_attention(x, qkv, out, K):
    q, k, v = (F.linear(x, matrix).unflatten(2, (-1, K)).transpose(1, 2) for matrix in qkv)
    return F.linear(attention(q, k, v).transpose(1, 2).flatten(2), out)


def embedding(tokens, weight):
    return F.embedding(tokens, weight)


def token_losses(logits, target):
    return F.cross_entropy(logits, target, reduction="none")


@exercise("tensor_parallel", "values, every gradient, bytes")
def column_linear(mine, group):
    _, P = rank_and_size(group)
    whole = {"x": draw(16, 12), "weight": draw(3 * P, 12), "bias": draw(3 * P)}
    sent = check_parts(mine, linear, whole, {"weight": 0, "bias": 0}, group, result_dim=1)
    nbytes = whole["x"].nbytes
    return check_bytes(sent, all_reduce_bytes(nbytes, P), P, f"in an all-reduce of {nbytes:,}")


@exercise("tensor_parallel", "values, every gradient, bytes")
def row_linear(mine, group):
    _, P = rank_and_size(group)
    whole = {"x": draw(16, 3 * P), "weight": draw(12, 3 * P), "bias": draw(12)}

    def mistakes(x, weight, bias):
        yield linear(x, weight, P * bias), "the bias is added on every rank, before the sum"

    sent = check_parts(mine, linear, whole, {"x": 1, "weight": 1}, group, mistakes=mistakes)
    nbytes = 16 * 12 * 8  # of the result
    return check_bytes(sent, all_reduce_bytes(nbytes, P), P, f"in an all-reduce of {nbytes:,}")


@exercise("tensor_parallel", "values, every gradient, bytes")
def split_mlp(mine, group):
    _, P = rank_and_size(group)
    whole = {"x": draw(2, 8, 12), "up": draw(6 * P, 12), "down": draw(12, 6 * P)}
    sent = check_parts(mine, mlp, whole, {"up": 0, "down": 1}, group)
    nbytes = whole["x"].nbytes
    rule = f"in two all-reduces of {nbytes:,}"
    return check_bytes(sent, 2 * all_reduce_bytes(nbytes, P), P, rule)


@exercise("tensor_parallel", "values, every gradient, bytes")
def split_attention(mine, group):
    _, P = rank_and_size(group)
    K, D = 2, 4 * P  # two heads on each rank
    whole = {"x": draw(2, 8, D), "qkv": draw(3, D, D), "out": draw(D, D)}
    sent = check_parts(mine, self_attention, whole, {"qkv": 1, "out": 1}, group, K=K)
    nbytes = whole["x"].nbytes
    rule = f"in two all-reduces of {nbytes:,}"
    return check_bytes(sent, 2 * all_reduce_bytes(nbytes, P), P, rule)


@exercise("tensor_parallel", "values, the gradient, bytes")
def split_embedding(mine, group):
    _, P = rank_and_size(group)
    whole = {"tokens": torch.randint(3 * P, (2, 12)), "weight": draw(3 * P, 8)}
    sent = check_parts(mine, embedding, whole, {"weight": 0}, group)
    nbytes = 2 * 12 * 8 * 8  # of the result
    return check_bytes(sent, all_reduce_bytes(nbytes, P), P, f"in an all-reduce of {nbytes:,}")


@exercise("tensor_parallel", "losses, the gradient, bytes")
def split_cross_entropy(mine, group):
    """exp() of the largest logits would overflow."""
    _, P = rank_and_size(group)
    N = 192
    whole = {"logits": 400 * draw(N, 3 * P), "target": torch.randint(3 * P, (N,))}

    def mistakes(logits, target):
        parts = logits.unflatten(1, (P, 3))
        parts = (parts - parts.amax(2, keepdim=True)).flatten(1)
        wrong = parts.exp().sum(1).log() - parts.gather(1, target.unsqueeze(1)).squeeze(1)
        yield wrong, "each rank subtracts its own maximum, where it should be that of all ranks"

    sent = check_parts(mine, token_losses, whole, {"logits": 1}, group, mistakes=mistakes)
    rule = f"in three all-reduces of {8 * N:,}"
    return check_bytes(sent, 3 * all_reduce_bytes(8 * N, P), P, rule)


# ---- sequence_parallel.py ------------------------------------------------------------------------


@exercise("sequence_parallel", "values, gradients of q, k and v, bytes")
def simple_allgather_attention(mine, group):
    _, P = rank_and_size(group)
    whole = {name: draw(2, 2, 4 * P, 8) for name in ("q", "k", "v")}

    def mistakes(q, k, v):
        scores = q @ k.mT * 8**-0.5
        query = torch.arange(4).repeat(P).unsqueeze(1)  # its position among those of its rank
        later = torch.arange(4 * P) > query
        wrong = scores.masked_fill(later, -math.inf).softmax(-1) @ v
        yield wrong, "the mask counts a rank's queries from 0, but they follow earlier ranks'"

    dims = dict.fromkeys(whole, 2)
    sent = check_parts(mine, attention, whole, dims, group, result_dim=2, mistakes=mistakes)
    nbytes = whole["k"].nbytes
    rule = f"4(P-1)/P of {nbytes:,}, for k and v, forward and backward"
    return check_bytes(sent, 4 * reduce_scatter_bytes(nbytes, P), P, rule)


@exercise("sequence_parallel", "values, gradients of q, k and v, bytes")
def simple_ulysses_attention(mine, group):
    _, P = rank_and_size(group)
    whole = {name: draw(2, 2 * P, 4 * P, 8) for name in ("q", "k", "v")}
    sent = check_parts(mine, attention, whole, dict.fromkeys(whole, 2), group, result_dim=2)
    nbytes = whole["q"].nbytes // P
    rule = f"8(P-1)/P of {nbytes:,}, for q, k, v and the result, forward and backward"
    return check_bytes(sent, 8 * reduce_scatter_bytes(nbytes, P), P, rule)


# ---- pipeline.py ---------------------------------------------------------------------------------


def pipeline_steps(mine, group, most):
    """most(m): the number of microbatches whose activations this rank holds at most, of m."""
    rank, P = rank_and_size(group)
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(P)]).double()
    inputs, targets = draw(2, 4, 18).mT  # columns are contiguous
    loss_fn = lambda output, target: (output - target).square().sum() / 7
    outputs = layers(inputs)
    loss_fn(outputs, targets).backward()
    stage = layers[rank]
    expected = {name: p.grad.clone() for name, p in stage.named_parameters()}
    order = []

    def record(module, args, output):
        order.append("F")
        output.register_hook(lambda _: order.append("B"))

    stage.register_forward_hook(record)
    found = []
    for rows in (4, 9):  # microbatches of 4, 4, 4, 4 and 2 rows, and two of 9
        stage.zero_grad()
        order.clear()
        with watched() as traffic:
            losses = mine(stage, inputs.split(rows), targets.split(rows), loss_fn, group=group)
        gradients = {name: p.grad for name, p in stage.named_parameters()}
        found.append((rows, losses, gradients, "".join(order), traffic.bytes()))
    for rows, losses, gradients, order, sent in found:
        m = math.ceil(18 / rows)
        with advice(f" ({m} microbatches)"):
            for name, gradient in gradients.items():
                check_same(f"the gradient of {rank}.{name}", gradient, expected[name], P)
            if rank < P - 1 and losses is not None:
                raise Wrong("losses are returned, which only the last rank has")
            if rank == P - 1:
                parts = zip(outputs.split(rows), targets.split(rows))
                right = torch.stack([loss_fn(*part) for part in parts])
                check_same("the list of losses", torch.stack(losses), right, P)
            held = [order[:i].count("F") - order[:i].count("B") for i in range(len(order) + 1)]
            if max(held) != most(m):
                how = "too long" if max(held) > most(m) else "too short"
                raise Wrong(f"activations of {max(held)} microbatches are held, where {most(m)} "
                            f"are right: the order is {order}, whose warm-up is {how}")
            links = (rank > 0) + (rank < P - 1)
            check_bytes(sent, links * inputs.nbytes, P, f"{inputs.nbytes:,} per neighbour")
    held = f"rank {rank} holds activations of up to {most(5)} of 5 microbatches"
    return f"{held}, and sends {links * inputs.nbytes:,} bytes, {inputs.nbytes:,} per neighbour"


@exercise("pipeline", "losses, every named gradient, bytes, microbatches in flight")
def gpipe_step(mine, group):
    return pipeline_steps(mine, group, lambda m: m)


@exercise("pipeline", "losses, every named gradient, bytes, microbatches in flight")
def one_f_one_b_step(mine, group):
    rank, P = rank_and_size(group)
    return pipeline_steps(mine, group, lambda m: min(m, P - rank))


# ---- expert_parallel.py --------------------------------------------------------------------------


@exercise("expert_parallel", "values, gradients of tokens, router and experts, bytes")
def switch_layer(mine, group):
    rank, P = rank_and_size(group)
    D = 4
    shapes = {"x": (P, 7, D), "router": (P, D), "expert": (P, D, D)}
    x, router, expert = (draw(*shape).requires_grad_() for shape in shapes.values())
    weights, experts = (x @ router.T).softmax(-1).max(-1)  # (P, 7) each
    results = torch.einsum("rnd,rnde->rne", x, expert[experts])
    whole = weights.unsqueeze(-1) * results
    whole.square().sum().backward()
    own = {"x": x[rank], "router": router, "expert": expert[rank]}
    own = {name: tensor.detach().clone().requires_grad_() for name, tensor in own.items()}
    own["router"].grad = torch.zeros(P, D, dtype=torch.float64)
    with watched() as traffic:
        compute = lambda rows: rows @ own["expert"]
        y = mine(own["x"], own["router"], compute, group=group)
        y.square().sum().backward()
    of_router = gathered(own["router"].grad, group)
    mistakes = [
        (results[rank], "a token's result is not multiplied by its expert's probability"),
        (whole[rank][experts[rank].argsort(stable=True)], "rows are sorted by expert, not as x is"),
    ]
    check_same("the result", y, whole[rank], P, mistakes)
    with advice(IN_BACKWARD_ONLY):
        check_same("the gradient of x", own["x"].grad, x.grad[rank], P)
        check_same("the gradient of the expert", own["expert"].grad, expert.grad[rank], P)
        check_same("the sum of the gradients of the router", sum(of_router), router.grad, P)
    leave = experts[rank] != rank
    arrive = (experts == rank).sum(1).tolist()
    rows = int(leave.sum()) + sum(arrive) - arrive[rank]
    rule = f"for {rows} rows, to experts and back, in forward and in backward, besides counts"
    return check_bytes(traffic.bytes(), 2 * rows * D * 8, P, rule, slack=64 * P)


# ---- hybrid.py -----------------------------------------------------------------------------------

@exercise(
    "hybrid", "loss, every named gradient, bytes of each axis (pp x dp x tp)",
    sizes=((1, 1, 1), (4, 1, 1), (3, 1, 2), (2, 2, 2)),
)  # fmt: skip
def plain_step(mine, pp_group, dp_group, tp_group):
    """4 stages have 1, 2, 1 and 2 of 6 layers. 3 microbatches of 4 rows become 2 of 2 rows."""
    groups = {"pp": pp_group, "dp": dp_group, "tp": tp_group}
    (pp_rank, pp), (_, dp), (tp_rank, tp) = map(rank_and_size, groups.values())
    P = pp * dp * tp
    V, T, D, heads, layers, batch = GRID.values()
    torch.set_default_dtype(torch.float64)
    whole, reference = whole_weights(**GRID), whole_weights(**GRID)
    sgd = torch.optim.SGD(leaves_of(reference), 0.5)
    stage = hybrid.PlainStage(whole, D // heads, groups)
    optimizer = torch.optim.SGD(stage.parameters(), 0.5)
    dims = {"qkv": 1, "out": 1, "up": 0, "down": 1}
    results = []  # (what, found, expected)

    def own_part_of(tensor, name):
        dim = dims.get(name.rsplit(".", 1)[-1])
        return tensor if dim is None else tensor.chunk(tp, dim)[tp_rank]

    for step, length in enumerate((T, T - 1), 1):
        tokens = torch.randint(V, (batch, length + 1))  # all ranks draw the same
        sgd.zero_grad()
        expected = loss_by_one_process(reference, tokens, heads)
        expected.backward()
        sgd.step()
        with watched() as traffic:
            loss = mine(stage, optimizer, tokens, 3 if pp == 4 else 2, groups)
        results.append((f"the loss of step {step}", torch.as_tensor(loss), expected))
        for name, parameter in stage.named_parameters():
            weight = counterpart(reference, name, layers * pp_rank // pp)
            pairs = {"gradient of": (parameter.grad, weight.grad), "weight": (parameter, weight)}
            for what, (found, right) in pairs.items():
                found = None if found is None else found.detach().clone()
                right = own_part_of(right, name).detach().clone()
                results.append((f"the {what} {name} after step {step}", found, right))
    for result in results:
        check_same(*result, dp)
    nbytes = sum(parameter.nbytes for parameter in stage.parameters())
    activations = batch // dp * (T - 1) * D * 8
    links = (pp_rank > 0) + (pp_rank < pp - 1)
    slack = 8 * (len([*stage.parameters()]) + 1)  # an element of each all-reduce
    of_axes = [
        ("pp", links * activations, f"{activations:,} per neighbour", 2 * 8),
        ("dp", all_reduce_bytes(nbytes, dp), f"in an all-reduce of {nbytes:,}", slack),
        ("tp", len(stage.layers) * 4 * all_reduce_bytes(activations, tp),
         f"in four all-reduces of {activations:,} per layer", 0),
    ]  # fmt: skip
    said = []
    for axis, expected, rule, slack in of_axes:
        sent = traffic.bytes(group=groups[axis])
        with advice(f", over {axis}"):
            check_bytes(sent, expected, P, rule, slack)
        said.append(f"{sent:,} over {axis}")
    return f"bytes sent by rank 0: {', '.join(said)}"
