"""Schedules against their formulas and NCCL's rules, the executor against one process."""

import copy
import gc
import json
import operator
import pickle
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict, deque
from contextlib import contextmanager
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

import pipeline
from collectives import count_bytes, rank_and_size
from ddp import DistributedDataParallel
from gpu_counts import batches, waits
from pipeline import (
    SCHEDULES,
    Action,
    Pipeline,
    bubble_time,
    draw,
    dualpipe,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    peak_activations,
    pipeline_bytes,
    simulate,
    sum_replicas,
    zb_h1,
    zb_h2,
    zb_v,
)
from nccl_replay import record, replay
from ranks import run

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 4 * p + 1)]
TRAINING = [gpipe, one_f_one_b]

every_size = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


# ---- schedules -----------------------------------------------------------------------------------


def test_evaluation_is_the_forwards_alone():
    for p, m in SIZES:
        assert forward_only(p, m) == [[("F", k, 0) for k in range(m)]] * p
        timeline = simulate(forward_only(p, m), forward=3)
        assert timeline.total == 3 * (m + p - 1) and timeline.bubble == [3 * (p - 1)] * p


def test_peak_activations_are_m_for_gpipe_and_at_most_p_minus_rank_for_1f1b():
    for p, m in SIZES:
        assert simulate(gpipe(p, m)).peak == [m] * p
        assert simulate(one_f_one_b(p, m)).peak == [min(m, p - rank) for rank in range(p)]


# where each schedule is defined, and where its formulas are exact
DEFINED = {
    "interleaved": lambda p, m: m % p == 0,
    "dualpipe": lambda p, m: p % 2 == 0 and m % 2 == 0 and m >= 2 * p,
}
EXACT = {"zb-h1": lambda p, m: m >= p, "zb-h2": lambda p, m: m >= 2 * p - 1,
         "zb-v": lambda p, m: m >= 2 * p}
SPLIT_TIMES = [(1, 2, 1), (2, 5, 2), (3, 4, 1)]  # forward, backward, its part that is W


def _sizes_of(name):
    return [size for size in SIZES if DEFINED.get(name, lambda p, m: True)(*size)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_place_of_a_route_does_each_microbatch_once_and_in_order(name):
    for p, m in _sizes_of(name):
        schedule = SCHEDULES[name](p, m)
        done = {(k, *place) for k in range(m) for place in schedule.route(k)}
        assert done == {(a.microbatch, r, a.chunk) for r, row in enumerate(schedule) for a in row}
        for actions in schedule:
            kinds = defaultdict(str)
            for action in actions:
                kinds[action.microbatch, action.chunk] += action.kind
            assert set(kinds.values()) <= {"FB", "FIW"}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_waits_for_what_the_route_brings(name):
    """Against the definition: F after the F before it on the route, B or I after that behind it."""
    for p, m in _sizes_of(name)[::3]:
        schedule = SCHEDULES[name](p, m)
        for F, B, W in SPLIT_TIMES:
            timeline = simulate(schedule, F, B, 0.5, W)
            at = {(a, r): t for r, row in enumerate(timeline.start) for a, t in row.items()}
            length = {"F": F, "B": B, "I": B - W, "W": W}
            for rank, actions in enumerate(schedule):
                free = 0
                for action in actions:
                    kind, k, chunk = action
                    route = schedule.route(k)
                    place = route.index((rank, chunk))
                    if kind == "W":
                        needed = [("I", place)]
                    elif kind == "F":
                        needed = [("F", place - 1)] if place else []
                    else:
                        last = place + 1 == len(route)
                        needed = [("F", place)] + ([] if last else [("BI", place + 1)])
                    ready = free
                    for kinds, where in needed:
                        source, other = route[where]
                        ends = [
                            at[found, source] + length[one] + (0.5 if source != rank else 0)
                            for one in kinds
                            if ((found := Action(one, k, other)), source) in at
                        ]
                        ready = max(ready, *ends)
                    assert at[action, rank] == ready
                    free = ready + length[kind]


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubble_and_peak_are_those_of_the_formulas(name):
    for p, m in _sizes_of(name):
        schedule = SCHEDULES[name](p, m)
        parts = 2 if name in ("interleaved", "zb-v") else 1
        for F, B, W in SPLIT_TIMES:
            timeline = simulate(schedule, F / parts, B / parts, weight=W / parts)
            claimed = bubble_time(name, p, m, F, B, W)
            ranks = timeline.idle if name in ("zb-h2", "zb-v") else timeline.bubble
            if name == "dualpipe":
                assert claimed / 2 <= max(ranks) <= claimed
            elif EXACT.get(name, lambda p, m: True)(p, m):
                assert max(ranks) == pytest.approx(claimed)
            if name not in ("zb-h2", "zb-v", "dualpipe"):
                assert timeline.bubble == pytest.approx([max(ranks)] * p)
        assert max(timeline.peak) / parts == peak_activations(name, p, m)
        if name == "dualpipe":
            assert timeline.peak == [p + 1] * p


def test_more_chunks_make_the_bubble_smaller():
    for p, m in _sizes_of("interleaved"):
        for v in (1, 2, 3, 4):
            timeline = simulate(interleaved(p, m, v), 1 / v, 2 / v)
            claimed = bubble_time("interleaved", p, m, num_chunks=v)
            assert timeline.bubble == pytest.approx([claimed] * p)
            assert max(timeline.peak) / v == peak_activations("interleaved", p, m, v)


def test_the_tables_of_the_schedules_are_what_the_code_gives():
    small = lambda a: f"{a.kind.lower() if a.chunk else a.kind}{a.microbatch}"
    for make_schedule, p, m in (
        (one_f_one_b, 4, 6), (interleaved, 2, 4), (zb_h1, 4, 6), (zb_h2, 2, 4), (zb_v, 2, 4),
        (dualpipe, 4, 8),
    ):
        rows = re.findall(r"rank \d   ((?:[FBIWfbiw]\d ?)+)", make_schedule.__doc__)
        told = [" ".join(map(small, actions)) for actions in make_schedule(p, m)]
        assert [row.strip() for row in rows] == told


def test_where_a_schedule_is_not_defined_the_error_names_the_sizes():
    with pytest.raises(ValueError, match="num_microbatches=6 is not a multiple of num_stages=4"):
        interleaved(4, 6)
    with pytest.raises(ValueError, match="num_chunks=0"):
        interleaved(4, 8, 0)
    for sizes in ((3, 8), (4, 9), (4, 6)):
        text = "num_stages={} and num_microbatches={}: DualPipe".format(*sizes)
        with pytest.raises(ValueError, match=text):
            dualpipe(*sizes)


def test_the_command_compares():
    command = [sys.executable, pipeline.__file__, "--stages", "4", "--microbatches", "8"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    for name in SCHEDULES:
        row = next(line for line in done.stdout.splitlines() if line.startswith(name))
        claimed, simulated, peak, held = map(float, row.split()[1:5])
        assert peak == held and (claimed == simulated or name == "dualpipe")


def test_the_command_draws_and_traces(tmp_path, monkeypatch, capsys):
    file = tmp_path / "trace.json"
    command = ["pipeline.py", "--schedule", "zb-h2", "--microbatches", "6", "--trace", str(file)]
    monkeypatch.setattr(sys, "argv", command)
    pipeline.main()
    printed = capsys.readouterr().out
    assert printed.startswith("rank 0  F0F1F2F3F4F5") and "\033" not in printed
    events = json.loads(file.read_text())["traceEvents"]
    assert len(events) == 4 * 6 * 3 and {event["ph"] for event in events} == {"X"}
    for rank in range(4):
        row = sorted((e["ts"], e["dur"]) for e in events if e["tid"] == rank)
        assert all(ts + dur <= later for (ts, dur), (later, _) in zip(row, row[1:]))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--schedule", "dualpipe", "--stages", "3"], "num_stages=3"),
        (["--trace", "trace.json"], "--trace trace.json is of one schedule: which --schedule?"),
        (["--schedule", "1f1b", "--trace", "no/such/folder"], "No such file.*no/such/folder"),
    ],
)
def test_what_the_command_cannot_do_is_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pipeline.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        pipeline.main()
    printed, error = capsys.readouterr()
    assert not printed and re.search(message, error.splitlines()[-1])


def test_the_drawing_of_the_module_is_what_the_code_gives():
    pairs = zip(draw(gpipe(4, 4)).splitlines(), draw(one_f_one_b(4, 4)).splitlines())
    drawn = [tuple(row.removeprefix(f"rank {r}  ") for row in pair) for r, pair in enumerate(pairs)]
    assert re.findall(r"([.FB\d]{20,}) +([.FB\d]{20,})", pipeline.__doc__) == drawn


def _actions(text):
    return [Action(cell[0], int(cell[1:])) for cell in text.split()]


def test_a_schedule_that_cannot_finish_is_refused():
    with pytest.raises(ValueError, match="rank 0 at B0, rank 1 at F0"):
        simulate([_actions("B0 F0"), _actions("F0 B0")])
    with pytest.raises(ValueError, match="rank 0 at B1, rank 1 at F1"):
        simulate([_actions("F0 B1 F1 B0"), _actions("F0 F1 B1 B0")])
    with pytest.raises(ValueError, match="cannot finish: rank 0 at B0, rank 1 at B0 "):
        simulate([_actions("F0 B0"), _actions("B0 F0")])
    action = "Action(kind='{}', microbatch={}, chunk=0)".format
    for other, wrong in (
        ("F0 B0 F1", "rank 0 lacks " + action("F", 1)),  # the rank that is wrong is the other one
        ("F0 F0 B0", f"rank 1 has {action('F', 0)} once too often"),
        ("F0", f"rank 1 lacks {action('B', 0)}"),
        ("F0 I0", f"rank 1 lacks {action('W', 0)}"),
        ("F0 B0 W0", f"rank 1 lacks {action('I', 0)}"),
    ):
        with pytest.raises(ValueError, match=re.escape(wrong)):
            simulate([_actions("F0 B0"), _actions(other)])


def test_what_is_no_schedule_is_named():
    for actions, wrong in (
        ([], "rank 0 of 0 has no actions"),
        ([_actions("F0 B0"), []], "rank 1 of 2 has no actions"),
        ([_actions("F0 B0"), [("X", 0, 0)]], "rank 1 has ('X', 0, 0), which is no Action("),
        ([[("F", 0.5)]], "rank 0 has ('F', 0.5), which is no Action("),
        ([["F0", "B0"]], "rank 0 has 'F0', which is no Action("),
    ):
        with pytest.raises(ValueError, match=re.escape(wrong)):
            simulate(actions)
    rows = [[("F", 0), ("B", 0, 0)]] * 2
    assert simulate(rows).start == simulate([_actions("F0 B0")] * 2).start  # tuples will do


@pytest.mark.parametrize("make_schedule", [*TRAINING, forward_only])
def test_sizes_below_1_are_named(make_schedule):
    with pytest.raises(ValueError, match="num_stages=0 "):
        make_schedule(0, 4)
    with pytest.raises(ValueError, match="num_microbatches=0 "):
        make_schedule(2, 0)


# ---- the order of messages, under NCCL's rules ---------------------------------------------------


def _replay(programs, message=0.0):
    """Run programs whose messages meet in issue order; (what each rank is stuck at, their times).

    A program is a list of ("post", message), which never blocks, ("wait", message) and ("work",
    its time). A message is a tuple whose places 1 and 2 hold the ranks of its ends. It is under way
    once, at both of them, it is the first that was posted and is not done, and what was before its
    post is done; it takes the time `message`.
    """
    position, clocks, done = [0] * len(programs), [0.0] * len(programs), {}
    queues, free = [deque() for _ in programs], [0.0] * len(programs)
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            while position[rank] < len(program):
                kind, what = program[position[rank]]
                if kind == "post":
                    queues[rank].append((what, clocks[rank]))
                elif kind == "work":
                    clocks[rank] += what
                elif what in done:
                    clocks[rank] = max(clocks[rank], done[what])
                else:
                    break
                position[rank] += 1
                progress = True
        for queue in queues:
            while queue:
                ranks = queue[0][0][1:3]
                ends = [queues[rank][0] for rank in ranks if queues[rank]]
                if [end[0] for end in ends] != 2 * [queue[0][0]]:
                    break
                began = max(*[posted for _, posted in ends], *[free[rank] for rank in ranks])
                for rank in ranks:
                    done[queues[rank].popleft()[0]] = free[rank] = began + message
                progress = True
    stuck = {r: a[position[r]] for r, a in enumerate(programs) if position[r] < len(a)}
    return stuck, clocks


def _links(schedule):
    """{(action, rank): (transfer that it needs, the one it makes)}, None at ends of a route."""
    return {
        (action, rank): (
            schedule.input_transfer(action, rank), schedule.output_transfer(action, rank)
        )
        for rank, actions in enumerate(schedule)
        for action in actions
    }


def _program(actions, order, rank, links, times, most):
    """A rank that posts messages in `order`, each as soon as it can, waiting for what it needs.

    times: of each kind of action; most: sends that are not waited for.
    """
    program, unposted, exists, sent = [], deque(order), set(), deque()

    def post():
        while unposted and (unposted[0].destination == rank or unposted[0] in exists):
            message = unposted.popleft()
            program.append(("post", message))
            if message.source == rank:
                sent.append(message)
            if len(sent) > most:
                program.append(("wait", sent.popleft()))

    for action in actions:
        needed, made = links[action, rank]
        post()
        if needed and needed.source != rank:
            program.append(("wait", needed))
        program.append(("work", times[action.kind]))
        if made:
            exists.add(made)
    post()
    return program + [("wait", message) for message in order]


def _replay_orders(schedule, orders, times=(0, 0, 0), message=0.0):
    """What ranks are stuck at, and their times. times: of F, B and its part W."""
    (forward, backward, weight), links, p = times, _links(schedule), len(schedule)
    times = {"F": forward, "B": backward, "I": backward - weight, "W": weight}
    programs = [_program(schedule[r], orders[r], r, links, times, p) for r in range(p)]
    return _replay(programs, message)


def _orders(schedule, message):
    """Each rank's transfers, in the order of `simulate` for messages that take so long."""
    transfers = simulate(schedule, message=message).transfers
    return [[t for t in transfers if rank in t[1:]] for rank in range(len(schedule))]


@pytest.mark.parametrize("name", [*SCHEDULES, "forward_only"])
def test_no_rank_waits_forever_when_messages_go_in_their_global_order(name):
    """Ranks post what they can in the global order; a send is over when its receive is posted."""
    for p, m in _sizes_of(name)[::3]:
        schedule = {**SCHEDULES, "forward_only": forward_only}[name](p, m)
        needed, made = (
            Counter(t for t in ends if t and t.source != t.destination)
            for ends in zip(*_links(schedule).values())
        )
        assert needed == made
        # F, B, a message, W
        for times in ((1, 2, 0, 1), (1, 2, pipeline.SHORT, 1), (2, 5, 1, 2), (1, 1, 7, 1)):
            transfers = simulate(schedule, *times).transfers
            assert made == Counter(transfers)
            orders = [[t for t in transfers if rank in t[1:]] for rank in range(p)]
            assert not _replay_orders(schedule, orders)[0]


def _loss_of_time(schedule, orders, times, message):
    """By how much longer it takes if each rank has one queue of messages, in this order."""
    forward, backward, weight = times
    ideal = simulate(schedule, forward, backward, message, weight).total
    stuck, clocks = _replay_orders(schedule, orders, times, message)
    assert not stuck
    return max(clocks) / ideal - 1


def _transfers(name, m):
    _, p = rank_and_size()
    schedule = SCHEDULES[name](p, m)
    chunks = range(1 + max(action.chunk for action in schedule[0]))
    return Pipeline([nn.Linear(3, 3) for _ in chunks], schedule, _loss).transfers


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_queue_of_messages_per_rank_makes_a_step_no_longer(name):
    """In order, as NCCL's communicators are, against messages that pass one another."""
    for p, m in {(2, 8), (3, 9), (8, 32)} & set(_sizes_of(name)):
        schedule = SCHEDULES[name](p, m)
        assert _loss_of_time(schedule, _orders(schedule, pipeline.SHORT), (1, 2, 1), 0.05) < 0.005
    schedule, orders = SCHEDULES[name](4, 16), run(4, _transfers, name, 16)
    assert _loss_of_time(schedule, orders, (1, 2, 1), 0.05) < 0.005
    for times in ((1, 3, 1), (1, 2, 0.7)):  # others than those of the order
        assert _loss_of_time(schedule, orders, times, 0.1) < 0.01
    if name in ("gpipe", "zb-h1"):  # in the order of messages that take no time
        assert _loss_of_time(schedule, _orders(schedule, 0), (1, 2, 1), 0.05) > 0.03


def test_the_replay_finds_the_deadlock_of_the_naive_order():
    """Receive before an action and send after it: neighbours in 1F1B then send to each other."""
    schedule = one_f_one_b(3, 4)
    links = _links(schedule)
    naive = [
        [link for action in actions for link in links[action, rank] if link]
        for rank, actions in enumerate(schedule)
    ]
    assert set(_replay_orders(schedule, naive)[0]) == {0, 1, 2}


def test_the_replay_finds_two_messages_exchanged_at_one_end():
    schedule = gpipe(2, 3)
    transfers = simulate(schedule).transfers
    other = [transfers[1], transfers[0], *transfers[2:]]
    assert not _replay_orders(schedule, [transfers, transfers])[0]
    assert set(_replay_orders(schedule, [transfers, other])[0]) == {0, 1}


# ---- the executor against one process ------------------------------------------------------------


def _loss(output, target):
    """A microbatch's share: a sum, so that the shares add up to the loss of the whole batch."""
    return (output.double() - target).square().sum() / 7


def _compare(layers, bounds, schedule, batches, group=None, recompute=False, make=torch.clone):
    """Run this rank's layers[bounds[rank]:bounds[rank + 1]]; compare with all on whole batches.

    Losses, the gradients of what `make` makes the inputs of, and the gradients summed over the
    batches. Returns the names compared.
    """
    rank, num_stages = rank_and_size(group)
    model = nn.Sequential(*layers)
    model.zero_grad()
    losses, input_grads = [], []
    for inputs, targets in batches:
        inputs = inputs.clone().requires_grad_(inputs.is_floating_point())
        losses.append(_loss(model(make(inputs)), targets))
        losses[-1].backward()
        input_grads.append(inputs.grad)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()

    stage = model[bounds[rank] : bounds[rank + 1]]
    executor = Pipeline(stage, schedule, _loss, group, recompute)
    first, last = rank == 0, rank == num_stages - 1
    for (inputs, targets), loss, input_grad in zip(batches, losses, input_grads):
        inputs = inputs.clone().requires_grad_(inputs.is_floating_point() and first)
        batch = inputs if make is torch.clone else make(inputs)
        found = executor.step(batch if first else None, targets if last else None)
        if last:
            assert not found.requires_grad
            _equal(found, loss.detach())
        else:
            assert found is None
        if first:
            _equal(inputs.grad, input_grad)
    for name, parameter in stage.named_parameters():
        _equal(parameter.grad, expected[name], name)
    return [name for name, _ in stage.named_parameters()]


def _equal(found, expected, name=""):
    message = lambda text: f"{name} {text}"
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=message)


def _problem(seed, num_stages, rows, num_batches=1):
    """Layers of random widths, cut into stages of uneven depth, and batches of `rows`."""
    torch.manual_seed(seed)
    sizes = random.Random(seed)
    depth = num_stages + sizes.randint(0, 4)
    widths = [sizes.randint(1, 6) for _ in range(depth + 1)]
    linears = [nn.Linear(i, o, dtype=torch.float64) for i, o in zip(widths, widths[1:])]
    layers = [nn.Sequential(linear, nn.Tanh()) for linear in linears]
    bounds = [0, *sorted(sizes.sample(range(1, depth), num_stages - 1)), depth]
    shape = (num_batches, rows, sizes.randint(1, 3))
    inputs = torch.randn(*shape, widths[0], dtype=torch.float64)
    targets = torch.randn(*shape, widths[-1], dtype=torch.float64)
    return layers, bounds, list(zip(inputs, targets))


def _random_problems():
    _, p = rank_and_size()
    names = set()
    for m in (1, 2, p, 2 * p + 1):
        layers, bounds, batches = _problem(m, p, rows=m * (1 + m % 3), num_batches=2)
        names |= {(m, name) for name in _compare(layers, bounds, one_f_one_b(p, m), batches)}
    return names


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_stages_of_any_width_and_depth_and_inputs_get_the_gradients_of_one_process(world_size):
    compared = run(world_size, _random_problems)
    for m in (1, 2, world_size, 2 * world_size + 1):
        layers, _, _ = _problem(m, world_size, rows=m)
        every_name = {(m, name) for name, _ in nn.Sequential(*layers).named_parameters()}
        assert every_name == {(k, name) for names in compared for k, name in names if k == m}


def _cut_for(schedule, layers, seed):
    """This rank's stages, one per chunk: layers cut unevenly along the route; and their names."""
    rank, _ = rank_and_size()
    sizes, stages, names = random.Random(seed), {}, {}
    for route in schedule.routes:
        count = len(route)
        bounds = [0, *sorted(sizes.sample(range(1, len(layers)), count - 1)), len(layers)]
        sizes = random.Random(seed)  # the same cut for a replica
        for stage, (place, chunk) in enumerate(route):
            if place == rank:
                mine = range(bounds[stage], bounds[stage + 1])
                stages[chunk] = nn.Sequential(*[copy.deepcopy(layers[i]) for i in mine])
                names[chunk] = mine
    return [stages[chunk] for chunk in sorted(stages)], [names[chunk] for chunk in sorted(names)]


def _run_schedule(name, m, dtype, tolerance, recompute=False):
    """Two steps, whose gradients add up; returns whether this rank has them all, and its loss."""
    rank, p = rank_and_size()
    schedule = SCHEDULES[name](p, m)
    torch.manual_seed(m)
    make_layer = lambda: nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5), nn.Tanh()).to(dtype)
    layers = [make_layer() for _ in range(2 * p + 3)]
    inputs, targets = torch.randn(2, 2, 2 * m, 3, 5, dtype=dtype)
    loss_fn = lambda output, target: (output - target).square().sum() / 7
    stages, owned = _cut_for(schedule, layers, seed=m)
    executor = Pipeline(stages, schedule, loss_fn, recompute=recompute)
    losses, expected = [], []
    for x, y in zip(inputs, targets):
        # in fp32 by microbatches, too: on the whole batch other sums round other ways
        parts = zip(*(t.chunk(m if dtype == torch.float32 else 1) for t in (x, y)))
        expected.append(0)
        for part, target in parts:
            loss = loss_fn(nn.Sequential(*layers)(part), target)
            loss.backward()
            expected[-1] += loss.detach()
        losses.append(executor.step(x, y))
        assert not executor.in_flight and not executor.put_off
        assert not executor.leaving and not executor.arriving
    if name == "dualpipe":
        sum_replicas(stages)
    for stage, mine in zip(stages, owned):
        for layer, i in zip(stage, mine):
            for (key, found), one in zip(layer.named_parameters(), layers[i].parameters()):
                message = lambda text: f"{name} layer {i} {key} {text}"
                error = tolerance * one.grad.abs().max().item()  # of a sum: sums round
                torch.testing.assert_close(found.grad, one.grad, rtol=0, atol=error, msg=message)
    gradients = [
        torch.cat([p.grad.flatten() for p in stage.parameters()]) for stage in stages
    ]
    return losses, expected, owned, gradients


SOAK_3_AND_4 = [pytest.param(p, marks=pytest.mark.soak) for p in (3, 4)]


@pytest.mark.parametrize("world_size", [1, 2, *SOAK_3_AND_4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_gives_the_losses_and_gradients_of_one_process(name, world_size):
    sizes = [m for p, m in _sizes_of(name) if p == world_size]
    for m in {*sizes[:2], *sizes[len(sizes) // 2 :][:1], *sizes[-1:]}:
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-6)):
            results = run(world_size, _run_schedule, name, m, dtype, tolerance)
            losses = [loss for loss, *_ in results if loss[0] is not None]
            assert len(losses) == (2 if name == "dualpipe" else 1)
            for step, expected in enumerate(results[0][1]):
                total = sum(loss[step] for loss in losses)
                torch.testing.assert_close(total, expected, rtol=tolerance, atol=tolerance)
            owned = [i for *_, mine, _ in results for part in mine for i in part]
            copies = 2 if name == "dualpipe" else 1
            assert sorted(owned) == sorted(copies * list(range(2 * world_size + 3)))
            if name == "dualpipe":  # replicas have the same bits
                for rank, (*_, gradients) in enumerate(results):
                    assert torch.equal(gradients[0], results[world_size - 1 - rank][3][1])


def _count_flops(make_schedule):
    rank, p = rank_and_size()
    stage = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    executor = Pipeline(stage, make_schedule(p, 4), _loss)
    inputs, targets = torch.randn(2, 8, 8)
    with FlopCounterMode(display=False) as counter:
        executor.step(inputs, targets.double())
    return counter.get_total_flops()


def test_halved_backwards_do_no_work_twice():
    whole = run(2, _count_flops, one_f_one_b)
    assert run(2, _count_flops, zb_h1) == run(2, _count_flops, zb_h2) == whole and min(whole) > 0


def _live_bytes(name):
    """Bytes of all tensors after each of three steps."""
    rank, p = rank_and_size()
    schedule = SCHEDULES[name](p, 8)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(8)]
    executor = Pipeline(_cut_for(schedule, layers, seed=0)[0], schedule, _loss)
    inputs, targets, live = torch.randn(16, 8), torch.zeros(16, 8), []
    for _ in range(3):
        executor.step(inputs, targets)
        live.append(_bytes_of_all_tensors())
    return live


def _bytes_of_all_tensors():
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "dualpipe"])
def test_a_step_leaves_nothing_behind(name):
    for first, second, third in run(2, _live_bytes, name):
        assert first >= second >= third  # what earlier tests have left may go meanwhile


def _return_two():
    stage = nn.LSTM(3, 3)  # returns a tuple
    executor = Pipeline(stage, gpipe(1, 2), _loss)
    with pytest.raises(ValueError, match="stage 0 returned tuple, not a tensor"):
        executor.step(torch.zeros(4, 2, 3), torch.zeros(4, 2, 3))


def test_a_stage_that_does_not_return_a_tensor_is_named():
    run(1, _return_two)


def _return_rows():
    for loss_fn, wrong in (
        (lambda output, target: output - target, r"\(2, 3\), not a scalar"),
        (lambda output, target: _loss(output, target).item(), "float, not a tensor"),
        (lambda output, target: None, "NoneType, not a tensor"),
    ):
        with pytest.raises(ValueError, match="loss_fn returned " + wrong):
            Pipeline(nn.Linear(3, 3), zb_h1(1, 2), loss_fn).step(*torch.zeros(2, 4, 3))


def test_a_loss_that_is_not_a_scalar_is_named():
    run(1, _return_rows)


def _loss_of_more():
    """What further arguments of step() are reaches the loss of each microbatch, and only there."""
    rank, p = rank_and_size()
    seen, weighted = [], lambda output, target, *more: seen.append(more) or output.sum() * more[0]
    stage = nn.Linear(3, 3)
    executor, batch = Pipeline(stage, one_f_one_b(p, 2), weighted), torch.ones(4, 3)
    grads = []
    for factor in (1.0, 3.0):
        stage.zero_grad()
        executor.step(batch, batch, factor, "other")
        grads.append(stage.weight.grad.clone())
    torch.testing.assert_close(grads[1], 3 * grads[0])
    assert seen == (2 * [(1.0, "other")] + 2 * [(3.0, "other")] if rank == p - 1 else [])


def test_further_arguments_of_a_step_are_those_of_the_loss():
    run(2, _loss_of_more)


class Twice(nn.Module):
    """Uses a weight twice; in bf16 where matrices are multiplied."""

    def __init__(self, autocast):
        super().__init__()
        self.linear, self.autocast, self.additions = nn.Linear(4, 4), autocast, 0
        self.linear.weight.register_post_accumulate_grad_hook(self.count)

    def count(self, parameter):
        self.additions += 1

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.linear(self.linear(x).tanh()).float()


def _used_twice(autocast):
    results = []
    for make_schedule in (one_f_one_b, zb_h1):
        torch.manual_seed(0)
        stage = Twice(autocast)
        loss = Pipeline(stage, make_schedule(1, 4), _loss).step(torch.randn(8, 4), torch.ones(8, 4))
        results.append((loss, stage.linear.weight.grad, stage.linear.bias.grad))
        assert stage.additions == 4  # once for each microbatch
    return results


@pytest.mark.parametrize("autocast", [False, True])
def test_a_weight_used_twice_gets_one_sum_also_under_autocast(autocast):
    whole, halved = run(1, _used_twice, autocast)[0]
    tolerance = 2e-2 if autocast else 1e-6  # two products in bf16 are summed in fp32, or before
    for found, expected in zip(halved, whole):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


class SeveralTimes(nn.Module):
    """Uses a layer on its input times each of some factors."""

    def __init__(self, layer, factors):
        super().__init__()
        self.layer, self.factors = layer, factors

    def forward(self, x):
        return sum(self.layer(x * factor).float() for factor in self.factors)


def _summed_in_fp32():
    for make_schedule, inputs, factors in (
        (one_f_one_b, (256, 1), (1,)),  # two microbatches
        (zb_h1, (256, 1), (1,)),
        (zb_h1, (1, 1), (128, 0.5)),  # and two uses in each
    ):
        layer = nn.Linear(4, 4).bfloat16()
        for parameter in layer.parameters():
            parameter.grad_dtype = torch.float32
        stage = SeveralTimes(layer, factors)
        batch = torch.tensor(inputs).unsqueeze(1).expand(2, 4).bfloat16()
        Pipeline(stage, make_schedule(1, 2), lambda y, _: y.sum()).step(batch, batch)
        assert layer.weight.grad.eq(257).all() and layer.bias.grad.eq(2 * len(factors)).all()
        assert layer.weight.grad.dtype == torch.float32


def test_gradients_of_bf16_weights_add_up_in_fp32():
    """256 + 1 takes nine bits; bf16 has eight."""
    run(1, _summed_in_fp32)


def _replicas_in_fp32():
    """DualPipe's, of bf16 weights, some without a gradient."""
    rank, p = rank_and_size()
    stages = [nn.Linear(3, 3).bfloat16() for _ in range(p)]
    for chunk, stage in enumerate(stages):
        for parameter in stage.parameters():
            parameter.grad_dtype = torch.float32
        if rank == 0:
            stage.weight.grad = torch.full((3, 3), 256.0 + chunk)
        if rank == 1 or chunk == 1:
            stage.bias.grad = torch.full((3,), 1 / 3)
    with batches() as count, waits() as waited:
        sum_replicas(stages)
    assert count == {"batches": 1, "off 16": 0} and not waited
    return [[p.grad.unique() for p in stage.parameters()] for stage in stages]


def test_replicas_of_bf16_weights_are_summed_in_fp32_in_one_batch_for_which_no_host_waits():
    first, second = run(2, _replicas_in_fp32)
    third = torch.tensor([1 / 3])
    for found in (first, second[::-1]):
        expected = [[torch.tensor([256.0]), third], [torch.tensor([257.0]), 2 * third]]
        assert all(torch.equal(*pair) for pairs in zip(found, expected) for pair in zip(*pairs))


def _order_of_products():
    """In W, and not before, a linear's weight gets its gradient; hooks see it then."""
    rank, p = rank_and_size()
    schedule, events = zb_h1(p, 4), []
    stage = nn.Linear(3, 3)
    executor = Pipeline(stage, schedule, _loss)
    stage.weight.register_post_accumulate_grad_hook(lambda _: events.append("W"))
    backward = executor._backward

    def logged(*arguments):
        events.append("I")
        return backward(*arguments)

    executor._backward = logged
    executor.step(torch.randn(4, 3), torch.zeros(4, 3))
    return events, [action.kind for action in schedule[rank] if action.kind in "IW"]


def test_weight_gradients_come_in_their_own_slot():
    for found, expected in run(3, _order_of_products):
        assert found == expected


def _record_schedule(name, m):
    rank, p = rank_and_size()
    schedule = SCHEDULES[name](p, m)
    with record() as events:
        layers = [nn.Linear(3, 3) for _ in range(2 * p + 3)]
        stages, _ = _cut_for(schedule, layers, seed=0)
        executor = Pipeline(stages, schedule, _loss)
        for _ in range(2):
            executor.step(torch.randn(m, 3), torch.zeros(m, 3))
    return events


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_would_hang_on_nccl_waits_for_all_and_keeps_few_sends_under_way(name):
    for p, m in {(2, 1), (2, 4), (3, 6), (4, 8), (6, 12)} & set(_sizes_of(name)):
        programs = run(p, _record_schedule, name, m)
        for events in programs:
            keys = lambda kind: sorted(e["key"] for e in events if e["kind"] == kind)
            assert keys("post") and keys("post") == keys("wait")
            sends = {e["key"] for e in events if "messages" in e and e["messages"][0][0] == "send"}
            under_way = [0]
            for event in events:
                if event["key"] in sends:
                    under_way.append(under_way[-1] + {"post": 1, "wait": -1}[event["kind"]])
            assert min(m, 2) <= max(under_way) <= p + 1
        replay(programs)


def _interleaved_groups():
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    dist.barrier()  # to a rank that still connects, one that has already left is a failure
    mine = dist.get_rank() % 2
    for make_schedule in TRAINING:
        layers, bounds, batches = _problem(mine, 2, rows=6)
        _compare(layers, bounds, make_schedule(2, 3), batches, groups[mine])


def test_two_pipelines_side_by_side_in_groups_of_their_own():
    run(4, _interleaved_groups)


class Transpose(nn.Module):
    def forward(self, x):
        return x.transpose(-1, -2)


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


def _boundaries():
    p, m, T, D, V = 2, 3, 4, 5, 11
    linear = lambda i, o: nn.Linear(i, o, dtype=torch.float64)
    embedding = nn.Embedding(V, D, dtype=torch.float64)
    x = torch.randn(2 * m, T, D, dtype=torch.float64)
    tokens = torch.randint(V, (2 * m, T))
    bfloat16, float64 = Cast(torch.bfloat16), Cast(torch.float64)
    for layers, inputs, output_shape in (
        ([linear(D, D), Transpose(), linear(T, 3)], x, (D, 3)),  # the output is a transposed view
        ([linear(D, D), nn.Identity(), Transpose(), linear(T, 3)], x, (D, 3)),  # the gradient is
        ([linear(D, 3), bfloat16, float64, linear(3, D)], x, (T, D)),
        ([embedding, nn.Tanh(), linear(D, 3)], tokens, (T, 3)),
    ):
        targets = torch.randn(2 * m, *output_shape, dtype=torch.float64)
        for make_schedule in TRAINING:
            _compare(layers, [0, 2, len(layers)], make_schedule(p, m), [(inputs, targets)])


def test_boundaries_that_are_transposed_views_or_bf16_and_tokens_as_inputs():
    run(2, _boundaries)


def _odd_stages():
    rank, p = rank_and_size()
    torch.manual_seed(0)
    linear = lambda: nn.Linear(4, 4, dtype=torch.float64)
    frozen = lambda: linear().requires_grad_(False)
    inplace = lambda: nn.LeakyReLU(0.5, inplace=True)
    batches = list(zip(*torch.randn(2, 2, 8, 4, dtype=torch.float64)))
    for layers in (
        [nn.Tanh(), nn.GELU(), linear(), linear()],  # no parameters first
        [linear(), linear(), nn.Tanh(), nn.GELU()],  # none last
        [frozen(), frozen(), linear(), frozen()],
        [linear(), frozen(), frozen(), frozen()],
        [nn.Identity(), nn.Identity(), linear(), linear()],
        [linear(), linear(), nn.Identity(), nn.Identity()],
        [inplace(), linear(), inplace(), linear()],
    ):
        # data that requires no gradient; the square of a leaf, whose graph is run through once
        data = lambda x: x.detach().clone()
        _compare(layers, [0, 2, 4], zb_h1(p, 4), batches, make=data)
        arguments = one_f_one_b(p, 4), batches, None, True, torch.square
        compared = _compare(layers, [0, 2, 4], *arguments)
        mine = layers[2 * rank : 2 * rank + 2]
        assert len(compared) == len(list(nn.Sequential(*mine).parameters()))
        again = pickle.loads(pickle.dumps(copy.deepcopy(nn.Sequential(*layers))))
        assert all(map(torch.equal, again.parameters(), nn.Sequential(*layers).parameters()))


def test_stages_that_are_frozen_without_parameters_identities_or_in_place():
    run(2, _odd_stages)


class Detach(nn.Module):
    def forward(self, x):
        return x.detach()


def _nothing_from_behind():
    """Frozen all but the input, which gets no gradient; what gets none behind a detach() gets 0."""
    rank, p = rank_and_size()
    stage = [nn.Linear(4, 4), nn.Sequential(Detach(), nn.Linear(4, 4))][rank]
    executor = Pipeline(stage, one_f_one_b(p, 2), _loss)
    inputs = torch.ones(4, 4)
    executor.step(inputs, torch.zeros(4, 4))
    assert inputs.grad is None
    return [bool(parameter.grad.any()) for parameter in stage.parameters()]


def test_behind_a_detach_gradients_are_zero():
    assert run(2, _nothing_from_behind) == [[False, False], [True, True]]


def _one_module_as_two_chunks(name):
    """A weight-tied model, replicated: gradients are reduced once, when both uses have theirs."""
    rank, world_size = rank_and_size()
    groups = [dist.new_group([r]) for r in range(world_size)]
    torch.manual_seed(0)
    layer = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh()).double()
    inputs, targets = torch.randn(2, 4 * world_size, 4, dtype=torch.float64)
    expected = torch.autograd.grad(_loss(layer(layer(inputs)), targets), list(layer.parameters()))
    replica = DistributedDataParallel(layer, gradient_divide_factor=1)
    rows = slice(4 * rank, 4 * rank + 4)
    executor = Pipeline([replica, replica], SCHEDULES[name](1, 2), _loss, groups[rank])
    for _ in range(2):
        replica.zero_grad()
        executor.step(inputs[rows], targets[rows])
        replica.finish_grad_sync()
        for parameter, gradient in zip(layer.parameters(), expected):
            _equal(parameter.grad, gradient, name)


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_one_replicated_module_as_two_chunks_is_reduced_once(name):
    run(2, _one_module_as_two_chunks, name)


def _replicas_without_parameters():
    """DualPipe over a linear layer and one without parameters; then with one that is frozen."""
    rank, p = rank_and_size()
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Tanh()]
    expected = copy.deepcopy(layers[0])
    inputs, targets = torch.randn(2, 8, 4)
    _loss(layers[1](expected(inputs)), targets).backward()
    stages = [copy.deepcopy(layers[rank]), copy.deepcopy(layers[1 - rank])]
    Pipeline(stages, dualpipe(p, 4), _loss).step(inputs, targets)
    sum_replicas(stages)
    for found, wanted in zip(stages[rank].parameters(), expected.parameters()):
        torch.testing.assert_close(found.grad, wanted.grad)
    stages[rank].bias.requires_grad_(rank == 0)
    wrong = "chunk 0 of rank 0 and its replica, chunk 1 of rank 1, do not train"
    with pytest.raises(ValueError, match=wrong):
        Pipeline(stages, dualpipe(p, 4), _loss)
    with pytest.raises(ValueError, match="1 stages on a rank of 2"):
        sum_replicas(stages[:1])


def test_replicas_may_be_without_parameters_and_must_train_the_same():
    run(2, _replicas_without_parameters)


class Failing(nn.Module):
    """A linear layer whose `fail` names the pass that goes wrong."""

    def __init__(self):
        super().__init__()
        self.linear, self.fail, self.calls = nn.Linear(4, 4), None, 0

    def forward(self, x):
        self.calls += 1
        if self.fail == "forward" and self.calls % 2 == 0:  # the second microbatch
            raise ArithmeticError("forward")
        output = self.linear(x)
        if self.fail == "backward":
            output.register_hook(self.raise_in_backward)
        return output

    def raise_in_backward(self, grad):
        raise ArithmeticError("backward")


def _fail_and_go_on():
    for make_schedule in (gpipe, one_f_one_b, zb_h2):
        stage = Failing()
        executor = Pipeline(stage, make_schedule(1, 2), _loss)
        batch = torch.ones(4, 4), torch.zeros(4, 4)
        loss = executor.step(*batch)
        expected = stage.linear.weight.grad.clone()
        for stage.fail in ("forward", "backward"):
            stage.calls = 0
            with pytest.raises(ArithmeticError, match=stage.fail):
                executor.step(*batch)
        stage.fail, stage.calls = None, 0
        stage.zero_grad()
        assert not executor.defer.open
        assert torch.equal(executor.step(*batch), loss)
        assert torch.equal(stage.linear.weight.grad, expected)


def test_a_step_that_failed_leaves_nothing_to_the_next():
    run(1, _fail_and_go_on)


def _fail_among_others():
    rank, p = rank_and_size()
    stage, batch = Failing(), torch.zeros(2, 4)
    executor = Pipeline(stage, forward_only(p, 1), _loss)
    stage.fail, stage.calls = ("forward" if rank == 1 else None), 1
    if rank == 0:
        executor.step(batch)
        return
    with pytest.raises(ArithmeticError):
        executor.step(None, batch)
    with pytest.raises(RuntimeError, match="failed midway"):  # messages would meet others' places
        executor.step(None, batch)


def test_after_a_step_that_failed_amid_its_messages_there_is_no_other():
    run(2, _fail_among_others)


class Dropping(nn.Module):
    """A layer with dropout, which counts how often it runs."""

    def __init__(self):
        super().__init__()
        self.layers, self.runs = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5)), 0

    def forward(self, x):
        self.runs += 1
        return self.layers(x)


def _recompute_with_dropout(name, dtype):
    rank, p = rank_and_size()
    schedule = SCHEDULES[name](p, 4)
    results = []
    for recompute in (False, True):
        torch.manual_seed(rank)
        stages = [Dropping().to(dtype) for _ in range(1 + max(a.chunk for a in schedule[0]))]
        executor = Pipeline(stages, schedule, _loss, recompute=recompute)
        losses = [executor.step(torch.ones(8, 4, dtype=dtype), torch.zeros(8, 4)) for _ in range(2)]
        results.append((losses, [p.grad for stage in stages for p in stage.parameters()]))
        results[-1] += (torch.rand(1), sum(stage.runs for stage in stages))
    return results


@pytest.mark.parametrize("name", SCHEDULES)
def test_recomputation_replays_dropout_and_changes_no_bit(name):
    for (losses, grads, drawn, runs), again in run(2, _recompute_with_dropout, name, torch.float64):
        assert losses == again[0] and torch.equal(drawn, again[2]) and again[3] == 2 * runs
        assert all(map(torch.equal, grads, again[1])) and any(grad.any() for grad in grads)


def _recomputed(name, m):
    return _run_schedule(name, m, torch.float64, 1e-10, recompute=True)[:2]


@pytest.mark.parametrize("name", SCHEDULES)
def test_recomputation_gives_the_losses_and_gradients_of_one_process(name):
    results = run(2, _recomputed, name, 4)
    for step, expected in enumerate(results[0][1]):
        total = sum(losses[step] for losses, _ in results if losses[step] is not None)
        torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-10)


def _evaluation(num_microbatches):
    """Losses of a training step, two evaluations, and one process; gradients stay as they were."""
    rank, p = rank_and_size()
    layers, bounds, [(inputs, targets)] = _problem(0, p, rows=num_microbatches)
    stage = nn.Sequential(*layers[bounds[rank] : bounds[rank + 1]])
    train = Pipeline(stage, one_f_one_b(p, num_microbatches), _loss)
    evaluate = Pipeline(stage, forward_only(p, num_microbatches), _loss)
    losses = [train.step(inputs, targets)]
    before = [parameter.grad.clone() for parameter in stage.parameters()]
    with torch.no_grad():
        losses += [evaluate.step(inputs, targets) for _ in range(2)]
        losses += [_loss(nn.Sequential(*layers)(inputs), targets) if rank == p - 1 else None]
    after = [parameter.grad for parameter in stage.parameters()]
    assert all(map(torch.equal, before, after)) and not evaluate.in_flight
    return losses


@every_size
def test_evaluation_gives_the_loss_and_leaves_the_gradients(world_size):
    for m in (1, 5):
        *others, losses = run(world_size, _evaluation, m)
        assert others == [[None] * 4] * (world_size - 1)
        for loss in losses[:-1]:
            _equal(loss, losses[-1])


def _norms(num_microbatches):
    """For LayerNorm and BatchNorm: the loss in microbatches, and the loss of the whole batch."""
    rank, p = rank_and_size()
    inputs, targets = torch.randn(2, 8, 4, dtype=torch.float64)
    losses = []
    for norm in nn.LayerNorm(4), nn.BatchNorm1d(4):
        layers = [nn.Linear(4, 4), norm, nn.Linear(4, 4), nn.Tanh()]
        model = nn.Sequential(*layers).double()
        stage = model[rank * 4 // p : (rank + 1) * 4 // p]
        loss = Pipeline(stage, gpipe(p, num_microbatches), _loss).step(inputs, targets)
        losses.append((loss, _loss(model(inputs), targets)))
    return losses if rank == p - 1 else None


@pytest.mark.parametrize("world_size", [1, 2])
def test_layer_norm_does_not_see_microbatches_and_batch_norm_does(world_size):
    (layer, whole_layer), (batch, whole_batch) = run(world_size, _norms, 4)[-1]
    _equal(layer, whole_layer)
    assert abs(batch - whole_batch) > 1e-3 * whole_batch
    (batch, whole_batch) = run(world_size, _norms, 1)[-1][1]
    _equal(batch, whole_batch)


# ---- what a step costs ---------------------------------------------------------------------------


def _step_bytes(num_microbatches, shape):
    _, p = rank_and_size()
    executor = Pipeline(nn.Linear(shape[-1], shape[-1]), one_f_one_b(p, num_microbatches), _loss)
    batch = torch.randn(num_microbatches * shape[0], *shape[1:])
    counted = []
    for _ in range(3):
        with count_bytes() as traffic:
            executor.step(batch, batch)
        counted.append((traffic.bytes(), traffic.messages()))
    return counted[1:]


@every_size
def test_a_step_sends_b_s_h_per_microbatch_boundary_and_direction(world_size):
    m, (b, s, h) = 5, (2, 3, 4)
    counted = run(world_size, _step_bytes, m, (b, s, h))
    for rank, steps in enumerate(counted):
        neighbours = len({rank - 1, rank + 1} & set(range(world_size)))
        nbytes = neighbours * m * b * s * h * 4
        assert nbytes == pipeline_bytes(rank, world_size, m, b * s * h * 4)
        assert steps == [(nbytes, neighbours * m)] * 2


def _count_waits(name, recompute):
    rank, p = rank_and_size()
    schedule = SCHEDULES[name](p, 4)
    chunks = range(1 + max(action.chunk for action in schedule[rank]))
    stages = [nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in chunks]
    executor = Pipeline(stages, schedule, lambda y, z: (y - z).square().sum(), recompute=recompute)
    steps = []
    for _ in range(2):
        with waits() as count:
            executor.step(torch.randn(8, 4), torch.randn(8, 4))
        steps.append(dict(count))
    return steps


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_the_host_waits_for_formats_in_the_first_step_and_for_nothing_in_others(name, recompute):
    for first, second in run(2, _count_waits, name, recompute):
        assert first and not second


class Held(list):
    """Tests of whether somebody still holds a thing; at most `peak` were held at a time."""

    peak = 0

    def watch(self, released):
        self[:] = [other for other in self if not other()] + [released]
        self.peak = max(self.peak, len(self))


class Remembering(nn.Module):
    """Two linear layers; knows how often what is between them, and their output, are held."""

    def __init__(self, held, outputs):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.held, self.outputs = held, outputs

    def forward(self, x):
        between = self.first(x).tanh()
        output = self.second(between)
        if torch.is_grad_enabled():
            self.held.watch(StorageWeakRef(between.untyped_storage()).expired)
            reference = ref(output)
            self.outputs.watch(lambda: reference() is None)
        return output


def _peak_held(name, num_microbatches, recompute):
    rank, p = rank_and_size()
    schedule, held, outputs = SCHEDULES[name](p, num_microbatches), Held(), Held()
    chunks = range(1 + max(a.chunk for a in schedule[rank]))
    stages = [Remembering(held, outputs) for _ in chunks]
    executor = Pipeline(stages, schedule, _loss, recompute=recompute)
    for _ in range(2):
        executor.step(torch.randn(num_microbatches, 4), torch.randn(num_microbatches, 4))
        assert not executor.in_flight and all(released() for released in held + outputs)
    return held.peak, outputs.peak


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_holds_as_many_activations_as_the_simulator_says(name):
    for p, m in {(1, 3), (2, 1), (2, 4), (3, 6), (4, 8)} & set(_sizes_of(name)):
        held, outputs = zip(*run(p, _peak_held, name, m, False))
        assert list(held) == simulate(SCHEDULES[name](p, m)).peak
        assert all(map(operator.le, outputs, held))


def test_recomputation_holds_those_of_one_microbatch_and_of_deferred_weight_products():
    held = lambda name: [held for held, _ in run(2, _peak_held, name, 8, True)]
    for name in ("naive", "gpipe", "1f1b", "interleaved"):
        assert held(name) == [1, 1]
    assert max(held("zb-h1")) <= 2


class Synced(nn.Linear):
    """A stage that, as DistributedDataParallel does, has a say in which backwards reduce."""

    def __init__(self, events, chunk):
        super().__init__(4, 4)
        self.events, self.chunk, self.inside = events, chunk, False
        self.weight.register_post_accumulate_grad_hook(lambda _: self.note("gradient"))

    def note(self, what):
        self.events.append((what, self.chunk, self.inside))

    @contextmanager
    def no_sync(self):
        self.inside = True
        yield
        self.inside = False

    def start_grad_sync(self, awaited):
        assert awaited == set(self.parameters())
        self.note("start")


def _order_of_syncs(name, num_microbatches):
    """What happened to chunks: gradients that came, inside no_sync or not, and starts of a sync."""
    rank, p = rank_and_size()
    schedule, events = SCHEDULES[name](p, num_microbatches), []
    chunks = range(1 + max(action.chunk for action in schedule[rank]))
    executor = Pipeline([Synced(events, chunk) for chunk in chunks], schedule, _loss)
    executor.step(torch.randn(num_microbatches, 4), torch.randn(num_microbatches, 4))
    kinds = ["".join(a.kind for a in schedule[rank] if a.chunk == chunk) for chunk in chunks]
    return [([e[::2] for e in events if e[1] == c], kind) for c, kind in zip(chunks, kinds)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_chunk_reduces_once_in_its_last_backward_or_before_its_last_weight_product(name):
    for p, m in {(1, 1), (1, 4), (2, 4), (4, 8)} & set(_sizes_of(name)):
        for events, kinds in sum(run(p, _order_of_syncs, name, m), []):
            last = kinds.replace("F", "")[-1]
            assert events[-1] == ("gradient", False)
            assert events.count(("gradient", True)) == kinds.count("B") + kinds.count("W") - 1
            assert len(events) == kinds.count("B") + kinds.count("W") + (last == "W")
            assert last == "B" or events[-2] == ("start", False)


# ---- errors --------------------------------------------------------------------------------------


def _errors():
    rank, _ = rank_and_size()
    stage, batch = nn.Linear(3, 3), torch.randn(4, 3)
    with pytest.raises(ValueError, match="3 stages in a group of 2 ranks"):
        Pipeline(stage, gpipe(3, 2), _loss)
    with pytest.raises(ValueError, match=f"rank {rank} has 1 stages for num_chunks=2"):
        Pipeline(stage, interleaved(2, 2), _loss)
    with pytest.raises(ValueError, match=f"rank {rank}: torch's DistributedDataParallel"):
        Pipeline(nn.parallel.DistributedDataParallel(stage), gpipe(2, 2), _loss)
    executor = Pipeline(stage, gpipe(2, 2), _loss)
    name = ["inputs", "targets"][rank]
    for given, wrong in (
        (batch[:3], f"{name} has 3 rows, .*num_microbatches=2"),
        (batch[:0], f"{name} has 0 rows"),
        (None, f"{name}=None on rank {rank}, where a route {['begins', 'ends'][rank]}"),
        ([batch], f"{name} is not a tensor of rows, but list"),
        (torch.tensor(1.0), f"{name} is not a tensor of rows, but Tensor"),
    ):
        with pytest.raises(ValueError, match=wrong):
            executor.step(**{name: given})
    with pytest.raises(ValueError, match="inputs has 4 rows, targets has 2"):
        executor.step(batch, batch[:2])
    with torch.no_grad(), pytest.raises(ValueError, match=r"under no_grad\(\)"):
        executor.step(batch, batch)
    executor.step(batch, batch)
    if rank == 0:
        with pytest.raises(ValueError, match=r"stage 0 made \(4, 3\) .*first output was \(2, 3\)"):
            executor.step(torch.randn(8, 3))


def test_batches_and_schedules_that_do_not_fit_are_named():
    run(2, _errors)


def _unlike_lengths():
    """Of the first rank's inputs and the last one's targets, which broadcast; known at the loss."""
    rank, p = rank_and_size()
    executor = Pipeline(nn.Linear(3, 3), forward_only(p, 1), _loss)
    if rank < p - 1:
        executor.step(torch.randn(4, 3))
        return
    with pytest.raises(ValueError, match="a microbatch has 4 rows of inputs, 1 of targets"):
        executor.step(targets=torch.randn(1, 3))


def test_targets_of_another_length_than_the_inputs_on_another_rank_are_refused():
    run(3, _unlike_lengths)


def _unlike_schedules():
    rank, p = rank_and_size()
    stage, other = nn.Linear(3, 3), rank == 1
    route = [[(r, 0) for r in range(p)][:: -1 if other else 1]]
    for schedule, sizes in (
        ((gpipe if other else one_f_one_b)(p, 4), "= (3, 4) and (3, 4)"),
        (gpipe(p, 3 + other), "= (3, 4) and (3, 3)"),
        (gpipe(p + other, 4), "= (4, 4) and (3, 4)"),
        (pipeline.Schedule(gpipe(p, 4), route), "= (3, 4) and (3, 4)"),
    ):
        wrong = "rank 1 of the group has another schedule than rank 0, .*" + re.escape(sizes)
        with pytest.raises(ValueError, match=wrong):
            Pipeline(stage, schedule, _loss)
    Pipeline(stage, gpipe(p, 4), _loss).step(torch.randn(4, 3), torch.randn(4, 3))


def test_ranks_with_different_schedules_are_refused_on_all():
    run(3, _unlike_schedules)
