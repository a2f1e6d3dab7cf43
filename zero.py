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
the size of the parameters. An all-reduce of gradients is a reduce-scatter and an all-gather, and
updating between the two costs nothing more (stages 1, 2); stage 3 gathers parameters twice.

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

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from collectives import (
    ReduceOp,
    all_gather_single,
    all_reduce,
    before_backward,
    broadcast,
    check_finite,
    check_parameters,
    count_bytes,
    dist,
    fill_buckets,
    rank_and_size,
    reduce_scatter_bytes,
    reduce_scatter_single,
    run_ranks,
    weakly,
)

# ---- a row of parameters, and its shards ---------------------------------------------------------


class _Flat:
    """Parameters as one row of elements, padded to P equal shards, of which each rank owns one.

        | weight                | bias | weight            | padding |
        | shard 0          | shard 1          | shard 2              |       P = 3

    `full` is the row that the module computes with; `shard` is this rank's part of it, in the
    parameters' own dtype, and `pieces` what that holds of each parameter: one dimension, maybe
    empty. Gradients go the opposite way: `row` is full, `gradient` this rank's shard of the sum.
    """

    def __init__(self, named, settings):
        self.names, self.parameters = zip(*named)
        self.settings, self.group = settings, settings.group
        rank, world_size = rank_and_size(self.group)
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.index = {parameter: i for i, parameter in enumerate(self.parameters)}
        size = -(-sum(self.sizes) // world_size)
        self.begin, self.end, self.length = rank * size, (rank + 1) * size, world_size * size
        self.dtype = self.parameters[0].dtype
        floating = self.dtype.is_floating_point
        self.param_dtype = settings.param_dtype if settings.param_dtype and floating else self.dtype
        self.reduce_dtype = settings.reduce_dtype or self.param_dtype
        self.gradient = self.incoming = self.work = None
        self.sums = {}
        self.close_row()

    def views(self, row):
        """Each parameter's elements of a full row, in its shape."""
        parts = row[: sum(self.sizes)].split(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes)]

    def cut(self, shard):
        """Each parameter's elements of this rank's shard."""
        pieces, offset = [], -self.begin
        for size in self.sizes:
            pieces.append(shard[max(0, offset) : max(0, offset + size)])
            offset += size
        return pieces

    def piece(self, i, tensor):
        """What this rank's shard holds of a full tensor, one that is like the i-th parameter."""
        offset = sum(self.sizes[:i])
        return tensor.flatten()[max(0, self.begin - offset) : max(0, self.end - offset)]

    def join(self, pieces):
        """The full tensors of which each rank passes its pieces. Collective."""
        shard = pieces[0].new_zeros(self.end - self.begin)
        for part, piece in zip(self.cut(shard), pieces):
            part.copy_(piece.detach())
        row = shard.new_empty(self.length)
        all_gather_single(row, shard, self.group)
        return [view.clone() for view in self.views(row)]

    def first_row(self):
        """The first rank's parameters, as a row. Collective."""
        row = self.parameters[0].new_zeros(self.length)
        for view, parameter in zip(self.views(row), self.parameters):
            view.copy_(parameter.detach())
        self.settings.broadcast(row)
        return row

    def live_in(self, full, shard):
        """Make the parameters views of `full`, and the pieces parameters in `shard`."""
        self.full, self.shard = full, shard
        for parameter, view in zip(self.parameters, self.views(full)):
            parameter.data = view
        pieces = zip(self.cut(shard), self.parameters)
        self.pieces = [nn.Parameter(piece, parameter.requires_grad) for piece, parameter in pieces]

    def gather(self):
        """Begin to collect every rank's shard in the full row; returns the Work."""
        shard = self.shard.to(self.param_dtype)
        return all_gather_single(self.full, shard, self.group, async_op=True)

    def open_row(self):
        """Memory for a row of gradients."""
        dtype = self.param_dtype if self.settings.keep else self.reduce_dtype
        self.row = self.full.new_empty(self.length, dtype=dtype)
        self.row[sum(self.sizes) :] = 0
        self.row_views, self.missing = self.views(self.row), set(self.parameters)

    def close_row(self):
        self.row, self.row_views, self.missing = None, (), set()

    def forget(self):
        """Whatever a backward pass that failed has left under way."""
        if self.work is not None:
            self.work.wait()
        self.incoming = self.work = None
        self.sums = {}
        self.close_row()

    def store(self, parameter):
        """Move a gradient into the row of gradients; with `keep` it stays there, as a view."""
        keep = self.settings.keep
        if self.row is None:
            self.open_row()
        view = self.row_views[self.index[parameter]]
        if parameter.grad is not view:
            if keep or parameter in self.missing:
                view.copy_(parameter.grad)
            else:
                view.add_(parameter.grad)
        parameter.grad = view if keep else None
        self.missing.discard(parameter)
        if self.settings.error_if_nonfinite:
            self.sums[self.names[self.index[parameter]]] = view.sum(dtype=torch.float64)

    def is_full(self):
        """Whether every parameter's gradient is there."""
        return self.row is not None and not self.missing

    def reduce(self):
        """Begin to sum the rows of all ranks; a parameter without gradient counts as zero."""
        keep = self.settings.keep
        if self.row is None:
            self.open_row()
        for parameter, view in zip(self.parameters, self.row_views):
            if parameter in self.missing or (keep and parameter.grad is None):
                view.zero_()
        row = self.row.to(self.reduce_dtype)
        self.incoming = row.new_empty(self.end - self.begin)
        self.work = reduce_scatter_single(self.incoming, row, group=self.group, async_op=True)
        if not keep:
            self.close_row()

    def finish(self, dtype):
        """Add this rank's shard of the sum to its gradient, which is of `dtype`."""
        self.work.wait()
        if self.settings.replicate_group is not None:
            all_reduce(self.incoming, group=self.settings.replicate_group)
        if self.settings.divide_factor != 1:
            self.incoming.div_(self.settings.divide_factor)
        incoming, self.incoming, self.work = self.incoming.to(dtype), None, None
        self.gradient = incoming if self.gradient is None else self.gradient.add_(incoming)


@dataclass
class _Settings:
    """What all rows of a model have in common; keep: gradients stay in their row until step()."""

    group: object
    replicate_group: object
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    divide_factor: float | None
    error_if_nonfinite: bool
    keep: bool = False

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
        for group in self.groups:
            check_parameters(named, group)


def _check_backward(flats, group):
    """After a backward pass: no gradient came too late, and all were finite on this rank."""
    if late := [name for flat in flats if flat.row is not None for name in flat.names]:
        raise RuntimeError(f"a gradient came after those of its row were summed: {', '.join(late)}")
    _check_finite(flats, group)


def _check_finite(flats, group):
    sums = {name: value for flat in flats for name, value in flat.sums.items()}
    for flat in flats:
        flat.sums = {}
    check_finite(sums, group)


def _clip(gradients, max_norm, norm_type, group, also=()):
    """Scale gradients, of which each rank has a shard, to a norm of at most `max_norm`.

    Returns the norm before. Tensors in `also` are scaled alike, but not counted. RuntimeError if
    there is no gradient.
    """
    if all(gradient is None for gradient in gradients):
        raise RuntimeError("no parameter has a gradient")
    gradients = [gradient for gradient in gradients if gradient is not None]
    total = gradients[0].new_zeros(1, dtype=torch.float64)
    norms = [
        torch.linalg.vector_norm(g, norm_type, dtype=torch.promote_types(g.dtype, torch.float32))
        for g in gradients
        if g.numel()
    ]
    norms = torch.cat([total, *(norm.double().view(1) for norm in norms)])
    if norm_type == torch.inf:
        total = norms.max()
        all_reduce(total, ReduceOp.MAX, group)
    else:
        total = norms.pow(norm_type).sum()
        all_reduce(total, ReduceOp.SUM, group)
        total = total.pow(1 / norm_type)
    coefficient = (max_norm / (total + 1e-6)).clamp(max=1)
    for gradient in (*gradients, *also):
        gradient.mul_(coefficient)
    return total


# ---- optimizer state: full on one side, in pieces on the other -----------------------------------


def _full_state(optimizer, flats, place):
    """The state of an optimizer of pieces as one of whole parameters: {place[piece]: {key: value}}.

    Collective. A value of a piece's shape is part of a tensor of its parameter's shape.
    """
    state = {}
    for flat in flats:
        held = [optimizer.state.get(piece, {}) for piece in flat.pieces]
        for key in dict.fromkeys(key for values in held for key in values):
            values = [values.get(key) for values in held]
            if any(_is_like(value, piece) for value, piece in zip(values, flat.pieces)):
                pairs = zip(values, flat.pieces)
                values = flat.join([p.new_zeros(p.shape) if v is None else v for v, p in pairs])
            else:
                values = [value.clone() if torch.is_tensor(value) else value for value in values]
            for piece, values_held, value in zip(flat.pieces, held, values):
                if key in values_held:
                    state.setdefault(place[piece], {})[key] = value
    return dict(sorted(state.items()))


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
                    if value.shape != flat.shapes[i]:
                        found, needed = tuple(value.shape), tuple(flat.shapes[i])
                        raise ValueError(f"{key} of {flat.names[i]!r} is {found}, not {needed}")
                    value = flat.piece(i, value).clone()
                state[number][key] = value
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _is_like(value, parameter):
    return torch.is_tensor(value) and value.shape == parameter.shape


# ---- stages 1 and 2: whole parameters, an optimizer of shards ------------------------------------


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """Runs `optimizer_class(..., **defaults)` on this rank's shard of all elements: ZeRO-1 and -2.

    Stage 1: step() reduce-scatters the gradients that backward has left, updates the shard and
    all-gathers the parameters. Stage 2, shard_gradients=True: a gradient leaves for its owner when
    backward has filled a row of at most `bucket_cap_mb` MiB; the shards add up over backward
    passes, each of which must reach some parameter on every rank.

    params: as for any optimizer; they start as the first rank's, and become views into rows.
    param_dtype: what they are converted to, the update being made on a copy in their old dtype, of
    the shard alone. reduce_dtype: in which gradients are summed, by default the parameters'.
    gradient_divide_factor: what their sum is divided by, by default the number of ranks; 1 where
    the loss has its global divisor. zero_grad() is this optimizer's: a module's knows nothing of
    shards. With replicate_group (HSDP) each of its ranks has a replica of the shards of
    process_group, and gradients are also summed over it. A trainable parameter without gradient
    counts as zero.

    Raises ValueError for an optimizer that does not treat each element by itself, for no trainable
    parameters, several devices, and parameters that differ between ranks; RuntimeError from step()
    without gradients, and with error_if_nonfinite if a gradient is not finite on this rank.
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
            keep=not shard_gradients,
        )
        self._keep, self._cap_bytes = not shard_gradients, int(bucket_cap_mb * 2**20)
        self._flats, self._flat_of, self.optimizer = [], {}, None
        self._in_backward, self._next, self._reduced = False, 0, False
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
        # Backward runs from the last layer to the first, which is the order rows should fill in.
        trainable = [pair for pair in named[::-1] if pair[1].requires_grad]
        for parameter in group["params"]:
            if not parameter.requires_grad:
                self._settings.broadcast(parameter.detach())
                if self._settings.param_dtype and parameter.is_floating_point():
                    parameter.data = parameter.data.to(self._settings.param_dtype)
        names = {parameter: name for name, parameter in trainable}
        for bucket in fill_buckets(list(names), self._cap_bytes):
            flat = _Flat([(names[parameter], parameter) for parameter in bucket], self._settings)
            row = flat.first_row()
            full = row.to(flat.param_dtype)
            own = row[flat.begin : flat.end]
            flat.live_in(full, own if full is row else own.clone())
            self._flats.append(flat)
            for parameter in flat.parameters:
                self._flat_of[parameter] = flat
                parameter.register_post_accumulate_grad_hook(weakly(self._gradient_ready))

    def _pieces_of(self, group):
        pieces = self._pieces()
        own = [pieces[parameter] for parameter in group["params"] if parameter in pieces]
        return {key: v for key, v in group.items() if key != "param_names"} | {"params": own}

    def _pieces(self):
        return {p: piece for flat in self._flats for p, piece in zip(flat.parameters, flat.pieces)}

    # -- gradients

    def _gradient_ready(self, parameter):
        if parameter.grad is None:  # its backward has put it off
            return
        flat = self._flat_of[parameter]
        flat.store(parameter)
        self._reduced = False
        if self._keep:
            return
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)
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

    def _finish_backward(self):
        while self._next < len(self._flats):
            self._reduce_next()
        self._finish(self._flats[-1])
        self._in_backward, self._next, self._reduced = False, 0, True
        _check_backward(self._flats, self._settings.group)

    def _begin_reduction(self):
        """Stage 1: the gradients, also those that backward has not left itself."""
        gradients = False
        for flat in self._flats:
            for parameter in flat.parameters:
                if parameter.grad is not None:
                    flat.store(parameter)
                    gradients = True
        if not gradients:
            raise RuntimeError("step() before backward(): no parameter has a gradient")
        for flat in self._flats:
            flat.gradient = None
            flat.reduce()

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale the gradients to a norm of at most `max_norm`; returns their norm. Collective.

        Call it after the last backward, before step().
        """
        rows = []
        if self._keep:  # step() starts from the shards, a further backward from the rows
            self.reduce_gradients()
            rows = [flat.row for flat in self._flats]
        gradients = [flat.gradient for flat in self._flats]
        return _clip(gradients, max_norm, norm_type, self._settings.group, rows)

    def reduce_gradients(self):
        """Stage 1: sum the gradients before step(), which then starts from these. Collective.

        Returns {parameter: (first element, piece)}: what this rank has of the sum, of a flattened
        gradient. The pieces may be scaled in place.
        """
        self._begin_reduction()
        self._reduced, pieces = True, {}
        for flat in self._flats:
            self._finish(flat)
            offset = 0
            for parameter, size, piece in zip(
                flat.parameters, flat.sizes, flat.cut(flat.gradient)
            ):
                pieces[parameter] = max(0, flat.begin - offset), piece
                offset += size
        return pieces

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        self._in_backward, self._next, self._reduced = False, 0, False
        for flat in self._flats:
            flat.gradient, flat.sums = None, {}
            if not self._keep:
                flat.forget()

    # -- update

    @torch.no_grad()
    def step(self, closure=None):
        """Update this rank's shard and gather everybody's. Collective."""
        with torch.enable_grad() if closure else nullcontext():
            loss = closure() if closure else None
        scatter = self._keep and not self._reduced
        if scatter:
            self._begin_reduction()
        elif any(flat.gradient is None for flat in self._flats):
            raise RuntimeError("step() before backward(): no parameter has a gradient")
        for group, pieces in zip(self.param_groups, self.optimizer.param_groups):
            pieces.update({key: group[key] for key in pieces if key != "params"})
        works = []
        for flat in self._flats:  # one shard is updated while the next comes and the last leaves
            if scatter:
                self._finish(flat)
            gradient = flat.gradient.to(flat.dtype)
            for piece, part in zip(flat.pieces, flat.cut(gradient)):
                piece.grad = part
            self.optimizer.step()
            for piece in flat.pieces:
                piece.grad = None
            works.append(flat.gather())
            if self._keep:
                flat.gradient = None
        for work in works:
            work.wait()
        if self._keep:
            self._reduced = False
            _check_finite(self._flats, self._settings.group)
        return loss

    # -- state

    def _places(self):
        """piece -> its parameter's number in a state dict."""
        pieces = self._pieces()
        parameters = [p for group in self.param_groups for p in group["params"]]
        return {pieces[p]: number for number, p in enumerate(parameters) if p in pieces}

    def state_dict(self):
        """The state dict of `optimizer_class` for whole parameters, on every rank. Collective.

        Where param_dtype differs from the parameters' own, with the exact ones as "master".
        """
        place, state_dict = self._places(), super().state_dict()
        state = _full_state(self.optimizer, self._flats, place)
        for flat in self._flats:
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
        for group, pieces in zip(self.param_groups, self.optimizer.param_groups):
            group.update({key: value for key, value in pieces.items() if key != "params"})
        for flat in self._flats:
            if flat.dtype == flat.param_dtype:
                continue
            for i, (parameter, piece) in enumerate(zip(flat.parameters, flat.pieces)):
                exact = masters.get(place[piece])
                exact = parameter if exact is None else exact
                piece.copy_(flat.piece(i, exact))
                parameter.copy_(exact)


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


class _Unit:
    """Flats that come and go together, in memory that they share with other units."""

    def __init__(self, flats):
        self.flats, self.works = flats, None
        self.trainable = [flat for flat in flats if flat.parameters[0].requires_grad]

    def offsets(self):
        """Where in its memory each flat begins, and the end of all."""
        starts = [0]
        for flat in self.flats:
            starts.append(starts[-1] + -(-flat.length * flat.param_dtype.itemsize // 64) * 64)
        return starts

    def live_in(self, memory):
        self.memory = memory
        for flat, start in zip(self.flats, self.offsets()):
            row = flat.first_row()
            part = memory.bytes[start : start + flat.length * flat.param_dtype.itemsize]
            flat.live_in(part.view(flat.param_dtype), row[flat.begin : flat.end].clone())

    def gather(self):
        if self.works is None:
            self.memory.have()
            self.works = [flat.gather() for flat in self.flats]

    def wait(self):
        for work in self.works:
            work.wait()

    def drop(self):
        if self.works is not None:
            self.wait()  # should nobody have: the memory is about to be another's
            self.works = None


class FullyShardedDataParallel(nn.Module):
    """Wraps a module of which each rank keeps a shard: ZeRO-3.

    `units` are submodules, such as a transformer's blocks, in the order in which forward runs them.
    A unit's parameters are gathered for its forward and for its backward pass, while the unit
    before it computes, and then dropped: two units are there at a time, in two buffers that all
    units share. Parameters in no unit, or in several, are there during the whole pass. Every rank
    must run the same units.

    parameters() are this rank's pieces, one per parameter and under its name: any optimizer that
    treats each element by itself may update them. backward() leaves their gradients, summed over
    the ranks and divided by gradient_divide_factor (by default the number of ranks), and added to
    what earlier passes gave. state_dict() and load_state_dict() take whole tensors under the
    module's own names; so do those for optimizers.

    param_dtype: that of the gathered parameters, and what floating-point inputs are cast to; the
    pieces keep their own. reduce_dtype, replicate_group, error_if_nonfinite and the errors raised
    are as for ZeroRedundancyOptimizer; ValueError also for units that are not distinct submodules.
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
        if not any(parameter.requires_grad for _, parameter in named):
            raise ValueError("there are no trainable parameters")
        self._settings.check(named)
        units = list(units)
        self._root, *self._units = map(_Unit, self._flats_of_units(units))
        self._flats = [flat for unit in (self._root, *self._units) for flat in unit.flats]
        self._share_memory()
        for buffer in module.buffers():
            self._settings.broadcast(buffer)
        for i, unit in enumerate(units):
            unit.register_forward_pre_hook(partial(self._before_forward, i))
            unit.register_forward_hook(partial(self._after_forward, i), with_kwargs=True)
        self._turn_of = {
            parameter: (i, flat)
            for i, unit in enumerate((*self._units, self._root))
            for flat in unit.trainable
            for parameter in flat.parameters
        }
        for parameter in self._turn_of:
            parameter.register_post_accumulate_grad_hook(weakly(self._gradient_ready))
        self._cursor, self._reducing = None, []  # the unit whose backward runs; flats under way

    def _flats_of_units(self, units):
        """Flats of the parameters in no unit or in several, then of each unit."""
        names = {submodule: name for name, submodule in self.module.named_modules()}
        prefixes = [names.get(unit) for unit in units]
        for i, prefix in enumerate(prefixes):
            others = prefixes[:i] + prefixes[i + 1 :]
            if not prefix or any(prefix == p or prefix.startswith(f"{p}.") for p in others):
                raise ValueError(f"units[{i}] is not a submodule, or inside of another unit")
        owners = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            inside = [i for i, prefix in enumerate(prefixes, 1) if name.startswith(f"{prefix}.")]
            owners.setdefault(parameter, set()).add(inside[0] if inside else 0)
        flats = [{} for _ in range(len(units) + 1)]  # a flat is of one dtype, all trainable or not
        for name, parameter in self.module.named_parameters():
            owner = owners[parameter].pop() if len(owners[parameter]) == 1 else 0
            kind = parameter.dtype, parameter.requires_grad
            flats[owner].setdefault(kind, []).append((name, parameter))
        return [[_Flat(named, self._settings) for named in kinds.values()] for kinds in flats]

    def _share_memory(self):
        """Even units live in one buffer, odd ones in another, the rest in a third."""
        device = next(self.module.parameters()).device
        self._memories = []
        for units in (self._units[0::2], self._units[1::2], [self._root]):
            largest = max((unit.offsets()[-1] for unit in units), default=0)
            self._memories.append(_Memory(largest, device))
            for unit in units:
                unit.live_in(self._memories[-1])
        self._free()

    def _free(self):
        for unit in (self._root, *self._units):
            unit.drop()
        for memory in self._memories:
            memory.free()

    # -- forward and backward

    def forward(self, *args, **kwargs):
        if self.param_dtype is not None:
            cast = lambda x: x.to(self.param_dtype) if x.is_floating_point() else x
            args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
        if self._cursor is not None and torch._C._current_graph_task_id() != -1:
            raise RuntimeError("the module is recomputed in its own backward: checkpoint its units")
        self._recover()
        self._root.gather()
        if self._units:
            self._take_turn(0, 1)
        self._root.wait()
        outputs = self.module(*args, **kwargs)
        for unit in (self._root, *self._units):
            unit.drop()
        if not torch.is_grad_enabled():
            self._free()
            return outputs
        before_backward(self._backward_begins, outputs)
        return outputs

    def _recover(self):
        """Forget what a pass that failed has left half-way."""
        self._cursor, self._reducing = None, []
        for unit in (self._root, *self._units):
            unit.drop()
        for flat in self._flats:
            flat.forget()

    def _gradient_ready(self, parameter):
        turn, flat = self._turn_of[parameter]
        if self._cursor is None or turn < self._cursor:
            raise RuntimeError(
                f"backward reached the parameters {', '.join(flat.names)} on a way other than "
                "through the outputs of their unit, or those of the module"
            )
        flat.store(parameter)

    def _take_turn(self, i, direction):
        """Have unit i and the next one; the one before it must be done."""
        wanted = [j for j in (i, i + direction) if 0 <= j < len(self._units)]
        for j, unit in enumerate(self._units):
            if j not in wanted:
                unit.drop()
        for j in wanted:
            self._units[j].gather()

    def _before_forward(self, i, module, args):
        if self._cursor is None:
            self._take_turn(i, 1)
        elif self._units[i].works is None:
            raise RuntimeError(f"units[{i}] is recomputed before its turn: checkpoint single units")
        self._units[i].wait()

    def _after_forward(self, i, module, args, kwargs, outputs):
        if self._cursor is None:
            self._units[i].drop()
        before_backward(partial(self._unit_backward, i), outputs, (args, kwargs))

    def _backward_begins(self):
        if self._cursor is None:
            self._cursor = len(self._units)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)
            self._root.gather()
            if self._units:
                self._take_turn(len(self._units) - 1, -1)
            self._root.wait()

    def _unit_backward(self, i):
        """The units between were skipped on this rank, but have their turn, as on all others."""
        self._backward_begins()
        if i > self._cursor:  # of a second forward pass
            self._reduce(self._units[self._cursor])
            self._cursor = len(self._units)
        for j in range(self._cursor - 1, i - 1, -1):
            self._cursor = j
            self._take_turn(j, -1)
            if j + 1 < len(self._units):
                self._reduce(self._units[j + 1])
        self._units[i].wait()

    def _reduce(self, unit):
        """Sum a unit's gradients, while those of the one before arrive."""
        for flat in unit.trainable:
            flat.reduce()
        self._finish_reduction()
        self._reducing = unit.trainable

    def _finish_reduction(self):
        for flat in self._reducing:
            if all(piece.grad is None for piece in flat.pieces):
                flat.gradient = None
            else:  # an optimizer may hold some of the pieces only, and somebody may set gradients
                for piece, part in zip(flat.pieces, flat.cut(flat.gradient)):
                    if piece.grad is None:
                        part.zero_()
                    elif piece.grad.data_ptr() != part.data_ptr():
                        part.copy_(piece.grad)
            flat.finish(flat.dtype)
            for piece, part in zip(flat.pieces, flat.cut(flat.gradient)):
                piece.grad = part
        self._reducing = []

    def _finish_backward(self):
        if self._units:
            self._unit_backward(0)
            self._reduce(self._units[0])
        self._reduce(self._root)
        self._finish_reduction()
        self._cursor = None
        self._free()
        _check_backward(self._flats, self.process_group)

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale the gradients to a norm of at most `max_norm`; returns their norm. Collective."""
        gradients = [piece.grad for flat in self._flats for piece in flat.pieces]
        return _clip(gradients, max_norm, norm_type, self.process_group)

    # -- state

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """This rank's piece of each parameter, under the name that the module has for it."""
        pieces = self._pieces()
        for name, parameter in self.module.named_parameters(prefix, recurse, remove_duplicate):
            yield name, pieces[parameter]

    def _pieces(self):
        return {p: piece for flat in self._flats for p, piece in zip(flat.parameters, flat.pieces)}

    def state_dict(self):
        """The module's own state dict, of whole tensors, on every rank. Collective."""
        whole = {}
        for flat in self._flats:
            whole.update(zip(flat.parameters, flat.join(flat.pieces)))
        state = self.module.state_dict(keep_vars=True)
        return {
            name: whole[value] if value in whole else value.detach().clone()
            for name, value in state.items()
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Take this rank's part of a module's state dict. ValueError for other names or shapes."""
        own = self.module.state_dict(keep_vars=True)
        if wrong := own.keys() ^ state_dict.keys():
            raise ValueError(f"state_dict and module differ in {', '.join(sorted(wrong))}")
        where = {p: (flat, i) for flat in self._flats for i, p in enumerate(flat.parameters)}
        for name, value in own.items():
            given = state_dict[name]
            if given.shape != value.shape:
                raise ValueError(f"{name} is {tuple(given.shape)}, not {tuple(value.shape)}")
            if value in where:
                flat, i = where[value]
                flat.pieces[i].copy_(flat.piece(i, given))
            else:
                value.copy_(given)

    def optimizer_state_dict(self, optimizer):
        """The state dict of an optimizer of parameters(), for whole parameters. Collective."""
        state = _full_state(optimizer, self._flats, _numbers(optimizer))
        return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}

    def load_optimizer_state_dict(self, optimizer, state_dict):
        """Give an optimizer of parameters() its part of a state dict for whole parameters."""
        lengths = [len(group["params"]) for group in optimizer.param_groups]
        _load_full_state(optimizer, self._flats, _numbers(optimizer), lengths, state_dict)


def _numbers(optimizer):
    pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
    return {piece: number for number, piece in enumerate(pieces)}


# ---- cost ----------------------------------------------------------------------------------------


def zero_bytes(stage, nbytes, world_size):
    """Bytes that a rank sends in a step for `nbytes` of parameters; stage 0 is data parallelism."""
    return (2, 2, 2, 3)[stage] * reduce_scatter_bytes(nbytes, world_size)


def zero_memory(stage, world_size, parameter=2, gradient=2, optimizer=12):
    """Bytes per parameter that a rank holds, of so many for each; stage 0 is data parallelism."""
    kinds = (optimizer, gradient, parameter)  # sharded in this order
    return sum(kinds[stage:]) + sum(kinds[:stage]) / world_size


def largest_model(stage, world_size, memory_bytes, parameter=2, gradient=2, optimizer=8):
    """Parameters of the largest model whose training state fits into each rank's memory."""
    return memory_bytes / zero_memory(stage, world_size, parameter, gradient, optimizer)


def memory_ledger(model, optimizer):
    """Bytes of the storages that this rank holds: {"parameters", "gradients", "optimizer"}.

    A storage that several kinds of tensors share counts for the first of them.
    """
    sharded = isinstance(model, FullyShardedDataParallel)
    flats = model._flats if sharded else getattr(optimizer, "_flats", [])
    whole = list(nn.Module.parameters(getattr(model, "module", model)))
    pieces = [piece for flat in flats for piece in flat.pieces]
    rows = [row for flat in flats for row in (flat.row, flat.gradient, flat.incoming)]
    states = getattr(optimizer, "optimizer", optimizer).state.values()
    kinds = {
        "parameters": whole + (pieces if sharded else []),
        "gradients": [parameter.grad for parameter in whole + pieces] + rows,
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
    make = lambda: nn.Sequential(*[nn.Sequential(nn.Linear(480, 480), nn.GELU()) for _ in range(6)])
    torch.manual_seed(0)
    plain = make()  # 480: P = 1 to 6 divide it
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
