"""Collectives made of messages.

A rank is a process, which has a GPU of its own or runs on CPU cores. A process group is P ranks,
which share no memory and send tensors to each other. A collective is a call that all ranks of a
group make together. An all-reduce, for example, leaves the sum of all ranks' tensors on every rank.
Here a sum travels around a ring of ranks:

    rank 0 ---> rank 1 ---> rank 2 ---+       every link carries 1/P of the tensor at every step
      ^                               |
      +-------------------------------+

A rank holds   its tensors, and scratch memory for what arrives: on a ring, 2/P of the tensor's D
               bytes. The upper floor mostly cuts long tensors into segments, which bounds it
It sends       2(P-1)/P D in an all-reduce on a ring, the fewest bytes possible if only ranks add.
               A table below has all collectives, others the algorithms for an all-reduce
Overlap        with async_op=True an operation runs beside the caller's computation: in a thread if
               PyTorch sends by gloo (from CPUs), on a side stream if by NCCL (from GPUs)
PyTorch's      torch.distributed has the same names and meanings. The upper floor lists what differs

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.

    torchrun --nproc-per-node 4 collectives.py      prints steps, and bytes claimed and counted
"""

import math
import os
import pickle
import tempfile
import threading
import weakref
from collections import deque, namedtuple
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache, partial
from itertools import zip_longest
from queue import SimpleQueue
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

# ---- the wire ------------------------------------------------------------------------------------


def rank_and_size(group=None):
    """Return this rank inside `group`, and the group's size."""
    return dist.get_rank(group), dist.get_world_size(group)


TAG = 1 << 30  # a user's tags are smaller


def tag_of(operation, tensor):
    """Return the tag of a message. On gloo it arrives where a receive has the same tag.

    It depends on the operation's name and on the size, so messages that do not belong together
    never meet. If ranks call unlike operations, or with unlike sizes, both get an error at the
    group's timeout. NCCL ignores tags, and matches the messages of two ranks in the order in which
    both post them.
    """
    return TAG + crc32(f"{operation} {tensor.nbytes}".encode()) % TAG


def plain_exchange(sends, receives, group=None):
    """Send and receive several tensors in one batch, and wait for all of them.

    Its messages progress together. If each rank waited for its send before it received, a ring of
    ranks could wait for one another forever.

    sends, receives: lists of (contiguous tensor, peer), where peer is a rank of `group`. Each pair
    of ranks must post the messages between them in the same order, in the same batches, with equal
    sizes. Empty tensors are not sent.
    """
    sends = [(tensor, peer) for tensor, peer in sends if tensor.numel()]
    receives = [(tensor, peer) for tensor, peer in receives if tensor.numel()]

    def message(call, tensor, peer):
        tag = tag_of("plain_exchange", tensor)
        return dist.P2POp(call, tensor, group=group, tag=tag, group_peer=peer)

    batch = [message(dist.irecv, *given) for given in receives]
    batch += [message(dist.isend, *given) for given in sends]
    if batch:
        with plain_turn(sends, receives, group):  # checks the tensors, and counts bytes
            for request in dist.batch_isend_irecv(batch):
                request.wait()


# ---- the idea: a sum travels around a ring -------------------------------------------------------
#
# Each rank cuts its tensor into P = 3 chunks. A step is one exchange, and sends a chunk along each
# link. The sum of chunk r is complete when it arrives at rank r. A number that has just changed is
# marked:
#
#                 rank 0             rank 1             rank 2
#     start      1    2    3       10   20   30      100  200  300
#     step 0     1  202*   3       10   20   33*     110* 200  300       partial sums
#     step 1   111* 202    3       10  222*  33      110  200  333*      a whole sum on each rank
#     step 2   111  202  333*     111* 222   33      110  222* 333       copies of whole sums
#     step 3   111  222* 333      111  222  333*     111* 222  333


def ring_all_reduce(tensor, group=None):
    """Sum a contiguous tensor over the group in place, in 2(P-1) steps of 1/P of its bytes each.

    In step 0, rank r sends chunk r - 1 (modulo P). In every later step it sends the chunk that it
    has received in the step before. So in step s it sends chunk r - s - 1, and receives chunk
    r - s - 2 from the rank before it. In step P-2 that is chunk r, and its sum is then complete.
    If P does not divide the tensor's length, chunks differ by one element.
    """
    rank, P = rank_and_size(group)
    chunks = tensor.view(-1).tensor_split(P)  # chunk() could return fewer than P
    for step in range(2 * (P - 1)):
        outgoing = chunks[(rank - step - 1) % P]
        own = chunks[(rank - step - 2) % P]
        arriving = torch.empty_like(own)
        plain_exchange([(outgoing, (rank + 1) % P)], [(arriving, (rank - 1) % P)], group)
        if step < P - 1:
            own.add_(arriving)  # the sum over one more rank; after P-1 steps, over all
        else:
            own.copy_(arriving)  # a whole sum, on its way to all ranks


# ---- the collectives -----------------------------------------------------------------------------
#
# D is the size of the full tensor in bytes. Steps are batches that follow one another, since each
# needs what the one before has brought. log2(P) is rounded up.
#
#                            the result                             a rank sends   steps
#     all_reduce             the sum of all ranks' tensors          by "all-reduce", below
#     reduce_scatter_single  rank r has chunk r of the sum          (P-1)/P D      1 to P-1
#     all_gather_single      every rank's chunk                     (P-1)/P D      1 to P-1
#     all_gather             the same, with chunks in a list        (P-1)/P D      1
#     all_to_all_single      rank j has every rank's chunk j        (P-1)/P D      1
#     broadcast              the root's tensor                      log2(P) D      log2(P)
#     reduce                 the root has the sum                   D              log2(P)
#     scatter                rank r has the root's chunk r          (P-1)/P D      1
#     gather                 the root has every rank's chunk        D/P            1
#
# In a broadcast or a scatter only the root sends that much; in a reduce or a gather it sends
# nothing. The chunks of all_gather may have unequal lengths, and each is sent P-1 times.

# ---- reduce-scatter, all-gather, all-to-all ------------------------------------------------------
#
# An algorithm is a generator. It yields a batch (sends, receives), is resumed once the messages of
# the batch are complete, and computes before it yields the next batch. plain_run() is all that it
# takes to run one. Its `combine` is torch.add, or torch.maximum for a maximum, and so on.
#
# The first two algorithms are the halves of ring_all_reduce(). For P = 3:
#
#                           rank 0          rank 1          rank 2
#     input               1   2   3      10  20  30     100 200 300
#     reduce-scatter         111             222             333
#     all-gather of it   111 222 333     111 222 333     111 222 333
#     all-to-all          1  10 100       2  20 200       3  30 300      rows become columns


def plain_run(algorithm, group=None):
    """Send what an algorithm yields, and wait for it, until the algorithm ends."""
    for sends, receives in algorithm:
        plain_exchange(sends, receives, group)


def _ring_reduce_scatter(chunks, output, combine, rank):
    """Reduce chunk r over all ranks into `output` of rank r, in P-1 steps.

    A partial sum travels around the ring, and every rank that it visits adds its own chunk.
    "c2: 3+0" is chunk 2, summed over ranks 3 and 0. P = 4:

        rank        0             1             2             3
        step 0   c2: 3+0       c3: 0+1       c0: 1+2       c1: 2+3
        step 1   c1: 2+3+0     c2: 3+0+1     c3: 0+1+2     c0: 1+2+3
        step 2   c0: 1+2+3+0   c1: 2+3+0+1   c2: 3+0+1+2   c3: 0+1+2+3
    """
    P = len(chunks)
    total = chunks[(rank - 1) % P]
    for step in range(P - 1):
        own = chunks[(rank - step - 2) % P]
        received = torch.empty_like(own)
        yield [(total, (rank + 1) % P)], [(received, (rank - 1) % P)]
        is_last = step == P - 2
        total = combine(received, own, out=output if is_last else received)
    if P == 1:  # without a step, the sum is the chunk itself
        output.copy_(total)


def _ring_all_gather(chunks, rank):
    """Copy chunk r of rank r into chunk r of every rank, in P-1 steps.

        rank        0         1         2         3
        start    0 . . .   . 1 . .   . . 2 .   . . . 3       the chunks that a rank has, P = 4
        step 0   0 . . 3   0 1 . .   . 1 2 .   . . 2 3
        step 1   0 . 2 3   0 1 . 3   0 1 2 .   . 1 2 3
        step 2   0 1 2 3   0 1 2 3   0 1 2 3   0 1 2 3
    """
    P = len(chunks)
    for step in range(P - 1):
        outgoing = chunks[(rank - step) % P]
        arriving = chunks[(rank - step - 1) % P]
        yield [(outgoing, (rank + 1) % P)], [(arriving, (rank - 1) % P)]


def _pairwise(outgoing, arriving, rank):
    """Send outgoing[r] to every other rank r, nearest first, and receive arriving[r], in 1 step."""
    P = len(outgoing)
    after = [(rank + distance) % P for distance in range(1, P)]
    before = reversed(after)  # rank - 1, rank - 2 ...
    yield [(outgoing[r], r) for r in after], [(arriving[r], r) for r in before]


def check_fits(output, input, expected):
    """Raise ValueError unless `output` has as many elements as `input` makes, and its dtype."""
    if (output.numel(), output.dtype) != (expected, input.dtype):
        made = f"input makes {expected} of {input.dtype}"
        raise ValueError(f"output has {output.numel()} elements of {output.dtype}, {made}")


def plain_reduce_scatter(output, input, group=None):
    """Sum `input` over the group. Rank r keeps chunk r of the sum in `output`, 1/P as long."""
    rank, P = rank_and_size(group)
    check_fits(output, input, input.numel() / P)
    chunks = input.view(-1).chunk(P)
    plain_run(_ring_reduce_scatter(chunks, output.view(-1), torch.add, rank), group)


def plain_all_gather(output, input, group=None):
    """Collect the `input` of all ranks in `output`, which is P times as long, in rank order."""
    rank, P = rank_and_size(group)
    check_fits(output, input, P * input.numel())
    chunks = output.view(-1).chunk(P)
    chunks[rank].copy_(input.view(-1))
    plain_run(_ring_all_gather(chunks, rank), group)


def plain_all_to_all(output, input, group=None):
    """Copy chunk j of rank i's `input` to chunk i of rank j's `output`, for all i and j."""
    rank, P = rank_and_size(group)
    check_fits(output, input, input.numel())
    check_fits(output, input, input.numel() // P * P)  # P divides both
    outgoing = input.view(-1).chunk(P)
    arriving = output.view(-1).chunk(P)
    arriving[rank].copy_(outgoing[rank])
    plain_run(_pairwise(outgoing, arriving, rank), group)


# ---- all-reduce ----------------------------------------------------------------------------------
#
# A reduce-scatter and then an all-gather, its two phases, make an all-reduce. With the two rings
# above it is ring_all_reduce(). Two other pairs, and two algorithms without phases, take fewer
# steps:
#
#                          how                                   a rank sends   steps       scratch
#     naive                all send everything to all            (P-1) D        1           P D
#     direct               chunks to their ranks, sums to all   2(P-1)/P D      2           D
#     ring                 sums around the ring, then copies    2(P-1)/P D      2(P-1)      2/P D
#     recursive_doubling   sums swapped at distance 1, 2, 4      log2(P) D      log2(P)     2 D
#     halving_doubling     swapped parts halve, then double     2(P-1)/P D      2 log2(P)   3/4 D
#
# Rows with log2(P) need a P that is a power of two. The upper floor runs them on any P, and has an
# algorithm for nodes, which are computers with several ranks each.
#
# In an all-reduce in place, the sum of chunk r takes the place of rank r's chunk r. So algorithms
# keep partial sums in scratch memory, and write to `output` only once no message reads the input
# any more. They change no other tensor.
#
# Replicas of a model rely on identical bits. So a sum is computed on one rank and copied, or it is
# computed on all ranks in the same order.


def _direct_reduce_scatter(chunks, output, combine, rank):
    """Send chunk r to rank r in 1 step. Rank r then reduces all ranks' chunks r, in rank order."""
    P = len(chunks)
    if P == 1:
        output.copy_(chunks[0])
        return
    parts = [chunks[r] if r == rank else torch.empty_like(output) for r in range(P)]
    yield from _pairwise(chunks, parts, rank)
    total = parts[0]
    scratch = torch.empty_like(output)  # for sums, since parts[rank] is the input's own memory
    for r in range(1, P):
        total = combine(total, parts[r], out=output if r == P - 1 else scratch)


def _direct_all_gather(chunks, rank):
    """Send this rank's chunk to every rank, in 1 step."""
    return _pairwise([chunks[rank]] * len(chunks), chunks, rank)


def _halving(chunks, output, combine, rank):
    """Reduce-scatter among 2^k ranks by swapping halves of sums, then quarters, in log2(P) steps.

        rank        0              1              2              3
        step 0   c01: 0+2       c01: 1+3       c23: 0+2       c23: 1+3       (partner = rank xor 2)
        step 1   c0: 0+1+2+3    c1: 0+1+2+3    c2: 0+1+2+3    c3: 0+1+2+3    (partner = rank xor 1)

    The chunks must follow each other in memory, since half of them travel as one message. With
    _doubling() after it, this is Rabenseifner's algorithm.
    """
    while len(chunks) > 1:
        half = len(chunks) // 2
        partner = rank ^ half
        kept, sent = chunks[:half], chunks[half:]
        if rank > partner:
            kept, sent = sent, kept
        own = _joined(kept)
        received = torch.empty_like(own)
        yield [(_joined(sent), partner)], [(received, partner)]
        is_last = half == 1
        total = combine(own, received, out=output if is_last else received)
        # the next step halves these sums, cut where the chunks of the input were
        chunks = total.split_with_sizes([chunk.numel() for chunk in kept])


def _doubling(chunks, rank):
    """All-gather among 2^k ranks by swapping one chunk, then two ..., in log2(P) steps.

        rank        0         1         2         3
        start    0 . . .   . 1 . .   . . 2 .   . . . 3
        step 0   0 1 . .   0 1 . .   . . 2 3   . . 2 3       (partner = rank xor 1)
        step 1   0 1 2 3   0 1 2 3   0 1 2 3   0 1 2 3       (partner = rank xor 2)
    """
    size = 1
    while size < len(chunks):
        start = rank // size * size  # the first of the chunks that this rank has
        own = _joined(chunks[start : start + size])
        start ^= size  # the first of its partner's
        arriving = _joined(chunks[start : start + size])
        yield [(own, rank ^ size)], [(arriving, rank ^ size)]
        size *= 2


def _joined(chunks):
    """View chunks that follow each other in memory as one tensor."""
    length = sum(chunk.numel() for chunk in chunks)
    begin = chunks[0].storage_offset()
    end = chunks[-1].storage_offset() + chunks[-1].numel()
    assert end - begin == length, "there are gaps between the chunks"
    return chunks[0].as_strided((length,), (1,))


def _recursive_doubling(output, input, combine, rank, world_size):
    """All-reduce by swapping sums at distances of 1, 2, 4 ... ranks, in log2(P) steps of D bytes.

        rank       0         1         2         3
        start      0         1         2         3           whose tensors are in a rank's sum
        step 0     0+1       0+1       2+3       2+3         (partner = rank xor 1)
        step 1     0+1+2+3   0+1+2+3   0+1+2+3   0+1+2+3     (partner = rank xor 2)
    """
    total = input
    distance = 1
    while distance < world_size:
        received = torch.empty_like(input)
        yield [(total, rank ^ distance)], [(received, rank ^ distance)]
        out = output if 2 * distance == world_size else received
        # all ranks combine in one order: of +0 and -0, min() returns the first
        if rank & distance:
            total = combine(received, total, out=out)
        else:
            total = combine(total, received, out=out)
        distance *= 2


DOUBLINGS = ("recursive_doubling", "halving_doubling")  # they need a P that is a power of two

_PLAIN_PHASES = {  # name: (reduce-scatter, all-gather)
    "direct": (_direct_reduce_scatter, _direct_all_gather),
    "ring": (_ring_reduce_scatter, _ring_all_gather),
    "halving_doubling": (_halving, _doubling),
}


def _all_reduce(
    name, output, input, combine, rank, P, phases=_PLAIN_PHASES, cut=torch.tensor_split, **options
):
    """All-reduce `input` into `output`, which may be the same memory, by the named algorithm.

    The upper floor has more `phases`, which may have options, and cuts chunks in another way.
    """
    if name == "naive":
        # every rank is sent the whole tensor, as if it were the rank's chunk
        reduce_scatter, _ = phases["direct"]
        yield from reduce_scatter([input] * P, output, combine, rank)
    elif name == "recursive_doubling":
        yield from _recursive_doubling(output, input, combine, rank, P)
    else:
        reduce_scatter, all_gather = phases[name]
        chunks = cut(output, P)
        yield from reduce_scatter(cut(input, P), chunks[rank], combine, rank, **options)
        yield from all_gather(chunks, rank, **options)


def plain_all_reduce(tensor, algorithm="ring", group=None):
    """Sum a contiguous tensor over the group in place, by one of the algorithms above.

    algorithm: a name from the table above; ValueError if P is not a power of two, and it needs one
    """
    rank, P = rank_and_size(group)
    if algorithm in DOUBLINGS and P.bit_count() > 1:
        raise ValueError(f"{algorithm} needs a power of two of ranks, not {P}")
    flat = tensor.view(-1)
    plain_run(_all_reduce(algorithm, flat, flat, torch.add, rank, P), group)


# ---- from the root to all ranks, and from all ranks to the root ----------------------------------


def _tree(rank, root, P):
    """Return this rank's parent and children, farthest first, in a binomial tree of depth log2(P).

    Ranks are numbered from the root on. Clear the lowest 1 in a number's binary form, and it is the
    number of its parent: 7 (111) has the parent 6 (110), 6 has 4 (100), and 4 has 0. For P = 8:

        0 --- 4 --- 6 --- 7
        |     |
        |     5
        |
        2 --- 3
        |
        1

    So the children of a number are at distances 1, 2, 4 ... below its lowest 1.
    """
    number = (rank - root) % P
    children = []
    distance = 1
    while distance < P and not number & distance:
        if number + distance < P:
            children.insert(0, (rank + distance) % P)
        distance *= 2
    parent = None if number == 0 else (rank - distance) % P
    return parent, children


def _tree_broadcast(tensor, rank, root, P):
    """Receive the tensor from this rank's parent and pass it on to its children.

    This is for short tensors. Long ones would travel quicker by a scatter and an all-gather, in
    which the root sends about 2 D, and not log2(P) D.
    """
    parent, children = _tree(rank, root, P)
    if parent is not None:
        yield [], [(tensor, parent)]
    yield [(tensor, child) for child in children], []


def _tree_reduce(tensor, combine, rank, root, P):
    """Add the sums of this rank's children, nearest first, and pass the result to its parent.

    Sums arrive in scratch memory, at the root in log2(P) D.
    """
    parent, children = _tree(rank, root, P)
    sums = [torch.empty_like(tensor) for _ in children]
    yield [], list(zip(sums, children))
    total = tensor
    for received in reversed(sums):
        total = combine(total, received, out=tensor if parent is None else received)
    if parent is not None:
        yield [(total, parent)], []


def _scatter(output, inputs, rank, root):
    """Send the root's inputs[r] to every other rank r, in 1 step."""
    if rank != root:
        yield [], [(output, root)]
        return
    output.copy_(inputs[rank])
    yield [(tensor, peer) for peer, tensor in enumerate(inputs) if peer != root], []


def _gather(outputs, input, rank, root):
    """Receive the input of every other rank r in the root's outputs[r], in 1 step."""
    if rank != root:
        yield [(input, root)], []
        return
    outputs[rank].copy_(input)
    yield [], [(tensor, peer) for peer, tensor in enumerate(outputs) if peer != root]


# ---- the cost ------------------------------------------------------------------------------------


def reduce_scatter_bytes(nbytes, world_size):
    """Return the bytes that a rank sends to reduce-scatter or all-gather a tensor of `nbytes`."""
    return nbytes * (world_size - 1) // world_size


def all_reduce_bytes(nbytes, world_size):
    """Return the bytes that a rank sends to all-reduce `nbytes` on a ring, the fewest possible."""
    return 2 * nbytes * (world_size - 1) // world_size


# ==== derivatives: the backward of a collective is a collective ===================================
#
# Layers that are split over a group call collectives in forward, and autograd must follow them.
# This floor is needed from tensor_parallel.py on. It rests on four collectives of the upper floor,
# which do what their plain forms do, for tensors of any strides: all_reduce(), all_gather_single(),
# reduce_scatter_single() and all_to_all_single().
#
# If ranks use x differently (each multiplies x by its own columns of W, say), each has only a part
# of x's gradient, and the parts are summed. If all ranks use x identically, each already has the
# whole gradient, and a sum would count it once for every rank. For example, x = 3 is multiplied by
# w = 2 on rank 0 and by w = 5 on rank 1, and y is the sum of the products. Gradients are computed
# from the last row up, beginning with y's, which is 1:
#
#                                tensor on ranks 0, 1         gradient on ranks 0, 1
#     x                             3      3   invariant         7      7   invariant
#     c = copy_to_group(x)          3      3   replicated        2      5   partial
#     p = w * c                     6     15   partial           1      1   replicated
#     y = reduce_from_group(p)     21     21   invariant         1      1   invariant
#
# A tensor has one of four types over a group, as in Meta's spmd_types, and so has its gradient:
#
#     type          the ranks hold                   a rank's gradient is      the gradient's type
#     invariant     equal tensors, used identically  whole, equal on all       invariant
#     replicated    equal tensors, used differently  a part; the sum is meant  partial
#     varying       tensors of their own             that of its own tensor    varying
#     partial       parts; the sum is meant          the sum's, equal on all   replicated
#
# So the gradient of a replicated tensor is partial, and that of a partial tensor is replicated.
# copy_to_group() makes a replicated tensor of an invariant one, so its backward makes an invariant
# gradient of a partial one. It is an all-reduce: 2 + 5 = 7. The tensor p is partial since its sum
# is meant. If the products themselves were meant, it would be varying, with the same numbers.
#
# _PAIRS has the types of the functions below, which change no input. Backward sends messages, too,
# and hangs if x requires a gradient on some ranks only. Docstrings of other files have the first
# letters of types, such as "V, I -> V" for two inputs and the output. tests/test_adjoint.py checks
# them.


def _identity(x, group):
    return x.view_as(x)


def _all_reduced(x, group):
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    all_reduce(x, group=group, output=output)
    return output


def _all_gathered(x, dim, group):
    output = x.new_empty(dist.get_world_size(group), *x.shape)
    all_gather_single(output, x, group)
    # flatten() may return a view, which autograd would not let anybody change in place
    return output.movedim(0, dim).flatten(dim, dim + 1).detach()


def _own_chunk(x, dim, group):
    chunks = x.unflatten(dim, (dist.get_world_size(group), -1))
    return chunks.select(dim, dist.get_rank(group)).clone(memory_format=torch.contiguous_format)


def _reduce_scattered(x, dim, group):
    chunks = x.unflatten(dim, (dist.get_world_size(group), -1)).movedim(dim, 0)
    output = x.new_empty(chunks.shape[1:])
    reduce_scatter_single(output, chunks, group=group)
    return output


def _all_to_all(x, output_split_sizes, input_split_sizes, group):
    rows = len(x) if output_split_sizes is None else sum(output_split_sizes)
    output = x.new_empty(rows, *x.shape[1:])
    all_to_all_single(output, x, output_split_sizes, input_split_sizes, group)
    return output


_PAIRS = {  # name: (forward, backward), with the types of x and of the result
    "copy_to_group": (_identity, _all_reduced),  # invariant -> replicated; Megatron's f
    "reduce_from_group": (_all_reduced, _identity),  # partial -> invariant; Megatron's g
    "scatter_to_group": (_own_chunk, _all_gathered),  # invariant -> varying
    "gather_from_group": (_all_gathered, _own_chunk),  # varying -> invariant
    "all_gather_to_group": (_all_gathered, _reduce_scattered),  # varying -> replicated
    "reduce_scatter_to_group": (_reduce_scattered, _all_gathered),  # partial -> varying
    # varying -> varying
    "all_to_all_in_group": (_all_to_all, lambda x, a, b, group: _all_to_all(x, b, a, group)),
}


class _Conjugate(torch.autograd.Function):
    """Apply pair[0] in forward and pair[1] in backward; a double backward swaps them again."""

    @staticmethod
    def forward(ctx, x, pair, *arguments):
        ctx.pair, ctx.arguments = pair, arguments
        return pair[0](x, *arguments)

    @staticmethod
    def backward(ctx, grad_output):
        gradient = _Conjugate.apply(grad_output, ctx.pair[::-1], *ctx.arguments)
        return gradient, None, *[None for _ in ctx.arguments]


def copy_to_group(x, group=None):
    """Return a view of x that must not be changed. Backward sums the gradients."""
    return _Conjugate.apply(x, _PAIRS["copy_to_group"], group)


def reduce_from_group(x, group=None):
    """Return the sum of all ranks' x. In backward each x gets the sum's gradient."""
    return _Conjugate.apply(x, _PAIRS["reduce_from_group"], group)


def scatter_to_group(x, dim, group=None):
    """Return this rank's chunk of x along `dim`. Every rank passes the same x."""
    return _Conjugate.apply(x, _PAIRS["scatter_to_group"], dim % x.ndim, group)


def gather_from_group(x, dim, group=None):
    """Join every rank's x along `dim`, for ranks that all use the result identically."""
    return _Conjugate.apply(x, _PAIRS["gather_from_group"], dim % x.ndim, group)


def all_gather_to_group(x, dim, group=None):
    """Join every rank's x along `dim`, for ranks that use the result differently."""
    return _Conjugate.apply(x, _PAIRS["all_gather_to_group"], dim % x.ndim, group)


def reduce_scatter_to_group(x, dim, group=None):
    """Return this rank's chunk, along `dim`, of the sum of every rank's x."""
    return _Conjugate.apply(x, _PAIRS["reduce_scatter_to_group"], dim % x.ndim, group)


def all_to_all_in_group(x, output_split_sizes=None, input_split_sizes=None, group=None):
    """Exchange the rows of x as all_to_all_single() does."""
    splits = output_split_sizes, input_split_sizes
    return _Conjugate.apply(x, _PAIRS["all_to_all_in_group"], *splits, group)


# ==== upper floor =================================================================================
#
# plain_run() waits for each batch before it goes on, and needs an idle group and tensors without
# gaps. On this floor, collectives run beside the caller's computation, take tensors of any strides,
# keep several messages under way, and choose an algorithm by size. A reader who wants the
# techniques alone may go on with ddp.py. What one calls:
#
#     broadcast(tensor, src)                 all_reduce(tensor, op)
#     reduce(tensor, dst, op)                reduce_scatter_single(output, input, op)
#     scatter(tensor, scatter_list, src)     all_gather_single(output, input)
#     gather(tensor, gather_list, dst)       all_gather(tensor_list, tensor)
#     barrier()                              all_to_all_single(output, input)
#     exchange(sends, receives)
#
# All take a `group`, and all but barrier() take async_op: with async_op=True the call returns a
# Work, to wait() for.
#
# The sections "algorithms" come first: more algorithms, which plain_run() can run, too, and the
# choice of one. Then "runtime" has what a call goes through, where each function calls the one
# below it:
#
#     broadcast(tensor)           makes a Work, and a plan, which returns the algorithms to run
#       launch()                  calls run() at once, or in the group's queue
#         run()                   makes tensors contiguous, and copies results back
#           take_turns()          does what plain_run() does, for several algorithms at once
#             post()              does what plain_exchange() does, but does not wait
#               group.send()      and group.recv(), which are torch's; NCCL: post_batch()

# ---- algorithms: segments ------------------------------------------------------------------------
#
# A long tensor is cut into segments, each with an algorithm of its own. One segment is summed while
# the next ones travel, and scratch memory is needed only for the few that are under way.

ALIGNMENT = 128  # bytes; a GPU reads 128 at once


def cut_aligned(flat, parts, unit=ALIGNMENT):
    """Cut a flat tensor into parts, each of which begins at a multiple of `unit` bytes.

    10 x 128 bytes become four parts of 2, 3, 2 and 3 x 128 bytes. Parts may be empty.
    """
    if parts == 1:
        return [flat]
    elements = unit // flat.itemsize
    units = math.ceil(len(flat) / elements)
    return flat.tensor_split([units * part // parts * elements for part in range(1, parts)])


def segments_of(chunks, number):
    """Cut the chunks of all ranks alike. Return the list of each segment's parts of the chunks."""
    return list(zip(*(cut_aligned(chunk, number) for chunk in chunks)))


# ---- algorithms: sums ----------------------------------------------------------------------------

_REDUCTIONS = {  # op: (for two tensors, for a tensor and a dim)
    ReduceOp.SUM: (torch.add, torch.sum),
    ReduceOp.AVG: (torch.add, torch.sum),  # run() divides at the end
    ReduceOp.PRODUCT: (torch.mul, torch.prod),
    ReduceOp.MIN: (torch.minimum, torch.amin),
    ReduceOp.MAX: (torch.maximum, torch.amax),
}


class Reduction:
    """What algorithms call as combine(a, b, out=...), for a ReduceOp.

    rows: reduces the rows of a matrix, by rows(matrix, 0, out=...)
    scratch: matrices whose rows have been reduced, which the operation's next segments reuse
    """

    def __init__(self, op, dtype):
        if op not in _REDUCTIONS:
            raise ValueError(f"op={op} is not supported; SUM, AVG, PRODUCT, MIN and MAX are")
        if op == ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(f"op=AVG of {dtype}: the mean may be no integer")
        if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_complex:
            raise ValueError(f"op={op} of {dtype}: complex numbers have no order")
        self.pair, self.rows = _REDUCTIONS[op]
        self.scratch = []

    def __call__(self, a, b, out):
        return self.pair(a, b, out=out)


def reduce_directly(chunks, output, combine, rank):
    """Reduce-scatter in 1 step, on a GPU by one kernel."""
    reduce_scatter = _reduce_at_once if output.is_cuda else _direct_reduce_scatter
    return reduce_scatter(chunks, output, combine, rank)


def _reduce_at_once(chunks, output, combine, rank):
    """Do what _direct_reduce_scatter() does, on a GPU, with one kernel. It rounds 16-bit sums once.

    Each kernel reads and writes memory, and costs the host a launch. So the parts arrive as rows of
    a matrix, which one kernel reduces, and not P-1 kernels.
    """
    if len(chunks) == 1:
        output.copy_(chunks[0])
        return
    if combine.scratch:
        matrix = combine.scratch.pop()
    else:
        # Later segments reuse the matrix. By cut_aligned(), their chunks may be longer than this
        # one by a unit of ALIGNMENT bytes, so a row has room for one unit more.
        unit = ALIGNMENT // output.itemsize
        units = math.ceil(len(output) / unit) + 1
        matrix = output.new_empty(len(chunks), units * unit)
    rows = matrix[:, : len(output)]  # row r: from rank r
    yield from _pairwise(chunks, rows.unbind(), rank)
    rows[rank].copy_(chunks[rank])
    combine.rows(rows, 0, out=output)
    combine.scratch.append(matrix)  # NCCL writes there only after the kernel has read it


# ---- algorithms: any number of ranks, and nodes --------------------------------------------------
#
# With nodes of L ranks each, messages inside a node are quicker than those between nodes:
#
#                          how                                   a rank sends   steps       scratch
#     hierarchical         direct in nodes, rings across them   2(P-1)/P D      2 P/L       D + D/P
#
# Of the bytes that a rank sends in one of its phases, (L-1)/L D stay in its node and (P/L-1)/P D
# leave it. Steps and scratch are those for L > 1.


def all_reduce_segment(name, output, input, combine, rank, P, **options):
    """Do what _all_reduce() does for any P, in aligned chunks, and on a GPU with few kernels."""
    if name in DOUBLINGS and P.bit_count() > 1:
        return _with_extra_ranks(name, output, input, combine, rank, P)
    return _all_reduce(name, output, input, combine, rank, P, PHASES, cut_aligned, **options)


def _with_extra_ranks(name, output, input, combine, rank, P):
    """Run a doubling algorithm among the first 2^k of P ranks, for the largest 2^k <= P.

    Each rank r beyond these sends its tensor to rank r - 2^k, which adds it to its own beforehand,
    in D more bytes of scratch memory, and sends the sum back at the end.
    """
    power = 1 << (P.bit_length() - 1)
    if rank >= power:
        yield [(input, rank - power)], []
        yield [], [(output, rank - power)]
        return
    extra_rank = rank + power
    if extra_rank < P:
        received = torch.empty_like(input)
        yield [], [(received, extra_rank)]
        input = combine(input, received, out=received)
    yield from all_reduce_segment(name, output, input, combine, rank, power)
    if extra_rank < P:
        yield [(output, extra_rank)], []


def _hierarchical_reduce_scatter(chunks, output, combine, rank, ranks_per_node):
    """Reduce-scatter inside nodes of L ranks, then on rings across the P/L nodes, in P/L steps.

    The sums of L chunks are meant for each node: those of chunks n L to n L + L - 1 for node n.
    Inside a node, local rank i sums the i-th chunk of every node over the node's ranks. Then the
    local ranks i of all nodes add these sums on a ring. With L = 2 and two nodes:

        rank       0               1               2               3
        inside     c0 c2: 0+1      c1 c3: 0+1      c0 c2: 2+3      c1 c3: 2+3
        across     c0: 2+3+0+1     c1: 2+3+0+1     c2: 0+1+2+3     c3: 0+1+2+3
    """
    P = len(chunks)
    L = ranks_per_node
    node, local_rank = divmod(rank, L)
    sums = [torch.empty_like(chunk) for chunk in chunks[local_rank::L]]  # one for each node
    inside = [
        reduce_directly(chunks[n * L : n * L + L], sums[n], combine, local_rank)
        for n in range(P // L)
    ]
    yield from _among(range(node * L, node * L + L), inside)
    across = _ring_reduce_scatter(sums, output, combine, node)
    yield from _among(range(local_rank, P, L), [across])


def _hierarchical_all_gather(chunks, rank, ranks_per_node):
    """All-gather along rings across nodes, then directly inside each node, in P/L steps."""
    P = len(chunks)
    L = ranks_per_node
    node, local_rank = divmod(rank, L)
    across = _ring_all_gather(chunks[local_rank::L], node)
    yield from _among(range(local_rank, P, L), [across])
    inside = [_direct_all_gather(chunks[n * L : n * L + L], local_rank) for n in range(P // L)]
    yield from _among(range(node * L, node * L + L), inside)


def _among(ranks, algorithms):
    """Run algorithms of equally many steps together, among `ranks`, which they number from 0."""
    # zip() would stop when the first one ends, and not resume the others for their last sums
    for steps in zip_longest(*algorithms):
        sends, receives = [], []
        for outgoing, arriving in steps:
            sends += [(tensor, ranks[number]) for tensor, number in outgoing]
            receives += [(tensor, ranks[number]) for tensor, number in arriving]
        yield sends, receives


PHASES = _PLAIN_PHASES | {  # name: (reduce-scatter, all-gather)
    "direct": (reduce_directly, _direct_all_gather),
    "hierarchical": (_hierarchical_reduce_scatter, _hierarchical_all_gather),
}
ALGORITHMS = ("naive", "recursive_doubling", *PHASES)


# ---- algorithms: cost and choice -----------------------------------------------------------------
#
# Every step costs time, and so does every byte, so short tensors are quickest with few steps, and
# long ones with few bytes. choose() takes the algorithm with the least
#
#     steps * (the bytes that travel in the time of a step) + bytes sent
#
# It chooses among these, where halving stands for halving_doubling, and hierarchical is left out
# unless there are several nodes of several ranks:
#
#                            for an all-reduce                    for a reduce-scatter or all-gather
#     NCCL, one node         naive (below 64 KB), direct          direct
#     NCCL, several nodes    ring, hierarchical, the doublings    ring, hierarchical, halving (1)
#     gloo, below 2 MB       ring, hierarchical, the doublings    ring, hierarchical, halving (2)
#     gloo, from 2 MB on     ring, hierarchical                   ring, hierarchical
#
#     (1) only if P is a power of two     (2) for any other P, direct in its place
#
# NCCL has no direct there, since each rank would need a connection to every other one. If P is a
# power of two, halving always wins over a ring: it sends as many bytes in fewer steps. But its
# scratch is 3/4 of the tensor, so between nodes of GPUs long tensors are better passed in buckets.
#
# The constants are fixed, not measured at start-up, so that results do not depend on timing. They
# were measured for gloo with 2 to 8 ranks on 2 cores, and estimated for NCCL.
#
# NCCL's own all-reduce has more to choose from: two binary trees, each for half of the tensor, with
# about 2 log2(P) steps and the bytes of a ring, and sums in a switch, with half of these bytes.

NCCL_STEP_BYTES = 1 << 22  # a batch takes the host 60 us, in which 400 Gbit/s carry 3 MB or more
GLOO_STEP_BYTES = 1 << 17  # a step takes 0.1 ms, and a machine's memory carries 1 to 2 GB/s
GLOO_STEP_BYTES_BETWEEN_NODES = 1 << 14  # 0.1 ms at 1 Gbit/s
ONE_STEP_BYTES = 1 << 16  # NCCL in one node: shorter tensors take naive's 1 step, not direct's 2
LONG_BYTES = 1 << 21  # gloo: longer tensors take rings, since a chunk fits a core's cache

SEGMENT = 1 << 21  # gloo: the most bytes of a chunk in one message, measured, see also `window`
DIRECT_BYTES = 1 << 26  # NCCL: the longest segment of a full tensor; its parts take as much scratch


def all_reduce_cost(algorithm, nbytes, world_size, ranks_per_node=1, rank=0):
    """Return (steps, bytes that a rank sends) of an all-reduce, exact if all chunks are equal."""
    D = nbytes
    P = world_size
    nodes = P // ranks_per_node
    if P == 1:
        return 0, 0
    rounds = P.bit_length() - 1
    power = 1 << rounds
    if algorithm in DOUBLINGS and rank >= power:
        return 2, D  # another rank computes for this one: the tensor goes there, the sum comes back
    extra = rank + power < P  # whether this rank computes for another one
    least = all_reduce_bytes(D, P)
    return {
        "naive": (1, (P - 1) * D),
        "direct": (2, least),
        "ring": (2 * (P - 1), least),
        "recursive_doubling": (rounds + 2 * extra, (rounds + extra) * D),
        "halving_doubling": (2 * rounds + 2 * extra, all_reduce_bytes(D, power) + extra * D),
        "hierarchical": (2 * (nodes - 1) + 2 * (ranks_per_node > 1), least),
    }[algorithm]


@lru_cache(1 << 12)  # the sizes of a training step recur in the next one
def choose(nbytes, world_size, ranks_per_node, on_nccl, both_phases=False):
    """Return the name of the quickest algorithm for an all-reduce, or for one of its two phases.

    both_phases: False means a reduce-scatter or an all-gather alone
    """
    nodes = world_size // ranks_per_node
    if on_nccl and nodes == 1:  # P-1 messages leave at once, so one step is the quickest phase
        return "naive" if both_phases and nbytes < ONE_STEP_BYTES else "direct"
    names = ["ring"]
    if 1 < nodes < world_size:
        names.append("hierarchical")
    if on_nccl or nbytes < LONG_BYTES:
        if both_phases:
            names += DOUBLINGS
        elif world_size.bit_count() == 1:
            names.append("halving_doubling")
        elif not on_nccl:
            names.append("direct")
    step_bytes = NCCL_STEP_BYTES
    if not on_nccl:
        step_bytes = GLOO_STEP_BYTES if nodes == 1 else GLOO_STEP_BYTES_BETWEEN_NODES

    def cost(name):  # of both phases; one costs half of it, whatever the name
        steps, sent = all_reduce_cost(name, nbytes, world_size, ranks_per_node)
        if name == "hierarchical":
            sent //= ranks_per_node  # no more leaves the node, if each rank has a network card
        return steps * step_bytes + sent

    return min(names, key=cost)


def choose_segments(nbytes, P, ranks_per_node, on_nccl, both_phases=False, name="auto"):
    """Return (name, number of segments, keyword arguments) of a collective's algorithm.

    Scratch memory is at most 16 MB for a ring on gloo, 8 MB for each rank of the group for
    hierarchical on gloo, and 128 MB for direct on NCCL. Algorithms that are not cut take what the
    tables say: naive, the doublings, and on NCCL the ring.
    """
    if P == 1:
        return "direct", 1, {}  # which copies
    if name == "auto":
        name = choose(nbytes, P, ranks_per_node, on_nccl, both_phases)
    options = {"ranks_per_node": ranks_per_node} if name == "hierarchical" else {}
    if name in ("direct", "hierarchical") or (name == "ring" and not on_nccl):
        segment_bytes = DIRECT_BYTES if on_nccl else P * SEGMENT
        return name, max(1, math.ceil(nbytes / segment_bytes)), options
    # halving_doubling needs the chunks of a whole tensor side by side, see _joined(). For the
    # others segments would gain little: on gloo choose() takes them only for short tensors, and
    # NCCL runs the batches of a group one by one.
    return name, 1, options


# ---- runtime: the collectives --------------------------------------------------------------------
#
# A Work is one call: its group, this rank, whether it is asynchronous. A plan is a function of the
# flat tensors, which returns the algorithms to run: one for each segment of all_gather_single(),
# reduce_scatter_single() and all_reduce(), and otherwise a single one. A root is src or dst, a
# global rank, or group_src or group_dst, a rank of the group.
#
# Names, arguments and results are those of torch.distributed (all_gather_into_tensor is its older
# name of all_gather_single), with these differences:
#
#     order        the collectives of a group run one after the other for each device, whichever
#                  streams call them. One thread at a time may call them. All ranks must use several
#                  groups in one order, or on NCCL hosts could wait for one another, see _Stream
#     CUDA graphs  cannot hold them, since the host asks which have ended
#     tensors      with gaps are copied, and not refused
#     AVG          divides the sum, so fp16 may overflow where NCCL's, which divides first, does not
#     MIN, MAX     are NaN where a tensor has a NaN
#     reduce       changes only the root's tensor
#     broadcast    has a default for the root, global rank 0, and so has reduce
#     all_gather   takes unequal lengths, also on gloo


def broadcast(tensor, src=None, group=None, async_op=False, group_src=None):
    """Copy the root's `tensor` to every rank, in place."""
    work = Work("broadcast", group, tensor, async_op)
    root = find_root(work, src, group_src)
    plan = lambda flat: [_tree_broadcast(flat, work.rank, root, work.world_size)]
    return launch(work, plan, [tensor], [], partial(call_backend, work, group_src=root))


def all_gather_single(output, input, group=None, async_op=False):
    """Collect the `input` of all ranks in `output`, which is P times as long, in rank order."""
    work = Work("all_gather_single", group, output, async_op)
    rank = work.rank
    P = work.world_size
    check_fits(output, input, P * input.numel())

    def plan(output, input):
        name, segments, options = choose_segments(output.nbytes, *work.network)
        _, all_gather = PHASES[name]
        chunks = output.chunk(P)
        if chunks[rank].data_ptr() != input.data_ptr():  # else `input` is this chunk of `output`
            chunks[rank].copy_(input)
        return [all_gather(parts, rank, **options) for parts in segments_of(chunks, segments)]

    return launch(work, plan, [output], [input], partial(call_backend, work))


def reduce_scatter_single(output, input, op=ReduceOp.SUM, group=None, async_op=False):
    """Reduce `input` over the group. Rank r keeps chunk r in `output`, which is 1/P as long."""
    combine = Reduction(op, input.dtype)
    work = Work("reduce_scatter_single", group, output, async_op, op)
    rank = work.rank
    P = work.world_size
    check_fits(output, input, input.numel() / P)

    def plan(output, input):
        name, segments, options = choose_segments(input.nbytes, *work.network)
        reduce_scatter, _ = PHASES[name]
        outputs = cut_aligned(output, segments)
        return [
            reduce_scatter(parts, output, combine, rank, **options)
            for parts, output in zip(segments_of(input.chunk(P), segments), outputs)
        ]

    return launch(work, plan, [output], [input], partial(call_backend, work))


def all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op=False, algorithm="auto", output=None):
    """Reduce `tensor` over the group, in place or into `output`. All ranks get the same bits.

    op: SUM, AVG (not of integers), PRODUCT, or MIN and MAX (not of complex numbers)
    algorithm: a name from the table under "all-reduce", "hierarchical", or "auto": what choose()
        returns
    """
    if algorithm not in ("auto", *ALGORITHMS):
        raise ValueError(f"{algorithm=} is none of auto, {', '.join(ALGORITHMS)}")
    combine = Reduction(op, tensor.dtype)
    work = Work("all_reduce", group, tensor, async_op, op)
    rank = work.rank
    P = work.world_size
    inputs = [] if output is None else [tensor]
    output = tensor if output is None else output
    check_fits(output, tensor, tensor.numel())

    def plan(output, input=None):
        name, segments, options = choose_segments(
            output.nbytes, *work.network, both_phases=True, name=algorithm
        )
        outputs = cut_aligned(output, segments, P * ALIGNMENT)  # so that their chunks are aligned
        inputs = outputs if input is None else cut_aligned(input, segments, P * ALIGNMENT)
        return [
            all_reduce_segment(name, output, input, combine, rank, P, **options)
            for output, input in zip(outputs, inputs)
        ]

    def backend(output, input=None):
        if input is not None:
            output.copy_(input)
        call_backend(work, output)

    return launch(work, plan, [output], inputs, backend)


def all_gather(tensor_list, tensor, group=None, async_op=False):
    """Copy `tensor` of rank r into tensor r of every rank's list, for all r, in 1 step.

    Lengths may differ between ranks, but tensor r must have one length in every list. A rank checks
    only its own, and all dtypes.
    """
    work = Work("all_gather", group, tensor, async_op)
    rank = work.rank
    outputs = one_per_rank(work, tensor_list)
    for r, output in enumerate(outputs):
        check_fits(output, tensor, tensor.numel() if r == rank else output.numel())

    def plan(*flat):
        *chunks, input = flat
        chunks[rank].copy_(input)
        return [_direct_all_gather(chunks, rank)]

    backend = lambda *flat: call_backend(work, [*flat[:-1]], flat[-1])
    equal = len({output.numel() for output in outputs}) == 1  # gloo's takes no other lengths
    return launch(work, plan, outputs, [tensor], backend if equal else None)


def all_to_all_single(
    output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
):
    """Send the i-th piece of `input` to rank i, and receive rank i's piece as the i-th of `output`.

    *_split_sizes: the number of rows (dim 0) in each rank's piece; None or [] means equally many
    """
    work = Work("all_to_all_single", group, output, async_op)
    rank = work.rank
    received = _split_sizes(output, output_split_sizes, work.world_size)
    sent = _split_sizes(input, input_split_sizes, work.world_size)
    if (output_split_sizes or input_split_sizes) and output.numel() and input.numel():
        check_fits(output, input, len(output) * input.shape[1:].numel())  # rows of one width
    # a rank's piece for itself has one size: received[rank] == sent[rank]
    check_fits(output, input, output.numel() - received[rank] + sent[rank])

    def plan(output, input):
        outputs = output.split_with_sizes(received)
        inputs = input.split_with_sizes(sent)
        outputs[rank].copy_(inputs[rank])
        return [_pairwise(inputs, outputs, rank)]

    splits = {"output_split_sizes": received, "input_split_sizes": sent}
    return launch(work, plan, [output], [input], partial(call_backend, work, **splits))


def _split_sizes(tensor, rows_of_ranks, world_size):
    """Convert each rank's number of rows (None or []: equally many) to its number of elements."""
    rows = tensor.shape[0]
    sizes = rows_of_ranks or [rows // world_size] * world_size
    if len(sizes) != world_size or sum(sizes) != rows:
        raise ValueError(f"{rows} rows are not split for world_size={world_size} by sizes {sizes}")
    return [size * tensor.shape[1:].numel() for size in sizes]


def reduce(tensor, dst=None, op=ReduceOp.SUM, group=None, async_op=False, group_dst=None):
    """Reduce `tensor` over the group into the root's tensor. The other ranks keep theirs."""
    combine = Reduction(op, tensor.dtype)
    work = Work("reduce", group, tensor, async_op, op)
    root = find_root(work, dst, group_dst)
    plan = lambda flat: [_tree_reduce(flat, combine, work.rank, root, work.world_size)]
    if work.rank == root:
        return launch(work, plan, outputs=[tensor])
    return launch(work, plan, outputs=[], inputs=[tensor])


def scatter(tensor, scatter_list=None, src=None, group=None, async_op=False, group_src=None):
    """Copy tensor r of the root's scatter_list into `tensor` of rank r, for all r.

    Only the root passes a list, with a tensor for each rank, all of the same length and dtype.
    """
    work = Work("scatter", group, tensor, async_op)
    root = find_root(work, src, group_src)
    inputs = list_of_root(work, root, scatter_list, tensor)
    plan = lambda output, *inputs: [_scatter(output, inputs, work.rank, root)]
    backend = lambda output, *inputs: call_backend(work, output, [*inputs], group_src=root)
    return launch(work, plan, [tensor], inputs, backend)


def gather(tensor, gather_list=None, dst=None, group=None, async_op=False, group_dst=None):
    """Copy `tensor` of rank r into tensor r of the root's gather_list, for all r. See scatter()."""
    work = Work("gather", group, tensor, async_op)
    root = find_root(work, dst, group_dst)
    outputs = list_of_root(work, root, gather_list, tensor)
    plan = lambda *flat: [_gather(flat[:-1], flat[-1], work.rank, root)]
    backend = lambda *flat: call_backend(work, flat[-1], [*flat[:-1]], group_dst=root)
    return launch(work, plan, outputs, [tensor], backend)


def barrier(group=None):
    """Return when every rank of the group has called it."""
    token = torch.zeros(1, dtype=torch.uint8, device=membership(group, "barrier").device)
    all_reduce(token, group=group)
    token.tolist()  # on CUDA the host waits here


def find_root(work, global_rank, group_rank):
    """Return the group rank of the root, given as either rank. The default is global rank 0."""
    if group_rank is None:
        global_rank = global_rank or 0
        if global_rank not in work.ranks:
            ranks = f"the group's ranks {work.ranks}"
            raise ValueError(f"src or dst={global_rank} is not among {ranks}")
        return work.ranks.index(global_rank)
    given = f"group_src or group_dst={group_rank}"
    if global_rank is not None:
        raise ValueError(f"{work.name} got {given} besides src or dst={global_rank}")
    if not 0 <= group_rank < work.world_size:
        raise ValueError(f"{given} is not a rank of a group of {work.world_size}")
    return group_rank


def list_of_root(work, root, tensors, like):
    """Return the root's list of tensors, which must be as long as `like`; [] on other ranks."""
    if work.rank != root:
        if tensors:
            got = f"{work.name} got a list on rank {work.rank} of the group"
            raise ValueError(f"{got}; only the root, rank {root}, has one")
        return []
    tensors = one_per_rank(work, tensors)
    for tensor in tensors:
        check_fits(tensor, like, like.numel())
    return tensors


def one_per_rank(work, tensors):
    """Return the list of tensors, or raise ValueError unless it has one for each rank."""
    tensors = tensors or []
    if len(tensors) != work.world_size:
        got = f"{work.name} got a list of {len(tensors)} tensors"
        raise ValueError(f"{got}, not world_size={work.world_size}")
    return tensors


# ---- runtime: a call in its turn -----------------------------------------------------------------
#
# A group's collectives run one by one, and read their inputs when their turn comes. All ranks must
# call them in one order. Those with async_op, and those that are called while others are pending,
# go to the group's queue:
#
#     caller    all_reduce(async_op=True)    computes something else    wait()    uses the sum
#     queue                 messages, sums, messages, sums ...
#
# For gloo the queue is a thread, and wait() blocks until the task has ended. For NCCL it is a CUDA
# stream, whose kernels run beside those of the caller's stream, and wait() makes the caller's
# stream wait.

# A task in a queue: finish() waits for it, and is_completed() tells whether it has ended.
Pending = namedtuple("Pending", "finish is_completed")
DONE = Pending(lambda: None, lambda: True)


class Work:
    """One call that sends messages. Its caller may wait for it.

    name: of the function, such as "all_reduce"; group: its process group; op: its ReduceOp
    rank, world_size: of this process in the group; ranks: the global ranks of the group's members
    async_op: whether the call may return before the messages are complete
    members: the group's Membership; queue: the one for the tensor's device
    network, uses_backend: the group's settings at the time of the call. A queue may run it after
        they have been changed, and other ranks' queues before, so all ranks go by the call
    pending: the task in this queue that wait() finishes
    listeners: see observe()
    """

    pending = DONE

    def __init__(self, name, group, tensor=None, async_op=False, op=None):
        self.name = name
        self.group = group or dist.group.WORLD
        self.async_op = async_op
        self.op = op
        self.members = membership(self.group, name)
        self.rank, self.world_size = self.members.place
        self.ranks = self.members.ranks
        self.queue = self.members.queue_for(self.group, tensor)
        self.network = self.world_size, self.members.ranks_per_node, self.queue.on_nccl
        self.uses_backend = self.members.uses_backend
        self.listeners = tuple(LISTENERS)

    def tell(self, event, *messages):
        """Tell the listeners of an event. observe() lists the events."""
        for listener in self.listeners:
            listener(event, self, *messages)

    def wait(self):
        """Wait for the operation, or raise its error. On NCCL only the current stream waits."""
        self.tell("wait")
        try:
            self.pending.finish()
        finally:
            self.tell("waited")
        self.pending = DONE  # let go of the tensors

    def is_completed(self):
        """Return whether the operation has completed or failed; False for a pending exchange()."""
        return self.pending.is_completed()


def launch(work, plan, outputs, inputs=(), backend=None):
    """Run a collective at once, or in the group's queue. Return its Work if it is asynchronous.

    One rank may run a call at once that another one queues. In both cases a rank posts the group's
    messages in the order of its calls, which is the same on all ranks.

    plan: a function of all outputs and inputs, flat, which returns the algorithms to run
    backend: a function of the same tensors, which calls the backend's own collective
    """
    task = partial(run, work, plan, outputs, inputs, backend)
    with only_caller(work):
        work.tell("begin")
        queue = work.queue
        if (work.async_op and work.world_size > 1) or not queue.last.is_completed():
            work.pending = queue.submit(task, (*outputs, *inputs))
        else:  # nothing is pending; streams and NCCL keep the order of calls that ran at once
            task()
            queue.note_launch()
        if not work.async_op:
            work.pending.finish()  # if the queue has it
    return work if work.async_op else None


def run(work, plan, outputs, inputs, backend):
    """Run a collective on flat, contiguous tensors, and copy what they hold to the outputs."""
    try:
        flat = [flat_memory(tensor) for tensor in (*outputs, *inputs)]
        if backend and work.uses_backend:
            backend(*flat)
        else:
            take_turns(plan(*flat), work)
        if work.op == ReduceOp.AVG and outputs:
            flat[0].div_(work.world_size)  # the only output: the sum
        for output, result in zip(outputs, flat):
            if not is_memory(output):  # then the result is in a copy
                output.detach().copy_(result.view(output.shape))
    finally:
        work.tell("end")


def flat_memory(tensor):
    """Return the tensor, flat and without its graph, or a copy if is_memory() is false."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()


def take_turns(algorithms, work):
    """Run algorithms side by side. The one that posted its messages first continues first.

    All ranks keep this order, so each receives messages in the order in which its peer sends them.
    """
    waiting = deque(algorithms)
    under_way = deque()  # (algorithm, function that waits for its messages)
    while waiting or under_way:
        if waiting and len(under_way) < work.queue.window:
            algorithm = waiting.popleft()
        else:
            algorithm, await_messages = under_way.popleft()
            await_messages()
            del await_messages  # it holds the tensors of a batch that is complete
        step = next(algorithm, None)
        if step is not None:
            under_way.append((algorithm, post(work, *step)))
        del step  # it holds tensors, too


# ---- runtime: messages ---------------------------------------------------------------------------
#
# Collectives call post(). exchange() is for messages of other files: pipeline.py sends activations
# and gradients to the next stage by it, sequence_parallel.py keys and values around a ring.
#
# On NCCL, a group that was made without a device_id connects in its first batch. All its ranks must
# take part in this batch, or it hangs: in exchange(), or if all_to_all_single() moves rows of some
# ranks only.


def exchange(sends, receives, group=None, async_op=False):
    """Do what plain_exchange() does, faster, and also in a group that is busy.

    Pending collectives of the group complete first; later ones do not wait for it. A RuntimeError
    names the failed peer. More than MOST_PEERS messages are posted as several batches, cut by their
    places in the lists, so a message must have the same place on both ranks. With async_op=True
    this returns a Work to wait() for. Otherwise it returns when the messages are complete, or on
    NCCL when the current stream has been told to wait for them.
    """
    require_memory(sends, receives)
    tensor = (sends or receives)[0][0] if sends or receives else None
    work = Work("exchange", group, tensor, async_op)
    work.tell("begin")
    try:
        with only_caller(work):
            with suppress(Exception):  # a pending collective raises its error in its own wait()
                work.queue.last.finish()
            await_messages = post(work, sends, receives)
    except BaseException:
        work.tell("end")
        raise

    def finish():
        try:
            await_messages()
            work.queue.note_launch()
        finally:
            work.tell("end")

    if not async_op:
        return finish()
    work.pending = Pending(finish, is_completed=lambda: False)
    return work


def is_memory(tensor):
    """Return whether a message can hold the tensor as it lies in memory: without gaps, in order."""
    # PyTorch conjugates and negates some tensors only when they are read
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def require_memory(sends, receives):
    """Raise ValueError if is_memory() is false for a tensor of these messages."""
    for tensor, peer in (*sends, *receives):
        if not is_memory(tensor):
            what = f"shape {tuple(tensor.shape)} and strides {tensor.stride()}"
            view = ", conjugated or negated" if tensor.is_contiguous() else ""
            raise ValueError(f"not contiguous: a message to or from rank {peer} is of {what}{view}")


def not_empty(messages):
    """Return the messages that have elements, since others are not sent."""
    return [(tensor, peer) for tensor, peer in messages if tensor.numel()]


MOST_PEERS = 128  # in one batch, since a batch of more than 256 messages may hang on NCCL


def post(work, sends, receives):
    """Begin a batch of messages. Return a function that waits for them and holds their tensors."""
    if max(len(sends), len(receives)) > MOST_PEERS:
        # Empty messages are counted, or a peer might have a message in another batch.
        first = post(work, sends[:MOST_PEERS], receives[:MOST_PEERS])
        others = post(work, sends[MOST_PEERS:], receives[MOST_PEERS:])

        def finish():
            first()
            others()

        return finish
    sends = not_empty(sends)
    receives = not_empty(receives)
    if not sends and not receives:
        return lambda: None
    work.tell("post", sends, receives)
    if (receives or sends)[0][0].is_cuda and not work.queue.on_nccl:
        return _post_through_host(work, sends, receives)
    return _begin(work, sends, receives)


def _begin(work, sends, receives):
    """Post messages: to NCCL in one batch, to gloo one by one. Return a function that waits.

    dist.isend() and dist.irecv() would take the host twice as long as the group's own methods.
    """
    group = work.group
    begun = []  # (torch's Work, its messages)
    posted = receives + sends  # what the call that raises an error was to post
    try:
        if work.queue.on_nccl:
            begun.append((post_batch(group, sends, receives), posted))
        else:
            for call, messages in (group.recv, receives), (group.send, sends):
                for message in messages:
                    posted = [message]
                    tensor, peer = message
                    begun.append((call([tensor], peer, tag_of(work.name, tensor)), posted))
    except RuntimeError as error:
        raise _lost(work, posted, error) from error

    def finish():
        for theirs, messages in begun:
            try:
                theirs.wait()
            except RuntimeError as error:
                raise _lost(work, messages, error) from error

    return finish


def post_batch(group, sends, receives):
    """Post a batch to NCCL and return torch's Work, faster than batch_isend_irecv() does."""
    device = (receives or sends)[0][0].device
    group._start_coalescing(device)
    for call, messages in (group.recv, receives), (group.send, sends):
        for tensor, peer in messages:
            if tensor.is_complex():  # NCCL has no complex numbers
                tensor = torch.view_as_real(tensor)
            call([tensor], peer, 0)
    return group._end_coalescing(device)


def _lost(work, messages, error):
    """Return an error that names the messages' peers."""
    peers = " or ".join(str(work.ranks[peer]) for peer in sorted({peer for _, peer in messages}))
    where = f"{work.name} in the group of ranks {work.ranks}: rank {work.ranks[work.rank]}"
    return dist.DistBackendError(f"{where} lost rank {peers}: {error}")


def _post_through_host(work, sends, receives):
    """Send copies in pinned host memory, since gloo cannot send CUDA memory."""
    pinned = partial(torch.empty_like, device="cpu", pin_memory=True)
    arriving = [(pinned(tensor), peer) for tensor, peer in receives]
    leaving = [(pinned(tensor).copy_(tensor), peer) for tensor, peer in sends]
    await_copies = _begin(work, leaving, arriving)

    def finish():
        await_copies()
        for (tensor, _), (buffer, _) in zip(receives, arriving):
            tensor.copy_(buffer)

    return finish


# ---- runtime: a group and its queue --------------------------------------------------------------
#
# submit(task, tensors) gives a queue a task, and returns it as Pending; `last` is the last one.
# note_launch() follows messages that did not go through the queue. `window` is how many algorithms
# take_turns() has under way.

# {process group: its Membership}. It is global because no attribute can be set on a process group.
_MEMBERSHIPS = weakref.WeakKeyDictionary()
_FIRST_CALL = threading.Lock()


class Membership:
    """What this rank knows about a process group. It is made once per group.

    place: (this rank in the group, the group's size); ranks: the global ranks of its members
    ranks_per_node: see set_ranks_per_node(); uses_backend: see set_backend_collectives()
    calling: a lock, see only_caller()
    queues: {device: the queue for its tensors}; thread: the queue of devices without NCCL
    device: where barrier() and gather_objects() make their tensors; the CPU if the group has gloo
    """

    def __init__(self, group):
        self.place = rank_and_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.ranks_per_node = len(self.ranks)
        self.uses_backend = False
        self.calling = threading.Lock()
        self.queues = {}
        self.thread = _Thread(group)
        self.device = "cpu" if "cpu:" in dist.get_backend_config(group) else "cuda"
        _MEMBERSHIPS[group] = self

    def queue_for(self, group, tensor):
        """Return the queue of a tensor. A group may have NCCL for GPUs and gloo for CPUs."""
        device = None if tensor is None else tensor.device
        if device not in self.queues:
            on_nccl = device and f"{device.type}:nccl" in dist.get_backend_config(group)
            # another thread may have set it by now
            self.queues.setdefault(device, _Stream(device) if on_nccl else self.thread)
        return self.queues[device]


def membership(group, caller):
    """Return the Membership of a group. An error names `caller`, the function that was called."""
    group = group or dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{caller} is called by a rank that is not in the group")
    members = _MEMBERSHIPS.get(group)
    if members is None:
        with _FIRST_CALL:  # of two threads, or each would make a queue
            members = _MEMBERSHIPS.get(group) or Membership(group)
    return members


@contextmanager
def only_caller(work):
    """Raise RuntimeError if another thread is calling an operation of the group at this moment.

    Ranks could not keep one order of calls, and messages could arrive in place of one another.
    """
    if not work.members.calling.acquire(blocking=False):
        raise RuntimeError(f"{work.name}() while another thread calls an operation of its group")
    try:
        yield
    finally:
        work.members.calling.release()


def set_ranks_per_node(ranks_per_node, group=None):
    """Set how many consecutive ranks share a node. A number < P that does not divide P means 1.

    All ranks must pass the same number, or they would choose unlike algorithms. For nodes of
    different numbers of ranks it is their greatest common divisor. Without this call all ranks of a
    group count as one node, which is slow between nodes of GPUs.
    """
    if ranks_per_node < 1:
        raise ValueError(f"{ranks_per_node=} is not positive")
    members = membership(group, "set_ranks_per_node")
    ranks = min(ranks_per_node, len(members.ranks))
    members.ranks_per_node = 1 if len(members.ranks) % ranks else ranks


class _Thread:
    """The queue of a group on gloo: a thread that ends when the group or Python does."""

    on_nccl = False
    window = 4  # 3 segments of 1 MB took up to 1.6 times gloo's time for 8 to 64 MB
    last = DONE

    def __init__(self, group):
        self.tasks = SimpleQueue()
        self.thread = threading.Thread(target=self.run_tasks, daemon=True)
        weakref.finalize(group, self.end)

    def run_tasks(self):
        schedule_as_batch("SCHED_OTHER")  # a batch thread would not preempt the one that wakes it
        for task, inference, stream, future in iter(self.tasks.get, None):
            try:
                with torch.inference_mode(inference), stream:  # each thread has its own
                    task()
                task = None  # frees its tensors before its end is announced
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)
            del task, future  # they hold the group, and after an error the tensors

    def end(self):
        """End the thread. A thread that returns from C++ after Python's end aborts the process."""
        self.tasks.put(None)
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(30)  # seconds; if a peer hangs, it waits until the group's timeout

    def note_launch(self):
        """Do nothing, since a task has ended when it returns."""

    def submit(self, task, tensors):
        """Run a task, which holds its tensors, in the thread. Return it as Pending.

        The thread launches kernels on the caller's stream, so they run in the caller's order.
        """
        if self.thread.ident is None:
            self.thread.start()
        future = Future()
        stream = nullcontext()
        if tensors and tensors[0].is_cuda:
            stream = torch.cuda.stream(torch.cuda.current_stream(tensors[0].device))
        self.tasks.put((task, torch.is_inference_mode_enabled(), stream, future))
        self.last = Pending(future.result, future.done)
        return self.last


# A task on a stream: the event at its end, and a list of the tensors that it holds.
_Launched = namedtuple("_Launched", "event held")


class _Stream:
    """The queue of a group on NCCL: a CUDA stream.

    The host launches a task and goes on, and the device runs it later. An event marks its end.

    Held tensors: if a task's tensor were freed, PyTorch would give its memory to the next tensor of
    the caller's stream, whose kernels could write there while the task still reads. So a task holds
    its tensors until the host has seen its event pass. finish() makes the current stream wait for
    the event. If this is the stream on which the task was submitted, no kernel of it can write too
    early any more, so finish() lets go of the tensors.

    AHEAD: PyTorch keeps the memory of NCCL's messages until the host has seen their end. If the
    host ran a training step ahead, each message of that step would take new memory. So the host
    waits while more than AHEAD tasks are unfinished. Ranks that use several groups must therefore
    use them in the same order, or their hosts could wait for one another.

    launched: the tasks whose end the host has not seen, oldest first
    """

    on_nccl = True
    window = 2  # one segment is summed while the other one travels
    last = DONE
    AHEAD = 5  # the peak of ZeRO-3 is then within 15% of what its tensors take

    def __init__(self, device=None):
        # One for each group and device, since torch's pool holds only 32. Its sums go before the
        # kernels of a backward pass. NCCL has its own stream for messages.
        self.device = device
        self.stream = torch.cuda.Stream(device=device, priority=-1)
        self.launched = deque()

    def note_launch(self, tensors=()):
        """Mark the end of a task. Wait until at most AHEAD tasks are unfinished."""
        event = torch.cuda.current_stream(self.device).record_event()
        task = _Launched(event, list(tensors))
        self.launched.append(task)
        while self.launched and self.launched[0].event.query():
            self.launched.popleft().held.clear()
        while len(self.launched) > self.AHEAD:
            oldest = self.launched.popleft()
            oldest.event.synchronize()
            oldest.held.clear()
        return task

    def submit(self, task, tensors):
        """Run a task on the side stream. Return it as Pending."""
        caller = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            task()
            launched = self.note_launch(tensors)

        def finish():
            current = torch.cuda.current_stream(self.device)
            current.wait_event(launched.event)
            if current == caller:
                launched.held.clear()

        self.last = Pending(finish, launched.event.query)
        return self.last


# ---- runtime: the backend's own collectives ------------------------------------------------------


def set_backend_collectives(group=None):
    """Let the backend run the group's collectives, which count_bytes() then rejects.

    Exceptions are reduce(), and all_gather() of unequal lengths. All ranks of the group must call
    it, or its next collective hangs.
    """
    membership(group, "set_backend_collectives").uses_backend = dist.get_world_size(group) > 1


def call_backend(work, *tensors, **options):
    """Call the backend's own collective in the place of ours. For AVG, run() divides its sum."""
    work.tell("backend")
    if work.op is not None:
        options["op"] = ReduceOp.SUM if work.op == ReduceOp.AVG else work.op
    backend_function(work.name)(*tensors, group=work.group, **options)


def backend_function(name):
    """Return torch.distributed's function for the collective `name`, also in torch 2.11."""
    older = {
        "all_gather_single": "all_gather_into_tensor",
        "reduce_scatter_single": "reduce_scatter_tensor",
    }
    return getattr(dist, name if hasattr(dist, name) else older[name])


# ---- runtime: listeners --------------------------------------------------------------------------
#
# Tests and the demonstrations compare the bytes that are sent with those that a formula claims, and
# tools draw a timeline. Nothing else needs this section.

# It is global because autograd may call collectives in its own threads, which do not see the
# caller's context variables.
LISTENERS = []


@contextmanager
def observe(listener):
    """Call listener(event, work, ...) for operations that begin in the block:

    begin                     once the call has checked its arguments
    post, sends, receives     before messages [(tensor, peer in the group)] are posted
    backend                   before the backend's own collective runs in their place
    end                       on completion (on NCCL: launch) or failure
    wait, waited              where Work.wait() begins, and where it returns or raises

    Events from post to end may come from the queue's thread. With async_op=False an operation
    blocks its caller from begin to end. An asynchronous exchange() ends in its wait(), or where
    posting its messages fails. Of plain_exchange() only "post" is told.
    """
    LISTENERS.append(listener)
    try:
        yield
    finally:
        LISTENERS.remove(listener)


class Traffic:
    """The payload that this rank has sent."""

    def __init__(self):
        self.sent = []  # (operation's name, group, peer in the group, bytes) of every message

    def bytes(self, operation=None, group=None, peers=None):
        """Sum the bytes sent in `group` to `peers` by operations of this name. None means all."""
        sent = [m for m in self.sent if operation in (None, m[0]) and group in (None, m[1])]
        return sum(nbytes for *_, peer, nbytes in sent if peers is None or peer in peers)


@contextmanager
def count_bytes():
    """Count what this rank sends in operations begun inside: `with count_bytes() as traffic:`"""
    traffic = Traffic()

    def listen(event, work, sends=(), receives=()):
        if event == "backend":
            raise RuntimeError(f"nobody counts the bytes of the backend's own {work.name}")
        for tensor, peer in sends:
            traffic.sent.append((work.name, work.group, peer, tensor.nbytes))

    with observe(listen):
        yield traffic


@contextmanager
def plain_turn(sends, receives, group):
    """Check the messages that plain_exchange() posts inside, and tell the listeners of them.

    Raises ValueError for tensors with gaps, and RuntimeError if another thread calls the group.
    """
    require_memory(sends, receives)
    tensor, _ = (sends or receives)[0]
    work = Work("plain_exchange", group, tensor)
    work.tell("post", sends, receives)
    with only_caller(work):
        yield


# ==== for the demonstrations and the other files ==================================================

# ---- processes -----------------------------------------------------------------------------------


def schedule_as_batch(policy="SCHED_BATCH"):
    """Schedule this thread, and those that it starts from now on, as batch work (on Linux).

    Call it before the process group is made, or a gloo thread may preempt this thread and spin on
    a lock that this thread holds. Messages would take 2-5 ms, not 0.1 ms. SCHED_OTHER undoes it.
    """
    if hasattr(os, policy):
        with suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))


def run_ranks(function, world_size=4):
    """Call function() on torchrun's ranks, or else in `world_size` new processes, with gloo."""
    if "RANK" in os.environ:
        _run_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", function)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, f"file://{folder}/store", function)
        torch.multiprocessing.spawn(_run_rank, arguments, nprocs=world_size)


def _run_rank(rank, world_size, init_method, function):
    torch.set_num_threads(1)
    schedule_as_batch()
    dist.init_process_group("gloo", init_method, rank=rank, world_size=world_size)
    function()
    barrier()  # so that no rank closes connections that another still reads from
    dist.destroy_process_group()


# ---- values that ranks compare -------------------------------------------------------------------


def gather_objects(value, group=None):
    """Return every rank's `value`, anything that can be pickled, in rank order."""
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    own = own.to(membership(group, "gather_objects").device)
    lengths = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=own.device)
    all_gather_single(lengths, lengths.new_tensor([len(own)]), group)
    rows = own.new_empty(len(lengths), max(lengths.tolist()))
    all_gather_single(rows, torch.nn.functional.pad(own, (0, rows.shape[1] - len(own))), group)
    return [pickle.loads(row.numpy()) for row in rows.cpu()]


def any_rank(flag, group=None):
    """Return whether `flag` is true on any rank. Collective, of one byte."""
    device = membership(group, "any_rank").device
    flags = torch.empty(dist.get_world_size(group), dtype=torch.bool, device=device)
    all_gather_single(flags, flags.new_tensor([flag]), group)
    return bool(flags.any())


def describe(named):
    """Return a line for each (name, tensor), which says all in which ranks must not differ."""
    kind = lambda t: f"{tuple(t.shape)} {t.dtype} {t.requires_grad} {t.device.type} {t.stride()}"
    return [f"{name!r} {kind(tensor)}" for name, tensor in named]


def check_parameters(named, group=None):
    """Raise ValueError if ranks differ in what describe() returns. Collective."""
    first, *others = gather_objects(describe(named), group)
    for rank, other in enumerate(others, 1):
        for line, expected in zip_longest(other, first, fillvalue="nothing"):
            if line != expected:
                raise ValueError(f"rank {rank} of the group has {line}, rank 0 has {expected}")


def ranks_in_both(group, other):
    """Return the global ranks that are in both groups."""
    groups = [membership(one, "ranks_in_both") for one in (group, other)]
    return set(groups[0].ranks).intersection(groups[1].ranks)


# ---- modules of the other files ------------------------------------------------------------------

# copy.deepcopy() of a module that has a group as an attribute, as torch's AveragedModel makes it,
# keeps the group. By itself it would try to copy the connections, and fail. It is set on torch's
# class so that it holds for any module, also the user's own.
dist.ProcessGroup.__deepcopy__ = lambda group, memo: group


def autocasted(x):
    """Return x as autocast would hand it to a matrix product."""
    device = x.device.type
    autocasts = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if autocasts else x


# ---- demonstration -------------------------------------------------------------------------------


def _demonstrate():
    rank, P = rank_and_size()
    nbytes = 840 * 128 * P  # every algorithm cuts it evenly for P up to 8
    ranks_per_node = 1 if P % 2 else 2
    set_ranks_per_node(ranks_per_node)

    def run(what, algorithm, call):
        tensor = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(rank))
        expected = tensor.double()
        dist.group.WORLD.allreduce([expected]).wait()
        with count_bytes() as traffic:
            call(tensor)
        steps, sent = all_reduce_cost(algorithm, nbytes, P, ranks_per_node, rank)
        if rank == 0:
            print(f"{what:20}{steps:3} steps, {sent:9} bytes claimed, {traffic.bytes():9} counted,"
                  f" at most {(tensor - expected).abs().max():.0e} from gloo's sum")

    run("ring_all_reduce()", "ring", ring_all_reduce)
    for name in ALGORITHMS:
        run(name, name, partial(all_reduce, algorithm=name))


if __name__ == "__main__":
    run_ranks(_demonstrate)
