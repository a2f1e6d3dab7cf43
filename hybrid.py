"""Train a small GPT with pipeline, data, context, tensor and expert parallelism.

The processes form a grid with four axes. Each axis divides the work in its own way among the
processes whose coordinates differ on this axis only:

    axis          splits      sends
    pp  pipeline  layers      activations forward and gradients back, once per microbatch
    dp  data      sequences   gradients, and weights with ZeRO, at least once per step (zero.py)
    cp  context   positions   keys, values and their gradients, for every layer and microbatch
    tp  tensor    matrices    activations and gradients: four all-reduces per layer and microbatch

    rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank

where pp, dp, cp and tp are also the sizes of the axes. tp is innermost, as its ranks send most and
should share a node. A gradient is summed over the ranks that hold the same weight and have computed
different terms of its gradient. These are the ranks of dp x cp, and also those of tp where sequence
parallelism (--sp) or experts divide the tokens over tp. If the head is tied to the token embedding,
the first and the last stage sum its gradient, too.

A layer can have experts, which are MLPs of which each token uses only a few. tp does not split
them, so all ranks that have the layer would hold copies of its experts. Instead, these ranks form
groups of size ep. The ranks of a group divide the experts, and each token travels to its experts
and back. A group takes its ranks from tp first, and then from dp x cp, so ep is not another axis.

A rank holds   1/tp of its layers' matrices and 1/ep of their experts. ZeRO-1 splits the optimizer
               state over the ranks that hold the same weights, ZeRO-2 also gradients, and ZeRO-3
               also weights
It sends       what is listed above; the other files derive and count the bytes
Overlap        pp   activations travel while other microbatches compute
               dp   gradients are summed while backward still computes
               cp   keys and values travel while attention to the previous ones is computed (ring)
               tp   gradients of activations are summed while those of weights are computed
               ep   some tokens travel while experts compute others
PyTorch's      DTensor over a DeviceMesh combines all axes but pp. Here all tensors are plain

A layout is a choice of these four sizes, of ep, of ZeRO's stage, of the pipeline's schedule and of
--sp. Every layout computes what one process does, up to rounding. The loss is the sum of the token
losses divided by the *global* number of tokens, so gradients are summed and never averaged. Initial
weights depend only on the model and the seed, and a batch only on its shape, the data, the step and
the seed. Four things do depend on the layout: dropout masks, the tokens that full experts drop, the
experts that --topk-nodes rules out, and balance losses, which are computed for each microbatch.

The model is GPT-2 (Radford et al., 2019), down to its parameters' names, or Llama (Touvron et al.,
2023) under the same names. The grid of pp, dp and tp is from Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021.

plain_step() is a step over pp, dp and tp in its plain form, and Trainer.step() one over all axes.

    torchrun --nproc-per-node 8 hybrid.py --tp 2 --pp 2 --microbatches 4    # dp is 8 / (2 x 2) = 2
"""

import argparse
import ctypes
import fcntl
import gc
import hashlib
import itertools
import json
import math
import os
import resource
import shutil
import signal
import sys
import sysconfig
import time
from collections import ChainMap, Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, get_args

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.checkpoint import metadata, planner
from torch.utils._pytree import tree_leaves

from collectives import (
    all_reduce, any_rank, barrier, broadcast, gather_objects, rank_and_size,
    schedule_as_batch, set_backend_collectives, set_ranks_per_node,
)
from ddp import DistributedDataParallel, clip_grads_with_norm_, get_total_norm
from expert_parallel import MoE, Router
from pipeline import (
    NUM_CHUNKS, SCHEDULES, PairedPipeline, Pipeline, WeightGradStore, forward_only,
    one_f_one_b_step, sum_replicas,
)
from sequence_parallel import (
    context_positions, dropout, recompute, recompute_groups, run_layers, zigzag_allgather_attention,
    zigzag_ring_attention, zigzag_ulysses_attention,
)
from tensor_parallel import (
    ColumnParallelLinear, ParallelSelfAttention, RowParallelLinear, Shard, ShardedRandomState,
    VocabParallelEmbedding, attention, check_gradients_over_tp, column_parallel_linear,
    mark_sum_over_tp, split_attention, split_mlp, sum_gradients_over_tp,
    vocab_parallel_cross_entropy,
)
from zero import AdamW, FullyShardedDataParallel, check_elementwise

# ---- the idea ------------------------------------------------------------------------------------
#
# pp, dp and tp together, from the plain forms of the other files: each of pp x dp x tp processes
# holds a part of the layers and of their matrices, and computes on a part of the sequences.


def plain_groups(pp, dp, tp):
    """Create the groups of the grid, and return this rank's: {"pp": ..., "dp": ..., "tp": ...}.

    A group of an axis holds the ranks whose coordinates on the other two axes are equal. With pp 2,
    dp 2 and tp 2:

                      pp_rank 0    pp_rank 1
        dp_rank 0       0   1        4   5          groups of tp   0 1, 2 3, 4 5, 6 7
        dp_rank 1       2   3        6   7          groups of dp   0 2, 1 3, 4 6, 5 7
            tp_rank     0   1        0   1          groups of pp   0 4, 1 5, 2 6, 3 7

    Collective: each rank creates all groups, in the same order, also those that it is not in. With
    NCCL, pass a device_id to init_process_group(), so that a group connects when it is created.
    Otherwise its first message would wait for all its ranks, also for those that need not send it.
    """
    grid = torch.arange(pp * dp * tp).view(pp, dp, tp)
    groups = {}
    for axis, name in enumerate(("pp", "dp", "tp")):
        rows = grid.movedim(axis, 2).flatten(0, 1)  # a row for each group of this axis
        for ranks in rows.tolist():
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                groups[name] = group
    return groups


def plain_weights(V, T, D, layers):
    """Return the whole weights of a GPT, equal on ranks that call torch.manual_seed() alike.

    V, T and D: the numbers of tokens in the vocabulary, of positions and of columns.
    """
    draw = lambda *shape: 0.02 * torch.randn(shape)
    whole = {"tokens": draw(V, D), "positions": draw(T, D), "head": draw(V, D), "layers": []}
    for _ in range(layers):
        layer = {"qkv": draw(3, D, D), "out": draw(D, D)}
        layer |= {"up": draw(4 * D, D), "down": draw(D, 4 * D)}
        whole["layers"].append(layer)
    return whole


def plain_part(whole, dim, group):
    """Return this rank's part of a weight as a parameter. All ranks have the whole weight."""
    rank, P = rank_and_size(group)
    assert whole.size(dim) % P == 0, "the plain forms expect equal parts"
    return nn.Parameter(whole.chunk(P, dim)[rank].clone())


def plain_norm(x):
    """Apply LayerNorm without weights. Each rank does so to the whole of x."""
    return F.layer_norm(x, x.shape[-1:])


class PlainLayer(nn.Module):
    """This rank's part of a transformer layer: 1/P of its heads, and of its MLP's inner width.

    tp_group: the P ranks that share the layer.
    whole: one of the "layers" of plain_weights(). P divides the number of heads, each of which has
        K of the D columns.
    """

    def __init__(self, whole, K, tp_group):
        super().__init__()
        self.K = K
        self.tp_group = tp_group
        self.qkv = plain_part(whole["qkv"], 1, tp_group)  # (3, D/P, D): whole heads of q, k and v
        self.out = plain_part(whole["out"], 1, tp_group)  # (D, D/P)
        self.up = plain_part(whole["up"], 0, tp_group)  # (4 D/P, D)
        self.down = plain_part(whole["down"], 1, tp_group)  # (D, 4 D/P)

    def forward(self, x):
        """x and the result, (B, T, D), are the same on all ranks of tp."""
        x = x + split_attention(plain_norm(x), self.qkv, self.out, self.K, self.tp_group)
        return x + split_mlp(plain_norm(x), self.up, self.down, self.tp_group)


class PlainStage(nn.Module):
    """This rank's part of a GPT. pp divides the layers into stages, and tp each layer of a stage.

    whole: see plain_weights(). Every rank makes all of it and keeps its part. The embeddings and
        the head are not split over tp, and the head is not tied to the token embedding.
    """

    def __init__(self, whole, K, groups):
        super().__init__()
        stage, num_stages = rank_and_size(groups["pp"])
        self.is_first = stage == 0
        self.is_last = stage == num_stages - 1
        self.width = whole["tokens"].size(1)
        count = len(whole["layers"])
        assert count >= num_stages, "a stage would have no layer, so no parameters"
        begin = count * stage // num_stages
        end = count * (stage + 1) // num_stages
        own = whole["layers"][begin:end]
        self.layers = nn.Sequential(*[PlainLayer(layer, K, groups["tp"]) for layer in own])
        if self.is_first:
            self.tokens = nn.Parameter(whole["tokens"].clone())
            self.positions = nn.Parameter(whole["positions"].clone())
        if self.is_last:
            self.head = nn.Parameter(whole["head"].clone())

    def forward(self, x):
        """Tokens (B, T) enter the first stage, and the last returns logits (B, T, V).

        From stage to stage x is (B, T, D).
        """
        if self.is_first:
            x = F.embedding(x, self.tokens) + self.positions[: x.size(1)]
        x = self.layers(x)
        if self.is_last:
            x = F.linear(plain_norm(x), self.head)
        return x


def plain_step(stage, optimizer, tokens, microbatches, groups):
    """Take one step on tokens (B, T + 1), given to all ranks. Return the mean loss per token.

        stage = PlainStage(whole, K, groups)
        optimizer = torch.optim.AdamW(stage.parameters())
        for tokens in batches:  # the same on all ranks
            loss = plain_step(stage, optimizer, tokens, microbatches=4, groups=groups)

    tests/tools/plain_train.py trains with it. dp divides the B sequences without a remainder;
    microbatches may be unequal. All loss terms are divided by the number of tokens in the whole
    batch, so gradients are summed: over microbatches by autograd, and over dp by an all-reduce.
    Each rank then updates its own weights, for which AdamW needs nothing from other ranks.

    Gradients of weights need no sum over tp. qkv, out, up and down are parts that no other rank of
    the group has. tokens, positions and head are copies, which the ranks use for the same x, so
    each copy has the whole gradient. The layers themselves sum gradients of activations over tp.
    """
    dp_rank, dp = rank_and_size(groups["dp"])
    assert len(tokens) % dp == 0, "a rank would have fewer sequences than others"
    own = tokens.chunk(dp)[dp_rank]
    inputs = own[:, :-1].chunk(microbatches)
    targets = own[:, 1:].chunk(microbatches)
    if not stage.is_first:
        # Here an input only says which shape (B, T, D) and dtype the stage receives. Expanding a
        # single number takes no memory for the others.
        number = torch.empty((), device=tokens.device)
        inputs = [number.expand(*x.shape, stage.width) for x in inputs]

    def loss_fn(logits, target):
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
        return loss / tokens[:, 1:].numel()

    optimizer.zero_grad()
    # The layers' sums over tp take place inside this step. They match, because all ranks of a tp
    # group run the same forwards and backwards in the same order.
    losses = one_f_one_b_step(stage, inputs, targets, loss_fn, groups["pp"])
    for parameter in stage.parameters():
        all_reduce(parameter.grad, group=groups["dp"])
    optimizer.step()
    loss = sum(losses) if stage.is_last else torch.zeros((), device=tokens.device)
    all_reduce(loss, group=groups["dp"])
    all_reduce(loss, group=groups["pp"])  # the other stages add 0
    return loss.item()


# The other techniques replace (-) or add (+) a few lines each. tests/test_hybrid.py trains by each
# of these four:
#
# ZeRO-1   the optimizer's state is divided over dp. zero.py shows how the function `update` takes
#          the optimizer's place
#          -  optimizer.zero_grad()
#          +  stage.zero_grad()
#          -  for parameter in stage.parameters():
#          -      all_reduce(parameter.grad, group=groups["dp"])
#          -  optimizer.step()
#          +  sharded_step([*stage.parameters()], update, groups["dp"])
#          It averages gradients, so loss_fn divides by the number of tokens of one dp rank, and
#          the sum of losses is divided by dp.
#
# cp       one more axis, with groups["cp"]. A rank has 1/cp of the positions: of inputs and
#          targets, and of the parameter `positions`. In split_attention(), which also gets cp_group
#          -  y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
#          +  y = simple_allgather_attention(q, k, v, cp_group)
#          Losses and gradients are summed over dp x cp. The gradient of `positions`, of which each
#          cp rank has a part, is summed over dp alone.
#
# sp       x is (B, T/tp, D) between layers and between stages. PlainStage keeps the tp_group
#          +  x = scatter_to_group(x, 1, self.tp_group)  after the embeddings
#          +  x = gather_from_group(x, 1, self.tp_group)  before the head
#          -  copy_to_group(x, group)  in column_linear()
#          +  all_gather_to_group(x, 1, group)
#          -  reduce_from_group(F.linear(x, weight), group)  in row_linear()
#          +  reduce_scatter_to_group(F.linear(x, weight), 1, group)
#          -  inputs = [number.expand(*x.shape, stage.width) for x in inputs]
#          +  _, tp = rank_and_size(groups["tp"])
#          +  inputs = [number.expand(len(x), x.size(1) // tp, stage.width) for x in inputs]
#          If a norm has weights, each rank of tp uses them for its tokens only, so tp sums their
#          gradients, too.
#
# ep       each dp rank has one expert of every layer, which tp splits here. plain_weights() also
#          gets dp, and draws all experts
#          -  layer |= {"up": draw(4 * D, D), "down": draw(D, 4 * D)}
#          +  layer |= {"up": draw(dp, 4 * D, D), "down": draw(dp, D, 4 * D)}
#          +  layer |= {"router": draw(dp, D)}
#          PlainLayer also gets dp_group, and keeps one of the experts
#          -  self.up = plain_part(whole["up"], 0, tp_group)
#          -  self.down = plain_part(whole["down"], 1, tp_group)
#          +  self.dp_group = dp_group
#          +  own, _ = rank_and_size(dp_group)
#          +  self.up = plain_part(whole["up"][own], 0, tp_group)
#          +  self.down = plain_part(whole["down"][own], 1, tp_group)
#          +  self.router = nn.Parameter(whole["router"].clone())
#          -  return x + split_mlp(plain_norm(x), self.up, self.down, self.tp_group)
#          +  expert = lambda rows: split_mlp(rows, self.up, self.down, self.tp_group)
#          +  y = switch_layer(plain_norm(x).flatten(0, 1), self.router, expert, self.dp_group)
#          +  return x + y.view_as(x)
#          -  for parameter in stage.parameters():
#          -      all_reduce(parameter.grad, group=groups["dp"])
#          +  for name, parameter in stage.named_parameters():
#          +      if not name.endswith(("up", "down")):
#          +          all_reduce(parameter.grad, group=groups["dp"])
#          The gradient of an expert has come from the tokens of all dp ranks. The other dp ranks
#          have other experts, so a sum over dp would add up gradients of different weights.
#
# The same holds for what a training run adds:
#
# vocabulary   split_embedding(), column_linear() and split_cross_entropy() take the places of
#              embedding, head and loss. Their weights are plain_part(whole["tokens"], 0, tp_group)
#              and the same part of the head. So tp must divide the vocabulary
# tied head    tokens on the first stage and head on the last begin equal, and their gradients are
#              summed over the two, so they stay equal. All ranks create these groups of two
# clipping     the norm's squares are summed over pp and tp, those of experts also over dp, that of
#              `positions` also over cp. What all ranks of tp have a copy of counts on one of them,
#              and a tied weight on one of its stages
#
# Where two of them meet:
#
# sp, vocabulary     column_linear() of the head gathers x, so gather_from_group() is left out
# sp, ep             do not combine here: tp's ranks share an expert, and send it unlike tokens
# cp, ep             experts' gradients are summed over cp alone
# ZeRO-1, cp         all gradients but that of `positions` are summed over cp before sharded_step()
# ZeRO-1, ep         sharded_step() gets all parameters but experts', whose gradients are divided
#                    by dp and which a plain optimizer updates
# ZeRO-1, clipping   happens in sharded_step() between the sum and the update, where the squares of
#                    shards are summed over dp, too
#
# One rule covers all of them: sum a gradient over the ranks that hold the same weight and have
# computed different terms of its gradient.

# ==== upper floor =================================================================================
#
# plain_step() trains over three axes. What follows trains over all of them, with ZeRO,
# recomputation and any schedule, and with messages that travel beside the computation. Its loop is
#
#     trainer = Trainer(args, make_mesh(args, device=device), device)
#     while trainer.steps_done < args.steps:
#         trainer.step(*trainer.batch_of(data, trainer.steps_done))
#
# args are the flags of the command line, such as args.tp for --tp. The class Args says what each of
# them means, as `python hybrid.py --help` does. The sections build the loop up in the order of the
# plain forms:
#
#     plain_groups()                     mesh: make_mesh(), slices_of()
#     PlainStage, PlainLayer             model: GPT, Block
#     the rule for sums                  where each parameter lives: Home, Placement
#     plain_weights(), plain_part()      initial values: a rank draws those of its parts only
#     layers[begin:end]                  stages: any schedule, and layers divided by their cost
#     the all-reduces of gradients       chunks: DDP or FSDP, which start them in backward
#     torch.optim.AdamW                  the optimizer: the same, on ZeRO's pieces of parameters
#     plain_step(), one_f_one_b_step()   one step: Trainer.step(), Pipeline.step()
#
# The technique ends at "services", where train() is the loop of a long run. Of what stands below
# that line it uses only flags, an Args, and batches of a Data. Four words are used in all sections:
#
#     stage      consecutive layers. The first stage also has the embeddings, the last one the head
#     chunk      the module of a stage. Some schedules, such as DualPipe, give a rank several chunks
#     replica    a complete model: one for each rank of dp x cp, and two in a pipeline of DualPipe
#     copy       the same elements of a parameter on another rank, or in another chunk

# ---- mesh ----------------------------------------------------------------------------------------


class Mesh(SimpleNamespace):
    """The groups of this process. Its rank in the group of an axis is its coordinate on this axis.

    Axes, of which plain_groups() draws three for 8 ranks:

        pp_group, dp_group, cp_group, tp_group    the ranks that differ on this axis only
        embedding_group      the first and the last rank of pp_group; others have no such group

    Gradients and ZeRO, here with dp 4 and --replicate 2 on 4 ranks:

        dp_cp_group          0 1 2 3              the ranks of dp x cp, which sum their gradients
        shard_group          0 1, 2 3             neighbours in it that together hold all shards
        replicate_group      0 2, 1 3             ranks in it that hold the same shard

    Layers with experts: see slices_of_experts().
    """


GRADIENT_GROUPS = {  # over which DDP and ZeRO sum gradients
    "dp_cp_group", "shard_group", "replicate_group",
    "expert_dp_group", "expert_shard_group", "expert_replicate_group",
}  # fmt: skip


def make_mesh(args, groups=None, device=torch.device("cpu")):
    """Create all groups of the grid and return this process's Mesh. Collective.

    Every rank creates every group, also those that it is not in, in the order of slices_of(). Names
    with the same ranks share a group, since on GPUs a group takes memory for each peer. But
    gradients have groups of their own: the operations of a group run in order, and layers' messages
    should not wait for gradients. groups: those of earlier meshes, to be used again.
    """
    rank = dist.get_rank()
    groups = {} if groups is None else groups
    gpu = device if over_nccl(args, device) else None
    own = {}
    degrees = args.pp, args.dp, args.cp, args.tp, args.ep, args.ep_nodes, args.replicate
    for name, slices in slices_of(*degrees).items():
        # without experts, layers send nothing over dp_group, so it may share a group of gradients
        carries_gradients = name in GRADIENT_GROUPS or (name == "dp_group" and not args.experts)
        for ranks in map(tuple, slices.tolist()):
            # a group of one sends nothing, so its rank alone creates it, and one serves all names
            is_alone = len(ranks) == 1
            if is_alone and rank not in ranks:
                continue
            key = (ranks, carries_gradients and not is_alone)
            if key not in groups:
                groups[key] = make_group(ranks, timedelta(seconds=args.timeout), gpu)
            if rank in ranks:
                own[name] = groups[key]
        if name in own:
            # our collectives work inside a node first, and then between nodes
            set_ranks_per_node(ranks_on_one_node(slices, args.per_node), own[name])
            if args.collectives == "backend":  # PyTorch's own, for comparison
                set_backend_collectives(own[name])
    barrier()  # no rank may end, and close its connections, while others still make theirs
    return Mesh(**own)


def make_group(ranks, timeout, gpu=None):
    """Create a group. All ranks must call this, but a group of one is created by its rank alone.

    On a GPU it has NCCL, on a stream of high priority, so that messages do not wait for kernels of
    the computation. Otherwise, and if it has one rank, it has the backend of the world, gloo.
    """
    is_alone = len(ranks) == 1
    if is_alone or gpu is None:
        return dist.new_group(ranks, timeout, use_local_synchronization=is_alone)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # new_group() warns if it differs
    return dist.new_group(ranks, timeout, "nccl", options, device_id=gpu)  # connects now


def over_nccl(args, device):
    """Return whether messages go over NCCL, for which each process needs a GPU of its own."""
    return device.type == "cuda" and args.device != "shared"


def ranks_on_one_node(slices, per_node):
    """Return how many ranks of a group share a node, or 1 if this is not the same everywhere.

    Copies of a weight get equal bits only if all groups of an axis sum in the same order, which
    depends on this number. With tp 4 and 6 ranks per node, ranks 0 to 3 share a node and 4 to 7 are
    on two, so it is 1 for both groups.
    """
    nodes = slices // per_node
    sizes = {size for row in nodes.tolist() for size in Counter(row).values()}
    return min(sizes) if len(sizes) == 1 else 1


def slices_of(pp, dp, cp, tp, ep=1, ep_nodes=1, replicate=1):
    """Cut the grid (pp, dp, cp, tp) into groups. Return {name in Mesh: ranks}, one row per group.

    replicate: the number of ranks in a dp_cp_group that hold the same shard.
    ep, ep_nodes: see slices_of_experts().
    """
    grid = torch.arange(pp * dp * cp * tp).view(pp, dp, cp, tp)
    ends = grid[[0, -1]] if pp > 1 else grid
    dp_cp_groups = along(grid, 1, 2)
    slices = {
        "pp_group": along(grid, 0),
        "dp_group": along(grid, 1),
        "cp_group": along(grid, 2),
        "tp_group": along(grid, 3),
        "embedding_group": along(ends, 0),
        "dp_cp_group": dp_cp_groups,
        "shard_group": neighbours(dp_cp_groups, replicate),
        "replicate_group": counterparts(dp_cp_groups, replicate),
    }
    return slices | slices_of_experts(grid, ep, ep_nodes, replicate)


def slices_of_experts(grid, ep, ep_nodes, replicate):
    """Cut the grid into the groups of layers with experts.

    The ranks of dp x cp x tp have the same layers. Each row below is a tp_group. The rows are cut
    into blocks of ep ranks, which divide the experts. A block has gcd(ep, tp) columns, as ranks of
    tp share a node, and ep / gcd(ep, tp) rows. On 8 ranks with pp 1:

                         tp 2, ep 4          tp 4, ep 2
                          0 1                 0 1 | 2 3
                          2 3                -----+-----
                         -----                4 5 | 6 7
                          4 5
                          6 7

        ep_group         0 1 2 3, 4 5 6 7    0 1, 2 3, 4 5, 6 7  the ranks of a block
        expert_dp_group  0 4, 1 5, 2 6, 3 7  0 4, 1 5, 2 6, 3 7  a place in blocks under each other
        expert_tp_group  each rank alone     0 2, 1 3, 4 6, 5 7  a place in blocks side by side

    Ranks at the same place in their blocks have the same experts. expert_shard_group and
    expert_replicate_group divide an expert_dp_group, as shard_group and replicate_group divide a
    dp_cp_group. gcd(replicate, its size) of its ranks hold the same shard. ep_nodes, node_group and
    cross_group: see nodes_of_experts().
    """
    pp, *_, tp = grid.shape
    columns = math.gcd(ep, tp)
    rows = ep // columns
    # rows divides dp x cp, as it shares no factor with tp // columns and ep divides dp x cp x tp
    blocks = grid.view(pp, -1, rows, tp // columns, columns)  # (pp, down, row, across, column)
    ep_groups = along(blocks, 2, 4)
    expert_dp_groups = along(blocks, 1)
    expert_replicate = math.gcd(replicate, expert_dp_groups.shape[1])
    return {
        "ep_group": ep_groups,
        "expert_dp_group": expert_dp_groups,
        "expert_shard_group": neighbours(expert_dp_groups, expert_replicate),
        "expert_replicate_group": counterparts(expert_dp_groups, expert_replicate),
        "expert_tp_group": along(blocks, 3),
        "node_group": neighbours(ep_groups, ep_nodes),
        "cross_group": counterparts(ep_groups, ep_nodes),
    }


def nodes_of_experts(args):
    """Return ep_nodes: into how many equal pieces to cut an ep_group, so that none crosses a node.

    This is the number of its nodes if each has equally many of its ranks.

    With ep 8 on two nodes of 4 ranks:

        node_group           0 1 2 3, 4 5 6 7     its ranks on one node
        cross_group          0 4, 1 5, 2 6, 3 7   its ranks with the same rank in their node_group
    """
    columns = math.gcd(args.ep, args.tp)  # of the ep_group as a block, see slices_of_experts()
    rows = args.ep // columns
    if args.per_node % args.tp == 0:  # a node has whole tp_groups, which are rows
        return rows // math.gcd(rows, args.per_node // args.tp)
    return args.ep // math.gcd(columns, args.per_node)


def along(grid, *dims):
    """Return a row for each group along these dims: ranks whose other coordinates are equal."""
    last = range(-len(dims), 0)
    return grid.movedim(dims, tuple(last)).flatten(-len(dims)).flatten(0, -2)


def neighbours(groups, count):
    """Cut each group into `count` groups of neighbours. With 2, 0 2 4 6 becomes 0 2 and 4 6."""
    return groups.reshape(-1, groups.shape[1] // count)


def counterparts(groups, count):
    """Group the first of all neighbours(), the second, and so on. 0 2 4 6 becomes 0 4 and 2 6."""
    return groups.unflatten(1, (count, -1)).mT.flatten(0, 1)


# ---- model ---------------------------------------------------------------------------------------
#
# The two blocks, for a token at position t:
#
#                    --block gpt2                     --block llama
#     norms          LayerNorm                        RMSNorm
#     positions      wpe[t] is added to wte[token]    each layer rotates q and k by an angle ~ t
#     MLP, expert    W_out gelu(W_in x)               W_out (silu(W_gate x) * W_up x), "SwiGLU"
#     biases         in norms, attention and MLPs     none
#     head           the embedding's weight           a weight of its own
#
# Its layers are those of tensor_parallel.py and expert_parallel.py. What other sections must know
# of a parameter is declared on the module that has it:
#
#     set_shard()           its part, in tensor_parallel.py; for experts, make_moe() does
#     mark_sum_over_tp()    that its gradient is summed over tp
#     declare()             its initial value, and whether it belongs to experts
#     GPT.tied              that the head has the embedding's weight


class Normal(NamedTuple):
    """An initial value: numbers from a normal distribution with mean 0."""

    std: float = 0.02  # as in nanoGPT


def declare(module, is_expert=False, **initial):
    """Say how a module's own parameters and buffers begin, and where they live. Return the module.

        declare(nn.LayerNorm(D), weight=1.0, bias=0.0)

    initial: {name: value}, where a value is a Normal, or a number for all elements.
    is_expert: whether the module holds this rank's experts, which have a Home of their own.
    """
    module.initial = initial
    module.is_expert = is_expert
    return module


def flag(default, help, **details):
    """Declare a dataclass field that is also a flag of the command line.

    details: choices, or the bounds of a number, which must be in [least, below). By default, least
        is 1, or 0 for a float, and below is 2**31, or infinity for a float.
    """
    return field(default=default, metadata={"help": help} | details)


@dataclass(frozen=True)
class GPTConfig:
    """What defines a GPT, and how its layers save memory. Args adds the flags of a run.

    Letters in the shapes of what a rank computes:

        B   sequences of a microbatch      D   hidden        H   heads / tp
        T   seq_len / cp                   F   mlp_width     K   hidden / heads, a head's width
        V   vocab_size
    """

    layers: int = flag(4, "number of transformer layers", below=10**5)
    hidden: int = flag(128, "width of the model")
    heads: int = flag(4, "attention heads")
    seq_len: int = flag(64, "tokens in a sequence")
    vocab_size: int = flag(256, "tokens in the vocabulary")
    dropout: float = flag(0.0, "dropout in attention and residuals", below=1)
    kv_heads: int | None = flag(None, "heads of keys and values (default: --heads)")
    ffn: int | None = flag(None, "inner width of an MLP or expert (default: 4 x --hidden)")
    block: str = flag("gpt2", "GPT-2's or Llama's layers", choices=("gpt2", "llama"))
    rope_theta: float = flag(10000.0, "base of rotary positions' angles", least=1)
    head: str | None = flag(
        None, "tied to the embedding (default: with gpt2)", choices=("tied", "untied")
    )
    experts: int = flag(0, "experts in a layer, or 0 for an MLP", least=0)
    top_k: int = flag(2, "experts that a token uses")
    shared_experts: int = flag(0, "experts that every token uses in addition", least=0)
    capacity_factor: float | None = flag(None, "limit of an expert's load / mean load", least=0.01)
    balance: str = flag(
        "aux", "balance experts by losses or a bias", choices=("aux", "bias", "none")
    )
    moe_every: int = flag(1, "one layer in this many has experts")
    topk_nodes: int | None = flag(None, "nodes whose experts a token may use (default: all)")
    sp: bool = flag(False, "sequence parallelism: split activations over tp, too")
    recompute: str = flag(
        "none", "recompute attention (selective) or layers (full) in backward",
        choices=("none", "selective", "full"),
    )  # fmt: skip
    recompute_layers: int = flag(1, "layers that --recompute full recomputes as one")

    @property
    def mlp_width(self):
        """F, the inner width of the MLP and of every expert."""
        return self.ffn or 4 * self.hidden

    @property
    def is_llama(self):
        return self.block == "llama"

    @property
    def is_tied(self):
        """Whether the head has the embedding's weight."""
        return (self.head or usual_head(self.block)) == "tied"

    @property
    def into_residual(self):
        """The initial value of a matrix whose products are added to the residual: 2 per layer."""
        return Normal(0.02 / math.sqrt(2 * self.layers))

    def has_experts(self, layer):
        """Return whether this layer has experts in place of an MLP."""
        return self.experts > 0 and (layer + 1) % self.moe_every == 0


def usual_head(block):
    """Return the default of --head."""
    return "untied" if block == "llama" else "tied"


def make_norm(config):
    """Create the norm of a block."""
    if config.is_llama:
        norm = nn.RMSNorm(config.hidden, eps=1e-5)
    else:
        norm = nn.LayerNorm(config.hidden)
    return of_own_tokens(declare(norm, weight=1.0, bias=0.0), config)


def of_own_tokens(module, config):
    """With sp, mark a module as one whose gradients cover this rank's tokens only. Return it."""
    return mark_sum_over_tp(module) if config.sp else module


class RotaryPositions:
    """Rotates queries and keys by their positions (Su et al., "RoFormer", 2021).

    Elements i and i + K/2 of a head are the two coordinates of a point, as in Hugging Face's Llama.
    At position t the point turns by the angle t / theta^(2i/K). A product q . k then depends on the
    difference of the two positions only. positions: the T positions that this rank of cp holds.
    """

    def __init__(self, width, theta, positions):
        even = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device)
        angles = positions.unsqueeze(1) * theta ** (-even / width)  # (T, K/2)
        dtype = torch.get_default_dtype()
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def rotate(self, x):
        """Rotate x, (B, H, T, K). 16-bit x are rotated in fp32."""
        a, b = x.to(torch.promote_types(x.dtype, self.cos.dtype)).chunk(2, -1)
        rotated = a * self.cos - b * self.sin, b * self.cos + a * self.sin
        return torch.cat(rotated, -1).to(x.dtype)


class Parallel(NamedTuple):
    """What the layers of a stage need on this rank, besides the GPTConfig."""

    tp_group: dist.ProcessGroup | None = None  # the ranks that split the layers
    random: AbstractContextManager = nullcontext()  # or ShardedRandomState: masks differ over tp
    attention_fn: Callable = attention  # attention_fn(q, k, v, dropout probability)
    defer: WeightGradStore | None = None  # the `deferred` of make_chunks(), if any
    make_moe: Callable | None = None  # make_moe() creates the mixture of experts of a layer


def residual_dropout(x, config, random, training):
    """Apply dropout. With sp the ranks of tp draw different masks, otherwise the same one."""
    differs = config.sp and config.dropout > 0 and training
    with random if differs else nullcontext():
        return dropout(x, config.dropout, training)


class SwiGLU(nn.Module):
    """Map (..., 2F), gate and up, to silu(gate) * up, (..., F) (Shazeer, 2020)."""

    def forward(self, x):
        return _SwiGLU.apply(x)


class _SwiGLU(torch.autograd.Function):
    """Compute silu(gate) * up. Only gate and up are saved; backward computes silu(gate) again."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, -1)
        torch.mul(dy, F.silu(gate), out=dup)
        torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=dgate)
        return dx


class MLP(nn.Module):
    """A column-parallel layer to width F, GELU, and a row-parallel layer back to width D.

    Llama's column-parallel layer computes two outputs of width F, gate and up, for SwiGLU. tp
    splits each of them, so that a rank has the same part of both. options: those of the layers.
    """

    def __init__(self, config, **options):
        super().__init__()
        hidden, width = config.hidden, config.mlp_width
        if config.is_llama:
            self.c_fc = ColumnParallelLinear(hidden, (width, width), **options)
            self.activation = SwiGLU()
        else:
            self.c_fc = ColumnParallelLinear(hidden, width, **options)
            self.activation = nn.GELU(approximate="tanh")
        self.c_proj = RowParallelLinear(width, hidden, **options)
        declare(self.c_fc, weight=Normal(), bias=0.0)
        declare(self.c_proj, weight=config.into_residual, bias=0.0)

    def forward(self, x):
        return self.c_proj(self.activation(self.c_fc(x)))


class Block(nn.Module):
    """A pre-norm transformer layer, (T, B, D) -> (T, B, D). T comes first, as sp divides dim 0.

    parallel: a Parallel.
    rotary: RotaryPositions, for Llama.
    has_experts: whether the layer has a mixture of experts in place of an MLP.
    """

    def __init__(self, config, parallel=Parallel(), rotary=None, has_experts=False):
        super().__init__()
        self.config, self.rotary = config, rotary
        self.random, self.attention_fn = parallel.random, parallel.attention_fn
        options = {"group": parallel.tp_group, "defer": parallel.defer}
        options |= {"sequence_parallel": config.sp, "bias": not config.is_llama}
        sizes = config.hidden, config.heads, config.kv_heads
        attend = self.attend
        if config.recompute == "selective":
            attend = partial(recompute, self.attend)
        self.ln_1 = make_norm(config)
        self.attn = ParallelSelfAttention(*sizes, attend, **options)
        declare(self.attn.c_attn, weight=Normal(), bias=0.0)
        declare(self.attn.c_proj, weight=config.into_residual, bias=0.0)
        self.ln_2 = make_norm(config)
        self.mlp = parallel.make_moe() if has_experts else MLP(config, **options)

    def forward(self, x):
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))

    def drop(self, x):
        return residual_dropout(x, self.config, self.random, self.training)

    def attend(self, q, k, v):
        """Compute attention. Heads are split over tp, so every rank draws its own mask."""
        if self.rotary:
            q, k = self.rotary.rotate(q), self.rotary.rotate(k)
            v = v.contiguous()  # as a view it would keep c_attn's output, q and k included
        p = self.config.dropout if self.training else 0.0
        with self.random if p else nullcontext():
            return self.attention_fn(q, k, v, p)


def make_moe(args, mesh):
    """Create the mixture of experts of a layer, (T, B, D) -> (T, B, D)."""
    losses = {}
    if args.balance == "aux":  # loads should be equal, and the router's logits small
        losses["balance_coefficient"] = 0.01  # Switch Transformer's (Fedus et al., 2021)
        losses["z_coefficient"] = 0.001  # ST-MoE's (Zoph et al., 2022)
    layer = MoE(
        args.hidden, args.mlp_width, args.experts, args.top_k, mesh.ep_group,
        tp_group=None if args.sp else mesh.tp_group,  # without sp, MoE divides the tokens over tp
        # what the experts are
        shared_experts=args.shared_experts, gated=args.is_llama,
        activation=SwiGLU() if args.is_llama else None,
        # which of them a token may use, those of how many nodes, and how many tokens one takes
        score="sigmoid" if args.balance == "bias" else "softmax",
        n_group=args.ep_nodes, topk_group=args.topk_nodes, capacity_factor=args.capacity_factor,
        # balance: loads are summed over these groups
        balance_groups=(mesh.dp_group, mesh.cp_group, mesh.tp_group), **losses,
        loss_scale=1 / args.microbatches,
        # messages: once per node, and in parts, of which one travels while another is computed
        nodes=(mesh.node_group, mesh.cross_group) if args.ep_nodes > 1 else None,
        parts=args.expert_parts or parts_of_experts(args),
    )  # fmt: skip
    shard = Shard(0, (args.experts,), mesh.ep_group)
    layer.experts.shards = {"w_in": shard, "w_out": shard}
    declare(layer.experts, is_expert=True, w_in=Normal(), w_out=args.into_residual)
    declare(layer.router, weight=Normal(), bias=0.0)  # bias: the buffer of --balance bias
    if layer.shared is not None:
        w_in, _, w_out = layer.shared  # and the activation
        declare(w_in, weight=Normal())
        declare(w_out, weight=args.into_residual)
    return mark_sum_over_tp(layer)  # a rank's gradients cover its own tokens only


def parts_of_experts(args):
    """Return the default of --expert-parts, the same on all ranks.

    It is 2 if a rank sends at least 1 MiB to each other rank of ep in a dispatch. Halves of such a
    message still take far longer than its start.
    """
    rows = args.batch_size // (args.dp * args.microbatches)
    tokens = rows * args.seq_len // (args.cp * args.tp)
    itemsize = 2 if args.dtype == "bf16" else 4
    nbytes = tokens * args.top_k * args.hidden * itemsize // args.ep
    return 2 if args.ep > 1 and nbytes >= 2**20 else 1


class GPT(nn.Module):
    """One stage of a GPT. Its layers are numbered as in the whole model.

    Stages pass on activations (T, B, D), or (T/tp, B, D) with sp. The first takes tokens (B, T),
    and the last returns logits (T, B, V/tp). A tied head has the weight of the token embedding, of
    which the last of several stages has a copy. Trainer.sum_shared_gradients() keeps them equal.

    parallel: a Parallel.
    positions: the T positions of each sequence that this rank of cp holds.
    layers: the range of its layers.
    activation_positions: those of its activations between layers, with sp T/tp of the T.
    tied: {name of a tied head's weight: that of the embedding}, whichever stages have them.
    vocab_start: the first column of the logits of the last stage on this rank of tp.
    """

    def __init__(self, config, parallel, positions, layers, is_first, is_last):
        super().__init__()
        self.config, self.parallel = config, parallel
        self.is_first = is_first
        self.is_last = is_last
        self.tied = {"lm_head.weight": "transformer.wte.weight"} if config.is_tied else {}
        self.activation_positions = positions
        if config.sp:
            rank, tp = rank_and_size(parallel.tp_group)
            self.activation_positions = positions.chunk(tp)[rank]
        rotary = None
        if config.is_llama:
            rotary = RotaryPositions(config.hidden // config.heads, config.rope_theta, positions)

        def embedding():
            sizes = config.vocab_size, config.hidden
            table = VocabParallelEmbedding(*sizes, parallel.tp_group, config.sp)
            return declare(table, weight=Normal())

        self.transformer = nn.ModuleDict()
        if self.is_first:
            self.transformer["wte"] = embedding()
        if self.is_first and not config.is_llama:
            wpe = declare(nn.Embedding(config.seq_len, config.hidden), weight=Normal())
            self.transformer["wpe"] = of_own_tokens(wpe, config)
        self.transformer["h"] = nn.ModuleDict()
        for i in layers:
            block = Block(config, parallel, rotary, config.has_experts(i))
            self.transformer["h"][str(i)] = block
        if self.is_last:
            self.transformer["ln_f"] = make_norm(config)
            has_original = self.is_first and config.is_tied
            # the head is an embedding module, of which forward() uses the weight only
            self.lm_head = self.transformer["wte"] if has_original else embedding()
            self.vocab_start = self.lm_head.start

    def forward(self, x):
        if self.is_first:
            x = self.transformer["wte"](x.t())
            if not self.config.is_llama:
                x = x + self.transformer["wpe"](self.activation_positions).unsqueeze(1)
            x = residual_dropout(x, self.config, self.parallel.random, self.training)
        layers = list(self.transformer["h"].values())
        if self.config.recompute == "full":
            x = recompute_groups(layers, self.config.recompute_layers, x)
        else:
            x = run_layers(layers, x)
        if self.is_last:
            x = self.transformer["ln_f"](x)
            x = column_parallel_linear(
                x, self.lm_head.weight, group=self.parallel.tp_group,
                sequence_parallel=self.config.sp, defer=self.parallel.defer,
            )  # (T, B, V/tp)  # fmt: skip
        return x


# ---- where each parameter lives ------------------------------------------------------------------
#
# Four words say how much of a parameter is meant:
#
#     whole      a parameter as one process would have it
#     part       the rows, columns or experts of a whole that tp or ep gives to a rank. If nothing
#                splits a parameter, the part is the whole
#     shard      an equal share of a flat tensor into which ZeRO packs the parts of many parameters
#     piece      the elements of one part that lie in this rank's shard, possibly none. It has as
#                many dims as the part: n elements of a matrix are (n, 1)
#
# tensor_parallel.py follows PyTorch: its class Shard describes a part, and set_shard() makes one.
#
# A gradient is summed over the ranks that hold the same part and have computed different terms of
# its gradient. Weights are (outputs, inputs), so a column-parallel layer splits rows. In braces are
# the ranks for rank 0 of 8 with `--pp 2 --tp 2 --sp`, so that dp is 2:
#
#     parameter                  split over            its gradient is summed over
#     wte, lm_head               tp {0 1}, by rows     dp x cp {0 2}, and if tied, both stages {0 4}
#     c_attn, c_fc, with biases  tp {0 1}, by rows     dp x cp {0 2}
#     c_proj.weight              tp {0 1}, by columns  dp x cp {0 2}
#     c_proj.bias, ln_*, wpe     nothing               dp x cp {0 2}, then, with --sp, tp {0 1}
#     router, shared experts     nothing               dp x cp {0 2}, then tp {0 1}
#     w_in, w_out of experts     ep, by experts        expert_dp_group, then expert_tp_group
#
# With DualPipe, gradients are also summed over the two ranks of pp that hold the same stage.
# tests/tools/placement.py prints the table for a rank of any layout.
#
# placements_of() collects what modules declare in Placements, which serve initial values, ZeRO's
# groups, the sums over tp and of the tied weight, the norm, and checkpoints.


@dataclass(frozen=True, eq=False)
class Home:
    """The groups of one kind of parameter. Experts have one Home, and all others have another."""

    split_group: dist.ProcessGroup  # its ranks have different parts
    tp_group: dist.ProcessGroup  # ranks of tp that have the same part, if they do not split it
    dp_cp_group: dist.ProcessGroup  # ranks of dp x cp that have the same part
    shard_group: dist.ProcessGroup  # over its ranks ZeRO cuts a part
    replicate_group: dist.ProcessGroup  # its ranks have the same shard


class Homes(NamedTuple):
    """The Home of all parameters but experts, and that of experts."""

    dense: Home
    experts: Home


def homes_of(mesh):
    """Return the Homes of a Mesh."""
    dense = Home(
        split_group=mesh.tp_group, tp_group=mesh.tp_group, dp_cp_group=mesh.dp_cp_group,
        shard_group=mesh.shard_group, replicate_group=mesh.replicate_group,
    )  # fmt: skip
    experts = Home(
        split_group=mesh.ep_group, tp_group=mesh.expert_tp_group, dp_cp_group=mesh.expert_dp_group,
        shard_group=mesh.expert_shard_group, replicate_group=mesh.expert_replicate_group,
    )  # fmt: skip
    return Homes(dense, experts)


@dataclass(frozen=True, eq=False)
class Placement:
    """Where a parameter or buffer of this rank lives, and what it begins with.

    Checkpoints save originals, of which other chunks may have copies. In the norm of the gradients
    each element of a parameter counts once:

                                               is_tied  is_original  counts on
        split over tp, or an expert            no       yes          all ranks of split_group
        not split                              no       yes          the first rank of split_group
        the token embedding, if head is tied   yes      yes          all ranks of split_group
        a tied head on another stage           yes      no           no rank
        all of DualPipe's second replica       as above no           no rank
    """

    name: str  # in the whole model. A tied head has the embedding's
    module: nn.Module  # has it as its `attribute`, which ZeRO replaces by this rank's piece
    attribute: str
    chunk: int  # the number of its chunk
    initial: object  # its initial value, see declare()
    home: Home
    part: Shard | None  # which part of the whole this rank has; None for all of it
    sum_over_tp: bool  # whether home.tp_group sums its gradient, see mark_sum_over_tp()
    is_tied: bool  # embedding and head share it. If two chunks have it, they sum its gradient
    is_original: bool  # False if another chunk has the original
    is_buffer: bool  # a buffer, such as the bias of a router

    @property
    def tensor(self):
        return getattr(self.module, self.attribute)

    @property
    def counts(self):
        """Whether this rank counts its gradient in the norm."""
        if self.is_buffer or not self.is_original:
            return False
        return self.part is not None or dist.get_rank(self.home.split_group) == 0


def placements_of(chunks, homes, replicated):
    """Return a Placement for each parameter and buffer of this rank's chunks.

    replicated: whether the second chunk belongs to a second replica of the model.
    """
    placements = []
    for number, chunk in enumerate(chunks):
        buffers = dict(chunk.named_buffers())
        for name in [*dict(chunk.named_parameters()), *buffers]:
            path, _, attribute = name.rpartition(".")
            module = chunk.get_submodule(path)
            initial = getattr(module, "initial", {})
            assert attribute in initial, f"{name} has no initial value: see declare()"
            original = chunk.tied.get(name, name)
            placement = Placement(
                name=original,
                module=module,
                attribute=attribute,
                chunk=number,
                initial=initial[attribute],
                home=homes.experts if module.is_expert else homes.dense,
                part=getattr(module, "shards", {}).get(attribute),
                sum_over_tp=attribute in getattr(module, "sums_over_tp", ()),
                is_tied=original in chunk.tied.values(),
                is_original=name == original and not (replicated and number == 1),
                is_buffer=name in buffers,
            )
            placements.append(placement)
    return placements


# ---- initial values ------------------------------------------------------------------------------


@torch.no_grad()
def initialize(placements, seed):
    """Give this rank's part of every parameter and buffer its initial value.

    Normal numbers depend on the seed, on the parameter's name and on their row of the whole, or, if
    tp may split the matrix by columns, on their column. They never depend on the layout.
    """
    for placement in placements:
        tensor = placement.tensor
        if not isinstance(placement.initial, Normal):
            tensor.fill_(placement.initial)
            continue
        dim = 0
        runs = [(0, len(tensor))]  # first row in the whole, number of rows
        if placement.part is not None:
            dim = placement.part.dim
            runs = placement.part.runs()
        key = f"{seed} {placement.name}"
        rows = tensor.movedim(dim, 0)
        own_runs = rows.split([count for _, count in runs])
        for own, (first_row, _) in zip(own_runs, runs):
            own.copy_(normal(own.shape, placement.initial.std, key, first_row))


def normal(shape, std, key, offset=0):
    """Return the rows from `offset` on of a tensor of normally distributed numbers.

    Each row has a random stream of its own, so that a rank draws only the rows that it holds. If
    the tensor holds a matrix per expert, each row of each matrix has its own stream. key: a text on
    which the numbers depend.
    """
    if len(shape) == 1:
        return normal((*shape, 1), std, key, offset).view(shape)
    value = torch.empty(shape, dtype=torch.float32)
    digest = hashlib.sha256(key.encode()).digest()
    philox = np.random.Philox(key=int.from_bytes(digest[:16], "big"))
    generator = np.random.Generator(philox)
    state = philox.state
    offset *= math.prod(shape[1:-1])  # from experts to rows of their matrices
    for number, row in enumerate(value.view(-1, shape[-1]).numpy(), offset):
        state["state"]["counter"][3] = number  # the highest of 4 words, so that rows never overlap
        philox.state = state
        generator.standard_normal(out=row, dtype=np.float32)
    return value.mul_(std)


# ---- stages --------------------------------------------------------------------------------------


def schedule_of(args):
    """Return the pipeline's schedule. Raises ValueError if it is not defined for these sizes."""
    make = SCHEDULES[args.schedule]
    chunks = [args.chunks] if NUM_CHUNKS[args.schedule] is None else []
    return make(args.pp, args.microbatches, *chunks)


def stages_of(rank, routes):
    """Return the stage of each chunk of a rank.

        routes                                               rank 0    rank 1
        [(0, 0), (1, 0), (0, 1), (1, 1)]    interleaved      [0, 2]    [1, 3]
        [(0, 0), (1, 0)], [(1, 1), (0, 1)]  DualPipe         [0, 1]    [1, 0]

    routes: those of a schedule. A route says where each stage is: (rank of pp, its chunk's number).
    """
    stages = {}
    for route in routes:
        for stage, (holder, chunk) in enumerate(route):
            if holder == rank:
                stages[chunk] = stage
    return [stages[chunk] for chunk in sorted(stages)]


def divide_layers(config, routes):
    """Return the range of each stage's layers, chosen so that the costliest rank costs least.

    Every layer counts 1, with experts or not, and the last stage also has the head. Each stage
    between the first and the last gets one layer. Each other layer is given to the rank that costs
    least so far, and there to the cheapest stage. Among equal stages the last one gets it, since
    earlier ones keep the activations of more microbatches. If the head costs as much as 1.1 layers,
    4 stages get 8, 8, 8 and 6 of 30 layers. routes: see stages_of().
    """
    num_stages = len(routes[0])
    sizes = [1] * num_stages
    sizes[0] = sizes[-1] = 0
    costs = [*sizes]
    # forward takes 1 pass, backward 2, and recomputation 1, of which the head needs none
    passes = 4 if config.recompute == "full" else 3
    costs[-1] = 3 * flops_of_head(config) / (passes * flops_of_layers(config) / config.layers)
    beside = [stages_of(rank, routes) for rank, _ in routes[0]]  # for each stage, all of its rank's

    def preference(stage):
        cost_of_rank = sum(costs[other] for other in beside[stage])
        return cost_of_rank, costs[stage], -stage

    for _ in range(config.layers - sum(sizes)):
        stage = min(range(num_stages), key=preference)
        sizes[stage] += 1
        costs[stage] += 1
    ends = itertools.accumulate(sizes)
    return [range(end - size, end) for end, size in zip(ends, sizes)]


def forward_flops(config, share_with_experts):
    """Return the forward FLOPs of one layer per token: (weight products, attention).

    Each weight that a token uses costs 2 FLOPs, in all about 24 h^2. Attention to s tokens costs
    4 s h, of which the causal mask hides half; all of it counts, as in the MFU of PaLM (Chowdhery
    et al., 2022). share_with_experts: 1 if the layer has experts, 0 if not, and for the mean of
    several layers the share of those that have.
    """
    h = config.hidden
    kv_width = h * (config.kv_heads or config.heads) // config.heads
    mlp = (3 if config.is_llama else 2) * h * config.mlp_width
    weights = 2 * h * h + 2 * h * kv_width + mlp
    extra = mlp * (config.top_k + config.shared_experts - 1) + h * config.experts
    return 2 * (weights + share_with_experts * extra), 4 * config.seq_len * h


def flops_of_layers(config):
    """Return the forward FLOPs of all layers per token."""
    return sum(sum(forward_flops(config, config.has_experts(i))) for i in range(config.layers))


def flops_of_head(config):
    """Return the forward FLOPs of the head per token."""
    return 2 * config.hidden * config.vocab_size


# ---- chunks and their wrappers -------------------------------------------------------------------

CP_METHODS = {
    "allgather": zigzag_allgather_attention,
    "ring": zigzag_ring_attention,
    "ulysses": zigzag_ulysses_attention,
}


def make_chunks(args, mesh, device, routes, positions, deferred):
    """Create this rank's chunks, whose parameters have memory but no values.

    routes: those of the schedule.
    deferred: a WeightGradStore. With a zero-bubble schedule, linear layers leave the products for
        their weights' gradients there in backward, and the schedule says when to compute them.
    """

    def attention_over_cp(q, k, v, p):
        assert p == 0, "attention over cp has no dropout"
        return CP_METHODS[args.cp_method](q, k, v, mesh.cp_group)

    parallel = Parallel(
        tp_group=mesh.tp_group,
        random=ShardedRandomState(device, mesh.tp_group),
        attention_fn=attention_over_cp if args.cp > 1 else attention,
        defer=deferred,
        make_moe=partial(make_moe, args, mesh),
    )
    layers = divide_layers(args, routes)
    chunks = []
    for stage in stages_of(dist.get_rank(mesh.pp_group), routes):
        is_first = stage == 0
        is_last = stage == len(layers) - 1
        with torch.device("meta"):  # parameters get memory below; positions have it already
            chunk = GPT(args, parallel, positions.to(device), layers[stage], is_first, is_last)
        chunk.to_empty(device=device)
        chunks.append(chunk)
    return chunks


def wrap(args, homes, chunks, placements):
    """Wrap each chunk in DDP or in ZeRO's class, which sum its gradients over dp x cp.

    The sums begin in backward and end in finish_grad_sync(). A gradient_divide_factor of 1 makes
    them sums rather than means.
    """
    weights = [placement for placement in placements if not placement.is_buffer]
    if args.zero:
        return wrap_in_zero(args, homes, chunks, weights)
    groups = {weight.tensor: weight.home.dp_cp_group for weight in weights}
    wrapped = []
    for chunk in chunks:
        ddp = DistributedDataParallel(
            chunk, process_group=homes.dense.dp_cp_group, groups=groups, broadcast_buffers=False,
            gradient_as_bucket_view=True,  # no gradient is used after the next backward
            gradient_divide_factor=1, wait_in_backward=False,
        )  # fmt: skip
        wrapped.append(ddp)
    return wrapped


def wrap_in_zero(args, homes, chunks, weights):
    """Wrap each chunk in FullyShardedDataParallel. weights: the Placements of parameters.

    With bf16, gradients are summed in fp32, over microbatches and over ranks, as sums of many terms
    in bf16 would lose the small ones.
    """
    per_parameter = {weight.tensor: zero_options(args, weight) for weight in weights}
    dtypes = {}
    if args.dtype == "bf16":
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    under_way = deque()  # sums that have begun. Chunks share it, to advance each other's
    wrapped = []
    for chunk in chunks:
        fsdp = FullyShardedDataParallel(
            chunk, units=chunk.transformer["h"].values(), stage=args.zero,
            process_group=homes.dense.shard_group, replicate_group=homes.dense.replicate_group,
            per_parameter=per_parameter, **dtypes,
            gradient_divide_factor=1, wait_in_backward=False, under_way=under_way,
        )  # fmt: skip
        wrapped.append(fsdp)
    return wrapped


def zero_options(args, weight):
    """Return ZeRO's options for a parameter, given its Placement.

    ZeRO packs the parameters of a unit, such as a layer, into one flat tensor, and cuts this into
    equal shards. sum_shared_gradients() adds the pieces of copies on several ranks. So all of them
    must be cut at the same elements, which depends on the sizes of the parameters beside them. Here
    the cut (^) gives two ranks of tp different elements of wpe, because 2 does not divide 257:

        flat tensor on rank 0 of tp    | wte, 129 rows   | wpe               |
                                                          ^
        flat tensor on rank 1 of tp    | wte, 128 rows  | wpe               |
                                                         ^

    So ZeRO packs weights that tp splits apart from those that it does not split. It also packs the
    tied weight apart, since the first and the last stage have different weights beside it. This
    suffices as long as GPT splits no other weight outside of its layers.
    """
    options = {}
    if weight.module.is_expert:
        options["process_group"] = weight.home.shard_group
        options["replicate_group"] = weight.home.replicate_group
    elif weight.is_tied or (weight.part is not None and args.tp > 1):
        options["apart"] = True
    if isinstance(weight.module, Router):
        options["param_dtype"] = None  # it stays in fp32, as rounding would change choices
    return options


# ---- the optimizer -------------------------------------------------------------------------------


def make_optimizer(args, parameters):
    """Create the optimizer, with weight decay for matrices only.

    Raises ValueError if tp or ZeRO cuts matrices that it needs as a whole, and warns if it may need
    them, see check_elementwise().
    """
    # a piece of a matrix has two dims, too
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = adamw(args, groups)
    if args.tp > 1 or args.zero:
        check_elementwise(type(optimizer))
    return optimizer


def adamw(args, groups):
    """Create AdamW. Another optimizer that updates each element by itself may stand here instead.

    Its state must be tensors of their weight's shape, and "step", the number of steps. Checkpoints
    have nothing else, see require_savable(). Its class says `elementwise = True`.
    """
    dtype = torch.bfloat16 if args.moments == "bf16" else torch.get_default_dtype()
    return AdamW(
        groups, lr=args.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=args.weight_decay,
        moments_dtype=dtype,
    )  # fmt: skip


def learning_rate(step, args):
    """Return the learning rate of step 0, 1, ...

    It rises in the first --warmup steps, and the next one has --lr. In the last --decay-steps it
    falls along a line or half a period of a cosine (Loshchilov and Hutter, 2017) towards --min-lr,
    which the step after the last one would have. By default the decay begins right after the
    warm-up. With fewer --decay-steps the rate is stable in between (Hu et al., "MiniCPM", 2024).
    """
    if step < args.warmup:
        return args.lr * (step + 1) / (args.warmup + 1)
    begin = args.steps - args.decay_steps
    progress = max(0, step - begin) / max(1, args.decay_steps)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    height = {"none": 1.0, "linear": 1 - progress, "cosine": cosine}[args.lr_decay]
    floor = args.min_lr / max(args.lr, 1e-300)  # --lr may be 0
    return args.lr * (floor + (1 - floor) * height)


# ---- one step ------------------------------------------------------------------------------------
#
# Trainer.__init__() puts the parts above together, in an order that each of them needs. With
# `--pp 2 --tp 2 --zero 1` on 8 ranks, rank 0 gets:
#
#     make_chunks()     one chunk: a GPT with the embeddings and layers 0 and 1 of 4, and of each
#                       matrix the half that tp gives to rank 0. It has no values yet
#     placements_of()   a Placement for each of its parameters. That of wte.weight says: chunk 0,
#                       home dense, part Shard(0, (256,), tp_group), is_tied, initial Normal()
#     initialize()      their values. A rank has memory for its whole chunks up to here
#     wrap()            the chunk in FullyShardedDataParallel, over ranks 0 and 2. From here on its
#                       parameters are pieces, which together have half of its elements
#     make_optimizer()  AdamW, which updates the pieces

IGNORE_INDEX = -100  # a target that does not count


class TrainingError(Exception):
    """An error that ends the run, on all ranks once they are connected. status: the exit status."""

    def __init__(self, message, status=1):
        super().__init__(message)
        self.status = status


class Trainer:
    """One rank's share of the training, given its Args (see "flags") and its Mesh.

    positions: the positions of each sequence that this rank holds.
    replicated: whether the pipeline holds two replicas of the model, as DualPipe does.
    chunks: a GPT for each stage that this rank has.
    unique_chunks: the same without those of DualPipe's second replica.
    placements: a Placement for each parameter and buffer of the chunks.
    mixtures: see mixtures_of().
    stages: the chunks, each wrapped in DistributedDataParallel or FullyShardedDataParallel.
    pipeline, evaluation: Pipelines that run the stages over a batch, with and without backward.
    steps_done: the steps of the whole run. has_stepped: whether this process has taken any.
    """

    def __init__(self, args, mesh, device):
        self.args = args
        self.mesh = mesh
        self.device = device
        self.steps_done = 0
        self.has_stepped = False
        schedule = schedule_of(args)
        self.replicated = len(schedule.routes) > 1
        self.positions = torch.arange(args.seq_len)
        if args.cp > 1:
            self.positions = context_positions(args.seq_len, mesh.cp_group)
        deferred = WeightGradStore()  # for schedules that put off the gradients of weights
        self.chunks = make_chunks(args, mesh, device, schedule.routes, self.positions, deferred)
        self.unique_chunks = self.chunks[:1] if self.replicated else self.chunks
        self.homes = homes_of(mesh)
        self.placements = placements_of(self.chunks, self.homes, self.replicated)
        initialize(self.placements, args.seed)
        self.mixtures = mixtures_of(self.chunks, args.moe_every)
        self.stages = wrap(args, self.homes, self.chunks, self.placements)
        self.optimizer = make_optimizer(args, self.parameters())
        # Between layers, activations are (T, B, D): positions come first, as sp divides dim 0.
        num_positions = len(self.chunks[0].activation_positions)
        num_sequences = args.batch_size // (args.dp * args.microbatches)
        shape = num_positions, num_sequences, args.hidden
        dtype = torch.bfloat16 if args.dtype == "bf16" else torch.get_default_dtype()
        options = {"group": mesh.pp_group, "shape": shape, "dtype": dtype, "device": device}
        evaluation = forward_only(args.pp, args.microbatches, schedule.routes[0])
        unique_stages = self.stages[: len(self.unique_chunks)]
        self.evaluation = Pipeline(unique_stages, evaluation, self.loss, **options)
        pipeline_class = PairedPipeline if args.overlap else Pipeline
        self.pipeline = pipeline_class(
            self.stages, schedule, self.loss, **options, defer=deferred,
            # ZeRO-2 and 3 reduce the gradients of each microbatch, so that no rank keeps all
            sync_each=args.zero > 1,
        )  # fmt: skip
        if args.overlap:  # while tokens travel, the other pass computes: see Turns in pipeline.py
            for mixture in self.mixtures.values():
                mixture.hand_over = self.pipeline.turns.hand_over

    def parameters(self, home=None):
        """Return this rank's parameters, or ZeRO's pieces of them: all, or those of one Home."""
        weights = [placement for placement in self.placements if not placement.is_buffer]
        return [weight.tensor for weight in weights if home is None or weight.home is home]

    def originals(self):
        """Return the Placements of originals, which are saved."""
        return [placement for placement in self.placements if placement.is_original]

    def step(self, inputs, targets):
        """Take one optimizer step on this rank's inputs and targets, (batch_size / dp, seq_len).

        Returns {name: value}: the global loss, the gradient norm before clipping, and more. Raises
        TrainingError, with the weights unchanged, if the loss or the norm is not finite.
        """
        args = self.args
        seed_dropout(args.seed, self.steps_done, self.mesh)
        loss = self.forward_backward(inputs, targets)
        norm = self.clip_gradients()
        tallies = sum_tallies(self.mixtures, args, self.mesh, self.device)
        scalars = {"loss": loss, "grad_norm": norm}
        if args.experts:
            scalars |= tally_metrics(tallies, args.microbatches, args.balance == "aux")
        # Here the host waits for the device, once. In layers it does so only if they have experts.
        metrics = dict(zip(scalars, torch.stack([*scalars.values()]).tolist()))
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
            # All ranks come here or none, since our sums have equal bits on all ranks. With sums of
            # --collectives backend that differ, ranks may wait for each other until --timeout.
            numbers = "loss {loss:.4f}, grad norm {grad_norm:.3f}".format_map(metrics)
            raise TrainingError(f"step {self.steps_done + 1} is not finite: {numbers}")
        rate = learning_rate(self.steps_done, args)
        self.update(rate, tallies)
        self.has_stepped = True
        self.steps_done += 1
        return metrics | {"lr": rate}

    def forward_backward(self, inputs, targets):
        """Set .grad to the gradients of the global batch, and return its loss."""
        # DDP's gradients are views of its buckets and must stay. ZeRO sets .grad anew.
        self.optimizer.zero_grad(set_to_none=self.args.zero > 0)
        loss = self.run(self.pipeline, inputs, targets)
        for stage in self.stages:
            stage.finish_grad_sync()  # waits for the sums over dp x cp, which backward began
        self.sum_shared_gradients()
        return loss

    @torch.no_grad()
    def forward(self, inputs, targets):
        """Return the loss of the global batch, in evaluation."""
        return self.run(self.evaluation, inputs, targets)

    def run(self, pipeline, inputs, targets):
        """Run a batch through one of the two pipelines, and return its global loss."""
        for chunk in self.chunks:
            chunk.train(pipeline is self.pipeline)
        inputs, targets = self.own_tokens(inputs, targets)
        num_tokens = (targets != IGNORE_INDEX).sum()
        all_reduce(num_tokens, group=self.mesh.dp_cp_group)
        loss = pipeline.step(inputs, targets, num_tokens.clamp(min=1))
        if loss is None:  # this rank does not have the last stage
            loss = torch.zeros((), device=self.device)
        all_reduce(loss, group=self.mesh.dp_cp_group)
        all_reduce(loss, group=self.mesh.pp_group)
        return loss

    def loss(self, logits, targets, num_tokens):
        """Return a microbatch's term of the loss: its sum of losses / tokens of the whole batch."""
        losses = vocab_parallel_cross_entropy(
            logits.flatten(0, 1), targets.t().flatten(), self.args.vocab_size, IGNORE_INDEX,
            self.mesh.tp_group, inplace=True,
        )  # fmt: skip
        return losses.sum() / num_tokens

    def sum_shared_gradients(self):
        """Sum gradients over copies of a weight, each of which has only some terms of its gradient.

        The sums over dp x cp have ended. As sums commute, the order of these three changes nothing
        but rounding. Of a tied weight, a rank has

            2 copies    if it has the first and the last stage, as in DualPipe or zb-v
            1 copy      if it has one of them, and the other rank of embedding_group has the other;
                        also if pp is 1, where embedding and head share it and the group is a rank
            no copy     in the middle of the pipeline
        """
        marked = [placement for placement in self.placements if placement.sum_over_tp]
        for home in self.homes:
            parts = {weight.tensor: weight.part for weight in marked if weight.home is home}
            sum_gradients_over_tp(parts, home.tp_group, check=not self.has_stepped)
        if self.replicated:
            sum_replicas(self.chunks, self.mesh.pp_group)
        tied = [weight.tensor.grad.detach() for weight in self.placements if weight.is_tied]
        if len(tied) == 2:
            tied[0].add_(tied[1])
            tied[1].copy_(tied[0])
        elif len(tied) == 1:
            all_reduce(tied[0], group=self.mesh.embedding_group)

    def clip_gradients(self):
        """Scale all gradients so that their norm is at most grad_clip. Return the norm they had."""
        norm = self.norm_of_gradients()
        if self.args.grad_clip > 0:
            gradients = [parameter.grad for parameter in self.parameters()]
            clip_grads_with_norm_(gradients, self.args.grad_clip, norm)
        return norm

    def norm_of_gradients(self):
        """Return the norm of the model's gradients, in which each weight counts once."""
        norms = []
        for home in self.homes:
            if not self.parameters(home):
                continue  # a stage without experts, on all ranks of its groups
            weights = [placement for placement in self.placements if placement.home is home]
            counted = [weight.tensor.grad for weight in weights if weight.counts]
            # squares are summed over ranks with different elements: ZeRO's shards, then parts
            groups = [home.shard_group] if self.args.zero else []
            groups.append(home.split_group)
            nothing = torch.zeros(0, device=self.device)  # a rank that counts nothing takes part
            norms.append(get_total_norm([nothing, *counted], groups=groups))
        return get_total_norm(norms, groups=[self.mesh.pp_group])

    def update(self, rate, tallies):
        """Update weights at this learning rate, and the routers' biases by their experts' loads."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        if self.args.balance == "bias":
            for number, layer in self.mixtures.items():
                layer.router.update_bias(tallies[number, : layer.num_experts])

    def batch_of(self, data, step, part="train"):
        """Return this rank's inputs and targets, (batch_size / dp, seq_len), of a batch of Data."""
        args = self.args
        return data.batch(step, args.batch_size, args.seq_len, args.seed, self.own_rows(), part)

    def own_rows(self):
        """Return the slice of this rank's sequences in the global batch."""
        count = self.args.batch_size // self.args.dp
        begin = dist.get_rank(self.mesh.dp_group) * count
        return slice(begin, begin + count)

    def own_tokens(self, *batches):
        """Copy this rank's positions of batches (B, seq_len) to the device in one transfer."""
        tokens = torch.stack(batches)[:, :, self.positions]
        if self.device.type == "cuda":
            tokens = tokens.pin_memory()  # so that the host need not wait for the copy
        return tokens.to(self.device, non_blocking=True)


def seed_dropout(seed, step, mesh):
    """Seed the dropout masks of a step: the same on the ranks of tp, different on all others."""
    coordinates = dist.get_rank(mesh.dp_cp_group), dist.get_rank(mesh.pp_group)
    sequence = np.random.SeedSequence([seed, step, *coordinates])
    torch.manual_seed(int(sequence.generate_state(1)[0]))


def mixtures_of(chunks, moe_every):
    """Return {number: MoE} of the chunks. Numbers count the whole model's layers with experts.

    With --moe-every 2, layers 1, 3 and 5 have the mixtures 0, 1 and 2.
    """
    mixtures = {}
    for chunk in chunks:
        for i, layer in chunk.transformer["h"].items():
            if isinstance(layer.mlp, MoE):
                mixtures[int(i) // moe_every] = layer.mlp
    return mixtures


@torch.no_grad()
def sum_tallies(mixtures, args, mesh, device):
    """Return the tallies of all mixtures, summed over ranks. Reset this rank's own."""
    sizes = args.layers // args.moe_every, args.experts + 3  # those of RouterLosses.tally
    tallies = torch.zeros(sizes, dtype=torch.float64, device=device)
    for number, layer in mixtures.items():
        tallies[number].copy_(layer.losses.tally)
        layer.losses.tally.zero_()
    if args.experts:
        for group in mesh.dp_cp_group, mesh.tp_group, mesh.pp_group:
            all_reduce(tallies, group=group)
    return tallies


def tally_metrics(tallies, num_microbatches, with_losses):
    """Return a step's metrics, {name: scalar tensor}. tallies: (layers, E + 3), summed over ranks.

    expert_load: the largest load divided by the mean, in the worst layer, or 0 without a token.
    expert_dropped: the fraction of choices dropped. balance_loss, z_loss: means over layers and
    microbatches.
    """
    loads = tallies[:, :-3]  # (layers, E)
    means = loads.mean(1).clamp(min=1e-9)  # not 0, also if a layer has had no token
    metrics = {"expert_load": (loads.amax(1) / means).max()}
    metrics["expert_dropped"] = tallies[:, -3].sum() / loads.sum().clamp(min=1)
    if with_losses:
        metrics["balance_loss"], metrics["z_loss"] = tallies[:, -2:].mean(0) / num_microbatches
    return metrics


# ---- what a step sends ---------------------------------------------------------------------------
#
# From a step to the wire, and what each call sends over which axis:
#
#     Trainer.step()
#       forward_backward()
#         run()                     dp x cp  the number of tokens that count, and the loss
#                                   pp       the loss, which only the last stage has
#         Pipeline.step()           pp       per microbatch, activations and their gradients
#           GPT.forward()           tp       the token embedding's sum, and two sums per layer
#             attention             cp       keys and values, or heads and positions (Ulysses)
#             MoE                   ep       tokens to their experts, and back; balance losses
#                                            send a few numbers over dp, cp and tp
#           Trainer.loss()          tp       a maximum and sums per token, in place of all logits
#           backward                         the same in reverse
#             DDP or FSDP           dp x cp  gradients, beside backward; ZeRO-3 gathers weights
#                                            here and in forward, ZeRO-1 and 2 in forward
#         finish_grad_sync()        dp x cp  nothing: it waits for these sums
#         sum_shared_gradients()    tp       where a rank's gradients cover its own tokens only
#                                   pp       the tied weight's two copies, DualPipe's replicas
#       clip_gradients()            tp, pp   squares of the norm; with ZeRO also dp x cp, for
#                                            experts also ep
#       sum_tallies()               all      with experts, how many tokens each got
#       update()                             nothing: each rank updates what it owns

# ==== services ====================================================================================
#
# Here the technique ends. What follows serves a long run on real data, of which train() is the
# loop: it reads data and flags, writes samples, checkpoints and a log, and ends all processes
# alike. The layout matters in three places only: it loads a checkpoint of another layout, sums a
# sample's logits over tp, cp and pp, and checks that copies on different ranks are equal.

# ---- the loop ------------------------------------------------------------------------------------

# Steps between collections of cyclic garbage. Python's own are off (see perform()), as they would
# come at a different moment on each rank, and a rank that pauses in a step keeps all waiting.
GARBAGE_EVERY = 50


def train(args, device):
    """Train, from the last checkpoint if there is one, and validate. Collective.

    Raises TrainingError if I/O or a step fails and, with --checkpoint, on SIGTERM after saving. A
    save that is under way ends first.
    """
    data, data_digest = read_data(args)
    prompt = on_all_ranks(prompt_of, args, data, prefix="--prompt: ")
    trainer = Trainer(args, make_mesh(args, device=device), device)
    saver = Saver(trainer, args.checkpoint, data_digest) if args.checkpoint else None
    # `reader` makes the next batch during a step. At the end, saver waits for its save.
    with ThreadPoolExecutor(1) as reader, saver or nullcontext():
        if saver is not None:
            resume(trainer, saver.folder, data_digest)
        log = Log(trainer)
        sizes = f"{len(data.train):,} to train on and {len(data.validation):,} for validation"
        log.say(f"tokens of {data.train.dtype}: {sizes}")
        if trainer.steps_done >= args.steps:
            log.say(f"--steps {args.steps}: nothing to train, step {trainer.steps_done} is saved")
            validate(trainer, data, prompt, log)

        coming = reader.submit(trainer.batch_of, data, trainer.steps_done)
        while trainer.steps_done < args.steps:
            began = time.perf_counter()
            is_first = not trainer.has_stepped
            batch = coming.result()
            coming = reader.submit(trainer.batch_of, data, trainer.steps_done + 1)
            metrics = trainer.step(*batch)
            if is_first:
                require_equal_gradients(trainer)
            must_stop = saver is not None and saver.must_stop()
            is_last = must_stop or trainer.steps_done == args.steps
            log.step(metrics, time.perf_counter() - began)
            if trainer.steps_done % GARBAGE_EVERY == 0:
                gc.collect()  # on all ranks at the same time
            if is_last or (args.save_every and trainer.steps_done % args.save_every == 0):
                require_equal_copies(trainer)
                if saver is not None:
                    saver.save()  # raises the previous save's error
            if must_stop:
                end = f"SIGTERM; --checkpoint {args.checkpoint} has step {trainer.steps_done}"
                raise TrainingError(end, status=128 + signal.SIGTERM)
            if is_last or (args.eval_every and trainer.steps_done % args.eval_every == 0):
                validate(trainer, data, prompt, log)


# ---- errors --------------------------------------------------------------------------------------
#
# If one rank raises an error, the others wait for it in their next collective. on_all_ranks() makes
# it a TrainingError of all ranks, with the same text and exit status.


def need(condition, sentence):
    """Raise ValueError with this sentence unless the condition holds."""
    if not condition:
        raise ValueError(sentence)


def on_all_ranks(call, *arguments, prefix="", status=2, group=None):
    """Return call(*arguments). If it fails on one rank, raise TrainingError on all. Collective.

    To fail is to raise OSError, ValueError, or what torch.distributed.checkpoint raises.
    prefix, status: those of the TrainingError. group: the ranks, by default all.
    """
    fault = None
    try:
        result = call(*arguments)
    except (OSError, ValueError) as error:
        fault = first_line(error)
    except dcp.api.CheckpointException as error:  # all ranks raise it, with {rank: (cause, where)}
        if dist.get_rank() in error.failures:
            cause, _ = error.failures[dist.get_rank()]
            fault = first_line(cause)
    for rank, line in enumerate(gather_objects(fault, group)):
        if line is not None:
            who = f"rank {rank}: " if rank else ""
            raise TrainingError(f"{prefix}{who}{line}", status)
    return result


def require_same(own, prefix=""):
    """Raise TrainingError with status 2 unless {name: value} is the same on all ranks. Collective.
    """
    first, *others = gather_objects(own)
    for rank, other in enumerate(others, 1):
        for name, value in first.items():
            if other[name] != value:
                unlike = f"rank {rank} has {as_typed(name, other[name])}"
                raise TrainingError(f"{prefix}{unlike}, rank 0 has {as_typed(name, value)}", 2)


def first_line(error):
    """Return the first line of an error's text, or its class and arguments if it has none."""
    text = str(error).strip() or repr(error)
    return text.split("\n")[0]


# ---- validation ----------------------------------------------------------------------------------


def evaluate(trainer, data, batches=8):
    """Return the mean loss per token of `batches` validation batches.

    They are the same at every step, and in every run with this batch size and seed.
    """
    total = 0.0
    for index in range(batches):
        batch = trainer.batch_of(data, index, "validation")
        total += trainer.forward(*batch).item()
    return total / batches


def validate(trainer, data, prompt, log):
    """Report the loss of a validation, and a sample that begins with the prompt. Collective.

    Raises TrainingError if the loss is not finite, as Trainer.step() does.
    """
    loss = evaluate(trainer, data)
    if not math.isfinite(loss):
        raise TrainingError(f"the validation loss after step {trainer.steps_done} is {loss}")
    log.validation(loss)
    count = sample_size(trainer.args, data)
    if count:
        show = text_of if data.is_text else list
        tokens = sample(trainer, prompt, count)
        log.sample(show(prompt), show(tokens), show(prompt + tokens))


# ---- data ----------------------------------------------------------------------------------------


class Data(NamedTuple):
    """The tokens of a training part and a validation part, from which batches are cut."""

    train: np.ndarray
    validation: np.ndarray

    @property
    def is_text(self):
        """Whether tokens are the bytes of a text."""
        return self.train.dtype == np.uint8

    def batch(self, step, batch_size, seq_len, seed, rows=slice(None), part="train"):
        """Return inputs and targets, (rows, seq_len), of the batch for this seed, step and size."""
        tokens = getattr(self, part)
        random = np.random.default_rng([seed, step])
        starts = random.integers(0, len(tokens) - seq_len, batch_size)[rows]
        windows = np.stack([tokens[start : start + seq_len + 1] for start in starts])
        windows = torch.from_numpy(windows).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def read_data(args):
    """Return the run's Data and a digest of its tokens. Collective.

    Raises TrainingError with status 2 if the data cannot be read, differ between ranks, or have a
    token outside the vocabulary. With different data, such as the standard libraries of two Python
    versions, a pipeline's last stage would have targets that do not belong to the first stage's
    inputs. So each rank reads all tokens twice, which takes tens of minutes per TB, and a rank
    whose disk is slower may be late by --timeout at most.
    """
    source = f"--data {args.data or '(default)'}: "
    data = on_all_ranks(load_data, args.data, args.seq_len, args.vocab_size, prefix=source)
    digests = [hashlib.sha256(part).digest() for part in data]
    digest = hashlib.sha256(b"".join(digests)).hexdigest()
    require_same({"data": f"with digest {digest}"}, source)
    largest = max(int(part.max()) for part in data)
    if largest >= args.vocab_size:
        token = f"token {largest} (read as {data.train.dtype})"
        raise TrainingError(f"{source}{token} is outside --vocab-size {args.vocab_size}", 2)
    return data, digest


def load_data(path, seq_len, vocab_size=256):
    """Load the Data at a path:

        a file or folder of text           a token is a byte
        a .jsonl file, also in a folder    the text of each line, with a byte 255 between them
        None                               the sources of Python's standard library, as text
        a .bin file                        tokens as uint16, or uint32 for a larger vocabulary
        a folder of train.bin, val.bin     two such files, as nanoGPT prepares them

    In all cases but the last, the last tenth is for validation. In a folder, hidden files, empty
    ones and other folders are left out. Text from a folder or a .jsonl file takes its size in
    memory in each process, and other files stay on the disk. Raises OSError or ValueError.
    """
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    pattern = "[!.]*" if path else "*.py"
    path = Path(path or sysconfig.get_path("stdlib"))
    need(path.is_dir() or path.is_file(), f"there is no file or folder {path}")
    if (path / "train.bin").is_file():
        parts = [read_tokens(path / name, dtype) for name in ("train.bin", "val.bin")]
    else:
        if path.is_dir():
            files = [file for file in sorted(path.glob(pattern)) if file.is_file()]
            texts = [read_text(file) for file in files if file.stat().st_size > 0]
            has_jsonl = any(file.suffix == ".jsonl" for file in files)
            tokens = np.frombuffer((DOCUMENT_END if has_jsonl else b"\n").join(texts), np.uint8)
        elif path.suffix == ".bin":
            tokens = read_tokens(path, dtype)
        else:
            tokens = read_text(path)
        parts = np.split(tokens, [len(tokens) - len(tokens) // 10])
    sizes = f"{len(parts[0])} tokens to train on and {len(parts[1])} for validation"
    need(min(map(len, parts)) > seq_len, f"{sizes} are too few for --seq-len {seq_len}")
    return Data(*parts)


DOCUMENT_END = b"\xff"  # never occurs in UTF-8


def read_tokens(path, dtype):
    """Return the tokens of a .bin file, or raise ValueError if it holds anything but tokens."""
    name = path.name
    need(not path.with_suffix(".idx").exists(), f"{name} is Megatron's: its .idx has the type")
    head = np.memmap(path, np.uint8, "r")[:1000].tobytes()
    is_llmc = int.from_bytes(head[:4], "little") in (20240520, 20240801)
    need(not is_llmc, f"{name} begins with llm.c's header of 1024 bytes, which are no tokens")
    text = head.decode(errors="replace")[:-1]  # the last character may have been cut
    is_text = "\0" not in text and "\ufffd" not in text  # U+FFFD stands for what is not UTF-8
    need(not is_text, f"{name} is text, so its name should not end with .bin")
    tokens = np.memmap(path, dtype, "r")
    are_wider = are_halves(tokens)
    need(not are_wider, f"{name} is of a wider type than {dtype.__name__}")
    return tokens


def are_halves(tokens):
    """Return whether these look like halves of integers that are twice as wide.

    Upper halves of tokens below 2**20 are below 16, and mostly 0.
    """
    pairs = tokens[: len(tokens) // 2 * 2].reshape(-1, 2)
    low, high = pairs[len(pairs) // 2 :][: 2**20].T  # from the middle, as a header may differ
    return 64 * int(high.sum()) < int(low.sum()) and (high < 16).all()


def read_text(path):
    """Return the bytes of a text, or those of the texts in a .jsonl file."""
    text = np.memmap(path, np.uint8, "r")
    is_binary = not text[: 2**20].all()
    need(not is_binary, f"{path.name} is binary, not text: tokens are read from .bin files")
    if path.suffix != ".jsonl":
        return text
    texts = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                texts.append(json.loads(line)["text"].encode())
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                fault = f'{path.name}: line {number} is no JSON object with a "text"'
                raise ValueError(fault) from None
    return np.frombuffer(DOCUMENT_END.join(texts), np.uint8)


# ---- samples -------------------------------------------------------------------------------------


def sample_size(args, data):
    """Return how many tokens a sample has. By default, .bin data have one only with --prompt."""
    if args.sample is not None:
        return args.sample
    return 200 if data.is_text or args.prompt is not None else 0


def prompt_of(args, data):
    """Return the tokens with which a sample begins: bytes, or with .bin data numbers as in "1,2,3".

    Without --prompt, it is the first token for validation. Raises ValueError if --prompt is wrong.
    """
    if args.prompt is None:
        return data.validation[:1].tolist()
    if data.is_text:
        tokens = list(os.fsencode(args.prompt))
    else:
        tokens = [int(number) for number in args.prompt.split(",")]
    for token in tokens:
        is_inside = 0 <= token < args.vocab_size
        need(is_inside, f"token {token} is outside --vocab-size {args.vocab_size}")
    return tokens


@torch.no_grad()
def sample(trainer, prompt, count):
    """Continue a list of tokens by `count` tokens, and return these, on all ranks. Collective.

    Every token takes a forward of one row through the whole layout, and replicas compute the same.
    This is slow (200 tokens take at least as long as a validation of 200 sequences) but needs no
    code of its own in any layer. A row has --seq-len tokens: the last ones of the text and, while
    the text is shorter, zeros after it, at which causal attention does not look.

    All layouts write the same text in exact arithmetic. --capacity-factor and --topk-nodes are
    exceptions, as the experts that a token uses then depend on the layout. In training, nothing
    changes: neither random states nor tallies of experts nor weights.
    """
    args = trainer.args
    random = np.random.default_rng([args.seed, trainer.steps_done])
    tokens = list(prompt)
    for chunk in trainer.chunks:
        chunk.eval()
    pipeline = pipeline_of_rows(trainer)
    for _ in range(count):
        logits = next_logits(trainer, pipeline, tokens[-args.seq_len :])
        token = choose_token(logits, args.temperature, random)
        broadcast(token)  # rank 0's, since rounding may differ between replicas
        tokens.append(token.item())
    return tokens[len(prompt) :]


def pipeline_of_rows(trainer):
    """Return a Pipeline whose step() takes one row and returns its logits, (T, 1, V/tp).

    Ranks without the last stage get None.
    """
    args = trainer.args
    stages = trainer.stages[: len(trainer.unique_chunks)]
    schedule = forward_only(args.pp, 1, schedule_of(args).routes[0])
    return Pipeline(
        stages, schedule, lambda logits, _: logits, group=trainer.mesh.pp_group,
        shape=(len(trainer.chunks[0].activation_positions), 1, args.hidden),
        dtype=trainer.evaluation.like["dtype"], device=trainer.device,
    )  # fmt: skip


def next_logits(trainer, pipeline, window):
    """Return the logits (V,) of the token that follows the window of at most --seq-len tokens."""
    row = torch.tensor([window + [0] * (trainer.args.seq_len - len(window))])
    (row,) = trainer.own_tokens(row)  # (1, T)
    output = pipeline.step(row, row)
    logits = torch.zeros(trainer.args.vocab_size, dtype=torch.float64, device=trainer.device)
    if output is not None:
        (start,) = (chunk.vocab_start for chunk in trainer.unique_chunks if chunk.is_last)
        own = output[trainer.positions == len(window) - 1]  # (1, 1, V/tp), or empty with cp
        logits[start : start + output.shape[2]] = own.double().sum((0, 1))
    for group in trainer.mesh.tp_group, trainer.mesh.cp_group, trainer.mesh.pp_group:
        all_reduce(logits, group=group)  # each logit is zero on all ranks but one
    return logits.cpu()


def choose_token(logits, temperature, random):
    """Draw a token from softmax(logits / temperature). 0 is greedy, and the first of equals wins.

    The largest of logits + temperature * g is such a token if g is Gumbel noise ("Gumbel-max").
    """
    noise = torch.from_numpy(random.gumbel(size=len(logits)))
    return (logits + temperature * noise).argmax()


def text_of(tokens):
    """Decode bytes. What is no byte, or not UTF-8, becomes U+FFFD."""
    return bytes(min(token, 0xFF) for token in tokens).decode(errors="replace")


# ---- where a piece lies in the whole -------------------------------------------------------------
#
# A checkpoint saved in one layout can be loaded in any other ("resharding"), because it holds whole
# tensors. Each rank says which boxes, that is rectangular blocks, of a whole it has, and PyTorch's
# checkpoints copy what boxes of the old layout and of the new one have in common. The elements of a
# piece follow each other in the part, row by row, and may begin and end within a row. So a piece is
# cut into boxes of the part, and these into boxes of the whole. Here a rank has rows 0, 1 and 4 of
# a whole of (6, 2) as its part, and a piece of 5 elements:
#
#     whole    part     piece                  boxes of the part    boxes of the whole
#     row 0    row 0    . 1                    (0, 1): 1            (0, 1): 1
#     row 1    row 1    2 3                    (1, 0): 2 3          (1, 0): 2 3
#     row 4    row 2    4 5                            4 5          (4, 0): 4 5
#
# A box is named by the index of its first element.


def views_in_whole(parameter, tensor, part=None):
    """Return (shape of the whole, {index of a box in the whole: view of the tensor}).

    parameter: a part that lies where `part` says, the whole if that is None, or a piece of it.
    tensor: the parameter, or a tensor of the same layout, such as a moment.
    """
    # ZeRO gives a piece these two attributes, and its whole is our part.
    part_shape = getattr(parameter, "whole_shape", parameter.detach().shape)
    begin = getattr(parameter, "offset", 0)
    rest = tensor.detach().view(-1)
    views = {}
    for index, sizes in boxes_between(part_shape, begin, begin + len(rest)):
        size = math.prod(sizes)
        views |= boxes_in_whole(index, rest[:size].view(sizes), part)
        rest = rest[size:]
    if part is None:
        return part_shape, views
    return (*part_shape[: part.dim], sum(part.blocks), *part_shape[part.dim + 1 :]), views


def boxes_between(shape, begin, end):
    """Cut elements begin:end of a flattened part into boxes. Yield each as (index, sizes).

        shape (4, 2), 1:7      . 1       the rest of row 0     (0, 1), (1, 1)
                               2 3       whole rows            (1, 0), (2, 2)
                               4 5
                               6 .       the start of row 3    (3, 0), (1, 1)
    """
    if not shape and begin < end:  # a number
        yield (), ()
        return
    size = math.prod(shape[1:])  # of a row, which may be a matrix
    while begin < end:
        row, offset = divmod(begin, size)
        count = (end - begin) // size
        if offset == 0 and count > 0:  # whole rows
            yield (row, *[0] * (len(shape) - 1)), (count, *shape[1:])
            begin += count * size
        else:  # some elements of one row, which are cut in the same way
            row_end = min(end - row * size, size)
            for index, sizes in boxes_between(shape[1:], offset, row_end):
                yield (row, *index), (1, *sizes)
            begin = row * size + row_end


def boxes_in_whole(index, box, part):
    """Cut the box at this index of the part where its runs end. Return {index in the whole: view}.

    In the example, rows 0 and 1 of the part are one run, and row 2 is another.
    """
    if part is None:
        return {index: box}
    dim = part.dim
    views = {}
    run_begin = 0  # in the part
    for begin_in_whole, count in part.runs():
        begin = max(run_begin, index[dim])
        end = min(run_begin + count, index[dim] + box.size(dim))
        if begin < end:
            moved = (*index[:dim], begin_in_whole + begin - run_begin, *index[dim + 1 :])
            views[moved] = box.narrow(dim, begin - index[dim], end - begin)
        run_begin += count
    return views


# ---- checkpoints ---------------------------------------------------------------------------------
#
# write_checkpoint() saves state_of() the Trainer, and resume() loads it. A checkpoint holds whole
# tensors, of which each rank offers the boxes that it has. Of those that several ranks offer, dcp
# lets one write, so a rank may write no file. Any layout can load a checkpoint:
# torch.distributed.checkpoint (dcp) cuts what was saved into the boxes that a rank asks for. A
# checkpoint is a folder, which has the suffix .partial until it is complete:
#
#     DIR/step_00000500/__0_0.distcp ...    the boxes that rank 0, ... has written
#                       .metadata           dcp's index of them
#                       run.json            the flags, the step, the optimizer and a digest of data
#                       SHA256SUMS          digests of these files, as sha256sum writes them


class Boxes(torch.Tensor):
    """A whole tensor for dcp, of which this rank has some boxes. It takes memory for one number.

    To plan, dcp.save() calls __create_write_items__(), and dcp.load() __create_chunk_list__(). Both
    then call __get_tensor_shard__() for each box that they write or read.

    boxes: {index of the first element in the whole: view of a parameter or moment}
    """

    @staticmethod
    def __new__(cls, dtype, shape, boxes):
        whole = torch.zeros((), dtype=dtype).expand(shape).as_subclass(cls)
        whole.boxes = boxes
        return whole

    def __create_chunk_list__(self):
        chunk = metadata.ChunkStorageMetadata
        return [chunk(torch.Size(offset), box.shape) for offset, box in self.boxes.items()]

    def __create_write_items__(self, name, _):
        properties = metadata.TensorProperties(self.dtype)
        items = []
        for chunk in self.__create_chunk_list__():
            index = metadata.MetadataIndex(name, chunk.offsets)
            data = planner.TensorWriteData(chunk, properties, self.shape)
            items.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index):
        return self.boxes[index.offset]


def boxes_of(placement, tensor):
    """Return the Boxes of a tensor that lies where a Placement says: its own, or a moment of it."""
    whole = views_in_whole(placement.tensor, tensor, placement.part)
    return Boxes(tensor.dtype, *whole)


def state_of(trainer, placements):
    """Return {kind: {name: Boxes}} of weights, in fp32 also with bf16, and of their moments.

    The kind of weights is "model". That of moments is their name in the optimizer's state.
    """
    state = {"model": {}}
    for placement in placements:
        name = placement.name
        weight = placement.tensor
        state["model"][name] = boxes_of(placement, weight)
        for kind, value in trainer.optimizer.state.get(weight, {}).items():
            if is_moment(value, weight):
                state.setdefault(kind, {})[name] = boxes_of(placement, value)
    return state


def is_moment(value, weight):
    """Return whether a value of an optimizer's state is a tensor of the weight's shape."""
    return torch.is_tensor(value) and value.shape == weight.detach().shape


def states_of_chunks(trainer):
    """Return a list of state_of() each chunk, as two chunks may have weights of the same name."""
    states = []
    for number in range(len(trainer.chunks)):
        own = [placement for placement in trainer.placements if placement.chunk == number]
        states.append(state_of(trainer, own))
    return states


def run_of(trainer, data_digest):
    """Return {name: value} of a run's flags and of the facts that run.json has beside them."""
    facts = {"step": trainer.steps_done, "data_digest": data_digest}
    return flags_of(trainer.args) | {"optimizer": type(trainer.optimizer).__name__} | facts


def write_checkpoint(state, path, run, group):
    """Write a state on the host as a checkpoint, or raise TrainingError. Collective.

    run: run_of() the run that saves it.
    """
    partial_path = path.with_suffix(".partial")
    options = {"prefix": f"--checkpoint {path}: ", "status": 1, "group": group}
    # each rank waits until its files are on the disk; there is nothing to copy ahead from a GPU
    storage = dcp.FileSystemWriter(partial_path, sync_files=True, per_thread_copy_ahead=0)
    write = partial(dcp.save, state, storage_writer=storage, process_group=group)
    on_all_ranks(write, **options)
    files = partial_path.glob(f"__{dist.get_rank()}_*")  # this rank has written
    own = on_all_ranks(digests_of, files, **options)
    digests = dict(ChainMap(*gather_objects(own, group)))
    on_all_ranks(commit, run, partial_path, path, digests, **options)


def commit(run, partial_path, path, digests):
    """On rank 0, complete a checkpoint, rename it to `path`, and delete all but the last --keep."""
    if dist.get_rank() != 0:
        return
    write_run(partial_path, run, digests | digests_of([partial_path / ".metadata"]))
    os.sync()  # the names of all files, too, are on the disk before the checkpoint gets its own
    partial_path.rename(path)
    for old in checkpoints_of(path.parent)[: -run["keep"]]:
        doomed = old.rename(old.with_suffix(".partial"))  # half-deleted, it must not look complete
        shutil.rmtree(doomed, ignore_errors=True)


def checkpoints_of(folder):
    """Return the folder's checkpoints, oldest first."""
    return sorted(folder.glob("step_" + 8 * "[0-9]"))


def resume(trainer, folder, data_digest=""):
    """Load the folder's last checkpoint, if any, whatever layout it was saved in. Collective.

    To resume from an earlier one, move the later ones out of the folder. data_digest: that of
    read_data(). Rank 0 says how the run differs from the one that it continues, also if only the
    layout has changed the default of --batch-size, on which all batches depend.
    """
    names = [path.name for path in checkpoints_of(folder)]
    name, *_ = gather_objects(max(names, default=None))
    if name is None:
        return
    path = folder / name
    prefix = f"--checkpoint {path}: "
    run = on_all_ranks(check_checkpoint, path, trainer.args)
    trainer.steps_done = run["step"]
    if trainer.steps_done:  # before the first step there are no moments
        create_moments(trainer)
        kinds = gather_objects([*state_of(trainer, trainer.placements)])
        on_all_ranks(require_all_kinds, path, set().union(*kinds), prefix=prefix)
    for state in states_of_chunks(trainer):
        on_all_ranks(partial(dcp.load, state, checkpoint_id=path), prefix=prefix)
    if dist.get_rank() == 0:
        print(f"resumes from {path}", flush=True)
        found = differences(run_of(trainer, data_digest), run) if trainer.steps_done else []
        if found:
            print(f"continues with {', '.join(found)}", flush=True)


def create_moments(trainer):
    """Create the optimizer's state as after steps_done steps, with moments that are to be loaded.

    A step with gradients of zero creates it. It may change weights, which are loaded, too.
    """
    weights = trainer.parameters()
    gradients = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    trainer.optimizer.step()
    for weight, gradient in zip(weights, gradients):
        weight.grad = gradient
    for state in trainer.optimizer.state.values():
        if "step" in state:  # a number, or a tensor with one
            state["step"] = 0 * state["step"] + trainer.steps_done


# ---- saves beside training -----------------------------------------------------------------------
#
# Steps wait until the state has been copied to the host. A thread then writes the copy.


class Saver:
    """Writes checkpoints while training continues. Creation and all methods are collective.

        main thread   step 500 | save: copy to host memory | step 501 | step 502 | step 503 ...
        thread                                             | write | hash | sync | rename |

    On CPUs the copy is done when save() returns, and on GPUs it is queued before the next step's
    kernels. It takes the bytes of this rank's weights and moments, 12 per parameter in fp32, and
    without ZeRO each replica makes one. On GPUs it takes up to twice as much, because PyTorch
    rounds pinned memory up to powers of two, and the first save is slow, because it allocates this
    memory. Only one copy exists, since save() first waits for the previous save.

    The thread sends over a gloo group of its own, so its messages never meet those of a step. If a
    save fails, it fails on all ranks alike: must_stop() is then true, and the next save() or wait()
    raises the error.

    Inside `with`, SIGTERM does not end the process, but must_stop() becomes true on all ranks. It
    is asked after each step, so a validation ends first. After the last step SIGTERM has no effect.
    At the end of `with`, a save under way is waited for, unless ranks have come apart. Until the
    thread has ended, the folder is locked against other runs, if its file system has locks.

    data_digest: that of read_data(). sigterm: whether this rank has received SIGTERM.
    """

    def __init__(self, trainer, folder, data_digest=""):
        self.trainer = trainer
        self.folder = Path(folder)
        self.prefix = f"--checkpoint {folder}: "
        self.lock = on_all_ranks(claim, self.folder, prefix=self.prefix)
        require_shared(self.folder, self.prefix)
        self.data_digest = data_digest
        self.settings = settings_of(trainer.optimizer)
        self.sigterm = False
        # in it, a rank whose file system is slow keeps the others waiting, at most for --timeout
        self.group = dist.new_group(timeout=timedelta(seconds=trainer.args.timeout), backend="gloo")
        self.executor = ThreadPoolExecutor(1)  # Python waits for its thread before it exits
        # the Future of the last save. In place of a first one, ranks connect before training begins
        self.pending = self.executor.submit(barrier, self.group)
        self.wait()

    def save(self):
        """Begin to write a checkpoint."""
        self.wait()
        trainer = self.trainer
        on_all_ranks(require_savable, trainer, self.settings, prefix=self.prefix, status=1)
        state = copy_to_host(state_of(trainer, trainer.originals()))
        copied = None
        if trainer.device.type == "cuda":
            copied = torch.cuda.current_stream().record_event()
        path = self.folder / f"step_{trainer.steps_done:08d}"
        run = run_of(trainer, self.data_digest)
        self.pending = self.executor.submit(self.write, state, copied, path, run)

    def write(self, state, copied, path, run):
        """Write a state once the event `copied` has happened. This runs in the thread."""
        if copied is not None:
            torch.cuda.set_device(self.trainer.device)  # each thread has its own
            copied.synchronize()
        write_checkpoint(state, path, run, self.group)

    def must_stop(self):
        """Return whether any rank has received SIGTERM, or a save has failed. Collective."""
        has_failed = self.pending.done() and self.pending.exception() is not None
        return any_rank(self.sigterm or has_failed)

    def wait(self):
        """Return when the last save has ended. If it failed, raise TrainingError."""
        self.pending.result()

    def __enter__(self):
        self.handler = signal.signal(signal.SIGTERM, self.note_sigterm)
        return self

    def note_sigterm(self, *_):
        """Handle SIGTERM: let the next must_stop() be true."""
        self.sigterm = True

    def __exit__(self, kind, *_):
        are_together = kind is None or issubclass(kind, TrainingError)
        self.executor.submit(self.lock.close)  # the thread does so after a save that is under way
        # a process that has lost the others must end when torchrun says so
        self.executor.shutdown(wait=are_together)
        signal.signal(signal.SIGTERM, self.handler)
        if are_together:
            self.wait()


@torch.no_grad()
def copy_to_host(state):
    """Return a copy of a state in host memory. From a GPU it is copied in the current stream."""
    copies = {}
    for kind, tensors in state.items():
        copies[kind] = {}
        for name, whole in tensors.items():
            boxes = {}
            for index, box in whole.boxes.items():
                copy = torch.empty_like(box, device="cpu", pin_memory=box.is_cuda)
                boxes[index] = copy.copy_(box, non_blocking=True)  # for which memory is pinned
            copies[kind][name] = Boxes(whole.dtype, whole.shape, boxes)
    return copies


# ---- guards of checkpoints -----------------------------------------------------------------------
#
# Without these, a save or a resume could lose something in silence. In this order, they refuse a
# folder that another run uses or that nodes do not share, a file that has changed since it was
# saved, a checkpoint of another model, and an optimizer with state that would not be saved or
# loaded. When a run is resumed, ranks divide the files to check, and one waits for another as long
# as --timeout says.


def claim(folder):
    """Create the folder. On rank 0, also lock it for as long as the returned file is open.

    What a killed save has left is then deleted, as the next save of its step would take it over.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / "lock", "a")
    if dist.get_rank() != 0:
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError("another run is using this folder") from None
    except OSError as error:  # some network file systems have no locks
        say(f"warning: --checkpoint {folder} is not safe from a second run: {error}")
    file.truncate(0)
    print(time.time_ns(), file=file, flush=True)
    os.fsync(file.fileno())  # now other nodes see it
    for killed in folder.glob("step_*.partial"):
        shutil.rmtree(killed, ignore_errors=True)
    return file


def require_shared(folder, prefix):
    """Raise TrainingError if a rank does not see what rank 0 has written by claim(). Collective.

    Rank 0 would otherwise commit checkpoints without the files of other nodes.
    """
    seen = on_all_ranks((folder / "lock").read_text, prefix=prefix)
    expected, *_ = gather_objects(seen)
    fault = "it is not the folder that rank 0 uses: all nodes must share it"
    on_all_ranks(need, seen == expected, fault, prefix=prefix)


def digests_of(paths):
    """Return {name: SHA-256} of files."""
    digests = {}
    for path in paths:
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def write_run(folder, run, digests):
    """Write a checkpoint's run.json, and the digests of its other files and of this one."""
    file = folder / "run.json"
    file.write_text(json.dumps(run, indent=4))
    digests = digests | digests_of([file])
    (folder / "SHA256SUMS").write_text("".join(f"{digests[name]}  {name}\n" for name in digests))


def read_run(path, rank=0, world_size=1):
    """Return what a checkpoint's run.json says, {name: value}.

    Raises ValueError if files are not those that were saved, or the folder has been renamed. All
    ranks check run.json, and divide the other files among them. NFS renames a file to .nfs... if it
    is deleted while a process has it open, so such files are left alone.
    """
    lines = (path / "SHA256SUMS").read_text(errors="replace").splitlines()
    saved = {line[66:]: line[:64] for line in lines}
    for file in sorted(path.iterdir()):
        is_known = file.name in saved or file.name == "SHA256SUMS" or file.name.startswith(".nfs")
        need(is_known, f"{file} is not among the files that were saved")
    own = ["run.json", *sorted(saved)[rank::world_size]]
    for name, digest in digests_of(path / name for name in own).items():
        need(digest == saved.get(name), f"{path / name} has changed since it was saved")
    run = json.loads((path / "run.json").read_bytes())
    is_named = path.name == f"step_{run['step']:08d}"
    need(is_named, f"{path} has been renamed, as its run.json is of step {run['step']}")
    return run


# the flags of the model that a resumed run may change
MAY_CHANGE = {"dropout", "sp", "recompute", "recompute_layers", "capacity_factor", "topk_nodes"}


def check_checkpoint(path, args):
    """Return what run.json says. Raise ValueError if the checkpoint is damaged or of another model.
    """
    run = read_run(path, dist.get_rank(), args.world_size)
    for name in [each.name for each in fields(GPTConfig) if each.name not in MAY_CHANGE]:
        own = as_typed(name, getattr(args, name))  # "--hidden 128"
        theirs = as_typed(name, run.get(name))
        need(own == theirs, f"{own}, but {path} has {theirs}")
    return run


def differences(own, saved):
    """Return phrases that say how a run differs from the one that it continues, see run_of()."""
    others = PATHS | {"step", "data_digest"}
    names = [name for name in own if name not in others and own[name] != saved.get(name)]
    found = [f"{as_typed(name, own[name])} (was {saved.get(name)})" for name in names]
    if own["data_digest"] != saved["data_digest"]:
        found.append(f"other data (was {saved['data'] or 'the default'})")
    return found


def require_all_kinds(path, kinds):
    """Raise ValueError if a checkpoint has a kind of state beside these, as it would be lost."""
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata  # {kind.name: ...}
    lost = {name.partition(".")[0] for name in saved} - kinds
    need(not lost, f"after its first step, the optimizer has no {', '.join(sorted(lost))}")


def require_savable(trainer, settings):
    """Raise ValueError if the optimizer has state that a checkpoint would lose.

    It has only moments, and the step, which is the trainer's. settings: settings_of() the optimizer
    before its first step.
    """
    optimizer = trainer.optimizer
    changed = [setting for setting in settings_of(optimizer) if setting not in settings]
    lost = {name for _, name, _ in changed}
    steps = []
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            if name == "step":
                steps.append(torch.as_tensor(value))
            elif name == "model" or not (value is None or is_moment(value, weight)):
                lost.add(name)  # a moment named "model" would overwrite the weights
    if steps and torch.stack(steps).ne(trainer.steps_done).any():  # the host waits once
        lost.add("step")
    who = f"{type(optimizer).__name__} keeps {', '.join(sorted(lost))}"
    need(not lost, f"{who}: checkpoints have only state of the weights' shapes, and the step")


def settings_of(optimizer):
    """Return [(number, name, value)] of what an optimizer keeps beside its state.

    They are its attributes, number 0, and the options of its groups, except those that the trainer
    sets. A shape stands for a tensor, and the size of its state for an optimizer inside this one.
    """
    others = {"state", "param_groups", "params", "lr", "shards"}
    settings = []
    for number, values in enumerate([vars(optimizer), *optimizer.param_groups]):
        for name in values.keys() - others:
            for value in tree_leaves(values[name]):
                if torch.is_tensor(value):
                    value = value.shape
                elif isinstance(value, torch.optim.Optimizer):
                    value = len(value.state)
                if not isinstance(value, bool):  # fused SGD notes that it has taken a step
                    settings.append((number, name, value))
    return settings


# ---- copies that must be equal -------------------------------------------------------------------


def require_equal_gradients(trainer):
    """After a step, raise TrainingError if copies over tp have different gradients. Collective.

    A layer that forgets mark_sum_over_tp() or set_shard() shows in the first step.
    """
    if trainer.args.tp == 1:
        return
    for group in dict.fromkeys(home.tp_group for home in trainer.homes):
        for chunk in trainer.chunks:
            on_all_ranks(check_gradients_over_tp, chunk, group, status=1)


def require_equal_copies(trainer):
    """Raise TrainingError if copies have come to differ. Collective.

    Boxes of ranks that begin at the same place of the same weight, bias of a router or moment must
    have the same shape and the same bits: replicas over dp x cp, with ZeRO the copies of its
    shards, what tp does not divide, copies of experts, the tied weight, and DualPipe's second
    replica. If bits differ, the training would go on with both values. A memory or a computation
    has been at fault, or --collectives backend has summed copies in different orders. If shapes
    differ, so do the cuts, and copies have not been summed alike.
    """
    mesh = trainer.mesh
    own = fingerprints(trainer)
    faults = []
    for group in mesh.dp_cp_group, mesh.tp_group, mesh.pp_group:
        first = {}  # {place: (rank, what it has there)}
        for rank, theirs in zip(dist.get_process_group_ranks(group), gather_objects(own, group)):
            for place, box in theirs:
                other, expected = first.setdefault(place, (rank, box))
                if box != expected:
                    faults.append(f"{place} on rank {rank} differs from its copy on rank {other}")
    for found in gather_objects(faults[:1]):
        for fault in found:
            raise TrainingError(fault)


@torch.no_grad()
def fingerprints(trainer):
    """Return [(place, (shape, fingerprint))] for each box of the state that this rank holds."""
    places, shapes, values = [], [], []
    for state in states_of_chunks(trainer):
        for kind, tensors in state.items():
            for name, whole in tensors.items():
                for first_index, box in whole.boxes.items():
                    what = name if kind == "model" else f"{kind} of {name}"
                    places.append(f"{what} at {list(first_index)}")
                    shapes.append(list(box.shape))
                    values.append(fingerprint(box))
    if not values:  # a small model that ZeRO divides over many ranks
        return []
    numbers = torch.stack(values).tolist()  # here the host waits for the device, once
    return list(zip(places, zip(shapes, numbers)))


def fingerprint(tensor):
    """Return a 64-bit hash of a tensor's bits, as a tensor on its device.

    It is the sum of the elements' bits, each times an odd number that depends on its position. So
    it always changes if one element does, and almost always if several do.
    """
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.flatten().view(integers[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(2**20):  # in parts, because products take 8 bytes per element
        factors = 2 * torch.arange(len(part), device=bits.device) + 1
        total = total * 1000003 + (part * factors).sum()  # modulo 2**64
    return total


# ---- log -----------------------------------------------------------------------------------------


PEAK_TFLOPS = {  # of dense products in bf16, from data sheets, by the name that CUDA has for a GPU
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H200": 989,
    "NVIDIA H800": 989,
    "NVIDIA B200": 2250,
}


def known_peak(args, device):
    """Return a device's peak in TFLOP/s, or None if it is unknown or processes share the device."""
    is_alone = device.type == "cuda" and args.device != "shared"
    if is_alone and args.dtype == "bf16":
        return PEAK_TFLOPS.get(torch.cuda.get_device_name(device))
    return None


def flops_per_token(config):
    """Return the FLOPs of forward and backward per token. Recomputation does not count."""
    return 3 * (flops_of_layers(config) + flops_of_head(config))


def peak_memory(device):
    """Return the most bytes that this process has had on its GPU, or else in the host's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10


class Log:
    """Reports progress on rank 0's output and in the --metrics file. Creation is collective.

    Memory is that of rank 0, tflops and mfu are those of a device, and all other numbers are those
    of the whole run. Each start appends the flags to the file, and its steps. A step that a run has
    taken twice has two lines, of which the last counts. tokens_seen assumes one batch size.
    """

    def __init__(self, trainer):
        args = trainer.args
        self.trainer = trainer
        self.peak = args.peak_tflops or known_peak(args, trainer.device)
        self.speaks = dist.get_rank() == 0
        self.began = time.perf_counter()
        self.first_step = trainer.steps_done + 1
        path = args.metrics if self.speaks and args.metrics else os.devnull
        self.file = on_all_ranks(open, path, "a", prefix=f"--metrics {args.metrics}: ")
        self.write({"flags": flags_of(args)})
        for line in describe(trainer):
            self.say(line)

    def step(self, metrics, seconds):
        """Report the metrics of a step that took so many seconds."""
        args = self.trainer.args
        step = self.trainer.steps_done
        tokens = args.batch_size * args.seq_len
        tflops = flops_per_token(args) * tokens / seconds / args.world_size / 1e12
        numbers = {"loss": metrics["loss"], "tokens_per_s": tokens / seconds, "tflops": tflops}
        if self.peak:
            numbers["mfu"] = tflops / self.peak
        numbers |= metrics
        numbers["memory_mb"] = peak_memory(self.trainer.device) / 2**20
        elapsed = time.perf_counter() - self.began
        left = elapsed / (step - self.first_step + 1) * (args.steps - step)
        times = {"tokens_seen": step * tokens, "elapsed_s": elapsed, "left_s": left}
        self.write({"step": step} | numbers | times)
        every = args.print_every or max(1, round(args.steps / 40))
        if step in (self.first_step, args.steps) or step % every == 0:
            line = f"step {step} of {args.steps}"
            for name, number in numbers.items():
                digits = ",.0f" if number >= 100 else ".4g"
                line += f"  {name} {number:{digits}}"
            self.say(f"{line}  left {timedelta(seconds=round(left))}")

    def validation(self, loss):
        """Report the loss of a validation."""
        step = self.trainer.steps_done
        self.write({"step": step, "validation_loss": loss})
        self.say(f"validation loss {loss:.4f} after step {step}")

    def sample(self, prompt, tokens, whole):
        """Report a sample, which is text or a list of tokens, and what it is with its prompt."""
        step = self.trainer.steps_done
        self.write({"step": step, "prompt": prompt, "sample": tokens})
        self.say(f"sample after step {step}:\n{whole}")

    def say(self, text):
        """Print a text, on rank 0 only."""
        if self.speaks:
            print(text, flush=True)

    def write(self, value):
        """Write a line of JSON. If that fails, say so, and write no more."""
        try:
            print(json.dumps(value), file=self.file, flush=True)
        except OSError as error:
            self.say(f"warning: --metrics ends here: {error}")
            self.file = open(os.devnull, "w")


def describe(trainer):
    """Return lines that say how large the model is and how the run is laid out. Collective."""
    args = trainer.args
    weights = [placement for placement in trainer.originals() if not placement.is_buffer]
    sizes = {weight.name: boxes_of(weight, weight.tensor).numel() for weight in weights}
    parameters = sum(ChainMap(*gather_objects(sizes)).values())  # each name counts once
    device = trainer.device.type
    if device == "cuda":
        device = torch.cuda.get_device_name(trainer.device)
    names = ["pp", "dp", "cp", "tp", "ep", "zero", "replicate", "schedule"]
    names += ["batch_size", "microbatches", "seq_len", "dtype"]
    return f"{parameters:,} parameters on {args.world_size} x {device}", typed(args, *names)


# ---- flags ---------------------------------------------------------------------------------------
#
# A flag is a field of Args that flag() declares. Those of the model are the fields of GPTConfig.
# parse() takes the flags that are given, complete() sets the others, and check() compares all with
# two tables of rules. check_schedule() asks the pipeline's schedule for its own rules.


@dataclass(frozen=True, kw_only=True)
class Args(GPTConfig):
    """All flags of a run, completed and checked, and three facts that follow from the launch."""

    world_size: int
    per_node: int  # so many consecutive ranks always share a node
    ep_nodes: int  # see nodes_of_experts()

    # how the work is divided
    dp: int | None = flag(None, "replicas (default: as many as there are processes for)")
    tp: int = flag(1, "ranks that split the matrices of layers and of the vocabulary")
    cp: int = flag(1, "ranks that split the sequence, in attention too")
    pp: int = flag(1, "ranks of the pipeline")
    zero: int | None = flag(
        None, "stage (default: 1, or 0 if dp x cp is 1 without bf16)", choices=range(4)
    )
    replicate: int | None = flag(None, "copies of ZeRO's shards, as in HSDP (default: 1)")
    cp_method: str = flag("ring", "algorithm of attention across cp", choices=CP_METHODS)
    schedule: str = flag("1f1b", "order of microbatches in the pipeline", choices=SCHEDULES)
    overlap: bool = flag(False, "compute forwards while backwards' tokens travel, and vice versa")
    chunks: int = flag(2, "pipeline stages on each rank")
    microbatches: int | None = flag(
        None, "parts of a batch (default: 1, or with pp up to 4 x pp)", below=10**5
    )
    ep: int = flag(1, "ranks of dp x cp x tp over which the experts are spread")
    expert_parts: int | None = flag(None, "parts in which tokens go to experts (default: 1 or 2)")
    collectives: str = flag("ours", "whose collectives to use", choices=("ours", "backend"))

    # what an optimizer step does
    batch_size: int | None = flag(None, "sequences per step, of all replicas (default: 16 or more)")
    steps: int = flag(1200, "optimizer steps", below=10**8)
    lr: float = flag(3e-3, "peak learning rate")
    warmup: int = flag(20, "steps of linear warm-up", least=0)
    lr_decay: str = flag("cosine", "shape of the final decay", choices=("cosine", "linear", "none"))
    decay_steps: int | None = flag(None, "last steps, which decay (default: all after the warm-up)")
    min_lr: float | None = flag(None, "learning rate after the decay (default: --lr / 10)")
    weight_decay: float = flag(0.1, "weight decay of matrices")
    grad_clip: float = flag(1.0, "largest norm of the gradients, or 0 for no limit")
    seed: int = flag(0, "seed of weights, batches and dropout", least=0, below=2**32)
    dtype: str = flag("fp32", "bf16 also keeps fp32 weights", choices=("fp32", "tf32", "bf16"))
    moments: str = flag("fp32", "dtype of Adam's moments between steps", choices=("fp32", "bf16"))

    # where a run happens, what it reads and what it writes
    device: str = flag(
        "auto", "auto: a GPU per process, or the CPU; shared: processes share GPUs",
        choices=("auto", "cpu", "cuda", "shared"),
    )  # fmt: skip
    data: str | None = flag(None, "text, .jsonl, tokens (.bin), folder (default: Python's sources)")
    checkpoint: str | None = flag(None, "folder to save checkpoints in and to resume from")
    save_every: int | None = flag(None, "steps between checkpoints (default: one at the end)")
    keep: int = flag(2, "checkpoints to keep; older ones are deleted")
    eval_every: int | None = flag(None, "steps between validations (default: one at the end)")
    sample: int | None = flag(
        None, "tokens of every validation's sample (default: 200, or 0 with .bin and no --prompt)",
        least=0,
    )  # fmt: skip
    prompt: str | None = flag(None, "start of a sample: text, or with .bin data tokens as 1,2,3")
    temperature: float = flag(0.8, "randomness of the sample, or 0 for the likeliest tokens")
    print_every: int | None = flag(None, "steps between printed lines (default: about 40 lines)")
    metrics: str | None = flag(None, "file in which to write flags and steps, as lines of JSON")
    peak_tflops: float | None = flag(None, "a device's peak, for mfu (default: some GPUs' in bf16)")
    timeout: int = flag(600, "seconds that a rank waits for another", below=10**6)


FLAGS = {each.name: each for each in fields(Args) if each.metadata}
PATHS = {"data", "checkpoint", "metrics"}  # flags that may differ between the machines of a run

WITH_CHUNKS = [name for name, v in NUM_CHUNKS.items() if v is None]  # --chunks per rank
WITH_PAIRS = ["dualpipe", "dualpipe-v"]  # may compute a forward and a backward together: --overlap

# Rules are expressions of flags, and not functions, because --help and errors show the very rule
# that is evaluated, and an error lists the flags that occur in it.

# {flag: what must hold if it is given, since it would have no effect otherwise}. A value with which
# it asks for nothing is allowed.
NEEDS = {
    "rope_theta": "block == 'llama'",
    "top_k": "experts > 0",
    "shared_experts": "experts > 0 or shared_experts == 0",
    "capacity_factor": "experts > 0",
    "balance": "experts > 0 or balance == 'none'",
    "moe_every": "experts > 0 or moe_every == 1",
    "topk_nodes": "experts > 0",
    "ep": "experts > 0 or ep == 1",
    "expert_parts": "ep > 1 or expert_parts == 1",
    "sp": "tp > 1",
    "cp_method": "cp > 1",
    "schedule": "pp > 1 or schedule == '1f1b'",
    "overlap": f"schedule in {WITH_PAIRS}",
    "chunks": f"schedule in {WITH_CHUNKS} or chunks == 1",
    "replicate": "zero > 0 or replicate == 1",
    "recompute_layers": "recompute == 'full' or recompute_layers == 1",
    "collectives": "world_size > 1 or collectives == 'ours'",
    "decay_steps": "lr_decay != 'none'",
    "min_lr": "lr_decay != 'none'",
    "save_every": "checkpoint",
    "keep": "checkpoint",
    "prompt": "sample != 0",
    "temperature": "sample != 0",
}
# {what must hold: what an error says if it does not, after the rule's flags and their values}. A
# rule may rely on the earlier ones. Besides flags, it may use the other fields of Args.
RULES = {
    "pp * dp * cp * tp == world_size": "pp x dp x cp x tp is not {world_size}, the number of ranks",
    "dtype != 'bf16' or zero != 0":
        "ZeRO keeps the fp32 weights; to split nothing, use --zero 1 with a --replicate of dp x cp",
    "dp * cp % replicate == 0": "replicate does not divide dp x cp",
    "dp * cp * tp % ep == 0": "ep does not divide dp x cp x tp",
    "ep > 1 or not overlap": "no tokens travel to experts of other ranks",
    "batch_size % (dp * microbatches) == 0": "dp x microbatches does not divide the batch",
    "min_lr <= lr": "the learning rate would rise at the end",
    "decay_steps <= max(0, steps - warmup)": "the decay would begin before the warm-up ends",
    "hidden % heads == 0": "heads do not divide the width",
    "heads % kv_heads == 0": "heads of keys and values do not divide heads",
    "block != 'llama' or hidden // heads % 2 == 0": "a head that rotates has an even width",
    "kv_heads % tp == 0": "tp does not divide heads of keys and values",
    "tp <= vocab_size": "a rank would have no tokens",
    "ffn % tp == 0 or (experts and moe_every == 1)": "tp does not divide the width of an MLP",
    "chunks <= layers + 2": "there are too few layers",
    "experts % ep == 0": "ep does not divide the experts",
    "not experts or top_k <= experts": "a token cannot use an expert twice",
    "not experts or moe_every <= layers": "no layer would have experts",
    "not experts or topk_nodes <= ep_nodes": "ep spans only {ep_nodes} nodes",
    "not experts or top_k <= experts // ep_nodes * topk_nodes": "the nodes have too few experts",
    "cp == 1 or seq_len % (2 * cp) == 0": "2 x cp does not divide the sequence",
    "cp == 1 or dropout == 0": "dropout does not work with cp",
    "not (sp or experts) or seq_len % (cp * tp) == 0": "cp x tp does not divide the sequence",
    "cp_method != 'ulysses' or heads % (tp * cp) == 0": "tp x cp does not divide the heads",
    "cp_method != 'ulysses' or cp % (kv_heads // tp) == 0 or kv_heads % (tp * cp) == 0":
        "tp x cp does not divide the heads of keys and values, and these do not divide it",
}  # fmt: skip


def parse(argv, world_size, per_node=None):
    """Return the Args of world_size processes, of which per_node, by default all, share a node.

    Raises ValueError with one line, which names flags and values, if these do not fit together.
    """
    given = vars(Parser().parse_args(argv))
    for name, value in given.items():
        is_empty = value == ""
        need(not is_empty, f"{as_typed(name)}: the value is empty (is a shell variable not set?)")
    args = argparse.Namespace(**{name: each.default for name, each in FLAGS.items()} | given)
    args.world_size = world_size
    args.per_node = per_node or world_size
    complete(args)
    check(args, given)
    args = Args(**vars(args))
    check_schedule(args)
    return args


def complete(args):
    """Set ep_nodes, and the flags that have not been given and whose defaults depend on others."""
    args.kv_heads = args.kv_heads or args.heads
    args.head = args.head or usual_head(args.block)
    args.ffn = args.ffn or 4 * args.hidden
    args.dp = args.dp or max(1, args.world_size // (args.pp * args.cp * args.tp))
    if args.zero is None:
        args.zero = int(args.dp * args.cp > 1 or args.dtype == "bf16")
    args.replicate = args.replicate or 1
    args.ep_nodes = nodes_of_experts(args)
    args.topk_nodes = args.topk_nodes or args.ep_nodes
    # 1F1B is idle for less than 1/3 of the time with 2 x pp microbatches, and 1/5 with 4 x pp
    few = 2 * args.pp if args.pp > 1 else 1
    many = 4 * args.pp if args.pp > 1 else 1
    if args.batch_size is None:  # 16 or the next larger size in which each microbatch has sequences
        smallest = args.dp * (args.microbatches or few)
        args.batch_size = math.ceil(16 / smallest) * smallest
    if args.microbatches is None:
        args.microbatches = math.gcd(args.batch_size // args.dp, many)
    if args.decay_steps is None:
        args.decay_steps = max(0, args.steps - args.warmup)
    if args.min_lr is None:
        args.min_lr = args.lr / 10


def check(args, given):
    """Raise ValueError if flags do not fit together, or if a given flag lacks what it needs.

    args: all fields of Args, set. given: {name: value} of the flags on the command line.
    """
    for name, rule in NEEDS.items():
        if name in given:
            need(holds(rule, args), f"{as_typed(name, given[name])} needs {rule}")
    for rule, fault in RULES.items():
        names = [name for name in compile(rule, "", "eval").co_names if name in FLAGS]
        need(holds(rule, args), f"{typed(args, *names)}: {fault.format_map(vars(args))}")


def holds(rule, args):
    """Return whether an expression of flags, such as "cp > 1", is true."""
    return bool(eval(rule, {}, vars(args)))


def check_schedule(args):
    """Raise ValueError if the pipeline's schedule is not defined for these flags."""
    try:
        routes = schedule_of(args).routes
    except ValueError as error:
        raise ValueError(f"{typed(args, 'schedule', 'pp', 'microbatches')}: {error}") from None
    stages = len(routes[0])
    # the first stage may hold just the embedding, and the last one just the head
    need(args.layers + 2 >= stages, f"{typed(args, 'layers')} is too few for {stages} stages")
    most = max(map(len, divide_layers(args, routes)))
    sentence = f"{typed(args, 'recompute_layers')} is more than a stage has, at most {most}"
    need(args.recompute_layers <= most, sentence)


class Parser(argparse.ArgumentParser):
    """The command line's parser. It raises ValueError on errors, and sets only the flags given."""

    def __init__(self, **options):
        usage = "torchrun --nproc-per-node NUMBER hybrid.py [flags]"
        super().__init__(usage=usage, allow_abbrev=False, **options)
        for name in FLAGS:
            self.add_argument(as_typed(name), default=argparse.SUPPRESS, **options_of(name))

    def error(self, message):
        raise ValueError(message.removeprefix("argument "))


def options_of(name):
    """Return the options of add_argument() for a flag."""
    default = FLAGS[name].default
    details = FLAGS[name].metadata
    kind, *_ = get_args(FLAGS[name].type) or [FLAGS[name].type]  # the int of `int | None`
    help = details["help"]
    if default is not None and kind is not bool:
        help += f" (default: {default})"
    if name in NEEDS:
        help += f"; needs {NEEDS[name]}"
    if kind is bool:
        return {"help": help, "action": "store_true"}
    if kind is str or "choices" in details:
        return {"help": help, "type": kind, "choices": details.get("choices")}
    least = details.get("least", 1 if kind is int else 0)
    below = details.get("below", 2**31 if kind is int else math.inf)
    return {"help": help, "type": at_least(least, kind, below)}


def at_least(least, kind=int, below=math.inf):
    """Return a type for argparse that accepts numbers in [least, below)."""

    def number(text):
        value = kind(text)
        if not least <= value < below:
            raise argparse.ArgumentTypeError(f"{text} is not in [{least}, {below})")
        return value

    return number


def as_typed(name, value=True):
    """Return a flag as it is written on the command line, or "no --flag" without a value."""
    dashed = "--" + name.replace("_", "-")
    if value is None or value is False:
        return f"no {dashed}"
    return dashed if value is True else f"{dashed} {value}"


def typed(args, *names):
    """Return some of the flags with their values, as they are written on the command line."""
    return " ".join(as_typed(name, getattr(args, name)) for name in names)


def flags_of(args):
    """Return {name: value} of all flags, without the other fields of Args."""
    return {name: getattr(args, name) for name in FLAGS}


# ---- one process ---------------------------------------------------------------------------------
#
# How a run ends, and what it prints, under torchrun or in a world of one:
#
#     it has trained                 status 0
#     wrong flags, data, files       TrainingError on all ranks     one line, status 2
#     a step or a save fails         TrainingError on all ranks     one line, status 1
#     SIGTERM with --checkpoint      TrainingError on all ranks     one line, status 143
#     a rank dies or stays silent    its peers lose it              one line of one rank, status 1
#     any other error                one rank raises it             one traceback, status 1
#
# After a restart, a step that was not finite is so again, as it has the same weights and the same
# batch, unless --seed changes the batch. A launcher that sends SIGTERM also sends SIGKILL later,
# torchrun by default after 30 seconds. If the step and the save take longer, they are lost.

# Variables that main() sets unless they are set already. CUDA and NCCL read them when they start.
# If a run hangs because ranks have started kernels of two groups in different orders, set
# NCCL_LAUNCH_ORDER_IMPLICIT=1, which keeps the host's order. It is not set, as it delays kernels.
ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # with fewer queues, kernels wait for unrelated messages
    "NCCL_MAX_P2P_NCHANNELS": "16",  # half of the usual channels, and so half of NCCL's buffers
}


def main(argv=None, work=train):
    """Run work(args, device) on one rank, under torchrun or in a world of one.

    Returns the exit status: 2 if flags are wrong, that of a TrainingError, or what work() returns.
    """
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    argv = sys.argv[1:] if argv is None else argv
    try:
        store = join(argv)
    except (ValueError, RuntimeError) as error:  # a variable of torchrun or a process is missing
        say(f"error: rank {os.environ.get('RANK')}: {first_line(error)}")
        return 2 if isinstance(error, ValueError) else 1
    try:
        status = perform(argv, work)
        barrier()  # no rank may close connections that another still uses
    except Exception as error:
        # If one rank raises an error, the others lose their connection to it, and come here, too.
        # A lost connection is told only if nothing has failed before. A cause is told in any case,
        # but by one rank, since all may have the same one.
        is_first = is_first_with(store, "failure")
        if isinstance(error, dist.DistError):  # another process is missing, silent or has ended
            if is_first:
                say(f"error: rank {dist.get_rank()}: {first_line(error)}")
        elif is_first_with(store, "cause"):
            raise
        return 1
    dist.destroy_process_group()
    return status


def join(argv):
    """Connect the processes of torchrun, or one process alone, over gloo. Return their store.

    The group carries objects, flags and barriers, also on GPUs. Those of the mesh may use NCCL. A
    store holds values by name, which each process can set and get.
    """
    timeout = timedelta(seconds=timeout_of(argv))  # of the group, which cannot change it later
    store, rank, world_size = dist.HashStore(), 0, 1
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    # after a restart, torchrun's store still has the keys of the previous attempt
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    schedule_as_batch()
    options = {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", timeout=timeout, **options)
    return store


def timeout_of(argv):
    """Return --timeout, or its default if a flag is wrong, which agree() refuses on all ranks."""
    try:
        given, _ = Parser(add_help=False).parse_known_args(argv)
    except ValueError:
        return Args.timeout
    return vars(given).get("timeout", Args.timeout)


def perform(argv, work):
    """Return the exit status of work(), or of a TrainingError, which all ranks raise. Collective.
    """
    try:
        args, device = agree(argv)
        torch.set_float32_matmul_precision("high" if args.dtype == "tf32" else "highest")
        gc.freeze()  # what was imported is never garbage, so collections need not look at it
        gc.disable()  # train() collects, at the same steps on all ranks
        return work(args, device) or 0
    except TrainingError as error:
        if dist.get_rank() == 0:
            say(f"error: {error}")
        return error.status


def agree(argv):
    """Return the Args, which are the same on all ranks, and this process's device. Collective.

    Raises TrainingError with status 2 if flags are wrong on any rank, or differ between ranks.
    """
    rank, world_size = rank_and_size()
    # where no launcher sets this variable, all ranks count as one node, which may cost time
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    # ranks of a node are consecutive, so every run of so many ranks is on one node
    per_node = math.gcd(*gather_objects(local_size))
    args = on_all_ranks(parse, argv, world_size, per_node)
    local_rank = int(os.environ.get("LOCAL_RANK", rank % local_size))
    device = on_all_ranks(choose_device, args, local_rank, local_size)
    own = {name: value for name, value in flags_of(args).items() if name not in PATHS}
    own["device"] = f"{args.device} ({device.type})"  # a machine may lack GPUs
    own["checkpoint"] = "PATH" if args.checkpoint else None  # all ranks save, or none does
    require_same(own)
    if over_nccl(args, device):
        schedule_as_batch("SCHED_OTHER")  # messages do not depend on gloo's threads
    return args, device


def choose_device(args, local_rank=0, per_node=1):
    """Return this process's device; raise ValueError if a GPU is missing."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.device == "auto" and 0 < gpus < per_node:
        ways = "--device cuda if each process sees a GPU of its own, --device shared if they share"
        raise ValueError(f"--device auto: {gpus} GPUs for {per_node} processes on a node: {ways}")
    if args.device == "cpu" or (args.device == "auto" and not gpus):
        need(args.dtype != "tf32", "--dtype tf32 needs a GPU")
        return torch.device("cpu")
    need(gpus, f"--device {args.device}: there is no GPU on this machine")
    device = torch.device("cuda", local_rank % gpus)  # a process may see only its own GPU
    torch.cuda.set_device(device)
    return device


def is_first_with(store, what):
    """Return whether no rank has asked this before about `what`."""
    try:
        return store.add(what, 1) == 1
    except RuntimeError:  # the store's process, which is torchrun's or rank 0's, has died
        return True


def say(sentence):
    """Print a line for the user in a single write, so that lines of processes do not mix."""
    print(f"{Path(sys.argv[0]).name}: {sentence}\n", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a sample may have any character
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # PR_SET_PDEATHSIG is 1: this process gets SIGTERM when its parent, torchrun, dies
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    sys.exit(main())
