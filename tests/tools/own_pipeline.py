"""A script of one's own with a pipeline: each rank has some of the layers.

    PYTHONPATH=. torchrun --nproc-per-node 2 tests/tools/own_pipeline.py     1, 2 or 4 ranks

A batch of 32 rows is cut into 4 microbatches. Here the pipeline's group is that of all ranks.
"""

import torch
import torch.distributed as dist
from torch import nn

from ddp import clip_grads_with_norm_, get_total_norm
from pipeline import Pipeline, one_f_one_b


def loss_fn(output, target):
    return (output - target).square().mean() / 4  # a microbatch's share of the loss


dist.init_process_group("gloo")
pp_group = dist.group.WORLD
rank = dist.get_rank()
P = dist.get_world_size()
torch.manual_seed(0)  # for layers and batches, which are the same on all ranks
layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]
layers.append(nn.Linear(64, 1))
stage = nn.Sequential(*layers[4 * rank // P : 4 * (rank + 1) // P])
shape = (8, 64)  # of what a stage sends to the next one, for a microbatch
pipeline = Pipeline(stage, one_f_one_b(P, 4), loss_fn, pp_group, shape=shape)
optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
for step in range(200):
    x = torch.randn(32, 64)
    loss = pipeline.step(x, x.sum(1, keepdim=True))  # None on all ranks but the last
    gradients = [p.grad for p in stage.parameters()]
    norm = get_total_norm(gradients, [pp_group])  # of the whole model
    clip_grads_with_norm_(gradients, 1.0, norm)
    optimizer.step()
    optimizer.zero_grad()
if rank == P - 1:
    print(f"loss {loss.item():.6f}")
dist.destroy_process_group()
