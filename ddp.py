"""Data parallelism: every rank trains a replica of the model on its part of the batch.

The gradient of a mean over the batch is the mean of the gradients of its P equal parts. So an
averaging all-reduce after each backward pass gives every rank the gradient of the whole batch. All
ranks start from the same weights and take the same optimizer step; the replicas stay equal without
ever being compared.

Reducing only after backward would leave the network idle until then. Gradients become available
from the last layer to the first, so they are collected in buckets in that order, and each bucket is
reduced as soon as its last gradient has arrived:

    backward      | layer 4 | layer 3 | layer 2 | layer 1 |
    network                 | bucket 0: 4, 3 ...| bucket 1: 2, 1 |   only the tail costs time

A rank holds   all parameters, gradients and optimizer state: with Adam in fp32 4 + 4 + 8 = 16 bytes
               per parameter, and 4 for the buckets unless gradients are views of them. zero.py
               divides these among the ranks.
It sends       per step 2 (P-1)/P bytes for each byte of gradients, the cost of an all-reduce (see
               collectives.py), in one all-reduce per bucket
Overlap        a bucket travels while backward computes the gradients of the next one
PyTorch's      DistributedDataParallel does the same; the class below lists the differences

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.

    torchrun --nproc-per-node 4 ddp.py      claimed and counted bytes; the error against one process
"""

import math
import weakref
from collections import deque
from contextlib import contextmanager

import torch
from torch import nn

from collectives import (
    ALIGNMENT, ReduceOp, all_reduce, all_reduce_bytes, broadcast, check_parameters, count_bytes,
    dist, rank_and_size, run_ranks,
)

# ---- the idea ------------------------------------------------------------------------------------


def average_gradients(module, group=None):
    """After backward, replace each gradient by its mean over the group. Nothing overlaps."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:  # unused here, but other ranks may have used it
                parameter.grad = torch.zeros_like(parameter, dtype=grad_dtype(parameter))
            all_reduce(parameter.grad, ReduceOp.AVG, group)


def grad_dtype(parameter):
    """Return the dtype of the parameter's .grad: its own, unless its grad_dtype was set."""
    return parameter.grad_dtype or parameter.dtype


class Bucket:
    """One step further: gradients that are reduced together once the last of them is computed.

    Create a bucket for each list of parameters before training, and call finish() after every
    backward. The real bucket below adds three things: gradients can be views of its buffer instead
    of copies, all ranks reduce their buckets in the same order, and a backward pass may leave some
    parameters without a gradient, or only accumulate (no_sync).
    """

    def __init__(self, parameters, group=None):
        self.parameters = parameters
        self.group = group
        self.waiting = set(parameters)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.mark_ready)

    def mark_ready(self, parameter):
        self.waiting.remove(parameter)
        if not self.waiting:
            self.buffer = torch.cat([p.grad.flatten() for p in self.parameters])
            self.work = all_reduce(self.buffer, ReduceOp.AVG, self.group, async_op=True)

    def finish(self):
        self.work.wait()
        parts = self.buffer.split([p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts):
            parameter.grad.copy_(part.view_as(parameter))
        self.waiting = set(self.parameters)


# ---- tensors in one flat tensor ------------------------------------------------------------------


def aligned(elements):
    """Round up to a multiple of 64 elements: at least 128 bytes of any dtype of 16 bits or more."""
    unit = ALIGNMENT // 2
    return -(-elements // unit) * unit


class FlatLayout:
    """The places of tensors in one flat tensor.

        | weight              |    | bias | | weight           |   |

    Each tensor begins on a multiple of 64 elements, so fewer than 64 of padding follow it.

    sizes: the number of elements of each tensor and of the padding after it, in turn.
    length: the number of elements of the flat tensor.
    """

    def __init__(self, tensors):
        self.shapes = [tensor.shape for tensor in tensors]
        self.sizes = []
        for shape in self.shapes:
            size = shape.numel()
            self.sizes += size, aligned(size) - size
        self.length = sum(self.sizes)

    def views(self, flat):
        """Return the tensors, in their shapes, as views of a flat one."""
        parts = flat.split(self.sizes)[::2]
        return [part.view(shape) for part, shape in zip(parts, self.shapes)]

    def pack(self, tensors):
        """Copy the tensors to a new flat one, with zeros for padding."""
        flat = tensors[0].new_zeros(self.length)
        for view, tensor in zip(self.views(flat), tensors):
            view.copy_(tensor.detach())
        return flat


def gradient_bytes(parameter):
    """Return the bytes that a parameter's gradient occupies in a bucket, with its padding."""
    return FlatLayout([parameter]).length * grad_dtype(parameter).itemsize


# ---- gradients in buckets ------------------------------------------------------------------------


def fill_buckets(parameters, cap_bytes, kind):
    """Divide parameters into buckets, sorted by when backward completes them.

    parameters: in the order in which backward computes their gradients.
    cap_bytes: the largest size of a bucket's gradients; a larger parameter gets its own bucket.
    kind: parameters share a bucket only if kind(parameter) is equal (their grad_dtype and group).
    """
    buckets = []
    filling = {}  # {kind: (the bucket that is being filled, its size in bytes)}
    for parameter in parameters:
        nbytes = gradient_bytes(parameter)
        bucket, total = filling.get(kind(parameter), (None, math.inf))
        if total + nbytes > cap_bytes:
            bucket, total = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        filling[kind(parameter)] = bucket, total + nbytes
    position = {parameter: i for i, parameter in enumerate(parameters)}
    return sorted(buckets, key=lambda bucket: position[bucket[-1]])


class GradBucket:
    """Gradients that are packed into one flat tensor and reduced together.

    slots: {parameter: the view of the flat tensor that its gradient fills}.
    as_views: make the slots the parameters' .grad, instead of copying the sums back to .grad.
    missing: the parameters whose gradients have not arrived yet in this round.
    """

    def __init__(self, parameters, group, as_views):
        self.group = group
        self.as_views = as_views
        self.missing = set()
        layout = FlatLayout(parameters)
        self.flat = parameters[0].new_zeros(layout.length, dtype=grad_dtype(parameters[0]))
        self.slots = {}
        for parameter, view in zip(parameters, layout.views(self.flat)):
            # fused optimizers expect a gradient to have the memory order (strides) of its parameter
            strides = torch.empty_like(parameter, device="meta").stride()
            self.slots[parameter] = view.as_strided(view.shape, strides)

    def take(self, parameter, divisor):
        """Write gradient / divisor into the slot; a missing gradient counts as zero."""
        slot = self.slots[parameter]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(slot)
        if parameter.grad is not slot:
            torch.div(parameter.grad, divisor, out=slot)
        elif divisor != 1:  # autograd has accumulated into the slot itself
            slot.div_(divisor)
        if self.as_views:
            parameter.grad = slot

    def reduce(self):
        """Start to sum the bucket over the group."""
        self.work = all_reduce(self.flat, group=self.group, async_op=True)

    def give_back(self):
        """Wait for the sums and, if .grad is not a view of them, copy them to it."""
        self.work.wait()
        for parameter, slot in self.slots.items():
            if parameter.grad is None or (self.as_views and parameter.grad is not slot):
                raise RuntimeError("a hook or a second wrapper replaced .grad while it was reduced")
        if not self.as_views:
            torch._foreach_copy_([p.grad for p in self.slots], list(self.slots.values()))


def reduce_in_order(queue, reduce):
    """Reduce the bucket at the front of the queue, and the next one, while the first is complete.

    Autograd may complete buckets in a different order on each rank, but all ranks must call
    collectives in the same order. So a complete bucket waits for the ones before it.
    """
    while queue and not queue[0].missing:
        reduce(queue.popleft())


class Reducer:
    """Reduce gradients, bucket by bucket, in rounds. Each round covers all parameters once.

        idle  -- start() -->  reducing: ready() for each gradient  -- finish() -->  idle

    A round usually lasts as long as one backward. But a zero-bubble pipeline computes some weight
    gradients after backward; its rounds begin and end when the pipeline says so.

    buckets: in the order in which every rank reduces them.
    queue: the buckets of this round that have not been sent yet.
    """

    def __init__(self, module, group_of, divisor, bucket_cap_mb, as_views):
        self.module = module
        self.divisor = divisor
        # Backward runs from the last layer to the first, so buckets are filled in that order.
        parameters = [p for p in module.parameters() if p.requires_grad][::-1]
        kind = lambda parameter: (grad_dtype(parameter), group_of(parameter))
        self.buckets = [
            GradBucket(bucket, group_of(bucket[0]), as_views)
            for bucket in fill_buckets(parameters, bucket_cap_mb * 2**20, kind)
        ]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.slots}
        self.is_reducing = False
        self.queue = deque()

    def start(self, awaited=()):
        """Begin a round. The gradients of all parameters that are not `awaited` are final."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad != (parameter in self.bucket_of):
                raise RuntimeError(f"{name!r} was frozen, thawed or replaced after it was wrapped")
        self.is_reducing = True
        self.queue = deque(self.buckets)
        for bucket in self.buckets:
            bucket.missing = set(bucket.slots)
        for parameter in self.bucket_of.keys() - set(awaited):
            self.ready(parameter)

    def ready(self, parameter):
        """Take the parameter's gradient, which is final, and reduce buckets that are complete."""
        bucket = self.bucket_of[parameter]
        if parameter not in bucket.missing:
            raise RuntimeError(f"two gradients in one backward, of {tuple(parameter.shape)}")
        bucket.take(parameter, self.divisor)
        bucket.missing.remove(parameter)
        reduce_in_order(self.queue, GradBucket.reduce)

    def finish(self):
        """End the round: count missing gradients as zero, reduce the other buckets, and wait."""
        if not self.is_reducing:
            self.start()
        for bucket in self.buckets:
            for parameter in list(bucket.missing):
                self.ready(parameter)
        self.is_reducing = False
        for bucket in self.buckets:
            bucket.give_back()


# ---- the module ----------------------------------------------------------------------------------


class DistributedDataParallel(nn.Module):
    """Wrap a module so that `loss.backward()` averages its gradients over the group.

    Parameters and buffers are copied from the group's first rank on construction. Every backward()
    that reaches a parameter reduces the gradients, except inside no_sync(); torch.autograd.grad()
    never does. Differences from torch.nn.parallel.DistributedDataParallel:

    - A parameter that no rank's loss uses has a zero gradient instead of None, so weight decay and
      momentum move it. A rank whose loss uses no parameter at all calls finish_grad_sync() in place
      of backward().
    - Whether gradients are reduced is decided in backward, not in forward: no_sync() belongs around
      backward(). It sets `require_backward_grad_sync`, which may also be set by hand.
    - Buckets follow the order of the module's parameters, from last to first, for the whole
      training. PyTorch makes the first one small and, unless it looks for unused parameters,
      rebuilds them after the first step in the order in which gradients arrived.
    - Copy and save the wrapped module, not the wrapper.

    bucket_cap_mb: the largest size of a bucket in MiB; a larger parameter gets its own bucket.
    broadcast_buffers: copy the first rank's buffers to all ranks before the first forward pass, and
        before each one that follows a reduction or, as in PyTorch, a forward pass in grad mode
        outside no_sync().
    gradient_as_bucket_view: make .grad a view of its bucket, which saves a copy and its memory. But
        a script must not keep gradients, because the next backward overwrites them.
    gradient_divide_factor: what the sum of the gradients is divided by. The default is the group's
        size P; use 1 if each rank's loss is already its share of the whole batch's loss. Then call
        zero_grad() after each reduction: the next one includes what .grad already holds, which
        does not change if it is averaged, but grows by P / gradient_divide_factor.
    wait_in_backward: if False, backward() only starts the reductions. Call finish_grad_sync() once
        after the last backward pass.
    groups: {parameter: group} for parameters with fewer replicas, such as an expert's. Each group
        is a subset of process_group. Their sums are divided by the same factor as all others.
    device_ids, output_device, find_unused_parameters, static_graph: accepted for compatibility.
        Inputs are not moved to a device, and unused parameters are always found.

    Raises ValueError on every rank if the ranks' modules differ. backward() raises RuntimeError if
    a parameter was frozen or unfrozen after wrapping, for sparse gradients and create_graph=True,
    and if a gradient is replaced or computed twice in one pass; so does forward() after a backward
    pass that failed, unless wait_in_backward is False.
    """

    def __init__(
        self, module, device_ids=None, output_device=None, *, process_group=None, bucket_cap_mb=25,
        broadcast_buffers=True, find_unused_parameters=True, gradient_as_bucket_view=False,
        static_graph=False, gradient_divide_factor=None, wait_in_backward=True, groups=None,
    ):  # fmt: skip
        super().__init__()
        self.module = module
        self.process_group = process_group
        self.broadcast_buffers = broadcast_buffers
        self.wait_in_backward = wait_in_backward
        check_whole(module.parameters())
        check_parameters([*module.named_parameters(), *module.named_buffers()], process_group)
        group_of = lambda parameter: (groups or {}).get(parameter, process_group)
        for parameter in module.parameters():
            broadcast_first([parameter], group_of(parameter))
        broadcast_first(module.buffers(), process_group)
        divisor = gradient_divide_factor or dist.get_world_size(process_group)
        self.reducer = Reducer(module, group_of, divisor, bucket_cap_mb, gradient_as_bucket_view)
        self.require_backward_grad_sync = True
        self._buffers_may_differ = True  # if they do, the next forward pass copies the first rank's
        self._expects_backward = False  # whether a forward pass still awaits its reduction
        self._ends_with_backward = False  # whether the end of backward also ends the round
        for parameter in self.reducer.bucket_of:
            parameter.register_post_accumulate_grad_hook(weakly(self._gradient_ready))

    def forward(self, *args, **kwargs):
        if self.reducer.is_reducing and self.wait_in_backward:
            raise RuntimeError(
                "the last backward has not ended. If it failed, finish_grad_sync() ends it, on "
                "every rank; then zero the gradients"
            )
        if self.broadcast_buffers and self._buffers_may_differ:
            broadcast_first(self.module.buffers(), self.process_group)
        self._buffers_may_differ = torch.is_grad_enabled() and self.require_backward_grad_sync
        self._expects_backward = self._expects_backward or torch.is_grad_enabled()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self):
        """Accumulate gradients locally; the next backward() outside reduces their sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @torch.no_grad()
    def _gradient_ready(self, parameter):
        """Hook, called after autograd has accumulated into the parameter's .grad."""
        gradient = parameter.grad
        if gradient is not None and (gradient.is_sparse or gradient.requires_grad):
            raise RuntimeError("sparse gradients and create_graph=True are not supported")
        if not self.require_backward_grad_sync:
            return
        if not self.reducer.is_reducing:
            self.reducer.start(awaited=self.reducer.bucket_of)
            self._ends_with_backward = self.wait_in_backward
        self.reducer.ready(parameter)
        if self._ends_with_backward:
            # Private API: no public hook runs at the end of backward. Every gradient queues a
            # callback, because a nested backward (reentrant checkpoint) runs those queued inside
            # it at its own end.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self):
        # Private API: the current node is None only where the outermost backward ends.
        is_last = torch._C._current_autograd_node() is None
        if self.reducer.is_reducing and (is_last or not self.reducer.queue):
            self.finish_grad_sync()

    @torch.no_grad()
    def start_grad_sync(self, awaited=()):
        """Reduce all gradients that are not `awaited`, and these as they arrive.

        Backward does not end this round of reductions; finish_grad_sync() does.
        """
        self._ends_with_backward = False
        self.reducer.start(awaited)

    @torch.no_grad()
    def finish_grad_sync(self):
        """Reduce what has not been reduced yet, missing gradients as zero, and wait for all."""
        if self.reducer.is_reducing or self._expects_backward:
            self._expects_backward = False
            self._buffers_may_differ = True
            self.reducer.finish()

    def __getstate__(self):
        raise RuntimeError("a wrapper is not copied or pickled: copy its module, and wrap the copy")


def check_whole(parameters):
    """Raise ValueError if zero.py has sharded a parameter, so that no rank has all of it."""
    if any(hasattr(parameter, "whole_shape") for parameter in parameters):
        raise ValueError("FullyShardedDataParallel has cut these parameters: wrap a model once")


def broadcast_first(tensors, group):
    """Copy the tensors of the group's first rank to all of its ranks."""
    source = dist.get_global_rank(group or dist.group.WORLD, 0)
    for tensor in tensors:
        broadcast(tensor, source, group)


def weakly(method):
    """Return a hook that calls `method` only while its object is alive.

    A parameter whose hook held the wrapper, which holds the parameter, would never be freed.
    """
    reference = weakref.WeakMethod(method)

    def hook(*arguments):
        alive = reference()
        if alive is not None:
            alive(*arguments)

    return hook


# ---- cost ----------------------------------------------------------------------------------------


def ddp_bytes(module, world_size):
    """Return the bytes that a rank sends per step to all-reduce all gradients once.

    This is the mean over the ranks, which differ slightly where P does not divide a bucket.
    """
    nbytes = sum(gradient_bytes(p) for p in module.parameters() if p.requires_grad)
    return all_reduce_bytes(nbytes, world_size)


# ---- one norm ------------------------------------------------------------------------------------


@torch.no_grad()
def get_total_norm(tensors, groups=()):
    """Return the 2-norm of all elements that the ranks of the groups jointly hold.

    The result is a float64 scalar on the device; the host does not wait for it.

    tensors: at least one, of any size. A norm may replace the tensors it covers.
    groups: the squares are summed over each of these groups in turn, as over the axes of a grid.
    """
    norms = [tensors[0].new_zeros(1, dtype=torch.float64)]
    for dtype, alike in _by_dtype(tensors):
        found = torch._foreach_norm(alike, 2, torch.promote_types(dtype, torch.float32))
        norms.append(torch.stack(found).double())
    total = torch.cat(norms).square().sum()
    for group in groups:
        all_reduce(total, group=group)
    return total.sqrt_()


@torch.no_grad()
def clip_grads_with_norm_(tensors, max_norm, total_norm):
    """Scale the tensors, whose joint norm is `total_norm`, to a norm of at most `max_norm`."""
    coefficient = (max_norm / (total_norm + 1e-6)).clamp(max=1)
    for dtype, alike in _by_dtype(tensors):
        # a 16-bit coefficient would add its own rounding error to that of every element
        torch._foreach_mul_(alike, coefficient.to(torch.promote_types(dtype, torch.float32)))


def _by_dtype(tensors):
    """Group non-empty tensors by dtype, since a _foreach kernel takes a single dtype."""
    alike = {}
    for tensor in tensors:
        if tensor.numel():
            alike.setdefault(tensor.dtype, []).append(tensor)
    return alike.items()


# ---- demonstration -------------------------------------------------------------------------------


def _demonstrate():
    rank, world_size = rank_and_size()
    torch.manual_seed(0)
    # 480 x 480 elements divide into multiples of 128 bytes for P = 1 to 6
    module = nn.Sequential(*[nn.Linear(480, 480, bias=False) for _ in range(4)]).double()
    inputs = torch.randn(8 * world_size, 480, dtype=torch.float64)
    whole = torch.autograd.grad(module(inputs).square().mean(), list(module.parameters()))
    model = DistributedDataParallel(module, bucket_cap_mb=2)
    with count_bytes() as traffic:
        model(inputs.chunk(world_size)[rank]).square().mean().backward()
    error = max((p.grad - g).abs().max().item() for p, g in zip(module.parameters(), whole))
    if rank == 0:
        claimed, counted = ddp_bytes(module, world_size), traffic.bytes("all_reduce")
        print(f"{len(model.reducer.buckets)} buckets, claimed {claimed} bytes, counted {counted}")
        print(f"largest difference from one process's gradients: {error:.1e}")


if __name__ == "__main__":
    run_ranks(_demonstrate)
