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

To be read: mesh, model, one step, loop. Each section after these is by itself: what people watch,
where a step went, faults, data, initial values, files, checkpoints; --verify, the proof; --plan,
the planner; --rehearse, a rank of any world in one process; the command line.

The model is GPT-2's architecture (Radford et al., 2019), under GPT-2's parameter names. Shoeybi et
al., "Megatron-LM", 2019, and Narayanan et al., "Efficient Large-Scale Language Model Training on
GPU Clusters Using Megatron-LM", 2021.

    python hybrid.py                                                      one process
    torchrun --nproc-per-node 4 hybrid.py                                 four replicas (dp = 4)
    torchrun --nproc-per-node 8 hybrid.py --tp 2 --pp 2 --microbatches 4  dp = 2
    torchrun --nproc-per-node 8 hybrid.py --cp 2 --ep 8 --experts 16      dp = 4
    python hybrid.py --plan --model llama3-405b --gpus 16384 --gpu h100   what layouts would cost
"""

import argparse
import hashlib
import heapq
import io
import json
import math
import os
import resource
import shutil
import signal
import sys
import sysconfig
import threading
import time
import weakref
import zipfile
from collections import Counter, defaultdict
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import lru_cache, partial
from itertools import accumulate, combinations, cycle, product, takewhile
from itertools import count as numbers
from pathlib import Path
from random import Random
from typing import NamedTuple
from unittest.mock import patch

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback out of the imports that follow

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata, MetadataIndex, TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from collectives import (
    DIRECT_BYTES, LONG_BYTES as HALVED_BYTES, MOST_PEERS, SEGMENT, ReduceOp, all_reduce,
    all_reduce_bytes, barrier, broadcast, count_bytes, exchange, gather_from_group, gather_objects,
    observe, rank_and_size, reduce_scatter_bytes, report_stalls, scatter_to_group,
    schedule_as_batch, set_backend_collectives, set_ranks_per_node,
)
from ddp import (
    DistributedDataParallel, clip_grads_with_norm_, find_unlike_copies, get_total_norm,
)
from expert_parallel import MoE, expert_activation_bytes, expert_parallel_bytes, tally_metrics
from pipeline import (
    SCHEDULES, Clock, Pipeline, WeightGradStore, bubble_of_step, bubble_time, cheapest_cuts,
    forward_only, least_microbatches, simulate, sum_replicas,
)
from sequence_parallel import (
    activation_bytes, allgather_attention, context_activation_bytes, context_parallel_bytes,
    context_positions, dropout, recompute, ring_attention, ulysses_attention,
)
from tensor_parallel import (
    ColumnParallelLinear, ParallelSelfAttention, RowParallelLinear, ShardedRandomState,
    VocabParallelEmbedding, attention, compute_bound_degree, is_sharded, mark_partial,
    parallel_linear, part_of, sum_partial_gradients, tensor_parallel_layer_bytes, unique_ranges,
    views_in_whole, vocab_parallel_cross_entropy, vocab_parallel_max,
)
from zero import (
    FlatParameter, FullyShardedDataParallel, compute_bound_tokens, largest_model, memory_ledger,
    zero_memory, zero_rounds,
)

CP_METHODS = {
    "allgather": allgather_attention,
    "ring": ring_attention,
    "ulysses": ulysses_attention,
}
IGNORE_INDEX = -100  # a target that does not count
SAMPLE_TEMPERATURE = 0.8

# ---- mesh ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mesh:
    """This process's groups. Its rank along an axis is its rank inside that axis's group.

    dp_cp_group joins the ranks whose gradients are summed, dp x cp; ep_group neighbours in dp x cp
    x tp that have different experts; expert_dp_group and expert_tp_group those of dp x cp, and of
    tp, that have the same; embedding_group the first and the last stage, which both hold the token
    embedding (None on the stages between). ZeRO's shards are spread over shard_group, a run of
    dp_cp_group, and copied over replicate_group; experts' over runs of expert_dp_group. node_group
    has the ranks of ep_group on this node, and cross_group those that have this one's place on
    theirs (None on one node).

    Groups of the same ranks are one, but gradients have communicators of their own: messages of a
    layer would wait for the gradients that are under way.
    """

    pp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup
    dp_cp_group: dist.ProcessGroup
    shard_group: dist.ProcessGroup
    replicate_group: dist.ProcessGroup
    ep_group: dist.ProcessGroup
    expert_dp_group: dist.ProcessGroup
    expert_tp_group: dist.ProcessGroup
    expert_shard_group: dist.ProcessGroup
    expert_replicate_group: dist.ProcessGroup
    embedding_group: dist.ProcessGroup | None = None
    node_group: dist.ProcessGroup | None = None
    cross_group: dist.ProcessGroup | None = None


def make_mesh(
    pp=1,
    dp=1,
    cp=1,
    tp=1,
    ep=1,
    ep_nodes=1,
    replicate=1,
    local_world_size=None,
    groups=None,
    timeout=None,
):
    """Make groups of the slices of the grid of the default group's ranks.

    local_world_size: so many consecutive ranks share a node; by default all do. groups: those of
    earlier meshes, to be used again; new ones are added. timeout: of their waits, a timedelta; by
    default PyTorch's. The others: see slices_of(). Collective: every rank calls it. Raises
    ValueError if the degrees do not multiply to the world size, ep does not divide dp x cp x tp,
    ep_nodes ep, or replicate dp x cp.
    """
    rank, world_size = rank_and_size()
    _check_degrees(pp, dp, cp, tp, ep, ep_nodes, replicate, world_size)
    slices = slices_of(pp, dp, cp, tp, ep, ep_nodes, replicate)
    groups, mine = {} if groups is None else groups, {}  # made by all ranks in the same order
    is_fake = dist.get_backend() == "fake"  # then no other rank waits for its groups
    for name, rows in slices.items():
        rows = rows[(rows == rank).any(1)] if is_fake else rows
        for ranks in map(tuple, rows.tolist()):
            key = ranks, len(ranks) > 1 and name in GRADIENT_GROUPS
            groups[key] = groups.get(key) or dist.new_group(ranks, timeout)
            if rank in ranks:
                mine[name] = groups[key]
    for group in dict.fromkeys(mine.values()):
        ranks = dist.get_process_group_ranks(group)
        set_ranks_per_node(ranks_per_node(ranks, local_world_size or world_size), group)
        barrier(group)  # NCCL wants all ranks of a group in its first batch
    return Mesh(**mine)


def mesh_of(args, local_world_size=None, groups=None):
    """The mesh of the command line; see make_mesh()."""
    degrees = args.pp, args.dp, args.cp, args.tp, args.ep, args.ep_nodes, args.replicate
    mesh = make_mesh(*degrees, local_world_size, groups, timedelta(seconds=args.timeout))
    if args.collectives == "backend":
        use_backend_collectives(mesh)
    return mesh


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
    slices = {
        "pp_group": grid.permute(1, 2, 3, 0).reshape(-1, pp),
        "dp_group": grid.permute(0, 2, 3, 1).reshape(-1, dp),
        "cp_group": grid.permute(0, 1, 3, 2).reshape(-1, cp),
        "tp_group": grid.reshape(-1, tp),
        "dp_cp_group": replicas,
        "shard_group": _runs(replicas, replicate),
        "replicate_group": _across(replicas, replicate),
        "ep_group": spread,
        "expert_dp_group": expert_replicas,
        "expert_tp_group": domain.mT.flatten(0, 3),
        "expert_shard_group": _runs(expert_replicas, expert_runs),
        "expert_replicate_group": _across(expert_replicas, expert_runs),
        "embedding_group": ends.permute(1, 2, 3, 0).reshape(-1, len(ends)),
    }
    if ep_nodes > 1:
        slices |= {"node_group": _runs(spread, ep_nodes), "cross_group": _across(spread, ep_nodes)}
    return slices


def _check_degrees(pp, dp, cp, tp, ep, ep_nodes, replicate, world_size):
    if pp * dp * cp * tp != world_size:
        raise ValueError(f"pp={pp} x dp={dp} x cp={cp} x tp={tp} is not world_size={world_size}")
    if dp * cp * tp % ep:
        raise ValueError(f"dp={dp} x cp={cp} x tp={tp} is not divisible by ep={ep}")
    if ep % ep_nodes:
        raise ValueError(f"ep={ep} is not divisible by ep_nodes={ep_nodes}")
    if dp * cp % replicate:
        raise ValueError(f"dp={dp} x cp={cp} is not divisible by replicate={replicate}")


GRADIENT_GROUPS = (
    *("dp_cp_group", "shard_group", "replicate_group"),
    *("expert_dp_group", "expert_shard_group", "expert_replicate_group"),
)


def _runs(rows, count):
    """Each row of ranks cut into so many runs of neighbours."""
    return rows.reshape(-1, rows.shape[1] // count)


def _across(rows, count):
    """The ranks that have the same place in those runs."""
    return rows.unflatten(1, (count, -1)).mT.flatten(0, 1)


def use_backend_collectives(mesh):
    """From now on the collectives of all groups are the backend's own."""
    for group in {dist.group.WORLD, *vars(mesh).values()} - {None}:
        set_backend_collectives(group)


def ranks_per_node(ranks, local_world_size):
    """How many consecutive ranks of a group share a node; 1 if its nodes have unlike numbers.

    ranks: global ones, ascending, of which each node has local_world_size.
    """
    counts = set(Counter(rank // local_world_size for rank in ranks).values())
    return counts.pop() if len(counts) == 1 else 1


def spans_nodes(tp, local_world_sizes):
    """Whether some ranks of tp do not share a node, which has local_world_sizes[rank] ranks."""
    nodes, ranks = [], range(0, len(local_world_sizes), tp)
    while len(nodes) < len(local_world_sizes):
        nodes += [len(nodes)] * local_world_sizes[len(nodes)]
    return any(nodes[rank] != nodes[rank + tp - 1] for rank in ranks)


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
    return GPTConfig(**{field.name: getattr(args, field.name, None) for field in fields(GPTConfig)})


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


def _replicated(module, config):
    """A module that every rank of tp has, with sequence parallelism for its part of the tokens."""
    return mark_partial(module) if config.sequence_parallel else module


def _residual_dropout(module, x):
    """Masks alike over tp, where x is; its own for each rank's part of the sequence."""
    config = module.config
    with module.random if config.sequence_parallel and config.dropout else nullcontext():
        return dropout(x, config.dropout, module.training)


class ParallelMoE(MoE):
    """Experts whose tokens are dealt out to the ranks of tp, (T, B, D) -> (T, B, D).

    With sequence parallelism they are already.
    """

    def __init__(self, config, mesh, num_microbatches):
        balance, z = (0.01, 0.001) if config.balance == "aux" else (0.0, 0.0)
        nodes = (mesh.node_group, mesh.cross_group) if mesh.cross_group else None
        super().__init__(
            config.hidden,
            config.mlp_width,
            config.experts,
            top_k=config.top_k,
            group=mesh.ep_group,
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
        self.tp_group, self.split = mesh.tp_group, not config.sequence_parallel
        mark_partial(self)

    def forward(self, x):
        if not self.split:
            return super().forward(x)
        own = scatter_to_group(x, 0, self.tp_group)
        return gather_from_group(super().forward(own), 0, self.tp_group)

    def _fault(self, logits):
        """None: what is not finite reaches the loss, and stops all ranks, not those of ep only."""


# ---- one step ------------------------------------------------------------------------------------


class Trainer:
    """One rank's part of the training.

    config: of the model. positions: this rank's of each sequence.
    route: the places (rank of the pipeline, chunk) of the model's stages. DualPipe has a second
        route, of a replica: then `replicated` is true.
    chunks: the stages that this rank has. dense, experts: their parameters.
    stages: the chunks in DistributedDataParallel, or with ZeRO in FullyShardedDataParallel.
    pipeline, evaluation: run the stages over a batch, with backward and without.
    """

    skipped = skipped_in_a_row = 0  # steps, which were not finite
    sigterm = stop = False  # it has come to this rank, and to some rank before a step's end

    def __init__(self, args, mesh, device):
        self.args, self.mesh, self.device, self.steps_done = args, mesh, device, 0
        self.config = replace(config_of(args), sequence_parallel=args.sp)
        schedule = make_schedule(args)
        self.route, self.replicated = schedule.routes[0], len(schedule.routes) > 1
        self.positions = torch.arange(args.seq_len)
        if args.cp > 1:
            self.positions = context_positions(args.seq_len, mesh.cp_group)
        put_off, routes = WeightGradStore(), schedule.routes
        self.chunks = make_chunks(args, self.config, mesh, device, routes, self.positions, put_off)
        named = [pair for chunk in self.chunks for pair in chunk.named_parameters()]
        self.dense = [parameter for name, parameter in named if not is_expert(name)]
        self.experts = [parameter for name, parameter in named if is_expert(name)]
        self.stages, self.optimizer = share_out(args, mesh, self.chunks, self.dense, self.experts)
        self.pipeline = Pipeline(
            *(self.stages, schedule, self.loss, mesh.pp_group),
            defer=put_off,
            sync_each=args.zero > 1,  # so that no rank has whole gradients
        )
        self.evaluation = self.forward_pipeline(args.microbatches, self.loss)

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
        tallies = sum_tallies(self)
        of_experts = {}
        if args.experts:
            of_experts = tally_metrics(tallies, args.microbatches, args.balance == "aux")
        # the one time that the host waits for the device
        numbers = torch.stack([*found, norm, told_to_stop(self), *of_experts.values()])
        loss, num_outside, norm, self.stop, *loads = numbers.tolist()
        refuse_outside(self, num_outside, inputs, targets)
        metrics = {"loss": loss, "grad_norm": norm, "lr": rate}
        if math.isfinite(loss + norm):
            self.update(rate, tallies)
            self.skipped_in_a_row = 0
        else:
            skip_step(self, metrics)
        self.steps_done += 1
        return metrics | {"skipped": self.skipped, **dict(zip(of_experts, loads))}

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

    def run(self, pipeline, inputs, targets):
        """Drive one pipeline step; returns the global loss, and how many tokens no vocabulary has.

        These count for nothing in the step. Both stay on the device.
        """
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
        """A microbatch's share of the loss per token of the whole batch, of `num_tokens` in all."""
        last = next(chunk for chunk in self.chunks if chunk.last)
        return last.token_losses(logits, targets).sum() / num_tokens

    def sum_shared_gradients(self):
        """Sum what the copies of a parameter got for their part of the work.

        Those are DualPipe's replicas, what tensor-parallel ranks use for a part of the sequence or
        of the heads, and the tied embedding and head.
        """
        first = self.steps_done == 0
        sum_partial_gradients(self.dense, self.mesh.tp_group, check=first)
        sum_partial_gradients(self.experts, self.mesh.expert_tp_group, check=first)
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
        mesh, dense, experts = self.mesh, [], []
        for name, parameter in named_parameters(self):
            (_, first), piece = part_of(parameter), parameter.grad.view(-1)
            if is_expert(name):
                experts.append(piece)
            elif name != "lm_head.weight":  # a copy of the embedding
                dense.extend(
                    piece[max(0, begin - first) : max(0, end - first)]
                    for begin, end in unique_ranges(parameter, mesh.tp_group)
                )
        shards, expert_shards = [], []  # the groups over which there are other pieces
        if self.args.zero:
            shards, expert_shards = [mesh.shard_group], [mesh.expert_shard_group]
        norms = [get_total_norm(dense, groups=[*shards, mesh.tp_group])]
        if experts:
            norms.append(get_total_norm(experts, groups=[*expert_shards, mesh.ep_group]))
        norm = get_total_norm(norms, groups=[mesh.pp_group])
        if self.args.grad_clip > 0:
            gradients = [parameter.grad for parameter in self.dense + self.experts]
            norm_or_0 = norm.nan_to_num()  # a nan would spread, and skip_step() tells where it was
            clip_grads_with_norm_(gradients, self.args.grad_clip, norm_or_0)
        return norm

    def local_rows(self):
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

    def forward_pipeline(self, num_microbatches, loss_fn):
        """A pipeline without backward, along the first route."""
        _, num_stages = rank_and_size(self.mesh.pp_group)
        schedule = forward_only(num_stages, num_microbatches, self.route)
        stages = self.stages[:1] if self.replicated else self.stages
        return Pipeline(stages, schedule, loss_fn, self.mesh.pp_group)


def learning_rate(step, steps, warmup, peak):
    """Linear warm-up over `warmup` steps, then a cosine down to peak / 10. step counts from 0."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def make_chunks(args, config, mesh, device, routes, positions, put_off):
    """The stages of the model that this rank has, by chunk, with their initial values.

    routes: those of the schedule; positions: this rank's; put_off: a WeightGradStore.
    """
    rank, method = dist.get_rank(mesh.pp_group), CP_METHODS[args.cp_method]
    across = lambda q, k, v, dropout: method(q, k, v, mesh.cp_group)
    make = partial(
        GPT,
        config,
        mesh.tp_group,
        num_stages=len(routes[0]),
        random=ShardedRandomState(device, mesh.tp_group),
        defer=put_off,
        positions=positions.to(device),
        attention_fn=across if args.cp > 1 else attention,
        moe=partial(ParallelMoE, config, mesh, args.microbatches),
    )
    places = [(c, s) for route in routes for s, (r, c) in enumerate(route) if r == rank]
    value = initial_values(args)
    chunks = []
    for _, stage in sorted(places):
        with torch.device("meta"):
            chunk = make(stage=stage)
        for module in chunk.modules():  # each once, though the head is the embedding
            module.to_empty(device=device, recurse=False)
        initialize(chunk, value, mesh.ep_group)
        chunks.append(chunk)
    return chunks


def seed_dropout(seed, step, mesh):
    """Seed a step's masks of dropout: alike over tp where activations are, different elsewhere.

    They depend on seed, step and layout alone, so a run that is resumed draws the same. On the CPU
    a generator has 32 bits of seed: hashed, those of two --seed do not overlap.
    """
    digest = hashlib.sha256(f"{seed} dropout {step}".encode()).digest()
    stage, num_stages = rank_and_size(mesh.pp_group)
    number = dist.get_rank(mesh.dp_cp_group) * num_stages + stage
    torch.manual_seed(int.from_bytes(digest[:4], "big") + number)


def share_out(args, mesh, chunks, dense, experts):
    """The chunks as replicas that sum gradients, or as shards (ZeRO), and the optimizer of them.

    A step sends 2 (P-1)/P of the gradients' bytes, with ZeRO-1 half of them, parameters, in the
    next forward. ZeRO-2 and -3 keep no whole gradients: each microbatch sends (P-1)/P, and with
    ZeRO-3, which keeps no whole parameters either, two times more.
    """
    if not args.zero:
        optimizer = make_optimizer(args, dense + experts)
        replicate = partial(
            DistributedDataParallel,
            process_group=mesh.dp_cp_group,
            broadcast_buffers=False,
            gradient_divide_factor=1,  # the loss has its global divisor already
            rebuild_buckets=False,  # after a restart sums have the same order
            wait_in_backward=False,
            groups=dict.fromkeys(experts, mesh.expert_dp_group),
        )
        return [replicate(chunk) for chunk in chunks], optimizer
    bf16 = args.dtype == "bf16"
    shard = partial(
        FullyShardedDataParallel,
        process_group=mesh.shard_group,
        replicate_group=_if_several(mesh.replicate_group),
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=torch.float32 if bf16 else None,
        gradient_divide_factor=1,
        keep_unsharded=args.zero < 3,
        wait_in_backward=False,
        groups=dict.fromkeys(
            experts, (mesh.expert_shard_group, _if_several(mesh.expert_replicate_group))
        ),
    )
    stages = [shard(chunk, units=chunk.transformer["h"].values()) for chunk in chunks]
    return stages, make_optimizer(args, dense + experts)  # of pieces, which they now are


def _if_several(group):
    return group if dist.get_world_size(group) > 1 else None


def make_optimizer(args, parameters):
    """AdamW, with decay of matrices. Whole parameters become bf16 if asked for, pieces do not."""
    is_matrix = lambda parameter: len(part_of(parameter)[0]) > 1
    groups = [
        {"params": list(filter(is_matrix, parameters)), "weight_decay": args.weight_decay},
        {"params": [p for p in parameters if not is_matrix(p)], "weight_decay": 0.0},
    ]
    options = {"lr": args.lr, "betas": (0.9, 0.95), "fused": True}
    if args.zero or args.dtype == "fp32":
        return torch.optim.AdamW(groups, **options)
    for parameter in parameters:
        parameter.grad_dtype = torch.float32
    return MasterAdamW(groups, **options)


class MasterAdamW(torch.optim.AdamW):
    """AdamW of masters in fp32, which are rounded into the parameters: bf16 from here on."""

    def __init__(self, groups, **options):
        self.masters = {weight: weight.detach() for group in groups for weight in group["params"]}
        groups = [g | {"params": [self.masters[w] for w in g["params"]]} for g in groups]
        super().__init__(groups, **options)
        for weight in self.masters:
            weight.data = weight.to(torch.bfloat16)

    @torch.no_grad()
    def round(self):
        """Make the parameters what the masters are."""
        torch._foreach_copy_(list(self.masters), list(self.masters.values()))

    @torch.no_grad()
    def step(self):
        for weight, master in self.masters.items():
            master.grad = weight.grad  # the same memory, which zero_grad() zeroes
        super().step()
        self.round()


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


# ---- loop ----------------------------------------------------------------------------------------


def train(args, mesh, device, data, metrics_file=None, trace_file=None):
    """Steps from the first, or the last checkpoint's, on; then validation and a sample.

    Rank 0 may have files for metrics, in lines of JSON, and for a trace of the last step. Raises
    TrainingError, on all ranks, for what Trainer refuses, and if --export fails.
    """
    before = peak_memory_mb(device)
    trainer = Trainer(args, mesh, device)
    with Checkpoints(trainer) if args.checkpoint else nullcontext() as checkpoints:
        with Log(trainer, metrics_file, before) as log:
            run_steps(trainer, data, log, checkpoints, trace_file)
    if args.export:
        export(trainer, args.export)
    log.validation(*evaluate(trainer, data))
    if args.sample:
        middle = len(data.validation) // 2
        prompt = data.validation[middle : middle + args.seq_len // 2].tolist()
        continue_prompt(trainer, prompt, data.is_text)


def generate(args, mesh, device):
    """Continue the prompt of --generate, without training."""
    trainer = Trainer(args, mesh, device)
    with Checkpoints(trainer) if args.checkpoint else nullcontext():
        pass  # it has loaded the last one
    continue_prompt(trainer, prompt_tokens(args), args.vocab_size == 256)


def continue_prompt(trainer, prompt, is_text):
    """Rank 0 prints the prompt and what the model makes of it. Collective."""
    args = trainer.args
    tokens = sample(trainer, prompt, args.sample, SAMPLE_TEMPERATURE, args.seed)
    if dist.get_rank() == 0:
        prompt, tokens = show(prompt, is_text), show(tokens, is_text)
        print(f"---- prompt\n{prompt}\n---- continuation\n{tokens}", flush=True)


def run_steps(trainer, data, log, checkpoints=None, trace_file=None):
    """The loop: batches, steps, and what is due after a step."""
    args = trainer.args
    for step in range(trainer.steps_done, args.steps):
        is_last = step + 1 == args.steps
        with traced(trainer, log, trace_file) if args.trace and is_last else nullcontext():
            began = time.perf_counter()
            rows = trainer.local_rows()
            batch = data.batch(step, args.batch_size, args.seq_len, args.seed, rows)
            metrics = {"step": step + 1, **trainer.step(*batch)}
            if args.check_replicas and trainer.steps_done % args.check_replicas == 0:
                check_replicas(trainer)
            seconds = time.perf_counter() - began
        log.step(metrics | {"tokens_per_s": args.batch_size * args.seq_len / seconds})
        if args.eval_every and trainer.steps_done % args.eval_every == 0 and not is_last:
            log.validation(*evaluate(trainer, data))
        if checkpoints:
            checkpoints.after_step()


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
        rows = trainer.local_rows()
        found = trainer.run(trainer.evaluation, inputs[rows], targets[rows])
        loss, num_outside = torch.stack(found).tolist()
        refuse_outside(trainer, num_outside, inputs, targets)
        total += loss * counted
        count += counted
    if not math.isfinite(total):
        raise TrainingError(f"validation loss {total} is not finite")
    return total / count, count


@torch.no_grad()
def sample(trainer, prompt, length, temperature=1.0, seed=0):
    """Continue token ids `prompt` by `length` tokens drawn from the model; the same on every rank.

    The largest of logit + temperature x Gumbel noise is a draw from the softmax of the logits /
    temperature, so each rank of tp proposes its best token and no logits are gathered. Collective:
    replicas, too, since experts may be spread over them. Raises TrainingError if the prompt has a
    token outside the vocabulary.
    """
    T, V = trainer.config.seq_len, trainer.config.vocab_size
    if (largest := max(prompt, default=0)) >= V:
        raise TrainingError(f"the prompt's token {largest} is outside --vocab-size {V}")
    for chunk in trainer.chunks:
        chunk.eval()
    pipeline = trainer.forward_pipeline(1, lambda logits, _: logits)
    generator, tokens = torch.Generator().manual_seed(seed), list(prompt)
    for _ in range(length):
        window = tokens[-T:]
        # causal: the rest is unseen
        (inputs,) = trainer.own_tokens(torch.tensor([window + [0] * (T - len(window))]))
        logits = pipeline.step(inputs, inputs)
        noise = -temperature * torch.empty(V).exponential_(generator=generator).log()
        tokens.append(_best_token(trainer, logits, len(window) - 1, noise.to(trainer.device)))
    return tokens[len(prompt) :]


def _best_token(trainer, logits, position, noise):
    """The token with the largest logit + noise (V,) at a position, on all ranks of the replica.

    logits: (T, 1, V/tp) of this rank's positions, on the last stage; None on the others.
    """
    mesh, (last_rank, last_chunk) = trainer.mesh, trainer.route[-1]
    best = torch.zeros(2, dtype=torch.float64, device=trainer.device)  # value, token
    (place,) = (trainer.positions == position).nonzero(as_tuple=True)
    if logits is not None and len(place):  # of the cp ranks one has the position
        start, logits = trainer.chunks[last_chunk].lm_head.start, logits[place.item(), 0].double()
        noisy = logits + noise[start : start + len(logits)]
        best = vocab_parallel_max(noisy, start, mesh.tp_group)
    all_reduce(best, group=mesh.cp_group)
    broadcast(best, dist.get_global_rank(mesh.pp_group, last_rank), mesh.pp_group)
    return int(best[1])


# ---- what people watch ---------------------------------------------------------------------------

PEAKS = {  # part of a GPU's name: TFLOP/s of dense products in bf16, TensorFloat-32, fp32
    "A100": (312, 156, 19.5),
    "H100 80GB HBM3": (989, 494, 67),
    "H200": (989, 494, 67),
}


class Log:
    """What rank 0 says of a training: lines, and the metrics. To be made by all ranks.

    On a terminal one line is rewritten with every step; elsewhere some are printed, the first and
    the last among them.

    metrics_file: opens with the flags. before: MB that were in use before the trainer was made.
    """

    def __init__(self, trainer, metrics_file=None, before=0.0):
        args = trainer.args
        self.trainer, self.file, self.before = trainer, metrics_file, before
        self.speaks, self.is_terminal = dist.get_rank() == 0, sys.stdout.isatty()
        self.every, self.pending = args.print_every or max(1, round(args.steps / 40)), ""
        self.first, self.began = trainer.steps_done + 1, time.perf_counter()
        self.parameters = count_parameters(trainer)
        self.flops = flops_per_token(trainer.config)
        self.peak = peak_tflops(args, trainer.device)

    def __enter__(self):
        trainer, args = self.trainer, self.trainer.args
        header = {"flags": {name: getattr(args, name) for name, *_ in FLAGS}}
        header |= {"step": trainer.steps_done, "world_size": args.world_size}
        header |= {"parameters": self.parameters, "flops_per_token": self.flops}
        self.write(header | {"torch": torch.__version__, "python": sys.version.split()[0]})
        tokens = args.batch_size * args.seq_len
        self.say(
            f"{self.parameters:,} parameters on {args.world_size} x {trainer.device.type}: "
            f"pp {args.pp} x dp {args.dp} x cp {args.cp} x tp {args.tp}; a step: {tokens:,} "
            f"tokens, {self.flops * tokens:.3g} FLOPs of the model"
        )
        return self

    def __exit__(self, *_):
        self.flush()

    def step(self, metrics):
        metrics["memory_mb"] = peak_memory_mb(self.trainer.device) - self.before
        # JSON knows no number that is not finite
        self.write({name: v if math.isfinite(v) else None for name, v in metrics.items()})
        self.pending, step = self.describe(**metrics), metrics["step"]
        if step in (self.first, self.trainer.args.steps):
            self.flush()
        elif self.is_terminal:
            self.say(self.pending[: shutil.get_terminal_size().columns - 1], end="")
        elif step % self.every == 0:
            self.flush()

    def describe(self, step, loss, grad_norm, lr, tokens_per_s, memory_mb, **_):
        """What matters most first: a terminal may cut the rest."""
        trainer, steps = self.trainer, self.trainer.args.steps
        left = (time.perf_counter() - self.began) / (step - self.first + 1) * (steps - step)
        own = tokens_per_s / trainer.args.world_size
        tflops = own * self.flops / 1e12
        mfu = f", MFU {tflops / self.peak:.1%}" if self.peak else ""
        return (
            f"step {step} of {steps}  loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s, each "
            f"{own:,.0f}, {tflops:.3g} TFLOP/s{mfu}, {memory_mb:,.0f} MB  "
            f"{timedelta(seconds=round(left))} left  grad norm {grad_norm:.3f}  lr {lr:.2e}"
            + (f"  skipped, {trainer.skipped} so far" if trainer.skipped_in_a_row else "")
        )

    def validation(self, loss, tokens):
        step, perplexity = self.trainer.steps_done, math.exp(min(loss, 700))
        numbers = {"validation_loss": loss, "perplexity": perplexity, "validation_tokens": tokens}
        self.write({"step": step} | numbers)
        self.say(
            f"validation loss {loss:.4f}, perplexity {perplexity:.2f}, of {tokens:,} tokens "
            f"after step {step}"
        )

    def flush(self):
        """Print the last step's line, unless it is printed."""
        if self.pending:
            self.say(self.pending)
            self.pending = ""

    def say(self, line, end="\n"):
        if self.speaks:
            erase = "\r\033[K" if self.is_terminal else ""
            print(erase + line, end=end, flush=True)

    def write(self, value):
        if self.speaks:
            self.file = _write(self.file, value)


def count_parameters(trainer):
    """How many numbers the model learns, each once. Collective."""
    ranges = [own_ranges(trainer.mesh, *named) for named in named_parameters(trainer)]
    return sum(gather_objects(sum(end - begin for own in ranges for begin, end in own)))


def flops_per_token(config):
    """The model's, forward and backward: what is recomputed does not count."""
    config = replace(config, recompute="none")
    layers = sum(layer_flops(config, layer) for layer in range(config.layers))
    return layers + 3 * 2 * config.hidden * config.vocab_size


def peak_tflops(args, device):
    """Of a GPU that the process has to itself, if it is known; else None."""
    if device.type == "cpu" or dist.get_backend() != "nccl":
        return None
    name, kind = torch.cuda.get_device_name(device), 0 if args.dtype == "bf16" else 2 - args.tf32
    return next((peaks[kind] for part, peaks in PEAKS.items() if part in name), None)


def peak_memory_mb(device):
    """Most memory this process ever held: on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def keep_metrics(path, step):
    """Cut a file of metrics, if there is one, where a run that goes on from `step` would repeat."""

    def is_kept(line):
        with suppress(ValueError, KeyError, TypeError):  # a killed run may have left half a line
            return json.loads(line)["step"] <= step

    if os.path.isfile(path):
        with open(path, "rb+") as file:
            file.truncate(sum(map(len, takewhile(is_kept, file))))


def _write(file, value):
    """Write a line of JSON; returns the file, or None once that failed, which ends no training."""
    try:
        if file:
            print(json.dumps(value, allow_nan=False), file=file, flush=True)
        return file
    except OSError as error:
        _complain(f"error: {file.name}: {error.strerror}")
        with suppress(OSError):
            file.close()


def _complain(sentence):
    # in one write, which another process's line cannot cut in two
    print(f"hybrid.py: {sentence}\n", end="", file=sys.stderr, flush=True)


# ---- where a step went ---------------------------------------------------------------------------

AXES = {  # whose groups are lanes of a trace
    "tp": ("tp_group", "expert_tp_group"),
    "cp": ("cp_group",),
    "ep": ("ep_group", "node_group", "cross_group"),
    "pp": ("pp_group", "embedding_group"),
    "dp": ("dp_group", *GRADIENT_GROUPS),
}
PART_OF = {"pp": "bubble"}  # of a step: to wait on pp is to wait for other stages


@contextmanager
def traced(trainer, log, file):
    """Have rank 0 write what all ranks do inside, and say where the time went. Collective."""
    barrier()  # they begin together
    trace = Trace(trainer)
    with observe(trace.listen):
        yield
        trace.ended = trace.clock.now()
    every = gather_objects(trace.read())
    if log.speaks:
        events, parts = [event for own, _ in every for event in own], [parts for _, parts in every]
        _write(file, {"traceEvents": events, "otherData": {"seconds": parts}})
        log.say(describe_parts(parts))


class Trace:
    """What this rank does in a step, as observe() and the pipeline's clock tell it.

    On a GPU moments are those of its streams, not the host's.
    """

    def __init__(self, trainer):
        self.pipeline, self.clock = trainer.pipeline, Clock(trainer.device)
        self.axes, self.told = axes_of(trainer.mesh), {}

    def listen(self, event, operation, sends=(), receives=()):
        if operation.group not in self.axes:  # of one rank, or no axis's
            return
        moments, sent = self.told.setdefault(operation, (defaultdict(list), []))
        sent += [tensor.nbytes for tensor, _ in sends]
        moments[event].append(self.clock.now())

    def read(self):
        """([event of Chrome's format], {part: seconds}) of the step. The host waits for the device.

        Compute is the pipeline's actions without what they wait for; the rest is data, the clipping
        norm and the optimizer.
        """
        since, actions = self.clock.since, self.pipeline.clock.spans
        lanes, parts = {"compute": []}, {"compute": 0.0}
        for axis in self.axes.values():
            lanes[axis], parts[PART_OF.get(axis, axis)] = [], 0.0
        spans = [tuple(map(since, span)) for span in actions.values()]
        for action, (begin, end) in zip(actions, spans):
            known = {"microbatch": action.microbatch, "chunk": action.chunk}
            lanes["compute"].append((begin, end, f"{action.kind}{action.microbatch}", known))
            parts["compute"] += end - begin
        for operation, (moments, sent) in self.told.items():
            axis, known = self.axes[operation.group], {"messages": len(sent), "bytes": sum(sent)}
            at = {event: list(map(since, found)) for event, found in moments.items()}
            end = at["end"][0]
            if operation.of is None:
                begin = at.get("post", at["begin"])[0] if operation.async_op else at["begin"][0]
                lanes[axis].append((begin, end, operation.name, known))
            for begin in at["begin"] if not operation.async_op else ():
                lanes["compute"].append((begin, end, f"wait for {axis}", {}))
                parts[PART_OF.get(axis, axis)] += end - begin
                if any(first <= begin < last for first, last in spans):
                    parts["compute"] -= end - begin
        return trace_events(lanes), parts | {"rest": since(self.ended) - sum(parts.values())}


def axes_of(mesh):
    """{group: the axes that it is of}, of those that have several ranks."""
    axes = {}
    for axis, names in AXES.items():
        for group in {getattr(mesh, name) for name in names} - {None}:
            if dist.get_world_size(group) > 1:
                axes[group] = f"{axes[group]}+{axis}" if group in axes else axis
    return axes


def trace_events(lanes):
    """Chrome's events of this rank's {lane: [(begin, end, name, what is known of it)]}."""
    rank, events = dist.get_rank(), []
    name = lambda kind, tid, name: {"name": kind, "ph": "M", "tid": tid, "args": {"name": name}}
    events.append(name("process_name", 0, f"rank {rank}"))
    for number, (lane, spans) in enumerate(lanes.items()):
        ends = []  # of rows: what overlaps has several; compute's spans are nested
        for begin, end, what, known in sorted(spans, key=lambda span: (span[0], -span[1])):
            row = next((i for i, last in enumerate(ends) if last <= begin), len(ends))
            row = 0 if lane == "compute" else row
            if row == len(ends):
                events.append(name("thread_name", 100 * number + row, lane))
            ends[row : row + 1] = [end]
            event = {"name": what, "cat": lane, "ph": "X", "tid": 100 * number + row, "args": known}
            events.append(event | {"ts": begin * 1e6, "dur": (end - begin) * 1e6})
    return [event | {"pid": rank} for event in events]


def describe_parts(every):
    """The ranks' parts of a step in a line: their means, which add up to the step's."""
    means = {part: 1e3 * sum(own[part] for own in every) / len(every) for part in every[0]}
    parts = ", ".join(f"{part} {mean:.2f}" for part, mean in means.items())
    return f"the last step took {sum(means.values()):.2f} ms: {parts} (means of {len(every)} ranks)"


# ---- faults --------------------------------------------------------------------------------------


class TrainingError(ValueError):
    """What ends the training, raised on all ranks alike."""

    kind, status = "error", 1


class Terminated(TrainingError):
    """What SIGTERM asked for; the exit status is what a shell gives one that it has killed."""

    kind, status = "terminated", 128 + signal.SIGTERM


def refuse_outside(trainer, number, inputs, targets):
    """Raise TrainingError if number, alike on all ranks, tells of tokens outside."""
    if number:
        largest = torch.maximum(inputs, targets).max().to(trainer.device)
        all_reduce(largest, ReduceOp.MAX, trainer.mesh.dp_cp_group)
        where = f"--data {trainer.args.data}: " if trainer.args.data else ""
        vocabulary = f"--vocab-size {trainer.config.vocab_size}"
        raise TrainingError(f"{where}token {largest} is outside {vocabulary}")


def skip_step(trainer, metrics):
    """Leave out a step that is not finite: nothing moves but the learning rate's schedule.

    Raises TrainingError, on all ranks, if it is one too many in a row.
    """
    trainer.skipped += 1
    trainer.skipped_in_a_row += 1
    for stage in trainer.stages if trainer.args.zero else ():
        stage.reshard()  # what was gathered may be what was wrong
    if trainer.skipped_in_a_row >= (most := trainer.args.skip_nonfinite):
        found = "loss {loss:.4f}, grad norm {grad_norm:.3f}, lr {lr:.2e}".format(**metrics)
        if most:
            found += f"; {most} in a row; gradients not finite: {_not_finite(trainer)}"
        raise TrainingError(f"step {trainer.steps_done + 1} is not finite: {found}")


def _not_finite(trainer):
    """The parameters whose gradients are not finite on some rank, in words. Collective."""
    named = [pair for chunk in trainer.chunks for pair in chunk.named_parameters()]
    own = [name for name, parameter in named if not parameter.grad.isfinite().all()]
    names = list(dict.fromkeys(sum(gather_objects(own), [])))
    more = [f"{len(names) - 8} more"] if len(names) > 8 else []
    return ", ".join(names[:8] + more) or "none"


def told_to_stop(trainer):
    """Whether SIGTERM has come to some rank, on the device; only where there are checkpoints."""
    told = torch.full((), float(trainer.sigterm), device=trainer.device)
    if trainer.args.checkpoint:
        all_reduce(told, ReduceOp.MAX)
    return told


def groups_of_copies(mesh, name, tensor):
    """The groups whose ranks have the same bits in the parameter, or buffer, of this name.

    Rows of keys and values that some ranks of tp have in common, where tp > kv_heads, are not
    compared.
    """
    groups = [replicas_of(mesh, name, tensor)]
    if is_expert(name):
        groups.append(mesh.expert_tp_group)
    elif not is_sharded(tensor):
        groups.append(mesh.tp_group)
    return [group for group in groups if dist.get_world_size(group) > 1]


def check_replicas(trainer):
    """Raise TrainingError, on all ranks, if copies have other bits: a machine has erred."""
    copies = [
        (name, tensor, groups_of_copies(trainer.mesh, name, tensor))
        for chunk in trainer.chunks
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]
    ]
    if found := find_unlike_copies(copies):
        raise TrainingError(f"step {trainer.steps_done}: {found}")


# ---- data ----------------------------------------------------------------------------------------


class Data(NamedTuple):
    """Tokens of a training and a validation part, and the batches cut from them."""

    train: np.ndarray
    validation: np.ndarray
    is_text: bool

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


def load_data(path, seq_len, dtype=None):
    """Read --data: None (the stdlib's sources), text, or tokens, which stay on the disk.

    Text is a file or a folder, and its tokens are its UTF-8 bytes; tokens are a .bin of `dtype`,
    uint16 unless given, or nanoGPT's folder of train.bin and val.bin. Another folder is split by
    file, every tenth being for validation; of a single file validation is the last tenth. Raises
    ValueError for a path that is missing or too short, a folder without text, and a .bin that is
    not of the dtype. Whether tokens are in the vocabulary is seen as they are used.
    """
    pattern, path = "*" if path else "*.py", Path(path or sysconfig.get_path("stdlib"))
    halves = [path / "train.bin", path / "val.bin"]
    in_halves = all(half.is_file() for half in halves)
    is_text = not in_halves and (path.suffix != ".bin" or path.is_dir())
    if is_text and dtype:
        raise ValueError(f"--data-dtype {dtype} needs --data with a .bin")
    if in_halves:
        parts = [_memory_map(half, dtype) for half in halves]
    elif path.is_dir():
        files = [file for file in sorted(path.rglob(pattern)) if _is_wanted(file, path)]
        texts = [text for text in (file.read_bytes() for file in files) if b"\0" not in text]
        if not texts:
            raise ValueError(f"--data {path}: none of its {len(files)} files is text")
        joined = (b"\n".join(t for i, t in enumerate(texts) if i % 10), b"\n".join(texts[::10]))
        parts = [np.frombuffer(part, np.uint8) for part in joined]
    elif path.is_file():
        tokens = _memory_map(path, "uint8" if is_text else dtype)
        parts = np.split(tokens, [len(tokens) - len(tokens) // 10])
    else:
        what = "neither a file nor a folder" if path.exists() else "no such file or folder"
        raise ValueError(f"--data {path}: {what}")
    for part, tokens in zip(("training", "validation"), parts):
        if len(tokens) <= seq_len:
            raise ValueError(
                f"--data {path}: its {part} part has {len(tokens)} tokens, "
                f"too few for --seq-len {seq_len}"
            )
    return Data(*parts, is_text)


def _memory_map(path, dtype):
    """A file's tokens; those of uint32 are not taken for twice as many of uint16."""
    itemsize, size = np.dtype(dtype or "uint16").itemsize, path.stat().st_size
    if size % itemsize:
        raise ValueError(f"--data {path}: {size} bytes are no tokens of {itemsize} bytes each")
    if size == 0:
        return np.zeros(0, np.uint8)
    tokens = np.memmap(path, dtype or "uint16", "r")
    if dtype is None and len(tokens) > 1 and not tokens[1:2000:2].any():
        raise ValueError(f"--data {path}: every other token is 0; is it of --data-dtype uint32?")
    return tokens


def show(tokens, is_text):
    """Tokens as text that is safe to print, or as numbers where they are not bytes of text."""
    if not is_text:
        return str(tokens)
    text = bytes(min(token, 255) for token in tokens).decode(errors="replace")  # 255 is no text
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def prompt_tokens(args):
    """The tokens of --generate: its bytes if there are 256, else the numbers in it.

    Raises ValueError for what is no list of tokens.
    """
    if args.vocab_size == 256:
        return list(os.fsencode(args.generate))
    numbers = args.generate.split(",")
    if not all(n.isdecimal() and int(n) < args.vocab_size for n in numbers):
        raise ValueError(
            f"--generate {args.generate}: not tokens of --vocab-size {args.vocab_size}, such as 5,0"
        )
    return list(map(int, numbers))


def _is_wanted(file, folder):
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    names = file.relative_to(folder).parts
    return file.is_file() and not skipped & set(names) and not any(n.startswith(".") for n in names)


# ---- initial values, and the whole state ---------------------------------------------------------


@torch.no_grad()
def initialize(model, value, ep_group=None):
    """Fill this rank's part of every parameter, and zero the buffers: the biases of routers.

    value(name, shape, first=0): rows `first` and on, of a c_proj columns, in this shape.
    """
    for name, parameter in model.named_parameters():
        dim, parts, _ = rows_held(name, parameter, ep_group, model.tp_group)
        name = name.replace("lm_head", "transformer.wte")  # to which it is tied
        for (first, _), part in zip(parts, parameter.split([rows for _, rows in parts], dim)):
            part.copy_(value(name, part.shape, first=first))
    for buffer in model.buffers():
        buffer.zero_()


def initial_values(args):
    """What initialize() takes values from: --init-from, or random numbers."""
    if args.init_from:
        return partial(loaded_value, load_weights(args))
    if dist.get_backend() == "fake":
        return lambda name, shape, first=0: torch.empty(shape)
    return partial(initial_value, layers=args.layers, seed=args.seed)


def rows_held(name, parameter, ep_group, tp_group):
    """This rank's part of a parameter: (dim, [(first row in the whole, rows)], rows of the whole).

    Where dim is 1 the rows are columns.
    """
    rows = part_of(parameter)[0][0]
    if is_expert(name):
        rank, ep = rank_and_size(ep_group)
        return 0, [(rank * rows, rows)], ep * rows
    if is_sharded(parameter):
        shard = parameter.shard
        parts = shard.rows_of(*rank_and_size(tp_group))
        return shard.dim, parts, sum(rows for rows, _ in shard.blocks)
    return 0, [(0, rows)], rows


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


def replicas_of(mesh, name, tensor):
    """The ranks of dp x cp that have the same in it as this one: with ZeRO as --replicate says."""
    is_piece = hasattr(tensor, "whole_shape")
    if is_expert(name):
        return mesh.expert_replicate_group if is_piece else mesh.expert_dp_group
    return mesh.replicate_group if is_piece else mesh.dp_cp_group


def own_ranges(mesh, name, parameter):
    """Ranges of this rank's flattened part: those of all ranks are the whole model, each once.

    Replicas share out what they have copies of.
    """
    is_copy = name == "lm_head.weight"  # of the embedding
    if is_copy or (is_expert(name) and dist.get_rank(mesh.expert_tp_group) > 0):
        return []
    rank, count = rank_and_size(replicas_of(mesh, name, parameter))
    first, size = part_of(parameter)[1], parameter.numel()
    begin, end = first + rank * size // count, first + (rank + 1) * size // count
    ranges = [(begin, end)] if is_expert(name) else unique_ranges(parameter, mesh.tp_group)
    ranges = [(max(begin, low), min(end, high)) for low, high in ranges]
    return [(low, high) for low, high in ranges if low < high]


def named_parameters(trainer):
    """(Name, parameter) of this rank's stages, without DualPipe's replica."""
    chunks = trainer.chunks[:1] if trainer.replicated else trainer.chunks
    return [pair for chunk in chunks for pair in chunk.named_parameters()]


def gather_state(trainer, value=lambda parameter: parameter):
    """{GPT-2's name: full tensor} on global rank 0, None elsewhere. Collective.

    value picks what is gathered of a parameter: itself, or `lambda p: p.grad`.
    """
    mesh, wholes, own = trainer.mesh, {}, {}  # shapes, and this rank's views
    for name, parameter in named_parameters(trainer):
        if ranges := own_ranges(mesh, name, parameter):
            rows = rows_held(name, parameter, mesh.ep_group, mesh.tp_group)
            wholes[name], views = views_in_whole(parameter, value(parameter), ranges, *rows)
            own |= {(name, place): view for place, view in views.items()}
    every = gather_objects((wholes, {key: view.shape for key, view in own.items()}))
    if dist.get_rank() > 0:
        return exchange([(view.contiguous(), 0) for view in own.values()], [])
    empty = partial(torch.empty, dtype=next(iter(own.values())).dtype, device=trainer.device)
    state = {name: empty(whole) for theirs, _ in every for name, whole in theirs.items()}
    for peer, (_, sizes) in enumerate(every):
        parts = {key: empty(size) for key, size in sizes.items()} if peer > 0 else own
        exchange([], [(part, peer) for part in parts.values() if peer > 0])
        for (name, place), part in parts.items():
            box = tuple(slice(first, first + size) for first, size in zip(place, part.shape))
            state[name][box] = part
    return state | {"lm_head.weight": state["transformer.wte.weight"]}


# ---- files of GPT-2 ------------------------------------------------------------------------------

TRANSPOSED = "c_attn.weight", "c_proj.weight", "c_fc.weight"  # in Hugging Face's Conv1D


def gpt2_shapes(args):
    """{GPT-2's name: shape}: the parameters of the whole model."""
    D, F = args.hidden, args.ffn
    vectors = lambda name: {f"{name}.weight": (D,), f"{name}.bias": (D,)}
    linear = lambda name, N, K: {f"{name}.weight": (N, K), f"{name}.bias": (N,)}
    layer = vectors("ln_1") | linear("attn.c_attn", 3 * D, D) | linear("attn.c_proj", D, D)
    layer |= vectors("ln_2") | linear("mlp.c_fc", F, D) | linear("mlp.c_proj", D, F)
    shapes = {"wte.weight": (args.vocab_size, D), "wpe.weight": (args.seq_len, D)}
    for i in range(args.layers):
        shapes |= {f"h.{i}.{name}": shape for name, shape in layer.items()}
    return {f"transformer.{name}": shape for name, shape in (shapes | vectors("ln_f")).items()}


def load_weights(args):
    """{GPT-2's name: tensor} of --init-from: nanoGPT's file, Hugging Face's, or one of --export.

    The file is mapped into memory: a rank reads only what it uses. Positions beyond --seq-len are
    left out; a model without biases gets zeros. Raises ValueError for a file of another kind, or a
    model of other sizes.
    """
    path, shapes, wpe = args.init_from, gpt2_shapes(args), "transformer.wpe.weight"
    try:
        mapped = zipfile.is_zipfile(path)  # the format before PyTorch 1.6 cannot be
        file = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        heads = file.get("model_args", {}).get("n_head", args.heads)
        found = gpt2_names(file.get("model", file))
        found[wpe] = found[wpe][: args.seq_len]
    except OSError as error:
        raise ValueError(f"--init-from {path}: {error.strerror}") from None
    except Exception:  # a pickle may raise anything
        raise ValueError(f"--init-from {path}: not a GPT-2 that torch.save wrote") from None
    if not any(name.endswith("bias") for name in found):
        found |= {n: torch.zeros(shape) for n, shape in shapes.items() if n.endswith("bias")}
    check_weights(path, found, shapes)
    if heads != args.heads:
        raise ValueError(f"--init-from {path}: its model has --heads {heads}, not {args.heads}")
    return found


def gpt2_names(state):
    """The tensors of a state dict, without masks, under nanoGPT's names and in its layout.

    c_attn, which is never square, tells whether the weights are Hugging Face's transposed ones.
    """
    bare = lambda name: name.removeprefix("_orig_mod.").removeprefix("transformer.")
    found = {bare(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}
    rows, columns = found["h.0.attn.c_attn.weight"].shape
    return {
        f"transformer.{name}": value.t() if columns > rows and name.endswith(TRANSPOSED) else value
        for name, value in found.items()
        if not name.endswith((".attn.bias", ".attn.masked_bias"))
    }


def check_weights(path, found, shapes):
    """Take the head from the weights found. Raises ValueError if it, or a shape, is another."""
    head = found.pop("transformer.lm_head.weight", None)
    sizes = {name: tuple(weight.shape) for name, weight in found.items()}
    for name in shapes | sizes:
        theirs, ours = (of.get(name, "not there") for of in (sizes, shapes))
        if theirs != ours:
            raise ValueError(f"--init-from {path}: {name} is {theirs}, in the model it is {ours}")
    embedding = found["transformer.wte.weight"]
    shared = head is None or head.data_ptr() == embedding.data_ptr()
    if not shared and not torch.equal(head, embedding):
        raise ValueError(f"--init-from {path}: its lm_head.weight is not its wte.weight")


def loaded_value(weights, name, shape, first=0):
    """What initial_value() is, from load_weights()."""
    dim = 1 if name.endswith("c_proj.weight") else 0
    return weights[name].narrow(dim, first, shape[dim])


def gpt2_file(state, config):
    """nanoGPT's checkpoint, and beside it, under Hugging Face's names, views of the same memory.

    state: what gather_state() returns.
    """
    state = {name: tensor.cpu() for name, tensor in state.items()}
    state["lm_head.weight"] = state["transformer.wte.weight"]  # a copy of one memory makes two
    sizes = {"n_layer": config.layers, "n_head": config.heads, "n_embd": config.hidden}
    sizes |= {"block_size": config.seq_len, "vocab_size": config.vocab_size, "bias": True}
    flat = {n: value.t() if n.endswith(TRANSPOSED) else value for n, value in state.items()}
    return flat | {"model": state, "model_args": sizes | {"dropout": config.dropout}}


def check_export(path):
    """ValueError where no file can be written."""
    folder = Path(path).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"--export {path}: cannot write into {folder}")
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"--export {path}: exists, and is no file")


class Stream(io.BufferedWriter):
    """A file of which not write() fails but flush(): torch.save() writes from C++.

    There an error ends the process, or becomes another one.
    """

    fault = None

    def write(self, data):
        try:
            return super().write(data)
        except OSError as error:
            self.fault = error
            return len(data)

    def flush(self):
        if self.fault:
            raise self.fault
        super().flush()


def export(trainer, path):
    """Rank 0 writes the whole model, all of it or nothing. Collective.

    Raises TrainingError, on all ranks, if it cannot.
    """
    state, fault, part = gather_state(trainer), "", f"{path}.part"
    if state:
        try:
            with Stream(io.FileIO(part, "wb")) as file:
                torch.save(gpt2_file(state, trainer.config), file)
            os.replace(part, path)
        except OSError as error:
            fault = f"{path}: {error.strerror}"
            with suppress(OSError):
                os.remove(part)
    if fault := max(gather_objects(fault)):
        raise TrainingError(fault)


# ---- checkpoints ---------------------------------------------------------------------------------

OF_THE_MODEL = (  # flags that a checkpoint and --resume must agree on
    "layers", "hidden", "ffn", "heads", "kv_heads", "seq_len", "vocab_size",
    "experts", "top_k", "shared_experts", "balance", "moe_every",
)  # fmt: skip
OF_NO_STEP = (  # flags that change nothing that is trained
    "checkpoint", "save_every", "resume", "metrics", "trace", "export", "generate", "sample",
    "timeout", "check_replicas", "eval_every", "print_every",
)  # fmt: skip
KINDS = "model", "exp_avg", "exp_avg_sq"  # of tensors, of which two are Adam's moments
SKIPPED = "skipped", "skipped_in_a_row"  # numbers that a Trainer goes on with
KEPT = 2  # checkpoints


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


def state_of(trainer, chunks, to_save):
    """{kind: {GPT-2's name: Boxes}}: views of what this rank has or, of that, has to save.

    Weights are the optimizer's, which are exact.
    """
    mesh, optimizer, state = trainer.mesh, trainer.optimizer, {kind: {} for kind in KINDS}
    masters = getattr(optimizer, "masters", {})
    named = lambda chunk: [*chunk.named_parameters(), *chunk.named_buffers()]
    for name, own in (pair for chunk in chunks for pair in named(chunk)):
        first, weight = part_of(own)[1], masters.get(own, own)
        ranges = own_ranges(mesh, name, own) if to_save else [(first, first + own.numel())]
        rows = rows_held(name, own, mesh.ep_group, mesh.tp_group)
        tensors = {"model": weight} | optimizer.state.get(weight, {})
        for kind in KINDS if ranges else ():
            if kind in tensors:
                boxes = views_in_whole(own, tensors[kind], ranges, *rows)
                tied = name.replace("lm_head", "transformer.wte")
                state[kind][tied] = Boxes(weight.dtype, *boxes)
    return state


class Checkpoints:
    """Keeps the checkpoints of a training, while `with` lasts; it begins with the last one.

    A save copies what this rank has to save into host memory, and a thread writes it while training
    goes on; the next save, and the end, wait for that. A checkpoint is complete once its folder is
    renamed. Where a save fails rank 0 says so, the checkpoints before are intact, and training goes
    on. SIGTERM ends the training after a save.
    """

    def __init__(self, trainer):
        self.trainer, self.folder = trainer, Path(trainer.args.checkpoint)
        self.group = dist.new_group(backend="gloo")  # the thread has it to itself
        self.thread, self.memory, self.saved = None, {}, None

    def __enter__(self):
        (paths, *_) = gather_objects(complete_checkpoints(self.folder))
        if paths:
            self.load(paths[-1])
        else:
            begin_at(self.trainer.optimizer, 0)  # a first step may be skipped, and saved
        told = lambda *_: setattr(self.trainer, "sigterm", True)
        self.handler = signal.signal(signal.SIGTERM, told)
        return self

    def __exit__(self, kind, *_):
        if kind is None or issubclass(kind, TrainingError):  # else a peer may be dead
            self.wait()
        signal.signal(signal.SIGTERM, self.handler)

    def after_step(self):
        """Save if it is time to. Raises Terminated, on all ranks, once one of them has SIGTERM."""
        trainer, step = self.trainer, self.trainer.steps_done
        is_over = trainer.stop or step == trainer.args.steps
        if is_over or step % (trainer.args.save_every or math.inf) == 0:
            self.save(step)
        if is_over:
            self.wait()
            if any(gather_objects(self.saved != step)):
                raise TrainingError(f"--checkpoint {self.folder} lacks the last step, {step}")
        if trainer.stop:
            raise Terminated(f"--checkpoint {self.folder} has step {step}")

    def save(self, step):
        self.wait()
        chunks = self.trainer.chunks[:1] if self.trainer.replicated else self.trainer.chunks
        state = state_of(self.trainer, chunks, to_save=True)
        for kind, tensors in state.items():
            for name, whole in tensors.items():
                for place, box in whole.boxes.items():
                    key = kind, name, place
                    if key not in self.memory:
                        self.memory[key] = torch.empty_like(box, device="cpu")
                    whole.boxes[place] = self.memory[key].copy_(box)
        run = vars(self.trainer.args) | {name: getattr(self.trainer, name) for name in SKIPPED}
        # a daemon: after the death of a peer it may never end
        self.thread = threading.Thread(target=self.write, args=(state, step, run), daemon=True)
        self.thread.start()

    def wait(self):
        if self.thread:
            self.thread.join()

    def write(self, state, step, run):
        path = self.folder / f"step_{step:08d}.partial"
        try:
            writer = dcp.FileSystemWriter(path, per_thread_copy_ahead=0)  # no work for a GPU
            writer.fs.create_stream = lambda path, mode: Stream(io.FileIO(path, mode))
            dcp.save(state, storage_writer=writer, process_group=self.group)
            if dist.get_rank() == 0:
                commit(path, run)
            self.saved = step
        except (Exception, dcp.api.CheckpointException) as error:
            if dist.get_rank() == 0:
                _complain(f"error: --checkpoint {path.with_suffix('')}: {_cause(error)}")
                shutil.rmtree(path, ignore_errors=True)

    def load(self, path):
        """Raises TrainingError, on all ranks, where one cannot read what it needs."""
        trainer, run = self.trainer, json.loads((path / "run.json").read_text())
        for name in SKIPPED:
            setattr(trainer, name, run[name])
        trainer.steps_done = int(path.name.removeprefix("step_"))
        begin_at(trainer.optimizer, trainer.steps_done - trainer.skipped)
        try:
            for chunk in trainer.chunks:  # in turns: two may have the embedding
                state = state_of(trainer, [chunk], to_save=False)
                dcp.load(state, checkpoint_id=path, process_group=self.group)
        except dcp.api.CheckpointException as error:
            raise TrainingError(f"--resume: {path}: {_cause(error)}") from None
        if isinstance(trainer.optimizer, MasterAdamW):
            trainer.optimizer.round()
        if dist.get_rank() == 0:
            print(f"resumed from {path}{changed_flags(run, trainer.args)}", flush=True)


def _cause(error):
    """What went wrong, in a line: of what DCP raises on all ranks, on the first that failed."""
    failures = getattr(error, "failures", {})
    text = next((f"rank {rank}: {cause}" for rank, (cause, _) in failures.items()), str(error))
    return text.strip().splitlines()[0]


def changed_flags(run, args):
    """The flags that differ from those of the run that saved, as text."""
    names = [name for name, *_ in FLAGS if name in run and name not in OF_NO_STEP]
    pairs = [(name, getattr(args, name), run[name]) for name in names]
    changed = [f"{_shown(name, own)} (was {was})" for name, own, was in pairs if own != was]
    return f"; changed: {', '.join(changed)}" if changed else ""


def begin_at(optimizer, step):
    """Give AdamW the state, yet to be filled, that it has after some steps."""
    for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
        number = torch.tensor(float(step), dtype=torch.float32, device=weight.device)
        moments = {kind: torch.zeros_like(weight) for kind in KINDS[1:]}
        optimizer.state[weight] = {"step": number} | moments


def commit(path, run):
    """Make what all ranks have written a checkpoint, at once; then remove old ones."""
    (path / "run.json").write_text(json.dumps(run, indent=4))
    _sync(path / "run.json")
    _sync(path)
    path.rename(path.with_suffix(""))
    _sync(path.parent)
    for old in complete_checkpoints(path.parent)[:-KEPT]:
        old.rename(old.with_suffix(".partial"))  # half of it is no checkpoint
        shutil.rmtree(old.with_suffix(".partial"), ignore_errors=True)


def _sync(path):
    """Have a file, or a folder's list of them, on the disk."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def complete_checkpoints(folder):
    """Those in a folder, the last step last."""
    return sorted(path for path in folder.glob("step_*") if path.name[5:].isdecimal())


def prepare_checkpoints(args):
    """Make the folder, without what killed saves left; returns the last checkpoint's path, or None.

    For one rank to call. Raises ValueError where it is there without --resume, or of another model,
    OSError for a folder that cannot be used.
    """
    folder = Path(args.checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    for partial in folder.glob("step_*.partial"):
        shutil.rmtree(partial)
    last = next(reversed(complete_checkpoints(folder)), None)
    if args.generate and not last:
        raise ValueError(f"--generate: {folder} has no checkpoint")
    if last and not args.resume:
        raise ValueError(f"{last} is there already: --resume, or another --checkpoint")
    theirs = json.loads((last / "run.json").read_text()) if last else {}
    for name in OF_THE_MODEL:
        own, value = getattr(args, name), theirs.get(name, getattr(args, name))
        if own != value:
            raise ValueError(f"{_shown(name, own)}, but {last} has {_shown(name, value)}")
    return last


# ---- costs ---------------------------------------------------------------------------------------
#
# What a rank holds, computes and sends in a step, from the modules' formulas. --plan makes seconds
# of it; --verify and --rehearse count, and show both. `layout` is the command line, or the
# planner's Layout, whose names are those of flags.


class Share(NamedTuple):
    """A rank's part of the model: layers, those of them with experts, embeddings and heads.

    tied: a head is its embedding, as in a single stage. borders: of its stages with other ranks'.
    """

    layers: float
    mixtures: float
    embeddings: int = 0
    heads: int = 0
    tied: bool = False
    borders: int = 0

    @property
    def portion(self):
        """Of the layers, those with experts."""
        return self.mixtures / max(1, self.layers)


def shares_of(routes, config, place):
    """The Shares of a rank of the pipeline, by chunk. routes: of its schedule."""
    shares = {}
    for route in routes:
        last, ranks = len(route) - 1, [rank for rank, _ in route]
        for stage in (stage for stage, rank in enumerate(ranks) if rank == place):
            layers = layers_of(stage, len(route), config)
            mixtures = sum(map(config.has_experts, layers))
            near = ranks[max(0, stage - 1) : stage] + ranks[stage + 1 : stage + 2]
            ends = int(stage == 0), int(stage == last), not last
            borders = sum(rank != place for rank in near)
            shares[route[stage][1]] = Share(len(layers), mixtures, *ends, borders)
    return [shares[chunk] for chunk in sorted(shares)]


def sum_of(shares):
    """One Share of all of a rank's stages."""
    return Share(*map(sum, zip(*shares)))


def own_kv_heads(config, layout):
    """Of a rank of tp: several share one if there are fewer."""
    return max(1, (config.kv_heads or config.heads) // layout.tp)


class Kind(NamedTuple):
    """Parameters of a rank that have the same replicas."""

    number: float
    replicas: int
    stride: int  # between ranks that are replicas
    partial: int = 1  # ranks of tp that use them for a part of the tokens, and sum their gradients

    def shards(self, layout):
        """Over how many replicas ZeRO shares their state out."""
        return self.replicas // math.gcd(layout.replicate, self.replicas)

    def gradients(self, layout):
        """How many of their gradients a rank has at the end of backward."""
        return self.number / self.shards(layout) if layout.zero else self.number


def kinds_of(config, layout, share):
    """The Kinds of a rank's share: what layers and ends have, routers and shared experts, experts.

    Experts are cut over gcd(ep, tp) of tp, and the rest of tp has the same ones.
    """
    h, tp, ep, width = config.hidden, layout.tp, layout.ep, config.mlp_width
    queries, keys = h // tp, h // config.heads * own_kv_heads(config, layout)
    attention = (queries + 2 * keys) * (h + 1) + queries * h + 5 * h  # with biases, and two norms
    mlp = (2 * h + 1) * width // tp + h
    dense = share.layers * attention + (share.layers - share.mixtures) * mlp
    vocabulary = config.vocab_size / tp * h
    dense += share.embeddings * (vocabulary + config.seq_len * h)
    dense += share.heads * (2 * h + (not share.tied) * vocabulary)  # the last norm, and the head
    routers = share.mixtures * (h * config.experts + 2 * h * width * config.shared_experts)
    experts = share.mixtures * 2 * h * width * config.experts / ep
    replicas, in_tp = layout.dp * layout.cp, math.gcd(ep, tp)
    return (
        Kind(dense, replicas, tp),
        Kind(routers, replicas, tp, tp),
        Kind(experts, replicas * in_tp // ep, ep * tp // in_tp, tp // in_tp),
    )


def count_of(config, layout, share):
    """How many parameters a rank's share has."""
    return sum(kind.number for kind in kinds_of(config, layout, share))


def itemsize_of(layout):
    """Bytes of an activation, and of a parameter at work."""
    return 2 if layout.dtype == "bf16" else torch.get_default_dtype().itemsize


def state_sizes(layout):
    """Bytes of a parameter, its gradient, and the optimizer's state; in bf16 that has the masters.

    ZeRO-3 makes bf16 of these as it gathers.
    """
    item = itemsize_of(layout)
    bf16 = item * (layout.zero < 3), 4, 12
    return bf16 if layout.dtype == "bf16" else (item, item, 2 * item)


def state_bytes(config, layout, share):
    """{kind: bytes} that a rank holds between steps, without the padding of rows."""
    held, sizes = dict.fromkeys(("parameters", "gradients", "optimizer"), 0), state_sizes(layout)
    zero = max(layout.zero, 2 * scatters_at_once(layout))
    for kind in kinds_of(config, layout, share):
        for i, what in enumerate(held):
            only = [size * (i == j) for j, size in enumerate(sizes)]
            held[what] += kind.number * zero_memory(zero, kind.shards(layout), *only)
    return held


def summed_row_bytes(config, layout, share):
    """Bytes of the sum of a row of gradients at most, beside ZeRO-1's whole ones, which go then."""
    if layout.zero != 1 or scatters_at_once(layout):
        return 0
    most = now = 0
    ends = share._replace(layers=0, mixtures=0)
    for unit in [Share(1, share.mixtures > 0)] * int(share.layers) + [ends]:
        for kind in kinds_of(config, layout, unit):
            summed = kind.number / kind.shards(layout)
            most, now = max(most, now + summed), now + summed - kind.number
    return most * state_sizes(layout)[1]


def scatters_at_once(layout):
    """Whether a gradient is scattered as it comes: in ZeRO-1 only the last microbatch's are."""
    return layout.zero > 1 or layout.zero == own_microbatches(layout) == 1


def step_flops(config, layout, share, batch):
    """Of a rank's products in a step, in microbatches of `batch` sequences.

    Of scores half, as a causal kernel computes, without those that it computes again in backward.
    """
    product, core = forward_flops(config, share.portion)
    # heads of keys and values that other ranks of tp compute, too
    twice = own_kv_heads(config, layout) * layout.tp - (config.kv_heads or config.heads)
    product += 4 * config.hidden**2 // config.heads * twice
    again = layout.recompute
    flops = share.layers * (3 + (again == "full")) * product
    flops += share.layers * (3 + (again != "none")) * core / 2
    flops += share.heads * 3 * 2 * config.hidden * config.vocab_size
    tokens = own_microbatches(layout) * batch * config.seq_len // (layout.cp * layout.tp)
    return flops * tokens


def own_microbatches(layout):
    """Those that a stage computes: of DualPipe's two replicas each has half."""
    return layout.microbatches // (1 + (layout.schedule == "dualpipe"))


def layer_bytes(config, layout, batch, experts):
    """{axis: (forward, backward)}: bytes that a rank sends for a layer and a microbatch.

    experts: the portion of layers that have them. These have one of the two sums over tp, and
    without --sp gather what experts made. ep: inside of nodes; across: between them.
    """
    h, tp, item, own = config.hidden, layout.tp, itemsize_of(layout), config.seq_len // layout.cp
    sums = 2 * all_reduce_bytes(batch * own * h * item, tp)
    both = tensor_parallel_layer_bytes(batch, own, h, tp, item, layout.sp)
    gathered = 0 if layout.sp else experts * sums / 4
    sizes = config.heads // tp, own_kv_heads(config, layout), h // config.heads, layout.cp
    around = layout.cp_method, batch, config.seq_len, *sizes, item, max(4, item)
    tokens, nodes = batch * own // tp, layout.ep_nodes
    copies = min(config.top_k, nodes, config.topk_nodes or nodes)
    near = experts * expert_parallel_bytes(tokens, config.top_k, h, layout.ep // nodes, item)
    far = experts * expert_parallel_bytes(tokens, copies, h, nodes, item)
    return {
        "tp": tuple((1 - experts / 2) * nbytes + gathered for nbytes in (sums, both - sums)),
        "cp": context_parallel_bytes(*around),
        "ep": (near, near),
        "across": (far, far),
    }


AGAIN = {"none": (), "selective": ("cp",), "full": ("tp", "cp", "ep", "across")}  # by --recompute


def sent_bytes(config, layout, share, batch):
    """{axis: bytes} that a rank sends in a step, in microbatches of `batch` sequences."""
    m = own_microbatches(layout)
    sent = of_layers(layer_bytes, config, layout, share, batch)
    nbytes = batch * config.seq_len // layout.cp * config.hidden * itemsize_of(layout)
    sums = share.embeddings + share.heads * (1.5 if layout.sp else 1)
    sent["tp"] += m * sums * all_reduce_bytes(nbytes, layout.tp)
    for kind in kinds_of(config, layout, share):
        summed = state_sizes(layout)[1] * kind.gradients(layout)
        sent["tp"] += all_reduce_bytes(summed, kind.partial)
    sent["pp"] = m * share.borders * nbytes // (layout.tp if layout.sp else 1)
    sent["pp"] += copied_gradient_bytes(config, layout, share)
    sent["dp"] = replica_bytes(config, layout, share)
    return sent


def of_layers(cost, config, layout, share, batch):
    """{axis: sum} over a rank's layers and microbatches. cost: layer_bytes, or layer_batches."""
    layer = cost(config, layout, batch, share.portion)
    runs = {axis: 1 + (axis in AGAIN[layout.recompute]) for axis in layer}
    times = own_microbatches(layout) * share.layers
    found = {axis: times * (runs[axis] * ahead + back) for axis, (ahead, back) in layer.items()}
    found["ep"] += found.pop("across")
    return found


def copied_gradient_bytes(config, layout, share):
    """What stages send each other of gradients: those of DualPipe's replicas and of the embedding.

    The first and the last stage have this, as the embedding and the head.
    """
    kinds, copied = kinds_of(config, layout, share), 0
    if layout.schedule == "dualpipe":
        copied += sum(kind.gradients(layout) for kind in kinds)
    if share.embeddings + share.heads == 1:
        table = kinds[0]._replace(number=config.vocab_size / layout.tp * config.hidden)
        copied += table.gradients(layout)
    return copied * state_sizes(layout)[1]


def replica_bytes(config, layout, share):
    """What replicas send each other in a step: sums of gradients, and parameters."""
    gradient, parameter = state_sizes(layout)[1], itemsize_of(layout)
    sums, gathers = zero_rounds(layout.zero, own_microbatches(layout))
    row, sent = sums * gradient + gathers * (parameter if layout.zero else gradient), 0
    for kind in kinds_of(config, layout, share):
        shards = kind.shards(layout)
        sent += reduce_scatter_bytes(row * kind.number, shards)
        sent += sums * all_reduce_bytes(gradient * kind.number / shards, kind.replicas // shards)
    return sent


# ---- costs: links ------------------------------------------------------------------------------


class Cost(NamedTuple):
    """What one rank does: steps one after the other, bytes sent, bytes added while none travel, and
    those of the bytes sent that go at the pace of links between nodes."""

    steps: int
    bytes: int
    added: int = 0
    between: int = 0

    def seconds(self, link, between=None):
        """The alpha-beta model: steps * alpha + bytes * beta, and additions at gamma per byte.

        link, between: LinkSpeed of the links inside nodes, and between them where they are others.
        """
        sending = (self.bytes - self.between) * link.beta + self.between * (between or link).beta
        return self.steps * link.alpha + sending + self.added * link.gamma


class LinkSpeed(NamedTuple):
    """Seconds per step, per byte sent, and per byte added; measure_link() measures them."""

    alpha: float
    beta: float
    gamma: float


# Measured with 2 to 8 ranks on 2 cores (gloo); a batch's time on the host and, from data sheets, a
# GPU's NVLink of 250 GB/s or more and its 400 Gbit/s network card (nccl); between machines of CPUs
# a network of 1 Gbit/s. They are constants: an algorithm chosen by the mood of a machine would
# change the bits of a training.
LINK_SPEEDS = {
    "gloo": LinkSpeed(1.2e-4, 6.5e-10, 1.1e-10),
    "gloo between nodes": LinkSpeed(1.2e-4, 8e-9, 1.1e-10),
    "nccl": LinkSpeed(6e-5, 4e-12, 1e-12),
    "nccl between nodes": LinkSpeed(6e-5, 2e-11, 1e-12),
}


def reduce_scatter_cost(algorithm, nbytes, world_size, ranks_per_node=1):
    """Cost of a reduce-scatter of a full tensor of `nbytes`, ranks_per_node to a node.

    algorithm: halving, direct, ring or hierarchical. Exact where P divides nbytes.
    """
    D, P = nbytes, world_size
    if algorithm == "hierarchical":
        return _hierarchical_cost(reduce_scatter_cost, D, P, ranks_per_node)
    steps = {"halving": (P - 1).bit_length(), "direct": min(P - 1, 1), "ring": P - 1}[algorithm]
    sent = added = (P - 1) * D // P
    if algorithm == "ring" and P > 1:
        added = min(SEGMENT, D // P)  # all but the last segment, while the next one arrives
    return _paced(Cost(steps, sent, added), P, ranks_per_node)


def _hierarchical_cost(cost, nbytes, world_size, ranks_per_node):
    nodes = world_size // ranks_per_node
    inside = cost("direct", nbytes, ranks_per_node, ranks_per_node)
    inside = inside._replace(steps=inside.steps * math.ceil(nodes / max(1, MOST_PEERS // ranks_per_node)))
    between = cost("ring", nbytes // ranks_per_node, nodes)
    return Cost(*(sum(pair) for pair in zip(inside, between)))


def _paced(cost, world_size, ranks_per_node):
    """With several nodes every step has messages between them, whose pace the others keep."""
    return cost._replace(between=cost.bytes if ranks_per_node < world_size else 0)


def all_reduce_cost(algorithm, nbytes, world_size, ranks_per_node=1, rank=0):
    """Cost of an all-reduce of `nbytes`, ranks_per_node to a node; rank 0 is the busiest.

    Exact where 128 P divides nbytes (128 x 2^k, where 2^k of the P ranks halve and double); else a
    chunk is at most 128 bytes longer, or shorter, than its share.
    """
    D, P, core = nbytes, world_size, 1 << (world_size.bit_length() - 1)
    if algorithm == "hierarchical":
        return _hierarchical_cost(all_reduce_cost, D, P, ranks_per_node)
    if algorithm == "naive":
        cost = Cost(min(P - 1, 1), (P - 1) * D, (P - 1) * D)
    elif algorithm == "recursive_doubling":
        steps = core.bit_length() - 1
        cost = Cost(steps, steps * D, steps * D)
    else:
        halving = algorithm == "halving_doubling"
        phase = reduce_scatter_cost(*("halving", D, core) if halving else (algorithm, D, P))
        cost = Cost(2 * phase.steps, 2 * phase.bytes, phase.added)
    if algorithm in ("recursive_doubling", "halving_doubling"):
        if rank >= core:
            cost = Cost(2, D)
        elif rank + core < P:
            cost = Cost(cost.steps + 2, cost.bytes + D, cost.added + D)
    return _paced(cost, P, ranks_per_node)


def direct_scratch_bytes(nbytes, world_size):
    """Bytes that a rank receives into, to reduce `nbytes` directly, as NCCL does inside a node."""
    return min(nbytes, DIRECT_BYTES) * (world_size - 1) / world_size


@lru_cache(maxsize=4096)
def _cheapest(backend, cost, nbytes, world_size, ranks_per_node, speeds):
    """What "auto" takes."""
    names = candidates(backend, cost, world_size, ranks_per_node)
    if backend == "gloo" and nbytes >= HALVED_BYTES:
        names = [name for name in names if "halving" not in name]
    size = nbytes, world_size, ranks_per_node
    return min(names, key=lambda name: cost(name, *size).seconds(*speeds))


def candidates(backend, cost, world_size, ranks_per_node):
    """The algorithms that "auto" compares. An all-gather goes as its reverse, the reduce-scatter.

    On gloo, where ranks share cores, every message costs and every byte, also another rank's.
    """
    if backend == "nccl" and ranks_per_node == world_size:
        return ["direct"]  # inside a node P-1 messages at once are quickest
    if cost is all_reduce_cost:
        names = ["ring", "halving_doubling", "recursive_doubling"]
    elif world_size & (world_size - 1) == 0:  # log2(P) messages are quicker than P-1
        names = ["halving", "ring"]
    else:
        names = ["ring"] if backend == "nccl" else ["direct", "ring"]
    return names + ["hierarchical"] * (1 < ranks_per_node < world_size)


def nccl_batches(cost, nbytes, world_size, ranks_per_node):
    """In how many batches, one after the other, NCCL gets what "auto" does with `nbytes`.

    cost: reduce_scatter_cost, also for an all-gather, or all_reduce_cost.
    """
    speeds = LINK_SPEEDS["nccl"], LINK_SPEEDS["nccl between nodes"]
    name = _cheapest("nccl", cost, nbytes, world_size, ranks_per_node, speeds)
    slices = math.ceil(nbytes / DIRECT_BYTES) if name in ("direct", "hierarchical") else 1
    return slices * cost(name, nbytes, world_size, ranks_per_node).steps


# ---- costs: batches ------------------------------------------------------------------------------
#
# What NCCL gets at once is a batch, and costs the host some 60 us. The counts are of the busiest
# rank of a group: of a sum of few bytes others have no part.


GPUS_PER_NODE = 8


def rounds(nbytes, size, stride=1, cost=reduce_scatter_cost):
    """Batches of one collective, if it has any bytes, of `size` ranks, `stride` apart."""
    per_node = on_one_node(size, stride, GPUS_PER_NODE)
    return nccl_batches(cost, int(nbytes), size, per_node) if nbytes else 0


def on_one_node(size, stride, gpus):
    """How many ranks of such a group share a node of `gpus`, if it begins where a node does."""
    return size if size * stride <= gpus else math.gcd(size, max(1, gpus // stride))


def layer_batches(config, layout, batch, experts):
    """{axis: (forward, backward)}: batches for a layer and a microbatch; see layer_bytes().

    tp all-reduces behind attention and MLP, and in backward before them. With --sp it gathers
    before and scatters behind, and in backward gathers what both take again; experts spare an
    MLP's. Rows go to experts after their numbers; between nodes with their weights and experts.
    """
    tp, cp, near, nodes = layout.tp, layout.cp, layout.ep // layout.ep_nodes, layout.ep_nodes
    whole = batch * config.seq_len // cp * config.hidden * itemsize_of(layout)
    once, both = rounds(whole, tp), rounds(whole, tp, cost=all_reduce_cost)
    dense, mixture = (2 * both, 2 * both), (both + once, both + once)
    if layout.sp:
        dense, mixture = (4 * once, 6 * once), (2 * once, 3 * once)
    sent = layer_bytes(config, layout, batch, experts)["cp"]
    gathers = [rounds(nbytes * cp / max(1, cp - 1), cp, tp) for nbytes in sent]
    around = {"ring": (cp - 1, 2 * cp - 2), "allgather": gathers, "ulysses": (2, 2)}
    hops = [experts * math.ceil((size - 1) / MOST_PEERS) for size in (near, nodes)]
    return {
        "tp": tuple((1 - experts) * a + experts * b for a, b in zip(dense, mixture)),
        "cp": tuple(around[layout.cp_method]) if cp > 1 else (0, 0),
        "ep": (3 * hops[0], 2 * hops[0]),
        "across": (5 * hops[1], 3 * hops[1]),
    }


def sent_batches(config, layout, share, batch):
    """{axis: batches} of a step; none of dp with --zero 0, which sends as many as buckets."""
    m, tp, tokens = own_microbatches(layout), layout.tp, batch * config.seq_len // layout.cp
    sent = of_layers(layer_batches, config, layout, share, batch)
    whole = tokens * config.hidden * itemsize_of(layout)
    once, both = rounds(whole, tp), rounds(whole, tp, cost=all_reduce_cost)
    embedding, head = (2 * once, 3 * once) if layout.sp else (both, both)
    loss = 2 * rounds(4 * tokens, tp, cost=all_reduce_cost)  # the logits' maxima, and sums
    sent["tp"] += m * (share.embeddings * embedding + share.heads * (head + loss))
    sent["pp"] = m * share.borders * 2
    for axis, number in step_batches(config, layout, share):
        sent[axis] = sent.get(axis, 0) + number
    if layout.balance == "aux":  # its losses are those of all tokens
        groups = ("dp", layout.dp, tp * layout.cp), ("cp", layout.cp, tp), ("tp", tp, 1)
        for axis, *group in groups:
            sums = rounds(8 * config.experts, *group, all_reduce_cost)
            sent[axis] += m * share.mixtures * sums
    return sent if layout.zero else sent | {"dp": 0}


def step_batches(config, layout, share):
    """(axis, batches) of what a step sends once, or ZeRO with each backward or forward."""
    reduced, gradient = partial(rounds, cost=all_reduce_cost), state_sizes(layout)[1]
    dense, routers, experts = kinds_of(config, layout, share)
    tp, replicas, mixtures = layout.tp, layout.dp * layout.cp, share.mixtures > 0
    # what ranks of tp have a part of, and stages a copy
    if mixtures or layout.sp or (config.kv_heads or tp) < tp:
        positions = share.embeddings * layout.sp * config.seq_len * config.hidden
        parts = dense._replace(number=positions + routers.number)
        yield "tp", reduced(gradient * parts.gradients(layout) + 8, tp)
    yield "tp", reduced(gradient * experts.gradients(layout), experts.partial)
    yield "pp", layout.schedule == "dualpipe"
    if share.embeddings + share.heads == 1:
        table = dense._replace(number=config.vocab_size / tp * config.hidden)
        yield "pp", reduced(gradient * table.gradients(layout), 2, tp * replicas)
    # scalars: the gradients' norm, the loss, numbers of tokens, and what experts have counted
    yield "tp", reduced(8, tp) * (1 + mixtures)
    yield "ep", reduced(8, layout.ep) * mixtures
    yield "pp", reduced(8, layout.pp, tp * replicas) * (2 + mixtures)
    yield "dp", reduced(8, replicas, tp) * (2 + mixtures)
    if layout.zero:
        for kind in dense, experts:
            yield "dp", reduced(8 * (kind.number > 0), kind.shards(layout), kind.stride)
        yield "dp", row_batches(config, layout, share)


def row_batches(config, layout, share):
    """Of ZeRO's rows. A layer, or an end, has one of matrices and one of vectors.

    Routers and experts have others; what tp sums (True), and has the same replicas, is in one.
    """
    gradient, parameter, sent = state_sizes(layout)[1], itemsize_of(layout), 0
    sums, gathers = zero_rounds(layout.zero, own_microbatches(layout))
    units = {Share(1, 0): share.layers - share.mixtures, Share(1, 1): share.mixtures}
    units |= {Share(0, 0, 1): share.embeddings, Share(0, 0, 0, 1): share.heads - share.tied}
    for unit, times in units.items():
        dense, *others = kinds_of(config, layout, unit)
        rows = Counter({(dense.replicas, dense.stride, "matrices"): dense.number})
        # two norms, and the biases behind the sums over tp
        rows[dense.replicas, dense.stride, layout.sp] += 6 * config.hidden
        for kind in others:
            rows[kind.replicas, kind.stride, True] += kind.number
        for (size, stride, _), number in rows.items():
            shards = Kind(number, size, stride).shards(layout)
            across = size // shards, stride * shards, all_reduce_cost
            scattered = rounds(gradient * number, shards, stride)
            scattered += rounds(gradient * number / shards, *across)
            gathered = rounds(parameter * number, shards, stride)
            sent += times * (sums * scattered + gathers * gathered)
    return sent


# ---- costs: activations --------------------------------------------------------------------------
#
# What lies in memory beside the state, when there is most: of microbatches under way what layers
# keep until backward, and what one layer makes while it computes.


class Sizes(NamedTuple):
    """Bytes of what a layer works on, with a microbatch on one rank."""

    whole: float  # the residual stream of the rank's positions
    own: float  # the part of it that the rank keeps: 1 / tp with --sp
    part: float  # 1 / tp of it: the queries of the rank's heads; what it deals out to experts
    kv: float  # the keys and values of its heads
    inner: float  # what GELU takes, or makes
    scratch: float  # of a sum over tp
    gathered: float  # with --sp, what a product takes; else 0
    summed: float  # what a sum over tp takes and, with --sp, leaves
    weight: float  # a matrix of the MLP
    routed: float  # such a matrix of all of the rank's experts
    cast: float  # more bytes, of each byte, if there is a copy in 32 bit: 2, in fp32 0
    added: float  # so of a weight's gradient: 0 with ZeRO, whose rows take it as it is


def sizes_of(config, layout, batch):
    """The Sizes of a microbatch of `batch` sequences."""
    tp, h, width, item = layout.tp, config.hidden, config.mlp_width, itemsize_of(layout)
    whole, split = batch * config.seq_len / layout.cp * h * item, layout.sp and tp > 1
    own, cast = whole / tp if split else whole, 4 / item * (item < 4)
    return Sizes(
        whole=whole,
        own=own,
        part=whole / tp,
        kv=whole * 2 * own_kv_heads(config, layout) / config.heads,
        inner=whole / tp * width / h,
        scratch=direct_scratch_bytes(whole, tp),
        gathered=whole * split,
        summed=whole + own * split,
        weight=item * h * width / tp,
        routed=item * h * width * config.experts / layout.ep,
        cast=cast,
        added=cast * (not layout.zero),
    )


def kept_bytes(config, layout, batch, experts, recompute=None):
    """Bytes that a rank keeps of a layer until backward, if a portion `experts` has experts.

    Of attention is kept what its fused kernel needs, which is as if its core ran again.
    """
    norm = sizes_of(config, layout, batch).own  # of which experts take copies
    recompute = recompute or layout.recompute
    if recompute == "full":
        return norm
    h, tp, width, item = config.hidden, layout.tp, config.mlp_width, itemsize_of(layout)
    own, kv_heads = config.seq_len / layout.cp, tp * own_kv_heads(config, layout)
    sizes = batch, own, h, config.heads, tp, layout.sp, "selective", kv_heads
    kept = activation_bytes(*sizes, (1 - experts) * width, config.dropout > 0, item)
    if recompute == "none":
        heads = config.heads // tp, own_kv_heads(config, layout), h // config.heads
        around = layout.cp_method, batch, config.seq_len, *heads, layout.cp, item
        kept += context_activation_bytes(*around)
    rows = batch * own / tp, config.top_k, h, width, item, config.shared_experts
    return kept + experts * (expert_activation_bytes(*rows) - norm)


def made_bytes(config, layout, batch, experts):
    """Bytes that exist beside what is kept at most, while a layer computes: forward, backward.

    Each entry is a moment: what is made by then, less what was kept and is free again. Products of
    backward make a gradient of their input and one of their weight, in 16 bit first and then, added
    up, in 32; sums over tp need scratch, and sequence parallelism gathers. ZeRO-2 and -3 begin a
    row of gradients with the layer's first one.
    """
    of, row = sizes_of(config, layout, batch), 0
    if scatters_at_once(layout):
        row = 4 * count_of(config, layout, Share(1, experts))
    forward, backward = [0], [0]
    if experts < 1:
        forward += [of.summed + of.scratch, of.whole + of.own]  # the MLP's sum, the residual
        backward += [
            of.gathered + of.inner + of.weight,  # the second matrix: both gradients
            of.weight * (1 + of.added),  # then its own alone, in 32 bit, too
            of.inner + row,  # GELU's, after which its output is free
            of.gathered + of.summed + of.scratch - of.inner + row,  # the first one's input
            of.summed + of.weight - of.inner + row,  # and its own
            of.weight * (1 + of.added) - 2 * of.inner + row,  # its input is free as well
        ]
    if experts:  # forward puts rows where their tokens are; backward makes the gradients of rows
        hops = min(config.top_k, layout.ep_nodes, config.topk_nodes or layout.ep_nodes)
        rows, inner = config.top_k * of.part, config.top_k * of.inner
        forward.append(hops * (rows + of.part))
        back = rows + of.part, inner + of.routed, inner - rows + of.routed * (1 + of.added)
        backward.append(max(back) + row)
    if layout.cp > 1 and layout.cp_method == "allgather":
        backward.append(_made_of_allgather(config, layout, batch, experts, of) + row)
    if layout.recompute == "full":  # all of the layer is there as well, but what is kept
        return 0, max(backward) + kept_bytes(config, layout, batch, experts, "none") - of.own
    return max(forward), max(backward)


def _made_of_allgather(config, layout, batch, experts, of):
    """In backward: sums in 32 bit for others' keys and values, and as they leave."""
    kept = kept_bytes(config, layout, batch, experts, "selective") - 2 * of.own
    kv = of.kv * layout.cp  # of all
    sums = (2 * kv + of.part) * 4 / itemsize_of(layout)
    again = (kv + 2 * of.part) * (layout.recompute == "selective")
    return sums + again + of.own + of.part - kept


def put_off_bytes(config, layout, batch, experts):
    """Bytes that a layer keeps from the first half of a backward, I, to the second one, W.

    The inputs of products, and the gradients of what they make; experts put nothing off.
    """
    of = sizes_of(config, layout, batch)
    attention = of.own + of.whole + 2 * of.part + of.kv
    shared = (2 * of.part + 2 * config.shared_experts * of.inner) * (config.shared_experts > 0)
    return attention + (1 - experts) * (of.own + of.whole + 2 * of.inner) + experts * shared


def head_bytes(config, layout, batch):
    """Bytes of the head and the loss: kept of a microbatch, made beside that forward, backward.

    Kept are the norm's input and output, and the logits, which become their gradient.
    """
    of, part = sizes_of(config, layout, batch), config.vocab_size / layout.tp
    logits, weight = of.whole / config.hidden * part, config.hidden * part * itemsize_of(layout)
    backward = max(
        of.gathered + of.summed + of.scratch,
        of.summed + weight,
        of.own + weight * (1 + of.added) - logits,
    )
    return 2 * of.own + logits, logits * of.cast, backward


class StageBytes(NamedTuple):
    """Of a stage with a microbatch."""

    kept: float  # from forward until backward
    put_off: float  # from I until W
    ahead: float  # made in forward, beside what is kept
    back: float  # in backward, or in I
    late: float  # in W
    embedding: float  # by the embedding, at backward's end
    row: float  # of the embedding's gradient


def stage_bytes(config, layout, batch, share, scores=0):
    """The StageBytes of a stage; see peak_bytes()."""
    sizes = config, layout, batch, share.portion
    of, (ahead, back) = sizes_of(config, layout, batch), made_bytes(*sizes)
    kept = share.layers * (kept_bytes(*sizes) + scores)
    put_off = share.layers * put_off_bytes(*sizes)
    ahead, back = ahead * (share.layers > 0), back * (share.layers > 0)
    late = of.gathered + of.weight * (1 + of.cast) * (share.mixtures < share.layers)
    numbers = config.hidden * config.vocab_size / layout.tp
    weight = numbers * itemsize_of(layout)
    if share.heads:
        kept_head, loss, product = head_bytes(config, layout, batch)
        kept, put_off = kept + kept_head, put_off + kept_head - of.own
        back = max(back - kept_head + of.own, product) + 4 * numbers * scatters_at_once(layout)
        ahead = max(ahead - kept_head, loss)
        late = max(late, of.gathered + weight * (1 + of.cast))
    embedding = share.embeddings * (weight * (1 + of.cast) + of.own)
    return StageBytes(kept, put_off, ahead, back, late, embedding, 4 * numbers * share.embeddings)


def peak_bytes(config, layout, batch, actions, shares, gradients=0, scores=0):
    """Bytes of activations, and of activations and gradients, each when a rank holds most of them.

    actions: the rank's, of a schedule. shares: of its stages. gradients: bytes that exist after the
    first backward. scores: what a layer keeps where attention is not fused. A message is there
    before it is needed; where nothing is sent meanwhile, all that come are.
    """
    costs = [stage_bytes(config, layout, batch, share, scores) for share in shares]
    message = sizes_of(config, layout, batch).own * (layout.pp > 1)
    summed, held, peaks = 0 if layout.zero else gradients, 0, []  # (all, gradients) of each moment
    for i, (kind, _, number) in enumerate(actions):
        cost, share = costs[number], shares[number]
        if kind == "F":
            held += cost.kept
            peaks.append((summed + held + cost.ahead + message, summed))
        elif kind == "W":
            peaks.append((summed + held + cost.late + message, summed))
            held -= cost.put_off
        else:
            # the first stage sends nothing after a backward: all gradients that come may lie there
            waiting = [*takewhile(lambda action: action.kind in "BI", actions[i:])]
            received = message * (1 if share.heads else max(2, share.embeddings * len(waiting)))
            peaks.append((summed + held + cost.back + received, summed))
            held += cost.put_off * (kind == "I") - cost.kept
            most, summed = max(summed, gradients - cost.row), gradients
            peaks.append((most + held + cost.embedding + received, most))
    for kind in kinds_of(config, layout, sum_of(shares)):  # at last what tp sums
        copies = (kind.partial > 1) * 4 * kind.gradients(layout)
        peaks.append((summed + copies + direct_scratch_bytes(copies, kind.partial), summed))
    lasting = _units_bytes(config, layout, shares)
    return lasting + max(total - of for total, of in peaks), lasting + max(peaks)[0]


def _units_bytes(config, layout, shares):
    """Bytes of what ZeRO-2 and -3 have at all times: the sum of the last row, which is waited for
    in the next pass, and of stage 3 the parameters of two layers and of none."""
    layers, ends = min(2, max(share.layers for share in shares)), sum_of(shares)
    outside = count_of(config, layout, ends._replace(layers=0, mixtures=0))
    units = count_of(config, layout, Share(layers, layers * ends.portion))
    shards = Kind(outside, layout.dp * layout.cp, layout.tp).shards(layout)
    sums = 4 * outside / shards * scatters_at_once(layout)
    return len(shares) * sums + itemsize_of(layout) * (units + outside) * (layout.zero > 2)


# ---- proof ---------------------------------------------------------------------------------------

BOUNDS = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 5e-2}  # of a difference / the norm of what it is of
CHOICES = {  # of layouts, beside pp, dp, cp and tp
    "zero": [f"--zero {stage}" for stage in (0, 1, 2, 3)],
    "replicate": ["", "--replicate 2"],
    "sp": ["", "--sp"],
    "cp_method": [f"--cp-method {name}" for name in CP_METHODS],
    "schedule": [f"--schedule {name}" for name in SCHEDULES],
    "recompute": ["", "--recompute selective", "--recompute full"],
    "kv_heads": ["", "--kv-heads 2"],
    "balance": ["", "aux --top-k 1", "none --moe-every 2", "bias --shared-experts 1"],
    "ep": ["--ep 1", "--ep 2", "--ep 4", "--ep 4 --ep-nodes 2", "--ep 8"],
}


def proof_flags(world_size):
    """Sizes of --verify, where no other flag says others: all ranks may split heads and tokens."""
    heads = world_size * math.ceil(8 / world_size)
    sizes = {"layers": max(4, world_size), "hidden": 8 * heads, "heads": heads, "ffn": 16 * heads}
    sizes |= {"seq_len": 2 * heads, "vocab_size": 8 * heads + 3, "steps": 2, "warmup": 1}
    sizes |= {"grad_clip": 0.1, "weight_decay": 0.2, "timeout": 60}
    return " ".join(_shown(*size) for size in sizes.items()).split()


def layouts(flags, world_size, rounds=66):
    """Valid layouts as lists of flags; nearly any two that go together are together in one.

    flags: further ones. Each round draws some, and takes the one with most pairs that are new.
    """
    random, seen, found = Random(0), set(), []
    for _ in range(rounds):
        drawn = [_draw_layout(random, world_size) for _ in range(30)]
        fresh = {layout: set(combinations(layout, 2)) - seen for layout in drawn}
        for layout in sorted(filter(fresh.get, fresh), key=lambda layout: -len(fresh[layout])):
            words = " ".join(layout).split()
            with suppress(ValueError):
                parse_args([*words, *flags], world_size)
                found.append(words)
                seen |= fresh[layout]
                break
    return found


def _draw_layout(random, world_size):
    """A tuple of flags, which may not go together."""
    degrees, left = {}, world_size
    for axis in random.sample(["pp", "dp", "cp", "tp"], 4):
        degrees[axis] = random.choice([d for d in range(1, left + 1) if left % d == 0])
        left //= degrees[axis]
    degrees["dp"] *= left
    chosen = {name: random.choice(choices) for name, choices in CHOICES.items()}
    microbatches = random.choice((1, 2)) * degrees["pp"]
    for name, axis in {"sp": "tp", "cp_method": "cp", "schedule": "pp"}.items():
        if degrees[axis] == 1:
            del chosen[name]
    if chosen["balance"]:
        experts = world_size * math.ceil(4 / world_size)
        chosen["balance"] = f"--experts {experts} --balance {chosen['balance']}"
    else:
        del chosen["ep"]
    chosen["microbatches"] = _shown("microbatches", microbatches)
    return *(_shown(*degree) for degree in degrees.items()), *filter(None, chosen.values())


class OneProcess:
    """The whole training in fp64, in PyTorch's own functions: initial values, batches and rates are
    the layout's, and nothing else.

    shapes: {GPT-2's name: shape}.
    """

    def __init__(self, args, shapes, device):
        self.args = args
        self.weights = {
            name: initial_value(name, shape, args.layers, args.seed).double().to(device)
            for name, shape in shapes.items()
        }
        decay = lambda weight: args.weight_decay * (weight.ndim > 1)
        weights = [weight.requires_grad_() for weight in self.weights.values()]
        groups = [{"params": weight, "weight_decay": decay(weight)} for weight in weights]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
        self.router_bias = torch.zeros(args.layers, max(1, args.experts), device=device)

    def forward_backward(self, inputs, targets):
        """Leave clipped gradients in .grad; returns the loss and the norm.

        With losses of balance in microbatches, whose they are.
        """
        args, loss, count = self.args, 0, (targets != IGNORE_INDEX).sum()
        parts = args.microbatches if args.experts and args.balance == "aux" else 1
        rows = torch.arange(len(inputs), device=inputs.device).view(args.dp, parts, -1)
        self.optimizer.zero_grad()
        self.load = torch.zeros_like(self.router_bias)
        for part in rows.transpose(0, 1).flatten(1):
            self.balance_loss = 0.0
            logits = self.logits(inputs[part]).flatten(0, 1)
            own = F.cross_entropy(logits, targets[part].flatten(), reduction="sum") / count
            (own + self.balance_loss / parts).backward()
            loss += own.detach()
        most = args.grad_clip or math.inf
        return loss, nn.utils.clip_grad_norm_(self.weights.values(), most)

    def update(self, gradients, rate):
        """A step along these gradients."""
        for name, weight in self.weights.items():
            weight.grad = gradients[name].to(weight).view_as(weight)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        if self.args.balance == "bias":
            self.router_bias += 0.001 * (self.load.mean(1, True) - self.load).sign()

    def logits(self, tokens):
        """(B, T) -> (B, T, V)."""
        args, weights = self.args, self.weights
        D, width = args.hidden, args.hidden // args.heads
        norm = lambda x, at: F.layer_norm(x, [D], weights[f"{at}.weight"], weights[f"{at}.bias"])
        linear = lambda x, at: F.linear(x, weights[f"{at}.weight"], weights[f"{at}.bias"])
        wte, wpe = weights["transformer.wte.weight"], weights["transformer.wpe.weight"]
        x, later = wte[tokens] + wpe, wpe.new_ones(len(wpe), len(wpe)).triu(1) > 0
        for i in range(args.layers):
            at = f"transformer.h.{i}"
            qkv = linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn").unflatten(2, (-1, width))
            q, k, v = qkv.transpose(1, 2).split([args.heads, args.kv_heads, args.kv_heads], 1)
            k, v = (heads.repeat_interleave(args.heads // args.kv_heads, 1) for heads in (k, v))
            scores = q @ k.mT / math.sqrt(width)
            y = scores.masked_fill(later, -math.inf).softmax(-1) @ v
            x = x + linear(y.transpose(1, 2).flatten(2), f"{at}.attn.c_proj")
            y = norm(x, f"{at}.ln_2")
            if args.experts and (i + 1) % args.moe_every == 0:
                x = x + self.mixture(y.flatten(0, 1), i, f"{at}.mlp").view_as(x)
            else:
                y = F.gelu(linear(y, f"{at}.mlp.c_fc"), approximate="tanh")
                x = x + linear(y, f"{at}.mlp.c_proj")
        return F.linear(norm(x, "transformer.ln_f"), wte)

    def mixture(self, x, layer, at):
        """(N, D) -> (N, D): every expert takes every token, with weight 0 where not chosen."""
        args, weights = self.args, self.weights
        logits = x @ weights[f"{at}.router.weight"].t()
        scores = logits.sigmoid() if args.balance == "bias" else logits.softmax(1)
        chosen = (scores + self.router_bias[layer]).topk(args.top_k).indices
        chosen = torch.zeros_like(scores).scatter(1, chosen, 1.0)  # (N, E)
        gates = chosen * scores
        if args.top_k > 1:
            gates = gates / gates.sum(1, keepdim=True)
        inside = torch.einsum("nd,efd->enf", x, weights[f"{at}.experts.w_in"])
        inside = F.gelu(inside, approximate="tanh")
        y = torch.einsum("ne,enf,edf->nd", gates, inside, weights[f"{at}.experts.w_out"])
        if args.shared_experts:
            inside = F.gelu(x @ weights[f"{at}.shared.0.weight"].t(), approximate="tanh")
            y = y + inside @ weights[f"{at}.shared.2.weight"].t()
        self.load[layer] += chosen.sum(0)
        if args.balance == "aux":
            balance = args.experts * (chosen.sum(0) / chosen.sum() * scores.mean(0)).sum()
            self.balance_loss += 0.01 * balance + 0.001 * logits.logsumexp(1).square().mean()
        return y


def compare(args, mesh, device):
    """Some steps of a layout beside one process: {what: difference / norm}, and costs().

    Collective; rank 0 has the differences.
    """
    trainer, found = Trainer(args, mesh, device), {}
    tokens = np.random.default_rng(args.seed).integers(args.vocab_size, size=10**4)
    batch = partial(_proof_batch, args, Data(tokens, tokens, False))
    weights = gather_state(trainer)
    if weights:
        del weights["lm_head.weight"]  # the embedding
        one = OneProcess(args, {name: weight.shape for name, weight in weights.items()}, device)
        found |= _differences("first", weights, one.weights)
    for step in range(args.steps):
        with count_bytes() as traffic:
            metrics = trainer.step(*batch(step, trainer.local_rows()))
        numbers = gather_objects([metrics["loss"], metrics["grad_norm"]])
        gradients = gather_state(trainer, lambda parameter: parameter.grad)
        weights, when = gather_state(trainer), f"step {step + 1}"
        if weights:
            expected = one.forward_backward(*(tokens.to(device) for tokens in batch(step)))
            for name, own, theirs in zip(("loss", "norm"), expected, zip(*numbers)):
                found |= _differences(when, {name: own.new_tensor(theirs)}, {name: own})
            own = {name: weight.grad for name, weight in one.weights.items()}
            found |= _differences(f"{when} gradient", gradients, own)
            one.update(gradients, metrics["lr"])
            found |= _differences(when, weights, one.weights)
    return found, costs(trainer, traffic)


def _proof_batch(args, data, step, rows=slice(None)):
    """As in training, but some targets do not count: here and there, and all of the first rows."""
    inputs, targets = data.batch(step, args.batch_size, args.seq_len, args.seed, rows)
    out = np.random.default_rng([args.seed, step, 1]).random((args.batch_size, args.seq_len)) < 0.2
    out[: args.batch_size // 8] = True
    return inputs, targets.masked_fill(torch.from_numpy(out[rows]), IGNORE_INDEX)


@torch.no_grad()
def _differences(what, found, expected):
    """{what, name: norm of the difference / norm}, each of a dict of tensors."""
    errors = {}
    for name, own in expected.items():
        difference = found[name].to(own) - own
        if name.endswith("c_attn.bias"):  # the keys' has no gradient but rounding errors
            D = len(found[name.replace("c_attn", "c_proj")])
            difference[D : (D + len(difference)) // 2] = 0
        size = torch.linalg.vector_norm(difference).item()
        norm = torch.linalg.vector_norm(own).clamp(min=1e-300).item()
        errors[f"{what} {name}"] = size / norm
    return errors


def costs(trainer, traffic):
    """{what: (found, claimed)} of the last step, where a formula tells; to be summed over ranks.

    gradients, stages: KB sent; memory: bytes held per parameter; bubble: that of the schedule.
    """
    args, mesh, config = trainer.args, trainer.mesh, trainer.config
    routes, place = trainer.pipeline.schedule.routes, dist.get_rank(mesh.pp_group)
    share = sum_of(shares_of(routes, config, place))
    size = dist.get_world_size()
    held = memory_ledger(trainer.stages, trainer.optimizer).total()
    claimed = sum(state_bytes(config, args, share).values())
    per_parameter = size * count_of(config, args, share)
    found = {"memory": (held / per_parameter, claimed / per_parameter)}
    if args.pp > 1:
        parts = len(trainer.route) // args.pp  # of a rank's layers
        timeline = simulate(make_schedule(args), 1 / parts, 2 / parts, weight=1 / parts)
        bubble = timeline.idle if args.schedule in ("zb-h2", "zb-v") else timeline.bubble
        claimed = bubble_time(args.schedule, args.pp, args.microbatches, num_chunks=args.chunks)
        found["bubble"] = max(bubble) / size, claimed / size
    if traffic.uncounted:
        return found
    batch = args.batch_size // (args.dp * args.microbatches)
    claims, groups = sent_bytes(config, args, share, batch), {mesh.pp_group, mesh.embedding_group}
    ours = {getattr(mesh, name) for name in GRADIENT_GROUPS}
    for what, axis, groups in ("gradients", "dp", ours), ("stages", "pp", groups):
        sent = sum(traffic.bytes(group=group) for group in groups - {None})
        found[what] = sent / 1024, claims[axis] / 1024
    return found


def verify(args, argv, device, local_world_size):
    """Rank 0 prints a line for each layout; returns whether one is unlike one process. Collective.

    argv: the command line; where it has no layout these are all of layouts().
    """
    precision = "fp64" if device.type == "cpu" and args.dtype == "fp32" else args.dtype
    torch.set_default_dtype(torch.float64 if precision == "fp64" else torch.float32)
    given, names = vars(_parser().parse_args(argv)), [name for name, *_ in FLAGS]
    names = [*names[: names.index("layers")], "kv_heads", "recompute"]  # the layout's come first
    is_one = any(given[name] is not None for name in names)
    rows = [[]] if is_one else layouts(argv, args.world_size)
    bound, errors, groups = BOUNDS[precision], [], {}
    say = partial(print, flush=True) if dist.get_rank() == 0 else lambda line: None
    for words in rows:
        layout = parse_args([*words, *argv], args.world_size)
        if precision != "fp64" and layout.experts:
            layout.top_k = layout.experts  # rounding would choose others
        error, where, figures = judge(layout, device, local_world_size, groups)
        figures = [f"{what} {a:.5g} ({b:.5g})" for what, (a, b) in sorted(figures.items())]
        mark = "ok" if error <= bound else "WRONG"
        say("  ".join([f"{mark:5} {error:8.1e}  {where:48}", " ".join(words), *figures]))
        errors.append(error)
    wrong = sum(error > bound for error in errors)
    say(
        f"{len(rows)} layouts on {args.world_size} x {device.type} in {precision}: worst "
        f"difference {max(errors):.1e}, bound {bound:.0e}; {wrong} of them wrong"
    )
    torch.set_default_dtype(torch.float32)
    return wrong > 0


def judge(args, device, local_world_size, groups):
    """A layout's worst difference, or infinity, of what, and the sums of costs(), on all ranks."""
    try:
        found = compare(args, mesh_of(args, local_world_size, groups), device)
    except Exception as error:  # the other layouts are tried all the same
        found = {f"{type(error).__name__}: {error}": math.inf}, {}
    worst = [(math.inf if math.isnan(error) else error, what) for what, error in found[0].items()]
    worst, figures = zip(*gather_objects((max(worst, default=(0.0, "")), found[1])))
    common = figures[0].keys() if all(figures) else ()
    sums = {what: tuple(map(sum, zip(*(own[what] for own in figures)))) for what in common}
    return *max(worst), sums


# ---- planner -------------------------------------------------------------------------------------
#
# price() is the idea: what the fullest GPU of a layout holds, and how long its slowest rank takes
# for a step, from the modules' cost functions. best_plans() prices what can be, and plan() prints.


class Gpu(NamedTuple):
    """A GPU by its data sheet: TFLOP/s of dense products in bf16; GB of memory; GB/s of memory, to
    its node of `per_node` GPUs, and of its share of the network, links in one direction.

    products, moves: what programs reach of these TFLOP/s, and of all GB/s. The planner has no other
    constants; tests/test_plan.py fits them to half of the published runs.
    """

    tflops: float
    memory: float
    memory_speed: float
    node: float
    network: float
    products: float = 0.56
    moves: float = 1.0
    per_node: int = GPUS_PER_NODE

    def per_byte(self, gb_per_second):
        """Seconds of a byte at a speed of the data sheet."""
        return 1e-9 / (self.moves * gb_per_second)


class Layout(NamedTuple):
    """How a step is cut, by the names of the flags."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    sp: bool = False
    cp_method: str = "ring"
    recompute: str = "none"
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1  # of a rank: 2 of zb-v
    zero: int = 0
    replicate: int = 1
    ep_nodes: int = 1
    dtype: str = "bf16"

    @property
    def degrees(self):
        return self[:5]

    @property
    def of_layer(self):
        """What of it a layer's work depends on, a key for caches; the rest is the default."""
        names = "tp", "cp", "ep", "sp", "cp_method", "recompute", "ep_nodes"
        return Layout(**{name: getattr(self, name) for name in names})


class Plan(NamedTuple):
    """A layout's price: bytes that the fullest GPU holds, by kind; seconds of a step, by part."""

    layout: Layout
    memory: dict
    seconds: dict

    @property
    def step(self):
        return sum(self.seconds.values())

    @property
    def held(self):
        return sum(self.memory.values())


def price(config, gpu, layout, batch_size, unfused=False):
    """The Plan of a layout: what its fullest rank holds, and how long its slowest one takes."""
    memory = memory_of(config, layout, batch_size, unfused)
    return Plan(layout, memory, seconds_of(config, gpu, layout, batch_size, unfused))


def memory_of(config, layout, batch_size, unfused=False):
    """{kind: bytes} of the fullest of the first, a middle and the last rank of a pipeline.

    activations: what else there is when there is most.
    """
    config = replace(config, recompute=layout.recompute)  # by which stages are cut
    batch, ranks = batch_size // (layout.dp * layout.microbatches), []
    scores = unfused * (layout.recompute == "none") * score_bytes(config, layout, batch)
    m = layout.microbatches
    m = m if layout.schedule == "gpipe" else min(m, 2 * layout.pp)  # by then there is most
    for actions, shares in stages_of(config, layout.schedule, layout.pp, m, layout.chunks):
        held = state_bytes(config, layout, sum_of(shares))
        of = actions, shares, held["gradients"], scores
        _, others = peak_bytes(config, layout, batch, *of)
        ranks.append(held | {"activations": others - held["gradients"]})
    return max(ranks, key=lambda held: sum(held.values()))


@lru_cache(maxsize=None)
def stages_of(config, schedule, pp, microbatches, chunks):
    """[(actions, Shares)] of the first, a middle and the last rank."""
    flags = {"schedule": schedule, "pp": pp, "microbatches": microbatches, "chunks": chunks}
    schedule = make_schedule(argparse.Namespace(**flags, layers=config.layers))
    places = {0, pp // 2, pp - 1}
    return [(schedule[place], shares_of(schedule.routes, config, place)) for place in places]


def seconds_of(config, gpu, layout, batch_size, unfused=False):
    """{part: seconds} of a step: the microbatches, the bubble, and what messages leave exposed.

    Gradients hide behind the backward of the last microbatch, or, interleaved, of the last p of all
    chunks but the first; weights behind the first forward alike; what ZeRO-2 and -3 send more,
    behind all. A stage waits for messages, which are split over tp (--sp, or Megatron-LM's scatter
    and gather). DualPipe hides ep.
    """
    config = replace(config, recompute=layout.recompute)  # by which stages are cut
    dp, pp, m, schedule = layout.dp, layout.pp, layout.microbatches, layout.schedule
    batch, chunks = batch_size // (dp * m), layout.chunks
    layer = layer_work(config, gpu, batch, layout.of_layer, unfused)
    head = head_work(config, gpu, batch, layout.tp * layout.cp)
    relative = round(head.forward[0] / sum(layer.forward), 6)
    layers, heads = busiest_rank(config, relative, schedule, pp, chunks)
    parts = [a + b for a, b in zip(layer.forward, layer.backward)]
    seconds = {name: m * layers * part for name, part in zip(("compute", "tp", "cp", "ep"), parts)}
    seconds["compute"] += m * heads * (head.forward[0] + head.backward[0])
    if schedule == "dualpipe":
        seconds["ep"] = max(0.0, seconds["ep"] - seconds["compute"])
    forward, backward, _ = _paces(layer, head, layers, heads)
    rest = _paces(layer, head, config.layers - layers, 1 - heads)
    others = [time / max(1, pp - 1) for time in rest]  # the mean of the other ranks
    message = batch * config.seq_len // layout.cp * config.hidden * 2 // layout.tp
    link = links(gpu)[pp * dp * layout.cp * layout.tp > gpu.per_node]
    hops = chunks * m * min(2, pp - 1)  # to its neighbours, of a rank that has most
    seconds["pp"] = Cost(hops, hops * message).seconds(link)
    chunked = schedule == "interleaved" and not unfused  # in 2021 all gradients went at the end
    span = (pp * (chunks - 1) + 1) / chunks if chunked else 1
    most = math.ceil(config.layers / (pp * chunks)) * chunks * (1 + (schedule == "dualpipe"))
    share = Share(most, most * _portion(config), embeddings=1)
    ends = span * forward, span * backward
    seconds["dp"] = replica_seconds(config, gpu, layout, share, forward, backward, *ends)
    seconds["bubble"] = bubble_of_step(schedule, pp, m, *others, chunks) if pp > 1 else 0.0
    return seconds


def _paces(layer, head, layers, heads):
    """Seconds of so many layers and heads: forward, backward, and of that for weights."""
    pairs = *zip(map(sum, layer[:2]), map(sum, head[:2])), (layer.weight, head.weight)
    return [layers * a + heads * b for a, b in pairs]


class Work(NamedTuple):
    """Of a layer, or of the head, with a microbatch, on one GPU.

    forward, backward: seconds of compute, and exposed ones of tp, cp and ep. weight: those of
    backward's compute that are for weights.
    """

    forward: tuple
    backward: tuple
    weight: float


def links(gpu):
    """LinkSpeed inside a node and between nodes. A message costs the host what NCCL's do here."""
    speeds = gpu.node, gpu.network
    return [LinkSpeed(LINK_SPEEDS["nccl"].alpha, gpu.per_byte(gbs), 0.0) for gbs in speeds]


@lru_cache(maxsize=None)
def shard_seconds(gpu, nbytes, size, stride=1):
    """Of a reduce-scatter or an all-gather of so many bytes, by `size` ranks, `stride` apart."""
    per_node = on_one_node(size, stride, gpu.per_node)
    names = candidates("nccl", reduce_scatter_cost, size, per_node)
    costs = [reduce_scatter_cost(name, int(nbytes), size, per_node) for name in names]
    return min(cost.seconds(*links(gpu)) for cost in costs) if nbytes else 0.0


def model_size(config):
    """Parameters of a GPT."""
    whole = Share(config.layers, config.layers * _portion(config), 1, 1, tied=True)
    return count_of(config, Layout(), whole)


@lru_cache
def _portion(config):
    """Of the layers, those that have experts."""
    return sum(map(config.has_experts, range(config.layers))) / config.layers


@lru_cache(maxsize=None)
def layer_work(config, gpu, batch, layout, unfused):
    """The mean layer's Work, with `batch` sequences of a microbatch.

    Forward computes products, at the pace of the GPU or of its memory, which holds the weights, and
    writes and reads once what fused attention and the rest keep. Backward computes the products of
    inputs and of weights, whose gradients are read and written in 32 bit, and twice the rest. tp
    and ep wait; ring attention hides its messages behind attention.
    """
    product, weight, core = product_seconds(config, gpu, batch, layout)
    core *= 1 if unfused else 0.5  # a fused kernel leaves out what a causal mask does
    per_byte = gpu.per_byte(gpu.memory_speed)
    written = fused = kept_bytes(config, layout, batch, _portion(config), recompute="selective")
    written += unfused * score_bytes(config, layout, batch)
    compute = product + core + 2 * written * per_byte
    scores = core + 2 * (written - fused) * per_byte
    ahead, back = message_seconds(config, gpu, batch, layout, core)
    forward = compute, *ahead
    # a fused kernel makes the scores again in backward: 5 products, to the 2 of forward
    backward = product + weight + 2 * (compute - product) + (not unfused) * core / 2, *back
    again = {"none": (0,) * 4, "selective": (scores, 0, ahead[1], 0), "full": forward}
    backward = tuple(map(sum, zip(backward, again[layout.recompute])))
    return Work(forward, backward, weight)


def score_bytes(config, layout, batch):
    """Bytes of a layer's scores where attention is not fused."""
    sizes = batch, config.seq_len, config.hidden, config.heads, layout.tp * layout.cp
    return activation_bytes(*sizes) - activation_bytes(*sizes, recompute="selective")


def product_seconds(config, gpu, batch, layout):
    """Of a layer's matrices in forward, of those for their gradients, and of attention's core."""
    per_flop = batch * config.seq_len / layout.cp / layout.tp / (gpu.tflops * 1e12 * gpu.products)
    product, core = (flops * per_flop for flops in forward_flops(config, _portion(config)))
    weights = count_of(config, layout, Share(1, _portion(config)))
    weights *= gpu.per_byte(gpu.memory_speed)
    return *(max(product, size * weights) for size in (2, 8)), core


def message_seconds(config, gpu, batch, layout, core):
    """Of a layer's tp, cp, ep: forward, backward. core: attention's seconds, which hide a ring."""
    tp, cp, ring = layout.tp, layout.cp, layout.cp_method == "ring" and layout.cp > 1
    sizes = config, layout, batch, _portion(config)
    sent, batches, (inside, between) = layer_bytes(*sizes), layer_batches(*sizes), links(gpu)
    whole = batch * config.seq_len // cp * config.hidden * 2  # what tp gathers
    pace = shard_seconds(gpu, whole, tp) / max(1, reduce_scatter_bytes(whole, tp))
    around = between if cp * tp > gpu.per_node else inside
    seconds = lambda axis, i, link: Cost(batches[axis][i], sent[axis][i]).seconds(link)
    for i, hidden in enumerate((1, 2)):
        exposed = seconds("cp", i, around) - ring * hidden * core
        dealt = seconds("ep", i, inside) + seconds("across", i, between)
        yield sent["tp"][i] * pace, max(0.0, exposed), dealt


@lru_cache(maxsize=None)
def head_work(config, gpu, batch, parts):
    """The head's, and the loss's. parts: tp x cp."""
    logits = batch * config.seq_len * config.vocab_size / parts
    product = 2 * config.hidden * logits / (gpu.tflops * 1e12 * gpu.products)
    # written and read: logits in 16 bit, and in 32 bit for the loss
    forward = product + 12 * logits * gpu.per_byte(gpu.memory_speed)
    return Work((forward, 0, 0, 0), (2 * forward, 0, 0, 0), product)


@lru_cache(maxsize=None)
def busiest_rank(config, head, schedule, pp, chunks):
    """(layers, heads) of the rank that has most to do, where the head costs `head` layers."""
    stages = pp * chunks
    cut = [(len(layers_of(stage, stages, config)), stage == stages - 1) for stage in range(stages)]
    of_rank = lambda place: (cut[place], cut[-1 - place]) if schedule == "zb-v" else cut[place::pp]
    ranks = [tuple(map(sum, zip(*of_rank(place)))) for place in range(pp)]
    return max(ranks, key=lambda rank: rank[0] + head * rank[1])


def replica_seconds(config, gpu, layout, share, forward, backward, first, last):
    """Seconds of dp that compute does not hide, with a message for each layer.

    forward, backward: of a microbatch. The last one hides its scatter behind `last` seconds of
    backward, the first its gather behind `first` of forward, any other all behind one of both.
    """
    scatter, gather = 0.0, 0.0
    for kind in kinds_of(config, layout, share):
        number, shards = kind.number / share.layers, kind.shards(layout)
        scatter += share.layers * shard_seconds(gpu, 4 * number, shards, kind.stride)
        gather += share.layers * shard_seconds(gpu, 2 * number, shards, kind.stride)
        across = 4 * number / shards, kind.replicas // shards, shards * kind.stride
        scatter += share.layers * 2 * shard_seconds(gpu, *across)
    if not layout.zero:  # the sums of gradients are gathered, in 32 bit, before backward ends
        return max(0.0, 2 * scatter - last)
    m = own_microbatches(layout)
    scatters, gathers = zero_rounds(layout.zero, m)
    regather = gather * (gathers > 1)  # stage 3 gathers in backward, too
    computing = (forward + backward) * layout.microbatches / m  # DualPipe's two replicas meanwhile
    exposed = max(0.0, scatter + 2 * regather - computing)
    ends = max(0.0, scatter + regather - last) + max(0.0, gather - first)
    return (scatters - 1) * exposed + ends


GPUS = {  # 80 GB are of 80 GiB: the other 6 are for CUDA, NCCL and holes
    "a100": Gpu(PEAKS["A100"][0], 80, 2039, 300, 25, 0.69, 0.81),
    "h100": Gpu(PEAKS["H100 80GB HBM3"][0], 80, 3350, 450, 50),
    "h800": Gpu(989, 80, 3350, 200, 50),
    "h200": Gpu(PEAKS["H200"][0], 141, 4800, 450, 50),
    "b200": Gpu(2250, 180, 8000, 900, 50),
    "tpu-v5p": Gpu(459, 95, 2765, 180, 180),
}


class Model(NamedTuple):
    """A model of the literature as a GPT of its layers, width and heads.

    Where its MLP has three matrices, ffn is 1.5 times theirs: as many FLOPs. billions: of its own
    parameters. unfused: attention writes its scores to memory, as Megatron-LM's did in 2021.
    """

    billions: float
    config: GPTConfig
    unfused: bool = False


MEGATRON = {  # Narayanan et al., 2021, table 1: billions of parameters: layers, hidden, heads
    **{1.7: (24, 2304, 24), 3.6: (30, 3072, 32), 7.5: (36, 4096, 32), 18.4: (40, 6144, 48)},
    **{39.1: (48, 8192, 64), 76.1: (60, 10240, 80), 145.6: (80, 12288, 96)},
    **{310.1: (96, 16384, 128), 529.6: (105, 20480, 128), 1008.0: (128, 25600, 160)},
}
LLAMA = partial(GPTConfig, seq_len=8192, vocab_size=128256, kv_heads=8)
MIXTURE = partial(GPTConfig, seq_len=4096, top_k=8, shared_experts=1)
MODELS = {
    **{
        f"gpt-{billions}b": Model(billions, GPTConfig(*sizes, 2048, 51200, dropout=0.1), True)
        for billions, sizes in MEGATRON.items()
    },
    "llama3-8b": Model(8.03, LLAMA(32, 4096, 32, ffn=21504)),
    "llama3-70b": Model(70.6, LLAMA(80, 8192, 64, ffn=43008)),
    "llama3-405b": Model(405.9, LLAMA(126, 16384, 128, ffn=79872)),
    "gemma2-27b": Model(27.2, GPTConfig(46, 4608, 32, 8192, 256128, kv_heads=16, ffn=55296)),
    "mixtral-8x22b": Model(
        140.6, GPTConfig(56, 6144, 48, 4096, 32768, kv_heads=8, ffn=24576, experts=8, top_k=2)
    ),
    "deepseek-v3": Model(
        671.0, MIXTURE(61, 7168, 128, vocab_size=129280, ffn=3072, experts=256, topk_nodes=4)
    ),
    "kimi-k2": Model(1040.0, MIXTURE(61, 7168, 64, vocab_size=163840, ffn=3072, experts=384)),
    "glm-5": Model(744.0, MIXTURE(78, 6144, 64, vocab_size=154880, ffn=3072, experts=256)),
    "solar-open": Model(
        102.6, MIXTURE(48, 4096, 64, vocab_size=196608, kv_heads=8, ffn=1920, experts=128)
    ),
}


def grids(args):
    """The Layouts of all degrees that the command line takes for args.gpus, with one microbatch."""
    limits = {"tp": args.heads, "cp": args.seq_len // 2, "pp": args.layers + 2, "ep": args.experts}
    degrees = [_given(args, name, _divisors(args.gpus, limits[name])) for name in limits]
    for tp, cp, pp, ep in product(*degrees):
        dp, rest = divmod(args.gpus, tp * cp * pp)
        sp = args.given.get("sp", tp > 1 and args.seq_len // cp % tp == 0)
        # a node has as much of tp as there is in ep, and of dp x cp what fits beside tp
        nodes = ep // math.gcd(ep, math.gcd(ep, tp) * max(1, args.machine.per_node // tp))
        of = {"replicate": args.replicate, "ep_nodes": nodes}
        grid = Layout(tp, cp, pp, dp, ep, sp, args.cp_method, **of)
        flags = {"topk_nodes": min(args.topk_nodes or nodes, nodes), "world_size": args.gpus}
        flags["zero"] = args.given.get("zero", 1)
        flags = argparse.Namespace(**vars(args) | grid._asdict() | flags)
        wrong = rest or not dp or dp != args.given.get("dp", dp)
        if not wrong and not any(is_wrong(flags) for is_wrong in RULES.values()):
            yield grid


def _divisors(number, most):
    return [n for n in range(1, max(1, min(number, most)) + 1) if number % n == 0]


def _given(args, name, choices):
    return [args.given[name]] if name in args.given else choices


def pieces_of(args, grid):
    """A grid's Layouts of all microbatches and recomputations."""
    own = args.batch_size // grid.dp
    counts = _given(args, "microbatches", _divisors(own, own))
    modes = _given(args, "recompute", ["none", "selective", "full"])
    for m, mode in product(counts, modes):
        if own % m == 0:
            yield grid._replace(microbatches=m, recompute=mode)


def pipelines_of(args, one):
    """Layouts of all schedules whose formulas hold, with all stages of ZeRO.

    With one stage all schedules are alike; naive and GPipe are no quicker than 1F1B, and hold more.
    """
    pp, m = one.pp, one.microbatches
    stages = _given(args, "zero", range(4) if one.dp * one.cp > 1 else [0])
    chunks = [(name, 2 if name == "zb-v" else 1) for name in SCHEDULES if name != "interleaved"]
    chunks += [("interleaved", v) for v in _given(args, "chunks", range(2, 9))]
    names = _given(args, "schedule", [*SCHEDULES][2:] if pp > 1 else ["1f1b"])
    for name, v in chunks:
        least, multiple = least_microbatches(name, pp)
        fits = m >= least and m % multiple == 0 and pp * v <= args.layers + 2
        if fits and name in names and (name != "dualpipe" or pp % 2 == 0):
            yield from (one._replace(schedule=name, chunks=v, zero=stage) for stage in stages)


def best_plans(args, config, count=10, **given):
    """The quickest Plan that fits of each grid, of the `count` quickest grids, quickest first.

    given: flags on top of args.given. A heap gives first what takes least: a piece by the least
    that it can take, which is then replaced by its layouts, and these by what they take. So a
    grid's first layout that fits is its quickest, and only what is this quick is asked for memory.
    """
    args = argparse.Namespace(**vars(args) | {"given": args.given | given})
    size, number = (args.batch_size, args.unfused), numbers()
    pieces = (one for grid in grids(args) for one in pieces_of(args, grid))
    heap = [(least_seconds(args, config, one), next(number), one, {}) for one in pieces]
    heapq.heapify(heap)
    plans, memory = {}, args.machine.memory * 1e9
    while heap and len(plans) < count:
        _, _, layout, seconds = heapq.heappop(heap)
        if layout.degrees in plans:
            continue
        if seconds:  # else it is a piece
            held = memory_of(config, layout, *size)
            if sum(held.values()) <= memory:
                plans[layout.degrees] = Plan(layout, held, seconds)
            continue
        for of in pipelines_of(args, layout):
            if least_memory(config, of, args.batch_size) <= memory:
                seconds = seconds_of(config, args.machine, of, *size)
                heapq.heappush(heap, (sum(seconds.values()), next(number), of, seconds))
    return [*plans.values()]


def least_memory(config, layout, batch_size):
    """Bytes of the mean rank's state, and of one microbatch in one of its chunks."""
    layers, batch = config.layers / layout.pp, batch_size // (layout.dp * layout.microbatches)
    state = state_bytes(config, layout, Share(layers, layers * _portion(config)))
    kept = kept_bytes(config, layout, batch, _portion(config)) * layers / layout.chunks
    return sum(state.values()) + kept


def least_seconds(args, config, layout):
    """Of compute, tp and cp, were all stages alike."""
    batch = args.batch_size // (layout.dp * layout.microbatches)
    layer = layer_work(config, args.machine, batch, layout.of_layer, args.unfused)
    layers = layout.microbatches * config.layers / layout.pp
    return layers * sum(layer.forward[:3] + layer.backward[:3])


def plan(argv):
    """Print the layouts that cost least, and the rules that say why. Returns the exit status."""
    try:
        args = plan_args(argv)
    except ValueError as error:
        _complain(f"error: {error}")
        return 2
    config, gpus, kind = config_of(args), args.gpus, args.gpu or "this machine"
    parameters = model_size(config)
    own = f", {MODELS[args.model].billions:g}B of its own" if args.model else ""
    print(f"{args.model or 'model'}: {parameters / 1e9:.4g}B parameters as a GPT{own}")
    print(f"{gpus} x {kind}, {args.batch_size} x {args.seq_len} tokens a step, bf16\n")
    plans = best_plans(args, config)
    if not plans:
        print(
            f"no layout fits: 16 bytes x parameters are {16e-9 * parameters:,.0f} GB, and {gpus} "
            f"GPUs have {gpus * args.machine.memory:,.0f}; activations come on top"
        )
        return 1
    show_plans(plans, args, flops_per_token(config))
    print(*first_beats_second(plans), *rules(args, config, parameters, plans[0]), sep="\n")
    print(*thresholds(args, config, parameters, plans[0]), sep="\n")
    return 0


def show_plans(plans, args, flops):
    """Two tables. flops: the model's, per token."""
    flops *= args.batch_size * args.seq_len / args.gpus / 1e12
    print(
        "     tp  cp   pp    dp  ep ZeRO schedule         m x b recompute   step s  TFLOP/s    MFU"
    )
    for number, p in enumerate(plans, 1):
        of, tflops = p.layout, flops / p.step
        name = f"{of.schedule} {of.chunks}" if of.schedule == "interleaved" else of.schedule
        sizes = f"{of.microbatches} x {args.batch_size // of.dp // of.microbatches}"
        print(
            f"{number:3} {of.tp:3} {of.cp:3} {of.pp:4} {of.dp:5} {of.ep:3} {of.zero:4} {name:14}"
            f"{sizes:>8} {of.recompute:9} {p.step:8.4g} {tflops:8.4g}",
            f"{tflops / args.machine.tflops:6.1%}",
        )
    print("\n     GB = weights  grads optim. activ.  s = compute", end="")
    print("     tp     cp     ep     pp     dp bubble")
    for number, p in enumerate(plans, 1):
        held = " ".join(f"{nbytes / 1e9:6.2f}" for nbytes in p.memory.values())
        compute, *waits = p.seconds.values()
        waits = " ".join(f"{seconds:6.2g}" for seconds in waits)
        print(f"{number:3} {p.held / 1e9:6.1f}  {held} {compute:12.4g} {waits}")
    print()


def first_beats_second(plans):
    """One sentence, where there is a slower one."""
    one, *others = plans
    for number, two in [(n, p) for n, p in enumerate(others, 2) if p.step > 1.0001 * one.step][:1]:
        gains = {name: two.seconds[name] - one.seconds[name] for name in one.seconds}
        most, least = max(gains, key=gains.get), min(gains, key=gains.get)
        yield (
            f"1 beats {number} by {two.step - one.step:.2g} s: {gains[most]:.2g} s less of {most}, "
            f"{-gains[least]:.2g} s more of {least}"
        )


def rules(args, config, parameters, best):
    """The literature's rules, each with what makes it true or false here: the best plan that keeps
    it, and the best one that does not."""
    of, gpu = best.layout, args.machine
    state = 18 * parameters / 1e9
    yield f"fit first: 18 bytes a parameter are the memory of {state / gpu.memory:,.3g} GPUs"
    half = max(1, of.microbatches // 2)
    degrees = {"tp": of.tp, "cp": of.cp, "pp": of.pp, "ep": of.ep}
    for rule, flag, kept, broken, part, fixed in (  # kept, broken: values of the flag
        ("tp inside the node", "tp", gpu.per_node, 2 * gpu.per_node, "tp", {}),
        ("pipeline across nodes", "pp", max(2, of.pp), 1, "bubble", {}),
        ("data with the rest", "dp", of.dp, max(1, of.dp // 2), "dp", {}),
        ("ZeRO-1 always", "zero", 1, 0, "dp", {}),
        ("bubble small by m", "microbatches", of.microbatches, half, "bubble", degrees),
    ):
        if flag in args.given or kept == broken or (fixed and of.pp == 1):
            continue
        plans = [best_plans(args, config, 1, **fixed | {flag: n}) for n in (kept, broken)]
        if plans[0]:
            steps = [min((plan.step for plan in found), default=math.inf) for found in plans]
            shown = [describe(flag, *pair, part) for pair in zip((kept, broken), plans)]
            yield f"{'true ' if steps[0] <= steps[1] else 'FALSE'} {rule}. {'; '.join(shown)}"


def thresholds(args, config, parameters, best):
    """The roofline's, ZeRO's and those of failures, which say what sizes a layout may have."""
    of, gpu = best.layout, args.machine
    flops, node, network = gpu.tflops * 1e12, gpu.node * 1e9, gpu.network * 1e9
    if config.experts:
        inside, whole = (compute_bound_degree(w, flops, node) for w in (args.ffn, 4 * args.hidden))
        yield (
            f"{'true ' if inside < whole else 'FALSE'} experts for the MLP, tp for attention: an "
            f"expert is worth tp {inside:.2g}, a width of 4 h {whole:.2g}"
        )
    tokens = [compute_bound_tokens(flops, speed) for speed in (node, network)]
    yield (
        f"roofline: dp, FSDP want {tokens[0]:,.0f} tokens a rank in a node, {tokens[1]:,.0f} across"
        f" (here {args.batch_size // of.dp * args.seq_len // of.cp:,}); tp up to "
        f"{compute_bound_degree(args.ffn, flops, node):.2g}"
    )
    limits = args.gpus, 1e9 * gpu.memory
    sizes = (largest_model(z, *limits, 2 * (z < 3), 4, 12) / 1e9 for z in range(4))
    yield "largest model by ZeRO 0, 1, 2, 3 alone: " + ", ".join(f"{n:,.3g}B" for n in sizes)
    save, between = 12 * parameters / STORAGE, 86400 / FAILURES / args.gpus
    young, daly = checkpoint_intervals(save, between)
    yield (
        f"a failure in {between / 3600:,.3g} h, {save:.2g} s to save: checkpoints every "
        f"{young:,.0f} s (Young), {daly:,.0f} s (Daly), {daly / best.step:,.0f} steps"
    )


def describe(flag, value, plans, part):
    """The best of plans, of which there are one or none."""
    name = {"zero": "ZeRO", "microbatches": "m"}.get(flag, flag)
    for p in plans:
        portion = p.seconds[part] / p.step
        return f"{name} {value}: {p.step:.3g} s, {p.held / 1e9:.3g} GB, {portion:.0%} {part}"
    return f"{name} {value}: none fits"


FAILURES = 419 / 54 / 16384  # of a GPU in a day: Llama 3's
STORAGE = 2e12  # bytes/s that its checkpoints went at


def checkpoint_intervals(save, between_failures):
    """Seconds between checkpoints that lose least, by Young, 1974, and by Daly, 2006.

    save: what one takes; a failure loses half an interval. Daly's next terms hold for long saves.
    """
    young = math.sqrt(2 * save * between_failures)
    ratio = math.sqrt(save / (2 * between_failures))
    return young, young * (1 + ratio / 3 + ratio**2 / 9) - save


def this_machine():
    """(GPUs, Gpu) of this machine; without any, its cores, by a product and a copy of PyTorch's
    threads."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name().lower()
        kinds = [gpu for key, gpu in GPUS.items() if key in name]
        if not kinds:
            raise ValueError(f"--plan does not know {name}: say --gpus and --gpu")
        return torch.cuda.device_count(), kinds[0]
    x, cores, threads = torch.ones(1024, 1024), os.cpu_count(), torch.get_num_threads()
    product, copy = (min(_seconds(call) for _ in range(5)) for call in (lambda: x @ x, x.clone))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / cores / 1e9
    link = 1e-9 / LINK_SPEEDS["gloo"].beta
    speeds = 2 * 1024**3 / product / threads / 1e12, memory, 2 * x.nbytes / copy / threads / 1e9
    return cores, Gpu(*speeds, link, link, 1.0, 1.0, cores)


def _seconds(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def plan_args(argv):
    """The checked command line of --plan. Raises ValueError, one line naming flags and values."""
    args, args.given = read_flags(argv)
    args.unfused = bool(args.model) and MODELS[args.model].unfused
    own, args.machine = (args.gpus, GPUS[args.gpu]) if args.gpu and args.gpus else this_machine()
    args.gpus, args.machine = args.gpus or own, GPUS.get(args.gpu, args.machine)
    args.kv_heads, args.ffn = args.kv_heads or args.heads, args.ffn or 4 * args.hidden
    usual = 2**24 // args.seq_len if args.model else math.ceil(16 / args.gpus) * args.gpus
    args.batch_size = args.batch_size or usual
    if next(grids(args), None) is None:
        kind = args.gpu or "this machine"
        raise ValueError(f"--plan: no layout of {args.gpus} x {kind} has these degrees and sizes")
    return args


# ---- rehearsal -----------------------------------------------------------------------------------
#
# The trainer takes a step as one rank of any world, in one process: tensors have shapes and no
# memory, and the messages of PyTorch's "fake" groups go nowhere. Other ranks are taken to have what
# this one has, and experts to have even loads.

META = torch.device("meta")
HELD = "parameters", "gradients", "optimizer", "activations", "all at once"
AXIS_NAMES = "pp", "dp", "cp", "tp"
aten = torch.ops.aten
PRODUCTS = {  # operator: (place of its first factor, FLOPs / elements of that / columns, of causal)
    **dict.fromkeys((aten.mm, aten.bmm, aten._grouped_mm), (0, 2, None)),
    **dict.fromkeys((aten.addmm, aten.addmm_, aten.baddbmm), (1, 2, None)),
    aten._scaled_dot_product_flash_attention_for_cpu: (0, 4, 4),  # its columns are keys
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 8, 7),
}


def product_flops(function, arguments):
    """Of an operator; attention's as in step_flops()."""
    if function.overloadpacket not in PRODUCTS:
        return 0
    place, times, causal = PRODUCTS[function.overloadpacket]
    first, second = arguments[place : place + 2]
    flops = times * first.numel() * second.shape[-1 if times == 2 else -2]
    return flops // 2 if causal and arguments[causal : causal + 1] == (True,) else flops


class Rehearsal(FakeTensorMode):
    """Tensors that are made inside have no memory; counts what a GPU would do with them.

    flops: of products. batches, sent, crossed: {group: number, bytes sent, those of them that leave
    the node}. log: (storage, change of its bytes), of storages by number; those of the step from
    `began` on. rows_of_gradients: ZeRO's.
    """

    def __init__(self, args):
        super().__init__(allow_non_fake_inputs=True)
        self.flops, self.inside, self.rows = 0, False, cycle(even_rows(args))
        self.batches, self.sent, self.crossed = Counter(), Counter(), Counter()
        self.held, self.log, self.began, self.rows_of_gradients = {}, [], 0, set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        if function is aten._local_scalar_dense.default:
            return 0
        if _is_on_meta(types, arguments, options):
            return function(*arguments, **options)
        outermost, self.inside = not self.inside, True  # an operator may be made of others
        try:
            result = super().__torch_dispatch__(function, types, arguments, options)
        finally:
            self.inside = not outermost
        if not outermost:
            return result
        self.flops += product_flops(function, arguments)
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if torch.is_tensor(tensor):
                storage = tensor.untyped_storage()
                self.hold(storage, storage.nbytes())
        return result

    def hold(self, storage, nbytes):
        """From now on a storage has so many bytes, until it ends."""
        key = storage._cdata  # Private: stands for an address
        if key not in self.held:
            weakref.finalize(storage, self.let_go, key).atexit = False
        number, before = self.held.get(key, (len(self.log), None))
        if nbytes != before:
            self.log.append((number, nbytes - (before or 0)))
            self.held[key] = number, nbytes

    def let_go(self, key):
        number, nbytes = self.held.pop(key)
        self.log.append((number, -nbytes))

    def numbers(self, tensors):
        """Those of tensors' storages."""
        return {self.held[t.untyped_storage()._cdata][0] for t in tensors if torch.is_tensor(t)}

    def listen(self, event, link, *what):
        """Count the messages that observe() tells of."""
        if event == "post":
            self.batches[link.group] += 1
            for tensor, peer in what[0]:
                nodes = {link.ranks[end] // GPUS_PER_NODE for end in (link.rank, peer)}
                self.sent[link.group] += tensor.nbytes
                self.crossed[link.group] += tensor.nbytes * (len(nodes) > 1)

    @contextmanager
    def stand_in(self):
        """For what these tensors lack: values that the host reads, addresses, memory to resize.

        And for fused attention with dropout, which a GPU has and a CPU has not.
        """

        def tolist(tensor):  # numbers of rows, for each rank and its experts; others are floats
            parts = math.prod(tensor.shape[1:])
            number = 0.0 if tensor.is_floating_point() else next(self.rows) // parts
            nest = lambda shape: [nest(shape[1:]) for _ in range(shape[0])] if shape else number
            return nest(tensor.shape)

        def resize(storage, nbytes, resize=torch.UntypedStorage.resize_):
            self.hold(storage, nbytes)
            return resize(storage, nbytes)

        def fused(*qkv, dropout_p, whole=F.scaled_dot_product_attention, **options):
            return whole(*qkv, **options)

        def alloc_grad(row, alloc=FlatParameter.alloc_grad):
            alloc(row)
            self.rows_of_gradients |= self.numbers([row.flat_grad])

        address = lambda t: (t.untyped_storage()._cdata << 40) + t.storage_offset() * t.itemsize
        storages = {"data_ptr": lambda storage: storage._cdata, "resize_": resize}
        with (
            patch.multiple(FakeTensor, tolist=tolist, data_ptr=address),
            patch.multiple(torch.UntypedStorage, **storages),
            patch.object(FlatParameter, "alloc_grad", alloc_grad),
            patch.object(F, "scaled_dot_product_attention", fused),
        ):
            yield


def _is_on_meta(types, arguments, options):
    """Whether these are no fake tensors, but those of device meta, which Module.to_empty() takes.

    Fake ones would be swapped there, and cannot.
    """
    if FakeTensor in types or options.get("device", META) != META:
        return False
    tensors = list(filter(torch.is_tensor, tree_leaves(arguments)))
    return all(tensor.device == META for tensor in tensors) and bool(tensors or options)


def even_rows(args):
    """The rows that a rank sends in a layer of experts, all ranks alike: by hop."""
    tokens = args.batch_size * args.seq_len // (args.dp * args.microbatches * args.cp * args.tp)
    hops = [args.top_k] if args.ep_nodes == 1 else [min(args.top_k, args.topk_nodes), args.top_k]
    return [tokens * copies for copies in hops]


def rehearse_step(args):
    """The Trainer after a step as rank --rank, the Rehearsal, and the bytes held, by kind."""
    store, device = FakeStore(), torch.device("cpu")
    dist.init_process_group("fake", store=store, rank=args.rank, world_size=args.world_size)
    mesh, rehearsal = mesh_of(args, GPUS_PER_NODE), Rehearsal(args)
    with rehearsal, rehearsal.stand_in():
        trainer = Trainer(args, mesh, device)
        places = [place for route in trainer.pipeline.schedule.routes for place in route]
        trainer.pipeline.formats |= dict.fromkeys(places, stage_format(args))
        tokens = torch.zeros(args.batch_size // args.dp, args.seq_len, dtype=torch.int64)
        rehearsal.began = len(rehearsal.log)
        with observe(rehearsal.listen):
            trainer.step(tokens, tokens)
        return trainer, rehearsal, most_memory(trainer, rehearsal)


def most_memory(trainer, rehearsal):
    """{kind: bytes} at most, in a step that finds the optimizer's state there; and those of all.

    activations: what else there is, such as parameters that were gathered.
    """
    args, optimizer, parameters = trainer.args, trainer.optimizer, trainer.dense + trainer.experts
    states = [value for state in optimizer.state.values() for value in state.values()]
    lasting = rehearsal.numbers(states)
    gradients = rehearsal.numbers(parameter.grad for parameter in parameters)
    if not scatters_at_once(args):  # else whole rows come and go
        gradients |= rehearsal.rows_of_gradients
    memory = memory_ledger(trainer.stages, optimizer)
    if args.dtype == "bf16":
        masters = parameters if args.zero else optimizer.masters.values()
        memory["optimizer"] += sum(master.nbytes for master in masters)
        memory["parameters"] -= sum(master.nbytes for master in masters) * (args.zero > 0)
    # this step makes the optimizer's state at its end, any other finds it there
    log = sorted(rehearsal.log, key=lambda entry: entry[0] not in lasting)
    totals = list(accumulate(change for _, change in log))
    of_gradients = list(accumulate(change * (storage in gradients) for storage, change in log))
    memory["all at once"] = max(totals)
    began = rehearsal.began + sum(storage in lasting for storage, _ in log)
    others = max(map(int.__sub__, totals[began:], of_gradients[began:]))
    memory["activations"] = others - memory["parameters"] - memory["optimizer"]
    memory["gradients"] = max(of_gradients)
    return memory


def stage_format(args):
    """Rows, dtype, shape of what stages send each other, as a pipeline learns in its first step."""
    rows = args.batch_size // (args.dp * args.microbatches)
    length = args.seq_len // (args.cp * (args.tp if args.sp else 1))
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.get_default_dtype()
    return rows, dtype, torch.Size([length, rows, args.hidden])


def planned(args, config, place):
    """{what: number}, {axis: batches} of a step of this rank of the pipeline, by the formulas."""
    schedule, batch = make_schedule(args), args.batch_size // (args.dp * args.microbatches)
    actions, shares = schedule[place], shares_of(schedule.routes, config, place)
    share = sum_of(shares)
    found = state_bytes(config, args, share)
    peaks = peak_bytes(config, args, batch, actions, shares, found["gradients"])
    found["activations"], others = peaks
    found["all at once"] = found["parameters"] + found["optimizer"] + others
    found["TFLOPs"] = step_flops(config, args, share, batch) / 1e12
    found["gradients"] += summed_row_bytes(config, args, share)
    found |= sent_bytes(config, args, share, batch)
    return found, sent_batches(config, args, share, batch)


def rehearse(args):
    """Print what a step costs rank --rank: what is counted, and by formula."""
    trainer, rehearsal, memory = rehearse_step(args)
    mesh, place = trainer.mesh, dist.get_rank(trainer.mesh.pp_group)
    claims, _ = messages = planned(args, trainer.config, place)
    axes = [f"{axis} {rank_and_size(getattr(mesh, f'{axis}_group'))[0]}" for axis in AXIS_NAMES]
    layers = [list(chunk.transformer["h"]) for chunk in trainer.chunks]
    layers = ", ".join(f"{own[0]} to {own[-1]}" if own else "none" for own in layers)
    print(f"rank {args.rank} of {args.world_size}, {', '.join(axes)}: layers {layers}")
    rows = [(f"{kind}, MB", memory[kind] / 1e6, claims[kind] / 1e6) for kind in HELD]
    rows += [("TFLOPs", rehearsal.flops / 1e12, claims["TFLOPs"])]
    lanes = axes_of(mesh)
    # a lane of several axes comes last, and is for those that have none of their own
    for lane in sorted(dict.fromkeys(lanes.values()), key=len):
        groups = {group for group, name in lanes.items() if name == lane}
        claim, batches = (sum(of.pop(axis, 0) for axis in lane.split("+")) for of in messages)
        total = lambda counted: sum(counted[group] for group in groups)
        rows += [(f"{lane}, MB sent", total(rehearsal.sent) / 1e6, claim / 1e6)]
        rows += [("  between nodes", total(rehearsal.crossed) / 1e6, 0)]
        rows += [("  batches", total(rehearsal.batches), batches)]
    print(f"{'':20}{'counted':>16}{'planned':>16}{'difference':>12}")
    for what, found, claim in rows:
        compared = f"{claim:16,.3f}{found / claim - 1:12.2%}" if claim else ""
        print(f"{what:20}{found:16,.3f}{compared}")
    dist.destroy_process_group()


# ---- command line --------------------------------------------------------------------------------


SIZE = lambda value: value >= 1, "must be at least 1"
COUNT = lambda value: value >= 0, "must not be negative"
FACTOR = lambda value: 0 <= value < math.inf, "must be finite and not negative"
RATIO = lambda value: 0 < value < math.inf, "must be finite and more than 0"
SECONDS = lambda value: 1 <= value <= 10**6, "must be at least 1 and at most 10**6"
PORTION = lambda value: 0 <= value < 1, "must be at least 0 and less than 1"
TEXT = lambda value: value != "", "must not be empty"

ZERO = (
    "what replicas share out: 1: the optimizer's state, 2: gradients, too, 3: parameters, too "
    "(default: 1; of one replica 0)"
)
FLAGS = (  # name, type or choices, default, what its value must be, help
    ("dp", int, None, SIZE, "replicas (default: what the others leave of the processes)"),
    ("zero", (0, 1, 2, 3), None, None, ZERO),
    ("replicate", int, 1, SIZE, "copies of ZeRO's shards, each over neighbours (HSDP)"),
    ("tp", int, 1, SIZE, "ranks that split every matrix"),
    ("sp", bool, False, None, "split the sequence over tp outside of its matrices"),
    ("cp", int, 1, SIZE, "ranks that split the sequence, in attention, too"),
    ("cp_method", tuple(CP_METHODS), "ring", None, "how attention crosses that split"),
    ("pp", int, 1, SIZE, "pipeline stages"),
    ("schedule", tuple(SCHEDULES), "1f1b", None, "order of the microbatches in the pipeline"),
    ("chunks", int, 2, SIZE, "of a rank, with --schedule interleaved"),
    ("microbatches", int, None, SIZE, "of a replica's step (default: most it allows up to 4 x pp)"),
    ("ep", int, 1, SIZE, "ranks of dp x cp x tp over which the experts are spread"),
    ("ep_nodes", int, 1, SIZE, "on which they lie: a token crosses to each at most once"),
    ("topk_nodes", int, None, SIZE, "that a token may use of these (default: all)"),
    ("experts", int, 0, COUNT, "of a mixture in place of the MLP; 0: an MLP"),
    ("top_k", int, 2, SIZE, "experts that a token uses"),
    ("capacity_factor", float, None, RATIO, "drop tokens above this load of an expert / mean"),
    ("shared_experts", int, 0, COUNT, "further ones that every token uses"),
    ("balance", ("aux", "bias", "none"), "aux", None, "experts' loads: by losses or a bias"),
    ("moe_every", int, 1, SIZE, "every so many layers has experts"),
    ("layers", int, 4, SIZE, "of the model"),
    ("hidden", int, 128, SIZE, "width of the model"),
    ("ffn", int, None, SIZE, "width of the MLP, and of each expert (default: 4 x --hidden)"),
    ("heads", int, 4, SIZE, "of attention"),
    ("kv_heads", int, None, SIZE, "heads of keys and values (default: --heads)"),
    ("seq_len", int, 64, SIZE, "tokens of a sequence"),
    ("vocab_size", int, 256, SIZE, "tokens there are"),
    ("dropout", float, 0.0, PORTION, "of attention and of what a layer adds"),
    ("batch_size", int, None, SIZE, "sequences per step, over all replicas (default: 16 or more)"),
    ("steps", int, 1200, SIZE, "of the optimizer"),
    ("lr", float, 3e-3, FACTOR, "peak learning rate"),
    ("warmup", int, 20, COUNT, "steps of linear warm-up"),
    ("weight_decay", float, 0.1, FACTOR, "of matrices"),
    ("grad_clip", float, 1.0, FACTOR, "largest norm of the gradient; 0 does not clip"),
    ("skip_nonfinite", int, 0, COUNT, "skip a step that is not finite; so many in a row end all"),
    ("check_replicas", int, 0, COUNT, "compare the bits of copies of weights every so many steps"),
    ("seed", int, 0, COUNT, "of weights, batches and dropout"),
    ("dtype", ("fp32", "bf16"), "fp32", None, "bf16: all but the optimizer's copy and gradients"),
    ("tf32", bool, False, None, "fp32 products in TensorFloat-32, on a GPU"),
    ("recompute", ("none", "selective", "full"), "none", None, "attention, or every layer"),
    ("device", ("auto", "cpu", "cuda"), "auto", None, "auto: cuda if each process has a GPU"),
    ("backend", ("auto", "nccl", "gloo"), "auto", None, "nccl: each process sees a GPU of its own"),
    ("collectives", ("ours", "backend"), "ours", None, "backend: of NCCL or gloo, to compare"),
    ("data", str, None, None, "text, a folder of text, or a .bin (default: Python's own sources)"),
    ("data_dtype", ("uint16", "uint32"), None, None, "tokens of a .bin (default: uint16)"),
    ("init_from", str, None, TEXT, "first weights: a file of nanoGPT, Hugging Face or --export"),
    ("export", str, None, TEXT, "write the model here, for nanoGPT and Hugging Face's GPT-2"),
    ("generate", str, None, TEXT, "do not train; continue this text, or tokens such as 5,0,7"),
    ("sample", int, 60, COUNT, "tokens that the model writes at the end; 0: none"),
    ("checkpoint", str, None, None, "keep checkpoints in this folder: the last two"),
    ("save_every", int, None, SIZE, "steps (default: save at the end, and on SIGTERM)"),
    ("resume", bool, False, None, "go on from the last checkpoint, if there is one"),
    ("eval_every", int, None, SIZE, "validate every so many steps (default: at the end)"),
    ("print_every", int, None, SIZE, "steps per line, on no terminal (default: some 40 lines)"),
    ("verify", bool, False, None, "do not train; compare layouts, or this one, with one process"),
    ("plan", bool, False, None, "do not train; print the layouts that cost least, and why"),
    ("model", tuple(MODELS), None, None, "of the literature, for --plan or --rehearse"),
    ("gpus", int, None, SIZE, "for --plan (default: this machine's) or --rehearse (1)"),
    ("gpu", tuple(GPUS), None, None, "their type, for --plan (default: this machine's)"),
    ("rehearse", bool, False, None, "do not train; count what a step of one rank costs"),
    ("rank", int, 0, COUNT, "which one"),
    ("metrics", str, None, None, "write the flags and one JSON object per step to this file"),
    ("trace", str, None, None, "write what all ranks do in the last step here, for Perfetto"),
    ("timeout", int, 600, SECONDS, "seconds that a rank waits for another"),
)
OF_TRAINING = (  # flags that mean nothing where there is none
    *("data", "data_dtype", "save_every", "eval_every"),
    *("print_every", "metrics", "trace", "export"),
)
SUBJECTS = {  # flags that mean nothing but in this case
    "--cp of 2 or more": (lambda a: a.cp > 1, ["cp_method"]),
    "--ep-nodes of 2 or more": (lambda a: a.ep_nodes > 1, ["topk_nodes"]),
    "--schedule interleaved": (lambda a: a.schedule == "interleaved", ["chunks"]),
    "--dtype fp32 and a GPU": (lambda a: a.dtype == "fp32" and a.device != "cpu", ["tf32"]),
    "--checkpoint": (lambda a: a.checkpoint, ["save_every", "resume"]),
    "--experts": (
        lambda a: a.experts > 0,
        ["top_k", "capacity_factor", "shared_experts", "balance", "moe_every"],
    ),
    "GPT-2's architecture, without --experts": (lambda a: not a.experts, ["init_from", "export"]),
    "GPT-2's architecture, as many --kv-heads as --heads": (
        lambda a: a.kv_heads in (None, a.heads),
        ["init_from", "export"],
    ),
    "--init-from or --resume": (lambda a: a.init_from or a.resume, ["generate"]),
    "training, not --verify": (
        lambda a: not a.verify,
        [*OF_TRAINING, "topk_nodes", "capacity_factor", "dropout", "tf32"]
        + ["init_from", "generate", "sample", "checkpoint", "resume"],
    ),
    "--plan": (lambda a: a.plan, ["gpu"]),
    "--plan or --rehearse": (lambda a: a.plan or a.rehearse, ["gpus", "model"]),
    "training, not --plan": (
        lambda a: not a.plan,
        [*OF_TRAINING, "verify", "generate", "sample", "init_from", "checkpoint", "resume", "steps"]
        + ["ep_nodes", "tf32", "device", "backend", "collectives", "check_replicas"],
    ),
    "training, not --generate": (lambda a: not a.generate, OF_TRAINING),
    "--rehearse": (lambda a: a.rehearse, ["rank"]),
    "training, not --rehearse": (
        lambda a: not a.rehearse,
        [*OF_TRAINING, "verify", "generate", "init_from", "sample", "checkpoint", "resume", "tf32"]
        + ["device", "backend", "collectives", "timeout", "check_replicas", "steps"],
    ),
}
RULES = {  # how to say what is wrong, and whether it is; a rule may count on those before it
    "{rank} is not one of {gpus}": lambda a: a.rehearse and a.rank >= a.world_size,
    "{seed} must be less than 2**32": lambda a: a.seed >= 2**32,
    "{backend} is not possible with {device}": lambda a: a.backend == "nccl" and a.device == "cpu",
    "{pp} x {dp} x {cp} x {tp} is not the number of processes, {world_size}": lambda a: (
        a.pp * a.dp * a.cp * a.tp != a.world_size
    ),
    "{replicate} needs --zero 1, 2 or 3": lambda a: a.replicate > 1 and not a.zero,
    "{dp} x {cp} is not divisible by {replicate}": lambda a: a.dp * a.cp % a.replicate,
    "{hidden} is not divisible by {heads}": lambda a: a.hidden % a.heads,
    "{hidden} is not divisible by {tp}": lambda a: a.hidden % a.tp,
    "{ffn} is not divisible by {tp}": lambda a: (
        a.ffn % a.tp and (not a.experts or a.moe_every > 1)  # experts are not split
    ),
    "{heads} is not divisible by {tp}": lambda a: a.heads % a.tp,
    "{heads} is not divisible by {kv_heads}": lambda a: a.heads % a.kv_heads,
    "neither of {kv_heads} and {tp} divides the other": lambda a: (
        a.kv_heads % a.tp and a.tp % a.kv_heads
    ),
    "{seq_len} is not divisible by 2 x {cp}": lambda a: a.cp > 1 and a.seq_len % (2 * a.cp),
    "{seq_len} is not divisible by {cp} x {tp}, which with --sp split the sequence": lambda a: (
        a.sp and a.seq_len // a.cp % a.tp
    ),
    "{dropout} is not possible with {cp}": lambda a: a.cp > 1 and a.dropout,
    "{cp_method} cannot deal out {heads} and {kv_heads}, split by {tp}, to {cp}": lambda a: (
        a.cp_method == "ulysses" and not _deals_out(a.heads, a.kv_heads, a.tp, a.cp)
    ),
    "{dp} x {cp} x {tp} is not divisible by {ep}": lambda a: a.dp * a.cp * a.tp % a.ep,
    "{ep} needs --experts": lambda a: a.ep > 1 and not a.experts,
    "{experts} is not divisible by {ep}": lambda a: a.experts % a.ep,
    "{top_k} is more than {experts}": lambda a: a.experts and a.top_k > a.experts,
    "{ep} is not divisible by {ep_nodes}": lambda a: a.ep % a.ep_nodes,
    "{topk_nodes} is more than {ep_nodes}": lambda a: a.topk_nodes > a.ep_nodes,
    "{top_k} is more than {topk_nodes} of {ep_nodes} have of {experts}": lambda a: (
        a.experts and a.top_k > a.experts // a.ep_nodes * a.topk_nodes
    ),
    "{moe_every} leaves no layer of {layers} with experts": lambda a: (
        a.experts and a.moe_every > a.layers
    ),
    "{seq_len} is not divisible by {cp} x {tp}, which deal out the tokens to experts": lambda a: (
        a.experts and a.seq_len // a.cp % a.tp
    ),
    "{vocab_size} is less than {tp}": lambda a: a.vocab_size < a.tp,
    "{check_replicas} has no copies to compare with {zero}, {replicate} and {tp}": lambda a: (
        a.check_replicas and a.zero and a.replicate * a.tp == 1
    ),
    "{batch_size} is not divisible by {dp} x {microbatches}": lambda a: (
        a.batch_size % (a.dp * a.microbatches)
    ),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(message)


def _parser():
    about = "Train a small GPT on many processes."
    parser = _Parser(prog="hybrid.py", allow_abbrev=False, description=about)
    for name, kind, default, _, help in FLAGS:
        if default is not None and kind is not bool:
            help += f" (default: {default})"
        options = {"action": "store_const", "const": True} if kind is bool else {"type": kind}
        if isinstance(kind, tuple):
            options = {"type": type(kind[0]), "choices": kind}
        parser.add_argument(_shown(name, True), help=help, **options)
    return parser


def _shown(name, value):
    """A flag as it is typed."""
    dashed = "--" + name.replace("_", "-")
    return dashed if value is True else f"{dashed} {value}"


def read_flags(argv):
    """The flags, each checked for itself, and {name: value} of those that are given.

    Sizes that are not are those of --model.
    """
    args = _parser().parse_args(argv)
    given = {name: value for name, value in vars(args).items() if value is not None}
    for name, _, default, must_be, _ in FLAGS:
        setattr(args, name, given.get(name, default))
        if name in given and must_be and not must_be[0](given[name]):
            raise ValueError(f"{_shown(name, given[name])} {must_be[1]}")
    if args.model:
        vars(args).update(vars(MODELS[args.model].config) | given)
    for subject, (chosen, names) in SUBJECTS.items():
        for name in names:
            if name in given and not chosen(args):
                raise ValueError(f"{_shown(name, given[name])} needs {subject}")
    return args, given


def parse_args(argv, world_size):
    """The checked, completed command line. Raises ValueError, one line naming flags and values."""
    args, given = read_flags(argv)
    if args.rehearse and world_size > 1:
        raise ValueError("--rehearse runs in one process, not in those of torchrun")
    args.world_size = world_size = args.gpus or world_size
    args.dp = args.dp or max(1, world_size // (args.pp * args.cp * args.tp))
    if args.zero is None:
        args.zero = int(args.dp * args.cp > 1)
    args.kv_heads = args.kv_heads or args.heads
    of_model = min(args.topk_nodes or args.ep_nodes, args.ep_nodes)
    args.topk_nodes = given.get("topk_nodes", of_model)
    args.ffn = args.ffn or 4 * args.hidden
    complete_batch(args)
    shown = {name: _shown(name, value) for name, value in vars(args).items()}
    for sentence, is_wrong in RULES.items():
        if is_wrong(args):
            raise ValueError(sentence.format_map(shown | {"world_size": world_size}))
    make_schedule(args)
    if args.generate:
        prompt_tokens(args)
    return args


def complete_batch(args):
    """Choose --batch-size and --microbatches where they are not given.

    A pipeline has at most 4 microbatches a stage: of 1F1B's time the bubble is then a fifth.
    """
    most = 4 * args.pp if 1 < args.pp <= args.world_size else 1
    wanted = (m for m in range(args.pp, most + 1) if _is_defined(args, m))
    fewest = args.microbatches or next(wanted, args.pp)
    rows = args.dp * fewest
    args.batch_size = args.batch_size or math.ceil(16 / rows) * rows
    own = args.batch_size // args.dp
    fitting = (m for m in range(most, 0, -1) if own % m == 0 and _is_defined(args, m))
    args.microbatches = args.microbatches or next(fitting, fewest)


def _is_defined(args, microbatches):
    """Whether the schedule knows this number of microbatches."""
    with suppress(ValueError):
        make_schedule(argparse.Namespace(**vars(args) | {"microbatches": microbatches}))
        return True
    return False


def _deals_out(heads, kv_heads, tp, cp):
    """Whether Ulysses can give each rank of cp its heads of those of a rank of tp."""
    heads, kv_heads = heads // tp, max(1, kv_heads // tp)
    return heads % cp == 0 and (kv_heads % cp == 0 or cp % kv_heads == 0)


def make_schedule(args):
    """The pipeline's schedule. Raises ValueError where it is not defined for these flags."""
    sizes = {"pp": args.pp, "microbatches": args.microbatches}
    if args.schedule == "interleaved":
        sizes["chunks"] = args.chunks
    flags = " ".join(_shown(*flag) for flag in [("schedule", args.schedule), *sizes.items()])
    try:
        schedule = SCHEDULES[args.schedule](*sizes.values())
    except ValueError as error:
        raise ValueError(f"{flags}: {error}") from None
    stages = len(schedule.routes[0])
    if args.layers + 2 < stages:  # these may have no layer: the first one, and the last
        raise ValueError(f"--layers {args.layers} is too few for the {stages} stages of {flags}")
    return schedule


def choose_device(name, backend, local_rank, local_world_size):
    """This process's device, and the backend for it.

    NCCL wants a GPU for each process; `auto` takes it where as many are visible, "nccl" also where
    each process sees one of its own. With --device cuda and fewer, processes share them, and gloo
    carries their messages through host memory. Raises ValueError for what needs a GPU without one.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "nccl" and gpus == 0:
        raise ValueError("--backend nccl: there is no GPU on this machine")
    if name == "cuda" and gpus == 0:
        raise ValueError("--device cuda: there is no GPU on this machine")
    enough = gpus >= local_world_size or backend == "nccl"
    if name == "cpu" or (name == "auto" and not enough):
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(device)
    if backend == "auto":
        backend = "nccl" if enough else "gloo"
    return device, backend


def check_device(args, device):
    """ValueError for flags that mean nothing, or are not possible, on this device."""
    if args.tf32 and device.type == "cpu":
        raise ValueError("--tf32 needs --dtype fp32 and a GPU")
    width, multiple = args.hidden // args.heads, 8 if args.dtype == "bf16" else 4  # of 16 bytes
    if args.cp > 1 and args.cp_method != "ulysses" and device.type == "cuda" and width % multiple:
        raise ValueError(
            f"--cp {args.cp} --cp-method {args.cp_method} on a GPU: heads are {width} wide in "
            f"{args.dtype}, not a multiple of {multiple}"
        )


# ---- one process ---------------------------------------------------------------------------------

LAUNCHER = ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("TORCHELASTIC_RESTART_COUNT", 0)


def main(argv=None):
    """Run one rank, which torchrun numbers, or a world of one. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    rank, world_size, local_rank, attempt = (int(os.environ.get(*item)) for item in LAUNCHER)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if {"-h", "--help"} & set(argv):
        if rank == 0:
            _parser().print_help()
        return 0
    if "--plan" in argv:
        return plan(argv) if rank == 0 else 0
    if "--verify" in argv:
        argv = [*proof_flags(world_size), *argv]
    store = next(dist.rendezvous("env://"))[0] if "RANK" in os.environ else dist.HashStore()
    # torchrun's store still has the keys of the attempt before
    store, fault = dist.PrefixStore(f"attempt {attempt}", store), ""
    try:
        args = parse_args(argv, world_size)
        device, backend = choose_device(args.device, args.backend, local_rank, local_world_size)
        check_device(args, device)
        work = _prepare(args, argv, device, rank)
    except (ValueError, OSError) as error:
        fault = str(error)
    if _any_fault(fault, rank, world_size, store):
        return 2
    if args.rehearse:
        rehearse(args)
        return 0
    local_world_size = _join(args, device, backend, store, rank, local_world_size)
    try:
        status = work(local_world_size) or 0
    except TrainingError as error:
        status = error.status
        if rank == 0:
            _complain(f"{error.kind}: {error}")
    barrier()  # nobody closes its connections while another still uses them
    dist.destroy_process_group()
    return status


def _prepare(args, argv, device, rank):
    """What is to be done once all have met, work(ranks of a node); it may return an exit status.

    Raises ValueError or OSError for files that cannot be used.
    """
    if args.init_from:
        load_weights(args)
    if args.rehearse:
        return None
    if args.verify:
        return partial(verify, args, argv, device)
    if args.generate:
        return lambda ranks: generate(args, mesh_of(args, ranks), device)
    data = load_data(args.data, args.seq_len, args.data_dtype)
    files = _open_outputs(args) if rank == 0 else (None, None)
    return lambda ranks: train(args, mesh_of(args, ranks), device, data, *files)


def _open_outputs(args):
    """The files for metrics and for the trace, where they are asked for; that of --export later."""
    last = prepare_checkpoints(args) if args.checkpoint else None
    if args.export:
        check_export(args.export)
    if args.metrics and last:
        keep_metrics(args.metrics, int(last.name.removeprefix("step_")))
    metrics_file = args.metrics and open(args.metrics, "a" if last else "w")
    return metrics_file, args.trace and open(args.trace, "w")


def _join(args, device, backend, store, rank, local_world_size):
    """Meet the other processes; returns how many share a node, 1 where nodes are unlike."""
    if backend == "gloo":
        schedule_as_batch()
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=args.world_size,
        timeout=timedelta(seconds=args.timeout),
        device_id=device if backend == "nccl" else None,  # errors come early
    )
    report_stalls(30)
    every = gather_objects(local_world_size)
    if rank == 0 and spans_nodes(args.tp, every):
        _complain(f"warning: --tp {args.tp} spans nodes: every layer waits for the links between")
    return local_world_size if len(set(every)) == 1 else 1


def _any_fault(fault, rank, world_size, store):
    """Whether some rank has a fault. Rank 0 says the first one, before any rank knows.

    So it is said once, and before the first rank leaves, after which the launcher kills the others.
    """
    store.set(f"fault {rank}", fault)
    try:
        if rank == 0 and not fault:
            others = ((r, store.get(f"fault {r}").decode()) for r in range(1, world_size))
            fault = next((f"rank {r}: {theirs}" for r, theirs in others if theirs), "")
        if rank == 0:
            if fault:
                _complain(f"error: {fault}")
            store.set("fault", fault)
        return store.get("fault") != b""
    except dist.DistError:  # rank 0 has spoken, and gone with the store
        return True


def _leave_on_interrupt(rank):
    """Ctrl-C ends this process wherever it is, in a wait, too; rank 0 says so, nobody else.

    The ranks hear of it one after the other, and one that has not yet would miss those gone before:
    so nobody goes for a second, and nobody speaks any more.
    """
    heard, signalled = os.pipe()
    os.set_blocking(signalled, False)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.set_wakeup_fd(signalled)

    def leave():
        while os.read(heard, 1)[0] != signal.SIGINT:  # others have handlers, too
            pass
        if rank == 0:
            _complain("interrupted")
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        time.sleep(1)
        os._exit(128 + signal.SIGINT)

    threading.Thread(target=leave, daemon=True).start()


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as a shell's background jobs have it
        _leave_on_interrupt(int(os.environ.get("RANK", 0)))
    sys.exit(main())
