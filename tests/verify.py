"""Does a layout of hybrid.py compute what one process does? The first thing to run on a cluster.

    torchrun --nproc-per-node 8 tests/verify.py                      24 layouts of 8 processes
    torchrun --nproc-per-node 8 tests/verify.py --dtype bf16         the same in bf16
    torchrun --nproc-per-node 8 tests/verify.py --tp 2 --pp 2 --sp   one layout; flags of hybrid.py

It runs on GPUs if the machine has one for each process. Each layout takes two steps, which are
compared with two steps of tests/reference_gpt.py, in fp64, on the whole batch: loss, gradient norm,
every gradient after clipping, and every weight, at the start and after each step. One line for each
layout shows the worst difference, where it is, and the flags:

    ok     1.8e-15  step 1 gradient transformer.h.6.ln_1.bias    --pp 1 --dp 8 --cp 1 --tp 1 ...

A difference is relative: norm(found - expected) / norm(expected). A layout is WRONG above 1e-9
(fp64, which replaces fp32 on CPUs), 1e-4 (fp32 on GPUs) or 5e-2 (bf16, tf32). The exit status is 1
if a layout is wrong and 2 if the flags are invalid. An error on any rank ends the run with that
rank's traceback, whose last line names the rank and the layout. Later layouts are not tried,
because other ranks may be inside an NCCL kernel that waits for the failed one.

The layouts are drawn at random, with a fixed seed. Some have stages without layers; some ("halves")
treat each half of a node as a node. Below fp64 each token uses all experts, because rounding could
change the router's choice. Flags whose result depends on the layout are rejected: --dropout (see
tests/test_hybrid.py and tests/test_sequence_parallel.py), --capacity-factor and --topk-nodes.
"""

import math
import os
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import numpy as np
import torch
import torch.distributed as dist

import hybrid
from collectives import gather_objects
from pipeline import SCHEDULES
from reference_gpt import ReferenceTraining, reference_gpt

NUMBERS = "loss", "grad_norm"
BOUNDS = {"fp64": 1e-9, "fp32": 1e-4, "tf32": 5e-2, "bf16": 5e-2}
OF_ALL = {"collectives", "device", "dtype", "seed", "timeout"}  # flags that apply to all layouts
REFUSED = "dropout capacity_factor topk_nodes data checkpoint save_every eval_every"
REFUSED = {*REFUSED.split(), "print_every", "metrics", "sample", "prompt", "temperature"}


def sizes_of(world_size):
    """Return flags of a small model whose heads, tokens and layers divide among the processes."""
    heads = world_size * math.ceil(8 / world_size)
    sizes = f"--layers {max(4, world_size)} --hidden {8 * heads} --heads {heads} --ffn {16 * heads}"
    sizes += f" --seq-len {2 * heads} --vocab-size {8 * heads + 3} --steps 2 --warmup 1"
    return f"{sizes} --grad-clip 0.1 --weight-decay 0.2 --timeout 60".split()


def layouts(world_size, per_node, more=(), count=24):
    """Draw `count` valid layouts; return (flags, processes of a node) for each.

    Each one is the best of 50 draws: its choices have occurred least often in the earlier ones.
    more: flags that are added to all layouts.
    """
    random, seen, found = Random(0), Counter(), []
    while len(found) < count:
        drawn = [draw(random, world_size) for _ in range(50)]
        drawn.sort(key=lambda choices: -sum(0.5 ** seen[choice] for choice in choices))
        for *flags, (nodes, last) in drawn:
            words, ranks = " ".join(flags).split(), per_node // nodes or 1
            with suppress(ValueError):
                hybrid.parse([*sizes_of(world_size), *words, *more], world_size, ranks)
                found.append((words, ranks))
                seen.update([*flags, (nodes, last)])
                break
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
    typed = [hybrid.as_typed(*flag) for flag in flags.items() if flag[1] is not None]
    return [*typed, (pick((1, 2)), typed[-1])]


def batch_of(args, step, rows=slice(None)):
    """Return rows of a random batch; the loss ignores a fifth of its tokens, and its first rows."""
    tokens = np.random.default_rng(args.seed).integers(args.vocab_size, size=10**4)
    data = hybrid.Data(tokens, tokens)
    inputs, targets = data.batch(step, args.batch_size, args.seq_len, args.seed, rows)
    is_first = torch.arange(args.batch_size)[rows] < args.batch_size // 8
    return inputs, targets.masked_fill((targets % 5 == 0) | is_first[:, None], hybrid.IGNORE_INDEX)


def gathered(trainer, value=lambda tensor: tensor):
    """Return {name: whole tensor}: nan where no rank has a value, inf where copies differ."""
    own = [
        (name, whole.shape, place, box.detach().cpu().clone())
        for name, whole in hybrid.boxes_of(trainer, value).items()
        for place, box in whole.boxes.items()
    ]
    wholes = {}
    for name, shape, place, box in sum(gather_objects(own), []):
        whole = wholes.setdefault(name, torch.full(shape, math.nan, dtype=torch.float64))
        part = whole[tuple(map(slice, place, map(sum, zip(place, box.shape))))]
        part.copy_(box.double().masked_fill((part != box) & ~part.isnan(), math.inf))
    return wholes


def record(args, mesh, device):
    """Return the initial weights, and (all ranks' NUMBERS, gradients, weights) of two steps."""
    trainer = hybrid.Trainer(args, mesh, device)
    first, steps = gathered(trainer), []
    for step in range(2):
        metrics = trainer.step(*batch_of(args, step, trainer.own_rows()))
        reported = torch.tensor(gather_objects([metrics[name] for name in NUMBERS])).T
        gradients = gathered(trainer, lambda parameter: parameter.grad)
        steps.append((dict(zip(NUMBERS, reported)), gradients, gathered(trainer)))
    return first, *steps


def compare(args, device, first, *steps):
    """Compare what record() returns with one process; return {what: relative difference}.

    The process updates its weights with the layout's gradients. Where a gradient should be zero,
    the layout may have a rounding error instead, which Adam would turn into a full step.
    """
    model = reference_gpt(args).double().to(device)
    one = ReferenceTraining(model, (), args.weight_decay, args.grad_clip)
    weights = dict(model.named_parameters())
    biases = {name.replace("bias", "router.bias"): bias for name, bias in model.named_buffers()}
    for name, weight in weights.items():
        weight.data.copy_(hybrid.initial_value(name, weight.shape, args.layers, args.seed))
    rows = torch.arange(args.batch_size, device=device).view(args.dp, args.microbatches, -1)
    microbatches = rows.transpose(0, 1).flatten(1)
    found = differences("first", first, weights)
    for step, (reported, gradients, new_weights) in enumerate(steps):
        (inputs, targets), when = batch_of(args, step), f"step {step + 1}"
        expected = one.backward(inputs.to(device), targets.to(device), microbatches)
        found |= differences(when, reported, dict(zip(NUMBERS, map(torch.tensor, expected))))
        expected = {name: weight.grad for name, weight in weights.items()}
        found |= differences(f"{when} gradient", gradients, expected)
        for name, weight in weights.items():
            weight.grad.copy_(gradients[name])
        rate = hybrid.learning_rate(step, args)
        one.update(rate, bias_rate=float(np.float32(0.001)) if args.balance == "bias" else 0.0)
        found |= differences(when, new_weights, weights | biases)
    return found


def differences(when, found, expected):
    """Return {when and what: norm of the difference / norm}; nan becomes infinity."""
    errors = {}
    for name, tensor in expected.items():
        error = (found[name].to(tensor) - tensor).norm() / tensor.norm().clamp(min=1e-300)
        errors[f"{when} {name}"] = error.nan_to_num(math.inf, math.inf).item()
    return errors


def judge(args, device, groups):
    """Return the worst difference and its name, the same on all ranks. Collective.

    groups: the process groups of earlier layouts, which are reused.
    """
    recorded = record(args, hybrid.make_mesh(args, groups), device)
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
    rows = [(argv, args.per_node)] if is_one else layouts(world_size, args.per_node, argv)
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
        mark = "ok" if error <= BOUNDS[precision] else "WRONG"
        say(f"{mark:5}  {error:7.1e}  {what:50}  {shown}")
        errors.append(error)
    wrong, found = sum(error > BOUNDS[precision] for error in errors), f"{max(errors):.1e}"
    what = f"{len(rows)} layouts on {world_size} x {device.type} in {precision}"
    say(f"{what}: {wrong} wrong, worst difference {found}, bound {BOUNDS[precision]:.0e}")
    return int(wrong > 0)


if __name__ == "__main__":
    argv, environment = sys.argv[1:], os.environ
    if {"-h", "--help"} & set(argv):
        sys.exit(None if environment.get("RANK", "0") > "0" else print(__doc__))
    sizes = sizes_of(int(environment.get("WORLD_SIZE", 1)))
    sys.exit(hybrid.main([*sizes, *argv], partial(verify, argv)))
