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

from collectives import (
    ReduceOp,
    all_reduce,
    all_reduce_bytes,
    before_backward,
    broadcast,
    check_finite,
    check_parameters,
    count_bytes,
    dist,
    fill_buckets,
    rank_and_size,
    run_ranks,
    weakly,
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

    def __init__(self, parameters, with_flags, group):
        self.parameters, self.group = parameters, group
        sizes = [parameter.numel() for parameter in parameters]
        flags = len(parameters) if with_flags else 0  # per parameter: how many ranks have used it
        self.buffer = parameters[0].new_zeros(sum(sizes) + flags)
        *pieces, self.flags = self.buffer.split([*sizes, flags])
        self.views = [piece.view_as(parameter) for piece, parameter in zip(pieces, parameters)]
        self.waiting, self.sum, self.work = set(), None, None

    def reduce(self, dtype):
        self.sum = self.buffer.to(dtype or self.buffer.dtype)  # the buffer itself, or a copy
        self.work = all_reduce(self.sum, group=self.group, async_op=True)

    def finish(self):
        self.work.wait()
        if self.sum is not self.buffer:
            self.buffer.copy_(self.sum)
        self.sum = None


class DistributedDataParallel(nn.Module):
    """Wraps a module: `loss.backward()` leaves, on every rank, gradients averaged over the group.

    Parameters and buffers start as the group's first rank's, and with broadcast_buffers are so
    before each forward pass of a training. Each gradient is a view into a bucket of at most
    `bucket_cap_mb` MiB and of one dtype; the buckets are rebuilt once, in the order in which
    gradients arrive on the first rank. They travel in `reduce_dtype`, by default their own.
    `gradient_divide_factor` is what gradients are divided by before they are summed: the group's
    size, or 1 where the loss has its global divisor already. The module's tensor outputs may be
    nested in lists, tuples and dicts. With wait_in_backward=False backward() only starts the
    reductions, and finish_grad_sync() waits for them. groups: {parameter: group}, of parameters
    with fewer replicas, such as an expert's; each a subset of process_group's ranks.

    A parameter that a rank's loss does not reach is an error, or counts as zero with
    find_unused_parameters; where no rank's loss reaches it, its gradient stays None.

    Raises ValueError for a module without trainable parameters or with parameters on several
    devices, for sizes that are not positive, and, on every rank, for modules that differ between
    ranks. backward() raises RuntimeError naming this rank's parameters without gradient, those with
    two in one backward, and with error_if_nonfinite those whose gradient here is not finite.
    """

    def __init__(
        self,
        module,
        process_group=None,
        bucket_cap_mb=25,
        find_unused_parameters=False,
        broadcast_buffers=True,
        gradient_divide_factor=None,
        reduce_dtype=None,
        error_if_nonfinite=False,
        wait_in_backward=True,
        groups=None,
    ):
        super().__init__()
        self.module, self.process_group, self.reduce_dtype = module, process_group, reduce_dtype
        self.wait_in_backward, self.groups = wait_in_backward, groups or {}
        self.find_unused_parameters = find_unused_parameters
        self.broadcast_buffers, self.error_if_nonfinite = broadcast_buffers, error_if_nonfinite
        self.gradient_divide_factor = gradient_divide_factor or dist.get_world_size(process_group)
        self._names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        self._check(bucket_cap_mb, gradient_divide_factor)
        for parameter in module.parameters():
            self._broadcast([parameter], self._group_of(parameter))
        self._broadcast(module.buffers(), process_group)
        self._sync, self._reducing, self._next, self._sums = True, False, 0, {}
        # Backward runs from the last layer to the first, which is the order buckets should fill in.
        self._cap_bytes, self._arrived = int(bucket_cap_mb * 2**20), []
        self._build(list(self._names)[::-1])
        for parameter in self._names:
            parameter.register_post_accumulate_grad_hook(weakly(self._gradient_ready))

    def _check(self, bucket_cap_mb, gradient_divide_factor):
        if not self._names:
            raise ValueError("the module has no trainable parameters")
        if not (bucket_cap_mb > 0 and (gradient_divide_factor or 1) > 0):
            raise ValueError(
                f"bucket_cap_mb={bucket_cap_mb} and "
                f"gradient_divide_factor={gradient_divide_factor} must be positive"
            )
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        check_parameters(named, self.process_group)

    def _group_of(self, parameter):
        return self.groups.get(parameter, self.process_group)

    def _broadcast(self, tensors, group):
        source = dist.get_global_rank(group or dist.group.WORLD, 0)
        for tensor in tensors:
            broadcast(tensor, source, group)

    def _build(self, order):
        """Fill buckets in the given order; gradients that exist move into them."""
        self._order = order
        kind = lambda parameter: (parameter.dtype, self._group_of(parameter))
        self._buckets = [
            _Bucket(bucket, self.find_unused_parameters, self._group_of(bucket[0]))
            for bucket in fill_buckets(order, self._cap_bytes, kind)
        ]
        self._place = {}
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views):
                self._place[parameter] = bucket, view
                if parameter.grad is not None:
                    parameter.grad = view.copy_(parameter.grad)

    def forward(self, *args, **kwargs):
        self._reducing = False  # should the last backward have failed half-way
        if self.broadcast_buffers and self._sync and self.training and torch.is_grad_enabled():
            self._broadcast(self.module.buffers(), self.process_group)
        outputs = self.module(*args, **kwargs)
        before_backward(self._begin_backward, outputs)
        return outputs

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
            self.start_grad_sync(awaited=self._names)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def start_grad_sync(self, awaited=()):
        """Reduce the gradients that are there; those of `awaited`, each once it was added to.

        For gradients that no backward of the module computes, such as weight gradients put off.
        finish_grad_sync() ends it.
        """
        self._reducing, self._next, self._sums, self._unused = True, 0, {}, []
        for bucket in self._buckets:
            bucket.waiting = set(bucket.parameters)
            bucket.flags.fill_(1)
        self._complete(self._names.keys() - set(awaited))

    def _gradient_ready(self, parameter):
        if not self._reducing:
            self._store(parameter, 1)
            return
        bucket, _ = self._place[parameter]
        if parameter not in bucket.waiting:
            name = self._names[parameter]
            raise RuntimeError(f"parameter {name!r} got two gradients in one backward pass")
        self._store(parameter, self.gradient_divide_factor)
        bucket.waiting.remove(parameter)
        if self._arrived is not None:
            self._arrived.append(parameter)
        self._launch_full_buckets()

    def _store(self, parameter, factor):
        """Divide the gradient, into its bucket."""
        _, view = self._place[parameter]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            torch.div(parameter.grad, factor, out=view)
        elif factor != 1:  # autograd has added to it in place
            view.div_(factor)
        parameter.grad = view
        if self.error_if_nonfinite and self._reducing:
            self._sums[self._names[parameter]] = view.sum(dtype=torch.float64)

    def _launch_full_buckets(self):
        """Reduce full buckets, in bucket order: collectives need the same order on every rank."""
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._buckets[self._next].reduce(self.reduce_dtype)
            self._next += 1

    def _complete(self, parameters):
        """Reduce these as they are: nothing more will be added to them."""
        for bucket in self._buckets:
            for i, parameter in enumerate(bucket.parameters):
                if parameter in bucket.waiting and parameter in parameters:
                    if parameter.grad is None:
                        self._unused.append(self._names[parameter])
                        bucket.flags[i : i + 1] = 0
                    self._store(parameter, self.gradient_divide_factor)
                    bucket.waiting.remove(parameter)
        self._launch_full_buckets()

    def _end_backward(self):
        self._complete(self._names)
        if self.wait_in_backward:
            self.finish_grad_sync()

    def finish_grad_sync(self):
        """Wait for the reductions that backward() or start_grad_sync() started, if they did."""
        if not self._reducing:
            return
        for bucket in self._buckets:
            bucket.finish()
            for parameter, used in zip(bucket.parameters, bucket.flags.tolist()):
                if not used:
                    parameter.grad = None
        self._reducing = False
        if self._arrived is not None:
            self._rebuild()
        self._raise_errors()

    def _rebuild(self):
        """Once, refill the buckets in the order in which gradients arrived on the first rank."""
        place = {parameter: i for i, parameter in enumerate(self._order)}
        order = [place[parameter] for parameter in dict.fromkeys(self._arrived + self._order)]
        places = torch.tensor(order, device=self._order[0].device)
        self._broadcast([places], self.process_group)
        self._arrived = None
        if places.tolist() != sorted(places.tolist()):
            self._build([self._order[place] for place in places.tolist()])

    def _raise_errors(self):
        """After the reduction, so that no other rank is left waiting."""
        if self._unused and not self.find_unused_parameters:
            rank = dist.get_rank(self.process_group)
            raise RuntimeError(
                f"rank {rank}: no gradient for {', '.join(self._unused)}; "
                "with find_unused_parameters=True they would count as zero"
            )
        check_finite(self._sums, self.process_group)


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
            f"claimed {claimed} bytes, counted {traffic.bytes('all_reduce')}"
        )
        print(f"largest difference from one process's gradients: {error:.1e}")


if __name__ == "__main__":
    run_ranks(_demonstrate)
