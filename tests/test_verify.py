"""verify.py tries varied layouts, tells right from wrong ones, and exits with the right status."""

import io
import math
import sys
from contextlib import redirect_stdout
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import hybrid
import verify
from layouts import drawn
from pipeline import SCHEDULES
from ranks import on_ranks, shifted, spawn, torchrun


def parsed(world_size):
    """Yield the layouts that verify.py tries, as hybrid.py understands them."""
    for words, per_node in drawn(world_size):
        yield hybrid.parse([*verify.sizes_of(world_size), *words], world_size, per_node)


ANOTHER_SEED = "after a new choice, another verify.SEED may draw all of them"


@pytest.mark.soak
def test_each_choice_is_in_some_layout_of_8_processes():
    rows = list(parsed(8))
    assert len(rows) >= 20 and verify.layouts(8, 8) == drawn(8)
    with_experts = [args for args in rows if args.experts and args.moe_every <= args.layers]
    values = lambda name, rows=rows: {getattr(args, name) for args in rows}
    for axis in ("pp", "dp", "cp", "tp"):
        assert values(axis) == {1, 2, 4, 8}, ANOTHER_SEED
    assert {args.schedule for args in rows if args.pp > 1} == set(SCHEDULES), ANOTHER_SEED
    assert {args.cp_method for args in rows if args.cp > 1} == set(hybrid.CP_METHODS)
    assert {args.overlap for args in rows if "dualpipe" in args.schedule} == {False, True}
    assert values("zero") == {0, 1, 2, 3} and values("replicate") == {1, 2}
    assert values("recompute") == {"none", "selective", "full"} and values("sp") == {False, True}
    assert any(args.kv_heads < args.heads for args in rows)
    assert {"aux", "bias"} <= values("balance", with_experts)
    assert len(values("top_k", with_experts)) > 1 and values("ep", with_experts) >= {1, 2, 4}
    assert values("shared_experts", with_experts) == {0, 1}
    assert values("moe_every", with_experts) == {1, 2} and values("ep_nodes") >= {1, 2}


@pytest.mark.parametrize("world_size", [4, 8])
def test_some_layouts_have_stages_without_layers_and_fewer_layers_than_processes(world_size):
    rows = list(parsed(world_size))
    stages = lambda args: len(hybrid.schedule_of(args).routes[0])
    assert any(args.layers < stages(args) and args.tp > 1 for args in rows)
    assert any(args.layers < world_size for args in rows)


@pytest.mark.soak
def test_a_layout_that_agrees_with_one_process_is_ok_and_the_exit_status_is_0():
    found = torchrun(2, verify.__file__, "--tp", "2", "--sp", "--layers", "2")
    line, summary = found.stdout.splitlines()
    assert found.returncode == 0 and line.startswith("ok") and line.endswith(" --sp --layers 2")
    assert summary.startswith("1 layouts on 2 x cpu in fp64: 0 wrong, worst difference ")


def test_an_invalid_flag_is_one_line_and_exit_status_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tests/tools/verify.py"])
    flags = ["--dropout", "0.1"]
    assert hybrid.main(flags, partial(verify.verify, flags)) == 2
    assert capsys.readouterr().err == "verify.py: error: --dropout 0.1 has no use here\n"


def judged(argv, rows=None):
    """Judge the layouts in `rows`, or those drawn; return the exit status and the printed lines."""
    world_size, layouts = dist.get_world_size(), verify.layouts
    argv = [*argv, f"--seed={shifted(0)}"]
    args = hybrid.parse([*verify.sizes_of(world_size), *argv], world_size)
    instead = lambda *sizes: layouts(*sizes) if rows is None else rows
    with redirect_stdout(io.StringIO()) as printed, patch.object(verify, "layouts", instead):
        status = verify.verify(argv, args, torch.device("cpu"))
    return status, printed.getvalue().splitlines()


def rows_of(*layouts):
    return [(f"--layers 1 {layout}".split(), 2) for layout in layouts]


@on_ranks(2)
def test_a_wrong_layout_is_named_and_later_ones_are_still_tried():
    with patch.object(hybrid, "sum_gradients_over_tp", lambda *_, **options: None):
        status, lines = judged([], rows_of("--tp 2 --sp", "--dp 2"))
    assert status == 1
    if dist.get_rank() == 0:
        wrong, right, summary, note = lines
        assert wrong.startswith("WRONG") and "gradient transformer" in wrong
        assert right.startswith("ok") and "1 wrong" in summary
        assert note.startswith("inf: copies differ")


def judge_with_an_error_on_rank_1():
    broken = {"ring": None} if dist.get_rank() == 1 else {}
    with patch.dict(hybrid.CP_METHODS, broken):
        judged([], rows_of("--tp 2", "--cp 2 --cp-method ring", "--dp 2"))


def test_an_error_on_one_rank_ends_the_run_at_once_and_says_which_rank_and_layout():
    waiting, broken = spawn(2, judge_with_an_error_on_rank_1, check=False)
    where = "verify.py: rank 1, in --layers 1 --cp 2 --cp-method ring"
    assert broken.error_text.splitlines()[-1] == where and "TypeError" in broken.error_text
    assert waiting.exitcode == 1 and "lost rank 1" in waiting.error_text
    assert waiting.seconds < 20  # the group's timeout is 70


@on_ranks(2)
def test_a_replica_that_has_diverged_is_infinitely_wrong():
    """Rank 0, which compares the values, keeps the right one."""
    step = hybrid.Trainer.step

    def diverge(trainer, *batch):
        metrics = step(trainer, *batch)
        with torch.no_grad():
            trainer.parameters()[0].view(-1)[0] += 1e-15 * dist.get_rank()
        return metrics

    with patch.object(hybrid.Trainer, "step", diverge):
        status, lines = judged([], [("--dp 2 --zero 0 --layers 1".split(), 2)])
    assert status == 1
    assert dist.get_rank() or lines[0].startswith("WRONG      inf  step 1 transformer")


def test_a_difference_that_is_not_a_number_is_infinite():
    found = verify.differences("", {"x": torch.tensor(math.nan)}, {"x": torch.ones(())})
    assert found == {" x": math.inf}


@on_ranks(2)
def test_in_bf16_the_bound_is_wider_and_every_expert_takes_every_token():
    rows = [("--dp 2 --ep 2 --experts 4 --layers 2".split(), 2), ("--pp 2 --layers 1".split(), 2)]
    status, lines = judged(["--dtype", "bf16"], rows)
    assert status == 0
    if dist.get_rank() == 0:
        assert " in bf16: 0 wrong" in lines[-1] and 1e-4 < float(lines[0].split()[1]) < 5e-2


@pytest.mark.parametrize("block, bound", [("gpt2", "5.0e-02"), ("llama", "1.5e-01")])
@on_ranks(1)
def test_in_bf16_the_bound_of_llamas_block_is_three_times_as_wide(block, bound):
    status, lines = judged(["--dtype", "bf16", "--block", block], [(["--layers", "1"], 1)])
    assert status == 0 and lines[-1].endswith(f", bound {bound}")


def test_the_loss_ignores_a_fifth_of_the_targets_and_an_eighth_of_the_rows():
    args = hybrid.parse([*verify.sizes_of(2), "--batch-size", "64", "--vocab-size", "1000"], 2)
    _, targets = verify.batch_of(args, 0)
    is_ignored = (targets == hybrid.IGNORE_INDEX).double()
    assert is_ignored[:8].all() and is_ignored[8:].mean() == pytest.approx(1 / 5, abs=0.05)
    assert not is_ignored[8:].all(1).any()


@pytest.mark.parametrize("flags", ["--block llama --head tied --rope-theta 50", "--moments bf16"])
@on_ranks(2)
def test_a_block_a_head_and_moments_in_bf16_apply_to_all_layouts(flags):
    rows = [("--tp 2 --sp --layers 1".split(), 2), ("--cp 2 --layers 2".split(), 2)]
    status, lines = judged(flags.split(), rows)
    assert status == 0 and (dist.get_rank() or len(lines) == len(rows) + 1)


@pytest.mark.soak
@pytest.mark.parametrize("flags", ["", "--block llama", "--moments bf16"])
@on_ranks(1, 2, 3, 4, 8, timeout=240)
def test_every_layout_agrees_with_one_process(flags):
    world_size = dist.get_world_size()
    rows = verify.layouts(world_size, world_size, flags.split())
    status, lines = judged(flags.split(), rows)
    assert status == 0 and (dist.get_rank() or len(lines) == len(rows) + 1)
