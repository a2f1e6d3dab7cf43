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
should share a node. A gradient is summed over the ranks that use the same weight for different
tokens: those of dp x cp, and those of tp where sequence parallelism (--sp) or experts divide the
tokens over tp. If the head is tied to the token embedding, their gradient is also summed over the
first and the last stage, and DualPipe sums over the two ranks that hold the same stage.

A layer can have experts, which are MLPs of which each token uses only a few. tp does not split
them, so all ranks that have the layer would hold copies of its experts. Instead, these ranks form
groups of size ep. The ranks of a group divide the experts, and each token travels to its experts
and back. A group takes its ranks from tp first, and then from dp x cp, so ep is not another axis.

A rank holds   1/tp of its layers' matrices and 1/ep of their experts. Over dp x cp, ZeRO-1 splits
               the optimizer state, ZeRO-2 also the gradients, and ZeRO-3 also the weights
It sends       what is listed above; the other files derive and count the bytes
Overlap        pp   activations travel while other microbatches compute
               dp   gradients are summed while backward still computes
               cp   keys and values travel while attention to the previous ones is computed (ring)
               tp   in backward, gradients of activations are summed while those of weights are
                    computed; with --sp, large messages also travel during forward's products
               ep   if messages are long, some tokens travel while experts compute others. With
                    --overlap, a forward and a backward compute beside each other's messages
PyTorch's      DTensor over a DeviceMesh combines all axes but pp. Here all tensors are plain

A layout is a choice of these four sizes, of ep, of ZeRO's stage, of the pipeline's schedule and of
--sp. With four exceptions, every layout computes what one process does, up to rounding. The loss is
the sum of the token losses divided by the *global* number of tokens, so gradients are summed and
never averaged. Initial weights depend only on the model and the seed, and a batch only on its
shape, the data, the step and the seed. The exceptions, which depend on the layout, are dropout
masks, the tokens that full experts drop, the experts that --topk-nodes rules out, and balance
losses, which are computed for each microbatch.

The model is GPT-2 (Radford et al., 2019), down to its parameters' names, or Llama (Touvron et al.,
2023) under the same names. The grid of pp, dp and tp is from Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021.

plain_step() shows a step over pp, dp and tp in its plain form. train() is the training loop. It
calls launch_step() and finish_step(), which together are Trainer.step(), and makes the next batch
between them. The rest serves these.

    torchrun --nproc-per-node 8 hybrid.py --tp 2 --pp 2 --microbatches 4    # dp is 8 / (2 x 2) = 2
"""

import argparse
import codecs
import ctypes
import difflib
import fcntl
import gc
import hashlib
import io
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import stat
import sys
import sysconfig
import time
from collections import ChainMap, Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractContextManager, contextmanager, nullcontext, redirect_stdout, suppress,
)
from dataclasses import dataclass, field, fields, replace
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
    ReduceOp, all_reduce, barrier, broadcast, gather_objects, rank_and_size,
    schedule_as_batch, set_backend_collectives, set_ranks_per_node,
)
from ddp import DistributedDataParallel, clip_grads_with_norm_, get_total_norm
from expert_parallel import MoE, Router, tally_metrics
from pipeline import (
    SCHEDULES, Pipeline, WeightGradStore, forward_only, one_f_one_b_step, pair_up, simulate,
    sum_replicas,
)
from sequence_parallel import (
    allgather_attention, context_positions, dropout, recompute, recompute_groups, ring_attention,
    run_layers, ulysses_attention,
)
from tensor_parallel import (
    ColumnParallelLinear, ParallelSelfAttention, RowParallelLinear, Shard, ShardedRandomState,
    VocabParallelEmbedding, attention, check_gradients_over_tp, column_parallel_linear,
    mark_sum_over_tp, split_attention, split_mlp, sum_gradients_over_tp,
    vocab_parallel_cross_entropy,
)
from zero import AdamW, FullyShardedDataParallel

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

    Collective: each rank creates all groups, in the same order, also those that it is not in.
    """
    grid = torch.arange(pp * dp * tp).view(pp, dp, tp)
    groups = {}
    for axis, name in enumerate(("pp", "dp", "tp")):
        for ranks in grid.movedim(axis, 2).flatten(0, 1).tolist():  # one row for each group
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                groups[name] = group
                # If a group has only NCCL, all its ranks must take part in its first operation.
                # That of pp would be a message between two of them, so each begins with a barrier.
                barrier(group)
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
    """Return this rank's chunk of a weight as a parameter. All ranks have the whole weight."""
    rank, P = rank_and_size(group)
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
        self.qkv = plain_part(whole["qkv"], 1, tp_group)  # the same heads of q, k and v
        self.out = plain_part(whole["out"], 1, tp_group)
        self.up = plain_part(whole["up"], 0, tp_group)
        self.down = plain_part(whole["down"], 1, tp_group)

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

    tests/tools/plain_train.py trains with it, on 8 processes of torchrun, say.
    dp divides the B sequences without a remainder, and microbatches those of a dp rank. All loss
    terms are divided by the number of tokens in the whole batch, so gradients are summed: over
    microbatches by autograd, and over dp by an all-reduce. Each rank then updates its own weights,
    for which AdamW needs nothing from other ranks.

    Gradients need no sum over tp. qkv, out, up and down are parts that no other rank of the group
    has (type V in "derivatives", collectives.py). tokens, positions and head are copies, which the
    ranks use for the same x, so each copy has the whole gradient (type I). What tp sums in backward
    are gradients of activations, in copy_to_group().
    """
    dp_rank, dp = rank_and_size(groups["dp"])
    own = tokens.chunk(dp)[dp_rank]
    inputs = own[:, :-1].chunk(microbatches)
    targets = own[:, 1:].chunk(microbatches)
    if not stage.is_first:  # then an input says only what a received tensor is like
        number = torch.empty((), device=tokens.device)  # the only one that takes memory
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


# The other techniques change a few lines of the above each:
#
#     ZeRO-1  sharded_step(parameters, update, groups["dp"]) takes the place of the all-reduces of
#             gradients and of optimizer.step(). It averages gradients, so loss_fn divides by the
#             number of tokens of one dp rank, and the sum of losses is divided by dp
#     cp      is one more axis. A rank takes its part of each sequence's inputs and targets, and of
#             the embedding of positions. simple_allgather_attention() takes the place of attention.
#             Losses and gradients are summed over dp x cp, except for the embedding of positions.
#             Each cp rank has a part of it, whose gradient is summed over dp alone
#     sp      x is (B, T/tp, D), also between stages. scatter_to_group(x, 1, groups["tp"]) follows
#             the embeddings, and gather_from_group() precedes the head. In column_linear(),
#             all_gather_to_group() along dim 1 takes the place of copy_to_group(), and in
#             row_linear() reduce_scatter_to_group() that of reduce_from_group(). If a norm has
#             weights, each rank of tp uses them for its tokens only, so their gradients are summed
#             over tp, too
#     ep      switch_layer(x.flatten(0, 1), router, expert, groups["dp"]).view_as(x), with one
#             expert on each dp rank, takes the place of split_mlp(). The router's gradient is
#             summed over dp. An expert's is complete, so no sum is needed
#
# The same holds for what a training run adds:
#
#     vocabulary  split_embedding(), column_linear() and split_cross_entropy() take the places of
#                 embedding, head and loss. tokens and head are then parts of their matrices
#     tied head   tokens on the first stage and head on the last begin equal, and their gradients
#                 are summed over the two, so they stay equal
#     clipping    the norm's squares are summed over pp and tp. What all ranks of tp have a copy of
#                 counts on one of them, and a tied weight on one of its stages
#
# One rule covers all of them: sum a gradient over the ranks that hold the same weight and have
# computed different parts of its gradient.

# ==== upper floor =================================================================================
#
# plain_step() is training on a grid of processes. train() below does the same for all axes, with
# ZeRO, recomputation and any schedule, and with messages that travel beside the computation:
#
#     plain_step()                       Trainer.launch_step(), finish_step()
#     one_f_one_b_step()                 Pipeline.step()
#     the all-reduces of gradients       wrap(), DDP or FSDP, which start them in backward
#     the rule for sums                  Home, Trainer.sum_shared_gradients()
#     plain_groups()                     slices_of(), make_mesh()
#     plain_weights(), plain_part()      initialize(), set_shard(): no rank has a whole weight
#     PlainStage, PlainLayer             GPT, Block
#
# Read "the loop" and "one step" first, then what they rest on: "mesh", "where each parameter lives"
# and "model". From "text" on, this file serves a long run on real data: data, checkpoints, metrics,
# flags and errors. A reader who wants the technique alone may skip all that.

CP_METHODS = {
    "allgather": allgather_attention, "ring": ring_attention, "ulysses": ulysses_attention,
}  # fmt: skip
WITH_CHUNKS = " or ".join(name for name, kind in SCHEDULES.items() if kind.v is None)
WITH_PAIRS = "dualpipe or dualpipe-v"
IGNORE_INDEX = -100  # a target that does not count
GARBAGE_EVERY = 50  # steps between Python's collections of garbage

# ---- the loop ------------------------------------------------------------------------------------
#
# From the loop to the wire, and what each call sends over which axis:
#
#     train()
#       Trainer.launch_step()
#         forward_backward()
#           run()                     dp x cp  the number of tokens that count, and the loss
#                                     pp       the loss, which only the last stage has
#           Pipeline.step()           pp       per microbatch, activations and their gradients
#             GPT.forward()           tp       the token embedding's sum, and two sums per layer
#               attention             cp       keys and values, or heads and positions (Ulysses)
#               MoE                   ep       tokens to their experts, and back; balance losses
#                                              send a few numbers over dp, cp and tp
#             Trainer.loss()          tp       a maximum and sums per token, in place of all logits
#             backward                         the same in reverse
#               DDP or FSDP           dp x cp  gradients, beside backward; ZeRO-3 gathers weights
#                                              here and in forward, ZeRO-1 and 2 in forward
#           finish_grad_sync()        dp x cp  nothing: it waits for these sums
#           sum_shared_gradients()    tp       where a rank's gradients cover its own tokens only
#                                     pp       the tied weight's two copies, DualPipe's replicas
#         clip_gradients()            tp, pp   squares of the norm; with ZeRO also dp x cp, for
#                                              experts also ep
#         sum_tallies()               all      with experts, how many tokens each got
#         update()                             nothing: each rank updates what it owns
#       Saver.must_stop()             all      with --checkpoint, whether a rank has to stop
#       Trainer.finish_step()                  nothing: it waits for the device
#       Saver.save(), validate()               see there
#
# All messages of a step are sent by collectives.py.


def train(args, device):
    """Train, from the last checkpoint if there is one, and validate. Collective.

    Raises TrainingError if I/O or a step fails and, with --checkpoint, on SIGTERM after saving.
    A save that is under way ends first.
    """
    on_all_ranks(check_memory, args, device)
    data, data_digest = read_data(args)
    on_all_ranks(prompt_of, args, data)  # refuses a wrong --prompt before the first step
    trainer = Trainer(args, make_mesh(args), device)
    saver = None
    if args.checkpoint:
        folder = Path(args.checkpoint)
        lock = on_all_ranks(claim, folder, prefix=f"--checkpoint {folder}: ")  # held until the end
        resume(trainer, folder, data_digest)
        saver = Saver(trainer, folder, data_digest)
        signal.signal(signal.SIGTERM, lambda *_: setattr(saver, "sigterm", True))
    log = Log(trainer)
    if trainer.steps_done >= args.steps:
        log.say(f"--steps {args.steps}: nothing to train, as step {trainer.steps_done} is saved")
        validate(trainer, data, log)

    batch = trainer.batch_of(data, trainer.steps_done)
    with saver or nullcontext(), collects_garbage_by_hand():  # at the end, saver waits for its save
        while trainer.steps_done < args.steps:
            began = time.perf_counter()
            is_first = not trainer.has_stepped
            scalars = trainer.launch_step(*batch)
            next_batch = trainer.batch_of(data, trainer.steps_done + 1)  # while a GPU computes
            must_stop = saver is not None and saver.must_stop()
            metrics = trainer.finish_step(scalars, *batch)
            if is_first:
                require_equal_gradients(trainer)
            batch = next_batch
            is_last = must_stop or trainer.steps_done == args.steps
            log.step(metrics, time.perf_counter() - began, must_print=must_stop)
            if trainer.steps_done % GARBAGE_EVERY == 0:
                gc.collect()  # on all ranks at the same time
            if is_last or is_multiple(trainer.steps_done, args.save_every):
                require_equal_copies(trainer, saver)
                if saver is not None:
                    saver.save()  # raises the previous save's error
            if must_stop:
                end = f"SIGTERM; --checkpoint {args.checkpoint} has step {trainer.steps_done}"
                raise TrainingError(end, status=128 + signal.SIGTERM)
            if is_last or is_multiple(trainer.steps_done, args.eval_every):
                validate(trainer, data, log)


def is_multiple(step, every):
    """Return whether something is due at this step. every: a number of steps, or None for never."""
    return every is not None and step % every == 0


def evaluate(trainer, data, batches=8):
    """Return the mean loss per token of `batches` validation batches, which are always the same."""
    total = 0.0
    for index in range(batches):
        batch = trainer.batch_of(data, index, "validation")
        loss = trainer.forward(*batch).item()
        if not math.isfinite(loss):
            check_vocabulary(*batch, trainer.args.vocab_size)
        total += loss
    return total / batches


def validate(trainer, data, log):
    """Report the loss of a validation, and a sample. Collective."""
    log.validation(evaluate(trainer, data))
    write_sample(trainer, data, log)


@contextmanager
def collects_garbage_by_hand():
    """Keep Python from collecting cyclic garbage by itself.

    It would do so at different moments on each rank, and a rank that pauses inside a step keeps all
    others waiting. Steps leave no tensors in cycles, so collecting seldom takes no more memory.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# ---- one step ------------------------------------------------------------------------------------


class Trainer:
    """One rank's part of the training, given its Args and its Mesh, which are described below.

    positions: the positions of each sequence that this rank holds.
    replicated: whether the pipeline holds two replicas of the model, as DualPipe does.
    chunks: a GPT for each pipeline stage that this rank has; unique_chunks: those of one replica.
    homes: Homes, and placements: a Placement for each parameter and buffer of this rank, both
        described under "where each parameter lives".
    mixtures: {row in sum_tallies(): MoE} of this rank's mixtures of experts.
    stages: the chunks, each wrapped in DistributedDataParallel or FullyShardedDataParallel.
    optimizer: that of make_optimizer(). optimizer_options: its groups' options before the first
        step, which are compared with those of later steps, see kept_elsewhere().
    pipeline, evaluation: Pipelines that run the stages over a batch, with and without backward.
    steps_done: the steps of the whole run. has_stepped: whether this process has taken any.
    """

    def __init__(self, args, mesh, device):
        self.args, self.mesh, self.device = args, mesh, device
        self.steps_done = 0
        self.has_stepped = False
        schedule = schedule_of(args)
        self.replicated = len(schedule.routes) > 1
        self.positions = torch.arange(args.seq_len)
        if args.cp > 1:
            self.positions = context_positions(args.seq_len, mesh.cp_group)
        deferred = WeightGradStore()
        self.chunks = make_chunks(args, mesh, device, schedule.routes, self.positions, deferred)
        self.unique_chunks = self.chunks[:1] if self.replicated else self.chunks
        self.homes = homes_of(mesh)
        self.placements = on_all_ranks(placements_of, self.chunks, self.homes, self.replicated)
        initialize(self.placements, args.seed)
        self.mixtures = {}
        for chunk in self.chunks:
            for i, layer in chunk.transformer["h"].items():
                if isinstance(layer.mlp, MoE):  # layers e - 1, 2e - 1, ... for e = --moe-every
                    self.mixtures[int(i) // args.moe_every] = layer.mlp
        self.stages = wrap(args, self.homes, self.chunks, self.placements)
        self.optimizer = make_optimizer(args, self.parameters())
        self.optimizer_options = [dict(group) for group in self.optimizer.param_groups]
        require_elementwise(args, self.optimizer)
        rows = args.batch_size // (args.dp * args.microbatches)
        shape = len(self.chunks[0].positions), rows, args.hidden  # of a microbatch's activations
        dtype = torch.bfloat16 if args.dtype == "bf16" else torch.get_default_dtype()
        options = {"group": mesh.pp_group, "shape": shape, "dtype": dtype, "device": device}
        evaluation = forward_only(args.pp, args.microbatches, schedule.routes[0])
        stages = self.stages[: len(self.unique_chunks)]
        self.evaluation = Pipeline(stages, evaluation, self.loss, **options)
        self.pipeline = Pipeline(
            self.stages, schedule, self.loss, **options, defer=deferred,
            # ZeRO-2 and 3 reduce the gradients of each microbatch, so that no rank keeps all
            sync_each=args.zero > 1,
        )  # fmt: skip
        if args.overlap:
            for mixture in self.mixtures.values():
                mixture.hand_over = self.pipeline.turns.hand_over

    def parameters(self, home=None):
        """Return this rank's parameters, or ZeRO's pieces of them: all, or those of one Home."""
        rows = [row for row in self.placements if not row.is_buffer]
        return [row.tensor for row in rows if home is None or row.home is home]

    def originals(self):
        """Return the Placements that are not copies: what is saved and counted."""
        return [row for row in self.placements if not row.is_copy]

    def step(self, inputs, targets):
        """Take one optimizer step on this rank's inputs and targets, (batch_size / dp, seq_len).

        Returns {name: value}: the global loss, the gradient norm before clipping, and more. Raises
        TrainingError, with the weights unchanged, if the loss or the norm is not finite.
        """
        return self.finish_step(self.launch_step(inputs, targets), inputs, targets)

    def launch_step(self, inputs, targets):
        """Launch a step, which a GPU may still be computing when this returns.

        Returns {name: scalar on the device} for finish_step(), which must follow.
        """
        args = self.args
        seed_dropout(args.seed, self.steps_done, self.mesh)
        loss = self.forward_backward(inputs, targets)
        norm = self.clip_gradients()
        tallies = sum_tallies(self.mixtures, args, self.mesh, self.device)
        # The device decides whether to update, so the host launches the update without waiting.
        is_finite = torch.stack([loss, norm]).isfinite().all()
        rate = learning_rate(self.steps_done, args)
        self.update(rate, tallies, is_finite)
        self.has_stepped = True
        scalars = {"loss": loss, "grad_norm": norm}
        if args.experts:
            scalars |= tally_metrics(tallies, args.microbatches, args.balance == "aux")
        return scalars

    def finish_step(self, scalars, inputs, targets):
        """Wait for a launched step, and return its metrics or raise TrainingError. See step()."""
        args = self.args
        rate = self.optimizer.param_groups[0]["lr"]
        # The host waits for the device here. Elsewhere in a step it waits only in layers with
        # experts, and in update() for an optimizer that is not fused.
        metrics = dict(zip(scalars, torch.stack([*scalars.values()]).tolist()))
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
            check_vocabulary(inputs, targets, args.vocab_size)
            numbers = "loss {loss:.4f}, grad norm {grad_norm:.3f}".format_map(metrics)
            raise TrainingError(f"step {self.steps_done + 1} is not finite: {numbers}")
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
        """Return a microbatch's part of the loss: sum of its token losses / tokens of the batch."""
        losses = vocab_parallel_cross_entropy(
            logits.flatten(0, 1), targets.t().flatten(), self.args.vocab_size, IGNORE_INDEX,
            self.mesh.tp_group, inplace=True,
        )  # fmt: skip
        return losses.sum() / num_tokens

    def sum_shared_gradients(self):
        """Sum the gradients of a weight's copies where each copy has only part of the gradient."""
        for home in self.homes:
            own = [row.tensor for row in self.placements if row.sum_over_tp and row.home is home]
            sum_gradients_over_tp(own, home.copies_group, check=not self.has_stepped)
        if self.replicated:
            sum_replicas(self.chunks, self.mesh.pp_group)
        tied = [row.tensor.grad.detach() for row in self.placements if row.is_tied]
        if len(tied) == 2:  # embedding and head are on the same rank
            tied[0].add_(tied[1])
            tied[1].copy_(tied[0])
        elif tied:  # one weight, in a group of one if pp is 1; else one of its two copies
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
            own = [row for row in self.placements if row.home is home and not row.is_buffer]
            counted = [row.tensor.grad for row in own if row.counts]
            # squares are summed over ranks with different elements: ZeRO's shards, then parts
            groups = [home.shard_group] if self.args.zero else []
            groups.append(home.split_group)
            nothing = torch.zeros(0, device=self.device)  # a rank that counts nothing takes part
            # A rank without experts skips their Home, as do all ranks of its groups, which have the
            # same layers. Every rank has other parameters, so there is a norm.
            if own:
                norms.append(get_total_norm([nothing, *counted], groups=groups))
        return get_total_norm(norms, groups=[self.mesh.pp_group])

    def update(self, rate, tallies, is_finite):
        """Update weights and the routers' biases if is_finite, a tensor on the device, is true."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.optimizer.defaults.get("fused"):
            # as with torch.amp.GradScaler, a fused step changes nothing if this is 1
            self.optimizer.found_inf = (~is_finite).float()
            self.optimizer.step()
        elif is_finite:  # for which the host waits
            self.optimizer.step()
        if self.args.balance == "bias":
            for row, layer in self.mixtures.items():
                loads = tallies[row, : layer.num_experts]
                layer.router.update_bias(loads * is_finite)  # loads that are all 0 change no bias

    def batch_of(self, data, step, part="train"):
        """Return this rank's inputs and targets, (batch_size / dp, seq_len), of a batch of Data."""
        args = self.args
        return data.batch(step, args.batch_size, args.seq_len, args.seed, self.own_rows(), part)

    def own_rows(self):
        """Return the slice of this rank's rows in the global batch."""
        rows = self.args.batch_size // self.args.dp
        begin = dist.get_rank(self.mesh.dp_group) * rows
        return slice(begin, begin + rows)

    def own_tokens(self, *batches):
        """Copy this rank's positions of (rows, seq_len) batches to the device in one transfer."""
        tokens = torch.stack(batches)[:, :, self.positions]
        if self.device.type == "cuda":
            tokens = tokens.pin_memory()  # so that the host need not wait for the copy
        return tokens.to(self.device, non_blocking=True)


def seed_dropout(seed, step, mesh):
    """Seed the dropout masks of a step: the same on the ranks of tp, different on all others."""
    coordinates = dist.get_rank(mesh.dp_cp_group), dist.get_rank(mesh.pp_group)
    sequence = np.random.SeedSequence([seed, step, *coordinates])
    torch.manual_seed(int(sequence.generate_state(1)[0]))


@torch.no_grad()
def sum_tallies(mixtures, args, mesh, device):
    """Return a row for each layer with experts: its tally, summed over ranks. Reset the tallies."""
    sizes = args.layers // args.moe_every, args.experts + 3
    tallies = torch.zeros(sizes, dtype=torch.float64, device=device)
    for row, layer in mixtures.items():
        tallies[row].copy_(layer.tally)
        layer.tally.zero_()
    if args.experts:
        for group in mesh.dp_cp_group, mesh.tp_group, mesh.pp_group:
            all_reduce(tallies, group=group)
    return tallies


def check_vocabulary(inputs, targets, size):
    """Raise TrainingError if a token of the batch is outside the vocabulary. Collective."""
    if on_any_rank(max(inputs.max().item(), targets.max().item()) >= size):
        raise TrainingError(f"--data: a token is outside --vocab-size {size}")


# ---- what a step works with ----------------------------------------------------------------------


def make_chunks(args, mesh, device, routes, positions, deferred):
    """Create this rank's chunks. routes: those of the schedule. deferred: a WeightGradStore."""
    method = CP_METHODS[args.cp_method]
    cp_fn = lambda q, k, v, dropout: method(q, k, v, mesh.cp_group)  # check() excludes dropout
    rank = dist.get_rank(mesh.pp_group)
    # a route lists the slot of each stage, (rank, number among the rank's chunks)
    stage_at = {slot: stage for route in routes for stage, slot in enumerate(route)}
    divided = divide_layers(args, routes)
    parallel = Parallel(
        tp_group=mesh.tp_group,
        random=ShardedRandomState(device, mesh.tp_group),
        attention_fn=cp_fn if args.cp > 1 else attention,
        defer=deferred,
        make_moe=partial(make_moe, args, mesh),
    )
    chunks = []
    for stage in [stage_at[slot] for slot in sorted(stage_at) if slot[0] == rank]:
        with torch.device("meta"):  # parameters get memory below; positions have it already
            chunk = GPT(
                args, parallel, positions.to(device), divided[stage],
                is_first=stage == 0, is_last=stage == len(divided) - 1,
            )  # fmt: skip
        chunk.to_empty(device=device)
        chunks.append(chunk)
    return chunks


def wrap(args, homes, chunks, placements):
    """Wrap the chunks so that their gradients are summed over dp x cp, by DDP or by ZeRO."""
    weights = [row for row in placements if not row.is_buffer]
    if args.zero:
        return wrap_in_zero(args, homes, chunks, weights)
    return wrap_in_ddp(homes, chunks, weights)


def wrap_in_ddp(homes, chunks, weights):
    """Wrap each chunk in DistributedDataParallel. weights: the Placements of parameters."""
    groups = {row.tensor: row.home.dp_group for row in weights if row.home is homes.experts}
    stages = []
    for chunk in chunks:
        stage = DistributedDataParallel(
            chunk, process_group=homes.dense.dp_group, groups=groups, broadcast_buffers=False,
            gradient_as_bucket_view=True,  # no gradient is used after its step
            gradient_divide_factor=1, wait_in_backward=False,
        )  # fmt: skip
        stages.append(stage)
    return stages


def wrap_in_zero(args, homes, chunks, weights):
    """Wrap each chunk in FullyShardedDataParallel. weights: the Placements of parameters.

    With bf16, gradients are summed in fp32, over microbatches and over ranks. On a GPU, linear
    layers also compute theirs in fp32. Elsewhere, a gradient from one microbatch is first rounded
    to bf16. A router's weight is in fp32 everywhere.
    """
    is_bf16 = args.dtype == "bf16"
    groups = {}
    for row in weights:
        if row.home is homes.experts:
            groups[row.tensor] = row.home.shard_group, row.home.replicate_group
    # A weight that tp does not split has a copy on each rank of tp, and sum_shared_gradients() adds
    # shards of these copies, so they must be cut alike. Where a weight is cut depends on the others
    # in its flat tensor, and a part that tp splits may have other sizes on other ranks. So such
    # parts have a flat tensor of their own, and with them the tied weight, which two stages have.
    # Experts need none, since ep divides them evenly.
    is_apart = lambda row: row.is_tied or (args.tp > 1 and row.shard is not None)
    apart = {row.tensor for row in weights if is_apart(row)}.difference(groups)
    under_way = deque()
    stages = []
    for chunk in chunks:
        stage = FullyShardedDataParallel(
            chunk, units=chunk.transformer["h"].values(), stage=args.zero,
            process_group=homes.dense.shard_group, replicate_group=homes.dense.replicate_group,
            groups=groups, apart=apart & set(chunk.parameters()),
            param_dtype=torch.bfloat16 if is_bf16 else None,
            reduce_dtype=torch.float32 if is_bf16 else None,
            own_dtype=[m.weight for m in chunk.modules() if isinstance(m, Router)],
            gradient_divide_factor=1, wait_in_backward=False, under_way=under_way,
        )  # fmt: skip
        stages.append(stage)
    return stages


# ---- the optimizer -------------------------------------------------------------------------------

# the optimizers of PyTorch that update each element by itself
ELEMENTWISE = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax,
    torch.optim.AdamW, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip


def make_optimizer(args, parameters):
    """Create AdamW with weight decay for matrices only.

    A class whose option `fused` is true takes found_inf, a tensor, in step(): it changes nothing
    where that is 1, so the host need not wait. For any other class the host waits, see update().

    Another optimizer can take its place. A class that is not in ELEMENTWISE declares by an
    attribute, `elementwise = True`, that it works where tp or ZeRO cuts matrices. Checkpoints hold
    what optimizer_state() accepts.
    """
    is_matrix = lambda parameter: len(getattr(parameter, "whole_shape", parameter.shape)) > 1
    matrices = [parameter for parameter in parameters if is_matrix(parameter)]
    others = [parameter for parameter in parameters if not is_matrix(parameter)]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    options = {"lr": args.lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": args.weight_decay}
    if args.moments == "bf16":
        return AdamW(groups, **options, moments_dtype=torch.bfloat16)
    return torch.optim.AdamW(groups, **options, fused=True)


def require_elementwise(args, optimizer):
    """Raise TrainingError if tp or ZeRO cuts matrices that this optimizer needs as a whole."""
    kind = type(optimizer)
    is_cut = args.tp > 1 or args.zero
    if not is_cut or kind in ELEMENTWISE or getattr(kind, "elementwise", False):
        return
    cuts = as_typed("tp", args.tp) if args.tp > 1 else as_typed("zero", args.zero)
    ways = f"set {kind.__name__}.elementwise = True if it updates each element by itself"
    raise TrainingError(f"{cuts} cuts matrices, which {kind.__name__} may need whole: {ways}", 2)


def learning_rate(step, args):
    r"""Return the learning rate of step 0, 1, ...

    It rises in the first --warmup steps, and the next one has --lr. In the last --decay-steps it
    falls towards --min-lr, which a step after the last one would have:

        lr         ___________________
                  /                   \    linear, or half a period of a cosine
                 /                     \   (Loshchilov and Hutter, 2017)
                /                       min_lr
              warmup       stable       decay

    By default the decay begins right after the warm-up. With fewer --decay-steps, the rate is
    stable in between (Hu et al., "MiniCPM", 2024).
    """
    if step < args.warmup:
        return args.lr * (step + 1) / (args.warmup + 1)
    begin = args.steps - args.decay_steps
    progress = max(0, step - begin) / max(1, args.decay_steps)
    if args.lr_decay == "none":
        height = 1.0
    elif args.lr_decay == "linear":
        height = 1 - progress
    else:
        height = (1 + math.cos(math.pi * progress)) / 2
    floor = args.min_lr / max(args.lr, 1e-300)  # --lr may be 0
    return args.lr * (floor + (1 - floor) * height)


# ---- mesh ----------------------------------------------------------------------------------------


class Mesh(SimpleNamespace):
    """The groups of this process. Its rank in the group of an axis is its coordinate on this axis.

    pp_group, dp_group, cp_group, tp_group   the ranks that differ on this axis only
    dp_cp_group              the ranks of dp x cp, over which gradients are summed
    shard_group              neighbours in dp_cp_group that together hold one copy of ZeRO's shards
    replicate_group          the ranks of dp_cp_group that hold the same shards
    ep_group                 ranks of dp x cp x tp that together hold each expert of a layer once
    expert_dp_group          the ranks of dp x cp that hold the same experts
    expert_shard_group       neighbours in expert_dp_group that together hold one copy of the shards
    expert_replicate_group   the ranks of expert_dp_group that hold the same shards
    expert_tp_group          the ranks of tp that hold the same experts
    node_group               the ranks of ep_group on this node
    cross_group              the ranks of ep_group with the same rank in their node_group
    embedding_group          the first and the last rank of pp_group; others have no such group

    With pp 2, dp 2 and tp 2, the grid is [[0 1] [2 3]] in stage 0 and [[4 5] [6 7]] in stage 1:

        tp_group           0 1, 2 3, 4 5, 6 7    the same stage and replica
        dp_group           0 2, 1 3, 4 6, 5 7    the same stage and place in tp
        pp_group           0 4, 1 5, 2 6, 3 7    the same replica and place in tp

    Experts are spread over gcd(ep, tp) ranks of tp, and then over dp x cp. With 8 ranks and pp 1:

                           tp 2 and ep 4         tp 4 and ep 2
        tp_group           0 1, 2 3, 4 5, 6 7    0 1 2 3, 4 5 6 7
        ep_group           0 1 2 3, 4 5 6 7      0 1, 2 3, 4 5, 6 7
        expert_dp_group    0 4, 1 5, 2 6, 3 7    0 4, 1 5, 2 6, 3 7
        expert_tp_group    each rank is alone    0 2, 1 3, 4 6, 5 7

    With dp 4 and --replicate 2, ZeRO cuts over 0 1 and 2 3, and 0 2 and 1 3 have the same shards.
    With ep 8 over two nodes of four ranks:

        node_group         0 1 2 3, 4 5 6 7
        cross_group        0 4, 1 5, 2 6, 3 7
    """


GRADIENT_GROUPS = {  # over which DDP and ZeRO sum gradients
    "dp_cp_group", "shard_group", "replicate_group",
    "expert_dp_group", "expert_shard_group", "expert_replicate_group",
}  # fmt: skip


def make_mesh(args, groups=None):
    """Create all groups of the grid and return this process's Mesh. Collective.

    Names with the same ranks share a group, since on GPUs a group takes memory for each peer. But
    gradients have groups of their own, because the operations of a group run in order, and layers'
    messages should not wait for gradients. groups: those of earlier meshes, to be used again.
    """
    rank = dist.get_rank()
    groups = {} if groups is None else groups
    of_gradients = set(GRADIENT_GROUPS)
    if not args.experts:  # nothing is sent over dp_group, so gradients may share it
        of_gradients.add("dp_group")
    mine = {}
    degrees = args.pp, args.dp, args.cp, args.tp, args.ep, args.ep_nodes, args.replicate
    for name, slices in slices_of(*degrees).items():  # in the same order on all ranks
        for ranks in map(tuple, slices.tolist()):
            is_alone = len(ranks) == 1
            if is_alone and rank not in ranks:
                continue  # a group of one is created by its rank alone
            key = ranks, not is_alone and name in of_gradients
            if key not in groups:
                groups[key] = make_group(ranks, timedelta(seconds=args.timeout))
            if rank in ranks:
                mine[name] = groups[key]
    for group in dict.fromkeys(mine.values()):
        nodes = [rank // args.per_node for rank in dist.get_process_group_ranks(group)]
        sizes = {nodes.count(node) for node in nodes}
        set_ranks_per_node(min(sizes) if len(sizes) == 1 else 1, group)  # 1 if sizes differ
        if args.collectives == "backend":
            set_backend_collectives(group)
        # if a group has only NCCL, without a bound GPU, all ranks must take part in its first
        # operation, which is this one
        if not is_bound_to_gpu():
            barrier(group)
    return Mesh(**mine)


def is_bound_to_gpu():
    """Return whether join() has connected this process's own GPU over NCCL."""
    return dist.group.WORLD.bound_device_id is not None


def make_group(ranks, timeout):
    """Create a group. All ranks must call this, but a group of one is created by its rank alone.

    On GPUs a group has only NCCL, on a stream of high priority, so that messages do not wait for
    kernels of the computation. A group of one has gloo, which costs nothing until it is used.
    """
    is_alone = len(ranks) == 1
    if is_alone or not is_bound_to_gpu():
        backend = "gloo" if is_bound_to_gpu() else None
        return dist.new_group(ranks, timeout, backend, use_local_synchronization=is_alone)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # new_group() warns if it differs
    return dist.new_group(ranks, timeout, "nccl", options)


def slices_of(pp, dp, cp, tp, ep=1, ep_nodes=1, replicate=1):
    """Cut the grid (pp, dp, cp, tp) into groups. Return {name: ranks}, one row per group.

    ep_nodes: the number of nodes over which an ep_group is spread.
    replicate: the number of copies of ZeRO's shards in a dp_cp_group. In an expert_dp_group it is
        gcd(replicate, size of the group).
    """
    grid = torch.arange(pp * dp * cp * tp).view(pp, dp, cp, tp)
    replicas = differing(grid, 1, 2)
    ends = grid[[0, -1]] if pp > 1 else grid
    in_tp = math.gcd(ep, tp)
    # Experts divide dp x cp and tp into copies and parts. A rank's coordinates on the part dims say
    # which experts it holds, and those on the copy dims say which ep_group of the stage it is in.
    # Mesh's examples have the shapes (1, 2, 2, 1, 2) and (1, 2, 1, 2, 2).
    domain = grid.view(pp, -1, ep // in_tp, tp // in_tp, in_tp)
    _, COPY, PART, TP_COPY, TP_PART = range(5)  # dims; the first is the stage
    ep_groups = differing(domain, PART, TP_PART)
    expert_replicas = differing(domain, COPY)
    shard_copies = math.gcd(replicate, expert_replicas.shape[1])
    # A row consists of `count` runs of neighbours. A group is one run, or one rank of each run.
    runs_of = lambda rows, count: rows.reshape(-1, rows.shape[1] // count)
    across_runs = lambda rows, count: rows.unflatten(1, (count, -1)).mT.flatten(0, 1)
    return {
        "pp_group": differing(grid, 0),
        "dp_group": differing(grid, 1),
        "cp_group": differing(grid, 2),
        "tp_group": differing(grid, 3),
        "dp_cp_group": replicas,
        "shard_group": runs_of(replicas, replicate),  # 2 runs of 0 2 4 6: 0 2, 4 6
        "replicate_group": across_runs(replicas, replicate),  # across them: 0 4, 2 6
        "ep_group": ep_groups,
        "expert_dp_group": expert_replicas,
        "expert_shard_group": runs_of(expert_replicas, shard_copies),
        "expert_replicate_group": across_runs(expert_replicas, shard_copies),
        "expert_tp_group": differing(domain, TP_COPY),
        "embedding_group": differing(ends, 0),
        "node_group": runs_of(ep_groups, ep_nodes),
        "cross_group": across_runs(ep_groups, ep_nodes),
    }


def differing(grid, *dims):
    """Return a row for each group: the ranks that differ on these dims of the grid only."""
    at_end = range(-len(dims), 0)
    return grid.movedim(dims, tuple(at_end)).flatten(-len(dims)).flatten(0, -2)


# ---- where each parameter lives ------------------------------------------------------------------
#
# Each rank of the group over which a parameter is split holds a part of it, and the part's gradient
# is summed over the ranks that hold the same part. Among these, ZeRO divides the part's optimizer
# state, gradient or weight. Weights are stored as (outputs, inputs), so a column-parallel layer
# splits rows.
#
#     parameter                        split over      its gradient is summed over
#     wte, lm_head                     tp, by rows     dp x cp, then, if tied, first and last stage
#     c_attn, c_fc, with biases        tp, by rows     dp x cp
#     c_proj.weight                    tp, by columns  dp x cp
#     c_proj.bias, ln_*, wpe           nothing         dp x cp, then, with --sp, tp
#     router, shared experts           nothing         dp x cp, then tp
#     w_in, w_out of experts           ep, by experts  expert_dp_group, then expert_tp_group
#
# With DualPipe, gradients are also summed over the two ranks of pp that hold the same stage.
#
# Each fact is declared on the module that has the parameter: the part by set_shard() (of experts by
# make_moe()), the sum over tp by mark_sum_over_tp(), the home and the initial value by declare(), a
# copy by GPT.copies. placements_of() collects them in Placements, which are read by initialize(),
# wrap(), the sums and the norm of gradients, and checkpoints. tests/tools/placement.py prints them
# for any layout.


@dataclass(frozen=True, eq=False)
class Home:
    """The groups of one kind of parameter. Experts have one Home, and all others have another.

                       all others         experts
    split_group        tp_group           ep_group                 together they hold all parts
    copies_group       tp_group           expert_tp_group          ranks of tp that may hold copies
    dp_group           dp_cp_group        expert_dp_group          ranks of dp x cp, the same part
    shard_group        shard_group        expert_shard_group       ZeRO cuts a part over these
    replicate_group    replicate_group    expert_replicate_group   ranks with the same shard

    All ranks of copies_group have the same experts. Of other parameters, they have copies only of
    those that are not split.
    """

    split_group: dist.ProcessGroup
    copies_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    shard_group: dist.ProcessGroup
    replicate_group: dist.ProcessGroup


class Homes(NamedTuple):
    """The Home of all parameters but experts, and that of experts."""

    dense: Home
    experts: Home


@dataclass(frozen=True, eq=False)
class Placement:
    """Where a parameter or buffer of this rank lives, and what it begins with.

    name: in the whole model. A copy of a tied weight has the name of the original.
    module, attribute: what holds it. ZeRO replaces the parameter there by this rank's piece of it.
    chunk: the number of the chunk that has it.
    initial: its initial value, see declare().
    home: its Home. shard: the Shard that says which part this rank has, or None for all of it.
    sum_over_tp: whether the gradient is summed over home.copies_group, see mark_sum_over_tp().
    is_tied: whether embedding and head share it. If two stages have it, they sum its gradient.
    is_copy: whether another chunk has the original, which counts in the norm and is saved.
    is_buffer, is_saved: whether it is a buffer, and whether checkpoints hold it.
    """

    name: str
    module: nn.Module
    attribute: str
    chunk: int
    initial: object
    home: Home
    shard: Shard | None
    sum_over_tp: bool
    is_tied: bool
    is_copy: bool
    is_buffer: bool
    is_saved: bool

    @property
    def tensor(self):
        return getattr(self.module, self.attribute)

    @property
    def counts(self):
        """Whether this rank counts it in the norm: a part always, a copy over tp on one rank."""
        is_first = dist.get_rank(self.home.split_group) == 0
        return not self.is_copy and (self.shard is not None or is_first)


class Normal(NamedTuple):
    """An initial value: numbers from a normal distribution with mean 0."""

    std: float = 0.02  # as in nanoGPT


def declare(module, is_expert=False, **initial):
    """Say what placements_of() needs to know of a module's own parameters and buffers. Return it.

    initial: {name: value}, where a value is a Normal, or a number for all elements.
    is_expert: whether the module holds this rank's experts.
    """
    module.initial = initial
    module.is_expert = is_expert
    return module


def homes_of(mesh):
    """Return the Homes of a Mesh."""
    dense = Home(
        split_group=mesh.tp_group, copies_group=mesh.tp_group, dp_group=mesh.dp_cp_group,
        shard_group=mesh.shard_group, replicate_group=mesh.replicate_group,
    )  # fmt: skip
    experts = Home(
        split_group=mesh.ep_group, copies_group=mesh.expert_tp_group,
        dp_group=mesh.expert_dp_group, shard_group=mesh.expert_shard_group,
        replicate_group=mesh.expert_replicate_group,
    )  # fmt: skip
    return Homes(dense, experts)


def placements_of(chunks, homes, replicated):
    """Return a Placement for each parameter and buffer of this rank's chunks.

    replicated: whether the second chunk belongs to a second replica of the model. Raises ValueError
    for a parameter or buffer without a declared initial value.
    """
    placements = []
    for number, chunk in enumerate(chunks):
        buffers = dict(chunk.named_buffers())
        saved = chunk.state_dict()  # which lacks the buffers that are not persistent
        for name in [*dict(chunk.named_parameters()), *buffers]:
            path, _, attribute = name.rpartition(".")
            module = chunk.get_submodule(path)
            initial = getattr(module, "initial", {})
            need(attribute in initial, f"{name} has no initial value: see declare()")
            original = chunk.copies.get(name, name)
            row = Placement(
                name=original, module=module, attribute=attribute, chunk=number,
                initial=initial[attribute],
                home=homes.experts if module.is_expert else homes.dense,
                shard=getattr(module, "shards", {}).get(attribute),
                sum_over_tp=attribute in getattr(module, "sums_over_tp", ()),
                is_tied=original in chunk.copies.values(),
                is_copy=name in chunk.copies or (replicated and number == 1),
                is_buffer=name in buffers, is_saved=name in saved,
            )  # fmt: skip
            placements.append(row)
    return placements


def boxes_between(shape, begin, end):
    """Cut elements begin:end of a flattened tensor into boxes. Yield each as (first index, sizes).

        shape (4, 2), 1:7      . 1       the rest of row 0     [0, 1], (1, 1)
                               2 3       whole rows            [1, 0], (2, 2)
                               4 5
                               6 .       the start of row 3    [3, 0], (1, 1)
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    while begin < end:
        index = [begin // stride % size for stride, size in zip(strides, shape)]
        fits = lambda stride: begin % stride == 0 and begin + stride <= end
        dim = next(dim for dim, stride in enumerate(strides) if fits(stride))  # outermost
        count = min((end - begin) // strides[dim], shape[dim] - index[dim])
        yield index, (*[1] * dim, count, *shape[dim + 1 :])
        begin += count * strides[dim]


def views_in_whole(parameter, tensor, shard=None):
    """Return (shape of the whole, {index of a box in the whole: view of the tensor}).

    parameter: this rank's part (the whole if `shard` is None), or ZeRO's piece of that part.
    tensor: the parameter, or a tensor of the same layout, such as .grad.

        row of the whole, (6, 2)  rank 0 (see Shard)  ZeRO's piece, offset 1  {index: shape of view}
        0                         0 1                 . 1                     (0, 1): (1, 1)
        1                         2 3                 2 3                     (1, 0): (1, 2)
        4                         4 5                 4 5                     (4, 0): (1, 2)
    """
    shape = getattr(parameter, "whole_shape", parameter.shape)  # of the part
    begin = getattr(parameter, "offset", 0)
    rest = tensor.detach().view(-1)
    if not shape:  # a single number
        return shape, {(): part.view(()) for part in rest}
    dim, runs, total = 0, [(0, shape[0])], shape[0]
    if shard is not None:
        dim, runs, total = shard.dim, shard.runs(), sum(shard.blocks)
    views = {}
    assert dim == 0 or len(runs) == 1  # runs are adjacent in this rank's part along dim 0 only
    for row, rows in runs:
        sizes = (*shape[:dim], rows, *shape[dim + 1 :])
        numel = math.prod(sizes)
        for index, box in boxes_between(sizes, begin, min(begin + len(rest), numel)):
            index[dim] += row
            views[tuple(index)] = rest[: math.prod(box)].view(box)
            rest = rest[math.prod(box) :]
        begin = max(begin - numel, 0)
    return (*shape[:dim], total, *shape[dim + 1 :]), views


# ---- model ---------------------------------------------------------------------------------------


def flag(default, help, **details):
    """Declare a dataclass field that is also a flag of the command line.

    details: choices, or the bounds of a number, which must be in [least, below). By default, least
        is 1, or 0 for a float, and below is 2**31, or infinity for a float.
        needs: what the flag has no effect without, as in "--checkpoint", "--cp > 1" or
            "--lr-decay cosine or linear". If it is missing, the flag is refused, except with the
            value `neutral`, which means that the flag is off.
        group: the heading in --help for this flag and the next ones (default: the previous one).
    """
    return field(default=default, metadata={"help": help} | details)


@dataclass(frozen=True)
class GPTConfig:
    """A GPT.

    In shapes, D is hidden, V is vocab_size, T is seq_len / cp, B counts sequences, F is mlp_width,
    H is heads / tp, and K is D / heads.
    """

    layers: int = flag(4, "number of transformer layers", below=10**5, group="model")
    hidden: int = flag(128, "width of the model")
    heads: int = flag(4, "attention heads")
    seq_len: int = flag(64, "tokens in a sequence")
    vocab_size: int = flag(256, "tokens in the vocabulary")
    dropout: float = flag(0.0, "dropout probability, in attention and residuals", below=1)
    kv_heads: int | None = flag(None, "heads of keys and values (default: --heads)")
    block: str = flag("gpt2", "GPT-2's or Llama's layers", choices=("gpt2", "llama"))
    rope_theta: float = flag(10000.0, "base of the angles of Llama's rotary positions", least=1,
                             needs="--block llama")  # fmt: skip
    head: str | None = flag(None, "whether the head has the embedding's weight (default: tied, "
                            "with --block llama untied)", choices=("tied", "untied"))  # fmt: skip
    sp: bool = flag(False, "sequence parallelism: split activations over tp, too",
                    needs="--tp > 1", group="layout")  # fmt: skip
    recompute: str = flag("none", "recompute attention (selective) or layers (full) in backward",
                          choices=("none", "selective", "full"))  # fmt: skip
    recompute_layers: int = flag(1, "layers that --recompute full recomputes as one",
                                 needs="--recompute full", neutral=1)  # fmt: skip
    ffn: int | None = flag(None, "inner width of an MLP or expert (default: 4 x --hidden)",
                           group="model")  # fmt: skip
    experts: int = flag(0, "experts in a layer, or 0 for an MLP", least=0, group="experts")
    top_k: int = flag(2, "experts that a token uses", needs="--experts")
    shared_experts: int = flag(0, "experts that every token uses in addition", least=0,
                               needs="--experts", neutral=0)  # fmt: skip
    capacity_factor: float | None = flag(None, "limit of an expert's load / mean load", least=0.01,
                                         needs="--experts")  # fmt: skip
    balance: str = flag("aux", "balance experts by losses, or by DeepSeek's bias on sigmoid scores",
                        choices=("aux", "bias", "none"), needs="--experts",
                        neutral="none")  # fmt: skip
    moe_every: int = flag(1, "one layer in this many has experts", needs="--experts", neutral=1)
    topk_nodes: int | None = flag(None, "nodes whose experts a token may use (default: all)",
                                  needs="--experts")  # fmt: skip

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


# The two blocks, for a token at position t:
#
#                    --block gpt2                     --block llama
#     norms          LayerNorm                        RMSNorm
#     positions      wpe[t] is added to wte[token]    each layer rotates q and k by an angle ~ t
#     MLP, expert    W_out gelu(W_in x)               W_out (silu(W_gate x) * W_up x), "SwiGLU"
#     biases         in all layers but experts        none
#     head           the embedding's weight           a weight of its own


def make_norm(config):
    """Create the norm of a block."""
    if config.is_llama:
        norm = nn.RMSNorm(config.hidden, eps=1e-5)
    else:
        norm = nn.LayerNorm(config.hidden)
    return of_own_tokens(declare(norm, weight=1.0, bias=0.0), config)


def of_own_tokens(module, config):
    """With sp, mark a module as one whose gradients cover this rank's tokens only. Return it.

    A norm of q or k inside attention works on this rank's heads, so it is always marked.
    """
    return mark_sum_over_tp(module) if config.sp else module


class RotaryPositions:
    """Rotates queries and keys by their positions (Su et al., "RoFormer", 2021).

    Elements i and i + K/2 of a head are the two coordinates of a point, as in Hugging Face's Llama.
    At position t the point turns by the angle t / theta^(2i/K). A product q . k then depends on the
    difference of the two positions only.
    """

    def __init__(self, width, theta):
        self.width, self.theta = width, theta

    def set_positions(self, positions):
        """Set the T positions of a sequence that this rank of cp holds. tp splits heads only."""
        even = torch.arange(0, self.width, 2, dtype=torch.float64, device=positions.device)
        angles = positions.unsqueeze(1) * self.theta ** (-even / self.width)  # (T, K/2)
        dtype = torch.get_default_dtype()
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def rotate(self, x):
        """Rotate x, (B, H, T, K). 16-bit x are rotated in fp32."""
        a, b = x.to(torch.promote_types(x.dtype, self.cos.dtype)).chunk(2, -1)
        rotated = a * self.cos - b * self.sin, b * self.cos + a * self.sin
        return torch.cat(rotated, -1).to(x.dtype)


class Parallel(NamedTuple):
    """What the layers of a stage need on this rank, besides the GPTConfig.

    tp_group: the ranks that split the layers.
    random: a context manager in which dropout differs between the ranks of tp.
    attention_fn: attention_fn(q, k, v, p) computes attention, with p the dropout probability.
    defer: the WeightGradStore to which linear layers defer products, if any.
    make_moe: make_moe() creates the mixture of experts of a layer.
    """

    tp_group: dist.ProcessGroup | None = None
    random: AbstractContextManager = nullcontext()
    attention_fn: Callable = attention
    defer: WeightGradStore | None = None
    make_moe: Callable | None = None


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
    by_losses = args.balance == "aux"
    layer = MoE(
        args.hidden, args.mlp_width, args.experts, args.top_k, mesh.ep_group,
        tp_group=None if args.sp else mesh.tp_group,  # without sp, MoE divides the tokens over tp
        balance_groups=(mesh.dp_group, mesh.cp_group, mesh.tp_group),
        nodes=(mesh.node_group, mesh.cross_group) if args.ep_nodes > 1 else None,
        n_group=args.ep_nodes, topk_group=args.topk_nodes,
        capacity_factor=args.capacity_factor, shared_experts=args.shared_experts,
        score="sigmoid" if args.balance == "bias" else "softmax",
        activation=SwiGLU() if args.is_llama else None, gated=args.is_llama,
        balance_coefficient=0.01 * by_losses,  # Switch Transformer's (Fedus et al., 2021)
        z_coefficient=0.001 * by_losses,  # ST-MoE's (Zoph et al., 2022)
        loss_scale=1 / args.microbatches, parts=args.expert_parts or parts_of_experts(args),
    )  # fmt: skip
    shard = Shard(0, (args.experts,), mesh.ep_group)
    layer.experts.shards = {"w_in": shard, "w_out": shard}
    declare(layer.experts, is_expert=True, w_in=Normal(), w_out=args.into_residual)
    declare(layer.router, weight=Normal(), bias=0.0)
    if layer.shared is not None:
        declare(layer.shared[0], weight=Normal())
        declare(layer.shared[2], weight=args.into_residual)
    return mark_sum_over_tp(layer)  # a rank's gradients cover its own tokens only


def parts_of_experts(args):
    """Return the default of --expert-parts, which depends on flags alone: all ranks need the same.

    It is 2 if a rank sends 1 MiB or more to every other rank of ep in a dispatch: halves of it then
    still take far longer than the start of a message does.
    """
    rows = args.batch_size // (args.dp * args.microbatches)
    tokens = rows * args.seq_len // (args.cp * args.tp)
    itemsize = 2 if args.dtype == "bf16" else 4
    nbytes = tokens * args.top_k * args.hidden * itemsize // args.ep
    return 2 if args.ep > 1 and nbytes >= 2**20 else 1


class GPT(nn.Module):
    """One pipeline stage of a GPT. Its layers are numbered as in the whole model.

    Stages pass on activations (T, B, D), or (T/tp, B, D) with sp. The first takes tokens (B, T),
    and the last returns logits (T, B, V/tp). A tied head uses the weight of the token embedding.
    With several stages the last one has a copy of it, which Trainer.sum_shared_gradients() keeps
    equal.

    parallel: a Parallel.
    positions: the T positions of each sequence that this rank of cp holds.
    layers: the range of its layers.
    copies: {name of a copy: name of the original} of tied weights, whichever stages have them.
    vocab_start: the first column of the logits of the last stage on this rank of tp.
    """

    def __init__(self, config, parallel, positions, layers, is_first, is_last):
        super().__init__()
        self.config, self.parallel = config, parallel
        self.is_first = is_first
        self.is_last = is_last
        self.copies = {"lm_head.weight": "transformer.wte.weight"} if config.is_tied else {}
        self.rotary = None
        if config.is_llama:
            self.rotary = RotaryPositions(config.hidden // config.heads, config.rope_theta)
        self.set_positions(positions)

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
            block = Block(config, parallel, self.rotary, config.has_experts(i))
            self.transformer["h"][str(i)] = block
        if self.is_last:
            self.transformer["ln_f"] = make_norm(config)
            has_original = self.is_first and config.is_tied
            self.lm_head = self.transformer["wte"] if has_original else embedding()
            self.vocab_start = self.lm_head.start

    def forward(self, x):
        if self.is_first:
            x = self.transformer["wte"](x.t())
            if not self.config.is_llama:
                x = x + self.transformer["wpe"](self.positions).unsqueeze(1)
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

    def set_positions(self, positions):
        """Set which positions a sequence's tokens have. With sp, keep those of this rank of tp."""
        if self.rotary:
            self.rotary.set_positions(positions)
        self.positions = positions
        if self.config.sp:
            rank, tp = rank_and_size(self.parallel.tp_group)
            self.positions = positions.chunk(tp)[rank]


# ---- what layers cost, and how stages share them -------------------------------------------------


def divide_layers(config, routes):
    """Return the range of each stage's layers, chosen so that the costliest rank costs least.

    Every layer counts as 1, the mean cost of a layer, and the last stage starts with the cost of
    the head. Each stage between the first and the last gets one layer. Each other layer is given to
    the rank that costs least so far, and there to the cheapest stage. Among equal stages the last
    one gets it, since earlier ones keep the activations of more microbatches. If the head costs
    1.1, 30 layers are divided among 4 ranks of one stage into 8, 8, 8 and 6.

    routes: those of a schedule. The two of DualPipe give ranks r and p-1-r the same two stages.
    """
    stages = range(len(routes[0]))
    holders = [frozenset(rank for rank, _ in places) for places in zip(*routes)]
    passes = 4 if config.recompute == "full" else 3  # forward 1, backward 2, recomputation 1
    costs = [0.0 for _ in stages]
    # the head is never recomputed
    costs[-1] = 3 * flops_of_head(config) / (passes * flops_of_layers(config) / config.layers)
    of_holders = Counter({holders[-1]: costs[-1]})
    sizes = [0 for _ in stages]

    def preference(stage):
        may_wait = sizes[stage] > 0 or stage in (stages[0], stages[-1])  # False comes first
        return may_wait, of_holders[holders[stage]], costs[stage], -stage

    for _ in range(config.layers):
        stage = min(stages, key=preference)
        sizes[stage] += 1
        costs[stage] += 1
        of_holders[holders[stage]] += 1
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


def flops_per_token(config):
    """Return the FLOPs of forward and backward per token. Recomputation does not count."""
    return 3 * (flops_of_layers(config) + flops_of_head(config))


# ---- initial values ------------------------------------------------------------------------------


@torch.no_grad()
def initialize(placements, seed):
    """Give this rank's part of every parameter and buffer its initial value."""
    for row in placements:
        tensor = row.tensor
        if not isinstance(row.initial, Normal):
            tensor.fill_(row.initial)
            continue
        dim = row.shard.dim if row.shard else 0
        _, views = views_in_whole(tensor, tensor, row.shard)
        for first_index, view in views.items():
            rows = view.movedim(dim, 0)  # each has a random stream, so other ranks' are not drawn
            rows.copy_(normal(rows.shape, row.initial.std, f"{seed} {row.name}", first_index[dim]))


def normal(shape, std, key, offset=0):
    """Return the rows from `offset` on of a tensor of normally distributed numbers.

    Each row has a random stream of its own, so that a rank draws only the rows that it holds. key:
    a text on which the numbers depend. A row is one index of the first dim. In a tensor with three
    dims, which holds one matrix per expert, each row of each matrix has its own stream.
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


# ---- text ----------------------------------------------------------------------------------------


def prompt_of(args, data):
    """Return the tokens with which a sample begins: bytes, or with .bin data numbers.

    Without --prompt, it is a newline, or the first token of the validation part of .bin data.
    Raises ValueError if --prompt is empty, not numbers, or outside the vocabulary.
    """
    if sample_size(args, data) == 0:
        return []
    newline = ord("\n")
    if args.prompt is None:
        is_known = data.is_text and newline < args.vocab_size
        tokens = [newline] if is_known else data.validation[:1].tolist()
    elif data.is_text:
        tokens = list(os.fsencode(args.prompt))
    else:
        try:
            tokens = [int(word) for word in args.prompt.replace(",", " ").split()]
        except ValueError:
            sentence = "for .bin data it must be numbers of tokens, such as 1,2,3"
            raise ValueError(f"--prompt {args.prompt!r}: {sentence}") from None
    need(tokens, "--prompt is empty")
    for token in tokens:
        is_inside = 0 <= token < args.vocab_size
        need(is_inside, f"--prompt: token {token} is outside --vocab-size {args.vocab_size}")
    return tokens


def sample_size(args, data):
    """Return how many tokens a sample has. By default, .bin data have one only with --prompt."""
    if args.sample is not None:
        return args.sample
    return 200 if data.is_text or args.prompt is not None else 0


@torch.no_grad()
def sample(trainer, prompt, count):
    """Continue a list of tokens by `count` tokens, and return these, on all ranks. Collective.

    Every token takes a forward of one row through the whole layout, and replicas compute the same.
    This is slow (200 tokens of the default model take as long as some ten validations) but needs
    no code of its own in any layer. It reads up to --seq-len tokens, of a longer text the last
    ones. Zeros fill a row up at the end, where causal attention does not look.

    All layouts write the same text in exact arithmetic. --capacity-factor and --topk-nodes are
    exceptions, as the experts that a token uses then depend on the layout. In training, nothing
    changes: neither random states nor tallies of experts nor weights.
    """
    args = trainer.args
    divisor = 2 * args.cp * args.tp  # cp cuts a row into 2 cp chunks, and sp and MoE cut by tp
    length = math.ceil((len(prompt) + count) / divisor) * divisor
    length = min(length, args.seq_len)
    set_length(trainer, length)
    pipeline = row_pipeline(trainer)
    random = np.random.default_rng([args.seed, trainer.steps_done])
    tokens = list(prompt)
    for _ in range(count):
        logits = next_logits(trainer, pipeline, tokens[-length:], length)
        token = choose_token(logits, args.temperature, random)
        broadcast(token)  # rank 0's, since rounding may differ between replicas
        tokens.append(token.item())
    set_length(trainer, args.seq_len)
    return tokens[len(prompt) :]


def set_length(trainer, length):
    """Make all chunks process sequences of this length."""
    trainer.positions = torch.arange(length)
    if trainer.args.cp > 1:
        trainer.positions = context_positions(length, trainer.mesh.cp_group)
    for chunk in trainer.chunks:
        chunk.set_positions(trainer.positions.to(trainer.device))


def row_pipeline(trainer):
    """Return a Pipeline whose step() returns the logits (T, 1, V/tp) of one row. Collective."""
    args = trainer.args
    for chunk in trainer.chunks:
        chunk.eval()
    stages = trainer.stages[: len(trainer.unique_chunks)]
    schedule = forward_only(args.pp, 1, schedule_of(args).routes[0])
    return Pipeline(
        stages, schedule, lambda logits, _: logits, group=trainer.mesh.pp_group,
        shape=(len(trainer.chunks[0].positions), 1, args.hidden),
        dtype=trainer.evaluation.like["dtype"], device=trainer.device,
    )  # fmt: skip


def next_logits(trainer, pipeline, window, length):
    """Return the logits (V,) of the token that follows the window of at most `length` tokens."""
    row = torch.tensor([window + [0] * (length - len(window))])
    (row,) = trainer.own_tokens(row)  # (1, T)
    output = pipeline.step(row, row)  # (T, 1, V/tp), or None on ranks without the last stage
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


def write_sample(trainer, data, log):
    """Sample, and report the text, which begins with the prompt. Collective."""
    count = sample_size(trainer.args, data)
    if count == 0:
        return
    prompt = prompt_of(trainer.args, data)
    tokens = sample(trainer, prompt, count)
    show = text_of if data.is_text else list
    log.write({"step": trainer.steps_done, "prompt": show(prompt), "sample": show(tokens)})
    text = text_of(prompt + tokens) if data.is_text else " ".join(map(str, prompt + tokens))
    log.say(f"sample after step {trainer.steps_done}:\n{printable(text)}")


def text_of(tokens):
    """Decode bytes. Those that are not UTF-8, and tokens that are not bytes, become U+FFFD."""
    return bytes(min(token, 0xFF) for token in tokens).decode(errors="replace")


def printable(text):
    """Escape what could control a terminal, except the ends of lines."""
    escape = lambda letter: letter.encode("unicode_escape").decode()
    is_safe = lambda letter: letter == "\n" or letter.isprintable()
    return "".join(letter if is_safe(letter) else escape(letter) for letter in text)


# ---- data ----------------------------------------------------------------------------------------


class Data(NamedTuple):
    """The tokens of a training part and a validation part, from which batches are cut.

    skipped: the names in a folder that are neither text nor .jsonl files.
    """

    train: np.ndarray
    validation: np.ndarray
    skipped: tuple = ()

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
    """Return the run's Data and a digest of all its tokens. Collective.

    Raises TrainingError with status 2 if the data cannot be read, differ between ranks, or have a
    token outside the vocabulary.
    """
    source = f"--data {args.data or '(default)'}: "
    data = on_all_ranks(load_data, args.data, args.seq_len, args.vocab_size, prefix=source)
    check_same_data(data, source)
    if data.skipped and dist.get_rank() == 0:
        print(f"{source}skips {shortened(data.skipped)}, not text", flush=True)
    return data, check_tokens(data, args.vocab_size, source)


def load_data(path, seq_len, vocab_size=256):
    """Load the Data at a path:

        a file or folder of text           a token is a byte
        a .jsonl file, also in a folder    the text of each line, with a byte 255 between them
        None                               the sources of Python's standard library, as text
        a .bin file                        tokens as uint16, or uint32 for a larger vocabulary;
                                           if it begins with llm.c's header, as this says
        a folder of train.bin, val.bin     two such files, as nanoGPT prepares them

    In all cases but the last, the last tenth is for validation. Raises OSError or ValueError, also
    for a file whose content is recognized as something else, such as a .bin file of int32.
    """
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    pattern = "[!.]*" if path else "*.py"
    path = Path(path or sysconfig.get_path("stdlib"))
    skipped = ()
    if (path / "train.bin").is_file():
        parts = [read_tokens(path / name, dtype) for name in ("train.bin", "val.bin")]
    else:
        if path.is_dir():
            tokens, skipped = read_folder(path, pattern)
        else:
            tokens = read_tokens(path, dtype) if path.suffix == ".bin" else read_text(path)
        parts = np.split(tokens, [len(tokens) - len(tokens) // 10])
    sizes = f"{len(parts[0])} tokens to train on and {len(parts[1])} for validation"
    need(min(map(len, parts)) > seq_len, f"{sizes} are too few for --seq-len {seq_len}")
    return Data(*parts, skipped)


# How files begin that hold neither text nor plain tokens, what they are, and how to convert them
FORMATS = {
    b"\x93NUMPY": ("a NumPy array", "np.load(FILE).astype(np.{}).tofile('train.bin')"),
    b"PK\3\4": ("a zip archive, as of torch.save()", "write tokens with numpy's tofile()"),
    b"MMIDIDX\0\0": ("Megatron's index", "convert the tokens in its .bin file"),
    b"\x1f\x8b\x08": ("compressed", "gunzip it"),
    b"BZh": ("compressed", "bunzip2 it"),
    b"\xfd7zXZ\0": ("compressed", "unxz it"),
    b"\x28\xb5\x2f\xfd": ("compressed", "unzstd it"),
    b"PAR1": ("a Parquet table", "write its texts to a .jsonl file"),
    b"ARROW1": ("an Arrow table", "write its texts to a .jsonl file"),
    b"\xff\xfe": ("UTF-16", "iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("UTF-16", "iconv -f UTF-16 -t UTF-8"),
}
FIRST_BYTES = 2**20  # bytes at a file's beginning by which it is recognized
# llm.c's header has 256 int32: a number that says what type the tokens have, a version, their count
LLMC = {20240520: np.uint16, 20240801: np.uint32}
# byte 17 of an .idx file of Megatron
MEGATRON = {b"\1": "uint8", b"\3": "int16", b"\4": "int32", b"\5": "int64", b"\x08": "uint16"}


def first_bytes_of(path):
    """Return the first bytes of a file. Reading from a pipe might wait for ever."""
    need(is_regular(path), f"{path.name} is neither a file nor a folder")
    with path.open("rb") as file:
        return file.read(FIRST_BYTES)


def is_regular(path):
    """Return whether a path is a file on a disk, and not a pipe, a device or a folder."""
    return stat.S_ISREG(path.stat().st_mode)


def fault_of_text(head):
    """Return why a file that begins with these bytes is no text, or ""."""
    for magic, (kind, how) in FORMATS.items():
        if head.startswith(magic):
            return f"{kind}, not text: {how.format('uint16')}"
    if b"\0" in head:
        return "binary, not text: tokens are read from .bin files"
    return ""


def fault_of_tokens(head, dtype):
    """Return why a file that begins with these bytes does not hold tokens of this type, or ""."""
    for magic, (kind, how) in FORMATS.items():
        if len(magic) > 2 and head.startswith(magic):  # two bytes may be a token
            return f"{kind}, not tokens: {how.format(dtype.__name__)}"
    if head and is_utf8(head):
        return "text, not tokens: its name should not end with .bin"
    words = np.frombuffer(head[: len(head) // 8 * 8], dtype)
    used = [bool(words[i :: 8 // words.itemsize].any()) for i in range(8 // words.itemsize)]
    if used == [True, False, True, False]:
        return f"of int32, not {dtype.__name__}: {conversion('int32', dtype)}"
    if used in ([True, False, False, False], [True, True, False, False], [True, False]):
        return f"of int64, not {dtype.__name__}: {conversion('int64', dtype)}"
    return ""


def is_utf8(head):
    """Return whether bytes are the beginning of a text in UTF-8."""
    try:
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False


def conversion(kind, dtype):
    """Return the command that converts a file of tokens to this type."""
    return f"np.fromfile(FILE, np.{kind}).astype(np.{dtype.__name__}).tofile('train.bin')"


def read_tokens(path, dtype):
    """Return the tokens of a .bin file. They stay on the disk until they are used."""
    index = path.with_suffix(".idx")
    if index.is_file():
        kind = MEGATRON.get(first_bytes_of(index)[17:18], "DTYPE")
        how = conversion(kind, dtype)
        raise ValueError(f"{path.name} is Megatron's, as it has an {index.name}: {how}")
    head = first_bytes_of(path)
    fault = fault_of_tokens(head, dtype)
    need(not fault, f"{path.name} is {fault}")
    header = np.frombuffer(head[:12].ljust(12, b"\0"), np.int32)
    if int(header[0]) not in LLMC:
        return np.memmap(path, dtype, "r")
    tokens = np.memmap(path, LLMC[int(header[0])], "r", offset=1024)
    counts = f"{len(tokens)} tokens, not {header[2]} as its header says"
    need(len(tokens) == header[2], f"{path.name} has {counts}")
    return tokens


def read_text(path):
    """Return the bytes of a text, or of the texts in a .jsonl file."""
    fault = fault_of_text(first_bytes_of(path))
    need(not fault, f"{path.name} is {fault}")
    if path.suffix == ".jsonl":
        return np.frombuffer(join_texts(path), np.uint8)
    return np.memmap(path, np.uint8, "r")


def read_folder(path, pattern):
    """Return the bytes of a folder's texts, joined, and the names of what is skipped."""
    texts = []
    skipped = []
    separator = b"\n"
    for entry in sorted(path.glob(pattern)):
        if entry.is_dir():
            skipped.append(f"{entry.name}/")
        elif not is_regular(entry):
            skipped.append(entry.name)
        elif entry.suffix == ".jsonl":
            texts.append(bytes(read_text(entry)))
            separator = DOCUMENT_END
        else:
            content = entry.read_bytes()
            if fault_of_text(content[:FIRST_BYTES]) or b"\0" in content:
                skipped.append(entry.name)
            else:
                texts.append(content)
    ways = "tokens are read from a .bin file, or from train.bin and val.bin in a folder"
    need(texts or not skipped, f"no text, but {shortened(skipped)}: {ways}")
    return np.frombuffer(separator.join(texts), np.uint8), tuple(skipped)


DOCUMENT_END = b"\xff"  # never occurs in UTF-8


def join_texts(path):
    """Return the "text" of each line of a .jsonl file, joined by DOCUMENT_END."""
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
    return DOCUMENT_END.join(texts)


def shortened(names):
    """Return the first names of a list, and how many others there are."""
    others = len(names) - 3
    return ", ".join(names[:3]) + (f" and {others} more" if others > 0 else "")


def check_same_data(data, source):
    """Raise TrainingError if ranks have read different tokens. Collective.

    If nodes had different standard libraries, a pipeline's last stage would read targets that do
    not belong to the first stage's inputs. The checksum covers the first 2**25 tokens.
    """
    size = len(data.train) + len(data.validation)
    own = f"{size:,} tokens with checksum {hashlib.sha256(data.train[: 2**25]).hexdigest()[:8]}"
    first, *others = gather_objects(own)
    for rank, other in enumerate(others, 1):
        if other != first:
            raise TrainingError(f"{source}rank {rank} has {other}, rank 0 has {first}", 2)


TOKENS_AT_ONCE = 2**24  # tokens that a rank reads at once


def check_tokens(data, vocab_size, source):
    """Return a digest of all tokens; raise TrainingError if one is outside the vocabulary.

    The ranks divide the tokens, but the digest does not depend on their number. One core hashes
    about 1.3 GB per second (measured on 0.5 GB in memory), so 20 GB would take it 15 seconds.
    Collective.
    """
    parts = data.train, data.validation
    chunks = []
    for part in parts:
        for first in range(0, len(part), TOKENS_AT_ONCE):
            chunks.append(part[first : first + TOKENS_AT_ONCE])
    may_exceed = np.iinfo(chunks[0].dtype).max >= vocab_size
    largest = 0
    digests = {}
    for number in range(dist.get_rank(), len(chunks), dist.get_world_size()):
        digests[number] = hashlib.sha256(chunks[number]).digest()
        if may_exceed:
            largest = max(largest, int(chunks[number].max()))
    found = gather_objects((largest, digests))
    largest = max(largest for largest, _ in found)
    if largest >= vocab_size:
        token = f"token {largest} (read as {chunks[0].dtype})"
        raise TrainingError(f"{source}{token} is outside --vocab-size {vocab_size}", 2)
    digests = ChainMap(*(digests for _, digests in found))
    return hashlib.sha256(b"".join(digests[number] for number in range(len(chunks)))).hexdigest()


def check_memory(args, device):
    """Raise ValueError if tokens or, on CPUs, weights take more memory than the machine has.

    A GPU says by itself that its memory is full. Linux does not: it kills a process.
    """
    tokens = args.batch_size // args.dp * (args.seq_len + 1)
    size = 24 * tokens + 8 * args.batch_size  # windows, inputs and targets are int64; all starts
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    gib = lambda nbytes: f"{nbytes // 2**30:,} GiB"
    sizes = f"a rank's tokens take {gib(size)} of {gib(memory)} of memory"
    need(size < memory, f"{as_typed('batch_size', args.batch_size)}: {sizes}")
    if device.type == "cpu":
        names = ["layers", "hidden", "ffn", "vocab_size"]
        names += ["experts", "shared_experts"] if args.experts else []
        typed = " ".join(as_typed(name, getattr(args, name)) for name in names)
        size = 4 * least_weights(args) * args.per_node
        ranks = f"weights of {args.per_node} ranks take {gib(size)} or more"
        need(size < memory, f"{typed}: {ranks} of {gib(memory)} of memory")


def least_weights(args):
    """Return the mean number of elements of a rank's matrices, as if tp or ep divided them all."""
    whole = replace(args, top_k=args.experts)  # a token that used all experts would use all weights
    total = args.hidden * args.vocab_size
    for layer in range(args.layers):
        flops, _ = forward_flops(whole, args.has_experts(layer))
        total += flops // 2
    return total // (args.pp * max(args.tp, args.ep))


# ---- checkpoints ---------------------------------------------------------------------------------

# the flags of the model that a resumed run may change
MAY_CHANGE = "dropout", "sp", "recompute", "recompute_layers", "capacity_factor", "topk_nodes"
# the flags on which the result of a training depends, besides the model and the data
DETERMINE = (
    "seed", "batch_size", "steps", "lr", "warmup", "lr_decay", "decay_steps", "min_lr",
    "weight_decay", "grad_clip", "dtype", "moments", "dropout", "capacity_factor",
)  # fmt: skip


class Boxes(torch.Tensor):
    """A tensor for torch.distributed.checkpoint, of which a rank holds rectangular parts (boxes).

    boxes: {first index of a box: view}. The tensor itself takes memory for one number only.
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


def boxes_of(placements, value=lambda tensor: tensor):
    """Return {name in the whole model: Boxes} of parameters and buffers.

    value: maps a parameter or buffer to the tensor to save for it, or to None to leave it out.
    """
    result = {}
    for row in placements:
        tensor = value(row.tensor)
        if row.is_saved and tensor is not None:
            whole = views_in_whole(row.tensor, tensor, row.shard)
            result[row.name] = Boxes(tensor.dtype, *whole)
    return result


def state_of(trainer, chunk=None):
    """Return {kind: boxes_of()} of weights and moments. Even with bf16, weights are in fp32.

    chunk: the number of the chunk to load. By default, it is what is saved, without copies.
    """
    if chunk is None:
        placements = trainer.originals()
    else:
        placements = [row for row in trainer.placements if row.chunk == chunk]
    optimizer = trainer.optimizer.state
    state = {"model": boxes_of(placements)}
    for kind in tensor_names(trainer.optimizer):
        moment = lambda weight: optimizer.get(weight, {}).get(kind)
        state[kind] = boxes_of(placements, moment)
    return state


def tensor_names(optimizer):
    """Return the names of the optimizer's state tensors that have their weight's shape."""
    names = set()
    for weight, state in optimizer.state.items():
        names |= {name for name, value in state.items() if has_shape(value, weight.shape)}
    return sorted(names)


def has_shape(value, shape):
    """Return whether a value is a tensor of this shape."""
    return torch.is_tensor(value) and value.shape == shape


def optimizer_state(trainer):
    """Return what run.json says of the optimizer: its class, the names of its tensors, its numbers.

    Raises ValueError if checkpoints cannot hold its state, which must consist of tensors with their
    weight's shape and of numbers that are the same for all weights, and must be in its .state.
    """
    optimizer = trainer.optimizer
    title = type(optimizer).__name__
    names = tensor_names(optimizer)
    need("model" not in names, f"{title}'s state has the name 'model', which is that of weights")
    elsewhere = ", ".join(kept_elsewhere(trainer))
    need(not elsewhere, f"{title} keeps {elsewhere} outside of its state, which alone is saved")
    numbers = {}
    for weight, state in optimizer.state.items():
        for name in [name for name in state if name not in names and state[name] is not None]:
            value = state[name]
            is_number = isinstance(value, (int, float)) or has_shape(value, ())
            what = list(value.shape) if torch.is_tensor(value) else type(value).__name__
            fault = f"{title}'s state {name}, {what}, is neither a number nor of its weight's shape"
            need(is_number, f"{fault} {list(weight.shape)}")
            numbers.setdefault(name, []).append(value)
    for name, values in numbers.items():
        if torch.is_tensor(values[0]):
            values = torch.stack(values).tolist()  # the host waits for the device once
        fault = f"{title}'s state {name} differs between weights: {min(values)}, {max(values)}"
        need(min(values) == max(values), fault)
        numbers[name] = values[0]
    return {"class": title, "tensors": names, "numbers": numbers}


def kept_elsewhere(trainer):
    """Return the names of what the optimizer keeps from step to step outside of its .state.

    That is an attribute with tensors of a weight's shape or with another optimizer, or an option of
    a group that its steps have changed. The learning rate is the trainer's.
    """
    optimizer = trainer.optimizer
    weights = set(trainer.parameters())
    shapes = {weight.shape for weight in weights}

    def is_state(value):
        if isinstance(value, torch.optim.Optimizer):
            return value.state is not optimizer.state
        return torch.is_tensor(value) and value.shape in shapes and value not in weights

    attributes = vars(optimizer).keys() - {"state", "param_groups"}
    names = {name for name in attributes if any(map(is_state, tree_leaves(vars(optimizer)[name])))}
    for group, options in zip(optimizer.param_groups, trainer.optimizer_options):
        own = group.keys() - {"params", "lr", "shards"}
        names |= {name for name in own if group[name] is not options.get(name)}
    return sorted(names)


def create_optimizer_state(trainer, saved):
    """Create the state that the optimizer has after a step, and set its numbers as saved.

    saved: optimizer_state() of the run that saved it. A step with gradients of zero creates the
    state. It may change weights and moments, which are loaded after this. Raises ValueError if the
    optimizer keeps other state.
    """
    weights = trainer.parameters()
    gradients = [weight.grad for weight in weights]
    # one tensor for all weights, to save memory
    zeros = weights[0].new_zeros(max(weight.numel() for weight in weights))
    for weight in weights:
        weight.grad = zeros[: weight.numel()].view_as(weight)
    trainer.optimizer.step()
    for weight, gradient in zip(weights, gradients):
        weight.grad = gradient
    own = optimizer_state(trainer)
    kept = lambda state: ", ".join([*state["tensors"], *sorted(state["numbers"])]) or "nothing"
    others = f"the optimizer {own['class']} keeps {kept(own)}"
    need(kept(own) == kept(saved), f"{others}, but {saved['class']} has saved {kept(saved)}")
    for state in trainer.optimizer.state.values():
        for name, number in saved["numbers"].items():
            if torch.is_tensor(state.get(name)):
                state[name].fill_(number)
            elif name in state:
                state[name] = number


class Saver:
    """Writes checkpoints while training continues. Creation and all methods are collective.

        main thread   step 500 | save: copy to host memory | step 501 | step 502 | step 503 ...
        thread                                             | write | hash | sync | rename |

    A step that follows save() waits only for the copy. On CPUs the copy is done when save()
    returns. On GPUs it is queued before the next step's kernels, and neither host nor thread holds
    them up. The copy takes the bytes of this rank's weights and moments, 12 per parameter in fp32,
    in host memory. Only one copy exists, since save() first waits for the previous save.

    The thread sends over a gloo group of its own, so its messages never meet those of a step. If a
    save fails, it fails on all ranks alike: must_stop() is true from then on, and the next save()
    or wait() raises the error.

    data_digest: that of read_data(). sigterm: whether this rank has received SIGTERM.
    """

    def __init__(self, trainer, folder, data_digest=""):
        self.trainer = trainer
        self.folder = Path(folder)
        self.data_digest = data_digest
        self.sigterm = False
        self.failed = False
        self.group = dist.new_group(timeout=timedelta(seconds=trainer.args.timeout), backend="gloo")
        barrier(self.group)  # connects the ranks, here rather than in the thread
        self.executor = ThreadPoolExecutor(1)  # Python waits for its thread before it exits
        self.pending = None  # the Future of the save under way

    def save(self, suffix=""):
        """Begin to write a checkpoint. One whose name has a suffix is never resumed nor deleted."""
        self.wait()
        run = record_of(self.trainer, self.data_digest)
        state = copy_to_host(state_of(self.trainer))
        copied = None
        if self.trainer.device.type == "cuda":
            copied = torch.cuda.current_stream().record_event()
        path = self.folder / f"step_{self.trainer.steps_done:08d}{suffix}"
        self.pending = self.executor.submit(self.write, state, copied, path, run)

    def write(self, state, copied, path, run):
        """Write a state once the event `copied` has happened. This runs in the thread."""
        try:
            if copied is not None:
                torch.cuda.set_device(self.trainer.device)  # each thread has its own
                copied.synchronize()
            write_checkpoint(state, path, run, self.group)
        except BaseException:
            self.failed = True
            raise

    def must_stop(self):
        """Return whether any rank has received SIGTERM, or a save has failed. Collective."""
        return on_any_rank(self.sigterm or self.failed)

    def wait(self):
        """Return when the save under way has ended. If it failed, raise TrainingError."""
        pending = self.pending
        self.pending = None
        if pending is not None:
            pending.result()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None or issubclass(kind, TrainingError):  # all ranks have come here
            self.wait()
        self.executor.shutdown(wait=False)


def record_of(trainer, data_digest=""):
    """Return what run.json says of a run: its flags and what else determined the training.

    data_digest: that of read_data(). Collective. Raises TrainingError if checkpoints cannot hold
    the optimizer's state.
    """
    prefix = f"--checkpoint {trainer.args.checkpoint}: "
    own = on_all_ranks(optimizer_state, trainer, prefix=prefix, status=1)
    record = flags_of(trainer.args) | {"data_digest": data_digest}
    return record | {"optimizer_state": own}


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


class Writer(dcp.FileSystemWriter):
    """PyTorch's writer, which raises the file system's error rather than one that follows from it.

    After a disk is full, torch.save() complains that it has not written as much as it should have.
    """

    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error


def write_checkpoint(state, path, run, group):
    """Write a state on the host as a checkpoint, or raise TrainingError. Collective.

    run: record_of() the run that saves it.
    """
    partial_path = path.with_suffix(".partial")
    options = {"prefix": f"--checkpoint {path}: ", "status": 1, "group": group}
    storage = Writer(partial_path, per_thread_copy_ahead=0)  # nothing is on a GPU
    write = partial(dcp.save, state, storage_writer=storage, process_group=group)
    on_all_ranks(write, **options)
    own_files = [partial_path / ".metadata", *partial_path.glob(f"__{dist.get_rank()}_*")]
    own = on_all_ranks(digests_of, own_files, **options)
    digests = dict(ChainMap(*gather_objects(own, group)))
    on_all_ranks(commit, run, partial_path, path, digests, **options)


def digests_of(paths):
    """Return {name: SHA-256} of files."""
    digests = {}
    for path in paths:
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def commit(run, partial_path, path, digests):
    """On rank 0, complete a checkpoint, rename it to `path`, and delete all but the last --keep."""
    if dist.get_rank() != 0:
        return
    for file in partial_path.iterdir():
        if file.name not in digests:  # a save of more ranks that was killed has left it
            file.unlink()
    write_run(partial_path, run | {"sha256": digests})
    os.sync()  # a checkpoint is on the disk before it gets its name
    partial_path.rename(unused(path))
    for old in checkpoints_of(path.parent)[: -run["keep"]]:
        old.rename(old.with_suffix(".partial"))  # a half-deleted one must not look complete
    for old in path.parent.glob("step_*.partial"):  # including those of saves that were killed
        shutil.rmtree(old, ignore_errors=True)


def write_run(folder, run):
    """Write {name: value} to the folder's run.json, with a checksum of all of it."""
    text = json.dumps(run | {"checksum": checksum_of(run)}, indent=4)
    (folder / "run.json").write_text(text)


def checksum_of(run):
    """Return a checksum of what a run.json says besides its checksum."""
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()


def checkpoints_of(folder):
    """Return the folder's checkpoints, oldest first."""
    return sorted(folder.glob("step_" + 8 * "[0-9]"))


def unused(path):
    """Return the path, with .2, .3 ... at its end if a file or folder already has its name."""
    name = path.name
    number = 1
    while path.exists():
        number += 1
        path = path.with_name(f"{name}.{number}")
    return path


def claim(folder):
    """Create the folder. On rank 0, also lock it for as long as the returned file is open."""
    folder.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() != 0:
        return None
    file = open(folder / "lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError("another run is using this folder") from None
    except OSError:
        pass  # some network file systems have no locks
    return file


def resume(trainer, folder, data_digest=""):
    """Load a checkpoint of the folder, if any, whatever layout it was saved in. Collective.

    data_digest: that of read_data(). Training with other data is reported, see differences().

    It is the last one, or that of --resume-step N. The later ones are then renamed to
    step_X.abandoned, so that the run's next checkpoints take their place. A restart repeats the
    command, flag included, and must continue from the checkpoints that the run has saved since. So
    the flag has no effect if the last checkpoint was saved by a run with the same flag.
    """
    own = on_all_ranks(checkpoint_to_resume, folder, trainer.args.resume_step)
    path, *_ = gather_objects(own)
    if path is None:
        return
    run = on_all_ranks(check_checkpoint, path, trainer.args)
    trainer.steps_done = int(path.name.removeprefix("step_"))
    if trainer.steps_done:  # before the first step there are no moments
        saved = run.setdefault("optimizer_state", older_state(run, trainer.steps_done))
        on_all_ranks(create_optimizer_state, trainer, saved, prefix=f"--checkpoint {path}: ")
    for chunk in range(len(trainer.chunks)):  # since embedding and head have one name
        load = lambda: dcp.load(state_of(trainer, chunk), checkpoint_id=path)
        on_all_ranks(load, prefix=f"--checkpoint {path}: ")
    found = differences(trainer, run, data_digest)
    if dist.get_rank() == 0:
        print(f"resumes from {path}", flush=True)
        if found:
            print(f"continues with {', '.join(found)}", flush=True)
    on_all_ranks(abandon_after, path, prefix=f"--checkpoint {folder}: ")


def older_state(run, steps_done):
    """Return optimizer_state() of a run.json that lacks it. The first ones were all of AdamW."""
    adam = {"class": "AdamW", "tensors": ["exp_avg", "exp_avg_sq"]}
    adam["numbers"] = {"step": float(steps_done)}
    return run.get("optimizer", adam)


def checkpoint_to_resume(folder, step):
    """On rank 0, return the checkpoint to load, or None. step: --resume-step, or None."""
    if dist.get_rank() != 0:
        return None
    paths = checkpoints_of(folder)
    last = paths[-1] if paths else None
    if step is None or (last and saved_with(last).get("resume_step") == step):
        return last
    chosen = folder / f"step_{step:08d}"
    steps = [str(int(path.name.removeprefix("step_"))) for path in paths]
    found = "steps " + ", ".join(steps) if steps else "no checkpoint"
    need(chosen in paths, f"--resume-step {step}: --checkpoint {folder} has {found}")
    return chosen


def saved_with(path):
    """Return the flags of the run that saved a checkpoint, or {} if its run.json is damaged."""
    try:
        return dict(json.loads((path / "run.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def abandon_after(path):
    """On rank 0, rename the checkpoints after this one, so that no run resumes from them."""
    if dist.get_rank() != 0:
        return
    for later in checkpoints_of(path.parent):
        if later > path:
            target = unused(later.with_suffix(".abandoned"))
            later.rename(target)
            print(f"renames {later.name} to {target.name}", flush=True)


def check_checkpoint(path, args):
    """Return what run.json says, or raise ValueError if the checkpoint is of another model or has
    changed since it was saved. A flag of the model that is younger than it has its default.
    """
    run = read_run(path)
    defaults = {flag.name: flag.default for flag in fields(GPTConfig)}
    saved = SimpleNamespace(**defaults | run)
    complete_model(saved)
    for name in [flag.name for flag in fields(GPTConfig) if flag.name not in MAY_CHANGE]:
        own = as_typed(name, getattr(args, name))  # "--hidden 128"
        theirs = as_typed(name, getattr(saved, name))
        need(own == theirs, f"{own}, but {path} has {theirs}")
    digests = run["sha256"]
    for file in sorted(path.iterdir()):
        is_known = file.name == "run.json" or file.name in digests
        need(is_known, f"{file} is not among the files that were saved")
    own_files = sorted(digests)[dist.get_rank() :: args.world_size]  # each rank checks some files
    for name, digest in digests_of(path / name for name in own_files).items():
        need(digest == digests[name], f"{path / name} has changed since it was saved")
    return run


def read_run(path):
    """Return what a checkpoint's run.json says, {name: value}; raise ValueError if it is damaged.

    Older ones have no checksum.
    """
    try:
        run = dict(json.loads((path / "run.json").read_bytes()))
        checksum = run.pop("checksum", None)
        run["sha256"] = dict(run["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"  # a repr may quote the whole file
        raise ValueError(f"{path}/run.json does not hold the flags of a run: {reason}") from None
    is_intact = checksum in (None, checksum_of(run))
    need(is_intact, f"{path}/run.json has changed since it was saved")
    return run


def differences(trainer, run, data_digest):
    """Return phrases that say how this run differs from the one that saved a checkpoint.

    run: what run.json says. What an older checkpoint does not say is not compared.
    """
    args = trainer.args
    found = []
    if trainer.steps_done == 0:  # nothing has been trained
        return found
    if run.get("data_digest", data_digest) != data_digest:
        source, theirs = (path or "(default)" for path in (args.data, run.get("data")))
        found.append(f"other data, --data {source} (was {theirs})")
    optimizer = type(trainer.optimizer).__name__
    if run["optimizer_state"]["class"] != optimizer:
        found.append(f"the optimizer {optimizer} (was {run['optimizer_state']['class']})")
    for name in DETERMINE:
        own = getattr(args, name)
        if run.get(name, own) != own:
            found.append(f"{as_typed(name, own)} (was {run[name]})")
    rate = learning_rate(trainer.steps_done, args)
    theirs = learning_rate(trainer.steps_done, SimpleNamespace(**vars(args) | run))
    if not math.isclose(rate, theirs):
        found.append(f"a learning rate of {rate:.3g} in the next step (was {theirs:.3g})")
    return found


# ---- copies that must be equal -------------------------------------------------------------------


def require_equal_gradients(trainer):
    """After a step, raise TrainingError if copies over tp have different gradients. Collective.

    A layer that forgets mark_sum_over_tp() or set_shard() shows in the first step.
    """
    args, mesh = trainer.args, trainer.mesh
    groups = []
    if args.tp > 1:
        groups.append(mesh.tp_group)
    if args.tp > 1 and args.experts:
        groups.append(mesh.expert_tp_group)
    for group in groups:
        for chunk in trainer.chunks:
            on_all_ranks(check_gradients_over_tp, chunk, group, status=1)


def require_equal_copies(trainer, saver):
    """Raise TrainingError if copies have come to differ. Collective.

    With --checkpoint, the state is saved all the same, but under a name that no run resumes from.
    """
    fault = check_copies(trainer)
    if fault and saver is not None:
        saver.save(".unequal")
        fault += f"; this state is saved as step_{trainer.steps_done:08d}.unequal"
    if fault:
        raise TrainingError(fault)


def check_copies(trainer):
    """Return a sentence about copies that have come to differ, or "", on all ranks. Collective.

    Whatever two ranks hold of the same place in the same weight, bias of a router or moment must
    have the same bits: replicas over dp x cp, with ZeRO the copies of its shards, what tp does not
    divide, copies of experts, the tied weight, and DualPipe's second replica. If bits differ, a
    memory or a computation has been at fault, and the training would go on with both values.
    """
    mesh = trainer.mesh
    own = fingerprints(trainer)
    fault = ""
    for group in mesh.dp_cp_group, mesh.tp_group, mesh.pp_group:
        copies = {}  # {what: [(rank, fingerprint), ...]}
        for rank, theirs in zip(dist.get_process_group_ranks(group), gather_objects(own, group)):
            for what, value in theirs:
                copies.setdefault(what, []).append((rank, value))
        for what, held in copies.items():
            usual, _ = Counter(value for _, value in held).most_common(1)[0]
            others = [rank for rank, value in held if value != usual]
            if others and not fault:
                first = next(rank for rank, value in held if value == usual)
                fault = f"{what} on rank {others[0]} differs from its copy on rank {first}"
    return next(filter(None, gather_objects(fault)), "")


@torch.no_grad()
def fingerprints(trainer):
    """Return [(what, fingerprint)] for each part of the state that this rank holds."""
    parts, values = [], []
    for chunk in range(len(trainer.chunks)):
        for kind, tensors in state_of(trainer, chunk).items():
            for name, tensor in tensors.items():
                for first_index, box in tensor.boxes.items():
                    what = name if kind == "model" else f"{kind} of {name}"
                    parts.append(f"{what}{list(box.shape)} at {list(first_index)}")
                    values.append(fingerprint(box))
    if not parts:  # a small model that ZeRO divides over many ranks
        return []
    return list(zip(parts, torch.stack(values).tolist()))  # the host waits for the device once


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


# The peak TFLOP/s of dense products, from data sheets (fp32 is without tensor cores), by the names
# that torch.cuda.get_device_name() returns. An unknown name has no MFU rather than a wrong one.
A100 = {"bf16": 312, "tf32": 156, "fp32": 19.5}
H100_SXM = {"bf16": 989, "tf32": 495, "fp32": 67}
H100_PCIE = {"bf16": 756, "tf32": 378, "fp32": 51}
H100_NVL = {"bf16": 835, "tf32": 418, "fp32": 60}
PEAK_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": A100,
    "NVIDIA A100-SXM4-80GB": A100,
    "NVIDIA A100-PCIE-40GB": A100,
    "NVIDIA A100 80GB PCIe": A100,
    "NVIDIA A800-SXM4-80GB": A100,
    "NVIDIA H100 80GB HBM3": H100_SXM,
    "NVIDIA H100 PCIe": H100_PCIE,
    "NVIDIA H100 NVL": H100_NVL,
    "NVIDIA H800": H100_SXM,
    "NVIDIA H800 PCIe": H100_PCIE,
    "NVIDIA H200": H100_SXM,
    "NVIDIA H200 NVL": H100_NVL,
    "NVIDIA GH200 480GB": H100_SXM,
    "NVIDIA H20": {"bf16": 148, "tf32": 74, "fp32": 44},
    "NVIDIA B200": {"bf16": 2250, "tf32": 1125, "fp32": 75},
    "NVIDIA GB200": {"bf16": 2500, "tf32": 1250, "fp32": 80},
    "NVIDIA L40S": {"bf16": 362, "tf32": 183, "fp32": 92},
    "NVIDIA GeForce RTX 4090": {"bf16": 165, "tf32": 83, "fp32": 83},
    "NVIDIA GeForce RTX 3090": {"bf16": 71, "tf32": 36, "fp32": 36},
}


def peak_tflops(args, device):
    """Return the device's peak in TFLOP/s, or None if it is unknown or shared by processes."""
    if device.type != "cuda" or args.device == "shared":
        return None
    peaks = PEAK_TFLOPS.get(torch.cuda.get_device_name(device))
    return peaks and peaks[args.dtype]


def peak_memory(device):
    """Return the most bytes that this process has had on its GPU, or else in the host's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10


class Log:
    """Reports progress on rank 0's output and in the --metrics file. Creation is collective.

    On a terminal, every step rewrites one line, and some lines stay. Elsewhere only these are
    printed. Memory is that of rank 0, tflops and mfu are those of a device, and all other numbers
    are those of the whole run.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.speaks = dist.get_rank() == 0
        self.is_terminal = sys.stdout.isatty()
        self.first_step = trainer.steps_done + 1
        self.began = time.perf_counter()
        args = trainer.args
        self.peak = peak_tflops(args, trainer.device)
        path = args.metrics if self.speaks and args.metrics else os.devnull
        mode = "a" if trainer.steps_done else "w"
        open_file = partial(open, path, mode, opener=open_without_waiting)
        self.file = on_all_ranks(open_file, prefix=f"--metrics {args.metrics}: ")
        self.write({"flags": flags_of(args)})
        for line in describe(trainer):
            self.say(line)

    def step(self, metrics, seconds, must_print=False):
        """Report the metrics of a step that took so many seconds."""
        step = self.trainer.steps_done
        args = self.trainer.args
        tokens = args.batch_size * args.seq_len
        tflops = tokens / seconds * flops_per_token(args) / args.world_size / 1e12  # per device
        speeds = {"tokens_per_s": tokens / seconds, "tflops": tflops}
        if self.peak:
            speeds["mfu"] = tflops / self.peak
        metrics = {"loss": metrics["loss"]} | speeds | metrics
        metrics["memory_mb"] = peak_memory(self.trainer.device) / 2**20
        elapsed = time.perf_counter() - self.began
        left = elapsed / (step - self.first_step + 1) * (args.steps - step)
        times = {"tokens_seen": step * tokens, "elapsed_s": elapsed, "left_s": left}
        self.write({"step": step} | metrics | times)
        line = f"step {step} of {args.steps}"
        for name, number in metrics.items():
            digits = ",.0f" if number >= 100 else ".4g"
            line += f"  {name} {number:{digits}}"
        line += f"  left {timedelta(seconds=round(left))}"
        every = args.print_every or max(1, round(args.steps / 40))
        if step in (self.first_step, args.steps) or must_print or step % every == 0:
            self.say(line)
        elif self.is_terminal:
            columns = shutil.get_terminal_size().columns
            self.say(line[: columns - 1], end="")  # the next line replaces this one

    def validation(self, loss):
        """Report the loss of a validation."""
        step = self.trainer.steps_done
        self.write({"step": step, "validation_loss": loss})
        self.say(f"validation loss {loss:.4f} after step {step}")

    def say(self, line, end="\n"):
        """Print a line, on rank 0 only. On a terminal, it replaces a line that has no end."""
        if self.speaks:
            erase = "\r\033[K" if self.is_terminal else ""
            print(erase + line, end=end, flush=True)

    def write(self, value):
        """Write a line of JSON. If that fails, say so, and write no more."""
        try:
            print(json.dumps(value), file=self.file, flush=True)
        except OSError as error:
            self.say(f"warning: --metrics ends here: {error}")
            self.file = open(os.devnull, "w")


def open_without_waiting(path, flags):
    """Open a file for open(). A pipe that nobody reads, or not fast enough, raises OSError."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def describe(trainer):
    """Return lines that say what the run consists of, much of it derived from the flags."""
    args = trainer.args
    own = boxes_of([row for row in trainer.originals() if not row.is_buffer])
    sizes = {name: whole.numel() for name, whole in own.items()}
    parameters = sum(ChainMap(*gather_objects(sizes)).values())  # each name counts once
    of_ranks = gather_objects(sum(size_of_whole(p) for p in trainer.parameters()))
    model = f"{parameters:,} parameters in {args.dtype}"
    if args.dtype == "bf16":
        model += " (and in fp32, for the optimizer)"
    model += f"; a rank's layers have {min(of_ranks):,}"
    if max(of_ranks) > min(of_ranks):
        model += f" to {max(of_ranks):,}"

    device = trainer.device.type
    if device == "cuda":
        device = torch.cuda.get_device_name(trainer.device)
    axes = "pp", "dp", "cp", "tp"
    layout = f"{args.world_size} x {device}: "
    layout += " x ".join(f"{axis} {getattr(args, axis)}" for axis in axes)
    if args.ep > 1:
        layout += f", ep {args.ep}"
    if args.pp > 1:
        layout += f", schedule {args.schedule}"
    shards = args.dp * args.cp // args.replicate
    if args.zero:
        layout += f", ZeRO-{args.zero} with {args.replicate} x {shards} shards"
    elif shards > 1:
        layout += ", DDP"
    if args.zero and shards == 1:
        layout += " (undivided: bf16 needs ZeRO's fp32 weights)"

    rows = args.batch_size // (args.dp * args.microbatches)
    batch = f"{args.batch_size} sequences of {args.seq_len} tokens per step: "
    batch += f"dp {args.dp} x {args.microbatches} microbatches x {rows} rows, "
    batch += f"{args.batch_size * args.seq_len:,} tokens; {args.steps:,} steps"
    return [model, layout, batch]


def size_of_whole(parameter):
    """Return the number of elements of a parameter before ZeRO divided it."""
    return math.prod(getattr(parameter, "whole_shape", parameter.shape))


# ---- flags ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Args(GPTConfig):
    """All flags of a run, completed and checked."""

    world_size: int
    per_node: int  # so many consecutive ranks always share a node
    ep_nodes: int  # the number of nodes over which an ep_group is spread

    # the degrees of the axes, and how the work is divided
    dp: int | None = flag(None, "replicas (default: as many as there are processes for)",
                          group="layout")  # fmt: skip
    tp: int = flag(1, "ranks that split every matrix")
    cp: int = flag(1, "ranks that split the sequence, in attention too")
    pp: int = flag(1, "ranks of the pipeline")
    zero: int | None = flag(None, "ZeRO stage (default: 1, or 0 if dp x cp = 1)", choices=range(4))
    replicate: int | None = flag(None, "copies of ZeRO's shards, as in HSDP (default: 1)",
                                 needs="--zero > 0", neutral=1)  # fmt: skip
    cp_method: str = flag("ring", "algorithm of attention across cp", choices=CP_METHODS,
                          needs="--cp > 1")  # fmt: skip
    schedule: str = flag("1f1b", "order of microbatches in the pipeline", choices=SCHEDULES,
                         needs="--pp > 1", neutral="1f1b")  # fmt: skip
    overlap: bool = flag(False, "compute a forward and a backward in turns, each while the other's "
                         "tokens travel to experts: pays where they cross nodes; needs --ep > 1",
                         needs=f"--schedule {WITH_PAIRS}")  # fmt: skip
    chunks: int = flag(2, "pipeline stages on each rank", needs=f"--schedule {WITH_CHUNKS}",
                       neutral=1)  # fmt: skip
    microbatches: int | None = flag(None, "parts of a batch (default: 1; with pp up to 4 x pp)",
                                    below=10**5)  # fmt: skip
    ep: int = flag(1, "ranks of dp x cp x tp over which the experts are spread",
                   needs="--experts", neutral=1)  # fmt: skip
    expert_parts: int | None = flag(None, "parts of a microbatch, some of which travel beside the "
                                    "experts of others (default: 2 if messages are long, else 1)",
                                    needs="--ep > 1", neutral=1)  # fmt: skip
    collectives: str = flag("ours", "whose collectives to use", choices=("ours", "backend"),
                            needs="--pp * --dp * --cp * --tp > 1", neutral="ours")  # fmt: skip

    # what an optimizer step does
    batch_size: int | None = flag(None, "sequences per step, of all replicas (default: 16 or more)",
                                  group="optimisation")  # fmt: skip
    steps: int = flag(1200, "optimizer steps", below=10**8)
    lr: float = flag(3e-3, "peak learning rate")
    warmup: int = flag(20, "steps of linear warm-up", least=0)
    lr_decay: str = flag("cosine", "shape of the final decay of the learning rate",
                         choices=("cosine", "linear", "none"))  # fmt: skip
    decay_steps: int | None = flag(None, "last steps, which decay (default: all after the warm-up)",
                                   needs="--lr-decay cosine or linear")  # fmt: skip
    min_lr: float | None = flag(None, "learning rate after the decay (default: --lr / 10)",
                                needs="--lr-decay cosine or linear")  # fmt: skip
    weight_decay: float = flag(0.1, "weight decay of matrices")
    grad_clip: float = flag(1.0, "largest norm of the gradients, or 0 for no limit")
    seed: int = flag(0, "seed of weights, batches and dropout", least=0, below=2**32)
    dtype: str = flag("fp32", "bf16 also keeps fp32 weights", choices=("fp32", "tf32", "bf16"))
    moments: str = flag("fp32", "dtype of Adam's moments between steps", choices=("fp32", "bf16"))

    # where a run happens, what it reads and what it writes
    device: str = flag("auto", "auto: a GPU per process, or the CPU; shared: processes share GPUs",
                       choices=("auto", "cpu", "cuda", "shared"), group="run")  # fmt: skip
    data: str | None = flag(None, "text, .jsonl, tokens (.bin), folder (default: Python's sources)")
    checkpoint: str | None = flag(None, "folder to save checkpoints in and to resume from")
    save_every: int | None = flag(None, "steps between checkpoints (default: one at the end)",
                                  needs="--checkpoint")  # fmt: skip
    keep: int = flag(2, "checkpoints to keep; older ones are deleted", needs="--checkpoint")
    resume_step: int | None = flag(
        None, "resume from this step, and rename later checkpoints to step_X.abandoned. If the"
        " last checkpoint was saved with the same --resume-step, as before a restart, resume"
        " from it (default: resume from the last checkpoint)", least=0, needs="--checkpoint",
    )  # fmt: skip
    eval_every: int | None = flag(None, "steps between validations (default: one at the end)")
    sample: int | None = flag(None, "tokens to write with every validation (default: 200, or 0 "
                              "with .bin data and no --prompt)", least=0)  # fmt: skip
    prompt: str | None = flag(None, "start of a sample: text, or with .bin data tokens as 1,2,3 "
                              "(default: a newline, or with .bin data a token)")  # fmt: skip
    temperature: float = flag(0.8, "randomness of the sample, or 0 for the likeliest tokens")
    print_every: int | None = flag(None, "steps between printed lines (default: about 40 lines)")
    metrics: str | None = flag(None, "file in which to write flags and steps, as lines of JSON")
    timeout: int = flag(600, "seconds that a rank waits for another", below=10**6)


FLAGS = [flag for flag in fields(Args) if "help" in flag.metadata]
GROUPS = "model", "experts", "layout", "optimisation", "run"  # the headings in --help
USAGE = "torchrun --nproc-per-node NUMBER hybrid.py [flags]"
EPILOG = """
A flag that has no effect without another one is refused if the other one is missing.

example: two pipeline stages, each on two ranks that split every matrix
  torchrun --nproc-per-node 4 hybrid.py --pp 2 --tp 2 --steps 100

Unless they are set already, hybrid.py sets two environment variables:
  CUDA_DEVICE_MAX_CONNECTIONS=32  kernels do not wait for unrelated messages
  NCCL_MAX_P2P_NCHANNELS=16       NCCL's buffers take half as much memory
"""


class Parser(argparse.ArgumentParser):
    """The command line's parser. It raises ValueError on errors, and sets only the flags given."""

    def __init__(self):
        options = {"usage": USAGE, "description": __doc__.splitlines()[0], "epilog": EPILOG}
        options["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__("hybrid.py", allow_abbrev=False, **options)
        group = self
        groups = {title: self.add_argument_group(title) for title in GROUPS}
        for flag in FLAGS:
            group = groups.get(flag.metadata.get("group"), group)
            group.add_argument(as_typed(flag.name), default=argparse.SUPPRESS, **options_of(flag))

    def error(self, message):
        sentence = message.removeprefix("argument ")
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        if unknown:
            name = unknown[1].replace("_", "-")
            known = [as_typed(flag.name) for flag in FLAGS]
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            sentence += f" (is it {near[0]}?)" if near else " (--help lists all flags)"
        raise ValueError(sentence)


MOST = {int: 2**31, float: math.inf}  # what a number must be below, unless its flag says it


def options_of(flag):
    """Return the options of add_argument() for a flag."""
    details = flag.metadata
    help = details["help"]
    kind, *_ = get_args(flag.type) or [flag.type]  # the int of `int | None`
    if flag.default is not None and kind is not bool:
        help += f" (default: {flag.default})"
    if "needs" in details:
        help += f"; needs {details['needs']}"
    if kind is bool:
        return {"help": help, "action": "store_true"}
    options = {"help": help, "type": kind, "choices": details.get("choices")}
    if kind is str and "choices" not in details:
        options["type"] = not_empty
    if kind is not str and "choices" not in details:
        least = details.get("least", 1 if kind is int else 0)
        options["type"] = at_least(least, kind, details.get("below", MOST[kind]))
        options["metavar"] = "N"
    return options


def at_least(least, kind=int, below=math.inf):
    """Return a type for argparse that accepts numbers in [least, below)."""

    def number(text):
        value = kind(text)
        if not least <= value < below:
            raise argparse.ArgumentTypeError(f"{text} is not in [{least}, {below})")
        return value

    number.__name__ = kind.__name__  # argparse writes "invalid int value"
    return number


def not_empty(text):
    """Return the text of a flag, which must not be empty."""
    if not text:
        raise argparse.ArgumentTypeError("the value is empty (is a shell variable not set?)")
    return text


def as_typed(name, value=True):
    """Return a flag as it is written on the command line."""
    dashed = "--" + name.replace("_", "-")
    return dashed if value is True else f"{dashed} {value}"


def flags_of(args):
    """Return {name: value} of all flags, without the other fields of Args."""
    return {flag.name: getattr(args, flag.name) for flag in FLAGS}


def parse(argv, world_size, per_node=None):
    """Return the Args of world_size processes, of which per_node, by default all, share a node.

    per_node: 0 if it is not known yet; then whether --topk-nodes fits is not checked.
    Raises ValueError with one line, which names flags and values, if these do not fit together.
    """
    typed = vars(Parser().parse_args(argv))
    args = argparse.Namespace(**{flag.name: flag.default for flag in FLAGS} | typed)
    args.world_size = world_size
    args.per_node = world_size if per_node is None else per_node
    args.dp = args.dp or max(1, world_size // (args.pp * args.cp * args.tp))
    dp_cp = args.dp * args.cp
    if args.zero is None:
        args.zero = int(dp_cp > 1)
    if args.dtype == "bf16" and not args.zero:
        is_clear = typed.get("zero") is None or args.replicate is None
        need(is_clear, f"--replicate {args.replicate} with --dtype bf16 needs --zero > 0")
        args.zero = 1  # ZeRO keeps fp32 weights
        args.replicate = args.replicate or dp_cp  # a copy per rank
    args.replicate = args.replicate or 1
    complete_model(args)
    # how many ranks an ep_group can have in a node: gcd(ep, tp) in each of the node's tp_groups
    inside = math.gcd(args.ep, args.tp) * max(1, args.per_node // args.tp)
    args.ep_nodes = args.ep // math.gcd(args.ep, inside)
    args.topk_nodes = args.topk_nodes or args.ep_nodes
    # 1F1B is idle for less than 1/3 of the time with 2 x pp microbatches, and 1/5 with 4 x pp. By
    # default, each replica's pipeline gets a multiple of 2 x pp sequences, cut into 4 x pp parts if
    # possible.
    most = 4 * args.pp if args.pp > 1 else 1
    divisor = args.dp * (args.microbatches or math.ceil(most / 2))
    args.batch_size = args.batch_size or math.ceil(16 / divisor) * divisor
    args.microbatches = args.microbatches or math.gcd(args.batch_size // args.dp, most)
    if args.decay_steps is None:
        args.decay_steps = max(0, args.steps - args.warmup)
    if args.min_lr is None:
        args.min_lr = args.lr / 10
    check_needs(args, typed)
    check(args)
    args = Args(**vars(args))
    schedule_of(args)
    return args


def complete_model(args):
    """Set the flags of the model whose defaults depend on other flags."""
    args.kv_heads = args.kv_heads or args.heads
    args.head = args.head or usual_head(args.block)
    args.ffn = args.ffn or 4 * args.hidden


def check_needs(args, typed):
    """Raise ValueError if a flag of typed, {name: value}, lacks what it needs to have an effect."""
    for flag in FLAGS:
        value = typed.get(flag.name)
        needs = flag.metadata.get("needs")
        if needs and value not in (None, flag.metadata.get("neutral")):
            need(is_met(args, needs), f"{as_typed(flag.name, value)} needs {needs}")
    for name in ("prompt", "temperature"):  # the default of --sample depends on the data
        typed_flag = as_typed(name, typed.get(name))
        need(args.sample != 0 or name not in typed, f"{typed_flag} needs --sample > 0")


def is_met(args, needs):
    """Return whether args has what a flag needs: "--checkpoint", "--cp > 1", "--x y or z"."""
    flags, _, bound = needs.replace("--", "").partition(" > ")
    if bound:
        return value_of(args, flags.replace("-", "_")) > int(bound)
    name, _, wanted = flags.partition(" ")
    value = getattr(args, name.replace("-", "_"))
    if wanted:
        return str(value) in wanted.split(" or ")
    return bool(value)


def value_of(args, product):
    """Return the value of a product of flags, such as "dp * cp"."""
    return math.prod(getattr(args, name) for name in product.split(" * "))


def typed_product(args, product):
    """Return a product of flags, such as "dp * cp", with values: "--dp 4 * --cp 2"."""
    return " * ".join(as_typed(name, getattr(args, name)) for name in product.split(" * "))


def must_divide(args, divisor, number):
    """Raise ValueError unless a product of flags divides another one."""
    sentence = f"{typed_product(args, number)} is not divisible by {typed_product(args, divisor)}"
    need(value_of(args, number) % value_of(args, divisor) == 0, sentence)


def check(args):
    """Raise ValueError if the flags, all of which must be set, do not fit together."""
    check_grid(args)
    check_learning_rate(args)
    check_model(args)
    check_experts(args)
    check_sequence(args)


def check_grid(args):
    """Raise ValueError if the grid does not have as many ranks as there are, or cannot be cut."""
    shown = partial(typed_product, args)
    size = args.pp * args.dp * args.cp * args.tp
    sentence = f"{shown('pp * dp * cp * tp')} is not {args.world_size}, the number of ranks"
    if args.world_size == 1:
        sentence += f" (torchrun --nproc-per-node {size} starts {size})"
    need(size == args.world_size, sentence)
    must_divide(args, "replicate", "dp * cp")
    must_divide(args, "ep", "dp * cp * tp")
    must_divide(args, "dp * microbatches", "batch_size")
    need(args.ep > 1 or not args.overlap, "--overlap needs --ep > 1")


def check_learning_rate(args):
    """Raise ValueError if the learning rate's flags do not fit together, see learning_rate()."""
    shown = partial(typed_product, args)
    need(args.min_lr <= args.lr, f"{shown('min_lr')} is more than {shown('lr')}")
    after_warmup = max(0, args.steps - args.warmup)
    is_short = args.decay_steps <= after_warmup
    need(is_short, f"{shown('decay_steps')} is more than {shown('steps')} - {shown('warmup')}")


def check_model(args):
    """Raise ValueError if there is no such model, or if it cannot be cut over tp and pp."""
    shown = partial(typed_product, args)
    must_divide(args, "heads", "hidden")
    must_divide(args, "kv_heads", "heads")
    if args.block == "llama":
        is_even = args.hidden // args.heads % 2 == 0
        width = f"{shown('hidden')} / {shown('heads')}"
        need(is_even, f"{shown('block')} rotates pairs of elements, but {width} is odd")
    must_divide(args, "tp", "kv_heads")
    need(args.tp <= args.vocab_size, f"{shown('tp')} is more than {shown('vocab_size')}")
    if not args.experts or args.moe_every > 1:  # some layers have an MLP, which tp splits
        must_divide(args, "tp", "ffn")
    # a schedule of too many stages would take minutes to make, before schedule_of() refuses it
    need(args.chunks <= args.layers + 2, f"{shown('layers')} is too few for {shown('chunks')}")


def check_experts(args):
    """Raise ValueError if experts cannot be divided over ep, or used as the flags say."""
    shown = partial(typed_product, args)
    if args.experts:
        must_divide(args, "ep", "experts")
        need(args.top_k <= args.experts, f"{shown('top_k')} is more than {shown('experts')}")
        need(args.moe_every <= args.layers, f"{shown('moe_every')} is more than {shown('layers')}")
    if args.experts and args.per_node:
        nodes = args.ep_nodes
        need(args.topk_nodes <= nodes, f"{shown('topk_nodes')} exceeds the nodes of ep, {nodes}")
        reach = args.experts // nodes * args.topk_nodes
        need(args.top_k <= reach, f"{shown('topk_nodes')} is {reach} experts, not {shown('top_k')}")


def check_sequence(args):
    """Raise ValueError if the sequence cannot be divided over cp, sp and experts."""
    shown = partial(typed_product, args)
    if args.cp > 1:
        divisible = args.seq_len % (2 * args.cp) == 0
        need(divisible, f"{shown('seq_len')} is not divisible by 2 * {shown('cp')}")
        need(args.dropout == 0, f"{shown('dropout')} does not work with {shown('cp')}")
    if args.sp or args.experts:
        must_divide(args, "cp * tp", "seq_len")
    if args.cp_method == "ulysses":
        must_divide(args, "tp * cp", "heads")
        if args.cp % (args.kv_heads // args.tp):  # unless ranks of cp share kv heads
            must_divide(args, "tp * cp", "kv_heads")


def schedule_of(args):
    """Return the pipeline's schedule; raise ValueError if it is not defined for these flags."""
    kind = SCHEDULES[args.schedule]
    chunks = [args.chunks] if kind.v is None else []
    try:
        schedule = kind(args.pp, args.microbatches, *chunks)
    except ValueError as error:  # "num_stages=3 ..." becomes "--pp 3 ..."
        sentence = str(error).replace("num_stages", "--pp")
        sentence = sentence.replace("num_microbatches", "--microbatches")
        sentence = re.sub(r"(?<=\w)=", " ", sentence)
        raise ValueError(f"{as_typed('schedule', args.schedule)}: {sentence}") from None
    if args.overlap:
        pair_up(schedule)
    stages = len(schedule.routes[0])
    # the first stage may hold just the embedding, and the last one just the head
    need(args.layers + 2 >= stages, f"--layers {args.layers} is too few for {stages} stages")
    most = max(map(len, divide_layers(args, schedule.routes)))
    as_one = as_typed("recompute_layers", args.recompute_layers)
    need(args.recompute_layers <= most, f"{as_one} is more than a stage has, at most {most}")
    return schedule


def warnings_of(args):
    """Return a sentence for each choice of flags that may make a run slow."""
    shown = partial(typed_product, args)
    found = []
    if args.world_size > args.per_node and args.per_node % args.tp:
        node = f"a node of {args.per_node} processes"
        found.append(f"{shown('tp')} leaves {node}: every layer waits for sums between nodes")
    if args.pp > 1 and args.microbatches < 2 * args.pp:
        few = f"{shown('microbatches')} is fewer than 2 * {shown('pp')}"
        idle = f"a rank is idle for {idle_share(args):.0%} of a step"
        found.append(f"{few}: with {shown('schedule')} {idle}")
    nodes_of_token = min(args.top_k, args.topk_nodes)
    if nodes_of_token > 1 and args.topk_nodes == args.ep_nodes:
        many = f"a token may use experts on {nodes_of_token} of them"
        found.append(f"{shown('ep')} spans {args.ep_nodes} nodes: without --topk-nodes, {many}")
    return found


def idle_share(args):
    """Return the part of a step in which a pipeline's rank waits, if all layers cost the same."""
    backward = 3.0 if args.recompute == "full" else 2.0  # in units of a forward
    timeline = simulate(schedule_of(args), forward=1.0, backward=backward, weight=1.0)
    return max(timeline.bubble) / timeline.total


# ---- errors --------------------------------------------------------------------------------------


class TrainingError(ValueError):
    """An error that ends the run, on all ranks once they are connected. status: the exit status."""

    def __init__(self, message, status=1):
        super().__init__(message)
        self.status = status


def need(condition, sentence):
    """Raise ValueError with this sentence unless the condition holds."""
    if not condition:
        raise ValueError(sentence)


def on_all_ranks(call, *arguments, prefix="", status=2, group=None):
    """Return call(*arguments). If it fails on one rank, raise TrainingError on all. Collective.

    To fail is to raise OSError, ValueError, or what torch.distributed.checkpoint raises.
    """
    fault = ""
    try:
        result = call(*arguments)
    except (OSError, ValueError) as error:
        fault = str(error) or repr(error)
    except dcp.api.CheckpointException as error:  # all ranks raise it if one has failed
        fault, _ = error.failures.get(dist.get_rank(), ("", None))
    for rank, line in enumerate(gather_objects(str(fault).strip().split("\n")[0], group)):
        if line:
            who = f"rank {rank}: " if rank else ""
            raise TrainingError(f"{prefix}{who}{line}", status)
    return result


def on_any_rank(condition):
    """Return whether the condition is true on any rank. The all-reduce uses gloo, not the GPUs."""
    found = torch.tensor(condition, dtype=torch.uint8)
    all_reduce(found, ReduceOp.MAX)
    return bool(found)


# ---- one process ---------------------------------------------------------------------------------

# Variables that main() sets unless they are set already. CUDA and NCCL read them when they start.
ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # with fewer queues, kernels wait for unrelated messages
    "NCCL_MAX_P2P_NCHANNELS": "16",  # half of the usual channels, and so half of NCCL's buffers
}


LAUNCHER = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"  # what torchrun sets, and more


def launched():
    """Return RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE of a launcher such as torchrun.

    Without a launcher they are 0, 1, 0 and 1. Raises ValueError if it has not set what is needed.
    """
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        missing = [name for name in LAUNCHER if not os.environ.get(name, "").strip()]
        sentence = f"the environment has no {', '.join(missing)}"
        need(not missing, f"{sentence}: torchrun sets all of {', '.join(LAUNCHER)}")
        need(number_in_environment("MASTER_PORT") < 2**16, "MASTER_PORT is not below 65536")
    rank = number_in_environment("RANK", 0)
    world_size = number_in_environment("WORLD_SIZE", 1)
    per_node = number_in_environment("LOCAL_WORLD_SIZE", world_size)
    need(rank < world_size, f"RANK {rank} is not below WORLD_SIZE {world_size}")
    need(per_node, "LOCAL_WORLD_SIZE is 0")
    return rank, world_size, number_in_environment("LOCAL_RANK", 0), per_node


def number_in_environment(name, default=0):
    """Return an environment variable's number; raise ValueError if it is none."""
    text = os.environ.get(name, str(default))
    need(text.strip().isdecimal(), f"{name} is not a number: '{text}'")
    return int(text)


def choose_device(args, local_rank=0, per_node=1):
    """Return this process's device and the backend; raise ValueError if a GPU is missing."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.device == "auto" and 0 < gpus < per_node:
        ways = "--device cuda if each process sees a GPU of its own, --device shared if they share"
        raise ValueError(f"--device auto: {gpus} GPUs for {per_node} processes on a node: {ways}")
    if args.device == "cpu" or (args.device == "auto" and not gpus):
        need(args.dtype != "tf32", "--dtype tf32 needs a GPU")
        return torch.device("cpu"), "gloo"
    need(gpus, f"--device {args.device}: there is no GPU on this machine")
    device = torch.device("cuda", local_rank % gpus)  # a process may see only its own GPU
    torch.cuda.set_device(device)
    return device, "gloo" if args.device == "shared" else "nccl"


def meet(timeout):
    """Return (store, rank, world_size) of the processes that torchrun started, or of one process.

    A store holds values by name, which each process can set and get.
    """
    store, rank, world_size = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        options = {"timeout": timedelta(seconds=timeout)}
        store, rank, world_size = next(dist.rendezvous("env://", **options))
    # after a restart, torchrun's store still has the keys of the previous attempt
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    return store, rank, world_size


OF_A_MACHINE = {"data", "checkpoint", "metrics"}  # paths, which may differ between machines


def agree(own, store, rank, world_size):
    """Return (per_node, what is wrong or ""), the same on all ranks. Collective.

    Every choice that leads to messages must be the same on all ranks. So what a rank finds on its
    machine goes to rank 0, which decides for all. This needs only the store, and no process group.

    own: {"per_node": processes on this node, "backend": name, "flags": {name: value} of those that
        must be equal, "fault": what is wrong on this rank, or ""}
    """
    store.set(f"found on {rank}", json.dumps(own))
    if rank == 0:
        names = [f"found on {rank}" for rank in range(world_size)]
        found = [json.loads(text) for text in store.multi_get(names)]
        # ranks of a node are consecutive, so every run of so many ranks is on one node
        per_node = math.gcd(*(each["per_node"] for each in found))
        store.set("agreed", json.dumps([per_node, fault_of(found)]))
    return json.loads(store.get("agreed"))


def fault_of(found):
    """Return what is wrong with what all ranks have found, or ""."""
    first = found[0]
    for rank, each in enumerate(found):
        if each["fault"]:
            return f"rank {rank}: {each['fault']}" if rank else each["fault"]
    for rank, each in enumerate(found):
        for name, value in each["flags"].items():
            expected = first["flags"][name]
            if value != expected:
                theirs = f"rank 0 has {as_typed(name, expected)}"
                return f"rank {rank} has {as_typed(name, value)}, {theirs}"
        if each["backend"] != first["backend"]:
            backends = f"rank {rank} would use {each['backend']}, rank 0 {first['backend']}"
            return f"--device {first['flags']['device']}: {backends}: machines have unlike GPUs"
    return ""


def join(device, backend, timeout, place):
    """Connect the processes that meet() has found. place: what it returned."""
    store, rank, world_size = place
    options = {"timeout": timedelta(seconds=timeout)}
    if backend == "gloo":
        schedule_as_batch()
    else:  # the mesh's groups have only NCCL; the world's gloo carries objects, flags and barriers
        backend = "cpu:gloo,cuda:nccl"
        options["device_id"] = device  # NCCL connects now, and reports errors early
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)


def is_lost_connection(error):
    """Return whether an error says that another process has closed its connection or is missing."""
    if isinstance(error, (dist.DistStoreError, dist.DistNetworkError)):
        return True
    told = "lost rank|[Cc]onnection (closed|reset)|Broken pipe|Wait timeout"
    return bool(re.search(told, str(error)))


def is_out_of_memory(error):
    """Return whether an error says that the host or a GPU has no memory left."""
    kinds = MemoryError, torch.OutOfMemoryError
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def silent_ranks(store, rank, world_size, error="", seconds=10):
    """Tell the others that this rank has lost a connection, and return the ranks that do not.

    If one rank dies, all others lose it or one that has lost it. They say so in the store, so those
    that have not done so after some seconds have died, or hang. Among them may be ranks that wait
    for one that still waits here. So if errors name some of the silent ranks, it is only these.
    """
    keys = {other: f"lost/{other}" for other in range(world_size)}
    store.set(keys[rank], str(error))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and not store.check([*keys.values()]):
        time.sleep(0.1)
    silent = [other for other, key in keys.items() if not store.check([key])]
    errors = [store.get(key).decode() for other, key in keys.items() if other not in silent]
    named = set(re.findall(r"lost rank (\d+)", " ".join(errors)))
    return [other for other in silent if str(other) in named] or silent


def connect(argv, say, rank, world_size, local_rank, per_node):
    """Agree with all ranks on flags, nodes and backends, and connect. Return (args, device, place).

    Raises TrainingError with the exit status if ranks are refused, once its line has been printed.
    say: see main(). The others are what launched() returns.
    """
    own = {"per_node": per_node, "backend": "gloo", "flags": {}, "fault": ""}
    timeout = 30  # seconds, if flags are wrong
    try:
        with nullcontext() if rank == 0 else redirect_stdout(io.StringIO()):  # --help prints once
            args = parse(argv, world_size, per_node=0)  # nodes may have unlike numbers of ranks
        timeout = args.timeout
        device, own["backend"] = choose_device(args, local_rank, per_node)
        own["flags"] = {k: v for k, v in flags_of(args).items() if k not in OF_A_MACHINE}
    except ValueError as error:
        own["fault"] = str(error)
        say(f"error: {error}")  # at once, as others may not come
    try:
        place = meet(timeout)
        per_node, fault = agree(own, *place)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        if own["fault"]:
            raise TrainingError(own["fault"], 2) from None
        where = "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
        reason = str(error).strip().split("\n")[0]
        say(f"error: rank {rank} has not met all others at {where}: {reason}", everywhere=True)
        raise TrainingError(reason, 1) from None
    try:
        need(not fault, fault)
        args = parse(argv, world_size, per_node)
    except ValueError as error:
        if not own["fault"]:
            say(f"error: {error}")
        if "RANK" in os.environ:  # torchrun kills all once one exits, so wait for rank 0's line
            with suppress(RuntimeError):  # some may not have been started
                join(None, "gloo", 30, place)
                barrier()
        raise TrainingError(str(error), 2) from None
    try:
        join(device, own["backend"], timeout, place)
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        report_lost_connection(error, place, say)
        raise TrainingError("a rank has not joined", 1) from None
    return args, device, place


def main(argv=None, work=train):
    """Run work(args, device) on one rank, under torchrun or in a world of one.

    Returns the exit status: 2 if flags are wrong, that of a TrainingError, or what work() returns.
    """
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)

    def say(sentence, everywhere=False):
        if rank == 0 or everywhere:  # in a single write, so that lines of processes do not mix
            print(f"{Path(sys.argv[0]).name}: {sentence}\n", end="", file=sys.stderr, flush=True)

    rank = 0  # as long as it is unknown
    try:
        rank, *others = launched()
    except ValueError as error:
        say(f"error: {error}")
        return 2
    try:
        args, device, place = connect(sys.argv[1:] if argv is None else argv, say, rank, *others)
    except TrainingError as error:  # whose line has been printed
        return error.status
    torch.set_float32_matmul_precision("high" if args.dtype == "tf32" else "highest")
    gc.freeze()  # what was imported is never garbage, so collections need not look at it
    for sentence in warnings_of(args):
        say(f"warning: {sentence}")
    try:
        status = work(args, device) or 0
    except TrainingError as error:
        say(f"error: {error}")
        status = error.status
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            line = str(error).split("\n")[0]
            say(f"error: rank {rank} has no memory left: {line}", everywhere=True)
            return 1
        if not is_lost_connection(error):
            raise
        report_lost_connection(error, place, say)
        return 1
    barrier()  # no rank may close connections that another still uses
    dist.destroy_process_group()
    return status


def report_lost_connection(error, place, say):
    """Print one line about a lost connection, which names the ranks that have died.

    place: what meet() returned. say: a function that prints a sentence, with a flag for all ranks.
    """
    store, rank, world_size = place
    line = str(error).strip().split("\n")[0]
    try:
        silent = silent_ranks(store, rank, world_size, line)
    except RuntimeError:
        line = f"rank {rank} has lost the store, which is rank 0's or torchrun's: {line}"
        say(f"error: {line}", everywhere=True)
        return
    if silent:
        line = f"rank {', '.join(map(str, silent))} does not answer: {line}"
    is_first = rank == min({*range(world_size)}.difference(silent))
    say(f"error: {line}", everywhere=is_first)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a sample may have any character
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # PR_SET_PDEATHSIG is 1: this process gets SIGTERM when its parent, torchrun, dies
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    sys.exit(main())
