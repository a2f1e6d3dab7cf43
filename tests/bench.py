"""Speed beside PyTorch's own: pairs of contenders take turns in one run; medians, and their ratio.

    python tests/bench.py collectives [--world-sizes 2 4 8] [--largest 128]
    python tests/bench.py data_parallel [--world-sizes 2]
    python tests/bench.py overlap       (as root on Linux: over a link of 2 Gbit/s, shaped by tc)

Times on a shared machine drift by 10-15% and now and then by more; the ratio of medians over
interleaved rounds drifts much less. Every rank has one thread, and gloo's threads run as batch work
for both sides.
"""

import argparse
import random
import shlex
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
import torch.distributed as dist
import torch.distributed.optim
import torch.nn.functional as F
from torch import nn

import collectives
from ddp import DistributedDataParallel
from ranks import run
from reference_gpt import ReferenceGPT
from zero import FullyShardedDataParallel, ZeroRedundancyOptimizer

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
    for i in range(rounds):
        for name, function in random.Random(i).sample(list(contenders.items()), len(contenders)):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(calls[name]):
                function()
            times[name].append((time.perf_counter() - began) / calls[name])
    return {name: statistics.median(values) for name, values in times.items()}


# ---- collectives ---------------------------------------------------------------------------------


def _contenders(operation, nbytes):
    """Ours, PyTorch's, and the bare link: one message of as many bytes as a rank must send."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    n = max(world_size, nbytes // 4 // world_size * world_size)
    full, other, shard = torch.zeros(n), torch.zeros(n), torch.zeros(n // world_size)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    ours, theirs = {
        "all_reduce": (collectives.all_reduce, dist.all_reduce),
        "reduce_scatter": (collectives.reduce_scatter_single, scatter),
        "all_gather": (collectives.all_gather_single, gather),
        "broadcast": (collectives.broadcast, dist.broadcast),
        "all_to_all": (collectives.all_to_all_single, dist.all_to_all_single),
    }[operation]
    arguments = {
        "all_reduce": (full,),
        "reduce_scatter": (shard, full),
        "all_gather": (full, shard),
        "broadcast": (full, 0),
        "all_to_all": (other, full),
    }[operation]
    sent = n * (world_size - 1) // world_size
    outgoing = torch.zeros({"all_reduce": 2 * sent, "broadcast": n}.get(operation, sent))
    incoming = torch.empty_like(outgoing)

    def link():
        message = dist.irecv(incoming, (rank - 1) % world_size)
        dist.isend(outgoing, (rank + 1) % world_size).wait()
        message.wait()

    return {"ours": lambda: ours(*arguments), "theirs": lambda: theirs(*arguments), "link": link}


def _measure(sizes, rounds, operations):
    return {
        operation: [take_turns(_contenders(operation, size), rounds) for size in sizes]
        for operation in operations
    }


def bench_collectives(arguments):
    """A row per operation: microseconds ours / PyTorch's = ratio, and the bare link's / ours."""
    sizes = [4 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 128 * MB]
    sizes = [size for size in sizes if size <= arguments.largest * MB]
    for world_size in arguments.world_sizes:
        call = world_size, _measure, sizes, arguments.rounds, arguments.operations
        print(f"\nP = {world_size}" + "".join(f"{size // KB:>26} KB" for size in sizes))
        for operation, times in run(*call, timeout=3000)[0].items():
            cells = [
                f"{t['ours'] * 1e6:9.0f} /{t['theirs'] * 1e6:7.0f} ={t['ours'] / t['theirs']:5.2f}"
                f"{t['link'] / t['ours']:5.0%}"
                for t in times
            ]
            print(f"{operation:15}" + "".join(cells), flush=True)


# ---- data parallelism ----------------------------------------------------------------------------


def _gpt():
    torch.manual_seed(0)
    return ReferenceGPT(layers=6, hidden=256, heads=4, seq_len=128, vocab_size=256)


def _torch_fsdp():
    from torch.distributed.fsdp import fully_shard

    model = _gpt()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.transformer.h:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _trainers():
    """name -> (model, optimizer) of 4.8M parameters: one process alone, PyTorch's, ours."""
    adamw, make, trainers = torch.optim.AdamW, _gpt, {}
    model = make()
    trainers["alone"] = model, adamw(model.parameters())
    model = nn.parallel.DistributedDataParallel(make(), gradient_as_bucket_view=True)
    trainers["torch DDP"] = model, adamw(model.parameters())
    model = DistributedDataParallel(make())
    trainers["ddp"] = model, adamw(model.parameters())
    model = nn.parallel.DistributedDataParallel(make(), gradient_as_bucket_view=True)
    sharded = torch.distributed.optim.ZeroRedundancyOptimizer(model.parameters(), adamw)
    trainers["torch ZeRO + DDP"] = model, sharded
    for stage in (1, 2):
        model = make()
        sharded = ZeroRedundancyOptimizer(model.parameters(), adamw, shard_gradients=stage == 2)
        trainers[f"stage {stage}"] = model, sharded
    model = _torch_fsdp()
    trainers["torch FSDP2"] = model, adamw(model.parameters())
    model = make()
    model = FullyShardedDataParallel(model, units=model.transformer.h)
    trainers["stage 3"] = model, adamw(model.parameters())
    return trainers


def _step(model, optimizer, tokens):
    optimizer.zero_grad()
    logits = model(tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()


def _time_data_parallel(rounds):
    tokens = torch.randint(256, (4, 129), generator=torch.Generator().manual_seed(dist.get_rank()))
    contenders = {
        name: partial(_step, *trainer, tokens) for name, trainer in _trainers().items()
    }
    return take_turns(contenders, rounds)


RIVALS = {
    "ddp": "torch DDP",
    "stage 1": "torch ZeRO + DDP",
    "stage 2": "torch ZeRO + DDP",
    "stage 3": "torch FSDP2",
}


def bench_data_parallel(arguments):
    """A row per technique: milliseconds of a step, ratio to the rival's, and what is exposed."""
    for world_size in arguments.world_sizes:
        times = run(world_size, _time_data_parallel, arguments.rounds, timeout=3000)[0]
        alone = times.pop("alone")
        print(f"\nP = {world_size}: a step alone takes {alone * 1e3:.0f} ms; exposed is the rest")
        for name, seconds in times.items():
            rival = f"{seconds / times[RIVALS[name]]:6.2f}" if name in RIVALS else " " * 6
            exposed = (seconds - alone) * 1e3
            print(f"{name:18}{seconds * 1e3:6.0f} ms{rival}   exposed {exposed:4.0f} ms")


# ---- overlap -------------------------------------------------------------------------------------

SHAPE = "ip link set lo up && tc qdisc add dev lo root tbf rate 2gbit burst 1mb latency 100ms"


def _time_overlap(rounds):
    tokens = torch.randint(256, (8, 129), generator=torch.Generator().manual_seed(dist.get_rank()))
    model, contenders = _gpt(), {}
    gradients = torch.zeros(sum(p.numel() for p in model.parameters()))
    contenders["alone"] = partial(_step, model, torch.optim.AdamW(model.parameters()), tokens)
    contenders["reduction"] = lambda: collectives.all_reduce(gradients)
    for cap in (25, 4, 1):
        for name, wrap in (("torch DDP", nn.parallel.DistributedDataParallel),
                           ("ddp", DistributedDataParallel)):
            model = wrap(_gpt(), bucket_cap_mb=cap)
            step = partial(_step, model, torch.optim.AdamW(model.parameters()), tokens)
            contenders[f"{name}, buckets of {cap} MB"] = step
    return take_turns(contenders, rounds)


def bench_overlap(arguments):
    """How much of the reduction's time disappears behind backward, where the link has its own."""
    if not arguments.inside:
        again = shlex.join([sys.executable, *sys.argv, "--inside"])
        sys.exit(subprocess.call(["unshare", "--net", "sh", "-c", f"{SHAPE} && exec {again}"]))
    times = run(2, _time_overlap, arguments.rounds, timeout=3000)[0]
    alone, reduction = times.pop("alone"), times.pop("reduction")
    print(f"a step alone takes {alone * 1e3:.0f} ms, the reduction alone {reduction * 1e3:.0f} ms")
    for name, seconds in times.items():
        exposed = seconds - alone
        print(f"{name:26} exposed {exposed * 1e3:4.0f} ms, hidden {1 - exposed / reduction:4.0%}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("subject", choices=["collectives", "data_parallel", "overlap"])
    parser.add_argument("--world-sizes", type=int, nargs="+")
    parser.add_argument("--largest", type=int, default=128, help="MB")
    parser.add_argument("--rounds", type=int, default=7)
    names = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
    parser.add_argument("--operations", nargs="+", default=names)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.subject == "collectives":
        arguments.world_sizes = arguments.world_sizes or [2, 4, 8]
        bench_collectives(arguments)
    elif arguments.subject == "data_parallel":
        arguments.world_sizes = arguments.world_sizes or [2]
        bench_data_parallel(arguments)
    else:
        bench_overlap(arguments)


if __name__ == "__main__":
    main()
