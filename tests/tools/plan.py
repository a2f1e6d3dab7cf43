"""Find the fastest layouts of a model on a given number of GPUs, by the formulas of the papers.

    python tests/tools/plan.py --model llama3-405b --gpus 16384 --gpu h100
    python tests/tools/plan.py --gpus 64 --gpu a100 --layers 32 --hidden 4096 --heads 32
    python tests/tools/plan.py --model llama3-70b --gpus 64 --gpu h100 --sweep batch-size

It prints the ten fastest combinations of degrees (tp, cp, pp, dp, ep), each with its fastest layout
that fits into memory. The flags of hybrid.py give the model's sizes or fix a part of the layout. If
no layout is possible, one line says why, and the exit status is 2. --sweep batch-size searches for
the batch, its half, its quarter and so on. It prints the fastest layout of each batch, and how the
MFU depends on recomputation and on the axes in use.

    m x b      the microbatches of a step, and the sequences of each microbatch
    GB         the peak memory of the fullest GPU: weights + gradients + optimizer + activations
    step s     the time of the slowest GPU: compute + its waits for tp, cp, ep, pp and dp + bubble
    TFLOP/s    per GPU, without recomputation; MFU is its ratio to the data sheet's

price() is the idea; memory and seconds follow, then the search. Parameters are those of the model
that hybrid.py builds, and FLOPs are its own. Every model is in bf16, and has identical layers. Two
constants of each GPU are fitted to half of the published runs of dense models (tests/test_plan.py);
RESULTS.md shows the error for other runs.
"""

import argparse
import math
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support"), str(TESTS / "tools")]

import hybrid
from expert_parallel import expert_parallel_bytes
from hybrid import GPTConfig, flops_of_head, forward_flops
from models import GPUS, MODELS
from pipeline import NUM_CHUNKS, SCHEDULES, WeightGradStore, claim
from progress import progress
from sequence_parallel import activation_bytes, context_parallel_bytes
from zero import zero_memory, zero_rounds


class Layout(NamedTuple):
    """How a step is divided among the ranks. Fields are named as the flags of hybrid.py.

    batch: the sequences of a microbatch. unfused: attention writes its scores to memory, as
    Megatron-LM's did in 2021.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    batch: int = 1
    microbatches: int = 1
    sp: bool = False
    cp_method: str = "ring"
    recompute: str = "none"
    ep_nodes: int = 1
    unfused: bool = False
    schedule: str = "1f1b"
    chunks: int = 1  # per rank; zb-v and dualpipe-v have 2
    zero: int = 0
    replicate: int = 1
    moments: str = "fp32"
    recompute_layers: int = 1
    overlap: bool = False

    piece = property(lambda self: Layout(*self[:12]))  # the fields that a layer's work depends on
    # the microbatches that a stage computes; each of DualPipe's two replicas takes half of them
    rounds = property(lambda self: self.microbatches // (1 + (self.schedule == "dualpipe")))


class Plan(NamedTuple):
    """The price of a layout: the fullest GPU's bytes by kind, and a step's seconds by part."""

    layout: Layout
    memory: dict
    seconds: dict

    held = property(lambda self: sum(self.memory.values()))
    step = property(lambda self: sum(self.seconds.values()))


def config_of(args):
    """Return the GPTConfig that the flags describe."""
    return GPTConfig(**{field.name: getattr(args, field.name) for field in fields(GPTConfig)})


def price(config, gpu, layout):
    """Return the Plan of a layout."""
    return Plan(layout, memory_of(config, layout), seconds_of(config, gpu, layout))


# ---- what a rank has -----------------------------------------------------------------------------


class Share(NamedTuple):
    """A rank's part of the model, summed over its stages, and how many ranks come after it."""

    layers: float
    embeddings: float = 0
    heads: float = 0
    behind: int = 0


@lru_cache(maxsize=None)
def shares_of(config, schedule, pp, chunks):
    """Return the Shares of the first rank, of the fullest middle rank, and of the last rank.

    As in hybrid.divide_layers(), the most expensive rank, head included, is as cheap as possible.
    """
    layers = config.layers
    ranks = pp // 2 if schedule == "dualpipe" else pp  # two of DualPipe's have the same stages
    if ranks == 1:
        return [Share(layers, 1, 1)]
    is_v = schedule in ("zb-v", "dualpipe", "dualpipe-v")  # the first rank has both ends
    head = flops_of_head(config) / sum(forward_flops(config, portion_of(config)))
    cost = lambda last: max(math.ceil((layers - last) / (ranks - 1)), last + head)
    needed = max(0, chunks - 1 - is_v)  # stages between the ends have one layer at least
    last = min(range(layers // ranks, needed - 1, -1), key=cost)
    least, most = (layers - last) // (ranks - 1), math.ceil((layers - last) / (ranks - 1))
    middle = Share(most, behind=pp - 1 - (least < most))
    if is_v:
        return [Share(last, 1, 1), middle]
    return [Share(least, 1, 0, pp - 1), middle, Share(last, 0, 1)]


def portion_of(config):
    """Return the fraction of layers that have experts. All formulas are for the mean layer."""
    return (config.experts > 0) * (config.layers // config.moe_every) / config.layers


@contextmanager
def one_process():
    """Provide a process group of one rank, which hybrid.py's modules need."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@lru_cache(maxsize=None)
def parameters_of(config):
    """Return {(part, kind): number} of the parameters of hybrid.py's model, made without memory.

    The parts are "embedding", positions included; one "layer" and one "layer with experts"; "head",
    the last norm included; and "copy", the embedding's weight that a tied head needs on another
    stage. The kinds are "split", by tp; "copied", to each rank of tp; and "experts".
    """
    sizes = {"layers": 2, "moe_every": 2, "topk_nodes": 1}  # the second layer has the experts
    args = replace(hybrid.parse([], 1), **vars(config) | sizes)
    stages = [[(0, 0), (0, 1)]]  # two on one rank: embedding on the first, head on the second
    device, positions = torch.device("meta"), torch.arange(config.seq_len)
    with one_process():
        mesh = hybrid.make_mesh(args)
        chunks = hybrid.make_chunks(args, mesh, device, stages, positions, WeightGradStore())
        rows = hybrid.placements_of(chunks, hybrid.homes_of(mesh), replicated=False)
    layers, found = {}, Counter()
    for number, block in chain(*(chunk.transformer["h"].items() for chunk in chunks)):
        part = "layer with experts" if int(number) else "layer"
        layers |= dict.fromkeys(block.parameters(), part)
    for row in (row for row in rows if not row.is_buffer):
        others = ("embedding", "head")[row.chunk] if row.is_original else "copy"
        kind = "experts" if row.module.is_expert else "split" if row.part else "copied"
        found[layers.get(row.tensor, others), kind] += row.tensor.numel()
    return found


def kinds_of(config, layout, share):
    """Return (count, ZeRO's shards, copies of each shard, stride between their ranks), twice.

    The first tuple describes the rank's dense parameters. The second describes its experts, which
    are divided among the ranks of tp, and then of dp x cp.
    """
    counted, portion, tp = parameters_of(config), portion_of(config), layout.tp
    parts = {
        "embedding": share.embeddings,
        "layer": share.layers * (1 - portion),
        "layer with experts": share.layers * portion,
        "head": share.heads,
        "copy": share.heads * (layout.pp > 1),
    }
    of = lambda kind: sum(times * counted[part, kind] for part, times in parts.items())
    dense, experts = of("split") / tp + of("copied"), of("experts") / layout.ep
    unlike = layout.ep // math.gcd(layout.ep, tp)
    replicas = [layout.dp * layout.cp, layout.dp * layout.cp // unlike]
    copies = [math.gcd(layout.replicate, number) for number in replicas]
    shards = [number // copied for number, copied in zip(replicas, copies)]
    return list(zip((dense, experts), shards, copies, (tp, tp * unlike)))


def count_of(config, layout, share):
    """Return the number of parameters in a rank's share."""
    return sum(number for number, *_ in kinds_of(config, layout, share))


# ---- memory --------------------------------------------------------------------------------------


def memory_of(config, layout):
    """Return {kind: bytes} of the fullest rank: its state, and its peak of activations.

    The state is that of `hybrid.py --dtype bf16`, 2 + 4 + 12 bytes per parameter (zero_memory()).
    ZeRO-3 keeps no bf16 parameters except those that it has gathered.
    """
    ranks, bf16 = [], 2 * (layout.zero < 3)
    optimizer = 8 if layout.moments == "bf16" else 12
    for share in shares_of(config, layout.schedule, layout.pp, layout.chunks):
        held = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
        for number, shards, *_ in kinds_of(config, layout, share):
            held["parameters"] += number * zero_memory(layout.zero, shards, bf16, 0, 0)
            held["gradients"] += number * zero_memory(layout.zero, shards, 0, 4, 0)
            held["optimizer"] += number * zero_memory(layout.zero, shards, 0, 0, optimizer)
        ranks.append(held | {"activations": activations_of(config, layout, share)})
    return max(ranks, key=lambda held: sum(held.values()))


def activations_of(config, layout, share):
    """Return the peak bytes of the activations of unfinished microbatches, and of one backward.

    Zero-bubble schedules also keep the inputs of deferred weight gradients. Backward computes the
    gradients of a matrix's input, in 16 bits, and of the matrix, in 16 and in 32 bits. ZeRO-2 and
    ZeRO-3 hold a layer's gradients in 32 bits, and ZeRO-3 two gathered layers. The loss copies its
    logits to 32 bits. The head's own gradient, in 32 bits, may exceed all of these.
    """
    p, m, v, schedule = layout.pp, layout.microbatches, layout.chunks, layout.schedule
    tokens, h, tp = layout.batch * config.seq_len / layout.cp, config.hidden, layout.tp
    whole, kept = (layer_bytes(config, layout.piece, n) for n in ("none", layout.recompute))
    as_one = min(layout.recompute_layers, max(1, share.layers / v))
    kept /= as_one
    if schedule.startswith("zb"):
        kept = whole + 4 * tokens * h * (1 - 1 / tp) * layout.sp
    flying = claim(schedule, p, m, v, rank=p - 1 - share.behind).peak
    if schedule == "dualpipe":
        flying /= 2  # a microbatch passes one of the rank's two stages
    logits, again = share.heads * tokens * config.vocab_size / tp, layout.recompute == "full"
    held = share.layers * flying * kept
    held += 2 * logits * (flying if schedule in ("gpipe", "zb-h1", "zb-h2") else 1)
    if schedule == "dualpipe" and again and not share.heads:
        held += p / 4 * share.layers * layer_bytes(config, layout.piece, "selective", False)
    portion, layer = portion_of(config), count_of(config, layout, Share(1))
    width = config.mlp_width * (1 - portion + portion * config.top_k) / tp
    matrix = h * config.mlp_width * ((1 - portion) / tp + portion * config.experts / layout.ep)
    if config.is_llama:  # gate and up are one matrix
        width, matrix = 2 * width, 2 * matrix
    inside = 2 * tokens * (h + width) + 2 * matrix + whole * again * as_one
    inside += 4 * (matrix, 0, layer, 2 * layer)[layout.zero]
    return held + max(inside, 4 * logits, 4 * share.heads * h * config.vocab_size / tp)


@lru_cache(maxsize=None)
def layer_bytes(config, layout, recompute, experts=True):
    """Return the bytes that a rank keeps for backward: one microbatch in the mean layer.

    Fused attention keeps as much as unfused attention that recomputes its scores. experts: whether
    the experts' bytes are included.
    """
    portion, tp, heads = portion_of(config), layout.tp, config.heads
    own, kv_heads = config.seq_len / layout.cp, config.kv_heads or heads
    norm = 2 * layout.batch * own * config.hidden / (tp if layout.sp else 1)
    if recompute == "full":
        return norm
    mode, mlp = recompute if layout.unfused else "selective", (1 - portion) * inner_width(config)
    sizes = layout.batch, own, config.hidden, heads, tp, layout.sp, mode, kv_heads, mlp
    kept = activation_bytes(*sizes, config.dropout > 0)
    output = 2 * layout.batch * own * config.hidden / tp
    if recompute == "none" and (layout.cp > 1 or config.is_llama):
        kept += output  # in attention's order, (B, H, T, K), besides the one for the projection
    if recompute == "none" and layout.cp_method == "allgather":  # gathered keys and values
        kept += output * 2 * kv_heads / heads * (layout.cp - 1)
    mixture = mixture_bytes(layout.batch * own / tp, config) - norm
    return kept + experts * portion * mixture


def inner_width(config):
    """Return half the number of elements that an MLP or expert keeps of a token inside it.

    These are the input and the output of GELU, or SwiGLU's gate, up and output.
    """
    return config.mlp_width * (3 if config.is_llama else 2) / 2


def mixture_bytes(tokens, config):
    """Return the bytes that a layer of experts keeps of `tokens`, without the router's scores.

    Per row sent to an expert, these are the row, what the expert keeps inside, and the returned
    result. Per token, they are what each shared expert keeps inside, the input of the shared
    experts, and the router's input in 32 bits.
    """
    k, shared, h = config.top_k, config.shared_experts, config.hidden
    rows = 2 * k * h + 2 * (k + shared) * inner_width(config) + h * (shared > 0)
    return tokens * (2 * rows + 4 * h)


# ---- seconds -------------------------------------------------------------------------------------

ALPHA = 6e-5  # seconds that a batch of messages costs the host


def seconds_of(config, gpu, layout):
    """Return {part: seconds} of a step: compute, exposed communication, and the bubble.

    A stage waits for its messages, which are split over tp. --overlap hides ep behind compute in
    pairs of passes. All ranks meet for the gradient norm at the end of a step. So in a schedule
    whose ranks finish one after the other, the first ones wait for the last.
    """
    schedule, pp, m, chunks = layout.schedule, layout.pp, layout.microbatches, layout.chunks
    layer, head = (forward + backward for forward, backward, _ in works(config, gpu, layout.piece))
    shares = shares_of(config, layout.schedule, layout.pp, layout.chunks)
    busiest = max((share.layers * layer + share.heads * head for share in shares), key=sum)
    seconds = dict(zip(("compute", "tp", "cp", "ep"), layout.rounds * busiest))
    if layout.overlap:
        hidden = min(seconds["ep"], seconds["compute"])
        seconds["ep"] -= share_in_pairs(schedule, pp, m) * hidden
    is_far = pp * layout.dp * layout.cp * layout.tp > gpu.per_node
    message = 2 * layout.batch * config.seq_len * config.hidden / layout.cp / layout.tp
    message = ALPHA + gpu.move(message, gpu.network if is_far else gpu.node)
    seconds["pp"] = chunks * m * min(2, pp - 1) * message
    pairs = zip(*works(config, gpu, layout.piece))
    times = [np.sum(config.layers * a + b) / pp for a, b in pairs]  # mean over the ranks
    seconds["dp"] = replica_seconds(config, gpu, layout, *times[:2])
    bubble = claim(schedule, pp, m, chunks, 0, *times).bubble if pp > 1 else 0.0
    staggered = {"zb-h2": times[0], "zb-v": (times[1] - times[2]) / 2}
    seconds["bubble"] = (pp - 1) * staggered[schedule] if schedule in staggered else bubble
    return seconds


def share_in_pairs(schedule, p, m):
    """Return the share of a rank's forward passes that --overlap pairs with a backward.

    This is the rank with the fewest pairs. See pairs_of() in pipeline.py.
    """
    if schedule == "dualpipe":  # a rank computes m microbatches in two replicas of a stage
        return 1 - (3 * p / 2 - 1) / m
    return 1 - (3 * p - 1) / (2 * m)


@lru_cache(maxsize=None)
def works(config, gpu, layout):
    """Return (forward, backward, weight) of one microbatch, for the mean layer and for the head.

    forward and backward are seconds of (compute, exposed tp, exposed cp, exposed ep); weight is
    the part of backward's compute that produces weight gradients. Activations that are kept are
    written in forward and read in backward.
    """
    tokens = layout.batch * config.seq_len / layout.cp / layout.tp
    pace = tokens / (gpu.products * gpu.tflops * 1e12)
    product, core = (pace * flops for flops in forward_flops(config, portion_of(config)))
    # A fused kernel skips the masked half of the scores, and recomputes the scores in backward.
    core, more = (core, 0) if layout.unfused else (core / 2, core / 4)
    kept = layer_bytes(config, layout, "none" if layout.unfused else "selective")
    rest = core + 2 * gpu.move(kept, gpu.memory_speed)
    ahead, back = messages(config, gpu, layout, core)
    forward = np.array([product + rest, *ahead])
    backward = np.array([2 * product + 2 * rest + more, *back])
    selective = np.array([core, 0, ahead[1], 0])
    backward += {"none": 0, "selective": selective, "full": forward}[layout.recompute]
    head = flops_of_head(config) * pace
    # Logits are written and read in 16 bits, and in 32 bits for the loss.
    loss = np.array([head + gpu.move(12 * tokens * config.vocab_size, gpu.memory_speed), 0, 0, 0])
    return (forward, backward, product), (loss, 2 * loss, head)


def messages(config, gpu, layout, core):
    """Return a layer's exposed seconds (tp, cp, ep) in forward and in backward.

    core: the seconds of attention's core, behind which ring attention hides its messages.

    tp sums after attention and after the MLP in forward, and before them in backward; a sum is a
    reduce-scatter and an all-gather. With --sp, backward gathers twice more. Without --sp, the tp
    ranks divide a layer's tokens before the experts and gather the results after them. A token is
    sent once to each node that holds one of its experts, and there to each of these experts.
    """
    tp, cp, portion, h = layout.tp, layout.cp, portion_of(config), config.hidden
    heads = config.heads // tp, (config.kv_heads or config.heads) // tp, h // config.heads, cp
    around = context_parallel_bytes(layout.cp_method, layout.batch, config.seq_len, *heads, 2)
    speed = gpu.network if cp * tp > gpu.per_node else gpu.node
    nodes, tokens = layout.ep_nodes, layout.batch * config.seq_len // cp
    copies = min(config.top_k, nodes, config.topk_nodes or nodes)
    near = expert_parallel_bytes(tokens // tp, config.top_k, h, layout.ep // nodes, 2)
    far = expert_parallel_bytes(tokens // tp, copies, h, nodes, 2)
    dealt = portion * (gpu.move(near, gpu.node) + gpu.move(far, gpu.network))
    turn, found = shard_seconds(gpu, 2 * tokens * h, tp), []
    for times, turns in (1, 4), (2, 6 if layout.sp else 4):
        turns += portion * ((not layout.sp) - turns / 2)
        exposed = (cp - 1) * ALPHA + gpu.move(around[times - 1], speed)
        exposed -= (layout.cp_method == "ring") * times * core
        found.append((turns * turn, max(0.0, exposed), dealt))
    return found


@lru_cache(maxsize=None)
def shard_seconds(gpu, nbytes, size, stride=1):
    """Return the seconds of a reduce-scatter or an all-gather among `size` ranks `stride` apart.

    Inside a node it is one direct exchange. Between nodes each GPU handles its part, by recursive
    halving if the number of nodes is a power of two, and around a ring otherwise.
    """
    inside = math.gcd(size, max(1, gpu.per_node // stride))
    nodes = size // inside
    steps = nodes.bit_length() - 1 if nodes & (nodes - 1) == 0 else nodes - 1
    near, far = (inside - 1) / inside * nbytes, (nodes - 1) / size * nbytes
    host = ALPHA * (steps + (inside > 1)) * (nbytes > 0)
    return host + gpu.move(near, gpu.node) + gpu.move(far, gpu.network)


def replica_seconds(config, gpu, layout, forward, backward):
    """Return the seconds of dp that compute does not hide, with one message for each layer.

    forward, backward: the seconds of one microbatch. Gradients are sent during the last backward;
    an interleaved schedule sends those of all chunks but one during the last p microbatches.
    Weights are gathered during forward in the same way. ZeRO's messages of a microbatch overlap
    its forward and backward.
    """
    layers = math.ceil(config.layers / layout.pp) * (layout.microbatches // layout.rounds)
    scatter, gather = 0.0, 0.0
    mean = Share(1, 1 / layers, (layout.pp == 1) / layers)  # embedding and head, if one rank has both
    for number, shards, copies, stride in kinds_of(config, layout, mean):
        scatter += layers * shard_seconds(gpu, 4 * number, shards, stride)
        scatter += layers * 2 * shard_seconds(gpu, 4 * number / shards, copies, shards * stride)
        gather += layers * shard_seconds(gpu, 2 * number, shards, stride)
    chunked = layout.schedule == "interleaved" and not layout.unfused  # not yet so in 2021
    span = (layout.pp * (layout.chunks - 1) + 1) / layout.chunks if chunked else 1
    if not layout.zero:  # gradients are all-reduced in 32 bits
        return max(0.0, 2 * scatter - span * backward)
    scatters, gathers = zero_rounds(layout.zero, layout.rounds, layout.recompute_layers)
    regather = gather * max(0, gathers / layout.rounds - 1)  # stage 3 gathers again in backward
    exposed = max(0.0, scatter + gather * (gathers > 1) + regather - forward - backward)
    ends = max(0.0, scatter + regather - span * backward) + max(0.0, gather - span * forward)
    return (scatters - 1) * exposed + ends


# ---- the search ----------------------------------------------------------------------------------


def best_plans(args, count=10):
    """Return the `count` fastest Plans that fit, at most one for each (tp, cp, pp, dp, ep).

    Pieces are tried in the order of a lower bound on their time, until that bound exceeds the worst
    plan kept. Raise ValueError if nothing fits.
    """
    plans, pieces = {}, pieces_of(args)
    for bound, piece in by_bound(args, pieces):
        steps = sorted(plan.step for plan in plans.values())
        if len(steps) >= count and bound > steps[count - 1]:
            break
        for plan in plans_of(args, piece):
            keep_faster(plans, plan.layout[:5], plan)
    if not plans:
        layouts = [layout for piece in pieces for layout in layouts_of(args, piece)]
        if not layouts:
            raise ValueError(f"no number of microbatches suits --schedule {args.schedule}")
        config, memory = config_of(args), args.machine.memory
        leanest = min(sum(memory_of(config, layout).values()) for layout in layouts) / 1e9
        raise ValueError(f"no layout fits {memory} GB: the leanest takes {leanest:,.1f}")
    return sorted(plans.values(), key=lambda plan: plan.step)[:count]


def by_bound(args, pieces):
    """Return [(a lower bound on the seconds of a step, piece)], the smallest bound first.

    The bound is the time of compute, tp and cp if all stages took equally long.
    """
    config, bounds = config_of(args), []
    for piece in pieces:
        layer, head = (a + b for a, b, _ in works(config, args.machine, piece))
        stages = sum((config.layers * layer + head)[:3]) / piece.pp
        bounds.append((stages * piece.microbatches, piece))
    return sorted(bounds, key=lambda pair: pair[0])


def keep_faster(plans, key, plan):
    """Put a Plan into a dict, unless a faster one is there."""
    plans[key] = min(plans.get(key, plan), plan, key=lambda plan: plan.step)


def plans_of(args, piece):
    """Yield a Plan for each pipeline of a piece that fits into memory.

    The lowest stage of ZeRO that fits is taken, because higher stages send more.
    """
    config, gpu, fitting = config_of(args), args.machine, set()
    for layout in layouts_of(args, piece):
        pipeline = layout._replace(zero=0)
        if pipeline not in fitting:
            memory = memory_of(config, layout)
            if sum(memory.values()) <= 1e9 * gpu.memory:
                fitting.add(pipeline)
                yield Plan(layout, memory, seconds_of(config, gpu, layout))


def layouts_of(args, piece):
    """Yield a piece's Layouts: each pipeline with all stages of ZeRO in turn, the lowest first."""
    stages = args.fixed.get("zero", [1, 2, 3] if piece.dp * piece.cp > 1 else [0])
    for pipeline, zero in product(pipelines_of(args, piece), stages):
        yield pipeline._replace(zero=zero)


def pieces_of(args, most=200_000):
    """Return all Layouts that hybrid.py accepts, without schedules and stages of ZeRO.

    If it accepts none, raise its ValueError for the layout with the smallest degrees.
    """
    limits = {"tp": args.heads, "cp": args.seq_len // 2, "pp": args.layers + 2, "ep": args.experts}
    divisors = lambda number, most: [n for n in range(1, most + 1) if number % n == 0] or [1]
    degrees = [args.fixed.get(name, divisors(args.gpus, limits[name])) for name in limits]
    modes, found, refused = args.fixed.get("recompute", ["none", "selective", "full"]), [], []
    for tp, cp, pp, ep in product(*degrees):
        if refused and args.gpus % (tp * cp * pp):
            continue
        dp = args.given.get("dp", max(1, args.gpus // (tp * cp * pp)))
        # A node holds gcd(ep, tp) ranks of an expert group, times the tp groups that fit in it.
        nodes = ep // math.gcd(ep, math.gcd(ep, tp) * max(1, args.machine.per_node // tp))
        # Unfused attention stands for 2021, and sequence parallelism is of 2022.
        sp = args.given.get("sp", tp > 1 and not args.unfused)
        sizes = tp, cp, pp, dp, ep, args.batch_size // dp, 1, sp
        others = "none", nodes, args.unfused, "1f1b", 1, 1, args.replicate or 1
        grid = Layout(*sizes, args.cp_method, *others, args.moments)
        more = {"topk_nodes": min(args.topk_nodes or nodes, nodes), "world_size": args.gpus}
        more["per_node"] = args.machine.per_node
        try:
            hybrid.check(argparse.Namespace(**vars(args) | grid._asdict() | args.given | more), {})
        except ValueError as error:
            refused.append(error)
            continue
        counts = args.fixed.get("microbatches", divisors(grid.batch, grid.batch))
        for m, mode in product(counts, modes):
            as_one = args.recompute_layers if mode == "full" else 1
            recomputed = {"recompute": mode, "recompute_layers": as_one}
            found.append(grid._replace(batch=grid.batch // m, microbatches=m, **recomputed))
    if not found:
        raise ValueError(f"no layout of {args.gpus} GPUs: {refused[0]}")
    if len(found) > most:
        raise ValueError(f"{len(found):,} layouts are too many: fix --tp, --pp or --ep")
    return found


CAN_OVERLAP = hybrid.WITH_PAIRS


def pipelines_of(args, piece):
    """Yield a piece's Layouts in all schedules whose formulas hold for its number of microbatches.

    naive and gpipe are left out, because neither is faster than 1f1b. Schedules that can overlap
    the messages of experts do so.
    """
    p = piece.pp
    names = [name for name in SCHEDULES if name not in ("naive", "gpipe")] if p > 1 else ["1f1b"]
    for name in args.fixed.get("schedule", names):
        if claim(name, p, piece.microbatches).holds:
            chosen = args.fixed.get("chunks", range(2, 9))
            for v in chosen if NUM_CHUNKS[name] is None else [NUM_CHUNKS[name]]:
                if p * v <= args.layers + 2:
                    overlap = name in CAN_OVERLAP and piece.ep > 1
                    yield piece._replace(schedule=name, chunks=v, overlap=overlap)


# ---- the sweep -----------------------------------------------------------------------------------

COLUMNS = {  # {name: whether a Layout belongs to it}
    **{mode: lambda of, mode=mode: of.recompute == mode for mode in ("none", "selective", "full")},
    "dp": lambda of: of.tp == of.pp == of.cp == 1,
    "dp tp": lambda of: of.tp > 1 and of.pp == of.cp == 1,
    "dp pp": lambda of: of.pp > 1 and of.tp == of.cp == 1,
    "dp tp pp": lambda of: of.tp > 1 and of.pp > 1 and of.cp == 1,
}


def sweep(args):
    """Return [(args of a smaller or equal batch, {column: its fastest Plan})], by batch.

    The batches are --batch-size, its half, its quarter and so on, as long as they are whole. A
    column of which no layout fits is left out. Raise ValueError if no layout fits at all.
    """
    rows, batch = [], 2 * args.batch_size
    while batch % 2 == 0:
        batch //= 2
        given = args.given | {"batch_size": batch}
        own = argparse.Namespace(**vars(args) | {"batch_size": batch, "given": given})
        rows.insert(0, (own, best_of_columns(own)))
    if not any(plans for _, plans in rows):
        best_plans(args, 1)  # raises the error
    return rows


def best_of_columns(args):
    """Return {column: its fastest Plan that fits}."""
    best = {}
    try:
        pieces = pieces_of(args)
    except ValueError:  # such a batch cannot be divided
        return best
    for bound, piece in by_bound(args, pieces):
        names = [name for name, holds in COLUMNS.items() if holds(piece)]
        if any(name not in best or bound < best[name].step for name in names):
            for plan, name in product(plans_of(args, piece), names):
                keep_faster(best, name, plan)
    return best


# ---- the command ---------------------------------------------------------------------------------


def parse(argv):
    """Return the flags and the model's sizes. A ValueError names the invalid flag and its value."""
    parser = hybrid.Parser()
    parser.prog, parser.description = Path(__file__).name, __doc__.splitlines()[0]
    parser.usage = parser.epilog = None
    group = parser.add_argument_group("plan")
    group.add_argument("--gpus", type=hybrid.at_least(1), required=True, help="number of GPUs")
    group.add_argument("--gpu", choices=GPUS, required=True, help="model of GPU")
    group.add_argument("--model", choices=MODELS, help="sizes of the model; flags override them")
    group.add_argument("--sweep", choices=["batch-size"], help="what to vary (default: nothing)")
    given = vars(parser.parse_args(argv))
    own = {name: given.pop(name) for name in ("gpus", "gpu", "model", "sweep")}
    names = {*Layout._fields, *GPTConfig.__dataclass_fields__, "batch_size"}
    for flag in given.items():
        if flag[0] not in names and flag != ("dtype", "bf16"):
            raise ValueError(f"{hybrid.as_typed(*flag)} means nothing to a plan, which is in bf16")
    args = argparse.Namespace(**{name: each.default for name, each in hybrid.FLAGS.items()}, **own)
    _, config = MODELS.get(args.model, (0, GPTConfig()))
    vars(args).update(vars(config) | given | {"given": given, "machine": GPUS[args.gpu]})
    args.fixed = {name: [value] for name, value in given.items()}
    if args.overlap:
        args.fixed.setdefault("schedule", CAN_OVERLAP)
    args.unfused = (args.model or "").startswith("gpt-")
    args.kv_heads, args.ffn = args.kv_heads or args.heads, args.ffn or 4 * args.hidden
    args.min_lr = args.decay_steps = 0  # check() compares them, but a plan has no learning rate
    usual = 2**24 // args.seq_len if args.model else math.ceil(16 / args.gpus) * args.gpus
    args.batch_size = args.batch_size or usual
    known = ["experts > 0", "block == 'llama'"]  # the plan chooses the other things that flags need
    if "recompute" in given:
        known.append("recompute == 'full'")
    if "schedule" in given:
        known.append(f"schedule in {CAN_OVERLAP}")
    for name, value in given.items():
        needs = hybrid.NEEDS.get(name, "")
        if needs.startswith(tuple(known)) and not hybrid.holds(needs, args):
            raise ValueError(f"{hybrid.as_typed(name, value)} needs {needs}")
    return args


HEADER = "tp  cp   pp    dp  ep ZeRO schedule           m x b    recompute   step s TFLOP/s   MFU"


def mfu(plan, args):
    """Return the fraction of the data sheet's FLOP/s that a Plan reaches."""
    flops = hybrid.flops_per_token(config_of(args)) * args.batch_size * args.seq_len / args.gpus
    return flops / plan.step / args.machine.tflops / 1e12


def line_of(plan, args):
    """Return the line of a Plan under HEADER."""
    of, reached = plan.layout, mfu(plan, args)
    name = f"{of.schedule} {of.chunks}" if NUM_CHUNKS[of.schedule] is None else of.schedule
    if of.overlap:
        name += " overlap"
    line = f"{of.tp:2} {of.cp:3} {of.pp:4} {of.dp:5} {of.ep:3} {of.zero:4} {name:18}"
    line += f"{of.microbatches:5} x {of.batch:<4}{of.recompute:9} {plan.step:8.4g}"
    return f"{line} {reached * args.machine.tflops:7.4g} {reached:5.1%}"


def show(plans, args):
    """Print two tables of the same plans."""
    print(f"    {HEADER}")
    for number, p in enumerate(plans, 1):
        print(f"{number:2}  {line_of(p, args)}")
    waits = "     tp     cp     ep     pp     dp bubble"
    print(f"\n    GB = weights  grads optim. activ.  s = compute{waits}")
    for number, p in enumerate(plans, 1):
        held = " ".join(f"{nbytes / 1e9:6.2f}" for nbytes in p.memory.values())
        compute, *waits = p.seconds.values()
        waits = " ".join(f"{seconds:6.2g}" for seconds in waits)
        print(f"{number:2} {p.held / 1e9:6.1f}  {held} {compute:12.4g} {waits}")


def show_sweep(rows):
    """Print two tables of a sweep: the fastest layout of each batch, and the MFU of each column."""
    print(f"batch {HEADER}")
    for args, plans in rows:
        best = min(plans.values(), key=lambda plan: plan.step, default=None)
        print(f"{args.batch_size:5} {line_of(best, args) if best else ' -'}")
    print("\nMFU in %, to which the throughput is proportional, of the fastest layout that")
    print("      recomputes so                 uses these axes alone (-: none fits)")
    print("batch" + "".join(f"{name:>10}" for name in COLUMNS))
    for args, plans in rows:
        cells = (f"{mfu(plans[name], args):.1%}"[:-1] if name in plans else "-" for name in COLUMNS)
        print(f"{args.batch_size:5}" + "".join(f"{cell:>10}" for cell in cells))


def main(argv=None):
    """Run the command; return the exit status."""
    try:
        args = parse(argv)
        with progress("searches layouts"):
            found = sweep(args) if args.sweep else best_plans(args)
    except ValueError as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        return 2
    config = config_of(args)
    size = count_of(config, Layout(), Share(config.layers, 1, 1)) / 1e9
    print(f"{args.model or 'model'}: {size:.4g}B parameters")
    if args.sweep:
        print(f"{args.gpus} x {args.gpu}, sequences of {args.seq_len} tokens, bf16\n")
        show_sweep(found)
    else:
        print(f"{args.gpus} x {args.gpu}, {args.batch_size} x {args.seq_len} tokens a step, bf16\n")
        show(found, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
