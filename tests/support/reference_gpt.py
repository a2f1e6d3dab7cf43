"""The oracle: GPT-2, Llama and a training step in plain torch.nn, on one process."""

import hashlib
import math
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def attention(q, k, v):
    """Causal attention from the full scores: q (B, H, T, K), k, v (B, KV, T, K) -> (B, H, T, K)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    T = q.shape[2]
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, hidden, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_width = heads, hidden // heads * kv_heads
        self.c_attn = nn.Linear(hidden, hidden + 2 * self.kv_width)
        self.c_proj = nn.Linear(hidden, hidden)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (
            part.view(B, T, -1, D // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split([D, self.kv_width, self.kv_width], dim=2)
        )
        return self.c_proj(attention(q, k, v).transpose(1, 2).reshape(B, T, D))


class MLP(nn.Module):
    def __init__(self, hidden, ffn=None):
        super().__init__()
        self.c_fc = nn.Linear(hidden, ffn or 4 * hidden)
        self.c_proj = nn.Linear(ffn or 4 * hidden, hidden)

    def forward(self, x):
        return self.c_proj(nn.GELU(approximate="tanh")(self.c_fc(x)))


class MoE(nn.Module):
    """A layer in which every expert processes every token, with weight 0 unless it is chosen.

    forward() sets .loss of the router, its parts .balance and .z, .counts, and .dropped, which is
    the number of choices beyond the capacity. score: "softmax" or "sigmoid". factor: the capacity
    factor, over the tokens of this call. losses: the coefficients of .balance and .z. groups: the
    number of groups of experts, and how many of them a token uses. gated: SwiGLU as in Mixtral, and
    not GELU.
    """

    def __init__(
        self, hidden, E, k, score, shared=0, factor=None, losses=(0, 0), groups=(1, 1), ffn=None,
        gated=False,
    ):  # fmt: skip
        super().__init__()
        ffn = ffn or 4 * hidden
        self.activation = SwiGLU() if gated else nn.GELU(approximate="tanh")
        ffn_in = 2 * ffn if gated else ffn  # rows of the gate, then those of `up`
        self.top_k, self.score, self.factor, self.coefficients = k, score, factor, losses
        self.router = nn.Linear(hidden, E, bias=False)
        self.experts = nn.Module()
        self.experts.w_in = nn.Parameter(torch.empty(E, ffn_in, hidden))
        self.experts.w_out = nn.Parameter(torch.empty(E, hidden, ffn))
        if shared:
            up = nn.Linear(hidden, ffn_in * shared, bias=False)
            down = nn.Linear(ffn * shared, hidden, bias=False)
            self.shared = nn.Sequential(up, self.activation, down)
        self.register_buffer("bias", torch.zeros(E), persistent=False)
        self.groups, self.counts, self.loss = groups, torch.zeros(E), 0

    def forward(self, x):
        shape, x = x.shape, x.flatten(0, -2)  # (N, D)
        logits, E = self.router(x), len(self.bias)
        scores = logits.softmax(1) if self.score == "softmax" else logits.sigmoid()
        chosen = self.choose((scores + self.bias).detach())  # (N, E)
        kept, self.counts = chosen, chosen.sum(0)
        if self.factor:
            capacity = math.ceil(len(x) * self.top_k / E * self.factor)
            kept = chosen * (chosen.cumsum(0) <= capacity)
        self.dropped = int((chosen - kept).sum())
        weights = scores / (chosen * scores).sum(1, keepdim=True) if self.top_k > 1 else scores
        hidden = self.activation(torch.einsum("nd,efd->enf", x, self.experts.w_in))
        y = torch.einsum("ne,enf,edf->nd", kept * weights, hidden, self.experts.w_out)
        self.balance = E * (self.counts / self.counts.sum() * scores.mean(0)).sum()
        self.z = logits.logsumexp(1).square().mean()
        self.loss = self.coefficients[0] * self.balance + self.coefficients[1] * self.z
        return (y + self.shared(x) if hasattr(self, "shared") else y).view(shape)

    def choose(self, scores):
        """Return 1 where a token (row) uses an expert (column), and 0 elsewhere.

        A group's score is the sum of its two best experts; the best groups offer their experts.
        """
        in_groups = scores.unflatten(1, (self.groups[0], -1))
        of_two = in_groups.sort(2, descending=True).values[:, :, :2].sum(2)
        near = largest(of_two, self.groups[1]).repeat_interleave(in_groups.shape[2], 1)
        return largest(scores.masked_fill(near == 0, -math.inf), self.top_k)


def largest(rows, k):
    """Return 1 at the k largest elements of each row, 0 elsewhere; the first of equals wins."""
    places = rows.sort(stable=True, dim=1, descending=True).indices[:, :k]
    return torch.zeros_like(rows).scatter(1, places, 1.0)


class Layer(nn.Module):
    def __init__(self, hidden, heads, kv_heads=None, mlp=None):
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden)
        self.attn = Attention(hidden, heads, kv_heads or heads)
        self.ln_2 = nn.LayerNorm(hidden)
        self.mlp = mlp or MLP(hidden)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class ReferenceGPT(nn.Module):
    def __init__(
        self, layers, hidden, heads, seq_len, vocab_size, kv_heads=None, mlp=None, tied=True
    ):
        """mlp: a function that returns the MLP of the given layer's number."""
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(vocab_size, hidden)
        self.transformer.wpe = nn.Embedding(seq_len, hidden)
        self.transformer.h = nn.ModuleList(
            Layer(hidden, heads, kv_heads, mlp and mlp(i)) for i in range(layers)
        )
        self.transformer.ln_f = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab_size, bias=False)
        if tied:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens):
        x = self.transformer.wte(tokens) + self.transformer.wpe.weight[: tokens.shape[1]]
        for layer in self.transformer.h:
            x = layer(x)
        return self.lm_head(self.transformer.ln_f(x))


# ---- Llama ---------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight


def rotated(x, theta):
    """Rotate each pair of x (B, H, T, K), elements i and i + K/2, by the angle t theta^(-2i/K).

    Pairs are complex numbers, and a product with e^(i angle) rotates them. These are Hugging Face's
    pairs. Meta's files have the elements of a pair next to each other.
    """
    T, half = x.shape[2], x.shape[3] // 2
    speeds = theta ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = torch.outer(torch.arange(T, dtype=x.dtype, device=x.device), speeds)  # (T, K/2)
    pairs = torch.complex(x[..., :half], x[..., half:])
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], -1)


class RotaryAttention(nn.Module):
    def __init__(self, hidden, heads, kv_heads, theta):
        super().__init__()
        self.heads, self.kv_heads, self.theta = heads, kv_heads, theta
        width = hidden // heads
        self.c_attn = nn.Linear(hidden, (heads + 2 * kv_heads) * width, bias=False)
        self.c_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x):
        heads = self.c_attn(x).unflatten(2, (self.heads + 2 * self.kv_heads, -1)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)  # (B, heads, T, K)
        y = attention(rotated(q, self.theta), rotated(k, self.theta), v)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def forward(self, x):
        """Return silu(gate) * up of x (..., 2F): gate is its first half, and up the second."""
        gate, up = x.unflatten(-1, (2, -1)).unbind(-2)
        return gate * gate.sigmoid() * up


class GatedMLP(nn.Module):
    def __init__(self, hidden, ffn):
        super().__init__()
        self.c_fc = nn.Linear(hidden, 2 * ffn, bias=False)
        self.c_proj = nn.Linear(ffn, hidden, bias=False)
        self.activation = SwiGLU()

    def forward(self, x):
        return self.c_proj(self.activation(self.c_fc(x)))


class LlamaLayer(nn.Module):
    def __init__(self, attn, mlp, hidden):
        super().__init__()
        self.ln_1 = RMSNorm(hidden)
        self.attn = attn
        self.ln_2 = RMSNorm(hidden)
        self.mlp = mlp

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class ReferenceLlama(nn.Module):
    def __init__(self, layers, hidden, heads, vocab_size, kv_heads, mlp, theta, tied):
        """mlp: a function that returns the MLP of the given layer's number."""
        super().__init__()
        attn = lambda: RotaryAttention(hidden, heads, kv_heads, theta)
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(vocab_size, hidden)
        self.transformer.h = nn.ModuleList(
            LlamaLayer(attn(), mlp(i), hidden) for i in range(layers)
        )
        self.transformer.ln_f = RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab_size, bias=False)
        if tied:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens):
        x = self.transformer.wte(tokens)
        for layer in self.transformer.h:
            x = layer(x)
        return self.lm_head(self.transformer.ln_f(x))


# ---- a model, its initial values, and its training -----------------------------------------------


def reference_gpt(args):
    """Return the model that the flags of hybrid.py describe: args.layers, args.hidden and so on."""
    is_llama = args.block == "llama"
    score = "sigmoid" if args.balance == "bias" else "softmax"
    losses = (0.01, 0.001) if args.balance == "aux" else (0, 0)

    def mlp(layer):
        if args.experts == 0 or (layer + 1) % args.moe_every > 0:
            return (GatedMLP if is_llama else MLP)(args.hidden, args.ffn)
        sizes = args.hidden, args.experts, args.top_k, score, args.shared_experts
        return MoE(*sizes, losses=losses, ffn=args.ffn, gated=is_llama)

    if is_llama:
        sizes = args.hidden, args.heads, args.vocab_size, args.kv_heads
        return ReferenceLlama(args.layers, *sizes, mlp, args.rope_theta, args.is_tied)
    sizes = args.hidden, args.heads, args.seq_len, args.vocab_size, args.kv_heads
    return ReferenceGPT(args.layers, *sizes, mlp, args.is_tied)


def initial_values(model, seed):
    """Return {name: initial value} of a reference model's parameters, as in GPT-2.

    A norm's weight is 1 and a bias is 0. Matrices are drawn from N(0, 0.02^2), and the two of each
    layer whose products are added to the residual stream from N(0, 0.02^2 / (2 layers)). What a
    parameter is follows from the module that has it, and not from its name.
    """
    layers = len(model.transformer.h)
    norms, into_residual, by_column = set(), set(), set()
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, RMSNorm)):
            norms.add(module.weight)
        elif isinstance(module, (Attention, MLP, RotaryAttention, GatedMLP)):
            by_column.add(module.c_proj.weight)
        elif isinstance(module, MoE):
            into_residual.add(module.experts.w_out)
            if hasattr(module, "shared"):
                into_residual.add(module.shared[2].weight)
    values = {}
    for name, parameter in model.named_parameters():
        shape = parameter.shape
        if parameter in by_column:
            values[name] = normal(name, shape[::-1], seed).T * (0.02 / (2 * layers) ** 0.5)
        elif parameter in into_residual:
            values[name] = normal(name, shape, seed) * (0.02 / (2 * layers) ** 0.5)
        elif parameter.ndim > 1:
            values[name] = normal(name, shape, seed) * 0.02
        else:
            values[name] = torch.full(shape, float(parameter in norms))
    return values


@lru_cache(maxsize=None)
def normal(name, shape, seed):
    """Return standard normal numbers in fp32. Row i is stream i of the generator for this name.

    The generator is Philox with the first 16 bytes of a SHA-256 as its key. A stream begins where
    the highest word of the counter is its number.
    """
    key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:16], "big")
    value = np.empty((math.prod(shape[:-1]), shape[-1]), np.float32)
    for i, row in enumerate(value):
        generator = np.random.Generator(np.random.Philox(key=key, counter=i << 192))
        generator.standard_normal(out=row, dtype=np.float32)
    return torch.from_numpy(value).view(shape)


def learning_rate(step, args):
    """Return the rate of a step: a linear warm-up, a plateau, and a decay to args.min_lr."""
    if step < args.warmup:
        return args.lr * (step + 1) / (args.warmup + 1)
    done = max(0, step - (args.steps - args.decay_steps)) / max(1, args.decay_steps)
    left = {"none": 1.0, "linear": 1 - done, "cosine": math.cos(math.pi / 2 * done) ** 2}
    return args.min_lr + (args.lr - args.min_lr) * left[args.lr_decay]


class ReferenceTraining:
    """AdamW with clipping, on whole batches. step() returns loss and norm.

    .gradients: before clipping. rates: the learning rates of the steps; only step() needs them.
    rounded_moments: whether AdamW's moments are rounded to bf16 after each step.
    """

    def __init__(self, model, rates, weight_decay, grad_clip, rounded_moments=False):
        self.model, self.rates, self.grad_clip = model, iter(rates), grad_clip
        self.rounded_moments = rounded_moments
        self.mixtures = [module for module in model.modules() if isinstance(module, MoE)]
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))

    def step(self, inputs, targets, bias_rate=0.0):
        found = self.backward(inputs, targets)
        self.update(next(self.rates), bias_rate)
        return found

    def backward(self, inputs, targets, microbatches=(slice(None),)):
        """Leave clipped gradients in .grad; return the loss, and the norm before clipping.

        microbatches: the rows of each one. A router's loss is the mean over the microbatches, and
        its counts are the sum.
        """
        self.optimizer.zero_grad()
        loss, count, counts = 0.0, (targets != -100).sum(), [0] * len(self.mixtures)
        for rows in microbatches:
            logits = self.model(inputs[rows]).flatten(0, 1)
            own = F.cross_entropy(
                logits, targets[rows].flatten(), ignore_index=-100, reduction="sum"
            )
            of_routers = sum(module.loss for module in self.mixtures) / len(microbatches)
            (own / count + of_routers).backward()
            loss += own.item() / count.item()
            counts = [before + module.counts for before, module in zip(counts, self.mixtures)]
        for module, of_all in zip(self.mixtures, counts):
            module.counts = of_all
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip or float("inf"))
        return loss, norm.item()

    def update(self, rate, bias_rate=0.0):
        """Update the weights by .grad, and raise the biases of experts with less than mean load."""
        for module in self.mixtures:
            module.bias += bias_rate * (module.counts.mean() - module.counts).sign()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        if self.rounded_moments:
            for state in self.optimizer.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name].copy_(state[name].bfloat16())
