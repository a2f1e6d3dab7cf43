"""Collectives against sums of integers, torch.distributed's own, and one process's autograd."""

import ast
import gc
import io
import itertools
import os
import re
import signal
import sys
import threading
import time
import weakref
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.testing._internal.distributed.fake_pg import FakeStore

import collectives
from collectives import (
    ALIGNMENT, DIRECT_BYTES, MOST_PEERS, all_gather, all_gather_single, all_gather_to_group,
    all_reduce, all_reduce_bytes, all_reduce_cost, all_to_all_in_group, all_to_all_single, barrier,
    broadcast, check_parameters, choose, copy_to_group, count_bytes, exchange, gather,
    gather_from_group, gather_objects, observe, rank_and_size, reduce, reduce_from_group,
    reduce_scatter_bytes, reduce_scatter_single, reduce_scatter_to_group, report_stalls,
    ring_all_reduce, scatter, scatter_to_group, set_backend_collectives, set_ranks_per_node,
)

from gpu_counts import as_on_nccl, batches
from nccl_replay import Deadlock, Mismatch, record, replay
from ranks import least_bytes, on_ranks, run, spawn

PROJECT = Path(__file__).resolve().parent.parent
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64
]
REDUCED = {
    ReduceOp.SUM: lambda stack: stack.sum(0),
    ReduceOp.AVG: lambda stack: stack.mean(0),
    ReduceOp.PRODUCT: lambda stack: stack.prod(0),
    ReduceOp.MIN: lambda stack: stack.amin(0),
    ReduceOp.MAX: lambda stack: stack.amax(0),
}
SUM_AND_MEAN = (ReduceOp.SUM, ReduceOp.AVG)


def _integers(*shape, dtype=torch.float64, seed=0):
    """-2..2: eight of them have an exact sum and product in every dtype. Row r is rank r's."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def _normal(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _same(actual, expected):
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert torch.equal(actual, expected), (actual, expected)


def _same_on_all_ranks(tensor):
    for other in gather_objects(tensor):
        _same(tensor, other)


def _wait(work):
    if work is not None:
        work.wait()


def _batches(events):
    """The messages of each."""
    return [event["messages"] for event in events if event["kind"] == "post"]


# ---- values -------------------------------------------------------------------------------------


def _ops_of(dtype, ops=tuple(REDUCED)):
    """Those of `ops` that there are for the dtype."""
    return [op for op in ops if op != ReduceOp.AVG or dtype.is_floating_point]


def _cases(n, dtype, group, ops, by_backend):
    """(what to call, its outputs, its inputs, what the outputs must be), of all collectives."""
    rank, P = rank_and_size(group)
    roots = dist.get_process_group_ranks(group or dist.group.WORLD)
    everyone = _integers(P, P, n, dtype=dtype, seed=n)
    mine, new = everyone[rank], lambda expected: torch.full_like(expected, 99)
    yield all_to_all_single, new(mine), mine, everyone[:, rank]
    yield all_gather_single, new(mine), mine[0], everyone[:, 0]
    apart = 0 if by_backend else 3  # the backend wants like lengths
    ragged = [row.flatten()[: n + apart * (r % 2)] for r, row in enumerate(everyone)]
    yield all_gather, list(map(new, ragged)), ragged[rank], ragged
    for op in _ops_of(dtype, ops):
        total = REDUCED[op](everyone.double()).to(dtype)
        yield partial(all_reduce, op=op), mine.clone(), None, total
        yield partial(reduce_scatter_single, op=op), new(total[rank]), mine, total[rank]
    for root, name in enumerate(roots):
        at_root = rank == root
        yield partial(broadcast, src=name), mine[0].clone(), None, everyone[root, 0]
        lists = list(everyone[root].clone()) if at_root else None
        yield partial(scatter, src=name), new(mine[0]), lists, everyone[root, rank]
        lists = list(map(new, mine)) if at_root else None
        swapped = lambda out, own, name=name, **how: gather(own, out, name, **how)
        yield swapped, lists, mine[0], list(everyone[:, 0]) if at_root else None
        for op in _ops_of(dtype, ops):
            total = REDUCED[op](everyone[:, 0].double()).to(dtype)
            expected = total if at_root else mine[0]
            yield partial(reduce, dst=name, op=op), mine[0].clone(), None, expected


def _check_values(lengths, dtypes=DTYPES, group=None, async_op=False, ops=SUM_AND_MEAN, own=False):
    """Results of all collectives, beside sums of integers; own: they are the backend's."""
    for dtype, n in itertools.product(dtypes, lengths):
        for collective, output, input, expected in _cases(n, dtype, group, ops, own):
            inputs = [] if input is None and output is not None else [input]
            kept = [x.clone() for x in inputs if torch.is_tensor(x)]
            _wait(collective(output, *inputs, group=group, async_op=async_op))
            outputs = output if isinstance(output, list) else [output]
            expected = expected if isinstance(expected, (list, tuple)) else [expected]
            for actual, wanted in zip(outputs, expected, strict=True):
                if wanted is not None:
                    _same(actual, wanted)
            assert all(map(torch.equal, kept, inputs))


def _by(name):
    """Have this algorithm chosen: of all-reduces, and of their halves."""
    return patch.object(collectives, "choose", lambda *size, **how: name)


def _on_nodes(ranks_per_node, group=None):
    set_ranks_per_node(ranks_per_node or dist.get_world_size(group), group)


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks(1, 2, 3, 4, 6, 8)
def test_every_collective_on_every_dtype_and_length(async_op):
    P = dist.get_world_size()
    lengths = sorted({0, 1, P - 1, 2 * P + 1})
    _check_values(lengths, [torch.bfloat16, torch.int64] if async_op else DTYPES, None, async_op)


@on_ranks(1, 2, 3, 6)
def test_every_reduction_and_what_goes_round_the_ring():
    _check_values([5], ops=tuple(REDUCED))
    with least_bytes(), patch.object(collectives, "SEGMENT", 1 << 12):
        _check_values([0, 1, 7], DTYPES[:2])
        _check_values([(1 << 10) + 3], DTYPES[1:2], ops=[ReduceOp.SUM])


@on_ranks(3)
def test_large_integers_scalars_and_parameters():
    rank, P = rank_and_size()
    large = 2**53 + 1  # no float holds it
    tensor = torch.full((3,), large + rank)
    all_reduce(tensor)
    assert tensor.tolist() == [P * large + sum(range(P))] * 3
    scalar = torch.tensor(float(rank))
    all_reduce(scalar)
    assert scalar.shape == () and scalar.item() == sum(range(P))
    parameter = torch.nn.Parameter(torch.full((2, 3), float(rank)))
    broadcast(parameter, P - 1)
    all_reduce(parameter, async_op=True).wait()
    assert parameter.is_leaf and parameter.requires_grad
    assert (parameter == P * (P - 1)).all()


# ---- groups -------------------------------------------------------------------------------------


@on_ranks(6)
def test_disjoint_groups_at_once_whose_roots_are_global_ranks():
    groups = {members: dist.new_group(members) for members in [(1, 4, 5), (0, 2, 3)]}
    group = next(group for group in groups.values() if dist.get_rank(group) >= 0)
    _check_values([0, 2, 5], [torch.float32, torch.int64], group)
    _check_values([4], [torch.float32], group, async_op=True)
    barrier(group)


@on_ranks(4)
def test_ranks_are_those_of_the_group_in_any_order():
    try:
        group = dist.new_group([3, 0, 2], sort_ranks=False)
    except TypeError:  # before torch 2.13 a group's ranks are always sorted
        group = dist.new_group([3, 0, 2])
    if dist.get_rank() != 1:
        _check_values([1, 5], [torch.float64], group)


@on_ranks(1, 2, 3, 4, 6)
def test_barrier_waits_for_the_last_rank(tmp_path):
    rank, P = rank_and_size()
    for late in range(P):
        time.sleep(0.02 * (rank == late))
        (tmp_path / f"{late}.{rank}").touch()
        barrier()
        for other in range(P):
            assert (tmp_path / f"{late}.{other}").exists(), f"rank {rank} left before {other} came"


# ---- layouts ------------------------------------------------------------------------------------


def _strided_layouts(*shape):
    """Views of this shape that do not cover their memory row by row, each with that memory."""
    gaps = torch.full((*shape[:-1], 2 * shape[-1]), 99.0)
    yield gaps[..., ::2], gaps
    transposed = torch.full(shape[::-1], 99.0)
    yield transposed.permute(*range(len(shape))[::-1]), transposed


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks(1, 2, 3)
def test_the_result_reaches_a_tensor_that_is_not_contiguous(async_op):
    rank, P = rank_and_size()
    everyone = _integers(P, P, 2, 3, dtype=torch.float32)
    total = everyone.sum(0)
    for collective, expected, has_input in [
        (all_reduce, total, None),
        (partial(broadcast, src=P - 1), everyone[-1], None),
        (all_gather_single, everyone[:, 0], lambda x: x[0]),
        (all_to_all_single, everyone[:, rank], lambda x: x),
        (reduce_scatter_single, total[rank], lambda x: x),
    ]:
        for output, memory in _strided_layouts(*expected.shape):
            for input, _ in _strided_layouts(P, 2, 3):
                input.copy_(everyone[rank])
                if not has_input:
                    output.copy_(everyone[rank])
                inputs = [has_input(input)] if has_input else []
                _wait(collective(output, *inputs, async_op=async_op))
                _same(output, expected)
                _same(input, everyone[rank])
                assert (memory == 99).sum() == memory.numel() - output.numel()


# ---- all-to-all with splits ---------------------------------------------------------------------


def _split_matrix(P, seed):
    """How many rows rank i (row) sends to rank j; rank 0 sends none, the last one gets none."""
    sizes = _integers(P, P, seed=seed).abs().long()
    sizes[0, :], sizes[:, -1] = 0, 0
    return sizes


def _rows_to_send(sizes, seed):
    """For each rank the pieces that it sends, of 3 elements a row."""
    return [
        [_normal(n, 3, seed=seed + 100 * i + j) for j, n in enumerate(row)]
        for i, row in enumerate(sizes.tolist())
    ]


@on_ranks(1, 2, 3, 4, 6)
def test_all_to_all_with_splits_and_ranks_without_rows():
    rank, P = rank_and_size()
    for seed in range(10):
        sizes = _split_matrix(P, seed)
        pieces = _rows_to_send(sizes, seed)
        input = torch.cat(pieces[rank])
        output = torch.empty(int(sizes[:, rank].sum()), 3, dtype=torch.float64)
        splits = sizes[:, rank].tolist(), sizes[rank].tolist()
        with count_bytes() as traffic:
            _wait(all_to_all_single(output, input, *splits, async_op=seed % 2 == 1))
        _same(output, torch.cat([row[rank] for row in pieces]))
        _same(input, torch.cat(pieces[rank]))
        assert traffic.bytes() == 24 * int(sizes[rank].sum() - sizes[rank, rank])


# ---- algorithms ---------------------------------------------------------------------------------


def _algorithms(P):
    """(name, ranks per node) of every algorithm that a group of this size has."""
    names = ("auto", "naive", "direct", "ring", "recursive_doubling", "halving_doubling")
    nodes = [("hierarchical", size) for size in range(1, P + 1) if P % size == 0]
    return [(name, None) for name in names] + nodes


SIZES = [1, 2, 3, 4, *(pytest.param(size, marks=pytest.mark.soak) for size in (5, 6, 7, 8))]


@on_ranks(*SIZES)
@patch.object(collectives, "SEGMENT", 1 << 12)
def test_every_algorithm_reduces_and_leaves_the_same_bits_on_all_ranks():
    """Every dtype and odd length, several segments, and a tensor that is not contiguous."""
    rank, P = rank_and_size()
    big = P * ((1 << 10) + 3)
    cases = [(dtype, n) for dtype in DTYPES for n in (0, 1, 2, 5, 64)] + [(torch.float64, big)]
    for name, ranks_per_node in _algorithms(P):
        _on_nodes(ranks_per_node)
        for dtype, length in cases:
            everyone = _integers(P, length, dtype=dtype, seed=length)
            for op in [ReduceOp.SUM] if length == big else _ops_of(dtype, tuple(REDUCED)):
                expected, output = REDUCED[op](everyone.double()).to(dtype), everyone[rank].clone()
                all_reduce(output, op, algorithm=name)
                _same(output, expected)
            all_reduce(everyone[rank], op, algorithm=name, output=output.fill_(9))
            _same(output, expected)
            _same(everyone, _integers(P, length, dtype=dtype, seed=length))
        columns = _integers(P, 6, 5)
        tensor = columns[rank].clone().t()
        all_reduce(tensor, algorithm=name)
        _same(tensor, columns.sum(0).t())
        noise = [_normal(n, dtype=dtype, seed=rank) for dtype in DTYPES[:4] for n in (1, 7, 1000)]
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT):
            for tensor in noise:
                all_reduce(tensor, op, algorithm=name)
            _same_on_all_ranks(torch.cat([tensor.double() for tensor in noise]))


@on_ranks(1, 2, 3, 4)
def test_the_ring_of_the_opening_makes_the_bits_of_the_real_one():
    rank, P = rank_and_size()
    for chunk in (0, 32, 320):  # where it cuts a tensor like the real one
        simple = _normal(chunk * P, dtype=torch.float32, seed=rank)
        full = simple.clone()
        ring_all_reduce(simple)
        all_reduce(full, algorithm="ring")
        _same(simple, full)


@on_ranks(2, 3, 4)
def test_on_a_stream_a_step_is_one_batch_and_in_a_node_a_collective_is_one_step():
    rank, P = rank_and_size()
    full, shard = torch.zeros(64 * P), torch.zeros(64)
    with as_on_nccl(), patch.multiple(collectives, SEGMENT=8, DIRECT_BYTES=1 << 20):
        _check_values([0, 1, 7], DTYPES[:1])
        apart, _ = all_reduce_cost("recursive_doubling", 1, P, rank=rank)  # of so few bytes
        for ranks_per_node, reduced, steps in [(1, apart, 2 if P == 3 else apart), (P, 2, 1)]:
            set_ranks_per_node(ranks_per_node)
            for call, expected in [
                (lambda: all_reduce(full), reduced),
                (lambda: all_reduce(full, algorithm="ring"), 2 * (P - 1)),
                (lambda: reduce_scatter_single(shard, full), steps),
                (lambda: all_gather_single(full, shard), steps),
                (lambda: all_to_all_single(torch.empty_like(full), full), 1),
            ]:
                with batches() as count:
                    call()
                assert count["batches"] == expected
        with patch.object(collectives, "DIRECT_BYTES", 128 * P):  # two pieces
            with batches() as count:
                all_reduce(full)
                reduce_scatter_single(shard, full)
        assert count["batches"] == 4 + 2
        with patch.object(collectives, "DIRECT_BYTES", 128):
            _check_values([96], DTYPES[1:2])  # many pieces; a broadcast goes in chunks


@on_ranks(6)
def test_a_large_all_to_all_goes_in_batches():
    rank, P = rank_and_size()
    everyone = _integers(P, P, 3)
    output = torch.empty_like(everyone[0])
    with patch.object(collectives, "MOST_PEERS", 2), record() as events:
        all_to_all_single(output, everyone[rank])
    _same(output, everyone[:, rank])
    assert [len(batch) for batch in _batches(events)] == [4, 4, 2]


@on_ranks(6)
def test_a_root_of_many_ranks_sends_and_receives_in_batches():
    rank, P = rank_and_size()
    everyone, root = _integers(P, 64 * P, dtype=torch.float32), 1
    large = patch.multiple(collectives, DIRECT_BYTES=128, MOST_PEERS=2)
    tensor, own, lists = everyone[rank].clone(), torch.empty(64 * P), [*everyone.clone()]
    for call in (
        lambda: scatter(own, lists if rank == root else None, root),
        lambda: gather(own, lists if rank == root else None, root),
        lambda: broadcast(tensor, root),  # in chunks: from the root, then P - 1 steps of the ring
    ):
        with as_on_nccl(), large, record() as events:
            call()
        if rank == root:
            assert [len(batch) for batch in _batches(events)][:3] == [2, 2, 1]
    _same(own, everyone[rank])
    _same(tensor, everyone[root])
    assert all(map(torch.equal, lists, everyone))


def _send_from_rows(dtype):
    """Collectives on rows that begin on 128 bytes, of all lengths where we cut them."""
    rank, P = rank_and_size()
    unit = ALIGNMENT // dtype.itemsize
    for length in (1, unit, 33 * unit - 7, 101 * unit + 1):
        row = torch.zeros(length, dtype=dtype)
        shard = torch.zeros(length // unit * unit, dtype=dtype)
        full = torch.zeros(len(shard) * P, dtype=dtype)
        ragged = [torch.zeros(length + r, dtype=dtype) for r in range(P)]
        for name, ranks_per_node in _algorithms(P):
            _on_nodes(ranks_per_node)
            all_reduce(row, algorithm=name)
        for ranks_per_node in (P, P // 2, 1):
            set_ranks_per_node(ranks_per_node)
            all_reduce(row)
            reduce_scatter_single(shard, full)
            all_gather_single(full, shard)
            all_gather(ragged, ragged[rank].clone())
        broadcast(row, 1)


@on_ranks(4)
def test_every_message_begins_on_128_bytes_of_a_row_that_does():
    offsets = set()  # in their memory

    def listen(event, operation, sends=(), receives=()):
        for tensor, _ in (*sends, *receives):
            offsets.add(tensor.storage_offset() * tensor.itemsize)

    several = patch.multiple(collectives, SEGMENT=1 << 10, DIRECT_BYTES=1 << 12)
    with observe(listen), several:  # segments and pieces
        for way in (nullcontext(), least_bytes(), as_on_nccl()):
            with way:
                _send_from_rows(torch.bfloat16)
    assert len(offsets) > 50
    assert not [offset for offset in offsets if offset % 128]


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (3, 2), (2, 3), (2, 4)])
@on_ranks(lambda nodes, ranks_per_node: nodes * ranks_per_node)
def test_between_nodes_go_an_ith_of_the_bytes_and_a_ring_inside_one_batch(nodes, ranks_per_node):
    O, I, (rank, P) = nodes, ranks_per_node, rank_and_size()
    D, inside = 96 * 8 * P, range(rank - rank % I, rank - rank % I + I)
    within, between = (I - 1) * D // I, (O - 1) * D // O // I
    full = torch.zeros(96 * P, dtype=torch.float64)
    shard = full[:96].clone()
    set_ranks_per_node(I)
    with as_on_nccl(), _by("hierarchical"):
        _check_values([0, 1, 7], DTYPES[1:2])
        for call, times, steps in (
            (lambda: reduce_scatter_single(shard, full), 1, 1 + (O - 1)),
            (lambda: all_gather_single(full, shard), 1, 1 + (O - 1)),
            (lambda: all_reduce(full), 2, 2 + 2 * (O - 1)),
        ):
            with count_bytes() as traffic, batches() as count:
                call()
            assert traffic.bytes(peers=inside) == times * within
            assert traffic.bytes() == times * (within + between)
            assert count["batches"] == steps
        with patch.object(collectives, "DIRECT_BYTES", 1 << 10):  # 6 P pieces of 128 bytes a rank
            _check_values([96], DTYPES[1:2])
        with patch.object(collectives, "MOST_PEERS", I), batches() as count:
            reduce_scatter_single(shard, full)  # one node's chunks in a batch
        assert count["batches"] == O + (O - 1)
        with patch.object(collectives, "MOST_PEERS", 1):
            _check_values([5], DTYPES[1:2])
    assert all_reduce_cost("hierarchical", D, P, I) == (2 * O, 2 * (within + between))


# ---- costs and the choice -----------------------------------------------------------------------


@on_ranks(*range(1, 9))
def test_every_algorithm_takes_the_steps_and_sends_the_bytes_that_its_cost_says():
    """P = 3, 5, 6, 7, too, where some ranks stand in for others; rank 0 is the busiest."""
    nbytes = 840 * 128  # what any P up to 8 divides, by 128
    rank, P = rank_and_size()
    for name, ranks_per_node in _algorithms(P)[1:]:
        _on_nodes(ranks_per_node)
        with count_bytes() as traffic, record() as events:
            all_reduce(torch.zeros(nbytes // 4), algorithm=name)
        cost = all_reduce_cost(name, nbytes, P, ranks_per_node or 1, rank)
        assert (len(_batches(events)), traffic.bytes("all_reduce")) == cost, name
        assert cost[1] <= all_reduce_cost(name, nbytes, P, ranks_per_node or 1)[1]
        for elements in (1, 1001):  # at most 128 bytes a chunk are to be added
            with count_bytes() as traffic:
                all_reduce(torch.zeros(elements), algorithm=name)
            _, claimed = all_reduce_cost(name, 4 * elements, P, ranks_per_node or 1, rank)
            assert traffic.bytes() <= claimed + 2 * (P - 1) * 128, (name, traffic.bytes(), claimed)


ROUNDS = {1: (0, 0), 2: (1, 0), 3: (1, 2), 4: (2, 0), 5: (2, 2), 6: (2, 2), 7: (2, 2), 8: (3, 0)}


@pytest.mark.parametrize("P", ROUNDS)
def test_costs_are_those_of_the_papers(P):
    D, (rounds, folding) = 840 * 128, ROUNDS[P]
    core, added, least = 1 << rounds, D if folding else 0, 2 * (P - 1) * D // P
    for name, steps, sent in [
        ("naive", min(1, P - 1), (P - 1) * D),
        ("direct", 2 * min(1, P - 1), least),
        ("ring", 2 * (P - 1), least),
        ("recursive_doubling", rounds + folding, rounds * D + added),
        ("halving_doubling", 2 * rounds + folding, 2 * (core - 1) * D // core + added),
    ]:
        assert all_reduce_cost(name, D, P) == (steps, sent), name
    for rank in range(core, P):  # another rank stands in
        assert all_reduce_cost("halving_doubling", D, P, rank=rank) == (2, D)
    assert all_reduce_bytes(D, P) == 2 * reduce_scatter_bytes(D, P) == least


@on_ranks(1, 2, 3, 4, 6)
def test_each_rank_sends_the_bytes_of_the_formulas():
    rank, P = rank_and_size()
    D, rounds = 840 * 128, (P - 1).bit_length()
    full, shard = torch.zeros(D // 4), torch.zeros(D // 4 // P)
    chunks, at_root = list(full.chunk(P)), list(full.chunk(P)) if rank == 0 else None
    sent, steps = reduce_scatter_bytes(D, P), rounds if P & (P - 1) == 0 else P - 1
    for name, arguments, nbytes, messages, together in [  # bytes and messages of rank 0; bytes
        ("reduce_scatter_single", (shard, full), sent, steps, P * sent),
        ("all_gather_single", (full, shard), sent, steps, P * sent),
        ("all_to_all_single", (full, full.clone()), sent, P - 1, P * sent),
        ("all_gather", (chunks, shard), sent, P - 1, P * sent),
        ("broadcast", (full,), rounds * D, rounds, (P - 1) * D),
        ("reduce", (full,), 0, 0, (P - 1) * D),
        ("scatter", (shard, at_root), sent, P - 1, sent),
        ("gather", (shard, at_root), 0, 0, sent),
    ]:
        with count_bytes() as traffic:
            getattr(collectives, name)(*arguments)
        if rank == 0:
            assert (traffic.bytes(name), len(traffic.sent)) == (nbytes, messages), name
        assert sum(gather_objects(traffic.bytes())) == together, name
    with least_bytes(), count_bytes() as traffic:
        reduce_scatter_single(shard, full)
        all_gather_single(full, shard)
    assert traffic.bytes() == 2 * sent == all_reduce_bytes(D, P)
    for n in (0, 1, P - 1, 5 * P + 1):  # together the ranks send no byte more than must be
        with count_bytes() as traffic:
            all_reduce(torch.zeros(n), algorithm="ring")
        assert sum(gather_objects(traffic.bytes())) == 2 * (P - 1) * 4 * n
    with as_on_nccl(), patch.object(collectives, "DIRECT_BYTES", 1 << 10), count_bytes() as traffic:
        broadcast(full)  # in chunks: from the root, then round the ring
    assert traffic.bytes() == 2 * sent if rank == 0 else traffic.bytes() <= sent


M, G = 1 << 20, 1 << 30
CHOICES = [  # P, ranks per node, on NCCL; bytes and choice for an all-reduce, and for a half of one
    (8, 8, True, [(1, "direct"), (G, "direct")], [(1, "direct"), (G, "direct")]),
    (2, 1, True, [(1, "doubling"), (25 * M, "doubling")], [(1, "ring"), (G, "ring")]),
    (64, 1, True, [(M, "doubling"), (25 * M, "halving")], [(1, "halving"), (G, "halving")]),
    (24, 1, True, [(M, "doubling"), (25 * M, "halving"), (G, "ring")], [(1, "ring"), (G, "ring")]),
    (8, 4, True, [(M, "doubling"), (2 * M, "nodes"), (G, "nodes")], [(1, "nodes"), (G, "nodes")]),
    (16, 8, True, [(1, "nodes"), (G, "nodes")], [(1, "nodes"), (G, "nodes")]),
    (64, 8, True, [(M, "doubling"), (25 * M, "nodes")], [(M, "halving"), (25 * M, "nodes")]),
    (2048, 8, True, [(25 * M, "halving"), (4 * G, "nodes")], [(1, "halving"), (4 * G, "nodes")]),
    (2, 2, False, [(1, "doubling"), (2 * M - 1, "doubling"), (2 * M, "ring")], [(2 * M, "ring")]),
    (4, 4, False, [(M // 2, "doubling"), (M, "halving"), (2 * M, "ring")], [(1, "halving")]),
    (8, 8, False, [(M // 4, "doubling"), (M, "halving"), (2 * M, "ring")], [(2 * M, "ring")]),
    (6, 6, False, [(M // 4, "doubling"), (M, "ring")], [(1, "direct"), (2 * M, "ring")]),
    (4, 2, False, [(1, "doubling"), (16 * M, "nodes")], [(16 * M, "nodes")]),
]
NAMES = {"doubling": "recursive_doubling", "halving": "halving_doubling", "nodes": "hierarchical"}


@pytest.mark.parametrize("P, ranks_per_node, on_nccl, wholes, halves", CHOICES)
def test_the_choice_by_size(P, ranks_per_node, on_nccl, wholes, halves):
    """On NCCL within a fifth of the best by 60 us a step, 50 GB/s between nodes, 250 inside."""
    for phases, rows in (2, wholes), (1, halves):
        for nbytes, name in rows:
            assert choose(nbytes, P, ranks_per_node, on_nccl, phases) == NAMES.get(name, name)


@on_ranks(4)
def test_a_node_of_more_ranks_than_the_group_has_all_of_them():
    x = torch.zeros(1 << 10)
    for ranks_per_node, expected in (1, 4), (3, 4), (4, 3), (5, 3), (16, 3):  # 3: nodes are unlike
        set_ranks_per_node(ranks_per_node)
        with batches() as count:
            all_reduce(x)
            reduce_scatter_single(x[:256], x.clone())
        assert count["batches"] == expected, ranks_per_node


@on_ranks(4)
def test_what_is_too_long_for_halves_travels_in_segments():
    longest = []

    def listen(event, operation, sends=(), receives=()):
        longest.extend(tensor.nbytes for tensor, _ in sends)

    for nbytes in (3 << 20, 10 << 20):
        full, shard = torch.zeros(nbytes // 4), torch.zeros(nbytes // 16)
        with observe(listen):
            all_reduce(full)
            reduce_scatter_single(shard, full)
            all_gather_single(full, shard)
    assert max(longest) <= collectives.SEGMENT


@pytest.fixture
def one_of_eight():
    """This process as rank 0 of a group of 8 that moves nothing, and is not known to."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    with patch.object(dist, "get_backend", lambda group=None: "nccl"):
        yield
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks_per_node", [1, 8])
def test_2048_ranks_scatter_and_gather_in_twice_log2_of_them_batches(ranks_per_node):
    dist.init_process_group("fake", store=FakeStore(), rank=1000, world_size=2048)
    set_ranks_per_node(ranks_per_node)
    full = torch.empty(25 << 18, device="meta")
    shard = full[: len(full) // 2048].clone()
    nowhere = {"batch_isend_irecv": lambda operations: []}
    with batches(**nowhere) as count, count_bytes() as traffic, record() as events:
        reduce_scatter_single(shard, full)
        all_gather_single(full, shard)
    with batches(**nowhere) as listed:
        all_gather(list(full.chunk(2048)), shard)
    dist.destroy_process_group()
    assert count["batches"] == 2 * 11 and listed["batches"] == 2048 // MOST_PEERS
    assert traffic.bytes() == 2 * reduce_scatter_bytes(full.nbytes, 2048)
    assert max(len(batch) for batch in _batches(events)) <= 2 * MOST_PEERS
    peers = {peer for batch in _batches(events) for _, peer, _ in batch}
    assert peers == {1000 ^ 1 << k for k in range(11)}


# ---- streams ------------------------------------------------------------------------------------


class _Event:
    """A CUDA event that the stream passes when it is told to."""

    passed = False

    def query(self):
        return self.passed


class _Stream:
    """A CUDA stream that notes whom it waits for, and records events."""

    def __init__(self, *arguments, **named):
        self.waited, self.events = [], []
        self.wait_stream = self.wait_event = self.waited.append

    def record_event(self):
        self.events.append(_Event())
        return self.events[-1]


@contextmanager
def _fake_streams():
    """torch.cuda's streams, of which the current one and those made are given."""
    current, made = _Stream(), []

    def make(*arguments, **named):
        made.append(_Stream())
        return made[-1]

    streams = patch.multiple(torch.cuda, Stream=make, current_stream=lambda: current)
    with as_on_nccl(batch_isend_irecv=lambda operations: []), streams:
        yield current, made


def test_a_group_has_one_stream_and_its_operations_follow_those_before(one_of_eight):
    x = torch.ones(4)
    with _fake_streams() as (current, made):
        all_reduce(x)
        assert not current.waited  # nothing is pending
        works = [all_reduce(x, async_op=True) for _ in range(2)]
        (stream,) = made
        assert stream.waited == [current, current] and not current.waited
        exchange([(x, 1)], [])
        assert current.waited == [stream.events[1]]
        broadcast(x)
        assert len(stream.events) == 3 and current.waited[1:] == stream.events[2:]
        assert not works[0].is_completed()
        for event in stream.events:
            event.passed = True
        all_reduce(x)
        assert works[0].is_completed() and len(stream.events) == 3 and made == [stream]


def test_what_a_stream_uses_is_kept_though_nobody_keeps_or_awaits_the_work(one_of_eight):
    def launch():
        tensor = torch.ones(4)
        return weakref.ref(tensor), all_reduce(tensor, async_op=True)

    with _fake_streams() as (_, made):
        tensors = [launch()[0] for _ in range(3)]
        gc.collect()
        assert all(tensor() is not None for tensor in tensors)
        for event in made[0].events[:2]:
            event.passed = True
        awaited, work = launch()
        gc.collect()
        assert [tensor() is not None for tensor in tensors] == [False, False, True]
        assert awaited() is not None
        work.wait()
        assert awaited() is None


def test_an_error_of_a_batch_names_the_operation_and_its_peers(one_of_eight):
    lost = dist.DistBackendError("NCCL communicator was aborted")
    x, world, some = torch.ones(4), str(list(range(8))), dist.new_group([0, 3, 5])
    naive = partial(all_reduce, algorithm="naive")
    for post in (Mock(side_effect=lost), Mock(return_value=[Mock(wait=Mock(side_effect=lost))])):
        for call, operation, ranks, peers in [
            (lambda: exchange([(x, 3)], [(x.clone(), 2)]), "exchange", world, "2 or 3"),
            (lambda: exchange([(x, 3)], [], async_op=True).wait(), "exchange", world, "3"),
            (lambda: exchange([(x, 2)], [], some), "exchange", "[0, 3, 5]", "5"),
            (lambda: broadcast(x), "broadcast", world, "1 or 2 or 4"),
            (lambda: naive(x, group=some), "all_reduce", "[0, 3, 5]", "3 or 5"),
        ]:
            with as_on_nccl(batch_isend_irecv=post), pytest.raises(RuntimeError) as info:
                call()
            text = f"{operation} in the group of ranks {ranks}: rank 0 lost rank {peers}: {lost}"
            assert str(info.value) == text


@on_ranks(2)
def test_a_group_may_have_two_backends_or_leave_them_to_torch(tmp_path):
    x, rank = torch.ones(3), dist.get_rank()
    group = dist.new_group(backend="cpu:gloo,cuda:gloo")
    for pair in (group, None):
        all_reduce(x, group=pair)
        all_reduce(x, group=pair, async_op=True).wait()
        barrier(pair)
        assert gather_objects("a", pair) == ["a", "a"]
        if pair is group:
            dist.destroy_process_group()
            store = dist.FileStore(str(tmp_path / "store"), 2)
            dist.init_process_group(store=store, rank=rank, world_size=2)
            assert dist.get_backend() == "undefined"
    assert (x == 16).all()


@on_ranks(2, 3)
def test_staged_buffers_carry_what_tensors_hold():
    """CPU tensors that say they are on a GPU: other buffers, of host memory, travel."""
    (rank, P), staged, empty_like = rank_and_size(), [], torch.empty_like

    def pinned(tensor, device=None, pin_memory=False, **how):
        if pin_memory:
            staged.append(empty_like(tensor, **how).fill_(-7))
        return staged[-1] if pin_memory else empty_like(tensor, **how)

    tensor, received = torch.full((5,), rank + 1.0), torch.zeros(3)
    messages = [(torch.ones(3), (rank + 1) % P)], [(received, (rank - 1) % P)]
    on_gpu = patch.object(torch.Tensor, "is_cuda", property(lambda tensor: True), create=True)
    with on_gpu, patch.object(torch, "empty_like", pinned):
        all_reduce(tensor, async_op=True).wait()
        exchange(*messages)
    assert staged and (tensor == P * (P + 1) / 2).all() and (received == 1).all()


# ---- the backend's own --------------------------------------------------------------------------


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks(3)
def test_the_collectives_of_the_backend_give_the_same_results(async_op):
    group = dist.new_group([0, 1, 2])
    set_backend_collectives(group)
    _check_values([0, 1, 5], [torch.float64, torch.int64], group, async_op, REDUCED, own=True)
    for pair in PAIRS:
        _check_pair(pair, 1, group)
    barrier(group)
    assert gather_objects("a" * dist.get_rank(), group) == ["", "a", "aa"]


@on_ranks(2)
def test_the_backend_is_for_the_groups_that_are_set_and_its_bytes_are_not_counted():
    rank, P = rank_and_size()
    x, group, alone = torch.ones(4), dist.new_group(range(P)), [dist.new_group([r]) for r in (0, 1)]
    set_backend_collectives(group)
    set_backend_collectives(alone[rank])
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as theirs:
        with count_bytes() as traffic:
            all_reduce(x)
            all_reduce(x, group=alone[rank])
            assert not theirs.called and traffic.bytes("all_reduce") == traffic.bytes() > 0
            exchange([(x, 1 - rank)], [(torch.empty(4), 1 - rank)], group, async_op=True).wait()
            assert traffic.bytes("exchange", group) == 16
            with pytest.raises(RuntimeError, match="the backend's own all_reduce"):
                all_reduce(x, group=group)
        all_reduce(x, group=group)
        reduce_from_group(x, group)
        assert theirs.call_count == 2


# ---- failure ------------------------------------------------------------------------------------


@on_ranks(5)
def test_partial_sums_stay_until_they_are_sent():
    """Rank 1 stops receiving for a while; the others must not overwrite what it has not yet got."""
    rank, P = rank_and_size()
    late = []

    def listen(event, operation, *messages):
        if event == "post" and rank == 1 and not late:
            late.append(time.sleep(0.3))

    everyone = _integers(P, P * 3 << 17)
    output = torch.empty(len(everyone[0]) // P, dtype=everyone.dtype)
    with least_bytes(), observe(listen):
        reduce_scatter_single(output, everyone[rank])
    _same(output, everyone.sum(0).chunk(P)[rank])


def _lose_a_peer(how):
    tensor = torch.zeros(2**16)
    all_reduce(tensor)
    if dist.get_rank() == 2:
        os.kill(os.getpid(), how)
    for _ in range(1000):
        all_reduce(tensor, algorithm="ring", async_op=True).wait()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_peer_raises_on_every_rank_and_names_operation_group_and_peer(how):
    outcomes = spawn(4, _lose_a_peer, how, check=False, group_timeout=3, timeout=9)
    for rank, outcome in enumerate(outcomes):
        if rank != 2:
            lost = f"all_reduce in the group of ranks .0, 1, 2, 3.: rank {rank} lost rank [0-3]:"
            assert re.search(lost, outcome.error_text), outcome.error_text


def _stall(folder):
    """Rank 1 joins in only after rank 0 has told of it, and thrice the time that takes a line."""
    rank, lines = dist.get_rank(), []
    x = torch.ones(3)
    all_reduce(x, async_op=True).wait()

    def write(line):
        lines.append(line)
        (folder / str(len(lines))).touch()

    with patch.object(sys.stderr, "write", write):
        report_stalls(0.2)
        for call in (
            lambda: all_reduce(x),
            lambda: broadcast(x, 1, async_op=True).wait(),
            lambda: exchange([], [(x, 1)]) if rank == 0 else exchange([(x, 0)], []),
        ):
            count = len(list(folder.iterdir()))
            while rank == 1 and len(list(folder.iterdir())) == count:
                time.sleep(0.01)
            time.sleep(0.6 * rank)
            call()
            dist.barrier()
        if rank == 0:  # which computes, and waits for nobody
            late = exchange([], [(x, 1)], async_op=True)
            time.sleep(0.5)
            late.wait()
        else:
            exchange([(x, 0)], [])
    return lines


def test_a_stalled_operation_says_once_whom_it_waits_for(tmp_path):
    told, nothing = spawn(2, _stall, tmp_path)
    text = "{} in the group of ranks [0, 1]: rank 0 waits for rank 1 for more than 0.2 s\n"
    assert told == [text.format(name) for name in ("all_reduce", "broadcast", "exchange")]
    assert nothing == []


# ---- in the background --------------------------------------------------------------------------


@contextmanager
def _background_held():
    """No background thread sends or receives anything before the event that this gives is set."""
    gate = threading.Event()

    def listen(event, *what):
        if event == "post" and threading.current_thread() is not threading.main_thread():
            gate.wait(20)

    with observe(listen):
        yield gate


@on_ranks(3)
def test_an_operation_in_the_background_progresses_while_python_computes():
    """Nobody waits for the operation, and the computing thread sees it end."""
    tensor, rounds, deadline = torch.ones(1 << 20), 0, time.monotonic() + 30
    work = all_reduce(tensor, async_op=True)
    while not work.is_completed() and time.monotonic() < deadline:
        sum(range(1000))
        rounds += 1
    assert rounds > 0 and work.is_completed() and (tensor == dist.get_world_size()).all()


@on_ranks(2, 3, 4)
def test_operations_of_a_group_keep_their_order_and_those_of_another_do_not_wait():
    rank, P = rank_and_size()
    second, third = dist.new_group(range(P)), dist.new_group(range(P))
    everyone = _integers(P, 7)
    total = everyone.sum(0)
    x, y, z = everyone[rank].clone(), everyone[rank].clone(), everyone[rank].clone()
    gathered = torch.empty(P, 7, dtype=torch.float64)
    with _background_held() as gate:
        works = [
            all_reduce(x, async_op=True),
            all_reduce(y, group=second, async_op=True),
            all_reduce(x, async_op=True),
            all_gather_single(gathered, x, async_op=True),
            broadcast(y, P - 1, second, async_op=True),
        ]
        all_reduce(z, group=third)
        assert not any(work.is_completed() for work in works)
        _same(x, everyone[rank])
        threading.Timer(0.05, gate.set).start()
        all_reduce(x)
        assert all(work.is_completed() for work in (works[0], works[2], works[3]))
        barrier(second)
        assert all(work.is_completed() for work in works)
    for work in reversed(works):
        work.wait()
        work.wait()
    _same(x, total * P**2)
    _same(gathered, (total * P).expand(P, 7))
    _same(y, total)
    _same(z, total)


@pytest.mark.parametrize("contiguous", [True, False])
@on_ranks(3)
def test_an_operation_reads_its_input_when_those_before_it_are_done(contiguous):
    """Collectives on a tensor that an operation launched before them has still to sum."""
    rank, P = rank_and_size()
    everyone = _integers(P, P, 2 * P)
    total = everyone.sum(0)
    for collective, expected, into in [
        (all_reduce, total * P, lambda x, out: (x,)),
        (reduce_scatter_single, total[rank] * P, lambda x, out: (out[0], x)),
        (all_to_all_single, total[rank].expand_as(total), lambda x, out: (out, x)),
    ]:
        x = everyone[rank].clone() if contiguous else everyone[rank].t().contiguous().t()
        output = torch.zeros_like(total)
        with _background_held() as gate:
            pending = all_reduce(x, async_op=True)
            work = collective(*into(x, output), async_op=True)
            gate.set()
        work.wait()
        assert pending.is_completed()
        result = x if collective is all_reduce else output
        _same(result[0] if expected.ndim == 1 else result, expected)


@on_ranks(2)
def test_an_error_in_the_background_arises_in_wait():
    tensor = torch.ones(4)

    def listen(event, *what):
        if event == "post":
            raise ConnectionError("the link is down")

    with observe(listen):
        works = [all_reduce(tensor, async_op=True) for _ in range(2)]
        for work in [*works, works[0]]:
            with pytest.raises(ConnectionError, match="the link is down"):
                work.wait()
            assert work.is_completed()
    all_reduce(tensor, async_op=True).wait()
    assert (tensor == 2).all()


@on_ranks(2)
def test_the_thread_of_a_group_ends_with_it_also_if_the_thread_has_the_last_of_it():
    def use_a_group(wait):
        group = dist.new_group(range(dist.get_world_size()))
        with count_bytes():
            work = all_reduce(torch.ones(3), group=group, async_op=True)
            if wait:
                work.wait()
        return group

    before = threading.active_count()
    for wait in (True, True, False):
        group = use_a_group(wait)
        barrier()
        dist.destroy_process_group(group)
        del group
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


@on_ranks(2)
def test_all_reduce_of_inference_tensors_in_the_background():
    with torch.inference_mode():
        tensor = torch.ones(4)
        all_reduce(tensor, async_op=True).wait()


# ---- messages -----------------------------------------------------------------------------------


@on_ranks(2)
def test_a_listener_hears_of_what_begins_inside_in_its_order():
    x, peer, heard = torch.ones(4), 1 - dist.get_rank(), []

    def listen(event, operation, sends=(), receives=()):
        here = threading.current_thread() is threading.main_thread()
        heard.append((event, operation.name, here, len(sends) + len(receives)))
        assert (operation.of is None) == (operation.name != "wait")
        assert operation.group is dist.group.WORLD and operation.ranks == [0, 1]
        assert operation.rank == dist.get_rank() and operation.world_size == 2

    def run(name, here):
        return [("begin", name, True, 0), ("post", name, here, 2), ("end", name, here, 0)]

    with observe(listen):
        all_reduce(x, algorithm="naive")
        work = all_gather([x, x.clone()], x.clone(), async_op=True)
        work.wait()
        exchanged = exchange([(x, peer)], [(x.clone(), peer)], async_op=True)
        exchanged.wait()
    all_reduce(x)
    begun, *awaited = run("all_gather", False)
    waits = [("begin", "wait", True, 0), ("end", "wait", True, 0)]
    assert heard[:3] == run("all_reduce", True)
    assert [what for what in heard[3:] if not what[2]] == awaited
    begin, post, end = run("exchange", True)
    in_caller = [begun, *waits, begin, post, waits[0], end, waits[1]]
    assert [what for what in heard[3:] if what[2]] == in_caller


def _message(source, target, k):
    dtype = DTYPES[(source + target + k) % len(DTYPES)]
    seed = 100 * source + 10 * target + k
    return _integers((source + 2 * target + k) % 4, 1 + k, dtype=dtype, seed=seed)


@pytest.mark.parametrize("members", [[0], [0, 1, 2, 3], [1, 3]])
@on_ranks(4)
def test_exchange_of_several_messages_on_each_link(members):
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return
    rank, P = rank_and_size(group)
    peers = [peer for peer in range(P) if peer != rank]
    sent, received, works = {}, {}, []
    with count_bytes() as traffic:
        for async_op in (True, False):
            keys = [(peer, 3 * async_op + i) for i in range(3) for peer in peers]
            sends = [(_message(rank, peer, k), peer) for peer, k in keys]
            receives = [(torch.empty_like(_message(peer, rank, k)), peer) for peer, k in keys]
            sent.update(zip(keys, sends))
            received.update(zip(keys, receives))
            works.append(exchange(sends, receives, group, async_op))
    assert works[1] is None
    works[0].wait()
    for (peer, k), (tensor, _) in received.items():
        _same(tensor, _message(peer, rank, k))
        _same(sent[peer, k][0], _message(rank, peer, k))
    sizes = [tensor.nbytes for tensor, _ in sent.values() if tensor.numel()]
    assert traffic.bytes("exchange", group) == traffic.bytes() == sum(sizes)
    assert len(traffic.sent) == len(sizes)


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks(2)
def test_exchange_sends_what_is_made_before_it_and_alone_does_not_wait_for_the_peer(async_op):
    rank = dist.get_rank()
    x, incoming = torch.full((4,), rank + 1.0), torch.empty(4)
    with _background_held() as gate:
        pending = all_reduce(x, async_op=True)
        threading.Timer(0.05, gate.set).start()
        _wait(exchange([(x, 1 - rank)], [(incoming, 1 - rank)], async_op=async_op))
    assert pending.is_completed() and (incoming == 3).all(), incoming
    if rank == 1:
        dist.barrier()
    work = exchange([(x, 1 - rank)], [(incoming.fill_(0), 1 - rank)], async_op=True)
    if rank == 0:
        dist.barrier()
    work.wait()
    assert (incoming == 3).all()


@on_ranks(2)
def test_messages_of_the_user_pass_beside_ours():
    peer = 1 - dist.get_rank()
    sent = [dist.isend(torch.full((3,), 100.0 + tag), peer, tag=tag) for tag in range(4)]
    x, incoming = torch.ones(3), torch.empty(3)
    all_reduce(x)
    all_reduce(x, async_op=True).wait()
    exchange([(x, peer)], [(incoming, peer)])
    assert (x == 4).all() and (incoming == 4).all()
    for tag, work in enumerate(sent):
        dist.recv(incoming, peer, tag=tag)
        assert (incoming == 100 + tag).all()
        work.wait()


@on_ranks(2)
def test_counters_nest_and_count_what_began_inside():
    second = dist.new_group([0, 1])
    x, y = torch.zeros(6), torch.zeros(6)  # all-reduced by two ranks: 24 bytes sent
    with _background_held() as gate:
        early = all_reduce(x, async_op=True)
        with count_bytes() as outer:
            with count_bytes() as first:
                all_reduce(y, group=second)
            assert first.sent == outer.sent
            with count_bytes() as inner:
                late = all_reduce(x, async_op=True)
                broadcast(y, 0, second)
            gate.set()
            early.wait()
            late.wait()
    assert inner.bytes("all_reduce") == inner.bytes(group=dist.group.WORLD) == 24
    assert inner.bytes("broadcast") == inner.bytes(group=second) == 24 * (dist.get_rank() == 0)
    assert inner.bytes("broadcast", dist.group.WORLD) == 0
    assert outer.bytes() == 24 + inner.bytes() and outer.bytes(peers=[dist.get_rank()]) == 0
    assert outer.bytes("all_reduce") == 48 and outer.bytes("all_reduce", second) == 24


@on_ranks(1, 3, 4)
def test_the_demonstration_counts_what_it_claims():
    with redirect_stdout(io.StringIO()) as printed:
        collectives._demonstrate()
    table = r"^(\w+) +\d+ steps, +(\d+) bytes claimed, +(\d+) counted, at most [0-9]e-0[67] from"
    rows = re.findall(table, printed.getvalue().replace("0e+00", "1e-07"), re.M)
    assert len(rows) == (6 if dist.get_rank() == 0 else 0)
    for algorithm, claimed, counted in rows:
        assert claimed == counted, algorithm


# ---- errors -------------------------------------------------------------------------------------


@on_ranks(2)
def test_errors_name_the_values():
    x, rank, inside = torch.zeros, dist.get_rank(), r"is called by a rank that is not in the group"
    alone = [dist.new_group([0]), dist.new_group([1])]
    other = alone[1 - rank]
    cases = [
        (lambda: reduce_scatter_single(x(2), x(5)), "4 elements .*makes 5"),
        (lambda: all_gather_single(x(5), x(2)), "5 elements .* makes 4"),
        (lambda: all_gather([x(2)], x(2)), "all_gather got a list of 1, not of world_size=2"),
        (lambda: all_gather([x(3), x(3)], x(2)), "3 elements .* makes 2"),
        (lambda: all_gather([x(2), x(2)], x(2).int()), "torch.float32.*torch.int32"),
        (lambda: reduce(x(2), 5), "dst=5"),
        (lambda: scatter(x(2), [x(2)], rank), "scatter got a list of 1,.*world_size=2"),
        (lambda: scatter(x(2), None, rank), "scatter got a list of 0,.*world_size=2"),
        (lambda: gather(x(2), [x(3), x(2)], rank), "3 elements .*makes 2 of torch.float32"),
        (lambda: all_to_all_single(x(3), x(4)), r"3 rows .*world_size=2 by sizes \[1, 1\]"),
        (lambda: all_to_all_single(x(4), x(4), [1, 2]), r"4 rows .* \[1, 2\]"),
        (lambda: all_to_all_single(x(4), x(4), [1, 3], [3, 1]), "[13] elements .*makes [13] "),
        (lambda: all_to_all_single(x(4), x(4).int()), "torch.float32.*torch.int32"),
        (lambda: check_parameters([("w", x(2 + rank))]), r"rank 1 .*'w' \(3,\).*rank 0 .*\(2,\)"),
        (lambda: broadcast(x(2), 1 - rank, alone[rank]), str(1 - rank)),
        (lambda: all_reduce(x(2), group=other, async_op=True), "all_reduce " + inside),
        (lambda: reduce(x(2), 1, ReduceOp.SUM, other), "reduce " + inside),
        (lambda: all_to_all_single(x(2), x(2), None, None, other), inside),
        (lambda: barrier(other), inside),
        (lambda: exchange([(x(2), 0)], [], group=other), "exchange " + inside),
    ]
    for error, call, words in [
        *((ValueError, *case) for case in cases),
        (KeyError, lambda: all_reduce(x(2), "sum"), "sum"),
        (KeyError, lambda: all_reduce(x(2), ReduceOp.BAND), "BAND"),
        (KeyError, lambda: all_reduce(x(2), algorithm="best"), "best"),
        (RuntimeError, lambda: all_reduce(x(2).long(), ReduceOp.AVG), "Long"),
        (RuntimeError, lambda: all_reduce(x(2).cfloat(), ReduceOp.MAX), "complex"),
        (RuntimeError, lambda: scatter_to_group(x(4, 3), -1), "dim 1"),
        (RuntimeError, lambda: reduce_scatter_to_group(x(3, 4), 0), "dim 0"),
    ]:
        with pytest.raises(error, match=words):
            call()


# ---- derivatives --------------------------------------------------------------------------------

# what it does to the list of every rank's x; x is the same on all ranks; y is used alike by all
PAIRS = {
    copy_to_group: (lambda xs, dim: xs, True, False),
    reduce_from_group: (lambda xs, dim: [sum(xs)] * len(xs), False, True),
    scatter_to_group: (lambda xs, dim: xs[0].chunk(len(xs), dim), True, False),
    gather_from_group: (lambda xs, dim: [torch.cat(xs, dim)] * len(xs), False, True),
    all_gather_to_group: (lambda xs, dim: [torch.cat(xs, dim)] * len(xs), False, False),
    reduce_scatter_to_group: (lambda xs, dim: sum(xs).chunk(len(xs), dim), False, False),
}
WITHOUT_DIM = (copy_to_group, reduce_from_group)


def _apply(pair, x, dim, group=None):
    return pair(x, group) if pair in WITHOUT_DIM else pair(x, dim, group)


def _layouts(x):
    yield x.clone(memory_format=torch.contiguous_format)
    yield x.mT.clone(memory_format=torch.contiguous_format).mT


def _check_pair(pair, dim, group):
    """Values and gradients of y = pair(exp(x)) and loss = sum(weight * y), against one process."""
    rank, world_size = rank_and_size(group)
    one_process, x_is_alike, y_is_alike = PAIRS[pair]
    shape = 2 * world_size, world_size, 3 * world_size
    leaves = _normal(1 if x_is_alike else world_size, *shape).unbind()
    leaves = [leaf.requires_grad_() for leaf in leaves]
    xs = leaves * (world_size // len(leaves))
    ys = one_process([x.exp() for x in xs], dim)
    weights = _normal(1 if y_is_alike else world_size, *ys[0].shape, seed=1)
    loss = sum((weight * y).sum() for weight, y in zip(weights, ys))
    (expected,) = torch.autograd.grad(loss, xs[rank])
    weight = weights[0 if y_is_alike else rank]

    for x in _layouts(xs[rank].detach()):
        x.requires_grad_()
        inside = x.exp()
        y = _apply(pair, inside, dim, group)
        torch.testing.assert_close(y, ys[rank], rtol=1e-14, atol=1e-14)
        for grad_output in _layouts(weight):
            (gradient,) = torch.autograd.grad(y, x, grad_output, retain_graph=True)
            torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=1e-13)
            _same(grad_output, weight)
        _same(inside, x.exp())


@on_ranks(1, 3)
def test_the_backward_of_a_backward_is_the_forward():
    """The sum over ranks of y . v, differentiated by x and then by v, is y again."""
    rank, world_size = rank_and_size()
    for pair, (_, x_is_alike, y_is_alike) in PAIRS.items():
        shape = world_size, 2 * world_size
        x = _normal(world_size, *shape)[0 if x_is_alike else rank].requires_grad_()
        y = _apply(pair, x, 0)
        weight = _normal(world_size, *y.shape, seed=1)[0 if y_is_alike else rank].requires_grad_()
        (gradient,) = torch.autograd.grad(y, x, weight, create_graph=True)
        (again,) = torch.autograd.grad(gradient, weight, x.detach())
        torch.testing.assert_close(again, y.detach())


def _differentiate_all_to_all(group):
    rank, world_size = rank_and_size(group)
    for seed in range(4):
        sizes = _split_matrix(world_size, seed)
        pieces = _rows_to_send(sizes, seed)
        received = torch.cat([row[rank] for row in pieces])
        weights = [_normal(int(n), 3, seed=50 + r) for r, n in enumerate(sizes.sum(0))]
        parts = [weight.split(sizes[:, r].tolist()) for r, weight in enumerate(weights)]
        x = torch.cat(pieces[rank]).requires_grad_()
        kept, grad_output = x.detach().clone(), weights[rank].clone()
        y = all_to_all_in_group(x, sizes[:, rank].tolist(), sizes[rank].tolist(), group)
        _same(y, received)
        y.backward(grad_output)
        _same(x.grad, torch.cat([part[rank] for part in parts]))
        _same(x.detach(), kept)
        _same(grad_output, weights[rank])

    everyone, weights = _normal(2, world_size, world_size, 2, 3)
    for x in _layouts(everyone[rank]):
        for grad_output in _layouts(weights[rank]):
            y = all_to_all_in_group(x.requires_grad_(), group=group)
            _same(y, everyone[:, rank])
            (gradient,) = torch.autograd.grad(y, x, grad_output)
            _same(gradient, weights[:, rank])


def _check_derivatives(*members):
    for group in [dist.new_group(ranks) for ranks in members] or [None]:
        if dist.get_rank(group) >= 0:
            _differentiate_all_to_all(group)
            for pair, dim in itertools.product(PAIRS, range(-3, 3)):
                _check_pair(pair, dim, group)


@on_ranks(1, 2, 3, 4)
def test_derivatives_are_those_of_one_process():
    _check_derivatives()


@on_ranks(5)
def test_derivatives_in_disjoint_groups():
    _check_derivatives([0, 2], [1, 3, 4])


@on_ranks(1, 2)
def test_the_result_of_a_pair_may_be_changed_in_place_and_leaves_x_alone():
    """But for copy_to_group(), which is x: autograd refuses."""
    P = dist.get_world_size()
    for dim, pair in itertools.product((0, 1), [*PAIRS, lambda x, *_: all_to_all_in_group(x)]):
        x = _normal(2 * P, 2 * P, seed=dist.get_rank()).requires_grad_()
        kept, y = x.detach().clone(), _apply(pair, x, dim)
        if pair is copy_to_group:
            with pytest.raises(RuntimeError, match="modified inplace"):
                y.add_(1)
            continue
        expected = y.detach() + 1
        _same(y.add_(1).detach(), expected)
        y.sum().backward()
        with torch.no_grad():
            y.fill_(7)
        _same(x.detach(), kept)
        assert x.grad is not None and x.grad.shape == x.shape


@on_ranks(3)
def test_pairs_of_empty_tensors():
    for pair in PAIRS:
        x = torch.zeros(0, 3, requires_grad=True)
        _apply(pair, x, 0).sum().backward()
        assert x.grad.shape == (0, 3)


# ---- order of messages under NCCL's rules -------------------------------------------------------


def _replay(events):
    """Those of all ranks, on the first of them."""
    programs = gather_objects(events)
    if dist.get_rank() == 0:
        replay(programs)


@on_ranks(2, 3, 4, 6)
def test_every_collective_runs_under_the_rules_of_nccl():
    """In the foreground and in the background."""
    rank, world_size = rank_and_size()
    second = dist.new_group(range(world_size)[::-1])
    sizes = _split_matrix(world_size, 0)
    rows = torch.zeros(sizes[rank].sum(), 3), torch.zeros(sizes[:, rank].sum(), 3)
    shard, full = torch.zeros(2), torch.zeros(2 * world_size)
    pieces = torch.zeros(2 * world_size - 1).tensor_split(world_size)
    splits = sizes[:, rank].tolist(), sizes[rank].tolist()
    with record() as events, patch.object(collectives, "SEGMENT", 1 << 12):
        for async_op in (False, True):
            works = []
            for group in (None, second):
                barrier(group)
                common = {"group": group, "async_op": async_op}
                works += [
                    *(
                        _on_nodes(inner, group) or all_reduce(torch.zeros(n), algorithm=name, **common)
                        for n in (5, (3 << 10) * world_size)
                        for name, inner in _algorithms(world_size)
                    ),
                    reduce_scatter_single(shard, full, **common),
                    all_gather_single(full, shard, **common),
                    all_gather(pieces, pieces[rank].clone(), **common),
                    all_to_all_single(rows[1], rows[0], *splits, **common),
                    broadcast(torch.zeros(5), world_size - 1, **common),
                    reduce(torch.zeros(5), 1, **common),
                    gather(shard, list(full.split(2)) if rank == 1 else None, 1, **common),
                    scatter(shard, list(full.split(2)) if rank == 1 else None, 1, **common),
                ]
            for work in works if async_op else ():
                work.wait()
    assert len(events) > 50
    _replay(events)


NODES = [(2, 1), (3, 1), (4, 1), (4, 2), (4, 3), (6, 2)]
NODES += [pytest.param(*row, marks=pytest.mark.soak) for row in ((6, 1), (7, 1), (8, 1), (8, 4))]


@pytest.mark.parametrize("name", ["ring", "hierarchical", "recursive_doubling"])
@pytest.mark.parametrize("P, ranks_per_node", NODES)
@on_ranks(lambda P, **_: P)
def test_collectives_among_nodes_run_under_the_rules_of_nccl(P, ranks_per_node, name):
    """From a group's first batch on, and of so few bytes, too, that most chunks are empty."""
    set_ranks_per_node(ranks_per_node)
    shards = [torch.zeros(n) for n in (2, 20_000)]
    forced = lambda *size, phases=1: "ring" if (phases, name) == (1, "recursive_doubling") else name
    one_by_one = patch.multiple(collectives, choose=forced, DIRECT_BYTES=1 << 10)
    with as_on_nccl(), one_by_one, record() as events:
        for async_op in (False, True):
            common, works = {"async_op": async_op}, []
            for shard in shards:
                full = torch.zeros(len(shard) * P)
                works += [
                    all_reduce(shard[:1], **common),
                    all_reduce(full, **common),
                    reduce_scatter_single(shard, full, **common),
                    all_gather_single(full, shard, **common),
                    all_gather(list(full.chunk(P)), shard, **common),
                    broadcast(full, P - 1, **common),
                ]
            for work in works if async_op else ():
                work.wait()
    assert len(events) > 10
    _replay(events)


@on_ranks(3)
def test_the_replay_catches_a_ring_that_sends_before_it_receives_without_batching():
    rank, world_size = rank_and_size()
    barrier()
    with record() as events:
        sent = exchange([(torch.zeros(1), (rank + 1) % world_size)], [], async_op=True)
        exchange([], [(torch.zeros(1), (rank - 1) % world_size)])
        sent.wait()
    text = "rank 0 at exchange .*send 4 B 1.*rank 2 at exchange .*"
    with pytest.raises(Deadlock, match=text) if rank == 0 else nullcontext():
        _replay(events)


def _batches_in_crossing_orders():
    rank = dist.get_rank()
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    tensors = torch.zeros(4, 1)
    with record() as events:
        works = []
        for group, mine, other in [(first, 0, 1), (second, 2, 3)][:: 1 - 2 * rank]:
            sends, receives = [(tensors[mine], 1 - rank)], [(tensors[other], 1 - rank)]
            works.append(exchange(sends, receives, group, async_op=True))
    for work in works:
        work.wait()
    posts = [event for event in events if event["kind"] == "post"]
    return [event | {"kind": kind} for event in posts for kind in ("post", "wait")]


def test_the_replay_catches_two_ranks_that_batch_in_crossing_orders():
    with pytest.raises(Deadlock, match="rank 0 .* and before wait.*rank 1 .* and before wait"):
        replay(run(2, _batches_in_crossing_orders))


def _posts(*batches, group=("g", (0, 1))):
    """Batches of messages, each posted and waited for."""
    for key, messages in enumerate(batches):
        what = {"key": key, "stream": 0, "name": "exchange", "group": group, "messages": messages}
        yield from ({"kind": kind} | what for kind in ("post", "wait"))


def test_the_replay_compares_sizes_and_wants_all_ranks_in_a_first_batch():
    with pytest.raises(Mismatch, match="rank 0 sends 8 bytes .* rank 1 expects 4"):
        replay([list(_posts([("send", 1, 8)])), list(_posts([("receive", 0, 4)]))])
    three = ("g", (0, 1, 2))
    pair = [list(_posts([(kind, 1 - rank, 4)], group=three)) for rank, kind in enumerate(KINDS)]
    with pytest.raises(Deadlock, match="rank 0 .*rank 1 "):
        replay([*pair, []])
    replay([list(_posts([(kind, 1 - rank, 4)])) for rank, kind in enumerate(KINDS)])


KINDS = ("send", "receive")


# ---- the source ---------------------------------------------------------------------------------

MESSAGES = "send recv isend irecv batch_isend_irecv P2POp send_object_list recv_object_list".split()
COLLECTIVES = re.compile(
    "_?(all_reduce|all_gather|all_to_all|reduce|gather|scatter|broadcast|monitored_barrier|barrier)"
)
LAYERS = re.compile(
    r"torch\.(nn\.parallel|distributed\.(fsdp|tensor|_|pipelining|optim|algorithms|nn|_functional))"
)


def _uses(tree):
    """Every name that a file takes from torch.distributed, and every module that it imports."""
    names, modules = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner in ("dist", "torch.distributed", "distributed_c10d"):
                names.add(node.attr)
            modules.add(f"{owner}.{node.attr}")
        elif isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
            if (node.module or "").startswith("torch.distributed"):
                names.update(alias.name for alias in node.names)
    return names, modules


def _take_backend(tree):
    """Remove the functions that have `backend` in their names; these."""
    taken = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and "backend" in node.name
    ]
    tree.body = [node for node in tree.body if node not in taken]
    return ast.Module(taken, [])


@pytest.mark.parametrize("path", sorted(PROJECT.glob("*.py")), ids=lambda path: path.name)
def test_all_communication_is_made_of_messages_and_messages_are_made_in_one_file(path):
    tree = ast.parse(path.read_text())
    if path.name == "collectives.py":
        names, _ = _uses(_take_backend(tree))
        assert not names.intersection(MESSAGES)
        assert "getattr(dist" not in ast.unparse(tree)
    names, modules = _uses(tree)
    assert not [name for name in names if COLLECTIVES.match(name)]
    assert not [module for module in modules if LAYERS.match(module)]
    messages = [name for name in names if name in MESSAGES]
    if path.name == "collectives.py":
        assert sorted(messages) == ["P2POp", "batch_isend_irecv", "irecv", "isend"]
    else:
        assert not messages
