"""What the judges of exercises.py share, and how they run.

judge() runs one in groups of 1, 2, 3 and 4 ranks. Smaller groups are the last of the ranks, so a
rank's number in its group is not its global rank.
"""

import importlib
import inspect
import math
import pickle
import re
import traceback
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from unittest.mock import patch

import torch
import torch.distributed as dist

import ranks
from collectives import TAG, Traffic, observe, rank_and_size
from ranks import shifted


class Wrong(Exception):
    """What is wrong with a function, in a sentence for whoever has written it."""


class Unfinished(Exception):
    """What is wrong, as far as it is known: not all ranks have reported."""


@dataclass
class Exercise:
    """A judge, and the functions that it gets: `names` of `module`.

    sizes: of the grids of ranks that it runs on; it gets a group for each axis of a grid
    """

    module: str
    names: tuple
    checked: str
    sizes: tuple
    judge: Callable


# ---- what a function sends -----------------------------------------------------------------------

COLLECTIVES = (  # the methods of a process group that torch.distributed's collectives call
    "allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "_allgather_base",
    "all_gather_single", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "alltoall", "alltoall_base", "all_to_all_single", "gather", "scatter",
)  # fmt: skip
IN_VAIN = "waited in vain for"
ERROR = "an error\n"
PEERS_REPORT = 3  # seconds in which other ranks may report what is wrong, once one has
ABANDONED = []  # messages that are pending where an exercise has failed: gloo may still use them
LONGEST = 1 << 22  # bytes of a message, with its length


class Message:
    """A message that has been posted, for torch's Work. wait() tells whose part is missing."""

    def __init__(self, work, waits_for, finish=None):
        self.work = work
        self.waits_for = waits_for
        self.finish = finish

    def wait(self, *timeout):
        with in_vain(self.waits_for):
            done = self.work.wait(*timeout)
        if self.finish:
            self.finish()
        return done

    def __getattr__(self, name):
        return getattr(self.work, name)


@contextmanager
def in_vain(waits_for):
    """Say who is missing once the limit has passed, or once the peer has ended, also in a post."""
    try:
        yield
    except RuntimeError as error:
        raise Wrong(f"{IN_VAIN} {waits_for}") from error


@contextmanager
def watched(builds=None):
    """Yield the Traffic of this rank in the block, where torch's own collectives are refused.

    builds: the collective that the exercise is to build, so ours are refused, too

    All messages, also ours, pass through send() and recv() of a process group. To replace
    dist.isend instead would break P2POp's check that its argument is dist.isend or dist.irecv.
    Each message travels with its length, so that unlike sizes can be named. Our tags, by which such
    messages would not meet, are all replaced by TAG.
    """
    traffic = Traffic()
    posted = []
    torch_send, torch_recv = dist.ProcessGroup.send, dist.ProcessGroup.recv

    def bytes_of(group, tensor, peer):
        if group == dist.group.WORLD:
            raise Wrong("a message is sent or received among all ranks: pass `group` on")
        P = group.size()
        if not 0 <= peer < P:  # gloo would wait for it
            raise Wrong(f"a message is to or from rank {peer}, but the ranks are 0 to {P - 1}")
        if not tensor.is_contiguous():
            raise Wrong(f"a message is not contiguous: its strides are {tensor.stride()}")
        return tensor.detach().view(-1).view(torch.uint8)

    def send(group, tensors, peer, tag):
        data = bytes_of(group, *tensors, peer)
        traffic.sent.append(("send", group, peer, len(data)))
        length = torch.tensor([len(data)]).view(torch.uint8)
        leaving = torch.cat([length, data])
        waits_for = f"rank {peer} to receive {len(data):,} bytes"
        with in_vain(waits_for):
            work = torch_send(group, [leaving], peer, min(tag, TAG))
        posted.append((work, leaving))
        return Message(work, waits_for)

    def recv(group, tensors, peer, tag):
        data = bytes_of(group, *tensors, peer)
        arriving = torch.empty(LONGEST, dtype=torch.uint8)

        def finish():
            length = arriving[:8].view(torch.int64).item()
            if length != len(data):
                sizes = f"a tensor of {len(data):,} bytes receives {length:,}"
                raise Wrong(f"{sizes} from rank {peer}")
            data.copy_(arriving[8 : 8 + length])

        waits_for = f"rank {peer} to send {len(data):,} bytes"
        with in_vain(waits_for):
            work = torch_recv(group, [arriving], peer, min(tag, TAG))
        posted.append((work, arriving))
        return Message(work, waits_for, finish)

    def recv_anysource(*_):
        raise Wrong("a message is received from any rank, so it may be another: name its source")

    instead = f"this exercise is to build {builds}" if builds else "use that of collectives.py"

    def refuse(*_, **__):
        caller = inspect.currentframe().f_back.f_code.co_name  # such as all_reduce
        raise Wrong(f"torch.distributed.{caller}() is called: {instead}")

    def listen(event, operation, *_):
        if builds and operation.name != "plain_exchange":
            raise Wrong(f"{operation.name}() is called: {instead}")

    known = [name for name in COLLECTIVES if hasattr(dist.ProcessGroup, name)]  # to this torch
    replaced = dict.fromkeys(known, refuse)
    replaced |= {"send": send, "recv": recv, "recv_anysource": recv_anysource}
    with ExitStack() as stack, ranks.least_bytes(), observe(listen):
        for method, replacement in replaced.items():
            stack.enter_context(patch.object(dist.ProcessGroup, method, replacement))
        try:
            yield traffic
        except Exception:
            ABANDONED.extend(posted)
            raise


def check_bytes(sent, expected, P, rule, slack=0):
    """Return a sentence about the bytes that this rank has sent, which are right up to `slack`.

    rule: how they are computed
    """
    if abs(sent - expected) > slack:
        than = f"{abs(sent - expected):,} too {'many' if sent > expected else 'few'}"
        raise Wrong(f"{sent:,} bytes are sent, {than}: {expected:,} is right, {rule}")
    return f"{sent:,} bytes sent by each of {P} ranks, {rule}"


# ---- what a function computes --------------------------------------------------------------------


def check_same(what, found, expected, P, mistakes=()):
    """Raise Wrong with the first wrong element, and its cause if it is known, unless all are right.

    mistakes: pairs (what a mistake gives, the mistake in a sentence)
    """
    if found is None:
        raise Wrong(f"{what} is None")
    if found.shape != expected.shape:
        raise Wrong(f"{what} has the shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    found = found.detach().to(expected.dtype)
    expected = expected.detach()
    close = lambda tensor: torch.isclose(found, tensor, rtol=1e-9, atol=1e-12)
    wrong = ~close(expected)
    if not wrong.any():
        return
    index = tuple(wrong.nonzero()[0].tolist())
    one, other = found[index].item(), expected[index].item()
    where = f"element {list(index)}" if index else "it"
    text = f"{what} is wrong: {where} is {one:.6g}, not {other:.6g}, which is off by "
    text += f"{one - other:.6g}; {wrong.sum():,} of {wrong.numel():,} elements are wrong"
    large = f"all are {P} times too large: a sum that should be a mean, or a second sum"
    small = f"all are 1/{P} of what is right: a mean that should be a sum, or a second mean"
    usual = [(expected * P, large), (expected / P, small)]
    for result, mistake in [*mistakes, *usual]:
        if close(result).all():
            text += f". {mistake[0].upper()}{mistake[1:]}"
            break
    raise Wrong(text)


IN_BACKWARD_ONLY = ". The result is right, so look at backward: is a sum missing, or one too many?"


def check_parts(mine, reference, whole, dims, group, result_dim=None, mistakes=None, **options):
    """Compare mine(parts) with reference(whole), and all gradients; return the bytes sent.

    whole: {name of an argument: tensor}. dims: {name: the dim along which ranks split it}; of the
        others each rank has a copy. result_dim: the same for the result
    mistakes: a function of the whole tensors that returns mistakes for check_same()
    options: other arguments of both
    """
    rank, P = rank_and_size(group)
    part = lambda tensor, dim: tensor if dim is None else tensor.chunk(P, dim)[rank]
    leaf = lambda tensor: tensor.detach().clone().requires_grad_(tensor.is_floating_point())
    own = {name: leaf(part(tensor, dims.get(name))) for name, tensor in whole.items()}
    whole = {name: leaf(tensor) for name, tensor in whole.items()}
    expected = reference(**whole, **options)
    expected.square().sum().backward()
    with watched() as traffic:
        result = mine(**own, **options, group=group)
        result.square().sum().backward()
    known = [(part(wrong, result_dim), why) for wrong, why in mistakes(**whole)] if mistakes else []
    check_same("the result", result, part(expected, result_dim), P, known)
    for name, tensor in own.items():
        if tensor.requires_grad:
            gradient = part(whole[name].grad, dims.get(name))
            with advice(IN_BACKWARD_ONLY):
                check_same(f"the gradient of {name}", tensor.grad, gradient, P)
    return traffic.bytes()


@contextmanager
def advice(text):
    """Add a sentence to what is wrong."""
    try:
        yield
    except Wrong as wrong:
        raise Wrong(f"{wrong}{text}") from None


# ---- judging -------------------------------------------------------------------------------------


def functions_of(path):
    """Return the functions and classes {name: object} that a file defines, rather than imports."""
    loader = SourceFileLoader("mine", str(path))  # of a file with any name
    module = module_from_spec(spec_from_loader("mine", loader))
    loader.exec_module(module)
    return {n: v for n, v in vars(module).items() if getattr(v, "__module__", "") == "mine"}


def make_groups(sizes, limit):
    """Return this rank's groups, one for each axis of a grid of the last ranks; None outside it.

    A message that does not arrive in `limit` seconds is an error.
    """
    rank, world_size = rank_and_size()
    grid = torch.arange(world_size - math.prod(sizes), world_size).view(sizes)
    groups = []
    for axis, size in enumerate(sizes):
        for members in grid.movedim(axis, -1).reshape(-1, size).tolist():
            group = dist.new_group(members, timeout=timedelta(seconds=limit))
            if rank in members:
                groups.append(group)
    return groups or None


def complaint(error, path):
    """Return what an error says, from the first frame in the reader's file on."""
    if isinstance(error, Wrong):
        return str(error)
    frames = error.__traceback__
    while path and frames and frames.tb_frame.f_code.co_filename != str(path):
        frames = frames.tb_next
    frames = frames or error.__traceback__
    lines = traceback.format_exception(type(error), error, frames, chain=False)
    if "not contiguous" in str(error):
        hint = "torch.empty_like(x) has the strides of x; torch.empty(x.shape) is contiguous"
        lines.append(f"{hint}\n")
    return ERROR + "".join(lines)


def run_judge(of, path, limit):
    """Judge an exercise on these ranks. Return whether it is right, and what there is to say."""
    found = functions_of(path) if path else {}
    module = importlib.import_module(of.module)
    functions = [found.get(each) or getattr(module, each) for each in of.names]
    right = []
    for sizes in of.sizes:
        said = fault = None
        groups = make_groups(sizes, limit)
        torch.manual_seed(shifted(0))
        try:
            if groups:
                said = of.judge(*functions, *groups)
        except Exception as error:
            fault = complaint(error, path)
        reports = reported(sizes, said, fault)
        if any(report is None or report[1] for report in reports):
            text = verdict(sizes, reports, right, limit)
            if None in reports:
                raise Unfinished(text)
            return False, text
        right.append(grid_name(sizes))
        said, _ = reports[0]
    return True, f"right on {listed(right)} ranks; {said}"


def reported(sizes, said, fault):
    """Return the reports (said, fault) of the ranks of a grid; None for a rank without one.

    Only a rank with a fault stops waiting for others. It then ends, which closes its connections,
    so peers that wait for its messages fail as well, and report.
    """
    rank, world_size = rank_and_size()
    store = dist.distributed_c10d._get_default_store()
    key = lambda rank: f"report of {rank} on {sizes}"
    store.set(key(rank), pickle.dumps((said, fault)))
    ranks_of_grid = range(world_size - math.prod(sizes), world_size)
    patience = timedelta(seconds=PEERS_REPORT) if fault else timedelta(days=1)  # the pool's is less
    with suppress(RuntimeError):
        store.wait([key(rank) for rank in ranks_of_grid], patience)
    has_report = [store.check([key(rank)]) for rank in ranks_of_grid]
    return [
        pickle.loads(store.get(key(rank))) if is_there else None
        for rank, is_there in zip(ranks_of_grid, has_report)
    ]


def verdict(sizes, reports, right, limit):
    """Return what is wrong: first what ranks have found, then who has only waited for others."""
    faults = {}  # {fault: the ranks that have it}
    for rank, report in enumerate(reports):
        fault = "has not returned" if report is None else report[1]
        if fault:
            faults.setdefault(fault, []).append(rank)
    in_order = sorted(faults, key=lambda fault: fault.startswith(IN_VAIN))
    lines = [f"wrong on {grid_name(sizes)} rank{'s' * (math.prod(sizes) > 1)}"]
    if right:
        lines[0] += f", right on {listed(right)}"
    if in_order[0].startswith(IN_VAIN):
        lines[0] += f"; the limit for a message is {limit} s"
    for fault in in_order:
        numbers = faults[fault]
        lines.append(f"rank{'s' * (len(numbers) > 1)} {listed(numbers)}: {fault}")
    return "\n".join(lines)


def grid_name(sizes):
    """Return "2 x 3"."""
    return " x ".join(map(str, sizes))


def gathered(value, group=None):
    """Return every rank's value, by torch's own means: ours could meet a message left by `mine`."""
    values = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:
        raise Wrong(f"{IN_VAIN} another rank to return") from error
    return values


def listed(items):
    """Return "1, 2 and 3"."""
    *others, last = map(str, items)
    return f"{', '.join(others)} and {last}" if others else last


def judge(of, path=None, limit=20):
    """Return a sentence about a right function: ours, or that of the file. Raise Wrong otherwise.

    of: an Exercise. A message that is not received in `limit` seconds is a fault.
    """
    world_size = max(map(math.prod, of.sizes))
    arguments = of, path, limit
    grace = 2 * PEERS_REPORT  # the first to end has waited, and then its peers wait
    outcomes = ranks.pool.run(world_size, run_judge, arguments, {}, limit + 20, None, grace)
    results = [outcome.result for outcome in outcomes if outcome.error_text is None]
    wrong = [text for right, text in results if not right]
    if len(results) == world_size and not wrong:
        _, text = results[0]
        return text
    text = wrong[0] if wrong else without_verdict(outcomes, path)
    if IN_VAIN in text or ERROR in text:
        ranks.pool.close()  # in its ranks, a message could still arrive in memory that is freed
    raise Wrong(text)


def without_verdict(outcomes, path):
    """Return what is wrong if a rank has died, or does something without end."""
    lines = []
    for outcome in outcomes:
        text = outcome.error_text or ""
        _, is_unfinished, known = text.partition("judging.Unfinished: ")
        in_file = re.search(rf'File "{re.escape(str(path))}", line (\d+) in (\w+)', text)
        if is_unfinished:
            lines.insert(0, known.rstrip())
        elif outcome.exitcode is None and in_file:
            line, function = in_file.groups()
            lines.append(f"a rank does not return: it is in line {line} of {path}, in {function}()")
        elif text.startswith("died"):
            lines.append(f"a rank {text}")
    if lines:
        return "\n".join(dict.fromkeys(lines))
    try:
        ranks.results(outcomes)
    except ranks.RanksFailed as error:
        return str(error)
