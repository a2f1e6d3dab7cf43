"""Train a small GPT, dense or with experts, over pipeline x data x context x tensor parallelism.

The processes form a grid with four axes. Each axis divides the work in its own way, and a process
communicates only with those that differ from it in one coordinate:

    axis          splits      sends, per microbatch and layer
    pp  pipeline  layers      activations forward and gradients back, where two stages meet
    dp  data      sequences   gradients, summed over dp x cp once per step, or as ZeRO does
    cp  context   positions   keys and values, in attention
    tp  tensor    matrices    four all-reduces of activations
    ep  experts   experts     tokens, to their experts and back

    rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank

tp is innermost because it communicates most: its ranks should share a node. ep is not an axis of
the grid. It reuses the ranks of tp, and then of dp x cp: they hold different experts where they
would otherwise hold copies.

A rank holds   1/tp of the matrices of its stage's layers and of their gradients; with ZeRO-1 to 3,
               1/(dp cp) of the optimizer's state, of the gradients, and of the weights
It sends       what the table says; the other files have the formulas, and count the bytes
Overlap        pp   activations travel while other microbatches compute
               dp   gradients are summed while the last microbatch's backward still computes
               cp   the next keys and values travel beside the attention to those at hand (ring)
               tp   in backward, sums of activations travel beside the products for weights
               ep   the host waits for the numbers of tokens; nothing overlaps their travel
PyTorch's      DTensor over a DeviceMesh composes the same axes: a tensor knows how it is split, and
               each operation finds out what to send. Here all tensors are plain ones

Every layout computes what one process computes. The loss is the sum of the token losses divided by
the *global* number of tokens, so gradients are summed and never averaged. Initial weights depend
only on their name and the seed, batches only on the step and the seed. Four things do depend on the
layout:

    - dropout masks
    - the tokens that full experts drop
    - the experts that --topk-nodes rules out
    - balance losses, which are computed per microbatch of all replicas

The model is GPT-2 (Radford et al., 2019), down to its parameters' names. Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021.

    torchrun --nproc-per-node 8 hybrid.py --tp 2 --pp 2 --microbatches 4      dp is 8 / (2 x 2) = 2
"""

import argparse
import ctypes
import fcntl
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import sysconfig
import time
import zlib
from collections import Counter, deque
from contextlib import nullcontext
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
from torch.distributed.checkpoint import metadata, planner

from collectives import (
    ReduceOp, all_reduce, barrier, gather_objects, rank_and_size,
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
    VocabParallelEmbedding, attention, mark_sum_over_tp, parallel_linear, parameters_to_sum_over_tp,
    part_of, shards_of, sum_gradients_over_tp, views_in_whole,
    vocab_parallel_cross_entropy,
)
from zero import FullyShardedDataParallel

CP_METHODS = {
    "allgather": allgather_attention, "ring": ring_attention, "ulysses": ulysses_attention,
}  # fmt: skip
IGNORE_INDEX = -100  # a target that does not count

# ---- model ---------------------------------------------------------------------------------------


def flag(default, help, **details):
    """Declare a dataclass field that is also a flag of the command line.

    details:
        choices        the values that the flag may have
        least, below   the bounds of a number, [1, inf) by default for an int, [0, inf) for a float
    """
    return field(default=default, metadata={"help": help} | details)


@dataclass(frozen=True)
class GPTConfig:
    """A GPT on sequences of T = seq_len tokens, of width D = hidden and vocabulary V."""

    layers: int = flag(4, "number of transformer layers")
    hidden: int = flag(128, "width of the model")
    heads: int = flag(4, "attention heads")
    seq_len: int = flag(64, "tokens in a sequence")
    vocab_size: int = flag(256, "tokens in the vocabulary")
    dropout: float = flag(0.0, "probability, in attention and on what a layer adds", below=1)
    kv_heads: int | None = flag(None, "heads of keys and values (default: --heads)")
    sp: bool = flag(False, "split the sequence over tp between the matrices")
    recompute: str = flag("none", "in backward, recompute attention (selective), or all (full)",
                          choices=("none", "selective", "full"))  # fmt: skip
    ffn: int | None = flag(None, "inner width of an MLP or expert (default: 4 x --hidden)")
    experts: int = flag(0, "experts that take an MLP's place (0: an MLP)", least=0)
    top_k: int = flag(2, "experts that a token uses")
    shared_experts: int = flag(0, "experts that every token uses", least=0)
    capacity_factor: float | None = flag(None, "largest load of an expert / the mean", least=0.01)
    balance: str = flag("aux", "balance loads by losses, or by DeepSeek's bias on sigmoid scores",
                        choices=("aux", "bias", "none"))  # fmt: skip
    moe_every: int = flag(1, "every so many layers, one has experts")
    topk_nodes: int | None = flag(None, "nodes that a token may use (default: all)")

    @property
    def mlp_width(self):
        """F, the inner width of the MLP and of every expert."""
        return self.ffn or 4 * self.hidden

    def has_experts(self, layer):
        """Return whether this layer has experts in place of an MLP."""
        return self.experts > 0 and (layer + 1) % self.moe_every == 0


def _residual_dropout(module, x):
    """Apply dropout, with the same mask on all ranks of tp, or with sp another mask on each."""
    config = module.config
    with module.random if config.sp and config.dropout else nullcontext():
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
    """Pre-LayerNorm transformer layer, (T, B, D) -> (T, B, D); with sp, T is T/tp.

    random: the random state for dropout where the ranks of tp hold different activations.
    attention_fn: attention_fn(q, k, v, dropout) computes attention itself.
    moe: a function that creates the mixture of experts, if this layer has one.
    options: of the linear layers, such as group and defer.
    """

    def __init__(self, config, random=nullcontext(), attention_fn=attention, moe=None, **options):
        super().__init__()
        self.config, self.random, self.attention_fn = config, random, attention_fn
        options["sequence_parallel"] = config.sp
        sizes = config.hidden, config.heads, config.kv_heads
        attend = self.attend
        if config.recompute == "selective":
            attend = partial(recompute, self.attend)
        self.ln_1 = nn.LayerNorm(config.hidden)
        self.attn = ParallelSelfAttention(*sizes, attend, **options)
        self.ln_2 = nn.LayerNorm(config.hidden)
        self.mlp = moe() if moe else MLP(config.hidden, config.mlp_width, **options)

    def forward(self, x):
        x = x + _residual_dropout(self, self.attn(self.ln_1(x)))
        return x + _residual_dropout(self, self.mlp(self.ln_2(x)))

    def attend(self, q, k, v):
        """Compute attention. Heads are split over tp, so every rank draws its own mask."""
        p = self.config.dropout if self.training else 0.0
        with self.random if p else nullcontext():
            return self.attention_fn(q, k, v, p)


class GPT(nn.Module):
    """One pipeline stage of a GPT; layers keep their number in the whole model.

    The first stage takes tokens (B, T), the others activations (T, B, D), with sp (T/tp, B, D). The
    last stage returns logits (T, B, V/tp), the others activations. A single stage uses its token
    embedding as its head. Otherwise the head is a copy on the last stage, which
    Trainer.sum_shared_gradients() keeps equal.

    positions: this rank's positions of the sequence; with context parallelism some of them.
    moe, options: see Block; moe is for layers with experts.
    """

    def __init__(
        self, config, tp_group=None, stage=0, num_stages=1, positions=None, moe=None, **options
    ):
        super().__init__()
        self.config, self.tp_group = config, tp_group
        self.first, self.last = stage == 0, stage == num_stages - 1
        self.defer = options.get("defer")
        self.random = options.get("random", nullcontext())
        self.positions = torch.arange(config.seq_len) if positions is None else positions
        if config.sp:
            rank, tp = rank_and_size(tp_group)
            self.positions = self.positions.chunk(tp)[rank]
        sizes = config.vocab_size, config.hidden
        embedding = partial(VocabParallelEmbedding, *sizes, tp_group, config.sp)
        self.transformer = nn.ModuleDict()
        if self.first:
            self.transformer["wte"] = embedding()
            self.transformer["wpe"] = nn.Embedding(config.seq_len, config.hidden)
        self.transformer["h"] = nn.ModuleDict()
        for i in layers_of(stage, num_stages, config):
            own_moe = moe if config.has_experts(i) else None
            self.transformer["h"][str(i)] = Block(config, moe=own_moe, group=tp_group, **options)
        if self.last:
            self.transformer["ln_f"] = nn.LayerNorm(config.hidden)
            self.lm_head = self.transformer["wte"] if self.first else embedding()
        if config.sp:  # these see only this rank's tokens, so their gradients are partial sums
            for module in self.modules():
                if isinstance(module, (nn.LayerNorm, nn.Embedding)):
                    mark_sum_over_tp(module)

    def forward(self, x):
        if self.first:
            x = self.transformer["wte"](x.t())
            x = x + self.transformer["wpe"](self.positions[: len(x)]).unsqueeze(1)
            x = _residual_dropout(self, x)
        for block in self.transformer["h"].values():
            x = recompute(block, x) if self.config.recompute == "full" else block(x)
        if self.last:
            x = self.transformer["ln_f"](x)
            options = {"group": self.tp_group, "sequence_parallel": self.config.sp}
            x = parallel_linear(x, self.lm_head.weight, defer=self.defer, **options)  # (T, B, V/tp)
        return x

    def tied_weight(self):
        """Return the embedding or head of a stage that has one of them, or None."""
        if self.first == self.last:
            return None
        return self.transformer["wte"].weight if self.first else self.lm_head.weight


def layers_of(stage, num_stages, config):
    """Return the range of a stage's layers, chosen so that the costliest stage costs least.

    The last stage begins with the cost of the head, in mean layers. Each layer goes to the stage
    that costs least so far, among equals to the last of them, since the first stages keep the
    activations of most microbatches. With 30 layers, 4 stages and a head like 1.1 layers: 8, 8, 8
    and 6 layers.
    """
    passes = 4 if config.recompute == "full" else 3  # of a layer; the head always takes 3
    flops_of_head = 3 * 2 * config.hidden * config.vocab_size
    costs = [0.0] * num_stages
    costs[-1] = flops_of_head / (passes * layer_flops(config) / config.layers)
    sizes = [0] * num_stages
    for _ in range(config.layers):
        cheapest = min(reversed(range(num_stages)), key=costs.__getitem__)
        costs[cheapest] += 1
        sizes[cheapest] += 1
    begin = sum(sizes[:stage])
    return range(begin, begin + sizes[stage])


def forward_flops(config, experts):
    """Return the forward FLOPs of one layer per token: (weight products, attention scores).

    Products cost 2 FLOPs per weight that a token uses, about 24 h^2 in all. Scores and their use
    cost 4 s h.

    experts: whether the layer has experts, or the portion of the layers that have.
    """
    h = config.hidden
    kv_width = h * (config.kv_heads or config.heads) // config.heads
    mlp = 2 * h * config.mlp_width
    weights = 2 * h * h + 2 * h * kv_width + mlp
    more = mlp * (config.top_k + config.shared_experts - 1) + h * config.experts
    return 2 * (weights + experts * more), 4 * config.seq_len * h


def layer_flops(config):
    """Return the forward FLOPs of all layers per token."""
    return sum(sum(forward_flops(config, config.has_experts(i))) for i in range(config.layers))


def flops_per_token(config):
    """Return the FLOPs of forward and backward, which takes twice as many, less recomputation."""
    return 3 * (layer_flops(config) + 2 * config.hidden * config.vocab_size)


def make_moe(args, mesh):
    """Create a mixture of experts that takes an MLP's place, (T, B, D) -> (T, B, D)."""
    by_losses = float(args.balance == "aux")
    sizes = args.hidden, args.mlp_width, args.experts, args.top_k
    layer = MoE(
        *sizes, mesh.ep_group,
        tp_group=None if args.sp else mesh.tp_group,  # without sp, tp's ranks hold the same tokens
        balance_groups=(mesh.dp_group, mesh.cp_group, mesh.tp_group),
        nodes=(mesh.node_group, mesh.cross_group) if args.ep_nodes > 1 else None,
        n_group=args.ep_nodes, topk_group=args.topk_nodes,
        capacity_factor=args.capacity_factor, shared_experts=args.shared_experts,
        score="sigmoid" if args.balance == "bias" else "softmax",
        balance_coefficient=0.01 * by_losses, z_coefficient=0.001 * by_losses,
        loss_scale=1 / args.microbatches,
    )  # fmt: skip
    shard = Shard(0, (args.experts,), mesh.ep_group)
    layer.experts.shards = {"w_in": shard, "w_out": shard}
    return mark_sum_over_tp(layer)


# ---- initial values ------------------------------------------------------------------------------


@torch.no_grad()
def initialize(model, layers, seed):
    """Initialize this rank's part of every parameter, and zero the routers' biases (buffers)."""
    shards = shards_of(model)
    for name, parameter in model.named_parameters():
        _, views = views_in_whole(parameter, parameter, shards.get(name))
        name = name.replace("lm_head", "transformer.wte")  # the head is a copy of the embedding
        for first_index, view in views.items():  # an index is 0 in all dims but that of the split
            view.copy_(initial_value(name, view.shape, layers, seed, max(first_index)))
    for buffer in model.buffers():
        buffer.zero_()


def initial_value(name, shape, layers, seed, offset=0):
    """Return the rows of a parameter from `offset` on, initialized as GPT-2's.

    Each row has a random stream of its own, which depends on seed, name and row number, so that a
    rank can draw the rows that it holds. tp splits the columns of a c_proj.weight, so there each
    column has a stream.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "ln_" in name:
        return torch.ones(shape)
    std = 0.02
    if any(part in name for part in ("c_proj", "w_out", "shared.2")):
        std /= math.sqrt(2 * layers)  # each layer adds two of these to the residual
    by_column = name.endswith("c_proj.weight")
    value = torch.empty(shape[::-1] if by_column else shape, dtype=torch.float32)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    bits = np.random.Philox(key=int.from_bytes(digest[:16], "big"))
    generator = np.random.Generator(bits)
    state = bits.state
    offset *= math.prod(value.shape[1:-1])
    for number, row in enumerate(value.view(-1, value.shape[-1]).numpy(), offset):
        state["state"]["counter"][3] = number  # the highest of 4 words: a row has 2**192 draws
        bits.state = state
        generator.standard_normal(out=row, dtype=np.float32)
    value.mul_(std)
    return value.t() if by_column else value


# ---- one step ------------------------------------------------------------------------------------


class TrainingError(ValueError):
    """An error that ends the training, raised on all ranks alike, with the exit status."""

    def __init__(self, message, status=1):
        super().__init__(message)
        self.status = status


class Trainer:
    """One rank's part of the training.

    positions: this rank's positions of each sequence.
    route: the (rank of the pipeline, chunk) of each stage. DualPipe has a second route, for a
        replica of the model, and then `replicated` is true.
    chunks, own_chunks: the stages that this rank holds; those of the first route only.
    dense, experts: the parameters that the ranks of ep hold alike, and those that they split.
    mixtures: {number among the model's mixtures of experts: MoE} in the chunks.
    stages: the chunks, each wrapped in DistributedDataParallel or FullyShardedDataParallel.
    pipeline, evaluation: run the stages over a batch, with backward and without.
    sigterm, stop: whether SIGTERM has reached this rank, and any rank, as of the last step.
    """

    def __init__(self, args, mesh, device):
        self.args, self.mesh, self.device = args, mesh, device
        self.steps_done = 0
        self.sigterm = self.stop = False
        schedule = schedule_of(args)
        self.route = schedule.routes[0]
        self.replicated = len(schedule.routes) > 1
        self.positions = torch.arange(args.seq_len)
        if args.cp > 1:
            self.positions = context_positions(args.seq_len, mesh.cp_group)
        deferred = WeightGradStore()
        self.chunks = make_chunks(args, mesh, device, schedule.routes, self.positions, deferred)
        self.own_chunks = self.chunks[:1] if self.replicated else self.chunks
        self.shards, self.mixtures = {}, {}
        self.dense, self.experts = [], []
        for chunk in self.chunks:
            self.shards |= shards_of(chunk)
            for i, layer in chunk.transformer["h"].items():
                if isinstance(layer.mlp, MoE):
                    self.mixtures[int(i) // args.moe_every] = layer.mlp
            for name, parameter in chunk.named_parameters():
                part = self.experts if is_of_experts(name) else self.dense
                part.append(parameter)
        self.stages = wrap(args, mesh, self.chunks, self.experts)
        self.optimizer = make_optimizer(args, self.dense + self.experts)
        rows = args.batch_size // (args.dp * args.microbatches)
        # with ZeRO-2 and 3 each microbatch's gradients are reduced: no rank keeps whole gradients
        options = {"defer": deferred, "sync_each": args.zero > 1}
        self.pipeline = self.make_pipeline(schedule, rows, self.loss, **options)
        evaluation = forward_only(args.pp, args.microbatches, self.route)
        self.evaluation = self.make_pipeline(evaluation, rows, self.loss)

    def make_pipeline(self, schedule, rows, loss_fn, **options):
        """Create a Pipeline that runs the stages over microbatches of `rows` sequences."""
        args = self.args
        stages = self.stages[: len(self.own_chunks) * len(schedule.routes)]
        length = args.seq_len // (args.cp * (args.tp if args.sp else 1))
        options |= {"shape": (length, rows, args.hidden), "device": self.device}
        options["dtype"] = torch.bfloat16 if args.dtype == "bf16" else torch.get_default_dtype()
        return Pipeline(stages, schedule, loss_fn, self.mesh.pp_group, **options)

    def step(self, inputs, targets):
        """Take one optimizer step on this rank's rows of the batch, (B/dp, T) each.

        Returns metrics by name, with the global loss and the gradient norm before clipping. Raises
        TrainingError, with unchanged weights, if one of these two is not finite.
        """
        args = self.args
        seed_dropout(args.seed, self.steps_done, self.mesh)
        loss = self.forward_backward(inputs, targets)
        norm = self.clip_gradients()
        tallies = sum_tallies(self.mixtures, args, self.mesh, self.device)
        # launched before the host knows the numbers, so that the device need not wait for it
        is_finite = torch.stack([loss, norm]).isfinite().all()
        rate = learning_rate(self.steps_done, args.steps, args.warmup, args.lr)
        self.update(rate, tallies, is_finite)
        self.stop = bool(args.checkpoint) and on_any_rank(self.sigterm)
        found = {"loss": loss, "grad_norm": norm}
        if args.experts:
            found |= tally_metrics(tallies, args.microbatches, args.balance == "aux")
        # the only wait of the host for the device, except for the counts of a mixture of experts
        metrics = dict(zip(found, torch.stack([*found.values()]).tolist()))
        self.steps_done += 1
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
            check_vocabulary(inputs, targets, args.vocab_size)
            numbers = "loss {loss:.4f}, grad norm {grad_norm:.3f}".format_map(metrics)
            raise TrainingError(f"step {self.steps_done} is not finite: {numbers}")
        return metrics | {"lr": rate}

    def forward_backward(self, inputs, targets):
        """Leave the summed gradients in .grad, and return the global loss."""
        # DDP's gradients are views of its buckets and must stay; ZeRO sets .grad anew
        self.optimizer.zero_grad(set_to_none=self.args.zero > 0)
        loss = self.run(self.pipeline, inputs, targets)
        for stage in self.stages:
            stage.finish_grad_sync()  # the sums over dp x cp began in the last backward
        self.sum_shared_gradients()
        return loss

    def run(self, pipeline, inputs, targets):
        """Run one step of the pipeline and return the global loss."""
        for chunk in self.chunks:
            chunk.train(torch.is_grad_enabled())
        inputs, targets = self.own_tokens(inputs, targets)
        num_tokens = (targets != IGNORE_INDEX).sum()
        all_reduce(num_tokens, group=self.mesh.dp_cp_group)
        # the divisor is known before backward, so gradients are summed and never averaged
        loss = pipeline.step(inputs, targets, num_tokens.clamp(min=1))
        if loss is None:  # this rank does not have the last stage
            loss = torch.zeros((), device=self.device)
        all_reduce(loss, group=self.mesh.dp_cp_group)
        all_reduce(loss, group=self.mesh.pp_group)
        return loss

    def loss(self, logits, targets, num_tokens):
        """Return a microbatch's share of the loss: its token losses / tokens of the whole batch."""
        start = next(chunk for chunk in self.chunks if chunk.last).lm_head.start
        tokens = logits.flatten(0, 1), targets.t().flatten(), start, IGNORE_INDEX
        losses = vocab_parallel_cross_entropy(*tokens, self.mesh.tp_group, inplace=True)
        return losses.sum() / num_tokens

    def sum_shared_gradients(self):
        """Sum the gradients of a weight's copies: in tp, in DualPipe's replicas, in the head."""
        marked = set()
        for chunk in self.chunks:
            marked.update(parameters_to_sum_over_tp(chunk))
        groups = (self.dense, self.mesh.tp_group), (self.experts, self.mesh.expert_tp_group)
        for parameters, group in groups:
            parameters = [parameter for parameter in parameters if parameter in marked]
            sum_gradients_over_tp(parameters, group, check=self.steps_done == 0)
        if self.replicated:
            sum_replicas(self.chunks, self.mesh.pp_group)
        weights = [chunk.tied_weight() for chunk in self.chunks]
        tied = [weight.grad for weight in weights if weight is not None]
        if len(tied) == 2:  # embedding and head are on the same rank
            tied[0].copy_(tied[1].add_(tied[0]))
        elif tied:
            all_reduce(tied[0], group=self.mesh.embedding_group)

    def clip_gradients(self):
        """Scale the gradients to a joint norm of at most grad_clip; return the norm before."""
        norm = norm_of_gradients(self.own_chunks, self.shards, self.mesh, self.args.zero > 0)
        if self.args.grad_clip > 0:
            gradients = [parameter.grad for parameter in self.dense + self.experts]
            clip_grads_with_norm_(gradients, self.args.grad_clip, norm.nan_to_num())
        return norm

    def update(self, rate, tallies, is_finite):
        """Update weights and the routers' biases, unless is_finite, on the device, is false."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.found_inf = (~is_finite).float()  # if it is 1, a fused step changes nothing
        self.optimizer.step()
        if self.args.balance == "bias":
            for row, layer in self.mixtures.items():
                loads = tallies[row, : layer.num_experts]
                layer.router.update_bias(loads * is_finite)  # equal loads, such as 0, move no bias
        if self.args.zero:
            for stage in self.stages:
                stage.reshard()  # what was gathered is out of date, or was wrong

    def own_rows(self):
        """Return the slice of this rank's rows in the global batch."""
        rows = self.args.batch_size // self.args.dp
        begin = dist.get_rank(self.mesh.dp_group) * rows
        return slice(begin, begin + rows)

    def own_tokens(self, *batches):
        """Copy this rank's positions of batches of tokens (B, T) to the device, in one copy."""
        tokens = torch.stack(batches)[:, :, self.positions]
        if self.device.type == "cuda":
            tokens = tokens.pin_memory()  # so that the host need not wait for the copy
        return tokens.to(self.device, non_blocking=True)


def seed_dropout(seed, step, mesh):
    """Seed a step's masks: alike on the ranks of tp, which hold the same activations."""
    place = dist.get_rank(mesh.dp_cp_group), dist.get_rank(mesh.pp_group)
    sequence = np.random.SeedSequence([seed, step, *place])
    torch.manual_seed(int(sequence.generate_state(1)[0]))


def is_of_experts(name):
    """Return whether a parameter of this name differs between the ranks of ep."""
    return ".mlp.experts." in name


def norm_of_gradients(chunks, shards, mesh, is_zero):
    """Return the norm of all gradients of the model, in which each weight counts once. Collective.

    What all ranks of tp hold is counted by the first, and the tied weight where it is the
    embedding. chunks must leave out DualPipe's second replica.
    """
    experts = []
    dense = [torch.zeros(0, device=chunks[0].positions.device)]  # a stage may have nothing else
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            is_first_copy = name in shards or dist.get_rank(mesh.tp_group) == 0
            if is_of_experts(name):
                experts.append(parameter.grad)
            elif is_first_copy and name != "lm_head.weight":  # a copy of wte
                dense.append(parameter.grad)
    # sum over the ranks that hold other elements: first ZeRO's shards, then those of tp or ep
    groups = [mesh.shard_group, mesh.tp_group] if is_zero else [mesh.tp_group]
    norms = [get_total_norm(dense, groups=groups)]
    if experts:
        groups = [mesh.expert_shard_group, mesh.ep_group] if is_zero else [mesh.ep_group]
        norms.append(get_total_norm(experts, groups=groups))
    return get_total_norm(norms, groups=[mesh.pp_group])


@torch.no_grad()
def sum_tallies(mixtures, args, mesh, device):
    """Return, and reset, what the mixtures of experts counted in this step: one row each."""
    sizes = args.layers // args.moe_every, args.experts + 3
    tallies = torch.zeros(sizes, dtype=torch.float64, device=device)
    for row, layer in mixtures.items():
        tallies[row].copy_(layer.tally)
        layer.tally.zero_()
    if args.experts:
        for group in mesh.dp_cp_group, mesh.tp_group, mesh.pp_group:
            all_reduce(tallies, group=group)
    return tallies


def on_any_rank(flag):
    """Return whether the flag is true on any rank. The hosts ask each other over gloo."""
    flag = torch.tensor(flag, dtype=torch.uint8)
    all_reduce(flag, ReduceOp.MAX)
    return bool(flag)


def check_vocabulary(inputs, targets, size):
    """Raise TrainingError if a token of the batch is outside the vocabulary. Collective."""
    if on_any_rank(max(inputs.max(), targets.max()) >= size):
        raise TrainingError(f"--data: a token is outside --vocab-size {size}")


def learning_rate(step, steps, warmup, peak):
    """Linear warm-up over `warmup` steps, then a cosine down to peak / 10. step counts from 0."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def make_chunks(args, mesh, device, routes, positions, deferred):
    """Create this rank's stages of the routes, by chunk. deferred: their WeightGradStore."""
    rank = dist.get_rank(mesh.pp_group)
    method = CP_METHODS[args.cp_method]
    cp_fn = lambda q, k, v, dropout: method(q, k, v, mesh.cp_group)
    places = [(c, s) for route in routes for s, (r, c) in enumerate(route) if r == rank]
    chunks = []
    for _, stage in sorted(places):
        with torch.device("meta"):
            chunk = GPT(
                args, mesh.tp_group, stage, len(routes[0]), positions.to(device),
                random=ShardedRandomState(device, mesh.tp_group), defer=deferred,
                attention_fn=cp_fn if args.cp > 1 else attention, moe=partial(make_moe, args, mesh),
            )  # fmt: skip
        for module in chunk.modules():  # each once, although head and embedding may be one module
            module.to_empty(device=device, recurse=False)
        initialize(chunk, args.layers, args.seed)
        chunks.append(chunk)
    return chunks


def wrap(args, mesh, chunks, experts):
    """Wrap the chunks so that their gradients are summed over dp x cp, by DDP or by ZeRO.

    With bf16, the gradient that one microbatch gives a weight is rounded to bf16, as the product
    returns it. Gradients are then summed in fp32, over microbatches and over ranks.
    """
    # the loss is divided by the global number of tokens already
    options = {"gradient_divide_factor": 1, "wait_in_backward": False}
    if not args.zero:
        options |= {"process_group": mesh.dp_cp_group, "broadcast_buffers": False}
        options["groups"] = dict.fromkeys(experts, mesh.expert_dp_group)
        options["gradient_as_bucket_view"] = True  # nothing keeps gradients past their step
        return [DistributedDataParallel(chunk, **options) for chunk in chunks]
    if args.dtype == "bf16":
        options |= {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    options |= {"process_group": mesh.shard_group, "replicate_group": mesh.replicate_group}
    groups = mesh.expert_shard_group, mesh.expert_replicate_group
    options |= {"groups": dict.fromkeys(experts, groups), "under_way": deque()}
    stages = []
    for chunk in chunks:
        # What is split over tp stays apart from copies, which all of tp must cut alike; experts may
        # be copies. So does the tied weight: the stages of pp must cut their copies alike, and its
        # gradient, complete at the end of backward, takes memory only then.
        names = [name for name in shards_of(chunk) if args.tp > 1 or ".h." not in name]
        options["apart"] = {chunk.get_parameter(name) for name in names}.difference(experts)
        units = chunk.transformer["h"].values()
        stages.append(FullyShardedDataParallel(chunk, units=units, stage=args.zero, **options))
    return stages


def make_optimizer(args, parameters):
    """Create AdamW, which decays only matrices."""
    is_matrix = lambda parameter: len(part_of(parameter)[0]) > 1
    matrices = [parameter for parameter in parameters if is_matrix(parameter)]
    others = [parameter for parameter in parameters if not is_matrix(parameter)]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, args.lr, (0.9, 0.95), 1e-8, args.weight_decay, fused=True)


# ---- the loop ------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(trainer, data, batches=8):
    """Return the mean loss per token over the same `batches` batches of the validation part."""
    args = trainer.args
    sizes = args.batch_size, args.seq_len, args.seed
    total = 0.0
    for index in range(batches):
        batch = data.batch(index, *sizes, trainer.own_rows(), "validation")
        loss = trainer.run(trainer.evaluation, *batch).item()
        if not math.isfinite(loss):
            check_vocabulary(*batch, args.vocab_size)
        total += loss
    return total / batches


def train(args, device):
    """Train, from the last checkpoint if there is one, and validate. Collective.

    Raises TrainingError if files or steps fail, and on SIGTERM, after saving a checkpoint.
    """
    source = f"--data {args.data or '(default)'}: "
    data = on_all_ranks(load_data, args.data, args.seq_len, args.vocab_size, of=source)
    check_same_data(data, source)
    trainer = Trainer(args, make_mesh(args), device)
    if args.checkpoint:
        folder = Path(args.checkpoint)
        lock = on_all_ranks(claim, folder, of=f"--checkpoint {folder}: ")  # until train() returns
        resume(trainer, folder)
        signal.signal(signal.SIGTERM, lambda *_: setattr(trainer, "sigterm", True))
    log = Log(trainer)
    if trainer.steps_done >= args.steps:
        log.say(f"--steps {args.steps}: nothing to train, as step {trainer.steps_done} is saved")
        log.validation(evaluate(trainer, data))
    for index in range(trainer.steps_done, args.steps):
        began = time.perf_counter()
        batch = data.batch(index, args.batch_size, args.seq_len, args.seed, trainer.own_rows())
        metrics = trainer.step(*batch)
        log.step(metrics, time.perf_counter() - began)
        step = trainer.steps_done
        is_over = trainer.stop or step == args.steps
        is_due = lambda every: is_over or step % (every or math.inf) == 0
        if args.checkpoint and is_due(args.save_every):
            save(trainer, args.checkpoint)
        if trainer.stop:
            end = f"SIGTERM; --checkpoint {args.checkpoint} has step {step}"
            raise TrainingError(end, status=128 + signal.SIGTERM)
        if is_due(args.eval_every):
            log.validation(evaluate(trainer, data))


# ---- mesh ----------------------------------------------------------------------------------------


class Mesh(SimpleNamespace):
    """This process's groups, as slices_of() cuts them. Its rank in a group is its coordinate there.

    pp_group, dp_group, cp_group, tp_group   the ranks that differ in one coordinate
    dp_cp_group              the ranks whose gradients are summed
    shard_group              neighbours in dp_cp_group that share one copy of ZeRO's shards
    replicate_group          the ranks of dp_cp_group that hold the same shards
    ep_group                 the ranks of dp x cp x tp that hold different experts
    expert_dp_group          the ranks of dp x cp that hold the same experts
    expert_shard_group, expert_replicate_group   divide that as the two above divide dp_cp_group
    expert_tp_group          the ranks of tp that hold the same experts
    node_group, cross_group  the ranks of ep_group on one node; in the same place on all nodes
    embedding_group          the first and the last stage, which hold the tied embedding; the other
                             stages have no such group

    With pp 2, dp 2 and tp 2, the grid is [[0 1] [2 3]] in stage 0 and [[4 5] [6 7]] in stage 1:

        tp_group           0 1, 2 3, 4 5, 6 7    the same stage and replica
        dp_group           0 2, 1 3, 4 6, 5 7    the same stage and place in tp
        pp_group           0 4, 1 5, 2 6, 3 7    the same replica and place in tp

    Experts are split over as much of tp as divides ep, and then over dp x cp. In this grid:

        ep_group, ep 2     0 1, 2 3, 4 5, 6 7    expert_dp_group is dp_group
        ep_group, ep 4     0 1 2 3, 4 5 6 7      no two ranks hold the same experts
    """


# the groups over which gradients travel have names that end with one of these
OF_GRADIENTS = ("dp_cp_group", "expert_dp_group", "shard_group", "replicate_group")


def make_mesh(args, groups=None):
    """Create the groups of the whole grid and return this process's. Collective.

    Groups of the same ranks are one group, since on GPUs each has buffers for every peer that it
    sends to. Gradients have a group of their own, so that the messages of layers among the same
    ranks need not wait behind them. groups: those of earlier meshes, for reuse.
    """
    rank = dist.get_rank()
    groups = {} if groups is None else groups
    of_gradients = OF_GRADIENTS
    if not args.experts:  # then no layer sends anything over dp
        of_gradients += ("dp_group",)
    mine = {}
    degrees = args.pp, args.dp, args.cp, args.tp, args.ep, args.ep_nodes, args.replicate
    for name, slices in slices_of(*degrees).items():  # in the same order on all ranks
        for ranks in map(tuple, slices.tolist()):
            is_alone = len(ranks) == 1
            key = ranks, not is_alone and name.endswith(of_gradients)
            if key not in groups and (rank in ranks or not is_alone):
                groups[key] = make_group(ranks, timedelta(seconds=args.timeout))
            if rank in ranks:
                mine[name] = groups[key]
    for group in dict.fromkeys(mine.values()):
        nodes = [rank // args.per_node for rank in dist.get_process_group_ranks(group)]
        counts = set(Counter(nodes).values())
        set_ranks_per_node(counts.pop() if len(counts) == 1 else 1, group)
        if args.collectives == "backend":
            set_backend_collectives(group)
        if not is_bound_to_gpu():  # then NCCL requires all ranks of a group in its first batch
            barrier(group)
    return Mesh(**mine)


def is_bound_to_gpu():
    """Return whether join() gave this process a GPU of its own, and NCCL."""
    return dist.group.WORLD.bound_device_id is not None


def make_group(ranks, timeout):
    """Create a group. All ranks of the world must call this, for a group of one only its rank.

    On GPUs a group has NCCL only, and its kernels start before those of the computation. A group
    of one sends nothing, so it has gloo, which costs nothing until it is used.
    """
    if len(ranks) == 1:
        backend = "gloo" if is_bound_to_gpu() else None
        return dist.new_group(ranks, timeout, backend, use_local_synchronization=True)
    if not is_bound_to_gpu():
        return dist.new_group(ranks, timeout)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # new_group() warns if it differs
    return dist.new_group(ranks, timeout, "nccl", options)


def slices_of(pp, dp, cp, tp, ep=1, ep_nodes=1, replicate=1):
    """Cut the grid (pp, dp, cp, tp) into groups: {name: ranks (number of groups, size)}.

    ep_nodes: the number of nodes over which an ep_group is spread.
    replicate: the number of copies of ZeRO's shards in a dp_cp_group. Experts have gcd(replicate,
        number of their replicas) copies.
    """
    grid = torch.arange(pp * dp * cp * tp).view(pp, dp, cp, tp)
    replicas = grid.permute(0, 3, 1, 2).reshape(-1, dp * cp)
    ends = grid[[0, -1]] if pp > 1 else grid
    in_tp = math.gcd(ep, tp)
    # (pp, replicas of experts, ep in dp x cp, copies in tp, ep in tp)
    domain = grid.view(pp, -1, ep // in_tp, tp // in_tp, in_tp)
    spread = domain.permute(0, 1, 3, 2, 4).reshape(-1, ep)
    expert_replicas = domain.permute(0, 2, 3, 4, 1).flatten(0, 3)
    expert_copies = math.gcd(replicate, expert_replicas.shape[1])
    # cut each row into `count` runs of neighbours; collect the same place of all runs
    runs_of = lambda rows, count: rows.reshape(-1, rows.shape[1] // count)
    across_runs = lambda rows, count: rows.unflatten(1, (count, -1)).mT.flatten(0, 1)
    return {
        "pp_group": grid.permute(1, 2, 3, 0).reshape(-1, pp),
        "dp_group": grid.permute(0, 2, 3, 1).reshape(-1, dp),
        "cp_group": grid.permute(0, 1, 3, 2).reshape(-1, cp),
        "tp_group": grid.reshape(-1, tp),
        "dp_cp_group": replicas,
        "shard_group": runs_of(replicas, replicate),  # of 0 2 4 6: 0 2, 4 6
        "replicate_group": across_runs(replicas, replicate),  # of 0 2 4 6: 0 4, 2 6
        "ep_group": spread,
        "expert_dp_group": expert_replicas,
        "expert_shard_group": runs_of(expert_replicas, expert_copies),
        "expert_replicate_group": across_runs(expert_replicas, expert_copies),
        "expert_tp_group": domain.mT.flatten(0, 3),
        "embedding_group": ends.permute(1, 2, 3, 0).reshape(-1, len(ends)),
        "node_group": runs_of(spread, ep_nodes),
        "cross_group": across_runs(spread, ep_nodes),
    }


# ---- data ----------------------------------------------------------------------------------------


class Data(NamedTuple):
    """The tokens of a training part and a validation part, from which batches are cut."""

    train: np.ndarray
    validation: np.ndarray

    def batch(self, step, batch_size, seq_len, seed, rows=slice(None), part="train"):
        """Return inputs (rows, T), drawn by seed, step and batch_size, and their next tokens."""
        tokens = getattr(self, part)
        random = np.random.default_rng([seed, step])
        starts = random.integers(0, len(tokens) - seq_len, batch_size)[rows]
        windows = np.stack([tokens[start : start + seq_len + 1] for start in starts])
        windows = torch.from_numpy(windows).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def load_data(path, seq_len, vocab_size=256):
    """Read --data:

        a file or folder of UTF-8 text     a token is a byte
        None                               the sources of Python's standard library, as text
        a .bin file                        tokens as uint16, or uint32 for a larger vocabulary
        a folder of train.bin, val.bin     the same, as nanoGPT prepares them

    Tokens of a .bin stay on disk. Without a val.bin, the last tenth is for validation. Raises
    OSError or ValueError.
    """
    pattern = "[!.]*" if path else "*.py"
    path = Path(path or sysconfig.get_path("stdlib"))
    is_split = (path / "train.bin").is_file()
    is_text = path.suffix != ".bin" and not is_split
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    if is_text:
        dtype = np.uint8
    if is_split:
        parts = [np.memmap(path / name, dtype, "r") for name in ("train.bin", "val.bin")]
    else:
        tokens = text_of(path, pattern) if path.is_dir() else np.memmap(path, dtype, "r")
        parts = np.split(tokens, [len(tokens) - len(tokens) // 10])
    found = f"{len(parts[0])} tokens to train on and {len(parts[1])} for validation"
    need(min(map(len, parts)) > seq_len, f"{found} are too few for --seq-len {seq_len}")
    return Data(*parts)


def check_same_data(data, source):
    """Raise TrainingError if ranks have read different tokens. Collective.

    The default text is each node's own standard library, and a pipeline's first and last stage may
    be on different nodes. The checksum covers the first 2**25 tokens, which is all of most texts.
    """
    size = len(data.train) + len(data.validation)
    found = f"{size:,} tokens with checksum {zlib.crc32(data.train[: 2**25]):08x}"
    first, *others = gather_objects(found)
    for rank, other in enumerate(others, 1):
        if other != first:
            raise TrainingError(f"{source}rank {rank} has {other}, rank 0 has {first}", 2)


def text_of(folder, pattern):
    """Return the bytes of a folder's text files, joined by newlines."""
    texts = [file.read_bytes() for file in sorted(folder.glob(pattern)) if file.is_file()]
    joined = b"\n".join(text for text in texts if b"\0" not in text)
    return np.frombuffer(joined, np.uint8)


# ---- checkpoints ---------------------------------------------------------------------------------

MAY_CHANGE = "dropout", "sp", "recompute", "capacity_factor", "topk_nodes"  # when a run goes on
MOMENTS = "exp_avg", "exp_avg_sq"  # Adam's


def on_all_ranks(call, *arguments, of="", status=2):
    """Return call(*arguments). If it fails on one rank, raise TrainingError on all. Collective.

    of: the beginning of the error's line, such as "--data FILE: ".
    """
    result, fault = None, ""
    try:
        result = call(*arguments)
    except (OSError, ValueError, dcp.api.CheckpointException) as error:
        failures = getattr(error, "failures", {})  # {rank: (error, traceback)}
        causes = [f"rank {rank}: {cause}" for rank, (cause, _) in failures.items()]
        fault = (causes or [str(error)])[0]
    for rank, lines in enumerate(gather_objects(fault.strip().splitlines()[:1])):
        if lines:
            raise TrainingError(of + (f"rank {rank}: " if rank else "") + lines[0], status)
    return result


class Boxes(torch.Tensor):
    """A tensor of which this rank holds some boxes, in the form that torch's checkpoints expect.

    boxes: {offset of a box in the whole tensor: view}. The whole has memory for one number only.
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
                metadata.MetadataIndex(name, chunk.offsets), planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]  # fmt: skip

    def __get_tensor_shard__(self, index):
        return self.boxes[index.offset]


def boxes_of(trainer, value=lambda tensor: tensor, chunks=None):
    """Return {GPT-2's name: Boxes} of what this rank saves; the head is saved as the embedding.

    value: picks what to save of a parameter: itself, a tensor of its shape, or None for nothing.
    chunks: return the boxes of these chunks instead, with their head.
    """
    result = {}
    for chunk in chunks or trainer.own_chunks:
        for name, own in [*chunk.named_parameters(), *chunk.named_buffers()]:
            tensor = value(own)
            if tensor is not None and (chunks or name != "lm_head.weight"):
                boxes = views_in_whole(own, tensor, trainer.shards.get(name))
                result[name.replace("lm_head", "transformer.wte")] = Boxes(tensor.dtype, *boxes)
    return result


def state_of(trainer, chunks=None):
    """Return {"model" or a moment of Adam: its boxes_of()}. With ZeRO, weights are fp32 masters."""
    optimizer = trainer.optimizer.state
    state = {"model": boxes_of(trainer, chunks=chunks)}
    for kind in MOMENTS:
        moment = lambda weight: optimizer.get(weight, {}).get(kind)
        state[kind] = boxes_of(trainer, moment, chunks)
    return state


def save(trainer, folder):
    """Write a checkpoint and keep the last two. Collective.

    Raises TrainingError if it cannot be written.
    """
    path = Path(folder, f"step_{trainer.steps_done:08d}")
    source = f"--checkpoint {path}: "
    written = path.with_suffix(".partial")
    write = partial(dcp.save, checkpoint_id=written)
    on_all_ranks(write, state_of(trainer), of=source, status=1)
    own_files = [written / ".metadata", *written.glob(f"__{dist.get_rank()}_*")]
    own = on_all_ranks(digests_of, own_files, of=source, status=1)
    digests = {name: digest for theirs in gather_objects(own) for name, digest in theirs.items()}
    on_all_ranks(commit, trainer, path, digests, of=source, status=1)


def digests_of(paths):
    """Return {name: SHA-256} of files."""
    digests = {}
    for path in paths:
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def commit(trainer, path, digests):
    """On rank 0, rename what all ranks have written to a checkpoint, and delete old checkpoints."""
    if dist.get_rank() != 0:
        return
    written = path.with_suffix(".partial")
    run = flags_of(trainer.args) | {"sha256": digests}
    (written / "run.json").write_text(json.dumps(run, indent=4))
    os.sync()  # a checkpoint is on the disk before it gets its name
    written.rename(path)
    for old in checkpoints_of(path.parent)[:-2]:
        old.rename(old.with_suffix(".partial"))  # half a checkpoint must not look like one
    for old in path.parent.glob("step_*.partial"):  # also of saves that were killed
        shutil.rmtree(old, ignore_errors=True)


def checkpoints_of(folder):
    """Return the folder's checkpoints, oldest first."""
    return sorted(folder.glob("step_" + 8 * "[0-9]"))


def claim(folder):
    """Create the folder. On rank 0, also lock it until the file that is returned is closed."""
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


def resume(trainer, folder):
    """Load the folder's last checkpoint, if any, whatever layout it was saved in. Collective."""
    last = gather_objects(checkpoints_of(folder)[-1:])[0]  # what rank 0 sees decides
    if not last:
        return
    (path,) = last
    on_all_ranks(check_checkpoint, path, trainer.args)
    trainer.steps_done = int(path.name.removeprefix("step_"))
    if trainer.steps_done:  # before the first step there are no moments
        for weight in trainer.dense + trainer.experts:
            moments = {kind: torch.zeros_like(weight) for kind in MOMENTS}
            number = torch.full((), trainer.steps_done, dtype=torch.float32, device=weight.device)
            trainer.optimizer.state[weight] = {"step": number} | moments
    for chunk in trainer.chunks:  # one after the other, as two may have the embedding
        read = partial(dcp.load, checkpoint_id=path)
        on_all_ranks(read, state_of(trainer, [chunk]), of=f"--checkpoint {path}: ")
    if dist.get_rank() == 0:
        print(f"resumes from {path}", flush=True)


def check_checkpoint(path, args):
    """Raise ValueError if a checkpoint is of another model or has changed since it was saved.

    Each rank reads some of the files.
    """
    names = [flag.name for flag in fields(GPTConfig) if flag.name not in MAY_CHANGE]
    try:
        run = json.loads((path / "run.json").read_bytes())
        theirs = {name: run[name] for name in names}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / 'run.json'} has not the flags of a run: {error!r}") from None
    for name in names:
        own = as_typed(name, getattr(args, name))
        saved = as_typed(name, theirs[name])
        need(own == saved, f"{own}, but {path} has {saved}")
    digests = run.get("sha256", {})
    own_files = sorted(digests)[dist.get_rank() :: args.world_size]
    for name, digest in digests_of(path / name for name in own_files).items():
        need(digest == digests[name], f"{path / name} has changed since it was saved")


# ---- log -----------------------------------------------------------------------------------------


class Log:
    """Progress on rank 0's standard output, and the --metrics file. All ranks must create one.

    The metrics are lines of JSON: the flags, then the steps. A run that resumes appends to the
    file, where a later line of a step replaces an earlier one.
    """

    def __init__(self, trainer):
        args, self.trainer = trainer.args, trainer
        self.speaks = dist.get_rank() == 0
        self.first_step = trainer.steps_done + 1
        path = args.metrics if self.speaks and args.metrics else os.devnull
        mode = "a" if trainer.steps_done else "w"
        self.file = on_all_ranks(open, path, mode, of=f"--metrics {args.metrics}: ")
        self.write({"flags": flags_of(args)})
        own = boxes_of(trainer, lambda tensor: tensor if tensor.requires_grad else None)
        shapes = [(name, whole.numel()) for name, whole in own.items()]
        parameters = sum(dict(sum(gather_objects(shapes), [])).values())
        degrees = " x ".join(f"{axis} {getattr(args, axis)}" for axis in ("pp", "dp", "cp", "tp"))
        devices = f"{args.world_size} x {trainer.device.type}"
        self.say(f"{parameters:,} parameters on {devices}: {degrees}")

    def step(self, metrics, seconds):
        """Write the metrics of a step that took so many seconds."""
        step, args = self.trainer.steps_done, self.trainer.args
        speed = args.batch_size * args.seq_len / seconds
        tflops = speed * flops_per_token(args) / args.world_size / 1e12  # of one device
        metrics = {"loss": 0, "tokens_per_s": speed, "tflops": tflops} | metrics
        if self.trainer.device.type == "cuda":
            metrics["memory_mb"] = torch.cuda.max_memory_allocated(self.trainer.device) / 2**20
        self.write({"step": step} | metrics)
        every = args.print_every or max(1, round(args.steps / 40))
        if step in (self.first_step, args.steps) or self.trainer.stop or step % every == 0:
            line = f"step {step} of {args.steps}"
            for name, number in metrics.items():
                line += f"  {name} {number:,.0f}" if number >= 100 else f"  {name} {number:.4g}"
            self.say(line)

    def validation(self, loss):
        """Write the loss of a validation after the trainer's last step."""
        step = self.trainer.steps_done
        self.write({"step": step, "validation_loss": loss})
        self.say(f"validation loss {loss:.4f} after step {step}")

    def say(self, line):
        """Print a line, on rank 0 only."""
        if self.speaks:
            print(line, flush=True)

    def write(self, value):
        """Write a line of JSON. If that fails, say so, and write no more."""
        try:
            print(json.dumps(value), file=self.file, flush=True)
        except OSError as error:
            self.say(f"warning: --metrics ends here: {error}")
            self.file = open(os.devnull, "w")


# ---- flags ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Args(GPTConfig):
    """All flags, completed and checked: the GPTConfig and everything else about a run.

    per_node: the number of processes on each node.
    ep_nodes: the number of nodes over which an ep_group is spread.
    """

    world_size: int
    per_node: int
    ep_nodes: int

    # the degrees of each axis, and how the work is cut
    dp: int | None = flag(None, "replicas (default: as many as there are processes for)")
    tp: int = flag(1, "ranks that split every matrix")
    cp: int = flag(1, "ranks that split the sequence, also in attention")
    pp: int = flag(1, "stages of the pipeline")
    zero: int | None = flag(None, "stage of ZeRO (default: 1; one replica: 0)", choices=range(4))
    replicate: int | None = flag(None, "copies of ZeRO's shards (HSDP, default: 1)")
    cp_method: str = flag("ring", "attention across cp", choices=CP_METHODS)
    schedule: str = flag("1f1b", "order of microbatches in the pipeline", choices=SCHEDULES)
    chunks: int = flag(2, "parts of a rank's layers with --schedule interleaved")
    microbatches: int | None = flag(None, "per step (default: 1; with pp up to 4 x pp)")
    ep: int = flag(1, "ranks of dp x cp x tp over which the experts are spread")
    collectives: str = flag("ours", "or those of the backend", choices=("ours", "backend"))

    # what an optimizer step does
    batch_size: int | None = flag(None, "sequences per step, of all replicas (default: 16 or more)")
    steps: int = flag(1200, "optimizer steps")
    lr: float = flag(3e-3, "peak learning rate")
    warmup: int = flag(20, "steps of linear warm-up", least=0)
    weight_decay: float = flag(0.1, "weight decay of matrices")
    grad_clip: float = flag(1.0, "largest norm of the gradient (0: do not clip)")
    seed: int = flag(0, "of weights, batches and dropout", least=0, below=2**32)
    dtype: str = flag("fp32", "bf16 keeps an fp32 copy for AdamW", choices=("fp32", "tf32", "bf16"))

    # where a run happens, what it reads and what it writes
    device: str = flag("auto", "auto: a GPU per process, or the CPU; shared: processes share GPUs",
                       choices=("auto", "cpu", "cuda", "shared"))  # fmt: skip
    data: str | None = flag(None, "text, tokens (.bin), or a folder (default: Python's sources)")
    checkpoint: str | None = flag(None, "folder to save checkpoints in, and to resume from")
    save_every: int | None = flag(None, "steps per save (default: at the end)")
    eval_every: int | None = flag(None, "steps per validation (default: at the end)")
    print_every: int | None = flag(None, "steps per line (default: some 40 lines)")
    metrics: str | None = flag(None, "write the flags and each step to this file, as JSON")
    timeout: int = flag(600, "seconds that a rank waits for another", below=10**6)


FLAGS = [flag for flag in fields(Args) if "help" in flag.metadata]


class Parser(argparse.ArgumentParser):
    """The parser of the command line. It raises ValueError, and returns only the flags given."""

    def __init__(self):
        super().__init__("hybrid.py", allow_abbrev=False, description=__doc__.splitlines()[0])
        for flag in FLAGS:
            self.add_argument(as_typed(flag.name), default=argparse.SUPPRESS, **options_of(flag))

    def error(self, message):
        raise ValueError(message.removeprefix("argument "))


def options_of(flag):
    """Return the options of add_argument() for a flag."""
    details = flag.metadata
    help = details["help"]
    if flag.default not in (None, False):
        help += f" (default: {flag.default})"
    kind, *_ = get_args(flag.type) or [flag.type]  # the int of `int | None`
    if kind is bool:
        return {"help": help, "action": "store_true"}
    if kind is not str and "choices" not in details:
        least = details.get("least", 1 if kind is int else 0)
        kind = at_least(least, kind, details.get("below", math.inf))
    return {"help": help, "type": kind, "choices": details.get("choices")}


def at_least(least, kind=int, below=math.inf):
    """Return a type for argparse that accepts numbers in [least, below)."""

    def number(text):
        if not least <= (value := kind(text)) < below:
            raise argparse.ArgumentTypeError(f"{text} is not in [{least}, {below})")
        return value

    return number


def as_typed(name, value=True):
    """Return a flag as it is written on the command line."""
    dashed = "--" + name.replace("_", "-")
    return dashed if value is True else f"{dashed} {value}"


def flags_of(args):
    """Return {name: value} of all flags, without the other fields of Args."""
    return {flag.name: getattr(args, flag.name) for flag in FLAGS}


def parse(argv, world_size, per_node=None):
    """Return the Args of world_size processes, per_node (by default all) on each node.

    Raises ValueError, one line that names flags and values, if they do not fit together.
    """
    args = argparse.Namespace(**{flag.name: flag.default for flag in FLAGS})
    Parser().parse_args(argv, args)
    args.world_size = world_size
    args.per_node = per_node or world_size
    args.dp = args.dp or max(1, world_size // (args.pp * args.cp * args.tp))
    replicas = args.dp * args.cp
    if args.zero is None:
        args.zero = int(replicas > 1)
    if args.dtype == "bf16" and not args.zero:  # ZeRO keeps fp32 masters, in shards of one rank
        args.zero = 1
        args.replicate = args.replicate or replicas
    args.replicate = args.replicate or 1
    args.kv_heads = args.kv_heads or args.heads
    args.ffn = args.ffn or 4 * args.hidden
    # a node holds this many ranks of an ep_group: its part of tp, for each tp_group that fits
    inside = math.gcd(args.ep, args.tp) * max(1, args.per_node // args.tp)
    args.ep_nodes = args.ep // math.gcd(args.ep, inside)
    args.topk_nodes = args.topk_nodes or args.ep_nodes
    # with 4 microbatches per stage the bubble is about a fifth of 1F1B's time
    fewest, most = (2 * args.pp, 4 * args.pp) if args.pp > 1 else (1, 1)
    rows = args.dp * (args.microbatches or fewest)
    args.batch_size = args.batch_size or math.ceil(16 / rows) * rows
    args.microbatches = args.microbatches or math.gcd(args.batch_size // args.dp, most)
    check(args)
    schedule_of(args)
    return Args(**vars(args))


def need(condition, sentence):
    """Raise ValueError with this sentence unless the condition holds."""
    if not condition:
        raise ValueError(sentence)


def typed(args, product):
    """Return a product of flags, such as "dp * cp", with their values: "--dp 4 * --cp 2"."""
    return " * ".join(as_typed(name, getattr(args, name)) for name in product.split(" * "))


def divides(args, divisor, number):
    """Raise ValueError unless one product of flags divides another."""
    value = lambda product: math.prod(getattr(args, name) for name in product.split(" * "))
    sentence = f"{typed(args, number)} is not divisible by {typed(args, divisor)}"
    need(value(number) % value(divisor) == 0, sentence)


def check(args):
    """Raise ValueError, one line with names and values, if completed flags do not fit together."""
    shown = partial(typed, args)
    is_whole = args.pp * args.dp * args.cp * args.tp == args.world_size
    need(is_whole, f"{shown('pp * dp * cp * tp')} is not {args.world_size} processes")
    need(args.replicate == 1 or args.zero, f"{shown('replicate')} needs --zero")
    divides(args, "replicate", "dp * cp")
    need(args.checkpoint or not args.save_every, f"{shown('save_every')} needs --checkpoint")
    divides(args, "heads", "hidden")
    divides(args, "kv_heads", "heads")
    divides(args, "tp", "kv_heads")
    need(args.tp <= args.vocab_size, f"{shown('tp')} is more than {shown('vocab_size')}")
    divides(args, "dp * microbatches", "batch_size")
    if not args.experts or args.moe_every > 1:  # some layers have an MLP, which tp splits
        divides(args, "tp", "ffn")
    divides(args, "ep", "dp * cp * tp")
    need(args.ep == 1 or args.experts, f"{shown('ep')} needs --experts")
    if args.experts:
        divides(args, "ep", "experts")
        need(args.top_k <= args.experts, f"{shown('top_k')} is more than {shown('experts')}")
        need(args.moe_every <= args.layers, f"{shown('moe_every')} is more than {shown('layers')}")
        nodes = args.ep_nodes
        need(args.topk_nodes <= nodes, f"{shown('topk_nodes')} is more than {nodes} nodes")
        reach = args.experts // nodes * args.topk_nodes
        need(args.top_k <= reach, f"{shown('topk_nodes')} reaches only {reach} of {shown('top_k')}")
    if args.cp > 1:
        divisible = args.seq_len % (2 * args.cp) == 0
        need(divisible, f"{shown('seq_len')} is not divisible by 2 * {shown('cp')}")
        need(args.dropout == 0, f"{shown('dropout')} does not work with {shown('cp')}")
    if args.sp or args.experts:
        divides(args, "cp * tp", "seq_len")
    if args.cp_method == "ulysses":
        divides(args, "tp * cp", "heads")
        if args.cp % (args.kv_heads // args.tp):  # else ranks get copies of a head
            divides(args, "tp * cp", "kv_heads")


def schedule_of(args):
    """Return the pipeline's schedule; raise ValueError if it is not defined for these flags."""
    chunks = [args.chunks] if args.schedule == "interleaved" else []
    schedule = SCHEDULES[args.schedule](args.pp, args.microbatches, *chunks)
    stages = len(schedule.routes[0])
    # the first stage may hold just the embedding, and the last one just the head
    need(args.layers + 2 >= stages, f"--layers {args.layers} is too few for {stages} stages")
    return schedule


# ---- one process ---------------------------------------------------------------------------------


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


def join(device, backend, timeout):
    """Connect to the processes that torchrun started; without torchrun, form a world of one."""
    store, rank, world_size = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        patience = timedelta(seconds=timeout)
        store, rank, world_size = next(dist.rendezvous("env://", timeout=patience))
    # after a restart, torchrun's store still has the keys of the previous attempt
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    options = {"timeout": timedelta(seconds=timeout)}
    if backend == "gloo":
        schedule_as_batch()
    else:  # the groups of the mesh train by NCCL; objects, flags and barriers go over gloo
        backend = "cpu:gloo,cuda:nccl"
        options["device_id"] = device  # NCCL connects now, and reports errors early
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)


def main(argv=None, work=train):
    """Run work(args, device) on this rank, which torchrun numbers, or in a world of one.

    Returns the exit status: 2 for wrong flags, that of a TrainingError, or what work() returns.
    """
    number = lambda name, default: int(os.environ.get(name, default))
    rank = number("RANK", 0)
    world_size = number("WORLD_SIZE", 1)
    per_node = number("LOCAL_WORLD_SIZE", world_size)

    def say(sentence):  # in a single write, so that the output of processes does not mix
        if rank == 0:
            print(f"{Path(sys.argv[0]).name}: {sentence}\n", end="", file=sys.stderr, flush=True)

    try:
        args = parse(sys.argv[1:] if argv is None else argv, world_size, per_node)
        device, backend = choose_device(args, number("LOCAL_RANK", 0), per_node)
    except ValueError as error:
        say(f"error: {error}")
        if "RANK" in os.environ:  # the first exit makes the launcher kill all: wait for rank 0
            join(None, "gloo", 30)
            barrier()
        return 2
    join(device, backend, args.timeout)
    torch.set_float32_matmul_precision("high" if args.dtype == "tf32" else "highest")
    try:
        status = work(args, device) or 0
    except TrainingError as error:
        say(f"error: {error}")
        status = error.status
    barrier()  # so that no rank closes connections that another still uses
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # this process gets SIGTERM if torchrun dies
    sys.exit(main())
