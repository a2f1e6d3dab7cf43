"""Count the peak memory of one rank of any layout, and what it sends in a step, on one machine.

    python tests/tools/rehearse.py --gpus 16384 --rank 0 --model llama3-405b --tp 8 --pp 16

The Trainer of hybrid.py takes a step as that rank, in one process. Tensors have shapes but no
memory, and messages are not sent. All ranks are assumed to have the same values, and all experts
the same load. A node has 8 GPUs. "tp+ep" means groups of tp and ep that consist of the same ranks.
A batch of messages costs the host about 60 us. The formula of a paper, if there is one, stands
beside the count:

    parameters    held between steps                               ZeRO, Rajbhandari et al., 2020
    gradients     the peak: shards, and two units whole; ZeRO-1    ZeRO, in 32 bits
                  keeps all whole if there are several microbatches
    optimizer     its state and, for bf16, the 32-bit weights      ZeRO
    activations   the peak of the rest, with ZeRO-3's gathered parameters and messages' buffers
    all at once   the step's peak; the kinds above reach their own peaks at different times
    tp, MB sent   8 b s h (t-1)/t elements a layer, --sp: 10       Megatron-LM, Shoeybi et al., 2019
    pp, MB sent   activations; sums of tied weights are extra      Narayanan et al., 2021
    dp, MB sent   scatters, gathers, and sums over --replicate     ZeRO; HSDP, Zhao et al., 2023
"""

import math
import sys
import weakref
from collections import Counter, defaultdict
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support"), str(TESTS / "tools")]

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import hybrid
from collectives import observe
from expert_parallel import DispatchPlan
from gpu_counts import as_alone, fused_rms_norm, turns_in_same_modes
from models import GPUS, MODELS
from progress import progress, say_actions
from tensor_parallel import attention
from trace import axes_of
from zero import zero_memory, zero_rounds

PER_NODE = 8


class Watch(TorchDispatchMode):
    """Log the memory of all tensors made inside, and count the messages that observe() reports.

    log: a list of (a storage's record, its new size in bytes). sent: {axis: {what: number}}.
    """

    def __init__(self):
        super().__init__()
        self.records, self.log, self.axes, self.begun = {}, [], {}, set()
        self.sent = defaultdict(Counter)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        if options.get("device") == torch.device("meta"):
            options = options | {"device": "cpu"}  # where a fake tensor takes no memory, either
        result = function(*arguments, **options)
        results = result if isinstance(result, (tuple, list)) else [result]
        for tensor in filter(torch.is_tensor, results):
            self.hold(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        return result

    def hold(self, storage, nbytes):
        key = storage._cdata  # a private number, which serves as an address
        if key not in self.records:
            self.records[key] = SimpleNamespace(kind="others", nbytes=0)
            weakref.finalize(storage, lambda: self.log.append((self.records.pop(key), 0)))
        self.log.append((self.records[key], nbytes))

    def mark(self, tensors, kind):
        """Set the kind of the tensors' storages, also in earlier entries of the log."""
        for tensor in filter(torch.is_tensor, tensors):
            self.records[tensor.untyped_storage()._cdata].kind = kind

    def listen(self, event, operation, sends=(), receives=()):
        axis = self.axes.get(operation.group)
        if event != "post" or not axis:
            return
        counted = self.sent[axis]
        if axis == "dp" and "reduce" in operation.name and operation not in self.begun:
            self.begun.add(operation)  # later messages may be sent from scratch memory
            self.mark((tensor for tensor, _ in sends), "gradients")
        counted["batches"] += 1
        for tensor, peer in sends:
            nodes = {operation.ranks[end] // PER_NODE for end in (operation.rank, peer)}
            counted["sent"] += tensor.nbytes
            counted["between"] += tensor.nbytes * (len(nodes) > 1)


@contextmanager
def stand_ins(watch, args, rank):
    """Replace the values, addresses and memory of tensors, and the other ranks, by stand-ins."""
    tokens = args.batch_size // args.dp // args.microbatches * args.seq_len // args.cp // args.tp
    slices_of = hybrid.slices_of
    hop = SimpleNamespace(rows=0)  # what this rank sends in it

    def parts_of(plan, parts=DispatchPlan.wait_for_counts):  # a token goes to a node once
        ranks = dist.get_process_group_ranks(plan.group)
        crosses = len({rank // PER_NODE for rank in ranks}) > 1
        of_token = min(args.topk_nodes, args.top_k) if crosses else args.top_k
        hop.rows = tokens * of_token
        return parts(plan)

    def tolist(tensor):  # an int tensor counts the rows for each rank's experts
        is_float, parts = tensor.is_floating_point(), math.prod(tensor.shape[1:])
        return np.full(tensor.shape, 0 if is_float else hop.rows // parts).tolist()

    def resize(storage, nbytes, resize_=torch.UntypedStorage.resize_):
        watch.hold(storage, nbytes)
        return resize_(storage, nbytes)

    own = lambda *of: {name: row[(row == rank).any(1)] for name, row in slices_of(*of).items()}
    address = lambda t: (t.untyped_storage()._cdata << 40) + t.storage_offset() * t.itemsize
    fused = lambda q, k, v, dropout: attention(q, k, v)  # the CPU's kernel has no dropout
    with (
        as_alone(),
        turns_in_same_modes(),
        patch.object(DispatchPlan, "wait_for_counts", parts_of),
        patch.multiple(FakeTensor, tolist=tolist, item=lambda t: 0, data_ptr=address),
        patch.multiple(torch.UntypedStorage, data_ptr=lambda own: own._cdata, resize_=resize),
        patch.object(torch.nn.Module, "to_empty", lambda module, **_: module),
        patch.object(torch.nn.functional, "rms_norm", fused_rms_norm),
        patch.multiple(hybrid, slices_of=own, initialize=lambda *_: None, attention=fused),
    ):
        yield


@contextmanager
def trainer_of(args, rank):
    """Provide this rank's Trainer, whose tensors have no memory, and the Watch of its tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=args.world_size)
    watch = Watch()
    with stand_ins(watch, args, rank):
        mesh = hybrid.make_mesh(args)
        with FakeTensorMode(allow_non_fake_inputs=True), watch:
            yield hybrid.Trainer(args, mesh, torch.device("cpu")), watch


def rehearse(args, rank):
    """Take a step as this rank; return the Trainer, {kind: bytes} and {axis: {what: number}}."""
    with progress("builds the model") as say, trainer_of(args, rank) as (trainer, watch):
        say_actions(trainer.pipeline, say)
        tokens = torch.zeros(args.batch_size // args.dp, args.seq_len, dtype=torch.int64)
        watch.axes, built = axes_of(trainer.mesh), len(watch.log)
        with observe(watch.listen):
            trainer.step(tokens, tokens)
        say("adds up the memory")
        return trainer, most_memory(trainer, watch, built), watch.sent


def most_memory(trainer, watch, built):
    """Return {kind: peak bytes} of the step whose log begins at index `built`."""
    weights, states = trainer.parameters(), trainer.optimizer.state.values()
    watch.mark((weight.grad for weight in weights), "gradients")
    watch.mark((value for state in states for value in state.values()), "optimizer")
    watch.mark(weights if trainer.args.dtype == "bf16" else (), "optimizer")
    now, most = Counter(), Counter()
    for moment, (record, nbytes) in enumerate(watch.log):
        parameters = now["others"] if moment <= built else parameters
        now[record.kind] += nbytes - record.nbytes
        record.nbytes = nbytes
        now["total"] = now["gradients"] + now["others"]  # this step creates optimizer state
        most |= now if moment >= built else {}
    held = {"parameters": parameters, "gradients": most["gradients"]}
    held |= {"optimizer": most["optimizer"], "activations": most["others"] - parameters}
    return held | {"all at once": most["total"] + most["optimizer"]}


def formulas(trainer):
    """Return {kind or axis: bytes} that the rank holds, or sends in a step, by the papers."""
    args, mesh = trainer.args, trainer.mesh
    itemsize, state = (2, 12) if args.dtype == "bf16" else (4, 8)
    state -= 4 * (args.moments == "bf16")
    halves, t, found = 1 + trainer.replicated, args.tp, Counter()
    sums, gathers = zero_rounds(args.zero, args.microbatches // halves, args.recompute_layers)
    in_all = 4 * sums + gathers * (itemsize if args.zero else 4)
    for home in trainer.homes:
        parameters = trainer.parameters(home)
        number = sum(math.prod(getattr(p, "whole_shape", p.detach().shape)) for p in parameters)
        P, R = map(dist.get_world_size, (home.shard_group, home.replicate_group))
        found["parameters"] += number * zero_memory(args.zero, P, itemsize, 0, 0)
        found["gradients"] += 4 * number
        found["optimizer"] += number * zero_memory(args.zero, P, 0, 0, state)
        found["dp"] += number * (in_all * (P - 1) / P + 4 * sums / P * 2 * (R - 1) / R)
    if args.zero:
        size = lambda home: dist.get_world_size(home.shard_group)
        ranks = {p: size(home) for home in trainer.homes for p in trainer.parameters(home)}
        found["gradients"] = zero_gradients(args, trainer.chunks, ranks)
    bsh = args.batch_size // args.dp * args.seq_len // args.cp * args.hidden * itemsize // halves
    layers = 0 if args.experts else sum(len(chunk.transformer["h"]) for chunk in trainer.chunks)
    found["tp"] = layers * (10 if args.sp else 8) * bsh * (t - 1) / t
    borders = sum((not chunk.is_first) + (not chunk.is_last) for chunk in trainer.chunks)
    found["pp"] = borders * bsh / (t if args.sp else 1)
    return found


def zero_gradients(args, chunks, ranks):
    """Return the peak bytes of gradients with ZeRO. ranks: {parameter: number of its shards}.

    ZeRO-1 keeps whole gradients until the last microbatch. Then a unit's are summed at a time, and
    the shard of the sum is made beside them. With one microbatch it does what ZeRO-2 and 3 do: two
    units have whole gradients at a time, since one is summed while the next one is computed, and
    so have the parameters outside all units, such as the embedding, during the whole backward.
    """
    whole = lambda parameters: sum(4 * math.prod(p.whole_shape) for p in parameters)
    shard = lambda parameters: sum(4 * math.prod(p.whole_shape) / ranks[p] for p in parameters)
    units = [[[*block.parameters()] for block in c.transformer["h"].values()] for c in chunks]
    if args.zero == 1 and args.microbatches > 1:
        return whole(ranks) + max(map(shard, sum(units, [])), default=0)
    peaks = []
    for number, (chunk, blocks) in enumerate(zip(chunks, units)):
        others = set(chunk.parameters()).difference(*blocks)
        elsewhere = sum(units[:number] + units[number + 1 :], [])  # a chunk of one block follows
        peak = whole(others) + sum(map(whole, (blocks + elsewhere)[:2]))
        if args.microbatches == 1:  # the first gradients of these have no shards yet
            peak -= shard(others) + sum(map(shard, blocks[:1]))
        peaks.append(peak)
    return shard(ranks) + max(peaks)


def parse(argv, tool=sys.modules[__name__]):
    """Return the Args of hybrid.py, and the rank. Raise ValueError if a flag is invalid.

    tool: the module whose command it is.
    """
    parser = hybrid.Parser()
    parser.prog, parser.description = Path(tool.__file__).name, tool.__doc__.splitlines()[0]
    parser.usage = parser.epilog = None
    parser.add_argument("--gpus", type=hybrid.at_least(1), default=1, help=f"{PER_NODE} on a node")
    parser.add_argument("--rank", type=hybrid.at_least(0), default=0, help="which of these GPUs")
    parser.add_argument("--model", choices=MODELS, help="sizes of the model; flags override them")
    given, usual = vars(parser.parse_args(argv)), vars(hybrid.GPTConfig())
    gpus, rank, model = (given.pop(name) for name in ("gpus", "rank", "model"))
    if rank >= gpus:
        raise ValueError(f"--rank {rank} is not one of --gpus {gpus}")
    sizes = dict(vars(MODELS[model][1]).items() - usual.items()) if model else {}
    typed = [hybrid.as_typed(*flag).split(" ", 1) for flag in (sizes | given).items()]
    return hybrid.parse(sum(typed, []), gpus, min(gpus, PER_NODE)), rank


def main(argv=None):
    """Print what a rank holds and sends; return the exit status."""
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
    largest = max(GPUS, key=lambda name: GPUS[name].memory)
    if (needed := held["all at once"] / 1e9) > GPUS[largest].memory:
        print(f"no listed GPU has {needed:,.0f} GB: {largest} has most, {GPUS[largest].memory} GB")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
