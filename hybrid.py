"""Train a small GPT, dense or of experts, over pipeline x data x context x tensor parallelism.

The processes form a grid; along each axis the work is cut in another way, and a process talks only
to those from which it differs in one coordinate:

    axis          splits      sends, per microbatch and layer
    pp  pipeline  layers      activations on, gradients back, where stages meet
    dp  data      sequences   gradients, summed over dp x cp: once per step, or ZeRO's
    cp  context   positions   keys and values, in attention
    tp  tensor    matrices    four all-reduces of activations
    ep  experts   experts     tokens, to theirs and back

    rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank

tp is innermost since it talks most: its ranks should share a node. ep is no axis of the grid: its
ranks, those of tp first and then of dp x cp, have other experts where they would have copies.

A rank holds its stage's layers, 1/tp of their matrices, and with ZeRO 1/(dp cp) of the optimizer's
state. Sums of gradients travel beside the last backward. PyTorch composes this of DTensors over a
DeviceMesh; here are plain tensors and groups.

Every layout computes what one process does: the loss is the sum of the token losses over the
*global* number of tokens, so gradients are summed and never averaged; initial weights depend on the
parameter's name and the seed, batches on the seed and the step. What does depend on the layout:
masks of dropout, which tokens a capacity drops, which experts --topk-nodes leaves a token, and the
losses of balance, which are those of a microbatch of all replicas. Begin with train() and
Trainer.step(); flags, data and checkpoints can wait.

The model is GPT-2's architecture (Radford et al., 2019), under GPT-2's parameter names. Shoeybi et
al., "Megatron-LM", 2019, and Narayanan et al., "Efficient Large-Scale Language Model Training on
GPU Clusters Using Megatron-LM", 2021.

    torchrun --nproc-per-node 8 hybrid.py --tp 2 --pp 2 --microbatches 4  # dp 2
"""

import argparse
import hashlib
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import sysconfig
import time
from collections import Counter, defaultdict, deque
from contextlib import nullcontext
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint import metadata, planner

from collectives import (
    ReduceOp, all_reduce, barrier, gather_objects, rank_and_size, report_stalls,
    schedule_as_batch, set_backend_collectives, set_ranks_per_node,
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
    "allgather": allgather_attention, "ring": ring_attention, "ulysses": ulysses_attention,
}  # fmt: skip
IGNORE_INDEX = -100  # a target that does not count
OUTSIDE = "--data: {:.0f} tokens are outside --vocab-size {}"

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
    ep_group: dist.ProcessGroup  # those of dp x cp x tp that have different experts
    expert_dp_group: dist.ProcessGroup  # those of dp x cp that have the same experts
    expert_tp_group: dist.ProcessGroup  # those of tp that have the same experts
    expert_shard_group: dist.ProcessGroup  # of expert_dp_group, as shard_group is of dp_cp_group
    expert_replicate_group: dist.ProcessGroup
    embedding_group: dist.ProcessGroup | None = None  # first and last stage: the tied embedding
    node_group: dist.ProcessGroup | None = None  # of ep_group on this node, if it has several
    cross_group: dist.ProcessGroup | None = None  # its ranks in the same place on all nodes


OF_GRADIENTS = "dp_cp_group", "expert_dp_group", "shard_group", "replicate_group"  # suffixes


def make_mesh(args, groups=None):
    """Groups of the slices of the grid of all processes. Collective: every rank calls it.

    Groups of the same ranks are one, but gradients have communicators of their own: else messages
    of a layer would wait behind gradients under way. groups: of earlier meshes, to be used again.
    """
    rank, groups, mine = dist.get_rank(), {} if groups is None else groups, {}
    degrees = args.pp, args.dp, args.cp, args.tp, args.ep, args.ep_nodes, args.replicate
    for name, slices in slices_of(*degrees).items():  # on all ranks in the same order
        for ranks in map(tuple, slices.tolist()):
            key = ranks, len(ranks) > 1 and name.endswith(OF_GRADIENTS)
            if key not in groups:
                groups[key] = dist.new_group(ranks, timedelta(seconds=args.timeout))
            if rank in ranks:
                mine[name] = groups[key]
    for group in dict.fromkeys(mine.values()):
        node_of = [rank // args.per_node for rank in dist.get_process_group_ranks(group)]
        counts = set(Counter(node_of).values())
        set_ranks_per_node(counts.pop() if len(counts) == 1 else 1, group)
        if args.collectives == "backend":
            set_backend_collectives(group)
        barrier(group)  # NCCL wants all ranks of a group in its first batch
    return Mesh(**mine)


def slices_of(pp, dp, cp, tp, ep=1, ep_nodes=1, replicate=1):
    """{a group's name: ranks (number of such groups, size)} of the grid (pp, dp, cp, tp).

    ep_nodes: on so many nodes lie the ranks of ep. replicate: how many runs of dp x cp have a copy
    of ZeRO's shards each; the replicas of an expert have as many as divides both.
    """
    grid = torch.arange(pp * dp * cp * tp).view(pp, dp, cp, tp)
    replicas = grid.permute(0, 3, 1, 2).reshape(-1, dp * cp)
    ends = grid[[0, -1]] if pp > 1 else grid
    # experts are cut over as much of tp as there is in ep, and over dp x cp; with tp 2, ep 4, dp 4:
    # ep_group 0-3, 4-7; expert_dp_group 0 4, 1 5 and so on
    in_tp = math.gcd(ep, tp)
    # (pp, replicas of experts, ep in dp x cp, copies in tp, ep in tp)
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


# ---- data ----------------------------------------------------------------------------------------


class Data(NamedTuple):
    """Tokens of a training and a validation part, and the batches cut from them."""

    train: np.ndarray
    validation: np.ndarray
    is_text: bool  # bytes of UTF-8

    def batch(self, step, batch_size, seq_len, seed, rows=slice(None), part="train"):
        """Inputs (rows, T) of `step` from anywhere in the part, and as targets their next tokens.

        Those of all rows depend on seed, step and batch_size only.
        """
        tokens, random = getattr(self, part), np.random.default_rng([seed, step])
        starts = random.integers(0, len(tokens) - seq_len, batch_size)[rows]
        window = torch.from_numpy(np.stack([tokens[s : s + seq_len + 1] for s in starts])).long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def load_data(path, seq_len, vocab_size=256):
    """Read --data: None (the standard library's sources), text, or tokens, which stay on the disk.

    Text is a file or a folder, and its tokens are its UTF-8 bytes; tokens are a .bin of uint16, or
    uint32 for a larger vocabulary, or nanoGPT's folder of train.bin and val.bin. Else validation is
    the last tenth. Raises OSError or ValueError for what is missing, no tokens, or too short.
    """
    pattern, path = "[!.]*" if path else "*.py", Path(path or sysconfig.get_path("stdlib"))
    is_split = (path / "train.bin").is_file()
    is_text = path.suffix != ".bin" and not is_split
    dtype = np.uint8 if is_text else np.uint16 if vocab_size <= 2**16 else np.uint32
    if is_split:
        parts = [np.memmap(path / name, dtype, "r") for name in ("train.bin", "val.bin")]
    else:
        tokens = text_of(path, pattern) if path.is_dir() else np.memmap(path, dtype, "r")
        parts = np.split(tokens, [len(tokens) - len(tokens) // 10])
    if min(map(len, parts)) <= seq_len:
        found = f"{len(parts[0])} tokens to train on and {len(parts[1])} for validation"
        raise ValueError(f"{found} are too few for --seq-len {seq_len}")
    return Data(*parts, is_text)


def text_of(folder, pattern):
    """The bytes of a folder's files of text, one after the other."""
    texts = [file.read_bytes() for file in sorted(folder.glob(pattern)) if file.is_file()]
    return np.frombuffer(b"\n".join(text for text in texts if b"\0" not in text), np.uint8)


def show(tokens, is_text):
    """Tokens as text that is safe to print, or as numbers where they are not bytes of text."""
    text = bytes(min(token, 255) for token in tokens).decode(errors="replace")  # 255 is no text
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    return text if is_text else str(tokens)


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


def _residual_dropout(module, x):
    """One mask on all of tp, which hold the same x; another for each rank's part of tokens."""
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
    options: of the linear layers, such as group and defer.
    """

    def __init__(self, config, random=nullcontext(), attention_fn=attention, moe=None, **options):
        super().__init__()
        self.config, self.random, self.attention_fn = config, random, attention_fn
        options["sequence_parallel"] = config.sequence_parallel
        sizes = config.hidden, config.heads, config.kv_heads
        attend = partial(recompute, self.attend) if config.recompute == "selective" else self.attend
        self.ln_1 = nn.LayerNorm(config.hidden)
        self.attn = ParallelSelfAttention(*sizes, attend, **options)
        self.ln_2 = nn.LayerNorm(config.hidden)
        self.mlp = moe() if moe else MLP(config.hidden, config.mlp_width, **options)

    def forward(self, x):
        x = x + _residual_dropout(self, self.attn(self.ln_1(x)))
        return x + _residual_dropout(self, self.mlp(self.ln_2(x)))

    def attend(self, q, k, v):
        """The attention core; its heads are this rank's own, and so are its masks."""
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
    positions: of the tokens in the whole sequence, of which context parallelism leaves a rank some.
    moe, options: see Block; moe is for the layers that have experts.
    """

    def __init__(
        self, config, tp_group=None, stage=0, num_stages=1, positions=None, moe=None, **options
    ):
        super().__init__()
        self.first, self.last = stage == 0, stage == num_stages - 1
        self.config, self.tp_group, self.defer = config, tp_group, options.get("defer")
        self.random = options.get("random", nullcontext())
        self.positions = torch.arange(config.seq_len) if positions is None else positions
        if config.sequence_parallel:
            rank, tp = rank_and_size(tp_group)
            self.positions = self.positions.chunk(tp)[rank]
        sizes = config.vocab_size, config.hidden
        embedding = partial(VocabParallelEmbedding, *sizes, tp_group, config.sequence_parallel)
        block = partial(Block, config, group=tp_group, **options)
        self.transformer = nn.ModuleDict()
        if self.first:
            self.transformer["wte"] = embedding()
            self.transformer["wpe"] = nn.Embedding(config.seq_len, config.hidden)
        self.transformer["h"] = nn.ModuleDict(
            (str(i), block(moe=moe if config.has_experts(i) else None))
            for i in layers_of(stage, num_stages, config)
        )
        if self.last:
            self.transformer["ln_f"] = nn.LayerNorm(config.hidden)
            self.lm_head = self.transformer["wte"] if self.first else embedding()
        for module in self.modules() if config.sequence_parallel else ():
            if isinstance(module, (nn.LayerNorm, nn.Embedding)):  # of each rank's part of tokens
                mark_partial(module)

    def forward(self, x):
        if self.first:
            x = self.transformer["wte"](x.t())
            x = x + self.transformer["wpe"](self.positions[: len(x)]).unsqueeze(1)
            x = _residual_dropout(self, x)
        for block in self.transformer["h"].values():
            x = recompute(block, x) if self.config.recompute == "full" else block(x)
        if self.last:
            x, weight = self.transformer["ln_f"](x), self.lm_head.weight
            split = {"group": self.tp_group, "sequence_parallel": self.config.sequence_parallel}
            x = parallel_linear(x, weight, defer=self.defer, **split)  # (T, B, V/tp)
        return x

    def tied_weight(self):
        """The embedding or the head, of a stage that has one of them: the other is elsewhere."""
        if self.first == self.last:
            return None
        return self.transformer["wte"].weight if self.first else self.lm_head.weight


def layers_of(stage, num_stages, config):
    """The layers of a stage, so that the most expensive one costs as little as can be.

    Cost is FLOPs: of layers, and of the head, on the last stage, which may have no layer. The
    embedding costs none, but memory: of equal cuts the first stages get fewer layers.
    """
    passes, head = 4 if config.recompute == "full" else 3, 2 * config.hidden * config.vocab_size
    layers = [sum(forward_flops(config, config.has_experts(i))) for i in range(config.layers)]
    cuts = cheapest_cuts((0, *(passes * layer for layer in layers), 3 * head), num_stages)
    begin, end = cuts[stage : stage + 2]  # of the embedding, the layers and the head
    return range(max(begin - 1, 0), min(end - 1, config.layers))


@lru_cache
def cheapest_cuts(costs, parts):
    """Cut a list into runs, none empty: the places [0, ..., len(costs)] between them.

    The largest sum of a run is the least that can be, then the second, and so on; of equal cuts
    the runs in front are the shortest.
    """
    sums = [0, *accumulate(costs)]
    best = {0: ([], [0])}  # {length: (sums of its runs, largest first, their places)}
    for left in reversed(range(parts)):  # runs to come
        best = {
            end: min(  # of two ways to here the better one stays better
                (sorted([*found, sums[end] - sums[cuts[-1]]], reverse=True), [*cuts, end])
                for found, cuts in best.values()
                if cuts[-1] < end
            )
            for end in range(parts - left, len(costs) - left + 1)
        }
    return best[len(costs)][1]


def forward_flops(config, experts):
    """Of a layer, per token: of products with weights, and of scores and their use.

    experts: whether it has them, or the portion of layers that do. Products cost 2 per weight that
    a token uses, about 24 h^2; scores 4 s h.
    """
    h, F, kv_heads = config.hidden, config.mlp_width, config.kv_heads or config.heads
    weights = 2 * h * h + 2 * h * h * kv_heads // config.heads + 2 * h * F
    more = 2 * h * F * (config.top_k + config.shared_experts - 1) + h * config.experts
    return 2 * (weights + experts * more), 4 * config.seq_len * h


def flops_per_token(config):
    """The model's, forward and twice that in backward: what is recomputed does not count."""
    layers = [sum(forward_flops(config, config.has_experts(i))) for i in range(config.layers)]
    return 3 * (sum(layers) + 2 * config.hidden * config.vocab_size)


def make_moe(trainer):
    """A mixture of experts in place of an MLP, (T, B, D) -> (T, B, D)."""
    config, mesh, args = trainer.config, trainer.mesh, trainer.args
    by_losses = float(config.balance == "aux")
    layer = MoE(
        *(config.hidden, config.mlp_width, config.experts, config.top_k, mesh.ep_group),
        tp_group=None if config.sequence_parallel else mesh.tp_group,  # deals out the tokens
        capacity_factor=config.capacity_factor,
        shared_experts=config.shared_experts,
        balance_coefficient=0.01 * by_losses,
        z_coefficient=0.001 * by_losses,
        loss_scale=1 / args.microbatches,
        balance_groups=(mesh.dp_group, mesh.cp_group, mesh.tp_group),
        nodes=(mesh.node_group, mesh.cross_group) if mesh.cross_group else None,
        n_group=args.ep_nodes,
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
    if ".experts." in name:
        experts = part_of(parameter)[0][0] * dist.get_world_size(ep_group)
        return rows_held(parameter, Shard(0, (experts,)), ep_group)
    return rows_held(parameter, shards.get(name), tp_group)


def initial_value(name, shape, layers, seed, first=0):
    """As GPT-2's: rows (of a c_proj: columns) of parameter `name` from `first` on, in this shape.

    Each is a random stream of its own, by seed, name and its number in the whole, so that a rank
    draws what it holds.
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
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    bits = np.random.Philox(key=int.from_bytes(digest[:16], "big"))
    generator, state = np.random.Generator(bits), bits.state
    first *= math.prod(value.shape[1:-1])
    for number, row in enumerate(value.view(-1, value.shape[-1]).numpy(), first):
        state["state"]["counter"][3] = number  # the highest word: a stream has 2**192 draws
        bits.state = state
        generator.standard_normal(out=row, dtype=np.float32)
    value.mul_(std)
    return value.t() if by_column else value


# ---- one step ------------------------------------------------------------------------------------


class TrainingError(ValueError):
    """What ends the training, raised on all ranks alike, and the exit status."""

    def __init__(self, message, status=1):
        super().__init__(message)
        self.status = status


class Trainer:
    """One rank's part of the training.

    config: of the model. positions: this rank's of each sequence.
    route: the (rank of the pipeline, chunk) of each of the model's stages. DualPipe has a second
        route, of a replica: then `replicated` is true.
    chunks: the stages that this rank has; own_chunks: without DualPipe's replica of another's.
    dense, experts: the parameters of chunks; experts differ from one rank of ep to the next.
    stages: the chunks in DistributedDataParallel, or with ZeRO in FullyShardedDataParallel.
    pipeline, evaluation: run the stages over a batch, with backward and without.
    """

    skipped = skipped_in_a_row = 0  # steps, which were not finite
    sigterm = stop = False  # SIGTERM has come: to this rank; to any, as all learn in step()

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
        self.own_chunks = self.chunks[:1] if self.replicated else self.chunks
        self.shards = {name: of for chunk in self.chunks for name, of in shards_of(chunk).items()}
        named = [pair for chunk in self.chunks for pair in chunk.named_parameters()]
        self.dense = [parameter for name, parameter in named if ".experts." not in name]
        self.experts = [parameter for name, parameter in named if ".experts." in name]
        self.stages = wrap(self)
        self.optimizer = make_optimizer(args, self.dense + self.experts)
        rows = args.batch_size // (args.dp * args.microbatches)
        options = {"defer": put_off, "sync_each": args.zero > 1}  # so no rank has whole gradients
        self.pipeline = make_pipeline(self, schedule, rows, self.loss, **options)
        self.evaluation = make_pipeline(self, args.microbatches, rows, self.loss)

    def step(self, inputs, targets):
        """One optimizer step on this rank's rows of the batch, (B/dp, T) each.

        Returns the global loss, the gradient norm before clipping, the learning rate, the number of
        steps skipped so far, and what tally_metrics() has. Raises TrainingError for tokens outside
        the vocabulary and where skip_step() does; weights are then those of before.
        """
        args = self.args
        # masks of dropout are alike over tp, where activations are, and different elsewhere
        place = dist.get_rank(self.mesh.dp_cp_group), dist.get_rank(self.mesh.pp_group)
        (seed,) = np.random.SeedSequence([args.seed, self.steps_done, *place]).generate_state(1)
        torch.manual_seed(int(seed))
        rate = learning_rate(self.steps_done, args.steps, args.warmup, args.lr)
        loss_and_outside = self.forward_backward(inputs, targets)
        norm = self.clip_gradients()
        tallies, of_experts = sum_tallies(self), {}
        if args.experts:
            of_experts = tally_metrics(tallies, args.microbatches, args.balance == "aux")
        sigterm = torch.full((), float(self.sigterm), device=self.device)
        if args.checkpoint:
            all_reduce(sigterm, ReduceOp.MAX)
        # here the host waits for the device: else only a mixture does, for its counts
        numbers = torch.stack([*loss_and_outside, norm, sigterm, *of_experts.values()])
        loss, num_outside, norm, self.stop, *loads = numbers.tolist()
        if num_outside:
            raise TrainingError(OUTSIDE.format(num_outside, args.vocab_size))
        if math.isfinite(loss + norm):
            self.update(rate, tallies)
            self.skipped_in_a_row = 0
        else:
            self.skip_step(loss, norm)
        for stage in self.stages if args.zero else ():
            stage.reshard()  # what was gathered is of before, or what was wrong
        self.steps_done += 1
        metrics = {"loss": loss, "grad_norm": norm, "lr": rate, "skipped": self.skipped}
        return metrics | dict(zip(of_experts, loads))

    def forward_backward(self, inputs, targets):
        """Leave the summed gradients in .grad, of whole parameters or pieces; returns as run().

        Microbatches run by the schedule; in the last backward sums over dp x cp leave; all are
        waited for; then partial gradients are summed over tp, DualPipe's replicas, the tied weight.
        """
        # DDP's gradients are views of its buckets, and stay; ZeRO's first sum becomes .grad
        self.optimizer.zero_grad(set_to_none=self.args.zero > 0)
        found = self.run(self.pipeline, inputs, targets)
        for stage in self.stages:
            stage.finish_grad_sync()
        self.sum_shared_gradients()
        return found

    def run(self, pipeline, inputs, targets):
        """One pipeline step; returns the global loss and how many tokens no vocabulary has."""
        for chunk in self.chunks:
            chunk.train(torch.is_grad_enabled())
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
        start = next(chunk for chunk in self.chunks if chunk.last).lm_head.start
        tokens = logits.flatten(0, 1), targets.t().flatten(), start, IGNORE_INDEX
        losses = vocab_parallel_cross_entropy(*tokens, self.mesh.tp_group, inplace=True)
        return losses.sum() / num_tokens

    def sum_shared_gradients(self):
        """Sum gradients of copies: partial ones of tp, of DualPipe's replicas, of the tied head."""
        marked = {parameter for chunk in self.chunks for parameter in partial_parameters(chunk)}
        groups = (self.dense, self.mesh.tp_group), (self.experts, self.mesh.expert_tp_group)
        for parameters, group in groups:
            parameters = [parameter for parameter in parameters if parameter in marked]
            sum_partial_gradients(parameters, group, check=self.steps_done == 0)
        if self.replicated:
            sum_replicas(self.chunks, self.mesh.pp_group)
        weights = [chunk.tied_weight() for chunk in self.chunks]
        tied = [weight.grad for weight in weights if weight is not None]
        if len(tied) == 2:  # embedding and head are on one rank
            tied[0].copy_(tied[1].add_(tied[0]))
        elif tied:
            all_reduce(tied[0], group=self.mesh.embedding_group)

    def clip_gradients(self):
        """Scale gradients to a joint norm of at most grad_clip; returns the norm before."""
        mesh, named = self.mesh, [p for c in self.own_chunks for p in c.named_parameters()]
        experts = [parameter.grad for name, parameter in named if ".experts." in name]
        dense = [torch.zeros(0, device=self.device)]  # a stage may have nothing that counts
        for name, parameter in named:
            counts = name in self.shards or dist.get_rank(mesh.tp_group) == 0  # others have copies
            if counts and ".experts." not in name and name != "lm_head.weight":  # wte's copy
                dense.append(parameter.grad)
        # sums go over ranks with other elements: ZeRO's shards, then the split by tp or ep
        over = lambda replicas, group: [replicas, group] if self.args.zero else [group]
        norms = [get_total_norm(dense, groups=over(mesh.shard_group, mesh.tp_group))]
        if experts:
            groups = over(mesh.expert_shard_group, mesh.ep_group)
            norms.append(get_total_norm(experts, groups=groups))
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
        if self.args.balance == "bias":
            for row, layer in mixtures(self):
                layer.router.update_bias(tallies[row, : layer.num_experts])

    def skip_step(self, loss, norm):
        """Leave out a step that is not finite; TrainingError if it is one too many in a row."""
        self.skipped, self.skipped_in_a_row = self.skipped + 1, self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= self.args.skip_nonfinite:
            found = f"loss {loss:.4f}, grad norm {norm:.3f}; {self.skipped_in_a_row} in a row"
            raise TrainingError(f"step {self.steps_done + 1} is not finite: {found}")

    def own_rows(self):
        """This rank's rows of the global batch."""
        rank, rows = dist.get_rank(self.mesh.dp_group), self.args.batch_size // self.args.dp
        return slice(rank * rows, (rank + 1) * rows)

    def own_tokens(self, *batches):
        """This rank's positions of batches of tokens (B, T), on the device, by one copy."""
        tokens = torch.stack(batches)[:, :, self.positions]
        if self.device.type == "cuda":
            tokens = tokens.pin_memory()  # else the host would wait
        return tokens.to(self.device, non_blocking=True)


def make_pipeline(trainer, schedule, rows, loss_fn, **options):
    """Runs the stages over microbatches of so many rows, in the order of a schedule.

    schedule: or the number of microbatches, which then go forward only, by one route.
    """
    args, stages = trainer.args, trainer.stages
    if isinstance(schedule, int):
        schedule = forward_only(args.pp, schedule, trainer.route)
        stages = stages[: len(trainer.own_chunks)]
    length = args.seq_len // (args.cp * (args.tp if args.sp else 1))
    options |= {"shape": (length, rows, args.hidden), "device": trainer.device}
    options["dtype"] = torch.bfloat16 if args.dtype == "bf16" else torch.get_default_dtype()
    return Pipeline(stages, schedule, loss_fn, trainer.mesh.pp_group, **options)


def learning_rate(step, steps, warmup, peak):
    """Linear warm-up over `warmup` steps, then a cosine down to peak / 10. step counts from 0."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def make_chunks(trainer, routes, put_off):
    """The stages that this rank has on a schedule's routes, by chunk, with initial values."""
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
                moe=partial(make_moe, trainer),
            )
        for module in chunk.modules():  # each once, though the head is the embedding
            module.to_empty(device=device, recurse=False)
        initialize(chunk, args.layers, args.seed, mesh.ep_group)
        chunks.append(chunk)
    return chunks


def wrap(trainer):
    """The chunks as replicas that sum gradients, or with ZeRO as shards."""
    args, mesh, chunks, stages = trainer.args, trainer.mesh, trainer.chunks, []
    # the loss has its global divisor already
    options = {"gradient_divide_factor": 1, "wait_in_backward": False}
    if not args.zero:
        groups = dict.fromkeys(trainer.experts, mesh.expert_dp_group)
        options |= {"broadcast_buffers": False, "groups": groups}
        options["process_group"] = mesh.dp_cp_group
        return [DistributedDataParallel(chunk, **options) for chunk in chunks]
    if args.dtype == "bf16":
        options |= {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    options |= {"process_group": mesh.shard_group, "replicate_group": mesh.replicate_group}
    groups = mesh.expert_shard_group, mesh.expert_replicate_group
    options |= {"groups": dict.fromkeys(trainer.experts, groups), "under_way": deque()}
    for chunk in chunks:
        for name in shards_of(chunk):  # apart from copies, which all of tp then cut alike
            chunk.get_parameter(name).sharded = True
        units = chunk.transformer["h"].values()
        stages.append(FullyShardedDataParallel(chunk, units=units, stage=args.zero, **options))
    return stages


def make_optimizer(args, parameters):
    """AdamW, with decay of matrices."""
    matrices, others = [], []
    for parameter in parameters:
        (matrices if len(part_of(parameter)[0]) > 1 else others).append(parameter)
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, args.lr, (0.9, 0.95), 1e-8, args.weight_decay, fused=True)


def mixtures(trainer):
    """[(number among the model's mixtures of experts, MoE)] of this rank's."""
    layers = [pair for chunk in trainer.chunks for pair in chunk.transformer["h"].items()]
    every = trainer.config.moe_every
    return [(int(i) // every, layer.mlp) for i, layer in layers if isinstance(layer.mlp, MoE)]


@torch.no_grad()
def sum_tallies(trainer):
    """What the model's mixtures have counted in the step, a row each; they begin anew."""
    mesh, config = trainer.mesh, trainer.config
    sizes = config.layers // config.moe_every, config.experts + 3
    tallies = torch.zeros(sizes, dtype=torch.float64, device=trainer.device)
    for row, layer in mixtures(trainer):
        tallies[row].copy_(layer.tally)
        layer.tally.zero_()
    for group in (mesh.dp_cp_group, mesh.tp_group, mesh.pp_group) if config.experts else ():
        all_reduce(tallies, group=group)
    return tallies


# ---- checkpoints ---------------------------------------------------------------------------------

MAY_CHANGE = "dropout", "capacity_factor", "topk_nodes"  # of the model's flags, as a run goes on
MOMENTS = "exp_avg", "exp_avg_sq"  # Adam's


def on_all_ranks(call, *arguments, of="", status=2):
    """What call() returns, or a TrainingError, `of` something, if it fails on one. Collective."""
    result, fault = None, ""
    try:
        result = call(*arguments)
    except (OSError, ValueError, dcp.api.CheckpointException) as error:
        failures = getattr(error, "failures", {})  # {rank: (error, traceback)}
        fault = next((f"rank {r}: {cause}" for r, (cause, _) in failures.items()), str(error))
    for rank, lines in enumerate(gather_objects(fault.strip().splitlines()[:1])):
        for line in lines:
            raise TrainingError(of + (f"rank {rank}: {line}" if rank else line), status)
    return result


class Boxes(torch.Tensor):
    """A tensor of which this rank has some boxes, as torch.distributed.checkpoint asks for them.

    boxes: {place of the first element: view}. The tensor itself has no memory but a number's. A
    load plans with the first of these methods, a save with the second; the third is for both.
    """

    @staticmethod
    def __new__(cls, dtype, shape, boxes):
        whole = torch.zeros((), dtype=dtype).expand(shape).as_subclass(cls)
        whole.boxes = boxes
        return whole

    def __create_chunk_list__(self):
        described = metadata.ChunkStorageMetadata
        return [described(torch.Size(place), box.shape) for place, box in self.boxes.items()]

    def __create_write_items__(self, name, _):
        properties = metadata.TensorProperties(self.dtype)
        return [
            planner.WriteItem(
                metadata.MetadataIndex(name, chunk.offsets),
                planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index):
        return self.boxes[index.offset]


def boxes_of(trainer, value=lambda tensor: tensor, chunks=None):
    """{GPT-2's name: Boxes} of parameters and buffers: views of what this rank has, for a save.

    Of copies one is written; the head is left out, as it is the embedding. value picks what is
    looked at of a parameter: itself, or what has its shape, or None. chunks: these instead, with
    their head.
    """
    mesh, found = trainer.mesh, {}
    named = lambda chunk: [*chunk.named_parameters(), *chunk.named_buffers()]
    for name, own in (pair for c in chunks or trainer.own_chunks for pair in named(c)):
        tensor = value(own)
        if tensor is not None and (chunks or name != "lm_head.weight"):
            rows = rows_of(name, own, trainer.shards, mesh.ep_group, mesh.tp_group)
            boxes = views_in_whole(own, tensor, rows)
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

    Raises TrainingError if copies of a weight differ, so that no checkpoint has a corrupted one,
    or it cannot be written; those before are intact.
    """
    if different := unlike_copies(trainer):
        raise TrainingError(f"step {trainer.steps_done}: copies differ: {different}")
    path = Path(folder, f"step_{trainer.steps_done:08d}")
    fails = {"of": f"--checkpoint {path}: ", "status": 1}
    write = partial(dcp.save, checkpoint_id=path.with_suffix(".partial"))
    on_all_ranks(write, state_of(trainer), **fails)
    on_all_ranks(commit, trainer, path, **fails)


def commit(trainer, path):
    """Rank 0 makes what all ranks have written a checkpoint, at once, and removes old ones."""
    if dist.get_rank() == 0:
        run = {flag.name: getattr(trainer.args, flag.name) for flag in FLAGS}
        written = path.with_suffix(".partial")
        (written / "run.json").write_text(json.dumps(run | {"skipped": trainer.skipped}, indent=4))
        os.sync()
        written.rename(path)
        for old in checkpoints_of(path.parent)[:-2]:
            old.rename(old.with_suffix(".partial"))  # half of it is no checkpoint
        for old in path.parent.glob("step_*.partial"):  # and what killed saves left
            shutil.rmtree(old, ignore_errors=True)


def checkpoints_of(folder):
    """Those in a folder, the last step last."""
    return sorted(path for path in folder.glob("step_*") if path.name[5:].isdecimal())


def go_on(trainer, folder):
    """From the folder's last checkpoint, if any, of this model in any layout. Collective."""
    on_all_ranks(partial(folder.mkdir, parents=True, exist_ok=True))
    path, *_ = gather_objects(checkpoints_of(folder)[-1:])[0] or [None]
    if path is None:
        return
    run = on_all_ranks(read_run, path, trainer.args)
    trainer.steps_done, trainer.skipped = int(path.name.removeprefix("step_")), run["skipped"]
    if steps := trainer.steps_done - trainer.skipped:  # else there are no moments
        for weight in trainer.dense + trainer.experts:
            moments = {kind: torch.zeros_like(weight) for kind in MOMENTS}
            number = torch.full((), steps, dtype=torch.float32, device=weight.device)
            trainer.optimizer.state[weight] = {"step": number} | moments
    for chunk in trainer.chunks:  # in turns: two may have the embedding
        read = partial(dcp.load, checkpoint_id=path)
        on_all_ranks(read, state_of(trainer, [chunk]), of=f"--checkpoint {path}: ")
    if dist.get_rank() == 0:
        print(f"goes on from {path}", flush=True)


def read_run(path, args):
    """The run.json of a checkpoint. Raises ValueError if it is damaged, or of another model."""
    try:
        run = json.loads((path / "run.json").read_bytes())
        names = [flag.name for flag in GROUPS["model"] if flag.name not in MAY_CHANGE]
        theirs = {name: run[name] for name in (*names, "skipped")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / 'run.json'} has not the flags of a run: {error!r}") from None
    for name in names:
        if (own := getattr(args, name)) != theirs[name]:
            raise ValueError(f"{as_typed(name, own)}, but {path} has {as_typed(name, run[name])}")
    return run


def unlike_copies(trainer):
    """Which copies of a weight have other bits than most have, with their ranks. Collective.

    Compared are sums of the bytes, which one flipped bit changes for certain.
    """
    own, sums, copies, different = [], [], defaultdict(list), []
    for chunk in trainer.chunks:
        for name, whole in boxes_of(trainer, chunks=[chunk]).items():
            for place, box in whole.boxes.items():
                own.append((name, place, box.shape))
                sums.append(box.contiguous().view(torch.uint8).sum())
    sums = torch.stack(sums).tolist() if sums else []  # one wait for the device
    for rank, theirs in enumerate(gather_objects([*zip(own, sums)])):
        for box, total in theirs:
            copies[box].append((rank, total))
    for (name, *_), found in copies.items():
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

    On a terminal one line is rewritten with every step; elsewhere some are printed. The file of
    metrics has lines of JSON: the flags, then the steps. A run that goes on appends to it; of a
    step that is there twice the later one counts.
    """

    def __init__(self, trainer):
        args, device, self.trainer = trainer.args, trainer.device, trainer
        self.speaks, self.is_terminal = dist.get_rank() == 0, sys.stdout.isatty()
        self.first, self.began = trainer.steps_done + 1, time.perf_counter()
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak = next((peaks[args.dtype] for part, peaks in PEAKS.items() if part in gpu), None)
        path = args.metrics if self.speaks and args.metrics else os.devnull
        self.file = on_all_ranks(open, path, "a" if trainer.steps_done else "w")
        self.write({"flags": {flag.name: getattr(args, flag.name) for flag in FLAGS}})
        own = boxes_of(trainer, lambda tensor: tensor if tensor.requires_grad else None)
        shapes = [(name, whole.numel()) for name, whole in own.items()]
        parameters = sum(dict(sum(gather_objects(shapes), [])).values())
        degrees = " x ".join(f"{axis} {getattr(args, axis)}" for axis in ("pp", "dp", "cp", "tp"))
        self.say(f"{parameters:,} parameters on {args.world_size} x {device.type}: {degrees}")

    def step(self, metrics, seconds):
        """A step's metrics; it took so long."""
        step, args, device = self.trainer.steps_done, self.trainer.args, self.trainer.device
        speed = args.batch_size * args.seq_len / seconds
        tflops = speed / args.world_size * flops_per_token(self.trainer.config) / 1e12  # of each
        metrics = {"loss": 0, "tokens_per_s": speed, "tflops": tflops} | metrics
        if self.peak:
            metrics["mfu"] = tflops / self.peak
        metrics["memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # at most
        if device.type == "cuda":
            metrics["memory_mb"] = torch.cuda.max_memory_allocated(device) / 2**20
        self.write({"step": step} | metrics)
        passed = (time.perf_counter() - self.began) / 60
        metrics["minutes_left"] = passed / (step - self.first + 1) * (args.steps - step)
        shown = lambda number: f"{number:,.0f}" if number >= 100 else f"{number:.4g}"
        known = (f"{name} {shown(number)}" for name, number in metrics.items())
        line = "  ".join([f"step {step} of {args.steps}", *known])
        every = args.print_every or max(1, round(args.steps / 40))
        if step in (self.first, args.steps) or self.trainer.stop or step % every == 0:
            self.say(line)
        elif self.is_terminal:
            self.say(line[: shutil.get_terminal_size().columns - 1], end="")

    def say(self, line, end="\n"):
        """Print it, in place of a line that is rewritten."""
        if self.speaks:
            print(("\r\033[K" if self.is_terminal else "") + line, end=end, flush=True)

    def write(self, value):
        """A line of JSON, where what is not finite is null."""
        is_bad = lambda number: isinstance(number, float) and not math.isfinite(number)
        value = {name: None if is_bad(number) else number for name, number in value.items()}
        print(json.dumps(value), file=self.file, flush=True)


# ---- loop ----------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(trainer, data, batches=8):
    """Mean loss per token over `batches` batches of the validation part, always the same."""
    args, rows, losses = trainer.args, trainer.own_rows(), []
    for index in range(batches):
        batch = data.batch(index, args.batch_size, args.seq_len, args.seed, rows, "validation")
        loss, num_outside = torch.stack(trainer.run(trainer.evaluation, *batch)).tolist()
        if num_outside:
            raise TrainingError(OUTSIDE.format(num_outside, args.vocab_size))
        losses.append(loss)
    return sum(losses) / batches


@torch.no_grad()
def sample(trainer, prompt, length, temperature=1.0, seed=0):
    """Continue token ids by `length` tokens drawn from the model; collective, and alike on all."""
    T, V = trainer.config.seq_len, trainer.config.vocab_size
    if outside := [token for token in prompt if not 0 <= token < V]:
        raise TrainingError(f"the prompt's token {outside[0]} is outside --vocab-size {V}", 2)
    for chunk in trainer.chunks:
        chunk.eval()
    pipeline = make_pipeline(trainer, 1, 1, lambda logits, _: logits)
    last, positions = trainer.chunks[trainer.route[-1][1]], trainer.positions
    generator, tokens = torch.Generator().manual_seed(seed), list(prompt)
    for _ in range(length):
        window = tokens[-T:]  # padded behind, where causal attention does not look
        (inputs,) = trainer.own_tokens(torch.tensor([window + [0] * (T - len(window))]))
        own = pipeline.step(inputs, inputs)  # (T, 1, V/tp) of own positions, on the last stage
        logits = torch.zeros(V, dtype=torch.float64, device=trainer.device)
        if own is not None:
            begin, end = last.lm_head.start, last.lm_head.start + own.shape[-1]
            logits[begin:end] = own[positions == len(window) - 1].sum((0, 1))
        for group in trainer.mesh.tp_group, trainer.mesh.cp_group, trainer.mesh.pp_group:
            all_reduce(logits, group=group)
        weights = torch.softmax(logits.cpu() / temperature, 0)
        tokens.append(int(torch.multinomial(weights, 1, generator=generator)))
    return tokens[len(prompt) :]


def train(args, device):
    """Steps from the first, or the last checkpoint's, on; then validation and a sample. Collective.

    Raises TrainingError for what cannot be used or is refused, and on SIGTERM, after a save.
    """
    sizes, of = (args.seq_len, args.vocab_size), f"--data {args.data or '(default)'}: "
    data = on_all_ranks(load_data, args.data, *sizes, of=of)
    trainer = Trainer(args, make_mesh(args), device)
    if args.checkpoint:
        go_on(trainer, Path(args.checkpoint))
        signal.signal(signal.SIGTERM, lambda *_: setattr(trainer, "sigterm", True))
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
        if is_over or (step + 1) % (args.eval_every or math.inf) == 0:
            loss = evaluate(trainer, data)
            p = math.exp(min(loss, 700))
            log.write({"step": step + 1, "validation_loss": loss, "perplexity": p})
            log.say(f"validation loss {loss:.4f}, perplexity {p:.2f} after step {step + 1}")
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
    """kind: bool, a tuple of choices, or a type. needs: when it has a meaning, a condition."""

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
        Flag("zero", (0, 1, 2, 3), None, "stage of ZeRO (default: 1, and 0 of one replica)"),
        Flag("replicate", SIZE, 1, "copies of ZeRO's shards, over neighbours (HSDP)", "zero"),
        Flag("sp", bool, False, "split the sequence over tp outside of its matrices"),
        Flag("cp_method", tuple(CP_METHODS), "ring", "how attention crosses that split", "cp > 1"),
        Flag("schedule", tuple(SCHEDULES), "1f1b", "order of microbatches in the pipeline"),
        Flag("chunks", SIZE, 2, "of a rank's layers", "schedule == 'interleaved'"),
        Flag("microbatches", SIZE, None, "of a step (default: 1; with pp up to 4 x pp)"),
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
        Flag("capacity_factor", at_least(0.01, float), None, "drop above load / mean", "experts"),
        Flag("balance", ("aux", "bias", "none"), "aux", "loads by losses or a bias", "experts"),
        Flag("moe_every", SIZE, 1, "every so many layers has experts", "experts"),
        Flag("topk_nodes", SIZE, None, "a token uses, of those of ep (default: all)", "ep > 1"),
    ),
    "training": (
        Flag("batch_size", SIZE, None, "sequences of a step, all replicas' (default: 16 or more)"),
        Flag("steps", SIZE, 1200, "of the optimizer"),
        Flag("lr", FACTOR, 3e-3, "peak learning rate"),
        Flag("warmup", COUNT, 20, "steps of linear warm-up"),
        Flag("weight_decay", FACTOR, 0.1, "of matrices"),
        Flag("grad_clip", FACTOR, 1.0, "largest norm of the gradient; 0 does not clip"),
        Flag("seed", at_least(0, below=2**32), 0, "of weights, batches and dropout"),
        Flag("dtype", ("fp32", "tf32", "bf16"), "fp32", "bf16: the optimizer has a copy in fp32"),
        Flag("skip_nonfinite", COUNT, 0, "so many steps in a row that are not finite end it"),
    ),
    "run": (
        Flag("device", ("auto", "cpu", "cuda", "shared"), "auto", "shared: a GPU of several ranks"),
        Flag("data", str, None, "text, tokens (.bin), or a folder (default: Python's sources)"),
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
RULES = (  # each is an error if true, or not 0; a rule may build on those before it
    "pp * dp * cp * tp != world_size",
    "dp * cp % replicate",
    "dp * cp * tp % ep",
    "ep > 1 where not experts",
    "experts % ep",
    "hidden % heads",
    "heads % kv_heads",
    "kv_heads % tp",
    "ffn % tp where not experts or moe_every > 1",  # experts are not split
    "seq_len % (2 * cp) where cp > 1",
    "seq_len // cp % tp where sp or experts",
    "dropout > 0 where cp > 1",
    "heads // tp % cp where cp_method == 'ulysses'",
    "kv_heads // tp % cp where cp_method == 'ulysses' and cp % (kv_heads // tp)",
    "top_k > experts where experts",
    "topk_nodes > ep_nodes",
    "top_k > experts // ep_nodes * topk_nodes where experts",
    "moe_every > layers where experts",
    "tp > vocab_size",
    "batch_size % (dp * microbatches)",
)


class Parser(argparse.ArgumentParser):
    """Of the command line: what is wrong is a ValueError."""

    def __init__(self):
        super().__init__("hybrid.py", allow_abbrev=False, description=__doc__.splitlines()[0])
        for title, flags in GROUPS.items():
            group = self.add_argument_group(title)
            for name, kind, default, help, needs in flags:
                help += f" (needs {needs})" if needs else ""
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


def parse(argv, world_size, per_node=None):
    """The flags, completed and checked, of world_size processes, per_node or all on each node.

    Adds `given`, {name: value} of those on the command line; ep_nodes, over which the ranks of ep
    lie. Raises ValueError, one line that names flags and values, as the next two do.
    """
    given = vars(Parser().parse_args(argv))
    args = argparse.Namespace(**{flag.name: flag.default for flag in FLAGS} | given, given=given)
    args.world_size, args.per_node = world_size, per_node or world_size
    args.dp = args.dp or max(1, world_size // (args.pp * args.cp * args.tp))
    replicas = args.dp * args.cp
    if args.zero is None:
        args.zero = int(replicas > 1)
    if args.dtype == "bf16" and not args.zero:
        # shards of one rank: the masters are ZeRO's
        args.zero, args.replicate = 1, given.get("replicate", replicas)
    args.kv_heads = args.kv_heads or args.heads
    args.ffn = args.ffn or 4 * args.hidden
    # so many ranks of an ep_group a node can have: of tp what is in ep, of dp x cp what fits beside
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
    values = vars(args)
    is_so = lambda condition: eval(condition or "True", {}, values)
    for name, *_, needs in FLAGS:
        if name in args.given and not is_so(needs):
            raise ValueError(f"{as_typed(name, values[name])} needs {needs}")
    shown = {flag.name: as_typed(flag.name, values[flag.name]) for flag in FLAGS}
    shown |= {"world_size": f"{args.world_size} processes", "ep_nodes": f"{args.ep_nodes} nodes"}
    for rule in RULES:
        wrong, _, where = rule.partition(" where ")
        if is_so(wrong) and is_so(where):
            wrong = wrong.replace("%", "is not divisible by").replace("!=", "is not")
            wrong = wrong.replace(">", "is more than")
            rule = f"{wrong}, where {where}" if where else wrong
            raise ValueError(re.sub(r"\w+", lambda word: shown.get(word[0], word[0]), rule))


def schedule_of(args):
    """The pipeline's schedule. Raises ValueError where it is not defined for these flags."""
    sizes = args.pp, args.microbatches, args.chunks
    schedule = SCHEDULES[args.schedule](*sizes[: 3 if args.schedule == "interleaved" else 2])
    stages = len(schedule.routes[0])
    if args.layers + 2 < stages:  # the first and the last may have none
        raise ValueError(f"--layers {args.layers} is too few for {stages} stages")
    return schedule


# ---- one process ---------------------------------------------------------------------------------


def choose_device(args, local_rank=0, per_node=1):
    """This process's device, and the backend. ValueError for what needs a GPU without one."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.device == "cpu" or (args.device == "auto" and gpus < per_node):
        if args.dtype == "tf32":
            raise ValueError("--dtype tf32 needs a GPU")
        return torch.device("cpu"), "gloo"
    if not gpus:
        raise ValueError(f"--device {args.device}: there is no GPU on this machine")
    device = torch.device("cuda", local_rank % gpus)  # with "cuda" each may see its own alone
    torch.cuda.set_device(device)
    return device, "gloo" if args.device == "shared" else "nccl"


def join(device, backend, timeout):
    """Meet the other processes, as torchrun says; without it this one is alone."""
    store, rank, world_size = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://"))
    # torchrun's store still has the keys of the attempt before
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    if backend == "gloo":
        schedule_as_batch()
    device = device if backend == "nccl" else None  # if it is known, errors come early
    options = {"timeout": timedelta(seconds=timeout), "device_id": device}
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)
    report_stalls(30)


def main(argv=None, work=train):
    """Run work(args, device) on one rank, which torchrun numbers, or in a world of one.

    Returns the exit status: 2 for wrong flags, which are the same on all ranks, and what work()
    returns, or the TrainingError that it raises on all ranks has. Rank 0 says what was wrong.
    """
    argv, variables = sys.argv[1:] if argv is None else argv, os.environ
    rank, world_size = int(variables.get("RANK", 0)), int(variables.get("WORLD_SIZE", 1))
    local_rank = int(variables.get("LOCAL_RANK", 0))
    per_node = int(variables.get("LOCAL_WORLD_SIZE", world_size))

    def say(sentence):  # in one write, which another process's line cannot cut in two
        if rank == 0:
            print(f"{Path(sys.argv[0]).name}: {sentence}\n", end="", file=sys.stderr, flush=True)

    try:
        args = parse(argv, world_size, per_node)
        device, backend = choose_device(args, local_rank, per_node)
    except ValueError as error:
        say(f"error: {error}")
        if "RANK" in variables:  # nobody leaves, and has the launcher end all, before rank 0 spoke
            join(None, "gloo", 30)
            barrier()
        return 2
    join(device, backend, args.timeout)
    torch.set_float32_matmul_precision("high" if args.dtype == "tf32" else "highest")
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
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, without a traceback
    sys.exit(main())
