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

import copy
import weakref
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import ModuleType

import torch
from torch import nn

from collectives import (
    ALIGNMENT, ReduceOp, all_gather_single, all_reduce, all_reduce_bytes, broadcast,
    check_parameters, count_bytes, dist, gather_objects, rank_and_size, run_ranks,
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
    """That in which autograd adds up its gradients, such as 32 bits for a parameter of 16."""
    return parameter.grad_dtype or parameter.dtype


class Bucket:
    """The middle step: gradients that travel together, once backward has made the last of them.

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


# ---- tensors in one row --------------------------------------------------------------------------


def _aligned(elements):
    """The next multiple of 64: 128 bytes of the smallest dtype, 16 bits, that a row may have."""
    unit = ALIGNMENT // 2
    return -(-elements // unit) * unit


class FlatLayout:
    """Where tensors lie in one row of elements, which is padded to `shards` equal parts.

        | weight              |    | bias | | weight            |         |
        | shard 0            | shard 1            | shard 2             |       shards = 3

    Tensors and shards begin on multiples of 64 elements: less than 64 of padding follow a tensor,
    and 64 for each shard but one, at most, the row.
    """

    def __init__(self, tensors, shards=1):
        self.shapes = [tensor.shape for tensor in tensors]
        self.sizes = [tensor.numel() for tensor in tensors]
        self._edges = [0]  # where a tensor begins, where its padding does, and so on
        for size in self.sizes:
            self._edges += self._edges[-1] + size, self._edges[-1] + _aligned(size)
        self.shard_size = _aligned(-(-self._edges[-1] // shards))
        self.length = self._edges[-1] = shards * self.shard_size

    def _split(self, part, begin):
        """The elements of each tensor and each padding, in turn, in a part of a row."""
        edges = [min(max(0, edge - begin), len(part)) for edge in self._edges]
        return part.split([end - begin for begin, end in pairwise(edges)])

    def views(self, row):
        """Each tensor's elements of a row, in its shape."""
        return [part.view(shape) for part, shape in zip(self._split(row, 0)[::2], self.shapes)]

    def pack(self, tensors):
        """The tensors in a new row, with zeros for padding."""
        row = tensors[0].new_zeros(self.length)
        for view, tensor in zip(self.views(row), tensors):
            view.copy_(tensor.detach())
        return row

    def ranges(self, rank):
        """[(begin, end)]: what shard `rank` holds of each tensor, flattened; maybe nothing."""
        ranges = []
        for start, size in zip(self._edges[::2], self.sizes):
            begin = rank * self.shard_size - start
            ends = begin, begin + self.shard_size
            ranges.append(tuple(min(max(0, end), size) for end in ends))
        return ranges

    def pieces(self, shard, rank):
        """Each tensor's elements of shard `rank`, one dimension each."""
        return self._split(shard, rank * self.shard_size)[::2]


def gradient_bytes(parameter):
    """Bytes that a parameter's gradient takes in a row."""
    return FlatLayout([parameter]).length * grad_dtype(parameter).itemsize


def fill_buckets(parameters, cap_bytes, kind=lambda parameter: parameter.dtype):
    """Lists of parameters whose gradients travel together, in the order in which they are complete.

    Each is of one kind, by default dtype, and of at most `cap_bytes` of gradients, or of one.
    """
    filling, full, nbytes = {}, [], {p: gradient_bytes(p) for p in parameters}
    for parameter in parameters:
        bucket = filling.setdefault(kind(parameter), [])
        if bucket and sum(nbytes[p] for p in (*bucket, parameter)) > cap_bytes:
            full.append(bucket)
            bucket = filling[kind(parameter)] = []
        bucket.append(parameter)
    place = {parameter: i for i, parameter in enumerate(parameters)}
    return sorted(full + list(filling.values()), key=lambda bucket: place[bucket[-1]])


# ---- one order of launches -----------------------------------------------------------------------


class Reducer:
    """Launches buckets while backward runs: each once it is full, in one order on every rank.

    Autograd may finish gradients in another order on each rank, but collectives must be called in
    the same one: a full bucket waits for those before it.

    launch: starts to sum a bucket, which is anything with `parameters`, over the ranks.
    """

    def __init__(self, launch):
        self.launch = launch

    def begin(self, buckets):
        """A backward pass begins, in which a bucket waits for all of its parameters."""
        self.queue, self.waiting = deque(), {}
        for bucket in buckets:
            waiting = set(bucket.parameters)
            self.queue.append((bucket, waiting))
            self.waiting |= dict.fromkeys(bucket.parameters, waiting)

    def waits_for(self, parameter):
        return parameter in self.waiting[parameter]

    def mark_ready(self, parameter):
        """Nothing more will be added to its gradient in this pass."""
        self.waiting[parameter].discard(parameter)
        while self.queue and not self.queue[0][1]:
            self.launch(self.queue.popleft()[0])

    def finish(self):
        """The pass is over: what has no gradient by now gets none."""
        while self.queue:
            self.launch(self.queue.popleft()[0])


# ---- gradients in buckets ------------------------------------------------------------------------


class GradBucket:
    """Gradients that travel together: each is a view into one flat buffer."""

    def __init__(self, parameters, with_flags, group):
        self.parameters, self.group, layout = parameters, group, FlatLayout(parameters)
        flags = len(parameters) if with_flags else 0  # per parameter: how many ranks have used it
        dtype = grad_dtype(parameters[0])
        self.buffer = parameters[0].new_zeros(layout.length + flags, dtype=dtype)
        self.flags = self.buffer[layout.length :]
        # in the order in memory that the parameters have, as fused optimizers expect
        strides = [torch.empty_like(p, device="meta").stride() for p in parameters]
        self.views = [
            view.as_strided(view.shape, stride)
            for view, stride in zip(layout.views(self.buffer[: layout.length]), strides)
        ]
        self.sum = self.work = None

    def reset(self):
        if self.work is not None:  # of a pass that has failed: it writes into the buffer
            self.work.wait()
        self.flags.fill_(1)

    def reduce(self, dtype):
        dtype = dtype if dtype and self.buffer.is_floating_point() else self.buffer.dtype
        self.sum = self.buffer.to(dtype)  # the buffer itself, or a copy
        self.work = all_reduce(self.sum, group=self.group, async_op=True)

    def finish(self):
        self.work.wait()
        if self.sum is not self.buffer:
            self.buffer.copy_(self.sum)
        self.sum = self.work = None


class BucketedGradients:
    """Gradients as views into buckets, from the first copy to their sum over the ranks.

    wrapper: the DistributedDataParallel whose gradients they are, and whose options it goes by.

    reducing: whether a pass is on that ends in sums.
    names, order: {parameter: its name}; the parameters, as the buckets were filled.
    place: {parameter: (its bucket, its number there)}.
    ready_order: the parameters as their gradients came, for the one new filling; then None.
    unused, sums: in this pass, names without gradient; {name: sum of its gradient}, to be finite.
    """

    def __init__(self, wrapper):
        self.options, named = wrapper, wrapper.module.named_parameters()
        self.names = {parameter: name for name, parameter in named if parameter.requires_grad}
        self.reducer = Reducer(lambda bucket: bucket.reduce(wrapper.reduce_dtype))
        self.reducing, self.ready_order = False, [] if wrapper.rebuild_buckets else None
        # Backward runs from the last layer to the first, which is the order buckets should fill in.
        self.fill(list(self.names)[::-1])

    def fill(self, order):
        """Make the buckets, in the given order; gradients that exist move into them."""
        group_of, with_flags = self.options.group_of, self.options.find_unused_parameters
        kind = lambda parameter: (grad_dtype(parameter), group_of(parameter))
        self.order, self.place = order, {}
        self.buckets = [
            GradBucket(parameters, with_flags, group_of(parameters[0]))
            for parameters in fill_buckets(order, int(self.options.bucket_cap_mb * 2**20), kind)
        ]
        for bucket in self.buckets:
            for i, parameter in enumerate(bucket.parameters):
                self.place[parameter] = bucket, i
                if parameter.grad is not None:
                    parameter.grad = bucket.views[i].copy_(parameter.grad)

    def begin(self, awaited):
        """Reduce gradients of `awaited`, each once backward has added to it; others as they are."""
        self.reducing, self.sums, self.unused = True, {}, []
        for bucket in self.buckets:
            bucket.reset()
        self.reducer.begin(self.buckets)
        self.complete(self.names.keys() - set(awaited))

    @torch.no_grad()
    def complete(self, parameters):
        """Reduce these as they are: nothing more will be added to them."""
        for parameter in self.place:
            if parameter in parameters and self.reducer.waits_for(parameter):
                if parameter.grad is None:
                    self.unused.append(self.names[parameter])
                self.mark_ready(parameter)

    def check(self, parameter):
        gradient, name = parameter.grad, self.names[parameter]
        if gradient is not None and (gradient.requires_grad or gradient.is_sparse):
            what = "sparse" if gradient.is_sparse else "part of a graph (create_graph=True)"
            raise RuntimeError(f"the gradient of {name!r} is {what}, which is not reduced")

    def gradient_came(self, parameter):
        """Backward has added to a gradient."""
        if not self.reducing:
            self.copy_to_bucket(parameter, 1)
            return
        if not self.reducer.waits_for(parameter):
            name = self.names[parameter]
            raise RuntimeError(f"parameter {name!r} got two gradients in one backward pass")
        if self.ready_order is not None:
            self.ready_order.append(parameter)
        self.mark_ready(parameter)

    def mark_ready(self, parameter):
        bucket, i = self.place[parameter]
        if parameter.grad is None and self.options.find_unused_parameters:
            bucket.flags[i].zero_()
        self.copy_to_bucket(parameter, self.options.gradient_divide_factor)
        self.reducer.mark_ready(parameter)

    def copy_to_bucket(self, parameter, factor):
        """Divide the gradient, into its bucket."""
        bucket, i = self.place[parameter]
        view = bucket.views[i]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            torch.div(parameter.grad, factor, out=view)
        elif factor != 1:  # autograd has added to it in place
            view.div_(factor)
        parameter.grad = view
        if self.options.error_if_nonfinite and self.reducing:
            self.sums[self.names[parameter]] = float64_sum(view)

    @torch.no_grad()
    def finish(self):
        """Wait for all sums. Errors come after them, so that no other rank is left waiting."""
        taken = []
        for bucket in self.buckets:
            bucket.finish()
            for parameter, view in zip(bucket.parameters, bucket.views):
                if parameter.grad is not view:
                    taken.append(self.names[parameter])
        if self.options.find_unused_parameters:
            self._drop_unused()
        self.reducing = False
        if self.ready_order is not None:
            self._rebuild()
        self._raise_errors(taken)

    def _drop_unused(self):
        flags = torch.cat([bucket.flags for bucket in self.buckets]).tolist()
        for parameter, used in zip(self.place, flags):
            if not used:
                parameter.grad = None

    def _rebuild(self):
        """Once, refill the buckets in the order in which gradients came on the first rank."""
        number = {parameter: i for i, parameter in enumerate(self.order)}
        order = [number[parameter] for parameter in dict.fromkeys(self.ready_order + self.order)]
        numbers = torch.tensor(order, device=self.order[0].device)
        broadcast_first([numbers], self.options.process_group)
        self.ready_order, numbers = None, numbers.tolist()
        if numbers != sorted(numbers):
            self.fill([self.order[i] for i in numbers])

    def _raise_errors(self, taken):
        rank = dist.get_rank(self.options.process_group)
        if taken:
            raise RuntimeError(
                f"rank {rank}: somebody took the gradient of {', '.join(taken)} while it was "
                "reduced: another wrapper of the module, or ZeRO-2, which reduces by itself"
            )
        if self.unused and not self.options.find_unused_parameters:
            raise RuntimeError(
                f"rank {rank}: no gradient for {', '.join(self.unused)}; "
                "with find_unused_parameters=True they would count as zero"
            )
        check_finite(self.sums, self.options.process_group)


def float64_sum(gradient):
    """Finite if, and only if, all elements are."""
    return gradient.sum(dtype=torch.promote_types(gradient.dtype, torch.float64))


def check_finite(sums, group=None):
    """RuntimeError naming the gradients whose sums {name: sum} are not finite on this rank.

    The host waits for the device once.
    """
    finite = torch.stack([*sums.values()]).isfinite().tolist() if sums else []
    if names := [name for name, is_finite in zip(sums, finite) if not is_finite]:
        rank = dist.get_rank(group)
        raise RuntimeError(f"rank {rank}: gradient not finite for {', '.join(names)}")


# ---- the module ----------------------------------------------------------------------------------


class DistributedDataParallel(nn.Module):
    """Wraps a module: `loss.backward()` leaves, on every rank, gradients averaged over the group.

    Parameters and buffers start as the group's first rank's. Outside of no_sync() a backward()
    through what the wrapper has returned reduces; torch.autograd.grad() does not.

    bucket_cap_mb: each gradient is a view into a bucket of at most so many MiB and of one dtype,
        the grad_dtype that its parameter has here. The buckets are rebuilt once, in the order in
        which gradients arrive on the first rank.
    find_unused_parameters: a parameter that a rank's loss does not reach counts as zero there, and
        where no rank's loss reaches it, its gradient stays None; else it is an error.
    broadcast_buffers: buffers are the first rank's again in the first forward pass after one whose
        gradients are reduced.
    gradient_divide_factor: what gradients are divided by before they are summed; by default the
        group's size, or 1 where the loss has its global divisor already. With another than the
        group's size, zero the gradients between two reductions: what is there is summed again.
    reduce_dtype: the dtype in which they travel, by default their own.
    error_if_nonfinite: name the gradients that are not finite on this rank.
    wait_in_backward: if False, backward() only starts the reductions, and finish_grad_sync() waits.
    groups: {parameter: group} of parameters with fewer replicas, such as an expert's; each a subset
        of process_group's ranks.
    device_ids: for torch's sake: the one GPU that the module is on, or None.
    rebuild_buckets: if False they stay as they are, so that sums are the same bits in any process
        that goes on from the same weights.

    A copy (copy.deepcopy) trains on its own; only a wrapper of the default group can be pickled.

    Raises ValueError for a module without trainable parameters, with sharded ones or with some on
    several devices, for sizes that are not positive, and, on every rank, for modules that differ
    between ranks. backward() raises RuntimeError naming this rank's parameters without gradient,
    those with two in one backward, those whose gradient somebody else takes meanwhile (a second
    wrapper, ZeRO-2), and those whose gradient is sparse or, under create_graph=True, has a graph.
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
        device_ids=None,
        rebuild_buckets=True,
    ):
        super().__init__()
        self.module, self.process_group, self.reduce_dtype = module, process_group, reduce_dtype
        self.wait_in_backward, self.groups = wait_in_backward, groups or {}
        self.rebuild_buckets = rebuild_buckets
        self.find_unused_parameters = find_unused_parameters
        self.broadcast_buffers, self.error_if_nonfinite = broadcast_buffers, error_if_nonfinite
        self.gradient_divide_factor, self.bucket_cap_mb = gradient_divide_factor, bucket_cap_mb
        if gradient_divide_factor is None:
            self.gradient_divide_factor = dist.get_world_size(process_group)
        _check_module(self, device_ids)
        for parameter in module.parameters():
            broadcast_first([parameter], self.group_of(parameter))
        broadcast_first(module.buffers(), process_group)
        self._sync, self._buffers_differ = True, True
        self._attach()

    def group_of(self, parameter):
        """The ranks that have a replica of it."""
        return self.groups.get(parameter, self.process_group)

    def _attach(self):
        """Buckets and hooks: what belongs to these parameters, and not to a copy of them."""
        self._gradients = BucketedGradients(self)
        self._expected = False  # whether outputs were returned that no backward has come to
        self._backward = Backward(self._begin_backward, self._end_backward, self._failed)
        for parameter in self._gradients.names:
            parameter.register_post_accumulate_grad_hook(weakly(self._gradient_ready))

    # -- forward

    def forward(self, *args, **kwargs):
        if not in_backward():  # where it is recomputed
            if self.broadcast_buffers and self._buffers_differ:
                broadcast_first(self.module.buffers(), self.process_group)
            self._expected = self._expected or torch.is_grad_enabled()
            self._buffers_differ = torch.is_grad_enabled() and self._sync
        outputs = self.module(*args, **kwargs)
        before_backward(self._at_outputs, outputs)
        return outputs

    @contextmanager
    def no_sync(self):
        """Backward inside only adds to this rank's gradients; the next outside reduces the sum."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    # -- backward
    #
    # it comes to the outputs    _at_outputs()       each bucket waits for its gradients
    # autograd adds to a .grad   _gradient_ready()   the next bucket leaves, if it is full
    # all gradients are there    _end_backward()     the rest leaves, and all sums are waited for

    def _at_outputs(self):
        if accumulates():
            self._enter_backward()

    def _enter_backward(self):
        if self._sync and not self._gradients.reducing:
            self._backward.enter()

    def _begin_backward(self):
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and parameter not in self._gradients.names:
                raise RuntimeError(f"{name!r} came, or was unfrozen, after the module was wrapped")
        self.start_grad_sync(awaited=self._gradients.names)

    @torch.no_grad()
    def _gradient_ready(self, parameter):
        self._gradients.check(parameter)
        # The outputs may have hidden their tensors, and so the pass. But where the module itself
        # was called, past the wrapper, its gradients are this rank's own.
        if self._expected:
            self._expected = False
            self._enter_backward()
        self._gradients.gradient_came(parameter)

    def _end_backward(self):
        self._gradients.complete(self._gradients.names)
        if self.wait_in_backward:
            self.finish_grad_sync()

    def _failed(self):
        self._gradients.reducing = False

    def start_grad_sync(self, awaited=()):
        """Reduce the gradients that are there; those of `awaited`, each once it was added to.

        For gradients that no backward of the module computes, such as weight gradients put off.
        finish_grad_sync() ends it.
        """
        self._gradients.begin(awaited)

    def finish_grad_sync(self):
        """Wait for the reductions that backward() or start_grad_sync() started, if they did."""
        if self._gradients.reducing:
            self._gradients.finish()

    # -- copies

    def __getstate__(self):
        state = {k: v for k, v in vars(self).items() if k not in ("_gradients", "_backward")}
        return state | {"grad_dtypes": [p.grad_dtype for p in self.module.parameters()]}

    def __setstate__(self, state):
        grad_dtypes = state.pop("grad_dtypes")
        super().__setstate__(state)
        for parameter, dtype in zip(self.module.parameters(), grad_dtypes):
            if parameter.grad_dtype != dtype:  # torch's copy of a parameter forgets it
                parameter.grad_dtype = dtype
        self._attach()

    def __deepcopy__(self, memo):
        for group in (self.process_group, *self.groups.values()):
            memo[id(group)] = group  # the same processes
        copied = memo[id(self)] = self.__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied


def broadcast_first(tensors, group):
    """Give all ranks of the group what its first one has."""
    source = dist.get_global_rank(group or dist.group.WORLD, 0)
    for tensor in tensors:
        broadcast(tensor, source, group)


def _check_module(model, device_ids):
    named = list(model.module.named_parameters())
    check_whole(named)
    for device in device_ids or ():
        name, parameter = named[0]
        if torch.device(device) != parameter.device:
            raise ValueError(f"device_ids={device_ids}, {name!r} on {parameter.device}")
    if not any(parameter.requires_grad for _, parameter in named):
        raise ValueError("the module has no trainable parameters")
    for name in ("bucket_cap_mb", "gradient_divide_factor"):
        if not getattr(model, name) > 0:
            raise ValueError(f"{name}={getattr(model, name)} must be positive")
    check_parameters([*named, *model.module.named_buffers()], model.process_group)


def check_whole(named):
    """ValueError if one of [(name, parameter)] is a shard, which has no replicas."""
    if pieces := [name for name, parameter in named if hasattr(parameter, "whole_shape")]:
        raise ValueError(
            f"{pieces[0]!r} is sharded by FullyShardedDataParallel: wrap the module once, and name "
            "its parts as units"
        )


# ---- when backward comes and goes ----------------------------------------------------------------


class Backward:
    """Calls begin() when a backward pass comes to a module, and end() when it is over, once each.

    It comes to the outputs first, on every rank, also on one whose loss reaches none of the
    parameters; or to a parameter, where the outputs hold their tensors in a way unknown here.
    failed() is called in place of end() if the pass dies.
    """

    def __init__(self, begin, end, failed=lambda: None):
        self._begin, self._end, self._failed, self._running = begin, end, failed, False

    def enter(self):
        """Say that the pass that runs now has come to the module."""
        if self._running:
            return
        end, self._running = partial(self._finish), True
        # The engine alone keeps `end`: when it is gone, so is the pass.
        self._pass = weakref.ref(end, lambda _: self._over())
        self._begin()
        # Private: no public hook runs once all gradients of a pass are there.
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _finish(self):
        self._end()
        self._running = False

    def _over(self):
        if self._running:
            self._running = False
            self._failed()


def in_backward():
    """Whether a backward pass runs: then what runs forward is recomputation."""
    return torch._C._current_graph_task_id() != -1  # private: -1 is said outside of all passes


def before_backward(function, outputs, inputs=()):
    """Have backward call function() when it comes to a module's outputs, of any nesting.

    inputs: tensors that do not count as outputs where they are passed on.
    """
    known = {id(_source(tensor)) for tensor in inputs}
    for source in map(_source, tensors_in(outputs)):
        if source.requires_grad and not source.is_leaf and id(source) not in known:
            source.register_hook(lambda grad: function())


_NO_TENSORS = (type(None), int, float, str, bytes, type, ModuleType, nn.Module)


def tensors_in(nested):
    """The tensors in containers, in dataclasses and in other objects that have attributes."""
    found, seen, nested = [], set(), [nested]
    while nested:
        value = nested.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif not isinstance(value, _NO_TENSORS) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, Mapping):
                nested += value.values()
            elif isinstance(value, (list, tuple, set)):
                nested += value
            nested += getattr(value, "__dict__", {}).values()
    return found


def _source(tensor):
    """What a tensor is a view of: the view itself leaves the graph if it is changed in place."""
    return tensor._base if tensor._is_view() and tensor._base.requires_grad else tensor


def accumulates():
    """Whether the pass that runs, now at a hook, is backward() and not autograd.grad().

    backward() adds to the .grad of some leaf below; what autograd.grad() returns no leaf gets.
    """
    seen, nodes = set(), [torch._C._current_autograd_node()]
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):  # a leaf's, whose work is to add to its .grad
            try:
                # Private: the engine alone knows which of the graph's nodes it will run.
                if torch._C._will_engine_execute_node(node):
                    return True
            except RuntimeError:  # autograd.grad() returns this leaf's gradient
                return False
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                nodes.append(other)
    return False


def weakly(method):
    """A hook that calls `method` as long as its object lives.

    A parameter whose hook held the object that holds the parameter would never be freed.
    """
    reference = weakref.WeakMethod(method)
    return lambda *arguments: (alive := reference()) and alive(*arguments)


# ---- one norm ------------------------------------------------------------------------------------


@torch.no_grad()
def get_total_norm(tensors, norm_type=2.0, groups=()):
    """The norm of all elements of tensors, of which each rank of the groups has others.

    A float64 scalar on the device, for which the host does not wait. tensors: at least one, which
    may be empty; several may be given as one, their norm. ValueError for a norm_type that is not
    positive.
    """
    norm_type, tensors = float(norm_type), list(tensors)
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} must be positive")
    norms = [tensors[0].new_zeros(1, dtype=torch.float64)]  # what a maximum of nothing is here
    for dtype, alike in _by_dtype(tensors):
        found = torch._foreach_norm(alike, norm_type, torch.promote_types(dtype, torch.float32))
        norms.append(torch.stack(found).double())
    total = torch.linalg.vector_norm(torch.cat(norms), norm_type)
    if norm_type == torch.inf:
        for group in groups:
            all_reduce(total, ReduceOp.MAX, group)
        return total
    total.pow_(norm_type)
    for group in groups:
        all_reduce(total, ReduceOp.SUM, group)
    return total.pow_(1 / norm_type)


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


# ---- whether copies are alike --------------------------------------------------------------------


@torch.no_grad()
def find_unlike_copies(copies):
    """Which ranks have other bits than most, in a tensor of which they have copies; "" if none has.

    copies: [(name, tensor, the groups whose ranks have copies of it)]. Compares a sum of each,
    which one flipped bit changes for certain. The host waits for the device once. Collective.
    """
    sums, of_group, rank = {}, {}, dist.get_rank()
    for name, tensor, groups in copies:
        total = sum_of_bits(tensor)
        # the lowest rank that has it: the groups are axes of a grid, whose steps add up
        lowest = rank + sum(dist.get_process_group_ranks(group)[0] - rank for group in groups)
        sums[name, lowest] = total
        for group in groups:
            of_group.setdefault(group, []).append(total)
    different = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for group, own in of_group.items():
        own = torch.stack(own)
        every = own.new_empty(dist.get_world_size(group), len(own))
        all_gather_single(every, own, group)
        different += (every != own).sum()
    all_reduce(different)  # what one group sees, all ranks know
    if not different:
        return ""
    return describe_copies(gather_objects({copy: total.item() for copy, total in sums.items()}))


def sum_of_bits(tensor):
    """The sum of the elements read as integers, modulo 2**64."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(integers[tensor.itemsize]).sum(dtype=torch.int64)


def describe_copies(sums):
    """Which ranks have another copy than most others. sums: {(name, ...): sum} of each rank.

    Under a key, all ranks that have it should have the same sum.
    """
    sentences = []
    for key in dict.fromkeys(key for own in sums for key in own):
        copies = {rank: own[key] for rank, own in enumerate(sums) if key in own}
        ((usual, count), *others) = Counter(copies.values()).most_common()
        odd = [rank for rank in copies if copies[rank] != usual or 2 * count <= len(copies)]
        if others:
            rest = [rank for rank in copies if rank not in odd]
            where = f"from the copies of {_ranks(rest)}" if rest else "between them"
            sentences.append(f"{_ranks(odd)}: {key[0]} differs {where}")
    more = [f"{len(sentences) - 3} more"] if len(sentences) > 3 else []
    return "; ".join(sentences[:3] + more)


def _ranks(ranks):
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


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
        claimed, buckets = ddp_bytes(module, world_size), len(model._gradients.buckets)
        print(
            f"{world_size} ranks, {buckets} buckets: "
            f"claimed {claimed} bytes, counted {traffic.bytes('all_reduce')}"
        )
        print(f"largest difference from one process's gradients: {error:.1e}")


if __name__ == "__main__":
    run_ranks(_demonstrate)
