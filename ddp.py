"""Data parallelism: one replica of the model per rank, each on its own part of the batch.

The gradient of a mean over the batch is the mean of the gradients of its P equal parts (and the
gradient of a sum is their sum). After every backward pass one all-reduce gives each rank that
gradient; the optimizers then take the same step from the same weights, and the replicas stay equal
without ever being compared.

Waiting for the end of backward leaves the network idle meanwhile. Gradients appear from the last
layer to the first, so they are packed into buckets in that order, and a bucket leaves as soon as
its gradients are complete:

    backward      | layer 4 | layer 3 | layer 2 | layer 1 |
    network                 | bucket 0: 4, 3 ...| bucket 1: 2, 1 |   only the end costs time

A step sends, from each of P ranks, 2(P-1)/P bytes per byte of gradient (the cost of an all-reduce,
see collectives.py), in as many all-reduces as there are buckets. Each rank holds everything: all
parameters, all gradients, which lie in the buckets, and the optimizer's state of all of them, with
Adam in fp32 4 + 4 + 8 = 16 bytes a parameter. zero.py shares those out.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.

    torchrun --nproc-per-node 4 ddp.py      claimed and counted bytes; the error against one process
"""

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
    """After backward: make each gradient its mean over the group. Correct, and nothing overlaps."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:  # the other ranks may have one
                parameter.grad = torch.zeros_like(parameter, dtype=grad_dtype(parameter))
            all_reduce(parameter.grad, ReduceOp.AVG, group)


def grad_dtype(parameter):
    """The dtype in which autograd adds up its gradients, such as 32 bits for a parameter of 16."""
    return parameter.grad_dtype or parameter.dtype


class Bucket:
    """A step further: gradients that travel together, once backward has made the last of them.

    Make one for each part of the parameters before backward, and call finish() after it. What the
    real one below adds: gradients are views of the buffer, not copies; all ranks send their buckets
    in one order; some parameters may get no gradient, and some backward passes only add.
    """

    def __init__(self, parameters, group=None):
        self.parameters, self.group, self.waiting = parameters, group, set(parameters)
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
    """Bytes that a parameter's gradient takes in a bucket."""
    return FlatLayout([parameter]).length * grad_dtype(parameter).itemsize


# ---- gradients in buckets ------------------------------------------------------------------------


def fill_buckets(parameters, cap_bytes, kind):
    """Lists of parameters whose gradients travel together, in the order in which they are complete.

    parameters: in the order in which backward comes to them. kind(parameter): those of a bucket
    have the same. A bucket has at most `cap_bytes` of gradients, or one parameter.
    """
    filling, full, nbytes = {}, [], {p: gradient_bytes(p) for p in parameters}
    for parameter in parameters:
        bucket = filling.setdefault(kind(parameter), [])
        if bucket and sum(nbytes[p] for p in (*bucket, parameter)) > cap_bytes:
            full.append(bucket)
            bucket = filling[kind(parameter)] = []
        bucket.append(parameter)
    position = {parameter: i for i, parameter in enumerate(parameters)}
    return sorted(full + list(filling.values()), key=lambda bucket: position[bucket[-1]])


class GradBucket:
    """Gradients that travel together: each is a view of one flat tensor.

    missing: the parameters whose gradients it waits for in this pass.
    """

    def __init__(self, parameters, group):
        self.parameters, self.group, self.missing = parameters, group, set()
        layout = FlatLayout(parameters)
        self.flat = parameters[0].new_zeros(layout.length, dtype=grad_dtype(parameters[0]))
        # in the order in memory that the parameters have, as fused optimizers expect
        strides = [torch.empty_like(p, device="meta").stride() for p in parameters]
        self.views = {
            parameter: view.as_strided(view.shape, stride)
            for parameter, view, stride in zip(parameters, layout.views(self.flat), strides)
        }

    def take(self, parameter, divisor=1):
        """Divide its gradient into its view, which becomes .grad; zeros, if there is none."""
        view = self.views[parameter]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            torch.div(parameter.grad, divisor, out=view)
        elif divisor != 1:  # autograd has added to it in place
            view.div_(divisor)
        parameter.grad = view

    def reduce(self):
        self.work = all_reduce(self.flat, group=self.group, async_op=True)


def reduce_in_order(queue, reduce):
    """Call reduce() with the first of the queue as long as that waits for no gradient any more.

    Autograd may finish gradients in another order on each rank, but collectives must be called in
    the same one: what is complete waits for those before it.
    """
    while queue and not queue[0].missing:
        reduce(queue.popleft())


# ---- the module ----------------------------------------------------------------------------------


class DistributedDataParallel(nn.Module):
    """Wraps a module: `loss.backward()` leaves, on every rank, gradients averaged over the group.

    Parameters and buffers start as the group's first rank's. Outside of no_sync() every backward()
    that reaches a parameter reduces; torch.autograd.grad() does not. Where it differs from
    torch.nn.parallel's:

    - A parameter that a rank's loss does not reach counts as zero there, and no gradient is None:
      optimizers move unused parameters, too, by decay and momentum. A rank whose loss reaches no
      parameter at all calls finish_grad_sync() in place of backward().
    - Backward decides whether it reduces, not forward: no_sync() goes around backward().
      `require_backward_grad_sync`, which it sets to False, may also be set by hand.
    - Buckets keep the order in which the module has its parameters, last to first. PyTorch's follow
      the order in which gradients came in the first step, and begin with a small one.
    - What may be copied and saved is the module, not its wrapper.

    bucket_cap_mb: a bucket has at most so many MiB of gradients, all of one dtype: the grad_dtype
        that their parameters have when they are wrapped.
    broadcast_buffers: buffers become the first rank's before the first forward pass, and before one
        that follows a reduction or, as PyTorch's, a pass with gradients outside no_sync().
    gradient_divide_factor: gradients are divided by it, and summed; by default the group's size; 1
        where each rank's loss is its part of the whole batch's. With another than the group's size
        call zero_grad() before each reduction: it reduces again what .grad has, which leaves a mean
        as it is and makes a sum P times as large.
    wait_in_backward: if False, backward() only starts the reductions, and finish_grad_sync() ends
        them, once after all backwards that add to the sums.
    groups: {parameter: group} of parameters with fewer replicas, such as an expert's; each a subset
        of process_group's ranks.
    find_unused_parameters, device_ids: accepted, as PyTorch's has them. Unused parameters are
        always found, and the module stays where it is.

    Raises ValueError, on every rank, for modules that differ between ranks. RuntimeError in
    backward for parameters frozen or thawed since, for two gradients of one parameter, for a second
    wrapper of the module and for create_graph; in forward after a backward that has failed.
    """

    def __init__(
        self, module, process_group=None, bucket_cap_mb=25, find_unused_parameters=True,
        broadcast_buffers=True, gradient_divide_factor=None, wait_in_backward=True, groups=None,
        device_ids=None,
    ):
        super().__init__()
        self.module, self.process_group = module, process_group
        self.broadcast_buffers, self.wait_in_backward = broadcast_buffers, wait_in_backward
        group_of = lambda parameter: (groups or {}).get(parameter, process_group)
        self.divisor = gradient_divide_factor or dist.get_world_size(process_group)
        check_whole(module.parameters())
        check_parameters([*module.named_parameters(), *module.named_buffers()], process_group)
        for parameter in module.parameters():
            broadcast_first([parameter], group_of(parameter))
        broadcast_first(module.buffers(), process_group)
        # Backward runs from the last layer to the first, which is the order buckets should fill in.
        trained = [p for p in module.parameters() if p.requires_grad][::-1]
        kind = lambda parameter: (grad_dtype(parameter), group_of(parameter))
        self.buckets = [
            GradBucket(parameters, group_of(parameters[0]))
            for parameters in fill_buckets(trained, int(bucket_cap_mb * 2**20), kind)
        ]
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.require_backward_grad_sync = self._buffers_may_differ = True
        self._queue, self._running = deque(), False
        self._expected = False  # whether gradients of a forward pass wait for a reduction
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(weakly(self._gradient_ready))

    def forward(self, *args, **kwargs):
        if self._running and self.wait_in_backward:
            raise RuntimeError(
                "the last backward has not ended. If it failed, finish_grad_sync() ends it, on "
                "every rank; then zero the gradients"
            )
        if self.broadcast_buffers and self._buffers_may_differ:
            broadcast_first(self.module.buffers(), self.process_group)
        self._buffers_may_differ = torch.is_grad_enabled() and self.require_backward_grad_sync
        self._expected = self._expected or torch.is_grad_enabled()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self):
        """Backward inside only adds to this rank's gradients; the next outside reduces the sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # -- backward
    #
    # when                           who                   what
    # the first gradient is there    start_grad_sync()     each bucket waits for its gradients
    # a gradient is there            _gradient_ready()     complete buckets leave, in their order
    # backward is over               finish_grad_sync()    the rest leaves; all sums are waited for

    @torch.no_grad()
    def _gradient_ready(self, parameter):
        """A hook: autograd has added to the parameter's .grad."""
        if parameter.grad is not None and parameter.grad.requires_grad:
            raise RuntimeError("create_graph=True: gradients of gradients are not reduced")
        bucket = self._bucket_of[parameter]
        if not self.require_backward_grad_sync:
            bucket.take(parameter)
            return
        if not self._running:
            self.start_grad_sync(awaited=self._bucket_of)
            self._ends_with_backward = self.wait_in_backward  # which began it, and no caller
        if parameter not in bucket.missing:
            raise RuntimeError(f"two gradients in one backward, of {tuple(parameter.shape)}")
        self._complete(parameter)
        if self._ends_with_backward:
            # Private: no public hook runs once all gradients of a pass are there. By each gradient:
            # a nested pass, a reentrant checkpoint's, runs its callbacks at its own end.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _complete(self, parameter):
        bucket = self._bucket_of[parameter]
        bucket.take(parameter, self.divisor)
        bucket.missing.discard(parameter)
        reduce_in_order(self._queue, GradBucket.reduce)

    def _end_backward(self):
        # Private: the pass of a reentrant checkpoint ends inside of a node of the one around it.
        is_last = torch._C._current_autograd_node() is None
        if self._running and (is_last or not self._queue):
            self.finish_grad_sync()

    @torch.no_grad()
    def start_grad_sync(self, awaited=()):
        """Reduce the gradients that are there; those `awaited`, by a W, once they are added to."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad != (parameter in self._bucket_of):
                raise RuntimeError(f"{name!r} was frozen, thawed or replaced after it was wrapped")
        self._queue, self._running, self._ends_with_backward = deque(self.buckets), True, False
        for bucket in self.buckets:
            bucket.missing = set(bucket.parameters)
        for parameter in self._bucket_of.keys() - set(awaited):
            self._complete(parameter)

    @torch.no_grad()
    def finish_grad_sync(self):
        """Reduce what is left, gradients that did not come as zero, and wait for all sums."""
        if not self._running and not self._expected:
            return
        if not self._running:
            self.start_grad_sync()
        for bucket in self.buckets:
            for parameter in list(bucket.missing):
                self._complete(parameter)
        self._running, self._expected, self._buffers_may_differ = False, False, True
        for bucket in self.buckets:
            bucket.work.wait()
        if any(p.grad is not bucket.views[p] for p, bucket in self._bucket_of.items()):
            raise RuntimeError(
                "a gradient was taken while it was reduced: by a second wrapper of the module, or "
                "by a hook of a parameter"
            )

    def __getstate__(self):
        raise RuntimeError("a wrapper is not copied or pickled: copy its module, and wrap the copy")


def check_whole(parameters):
    """ValueError for pieces, of which no rank has a replica."""
    if any(hasattr(parameter, "whole_shape") for parameter in parameters):
        raise ValueError("FullyShardedDataParallel has cut these parameters: wrap a model once")


def broadcast_first(tensors, group):
    """Give all ranks of the group what its first one has."""
    source = dist.get_global_rank(group or dist.group.WORLD, 0)
    for tensor in tensors:
        broadcast(tensor, source, group)


def weakly(method):
    """A hook that calls `method` as long as its object lives.

    A parameter whose hook held the object that holds the parameter would never be freed.
    """
    reference = weakref.WeakMethod(method)
    return lambda *arguments: (alive := reference()) and alive(*arguments)


# ---- one norm ------------------------------------------------------------------------------------


@torch.no_grad()
def get_total_norm(tensors, groups=()):
    """The 2-norm of all elements that the ranks of the groups have together.

    A float64 scalar on the device, for which the host does not wait. tensors: a list of one or
    more, of any size; a norm may stand for the tensors it is of. groups: sums go over one after the
    other, as over a grid's axes.
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
    """Scale tensors, whose norm is `total_norm`, to a norm of at most `max_norm`."""
    coefficient = (max_norm / (total_norm + 1e-6)).clamp(max=1)
    for dtype, alike in _by_dtype(tensors):
        # of 16-bit gradients each element is rounded, once, and the coefficient not
        torch._foreach_mul_(alike, coefficient.to(torch.promote_types(dtype, torch.float32)))


def _by_dtype(tensors):
    """(dtype, [the tensors that have it and some elements]): one kernel takes tensors of one."""
    alike = {}
    for tensor in tensors:
        if tensor.numel():
            alike.setdefault(tensor.dtype, []).append(tensor)
    return alike.items()


# ---- cost ----------------------------------------------------------------------------------------


def ddp_bytes(module, world_size):
    """Bytes that one rank sends in a step: every trainable parameter's gradient, all-reduced once.

    Each is padded to 64 elements. Ranks differ a little where P does not divide a bucket; this is
    their mean.
    """
    nbytes = sum(gradient_bytes(p) for p in module.parameters() if p.requires_grad)
    return all_reduce_bytes(nbytes, world_size)


# ---- demonstration -------------------------------------------------------------------------------


def _demonstrate():
    rank, world_size = rank_and_size()
    torch.manual_seed(0)
    # 480 x 480: P = 1 to 6 divide it into parts of whole 128 bytes
    layers = [nn.Sequential(nn.Linear(480, 480, bias=False), nn.GELU()) for _ in range(4)]
    module = nn.Sequential(*layers).double()
    inputs = torch.randn(8 * world_size, 480, dtype=torch.float64)
    whole = torch.autograd.grad(module(inputs).square().mean(), list(module.parameters()))
    model = DistributedDataParallel(module, bucket_cap_mb=2)
    with count_bytes() as traffic:
        model(inputs.chunk(world_size)[rank]).square().mean().backward()
    error = max((p.grad - g).abs().max().item() for p, g in zip(module.parameters(), whole))
    if rank == 0:
        claimed, buckets = ddp_bytes(module, world_size), len(model.buckets)
        print(
            f"{world_size} ranks, {buckets} buckets: "
            f"claimed {claimed} bytes, counted {traffic.bytes('all_reduce')}"
        )
        print(f"largest difference from one process's gradients: {error:.1e}")


if __name__ == "__main__":
    run_ranks(_demonstrate)
