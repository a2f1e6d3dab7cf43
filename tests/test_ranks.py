"""ranks.py returns results in order, makes new groups, and tells which rank failed and how."""

import importlib
import os
import pickle
import random
import re
import signal
import time
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ranks import (
    PROJECT, RanksFailed, call_in_environment, on_ranks, run, seed_generators, shifted, spawn,
)  # fmt: skip


def number_of_process():
    dist.all_reduce(torch.ones(1))
    return os.getpid()


def fail():
    raise ValueError("raised")


def act_on(bad_rank, action, *arguments):
    """Call action() on one rank; the others wait for that rank."""
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


def fail_with_values():
    sizes = [dist.get_rank() + 1, 2]
    assert sum(sizes) == 5


def failure(runner, *args, **kwargs):
    """Make a call that raises RanksFailed; return the message, and the seconds that it took."""
    start = time.monotonic()
    with pytest.raises(RanksFailed) as info:
        runner(*args, **kwargs)
    seconds = time.monotonic() - start
    assert seconds < 20
    return str(info.value), seconds


def test_ten_calls_in_a_row_run_in_new_groups_on_the_same_processes():
    pids = {tuple(run(4, number_of_process)) for _ in range(10)}
    assert len(pids) == 1


def test_every_process_computes_on_one_thread():
    """Threads of several processes on few cores wait for each other, and spin meanwhile."""
    assert [torch.get_num_threads(), *run(2, torch.get_num_threads)] == [1, 1, 1]


VALUES = "AssertionError: assert 4 == 5\n +  where 4 = sum([2, 2])"
KILL = signal.raise_signal, signal.SIGKILL


@pytest.mark.parametrize(
    "call, who, how, named, others",
    [
        ((run, 4, act_on, 2, fail), "2 of 4", "Traceback", "ValueError: raised", [0, 1, 3]),
        ((spawn, 2, act_on, 1, fail), "1 of 2", "Traceback", "ValueError: raised", [0]),
        ((run, 2, wait_forever_on, 1, fail), "0 of 2", "Traceback", "ValueError: raised", [1]),
        ((run, 2, act_on, 1, fail_with_values), "1 of 2", "Traceback", VALUES, [0]),
        ((run, 2, unpicklable), ". of 2", "Traceback", "pickle", []),
        ((run, 4, act_on, 1, *KILL), "1 of 4", "died with exit code -9", "SIGKILL", [0, 2]),
        ((run, 2, act_on, 0, os._exit, 3), "0 of 2", "died with exit code 3", "", [1]),
        ((partial(body_fails_on, bad_rank=1), 2), "1 of 2", "Traceback", "in the body", [0]),
    ],
)
def test_the_first_failure_is_reported_in_full_and_soon(call, who, how, named, others):
    text, _ = failure(*call)
    assert re.match(f"rank {who} failed:\n{how}", text) and named in text
    assert text.count("Traceback") == how.count("Traceback")
    assert all(f"\nrank {rank} failed after it: " in text for rank in others)


def test_a_hang_ends_at_the_timeout_and_its_stack_is_reported():
    text, seconds = failure(run, 3, wait_forever_on, 1, timeout=1)
    assert text.startswith("rank 1 of 3 failed:\ndid not answer in 1 s")
    assert "in wait_forever_on" in text and "rank 0" not in text and "rank 2" not in text
    assert seconds >= 1


@pytest.mark.soak
def test_spawn_returns_the_outcomes_of_killed_stopped_and_waiting_ranks():
    killed, closed = spawn(2, act_on, 0, *KILL, check=False)
    assert killed.exitcode == -signal.SIGKILL and killed.result is None
    assert closed.exitcode == 1 and "by peer" in closed.error_text
    stop = signal.raise_signal, signal.SIGSTOP
    stopped, late = spawn(2, act_on, 0, *stop, check=False, timeout=2, group_timeout=1)
    assert stopped.exitcode is None and stopped.error_text.startswith("did not answer in 2 s")
    assert late.exitcode == 1 and 1 <= late.seconds < 2


def test_the_pool_works_after_failures():
    before = run(2, number_of_process)
    failure(run, 2, act_on, 0, fail)
    after = run(2, number_of_process)
    assert not set(before) & set(after)


@pytest.mark.parametrize("backend", ["cuda:fake", "cpu:fake,cuda:fake", "fake"])
@on_ranks(1)
def test_a_rank_leaves_groups_of_any_device(backend):
    """A group for GPUs alone has no backend for the CPU. run_in_group() leaves the groups."""
    dist.destroy_process_group()
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=2)
    dist.new_group([0])


def test_variables_are_set_before_a_call_imports_its_module(tmp_path, monkeypatch):
    text = "import os\nSEEN = os.getenv('SEEN')\ndef seen(): return SEEN\n"
    (tmp_path / "reader.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    call = pickle.dumps((importlib.import_module("reader").seen, (), {}))
    assert spawn(1, call_in_environment, {"SEEN": "1"}, call) == ["1"]


# ---- seeds ---------------------------------------------------------------------------------------


def drawn():
    """Return the first number of each global generator, and a shifted seed."""
    return random.random(), np.random.rand(), torch.rand(()).item(), shifted(3)


def test_test_seed_shifts_every_generator_and_ranks_have_the_seeds_of_this_process(monkeypatch):
    seed_generators()
    before = drawn()
    assert run(2, drawn) == [before, before]
    monkeypatch.setenv("TEST_SEED", str(shifted(1)))
    seed_generators()
    after = drawn()
    assert after[-1] == before[-1] + 1 and not set(before) & set(after)


def test_every_seed_of_a_test_is_shifted_or_says_why_not():
    """golden.py is left out because its figures are in files, and the tools are no tests."""
    files = [*PROJECT.glob("tests/test_*.py"), *PROJECT.glob("tests/support/*.py")]
    calls = r"(?:manual_seed|default_rng|Random|random\.seed)\((?!shifted\(|\[SEED, |\))(.*)"
    found = [rest for path in files for rest in re.findall(calls, path.read_text())]
    assert [rest for rest in found if "  # not shifted: " not in rest] == []
