"""Collectives made of messages.

A rank is a process, on a GPU of its own or on CPU cores; a process group is P of them, which share
nothing: all that a rank can do is send a tensor to another rank and receive one. Everything that
training needs beyond that is built here from one primitive, exchange(): a batch of sends and
receives that progress together.

                           what happens                              a rank sends     steps
    all_reduce             everybody gets the sum of all tensors
      naive                everyone sends everything to everyone      (P-1) D         1
      direct               chunks to their ranks, sums to everyone   2(P-1)/P D       2
      ring                 reduce-scatter, then all-gather           2(P-1)/P D       2(P-1)
      recursive_doubling   sums swapped with ever farther ranks       log2(P) D       log2(P)
      halving_doubling     the same, with halves, quarters ...       2(P-1)/P D       2 log2(P)
      hierarchical         direct inside nodes, rings between them   2(P-1)/P D       2 O
    reduce_scatter_single  rank r gets chunk r of the sum             (P-1)/P D       1 to P-1
    all_gather_single      everybody gets every rank's chunk          (P-1)/P D       1 to P-1
    all_to_all_single      rank i's chunk j goes to rank j            (P-1)/P D       1
    broadcast              down a tree; the root sends most           log2(P) D       log2(P)
    reduce                 up the tree, added on the way              D               log2(P)
    scatter                one to everyone; the root sends            (P-1)/P D       1
    gather                 everyone to one; the root sends nothing    D/P             1

D is the size of the full tensor in bytes; P = O x I ranks are O nodes (machines) of I ranks each.

2(P-1)/P D is the least that any all-reduce can send. Names, arguments and meaning are those of
torch.distributed; the code is the same on its two carriers, NCCL (for GPUs) and gloo (for CPUs).

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
2005.

    torchrun --nproc-per-node 4 collectives.py      bytes claimed and counted, steps, time and cost
"""

import atexit
import inspect
import math
import os
import pickle
import queue
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections import deque
from contextlib import contextmanager
from functools import lru_cache, partial, wraps
from itertools import islice, zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

# ---- the idea: a sum goes round a ring -----------------------------------------------------------
#
#     rank 0 ---> rank 1 ---> rank 2 ---> rank 3 ---+       every link carries 1/P of the tensor
#       ^                                           |       at every step
#       +-------------------------------------------+


def ring_all_reduce(tensor, group=None):
    """Sum a contiguous tensor over the group, in place. 2(P-1) steps of 1/P of its bytes each."""
    rank, P = rank_and_size(group)
    chunks = tensor.view(-1).tensor_split(P)
    for step in range(2 * (P - 1)):
        outgoing, own = chunks[(rank - step - 1) % P], chunks[(rank - step - 2) % P]
        arriving = torch.empty_like(own)
        exchange([(outgoing, (rank + 1) % P)], [(arriving, (rank - 1) % P)], group)
        if step < P - 1:
            own.add_(arriving)  # a sum of ever more ranks; after P-1 steps, of all
        else:
            own.copy_(arriving)  # a finished sum, on its way to everybody


# ---- messages ------------------------------------------------------------------------------------

EXCHANGE_TAG = 1 << 30  # beyond a user's tags; so is the next one, that of the collectives


def rank_and_size(group=None):
    """This rank inside `group`, and the group's size."""
    return dist.get_rank(group), dist.get_world_size(group)


def _for_members(collective):
    """As in torch.distributed, a rank outside the group gets a warning, and None at once."""
    place = list(inspect.signature(collective).parameters).index("group")

    @wraps(collective)
    def called(*arguments, **named):
        group = named.get("group", arguments[place] if len(arguments) > place else None)
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            return collective(*arguments, **named)
        message = f"rank {dist.get_rank()} calls {collective.__name__} of a group that it is not in"
        warnings.warn(message, stacklevel=2)

    return called


@_for_members
def exchange(sends, receives, group=None, async_op=False):
    """Send and receive several tensors in one batch, whose messages progress together.

    sends, receives: lists of (contiguous tensor, peer), peer being a rank of `group`. Any two ranks
    list the messages between them in the same order and with the same sizes (a message larger than
    its buffer aborts a gloo rank), and issue the batches that they share in the same order. Empty
    tensors are not sent. The group's pending operations come first. Returns None, or with async_op
    an object whose wait() completes the batch. A RuntimeError names the peer of a message that
    failed.
    """
    first = sends or receives
    call = _Call("exchange", group, first[0][0] if first else None, EXCHANGE_TAG)
    if call.worker is not None:
        call.worker.last.finish()  # a group's messages keep their order
    messages = call.post(sends, receives)
    return messages if async_op else messages.wait()


class _State:
    """What is kept of a process group that has been used here, and ends with it."""

    def __init__(self, group):
        self.rank, self.world_size = group.rank(), group.size()
        self.ranks = dist.get_process_group_ranks(group)  # unknown once the group is destroyed
        self.ranks_per_node = self.world_size  # see set_ranks_per_node()
        self.is_fake = dist.get_backend(group) == "fake"  # whose messages go nowhere
        self.by_backend = False  # see set_backend_collectives()
        self.thread = self.stream = None  # which run its operations in the background


_STATES = weakref.WeakKeyDictionary()  # group -> its _State


def _state(group):
    return _STATES.get(group) or _STATES.setdefault(group, _State(group))


class _Call:
    """One call of an operation: posts its messages, and tells those who listen (see observe()).

    operation: its name
    group: the process group, None for that of all ranks
    tensor: one of those that travel, or None: where NCCL carries it, the call is a CUDA stream's
    tag: what keeps its messages on gloo apart from others

    worker: what runs the group's calls in the background, a thread or stream, once there was one
    """

    def __init__(self, operation, group, tensor, tag=EXCHANGE_TAG + 1):
        self.operation, self.tag, self.listeners = operation, tag, tuple(_LISTENERS)
        self.group = group or dist.group.WORLD
        self.on_stream = tensor is not None and _has_nccl(self.group, tensor.device.type)
        self.state = state = _state(self.group)
        self.worker = state.stream if self.on_stream else state.thread
        self.rank, self.world_size, self.ranks = state.rank, state.world_size, state.ranks

    def tell(self, event, *what):
        for listener in self.listeners:
            listener(event, self, *what)

    def post(self, sends, receives):
        """Begin messages [(tensor, peer)] that progress together; their wait() completes them.

        NCCL takes them as one batch of the stream. gloo has tags, which keep them apart from those
        of a user, and wants every message to be waited for. It is called through the group's own
        send() and recv(): dist.isend() and irecv() cost the host almost twice as much.
        """
        sends = [message for message in sends if message[0].numel()]
        receives = [message for message in receives if message[0].numel()]
        messages, peers = _Messages(self), ()
        self.tell("post", messages, sends, receives)
        if self.state.is_fake:
            return messages
        try:
            if self.on_stream:
                peers = [peer for _, peer in sends + receives]
                messages.works = [(work, peers) for work in _batch(sends, receives, self.group)]
                return messages
            for tensor, peer in receives:
                peers, buffer = [peer], _on_host(tensor)
                messages.works.append((self.group.recv([buffer], peer, self.tag), peers))
                if buffer is not tensor:
                    messages.staged.append((tensor, buffer))
            for tensor, peer in sends:
                peers, buffer = [peer], _on_host(tensor)
                if buffer is not tensor:
                    buffer.copy_(tensor)
                messages.works.append((self.group.send([buffer], peer, self.tag), peers))
        except RuntimeError as error:
            raise self.lost(peers, error) from error
        return messages

    def lost(self, peers, error):
        return RuntimeError(f"{self.describe('lost', peers)}: {error}")

    def describe(self, verb, peers):
        """What this rank has to say of some peers, and in which operation."""
        others = " or ".join(str(self.ranks[peer]) for peer in sorted(set(peers)))
        where = f"{self.operation} in the group of ranks {self.ranks}"
        return f"{where}: rank {self.ranks[self.rank]} {verb} rank {others}"


class _Messages:
    """Messages under way."""

    def __init__(self, call):
        self.call = call
        self.works = []  # (work, its peers)
        self.staged = []  # (tensor on a GPU, the host memory that receives for it)

    def wait(self):
        peers = ()
        try:
            for work, peers in self.works:
                self.call.tell("wait", self, peers)
                work.wait()
        except RuntimeError as error:
            raise self.call.lost(peers, error) from error
        finally:
            self.call.tell("done", self)
        for tensor, buffer in self.staged:
            tensor.copy_(buffer)


def _has_nccl(group, device_type):
    """Whether NCCL carries such a device's tensors in the group, which may have gloo for others.

    PyTorch's "fake" groups, whose messages go nowhere, stand for NCCL's.
    """
    config = dist.get_backend_config(group)
    return f"{device_type}:nccl" in config or f"{device_type}:fake" in config


def _batch(sends, receives, group):
    batch = [dist.P2POp(dist.irecv, t, group=group, group_peer=peer) for t, peer in receives]
    batch += [dist.P2POp(dist.isend, t, group=group, group_peer=peer) for t, peer in sends]
    return dist.batch_isend_irecv(batch) if batch else []


def _on_host(tensor):
    """gloo cannot send CUDA memory: a pinned host buffer in its place. CPU tensors travel as is."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


_LISTENERS = []  # those of every observe() now open


@contextmanager
def observe(listener):
    """Have listener(event, call, ...) called for every operation that begins inside.

    call: its `operation`, `group` and global `ranks`. The events, each told where it happens:
        call                             the operation was called
        return                           it is done, of which nobody gets a Work
        launch, begin, end               it goes to the group's thread or stream, and runs there
        await, join                      somebody waits for its Work, and has waited; told only if a
                                         listener keeps the call
        post, messages, sends, receives  it begins messages, [(tensor, peer in the group)]
        wait, messages, peers            it waits for one of them, that with these peers
        done, messages                   it waits no more
    """
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


# ---- algorithms take turns -----------------------------------------------------------------------
#
# An algorithm is a generator. It yields (sends, receives), goes on when they are complete, and does
# its arithmetic in between. A large tensor is cut into segments, each a collective of its own:
# while one of them is added, the others travel.

SEGMENT = 1 << 20  # bytes of a chunk that travel in one message
WINDOW = 3  # segments under way
# On multiples of so many bytes begin messages, and tensors in buffers: a GPU reads 128 at once, and
# grouped products, and NCCL for its quick copies, want pointers on 16.
ALIGNMENT = 128


def take_turns(algorithms, call):
    """Run algorithms, WINDOW of them at a time, each one step in its turn.

    All ranks take the same turns, so that the messages between two match in the order of posting.
    """
    waiting, under_way = deque(algorithms), deque()
    most = 1 if call.on_stream else WINDOW  # a stream runs one batch after the other
    while waiting or under_way:
        if waiting and len(under_way) < most:
            algorithm = waiting.popleft()
        else:
            algorithm, messages = under_way.popleft()
            messages.wait()
        # its next step, if there is one; no name keeps the tensors of the one before
        under_way += [(algorithm, call.post(*step)) for step in islice(algorithm, 1)]


def _cut(row, parts):
    """A row in parts that begin on multiples of 128 bytes.

    A part is less than 128 bytes longer or shorter than its share; those of a small row are empty.
    """
    unit = ALIGNMENT // row.itemsize
    units = math.ceil(len(row) / unit)
    return row.tensor_split([units * part // parts * unit for part in range(1, parts)])


def _segments(chunks, most):
    """The k-th part of every chunk, for each k; none is of more than `most` bytes and 128."""
    if most == math.inf:
        return [chunks]
    count = math.ceil(max(chunk.nbytes for chunk in chunks) / most)
    return list(zip(*(_cut(chunk, count) for chunk in chunks))) if count > 1 else [chunks]


def _slices(row, parts, most):
    """Slices of a row, about `most` bytes each; all but the last hold `parts` equal chunks."""
    if row.nbytes <= most:
        return [row]
    count, multiple = math.ceil(row.nbytes / most), parts * ALIGNMENT // row.itemsize
    return row.split(math.ceil(len(row) / (count * multiple)) * multiple)


# ---- reduce-scatter and all-gather ---------------------------------------------------------------
#
# A sum is either computed on one rank and copied, or on all along orders that mirror each other
# (a + b is b + a to the bit): all ranks end with the same bits, and a model's replicas rely on it.

_REDUCE = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,  # and one division at the end
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}

MOST_PEERS = 128  # of a batch: NCCL may hang on more than 256 messages at once


def _ring_reduce_scatter(chunks, output, add, rank):
    """Chunk r, reduced over all ranks, into `output` of rank r. P-1 steps.

    A partial sum travels the ring, and each rank it visits adds its own chunk. c2: 3+0 is chunk 2,
    summed over ranks 3 and 0. P = 4:

        rank        0             1             2             3
        step 0   c2: 3+0       c3: 0+1       c0: 1+2       c1: 2+3
        step 1   c1: 2+3+0     c2: 3+0+1     c3: 0+1+2     c0: 1+2+3
        step 2   c0: 1+2+3+0   c1: 2+3+0+1   c2: 3+0+1+2   c3: 0+1+2+3
    """
    P, total = len(chunks), chunks[rank - 1]
    for step in range(P - 1):
        own = chunks[(rank - step - 2) % P]
        received = torch.empty_like(own)
        yield [(total, (rank + 1) % P)], [(received, (rank - 1) % P)]
        total = add(received, own, out=output if step == P - 2 else received)
    if P == 1:
        output.copy_(total)


def _ring_all_gather(chunks, rank):
    """Chunk r of rank r into chunk r of every one. P-1 steps, in place.

        rank        0         1         2         3
        start    0 . . .   . 1 . .   . . 2 .   . . . 3       the chunks that a rank has, P = 4
        step 0   0 . . 3   0 1 . .   . 1 2 .   . . 2 3
        step 1   0 . 2 3   0 1 . 3   0 1 2 .   . 1 2 3
        step 2   0 1 2 3   0 1 2 3   0 1 2 3   0 1 2 3
    """
    P = len(chunks)
    for step in range(P - 1):
        outgoing, arriving = chunks[(rank - step) % P], chunks[(rank - step - 1) % P]
        yield [(outgoing, (rank + 1) % P)], [(arriving, (rank - 1) % P)]


def _pairwise(outgoing, arriving, rank):
    """outgoing[r] to every other rank r, arriving[r] from it; MOST_PEERS to a step.

    Message k goes to the rank k places on, and comes from the one k back. P = 4, who has whose:

        rank        0         1         2         3
        start    0 . . .   . 1 . .   . . 2 .   . . . 3
        k = 1    0 . . 3   0 1 . .   . 1 2 .   . . 2 3
        k = 2    0 . 2 3   0 1 . 3   0 1 2 .   . 1 2 3
        k = 3    0 1 2 3   0 1 2 3   0 1 2 3   0 1 2 3
    """
    P = len(outgoing)
    for first in range(1, P, MOST_PEERS):
        batch = range(first, min(first + MOST_PEERS, P))
        to_ranks, from_ranks = [(rank + k) % P for k in batch], [(rank - k) % P for k in batch]
        yield [(outgoing[r], r) for r in to_ranks], [(arriving[r], r) for r in from_ranks]


def _halving(chunks, output, add, rank):
    """Reduce-scatter among 2^k ranks by swapping halves of sums, then quarters ... log2(P) steps.

    Its scratch is 3/4 of the tensor, where that of a ring is 2/P.

        rank        0              1              2              3
        step 0   c01: 0+2       c01: 1+3       c23: 0+2       c23: 1+3       (partner = rank xor 2)
        step 1   c0: 0+1+2+3    c1: 0+1+2+3    c2: 0+1+2+3    c3: 0+1+2+3    (partner = rank xor 1)
    """
    lengths, half = [len(chunk) for chunk in chunks], len(chunks) // 2
    if half == 0:
        output.copy_(chunks[0])
        return
    halves = _joined(chunks[:half]), _joined(chunks[half:])
    while half:
        kept, given = halves[::-1] if rank & half else halves
        received, partner = torch.empty_like(kept), rank ^ half
        yield [(given, partner)], [(received, partner)]
        lengths = lengths[half:] if rank & half else lengths[:half]
        half //= 2
        total = add(kept, received, out=received if half else output)
        middle = sum(lengths[:half])
        halves = total[:middle], total[middle:]


def _doubling(chunks, rank):
    """All-gather among 2^k ranks by swapping one chunk, then two ..., in place. log2(P) steps.

        rank        0         1         2         3
        start    0 . . .   . 1 . .   . . 2 .   . . . 3
        step 0   0 1 . .   0 1 . .   . . 2 3   . . 2 3       (partner = rank xor 1)
        step 1   0 1 2 3   0 1 2 3   0 1 2 3   0 1 2 3       (partner = rank xor 2)
    """
    size = 1
    while size < len(chunks):
        mine = rank & -size
        own, other = (_joined(chunks[i : i + size]) for i in (mine, mine ^ size))
        yield [(own, rank ^ size)], [(other, rank ^ size)]
        size *= 2


def _joined(chunks):
    """Chunks that follow each other in memory, as one tensor."""
    first, *others = chunks
    return first.as_strided((sum(map(len, chunks)),), (1,)) if others else first


def _direct_reduce_scatter(chunks, output, add, rank):
    """Every chunk to its rank, which adds in the order of ranks. `output` may be the own chunk."""
    parts = [chunk if r == rank else torch.empty_like(output) for r, chunk in enumerate(chunks)]
    yield from _pairwise(chunks, parts, rank)
    total, *others = parts
    for part in others:
        scratch = parts[0 if rank else 1]  # another rank's
        total = add(total, part, out=output if part is parts[-1] else scratch)
    if not others:
        output.copy_(total)


def _direct_all_gather(chunks, rank):
    """The own chunk to every rank."""
    yield from _pairwise([chunks[rank]] * len(chunks), chunks, rank)


def _among(ranks, algorithm):
    """An algorithm, written for ranks 0 to P-1, among these."""
    for sends, receives in algorithm:
        sends = [(tensor, ranks[peer]) for tensor, peer in sends]
        yield sends, [(tensor, ranks[peer]) for tensor, peer in receives]


def _node(rank, world_size, ranks_per_node):
    """(a rank's place in its node, the node's ranks, its number, the ranks of that place in all)"""
    number, place = divmod(rank, ranks_per_node)
    inside = range(rank - place, rank - place + ranks_per_node)
    return place, inside, number, range(place, world_size, ranks_per_node)


def _hierarchical_reduce_scatter(chunks, output, add, rank, ranks_per_node):
    """For P = O x I ranks, node by node I ranks each: direct inside, then a ring between nodes.

    The rank of place i sums chunk i of every node. (I-1)/I D bytes stay inside, (O-1)/O D/I cross.
    1 + (O-1) steps. O = I = 2:

        rank       0               1               2               3
        inside     c0 c2: 0+1      c1 c3: 0+1      c0 c2: 2+3      c1 c3: 2+3
        between    c0: 2+3+0+1     c1: 2+3+0+1     c2: 0+1+2+3     c3: 0+1+2+3
    """
    place, inside, node, between = _node(rank, len(chunks), ranks_per_node)
    sums = [torch.empty_like(output) for _ in between]
    pairs = zip(_nodes(chunks, ranks_per_node), sums)
    steps = [_direct_reduce_scatter(*pair, add, place) for pair in pairs]
    yield from _among(inside, _together(steps, ranks_per_node))
    yield from _among(between, _ring_reduce_scatter(sums, output, add, node))


def _hierarchical_all_gather(chunks, rank, ranks_per_node):
    """The reverse: a ring between the nodes, then direct inside them. (O-1) + 1 steps."""
    place, inside, node, between = _node(rank, len(chunks), ranks_per_node)
    yield from _among(between, _ring_all_gather(chunks[place::ranks_per_node], node))
    steps = [_direct_all_gather(own, place) for own in _nodes(chunks, ranks_per_node)]
    yield from _among(inside, _together(steps, ranks_per_node))


def _nodes(chunks, ranks_per_node):
    """The chunks of each node's ranks."""
    return [chunks[i : i + ranks_per_node] for i in range(0, len(chunks), ranks_per_node)]


def _together(algorithms, world_size):
    """Algorithms of one step each, as many to a step as MOST_PEERS allows."""
    most = _most_at_once(world_size)
    for first in range(0, len(algorithms), most):
        for steps in zip_longest(*algorithms[first : first + most]):
            sends, receives = zip(*steps)
            yield sum(sends, []), sum(receives, [])


def _most_at_once(world_size):
    return max(1, MOST_PEERS // world_size)


# ---- all-reduce ----------------------------------------------------------------------------------
#
# Each reduces `input` of P ranks into `output` of all, which may be the same memory.


def _naive(output, input, add, rank, world_size):
    """Everyone sends everything to everyone, and adds in the order of ranks. 1 step, (P-1) D."""
    yield from _direct_reduce_scatter([input] * world_size, output, add, rank)


def _in_two_phases(reduce_scatter, all_gather):
    """Reduce-scatter, then all-gather: 2(P-1)/P D bytes."""

    def algorithm(output, input, add, rank, world_size):
        chunks = _cut(output, world_size)
        yield from reduce_scatter(_cut(input, world_size), chunks[rank], add, rank)
        yield from all_gather(chunks, rank)

    return algorithm


_ring = _in_two_phases(_ring_reduce_scatter, _ring_all_gather)  # 2(P-1) steps


def _recursive_doubling(output, input, add, rank, world_size):
    """Exchange sums with the rank 1 away, then 2, 4 ... away. log2(P) steps of D bytes. P = 4:

        rank       0         1         2         3
        start      0         1         2         3           whose tensors are in a rank's sum
        step 0     0+1       0+1       2+3       2+3         (partner = rank xor 1)
        step 1     0+1+2+3   0+1+2+3   0+1+2+3   0+1+2+3     (partner = rank xor 2)
    """
    total, distance = input, 1
    while distance < world_size:
        received, partner = torch.empty_like(input), rank ^ distance
        yield [(total, partner)], [(received, partner)]
        distance *= 2
        total = add(total, received, out=output if distance == world_size else received)
    if world_size == 1:
        output.copy_(input)


def _for_any_size(algorithm):
    """An algorithm for 2^k ranks, for any number: each rank beyond 2^k has one of them stand in."""

    def folded(output, input, add, rank, world_size):
        core = 1 << (world_size.bit_length() - 1)
        if rank >= core:
            yield [(input, rank - core)], []
            yield [], [(output, rank - core)]
            return
        stand_in = rank + core < world_size
        if stand_in:
            other = torch.empty_like(input)
            yield [], [(other, rank + core)]
            input = add(input, other, out=other)
        yield from algorithm(output, input, add, rank, core)
        if stand_in:
            yield [(output, rank + core)], []

    return folded


def _hierarchical(output, input, add, rank, world_size, ranks_per_node):
    """For P = O x I ranks, node by node I ranks each, or a 2D torus of rows of I.

    Reduce-scatter inside the node, all-reduce of the own chunk with the ranks of the same place in
    other nodes, all-gather inside: direct, ring, direct. 2(I-1)/I D bytes stay inside, 2(O-1)/O D/I
    cross. 1 + 2(O-1) + 1 steps. O = I = 2:

        rank                     0            1            2            3
        reduce-scatter inside    c0: 0+1      c1: 0+1      c0: 2+3      c1: 2+3
        all-reduce between       c0: 0..3     c1: 0..3     c0: 0..3     c1: 0..3
        all-gather inside        c0 c1        c0 c1        c0 c1        c0 c1
    """
    place, inside, node, between = _node(rank, world_size, ranks_per_node)
    inputs, chunks = _cut(input, ranks_per_node), _cut(output, ranks_per_node)
    own = chunks[place]
    yield from _among(inside, _direct_reduce_scatter(inputs, own, add, place))
    yield from _among(between, _ring(own, own, add, node, len(between)))
    yield from _among(inside, _direct_all_gather(chunks, place))


# ---- one at an end: trees, and everyone to one ---------------------------------------------------


def _tree(root, rank, world_size):
    """A rank's parent and children, farthest first, in a tree of depth log2(P).

    P = 8    0->4, 0->2 4->6, 0->1 2->3 4->5 6->7       counted from the root
    """
    place, children, distance = (rank - root) % world_size, [], 1
    while distance < world_size and not place & distance:
        if place + distance < world_size:
            children.insert(0, (rank + distance) % world_size)
        distance *= 2
    return (rank - distance) % world_size if place else None, children


def _tree_broadcast(tensor, root, rank, world_size):
    """Whoever has the tensor passes it to its children."""
    parent, children = _tree(root, rank, world_size)
    if parent is not None:
        yield [], [(tensor, parent)]
    yield [(tensor, child) for child in children], []


def _tree_reduce(tensor, root, add, rank, world_size):
    """Whoever has heard its children adds, nearest first, and passes the sum to its parent."""
    parent, children = _tree(root, rank, world_size)
    sums = [torch.empty_like(tensor) for _ in children]
    yield [], list(zip(sums, children))
    total = tensor
    for received in sums[::-1]:
        total = add(total, received, out=tensor if parent is None else received)
    if parent is not None:
        yield [(total, parent)], []


def _scatter_all_gather(tensor, root, rank, world_size):
    """Broadcast of a large tensor: chunks from the root to their ranks, then once round the ring.

    The root sends 2(P-1)/P D bytes, the others at most (P-1)/P D.
    """
    chunks = _cut(tensor, world_size)
    yield from _scatter(chunks[rank], chunks, root, rank)
    yield from _ring_all_gather(chunks, rank)


def _scatter(output, inputs, root, rank):
    if rank != root:
        yield [], [(output, root)]
        return
    output.copy_(inputs[rank])
    yield [(tensor, peer) for peer, tensor in enumerate(inputs) if peer != root], []


def _gather(input, outputs, root, rank):
    if rank != root:
        yield [(input, root)], []
        return
    outputs[rank].copy_(input)
    yield [], [(tensor, peer) for peer, tensor in enumerate(outputs) if peer != root]


def _dissemination(token, rank, world_size):
    """Round k: tell the rank 2^k places on, hear from the one 2^k back; 2^(k+1) ranks are heard."""
    heard, distance = torch.empty_like(token), 1
    while distance < world_size:
        to_rank, from_rank = (rank + distance) % world_size, (rank - distance) % world_size
        yield [(token, to_rank)], [(heard, from_rank)]
        distance *= 2


# ---- cost, and the choice it makes ---------------------------------------------------------------


class Cost(NamedTuple):
    """What one rank does: steps one after the other, bytes sent, bytes added while none travel, and
    those of the bytes sent that go at the pace of links between nodes."""

    steps: int
    bytes: int
    added: int = 0
    between: int = 0

    def seconds(self, link, between=None):
        """The alpha-beta model: steps * alpha + bytes * beta, and additions at gamma per byte.

        link, between: LinkSpeed of the links inside nodes, and between them where they are others.
        """
        sending = (self.bytes - self.between) * link.beta + self.between * (between or link).beta
        return self.steps * link.alpha + sending + self.added * link.gamma


class LinkSpeed(NamedTuple):
    """Seconds per step, per byte sent, and per byte added; measure_link() measures them."""

    alpha: float
    beta: float
    gamma: float


# Measured with 2 to 8 ranks on 2 cores (gloo); a batch's time on the host and, from data sheets, a
# GPU's NVLink of 250 GB/s or more and its 400 Gbit/s network card (nccl); between machines of CPUs
# a network of 1 Gbit/s. They are constants: an algorithm chosen by the mood of a machine would
# change the bits of a training.
LINK_SPEEDS = {
    "gloo": LinkSpeed(1.2e-4, 6.5e-10, 1.1e-10),
    "gloo between nodes": LinkSpeed(1.2e-4, 8e-9, 1.1e-10),
    "nccl": LinkSpeed(6e-5, 4e-12, 1e-12),
    "nccl between nodes": LinkSpeed(6e-5, 2e-11, 1e-12),
}


def reduce_scatter_cost(algorithm, nbytes, world_size, ranks_per_node=1):
    """Cost of a reduce-scatter of a full tensor of `nbytes`, ranks_per_node to a node.

    algorithm: halving, direct, ring or hierarchical. Exact where P divides nbytes.
    """
    D, P = nbytes, world_size
    if algorithm == "hierarchical":
        return _hierarchical_cost(reduce_scatter_cost, D, P, ranks_per_node)
    steps = {"halving": (P - 1).bit_length(), "direct": min(P - 1, 1), "ring": P - 1}[algorithm]
    sent = added = (P - 1) * D // P
    if algorithm == "ring" and P > 1:
        added = min(SEGMENT, D // P)  # all but the last segment, while the next one arrives
    return _paced(Cost(steps, sent, added), P, ranks_per_node)


def _hierarchical_cost(cost, nbytes, world_size, ranks_per_node):
    nodes = world_size // ranks_per_node
    inside = cost("direct", nbytes, ranks_per_node, ranks_per_node)
    inside = inside._replace(steps=inside.steps * math.ceil(nodes / _most_at_once(ranks_per_node)))
    between = cost("ring", nbytes // ranks_per_node, nodes)
    return Cost(*(sum(pair) for pair in zip(inside, between)))


def _paced(cost, world_size, ranks_per_node):
    """With several nodes every step has messages between them, whose pace the others keep."""
    return cost._replace(between=cost.bytes if ranks_per_node < world_size else 0)


def all_reduce_cost(algorithm, nbytes, world_size, ranks_per_node=1, rank=0):
    """Cost of an all-reduce of `nbytes`, ranks_per_node to a node; rank 0 is the busiest.

    Exact where 128 P divides nbytes (128 x 2^k, where 2^k of the P ranks halve and double); else a
    chunk is at most 128 bytes longer, or shorter, than its share.
    """
    D, P, core = nbytes, world_size, 1 << (world_size.bit_length() - 1)
    if algorithm == "hierarchical":
        return _hierarchical_cost(all_reduce_cost, D, P, ranks_per_node)
    if algorithm == "naive":
        cost = Cost(min(P - 1, 1), (P - 1) * D, (P - 1) * D)
    elif algorithm == "recursive_doubling":
        steps = core.bit_length() - 1
        cost = Cost(steps, steps * D, steps * D)
    else:
        halving = algorithm == "halving_doubling"
        phase = reduce_scatter_cost(*("halving", D, core) if halving else (algorithm, D, P))
        cost = Cost(2 * phase.steps, 2 * phase.bytes, phase.added)
    if algorithm in ("recursive_doubling", "halving_doubling"):
        if rank >= core:
            cost = Cost(2, D)
        elif rank + core < P:
            cost = Cost(cost.steps + 2, cost.bytes + D, cost.added + D)
    return _paced(cost, P, ranks_per_node)


def broadcast_cost(algorithm, nbytes, world_size, ranks_per_node=1):
    """Cost of a broadcast for the root: "tree", or "scatter_all_gather".

    Exact where 128 P divides nbytes; else a chunk is at most 128 bytes longer, or shorter.
    """
    rounds = (world_size - 1).bit_length()
    cost = Cost(rounds, rounds * nbytes)
    if algorithm == "scatter_all_gather":
        cost = Cost(world_size, 2 * nbytes * (world_size - 1) // world_size)
    return _paced(cost, world_size, ranks_per_node)


def all_reduce_bytes(nbytes, world_size):
    """Bytes that one rank sends to all-reduce `nbytes` by the ring: no algorithm sends fewer.

    Exact where 128 P divides nbytes; else at most 256 bytes are to be added.
    """
    return 2 * nbytes * (world_size - 1) // world_size


def reduce_scatter_bytes(nbytes, world_size):
    """Bytes that one rank sends to reduce-scatter, or all-gather, a full tensor of `nbytes`."""
    return nbytes * (world_size - 1) // world_size


all_gather_bytes = reduce_scatter_bytes

DIRECT_BYTES = 1 << 26  # of a full tensor that NCCL takes in one step: so much scratch it needs
HALVED_BYTES = 1 << 21  # of a tensor that gloo takes in halves: longer ones leave a core's cache


def direct_scratch_bytes(nbytes, world_size):
    """Bytes that a rank receives into, to reduce `nbytes` directly, as NCCL does inside a node."""
    return min(nbytes, DIRECT_BYTES) * (world_size - 1) / world_size


def _choose(call, algorithms, cost, nbytes, name="auto", ranks_per_node=None):
    """The algorithm of that name, or of least cost, and of how many bytes a slice of its turns is.

    algorithms: {name: algorithm}; cost(name, nbytes, world_size, ranks_per_node) is its Cost.
    """
    told = call.state.ranks_per_node
    if name == "auto":
        backend = "nccl" if call.on_stream else "gloo"
        speeds = LINK_SPEEDS[backend], LINK_SPEEDS.get(f"{backend} between nodes")
        name = _cheapest(backend, cost, nbytes, call.world_size, told, speeds)
    algorithm, most = algorithms[name], math.inf  # no turns for ranks that take unlike steps
    if name == "hierarchical":
        algorithm = partial(algorithm, ranks_per_node=ranks_per_node or told)
    if name in ("direct", "hierarchical") and call.on_stream:
        most = DIRECT_BYTES
    elif name in ("direct", "ring", "hierarchical") and not call.on_stream:
        most = call.world_size * SEGMENT
    return algorithm, most


@lru_cache(maxsize=4096)
def _cheapest(backend, cost, nbytes, world_size, ranks_per_node, speeds):
    """What "auto" takes."""
    names = candidates(backend, cost, world_size, ranks_per_node)
    if backend == "gloo" and nbytes >= HALVED_BYTES:
        names = [name for name in names if "halving" not in name]
    size = nbytes, world_size, ranks_per_node
    return min(names, key=lambda name: cost(name, *size).seconds(*speeds))


def candidates(backend, cost, world_size, ranks_per_node):
    """The algorithms that "auto" compares. An all-gather goes as its reverse, the reduce-scatter.

    On gloo, where ranks share cores, every message costs and every byte, also another rank's.
    """
    if cost is broadcast_cost:
        return ["tree"] if backend == "gloo" else ["tree", "scatter_all_gather"]
    if backend == "nccl" and ranks_per_node == world_size:
        return ["direct"]  # inside a node P-1 messages at once are quickest
    if cost is all_reduce_cost:
        names = ["ring", "halving_doubling", "recursive_doubling"]
    elif world_size & (world_size - 1) == 0:  # log2(P) messages are quicker than P-1
        names = ["halving", "ring"]
    else:
        names = ["ring"] if backend == "nccl" else ["direct", "ring"]
    return names + ["hierarchical"] * (1 < ranks_per_node < world_size)


def nccl_batches(cost, nbytes, world_size, ranks_per_node):
    """In how many batches, one after the other, NCCL gets what "auto" does with `nbytes`.

    cost: reduce_scatter_cost, also for an all-gather, or all_reduce_cost.
    """
    speeds = LINK_SPEEDS["nccl"], LINK_SPEEDS["nccl between nodes"]
    name = _cheapest("nccl", cost, nbytes, world_size, ranks_per_node, speeds)
    slices = math.ceil(nbytes / DIRECT_BYTES) if name in ("direct", "hierarchical") else 1
    return slices * cost(name, nbytes, world_size, ranks_per_node).steps


# ---- operations: now, or while Python computes ---------------------------------------------------
#
# A group's operations run strictly one after the other, and each reads its inputs when its turn
# comes: at once if nothing is pending, else in the background. That means
#   gloo   a thread of the group's: a batch is only complete when somebody has waited for it;
#   NCCL   a side stream of the group's: there waiting orders streams and blocks nobody.


def _launch(call, run, tensors, async_op, *signature):
    """Call run() in the group's order; returns None, or its Work with async_op.

    signature: what must be the same on all ranks; compared where PyTorch's debug level is DETAIL.
    """
    call.tell("call")
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        told = " ".join(map(str, (call.operation, *signature)))
        run = partial(_compare_and_run, call, told, tensors[0].device, run)
    worker = call.worker
    if not async_op and (worker is None or worker.last.is_completed()):
        run()
        call.tell("return")
        return None
    if call.world_size == 1 or call.state.is_fake:  # needs neither stream nor thread
        work = Work(run, call)
        work.run()
        return work
    if worker is None and call.on_stream:
        worker = call.state.stream = _WorkStream()
    elif worker is None:
        worker = call.state.thread = _WorkThread(call.group)
    work = worker.submit(run, call, tensors)
    return work if async_op else work.wait()


def _compare_and_run(call, told, device, run, length=256):
    """Tell every rank what this one is about to do; raise if somebody is about to do otherwise."""
    text = torch.tensor(list(told.encode()[:length].ljust(length)), dtype=torch.uint8)
    texts = list(text.to(device).repeat(call.world_size, 1))
    apart = _Call(call.operation, call.group, texts[0])
    apart.listeners = ()
    take_turns([_direct_all_gather(texts, call.rank)], apart)
    calls = [bytes(text.tolist()).decode().strip() for text in texts]
    for other, theirs in zip(call.ranks, calls):
        if theirs != calls[0]:
            raise ValueError(f"rank {call.ranks[0]} calls {calls[0]}, rank {other} calls {theirs}")
    run()


def _perform(call, algorithms, *arguments):
    """Do a call's operation: by algorithms that take turns, or by the backend, on `arguments`."""
    if call.state.by_backend:
        _backend_collective(call.operation, call.group, *arguments)
    else:
        take_turns(algorithms, call)


class Work:
    """A group's operation, under way in a thread. wait() blocks until done; errors arise there."""

    def __init__(self, run, call):
        self._run, self._error = run, None
        self._call = weakref.ref(call)  # lest a group's last Work keep the group alive
        self._inference = torch.is_inference_mode_enabled()  # a mode of each thread
        self._finished = threading.Event()
        call.tell("launch")

    def run(self):
        call = self._call()
        call.tell("begin")
        try:
            with torch.inference_mode(self._inference):
                self._run()
        except BaseException as error:
            self._error = error
        self._run = None
        call.tell("end")
        self._finished.set()

    def is_completed(self):
        """Whether wait() would return, or raise, at once."""
        return self._finished.is_set()

    def finish(self):
        """wait() that leaves errors to others."""
        _tell(self._call, "await")
        self._finished.wait()
        _tell(self._call, "join")

    def wait(self):
        self.finish()
        if self._error is not None:
            raise self._error


class StreamWork:
    """An operation of a group's CUDA stream, under way. wait() makes the current stream wait."""

    def __init__(self, run, call, tensors, stream):
        self._tensors = tensors  # held until wait(), lest their memory be used again before
        self._call = weakref.ref(call)
        call.tell("launch")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call.tell("begin")
            run()
            call.tell("end")
        self._event = stream.record_event()

    def is_completed(self):
        """Whether the stream has passed the operation."""
        return self._event.query()

    def finish(self):
        _tell(self._call, "await")
        torch.cuda.current_stream().wait_event(self._event)
        _tell(self._call, "join")

    def wait(self):
        self.finish()
        self._tensors = None


def _tell(reference, event):
    if (call := reference()) is not None:
        call.tell(event)


class _Thread(threading.Thread):
    """A thread that ends when it takes None out of its queue."""

    def __init__(self, target):
        self.queue = queue.SimpleQueue()
        super().__init__(target=target, args=(self.queue,), daemon=True)
        self.start()


@atexit.register
def _end_threads(seconds=30):
    """A thread that comes back from C++ when there is no Python any more aborts the process."""
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _Thread)]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.queue.put(None)
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))


class _WorkThread(_Thread):
    """A group's thread."""

    def __init__(self, group):
        super().__init__(self._loop)
        weakref.finalize(group, self.queue.put, None)  # the thread ends with its group

    def submit(self, run, call, tensors):
        self.last = Work(run, call)
        self.queue.put(self.last)
        return self.last

    @staticmethod
    def _loop(works):
        if hasattr(os, "SCHED_OTHER"):  # batch work would wait until whoever wakes it pauses
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        while (work := works.get()) is not None:
            work.run()


class _WorkStream:
    """A group's stream: torch hands out a pool of 32 in turn, so it is made once and kept."""

    def __init__(self):
        self.stream = torch.cuda.Stream(priority=-1)  # messages go before the computation's kernels
        self.pending = deque()  # works hold their tensors until the stream has passed them

    def submit(self, run, call, tensors):
        while self.pending and self.pending[0].is_completed():
            self.pending.popleft()
        self.last = StreamWork(run, call, tensors, self.stream)
        self.pending.append(self.last)
        return self.last


@_for_members
def set_backend_collectives(group=None):
    """From now on the group's collectives are the backend's own: a yardstick and an oracle.

    Arguments, order, results and errors of use stay; exchange() stays a batch of messages. Whoever
    then asks count_bytes() for counts gets a RuntimeError.
    """
    state = _state(group or dist.group.WORLD)
    state.by_backend = state.world_size > 1


def _backend_collective(operation, group, *arguments):
    """The backend's own collective on contiguous rows; AVG is a SUM, whose caller divides."""

    def plain(op):
        return ReduceOp.SUM if op == ReduceOp.AVG else op

    def all_reduce(output, input, op):
        if output is not input:
            output.copy_(input)
        dist.all_reduce(output, plain(op), group)

    def reduce(row, root, op):
        own = row if dist.get_rank(group) == root else row.clone()  # gloo overwrites it
        dist.reduce(own, op=plain(op), group=group, group_dst=root)

    def reduce_scatter(output, input, op):
        dist.reduce_scatter_single(output, input, plain(op), group)

    def all_gather(chunks, own):
        if len({len(chunk) for chunk in chunks}) == 1:
            return dist.all_gather(chunks, own, group)
        for root, chunk in enumerate(chunks):
            dist.broadcast(chunk, group=group, group_src=root)

    calls = {
        "all_reduce": all_reduce,
        "reduce": reduce,
        "broadcast": lambda row, root: dist.broadcast(row, group=group, group_src=root),
        "reduce_scatter_single": reduce_scatter,
        "all_gather_single": lambda row, own: dist.all_gather_single(row, own, group),
        "all_gather": all_gather,
        "scatter": lambda row, rows, root: dist.scatter(row, rows, group=group, group_src=root),
        "gather": lambda row, rows, root: dist.gather(row, rows, group=group, group_dst=root),
        "all_to_all_single": lambda *rows: dist.all_to_all_single(*rows, group),
        "barrier": lambda token: dist.all_reduce(token, group=group),  # on the token's device
    }
    calls[operation](*arguments)


def _row(tensor):
    """Its elements in a row: a view if it is contiguous, else a copy."""
    return tensor.detach().contiguous().view(-1)


def _write_back(tensor, row):
    """What was written to the row of a tensor reaches the tensor."""
    if not tensor.is_contiguous():
        tensor.detach().copy_(row.view(tensor.shape))


# ---- the collectives -----------------------------------------------------------------------------
#
# Each returns None, or a Work with async_op, and raises ValueError, which names the values, for
# arguments that do not fit. As in torch.distributed, src and dst are ranks of the world.

_ALL_REDUCE = {
    "naive": _naive,
    "direct": _in_two_phases(_direct_reduce_scatter, _direct_all_gather),
    "ring": _ring,
    "recursive_doubling": _for_any_size(_recursive_doubling),
    "halving_doubling": _for_any_size(_in_two_phases(_halving, _doubling)),
    "hierarchical": _hierarchical,
}
_REDUCE_SCATTER = {
    "halving": _halving,
    "direct": _direct_reduce_scatter,
    "ring": _ring_reduce_scatter,
    "hierarchical": _hierarchical_reduce_scatter,
}
_ALL_GATHER = {
    "halving": _doubling,
    "direct": _direct_all_gather,
    "ring": _ring_all_gather,
    "hierarchical": _hierarchical_all_gather,
}
_BROADCAST = {"tree": _tree_broadcast, "scatter_all_gather": _scatter_all_gather}


def _all_reduce(call, output, input, op, algorithm, ranks_per_node):
    """All-reduce `input` into `output`, which may be the same."""
    rank, P = call.rank, call.world_size
    row = _row(output)
    inputs = row if input is output else _row(input)
    how = algorithm, ranks_per_node
    reduce, most = _choose(call, _ALL_REDUCE, all_reduce_cost, inputs.nbytes, *how)
    pairs = zip(_slices(row, P, most), _slices(inputs, P, most))
    _perform(call, [reduce(*pair, _REDUCE[op], rank, P) for pair in pairs], row, inputs, op)
    _average(row, op, P)
    _write_back(output, row)


def _average(row, op, world_size):
    """The second half of AVG, on what was summed."""
    if op == ReduceOp.AVG and world_size > 1:
        row.div_(world_size)


@_for_members
def all_reduce(
    tensor, op=ReduceOp.SUM, group=None, async_op=False, algorithm="auto", ranks_per_node=None
):
    """Reduce `tensor` over the group, in place; every rank ends with the same bits.

    op: SUM, AVG (not of integers), PRODUCT, or MIN and MAX (not of complex numbers).
    algorithm: naive, direct, ring, recursive_doubling, halving_doubling, or hierarchical with
    `ranks_per_node` consecutive ranks to a node; auto takes the one that costs least.
    """
    call = _Call("all_reduce", group, tensor)
    _check_op(op, tensor.dtype)
    _check_algorithm(algorithm, _ALL_REDUCE)
    if algorithm == "hierarchical":
        divides = ranks_per_node and call.world_size % ranks_per_node == 0
        text = "ranks_per_node={} does not divide world_size={}"
        _check(divides, text, ranks_per_node, call.world_size)
    run = partial(_all_reduce, call, tensor, tensor, op, algorithm, ranks_per_node)
    signature = tuple(tensor.shape), tensor.dtype, op, algorithm, ranks_per_node
    return _launch(call, run, [tensor], async_op, *signature)


@_for_members
def reduce(tensor, dst=0, op=ReduceOp.SUM, group=None, async_op=False):
    """Reduce `tensor` over the group into that of rank `dst`; the others keep theirs."""
    call = _Call("reduce", group, tensor)
    _check_op(op, tensor.dtype)
    root = _group_rank("dst", dst, call)

    def run():
        row = _row(tensor)
        tree = _tree_reduce(row, root, _REDUCE[op], call.rank, call.world_size)
        _perform(call, [tree], row, root, op)
        if call.rank == root:
            _average(row, op, call.world_size)
            _write_back(tensor, row)

    return _launch(call, run, [tensor], async_op, tuple(tensor.shape), tensor.dtype, op, dst)


@_for_members
def broadcast(tensor, src=0, group=None, async_op=False, algorithm="auto"):
    """Copy `tensor` of rank `src` to every rank of the group, in place.

    algorithm: tree, scatter_all_gather, or auto, the one that costs least (on gloo the tree).
    """
    call = _Call("broadcast", group, tensor)
    root = _group_rank("src", src, call)
    _check_algorithm(algorithm, _BROADCAST)

    def run():
        row = _row(tensor)
        send, _ = _choose(call, _BROADCAST, broadcast_cost, row.nbytes, algorithm)
        _perform(call, [send(row, root, call.rank, call.world_size)], row, root)
        _write_back(tensor, row)

    return _launch(call, run, [tensor], async_op, tuple(tensor.shape), tensor.dtype, src, algorithm)


@_for_members
def reduce_scatter_single(output, input, op=ReduceOp.SUM, group=None, async_op=False):
    """Reduce `input` over the group; rank r keeps chunk r in `output`, a P-th as long.

    Sends (P-1)/P of the input. op: as in all_reduce().
    """
    call = _Call("reduce_scatter_single", group, output)
    _check_op(op, input.dtype)
    fits = input.numel() == output.numel() * call.world_size
    shapes = tuple(input.shape), call.world_size, tuple(output.shape)
    _check(fits, "input of shape {} is not world_size={} times output of shape {}", *shapes)
    _check_dtype(output, input)

    def run():
        P, row, inputs = call.world_size, _row(output), _row(input)
        scatter, most = _choose(call, _REDUCE_SCATTER, reduce_scatter_cost, inputs.nbytes)
        parts = _segments([*inputs.view(P, len(row)).unbind(), row], most / P)
        steps = [scatter(chunks, own, _REDUCE[op], call.rank) for *chunks, own in parts]
        _perform(call, steps, row, inputs, op)
        _average(row, op, P)
        _write_back(output, row)

    return _launch(call, run, [output, input], async_op, tuple(output.shape), output.dtype, op)


def _gather_chunks(call, algorithms, chunks, own, row):
    """Chunk r, `own` of rank r, into chunk r of every rank; `row` is what the backend takes."""
    chunks[call.rank].copy_(_row(own))
    nbytes = sum(chunk.nbytes for chunk in chunks)
    gather, most = _choose(call, algorithms, reduce_scatter_cost, nbytes)
    parts = _segments(chunks, most / call.world_size)
    _perform(call, [gather(part, call.rank) for part in parts], row, chunks[call.rank])


@_for_members
def all_gather_single(output, input, group=None, async_op=False):
    """Collect `input` of every rank in `output`, P times as long, in rank order.

    Sends (P-1)/P of the output.
    """
    call = _Call("all_gather_single", group, output)
    _check_fits(output, input, input.numel() * call.world_size)

    def run():
        row = _row(output)
        chunks = row.view(call.world_size, input.numel()).unbind()
        _gather_chunks(call, _ALL_GATHER, chunks, input, row)
        _write_back(output, row)

    return _launch(call, run, [output, input], async_op, input.numel(), input.dtype)


@_for_members
def all_gather(tensor_list, tensor, group=None, async_op=False):
    """Collect `tensor` of every rank r in the contiguous tensor_list[r]; lengths may differ."""
    call = _Call("all_gather", group, tensor)
    _check_list("tensor_list", tensor_list, call.world_size)
    _check_fits(tensor_list[call.rank], tensor, tensor.numel())
    by_node = partial(_hierarchical_all_gather, ranks_per_node=call.state.ranks_per_node)
    apart = by_node if call.on_stream else _direct_all_gather
    algorithms = _ALL_GATHER | {"halving": apart}  # entries are not side by side

    def run():
        chunks = [_row(entry) for entry in tensor_list]
        _gather_chunks(call, algorithms, chunks, tensor, chunks)

    signature = [tuple(entry.shape) for entry in tensor_list], tensor.dtype
    return _launch(call, run, [tensor, *tensor_list], async_op, *signature)


@_for_members
def scatter(tensor, scatter_list=None, src=0, group=None, async_op=False):
    """Give rank r of the group the r-th tensor of `scatter_list`, which rank `src` has."""
    call = _Call("scatter", group, tensor)
    root = _group_rank("src", src, call)
    inputs = _list_of_root("scatter_list", scatter_list, tensor, root, call)

    def run():
        row, rows = _row(tensor), [_row(entry) for entry in inputs]
        _perform(call, [_scatter(row, rows, root, call.rank)], row, rows, root)
        _write_back(tensor, row)

    return _launch(call, run, [tensor, *inputs], async_op, tuple(tensor.shape), tensor.dtype, src)


@_for_members
def gather(tensor, gather_list=None, dst=0, group=None, async_op=False):
    """Collect `tensor` of every rank r of the group in gather_list[r] of rank `dst`."""
    call = _Call("gather", group, tensor)
    root = _group_rank("dst", dst, call)
    outputs = _list_of_root("gather_list", gather_list, tensor, root, call)

    def run():
        row, rows = _row(tensor), [_row(entry) for entry in outputs]
        _perform(call, [_gather(row, rows, root, call.rank)], row, rows, root)

    return _launch(call, run, [tensor, *outputs], async_op, tuple(tensor.shape), tensor.dtype, dst)


@_for_members
def all_to_all_single(
    output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
):
    """Send the i-th piece of `input` to rank i, and receive rank i's piece as the i-th of `output`.

    Pieces are rows (dim 0): *_split_sizes rows for each rank, or equal ones.
    """
    call = _Call("all_to_all_single", group, output)
    rows = [(tuple(tensor.shape[1:]), tensor.dtype) for tensor in (output, input)]
    text = "rows of output, {} {}, are not like rows of input, {} {}"
    _check(rows[0] == rows[1], text, *rows[0], *rows[1])
    rank, P = call.rank, call.world_size
    output_sizes = _split_sizes("output", output, output_split_sizes, P)
    input_sizes = _split_sizes("input", input, input_split_sizes, P)
    own = rank, input_sizes[rank], output_sizes[rank]
    _check(own[1] == own[2], "rank {} sends itself {} elements, but expects {}", *own)

    def run():
        row, source = _row(output), _row(input)
        outputs, inputs = row.split_with_sizes(output_sizes), source.split_with_sizes(input_sizes)
        outputs[rank].copy_(inputs[rank])
        steps = [_pairwise(inputs, outputs, rank)]
        _perform(call, steps, row, source, output_sizes, input_sizes)
        _write_back(output, row)

    return _launch(call, run, [output, input], async_op, "rows of", *rows[0])


@_for_members
def barrier(group=None):
    """Return when every rank of the group has called it.

    Its first batch involves every rank, as NCCL asks of the first batch of any group.
    """
    if dist.get_world_size(group) == 1:
        return
    token = torch.zeros(1, dtype=torch.uint8, device=_device(group))
    call = _Call("barrier", group, token)

    def run():
        _perform(call, [_dissemination(token, call.rank, call.world_size)], token)

    _launch(call, run, [token], async_op=False)
    if token.is_cuda:
        torch.cuda.current_stream().synchronize()


def _device(group):
    """Where a group's own tensors are: a group of CPUs, too, may have NCCL for CUDA tensors."""
    on_gpu = torch.cuda.is_available() and _has_nccl(group or dist.group.WORLD, "cuda")
    return "cuda" if on_gpu else "cpu"


# ---- derivatives: the backward of a collective is a collective -----------------------------------
#
# What all ranks use alike has its whole gradient on each; what each uses in its own way has a part
# of its gradient on each, and the parts must be summed. No function changes its input.


def _identity(x, group):
    return x.view_as(x)


def _all_reduced(x, group):
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    call = _Call("all_reduce", group, x)
    run = partial(_all_reduce, call, output, x, ReduceOp.SUM, "auto", None)
    _launch(call, run, [output, x], False, tuple(x.shape), x.dtype)
    return output


def _all_gathered(x, dim, group):
    output = x.new_empty(dist.get_world_size(group), *x.shape)
    all_gather_single(output, x, group)
    return output.movedim(0, dim).flatten(dim, dim + 1)


def _own_chunk(x, dim, group):
    rank, world_size = rank_and_size(group)
    _check_divisible(x, dim, world_size)
    return x.chunk(world_size, dim)[rank].clone(memory_format=torch.contiguous_format)


def _reduce_scattered(x, dim, group):
    world_size = dist.get_world_size(group)
    _check_divisible(x, dim, world_size)
    chunks = x.unflatten(dim, (world_size, -1)).movedim(dim, 0)
    output = x.new_empty(chunks.shape[1:])
    reduce_scatter_single(output, chunks, group=group)
    return output


def _check_divisible(x, dim, world_size):
    text = "dim {} of {} is not divisible by world_size={}"
    _check(x.shape[dim] % world_size == 0, text, dim, tuple(x.shape), world_size)


def _all_to_all(x, output_split_sizes, input_split_sizes, group):
    rows = len(x) if output_split_sizes is None else sum(output_split_sizes)
    output = x.new_empty(rows, *x.shape[1:])
    all_to_all_single(output, x, output_split_sizes, input_split_sizes, group)
    return output


def _all_to_all_back(x, output_split_sizes, input_split_sizes, group):
    return _all_to_all(x, input_split_sizes, output_split_sizes, group)


_PAIRS = {  # forward, backward; what x is before -> after
    "copy_to_group": (_identity, _all_reduced),  # replicated -> each uses it its way; Megatron's f
    "reduce_from_group": (_all_reduced, _identity),  # partial sums -> replicated; Megatron's g
    "scatter_to_group": (_own_chunk, _all_gathered),  # replicated -> split
    "gather_from_group": (_all_gathered, _own_chunk),  # split -> replicated, used alike
    "all_gather_to_group": (_all_gathered, _reduce_scattered),  # split -> each uses all its way
    "reduce_scatter_to_group": (_reduce_scattered, _all_gathered),  # partial sums -> split
    "all_to_all_in_group": (_all_to_all, _all_to_all_back),  # split one way -> split another
}


class _Conjugate(torch.autograd.Function):
    """One function of a pair forward, the other one backward, whose own backward is the first."""

    @staticmethod
    def forward(ctx, x, pair, *arguments):
        ctx.pair, ctx.arguments = pair, arguments
        return pair[0](x, *arguments)

    @staticmethod
    def backward(ctx, grad_output):
        gradient = _Conjugate.apply(grad_output, ctx.pair[::-1], *ctx.arguments)
        return gradient, None, *[None for _ in ctx.arguments]


def copy_to_group(x, group=None):
    """x itself; the gradients that the ranks return for it are summed. Megatron's f."""
    return _Conjugate.apply(x, _PAIRS["copy_to_group"], group)


def reduce_from_group(x, group=None):
    """The sum of every rank's x; its gradient goes to every summand. Megatron's g."""
    return _Conjugate.apply(x, _PAIRS["reduce_from_group"], group)


def scatter_to_group(x, dim, group=None):
    """This rank's chunk, along `dim`, of x, held by all ranks. ValueError if P does not divide."""
    return _Conjugate.apply(x, _PAIRS["scatter_to_group"], dim % x.ndim, group)


def gather_from_group(x, dim, group=None):
    """Every rank's x, joined along `dim`, for a use that is the same on every rank."""
    return _Conjugate.apply(x, _PAIRS["gather_from_group"], dim % x.ndim, group)


def all_gather_to_group(x, dim, group=None):
    """Every rank's x, joined along `dim`, used differently by each: gradients are summed."""
    return _Conjugate.apply(x, _PAIRS["all_gather_to_group"], dim % x.ndim, group)


def reduce_scatter_to_group(x, dim, group=None):
    """This rank's chunk, along `dim`, of the sum of all x. ValueError if P does not divide."""
    return _Conjugate.apply(x, _PAIRS["reduce_scatter_to_group"], dim % x.ndim, group)


def all_to_all_in_group(x, output_split_sizes=None, input_split_sizes=None, group=None):
    """all_to_all_single() of the rows of x, differentiable."""
    splits = output_split_sizes, input_split_sizes
    return _Conjugate.apply(x, _PAIRS["all_to_all_in_group"], *splits, group)


# ---- processes and groups ------------------------------------------------------------------------


def schedule_as_batch():
    """Have this thread, and those it starts from now on, scheduled as batch work (on Linux).

    Call it before the process group is made. A thread of gloo's that preempts the rank it serves
    spins on a lock that the rank holds, so that a message takes 2-5 ms, not 0.1 ms.
    """
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def run_ranks(function, world_size=4):
    """Call function() on the ranks of a new CPU group: torchrun's, or `world_size` new ones."""
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
    barrier()  # nobody closes its connections while another still reads from them
    dist.destroy_process_group()


@_for_members
def set_ranks_per_node(ranks_per_node, group=None):
    """Tell how many consecutive ranks of the group share a node; unless told, all of them do.

    Where that does not divide the group, its nodes are unlike: no algorithm goes node by node.
    """
    counts = isinstance(ranks_per_node, int) and ranks_per_node > 0
    _check(counts, "ranks_per_node={!r} is not a positive integer", ranks_per_node)
    state = _state(group or dist.group.WORLD)
    ranks = min(ranks_per_node, state.world_size)
    state.ranks_per_node = ranks if state.world_size % ranks == 0 else 1


def gather_objects(value, group=None):
    """Every rank's `value`, anything that can be pickled, in rank order. Collective.

    In a fake group the others are taken to have the same.
    """
    if dist.get_backend(group) == "fake":
        return [value] * dist.get_world_size(group)
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(_device(group))
    lengths = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=own.device)
    all_gather_single(lengths, lengths.new_tensor([len(own)]), group)
    texts = [own.new_empty(length) for length in lengths.tolist()]
    all_gather(texts, own, group)
    return [pickle.loads(text.cpu().numpy()) for text in texts]


def check_parameters(named, group=None):
    """ValueError if [(name, tensor)] are on several devices, or not alike on all ranks. Collective.

    What ranks disagree on is an error on every rank of the group, naming the first difference.
    """
    devices = {tensor.device: name for name, tensor in named}
    where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
    _check(len(devices) <= 1, "parameters are on several devices: {}", where)
    lines = [f"{name!r} {tuple(t.shape)} {t.dtype} {t.requires_grad}" for name, t in named]
    first, *others = gather_objects(lines, group)
    for rank, other in enumerate(others, 1):
        for line, expected in zip_longest(other, first, fillvalue="nothing"):
            if line != expected:
                raise ValueError(f"rank {rank} of the group has {line}, rank 0 has {expected}")


# ---- what arguments must be ----------------------------------------------------------------------


def _check(right, message, *values):
    """ValueError, with the values in the message, unless all is right."""
    if not right:
        raise ValueError(message.format(*values))


def _check_op(op, dtype):
    _check(op in _REDUCE, "op={} is not one of SUM, AVG, PRODUCT, MIN, MAX", op)
    if dtype.is_floating_point:
        return
    _check(op != ReduceOp.AVG, "op=AVG needs a floating-point tensor, not dtype={}", dtype)
    ordered = not dtype.is_complex or op not in (ReduceOp.MIN, ReduceOp.MAX)
    _check(ordered, "op={} needs an order, which dtype={} does not have", op, dtype)


def _check_algorithm(algorithm, known):
    if algorithm != "auto":
        names = ", ".join(["auto", *known])
        _check(algorithm in known, "algorithm={!r} is not one of {}", algorithm, names)


def _check_dtype(output, input):
    dtypes = output.dtype, input.dtype
    _check(dtypes[0] == dtypes[1], "output.dtype={} is not input.dtype={}", *dtypes)


def _check_fits(output, input, expected):
    _check_dtype(output, input)
    text = "output of shape {} has {} elements where input of shape {} makes {}"
    values = tuple(output.shape), output.numel(), tuple(input.shape), expected
    _check(output.numel() == expected, text, *values)


def _check_list(name, tensors, world_size, alike=None):
    _check(tensors is not None, "{} is None, not of world_size={}", name, world_size)
    size = name, len(tensors), world_size
    _check(len(tensors) == world_size, "{} is of {} tensors, not of world_size={}", *size)
    contiguous = all(tensor.is_contiguous() for tensor in tensors)
    _check(contiguous, "{} has an entry that is not contiguous", name)
    if alike is not None:
        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in (alike, *tensors)]
        text = "{} has an entry that is not {} {}, as tensor is"
        _check(len(set(shapes)) == 1, text, name, *shapes[0])


def _split_sizes(name, tensor, split_sizes, world_size):
    """Elements of `tensor` for each rank, from rows (dim 0) for each rank; equal rows if None."""
    rows = len(tensor)
    divides = split_sizes is not None or rows % world_size == 0
    _check(divides, "{} has {} rows, not divisible by world_size={}", name, rows, world_size)
    split_sizes = split_sizes or [rows // world_size] * world_size
    fits = len(split_sizes) == world_size and sum(split_sizes) == rows
    text = "{}_split_sizes={} are not world_size={} sizes of sum {}"
    _check(fits, text, name, split_sizes, world_size, rows)
    row = tensor.numel() // rows if rows else 0
    return [size * row for size in split_sizes]


def _list_of_root(name, tensors, alike, root, call):
    """The tensors that the root has for all ranks; those of others are not looked at."""
    if call.rank != root:
        return []
    _check_list(name, tensors, call.world_size, alike)
    return tensors


def _group_rank(name, global_rank, call):
    text = "{}={} is not one of the group's ranks, {}"
    _check(global_rank in call.ranks, text, name, global_rank, call.ranks)
    return call.ranks.index(global_rank)


# ---- who listens ---------------------------------------------------------------------------------


class Traffic:
    """Payload that this rank sent.

    Nobody counts what the backend's own collectives send: bytes() and messages() then raise
    RuntimeError.
    """

    def __init__(self):
        self.sent = []  # (operation, group, peer in the group, bytes) of every message
        self.uncounted = set()  # operations that were the backend's own

    def bytes(self, operation=None, group=None, peers=None):
        """Bytes sent by one operation, in one group, to some peers; None stands for all."""
        return sum(self._select(operation, group, peers))

    def messages(self, operation=None, group=None, peers=None):
        """Messages sent, selected as in bytes()."""
        return len(self._select(operation, group, peers))

    def _select(self, operation, group, peers):
        if self.uncounted:
            names = ", ".join(sorted(self.uncounted))
            raise RuntimeError(f"nobody counts the bytes of the backend's own collectives: {names}")
        return [
            nbytes
            for name, its_group, peer, nbytes in self.sent
            if operation in (None, name)
            and group in (None, its_group)
            and (peers is None or peer in peers)
        ]

    def listen(self, event, call, *what):
        """Count what observe() tells."""
        if event == "call" and call.state.by_backend:
            self.uncounted.add(call.operation)
        if event == "post":
            _, sends, _ = what
            self.sent += [(call.operation, call.group, peer, t.nbytes) for t, peer in sends]


@contextmanager
def count_bytes():
    """Count what this rank sends in operations begun inside: `with count_bytes() as traffic:`"""
    traffic = Traffic()
    with observe(traffic.listen):
        yield traffic


def report_stalls(seconds):
    """From now on, say on stderr whom an operation waits for that has not moved for so long.

    One line a stall. For gloo; on NCCL nobody waits in wait().
    """
    waits = {}  # thread -> [call, peers, since when it waits for them]

    def listen(event, call, *what):
        if event == "wait":
            waits[threading.get_ident()] = [call, what[1], time.monotonic()]
        elif event == "done":
            waits.pop(threading.get_ident(), None)

    def report(end):
        while True:
            try:
                return end.get(timeout=seconds / 8)
            except queue.Empty:
                now = time.monotonic()
            for wait in list(waits.values()):
                call, peers, since = wait
                if now - since >= seconds:
                    wait[2] = math.inf  # it has been told
                    line = f"{call.describe('waits for', peers)} for more than {seconds} s\n"
                    sys.stderr.write(line)

    _LISTENERS.append(listen)
    _Thread(report)


# ---- links, measured -----------------------------------------------------------------------------


def measure_link(group=None, rounds=20):
    """LinkSpeed of a group, measured: rings of 8 bytes and of 4 MB, and adding 4 MB. Collective."""
    rank, world_size = rank_and_size(group)
    device = _device(group)
    small, large = torch.zeros(8, device=device), torch.zeros(1 << 20, device=device)
    peers = (rank + 1) % world_size, (rank - 1) % world_size

    def shift(tensor):
        if world_size > 1:
            exchange([(tensor, peers[0])], [(tensor.clone(), peers[1])], group)

    alpha = _median_seconds(lambda: shift(small), group, rounds)
    beta = max(0.0, _median_seconds(lambda: shift(large), group, rounds) - alpha) / large.nbytes
    gamma = _median_seconds(lambda: large.add_(large), group, rounds) / large.nbytes
    return LinkSpeed(alpha, beta, gamma)


def _median_seconds(call, group=None, rounds=9):
    times = []
    for _ in range(rounds):
        barrier(group)
        began = time.perf_counter()
        call()
        if _device(group) == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times)[rounds // 2]


# ---- precision and chance ------------------------------------------------------------------------


def autocasted(x):
    """x as autocast would hand it to a matrix product."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x


class RandomState:
    """What the random generators would draw from now on: `with state:` has it drawn once more."""

    def __init__(self, device):
        self.devices = [device] if device.type == "cuda" else []
        self.state = torch.get_rng_state()
        self.device_states = [torch.cuda.get_rng_state(device) for device in self.devices]

    def __enter__(self):
        self.outside = torch.random.fork_rng(self.devices)
        self.outside.__enter__()
        torch.set_rng_state(self.state)
        for device, state in zip(self.devices, self.device_states):
            torch.cuda.set_rng_state(state, device)

    def __exit__(self, *exception):
        self.outside.__exit__(*exception)


# ---- demonstration -------------------------------------------------------------------------------


def _demonstrate():
    rank, world_size = rank_and_size()
    link = measure_link()
    if rank == 0:
        alpha, beta, gamma = link.alpha * 1e6, link.beta * 1e9, link.gamma * 1e9
        print(f"{world_size} ranks: a step takes {alpha:.0f} us, sending {beta:.2f} ns per byte,")
        print(f"adding {gamma:.2f} ns per byte; an all-reduce of\n")
        header = ("bytes", "algorithm", "claimed", "counted", "steps", "cost", "time", "gloo's")
        print("{:>9}  {:20}{:>10}{:>10}{:>6}{:>11}{:>11}{:>11}".format(*header))
    unit = ALIGNMENT * math.lcm(world_size, 1 << (world_size.bit_length() - 1))
    for size in (1 << 12, 1 << 18, 1 << 24):
        nbytes = math.ceil(size / unit) * unit  # what all algorithms cut into chunks alike
        tensor, ranks_per_node = torch.zeros(nbytes // 4), 2 - world_size % 2
        gloo = _median_seconds(lambda: dist.group.WORLD.allreduce([tensor]).wait())
        for algorithm in _ALL_REDUCE:
            call = lambda: all_reduce(tensor, algorithm=algorithm, ranks_per_node=ranks_per_node)
            with count_bytes() as traffic:
                call()
            cost = all_reduce_cost(algorithm, nbytes, world_size, ranks_per_node, rank)
            seconds = (cost.seconds(link), _median_seconds(call), gloo)
            if rank == 0:
                counts = f"{cost.bytes:10}{traffic.bytes():10}{cost.steps:6}"
                times = "".join(f"{value * 1e6:8.0f} us" for value in seconds)
                print(f"{nbytes:9}  {algorithm:20}{counts}{times}")


if __name__ == "__main__":
    run_ranks(_demonstrate)
