"""Data parallelism: every rank (process) trains a replica of the model on its part of a batch.

If a loss is a mean over examples that do not affect each other, and a batch is divided into P equal
parts, one for each rank, the gradient of its loss is the mean of the parts' gradients. So an
all-reduce that averages the gradients over the ranks after each backward pass gives every rank the
gradient of the whole batch. All ranks start from the same weights and take the same optimizer step,
which keeps the replicas equal.

If gradients were reduced only after backward, the links between ranks would be idle until then. If
each were reduced as soon as it has been computed, the fixed cost of a message would be paid for
each. So gradients are collected in buckets, in the order in which backward computes them, from the
last layer to the first. Each bucket is reduced as soon as its last gradient has been computed:

    backward      | layer 4 | layer 3 | layer 2 | layer 1 |
    network                           | bucket 0: 4, 3    | bucket 1: 2, 1    |

A rank holds   all parameters, gradients and optimizer state: 16 bytes per parameter with Adam in
               fp32 (4 + 4 + 8), and as many in mixed precision (2 + 2 + 12, see zero.py, which
               divides them among ranks). The buckets take the size of the gradients once more,
               unless gradients are views of them (gradient_as_bucket_view)
It sends       per step 2 (P-1)/P times the size of its gradients, in one all-reduce per bucket
Overlap        backward can hide the reduction of every bucket except the last
PyTorch's      DistributedDataParallel does the same; differences are listed after the class below

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.

    torchrun --nproc-per-node 4 ddp.py      prints claimed and counted bytes, and the gradient error
"""

import copy
import weakref
from collections import deque
from contextlib import contextmanager

import torch
from torch import nn

from collectives import (
    ALIGNMENT, ReduceOp, all_reduce, all_reduce_bytes, any_rank, broadcast, check_parameters,
    count_bytes, describe, dist, gather_objects, rank_and_size, ranks_in_both, run_ranks,
)

# ---- the idea ------------------------------------------------------------------------------------


def average_gradients(module, group=None):
    """After backward, replace each gradient by its mean over the group, without overlap."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:  # this rank's loss does not use it, but another's may
                parameter.grad = torch.zeros_like(parameter, dtype=grad_dtype(parameter))
            all_reduce(parameter.grad, ReduceOp.AVG, group)


def grad_dtype(parameter):
    """Return parameter.grad_dtype, PyTorch's dtype for .grad, or parameter.dtype if it is None."""
    return parameter.grad_dtype or parameter.dtype


class Bucket:
    """Gradients that are reduced together as soon as the last of them has been computed.

    All ranks must start their all-reduces in the same order, since messages are matched by order.
    So autograd must complete the buckets in one order on all ranks, and each loss must use all
    parameters, or a bucket would never be complete. A bucket's parameters have one dtype and
    require gradients, and each backward is followed by finish().
    """

    def __init__(self, parameters, group=None):
        self.parameters = parameters
        self.group = group
        self.missing = set(parameters)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.mark_ready)

    def mark_ready(self, parameter):
        self.missing.remove(parameter)
        if not self.missing:
            self.start()

    def start(self):
        self.flat = torch.cat([p.grad.flatten() for p in self.parameters])
        self.work = all_reduce(self.flat, ReduceOp.AVG, self.group, async_op=True)

    def finish(self):
        assert not self.missing, "the loss has not used all parameters of this bucket"
        self.work.wait()
        parts = self.flat.split([p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts):
            parameter.grad.copy_(part.view_as(parameter))
        self.missing = set(self.parameters)


def backward_in_buckets(loss, buckets):
    """Run backward, and set each .grad to its mean over the group. Reductions overlap backward.

        for parameter in net.parameters():
            broadcast(parameter.data)  # all ranks start from rank 0's weights
        parameters = [*net.parameters()][::-1]  # backward's order, if forward uses them as listed
        buckets = [Bucket(parameters[i : i + 4]) for i in range(0, len(parameters), 4)]
        for batch in batches:
            optimizer.zero_grad()
            backward_in_buckets(loss_fn(net(batch.chunk(P)[rank])), buckets)
            optimizer.step()
    """
    loss.backward()  # each bucket starts its all-reduce as soon as its last gradient exists
    for bucket in buckets:
        bucket.finish()


# ==== upper floor =================================================================================
#
# The wrapper below does the same for any module and any loss. What grows out of Bucket, and where:
#
#     Bucket                           below
#     packs gradients in a new tensor  packs them in one that lasts, with a slot for  GradBucket
#                                      each of them, and .grad may be this slot
#     divides the sum by P             divides gradients by P before the sum, so      GradBucket
#                                      that it does not overflow in fp16
#     starts an all-reduce             starts any kind of sum                         GradientSum
#     starts it when complete          starts it after those of earlier buckets       Reducer
#     needs every gradient             takes .grad as it is, or zeros, for one that   Reducer
#                                      does not come
#     finishes when told to            finishes at the end of backward                the wrapper
#
# All of it comes together in DistributedDataParallel. The module's buffers come after it and can be
# skipped, and so can the last floor, with checks and functions that zero.py and hybrid.py use, too.

# ---- tensors in one flat tensor ------------------------------------------------------------------


def aligned(elements):
    """Round up to a multiple of 64 elements, which take ALIGNMENT bytes (128) in 16 bits each."""
    return elements + -elements % (ALIGNMENT // 2)


class FlatLayout:
    """The positions of several tensors in one flat tensor, each aligned to 64 elements.

        | weight              |    | bias | | weight           |   |

    sizes: [elements of the first tensor, of the padding after it, of the second tensor, ...].
    """

    def __init__(self, tensors):
        self.shapes = [tensor.shape for tensor in tensors]
        self.sizes = []
        for tensor in tensors:
            self.sizes += [tensor.numel(), aligned(tensor.numel()) - tensor.numel()]
        self.length = sum(self.sizes)

    def views(self, flat):
        """Return views of `flat`, one for each tensor and in its shape."""
        parts = flat.split(self.sizes)[::2]  # without paddings
        return [part.view(shape) for part, shape in zip(parts, self.shapes)]

    def pack(self, tensors):
        """Return a new flat tensor with copies of the tensors and zeros for padding."""
        flat = tensors[0].new_zeros(self.length)
        for view, tensor in zip(self.views(flat), tensors):
            view.copy_(tensor.detach())
        return flat


# ---- gradients in buckets ------------------------------------------------------------------------


def gradient_bytes(parameter):
    """Return how many bytes of a bucket the parameter's gradient and its padding take."""
    return aligned(parameter.numel()) * grad_dtype(parameter).itemsize


def fill_buckets(parameters, cap_bytes, kind):
    """Divide parameters into lists, one for each bucket, in the order in which buckets complete.

    parameters: in the order in which backward computes their gradients; or buffers, in any order.
    cap_bytes: the largest size of a bucket; a larger parameter gets its own bucket.
    kind: a function; two parameters share a bucket only if it returns the same for both.
    """
    by_kind = {}
    for parameter in parameters:
        by_kind.setdefault(kind(parameter), []).append(parameter)
    buckets = []
    for same_kind in by_kind.values():
        buckets.append([])
        room = cap_bytes  # how many bytes still fit into the last bucket
        for parameter in same_kind:
            nbytes = gradient_bytes(parameter)
            if nbytes > room and buckets[-1]:
                buckets.append([])
                room = cap_bytes
            buckets[-1].append(parameter)
            room -= nbytes
    # a bucket is complete with its last gradient, and those of other kinds come in between
    position = {parameter: i for i, parameter in enumerate(parameters)}
    return sorted(buckets, key=lambda bucket: position[bucket[-1]])


class GradientSum:
    """How a bucket is summed over its group: by an all-reduce.

    DistributedDataParallel takes another object with these two methods in its place, such as one
    that compresses gradients: see "another kind of sum" below.
    """

    def start(self, flat, group):
        """Start to sum `flat` over the group. Return what wait() needs."""
        return all_reduce(flat, group=group, async_op=True)

    def wait(self, started):
        """Return when the sum is in `flat`. On NCCL only the current stream waits for it."""
        started.wait()


class GradBucket:
    """A Bucket whose flat tensor lasts, with a slot in it for each gradient.

    slots: {parameter: the view of the flat tensor that its gradient fills}.
    divisor: the number by which each gradient is divided before the sum.
    as_views: whether each slot becomes its parameter's .grad; otherwise sums are copied to .grad.
    missing: the parameters whose gradients are still to come. The Reducer sets it.
    started: what gradient_sum.start() has returned, until the sum ends.
    """

    def __init__(self, parameters, group, divisor, as_views, gradient_sum):
        self.group = group
        self.divisor = divisor
        self.as_views = as_views
        self.gradient_sum = gradient_sum
        self.missing = set()
        layout = FlatLayout(parameters)
        self.flat = parameters[0].new_zeros(layout.length, dtype=grad_dtype(parameters[0]))
        self.slots = {}
        for parameter, view in zip(parameters, layout.views(self.flat)):
            # the parameter's strides, as fused optimizers require, but without gaps in memory
            strides = torch.empty_like(parameter, device="meta").stride()
            self.slots[parameter] = view.as_strided(view.shape, strides)

    def take(self, parameter, slot):
        """Write the gradient (zero if it is None), divided by the divisor, into its slot."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(slot)
        if parameter.grad is not slot or self.divisor != 1:
            torch.div(parameter.grad, self.divisor, out=slot)
        if self.as_views:
            parameter.grad = slot

    def begin(self):
        """Write all gradients into their slots, and begin to sum them over the group."""
        for parameter, slot in self.slots.items():
            self.take(parameter, slot)
        self.started = self.gradient_sum.start(self.flat, self.group)

    def end(self):
        """Wait for the sum, and copy it to each .grad that is not a slot."""
        self.gradient_sum.wait(self.started)
        self.started = None  # frees what it holds, such as compressed gradients
        for parameter, slot in self.slots.items():
            if parameter.grad is None or (self.as_views and parameter.grad is not slot):
                raise RuntimeError("a hook or a second wrapper took .grad away from its reduction")
            if not self.as_views:
                parameter.grad.copy_(slot)


# ---- sums in one order ---------------------------------------------------------------------------
#
# One step of training, in which each call makes the one to the right of it:
#
#     the script        autograd           the wrapper         the Reducer     the buckets
#     model(x)                             forward()
#     loss.backward()   first gradient     _gradient_ready()   start()
#                       every gradient     _gradient_ready()   mark_ready()    begin(), if complete
#                       end of backward    _end_backward()     finish()        end()
#     optimizer.step()


class Reducer:
    """Sums all gradients once in each round, in the same order on all ranks.

        idle  -- start() -->  mark_ready() for each gradient  -- finish() -->  idle

    Autograd may complete buckets in a different order on each rank, but all ranks must call
    collectives in the same order. So a complete bucket waits for the ones before it. For example,
    with three buckets, where this rank's loss does not use all parameters of the last one:

        event                   queue     under way
        start()                 0 1 2
        bucket 1 is complete    0 1 2               its sum begins after that of bucket 0
        bucket 0 is complete    2         0 1       both sums begin
        finish()                          0 1 2     the last sum begins with .grad as it is,
                                                    or zeros, for a gradient that is missing
                                                    all sums have ended

    order: the buckets, in the order in which their sums begin.
    queue: those whose sums have not begun in this round.
    under_way: those whose sums have begun and not ended, in the same order.
    """

    def __init__(self, order):
        self.order = order
        self.queue = deque()
        self.under_way = deque()

    @property
    def is_idle(self):
        return not self.queue and not self.under_way

    def start(self, awaited=()):
        """Start a round, in which only gradients of `awaited` parameters are still to be computed.

        awaited: all parameters, when a backward begins; or some or none, if other passes have
            computed the rest.
        """
        self.queue = deque(self.order)
        awaited = set(awaited)
        for bucket in self.order:
            bucket.missing = bucket.slots.keys() & awaited
        self.begin_complete()

    def mark_ready(self, bucket, parameter):
        """Note that a parameter's gradient is final, and begin the sums that it has held up."""
        bucket.missing.discard(parameter)
        self.begin_complete()

    def begin_complete(self):
        """Begin the sums of complete buckets, up to the first bucket that is not complete."""
        while self.queue and not self.queue[0].missing:
            self.begin(self.queue[0])
            self.queue.popleft()  # afterwards, so that a sum that could not begin is begun again

    def begin(self, bucket):
        bucket.begin()
        self.under_way.append(bucket)

    def complete(self, buckets):
        """Declare these buckets complete, and begin the sums that they have held up."""
        for bucket in buckets:
            bucket.missing.clear()
        self.begin_complete()

    def finish(self):
        """Begin the sums that are left, although gradients are missing, and wait for all sums."""
        self.complete(self.queue)
        while self.under_way:
            self.under_way.popleft().end()


# ---- the wrapper ---------------------------------------------------------------------------------


class DistributedDataParallel(nn.Module):
    """Wrap a module so that `loss.backward()` averages its gradients over the group.

        model = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(model.parameters())
        for x, target in batches:  # this rank's part of each batch
            optimizer.zero_grad()
            loss_fn(model(x), target).backward()
            optimizer.step()

    The constructor copies the parameters and buffers of the group's first rank to all ranks. Each
    backward() is a round of the Reducer, which reduces the gradients of all parameters. Inside
    no_sync() there is none, and gradients add up on this rank. All ranks take part in each round,
    and in each step of the optimizer:

        this rank has                   its round begins with    and ends with
        a loss that uses a parameter    the first gradient       the end of backward()
        a loss that uses none           start_grad_sync()        finish_grad_sync()
        no batch                        sync_without_batch(), in place of forward and backward

    Arguments, errors and differences from PyTorch's class are listed after the class.
    """

    def __init__(
        self, module, device_ids=None, output_device=None, *, process_group=None, bucket_cap_mb=25,
        broadcast_buffers=True, find_unused_parameters=True, gradient_as_bucket_view=False,
        static_graph=False, gradient_divide_factor=None, wait_in_backward=True, groups=None,
        gradient_sum=None,
    ):  # fmt: skip
        super().__init__()
        self.module = module
        self.process_group = process_group
        self.broadcast_buffers = broadcast_buffers
        self.wait_in_backward = wait_in_backward
        self.require_backward_grad_sync = True
        cap_bytes = bucket_cap_mb * 2**20
        group_of = lambda parameter: (groups or {}).get(parameter, process_group)

        # all replicas start from the same parameters and buffers
        named = not_ignored(module, module.named_parameters())
        buffers = not_ignored(module, module.named_buffers())
        check_and_copy(module, named, buffers, lambda p: [group_of(p)], [process_group])
        for _, parameter in named:
            broadcast_first([parameter], group_of(parameter))
        self._replicated = ReplicatedBuffers(module, process_group, cap_bytes)
        self._buffers_are_due = True  # whether the next forward pass has to copy them

        # from the last layer to the first, as backward computes their gradients
        parameters = [p for _, p in named if p.requires_grad][::-1]
        check_device(parameters)
        kind = lambda parameter: (grad_dtype(parameter), group_of(parameter))
        divisor = gradient_divide_factor or dist.get_world_size(process_group)
        gradient_sum = gradient_sum or GradientSum()
        self.buckets = []
        for filled in fill_buckets(parameters, cap_bytes, kind):
            group = group_of(filled[0])
            bucket = GradBucket(filled, group, divisor, gradient_as_bucket_view, gradient_sum)
            self.buckets.append(bucket)
        self.reducer = Reducer(self.buckets)
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.slots}
        self._dtypes = {p: grad_dtype(p) for p in parameters}
        for parameter in parameters:  # they may outlive the wrapper, and must not keep its buckets
            parameter.register_post_accumulate_grad_hook(weakly(self._gradient_ready))

    def forward(self, *args, **kwargs):
        self._begin_pass()
        # PyTorch's rule: a pass may change buffers, such as running means, if it leads to a round
        self._buffers_are_due = torch.is_grad_enabled() and self.require_backward_grad_sync
        return self.module(*args, **kwargs)

    def no_sync(self):
        """Accumulate gradients locally; the next backward() outside reduces their sum.

        Inside, the attribute require_backward_grad_sync is False. Scripts may set it themselves.
        """
        return without_sync(self)

    @torch.no_grad()
    def _gradient_ready(self, parameter):
        """Hook that autograd calls after it has accumulated a gradient in parameter.grad."""
        gradient = parameter.grad
        # it is None if an autograd.Function has returned None for the parameter's first gradient
        if gradient is not None and (gradient.is_sparse or gradient.requires_grad):
            raise RuntimeError("sparse gradients and create_graph=True are not supported")
        if not self.require_backward_grad_sync:
            self._check_idle()  # a gradient that is added to a sum under way would be lost
            return
        if self.reducer.is_idle:  # this gradient is the first one of its backward
            self.start_grad_sync(awaited=self._bucket_of)
            if self.wait_in_backward:
                at_end_of_backward(self._end_backward)
        bucket = self._bucket_of[parameter]
        if parameter not in bucket.missing:
            what = f"a second gradient of {tuple(parameter.shape)} before the first one was reduced"
            cause = "two in one backward, or no finish_grad_sync() after the last one"
            raise RuntimeError(f"{what}: {cause}")
        self.reducer.mark_ready(bucket, parameter)

    def _end_backward(self):
        # A reentrant checkpoint runs a backward inside of backward. If the first gradient comes in
        # it, this is called at its end, where others are still to come.
        if torch._C._current_autograd_node() is not None:  # private; nothing public
            what = "the first gradient of a backward comes from a reentrant checkpoint"
            raise RuntimeError(f"{what}: checkpoint with use_reentrant=False")
        self.finish_grad_sync()

    @torch.no_grad()
    def start_grad_sync(self, awaited=()):
        """Begin a round, in which only gradients of `awaited` parameters are still to be computed.

        A caller ends it by finish_grad_sync(); the end of a backward does not. Zero-bubble
        pipelines (pipeline.py) compute some gradients after backward, and await these.
        """
        self._check_idle()
        self._check_parameters()
        self.reducer.start(awaited)

    @torch.no_grad()
    def finish_grad_sync(self):
        """End the round that is under way: begin the sums that are left, and wait for all sums."""
        if self.reducer.is_idle and self.buckets:
            what = "finish_grad_sync() without a round, or after backward() has ended it"
            cure = "if this rank's loss uses no parameter, call start_grad_sync() first"
            raise RuntimeError(f"{what}: {cure}")
        self.reducer.finish()
        self._buffers_are_due = True  # a forward has changed them, here or on other ranks

    def sync_without_batch(self):
        """Take this rank's part in a step for which it has no batch, in place of both passes.

        Its gradients count as they are, so as zero if they have been cleared. If the module has
        buffers, the other ranks must run all microbatches of this step but the last in no_sync(),
        forward and backward, so that they also copy buffers once. A module that sends messages in
        its own passes, such as a sharded one or one with MoE layers (expert_parallel.py), cannot do
        without a batch: each rank has to run every pass, if need be with no token.
        """
        self._begin_pass()
        self.start_grad_sync()
        self.finish_grad_sync()

    def _begin_pass(self):
        """Copy the first rank's buffers to all ranks, which call this together, if they are due."""
        self._check_idle()  # gradients of this pass would join the last one's round
        if self.broadcast_buffers and self._replicated.names and self._buffers_are_due:
            self._replicated.broadcast()

    def _check_idle(self):
        if not self.reducer.is_idle:
            what = "gradients are still being reduced: call finish_grad_sync() first"
            cure = "finish_grad_sync() ends its round; then zero the gradients on every rank"
            raise RuntimeError(f"{what}. If backward has failed, {cure}")

    def _check_parameters(self):
        """Raise RuntimeError if they are other than those that the buckets were made for."""
        for name, parameter in not_ignored(self.module, self.module.named_parameters()):
            dtype = grad_dtype(parameter) if parameter.requires_grad else None
            if dtype != self._dtypes.get(parameter):
                raise RuntimeError(f"the wrapped {name!r} was frozen, thawed, cast or replaced")

    def __getstate__(self):
        raise RuntimeError("a wrapper is not copied or pickled: copy its module, and wrap the copy")


# Arguments. Those after output_device are passed by name.
#
# process_group: the ranks that train replicas; None for all ranks.
# bucket_cap_mb: the largest size of a bucket in MiB; a larger parameter gets its own bucket. Large
#     buckets take fewer messages, and small ones leave less to be sent after backward.
# broadcast_buffers: copy the first rank's buffers to all ranks before each forward pass, except
#     when the previous one ran in no_sync() or no_grad() and no round has ended since. A forward
#     pass that copies them waits for all ranks, also in an evaluation. A rank that evaluates alone
#     calls model.module(x).
# gradient_as_bucket_view: make .grad a view of its bucket. Sums are not copied back then, and after
#     backward() gradients take memory once. A later backward() overwrites a .grad that a script has
#     saved without clone().
# gradient_divide_factor: the divisor of the summed gradients, by default the group's size P. Set it
#     to 1 for losses that add up, see below.
# wait_in_backward: if False, backward() begins its round and finish_grad_sync() ends it.
# groups: {parameter: group} for parameters that only a subset of process_group replicates, such as
#     those of an expert (expert_parallel.py). The divisor is the same for all parameters.
# gradient_sum: an object that sums a bucket, by default GradientSum(). See "another kind of sum".
# device_ids, output_device, find_unused_parameters, static_graph: accepted for compatibility.
#     Inputs are not moved to a device, and unused parameters are always found. A parameter with
#     several gradients in one backward is an error, also with static_graph.
#
# An attribute of the module, _ddp_params_and_buffers_to_ignore, may list names of parameters and
# buffers. These are neither copied, broadcast nor reduced. PyTorch's class reads it, too.

# Errors. Where only some ranks raise one, the others wait for them until these exit or the group's
# timeout has passed.
#
# - The constructor raises ValueError on every rank if the ranks' modules differ, or if the group
#   holds ranks over which tensor_parallel.py has split a parameter. It also raises ValueError if
#   trained parameters are on several devices.
# - forward() raises ValueError on every rank if a buffer differs between ranks in shape or dtype,
#   such as a table that grows with a rank's longest input, unless the module lists it as above. It
#   raises RuntimeError on this rank if a round is under way, as after a backward() that failed.
# - backward() raises RuntimeError on this rank if a gradient is sparse, comes again before it was
#   reduced, or is itself to be differentiated (create_graph), or if a parameter was frozen,
#   unfrozen or converted after wrapping. It also does so if the first gradient comes from within a
#   reentrant checkpoint, as it may if no later layer is trained: use_reentrant=False.
# - finish_grad_sync() raises RuntimeError on this rank, and sends nothing, if no round is under way
#   here. Ranks that are in a round wait until this one calls start_grad_sync() and then it again.
# - After a backward() that failed on this rank, the others wait for its sums. finish_grad_sync()
#   ends its round; if no gradient had come, start_grad_sync() goes before it. Then zero the
#   gradients on every rank. Another backward() before that would join the old round.

# Differences from PyTorch's class:
#
# - There is no join(). A rank that has left its loop must call nothing else on the group while
#   others are in theirs. These wait for it and raise an error when it exits, or when the group's
#   timeout has passed.
# - What counts for no_sync() is where backward() runs. In PyTorch it is where forward() runs. So
#   the backward of a loss from model.module(x) begins a round, too.
# - A parameter that no rank's loss uses gets a zero gradient, so weight decay and momentum still
#   change it. In PyTorch its .grad stays as it was.
# - Buckets are filled in the reverse order of module.parameters() and do not change. PyTorch may
#   rebuild them after the first backward pass in the order in which gradients became ready. All
#   have one size; PyTorch's first has 1 MiB if bucket_cap_mb is not given.
# - Unused parameters are found when backward ends, not before it begins. So the sums of their
#   bucket and of all later ones wait until then.
# - A second backward() of one forward, with retain_graph=True, reduces gradients again.
# - The parameters that are trained are on one device, and their gradients are computed on one
#   stream. PyTorch takes a module on several devices, for which autograd has a thread each: there
#   a Reducer needs a lock.
# - A buffer registered after wrapping is not broadcast: every rank keeps its own.
# - Before a broadcast, ranks ask one another whether a buffer's shape or dtype has changed, in an
#   all-gather of one byte. The host waits for it and, if the group has only NCCL, for the GPU.
#
# As in PyTorch:
#
# - Names in state_dict() begin with "module."; model.module.state_dict() has the module's own.
# - Hooks of parameters see this rank's own gradient, so an optimizer that steps in one would let
#   replicas drift apart. Register hooks of your own before wrapping: one that is registered later
#   runs after a gradient has been handed over, and may change a bucket that is being summed.
# - Keep the wrapper until backward has ended. Autograd does not, and without it nothing is reduced.
# - Each wrapper orders its own buckets only. If one backward() passes through two wrappers, say of
#   an encoder and a decoder, and autograd may reach them in unlike orders on different ranks, each
#   of them needs a process group of its own.


# ---- losses that add up --------------------------------------------------------------------------
#
# The mean over the ranks is right if each rank's loss is a mean over equally many examples. If they
# have unlike numbers of targets, divide by the number on all ranks, so that the losses add up to
# that of the whole batch, and set gradient_divide_factor=1, so that gradients add up:
#
#     counted = (target != -100).sum()  # in all microbatches of the step
#     all_reduce(counted, group=group)
#     loss = F.cross_entropy(logits, target, reduction="sum") / counted
#
# Run all backwards of a step but the last in no_sync(), and call zero_grad() after the step. Any
# other backward() also reduces what .grad holds already. If this is the sum of an earlier backward,
# all P ranks hold it, and it would be added up P times. (A mean would stay as it is.)


# ---- another kind of sum -------------------------------------------------------------------------
#
# An object with the two methods of GradientSum may sum the buckets in another way. For example,
# this one sends half of the bytes:
#
#     class Fp16Sum:
#         def start(self, flat, group):
#             compressed = flat.half()
#             return flat, compressed, all_reduce(compressed, group=group, async_op=True)
#
#         def wait(self, started):
#             flat, compressed, work = started
#             work.wait()
#             flat.copy_(compressed)
#
#     model = DistributedDataParallel(net, gradient_sum=Fp16Sum())
#
# - All ranks call start() in the same order, mostly while backward runs, and then wait() once for
#   each start, in that order. The gradients are already divided by the divisor.
# - The result must have the same bits on all ranks, or their weights differ from then on, which
#   nothing here sees.
# - A bucket passes the same tensor in every round, so the object can keep state by it, such as the
#   error that a compression has left. No checkpoint holds this state.
# - zero.py does not take such an object. PyTorch's register_comm_hook() takes one function instead,
#   which divides by itself and returns a Future of the result.


# ---- buffers -------------------------------------------------------------------------------------


class ReplicatedBuffers:
    """The buffers that a module has when it is wrapped; the first rank's are copied to all ranks.

    names: those of the buffers. The wrapper calls nothing here if there are none.
    """

    def __init__(self, module, group, cap_bytes):
        self.module = module
        self.group = group
        self.cap_bytes = cap_bytes
        named = not_ignored(module, module.named_buffers())
        self.names = {name for name, _ in named}
        self.agreed = describe(named)  # what the ranks have agreed on

    def broadcast(self):
        """Copy the first rank's buffers, or raise ValueError on all ranks if shapes are unlike."""
        named = [(n, b) for n, b in self.module.named_buffers() if n in self.names]
        found = describe(named)
        if any_rank(found != self.agreed, self.group):
            check_parameters(named, self.group)
            self.agreed = found
        # .data hides these writes from autograd, as PyTorch's class does. BatchNorm saves its
        # running means for backward even where it does not use them, so after a second forward
        # autograd would refuse the backward of the first. But where backward does use a buffer, it
        # now computes with the new values. These differ from those in its forward only if ranks had
        # different buffers there, as they may after a forward in no_sync().
        buffers = [buffer.data for _, buffer in named]
        for bucket in fill_buckets(buffers, self.cap_bytes, lambda buffer: buffer.dtype):
            layout = FlatLayout(bucket)
            flat = layout.pack(bucket)
            broadcast(flat, group=self.group, group_src=0)
            for buffer, view in zip(bucket, layout.views(flat)):
                buffer.copy_(view)


def not_ignored(module, named):
    """Return the (name, tensor) pairs without the names that the module lists for DDP to ignore."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return [(name, tensor) for name, tensor in named if name not in ignored]


# ---- cost ----------------------------------------------------------------------------------------


def ddp_bytes(module, world_size):
    """Return the bytes that a rank sends per step if every all-reduce sends as few as possible.

    all_reduce may send more for a small bucket to save time. The result is an average over the
    ranks, which send equal amounts if every bucket's size is a multiple of P x 128 bytes. It holds
    for parameters that all `world_size` ranks replicate; those of `groups` send less.
    """
    named = not_ignored(module, module.named_parameters())
    nbytes = sum(gradient_bytes(parameter) for _, parameter in named if parameter.requires_grad)
    return all_reduce_bytes(nbytes, world_size)


# ==== for both wrappers and hybrid.py =============================================================
#
# Nothing below belongs to data parallelism itself. Both wrappers use the checks and the tools, and
# zero.py and hybrid.py also the norm. Two terms:
#
# A rank's *shard* is its part of a parameter that is split over a group.
# Ranks that hold parts or copies of one model may form a table, as four ranks in two rows of two.
# Then `axes` are a rank's row and its column: what each of these groups does in turn reaches all
# ranks. In this file there is one axis, process_group.

# ---- checks of replicas --------------------------------------------------------------------------


def check_and_copy(module, parameters, buffers, groups_of, axes):
    """Copy the first rank's buffers to all ranks, which must have equal modules.

    parameters, buffers: (name, tensor) pairs of the module.
    groups_of: a function that returns the groups over which a parameter is replicated or cut.
    axes: this rank's groups, which together connect all ranks that make this call.
    Raises ValueError on every rank if modules differ or a parameter cannot be replicated.
    """
    check_whole(module.parameters())
    check_replicated(module, parameters, groups_of, axes)
    for group in axes:
        check_parameters([*parameters, *buffers], group)
        broadcast_first([buffer for _, buffer in buffers], group)


def check_whole(parameters):
    """Raise ValueError if zero.py has sharded one of the parameters."""
    if any(hasattr(parameter, "whole_shape") for parameter in parameters):
        raise ValueError("FullyShardedDataParallel has cut these parameters: wrap a model once")


def check_device(parameters):
    """Raise ValueError if the parameters are on several devices."""
    devices = {str(parameter.device) for parameter in parameters}
    if len(devices) > 1:  # autograd would run their hooks in several threads at once
        raise ValueError(f"parameters are on {sorted(devices)}: put them on one device")


def check_replicated(module, named, groups_of, axes):
    """Raise ValueError on all ranks if replicas of a parameter would be unlike parts of a whole.

    A module whose parameters tensor_parallel.py has split says so in its `shards`, {name: Shard}.
    A module of experts, of which other ranks have others, has its group as `spread_over`. Copies of
    one rank's part would overwrite the parts of others, and sums of gradients would mix unlike
    parts.

    named: (name, parameter) pairs of the module.
    groups_of, axes: see check_and_copy().
    """
    names = {parameter: repr(name) for name, parameter in named}
    fault = ""
    for parameter, split_over in groups_of_shards(module):
        if parameter in names and not fault:
            fault = fault_of_replicas(names[parameter], groups_of(parameter), split_over)
    raise_on_all_ranks(fault, axes)


def groups_of_shards(module):
    """Return pairs (parameter, a group of several ranks over which it is split)."""
    split_over = []
    for part in module.modules():
        if hasattr(part, "spread_over"):
            split_over += [(parameter, part.spread_over) for parameter in part.parameters()]
        shards = getattr(part, "shards", None)
        for name, parameter in part._parameters.items():
            if isinstance(shards, dict) and name in shards:
                split_over.append((parameter, shards[name].group))
    return [(p, group) for p, group in split_over if dist.get_world_size(group) > 1]


def fault_of_replicas(name, groups, split_over):
    """Return a sentence if a group has several ranks of the group `split_over`, otherwise ""."""
    for group in groups:
        ranks = sorted(ranks_in_both(group, split_over))
        if len(ranks) > 1:
            cure = (
                "pass a process_group with one rank of each group that splits it. If only experts "
                "are split, pass that group in `groups` (DistributedDataParallel) or "
                "`per_parameter` (FullyShardedDataParallel)"
            )
            return f"{name} is split over ranks {ranks}, which are no replicas: {cure}"
    return ""


def raise_on_all_ranks(fault, axes):
    """Raise ValueError with the first fault, if any rank has one. Collective."""
    for group in axes:  # the ranks of a row learn of it, and then those of all columns
        fault = next(filter(None, gather_objects(fault, group)), "")
    if fault:
        raise ValueError(fault)


# ---- tools of both wrappers ----------------------------------------------------------------------


def at_end_of_backward(function):
    """Call function() when the running backward ends; one inside another has an end of its own."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # private; nothing public


def broadcast_first(tensors, group):
    """Copy the tensors of the group's first rank to all of its ranks."""
    for tensor in tensors:
        broadcast(tensor, group=group, group_src=0)


@contextmanager
def without_sync(model):
    """Keep a wrapper's backward from reducing gradients: its no_sync()."""
    before = model.require_backward_grad_sync
    model.require_backward_grad_sync = False
    try:
        yield
    finally:
        model.require_backward_grad_sync = before


def weakly(method):
    """Return a hook that calls `method` but does not keep the method's object alive."""
    reference = weakref.WeakMethod(method)

    def hook(*arguments):
        alive = reference()
        return None if alive is None else alive(*arguments)

    return hook


# ---- the norm of all gradients -------------------------------------------------------------------


@torch.no_grad()
def get_total_norm(tensors, groups=()):
    """Return the 2-norm of tensors on one or more ranks, as a float64 scalar on their device.

    tensors: at least one on each rank. The norm of several tensors may be passed instead of them.
    groups: squares are summed over each group in turn; its ranks must hold different tensors.
    """
    tensors = [tensor.detach() for tensor in tensors]  # plain, also if they are ZeRO's pieces
    norms = [tensors[0].new_zeros(1, dtype=torch.float64)]  # all tensors may be empty
    for dtype, same_dtype in _by_dtype(tensors):
        norms += _norms_of_parts(same_dtype, torch.promote_types(dtype, torch.float32))
    total = torch.cat(norms).square().sum()
    for group in groups:
        all_reduce(total, group=group)
    return total.sqrt_()


ROW = 128  # see _norms_of_parts()


def _norms_of_parts(tensors, dtype):
    """Return the norms of parts of the tensors as float64 vectors. GPUs compute them in `dtype`.

    A CPU adds up the squares of a tensor nearly one by one. In fp32 the norm of 40 million elements
    would be 0.3% too small, and in float64 it would take many times as long. So on a CPU the norms
    of rows of ROW elements are computed in `dtype`. The errors of 256 rows or more nearly cancel.
    Shorter tensors are computed in float64.
    """
    norms = []
    others = []
    for tensor in tensors:
        if tensor.is_cpu and tensor.numel() >= 256 * ROW:
            flat = tensor.flatten()
            end = len(flat) // ROW * ROW
            rows = flat[:end].view(-1, ROW)
            norms.append(torch.linalg.vector_norm(rows, dim=1, dtype=dtype).double())
            tensor = flat[end:]
        others.append(tensor)
    if others[0].is_cpu:
        dtype = torch.promote_types(dtype, torch.float64)
        others = [tensor.to(dtype) for tensor in others]
    norms.append(torch.stack(torch._foreach_norm(others, 2, dtype)).double())
    return norms


@torch.no_grad()
def clip_grads_with_norm_(tensors, max_norm, total_norm):
    """Scale gradients to a norm of at most `max_norm`. PyTorch's version takes parameters."""
    coefficient = (max_norm / (total_norm + 1e-6)).clamp(max=1)
    tensors = [tensor.detach() for tensor in tensors]  # plain, also if they are ZeRO's pieces
    for dtype, same_dtype in _by_dtype(tensors):
        # CPUs multiply 16-bit elements in fp32, so the coefficient need not be rounded to 16 bits
        torch._foreach_mul_(same_dtype, coefficient.to(torch.promote_types(dtype, torch.float32)))


def _by_dtype(tensors):
    """Return (dtype, non-empty tensors) pairs, since a _foreach kernel takes only one dtype."""
    by_dtype = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return by_dtype.items()


# ---- demonstration -------------------------------------------------------------------------------


def _demonstrate():
    rank, world_size = rank_and_size()
    torch.manual_seed(0)
    # 480 x 480 float64 elements divide into P equal multiples of 128 bytes for P = 1 to 6
    module = nn.Sequential(*[nn.Linear(480, 480, bias=False) for _ in range(4)]).double()
    inputs = torch.randn(8 * world_size, 480, dtype=torch.float64)
    whole = torch.autograd.grad(module(inputs).square().mean(), list(module.parameters()))
    loss = lambda model: model(inputs.chunk(world_size)[rank]).square().mean()

    def run(what, step, replica):
        with count_bytes() as traffic:
            step()
        error = max((p.grad - g).abs().max().item() for p, g in zip(replica.parameters(), whole))
        if rank == 0:
            claimed = ddp_bytes(replica, world_size)
            print(f"{what}: claimed {claimed} bytes, counted {traffic.bytes('all_reduce')}")
            print(f"    largest difference from one process's gradients: {error:.1e}")

    plain = copy.deepcopy(module)
    last_first = [*plain.parameters()][::-1]
    buckets = [Bucket(last_first[:2]), Bucket(last_first[2:])]
    run("backward_in_buckets()", lambda: backward_in_buckets(loss(plain), buckets), plain)
    model = DistributedDataParallel(module, bucket_cap_mb=4)
    run(f"the wrapper, {len(model.buckets)} buckets", lambda: loss(model).backward(), module)


if __name__ == "__main__":
    run_ranks(_demonstrate)
