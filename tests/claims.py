"""Count all claims again: `python tests/claims.py` prints RESULTS.md, and --write rewrites it.

Each row has a formula from the literature, its value by plain arithmetic, the number that four
ranks counted, and the test that checks the claim for all sizes.
"""

import gc
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
from pipeline import SCHEDULES, draw
from ranks import least_bytes, run
from sequence_parallel import allgather_attention, ring_attention, ulysses_attention
from tensor_parallel import attention
from transformer import TransformerLayer, bytes_of_new_tensors, norm_bytes, saved_bytes
from zero import FullyShardedDataParallel

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
    if stage in (1, 2):
        optimizer.register_step_post_hook(lambda *_: model.reshard())

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
    return _sent(dispatch_and_combine, x, experts, torch.ones(N, K), P, lambda rows, *_: rows)


def count():
    """Return {what: the number that this rank counted}."""
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
    small, zero, papers = n // 4, ("zero", "2_2_2_and_3"), ("collectives", "bytes_of_the_papers")
    gathered, ulysses = "allgather_attention", "ulysses_attention"
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
        ("kept by a layer, tp", "sbh(10 + 24/P + 5as/hP)", sbh * (16 + scores / P), "kept", *kept),
        ("kept, tp + sp", "sbh(34 + 5as/h)/P", sbh * (34 + scores) / P, "kept sp", *kept),
        ("kept, tp + sp, scores recomputed", "34sbh/P", 34 * sbh / P, "kept selective", *kept),
        ("kept, tp + sp, all recomputed", "2sbh/P", 2 * sbh / P, "kept full", *kept),
        ("cp by all-gather", "keys, values x (P-1)", 4 * kv * (P - 1), gathered, *context),
        ("cp by a ring", "the same", 4 * kv * (P - 1), "ring_attention", *context),
        ("cp by Ulysses", "4bsh/P x (P-1)/P", 16 * sbh / P * crossing, ulysses, *context),
        ("experts", "2Nkh(P-1)/P, and counts", 8 * tokens * crossing + 16 * (P - 1), *routed),
    ]
    return [(claim, text, value, found[key], *test) for claim, text, value, key, *test in table]


SCHEDULED = {  # bubble and most activations for P = 4, m = 8, F = W = 1, B = 2
    "naive": ("m(P-1)(F+B)", 72, "1", 1),
    "gpipe": ("(P-1)(F+B)", 9, "m", 8),
    "1f1b": ("(P-1)(F+B)", 9, "P", 4),
    "interleaved": ("(P-1)(F+B)/v", 4.5, "P + (P-1)/v", 5.5),
    "zb-h1": ("(P-1)(F+B-2W)", 3, "P", 4),
    "zb-h2": ("(P-1)(F+B-3W)", 0, "2P-1", 7),
    "zb-v": ("(P-1)(B-2W)", 0, "P", 4),
    "dualpipe": ("(P/2-1)(F+2B-3W), at most", 2, "P + 1", 5),
}


# source | plan.py's flags in the source | flags filled in here | the speed that a GPU reached
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
        # The GPT paper counts recomputed FLOPs; the others count the unmasked half of the scores.
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
    return "\n".join(["", *lines])


def text():
    """Return RESULTS.md with new tables between its comments."""
    found = RESULTS.read_text()
    for part in claims, schedules, timelines, published:
        before, after = found.split(f"<!-- {part.__name__} -->\n")
        _, after = after.split("<!-- end -->\n", 1)
        found = f"{before}<!-- {part.__name__} -->\n{part()}<!-- end -->\n{after}"
    return found


if __name__ == "__main__":
    RESULTS.write_text(text()) if sys.argv[1:] == ["--write"] else print(text())
