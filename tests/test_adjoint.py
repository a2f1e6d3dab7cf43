"""The backward of each parallel function is the adjoint that the types of its tensors promise.

Over a group of ranks a tensor has one of four types. The type says what the ranks hold, and what
each rank must hold of the tensor's gradient after backward. So a gradient has a type, too, which is
called the dual type:

                  what the ranks hold               what a rank has of the gradient       dual
    I  invariant  equal tensors, which all ranks    the whole gradient, equal on all      I
                  use identically                   ranks
    R  replicated equal tensors, which each rank    a part; the gradient is the sum of    P
                  uses in its own way               all ranks' parts
    V  varying    tensors of their own, such as     the gradient of its own tensor        V
                  different tokens or columns
    P  partial    summands; what is meant is        the sum's gradient, equal on all      R
                  their sum                         ranks

An example: all ranks hold the input x of a linear layer whose columns are split over the ranks. x
is I, but its products with different columns use it as R, so each rank computes a part of dx.
copy_to_group(), I -> R, returns x as it is. Its backward goes from the dual type of R to that of I,
from P to I, and therefore is an all-reduce. A parameter of type R is a copy on each rank, such as a
norm's with sequence parallelism. Its gradient is P until sum_gradients_over_tp() has summed it.

If a tensor changes, the loss changes by the pairing of this change and the gradient: the sum of
their products over all elements and all ranks. Only I is counted on one rank, as its gradient is
whole there. The change of the loss is the same whether it is computed from the inputs of a function
or from its output, if backward is the adjoint of forward's derivative:

    sum over the inputs of <dx, backward(g)>  =  <dy, g>      g: any gradient of the output y
                                                              dy: the change of y due to dx
The tests draw x, dx and g at random, as their types demand, and take dy from calls of forward. So
they need no model and no second implementation, only a line such as "I, V, V -> V". They notice a
sum that backward leaves out or takes twice, a factor that is the number of ranks, a gradient of the
wrong rank's tensors, and I or R that differ between ranks. They do not notice a forward that
computes something other than its name says, if its backward agrees with it.
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import collectives
import ddp
import expert_parallel
import hybrid
import pipeline
import sequence_parallel
import tensor_parallel
import zero
from collectives import ReduceOp, rank_and_size
from faults import IN_BACKWARD, own_in_backward, own_part, put, unseen_by_autograd, without_reduction
from ranks import on_ranks, shifted, soak

MODULES = (
    collectives, ddp, zero, pipeline, tensor_parallel, sequence_parallel, expert_parallel, hybrid
)
NOT_ADJOINT = {
    pipeline._Deferred: "its backward computes a gradient that another function has deferred",
    expert_parallel.AddLossAndTally:
        "its backward adds the gradients of losses that its forward does not return",
    sequence_parallel._Hollow:
        "its forward returns no values, since only backward passes through it",
}
DUAL = {"I": "I", "R": "P", "V": "V", "P": "R"}

# The difference in derivative() errs by STEP^4 / 30 = 3e-16 of the fifth derivative, and by about
# 1e-16 / STEP = 3e-13 from rounding. Pairings cancel in part, which makes their relative error
# larger, up to 5e-11. The faults below change them by 5e-3 and more.
STEP = 3e-4
TOLERANCE = 1e-9


@dataclass
class Case:
    """function(*inputs) and its types, such as "I, V -> V" for two inputs and the output.

    inputs: leaf tensors of the right shapes, whose values do not matter. Parameters of a module
        are inputs, too. The function then calls the module, and need not read its arguments.
    finish: called after backward, where this completes the gradients.
    """

    name: str
    types: str
    function: Callable
    inputs: list
    finish: Callable = lambda: None

    def __post_init__(self):
        for x in self.inputs:
            x.requires_grad_()


# ---- the measure ---------------------------------------------------------------------------------
#
# It sends by torch.distributed's own functions, and so does not rely on what it measures.


def draw(like, kind, seed):
    """Return random numbers of like's shape: on all ranks the same for I and R, others for V, P."""
    if kind in "VP":
        seed += 1000 * (dist.get_rank() + 1)
    return torch.randn(like.detach().shape, generator=torch.Generator().manual_seed(shifted(seed)))


def pairing(change, gradient, kind):
    """Return the change of the loss if a tensor of this type changes."""
    total = (change * gradient).sum()
    dist.all_reduce(total)
    return total / dist.get_world_size() if kind == "I" else total


def spread(x, kind):
    """Return the largest difference between x on rank 0 and on others, or 0 for V and P."""
    if kind in "VP":
        return 0.0
    first = x.clone()
    dist.broadcast(first, 0)
    difference = (x - first).abs().max()
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    return difference.item()


@torch.no_grad()
def derivative(function, inputs, changes):
    """Return the output's change per unit of the inputs' changes, exact up to degree 4."""
    total = 0
    for steps, factor in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
        for x, dx in zip(inputs, changes):
            x.add_(dx, alpha=steps * STEP)
        total = total + factor * function(*inputs)
        for x, dx in zip(inputs, changes):
            x.sub_(dx, alpha=steps * STEP)
    return total / (12 * STEP)


def adjoint_error(case):
    """Return the relative difference of the two pairings, plus that of what must be equal."""
    inputs = case.inputs
    kinds, kind_of_y = case.types.split(" -> ")
    kinds = kinds.split(", ")
    assert len(kinds) == len(inputs), case.name
    for i, (x, kind) in enumerate(zip(inputs, kinds)):
        x.detach().copy_(draw(x, kind, i) / 2)
        x.grad = None
    y = case.function(*inputs)
    gradient = draw(y, DUAL[kind_of_y], 50)
    y.backward(gradient)
    case.finish()
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad.detach() for x in inputs]
    changes = [draw(x, kind, 100 + i) for i, (x, kind) in enumerate(zip(inputs, kinds))]
    at_inputs = sum(map(pairing, changes, gradients, kinds))
    at_output = pairing(derivative(case.function, inputs, changes), gradient, kind_of_y)
    error = (at_inputs - at_output).abs() / at_output.abs()
    spreads = [spread(dx, DUAL[kind]) for dx, kind in zip(gradients, kinds)]
    return error.item() + max(spreads) + spread(y.detach(), kind_of_y)


# ---- the cases -----------------------------------------------------------------------------------


def of_module(name, types, module, x, finish=lambda: None):
    """Return the Case of module(x), whose inputs are x, unless these are tokens, and parameters."""
    parameters = list(module.parameters())
    if x.is_floating_point():
        return Case(name, types, lambda x, *_: module(x), [x, *parameters], finish)
    return Case(name, types, lambda *_: module(x), parameters, finish)


def zeros(*shapes):
    return [torch.zeros(shape) for shape in shapes]


def collectives_cases():
    c = collectives
    rank, P = rank_and_size()
    x = (2 * P, 3 * P)
    yield Case("copy_to_group", "I -> R", c.copy_to_group, zeros(x))
    yield Case("reduce_from_group", "P -> I", c.reduce_from_group, zeros(x))
    for dim in (0, 1):
        scatter = partial(c.scatter_to_group, dim=dim)
        gather = partial(c.gather_from_group, dim=dim)
        all_gather = partial(c.all_gather_to_group, dim=dim)
        reduce_scatter = partial(c.reduce_scatter_to_group, dim=dim)
        yield Case(f"scatter_to_group, {dim=}", "I -> V", scatter, zeros(x))
        yield Case(f"gather_from_group, {dim=}", "V -> I", gather, zeros(x))
        yield Case(f"all_gather_to_group, {dim=}", "V -> R", all_gather, zeros(x))
        yield Case(f"reduce_scatter_to_group, {dim=}", "P -> V", reduce_scatter, zeros(x))
    yield Case("all_to_all_in_group", "V -> V", c.all_to_all_in_group, zeros(x))
    rows_to = [rank + 2 * other for other in range(P)]
    rows_from = [other + 2 * rank for other in range(P)]
    uneven = lambda x: c.all_to_all_in_group(x, rows_from, rows_to)
    yield Case("all_to_all_in_group, uneven", "V -> V", uneven, zeros((sum(rows_to), 3)))


class OpenStore(pipeline.WeightGradStore):
    """A WeightGradStore in a pipeline's I. finish() is its W."""

    def __init__(self):
        self.products = []

    def finish(self):
        for parameter, product in self.products:
            parameter.grad = product()


def in_chunks(function, *inputs, by_chunks, **options):
    """Apply a linear function; by_chunks: whether products overlap messages."""
    chunk_bytes = 0 if by_chunks else 1 << 60
    with patch.dict(tensor_parallel.CHUNK_BYTES, cpu=chunk_bytes):
        return function(*inputs, **options)


def linear_cases():
    """Yield linear layers that are split by columns and by rows."""
    t = tensor_parallel
    _, P = rank_and_size()
    x, weight, bias = (2 * P, 3), (5, 3), (5,)
    yield Case("column_linear", "I, V, V -> V", t.column_linear, zeros(x, weight, bias))
    row_linear = lambda *inputs: t.row_linear(*inputs)
    yield Case("row_linear", "V, V, I -> I", row_linear, zeros(x, weight, bias))
    for sp, by_chunks in ((False, False), (True, False), (True, True)):
        for defers in (False, True):
            how = f"{sp=}, {by_chunks=}, {defers=}"
            store = OpenStore() if defers else None
            finish = store.finish if defers else lambda: None
            options = {"by_chunks": by_chunks, "sequence_parallel": sp, "defer": store}
            columns = partial(in_chunks, t.column_parallel_linear, **options)
            rows = partial(in_chunks, t.row_parallel_linear, **options)
            types = "V, V, V -> V" if sp else "I, V, V -> V"
            yield Case(f"columns, {how}", types, columns, zeros(x, weight, bias), finish)
            types = "V, V -> V" if sp else "V, V -> I"
            yield Case(f"rows, {how}", types, rows, zeros(x, weight), finish)


def vocabulary_and_attention_cases():
    """Yield the layers of tensor_parallel.py that are not linear ones, and its loss."""
    t = tensor_parallel
    rank, P = rank_and_size()
    tokens = torch.randint(3 * P, (2 * P, 2), generator=torch.Generator().manual_seed(shifted(0)))
    target = tokens.flatten().index_fill(0, torch.tensor([1]), -100)
    for inplace in (False, True):
        loss = lambda x: t.vocab_parallel_cross_entropy(x + 0, target, 3 * P, inplace=inplace)
        name = f"vocab_parallel_cross_entropy, {inplace=}"
        yield Case(name, "V -> I", loss, zeros((len(target), 3)))
    for sp in (False, True):
        embedding = t.VocabParallelEmbedding(3 * P, 4, sequence_parallel=sp)
        types = "V -> V" if sp else "V -> I"
        yield of_module(f"VocabParallelEmbedding, {sp=}", types, embedding, tokens)
        # weight and bias of c_attn, then of c_proj
        attention = t.ParallelSelfAttention(4 * P, 2 * P, P, sequence_parallel=sp)
        types = "V, V, V, V, R -> V" if sp else "I, V, V, V, I -> I"
        x = torch.zeros(2 if sp else 2 * P, 1, 4 * P)
        yield of_module(f"ParallelSelfAttention, {sp=}", types, attention, x)


def sequence_parallel_cases():
    s = sequence_parallel
    _, P = rank_and_size()
    yield of_module("SwiGLU", "V -> V", hybrid.SwiGLU(), torch.zeros(3, 8))
    norm = nn.LayerNorm(4)
    mlp = lambda x, up, down, *_: s.sequence_parallel_mlp(x, norm, up, down)
    inputs = [*zeros((2, 1, 4), (3, 4), (4, 3)), *norm.parameters()]
    yield Case("sequence_parallel_mlp", "V, V, V, R, R -> V", mlp, inputs)
    attention = lambda x, qkv, out, *_: s.sequence_parallel_attention(x, norm, qkv, out, 2)
    inputs = [*zeros((2, 1, 4), (3, 2, 4), (4, 2)), *norm.parameters()]
    yield Case("sequence_parallel_attention", "V, V, V, R, R -> V", attention, inputs)
    methods = s.zigzag_allgather_attention, s.zigzag_ring_attention, s.zigzag_ulysses_attention
    for attention in methods:
        for kv_heads in (1, 2 * P):
            q, kv = (1, 2 * P, 4, 3), (1, kv_heads, 4, 3)
            name = f"{attention.__name__}, {kv_heads=}"
            yield Case(name, "V, V, V -> V", attention, zeros(q, kv, kv))
    simple = s.simple_allgather_attention
    yield Case("simple_allgather_attention", "V, V, V -> V", simple, zeros(*3 * [(1, 2, 4, 3)]))
    simple = s.simple_ulysses_attention
    yield Case("simple_ulysses_attention", "V, V, V -> V", simple, zeros(*3 * [(1, 2 * P, 2, 3)]))
    recomputed = partial(s.recompute, tensor_parallel.column_linear)
    yield Case("recompute", "I, V, V -> V", recomputed, zeros((2, 3), (5, 3), (5,)))


def groups_of_nodes(nodes):
    """Return this rank's (node_group, cross_group) for this number of nodes."""
    rank, P = rank_and_size()
    grid = torch.arange(P).view(nodes, -1)
    inside = [dist.new_group(ranks) for ranks in grid.tolist()]
    across = [dist.new_group(ranks) for ranks in grid.t().tolist()]
    dist.barrier()  # a rank that still connects would fail if another had left
    return inside[rank // grid.shape[1]], across[rank % grid.shape[1]]


def expert_parallel_cases():
    e = expert_parallel
    rank, P = rank_and_size()
    N, D, E = 6, 4, 2 * P
    generator = torch.Generator().manual_seed(shifted(rank))
    choices = torch.stack([torch.randperm(E, generator=generator)[:2] for _ in range(N)])
    choices[0, 0] = -1  # dropped
    x, weights, scales = (N, D), (N, 2), (2, D)  # expert i multiplies by scales[i]
    shared = nn.Linear(D, D, bias=False)

    def routed(send, *groups):
        def layer(x, weights, scales, *_):
            compute = lambda rows, _, counts: rows.sin() * scales.repeat_interleave(counts, 0)
            return send(x, choices, weights, E, compute, *groups, shared=shared)

        return layer

    inputs = [*zeros(x, weights, scales), shared.weight]
    yield Case("dispatch_and_combine", "V, V, V, R -> V", routed(e.dispatch_and_combine), inputs)
    in_parts = routed(partial(e.dispatch_and_combine, parts=2))
    yield Case("dispatch_and_combine, parts", "V, V, V, R -> V", in_parts, inputs)
    for nodes in [nodes for nodes in range(1, P + 1) if P % nodes == 0]:
        groups = groups_of_nodes(nodes)
        for parts in (1, 2):
            layer = routed(partial(e.two_hops, parts=parts), *groups)
            yield Case(f"two_hops, {nodes=}, {parts=}", "V, V, V, R -> V", layer, inputs)

    def plain(x, weights, scales):  # which knows no dropped choice
        compute = lambda rows, _, counts: rows.sin() * scales.repeat_interleave(counts, 0)
        return e.plain_dispatch(x, choices.clamp(min=0), weights, E, compute)

    yield Case("plain_dispatch", "V, V, V -> V", plain, inputs[:3])
    one_expert = lambda x, scale: e.switch(x, choices[:, 1] // 2, lambda rows: rows.sin() * scale)
    yield Case("switch", "V, V -> V", one_expert, zeros(x, (D,)))
    # the router, two matrices of the experts, two of the shared expert
    sizes = {"hidden": D, "ffn_hidden": 3, "num_experts": E, "top_k": 2, "shared_experts": 1}
    yield of_module("MoE", "V, R, V, V, R, R -> V", e.MoE(**sizes), torch.zeros(x))
    moe = e.MoE(**sizes, tp_group=dist.group.WORLD)
    yield of_module("MoE, tp", "I, R, V, V, R, R -> I", moe, torch.zeros(2 * P, D))
    yield Case("FullPrecisionLinear", "V, R -> V", e.FullPrecisionLinear.apply, zeros(x, (E, D)))
    balance = lambda probabilities: e.balance_loss(probabilities, torch.arange(E), N * P)
    yield Case("balance_loss", "V -> P", balance, zeros((N, E)))
    z_loss = lambda logits: e.router_z_loss(logits, N * P)
    yield Case("router_z_loss", "V -> P", z_loss, zeros((N, E)))


def data_parallel_cases():
    """Yield data parallelism and DeferredLinear, a layer that knows no group.

    Data parallelism takes the mean of the ranks' gradients (ReduceOp.AVG): 1/P of the sum.
    """
    _, P = rank_and_size()
    x = (2, 4)

    def scale(net):
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad *= P

    def average_and_scale(net):
        ddp.average_gradients(net)
        scale(net)

    net = nn.Linear(4, 3)
    average = partial(average_and_scale, net)
    yield of_module("average_gradients", "V, I, I -> V", net, torch.zeros(x), average)
    net = ddp.DistributedDataParallel(nn.Linear(4, 3))
    finish = partial(scale, net)
    yield of_module("DistributedDataParallel", "V, I, I -> V", net, torch.zeros(x), finish)
    for stage in (1, 2, 3):
        layers = nn.Linear(4, 20, bias=False), nn.Tanh(), nn.Linear(20, 4, bias=False)
        units = [layers[0], layers[2]]
        net = zero.FullyShardedDataParallel(nn.Sequential(*layers), units=units, stage=stage)
        name = f"FullyShardedDataParallel, {stage=}"
        yield of_module(name, "V, V, V -> V", net, torch.zeros(x), partial(scale, net))
    unit = nn.Linear(4, 20)
    layout = zero.ShardedLayout(list(unit.parameters()), *rank_and_size())
    shard = torch.zeros(layout.length // P)
    forward = lambda x, shard: zero.sharded_forward(unit, x, shard, layout)
    yield Case("sharded_forward", "V, V -> V", forward, [torch.zeros(x), shard])
    store = OpenStore()
    deferred = pipeline.DeferredLinear(4, 3, defer=store)
    yield of_module("DeferredLinear", "V, R, R -> V", deferred, torch.zeros(x), store.finish)


SECTIONS = [
    collectives_cases, linear_cases, vocabulary_and_attention_cases, sequence_parallel_cases,
    expert_parallel_cases, data_parallel_cases,
]


# ---- the tests -----------------------------------------------------------------------------------


def check(cases):
    torch.set_default_dtype(torch.float64)
    errors = {case.name: adjoint_error(case) for case in cases()}
    wrong = {name: error for name, error in errors.items() if not error < TOLERANCE}
    assert not wrong, wrong


@pytest.mark.parametrize("cases", SECTIONS)
@on_ranks(soak(2), 3)
def test_backward_is_the_adjoint_that_the_types_promise(cases):
    check(cases)


@on_ranks(4)
def test_it_is_so_on_two_nodes_of_two_ranks():
    check(expert_parallel_cases)


def functions_behind(node):
    """Return the autograd Functions in the graph that ends with this node."""
    own = {type(node)._forward_cls} if hasattr(type(node), "_forward_cls") else set()
    before = [other for other, _ in node.next_functions if other is not None]
    return own.union(*map(functions_behind, before))


def subclasses(cls):
    return {cls}.union(*map(subclasses, cls.__subclasses__()))


@on_ranks(2)
def test_every_autograd_function_is_in_a_case_or_is_an_exception_with_a_reason():
    torch.set_default_dtype(torch.float64)
    names = {module.__name__ for module in MODULES}
    ours = {cls for cls in subclasses(torch.autograd.Function) if cls.__module__ in names}
    covered = set()
    pairs = set()
    for cases in SECTIONS:
        for case in cases():
            pairs.add(case.name.split(",")[0])
            result = case.function(*case.inputs)
            covered |= functions_behind(result.grad_fn)
    in_no_case = ours - covered - set(NOT_ADJOINT)
    assert not in_no_case, in_no_case
    assert set(NOT_ADJOINT) <= ours, NOT_ADJOINT
    assert set(collectives._PAIRS) <= pairs, pairs


def with_pair(name, forward, backward):
    """Replace a row of the table of derivatives."""
    pair = getattr(collectives, forward), getattr(collectives, backward)
    return lambda: patch.dict(collectives._PAIRS, {name: pair})


def doubled(x, group):
    return 2 * x  # on two ranks its pairing is right, but I requires equal gradients


def bias_before_sum(right):
    return lambda *inputs: collectives.reduce_from_group(nn.functional.linear(*inputs))


def without_weights(right):
    def backward(ctx, dy):
        _, _, token = ctx.saved_tensors
        return dy.index_select(0, token), *right(ctx, dy)[1:]

    return staticmethod(backward)


def own_rows_in_backward(right):
    def begin(self, rows, received, sent):
        right(self, rows, received, sent)
        if IN_BACKWARD() >= 0:
            self.arriving = torch.ones_like(self.arriving)

    return begin


FAULTS = {  # {"fault | case": (its section, patch)}
    "f does not reduce in backward | copy_to_group":
        (collectives_cases, with_pair("copy_to_group", "_identity", "_identity")),
    "each rank doubles its part of a gradient in place of the sum | copy_to_group":
        (collectives_cases,
            lambda: patch.dict(collectives._PAIRS, copy_to_group=(collectives._identity, doubled))),
    "g reduces in backward, too | reduce_from_group":
        (collectives_cases, with_pair("reduce_from_group", "_all_reduced", "_all_reduced")),
    "gradients of identical uses are summed | gather_from_group, dim=0":
        (collectives_cases, with_pair("gather_from_group", "_all_gathered", "_reduce_scattered")),
    "gradients of different uses are not summed | all_gather_to_group, dim=1":
        (collectives_cases, with_pair("all_gather_to_group", "_all_gathered", "_own_chunk")),
    "dx of a column-parallel layer is not summed | columns, sp=False, by_chunks=False, defers=True":
        (linear_cases,
            put(tensor_parallel, "begin_sum", lambda right: lambda y, *a, **k: lambda: y)),
    "every rank adds the bias of a row-parallel layer | row_linear":
        (linear_cases, put(tensor_parallel, "row_linear", bias_before_sum)),
    "a deferred W is computed twice | rows, sp=True, by_chunks=True, defers=True":
        (linear_cases,
            put(OpenStore, "put", lambda right: lambda self, weight, product:
                right(self, weight, lambda: 2 * product()))),
    "the maximum of the logits is this rank's | vocab_parallel_cross_entropy, inplace=False":
        (vocabulary_and_attention_cases,
            without_reduction(tensor_parallel, lambda t, *a: ReduceOp.MAX in a)),
    "dk and dv are not summed over cp | zigzag_allgather_attention, kv_heads=1":
        (sequence_parallel_cases,
            put(sequence_parallel, "reduce_scatter_single", lambda right: own_part)),
    "backward uses the local keys and values | zigzag_ring_attention, kv_heads=1":
        (sequence_parallel_cases, put(sequence_parallel, "exchange", own_in_backward)),
    "autograd does not see Ulysses' all-to-all | zigzag_ulysses_attention, kv_heads=1":
        (sequence_parallel_cases,
            put(sequence_parallel, "all_to_all_in_group", unseen_by_autograd)),
    "autograd does not see the all-to-all of experts | switch":
        (expert_parallel_cases, put(expert_parallel, "all_to_all_in_group", unseen_by_autograd)),
    "a part's gradients are those that it sends, not those that come | dispatch_and_combine, parts":
        (expert_parallel_cases, put(expert_parallel.Journey, "begin", own_rows_in_backward)),
    "gradients of results are not weighted | dispatch_and_combine":
        (expert_parallel_cases, put(expert_parallel._WeightedSums, "backward", without_weights)),
    "a mean of gradients is their sum | average_gradients":
        (data_parallel_cases,
            put(ddp, "ReduceOp", lambda right: SimpleNamespace(AVG=right.SUM))),
}


@pytest.mark.parametrize("fault", FAULTS)
@on_ranks(2)
def test_it_notices(fault):
    torch.set_default_dtype(torch.float64)
    cases, patched = FAULTS[fault]
    _, name = fault.split(" | ")
    with patched():
        (error,) = [adjoint_error(case) for case in cases() if case.name == name]
    assert error > 1e-3, error
