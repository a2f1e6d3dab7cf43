"""hybrid.py --verify: which layouts it tries, what it says, and the exit status."""

import io
import itertools
from contextlib import redirect_stdout
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import hybrid
from ranks import on_ranks
from test_strangers import launch

MAIN = "import sys; import hybrid; {}; sys.exit(hybrid.main())"


@pytest.mark.parametrize("world_size", [1, 3, 4, 8])
def test_layouts_are_valid_and_nearly_any_two_choices_meet(world_size):
    flags = hybrid.proof_flags(world_size)
    found = hybrid.layouts(flags, world_size)
    for words in found:
        assert hybrid.parse_args([*words, *flags], world_size).world_size == world_size
    assert len(set(map(tuple, found))) == len(found)
    texts = [" ".join(words) for words in found]
    if world_size in (4, 8):
        assert len(found) >= 60
        for choice in filter(None, sum(hybrid.CHOICES.values(), [])):
            assert any(choice in text for text in texts) or choice == f"--ep {2 * world_size}"
        pairs = lambda rows: set().union(*(itertools.combinations(row, 2) for row in rows))
        split = lambda rows: [sorted(" ".join(row).split(" --")) for row in rows]
        most = pairs(split(hybrid.layouts(flags, world_size, rounds=150)))
        assert len(pairs(split(found)) & most) > 0.85 * len(most)


@on_ranks(4)
def test_layouts_share_groups_of_the_same_ranks():
    groups, new_group = {}, dist.new_group
    for flags in ("--tp 2", "--cp 2", "--pp 2 --zero 3", "--tp 2 --sp"):
        hybrid.mesh_of(hybrid.parse_args(flags.split(), 4), groups=groups)
    with patch.object(dist, "new_group", side_effect=new_group) as made:
        hybrid.mesh_of(hybrid.parse_args("--cp 2 --zero 1".split(), 4), groups=groups)
    assert made.call_count == 0


def test_a_layout_like_one_process_is_ok_and_ends_with_0(tmp_path):
    found = launch(tmp_path, 2, MAIN.format("0"), "--verify", "--tp", "2", "--sp", "--layers", "2")
    line, summary = found.stdout.splitlines()
    assert found.returncode == 0 and line.startswith("ok") and "memory 32.0" in line
    assert summary.startswith("1 layouts on 2 x cpu in fp64") and "0 of them wrong" in summary


def test_wrong_layouts_and_errors_are_named_and_the_others_go_on(tmp_path):
    sprung = "hybrid.layouts = lambda *_: [['--tp', '2', '--sp'], ['--pp', '2'], ['--dp', '2']]; "
    sprung += "hybrid.sum_partial_gradients = lambda *_, **options: None; "
    sprung += "hybrid.bubble_time = None"
    found = launch(tmp_path, 2, MAIN.format(sprung), "--verify", "--layers", "2")
    wrong, error, right, summary = found.stdout.splitlines()
    assert found.returncode != 0 and "2 of them wrong" in summary
    assert wrong.startswith("WRONG") and "gradient transformer" in wrong
    assert error.startswith("WRONG      inf  TypeError") and right.startswith("ok")


@pytest.mark.parametrize("each", [2, pytest.param(1, marks=pytest.mark.soak)])
@on_ranks(4, timeout=240)
def test_every_layout_of_four_ranks_is_like_one_process(each):
    argv, layouts = [*hybrid.proof_flags(4), "--verify"], hybrid.layouts
    some = patch.object(hybrid, "layouts", lambda *sizes: layouts(*sizes)[::each])
    with redirect_stdout(io.StringIO()) as printed, some:
        wrong = hybrid.verify(hybrid.parse_args(argv, 4), argv, torch.device("cpu"), 4)
    assert not wrong and (dist.get_rank() or printed.getvalue().count("\nok") >= 59 // each)
