import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import bench
from ranks import on_ranks


def _fine(arguments):
    bench.report("a call", 0.002, "theirs", 0.001)


def _broken(arguments):
    raise ValueError("x=3 is not even")


def test_a_subject_that_fails_is_named_after_the_rows_of_the_others(capsys):
    subjects = {"broken": _broken, "fine": _fine}
    with patch.object(bench, "BENCHMARKS", subjects), pytest.raises(SystemExit) as ended:
        bench.main([])
    assert ended.value.code == 1
    row, failure = capsys.readouterr().out.splitlines()[-2:]
    assert row.split() == ["a", "call", "2.000", "theirs", "1.000", "2.00"]
    assert failure == "broken FAILED: ValueError: x=3 is not even"


@pytest.mark.parametrize("flag", ["--world-sizes", "--rounds"])
def test_a_size_of_0_is_refused_in_a_line(capsys, flag):
    with pytest.raises(SystemExit, match="2"):
        bench.main([flag, "0"])
    fault = f"error: argument {flag}: 0 is not in [1, inf)"
    assert capsys.readouterr().err.splitlines()[-1].endswith(fault)


@on_ranks(2)
def test_a_round_takes_as_long_as_its_slowest_rank():
    times = bench.take_turns({"sleep": lambda: time.sleep(0.02 * dist.get_rank())}, 3)
    assert times["sleep"] >= 0.02


@on_ranks(3)
def test_the_bare_script_exchanges_what_an_all_to_all_exchanges():
    given = torch.arange(6.0) + 10 * dist.get_rank()
    bare, expected = torch.empty(2, 6)
    bench.bare_all_to_all(bare, given)
    dist.all_to_all_single(expected, given)
    assert torch.equal(bare, expected)


@on_ranks(2)
def test_the_scheduling_class_of_gloos_threads_is_that_of_the_ranks():
    assert bench.scheduling() == ["SCHED_BATCH"]
