"""Schedules agree with their formulas and NCCL's rules, and the executor with one process."""

import copy
import inspect
import random
import re
import sys
from collections import Counter, deque
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate, product
from unittest.mock import MagicMock, patch
from weakref import ref

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import claims
import pipeline
from collectives import count_bytes, dist, gather_objects, observe, rank_and_size
from ddp import DistributedDataParallel
from gpu_counts import batches, nccl_over_gloo, waits
from pipeline import (
    NUM_CHUNKS, SCHEDULES, SHORT, Action, DeferredLinear, PairedSchedule, Pipeline, Schedule,
    WeightGradStore, claim, draw, dualpipe, dualpipe_v, forward_only, gpipe, gpipe_step, interleaved,
    one_f_one_b, one_f_one_b_step, pipeline_bytes, program, schedule_step, simulate, sum_replicas,
    zb_h1, zb_h2, zb_v,
)
from ranks import on_ranks, run, shifted, soak
from replicas import demonstration, interleaved_group
from zero import FullyShardedDataParallel

SIZES = [(p, m) for p in (1, 2, 3, 4, 6) for m in range(1, 4 * p + 1)]
MORE_SIZES = [(p, m) for p in (5, 7, 8) for m in range(1, 4 * p + 1)]

ALL = SCHEDULES | {"forward_only": forward_only}
every_schedule = pytest.mark.parametrize("name", SCHEDULES)
SEVERAL = "1f1b", "interleaved", "zb-v", "dualpipe"  # the others are soak tests
several_schedules = pytest.mark.parametrize(
    "name", [name if name in SEVERAL else soak(name) for name in SCHEDULES]
)


# ---- schedules -----------------------------------------------------------------------------------


# The sizes for which a schedule is defined, and those for which its formulas are exact.
DEFINED = {
    "interleaved": lambda p, m: m % p == 0,
    "dualpipe": lambda p, m: p % 2 == 0 and m % 2 == 0 and m >= 2 * p,
    "dualpipe-v": lambda p, m: m >= 2 * p,
}
EXACT = {"zb-h1": lambda p, m: m >= p, "zb-h2": lambda p, m: m >= 2 * p - 1,
         "zb-v": lambda p, m: m >= 2 * p}
SPLIT_TIMES = [(1, 2, 1), (2, 5, 2), (3, 4, 1)]  # forward, backward, W's part of backward


def _sizes_of(name, sizes=SIZES):
    return [size for size in sizes if DEFINED.get(name, lambda p, m: True)(*size)]


def test_forward_only_has_all_forwards_and_no_backward():
    for p, m in SIZES:
        assert forward_only(p, m) == [[("F", k, 0) for k in range(m)]] * p
        timeline = simulate(forward_only(p, m), forward=3)
        assert timeline.total == 3 * (m + p - 1) and timeline.bubble == [3 * (p - 1)] * p


THEIRS = {  # {name: (PyTorch's schedule, the stages of rank r of p)}
    "gpipe": (pipelining.ScheduleGPipe, lambda r, p: [r]),
    "1f1b": (pipelining.Schedule1F1B, lambda r, p: [r]),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, lambda r, p: [r, r + p]),
    "zb-v": (pipelining.ScheduleZBVZeroBubble, lambda r, p: [r, 2 * p - 1 - r]),
    "dualpipe-v": (pipelining.ScheduleDualPipeV, lambda r, p: [r, 2 * p - 1 - r]),
}


@pytest.mark.parametrize("name", THEIRS)
def test_actions_have_the_same_order_as_pytorchs(name):
    kind, stages_of = THEIRS[name]
    for p, m in _sizes_of(name, [(2, 4), (3, 6), (4, 4), (4, 16), (6, 12), (8, 24)]):
        sizes = {"group_size": p, "group_rank": 0, "num_stages": p * len(stages_of(0, p))}
        stages = [MagicMock(stage_index=i, is_first=i == 0, **sizes) for i in stages_of(0, p)]
        theirs = kind(stages if len(stages) > 1 else stages[0], m, loss_fn=print).pipeline_order
        for rank, found in enumerate(SCHEDULES[name](p, m)):
            chunk_of = {stage: chunk for chunk, stage in enumerate(stages_of(rank, p))}
            # pairs of a forward and a backward, in DualPipeV's order, are two actions here
            alone = sum(((*(a.sub_actions or [a]),) for a in filter(None, theirs[rank])), ())
            expected = [
                (a.computation_type.value, a.microbatch_index, chunk_of[a.stage_index])
                for a in alone
                if a.computation_type.value in "FBIW"
            ]
            if name == "1f1b":  # PyTorch numbers its microbatches from the rank's number on
                expected, found = ([action[0] for action in row] for row in (expected, found))
            assert found == expected


@pytest.mark.parametrize("sizes", [SIZES, soak(MORE_SIZES)], ids=["sizes", "more"])
@every_schedule
def test_bubble_and_peak_are_those_of_the_formulas(name, sizes):
    """If the caller chooses the chunks, there are 1 to 4. GPipe's backwards run in both orders."""
    takes_chunks = NUM_CHUNKS[name] is None
    variants = (1, 2, 3, 4) if takes_chunks else (1, -1) if name == "gpipe" else (2,)
    for (p, m), v in product(_sizes_of(name, sizes), variants):
        schedule = SCHEDULES[name](p, m, *[v] * takes_chunks)
        if v == -1:
            schedule = Schedule([actions[:m] + actions[:-m - 1 : -1] for actions in schedule])
        parts = NUM_CHUNKS[name] or v
        for F, B, W in SPLIT_TIMES:
            timeline = simulate(schedule, F / parts, B / parts, weight=W / parts)
            claimed = claim(name, p, m, v, 0, F, B, W).bubble
            ranks = timeline.idle if name in ("zb-h2", "zb-v") else timeline.bubble
            if name.startswith("dualpipe"):
                assert claimed / 2 <= max(ranks) <= claimed
            elif EXACT.get(name, lambda p, m: True)(p, m):
                assert max(ranks) == pytest.approx(claimed)
            if name not in ("zb-h2", "zb-v", "dualpipe", "dualpipe-v"):
                assert timeline.bubble == pytest.approx([max(ranks)] * p)
        assert claim(name, p, m).holds == EXACT.get(name, lambda p, m: True)(p, m)
        claimed = [parts * claim(name, p, m, v, rank).peak for rank in range(p)]
        assert max(timeline.peak) == max(claimed)
        if name == "zb-v" and m < 2 * p:
            assert all(held <= most for held, most in zip(timeline.peak, claimed))
        else:
            assert timeline.peak == claimed


def test_the_formulas_that_are_printed_are_those_that_are_computed():
    assert list(claims.SCHEDULED) == list(SCHEDULES)
    for (p, m), v, r, (F, B, W) in product(SIZES[::4], (1, 3), (0, 2), SPLIT_TIMES):
        letters = {"p": p, "m": m, "v": v, "r": r, "F": F, "B": B, "I": B - W, "W": W, "min": min}
        for name, (bubble, _, peak, _) in claims.SCHEDULED.items():
            claimed = claim(name, p, m, v, r, F, B, W)
            assert claimed[:2] == pytest.approx([eval(text, letters) for text in (bubble, peak)])


def test_tables_and_drawings_in_docstrings_are_what_the_code_gives():
    small = lambda a: f"{a.kind.lower() if a.chunk else a.kind}{a.microbatch}"
    for name, make in SCHEDULES.items():
        rows = re.findall(r"rank \d   ((?:[FBIWfbiw]\d ?)+)", make.__doc__)
        sizes = re.search(r"p = (\d+), m = (\d+)", make.__doc__)
        assert sizes and rows or name in ("naive", "gpipe"), f"{name}'s docstring has no drawing"
        if sizes:
            p, m = map(int, sizes.groups())
            told = [" ".join(map(small, actions)) for actions in make(p, m)]
            assert [row.strip() for row in rows] == told, name
    example = one_f_one_b(2, 3)
    pictures = [row.removeprefix(f"rank {r}  ") for r, row in enumerate(draw(example).splitlines())]
    rows = re.findall(r"#     rank \d   (.*\d)        ([.FB\d]+)\n", inspect.getsource(pipeline))
    assert rows == [(" ".join(map(small, row)), drawn) for row, drawn in zip(example, pictures)]
    drawn = draw(dualpipe_v(3, 6)).splitlines()
    source = inspect.getsource(dualpipe_v)
    steps = re.findall(r"#     (rank \d)   (\S+)\n    #    ([ 1-8]+)\n", source)
    assert [f"{rank}  {row}" for rank, row, _ in steps] == drawn[:2]
    rounds = [["F" * 4, "Ff", "iwfiwf", "FbfB", "bfBbfB", "bI", "WIWI", "W"],
              ["FF", "FfFf", "iwf", "FbfBFbfB", "bfB", "bBiI", "wI", "WW"]]
    for (_, row, marks), expected in zip(steps, rounds, strict=True):
        begins = [marks.index(mark) - len(" rank 0   ") for mark in "12345678"]
        cells = [row[begin:end] for begin, end in zip(begins, [*begins[1:], None])]
        cells = [re.sub(r"([Bb]\d)\1", r"\1", cell) for cell in cells]  # a B takes two slots
        assert [re.sub(r"[.\d]", "", cell) for cell in cells] == expected
    pictures = re.findall(r"rank \d   ([FB|<>() ]+)\n", one_f_one_b_step.__doc__)
    for picture, row in zip(pictures, one_f_one_b(3, 5), strict=True):
        assert re.findall("[FB]", picture) == [action.kind for action in row]
    for upper, lower in zip(pictures, pictures[1:]):  # both ends of an exchange are in one column
        own = re.sub("[^><]", " ", upper)
        theirs = own.replace("><", "()").replace(">", ")").replace("<", "(")
        assert re.sub("[^)(]", " ", lower).rstrip() == theirs.rstrip()
    pairs = zip(draw(gpipe(3, 5)).splitlines(), draw(one_f_one_b(3, 5)).splitlines())
    drawn = [tuple(row.removeprefix(f"rank {r}  ") for row in pair) for r, pair in enumerate(pairs)]
    words = []
    for verb, subject in program(one_f_one_b(2, 2), 0):
        action = subject if verb == "do" else subject.action
        words.append(f"{verb} {action.kind}{action.microbatch}")
    assert ": " + ", ".join(words) + "." in " ".join(program.__doc__.split())
    assert re.findall(r"([.FB\d]{20,}) +([.FB\d]{20,})", pipeline.__doc__) == drawn


def test_the_command_compares_schedules_and_draws_one(monkeypatch, capsys):
    def told(*words):
        monkeypatch.setattr(sys, "argv", ["pipeline.py", *words])
        pipeline.main()
        return capsys.readouterr().out

    compared = told("--stages", "4", "--microbatches", "8").splitlines()
    for name in SCHEDULES:
        row = next(line for line in compared if line.startswith(name))
        claimed, simulated, peak, held = map(float, row.split()[1:5])
        v = NUM_CHUNKS[name] or 2
        paired = PairedSchedule(SCHEDULES[name](4, 8))
        in_pairs = max(simulate(paired, 1 / v, 2 / v, weight=1 / v).bubble)
        assert peak == held and (claimed == simulated or claimed == in_pairs > simulated)
    assert compared[-1].startswith("dualpipe, dualpipe-v: claimed for F and B in pairs, simulated ")
    few = told("--microbatches", "2")
    assert re.search("^zb-h1 +- +5.0 ", few, re.MULTILINE)
    assert "\n-: the formula does not hold for so few microbatches\n" in few
    drawn = told("--schedule", "zb-h2", "--microbatches", "7")
    assert drawn.startswith("rank 0  F0F1F2F3F4F5")
    assert "\nzb-h2 " in drawn and "1f1b" not in drawn
    with pytest.raises(SystemExit, match="2"):
        told("--schedule", "dualpipe", "--stages", "3")
    assert "num_stages=3" in capsys.readouterr().err.splitlines()[-1]
    for flag in ("--stages", "--microbatches"):
        with pytest.raises(SystemExit, match="2"):
            told(flag, "0")
        fault = f"pipeline.py: error: {flag} 0 is less than 1"
        assert capsys.readouterr().err.splitlines()[-1] == fault


def _actions(text):
    return [Action(cell[0], int(cell[1:])) for cell in text.split()]


def test_a_schedule_that_is_not_defined_or_cannot_finish_is_rejected():
    other = lambda actions: lambda: simulate(Schedule([_actions("F0 B0"), actions]))
    elsewhere = [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)]
    crossed = Schedule(map(_actions, ("F0 B0 F1 B1", "F0 F1 B0 B1")))
    even = "num_stages={} and num_microbatches={}: both must be even"
    for make, wrong in (
        (lambda: interleaved(4, 6), "num_microbatches=6 is not a multiple of num_stages=4"),
        (lambda: dualpipe_v(3, 5), "num_microbatches=5 is less than 2 x num_stages=3"),
        *((lambda s=s: dualpipe(*s), even.format(*s)) for s in ((3, 8), (4, 9), (4, 6))),
        (lambda: Schedule([_actions("F0 B0"), []]), "rank 1 has no actions"),
        (lambda: simulate(crossed), "cannot finish: rank 0 at B0, rank 1 at F1 waiting"),
        (other(elsewhere), r"on no route: \[\(1, 0, 1\)\]"),
        # The error names rank 0, because the actions of rank 1 are valid.
        (other(_actions("F0 B0 F1")), "rank 0, microbatch=1, chunk=0: '' is none of"),
        (other(_actions("F0 F0 B0")), "rank 1, microbatch=0, chunk=0: 'FFB'"),
        (other(_actions("F0")), "'F'"),
        (other(_actions("F0 I0")), "'FI'"),
        (other(_actions("F0 B0 W0")), "'FBW'"),
        (other(_actions("F0 W0 I0")), "'FWI'"),
        (other(_actions("B0 F0")), r"'BF' is none of \('FB', 'FIW'\)"),
    ):
        with pytest.raises(ValueError, match=wrong):
            make()


# ---- the order of messages, under NCCL's rules ---------------------------------------------------


def _receives_posted_late(schedule, order, message=0.05):
    """Count receives that wait in a rank's queue behind a send produced after they could arrive."""
    end, late = simulate(schedule, message=message).end, 0
    ends = [(rank, *item) for rank, times in enumerate(end) for item in times.items()]
    made = {t: moment for rank, a, moment in ends for t in schedule.makes[a, rank]}
    for rank in range(len(schedule)):
        ready = 0.0  # the time at which all sends so far have been produced
        for transfer in order:
            if transfer.source == rank:
                ready = max(ready, made[transfer])
            elif transfer.destination == rank:
                late += ready > made[transfer] + message
    return late


@every_schedule
def test_a_rank_that_posts_its_messages_in_order_delays_no_receive(name):
    """An NCCL communicator runs in order. In the order of instant messages, some receives wait."""
    for p, m in _sizes_of(name, [(2, 8), (3, 9), (4, 16), (8, 32)]):
        schedule = SCHEDULES[name](p, m)
        assert not _receives_posted_late(schedule, simulate(schedule, message=SHORT).transfers)
    if name in ("gpipe", "1f1b", "zb-h2", "zb-v", "dualpipe"):
        assert _receives_posted_late(schedule, simulate(schedule).transfers)


# ---- the executor against one process ------------------------------------------------------------


CLOSE = {"rtol": 1e-12, "atol": 1e-12}

def _loss(output, target, factor=1 / 7):
    """Return a sum over a microbatch; the sums add up to the loss of the whole batch."""
    return factor * (output.double() - target).square().sum()


def _chunks(schedule):
    """Return the numbers of a rank's chunks, which are the same on all ranks."""
    return range(1 + max(action.chunk for action in schedule[0]))


def _make(schedule, make_stage, shape, loss_fn=_loss, defer=None):
    """Return a Pipeline with a stage of make_stage() for each chunk."""
    stages = [make_stage() for _ in _chunks(schedule)]
    return Pipeline(stages, schedule, loss_fn, shape=shape, defer=defer)


def _cut(layers, schedule, rank, bounds):
    """Return this rank's stages, one per chunk, the numbers of their layers, and a store.

    The stages are copies. bounds: the first layer of each stage of a route, and the end.
    """
    places, store = {}, WeightGradStore()
    for route in schedule.routes:
        for (place, chunk), begin, end in zip(route, bounds, bounds[1:]):
            places[place, chunk] = range(begin, end)
    numbers = [places[rank, chunk] for chunk in _chunks(schedule)]
    stages = [nn.Sequential(*[copy.deepcopy(layers[i]) for i in own]) for own in numbers]
    for module in (module for stage in stages for module in stage.modules()):
        if isinstance(module, DeferredLinear):
            module.defer = store
    return stages, numbers, store


def _compare(layers, bounds, schedule, batches, group=None, wrap=lambda stage: stage):
    """Compare a step of the pipeline for each batch with all layers on one process.

    The losses must agree, and the gradients, summed over the batches; if the schedule has two
    routes, both replicas must have the same bits. An evaluation must repeat the last loss and leave
    the gradients.
    """
    rank, num_stages = rank_and_size(group)
    stages, numbers, store = _cut(layers, schedule, rank, bounds)
    model = nn.Sequential(*layers)
    model.zero_grad()
    sent = model[: bounds[1]](batches[0][0].chunk(schedule.num_microbatches)[0])
    like = {"shape": sent.shape, "dtype": sent.dtype, "defer": store}
    executor = Pipeline([*map(wrap, stages)], schedule, _loss, group, **like)
    routes = schedule.routes
    first, last = rank in [r[0][0] for r in routes], rank in [r[-1][0] for r in routes]
    for factor, (inputs, targets) in enumerate(batches, 1):
        loss = _loss(model(inputs), targets, factor)
        if loss.requires_grad:
            loss.backward()
        found = executor.step(inputs if first else None, targets if last else None, factor)
        assert found is None if not last else not found.requires_grad
        found = [loss for loss in gather_objects(found, group) if loss is not None]
        assert len(found) == len(routes)
        torch.testing.assert_close(sum(found), loss.detach(), **CLOSE)
    if len(routes) == 1:
        evaluate = forward_only(num_stages, schedule.num_microbatches, routes[0])
        executor = Pipeline([*map(wrap, stages)], evaluate, _loss, group, **like)
        with torch.no_grad():
            found = executor.step(inputs if first else None, targets if last else None, factor)
        torch.testing.assert_close(found, loss.detach() if last else None, **CLOSE)
    else:
        sum_replicas(stages, group)
        bits = [[p.grad for p in stage.parameters()] for stage in stages]
        mirrored = gather_objects(bits, group)[num_stages - 1 - rank]
        assert all(all(map(torch.equal, *pair)) for pair in zip(bits, mirrored[::-1]))
    for parameter in model.parameters():  # the output may not depend on some of them
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = lambda layer: {name: p.grad for name, p in layer.named_parameters()}
    for stage, own in zip(stages, numbers):
        for layer, number in zip(stage, own):
            torch.testing.assert_close(gradients(layer), gradients(layers[number]), **CLOSE)
    everywhere = sum(gather_objects([i for own in numbers for i in own], group), [])
    assert sorted(everywhere) == sorted(len(routes) * list(range(len(layers))))


def _problem(seed, num_stages, rows, num_batches=2):
    """Return layers of random widths, the bounds of stages of uneven depth, and batches.

    All stages send the same width. Every other linear layer can defer its weight's gradient.
    """
    torch.manual_seed(shifted(seed))
    sizes = random.Random(shifted(seed))
    depth = num_stages + sizes.randint(1, 4)
    bounds = [0, *sorted(sizes.sample(range(1, depth), num_stages - 1)), depth]
    widths, D = [sizes.randint(1, 6) for _ in range(depth + 1)], sizes.randint(2, 6)
    widths = [D if i in bounds[1:-1] else width for i, width in enumerate(widths)]
    linears = nn.Linear, lambda *sizes: DeferredLinear(*sizes, defer=WeightGradStore())
    layers = [
        nn.Sequential(nn.LayerNorm(i), linears[number % 2](i, o), nn.Tanh()).double()
        for number, (i, o) in enumerate(zip(widths, widths[1:]))
    ]
    shape = num_batches, rows, sizes.randint(1, 3)
    inputs = torch.randn(*shape, widths[0], dtype=torch.float64)
    targets = torch.randn(*shape, widths[-1], dtype=torch.float64)
    return layers, bounds, list(zip(inputs, targets))


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def _checkpointed(stage):
    """Wrap a stage so that it keeps only its input and runs again in backward."""
    return Apply(partial(checkpoint, stage, use_reentrant=False))


SIDE_BY_SIDE = [(name, *size) for name in ("1f1b", "zb-h1") for size in ((3, 1), (6, 1), (2, 2))]
LAYOUTS = [*((name, 2, 1) for name in SCHEDULES), ("1f1b", 1, 1), ("1f1b", 3, 1), ("zb-h1", 2, 2)]
MORE = [*SIDE_BY_SIDE, *((name, p, 1) for name in SCHEDULES for p in (1, 3, 4))]
LAYOUTS += [soak(*row) for row in MORE if row not in LAYOUTS]


@pytest.mark.parametrize("name, p, pipelines", LAYOUTS)
@on_ranks(lambda p, pipelines, **_: p * pipelines)
def test_every_schedule_gives_the_losses_and_gradients_of_one_process(name, p, pipelines):
    """Stages have any depth; some run again in backward; several pipelines may run side by side."""
    group, number = interleaved_group(p, pipelines)
    sizes = [m for size, m in _sizes_of(name) if size == p]
    for m in sorted({*sizes[:2], *sizes[len(sizes) // 2 :][:1], *sizes[-1:]}):
        schedule = SCHEDULES[name](p, m)
        rows = m * (1 + m % 3)
        layers, bounds, batches = _problem(m + number, len(schedule.routes[0]), rows)
        wrap = _checkpointed if m == max(sizes) else lambda stage: stage
        _compare(layers, bounds, schedule, batches, group, wrap)


@pytest.mark.parametrize("plain_step, make_schedule, m", [
    (gpipe_step, gpipe, 4), *((one_f_one_b_step, one_f_one_b, m) for m in (1, 2, 4, 8)),
])
@on_ranks(1, 2, 3)
def test_the_plain_forms_and_the_executor_give_the_same_bits(plain_step, make_schedule, m):
    rank, p = rank_and_size()
    torch.manual_seed(shifted(0))
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(p)]
    plain, stage = copy.deepcopy(layers[rank]), layers[rank]
    inputs, targets = torch.randn(2, 8, 32)
    for module in (plain, stage):  # outputs that are not contiguous
        module.register_forward_hook(lambda *call: call[-1].mT.contiguous().mT)
    with nccl_over_gloo():
        losses = plain_step(plain, inputs.chunk(m), targets.chunk(m), _loss)
    schedule = make_schedule(p, m)
    loss = Pipeline(stage, schedule, _loss, shape=(8 // m, 32)).step(inputs, targets)
    assert loss == (sum(losses) if rank == p - 1 else None)
    assert not any(loss.requires_grad for loss in losses or ())  # a graph keeps all inputs
    for one, other in zip(plain.parameters(), stage.parameters()):
        assert torch.equal(one.grad, other.grad) and one.grad.any()


@pytest.mark.parametrize("plain_step", [gpipe_step, one_f_one_b_step])
@on_ranks(3)
def test_a_stage_of_the_plain_forms_may_embed_tokens_or_have_another_width(plain_step):
    rank, _ = rank_and_size()
    torch.manual_seed(shifted(0))
    layers = [nn.Embedding(7, 6), nn.Linear(6, 3), nn.Linear(3, 5)]
    stages = copy.deepcopy(layers)
    tokens, targets = torch.randint(7, (4,)), torch.randn(4, 5)
    _loss(nn.Sequential(*layers)(tokens), targets).backward()
    inputs = [tokens, torch.empty(4, 6), torch.empty(4, 3)][rank]
    plain_step(stages[rank], inputs.chunk(2), targets.chunk(2), _loss)
    for found, expected in zip(stages[rank].parameters(), layers[rank].parameters()):
        torch.testing.assert_close(found.grad, expected.grad)


def _plain_problem(name, p, m, dtype):
    """Return this rank's stages of a small model, the whole model, inputs, targets and a Schedule.

    Outputs are not contiguous.
    """
    rank = dist.get_rank()
    schedule = SCHEDULES[name](p, m)
    torch.manual_seed(shifted(0))
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).to(dtype) for _ in schedule.routes[0]]
    for layer in layers:
        layer.register_forward_hook(lambda *call: call[-1].mT.contiguous().mT)
    stages = {
        chunk: copy.deepcopy(layers[number])
        for route in schedule.routes
        for number, (place, chunk) in enumerate(route)
        if place == rank
    }
    inputs, targets = torch.randn(2, 2 * m, 6, dtype=dtype)
    return [stages[chunk] for chunk in sorted(stages)], layers, inputs, targets, schedule


@pytest.mark.parametrize(
    "name, p", [(name, p) for p in (1, 2, 3, 4) for name in SCHEDULES if _sizes_of(name, [(p, 12)])]
)
@on_ranks(lambda p, **_: p)
def test_any_schedule_step_by_step_gives_the_losses_and_gradients_of_one_process(name, p):
    """Every exchange blocks at its post. DualPipe's replicas have half of the gradients each."""
    for m in [m for size, m in _sizes_of(name) if size == p][:: 2 * p]:
        stages, layers, inputs, targets, schedule = _plain_problem(name, p, m, torch.float64)
        expected = _loss(nn.Sequential(*layers)(inputs), targets)
        expected.backward()
        batch = inputs.chunk(m), targets.chunk(m)
        with nccl_over_gloo():
            losses = schedule_step(stages, schedule, *batch, _loss, batch[0][0])
        if len(schedule.routes) > 1:
            sum_replicas(stages)
        ends = sum(route[-1][0] == dist.get_rank() for route in schedule.routes)
        assert len(losses) == ends * m // len(schedule.routes)
        total = sum(sum(gather_objects(losses), []))
        torch.testing.assert_close(total, expected.detach(), **CLOSE)
        for route in schedule.routes:
            for layer, (place, chunk) in zip(layers, route):
                if place == dist.get_rank():
                    for one, whole in zip(stages[chunk].parameters(), layer.parameters()):
                        torch.testing.assert_close(one.grad, whole.grad, **CLOSE)


@on_ranks(1)
def test_a_schedule_is_not_run_with_fewer_or_more_microbatches_than_it_has():
    stages, _, inputs, targets, schedule = _plain_problem("zb-v", 1, 4, torch.float64)
    for count in 2, 8:
        batch = inputs.chunk(count), targets.chunk(count)
        with pytest.raises(ValueError, match=f"^{count} microbatches"):
            schedule_step(stages, schedule, *batch, _loss, batch[0][0])


@pytest.mark.parametrize("p", [1, 2, 4])
@several_schedules
@on_ranks(lambda p, **_: p)
def test_any_schedule_step_by_step_gives_the_bits_of_the_executor(name, p):
    for m in [m for size, m in _sizes_of(name) if size == p][1:2]:
        plain, _, inputs, targets, schedule = _plain_problem(name, p, m, torch.float32)
        stages = copy.deepcopy(plain)
        batch = inputs.chunk(m), targets.chunk(m)
        losses = schedule_step(plain, schedule, *batch, _loss, batch[0][0])
        loss = Pipeline(stages, schedule, _loss, shape=batch[0][0].shape).step(inputs, targets)
        assert loss == (sum(losses) if losses else None)
        pairs = zip(nn.ModuleList(plain).parameters(), nn.ModuleList(stages).parameters())
        assert all(torch.equal(one.grad, other.grad) and one.grad.any() for one, other in pairs)


@on_ranks(1)
@pytest.mark.parametrize("norm, is_same", [(nn.LayerNorm, True), (nn.BatchNorm1d, False)])
def test_microbatches_change_the_gradients_of_batch_norm_and_not_of_layer_norm(norm, is_same):
    torch.manual_seed(shifted(0))
    stage = nn.Sequential(nn.Linear(4, 4), norm(4), nn.Linear(4, 4)).double()
    inputs, targets = torch.randn(2, 8, 4, dtype=torch.float64)
    gradients = []
    for m in 1, 4:
        stage.zero_grad()
        gpipe_step(stage, inputs.chunk(m), targets.chunk(m), _loss)
        gradients.append(torch.cat([p.grad.flatten() for p in stage.parameters()]))
    assert torch.allclose(*gradients, rtol=0, atol=1e-12) == is_same


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("make_schedule", [one_f_one_b, zb_h1])
@on_ranks(1)
def test_products_in_bf16_add_up_in_fp32_and_a_weight_used_twice_gets_one_sum(make_schedule, dtype):
    """256 + 1 needs nine bits; bf16 has eight. Weights are in bf16, or autocast casts them."""
    for inputs, factors in (((256, 1), (1,)), ((1, 1), (128, 0.5))):  # of microbatches, of uses
        store, additions = WeightGradStore(), []
        layer = DeferredLinear(4, 4, defer=store).to(dtype)
        for parameter in layer.parameters():
            parameter.grad_dtype = torch.float32
        layer.weight.register_post_accumulate_grad_hook(
            lambda _: None if store.open else additions.append(1)
        )

        @torch.autocast("cpu", torch.bfloat16)
        def several_times(x):
            return sum(layer(x * factor).float() for factor in factors)

        stage, total = Apply(several_times), lambda y, _: y.sum()
        batch = torch.tensor(inputs).unsqueeze(1).expand(2, 4).to(dtype)
        Pipeline(stage, make_schedule(1, 2), total, shape=(), defer=store).step(batch, batch)
        assert layer.weight.grad.eq(257).all() and layer.bias.grad.eq(2 * len(factors)).all()
        assert layer.weight.grad.dtype == torch.float32 and len(additions) == 2


@on_ranks(2)
def test_replicas_of_bf16_weights_are_summed_in_fp32_in_one_batch_for_which_no_host_waits():
    """The replicas are DualPipe's. One stage has no parameters."""
    rank, p = rank_and_size()
    stages = [nn.Linear(3, 3).bfloat16(), nn.Tanh()][:: 1 - 2 * rank]
    layer = stages[rank]
    for parameter in layer.parameters():
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.full(parameter.shape, (256.0, 1.0)[rank])
    with batches() as count, waits() as waited:
        sum_replicas(stages)
    assert count == {"batches": 1, "off 16": 0} and not waited
    assert layer.weight.grad.eq(257).all() and layer.bias.grad.eq(257).all()
    sum_replicas([nn.Tanh(), nn.Tanh()])
    if rank == 1:
        layer.bias.grad = None  # none of its microbatches has used it
    sum_replicas(stages)
    assert layer.weight.grad.eq(514).all() and layer.bias.grad.eq(257).all()


@on_ranks(1)
def test_the_product_of_a_weight_with_a_hook_is_not_deferred():
    """If it were, autograd would call the hook in I, with None."""
    store, seen = WeightGradStore(), []
    layer = DeferredLinear(4, 4, defer=store)
    layer.weight.register_hook(lambda gradient: seen.append((store.open, gradient is None)))
    Pipeline(layer, zb_h1(1, 2), _loss, shape=(), defer=store).step(*torch.randn(2, 2, 4))
    assert seen == [(True, False), (True, False)]


@pytest.mark.parametrize("shape", [(4,), (0, 4), (2, 3, 4)])
def test_a_deferred_linear_layer_takes_inputs_of_any_shape(shape):
    plain = nn.Linear(4, 3).double()
    layer = DeferredLinear(4, 3, defer=WeightGradStore()).double()
    layer.load_state_dict(plain.state_dict())
    x, dy = torch.randn(*shape).double(), torch.randn(*shape[:-1], 3).double()
    for module in (plain, layer):
        module(x).backward(dy)
    for one, other in zip(plain.parameters(), layer.parameters()):
        torch.testing.assert_close(one.grad, other.grad)


def _executed(name, m):
    """Return what a rank does in a step: (verb, peer, bytes), or ("wait", its index here, 0)."""
    schedule = ALL[name](rank_and_size()[1], m)
    executor = _make(schedule, lambda: nn.Linear(3, 3), (1, 3))
    steps, numbers = [], {}

    def listen(event, operation, sends=(), receives=()):
        if event == "post":
            numbers[operation] = len(steps)
            steps.extend(("send", peer, tensor.nbytes) for tensor, peer in sends)
            steps.extend(("receive", peer, tensor.nbytes) for tensor, peer in receives)
        elif event == "end" and operation in numbers:
            steps.append(("wait", numbers[operation], 0))

    with observe(listen):
        executor.step(torch.randn(m, 3), torch.zeros(m, 3))
    return steps


def _programmed(schedule, rank):
    """Return the same list from a rank's program."""
    steps, numbers = [], {}
    for verb, subject in program(schedule, rank):
        if verb == "wait":
            steps.append(("wait", numbers[subject], 0))
        elif verb in ("receive", "send"):
            numbers[subject] = len(steps)
            steps.append((verb, subject.source + subject.destination - rank, 12))
    return steps


def _finishes(schedule):
    """Return whether all programs end on NCCL, where a rank's messages are done in their order.

    A message is done once both ranks have come to it. A wait blocks until then.
    """
    rows = [deque(program(schedule, rank)) for rank in range(len(schedule))]
    queues = [deque() for _ in rows]
    done = set()
    progress = True
    while progress:
        progress = False
        for row, queue in zip(rows, queues):
            while row and (row[0][0] != "wait" or row[0][1] in done):
                verb, subject = row.popleft()
                queue.extend([subject] if verb in ("send", "receive") else [])
                progress = True
        heads = Counter(queue[0] for queue in queues if queue)
        meeting = {transfer for transfer, ranks in heads.items() if ranks == 2}
        done |= meeting
        for queue in queues:
            if queue and queue[0] in meeting:
                queue.popleft()
                progress = True
    return not any(rows) and not any(queues)


@pytest.mark.parametrize("p", [2, 3, 4])
def test_a_rank_waits_for_its_oldest_send_only_when_more_than_p_are_pending(p):
    """The first rank sends 3 p forwards in a row. The last one keeps p receives pending."""
    schedule = gpipe(p, 3 * p)
    for rank, verb in (0, "send"), (p - 1, "receive"):
        posted, pending = deque(), []
        for action, subject in program(schedule, rank):
            if action == "do" and subject.kind == "B":
                break
            if action == verb:
                posted.append(subject)
            elif action == "wait" and subject in posted:
                pending.append(len(posted))
                assert posted.popleft() == subject
        assert pending[: 2 * p] == 2 * p * [p + 1 if verb == "send" else p]


def test_a_rank_may_use_what_it_receives_in_any_order():
    """It then posts more receives than there are ranks. The oldest inputs are used last."""
    m = 5
    order = range(m)
    first = [Action("F", i) for i in order] + [Action("B", i) for i in reversed(order)]
    last = [Action(kind, i) for i in reversed(order) for kind in "FB"]
    schedule = Schedule([first, last])
    verbs = [verb for verb, _ in program(schedule, 1)]
    assert verbs.index("wait") == verbs.index("do") - 1 == m
    assert _finishes(schedule)


@pytest.mark.parametrize("name", ALL)
def test_a_step_follows_its_program_which_finishes_on_nccl_and_sends_what_it_claims(name):
    """Of sends at most p + 1 are pending, of receives p, and the host waits for all messages."""
    for p, m in _sizes_of(name, [(2, 1), (2, 4), (3, 6), (4, 8), (6, 12), (8, 32)]):
        programs = [_programmed(ALL[name](p, m), rank) for rank in range(p)]
        for rank, steps in enumerate(programs):
            waited = sorted(number for verb, number, _ in steps if verb == "wait")
            assert waited == [i for i, (verb, *_) in enumerate(steps) if verb != "wait"]
            of = lambda what, verb, number: verb == "wait" and steps[number][0] == what
            for what, limit in (("send", p + 1), ("receive", p)):
                changes = [(verb == what) - of(what, verb, number) for verb, number, _ in steps]
                most = max(accumulate(changes), default=0)
                assert most <= limit and (most == 0 or what == "receive" or most >= min(m, 2))
            sent = [nbytes for verb, _, nbytes in steps if verb == "send"]
            if name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2"):  # a chunk on each rank
                assert sum(sent) == pipeline_bytes(rank, p, m, 12)
        assert _finishes(ALL[name](p, m))
        if p <= 4:
            assert run(p, _executed, name, m) == [*programs]


class _Cut(nn.Linear):
    """A layer whose output ignores its input: dx is zero or, if it is frozen, there is no graph."""

    def forward(self, x):
        return super().forward(torch.ones_like(x)) if self.weight.requires_grad else x.detach()


@on_ranks(3)
def test_stages_may_be_frozen_or_empty_cut_the_graph_and_send_transposed_views_or_bf16():
    linear = lambda: nn.Linear(4, 4, dtype=torch.float64)
    cut = lambda: _Cut(4, 4, dtype=torch.float64)
    deferred = lambda *bias: DeferredLinear(4, 4, *bias, defer=WeightGradStore()).double()
    frozen, half_frozen = linear().requires_grad_(False), deferred()
    half_frozen.weight.requires_grad_(False)
    flip, to = lambda: Apply(lambda x: x.mT), lambda dtype: Apply(lambda x: x.to(dtype))
    x, tokens = torch.randn(8, 4, 4, dtype=torch.float64), torch.randint(11, (8, 4))
    embedding, schedules = nn.Embedding(11, 4).double(), [f(3, 4) for f in (gpipe, zb_h1, zb_v)]
    for layers, *bounds, inputs, schedules in (
        ([nn.Tanh(), linear(), linear()], 1, 2, x, schedules),  # the first has no parameters
        ([linear(), nn.Tanh(), nn.GELU()], 1, 2, x, schedules),  # the last ones have none
        ([frozen, linear(), frozen], 1, 2, x, schedules),
        ([linear(), frozen, frozen], 1, 2, x, schedules),
        ([deferred(False), half_frozen, deferred()], 1, 2, x, schedules),
        ([linear(), cut(), linear()], 1, 2, x, schedules),
        ([linear(), cut().requires_grad_(False), linear()], 1, 2, x, schedules),
        ([linear(), linear(), cut()], 1, 2, x, schedules),
        ([linear(), linear()], 0, 1, x, schedules),  # the first stage has no layers
        ([linear(), linear()], 1, 1, x, schedules),
        ([linear(), linear()], 1, 2, x, schedules),
        ([linear()], 0, 0, x, schedules),
        ([linear(), flip(), linear()], 2, 2, x, schedules),  # the output is a transposed view
        ([linear(), nn.Identity(), flip(), linear()], 2, 2, x, schedules),  # the gradient is one
        ([embedding, nn.Tanh(), linear()], 2, 2, tokens, schedules),
        ([linear(), to(torch.bfloat16), to(torch.float64)], 2, 2, x, schedules[:2]),
    ):
        batches = [(inputs, torch.randn(8, 4, 4, dtype=torch.float64)) for _ in range(2)]
        for schedule in schedules:
            stages = len(schedule.routes[0]) - 3  # half of zb-v's stages have no layers
            _compare(layers, [0, *bounds, *[len(layers)] * (stages + 1)], schedule, batches)


@pytest.mark.parametrize("where", ["register_forward_pre_hook", "register_full_backward_pre_hook"])
@on_ranks(1)
def test_a_step_that_failed_does_not_affect_the_next(where):
    """The failure is in the second microbatch."""
    for make_schedule in (gpipe, one_f_one_b, zb_h2):
        store = WeightGradStore()
        stage = DeferredLinear(4, 4, defer=store)
        executor = Pipeline(stage, make_schedule(1, 2), _loss, shape=(), defer=store)
        batch = torch.ones(4, 4), torch.zeros(4, 4)
        loss = executor.step(*batch)
        expected = stage.weight.grad.clone()
        hook = getattr(stage, where)(MagicMock(side_effect=[None, ArithmeticError]))
        with pytest.raises(ArithmeticError):
            executor.step(*batch)
        hook.remove()
        stage.zero_grad()
        assert not store.open
        assert torch.equal(executor.step(*batch), loss)
        assert torch.equal(stage.weight.grad, expected)


# ---- what a step costs ---------------------------------------------------------------------------


def _peak_held(name, num_microbatches, wrap=lambda stage: stage):
    """Return the most hidden activations, and the most outputs, that a stage holds at once."""
    schedule, store = SCHEDULES[name](rank_and_size()[1], num_microbatches), WeightGradStore()
    freed, peaks = ([], []), [0, 0]

    def note(number, module, inputs, output):
        if torch.is_grad_enabled():
            result = ref(output)
            tests = StorageWeakRef(output.untyped_storage()).expired, lambda: result() is None
            freed[number].append(tests[number])
            peaks[number] = max(peaks[number], sum(not is_freed() for is_freed in freed[number]))

    def make_stage():
        first, second = (DeferredLinear(4, 4, defer=store) for _ in range(2))
        stage = nn.Sequential(first, nn.Tanh(), second)
        for number, module in enumerate((stage[1], stage)):
            module.register_forward_hook(partial(note, number))
        return wrap(stage)

    executor = _make(schedule, make_stage, (1, 4), defer=store)
    for _ in range(2):
        executor.step(torch.randn(num_microbatches, 4), torch.randn(num_microbatches, 4))
        assert all(is_freed() for is_freed in freed[0] + freed[1])
    return peaks


@several_schedules
def test_a_stage_holds_as_many_activations_as_the_simulator_says_or_one_if_checkpointed(name):
    for p, m in _sizes_of(name, [(1, 3), (2, 1), (2, 4), (3, 6), (4, 8)]):
        held, outputs = zip(*run(p, _peak_held, name, m))
        expected = simulate(SCHEDULES[name](p, m)).peak
        assert list(held) == expected and set(outputs) == {1}
    if name in ("naive", "gpipe", "1f1b", "interleaved"):
        assert [held for held, _ in run(2, _peak_held, name, 8, _checkpointed)] == [1, 1]


@pytest.mark.parametrize("p, make_schedule", [(1, interleaved), (1, zb_v), (2, gpipe)])
@on_ranks(lambda p, **_: p)
def test_a_tensor_is_freed_once_it_is_sent_or_handed_to_another_chunk(p, make_schedule):
    executor, made, held = _make(make_schedule(p, 8), lambda: nn.Linear(4, 4), (1, 4)), [], []

    def told(action, *given, perform=executor.perform):
        held.append(sum(not storage.expired() for storage in made))
        if (result := perform(action, *given)) is not None:
            made.append(StorageWeakRef(result.untyped_storage()))
        return result

    executor.perform = told
    executor.step(*torch.randn(2, 8, 4))
    assert len(made) >= 8 and max(held) <= 3


@on_ranks(1)
def test_a_weight_product_frees_its_activations_before_the_next_one_is_computed():
    store, inputs, alive = WeightGradStore(), [], []
    layers = [DeferredLinear(4, 4, defer=store) for _ in range(3)]
    for layer in layers[1:]:
        keep = lambda layer, args: inputs.append(StorageWeakRef(args[0].untyped_storage()))
        layer.register_forward_pre_hook(keep)

    def count(_):
        if not store.open:  # in a W
            alive.append(sum(not storage.expired() for storage in inputs))

    for layer in layers:
        layer.weight.register_post_accumulate_grad_hook(count)
    executor = Pipeline(nn.Sequential(*layers), zb_h1(1, 1), _loss, shape=(), defer=store)
    executor.step(*torch.randn(2, 1, 4))
    assert alive == [1, 0, 0]


@on_ranks(1)
def test_a_batch_is_freed_after_its_step():
    executor = Pipeline(nn.Linear(4, 4), gpipe(1, 2), _loss, shape=())
    batch = torch.ones(2, 4), torch.zeros(2, 4), torch.tensor(0.5)
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in batch]
    executor.step(*batch)
    del batch
    assert all(storage.expired() for storage in storages)


@on_ranks(3)
def test_the_demonstration_draws_the_schedules_and_prints_the_costs_of_the_table():
    with patch.dict("os.environ", RANK=""):  # as under torchrun; else it is a command
        printed = demonstration(pipeline)
    expected = {"gpipe": (6, 8), "1f1b": (6, 3), "zb-h1": (2, 3)}  # the bubble and the peak
    plain, *parts, _, table, _ = printed.strip().split("\n\n")
    first, error, second, other_error = plain.splitlines()
    claim = f"rank 0 sent {16 * 32 * 8} bytes, claimed {16 * 32 * 8}"
    assert [first, second] == [f"gpipe_step(): {claim}", f"one_f_one_b_step(): {claim}"]
    assert max(float(error.split()[-1]), float(other_error.split()[-1])) < 1e-12
    rows = [row.split()[:5] for row in table.splitlines()[2:]]
    assert rows == [[name, *[f"{x}.0" for x in (b, b, k, k)]] for name, (b, k) in expected.items()]
    for name, part in zip(expected, parts, strict=True):
        first, *drawing, sent, error = part.splitlines()
        assert first == name and drawing == draw(SCHEDULES[name](3, 8)).splitlines()
        assert sent == f"Pipeline: {claim}"
        assert float(error.split()[-1]) < 1e-12


class Synced(DeferredLinear):
    """A stage with no_sync() and start_grad_sync(), as in DistributedDataParallel."""

    def __init__(self, store):
        super().__init__(4, 4, defer=store)
        self.events, self.inside = [], False
        self.require_backward_grad_sync = True
        self.weight.register_post_accumulate_grad_hook(
            lambda _: None if store.open else self.note("gradient", self.inside, store.accumulates)
        )

    def note(self, *event):
        self.events.append(event)

    @contextmanager
    def no_sync(self):
        self.inside = True
        yield
        self.inside = False

    def start_grad_sync(self, awaited):
        assert awaited == {self.weight}
        self.note("start", self.inside)


def _order_of_syncs(name, num_microbatches, sync_each, shared):
    schedule, store = SCHEDULES[name](rank_and_size()[1], num_microbatches), WeightGradStore()
    stages, one = [Synced(store) for _ in _chunks(schedule)], Synced(store)
    stages = [one for _ in stages] if shared else stages
    options = {"shape": (1, 4), "defer": store, "sync_each": sync_each}
    executor = Pipeline(stages, schedule, _loss, **options)

    def told(action, *given, perform=executor.perform):
        stages[action.chunk].events.append(action.kind)
        return perform(action, *given)

    executor.perform = told
    executor.step(torch.randn(num_microbatches, 4), torch.randn(num_microbatches, 4))
    return [stage.events for stage in stages]


@pytest.mark.parametrize("sync_each, shared", [(False, False), (True, False), (False, True)])
@several_schedules
def test_a_chunk_starts_to_reduce_in_its_last_action_or_in_each_with_sync_each(
    name, sync_each, shared
):
    """A W starts the reduction before its own gradients exist. shared: all chunks are one module.

    In a B or W, a layer may add to .grad itself.
    """
    for p, m in _sizes_of(name, [(1, 1), (1, 4), (2, 4), (4, 8)]):
        schedule = SCHEDULES[name](p, m)
        for actions, chunks in zip(schedule, run(p, _order_of_syncs, name, m, sync_each, shared)):
            for chunk, events in enumerate(chunks):
                expected, own = [], [a for a in actions if shared or a.chunk == chunk]
                for i, action in enumerate(own):
                    syncs = sync_each or i == len(own) - 1
                    expected += [action.kind, *[("start", False)] * (action.kind == "W" and syncs)]
                    expected += [("gradient", not syncs, True)] * (action.kind in "BW")
                assert events == expected


def _wrap(stage, group, zero, options):
    """Wrap a stage in DDP or, for stages 1 to 3 of ZeRO, in FullyShardedDataParallel."""
    if zero:
        return FullyShardedDataParallel(stage, group, stage=zero, **options)
    views = not options["wait_in_backward"]
    return DistributedDataParallel(
        stage, process_group=group, gradient_as_bucket_view=views, **options
    )


def _differences(stages, layers, numbers):
    """Return |gradient - that of the whole layers| for each parameter, or for this rank's piece."""
    for stage, own in zip(stages, numbers):
        expected = [p.grad for i in own for p in layers[i].parameters()]
        for parameter, gradient in zip(stage.parameters(), expected):
            if hasattr(parameter, "whole_shape"):
                begin = parameter.offset
                gradient = gradient.flatten()[begin : begin + len(parameter)]
            own = parameter.grad.detach()
            yield (own.flatten() - gradient.flatten()).abs().sum().item()


@pytest.mark.parametrize("zero", [0, *map(soak, (1, 2, 3))])
@several_schedules
@on_ranks(4)
def test_steps_inside_no_sync_send_no_gradients_and_add_up_to_those_of_one_process(name, zero):
    """Two replicas of a pipeline of two ranks take three steps, then one; the last of each reduces.

    In zero 2 and 3, every B or W of the last step starts a reduction.
    """
    pipeline_group, replica = interleaved_group(2, 2)
    rank, _ = rank_and_size(pipeline_group)
    replicas = [dist.new_group(members) for members in ([0, 1], [2, 3])][rank]
    schedule = SCHEDULES[name](2, 4)
    layers, bounds, batches = _problem(7, len(schedule.routes[0]), 8, num_batches=8)
    for wait, divisor in ((True, 2), (False, 1)):
        stages, numbers, store = _cut(layers, schedule, rank, bounds)
        options = {"wait_in_backward": wait, "gradient_divide_factor": divisor}
        stages = [_wrap(stage, replicas, zero, options) for stage in stages]
        shape = 2, batches[0][0].shape[1], layers[bounds[1]][0].normalized_shape[0]
        like = {"shape": shape, "dtype": torch.float64, "defer": store, "sync_each": zero > 1}
        executor = Pipeline(stages, schedule, _loss, pipeline_group, **like)
        for round_batches in batches[:6], batches[6:]:
            model = nn.Sequential(*layers)
            model.zero_grad()
            for inputs, targets in round_batches:
                _loss(model(inputs), targets, 1 / divisor).backward()
            for stage in stages:
                stage.zero_grad(set_to_none=zero > 0)
            *accumulated, last = round_batches[replica::2]
            with ExitStack() as stack, count_bytes() as traffic:
                for stage in stages:
                    stack.enter_context(stage.no_sync())
                for inputs, targets in accumulated:
                    executor.step(inputs, targets, 1)
            assert not traffic.bytes("all_reduce") + traffic.bytes("reduce_scatter_single")
            executor.step(*last, 1)
            for chunk, stage in enumerate(stages):
                kinds = [action.kind for action in schedule[rank] if action.chunk == chunk]
                if zero or not wait or kinds[-1] == "W":  # otherwise backward has ended the round
                    stage.finish_grad_sync()
            if len(schedule.routes) > 1:
                sum_replicas(stages, pipeline_group)
            assert max(_differences(stages, layers, numbers)) < 1e-10


@on_ranks(1)
def test_a_step_before_the_gradients_of_the_last_one_have_been_reduced_is_rejected():
    for wait, make_schedule in product((True, False), (one_f_one_b, zb_h1)):
        store = WeightGradStore()
        stage = nn.Sequential(DeferredLinear(4, 4, defer=store), nn.LayerNorm(4))
        stage = DistributedDataParallel(stage, wait_in_backward=wait)
        executor = Pipeline(stage, make_schedule(1, 2), _loss, shape=(), defer=store)
        executor.step(*torch.ones(2, 2, 4))
        if wait and make_schedule is one_f_one_b:
            executor.step(*torch.ones(2, 2, 4))  # the end of backward has waited
            continue
        with pytest.raises(RuntimeError, match="still being reduced"):
            executor.step(*torch.ones(2, 2, 4))
        with stage.no_sync(), pytest.raises(RuntimeError, match="still being reduced"):
            executor.step(*torch.ones(2, 2, 4))
        with pytest.raises(RuntimeError, match="still being reduced"):
            stage.start_grad_sync()
        stage.finish_grad_sync()
        executor.step(*torch.ones(2, 2, 4))


# ---- errors --------------------------------------------------------------------------------------


@on_ranks(2)
def test_errors_name_batches_stages_and_schedules_that_do_not_fit():
    rank, _ = rank_and_size()
    stage, batch = nn.Linear(3, 3), torch.randn(4, 3)
    theirs = nn.parallel.DistributedDataParallel(stage)
    for stages, schedule, wrong in (
        (stage, gpipe(3, 2), "a schedule for 3 stages in a group of 2 ranks"),
        (stage, interleaved(2, 2), "rank 0 has 1 stages for num_chunks=2"),
        ([stage] * (1 + rank), gpipe(2, 2), "rank 1 has 2 stages for num_chunks=1"),
        (theirs, gpipe(2, 2), "torch's DistributedDataParallel"),
        (stage, (gpipe if rank else one_f_one_b)(2, 4), "different schedules"),
        (stage, gpipe(2, 3 + rank), "different schedules"),
        (stage, Schedule(gpipe(2, 4), [[(r, 0) for r in (rank, 1 - rank)]]), "different schedules"),
    ):
        with pytest.raises(ValueError, match=wrong):
            Pipeline(stages, schedule, _loss, shape=(2, 3))
    with pytest.raises(ValueError, match="different schedules, shapes or dtypes"):
        Pipeline(stage, gpipe(2, 4), _loss, shape=(2, 3 + rank))
    both_ends = Pipeline([stage, stage], zb_v(2, 2), _loss, shape=(2, 3))
    if rank == 0:
        with pytest.raises(ValueError, match="inputs has 4 rows, and targets 2"):
            both_ends.step(batch, batch[:2])
    executor = Pipeline(stage, gpipe(2, 2), _loss, shape=(2, 3))
    name = ["inputs", "targets"][rank]
    for given, wrong in (
        (batch[:3], f"{name} has 3 rows on rank {rank}, .*num_microbatches=2"),
        (batch[:0], f"{name} has 0 rows"),
        (None, f"{name} has 0 rows"),
    ):
        with pytest.raises(ValueError, match=wrong):
            executor.step(**{name: given})
    with pytest.raises(ValueError, match="inputs has 8 rows, and targets 4"):
        executor.step(torch.randn(8, 3), batch)  # on both ranks: neither has both ends
    executor.step(batch, batch)
    wider = Pipeline(stage, gpipe(2, 2), _loss, shape=(2, 3), dtype=torch.float64)
    if rank == 0:
        with pytest.raises(ValueError, match=r"rank 0 made \(4, 3\) .*to be sent like .*2, 3"):
            executor.step(torch.randn(8, 3))
        with pytest.raises(RuntimeError, match="failed"):  # messages of the failed step remain
            executor.step(batch)
        with pytest.raises(ValueError, match="made .* torch.float32, to be sent like .*float64"):
            wider.step(batch)


@on_ranks(1)
def test_a_stage_that_changes_its_input_in_place_or_a_loss_without_a_graph_is_rejected():
    linear, relu = nn.Linear(4, 4), nn.ReLU(inplace=True)
    for stages in (linear, relu), (nn.Sequential(relu, linear), linear):
        with pytest.raises(RuntimeError, match="place operation"):
            Pipeline(stages, interleaved(1, 2), _loss, shape=(1, 4)).step(*torch.ones(2, 2, 4))
    with pytest.raises(RuntimeError, match="does not require grad"):
        linear.requires_grad_(False)
        Pipeline(linear, gpipe(1, 1), _loss, shape=()).step(*torch.ones(2, 1, 4))
