"""Validation, the progress line and the metrics file report a training and do not change it."""

import gc
import io
import json
import math
import threading
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import hybrid
from layouts import BATCH, T, make_trainer, own_batch, soak_but, train_on_text
from ranks import on_ranks, quoted, shifted, soak
from reference_gpt import reference_gpt

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


@pytest.mark.parametrize(
    "line", soak_but(lambda i, _: i == 6, zip(LAYOUTS.splitlines()[1:]))
)
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


@on_ranks(2)
def test_a_validation_whose_loss_is_not_finite_ends_all_ranks(tmp_path):
    fault = r"^the validation loss after step 2 is (nan|inf)$"
    step = hybrid.Trainer.step

    def spoil(trainer, *batch):
        metrics = step(trainer, *batch)
        if trainer.steps_done == 2:
            trainer.parameters()[0].data.fill_(math.inf)
        return metrics

    with (
        redirect_stdout(io.StringIO()),
        patch.object(hybrid.Trainer, "step", spoil),
        pytest.raises(hybrid.TrainingError, match=fault) as error,
    ):
        train_on_text("--steps 4 --eval-every 2", tmp_path)
    assert error.value.status == 1


# ---- lines ---------------------------------------------------------------------------------------


def _log(flags, steps):
    """Return the text that a Log prints for `steps` steps, without what it says at the start."""
    printed = io.StringIO()
    trainer = make_trainer(flags)
    metrics = {"loss": 2.0, "grad_norm": 1.0, "lr": 0.1}
    with redirect_stdout(printed):
        log = hybrid.Log(trainer)
        printed.truncate(0)
        printed.seek(0)
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


@on_ranks(1)
def test_mfu_compares_with_the_peak_of_the_exact_gpu_in_bf16_or_that_of_the_flag(monkeypatch):
    gpu = torch.device("cuda", 0)
    named = lambda name: monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    peak = lambda flags: hybrid.known_peak(hybrid.parse(flags.split(), 1), gpu)
    for name, dtype, expected in [
        ("NVIDIA H100 80GB HBM3", "bf16", 989), ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA H100 80GB HBM3", "tf32", None), ("NVIDIA A100-SXM4-80GB", "fp32", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None), ("NVIDIA X1", "bf16", None),
    ]:  # fmt: skip
        named(name)
        assert peak(f"--dtype {dtype}") == expected
    named("NVIDIA H200")
    assert peak("--device shared --dtype bf16") is None
    bf16 = hybrid.parse("--dtype bf16".split(), 1)
    assert hybrid.known_peak(bf16, torch.device("cpu")) is None
    per_token = hybrid.flops_per_token(make_trainer("--steps 1200").args)
    mfu = f"  mfu {3e6 * per_token / 2e12:.4g}  "
    assert mfu in _log("--steps 1200 --peak-tflops 2", 1) and "mfu" not in _log("--steps 1200", 1)


@on_ranks(1)
def test_peak_memory_of_a_cpu_is_what_the_process_has_resided_in():
    cpu = torch.device("cpu")
    with open("/proc/self/status") as file:
        (kib,) = [line.split()[1] for line in file if line.startswith("VmHWM")]
    assert hybrid.peak_memory(cpu) == pytest.approx(int(kib) * 1024, rel=0.01)
    held = torch.ones(2**26)  # 256 MB
    assert hybrid.peak_memory(cpu) >= held.nbytes


def test_flops_are_those_of_matrix_products_without_recomputation():
    config = hybrid.GPTConfig(layers=3, hidden=32, heads=4, seq_len=16, vocab_size=50)
    weights = 3 * 12 * 32 * 32 + 50 * 32
    assert hybrid.flops_per_token(config) == 6 * weights + 3 * 12 * 16 * 32
    full = replace(config, recompute="full")
    assert hybrid.flops_per_token(full) == hybrid.flops_per_token(config)


START = """processes | flags | what was derived
1 | --steps 9 | 1 x cpu, --pp 1 --dp 1 --cp 1 --tp 1 --ep 1 --zero 0, --batch-size 16 --microbatches
4 | --tp 2 --dp 2 --experts 4 | 4 x cpu, --dp 2 --cp 1 --tp 2 --ep 1 --zero 1 --replicate 1
4 | --replicate 4 --dtype bf16 | 4 x cpu, --dp 4, --zero 1 --replicate 4, --dtype bf16
4 | --pp 2 --schedule dualpipe --sp --tp 2 | 4 x cpu, --schedule dualpipe, --microbatches 8
"""


@pytest.mark.parametrize("line", START.splitlines()[1:])
@on_ranks(lambda line, **_: int(line[0]))
def test_the_start_says_how_large_the_model_is_and_what_was_derived(line):
    _, flags, expected = line.split(" | ")
    trainer = make_trainer(flags)
    text = "\n".join(hybrid.describe(trainer))
    whole = sum(parameter.numel() for parameter in reference_gpt(trainer.args).parameters())
    assert all(part in text for part in [f"{whole:,} parameters on ", *expected.split(", ")])


@on_ranks(1)
def test_the_start_says_of_what_type_the_tokens_are_and_how_many(tmp_path):
    printed = io.StringIO()
    with redirect_stdout(printed):
        train_on_text("--steps 1", tmp_path)
    size = (tmp_path / "text").stat().st_size
    told = f"{size - size // 10:,} to train on and {size // 10:,} for validation"
    assert printed.getvalue().splitlines()[2] == f"tokens of uint8: {told}"


# ---- copies --------------------------------------------------------------------------------------

COPIED = """processes | flags | rank with a flipped bit | what | the ranks that are named
2 | --dp 2 --zero 0 | 1 | transformer.h.1.attn.c_proj.weight | 1 0
3 | --dp 3 --zero 0 --batch-size 12 | 0 | transformer.wpe.weight | 1 0
4 | --dp 4 --zero 3 --replicate 2 | 2 | transformer.h.0.ln_1.weight | 2 0
2 | --tp 2 | 1 | transformer.ln_f.bias | 1 0
2 | --tp 2 --sp | 1 | exp_avg_sq of transformer.h.0.ln_1.bias | 1 0
2 | --cp 2 --zero 0 | 1 | exp_avg of transformer.wte.weight | 1 0
2 | --pp 2 | 1 | transformer.wte.weight | 1 0
2 | --pp 2 --schedule zb-v --microbatches 4 | 0 | transformer.wte.weight | 0 0
2 | --pp 2 --schedule dualpipe --microbatches 4 | 1 | transformer.h.0.mlp.c_fc.weight | 1 0
4 | --dp 4 --ep 2 --experts 4 --zero 0 | 3 | transformer.h.0.mlp.experts.w_in | 3 1
4 | --tp 2 --dp 2 --ep 2 --experts 4 | 1 | transformer.h.2.mlp.router.weight | 1 0
4 | --dp 4 --ep 2 --experts 4 --balance bias | 3 | transformer.h.1.mlp.router.bias | 3 0
"""


def _flip_a_bit(trainer, what):
    """Flip the lowest bit of the last element of a weight, bias or moment that this rank holds."""
    *kind, name = what.split(" of ")
    states = hybrid.states_of_chunks(trainer)
    tensors = [state[(kind or ["model"])[0]] for state in states]
    (*_, whole) = [tensors_of[name] for tensors_of in tensors if name in tensors_of]
    (*_, box) = whole.boxes.values()
    bits = box.view(torch.int32)
    bits.view(-1)[-1] ^= 1


@pytest.mark.parametrize("line", soak_but(lambda i, _: i % 2 == 0, zip(COPIED.splitlines()[1:])))
@on_ranks(lambda line, **_: int(line[0]))
def test_a_bit_that_differs_between_copies_is_named_by_ranks_and_parameter(line):
    _, flags, faulty, what, ranks = line.split(" | ")
    trainer = make_trainer(flags)
    trainer.step(*own_batch(trainer, 0))
    hybrid.require_equal_copies(trainer)
    if dist.get_rank() == int(faulty):
        _flip_a_bit(trainer, what)
    with pytest.raises(hybrid.TrainingError) as error:
        hybrid.require_equal_copies(trainer)
    fault = str(error.value)
    one, other = ranks.split()
    assert error.value.status == 1 and fault.startswith(f"{what} at [")
    assert fault.endswith(f" on rank {one} differs from its copy on rank {other}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_bit_of_every_element_changes_a_fingerprint(dtype):
    numbers = torch.ones(3, dtype=dtype)
    before = hybrid.fingerprint(numbers)
    width = 8 * numbers.itemsize
    bits = numbers.view({16: torch.int16, 32: torch.int32, 64: torch.int64}[width])
    for element, bit in product(range(3), range(width)):
        flipped = 1 << bit if bit < width - 1 else -(1 << bit)
        bits[element] ^= flipped
        assert hybrid.fingerprint(numbers) != before, (element, bit)
        bits[element] ^= flipped


@on_ranks(2)
def test_copies_that_are_cut_into_other_boxes_are_not_passed_over():
    trainer, state_of = make_trainer("--dp 2 --zero 0"), hybrid.state_of

    def cut_on_rank_1(trainer, placements):
        state = state_of(trainer, placements)
        whole = state["model"]["transformer.ln_f.weight"]
        if dist.get_rank() == 1:
            box = whole.boxes[0,]
            whole.boxes = {(0,): box[:5], (5,): box[5:]}
        return state

    sentence = r"^transformer.ln_f.weight at \[0\] on rank 1 differs from its copy on rank 0$"
    with patch.object(hybrid, "state_of", cut_on_rank_1):
        with pytest.raises(hybrid.TrainingError, match=sentence):
            hybrid.require_equal_copies(trainer)


def test_a_fingerprint_changes_with_every_bit_and_with_the_order():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(shifted(0))).to(dtype)
        value = hybrid.fingerprint(tensor)
        assert torch.equal(hybrid.fingerprint(tensor.clone()), value)
        swapped = tensor.clone()
        swapped[0], swapped[1] = tensor[1], tensor[0]
        values = {int(value), int(hybrid.fingerprint(swapped))}
        bits = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
        for bit in range(8 * tensor.element_size()):
            bits[2, 3] ^= 1 << bit if bit < 8 * tensor.element_size() - 1 else -(1 << bit)
            values.add(int(hybrid.fingerprint(tensor)))
        assert len(values) == 2 + 8 * tensor.element_size()
    assert hybrid.fingerprint(torch.zeros(0)) == 0
    long = torch.arange(2**20 + 3, dtype=torch.float32)
    assert not torch.equal(hybrid.fingerprint(long), hybrid.fingerprint(long.roll(2**20)))


@on_ranks(2)
def test_a_process_compares_the_cuts_of_tp_s_copies_in_its_first_step_also_if_it_resumes(monkeypatch):
    checks = []
    sum_gradients = hybrid.sum_gradients_over_tp

    def recorded(parameters, group, check):
        checks.append(check)
        sum_gradients(parameters, group, check)

    monkeypatch.setattr(hybrid, "sum_gradients_over_tp", recorded)
    trainer = make_trainer("--tp 2 --sp")
    trainer.steps_done = 3
    trainer.step(*own_batch(trainer, 0))
    trainer.step(*own_batch(trainer, 1))
    assert checks == [True, True, False, False]  # dense parameters, and experts


@on_ranks(2)
def test_a_sum_over_tp_of_experts_of_which_its_ranks_hold_different_ones_is_refused():
    trainer = make_trainer("--tp 2 --sp --experts 4 --ep 2")
    right = trainer.homes.experts
    wrong = replace(right, tp_group=trainer.mesh.tp_group)
    trainer.homes = trainer.homes._replace(experts=wrong)
    trainer.placements = [
        replace(row, home=wrong) if row.home is right else row for row in trainer.placements
    ]
    with pytest.raises(ValueError, match="by mark_sum_over_tp.. is split over the group"):
        trainer.step(*own_batch(trainer))


# ---- garbage, the next batch ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags", ["--zero 3", soak("--pp 2 --recompute full"), soak("--tp 2 --sp")]
)
@on_ranks(2)
def test_python_collects_no_garbage_inside_a_step(flags, tmp_path, monkeypatch):
    events = []
    record = lambda phase, info: events.append(phase)
    step = hybrid.Trainer.step

    def recorded(*arguments):
        events.append("begins")
        metrics = step(*arguments)
        events.append("ends")
        return metrics

    monkeypatch.setattr(hybrid.Trainer, "step", recorded)
    monkeypatch.setattr(hybrid, "GARBAGE_EVERY", 3)
    gc.disable()  # as main() does
    gc.callbacks.append(record)
    try:
        with redirect_stdout(io.StringIO()):
            train_on_text(f"{flags} --steps 6", tmp_path)
    finally:
        gc.callbacks.remove(record)
        gc.enable()
    steps = events[events.index("begins") : len(events) - events[::-1].index("ends")]
    collection = ["start", "stop"]
    three = ["begins", "ends"] * 3
    assert steps == three + collection + three


@pytest.mark.parametrize("flags", ["--zero 3 --dtype bf16", "--pp 2 --schedule zb-h1", "--cp 2"])
@on_ranks(2)
def test_a_step_leaves_no_tensor_in_a_cycle(flags):
    trainer = make_trainer(flags)
    for step in range(2):
        trainer.step(*own_batch(trainer, step))
    gc.collect()
    trainer.step(*own_batch(trainer, 2))
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    tensors = [item for item in gc.garbage if issubclass(type(item), torch.Tensor)]
    gc.garbage.clear()
    assert not tensors


@on_ranks(1)
def test_the_next_batch_is_made_during_a_step(tmp_path):
    made = {step: threading.Event() for step in range(3)}
    step, batch = hybrid.Trainer.step, hybrid.Data.batch

    def step_that_waits(trainer, *own):
        assert made[trainer.steps_done + 1].wait(timeout=60)
        return step(trainer, *own)

    def recorded(data, number, *arguments):
        made[number].set()
        return batch(data, number, *arguments)

    with (
        redirect_stdout(io.StringIO()),
        patch.object(hybrid.Trainer, "step", step_that_waits),
        patch.object(hybrid.Data, "batch", recorded),
        patch.object(hybrid, "validate", lambda *_: None),  # which makes batches of its own
    ):
        train_on_text("--steps 2", tmp_path)


# ---- the file ------------------------------------------------------------------------------------


@on_ranks(1)
def test_every_run_appends_to_its_metrics(tmp_path):
    """One that begins anew, too, so that a mistyped folder of checkpoints deletes none."""
    flags = f"--checkpoint {quoted(tmp_path / 'checkpoints')} --eval-every 1"
    train_on_text(f"{flags} --steps 2", tmp_path)
    train_on_text(f"{flags} --steps 3", tmp_path)
    train_on_text(f"--checkpoint {quoted(tmp_path / 'typo')} --steps 1", tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    steps = [line.get("step") for line in lines]
    assert steps == [None, 1, 1, 2, 2, None, 3, 3, None, 1, 1]
    assert lines[5]["flags"]["steps"] == 3
