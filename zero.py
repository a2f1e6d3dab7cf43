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
two costs nothing more (stages 1, 2); stage 3 gathers parameters twice, in forward and in backward.

    stage 3   gather    | 1 | 2 | 3 | 4 |   | 4 | 3  | 2  | 1  |         a unit comes before its
              compute       | 1 | 2 | 3 | 4 |   | 4  | 3  | 2  | 1  |    turn, and goes after it
              scatter                                | 4  | 3  | 2  | 1 |

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.

    torchrun --nproc-per-node 4 zero.py       bytes sent, claimed and counted, and the error
"""

import copy
import warnings
import weakref
from collections import deque
from functools import partial

import torch
from torch import nn
from torch.func import functional_call
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.checkpoint import checkpoint

from collectives import (
    ReduceOp, all_gather_single, all_gather_to_group, all_reduce, check_parameters, count_bytes,
    dist, rank_and_size, reduce_scatter_bytes, reduce_scatter_single, run_ranks,
)
from ddp import (
    DistributedDataParallel, FlatLayout, broadcast_first, check_whole, clip_grads_with_norm_,
    get_total_norm, grad_dtype, reduce_in_order, weakly,
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

    shard: this rank's part of the unit's parameters, flat; its gradient becomes that part of their
    sum over the ranks. The unit's own parameters are not read. The real one, further down, computes
    forward once, and gathers the next unit meanwhile.
    """
    names = [name for name, _ in unit.named_parameters()]

    def gather_and_use(x, shard):
        flat = all_gather_to_group(shard, 0, group)  # whose backward is a reduce-scatter
        return functional_call(unit, dict(zip(names, layout.views(flat))), x)

    # keeps x and the shard alone, and calls the function again when backward comes to it
    return checkpoint(gather_and_use, x, shard, use_reentrant=False)


# ---- stage 1 beside DDP: an optimizer of shards --------------------------------------------------


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """Runs `optimizer_class(..., **defaults)` on this rank's shard of all elements: ZeRO-1.

        backward    DistributedDataParallel averages all gradients, on every rank    2 (P-1)/P D
        step()      each rank updates its shard; an all-gather of the parameters       (P-1)/P D

    So does PyTorch's optimizer of this name, which deals out whole parameters where this one cuts
    a flat tensor. It sends 3 (P-1)/P D in all; FullyShardedDataParallel(..., stage=1) sends 2.

    params: they start as the first rank's, and become views of one flat tensor per dtype.
    optimizer_class: one that check_elementwise() accepts.

    state_dict() is this rank's: each saves, and loads, its own. step() raises RuntimeError for
    parameters that were moved or converted since.
    """

    def __init__(self, params, optimizer_class, process_group=None, **defaults):
        check_elementwise(optimizer_class)
        super().__init__(params, optimizer_class([torch.zeros(0)], **defaults).defaults)
        self.group, self.pieces, self._flats = process_group, {}, []
        rank, world_size = rank_and_size(process_group)
        given = [parameter for group in self.param_groups for parameter in group["params"]]
        check_whole(given)
        for dtype in dict.fromkeys(parameter.dtype for parameter in given):
            parameters = [parameter for parameter in given if parameter.dtype == dtype]
            layout = FlatLayout(parameters, world_size)
            flat = layout.pack(parameters)
            broadcast_first([flat], process_group)
            shard = flat.chunk(world_size)[rank]
            views = layout.views(flat), layout.pieces(shard, rank)
            for parameter, view, piece in zip(parameters, *views):
                parameter.data = view
                self.pieces[parameter] = own = nn.Parameter(piece, parameter.requires_grad)
                own.grad_dtype = grad_dtype(parameter)
            self._flats.append((flat, shard, list(zip(parameters, layout.ranges(rank)))))
        self.optimizer = optimizer_class(self._groups_of_pieces(), **defaults)

    def add_param_group(self, group):
        if hasattr(self, "optimizer"):
            raise RuntimeError("an optimizer of shards gets all of its parameters at the beginning")
        super().add_param_group(group)

    def _groups_of_pieces(self):
        """With learning rates and the like as they are now."""
        return [g | {"params": [self.pieces[p] for p in g["params"]]} for g in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        """Update this rank's shard and gather everybody's. Collective."""
        with torch.enable_grad():
            loss = closure() if closure else None
        for flat, _, ranges in self._flats:
            for parameter, (begin, end) in ranges:
                if parameter.untyped_storage().data_ptr() != flat.data_ptr():
                    raise RuntimeError("a parameter was moved or converted since it was sharded")
                piece, gradient = self.pieces[parameter], parameter.grad
                piece.grad = None if gradient is None else gradient.flatten()[begin:end]
        self.optimizer.param_groups = self._groups_of_pieces()
        self.optimizer.step()
        for flat, shard, _ in self._flats:
            all_gather_single(flat, shard, self.group)
        return loss

    def state_dict(self):
        self.optimizer.param_groups = self._groups_of_pieces()
        return self.optimizer.state_dict() | {"shard": rank_and_size(self.group)}

    def load_state_dict(self, state_dict):
        saved, own = state_dict.get("shard"), rank_and_size(self.group)
        if saved != own:
            raise ValueError(f"the state is of the shard (rank, world size) {saved}, not {own}")
        self.optimizer.load_state_dict(state_dict)
        for group, loaded in zip(self.param_groups, self.optimizer.param_groups):
            group |= loaded | {"params": group["params"]}


def check_elementwise(optimizer_class):
    """ValueError for optimizers that shards would make wrong; a warning for those not of torch.

    Right are those that treat each element by itself, as SGD and Adam do; wrong, those that take a
    parameter's norm (LARS, LAMB) or products of matrices (Muon), or search along a line (LBFGS).
    """
    if issubclass(optimizer_class, (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon)):
        raise ValueError(f"{optimizer_class.__name__} is wrong on shards: elements need each other")
    if not optimizer_class.__module__.startswith("torch.optim"):
        warnings.warn(f"{optimizer_class.__name__} on shards must treat each element by itself")


def _check_optimizer(optimizer, *arguments):
    """A hook before every optimizer's step: one that has pieces must be fit for them."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if any(hasattr(parameter, "whole_shape") for parameter in parameters):
        check_elementwise(type(optimizer))


# ---- parameters in one flat tensor, and its shards -----------------------------------------------


class FlatParameter:
    """Parameters of one kind in one flat tensor, cut into shards, of which each rank owns one.

    group, replicate_group: the ranks that share it out, and those that have this rank's shard, too
        (HSDP), or None.
    pieces: the given parameters, each cut down to its part of sharded_param, this rank's shard.
    whole: what the module computes with instead, of full shape: views of unsharded_param, whose
        memory comes and goes or, if it `keeps` it, stays.
    flat_grad: gradients of these, from the first one that comes until reduce().
    gathering: their all-gather, begun or done; None once they are dropped.
    incoming: this rank's part of the gradients' sum, while it travels.
    missing: what they wait for before they leave; empty when they have left.
    """

    def __init__(self, named, places, groups_of, keeps, param_dtype, reduce_dtype, divisor):
        self.names, self.pieces = zip(*named)
        self.places = [places[parameter] for parameter in self.pieces]
        self.divisor, self.missing, first = divisor, set(), self.pieces[0]
        self.group, self.replicate_group = groups_of(first)
        self.trainable, self.grad_dtype = first.requires_grad, grad_dtype(first)
        if not first.is_floating_point():
            param_dtype = reduce_dtype = None
        self.reduce_dtype = reduce_dtype or self.grad_dtype
        self.rank, world_size = rank_and_size(self.group)
        self.layout = FlatLayout(self.pieces, world_size)
        flat = self.layout.pack(self.pieces)
        if self.replicate_group is not None:  # then what the first replica has reaches all
            broadcast_first([flat], self.replicate_group)
        broadcast_first([flat], self.group)
        self.unsharded_param = flat.to(param_dtype or first.dtype)
        own = flat.chunk(world_size)[self.rank]
        is_part = keeps and self.unsharded_param is flat  # then nothing is held twice
        self.sharded_param = own if is_part else own.clone()
        empty = self.unsharded_param.new_empty(0)
        self.whole = [nn.Parameter(empty, self.trainable) for _ in self.pieces]
        self.live_in(self.unsharded_param)
        ranges = self.layout.ranges(self.rank)
        views = self.layout.pieces(self.sharded_param, self.rank)
        for piece, (begin, _), view in zip(self.pieces, ranges, views):
            piece.first, piece.whole_shape, piece.data = begin, piece.shape, view
        self.flat_grad = self.incoming = self.gathering = None

    def live_in(self, flat):
        """Have the whole parameters be views of this tensor."""
        self.unsharded_param, self.memory = flat, flat.untyped_storage()
        self.nbytes = self.memory.nbytes()
        for whole, view in zip(self.whole, self.layout.views(flat)):
            whole.data = view  # which shares no version: gathering is no change to autograd
            if self.grad_dtype != self.sharded_param.dtype:
                whole.grad_dtype = self.grad_dtype

    # -- parameters

    def gather(self):
        """Begin to collect every rank's shard, if that has not begun."""
        if self.gathering is None:
            if self.memory.nbytes() < self.nbytes:
                self.memory.resize_(self.nbytes)
            shard = self.sharded_param.to(self.unsharded_param.dtype)
            whole = self.unsharded_param
            self.gathering = all_gather_single(whole, shard, self.group, async_op=True)

    def use(self):
        """Have the modules compute with the whole parameters, now that they are there."""
        self.gathering.wait()
        self.put(self.whole)

    def drop(self):
        """Forget them. Autograd keeps views of them: right again once they are gathered again."""
        if self.gathering is not None:
            self.put(self.pieces)
            self.gathering.wait()  # what still arrives would write
            self.gathering = None

    def put(self, parameters):
        """Have the modules compute with these: the whole parameters, or the pieces."""
        for parameter, places in zip(parameters, self.places):
            for module, name in places:
                # Private: setattr() would run what some modules do when a parameter is replaced.
                module._parameters[name] = parameter

    # -- gradients

    def alloc_grad(self):
        """Memory for the gradients, zero for those that do not come."""
        self.flat_grad = self.sharded_param.new_zeros(self.layout.length, dtype=self.reduce_dtype)
        self.grad_views = self.layout.views(self.flat_grad)

    def add_gradient(self, i):
        """Add that of the i-th parameter."""
        if self.flat_grad is None:
            self.alloc_grad()
        self.grad_views[i].add_(self.whole[i].grad)
        self.whole[i].grad = None

    def reduce(self):
        """Begin to sum the gradients of all ranks."""
        if self.flat_grad is None:
            self.alloc_grad()
        self.incoming = self.flat_grad.new_empty(self.layout.shard_size)
        flat, self.flat_grad, self.grad_views = self.flat_grad, None, ()
        self.summing = reduce_scatter_single(self.incoming, flat, group=self.group, async_op=True)

    def finish(self):
        """Add this rank's part of the sum to the .grad of the pieces."""
        self.summing.wait()
        if self.replicate_group is not None:
            all_reduce(self.incoming, group=self.replicate_group)
        if self.divisor != 1:
            self.incoming.div_(self.divisor)
        sums = self.layout.pieces(self.incoming.to(self.grad_dtype), self.rank)
        self.incoming = None
        for piece, total in zip(self.pieces, sums):
            piece.grad = total if piece.grad is None else piece.grad.add_(total)

    # -- checks, and whole tensors

    def check(self):
        """RuntimeError if somebody has done to a piece what the whole parameter does not see."""
        views = self.layout.pieces(self.sharded_param, self.rank)
        own = self.names, self.pieces, self.whole, self.places, views
        for name, piece, whole, places, view in zip(*own):
            replaced = any(module._parameters[key] is not piece for module, key in places)
            hooks = piece._backward_hooks or piece._post_accumulate_grad_hooks
            moved = replaced or piece.data_ptr() != view.data_ptr()
            if moved or hooks or piece.requires_grad != whole.requires_grad:
                what = "moved, converted, replaced, frozen, thawed or given a hook"
                raise RuntimeError(f"{name!r} was {what}, and is sharded")

    def join(self):
        """Copies of the full parameters, in their own dtype. Collective."""
        flat = self.sharded_param.new_empty(self.layout.length)
        all_gather_single(flat, self.sharded_param, self.group)
        return [view.clone() for view in self.layout.views(flat)]


# ---- which parameters travel together -----------------------------------------------------------


def _sort_parameters(module, units, groups_of):
    """[{kind: named parameters}] of units and root, {parameter: {(module, name) that has it}}."""
    for i, unit in enumerate(units):
        others = [part for other in units[:i] + units[i + 1 :] for part in other.modules()]
        if unit is module or unit in others or unit not in list(module.modules()):
            raise ValueError(f"units[{i}] is not a submodule, or inside of another unit")
    owners, places = {}, {}  # owners: the numbers of its units, and the root's, which has them all
    for number, unit in enumerate([*units, module]):
        for submodule in unit.modules():
            for name, parameter in submodule._parameters.items():
                owners.setdefault(parameter, set()).add(number)
                places.setdefault(parameter, set()).add((submodule, name))
    # A flat parameter is of one dtype, and its gradients, all trainable or not. What carries other
    # attributes, such as a `sharded = True`, has one of its own: so tensor-parallel ranks, whose
    # parts of what they split are of unlike sizes, have the same pieces of what they all hold.
    kinds = [{} for _ in range(len(units) + 1)]
    for name, parameter in module.named_parameters():
        owner = min(owners[parameter]) if len(owners[parameter]) == 2 else len(units)
        kind = parameter.dtype, grad_dtype(parameter), parameter.requires_grad
        kind += *groups_of(parameter), *sorted(vars(parameter))
        kinds[owner].setdefault(kind, []).append((name, parameter))
    return kinds, places


def _share_memory(units):
    """Have units that are there in turn, each a list of flat parameters, live in one memory.

    Autograd keeps views of parameters, not copies: what it kept in forward is right again in
    backward because the same shards are gathered into the same place.
    """
    sizes = [[flat.unsharded_param.nbytes for flat in unit] for unit in units]
    for unit, nbytes in zip(units, sizes):
        if unit is units[0]:
            memory = unit[0].sharded_param.new_empty(max(map(sum, sizes)), dtype=torch.uint8)
        for flat, part in zip(unit, memory[: sum(nbytes)].split(nbytes)):
            flat.live_in(part.view(flat.unsharded_param.dtype))


# ---- the rows of the picture ---------------------------------------------------------------------
#
# What happens when, with units 0 to n - 1 and the root, of the parameters outside of them. What is
# gathered or summed travels while a unit computes. Stages 1 and 2 drop nothing.
#
#            computes up to        calls                 _Gathers                 _Sums
# forward    the module            forward()             gather root, 0, 1
#            unit k                _before_forward()     gather k+1, wait for k
#            its end               _after_forward()      drop k
# backward   the module's end      _begin_backward()     gather root, n-1, n-2
#            unit k's end          _turn()               gather k-1, wait for k   sum k+1
#            a gradient            _gradient_ready()                              add it to others
#            the end of all        _end_backward()       drop all                 sum 0 and root


class _Gathers:
    """The upper row of the file's picture: parameters come before their unit's turn, go after it.

    units: the FlatParameters of each, and at last of the root, which are there during a pass.
    """

    def __init__(self, module, units, groups_of, stage, options):
        kinds, places = _sort_parameters(module, units, groups_of)
        make = lambda named: FlatParameter(named, places, groups_of, stage < 3, *options)
        made = [[make(named) for named in of_unit.values()] for of_unit in kinds]
        # even units, odd ones, the root: two in a row, which are there together, never share
        for sharing in (made[:-1:2], made[1:-1:2], made[-1:]) if stage == 3 else ():
            _share_memory([unit for unit in sharing if unit])
        self.units, self.stage, self.root = made, stage, len(units)  # the root's number
        self.flats = [flat for unit in made for flat in unit]
        self.versions = None  # of the pieces, in the last forward pass
        self.leave()

    def begin(self, number, direction):
        """Gather the root and a unit, and use the root, once that unit is under way."""
        for flat in self.units[self.root]:
            flat.gather()
        self.turn_to(number, direction)
        self.use(self.root)

    def turn_to(self, number, direction):
        """Begin to gather a unit and the next one in this direction; drop the others."""
        wanted = [n for n in (number, number + direction) if 0 <= n < self.root]
        for n in range(self.root):
            if n not in wanted:
                self.drop(n)
        for flat in [flat for n in wanted for flat in self.units[n]]:
            flat.gather()

    def use(self, number):
        for flat in self.units[number]:
            flat.use()

    def drop(self, number):
        for flat in self.units[number] if self.stage == 3 else ():
            flat.drop()

    def leave(self):
        """A pass is over: nobody has the memory, unless it is kept."""
        for flat in self.flats:
            flat.drop() if self.stage == 3 else flat.put(flat.pieces)
        for flat in self.flats if self.stage == 3 else ():  # once all that share it are dropped
            # Private: resize_() of the storage, not of the tensor, keeps autograd's views.
            flat.memory.resize_(0)

    def check(self):
        """RuntimeError if what is kept is no longer right, or somebody replaced a piece."""
        for flat in self.flats:
            flat.check()
        now = self.versions_now()
        if self.versions != now and any(flat.gathering for flat in self.flats):
            raise RuntimeError("the parameters were changed and kept: call reshard() after step()")
        self.versions = now

    def versions_now(self):
        """A number for each piece, which changes with it."""
        return [piece._version for flat in self.flats for piece in flat.pieces]


class _Sums:
    """The lower row: gradients leave, those of the last unit first, those of the root at last.

    places: {whole parameter: (its flat one, its number there)}.
    queue: what has not left in this pass, in an order that is the same on all ranks.
    under_way: what travels.
    """

    def __init__(self, units, under_way):
        self.queue, self.under_way = deque(), under_way
        order = *units[-2::-1], units[-1]
        self.order = [flat for unit in order for flat in unit if flat.trainable]
        self.places = {w: (flat, i) for flat in self.order for i, w in enumerate(flat.whole)}

    def begin(self, missing):
        """missing: {flat parameter: the gradients it waits for, or a turn that complete() ends}"""
        self.queue = deque(self.order)
        for flat in self.order:
            flat.missing = missing[flat]

    def complete(self, flats):
        """Nothing more is added to their gradients."""
        for flat in flats:
            flat.missing.clear()
        self.send()

    def send(self):
        reduce_in_order(self.queue, self.reduce)

    def reduce(self, flat):
        """One sum travels while the next gradients come: two flat gradients exist at most."""
        if flat in self.under_way:
            self.join(0)
        flat.reduce()
        self.under_way.append(flat)
        self.join(1)

    def join(self, most):
        """Wait for sums, until so many are under way."""
        while len(self.under_way) > most:
            self.under_way.popleft().finish()


class _AtBackward(torch.autograd.Function):
    """The identity, which calls function() when backward comes to it."""

    @staticmethod
    def forward(ctx, function, *tensors):
        ctx.function = function
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)  # views would forbid changes in place

    @staticmethod
    def backward(ctx, *gradients):
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True: a sharded module has no gradients of gradients")
        ctx.function()
        return None, *gradients


def at_backward(function, outputs, flats):
    """The outputs, of which backward calls function() before it comes to what has made them.

    RuntimeError if some of `flats` are trained, and no tuple, list or dict holds an output.
    """
    marked = lambda x: torch.is_tensor(x) and x.requires_grad
    tensors = list(filter(marked, tree_leaves(outputs)))
    if not tensors and torch.is_grad_enabled() and any(flat.trainable for flat in flats):
        raise RuntimeError("a sharded module, or unit, must return tensors that a pytree holds")
    copies = iter(_AtBackward.apply(function, *tensors))
    return tree_map(lambda x: next(copies) if marked(x) else x, outputs)


class _Passes(nn.Module):
    """The middle row: hooks at the units' inputs and outputs, and at parameters, call the others.

    _current: in backward the unit that has its turn, at first the root; else None.
    """

    def __init__(self, module, units, gathers, sums):
        super().__init__()
        self.module, self._gathers, self._sums, self._current = module, gathers, sums, None
        self.require_backward_grad_sync = True
        for whole in sums.places:
            whole.register_post_accumulate_grad_hook(weakly(self._gradient_ready))
        for number, unit in enumerate(units):
            # before all hooks of others, which may use the parameters
            unit.register_forward_pre_hook(partial(self._before_forward, number), prepend=True)
            unit.register_forward_hook(partial(self._after_forward, number))

    def forward(self, *args, **kwargs):
        if self._current is not None:
            raise RuntimeError(
                "forward inside of the module's backward (checkpoint single units), or after one "
                "that has failed: finish_grad_sync() ends it, on every rank; then zero gradients"
            )
        self._gathers.check()
        if self.param_dtype is not None:
            cast = lambda x: x.to(self.param_dtype) if x.is_floating_point() else x
            args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
        try:
            self._gathers.begin(0, 1)
            outputs = self.module(*args, **kwargs)
        finally:
            self._gathers.leave()
        return at_backward(self._begin_backward, outputs, self._gathers.flats)

    @torch.no_grad()
    def _before_forward(self, number, module, args):
        """A unit runs forward, maybe in backward, where that is recomputed."""
        if self._current is None:
            self._gathers.turn_to(number, 1)
            self._gathers.use(number)
        elif number <= self._current:
            self._turn(number)
        else:
            raise RuntimeError(f"units[{number}] is recomputed before its turn: checkpoint units")

    def _after_forward(self, number, module, args, outputs):
        unit = self._gathers.units[number]
        memories = {flat.memory.data_ptr() for flat in unit} - {0}  # 0: of what has no memory
        for x in filter(torch.is_tensor, tree_leaves(outputs)):
            if x.untyped_storage().data_ptr() in memories:
                raise RuntimeError(f"units[{number}] returns a parameter, or its view: clone it")
        if self._current is None:
            self._gathers.drop(number)
        return at_backward(partial(self._turn, number), outputs, unit)

    # -- backward

    @torch.no_grad()
    def _begin_backward(self):
        """Backward is at the module's outputs, in one pass at those of each call."""
        if self._gathers.versions not in (None, self._gathers.versions_now()):
            raise RuntimeError("the parameters were changed between forward and backward")
        if self._current is None:
            # Private: no public hook runs once all gradients of a pass are there.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._current = self._gathers.root
        if self.require_backward_grad_sync:
            self._sums.begin({flat: {"its turn"} for flat in self._sums.order})
        self._gathers.begin(self._current - 1, -1)

    @torch.no_grad()
    def _turn(self, number):
        """Backward is at a unit's outputs. Those skipped have their turn, too, as on all ranks."""
        # it came past no output of the module: the loss has a unit's, or two forward passes
        if self._current is None or number > self._current:
            self._begin_backward()
        while self._current > number:
            self._current -= 1
            # Before the sums: what is computed next waits for parameters, and for no sum.
            self._gathers.turn_to(self._current, -1)
            if self._current + 1 < self._gathers.root:
                self._sums.complete(self._gathers.units[self._current + 1])
        self._gathers.use(number)

    @torch.no_grad()
    def _gradient_ready(self, whole):
        """Autograd has added to its .grad, or a weight product that was put off has."""
        flat, i = self._sums.places[whole]
        if self.require_backward_grad_sync and not flat.missing:
            raise RuntimeError(f"{flat.names[i]!r} got a gradient past the outputs of its unit")
        if whole.grad is not None:
            flat.add_gradient(i)
        flat.missing.discard(whole)
        self._sums.send()

    @torch.no_grad()
    def _end_backward(self):
        self._turn(0)
        self._sums.complete(self._sums.order)
        self._current = None
        self._gathers.leave()
        if self.wait_in_backward:
            self.finish_grad_sync()

    # -- sums

    no_sync = DistributedDataParallel.no_sync

    @torch.no_grad()
    def start_grad_sync(self, awaited=()):
        """Sum what no_sync() left; of the whole parameters `awaited`, once they were added to."""
        self._sums.begin({flat: set(flat.whole) & set(awaited) for flat in self._sums.order})
        self._sums.send()

    @torch.no_grad()
    def finish_grad_sync(self):
        """Wait for the sums that backward() or start_grad_sync() started."""
        if self._current is not None:  # backward has failed: what is left of it, and no gradients
            self._end_backward()
            for flat in self._sums.order:
                flat.flat_grad = None
        self._sums.complete(self._sums.queue)
        self._sums.join(0)


# ---- the module ----------------------------------------------------------------------------------


class FullyShardedDataParallel(_Passes):
    """Wraps a module of which each rank keeps a shard: ZeRO-3, or -2 and -1.

    Of stage 3 two units are there at a time; parameters in no unit, or in several, in a whole pass.
    Each backward() sums gradients, into shards. Of m backwards a step sends 3 m (P-1)/P D; stages 1
    and 2, which keep what is gathered until reshard(), (m + 1) (P-1)/P D, and 2 (P-1)/P D with
    no_sync() around all backwards but the last: that is stage 1.

    Between passes the module's parameters *are* this rank's pieces: each parameter is cut down to
    one dimension, maybe empty, and keeps its identity, name and attributes, with two more: `first`,
    the place of its first element in the whole, and `whole_shape`. Their optimizer must be one that
    check_elementwise() accepts, and its state is that of the pieces.

    That is flat, as PyTorch's first FSDP: one message has all parameters of a unit. Its second,
    fully_shard(), cuts each along its first dimension, a DTensor, and copies before and after each
    message. Where this one differs from both:

    - Units are named here, and not wrapped one by one.
    - A parameter without gradient counts as zero. Each pass that comes to the outputs sums, that of
      torch.autograd.grad(), too: call it under no_sync().
    - Backward decides whether it sums, not forward. What no_sync() adds up is in no .grad, and
      zero_grad() does not see it.
    - A module around this one has no state_dict(): take this one's, of whole tensors.

    units: submodules, such as a transformer's blocks, in the order in which every rank runs them.
    stage: 1 and 2, which are the same code but for a use of no_sync(), keep what is gathered until
        reshard(): optimizer.register_step_post_hook(lambda *_: model.reshard()).
    replicate_group: (HSDP) its ranks have the same shard, and gradients are summed over it, too.
    param_dtype: of the gathered parameters, and of floating-point inputs; the pieces keep theirs.
    reduce_dtype: in which gradients are summed, by default the parameters' grad_dtype.
    gradient_divide_factor: what their sum is divided by, by default the number of ranks; 1 where
        each rank's loss is its part of the whole batch's.
    wait_in_backward: if False, backward() leaves sums under way, and finish_grad_sync() waits.
    under_way: a deque for sums that travel, shared by modules that take turns, such as a pipeline's
        chunks: then two flat gradients exist at most of all of them, not of each.
    groups: {parameter: (group, replicate_group or None)} of parameters with fewer replicas, such
        as an expert's; subsets of the two groups' ranks.

    Raises ValueError for units that are not distinct submodules, and modules that differ between
    ranks; RuntimeError for outputs that hide their tensors, gradients of gradients, parameters that
    were moved, frozen or changed where that is too late, and forward after a backward that failed.
    """

    def __init__(
        self, module, process_group=None, units=(), stage=3, replicate_group=None, param_dtype=None,
        reduce_dtype=None, gradient_divide_factor=None, wait_in_backward=True, under_way=None,
        groups=None,
    ):
        every, units, world_size = (process_group, replicate_group), list(units), 1
        check_whole(module.parameters())
        for group in every[::-1] if replicate_group is not None else every[:1]:
            check_parameters(list(module.named_parameters()), group)
            broadcast_first(module.buffers(), group)
            world_size *= dist.get_world_size(group)
        options = param_dtype, reduce_dtype, gradient_divide_factor or world_size
        groups_of = lambda parameter: (groups or {}).get(parameter, every)
        gathers = _Gathers(module, units, groups_of, stage, options)
        sums = _Sums(gathers.units, deque() if under_way is None else under_way)
        super().__init__(module, units, gathers, sums)
        self.flats, self.stage, self.process_group = gathers.flats, stage, process_group
        self.param_dtype, self.wait_in_backward = param_dtype, wait_in_backward
        weakref.finalize(self, register_optimizer_step_pre_hook(_check_optimizer).remove)

    def reshard(self):
        """Drop what is gathered: the next forward pass gathers again."""
        for flat in self.flats:
            flat.drop()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        """Scale the gradients to a 2-norm of at most `max_norm`; returns their norm. Collective.

        torch.nn.utils' sees this rank's pieces alone. get_total_norm() is for groups of their own.
        """
        if any(flat.group is not self.process_group for flat in self.flats):
            raise RuntimeError("clip_grad_norm_() of parameters that have groups of their own")
        gradients = [piece.grad for piece in self.parameters() if piece.grad is not None]
        norm = get_total_norm(gradients, [self.process_group])
        clip_grads_with_norm_(gradients, max_norm, norm)
        return norm

    @torch.no_grad()
    def state_dict(self):
        """The module's own, of whole tensors, on every rank. Collective."""
        whole = {}
        for flat in self.flats:
            whole |= zip(flat.pieces, flat.join())
        own = self.module.state_dict(keep_vars=True)
        return {name: whole[x] if x in whole else x.detach().clone() for name, x in own.items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """The opposite, in place. ValueError for other names or shapes."""
        own = self.module.state_dict(keep_vars=True)
        if own.keys() != state_dict.keys():
            raise ValueError(f"names differ: {', '.join(own.keys() ^ state_dict.keys())}")
        for name, here in own.items():
            value, shape = state_dict[name], getattr(here, "whole_shape", here.shape)
            if value.shape != shape:
                raise ValueError(f"{name}: {tuple(value.shape)}, not {tuple(shape)}")
            first = getattr(here, "first", 0)
            here.copy_(value.flatten()[first : first + here.numel()].view(here.shape))
        self.reshard()

    def __getstate__(self):
        raise RuntimeError("a sharded module is not copied or pickled: state_dict() is")


# ---- cost ----------------------------------------------------------------------------------------


def zero_bytes(stage, nbytes, world_size, microbatches=1):
    """Bytes that a rank sends in a step for `nbytes` of parameters; stage 0 is data parallelism.

    With their padding: 64 elements after each parameter and each shard but one, at most.
    """
    return sum(zero_rounds(stage, microbatches)) * reduce_scatter_bytes(nbytes, world_size)


def zero_rounds(stage, microbatches=1):
    """How often a step reduce-scatters the gradients, and how often it all-gathers the parameters.

    Stage 0, data parallelism, all-reduces the gradients: it gathers their sums.
    """
    return ((1, 1), (1, 1), (microbatches, 1), (microbatches, 2 * microbatches))[stage]


def zero_memory(stage, world_size, parameter=2, gradient=2, optimizer=12):
    """Bytes per parameter that a rank holds, of so many for each, without padding; 0 is DDP."""
    kinds = (optimizer, gradient, parameter)  # sharded in this order
    return sum(kinds[stage:]) + sum(kinds[:stage]) / world_size


# ---- demonstration -------------------------------------------------------------------------------


def _demonstrate():
    rank, size = rank_and_size()
    torch.manual_seed(0)
    # 480 x 480: P = 1 to 6 divide it into shards without padding
    layers = [nn.Sequential(nn.Linear(480, 480, bias=False), nn.GELU()) for _ in range(6)]
    plain, inputs = nn.Sequential(*layers), torch.randn(3, 8 * size, 480)
    modules = [copy.deepcopy(plain) for _ in range(3)]
    _train(plain, torch.optim.AdamW(plain.parameters()), inputs)
    for stage, module in enumerate(modules, 1):
        model = FullyShardedDataParallel(module, units=module, stage=stage)
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.register_step_post_hook(lambda *_: model.reshard())
        with count_bytes() as traffic:
            _train(model, optimizer, inputs.chunk(size, 1)[rank])
        whole = model.state_dict()
        error = max((whole[name] - value).abs().max() for name, value in plain.state_dict().items())
        if rank == 0:
            sent, claimed = traffic.bytes() // len(inputs), zero_bytes(stage, 24 * 480**2, size)
            print(f"stage {stage}: a step sends {sent} bytes, {claimed} claimed; error {error:.0e}")


def _train(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    run_ranks(_demonstrate)
