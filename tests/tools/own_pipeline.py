"""A script of one's own with two techniques: a pipeline of two stages, and ZeRO-1 over replicas.

    PYTHONPATH=. torchrun --nproc-per-node 4 tests/tools/own_pipeline.py FILE     2 or 4 ranks

Ranks 0 and 2 are one replica, 1 and 3 the other. Ranks 0 and 1 have the first three layers, ranks 2
and 3 the last three. ZeRO-1 divides the optimizer's state of a stage between its two ranks. FILE
gets the trained weights, whole, as one process would save them.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

from collectives import ReduceOp, all_reduce, gather_objects
from ddp import clip_grads_with_norm_, get_total_norm
from pipeline import Pipeline, forward_only, one_f_one_b
from zero import FullyShardedDataParallel

STAGES = 2
MICROBATCHES = 8
ROWS = 32  # of a replica's batch, so 4 of a microbatch
WIDTH = 64


def loss_fn(output, target):
    share = 1 / MICROBATCHES  # so that the losses of microbatches add up to the mean of the batch
    return share * (output - target).square().mean()


def next_batch():
    """Return inputs and targets. Only the first stage uses the inputs, and the last the targets."""
    x = torch.randn(ROWS, WIDTH)
    return x, x.sum(1, keepdim=True)


dist.init_process_group("gloo")
grid = (STAGES, dist.get_world_size() // STAGES)
mesh = dist.init_device_mesh("cpu", grid, mesh_dim_names=("pp", "dp"))
pp_group = mesh.get_group("pp")
dp_group = mesh.get_group("dp")
torch.manual_seed(0)  # all ranks draw the same weights
hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)]
net = nn.Sequential(*hidden, nn.Linear(WIDTH, 1))
stage = net[:3] if mesh.get_local_rank("pp") == 0 else net[3:]  # the names are those of net
# A step has a backward for each microbatch, so none waits for the sums: finish_grad_sync() does.
model = FullyShardedDataParallel(stage, process_group=dp_group, stage=1, wait_in_backward=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
shape = (ROWS // MICROBATCHES, WIDTH)  # of what a stage sends to the next one
# With ZeRO-2 and 3, pass sync_each=True, or ranks keep whole gradients until the last backward.
schedule = one_f_one_b(STAGES, MICROBATCHES)
training = Pipeline(model, schedule, loss_fn, pp_group, shape=shape)
without_backward = forward_only(STAGES, MICROBATCHES)
evaluation = Pipeline(model, without_backward, loss_fn, pp_group, shape=shape)
torch.manual_seed(1 + mesh.get_local_rank("dp"))  # a batch for each replica, the same over pp
for step in range(200):
    loss = training.step(*next_batch())  # None on the first stage
    model.finish_grad_sync()  # waits for the averages over dp, which step() has begun
    gradients = [p.grad for p in model.parameters()]
    # A rank has a shard of its stage, so squares are summed over shards, and then over stages.
    norm = get_total_norm(gradients, [dp_group, pp_group])  # with DDP: [pp_group]
    clip_grads_with_norm_(gradients, 1.0, norm)
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    validation_loss = evaluation.step(*next_batch())
weights = {}
for part in gather_objects(model.state_dict(), pp_group):  # whole over dp, but of one stage
    weights |= part
if mesh.get_local_rank("pp") == STAGES - 1:
    losses = torch.stack([loss, validation_loss])
    all_reduce(losses, ReduceOp.AVG, dp_group)
    if mesh.get_local_rank("dp") == 0:
        torch.save(weights, sys.argv[1])
        print("loss {:.6f}, validation loss {:.6f}".format(*losses.tolist()))
dist.destroy_process_group()
