"""Validation, the progress line and the metrics file report a training and do not change it."""

import io
from contextlib import redirect_stdout
from dataclasses import replace

import pytest
import torch.distributed as dist

import hybrid
from ranks import on_ranks
from reference_gpt import reference_gpt
from test_hybrid import BATCH, T, make_trainer, train_on_text

LAYOUTS = """processes | flags
1 | --dp 1
2 | --dp 2 --zero 0
2 | --dp 2 --zero 1
2 | --dp 2 --zero 3
2 | --tp 2 --sp
2 | --cp 2
2 | --pp 2 --schedule dualpipe --microbatches 4
2 | --experts 4 --ep 2 --balance bias
2 | --experts 4 --ep 2
"""


@pytest.mark.parametrize("line", LAYOUTS.splitlines()[1:])
@on_ranks(lambda line, **_: int(line[0]))
def test_validation_between_steps_changes_no_bit_of_the_training(line, tmp_path):
    flags, numbers = line.split(" | ")[1], {}
    flags += " --steps 3" + (" --dropout 0.1" if "--cp" not in flags else "")
    for more in ("", " --eval-every 1"):
        with redirect_stdout(io.StringIO()):
            lines = train_on_text(flags + more, tmp_path)
        numbers[more] = [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]
    if dist.get_rank() == 0:
        assert sum("validation_loss" in line for line in lines) == 3
        assert len(numbers[""]) == 3 and numbers[""] == numbers[" --eval-every 1"]


# ---- lines ---------------------------------------------------------------------------------------


def _log(flags, steps):
    """Return the text that a Log prints for `steps` steps."""
    printed, trainer = io.StringIO(), make_trainer(flags)
    metrics = {"loss": 2.0, "grad_norm": 1.0, "lr": 0.1}
    with redirect_stdout(printed):
        log = hybrid.Log(trainer)
        for trainer.steps_done in range(1, steps + 1):
            log.step(metrics, seconds=BATCH * T / 3e6)
    return printed.getvalue()


@on_ranks(1)
def test_about_forty_lines_are_printed_including_the_first_and_the_last():
    shown = lambda *args: [int(x.split()[1]) for x in _log(*args).splitlines() if x[:5] == "step "]
    assert shown("--steps 1200", 1200) == [1, *range(30, 1201, 30)]
    assert shown("--steps 1200 --print-every 500", 1200) == [1, 500, 1000, 1200]
    assert shown("--steps 3", 3) == [1, 2, 3]


@on_ranks(2)
def test_a_line_has_the_tokens_of_all_ranks_and_the_flops_of_each():
    per_token = hybrid.flops_per_token(make_trainer("--steps 1200").args)
    line = _log("--steps 1200", 1)
    speed = f"  tokens_per_s 3,000,000  tflops {1.5e6 * per_token / 1e12:.4g}  "
    assert speed in line if dist.get_rank() == 0 else line == ""


def test_flops_are_those_of_matrix_products_without_recomputation():
    config = hybrid.GPTConfig(layers=3, hidden=32, heads=4, seq_len=16, vocab_size=50)
    weights = 3 * 12 * 32 * 32 + 50 * 32
    assert hybrid.flops_per_token(config) == 6 * weights + 3 * 12 * 16 * 32
    full = replace(config, recompute="full")
    assert hybrid.flops_per_token(full) == hybrid.flops_per_token(config)


SPLIT = ["--zero 3", "--tp 4 --kv-heads 4", "--tp 2 --dp 2 --experts 4", "--ep 4 --experts 4"]
SPLIT += ["--ep 2 --tp 2 --experts 4", "--pp 2 --schedule dualpipe --microbatches 4 --sp --tp 2"]


@pytest.mark.parametrize("flags", SPLIT)
@on_ranks(4)
def test_each_parameter_is_counted_once(flags):
    trainer, printed = make_trainer(flags), io.StringIO()
    with redirect_stdout(printed):
        hybrid.Log(trainer)
    expected = sum(parameter.numel() for parameter in reference_gpt(trainer.args).parameters())
    said = f"{expected:,} parameters on 4 x cpu"
    assert printed.getvalue().startswith(said) or (dist.get_rank() and not printed.getvalue())


# ---- the file ------------------------------------------------------------------------------------


@on_ranks(1)
def test_a_resumed_run_appends_to_its_metrics(tmp_path):
    flags = f"--checkpoint {tmp_path / 'checkpoints'} --eval-every 1"
    lines = train_on_text(f"{flags} --steps 2", tmp_path)
    assert [line.get("step") for line in lines] == [None, 1, 1, 2, 2]
    lines = train_on_text(f"{flags} --steps 3", tmp_path)
    assert [line.get("step") for line in lines] == [None, 1, 1, 2, 2, None, 3, 3]
    assert lines[5]["flags"]["steps"] == 3
