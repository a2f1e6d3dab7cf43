"""Oracle: GPT-2's architecture and a training step, plain torch.nn, one process, no parallelism."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def attention(q, k, v, causal=True, documents=None):
    """Softmax of all scores at once: q (B, H, T, K), k and v (B, KV, T, K) -> (B, H, T, K).

    documents: lengths of those that are packed into the sequence; attention stays in each.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    T = q.shape[2]
    number = torch.arange(len(documents or [T])).repeat_interleave(torch.tensor(documents or [T]))
    hidden = number[:, None] != number[None, :]
    if causal:
        hidden |= torch.ones(T, T, dtype=torch.bool).triu(1)
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


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
    """A loop over tokens and their experts. After forward: .loss of the router and its parts,
    .balance and .z; .counts; .dropped, how many choices found no place.

    score: "softmax" or "sigmoid"; factor: of the capacity, over the tokens of this call; losses:
    coefficients of balance and of the logits' size; groups: of experts, and how many a token uses.
    """

    def __init__(
        self,
        hidden,
        experts,
        top_k,
        score,
        shared=0,
        factor=None,
        losses=(0, 0),
        groups=(1, 1),
        ffn=None,
    ):
        super().__init__()
        ffn = ffn or 4 * hidden
        self.top_k, self.score, self.factor, self.coefficients = top_k, score, factor, losses
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.Module()
        self.experts.w_in = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.experts.w_out = nn.Parameter(torch.empty(experts, hidden, ffn))
        if shared:
            up = nn.Linear(hidden, ffn * shared, bias=False)
            down = nn.Linear(ffn * shared, hidden, bias=False)
            self.shared = nn.Sequential(up, nn.GELU(approximate="tanh"), down)
        self.bias, self.counts, self.loss = torch.zeros(experts), torch.zeros(experts), 0
        self.groups, self.group_size = groups, experts // groups[0]

    def forward(self, x):
        shape, x = x.shape, x.flatten(0, -2)
        logits, E = self.router(x), len(self.bias)
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        output, counts, self.dropped = [], torch.zeros(E, dtype=x.dtype), 0
        for token, row in zip(x, scores):
            biased = [(-(row[e] + self.bias[e]).item(), e) for e in range(E)]
            parts = [biased[i : i + self.group_size] for i in range(0, E, self.group_size)]
            parts.sort(key=lambda part: sum(score for score, _ in sorted(part)[:2]))
            near = sum(parts[: self.groups[1]], [])
            chosen = [e for _, e in sorted(near)[: self.top_k]]  # of equal ones the first
            total = sum(row[e] for e in chosen) if self.top_k > 1 else 1
            y = torch.zeros_like(token)
            for e in chosen:
                counts[e] += 1
                if self.factor and counts[e] > math.ceil(
                    len(x) * self.top_k / E * self.factor
                ):
                    self.dropped += 1
                    continue
                hidden = nn.GELU(approximate="tanh")(self.experts.w_in[e] @ token)
                y = y + row[e] / total * (self.experts.w_out[e] @ hidden)
            output.append(y)
        fractions = counts / counts.sum()
        self.balance = E * (fractions * scores.mean(0)).sum()
        self.z = logits.logsumexp(-1).square().mean()
        self.loss = self.coefficients[0] * self.balance + self.coefficients[1] * self.z
        self.counts = counts
        y = torch.stack(output)
        return (y + self.shared(x) if hasattr(self, "shared") else y).view(shape)


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
    def __init__(self, layers, hidden, heads, seq_len, vocab_size, kv_heads=None, mlp=None):
        """mlp(layer): what that layer has for an MLP, if not None."""
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(vocab_size, hidden)
        self.transformer.wpe = nn.Embedding(seq_len, hidden)
        self.transformer.h = nn.ModuleList(
            Layer(hidden, heads, kv_heads, mlp and mlp(i)) for i in range(layers)
        )
        self.transformer.ln_f = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens):
        x = self.transformer.wte(tokens) + self.transformer.wpe(torch.arange(tokens.shape[1]))
        for layer in self.transformer.h:
            x = layer(x)
        return self.lm_head(self.transformer.ln_f(x))


class ReferenceTraining:
    """Clipped AdamW, on whole batches. step() returns loss and norm; .gradients are unclipped."""

    def __init__(self, model, rates, weight_decay, grad_clip):
        self.model, self.rates, self.grad_clip = model, iter(rates), grad_clip
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))

    def step(self, inputs, targets):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(
            self.model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100
        )
        mixtures = [module for module in self.model.modules() if isinstance(module, MoE)]
        (loss + sum(module.loss for module in mixtures)).backward()
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip or float("inf"))
        rate = next(self.rates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return loss.item(), norm.item()
