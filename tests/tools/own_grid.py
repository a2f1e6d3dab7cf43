"""A script of one's own with two techniques: each replica of an MLP is split over two ranks of tp.

    PYTHONPATH=. torchrun --nproc-per-node 4 tests/tools/own_grid.py FILE     2 or 4 ranks

Ranks 0 and 1 are one replica, 2 and 3 the other. Ranks 0 and 2 have the same half of the matrices.
ZeRO-2 divides the gradients and the optimizer's state between them, as between ranks 1 and 3. FILE
gets the trained weights, whole, as one process would save them.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

from collectives import ReduceOp, all_gather_to_group, all_reduce
from ddp import clip_grads_with_norm_, get_total_norm
from tensor_parallel import (
    ColumnParallelLinear, RowParallelLinear, check_gradients_over_tp, mark_sum_over_tp,
    parameters_to_sum_over_tp, shards_of, sum_gradients_over_tp,
)
from zero import FullyShardedDataParallel

dist.init_process_group("gloo")
shape = (dist.get_world_size() // 2, 2)
mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
dp_group = mesh.get_group("dp")
tp_group = mesh.get_group("tp")
torch.manual_seed(0)  # all ranks draw the same weights
net = nn.Sequential(
    ColumnParallelLinear(64, 256, group=tp_group),  # draws all columns, and keeps half of them
    nn.Unflatten(1, (-1, 32)),  # eight heads of 32 columns, four on each rank
    mark_sum_over_tp(nn.LayerNorm(32)),  # a copy on each rank, for its heads only
    nn.Flatten(),
    nn.GELU(),
    RowParallelLinear(256, 64, group=tp_group),  # keeps the rows that belong to its columns
    nn.Linear(64, 1),  # a copy on each rank, used alike
)
model = FullyShardedDataParallel(net, process_group=dp_group, stage=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
split = [p for name, p in model.named_parameters() if name in shards_of(model)]
copied = [p for name, p in model.named_parameters() if name not in shards_of(model)]
torch.manual_seed(1 + mesh.get_local_rank("dp"))  # a batch for each replica, the same over tp
for step in range(200):
    x = torch.randn(32, 64)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()  # averages gradients over dp
    # of the LayerNorm, whose gradient on a rank has the terms of this rank's heads only
    sum_gradients_over_tp(parameters_to_sum_over_tp(model), tp_group)
    if step == 0:
        check_gradients_over_tp(model, tp_group)  # raises an error if copies do not agree
    # The norm of the whole model's gradients. Ranks of tp have different parts of split matrices,
    # so squares are summed over tp. They have equal copies of the rest, which count once. ZeRO-2
    # has left ranks of dp different shards of both, so squares are summed over dp, too. (With DDP,
    # every rank has whole gradients: leave [dp_group] out.)
    of_split = get_total_norm([p.grad for p in split], [tp_group])
    norm = get_total_norm([of_split, *[p.grad for p in copied]], [dp_group])
    clip_grads_with_norm_([p.grad for p in split + copied], 1.0, norm)
    optimizer.step()
    optimizer.zero_grad()
weights = model.state_dict()  # whole over dp
for name, shard in shards_of(net).items():  # and over tp; shard.cut() is the reverse, for loading
    weights[name] = all_gather_to_group(weights[name], shard.dim, tp_group)
loss = loss.detach()
all_reduce(loss, ReduceOp.AVG, dp_group)
if dist.get_rank() == 0:
    torch.save(weights, sys.argv[1])
    print(f"loss {loss.item():.6f}")
dist.destroy_process_group()
