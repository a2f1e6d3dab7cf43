"""Faults that tests put into the code at run time, to see that a test or tool finds them."""

from types import SimpleNamespace
from unittest.mock import patch

import torch

import collectives

IN_BACKWARD = torch._C._current_graph_task_id  # returns -1 outside backward


def put(owner, name, wrong):
    """Replace owner.name by wrong(owner.name)."""
    return lambda: patch.object(owner, name, wrong(getattr(owner, name)))


def without_reduction(module, is_it):
    """Make the module's all_reduce() do nothing for tensors for which is_it() is true."""
    left_out = lambda right: lambda t, *a, **k: None if is_it(t, *a) else right(t, *a, **k)
    return put(module, "all_reduce", left_out)


def own_in_backward(right):
    """In backward, receive what this rank itself sends."""

    def exchange(sends, receives, *rest, **options):
        if IN_BACKWARD() < 0:
            return right(sends, receives, *rest, **options)
        for (sent, _), (received, _) in zip(sends, receives):
            received.copy_(sent)
        return SimpleNamespace(wait=lambda: None)

    return exchange


def own_part(output, input, group=None, **options):
    rank, world_size = collectives.rank_and_size(group)
    output.copy_(input.reshape(world_size, *output.shape)[rank])
    return SimpleNamespace(wait=lambda: None)


def unseen_by_autograd(right):
    return lambda x, *a, **k: right(x.detach(), *a, **k) + 0 * x.sum()
