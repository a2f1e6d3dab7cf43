"""Every layout through the code that NCCL runs, over gloo, with real numbers: as one process does.

Messages go as NCCL takes them: batches of the calling thread, which block where they are posted
until both ends have posted them, as if everything shared one hardware queue; tags tell nothing
apart. What overlaps on a GPU happens here where it is launched, so that an order of launches that
could hang there hangs here.
"""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import hybrid
import test_hybrid
from collectives import exchange
from gpu_counts import Stream, as_on_nccl, post_over_gloo
from ranks import RanksFailed, run, spawn
from test_hybrid import EVERY_LAYOUT, MIXED, NODES, soak_but


@contextmanager
def nccl_over_gloo():
    """NCCL's branches, for CPU tensors: a list of the sizes of the batches that they post."""
    sizes = []

    def post_and_block(group, sends, receives):
        assert all(tensor.is_contiguous() and tensor.numel() for tensor, _ in (*sends, *receives))
        post_over_gloo(group, sends, receives).wait()
        sizes.append(len(sends) + len(receives))
        assert sizes[-1] <= 256  # beyond that NCCL may hang
        return Stream()

    with as_on_nccl(post_and_block):
        yield sizes


def _as_on_nccl(function, *arguments):
    with nccl_over_gloo() as sizes:
        result = function(*arguments)
    assert sum(sizes) or dist.get_world_size() == 1
    return result


@pytest.fixture
def on_nccl(monkeypatch):
    """test_hybrid runs its ranks through NCCL's branches."""
    call = lambda world_size, function, *args: run(world_size, _as_on_nccl, function, *args)
    monkeypatch.setattr(test_hybrid, "run", call)


def _several(rows):
    """Rows (world_size, ...) of several ranks; a soak, but for some of up to 4."""
    rows = [row for row in rows if row[0] > 1]
    return soak_but(lambda i, row: row[0] < 4 and i % 2 or (row[0] == 4 and i % 3 == 0), rows)


@pytest.mark.parametrize("world_size, flags", _several(EVERY_LAYOUT))
def test_every_layout_trains_as_one_process_does(on_nccl, world_size, flags):
    test_hybrid._assert_trains(world_size, flags, torch.float64, 1e-11, 1e-9, 1e-9)


MIXTURES = [(n, f"{flags} --microbatches 1", mixture) for n, flags, mixture in MIXED] + NODES


@pytest.mark.parametrize("world_size, flags, mixture", _several(MIXTURES))
def test_a_gpt_of_experts_trains_as_a_loop_over_them_does(on_nccl, world_size, flags, mixture):
    test_hybrid._assert_trains_as_a_loop_does(world_size, flags, mixture)


@pytest.fixture
def on_nodes(monkeypatch):
    """And each on a node of its own, or, of four ranks and more, two on each."""

    def call(world_size, function, *args):
        return run(world_size, _on_nodes, 1 if world_size < 4 else 2, function, *args)

    monkeypatch.setattr(test_hybrid, "run", call)


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


@pytest.mark.parametrize("world_size, flags", soak_but(lambda i, _: i < 3, ACROSS))
def test_layouts_that_span_nodes_train_as_one_process_does(on_nodes, world_size, flags):
    test_hybrid._assert_trains(world_size, flags, torch.float64, 1e-11, 1e-9, 1e-9)


# ---- the emulation itself ------------------------------------------------------------------------


def _send_before_receiving():
    rank, buffer = dist.get_rank(), torch.zeros(1)
    with nccl_over_gloo():
        exchange([(torch.ones(1), 1 - rank)], [])  # neither rank ever gets to its receive
        exchange([], [(buffer, 1 - rank)])


def test_an_order_that_hangs_on_nccl_hangs_here():
    with pytest.raises(RanksFailed, match="Timed out|did not answer"):
        spawn(2, _send_before_receiving, group_timeout=1, timeout=20)
