"""Collectives give exact sums of integers, and the gradients of one process; costs are counted."""

import ast
import copy
import gc
import inspect
import io
import itertools
import os
import re
import signal
import threading
import time
import weakref
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from datetime import timedelta
from functools import partial
from unittest.mock import Mock, call, patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.testing._internal.distributed.fake_pg import FakeStore

import collectives
from collectives import (
    MOST_PEERS, all_gather, all_gather_single, all_gather_to_group,
    all_reduce, all_reduce_bytes, all_reduce_cost, all_to_all_in_group, all_to_all_single,
    backend_function, barrier, broadcast, check_parameters, choose, copy_to_group, count_bytes,
    exchange, gather, gather_from_group, gather_objects, observe, plain_all_gather,
    plain_all_reduce, plain_all_to_all, plain_exchange, plain_reduce_scatter, rank_and_size,
    reduce, reduce_from_group, reduce_scatter_bytes,
    reduce_scatter_single, reduce_scatter_to_group, ring_all_reduce, scatter, scatter_to_group,
    set_backend_collectives, set_ranks_per_node,
)
from gpu_counts import as_on_nccl, nccl_over_gloo, post_nowhere
from ranks import PROJECT, least_bytes, on_ranks, run, shifted, soak, spawn
from transformer import Peak

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64]
REDUCED = {
    ReduceOp.SUM: torch.sum, ReduceOp.AVG: torch.mean, ReduceOp.PRODUCT: torch.prod,
    ReduceOp.MIN: torch.amin, ReduceOp.MAX: torch.amax,
}  # fmt: skip


def _integers(*shape, dtype=torch.float64, seed=0):
    """Return integers from -2 to 2, of which eight have exact sums and products in every dtype."""
    generator = torch.Generator().manual_seed(shifted(seed))
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def _normal(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(shifted(seed))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _spread(x):
    """Return x with the same values in permuted memory with gaps."""
    turned = x.movedim(-1, 0)
    return torch.stack([turned, turned], -1)[..., 0].movedim(0, -1)


LAYOUTS = torch.clone, _spread
on_gpu = partial(patch.object, torch.Tensor, "is_cuda", property(lambda x: True), create=True)


def _same(actual, expected):
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert torch.equal(actual, expected), (actual, expected)


def _counted(launch):
    """Return the messages of each batch that this rank posts, and all bytes that it sends."""
    batches = []

    def listen(event, operation, sends=(), receives=()):
        if event == "post":
            batches.append([*sends, *receives])

    with count_bytes() as traffic, observe(listen):
        launch()
    return batches, traffic.bytes()


# ---- values -------------------------------------------------------------------------------------


def _ops_of(dtype):
    return [op for op in REDUCED if op != ReduceOp.AVG or dtype.is_floating_point]


def _cases(n, dtype, group):
    """Yield (function, outputs, inputs, expected outputs) for all collectives."""
    rank, P = rank_and_size(group)
    everyone = _integers(P, P, n, dtype=dtype, seed=n)
    mine, new = everyone[rank], lambda tensors: [torch.full_like(x, 99) for x in tensors]
    yield all_to_all_single, new([mine]), [mine], [everyone[:, rank]]
    yield all_gather_single, new([mine]), [mine[0]], [everyone[:, 0]]
    for most in (P, 1):  # of equal lengths, and where only every third rank has anything
        rows = [x[: most * (most == P or r % 3 == 1)] for r, x in enumerate(everyone)]
        collect = lambda *lists, **how: all_gather(lists[:-1], lists[-1], **how)
        yield collect, new(rows), [rows[rank]], rows
    for op in _ops_of(dtype):
        total = REDUCED[op](everyone.double(), 0).to(dtype)
        yield partial(all_reduce, op=op), [mine], [], [total]
        yield partial(reduce_scatter_single, op=op), new([total[rank]]), [mine], [total[rank]]
    for root, name in enumerate(dist.get_process_group_ranks(group or dist.group.WORLD)):
        if_root = lambda tensors: [*tensors] if rank == root else []
        yield partial(broadcast, src=name), [mine[0]], [], [everyone[root, 0]]
        if root in (0, P - 1):
            give = lambda own, *lists, **how: scatter(own, lists, name, **how)
            yield give, new([mine[0]]), if_root(everyone[root]), [everyone[root, rank]]
            take = lambda *lists, **how: gather(lists[-1], lists[:-1], group_dst=root, **how)
            yield take, new(if_root(everyone[:, 0])), [mine[0]], if_root(everyone[:, 0])
        for op in _ops_of(dtype) if root == P - 1 else [ReduceOp.SUM]:
            total = REDUCED[op](everyone[:, 0].double(), 0).to(dtype)
            yield partial(reduce, dst=name, op=op), [mine[0]], [], if_root([total]) or [mine[0]]


def _check_values(lengths, dtypes=DTYPES, group=None, async_op=False):
    """Compare the results of all collectives with exact values."""
    for dtype, n, lay in itertools.product(dtypes, lengths, LAYOUTS):
        for collective, outputs, inputs, expected in _cases(n, dtype, group):
            outputs, inputs = [*map(lay, outputs)], [*map(lay, inputs)]
            kept = [*map(torch.clone, inputs)]
            work = collective(*outputs, *inputs, group=group, async_op=async_op)
            if async_op:
                work.wait()
            for actual, wanted in zip(outputs + inputs, expected + kept, strict=True):
                _same(actual, wanted)


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks(1, 3, *map(soak, (2, 4, 6, 8)))
def test_every_collective_is_exact_for_every_dtype_length_and_memory_layout(async_op):
    check_every_collective(async_op)


def check_every_collective(async_op):
    P = dist.get_world_size()
    dtypes = DTYPES[2::3] if async_op or P > 4 else DTYPES
    _check_values(sorted({0, 1, P - 1, 2 * P + 1}), dtypes, None, async_op)
    with least_bytes(), patch.object(collectives, "SEGMENT", 1 << 12):
        _check_values([0, 1, 7, (1 << 10) + 3], [torch.float64], None, async_op)


@on_ranks(3)
def test_large_integers_scalars_parameters_and_inference_tensors_are_reduced():
    rank, P = rank_and_size()
    large = torch.tensor(2**53 + 1 + rank)  # no float represents it exactly
    all_reduce(large)
    assert large.shape == () and large.item() == P * (2**53 + 1) + sum(range(P))
    parameter = torch.nn.Parameter(torch.full((2, 3), float(rank)))
    broadcast(parameter, P - 1)
    all_reduce(parameter, async_op=True).wait()
    assert parameter.is_leaf and parameter.requires_grad
    assert (parameter == P * (P - 1)).all()
    with torch.inference_mode():
        all_reduce(torch.ones(4), async_op=True).wait()


@pytest.mark.parametrize("name", ["all_gather", "broadcast", "reduce", "scatter", "gather"])
def test_arguments_have_the_names_and_the_order_of_torch_distributed(name):
    names = lambda library: [*inspect.signature(getattr(library, name)).parameters]
    assert names(collectives) == names(dist)


def _call_from_list_to_list(library, root, src, dst, **options):
    """Call a library's functions that take lists, or a root; return all tensors afterwards."""
    rank, P = rank_and_size()
    given, gathered, everywhere = [_integers(P, 4, seed=10 * rank + i) for i in range(3)]
    tensor, copied = _integers(2, 4, seed=50 + rank)
    if_root = lambda full: [*full] if rank == root else None
    for call in [
        lambda: library.scatter(tensor, if_root(given), **src, **options),
        lambda: library.gather(tensor, if_root(gathered), **dst, **options),
        lambda: library.all_gather([*everywhere], tensor, **options),
        lambda: library.broadcast(copied, **src or {"src": 0}, **options),
    ]:
        work = call()
        if "async_op" in options:
            work.wait()
    return [given, gathered, everywhere, tensor, copied]


def _group_of(members):
    """Create a group with its ranks in this order; before torch 2.12 they are sorted."""
    takes_order = "sort_ranks" in inspect.signature(dist.new_group).parameters
    return dist.new_group(members, **({"sort_ranks": False} if takes_order else {}))


@on_ranks(3)
def test_calls_of_torch_distributed_give_the_same_tensors_with_ours():
    """The root is a rank of the world, or a rank of the group, or left out if PyTorch allows it."""
    group = _group_of([2, 0, 1])
    for options in ({}, {"group": group}, {"group": group, "async_op": True}):
        last = dist.get_global_rank(options.get("group") or dist.group.WORLD, 2)
        for root, src, dst in [
            (0, {}, {}),
            (1, {"src": 1}, {"dst": 1}),
            (last, {"group_src": 2}, {"group_dst": 2}),
        ]:
            theirs = _call_from_list_to_list(dist, root, src, dst, **options)
            ours = _call_from_list_to_list(collectives, root, src, dst, **options)
            for actual, expected in zip(ours, theirs):
                _same(actual, expected)


# ---- groups -------------------------------------------------------------------------------------


@on_ranks(6)
def test_disjoint_groups_run_at_once_with_ranks_in_any_order_and_global_ranks_as_roots():
    groups = [_group_of(members) for members in ([5, 1, 4], [0, 2, 3])]
    group = next(group for group in groups if dist.get_rank(group) >= 0)
    _check_values([0, 2, 5], [torch.float32, torch.int64], group)
    _check_values([4], [torch.float32], group, async_op=True)
    barrier(group)


@on_ranks(1, 2, 3, 4, 6)
def test_barrier_waits_for_the_last_rank(tmp_path):
    rank, P = rank_and_size()
    for late in range(P):
        time.sleep(0.02 * (rank == late))
        (tmp_path / f"{late}.{rank}").touch()
        barrier()
        for other in range(P):
            assert (tmp_path / f"{late}.{other}").exists(), f"rank {rank} left before {other} came"


@on_ranks(1)
def test_a_deep_copy_of_a_module_keeps_its_group():
    module = torch.nn.Linear(2, 2)
    module.group = dist.group.WORLD
    assert copy.deepcopy(module).group is dist.group.WORLD


# ---- algorithms ---------------------------------------------------------------------------------


def _algorithms(P):
    """Return (name, ranks per node) of every algorithm for a group of this size."""
    names = ("auto", "naive", "direct", "ring", "recursive_doubling", "halving_doubling")
    nodes = [("hierarchical", size) for size in range(1, P + 1) if P % size == 0]
    return [(name, P) for name in names] + nodes


SIZES = [1, 4, *map(soak, (2, 3, 5, 6, 7, 8))]


@on_ranks(*SIZES)
@patch.object(collectives, "SEGMENT", 1 << 12)
def test_every_algorithm_reduces_and_leaves_the_same_bits_on_all_ranks():
    check_every_algorithm()


def check_every_algorithm():
    """The tensors have every dtype and odd lengths; the largest has several segments."""
    rank, P = rank_and_size()
    big = P * ((1 << 10) + 3)
    cases = [(dtype, n) for dtype in DTYPES for n in (0, 1, 2, 5, 64)] + [(torch.float64, big)]
    for name, ranks_per_node in _algorithms(P):
        set_ranks_per_node(ranks_per_node)
        for dtype, length in cases:
            everyone = _integers(P, length, dtype=dtype, seed=length)
            for op in [ReduceOp.SUM] if length == big else _ops_of(dtype):
                output, expected = everyone[rank].clone(), REDUCED[op](everyone.double(), 0)
                all_reduce(output, op, algorithm=name)
                _same(output, expected.to(dtype))
            all_reduce(everyone[rank], op, algorithm=name, output=output.fill_(9))
            _same(output, expected.to(dtype))
            _same(everyone, _integers(P, length, dtype=dtype, seed=length))
        noise = [_normal(n, dtype=dtype, seed=rank) for dtype in DTYPES[:4] for n in (1, 7, 1000)]
        for tensor in noise:
            all_reduce(tensor, algorithm=name)
        bits = torch.cat([tensor.double() for tensor in noise])
        assert all(torch.equal(bits, others) for others in gather_objects(bits)), name


@on_ranks(2, 3, 4, 5)
def test_min_and_products_have_the_same_bits_on_all_ranks():
    """min() of +0 and -0 may be either, and products of complex numbers depend on the order."""
    rank, P = rank_and_size()
    for name, ranks_per_node in [("auto", 1), *_algorithms(P)]:
        set_ranks_per_node(ranks_per_node)
        zeros = torch.tensor([0.0, -0.0]).repeat(30)[rank : rank + 37].contiguous()
        all_reduce(zeros, ReduceOp.MIN, algorithm=name)
        factors = torch.complex(_normal(37, seed=rank), _normal(37, seed=rank + P))
        all_reduce(factors, ReduceOp.PRODUCT, algorithm=name)
        bits = zeros.view(torch.int32).tolist(), torch.view_as_real(factors).tolist()
        assert gather_objects(bits) == P * [bits], name


def _conjugated(x):
    """Return x with the same values, which are conjugated when they are read."""
    return x.conj().resolve_conj().conj()


def _negated(x):
    return torch._neg_view(x.neg())


@pytest.mark.parametrize("lay", [_conjugated, _negated])
@on_ranks(3)
def test_tensors_that_are_conjugated_or_negated_when_they_are_read_are_sent_as_they_are_read(lay):
    rank, P = rank_and_size()
    everyone = torch.complex(_integers(P, 3 * P), _integers(P, 3 * P, seed=1))
    for name, ranks_per_node in [("auto", 1), *_algorithms(P)]:
        set_ranks_per_node(ranks_per_node)
        own = lay(everyone[rank])
        assert own.is_conj() or own.is_neg()
        all_reduce(own, algorithm=name)
        _same(own, everyone.sum(0))
    whole = lay(torch.zeros_like(everyone)).flatten()
    all_gather_single(whole, lay(everyone[rank]))
    _same(whole, everyone.flatten())
    own = lay(everyone[rank])
    broadcast(own, 1)
    _same(own, everyone[1])
    for send in (exchange, plain_exchange):
        with pytest.raises(ValueError, match=r"from rank 1 is of .*, conjugated or negated"):
            send([], [(lay(everyone[rank]), 1)])
        with pytest.raises(ValueError, match=r"to or from rank 2 is of .* strides \(2,\)$"):
            send([(torch.ones(4)[::2], 2)], [])


@on_ranks(1, 2, 3, 4)
def test_the_plain_forms_give_the_bits_and_send_the_bytes_of_the_fast_ones():
    rank, P = rank_and_size()
    plain = [(ring_all_reduce, "ring")]
    for name in ("naive", "direct", "ring", "recursive_doubling", "halving_doubling"):
        if "doubling" in name and P == 3:
            with pytest.raises(ValueError, match=f"{name} needs a power of two of ranks, not 3"):
                plain_all_reduce(torch.ones(3), name)
        else:
            plain.append((partial(plain_all_reduce, algorithm=name), name))
    for (run_plainly, name), chunk in itertools.product(plain, (0, 32, 320)):
        simple = _normal(chunk * P, dtype=torch.float32, seed=rank)
        full = simple.clone()
        _, sent = _counted(lambda: run_plainly(simple))
        _, expected = _counted(lambda: all_reduce(full, algorithm=name))
        _same(simple, full)
        assert sent == expected, name


@on_ranks(2)
def test_the_plain_forms_refuse_unequal_sizes_other_dtypes_and_tensors_with_gaps():
    x = torch.zeros
    for plain, output, input in [
        (plain_reduce_scatter, 2, 4), (plain_all_gather, 4, 2), (plain_all_to_all, 4, 4),
    ]:  # fmt: skip
        plain(x(output), x(input))
        for wrong in [
            (x(output), x(input + 2)),
            (x(output + 2), x(input)),
            (x(output), x(input).double()),
        ]:
            with pytest.raises(ValueError, match="output has . elements of torch.float32, input"):
                plain(*wrong)
    with pytest.raises(ValueError, match="output has 3 elements .* input makes 2"):
        plain_reduce_scatter(x(3), x(4))
    with pytest.raises(ValueError, match="output has 2 elements .* input makes 2.5"):
        plain_reduce_scatter(x(2), x(5))
    with pytest.raises(ValueError, match="output has 3 elements .* input makes 2"):
        plain_all_to_all(x(3), x(3))
    with pytest.raises(ValueError, match="output has 2 elements .* input makes 3"):
        plain_all_to_all(x(2), x(3))  # one chunk would be filled with a part of another
    for plain, *gaps in [
        (plain_reduce_scatter, x(2), x(4, 2)[:, 0]),
        (plain_all_gather, x(4, 2)[:, 0], x(2)),
        (plain_all_to_all, x(4, 2)[:, 0], x(4)),
        (plain_all_to_all, x(4), x(4, 2)[:, 0]),
    ]:
        with pytest.raises(ValueError, match=r"not contiguous: .* shape \(2,\) and strides \(2,\)"):
            plain(*gaps)
    for plain in (ring_all_reduce, plain_all_reduce):
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            plain(x(2, 3).t())  # the sum would be in a copy


def test_a_rank_of_a_tree_has_the_parent_and_the_children_of_its_docstring_farthest_first():
    of_8 = {0: (None, [4, 2, 1]), 4: (0, [6, 5]), 2: (0, [3]), 6: (4, [7]), 7: (6, [])}
    assert {rank: collectives._tree(rank, 0, 8) for rank in of_8} == of_8
    of_7 = {2: (None, [6, 4, 3]), 6: (2, [1, 0]), 1: (6, []), 4: (2, [5])}  # the root is rank 2
    assert {rank: collectives._tree(rank, 2, 7) for rank in of_7} == of_7


@on_ranks(1, 2, 3, 4)
def test_the_algorithms_of_a_root_run_plainly_and_do_what_the_calls_do():
    rank, P = rank_and_size()
    root = P // 2
    own = _normal(32, dtype=torch.float32, seed=rank)
    rows = lambda: [*_normal(P, 32, dtype=torch.float32, seed=9)] if rank == root else []
    zeros = lambda: [torch.zeros(32) for _ in rows()]
    plainly = {
        "broadcast": lambda x, _: collectives._tree_broadcast(x, rank, root, P),
        "reduce": lambda x, _: collectives._tree_reduce(x, torch.add, rank, root, P),
        "scatter": lambda x, tensors: collectives._scatter(x, tensors, rank, root),
        "gather": lambda x, tensors: collectives._gather(tensors, x, rank, root),
    }
    calls = {
        "broadcast": lambda x, _: broadcast(x, group_src=root),
        "reduce": lambda x, _: reduce(x, group_dst=root),
        "scatter": lambda x, tensors: scatter(x, tensors, group_src=root),
        "gather": lambda x, tensors: gather(x, tensors, group_dst=root),
    }
    for name, algorithm in plainly.items():
        lists = rows if name == "scatter" else zeros
        found, expected = [own.clone(), *lists()], [own.clone(), *lists()]
        run_plainly = lambda: collectives.plain_run(algorithm(found[0], found[1:]))
        _, sent = _counted(run_plainly)
        _, counted = _counted(lambda: calls[name](expected[0], expected[1:]))
        assert all(map(torch.equal, found, expected)) and sent == counted, name
        if name == "broadcast":
            assert torch.equal(found[0], _normal(32, dtype=torch.float32, seed=root))


UPPER = [("halving_doubling", 3, 3), ("hierarchical", 4, 2)]


@pytest.mark.parametrize("name, P, ranks_per_node", UPPER)
@on_ranks(lambda P, **_: P)
def test_the_algorithms_of_the_upper_floor_run_plainly_too(name, P, ranks_per_node):
    rank, _ = rank_and_size()
    everyone = _integers(P, 100, dtype=torch.float32)
    output = torch.zeros(100)
    options = {"ranks_per_node": ranks_per_node} if name == "hierarchical" else {}
    arguments = output, everyone[rank], torch.add, rank, P
    collectives.plain_run(collectives.all_reduce_segment(name, *arguments, **options))
    _same(output, everyone.sum(0))


def test_halving_and_doubling_refuse_chunks_that_do_not_follow_each_other_in_memory():
    """They would send what lies between them. Chunks of one segment of a tensor are such chunks."""
    chunks = [chunk[:4] for chunk in torch.zeros(64).chunk(4)]
    for steps in (
        collectives._halving(chunks, chunks[0], torch.add, 0), collectives._doubling(chunks, 0)
    ):
        with pytest.raises(AssertionError, match="gaps between the chunks"):
            list(steps)


def _rings_table():
    """Return what ring_all_reduce() leaves in this rank's three chunks after each step."""
    rank, _ = rank_and_size()
    tensor = torch.tensor([1, 2, 3]) * 10**rank
    before = [tensor.tolist()]
    exchange = collectives.plain_exchange

    def look(*messages):
        if (now := tensor.tolist()) != before[-1]:
            before.append(now)
        exchange(*messages)

    with patch.object(collectives, "plain_exchange", look):
        ring_all_reduce(tensor)
    return [*before, tensor.tolist()]


def test_the_numbers_beside_the_ring_are_those_that_it_computes():
    source = (PROJECT / "collectives.py").read_text()
    rows = re.findall(r"^#     (?:start|step \d) ((?: +\d+\*?){9})", source, re.M)
    told = [[int(number.strip("*")) for number in row.split()] for row in rows]
    by_rank = run(3, _rings_table)
    assert told == [[*a, *b, *c] for a, b, c in zip(*by_rank, strict=True)]


@on_ranks(2, soak(3), 4)
def test_on_a_stream_a_step_is_one_batch_and_in_a_node_a_collective_is_one_step():
    """A node larger than the group holds all ranks; if nodes were unequal, each rank is a node."""
    rank, P = rank_and_size()
    full, shard = torch.zeros(64 * P), torch.zeros(64)
    apart, _ = all_reduce_cost("recursive_doubling", 1, P, rank=rank)  # the choice for few bytes
    for ranks_per_node, limits, reduced, steps in [
        (1, {}, apart, 2 if P == 3 else apart),
        (P - 1, {}, apart, 2 if P == 3 else apart),
        (P, {}, 1, 1),
        (P, {"ONE_STEP_BYTES": 0}, 2, 1),
        (P + 1, {"ONE_STEP_BYTES": 0, "DIRECT_BYTES": 192 * P}, 4, 2),  # two segments, or more
    ]:
        choose.cache_clear()
        set_ranks_per_node(ranks_per_node)
        with as_on_nccl(), on_gpu(), patch.multiple(collectives, SEGMENT=8, **limits):
            _check_values([0, 1, 7, 96], DTYPES[1:2])
            for launch, expected in [
                (lambda: all_reduce(full), reduced),
                (lambda: all_reduce(full, algorithm="ring"), 2 * (P - 1)),
                (lambda: reduce_scatter_single(shard, full), steps),
                (lambda: all_gather_single(full, shard), steps),
                (lambda: all_to_all_single(torch.empty_like(full), full), 1),
                (lambda: all_gather([*full.chunk(P)], shard), 1),
                (lambda: scatter(shard, [*full.chunk(P)] if rank == 0 else None), 1),
                (lambda: gather(shard, [*full.chunk(P)] if rank == 0 else None), 1),
            ]:
                assert len(_counted(launch)[0]) == expected
    choose.cache_clear()


@pytest.mark.parametrize("P", [1, 2, 3, 8])
def test_on_a_gpu_a_chunk_is_reduced_by_one_kernel_that_rounds_once(P):
    """It rounds a result in 16 bits by eps / 2. Inside, it adds in 32 or 64 bits, and each of P - 1
    additions errs by eps / 2 of at most the sum of all magnitudes; in complex numbers, both parts.
    """
    for dtype, length in itertools.product([*DTYPES, torch.complex64], (0, 1, 33, 1000)):
        everyone = _normal(P, length, dtype=torch.float64).mul(9).to(dtype)
        for op in (ReduceOp.SUM, ReduceOp.MAX)[: 1 if dtype.is_complex else 2]:
            output = torch.empty(length, dtype=dtype)
            combine = collectives.Reduction(op, dtype)
            combine.pair = None
            combine.rows = kernels = Mock(wraps=combine.rows)
            chunks = [everyone[P - 1]] * P
            for _, receives in collectives._reduce_at_once(chunks, output, combine, P - 1):
                for tensor, peer in receives:
                    tensor.copy_(everyone[peer])
            wide = torch.complex128 if dtype.is_complex else torch.float64
            error = (output.to(wide) - (exact := REDUCED[op](everyone.to(wide), 0))).abs()
            assert kernels.call_count == (P > 1)
            bound = torch.zeros(length, dtype=torch.float64)
            if dtype.is_floating_point or dtype.is_complex:
                inside = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
                bound += (P - 1) * inside * everyone.to(wide).abs().sum(0)
                if dtype.itemsize == 2:
                    bound += torch.finfo(dtype).eps / 2 * (exact.abs() + bound)
            assert (error <= bound).all()


@on_ranks(4)
def test_on_a_gpu_algorithms_that_add_all_parts_of_a_chunk_do_so_by_one_kernel():
    full, shard, kernels = torch.ones(256), torch.ones(64), Mock(wraps=torch.sum)
    set_ranks_per_node(2)
    reductions = {ReduceOp.SUM: (torch.add, kernels)}
    with as_on_nccl(), on_gpu(), patch.object(collectives, "_REDUCTIONS", reductions):
        for name, count in ("naive", 1), ("direct", 1), ("hierarchical", 2), ("ring", 0):
            kernels.reset_mock()
            all_reduce(full, algorithm=name)
            assert kernels.call_count == count, name
        set_ranks_per_node(4)
        reduce_scatter_single(shard, full)
    assert kernels.call_count == 1
    assert (full == 4**4).all() and (shard == 4**5).all()


@on_ranks(6)
def test_messages_to_many_peers_are_divided_into_several_batches():
    full = torch.zeros(6, 6 * 64)
    at_root = [*full] if dist.get_rank() == 1 else None
    with as_on_nccl(), patch.multiple(collectives, DIRECT_BYTES=128, MOST_PEERS=2):
        _check_values([5, 64], DTYPES[:1])
        peers = [rank for rank in range(6) if rank != dist.get_rank()]
        sends = [(full[peer], peer) for peer in peers]
        for launch, sizes, others in [
            (lambda: exchange(sends, sends), [4, 4, 2], [4, 4, 2]),
            (lambda: all_to_all_single(full.clone(), full), [4, 4, 2], [4, 4, 2]),
            (lambda: all_gather([*full], full[0]), [4, 4, 2], [4, 4, 2]),
            (lambda: scatter(full[0], at_root, 1), [2, 2, 1], [1]),
            (lambda: gather(full[0], at_root, 1), [2, 2, 1], [1]),
        ]:
            posted, _ = _counted(launch)
            assert [len(batch) for batch in posted] == (sizes if at_root else others)


@on_ranks(6)
def test_a_message_is_in_the_same_batch_on_both_ranks_also_if_others_are_empty():
    """NCCL would wait for ever, since a batch ends when all of its messages have been sent."""
    rank, P = rank_and_size()
    rows = [[(source * source + peer) % 2 for peer in range(P)] for source in range(P)]
    arriving = [of_source[rank] for of_source in rows]
    batches = []

    def listen(event, work, sends=(), receives=()):
        if event == "post":
            distances = [(peer - rank) % P for _, peer in sends]
            distances += [(rank - peer) % P for _, peer in receives]
            batches.append(distances)

    x = torch.full((sum(rows[rank]), 1), float(rank))
    output = x.new_empty(sum(arriving), 1)
    with as_on_nccl(), patch.object(collectives, "MOST_PEERS", 2), observe(listen):
        all_to_all_single(output, x, arriving, rows[rank])
    sources = torch.arange(float(P)).repeat_interleave(torch.tensor(arriving))
    _same(output.flatten(), sources)
    assert any(batches)
    for distances in batches:  # of 1 and 2 ranks, of 3 and 4, or of 5
        assert len({(distance - 1) // 2 for distance in distances}) == 1


@on_ranks(4)
def test_every_message_of_an_aligned_row_is_aligned_to_128_bytes():
    """This holds for all lengths, where an algorithm cuts a row into chunks, segments or pieces."""
    (rank, P), offsets, zeros = rank_and_size(), set(), partial(torch.zeros, dtype=torch.bfloat16)

    def listen(event, operation, sends=(), receives=()):
        offsets.update(t.storage_offset() * t.itemsize for t, _ in (*sends, *receives))

    several = patch.multiple(collectives, SEGMENT=1 << 10, DIRECT_BYTES=1 << 12)
    for length in (1, 64, 33 * 64 - 7, 101 * 64 + 1):
        row = zeros(length)
        shard = zeros(length // 64 * 64)
        full = zeros(len(shard) * P)
        for way in (nullcontext, least_bytes, as_on_nccl):
            with way(), several, observe(listen):
                for name, ranks_per_node in _algorithms(P):
                    set_ranks_per_node(ranks_per_node)
                    all_reduce(row, algorithm=name)
                    all_reduce(row)
                    reduce_scatter_single(shard, full)
                    all_gather_single(full, shard)
                broadcast(row, 1)
    assert len(offsets) > 50
    assert not [offset for offset in offsets if offset % 128]


MORE_NODES = soak(2, 2), soak(3, 2), soak(2, 4)


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 3), *MORE_NODES])
@on_ranks(lambda nodes, ranks_per_node: nodes * ranks_per_node)
def test_hierarchical_takes_one_batch_in_a_node_and_a_ring_between_nodes(nodes, ranks_per_node):
    O, I, (rank, P) = nodes, ranks_per_node, rank_and_size()
    D, inside = 96 * 8 * P, range(rank - rank % I, rank - rank % I + I)
    within, between = (I - 1) * D // I, (O - 1) * D // O // I
    full = torch.zeros(96 * P, dtype=torch.float64)
    shard = full[:96].clone()
    set_ranks_per_node(I)
    with as_on_nccl(), patch.object(collectives, "choose", lambda *size, **how: "hierarchical"):
        for launch, times, steps in (
            (lambda: reduce_scatter_single(shard, full), 1, 1 + (O - 1)),
            (lambda: all_gather_single(full, shard), 1, 1 + (O - 1)),
            (lambda: all_reduce(full), 2, 2 + 2 * (O - 1)),
        ):
            with count_bytes() as traffic:
                posted, sent = _counted(launch)
            assert traffic.bytes(peers=inside) == times * within
            assert (len(posted), sent) == (steps, times * (within + between))
        for limits in ({"DIRECT_BYTES": 1 << 10}, {"MOST_PEERS": 1}):
            with patch.multiple(collectives, **limits):
                _check_values([0, 7, 96], DTYPES[1:2])
    assert all_reduce_cost("hierarchical", D, P, I) == (2 * O, 2 * (within + between))


# ---- costs and the choice -----------------------------------------------------------------------


@on_ranks(*range(1, 9))
def test_every_algorithm_takes_the_steps_and_sends_the_bytes_of_the_papers():
    """Where P is no power of two, some ranks stand in for others; rank 0 is the busiest."""
    rank, P = rank_and_size()
    D = 840 * 128  # any P up to 8 divides 840
    for name, inside in _algorithms(P)[1:]:
        set_ranks_per_node(inside)
        posted, own = _counted(lambda: all_reduce(torch.zeros(D // 4), algorithm=name))
        assert (len(posted), own) == all_reduce_cost(name, D, P, inside, rank), name
        assert own <= all_reduce_cost(name, D, P, inside)[1]
        _, few = _counted(lambda: all_reduce(torch.zeros(1001), algorithm=name))
        _, claimed = all_reduce_cost(name, 4004, P, inside, rank)
        assert few <= claimed + 2 * (P - 1) * 128, name  # a chunk has at most 128 bytes more
    with patch.object(collectives, "SEGMENT", D // P // 4):  # the most bytes of a message
        posted, _ = _counted(lambda: all_reduce(torch.zeros(D // 4), algorithm="ring"))
    assert len(posted) == 4 * 2 * (P - 1)
    assert all_reduce_bytes(D, P) == 2 * reduce_scatter_bytes(D, P) == 2 * (P - 1) * D // P


@on_ranks(1, 2, 3, 4, 6)
def test_each_rank_sends_the_bytes_of_the_formulas():
    rank, P = rank_and_size()
    D, rounds = 840 * 128, (P - 1).bit_length()
    full, shard = torch.zeros(D // 4), torch.zeros(D // 4 // P)
    sent, steps = reduce_scatter_bytes(D, P), rounds if P & (P - 1) == 0 else P - 1
    # What rank 0 sends, in bytes and messages, and the bytes that all ranks send together:
    for name, arguments, nbytes, messages, together in [
        ("reduce_scatter_single", (shard, full), sent, steps, P * sent),
        ("all_gather_single", (full, shard), sent, steps, P * sent),
        ("all_to_all_single", (full, full.clone()), sent, P - 1, P * sent),
        ("broadcast", (full,), rounds * D, rounds, (P - 1) * D),
        ("reduce", (full,), 0, 0, (P - 1) * D),
        ("all_gather", ([*full.chunk(P)], shard), sent, P - 1, P * sent),
        ("scatter", (shard, [*full.chunk(P)] if rank == 0 else None), sent, P - 1, sent),
        ("gather", (shard, [*full.chunk(P)] if rank == 0 else None), 0, 0, sent),
    ]:
        with count_bytes() as traffic:
            getattr(collectives, name)(*arguments)
        if rank == 0:
            assert (traffic.bytes(name), len(traffic.sent)) == (nbytes, messages), name
        assert sum(gather_objects(traffic.bytes())) == together, name
    rows = [torch.zeros(r) for r in range(P)]
    _, own = _counted(lambda: all_gather(rows, rows[rank].clone()))
    assert own == (P - 1) * 4 * rank
    for n in (0, 1, P - 1, 5 * P + 1):  # padding sends no byte more
        _, own = _counted(lambda: all_reduce(torch.zeros(n), algorithm="ring"))
        assert sum(gather_objects(own)) == 2 * (P - 1) * 4 * n


M, G = 1 << 20, 1 << 30
CHOICES = [  # P, ranks per node, on NCCL; (bytes, choice) for an all-reduce, and for half of one
    (8, 8, True, [(M // 16 - 1, "naive"), (M // 16, "direct")], [(1, "direct"), (G, "direct")]),
    (2, 1, True, [(1, "doubling"), (25 * M, "doubling")], [(1, "ring"), (G, "ring")]),
    (64, 1, True, [(M, "doubling"), (25 * M, "halving")], [(1, "halving"), (G, "halving")]),
    (24, 1, True, [(M, "doubling"), (25 * M, "halving"), (G, "ring")], [(1, "ring"), (G, "ring")]),
    (8, 4, True, [(M, "doubling"), (2 * M, "nodes"), (G, "nodes")], [(1, "nodes"), (G, "nodes")]),
    (2048, 8, True, [(25 * M, "halving"), (4 * G, "nodes")], [(1, "halving"), (4 * G, "nodes")]),
    (2, 2, False, [(1, "doubling"), (2 * M - 1, "doubling"), (2 * M, "ring")], [(2 * M, "ring")]),
    (4, 4, False, [(M // 2, "doubling"), (M, "halving"), (2 * M, "ring")], [(1, "halving")]),
    (6, 6, False, [(M // 4, "doubling"), (M, "ring")], [(1, "direct"), (2 * M, "ring")]),
    (4, 2, False, [(M // 64, "doubling"), (M // 16, "nodes"), (G, "nodes")], [(16 * M, "nodes")]),
]
NAMES = {"doubling": "recursive_doubling", "halving": "halving_doubling", "nodes": "hierarchical"}


@pytest.mark.parametrize("P, ranks_per_node, on_nccl, wholes, halves", CHOICES)
def test_the_choice_depends_on_size_and_group(P, ranks_per_node, on_nccl, wholes, halves):
    """On NCCL it is within 20% of the fastest, at 60 us per step and 50 (250 in a node) GB/s."""
    for both_phases, rows in (True, wholes), (False, halves):
        for nbytes, name in rows:
            assert choose(nbytes, P, ranks_per_node, on_nccl, both_phases) == NAMES.get(name, name)


@pytest.fixture
def one_of():
    """Provide one_of(8), which makes this process rank 0 of 8 in a group that sends nothing."""
    like = {"backend": "fake", "store": FakeStore()}
    yield lambda P, rank=0: dist.init_process_group(rank=rank, world_size=P, **like)
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks_per_node", [1, 8])
def test_2048_ranks_scatter_in_11_batches_and_gather_in_11(one_of, ranks_per_node):
    one_of(2048, rank=1000)
    set_ranks_per_node(ranks_per_node)
    full = torch.empty(25 << 18, device="meta")
    shard = full[: len(full) // 2048].clone()
    with as_on_nccl(post_nowhere):
        scattered, sent = _counted(lambda: reduce_scatter_single(shard, full))
        gathered, received = _counted(lambda: all_gather_single(full, shard))
    assert len(scattered) == len(gathered) == 11
    assert sent == received == reduce_scatter_bytes(full.nbytes, 2048)
    assert max(len(batch) for batch in scattered + gathered) <= 2 * MOST_PEERS
    peers = {peer for batch in scattered + gathered for _, peer in batch}
    assert peers == {1000 ^ 1 << k for k in range(11)}


# ---- streams ------------------------------------------------------------------------------------


@contextmanager
def _fake_streams():
    """Yield the current stream, the stream that is made, and a list of their events."""
    current, made, events = Mock(), Mock(), []
    not_yet = {"query.return_value": False}
    for stream in (current, made):
        stream.record_event = lambda: events.append(Mock(**not_yet)) or events[-1]
    make = Mock(return_value=made)
    on_device = lambda device: current if device == torch.device("cpu") else None
    streams = patch.multiple(torch.cuda, Stream=make, current_stream=on_device)
    with as_on_nccl(post_nowhere), streams:
        yield current, made, events
    assert make.mock_calls == [call(device=torch.device("cpu"), priority=-1)]  # the tensors'


def test_a_group_has_one_stream_and_its_operations_follow_those_before(one_of):
    x = torch.ones(4)
    one_of(8)
    with _fake_streams() as (current, made, events):
        all_reduce(x)
        assert not current.mock_calls  # nothing is pending
        works = [all_reduce(x, async_op=True) for _ in range(2)]
        assert made.wait_stream.mock_calls == 2 * [call(current)] and not current.mock_calls
        exchange([(x, 1)], [])
        assert current.mock_calls == [call.wait_event(events[2])]
        broadcast(x)
        assert current.mock_calls[1:] == [call.wait_event(events[4])]
        assert not works[0].is_completed()
        for event in events:
            event.query.return_value = True
        all_reduce(x)
        assert works[0].is_completed() and len(current.mock_calls) == 2


@pytest.mark.parametrize(
    "begin", [all_reduce, partial(all_reduce, async_op=True), lambda x: exchange([(x, 1)], [])]
)
def test_the_host_is_ahead_of_the_device_by_a_few_operations(one_of, begin):
    """The limit matters because messages hold their memory until the host has seen their end."""
    one_of(8)
    with _fake_streams() as (_, _, events):
        for _ in range(3 + collectives._Stream.AHEAD):
            begin(torch.ones(4))
    waited_for = [event.synchronize.called for event in events]
    assert waited_for == [True] * 3 + [False] * collectives._Stream.AHEAD


@pytest.mark.parametrize("async_op", [False, True])
def test_an_exchange_keeps_its_tensors_until_it_is_waited_for(one_of, async_op):
    one_of(8)
    with as_on_nccl(post_nowhere):
        tensor = torch.ones(4)
        alive = weakref.ref(tensor)
        work = exchange([(tensor, 1)], [(tensor, 1)], async_op=async_op)
        del tensor
        assert (alive() is not None) == async_op
        if async_op:
            work.wait()
        assert alive() is None


def test_while_one_segment_is_added_the_next_one_is_in_flight(one_of):
    one_of(2)
    log, add = [], torch.add

    def post(group, sends, receives):
        number = sum(line.startswith("post") for line in log)
        log.append(f"post {number}")
        return Mock(wait=lambda: log.append(f"wait {number}"))

    def logged(*tensors, out):
        log.append("add")
        return add(*tensors, out=out)

    reductions = {ReduceOp.SUM: (logged, None)}
    limits = patch.multiple(collectives, DIRECT_BYTES=1 << 10, _REDUCTIONS=reductions)
    with as_on_nccl(post), limits:
        reduce_scatter_single(torch.empty(3 << 7), torch.ones(3 << 8))
    assert log == [
        *("post 0", "post 1", "wait 0", "add", "post 2", "wait 1", "add", "wait 2", "add")
    ]


@on_ranks(4)
def test_an_all_reduce_needs_eight_chunks_of_2_mb_or_up_to_twice_its_tensor():
    """Each of a ring's 4 segments under way has one sum that is sent and one that arrives."""
    x = torch.zeros(16 << 20)  # 8 segments of 4 x 2 MB
    needed = {"ring": 16, "direct": 26, "halving_doubling": 48, "recursive_doubling": 128}
    for algorithm, megabytes in needed.items():
        with Peak() as peak:
            all_reduce(x, algorithm=algorithm)
        assert peak.bytes - x.nbytes == megabytes << 20, algorithm
    x = torch.zeros(2 << 20)  # a single segment
    with Peak() as peak:
        all_reduce(x, algorithm="ring")
    assert peak.bytes - x.nbytes == 4 << 20


@on_ranks(8)
def test_every_algorithm_needs_the_scratch_memory_of_the_table():
    _, P = rank_and_size()
    set_ranks_per_node(4)
    scratch = {"naive": P, "direct": 1, "ring": 2 / P, "hierarchical": 1 + 1 / P}
    scratch |= {"recursive_doubling": 2, "halving_doubling": 3 / 4}
    for algorithm, times in scratch.items():
        x = torch.zeros(P * 3072)  # chunks of 96 x 128 bytes
        with Peak() as peak:
            all_reduce(x, algorithm=algorithm)
        assert peak.bytes - x.nbytes == times * x.nbytes, algorithm


def test_a_stream_keeps_its_tensors_though_nothing_keeps_or_awaits_the_work(one_of):
    tensors = []

    def launch():
        tensor = torch.ones(4)
        tensors.append(weakref.ref(tensor))
        return all_reduce(tensor, async_op=True)

    def alive():
        gc.collect()
        return [tensor() is not None for tensor in tensors]

    one_of(8)
    with _fake_streams() as (_, _, events):
        for _ in range(3):
            launch()
        assert alive() == [True, True, True]
        events[0].query.return_value = events[1].query.return_value = True
        work = launch()
        assert alive() == [False, False, True, True]
        work.wait()
        assert alive() == [False, False, True, False]
        launch()
        assert alive() == [False, False, True, False, True]
        for event in events:
            event.query.return_value = True
        all_reduce(torch.ones(4))  # the host sees the end of those that nobody waits for
        assert not any(alive())


def test_a_wait_on_another_stream_frees_no_tensor_that_the_first_stream_could_reuse(one_of):
    one_of(8)
    tensor = torch.ones(4)
    alive = weakref.ref(tensor)
    with _fake_streams() as (_, _, events):
        work = all_reduce(tensor, async_op=True)
        del tensor
        with patch.object(torch.cuda, "current_stream", Mock()):
            work.wait()
        gc.collect()
        assert alive() is not None
        for event in events:
            event.query.return_value = True
        all_reduce(torch.ones(4))
        assert alive() is None


def test_an_error_of_a_batch_names_the_operation_and_its_peers(one_of):
    one_of(8)
    lost = dist.DistBackendError("NCCL communicator was aborted")
    x, world, some = torch.ones(4), str(list(range(8))), dist.new_group([0, 3, 5])
    for post in (Mock(side_effect=lost), Mock(return_value=Mock(wait=Mock(side_effect=lost)))):
        for send, operation, ranks, peers in [
            (lambda: exchange([(x, 3)], [(x.clone(), 2)]), "exchange", world, "2 or 3"),
            (lambda: exchange([(x, 3)], [], async_op=True).wait(), "exchange", world, "3"),
            (lambda: exchange([(x, 2)], [], some), "exchange", "[0, 3, 5]", "5"),
            (lambda: broadcast(x), "broadcast", world, "1 or 2 or 4"),
        ]:
            with as_on_nccl(post), pytest.raises(RuntimeError) as info:
                send()
            text = f"{operation} in the group of ranks {ranks}: rank 0 lost rank {peers}: {lost}"
            assert str(info.value) == text


def test_an_error_in_a_group_names_the_global_rank_that_lost_its_peer(one_of):
    one_of(8, rank=5)
    some = dist.new_group([0, 3, 5])
    post = Mock(side_effect=dist.DistBackendError("NCCL communicator was aborted"))
    lost = r"exchange in the group of ranks \[0, 3, 5\]: rank 5 lost rank 3: NCCL"
    with as_on_nccl(post), pytest.raises(RuntimeError, match=lost):
        exchange([(torch.ones(4), 1)], [], some)


@on_ranks(2)
def test_tensors_on_cpus_take_gloo_in_a_group_that_has_nccl_for_gpus():
    x = torch.ones(3)
    with patch.object(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl"):
        all_reduce(x)
        all_reduce(x, async_op=True).wait()
        assert (x == 4).all() and gather_objects("a") == ["a", "a"]


@on_ranks(2, 3)
def test_gpu_tensors_in_a_gloo_group_are_staged_through_host_memory():
    """The tensors claim to be on a GPU, so buffers of host memory are sent instead of them.

    The group's thread works on the caller's stream, so it sees what the caller's kernels write.
    """
    (rank, P), staged, empty_like = rank_and_size(), [], torch.empty_like
    entered = []  # (stream, thread)

    def pinned(tensor, device=None, pin_memory=False, **how):
        if pin_memory:
            staged.append(empty_like(tensor, **how).fill_(-7))
        return staged[-1] if pin_memory else empty_like(tensor, **how)

    @contextmanager
    def enter(stream):
        entered.append((stream, threading.current_thread()))
        yield

    streams = {"current_stream": lambda device: "the caller's", "stream": enter}
    tensor, received = torch.full((5,), rank + 1.0), torch.zeros(3)
    with on_gpu(), patch.object(torch, "empty_like", pinned), patch.multiple(torch.cuda, **streams):
        all_reduce(tensor, async_op=True).wait()
        exchange([(torch.ones(3), (rank + 1) % P)], [(received, (rank - 1) % P)])
    assert staged and (tensor == P * (P + 1) / 2).all() and (received == 1).all()
    ((stream, thread),) = entered
    assert stream == "the caller's" and thread is not threading.current_thread()


# ---- the backend's own --------------------------------------------------------------------------


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks(3)
def test_the_collectives_of_the_backend_give_the_same_results(async_op):
    group = dist.new_group([0, 1, 2])
    set_backend_collectives(group)
    _check_values([0, 1, 5], [torch.float64, torch.int64], group, async_op)
    for pair in PAIRS:
        _check_pair(pair, 1, group)
    barrier(group)
    assert gather_objects("a" * dist.get_rank(), group) == ["", "a", "aa"]


@on_ranks(2)
def test_only_groups_that_are_set_use_the_backends_collectives_whose_bytes_do_not_count():
    x, peer, group = torch.ones(4), 1 - dist.get_rank(), dist.new_group([0, 1])
    alone = [dist.new_group([0]), dist.new_group([1])][1 - peer]
    set_backend_collectives(group)
    set_backend_collectives(alone)
    with patch.object(dist, "all_reduce") as theirs, count_bytes() as traffic:
        all_reduce(x)
        all_reduce(x, group=alone)
        exchange([(x, peer)], [(torch.empty(4), peer)], group, async_op=True).wait()
        assert not theirs.called and traffic.bytes() == 32
        assert traffic.bytes("exchange") == traffic.bytes(group=dist.group.WORLD) == 16
        collectives.plain_exchange([(x, peer)], [(torch.empty(4), peer)], group)
        assert traffic.bytes("plain_exchange") == 16
        reduce(x, group=group)  # which is never the backend's
        all_gather([x[:1], x[:2]], x[: 2 - peer], group)  # of unequal lengths, neither
        assert traffic.bytes("all_gather") == 4 * (2 - peer)
        with pytest.raises(RuntimeError, match="the backend's own all_reduce"):
            all_reduce(x, group=group)
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as theirs:
        all_reduce(x, group=group)
    assert theirs.call_count == 1


def test_torch_2_11_has_two_of_the_backends_collectives_under_older_names(monkeypatch):
    older = {
        "all_gather_single": dist.all_gather_into_tensor,
        "reduce_scatter_single": dist.reduce_scatter_tensor,
    }
    for name, function in older.items():
        if hasattr(dist, name):
            assert backend_function(name) is getattr(dist, name)
            monkeypatch.delattr(dist, name)
        assert backend_function(name) is function


# ---- failure ------------------------------------------------------------------------------------


@on_ranks(5)
def test_partial_sums_stay_until_they_are_sent():
    """Rank 1 receives late; the others must not overwrite what it has not yet received."""
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


STOPPED = soak(signal.SIGSTOP)


@pytest.mark.parametrize("how", [signal.SIGKILL, STOPPED])
def test_a_lost_peer_raises_on_every_rank_and_names_operation_group_and_peer(how):
    outcomes = spawn(4, _lose_a_peer, how, check=False, group_timeout=3, timeout=9)
    for rank in (0, 1, 3):
        lost = f"all_reduce in the group of ranks .0, 1, 2, 3.: rank {rank} lost rank [0-3]:"
        assert re.search(lost, outcomes[rank].error_text), outcomes[rank].error_text


# ---- in the background --------------------------------------------------------------------------


@contextmanager
def _background_held():
    """Yield an event; no background thread posts a message before the event is set."""
    gate = threading.Event()

    def listen(event, *what):
        if event == "post" and threading.current_thread() is not threading.main_thread():
            gate.wait(20)

    with observe(listen):
        yield gate


@on_ranks(2, 3, 4)
def test_operations_of_a_group_run_in_order_and_those_of_other_groups_do_not_wait_for_them():
    rank, P = rank_and_size()
    second, third = dist.new_group(range(P)), dist.new_group(range(P))
    everyone, gathered = _integers(P, 7), torch.empty(P, 7, dtype=torch.float64)
    total, (x, y, z) = everyone.sum(0), [_spread(everyone[rank]) for _ in range(3)]
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
        threading.Timer(0.05, gate.set).start()
        all_reduce(x)
        assert all(works[i].is_completed() for i in (0, 2, 3))
        deadline = time.monotonic() + 30
        while not works[4].is_completed() and time.monotonic() < deadline:
            sum(range(1000))  # the works proceed while Python computes, though no one waits
        assert all(work.is_completed() for work in works)
    for work in reversed(works + works):
        work.wait()
    for actual, expected in (x, total * P**2), (gathered, (total * P).expand(P, 7)), (y, total):
        _same(actual, expected)
    _same(z, total)


@on_ranks(2)
def test_a_plain_exchange_does_not_meet_messages_of_pending_operations():
    """They have its size. A pending exchange() has posted its own already."""
    x, received, peer = torch.ones(4), torch.zeros(4), 1 - dist.get_rank()
    arriving = torch.zeros(4)
    with _background_held() as gate:
        under_way = exchange([(x + 1, peer)], [(arriving, peer)], async_op=True)
        work = all_reduce(x.clone(), async_op=True)
        try:
            plain_exchange([(x + 2, peer)], [(received, peer)])
        finally:
            gate.set()
        work.wait()
        under_way.wait()
    assert (received == 3).all() and (arriving == 2).all()


def _send_few(rank, group):
    x = torch.ones(4 + 4 * rank)
    broadcast(x, 0, group)


def _send_few_plainly(rank, group):
    x = torch.ones(4 + 4 * rank)
    plain_exchange([(x, 1)] * (rank == 0), [(x, 0)] * (rank == 1), group)


def _add_few(rank, group):
    reduce(torch.ones(8 - 4 * rank), 0, group=group)


def _gather_few(rank, group):
    gather(torch.ones(2 + 2 * rank), [*torch.ones(2, 4)] if rank else None, 1, group)


def _exchange_few_rows(rank, group):
    """Rank 0 sends 1 row, and rank 1 expects 2."""
    sent, received = [0, 1 - rank], [2 * rank, 0]
    output, input = torch.ones(sum(received)), torch.ones(sum(sent))
    all_to_all_single(output, input, received, sent, group)


def _call_another(rank, group):
    x = torch.ones(4)
    if rank:
        broadcast(x, 0, group)
    else:
        scatter(x, [x, x], 0, group)


OTHERS = _send_few_plainly, _add_few, _gather_few, _exchange_few_rows, _call_another
UNLIKE = _send_few, *map(soak, OTHERS)


@pytest.mark.parametrize("call", UNLIKE)
@on_ranks(2)
def test_messages_of_unlike_sizes_or_operations_end_in_a_timeout_on_both_ranks(call):
    """Otherwise a part of the longer tensor would be filled, or another operation's."""
    rank, P = rank_and_size()
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    with pytest.raises(RuntimeError, match="imed out|closed|reset"):
        call(rank, group)


@on_ranks(2)
def test_settings_of_a_group_hold_for_calls_made_after_they_are_set():
    """A pending operation would take another algorithm on ranks whose queue is behind."""
    x, group, nodes = torch.ones(4), dist.new_group(), []
    choose_among = lambda nbytes, P, per_node, *_, **__: nodes.append(per_node) or "ring"
    with patch.object(collectives, "choose", choose_among), _background_held() as gate:
        works = [all_reduce(x, group=group, async_op=True) for _ in range(2)]
        set_ranks_per_node(1, group)
        set_backend_collectives(group)
        with patch.object(dist, "all_reduce") as theirs:
            gate.set()
            for work in works:
                work.wait()
    assert nodes == [2, 2] and not theirs.called
    assert (x == 4).all()


@on_ranks(2)
def test_a_call_is_refused_while_another_thread_calls_an_operation_of_the_group():
    """Otherwise their messages could arrive in place of one another."""
    x, y, peer = torch.ones(4), torch.ones(4), 1 - dist.get_rank()
    entered, gate = threading.Event(), threading.Event()

    def listen(event, *_):
        if event == "post" and threading.current_thread() is not threading.main_thread():
            entered.set()
            gate.wait(20)

    with observe(listen):
        thread = threading.Thread(target=all_reduce, args=(x,))
        thread.start()
        assert entered.wait(20)
        try:
            for call in (
                lambda: all_reduce(y),
                lambda: all_reduce(y, async_op=True),
                lambda: exchange([(y, peer)], [(y.clone(), peer)]),
            ):
                with pytest.raises(RuntimeError, match="while another thread calls an operation"):
                    call()
        finally:
            gate.set()
            thread.join()
    all_reduce(x)
    assert (x == 4).all() and (y == 1).all()


@on_ranks(2)
def test_a_call_is_refused_while_another_thread_waits_for_its_turn_in_the_queue():
    x, y = torch.ones(4), torch.ones(4)
    waits, submit = threading.Event(), collectives._Thread.submit

    def submit_and_tell(queue, *task):
        pending = submit(queue, *task)
        finish = lambda: waits.set() or pending.finish()
        return pending._replace(finish=finish)

    with _background_held() as gate:
        work = all_reduce(x, async_op=True)
        with patch.object(collectives._Thread, "submit", submit_and_tell):
            thread = threading.Thread(target=all_reduce, args=(y,))
            thread.start()
            assert waits.wait(20)
            try:
                with pytest.raises(RuntimeError, match="while another thread calls an operation"):
                    all_reduce(x)
            finally:
                gate.set()
                thread.join()
        work.wait()
    assert (x == 2).all() and (y == 2).all()


def test_two_threads_that_are_the_first_to_use_a_group_get_one_queue(one_of):
    one_of(8)
    found, both, rank_and_size = [], threading.Barrier(2), collectives.rank_and_size

    def wait_for_the_other(group):
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        return rank_and_size(group)

    use = lambda: found.append(collectives.membership(None, "a test"))
    with patch.object(collectives, "rank_and_size", wait_for_the_other):
        threads = [threading.Thread(target=use) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found[0] is found[1]


@on_ranks(2)
def test_an_error_in_the_background_is_raised_by_wait_and_not_by_a_later_exchange():
    tensor, peer, gate = torch.ones(4), 1 - dist.get_rank(), threading.Event()

    def listen(event, operation, *messages):
        if event == "post" and operation.name == "all_reduce":
            gate.wait(20)
            raise ConnectionError("the link is down")

    with observe(listen):
        works = [all_reduce(tensor, async_op=True) for _ in range(2)]
        threading.Timer(0.05, gate.set).start()
        exchange([(tensor, peer)], [(tensor.clone(), peer)])
        for work in [*works, works[0]]:
            with pytest.raises(ConnectionError, match="the link is down"):
                work.wait()
            assert work.is_completed()
    all_reduce(tensor, async_op=True).wait()
    assert (tensor == 2).all()


@on_ranks(2)
def test_an_idle_thread_keeps_no_tensor():
    x, freed = torch.ones(4), threading.Event()
    weakref.finalize(x, freed.set)
    all_reduce(x, async_op=True).wait()
    del x
    assert freed.wait(10)


@on_ranks(2)
def test_a_thread_has_freed_an_operations_tensors_when_it_announces_the_end():
    x, freed, forgotten, found = torch.ones(4), threading.Event(), threading.Event(), []
    weakref.finalize(x, freed.set)

    class Watched(collectives.Future):
        def set_result(self, result):
            assert forgotten.wait(10)
            found.append(freed.is_set())
            super().set_result(result)

    with patch.object(collectives, "Future", Watched):
        work = all_reduce(x, async_op=True)
    del x
    forgotten.set()
    work.wait()
    assert found == [True]


@on_ranks(2)
def test_the_thread_of_a_group_may_preempt_others_and_the_main_thread_does_not():
    policies, x = set(), torch.ones(4)

    def listen(event, *_):
        if event == "post":
            is_main = threading.current_thread() is threading.main_thread()
            policies.add((is_main, os.sched_getscheduler(0)))

    with observe(listen):
        all_reduce(x, async_op=True).wait()
        all_reduce(x)
    assert policies == {(False, os.SCHED_OTHER), (True, os.SCHED_BATCH)}


@on_ranks(2)
def test_the_thread_of_a_group_ends_with_the_group():
    group, before = dist.new_group([0, 1]), set(threading.enumerate())
    all_reduce(torch.ones(4), group=group, async_op=True).wait()
    (thread,) = set(threading.enumerate()) - before
    dist.barrier()  # a rank that leaves early would fail its peer
    dist.destroy_process_group(group)
    del group
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


# ---- messages -----------------------------------------------------------------------------------


@on_ranks(2)
def test_a_listener_hears_the_events_of_operations_begun_inside_observe_in_order():
    x, peer, heard = torch.ones(4), 1 - dist.get_rank(), {True: [], False: []}

    def listen(event, operation, sends=(), receives=()):
        here = threading.current_thread() is threading.main_thread()
        heard[here].append(f"{event} {operation.name} {len(sends) + len(receives)}")
        assert operation.group is dist.group.WORLD and operation.ranks == [0, 1]
        assert operation.rank == dist.get_rank() and operation.world_size == 2

    with _background_held() as gate:
        with observe(listen):
            all_reduce(x, algorithm="naive")
            exchange([(x, peer)], [(x.clone(), peer)], async_op=True).wait()
            work = all_to_all_single(x, x.clone(), async_op=True)
        gate.set()  # the operation began inside, and ends outside
        work.wait()
    all_reduce(x)
    assert heard[False] == ["post all_to_all_single 2", "end all_to_all_single 0"]
    assert heard[True] == [
        *("begin all_reduce 0", "post all_reduce 2", "end all_reduce 0"),
        *("begin exchange 0", "post exchange 2"),
        *("wait exchange 0", "end exchange 0", "waited exchange 0"),
        *("begin all_to_all_single 0", "wait all_to_all_single 0", "waited all_to_all_single 0"),
    ]


def test_an_operation_that_begins_also_ends_and_wrong_arguments_begin_none(one_of):
    one_of(8)
    x, heard = torch.ones(4), []
    lost = Mock(side_effect=dist.DistBackendError("NCCL communicator was aborted"))
    listen = lambda event, operation, *_: heard.append(f"{event} {operation.name}")
    for words, call in [
        ("output has 3", lambda: all_reduce(x, output=torch.ones(3))),
        ("is not a rank", lambda: broadcast(x, group_src=8)),
        ("not contiguous: a message", lambda: exchange([(x[::2], 1)], [])),
        ("not contiguous: a message", lambda: plain_exchange([(x[::2], 1)], [])),
        ("all_reduce .* lost rank", lambda: all_reduce(x)),
        ("exchange .* lost rank", lambda: exchange([(x, 1)], [])),
        ("exchange .* lost rank", lambda: exchange([(x, 1)], [], async_op=True)),
    ]:
        heard.clear()
        with as_on_nccl(lost), observe(listen), pytest.raises(Exception, match=words):
            call()
        name, *is_lost = words.split(" .* ")
        events = ("begin", "post", "end") if is_lost else ()
        assert heard == [f"{event} {name}" for event in events]


def _message(source, target, k):
    """Return the k-th message of a link; dtypes vary, and some messages are empty."""
    dtype, seed = DTYPES[(source + target + k) % 6], 100 * source + 10 * target + k
    return _integers((source + 2 * target + k) % 4, 1 + k, dtype=dtype, seed=seed)


@pytest.mark.parametrize("members", [[0], [0, 1, 2, 3], [1, 3]])
@on_ranks(4)
def test_exchange_delivers_several_messages_on_each_link_in_order(members):
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return
    rank, P = rank_and_size(group)
    keys = [(peer, k) for k in range(6) for peer in range(P) if peer != rank]
    sends = [(_message(rank, peer, k), peer) for peer, k in keys]
    receives = [(torch.empty_like(_message(peer, rank, k)), peer) for peer, k in keys]
    half = len(keys) // 2
    with count_bytes() as traffic:
        work = exchange(sends[:half], receives[:half], group, async_op=True)
        assert exchange(sends[half:], receives[half:], group) is None
    work.wait()
    for (peer, k), (actual, _) in zip(keys, receives):
        _same(actual, _message(peer, rank, k))
    sizes = [x.nbytes for x, _ in sends if x.numel()]
    assert traffic.bytes("exchange", group) == traffic.bytes() == sum(sizes)
    assert len(traffic.sent) == len(sizes)


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks(2)
def test_exchange_follows_earlier_operations_and_begins_without_its_peer(async_op):
    rank = dist.get_rank()
    x, incoming = torch.full((4,), rank + 1.0), torch.empty(4)
    with _background_held() as gate:
        pending = all_reduce(x, async_op=True)
        threading.Timer(0.05, gate.set).start()
        work = exchange([(x, 1 - rank)], [(incoming, 1 - rank)], async_op=async_op)
        if async_op:
            work.wait()
    assert pending.is_completed() and (incoming == 3).all(), incoming
    if rank == 1:
        dist.barrier()
    work = exchange([(x, 1 - rank)], [(incoming.fill_(0), 1 - rank)], async_op=True)
    if rank == 0:
        dist.barrier()
    work.wait()
    assert (incoming == 3).all()


@on_ranks(2)
def test_messages_of_the_user_do_not_meet_ours():
    peer = 1 - dist.get_rank()
    sent = [dist.isend(torch.full((3,), 100.0 + tag), peer, tag=tag) for tag in range(4)]
    x, incoming = torch.ones(3), torch.empty(3)
    all_reduce(x)
    all_reduce(x, async_op=True).wait()
    for swap in (exchange, collectives.plain_exchange):
        swap([(x, peer)], [(incoming.zero_(), peer)])
        assert (x == 4).all() and (incoming == 4).all()
    for tag, work in enumerate(sent):
        dist.recv(incoming, peer, tag=tag)
        assert (incoming == 100 + tag).all()
        work.wait()


@on_ranks(1, 3, 4)
def test_the_demonstration_counts_what_it_claims():
    steps = []  # of each all-reduce: the batches that this rank posts

    def counted(call, tensor, **options):
        with observe(lambda event, *_: posted.append(event == "post")):
            posted = []
            call(tensor, **options)
        steps.append(sum(posted))

    with redirect_stdout(io.StringIO()) as printed, ExitStack() as patches:
        for name in ("ring_all_reduce", "all_reduce"):
            call = partial(counted, getattr(collectives, name))
            patches.enter_context(patch.object(collectives, name, call))
        collectives._demonstrate()
    table = r"^[\w()]+ +(\d+) steps, +(\d+) bytes claimed, +(\d+) counted, at most \de-0[67] from"
    rows = re.findall(table, printed.getvalue().replace("0e+00", "1e-07"), re.M)
    assert len(rows) == (7 if dist.get_rank() == 0 else 0)
    assert all(claimed == counted for _, claimed, counted in rows)
    assert not rows or [int(claimed) for claimed, *_ in rows] == steps


# ---- errors -------------------------------------------------------------------------------------


@on_ranks(2)
def test_errors_name_the_values():
    x, rank, inside = torch.zeros, dist.get_rank(), r"is called by a rank that is not in the group"
    alone = [dist.new_group([0]), dist.new_group([1])]
    other = alone[1 - rank]
    swap = [2 * rank, 2 - 2 * rank]  # two rows, which go to the other rank
    cases = [
        (lambda: all_reduce(x(2), output=x(3)), "3 elements .*makes 2"),
        (lambda: reduce_scatter_single(x(2), x(5)), "output has 2 elements .*makes 2.5"),
        (lambda: all_gather_single(x(5), x(2)), "5 elements .* makes 4"),
        (lambda: reduce(x(2), 5), "dst=5"),
        (lambda: all_to_all_single(x(3), x(4)), r"3 rows .*world_size=2 by sizes \[1, 1\]"),
        (lambda: all_to_all_single(x(4), x(4), [1, 2]), r"4 rows .* \[1, 2\]"),
        (lambda: all_to_all_single(x(4), x(4), [1, 3], [3, 1]), "4 elements .*makes [26] "),
        (lambda: all_to_all_single(x(2, 3), x(2, 4), swap, swap), "6 elements .*makes 8"),
        (lambda: check_parameters([("w", x(2 + rank))]), r"rank 1 .*'w' \(3,\).*rank 0 .*\(2,\)"),
        (lambda: broadcast(x(2), 1 - rank, alone[rank]), str(1 - rank)),
        (lambda: all_reduce(x(2), group=other, async_op=True), "all_reduce " + inside),
        (lambda: exchange([(x(2), 0)], [], group=other), "exchange " + inside),
        (lambda: all_reduce(x(2), ReduceOp.BAND), "BAND.* is not supported; SUM, "),
        (lambda: all_gather([x(2)], x(2)), "all_gather got a list of 1 tensors, not world_size=2"),
        (lambda: all_gather([x(3), x(3)], x(2)), "output has 3 elements .*makes 2"),
        (lambda: all_gather([x(2), x(2)], x(2).int()), "float32, .*int32"),
        (lambda: all_gather([x(2 - i).to(DTYPES[i - rank]) for i in (0, 1)], x(2 - rank)), "float"),
        (lambda: scatter(x(2), None, rank), "scatter got a list of 0 tensors, not world_size=2"),
        (lambda: scatter(x(2), 3 * [x(2)], rank), "scatter got a list of 3"),
        (lambda: scatter(x(2), [x(2), x(3)], rank), "output has 3 elements .*makes 2"),
        (lambda: scatter(x(2), 2 * [x(2)], 1 - rank), "scatter got a list on rank . of the group;"),
        (lambda: gather(x(2), [], group_dst=rank), "gather got a list of 0"),
        (lambda: gather(x(2), [x(2), x(1)], rank), "output has 1 elements .*makes 2"),
        (lambda: gather(x(2), 2 * [x(2).int()], rank), "int32, .*float32"),
        (lambda: gather(x(2), 2 * [x(2)], 1 - rank), f"only the root, rank {1 - rank}, has one"),
        (lambda: gather(x(2), dst=2), r"dst=2 is not among the group's ranks \[0, 1\]"),
        (lambda: gather(x(2), group_dst=2), "group_dst=2 is not a rank of a group of 2"),
        (lambda: scatter(x(2), src=0, group_src=0), "scatter got .*_dst=0 besides .*dst=0"),
    ]
    for error, use, words in [
        *((ValueError, *case) for case in cases),
        (ValueError, lambda: all_reduce(x(2).long(), ReduceOp.AVG), "op=AVG of torch.int64: the"),
        (ValueError, lambda: all_reduce(x(2) + 1j, ReduceOp.MAX), "complex numbers have no order"),
        (ValueError, lambda: reduce(x(2) + 1j, op=ReduceOp.MIN), "MIN of torch.complex64: complex"),
        (ValueError, lambda: all_reduce(x(2), algorithm="best"), "algorithm='best' is none of"),
        (ValueError, lambda: set_ranks_per_node(0), "ranks_per_node=0 is not positive"),
        (ValueError, lambda: set_ranks_per_node(-2), "ranks_per_node=-2 is not positive"),
        (RuntimeError, lambda: scatter_to_group(x(4, 3), -1), "dim 1"),
        (RuntimeError, lambda: reduce_scatter_to_group(x(3, 4), 0), "dim 0"),
    ]:
        with pytest.raises(error, match=words):
            use()


# ---- derivatives --------------------------------------------------------------------------------

# {pair: (the result on one process, given the list of all ranks' x; whether x is the same on all
# ranks; whether all ranks use y identically)}
PAIRS = {
    copy_to_group: (lambda xs, dim: xs, True, False),
    reduce_from_group: (lambda xs, dim: [sum(xs)] * len(xs), False, True),
    scatter_to_group: (lambda xs, dim: xs[0].chunk(len(xs), dim), True, False),
    gather_from_group: (lambda xs, dim: [torch.cat(xs, dim)] * len(xs), False, True),
    all_gather_to_group: (lambda xs, dim: [torch.cat(xs, dim)] * len(xs), False, False),
    reduce_scatter_to_group: (lambda xs, dim: sum(xs).chunk(len(xs), dim), False, False),
    all_to_all_in_group: (lambda xs, dim: [*map(torch.cat, zip(*_chunks(xs)))], False, False),
}
WITHOUT_DIM = (copy_to_group, reduce_from_group, all_to_all_in_group)


def _chunks(xs):
    return [x.chunk(len(xs)) for x in xs]


def _apply(pair, x, dim, group=None):
    return pair(x, group=group) if pair in WITHOUT_DIM else pair(x, dim, group)


def _check_pair(pair, dim, group=None):
    """Compare y = pair(exp(x)) and the gradients of sum(weight * y) with those of one process.

    The backward of backward is forward: the derivative of the gradients by weight is y.
    """
    rank, P = rank_and_size(group)
    one_process, x_is_alike, y_is_alike = PAIRS[pair]
    leaves = [x.requires_grad_() for x in _normal(1 if x_is_alike else P, 2 * P, P, 3 * P)]
    xs = leaves * (P // len(leaves))
    ys = one_process([x.exp() for x in xs], dim)
    weights = _normal(1 if y_is_alike else P, *ys[0].shape, seed=1)
    loss = sum((weight * y).sum() for weight, y in zip(weights, ys))
    (expected,) = torch.autograd.grad(loss, xs[rank])
    close = partial(torch.testing.assert_close, rtol=1e-13, atol=1e-13)
    for lay_x, lay_weight in itertools.product(LAYOUTS, LAYOUTS):
        x = lay_x(xs[rank].detach()).requires_grad_()
        weight = lay_weight(weights[0 if y_is_alike else rank]).requires_grad_()
        inside = x.exp()
        y = _apply(pair, inside, dim, group)
        close(y, ys[rank])
        (gradient,) = torch.autograd.grad(y, x, weight, create_graph=True)
        close(gradient, expected)
        close(torch.autograd.grad(gradient.sum(), weight), (y,))
        _same(weight, weights[0 if y_is_alike else rank])
        _same(inside, x.exp())


def _split_matrix(P, seed):
    """Return the rows that rank i (row) sends to rank j. Rank 0 sends none, the last gets none."""
    sizes = _integers(P, P, seed=seed).abs().long()
    sizes[0, :], sizes[:, -1] = 0, 0
    return sizes


def _check_uneven_all_to_all(group):
    """Check an all-to-all in which rank i sends sizes[i, j] rows of values[i, j] to rank j."""
    rank, P = rank_and_size(group)
    values, weights = _normal(2, P, P, 2, 3)
    for seed in range(4):
        sizes = _split_matrix(P, seed)
        given, taken = sizes[rank].tolist(), sizes[:, rank].tolist()
        sent = lambda full: torch.cat([x[:n] for x, n in zip(full[rank], given)])
        received = lambda full: torch.cat([x[:n] for x, n in zip(full[:, rank], taken)])
        x = sent(values).requires_grad_()
        with count_bytes() as traffic:
            y = all_to_all_in_group(x, taken, given, group)
        assert traffic.bytes() == 24 * (sum(given) - given[rank])
        _same(y, received(values))
        (gradient,) = torch.autograd.grad(y, x, received(weights))
        _same(gradient, sent(weights))


@on_ranks(1, *map(soak, (2, 3, 4)), 5)
def test_derivatives_are_those_of_one_process_also_in_disjoint_groups():
    rank, P = rank_and_size()
    members = [[0, 2], [1, 3, 4]] if P == 5 else [range(P)]
    groups = [dist.new_group(ranks) for ranks in members]
    (group,) = [group for group, ranks in zip(groups, members) if rank in ranks]
    _check_uneven_all_to_all(group)
    for pair, dim in itertools.product(PAIRS, (0, 1, -1)):
        _check_pair(pair, dim, group)


@on_ranks(1, 2, 3)
def test_the_result_of_a_pair_may_be_changed_in_place_and_leaves_x_alone():
    """Only copy_to_group() returns x itself, and autograd rejects the change. x may be empty."""
    P = dist.get_world_size()
    for rows, dim, pair in itertools.product((0, 2 * P), (0, 1), PAIRS):
        x = _normal(rows, 2 * P, seed=dist.get_rank()).requires_grad_()
        kept, y = x.detach().clone(), _apply(pair, x, dim)
        refused = pytest.raises(RuntimeError, match="modified inplace")
        with refused if pair is copy_to_group else nullcontext():
            y.add_(1)
            y.sum().backward()
            with torch.no_grad():
                y.fill_(7)
            assert x.grad.shape == x.shape
        _same(x.detach(), kept)


def _example_of_types():
    """Return the values and the gradients of the rows of the example in collectives.py."""
    x = torch.tensor(3.0, requires_grad=True)
    w = 2.0 + 3 * dist.get_rank()
    c = copy_to_group(x)
    p = w * c
    y = reduce_from_group(p)
    rows = [x, c, p, y]
    return [*zip(rows, torch.autograd.grad(y, rows))]


def test_the_numbers_beside_the_types_are_those_that_the_functions_compute():
    source = (PROJECT / "collectives.py").read_text()
    row = r"^#     [xcpy](?: = .*?)? {2,}(\d+) +(\d+) +\w+ +(\d+) +(\d+) +\w+$"
    told = [[*map(int, numbers)] for numbers in re.findall(row, source, re.M)]
    first, second = run(2, _example_of_types)
    assert told == [[a, b, da, db] for (a, da), (b, db) in zip(first, second, strict=True)]
    assert len(told) == 4


# ---- order of messages under NCCL's rules -------------------------------------------------------

NODES = [(4, 2)]
MORE = (2, 1), (3, 1), (4, 1), (4, 3), (6, 1), (6, 2), (7, 1), (8, 1), (8, 4)
NODES += [soak(*row) for row in MORE]


@pytest.mark.parametrize("name", ["ring", "hierarchical", soak("recursive_doubling")])
@pytest.mark.parametrize("P, ranks_per_node", NODES)
@on_ranks(lambda P, **_: P)
def test_every_collective_runs_under_the_rules_of_nccl(P, ranks_per_node, name):
    """The group's first batch is among them. With two elements, most chunks are empty."""

    def forced(nbytes, world_size, ranks_per_node, on_nccl, both_phases):
        return name if both_phases or name != "recursive_doubling" else "ring"

    groups = [dist.group.WORLD, dist.new_group()]
    with nccl_over_gloo(), patch.multiple(collectives, choose=forced, DIRECT_BYTES=1 << 10):
        for group, async_op in zip(groups, (False, True)):
            set_ranks_per_node(ranks_per_node, group)
            _check_values([2, 400], DTYPES[:1], group, async_op)


# ---- the source ---------------------------------------------------------------------------------

THEM = "all_reduce|all_gather|all_to_all|reduce|gather|scatter|broadcast|monitored_barrier|barrier"
LAYERS = r"fsdp|tensor|_|pipelining|optim|algorithms|nn"
THEIRS = re.compile(rf"torch\.(nn\.parallel|distributed\.({LAYERS}|{THEM}))")
P2P = r"torch\.distributed\.(i?(send|recv)|batch_isend_irecv|P2POp|\w+_object_list)"
MESSAGE = re.compile(rf"{P2P}|.*group.(send|recv)$")


def _uses(tree):
    """Yield the full names that a file uses from torch.distributed and other modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield re.sub(r"^(dist|distributed_c10d)\.", "torch.distributed.", ast.unparse(node))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", sorted(PROJECT.glob("*.py")), ids=lambda path: path.name)
def test_all_communication_is_made_of_messages_and_messages_are_made_in_one_file(path):
    """The only getattr(dist, ...) calls the backend's own collectives."""
    text, ours = path.read_text(), path.name == "collectives.py"
    uses = {*_uses(ast.parse(text))}
    assert not [name for name in uses if THEIRS.match(name)]
    messages = {name.split(".")[-1] for name in uses if MESSAGE.match(name)}
    plain = {"isend", "irecv", "P2POp", "batch_isend_irecv"}  # of plain_exchange()
    assert messages == ({"send", "recv"} | plain if ours else set())
    assert text.count("getattr(dist") == ours
