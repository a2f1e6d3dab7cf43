"""Collectives made of messages.

A process group of P ranks shares nothing; all that a rank can do is send a tensor to another rank
and receive one. Everything that training needs beyond that is built here from one primitive,
exchange(): a batch of sends and receives that progress together.

                           what happens                              a rank sends     steps
    all_reduce             everybody gets the sum of all tensors
      naive                everyone sends everything to everyone      (P-1) D         1
      ring                 reduce-scatter, then all-gather           2(P-1)/P D       2(P-1)
      recursive_doubling   sums swapped with ever farther ranks       log2(P) D       log2(P)
      halving_doubling     the same, with halves, quarters ...       2(P-1)/P D       2 log2(P)
      hierarchical         rings inside nodes and between them       2(P-1)/P D       2(I+O-2)
    reduce_scatter_single  rank r gets chunk r of the sum             (P-1)/P D       P-1 or log2(P)
    all_gather_single      everybody gets every rank's chunk          (P-1)/P D       P-1 or log2(P)
    all_to_all_single      rank i's chunk j goes to rank j            (P-1)/P D       1
    broadcast, reduce      down and up a tree                         log2(P) D       log2(P)
    gather, scatter        everyone to one, one to everyone           (P-1)/P D       1

D is the size of the full tensor in bytes; P = O x I ranks are O nodes of I ranks each.

2(P-1)/P D is the least that any all-reduce can send. Names, arguments and meaning are those of
torch.distributed; the code is the same on NCCL and on gloo.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
2005.

    torchrun --nproc-per-node 4 collectives.py      bytes claimed and counted, steps, time and cost
"""

import atexit
import hashlib
import inspect
import math
import os
import queue
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from functools import reduce as fold
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

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


# ---- messages ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Traffic:
    """Payload that this rank sent: bytes and messages by (operation, group, peer in the group)."""

    bytes_by: Counter = field(default_factory=Counter)
    messages_by: Counter = field(default_factory=Counter)

    def bytes(self, operation=None, group=None, peers=None):
        """Bytes sent by one operation, in one group, to some peers; None stands for all."""
        return _select(self.bytes_by, operation, group, peers)

    def messages(self, operation=None, group=None, peers=None):
        """Messages sent, selected as in bytes()."""
        return _select(self.messages_by, operation, group, peers)


def _select(counter, operation, group, peers):
    def wanted(key):
        return (
            operation in (None, key[0])
            and group in (None, key[1])
            and (peers is None or key[2] in peers)
        )

    return sum(count for key, count in counter.items() if wanted(key))


_COUNTERS = []  # the Traffic of every count_bytes() now open


@contextmanager
def count_bytes():
    """Count what this rank sends in operations begun inside: `with count_bytes() as traffic:`"""
    traffic = Traffic()
    _COUNTERS.append(traffic)
    try:
        yield traffic
    finally:
        _COUNTERS.remove(traffic)


EXCHANGE_TAG = 1 << 30  # beyond a user's tags; so is the next one, that of the collectives


@_for_members
def exchange(sends, receives, group=None, async_op=False):
    """Send and receive several tensors in one batch, whose messages progress together.

    sends, receives: lists of (contiguous tensor, peer), peer being a rank of `group`. Both ends of
    a link list its messages in the same order and with the same sizes (a message larger than its
    buffer aborts a gloo rank). Empty tensors are not sent. On NCCL batches run in the order they
    were issued in, so two ranks must issue the batches that they share in the same order.
    Returns None, or with async_op an object whose wait() completes the batch. A RuntimeError names
    the peer of a message that failed.
    """
    group = group or dist.group.WORLD
    if (background := _BACKGROUND.get(group)) is not None:
        background.last.finished.wait()  # as on NCCL, where a group's messages keep their order
    works = _Exchange(_Link("exchange", group, tuple(_COUNTERS), EXCHANGE_TAG), sends, receives)
    if async_op:
        return works
    works.wait()


class _Exchange:
    """The messages of one batch, under way."""

    def __init__(self, link, sends, receives):
        self.link = link
        if link.nccl:
            self.works = [(work, None) for work in link.batch(sends, receives)]
        else:
            self.works = [(link.receive(tensor, peer), peer) for tensor, peer in receives]
            self.works += [(link.send(tensor, peer), peer) for tensor, peer in sends]

    def wait(self):
        for work, peer in self.works:
            self.link.wait(work, peer)


class _Link:
    """Posts the messages of one operation in one group, and counts what it sends."""

    def __init__(self, operation, group, counters, tag=EXCHANGE_TAG + 1):
        self.operation, self.group, self.counters, self.tag = operation, group, counters, tag
        self.ranks = dist.get_process_group_ranks(group)  # unknown once the group is destroyed
        self.nccl = dist.get_backend(group) == "nccl"

    def receive(self, tensor, peer):
        """The work of a receive on gloo."""
        buffer = _on_host(tensor)
        work = self._begin(self.group.recv, buffer, peer)
        return work if buffer is tensor else _Staged(work, buffer, tensor)

    def send(self, tensor, peer):
        """The work of a send on gloo, which may read the tensor until its wait()."""
        if self.counters:
            self._count([(tensor, peer)])
        buffer = _on_host(tensor)
        if buffer is not tensor:
            buffer.copy_(tensor)
        return self._begin(self.group.send, buffer, peer)

    def batch(self, sends, receives):
        """The works of a batch on NCCL."""
        sends = [message for message in sends if message[0].numel()]
        receives = [message for message in receives if message[0].numel()]
        self._count(sends)
        batch = [dist.P2POp(dist.irecv, t, group=self.group, group_peer=p) for t, p in receives]
        batch += [dist.P2POp(dist.isend, t, group=self.group, group_peer=p) for t, p in sends]
        return dist.batch_isend_irecv(batch) if batch else []

    def wait(self, work, peer):
        """Complete a message on gloo."""
        thread = threading.get_ident()
        _WAITS[thread] = self, work, peer
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(peer, error) from error
        finally:
            del _WAITS[thread]

    def waits_for(self, peer):
        """Which rank waits for which, in what."""
        own = self.ranks[self.group.rank()]
        where = f"{self.operation} in the group of ranks {self.ranks}"
        return f"{where}: rank {own} waits for rank {self.ranks[peer]}"

    def _begin(self, transfer, buffer, peer):
        if not buffer.numel():
            return _Nothing
        try:
            return transfer([buffer], peer, self.tag)
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def _count(self, sends):
        for traffic in self.counters:
            for tensor, peer in sends:
                if tensor.numel():
                    traffic.bytes_by[self.operation, self.group, peer] += tensor.nbytes
                    traffic.messages_by[self.operation, self.group, peer] += 1

    def _lost(self, peer, error):
        _SCRATCH.__init__()  # later messages may still arrive in its memory
        where = f"{self.operation} in the group of ranks {self.ranks}"
        own = self.ranks[self.group.rank()]
        return RuntimeError(f"{where}: rank {own} lost rank {self.ranks[peer]}: {error}")


class _Nothing:
    """The work of an empty message."""

    @staticmethod
    def wait():
        pass


class _Staged(NamedTuple):
    """The work of a receive into host memory, for a tensor on a GPU."""

    work: object
    buffer: torch.Tensor
    tensor: torch.Tensor

    def wait(self):
        self.work.wait()
        self.tensor.copy_(self.buffer)


def _on_host(tensor):
    """gloo cannot send CUDA memory: a pinned host buffer in its place. CPU tensors travel as is."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


# ---- how a collective runs: now, or while Python computes ----------------------------------------
#
# An algorithm is a generator. It yields one Batch after the other, and does its local arithmetic in
# between. _launch() drains it: at once, or in the background, where each group has its own queue. A
# group's operations run strictly one after the other, and each reads its inputs when its turn
# comes. In the background that means
#   gloo   a thread of the group's: a batch is only complete when somebody has waited for it;
#   NCCL   a side stream of the group's: there waiting orders streams and blocks nobody.


class Batch(NamedTuple):
    """Messages that progress together, [(tensor, peer)].

    early_sends, early_receives: messages of later batches that nothing else touches meanwhile.
    gloo posts them now, so that no rank waits for a round trip; NCCL, where batches run in order,
    ignores them. linger: so many batches later the sends must be complete.
    """

    sends: list = ()
    receives: list = ()
    early_sends: list = ()
    early_receives: list = ()
    linger: int = 0


def _drain(link, batches):
    if link.nccl:
        for batch in batches:
            for work in link.batch(batch.sends, batch.receives):
                work.wait()
        return
    posted, leaving = {}, deque()
    for i, (sends, receives, early_sends, early_receives, linger) in enumerate(batches):
        for message in (*receives, *early_receives):
            if id(message) not in posted:
                posted[id(message)] = link.receive(*message)
        for message in (*sends, *early_sends):
            if id(message) not in posted:
                posted[id(message)] = link.send(*message)
        leaving += [(i + linger, posted.pop(id(message)), message[1]) for message in sends]
        for message in receives:
            link.wait(posted.pop(id(message)), message[1])
        while leaving and leaving[0][0] <= i:
            link.wait(*leaving.popleft()[1:])
    for _, work, peer in leaving:
        link.wait(work, peer)


class Work:
    """A group's operation, under way in a thread. wait() blocks until done; errors arise there."""

    def __init__(self, drain):
        self._drain, self._error = drain, None
        self._inference = torch.is_inference_mode_enabled()  # a mode of each thread
        self.finished = threading.Event()

    def run(self):
        try:
            with torch.inference_mode(self._inference):
                self._drain()
        except BaseException as error:
            self._error = error
        self._drain = None
        self.finished.set()

    def is_completed(self):
        """Whether wait() would return, or raise, at once."""
        return self.finished.is_set()

    def wait(self):
        self.finished.wait()
        if self._error is not None:
            raise self._error


class StreamWork:
    """An operation of a group's CUDA stream, under way. wait() makes the current stream wait."""

    def __init__(self, drain, tensors, group):
        self._tensors = tensors  # held, so that their memory is not used again before wait()
        stream = _STREAMS.setdefault(group, torch.cuda.Stream())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            drain()
        self._event = stream.record_event()

    def is_completed(self):
        """Whether the stream has passed the operation."""
        return self._event.query()

    def wait(self):
        torch.cuda.current_stream().wait_event(self._event)
        self._tensors = None


class _Thread(threading.Thread):
    """A thread that lives until None is in its queue, and has until then ended what it was at."""

    def __init__(self, target, *arguments):
        self.queue = queue.SimpleQueue()
        super().__init__(target=target, args=(self.queue, *arguments), daemon=True)
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


class _Background(_Thread):
    """Runs a group's background work, one operation after the other."""

    def __init__(self, group):
        super().__init__(self._loop)
        weakref.finalize(group, self.queue.put, None)

    def submit(self, work):
        self.last = work
        self.queue.put(work)
        return work

    @staticmethod
    def _loop(works):
        if hasattr(os, "SCHED_OTHER"):  # not as batch work: who wakes it would have it go on
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        while (work := works.get()) is not None:
            work.run()


def report_stalls(seconds):
    """From now on, say on stderr whom an operation waits for that has not moved for so many seconds.

    One line a stall. For gloo; on NCCL nobody waits in wait().
    """
    _Thread(_report_stalls, seconds)


def _report_stalls(end, seconds):
    since = {}  # when a wait was first seen; never again, once it has been told
    while True:
        try:
            return end.get(timeout=seconds / 8)
        except queue.Empty:
            now = time.monotonic()
        since = {wait: since.get(wait, now) for wait in list(_WAITS.values())}
        for link, work, peer in [wait for wait in since if now - since[wait] >= seconds]:
            since[link, work, peer] = math.inf
            sys.stderr.write(f"{link.waits_for(peer)} for more than {seconds} s\n")


_WAITS = {}  # thread -> (link, work, peer) of the message that it waits for
_BACKGROUND = weakref.WeakKeyDictionary()  # group -> _Background
_STREAMS = weakref.WeakKeyDictionary()  # group -> torch.cuda.Stream


def _launch(operation, batches, tensors, group, async_op, agreed=()):
    """Drain the batches of an algorithm on `tensors`; returns None, or its Work with async_op.

    agreed: what must be the same on all ranks; compared where PyTorch's debug level is DETAIL.
    """
    group = group or dist.group.WORLD
    link = _Link(operation, group, tuple(_COUNTERS))

    def drain():
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            call = " ".join(map(str, (operation, *agreed)))
            _drain(_Link(operation, group, ()), _compare(call, tensors[0], group))
        _drain(link, batches)

    if async_op and link.nccl:
        return StreamWork(drain, tensors, group)
    background = _BACKGROUND.get(group)
    if async_op and background is None:
        background = _BACKGROUND[group] = _Background(group)
    if async_op:
        return background.submit(Work(drain))
    if background is not None and not background.last.is_completed():
        return background.submit(Work(drain)).wait()
    drain()


def _compare(description, like, group, length=256):
    """Tell every rank what this one is about to do; raise if somebody is about to do otherwise."""
    rank, world_size = rank_and_size(group)
    text = description.encode()[:length].ljust(length)
    texts = [torch.tensor(list(text), dtype=torch.uint8).to(like.device) for _ in range(world_size)]
    peers = [peer for peer in range(world_size) if peer != rank]
    yield Batch([(texts[rank], peer) for peer in peers], [(texts[peer], peer) for peer in peers])
    calls = [bytes(text.tolist()).decode().strip() for text in texts]
    for other, call in enumerate(calls):
        if call != calls[0]:
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            raise ValueError(f"rank {ranks[0]} calls {calls[0]}, rank {ranks[other]} calls {call}")


def _into(output, algorithm, *arguments):
    """The batches of algorithm(flat, *arguments), where flat is `output` as one row of elements.

    Whatever reads a tensor stands in such a generator, and so runs when the operation's turn comes.
    """
    output = output.detach()
    flat = output.contiguous().view(-1)
    yield from algorithm(flat, *arguments)
    if not output.is_contiguous():
        output.copy_(flat.view_as(output))


def _flat(tensor):
    return tensor.detach().contiguous().view(-1)


# ---- all-reduce, the simplest way ----------------------------------------------------------------
#
# The algorithms reduce `input` of P ranks into `output` of all, which may be the same memory. A sum
# is either computed on one rank and copied, or on all along orders that mirror each other (a + b is
# b + a to the bit): all ranks end with the same bits, and the replicas of a model rely on that.

_REDUCE = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,  # and one division at the end
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}


def _naive(output, input, op, rank, world_size):
    """Everyone sends everything to everyone, and adds in the order of ranks. 1 step, (P-1) D bytes.

        rank        0         1         2         3
        start    0 . . .   . 1 . .   . . 2 .   . . . 3       which ranks' tensors a rank has
        step 0   0 1 2 3   0 1 2 3   0 1 2 3   0 1 2 3
    """
    tensors = list(input.new_empty(world_size, len(input)))
    tensors[rank] = input
    peers = [(rank + distance) % world_size for distance in range(1, world_size)]
    yield Batch([(input, peer) for peer in peers], [(tensors[peer], peer) for peer in peers])
    output.copy_(fold(_REDUCE[op], tensors))


# ---- the ring: reduce-scatter, all-gather, and all-reduce = the one, then the other --------------
#
#     rank 0 ---> rank 1 ---> rank 2 ---> rank 3 ---+       every link carries 1/P of the tensor
#       ^                                           |       at every step
#       +-------------------------------------------+

SEGMENT = 1 << 19  # bytes; a chunk travels in segments: adding one overlaps receiving the next


def _scatter_steps(chunks, partials, ring, rank):
    """Chunk r, reduced over the ranks in `ring`, into partials[-1] on the r-th of them. P-1 steps.

    A partial sum travels the ring, and each rank it visits adds its own chunk; the sum of step k is
    made in partials[k]. P = 4, what a rank holds:

        rank        0             1             2             3
        step 0   c2: 3+0       c3: 0+1       c0: 1+2       c1: 2+3
        step 1   c1: 2+3+0     c2: 3+0+1     c3: 0+1+2     c0: 1+2+3
        step 2   c0: 1+2+3+0   c1: 2+3+0+1   c2: 3+0+1+2   c3: 0+1+2+3
    """
    place = ring.index(rank)
    own = [chunks[(place - step - 2) % len(ring)] for step in range(len(ring) - 1)]
    return list(zip([chunks[place - 1], *partials], own, partials))


def _gather_steps(chunks, ring, rank):
    """Chunk r of the r-th rank in `ring` into chunk r of every one. P-1 steps, in place.

        rank        0         1         2         3
        start    0 . . .   . 1 . .   . . 2 .   . . . 3       the chunks that a rank has, P = 4
        step 0   0 . . 3   0 1 . .   . 1 2 .   . . 2 3
        step 1   0 . 2 3   0 1 . 3   0 1 2 .   . 1 2 3
        step 2   0 1 2 3   0 1 2 3   0 1 2 3   0 1 2 3
    """
    place = ring.index(rank)
    visitors = [chunks[(place - step) % len(ring)] for step in range(len(ring))]
    return [(outgoing, None, arriving) for outgoing, arriving in zip(visitors, visitors[1:])]


class _Scratch(threading.local):
    """Where a thread receives on gloo what it adds: always the same memory, as fresh pages cost."""

    def __init__(self):
        with torch.inference_mode(False):
            self.memory = torch.empty(3 << 20, dtype=torch.uint8)

    def rows(self, like, count, length):
        nbytes = count * length * like.itemsize
        if like.is_cuda or nbytes > len(self.memory):
            return like.new_empty(count, length)
        return self.memory[:nbytes].view(like.dtype).view(count, length)


_SCRATCH = _Scratch()


def _go_round(steps, op, ring, rank, reused=False):
    """Steps (outgoing, own, arriving): send `outgoing` on; `arriving` is what comes, plus `own`.

    A segment is sent on as soon as it is there, while those behind it are still to come. `reused`:
    step k + 2 has the memory of step k.
    """
    if not steps:
        return
    longest = max((part for step in steps for part in step[::2]), key=len)
    count = max(1, -(-longest.nbytes // SEGMENT))
    slots, rounds = _SCRATCH.rows(longest, 3, -(-len(longest) // count)), []
    for outgoing, own, arriving in steps:
        own = [None] * count if own is None else own.tensor_split(count)
        rounds += zip(outgoing.tensor_split(count), own, arriving.tensor_split(count))
    place = ring.index(rank)
    next_rank, prev_rank = ring[(place + 1) % len(ring)], ring[place - 1]
    sends, receives = [], []
    for i, (outgoing, own, arriving) in enumerate(rounds):
        sends.append((outgoing, next_rank))
        receives.append((arriving if own is None else slots[i % 3, : len(own)], prev_rank))
    for i, (_, own, arriving) in enumerate(rounds):
        early, last = (sends[i + 1 : i + count], receives[i + 1 : i + 3]), len(rounds) - 1 - i
        linger = min(count, last) if reused else last
        yield Batch([sends[i]], [receives[i]], *early, linger)
        if own is not None:
            _REDUCE[op](receives[i][0], own, out=arriving)


def _ring(output, input, op, rank, world_size):
    yield from _ring_among(range(world_size), output, input, op, rank)


def _ring_among(ring, output, input, op, rank):
    """Reduce-scatter and all-gather among the ranks in `ring`. 2(P-1) steps, 2(P-1)/P D bytes."""
    if len(ring) == 1:
        output.copy_(input)
    chunks, place = output.tensor_split(len(ring)), ring.index(rank)  # of all but equal sizes
    partials = [chunks[(place - step - 2) % len(ring)] for step in range(len(ring) - 1)]
    steps = _scatter_steps(input.tensor_split(len(ring)), partials, ring, rank)
    yield from _go_round(steps + _gather_steps(chunks, ring, rank), op, ring, rank)


# ---- logarithms: fewer steps, for small tensors --------------------------------------------------

SMALL = 1 << 20  # bytes of a full tensor up to which they scatter and gather faster than the ring


def _recursive_doubling(output, input, op, rank, world_size):
    """Exchange sums with the rank 1 away, then 2, 4 ... away. log2(P) steps of D bytes. P = 4:

        rank       0         1         2         3
        start      0         1         2         3           whose tensors are in a rank's sum
        step 0     0+1       0+1       2+3       2+3         (partner = rank xor 1)
        step 1     0+1+2+3   0+1+2+3   0+1+2+3   0+1+2+3     (partner = rank xor 2)
    """
    partners = [rank ^ (1 << step) for step in range(world_size.bit_length() - 1)]
    receives = list(zip(_SCRATCH.rows(input, len(partners), len(input)), partners))
    total, last = input, len(partners) - 1
    if not partners:
        output.copy_(input)
    for step, (received, partner) in enumerate(receives):
        yield Batch([(total, partner)], [receives[step]], [], receives[step + 1 :])
        total = _REDUCE[op](total, received, out=output if step == last else received)


def _halving(tensor, bounds, op, rank):
    """Reduce-scatter by swapping halves, quarters ...; returns chunk `rank`. log2(P) steps.

        rank        0              1              2              3
        step 0   c01: 0+2       c01: 1+3       c23: 0+2       c23: 1+3       (partner = rank xor 2)
        step 1   c0: 0+1+2+3    c1: 0+1+2+3    c2: 0+1+2+3    c3: 0+1+2+3    (partner = rank xor 1)

    Chunk c, here and below, is tensor[bounds[c] : bounds[c + 1]].
    """
    total, first, size = tensor, 0, len(bounds) - 1
    while size > 1:
        size //= 2
        partner = rank ^ size
        keep, give = (first + size, first) if rank & size else (first, first + size)
        kept, given = (
            total[bounds[half] - bounds[first] : bounds[half + size] - bounds[first]]
            for half in (keep, give)
        )
        received = torch.empty_like(kept)
        yield Batch([(given, partner)], [(received, partner)])
        total, first = _REDUCE[op](kept, received, out=received), keep
    return total


def _doubling(tensor, bounds, rank):
    """All-gather by swapping one chunk, then two, four ..., in place. log2(P) steps.

        rank        0         1         2         3
        start    0 . . .   . 1 . .   . . 2 .   . . . 3
        step 0   0 1 . .   0 1 . .   . . 2 3   . . 2 3       (partner = rank xor 1)
        step 1   0 1 2 3   0 1 2 3   0 1 2 3   0 1 2 3       (partner = rank xor 2)
    """
    size = 1
    while size < len(bounds) - 1:
        partner, mine = rank ^ size, rank & -size
        own, other = (tensor[bounds[i] : bounds[i + size]] for i in (mine, mine ^ size))
        yield Batch([(own, partner)], [(other, partner)])
        size *= 2


def _halving_doubling(output, input, op, rank, world_size):
    """The one, then the other. 2 log2(P) steps, 2(P-1)/P D bytes. Rabenseifner, 2004."""
    bounds = [len(output) * chunk // world_size for chunk in range(world_size + 1)]
    total = yield from _halving(input, bounds, op, rank)
    output[bounds[rank] : bounds[rank + 1]].copy_(total)
    yield from _doubling(output, bounds, rank)


def _for_any_size(algorithm):
    """An algorithm for 2^k ranks, for any number: each rank beyond 2^k has one of them stand in."""

    def folded(output, input, op, rank, world_size):
        core = 1 << (world_size.bit_length() - 1)
        if rank >= core:
            yield Batch([(input, rank - core)])
            yield Batch([], [(output, rank - core)])
            return
        stand_in = rank + core < world_size
        if stand_in:
            other = torch.empty_like(input)
            yield Batch([], [(other, rank + core)])
            input = _REDUCE[op](input, other, out=other)
        yield from algorithm(output, input, op, rank, core)
        if stand_in:
            yield Batch([(output, rank + core)])

    return folded


# ---- two levels: nodes, and ranks inside a node --------------------------------------------------


def _hierarchical(inner_size):
    """The all-reduce for P = O x I ranks, node by node I ranks each, or a 2D torus of rows of I.

    Reduce-scatter inside the node, all-reduce of the own chunk with the ranks of the same place in
    other nodes, all-gather inside. 2(I-1)/I D bytes stay inside, 2(O-1)/O D/I cross. O = I = 2:

        rank                     0            1            2            3
        reduce-scatter inside    c0: 0+1      c1: 0+1      c0: 2+3      c1: 2+3
        all-reduce between       c0: 0..3     c1: 0..3     c0: 0..3     c1: 0..3
        all-gather inside        c0 c1        c0 c1        c0 c1        c0 c1
    """

    def algorithm(output, input, op, rank, world_size):
        node = rank // inner_size * inner_size
        inside = range(node, node + inner_size)
        between = range(rank % inner_size, world_size, inner_size)
        chunks = output.tensor_split(inner_size)
        own = chunks[rank - node]
        if inner_size == 1:
            own.copy_(input)
        partials = [chunks[(rank - node - step - 2) % inner_size] for step in range(inner_size - 1)]
        steps = _scatter_steps(input.tensor_split(inner_size), partials, inside, rank)
        yield from _go_round(steps, op, inside, rank)
        yield from _ring_among(between, own, own, op, rank)
        yield from _go_round(_gather_steps(chunks, inside, rank), op, inside, rank)

    return algorithm


# ---- trees: broadcast, reduce, barrier -----------------------------------------------------------


def _tree_broadcast(tensor, root, rank, world_size):
    """Whoever has the tensor passes it 1, 2, 4 ... places on, counted from the root.

    P = 8    0->1, then 0->2 1->3, then 0->4 1->5 2->6 3->7
    """
    place, distance = (rank - root) % world_size, 1
    while distance < world_size:
        if distance <= place < 2 * distance:
            yield Batch([], [(tensor, (rank - distance) % world_size)])
        elif place < distance and place + distance < world_size:
            yield Batch([(tensor, (rank + distance) % world_size)], linger=2)
        distance *= 2


def _scatter_all_gather(tensor, root, rank, world_size):
    """Broadcast of a large tensor: chunks from the root to their ranks, then once round the ring.

    The root sends 2(P-1)/P D bytes, the others at most (P-1)/P D.
    """
    chunks = tensor.tensor_split(world_size)
    others = [peer for peer in range(world_size) if peer != root]
    if rank == root:
        yield Batch([(chunks[peer], peer) for peer in others])
    else:
        yield Batch([], [(chunks[rank], root)])
    ring = range(world_size)
    yield from _go_round(_gather_steps(chunks, ring, rank), None, ring, rank)


def _tree_reduce(tensor, root, op, rank, world_size):
    """The broadcast tree upwards: who has heard all below him adds, and passes the sum up."""
    place, distance, total = (rank - root) % world_size, 1, tensor
    while distance < world_size:
        if place & distance:
            yield Batch([(total, (rank - distance) % world_size)])
            return
        if place + distance < world_size:
            received = torch.empty_like(tensor)
            yield Batch([], [(received, (rank + distance) % world_size)])
            total = _REDUCE[op](total, received, out=received)
        distance *= 2
    tensor.copy_(total)
    if op == ReduceOp.AVG:
        tensor.div_(world_size)


def _dissemination(token, rank, world_size):
    """Round k: tell the rank 2^k places on, hear from the one 2^k back; 2^(k+1) ranks are heard."""
    heard, distance = torch.empty_like(token), 1
    while distance < world_size:
        to_rank, from_rank = (rank + distance) % world_size, (rank - distance) % world_size
        yield Batch([(token, to_rank)], [(heard, from_rank)])
        distance *= 2


# ---- one step: everybody talks to everybody, or to one -------------------------------------------

MOST_PEERS = 64  # in a batch: NCCL may hang on more than 256 messages at once


def _direct_scatter(output, inputs, root, rank):
    if rank != root:
        yield Batch([], [(output, root)])
        return
    inputs = [_flat(tensor) for tensor in inputs]
    output.copy_(inputs[rank])
    yield Batch([(tensor, peer) for peer, tensor in enumerate(inputs) if peer != root])


def _direct_gather(input, outputs, root, rank):
    input = _flat(input)
    if rank != root:
        yield Batch([(input, root)])
        return
    outputs[rank].copy_(input)
    yield Batch([], [(tensor, peer) for peer, tensor in enumerate(outputs) if peer != root])


def _pairwise_all_to_all(output, input, output_sizes, input_sizes, rank, world_size):
    """Message k goes to the rank k places on, and comes from the one k back. P = 4, who has whose:

        rank        0         1         2         3
        start    0 . . .   . 1 . .   . . 2 .   . . . 3
        k = 1    0 . . 3   0 1 . .   . 1 2 .   . . 2 3
        k = 2    0 . 2 3   0 1 . 3   0 1 2 .   . 1 2 3
        k = 3    0 1 2 3   0 1 2 3   0 1 2 3   0 1 2 3

    All are under way at once, in groups of up to MOST_PEERS + 1 ranks.
    """
    outputs, inputs = output.split(output_sizes), _flat(input).split(input_sizes)
    outputs[rank].copy_(inputs[rank])
    to_ranks = [(rank + k) % world_size for k in range(1, world_size)]
    from_ranks = [(rank - k) % world_size for k in range(1, world_size)]
    for k in range(0, world_size - 1, MOST_PEERS):
        sends = [(inputs[peer], peer) for peer in to_ranks[k : k + MOST_PEERS]]
        receives = [(outputs[peer], peer) for peer in from_ranks[k : k + MOST_PEERS]]
        yield Batch(sends, receives)


# ---- cost, and the choice it makes ---------------------------------------------------------------


class Cost(NamedTuple):
    """What one rank does: steps one after the other, bytes sent, bytes added with nothing to do
    meanwhile."""

    steps: int
    bytes: int
    added: int = 0

    def seconds(self, link):
        """The alpha-beta model: steps * alpha + bytes * beta, and additions at gamma per byte."""
        return self.steps * link.alpha + self.bytes * link.beta + self.added * link.gamma


class LinkSpeed(NamedTuple):
    """Seconds per step, per byte sent, and per byte added; measure_link() measures them."""

    alpha: float
    beta: float
    gamma: float


# Measured with 2 to 8 ranks on 2 cores (gloo); from NVLink's data sheet (nccl). They are constants:
# an algorithm chosen by the mood of a machine would change the bits of a training.
LINK_SPEEDS = {"gloo": LinkSpeed(1.2e-4, 6.5e-10, 2.2e-10), "nccl": LinkSpeed(1e-5, 4e-12, 1e-12)}


def all_reduce_cost(algorithm, nbytes, world_size, inner_size=1, rank=0):
    """Cost of an all-reduce of `nbytes`; rank 0 is the busiest. Exact where P divides nbytes."""
    D, P, I, core = nbytes, world_size, inner_size, 1 << (world_size.bit_length() - 1)
    if algorithm == "naive":
        return Cost(min(P - 1, 1), (P - 1) * D, (P - 1) * D)
    if algorithm == "ring":  # all but the last segment is added while the next one arrives
        return Cost(2 * (P - 1), 2 * (P - 1) * D // P, min(SEGMENT, D // P) if P > 1 else 0)
    if algorithm == "hierarchical":
        inside, between = (all_reduce_cost("ring", *part) for part in ((D, I), (D // I, P // I)))
        return Cost(*(sum(pair) for pair in zip(inside, between)))
    if rank >= core:
        return Cost(2, D)
    halving, steps = algorithm == "halving_doubling", core.bit_length() - 1
    cost = Cost(2 * steps, 2 * (core - 1) * D // core, (core - 1) * D // core)
    cost = cost if halving else Cost(steps, steps * D, steps * D)
    return Cost(cost.steps + 2, cost.bytes + D, cost.added + D) if rank + core < P else cost


def all_reduce_bytes(nbytes, world_size):
    """Bytes that one rank sends to all-reduce `nbytes` by the ring: no algorithm sends fewer."""
    return 2 * nbytes * (world_size - 1) // world_size


def reduce_scatter_bytes(nbytes, world_size):
    """Bytes that one rank sends to reduce-scatter, or all-gather, a full tensor of `nbytes`."""
    return nbytes * (world_size - 1) // world_size


all_gather_bytes = reduce_scatter_bytes


def broadcast_cost(algorithm, nbytes, world_size):
    """Cost of a broadcast for the root: "tree" or "scatter_all_gather"."""
    rounds = (world_size - 1).bit_length()
    if algorithm == "tree":
        return Cost(rounds, rounds * nbytes)
    return Cost(world_size, 2 * nbytes * (world_size - 1) // world_size)


@lru_cache(maxsize=4096)
def _cheapest(cost, names, nbytes, world_size, link):
    """The name of the algorithm whose cost(name, nbytes, world_size) takes the least time."""
    return min(names, key=lambda name: cost(name, nbytes, world_size).seconds(link))


def _link_speed(group):
    return LINK_SPEEDS[dist.get_backend(group)]


def measure_link(group=None, rounds=20):
    """LinkSpeed of a group, measured: rings of 8 bytes and of 4 MB, and adding 4 MB. Collective."""
    rank, world_size = rank_and_size(group)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    small, large = torch.zeros(8, device=device), torch.zeros(1 << 20, device=device)
    peers = (rank + 1) % world_size, (rank - 1) % world_size

    def timed(function):
        times = []
        for _ in range(rounds):
            barrier(group)
            began = time.perf_counter()
            function()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return sorted(times)[rounds // 2]

    def shift(tensor):
        if world_size > 1:
            exchange([(tensor, peers[0])], [(tensor.clone(), peers[1])], group)

    alpha = timed(lambda: shift(small))
    beta = max(0.0, timed(lambda: shift(large)) - alpha) / large.nbytes
    return LinkSpeed(alpha, beta, timed(lambda: large.add_(large)) / large.nbytes)


# ---- the collectives -----------------------------------------------------------------------------

_ALL_REDUCE = {
    "naive": _naive,
    "ring": _ring,
    "recursive_doubling": _for_any_size(_recursive_doubling),
    "halving_doubling": _for_any_size(_halving_doubling),
}


def _all_reduce(output, input, op, group, algorithm="auto", inner_size=None):
    """The batches of an all-reduce of flat tensors."""
    rank, world_size = rank_and_size(group)
    if algorithm == "auto":
        names, link = ("ring", "halving_doubling", "recursive_doubling"), _link_speed(group)
        algorithm = _cheapest(all_reduce_cost, names, input.nbytes, world_size, link)
    run = _hierarchical(inner_size) if algorithm == "hierarchical" else _ALL_REDUCE[algorithm]
    yield from run(output, input, op, rank, world_size)
    if op == ReduceOp.AVG:
        output.div_(world_size)


@_for_members
def all_reduce(
    tensor, op=ReduceOp.SUM, group=None, async_op=False, algorithm="auto", inner_size=None
):
    """Reduce `tensor` over the group, in place; every rank ends with the same bits.

    algorithm: naive, ring, recursive_doubling, halving_doubling, or hierarchical with `inner_size`
    consecutive ranks to a node; auto takes the one that costs least. Returns None, or a Work with
    async_op. Raises ValueError for an op or algorithm that is not known, for AVG of integers, and
    for an inner_size that does not divide the group.
    """
    _check_op(op, tensor.dtype)
    if algorithm not in ("auto", "hierarchical", *_ALL_REDUCE):
        known = ", ".join(("auto", "hierarchical", *_ALL_REDUCE))
        raise ValueError(f"algorithm={algorithm!r} is not one of {known}")
    world_size = dist.get_world_size(group)
    if algorithm == "hierarchical" and (not inner_size or world_size % inner_size):
        raise ValueError(f"inner_size={inner_size} does not divide world_size={world_size}")
    batches = _into(tensor, lambda flat: _all_reduce(flat, flat, op, group, algorithm, inner_size))
    agreed = tuple(tensor.shape), tensor.dtype, op, algorithm, inner_size
    return _launch("all_reduce", batches, [tensor], group, async_op, agreed)


@_for_members
def reduce(tensor, dst=0, op=ReduceOp.SUM, group=None, async_op=False):
    """Reduce `tensor` over the group into that of the *global* rank `dst`; the others keep theirs.

    Returns None, or a Work with async_op. Raises ValueError as all_reduce(), and if dst is not in
    the group.
    """
    _check_op(op, tensor.dtype)
    root = _group_rank("dst", dst, group)
    batches = _into(tensor, _tree_reduce, root, op, *rank_and_size(group))
    agreed = tuple(tensor.shape), tensor.dtype, op, dst
    return _launch("reduce", batches, [tensor], group, async_op, agreed)


@_for_members
def broadcast(tensor, src=0, group=None, async_op=False, algorithm="auto"):
    """Copy `tensor` of the *global* rank `src` to every rank of the group, in place.

    algorithm: tree, scatter_all_gather, or auto, the one that costs least (on gloo the tree).
    Returns None, or a Work with async_op. Raises ValueError if src is not in the group, and for an
    unknown algorithm.
    """
    root, (rank, world_size) = _group_rank("src", src, group), rank_and_size(group)
    algorithms = {"tree": _tree_broadcast, "scatter_all_gather": _scatter_all_gather}
    if algorithm == "auto" and dist.get_backend(group) == "gloo":
        algorithm = "tree"  # where ranks share cores every byte costs, and it moves the fewest
    if algorithm == "auto":
        names, link = tuple(algorithms), _link_speed(group)
        algorithm = _cheapest(broadcast_cost, names, tensor.nbytes, world_size, link)
    if algorithm not in algorithms:
        raise ValueError(f"algorithm={algorithm!r} is not one of auto, {', '.join(algorithms)}")
    batches = _into(tensor, algorithms[algorithm], root, rank, world_size)
    agreed = tuple(tensor.shape), tensor.dtype, src, algorithm
    return _launch("broadcast", batches, [tensor], group, async_op, agreed)


def _ring_all_gather(outputs, input, rank, world_size):
    chunks, ring = [output.detach().view(-1) for output in outputs], range(world_size)
    chunks[rank].copy_(_flat(input))
    yield from _go_round(_gather_steps(chunks, ring, rank), None, ring, rank)


def _few_steps(full, world_size):
    """Whether halving or doubling is quicker than the ring."""
    return world_size == 1 or (full.nbytes <= SMALL and world_size & (world_size - 1) == 0)


def _partial_sums(output, input, op, group):
    input, (rank, world_size) = _flat(input), rank_and_size(group)
    if _few_steps(input, world_size):
        bounds = [len(output) * chunk for chunk in range(world_size + 1)]
        output.copy_((yield from _halving(input, bounds, op, rank)))
    else:
        chunks, ring = input.tensor_split(world_size), range(world_size)
        scratch = output.new_empty(2, len(output))
        partials = [scratch[step % 2] for step in range(world_size - 2)] + [output]
        steps = _scatter_steps(chunks, partials, ring, rank)
        yield from _go_round(steps, op, ring, rank, reused=True)
    if op == ReduceOp.AVG:
        output.div_(world_size)


@_for_members
def reduce_scatter_single(output, input, op=ReduceOp.SUM, group=None, async_op=False):
    """Reduce `input` over the group; rank r keeps chunk r in `output`, a P-th as long.

    Sends (P-1)/P of the input. Returns None, or a Work with async_op. Raises ValueError for an
    unknown op and for sizes or dtypes that do not fit.
    """
    world_size = dist.get_world_size(group)
    _check_op(op, input.dtype)
    if input.numel() != output.numel() * world_size:
        raise ValueError(
            f"input of shape {tuple(input.shape)} is not world_size={world_size} times "
            f"output of shape {tuple(output.shape)}"
        )
    _check_pair(output, input, output.numel())
    batches = _into(output, _partial_sums, input, op, group)
    agreed = tuple(output.shape), output.dtype, op
    return _launch("reduce_scatter_single", batches, [output, input], group, async_op, agreed)


def _own_and_others(output, input, group):
    rank, world_size = rank_and_size(group)
    chunks, ring = output.tensor_split(world_size), range(world_size)
    chunks[rank].copy_(_flat(input))
    if _few_steps(output, world_size):
        bounds = [input.numel() * chunk for chunk in range(world_size + 1)]
        yield from _doubling(output, bounds, rank)
    else:
        yield from _go_round(_gather_steps(chunks, ring, rank), None, ring, rank)


@_for_members
def all_gather_single(output, input, group=None, async_op=False):
    """Collect `input` of every rank in `output`, P times as long, in rank order.

    Sends (P-1)/P of the output. Returns None, or a Work with async_op. Raises ValueError for sizes
    or dtypes that do not fit.
    """
    _check_pair(output, input, input.numel() * dist.get_world_size(group))
    batches = _into(output, _own_and_others, input, group)
    agreed = input.numel(), input.dtype
    return _launch("all_gather_single", batches, [output, input], group, async_op, agreed)


@_for_members
def all_gather(tensor_list, tensor, group=None, async_op=False):
    """Collect `tensor` of every rank r in tensor_list[r]; the lengths may differ between ranks.

    Returns None, or a Work with async_op. Raises ValueError if the list does not have one
    contiguous entry per rank, or this rank's does not fit.
    """
    rank, world_size = rank_and_size(group)
    _check_list("tensor_list", tensor_list, group)
    _check_pair(tensor_list[rank], tensor, tensor.numel())
    batches = _ring_all_gather(tensor_list, tensor, rank, world_size)
    shapes = [tuple(entry.shape) for entry in tensor_list]
    tensors = [tensor, *tensor_list]
    return _launch("all_gather", batches, tensors, group, async_op, (shapes, tensor.dtype))


@_for_members
def scatter(tensor, scatter_list=None, src=0, group=None, async_op=False):
    """Give rank r of the group the r-th tensor of `scatter_list`, which global rank `src` has.

    Returns None, or a Work with async_op. Raises ValueError for a list that does not fit on src.
    """
    root, rank = _group_rank("src", src, group), dist.get_rank(group)
    if rank == root:
        _check_list("scatter_list", scatter_list, group, alike=tensor)
    inputs = scatter_list if rank == root else []
    batches = _into(tensor, _direct_scatter, inputs, root, rank)
    agreed = tuple(tensor.shape), tensor.dtype, src
    return _launch("scatter", batches, [tensor, *inputs], group, async_op, agreed)


@_for_members
def gather(tensor, gather_list=None, dst=0, group=None, async_op=False):
    """Collect `tensor` of every rank r of the group in gather_list[r] of the global rank `dst`.

    Returns None, or a Work with async_op. Raises ValueError for a list that does not fit on dst.
    """
    root, rank = _group_rank("dst", dst, group), dist.get_rank(group)
    if rank == root:
        _check_list("gather_list", gather_list, group, alike=tensor)
    outputs = [entry.detach().view(-1) for entry in gather_list] if rank == root else []
    batches = _direct_gather(tensor, outputs, root, rank)
    agreed = tuple(tensor.shape), tensor.dtype, dst
    return _launch("gather", batches, [tensor, *outputs], group, async_op, agreed)


@_for_members
def all_to_all_single(
    output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
):
    """Send the i-th piece of `input` to rank i, and receive rank i's piece as the i-th of `output`.

    Pieces are rows (dim 0): *_split_sizes rows for each rank, or equal ones. Returns None, or a
    Work with async_op. Raises ValueError for splits that do not fit.
    """
    if output.shape[1:] != input.shape[1:] or output.dtype != input.dtype:
        raise ValueError(
            f"rows of output, {tuple(output.shape[1:])} {output.dtype}, are not like "
            f"rows of input, {tuple(input.shape[1:])} {input.dtype}"
        )
    rank, world_size = rank_and_size(group)
    output_sizes = _split_sizes("output", output, output_split_sizes, world_size)
    input_sizes = _split_sizes("input", input, input_split_sizes, world_size)
    if output_sizes[rank] != input_sizes[rank]:
        raise ValueError(
            f"rank {rank} sends itself {input_sizes[rank]} elements, but expects "
            f"{output_sizes[rank]}"
        )
    sizes = output_sizes, input_sizes
    batches = _into(output, _pairwise_all_to_all, input, *sizes, rank, world_size)
    agreed = "rows of", tuple(output.shape[1:]), output.dtype
    return _launch("all_to_all_single", batches, [output, input], group, async_op, agreed)


@_for_members
def barrier(group=None):
    """Return when every rank of the group has called it.

    Its first batch involves every rank, as NCCL asks of the first batch of any group.
    """
    nccl = dist.get_backend(group) == "nccl"
    token = torch.zeros(1, dtype=torch.uint8, device="cuda" if nccl else "cpu")
    batches = _dissemination(token, *rank_and_size(group))
    _launch("barrier", batches, [token], group, async_op=False)
    if nccl:
        torch.cuda.current_stream().synchronize()


def check_parameters(named, group=None):
    """ValueError if [(name, tensor)] are on several devices, or not alike on all ranks. Collective.

    What ranks disagree on is an error on every rank of the group, naming the first difference.
    """
    devices = {tensor.device: name for name, tensor in named}
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"parameters are on several devices: {where}")
    lines = [f"{name!r} {tuple(t.shape)} {t.dtype} {t.requires_grad}" for name, t in named]
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    text = "\n".join(lines).encode()
    digest = hashlib.sha256(text).digest() + len(text).to_bytes(8, "little")
    own = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    digests = own.new_empty(dist.get_world_size(group), len(own))
    all_gather_single(digests, own, group)
    if (digests == digests[0]).all():
        return
    lengths = [int.from_bytes(bytes(row[-8:]), "little") for row in digests.tolist()]
    texts = [own.new_empty(length) for length in lengths]
    all_gather(texts, own.new_tensor(list(text)), group)
    first, *others = (bytes(text.tolist()).decode().split("\n") for text in texts)
    for rank, other in enumerate(others, 1):
        for line, expected in zip_longest(other, first, fillvalue="nothing"):
            if line != expected:
                raise ValueError(f"rank {rank} of the group has {line}, rank 0 has {expected}")


def _shape(tensor):
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _group_rank(name, global_rank, group):
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if global_rank not in ranks:
        raise ValueError(f"{name}={global_rank} is not one of the group's ranks, {ranks}")
    return ranks.index(global_rank)


def _check_op(op, dtype):
    if op not in _REDUCE:
        raise ValueError(f"op={op} is not one of SUM, AVG, PRODUCT, MIN, MAX")
    if op == ReduceOp.AVG and not dtype.is_floating_point:
        raise ValueError(f"op=AVG needs a floating-point tensor, not dtype={dtype}")
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_complex:
        raise ValueError(f"op={op} needs an order, which dtype={dtype} does not have")


def _check_pair(output, input, output_numel):
    if output.dtype != input.dtype:
        raise ValueError(f"output.dtype={output.dtype} is not input.dtype={input.dtype}")
    if output.numel() != output_numel:
        raise ValueError(
            f"output of shape {tuple(output.shape)} has {output.numel()} elements where input of "
            f"shape {tuple(input.shape)} makes {output_numel}"
        )


def _check_list(name, tensors, group, alike=None):
    world_size = dist.get_world_size(group)
    if tensors is None or len(tensors) != world_size:
        found = "None" if tensors is None else f"of {len(tensors)} tensors"
        raise ValueError(f"{name} is {found}, not of world_size={world_size}")
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError(f"{name} has an entry that is not contiguous")
    if alike is not None and any(_shape(tensor) != _shape(alike) for tensor in tensors):
        raise ValueError(f"{name} has an entry that is not {_shape(alike)}, as tensor is")


def _split_sizes(name, tensor, split_sizes, world_size):
    """Elements of `tensor` for each rank, from rows (dim 0) for each rank; equal rows if None."""
    rows = len(tensor)
    if split_sizes is None and rows % world_size:
        raise ValueError(f"{name} has {rows} rows, not divisible by world_size={world_size}")
    split_sizes = split_sizes or [rows // world_size] * world_size
    if len(split_sizes) != world_size or sum(split_sizes) != rows:
        raise ValueError(
            f"{name}_split_sizes={split_sizes} are not world_size={world_size} sizes of sum {rows}"
        )
    row = tensor.numel() // rows if rows else 0
    return [size * row for size in split_sizes]


# ---- derivatives: the backward of a collective is a collective -----------------------------------
#
#                             forward          backward           x before -> after
#   copy_to_group             identity         all-reduce         replicated -> each uses it its way
#   reduce_from_group         all-reduce       identity           partial sums -> replicated
#   scatter_to_group          own chunk        all-gather         replicated -> split
#   gather_from_group         all-gather       own chunk          split -> replicated, used alike
#   all_gather_to_group       all-gather       reduce-scatter     split -> each uses all its way
#   reduce_scatter_to_group   reduce-scatter   all-gather         partial sums -> split
#   all_to_all_in_group       all-to-all       all-to-all, back   split one way -> split another
#
# The first two are Megatron's f and g. What all ranks use alike has its whole gradient on each;
# what each uses in its own way has a part of its gradient on each, and the parts must be summed. No
# Function changes its input or its grad_output.


def _all_reduced(x, group):
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    batches = _into(output, lambda flat: _all_reduce(flat, _flat(x), ReduceOp.SUM, group))
    _launch("all_reduce", batches, [output], group, False, agreed=(tuple(x.shape), x.dtype))
    return output


def _all_gathered(x, dim, group):
    world_size = dist.get_world_size(group)
    output = x.new_empty(world_size, *x.shape)
    all_gather_single(output, x, group)
    return output.movedim(0, dim).flatten(dim, dim + 1)


def _check_divisible(x, dim, world_size):
    if x.shape[dim] % world_size:
        shape = tuple(x.shape)
        raise ValueError(f"dim {dim} of {shape} is not divisible by world_size={world_size}")


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


class _CopyToGroup(torch.autograd.Function):
    """forward: identity; backward: all-reduce"""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        return _all_reduced(grad_output, ctx.group), None


class _ReduceFromGroup(torch.autograd.Function):
    """forward: all-reduce; backward: identity"""

    @staticmethod
    def forward(ctx, x, group):
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None


class _ScatterToGroup(torch.autograd.Function):
    """forward: own chunk; backward: all-gather"""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _own_chunk(x, dim, group)

    @staticmethod
    def backward(ctx, grad_output):
        return _all_gathered(grad_output, ctx.dim, ctx.group), None, None


class _GatherFromGroup(torch.autograd.Function):
    """forward: all-gather; backward: own chunk"""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _all_gathered(x, dim, group)

    @staticmethod
    def backward(ctx, grad_output):
        return _own_chunk(grad_output, ctx.dim, ctx.group), None, None


class _AllGatherToGroup(torch.autograd.Function):
    """forward: all-gather; backward: reduce-scatter"""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _all_gathered(x, dim, group)

    @staticmethod
    def backward(ctx, grad_output):
        return _reduce_scattered(grad_output, ctx.dim, ctx.group), None, None


class _ReduceScatterToGroup(torch.autograd.Function):
    """forward: reduce-scatter; backward: all-gather"""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _reduce_scattered(x, dim, group)

    @staticmethod
    def backward(ctx, grad_output):
        return _all_gathered(grad_output, ctx.dim, ctx.group), None, None


class _AllToAll(torch.autograd.Function):
    """forward: all-to-all; backward: all-to-all with the splits exchanged"""

    @staticmethod
    def forward(ctx, x, output_split_sizes, input_split_sizes, group):
        ctx.reversed_splits, ctx.group = (input_split_sizes, output_split_sizes), group
        rows = len(x) if output_split_sizes is None else sum(output_split_sizes)
        output = x.new_empty(rows, *x.shape[1:])
        all_to_all_single(output, x, output_split_sizes, input_split_sizes, group)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        return _AllToAll.apply(grad_output, *ctx.reversed_splits, ctx.group), None, None, None


def copy_to_group(x, group=None):
    """x itself; the gradients that the ranks return for it are summed. Megatron's f."""
    return _CopyToGroup.apply(x, group)


def reduce_from_group(x, group=None):
    """The sum of every rank's x; its gradient goes to every summand. Megatron's g."""
    return _ReduceFromGroup.apply(x, group)


def scatter_to_group(x, dim, group=None):
    """This rank's chunk, along `dim`, of x, held by all ranks. ValueError if P does not divide."""
    return _ScatterToGroup.apply(x, dim % x.ndim, group)


def gather_from_group(x, dim, group=None):
    """Every rank's x, joined along `dim`, for a use that is the same on every rank."""
    return _GatherFromGroup.apply(x, dim % x.ndim, group)


def all_gather_to_group(x, dim, group=None):
    """Every rank's x, joined along `dim`, used differently by each: gradients are summed."""
    return _AllGatherToGroup.apply(x, dim % x.ndim, group)


def reduce_scatter_to_group(x, dim, group=None):
    """This rank's chunk, along `dim`, of the sum of all x. ValueError if P does not divide."""
    return _ReduceScatterToGroup.apply(x, dim % x.ndim, group)


def all_to_all_in_group(x, output_split_sizes=None, input_split_sizes=None, group=None):
    """all_to_all_single() of the rows of x, differentiable."""
    return _AllToAll.apply(x, output_split_sizes, input_split_sizes, group)


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
    for nbytes in (3360, 268800, 16800000):  # any P up to 8 divides them
        tensor, inner_size = torch.zeros(nbytes // 4), 2 - world_size % 2
        gloo = _median_seconds(lambda: dist.group.WORLD.allreduce([tensor]).wait())
        for algorithm in (*_ALL_REDUCE, "hierarchical"):
            call = lambda: all_reduce(tensor, algorithm=algorithm, inner_size=inner_size)
            with count_bytes() as traffic:
                call()
            cost = all_reduce_cost(algorithm, nbytes, world_size, inner_size, rank)
            seconds = (cost.seconds(link), _median_seconds(call), gloo)
            if rank == 0:
                counts = f"{cost.bytes:10}{traffic.bytes():10}{cost.steps:6}"
                times = "".join(f"{value * 1e6:8.0f} us" for value in seconds)
                print(f"{nbytes:9}  {algorithm:20}{counts}{times}")


def _median_seconds(call, rounds=9):
    times = []
    for _ in range(rounds):
        barrier()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return sorted(times)[rounds // 2]


if __name__ == "__main__":
    run_ranks(_demonstrate)
