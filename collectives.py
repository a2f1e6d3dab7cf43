"""Collectives made of messages.

A rank is a process, on a GPU of its own or on CPU cores; a process group is P of them, which share
nothing: they send tensors to each other. All that training needs is built here from one primitive,
exchange(): a batch of sends and receives that progress together. D bytes is the full tensor.

                           what each rank holds in the end           a rank sends     steps
    all_reduce             everybody the sum of all tensors
      naive                  everyone sends everything to everyone    (P-1) D         1
      direct                 chunks to their ranks, sums to all      2(P-1)/P D       2
      ring                   reduce-scatter, then all-gather         2(P-1)/P D       2(P-1)
      recursive_doubling     P = 2^k: sums swapped, ever farther      log2(P) D       log2(P)
      halving_doubling       the same, with halves, quarters ...     2(P-1)/P D       2 log2(P)
      hierarchical           O nodes of I: direct, rings across      2(P-1)/P D       2 O
    reduce_scatter_single  rank r chunk r of the sum                  (P-1)/P D       1 to P-1
    all_gather_single      everybody every rank's chunk               (P-1)/P D       1 to P-1
    all_to_all_single      rank j every rank's chunk j                (P-1)/P D       1
    broadcast              everybody the root's; the root sends most  log2(P) D       log2(P)
    reduce                 the root the sum, added up a tree          D               log2(P)
    scatter                rank r the root's tensor r; root sends     (P-1)/P D       1
    gather                 the root everybody's; it sends nothing     D/P             1

log2(P) is rounded up. 2(P-1)/P D is the least that any all-reduce can send. With async_op=True an
operation overlaps with what the caller computes, in a thread (gloo, for CPUs) or on a side stream
(NCCL, for GPUs). In backward a collective is a collective: see copy_to_group() and its like.

Names and meaning are torch.distributed's: all_gather_single and reduce_scatter_single are what most
know as all_gather_into_tensor and reduce_scatter_tensor. Here a group's collectives run one after
the other; tensors need not be contiguous; all_gather takes unlike lengths; reduce leaves the
others' tensors alone; a rank outside the group gets a ValueError; there is no BAND, BOR or BXOR.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.

    torchrun --nproc-per-node 4 collectives.py      steps, bytes claimed and counted
"""

import math
import os
import pickle
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice, zip_longest
from queue import SimpleQueue

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


def rank_and_size(group=None):
    """This rank inside `group`, and the group's size."""
    return dist.get_rank(group), dist.get_world_size(group)


def exchange(sends, receives, group=None, async_op=False):
    """Send and receive several tensors in one batch, whose messages progress together.

    sends, receives: lists of (contiguous tensor, peer), peer being a rank of `group`. Any two ranks
    have the messages between them, and the batches, in the same order and of the same sizes (a
    message larger than its buffer aborts a gloo rank); empty ones are not sent. Pending operations
    of the group come first. A RuntimeError names the peer of what failed.
    """
    messages = sends or receives
    tensor = messages[0][0] if messages else None
    operation = Operation("exchange", group, tensor, async_op)
    operation.tell("begin")
    try:
        operation.queue.finish()
    except Exception:
        pass  # errors of earlier operations are raised by their own wait()
    wait = operation.post(sends, receives)
    if async_op:
        return Work(operation, partial(operation.complete, wait))
    operation.complete(wait)


# ---- algorithms take turns -----------------------------------------------------------------------
#
# An algorithm is a generator. It yields (sends, receives), goes on when they are complete, and does
# its arithmetic in between. A large tensor is cut into segments, each a collective of its own:
# while one of them is added, the others travel.

SEGMENT = 1 << 20  # bytes of a chunk that travel in one message
WINDOW = 3  # segments under way
ALIGNMENT = 128  # bytes; a GPU reads 128 at once (NCCL and grouped products need 16)


def take_turns(algorithms, operation):
    """Run algorithms, WINDOW of them at a time: the one that began its step first goes on first.

    So do all ranks: the k-th message that rank 0 posts for rank 1 is the k-th expected there.
    """
    waiting, under_way = deque(algorithms), deque()
    most = 1 if operation.queue.on_nccl else WINDOW  # a stream runs one batch after the other
    while waiting or under_way:
        if waiting and len(under_way) < most:
            algorithm = waiting.popleft()
        else:
            algorithm, wait = under_way.popleft()
            wait()
        # its next step, if there is one; no name keeps the tensors of the one before
        under_way += [(algorithm, operation.post(*step)) for step in islice(algorithm, 1)]


def _cut(flat, parts, P=1):
    """A flat tensor in so many parts, each of which begins on a multiple of 128 P bytes.

    10 x 128 bytes in 4 parts: 2, 3, 2 and 3 x 128 bytes; of few bytes some parts are empty.
    """
    if parts == 1:
        return [flat]
    unit = P * ALIGNMENT // flat.itemsize
    units = math.ceil(len(flat) / unit)
    return flat.tensor_split([units * part // parts * unit for part in range(1, parts)])


# ---- reduce-scatter, all-gather, all-reduce ------------------------------------------------------
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
    """outgoing[r] to every other rank r, next ones first, and arriving[r] from it. 1 step."""
    P = len(outgoing)
    for first in range(1, P, MOST_PEERS):
        batch = range(first, min(first + MOST_PEERS, P))
        to_ranks, from_ranks = [(rank + k) % P for k in batch], [(rank - k) % P for k in batch]
        yield [(outgoing[r], r) for r in to_ranks], [(arriving[r], r) for r in from_ranks]


def _direct_reduce_scatter(chunks, output, add, rank):
    """Every chunk to its rank, which adds in the order of ranks; alone it copies. 1 step."""
    parts = [chunk if r == rank else torch.empty_like(output) for r, chunk in enumerate(chunks)]
    yield from _pairwise(chunks, parts, rank)
    total, *others = parts
    for part in others:
        received = parts[1 if rank == 0 else 0]  # one that came may be written, the own chunk not
        total = add(total, part, out=output if part is parts[-1] else received)
    if not others:
        output.copy_(total)


def _direct_all_gather(chunks, rank):
    """The own chunk to every rank. 1 step."""
    return _pairwise([chunks[rank]] * len(chunks), chunks, rank)


def _halving(chunks, output, add, rank):
    """Reduce-scatter among 2^k ranks by swapping halves of sums, then quarters ... log2(P) steps.

        rank        0              1              2              3
        step 0   c01: 0+2       c01: 1+3       c23: 0+2       c23: 1+3       (partner = rank xor 2)
        step 1   c0: 0+1+2+3    c1: 0+1+2+3    c2: 0+1+2+3    c3: 0+1+2+3    (partner = rank xor 1)
    """
    while len(chunks) > 1:
        half = len(chunks) // 2
        kept, given = chunks[:half], chunks[half:]
        if rank & half:
            kept, given = given, kept
        own, partner = _joined(kept), rank ^ half
        received = torch.empty_like(own)
        yield [(_joined(given), partner)], [(received, partner)]
        total = add(own, received, out=received if half > 1 else output)
        chunks = total.split_with_sizes([len(chunk) for chunk in kept])


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


def _hierarchical_reduce_scatter(chunks, output, add, rank, ranks_per_node):
    """For P = O x I ranks, node by node I ranks each: direct inside, then a ring across nodes.

    Local rank i sums chunk i of every node. (I-1)/I D bytes stay inside, (O-1)/O D/I cross.
    1 + (O-1) steps. O = I = 2:

        rank       0               1               2               3
        inside     c0 c2: 0+1      c1 c3: 0+1      c0 c2: 2+3      c1 c3: 2+3
        across     c0: 2+3+0+1     c1: 2+3+0+1     c2: 0+1+2+3     c3: 0+1+2+3
    """
    P, I = len(chunks), ranks_per_node
    node, local_rank = divmod(rank, I)
    inside, across = range(node * I, node * I + I), range(local_rank, P, I)
    sums = [torch.empty_like(chunk) for chunk in chunks[local_rank::I]]
    nodes = [chunks[first : first + I] for first in range(0, P, I)]
    direct = [_direct_reduce_scatter(n, total, add, local_rank) for n, total in zip(nodes, sums)]
    yield from _among(inside, direct)
    yield from _among(across, [_ring_reduce_scatter(sums, output, add, node)])


def _hierarchical_all_gather(chunks, rank, ranks_per_node):
    """The reverse: a ring across the nodes, then direct inside them. (O-1) + 1 steps."""
    P, I = len(chunks), ranks_per_node
    node, local_rank = divmod(rank, I)
    inside, across = range(node * I, node * I + I), range(local_rank, P, I)
    nodes = [chunks[first : first + I] for first in range(0, P, I)]
    yield from _among(across, [_ring_all_gather(chunks[local_rank::I], node)])
    yield from _among(inside, [_direct_all_gather(n, local_rank) for n in nodes])


def _among(ranks, algorithms):
    """Algorithms for ranks 0 to P-1, among these, as many together as MOST_PEERS allows."""
    most = max(1, MOST_PEERS // len(ranks))
    for first in range(0, len(algorithms), most):
        for steps in zip_longest(*algorithms[first : first + most]):  # all, past their last yield
            yield [[(t, ranks[r]) for side in sides for t, r in side] for sides in zip(*steps)]


_PHASES = {  # reduce-scatter, all-gather
    "direct": (_direct_reduce_scatter, _direct_all_gather),
    "ring": (_ring_reduce_scatter, _ring_all_gather),
    "halving_doubling": (_halving, _doubling),
    "hierarchical": (_hierarchical_reduce_scatter, _hierarchical_all_gather),
}


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


def _all_reduce(name, output, input, add, rank, world_size, **nodes):
    """By this algorithm. Doubling takes 2^k <= P ranks; rank r - 2^k stands in for an r beyond."""
    core = 1 << (world_size.bit_length() - 1) if "doubling" in name else world_size
    if rank >= core:
        yield [(input, rank - core)], []  # first it gives its tensor away
        yield [], [(output, rank - core)]  # at the end it gets the result
        return
    stands_in = rank + core < world_size
    if stands_in:
        other = torch.empty_like(input)
        yield [], [(other, rank + core)]
        input = add(input, other, out=other)
    if name == "naive":
        yield from _direct_reduce_scatter([input] * core, output, add, rank)
    elif name == "recursive_doubling":
        yield from _recursive_doubling(output, input, add, rank, core)
    else:
        reduce_scatter, all_gather = _PHASES[name]
        chunks = _cut(output, core)
        yield from reduce_scatter(_cut(input, core), chunks[rank], add, rank, **nodes)
        yield from all_gather(chunks, rank, **nodes)
    if stands_in:
        yield [(output, rank + core)], []


def reduce_scatter_bytes(nbytes, world_size):
    """Bytes that one rank sends to reduce-scatter, or all-gather, a full tensor of `nbytes`."""
    return nbytes * (world_size - 1) // world_size


def all_reduce_bytes(nbytes, world_size):
    """Bytes that one rank sends to all-reduce `nbytes` by the ring: no algorithm sends fewer."""
    return 2 * nbytes * (world_size - 1) // world_size


def all_reduce_cost(algorithm, nbytes, world_size, ranks_per_node=1, rank=0):
    """(steps, bytes that this rank sends) of an all-reduce of `nbytes`; rank 0 is the busiest.

    Exact where 128 P divides nbytes; else a chunk may be 128 bytes longer than its share, or less.
    """
    D, P, I, core = nbytes, world_size, ranks_per_node, 1 << (world_size.bit_length() - 1)
    rounds, stands_in, least = core.bit_length() - 1, rank + core < P, all_reduce_bytes(D, P)
    if "doubling" in algorithm and rank >= core:
        return 2, D  # another rank stands in: its tensor goes there, the sum comes back
    return {
        "naive": (min(1, P - 1), (P - 1) * D),
        "direct": (2 * min(1, P - 1), least),
        "ring": (2 * (P - 1), least),
        "hierarchical": (2 * (min(1, I - 1) + P // I - 1), least),
        "recursive_doubling": (rounds + 2 * stands_in, (rounds + stands_in) * D),
        "halving_doubling": (2 * rounds + 2 * stands_in, all_reduce_bytes(D, core) + stands_in * D),
    }[algorithm]


# ---- one at an end: trees, and everyone to one ---------------------------------------------------


def _tree(at):
    """The parent and children, farthest first, of an Operation's rank in a tree of depth log2(P).

    P = 8    0->4, 0->2 4->6, 0->1 2->3 4->5 6->7       counted from the root
    """
    P, rank, children, distance = at.world_size, at.rank, [], 1
    number = (rank - at.root) % P
    while distance < P and not number & distance:
        if number + distance < P:
            children.insert(0, (rank + distance) % P)
        distance *= 2
    return (rank - distance) % P if number else None, children


def _tree_broadcast(at, tensor):
    """Whoever has the tensor passes it to its children."""
    parent, children = _tree(at)
    if parent is not None:
        yield [], [(tensor, parent)]
    yield [(tensor, child) for child in children], []


def _tree_reduce(at, tensor):
    """Whoever has heard its children adds, nearest first, and passes the sum to its parent."""
    parent, children = _tree(at)
    sums, total = [torch.empty_like(tensor) for _ in children], tensor
    yield [], list(zip(sums, children))
    for received in sums[::-1]:
        total = _REDUCE[at.op](total, received, out=tensor if parent is None else received)
    if parent is not None:
        yield [(total, parent)], []


def _scatter(at, output, *inputs):
    if at.rank == at.root:
        output.copy_(inputs[at.rank])
        yield from ((sends, []) for sends, _ in _pairwise(inputs, inputs, at.rank))
    else:
        yield [], [(output, at.root)]


def _gather(at, *flat):
    *outputs, input = flat
    if at.rank == at.root:
        outputs[at.rank].copy_(input)
        yield from (([], receives) for _, receives in _pairwise(outputs, outputs, at.rank))
    else:
        yield [(input, at.root)], []


# ---- the choice ----------------------------------------------------------------------------------
#
# A step costs time, and so does a byte: few bytes are quickest in few steps, many by what sends the
# fewest. The constants were measured (gloo: 2 to 8 ranks on 2 cores, 1 Gbit/s between machines) or
# are of data sheets (NCCL: 60 us of the host's for a batch, 400 Gbit/s between nodes). They are
# constants lest a machine's mood change the bits of a training.

DIRECT_BYTES = 1 << 26  # of a full tensor that NCCL takes in one step: so much scratch it needs
LONG_BYTES = 1 << 21  # on gloo, above this segments stay in a cache, halves do not


@lru_cache(1 << 12)
def choose(nbytes, world_size, ranks_per_node, on_nccl, phases=1):
    """The quickest algorithm for a full tensor of `nbytes`; phases: 2, or 1 for half of them."""
    P, nodes, power_of_two = world_size, world_size // ranks_per_node, world_size.bit_count() == 1
    if P == 1 or on_nccl and nodes == 1:
        return "direct"  # alone, a rank copies; P-1 messages of a batch leave at once
    short = on_nccl or nbytes < LONG_BYTES
    possible = {
        "ring": True,
        "hierarchical": 1 < nodes < P,
        "recursive_doubling": short and phases == 2,
        "halving_doubling": short and (power_of_two or phases == 2),
        "direct": short and not power_of_two and phases == 1 and not on_nccl,
    }
    latency = 1 << (22 if on_nccl else 17 if nodes == 1 else 14)  # of a step: bytes sent meanwhile

    costs = {}
    for name in filter(possible.get, possible):
        steps, sent = all_reduce_cost(name, nbytes, P, ranks_per_node)
        costs[name] = steps * latency + sent // (ranks_per_node if name == "hierarchical" else 1)
    return min(costs, key=costs.get)


def _chosen(operation, nbytes, phases=1, name="auto"):
    """(name, segments, arguments of its own) of the quickest algorithm, unless named."""
    P, on_nccl, known = operation.world_size, operation.queue.on_nccl, operation.members
    if name == "auto" or P == 1:
        name = choose(nbytes, P, known.ranks_per_node, on_nccl, phases)
    own = {"ranks_per_node": known.ranks_per_node} if name == "hierarchical" else {}
    if "doubling" in name or name == "naive" or name == "ring" and on_nccl:
        # ranks beyond 2^k would post segments in another order; on NCCL they would not overlap
        return name, 1, own
    return name, math.ceil(nbytes / (DIRECT_BYTES if on_nccl else P * SEGMENT)) or 1, own


# ---- an operation and its messages ---------------------------------------------------------------
#
# The module has two tables. Groups are looked up in one, because torch's take no attributes, and
# listeners stand in the other, because autograd calls collectives in threads of its own, which do
# not have their caller's context.

_MEMBERSHIPS = weakref.WeakKeyDictionary()  # process group -> Membership
_LISTENERS = []  # the listener of every observe() that is open


class Membership:
    """What this rank knows of a process group. It is made once and shared by the operations there.

    rank, world_size: this rank in the group, and the group's size
    ranks: the global ranks of the members
    ranks_per_node, by_backend: see set_ranks_per_node() and set_backend_collectives()
    queues: {device type: the _Thread or _Stream that runs operations on such tensors in turn}
    """

    def __init__(self, group):
        self.rank, self.world_size = rank_and_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.ranks_per_node = self.world_size
        self.by_backend = False
        self.thread = _Thread(group)
        self.queues = {}

    def open_queue(self, device_type, group):
        """A group may have NCCL for CUDA tensors and gloo for those on CPUs."""
        if f"{device_type}:nccl" in dist.get_backend_config(group):
            self.queues[device_type] = _Stream()
        else:
            self.queues[device_type] = self.thread
        return self.queues[device_type]


def _membership(group, name):
    """Look up, or make, the Membership of a group in which `name` is called."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{name} is called by a rank that is not in the group")
    members = _MEMBERSHIPS.get(group)
    if members is None:
        members = _MEMBERSHIPS[group] = Membership(group)
    return members


class Operation:
    """One call of a collective, of exchange() or of Work.wait(), as observe() tells of it.

    name: "all_reduce" ..., "exchange" or "wait"
    of: the operation that a "wait" waits for; None for all others
    group, rank, world_size, ranks: the process group, and what its Membership says
    async_op: whether the caller gets a Work and goes on
    """

    def __init__(self, name, group, tensor=None, async_op=False, op=None, root=None, of=None):
        """tensor: one of those that travel; op: the ReduceOp; root: a global rank."""
        self.name = name
        self.of = of
        self.async_op = async_op
        self.op = op
        self.group = group or dist.group.WORLD
        self.members = members = _membership(self.group, name)
        self.rank = members.rank
        self.world_size = members.world_size
        self.ranks = members.ranks
        device_type = "cpu" if tensor is None else tensor.device.type
        self.queue = members.queues.get(device_type)
        if self.queue is None:
            self.queue = members.open_queue(device_type, self.group)
        if root is not None and root not in self.ranks:
            raise ValueError(f"src or dst={root} is not among the group's ranks {self.ranks}")
        self.root = None if root is None else self.ranks.index(root)
        self.listeners = of.listeners if of else tuple(_LISTENERS)

    def tell(self, event, *messages):
        for listener in self.listeners:
            listener(event, self, *messages)

    def complete(self, run):
        try:
            run()
        finally:
            self.tell("end")

    def post(self, sends, receives):
        """Begin messages [(tensor, peer)] that progress together. Returns what waits for them.

        It keeps their tensors. NCCL takes a batch. gloo takes single messages, with tags that keep
        them apart from a user's; dist.isend() and irecv() would cost the host almost twice as much.
        """
        sends = [message for message in sends if message[0].numel()]
        receives = [message for message in receives if message[0].numel()]
        if not sends and not receives:
            return _do_nothing
        self.tell("post", sends, receives)
        if self.queue.on_nccl:
            messages = receives + sends
            work = self.attempt(messages, post_batch, self.group, sends, receives)
            return partial(self.wait, [(messages, work)])
        tag = (1 << 30) + (self.name != "exchange")  # beyond a user's tags
        works, staged = [], []
        for message in receives:
            tensor, peer = message
            buffer = _on_host(tensor)
            if buffer is not tensor:
                staged.append((tensor, buffer))
            work = self.attempt([message], self.group.recv, [buffer], peer, tag)
            works.append(([message], work))
        for message in sends:
            tensor, peer = message
            buffer = _on_host(tensor, filled=True)
            work = self.attempt([message], self.group.send, [buffer], peer, tag)
            works.append(([message], work))
        return partial(self.wait, works, staged)

    def wait(self, works, staged=()):
        """works: [(messages, their torch Work)]; staged: [(tensor on a GPU, what it is read from)]"""
        for messages, work in works:
            self.attempt(messages, work.wait)
        for tensor, buffer in staged:
            tensor.copy_(buffer)

    def attempt(self, messages, call, *arguments):
        """Return call(*arguments). Its errors name the peers of the messages."""
        try:
            return call(*arguments)
        except RuntimeError as error:
            peers = [peer for _, peer in messages]
            raise RuntimeError(f"{self.describe('lost', peers)}: {error}") from error

    def describe(self, verb, peers):
        """Say what this rank has to say of some peers, and in which operation."""
        named = " or ".join(str(self.ranks[peer]) for peer in sorted(set(peers)))
        where = f"{self.name} in the group of ranks {self.ranks}"
        return f"{where}: rank {self.ranks[self.rank]} {verb} rank {named}"


def post_batch(group, sends, receives):
    """Post messages [(tensor, peer)] to NCCL as one batch, and return the torch Work of all.

    This is what batch_isend_irecv() does, without what it asks anew for every message.
    """
    device = (receives or sends)[0][0].device
    group._start_coalescing(device)
    for tensor, peer in receives:
        group.recv([_as_real(tensor)], peer, 0)
    for tensor, peer in sends:
        group.send([_as_real(tensor)], peer, 0)
    return group._end_coalescing(device)


def _as_real(tensor):
    """NCCL has no complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _on_host(tensor, filled=False):
    """gloo cannot send CUDA memory: a pinned host buffer in its place. CPU tensors travel as is."""
    if not tensor.is_cuda:
        return tensor
    buffer = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return buffer.copy_(tensor) if filled else buffer


def _do_nothing():
    pass


@contextmanager
def observe(listener):
    """Have listener(event, operation, ...) called for every Operation that begins inside:

    begin                     in the caller's thread, when it is called
    post, sends, receives     where messages [(tensor, peer in the group)] are posted, before it
    end                       when it is done, or has failed: an asynchronous one where it runs

    Work.wait() is an operation, too: a "wait" `of` another one. A caller waits from begin to end of
    each with async_op False; the "end" of an asynchronous exchange comes in its Work.wait().
    """
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


# ---- at once, or while Python computes -----------------------------------------------------------
#
# A collective makes an Operation; _launch() runs it when its turn comes: take_turns() steps through
# its generators, and post() begins the messages they yield. Those of a group run one after the
# other: in the background with async_op, or behind pending ones, else at once. The background is a
# thread of the group's for gloo, whose messages somebody must wait for, a side stream for NCCL,
# whose waits block no host. Inputs are read at that turn. exchange() first waits for the group's
# pending collectives; none waits for an exchange().


class Work:
    """An operation under way: wait() returns once it is done, and raises its error.

    On CUDA, as in torch.distributed, wait() holds up the current stream and not the host.
    is_completed(): whether wait() would return, or raise, at once.
    """

    def __init__(self, operation, finish, is_completed=lambda: False):
        self._operation = operation
        self._finish = finish
        self.is_completed = is_completed

    def wait(self):
        operation = self._operation
        if operation.listeners:
            waiting = Operation("wait", operation.group, of=operation)
            waiting.tell("begin")
            waiting.complete(self._finish)
        else:
            self._finish()
        self._finish = _do_nothing  # which lets go of the tensors


class _Stream:
    """The side stream of a group on NCCL. It is made once: torch hands out a pool of 32 in turn."""

    on_nccl = True
    PENDING = 6  # operations by which the host may be ahead of the device

    def __init__(self):
        self.stream = torch.cuda.Stream(priority=-1)  # messages go before the computation's kernels
        self.pending = deque()  # (event, tensors that are held until the stream has passed it)
        self.finish, self.is_completed = lambda: None, lambda: True

    def run_now(self, run):
        """At once, on the caller's stream."""
        run()
        self.note(torch.cuda.current_stream().record_event(), [])

    def submit(self, run, tensors):
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            run()
        event = self.stream.record_event()
        held = list(tensors)
        self.note(event, held)

        def finish():
            torch.cuda.current_stream().wait_event(event)
            held.clear()  # whoever uses their memory from now on comes after the event

        self.finish, self.is_completed = finish, event.query
        return finish, event.query

    def note(self, event, held):
        """Memory that messages touched is free once the host has seen the event that follows them.

        So the host waits for earlier operations here, lest it run ahead and use up the memory.
        """
        self.pending.append((event, held))
        while self.pending and self.pending[0][0].query():
            self.pending.popleft()
        while len(self.pending) > self.PENDING:
            self.pending.popleft()[0].synchronize()


class _Thread:
    """A group's thread, which does what is submitted in turn until the group, or Python, ends."""

    on_nccl = False

    def __init__(self, group):
        self.calls = SimpleQueue()
        self.finish, self.is_completed = lambda: None, lambda: True  # of the last one submitted
        self.thread = threading.Thread(target=self.run, daemon=True)
        weakref.finalize(group, self.end)

    def run(self):
        schedule_as_batch("SCHED_OTHER")  # batch work would wait until whoever wakes it pauses
        for call, inference, running, errors in iter(self.calls.get, None):
            try:
                with torch.inference_mode(inference):  # a mode of each thread
                    call()
            except BaseException as error:
                errors.append(error)
            running.release()
            del call  # which holds the group

    def end(self):
        """A thread that comes back from C++ when there is no Python any more aborts the process."""
        self.calls.put(None)
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(30)  # seconds

    def run_now(self, run):
        run()

    def submit(self, run, tensors):
        running, errors = threading.Lock(), []
        running.acquire()
        if self.thread.ident is None:
            self.thread.start()
        self.calls.put((run, torch.is_inference_mode_enabled(), running, errors))

        def finish():
            with running:
                for error in errors:
                    raise error

        self.finish, self.is_completed = finish, lambda: not running.locked()
        return finish, self.is_completed


# ---- the collectives -----------------------------------------------------------------------------
#
# Each returns None, or a Work with async_op. ValueError says which sizes do not fit: too short a
# buffer would abort the process. As in torch.distributed, src and dst are global ranks.


def _launch(operation, algorithms, outputs, inputs=(), **options):
    """Do the operation in its turn, by algorithms(*outputs, *inputs), or torch's with options."""
    tensors, count = (*outputs, *inputs), len(outputs)

    def run():
        flat = [tensor.detach().contiguous().view(-1) for tensor in tensors]
        if operation.members.by_backend:
            _backend_collective(operation, flat[:count], flat[count:], **options)
        else:
            take_turns(algorithms(*flat), operation)
        if operation.op == ReduceOp.AVG and outputs:
            flat[0].div_(operation.world_size)
        for tensor, result in zip(outputs, flat):
            if not tensor.is_contiguous():  # then the result is in a copy
                tensor.detach().copy_(result.view(tensor.shape))

    operation.tell("begin")
    queue = operation.queue
    if operation.async_op and operation.world_size > 1:
        return Work(operation, *queue.submit(partial(operation.complete, run), tensors))
    if queue.is_completed():
        operation.complete(partial(queue.run_now, run))
    else:  # behind what is pending
        finish, _ = queue.submit(run, tensors)
        operation.complete(finish)
    return Work(operation, _do_nothing, lambda: True) if operation.async_op else None


def set_backend_collectives(group=None):
    """Have the group's collectives be the backend's own, a yardstick, whose bytes nobody counts."""
    operation = Operation("set_backend_collectives", group)
    operation.members.by_backend = operation.world_size > 1


def _backend_collective(operation, outputs, inputs, **options):
    """torch.distributed's function of the operation's name."""
    name, root = operation.name, operation.root
    if operation.op is not None:
        options["op"] = ReduceOp.SUM if operation.op == ReduceOp.AVG else operation.op
    if root is not None:
        options["group_dst" if name in ("reduce", "gather") else "group_src"] = root
    if name == "all_reduce" and inputs:
        outputs[0].copy_(inputs.pop())
    inputs = [x.clone() for x in inputs] if name == "reduce" else inputs  # gloo's writes into it
    ends = [flat if len(flat) > 1 else flat[0] for flat in (outputs, inputs) if flat]
    ends = ends[::-1] if name == "gather" else ends
    getattr(dist, name)(*ends, group=operation.group, **options)


def _check_fits(output, input, found, expected):
    if (found, output.dtype) != (expected, input.dtype):
        made = f"input makes {expected} of {input.dtype}"
        raise ValueError(f"output has {found} elements of {output.dtype}, {made}")


def all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op=False, algorithm="auto", output=None):
    """Reduce `tensor` over the group, in place or into `output`; all ranks get the same bits.

    op: SUM, AVG (not of integers), PRODUCT, or MIN and MAX (not of complex numbers).
    algorithm: naive, direct, ring, recursive_doubling, halving_doubling, or hierarchical, by the
    nodes of set_ranks_per_node(); auto takes what choose() says.
    """
    operation = Operation("all_reduce", group, tensor, async_op, op)
    add, rank, P = _REDUCE[op], operation.rank, operation.world_size

    def algorithms(*flat):
        name, segments, nodes = _chosen(operation, tensor.nbytes, 2, algorithm)
        parts = zip(*(_cut(end, segments, P) for end in (flat[0], flat[-1])))
        return [_all_reduce(name, *part, add, rank, P, **nodes) for part in parts]

    if output is not None:
        _check_fits(output, tensor, output.numel(), tensor.numel())
    ends = ([tensor],) if output is None else ([output], [tensor])
    return _launch(operation, algorithms, *ends)


def reduce(tensor, dst=0, op=ReduceOp.SUM, group=None, async_op=False):
    """Reduce `tensor` over the group into that of rank `dst`; the others keep theirs."""
    operation = Operation("reduce", group, tensor, async_op, op, dst)
    ends = ([tensor], []) if operation.rank == operation.root else ([], [tensor])
    return _launch(operation, lambda *flat: [_tree_reduce(operation, *flat)], *ends)


def broadcast(tensor, src=0, group=None, async_op=False):
    """Copy `tensor` of rank `src` to every rank, in place."""
    operation = Operation("broadcast", group, tensor, async_op, root=src)
    return _launch(operation, lambda flat: [_tree_broadcast(operation, flat)], [tensor])


def reduce_scatter_single(output, input, op=ReduceOp.SUM, group=None, async_op=False):
    """Reduce `input` over the group; rank r keeps chunk r in `output`, a P-th as long."""
    operation = Operation("reduce_scatter_single", group, output, async_op, op)
    add, rank, P = _REDUCE[op], operation.rank, operation.world_size
    _check_fits(output, input, P * output.numel(), input.numel())

    def algorithms(output, input):
        name, segments, nodes = _chosen(operation, input.nbytes)
        parts = zip(*(_cut(flat, segments) for flat in (*input.tensor_split(P), output)))
        return [_PHASES[name][0](chunks, own, add, rank, **nodes) for *chunks, own in parts]

    return _launch(operation, algorithms, [output], [input])


def all_gather_single(output, input, group=None, async_op=False):
    """Collect `input` of every rank in `output`, P times as long, in rank order."""
    operation = Operation("all_gather_single", group, output, async_op)
    rank, P = operation.rank, operation.world_size
    _check_fits(output, input, output.numel(), P * input.numel())

    def algorithms(output, input):
        name, segments, nodes = _chosen(operation, output.nbytes)
        chunks = output.tensor_split(P)
        if chunks[rank].data_ptr() != input.data_ptr():
            chunks[rank].copy_(input)
        parts = zip(*(_cut(chunk, segments) for chunk in chunks))
        return [_PHASES[name][1](part, rank, **nodes) for part in parts]

    return _launch(operation, algorithms, [output], [input])


def all_gather(tensor_list, tensor, group=None, async_op=False):
    """Collect `tensor` of every rank r in tensor_list[r]; lengths may differ. 1 step."""
    operation = Operation("all_gather", group, tensor, async_op)
    outputs, rank = _check_list(operation, tensor_list, tensor), operation.rank

    def algorithms(*flat):
        flat[rank].copy_(flat[-1])
        return [_direct_all_gather(flat[:-1], rank)]

    return _launch(operation, algorithms, outputs, [tensor])


def scatter(tensor, scatter_list=None, src=0, group=None, async_op=False):
    """Give rank r of the group the r-th tensor of `scatter_list`, which rank `src` has."""
    operation = Operation("scatter", group, tensor, async_op, root=src)
    inputs = _check_list(operation, scatter_list, tensor)
    return _launch(operation, lambda *flat: [_scatter(operation, *flat)], [tensor], inputs)


def gather(tensor, gather_list=None, dst=0, group=None, async_op=False):
    """Collect `tensor` of every rank r of the group in gather_list[r] of rank `dst`."""
    operation = Operation("gather", group, tensor, async_op, root=dst)
    outputs = _check_list(operation, gather_list, tensor)
    return _launch(operation, lambda *flat: [_gather(operation, *flat)], outputs, [tensor])


def _check_list(operation, tensors, like):
    """The list of a root, or of all, with a tensor for each rank; like: how long are they?"""
    if operation.root not in (None, operation.rank):
        return []
    count, P, rank = len(tensors or ()), operation.world_size, operation.rank
    if count != P:
        raise ValueError(f"{operation.name} got a list of {count}, not of world_size={P}")
    for tensor in tensors[rank : rank + 1] if operation.root is None else tensors:
        _check_fits(tensor, like, tensor.numel(), like.numel())
    return tensors


def all_to_all_single(
    output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
):
    """Send the i-th piece of `input` to rank i, and receive rank i's piece as the i-th of `output`.

    Pieces are rows (dim 0): *_split_sizes rows for each rank, or equal ones.
    """
    operation = Operation("all_to_all_single", group, output, async_op)
    rank, P = operation.rank, operation.world_size
    received = _split_sizes(output, output_split_sizes, P)
    sent = _split_sizes(input, input_split_sizes, P)
    _check_fits(output, input, received[rank], sent[rank])

    def algorithms(output, input):
        outputs, inputs = output.split_with_sizes(received), input.split_with_sizes(sent)
        outputs[rank].copy_(inputs[rank])
        return [_pairwise(inputs, outputs, rank)]

    splits = {"output_split_sizes": received, "input_split_sizes": sent}
    return _launch(operation, algorithms, [output], [input], **splits)


def _split_sizes(tensor, split_sizes, world_size):
    """Elements of `tensor` for each rank, from rows (dim 0) for each rank; equal rows if None."""
    rows, P = len(tensor), world_size
    sizes = split_sizes or [rows // P] * P
    if len(sizes) != P or sum(sizes) != rows:
        raise ValueError(f"{rows} rows are not split for world_size={P} by sizes {sizes}")
    return [size * tensor.numel() // max(1, rows) for size in sizes]


def barrier(group=None):
    """Return when every rank of the group has called it, and sent a byte."""
    token = torch.zeros(1, dtype=torch.uint8, device=_device(group))
    all_reduce(token, group=group)
    if token.is_cuda:
        torch.cuda.current_stream().synchronize()


def _device(group):
    """Where a group's own tensors are: a group of CPUs, too, may have NCCL for CUDA tensors."""
    return "cpu" if "cpu:" in dist.get_backend_config(group) else "cuda"


# ---- derivatives: the backward of a collective is a collective -----------------------------------
#
# What each rank uses in its own way (the same x, times its own columns of W) has a part of its
# gradient on each, and the parts are summed. What all use alike (x, times the same norm's weights)
# has its whole gradient on each, and a sum would count it P times. No function changes its input;
# all but _identity() return new memory.


def _identity(x, group):
    return x.view_as(x)


def _all_reduced(x, group):
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    all_reduce(x, group=group, output=output)
    return output


def _all_gathered(x, dim, group):
    output = x.new_empty(dist.get_world_size(group), *x.shape)
    all_gather_single(output, x, group)
    return output.movedim(0, dim).flatten(dim, dim + 1).detach()  # no view: it may be changed


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


_PAIRS = {  # forward, backward; what x is before -> after
    "copy_to_group": (_identity, _all_reduced),  # replicated -> each uses it its way; Megatron's f
    "reduce_from_group": (_all_reduced, _identity),  # partial sums -> replicated; Megatron's g
    "scatter_to_group": (_own_chunk, _all_gathered),  # replicated -> split
    "gather_from_group": (_all_gathered, _own_chunk),  # split -> replicated, used alike
    "all_gather_to_group": (_all_gathered, _reduce_scattered),  # split -> each uses all its way
    "reduce_scatter_to_group": (_reduce_scattered, _all_gathered),  # partial sums -> split
    # split one way -> split another
    "all_to_all_in_group": (_all_to_all, lambda x, a, b, group: _all_to_all(x, b, a, group)),
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
    """x itself, for no change in place; the ranks' gradients for it are summed. Megatron's f."""
    return _Conjugate.apply(x, _PAIRS["copy_to_group"], group)


def reduce_from_group(x, group=None):
    """The sum of every rank's x; its gradient goes to every summand. Megatron's g."""
    return _Conjugate.apply(x, _PAIRS["reduce_from_group"], group)


def scatter_to_group(x, dim, group=None):
    """This rank's chunk, along `dim`, of x, which all have. RuntimeError if P does not divide."""
    return _Conjugate.apply(x, _PAIRS["scatter_to_group"], dim % x.ndim, group)


def gather_from_group(x, dim, group=None):
    """Every rank's x, joined along `dim`, for a use that is the same on every rank."""
    return _Conjugate.apply(x, _PAIRS["gather_from_group"], dim % x.ndim, group)


def all_gather_to_group(x, dim, group=None):
    """Every rank's x, joined along `dim`, used differently by each: gradients are summed."""
    return _Conjugate.apply(x, _PAIRS["all_gather_to_group"], dim % x.ndim, group)


def reduce_scatter_to_group(x, dim, group=None):
    """This rank's chunk, along `dim`, of the sum of all x. RuntimeError if P does not divide."""
    return _Conjugate.apply(x, _PAIRS["reduce_scatter_to_group"], dim % x.ndim, group)


def all_to_all_in_group(x, output_split_sizes=None, input_split_sizes=None, group=None):
    """all_to_all_single() of the rows of x, differentiable."""
    splits = output_split_sizes, input_split_sizes
    return _Conjugate.apply(x, _PAIRS["all_to_all_in_group"], *splits, group)


# ---- processes, groups, and who listens ----------------------------------------------------------


def schedule_as_batch(policy="SCHED_BATCH"):
    """Have this thread, and those it starts from now on, scheduled as batch work (on Linux).

    To be called before the process group is made: else a thread of gloo's that preempts the rank
    it serves spins on a lock that the rank holds, and a message takes 2-5 ms, not 0.1 ms.
    """
    if hasattr(os, policy):
        os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))


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


def set_ranks_per_node(ranks_per_node, group=None):
    """Tell how many consecutive ranks of the group share a node: all of them, unless told fewer."""
    operation = Operation("set_ranks_per_node", group)
    ranks = min(ranks_per_node, operation.world_size)  # if they do not divide it: no nodes
    operation.members.ranks_per_node = 1 if operation.world_size % ranks else ranks


def gather_objects(value, group=None):
    """Every rank's `value`, anything that can be pickled, in rank order. Collective."""
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(_device(group))
    lengths = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=own.device)
    all_gather_single(lengths, lengths.new_tensor([len(own)]), group)
    texts = own.new_empty(len(lengths), max(lengths.tolist()))
    all_gather_single(texts, torch.nn.functional.pad(own, (0, texts.shape[1] - len(own))), group)
    return [pickle.loads(text.numpy()) for text in texts.cpu()]


def check_parameters(named, group=None):
    """ValueError, on every rank, if [(name, tensor)] are not alike on all of them. Collective."""
    told = lambda t: f"{tuple(t.shape)} {t.dtype} {t.requires_grad} {t.device.type}"
    first, *others = gather_objects([f"{name!r} {told(tensor)}" for name, tensor in named], group)
    for rank, other in enumerate(others, 1):
        for line, expected in zip_longest(other, first, fillvalue="nothing"):
            if line != expected:
                raise ValueError(f"rank {rank} of the group has {line}, rank 0 has {expected}")


def autocasted(x):
    """x as autocast would hand it to a matrix product."""
    device = x.device.type
    autocasts = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if autocasts else x


class Traffic:
    """Payload that this rank sent."""

    def __init__(self):
        self.sent = []  # (operation, group, peer in the group, bytes) of every message

    def bytes(self, operation=None, group=None, peers=None):
        """Bytes sent by one operation, in one group, to some peers; None stands for all."""
        sent = [m for m in self.sent if operation in (None, m[0]) and group in (None, m[1])]
        return sum(nbytes for *_, peer, nbytes in sent if peers is None or peer in peers)


@contextmanager
def count_bytes():
    """Count what this rank sends in operations begun inside: `with count_bytes() as traffic:`"""
    traffic = Traffic()

    def listen(event, operation, sends=(), receives=()):
        if operation.members.by_backend and operation.name not in ("exchange", "wait"):
            raise RuntimeError(f"nobody counts the bytes of the backend's own {operation.name}")
        for tensor, peer in sends:
            traffic.sent.append((operation.name, operation.group, peer, tensor.nbytes))

    with observe(listen):
        yield traffic


def report_stalls(seconds):
    """From now on, say on stderr whom gloo waits for that has not answered for so long: a line."""
    waits = {}  # operation -> [since when it waits, its peers]

    def listen(event, operation, sends=(), receives=()):
        operation, now = operation.of or operation, time.monotonic()
        if event == "post":
            later = operation.async_op and operation.name == "exchange"  # from Work.wait() on
            waits[operation] = [math.inf if later else now, [r for _, r in (*sends, *receives)]]
        elif event == "end":
            waits.pop(operation, None)
        elif operation in waits:
            waits[operation][0] = now

    def report():
        while threading.main_thread().is_alive():
            threading.main_thread().join(seconds / 8)
            for operation, wait in list(waits.items()):
                if time.monotonic() - wait[0] >= seconds:
                    wait[0] = math.inf  # told once
                    text = operation.describe("waits for", wait[1])
                    sys.stderr.write(f"{text} for more than {seconds} s\n")

    _LISTENERS.append(listen)
    threading.Thread(target=report).start()


# ---- demonstration -------------------------------------------------------------------------------


def _demonstrate():
    rank, P = rank_and_size()
    nbytes, ranks_per_node = 840 * 128 * P, 2 - P % 2
    set_ranks_per_node(ranks_per_node)
    for name in ("naive", "recursive_doubling", *_PHASES):
        tensor = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(rank))
        expected = tensor.double()
        dist.group.WORLD.allreduce([expected]).wait()
        with count_bytes() as traffic:
            all_reduce(tensor, algorithm=name)
        steps, sent = all_reduce_cost(name, nbytes, P, ranks_per_node, rank)
        if rank == 0:
            print(f"{name:20}{steps:3} steps, {sent:9} bytes claimed, {traffic.bytes():9} counted,"
                  f" at most {(tensor - expected).abs().max():.0e} from gloo's sum")


if __name__ == "__main__":
    run_ranks(_demonstrate)
