"""A forward and a backward that take turns: pairs, the turns, layers of experts, and trainings."""

import _thread
import contextlib
import os
import signal
import threading
from functools import partial
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import pipelining

import hybrid
from collectives import observe, rank_and_size
from expert_parallel import MoE
from layouts import MOE_SIZES, ON_NODES, assert_trains_as_a_loop_does, make_trainer, own_batch
from layouts import soak_but
from pipeline import (
    SCHEDULES, SHORT, Action, PairedPipeline, PairedSchedule, Pipeline, Schedule, Turns, claim,
    dualpipe_v, interleaved, pairs_of, program, simulate,
)
from ranks import on_ranks, shifted, spawn

# ---- schedules -----------------------------------------------------------------------------------

PAIRED = "dualpipe", "dualpipe-v"
SIZES = [(p, m) for p in range(1, 9) for m in range(2 * p, 25) if m in (2 * p, 2 * p + 1, 4 * p)]
SIZES = [(name, p, m) for p, m in SIZES for name in PAIRED]
SIZES = [row for row in SIZES if row[0] == "dualpipe-v" or row[1] % 2 == row[2] % 2 == 0]


def test_a_pair_is_a_forward_and_the_backward_of_another_chunk_as_in_pytorchs_dualpipe_v():
    for p, m in ((1, 2), (2, 4), (3, 6), (4, 8), (4, 13), (8, 24)):
        schedule = dualpipe_v(p, m)
        sizes = {"group_size": p, "group_rank": 0, "num_stages": 2 * p}
        stages = [MagicMock(stage_index=i, is_first=i == 0, **sizes) for i in (0, 2 * p - 1)]
        theirs = pipelining.ScheduleDualPipeV(stages, m, loss_fn=print).pipeline_order
        for rank in range(p):
            found = [[*pair] for pair in pairs_of(schedule[rank]).items()]
            assert all(f.kind + b.kind == "FB" and f.chunk != b.chunk for f, b in found)
            chunk_of = {rank: 0, 2 * p - 1 - rank: 1}
            pairs = [action.sub_actions for action in filter(None, theirs[rank])]
            chunk = lambda a: chunk_of[a.stage_index]
            small = lambda a: (a.computation_type.value, a.microbatch_index, chunk(a))
            expected = [[*map(small, pair)] for pair in filter(None, pairs)]
            assert expected and [step for step in found if step in expected] == expected
            assert len(found) - len(expected) == (rank == p - 1)  # theirs keeps one apart there


def test_paired_schedules_finish_with_the_bubble_and_the_peak_of_the_table():
    for name, p, m in SIZES:
        schedule = PairedSchedule(SCHEDULES[name](p, m))
        parts = 2 if name == "dualpipe-v" else 1
        for F, B, W in (1, 2, 1), (1, 2, 0.5), (1, 3, 1), (0.5, 2, 1):
            timeline = simulate(schedule, F / parts, B / parts, weight=W / parts)
            claimed = claim(name, p, m, forward=F, backward=B, weight=W)
            assert max(timeline.bubble) <= claimed.bubble + 1e-9
        for F, B, W in (3, 4, 2), (2, 2, 1), (1.5, 2.2, 1):  # forwards longer than I
            timeline = simulate(schedule, F / parts, B / parts, weight=W / parts)
            more = (p - 1) * (F - B + W) / 2 if parts == 2 else (p / 2 - 1) * (F - B + W)
            claimed = claim(name, p, m, forward=F, backward=B, weight=W)
            assert max(timeline.bubble) <= claimed.bubble + more + 1e-9
        assert max(timeline.peak) == parts * claimed.peak
        simulate(schedule, message=SHORT)


def test_passes_of_one_chunk_are_no_pair_and_a_pair_that_waits_for_itself_cannot_finish():
    for name in "naive", "gpipe", "1f1b", "zb-h1", "zb-h2":
        assert not any(map(pairs_of, SCHEDULES[name](3, 6)))
    for p, m in (1, 2), (2, 4), (4, 8), (4, 12):
        alone = interleaved(p, m)
        assert simulate(PairedSchedule(alone)).total == simulate(alone).total
        found = [len(pairs_of(row)) for row in alone]
        assert found[-1] == 0 and all(found[:-1])
    cells = "F0 f0 F1 b0 B0 f1 b1 B1".split()
    row = [Action(kind.upper(), int(number), int(kind.islower())) for kind, number in cells]
    schedule = Schedule([row, row], interleaved(2, 2).routes)
    simulate(schedule)
    # The b0 of rank 0's pair needs that of rank 1, which comes after rank 1's F1, and this F1 needs
    # the pair's F1.
    with pytest.raises(ValueError, match="cannot finish: rank 0 at F1, rank 1 at F1 waiting"):
        simulate(PairedSchedule(schedule))


def test_a_pair_waits_for_both_inputs_and_then_sends_both_results():
    schedule = PairedSchedule(dualpipe_v(2, 4))
    short = lambda verb, of: of[:2] if verb == "do" else of.action[:2]
    steps = lambda rank: [(verb, short(verb, of)) for verb, of in program(schedule, rank)]
    own, others = steps(0), steps(1)
    pair = [("do", ("F", 3)), ("do", ("B", 1))]
    begin = own.index(pair[0])
    assert own[begin : begin + 3] == [*pair, ("send", ("B", 1))]
    assert own.index(("send", ("F", 3))) > begin + 2
    begin = others.index(pair[0])
    assert others[begin : begin + 2] == pair
    waited = [step for step in others[:begin] if step[0] == "wait"]
    assert waited[-2:] == [("wait", ("F", 3)), ("wait", ("B", 1))]


@on_ranks(2)
def test_ranks_that_pair_different_passes_are_told_so():
    make = PairedPipeline if dist.get_rank() == 1 else Pipeline
    with pytest.raises(ValueError, match="the ranks of the group have different schedules"):
        make([torch.nn.Identity()] * 2, dualpipe_v(2, 4), None, shape=(1,))


# ---- turns ---------------------------------------------------------------------------------------


def work(turns, log, name, waits, fails_at=None, error=None):
    """Return a pass that waits so many times, and fails after one of the waits."""

    def run_pass():
        for i in range(waits + 1):
            log.append(f"{name}{i}")
            if i == fails_at:
                raise error
            if i < waits:
                turns.hand_over()

    return run_pass


def test_the_backward_begins_and_the_passes_alternate_until_one_has_ended():
    turns, log = Turns(), []
    turns.hand_over()  # alone, a pass goes on
    turns.together(work(turns, log, "f", 3), work(turns, log, "b", 1))
    assert log == ["b0", "f0", "b1", "f1", "f2", "f3"]
    log.clear()
    turns.together(work(turns, log, "f", 0), work(turns, log, "b", 2))
    assert log == ["b0", "f0", "b1", "b2"]


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("guilty", ["f", "b"])
def test_an_error_in_one_pass_ends_both_and_is_the_one_that_is_raised(guilty, at):
    turns, log, threads = Turns(), [], threading.active_count()
    faults = {"fails_at": at, "error": KeyError("guilty")}
    passes = [work(turns, log, n, 3, **(faults if n == guilty else {})) for n in "fb"]
    with pytest.raises(KeyError, match="guilty"):
        turns.together(*passes)
    assert log[-1] == f"{guilty}{at}" and threading.active_count() == threads
    turns.hand_over()
    turns.together(work(turns, log, "f", 1), work(turns, log, "b", 1))


def test_ctrl_c_while_the_backward_runs_ends_both_passes():
    turns, log = Turns(), []

    def backward():
        turns.hand_over()
        _thread.interrupt_main()  # the forward waits for its turn
        log.append("interrupted")
        for _ in range(1000):
            turns.hand_over()

    def forward():
        for _ in range(1000):
            turns.hand_over()

    # a shell lets its jobs in the background ignore the signal
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            turns.together(forward, backward)
    finally:
        signal.signal(signal.SIGINT, before)
    assert log == ["interrupted"]


@pytest.mark.parametrize("waits", [2, 9])  # the backward ends first, or last
def test_each_pass_has_its_own_random_numbers_and_a_backwards_leave_no_trace(waits):
    turns = Turns()
    torch.manual_seed(shifted(1))
    expected = torch.rand(4)
    after = torch.get_rng_state()
    torch.manual_seed(shifted(1))
    drawn = []

    def forward():
        for _ in range(4):
            drawn.append(torch.rand(1))
            turns.hand_over()

    def backward():  # as a recomputation does
        state = torch.get_rng_state()
        torch.manual_seed(shifted(2))
        masks = []
        for _ in range(waits):
            turns.hand_over()
            masks.append(torch.rand(1))
        torch.manual_seed(shifted(2))
        assert torch.equal(torch.cat(masks), torch.cat([torch.rand(1) for _ in masks]))
        torch.set_rng_state(state)

    turns.together(forward, backward)
    assert torch.equal(torch.cat(drawn), expected)
    assert torch.equal(torch.get_rng_state(), after)


def test_both_passes_have_the_modes_of_the_thread_and_on_a_gpu_its_stream_and_generator():
    turns = Turns()
    found = []

    def modes():
        x = torch.ones(2, 2)
        found.append(((x @ x).dtype, torch.is_grad_enabled(), torch.is_autocast_cache_enabled()))

    for dtype in torch.bfloat16, torch.float16:
        with torch.autocast("cpu", dtype, cache_enabled=False), torch.no_grad():
            turns.together(modes, modes)
            assert found[-2:] == [(dtype, False, False)] * 2
    turns.together(modes, modes)
    assert found[-2:] == [(torch.float32, True, True)] * 2

    entered, inside = [], []

    @contextlib.contextmanager
    def stream(of):
        entered.append((of, threading.current_thread() is threading.main_thread()))
        inside.append(threading.current_thread())
        yield
        inside.clear()

    states = iter(range(100))
    fakes = {"current_stream": lambda device: f"stream of {device}", "stream": stream}
    fakes["get_rng_state"] = lambda device: next(states)
    restored = []
    is_set = lambda: threading.current_thread() in [threading.main_thread(), *inside]
    fakes["set_rng_state"] = lambda state, device: restored.append((state, str(device), is_set()))
    turns = Turns("cuda:1")
    with patch.multiple(torch.cuda, **fakes):
        turns.together(turns.hand_over, lambda: None)
    assert entered == [("stream of cuda:1", False)]
    # the backward's at its begin, inside its stream; the forward's at its begin and at its end
    assert restored[:2] == [(1, "cuda:1", True), (0, "cuda:1", True)] and len(restored) == 3


def test_device_0_is_an_accelerator_and_not_the_default_device():
    try:
        first = torch.device(0)
    except RuntimeError:  # PyTorch was built for CPUs only
        with pytest.raises(RuntimeError, match="accelerator"):
            Turns(0)
    else:
        assert Turns(0).device == first != torch.get_default_device()


# ---- a layer of experts --------------------------------------------------------------------------


def _nodes(per_node):
    """Return (node_group, cross_group) of 4 ranks, or None for a single node."""
    if per_node is None:
        return None
    rank, P = rank_and_size()
    rows = torch.arange(P).view(-1, per_node).tolist()
    groups = []
    for grid in rows, [list(column) for column in zip(*rows)]:
        made = {tuple(ranks): dist.new_group(ranks) for ranks in grid}
        groups += [group for ranks, group in made.items() if rank in ranks]
    dist.barrier()  # a rank that leaves while others connect to it makes them fail
    return tuple(groups)


@pytest.mark.parametrize("per_node, parts", [(None, 1), (None, 2), (2, 1), (2, 2)])
@on_ranks(4)
def test_a_layer_hands_over_at_rows_under_way_and_not_at_counts_or_short_messages(per_node, parts):
    """With n parts, 2 n times in a direction; in two hops, also 2 n^2 times inside the nodes."""
    layer = MoE(16, 8, 8, 2, parts=parts, nodes=_nodes(per_node), shared_experts=1)
    under_way, widths, handed = {}, {}, []

    def listen(event, operation, sends=(), receives=()):
        if event == "wait":
            under_way.pop(operation)
        elif event == "begin" and operation.async_op:
            under_way[operation] = True
        elif event == "begin":
            assert operation.name in ("all_to_all_single", "all_reduce")
            handed.append("counts")

    layer.hand_over = lambda: handed.append(len(under_way))
    x = torch.randn(6, 16, requires_grad=True)
    with observe(listen):
        y = layer(x)
        forward = list(handed)
        handed.clear()
        y.sum().backward()
    rows = 2 * parts + (2 * parts**2 if per_node else 0)
    assert [of for of in forward if of == "counts"] == ["counts"] * (1 + (parts if per_node else 0))
    assert len([of for of in forward if of != "counts"]) == rows == len(handed)
    assert forward[0] == "counts" and min(of for of in forward if of != "counts") > 0
    assert min(handed) > 0 and not under_way


# ---- trainings -----------------------------------------------------------------------------------

V4, P4 = "--schedule dualpipe-v --microbatches 4", "--schedule dualpipe --microbatches 4"
BIAS = "--balance bias --top-k 3 --shared-experts 1"
NONE = "--balance none --top-k 1 --moe-every 2"
DEEPSEEK, _, ALL_NODES = ON_NODES
LAYOUTS = [
    (4, f"--pp 2 --dp 2 --ep 2 --zero 3 {V4} --recompute full --expert-parts 2", BIAS),
    (4, f"--pp 2 --dp 2 --ep 2 --zero 0 {P4}", NONE),
    *((4, f"--pp 2 --dp 2 --ep 2 --zero {zero} {V4}", BIAS) for zero in (0, 1, 2)),
    *((4, f"--pp 2 --dp 2 --ep 2 --zero {zero} {P4} --expert-parts 2", BIAS) for zero in (1, 2, 3)),
    (4, f"--pp 2 --tp 2 --ep 2 {V4} --expert-parts 2", NONE),
    (4, f"--pp 2 --tp 2 --ep 2 --sp {V4} --recompute selective", BIAS),
    (8, f"--pp 2 --tp 2 --dp 2 --ep 4 --sp {P4} --recompute full --expert-parts 2", BIAS),
    (8, f"--pp 2 --dp 4 --ep 4 {V4} --recompute full --expert-parts 2", DEEPSEEK),
    (8, f"--pp 2 --dp 4 --ep 4 {P4} --zero 2", ALL_NODES),
    (6, "--pp 3 --dp 2 --ep 2 --schedule dualpipe-v --microbatches 8", BIAS),
]


@pytest.mark.parametrize("world_size, flags, mixture", soak_but(lambda i, _: i == 1, LAYOUTS))
def test_a_gpt_in_pairs_trains_as_one_process_with_a_loop_over_experts_does(
    world_size, flags, mixture
):
    assert_trains_as_a_loop_does(world_size, f"{flags} --overlap", mixture)


def gradients(flags, overlap):
    """Return a step's gradients, and how often a layer of experts has let another pass run."""
    trainer = make_trainer(f"{flags} --overlap" if overlap else flags)
    passes = []

    def note(hand_over):
        passes.append(trainer.pipeline.turns.running)
        hand_over()

    for mixture in trainer.mixtures.values():
        assert bool(mixture.hand_over) == overlap
        if overlap:
            mixture.hand_over = partial(note, mixture.hand_over)
    trainer.step(*own_batch(trainer))
    grads = [p.grad for chunk in trainer.chunks for p in chunk.parameters()]
    return [grad.detach() for grad in grads if grad is not None], passes.count(2)


SAME = [
    f"{V4} --zero 3 --dropout 0.3 --recompute full",
    f"{P4} --zero 0 --dropout 0.3 --recompute selective",
    f"{V4} --zero 1 --dtype bf16 --dropout 0.1",
    f"{P4} --zero 2 --balance aux --recompute full --recompute-layers 2",
    f"{V4} --zero 0 --block llama --capacity-factor 0.5 --moe-every 2",
    f"{P4} --zero 1 --capacity-factor 0.01",
]


@pytest.mark.parametrize("flags", soak_but(lambda i, _: i == 0, [[row] for row in SAME]))
@on_ranks(4, timeout=120)
def test_turns_change_no_bit_of_a_step_and_draw_the_same_masks(flags):
    flags = f"--pp 2 --dp 2 --ep 2 --experts 4 --shared-experts 1 --expert-parts 2 {flags}"
    expected, none = gradients(flags, False)
    found, in_turns = gradients(flags, True)
    assert none == 0 < in_turns
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def train_with_a_fault(guilty, kind, dies):
    """Train; in the second step, a rank fails, or dies, in the middle of a paired pass."""
    flags = f"{MOE_SIZES} --pp 2 --dp 2 --ep 2 {V4} --overlap"
    trainer = make_trainer(flags)
    trainer.step(*own_batch(trainer))
    turns = trainer.pipeline.turns
    number = {"F": 0, "B": 1}[kind]
    hand_over = turns.hand_over

    def fail():
        hand_over()
        if dist.get_rank() == guilty and turns.running == 2 and turns.turn == number:
            if dies:
                os._exit(3)
            raise ValueError(f"the {kind} of rank {guilty} fails")

    for mixture in trainer.mixtures.values():
        mixture.hand_over = fail
    trainer.step(*own_batch(trainer))


FAULTS = [("F", False), ("B", False), ("F", True), ("B", True)]


@pytest.mark.parametrize("kind, dies", soak_but(lambda i, _: i == 1, FAULTS))
def test_a_fault_in_a_pass_ends_all_ranks_with_its_own_message(kind, dies):
    outcomes = spawn(4, train_with_a_fault, 1, kind, dies, check=False, timeout=60)
    assert all(outcome.exitcode is not None for outcome in outcomes)  # none hangs
    if not dies:
        assert f"ValueError: the {kind} of rank 1 fails" in outcomes[1].error_text
    for rank in (0, 2, 3):
        assert outcomes[rank].exitcode == 1 and "lost rank" in outcomes[rank].error_text


# ---- flags ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in PAIRED])
def test_overlap_is_refused_in_one_line_with_other_schedules_and_without_experts(schedule):
    pp = "--pp 2 --microbatches 8"
    needs = "^--overlap needs schedule in .'dualpipe', 'dualpipe-v'.$"
    alone = "^--ep 1 --overlap: no tokens travel to experts of other ranks$"
    refused = {f"{pp} --experts 4 --schedule {schedule}": needs}
    refused |= {f"{pp} {of} --schedule dualpipe-v": alone for of in ("", "--experts 4")}
    for flags, sentence in refused.items():
        with pytest.raises(ValueError, match=sentence):
            hybrid.parse(f"{flags} --overlap".split(), 8)
    with pytest.raises(ValueError, match=needs):
        hybrid.parse(["--overlap"], 1)
