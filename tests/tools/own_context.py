"""A script of one's own with context parallelism: two ranks divide the positions of a sequence.

    PYTHONPATH=. torchrun --nproc-per-node 4 tests/tools/own_context.py FILE     2 or 4 ranks

Ranks 0 and 1 have the same sequences, and each computes half of their positions. Ranks 2 and 3 have
other sequences. Every rank has a copy of all weights. FILE gets the trained weights.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from collectives import ReduceOp, all_reduce
from ddp import DistributedDataParallel
from sequence_parallel import context_positions, zigzag_ring_attention

SEQUENCES = 16  # of a replica's batch
LENGTH = 64  # of a sequence, so each rank computes 32 positions
PERIOD = 8  # a sequence repeats so many tokens
VOCABULARY = 32
WIDTH = 64
HEADS = 4


class Model(nn.Module):
    """A layer of attention. All other layers treat each token by itself, so cp changes none."""

    def __init__(self, cp_group):
        super().__init__()
        self.cp_group = cp_group
        self.of_token = nn.Embedding(VOCABULARY, WIDTH)
        self.of_position = nn.Embedding(LENGTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, positions):
        x = self.of_token(tokens) + self.of_position(positions)  # (SEQUENCES, 32, WIDTH)
        heads = self.qkv(x).unflatten(2, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # (SEQUENCES, HEADS, 32, WIDTH / HEADS) each
        y = zigzag_ring_attention(q, k, v, self.cp_group)  # causal, over the keys of both ranks
        return self.head(x + y.transpose(1, 2).flatten(2))


dist.init_process_group("gloo")
shape = (dist.get_world_size() // 2, 2)
mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
cp_group = mesh.get_group("cp")
torch.manual_seed(0)  # all ranks draw the same weights
net = Model(cp_group)
model = DistributedDataParallel(net)  # over all ranks: those of cp have other terms, too
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
positions = context_positions(LENGTH, cp_group)  # an early and a late quarter: equal work
torch.manual_seed(1 + mesh.get_local_rank("dp"))  # a batch for each replica, the same over cp
for step in range(200):
    tokens = torch.randint(VOCABULARY, (SEQUENCES, PERIOD)).repeat(1, LENGTH // PERIOD + 1)
    next_tokens = tokens[:, 1:]  # the targets: first shifted, then cut
    logits = model(tokens[:, positions], positions)  # (SEQUENCES, 32, VOCABULARY)
    # Ranks have equally many targets, so the mean of their losses is that of the whole batch. If
    # some targets are ignored, it is not: see "losses that add up" in ddp.py.
    loss = F.cross_entropy(logits.flatten(0, 1), next_tokens[:, positions].flatten())
    loss.backward()  # averages the gradients over dp and cp
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # each rank has the whole gradient
    optimizer.step()
    optimizer.zero_grad()
loss = loss.detach()
all_reduce(loss, ReduceOp.AVG)
if dist.get_rank() == 0:
    torch.save(net.state_dict(), sys.argv[1])
    print(f"loss {loss.item():.6f}")
dist.destroy_process_group()
