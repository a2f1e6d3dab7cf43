"""Every layout trains as one process does through NCCL's branches of the code, under its rules."""

import signal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import hybrid
import layouts
from collectives import exchange
from gpu_counts import nccl_over_gloo
from layouts import EVERY_LAYOUT, MIXED, NODES, soak_but
from ranks import RanksFailed, run, soak, spawn


def _as_on_nccl(function, *arguments):
    with nccl_over_gloo() as sizes:
        result = function(*arguments)
    assert sum(sizes) or dist.get_world_size() == 1
    return result


@pytest.fixture
def on_nccl(monkeypatch):
    """Make test_hybrid run its ranks through NCCL's branches of the code."""
    call = lambda world_size, function, *args: run(world_size, _as_on_nccl, function, *args)
    monkeypatch.setattr(layouts, "run", call)


def _several(rows):
    """Return the rows (world_size, ...) of several ranks; mark most of them "soak"."""
    rows = [row for row in rows if row[0] > 1]
    return soak_but(lambda i, row: i % {2: 12, 3: 8, 4: 36}.get(row[0], 1000) == 0, rows)


@pytest.mark.parametrize("world_size, flags", _several(EVERY_LAYOUT))
def test_every_layout_trains_as_one_process_does(on_nccl, world_size, flags):
    layouts.assert_trains(world_size, flags, torch.float64, 1e-11, 1e-9, 1e-9)


MIXTURES = [(n, f"{flags} --microbatches 1", mixture) for n, flags, mixture in MIXED] + NODES


@pytest.mark.parametrize("world_size, flags, mixture", _several(MIXTURES))
def test_a_gpt_of_experts_trains_as_a_loop_over_them_does(on_nccl, world_size, flags, mixture):
    layouts.assert_trains_as_a_loop_does(world_size, flags, mixture)


@pytest.fixture
def on_nodes(monkeypatch):
    """Do the same with one rank per node or, from four ranks on, two ranks per node."""

    def call(world_size, function, *args):
        return run(world_size, _on_nodes, 1 if world_size < 4 else 2, function, *args)

    monkeypatch.setattr(layouts, "run", call)


def _on_nodes(local_world_size, *call):
    parse = lambda words, world_size, _: right(words, world_size, local_world_size)
    right = hybrid.parse
    with patch.object(hybrid, "parse", parse):
        return _as_on_nccl(*call)


ACROSS = [
    (2, "--dp 2 --zero 0 --microbatches 2"),
    (3, "--cp 3 --zero 3"),
    (4, "--dp 4 --zero 1 --microbatches 2"),
    (4, "--tp 4 --sp --recompute full"),
    (4, "--dp 2 --tp 2 --zero 2"),
    (6, "--cp 6 --zero 0 --cp-method allgather"),
    (8, "--dp 8 --zero 3"),
]


@pytest.mark.parametrize("world_size, flags", soak_but(lambda i, _: i < 2, ACROSS))
def test_layouts_that_span_nodes_train_as_one_process_does(on_nodes, world_size, flags):
    layouts.assert_trains(world_size, flags, torch.float64, 1e-11, 1e-9, 1e-9)


# ---- the emulation itself ------------------------------------------------------------------------


def _send_before_receiving():
    rank, buffer = dist.get_rank(), torch.zeros(1)
    with nccl_over_gloo():
        exchange([(torch.ones(1), 1 - rank)], [])  # neither rank reaches its receive
        exchange([], [(buffer, 1 - rank)])


def _connect_without_rank_2():
    rank, x = dist.get_rank(), torch.ones(1)
    if rank == 2:
        signal.pause()
    with nccl_over_gloo():
        exchange([(x, 1)] * (rank == 0), [(x, 0)] * (rank == 1))


def _receive_more():
    rank, x = dist.get_rank(), torch.ones(2)
    with nccl_over_gloo():
        exchange([(x[:1], 1)] * (rank == 0), [(x, 0)] * (rank == 1))


WRONG = [
    (2, _send_before_receiving, "Timed out"),
    soak(3, _connect_without_rank_2, "Timed out"),
    (2, _receive_more, "unlike sizes"),
]


@pytest.mark.parametrize("world_size, function, error", WRONG)
def test_code_that_hangs_on_nccl_is_an_error_in_the_emulation(world_size, function, error):
    with pytest.raises(RanksFailed, match=error):
        spawn(world_size, function, group_timeout=1, timeout=20)
