"""Data parallelism: one replica of the model per rank, each on its own part of the batch.

The gradient of a mean over the batch is the mean of the gradients of its P equal parts (and the
gradient of a sum is their sum). After every backward pass one all-reduce gives each rank that
gradient; the optimizers then take the same step from the same weights, and the replicas stay equal
without ever being compared.

Waiting for the end of backward leaves the network idle meanwhile. Gradients appear from the last
layer to the first, so they are packed into buckets in that order, and a bucket leaves as soon as it
is full:

    backward      | layer 4 | layer 3 | layer 2 | layer 1 |
    network                 | bucket 0: 4, 3 ...| bucket 1: 2, 1 |   only the end costs time

Cost of a step on P ranks: each sends 2(P-1)/P bytes per byte of gradient (the cost of an
all-reduce, see collectives.py), in as many all-reduces as there are buckets.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.

    torchrun --nproc-per-node 4 ddp.py      claimed and counted bytes; the error against one process
"""

from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from collectives import (
    ReduceOp,
    all_reduce,
    all_reduce_bytes,
    broadcast,
    count_bytes,
    dist,
    rank_and_size,
    run_ranks,
)

# ---- the idea ------------------------------------------------------------------------------------


def average_gradients(module, group=None):
    """After backward: make each gradient its mean over the group. Correct, and nothing overlaps."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:  # the other ranks may have one
                parameter.grad = torch.zeros_like(parameter)
            all_reduce(parameter.grad, ReduceOp.AVG, group)


# ---- buckets, reduced while backward runs --------------------------------------------------------


class _Bucket:
    """Gradients that travel together: each is a view into one flat buffer."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.buffer = parameters[0].new_zeros(sum(parameter.numel() for parameter in parameters))
        pieces = self.buffer.split([parameter.numel() for parameter in parameters])
        self.views = [piece.view_as(parameter) for piece, parameter in zip(pieces, parameters)]
        self.waiting, self.work = set(), None

    def adopt(self, parameter, view):
        """Make `view` the parameter's gradient, so later backward passes add to it in place."""
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
        parameter.grad = view


class _BackwardBegins(torch.autograd.Function):
    """forward: identity; backward: identity, and a call of begin()

    Applied to the model's outputs it comes first in backward, on every rank, also on one whose
    loss reaches none of the parameters.
    """

    @staticmethod
    def forward(ctx, begin, output):
        ctx.begin = begin
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad_output):
        ctx.begin()
        return None, grad_output


def _fill_buckets(parameters, cap_bytes):
    """Buckets of one dtype and device, at most `cap_bytes` (or one parameter), in given order."""
    groups = []
    for parameter in parameters:
        last = groups[-1] if groups else None
        size = sum(p.nbytes for p in last) + parameter.nbytes if last else 0
        alike = last and (last[0].dtype, last[0].device) == (parameter.dtype, parameter.device)
        if alike and size <= cap_bytes:
            last.append(parameter)
        else:
            groups.append([parameter])
    return [_Bucket(group) for group in groups]


class DistributedDataParallel(nn.Module):
    """Wraps a module: `loss.backward()` leaves, on every rank, gradients averaged over the group.

    Parameters and buffers start as rank 0's. Each gradient is a view into a bucket of at most
    `bucket_cap_mb` MiB and of the parameters' dtype. A parameter that has no gradient on this rank
    counts as zero. `gradient_divide_factor` is what gradients are divided by before they are
    summed: the group's size, or 1 where the loss has its global divisor already. The module's
    tensor outputs may be nested in lists, tuples and dicts. Raises ValueError for a module without
    trainable parameters and for sizes that are not positive.
    """

    def __init__(self, module, process_group=None, bucket_cap_mb=25, gradient_divide_factor=None):
        super().__init__()
        self.module, self.process_group = module, process_group
        if gradient_divide_factor is None:
            gradient_divide_factor = dist.get_world_size(process_group)
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError("the module has no trainable parameters")
        if not (bucket_cap_mb > 0 and gradient_divide_factor > 0):
            raise ValueError(
                f"bucket_cap_mb={bucket_cap_mb} and "
                f"gradient_divide_factor={gradient_divide_factor} must be positive"
            )
        self.gradient_divide_factor = gradient_divide_factor
        source = dist.get_global_rank(process_group or dist.group.WORLD, 0)
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor, source, process_group)
        # Backward runs from the last layer to the first, which is the order buckets should fill in.
        self._buckets = _fill_buckets(parameters[::-1], int(bucket_cap_mb * 2**20))
        self._sync, self._reducing, self._next = True, False, 0
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views):
                parameter.register_post_accumulate_grad_hook(self._make_hook(bucket, view))

    def forward(self, *args, **kwargs):
        self._reducing = False  # should the last backward have failed half-way
        mark = lambda output: _BackwardBegins.apply(self._begin_backward, output)
        return tree_map_only(torch.Tensor, mark, self.module(*args, **kwargs))

    @contextmanager
    def no_sync(self):
        """Backward inside only adds to this rank's gradients; the next outside reduces the sum."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _begin_backward(self):
        """Runs on every rank, whether or not a parameter gets a gradient there."""
        if self._sync and not self._reducing:
            self._reducing, self._next = True, 0
            for bucket in self._buckets:
                bucket.waiting = set(bucket.parameters)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _make_hook(self, bucket, view):
        def gradient_ready(parameter):
            bucket.adopt(parameter, view)
            if self._reducing:
                bucket.waiting.discard(parameter)
                self._launch_full_buckets()

        return gradient_ready

    def _launch_full_buckets(self):
        """Reduce full buckets, in bucket order: collectives need the same order on every rank."""
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            bucket = self._buckets[self._next]
            if self.gradient_divide_factor != 1:
                bucket.buffer.div_(self.gradient_divide_factor)
            bucket.work = all_reduce(bucket.buffer, group=self.process_group, async_op=True)
            self._next += 1

    def _finish_backward(self):
        for bucket in self._buckets[self._next :]:
            for parameter, view in zip(bucket.parameters, bucket.views):
                bucket.adopt(parameter, view)
            bucket.waiting.clear()
        self._launch_full_buckets()
        for bucket in self._buckets:
            bucket.work.wait()
        self._reducing = False


# ---- cost ----------------------------------------------------------------------------------------


def ddp_bytes(module, world_size):
    """Bytes that one rank sends in a step: every trainable parameter's gradient, all-reduced once.

    Ranks differ by a few elements where P does not divide a bucket; this is their mean.
    """
    gradient_bytes = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    return all_reduce_bytes(gradient_bytes, world_size)


# ---- demonstration -------------------------------------------------------------------------------


def _demonstrate():
    rank, world_size = rank_and_size()
    torch.manual_seed(0)
    # 480: P = 1 to 6 divide it
    layers = [nn.Sequential(nn.Linear(480, 480), nn.GELU()) for _ in range(4)]
    module = nn.Sequential(*layers).double()
    inputs = torch.randn(8 * world_size, 480, dtype=torch.float64)
    whole = torch.autograd.grad(module(inputs).square().mean(), list(module.parameters()))
    model = DistributedDataParallel(module, bucket_cap_mb=2)
    with count_bytes() as traffic:
        model(inputs.chunk(world_size)[rank]).square().mean().backward()
    error = max((p.grad - g).abs().max().item() for p, g in zip(module.parameters(), whole))
    if rank == 0:
        claimed, buckets = ddp_bytes(module, world_size), len(model._buckets)
        print(
            f"{world_size} ranks, {buckets} buckets: "
            f"claimed {claimed} bytes, counted {traffic.bytes()}"
        )
        print(f"largest difference from one process's gradients: {error:.1e}")


if __name__ == "__main__":
    run_ranks(_demonstrate)
