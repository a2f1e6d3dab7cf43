"""Count all claims again.

`python tests/tools/claims.py` prints RESULTS.md, and --write rewrites it.

Each row of the first table has a formula from the literature, its value by plain arithmetic, the
number that four ranks counted, and the test that checks the claim for all sizes.
"""

import gc
import math
import sys
from contextlib import nullcontext
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support"), str(TESTS / "tools")]

import torch
import torch.distributed as dist
from torch import nn

import hybrid
import plan
from collectives import all_gather_single, all_reduce, count_bytes, rank_and_size
from ddp import DistributedDataParallel
from expert_parallel import dispatch_and_combine
from models import GPUS, MODELS
from pipeline import SCHEDULES, draw, measure
from ranks import least_bytes, run
from sequence_parallel import (
    zigzag_allgather_attention, zigzag_ring_attention, zigzag_ulysses_attention,
)
from tensor_parallel import attention
from transformer import TransformerLayer, bytes_of_new_tensors, norm_bytes, saved_bytes
from zero import FullyShardedDataParallel, zero_memory

P = 4
RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
B, S, H, A = 2, 64, 64, 8  # a layer's batch, sequence, hidden size and heads
N, K = 96, 2  # the tokens of a rank, and the experts that each token uses


def _sent(function, *arguments):
    """Return the bytes that this rank sends in a call."""
    with least_bytes(), count_bytes() as traffic:
        function(*arguments)
    return traffic.bytes()


def _collectives():
    x, row = torch.zeros(1 << 16), torch.zeros(1 << 18)
    return {
        "ring": _sent(partial(all_reduce, algorithm="ring"), x),
        "doubling": _sent(partial(all_reduce, algorithm="recursive_doubling"), x),
        "gather": _sent(all_gather_single, row, x),
    }


def _replicas(stage, *groups):
    """Return the bytes that a step of four 480 x 480 matrices sends, and the bytes per parameter.

    groups: the ranks that share shards, and the ranks that hold copies of a shard (HSDP).
    """
    gc.freeze()
    net = nn.Sequential(*[nn.Linear(480, 480, bias=False) for _ in range(4)])
    count = sum(parameter.numel() for parameter in net.parameters())
    if stage:
        shards, copies = groups or (None, None)
        model = FullyShardedDataParallel(net, shards, net, stage, replicate_group=copies)
    else:
        model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(1, 480)).sum().backward()
        optimizer.step()

    step()
    sent = _sent(step)
    optimizer.zero_grad()
    # Before the last backward, stage 1 holds whole gradients, and stages 2 and 3 hold shards.
    with model.no_sync() if stage == 1 else nullcontext():
        model(torch.ones(1, 480)).sum().backward()
    return sent, bytes_of_new_tensors() / count


def _two_by_two():
    """Return this rank's two groups: the pair that shares shards, and the pair of copies."""
    rank = dist.get_rank()
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3], [0, 2], [1, 3])]
    return pairs[rank // 2], pairs[2 + rank % 2]


def _layer(mode="none", **options):
    """Return the bytes that a layer sends, and those that it keeps outside its norms."""
    _, tp = rank_and_size(options.get("group"))
    sequence_parallel = options.get("sequence_parallel", False)
    layer = TransformerLayer(H, A, p=0.1, mode=mode, **options).bfloat16()
    x = torch.randn(S // tp if sequence_parallel else S, B, H, dtype=torch.bfloat16)
    with saved_bytes(layer.parameters()) as kept:
        layer(x.requires_grad_())
    norms = norm_bytes(B, S, tp, sequence_parallel, mode)
    layer = TransformerLayer(H, A, mode=mode, attention_fn=attention, **options)
    return _sent(lambda: layer(x.float()).sum().backward()), kept() - norms


def _context(method):
    _, cp = rank_and_size()
    q, k, v = (torch.randn(B, A, S // cp, H // A, requires_grad=True) for _ in range(3))
    return _sent(method, q, k, v)


def _experts():
    rank, _ = rank_and_size()
    experts = (torch.arange(N * K).view(N, K) + rank) % P  # an even load
    x = torch.zeros(N, H)
    return _sent(dispatch_and_combine, x, experts, torch.ones(N, K), P, lambda rows, *_: rows)


def count():
    """Return {what: the number that this rank counted}."""
    found = _collectives()
    for stage in range(4):
        found[f"bytes {stage}"], found[f"held {stage}"] = _replicas(stage)
    found["bytes hsdp"], found["held hsdp"] = _replicas(3, *_two_by_two())
    sequence = {"sequence_parallel": True}
    alone = [dist.new_group([rank]) for rank in range(P)][dist.get_rank()]
    found["kept alone"] = _layer(group=alone)[1]
    found["kept tp selective"] = _layer("selective")[1]
    found["tp"], found["kept"] = _layer()
    found["sp"], found["kept sp"] = _layer(**sequence)
    found["kept selective"] = _layer("selective", **sequence)[1]
    found["kept full"] = _layer("full", **sequence)[1]
    for method in (zigzag_allgather_attention, zigzag_ring_attention, zigzag_ulysses_attention):
        found[method.__name__] = _context(method)
    return found | {"experts": _experts()}


@cache
def rows():
    """Return [(claim, formula, value, counted, file of its test, words of the test's name)]."""
    found, crossing, sbh = run(P, count)[0], (P - 1) / P, S * B * H
    n, D, scores = 1 << 20, 4 * 4 * 480 * 480, 5 * A * S / H
    kv, tokens = 2 * sbh // P, N * K * H
    small, zero, papers = n // 4, ("zero", "2_2_2_and_3"), ("collectives", "bytes_of_the_papers")
    gathered, ulysses = "zigzag_allgather_attention", "zigzag_ulysses_attention"
    held, kept = ("zero", "holds_16"), ("sequence_parallel", "bytes_of_the_paper")
    routed = "experts", "expert_parallel", "send_the_routed"
    layer, context = ("tensor_parallel", "8_b_s_h"), ("context_parallel", "what_its_formula")
    table = [
        ("all-gather", "n(P-1)/P", n * crossing, "gather", "collectives", "bytes_of_the_formulas"),
        ("ring all-reduce", "2n(P-1)/P", 2 * small * crossing, "ring", *papers),
        ("recursive doubling", "n log2 P", small * 2, "doubling", *papers),
        ("data parallelism", "2D(P-1)/P", 2 * D * crossing, "bytes 0", "ddp", "around_the_ring"),
        ("ZeRO-1", "2D(P-1)/P", 2 * D * crossing, "bytes 1", *zero),
        ("ZeRO-2", "2D(P-1)/P", 2 * D * crossing, "bytes 2", *zero),
        ("ZeRO-3", "3D(P-1)/P", 3 * D * crossing, "bytes 3", *zero),
        ("HSDP, 2 shards x 2 copies", "3D/2 + 2(D/2)/2", 2 * D, "bytes hsdp", "zero", "across"),
        ("bytes held per fp32 parameter", "4 + 4 + 8", 16, "held 0", *held),
        ("by ZeRO-1", "4 + 4 + 8/P", 10, "held 1", *held),
        ("by ZeRO-2", "4 + (4 + 8)/P", 7, "held 2", *held),
        ("by ZeRO-3", "(4 + 4 + 8)/P", 4, "held 3", *held),
        ("by HSDP", "(4 + 4 + 8)/2", 8, "held hsdp", *held),
        ("sent by a layer, tp", "8bsh(P-1)/P, each 4 bytes", 32 * sbh * crossing, "tp", *layer),
        ("sent by a layer, tp + sp", "10bsh(P-1)/P", 40 * sbh * crossing, "sp", *layer),
        ("kept by a layer, unsplit", "sbh(34 + 5as/h)", sbh * (34 + scores), "kept alone", *kept),
        ("kept, tp", "sbh(10 + 24/P + 5as/hP)", sbh * (16 + scores / P), "kept", *kept),
        ("kept, tp, scores recomputed", "sbh(10 + 24/P)", sbh * 16, "kept tp selective", *kept),
        ("kept, tp + sp", "sbh(34 + 5as/h)/P", sbh * (34 + scores) / P, "kept sp", *kept),
        ("kept, tp + sp, scores recomputed", "34sbh/P", 34 * sbh / P, "kept selective", *kept),
        ("kept, tp + sp, all recomputed", "2sbh/P", 2 * sbh / P, "kept full", *kept),
        ("cp by all-gather", "keys, values x (P-1)", 4 * kv * (P - 1), gathered, *context),
        ("cp by a ring", "the same", 4 * kv * (P - 1), "zigzag_ring_attention", *context),
        ("cp by Ulysses", "4bsh/P x (P-1)/P", 16 * sbh / P * crossing, ulysses, *context),
        ("experts", "2Nkh(P-1)/P, and counts", 8 * tokens * crossing + 8 * (P - 1), *routed),
    ]
    return [(claim, text, value, found[key], *test) for claim, text, value, key, *test in table]


# {schedule: (bubble, its value, most activations, their value)}. The texts are the formulas of
# claim() in pipeline.py; the values, for P = 4, m = 8, F = W = 1 and B = 2, are worked out by hand.
SCHEDULED = {
    "naive": ("(p-1) * m * (F+B)", 72, "1", 1),
    "gpipe": ("(p-1) * (F+B)", 9, "m", 8),
    "1f1b": ("(p-1) * (F+B)", 9, "min(m, p-r)", 4),
    "interleaved": ("(p-1) * (F+B) / v", 4.5, "min(2*(p-r-1) + (v-1)*p + 1, m*v) / v", 5.5),
    "zb-h1": ("(p-1) * (F+B-2*W)", 3, "min(m, p)", 4),
    "zb-h2": ("(p-1) * (F+B-3*W)", 0, "min(m, 2*p-1)", 7),
    "zb-v": ("(p-1) * (I-W)", 0, "min(m, p)", 4),
    "dualpipe": ("(p/2-1) * (F+2*B-3*W)", 2, "p+1", 5),
    "dualpipe-v": ("(p-1) * (F+2*B-3*W) / 2", 3, "p+1/2", 4.5),
}


# ---- sizes ---------------------------------------------------------------------------------------

ADAM = 2, 2, 12  # bytes per parameter: weights and gradients in 16 bits, Adam's state in 32
SMALL = 2, 2, 8  # the same with moments in 16 bits


def sizes():
    """Return [(what, formula, published value, computed value, unit)]."""
    state = lambda stage, ranks, kinds: zero_memory(stage, ranks, *kinds)
    table = [("7B parameters", "7 x (2 + 2 + 12)", 112, 7 * state(0, 1, ADAM), "GB")]
    formulas = ["16", "4 + 12/64", "2 + 14/64", "16/64"]
    for stage, (formula, published) in enumerate(zip(formulas, (120, 31.4, 16.6, 1.9))):
        found = 7.5 * state(stage, 64, ADAM)
        row = f"7.5B on 64 GPUs, stage {stage}", f"7.5 x ({formula})", published, found, "GB"
        table.append(row)
    formulas = ["12", "4 + 8/8", "2 + 10/8", "12/8"]
    for stage, (formula, published) in enumerate(zip(formulas, (6.67, 16, 24.62, 53.33))):
        found = 80 / state(stage, 8, SMALL)
        row = f"most on 8 x 80 GB, stage {stage}", f"80 / ({formula})", published, found, "B"
        table.append(row)
    between = 54 * 24 * 60 / 419  # minutes
    table.append(("Llama 3, between interruptions", "54 days / 419", 3.1, between / 60, "hours"))
    interval = math.sqrt(2 * 1 * between)
    return [*table, ("between saves of 1 minute", "sqrt(2 x 1 x 186)", 19.3, interval, "minutes")]


def sizing():
    """Return the table of sizes(), in Markdown."""
    lines = ["| what | formula | published | computed |", "|---|---|---|---|"]
    for what, formula, published, found, unit in sizes():
        lines.append(f"| {what} | {formula} | {published:g} {unit} | {found:.2f} {unit} |")
    return "\n".join(lines) + "\n"


# ---- interruptions -------------------------------------------------------------------------------

INTERRUPTIONS = {  # the Llama 3 report, table 5: 54 days on 16,384 GPUs
    **{"faulty GPU": 148, "HBM3 memory": 72, "software bug": 54, "switch or cable": 35},
    **{"host maintenance": 32, "GPU's SRAM": 19, "GPU's system processor": 17},
    **{"network card": 7, "NCCL watchdog timeout": 7, "silent data corruption": 6},
    **{"GPU's thermal interface and sensor": 6, "SSD": 3, "power supply": 3, "server chassis": 2},
    **{"IO expansion board": 2, "dependency": 2, "CPU": 2, "system memory": 2},
}


class Class(NamedTuple):
    """Causes that look alike to a run, what it does, and its tests: (file, words of a name)."""

    name: str
    causes: list
    answer: str
    tests: list


CLASSES = [
    Class(
        "a process or its machine dies",
        ["faulty GPU", "HBM3 memory", "GPU's SRAM", "GPU's system processor", "power supply"]
        + ["GPU's thermal interface and sensor", "server chassis", "IO expansion board", "CPU"]
        + ["system memory"],
        "restarts from the last checkpoint, with the bits of an undisturbed run",
        [("checkpoints", "whose_ranks_are_killed"), ("checkpoints", "when_torchrun_is_killed")],
    ),
    Class(
        "a peer is silent",
        ["switch or cable", "network card", "NCCL watchdog timeout"],
        "ends after `--timeout`, names operation, group and peer, and restarts",
        [("collectives", "a_lost_peer"), ("flags", "as_long_as_the_flag_says")],
    ),
    Class(
        "an error in a program",
        ["software bug", "dependency"],
        "ends on all ranks, prints the error once, and restarts; a step that is not finite changes "
        "nothing",
        [("strangers", "does_not_hang_the_other"), ("hybrid", "is_not_finite_stops_all_ranks")],
    ),
    Class(
        "a machine is needed",
        ["host maintenance"],
        "completes its step on SIGTERM, saves and exits with status 143",
        [("checkpoints", "sigterm_on_one_rank")],
    ),
    Class(
        "wrong numbers",
        ["silent data corruption"],
        "compares replicas at each save and at the end, names rank and parameter of an unequal "
        "one, and ends with status 1",
        [("checkpoints", "unequal_replicas")],
    ),
    Class(
        "a disk",
        ["SSD"],
        "keeps the previous checkpoint if a save fails, and refuses a changed file",
        [("checkpoints", "a_full_disk"), ("checkpoints", "a_damaged_checkpoint")],
    ),
]


def interruptions():
    """Return the table of CLASSES, in Markdown."""
    lines = ["| class | causes | number | share | a run here | tests |", "|---" * 6 + "|"]
    total = sum(INTERRUPTIONS.values())
    for of in CLASSES:
        causes = ", ".join(f"{cause} {INTERRUPTIONS[cause]}" for cause in of.causes)
        number = sum(INTERRUPTIONS[cause] for cause in of.causes)
        tests = ", ".join(f"`{file}`: {words}" for file, words in of.tests)
        share = f"{number / total:.1%}"
        lines.append(f"| {of.name} | {causes} | {number} | {share} | {of.answer} | {tests} |")
    return "\n".join(lines) + "\n"


# ---- published layouts ---------------------------------------------------------------------------


class Run(NamedTuple):
    """A row of Narayanan et al., 2021, table 1, with Megatron-LM's examples/sc21/run_table_1.sh.

    tflops: per GPU, with recomputed ones. pflops: of all GPUs. batch: the sequences of a step.
    microbatch: the sequences of a microbatch.
    """

    tp: int
    pp: int
    gpus: int
    batch: int
    tflops: int
    pflops: float
    microbatch: int
    chunks: int

    dp = property(lambda self: self.gpus // self.tp // self.pp)


RUNS = {
    "gpt-1.7b": Run(1, 1, 32, 512, 137, 4.4, 16, 1),
    "gpt-3.6b": Run(2, 1, 64, 512, 138, 8.8, 16, 1),
    "gpt-7.5b": Run(4, 1, 128, 512, 142, 18.2, 16, 1),
    "gpt-18.4b": Run(8, 1, 256, 1024, 135, 34.6, 8, 1),
    "gpt-39.1b": Run(8, 2, 512, 1536, 138, 70.8, 4, 1),
    "gpt-76.1b": Run(8, 4, 1024, 1792, 140, 143.8, 2, 3),
    "gpt-145.6b": Run(8, 8, 1536, 2304, 148, 227.1, 2, 2),
    "gpt-310.1b": Run(8, 16, 1920, 2160, 155, 297.4, 1, 2),
    "gpt-529.6b": Run(8, 35, 2520, 2520, 163, 410.2, 1, 3),
    "gpt-1008.0b": Run(8, 64, 3072, 3072, 163, 502.0, 1, 1),
}


def predicted(name, gpu=GPUS["a100"]):
    """Return a Run's TFLOP/s per GPU by plan.py, with recomputed ones, as the paper's are."""
    run, config = RUNS[name], MODELS[name][1]
    sizes = {"batch": run.microbatch, "microbatches": run.batch // run.dp // run.microbatch}
    sizes |= {"chunks": run.chunks, "schedule": "interleaved" if run.chunks > 1 else "1f1b"}
    layout = plan.Layout(run.tp, 1, run.pp, run.dp, **sizes, recompute="full", unfused=True)
    s, L, h, V = config.seq_len, config.layers, config.hidden, config.vocab_size
    flops = 96 * run.batch * s * L * h * h * (1 + s / (6 * h) + V / (16 * L * h))
    return flops / run.gpus / plan.price(config, gpu, layout).step / 1e12


def megatron():
    """Return the table of RUNS beside predicted(), in Markdown."""
    header = "model | GPUs | batch | tp | pp | dp | m x b | chunks"
    lines = [f"| {header} | TFLOP/s | published | PFLOP/s | published |", "|---" * 12 + "|"]
    for name, run in RUNS.items():
        speed = predicted(name)
        parts = f"{run.batch // run.dp // run.microbatch} x {run.microbatch}"
        cells = name[4:-1] + "B", f"{run.gpus:,}", f"{run.batch:,}", run.tp, run.pp, run.dp, parts
        total = f"{speed * run.gpus / 1e3:.1f}"
        cells += run.chunks, f"{speed:.0f}", run.tflops, total, run.pflops
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


# source | plan.py's flags in the source | flags filled in here | the speed that a GPU reached
PUBLISHED = """\
Llama 3 2024 | llama3-405b --gpus 8192 --gpu h100 --tp 8 --cp 1 --pp 16 | | 430 TFLOP/s
Llama 3 2024 | llama3-405b --gpus 16384 --gpu h100 --tp 8 --cp 1 --pp 16 | | 400 TFLOP/s
Llama 3 2024 | llama3-405b --gpus 16384 --gpu h100 --seq-len 131072 --tp 8 --cp 16 --pp 16 \
| | 380 TFLOP/s
DeepSeek-V3 2024 | deepseek-v3 --gpus 2048 --gpu h800 --batch-size 15360 --tp 1 --cp 1 --pp 16 \
--ep 64 --schedule dualpipe --overlap --zero 1 | | 1,543 tokens/s
Kimi K2 2025 | kimi-k2 --gpu h800 --tp 1 --cp 1 --pp 16 --ep 16 --schedule interleaved --zero 1 \
| --gpus 2048 --batch-size 4096 |
GLM-5 2026 | glm-5 --schedule interleaved --zero 2 \
| --gpus 2048 --gpu h800 --batch-size 4096 --tp 1 --cp 2 |
NVIDIA 2024 | mixtral-8x22b --gpus 128 --gpu h100 --batch-size 256 --tp 4 --cp 1 --pp 8 \
--schedule interleaved --chunks 7 --microbatches 64 --zero 1 | --ep 8 |
a lecture, 2026 | mixtral-8x22b --tp 4 --cp 1 --pp 4 --ep 8 \
| --gpus 128 --gpu h100 --batch-size 256 |
Gemma 2 2024 | gemma2-27b --gpus 6144 --gpu tpu-v5p --tp 8 --cp 1 --pp 1 --zero 3 \
| --batch-size 1536 |
a lecture, 2026 | gemma2-27b --tp 2 --cp 1 --pp 1 --zero 3 \
| --gpus 6144 --gpu tpu-v5p --batch-size 3072 |
Solar Open 2026 | solar-open --gpus 128 FSDP | --batch-size 1024 | 5,500 tokens/s
Solar Open 2026 | solar-open --gpus 480 FSDP | --batch-size 3840 | 4,267 tokens/s
Solar Open 2026 | solar-open --gpus 480 FSDP --replicate 6 | --batch-size 3840 | 5,400 tokens/s
"""
FSDP = "--gpu b200 --tp 1 --cp 1 --pp 1 --ep 1 --zero 3 --recompute full"
PUBLISHED = PUBLISHED.replace("FSDP", FSDP).splitlines()
CHOICES = "pp", "ep", "chunks", "microbatches", "zero", "recompute"  # made by the planner


def answer(flags):
    """Return plan.py's parsed flags, its best Plan, and that plan's tokens/s per GPU."""
    args = plan.parse(f"--model {flags}".split())
    (best,) = plan.best_plans(args, 1)
    return args, best, args.batch_size * args.seq_len / args.gpus / best.step


def published():
    """Return the table of published runs beside plan.py's answers, in Markdown."""
    lines = ["| source | published | filled in | answer | GB | TFLOP/s | tokens/s | reached |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in PUBLISHED:
        source, given, filled_in, reached = (cell.strip() for cell in row.split("|"))
        args, best, tokens = answer(f"{given} {filled_in}")
        # A causal mask leaves half of the scores.
        flops = hybrid.flops_per_token(plan.config_of(args))
        scores = 3 * args.layers * hybrid.forward_flops(plan.config_of(args), 0)[1]
        flops -= scores / 2
        choices = {name: getattr(best.layout, name) for name in CHOICES if name not in args.given}
        in_use = [name for name in choices if name in CHOICES[3:] or choices[name] > 1]
        chosen = ", ".join(f"{name} {choices[name]}" for name in in_use)
        cells = source, f"`{given}`", f"`{filled_in}`" * bool(filled_in), chosen
        cells += f"{best.held / 1e9:.0f}", f"{tokens * flops / 1e12:.0f}", f"{tokens:,.0f}", reached
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# ---- over the batch ------------------------------------------------------------------------------

MODES = "none", "selective", "full"
OVER_BATCH = {  # the flags of a sweep
    "recomputation": "gpt-145.6b --gpus 128 --gpu a100 --tp 8 --pp 16 --cp 1 --zero 0 "
    "--schedule 1f1b --batch-size 256",
    "strategies": "llama3-70b --gpus 64 --gpu tpu-v5p --seq-len 512 --cp 1 --pp 1 "
    "--batch-size 2048",
}


def swept(name):
    """Return plan.sweep() of the flags of that name."""
    return plan.sweep(plan.parse(f"--model {OVER_BATCH[name]} --sweep batch-size".split()))


def recomputation():
    """Return the table of throughput with and without recomputation, in Markdown."""
    lines = ["| batch | sequences/s: none | selective | full | GB: none | full |", "|---" * 6 + "|"]
    for args, plans in swept("recomputation"):
        cells = [f"{args.batch_size / plans[mode].step:.2f}" for mode in MODES]
        cells += [f"{plans[mode].held / 1e9:.0f}" for mode in ("none", "full")]
        lines.append(f"| {args.batch_size} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def strategies():
    """Return the table of MFU by strategy over the batch, in Markdown."""
    lines = ["| batch | tokens per chip | dp | dp x tp | tp | dp | ZeRO | recomputes |"]
    lines += ["|---" * 8 + "|"]
    for args, plans in swept("strategies"):
        if not plans:
            continue
        cells = [f"{plan.mfu(plans[n], args):.1%}" if n in plans else "-" for n in ("dp", "dp tp")]
        of = min(plans.values(), key=lambda found: found.step).layout
        tokens = f"{args.batch_size * args.seq_len // args.gpus:,}"
        cells = args.batch_size, tokens, *cells, of.tp, of.dp, of.zero, of.recompute
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


# ---- Solar Open ----------------------------------------------------------------------------------

SOLAR = "solar-open --gpus 480 --gpu b200 --batch-size 3840 --cp 1 --pp 1 --recompute full"
MEASURED = 0.215  # of a B200's TFLOP/s: with it, 128 GPUs reach the published 5,500 tokens/s
LAYOUTS = {  # {name: flags}
    "FSDP": "--tp 1 --ep 1 --zero 3",
    "HSDP": "--tp 1 --ep 1 --zero 3 --replicate 6",
    "HSDP, ep 2": "--tp 1 --ep 2 --zero 3 --replicate 6",
    "ep 2": "--tp 1 --ep 2",
    "ep 8": "--tp 1 --ep 8",
    "tp 2": "--tp 2 --ep 1",
    "fastest": "",
}


def solar_plan(products, flags):
    """Return (args, the best Plan) of these flags if products reach so much of a GPU's TFLOP/s."""
    args = plan.parse(f"--model {flags}".split())
    args.machine = args.machine._replace(products=products)
    return args, plan.best_plans(args, 1)[0]


def solar():
    """Return the table of Solar Open's layouts at two speeds of matrix products, in Markdown."""
    seconds = "compute s | dp s | ep s | tp s"
    lines = [f"| products | layout | tp | dp | ep | ZeRO | {seconds} | tokens/s |"]
    lines += ["|---" * 11 + "|"]
    for products, layout in product((GPUS["b200"].products, MEASURED), LAYOUTS):
        args, best = solar_plan(products, f"{SOLAR} {LAYOUTS[layout]}")
        of, seconds = best.layout, best.seconds
        cells = f"{products:.1%}", layout, of.tp, of.dp, of.ep, of.zero
        cells += tuple(f"{seconds[part]:.2f}" for part in ("compute", "dp", "ep", "tp"))
        tokens = f"{args.batch_size * args.seq_len / args.gpus / best.step:,.0f}"
        lines.append(f"| {' | '.join(map(str, [*cells, tokens]))} |")
    return "\n".join(lines) + "\n"


# ---- the tables ----------------------------------------------------------------------------------

def claims():
    """Return the table of rows(), in Markdown."""
    lines = ["| claim, for 4 ranks | formula | value | counted | test |", "|---|---|---|---|---|"]
    for claim, formula, value, found, file, words in rows():
        lines.append(f"| {claim} | {formula} | {value:,.0f} | {found:,.0f} | `{file}`: {words} |")
    return "\n".join(lines) + "\n"


def schedules():
    """Return the table of schedules, formulas beside simulated values, in Markdown."""
    lines = ["| schedule | bubble | value | counted | activations | value | counted |"]
    lines += ["|---|---|---|---|---|---|---|"]
    plain = lambda formula: formula.replace(" * ", "").replace("*", "")
    for name, (bubble, value, peak, most) in SCHEDULED.items():
        idle, held, _ = measure(name, P, 8)
        numbers = f"{value:g} | {idle:g} | {plain(peak)} | {most:g} | {held:g}"
        lines.append(f"| `{name}` | {plain(bubble)} | {numbers} |")
    return "\n".join(lines) + "\n"


def timelines():
    """Return drawings of some schedules, in Markdown."""
    lines = []
    for name, m in ("1f1b", 8), ("zb-h1", 8), ("zb-h2", 8), ("interleaved", 4), ("dualpipe", 8):
        drawing = draw(SCHEDULES[name](P, m)).splitlines()
        lines += [f"    {line}" for line in [f"{name}, {m} microbatches", *drawing]]
        lines.append("")
    return "\n".join(["", *lines])


PARTS = [claims, sizing, schedules, timelines, megatron, published, solar, recomputation]
PARTS += [strategies, interruptions]


def text():
    """Return RESULTS.md with new tables between its comments."""
    found = RESULTS.read_text()
    for part in PARTS:
        before, after = found.split(f"<!-- {part.__name__} -->\n")
        _, after = after.split("<!-- end -->\n", 1)
        found = f"{before}<!-- {part.__name__} -->\n{part()}<!-- end -->\n{after}"
    return found


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--write"]):
        print(f"claims.py: error: not --write: {' '.join(sys.argv[1:])}", file=sys.stderr)
        sys.exit(2)
    RESULTS.write_text(text()) if sys.argv[1:] else print(text())
