"""The ranks themselves: order, fresh groups, and what a test sees when a rank fails."""

import os
import signal
import time

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


def raise_on(bad_rank):
    if dist.get_rank() == bad_rank:
        raise ValueError(f"raised on rank {bad_rank}")
    dist.barrier()


def die_on(bad_rank, how):
    if dist.get_rank() == bad_rank:
        os.kill(os.getpid(), how)
    dist.barrier()


def leave_on(bad_rank, exitcode):
    if dist.get_rank() == bad_rank:
        os._exit(exitcode)
    dist.barrier()


def wait_forever_on(bad_rank):
    if dist.get_rank() == bad_rank:
        signal.pause()


def raise_or_wait_forever():
    if dist.get_rank() == 0:
        raise ValueError("raised")
    signal.pause()


def unpicklable():
    return lambda: None


def failure(runner, *args, **kwargs):
    """Message of the RanksFailed that the call raises, and the seconds that it took."""
    start = time.monotonic()
    with pytest.raises(RanksFailed) as info:
        runner(*args, **kwargs)
    return str(info.value), time.monotonic() - start


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_results_come_in_rank_order(ranks, world_size):
    results = ranks(world_size, sum_of_ranks, dtype=torch.float64)
    assert [rank for rank, _, _ in results] == list(range(world_size))
    for _, _, tensor in results:
        expected = torch.full((3,), sum(range(world_size)), dtype=torch.float64)
        assert torch.equal(tensor, expected) and tensor.dtype == torch.float64


def test_fresh_groups_back_to_back_on_the_same_processes():
    pids = {tuple(pid for _, pid, _ in run(4, sum_of_ranks)) for _ in range(50)}
    assert len(pids) == 1


def test_random_numbers_start_equal():
    for tensor, array in run(2, draws) + run(2, draws):
        assert torch.equal(tensor, torch.rand(4, generator=torch.Generator().manual_seed(0)))
        assert np.array_equal(array, np.random.RandomState(0).rand(4))


@pytest.mark.parametrize("runner", [run, spawn])
def test_the_first_failure_is_told_in_full(runner):
    text, seconds = failure(runner, 4, raise_on, 2)
    assert text.startswith("rank 2 of 4 failed:\nTraceback")
    assert text.count("Traceback") == 1 and "ValueError: raised on rank 2" in text
    assert all(f"rank {rank} failed after it: " in text for rank in (0, 1, 3))
    assert seconds < 20


def test_ranks_that_never_hear_of_a_failure_are_not_waited_for():
    text, seconds = failure(run, 2, raise_or_wait_forever)
    assert "ValueError: raised" in text and "rank 1 failed after it: still running" in text
    assert 1 <= seconds < 20


def test_a_result_that_cannot_be_pickled_is_a_failure():
    text, _ = failure(run, 2, unpicklable)
    assert "rank 0" in text and "rank 1" in text and "pickle" in text


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGABRT])
def test_a_killed_rank_is_named(how):
    text, seconds = failure(run, 4, die_on, 1, how)
    assert text.startswith(f"rank 1 of 4 failed:\ndied with exit code {-how} ({how.name})")
    assert seconds < 20


def test_a_rank_that_leaves_is_named():
    text, _ = failure(run, 2, leave_on, 0, 3)
    assert text.startswith("rank 0 of 2 failed:\ndied with exit code 3")


def test_a_hang_ends_at_its_timeout_with_the_stack():
    text, seconds = failure(run, 3, wait_forever_on, 1, timeout=3)
    assert text.startswith("rank 1 of 3 failed:\ndid not answer in 3 s")
    assert "in wait_forever_on" in text and "rank 0" not in text and "rank 2" not in text
    assert 3 <= seconds < 20


@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (3, 1)])
@on_ranks(lambda rows, columns, **_: rows * columns)
def test_a_body_runs_on_each_rank_of_a_group_of_the_size_that_parameters_give(
    rows, columns, tmp_path
):
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert dist.get_world_size() == rows * columns == len(list(tmp_path.iterdir()))


@on_ranks(2)
def fail_on(bad_rank):
    assert dist.get_rank() != bad_rank, "in the body"
    dist.barrier()


def test_a_body_that_fails_fails_its_test_with_the_traceback_of_the_rank():
    text, _ = failure(fail_on, 2, bad_rank=1)
    assert text.startswith("rank 1 of 2 failed:\nTraceback")
    assert "in fail_on" in text and "AssertionError: in the body" in text


def test_outcomes_of_spawned_ranks():
    killed, closed = spawn(2, die_on, 0, signal.SIGKILL, check=False)
    assert killed.exitcode == -signal.SIGKILL and killed.result is None
    assert closed.exitcode == 1 and "by peer" in closed.error_text
    stopped, late = spawn(2, die_on, 0, signal.SIGSTOP, check=False, timeout=2, group_timeout=1)
    assert stopped.exitcode is None and stopped.error_text.startswith("did not answer in 2 s")
    assert late.exitcode == 1 and 1 <= late.seconds < 2


def test_the_pool_works_after_failures():
    before = [pid for _, pid, _ in run(2, sum_of_ranks)]
    failure(run, 2, raise_on, 0)
    after = [pid for _, pid, _ in run(2, sum_of_ranks)]
    assert not set(before) & set(after)
