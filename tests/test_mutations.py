"""verify.py rejects common mistakes, each of them one wrong line that is patched in at run time."""

import inspect
import io
import math
import re
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial, wraps
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import collectives
import ddp
import expert_parallel
import hybrid
import pipeline
import sequence_parallel
import tensor_parallel
import verify
import zero
from faults import (
    IN_BACKWARD, own_in_backward, own_part, put, unseen_by_autograd, without_reduction,
)  # fmt: skip
from layouts import drawn
from ranks import on_ranks, run, shifted, soak

MODULES = hybrid, tensor_parallel, sequence_parallel, expert_parallel, zero


def everywhere(name, wrong):
    """Replace what all modules import under this name by wrong(it)."""

    def patched():
        stack = ExitStack()
        for module in MODULES:
            if hasattr(module, name):
                stack.enter_context(patch.object(module, name, wrong(getattr(module, name))))
        return stack

    return patched


def with_arguments(name, **changes):
    """Change arguments of a function of hybrid: {name: function of the right argument}."""

    def wrong(right):
        def other(*arguments):
            bound = inspect.signature(right).bind(*arguments).arguments
            return right(**bound | {key: change(bound[key]) for key, change in changes.items()})

        return other

    return put(hybrid, name, wrong)


MESHES = []


def known_mesh(right):
    """Append each new mesh to MESHES, with a group of this rank alone."""

    def make_mesh(args, *rest):
        mesh = right(args, *rest)
        mesh.alone = hybrid.make_group((dist.get_rank(),), timedelta(seconds=args.timeout))
        MESHES.append(mesh)
        return mesh

    return make_mesh


def with_home(number=0, **names):
    """Give wrap() other groups of the mesh in the Home with this number, 1 for experts."""

    def wrong(right):
        def wrap(args, homes, chunks, placements):
            others = {name: getattr(MESHES[-1], other) for name, other in names.items()}
            changed = list(homes)
            changed[number] = replace(homes[number], **others)
            changed = hybrid.Homes(*changed)
            instead = dict(zip(homes, changed))
            moved = [replace(row, home=instead[row.home]) for row in placements]
            return right(args, changed, chunks, moved)

        return wrap

    return put(hybrid, "wrap", wrong)


def after(owner, name, action):
    """Call action(self) after the method owner.name."""
    return put(owner, name, lambda right: lambda self, *a: (right(self, *a), action(self))[0])


def own_targets(right):
    shifted = lambda inputs, targets: (inputs, inputs.roll(-1, 1))
    return lambda self, *tokens: shifted(*right(self, *tokens))


def with_placements(change):
    """Change Placements: change(row) is a dict of their new facts."""
    return put(hybrid, "placements_of",
               lambda right: lambda *a: [replace(row, **change(row)) for row in right(*a)])


def with_biased_weights(right):
    def forward(self, x):
        routing = right(self, x)
        return routing._replace(weights=routing.weights + self.bias[routing.experts])

    return forward


def with_tally_of_evaluation(right):
    def forward(self, x):
        if not torch.is_grad_enabled():
            chosen = self.router(x.flatten(0, -2)).experts.flatten()
            self.losses.tally[: self.num_experts] += chosen.bincount(minlength=self.num_experts)
        return right(self, x)

    return forward


def alone(layer):
    layer.losses.groups = ()
    return layer


MUTATIONS = {  # {"mistake | ranks | layout": patch}
    "the number of counted tokens is this rank's | 2 | --dp 2":
        without_reduction(hybrid, lambda t, *_: t.dtype == torch.int64 and t.ndim == 0),
    "gradients are averaged over the replicas | 2 | --dp 2 --zero 0":
        put(hybrid, "DistributedDataParallel",
            lambda right: lambda *a, **k: right(*a, **k | {"gradient_divide_factor": 2})),
    "labels are shifted after the sequence is sharded | 2 | --cp 2":
        put(hybrid.Trainer, "own_tokens", own_targets),
    "positions are counted from the shard's first | 2 | --cp 2":
        with_arguments("make_chunks", positions=lambda own: torch.arange(len(own))),
    "the loss reported is this replica's | 2 | --dp 2":
        without_reduction(hybrid, lambda t, *_: t.ndim == 0),
    "initial weights depend on the rank | 2 | --tp 2":
        put(hybrid, "normal",
            lambda right: lambda shape, std, key, *a:
                right(shape, std, f"{dist.get_rank()} {key}", *a)),
    "norms are drawn like matrices | 1 | ":
        with_placements(lambda row: {"initial": {1: hybrid.Normal()}.get(row.initial, row.initial)}),
    "the warm-up begins a step late | 1 | ":
        put(hybrid, "learning_rate", lambda right: lambda step, args: right(step + 1, args)),
    "the learning rate falls along a line | 1 | ":
        put(hybrid, "learning_rate",
            lambda right: lambda step, args: right(step, replace(args, lr_decay="linear"))),
    "a validation reads the training part | 2 | --dp 2":
        put(hybrid.Trainer, "batch_of",
            lambda right: lambda self, data, step, part="train": right(self, data, step)),
    "a validation reads the training part on all ranks | 1 | ":
        put(hybrid.Data, "batch", lambda right: lambda *a: right(*a[:6])),
    "the loss of a validation is halved | 1 | ":
        put(hybrid, "evaluate", lambda right: lambda *a: right(*a) / 2),
    "an evaluation feeds the router's bias | 1 | --experts 4 --balance bias":
        put(expert_parallel.MoE, "forward", with_tally_of_evaluation),
    "a rank numbers its rows from 0 | 2 | --tp 2":
        put(hybrid, "normal", lambda right: lambda *a: right(*a[:3])),
    "the order of the data depends on the rank | 2 | --dp 2":
        put(hybrid.Data, "batch",
            lambda right: lambda self, step, B, T, seed, rows=slice(None), *part:
                right(self, step, B, T, seed + (rows.start or 0), rows, *part)),
    "gradients are summed over dp alone | 2 | --cp 2 --zero 0":
        with_home(dp_cp_group="dp_group"),
    "shards are summed over dp alone | 2 | --cp 2 --zero 2": with_home(shard_group="dp_group"),
    "replicas of shards are not summed | 2 | --dp 2 --zero 1 --replicate 2":
        put(hybrid, "FullyShardedDataParallel",
            lambda right: lambda *a, replicate_group, **k: right(*a, **k)),
    "DDP reduces after every microbatch | 2 | --dp 2 --zero 0 --microbatches 2":
        put(hybrid, "Pipeline", lambda right: lambda *a, **k: right(*a, **k | {"sync_each": True})),
    "f does not reduce in backward | 2 | --tp 2":
        put(tensor_parallel, "all_reduce",
            lambda right: lambda *a, **k: None if k.get("async_op") else right(*a, **k)),
    "g reduces in backward, too | 2 | --tp 2":
        everywhere("reduce_from_group",
            lambda right: lambda x, group: collectives.copy_to_group(right(x, group), group)),
    "gradients of norms are those of this rank's tokens | 2 | --tp 2 --sp":
        put(hybrid, "sum_gradients_over_tp", lambda right: lambda *a, **k: None),
    "gradients of identical uses on all ranks are summed | 2 | --tp 2 --experts 4 --balance none":
        everywhere("gather_from_group", lambda right: collectives.all_gather_to_group),
    "every rank adds the bias of a row-parallel layer | 2 | --tp 2":
        put(tensor_parallel.RowParallelLinear, "forward",
            lambda right: lambda self, x: right(self, x) + self.bias),
    "the maximum of the logits is this rank's | 2 | --tp 2":
        without_reduction(tensor_parallel, lambda t, *a: collectives.ReduceOp.MAX in a),
    "the sum of the exponentials is this rank's | 2 | --tp 2":
        without_reduction(tensor_parallel, lambda t, *_: t.ndim == 2 and len(t) == 2),
    "embedding and head keep gradients of their own | 2 | --pp 2":
        with_placements(lambda row: {"is_tied": False}),
    "DualPipe's replicas do not sum gradients | 2 | --pp 2 --schedule dualpipe --microbatches 4":
        put(hybrid, "sum_replicas", lambda right: lambda *a: None),
    "DualPipe's replicas count twice | 2 | --pp 2 --schedule dualpipe --microbatches 4":
        with_placements(lambda row: {"is_original": row.is_original or row.chunk == 1}),
    "balance losses are not divided by the microbatches | 1 | --experts 4 --microbatches 2":
        with_arguments("make_moe", args=lambda args: replace(args, microbatches=1)),
    "balance losses are those of this rank's tokens | 2 | --dp 2 --experts 4":
        put(hybrid, "make_moe", lambda right: lambda *a: alone(right(*a))),
    "a deferred W is never computed | 2 | --pp 2 --schedule zb-h1":
        put(pipeline.WeightGradStore, "put",
            lambda right: lambda self, weight, product:
                right(self, weight, (lambda: 0 * weight) if weight.ndim == 2 else product)),
    "a weight that is used twice counts three times | 2 | --pp 2 --schedule zb-h1":
        put(pipeline.WeightGradStore, "put",
            lambda right: lambda *a: [right(*a) for _ in range(2 if a[1].ndim == 2 else 1)]),
    "parts of a softmax are merged by their maximum | 2 | --cp 2 --cp-method ring":
        put(torch, "logaddexp", lambda right: torch.maximum),
    "backward uses the local keys and values | 2 | --cp 2 --cp-method ring":
        put(sequence_parallel, "exchange", own_in_backward),
    "gradients of gathered keys and values are not summed | 2 | --cp 2 --cp-method allgather":
        put(sequence_parallel, "reduce_scatter_single", lambda right: own_part),
    "autograd does not see Ulysses' all-to-all | 2 | --cp 2 --cp-method ulysses":
        everywhere("all_to_all_in_group", unseen_by_autograd),
    "autograd does not see the all-to-all of experts | 2 | --dp 2 --experts 4 --ep 2":
        put(expert_parallel.Part, "post",
            lambda right: lambda self, rows, *how: right(self, rows.detach(), *how)),
    "gradients of different experts are summed | 2 | --dp 2 --experts 4 --ep 2 --zero 0":
        with_home(1, dp_cp_group="dp_cp_group"),
    "gradients of experts are averaged over ep | 2 | --dp 2 --experts 4 --ep 2":
        after(hybrid.Trainer, "sum_shared_gradients",
            lambda self: [p.grad.div_(2) for p in self.parameters(self.homes[1])]),
    "loads are counted on this rank alone | 2 | --dp 2 --experts 4 --balance bias":
        without_reduction(hybrid, lambda t, *_: t.ndim == 2 and t.shape[1] == 7),
    "the router's bias enters the weights | 1 | --experts 4 --balance bias":
        put(expert_parallel.Router, "forward", with_biased_weights),
    "the norm is that of this rank's shards | 2 | --tp 2":
        put(hybrid, "get_total_norm", lambda right: lambda tensors, groups: right(tensors)),
    "what all tp ranks hold counts once for each in the norm | 2 | --tp 2":
        put(hybrid.Placement, "counts", lambda right: property(lambda row: row.is_original)),
    "the tied weight counts twice in the norm | 2 | --pp 2":
        with_placements(lambda row: {"is_original": True}),
    "Llama: norms' gradients are those of this rank's tokens | 2 | --tp 2 --sp --block llama":
        put(hybrid, "of_own_tokens", lambda right: lambda module, config: module),
    "Llama: rotation counts positions from the shard's first | 2 | --cp 2 --block llama":
        with_arguments("make_chunks", positions=lambda own: torch.arange(len(own))),
    "Llama: the head begins with other values | 1 | --block llama":
        with_placements(lambda row: {"initial": 1.0 if "lm_head" in row.name else row.initial}),
    "Llama: the head does not count in the norm | 2 | --pp 2 --block llama":
        put(hybrid.Placement, "counts",
            lambda right: property(lambda row: right.fget(row) and "lm_head" not in row.name)),
    "weights gathered before the update are used after it | 2 | --dp 2 --zero 1":
        put(zero.FullyShardedDataParallel, "_drop_changed",
            lambda right: lambda self: setattr(self, "_versions", zero.versions_of(self.flats))),
}
PLAIN = "gradients are averaged over the", "f does", "embedding", "norms are drawn"
PLAIN += "the learning rate falls", "an evaluation feeds"
ROWS = [mistake if mistake.startswith(PLAIN) else soak(mistake) for mistake in MUTATIONS]


def worst(flags, dtype=torch.float64):
    """Return the worst difference of a layout, and its name."""
    world_size = dist.get_world_size()
    torch.set_default_dtype(dtype)
    words = [*verify.sizes_of(world_size), "--layers=2", f"--seed={shifted(0)}", *flags.split()]
    try:
        return verify.judge(hybrid.parse(words, world_size), torch.device("cpu"), {})
    except Exception as error:  # all ranks raise the same error
        return math.inf, f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("mistake", ROWS)
@on_ranks(lambda mistake: int(mistake.split(" | ")[1]))
def test_verify_rejects_every_mistake(mistake):
    flags, patched = mistake.split(" | ")[2], MUTATIONS[mistake]
    right, _ = worst(flags)
    with put(hybrid, "make_mesh", known_mesh)(), patched():
        wrong, where = worst(flags)
    bound = verify.BOUNDS["fp64"]
    assert right <= bound < wrong, f"right: {right:.1e}; wrong: {wrong:.1e} of {where}"
    refusals = "two in one backward", "which are no replicas", "gradients are still being reduced"
    refused = any(refusal in where for refusal in refusals)
    assert "Error: " not in where or refused, where


def wrong_blocks(factor, is_causal):
    """Multiply the scores of block_attention() by a factor; replace its `causal`."""
    forward = sequence_parallel.block_attention
    backward = sequence_parallel.block_attention_backward

    def wrong_backward(grad_output, q, k, v, output, lse, causal):
        dq, dk, dv = backward(grad_output, factor * q, k, v, output, lse, is_causal(causal))
        return factor * dq, dk, dv

    return patch.multiple(
        sequence_parallel,
        block_attention=lambda q, k, v, causal: forward(factor * q, k, v, is_causal(causal)),
        block_attention_backward=wrong_backward,
    )


@pytest.mark.parametrize("block", ["gpt2", soak("llama")])
@on_ranks(2)
def test_in_bf16_a_wrong_scale_or_mask_of_attention_is_far_over_the_bound(block):
    flags = f"--cp 2 --layers 4 --dtype bf16 --block {block}"
    bound = verify.BOUNDS["bf16"]
    assert worst(flags, torch.float32)[0] <= bound
    for faults in (0.5, lambda causal: causal), (1, lambda causal: False):
        with wrong_blocks(*faults):
            assert worst(flags, torch.float32)[0] > 10 * bound


# ---- every parallel sum --------------------------------------------------------------------------


def over(is_it, group, other="alone"):
    """Make hybrid sum such tensors over another group of the mesh."""

    def wrong(right):
        def all_reduce(tensor, *arguments, **options):
            mesh = MESHES[-1]
            if is_it(tensor) and options.get("group") is getattr(mesh, group):
                options["group"] = getattr(mesh, other)
            return right(tensor, *arguments, **options)

        return all_reduce

    return put(hybrid, "all_reduce", wrong)


def without_norm(group):
    """Leave a group of the mesh out of the sums of the gradients' norm."""

    def wrong(right):
        def norm(tensors, groups):
            left_out = getattr(MESHES[-1], group)
            return right(tensors, groups=[other for other in groups if other is not left_out])

        return norm

    return put(hybrid, "get_total_norm", wrong)


def without_balance(group):
    """Leave a group of the mesh out of the sums of the balance losses."""

    def wrong(right):
        def make_moe(args, mesh):
            layer = right(args, mesh)
            left_out = getattr(mesh, group)
            kept = [other for other in layer.losses.groups if other is not left_out]
            layer.losses.groups = kept
            return layer

        return make_moe

    return put(hybrid, "make_moe", wrong)


def without_sum_over_tp(is_it):
    """Do not sum the gradients over tp of parameters with such a shape."""
    shape = lambda parameter: getattr(parameter, "whole_shape", parameter.detach().shape)
    others = lambda parts: {p: part for p, part in parts.items() if not is_it(shape(p))}
    return put(hybrid, "sum_gradients_over_tp",
               lambda right: lambda parts, *a, **k: right(others(parts), *a, **k))


def without_mark(layer):
    layer.router.sums_over_tp = ()
    return layer


def is_count(tensor):
    return tensor.dtype == torch.int64 and tensor.ndim == 0


def is_loss(tensor):
    return tensor.is_floating_point() and tensor.ndim == 0


def is_tally(tensor):
    return tensor.ndim == 2


SUMS = {  # {a sum in verify.sums_of(): patch without it}
    "balance losses, cp": without_balance("cp_group"),
    "balance losses, dp": without_balance("dp_group"),
    "balance losses, tp": without_balance("tp_group"),
    "exponentials of the logits, tp":
        without_reduction(tensor_parallel, lambda t, *_: t.ndim == 2 and len(t) == 2),
    "gradients of DualPipe's replicas, pp": put(hybrid, "sum_replicas", lambda right: lambda *a: 0),
    "gradients of experts, DDP": with_home(1, dp_cp_group="alone"),
    "gradients of experts, ZeRO": with_home(1, shard_group="alone"),
    "gradients of experts, copies of shards": with_home(1, replicate_group="alone"),
    "gradients of experts, tp": without_sum_over_tp(lambda shape: len(shape) == 3),
    "gradients of inputs, tp":
        without_reduction(tensor_parallel, lambda t, *_: t.ndim == 3 and IN_BACKWARD() >= 0),
    "gradients of k and v, cp by allgather":
        put(sequence_parallel, "reduce_scatter_single", lambda right: own_part),
    "gradients of k and v, cp by ring": put(sequence_parallel, "exchange", own_in_backward),
    "gradients of norms, tp": without_sum_over_tp(lambda shape: len(shape) == 1),
    "gradients of routers, tp":
        put(hybrid, "make_moe", lambda right: lambda *a: without_mark(right(*a))),
    "gradients of the tied weight, pp":
        with_placements(lambda row: {"is_tied": False}),
    "gradients, DDP over cp": with_home(dp_cp_group="dp_group"),
    "gradients, DDP over dp": with_home(dp_cp_group="cp_group"),
    "gradients, ZeRO over cp": with_home(shard_group="dp_group"),
    "gradients, ZeRO over dp": with_home(shard_group="cp_group"),
    "gradients, copies of shards": with_home(replicate_group="alone"),
    "loads of experts, cp": over(is_tally, "dp_cp_group", "dp_group"),
    "loads of experts, dp": over(is_tally, "dp_cp_group", "cp_group"),
    "loads of experts, tp": over(is_tally, "tp_group"),
    "loss, cp": over(is_loss, "dp_cp_group", "dp_group"),
    "loss, dp": over(is_loss, "dp_cp_group", "cp_group"),
    "loss, pp": over(is_loss, "pp_group"),
    "maximum of the logits, tp":
        without_reduction(tensor_parallel, lambda t, *a: collectives.ReduceOp.MAX in a),
    "norm of experts, ep": without_norm("ep_group"),
    "norm of experts, shards": without_norm("expert_shard_group"),
    "norm, pp": without_norm("pp_group"),
    "norm, shards": without_norm("shard_group"),
    "norm, tp": without_norm("tp_group"),
    "number of tokens, cp": over(is_count, "dp_cp_group", "dp_group"),
    "number of tokens, dp": over(is_count, "dp_cp_group", "cp_group"),
    "products in forward, tp":
        without_reduction(tensor_parallel, lambda t, *_: t.ndim == 3 and IN_BACKWARD() < 0),
    "products in forward, tp with sp":
        put(tensor_parallel, "reduce_scatter_single", lambda right: own_part),
    "rows of the embedding, tp": everywhere("reduce_from_group", lambda right: lambda x, group: x),
}

@cache
def first_layouts(world_size):
    """Return {sum: (flags, processes of a node)} of verify's first layout that needs it."""
    found = {}
    for words, per_node in drawn(world_size):
        args = hybrid.parse([*verify.sizes_of(world_size), *words], world_size, per_node)
        for name in verify.sums_of(args):
            found.setdefault(name, (words, per_node))
    return found


def judge_without(rows):
    """Judge these layouts, {sum: layout}, each without its sum; return {sum: difference}."""
    world_size = dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    found = {}
    groups = {}
    with put(hybrid, "make_mesh", known_mesh)():
        for name, (words, per_node) in rows.items():
            words = [*verify.sizes_of(world_size), f"--seed={shifted(0)}", *words]
            args = hybrid.parse(words, world_size, per_node)
            with SUMS[name]():
                found[name], _ = verify.judge(args, torch.device("cpu"), groups)
    return found


@pytest.mark.parametrize("world_size", [soak(2), 4, soak(8)])
def test_every_sum_has_a_layout_of_2_and_4_and_8_processes(world_size):
    assert first_layouts(world_size).keys() == SUMS.keys()


IN_PLAIN = "balance losses, cp", "norm, tp"


@pytest.mark.parametrize(
    "world_size, names",
    [(4, IN_PLAIN), *(soak(n, SUMS) for n in (2, 4, 8))],
)
def test_a_layout_that_needs_a_sum_is_wrong_without_it(world_size, names):
    rows = {name: first_layouts(world_size)[name] for name in names}
    found, *_ = run(world_size, judge_without, rows, timeout=600)
    assert [name for name in names if found[name] <= verify.BOUNDS["fp64"]] == []


# ---- the errors that demonstrations print --------------------------------------------------------

def doubled(right):
    """Return a function that returns twice as much."""
    return wraps(right)(lambda *arguments, **how: 2 * right(*arguments, **how))


def of_doubles(right):
    """Return a function that first doubles its first tensor in place."""
    return lambda tensor, *others, **how: right(tensor.mul_(2), *others, **how)


def twice_as_much(right):
    """Return an exchange() that sends doubles."""
    return lambda sends, *others, **how: right([(2 * x, peer) for x, peer in sends], *others, **how)


WRONG = {  # {a module: patches with each of which its demonstration computes something else}
    collectives: [
        put(collectives, "ring_all_reduce", of_doubles), put(collectives, "all_reduce", of_doubles),
    ],
    ddp: [put(ddp, "all_reduce", of_doubles)],
    zero: [put(zero, "reduce_scatter_single",
               lambda right: lambda total, flat, **how: right(total, -flat, **how))],
    pipeline: [put(pipeline, "exchange", twice_as_much)],
    tensor_parallel: [
        put(tensor_parallel, "reduce_from_group", lambda right: lambda x, group: x),
        put(tensor_parallel, "row_parallel_linear", doubled),
    ],
    sequence_parallel: [
        put(sequence_parallel, "sequence_parallel_mlp", doubled),
        put(sequence_parallel, "simple_allgather_attention", doubled),
        put(sequence_parallel, "simple_ring_attention", doubled),
        put(sequence_parallel, "simple_ulysses_attention", doubled),
        put(sequence_parallel, "_checked", lambda right: lambda q, *others: right(2 * q, *others)),
    ],
    expert_parallel: [
        put(expert_parallel, "switch", doubled),
        put(expert_parallel, "dispatch_and_combine", doubled),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", [module.__name__ for module in WRONG])
@on_ranks(2)
def test_a_demonstration_prints_an_error_as_large_as_the_mistake(name):
    """Each error that it prints shows at least one of the mistakes."""
    (module,) = [module for module in WRONG if module.__name__ == name]
    errors = []
    for mistake in WRONG[module]:
        with redirect_stdout(io.StringIO()) as printed, mistake():
            module._demonstrate()
        errors.append(map(float, re.findall(r"[\d.]+e[-+]\d\d", printed.getvalue())))
    largest = [max(of_one_line) for of_one_line in zip(*errors, strict=True)]
    assert dist.get_rank() > 0 or (largest and min(largest) > 1e-4), largest
