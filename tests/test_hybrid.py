"""hybrid.py: every layout trains as one process does; data, command line, log, and refusals."""

import functools
import io
import itertools
import json
import math
import os
import re
import resource
import signal
import threading
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.run
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

import hybrid
import zero as zero_module
from collectives import count_bytes, gather_objects, observe
from ddp import ddp_bytes
from ledger import memory_ledger
from nccl_replay import record, replay
from pipeline import SCHEDULES, interleaved, pipeline_bytes
from ranks import least_bytes, on_ranks, run, spawn
from reference_gpt import MLP as ReferenceMLP
from reference_gpt import MoE as ReferenceMoE
from reference_gpt import ReferenceGPT, ReferenceTraining
from tensor_parallel import tensor_parallel_layer_bytes
from verify import gathered
from zero import zero_bytes, zero_memory

STEPS, BATCH, LAYERS, HIDDEN, HEADS, T, V = 5, 16, 4, 32, 8, 12, 67
RUN = 3  # of these steps
FLAGS = f"--layers {LAYERS} --hidden {HIDDEN} --heads {HEADS} --seq-len {T} --vocab-size {V}"
FLAGS += f" --batch-size {BATCH} --steps {STEPS} --lr 0.003 --warmup 2 --weight-decay 0.2"
FLAGS += " --grad-clip 0.5 --seed 3"
SIZES = [LAYERS, HIDDEN, HEADS, T, V]
# Warm-up to 0.003 in 2 steps, then a cosine to 0.0003 over the 3 that are left.
RATES = [0.001, 0.002, *(0.0003 + 0.00135 * (1 + math.cos(math.pi * k / 3)) for k in range(3))]

# ---- one process, and any layout -----------------------------------------------------------------


def batch(step):
    """A global batch with uncounted tokens: scattered, and whole sequences of the first ranks."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(V, (BATCH, T + 1), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    ignored = torch.rand(BATCH, T, generator=generator, dtype=torch.float32) < 0.2
    targets[ignored] = hybrid.IGNORE_INDEX
    targets[: BATCH // 8] = hybrid.IGNORE_INDEX  # with dp = 8 rank 0 has nothing to count
    return inputs.contiguous(), targets


def own_batch(trainer, step=0):
    """This rank's rows of it."""
    return [tokens[trainer.own_rows()] for tokens in batch(step)]


def plain_gpt(layers, *sizes, dtype=torch.float64, seed=3, **options):
    """The oracle, with the initial values that hybrid says it has."""
    torch.set_default_dtype(dtype)
    model = ReferenceGPT(layers, *sizes, **options)
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(hybrid.initial_value(name, p.shape, layers, seed))
    return model


METRICS = "loss", "grad_norm", "lr", "expert_load", "expert_dropped", "balance_loss", "z_loss"


def expert_metrics(model):
    """Those of the last forward of a plain GPT of experts."""
    mixtures = [module for module in model.modules() if isinstance(module, ReferenceMoE)]
    if not mixtures:
        return []
    choices = sum(layer.counts.sum().item() for layer in mixtures)
    load = max(layer.counts.max() / layer.counts.mean() for layer in mixtures).item()
    found = [load, sum(layer.dropped for layer in mixtures) / choices]
    if any(mixtures[0].coefficients):
        for losses in ([m.balance for m in mixtures], [m.z for m in mixtures]):
            found.append(sum(losses).item() / len(losses))
    return found


def train_plainly(model, steps=RUN, after_step=lambda: None):
    """METRICS and gradients per step, and the final weights, of one plain process."""
    training, results, gradients = ReferenceTraining(model, RATES, 0.2, 0.5), [], []
    for step in range(steps):
        results.append((*training.step(*batch(step)), RATES[step], *expert_metrics(model)))
        gradients.append(training.gradients)
        after_step()
    return results, gradients, model.state_dict()


@functools.cache
def reference(dtype, layers=LAYERS, kv_heads=None):
    """What train_plainly() returns of the GPT of FLAGS."""
    return train_plainly(plain_gpt(layers, *SIZES[1:], dtype=dtype, kv_heads=kv_heads))


def make_trainer(flags, dtype=torch.float32, device=torch.device("cpu")):
    torch.set_default_dtype(dtype)
    words = f"{FLAGS} {flags}".split()
    per_node = None
    if "NODES" in words:  # the ranks of ep are those of two nodes
        words.remove("NODES")
        per_node = int(words[words.index("--ep") + 1]) // 2
    args = hybrid.parse(words, dist.get_world_size(), per_node)
    return hybrid.Trainer(args, hybrid.make_mesh(args), device)


def record_gradients(trainer):
    """A list that each step adds to: every gradient by name, whole, before clipping."""
    found, clip = [], trainer.clip_gradients

    def record_then_clip():
        found.append(gathered(trainer, lambda parameter: parameter.grad))
        return clip()

    trainer.clip_gradients = record_then_clip
    return found


def _train(flags, dtype, steps=RUN):
    """What train_plainly() returns, from one layout."""
    trainer = make_trainer(flags, dtype)
    gradients, results = record_gradients(trainer), []
    for step in range(steps):
        metrics = trainer.step(*own_batch(trainer, step))
        results.append([metrics[name] for name in METRICS if name in metrics])
    state = gathered(trainer)
    return (results, gradients, state) if dist.get_rank() == 0 else (results, None, None)


def assert_alike(found, expected, tolerance):
    """The same names, and each tensor differs by at most `tolerance` of its norm."""
    expected = {n: tensor for n, tensor in expected.items() if n != "lm_head.weight"}  # it is wte
    assert {name for name in found if not name.endswith("router.bias")} == expected.keys()
    D = len(expected["transformer.ln_f.weight"])
    for name, tensor in expected.items():
        difference = found[name] - tensor
        if name.endswith("c_attn.bias"):  # that of the keys has no gradient but rounding error
            difference[D : (D + len(difference)) // 2] = 0
        error = (difference.norm() / tensor.norm()).item()
        assert error <= tolerance, f"{name} differs by {error:.1e} of its norm"


def _assert_all_alike(ranks, expected, loss_error, gradient_error, weight_error, steps=RUN):
    """Of what _train() returned: the gradients of so many steps."""
    results, gradients, state = expected
    for found, _, _ in ranks:  # the reported loss and norm are the global ones, everywhere
        np.testing.assert_allclose(found, results, rtol=loss_error)
    assert len(ranks[0][1]) == len(gradients)
    for found, wanted in zip(ranks[0][1][:steps], gradients):
        assert_alike(found, wanted, gradient_error)
    assert_alike(ranks[0][2], state, weight_error)


def _assert_trains(world_size, flags, dtype, loss_error, gradient_error, weight_error, steps=RUN):
    ranks = run(world_size, _train, flags, dtype)
    args = hybrid.parse(f"{FLAGS} {flags}".split(), world_size)
    errors = loss_error, gradient_error, weight_error
    _assert_all_alike(ranks, reference(dtype, args.layers, args.kv_heads), *errors, steps)


# ---- every layout --------------------------------------------------------------------------------


def layouts(world_size):
    """Flags of every product dp x pp x tp, up to 4 ranks with both schedules of a pipeline."""
    for pp, tp in itertools.product((1, 2, 4, 8), repeat=2):
        dp = world_size // (pp * tp)
        if pp * tp * dp == world_size:
            rest = f"--microbatches {min(4, BATCH // dp)}{' --layers 8' if pp == 8 else ''}"
            for schedule in ("gpipe", "1f1b") if pp > 1 and world_size < 8 else ("1f1b",):
                yield f"--dp {dp} --pp {pp} --tp {tp} --schedule {schedule} {rest}"


EVERY_LAYOUT = [(world_size, flags) for world_size in (1, 2, 4, 8) for flags in layouts(world_size)]
EVERY_LAYOUT += [
    (
        pp * dp * tp,
        f"--dp {dp} --pp {pp} --tp {tp} --schedule {schedule} --microbatches {m} --layers {layers}",
    )
    for schedule in SCHEDULES
    if schedule not in ("gpipe", "1f1b")
    for pp, dp, tp, m, layers in ((1, 1, 1, 4, 4), (2, 2, 2, 4, 4), (4, 2, 1, 8, 8))
    if schedule != "dualpipe" or pp > 1
]
EVERY_LAYOUT += [
    (2, "--tp 2 --sp --microbatches 2"),
    (2, "--tp 1 --dp 2 --sp --recompute full"),
    (4, "--tp 4 --sp --recompute selective"),
    (8, "--tp 4 --dp 2 --sp --microbatches 2"),
    (8, "--tp 2 --pp 2 --dp 2 --sp --recompute full --schedule zb-h1 --microbatches 4"),
    (8, "--tp 2 --pp 4 --sp --recompute selective --schedule interleaved --layers 8"),
    (8, "--tp 2 --pp 2 --dp 2 --sp --schedule dualpipe --microbatches 4"),
    *((2, f"--cp 2 --cp-method {m} --microbatches 2") for m in hybrid.CP_METHODS),
    (3, "--cp 3 --microbatches 4"),
    (6, "--cp 6 --microbatches 2 --cp-method allgather"),
    (4, "--cp 2 --tp 2 --sp --cp-method ulysses --recompute full"),
    (4, "--cp 2 --dp 2 --recompute selective"),
    (8, "--cp 2 --dp 2 --tp 2 --cp-method allgather"),
    *((8, f"--zero 1 --dp 2 --cp 2 --tp 2 --sp --cp-method {m}") for m in hybrid.CP_METHODS),
    *((2, f"--zero {zero} --dp 2 --microbatches 2") for zero in (0, 1, 2, 3)),
    *((1, f"--zero {zero} --microbatches 2 --recompute full") for zero in (1, 2, 3)),
    *((3, f"--zero {zero} --cp 3 --microbatches 2") for zero in (1, 2, 3)),
    *(
        (4, f"--zero {zero} --dp 2 --pp 2 --microbatches 4 --schedule {schedule}")
        for schedule in SCHEDULES
        for zero in (1, 2, 3)
    ),
    *((4, f"--zero {zero} --dp 2 --tp 2 --sp --recompute full") for zero in (1, 2, 3)),
    *((4, f"--zero {zero} --dp 4 --replicate 2 --microbatches 2") for zero in (1, 2, 3)),
    (6, "--zero 3 --dp 2 --cp 3 --replicate 3 --kv-heads 2"),
    (8, "--zero 2 --dp 2 --tp 2 --pp 2 --schedule dualpipe --microbatches 4 --recompute selective"),
    (8, "--zero 3 --dp 4 --replicate 2 --pp 2 --schedule zb-v --microbatches 4 --kv-heads 4"),
    (8, "--cp 2 --pp 2 --tp 2 --sp --schedule zb-h1 --microbatches 4"),
    (8, "--cp 2 --pp 2 --dp 2 --schedule dualpipe --microbatches 4 --cp-method ulysses"),
    # stages of 1, 2 and 1 layers; and of 1, 2, 2, 2, 1
    (3, "--pp 3 --schedule 1f1b --microbatches 4"),
    (1, "--pp 1 --schedule interleaved --chunks 5 --microbatches 2 --layers 8"),
]


def soak_but(wanted, rows):
    """Parameters for a test: of all rows, those that are not wanted(number, row) are a soak."""
    marks = lambda i, row: () if wanted(i, row) else pytest.mark.soak
    return [pytest.param(*row, marks=marks(i, row)) for i, row in enumerate(rows)]


@pytest.mark.parametrize(
    "world_size, flags", soak_but(lambda i, row: row[0] < 4 or i % 6 == 0, EVERY_LAYOUT)
)
def test_every_layout_trains_as_one_process_does(world_size, flags):
    _assert_trains(world_size, flags, torch.float64, 1e-11, 1e-9, 1e-9)


IN_FP32 = [row for row in EVERY_LAYOUT if row[0] == 2]


@pytest.mark.parametrize("world_size, flags", soak_but(lambda i, row: i % 3 == 0, IN_FP32))
def test_layouts_train_in_fp32_too(world_size, flags):
    # Adam divides small gradients by small ones: some fp32 weights differ by much of a step.
    _assert_trains(world_size, flags, torch.float32, 1e-5, 1e-4, 1e-3, steps=1)


PAIRS = itertools.product((1, 2, 3, 4, 6), (12, 6, 2, 1))
HEADS_OF_12 = [(tp, kv) for tp, kv in PAIRS if kv % tp == 0]


@pytest.mark.parametrize("tp, kv_heads", soak_but(lambda i, row: i % 3 == 1, HEADS_OF_12))
@on_ranks(lambda tp, **_: tp)
def test_every_gradient_of_a_split_gpt_in_every_mode_of_recomputation(tp, kv_heads):
    sizes = f"--layers 2 --hidden 24 --heads 12 --kv-heads {kv_heads} --microbatches 2"
    model = plain_gpt(2, 24, 12, T, V, kv_heads=kv_heads)
    (expected,), (wanted,), _ = train_plainly(model, steps=1)
    for sp, mode in itertools.product(("", "--sp"), ("none", "selective", "full")):
        flags = f"--tp {tp} {sizes} {sp} --recompute {mode}"
        (found,), gradients, _ = _train(flags, torch.float64, steps=1)
        np.testing.assert_allclose(found, expected, rtol=1e-11)
        if dist.get_rank() == 0:
            assert_alike(gradients[0], wanted, 1e-10)


class TimeFirstMoE(ReferenceMoE):
    """Its tokens in hybrid's order, on which it depends which of them a capacity drops.

    dp: replicas, each of which drops some of its own sequences' tokens.
    """

    dp = 1

    def forward(self, x):
        output, counts, dropped = [], 0, 0
        for part in x.chunk(self.dp):
            output.append(super().forward(part.transpose(0, 1)).transpose(0, 1))
            counts += self.counts
            dropped += self.dropped
        self.counts, self.dropped = counts, dropped
        return torch.cat(output)


MOE_SIZES = "--layers 4 --hidden 16 --heads 4 --experts 4"
MOE = {  # flags of the mixture -> score, top_k, shared, losses, layers with experts
    "--balance aux --top-k 2": ("softmax", 2, 0, (0.01, 0.001), (0, 1, 2, 3)),
    "--balance none --top-k 1 --moe-every 2": ("softmax", 1, 0, (0, 0), (1, 3)),
    "--balance bias --top-k 3 --shared-experts 1": ("sigmoid", 3, 1, (0, 0), (0, 1, 2, 3)),
}
DEEPSEEK = "--balance bias --top-k 2 --shared-experts 1 --topk-nodes 1 NODES"
AUX_ON_NODES = "--balance aux --top-k 1 --topk-nodes 1 NODES"
ON_NODES = {  # the same, and groups of experts and how many of these a token uses
    DEEPSEEK: ("sigmoid", 2, 1, (0, 0), (0, 1, 2, 3), (2, 1)),
    AUX_ON_NODES: ("softmax", 1, 0, (0.01, 0.001), (0, 1, 2, 3), (2, 1)),
    "--balance none --top-k 3 NODES": ("softmax", 3, 0, (0, 0), (0, 1, 2, 3)),
}
MOE_LAYOUTS = [
    (1, ""),
    (2, "--dp 2 --ep 2"),
    (4, "--dp 4 --ep 1"),
    (4, "--dp 4 --ep 2"),
    (4, "--dp 4 --ep 4"),
    (4, "--dp 2 --ep 2 --tp 2"),
    (4, "--dp 2 --ep 2 --tp 2 --sp --recompute full"),
    (4, "--dp 2 --cp 2 --ep 4 --recompute selective"),
    (8, "--dp 4 --ep 2 --zero 1 --tp 2"),
    (2, "--tp 2 --ep 2"),
    (4, "--tp 4 --ep 2 --sp"),
    (4, "--tp 2 --dp 2 --ep 4 --zero 0"),
    (4, "--tp 2 --dp 2 --ep 4 --zero 3 --sp"),
    (4, "--dp 4 --ep 2 --zero 2 --replicate 4"),
    (8, "--dp 2 --cp 2 --ep 2 --pp 2"),
]


@functools.cache
def reference_moe(flags, factor=None, dp=1):
    """What train_plainly() returns of a GPT with a loop over experts."""
    score, top_k, shared, losses, places, *groups = (MOE | ON_NODES)[flags]

    def mixture():
        layer = TimeFirstMoE(16, 4, top_k, score, shared, factor, losses, *groups)
        layer.dp = dp
        return layer

    model = plain_gpt(4, 16, 4, T, V, mlp=lambda i: mixture() if i in places else None)

    def move_biases():
        for layer in model.transformer.h if score == "sigmoid" else ():
            counts = layer.mlp.counts
            layer.mlp.bias += 0.001 * torch.sign(counts.mean() - counts)

    return train_plainly(model, after_step=move_biases)


def _assert_trains_as_a_loop_does(world_size, flags, mixture, factor=None, dp=1):
    capacity = "" if factor is None else f"--capacity-factor {factor}"
    flags = f"{MOE_SIZES} {mixture} {capacity} {flags}"
    ranks = run(world_size, _train, flags, torch.float64)
    _assert_all_alike(ranks, reference_moe(mixture, factor, dp), 1e-10, 1e-8, 1e-8)


MIXED = [(*row, mixture) for row in MOE_LAYOUTS for mixture in MOE]


@pytest.mark.parametrize(
    "world_size, flags, mixture", soak_but(lambda i, row: row[0] < 4 or i % 5 == 0, MIXED)
)
def test_a_gpt_of_experts_trains_as_a_loop_over_them_does(world_size, flags, mixture):
    _assert_trains_as_a_loop_does(world_size, f"{flags} --microbatches 1", mixture)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "dualpipe"])
def test_experts_train_alike_over_every_schedule_and_count_each_microbatch_once(schedule):
    flags = f"--pp 2 --dp 2 --ep 2 --microbatches 4 --schedule {schedule} --recompute full"
    _assert_trains_as_a_loop_does(4, flags, "--balance bias --top-k 3 --shared-experts 1")


def test_a_capacity_drops_tokens_in_every_layer_with_experts():
    mixture = "--balance none --top-k 1 --moe-every 2"
    _assert_trains_as_a_loop_does(2, "--pp 2 --microbatches 1", mixture, factor=0.75)
    assert reference_moe(mixture, 0.75)[0] != reference_moe(mixture)[0]
    mixture = "--balance none --top-k 3 NODES"
    flags = "--dp 2 --ep 2 --pp 2 --microbatches 1 --recompute full"
    _assert_trains_as_a_loop_does(4, flags, mixture, factor=0.75, dp=2)
    assert all(dropped > 0.1 for *_, dropped in reference_moe(mixture, 0.75, 2)[0])


LAYOUTS_ON_NODES = [
    (4, "--dp 2 --cp 2 --ep 4 --microbatches 1"),
    (8, "--pp 2 --dp 4 --ep 4 --schedule dualpipe --microbatches 4 --recompute full"),
    (2, "--dp 2 --ep 2 --microbatches 1"),
    (8, "--tp 2 --sp --dp 4 --ep 4 --zero 1 --microbatches 1 --recompute full"),
    (8, "--pp 2 --dp 2 --cp 2 --ep 2 --schedule zb-h1 --microbatches 1"),
]
NODES = [(*row, mixture) for mixture in ON_NODES for row in LAYOUTS_ON_NODES]
NODES = [row for row in NODES if row[2] != AUX_ON_NODES or "--microbatches 1" in row[1]]


@pytest.mark.parametrize(
    "world_size, flags, mixture", soak_but(lambda i, row: i in (0, 1, 5), NODES)
)
def test_experts_on_nodes_train_as_a_loop_over_those_that_a_token_may_use(
    world_size, flags, mixture
):
    _assert_trains_as_a_loop_does(world_size, flags, mixture)


@pytest.mark.parametrize("flags", ["--tp 2 --sp", "--tp 2 --experts 4 --moe-every 2", "--dp 2"])
def test_the_mlp_and_the_experts_have_the_width_asked_for(flags):
    mixed = "experts" in flags
    mixture = lambda: TimeFirstMoE(16, 4, 2, "softmax", shared=1, ffn=28)
    mlp = lambda i: mixture() if mixed and i % 2 else ReferenceMLP(16, 28)
    expected = train_plainly(plain_gpt(4, 16, 4, T, V, mlp=mlp))
    experts = "--balance none --top-k 2 --shared-experts 1" if mixed else ""
    sizes = "--layers 4 --hidden 16 --heads 4 --ffn 28 --microbatches 1"
    ranks = run(2, _train, f"{sizes} {experts} {flags}", torch.float64)
    _assert_all_alike(ranks, expected, 1e-10, 1e-8, 1e-8)


def test_losses_of_balance_are_means_over_microbatches_in_any_layout():
    mixture = lambda i: ReferenceMoE(16, 4, 2, "softmax", losses=(0.01, 0.001))
    model, (inputs, targets) = plain_gpt(4, 16, 4, T, V, mlp=mixture), batch(0)
    counted, metrics = (targets != hybrid.IGNORE_INDEX).sum(), []
    for x, y in zip(inputs.chunk(4), targets.chunk(4)):  # four microbatches
        logits = model(x).flatten(0, 1)
        loss = cross_entropy(logits, y.flatten(), ignore_index=-100, reduction="sum") / counted
        (loss + sum(layer.mlp.loss for layer in model.transformer.h) / 4).backward()
        metrics.append(expert_metrics(model))
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for world_size, flags in [
        (1, ""),
        (2, "--pp 2 --schedule zb-h1"),
        (2, "--pp 2 --schedule dualpipe"),
        (4, "--tp 2 --cp 2 --ep 2"),
        (4, "--tp 2 --sp --pp 2 --recompute full"),
    ]:
        flags = f"{MOE_SIZES} --balance aux --microbatches 4 {flags}"
        (((*_, balance, z),), (found,), _), *_ = run(world_size, _train, flags, torch.float64, 1)
        assert_alike(found, expected, 1e-9)
        np.testing.assert_allclose([balance, z], np.mean(metrics, 0)[-2:], rtol=1e-11)


BIASED = "--balance bias --top-k 3 --shared-experts 1"
PUBLISHED = {  # the axes of models of the literature, at 8 ranks; and of what a mixture consists
    "Llama 3": "--tp 2 --cp 2 --pp 2 --schedule interleaved --zero 2 --cp-method allgather",
    "Gemma 2": "--tp 2 --sp --dp 4 --zero 3",
    "GLM-5": "--pp 2 --schedule interleaved --cp 2 --dp 2 --zero 2",
    "Solar Open": f"--dp 8 --zero 3 --replicate 2 --ep 2 {BIASED}",
    "Kimi K2": f"--pp 2 --schedule interleaved --dp 4 --ep 4 --zero 1 {BIASED}",
    "Mixtral": f"--tp 2 --pp 2 --dp 2 --ep 4 {BIASED}",
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_layout_of_a_published_model_trains_as_one_process_does(model):
    flags, mixed, _ = PUBLISHED[model].partition(f" {BIASED}")
    flags += " --microbatches 2"
    if mixed:
        _assert_trains_as_a_loop_does(8, flags, BIASED)
    else:
        _assert_trains(8, f"{flags} --layers 4", torch.float64, 1e-11, 1e-9, 1e-9)


# ---- the model and its state ---------------------------------------------------------------------


@on_ranks(1)
def test_the_state_has_the_names_and_shapes_of_gpt2():
    shapes = lambda state: {name: value.shape for name, value in state.items()}
    state = gathered(make_trainer(""))
    expected = shapes(ReferenceGPT(*SIZES).state_dict())
    assert shapes(state) == {n: shape for n, shape in expected.items() if n != "lm_head.weight"}
    small = hybrid.GPTConfig(layers=12, hidden=768, heads=12, seq_len=1024, vocab_size=50257)
    with torch.device("meta"):
        assert sum(p.numel() for p in hybrid.GPT(small).parameters()) == 124_439_808


def test_initial_weights_depend_on_name_seed_and_row_and_are_gpt2s():
    value = lambda name, seed, *shape: hybrid.initial_value(name, shape, 2, seed)
    name, other = "transformer.h.0.mlp.c_fc.weight", "transformer.h.1.mlp.c_fc.weight"
    full = value(name, 0, 256, 64)
    assert torch.equal(full, value(name, 0, 256, 64))
    values = [full, value(name, 1, 256, 64), value(other, 0, 256, 64)]
    assert len(set(torch.cat(values).flatten().tolist())) > 0.99 * 3 * full.numel()
    assert torch.equal(hybrid.initial_value(name, (4, 64), 2, 0, first=5), full[5:9])
    projection = "transformer.h.0.attn.c_proj.weight"
    columns = hybrid.initial_value(projection, (64, 4), 2, 0, first=5)
    assert torch.equal(columns, value(projection, 0, 64, 64)[:, 5:9])
    experts = "transformer.h.0.mlp.experts.w_in"
    second = hybrid.initial_value(experts, (1, 256, 64), 2, 0, first=1)
    assert torch.equal(second[0], value(experts, 0, 2, 256, 64)[1])
    for name, p in ReferenceGPT(2, 64, 4, 64, 1000).named_parameters():
        full = value(name, 0, *p.shape)
        if full.ndim == 2:
            std = 0.01 if "c_proj" in name else 0.02
            assert full.std().item() == pytest.approx(std, rel=0.05), name
        else:
            assert (full == (0 if name.endswith("bias") else 1)).all(), name


@pytest.mark.parametrize(
    "flags",
    [
        "--tp 4 --kv-heads 4",
        "--tp 2 --pp 2 --microbatches 2 --sp --zero 1",
        "--tp 2 --dp 2 --ep 2 --experts 4 --shared-experts 1 --moe-every 2",
    ],
)
@on_ranks(4)
def test_every_rank_draws_what_it_holds_and_together_the_same_bits_in_any_layout(flags):
    state = gathered(make_trainer(flags))
    assert len(state) > 4 * LAYERS
    for name, full in state.items():
        assert torch.equal(full, hybrid.initial_value(name, full.shape, LAYERS, 3).double()), name


def test_no_other_cuts_have_a_smaller_largest_sum():
    generator = np.random.default_rng(0)
    for length, parts, highest in itertools.product((1, 4, 7), (1, 2, 3, 7), (1, 3, 50)):
        costs = generator.integers(1, highest, length, endpoint=True).tolist()
        every = itertools.combinations(range(1, length), parts - 1)
        sums = {  # largest first
            cuts: sorted(map(sum, (costs[i:j] for i, j in itertools.pairwise(cuts))))[::-1]
            for cuts in ((0, *inner, length) for inner in every)
        }
        if parts <= length:  # min() takes the first of equals: that of the shortest first runs
            assert tuple(hybrid.cheapest_cuts(tuple(costs), parts)) == min(sums, key=sums.get)


def test_the_head_and_the_experts_count_where_layers_are_cut_into_stages():
    def sizes(num_stages, **others):
        config = hybrid.GPTConfig(**others)
        stages = [hybrid.layers_of(s, num_stages, config) for s in range(num_stages)]
        assert [i for layers in stages for i in layers] == list(range(config.layers))
        return [len(layers) for layers in stages]

    llama = {"layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "seq_len": 8192}
    assert sizes(16, **llama, vocab_size=128256, ffn=53248) == [7, *14 * [8], 7]  # as theirs
    gpt2 = {"layers": 12, "hidden": 768, "heads": 12, "seq_len": 1024}
    # the head costs 2 h V, a layer 24 h^2 + 4 s h: 4.5 layers
    assert sizes(3, **gpt2, vocab_size=50304) == [5, 6, 1]
    assert sizes(3, **gpt2, vocab_size=50304, recompute="full") == [5, 5, 2]  # 3.4 layers
    assert sizes(4, **gpt2, vocab_size=1) == 4 * [3]
    experts = {"experts": 8, "top_k": 4, "moe_every": 6}  # layers 5 and 11 cost 2.6
    assert sizes(3, **gpt2, vocab_size=1, **experts) == [5, 4, 3]


@pytest.mark.parametrize("name", SCHEDULES)
@on_ranks(2)
def test_the_schedule_is_the_one_asked_for(name):
    rank, flags = dist.get_rank(), f"--pp 2 --microbatches 4 --schedule {name}"
    assert make_trainer(flags).pipeline.actions == SCHEDULES[name](2, 4)[rank]
    if name == "interleaved":
        found = make_trainer(f"{flags} --layers 6 --chunks 3").pipeline.actions
        assert found == interleaved(2, 4, 3)[rank]


@pytest.mark.parametrize(
    "schedule, number", [("1f1b", 2), ("interleaved", 2), ("zb-v", 2), ("dualpipe", 4)]
)
@on_ranks(2)
def test_copies_of_the_tied_embedding_stay_bit_equal(schedule, number):
    trainer = make_trainer(f"--pp 2 --microbatches 4 --schedule {schedule}")
    for step in range(3):
        trainer.step(*own_batch(trainer, step))
    weights = [chunk.tied_weight() for chunk in trainer.chunks]
    copies = sum(gather_objects([w.detach() for w in weights if w is not None]), [])
    assert len(copies) == number and all(torch.equal(copies[0], other) for other in copies)


# ---- dropout and recomputation -------------------------------------------------------------------


def _dropout_states(flags):
    """What every dropout of a step, an evaluation and a step is called with: (kind, p, state)."""
    trainer = make_trainer(f"{flags} --dropout 0.25 --layers 2")
    calls, functional = [], torch.nn.functional
    dropout, attention = hybrid.dropout, functional.scaled_dot_product_attention
    note = lambda kind, p: calls.append((kind, p, torch.get_rng_state().numpy().tobytes()))

    def recorded_dropout(x, p, training):
        note("residual", p if training else 0)
        return dropout(x, p, training)

    def recorded_attention(*arguments, dropout_p=0.0, **others):
        note("attention", dropout_p)
        return attention(*arguments, dropout_p=dropout_p, **others)

    def evaluate():
        data = hybrid.Data(*2 * [np.zeros(3 * T, np.uint8)], is_text=False)
        hybrid.evaluate(trainer, data, batches=1)
        hybrid.sample(trainer, [1], 1)

    train, found = lambda: trainer.step(*own_batch(trainer)), []
    with (
        patch.object(hybrid, "dropout", recorded_dropout),
        patch.object(functional, "scaled_dot_product_attention", recorded_attention),
    ):
        for use in (train, evaluate, train):
            use()
            found.append(list(calls))
            calls.clear()
    return found


def test_dropout_draws_alike_over_tp_but_in_attention_and_unlike_elsewhere():
    ranks = run(8, _dropout_states, "--tp 2 --dp 2 --pp 2 --microbatches 1")
    for trained, evaluated, again in ranks:
        assert {p for _, p, _ in trained} == {p for _, p, _ in again} == {0.25}
        assert evaluated and {p for _, p, _ in evaluated} == {0}
    first_stage = ["residual"] + ["attention", "residual", "residual"]  # the embedding; one layer
    assert [kind for kind, _, _ in ranks[0][0]] == first_stage
    assert [kind for kind, _, _ in ranks[4][0]] == first_stage[1:]
    states = lambda rank, kind: [state for k, _, state in ranks[rank][0] if k == kind]
    for tp_0 in range(0, 8, 2):
        assert states(tp_0, "residual") == states(tp_0 + 1, "residual")
        assert not set(states(tp_0, "attention")) & set(states(tp_0 + 1, "attention"))
        assert not set(states(tp_0, "attention")) & set(states(tp_0, "residual"))
        for other in range(tp_0):
            if other != tp_0 + 1:
                assert not set(states(tp_0, "residual")) & set(states(other, "residual"))
    drawn = [state for _, _, state in ranks[0][0] + ranks[0][2]]
    assert len(set(drawn)) == len(drawn)  # every use has a mask of its own


@pytest.mark.parametrize(
    "world_size, layouts, steps",
    [
        # On the CPU a generator knows the last 32 bits of its seed; 4096 * 2**20 is 2**32.
        (2, [f"--dp 2 --seed {n}" for n in (3, 4, 3 + 4096, 2**32 - 1)], [0]),
        (4, ["--tp 2 --dp 2 --sp --microbatches 1"], [0, 2]),
    ],
    ids=["seeds", "split sequences"],
)
def test_dropout_draws_unlike_with_every_seed_and_on_every_rank_of_a_split_sequence(
    world_size, layouts, steps
):
    ranks = [rank for flags in layouts for rank in run(world_size, _dropout_states, flags)]
    drawn = [state for rank in ranks for step in steps for _, _, state in rank[step]]
    # an embedding and two layers
    assert len(set(drawn)) == len(drawn) == len(ranks) * len(steps) * 7


@pytest.mark.parametrize("flags", ["", "--sp", "--sp --dtype bf16"])
@on_ranks(2)
def test_recomputation_replays_the_masks_of_every_rank(flags):
    results = []
    for mode in ("none", "selective", "full"):
        flags = f"--tp 2 --microbatches 2 --dropout 0.3 --recompute {mode} {flags}"
        trainer = make_trainer(flags)
        loss = torch.tensor(trainer.step(*batch(0))["loss"])
        results.append([loss, *[p.grad for p in trainer.chunks[0].parameters()]])
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))


# ---- bf16 ----------------------------------------------------------------------------------------


def _losses(flags, steps=40):
    """Losses of each step; dtypes of weights, ZeRO's exact pieces or what computes, and gradients;
    dtypes of messages between stages."""
    sizes = "--layers 2 --hidden 64 --warmup 10 --microbatches 4"
    trainer = make_trainer(f"{sizes} --steps {steps} {flags}")
    tokens = np.random.default_rng(0).permutation(V).astype(np.uint8)
    tokens = np.concatenate([np.roll(tokens, k * k) for k in range(V)])
    data, losses = hybrid.Data(tokens, tokens, is_text=False), []
    for step in range(steps):
        batch = data.batch(step, BATCH, T, 0, trainer.own_rows())
        losses.append(trainer.step(*batch)["loss"])
    dtypes = {(p.dtype, p.grad.dtype) for p in trainer.chunks[0].parameters()}
    return losses, dtypes, {trainer.pipeline.like["dtype"]}


@pytest.mark.parametrize(
    "world_size, flags, model",
    soak_but(
        lambda i, row: i == 0,
        [
            (1, "", ""),
            (2, "--dp 2 --zero 1", ""),
            (2, "--tp 2 --sp", ""),
            (2, "--pp 2 --schedule zb-h1", ""),
            (2, "--dp 2 --ep 2", "--experts 4"),
        ],
    ),
)
def test_40_steps_bf16_have_losses_within_1_percent_of_fp32s(world_size, flags, model):
    exact, dtypes, _ = run(1, _losses, model)[0]
    assert dtypes == {(torch.float32, torch.float32)} and exact[-1] < 0.5 * exact[0]
    for losses, dtypes, messages in run(world_size, _losses, f"--dtype bf16 {flags} {model}"):
        assert dtypes == {(torch.float32, torch.float32)} and messages == {torch.bfloat16}
        np.testing.assert_allclose(losses, exact, rtol=0.01)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@on_ranks(lambda zero, **_: 2 if zero else 1)
def test_bf16_has_exact_masters_and_as_many_bytes_as_the_formula(zero):
    flags = f"--zero {zero} --dtype bf16 --layers 16 --hidden 64 --microbatches 2"
    trainer, P, most = make_trainer(flags), dist.get_world_size(), []
    parameters = dict(trainer.chunks[0].named_parameters())
    first = [master for group in trainer.optimizer.param_groups for master in group["params"]]
    assert {master.dtype for master in first} == {torch.float32}
    masters = torch.cat(gather_objects(torch.cat([m.detach().flatten() for m in first])))
    shapes = {name: getattr(p, "whole_shape", p.shape) for name, p in parameters.items()}
    values = [hybrid.initial_value(n, shape, 16, 3).flatten() for n, shape in shapes.items()]
    assert torch.equal(masters.sort().values, torch.cat(values).sort().values)
    assert not torch.equal(masters, masters.bfloat16().float())

    # when a bucket's sum begins, in the last backward
    held = lambda: memory_ledger(trainer.stages, trainer.optimizer).total()
    trainer.step(*own_batch(trainer))  # after which the optimizer has its state
    watched = zero_module.FlatParameter
    reduce = watched.reduce
    watch = lambda row, *arguments: most.append(held()) or reduce(row, *arguments)
    with patch.object(watched, "reduce", watch):
        trainer.step(*own_batch(trainer))
    count = len(masters)
    # Of 16 units two are whole at a time; parameters begin on multiples of 64 elements.
    of_two_units = (4 * 2 / 16, 0, 2 * 4 / 16, 2 * 2 / 16 + 2 * 4 / 16)[zero]
    # in stage 3 no rank has a bf16 copy of its shard
    claimed = zero_memory(zero, P, parameter=0 if zero == 3 else 2, gradient=4, optimizer=12)
    assert claimed <= max(most) / count < 1.04 * claimed + of_two_units


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@on_ranks(1)
def test_bf16_computes_near_fp32_and_accumulates_gradients_in_fp32(schedule):
    trainer = make_trainer(f"--dtype bf16 --grad-clip 0 --schedule {schedule} --microbatches 8")
    inputs, targets = batch(0)
    loss = trainer.step(inputs, targets)["loss"]
    assert loss == pytest.approx(reference(torch.float32)[0][0][0], rel=5e-3)
    counted = (targets != hybrid.IGNORE_INDEX).sum()
    fresh = plain_gpt(*SIZES, dtype=torch.float32).bfloat16()
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in fresh.named_parameters()}
    for rows in torch.arange(BATCH).chunk(8):  # the sum of each microbatch's own
        fresh.zero_grad()
        logits = fresh(inputs[rows]).flatten(0, 1).float()
        options = {"ignore_index": hybrid.IGNORE_INDEX, "reduction": "sum"}
        (cross_entropy(logits, targets[rows].flatten(), **options) / counted).backward()
        for name, parameter in fresh.named_parameters():
            sums[name] += parameter.grad.double()
    found = gathered(trainer, lambda parameter: parameter.grad)
    assert found.keys() == sums.keys()
    for name, total in sums.items():
        assert (found[name] - total).norm() < 0.02 * total.norm(), name


# ---- messages ------------------------------------------------------------------------------------


def _second_step(flags):
    """A trainer, and what its second step sends: the first one also tells stages their shapes."""
    trainer = make_trainer(flags)
    trainer.step(*own_batch(trainer))
    with least_bytes(), count_bytes() as traffic:
        trainer.step(*own_batch(trainer))
    return trainer, traffic


def _sum(number):
    return sum(gather_objects(number))


@on_ranks(2, 4)
def test_data_parallel_sends_each_gradient_once_around_the_ring():
    dp = dist.get_world_size()
    trainer, traffic = _second_step(f"--dp {dp} --vocab-size 68 --zero 0")
    counters = 2 * (4 + 16) * (dp - 1)  # the loss (4 bytes), two counts of tokens, over all ranks
    claimed = _sum(ddp_bytes(trainer.chunks[0], dp)) + counters
    assert _sum(traffic.bytes(group=trainer.mesh.dp_cp_group)) == claimed


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("m, schedule", [(1, "1f1b"), (4, "1f1b"), (4, "zb-h1")])
@on_ranks(2)
def test_zero_sends_what_it_says_for_each_microbatch(zero, m, schedule):
    flags = f"--dp 2 --zero {zero} --microbatches {m} --schedule {schedule}"
    trainer, traffic = _second_step(flags)
    nbytes = sum(4 * row.layout.length for row in trainer.stages[0].flats)
    sent = traffic.bytes("all_gather_single") + traffic.bytes("reduce_scatter_single")
    assert sent == zero_bytes(zero, nbytes, 2, m)
    assert zero_bytes(zero, 2, 2, m) == (2, m + 1, 3 * m)[zero - 1]


@on_ranks(4)
def test_replicas_of_shards_send_each_shard_once_more():
    trainer, traffic = _second_step("--dp 4 --zero 1 --replicate 2")
    rows = [row.layout.length for row in trainer.stages[0].flats]
    assert dist.get_process_group_ranks(trainer.mesh.shard_group) in ([0, 1], [2, 3])
    assert dist.get_process_group_ranks(trainer.mesh.replicate_group) in ([0, 2], [1, 3])
    assert traffic.bytes(group=trainer.mesh.replicate_group) == sum(4 * n // 2 for n in rows)


@on_ranks(4)
def test_pipeline_sends_each_boundary_once_per_microbatch_and_direction():
    trainer, traffic = _second_step("--pp 4 --microbatches 4")
    stage, microbatch = dist.get_rank(), BATCH // 4 * T * HIDDEN * 4
    assert traffic.bytes("exchange") == pipeline_bytes(stage, 4, 4, microbatch)
    if stage in (0, 3):
        assert traffic.bytes(group=trainer.mesh.embedding_group) == V * HIDDEN * 4


@on_ranks(4)
def test_tensor_parallel_sends_eight_bsh_per_layer():
    tp = 4
    trainer, traffic = _second_step(f"--tp {tp} --microbatches 1 --grad-clip 0")
    layers = LAYERS * tensor_parallel_layer_bytes(BATCH, T, HIDDEN, tp)
    ends = 2 * 2 * (tp - 1) * BATCH * T * HIDDEN * 4 // tp  # out of the embedding, into the head
    loss = 2 * (tp - 1) * 3 * BATCH * T * 4 // tp  # maximum; sum and target's logit
    norm = 2 * (tp - 1) * 8  # one number, over all ranks
    sent = _sum(traffic.bytes(group=trainer.mesh.tp_group))
    assert sent == tp * (layers + ends + loss) + norm


@on_ranks(4)
def test_zero_bubble_schedules_put_off_the_product_of_every_matrix():
    trainer = make_trainer("--tp 2 --pp 2 --schedule zb-h1 --microbatches 4")
    perform, found = trainer.pipeline.perform, set()

    def look_before_a_product(action, received):
        if action.kind == "W" and not found:
            named = [pair for chunk in trainer.chunks for pair in chunk.named_parameters()]
            found.update(name for name, p in named if p.grad is not None and p.grad.any())
        return perform(action, received)

    trainer.pipeline.perform = look_before_a_product
    trainer.step(*batch(0))
    others = ("ln_", "wte", "wpe", "c_proj.bias")
    assert found and all(any(other in name for other in others) for name in found)


@pytest.mark.parametrize("flags", ["--dp 4", "--tp 2 --sp --cp 2 --zero 3", "--dp 2 --pp 2"])
@on_ranks(4)
def test_the_same_step_runs_over_the_backends_own_collectives(flags):
    losses, posted = [], []
    for whose in ("ours", "backend"):
        trainer, events = make_trainer(f"{flags} --collectives {whose}", torch.float64), []
        with observe(lambda event, *_: events.append(event)):
            losses.append(trainer.step(*own_batch(trainer))["loss"])
        posted.append(events.count("post"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert posted[1] < posted[0] and (posted[1] > 0) == ("dp 4" not in flags)  # of neighbours


def _record_two_steps(flags):
    trainer = make_trainer(flags)
    with record() as events:
        trainer.step(*own_batch(trainer))
        trainer.step(*own_batch(trainer))
    return events


LAYOUTS_OF_8 = [flags for world_size, flags in EVERY_LAYOUT if world_size == 8]
LAYOUTS_OF_8 += [
    "--experts 8 --ep 4 --dp 4 --tp 2 --sp --microbatches 2",
    "--experts 4 --ep 2 --dp 2 --cp 2 --pp 2 --microbatches 4 --schedule zb-h1 --balance bias",
    "--experts 4 --ep 2 --dp 4 --tp 2 --zero 1 --microbatches 2 --recompute full",
    "--experts 4 --ep 4 --dp 4 --tp 2 --zero 3 --replicate 2 --microbatches 2 --recompute full",
    "--dp 4 --pp 2 --zero 2 --microbatches 4 --schedule dualpipe",
    "--experts 4 NODES --ep 4 --dp 4 --pp 2 --microbatches 4 --schedule dualpipe",
]


@pytest.mark.parametrize("flags", soak_but(lambda i, row: i % 9 == 0, zip(LAYOUTS_OF_8)))
def test_layouts_run_under_the_rules_of_nccl(flags):
    programs = run(8, _record_two_steps, flags)
    assert all(len(events) > 10 for events in programs)
    replay(programs)


class _Reads(TorchFunctionMode):
    """Names of the calls for which the host would have to wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        reads = "item tolist numpy cpu nonzero __bool__ __int__ __float__ __index__ __contains__"
        if name in reads.split():
            self.names.append(name)
        return function(*args, **(kwargs or {}))


FEW_READS = ["--zero 0", "--zero 1 --checkpoint X", "--zero 3", "--pp 2 --schedule zb-h1", "--tp 2"]


@pytest.mark.parametrize("flags", FEW_READS)
@on_ranks(2)
def test_the_host_reads_from_the_device_once_a_step(flags):
    trainer = make_trainer(f"{flags} --microbatches 2")
    data = hybrid.Data(*2 * [np.zeros(30 * BATCH * T, np.uint8)], is_text=False)
    with _Reads() as step:
        trainer.step(*own_batch(trainer))
    with _Reads() as evaluation:
        hybrid.evaluate(trainer, data, batches=3)
    assert step.names == ["tolist"] and evaluation.names == 3 * ["tolist"]


# ---- mesh ----------------------------------------------------------------------------------------


def mesh_of(flags, per_node=None):
    sizes = "--layers 6 --heads 24 --hidden 48 --seq-len 48"
    args = hybrid.parse(f"{sizes} {flags}".split(), dist.get_world_size(), per_node)
    return hybrid.make_mesh(args)


@pytest.mark.parametrize("pp, dp, cp, tp", [(2, 2, 1, 2), (1, 3, 2, 1), (2, 1, 2, 2), (3, 1, 1, 2)])
@on_ranks(lambda **degrees: math.prod(degrees.values()))
def test_mesh_has_tp_innermost_then_cp_dp_pp(pp, dp, cp, tp):
    groups = vars(mesh_of(f"--pp {pp} --dp {dp} --cp {cp} --tp {tp}"))
    p, d, c, t = (dist.get_rank(groups[f"{axis}_group"]) for axis in ("pp", "dp", "cp", "tp"))
    grid = np.arange(dist.get_world_size()).reshape(pp, dp, cp, tp)
    expected = {"tp_group": grid[p, d, c], "dp_cp_group": grid[p, :, :, t].ravel()}
    assert grid[p, d, c, t] == dist.get_rank()
    if pp > 1 and p in (0, pp - 1):
        expected["embedding_group"] = grid[[0, -1], d, c, t]
    elif pp > 1:
        assert groups["embedding_group"] is None
    for name, ranks in expected.items():
        assert dist.get_process_group_ranks(groups[name]) == ranks.tolist(), name


@pytest.mark.parametrize("dp, cp, ep", [(4, 1, 1), (1, 4, 4), (1, 4, 1), (2, 2, 2), (4, 1, 2)])
@on_ranks(4)
def test_gradients_have_communicators_of_their_own(dp, cp, ep):
    groups = vars(mesh_of(f"--dp {dp} --cp {cp} --ep {ep} --experts 4"))
    own = {n: groups.pop(n) for n in list(groups) if n.endswith(hybrid.OF_GRADIENTS)}
    large = [group for group in own.values() if dist.get_world_size(group) > 1]
    assert not any(group in large for group in groups.values())
    assert (own["dp_cp_group"] is own["expert_dp_group"]) == (ep == 1)
    assert own["shard_group"] is own["dp_cp_group"]


@pytest.mark.parametrize(
    "dp, tp, ep, replicate, expected",
    [  # rank 5's, of 8
        (8, 1, 2, 1, {"ep": [4, 5], "expert_dp": [1, 3, 5, 7], "expert_shard": [1, 3, 5, 7]}),
        (8, 1, 2, 2, {"shard": [4, 5, 6, 7], "replicate": [1, 5], "expert_shard": [5, 7]}),
        (8, 1, 4, 4, {"shard": [4, 5], "expert_shard": [5], "expert_replicate": [1, 5]}),
        (4, 2, 4, 1, {"ep": [4, 5, 6, 7], "expert_dp": [1, 5], "expert_tp": [5]}),
        (2, 4, 2, 1, {"ep": [4, 5], "expert_dp": [1, 5], "expert_tp": [5, 7]}),
        (4, 2, 8, 2, {"ep": list(range(8)), "expert_dp": [5], "replicate": [1, 5]}),
    ],
)
@on_ranks(8)
def test_experts_are_spread_over_tp_and_over_dp_and_shards_over_runs(
    dp, tp, ep, replicate, expected
):
    groups = vars(mesh_of(f"--dp {dp} --tp {tp} --ep {ep} --experts 8 --replicate {replicate}"))
    for name, ranks in expected.items() if dist.get_rank() == 5 else ():
        assert dist.get_process_group_ranks(groups[f"{name}_group"]) == ranks, name


@pytest.mark.parametrize("local_world_size, expected", [(None, [2] * 3), (4, [2, 2, 1])])
@on_ranks(8)  # with 3 on a node, ranks 2 and 3 have two: of groups with unlike numbers it is 1
def test_every_group_of_the_mesh_is_told_its_nodes(local_world_size, expected):
    told = {}
    with patch.object(hybrid, "set_ranks_per_node", lambda n, group: told.update({group: n})):
        mesh = mesh_of("--pp 2 --dp 2 --tp 2", local_world_size)
    assert [told[mesh.tp_group], told[mesh.dp_cp_group], told[mesh.pp_group]] == expected


# ---- evaluation, samples and the loop ------------------------------------------------------------


def _evaluate_and_sample(flags):
    trainer = make_trainer(flags, torch.float64)
    for parameter in trainer.chunks[0].parameters():  # a sharper model than the initial one
        parameter.data *= 5
    tokens = np.random.default_rng(0).integers(0, V, 99).astype(np.uint8)
    data = hybrid.Data(tokens[::-1], tokens, is_text=False)
    loss = hybrid.evaluate(trainer, data, batches=3)
    return loss, hybrid.sample(trainer, [1, 2, 3], T + 6), gathered(trainer), data


def _plain_loss(model, data, batches, seed):
    """Mean loss per token of batches of the validation part."""
    losses = []
    for index in range(batches):
        inputs, targets = data.batch(index, BATCH, T, seed, part="validation")
        with torch.no_grad():
            losses.append(cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item())
    return sum(losses) / batches


MIXTURE = "--experts 4 --top-k 2 --hidden 16 --heads 4 --layers 2 --microbatches 1"
DENSE = "--microbatches 2"
FEW = [(2, "--dp 2"), (3, "--cp 3"), (4, "--cp 2 --pp 2"), (4, "--pp 2 --tp 2 --sp")]
MORE = [(2, "--pp 2"), (4, "--tp 4"), (8, "--cp 2 --pp 2 --tp 2 --sp"), (8, "--dp 2 --pp 2 --tp 2")]
OF_EXPERTS = [(2, "--dp 2 --ep 2"), (4, "--cp 2 --dp 2 --ep 4"), (4, "--tp 2 --pp 2")]


@pytest.mark.parametrize(
    "model, layouts",
    [
        pytest.param(DENSE, FEW, id="dense"),
        pytest.param(DENSE, MORE, id="dense, more", marks=pytest.mark.soak),
        pytest.param(MIXTURE, OF_EXPERTS, id="experts"),
    ],
)
def test_evaluation_and_samples_do_not_depend_on_the_layout(model, layouts):
    loss, drawn, state, data = run(1, _evaluate_and_sample, model)[0]
    assert all(0 <= token < V for token in drawn) and len(drawn) == T + 6 and len(set(drawn)) > 5
    if model != MIXTURE:
        plain = plain_gpt(*SIZES)
        plain.load_state_dict(state, strict=False)  # the head is the embedding
        assert loss == pytest.approx(_plain_loss(plain, data, 3, seed=3), rel=1e-12)
    for world_size, flags in layouts:
        for found, others, _, _ in run(world_size, _evaluate_and_sample, f"{model} {flags}"):
            assert found == pytest.approx(loss, rel=1e-12) and others == drawn, flags


@pytest.mark.parametrize("prompt, temperature", [([1, 2], 0.5), ([*range(T + 5)], 1.0)])
@on_ranks(1)
def test_sampling_draws_from_the_softmax_of_what_fits_into_the_window(prompt, temperature):
    trainer, count = make_trainer("--layers 2"), 500
    for parameter in trainer.chunks[0].parameters():
        parameter.data *= 5
    draws = [hybrid.sample(trainer, prompt, 1, temperature, seed)[0] for seed in range(count)]
    with torch.no_grad():
        logits = trainer.chunks[0](torch.tensor([prompt[-T:]]))[-1, 0]
    probabilities = (logits / temperature).softmax(-1)
    assert probabilities.max() > 0.1  # not uniform
    frequencies = torch.tensor(draws).bincount(minlength=V) / count
    assert (frequencies - probabilities).abs().max() < 4 * (0.25 / count) ** 0.5


def _high_water_mark():
    """Most memory that was ever resident in this process, in MB, as Linux has it."""
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def _train_on_text(folder, flags):
    """The losses that train() logs, what it prints, the arguments of its sample, and the data."""
    torch.set_default_dtype(torch.float64)
    metrics, world_size = folder / f"metrics {flags}", dist.get_world_size()
    text, samples, printed = folder / "text", [], io.StringIO()
    words = f"{FLAGS} {flags} --seed 5 --data {text}".split() + ["--metrics", str(metrics)]
    before, args = _high_water_mark(), hybrid.parse(words, world_size)
    with (
        patch.object(hybrid, "sample", lambda trainer, *a, **k: samples.append((*a, k)) or [65]),
        patch.object(hybrid, "time", SimpleNamespace(perf_counter=itertools.count().__next__)),
        redirect_stdout(printed),
    ):
        hybrid.train(args, torch.device("cpu"))
    lines = []
    if dist.get_rank() == 0:
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert lines[0]["flags"]["vocab_size"] == V
    lines = [line for line in lines if "loss" in line]
    assert all(line["tokens_per_s"] == BATCH * T for line in lines)
    assert all(before <= line["memory_mb"] <= _high_water_mark() for line in lines)
    data = hybrid.load_data(text, T, V)
    return [line["loss"] for line in lines], printed.getvalue(), samples, data


def test_the_loop_trains_on_every_row_of_every_step_and_samples_from_validation(tmp_path):
    tokens = np.random.default_rng(1).integers(0, V, 100 * BATCH * T).astype(np.uint8)
    (tmp_path / "text").write_bytes(bytes(tokens))
    losses, printed, samples, data = run(1, _train_on_text, tmp_path, "--dp 1")[0]
    prompt, length, options = samples[0]
    assert bytes(prompt) in bytes(data.validation) and len(prompt) == T // 2
    assert length == 60 and options == {"temperature": 0.8, "seed": 5}
    model = plain_gpt(*SIZES, seed=5)
    training = ReferenceTraining(model, RATES, 0.2, 0.5)
    expected = [training.step(*data.batch(step, BATCH, T, seed=5))[0] for step in range(STEPS)]
    loss = _plain_loss(model, data, 8, seed=5)
    others = run(4, _train_on_text, tmp_path, "--dp 2 --tp 2 --microbatches 2")
    for losses, printed, _, _ in ((losses, printed, samples, data), others[0]):
        assert losses == pytest.approx(expected, rel=1e-11)
        end = f"perplexity {math.exp(loss):.2f} after step {STEPS}"
        assert f"\nvalidation loss {loss:.4f}, {end}\n" in printed
    assert not any(losses or printed for losses, printed, _, _ in others[1:])  # rank 0 speaks
    assert all(len(samples) == 1 for _, _, samples, _ in others)  # which experts may need of all


@pytest.mark.parametrize("flags", ["--dp 2 --tp 2", "--cp 2 --pp 2 --microbatches 2", "--zero 3"])
@on_ranks(4)
def test_a_token_outside_the_vocabulary_stops_every_rank_alike(flags):
    trainer = make_trainer(f"{flags} --data X.bin")
    sentence = f"^--data: 1 tokens are outside --vocab-size {V}$"
    trainer.step(*own_batch(trainer))
    inputs, targets = batch(1)
    targets[-1, -1] = V + 5
    parameters = [p for chunk in trainer.chunks for p in chunk.parameters()]
    weights = [parameter.detach().clone() for parameter in parameters]
    with pytest.raises(hybrid.TrainingError, match=sentence):
        trainer.step(*(tensor[trainer.own_rows()] for tensor in (inputs, targets)))
    assert all(map(torch.equal, weights, parameters))
    tokens = np.array([*range(T), V])  # in which one sequence fits
    with pytest.raises(hybrid.TrainingError, match=sentence.replace("1", str(BATCH))):
        hybrid.evaluate(trainer, hybrid.Data(tokens, tokens, is_text=False))
    for token in (V, -1):
        with pytest.raises(hybrid.TrainingError, match=f"the prompt's token {token} is outside"):
            hybrid.sample(trainer, [1, token], 1)


@pytest.mark.parametrize(
    "flags",
    [
        "--dp 2 --tp 2",
        "--pp 2 --cp 2",
        "--zero 0 --dp 4",
        "--zero 3 --dp 4",
        "--pp 2 --dp 2 --layers 2 --experts 4 --ep 2",
        "--tp 2 --dp 2 --layers 2 --experts 4 --balance bias",
    ],
)
@on_ranks(4)
def test_what_is_not_finite_stops_every_rank_alike(flags):
    trainer = make_trainer(flags)
    _nan_on_rank_3(trainer, "weight")  # of it alone
    sentence = "^step 1 is not finite: loss nan, grad norm nan; 1 in a row$"
    with pytest.raises(hybrid.TrainingError, match=sentence):
        trainer.step(*own_batch(trainer))


def _nan_on_rank_3(trainer, name):
    """Set an element of its last parameter of that name to nan; returns how to undo that."""
    if dist.get_rank() < 3:
        return lambda: None
    named = [pair for chunk in trainer.chunks for pair in chunk.named_parameters()]
    parameter = [p for other, p in named if other.endswith(name) and p.numel()][-1]
    before = parameter.detach().clone()
    parameter.data.view(-1)[0] = math.nan
    return lambda: parameter.data.copy_(before)


def _whole_state(trainer):
    """Copies of everything that a step may change on this rank."""
    tensors = [x for state in trainer.optimizer.state.values() for x in state.values()]
    for chunk in trainer.chunks:
        tensors += chunk.state_dict().values()
        tensors += [module.counts for module in chunk.modules() if hasattr(module, "counts")]
    return [tensor.clone() for tensor in tensors]


MIXED_BY_BIAS = "--layers 2 --experts 4 --balance bias"


@pytest.mark.parametrize(
    "flags, names",
    [
        ("--dp 2 --tp 2 --zero 0", ["ln_2.bias"]),
        ("--dp 4 --replicate 2 --zero 3 --dtype bf16", ["weight"]),
        ("--pp 2 --cp 2 --dtype bf16 --zero 0", ["c_fc.bias"]),
        ("--zero 1 --dp 2 --tp 2 --sp", ["weight"]),
        (f"--zero 0 --pp 2 --dp 2 --ep 2 {MIXED_BY_BIAS}", ["router.weight", "experts.w_in"]),
        (f"--zero 0 --tp 2 --dp 2 {MIXED_BY_BIAS} --dtype bf16", ["router.weight"]),
        (f"--zero 2 --dp 4 --ep 2 {MIXED_BY_BIAS}", ["weight", "experts.w_out"]),
    ],
)
@on_ranks(4)
def test_a_step_that_is_not_finite_leaves_no_trace_on_any_rank(flags, names):
    trainer, other = make_trainer(f"{flags} --skip-nonfinite 2"), make_trainer(flags)
    assert trainer.step(*own_batch(trainer)) == other.step(*own_batch(other))
    for skipped, name in enumerate(names, 1):
        undo = _nan_on_rank_3(trainer, name)
        found = trainer.step(*own_batch(trainer, 1))
        assert math.isnan(found["loss"]) and found["skipped"] == skipped
        undo()
        other.steps_done += 1  # as if there had been no such batch
        expected = other.step(*own_batch(other, 2))
        assert trainer.step(*own_batch(trainer, 2)) == expected | {"skipped": skipped}
        states = _whole_state(trainer), _whole_state(other)
        assert len(states[0]) > 20 and all(map(torch.equal, *states))


@on_ranks(2)
def test_so_many_in_a_row_end_the_training_and_a_skipped_step_is_in_log_and_metrics(tmp_path):
    metrics, text, printed = tmp_path / "metrics", tmp_path / "text", io.StringIO()
    if dist.get_rank() == 0:
        text.write_bytes(bytes(BATCH * T * 99))
    dist.barrier()
    flags = f"{FLAGS} --skip-nonfinite 2 --data {text} --metrics {metrics} --print-every 1"
    factors, clip = iter([1, math.nan, 1, math.inf, math.nan]), hybrid.Trainer.clip_gradients
    sentence = "^step 5 is not finite: loss [0-9.]+, grad norm nan; 2 in a row$"
    with (
        patch.object(hybrid.Trainer, "clip_gradients", lambda *args: clip(*args) * next(factors)),
        pytest.raises(hybrid.TrainingError, match=sentence),
        redirect_stdout(printed),
    ):
        hybrid.train(hybrid.parse(flags.split(), 2), torch.device("cpu"))
    if dist.get_rank() == 0:
        lines = [json.loads(line) for line in metrics.read_text().splitlines()][1:]
        assert [line["skipped"] for line in lines] == [0, 1, 1, 2]
        assert [line["grad_norm"] is None for line in lines] == [False, True, False, True]
        assert re.findall(r"skipped (\d)", printed.getvalue()) == ["0", "1", "1", "2"]


def _flip(trainer, rank, name, bit):
    """Flip a bit of one element on that rank."""
    tensors = [pair for chunk in trainer.chunks for pair in chunk.named_parameters()]
    tensors += [pair for chunk in trainer.chunks for pair in chunk.named_buffers()]
    if dist.get_rank() == rank:
        (tensor,) = [tensor.data for other, tensor in tensors if other.endswith(name)]
        element = tensor.view(torch.int32).view(-1)[len(tensor) // 2]
        element ^= -(2**31) if bit == 31 else 1 << bit


FLIPS = """processes | flags | rank | parameter | who is named
2 | --dp 2 --zero 0 | 1 | h.1.mlp.c_fc.weight | [0, 1]
3 | --dp 3 --zero 0 | 2 | h.1.mlp.c_fc.weight | [2]
3 | --cp 3 --zero 0 | 0 | wte.weight | [0]
2 | --tp 2 | 1 | ln_f.weight | [0, 1]
2 | --tp 2 --sp | 0 | h.0.attn.c_proj.bias | [0, 1]
4 | --dp 2 --tp 2 --zero 0 | 3 | h.0.ln_1.weight | [3]
4 | --dp 2 --tp 2 --zero 0 | 3 | h.0.attn.c_attn.weight | [1, 3]
4 | --zero 1 --dp 2 --tp 2 | 3 | h.1.mlp.c_proj.bias | [2, 3]
4 | --zero 3 --dp 4 --replicate 2 | 2 | wte.weight | [0, 2]
3 | --zero 2 --dp 3 --replicate 3 | 1 | wte.weight | [1]
4 | --pp 2 --dp 2 --zero 0 | 3 | ln_f.weight | [2, 3]
4 | --pp 2 --dp 2 --zero 0 | 3 | lm_head.weight | [3]
4 | --zero 0 --dp 4 --ep 2 EXPERTS | 3 | h.0.mlp.experts.w_in | [1, 3]
4 | --dp 4 --ep 2 EXPERTS | 2 | h.0.mlp.router.bias | [2]
6 | --dp 3 --tp 2 --ep 3 EXPERTS | 4 | h.1.mlp.experts.w_out | [4, 5]
4 | --dp 4 --ep 2 --replicate 2 EXPERTS | 2 | h.1.mlp.experts.w_in | [0, 2]
"""


@pytest.mark.parametrize("line", FLIPS.splitlines()[1:])
@on_ranks(lambda line, **_: int(line.split(" | ")[0]))
def test_a_flipped_bit_is_found_before_a_save_and_its_rank_named_on_all_ranks(line, tmp_path):
    _, flags, rank, name, named = line.split(" | ")
    flags = flags.replace("EXPERTS", "--experts 6 --balance bias") + " --layers 2"
    trainer = make_trainer(f"{flags} --batch-size 24")
    inputs, targets = (torch.cat([tokens, tokens[:8]]) for tokens in batch(0))
    own = trainer.own_rows()
    trainer.step(inputs[own], targets[own])
    assert not hybrid.unlike_copies(trainer)
    name_in_file = f"transformer.{name}".replace("transformer.lm_head", "transformer.wte")
    for bit in (0, 22, 30, 31):
        _flip(trainer, int(rank), name, bit)
        sentence = f"step 1: copies differ: {name_in_file} on ranks {named}"
        with pytest.raises(hybrid.TrainingError, match=f"^{re.escape(sentence)}"):
            hybrid.save(trainer, tmp_path)
        _flip(trainer, int(rank), name, bit)
    assert not hybrid.unlike_copies(trainer) and not any(tmp_path.iterdir())


def test_samples_are_shown_as_text_without_control_characters_or_as_numbers():
    assert hybrid.show([*b"a\n\x1b[1m\xff"], is_text=True) == "a\n\ufffd[1m\ufffd"
    assert hybrid.show([97, 256, 50256, 98], is_text=True) == "a\ufffd\ufffdb"
    assert hybrid.show([50256, 1], is_text=False) == "[50256, 1]"


def test_the_learning_rate_may_be_all_warm_up():
    rates = [hybrid.learning_rate(step, 4, 4, 1.0) for step in range(5)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@on_ranks(1)
def test_clipping_never_scales_up():
    trainer = make_trainer("--grad-clip 1e9")
    trainer.forward_backward(*batch(0))
    before = [p.grad.clone() for p in trainer.chunks[0].parameters()]
    assert trainer.clip_gradients() > 0
    assert all(torch.equal(p.grad, g) for p, g in zip(trainer.chunks[0].parameters(), before))


# ---- data ----------------------------------------------------------------------------------------


def test_batches_depend_on_seed_and_step_and_shift_targets_by_one():
    tokens = np.arange(1000, dtype=np.uint16)
    data = hybrid.Data(tokens, tokens, is_text=False)
    inputs, targets = data.batch(7, 8, T, seed=1)
    assert torch.equal(targets, inputs + 1) and inputs.shape == (8, T)
    parts = [data.batch(7, 8, T, 1, slice(row, row + 2))[0] for row in range(0, 8, 2)]
    assert torch.equal(torch.cat(parts), inputs)
    later, others = data.batch(8, 8, T, 1)[0], data.batch(7, 8, T, 2)[0]
    for a, b in ((later, inputs), (others, inputs), (later, others)):
        assert not torch.equal(a, b)
    longest = hybrid.Data(tokens[: T + 1], tokens, is_text=False)  # only one place to start from
    assert torch.equal(longest.batch(0, 3, T, 0)[0], torch.arange(T).repeat(3, 1))


def test_default_data_is_the_standard_library():
    data = hybrid.load_data(None, 128)
    assert data.is_text and len(data.train) > 5 * len(data.validation) > 1_000_000
    assert b"import" in bytes(data.validation)
    with open(os.path.join(os.path.dirname(os.__file__), "argparse.py"), "rb") as file:
        assert file.read() in bytes(data.train)


def test_data_may_be_a_text_file_a_folder_or_a_file_of_tokens(tmp_path):
    text = tmp_path / "folder" / "a.md"
    text.parent.mkdir()
    text.write_text("gr\u00fcn " * 100)
    data = hybrid.load_data(text, 8)
    assert bytes(data.train) + bytes(data.validation) == text.read_bytes()
    (text.parent / "b.c").write_text("int main;" * 50)
    (text.parent / "image.png").write_bytes(b"\0" * 500)
    for hidden in (".z", ".git/z"):
        (text.parent / hidden).parent.mkdir(exist_ok=True)
        (text.parent / hidden).write_text("hidden" * 50)
    data = hybrid.load_data(text.parent, 8)
    joined = text.read_bytes() + b"\n" + b"int main;" * 50
    assert bytes(data.train) + bytes(data.validation) == joined
    for dtype, vocab_size in ((np.uint16, 2**16), (np.uint32, 2**16 + 1)):
        tokens = np.arange(500).astype(dtype)
        tokens.tofile(tmp_path / "train.bin")
        tokens[::-1].tofile(tmp_path / "val.bin")
        data = hybrid.load_data(tmp_path / "train.bin", 8, vocab_size)
        assert isinstance(data.train, np.memmap) and not data.is_text and len(data.validation) == 50
        np.testing.assert_array_equal(np.concatenate([data.train, data.validation]), tokens)
        data = hybrid.load_data(tmp_path, 8, vocab_size)  # as nanoGPT prepares it
        assert isinstance(data.train, np.memmap) and not data.is_text
        np.testing.assert_array_equal(data.train, tokens)
        np.testing.assert_array_equal(data.validation, tokens[::-1])
        assert data.batch(0, 2, 8, 0)[0].dtype == torch.int64


def test_a_file_of_tokens_is_not_read_before_they_are_used(tmp_path):
    with open(tmp_path / "tokens.bin", "wb") as file:
        file.truncate(2**32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    data = hybrid.load_data(tmp_path / "tokens.bin", 8, 50304)
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert len(data.train) > 9 * len(data.validation) - 10 > 2**30 and pages < 200


# ---- command line --------------------------------------------------------------------------------

BAD_FLAGS = """processes | flags | what is wrong
4 | --dp 3 | --pp 1 * --dp 3 * --cp 1 * --tp 1 is not 4 processes
3 | --cp 2 | --pp 1 * --dp 1 * --cp 2 * --tp 1 is not 3 processes
2 | --dp 2 --ep 2 | --ep 2 is more than 1, where not --experts 0
3 | --experts 4 --ep 2 | --dp 3 * --cp 1 * --tp 1 is not divisible by --ep 2
4 | --zero 1 --replicate 3 | --dp 4 * --cp 1 is not divisible by --replicate 3
2 | --pp 2 --replicate 2 | --replicate 2 needs zero
2 | --experts 5 --ep 2 | --experts 5 is not divisible by --ep 2
2 | --experts 4 --topk-nodes 1 | --topk-nodes 1 needs ep > 1
2 | --experts 4 --ep 2 --topk-nodes 3 | --topk-nodes 3 is more than 1 nodes
1 | --experts 2 --top-k 3 | --top-k 3 is more than --experts 2
1 | --experts -1 | --experts: -1 is not in [0, inf)
1 | --dtype tf32 | --dtype tf32 needs a GPU
1 | --device cuda | --device cuda: there is no GPU on this machine
1 | --seed 4294967296 | --seed: 4294967296 is not in [0, 4294967296)
2 | --experts 2 --tp 2 --seq-len 7 | --seq-len 7 // --cp 1 is not divisible by --tp 2, where --sp
4 | --cp 4 --seq-len 12 | --seq-len 12 is not divisible by (2 * --cp 4), where --cp 4 > 1
6 | --cp 2 --tp 3 --sp --seq-len 8 --heads 3 --hidden 6 | \
--seq-len 8 // --cp 2 is not divisible by --tp 3
2 | --cp 2 --dropout 0.1 | --dropout 0.1 is more than 0, where --cp 2 > 1
4 | --cp 2 --tp 2 --heads 2 --cp-method ulysses | --heads 2 // --tp 2 is not divisible by --cp 2
1 | --cp-method torus | --cp-method: invalid choice: 'torus'
1 | --zero 4 | --zero: invalid choice: 4
1 | --heads 3 | --hidden 128 is not divisible by --heads 3
3 | --tp 3 | --kv-heads 4 is not divisible by --tp 3
2 | --tp 2 --ffn 27 | --ffn 27 is not divisible by --tp 2
4 | --tp 4 --vocab-size 3 | --tp 4 is more than --vocab-size 3
1 | --kv-heads 3 | --heads 4 is not divisible by --kv-heads 3
4 | --pp 4 --layers 1 | --layers 1 is too few for 4 stages
2 | --pp 2 --schedule interleaved --microbatches 3 | num_microbatches=3 is not a multiple of
3 | --pp 3 --schedule dualpipe | num_stages=3 and num_microbatches=6: both must be even
2 | --pp 2 --batch-size 5 --microbatches 2 | --batch-size 5 is not divisible by (--dp 1 * --micro
1 | --chunks 3 | --chunks 3 needs schedule == 'interleaved'
2 | --dp 2 --cp-method ring | --cp-method ring needs cp > 1
1 | --experts 0 --balance none | --balance none needs experts
1 | --timeout 0 | --timeout: 0 is not in [1, 1000000)
1 | --lr nan | --lr: nan is not in [0, inf)
1 | --lr inf | --lr: inf is not in [0, inf)
1 | --dropout 1 | --dropout: 1 is not in [0, 1)
1 | --batch 8 | unrecognized arguments: --batch 8
1 | --hidden 12.5 | --hidden: invalid number value: '12.5'
1 | --save-every 2 | --save-every 2 needs checkpoint
"""


@pytest.mark.parametrize("line", BAD_FLAGS.splitlines()[1:])
def test_bad_flags_are_refused_in_one_line_before_the_ranks_meet(line, monkeypatch, capsys):
    world_size, flags, message = line.split(" | ")
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    begin = lambda *arguments, **options: pytest.fail("began to wait")
    monkeypatch.setattr(dist, "init_process_group", begin)
    assert hybrid.main(flags.split()) == 2
    (complaint,) = capsys.readouterr().err.splitlines()
    assert "error: " in complaint and message in complaint


BAD_FILES = """flags | what is wrong
--data MISSING | No such file or directory: 'MISSING'
--data EMPTY | --data EMPTY: cannot mmap an empty file
--data EDGE | --data EDGE: 576 tokens to train on and 64 for validation are too few for --seq-len 64
--data BINARY | --data BINARY: 0 tokens to train on and 0 for validation are too few for --seq-len 64
--data ODD.bin | --data ODD.bin: Size of available data is not a multiple
--data HALF | No such file or directory: 'HALF/val.bin'
--checkpoint EMPTY | File exists: 'EMPTY'
--metrics no/such/folder/log | No such file or directory: 'no/such/folder/log'
"""


@pytest.mark.parametrize("line", BAD_FILES.splitlines()[1:])
@on_ranks(1, 2)
def test_files_that_cannot_be_used_are_one_line_on_all_ranks_before_the_first_step(line, tmp_path):
    flags, message = line.split(" | ")
    os.chdir(tmp_path)
    if dist.get_rank() == 0:
        Path("EMPTY").touch()
        Path("EDGE").write_text("x" * 640)
        for name, size in (("BINARY/a", 9), ("ODD.bin", 2001)):
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_bytes(bytes(size))
        Path("HALF").mkdir()
        Path("HALF/train.bin").write_bytes(bytes(2000))
    dist.barrier()
    args = hybrid.parse(flags.split(), dist.get_world_size())
    with pytest.raises(hybrid.TrainingError) as found, patch.object(hybrid.Trainer, "step", None):
        hybrid.train(args, torch.device("cpu"))
    os.chdir("/")
    assert found.value.status == 2 and message in str(found.value)


def test_without_flags_any_number_of_processes_trains_the_same_model():
    one = hybrid.parse([], 1)
    for world_size in range(1, 65):
        args = hybrid.parse([], world_size)
        assert args.batch_size % world_size == 0 and 16 <= args.batch_size < 16 + world_size
        changed = {name for name in vars(one) if getattr(args, name) != getattr(one, name)}
        assert changed <= {"dp", "batch_size", "world_size", "per_node", "zero"}
        assert args.zero == (world_size > 1)
    assert hybrid.parse("--pp 2 --microbatches 3".split(), 4).batch_size == 18
    bf16 = lambda flags: hybrid.parse(f"--dtype bf16 --zero 0 {flags}".split(), 4)
    assert (bf16("").zero, bf16("").replicate, bf16("--replicate 2").replicate) == (1, 4, 2)
    for world_size in (1, 2, 3):  # degrees of 1, --sp and --zero are for any number of processes
        degrees = "--tp 1 --pp 1 --cp 1 --ep 1 --sp --zero 1"
        assert hybrid.parse(degrees.split(), world_size).dp == world_size


DEFAULTS = """processes | flags | microbatches | batch
1 | | 1 | 16
3 | --schedule gpipe | 1 | 18
2 | --pp 2 | 8 | 16
4 | --pp 4 | 16 | 16
6 | --pp 2 | 8 | 24
64 | --pp 8 --tp 2 | 16 | 64
3 | --pp 3 --layers 6 --schedule interleaved | 6 | 18
3 | --pp 3 --layers 6 --schedule interleaved --batch-size 12 | 12 | 12
2 | --pp 2 --schedule dualpipe | 8 | 16
16 | --pp 8 --schedule dualpipe | 16 | 32
2 | --pp 2 --batch-size 1 | 1 | 1
4 | --pp 2 --batch-size 28 | 2 | 28
2 | --pp 2 --microbatches 3 | 3 | 18
2 | --pp 2 --microbatches 20 | 20 | 20
1 | --batch-size 7 | 1 | 7
"""


@pytest.mark.parametrize("line", DEFAULTS.splitlines()[1:])
def test_a_pipeline_has_up_to_four_microbatches_a_stage_as_its_batch_allows(line):
    world_size, flags, microbatches, batch_size = line.split("|")
    args = hybrid.parse(f"--layers 32 {flags}".split(), int(world_size))
    assert (args.microbatches, args.batch_size) == (int(microbatches), int(batch_size))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_every_schedule_knows_the_microbatches_that_are_chosen_without_a_flag(schedule, pp):
    args = hybrid.parse(f"--pp {pp} --schedule {schedule} --layers 32".split(), 3 * pp)
    assert args.batch_size % (args.dp * args.microbatches) == 0 and hybrid.schedule_of(args)


def test_torchrun_takes_no_flag_for_its_own():
    for name, *_ in hybrid.FLAGS:
        arguments = ["hybrid.py", f"--{name.replace('_', '-')}", "1"]
        parsed = torch.distributed.run.get_args_parser().parse_args(arguments)
        assert [parsed.training_script, *parsed.training_script_args] == arguments


# ---- one process among others --------------------------------------------------------------------

FAULTS = {("a", "b", ""): ["error: a"], ("", "", "b"): ["error: rank 2: b"], ("", "", ""): []}


class _Began(Exception):
    pass


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_launcher_chooses_the_device_and_flags_the_timeout_of_the_group(backend, monkeypatch):
    def begin(backend, **options):
        called.append((backend, options["timeout"].total_seconds(), options.get("device_id")))
        raise _Began

    def choose(args, *ranks):
        called.append(ranks)
        return device, backend

    called, device = [], torch.device("cuda", 2)
    for name, value in {"LOCAL_WORLD_SIZE": 3, "LOCAL_RANK": 2, "GROUP_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(hybrid, "choose_device", choose)
    monkeypatch.setattr(hybrid, "schedule_as_batch", lambda: called.append("batch"))
    monkeypatch.setattr(dist, "init_process_group", begin)
    for seconds, flags in ((600, []), (7, ["--timeout", "7"])):
        called.clear()
        with pytest.raises(_Began):
            hybrid.main(flags)
        batch = ["batch"] if backend == "gloo" else []
        bound = device if backend == "nccl" else None
        assert called == [(2, 3), *batch, (backend, seconds, bound)]


def test_processes_get_a_gpu_each_with_nccl_or_share_them_with_gloo(monkeypatch):
    cpu, gpu = torch.device("cpu"), [torch.device("cuda", index) for index in range(2)]
    choose = lambda kind, *rest: hybrid.choose_device(hybrid.parse(["--device", kind], 1), *rest)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for kind in ("cuda", "shared"):
        with pytest.raises(ValueError, match=f"--device {kind}: there is no GPU"):
            choose(kind, 0, 1)
    assert choose("auto", 0, 1) == (cpu, "gloo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert choose("auto", 1, 2) == (gpu[1], "nccl")
    assert choose("auto", 3, 4) == (cpu, "gloo")
    assert choose("shared", 3, 4) == (gpu[1], "gloo")
    assert choose("cpu", 0, 1) == (cpu, "gloo")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # each process sees its own
    assert choose("cuda", 3, 4) == (gpu[0], "nccl")


def _die_in_second_step(flags):
    trainer = make_trainer(flags)
    trainer.step(*own_batch(trainer))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    trainer.step(*own_batch(trainer))


@pytest.mark.parametrize("flags", ["--dp 2", "--tp 2", "--pp 2 --microbatches 2"])
def test_a_dead_peer_ends_the_others_with_an_error_that_names_it(flags):
    survivor, dead = spawn(2, _die_in_second_step, flags, check=False)
    assert dead.exitcode == -signal.SIGKILL
    assert survivor.exitcode == 1 and "rank 0 lost rank 1" in survivor.error_text
