"""What does one rank of any world hold at most, and what does it send in a step? Counted.

    python tests/rehearse.py --gpus 16384 --rank 0 --model llama3-405b --tp 8 --pp 16 --dtype bf16

The Trainer of hybrid.py takes a step as that rank, in this one process: tensors have shapes and no
memory, and messages of PyTorch's "fake" groups go nowhere. Other ranks are taken to have what this
one has, experts to have even loads; a node has 8 GPUs. Beside what is counted stands a paper's
formula, where there is one:

    parameters     between steps                                 ZeRO, Rajbhandari et al., 2020
    gradients      most at once, of whole ones or of shards      ZeRO, of 32 bits
    optimizer      its state, and with bf16 the 32-bit weights   ZeRO
    activations    most at once of all else: also what ZeRO-3 gathers, and what messages need
    all at once    at the step's peak, which need not be that of gradients or of activations
    tp, MB sent    8 b s h (t-1)/t elements a layer, 10 with --sp, without embedding, head and
                   recomputation                                 Megatron-LM, Shoeybi et al., 2019
    pp, MB sent    of activations; not what copies of a parameter sum    Narayanan et al., 2021
    dp, MB sent    not what --replicate adds                     ZeRO

Of groups with the same ranks the axes are told together, "tp+ep". A batch, of messages that NCCL
is given at once, costs the host some 60 us.
"""

import math
import sys
import weakref
from collections import Counter, defaultdict
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hybrid
from collectives import all_reduce_bytes, observe, reduce_scatter_bytes
from gpu_counts import as_on_nccl
from pipeline import pipeline_bytes
from plan import MODELS
from tensor_parallel import attention, part_of, tensor_parallel_layer_bytes
from trace import axes_of
from zero import zero_memory, zero_rounds

PER_NODE = 8
CPU, META = torch.device("cpu"), torch.device("meta")


class Watch(TorchDispatchMode):
    """Logs the memory that tensors made inside would have, and counts messages.

    log: (a storage's record, the bytes that it has from now on). A record's kind is "gradients", of
    those with which a sum over replicas begins, or "others". sent: {axis: {what: number}}.
    """

    def __init__(self):
        super().__init__()
        self.records, self.log, self.axes, self.begun = {}, [], {}, set()
        self.sent = defaultdict(Counter)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        if options.get("device") == META:
            options = options | {"device": CPU}  # has no memory here, either
        result = function(*arguments, **options)
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            self.hold(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        return result

    def hold(self, storage, nbytes):
        key = storage._cdata  # Private: stands for an address
        if key not in self.records:
            self.records[key] = SimpleNamespace(kind="others", nbytes=0)
            end = lambda: self.log.append((self.records.pop(key), 0))
            weakref.finalize(storage, end).atexit = False
        self.log.append((self.records[key], nbytes))

    def mark(self, tensors, kind):
        """Say of which kind these tensors' storages are, and have been."""
        for tensor in filter(torch.is_tensor, tensors):
            self.records[tensor.untyped_storage()._cdata].kind = kind

    def listen(self, event, operation, *messages):
        """To what observe() tells."""
        axis = self.axes.get(operation.group)
        if event != "post" or axis is None:
            return
        sends, _ = messages
        if axis == "dp" and "reduce" in operation.name and operation not in self.begun:
            self.begun.add(operation)  # its later messages may be of scratch memory
            self.mark((tensor for tensor, _ in sends), "gradients")
        counted = self.sent[axis]
        counted["batches"] += 1
        for tensor, peer in sends:
            nodes = {operation.ranks[end] // PER_NODE for end in (operation.rank, peer)}
            counted["sent"] += tensor.nbytes
            counted["between"] += tensor.nbytes * (len(nodes) > 1)


def stand_ins(watch, args, rank):
    """Patches for what is not there: a tensor's values, address and memory, and other ranks."""
    tokens = args.batch_size // args.dp // args.microbatches * args.seq_len // args.cp // args.tp
    hops = [args.topk_nodes] * (args.ep_nodes > 1) + [args.top_k]  # of a layer of experts
    rows = cycle([tokens * copies for copies in hops])
    slices_of, resize_ = hybrid.slices_of, torch.UntypedStorage.resize_

    def tolist(tensor):  # how many rows go to each rank's experts; others are floats
        count = 0 if tensor.is_floating_point() else next(rows) // math.prod(tensor.shape[1:])
        return np.full(tensor.shape, count).tolist()

    def resize(storage, nbytes):
        watch.hold(storage, nbytes)
        return resize_(storage, nbytes)

    def own(*degrees):
        return {name: rows[(rows == rank).any(1)] for name, rows in slices_of(*degrees).items()}

    address = lambda t: (t.untyped_storage()._cdata << 40) + t.storage_offset() * t.itemsize
    alike = lambda value, group=None: [value] * dist.get_world_size(group)
    fused = lambda q, k, v, dropout: attention(q, k, v)  # without dropout, which a CPU's has not
    yield as_on_nccl(batch_isend_irecv=lambda operations: [])
    yield patch.multiple(FakeTensor, tolist=tolist, data_ptr=address)
    yield patch.multiple(torch.UntypedStorage, data_ptr=lambda own: own._cdata, resize_=resize)
    yield patch.object(nn.Module, "to_empty", lambda module, **_: module)
    yield patch.multiple(hybrid, slices_of=own, initialize=lambda *_: None, attention=fused)
    for module in [m for m in sys.modules.values() if hasattr(m, "gather_objects")]:
        yield patch.object(module, "gather_objects", alike)


def rehearse(args, rank):
    """(the Trainer after a step as this rank, {kind: bytes held}, {axis: {what: number}})."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=args.world_size)
    watch = Watch()
    with ExitStack() as stack:
        for stand_in in stand_ins(watch, args, rank):
            stack.enter_context(stand_in)
        mesh = hybrid.make_mesh(args)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(watch)
        trainer = hybrid.Trainer(args, mesh, CPU)
        if hasattr(trainer.pipeline, "formats"):  # SHIM
            b, t = args.batch_size // (args.dp * args.microbatches), args.seq_len // args.cp
            shape = torch.Size([t // (args.tp if args.sp else 1), b, args.hidden])
            dtype = torch.bfloat16 if args.dtype == "bf16" else torch.get_default_dtype()
            places = [place for route in trainer.pipeline.schedule.routes for place in route]
            trainer.pipeline.formats |= dict.fromkeys(places, (b, dtype, shape))
        tokens = torch.zeros(args.batch_size // args.dp, args.seq_len, dtype=torch.int64)
        watch.axes, built = axes_of(mesh), len(watch.log)
        with observe(watch.listen):
            trainer.step(tokens, tokens)
        return trainer, most_memory(trainer, watch, built), watch.sent


def most_memory(trainer, watch, built):
    """{kind: bytes} at most, in the step that is the log from there on."""
    weights, states = trainer.dense + trainer.experts, trainer.optimizer.state.values()
    masters = sum(weight.nbytes for weight in weights) * (trainer.args.dtype == "bf16")
    watch.mark((weight.grad for weight in weights), "gradients")
    watch.mark((value for state in states for value in state.values()), "optimizer")
    now, most = Counter(), Counter()
    for moment, (record, nbytes) in enumerate(watch.log):
        if moment == built:
            parameters = now["others"]
        now[record.kind] += nbytes - record.nbytes
        record.nbytes = nbytes
        if moment >= built:  # any other step finds the optimizer's state there, of no memory yet
            now["total"] = now["gradients"] + now["others"]
            most |= now
    held = {"parameters": parameters - masters, "gradients": most["gradients"]}
    held |= {"optimizer": most["optimizer"] + masters, "activations": most["others"] - parameters}
    return held | {"all at once": most["total"] + most["optimizer"]}


def formulas(trainer):
    """{kind, or axis: bytes that the rank holds, or sends in a step}, by the papers."""
    args, mesh, found = trainer.args, trainer.mesh, Counter()
    routes, pp_rank = trainer.pipeline.schedule.routes, dist.get_rank(mesh.pp_group)
    itemsize, state = (2, 12) if args.dtype == "bf16" else (4, 8)
    m = args.microbatches // len(routes)
    sums, gathers = zero_rounds(args.zero, m)
    of_experts = trainer.experts, mesh.expert_shard_group
    for parameters, shards in (trainer.dense, mesh.shard_group), of_experts:
        number = sum(math.prod(part_of(parameter)[0]) for parameter in parameters)
        P = dist.get_world_size(shards)
        found["parameters"] += number * zero_memory(args.zero, P, itemsize, 0, 0)
        found["gradients"] += number * zero_memory(args.zero, P, 0, 4, 0)
        found["optimizer"] += number * zero_memory(args.zero, P, 0, 0, state)
        rounds = 4 * sums + gathers * (itemsize if args.zero else 4)
        found["dp"] += reduce_scatter_bytes(number * rounds, P)
    sizes = args.batch_size // args.dp // args.microbatches, args.seq_len // args.cp, args.hidden
    layers = 0 if args.experts else sum(len(chunk.transformer["h"]) for chunk in trainer.chunks)
    layer = tensor_parallel_layer_bytes(*sizes, args.tp, itemsize, regather=args.sp)
    found["tp"] = m * layers * layer
    tensor = math.prod(sizes) * itemsize // (args.tp if args.sp else 1)
    stages = [stage for route in routes for stage, (r, _) in enumerate(route) if r == pp_rank]
    found["pp"] = sum(pipeline_bytes(stage, len(routes[0]), m, tensor) for stage in stages)
    return found


def parse(argv):
    """(the flags of hybrid.py, completed; the rank). Raises ValueError, one line."""
    parser = hybrid.Parser()
    parser.prog, parser.description = Path(__file__).name, __doc__.splitlines()[0]
    own = parser.add_argument_group("rehearsal")
    own.add_argument("--gpus", type=hybrid.SIZE, default=1, help=f"{PER_NODE} on a node")
    own.add_argument("--rank", type=hybrid.COUNT, default=0, help="which of them")
    own.add_argument("--model", choices=MODELS, help="of the literature; flags override its sizes")
    given = vars(parser.parse_args(argv))
    gpus, rank, model = (given.pop(name) for name in ("gpus", "rank", "model"))
    if rank >= gpus:
        raise ValueError(f"--rank {rank} is not one of --gpus {gpus}")
    usual = vars(hybrid.GPTConfig())
    config = vars(MODELS[model][1]) if model else usual
    sizes = {name: value for name, value in config.items() if value != usual[name]}
    typed = [hybrid.as_typed(*flag).split(" ", 1) for flag in (sizes | given).items()]
    return hybrid.parse(sum(typed, []), gpus, min(gpus, PER_NODE)), rank


def show(trainer, held, sent):
    """Print the table."""
    mesh, claims = trainer.mesh, formulas(trainer)
    axes = ["pp", "dp", "cp", "tp"]
    ranks = [f"{axis} {dist.get_rank(getattr(mesh, f'{axis}_group'))}" for axis in axes]
    layers = [list(chunk.transformer["h"]) for chunk in trainer.chunks]
    layers = ", ".join(f"{own[0]} to {own[-1]}" if own else "none" for own in layers)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}, {', '.join(ranks)}: layers {layers}")
    print(f"{'':20}{'counted':>16}{'formula':>16}{'difference':>12}")
    rows = [(f"{kind}, MB", held[kind], claims[kind], "") for kind in held]
    for axis, of in sent.items():
        more = f"  {of['between'] / 1e6:,.3f} between nodes, {of['batches']:,} batches"
        rows.append((f"{axis}, MB sent", of["sent"], claims[axis], more))
    for what, found, claim, more in rows:
        compared = f"{claim / 1e6:16,.3f}{found / claim - 1:12.2%}" if claim else " " * 28
        print(f"{what:20}{found / 1e6:16,.3f}{compared}{more}".rstrip())


def main(argv=None):
    """Print what a rank holds and sends. Returns the exit status."""
    try:
        args, rank = parse(sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        return 2
    show(*rehearse(args, rank))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
