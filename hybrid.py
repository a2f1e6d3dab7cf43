"""Train a small GPT, dense or of experts, over pipeline x data x context x tensor parallelism.

The processes form a grid; along each axis the work is cut in another way, and a process talks only
to those from which it differs in one coordinate:

    pp  pipeline   which layers        neighbours pass activations on; one send per microbatch
    dp  data       which sequences     gradients are summed, once per step
    cp  context    which positions     keys and values travel in attention, once per layer
    tp  tensor     which rows and columns of every matrix; four all-reduces per layer and microbatch

    rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank

tp is innermost since it talks most: its ranks should share a node. Experts are spread over ep
neighbours of dp x cp x tp, where they replace replicas; tp splits attention, and deals out the
tokens that go to experts.

Every layout computes the same thing as one process does: the loss is the sum of the token losses
over the *global* number of tokens, so gradients are summed and never averaged; initial weights
depend on the parameter's name and the seed, batches on the seed and the step, and on nothing else.
What does depend on the layout: masks of dropout, which tokens a capacity drops, which experts
--topk-nodes leaves a token, and the losses of balance, which are those of a microbatch of all
replicas.

Top to bottom: flags, mesh, data, model, initial values, one step, checkpoints, log, the loop with
train(), the summary of this file, and the life of one process.

The model is GPT-2's architecture (Radford et al., 2019), under GPT-2's parameter names. Shoeybi et
al., "Megatron-LM", 2019, and Narayanan et al., "Efficient Large-Scale Language Model Training on
GPU Clusters Using Megatron-LM", 2021.

    python hybrid.py                                                      one process
    torchrun --nproc-per-node 4 hybrid.py                                 four replicas (dp = 4)
    torchrun --nproc-per-node 8 hybrid.py --tp 2 --pp 2 --microbatches 4  dp = 2
    torchrun --nproc-per-node 8 hybrid.py --cp 2 --ep 8 --experts 16      dp = 4
"""

import argparse
import hashlib
import json
import math
import os
import resource
import shutil
import signal
import sys
import sysconfig
import time
from collections import Counter, defaultdict, deque
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, without a traceback

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata, MetadataIndex, TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from collectives import (
    ReduceOp, all_reduce, barrier, broadcast, gather_objects,
    rank_and_size, report_stalls, schedule_as_batch, set_backend_collectives,
    set_ranks_per_node,
)
from ddp import DistributedDataParallel, clip_grads_with_norm_, get_total_norm
from expert_parallel import MoE, tally_metrics
from pipeline import SCHEDULES, Pipeline, WeightGradStore, forward_only, sum_replicas
from sequence_parallel import (
    allgather_attention, context_positions, dropout, recompute, ring_attention, ulysses_attention,
)
from tensor_parallel import (
    ColumnParallelLinear, ParallelSelfAttention, RowParallelLinear, Shard, ShardedRandomState,
    VocabParallelEmbedding, attention, mark_partial, parallel_linear, part_of, partial_parameters,
    rows_held, shards_of, sum_partial_gradients, views_in_whole, vocab_parallel_cross_entropy,
)
from zero import FullyShardedDataParallel

CP_METHODS = {
    "allgather": allgather_attention,
    "ring": ring_attention,
    "ulysses": ulysses_attention,
}
IGNORE_INDEX = -100  # a target that does not count

# ---- flags ---------------------------------------------------------------------------------------


def at_least(least, kind=int, below=math.inf):
    """A type for argparse: numbers from `least` on, below `below`."""

    def number(text):
        if not least <= (value := kind(text)) < below:
            raise argparse.ArgumentTypeError(f"{text} is not in [{least}, {below})")
        return value

    return number


SIZE, COUNT, FACTOR = at_least(1), at_least(0), at_least(0, float)


class Flag(NamedTuple):
    """kind: bool, a tuple of choices, or a type. needs: what it means nothing without."""

    name: str
    kind: object
    default: object
    help: str
    needs: str = ""


GROUPS = {
    "layout": (
        Flag("dp", SIZE, None, "replicas (default: what the others leave of the processes)"),
        Flag("tp", SIZE, 1, "ranks that split every matrix"),
        Flag("cp", SIZE, 1, "ranks that split the sequence, in attention, too"),
        Flag("pp", SIZE, 1, "pipeline stages"),
        Flag("zero", (0, 1, 2, 3), None, "what replicas share out: 1: the optimizer's state, 2: "
             "gradients, too, 3: parameters, too (default: 1; of one replica 0)"),
        Flag("replicate", SIZE, 1, "copies of ZeRO's shards, over neighbours (HSDP)", "zero"),
        Flag("sp", bool, False, "split the sequence over tp outside of its matrices"),
        Flag("cp_method", tuple(CP_METHODS), "ring", "how attention crosses that split", "cp"),
        Flag("schedule", tuple(SCHEDULES), "1f1b", "order of microbatches in the pipeline"),
        Flag("chunks", SIZE, 2, "of a rank's layers", "interleaved"),
        Flag("microbatches", SIZE, None, "of a step (default: what divides 4 x pp)"),
        Flag("ep", SIZE, 1, "ranks of dp x cp x tp over which experts are spread"),
        Flag("recompute", ("none", "selective", "full"), "none", "attention, or every layer"),
        Flag("collectives", ("ours", "backend"), "ours", "backend: NCCL's or gloo's, to compare"),
    ),
    "model": (
        Flag("layers", SIZE, 4, "of the model"),
        Flag("hidden", SIZE, 128, "width of the model"),
        Flag("ffn", SIZE, None, "width of the MLP, and of an expert (default: 4 x --hidden)"),
        Flag("heads", SIZE, 4, "of attention"),
        Flag("kv_heads", SIZE, None, "heads of keys and values (default: --heads)"),
        Flag("seq_len", SIZE, 64, "tokens of a sequence"),
        Flag("vocab_size", SIZE, 256, "tokens there are"),
        Flag("dropout", at_least(0, float, 1), 0.0, "of attention and of what a layer adds"),
        Flag("experts", COUNT, 0, "of a mixture in place of the MLP; 0: an MLP"),
        Flag("top_k", SIZE, 2, "experts that a token uses", "experts"),
        Flag("shared_experts", COUNT, 0, "further ones that every token uses", "experts"),
        Flag("capacity_factor", FACTOR, None, "drop tokens above this load / mean", "experts"),
        Flag("balance", ("aux", "bias", "none"), "aux", "loads by losses or a bias", "experts"),
        Flag("moe_every", SIZE, 1, "every so many layers has experts", "experts"),
        Flag("topk_nodes", SIZE, None, "a token uses, of those of ep (default: all)", "ep"),
    ),
    "training": (
        Flag("batch_size", SIZE, None, "sequences of a step, all replicas' (default: 16 or more)"),
        Flag("steps", SIZE, 1200, "of the optimizer"),
        Flag("lr", FACTOR, 3e-3, "peak learning rate"),
        Flag("warmup", COUNT, 20, "steps of linear warm-up"),
        Flag("weight_decay", FACTOR, 0.1, "of matrices"),
        Flag("grad_clip", FACTOR, 1.0, "largest norm of the gradient; 0 does not clip"),
        Flag("seed", at_least(0, below=2**32), 0, "of weights, batches and dropout"),
        Flag("dtype", ("fp32", "tf32", "bf16"), "fp32", "tf32: of products, on a GPU; bf16: of all "
             "but gradients and the optimizer's copy"),
        Flag("skip_nonfinite", COUNT, 0, "skip steps that are not finite; so many in a row end it"),
    ),
    "run": (
        Flag("device", ("auto", "cpu", "cuda", "shared"), "auto", "cuda: a GPU for each process, "
             "by NCCL; shared: for several, by gloo; auto: cuda if there are enough, else cpu"),
        Flag("data", str, None, "text, a folder of text, a .bin of tokens, or a folder of train.bin"
             " and val.bin (default: Python's own sources)"),
        Flag("checkpoint", str, None, "a folder to keep checkpoints in, and to go on from"),
        Flag("save_every", SIZE, None, "steps (default: at the end, and on SIGTERM)", "checkpoint"),
        Flag("eval_every", SIZE, None, "steps between validations (default: at the end)"),
        Flag("print_every", SIZE, None, "steps of a line, on no terminal (default: some 40 lines)"),
        Flag("metrics", str, None, "write the flags and each step to this file, as JSON"),
        Flag("sample", COUNT, 60, "tokens that the model writes at the end"),
        Flag("prompt", str, None, "text, or tokens such as 5,0,7, that the sample continues"),
        Flag("timeout", at_least(1, below=10**6), 600, "seconds that a rank waits for another"),
    ),
}  # fmt: skip
FLAGS = [flag for group in GROUPS.values() for flag in group]
NEEDS = {  # of the table's last column: in words, and whether it is there
    "cp": ("--cp of 2 or more", lambda a: a.cp > 1),
    "ep": ("--ep of 2 or more", lambda a: a.ep > 1),
    "zero": ("--zero 1, 2 or 3", lambda a: a.zero > 0),
    "interleaved": ("--schedule interleaved", lambda a: a.schedule == "interleaved"),
    "experts": ("--experts", lambda a: a.experts > 0),
    "checkpoint": ("--checkpoint", lambda a: a.checkpoint),
}
RULES = {  # how to say what is wrong, and whether it is; a rule may count on those before it
    "{pp} x {dp} x {cp} x {tp} is not the number of processes, {world_size}": lambda a: (
        a.pp * a.dp * a.cp * a.tp != a.world_size
    ),
    "{dp} x {cp} is not divisible by {replicate}": lambda a: a.dp * a.cp % a.replicate,
    "{dp} x {cp} x {tp} is not divisible by {ep}": lambda a: a.dp * a.cp * a.tp % a.ep,
    "{ep} needs --experts": lambda a: a.ep > 1 and not a.experts,
    "{experts} is not divisible by {ep}": lambda a: a.experts % a.ep,
    "{hidden} is not divisible by {heads}": lambda a: a.hidden % a.heads,
    "{heads} is not divisible by {kv_heads}": lambda a: a.heads % a.kv_heads,
    "{kv_heads} is not divisible by {tp}": lambda a: a.kv_heads % a.tp,
    "{ffn} is not divisible by {tp}": lambda a: (
        a.ffn % a.tp and (not a.experts or a.moe_every > 1)  # experts are not split
    ),
    "{seq_len} is not divisible by 2 x {cp}": lambda a: a.cp > 1 and a.seq_len % (2 * a.cp),
    "{seq_len} is not divisible by {cp} x {tp}, which split what layers or experts get": lambda a: (
        (a.sp or a.experts) and a.seq_len // a.cp % a.tp
    ),
    "{dropout} is not possible with {cp}": lambda a: a.cp > 1 and a.dropout,
    "{cp_method} cannot deal out {heads} and {kv_heads}, split by {tp}, to {cp}": lambda a: (
        a.cp_method == "ulysses"
        and (a.heads // a.tp % a.cp or (a.kv_heads // a.tp % a.cp and a.cp % (a.kv_heads // a.tp)))
    ),
    "{top_k} is more than {experts}": lambda a: a.experts and a.top_k > a.experts,
    "{topk_nodes} is more than the {ep_nodes} nodes of {ep}": lambda a: a.topk_nodes > a.ep_nodes,
    "{top_k} is more than {topk_nodes} have of {experts}": lambda a: (
        a.experts and a.top_k > a.experts // a.ep_nodes * a.topk_nodes
    ),
    "{moe_every} leaves no layer of {layers} with experts": lambda a: (
        a.experts and a.moe_every > a.layers
    ),
    "{vocab_size} is less than {tp}": lambda a: a.vocab_size < a.tp,
    "{batch_size} is not divisible by {dp} x {microbatches}": lambda a: (
        a.batch_size % (a.dp * a.microbatches)
    ),
}


class Parser(argparse.ArgumentParser):
    """Of the command line: what is wrong is a ValueError."""

    def __init__(self):
        super().__init__("hybrid.py", allow_abbrev=False, description=__doc__.splitlines()[0])
        for title, flags in GROUPS.items():
            group = self.add_argument_group(title)
            for name, kind, default, help, needs in flags:
                help += f" (needs {NEEDS[needs][0]})" if needs else ""
                help += f" (default: {default})" if default not in (None, False) else ""
                options = {"type": kind}
                if isinstance(kind, tuple):
                    options = {"type": type(kind[0]), "choices": kind}
                elif kind is bool:
                    options = {"action": "store_true"}
                group.add_argument(as_typed(name), help=help, default=argparse.SUPPRESS, **options)

    def error(self, message):
        raise ValueError(message.removeprefix("argument "))


def as_typed(name, value=True):
    """A flag, as on the command line."""
    dashed = "--" + name.replace("_", "-")
    return dashed if value is True else f"{dashed} {value}"


def read_flags(argv):
    """The flags, each checked for itself; `given` has those that are on the command line.

    Raises ValueError, one line that names flags and values, as the next two do.
    """
    given = vars(Parser().parse_args(argv))
    return argparse.Namespace(**{flag.name: flag.default for flag in FLAGS} | given, given=given)


def parse(argv, world_size, per_node=None):
    """The flags, completed and checked, of world_size processes, per_node of them on each node.

    By default they share one. Adds world_size, per_node, and ep_nodes, over which the ranks of ep
    lie.
    """
    args = read_flags(argv)
    args.world_size, args.per_node = world_size, per_node or world_size
    args.dp = args.dp or max(1, world_size // (args.pp * args.cp * args.tp))
    replicas = args.dp * args.cp
    if args.zero is None:
        args.zero = int(replicas > 1)
    if args.dtype == "bf16" and not args.zero:
        args.zero, args.replicate = 1, replicas  # shards of one rank: the masters are ZeRO's
    args.kv_heads = args.kv_heads or args.heads
    args.ffn = args.ffn or 4 * args.hidden
    # a node has as much of tp as there is in ep, and of dp x cp what fits beside tp
    inside = math.gcd(args.ep, args.tp) * max(1, args.per_node // args.tp)
    args.ep_nodes = args.ep // math.gcd(args.ep, inside)
    args.topk_nodes = args.topk_nodes or args.ep_nodes
    # a pipeline has up to 4 microbatches a stage: of 1F1B's time the bubble is then a fifth
    fewest, most = (2 * args.pp, 4 * args.pp) if args.pp > 1 else (1, 1)
    rows = args.dp * (args.microbatches or fewest)
    args.batch_size = args.batch_size or math.ceil(16 / rows) * rows
    args.microbatches = args.microbatches or math.gcd(args.batch_size // args.dp, most)
    check(args)
    schedule_of(args)
    return args


def check(args):
    """Whether completed flags go together; ValueError, one line with their names and values."""
    for name, *_, needs in FLAGS:
        if name in args.given and needs and not NEEDS[needs][1](args):
            raise ValueError(f"{as_typed(name, args.given[name])} needs {NEEDS[needs][0]}")
    shown = {name: as_typed(name, value) for name, value in vars(args).items()}
    shown |= {"world_size": args.world_size, "ep_nodes": args.ep_nodes}
    for sentence, is_wrong in RULES.items():
        if is_wrong(args):
            raise ValueError(sentence.format_map(shown))


def schedule_of(args):
    """The pipeline's schedule. Raises ValueError where it is not defined for these flags."""
    sizes = {"pp": args.pp, "microbatches": args.microbatches}
    if args.schedule == "interleaved":
        sizes["chunks"] = args.chunks
    flags = " ".join(as_typed(*flag) for flag in [("schedule", args.schedule), *sizes.items()])
    try:
        schedule = SCHEDULES[args.schedule](*sizes.values())
    except ValueError as error:
        raise ValueError(f"{flags}: {error}") from None
    stages = len(schedule.routes[0])
    if args.layers + 2 < stages:  # the first and the last may have none
        raise ValueError(f"--layers {args.layers} is too few for the {stages} stages of {flags}")
    return schedule


# ---- mesh ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mesh:
    """This process's groups. Its rank along an axis is its rank inside that axis's group."""

    pp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup
    dp_cp_group: dist.ProcessGroup  # those whose gradients are summed
    shard_group: dist.ProcessGroup  # a run of dp_cp_group, over which ZeRO's shards are spread
    replicate_group: dist.ProcessGroup  # those that have the same shards
    ep_group: dist.ProcessGroup  # neighbours in dp x cp x tp that have different experts
    expert_dp_group: dist.ProcessGroup  # those of dp x cp that have the same experts
    expert_tp_group: dist.ProcessGroup  # and those of tp
    expert_shard_group: dist.ProcessGroup  # of expert_dp_group, as shard_group is of dp_cp_group
    expert_replicate_group: dist.ProcessGroup
    embedding_group: dist.ProcessGroup | None = None  # first and last stage: the tied embedding
    node_group: dist.ProcessGroup | None = None  # of ep_group on this node, if it has several
    cross_group: dist.ProcessGroup | None = None  # and those in this one's place on theirs


GRADIENT_GROUPS = (
    *("dp_cp_group", "shard_group", "replicate_group"),
    *("expert_dp_group", "expert_shard_group", "expert_replicate_group"),
)


def make_mesh(args, groups=None):
    """Groups of the slices of the grid of all processes. Collective: every rank calls it.

    Groups of the same ranks are one, but gradients have communicators of their own: messages of a
    layer would wait for the gradients that are under way. groups: those of earlier meshes, to be
    used again; new ones are added.
    """
    rank, groups, mine = dist.get_rank(), {} if groups is None else groups, {}
    degrees = args.pp, args.dp, args.cp, args.tp, args.ep, args.ep_nodes, args.replicate
    for name, slices in slices_of(*degrees).items():  # on all ranks in the same order
        for ranks in map(tuple, slices.tolist()):
            key = ranks, len(ranks) > 1 and name in GRADIENT_GROUPS
            if key not in groups:
                groups[key] = dist.new_group(ranks, timedelta(seconds=args.timeout))
            if rank in ranks:
                mine[name] = groups[key]
    for group in dict.fromkeys(mine.values()):
        ranks = dist.get_process_group_ranks(group)
        set_ranks_per_node(ranks_per_node(ranks, args.per_node), group)
        if args.collectives == "backend":
            set_backend_collectives(group)
        barrier(group)  # NCCL wants all ranks of a group in its first batch
    return Mesh(**mine)


def slices_of(pp, dp, cp, tp, ep=1, ep_nodes=1, replicate=1):
    """{a group's name: ranks (number of such groups, size)} of the grid (pp, dp, cp, tp).

    ep_nodes: on so many nodes lie the ranks of ep. replicate: how many runs of dp x cp have a copy
    of ZeRO's shards each; where that does not divide the replicas of an expert, these have as many
    as divides both.
    """
    grid = torch.arange(pp * dp * cp * tp).view(pp, dp, cp, tp)
    replicas = grid.permute(0, 3, 1, 2).reshape(-1, dp * cp)
    ends = grid[[0, -1]] if pp > 1 else grid
    # experts are cut over as much of tp as there is in ep, and over dp x cp
    in_tp = math.gcd(ep, tp)
    domain = grid.view(pp, -1, ep // in_tp, tp // in_tp, in_tp)
    spread = domain.permute(0, 1, 3, 2, 4).reshape(-1, ep)
    expert_replicas = domain.permute(0, 2, 3, 4, 1).flatten(0, 3)
    expert_runs = math.gcd(replicate, expert_replicas.shape[1])
    # each row of ranks in so many runs of neighbours; and those with the same place in their runs
    runs_of = lambda rows, count: rows.reshape(-1, rows.shape[1] // count)
    across_runs = lambda rows, count: rows.unflatten(1, (count, -1)).mT.flatten(0, 1)
    slices = {
        "pp_group": grid.permute(1, 2, 3, 0).reshape(-1, pp),
        "dp_group": grid.permute(0, 2, 3, 1).reshape(-1, dp),
        "cp_group": grid.permute(0, 1, 3, 2).reshape(-1, cp),
        "tp_group": grid.reshape(-1, tp),
        "dp_cp_group": replicas,
        "shard_group": runs_of(replicas, replicate),
        "replicate_group": across_runs(replicas, replicate),
        "ep_group": spread,
        "expert_dp_group": expert_replicas,
        "expert_tp_group": domain.mT.flatten(0, 3),
        "expert_shard_group": runs_of(expert_replicas, expert_runs),
        "expert_replicate_group": across_runs(expert_replicas, expert_runs),
        "embedding_group": ends.permute(1, 2, 3, 0).reshape(-1, len(ends)),
    }
    if ep_nodes > 1:
        slices["node_group"] = runs_of(spread, ep_nodes)
        slices["cross_group"] = across_runs(spread, ep_nodes)
    return slices


def ranks_per_node(ranks, per_node):
    """How many consecutive ranks of a group share a node; 1 if its nodes have unlike numbers.

    ranks: global ones, ascending, of which each node has per_node.
    """
    counts = set(Counter(rank // per_node for rank in ranks).values())
    return counts.pop() if len(counts) == 1 else 1


# ---- data ----------------------------------------------------------------------------------------


class Data(NamedTuple):
    """Tokens of a training and a validation part, and the batches cut from them."""

    train: np.ndarray
    validation: np.ndarray
    is_text: bool  # bytes of UTF-8

    def batch(self, step, batch_size, seq_len, seed, rows=slice(None)):
        """Inputs and targets (rows, T) of `step`: the global batch depends on seed and step only.

        Each sequence starts anywhere in the training part; targets are the inputs' next tokens.
        """
        random = np.random.default_rng([seed, step])
        starts = random.integers(0, len(self.train) - seq_len, batch_size)[rows]
        window = np.stack([self.train[s : s + seq_len + 1] for s in starts]).astype(np.int64)
        window = torch.from_numpy(window)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def validation_batch(self, index, batch_size, seq_len):
        """The index-th batch of the validation part, in order; IGNORE_INDEX where it has ended."""
        inputs = torch.zeros(batch_size * seq_len, dtype=torch.int64)
        targets = torch.full_like(inputs, IGNORE_INDEX)
        start = index * len(inputs)
        window = torch.from_numpy(self.validation[start : start + len(inputs) + 1].astype(np.int64))
        count = max(len(window) - 1, 0)
        inputs[:count], targets[:count] = window[:-1], window[1:]
        return inputs.view(batch_size, seq_len), targets.view(batch_size, seq_len)


def load_data(path, seq_len, vocab_size=256):
    """Read --data: None (the standard library's sources), text, or tokens, which stay on the disk.

    Text is a file or a folder, and its tokens are its UTF-8 bytes; tokens are a .bin of uint16, or
    uint32 for a larger vocabulary, or nanoGPT's folder of train.bin and val.bin. Else validation is
    the last tenth. Raises OSError or ValueError for what is missing, no text, or too short. Whether
    tokens are in the vocabulary is seen as they are used.
    """
    pattern, path = "[!.]*" if path else "*.py", Path(path or sysconfig.get_path("stdlib"))
    dtype, is_text = np.uint16 if vocab_size <= 2**16 else np.uint32, False
    if (path / "train.bin").is_file():
        parts = [tokens_of(path / name, dtype) for name in ("train.bin", "val.bin")]
    else:
        is_text = path.suffix != ".bin"
        dtype = np.uint8 if is_text else dtype
        tokens = text_of(path, pattern) if path.is_dir() else tokens_of(path, dtype)
        parts = np.split(tokens, [len(tokens) - len(tokens) // 10])
    for part, tokens in zip(("training", "validation"), parts):
        if len(tokens) <= seq_len:
            found = f"its {part} part has {len(tokens)} tokens"
            raise ValueError(f"--data {path}: {found}, too few for --seq-len {seq_len}")
    return Data(*parts, is_text)


def tokens_of(path, dtype):
    """A file's tokens, mapped into memory."""
    size, itemsize = path.stat().st_size, np.dtype(dtype).itemsize
    if size % itemsize:
        raise ValueError(f"--data {path}: {size} bytes are no tokens of {itemsize} bytes each")
    return np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)


def text_of(folder, pattern):
    """The bytes of a folder's files of text, one after the other."""
    texts = [file.read_bytes() for file in sorted(folder.glob(pattern)) if file.is_file()]
    return np.frombuffer(b"\n".join(text for text in texts if b"\0" not in text), np.uint8)


def show(tokens, is_text):
    """Tokens as text that is safe to print, or as numbers where they are not bytes of text."""
    if not is_text:
        return str(tokens)
    text = bytes(min(token, 255) for token in tokens).decode(errors="replace")  # 255 is no text
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


# ---- model ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT: sequences of T = seq_len tokens, width D = hidden, V = vocab_size."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    seq_len: int = 64
    vocab_size: int = 256
    dropout: float = 0.0
    kv_heads: int | None = None  # as many as heads
    sequence_parallel: bool = False
    recompute: str = "none"  # or "selective", the attention core, or "full", every layer
    experts: int = 0  # in place of the MLP of every moe_every-th layer
    top_k: int = 1
    capacity_factor: float | None = None
    shared_experts: int = 0
    balance: str = "none"  # or "aux", by losses, or "bias", by DeepSeek's bias on sigmoid scores
    moe_every: int = 1
    topk_nodes: int | None = None  # of those on which the experts lie, a token uses so many
    ffn: int | None = None  # 4 x hidden

    @property
    def mlp_width(self):
        """F, that of the MLP and of every expert inside."""
        return self.ffn or 4 * self.hidden

    def has_experts(self, layer):
        """Whether this layer's MLP is a mixture of experts."""
        return self.experts > 0 and (layer + 1) % self.moe_every == 0


def config_of(args):
    """What the command line says of the model."""
    own = {field.name: getattr(args, field.name, None) for field in fields(GPTConfig)}
    return GPTConfig(**own | {"sequence_parallel": args.sp})


def _replicated(module, config):
    """A module that every rank of tp has, with sequence parallelism for its part of the tokens."""
    return mark_partial(module) if config.sequence_parallel else module


def _residual_dropout(module, x):
    """Masks alike over tp, where x is; its own for each rank's part of the sequence."""
    config = module.config
    with module.random if config.sequence_parallel and config.dropout else nullcontext():
        return dropout(x, config.dropout, module.training)


class MLP(nn.Module):
    """(T, B, D) -> F, column-parallel, GELU -> D, row-parallel."""

    def __init__(self, hidden, width, **options):
        super().__init__()
        self.c_fc = ColumnParallelLinear(hidden, width, **options)
        self.c_proj = RowParallelLinear(width, hidden, **options)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Pre-LayerNorm transformer layer, (T, B, D) -> (T, B, D).

    With sequence parallelism T is this rank's part.

    random: the state from which dropout draws where ranks of tp hold different activations.
    attention_fn: attention_fn(q, k, v, dropout), attention itself.
    moe: makes what takes the MLP's place, if given.
    options: of the linear layers.
    """

    def __init__(self, config, random, attention_fn=attention, moe=None, **options):
        super().__init__()
        self.config, self.random, self.attention_fn = config, random, attention_fn
        options["sequence_parallel"] = config.sequence_parallel
        self.ln_1 = _replicated(nn.LayerNorm(config.hidden), config)
        self.attn = ParallelSelfAttention(
            config.hidden, config.heads, config.kv_heads, self.attend, **options
        )
        self.ln_2 = _replicated(nn.LayerNorm(config.hidden), config)
        self.mlp = moe() if moe else MLP(config.hidden, config.mlp_width, **options)

    def forward(self, x):
        x = x + _residual_dropout(self, self.attn(self.ln_1(x)))
        return x + _residual_dropout(self, self.mlp(self.ln_2(x)))

    def attend(self, q, k, v):
        """The attention core; its heads are this rank's own, and so are its masks."""
        if self.config.recompute == "selective" and torch.is_grad_enabled():
            return recompute(self._attend, q, k, v)
        return self._attend(q, k, v)

    def _attend(self, q, k, v):
        p = self.config.dropout if self.training else 0.0
        with self.random if p else nullcontext():
            return self.attention_fn(q, k, v, p)


class GPT(nn.Module):
    """One pipeline stage's layers; parameters have GPT-2's names, layers their number in the whole.

    The first stage takes tokens (B, T), the others activations (T, B, D); the last one returns the
    logits of its part of the vocabulary (T, B, V/tp), the others activations; with sequence
    parallelism a rank has T/tp of those between. With one stage the head is the token embedding;
    with more the last stage has a copy, kept equal by sum_shared_gradients().

    stage, num_stages: which part of the layers this is.
    random, attention_fn, moe: see Block; moe is for the layers that have experts.
    defer: see parallel_linear().
    positions: of the tokens in the whole sequence, of which context parallelism leaves a rank some.
    """

    def __init__(
        self,
        config,
        tp_group=None,
        stage=0,
        num_stages=1,
        random=nullcontext(),
        defer=None,
        positions=None,
        attention_fn=attention,
        moe=None,
    ):
        super().__init__()
        self.first, self.last = stage == 0, stage == num_stages - 1
        self.config, self.tp_group, self.random, self.defer = config, tp_group, random, defer
        self.positions = torch.arange(config.seq_len) if positions is None else positions
        if config.sequence_parallel:
            rank, tp = rank_and_size(tp_group)
            self.positions = self.positions.chunk(tp)[rank]
        embedding = lambda: VocabParallelEmbedding(
            config.vocab_size, config.hidden, tp_group, config.sequence_parallel
        )
        block = partial(Block, config, random, attention_fn, group=tp_group, defer=defer)
        self.transformer = nn.ModuleDict()
        if self.first:
            self.transformer["wte"] = embedding()
            self.transformer["wpe"] = _replicated(
                nn.Embedding(config.seq_len, config.hidden), config
            )
        self.transformer["h"] = nn.ModuleDict(
            (str(i), block(moe=moe if config.has_experts(i) else None))
            for i in layers_of(stage, num_stages, config)
        )
        if self.last:
            self.transformer["ln_f"] = _replicated(nn.LayerNorm(config.hidden), config)
            self.lm_head = self.transformer["wte"] if self.first else embedding()

    def forward(self, x):
        if self.first:
            x = self._embed(x.t())
        for block in self.transformer["h"].values():
            full = self.config.recompute == "full" and torch.is_grad_enabled()
            x = recompute(block, x) if full else block(x)
        if self.last:
            x = parallel_linear(  # (T, B, D) -> (T, B, V/tp)
                self.transformer["ln_f"](x),
                self.lm_head.weight,
                group=self.tp_group,
                sequence_parallel=self.config.sequence_parallel,
                defer=self.defer,
            )
        return x

    def _embed(self, tokens):
        """(T, B) -> (T, B, D), or this rank's part of the sequence."""
        x = self.transformer["wte"](tokens)
        x = x + self.transformer["wpe"](self.positions[: len(x)]).unsqueeze(1)
        return _residual_dropout(self, x)

    def token_losses(self, logits, targets):
        """Loss of each token (T*B,), from split logits, which are lost; zero where IGNORE_INDEX."""
        start, logits, targets = self.lm_head.start, logits.flatten(0, 1), targets.t().flatten()
        return vocab_parallel_cross_entropy(
            logits, targets, start, IGNORE_INDEX, self.tp_group, inplace=True
        )

    def tied_weight(self):
        """The embedding or the head, of a stage that has one of them: the other is elsewhere."""
        if self.first == self.last:
            return None
        return self.transformer["wte"].weight if self.first else self.lm_head.weight


def layers_of(stage, num_stages, config):
    """The layers of a stage, so that the most expensive one costs as little as can be.

    Products count, of the layers and of the head, which the last stage has. The embedding has none:
    what it costs is memory, for which the first stages get fewer layers where that is no slower.
    Stages are balanced, also where a rank has two of them.
    """
    if num_stages > config.layers:  # the head alone, and of two more the embedding, as in Llama 3
        begin = stage - (num_stages - config.layers - 1)
        return range(max(0, begin), min(begin + 1, config.layers))
    return range(*_cuts(num_stages, config)[stage : stage + 2])


def cheapest_cuts(costs, parts):
    """The places [0, ..., len(costs)] between runs of a list, none empty, whose sums are smallest.

    First the largest sum is as small as can be, then the second, and so on; of equals the runs in
    front are the shortest.
    """
    sums = [0, *accumulate(costs)]
    best = {0: ([], [0])}  # {length: (sums of its runs, largest first, their places)}
    for left in reversed(range(parts)):  # runs to come
        best = {
            end: min(
                (sorted([*found, sums[end] - sums[cuts[-1]]], reverse=True), [*cuts, end])
                for found, cuts in best.values()
                if cuts[-1] < end
            )
            for end in range(parts - left, len(costs) - left + 1)
        }
    return best[len(costs)][1]


@lru_cache(maxsize=None)
def _cuts(num_stages, config):
    costs = [layer_flops(config, layer) for layer in range(config.layers)]
    costs[-1] += 3 * 2 * config.hidden * config.vocab_size
    return cheapest_cuts(costs, num_stages)


def forward_flops(config, experts):
    """Of a layer, per token: of products with weights, and of scores and their use.

    experts: whether it has them, or the portion of layers that do. Products cost 2 per weight that
    a token uses, about 24 h^2; scores 4 s h.
    """
    h, F, kv_heads = config.hidden, config.mlp_width, config.kv_heads or config.heads
    weights = 2 * h * h + 2 * h * h * kv_heads // config.heads + 2 * h * F
    more = 2 * h * F * (config.top_k + config.shared_experts - 1) + h * config.experts
    return 2 * (weights + experts * more), 4 * config.seq_len * h


def layer_flops(config, layer):
    """Of a layer in a step, per token: a forward, and twice that in backward."""
    passes = 4 if config.recompute == "full" else 3
    return passes * sum(forward_flops(config, config.has_experts(layer)))


def flops_per_token(config):
    """The model's, forward and backward: what is recomputed does not count."""
    config = replace(config, recompute="none")
    layers = sum(layer_flops(config, layer) for layer in range(config.layers))
    return layers + 3 * 2 * config.hidden * config.vocab_size


def make_moe(config, mesh, num_microbatches):
    """A mixture of experts in place of an MLP, (T, B, D) -> (T, B, D)."""
    balance, z = (0.01, 0.001) if config.balance == "aux" else (0.0, 0.0)
    nodes = (mesh.node_group, mesh.cross_group) if mesh.cross_group else None
    layer = MoE(
        *(config.hidden, config.mlp_width, config.experts, config.top_k, mesh.ep_group),
        tp_group=None if config.sequence_parallel else mesh.tp_group,  # deals out the tokens
        capacity_factor=config.capacity_factor,
        shared_experts=config.shared_experts,
        balance_coefficient=balance,
        z_coefficient=z,
        loss_scale=1 / num_microbatches,
        balance_groups=(mesh.dp_group, mesh.cp_group, mesh.tp_group),
        nodes=nodes,
        n_group=dist.get_world_size(mesh.cross_group) if nodes else 1,
        topk_group=config.topk_nodes,
        score="sigmoid" if config.balance == "bias" else "softmax",
    )
    return mark_partial(layer)


# ---- initial values ------------------------------------------------------------------------------


@torch.no_grad()
def initialize(model, layers, seed, ep_group=None):
    """Fill this rank's part of every parameter, and zero the buffers: the biases of routers."""
    shards = shards_of(model)
    for name, parameter in model.named_parameters():
        dim, parts, _ = rows_of(name, parameter, shards, ep_group, model.tp_group)
        name = name.replace("lm_head", "transformer.wte")  # to which it is tied
        for (first, _), part in zip(parts, parameter.split([rows for _, rows in parts], dim)):
            part.copy_(initial_value(name, part.shape, layers, seed, first))
    for buffer in model.buffers():
        buffer.zero_()


def rows_of(name, parameter, shards, ep_group, tp_group):
    """What rows_held() says: experts are split over ep, what has a Shard over tp."""
    if is_expert(name):
        experts = part_of(parameter)[0][0] * dist.get_world_size(ep_group)
        return rows_held(parameter, Shard(0, (experts,)), ep_group)
    return rows_held(parameter, shards.get(name), tp_group)


def initial_value(name, shape, layers, seed, first=0):
    """As GPT-2's: rows `first` and on of parameter `name`, of a c_proj columns, in this shape.

    Each depends on the seed, the name and its number alone, so that a rank draws what it holds.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "ln_" in name:
        return torch.ones(shape)
    # 2 matrices per layer add to the residual stream
    into_residual = any(part in name for part in ("c_proj", "w_out", "shared.2"))
    std = 0.02 / math.sqrt(2 * layers) if into_residual else 0.02
    by_column = name.endswith("c_proj.weight")
    value = torch.empty(shape[::-1] if by_column else shape, dtype=torch.float32)
    rows = value.view(-1, value.shape[-1])
    _draw_normal(rows.numpy(), first * math.prod(value.shape[1:-1]), f"{seed} {name}")
    value.mul_(std)
    return value.t() if by_column else value


def _draw_normal(rows, first, name):
    """Fill `rows`, the first one being number `first`: each has a stream of its own (Philox)."""
    digest = hashlib.sha256(name.encode()).digest()
    bits = np.random.Philox(key=int.from_bytes(digest[:16], "big"))
    generator, state = np.random.Generator(bits), bits.state
    for number, row in enumerate(rows, first):
        state["state"]["counter"][3] = number  # the highest word: a stream has 2**192 draws
        bits.state = state
        generator.standard_normal(out=row, dtype=np.float32)


def is_expert(name):
    """Whether a rank of ep has other experts than the next one in the parameter of this name."""
    return ".experts." in name


def own_chunks(trainer):
    """This rank's stages, without DualPipe's replica of another rank's."""
    return trainer.chunks[:1] if trainer.replicated else trainer.chunks


# ---- one step ------------------------------------------------------------------------------------


class TrainingError(ValueError):
    """What ends the training, raised on all ranks alike, and the exit status."""

    def __init__(self, message, status=1):
        super().__init__(message)
        self.status = status


def refuse(args, num_outside):
    """Raise TrainingError if so many tokens, alike on all ranks, no vocabulary has."""
    if num_outside:
        found = f"{num_outside:.0f} tokens are outside --vocab-size {args.vocab_size}"
        raise TrainingError(f"--data: {found}")


class Trainer:
    """One rank's part of the training.

    config: of the model. positions: this rank's of each sequence.
    route: the (rank of the pipeline, chunk) of each of the model's stages. DualPipe has a second
        route, of a replica: then `replicated` is true.
    chunks: the stages that this rank has. dense, experts: their parameters.
    stages: the chunks in DistributedDataParallel, or with ZeRO in FullyShardedDataParallel.
    pipeline, evaluation: run the stages over a batch, with backward and without.
    """

    skipped = skipped_in_a_row = 0  # steps, which were not finite
    sigterm = stop = False  # it has come to this rank, and to some rank before a step's end

    def __init__(self, args, mesh, device):
        self.args, self.mesh, self.device, self.steps_done = args, mesh, device, 0
        self.config = config_of(args)
        schedule = schedule_of(args)
        self.route, self.replicated = schedule.routes[0], len(schedule.routes) > 1
        self.positions = torch.arange(args.seq_len)
        if args.cp > 1:
            self.positions = context_positions(args.seq_len, mesh.cp_group)
        put_off = WeightGradStore()
        self.chunks = make_chunks(self, schedule.routes, put_off)
        self.shards = {name: of for chunk in self.chunks for name, of in shards_of(chunk).items()}
        named = [pair for chunk in self.chunks for pair in chunk.named_parameters()]
        self.dense = [parameter for name, parameter in named if not is_expert(name)]
        self.experts = [parameter for name, parameter in named if is_expert(name)]
        self.stages = wrap(self)
        self.optimizer = make_optimizer(args, self.dense + self.experts)
        rows = args.batch_size // (args.dp * args.microbatches)
        self.pipeline = Pipeline(
            *(self.stages, schedule, self.loss, mesh.pp_group),
            **sent_by_stages(self, rows),
            defer=put_off,
            sync_each=args.zero > 1,  # so that no rank has whole gradients
        )
        self.evaluation = forward_pipeline(self, args.microbatches, rows, self.loss)

    def step(self, inputs, targets):
        """One optimizer step on this rank's rows of the batch, (B/dp, T) each.

        Returns the global loss, the gradient norm before clipping, the learning rate, the number of
        steps skipped so far, and what tally_metrics() has. Raises TrainingError, on all ranks, for
        tokens outside the vocabulary and where skip_step() does; weights are then those of before.
        """
        args = self.args
        seed_dropout(args.seed, self.steps_done, self.mesh)
        rate = learning_rate(self.steps_done, args.steps, args.warmup, args.lr)
        found = self.forward_backward(inputs, targets)
        norm = self.clip_gradients()
        tallies, of_experts = sum_tallies(self), {}
        if args.experts:
            of_experts = tally_metrics(tallies, args.microbatches, args.balance == "aux")
        told = torch.full((), float(self.sigterm), device=self.device)
        if args.checkpoint:
            all_reduce(told, ReduceOp.MAX)
        # the one time that the host waits for the device
        numbers = torch.stack([*found, norm, told, *of_experts.values()])
        loss, num_outside, norm, self.stop, *loads = numbers.tolist()
        refuse(args, num_outside)
        if math.isfinite(loss + norm):
            self.update(rate, tallies)
            self.skipped_in_a_row = 0
        else:
            self.skip_step(loss, norm)
        self.steps_done += 1
        metrics = {"loss": loss, "grad_norm": norm, "lr": rate, "skipped": self.skipped}
        return metrics | dict(zip(of_experts, loads))

    def forward_backward(self, inputs, targets):
        """Leave the summed gradients in .grad, of whole parameters or pieces; returns as run()."""
        for chunk in self.chunks:
            chunk.train()
        # without ZeRO they stay views into buckets; a first sum need not be added to zero
        self.optimizer.zero_grad(set_to_none=self.args.zero > 0)
        found = self.run(self.pipeline, inputs, targets)
        for stage in self.stages:
            stage.finish_grad_sync()
        self.sum_shared_gradients()
        return found

    def run(self, pipeline, inputs, targets):
        """One pipeline step; returns the global loss and how many tokens no vocabulary has."""
        inputs, targets = self.own_tokens(inputs, targets)
        outside = torch.maximum(inputs, targets) >= self.config.vocab_size
        counts = torch.stack([(targets != IGNORE_INDEX).sum(), outside.sum()])
        all_reduce(counts, group=self.mesh.dp_cp_group)
        # The divisor is known before backward: gradients are summed, and never averaged.
        loss = pipeline.step(inputs, targets, counts[0].clamp(min=1))
        loss = torch.zeros((), device=self.device) if loss is None else loss
        all_reduce(loss, group=self.mesh.dp_cp_group)
        all_reduce(loss, group=self.mesh.pp_group)  # from the rank, or the two, that have one
        return loss, counts[1].to(loss.dtype)

    def loss(self, logits, targets, num_tokens):
        """A microbatch's part of the loss per token of the whole batch, of `num_tokens` in all."""
        last = next(chunk for chunk in self.chunks if chunk.last)
        return last.token_losses(logits, targets).sum() / num_tokens

    def sum_shared_gradients(self):
        """Sum what the copies of a parameter got for their part of the work.

        Those are DualPipe's replicas, what tensor-parallel ranks use for a part of the sequence,
        and the tied embedding and head.
        """
        partial, first = set(), self.steps_done == 0
        for chunk in self.chunks:
            partial.update(partial_parameters(chunk))
        groups = (self.dense, self.mesh.tp_group), (self.experts, self.mesh.expert_tp_group)
        for parameters, group in groups:
            sum_partial_gradients([p for p in parameters if p in partial], group, check=first)
        if self.replicated:
            sum_replicas(self.chunks, self.mesh.pp_group)
        weights = [chunk.tied_weight() for chunk in self.chunks]
        tied = [weight.grad for weight in weights if weight is not None]
        if len(tied) == 2:  # embedding and head are on one rank
            tied[0].copy_(tied[1].add_(tied[0]))
        elif tied:
            all_reduce(tied[0], group=self.mesh.embedding_group)

    def clip_gradients(self):
        """Scale gradients so their joint norm, each logical parameter once, is at most grad_clip.

        Returns the norm before, on the device.
        """
        mesh, experts = self.mesh, []
        dense = [torch.zeros(0, device=self.device)]  # a stage may have nothing that counts
        for name, parameter in (pair for c in own_chunks(self) for pair in c.named_parameters()):
            if is_expert(name):
                experts.append(parameter.grad)
            elif name == "lm_head.weight":  # a copy of the embedding
                continue
            elif name in self.shards or dist.get_rank(mesh.tp_group) == 0:  # others have copies
                dense.append(parameter.grad)
        shards, expert_shards = [], []  # the groups over which there are other pieces
        if self.args.zero:
            shards, expert_shards = [mesh.shard_group], [mesh.expert_shard_group]
        norms = [get_total_norm(dense, groups=[*shards, mesh.tp_group])]
        if experts:
            norms.append(get_total_norm(experts, groups=[*expert_shards, mesh.ep_group]))
        norm = get_total_norm(norms, groups=[mesh.pp_group])
        if self.args.grad_clip > 0:
            gradients = [parameter.grad for parameter in self.dense + self.experts]
            clip_grads_with_norm_(gradients, self.args.grad_clip, norm.nan_to_num())
        return norm

    def update(self, rate, tallies):
        """Move the weights along the gradients, and the biases of routers against the tallies."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        if self.args.zero:
            for stage in self.stages:
                stage.reshard()
        if self.args.balance == "bias":
            for row, layer in mixtures(self):
                layer.router.update_bias(tallies[row, : layer.num_experts])

    def skip_step(self, loss, norm):
        """Leave out a step that is not finite; TrainingError if it is one too many in a row."""
        self.skipped += 1
        self.skipped_in_a_row += 1
        for stage in self.stages if self.args.zero else ():
            stage.reshard()  # what was gathered may be what was wrong
        if self.skipped_in_a_row >= self.args.skip_nonfinite:
            found = f"loss {loss:.4f}, grad norm {norm:.3f}; {self.skipped_in_a_row} in a row"
            raise TrainingError(f"step {self.steps_done + 1} is not finite: {found}")

    def own_rows(self):
        """This rank's rows of the global batch."""
        rank, world_size = rank_and_size(self.mesh.dp_group)
        rows = self.args.batch_size // world_size
        return slice(rank * rows, (rank + 1) * rows)

    def own_tokens(self, *batches):
        """This rank's positions of batches of tokens (B, T), on the device, by one copy."""
        tokens = torch.stack(batches)[:, :, self.positions]
        if self.device.type == "cuda":
            tokens = tokens.pin_memory()  # else the host would wait
        return tokens.to(self.device, non_blocking=True)


def sent_by_stages(trainer, rows):
    """For Pipeline(): what stages send each other of a microbatch of so many rows."""
    args = trainer.args
    length = args.seq_len // (args.cp * (args.tp if args.sp else 1))
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.get_default_dtype()
    return {"shape": (length, rows, args.hidden), "dtype": dtype, "device": trainer.device}


def forward_pipeline(trainer, num_microbatches, rows, loss_fn):
    """A pipeline without backward, along the first route; rows: of a microbatch."""
    group = trainer.mesh.pp_group
    schedule = forward_only(dist.get_world_size(group), num_microbatches, trainer.route)
    stages = trainer.stages[:1] if trainer.replicated else trainer.stages
    return Pipeline(stages, schedule, loss_fn, group, **sent_by_stages(trainer, rows))


def learning_rate(step, steps, warmup, peak):
    """Linear warm-up over `warmup` steps, then a cosine down to peak / 10. step counts from 0."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def seed_dropout(seed, step, mesh):
    """Seed a step's masks of dropout: alike over tp where activations are, different elsewhere.

    They depend on seed, step and layout alone, so a run that goes on draws the same. On the CPU a
    generator has 32 bits of seed: hashed, those of two --seed do not overlap.
    """
    digest = hashlib.sha256(f"{seed} dropout {step}".encode()).digest()
    stage, num_stages = rank_and_size(mesh.pp_group)
    number = dist.get_rank(mesh.dp_cp_group) * num_stages + stage
    torch.manual_seed(int.from_bytes(digest[:4], "big") + number)


def make_chunks(trainer, routes, put_off):
    """The stages of the model that this rank has, by chunk, with their initial values.

    routes: those of the schedule. put_off: a WeightGradStore.
    """
    args, mesh, device = trainer.args, trainer.mesh, trainer.device
    rank, method = dist.get_rank(mesh.pp_group), CP_METHODS[args.cp_method]
    across = lambda q, k, v, dropout: method(q, k, v, mesh.cp_group)
    places = [(c, s) for route in routes for s, (r, c) in enumerate(route) if r == rank]
    chunks = []
    for _, stage in sorted(places):
        with torch.device("meta"):
            chunk = GPT(
                *(trainer.config, mesh.tp_group, stage, len(routes[0])),
                random=ShardedRandomState(device, mesh.tp_group),
                defer=put_off,
                positions=trainer.positions.to(device),
                attention_fn=across if args.cp > 1 else attention,
                moe=partial(make_moe, trainer.config, mesh, args.microbatches),
            )
        for module in chunk.modules():  # each once, though the head is the embedding
            module.to_empty(device=device, recurse=False)
        initialize(chunk, args.layers, args.seed, mesh.ep_group)
        chunks.append(chunk)
    return chunks


def wrap(trainer):
    """The chunks as replicas that sum gradients, or as shards (ZeRO).

    A step sends 2 (P-1)/P of the gradients' bytes, with ZeRO-1 half of them, parameters, in the
    next forward. ZeRO-2 and -3 keep no whole gradients: each microbatch sends (P-1)/P, and with
    ZeRO-3, which keeps no whole parameters either, two times more.
    """
    args, mesh, chunks, experts = trainer.args, trainer.mesh, trainer.chunks, trainer.experts
    if not args.zero:
        replicate = partial(
            DistributedDataParallel,
            process_group=mesh.dp_cp_group,
            broadcast_buffers=False,
            gradient_divide_factor=1,  # the loss has its global divisor already
            wait_in_backward=False,
            groups=dict.fromkeys(experts, mesh.expert_dp_group),
        )
        return [replicate(chunk) for chunk in chunks]
    bf16 = args.dtype == "bf16"
    shard = partial(
        FullyShardedDataParallel,
        process_group=mesh.shard_group,
        replicate_group=if_several(mesh.replicate_group),
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=torch.float32 if bf16 else None,
        gradient_divide_factor=1,
        stage=args.zero,
        wait_in_backward=False,
        under_way=deque(),  # one, of all chunks
        groups=dict.fromkeys(
            experts, (mesh.expert_shard_group, if_several(mesh.expert_replicate_group))
        ),
    )
    for chunk in chunks:
        for name in shards_of(chunk):  # in rows of their own: what tp ranks have alike is cut alike
            chunk.get_parameter(name).sharded = True
    return [shard(chunk, units=chunk.transformer["h"].values()) for chunk in chunks]


def if_several(group):
    """The group, or None if it has one rank."""
    return group if dist.get_world_size(group) > 1 else None


def make_optimizer(args, parameters):
    """AdamW, with decay of matrices."""
    is_matrix = lambda parameter: len(part_of(parameter)[0]) > 1
    groups = [
        {"params": list(filter(is_matrix, parameters)), "weight_decay": args.weight_decay},
        {"params": [p for p in parameters if not is_matrix(p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, args.lr, (0.9, 0.95), fused=True)


def mixtures(trainer):
    """[(number among the model's mixtures of experts, MoE)] of this rank's."""
    config = trainer.config
    numbers = [i for i in range(config.layers) if config.has_experts(i)]
    layers = {i: layer for chunk in trainer.chunks for i, layer in chunk.transformer["h"].items()}
    return [(row, layers[str(i)].mlp) for row, i in enumerate(numbers) if str(i) in layers]


@torch.no_grad()
def sum_tallies(trainer):
    """What the model's mixtures have counted in the step, of all ranks; they begin anew.

    A row for each, MoE's tally. One reduction, and none without experts.
    """
    mesh, config = trainer.mesh, trainer.config
    sizes = sum(map(config.has_experts, range(config.layers))), config.experts + 3
    tallies = torch.zeros(sizes, dtype=torch.float64, device=trainer.device)
    for row, layer in mixtures(trainer):
        tallies[row].copy_(layer.tally)
        layer.tally.zero_()
    for group in (mesh.dp_cp_group, mesh.tp_group, mesh.pp_group) if config.experts else ():
        all_reduce(tallies, group=group)
    return tallies


# ---- checkpoints ---------------------------------------------------------------------------------

OF_THE_MODEL = (  # flags that a checkpoint and whoever goes on from it must agree on
    "layers", "hidden", "ffn", "heads", "kv_heads", "seq_len", "vocab_size",
    "experts", "top_k", "shared_experts", "balance", "moe_every",
)  # fmt: skip
MOMENTS = "exp_avg", "exp_avg_sq"  # Adam's
KEPT = 2  # checkpoints


def on_all_ranks(call, *arguments):
    """What call() returns, or on all ranks a TrainingError if it fails on one. Collective."""
    result, fault = None, ""
    try:
        result = call(*arguments)
    except (OSError, ValueError, dcp.api.CheckpointException) as error:
        failures = getattr(error, "failures", {})  # {rank: (error, traceback)}
        fault = next((f"rank {r}: {cause}" for r, (cause, _) in failures.items()), str(error))
    faults = gather_objects(fault.strip().splitlines()[:1])
    for rank, lines in enumerate(faults):
        for line in lines:
            raise TrainingError(f"rank {rank}: {line}" if rank else line, status=2)
    return result


class Boxes(torch.Tensor):
    """A tensor of which this rank has some boxes, as torch.distributed.checkpoint asks for them.

    boxes: {place of the first element: view}. The tensor itself has no memory but a number's.
    """

    @staticmethod
    def __new__(cls, dtype, shape, boxes):
        whole = torch.zeros((), dtype=dtype).expand(shape).as_subclass(cls)
        whole.boxes = boxes
        return whole

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(torch.Size(p), box.shape) for p, box in self.boxes.items()]

    def __create_write_items__(self, name, _):
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(self.dtype), self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index):
        return self.boxes[index.offset]


def boxes_of(trainer, value=lambda tensor: tensor, chunks=None):
    """{GPT-2's name: Boxes} of parameters and buffers: views of what this rank has, for a save.

    Ranks with copies have the same boxes, of which one is written; the head is left out, since it
    is the embedding. value picks what is looked at of a parameter: itself, or what has its shape,
    or None. chunks: look at all that these have, the head included.
    """
    mesh, found = trainer.mesh, {}
    named = lambda chunk: [*chunk.named_parameters(), *chunk.named_buffers()]
    for name, own in (pair for c in chunks or own_chunks(trainer) for pair in named(c)):
        tensor, first = value(own), part_of(own)[1]
        if tensor is not None and (chunks or name != "lm_head.weight"):
            rows = rows_of(name, own, trainer.shards, mesh.ep_group, mesh.tp_group)
            boxes = views_in_whole(own, tensor, first, first + own.numel(), rows)
            found[name.replace("lm_head", "transformer.wte")] = Boxes(tensor.dtype, *boxes)
    return found


def state_of(trainer, chunks=None):
    """{"model", or a moment of Adam's: its boxes_of()}. With ZeRO the weights are exact masters."""
    state = trainer.optimizer.state
    moment = lambda kind, weight: state[weight][kind] if weight in state else None
    found = {kind: boxes_of(trainer, partial(moment, kind), chunks) for kind in MOMENTS}
    return {"model": boxes_of(trainer, chunks=chunks)} | found


def save(trainer, folder):
    """Write a checkpoint, and keep the last two. Collective.

    Raises TrainingError, on all ranks, if copies of a weight differ, so that no checkpoint has a
    corrupted one, or it cannot be written; those before are intact.
    """
    if different := unlike_copies(trainer):
        raise TrainingError(f"step {trainer.steps_done}: copies differ: {different}")
    path = Path(folder, f"step_{trainer.steps_done:08d}.partial")
    run = {flag.name: getattr(trainer.args, flag.name) for flag in FLAGS}
    try:
        on_all_ranks(partial(dcp.save, checkpoint_id=path), state_of(trainer))
        on_all_ranks(commit, path, run | {"skipped": trainer.skipped})
    except TrainingError as error:
        raise TrainingError(f"--checkpoint {path.with_suffix('')}: {error}") from None


def commit(path, run):
    """Rank 0 makes what all ranks have written a checkpoint, at once, and removes old ones."""
    if dist.get_rank() == 0:
        (path / "run.json").write_text(json.dumps(run, indent=4))
        os.sync()
        path.rename(path.with_suffix(""))
        for old in checkpoints_of(path.parent)[:-KEPT]:
            old.rename(old.with_suffix(".partial"))  # half of it is no checkpoint
        for old in path.parent.glob("step_*.partial"):  # and what killed saves left
            shutil.rmtree(old, ignore_errors=True)


def checkpoints_of(folder):
    """Those in a folder, the last step last."""
    return sorted(path for path in folder.glob("step_*") if path.name[5:].isdecimal())


def load(trainer, path):
    """Go on from a checkpoint, of any layout. Collective.

    Raises TrainingError, on all ranks, if it is of another model, or cannot be read.
    """
    run = on_all_ranks(read_run, path, trainer.args)
    trainer.steps_done, trainer.skipped = int(path.name.removeprefix("step_")), run["skipped"]
    if steps := trainer.steps_done - trainer.skipped:  # else there are no moments
        for weight in trainer.dense + trainer.experts:
            moments = {kind: torch.zeros_like(weight) for kind in MOMENTS}
            number = torch.full((), steps, dtype=torch.float32, device=weight.device)
            trainer.optimizer.state[weight] = {"step": number} | moments
    try:
        for chunk in trainer.chunks:  # in turns: two may have the embedding
            on_all_ranks(partial(dcp.load, checkpoint_id=path), state_of(trainer, [chunk]))
    except TrainingError as error:
        raise TrainingError(f"--checkpoint {path}: {error}", status=2) from None


def read_run(path, args):
    """The run.json of a checkpoint. Raises ValueError if it is damaged, or of another model."""
    try:
        run = json.loads((path / "run.json").read_bytes())
        theirs = {name: run[name] for name in (*OF_THE_MODEL, "skipped")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / 'run.json'} has not the flags of a run: {error!r}") from None
    for name in OF_THE_MODEL:
        if (own := getattr(args, name)) != theirs[name]:
            raise ValueError(f"{as_typed(name, own)}, but {path} has {as_typed(name, run[name])}")
    return run


def unlike_copies(trainer):
    """Which copies of a weight have other bits than most have, with their ranks. Collective.

    What two ranks hold of the same place is compared by a sum of its bits, which one flipped bit
    changes for certain.
    """
    integers, own, sums = {2: torch.int16, 4: torch.int32, 8: torch.int64}, [], []
    for chunk in trainer.chunks:
        for name, whole in boxes_of(trainer, chunks=[chunk]).items():
            for place, box in whole.boxes.items():
                own.append((name, place, box.shape))
                sums.append(box.contiguous().view(integers[box.itemsize]).sum(dtype=torch.int64))
    every, different = defaultdict(list), []
    sums = torch.stack(sums).tolist()  # one wait for the device
    for rank, theirs in enumerate(gather_objects([*zip(own, sums)])):
        for box, total in theirs:
            every[box].append((rank, total))
    for (name, *_), found in every.items():
        [(most, count)] = Counter(total for _, total in found).most_common(1)
        odd = [rank for rank, total in found if total != most or 2 * count <= len(found)]
        different += [f"{name} on ranks {odd}"] if count < len(found) else []
    return "; ".join(different)


# ---- log -----------------------------------------------------------------------------------------

PEAKS = {  # part of a GPU's name: TFLOP/s of dense products
    "A100": {"bf16": 312, "tf32": 156, "fp32": 19.5},
    "H100 80GB HBM3": {"bf16": 989, "tf32": 494, "fp32": 67},
    "H200": {"bf16": 989, "tf32": 494, "fp32": 67},
}


class Log:
    """What rank 0 says of a training: lines, and the metrics. To be made by all ranks.

    On a terminal one line is rewritten with every step; elsewhere some are printed, the first and
    the last among them. The file of metrics has lines of JSON: the flags, then the steps. A run
    that goes on appends to it; of a step that is there twice the later one counts.
    """

    def __init__(self, trainer):
        args, self.trainer = trainer.args, trainer
        self.speaks, self.is_terminal = dist.get_rank() == 0, sys.stdout.isatty()
        self.first, self.began = trainer.steps_done + 1, time.perf_counter()
        self.every = args.print_every or max(1, round(args.steps / 40))
        self.flops, self.peak = flops_per_token(trainer.config), peak_tflops(args, trainer.device)
        path = args.metrics if self.speaks and args.metrics else os.devnull
        self.file = on_all_ranks(open, path, "a" if trainer.steps_done else "w")
        self.write({"flags": {flag.name: getattr(args, flag.name) for flag in FLAGS}})
        own = boxes_of(trainer, lambda tensor: tensor if tensor.requires_grad else None)
        shapes = [(name, whole.numel()) for name, whole in own.items()]
        parameters = sum(dict(sum(gather_objects(shapes), [])).values())
        self.say(
            f"{parameters:,} parameters on {args.world_size} x "
            f"{trainer.device.type}: pp {args.pp} x dp {args.dp} x cp {args.cp} x tp {args.tp}"
        )

    def step(self, metrics, seconds):
        """A step's metrics; it took so long."""
        step, args = self.trainer.steps_done, self.trainer.args
        speed, device = args.batch_size * args.seq_len / seconds, self.trainer.device
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # MB, at most
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(device) / 2**20
        self.write({"step": step, **metrics, "tokens_per_s": speed, "memory_mb": memory})
        tflops = speed / args.world_size * self.flops / 1e12
        mfu = f", MFU {tflops / self.peak:.1%}" if self.peak else ""
        left = (time.perf_counter() - self.began) / (step - self.first + 1) * (args.steps - step)
        line = (
            f"step {step} of {args.steps}  loss {metrics['loss']:.4f}  {speed:,.0f} tokens/s, "
            f"{tflops:.3g} TFLOP/s each{mfu}, {memory:,.0f} MB  {timedelta(seconds=round(left))} "
            f"left  grad norm {metrics['grad_norm']:.3f}  lr {metrics['lr']:.2e}"
            + (f"  {metrics['skipped']} skipped" if metrics["skipped"] else "")
        )
        if step in (self.first, args.steps) or self.trainer.stop or step % self.every == 0:
            self.say(line)
        elif self.is_terminal:
            self.say(line[: shutil.get_terminal_size().columns - 1], end="")

    def validation(self, loss, tokens):
        """Of so many tokens."""
        step, perplexity = self.trainer.steps_done, math.exp(min(loss, 700))
        self.write({"step": step, "validation_loss": loss, "perplexity": perplexity})
        found = f"validation loss {loss:.4f}, perplexity {perplexity:.2f}"
        self.say(f"{found}, of {tokens:,} tokens after step {step}")

    def say(self, line, end="\n"):
        """Print it, in place of a line that is rewritten."""
        if self.speaks:
            print(("\r\033[K" if self.is_terminal else "") + line, end=end, flush=True)

    def write(self, value):
        """A line of JSON, where what is not finite is null. A full disk ends no training."""
        is_bad = lambda number: isinstance(number, float) and not math.isfinite(number)
        value = {name: None if is_bad(number) else number for name, number in value.items()}
        try:
            if self.file:
                print(json.dumps(value), file=self.file, flush=True)
        except OSError as error:
            complain(f"error: --metrics {self.file.name}: {error.strerror}")
            self.file = None


def peak_tflops(args, device):
    """Of a GPU that the process has to itself, if it is known; else None."""
    if device.type == "cpu" or args.device == "shared":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peaks[args.dtype] for part, peaks in PEAKS.items() if part in name), None)


def complain(sentence):
    """On stderr, in one write, which another process's line cannot cut in two."""
    print(f"{Path(sys.argv[0]).name}: {sentence}\n", end="", file=sys.stderr, flush=True)


# ---- loop ----------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(trainer, data, batches=8):
    """Mean loss per token over the first `batches` batches of the validation part, and its tokens.

    Raises TrainingError, on all ranks, as Trainer.step() does.
    """
    args, total, count = trainer.args, 0, 0
    for chunk in trainer.chunks:
        chunk.eval()
    for index in range(batches):
        inputs, targets = data.validation_batch(index, args.batch_size, args.seq_len)
        counted = int((targets != IGNORE_INDEX).sum())
        rows = trainer.own_rows()
        found = trainer.run(trainer.evaluation, inputs[rows], targets[rows])
        loss, num_outside = torch.stack(found).tolist()
        refuse(args, num_outside)
        total += loss * counted
        count += counted
    if not math.isfinite(total):
        raise TrainingError(f"validation loss {total} is not finite")
    return total / count, count


@torch.no_grad()
def sample(trainer, prompt, length, temperature=1.0, seed=0):
    """Continue token ids `prompt` by `length` tokens drawn from the model; the same on every rank.

    Collective: replicas, too, since experts may be spread over them. Raises TrainingError if the
    prompt has a token outside the vocabulary.
    """
    T, V = trainer.config.seq_len, trainer.config.vocab_size
    if (largest := max(prompt, default=0)) >= V:
        raise TrainingError(f"the prompt's token {largest} is outside --vocab-size {V}", status=2)
    for chunk in trainer.chunks:
        chunk.eval()
    pipeline = forward_pipeline(trainer, 1, 1, lambda logits, _: logits)
    generator, tokens = torch.Generator().manual_seed(seed), list(prompt)
    for _ in range(length):
        window = tokens[-T:]
        # causal: the rest is unseen
        (inputs,) = trainer.own_tokens(torch.tensor([window + [0] * (T - len(window))]))
        logits = logits_at(trainer, len(window) - 1, pipeline.step(inputs, inputs))
        weights = torch.softmax(logits / temperature, 0)
        tokens.append(int(torch.multinomial(weights, 1, generator=generator)))
    return tokens[len(prompt) :]


def logits_at(trainer, position, logits):
    """Those of all tokens (V,) at a position, on all ranks of the replica and on the CPU.

    logits: (T, 1, V/tp) of this rank's positions, on the last stage; None on the others.
    """
    mesh, (last_rank, last_chunk) = trainer.mesh, trainer.route[-1]
    whole = torch.zeros(trainer.config.vocab_size, dtype=torch.float64, device=trainer.device)
    (place,) = (trainer.positions == position).nonzero(as_tuple=True)
    if logits is not None and len(place):  # of the cp ranks one has the position
        start, own = trainer.chunks[last_chunk].lm_head.start, logits[place.item(), 0]
        whole[start : start + len(own)] = own
    for group in mesh.tp_group, mesh.cp_group:
        all_reduce(whole, group=group)
    broadcast(whole, dist.get_global_rank(mesh.pp_group, last_rank), mesh.pp_group)
    return whole.cpu()


def go_on(trainer, folder):
    """From the folder's last checkpoint, if any; SIGTERM now ends the training after a save."""
    on_all_ranks(partial(folder.mkdir, parents=True, exist_ok=True))
    paths, *_ = gather_objects(on_all_ranks(checkpoints_of, folder))
    if paths:
        load(trainer, paths[-1])
        if dist.get_rank() == 0:
            print(f"goes on from {paths[-1]}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: setattr(trainer, "sigterm", True))


def train(args, device):
    """Steps from the first, or the last checkpoint's, on; then validation and a sample. Collective.

    Raises TrainingError, on all ranks, for data and checkpoints that cannot be used, for what
    Trainer.step() and save() refuse, and on SIGTERM, after a save.
    """
    data = on_all_ranks(load_data, args.data, args.seq_len, args.vocab_size)
    trainer = Trainer(args, make_mesh(args), device)
    if args.checkpoint:
        go_on(trainer, Path(args.checkpoint))
    log, first = Log(trainer), trainer.steps_done
    for step in range(first, args.steps):
        began = time.perf_counter()
        batch = data.batch(step, args.batch_size, args.seq_len, args.seed, trainer.own_rows())
        metrics = trainer.step(*batch)
        log.step(metrics, time.perf_counter() - began)
        is_over = trainer.stop or step + 1 == args.steps
        if args.checkpoint and (is_over or (step + 1) % (args.save_every or math.inf) == 0):
            save(trainer, args.checkpoint)
        if trainer.stop:
            end = f"SIGTERM; --checkpoint {args.checkpoint} has step {step + 1}"
            raise TrainingError(end, status=128 + signal.SIGTERM)
        if not is_over and (step + 1) % (args.eval_every or math.inf) == 0:
            log.validation(*evaluate(trainer, data))
    if first < args.steps:
        log.validation(*evaluate(trainer, data))
    if args.sample:
        prompt = on_all_ranks(prompt_of, args, data)
        tokens = sample(trainer, prompt, args.sample, temperature=0.8, seed=args.seed)
        prompt, tokens = show(prompt, data.is_text), show(tokens, data.is_text)
        log.say(f"---- prompt\n{prompt}\n---- continuation\n{tokens}")


def prompt_of(args, data):
    """The tokens of --prompt, its bytes or numbers, or the middle of the validation part."""
    if not args.prompt:
        middle = len(data.validation) // 2
        return data.validation[middle : middle + args.seq_len // 2].tolist()
    return list(os.fsencode(args.prompt)) if data.is_text else [*map(int, args.prompt.split(","))]




# ---- one process ---------------------------------------------------------------------------------


def choose_device(args, local_rank=0, per_node=1):
    """This process's device, and the backend for it, by --device.

    "cuda": where fewer GPUs are visible than a node has processes, each must see its own. "shared":
    gloo carries messages through host memory, so that one card runs any layout. Raises ValueError
    for what needs a GPU without one.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.device == "cpu" or (args.device == "auto" and gpus < per_node):
        if args.dtype == "tf32":
            raise ValueError("--dtype tf32 needs a GPU")
        return torch.device("cpu"), "gloo"
    if not gpus:
        raise ValueError(f"--device {args.device}: there is no GPU on this machine")
    device = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(device)
    return device, "gloo" if args.device == "shared" else "nccl"


def join(rank, world_size, device, backend, timeout):
    """Meet the other processes, as torchrun says; without it this one is alone."""
    store = next(dist.rendezvous("env://"))[0] if "RANK" in os.environ else dist.HashStore()
    # torchrun's store still has the keys of the attempt before
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    if backend == "gloo":
        schedule_as_batch()
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"attempt {attempt}", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
        device_id=device if backend == "nccl" else None,  # errors come early
    )
    report_stalls(30)


def main(argv=None, work=train):
    """Run work(args, device) on one rank, which torchrun numbers, or in a world of one.

    Returns the exit status: 2 for wrong flags, which are the same on all ranks, and what work()
    returns, or the TrainingError that it raises on all ranks has. Rank 0 says what was wrong.
    """
    argv, variables = sys.argv[1:] if argv is None else argv, os.environ
    rank, world_size = int(variables.get("RANK", 0)), int(variables.get("WORLD_SIZE", 1))
    local_rank, per_node = int(variables.get("LOCAL_RANK", 0)), world_size
    if int(variables.get("GROUP_WORLD_SIZE", 1)) > 1:  # nodes
        per_node = int(variables["LOCAL_WORLD_SIZE"])
    if {"-h", "--help"} & set(argv):
        if rank == 0:
            Parser().print_help()
        return 0
    say = complain if rank == 0 else lambda sentence: None
    try:
        args = parse(argv, world_size, per_node)
        device, backend = choose_device(args, local_rank, per_node)
    except ValueError as error:
        say(f"error: {error}")
        if "RANK" in variables:  # nobody leaves, and has the launcher end all, before rank 0 spoke
            join(rank, world_size, None, "gloo", 30)
            barrier()
        return 2
    join(rank, world_size, device, backend, args.timeout)
    if args.dtype == "tf32":
        torch.set_float32_matmul_precision("high")
    if per_node % args.tp:
        say(f"warning: --tp {args.tp} spans nodes: every layer waits for the links between")
    try:
        status = work(args, device) or 0
    except TrainingError as error:
        say(f"error: {error}")
        status = error.status
    barrier()  # nobody closes its connections while another still uses them
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
