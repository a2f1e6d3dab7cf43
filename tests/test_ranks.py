"""The ranks themselves: order, fresh groups, and what a test sees when a rank fails."""

import os
import re
import signal
import time
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ranks import RanksFailed, on_ranks, run, spawn


def sum_of_ranks(dtype=torch.float32):
    tensor = torch.full((3,), dist.get_rank(), dtype=dtype)
    dist.all_reduce(tensor)
    return dist.get_rank(), os.getpid(), tensor


def draws():
    return torch.rand(4), np.random.rand(4)


def fail():
    raise ValueError("raised")


def act_on(bad_rank, action, *arguments):
    """The others wait for that rank."""
    if dist.get_rank() == bad_rank:
        action(*arguments)
    dist.barrier()


def wait_forever_on(bad_rank, others=lambda: None):
    signal.pause() if dist.get_rank() == bad_rank else others()


def unpicklable():
    return lambda: None


@on_ranks(2)
def body_fails_on(bad_rank):
    assert dist.get_rank() != bad_rank, "in the body"
    dist.barrier()


def failure(runner, *args, **kwargs):
    """Message of the RanksFailed that the call raises, in time, and the seconds that it took."""
    start = time.monotonic()
    with pytest.raises(RanksFailed) as info:
        runner(*args, **kwargs)
    seconds = time.monotonic() - start
    assert seconds < 20
    return str(info.value), seconds


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_results_come_in_rank_order(world_size):
    results = run(world_size, sum_of_ranks, dtype=torch.float64)
    assert [rank for rank, _, _ in results] == list(range(world_size))
    expected = torch.full((3,), sum(range(world_size)), dtype=torch.float64)
    for _, _, tensor in results:
        assert torch.equal(tensor, expected) and tensor.dtype == torch.float64


def test_fresh_groups_back_to_back_on_the_same_processes():
    pids = {tuple(pid for _, pid, _ in run(4, sum_of_ranks)) for _ in range(50)}
    assert len(pids) == 1


def test_random_numbers_start_equal():
    for tensor, array in run(2, draws) + run(2, draws):
        assert torch.equal(tensor, torch.rand(4, generator=torch.Generator().manual_seed(0)))
        assert np.array_equal(array, np.random.RandomState(0).rand(4))


KILL = signal.raise_signal, signal.SIGKILL


@pytest.mark.parametrize(
    "call, who, how, named, others",
    [
        ((run, 4, act_on, 2, fail), "2 of 4", "Traceback", "ValueError: raised", [0, 1, 3]),
        ((spawn, 2, act_on, 1, fail), "1 of 2", "Traceback", "ValueError: raised", [0]),
        ((run, 2, wait_forever_on, 1, fail), "0 of 2", "Traceback", "ValueError: raised", [1]),
        ((run, 2, unpicklable), ". of 2", "Traceback", "pickle", []),
        ((run, 4, act_on, 1, *KILL), "1 of 4", "died with exit code -9", "SIGKILL", [0, 2]),
        ((run, 2, act_on, 0, os._exit, 3), "0 of 2", "died with exit code 3", "", [1]),
        ((partial(body_fails_on, bad_rank=1), 2), "1 of 2", "Traceback", "in the body", [0]),
    ],
)
def test_the_first_failure_is_told_in_full_and_nobody_waits_long(call, who, how, named, others):
    text, _ = failure(*call)
    assert re.match(f"rank {who} failed:\n{how}", text) and named in text
    assert text.count("Traceback") == how.count("Traceback")
    assert all(f"\nrank {rank} failed after it: " in text for rank in others)


def test_a_hang_ends_at_its_timeout_with_the_stack():
    text, seconds = failure(run, 3, wait_forever_on, 1, timeout=3)
    assert text.startswith("rank 1 of 3 failed:\ndid not answer in 3 s")
    assert "in wait_forever_on" in text and "rank 0" not in text and "rank 2" not in text
    assert seconds >= 3


@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (3, 1)])
@on_ranks(lambda rows, columns, **_: rows * columns)
def test_a_body_runs_on_each_rank_of_a_group_of_the_size_that_parameters_give(
    rows, columns, tmp_path
):
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert dist.get_world_size() == rows * columns == len(list(tmp_path.iterdir()))


def test_outcomes_of_spawned_ranks():
    killed, closed = spawn(2, act_on, 0, *KILL, check=False)
    assert killed.exitcode == -signal.SIGKILL and killed.result is None
    assert closed.exitcode == 1 and "by peer" in closed.error_text
    stop = signal.raise_signal, signal.SIGSTOP
    stopped, late = spawn(2, act_on, 0, *stop, check=False, timeout=2, group_timeout=1)
    assert stopped.exitcode is None and stopped.error_text.startswith("did not answer in 2 s")
    assert late.exitcode == 1 and 1 <= late.seconds < 2


def test_the_pool_works_after_failures():
    before = [pid for _, pid, _ in run(2, sum_of_ranks)]
    failure(run, 2, act_on, 0, fail)
    after = [pid for _, pid, _ in run(2, sum_of_ranks)]
    assert not set(before) & set(after)
