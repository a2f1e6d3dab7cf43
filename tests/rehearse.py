"""What does one rank of any world hold at most, and what does it send in a step? Counted.

    python tests/rehearse.py --gpus 16384 --rank 0 --model llama3-405b --tp 8 --pp 16 --dtype bf16

The Trainer of hybrid.py takes a step as that rank, in one process: tensors have shapes and no
memory, messages go nowhere, other ranks are taken to have what this one has, and experts even
loads. A node has 8 GPUs. "tp+ep" is of groups that have the same ranks. A batch of messages costs
the host some 60 us. Beside what is counted stands a formula, where a paper has one:

    parameters    between steps                                    ZeRO, Rajbhandari et al., 2020
    gradients     most at once, of whole ones or of shards         ZeRO, of 32 bits
    optimizer     its state, and with bf16 the 32-bit weights      ZeRO
    activations   most at once of all else: what ZeRO-3 gathers, what messages need
    all at once   at the step's peak, which need not be that of gradients or activations
    tp, MB sent   8 b s h (t-1)/t elements a layer, --sp: 10       Megatron-LM, Shoeybi et al., 2019
    pp, MB sent   activations, not sums of copied parameters       Narayanan et al., 2021
    dp, MB sent   without what --replicate adds                    ZeRO
"""

import math
import sys
import weakref
from collections import Counter, defaultdict
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import hybrid
from collectives import observe
from gpu_counts import as_alone
from plan import MODELS
from tensor_parallel import attention, part_of
from trace import axes_of
from zero import zero_memory, zero_rounds

PER_NODE = 8


class Watch(TorchDispatchMode):
    """Logs memory that tensors made inside have, or would have, and counts what observe() tells.

    log: (a storage's record, its bytes from now on). sent: {axis: {what: number}}.
    """

    def __init__(self):
        super().__init__()
        self.records, self.log, self.axes, self.begun = {}, [], {}, set()
        self.sent = defaultdict(Counter)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        if options.get("device") == torch.device("meta"):
            options = options | {"device": "cpu"}  # has no memory here, either
        result = function(*arguments, **options)
        results = result if isinstance(result, (tuple, list)) else [result]
        for tensor in filter(torch.is_tensor, results):
            self.hold(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        return result

    def hold(self, storage, nbytes):
        key = storage._cdata  # Private: stands for an address
        if key not in self.records:
            self.records[key] = SimpleNamespace(kind="others", nbytes=0)
            weakref.finalize(storage, lambda: self.log.append((self.records.pop(key), 0)))
        self.log.append((self.records[key], nbytes))

    def mark(self, tensors, kind):
        """Say of which kind their storages are, and have been."""
        for tensor in filter(torch.is_tensor, tensors):
            self.records[tensor.untyped_storage()._cdata].kind = kind

    def listen(self, event, operation, sends=(), receives=()):
        axis = self.axes.get(operation.group)
        if event != "post" or not axis:
            return
        counted = self.sent[axis]
        if axis == "dp" and "reduce" in operation.name and operation not in self.begun:
            self.begun.add(operation)  # its later messages may be of scratch memory
            self.mark((tensor for tensor, _ in sends), "gradients")
        counted["batches"] += 1
        for tensor, peer in sends:
            nodes = {operation.ranks[end] // PER_NODE for end in (operation.rank, peer)}
            counted["sent"] += tensor.nbytes
            counted["between"] += tensor.nbytes * (len(nodes) > 1)


@contextmanager
def stand_ins(watch, args, rank):
    """For what is not there: a tensor's values, address and memory, and other ranks."""
    tokens = args.batch_size // args.dp // args.microbatches * args.seq_len // args.cp // args.tp
    across = [min(args.topk_nodes, args.top_k)] if args.ep_nodes > 1 else []
    rows, slices_of = cycle([*across, args.top_k]), hybrid.slices_of  # of each token

    def tolist(tensor):  # how many rows go to each rank's experts; others are floats
        is_float, parts = tensor.is_floating_point(), math.prod(tensor.shape[1:])
        return np.full(tensor.shape, 0 if is_float else tokens * next(rows) // parts).tolist()

    def resize(storage, nbytes, resize_=torch.UntypedStorage.resize_):
        watch.hold(storage, nbytes)
        return resize_(storage, nbytes)

    own = lambda *of: {name: row[(row == rank).any(1)] for name, row in slices_of(*of).items()}
    address = lambda t: (t.untyped_storage()._cdata << 40) + t.storage_offset() * t.itemsize
    fused = lambda q, k, v, dropout: attention(q, k, v)  # without dropout, which a CPU's has not
    with (
        as_alone(),
        patch.multiple(FakeTensor, tolist=tolist, item=lambda t: 0, data_ptr=address),
        patch.multiple(torch.UntypedStorage, data_ptr=lambda own: own._cdata, resize_=resize),
        patch.object(torch.nn.Module, "to_empty", lambda module, **_: module),
        patch.multiple(hybrid, slices_of=own, initialize=lambda *_: None, attention=fused),
    ):
        yield


def rehearse(args, rank):
    """(the Trainer after a step as this rank, {kind: bytes held}, {axis: {what: number}})."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=args.world_size)
    watch = Watch()
    with stand_ins(watch, args, rank):
        mesh = hybrid.make_mesh(args)
        with FakeTensorMode(allow_non_fake_inputs=True), watch:
            trainer = hybrid.Trainer(args, mesh, torch.device("cpu"))
            tokens = torch.zeros(args.batch_size // args.dp, args.seq_len, dtype=torch.int64)
            watch.axes, built = axes_of(mesh), len(watch.log)
            with observe(watch.listen):
                trainer.step(tokens, tokens)
            return trainer, most_memory(trainer, watch, built), watch.sent


def most_memory(trainer, watch, built):
    """{kind: bytes} at most, in the step that is the log from there on."""
    weights, states = trainer.dense + trainer.experts, trainer.optimizer.state.values()
    watch.mark((weight.grad for weight in weights), "gradients")
    watch.mark((value for state in states for value in state.values()), "optimizer")
    watch.mark(weights if trainer.args.dtype == "bf16" else (), "optimizer")
    now, most = Counter(), Counter()
    for moment, (record, nbytes) in enumerate(watch.log):
        parameters = now["others"] if moment <= built else parameters
        now[record.kind] += nbytes - record.nbytes
        record.nbytes = nbytes
        now["total"] = now["gradients"] + now["others"]  # optimizer: only the first step makes it
        most |= now if moment >= built else {}
    held = {"parameters": parameters, "gradients": most["gradients"]}
    held |= {"optimizer": most["optimizer"], "activations": most["others"] - parameters}
    return held | {"all at once": most["total"] + most["optimizer"]}


def formulas(trainer):
    """{kind, or axis: bytes that the rank holds, or sends in a step}, by the papers."""
    args, mesh = trainer.args, trainer.mesh
    itemsize, state = (2, 12) if args.dtype == "bf16" else (4, 8)
    halves, t, found = 1 + trainer.replicated, args.tp, Counter()
    sums, gathers = zero_rounds(args.zero, args.microbatches // halves)
    in_all = 4 * sums + gathers * (itemsize if args.zero else 4)
    groups = (trainer.dense, mesh.shard_group), (trainer.experts, mesh.expert_shard_group)
    for parameters, shards in groups:
        number, P = sum(math.prod(part_of(p)[0]) for p in parameters), dist.get_world_size(shards)
        found["parameters"] += number * zero_memory(args.zero, P, itemsize, 0, 0)
        found["gradients"] += number * zero_memory(args.zero, P, 0, 4, 0)
        found["optimizer"] += number * zero_memory(args.zero, P, 0, 0, state)
        found["dp"] += number * in_all * (P - 1) / P
    bsh = args.batch_size // args.dp * args.seq_len // args.cp * args.hidden * itemsize // halves
    layers = 0 if args.experts else sum(len(chunk.transformer["h"]) for chunk in trainer.chunks)
    found["tp"] = layers * (10 if args.sp else 8) * bsh * (t - 1) / t
    borders = sum((not chunk.first) + (not chunk.last) for chunk in trainer.chunks)
    found["pp"] = borders * bsh / (t if args.sp else 1)
    return found


def parse(argv):
    """(the flags of hybrid.py, completed; the rank). Raises ValueError, one line."""
    parser = hybrid.Parser()
    parser.prog, parser.description = Path(__file__).name, __doc__.splitlines()[0]
    parser.add_argument("--gpus", type=hybrid.at_least(1), default=1, help=f"{PER_NODE} on a node")
    parser.add_argument("--rank", type=hybrid.at_least(0), default=0, help="which of them")
    parser.add_argument("--model", choices=MODELS, help="of the literature, but for flags given")
    given, usual = vars(parser.parse_args(argv)), vars(hybrid.GPTConfig())
    gpus, rank, model = (given.pop(name) for name in ("gpus", "rank", "model"))
    if rank >= gpus:
        raise ValueError(f"--rank {rank} is not one of --gpus {gpus}")
    sizes = dict(vars(MODELS[model][1]).items() - usual.items()) if model else {}
    typed = [hybrid.as_typed(*flag).split(" ", 1) for flag in (sizes | given).items()]
    return hybrid.parse(sum(typed, []), gpus, min(gpus, PER_NODE)), rank


def main(argv=None):
    """Print what a rank holds and sends. Returns the exit status."""
    try:
        args, rank = parse(sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        return 2
    trainer, held, sent = rehearse(args, rank)
    claims, layers = formulas(trainer), [i for c in trainer.chunks for i in c.transformer["h"]]
    print(f"rank {rank} of {args.world_size}, layers", *layers)
    print(f"{'':20}{'counted':>16}{'formula':>16}{'difference':>12}")
    rows = [(f"{kind}, MB", held[kind], claims[kind], "") for kind in held]
    for axis, of in sent.items():
        more = f"  {of['between'] / 1e6:,.3f} between nodes, {of['batches']:,} batches"
        rows.append((f"{axis}, MB sent", of["sent"], claims[axis], more))
    for what, found, claim, more in rows:
        compared = f"{claim / 1e6:16,.3f}{found / claim - 1:12.2%}" if claim else " " * 28
        print(f"{what:20}{found / 1e6:16,.3f}{compared}{more}".rstrip())
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
