"""Collectives made of messages.

A process group of P ranks shares nothing; all that a rank can do is send a tensor to another rank and
receive one. Everything that training needs beyond that is built here from one primitive, exchange(): a
batch of sends and receives that progress together.

    reduce_scatter_single   every rank gets the sum of one chunk       (P-1)/P D  bytes sent by a rank
    all_gather_single       every rank gets every rank's chunk         (P-1)/P D
    all_reduce              the one, then the other                   2(P-1)/P D  (the lower bound)
    all_to_all_single       rank i's chunk j goes to rank j            (P-1)/P D
    broadcast               a tree: who has the tensor passes it on    at most log2(P) D
    barrier                 nobody leaves before everybody came        log2(P)    bytes

D is the size of the full tensor, in bytes. A ring keeps every link busy with 1/P of the tensor at a time:

    rank 0 ---> rank 1 ---> rank 2 ---> rank 3 ---+
      ^                                           |
      +-------------------------------------------+

Names, arguments and meaning are those of torch.distributed, and the code is the same on NCCL and on gloo.
Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

    torchrun --nproc-per-node 4 collectives.py      claimed bytes beside counted bytes
"""

import os
import queue
import tempfile
import threading
import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

# ---- processes and groups ---------------------------------------------------------------------------


@contextmanager
def batch_scheduling():
    """Let gloo's threads, started inside, be scheduled as batch work (Linux; elsewhere nothing happens).

    A gloo thread that preempts the rank it serves spins on the lock that the rank holds, and a message
    then takes 2-5 ms in place of 0.1 ms. Threads inherit the policy; this thread gets its own back.
    """
    if not hasattr(os, "SCHED_BATCH"):
        yield
        return
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


def run_ranks(function, world_size=4):
    """Call function() on every rank of a new default group, on CPU: torchrun's ranks, or `world_size` new ones."""
    if "RANK" in os.environ:
        _run_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", function)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, f"file://{folder}/store", function)
        torch.multiprocessing.spawn(_run_rank, arguments, nprocs=world_size)


def _run_rank(rank, world_size, init_method, function):
    torch.set_num_threads(1)
    with batch_scheduling():
        dist.init_process_group("gloo", init_method, rank=rank, world_size=world_size)
    function()
    barrier()  # nobody closes its connections while another still reads from them
    dist.destroy_process_group()


def rank_and_size(group=None):
    """This rank inside `group`, and the group's size."""
    return dist.get_rank(group), dist.get_world_size(group)


# ---- messages ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class Traffic:
    """Payload that this rank sent: bytes and messages by (operation, group)."""

    bytes_by: Counter = field(default_factory=Counter)
    messages_by: Counter = field(default_factory=Counter)

    def bytes(self, operation=None, group=None):
        """Bytes sent by one operation or all (None), in one group or all (None)."""
        return _select(self.bytes_by, operation, group)

    def messages(self, operation=None, group=None):
        """Messages sent, selected as in bytes()."""
        return _select(self.messages_by, operation, group)


def _select(counter, operation, group):
    matches = lambda key: operation in (None, key[0]) and group in (None, key[1])
    return sum(count for key, count in counter.items() if matches(key))


_COUNTERS = []  # the Traffic of every count_bytes() now open


@contextmanager
def count_bytes():
    """Count what this rank sends by the operations begun inside: `with count_bytes() as traffic: ...`."""
    traffic = Traffic()
    _COUNTERS.append(traffic)
    try:
        yield traffic
    finally:
        _COUNTERS.remove(traffic)


def exchange(sends, receives, group=None, async_op=False):
    """Send and receive several tensors in one batch, whose messages progress together.

    sends, receives: lists of (contiguous tensor, peer), peer being a rank of `group`. Both ends of a link
    list its messages in the same order and with the same sizes (a gloo rank is aborted by a message larger
    than its buffer). Empty tensors are not sent. On NCCL batches run in the order they were issued in, so
    two ranks must issue the batches that they share in the same order.
    Returns None, or with async_op an object whose wait() completes the batch.
    """
    thread = _THREADS.get(group or dist.group.WORLD)
    if thread is not None:
        thread.latest.finished.wait()  # a group's messages keep their order
    messages = _post("exchange", sends, receives, group, _COUNTERS)
    if async_op:
        return messages
    messages.wait()


class _Messages:
    """A batch under way. Holds its tensors: gloo reads and writes them until wait() has returned."""

    def __init__(self, works, tensors):
        self.works, self.tensors = works, tensors

    def wait(self):
        for work in self.works:
            work.wait()
        self.works, self.tensors = [], []


def _post(operation, sends, receives, group, counters):
    group = group or dist.group.WORLD
    receives = [(tensor, peer) for tensor, peer in receives if tensor.numel()]
    sends = [(tensor, peer) for tensor, peer in sends if tensor.numel()]
    for traffic in counters:
        traffic.bytes_by[operation, group] += sum(tensor.nbytes for tensor, _ in sends)
        traffic.messages_by[operation, group] += len(sends)
    batch = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for tensor, peer in receives]
    batch += [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for tensor, peer in sends]
    return _Messages(dist.batch_isend_irecv(batch) if batch else [], sends + receives)


# ---- how a collective runs: now, or while Python computes --------------------------------------------
#
# An algorithm is a generator. It yields one batch (sends, receives) after the other, and does its local
# arithmetic in between. _launch() drains it: at once, or in the background, where each group has its own
# queue and so keeps its order, as each NCCL communicator does. In the background means
#   on CPU     a thread of the group's, because a gloo batch is only complete when somebody waits for it;
#   on CUDA    a side stream of the group's, because there waiting means ordering streams, not blocking.


class Work:
    """An operation of a group's thread, under way. wait() blocks until it is done; errors arise there."""

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
    """An operation on a group's CUDA stream, under way. wait() makes the current stream wait for it."""

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


class _Thread:
    """Runs the background work of one group, first in first out."""

    def __init__(self, group):
        self.latest, self.queue = None, queue.SimpleQueue()
        threading.Thread(target=self._loop, args=(self.queue,), daemon=True).start()
        weakref.finalize(group, self.queue.put, None)

    def submit(self, work):
        self.latest = work
        self.queue.put(work)
        return work

    @staticmethod
    def _loop(works):
        while (work := works.get()) is not None:
            work.run()


_THREADS = weakref.WeakKeyDictionary()  # group -> _Thread
_STREAMS = weakref.WeakKeyDictionary()  # group -> torch.cuda.Stream


def _launch(operation, steps, tensors, group, async_op):
    """Run an algorithm that works on `tensors`; returns None, or its Work with async_op."""
    group = group or dist.group.WORLD
    counters = tuple(_COUNTERS)

    def drain():
        for sends, receives in steps:
            _post(operation, sends, receives, group, counters).wait()

    if async_op and tensors[0].is_cuda:
        return StreamWork(drain, tensors, group)
    thread = _THREADS.get(group)
    if async_op:
        thread = thread or _THREADS.setdefault(group, _Thread(group))
        return thread.submit(Work(drain))
    if thread is not None and not thread.latest.is_completed():
        return thread.submit(Work(drain)).wait()  # a group's operations keep their order
    drain()


def _into(output, algorithm, *arguments):
    """The steps of algorithm(flat, *arguments), where flat is `output` laid out as one row of elements."""
    output = output.detach()
    flat = output.contiguous().view(-1)
    yield from algorithm(flat, *arguments)
    if not output.is_contiguous():
        output.copy_(flat.view_as(output))


def _flat(tensor):
    return tensor.detach().contiguous().view(-1)


# ---- the ring: reduce-scatter, all-gather, and all-reduce = the one, then the other -------------------

_REDUCE = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}


def _ring_reduce_scatter(output, chunks, op, group):
    """Chunk r of every rank, reduced, into `output` on rank r. P-1 steps; `chunks` are only read.

    A partial sum travels the ring, and each rank it visits adds its own chunk. P = 4, what a rank holds:

        rank        0             1             2             3
        step 0   c2: 3+0       c3: 0+1       c0: 1+2       c1: 2+3
        step 1   c1: 2+3+0     c2: 3+0+1     c3: 0+1+2     c0: 1+2+3
        step 2   c0: 1+2+3+0   c1: 2+3+0+1   c2: 3+0+1+2   c3: 0+1+2+3

    Each chunk is summed along one path, so whoever gets it later gets the same bits.
    """
    rank, world_size = rank_and_size(group)
    next_rank, prev_rank = (rank + 1) % world_size, (rank - 1) % world_size
    scratch = output.new_empty(2, len(chunks[0]))  # one partial sum leaves while the next one arrives
    outgoing = chunks[prev_rank]
    for step in range(world_size - 1):
        own = chunks[(rank - step - 2) % world_size]
        partial = scratch[step % 2, : len(own)]
        yield [(outgoing, next_rank)], [(partial, prev_rank)]
        outgoing = _REDUCE[op](partial, own, out=output if step == world_size - 2 else partial)
    if world_size == 1:
        output.copy_(chunks[0])
    if op == ReduceOp.AVG:
        output.div_(world_size)


def _ring_all_gather(chunks, group):
    """Chunk r of rank r into chunk r of every rank. P-1 steps, in place. P = 4, the chunks of a rank:

        rank        0         1         2         3
        start    0 . . .   . 1 . .   . . 2 .   . . . 3
        step 0   0 . . 3   0 1 . .   . 1 2 .   . . 2 3
        step 1   0 . 2 3   0 1 . 3   0 1 2 .   . 1 2 3
        step 2   0 1 2 3   0 1 2 3   0 1 2 3   0 1 2 3
    """
    rank, world_size = rank_and_size(group)
    next_rank, prev_rank = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        outgoing = chunks[(rank - step) % world_size]
        incoming = chunks[(rank - step - 1) % world_size]
        yield [(outgoing, next_rank)], [(incoming, prev_rank)]


def _ring_all_reduce(output, input, op, group):
    rank, world_size = rank_and_size(group)
    chunks = output.tensor_split(world_size)  # sizes differ by at most one element, some may be empty
    yield from _ring_reduce_scatter(chunks[rank], input.tensor_split(world_size), op, group)
    yield from _ring_all_gather(chunks, group)


def _scatter_into_output(output, input, op, group):
    yield from _ring_reduce_scatter(output, input.tensor_split(dist.get_world_size(group)), op, group)


def _gather_into_output(output, input, group):
    rank, world_size = rank_and_size(group)
    chunks = output.view(world_size, -1)
    chunks[rank].copy_(input)
    yield from _ring_all_gather(chunks, group)


def _check_op(op, dtype):
    if op not in _REDUCE:
        raise ValueError(f"op={op} is not one of SUM, AVG, PRODUCT, MIN, MAX")
    if op == ReduceOp.AVG and not dtype.is_floating_point:
        raise ValueError(f"op=AVG needs a floating-point tensor, not dtype={dtype}")


def _check_pair(output, input, output_numel):
    if output.dtype != input.dtype:
        raise ValueError(f"output.dtype={output.dtype} is not input.dtype={input.dtype}")
    if output.numel() != output_numel:
        raise ValueError(
            f"output of shape {tuple(output.shape)} has {output.numel()} elements where input of shape "
            f"{tuple(input.shape)} makes {output_numel}"
        )


def all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op=False):
    """Reduce `tensor` over the group, in place; every rank ends with the same bits.

    Sends 2(P-1)/P of the tensor. Returns None, or a Work with async_op.
    Raises ValueError for an op that is not known, or AVG of integers.
    """
    _check_op(op, tensor.dtype)
    steps = _into(tensor, lambda flat: _ring_all_reduce(flat, flat, op, group))
    return _launch("all_reduce", steps, [tensor], group, async_op)


def reduce_scatter_single(output, input, op=ReduceOp.SUM, group=None, async_op=False):
    """Reduce `input` (P times as long as `output`) over the group; rank r keeps chunk r in `output`.

    Sends (P-1)/P of the input. Returns None, or a Work with async_op. Raises ValueError for an unknown op
    and for sizes or dtypes that do not fit.
    """
    world_size = dist.get_world_size(group)
    _check_op(op, input.dtype)
    if input.numel() != output.numel() * world_size:
        raise ValueError(
            f"input of shape {tuple(input.shape)} is not world_size={world_size} times "
            f"output of shape {tuple(output.shape)}"
        )
    _check_pair(output, input, output.numel())
    input = _flat(input)
    steps = _into(output, _scatter_into_output, input, op, group)
    return _launch("reduce_scatter_single", steps, [output, input], group, async_op)


def all_gather_single(output, input, group=None, async_op=False):
    """Collect `input` of every rank in `output`, P times as long, in rank order.

    Sends (P-1)/P of the output. Returns None, or a Work with async_op. Raises ValueError for sizes or dtypes
    that do not fit.
    """
    _check_pair(output, input, input.numel() * dist.get_world_size(group))
    input = _flat(input)
    steps = _into(output, _gather_into_output, input, group)
    return _launch("all_gather_single", steps, [output, input], group, async_op)


def all_gather(tensor_list, tensor, group=None):
    """Collect `tensor` of every rank r in tensor_list[r]; the lengths may differ between ranks.

    Raises ValueError if the list does not have one contiguous entry per rank, or this rank's does not fit.
    """
    rank, world_size = rank_and_size(group)
    if len(tensor_list) != world_size:
        raise ValueError(f"len(tensor_list)={len(tensor_list)} is not world_size={world_size}")
    _check_pair(tensor_list[rank], tensor, tensor.numel())
    if not all(entry.is_contiguous() for entry in tensor_list):
        raise ValueError("tensor_list has an entry that is not contiguous")
    tensor_list[rank].copy_(tensor.detach().view_as(tensor_list[rank]))
    chunks = [entry.detach().view(-1) for entry in tensor_list]
    _launch("all_gather", _ring_all_gather(chunks, group), chunks, group, async_op=False)


# ---- all-to-all: every rank has a message for every rank ----------------------------------------------


def _pairwise_all_to_all(output, input, output_sizes, input_sizes, group):
    """Step k: send to the rank k places on, receive from the rank k places back. P = 4, who gets whose:

        rank        0         1         2         3
        start    0 . . .   . 1 . .   . . 2 .   . . . 3
        step 1   0 . . 3   0 1 . .   . 1 2 .   . . 2 3
        step 2   0 . 2 3   0 1 . 3   0 1 2 .   . 1 2 3
        step 3   0 1 2 3   0 1 2 3   0 1 2 3   0 1 2 3
    """
    rank, world_size = rank_and_size(group)
    outputs, inputs = output.split(output_sizes), input.split(input_sizes)
    outputs[rank].copy_(inputs[rank])
    for step in range(1, world_size):
        to_rank, from_rank = (rank + step) % world_size, (rank - step) % world_size
        yield [(inputs[to_rank], to_rank)], [(outputs[from_rank], from_rank)]


def _split_sizes(name, tensor, split_sizes, group):
    """Elements of `tensor` for each rank, from rows (dim 0) for each rank; equal rows if None."""
    world_size = dist.get_world_size(group)
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


def all_to_all_single(
    output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
):
    """Send the i-th piece of `input` to rank i, and receive rank i's piece as the i-th of `output`.

    Pieces are rows (dim 0): *_split_sizes rows for each rank, or equal ones. Returns None, or a Work with
    async_op. Raises ValueError for splits that do not fit.
    """
    if output.shape[1:] != input.shape[1:] or output.dtype != input.dtype:
        raise ValueError(
            f"rows of output, {tuple(output.shape[1:])} {output.dtype}, are not like "
            f"rows of input, {tuple(input.shape[1:])} {input.dtype}"
        )
    output_sizes = _split_sizes("output", output, output_split_sizes, group)
    input_sizes = _split_sizes("input", input, input_split_sizes, group)
    rank = dist.get_rank(group)
    if output_sizes[rank] != input_sizes[rank]:
        raise ValueError(
            f"rank {rank} sends itself {input_sizes[rank]} elements and expects {output_sizes[rank]}"
        )
    input = _flat(input)
    steps = _into(output, _pairwise_all_to_all, input, output_sizes, input_sizes, group)
    return _launch("all_to_all_single", steps, [output, input], group, async_op)


# ---- trees: broadcast and barrier -----------------------------------------------------------------------


def _tree_broadcast(tensor, root, group):
    """A binomial tree: in round k every rank that has the tensor passes it 2^k places on, counted from the root.

        P = 8      round 0: 0->1      round 1: 0->2 1->3      round 2: 0->4 1->5 2->6 3->7
    """
    rank, world_size = rank_and_size(group)
    place = (rank - root) % world_size
    distance = 1
    while distance < world_size:
        if place < distance and place + distance < world_size:
            yield [(tensor, (rank + distance) % world_size)], []
        elif distance <= place < 2 * distance:
            yield [], [(tensor, (rank - distance) % world_size)]
        distance *= 2


def _group_rank(name, global_rank, group):
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if global_rank not in ranks:
        raise ValueError(f"{name}={global_rank} is not one of the group's ranks, {ranks}")
    return ranks.index(global_rank)


def broadcast(tensor, src=0, group=None, async_op=False):
    """Copy `tensor` of the *global* rank `src` to every rank of the group, in place.

    Returns None, or a Work with async_op. Raises ValueError if src is not in the group.
    """
    root = _group_rank("src", src, group)
    steps = _into(tensor, _tree_broadcast, root, group)
    return _launch("broadcast", steps, [tensor], group, async_op)


def _dissemination(token, group):
    """Round k: tell the rank 2^k places on, hear from the rank 2^k places back; then 2^(k+1) have been heard."""
    rank, world_size = rank_and_size(group)
    heard = torch.empty_like(token)
    distance = 1
    while distance < world_size:
        yield [(token, (rank + distance) % world_size)], [(heard, (rank - distance) % world_size)]
        distance *= 2


def barrier(group=None):
    """Return when every rank of the group has called it.

    Its first batch involves every rank, as NCCL asks of the first batch of any group.
    """
    cuda = dist.get_backend(group) == "nccl"
    token = torch.zeros(1, dtype=torch.uint8, device="cuda" if cuda else "cpu")
    _launch("barrier", _dissemination(token, group), [token], group, async_op=False)
    if cuda:
        torch.cuda.current_stream().synchronize()


# ---- cost ---------------------------------------------------------------------------------------------


def reduce_scatter_bytes(nbytes, world_size):
    """Bytes that one rank sends to reduce-scatter, or to all-gather, a full tensor of `nbytes` by the ring."""
    return nbytes * (world_size - 1) // world_size


all_gather_bytes = reduce_scatter_bytes


def all_reduce_bytes(nbytes, world_size):
    """Bytes that one rank sends to all-reduce `nbytes` by the ring: no algorithm can send fewer."""
    return 2 * nbytes * (world_size - 1) // world_size


# ---- derivatives: the backward of a collective is a collective --------------------------------------------
#
#                             forward          backward           x before -> after
#   copy_to_group             identity         all-reduce         replicated -> used differently by each (f)
#   reduce_from_group         all-reduce       identity           partial sums -> replicated (g)
#   scatter_to_group          own chunk        all-gather         replicated -> split
#   gather_from_group         all-gather       own chunk          split -> replicated, used alike by all
#   all_gather_to_group       all-gather       reduce-scatter     split -> full, used differently by each
#   reduce_scatter_to_group   reduce-scatter   all-gather         partial sums -> split
#   all_to_all_in_group       all-to-all       all-to-all, back   split one way -> split another
#
# What all ranks use alike has the same gradient on each; what each uses differently has a part of its gradient
# on each, and the parts must be summed. No Function changes its input or its grad_output.


def _all_reduced(x, group):
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    steps = _into(output, _ring_all_reduce, _flat(x), ReduceOp.SUM, group)
    _launch("all_reduce", steps, [output], group, async_op=False)
    return output


def _all_gathered(x, dim, group):
    world_size = dist.get_world_size(group)
    output = x.new_empty(world_size, *x.shape)
    all_gather_single(output, x, group)
    return output.movedim(0, dim).reshape(*x.shape[:dim], world_size * x.shape[dim], *x.shape[dim + 1 :])


def _own_chunk(x, dim, group):
    rank, world_size = rank_and_size(group)
    if x.shape[dim] % world_size:
        raise ValueError(f"dim {dim} of {tuple(x.shape)} is not divisible by world_size={world_size}")
    return x.chunk(world_size, dim)[rank].clone(memory_format=torch.contiguous_format)


def _reduce_scattered(x, dim, group):
    world_size = dist.get_world_size(group)
    if x.shape[dim] % world_size:
        raise ValueError(f"dim {dim} of {tuple(x.shape)} is not divisible by world_size={world_size}")
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
    """This rank's chunk, along `dim`, of an x that all ranks hold. ValueError if P does not divide it."""
    return _ScatterToGroup.apply(x, dim % x.ndim, group)


def gather_from_group(x, dim, group=None):
    """Every rank's x, joined along `dim`, for a use that is the same on every rank."""
    return _GatherFromGroup.apply(x, dim % x.ndim, group)


def all_gather_to_group(x, dim, group=None):
    """Every rank's x, joined along `dim`, for a use that differs between ranks: the gradients are summed."""
    return _AllGatherToGroup.apply(x, dim % x.ndim, group)


def reduce_scatter_to_group(x, dim, group=None):
    """This rank's chunk, along `dim`, of the sum of every rank's x. ValueError if P does not divide it."""
    return _ReduceScatterToGroup.apply(x, dim % x.ndim, group)


def all_to_all_in_group(x, output_split_sizes=None, input_split_sizes=None, group=None):
    """all_to_all_single() of the rows of x, differentiable."""
    return _AllToAll.apply(x, output_split_sizes, input_split_sizes, group)


# ---- demonstration ----------------------------------------------------------------------------------------


def _demonstrate():
    rank, world_size = rank_and_size()
    n = 1 << 18
    shard, full = torch.full((n // world_size,), float(rank)), torch.full((n,), float(rank))
    full = full[: shard.numel() * world_size].clone()
    ring = reduce_scatter_bytes(full.nbytes, world_size)
    rows = [
        ("reduce_scatter_single", ring, lambda: reduce_scatter_single(shard, full)),
        ("all_gather_single", ring, lambda: all_gather_single(full, shard)),
        ("all_reduce", all_reduce_bytes(full.nbytes, world_size), lambda: all_reduce(full)),
        ("all_to_all_single", ring, lambda: all_to_all_single(full, full.clone())),
    ]
    if rank == 0:
        print(f"{world_size} ranks, {full.nbytes} bytes\n{'':24}{'claimed':>12}{'counted':>12}{'messages':>12}")
    for operation, claimed, call in rows:
        with count_bytes() as traffic:
            call()
        if rank == 0:
            print(f"{operation:24}{claimed:12}{traffic.bytes():12}{traffic.messages():12}")


if __name__ == "__main__":
    run_ranks(_demonstrate)
