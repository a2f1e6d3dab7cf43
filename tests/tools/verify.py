"""Does a layout of hybrid.py compute what one process does? The first thing to run on a cluster.

    torchrun --nproc-per-node 8 tests/tools/verify.py                24 layouts of 8 processes
    torchrun --nproc-per-node 8 tests/tools/verify.py --dtype bf16   the same in bf16
    torchrun --nproc-per-node 8 tests/tools/verify.py --block llama  the same for Llama's block
    torchrun --nproc-per-node 8 tests/tools/verify.py --tp 2 --sp    one layout; flags of hybrid.py
    python tests/tools/verify.py --sums                              the sums that layouts need

It runs on GPUs if the machine has one for each process. The initial weights are compared with those
that reference_gpt.py draws. Each layout then gets larger weights, with which attention is far from
uniform, and takes two steps, one of the warm-up and one of the decay, with an evaluation between
them. They are compared with those of that file, in fp64, on the whole batch: loss, gradient norm,
experts' load, every gradient after clipping, and every weight after each step; and the loss of the
evaluation, which may change nothing. So neither dropout is compared, nor how data are read, nor
checkpoints, nor text that is sampled. One line for each layout shows the worst difference, where it
is, and the flags:

    ok     1.8e-15  step 1 gradient transformer.h.6.ln_1.bias    --pp 1 --dp 8 --cp 1 --tp 1 ...

A difference is relative: norm(found - expected) / norm(expected). A layout is WRONG above 1e-9
(fp64, which replaces fp32 on CPUs), 1e-4 (fp32 on GPUs) or 5e-2 (bf16, tf32). With --block llama
the last is 0.15, because in bf16 one process alone differs by 8e-2 in 8 layers (GPT-2 by 4e-2). A
wrong scale or mask of attention gives 0.5 or more. A difference is inf if copies of a weight or
gradient on different ranks differ in a bit, if an initial value does, or if a value is not a
number.

The exit status is 1 if a layout is wrong and 2 if the flags are invalid. An error on any rank ends
the run with that rank's traceback, whose last line names the rank and the layout. Later layouts are
not tried, because other ranks may be inside an NCCL kernel that waits for the failed one.

The layouts are drawn at random, with a fixed seed. Some have stages without layers; some ("halves")
treat each half of a node as a node. A sum over processes is seen only in layouts that need it, and
each sum occurs in some layout of 2, 4 and 8 processes: --sums says in which one first. Below fp64
each token uses all experts, because rounding could change the router's choice. Flags whose result
depends on the layout are rejected: --dropout (see tests/test_hybrid.py and
tests/test_sequence_parallel.py), --capacity-factor and --topk-nodes.
"""

import hashlib
import math
import os
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from random import Random

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support"), str(TESTS / "tools")]

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import hybrid
from collectives import gather_objects
from pipeline import SCHEDULES
from reference_gpt import ReferenceTraining, initial_values, learning_rate, reference_gpt

BOUNDS = {"fp64": 1e-9, "fp32": 1e-4, "tf32": 5e-2, "bf16": 5e-2}
LLAMA = 3  # with --block llama, how many times these bounds are as large for bf16 and tf32
SEED = 2  # with it, each parallel sum occurs in some layout of 2, 4 and 8 processes
SHOWN = 2, 4, 8
STEPS = 0, 2  # in the first one the learning rate rises, in the second one it has begun to fall
EVALUATED = 2  # batches of the evaluation between them
INFINITE = "copies differ in a bit, or an initial value does, or a value is not a number"
OF_ALL = "block head rope_theta collectives device dtype moments seed timeout"
OF_ALL = {*OF_ALL.split()}  # flags that apply to all layouts
REFUSED = "dropout capacity_factor topk_nodes data checkpoint save_every eval_every"
REFUSED = {*REFUSED.split(), "print_every", "metrics", "sample", "prompt", "temperature"}


def sizes_of(world_size):
    """Return flags of a small model whose heads, tokens and layers divide among the processes."""
    heads = world_size * math.ceil(8 / world_size)
    sizes = f"--layers {max(4, world_size)} --hidden {8 * heads} --heads {heads} --ffn {16 * heads}"
    sizes += f" --seq-len {2 * heads} --vocab-size {8 * heads + 3} --steps 4 --warmup 1"
    return f"{sizes} --grad-clip 0.1 --weight-decay 0.2 --timeout 60".split()


def layouts(world_size, per_node, more=(), count=24, seed=SEED):
    """Draw `count` valid layouts; return (flags, processes of a node) for each.

    Each one is chosen from 50 draws: of the ten whose choices have occurred least often in the
    earlier layouts, the one with the most parallel sums that have not occurred.
    more: flags that are added to all layouts. seed: that of the draws.
    """
    random, seen, found = Random(seed), Counter(), []
    rarity = lambda choices: sum(0.5 ** seen[choice] for choice in choices)
    new_ones = lambda names: sum(name not in seen for name in names)
    while len(found) < count:
        drawn = [draw(random, world_size) for _ in range(50)]
        drawn.sort(key=rarity, reverse=True)
        valid = []
        for *flags, (nodes, last) in drawn:
            words, ranks = " ".join(flags).split(), per_node // nodes or 1
            with suppress(ValueError):
                args = hybrid.parse([*sizes_of(world_size), *words, *more], world_size, ranks)
                valid.append((sums_of(args), [*flags, (nodes, last)], words, ranks))
            if len(valid) == 10:
                break
        if valid:
            sums, choices, words, ranks = max(valid, key=lambda layout: new_ones(layout[0]))
            seen.update([*sums, *choices])
            found.append((words, ranks))
    return found


def draw(random, world_size):
    """Draw a layout, which may be invalid: return its flags and (nodes, last flag)."""
    degrees, left, pick = dict.fromkeys(("pp", "dp", "cp", "tp")), world_size, random.choice
    for axis in random.sample(list(degrees), 4):
        degrees[axis] = pick([d for d in range(1, left + 1) if left % d == 0])
        left //= degrees[axis]
    degrees["dp"] *= left
    pp, _, cp, tp = degrees.values()
    flags = degrees | {
        "layers": pick((1, 2, 3, world_size)),
        "microbatches": pick((1, 2)) * pp,
        "kv_heads": pick((tp, 2 * tp, world_size * math.ceil(8 / world_size))),
        "recompute": pick(("none", "selective", "full")),
        "zero": pick((0, 1, 2, 3)),
        "replicate": pick((None, 2)),
        "sp": pick((None, True)) if tp > 1 else None,
        "cp_method": pick(list(hybrid.CP_METHODS)) if cp > 1 else None,
        "schedule": pick(list(SCHEDULES)) if pp > 1 else None,
    }
    if top_k := pick((0, 1, 2, 3)):
        flags |= {"experts": world_size * math.ceil(4 / world_size), "top_k": top_k}
        flags |= {"balance": pick(("aux", "bias", "none")), "shared_experts": pick((0, 1))}
        flags |= {"moe_every": min(flags["layers"], pick((1, 2))), "ep": pick((1, 2, 4, 8))}
        if flags["schedule"] in hybrid.WITH_PAIRS:
            flags |= {"overlap": pick((None, True))}
    typed = [hybrid.as_typed(*flag) for flag in flags.items() if flag[1] is not None]
    return [*typed, (pick((1, 2)), typed[-1])]


def sums_of(args):
    """Return the parallel sums that a layout needs, each as "what is summed, over which ranks"."""
    degrees = args.pp, args.dp, args.cp, args.tp, args.ep, args.ep_nodes, args.replicate
    has = {name: rows.shape[1] > 1 for name, rows in hybrid.slices_of(*degrees).items()}
    tp, zero, shards = has["tp_group"], args.zero > 0, has["shard_group"]
    experts = any(args.has_experts(layer) for layer in range(args.layers))
    is_dualpipe = has["pp_group"] and args.schedule == "dualpipe"
    routes = hybrid.schedule_of(args).routes
    on_one_rank = {route[0][0] for route in routes} == {route[-1][0] for route in routes}
    sums = {
        "loss, pp": has["pp_group"],
        "products in forward, tp": tp and not args.sp,
        "gradients of inputs, tp": tp and not args.sp,
        "products in forward, tp with sp": args.sp,
        "rows of the embedding, tp": tp and not args.sp,
        "maximum of the logits, tp": tp,
        "exponentials of the logits, tp": tp,
        "gradients of k and v, cp by allgather": has["cp_group"] and args.cp_method == "allgather",
        "gradients of k and v, cp by ring": has["cp_group"] and args.cp_method == "ring",
        "gradients, copies of shards": zero and has["replicate_group"],
        "gradients of norms, tp": args.sp,
        "gradients of routers, tp": experts and tp,
        "gradients of the tied weight, pp": args.is_tied and has["pp_group"] and not on_one_rank,
        "gradients of DualPipe's replicas, pp": is_dualpipe,
        "gradients of experts, DDP": experts and not zero and has["expert_dp_group"],
        "gradients of experts, ZeRO": experts and zero and has["expert_shard_group"],
        "gradients of experts, copies of shards": experts and has["expert_replicate_group"],
        "gradients of experts, tp": experts and has["expert_tp_group"],
        "norm, pp": has["pp_group"],
        "norm, tp": tp,
        "norm, shards": zero and shards,
        "norm of experts, ep": experts and has["ep_group"],
        "norm of experts, shards": experts and zero and has["expert_shard_group"],
    }
    for axis in ("dp", "cp"):
        is_split = has[f"{axis}_group"]
        sums |= dict.fromkeys((f"number of tokens, {axis}", f"loss, {axis}"), is_split)
        sums[f"gradients, DDP over {axis}"] = is_split and not zero
        sums[f"gradients, ZeRO over {axis}"] = is_split and zero and args.replicate == 1
    for axis in ("dp", "cp", "tp"):
        sums[f"loads of experts, {axis}"] = experts and has[f"{axis}_group"]
        by_losses = experts and args.balance == "aux"
        sums[f"balance losses, {axis}"] = by_losses and has[f"{axis}_group"]
    return [name for name, is_needed in sums.items() if is_needed]


def data_of(args):
    """Return random tokens for training, and others for validation."""
    random = np.random.default_rng(args.seed)
    return hybrid.Data(*random.integers(args.vocab_size, size=(2, 10**4)))


def batch_of(args, step, rows=slice(None)):
    """Return rows of a random batch; the loss ignores a fifth of its tokens, and its first rows."""
    data = data_of(args)
    inputs, targets = data.batch(step, args.batch_size, args.seq_len, args.seed, rows)
    is_first = torch.arange(args.batch_size)[rows] < args.batch_size // 8
    return inputs, targets.masked_fill((targets % 5 == 0) | is_first[:, None], hybrid.IGNORE_INDEX)


def gathered(trainer, value=lambda tensor: tensor):
    """Return {name: whole tensor}: nan where no rank has a value, inf where copies differ."""
    own = []
    for row in trainer.originals():
        tensor = value(row.tensor)
        if tensor is not None:
            whole = hybrid.boxes_of(row, tensor)
            for place, box in whole.boxes.items():
                own.append((row.name, whole.shape, place, box.detach().cpu().clone()))
    wholes = {}
    for name, shape, place, box in sum(gather_objects(own), []):
        whole = wholes.setdefault(name, torch.full(shape, math.nan, dtype=torch.float64))
        part = whole[inside(place, box)]
        part.copy_(box.double().masked_fill((part != box) & ~part.isnan(), math.inf))
    return wholes


@lru_cache(maxsize=None)
def weight_of(name, shape, seed):
    """Return a weight with which each part of the model matters to the loss.

    GPT-2's initial weights are so small that attention is nearly uniform: faults in its scale or
    mask would look like bf16's rounding. With these, scores have a standard deviation of 1.6. Much
    larger weights would amplify rounding. Norms and biases differ from element to element, so that
    none can take another's place.
    """
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    generator = torch.Generator().manual_seed(number + seed)
    value = torch.randn(shape, generator=generator, dtype=torch.float32) / 4
    if len(shape) > 1:
        return value * 5 / shape[-1] ** 0.5
    return value if name.endswith("bias") else value + 1


@torch.no_grad()
def set_weights(trainer):
    """Set this rank's part of every parameter to its part of weight_of()."""
    for row in trainer.placements:
        if not row.is_buffer:
            whole = hybrid.boxes_of(row, row.tensor)
            for place, box in whole.boxes.items():
                value = weight_of(row.name, whole.shape, trainer.args.seed)
                box.copy_(value[inside(place, box)])


def inside(place, box):
    """Return the index of a box in the whole tensor, where its first element is at `place`."""
    return tuple(slice(i, i + size) for i, size in zip(place, box.shape))


def record(args, mesh, device):
    """Return the initial weights, all ranks' losses of an evaluation between two steps, and
    (all ranks' numbers, gradients, weights) of these steps.
    """
    trainer = hybrid.Trainer(args, mesh, device)
    first, steps = gathered(trainer), []
    set_weights(trainer)
    names = numbers_of(args)
    for step in STEPS:
        if steps:
            loss = hybrid.evaluate(trainer, data_of(args), EVALUATED)
        trainer.steps_done = step
        metrics = trainer.step(*batch_of(args, step, trainer.own_rows()))
        reported = torch.tensor(gather_objects([metrics[name] for name in names])).T
        gradients = gathered(trainer, lambda parameter: parameter.grad)
        steps.append((dict(zip(names, reported)), gradients, gathered(trainer)))
    return first, torch.tensor(gather_objects(loss)), *steps


def numbers_of(args):
    """Return the names of the metrics that are compared."""
    return ("loss", "grad_norm", "expert_load") if args.experts else ("loss", "grad_norm")


@torch.no_grad()
def validation_loss(model, args, device):
    """Return the mean loss of one process over the batches of the evaluation."""
    validation = data_of(args).validation
    data, losses = hybrid.Data(validation, validation), []
    for index in range(EVALUATED):
        batch = data.batch(index, args.batch_size, args.seq_len, args.seed)
        inputs, targets = (tokens.to(device) for tokens in batch)
        losses.append(cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
    return torch.stack(losses).mean()


def compare(args, device, first, evaluated, *steps):
    """Compare what record() returns with one process; return {what: relative difference}.

    Initial values must be equal in every bit, since all layouts draw the same numbers in fp32. The
    process updates its weights with the layout's gradients. Where a gradient should be zero,
    the layout may have a rounding error instead, which Adam would turn into a full step.
    """
    model = reference_gpt(args).double().to(device)
    is_rounded = args.moments == "bf16"
    one = ReferenceTraining(model, (), args.weight_decay, args.grad_clip, is_rounded)
    weights = dict(model.named_parameters())
    biases = {name.replace("bias", "router.bias"): bias for name, bias in model.named_buffers()}
    found = differences("initial", first, initial_values(model, args.seed) | biases)
    for what, error in found.items():
        found[what] = math.inf if error else 0.0
    for name, weight in weights.items():
        weight.data.copy_(weight_of(name, weight.shape, args.seed))
    rows = torch.arange(args.batch_size, device=device).view(args.dp, args.microbatches, -1)
    microbatches = rows.transpose(0, 1).flatten(1)
    for step, (reported, gradients, new_weights) in zip(STEPS, steps):
        if step > 0:
            expected = {"loss": validation_loss(model, args, device)}
            found |= differences("evaluation", {"loss": evaluated}, expected)
        (inputs, targets), when = batch_of(args, step), f"step {step + 1}"
        expected = [*one.backward(inputs.to(device), targets.to(device), microbatches)]
        loads = [layer.counts.max() / layer.counts.mean() for layer in one.mixtures]
        expected = map(torch.as_tensor, [*expected, max(loads, default=1)])
        found |= differences(when, reported, dict(zip(numbers_of(args), expected)))
        expected = {name: weight.grad for name, weight in weights.items()}
        found |= differences(f"{when} gradient", gradients, expected)
        for name, weight in weights.items():
            weight.grad.copy_(gradients[name])
        rate = learning_rate(step, args)
        one.update(rate, bias_rate=float(np.float32(0.001)) if args.balance == "bias" else 0.0)
        found |= differences(when, new_weights, weights | biases)
    return found


def differences(when, found, expected):
    """Return {when and what: norm of the difference / norm}; nan becomes infinity."""
    errors = {}
    for name, tensor in expected.items():
        tensor = tensor.double()
        error = (found[name].to(tensor) - tensor).norm() / tensor.norm().clamp(min=1e-300)
        errors[f"{when} {name}"] = error.nan_to_num(math.inf, math.inf).item()
    return errors


def judge(args, device, groups):
    """Return the worst difference and its name, the same on all ranks. Collective.

    groups: the process groups of earlier layouts, which are reused.
    """
    recorded = record(args, hybrid.make_mesh(args, groups, device), device)
    found = compare(args, device, *recorded) if dist.get_rank() == 0 else {}
    worst = max(found.items(), key=lambda item: item[1], default=("", 0.0))
    return max(gather_objects(worst[::-1]))


def verify(argv, args, device):
    """Judge each layout, print a line for it on rank 0, and return the exit status. Collective.

    argv: the command line. args: the Args that hybrid.main() parses from it.
    """
    given, world_size = vars(hybrid.Parser().parse_args(argv)), args.world_size
    for name in REFUSED & given.keys():
        raise hybrid.TrainingError(f"{hybrid.as_typed(name, given[name])} has no use here", 2)
    precision = "fp64" if device.type == "cpu" and args.dtype == "fp32" else args.dtype
    torch.set_default_dtype(torch.float64 if precision == "fp64" else torch.float32)
    is_one, groups, errors = given.keys() - OF_ALL, {}, []
    bound = BOUNDS[precision]
    if args.is_llama and precision in ("tf32", "bf16"):
        bound *= LLAMA
    rows = [(argv, args.per_node)]
    if not is_one:
        drawn = layouts(world_size, args.per_node, argv) if dist.get_rank() == 0 else None
        rows, *_ = gather_objects(drawn)
    say = partial(print, flush=True) if dist.get_rank() == 0 else lambda line: None
    for words, per_node in rows:
        layout = hybrid.parse([*sizes_of(world_size), *words, *argv], world_size, per_node)
        if precision != "fp64" and layout.experts:
            layout = replace(layout, top_k=layout.experts)
        shown = " ".join([*words, " halves"] if per_node < args.per_node else words)
        try:
            error, what = judge(layout, device, groups)
        except Exception as raised:
            raised.add_note(f"verify.py: rank {dist.get_rank()}, in {shown}")
            raise
        mark = "ok" if error <= bound else "WRONG"
        say(f"{mark:5}  {error:7.1e}  {what:50}  {shown}")
        errors.append(error)
    wrong, found = sum(error > bound for error in errors), f"{max(errors):.1e}"
    what = f"{len(rows)} layouts on {world_size} x {device.type} in {precision}"
    say(f"{what}: {wrong} wrong, worst difference {found}, bound {bound:.1e}")
    if math.inf in errors:
        say(f"inf: {INFINITE}")
    return int(wrong > 0)


def show_sums():
    """Print each parallel sum, and the number of the first layout in which it shows."""
    first = {}  # {sum: {number of processes: number of the layout}}
    for world_size in SHOWN:
        for number, (words, per_node) in enumerate(layouts(world_size, world_size), 1):
            args = hybrid.parse([*sizes_of(world_size), *words], world_size, per_node)
            for name in sums_of(args):
                first.setdefault(name, {}).setdefault(world_size, number)
    print(f"{'the first layout with this sum, of':42}", *(f"{size:3} processes" for size in SHOWN))
    for name, numbers in sorted(first.items()):
        print(f"{name:42}", *(f"{numbers.get(size, '-'):>13}" for size in SHOWN))


if __name__ == "__main__":
    argv, environment = sys.argv[1:], os.environ
    if {"-h", "--help"} & set(argv):
        sys.exit(None if environment.get("RANK", "0") > "0" else print(__doc__))
    if argv == ["--sums"]:
        sys.exit(show_sums())
    sizes = sizes_of(int(environment.get("WORLD_SIZE", 1)))
    sys.exit(hybrid.main([*sizes, *argv], partial(verify, argv)))
