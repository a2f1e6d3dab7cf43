"""Collectives against sums of integers, torch.distributed's own, and one process that plays every rank."""

import ast
import io
import re
import threading
import time
from collections import Counter
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import collectives
from collectives import (
    all_gather,
    all_gather_bytes,
    all_gather_single,
    all_gather_to_group,
    all_reduce,
    all_reduce_bytes,
    all_to_all_in_group,
    all_to_all_single,
    barrier,
    broadcast,
    copy_to_group,
    count_bytes,
    exchange,
    gather_from_group,
    rank_and_size,
    reduce_from_group,
    reduce_scatter_bytes,
    reduce_scatter_single,
    reduce_scatter_to_group,
    scatter_to_group,
)

from ranks import run

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


def _integers(*shape, dtype=torch.float64, seed=0):
    """-2..2: up to eight of them have the same sum and product, exactly, in every dtype. Row r is rank r's."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def _normal(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _same(actual, expected):
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert torch.equal(actual, expected), (actual, expected)


def _wait(work):
    if work is not None:
        work.wait()


# ---- values -------------------------------------------------------------------------------------


def _check_reductions(length, dtype, group, async_op, ops):
    rank, world_size = rank_and_size(group)
    everyone = _integers(world_size, world_size * length, dtype=dtype, seed=length)
    for op in ops:
        if op == ReduceOp.AVG and not dtype.is_floating_point:
            continue
        expected = REDUCED[op](everyone.double()).to(dtype)
        tensor = everyone[rank, :length].clone()
        _wait(all_reduce(tensor, op, group, async_op))
        _same(tensor, expected[:length])
        input, output = everyone[rank].clone(), torch.full((length,), 99, dtype=dtype)
        _wait(reduce_scatter_single(output, input, op, group, async_op))
        _same(output, expected.view(world_size, length)[rank])
        _same(input, everyone[rank])


def _check_moves(length, dtype, group, async_op, members):
    rank, world_size = rank_and_size(group)
    everyone = _integers(world_size, world_size, length, dtype=dtype, seed=length)
    input, output = everyone[rank].clone(), torch.full((world_size, length), 99, dtype=dtype)
    _wait(all_to_all_single(output, input, group=group, async_op=async_op))
    _same(output, everyone[:, rank])
    _wait(all_gather_single(output, input[0], group, async_op))
    _same(output, everyone[:, 0])
    _same(input, everyone[rank])
    ragged = [row.flatten()[: length + 3 * (r % 2) - r % 3] for r, row in enumerate(everyone)]
    outputs, input = [torch.full_like(piece, 99) for piece in ragged], ragged[rank].clone()
    all_gather(outputs, input, group)
    for actual, expected in zip(outputs, ragged, strict=True):
        _same(actual, expected)
    _same(input, ragged[rank])
    for root in {0, world_size - 1}:
        tensor = everyone[rank, 0].clone()
        _wait(broadcast(tensor, members[root], group, async_op))
        _same(tensor, everyone[root, 0])


def _check_values(lengths, dtypes=DTYPES, group=None, async_op=False, ops=tuple(REDUCED)):
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    for dtype in dtypes:
        for length in lengths:
            _check_reductions(length, dtype, group, async_op, ops)
            _check_moves(length, dtype, group, async_op, members)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
def test_every_collective_on_every_dtype_and_length(world_size):
    lengths = sorted({0, 1, world_size - 1, 2 * world_size + 1})
    run(world_size, _check_values, lengths, ops=(ReduceOp.SUM, ReduceOp.AVG))


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_every_reduction(world_size):
    run(world_size, _check_values, [5])


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_every_collective_in_the_background(world_size):
    dtypes = [torch.float64, torch.bfloat16, torch.int64]
    run(world_size, _check_values, [0, 1, 11], dtypes, async_op=True, ops=(ReduceOp.SUM,))


def _theirs(name):
    """torch.distributed's own; before torch 2.13 the *_single had longer names."""
    older = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
    return getattr(dist, name, None) or getattr(dist, older[name])


def _compare_with_torch_distributed():
    rank, world_size = rank_and_size()
    for seed, dtype in enumerate([torch.float32, torch.float64, torch.int64]):
        full = (10 * _normal(world_size, world_size * 7, seed=seed)[rank]).to(dtype)
        shard = full[:7].clone()
        calls = [
            lambda ours: (all_reduce if ours else dist.all_reduce)(ours_or_theirs(full)),
            lambda ours: (reduce_scatter_single if ours else _theirs("reduce_scatter_single"))(
                ours_or_theirs(shard), full
            ),
            lambda ours: (all_gather_single if ours else _theirs("all_gather_single"))(
                ours_or_theirs(full), shard
            ),
            lambda ours: (all_to_all_single if ours else dist.all_to_all_single)(
                ours_or_theirs(full), full
            ),
            lambda ours: (broadcast if ours else dist.broadcast)(
                ours_or_theirs(full), world_size - 1
            ),
        ]
        for call in calls:
            outputs = []

            def ours_or_theirs(like):
                outputs.append(like.clone())
                return outputs[-1]

            call(True)
            call(False)
            torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_values_are_those_of_torch_distributed(world_size):
    run(world_size, _compare_with_torch_distributed)
