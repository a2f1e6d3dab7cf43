"""ZeRO: data parallelism in which no rank keeps what it can fetch in time.

P replicas hold P copies of everything that training needs. But gradients and optimizer state only
serve to update weights, and one rank alone could update an element; so give each rank a shard, a
P-th of the elements, to look after, and let it forget the rest as early as it can:

             a rank holds                                bytes per parameter   a rank sends
    DDP      parameters   gradients   optimizer state         16                2 (P-1)/P D
    stage 1  parameters   gradients   1/P                      4 + 12/P         2 (P-1)/P D
    stage 2  parameters   1/P         1/P                      2 + 14/P         2 (P-1)/P D
    stage 3  1/P          1/P         1/P                          16/P         3 (P-1)/P D

Bytes are those of 16-bit parameters and gradients with a 32-bit copy and Adam's two moments; D is
the size of the parameters. Gradients that add up in 32 bits take 2 bytes more (stage 1: 2 + 4 +
12/P). An all-reduce of gradients is a reduce-scatter and an all-gather, and updating between the
two costs nothing more (stages 1, 2); stage 3 gathers parameters twice.

    stage 3   gather    | 1 | 2 | 3 | 4 |       | 3 | 2 | 1 |        a unit is there when its turn
              compute       | 1 | 2 | 3 | 4 | 4   | 3  | 2  | 1  |   comes, and is dropped after it
              scatter                             | 4  | 3  | 2  | 1 |

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.

    torchrun --nproc-per-node 4 zero.py     bytes sent and held, claimed and measured, and the error
"""

import math
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from collectives import (
    ALIGNMENT, ReduceOp, all_gather_single, all_gather_to_group, all_reduce, check_parameters,
    count_bytes, dist, gather_objects, rank_and_size, reduce_scatter_bytes, reduce_scatter_single,
    run_ranks,
)
from ddp import (
    Backward, DistributedDataParallel, FlatLayout, Reducer, accumulates, before_backward,
    broadcast_first, check_finite, check_whole, clip_grads_with_norm_, fill_buckets, float64_sum,
    get_total_norm, grad_dtype, in_backward, tensors_in, weakly,
)

# ---- the idea ------------------------------------------------------------------------------------


@torch.no_grad()
def sharded_step(parameters, update, group=None):
    """After backward: a step of ZeRO-1 on parameters of one dtype, in full. Nothing overlaps.

    update(weights, gradient) changes this rank's shard of the weights in place, and has optimizer
    state for that shard alone.
    """
    rank, world_size = rank_and_size(group)
    layout = FlatLayout(parameters, world_size)
    weights, gradients = layout.pack(parameters), layout.pack([p.grad for p in parameters])
    shard = weights.chunk(world_size)[rank]
    gradient = torch.empty_like(shard)
    reduce_scatter_single(gradient, gradients, ReduceOp.AVG, group)
    update(shard, gradient)
    all_gather_single(weights, shard, group)
    for view, parameter in zip(layout.views(weights), parameters):
        parameter.copy_(view)


def sharded_forward(unit, x, shard, layout, group=None):
    """unit(x) under ZeRO-3: parameters are gathered, used and dropped, and again in backward.

    shard: this rank's part of a row of the unit's parameters; its gradient becomes that part of
    their sum over the ranks. The unit's own parameters are not read. The real one, further down,
    computes forward once, and gathers the next unit meanwhile.
    """
    names = [name for name, _ in unit.named_parameters()]

    def gather_and_use(x, shard):
        row = all_gather_to_group(shard, 0, group)  # whose backward is a reduce-scatter
        return functional_call(unit, dict(zip(names, layout.views(row))), x)

    # keeps x and the shard alone, and calls the function again when backward comes to it
    return checkpoint(gather_and_use, x, shard, use_reentrant=False)


# ---- parameters in one row, and its shards -------------------------------------------------------


class FlatParameter:
    """Parameters of one dtype as one row of elements, cut into shards, of which each rank owns one.

    group, replicate_group: the ranks that share the row out, and those that have this rank's shard,
        too (HSDP), or None.
    unsharded_param, sharded_param: the row that the module computes with, and this rank's part of
        it, which is in the parameters' own dtype.
    pieces: what that part holds of each parameter, as parameters of an optimizer: one dimension,
        maybe empty.
    parameters, whole: those that were given, and those, of full shape, that the module computes
        with. In stages 1 and 2 they are the same; in stage 3 the given ones become the pieces.
    flat_grad: a row of gradients, from the first one that comes until reduce().
    incoming, sharded_grad: this rank's part of their sum, while it travels and from then on.
    """

    def __init__(self, named, settings):
        self.names, self.parameters = zip(*named)
        self.settings = settings
        self.group, self.replicate_group = settings.groups_of(self.parameters[0])
        self.rank, world_size = rank_and_size(self.group)
        self.layout = FlatLayout(self.parameters, world_size)
        begin = self.rank * self.layout.shard_size
        self.own = slice(begin, begin + self.layout.shard_size)
        self.ranges = self.layout.ranges(self.rank)  # what that holds of each parameter
        self.dtype = self.parameters[0].dtype
        floating = self.dtype.is_floating_point
        self.param_dtype = settings.param_dtype if settings.param_dtype and floating else self.dtype
        self.whole, self.sharded_grad = self.parameters, None
        self.reset()

    @property
    def reduce_dtype(self):
        """That in which gradients are summed: by default as autograd adds them up."""
        given = self.settings.reduce_dtype if self.dtype.is_floating_point else None
        return given or max(map(grad_dtype, self.whole), key=lambda dtype: dtype.itemsize)

    def first_row(self):
        """The first rank's parameters, as a row. Collective."""
        row = self.layout.pack(self.parameters)
        self.settings.broadcast([row], self.parameters[0])
        return row

    def unshard(self):
        """Begin to collect every rank's shard in the full row; returns the Work."""
        shard = self.sharded_param.to(self.param_dtype)
        return all_gather_single(self.unsharded_param, shard, self.group, async_op=True)

    # -- gradients

    def reset(self):
        """No gradient is on its way."""
        self.flat_grad, self.grad_views, self.sums = None, (), {}
        self.incoming = self.work = None

    def alloc_grad(self):
        """Memory for a row of gradients, zero for those that do not come."""
        self.flat_grad = self.sharded_param.new_zeros(self.layout.length, dtype=self.reduce_dtype)
        self.grad_views = self.layout.views(self.flat_grad)

    def add_gradient(self, i, gradient):
        """Add a gradient of the i-th parameter to the row."""
        if self.flat_grad is None:
            self.alloc_grad()
        self.grad_views[i].add_(gradient)
        if self.settings.error_if_nonfinite:
            self.sums[self.names[i]] = float64_sum(self.grad_views[i])

    def reduce(self):
        """Begin to sum the rows of all ranks."""
        if self.flat_grad is None:
            self.alloc_grad()
        self.incoming = self.flat_grad.new_empty(self.layout.shard_size)
        row, self.flat_grad, self.grad_views = self.flat_grad, None, ()
        self.work = reduce_scatter_single(self.incoming, row, group=self.group, async_op=True)

    def finish(self, dtype=None):
        """Add this rank's part of the sum to sharded_grad, which is of `dtype`."""
        self.work.wait()
        if self.replicate_group is not None:
            all_reduce(self.incoming, group=self.replicate_group)
        if self.settings.divide_factor != 1:
            self.incoming.div_(self.settings.divide_factor)
        total = self.incoming.to(dtype or self.reduce_dtype)
        if self.sharded_grad is not None:
            total = self.sharded_grad.add_(total)
        self.sharded_grad, self.incoming, self.work = total, None, None

    def gradient_pieces(self):
        """What this rank's part of the sum holds of each parameter."""
        return self.layout.pieces(self.sharded_grad, self.rank)

    def zero_gradient(self, i):
        """Forget what was summed for the i-th parameter."""
        if self.sharded_grad is not None:
            self.gradient_pieces()[i].zero_()

    # -- state dicts

    def piece(self, i, tensor):
        """What this rank's shard holds of a full tensor, one that is like the i-th parameter."""
        return tensor.flatten()[slice(*self.ranges[i])]

    def join(self, pieces):
        """The full tensors of which each rank passes its pieces. Collective."""
        shard = pieces[0].new_zeros(self.layout.shard_size)
        for part, piece in zip(self.layout.pieces(shard, self.rank), pieces):
            part.copy_(piece.detach())
        row = shard.new_empty(self.layout.length)
        all_gather_single(row, shard, self.group)
        return [view.clone() for view in self.layout.views(row)]


class _UnderWay:
    """The rows whose sums travel, which are finished once the next ones have left.

    So one sum travels while the next row fills, and two rows of gradients exist at most.
    """

    def __init__(self):
        self.rows = ()

    def start(self, *rows):
        if set(rows) & set(self.rows):  # a row has one sum under way at most
            self.finish()
        for row in rows:
            row.reduce()
        self.finish()
        self.rows = rows

    def finish(self):
        for row in self.rows:
            row.finish()
        self.rows = ()


def _check_gradients(rows, group):
    """After a pass or a step: no gradient came too late, and all were finite on this rank."""
    if late := [name for row in rows if row.flat_grad is not None for name in row.names]:
        raise RuntimeError(f"a gradient came after those of its row were summed: {', '.join(late)}")
    sums = {name: value for row in rows for name, value in row.sums.items()}
    for row in rows:
        row.sums = {}
    check_finite(sums, group)


@dataclass
class _Settings:
    """What all rows of a model have in common."""

    group: object
    replicate_group: object
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    divide_factor: float | None
    error_if_nonfinite: bool
    groups: dict = field(default_factory=dict)  # {parameter: its (group, replicate_group)}

    def __post_init__(self):
        if self.divide_factor is None:
            self.divide_factor = dist.get_world_size(self.group)
            if self.replicate_group is not None:
                self.divide_factor *= dist.get_world_size(self.replicate_group)
        if not self.divide_factor > 0:
            raise ValueError(f"gradient_divide_factor={self.divide_factor} must be positive")

    def groups_of(self, parameter=None):
        """(group, replicate_group) of a parameter, or of what has none of its own."""
        return self.groups.get(parameter, (self.group, self.replicate_group))

    def broadcast(self, tensors, parameter=None):
        """Give all ranks the first one's."""
        group, replicate_group = self.groups_of(parameter)
        for tensor in tensors:
            # replicas first: then what the first replica broadcasts reaches all of its ranks
            if replicate_group is not None:
                broadcast_first([tensor], replicate_group)
            broadcast_first([tensor], group)

    def check(self, named):
        check_whole(named)
        if self.replicate_group is not None:
            check_parameters(named, self.replicate_group)
        check_parameters(named, self.group)
        ranges = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in named)
        for (_, end, name), (begin, _, other) in pairwise(ranges):
            if begin < end:
                raise ValueError(f"{name!r} and {other!r} share memory: tie them, or copy one")


# ---- stage 1: whole parameters, an optimizer of shards -------------------------------------------


class WholeRow(FlatParameter):
    """A row whose parameters stay whole, as views into it; pieces are the inner optimizer's."""

    def __init__(self, named, settings):
        super().__init__(named, settings)
        row = self.first_row()
        self.unsharded_param = row.to(self.param_dtype)
        own = row[self.own]
        self.sharded_param = own if self.unsharded_param is row else own.clone()
        self.pieces = [
            nn.Parameter(piece) for piece in self.layout.pieces(self.sharded_param, self.rank)
        ]
        for parameter, view in zip(self.parameters, self.layout.views(self.unsharded_param)):
            parameter.data = view

    def follow(self):
        """Take over what somebody has changed in the parameters since the last step."""
        views = self.layout.views(self.unsharded_param)
        for name, parameter, view in zip(self.names, self.parameters, views):
            if parameter.shape != view.shape or parameter.dtype != view.dtype:
                found, needed = (f"{tuple(t.shape)} {t.dtype}" for t in (parameter, view))
                raise RuntimeError(f"{name!r} has become {found}, its optimizer has {needed}")
            if parameter.data_ptr() != view.data_ptr():
                parameter.data = view.copy_(parameter)
        if self.dtype != self.param_dtype:  # where the copy does not round to it, it was changed
            own, rounded = self.unsharded_param[self.own], self.sharded_param.to(self.param_dtype)
            exact = torch.where(own == rounded, self.sharded_param, own.to(self.dtype))
            self.sharded_param.copy_(exact)


class ShardedUpdate:
    """Stage 1: backward leaves gradients whole in .grad; a step sums them, row after row.

    settings: what the rows have in common.
    pieces: {parameter: what this rank updates of it}

    A row's sum is made once: _summed says of which gradients the rows now have it, if they do.
    """

    keeps_sums = False  # from one step to the next

    def __init__(self, settings):
        self.settings, self.rows, self.pieces, self._summed = settings, [], {}, None

    def add(self, named):
        """Make a row of parameters of one dtype."""
        row = WholeRow(named, self.settings)
        self.rows.append(row)
        self.pieces |= zip(row.parameters, row.pieces)
        self.expect_gradients(row)

    def expect_gradients(self, row):
        """Have autograd add up gradients in the dtype in which they are summed, if it is wider."""
        for parameter in row.parameters:
            if row.reduce_dtype.itemsize > parameter.dtype.itemsize:
                parameter.grad_dtype = row.reduce_dtype

    def follow(self):
        """See what was done to the parameters."""
        for row in self.rows:
            row.follow()

    def forget_gradients(self):
        for row in self.rows:
            row.reset()
            row.sharded_grad = None
        self._summed = None

    # -- the step

    def step(self, optimizer):
        """Update this rank's part of each row by an optimizer of pieces, and gather everybody's.

        One row is updated while the next one arrives and the last one leaves. But PyTorch's
        optimizers alone are known to keep nothing in their groups, such as a count of steps: others
        make one step of all rows.
        """
        rows, works = self.summed_rows(), []
        one_by_one = type(optimizer).__module__.startswith("torch.optim.")
        batches = ([row] for row in rows) if one_by_one else [list(rows)]
        for together in batches:
            self._update(optimizer, together)
            for row in together:
                if len(works) == 2:  # each holds a copy of its shard
                    works.pop(0).wait()
                works.append(row.unshard())
        for work in works:
            work.wait()
        self._summed = None
        _check_gradients(self.rows, self.settings.group)

    def _update(self, optimizer, rows):
        for row in rows:
            for piece, part in zip(row.pieces, row.gradient_pieces()):
                piece.grad = part.to(row.dtype)
        optimizer.step()  # which passes over pieces without gradient
        for row in rows:
            for piece in row.pieces:
                piece.grad = None
            if not self.keeps_sums:
                row.sharded_grad = None

    # -- the sums

    def whole_gradients(self):
        return [parameter.grad for row in self.rows for parameter in row.parameters]

    def _versions(self):
        """The gradients, each with a number that changes with it."""
        return [(grad, grad is not None and grad._version) for grad in self.whole_gradients()]

    def summed_rows(self):
        """Each row with the sum of its gradients, which travels now, or has before."""
        if self._summed is not None:
            pairs = zip(self._summed, self._versions())
            if all(grad is other and version == v for (grad, version), (other, v) in pairs):
                return self.rows
        return self._sum_rows()

    def _sum_rows(self):
        """One row leaves while the one before is used; copies of two exist at most."""
        if all(gradient is None for gradient in self.whole_gradients()):
            raise RuntimeError("step() before backward(): no parameter has a gradient")
        self._reduce(self.rows[0])
        for row, following in pairwise([*self.rows, None]):
            if following is not None:
                self._reduce(following)
            row.finish()
            yield row

    @staticmethod
    def _reduce(row):
        row.reset()
        row.sharded_grad = None
        for i, parameter in enumerate(row.parameters):
            if parameter.grad is not None:
                row.add_gradient(i, parameter.grad)
        row.reduce()

    def clip(self, max_norm, norm_type):
        """step() will not sum gradients again that are the same then."""
        sums = [row.sharded_grad for row in list(self.summed_rows())]
        norm = get_total_norm(sums, norm_type, [self.settings.group])
        # a further backward adds to .grad, which is scaled alike
        own = [gradient for gradient in self.whole_gradients() if gradient is not None]
        clip_grads_with_norm_([*sums, *own], max_norm, norm)
        self._summed = self._versions()
        return norm


# ---- stage 2: gradients leave while backward runs ------------------------------------------------


class ShardedGradients(ShardedUpdate):
    """Stage 2: a gradient leaves for its owner when backward has filled its row.

    The order of launches is DistributedDataParallel's; a reduce-scatter takes the place of the
    all-reduce. The sums add up over backward passes, and what .grad has only says so.
    """

    keeps_sums = True

    def __init__(self, settings):
        super().__init__(settings)
        self.place, self.under_way = {}, _UnderWay()
        self.reducer = Reducer(self.under_way.start)
        self.backward = Backward(self._begin, self._end, self._failed)

    def expect_gradients(self, row):
        for i, parameter in enumerate(row.parameters):
            self.place[parameter] = row, i
            parameter.register_hook(weakly(self._gradient_comes))
            parameter.register_post_accumulate_grad_hook(weakly(self._gradient_ready))

    def _gradient_comes(self, gradient):
        """Before autograd adds it to .grad."""
        if accumulates():
            self.backward.enter()

    def _begin(self):
        """Have autograd find no .grad to add to; what was set to None since it was sent is zero."""
        self.reducer.begin(self.rows)
        for parameter, (row, i) in self.place.items():
            if isinstance(parameter.grad, _SentGradient):
                parameter.grad = None
            elif parameter.grad is None:
                row.zero_gradient(i)

    @torch.no_grad()
    def _gradient_ready(self, parameter):
        if parameter.grad is None:  # its backward has put it off
            return
        row, i = self.place[parameter]
        row.add_gradient(i, parameter.grad)
        parameter.grad = None
        self.reducer.mark_ready(parameter)

    def _end(self):
        self.reducer.finish()
        self.under_way.finish()
        for parameter, (row, i) in self.place.items():
            if parameter.grad is None:
                parameter.grad = _SentGradient(parameter, partial(weakly(row.zero_gradient), i))
        _check_gradients(self.rows, self.settings.group)

    def _failed(self):
        self.under_way.rows = ()
        for row in self.rows:  # a sum that still travels has memory of its own
            row.reset()

    def whole_gradients(self):
        return []

    def summed_rows(self):
        """The rows. What was zeroed since it was sent is zero; nothing else may be there."""
        if any(row.sharded_grad is None for row in self.rows):
            raise RuntimeError("step() before backward(): no parameter has a gradient")
        for parameter, (row, i) in self.place.items():
            if parameter.grad is None:
                row.zero_gradient(i)
            elif not isinstance(parameter.grad, _SentGradient):
                raise RuntimeError(
                    f"{row.names[i]!r} has a gradient that is not ZeRO-2's: set by hand, or by "
                    "DistributedDataParallel, which reduces what ZeRO-2 already has (use stage 1)"
                )
        return self.rows


class _SentGradient(torch.Tensor):
    """The .grad of a parameter whose gradient is on its owner: has its shape, and can be zeroed."""

    @staticmethod
    def __new__(cls, parameter, zero):
        # Private: the one way to a tensor with a shape and no memory that may be a .grad.
        like = {"dtype": grad_dtype(parameter), "device": parameter.device, "storage_size": 0}
        return torch.Tensor._make_wrapper_subclass(cls, parameter.shape, **like)

    def __init__(self, parameter, zero):
        self.zero = zero

    def __repr__(self):
        return f"gradient {tuple(self.shape)}, of which each rank has a shard"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default):
            many = function is torch.ops.aten._foreach_zero_.default
            for gradient in args[0] if many else args:
                gradient.zero()
            return None if many else args[0]
        raise RuntimeError(
            f"{function}: under ZeRO-2 .grad has left for its owner: use the optimizer's "
            "clip_grad_norm_(), and stage 1 beside what needs whole gradients, such as GradScaler "
            "or DistributedDataParallel"
        )


# ---- stages 1 and 2: the optimizer ---------------------------------------------------------------


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """Runs `optimizer_class(..., **defaults)` on this rank's shard of all elements: ZeRO-1 and -2.

    Stage 1: step() reduce-scatters the gradients that backward has left, updates the shard and
    all-gathers the parameters, a row of at most `bucket_cap_mb` MiB after the other; under
    DistributedDataParallel all ranks' gradients are equal already, and so is their mean. Stage 2,
    shard_gradients=True: a gradient leaves for its owner when backward has filled its row, and the
    shards add up over backward passes, each of which must reach some parameter on every rank. Its
    .grad then only tells that it has left: zero_grad() of a module or optimizer may zero it, and
    all else is refused, DistributedDataParallel too.

    params: as for any optimizer; they start as the first rank's, and become views into rows.
    param_dtype: what they are converted to, the update being made on a copy in their old dtype, of
        the shard alone. An element that somebody else changes is changed in the copy, too.
    reduce_dtype: in which gradients are summed over the ranks, by default the parameters'
        grad_dtype; in stage 1 also over backward passes, if it is wider: it becomes the grad_dtype.
    gradient_divide_factor: what their sum is divided by, by default the number of ranks; 1 where
        the loss has its global divisor.
    replicate_group: (HSDP) each of its ranks has a replica of the shards of process_group, and
        gradients are also summed over it.
    error_if_nonfinite: step(), or in stage 2 backward(), names the gradients of this rank that are
        not finite.

    A trainable parameter without gradient counts as zero. The norm of all gradients is that of
    clip_grad_norm_() here: torch.nn.utils' has this rank's gradients alone (stage 1). A GradScaler
    must ask all ranks whether one of them is infinite:
    torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, in stage 1, does.

    Raises ValueError for an optimizer that does not treat each element by itself, for no trainable
    parameters, several devices, and parameters that differ between ranks; RuntimeError from step()
    without gradients, and for parameters that were moved or converted.
    """

    def __init__(
        self,
        params,
        optimizer_class,
        process_group=None,
        shard_gradients=False,
        bucket_cap_mb=25,
        param_dtype=None,
        reduce_dtype=None,
        gradient_divide_factor=None,
        replicate_group=None,
        error_if_nonfinite=False,
        **defaults,
    ):
        _check_optimizer(optimizer_class, bucket_cap_mb)
        groups, dtypes = (process_group, replicate_group), (param_dtype, reduce_dtype)
        self._settings = _Settings(*groups, *dtypes, gradient_divide_factor, error_if_nonfinite)
        self._shards = (ShardedGradients if shard_gradients else ShardedUpdate)(self._settings)
        self._cap_bytes, self.optimizer = int(bucket_cap_mb * 2**20), None
        super().__init__(params, defaults)
        if not self._shards.rows:
            raise ValueError("there are no trainable parameters")
        self.optimizer = optimizer_class(map(self._group_of_pieces, self.param_groups), **defaults)
        self.defaults = self.optimizer.defaults
        for group, pieces in zip(self.param_groups, self.optimizer.param_groups):
            group.update({key: value for key, value in pieces.items() if key not in group})

    def add_param_group(self, group):
        super().add_param_group(group)
        try:
            self._shard_group(self.param_groups[-1], len(self.param_groups) - 1)
        except ValueError:
            self.param_groups.pop()
            raise
        if self.optimizer is not None:
            self.optimizer.add_param_group(self._group_of_pieces(self.param_groups[-1]))

    def _shard_group(self, group, number):
        names = group.get("param_names") or [
            f"{i} of group {number}" for i in range(len(group["params"]))
        ]
        named = list(zip(names, group["params"]))
        self._settings.check(named)
        for parameter in group["params"]:
            if not parameter.requires_grad:
                self._settings.broadcast([parameter.detach()])
                if self._settings.param_dtype and parameter.is_floating_point():
                    parameter.data = parameter.data.to(self._settings.param_dtype)
        # Backward runs from the last layer to the first, which is the order rows should fill in.
        names = {parameter: name for name, parameter in named[::-1] if parameter.requires_grad}
        for bucket in fill_buckets(list(names), self._cap_bytes):
            self._shards.add([(names[p], p) for p in bucket])

    def _group_of_pieces(self, group):
        own = [self._shards.pieces[p] for p in group["params"] if p in self._shards.pieces]
        return {key: v for key, v in group.items() if key != "param_names"} | {"params": own}

    @staticmethod
    def _copy_options(sources, targets):
        """Learning rates and the like, and what an optimizer keeps beside them."""
        for source, target in zip(sources, targets):
            target.update({k: v for k, v in source.items() if k not in ("params", "param_names")})

    # -- gradients

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale the gradients to a norm of at most `max_norm`; returns their norm. Collective.

        Call it after the last backward, before step().
        """
        return self._shards.clip(max_norm, norm_type)

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        self._shards.forget_gradients()

    @torch.no_grad()
    def step(self, closure=None):
        """Update this rank's shard and gather everybody's. Collective."""
        with torch.enable_grad() if closure else nullcontext():
            loss = closure() if closure else None
        for group in self.param_groups:
            for i, parameter in enumerate(group["params"]):
                if parameter.requires_grad != (parameter in self._shards.pieces):
                    raise RuntimeError(f"parameter {i} was frozen, or thawed, after it was sharded")
        self._shards.follow()
        self._copy_options(self.param_groups, self.optimizer.param_groups)
        self._shards.step(self.optimizer)
        self._copy_options(self.optimizer.param_groups, self.param_groups)
        return loss

    # -- state

    def _numbers(self):
        """piece -> its parameter's number in a state dict."""
        pieces = self._shards.pieces
        parameters = [p for group in self.param_groups for p in group["params"]]
        return {pieces[p]: number for number, p in enumerate(parameters) if p in pieces}

    @torch.no_grad()
    def state_dict(self):
        """The state dict of `optimizer_class` for whole parameters, on every rank. Collective.

        Where param_dtype differs from the parameters' own, with the exact ones as "master".
        """
        numbers, rows = self._numbers(), self._shards.rows
        state, groups = full_state(self.optimizer, rows, numbers), super().state_dict()
        self._shards.follow()
        return {**groups, "state": add_masters(state, rows, numbers)}

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Take this rank's part of a full state dict; load the parameters before.

        Raises ValueError for other parameter groups or shapes.
        """
        numbers, rows = self._numbers(), self._shards.rows
        state = {number: {**values} for number, values in state_dict["state"].items()}
        masters = {number: values.pop("master", None) for number, values in state.items()}
        lengths = [len(group["params"]) for group in self.param_groups]
        load_full_state(self.optimizer, rows, numbers, lengths, {**state_dict, "state": state})
        self._copy_options(self.optimizer.param_groups, self.param_groups)
        self._shards.follow()
        load_masters(masters, rows, numbers)

    def __getstate__(self):
        raise RuntimeError("ZeRO's optimizer cannot be copied or pickled: call state_dict()")


def _check_optimizer(optimizer_class, bucket_cap_mb):
    names = ("LBFGS", "Adafactor", "Muon", "SparseAdam")
    if any(issubclass(optimizer_class, getattr(torch.optim, name, ())) for name in names):
        raise ValueError(
            f"{optimizer_class.__name__} does not update each element by itself, "
            "which an optimizer of shards must"
        )
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb={bucket_cap_mb} must be positive")


# ---- stage 3: rows that come and go in shared memory ---------------------------------------------


class _Memory:
    """Bytes that several units live in, one after the other; freed and had again in one place.

    Autograd keeps views of parameters, not copies: what it kept in forward is right again in
    backward because the same row is gathered into the same storage.
    """

    def __init__(self, nbytes, device):
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.nbytes = nbytes

    def have(self):
        # Private: resize_() of the storage, not of the tensor, keeps the views that autograd has,
        # and gives the memory back while they exist.
        if self.bytes.untyped_storage().nbytes() < self.nbytes:
            self.bytes.untyped_storage().resize_(self.nbytes)

    def free(self):
        self.bytes.untyped_storage().resize_(0)


class ShardedRow(FlatParameter):
    """A row whose parameters become the pieces; whole ones take their places in the modules.

    places: {parameter: [(module, name)]}, where the modules have it.
    """

    def __init__(self, named, settings, places):
        super().__init__(named, settings)
        self.places = [places[parameter] for parameter in self.parameters]
        self.grad_dtype = grad_dtype(self.parameters[0])
        self.sharded_param = self.first_row()[self.own].clone()
        for parameter, (begin, _), view in zip(self.parameters, self.ranges, self._views()):
            parameter.first, parameter.whole_shape = begin, parameter.shape
            parameter.data = view
        self.pieces = self.parameters

    def _views(self):
        return self.layout.pieces(self.sharded_param, self.rank)

    def live_in(self, row, keeps):
        """Make the whole parameters views of this memory; if it keeps them, the shard is there."""
        self.unsharded_param, self.whole = row, []
        if keeps and self.dtype == self.param_dtype:
            self.sharded_param = row[self.own].copy_(self.sharded_param)
            for piece, view in zip(self.pieces, self._views()):
                piece.data = view
        for piece, view in zip(self.pieces, self.layout.views(row)):
            whole = nn.Parameter(row.new_empty(0), piece.requires_grad)
            whole.data = view  # not nn.Parameter(view): gathering would count as a change in place
            if self.grad_dtype != self.dtype:
                whole.grad_dtype = self.grad_dtype
            self.whole.append(whole)

    def put(self, parameters):
        """Have the modules compute with these: the pieces, or the whole parameters."""
        for parameter, places in zip(parameters, self.places):
            for module, name in places:
                # Private: setattr() would run what some modules do when a parameter is replaced.
                module._parameters[name] = parameter

    def follow(self):
        """Take over pieces that somebody has put in place of these, or moved elsewhere."""
        views = self._views()
        pieces = tuple(self._found(i, view) for i, view in enumerate(views))
        for piece, old, view in zip(pieces, self.pieces, views):
            if piece.data_ptr() != view.data_ptr():
                piece.data = view.copy_(piece.detach())
            if piece is not old:
                piece.first, piece.whole_shape = old.first, old.whole_shape
        self.pieces = self.parameters = pieces
        self.put(pieces)

    def _found(self, i, view):
        """What the modules have as the i-th parameter, if it can be a piece."""
        name, whole = self.names[i], self.whole[i]
        piece, *others = {module._parameters[key] for module, key in self.places[i]}
        piece = self.pieces[i] if piece is whole else piece
        if others:
            raise RuntimeError(f"{name!r} was tied when it was sharded, and is no longer")
        if piece.shape != view.shape or piece.dtype != view.dtype:
            found, needed = (f"{tuple(t.shape)} {t.dtype}" for t in (piece, view))
            raise RuntimeError(
                f"{name!r} has become {found}, this rank's piece is {needed}: move and convert "
                "a module before it is sharded"
            )
        if piece.requires_grad != whole.requires_grad or piece._backward_hooks:
            raise RuntimeError(
                f"{name!r} was frozen, thawed or given a hook: do so before it is sharded"
            )
        return piece

    def let_go(self):
        """Have no memory for gradients that were set to None."""
        if all(piece.grad is None for piece in self.pieces):
            self.sharded_grad = None

    def finish(self):
        """Have the pieces' .grad be parts of sharded_grad, to which the sum is added."""
        self.let_go()
        if any(piece.grad is not None for piece in self.pieces):
            # an optimizer may hold some of the pieces only, and somebody may set gradients
            if self.sharded_grad is None:
                self.sharded_grad = torch.zeros_like(self.sharded_param, dtype=self.grad_dtype)
            for piece, part in zip(self.pieces, self.gradient_pieces()):
                if piece.grad is None:
                    part.zero_()
                elif piece.grad.data_ptr() != part.data_ptr():
                    part.copy_(piece.grad)
        super().finish(self.grad_dtype)
        for piece, part in zip(self.pieces, self.gradient_pieces()):
            piece.grad = part
            # Private: autograd, which would call them, sees the whole parameters alone.
            for hook in (piece._post_accumulate_grad_hooks or {}).values():
                hook(piece)


class _Unit:
    """Rows that come and go together, in memory that they share with other units."""

    def __init__(self, rows):
        self.rows, self.inputs = rows, ()
        self.works = None  # of what is gathered, or on its way
        self.trainable = [row for row in rows if row.pieces[0].requires_grad]

    def offsets(self):
        """Where in its memory each row begins, and the end of all."""
        starts = [0]
        for row in self.rows:
            nbytes = row.layout.length * row.param_dtype.itemsize
            starts.append(starts[-1] + math.ceil(nbytes / ALIGNMENT) * ALIGNMENT)
        return starts

    def live_in(self, memory, keeps):
        self.memory = memory
        for row, start in zip(self.rows, self.offsets()):
            part = memory.bytes[start : start + row.layout.length * row.param_dtype.itemsize]
            row.live_in(part.view(row.param_dtype), keeps)

    def unshard(self):
        """Begin to gather the parameters."""
        if self.works is None:
            self.memory.have()
            self.works = [row.unshard() for row in self.rows]

    def wait(self):
        """Have the modules compute with the whole parameters, now that they are there."""
        for work in self.works:
            work.wait()
        for row in self.rows:
            row.put(row.whole)

    def put_pieces(self):
        for row in self.rows:
            row.put(row.pieces)

    def reshard(self):
        """Give the memory to the next unit; but not before all of this one has arrived in it."""
        if self.works is not None:
            self.put_pieces()
            for work in self.works:
                work.wait()
            self.works = None

    def check_outputs(self, outputs):
        """RuntimeError if a parameter leaves the unit, which its memory does not."""
        memory = self.memory.bytes.untyped_storage().data_ptr()
        for tensor in tensors_in(outputs):
            if memory and tensor.untyped_storage().data_ptr() == memory:
                raise RuntimeError(
                    f"what holds {self.rows[0].names[0]!r} returns a parameter, or a view of one, "
                    "whose memory is about to be another's: return a clone"
                )


# ---- stage 3: when units come and go -------------------------------------------------------------


class _Units(list):
    """The units of a module, in the order of forward, in memory that they share.

    root: the unit of the parameters in no other, which is there during the whole pass.
    keeps: no unit is dropped before reshard().
    """

    def __init__(self, root, units, device, keeps):
        super().__init__(units)
        self.root, self.keeps, self.all = root, keeps, (root, *units)
        self.rows = [row for unit in self.all for row in unit.rows]
        # of even units, of odd ones, of the rest
        sharing = [[unit] for unit in units] if keeps else [units[0::2], units[1::2]]
        self.memories = []
        for members in (*sharing, [root]):
            largest = max((unit.offsets()[-1] for unit in members), default=0)
            self.memories.append(_Memory(largest, device))
            for unit in members:
                unit.live_in(self.memories[-1], keeps)
        self.leave()

    def prefetch(self, number, direction):
        """Have this unit and the next one. The one before must be done: its memory is needed."""
        wanted = range(len(self)) if self.keeps else (number, number + direction)
        wanted = [n for n in wanted if 0 <= n < len(self)]
        for n, unit in enumerate(self):
            if n not in wanted:
                unit.reshard()
        for n in wanted:
            self[n].unshard()

    def reshard(self):
        for unit in self.all:
            unit.reshard()

    def leave(self, free=True):
        """A pass is over: the modules have the pieces again, and if `free`, nobody the memory."""
        for unit in self.all:
            unit.put_pieces() if self.keeps else unit.reshard()
        for memory in self.memories if free and not self.keeps else ():
            memory.free()

    def follow(self):
        """See what was done to the pieces."""
        for row in self.rows:
            row.follow()
        pieces = [piece for row in self.rows for piece in row.pieces]
        if len(set(pieces)) < len(pieces):
            raise RuntimeError("parameters were tied after they were sharded: tie them before")

    def versions(self):
        """A number for each piece that changes with it."""
        return [piece._version for row in self.rows for piece in row.pieces]


class _Schedule:
    """What is gathered when: a unit computes while the next one comes; the one before is dropped.

    It is the same on every rank, whatever units a rank uses, as collectives must be. Forward goes
    up from unit 0, backward down to it.

    group: the ranks that have shards.
    waits: backward ends when all of its sums have arrived.

    current_unit: the number of the unit whose backward runs; that of units before the first one's;
        None outside of backward.
    sync, sums: whether a backward sums what it has added up, and whether the one that runs does.
    gathered, latest: versions of the pieces, as they were gathered, and in the last forward pass.
    turn_of: {whole parameter: (its unit's number, its row, its place there)}; the root's number is
        the last.
    order: the rows as backward comes to them: down the units, and the root's at the end.
    """

    def __init__(self, units, group, waits):
        self.units, self.group, self.waits = units, group, waits
        self.current_unit, self.gathered, self.sync = None, None, True
        self.turn_of = {
            whole: (number, row, i)
            for number, unit in enumerate((*units, units.root))
            for row in unit.trainable
            for i, whole in enumerate(row.whole)
        }
        for whole in self.turn_of:
            whole.register_post_accumulate_grad_hook(weakly(self._gradient_ready))
        self.order = [row for unit in (*units[::-1], units.root) for row in unit.trainable]
        self.backward = Backward(self._begin_backward, self._end_backward, self._failed)
        self.under_way = _UnderWay()
        self.reducer = Reducer(self.under_way.start)
        self.reducer.begin([])

    # -- forward

    @torch.no_grad()
    def begin_forward(self):
        if self.current_unit is not None and in_backward():
            raise RuntimeError("the module is recomputed in its own backward: checkpoint its units")
        self.current_unit = None  # a pass may have failed half-way
        if not self.units.keeps:
            self.units.reshard()  # which waits: what that pass had begun to gather still writes
        self.units.follow()
        if self.units.root.works is not None and self.units.versions() != self.gathered:
            raise RuntimeError("the parameters were changed and kept: call reshard() after step()")
        self.gathered = self.units.versions()
        self.units.root.unshard()
        self.units.prefetch(0, 1)
        self.units.root.wait()  # not before unit 0 is under way, which waiting would hold up

    def before_forward(self, number, module, args, kwargs):
        """A hook: unit `number` runs forward, maybe in backward, where it is recomputed."""
        if self.current_unit is None:
            self.units.prefetch(number, 1)
        elif self.units[number].works is None:
            raise RuntimeError(
                f"units[{number}] is recomputed before its turn: checkpoint single units"
            )
        self.units[number].wait()
        self.units[number].inputs = tensors_in((args, kwargs))

    def after_forward(self, number, module, args, outputs):
        unit = self.units[number]
        unit.check_outputs(outputs)
        if self.current_unit is None and not self.units.keeps:
            unit.reshard()
        before_backward(partial(self.unit_backward, number), outputs, unit.inputs)
        unit.inputs = ()

    # -- backward

    def expect_backward(self, outputs):
        """Of the forward pass that has just returned these."""
        self.latest = self.units.versions()
        before_backward(partial(self.enter_backward, self.latest), outputs)

    def enter_backward(self, versions):
        """versions: those of the pieces in the forward pass that backward has come to."""
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True: a sharded module has no gradients of gradients")
        self.backward.enter()
        if versions != self.gathered:
            raise RuntimeError("the parameters were changed between forward and backward")

    def _begin_backward(self):
        for row in self.units.rows:
            row.let_go()
        self.gathered = self.units.versions()
        self.current_unit = len(self.units)
        self.sums = accumulates() and self.sync
        self.units.root.unshard()
        self.units.prefetch(len(self.units) - 1, -1)
        self.units.root.wait()

    def unit_backward(self, number):
        """Backward has come to a unit.

        Those between were skipped on this rank, but have their turn, as on all others.
        """
        self.enter_backward(self.latest)
        if number > self.current_unit:  # of a second forward pass
            self._reduce(self.units[self.current_unit])
            self.current_unit = len(self.units)
        while self.current_unit > number:
            self.current_unit -= 1
            # Before the sums: what is computed next waits for parameters, and for no sum.
            self.units.prefetch(self.current_unit, -1)
            if self.current_unit + 1 < len(self.units):
                self._reduce(self.units[self.current_unit + 1])
        self.units[number].wait()

    @torch.no_grad()
    def _end_backward(self):
        if self.units:
            self.unit_backward(0)
            self._reduce(self.units[0])
        self._reduce(self.units.root)
        if self.waits:
            self.finish_sync()
        self.current_unit = None
        self.units.leave()
        if self.sums:
            _check_gradients(self.units.rows, self.group)

    def _failed(self):
        """Whoever looks at the parameters now sees the pieces; what is under way may come."""
        self.current_unit, self.under_way.rows = None, ()
        for row in self.units.rows:
            row.reset()
        for unit in self.units.all:
            if unit.works is not None:
                unit.put_pieces()

    # -- sums

    @torch.no_grad()
    def _gradient_ready(self, whole):
        number, row, i = self.turn_of[whole]
        collecting = bool(self.reducer.queue)  # what start_sync() awaits
        # a weight gradient may be computed after the backward that has put it off
        put_off = self.current_unit is None and (collecting or not self.sync)
        if number == len(self.units) and not put_off:
            self.enter_backward(self.latest)
        if not put_off and (self.current_unit is None or number < self.current_unit):
            raise RuntimeError(
                f"backward reached the parameters {', '.join(row.names)} on a way other than "
                "through the outputs of their unit, or those of the module"
            )
        if whole.grad is not None:
            row.add_gradient(i, whole.grad)
            whole.grad = None
        if collecting:
            self.reducer.mark_ready(row.pieces[i])

    @torch.no_grad()
    def _reduce(self, unit):
        """Sum a unit's gradients, while those of the one before arrive."""
        if self.sums:
            self.under_way.start(*unit.trainable)

    @torch.no_grad()
    def start_sync(self, awaited):
        """Sum what is there, each row once it has its gradients of the whole parameters awaited."""
        self.reducer.begin(self.order)
        for whole, (_, row, i) in self.turn_of.items():
            if whole not in awaited:
                self.reducer.mark_ready(row.pieces[i])

    @torch.no_grad()
    def finish_sync(self):
        self.reducer.finish()
        self.under_way.finish()


# ---- stage 3: the module -------------------------------------------------------------------------


class FullyShardedDataParallel(nn.Module):
    """Wraps a module of which each rank keeps a shard: ZeRO-3.

    A unit's parameters are gathered for its forward and for its backward pass, while the unit
    before it computes, and then dropped: two units are there at a time, in two buffers that all
    units share. Parameters in no unit, or in several, are there during the whole pass. Each
    backward() sums gradients, into shards: of m backwards a step sends 3 m (P-1)/P D. With
    keep_unsharded=True it sends (m + 1) (P-1)/P D and is stage 2; and with no_sync() around all
    backwards but the last 2 (P-1)/P D, and is stage 1, whose gathers forward hides.

    Between passes the module's parameters *are* this rank's pieces: each parameter is cut down to
    one dimension, maybe empty, and keeps its identity, name and attributes, with two more: `first`,
    the place of its first element in the whole, and `whole_shape`. Any optimizer that treats each
    element by itself may update them. backward() adds to their gradients. state_dict() and
    load_state_dict() take whole tensors under the module's own names, also where this is part of
    another module; so do those for optimizers.

    units: submodules, such as a transformer's blocks, in the order in which forward runs them.
        Every rank must run the same units.
    param_dtype: that of the gathered parameters, and what floating-point inputs are cast to; the
        pieces keep their own.
    reduce_dtype, gradient_divide_factor, replicate_group, error_if_nonfinite: as for
        ZeroRedundancyOptimizer.
    keep_unsharded: what is gathered stays until reshard(), to be called whenever parameters have
        changed: optimizer.register_step_post_hook(lambda *_: model.reshard()).
    wait_in_backward: if False, backward() leaves sums under way, and finish_grad_sync() waits.
    groups: {parameter: (group, replicate_group or None)} of parameters with fewer replicas, such
        as an expert's; subsets of the two groups' ranks.

    A trainable parameter without gradient counts as zero. What a forward pass does to a parameter
    in place is lost. Norms and GradScaler: as for ZeroRedundancyOptimizer's stage 1.

    Raises ValueError for units that are not distinct submodules, a module that is wrapped already,
    no trainable parameters, several devices, and parameters that differ between ranks; RuntimeError
    for a copy (save state_dict()), for gradients of gradients, for parameters that were converted,
    frozen, thawed or tied since, or changed between forward and backward, for a unit that returns a
    parameter, and in backward where it cannot see a unit's turn: its outputs hold their tensors in
    an object without attributes.
    """

    def __init__(
        self,
        module,
        process_group=None,
        units=(),
        param_dtype=None,
        reduce_dtype=None,
        gradient_divide_factor=None,
        replicate_group=None,
        error_if_nonfinite=False,
        keep_unsharded=False,
        wait_in_backward=True,
        groups=None,
    ):
        super().__init__()
        self.module, self.process_group, self.param_dtype = module, process_group, param_dtype
        settings = _Settings(
            *(process_group, replicate_group, param_dtype, reduce_dtype),
            *(gradient_divide_factor, error_if_nonfinite, groups or {}),
        )
        units = list(units)
        _check_module(module, units, settings)
        root, *sharded = _make_units(module, units, settings)
        self._units = _Units(root, sharded, next(module.parameters()).device, keep_unsharded)
        self._schedule = _Schedule(self._units, process_group, wait_in_backward)
        settings.broadcast(module.buffers())
        for i, unit in enumerate(units):
            # before all hooks of others, which may use the parameters
            before = partial(self._schedule.before_forward, i)
            unit.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            unit.register_forward_hook(partial(self._schedule.after_forward, i))
        self._register_load_state_dict_pre_hook(self._before_loading)

    def forward(self, *args, **kwargs):
        if self.param_dtype is not None:
            cast = lambda x: x.to(self.param_dtype) if x.is_floating_point() else x
            args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
        self._schedule.begin_forward()
        try:
            outputs = self.module(*args, **kwargs)
            self._units.root.check_outputs(outputs)
        finally:  # without a backward that will need it, nobody has the memory
            self._units.leave(free=not torch.is_grad_enabled())
        if torch.is_grad_enabled():
            self._schedule.expect_backward(outputs)
        return outputs

    def reshard(self):
        """Drop what is gathered: the next forward pass gathers again."""
        self._units.reshard()

    # -- gradients

    @contextmanager
    def no_sync(self):
        """Backward inside only adds to rows of whole gradients; the next outside sums those."""
        before, self._schedule.sync = self._schedule.sync, False
        try:
            yield
        finally:
            self._schedule.sync = before

    def start_grad_sync(self, awaited=()):
        """As DistributedDataParallel's, of what no_sync() left; awaited: gathered parameters."""
        self._schedule.start_sync(awaited)

    def finish_grad_sync(self):
        """Wait for the sums that backward() or start_grad_sync() started, if they did."""
        self._schedule.finish_sync()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale the gradients to a norm of at most `max_norm`; returns their norm. Collective.

        RuntimeError where some have a group of their own: get_total_norm() takes each group's.
        """
        if any(row.group is not self.process_group for row in self._units.rows):
            raise RuntimeError("clip_grad_norm_() of parameters that have groups of their own")
        pieces = [piece for row in self._units.rows for piece in row.pieces]
        gradients = [piece.grad for piece in pieces if piece.grad is not None]
        if not gradients:
            raise RuntimeError("no parameter has a gradient")
        norm = get_total_norm(gradients, norm_type, [self.process_group])
        clip_grads_with_norm_(gradients, max_norm, norm)
        return norm

    # -- state

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        """This wrapper, and the module's own under their own names: it adds no level to a name."""
        memo = set() if memo is None else memo
        if self not in memo:
            yield prefix, self
            memo |= {self} if remove_duplicate else set()
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    @torch.no_grad()
    def state_dict(self, *args, destination=None, prefix="", keep_vars=False):
        """The module's own state dict, of whole tensors, on every rank. Collective."""
        self._units.follow()
        own = _whole_state_dict(self.module, self._units.rows, prefix, keep_vars)
        if destination is None:
            return own
        destination.update(own)
        if hasattr(destination, "_metadata"):  # where this is part of another module
            destination._metadata.update(own._metadata)
        return destination

    @torch.no_grad()
    def _before_loading(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        self._units.follow()
        errors += _take_pieces(self.module, self._units.rows, state_dict, prefix)

    def optimizer_state_dict(self, optimizer):
        """The state dict of an optimizer of parameters(), for whole parameters. Collective."""
        state = full_state(optimizer, self._units.rows, self._numbers(optimizer))
        return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}

    def load_optimizer_state_dict(self, optimizer, state_dict):
        """Give an optimizer of parameters() its part of a state dict for whole parameters."""
        lengths = [len(group["params"]) for group in optimizer.param_groups]
        numbers = self._numbers(optimizer)
        load_full_state(optimizer, self._units.rows, numbers, lengths, state_dict)

    def _numbers(self, optimizer):
        """piece -> its number in the optimizer's state dict."""
        self._units.follow()
        held = [piece for group in optimizer.param_groups for piece in group["params"]]
        if others := set(held) - _where(self._units.rows).keys():
            raise ValueError(f"the optimizer has {len(others)} parameters of other modules")
        return {piece: number for number, piece in enumerate(held)}

    def __deepcopy__(self, memo):
        raise RuntimeError(
            "a sharded module cannot be copied or pickled: call state_dict(), on every rank"
        )

    __getstate__ = lambda self: self.__deepcopy__(None)


def _check_module(module, units, settings):
    named = list(module.named_parameters())
    if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
        raise ValueError("the module holds a DistributedDataParallel: shard what that wraps")
    if not any(parameter.requires_grad for _, parameter in named):
        raise ValueError("there are no trainable parameters")
    settings.check(named)
    names = {submodule: name for name, submodule in module.named_modules()}
    prefixes = [names.get(unit) for unit in units]
    for i, prefix in enumerate(prefixes):
        others = prefixes[:i] + prefixes[i + 1 :]
        if not prefix or any(f"{prefix}.".startswith(f"{other}.") for other in others):
            raise ValueError(f"units[{i}] is not a submodule, or inside of another unit")
    for i, unit in enumerate(units):
        if isinstance(unit, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
            raise ValueError(f"units[{i}] has no forward of its own: name what it holds")


def _make_units(module, units, settings):
    """The root, of the parameters in no unit or in several, and then each unit's own."""
    names = {submodule: name for name, submodule in module.named_modules()}
    prefixes, owners, places = [f"{names[unit]}." for unit in units], {}, {}
    for path, submodule in module.named_modules(remove_duplicate=False):
        inside = [i for i, prefix in enumerate(prefixes, 1) if f"{path}.".startswith(prefix)]
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, set()).add(inside[0] if inside else 0)
                places.setdefault(parameter, []).append((submodule, name))
    # A row is of one dtype, and its gradients, all trainable or not. What carries other
    # attributes has a row of its own: tensor-parallel ranks, which hold parts of unlike sizes
    # of what they split, so have the same pieces of what they all hold.
    rows = [{} for _ in range(len(units) + 1)]
    for name, parameter in module.named_parameters():
        owner = owners[parameter].pop() if len(owners[parameter]) == 1 else 0
        kind = parameter.dtype, grad_dtype(parameter), parameter.requires_grad
        kind += settings.groups_of(parameter)
        rows[owner].setdefault((*kind, *sorted(vars(parameter))), []).append((name, parameter))
    make = lambda named: ShardedRow(named, settings, places)
    return [_Unit([make(named) for named in kinds.values()]) for kinds in rows]


# ---- state dicts: full on one side, in pieces on the other ---------------------------------------


def _whole_state_dict(module, rows, prefix, keep_vars):
    """The state dict of a module of pieces, with whole tensors in their place. Collective."""
    state_dict, whole = module.state_dict(prefix=prefix, keep_vars=True), {}
    for row in rows:
        whole.update(zip(row.pieces, row.join(row.pieces)))
    for name, value in state_dict.items():
        if isinstance(value, nn.Parameter):
            state_dict[name] = whole[value]
        elif torch.is_tensor(value):
            state_dict[name] = value if keep_vars else value.detach().clone()
    return state_dict


def _take_pieces(module, rows, state_dict, prefix):
    """The opposite, in place, under the names that modules have in a wrapper; returns errors."""
    where, own, errors = _where(rows), module.state_dict(keep_vars=True), []
    for name in [name for name in state_dict if name.startswith(prefix)]:
        value, short = state_dict.pop(name), name[len(prefix) :]
        piece = own.get(short)
        if isinstance(piece, nn.Parameter):
            if value.shape == piece.whole_shape:
                row, i = where[piece]
                value = row.piece(i, value).clone()
            else:
                found, needed = tuple(value.shape), tuple(piece.whole_shape)
                errors.append(f"size mismatch for {name}: {found}, not {needed}")
                value = piece
        state_dict[f"{prefix}module.{short}"] = value
    return errors


def full_state(optimizer, rows, numbers):
    """An optimizer's state of pieces as that of whole parameters: {numbers[piece]: {key: value}}.

    Collective. What has its piece's shape on every rank is part of a tensor of the parameter's
    shape; anything else is the same on all ranks that have it, which empty pieces may not.
    """
    state = {}
    for row in rows:
        own = [optimizer.state.get(piece, {}) for piece in row.pieces]
        described = [
            {key: _describe(value, piece) for key, value in values.items()}
            for values, piece in zip(own, row.pieces)
        ]
        ranks = gather_objects(described, row.group)
        for key in dict.fromkeys(key for rank in ranks for values in rank for key in values):
            for i, whole in _whole_values(row, own, ranks, key).items():
                state.setdefault(numbers[row.pieces[i]], {})[key] = whole
    return dict(sorted(state.items()))


def _whole_values(row, own, ranks, key):
    """{i: what the i-th parameter has under this key}, of those that have something on a rank."""
    found = [[rank[i][key] for rank in ranks if key in rank[i]] for i in range(len(own))]
    dtypes = [dtype for some in found for dtype, _ in some]
    if None in dtypes:
        wholes = [some[0][1] if some else None for some in found]
    else:
        pairs = zip(own, row.pieces)
        parts = [values.get(key, piece.new_zeros(piece.shape)) for values, piece in pairs]
        wholes = row.join([part.to(dtypes[0]) for part in parts])
    return {i: whole for i, whole in enumerate(wholes) if found[i]}


def _describe(value, piece):
    """(dtype, or None for what is no part of a tensor; the value, if it may be none)."""
    if not torch.is_tensor(value):
        return None, value
    is_part = value.shape == piece.shape
    known = value.cpu() if value.numel() == 1 or not is_part else None
    return value.dtype if is_part else None, known


_SCALARS = ("step", "mu_product", "eta", "mu")  # of Adam, NAdam, ASGD: whatever the parameter


def _where(rows):
    """{piece: (its row, its place there)}"""
    return {piece: (row, i) for row in rows for i, piece in enumerate(row.pieces)}


def load_full_state(optimizer, rows, numbers, lengths, state_dict):
    """The opposite: give an optimizer of pieces its part of the state of whole parameters.

    lengths: how many parameters, trainable or not, each of its groups has.
    """
    groups, state, where = [], {}, _where(rows)
    packed = optimizer.state_dict()["param_groups"]
    found = [len(group["params"]) for group in state_dict["param_groups"]]
    if found != lengths:
        raise ValueError(f"state_dict has groups of {found} parameters, the optimizer of {lengths}")
    for group, own, theirs in zip(optimizer.param_groups, packed, state_dict["param_groups"]):
        groups.append({**theirs, "params": own["params"]})
        for number, piece in zip(own["params"], group["params"]):
            values = state_dict["state"].get(numbers[piece], {})
            state[number] = {k: _own_part(k, value, *where[piece]) for k, value in values.items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _own_part(key, value, row, i):
    """This rank's part of a value of the i-th parameter; what is no tensor of its shape, as is."""
    if not torch.is_tensor(value) or key in _SCALARS:
        return value
    needed = row.layout.shapes[i]
    if value.shape == needed:
        return row.piece(i, value).clone()
    if value.numel() > 1:
        raise ValueError(f"{key} of {row.names[i]!r} is {tuple(value.shape)}, not {tuple(needed)}")
    return value


def add_masters(state, rows, numbers):
    """The state, with the exact weights where the module computes with others. Collective."""
    for row in rows:
        if row.dtype != row.param_dtype:
            for piece, master in zip(row.pieces, row.join(row.pieces)):
                state.setdefault(numbers[piece], {})["master"] = master
    return state


def load_masters(masters, rows, numbers):
    """The opposite, of {number: the exact weights, or None}."""
    for row in rows:
        for i, (parameter, piece) in enumerate(zip(row.parameters, row.pieces)):
            exact = masters.get(numbers[piece])
            if exact is not None and row.dtype != row.param_dtype:
                piece.copy_(row.piece(i, exact))
                parameter.copy_(exact)


# ---- cost ----------------------------------------------------------------------------------------


def zero_bytes(stage, nbytes, world_size, microbatches=1):
    """Bytes that a rank sends in a step for rows of `nbytes`; stage 0 is data parallelism.

    In a row 64 elements of padding follow each parameter and each shard but one, at most.
    """
    return sum(zero_rounds(stage, microbatches)) * reduce_scatter_bytes(nbytes, world_size)


def zero_rounds(stage, microbatches=1):
    """How often a step reduce-scatters the gradients, and how often it all-gathers the parameters.

    Stage 0, data parallelism, all-reduces the gradients: it gathers their sums.
    """
    m = microbatches
    return ((1, 1), (1, 1), (m, 1), (m, 2 * m))[stage]


def zero_memory(stage, world_size, parameter=2, gradient=2, optimizer=12):
    """Bytes per parameter that a rank holds, of so many for each; stage 0 is data parallelism.

    Without the padding of rows; 32-bit gradients take 4.
    """
    kinds = (optimizer, gradient, parameter)  # sharded in this order
    return sum(kinds[stage:]) + sum(kinds[:stage]) / world_size


def largest_model(stage, world_size, memory_bytes, parameter=2, gradient=2, optimizer=8):
    """Parameters of the largest model whose training state fits into each rank's memory."""
    return memory_bytes / zero_memory(stage, world_size, parameter, gradient, optimizer)


def compute_bound_tokens(flops, bandwidth, itemsize=2):
    """From how many tokens on a rank computes for longer than it sends weights, or their gradients.

    flops, bandwidth: a rank's, per second. A weight of `itemsize` bytes is gathered for 2 FLOPs per
    token in forward (stage 3). In backward it is gathered and its gradient scattered, or that is
    all-reduced (data parallelism), for 4. Austin et al., "How to Scale Your Model", 2025.
    """
    return itemsize / 2 * flops / bandwidth


# ---- demonstration -------------------------------------------------------------------------------


def memory_ledger(model, optimizer):
    """Bytes of the storages that this rank holds: {"parameters", "gradients", "optimizer"}.

    model: one, or a list of those that share the optimizer. A storage that several kinds of tensors
    share counts for the first of them.
    """
    models = model if isinstance(model, list) else [model]
    parameters = [parameter for model in models for parameter in model.parameters()]
    rows = list(optimizer._shards.rows) if isinstance(optimizer, ZeroRedundancyOptimizer) else []
    for model in models:
        if isinstance(model, FullyShardedDataParallel):
            rows += model._units.rows
            parameters += [memory.bytes for memory in model._units.memories]
    pieces = [piece for row in rows for piece in row.pieces]
    sums = [part for row in rows for part in (row.flat_grad, row.sharded_grad, row.incoming)]
    states = getattr(optimizer, "optimizer", optimizer).state.values()
    kinds = {
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters] + sums,
        "optimizer": [value for state in states for value in state.values()] + pieces,
    }
    seen, ledger = set(), Counter()
    for kind, tensors in kinds.items():
        for tensor in filter(torch.is_tensor, tensors):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                ledger[kind] += storage.nbytes()
    return ledger


def _demonstrate():
    rank, world_size = rank_and_size()
    layer = lambda: nn.Sequential(nn.Linear(480, 480, bias=False), nn.GELU())
    make = lambda: nn.Sequential(*[layer() for _ in range(6)])
    torch.manual_seed(0)
    plain = make()  # 480 x 480: P = 1 to 6 divide it into shards without padding
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    inputs = torch.randn(3, 8 * world_size, 480)
    _train(plain, torch.optim.AdamW(plain.parameters()), inputs)
    for stage in (1, 2, 3):
        module = make()
        module.load_state_dict(start)
        if stage == 3:
            model = FullyShardedDataParallel(module, units=module)
            optimizer = torch.optim.AdamW(model.parameters())
        else:
            model, adamw = module, torch.optim.AdamW
            optimizer = ZeroRedundancyOptimizer(
                module.parameters(), adamw, shard_gradients=stage == 2, bucket_cap_mb=1
            )
        with count_bytes() as traffic:
            _train(model, optimizer, inputs.chunk(world_size, 1)[rank])
        held = memory_ledger(model, optimizer).total()
        whole = model.state_dict()
        error = max((whole[name] - value).abs().max() for name, value in plain.state_dict().items())
        if rank == 0:
            count = sum(parameter.numel() for parameter in plain.parameters())
            sent = traffic.bytes() // len(inputs)
            print(
                f"stage {stage}: a step sends {sent} bytes (claimed "
                f"{zero_bytes(stage, 4 * count, world_size)}); {held / count:.2f} bytes held per "
                f"parameter (claimed {zero_memory(stage, world_size, 4, 4, 8):.2f}); "
                f"largest error {error:.0e}"
            )


def _train(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    run_ranks(_demonstrate)
