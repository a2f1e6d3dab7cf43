"""Speed beside PyTorch's own: pairs of contenders take turns in one run; medians, and their ratio.

    python tests/bench.py collectives [--world-sizes 2 4 8] [--largest 128M]

Times on a shared machine drift by 10-15% and now and then by more; the ratio of medians over
interleaved rounds drifts much less. Every rank has one thread, and gloo's threads run as batch work
for both sides.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
import torch.distributed as dist

import collectives
from ranks import run

KB, MB = 1 << 10, 1 << 20


def take_turns(contenders, rounds, seconds=0.02):
    """Median seconds per call of each contender {name: function}; call it on all ranks at once."""
    calls = {}
    for name, function in contenders.items():
        for _ in range(2):
            function()
        dist.barrier()
        began = time.perf_counter()
        function()
        longest = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(longest, dist.ReduceOp.MAX)  # the same number of calls on every rank
        calls[name] = max(1, int(seconds / longest.item()))
    times = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, function in contenders.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(calls[name]):
                function()
            times[name].append((time.perf_counter() - began) / calls[name])
    return {name: statistics.median(values) for name, values in times.items()}


# ---- collectives ---------------------------------------------------------------------------------


def _pairs(nbytes):
    """{operation: (ours, PyTorch's)} on tensors of nbytes in all, as ring formulas count them."""
    world_size = dist.get_world_size()
    n = max(world_size, nbytes // 4 // world_size * world_size)
    full, shard = torch.ones(n), torch.ones(n // world_size)
    other = torch.empty(n)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    full.zero_()  # sums stay finite
    return {
        "all_reduce": (lambda: collectives.all_reduce(full), lambda: dist.all_reduce(full)),
        "reduce_scatter": (
            lambda: collectives.reduce_scatter_single(shard, full),
            lambda: scatter(shard, full),
        ),
        "all_gather": (
            lambda: collectives.all_gather_single(full, shard),
            lambda: gather(full, shard),
        ),
        "broadcast": (lambda: collectives.broadcast(full), lambda: dist.broadcast(full, 0)),
        "all_to_all": (
            lambda: collectives.all_to_all_single(other, full),
            lambda: dist.all_to_all_single(other, full),
        ),
    }


def _measure(sizes, rounds, operations):
    rows = []
    for nbytes in sizes:
        for operation, (ours, theirs) in _pairs(nbytes).items():
            if operation in operations:
                times = take_turns({"ours": ours, "theirs": theirs}, rounds)
                rows.append((operation, nbytes, times["ours"], times["theirs"]))
    return rows


def bench_collectives(arguments):
    sizes = [4 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 128 * MB]
    sizes = [size for size in sizes if size <= arguments.largest * MB]
    for world_size in arguments.world_sizes:
        rows = run(
            world_size, _measure, sizes, arguments.rounds, arguments.operations, timeout=3000
        )[0]
        print(f"P = {world_size}: microseconds ours / PyTorch's = ratio")
        for operation in dict.fromkeys(row[0] for row in rows):
            cells = [
                f"{o*1e6:9.0f} /{t*1e6:9.0f} = {o/t:4.2f}"
                for name, _, o, t in rows
                if name == operation
            ]
            print(f"  {operation:15}" + " |".join(cells), flush=True)
        print("  " + " " * 15 + " |".join(f"{f'{size // KB} KB':>28}" for size in sizes))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("subject", choices=["collectives"])
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--largest", type=int, default=128, help="MB")
    parser.add_argument("--rounds", type=int, default=7)
    names = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
    parser.add_argument("--operations", nargs="+", default=names)
    arguments = parser.parse_args()
    bench_collectives(arguments)


if __name__ == "__main__":
    main()
