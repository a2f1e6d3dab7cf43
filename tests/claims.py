"""Count all claims anew: `python tests/claims.py` prints them, --write writes tests/RESULTS.md.

Each row has a formula of the literature, its value by plain arithmetic, what four ranks counted,
and the test that holds the claim for all sizes.
"""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
import torch.distributed as dist
from torch import nn

import hybrid
import pipeline
import plan
from collectives import all_gather_single, all_reduce, count_bytes, rank_and_size
from ddp import DistributedDataParallel
from expert_parallel import dispatch_and_combine
from ledger import memory_ledger
from pipeline import SCHEDULES, draw
from ranks import least_bytes, run
from sequence_parallel import allgather_attention, ring_attention, ulysses_attention
from tensor_parallel import attention
from transformer import TransformerLayer, norm_bytes, saved_bytes
from zero import FullyShardedDataParallel, zero_memory

P = 4
RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
B, S, H, A = 2, 64, 64, 8  # batch, sequence, hidden, heads of a layer
N, K = 96, 2  # tokens of a rank, experts that each uses


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
    """Return the bytes that a step of four 480 x 480 matrices sends, and those held per parameter.

    groups: the ranks that share shards, and the ranks that hold copies of a shard (HSDP).
    """
    net = nn.Sequential(*[nn.Linear(480, 480, bias=False) for _ in range(4)])
    count = sum(parameter.numel() for parameter in net.parameters())
    if stage:
        shards, copies = groups or (None, None)
        model = FullyShardedDataParallel(net, shards, net, stage, replicate_group=copies)
    else:
        model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    if stage in (1, 2):
        optimizer.register_step_post_hook(lambda *_: model.reshard())

    def step():
        model(torch.ones(1, 480)).sum().backward()
        optimizer.step()

    step()
    sent = _sent(step)
    optimizer.zero_grad()
    # a backward that is not the last: stage 1 holds whole gradients, stages 2 and 3 shards
    with model.no_sync() if stage == 1 else nullcontext():
        model(torch.ones(1, 480)).sum().backward()
    return sent, memory_ledger(model, optimizer).total() / count


def _two_by_two():
    """Return this rank's group of a pair that shares shards, and of a pair that copies them."""
    rank = dist.get_rank()
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3], [0, 2], [1, 3])]
    return pairs[rank // 2], pairs[2 + rank % 2]


def _layer(mode="none", **options):
    """Return the bytes that a layer sends, and those that it keeps, without its norms'."""
    _, tp = rank_and_size()
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
    return _sent(dispatch_and_combine, x, experts, torch.ones(N, K), P, lambda rows, load: rows)


def count():
    """Return {what: number} of this rank."""
    found = _collectives()
    for stage in range(4):
        found[f"bytes {stage}"], found[f"held {stage}"] = _replicas(stage)
    found["bytes hsdp"], found["held hsdp"] = _replicas(3, *_two_by_two())
    sequence = {"sequence_parallel": True}
    found["tp"], found["kept"] = _layer()
    found["sp"], found["kept sp"] = _layer(**sequence)
    found["kept selective"] = _layer("selective", **sequence)[1]
    found["kept full"] = _layer("full", **sequence)[1]
    for method in (allgather_attention, ring_attention, ulysses_attention):
        found[method.__name__] = _context(method)
    return found | {"experts": _experts()}


def rows():
    """Return [(claim, formula, value, counted, file of its test, words of the test's name)]."""
    found, crossing, sbh = run(P, count)[0], (P - 1) / P, S * B * H
    n, D, scores = 1 << 20, 4 * 4 * 480 * 480, 5 * A * S / H
    kv, tokens = 2 * sbh // P, N * K * H
    small, zero = n // 4, ("zero", "2_2_2_and_3")
    gathered, ulysses = "allgather_attention", "ulysses_attention"
    held, kept = ("zero", "holds_16"), ("sequence_parallel", "bytes_of_the_paper")
    layer, context = ("tensor_parallel", "8_b_s_h"), ("context_parallel", "what_its_formula")
    table = [
        ("all-gather", "n(P-1)/P", n * crossing, "gather", "collectives", "bytes_of_the_formulas"),
        ("ring all-reduce", "2n(P-1)/P", 2 * small * crossing, "ring", "collectives", "bytes_of_the_papers"),
        ("recursive doubling", "n log2 P", small * 2, "doubling", "collectives", "bytes_of_the_papers"),
        ("data parallelism", "2D(P-1)/P", 2 * D * crossing, "bytes 0", "ddp", "around_the_ring"),
        ("ZeRO-1", "2D(P-1)/P", 2 * D * crossing, "bytes 1", *zero),
        ("ZeRO-2", "2D(P-1)/P", 2 * D * crossing, "bytes 2", *zero),
        ("ZeRO-3", "3D(P-1)/P", 3 * D * crossing, "bytes 3", *zero),
        ("HSDP, 2 shards x 2 copies", "3D/2 + 2(D/2)/2", 2 * D, "bytes hsdp", "zero", "across"),
        ("bytes held per parameter", "4 + 4 + 8", 16, "held 0", *held),
        ("by ZeRO-1", "4 + 4 + 8/P", 10, "held 1", *held),
        ("by ZeRO-2", "4 + (4 + 8)/P", 7, "held 2", *held),
        ("by ZeRO-3", "(4 + 4 + 8)/P", 4, "held 3", *held),
        ("by HSDP", "(4 + 4 + 8)/2", 8, "held hsdp", *held),
        ("sent by a layer, tp", "8bsh(P-1)/P, each 4 bytes", 32 * sbh * crossing, "tp", *layer),
        ("sent by a layer, tp + sp", "10bsh(P-1)/P", 40 * sbh * crossing, "sp", *layer),
        ("kept by a layer, tp", "sbh(10 + 24/P + 5as/hP)", sbh * (16 + scores / P), "kept", *kept),
        ("kept, tp + sp", "sbh(34 + 5as/h)/P", sbh * (34 + scores) / P, "kept sp", *kept),
        ("kept, tp + sp, scores recomputed", "34sbh/P", 34 * sbh / P, "kept selective", *kept),
        ("kept, tp + sp, all recomputed", "2sbh/P", 2 * sbh / P, "kept full", *kept),
        ("cp by all-gather", "keys, values x (P-1)", 4 * kv * (P - 1), gathered, *context),
        ("cp by a ring", "the same", 4 * kv * (P - 1), "ring_attention", *context),
        ("cp by Ulysses", "4bsh/P x (P-1)/P", 16 * sbh / P * crossing, ulysses, *context),
        (
            *("experts", "2Nkh(P-1)/P, and counts", 2 * 4 * tokens * crossing + 16 * (P - 1)),
            *("experts", "expert_parallel", "send_the_routed"),
        ),
    ]
    return [(claim, text, value, found[key], *test) for claim, text, value, key, *test in table]


SCHEDULED = {  # bubble of P = 4 stages and m = 8, F = W = 1 and B = 2, and most activations
    "naive": ("m(P-1)(F+B)", 72, "1", 1),
    "gpipe": ("(P-1)(F+B)", 9, "m", 8),
    "1f1b": ("(P-1)(F+B)", 9, "P", 4),
    "interleaved": ("(P-1)(F+B)/v", 4.5, "P + (P-1)/v", 5.5),
    "zb-h1": ("(P-1)(F+B-2W)", 3, "P", 4),
    "zb-h2": ("(P-1)(F+B-3W)", 0, "2P-1", 7),
    "zb-v": ("(P-1)(B-2W)", 0, "P", 4),
    "dualpipe": ("(P/2-1)(F+2B-3W), at most", 2, "P + 1", 5),
}


# source | flags of plan.py that it gives | flags filled in here | what a GPU reached
PUBLISHED = """\
Narayanan 2021 | gpt-7.5b --gpus 128 --batch-size 512 --tp 4 --pp 1 OF_2021 | | 142 TFLOP/s
Narayanan 2021 | gpt-145.6b --gpus 1536 --batch-size 2304 --tp 8 --pp 8 --schedule interleaved \
OF_2021 | | 148 TFLOP/s
Narayanan 2021 | gpt-1008.0b --gpus 3072 --batch-size 3072 --tp 8 --pp 64 --schedule 1f1b \
OF_2021 | | 163 TFLOP/s
Llama 3 2024 | llama3-405b --gpus 8192 --gpu h100 --tp 8 --cp 1 --pp 16 | | 430 TFLOP/s
Llama 3 2024 | llama3-405b --gpus 16384 --gpu h100 --tp 8 --cp 1 --pp 16 | | 400 TFLOP/s
Llama 3 2024 | llama3-405b --gpus 16384 --gpu h100 --seq-len 131072 --tp 8 --cp 16 --pp 16 \
| | 380 TFLOP/s
DeepSeek-V3 2024 | deepseek-v3 --gpus 2048 --gpu h800 --batch-size 15360 --tp 1 --cp 1 --pp 16 \
--ep 64 --schedule dualpipe --zero 1 | | 1,543 tokens/s
Kimi K2 2025 | kimi-k2 --gpu h800 --tp 1 --cp 1 --pp 16 --ep 16 --schedule interleaved --zero 1 \
| --gpus 2048 --batch-size 4096 |
GLM-5 2026 | glm-5 --schedule interleaved --zero 2 \
| --gpus 2048 --gpu h800 --batch-size 4096 --tp 1 --cp 2 |
NVIDIA 2024 | mixtral-8x22b --gpus 128 --gpu h100 --batch-size 256 --tp 4 --cp 1 --pp 8 \
--schedule interleaved --chunks 7 --microbatches 64 --zero 1 | --ep 8 |
Gemma 2 2024 | gemma2-27b --gpus 6144 --gpu tpu-v5p --tp 8 --cp 1 --pp 1 --zero 3 \
| --batch-size 1536 |
Solar Open 2026 | solar-open --gpus 128 FSDP | --batch-size 1024 | 5,500 tokens/s
Solar Open 2026 | solar-open --gpus 480 FSDP | --batch-size 3840 | 4,267 tokens/s
Solar Open 2026 | solar-open --gpus 480 FSDP --replicate 6 | --batch-size 3840 | 5,400 tokens/s
"""
FSDP = "--gpu b200 --tp 1 --cp 1 --pp 1 --ep 1 --zero 3 --recompute full"
PUBLISHED = PUBLISHED.replace("OF_2021", "--gpu a100 --cp 1 --zero 0 --recompute full")
PUBLISHED = PUBLISHED.replace("FSDP", FSDP).splitlines()
CHOICES = "pp", "ep", "chunks", "microbatches", "zero", "recompute"  # of the planner


def answer(flags):
    """Return plan.py's flags, its best Plan, and the tokens/s per GPU."""
    args = plan.parse(f"--model {flags}".split())
    (best,) = plan.best_plans(args, 1)
    return args, best, args.batch_size * args.seq_len / args.gpus / best.step


def published():
    """Return the table of PUBLISHED beside what plan.py answers, in Markdown."""
    lines = ["| source | published | filled in | answer | GB | TFLOP/s | tokens/s | reached |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in PUBLISHED:
        source, given, filled_in, reached = (cell.strip() for cell in row.split("|"))
        args, best, tokens = answer(f"{given} {filled_in}")
        # as they count: with what is recomputed, or with the half of scores that a mask leaves
        flops = hybrid.flops_per_token(plan.config_of(args))
        scores = 3 * args.layers * hybrid.forward_flops(plan.config_of(args), 0)[1]
        flops = 4 / 3 * flops if "gpt" in given else flops - scores / 2
        choices = {name: getattr(best.layout, name) for name in CHOICES if name not in args.given}
        in_use = [name for name in choices if name in CHOICES[3:] or choices[name] > 1]
        chosen = ", ".join(f"{name} {choices[name]}" for name in in_use)
        cells = source, f"`{given}`", f"`{filled_in}`" * bool(filled_in), chosen
        cells += f"{best.held / 1e9:.0f}", f"{tokens * flops / 1e12:.0f}", f"{tokens:,.0f}", reached
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def figures():
    """Return {name: number} of the sentences in TEXT."""
    rows = [row.split("|")[1:3] for row in PUBLISHED]
    fsdp, hsdp = (given for given, _ in rows[-2:])
    rates = [answer(" ".join(row))[2] for row in rows[-3:]]
    twice = [answer(f"{given} --batch-size 7680")[2] for given in (fsdp, hsdp)]
    kimi = next(given for given, _ in rows if "kimi" in given)
    _, plan_of_kimi, _ = answer(f"{kimi} --gpus 2048 --batch-size 4096")
    try:
        answer(f"{kimi} --gpus 256 --batch-size 4096")
    except ValueError as error:
        refusal = error
    _, kept, _ = answer(f"{rows[3][0]} --zero 2 --recompute none --microbatches 32 --gpu b200")
    pause = 54 * 24 * 3600 / 419  # seconds: Llama 3's unexpected interruptions
    return {
        "own": ", ".join(f"{7.5 * zero_memory(stage, 64):.3g}" for stage in range(4)),
        "most": ", ".join(f"{80 / zero_memory(stage, 8, 2, 2, 8):.3g}" for stage in range(4)),
        "seven": 7 * zero_memory(0, 1), "kept": kept.held / 1e9, "refusal": refusal,
        "state": (plan_of_kimi.held - plan_of_kimi.memory["activations"]) / 1e9,
        "lost": 1 - rates[1] / rates[0], "won": rates[2] / rates[1] - 1,
        "fast": rates[2] / 5400, "again": twice[1] / twice[0] - 1,
        "hours": pause / 3600, "minutes": plan.checkpoint_interval(60, pause) / 60,
    }


def claims():
    """Return the table of rows(), in Markdown."""
    lines = ["| claim, for 4 ranks | formula | value | counted | test |", "|---|---|---|---|---|"]
    for claim, formula, value, found, file, words in rows():
        lines.append(f"| {claim} | {formula} | {value:,.0f} | {found:,.0f} | `{file}`: {words} |")
    return "\n".join(lines) + "\n"


def schedules():
    """Return the table of SCHEDULED beside what is simulated, in Markdown."""
    lines = ["| schedule | bubble | value | counted | activations | value | counted |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, (bubble, value, peak, most) in SCHEDULED.items():
        _, _, (_, idle), (_, held) = pipeline.figures(name, P, 8)
        numbers = f"{value:g} | {idle:g} | {peak} | {most:g} | {held:g}"
        lines.append(f"| `{name}` | {bubble} | {numbers} |")
    return "\n".join(lines) + "\n"


def timelines():
    """Return drawings of some schedules, in Markdown."""
    lines = []
    for name, m in ("1f1b", 8), ("zb-h1", 8), ("zb-h2", 8), ("interleaved", 4), ("dualpipe", 8):
        drawing = draw(SCHEDULES[name](P, m)).splitlines()
        lines += [f"    {line}" for line in [f"{name}, {m} microbatches", *drawing]]
        lines.append("")
    return "\n".join(lines)


TEXT = """# Results

This file is written by `python tests/claims.py --write`; tests/test_readme.py compares the two.

## Claims

All rows are for P = 4 ranks. They count the bytes that one rank sends or holds in one operation,
one training step, or one layer, forward and backward (attention and experts: forward alone). A
tensor has n bytes, all gradients have D; a layer has batch b, sequence s, width h and a heads; each
of N tokens uses k experts. The named test holds a claim for all sizes.

{claims}
With 16-bit parameters and gradients and 12 bytes of optimizer state, a model of 7B parameters takes
{seven:.0f} GB. On 64 GPUs one of 7.5B takes {own} GB per GPU under stages 0 to 3 of ZeRO
(Rajbhandari et al., 2020). With 16-bit moments, 12 bytes in all, 8 GPUs of 80 GB hold models of at
most {most}B parameters.

The 419 interruptions of Llama 3 in 54 days on 16,384 GPUs are one in {hours:.1f} hours. A checkpoint
that takes one minute is then best written every {minutes:.0f} minutes (Young, 1974).

## Schedules

F = 1 and B = 2, of which W = 1 is for the weights; m = 8 microbatches, v = 2 chunks per rank. The
bubble is a rank's idle time; activations count the microbatches that the fullest rank holds.

{schedules}
The bubble of `gpipe` and `1f1b` is (P-1)/m of the ideal time m(F+B), and (P-1)/(m+P-1) of the whole
step: with m = 4P microbatches, less than a fifth.

{timelines}
## Published layouts

Each row is a layout that its source published, in flags of `tests/plan.py --model`; the flags in
"filled in" were not published. An axis that a source does not use has degree 1. The planner chooses
what is left open. TFLOP/s and tokens/s are per GPU. TFLOP/s are counted as the source does: those of
2021 include what is recomputed, the others only the half of attention that a causal mask leaves.

{published}
Sources: Narayanan et al., 2021, table 1; the technical reports of Llama 3 (table 4), DeepSeek-V3,
Kimi K2, GLM-5, Gemma 2 and Solar Open; NVIDIA's page on mixtures of experts in Megatron Core 0.8.

- Llama 3 recomputed nothing on 8,192 GPUs. By these formulas that takes {kept:.0f} GB, and the
  planner leaves 6 of a GPU's 86 GB to CUDA and NCCL. So it recomputes, and predicts too little.
- DeepSeek-V3 took 180,000 GPU hours for 10^12 tokens, in FP8. The planner knows bf16 alone.
- Kimi K2 runs on any multiple of 256 GPUs. The report gives about 30 GB of state per GPU, the
  planner {state:.0f} on 2,048 GPUs. On 256 it finds that {refusal} GB;
  there the report moves optimizer state to host memory.
- Of GLM-5 only the methods are known here: the row says that such a layout is possible.
- NVIDIA's page gives Mixtral tp 4 and ep 2, and tp cuts each expert, too. Here experts stay whole,
  and the same 8 ranks divide them by `--ep 8`.
- Gemma 2's report gives 768-way data and 8-way model parallelism, sharded as by ZeRO-3; a lecture
  gives tp 2. The planner's step is far too slow: each message costs the host 60 us, and a ring of
  768 ranks sends 767 in a row. A TPU's torus has no such cost.
- Solar Open lost 22% of its speed from 16 to 60 nodes, and won 27% back with HSDP, whose 6 copies
  are each sharded over 10 nodes. The planner loses {lost:.0%} and wins {won:.0%}, but is {fast:.1f} times as
  fast: it prices the products of small experts like large ones. Its batch is a guess, and with
  twice the batch HSDP wins {again:.0%}.
"""


def text():
    """Return the file's text."""
    parts = claims, schedules, timelines, published
    return TEXT.format(**figures(), **{part.__name__: part() for part in parts})


if __name__ == "__main__":
    RESULTS.write_text(text()) if sys.argv[1:] == ["--write"] else print(text())
