"""Every layout of hybrid.py trains as one process does; batches, metrics and errors."""

import ast
import inspect
import io
import itertools
import math
import re
import textwrap
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import hybrid
import tensor_parallel
import zero
from collectives import (
    all_gather_to_group, count_bytes, gather_from_group, gather_objects, observe, rank_and_size,
    reduce_scatter_bytes, reduce_scatter_to_group, scatter_to_group,
)
from ddp import GradBucket, ddp_bytes
from expert_parallel import FullPrecisionLinear, switch_layer
from gpu_counts import waits
from layouts import (
    BATCH, DEGREES, EVERY_LAYOUT, EXPERTS, FEW_LLAMAS, FLAGS, GRID, HIDDEN, LAYERS, LLAMAS, MODELS,
    MOE_SIZES, RATES, SEED, SIZES, STEPS, T, V, WITH_EXPERTS, assert_alike, assert_llama_trains,
    assert_trains, assert_trains_as_a_loop_does, batch, counterpart, expert_metrics, leaves_of,
    loss_by_one_process, make_trainer, own_batch, plain_gpt, reference, reference_moe, soak_but,
    train, train_on_text, whole_weights,
)  # fmt: skip
from pipeline import SCHEDULES, interleaved, one_f_one_b_step, pipeline_bytes
from ranks import least_bytes, on_ranks, run, shifted, soak
from reference_gpt import MoE as ReferenceMoE
from reference_gpt import ReferenceTraining
from sequence_parallel import simple_allgather_attention
from tensor_parallel import tensor_parallel_layer_bytes
from transformer import saved_bytes
from verify import gathered
from zero import zero_rounds

# ---- the plain form ------------------------------------------------------------------------------

@pytest.mark.parametrize("pp, dp, tp", [(2, 2, 2), (3, 1, 2)])
@on_ranks(lambda pp, dp, tp: pp * dp * tp)
def test_plain_groups_are_those_of_the_grid_and_a_plain_step_follows_the_device_of_its_tokens(
    pp, dp, tp
):
    groups = hybrid.plain_groups(pp, dp, tp)
    (pp_rank, _), (dp_rank, _), (tp_rank, _) = map(rank_and_size, groups.values())
    assert dist.get_rank() == (pp_rank * dp + dp_rank) * tp + tp_rank
    stage = hybrid.PlainStage(whole_weights(**GRID), GRID["D"] // GRID["heads"], groups)
    optimizer = torch.optim.SGD(stage.parameters(), 0.5)
    tokens = torch.randint(GRID["V"], (GRID["batch"], GRID["T"] + 1))
    with torch.device("meta"):
        assert hybrid.plain_step(stage, optimizer, tokens, 2, groups) > 0


@on_ranks(2)
def test_a_plain_part_of_a_weight_that_the_ranks_do_not_divide_is_refused():
    """Functions such as split_embedding() would take its rows for others."""
    assert hybrid.plain_part(torch.zeros(4, 2), 0, None).shape == (2, 2)
    with pytest.raises(AssertionError, match="equal parts"):
        hybrid.plain_part(torch.zeros(5, 2), 0, None)


def step_of_one_process(reference, tokens, heads):
    """Take a step on whole weights, and return the loss."""
    sgd = torch.optim.SGD(leaves_of(reference), 0.5)
    loss = loss_by_one_process(reference, tokens, heads)
    loss.backward()
    sgd.step()
    return loss.detach()


@pytest.mark.parametrize("technique", ["zero", "cp"])
@on_ranks(4)
def test_zero_and_cp_join_the_plain_forms_as_the_comment_after_plain_step_says(technique):
    """The group that plain_groups() calls dp is that of cp, if cp is tested."""
    torch.set_default_dtype(torch.float64)
    V, T, D, heads, layers, batch = GRID.values()
    whole, reference = whole_weights(**GRID), whole_weights(**GRID)
    groups = hybrid.plain_groups(pp=2, dp=2, tp=1)
    group = groups["dp"]
    rank, P = rank_and_size(group)
    pp_rank, pp = rank_and_size(groups["pp"])
    tokens = torch.randint(V, (batch, T + 1))
    dim, count = 0, batch * T
    if technique == "zero":
        count /= P
    elif technique == "cp":
        dim = 1
        whole["positions"] = whole["positions"].chunk(P)[rank]
    stage = hybrid.PlainStage(whole, D // heads, groups)
    parameters = dict(stage.named_parameters())
    loss = step_of_one_process(reference, tokens, heads)

    def across_positions(q, k, v, is_causal):
        return simple_allgather_attention(q, k, v, group)

    changed = {
        "zero": nullcontext(),
        "cp": patch.object(torch.nn.functional, "scaled_dot_product_attention", across_positions),
    }
    inputs, targets = (part.chunk(P, dim)[rank] for part in (tokens[:, :-1], tokens[:, 1:]))
    if not stage.is_first:
        inputs = torch.empty(*inputs.shape, D)
    share = lambda y, t: cross_entropy(y.flatten(0, 1), t.flatten(), reduction="sum") / count
    with changed[technique]:
        microbatches = inputs.chunk(2), targets.chunk(2)
        losses = one_f_one_b_step(stage, *microbatches, share, groups["pp"])
    if stage.is_last:
        total = sum(losses)
        dist.all_reduce(total, group=group)
        if technique == "zero":
            total /= P
        torch.testing.assert_close(total, loss, rtol=1e-13, atol=0)
    if technique == "zero":
        update = lambda weights, gradient: weights.sub_(0.5 * gradient)
        zero.sharded_step([*parameters.values()], update, group)
    else:
        for name, parameter in parameters.items():
            if name != "positions":
                dist.all_reduce(parameter.grad, group=group)
        torch.optim.SGD(parameters.values(), 0.5).step()
    for name, parameter in parameters.items():
        expected = counterpart(reference, name, layers // pp * pp_rank)
        if (technique, name) == ("cp", "positions"):
            expected = expected.chunk(P)[rank]
        torch.testing.assert_close(parameter, expected, rtol=1e-10, atol=1e-12)


def with_lines_for(technique, function, **names):
    """Return a function or class of hybrid with the lines - and + of a technique in its source.

    names: what these lines use and hybrid does not.
    """
    source = original = re.sub(r"  #.*", "", inspect.getsource(function))
    comment = re.search(rf"^# {technique} .*?(?=^#$)", inspect.getsource(hybrid), re.M | re.S)[0]
    for change in re.finditer(r"((?:^# +-  .*\n)+)((?:^# +\+  .*\n)+)", comment, re.M):
        uncommented = (re.sub(r"^# +[-+]  ", "", lines, flags=re.M) for lines in change.groups())
        old, new = map(str.rstrip, uncommented)
        place = re.search(rf"^( *){re.escape(old.splitlines()[0])}$", source, re.M)
        if place:
            lines = textwrap.indent(old, place[1])
            assert source.count(lines) == 1
            source = source.replace(lines, textwrap.indent(new, place[1]))
    assert source != original
    scope = vars(hybrid) | names
    exec(source, scope)
    return scope[function.__name__]


@pytest.mark.parametrize("technique, pp", [("sp", 2), ("ep", 1)])
@on_ranks(4)
def test_the_lines_for_sp_and_experts_make_plain_step_train_as_one_process_does(technique, pp):
    """With ep there are two experts, each of which two ranks split."""
    torch.set_default_dtype(torch.float64)
    V, T, D, heads, layers, batch = GRID.values()
    groups = hybrid.plain_groups(pp=pp, dp=2 // pp, tp=2)
    (pp_rank, _), (dp_rank, dp), (tp_rank, tp) = map(rank_and_size, groups.values())
    with_experts = {}
    if technique == "ep":
        names = {"switch_layer": switch_layer, "dp_group": groups["dp"], "dp": dp}
        for function in hybrid.plain_weights, hybrid.PlainLayer:
            with_experts[function.__name__] = with_lines_for(technique, function, **names)
    with patch.dict(vars(hybrid), with_experts):
        whole, reference = whole_weights(**GRID), whole_weights(**GRID)
        stage = hybrid.PlainStage(whole, D // heads, groups)
    with_sp = {}
    if technique == "sp":
        with_sp["copy_to_group"] = lambda x, group: all_gather_to_group(x, 1, group)
        with_sp["reduce_from_group"] = lambda z, group: reduce_scatter_to_group(z, 1, group)
        scatter = lambda _, x: scatter_to_group(*x, 1, groups["tp"])
        gather = lambda *call: gather_from_group(call[-1], 1, groups["tp"])
        if stage.is_first:
            stage.layers.register_forward_pre_hook(scatter)
        if stage.is_last:
            stage.layers.register_forward_hook(gather)
    tokens = torch.randint(V, (batch, T + 1))
    expected = step_of_one_process(reference, tokens, heads)
    step = with_lines_for(technique, hybrid.plain_step)
    sgd = torch.optim.SGD(stage.parameters(), 0.5)
    with patch.dict(vars(tensor_parallel), with_sp):
        loss = step(stage, sgd, tokens, 2, groups)
    assert loss == pytest.approx(expected.item(), rel=1e-13)
    dims = {"qkv": 1, "out": 1, "up": 0, "down": 1}
    for name, parameter in stage.named_parameters():
        expected = counterpart(reference, name, layers // pp * pp_rank)
        kind = name.rsplit(".", 1)[-1]
        if technique == "ep" and kind in ("up", "down"):
            expected = expected[dp_rank]
        if kind in dims:
            expected = expected.chunk(tp, dims[kind])[tp_rank]
        torch.testing.assert_close(parameter, expected, rtol=1e-10, atol=1e-12)


def test_the_technique_calls_nothing_that_stands_below_services():
    technique, services = inspect.getsource(hybrid).split("# ==== services ")
    kinds = ast.FunctionDef, ast.ClassDef
    below = {each.name for each in ast.parse("#" + services).body if isinstance(each, kinds)}
    used = {each.id for each in ast.walk(ast.parse(technique)) if isinstance(each, ast.Name)}
    assert "train" in below and "GPT" in used
    assert not used & below


# ---- every layout --------------------------------------------------------------------------------


LONGER = ["--tp 8 ", "--tp 2 --cp 2 --pp 2", "--dp 8", "--zero 2 --cp 3", "--recompute-layers 3"]
LONGER += ["--ep 2 --zero 1", "--cp 2 --ep 4"]


def _is_plain(number, row):
    every = 5 if row[0] < 4 else 19
    return number % every == 0 and not any(part in row[1] for part in LONGER)


@pytest.mark.parametrize("world_size, flags", soak_but(_is_plain, EVERY_LAYOUT))
def test_every_layout_trains_as_one_process_does(world_size, flags):
    assert_trains(world_size, flags, torch.float64, 1e-11, 1e-9, 1e-9)


@pytest.mark.parametrize("world_size, flags, mixture", soak_but(_is_plain, EXPERTS))
def test_a_gpt_of_experts_trains_as_a_loop_over_them_does(world_size, flags, mixture):
    assert_trains_as_a_loop_does(world_size, flags, mixture)


@pytest.mark.parametrize(
    "world_size, flags, name", soak_but(lambda _, row: row in FEW_LLAMAS, LLAMAS)
)
def test_llamas_block_and_both_heads_train_as_one_process_does(world_size, flags, name):
    assert_llama_trains(world_size, flags, name)


OF_EXPERTS = ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "zb-h1 --recompute-layers 2"]


@pytest.mark.parametrize("schedule", soak_but(lambda i, _: i == 3, zip(OF_EXPERTS)))
def test_experts_train_in_every_schedule_and_count_each_microbatch_once(schedule):
    flags = f"--pp 2 --dp 2 --ep 2 --microbatches 4 --schedule {schedule} --recompute full"
    assert_trains_as_a_loop_does(4, flags, "--balance bias --top-k 3 --shared-experts 1")


def test_a_capacity_drops_tokens_in_every_layer_with_experts():
    mixture = "--balance none --top-k 1 --moe-every 2"
    assert_trains_as_a_loop_does(2, "--pp 2 --microbatches 1", mixture, factor=0.75)
    assert all(dropped > 0.1 for *_, dropped in reference_moe(mixture, 0.75)[0])


def test_balance_losses_are_means_over_microbatches_in_any_layout():
    mixture = lambda i: ReferenceMoE(16, 4, 2, "softmax", losses=(0.01, 0.001))
    model, metrics = plain_gpt(4, 16, 4, T, V, mlp=mixture), []
    model.register_forward_hook(lambda *_: metrics.append(expert_metrics(model)))
    training = ReferenceTraining(model, RATES, 0.2, 0.5)
    training.backward(*batch(0), torch.arange(BATCH).chunk(4))
    layouts = (1, ""), (2, "--pp 2 --schedule dualpipe"), (4, "--tp 2 --cp 2 --ep 2")
    for world_size, flags in layouts:
        flags = f"{MOE_SIZES} --balance aux --microbatches 4 {flags}"
        (((*_, balance, z),), (found,), _), *_ = run(world_size, train, flags, torch.float64, 1)
        assert_alike(found, training.gradients, 1e-9)
        np.testing.assert_allclose([balance, z], np.mean(metrics, 0)[-2:], rtol=1e-11)


def test_metrics_are_the_worst_load_the_fraction_dropped_and_the_mean_losses():
    tallies = torch.tensor([[4.0, 4, 4, 4, 2, 1.0, 3.0], [8, 4, 4, 0, 6, 2.0, 5.0]])
    expected = {"expert_load": 2, "expert_dropped": 8 / 32, "balance_loss": 0.75, "z_loss": 2.0}
    assert hybrid.tally_metrics(tallies, 2, True) == expected
    assert list(hybrid.tally_metrics(tallies, 2, False)) == ["expert_load", "expert_dropped"]
    of_no_token = hybrid.tally_metrics(torch.zeros(2, 7), 2, True)
    assert not any(of_no_token.values())


# ---- the model and its state ---------------------------------------------------------------------


@on_ranks(1)
def test_initial_weights_depend_on_name_and_seed_and_are_gpt2s():
    flags = "--layers 2 --hidden 64 --heads 4 --vocab-size 1000"
    trainers = [make_trainer(f"{flags} --seed {seed}") for seed in (SEED, SEED + 1)]
    values, again = ({row.name: row.tensor.detach() for row in t.placements} for t in trainers)
    drawn = {name: value for name, value in values.items() if value.ndim == 2}
    assert len(drawn) == 2 + 2 * 4
    numbers = torch.cat([*map(torch.flatten, drawn.values())])
    numbers = torch.cat([numbers, *(again[name].flatten() for name in drawn)])
    assert len(numbers.unique()) > 0.99 * len(numbers)
    for name, value in values.items():
        if value.ndim == 2:
            std = 0.01 if "c_proj" in name else 0.02
            assert value.std().item() == pytest.approx(std, rel=0.05), name
        else:
            assert (value == (0 if name.endswith("bias") else 1)).all(), name


@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 3, 2)])
def test_a_part_of_a_weight_draws_the_rows_of_the_whole(shape):
    whole = hybrid.normal(shape, 1.0, "key")
    assert torch.equal(hybrid.normal((4, *shape[1:]), 1.0, "key", offset=3), whole[3:])
    assert len(whole.unique()) == whole.numel()


@on_ranks(1)
def test_a_parameter_or_buffer_whose_initial_value_is_not_declared_is_refused_by_name():
    norm = torch.nn.LayerNorm
    for attribute in "scale", "shift":

        class Norm(norm):
            def __init__(self, *sizes):
                super().__init__(*sizes)
                if attribute == "scale":
                    self.scale = torch.nn.Parameter(torch.ones(3))
                else:
                    self.register_buffer("shift", torch.ones(3))

        fault = rf"h\.0\.ln_1\.{attribute} has no initial value"
        with patch.object(torch.nn, "LayerNorm", Norm):
            with pytest.raises(AssertionError, match=fault):
                make_trainer("")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_swiglu_keeps_only_gate_and_up_and_has_the_bits_of_its_formula(dtype):
    x = torch.randn(3, 5, 14, dtype=dtype, requires_grad=True)
    grad = torch.randn(3, 5, 7, dtype=dtype)
    with saved_bytes() as kept:
        y = hybrid.SwiGLU()(x)
        assert kept() == x.nbytes
    gate, up = x.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    assert torch.equal(y, expected)
    found, wanted = (torch.autograd.grad(output, x, grad)[0] for output in (y, expected))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name, pp", [("1f1b", 2), ("1f1b", 5), ("interleaved", 2), ("zb-v", 3)])
@pytest.mark.parametrize("layers", [4, 9])
@pytest.mark.parametrize("vocab_size", [1, 400, 3000, 9000])  # heads that cost 0 to 11 layers
def test_no_other_division_of_the_layers_has_a_cheaper_most_expensive_rank(
    name, pp, layers, vocab_size
):
    """Nor one whose second most expensive rank is cheaper, and so on. A middle stage has a layer."""
    config = hybrid.GPTConfig(layers, 64, 4, 32, vocab_size)
    head = 2 * config.hidden * vocab_size / sum(hybrid.forward_flops(config, 0))
    (route,) = routes = SCHEDULES[name](pp, 2 * pp).routes

    def costs(sizes):
        of_ranks = [0] * pp
        for size, (rank, _) in zip(sizes, route):
            of_ranks[rank] += size
        of_ranks[route[-1][0]] += head
        return sorted(of_ranks, reverse=True)

    def divisions(stages, left):
        if stages == 1:
            yield (left,)
            return
        for size in range(stages < len(route), left + 1):
            yield from ((size, *rest) for rest in divisions(stages - 1, left - size))

    found = hybrid.divide_layers(config, routes)
    assert [i for part in found for i in part] == [*range(layers)]
    own = tuple(map(len, found))
    least = min(map(costs, divisions(len(route), layers)))
    assert own in {*divisions(len(route), layers)} and costs(own) == pytest.approx(least)


def test_the_cost_of_the_head_counts_when_layers_are_divided_into_stages():
    def sizes(num_stages, name="1f1b", **others):
        config = hybrid.GPTConfig(**others)
        routes = SCHEDULES[name](num_stages, 2 * num_stages).routes
        return [*map(len, hybrid.divide_layers(config, routes))]

    llama = {"layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "seq_len": 8192}
    assert sizes(16, **llama, vocab_size=128256, ffn=53248) == [7, *14 * [8], 7]  # as published
    gpt2 = {"layers": 12, "hidden": 768, "heads": 12, "seq_len": 1024}
    # The head costs 2 h V, a layer 24 h^2 + 4 s h, so the head costs as much as 4.5 layers.
    assert sizes(3, **gpt2, vocab_size=50304) == [5, 6, 1]
    assert sizes(3, **gpt2, vocab_size=50304, recompute="full") == [5, 5, 2]  # as 3.4 layers
    # DualPipe gives ranks 0 and 3 stages 0 and 3, which cost 8.5 of 16.5 with the head.
    assert sizes(4, "dualpipe", **gpt2, vocab_size=50304) == [4, 4, 4, 0]


EXPERTS = "--dp 2 --ep 2 --experts 4 --top-k 2 --hidden 256 --heads 4 --seq-len 512 --batch-size 4"


@pytest.mark.parametrize(
    "more, parts",
    [
        ("", 2),  # 1024 tokens of 2 experts and 256 numbers of 4 bytes are 2 MiB for 2 ranks
        *((flags, 1) for flags in ("--seq-len 511", "--dtype bf16", "--top-k 1", "--ep 1")),
        ("--microbatches 2", 1),
        ("--microbatches 2 --seq-len 1024", 2),
    ],
)
def test_a_layer_of_experts_has_two_parts_if_a_rank_sends_each_other_one_a_mebibyte(more, parts):
    args = hybrid.parse(f"{EXPERTS} {more}".split(), 2)
    assert hybrid.parts_of_experts(args) == parts


@pytest.mark.parametrize("name", SCHEDULES)
@on_ranks(2)
def test_the_schedule_is_the_one_asked_for(name):
    rank, flags = dist.get_rank(), f"--pp 2 --microbatches 4 --schedule {name}"
    assert make_trainer(flags).pipeline.schedule[rank] == SCHEDULES[name](2, 4)[rank]
    if name == "interleaved":
        found = make_trainer(f"{flags} --layers 6 --chunks 3").pipeline.schedule[rank]
        assert found == interleaved(2, 4, 3)[rank]


# ---- dropout and recomputation -------------------------------------------------------------------


def _dropout_states(flags):
    """Return (kind, p, random state) of every dropout in a step, an evaluation, and a step."""
    trainer = make_trainer(f"{flags} --dropout 0.25 --layers 2")
    calls, found, functional = [], [], torch.nn.functional
    dropout, attention = hybrid.dropout, functional.scaled_dot_product_attention
    note = lambda kind, p: calls.append((kind, p, torch.get_rng_state().numpy().tobytes()))

    def recorded_dropout(x, p, training):
        note("residual", p if training else 0)
        return dropout(x, p, training)

    def recorded_attention(*arguments, dropout_p=0.0, **others):
        note("attention", dropout_p)
        return attention(*arguments, dropout_p=dropout_p, **others)

    def evaluate():
        data = hybrid.Data(*2 * [np.zeros(3 * T, np.uint8)])
        hybrid.evaluate(trainer, data, batches=1)

    train = lambda: trainer.step(*own_batch(trainer))
    with (
        patch.object(hybrid, "dropout", recorded_dropout),
        patch.object(functional, "scaled_dot_product_attention", recorded_attention),
    ):
        for use in (train, evaluate, train):
            use()
            found.append(calls[:])
            calls.clear()
    return found


def test_dropout_draws_the_same_masks_over_tp_except_in_attention_and_others_elsewhere():
    ranks = run(8, _dropout_states, "--tp 2 --dp 2 --pp 2 --microbatches 1")
    for trained, evaluated, again in ranks:
        assert {p for _, p, _ in trained} == {p for _, p, _ in again} == {0.25}
        assert evaluated and {p for _, p, _ in evaluated} == {0}
    first_stage = ["residual"] + ["attention", "residual", "residual"]  # embedding, and one layer
    assert [kind for kind, _, _ in ranks[0][0]] == first_stage
    assert [kind for kind, _, _ in ranks[4][0]] == first_stage[1:]
    states = lambda rank, kind: [state for k, _, state in ranks[rank][0] if k == kind]
    for tp_0 in range(0, 8, 2):
        assert states(tp_0, "residual") == states(tp_0 + 1, "residual")
        assert not set(states(tp_0, "attention")) & set(states(tp_0 + 1, "attention"))
    drawn = [state for rank in ranks[::2] for _, _, state in rank[0] + rank[2]]
    assert len(set(drawn)) == len(drawn)  # every use has a mask of its own, on all ranks


def test_dropout_draws_different_masks_for_every_seed_and_every_rank_of_a_split_sequence():
    ranks = run(4, _dropout_states, "--tp 2 --dp 2 --sp --microbatches 1")
    ranks += run(1, _dropout_states, f"--seed {SEED + 1}")
    drawn = [state for rank in ranks for _, _, state in rank[0] + rank[2]]
    # 5 ranks take 2 steps, in which the embedding has one dropout, and two layers have three each.
    assert len(set(drawn)) == len(drawn) == 5 * 2 * 7


@pytest.mark.parametrize("flags", ["", "--sp --dtype bf16"])
@on_ranks(2)
def test_recomputation_replays_the_masks_of_every_rank(flags):
    found = []
    for mode in ("none", "selective", "full", "full --recompute-layers 3"):
        trainer = make_trainer(f"--tp 2 --microbatches 2 --dropout 0.3 --recompute {mode} {flags}")
        trainer.step(*batch(0))
        found.append([parameter.grad.detach() for parameter in trainer.chunks[0].parameters()])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def _gradients(flags):
    trainer = make_trainer(flags)
    trainer.step(*own_batch(trainer))
    return [p.grad.detach() for chunk in trainer.chunks for p in chunk.parameters()]


@pytest.mark.parametrize("recompute", [soak("none"), "full"])
@on_ranks(2)
def test_a_layer_of_experts_in_parts_leaves_dropout_its_masks(recompute):
    flags = f"--ep 2 --experts 4 --shared-experts 1 --dropout 0.3 --recompute {recompute}"
    whole, parts = (_gradients(f"{flags} --expert-parts {parts}") for parts in (1, 3))
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-7)
    other = _gradients(f"{flags.replace('0.3', '0.31')} --expert-parts 1")
    assert (other[0] - whole[0]).abs().max() > 1e-5


RECOMPUTED = [(n, f"{MODELS['llama']} {flags}") for n, flags in DEGREES]
RECOMPUTED += [(n, f"{MODELS['shared']} {flags} --microbatches 2") for n, flags in WITH_EXPERTS]
IN_PLAIN = "--pp 2 --microbatches 4 --schedule zb-h1", "--cp 2 --cp-method ring", "--tp 2 --sp --ep"


@pytest.mark.parametrize(
    "world_size, flags",
    soak_but(lambda _, row: row[0] == 2 and any(part in row[1] for part in IN_PLAIN), RECOMPUTED),
)
def test_llamas_block_has_the_same_bits_with_recomputation_in_every_layout(world_size, flags):
    flags = re.sub(" --recompute.*(full|selective|3)", "", flags)
    if "--cp" not in flags:
        flags += " --dropout 0.3"
    ranks = run(world_size, _gradients, flags)
    for mode in ("selective", "full"):
        for stored, again in zip(ranks, run(world_size, _gradients, f"{flags} --recompute {mode}")):
            assert all(map(torch.equal, stored, again))


# ---- bf16 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pp, schedule", [(1, "1f1b"), (2, "zb-h1")])
def test_every_gradient_in_bf16_is_close_to_that_in_fp32(pp, schedule):
    flags = f"--dtype bf16 --pp {pp} --schedule {schedule} --microbatches 8"
    ([(loss, *_)], (found,), _), *_ = run(pp, train, flags, torch.float32, 1)
    results, gradients, _ = reference(torch.float32)
    assert loss == pytest.approx(results[0][0], rel=5e-3)
    assert_alike(found, gradients[0], 0.05)


@pytest.mark.parametrize("zero", [1, 2, 3])
@on_ranks(2)
def test_in_bf16_a_router_is_gathered_and_computes_in_fp32(zero):
    """The bytes are those of all weights in 16 bits, and of the routers' in 32."""
    flags = f"--dp 2 --zero {zero} --dtype bf16 --experts 4 --microbatches 1"
    seen, linear = [], FullPrecisionLinear.forward

    def look(ctx, x, weight):
        seen.append(weight.clone())
        return linear(ctx, x, weight)

    with patch.object(FullPrecisionLinear, "forward", look):
        trainer, traffic = _second_step(flags)
    (stage,) = trainer.stages
    routers = {flat for flat in stage.flats if any("router" in name for name in flat.names)}
    assert len(routers) == LAYERS and all(len(flat.names) == 1 for flat in routers)
    length = lambda flats: sum(flat.layout.length for flat in flats)
    nbytes = 4 * length(routers) + 2 * length(set(stage.flats) - routers)
    gathers = zero_rounds(zero)[1]
    assert traffic.bytes("all_gather_single") == gathers * reduce_scatter_bytes(nbytes, 2)
    assert len(seen) == 2 * LAYERS  # of two steps
    assert all(weight.dtype == torch.float32 for weight in seen)
    assert all((weight.bfloat16() != weight).any() for weight in seen)


# ---- messages ------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_gradients_of_ddp_are_added_to_its_buckets_without_a_copy():
    trainer, taken = make_trainer("--dp 2 --zero 0"), []
    trainer.step(*own_batch(trainer))

    def take(bucket, parameter, slot, right=GradBucket.take):
        taken.append(parameter.grad is slot)
        right(bucket, parameter, slot)

    with patch.object(GradBucket, "take", take):
        trainer.step(*own_batch(trainer))
    assert taken and all(taken)


def _second_step(flags):
    """Return a trainer and the traffic of its second step. The first step also sends shapes."""
    trainer = make_trainer(flags)
    trainer.step(*own_batch(trainer))
    with least_bytes(), count_bytes() as traffic:
        trainer.step(*own_batch(trainer))
    return trainer, traffic


@on_ranks(4)
def test_a_step_sends_the_bytes_of_the_papers_and_a_few_numbers():
    in_all = lambda traffic, group: sum(gather_objects(traffic.bytes(group=group)))
    trainer, traffic = _second_step("--dp 4 --vocab-size 68 --zero 0")
    counters = 2 * 3 * (4 + 8)  # all ranks sum the loss (4 bytes) and the number of tokens
    claimed = 4 * ddp_bytes(trainer.chunks[0], 4) + counters
    assert in_all(traffic, trainer.mesh.dp_cp_group) == claimed

    trainer, traffic = _second_step("--tp 4 --microbatches 1 --grad-clip 0")
    layers = LAYERS * tensor_parallel_layer_bytes(BATCH, T, HIDDEN, 4)
    ends = 2 * 2 * 3 * BATCH * T * HIDDEN * 4 // 4  # the embedding's output, the head's input
    loss = 2 * 3 * 3 * BATCH * T * 4 // 4  # a maximum, a sum, and the target's logit
    norm = 2 * 3 * 8  # all ranks sum one number
    assert in_all(traffic, trainer.mesh.tp_group) == 4 * (layers + ends + loss) + norm

    trainer, traffic = _second_step("--pp 4 --microbatches 4")
    stage, microbatch = dist.get_rank(), BATCH // 4 * T * HIDDEN * 4
    assert traffic.bytes("exchange") == pipeline_bytes(stage, 4, 4, microbatch)
    if stage in (0, 3):
        assert traffic.bytes(group=trainer.mesh.embedding_group) == V * HIDDEN * 4

    trainer, traffic = _second_step("--dp 4 --zero 1 --replicate 2")  # shards are all-reduced, too
    rows = [row.layout.length for row in trainer.stages[0].flats]
    assert traffic.bytes(group=trainer.mesh.replicate_group) == sum(4 * n // 2 for n in rows)


@on_ranks(4)
def test_zero_bubble_schedules_defer_the_weight_product_of_every_matrix():
    trainer = make_trainer("--tp 2 --pp 2 --schedule zb-h1 --microbatches 4")
    perform, found = trainer.pipeline.perform, set()

    def look_before_a_product(action, *given):
        for chunk in trainer.chunks if action.kind == "W" and not found else ():
            has_some = lambda p: p.grad is not None and p.grad.detach().any()
            found.update(name for name, p in chunk.named_parameters() if has_some(p))
        return perform(action, *given)

    trainer.pipeline.perform = look_before_a_product
    trainer.step(*batch(0))
    others = ("ln_", "wte", "wpe", "bias")
    assert found and all(any(other in name for other in others) for name in found)


@on_ranks(4)
def test_a_layer_that_tp_splits_computes_while_its_neighbours_flats_travel():
    trainer, pending, found = make_trainer("--tp 2 --dp 2 --zero 3"), set(), []

    def listen(event, operation, *_):
        if event == "begin" and operation.async_op:
            pending.add(operation)
        elif event == "wait":
            pending.discard(operation)

    def note(*_):
        names = [operation.name for operation in pending]
        found.append([names.count("all_gather_single"), names.count("reduce_scatter_single")])

    for layer in trainer.chunks[0].transformer["h"].values():
        layer.mlp.c_fc.register_full_backward_hook(note)
    with observe(listen):
        trainer.step(*own_batch(trainer))
    assert found == [[2, 0], [2, 2], [2, 2], [0, 2]]  # gathers and sums of two flats


@pytest.mark.parametrize("flags", [soak("--dp 4"), "--tp 2 --sp --cp 2 --zero 3", soak("--dp 2 --pp 2")])
@on_ranks(4)
def test_a_step_gives_the_same_loss_over_the_backends_own_collectives(flags):
    losses, posted = [], []
    for whose in ("ours", "backend"):
        trainer, events = make_trainer(f"{flags} --collectives {whose}", torch.float64), []
        with observe(lambda event, *_: events.append(event)):
            losses.append(trainer.step(*own_batch(trainer))["loss"])
        posted.append(events.count("post"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    # Exchanges between neighbours remain ours.
    assert posted[1] < posted[0] and (posted[1] > 0) == ("dp 4" not in flags)


@pytest.mark.parametrize("flags", ["", "--moments bf16"])
@on_ranks(2)
def test_the_host_reads_from_the_device_once_a_step_and_once_a_batch_of_validation(flags):
    trainer = make_trainer(f"--pp 2 --schedule zb-h1 --microbatches 2 {flags}")
    data = hybrid.Data(*2 * [np.zeros(30 * BATCH * T, np.uint8)])
    with waits() as step:
        trainer.step(*own_batch(trainer))
    with waits() as evaluation:
        hybrid.evaluate(trainer, data, batches=3)
    reads = lambda found: (found["tolist"], found["_local_scalar_dense"])
    assert reads(step) == (1, 0)
    assert reads(evaluation) == (0, 3)


# ---- mesh ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp, cp, ep", [(4, 1, 1), (1, 4, 4), (1, 4, 1), (2, 2, 2), (4, 1, 2)])
@on_ranks(4)
def test_gradients_have_communicators_of_their_own(dp, cp, ep):
    groups = vars(make_trainer(f"--dp {dp} --cp {cp} --ep {ep} --experts 4 --seq-len 16").mesh)
    own = {n: groups.pop(n) for n in list(groups) if n in hybrid.GRADIENT_GROUPS}
    large = [group for group in own.values() if dist.get_world_size(group) > 1]
    assert not any(group in large for group in groups.values())
    assert (own["dp_cp_group"] is own["expert_dp_group"]) == (ep == 1)
    assert own["shard_group"] is own["dp_cp_group"]


@pytest.mark.parametrize("kind, backend", [("cuda", "nccl"), ("shared", None), ("cpu", None)])
@on_ranks(4)
def test_on_gpus_groups_use_nccl_at_high_priority_and_a_group_of_one_uses_gloo(kind, backend):
    """The world's backend is gloo, and so is that of a group for which none is given."""
    made = {}
    new_group = dist.new_group

    def record(ranks, timeout, backend=None, options=None, device_id=None, **local):
        group = new_group(ranks, timeout, **local)
        made[group] = backend, options and vars(options), device_id
        return group

    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", dist.get_rank())
    args = hybrid.parse(f"--dp 2 --tp 2 --timeout 7 --device {kind}".split(), 4)
    with (
        patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), create=1),
        patch.object(dist, "new_group", record),
    ):
        mesh = hybrid.make_mesh(args, device=device)
    dist.barrier()  # no rank leaves while another connects to it
    options = {"is_high_priority_stream": True, "_timeout": timedelta(seconds=7)}
    expected = (backend, options, device) if backend else (None, None, None)
    groups = vars(mesh)
    assert len(groups) == len(hybrid.slices_of(1, 2, 1, 2))
    for name, group in groups.items():
        alone = (None, None, None)
        assert made[group] == (alone if dist.get_world_size(group) == 1 else expected), name
    assert mesh.dp_group is mesh.dp_cp_group is mesh.shard_group and mesh.ep_group is mesh.pp_group
    assert dist.get_backend(mesh.pp_group) == "gloo"


SLICES = [  # (pp, dp, cp, tp, ep, nodes of ep, copies of shards), slices that contain rank 5 of 8
    ((2, 1, 2, 2), {"tp": [4, 5], "cp": [5, 7], "dp_cp": [5, 7], "pp": [1, 5]}),
    ((1, 2, 2, 2), {"tp": [4, 5], "dp": [1, 5], "dp_cp": [1, 3, 5, 7], "embedding": [5]}),
    ((2, 2, 1, 2), {"dp": [5, 7], "embedding": [1, 5]}),
    ((8, 1, 1, 1), {"pp": [*range(8)], "embedding": []}),
    ((1, 8, 1, 1, 2), {"ep": [4, 5], "expert_dp": [1, 3, 5, 7], "expert_shard": [1, 3, 5, 7]}),
    ((1, 8, 1, 1, 2, 1, 2), {"shard": [4, 5, 6, 7], "replicate": [1, 5], "expert_shard": [5, 7]}),
    ((1, 8, 1, 1, 4, 1, 4), {"shard": [4, 5], "expert_shard": [5], "expert_replicate": [1, 5]}),
    ((1, 4, 1, 2, 4), {"ep": [4, 5, 6, 7], "expert_dp": [1, 5], "expert_tp": [5]}),
    ((1, 2, 1, 4, 2), {"ep": [4, 5], "expert_dp": [1, 5], "expert_tp": [5, 7]}),
    ((1, 4, 1, 2, 8, 1, 2), {"ep": [*range(8)], "expert_dp": [5], "replicate": [1, 5]}),
    ((1, 8, 1, 1, 4, 2), {"ep": [4, 5, 6, 7], "node": [4, 5], "cross": [5, 7]}),
]


@pytest.mark.parametrize("degrees, expected", SLICES)
def test_tp_is_the_innermost_axis_then_cp_dp_pp_and_ep_reuses_tp_and_then_dp(degrees, expected):
    for name, ranks in expected.items():
        slices = hybrid.slices_of(*degrees)[f"{name}_group"].tolist()
        assert sum((ranks for ranks in slices if 5 in ranks), []) == ranks, name
        assert name == "embedding" or sorted(sum(slices, [])) == [*range(8)]


def test_an_ep_that_does_not_divide_tp_takes_their_common_divisor_from_tp_and_the_rest_from_dp():
    """Each rank is in one group of each kind."""
    for (dp, tp, ep), expected in (
        ((2, 6, 4), [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]),
        ((3, 2, 3), [[0, 2, 4], [1, 3, 5]]),
    ):
        slices = hybrid.slices_of(1, dp, 1, tp, ep)
        for name in ("ep_group", "expert_dp_group", "expert_tp_group"):
            assert sorted(slices[name].flatten().tolist()) == [*range(dp * tp)], name
        assert slices["ep_group"].tolist() == expected


def test_experts_have_as_many_copies_of_shards_as_their_ranks_allow():
    """With dp 6 and ep 2, three ranks have the same experts, which two copies do not divide."""
    slices = hybrid.slices_of(1, 6, 1, 1, 2, 1, 2)
    assert slices["replicate_group"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert slices["expert_shard_group"].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert slices["expert_replicate_group"].tolist() == [[rank] for rank in (0, 2, 4, 1, 3, 5)]


@pytest.mark.parametrize(
    "per_node, flags, expected",
    [
        (8, "--pp 2 --dp 2 --tp 2", [2, 2, 2]),
        (4, "--pp 2 --dp 2 --tp 2", [2, 2, 1]),
        (3, "--dp 8", [1, 1, 1]),  # if nodes have different numbers of ranks, it is 1
        (3, "--dp 2 --tp 4", [1, 1, 1]),  # and if groups do: 3 + 1 ranks here, 2 + 2 there
    ],
)
@on_ranks(8)
def test_every_group_of_the_mesh_is_given_its_ranks_per_node(per_node, flags, expected):
    told = {}
    with patch.object(hybrid, "set_ranks_per_node", lambda n, group: told.update({group: n})):
        mesh = hybrid.make_mesh(hybrid.parse(flags.split(), 8, per_node))
    dist.barrier()  # no rank leaves while another connects to it
    assert [told[mesh.tp_group], told[mesh.dp_cp_group], told[mesh.pp_group]] == expected


@pytest.mark.soak
@on_ranks(8)
def test_replicas_keep_equal_bits_if_their_tp_groups_lie_differently_on_nodes():
    """With 3 ranks per node, one tp group has 3 + 1 ranks on its nodes, and the other one 2 + 2."""
    flags = "--tp 4 --dp 2 --sp --zero 0 --hidden 512 --batch-size 4 --seq-len 16"
    args = hybrid.parse(flags.split(), 8, 3)
    trainer = hybrid.Trainer(args, hybrid.make_mesh(args), torch.device("cpu"))
    tokens = torch.randint(args.vocab_size, (4, 17))[trainer.own_rows()]
    trainer.step(tokens[:, :-1], tokens[:, 1:])
    hybrid.require_equal_copies(trainer)


# ---- evaluation and the loop ---------------------------------------------------------------------


def _evaluate(flags):
    trainer = make_trainer(flags, torch.float64)
    for parameter in trainer.chunks[0].parameters():  # make the model's outputs less uniform
        parameter.data *= 5
    tokens = np.random.default_rng(shifted(0)).integers(0, V, 99).astype(np.uint8)
    data = hybrid.Data(tokens[::-1], tokens)
    loss = hybrid.evaluate(trainer, data, batches=3)
    return loss, gathered(trainer), data


def _plain_loss(model, data, batches, seed):
    """Return the mean loss per token over batches of the validation part."""
    losses = []
    for index in range(batches):
        inputs, targets = data.batch(index, BATCH, T, seed, part="validation")
        with torch.no_grad():
            losses.append(cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item())
    return sum(losses) / batches


MIXTURE = "--experts 4 --top-k 2 --hidden 16 --heads 4 --layers 2 --microbatches 1"
DENSE = "--microbatches 2"
FEW = [(2, "--dp 2 --zero 3"), (3, "--cp 3"), (4, "--cp 2 --pp 2"), (4, "--pp 2 --tp 2 --sp")]
FEW += [(2, "--pp 2 --schedule dualpipe --microbatches 4")]
OF_EXPERTS = [(2, "--dp 2 --ep 2"), (4, "--cp 2 --dp 2 --ep 4"), (4, "--tp 2 --pp 2")]


@pytest.mark.parametrize("model, layouts", [(DENSE, FEW), (MIXTURE, OF_EXPERTS)])
def test_evaluation_does_not_depend_on_the_layout(model, layouts):
    loss, state, data = run(1, _evaluate, model)[0]
    if model != MIXTURE:
        plain = plain_gpt(*SIZES)
        plain.load_state_dict(state, strict=False)  # the state has no head, which is tied
        assert loss == pytest.approx(_plain_loss(plain, data, 3, SEED), rel=1e-12)
    for world_size, flags in layouts:
        for found, _, _ in run(world_size, _evaluate, f"{model} {flags}"):
            assert found == pytest.approx(loss, rel=1e-12), flags


def _watch_the_loop(folder, flags):
    """Return the losses in the metrics, and the printed text."""
    printed = io.StringIO()
    with (
        patch.object(hybrid, "time", SimpleNamespace(perf_counter=itertools.count().__next__)),
        redirect_stdout(printed),
    ):
        metrics = train_on_text(f"{flags} --seed {SEED + 2}", folder)
    lines = [line for line in metrics if "loss" in line]
    assert all(line["tokens_per_s"] == BATCH * T for line in lines)
    return [line["loss"] for line in lines], printed.getvalue()


def test_the_loop_trains_on_every_row_of_every_step_and_validates(tmp_path):
    alone = run(1, _watch_the_loop, tmp_path, "--dp 1")
    others = run(4, _watch_the_loop, tmp_path, "--dp 2 --tp 2 --microbatches 2")
    data = hybrid.load_data(tmp_path / "text", T, V)
    model = plain_gpt(*SIZES, seed=SEED + 2)
    training = ReferenceTraining(model, RATES, 0.2, 0.5)
    batches = [data.batch(step, BATCH, T, SEED + 2) for step in range(STEPS)]
    expected = [training.step(*batch)[0] for batch in batches]
    loss = _plain_loss(model, data, 8, SEED + 2)
    for losses, printed in (alone[0], others[0]):
        assert losses == pytest.approx(expected, rel=1e-11)
        assert f"\nvalidation loss {loss:.4f} after step {STEPS}\n" in printed
    assert not any(losses or printed for losses, printed in others[1:])  # only rank 0 prints


@pytest.mark.parametrize("flags", ["--dp 2 --tp 2", "--cp 2 --pp 2 --microbatches 2"])
@on_ranks(4)
def test_a_token_outside_the_vocabulary_stops_every_rank_and_changes_no_weight(flags):
    """read_data() refuses it before training. A caller of step() finds that no loss is finite."""
    trainer = make_trainer(f"{flags} --data X.bin")
    trainer.step(*own_batch(trainer))
    inputs, targets = batch(1)
    targets[-1, -1] = V + 5
    parameters = [p for chunk in trainer.chunks for p in chunk.parameters()]
    weights = [parameter.detach().clone() for parameter in parameters]
    with pytest.raises(hybrid.TrainingError, match="step 2 is not finite"):
        trainer.step(*(tensor[trainer.own_rows()] for tensor in (inputs, targets)))
    assert all(before.equal(now.detach()) for before, now in zip(weights, parameters))
    tokens = np.array([*range(T), V])  # room for one sequence
    assert math.isnan(hybrid.evaluate(trainer, hybrid.Data(tokens, tokens)))


@pytest.mark.parametrize("zero", [soak(0), 1])
@on_ranks(4)
def test_a_layer_that_is_not_marked_for_the_sum_over_tp_is_named_on_all_ranks(zero):
    """It is on the last stage only, so the ranks of the first one see no fault themselves."""
    trainer = make_trainer(f"--tp 2 --sp --pp 2 --experts 4 --zero {zero}", torch.float64)
    trainer.step(*own_batch(trainer))
    hybrid.require_equal_gradients(trainer)
    placements = trainer.placements
    for names in ("ln_f.weight", "ln_f.bias"), ("h.3.mlp.experts.w_in", "h.3.mlp.experts.w_out"):
        faulty = [f"transformer.{name}" for name in names]
        trainer.placements = [
            replace(row, sum_over_tp=row.sum_over_tp and row.name not in faulty)
            for row in placements
        ]
        trainer.step(*own_batch(trainer))
        sentence = f"gradients of {', '.join(faulty)} differ between ranks of tp"
        with pytest.raises(hybrid.TrainingError, match=sentence) as found:
            hybrid.require_equal_gradients(trainer)
        assert found.value.status == 1


@on_ranks(2)
def test_a_training_whose_gradients_differ_over_tp_ends_in_its_first_step():
    args = hybrid.parse(f"{FLAGS} --tp 2 --sp --vocab-size 256".split(), 2)
    with (
        patch.object(hybrid, "mark_sum_over_tp", lambda module: module),
        redirect_stdout(io.StringIO()) as printed,
        pytest.raises(hybrid.TrainingError, match="gradients of .*ln_1.weight.* differ between"),
    ):
        hybrid.train(args, torch.device("cpu"))
    assert "step 1" not in printed.getvalue()


def _tamper(trainer, rank, name):
    """Set one element of a tensor to nan on that rank; return a function that undoes it."""
    if dist.get_rank() != rank:
        return lambda: None
    named = [(*chunk.named_parameters(), *chunk.named_buffers()) for chunk in trainer.chunks]
    own = [x.data for other, x in sum(named, ()) if other.endswith(name) and len(x)][-1]
    element, before = own.view(torch.int32).view(-1)[len(own) // 2], own.clone()
    element.fill_(0x7FC00000)
    return lambda: own.copy_(before)


def _whole_state(trainer):
    """Return copies of everything that a step may change on this rank."""
    tensors = [x for state in trainer.optimizer.state.values() for x in state.values()]
    for chunk in trainer.chunks:
        tensors += chunk.state_dict().values()
        tensors += [module.counts for module in chunk.modules() if hasattr(module, "counts")]
    return [tensor.clone() for tensor in tensors]


MIXED_BY_BIAS = "--layers 2 --experts 4 --balance bias"


@pytest.mark.parametrize(
    "flags, names",
    [
        (f"--dp 2 --tp 2 --zero 0 {MIXED_BY_BIAS}", ["ln_2.bias"]),
        ("--dp 4 --replicate 2 --zero 3 --dtype bf16 --moments bf16", ["weight"]),
        soak(f"--zero 0 --pp 2 --dp 2 --ep 2 {MIXED_BY_BIAS}", ["router.weight", "experts.w_in"]),
        soak("--pp 2 --cp 2 --dtype bf16 --replicate 2", ["c_fc.bias"]),
        soak(f"--replicate 2 --tp 2 --dp 2 {MIXED_BY_BIAS} --dtype bf16", ["router.weight"]),
        soak(f"--zero 2 --dp 4 --ep 2 {MIXED_BY_BIAS}", ["weight", "experts.w_out"]),
    ],
)
@on_ranks(4)
def test_a_step_that_is_not_finite_stops_all_ranks_and_changes_nothing(flags, names):
    trainer, other = make_trainer(flags), make_trainer(flags)
    assert trainer.step(*own_batch(trainer)) == other.step(*own_batch(other))
    for name in names:
        undo = _tamper(trainer, 3, name)
        sentence = "^step [0-9] is not finite: loss nan, grad norm nan$"
        with pytest.raises(hybrid.TrainingError, match=sentence):
            trainer.step(*own_batch(trainer, 1))
        undo()
        for stage in trainer.stages:
            if hasattr(stage, "reshard"):
                stage.reshard()  # rank 3 alone has changed weights, but all must gather them again
        assert trainer.step(*own_batch(trainer, 2)) == other.step(*own_batch(other, 2))
        states = _whole_state(trainer), _whole_state(other)
        assert len(states[0]) > 20 and all(map(torch.equal, *states))


def _rates(flags, steps):
    args = hybrid.parse(f"--steps {steps} --lr 1 {flags}".split(), 1)
    return [hybrid.learning_rate(step, args) for step in range(steps)]


def test_the_learning_rate_warms_up_stays_and_decays():
    all_warm_up = _rates("--warmup 4", 4)
    assert all_warm_up == pytest.approx([0.2, 0.4, 0.6, 0.8])
    linear = _rates("--warmup 1 --decay-steps 4 --lr-decay linear --min-lr 0.2", 8)
    assert linear == pytest.approx([0.5, 1, 1, 1, 1, 0.8, 0.6, 0.4])
    cosine = _rates("--warmup 0 --decay-steps 4 --min-lr 0", 6)
    assert cosine == pytest.approx([1, 1, 1, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2])
    assert _rates("--warmup 2 --lr-decay none", 5) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])


def test_by_default_the_learning_rate_falls_to_a_tenth_along_a_cosine():
    args = hybrid.parse("--steps 300 --lr 2e-4".split(), 1)
    for step in range(20, 301):
        angle = math.pi * ((step - 20) / 280)
        expected = 2e-4 * (0.1 + 0.45 * (1 + math.cos(angle)))
        assert hybrid.learning_rate(step, args) == expected  # the same bits


# ---- data ----------------------------------------------------------------------------------------


def test_batches_depend_on_seed_and_step_and_shift_targets_by_one():
    tokens = np.arange(1000, dtype=np.uint16)
    data = hybrid.Data(tokens, tokens)
    inputs, targets = data.batch(7, 8, T, SEED)
    assert torch.equal(targets, inputs + 1) and inputs.shape == (8, T)
    parts = [data.batch(7, 8, T, SEED, slice(row, row + 2))[0] for row in range(0, 8, 2)]
    assert torch.equal(torch.cat(parts), inputs)
    several = [inputs, data.batch(8, 8, T, SEED)[0], data.batch(7, 8, T, SEED + 1)[0]]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(several, 2))
    longest = hybrid.Data(tokens[: T + 1], tokens)  # room for one sequence
    assert torch.equal(longest.batch(0, 3, T, 0)[0], torch.arange(T).repeat(3, 1))


def test_data_may_be_a_text_file_a_folder_or_a_file_of_tokens(tmp_path):
    text = tmp_path / "folder" / "a.md"
    text.parent.mkdir()
    text.write_text("gr\u00fcn " * 100)
    data = hybrid.load_data(text, 8)
    assert bytes(data.train) + bytes(data.validation) == text.read_bytes()
    (text.parent / "b.c").write_text("int main;" * 50)
    (text.parent / ".z").write_text("hidden" * 50)
    data = hybrid.load_data(text.parent, 8)
    joined = text.read_bytes() + b"\n" + b"int main;" * 50
    assert bytes(data.train) + bytes(data.validation) == joined
    for dtype, vocab_size in ((np.uint16, 2**16), (np.uint32, 2**16 + 1)):
        tokens = np.arange(500).astype(dtype)
        tokens.tofile(tmp_path / "train.bin")
        tokens[::-1].tofile(tmp_path / "val.bin")
        data = hybrid.load_data(tmp_path / "train.bin", 8, vocab_size)
        assert isinstance(data.train, np.memmap) and len(data.validation) == 50
        np.testing.assert_array_equal(np.concatenate([data.train, data.validation]), tokens)
        data = hybrid.load_data(tmp_path, 8, vocab_size)  # a folder that nanoGPT prepared
        assert isinstance(data.train, np.memmap)
        np.testing.assert_array_equal([data.train, data.validation], [tokens, tokens[::-1]])
        assert data.batch(0, 2, 8, 0)[0].dtype == torch.int64
