"""trace.py puts every operation with its bytes into a lane, and its parts add up to the step."""

import io
import json
import sys
from collections import Counter, defaultdict
from contextlib import redirect_stdout
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import hybrid
import trace
from collectives import count_bytes, observe
from layouts import soak_but
from ranks import run

SIZES = "--layers 4 --hidden 32 --heads 4 --seq-len 12 --vocab-size 67 --batch-size 24"
LAYOUTS = """processes | flags | lanes
1 | --microbatches 2 |
4 | --tp 2 --pp 2 --microbatches 4 | tp pp
4 | --dp 2 --cp 2 --zero 1 | cp dp
4 | --dp 4 --zero 3 --microbatches 2 | dp
4 | --dp 4 --zero 0 | dp
4 | --tp 2 --dp 2 --ep 4 --experts 4 --sp | tp ep dp
4 | --tp 2 --dp 2 --ep 2 --experts 4 | tp+ep dp
4 | --pp 4 --schedule zb-v --microbatches 8 --layers 8 | pp
3 | --dp 3 | dp
4 | --pp 2 --dp 2 --ep 2 --experts 4 --schedule dualpipe-v --microbatches 4 --overlap | pp dp+ep dp
"""
LAYOUTS = [[cell.strip() for cell in line.split("|")] for line in LAYOUTS.splitlines()[1:]]


def _traced(flags):
    """Return a second step's trace, and the traffic and operations counted in each lane."""
    args = hybrid.parse(f"{SIZES} {flags}".split(), dist.get_world_size())
    trainer = hybrid.Trainer(args, hybrid.make_mesh(args), torch.device("cpu"))
    tokens = torch.randint(67, (2, args.batch_size // args.dp, 12))
    trainer.step(*tokens)
    axes, counted, operations = trace.axes_of(trainer.mesh), {}, defaultdict(Counter)

    def listen(event, operation, *_):
        if event == "begin" and operation.group in axes:
            operations[axes[operation.group]][operation.name] += 1

    with count_bytes() as traffic, observe(listen):
        lanes, parts = trace.traced(trainer, *tokens)
    for group, axis in axes.items():
        messages, nbytes = counted.get(axis, (0, 0))
        sent = [message for message in traffic.sent if message[1] is group]
        counted[axis] = messages + len(sent), nbytes + traffic.bytes(group=group)
    return lanes, parts, counted, operations


@pytest.mark.parametrize(
    "processes, flags, lanes", soak_but(lambda i, _: i in (1, 5, 8), LAYOUTS)
)
def test_lanes_have_every_operation_and_its_bytes_and_the_parts_add_up(processes, flags, lanes):
    for rank, (own, parts, counted, operations) in enumerate(run(int(processes), _traced, flags)):
        assert {*own} == {"compute", *lanes.split()}
        for lane in lanes.split():
            assert Counter(name for _, _, name, _ in own[lane]) == operations[lane]
            known = [known for *_, known in own[lane]]
            totals = [sum(each[what] for each in known) for what in ("messages", "bytes")]
            assert tuple(totals) == counted[lane]
        assert min(parts.values()) >= 0 and parts["compute"] > 0
        waits = {lane if lane != "pp" else "bubble" for lane in lanes.split()}
        assert {*parts} <= {"compute", "rest", *waits}
        assert max(end for spans in own.values() for _, end, *_ in spans) <= sum(parts.values())
        _assert_apart(trace.events_of(rank, own))


def test_the_time_of_passes_in_turns_is_counted_once():
    assert trace.covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4


def _assert_apart(events):
    """Check that spans in one row do not overlap."""
    ends = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        assert ends.get(event["tid"], 0) <= event["ts"] + 1e-3
        ends[event["tid"]] = event["ts"] + event["dur"]


def test_of_spans_that_begin_together_the_longer_one_is_in_the_upper_row():
    spans = [(5, 6, "wait for tp", {}), (5, 9, "F0", {})]
    rows = {event["name"]: event["tid"] for event in trace.events_of(0, {"compute": spans})}
    assert rows == {"F0": "compute", "wait for tp": "compute 1"}


def _printed(path):
    """Trace the last of four steps, whose parts are known; return the line and the steps before."""
    flags = f"{SIZES} --vocab-size 256 --dp 2 --steps 4".split()
    before = []

    def traced(trainer, *batch):
        before.append(trainer.steps_done)
        return {}, Counter(compute=1e3 + 2e3 * dist.get_rank(), rest=500)

    with redirect_stdout(io.StringIO()) as printed, patch.object(trace, "traced", traced):
        trace.work(path, flags, hybrid.parse(flags, 2), torch.device("cpu"))
    return printed.getvalue(), before


def test_the_line_has_the_mean_of_the_ranks_and_is_of_the_last_step(tmp_path):
    first, second = run(2, _printed, str(tmp_path / "trace.json"))
    assert first == ("the last step took 2.50 ms: compute 2.00, rest 0.50\n", [3])
    assert second == ("", [3])


def _main(capsys, monkeypatch, *argv):
    """Run trace.py in one process; return its exit status and its output."""
    monkeypatch.setattr(sys, "argv", ["trace.py"])
    flags = [*SIZES.split(), "--vocab-size", "256", "--device", "cpu"]
    status = trace.main([*map(str, argv), *flags])
    return status, *capsys.readouterr()


def test_the_file_has_the_ranks_and_the_numbers_of_the_line_add_up(tmp_path, capsys, monkeypatch):
    file = tmp_path / "trace.json"
    status, out, err = _main(capsys, monkeypatch, file)
    events = json.loads(file.read_text())
    assert (status, err) == (0, "") and {event["pid"] for event in events} == {"rank 0"}
    assert {"F0", "B0"} <= {event["name"] for event in events}
    total, parts = out.removeprefix("the last step took ").split(" ms: ")
    numbers = [float(part.split()[1]) for part in parts.split(", ")]
    assert sum(numbers) == pytest.approx(float(total), abs=0.01 * len(numbers))


REFUSED = ["--checkpoint DIR", "--metrics FILE", "--eval-every 2", "--print-every 2", "--sample 0",
           "--prompt x", "--temperature 0.5"]  # fmt: skip


@pytest.mark.parametrize("flag", REFUSED)
def test_a_flag_that_changes_nothing_in_a_trace_is_refused(flag, tmp_path, capsys, monkeypatch):
    status, out, err = _main(capsys, monkeypatch, tmp_path / "trace.json", *flag.split())
    assert (status, out, err) == (2, "", f"trace.py: error: {flag} has no use here\n")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("words, said", [(["no/trace.json"], "no/trace.json"), ([], "FILE is mis")])
def test_a_file_that_is_missing_or_cannot_be_written_is_one_line(words, said, capsys, monkeypatch):
    status, out, err = _main(capsys, monkeypatch, *words)
    assert (status, out) == (2, "") and err.startswith("trace.py: error: ") and err.count("\n") == 1
    assert said in err
