"""A script of one's own with tensor parallelism: the two layers of an MLP are split.

    PYTHONPATH=. torchrun --nproc-per-node 2 tests/tools/own_tp.py     any number that divides 256

All ranks compute the same loss from the same batch. Here their group is that of all ranks.
"""

import torch
import torch.distributed as dist
from torch import nn

from ddp import clip_grads_with_norm_, get_total_norm
from tensor_parallel import (
    ColumnParallelLinear, RowParallelLinear, check_gradients_over_tp, shards_of,
)

dist.init_process_group("gloo")
tp_group = dist.group.WORLD
torch.manual_seed(0)  # for weights and batches, which are the same on all ranks
model = nn.Sequential(
    ColumnParallelLinear(64, 256, group=tp_group),  # draws all columns, and keeps 1/P of them
    nn.GELU(),
    RowParallelLinear(256, 64, group=tp_group),  # the rows that belong to these columns
    nn.Linear(64, 1),  # a copy on each rank
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(200):
    x = torch.randn(32, 64)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    if step == 0:
        check_gradients_over_tp(model, tp_group)  # raises an error if copies do not agree
    split = [p.grad for name, p in model.named_parameters() if name in shards_of(model)]
    copied = [p.grad for name, p in model.named_parameters() if name not in shards_of(model)]
    norm = get_total_norm([get_total_norm(split, [tp_group]), *copied])  # of the whole model
    clip_grads_with_norm_(split + copied, 1.0, norm)
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.6f}")
dist.destroy_process_group()
