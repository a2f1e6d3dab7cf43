"""Train a GPT with plain_step() of hybrid.py, and print its loss beside that of one process.

    torchrun --nproc-per-node 8 tests/tools/plain_train.py --pp 2 --tp 2        # dp is 8 / (2 x 2)

--mine FILE trains with FILE's functions in the place of those in USED, and says which.
ring_all_reduce takes the place of all_reduce() in plain_step(). The one process computes its loss
without any of them.
"""

import argparse
import copy
import sys
from functools import partial
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support")]

import torch

import hybrid
import tensor_parallel
from collectives import rank_and_size, run_ranks
from judging import functions_of
from layouts import leaves_of, loss_by_one_process

MODULES = hybrid, tensor_parallel
USED = ["plain_step", "one_f_one_b_step", "split_attention", "split_mlp", "column_linear"]
USED += ["row_linear", "ring_all_reduce"]  # by plain_step(), and in it
SIZES = {"V": 256, "T": 64, "D": 128, "layers": 4}
HEADS = 4
BATCH = 8


def use_functions_of(path):
    """Replace functions in USED by those of the same names in a file. Return their names."""
    found = {name: of for name, of in functions_of(path).items() if name in USED}
    for name, function in found.items():
        place = "all_reduce" if name == "ring_all_reduce" else name
        for module in MODULES:
            if hasattr(module, place):
                setattr(module, place, function)
    return [*found]


def train(pp, tp, microbatches, steps, mine):
    """Return (loss, loss of one process) of each step. Rank 0 prints them."""
    rank, world_size = rank_and_size()
    if mine:
        used = use_functions_of(mine)
        if rank == 0:
            print(f"of {mine}, plain_step() uses {', '.join(used) or 'nothing'}", flush=True)
    groups = hybrid.plain_groups(pp, world_size // (pp * tp), tp)
    torch.manual_seed(0)
    whole = hybrid.plain_weights(**SIZES)
    stage = hybrid.PlainStage(whole, SIZES["D"] // HEADS, groups)
    optimizer = torch.optim.AdamW(stage.parameters())
    alone = copy.deepcopy(whole)
    alone_optimizer = torch.optim.AdamW(leaves_of(alone))
    data = hybrid.load_data(None, SIZES["T"])
    losses = []
    for step in range(steps):
        inputs, targets = data.batch(step, BATCH, SIZES["T"], seed=0)
        tokens = torch.cat([inputs, targets[:, -1:]], 1)  # (BATCH, T + 1), the same on all ranks
        loss = hybrid.plain_step(stage, optimizer, tokens, microbatches, groups)
        if rank == 0:
            alone_optimizer.zero_grad()
            expected = loss_by_one_process(alone, tokens, HEADS)
            expected.backward()
            alone_optimizer.step()
            losses.append((loss, expected.item()))
            print(f"step {step + 1:3}  loss {loss:.4f}  one process {expected:.4f}", flush=True)
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in {"pp": 1, "tp": 1, "microbatches": 2, "steps": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mine", metavar="FILE")
    run_ranks(partial(train, **vars(parser.parse_args())))


if __name__ == "__main__":
    main()
