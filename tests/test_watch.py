"""Validation, the progress line and the metrics file report a training and do not change it."""

import gc
import io
import re
from contextlib import redirect_stdout
from dataclasses import replace

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
    "line", soak_but(lambda i, _: i in (3, 6), zip(LAYOUTS.splitlines()[1:]))
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


# ---- lines ---------------------------------------------------------------------------------------


def _log(flags, steps, is_terminal=False):
    """Return the text that a Log prints for `steps` steps, without what it says at the start."""
    printed = io.StringIO()
    printed.isatty = lambda: is_terminal
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


@on_ranks(1)
def test_a_terminal_shows_every_step_in_one_line_that_is_rewritten():
    text = _log("--steps 9 --print-every 4", 9, is_terminal=True)
    steps = [part.split()[1] for part in text.split("\r\033[K")[1:]]
    assert steps == [str(step) for step in range(1, 10)]
    kept = [line.rsplit("\033[K", 1)[1].split()[1] for line in text.split("\n")[:-1]]
    assert kept == ["1", "4", "8", "9"]
    assert "\033" not in _log("--steps 9", 9)


@on_ranks(2)
def test_a_line_has_the_tokens_of_all_ranks_and_the_flops_of_each():
    per_token = hybrid.flops_per_token(make_trainer("--steps 1200").args)
    line = _log("--steps 1200", 1)
    speed = f"  tokens_per_s 3,000,000  tflops {1.5e6 * per_token / 1e12:.4g}  "
    assert speed in line if dist.get_rank() == 0 else line == ""


@on_ranks(1)
def test_mfu_compares_with_the_peak_of_the_exact_gpu_and_dtype(monkeypatch):
    gpu = torch.device("cuda", 0)
    named = lambda name: monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    peak = lambda flags: hybrid.peak_tflops(hybrid.parse(flags.split(), 1), gpu)
    for name, dtype, expected in [
        ("NVIDIA H100 80GB HBM3", "bf16", 989), ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 80GB HBM3", "tf32", 495), ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None), ("NVIDIA X1", "fp32", None),
    ]:  # fmt: skip
        named(name)
        assert peak(f"--dtype {dtype}") == expected
    named("NVIDIA H200")
    assert peak("--device shared") is None
    assert hybrid.peak_tflops(hybrid.parse([], 1), torch.device("cpu")) is None
    monkeypatch.setattr(hybrid, "peak_tflops", lambda args, device: 2.0)
    per_token = hybrid.flops_per_token(make_trainer("--steps 1200").args)
    assert f"  mfu {3e6 * per_token / 2e12:.4g}  " in _log("--steps 1200", 1)


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


START = """processes | flags | what is said
1 | --steps 9 | {whole} parameters in fp32; a rank's layers have {whole} / 1 x cpu: pp 1 x dp 1 x cp 1 x tp 1
4 | --zero 3 | 4 x cpu: pp 1 x dp 4 x cp 1 x tp 1, ZeRO-3 with 1 x 4 shards
4 | --zero 2 --replicate 2 --cp 2 | pp 1 x dp 2 x cp 2 x tp 1, ZeRO-2 with 2 x 2 shards
4 | --zero 0 | pp 1 x dp 4 x cp 1 x tp 1, DDP
4 | --zero 0 --dtype bf16 | {whole} parameters in bf16 (and in fp32 / ZeRO-1 with 4 x 1 shards (undivided: bf16
4 | --tp 4 --kv-heads 4 | a rank's layers have {whole/4}
4 | --tp 2 --dp 2 --experts 4 --microbatches 2 | {whole} parameters / 16 sequences of 12 tokens per step: dp 2 x 2 microbatches x 4 rows, 192 tokens
4 | --ep 4 --experts 4 | {whole} parameters / x tp 1, ep 4, ZeRO-1
4 | --ep 2 --tp 2 --experts 4 | {whole} parameters
4 | --pp 2 --schedule dualpipe --microbatches 4 --sp --tp 2 | {whole} parameters / x tp 2, schedule dualpipe
"""


@pytest.mark.parametrize("line", START.splitlines()[1:])
@on_ranks(lambda line, **_: int(line[0]))
def test_the_start_says_what_was_derived(line):
    _, flags, expected = line.split(" | ")
    trainer = make_trainer(flags)
    text = "\n".join(hybrid.describe(trainer))
    whole = sum(parameter.numel() for parameter in reference_gpt(trainer.args).parameters())
    for part in expected.split(" / "):
        part = part.replace("{whole}", f"{whole:,}")
        if "{whole/4}" in part:  # norms, positions and biases of rows are not divided
            least, most = re.search("have ([0-9,]+) to ([0-9,]+)\n", text).groups()
            sizes = [int(size.replace(",", "")) for size in (least, most)]
            assert whole / 4 < sizes[0] < sizes[1] < whole / 2
        else:
            assert part in text


# ---- copies --------------------------------------------------------------------------------------

COPIED = """processes | flags | rank with a flipped bit | what | rank it is compared with
2 | --dp 2 --zero 0 | 1 | transformer.h.1.attn.c_proj.weight | 0
3 | --dp 3 --zero 0 --batch-size 12 | 0 | transformer.wpe.weight | 1
4 | --dp 4 --zero 3 --replicate 2 | 2 | transformer.h.0.ln_1.weight | 0
2 | --tp 2 | 1 | transformer.ln_f.bias | 0
2 | --tp 2 --sp | 1 | exp_avg_sq of transformer.h.0.ln_1.bias | 0
2 | --cp 2 --zero 0 | 1 | exp_avg of transformer.wte.weight | 0
2 | --pp 2 | 1 | transformer.wte.weight | 0
2 | --pp 2 --schedule zb-v --microbatches 4 | 0 | transformer.wte.weight | 0
2 | --pp 2 --schedule dualpipe --microbatches 4 | 1 | transformer.h.0.mlp.c_fc.weight | 0
4 | --dp 4 --ep 2 --experts 4 --zero 0 | 3 | transformer.h.0.mlp.experts.w_in | 1
4 | --tp 2 --dp 2 --ep 2 --experts 4 | 1 | transformer.h.2.mlp.router.weight | 0
4 | --dp 4 --ep 2 --experts 4 --balance bias | 3 | transformer.h.1.mlp.router.bias | 0
"""


def _flip_a_bit(trainer, what):
    """Flip the lowest bit of the last element of a weight, bias or moment that this rank holds."""
    *kind, name = what.split(" of ")
    states = [hybrid.state_of(trainer, chunk) for chunk in range(len(trainer.chunks))]
    tensors = [state[(kind or ["model"])[0]] for state in states]
    (*_, whole) = [tensors_of[name] for tensors_of in tensors if name in tensors_of]
    (*_, box) = whole.boxes.values()
    bits = box.view(torch.int32)
    bits.view(-1)[-1] ^= 1


@pytest.mark.parametrize("line", soak_but(lambda i, _: i % 2 == 0, zip(COPIED.splitlines()[1:])))
@on_ranks(lambda line, **_: int(line[0]))
def test_a_bit_that_differs_between_copies_is_named_by_rank_and_parameter(line):
    _, flags, faulty, what, other = line.split(" | ")
    trainer = make_trainer(flags)
    trainer.step(*own_batch(trainer, 0))
    assert hybrid.check_copies(trainer) == ""
    if dist.get_rank() == int(faulty):
        _flip_a_bit(trainer, what)
    fault = hybrid.check_copies(trainer)
    assert fault.startswith(f"{what}[") and fault.endswith(f" on rank {other}")
    assert f" on rank {faulty} differs from its copy" in fault


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


# ---- garbage, the next batch ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags", ["--zero 3", soak("--pp 2 --recompute full"), soak("--tp 2 --sp")]
)
@on_ranks(2)
def test_python_collects_no_garbage_inside_a_step(flags, tmp_path, monkeypatch):
    events = []
    record = lambda phase, info: events.append(phase)
    launch, finish = hybrid.Trainer.launch_step, hybrid.Trainer.finish_step

    def launch_step(*arguments):
        events.append("begins")
        return launch(*arguments)

    def finish_step(*arguments):
        metrics = finish(*arguments)
        events.append("ends")
        return metrics

    monkeypatch.setattr(hybrid.Trainer, "launch_step", launch_step)
    monkeypatch.setattr(hybrid.Trainer, "finish_step", finish_step)
    monkeypatch.setattr(hybrid, "GARBAGE_EVERY", 3)
    threshold = gc.get_threshold()
    gc.set_threshold(1)  # Python would collect at almost every allocation
    gc.callbacks.append(record)
    try:
        with redirect_stdout(io.StringIO()):
            train_on_text(f"{flags} --steps 6", tmp_path)
    finally:
        gc.callbacks.remove(record)
        gc.set_threshold(*threshold)
    steps = events[events.index("begins") : len(events) - events[::-1].index("ends")]
    collection = ["start", "stop"]
    three = ["begins", "ends"] * 3
    assert steps == three + collection + three
    assert gc.isenabled()


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
def test_the_next_batch_is_made_between_a_step_s_launch_and_its_end(tmp_path, monkeypatch):
    events = []

    def recorded(cls, name, label):
        original = getattr(cls, name)

        def call(self, *arguments, **options):
            events.append(label(self, *arguments))
            return original(self, *arguments, **options)

        monkeypatch.setattr(cls, name, call)

    recorded(hybrid.Trainer, "launch_step", lambda trainer, *_: f"launch {trainer.steps_done}")
    recorded(hybrid.Trainer, "finish_step", lambda trainer, *_: f"finish {trainer.steps_done}")
    recorded(hybrid.Data, "batch", lambda data, step, *_: f"batch {step}")
    with redirect_stdout(io.StringIO()):
        train_on_text("--steps 2", tmp_path)
    expected = "batch 0, launch 0, batch 1, finish 0, launch 1, batch 2, finish 1"
    assert events[:7] == expected.split(", ")


# ---- the file ------------------------------------------------------------------------------------


@on_ranks(1)
def test_a_resumed_run_appends_to_its_metrics(tmp_path):
    flags = f"--checkpoint {quoted(tmp_path / 'checkpoints')} --eval-every 1"
    lines = train_on_text(f"{flags} --steps 2", tmp_path)
    assert [line.get("step") for line in lines] == [None, 1, 1, 2, 2]
    lines = train_on_text(f"{flags} --steps 3", tmp_path)
    assert [line.get("step") for line in lines] == [None, 1, 1, 2, 2, None, 3, 3]
    assert lines[5]["flags"]["steps"] == 3
