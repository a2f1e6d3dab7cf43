"""The model and data that ranks train in tests, and the oracle: one process on the whole batch."""

import copy
import io
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from collectives import gather_objects, rank_and_size

from ranks import least_bytes, shifted


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    """A net of odd sizes with a tied weight, a frozen one and a scalar. `order` selects blocks."""

    def __init__(self, width=7, blocks=3):
        super().__init__()
        self.embed = nn.Linear(width, width, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.blocks[1].up.weight.requires_grad_(False)
        self.head = nn.Linear(width, width)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.full((width,), 0.1))

    def forward(self, x, order=(0, 1, 2)):
        x = self.scale * self.embed(x) + self.shift
        for i in order:
            x = self.blocks[i](x)
        return self.head(x)


def make_net(dtype=torch.float64, seed=0):
    torch.manual_seed(shifted(seed))
    return Net().to(dtype)


def make_data(examples, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(shifted(seed))
    return torch.randn(examples, 7, generator=generator).to(dtype)


def own_part(x, group=None):
    """Return this rank's rows of the batch."""
    rank, world_size = rank_and_size(group)
    return x.chunk(world_size)[rank]


def mean_square(net, x):
    return net(x).square().mean()


def gradients_alone(net, loss):
    """Return one process's gradients of loss(net), with zeros for parameters it does not use."""
    net = copy.deepcopy(net)
    net.zero_grad()
    loss(net).backward()
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()}


def whole_gradients(net):
    """Return the gradients of a wrapped net; torch.distributed puts pieces together."""
    whole = {}
    for name, p in net.named_parameters():
        if p.requires_grad and hasattr(p, "whole_shape"):
            flat = torch.zeros(p.whole_shape.numel(), dtype=p.grad.dtype)
            flat[p.offset : p.offset + len(p)] = p.grad.detach().flatten()
            dist.all_reduce(flat)
            whole[name] = flat.view(p.whole_shape)
        elif p.requires_grad:
            whole[name] = p.grad.clone()
    return whole


def assert_close(actual, expected, tolerance=1e-12, name=""):
    assert torch.is_tensor(expected) or len(expected) > 0
    message = lambda text: f"{name} {text}"
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=message)


def interleaved_group(size, count):
    """Make `count` groups of `size` ranks; return this rank's group and its number.

    With (2, 2) the groups are ranks 0, 2 and ranks 1, 3. A single group is None.
    """
    if count == 1:
        return None, 0
    groups = [dist.new_group(list(range(i, size * count, count))) for i in range(count)]
    dist.barrier()  # a rank that still connects would fail if another had left
    return groups[dist.get_rank() % count], dist.get_rank() % count


def fail(*arguments):
    """Fail, as a hook."""
    raise KeyError("fails here")


def code_below(module, banner):
    """Return each indented piece of code in the comment below a banner of the module."""
    comment = Path(module.__file__).read_text().split(banner)[1].split("# ---- ")[0]
    indented = re.findall(r"(?:^#     .*\n)+", comment, re.MULTILINE)
    return [re.sub(r"^#     ", "", code, flags=re.MULTILINE) for code in indented]


def demonstration(module):
    """Return what `python module.py` prints on these ranks. Only the first rank may print."""
    with (
        patch("collectives.run_ranks", lambda function: function()),
        redirect_stdout(io.StringIO()) as printed,
        least_bytes(),
    ):
        runpy.run_path(module.__file__, run_name="__main__")
    printed, *others = gather_objects(printed.getvalue())
    assert not any(others)
    return printed
