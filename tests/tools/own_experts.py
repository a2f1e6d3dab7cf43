"""A script of one's own with experts: 8 are spread over two ranks, which have batches of their own.

    PYTHONPATH=. torchrun --nproc-per-node 4 tests/tools/own_experts.py FILE     2 or 4 ranks

Ranks 0 and 2 have experts 0 to 3, ranks 1 and 3 have experts 4 to 7. All other parameters have a
copy on every rank. FILE gets the trained weights, whole, as one process would save them.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

from collectives import ReduceOp, all_gather_to_group, all_reduce
from ddp import DistributedDataParallel, clip_grads_with_norm_, get_total_norm
from expert_parallel import MoE

dist.init_process_group("gloo")
shape = (dist.get_world_size() // 2, 2)
mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("same", "ep"))
same_group = mesh.get_group("same")  # the ranks that have the same experts
ep_group = mesh.get_group("ep")
torch.manual_seed(0)  # all ranks draw the same weights, and keep their experts
# To train for long, pass balance_coefficient=0.01, or a few experts may get all tokens.
moe = MoE(64, 128, num_experts=8, top_k=2, group=ep_group)
net = nn.Sequential(nn.Linear(64, 64), moe, nn.Linear(64, 1))
# An expert has computed the tokens of all ranks of its ep_group, so its gradient has their terms
# already, and is summed over same_group only. All other gradients are summed over all ranks. Then
# each gradient has the terms of all ranks' losses, and DDP divides each by the number of all ranks.
groups = {p: same_group for p in moe.experts.parameters()}
model = DistributedDataParallel(net, groups=groups)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
split = [p for p in model.parameters() if p in groups]
copied = [p for p in model.parameters() if p not in groups]
torch.manual_seed(1 + dist.get_rank())  # a batch for each rank
for step in range(200):
    x = torch.randn(32, 64)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    of_split = get_total_norm([p.grad for p in split], [ep_group])  # of all experts
    norm = get_total_norm([of_split, *[p.grad for p in copied]])  # of the whole model
    clip_grads_with_norm_([p.grad for p in split + copied], 1.0, norm)
    optimizer.step()
    optimizer.zero_grad()
weights = net.state_dict()
for name in weights:
    if ".experts." in name:
        weights[name] = all_gather_to_group(weights[name], 0, ep_group)
loss = loss.detach()
all_reduce(loss, ReduceOp.AVG)
if dist.get_rank() == 0:
    torch.save(weights, sys.argv[1])
    print(f"loss {loss.item():.6f}")
dist.destroy_process_group()
