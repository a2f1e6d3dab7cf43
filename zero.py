"""ZeRO: data parallelism in which no rank keeps what it can fetch in time.

P replicas hold P copies of everything that training needs. Of all that a rank uses its gradients
only to update, and each element could be updated by one rank alone; so give each rank a shard, a
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
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from collectives import (
    ReduceOp,
    all_gather_single,
    all_reduce,
    broadcast,
    check_parameters,
    count_bytes,
    dist,
    gather_objects,
    rank_and_size,
    reduce_scatter_bytes,
    reduce_scatter_single,
    run_ranks,
)
from ddp import (
    Backward,
    DistributedDataParallel,
    FlatLayout,
    accumulates,
    before_backward,
    check_finite,
    check_whole,
    clip_grads_with_norm_,
    fill_buckets,
    float64_sum,
    get_total_norm,
    grad_dtype,
    in_backward,
    tensors_in,
    weakly,
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
    weights, gradients = parameters[0].new_zeros(2, layout.length)
    for view, parameter in zip(layout.views(weights), parameters):
        view.copy_(parameter)
    for view, parameter in zip(layout.views(gradients), parameters):
        view.copy_(parameter.grad)
    shard = weights.chunk(world_size)[rank].clone()
    gradient = torch.empty_like(shard)
    reduce_scatter_single(gradient, gradients, ReduceOp.AVG, group)
    update(shard, gradient)
    all_gather_single(weights, shard, group)
    for view, parameter in zip(layout.views(weights), parameters):
        parameter.copy_(view)


# ---- parameters in one row, and its shards -------------------------------------------------------


@dataclass
class _Settings:
    """What all rows of a model have in common."""

    group: object
    replicate_group: object
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    divide_factor: float | None
    error_if_nonfinite: bool

    def __post_init__(self):
        # replicas first: then what the first replica broadcasts reaches all of its ranks
        self.groups = [self.group]
        if self.replicate_group is not None:
            self.groups = [self.replicate_group, self.group]
        if self.divide_factor is None:
            self.divide_factor = math.prod(dist.get_world_size(group) for group in self.groups)
        if not self.divide_factor > 0:
            raise ValueError(f"gradient_divide_factor={self.divide_factor} must be positive")

    def broadcast(self, tensor):
        """Give all ranks the first one's."""
        for group in self.groups:
            broadcast(tensor, dist.get_global_rank(group or dist.group.WORLD, 0), group)

    def check(self, named):
        check_whole(named)
        for group in self.groups:
            check_parameters(named, group)
        ranges = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in named)
        for (_, end, name), (begin, _, other) in zip(ranges, ranges[1:]):
            if begin < end:
                raise ValueError(f"{name!r} and {other!r} share memory: tie them, or copy one")


class FlatParameter:
    """Parameters of one dtype as one row of elements, cut into shards, of which each rank owns one.

    `unsharded` is the row that the module computes with; `shard` is this rank's part of it, in the
    parameters' own dtype, and `pieces` what that holds of each parameter, as parameters of an
    optimizer: one dimension, maybe empty. Gradients go the opposite way: `flat_grad` is a full row,
    `gradient` this rank's shard of the sum.
    """

    def __init__(self, named, settings):
        self.names, self.originals = zip(*named)
        self.settings, self.group = settings, settings.group
        self.rank, world_size = rank_and_size(self.group)
        self.layout = FlatLayout(self.originals, world_size)
        begin = self.rank * self.layout.shard_size
        self.own = slice(begin, begin + self.layout.shard_size)
        self.dtype = self.originals[0].dtype
        floating = self.dtype.is_floating_point
        self.param_dtype = settings.param_dtype if settings.param_dtype and floating else self.dtype
        self.computed_with, self.pieces, self.gradient = self.originals, (), None
        self.reset()

    @property
    def reduce_dtype(self):
        """That in which gradients are summed: by default as autograd adds them up."""
        given = self.settings.reduce_dtype if self.dtype.is_floating_point else None
        return given or max(map(grad_dtype, self.computed_with), key=lambda dtype: dtype.itemsize)

    def first_row(self):
        """The first rank's parameters, as a row. Collective."""
        row = self.originals[0].new_zeros(self.layout.length)
        for view, parameter in zip(self.layout.views(row), self.originals):
            view.copy_(parameter.detach())
        self.settings.broadcast(row)
        return row

    def piece(self, i, tensor):
        """What this rank's shard holds of a full tensor, one that is like the i-th parameter."""
        begin, end = self.layout.ranges(self.rank)[i]
        return tensor.flatten()[begin:end]

    def join(self, pieces):
        """The full tensors of which each rank passes its pieces. Collective."""
        shard = pieces[0].new_zeros(self.layout.shard_size)
        for part, piece in zip(self.layout.pieces(shard, self.rank), pieces):
            part.copy_(piece.detach())
        row = shard.new_empty(self.layout.length)
        all_gather_single(row, shard, self.group)
        return [view.clone() for view in self.layout.views(row)]

    def unshard(self):
        """Begin to collect every rank's shard in the full row; returns the Work."""
        shard = self.shard.to(self.param_dtype)
        return all_gather_single(self.unsharded, shard, self.group, async_op=True)

    # -- gradients

    def reset(self):
        """No gradient is on its way."""
        self.flat_grad, self.grad_views, self.missing = None, (), set()
        self.incoming = self.work = None
        self.sums = {}

    def alloc_grad(self):
        """Memory for a full row of gradients."""
        self.flat_grad = self.shard.new_empty(self.layout.length, dtype=self.reduce_dtype)
        for padding in self.layout.padding(self.flat_grad):
            padding.zero_()
        self.grad_views = self.layout.views(self.flat_grad)
        self.missing = set(range(len(self.names)))

    def add_gradient(self, i, gradient):
        """Put a gradient of the i-th parameter into the row."""
        if self.flat_grad is None:
            self.alloc_grad()
        view = self.grad_views[i]
        view.copy_(gradient) if i in self.missing else view.add_(gradient)
        self.missing.discard(i)
        if self.settings.error_if_nonfinite:
            self.sums[self.names[i]] = float64_sum(view)

    def is_full(self):
        """Whether every parameter's gradient is there."""
        return self.flat_grad is not None and not self.missing

    def reduce(self):
        """Begin to sum the rows of all ranks; a parameter without gradient counts as zero."""
        if self.flat_grad is None:
            self.alloc_grad()
        for i in self.missing:
            self.grad_views[i].zero_()
        self.incoming = self.flat_grad.new_empty(self.layout.shard_size)
        row, self.flat_grad, self.grad_views = self.flat_grad, None, ()
        self.work = reduce_scatter_single(self.incoming, row, group=self.group, async_op=True)

    def finish(self, dtype):
        """Add this rank's shard of the sum to its gradient, which is of `dtype`."""
        self.work.wait()
        if self.settings.replicate_group is not None:
            all_reduce(self.incoming, group=self.settings.replicate_group)
        if self.settings.divide_factor != 1:
            self.incoming.div_(self.settings.divide_factor)
        incoming, self.incoming, self.work = self.incoming.to(dtype), None, None
        self.gradient = incoming if self.gradient is None else self.gradient.add_(incoming)

    def gradient_pieces(self):
        """What this rank's shard of the sum holds of each parameter."""
        return self.layout.pieces(self.gradient, self.rank)


def _check_backward(flats, group):
    """After a backward pass: no gradient came too late, and all were finite on this rank."""
    if late := [name for flat in flats if flat.flat_grad is not None for name in flat.names]:
        raise RuntimeError(f"a gradient came after those of its row were summed: {', '.join(late)}")
    _check_finite(flats, group)


def _check_finite(flats, group):
    sums = {name: value for flat in flats for name, value in flat.sums.items()}
    for flat in flats:
        flat.sums = {}
    check_finite(sums, group)


def _check_any(gradients):
    if not gradients:
        raise RuntimeError("no parameter has a gradient")


# ---- optimizer state: full on one side, in pieces on the other -----------------------------------


def _full_state(optimizer, flats, place):
    """The state of an optimizer of pieces as one of whole parameters: {place[piece]: {key: value}}.

    Collective. What has its piece's shape on every rank is part of a tensor of the parameter's
    shape; anything else is the same on all ranks that have it, which empty pieces may not.
    """
    state = {}
    for flat in flats:
        own = [optimizer.state.get(piece, {}) for piece in flat.pieces]
        described = [
            {key: _describe(value, piece) for key, value in values.items()}
            for values, piece in zip(own, flat.pieces)
        ]
        ranks = gather_objects(described, flat.group)
        for key in dict.fromkeys(key for rank in ranks for values in rank for key in values):
            found = [[rank[i][key] for rank in ranks if key in rank[i]] for i in range(len(own))]
            dtypes = [dtype for some in found for dtype, _ in some]
            if None not in dtypes:
                pairs = zip(own, flat.pieces)
                parts = [values.get(key, piece.new_zeros(piece.shape)) for values, piece in pairs]
                wholes = flat.join([part.to(dtypes[0]) for part in parts])
            else:
                wholes = [some[0][1] if some else None for some in found]
            for piece, some, whole in zip(flat.pieces, found, wholes):
                if some:
                    state.setdefault(place[piece], {})[key] = whole
    return dict(sorted(state.items()))


def _describe(value, piece):
    """(dtype, or None for what is no part of a tensor; the value, if it may be none)."""
    if not torch.is_tensor(value):
        return None, value
    is_part = value.shape == piece.shape
    known = value.cpu() if value.numel() == 1 or not is_part else None
    return value.dtype if is_part else None, known


_SCALARS = ("step", "mu_product", "eta", "mu")  # of Adam, NAdam, ASGD: whatever the parameter


def _load_full_state(optimizer, flats, place, lengths, state_dict):
    """The opposite: give an optimizer of pieces its part of the state of whole parameters.

    lengths: how many parameters, trainable or not, each of its groups has.
    """
    where = {piece: (flat, i) for flat in flats for i, piece in enumerate(flat.pieces)}
    groups, state = [], {}
    packed = optimizer.state_dict()["param_groups"]
    found = [len(group["params"]) for group in state_dict["param_groups"]]
    if found != lengths:
        raise ValueError(f"state_dict has groups of {found} parameters, the optimizer of {lengths}")
    for group, own, theirs in zip(optimizer.param_groups, packed, state_dict["param_groups"]):
        groups.append({**theirs, "params": own["params"]})
        for number, piece in zip(own["params"], group["params"]):
            (flat, i), state[number] = where[piece], {}
            for key, value in state_dict["state"].get(place[piece], {}).items():
                if torch.is_tensor(value) and key not in _SCALARS:
                    if value.shape == flat.layout.shapes[i]:
                        value = flat.piece(i, value).clone()
                    elif value.numel() > 1:
                        found, needed = tuple(value.shape), tuple(flat.layout.shapes[i])
                        raise ValueError(f"{key} of {flat.names[i]!r} is {found}, not {needed}")
                state[number][key] = value
    optimizer.load_state_dict({"state": state, "param_groups": groups})


# ---- stages 1 and 2: whole parameters, an optimizer of shards ------------------------------------


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """Runs `optimizer_class(..., **defaults)` on this rank's shard of all elements: ZeRO-1 and -2.

    Stage 1: step() reduce-scatters the gradients that backward has left, updates the shard and
    all-gathers the parameters, a row of at most `bucket_cap_mb` MiB after the other; under
    DistributedDataParallel, which sums them too, it sums equal ones. Stage 2, shard_gradients=True:
    a gradient leaves for its owner when backward has filled its row, and the shards add up over
    backward passes, each of which must reach some parameter on every rank. Its .grad then only says
    so: zero_grad() of a module or optimizer may zero it, and all else is refused,
    DistributedDataParallel too.

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
        names = ("LBFGS", "Adafactor", "Muon", "SparseAdam")
        if any(issubclass(optimizer_class, getattr(torch.optim, name, ())) for name in names):
            raise ValueError(
                f"{optimizer_class.__name__} does not update each element by itself, "
                "which an optimizer of shards must"
            )
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb} must be positive")
        self._settings = _Settings(
            process_group,
            replicate_group,
            param_dtype,
            reduce_dtype,
            gradient_divide_factor,
            error_if_nonfinite,
        )
        self._shard_gradients, self._cap_bytes = shard_gradients, int(bucket_cap_mb * 2**20)
        self._flats, self._place, self.optimizer = [], {}, None
        self._backward = Backward(self._begin_backward, self._end_backward, self._failed)
        self._next, self._reduced = 0, None
        super().__init__(params, defaults)
        if not self._flats:
            raise ValueError("there are no trainable parameters")
        self.optimizer = optimizer_class(map(self._pieces_of, self.param_groups), **defaults)
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
            self.optimizer.add_param_group(self._pieces_of(self.param_groups[-1]))

    def _shard_group(self, group, number):
        names = group.get("param_names") or [
            f"{i} of group {number}" for i in range(len(group["params"]))
        ]
        named = list(zip(names, group["params"]))
        self._settings.check(named)
        for parameter in group["params"]:
            if not parameter.requires_grad:
                self._settings.broadcast(parameter.detach())
                if self._settings.param_dtype and parameter.is_floating_point():
                    parameter.data = parameter.data.to(self._settings.param_dtype)
        # Backward runs from the last layer to the first, which is the order rows should fill in.
        names = {parameter: name for name, parameter in named[::-1] if parameter.requires_grad}
        for bucket in fill_buckets(list(names), self._cap_bytes):
            flat = FlatParameter([(names[p], p) for p in bucket], self._settings)
            number = len(self._flats)
            self._flats.append(flat)
            row = flat.first_row()
            flat.unsharded = row.to(flat.param_dtype)
            own = row[flat.own]
            flat.shard = own if flat.unsharded is row else own.clone()
            flat.pieces = [nn.Parameter(p) for p in flat.layout.pieces(flat.shard, flat.rank)]
            for parameter, view in zip(flat.originals, flat.layout.views(flat.unsharded)):
                parameter.data = view
            for i, parameter in enumerate(flat.originals):
                self._place[parameter] = number, i
                if self._shard_gradients:
                    parameter.register_hook(weakly(self._gradient_comes))
                    parameter.register_post_accumulate_grad_hook(weakly(self._gradient_ready))
                elif flat.reduce_dtype.itemsize > parameter.dtype.itemsize:
                    parameter.grad_dtype = flat.reduce_dtype

    def _pieces_of(self, group):
        pieces = _pieces(self._flats)
        own = [pieces[parameter] for parameter in group["params"] if parameter in pieces]
        return {key: v for key, v in group.items() if key != "param_names"} | {"params": own}

    # -- gradients of stage 2

    def _gradient_comes(self, gradient):
        """Before autograd adds it to .grad."""
        if accumulates():
            self._backward.enter()

    def _begin_backward(self):
        """Autograd adds to nothing, whether the last gradient was sent or set to None since."""
        self._next = 0
        for parameter, (number, i) in self._place.items():
            if isinstance(parameter.grad, _SentGradient):
                parameter.grad = None
            elif parameter.grad is None:
                self._zero(number, i)

    def _failed(self):
        for flat in self._flats:
            flat.reset()

    def _zero(self, number, i):
        if self._flats[number].gradient is not None:
            self._flats[number].gradient_pieces()[i].zero_()

    @torch.no_grad()
    def _gradient_ready(self, parameter):
        if parameter.grad is None:  # its backward has put it off
            return
        number, i = self._place[parameter]
        self._flats[number].add_gradient(i, parameter.grad)
        parameter.grad = None
        while self._next < len(self._flats) and self._flats[self._next].is_full():
            self._reduce_next()

    def _reduce_next(self):
        """Collectives need the same order on every rank; two rows of gradients exist at most."""
        self._flats[self._next].reduce()
        if self._next:
            self._finish(self._flats[self._next - 1])
        self._next += 1

    @staticmethod
    def _finish(flat):
        flat.finish(flat.reduce_dtype)

    def _end_backward(self):
        while self._next < len(self._flats):
            self._reduce_next()
        self._finish(self._flats[-1])
        for parameter, (number, i) in self._place.items():
            if parameter.grad is None:
                parameter.grad = _SentGradient(parameter, partial(weakly(self._zero), number, i))
        _check_backward(self._flats, self._settings.group)

    # -- gradients of stage 1

    def _gradients(self):
        """What backward has left, each with a number that changes with it."""
        gradients = [parameter.grad for parameter in self._place]
        return [(gradient, gradient is not None and gradient._version) for gradient in gradients]

    def _are_reduced(self):
        """Whether the shards of the sum are those of the gradients that are there now."""
        if self._reduced is None:
            return False
        pairs = zip(self._reduced, self._gradients())
        return all(g is other and version == v for (g, version), (other, v) in pairs)

    def _reduced_rows(self):
        """Each row, once its gradients are summed; copies of two rows exist at most."""
        if all(parameter.grad is None for parameter in self._place):
            raise RuntimeError("step() before backward(): no parameter has a gradient")
        self._reduce(self._flats[0])
        for flat, next_flat in zip_longest(self._flats, self._flats[1:]):
            if next_flat is not None:
                self._reduce(next_flat)
            self._finish(flat)
            yield flat

    @staticmethod
    def _reduce(flat):
        flat.reset()
        flat.gradient = None
        for i, parameter in enumerate(flat.originals):
            if parameter.grad is not None:
                flat.add_gradient(i, parameter.grad)
        flat.reduce()

    @torch.no_grad()
    def reduce_gradients(self):
        """Stage 1: sum the gradients before step(), which then starts from these. Collective.

        Returns {parameter: (first element, piece)}: what this rank has of the sum, of a flattened
        gradient. The pieces may be scaled in place.
        """
        pieces = {}
        for flat in self._reduced_rows():
            ranges = flat.layout.ranges(flat.rank)
            for parameter, (begin, _), piece in zip(flat.originals, ranges, flat.gradient_pieces()):
                pieces[parameter] = begin, piece
        self._reduced = self._gradients()
        return pieces

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale the gradients to a norm of at most `max_norm`; returns their norm. Collective.

        Call it after the last backward, before step().
        """
        own = []
        if not self._shard_gradients:  # a further backward starts from .grad
            self.reduce_gradients()
            own = [p.grad for p in self._place if p.grad is not None]
        gradients = [flat.gradient for flat in self._flats if flat.gradient is not None]
        _check_any(gradients)
        norm = get_total_norm(gradients, norm_type, [self._settings.group])
        clip_grads_with_norm_([*gradients, *own], max_norm, norm)
        if not self._shard_gradients:
            self._reduced = self._gradients()
        return norm

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for flat in self._flats:
            flat.reset()
            flat.gradient = None
        self._reduced = None

    # -- update

    @torch.no_grad()
    def step(self, closure=None):
        """Update this rank's shard and gather everybody's. Collective."""
        with torch.enable_grad() if closure else nullcontext():
            loss = closure() if closure else None
        for group in self.param_groups:
            for i, parameter in enumerate(group["params"]):
                if parameter.requires_grad != (parameter in self._place):
                    raise RuntimeError(f"parameter {i} was frozen, or thawed, after it was sharded")
        for flat in self._flats:
            self._follow(flat)
        rows = self._flats
        if self._shard_gradients:
            self._check_sent()
        elif not self._are_reduced():
            rows = self._reduced_rows()
        self._copy_options(self.param_groups, self.optimizer.param_groups)
        works = []
        for flats in self._updated_together(rows):
            for flat in flats:
                for piece, part in zip(flat.pieces, flat.gradient_pieces()):
                    piece.grad = part.to(flat.dtype)
            self.optimizer.step()
            for flat in flats:
                for piece in flat.pieces:
                    piece.grad = None
                if not self._shard_gradients:
                    flat.gradient = None
                if len(works) == 2:  # each holds a copy of its shard
                    works.pop(0).wait()
                works.append(flat.unshard())
        self._copy_options(self.optimizer.param_groups, self.param_groups)
        for work in works:
            work.wait()
        if not self._shard_gradients:
            self._reduced = None
            _check_finite(self._flats, self._settings.group)
        return loss

    def _updated_together(self, rows):
        """One row is updated while the next one arrives and the last one leaves.

        But PyTorch's optimizers alone are known to keep nothing in their groups, such as a count of
        steps: others make one step of all rows.
        """
        if type(self.optimizer).__module__.startswith("torch.optim."):
            return ([flat] for flat in rows)
        return [list(rows)]

    @staticmethod
    def _copy_options(sources, targets):
        """Learning rates and the like, and what an optimizer keeps beside them."""
        for source, target in zip(sources, targets):
            target.update({k: v for k, v in source.items() if k not in ("params", "param_names")})

    def _check_sent(self):
        """Stage 2: what was zeroed since it was sent counts as zero; nothing else may be there."""
        if any(flat.gradient is None for flat in self._flats):
            raise RuntimeError("step() before backward(): no parameter has a gradient")
        for parameter, (number, i) in self._place.items():
            if parameter.grad is None:
                self._zero(number, i)
            elif not isinstance(parameter.grad, _SentGradient):
                name = self._flats[number].names[i]
                raise RuntimeError(
                    f"{name!r} has a gradient that is not ZeRO-2's: set by hand, or by "
                    "DistributedDataParallel, which reduces what ZeRO-2 already has (use stage 1)"
                )

    @staticmethod
    def _follow(flat):
        """Take over what somebody has changed in the parameters since the last step."""
        for name, parameter, view in zip(
            flat.names, flat.originals, flat.layout.views(flat.unsharded)
        ):
            if parameter.shape != view.shape or parameter.dtype != view.dtype:
                found, needed = (f"{tuple(t.shape)} {t.dtype}" for t in (parameter, view))
                raise RuntimeError(f"{name!r} has become {found}, its optimizer has {needed}")
            if parameter.data_ptr() != view.data_ptr():
                parameter.data = view.copy_(parameter)
        if flat.dtype != flat.param_dtype:
            rounded, own = flat.shard.to(flat.param_dtype), flat.unsharded[flat.own]
            flat.shard.copy_(torch.where(own == rounded, flat.shard, own.to(flat.dtype)))

    # -- state

    def _places(self):
        """piece -> its parameter's number in a state dict."""
        pieces = _pieces(self._flats)
        parameters = [p for group in self.param_groups for p in group["params"]]
        return {pieces[p]: number for number, p in enumerate(parameters) if p in pieces}

    @torch.no_grad()
    def state_dict(self):
        """The state dict of `optimizer_class` for whole parameters, on every rank. Collective.

        Where param_dtype differs from the parameters' own, with the exact ones as "master".
        """
        place, state_dict = self._places(), super().state_dict()
        state = _full_state(self.optimizer, self._flats, place)
        for flat in self._flats:
            self._follow(flat)
            if flat.dtype != flat.param_dtype:
                for piece, master in zip(flat.pieces, flat.join(flat.pieces)):
                    state.setdefault(place[piece], {})["master"] = master
        return {"state": state, "param_groups": state_dict["param_groups"]}

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Take this rank's part of a full state dict; load the parameters before.

        Raises ValueError for other parameter groups or shapes.
        """
        place = self._places()
        masters = {n: values.get("master") for n, values in state_dict["state"].items()}
        plain = {
            number: {key: value for key, value in values.items() if key != "master"}
            for number, values in state_dict["state"].items()
        }
        lengths = [len(group["params"]) for group in self.param_groups]
        plain = {**state_dict, "state": plain}
        _load_full_state(self.optimizer, self._flats, place, lengths, plain)
        self._copy_options(self.optimizer.param_groups, self.param_groups)
        for flat in self._flats:
            self._follow(flat)
            for i, (parameter, piece) in enumerate(zip(flat.originals, flat.pieces)):
                exact = masters.get(place[piece])
                if exact is not None and flat.dtype != flat.param_dtype:
                    piece.copy_(flat.piece(i, exact))
                    parameter.copy_(exact)

    def __getstate__(self):
        raise RuntimeError("ZeRO's optimizer cannot be copied or pickled: call state_dict()")


def _pieces(flats):
    """{parameter: its piece}"""
    return {p: piece for flat in flats for p, piece in zip(flat.originals, flat.pieces)}


class _SentGradient(torch.Tensor):
    """The .grad of a parameter whose gradient is on its owner: has its shape, and can be zeroed."""

    @staticmethod
    def __new__(cls, parameter, zero):
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


# ---- stage 3: parameters that are there when their turn comes ------------------------------------


class _Memory:
    """Bytes that several rows live in, one after the other; freed and had again in one place.

    Autograd keeps views of parameters, not copies: what it kept in forward is right again in
    backward because the same row is gathered into the same storage.
    """

    def __init__(self, nbytes, device):
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.nbytes = nbytes

    def have(self):
        if self.bytes.untyped_storage().nbytes() < self.nbytes:
            self.bytes.untyped_storage().resize_(self.nbytes)

    def free(self):
        self.bytes.untyped_storage().resize_(0)


class _ShardedParameter(FlatParameter):
    """A row whose originals become the pieces; whole parameters take their places in the modules.

    places: {parameter: [(module, name)]}, where the modules have it.
    """

    def __init__(self, named, settings, places):
        super().__init__(named, settings)
        self.places = [places[parameter] for parameter in self.originals]
        self.grad_dtype = grad_dtype(self.originals[0])
        self.shard = self.first_row()[self.own].clone()
        for parameter, (begin, _), piece in zip(
            self.originals, self.layout.ranges(self.rank), self._views()
        ):
            parameter.first, parameter.whole_shape = begin, parameter.shape
            parameter.data = piece
        self.pieces = self.originals

    def _views(self):
        return self.layout.pieces(self.shard, self.rank)

    def live_in(self, row):
        """Make the whole parameters views of this memory."""
        self.unsharded, self.whole = row, []
        self.computed_with = self.whole
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
                module._parameters[name] = parameter

    def follow(self):
        """Take over pieces that somebody has put in place of these, or moved elsewhere."""
        pieces = []
        for name, places, whole, old, view in zip(
            self.names, self.places, self.whole, self.pieces, self._views()
        ):
            found = {module._parameters[key] for module, key in places}
            piece = found.pop()
            piece = old if piece is whole else piece
            if found:
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
            if piece.data_ptr() != view.data_ptr():
                piece.data = view.copy_(piece.detach())
            if piece is not old:
                piece.first, piece.whole_shape = old.first, old.whole_shape
            pieces.append(piece)
        self.pieces = self.originals = tuple(pieces)
        self.put(pieces)


class _Unit:
    """Rows that come and go together, in memory that they share with other units."""

    def __init__(self, flats):
        self.flats, self.works = flats, None
        self.trainable = [flat for flat in flats if flat.pieces[0].requires_grad]

    def offsets(self):
        """Where in its memory each row begins, and the end of all."""
        starts = [0]
        for flat in self.flats:
            nbytes = flat.layout.length * flat.param_dtype.itemsize
            starts.append(starts[-1] + -(-nbytes // 128) * 128)
        return starts

    def live_in(self, memory):
        self.memory = memory
        for flat, start in zip(self.flats, self.offsets()):
            part = memory.bytes[start : start + flat.layout.length * flat.param_dtype.itemsize]
            flat.live_in(part.view(flat.param_dtype))

    def unshard(self):
        """Begin to gather the parameters."""
        if self.works is None:
            self.memory.have()
            self.works = [flat.unshard() for flat in self.flats]

    def wait(self):
        """Have the modules compute with the whole parameters, now that they are there."""
        for work in self.works:
            work.wait()
        for flat in self.flats:
            flat.put(flat.whole)

    def reshard(self):
        """Give the memory to the next unit; but not before all of this one has arrived in it."""
        if self.works is not None:
            self.put_pieces()
            for work in self.works:
                work.wait()
            self.works = None

    def put_pieces(self):
        for flat in self.flats:
            flat.put(flat.pieces)

    def check_outputs(self, outputs):
        """RuntimeError if a parameter leaves the unit, which its memory does not."""
        memory = self.memory.bytes.untyped_storage().data_ptr()
        for tensor in tensors_in(outputs):
            if memory and tensor.untyped_storage().data_ptr() == memory:
                raise RuntimeError(
                    f"what holds {self.flats[0].names[0]!r} returns a parameter, or a view of one, "
                    "whose memory is about to be another's: return a clone"
                )


class FullyShardedDataParallel(nn.Module):
    """Wraps a module of which each rank keeps a shard: ZeRO-3.

    `units` are submodules, such as a transformer's blocks, in the order in which forward runs them.
    A unit's parameters are gathered for its forward and for its backward pass, while the unit
    before it computes, and then dropped: two units are there at a time, in two buffers that all
    units share. Parameters in no unit, or in several, are there during the whole pass. Every rank
    must run the same units.

    Between passes the module's parameters *are* this rank's pieces: each parameter is cut down to
    one dimension, maybe empty, and keeps its identity, name and attributes, with two more: `first`,
    the place of its first element in the whole, and `whole_shape`. Any optimizer that treats each
    element by itself may update them. backward() leaves their gradients, summed over the ranks and
    divided by gradient_divide_factor (by default the number of ranks), and added to what earlier
    passes gave. state_dict() and load_state_dict() take whole tensors under the module's own names,
    also where this is part of another module; so do those for optimizers.

    param_dtype: that of the gathered parameters, and what floating-point inputs are cast to; the
    pieces keep their own. reduce_dtype, replicate_group and error_if_nonfinite are as for
    ZeroRedundancyOptimizer.

    A trainable parameter without gradient counts as zero. What a forward pass does to a parameter
    in place is lost. The norm of all gradients is that of clip_grad_norm_() here: torch.nn.utils'
    has this rank's pieces alone. A GradScaler must ask all ranks whether one of them is infinite:
    torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler does.

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
    ):
        super().__init__()
        self.module, self.process_group, self.param_dtype = module, process_group, param_dtype
        self._settings = _Settings(
            process_group,
            replicate_group,
            param_dtype,
            reduce_dtype,
            gradient_divide_factor,
            error_if_nonfinite,
        )
        named = list(module.named_parameters())
        if any(isinstance(submodule, DistributedDataParallel) for submodule in module.modules()):
            raise ValueError("the module holds a DistributedDataParallel: shard what that wraps")
        if not any(parameter.requires_grad for _, parameter in named):
            raise ValueError("there are no trainable parameters")
        self._settings.check(named)
        units = list(units)
        self._root, *self._units = map(_Unit, self._flats_of_units(units))
        self._flats = [flat for unit in (self._root, *self._units) for flat in unit.flats]
        self._share_memory(next(module.parameters()).device)
        for buffer in module.buffers():
            self._settings.broadcast(buffer)
        for i, unit in enumerate(units):
            # before all hooks of others, which may use the parameters
            before, after = partial(self._before_forward, i), partial(self._after_forward, i)
            unit.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            unit.register_forward_hook(after)
        self._turn_of = {  # parameter -> its unit's number, its row, its place there
            whole: (i, flat, j)
            for i, unit in enumerate((*self._units, self._root))
            for flat in unit.trainable
            for j, whole in enumerate(flat.whole)
        }
        for whole in self._turn_of:
            whole.register_post_accumulate_grad_hook(weakly(self._gradient_ready))
        self._backward = Backward(self._begin_backward, self._end_backward, self._failed)
        self._cursor, self._reducing = None, []  # the unit whose backward runs; rows under way
        self._inputs = [()] * len(units)
        self._register_load_state_dict_pre_hook(self._before_loading)

    def _flats_of_units(self, units):
        """Rows of the parameters in no unit or in several, then of each unit."""
        names = {submodule: name for name, submodule in self.module.named_modules()}
        prefixes = [names.get(unit) for unit in units]
        for i, prefix in enumerate(prefixes):
            others = prefixes[:i] + prefixes[i + 1 :]
            if not prefix or any(prefix == p or prefix.startswith(f"{p}.") for p in others):
                raise ValueError(f"units[{i}] is not a submodule, or inside of another unit")
        for i, unit in enumerate(units):
            if isinstance(unit, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
                raise ValueError(f"units[{i}] has no forward of its own: name what it holds")
        owners, places = {}, {}
        for module_name, submodule in self.module.named_modules(remove_duplicate=False):
            for name, parameter in submodule._parameters.items():
                if parameter is not None:
                    path = f"{module_name}.{name}"
                    inside = [i for i, p in enumerate(prefixes, 1) if path.startswith(f"{p}.")]
                    owners.setdefault(parameter, set()).add(inside[0] if inside else 0)
                    places.setdefault(parameter, []).append((submodule, name))
        # A row is of one dtype, and its gradients, all trainable or not. What carries other
        # attributes has a row of its own: tensor-parallel ranks, which hold parts of unlike sizes
        # of what they split, so have the same pieces of what they all hold.
        flats = [{} for _ in range(len(units) + 1)]
        for name, parameter in self.module.named_parameters():
            owner = owners[parameter].pop() if len(owners[parameter]) == 1 else 0
            kind = parameter.dtype, grad_dtype(parameter), parameter.requires_grad
            flats[owner].setdefault((*kind, *sorted(vars(parameter))), []).append((name, parameter))
        make = lambda named: _ShardedParameter(named, self._settings, places)
        return [[make(named) for named in kinds.values()] for kinds in flats]

    def _share_memory(self, device):
        """Even units live in one buffer, odd ones in another, the rest in a third."""
        self._memories = []
        for units in (self._units[0::2], self._units[1::2], [self._root]):
            largest = max((unit.offsets()[-1] for unit in units), default=0)
            self._memories.append(_Memory(largest, device))
            for unit in units:
                unit.live_in(self._memories[-1])
        self._free()

    def _free(self):
        for unit in (self._root, *self._units):
            unit.reshard()
        for memory in self._memories:
            memory.free()

    # -- forward

    def forward(self, *args, **kwargs):
        if self.param_dtype is not None:
            cast = lambda x: x.to(self.param_dtype) if x.is_floating_point() else x
            args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
        if self._cursor is not None and in_backward():
            raise RuntimeError("the module is recomputed in its own backward: checkpoint its units")
        self._recover()
        self._root.unshard()
        if self._units:
            self._prefetch(0, 1)
        self._root.wait()
        try:
            outputs = self.module(*args, **kwargs)
            self._root.check_outputs(outputs)
        finally:
            for unit in (self._root, *self._units):
                unit.reshard()
        if not torch.is_grad_enabled():
            self._free()
            return outputs
        self._versions = self._piece_versions()
        before_backward(partial(self._enter_backward, self._versions), outputs)
        return outputs

    @torch.no_grad()
    def _recover(self):
        """Forget what a pass that failed has left half-way; see what was done to the pieces."""
        self._cursor, self._reducing = None, []
        for unit in (self._root, *self._units):
            unit.reshard()
        self._follow()
        for flat in self._flats:
            flat.reset()

    def _follow(self):
        for flat in self._flats:
            flat.follow()
        pieces = [piece for flat in self._flats for piece in flat.pieces]
        if len(set(pieces)) < len(pieces):
            raise RuntimeError("parameters were tied after they were sharded: tie them before")

    def _piece_versions(self):
        return [piece._version for flat in self._flats for piece in flat.pieces]

    def _prefetch(self, i, direction):
        """Have unit i and the next one; the one before it must be done."""
        wanted = [j for j in (i, i + direction) if 0 <= j < len(self._units)]
        for j, unit in enumerate(self._units):
            if j not in wanted:
                unit.reshard()
        for j in wanted:
            self._units[j].unshard()

    def _before_forward(self, i, module, args, kwargs):
        if self._cursor is None:
            self._prefetch(i, 1)
        elif self._units[i].works is None:
            raise RuntimeError(f"units[{i}] is recomputed before its turn: checkpoint single units")
        self._units[i].wait()
        self._inputs[i] = tensors_in((args, kwargs))

    def _after_forward(self, i, module, args, outputs):
        self._units[i].check_outputs(outputs)
        if self._cursor is None:
            self._units[i].reshard()
        before_backward(partial(self._unit_backward, i), outputs, self._inputs[i])
        self._inputs[i] = ()

    # -- backward

    def _enter_backward(self, versions):
        """versions: those of the pieces in the forward pass that backward has come to."""
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True: a sharded module has no gradients of gradients")
        self._backward.enter()
        if versions != self._gathered:
            raise RuntimeError("the parameters were changed between forward and backward")

    def _begin_backward(self):
        self._gathered = self._piece_versions()
        self._cursor = len(self._units)
        self._accumulates = accumulates()
        self._root.unshard()
        if self._units:
            self._prefetch(len(self._units) - 1, -1)
        self._root.wait()

    def _failed(self):
        """Whoever looks at the parameters now sees the pieces; what is under way may come."""
        self._cursor = None
        for unit in (self._root, *self._units):
            if unit.works is not None:
                unit.put_pieces()

    @torch.no_grad()
    def _gradient_ready(self, whole):
        turn, flat, i = self._turn_of[whole]
        if turn == len(self._units):
            self._enter_backward(self._versions)
        if self._cursor is None or turn < self._cursor:
            raise RuntimeError(
                f"backward reached the parameters {', '.join(flat.names)} on a way other than "
                "through the outputs of their unit, or those of the module"
            )
        if whole.grad is not None:
            flat.add_gradient(i, whole.grad)
            whole.grad = None

    def _unit_backward(self, i):
        """The units between were skipped on this rank, but have their turn, as on all others."""
        self._enter_backward(self._versions)
        if i > self._cursor:  # of a second forward pass
            self._reduce(self._units[self._cursor])
            self._cursor = len(self._units)
        for j in range(self._cursor - 1, i - 1, -1):
            self._cursor = j
            self._prefetch(j, -1)
            if j + 1 < len(self._units):
                self._reduce(self._units[j + 1])
        self._units[i].wait()

    def _reduce(self, unit):
        """Sum a unit's gradients, while those of the one before arrive."""
        if self._accumulates:
            for flat in unit.trainable:
                flat.reduce()
            self._finish_reduction()
            self._reducing = unit.trainable

    @torch.no_grad()
    def _finish_reduction(self):
        for flat in self._reducing:
            if all(piece.grad is None for piece in flat.pieces):
                flat.gradient = None
            else:  # an optimizer may hold some of the pieces only, and somebody may set gradients
                if flat.gradient is None:
                    flat.gradient = torch.zeros_like(flat.shard, dtype=flat.grad_dtype)
                for piece, part in zip(flat.pieces, flat.gradient_pieces()):
                    if piece.grad is None:
                        part.zero_()
                    elif piece.grad.data_ptr() != part.data_ptr():
                        part.copy_(piece.grad)
            flat.finish(flat.grad_dtype)
            for piece, part in zip(flat.pieces, flat.gradient_pieces()):
                piece.grad = part
                for hook in (piece._post_accumulate_grad_hooks or {}).values():
                    hook(piece)
        self._reducing = []

    def _end_backward(self):
        if self._units:
            self._unit_backward(0)
            self._reduce(self._units[0])
        self._reduce(self._root)
        self._finish_reduction()
        self._cursor = None
        self._free()
        _check_backward(self._flats, self.process_group)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale the gradients to a norm of at most `max_norm`; returns their norm. Collective."""
        pieces = [piece for flat in self._flats for piece in flat.pieces]
        gradients = [piece.grad for piece in pieces if piece.grad is not None]
        _check_any(gradients)
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
        self._follow()
        own = self.module.state_dict(prefix=prefix, keep_vars=True)
        whole = {}
        for flat in self._flats:
            whole.update(zip(flat.pieces, flat.join(flat.pieces)))
        for name, value in own.items():
            if isinstance(value, nn.Parameter):
                own[name] = whole[value]
            elif torch.is_tensor(value):
                own[name] = value if keep_vars else value.detach().clone()
        if destination is None:
            return own
        destination.update(own)
        if hasattr(destination, "_metadata"):
            destination._metadata.update(own._metadata)
        return destination

    @torch.no_grad()
    def _before_loading(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        """Turn what load_state_dict() was given, whole tensors, into what the module has."""
        self._follow()
        where = {p: (flat, i) for flat in self._flats for i, p in enumerate(flat.pieces)}
        own = self.module.state_dict(keep_vars=True)
        for name in [name for name in state_dict if name.startswith(prefix)]:
            value, short = state_dict.pop(name), name[len(prefix) :]
            piece = own.get(short)
            if isinstance(piece, nn.Parameter):
                if value.shape != piece.whole_shape:
                    found, needed = tuple(value.shape), tuple(piece.whole_shape)
                    errors.append(f"size mismatch for {name}: {found}, not {needed}")
                    value = piece
                else:
                    flat, i = where[piece]
                    value = flat.piece(i, value).clone()
            state_dict[f"{prefix}module.{short}"] = value

    def optimizer_state_dict(self, optimizer):
        """The state dict of an optimizer of parameters(), for whole parameters. Collective."""
        state = _full_state(optimizer, self._flats, self._numbers(optimizer))
        return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}

    def load_optimizer_state_dict(self, optimizer, state_dict):
        """Give an optimizer of parameters() its part of a state dict for whole parameters."""
        lengths = [len(group["params"]) for group in optimizer.param_groups]
        _load_full_state(optimizer, self._flats, self._numbers(optimizer), lengths, state_dict)

    def _numbers(self, optimizer):
        """piece -> its number in the optimizer's state dict."""
        self._follow()
        held = [piece for group in optimizer.param_groups for piece in group["params"]]
        if others := set(held) - {piece for flat in self._flats for piece in flat.pieces}:
            raise ValueError(f"the optimizer has {len(others)} parameters of other modules")
        return {piece: number for number, piece in enumerate(held)}

    def __deepcopy__(self, memo):
        raise RuntimeError(
            "a sharded module cannot be copied or pickled: call state_dict(), on every rank"
        )

    __getstate__ = lambda self: self.__deepcopy__(None)


# ---- cost ----------------------------------------------------------------------------------------


def zero_bytes(stage, nbytes, world_size):
    """Bytes that a rank sends in a step for rows of `nbytes`; stage 0 is data parallelism.

    In a row 64 elements of padding follow each parameter and each shard but one, at most.
    """
    return (2, 2, 2, 3)[stage] * reduce_scatter_bytes(nbytes, world_size)


def zero_memory(stage, world_size, parameter=2, gradient=2, optimizer=12):
    """Bytes per parameter that a rank holds, of so many for each; stage 0 is data parallelism.

    Without the padding of rows; 32-bit gradients take 4.
    """
    kinds = (optimizer, gradient, parameter)  # sharded in this order
    return sum(kinds[stage:]) + sum(kinds[:stage]) / world_size


def largest_model(stage, world_size, memory_bytes, parameter=2, gradient=2, optimizer=8):
    """Parameters of the largest model whose training state fits into each rank's memory."""
    return memory_bytes / zero_memory(stage, world_size, parameter, gradient, optimizer)


def memory_ledger(model, optimizer):
    """Bytes of the storages that this rank holds: {"parameters", "gradients", "optimizer"}.

    A storage that several kinds of tensors share counts for the first of them.
    """
    parameters = list(model.parameters())
    flats = getattr(model, "_flats", getattr(optimizer, "_flats", []))
    if isinstance(model, FullyShardedDataParallel):
        parameters += [memory.bytes for memory in model._memories]
    pieces = [piece for flat in flats for piece in flat.pieces]
    rows = [row for flat in flats for row in (flat.flat_grad, flat.gradient, flat.incoming)]
    states = getattr(optimizer, "optimizer", optimizer).state.values()
    kinds = {
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters] + rows,
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


# ---- demonstration -------------------------------------------------------------------------------


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
