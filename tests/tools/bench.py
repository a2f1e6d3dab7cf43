"""Time everything beside PyTorch's own: contenders take turns, and their medians are compared.

    python tests/tools/bench.py [subject] [--world-sizes 2 4 8] [--rounds 5]

Without a subject, it runs all subjects that this machine supports, in about 10 minutes. "host" is
the host's time for a batch of NCCL, without a GPU. "gpu" trains a GPT on one GPU and, if there are
several GPUs, also times their messages.

A row shows our contender and its ms, the other contender and its ms, and the ratio of the two. If a
subject fails, it is named at the end, and the exit status is 1.

A round lasts as long as its slowest rank. Times on a shared machine drift by 10-15%, sometimes by
more; the ratio of medians over interleaved rounds drifts much less. Every rank has one thread. The
first line names the scheduling class of gloo's threads, which is the same for both sides: with
SCHED_BATCH and without it, the ratios of small messages differ by two.
"""

import argparse
import copy
import ctypes
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import traceback
from functools import partial
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support"), str(TESTS / "tools")]

import torch
import torch.distributed as dist
import torch.distributed.optim
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import collectives
import hybrid
from ddp import DistributedDataParallel
from expert_parallel import MoE
from gpu_counts import as_on_nccl
from models import GPUS
from pipeline import SCHEDULES, DeferredLinear, Pipeline, WeightGradStore
from ranks import headline, on_device, run
from reference_gpt import Attention, Layer, ReferenceGPT
from sequence_parallel import recompute_groups, run_layers
from transformer import most_saved_bytes
from zero import FullyShardedDataParallel, ZeroRedundancyOptimizer

KB, MB = 1 << 10, 1 << 20
OPERATIONS = [
    "all_reduce", "reduce_scatter_single", "all_gather_single", "all_gather", "broadcast",
    "all_to_all_single", "scatter", "gather",
]


def _keep_memory():
    """Stop malloc from returning memory. Page faults would depend on who was timed before."""
    trim_threshold, mmap_threshold = -1, -3
    for parameter in (trim_threshold, mmap_threshold):
        ctypes.CDLL(None).mallopt(parameter, 1 << 30)


def take_turns(contenders, rounds, seconds=0.02):
    """Return {name: median seconds per call} of the contenders {name: function}. Collective.

    A round's time is that of its slowest rank.
    """
    _keep_memory()
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
    slowest = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {name: statistics.median(values) for name, values in zip(times, slowest.tolist())}


def _on_first_rank(step):
    """Run step() on rank 0 while the other ranks are idle."""
    if dist.get_rank() == 0:
        step()
    dist.barrier()


def measure(cases):
    """Announce and run each {case: (world size, function, *arguments)}; yield rank 0's result."""
    for number, (case, call) in enumerate(cases.items(), 1):
        what = case if isinstance(case, str) else ", ".join(map(str, case))
        print(f"  {number} of {len(cases)}: {what}", file=sys.stderr, flush=True)
        yield case, run(*call, timeout=3000)[0]


# ---- collectives ---------------------------------------------------------------------------------


def bare_all_to_all(output, input):
    """Do what all_to_all_single() does as a script would, without checks or other sizes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    arriving = output.chunk(world_size)
    outgoing = input.chunk(world_size)
    arriving[rank].copy_(outgoing[rank])
    after = [(rank + distance) % world_size for distance in range(1, world_size)]
    works = [dist.irecv(arriving[peer], peer) for peer in reversed(after)]
    works += [dist.isend(outgoing[peer], peer) for peer in after]
    for work in works:
        work.wait()


def _contenders(operation, nbytes):
    world_size = dist.get_world_size()
    n = max(world_size, nbytes // 4 // world_size * world_size)
    full, other, shard = torch.zeros(n), torch.zeros(n), torch.zeros(n // world_size)
    chunks = [*full.chunk(world_size)]
    chunks_of_root = chunks if dist.get_rank() == 0 else None
    arguments = {
        "all_reduce": (full,),
        "reduce_scatter_single": (shard, full),
        "all_gather_single": (full, shard),
        "all_gather": (chunks, shard),
        "broadcast": (full, 0),
        "all_to_all_single": (other, full),
        "scatter": (shard, chunks_of_root),
        "gather": (shard, chunks_of_root),
    }[operation]
    contenders = {
        "ours": partial(getattr(collectives, operation), *arguments),
        "theirs": partial(collectives.backend_function(operation), *arguments),
    }
    if operation == "all_to_all_single" and dist.get_backend() == "gloo":  # NCCL needs batches
        contenders["bare"] = partial(bare_all_to_all, *arguments)
    return contenders


def _time_collective(operation, sizes, rounds):
    return [take_turns(_contenders(operation, size), rounds) for size in sizes]


def bench_collectives(arguments):
    """Compare each operation with PyTorch's."""
    sizes = [4 * KB, 64 * KB, MB, 16 * MB]
    cases = {
        (operation, f"P = {P}"): (P, _time_collective, operation, sizes, arguments.rounds)
        for P in arguments.world_sizes
        for operation in OPERATIONS
    }
    for case, times in measure(cases):
        for size, t in zip(sizes, times):
            what = f"{', '.join(case)}, {size // KB} KB"
            report(what, t["ours"], "PyTorch's", t["theirs"])
            if "bare" in t:
                report(what, t["ours"], "isend and irecv", t["bare"])


# ---- data parallelism ----------------------------------------------------------------------------


def _gpt():
    torch.manual_seed(0)
    return ReferenceGPT(layers=6, hidden=256, heads=4, seq_len=128, vocab_size=256)


def _trainer(name):
    """Return a model of 4.8M parameters and its optimizer, in the named technique."""
    adamw, model = torch.optim.AdamW, _gpt()
    if name == "torch DDP" or name == "torch ZeRO + DDP":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if name == "torch ZeRO + DDP":
        return model, torch.distributed.optim.ZeroRedundancyOptimizer(model.parameters(), adamw)
    if name in ("ddp", "ZeRO + DDP"):
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if name == "ZeRO + DDP":
        return model, ZeroRedundancyOptimizer(model.parameters(), adamw)
    if name.startswith("stage"):
        model = FullyShardedDataParallel(model, units=model.transformer.h, stage=int(name[-1]))
        optimizer = adamw(model.parameters())
        return model, optimizer
    if name == "torch FSDP2":
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.transformer.h:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(model, mesh=mesh)
    return model, adamw(model.parameters())


def _loss(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _step(model, optimizer, tokens):
    optimizer.zero_grad()
    _loss(model, tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()


def _tokens(sequences):
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(256, (sequences, 129), generator=generator)


RIVALS = {  # {our technique: PyTorch's}
    "ddp": "torch DDP", "ZeRO + DDP": "torch ZeRO + DDP", "stage 1": "torch ZeRO + DDP",
    "stage 2": "torch ZeRO + DDP", "stage 3": "torch FSDP2",
}  # fmt: skip


def _time_data_parallel(rounds):
    names = ["alone", *RIVALS, *dict.fromkeys(RIVALS.values())]
    return take_turns({n: partial(_step, *_trainer(n), _tokens(4)) for n in names}, rounds)


def bench_data_parallel(arguments):
    """Compare a step of each technique with PyTorch's."""
    cases = {f"P = {P}": (P, _time_data_parallel, arguments.rounds) for P in arguments.world_sizes}
    for case, times in measure(cases):
        for name, rival in (*RIVALS.items(), *((name, "alone") for name in RIVALS)):
            report(f"{name}, {case}", times[name], rival, times[rival])


# ---- pipelines -----------------------------------------------------------------------------------


def _torch_schedules():
    """Return {name: (PyTorch's schedule, a rank's stages as a function of (rank, p), our name)}."""
    loop, vee = (lambda r, p: [r, r + p]), (lambda r, p: [r, 2 * p - 1 - r])
    return {
        "GPipe": (pipelining.ScheduleGPipe, lambda r, p: [r], "gpipe"),
        "1F1B": (pipelining.Schedule1F1B, lambda r, p: [r], "1f1b"),
        "Interleaved1F1B": (pipelining.ScheduleInterleaved1F1B, loop, "interleaved"),
        "InterleavedZeroBubble": (pipelining.ScheduleInterleavedZeroBubble, loop, "zb-h1"),
        "ZBVZeroBubble": (pipelining.ScheduleZBVZeroBubble, vee, "zb-v"),
        "DualPipeV": (pipelining.ScheduleDualPipeV, vee, "dualpipe-v"),
    }


def _time_pipelines(num_microbatches, rounds):
    rank, p = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [Layer(256, 4) for _ in range(8)]
    inputs, targets = torch.randn(2, 2 * num_microbatches, 64, 256)
    loss_fn = lambda output, target: (output - target).square().mean()
    contenders, store = {}, WeightGradStore()
    like = {"shape": (2, *inputs.shape[1:]), "defer": store}

    def cut(schedule):
        """Return this rank's stages, which can defer products if the schedule has Ws."""
        (route,) = schedule.routes
        size = len(layers) // len(route)
        stages = {}
        for i, (place, chunk) in enumerate(route):
            if place == rank:
                part = layers[i * size : (i + 1) * size]
                stages[chunk] = copy.deepcopy(nn.Sequential(*part))
        if any(action.kind == "W" for action in schedule[rank]):
            for module in (module for stage in stages.values() for module in stage.modules()):
                if isinstance(module, nn.Linear):
                    module.__class__, module.defer = DeferredLinear, store
        return [stages[chunk] for chunk in sorted(stages)]

    for name, (kind, indices, mine) in _torch_schedules().items():
        schedule = SCHEDULES[mine](p, num_microbatches)
        ours = Pipeline(cut(schedule), schedule, loss_fn, **like)
        contenders[f"ours, {name}"] = partial(ours.step, inputs, targets)
        count = len(indices(rank, p)) * p
        size = len(layers) // count
        stages = [
            PipelineStage(
                copy.deepcopy(nn.Sequential(*layers[i * size : (i + 1) * size])),
                i, count, torch.device("cpu"), group=dist.group.WORLD,
            )
            for i in indices(rank, p)
        ]
        some = stages[0] if len(stages) == 1 else stages
        theirs = kind(some, num_microbatches, loss_fn=loss_fn, scale_grads=False)  # like ours
        first = (inputs,) if rank == 0 else ()
        last = any(stage.is_last for stage in stages)
        contenders[name] = partial(theirs.step, *first, **({"target": targets} if last else {}))
    return take_turns(contenders, rounds)


def bench_pipeline(arguments):
    """Compare a step of each schedule, over two stages or their chunks, with PyTorch's."""
    [(_, times)] = measure({"P = 2": (2, _time_pipelines, 8, arguments.rounds)})
    for name, (*_, mine) in _torch_schedules().items():
        report(mine, times[f"ours, {name}"], name, times[name])


# ---- tensor parallelism --------------------------------------------------------------------------

HEADS, LAYERS = 4, 6


class _FusedAttention(Attention):
    """Attention in which c_attn may return q, k and v of only this rank's heads, as in DTensor."""

    def forward(self, x):
        K = x.shape[-1] // self.heads
        q, k, v = self.c_attn(x).unflatten(-1, (3, -1, K)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


def _plain_block(D, heads=HEADS):
    """Return the equivalent of hybrid.Block, made of torch.nn modules."""
    block = Layer(D, heads)
    block.attn = _FusedAttention(D, heads, heads)
    return block


def _dtensor_blocks(mesh, D, sequence_parallel):
    split = Shard(1) if sequence_parallel else Replicate()
    enter = PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(Replicate(),))
    row = lambda: RowwiseParallel(output_layouts=split)
    plan = {"attn.c_attn": ColwiseParallel(), "attn.c_proj": row()}
    plan |= {"mlp.c_fc": ColwiseParallel(), "mlp.c_proj": row()}
    if sequence_parallel:
        plan |= {"ln_1": SequenceParallel(), "ln_2": SequenceParallel()}
        plan |= {"attn": enter, "mlp": enter}
    return nn.Sequential(*[parallelize_module(_plain_block(D), mesh, plan) for _ in range(LAYERS)])


def _time_tensor_parallel(B, T, D, rounds):
    """Time forward and backward of a stack of layers."""
    _, tp = collectives.rank_and_size()
    mesh, contenders = dist.device_mesh.init_device_mesh("cpu", (tp,)), {}
    torch.manual_seed(0)

    def step(blocks, x):
        blocks.zero_grad()
        blocks(x).sum().backward()

    for sequence_parallel, name in ((False, "TP"), (True, "TP + SP")):
        length = T // tp if sequence_parallel else T
        theirs = _dtensor_blocks(mesh, D, sequence_parallel)
        contenders[name] = partial(step, theirs, torch.randn(B, length, D, requires_grad=True))
        config = hybrid.GPTConfig(LAYERS, D, HEADS, T, sp=sequence_parallel)
        ours = nn.Sequential(*[hybrid.Block(config) for _ in range(LAYERS)])
        x = torch.randn(length, B, D, requires_grad=True)
        contenders[f"ours, {name}"] = partial(step, ours, x)
    plain = nn.Sequential(*[_plain_block(D) for _ in range(LAYERS)])
    contenders["one process"] = partial(step, plain, torch.randn(B, T, D, requires_grad=True))
    return take_turns(contenders, rounds)


def bench_tensor_parallel(arguments):
    """Compare a stack of layers with DTensor's, and with all layers on one process."""
    shapes = (2, 64, 256), (2, 128, 256), (8, 128, 256)
    cases = {
        (f"P = {P}", f"(B, T, D) = {shape}"): (P, _time_tensor_parallel, *shape, arguments.rounds)
        for P in arguments.world_sizes
        for shape in shapes
    }
    for case, times in measure(cases):
        for name in ("TP", "TP + SP"):
            what = ", ".join((name, *case))
            report(what, times[f"ours, {name}"], "DTensor", times[name])
            report(what, times[f"ours, {name}"], "one process", times["one process"])


# ---- context parallelism -------------------------------------------------------------------------


def _time_context_parallel(T, rounds):
    """Time forward and backward of one causal attention with 8 heads of 64."""
    _, P = collectives.rank_and_size()
    whole = [torch.randn(1, 8, T, 64, requires_grad=True) for _ in range(3)]
    own = [x[:, :, : T // P].detach().clone().requires_grad_() for x in whole]
    fused = partial(F.scaled_dot_product_attention, is_causal=True)

    def step(function, tensors):
        torch.autograd.grad(function(*tensors).sum(), tensors)

    contenders = {"one process": partial(_on_first_rank, partial(step, fused, whole))}
    for name, method in hybrid.CP_METHODS.items():
        contenders[name] = partial(step, method, own)
    return take_turns(contenders, rounds)


def bench_context_parallel(arguments):
    """Compare one causal attention, forward and backward, with fused attention on one process."""
    cases = {
        (f"P = {P}", f"s = {T}"): (P, _time_context_parallel, T, arguments.rounds)
        for P in arguments.world_sizes
        for T in (2048, 4096)
    }
    for case, times in measure(cases):
        alone = times.pop("one process")
        for name, t in times.items():
            report(", ".join((name, *case)), t, "fused, one process", alone)


# ---- recomputation -------------------------------------------------------------------------------


def _time_recomputation(layers, T, rounds):
    """Return {case: (seconds, most bytes that autograd keeps)} of forward and backward."""
    config = hybrid.GPTConfig(layers, 128, 4, T)
    blocks = [hybrid.Block(config) for _ in range(layers)]
    weights = [parameter for block in blocks for parameter in block.parameters()]
    x = torch.randn(T, 2, 128, requires_grad=True)
    contenders = {"none": lambda: run_layers(blocks, x).sum().backward()}
    for n in (1, 2, math.isqrt(layers), layers):
        contenders[f"n = {n}"] = lambda n=n: recompute_groups(blocks, n, x).sum().backward()
    kept = {}
    for name, step in contenders.items():
        with most_saved_bytes(weights) as count:
            step()
        kept[name] = count()
    seconds = take_turns(contenders, rounds)
    return {name: (seconds[name], kept[name]) for name in contenders}


def bench_recomputation(arguments):
    """Compare n layers recomputed as one with no recomputation: time and memory of 16 layers."""
    cases = {"16 layers": (1, _time_recomputation, 16, 128, arguments.rounds)}
    [(_, found)] = measure(cases)
    alone, all_kept = found.pop("none")
    for name, (seconds, kept) in found.items():
        report(f"{name}, {kept / MB:.1f} of {all_kept / MB:.1f} MB kept", seconds, "none", alone)


# ---- experts -------------------------------------------------------------------------------------


def _time_experts(N, D, E, k, rounds):
    torch.manual_seed(dist.get_rank())
    x = torch.randn(N, D, requires_grad=True)
    up, down = nn.Linear(D, 4 * D * k, bias=False), nn.Linear(4 * D * k, D, bias=False)
    dense = nn.Sequential(up, nn.GELU(approximate="tanh"), down)
    step = lambda layer: layer(x).sum().backward()
    contenders = {"experts": MoE(D, 4 * D, E, k), "dense": dense}
    return take_turns({name: partial(step, layer) for name, layer in contenders.items()}, rounds)


def bench_expert_parallel(arguments):
    """Compare 8 experts, top 2, 4096 tokens a rank, with a dense MLP, forward and backward."""
    cases = {
        (f"P = {P}", f"D = {D}"): (P, _time_experts, 4096, D, 8, 2, arguments.rounds)
        for P in arguments.world_sizes
        for D in (256, 512)
    }
    for case, times in measure(cases):
        what = ", ".join(("8 experts", "top 2", *case))
        report(what, times["experts"], "dense, equal FLOPs", times["dense"])


# ---- GPUs ----------------------------------------------------------------------------------------

GPT_350M = {"layers": 24, "hidden": 1024, "heads": 16, "seq_len": 1024, "vocab_size": 50304}
SEQUENCES = 8  # in a step


def _time_gpt(device, rounds):
    """Time a step of hybrid's Trainer, and of nanoGPT's recipe, both eager and compiled."""
    flags = " ".join(f"--{name.replace('_', '-')} {size}" for name, size in GPT_350M.items())
    flags += f" --batch-size {SEQUENCES} --microbatches 1 --dtype bf16"
    args = hybrid.parse(flags.split(), 1)
    trainer = hybrid.Trainer(args, hybrid.make_mesh(args, device=device), device)
    tokens = torch.randint(GPT_350M["vocab_size"], (SEQUENCES, GPT_350M["seq_len"] + 1))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def nano(loss_of, model, optimizer):
        inputs, targets = (x.pin_memory().to(device, non_blocking=True) for x in batch)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(model, inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    contenders = {"ours": lambda: trainer.step(*batch)}
    for name, loss_of in (("plain", _loss), ("plain, compiled", torch.compile(_loss))):
        model = ReferenceGPT(**GPT_350M | {"layers": 0})
        for _ in range(GPT_350M["layers"]):  # layers with fused attention
            model.transformer.h.append(_plain_block(GPT_350M["hidden"], GPT_350M["heads"]))
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        contenders[name] = partial(nano, loss_of, model, optimizer)
    return take_turns(contenders, rounds), sum(p.numel() for p in model.parameters())


def _microseconds(call, rounds=9, calls=500):
    """Return the CPU time of one call in the best round."""
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        for _ in range(calls):
            call()
        times.append((time.thread_time() - began) / calls * 1e6)
    return min(times)


def bench_host(arguments):
    """Time the Python code of exchanges and an all-reduce as on NCCL, in a fake group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    tensors = [torch.zeros(64) for _ in range(14)]
    with as_on_nccl(collectives.post_batch):
        for count in (2, 14):
            peers = range(1, count // 2 + 1)
            sends = [(tensors[peer - 1], peer) for peer in peers]
            receives = [(tensors[-peer], peer) for peer in peers]
            took = _microseconds(partial(collectives.exchange, sends, receives))
            print(f"batch of {count} messages: {took:.0f} us")
        for kilobytes in (1, 64):
            tensor = torch.zeros(kilobytes * KB // 4)
            took = _microseconds(partial(collectives.all_reduce, tensor))
            print(f"all_reduce of {kilobytes} KB over 8 ranks: {took:.0f} us")
    dist.destroy_process_group()


def _time_batches(device, count=500):
    """Return the seconds of a batch of two small messages: on the host, and until its end."""
    rank, world_size = collectives.rank_and_size()
    x, y = torch.zeros(2, 64, device=device)
    messages = [(x, (rank + 1) % world_size)], [(y, (rank - 1) % world_size)]
    for _ in range(10):
        collectives.exchange(*messages)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        collectives.exchange(*messages)
    launched = time.perf_counter()
    torch.cuda.synchronize()
    return (launched - began) / count, (time.perf_counter() - began) / count


def _time_on_gpus(device, sizes, rounds):
    """Return the seconds of our operations and of the backend's, on this GPU."""
    times = {}
    for operation in OPERATIONS:
        for size in sizes:
            with torch.device(device):
                contenders = _contenders(operation, size)
            timed = {n: partial(_call_and_wait, call) for n, call in contenders.items()}
            times[operation, size] = take_turns(timed, rounds)
    return times


def _call_and_wait(call):
    call()
    torch.cuda.synchronize()


def bench_gpu(arguments):
    """Show tokens/s and MFU of a 350M GPT in bf16 and, with several GPUs, the time of messages."""
    if not torch.cuda.is_available():
        sys.exit("bench.py gpu: there is no GPU on this machine")
    gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        kind = lambda name: (on_device, "nccl", f"{folder}/{name}", 600)
        on = lambda n, name, *call: run(n, *kind(name), *call, timeout=3000)
        times, parameters = on(1, "gpt", _time_gpt, arguments.rounds)[0]
        sizes = [KB, 16 * KB, 256 * KB, MB, 4 * MB, 25 * MB]
        if gpus > 1:
            host, device = on(gpus, "batches", _time_batches)[0]
            messages = on(gpus, "messages", _time_on_gpus, sizes, arguments.rounds)[0]
    name = torch.cuda.get_device_name()
    peak = next((gpu.tflops for kind, gpu in GPUS.items() if kind in name.lower()), math.nan)
    L, D, T = (GPT_350M[size] for size in ("layers", "hidden", "seq_len"))
    flops = 6 * (parameters - T * D) + 12 * L * D * T  # per token, as in PaLM (Chowdhery, 2022)
    print(f"{name}; {parameters / 1e6:.0f}M parameters, {SEQUENCES} x {T} tokens a step")
    for contender, seconds in times.items():
        rate = SEQUENCES * T / seconds
        report(f"{contender} on {name}", seconds, "plain", times["plain"])
        print(f"{contender:16}{rate:9.0f} tokens/s  MFU {rate * flops / peak / 1e12:4.0%}")
    if gpus > 1:
        print(f"a batch: {host * 1e6:.0f} us of the host, {device * 1e6:.0f} us in all")
        for (operation, size), t in messages.items():
            what = f"{operation}, {gpus} x {name}, {size // KB} KB"
            report(what, t["ours"], "NCCL's", t["theirs"])


BENCHMARKS = {
    "collectives": bench_collectives, "data_parallel": bench_data_parallel,
    "pipeline": bench_pipeline, "tensor_parallel": bench_tensor_parallel,
    "context_parallel": bench_context_parallel, "recomputation": bench_recomputation,
    "expert_parallel": bench_expert_parallel, "host": bench_host, "gpu": bench_gpu,
}  # fmt: skip
WORLD_SIZES = {"collectives": [2, 4], "context_parallel": [2, 4]}  # the other subjects: [2]


def scheduling():
    """Return the scheduling classes of this process's threads that Python did not start."""
    if not hasattr(os, "SCHED_BATCH"):
        return ["unknown"]
    names = {os.SCHED_OTHER: "SCHED_OTHER", os.SCHED_BATCH: "SCHED_BATCH"}
    of_python = {thread.native_id for thread in threading.enumerate()}
    others = set(map(int, os.listdir("/proc/self/task"))) - of_python
    return sorted({names.get(policy, str(policy)) for policy in map(os.sched_getscheduler, others)})


def main(words=None):
    arguments = _parser().parse_args(words)
    print(f"gloo's threads: {', '.join(run(2, scheduling)[0])}")
    given, failed = arguments.world_sizes, {}
    on_cpu = [subject for subject in BENCHMARKS if subject != "gpu" or torch.cuda.is_available()]
    subjects = [arguments.subject] if arguments.subject else on_cpu
    began = time.perf_counter()
    for subject in subjects:
        print(f"\n==== {time.perf_counter() - began:.0f} s: {subject}", flush=True)
        arguments.world_sizes = given or WORLD_SIZES.get(subject, [2])
        try:
            BENCHMARKS[subject](arguments)
        except Exception:
            traceback.print_exc()
            failed[subject] = headline(traceback.format_exc())
    for subject, error in failed.items():
        print(f"{subject} FAILED: {error}")
    sys.exit(1 if failed else 0)


def _parser():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawTextHelpFormatter
    parser.add_argument("subject", nargs="?", choices=list(BENCHMARKS))
    parser.add_argument("--world-sizes", type=hybrid.at_least(1), nargs="+")
    parser.add_argument("--rounds", type=hybrid.at_least(1), default=5)
    return parser


def report(what, ours, beside, theirs):
    """Print a row. Arguments are in seconds, columns in milliseconds."""
    times = f"{1e3 * ours:9.3f}  {beside:19}{1e3 * theirs:9.3f}{ours / theirs:7.2f}"
    print(f"{what:54}{times}", flush=True)


if __name__ == "__main__":
    main()
