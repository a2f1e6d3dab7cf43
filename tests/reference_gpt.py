"""Oracle: GPT-2's architecture and a training step, plain torch.nn, one process, no parallelism."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, hidden, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.kv_width = heads, kv_heads, hidden // heads * kv_heads
        self.c_attn = nn.Linear(hidden, hidden + 2 * self.kv_width)
        self.c_proj = nn.Linear(hidden, hidden)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (
            part.view(B, T, -1, D // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split([D, self.kv_width, self.kv_width], dim=2)
        )
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.c_proj((weights @ v).transpose(1, 2).reshape(B, T, D))


class Layer(nn.Module):
    def __init__(self, hidden, heads, kv_heads=None):
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden)
        self.attn = Attention(hidden, heads, kv_heads or heads)
        self.ln_2 = nn.LayerNorm(hidden)
        self.mlp = nn.Module()
        self.mlp.c_fc = nn.Linear(hidden, 4 * hidden)
        self.mlp.c_proj = nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp.c_proj(nn.GELU(approximate="tanh")(self.mlp.c_fc(self.ln_2(x))))


class ReferenceGPT(nn.Module):
    def __init__(self, layers, hidden, heads, seq_len, vocab_size, kv_heads=None):
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(vocab_size, hidden)
        self.transformer.wpe = nn.Embedding(seq_len, hidden)
        self.transformer.h = nn.ModuleList(
            Layer(hidden, heads, kv_heads) for _ in range(layers)
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
        matrices = [p for p in model.parameters() if p.ndim == 2]
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
        loss.backward()
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip or float("inf"))
        rate = next(self.rates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return loss.item(), norm.item()
