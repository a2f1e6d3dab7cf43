"""All claims, counted anew: `python tests/claims.py` prints them, --write into tests/RESULTS.md.

Each row has a formula of the literature, its value worked out here by plain arithmetic, what four
ranks counted, and the test that holds it in every size.
"""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
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
from zero import FullyShardedDataParallel

P = 4
RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
B, S, H, A = 2, 64, 64, 8  # batch, sequence, hidden, heads of a layer
N, K = 96, 2  # tokens of a rank, experts that each uses


def _sent(function, *arguments):
    """Bytes that this rank sends in a call."""
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


def _replicas(stage):
    """(bytes that a step sends, bytes held per parameter) of replicas of four matrices of 480."""
    net = nn.Sequential(*[nn.Linear(480, 480, bias=False) for _ in range(4)])
    count = sum(parameter.numel() for parameter in net.parameters())
    if stage:
        model = FullyShardedDataParallel(net, units=net, stage=stage)
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
    # of several backwards all but the last: in stage 1 whole gradients add up, in 2 and 3 shards
    with model.no_sync() if stage == 1 else nullcontext():
        model(torch.ones(1, 480)).sum().backward()
    return sent, memory_ledger(model, optimizer).total() / count


def _layer(mode="none", **options):
    """(bytes that a layer sends, forward and backward; bytes that it keeps, but for its norms)."""
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
    experts = (torch.arange(N * K).view(N, K) + rank) % P  # as many tokens for each
    x = torch.zeros(N, H)
    return _sent(dispatch_and_combine, x, experts, torch.ones(N, K), P, lambda rows, load: rows)


def count():
    """{what: number} of this rank."""
    found = _collectives()
    for stage in range(4):
        found[f"bytes {stage}"], found[f"held {stage}"] = _replicas(stage)
    sequence = {"sequence_parallel": True}
    found["tp"], found["kept"] = _layer()
    found["sp"], found["kept sp"] = _layer(**sequence)
    found["kept selective"] = _layer("selective", **sequence)[1]
    found["kept full"] = _layer("full", **sequence)[1]
    for method in (allgather_attention, ring_attention, ulysses_attention):
        found[method.__name__] = _context(method)
    return found | {"experts": _experts()}


def rows():
    """[(claim, formula, its value, counted, file of its test, words in the name of its test)]

    n, D: bytes of the tensor, of all gradients; F and B = 2F: a rank's forward and backward.
    """
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
        ("memory per parameter", "4 + 4 + 8", 16, "held 0", *held),
        ("with ZeRO-1", "4 + 4 + 8/P", 10, "held 1", *held),
        ("with ZeRO-2", "4 + (4 + 8)/P", 7, "held 2", *held),
        ("with ZeRO-3", "(4 + 4 + 8)/P", 4, "held 3", *held),
        ("a layer of tp", "8bsh(P-1)/P, each 4 bytes", 32 * sbh * crossing, "tp", *layer),
        ("a layer of tp + sp", "10bsh(P-1)/P", 40 * sbh * crossing, "sp", *layer),
        ("it keeps, tp", "sbh(10 + 24/P + 5as/hP)", sbh * (16 + scores / P), "kept", *kept),
        ("tp + sp", "sbh(34 + 5as/h)/P", sbh * (34 + scores) / P, "kept sp", *kept),
        ("the scores again", "34sbh/P", 34 * sbh / P, "kept selective", *kept),
        ("all again", "2sbh/P", 2 * sbh / P, "kept full", *kept),
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


# layouts as they were trained, by the flags of plan.py; TFLOP/s of a GPU, if known, of
# Megatron-LM's GPTs with those of recomputation
PUBLISHED = {
    "gpt-7.5b --gpus 128 --gpu a100 --batch-size 512 --tp 4 --pp 1": 142,
    "gpt-145.6b --gpus 1536 --gpu a100 --batch-size 2304 --tp 8 --pp 8 --schedule interleaved": 148,
    "gpt-1008.0b --gpus 3072 --gpu a100 --batch-size 3072 --tp 8 --pp 64 --schedule 1f1b": 163,
    "llama3-405b --gpus 8192 --gpu h100 --tp 8 --pp 16": 430,
    "llama3-405b --gpus 16384 --gpu h100 --tp 8 --pp 16": 400,
    "llama3-405b --gpus 16384 --gpu h100 --seq-len 131072 --tp 8 --pp 16 --cp 16": 380,
    "deepseek-v3 --gpus 2048 --gpu h800 --tp 1 --pp 16 --ep 64 --schedule dualpipe": None,
    "kimi-k2 --gpus 2048 --gpu h800 --tp 1 --pp 16 --ep 16 --schedule interleaved": None,
    "glm-5 --gpus 2048 --gpu h800 --tp 1 --schedule interleaved --zero 2 --cp 2": None,
    "mixtral-8x22b --gpus 128 --gpu h100 --tp 4 --pp 4 --ep 8": None,
    "gemma2-27b --gpus 6144 --gpu tpu-v5p --batch-size 3072 --tp 2 --pp 1 --zero 3": None,
}


def published():
    """What plan.py answers to them, in Markdown."""
    lines = ["| `python tests/plan.py --model` | answer | GB | TFLOP/s | reached |"]
    lines += ["|---|---|---|---|---|"]
    for flags, reached in PUBLISHED.items():
        flags += "" if "--cp" in flags else " --cp 1"
        flags += " --zero 0 --recompute full" if "gpt" in flags else ""
        args = plan.parse(f"--model {flags}".split())
        config, (best, *_) = plan.config_of(args), plan.best_plans(args, 1)
        tokens, of = args.batch_size * args.seq_len / args.gpus, best.layout
        # as they count: with what is recomputed, or with the half of scores that a mask leaves
        flops = hybrid.flops_per_token(config)
        scores = 3 * args.layers * hybrid.forward_flops(config, 0)[1]
        flops = 4 / 3 * flops if "gpt" in flags else flops - scores / 2
        tflops = flops * tokens / best.step / 1e12
        name = f"{of.schedule} {of.chunks}, " if of.schedule == "interleaved" else ""
        chosen = [(axis, getattr(of, axis)) for axis in ("pp", "ep") if f"--{axis}" not in flags]
        name += "".join(f"{axis} {degree}, " for axis, degree in chosen if degree > 1)
        answer = f"{name}m {of.microbatches}, ZeRO {of.zero}, recompute {of.recompute}"
        numbers = f"{best.held / 1e9:.0f} | {tflops:.0f} | {reached or ''}"
        lines.append(f"| `{flags}` | {answer} | {numbers} |")
    return "\n".join(lines) + "\n"


def block():
    """The tables and timelines, in Markdown."""
    lines = ["| claim, of 4 ranks | formula | value | counted | test |", "|---|---|---|---|---|"]
    for claim, text, value, found, file, words in rows():
        lines.append(f"| {claim} | {text} | {value:,.0f} | {found:,.0f} | `{file}`: {words} |")
    lines += ["", "| schedule | bubble | value | counted | activations | value | counted |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, (bubble, value, peak, most) in SCHEDULED.items():
        _, _, (_, idle), (_, held) = pipeline.figures(name, P, 8)
        numbers = f"{value:g} | {idle:g} | {peak} | {most:g} | {held:g}"
        lines.append(f"| `{name}` | {bubble} | {numbers} |")
    for name, m in ("1f1b", 8), ("zb-h1", 8), ("zb-h2", 8), ("interleaved", 4), ("dualpipe", 8):
        timeline = draw(SCHEDULES[name](P, m)).splitlines()
        lines += ["", *[f"    {line}" for line in [f"{name}, {m} microbatches", *timeline]]]
    return "\n".join(lines) + "\n"


TEXT = """# Results

Made by `python tests/claims.py --write`; tests/test_readme.py compares.

## Claims

Bytes that a rank sends in an operation, a step or a layer, forward and backward (attention and
experts: forward), unless they are kept. P = 4; tensors of n bytes, D of gradients; a layer of batch
b, sequence s, width h and a heads; N tokens that use k experts each; F = 1, B = 2, of which W = 1;
m = 8 microbatches, v = 2 chunks. A test holds each for every size.

{}
## Published layouts

What is not given, the planner chooses. It recomputes where a layout would not fit: by these
formulas Llama 3's on 8,192 GPUs takes 85 GB, of which the planner grants 80.

{}"""


def text():
    """The file's."""
    return TEXT.format(block(), published())


if __name__ == "__main__":
    RESULTS.write_text(text()) if sys.argv[1:] == ["--write"] else print(text())
