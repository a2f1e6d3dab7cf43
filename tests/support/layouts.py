"""Layouts of hybrid.py, and trainings in them that are compared with one process."""

import functools
import itertools
import json
import math
import re
import shlex

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, gelu
from torch.utils._pytree import tree_map

import hybrid
import verify
from pipeline import SCHEDULES
from ranks import quoted, run, shifted, soak
from reference_gpt import MLP as ReferenceMLP
from reference_gpt import MoE as ReferenceMoE
from reference_gpt import ReferenceGPT, ReferenceTraining, attention, initial_values, reference_gpt
from verify import gathered

STEPS, BATCH, LAYERS, HIDDEN, HEADS, T, V = 5, 16, 4, 32, 8, 12, 67
RUN = 3  # the steps that a test takes
SEED = shifted(3)
FLAGS = f"--layers {LAYERS} --hidden {HIDDEN} --heads {HEADS} --seq-len {T} --vocab-size {V}"
FLAGS += f" --batch-size {BATCH} --steps {STEPS} --lr 0.003 --warmup 2 --weight-decay 0.2"
FLAGS += f" --grad-clip 0.5 --seed {SEED}"
SIZES = [LAYERS, HIDDEN, HEADS, T, V]
# The rate warms up to 0.003 in 2 steps, and falls to 0.0003 by a cosine over the other 3.
RATES = [0.001, 0.002, *(0.0003 + 0.00135 * (1 + math.cos(math.pi * k / 3)) for k in range(3))]

# ---- one process, and any layout -----------------------------------------------------------------


def batch(step):
    """Return a global batch; the loss ignores some tokens, and all of the first sequences."""
    generator = torch.Generator().manual_seed(shifted(step))
    tokens = torch.randint(V, (BATCH, T + 1), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    ignored = torch.rand(BATCH, T, generator=generator, dtype=torch.float32) < 0.2
    targets[ignored] = hybrid.IGNORE_INDEX
    targets[: BATCH // 8] = hybrid.IGNORE_INDEX  # with dp = 8, rank 0 has no token that counts
    return inputs.contiguous(), targets


def own_batch(trainer, step=0):
    """Return this rank's rows of the batch."""
    return [tokens[trainer.own_rows()] for tokens in batch(step)]


def plain_gpt(layers, *sizes, dtype=torch.float64, seed=SEED, **options):
    """Return the oracle with its initial values."""
    return initialized(ReferenceGPT(layers, *sizes, **options).to(dtype), seed)


@torch.no_grad()
def initialized(model, seed):
    """Give a reference model its initial values; return it."""
    for name, value in initial_values(model, seed).items():
        model.get_parameter(name).copy_(value)
    return model


METRICS = "loss", "grad_norm", "lr", "expert_load", "expert_dropped", "balance_loss", "z_loss"


def expert_metrics(model):
    """Return the metrics of the experts in the last forward of a plain GPT."""
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


def train_plainly(model, steps=RUN, bias_rate=0.0):
    """Train on one plain process; return METRICS and gradients per step, and the final weights."""
    training, results, gradients = ReferenceTraining(model, RATES, 0.2, 0.5), [], []
    for step in range(steps):
        found = training.step(*batch(step), bias_rate)
        results.append((*found, RATES[step], *expert_metrics(model)))
        gradients.append(training.gradients)
    return results, gradients, {name: p.detach() for name, p in model.named_parameters()}


@functools.cache
def reference(dtype, layers=LAYERS, kv_heads=None, ffn=None):
    """Return the result of train_plainly() for the GPT of FLAGS."""
    options = {"kv_heads": kv_heads, "mlp": lambda i: ReferenceMLP(HIDDEN, ffn)}
    return train_plainly(plain_gpt(layers, *SIZES[1:], dtype=dtype, **options))


def make_trainer(flags, dtype=torch.float32, device=torch.device("cpu")):
    torch.set_default_dtype(dtype)
    words = shlex.split(f"{FLAGS} {flags}")
    per_node = None
    if "NODES" in words:  # the ranks of ep are on two nodes
        words.remove("NODES")
        per_node = int(words[words.index("--ep") + 1]) // 2
    if device.type == "cuda" and "nccl" not in dist.get_backend_config():
        words += ["--device", "shared"]
    args = hybrid.parse(words, dist.get_world_size(), per_node)
    return hybrid.Trainer(args, hybrid.make_mesh(args, device=device), device)


def train(flags, dtype, steps=RUN):
    """Train in a layout and return what train_plainly() does; gradients are before clipping."""
    trainer = make_trainer(flags, dtype)
    results, gradients, clip = [], [], trainer.clip_gradients
    look = lambda: gradients.append(gathered(trainer, lambda parameter: parameter.grad))
    trainer.clip_gradients = lambda: look() or clip()
    for step in range(steps):
        metrics = trainer.step(*own_batch(trainer, step))
        results.append([metrics[name] for name in METRICS if name in metrics])
    state = gathered(trainer)
    return (results, gradients, state) if dist.get_rank() == 0 else (results, None, None)


def assert_alike(found, expected, tolerance):
    """Compare names, and tensors, which may differ by at most `tolerance` of their norm."""
    assert {name for name in found if not name.endswith("router.bias")} <= expected.keys()
    for name, tensor in expected.items():
        difference = found[name] - tensor
        if name.endswith("c_attn.bias"):  # the gradient of the keys' bias is only rounding error
            D = len(expected[re.sub(r"h.[0-9]+.attn.c_attn.bias", "ln_f.weight", name)])
            difference[D : (D + len(difference)) // 2] = 0
        error = difference.norm() / tensor.norm().clamp(min=1e-300)
        assert error <= tolerance, f"{name} differs by {error:.1e} of its norm"


def assert_all_alike(ranks, expected, loss_error, gradient_error, weight_error, steps=RUN):
    """Compare all ranks' results of train() with `expected`. steps: the gradients to compare."""
    results, gradients, state = expected
    for found, _, _ in ranks:  # every rank reports the global loss and norm
        np.testing.assert_allclose(found, results, rtol=loss_error)
    assert len(ranks[0][1]) == len(gradients)
    for found, wanted in zip(ranks[0][1][:steps], gradients):
        assert_alike(found, wanted, gradient_error)
    assert_alike(ranks[0][2], state, weight_error)


def assert_trains(world_size, flags, dtype, *errors, **options):
    args = hybrid.parse(f"{FLAGS} {flags}".split(), world_size)
    expected = reference(dtype, args.layers, args.kv_heads, args.ffn)
    assert_all_alike(run(world_size, train, flags, dtype), expected, *errors, **options)


# ---- layouts -------------------------------------------------------------------------------------


def dense_layouts(world_size):
    """Yield flags of every product dp x pp x tp; up to 4 ranks, with gpipe and with 1f1b."""
    for pp, tp in itertools.product((1, 2, 4, 8), repeat=2):
        dp = world_size // (pp * tp)
        if pp * tp * dp == world_size:
            rest = f"--microbatches {min(4, BATCH // dp)}{' --layers 8' if pp == 8 else ''}"
            for schedule in ("gpipe", "1f1b") if pp > 1 and world_size < 8 else ("1f1b",):
                yield f"--dp {dp} --pp {pp} --tp {tp} --schedule {schedule} {rest}"


EVERY_LAYOUT = [(size, flags) for size in (1, 2, 4, 8) for flags in dense_layouts(size)]
EVERY_LAYOUT += [
    (
        pp * dp * tp,
        f"--dp {dp} --pp {pp} --tp {tp} --schedule {schedule} --microbatches {m} --layers {layers}",
    )
    for schedule in SCHEDULES
    if schedule not in ("gpipe", "1f1b")
    for pp, dp, tp, m, layers in ((2, 2, 2, 4, 4), (4, 2, 1, 8, 8))
]
EVERY_LAYOUT += [
    (2, "--tp 2 --sp --microbatches 2 --kv-heads 4 --recompute selective"),
    (2, "--tp 2 --recompute full --kv-heads 2 --ffn 40"),
    (4, "--tp 4 --sp --recompute selective"),
    (8, "--tp 2 --pp 2 --dp 2 --sp --recompute full --schedule zb-h1 --microbatches 4"),
    (8, "--tp 2 --pp 4 --sp --recompute selective --schedule interleaved --layers 8"),
    *((2, f"--cp 2 --cp-method {m} --microbatches 2") for m in hybrid.CP_METHODS),
    (3, "--cp 3 --microbatches 4"),
    (4, "--cp 2 --tp 2 --sp --cp-method ulysses --recompute full"),
    *((8, f"--zero 1 --dp 2 --cp 2 --tp 2 --sp --cp-method {m}") for m in hybrid.CP_METHODS),
    *((2, f"--zero {zero} --dp 2 --microbatches 2") for zero in (0, 1, 2, 3)),
    *((3, f"--zero {zero} --cp 3 --microbatches 2") for zero in (1, 2, 3)),
    *(
        (4, f"--zero {zero} --dp 2 --pp 2 --microbatches 4 --schedule {schedule}")
        for schedule in SCHEDULES
        for zero in (1, 2, 3)
    ),
    *((4, f"--zero {zero} --dp 2 --tp 2 --sp --recompute full") for zero in (1, 2, 3)),
    *((4, f"--zero {zero} --dp 4 --replicate 2 --microbatches 2") for zero in (1, 2, 3)),
    (6, "--zero 3 --dp 2 --cp 3 --replicate 3 --kv-heads 2"),
    (8, "--zero 2 --dp 2 --tp 2 --sp --pp 2 --schedule dualpipe --microbatches 4"),
    (8, "--cp 2 --pp 2 --tp 2 --sp --schedule zb-h1 --microbatches 4"),
    (8, "--cp 2 --pp 2 --dp 2 --schedule dualpipe --microbatches 4 --cp-method ulysses"),
    # The axes of Llama 3 and GLM-5, with small degrees.
    (8, "--tp 2 --cp 2 --pp 2 --schedule interleaved --zero 2 --cp-method allgather"),
    (8, "--pp 2 --schedule interleaved --cp 2 --dp 2 --zero 2 --microbatches 2"),
    # Stages of 1, 2 and 1 layers, and of 1, 2, 2, 2 and 1 layers.
    (3, "--pp 3 --schedule 1f1b --microbatches 4"),
    (2, "--pp 2 --schedule interleaved --chunks 5 --microbatches 2 --layers 8"),
    # Groups of layers that are recomputed as one, some with a short last group.
    (2, "--tp 2 --sp --recompute full --recompute-layers 3"),
    (2, "--zero 3 --dp 2 --layers 8 --microbatches 2 --recompute full --recompute-layers 3"),
    (2, "--pp 2 --layers 6 --schedule zb-h1 --recompute full --recompute-layers 2"),
    (2, "--pp 2 --schedule dualpipe --microbatches 4 --recompute full --recompute-layers 2"),
    (4, "--pp 2 --dp 2 --zero 3 --layers 6 --schedule zb-h1 --recompute full --recompute-layers 3"),
]


def soak_but(wanted, rows):
    """Return a test's parameters from rows; mark a row "soak" unless wanted(number, row)."""
    return [pytest.param(*row) if wanted(i, row) else soak(*row) for i, row in enumerate(rows)]


@functools.cache
def drawn(world_size):
    """Return the layouts that verify.py draws, each as (flags, processes of a node)."""
    return verify.layouts(world_size, world_size)


# ---- with experts --------------------------------------------------------------------------------


class TimeFirstMoE(ReferenceMoE):
    """ReferenceMoE with tokens in hybrid's order. A capacity drops the last tokens."""

    def forward(self, x):
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


MOE_SIZES = "--layers 4 --hidden 16 --heads 4 --experts 4"
MOE = {  # {flags of the mixture: (score, top_k, shared, losses, layers with experts)}
    "--balance aux --top-k 2": ("softmax", 2, 0, (0.01, 0.001), (0, 1, 2, 3)),
    "--balance none --top-k 1 --moe-every 2": ("softmax", 1, 0, (0, 0), (1, 3)),
    "--balance bias --top-k 3 --shared-experts 1": ("sigmoid", 3, 1, (0, 0), (0, 1, 2, 3)),
}
DEEPSEEK = "--balance bias --top-k 2 --shared-experts 1 --topk-nodes 1 NODES"
AUX_ON_NODES = "--balance aux --top-k 1 --topk-nodes 1 NODES"
ON_NODES = {  # the same, and (groups of experts, groups that a token uses)
    DEEPSEEK: ("sigmoid", 2, 1, (0, 0), (0, 1, 2, 3), (2, 1)),
    AUX_ON_NODES: ("softmax", 1, 0, (0.01, 0.001), (0, 1, 2, 3), (2, 1)),
    "--balance none --top-k 3 NODES": ("softmax", 3, 0, (0, 0), (0, 1, 2, 3)),
}
MOE_LAYOUTS = [
    (1, ""),
    (2, "--dp 2 --ep 2"),
    (4, "--dp 4 --ep 2"),
    (4, "--dp 2 --ep 2 --tp 2 --sp --recompute full --expert-parts 2"),
    (4, "--dp 2 --cp 2 --ep 4 --recompute selective"),
    (8, "--dp 4 --ep 2 --zero 1 --tp 2"),
    (2, "--tp 2 --ep 2"),
    (4, "--tp 4 --ep 2 --sp"),
    (4, "--tp 2 --dp 2 --ep 4 --zero 0"),
    (4, "--tp 2 --dp 2 --ep 4 --zero 3 --sp --expert-parts 3"),
    (4, "--dp 4 --ep 2 --zero 2 --replicate 4"),
    (8, "--dp 2 --cp 2 --ep 2 --pp 2 --expert-parts 2"),
    (8, "--dp 8 --zero 3 --replicate 2 --ep 2"),  # HSDP, as in Solar Open, and experts in pairs
    (8, "--tp 2 --pp 2 --dp 2 --ep 4"),  # the axes of NVIDIA's Mixtral
]


@functools.cache
def reference_moe(flags, factor=None):
    """Return the result of train_plainly() for a GPT with a loop over experts."""
    score, top_k, shared, losses, places, *groups = (MOE | ON_NODES)[flags]
    mixture = lambda: TimeFirstMoE(16, 4, top_k, score, shared, factor, losses, *groups)
    model = plain_gpt(4, 16, 4, T, V, mlp=lambda i: mixture() if i in places else None)
    return train_plainly(model, bias_rate=0.001 * (score == "sigmoid"))


def assert_trains_as_a_loop_does(world_size, flags, mixture, factor=None):
    capacity = "" if factor is None else f"--capacity-factor {factor}"
    flags = f"{MOE_SIZES} {mixture} {capacity} {flags}"
    ranks = run(world_size, train, flags, torch.float64)
    assert_all_alike(ranks, reference_moe(mixture, factor), 1e-10, 1e-8, 1e-8)


LAYOUTS_ON_NODES = [
    (4, "--dp 2 --cp 2 --ep 4 --microbatches 1"),
    (8, "--pp 2 --dp 4 --ep 4 --schedule dualpipe --microbatches 4 --recompute full"),
    (2, "--dp 2 --ep 2 --microbatches 1 --expert-parts 2"),
    (8, "--tp 2 --sp --dp 4 --ep 4 --zero 1 --microbatches 1 --recompute full"),
    (8, "--pp 2 --dp 2 --cp 2 --ep 2 --schedule zb-h1 --microbatches 1"),
]
MIXED = [(*row, mixture) for row in MOE_LAYOUTS for mixture in MOE]
NODES = [(*row, mixture) for mixture in ON_NODES for row in LAYOUTS_ON_NODES]
NODES = [row for row in NODES if row[2] != AUX_ON_NODES or "--microbatches 1" in row[1]]
EXPERTS = [(n, f"{flags} --microbatches 1", mixture) for n, flags, mixture in MIXED] + NODES


# ---- Llama's block, and other heads --------------------------------------------------------------

LLAMA = "--block llama --rope-theta 100 --kv-heads 4 --ffn 48"
MIXTRAL = "--block llama --kv-heads 4 --ffn 24 --experts 4"
MODELS = {  # what differs from a GPT-2 with a tied head
    "llama": LLAMA,
    "tied": f"{LLAMA} --head tied",
    "untied": "--head untied",
    "mixtral": f"{MIXTRAL} --balance none",
    "shared": f"{MIXTRAL} --balance bias --top-k 3 --shared-experts 2",
    "every 2": f"{MIXTRAL} --balance aux --moe-every 2",
}
DEGREES = [
    *((2, f"--pp 2 --microbatches 4 --schedule {schedule}") for schedule in SCHEDULES),
    (2, "--tp 2 --sp --recompute full --recompute-layers 3"),
    (1, ""),
    *((2, f"--cp 2 --cp-method {method} --recompute selective") for method in hybrid.CP_METHODS),
    (2, "--tp 2 --microbatches 2"),
    (4, "--tp 4 --sp --recompute selective"),
    *((2, f"--dp 2 --zero {zero} --microbatches 2") for zero in (0, 1, 2, 3)),
    *((4, f"--cp 2 --tp 2 --sp --cp-method {method}") for method in hybrid.CP_METHODS),
    *((4, f"--pp 2 --cp 2 --schedule {s} --microbatches 4 --recompute full") for s in SCHEDULES),
    *((4, f"--pp 2 --dp 2 --zero {zero} --schedule zb-v --microbatches 4") for zero in (1, 2, 3)),
    (3, "--cp 3 --zero 3"),
    (8, "--tp 2 --cp 2 --pp 2 --sp --schedule interleaved --microbatches 4 --zero 2"),
    (8, "--dp 2 --tp 2 --pp 2 --sp --schedule dualpipe --microbatches 4 --zero 3"),
]
WITH_EXPERTS = [  # in one microbatch, balance losses do not depend on the layout
    (1, ""),
    (2, "--dp 2 --ep 2"),
    (2, "--tp 2 --ep 2"),
    (2, "--tp 2 --sp --ep 2 --recompute full"),
    (4, "--tp 2 --dp 2 --ep 4 --zero 3 --sp --recompute selective"),
    (4, "--cp 2 --dp 2 --ep 4 --zero 1"),
    (4, "--dp 4 --ep 2 --zero 2"),
    (8, "--tp 2 --pp 2 --dp 2 --ep 4"),
]
LLAMAS = [(*row, "llama") for row in DEGREES]
LLAMAS += [(*row, name) for row in DEGREES for name in ("tied", "untied") if "--pp" in row[1]]
LLAMAS += [
    (size, f"{flags} --microbatches 1", name)
    for size, flags in WITH_EXPERTS
    for name in ("mixtral", "shared", "every 2")
]
FEW_LLAMAS = [
    (2, "--pp 2 --microbatches 4 --schedule zb-v", "tied"),
    (2, "--pp 2 --microbatches 4 --schedule 1f1b", "untied"),
    (2, "--cp 2 --cp-method ring --recompute selective", "llama"),
    (2, "--tp 2 --sp --recompute full --recompute-layers 3", "llama"),
    (3, "--cp 3 --zero 3", "llama"),
    (1, " --microbatches 1", "every 2"),
    (2, "--tp 2 --sp --ep 2 --recompute full --microbatches 1", "shared"),
]


@functools.cache
def reference_llama(name):
    """Return the result of train_plainly() for one of MODELS."""
    args = hybrid.parse(f"{FLAGS} {MODELS[name]}".split(), 1)
    model = initialized(reference_gpt(args).double(), args.seed)
    return train_plainly(model, bias_rate=float(np.float32(0.001)) * (args.balance == "bias"))


def assert_llama_trains(world_size, flags, name):
    ranks = run(world_size, train, f"{MODELS[name]} {flags}", torch.float64)
    assert_all_alike(ranks, reference_llama(name), 1e-10, 1e-8, 1e-8)


# ---- the loop ------------------------------------------------------------------------------------


def train_on_text(flags, folder, batches=3):
    """Train on a text with enough tokens for `batches` batches; return what rank 0 has reported."""
    torch.set_default_dtype(torch.float64)
    text, metrics = folder / "text", folder / "metrics"
    if dist.get_rank() == 0:
        tokens = np.random.default_rng(shifted(1)).integers(1, V, 10 * (batches * BATCH * T + 40))
        text.write_bytes(bytes(tokens.astype(np.uint8)))
    dist.barrier()
    files = f"--data {quoted(text)} --metrics {quoted(metrics)}"
    words = shlex.split(f"{FLAGS} --sample 0 {files} {flags}")
    earlier = len(metrics.read_text()) if metrics.exists() else 0
    hybrid.train(hybrid.parse(words, dist.get_world_size()), torch.device("cpu"))
    own = metrics.read_text()[earlier:] if dist.get_rank() == 0 else ""
    return [json.loads(line) for line in own.splitlines()]


# ---- the model of plain_step() -------------------------------------------------------------------

GRID = dict(V=19, T=6, D=12, heads=6, layers=6, batch=4)


def whole_weights(V, T, D, layers, **_):
    """Return plain_weights() with more spread, so that attention matters."""
    torch.manual_seed(shifted(7))
    return tree_map(lambda weight: 25 * weight, hybrid.plain_weights(V, T, D, layers))


def leaves_of(whole):
    """Return all weights of plain_step()'s model, which are to get gradients."""
    leaves = [whole[name] for name in ("tokens", "positions", "head")]
    leaves += [weight for layer in whole["layers"] for weight in layer.values()]
    return [weight.requires_grad_() for weight in leaves]


def loss_by_one_process(whole, tokens, heads):
    """Return the mean loss of plain_step()'s model on whole tensors, with attention by hand.

    If layers have a router, their "up" and "down" are those of experts, in a first dim.
    """
    norm = lambda x: (x - x.mean(-1, True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    x = whole["tokens"][tokens[:, :-1]] + whole["positions"][: tokens.size(1) - 1]
    for layer in whole["layers"]:
        q, k, v = (norm(x) @ part.T for part in layer["qkv"])
        split = lambda y: y.view(*y.shape[:2], heads, -1).transpose(1, 2)
        y = attention(split(q), split(k), split(v)).transpose(1, 2).flatten(2)
        x = x + y @ layer["out"].T
        y = norm(x)
        mlp = lambda up, down: gelu(y @ up.T, approximate="tanh") @ down.T
        if "router" in layer:
            weights, chosen = (y @ layer["router"].T).softmax(-1).max(-1, keepdim=True)
            for expert, matrices in enumerate(zip(layer["up"], layer["down"])):
                x = x + weights * (chosen == expert) * mlp(*matrices)
        else:
            x = x + mlp(layer["up"], layer["down"])
    return cross_entropy((norm(x) @ whole["head"].T).flatten(0, 1), tokens[:, 1:].flatten())


def counterpart(whole, name, first_layer):
    """Return the whole weight of which a PlainStage's parameter of this name is a part."""
    if not name.startswith("layers."):
        return whole[name]
    _, layer, weight = name.split(".")
    return whole["layers"][first_layer + int(layer)][weight]
