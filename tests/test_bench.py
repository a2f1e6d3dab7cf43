import json
import time
from unittest.mock import patch

import pytest
import torch.distributed as dist

import bench
from ranks import on_ranks


def _fine(arguments):
    arguments.report("a call", 0.002, "theirs", 0.001)


def _broken(arguments):
    raise ValueError("x=3 is not even")


def _cut_off(arguments):
    _fine(arguments)
    raise KeyboardInterrupt


def test_what_fails_or_is_cut_off_is_told_beside_what_was_measured(tmp_path, capsys):
    subjects = {"broken": _broken, "fine": _fine, "cut off": _cut_off, "never begun": _fine}
    file = tmp_path / "table.json"
    with patch.object(bench, "BENCHMARKS", subjects), pytest.raises(SystemExit) as ended:
        bench.main(["--json", str(file)])
    assert ended.value.code == 1
    kept = json.loads(file.read_text())
    interrupted = {"cut off": "interrupted", "never begun": "interrupted"}
    assert kept["failed"] == {"broken": "ValueError: x=3 is not even"} | interrupted
    rows = [(row["subject"], row["ours"], row["ratio"]) for row in kept["rows"]]
    assert rows == [("fine", 2, 2), ("cut off", 2, 2)]
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in told if "theirs" in line] == ["2.00", "2.00"]
    assert "broken FAILED: ValueError: x=3 is not even" in told


@on_ranks(2)
def test_a_round_takes_as_long_as_its_slowest_rank():
    times = bench.take_turns({"sleep": lambda: time.sleep(0.02 * dist.get_rank())}, 3)
    assert times["sleep"] >= 0.02
