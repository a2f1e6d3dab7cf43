"""What people watch of a training: validation, the progress line, the metrics file, the trace."""

import io
import json
import math
import time
from collections import Counter, defaultdict
from contextlib import redirect_stdout
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hybrid
from collectives import count_bytes, observe
from ranks import on_ranks, run
from test_hybrid import BATCH, FLAGS, T, V, make_trainer

CPU = torch.device("cpu")


def _data():
    tokens = np.random.default_rng(1).integers(0, V, (2, 3 * BATCH * T + 40)).astype(np.uint8)
    return hybrid.Data(*tokens, is_text=False)


def _train(flags):
    """The lines of the metrics of a training."""
    torch.set_default_dtype(torch.float64)
    args = hybrid.parse_args(f"{FLAGS} --sample 0 {flags}".split(), dist.get_world_size())
    metrics_file = io.StringIO()
    with redirect_stdout(io.StringIO()):
        hybrid.train(args, hybrid.mesh_of(args), CPU, _data(), metrics_file)
    return [json.loads(line) for line in metrics_file.getvalue().splitlines()]


def _numbers(lines, *names):
    return [[line[name] for name in names] for line in lines if names[0] in line]


# ---- validation ----------------------------------------------------------------------------------

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
LAYOUTS = [line.split(" | ") for line in LAYOUTS.splitlines()[1:]]


def _validated(flags):
    """The losses of three steps, each followed by a validation, and what that found."""
    lines = _train(f"{flags} --steps 3 --eval-every 1")
    found = _numbers(lines, "validation_loss", "perplexity", "validation_tokens")
    return _numbers(lines, "loss", "grad_norm"), found


def _with_and_without(flags):
    lines = _train(f"{flags} --steps 3")
    return _numbers(lines, "loss", "grad_norm"), *_validated(flags)


@pytest.mark.parametrize("processes, flags", LAYOUTS)
def test_validation_between_steps_leaves_every_bit_of_the_training(processes, flags):
    dropout = "" if "--cp" in flags else " --dropout 0.1"
    steps, validated, found = run(int(processes), _with_and_without, flags + dropout)[0]
    assert len(steps) == len(found) == 3 and steps == validated


@pytest.mark.parametrize("experts", ["", "--experts 4 --balance bias"])
def test_validation_is_alike_in_every_layout(experts):
    layouts = [layout for layout in LAYOUTS if ("--experts" in layout[1]) == bool(experts)]
    _, expected = run(1, _validated, experts or "--dp 1")[0]
    assert len(expected) == 3 and expected[0] != expected[-1]
    for loss, perplexity, tokens in expected:
        assert perplexity == math.exp(loss) and tokens == 3 * BATCH * T + 39
    for processes, flags in layouts:
        if "--experts 4 --ep 2" != flags:
            _, found = run(int(processes), _validated, flags)[0]
            np.testing.assert_allclose(found, expected, rtol=1e-11)


# ---- lines ---------------------------------------------------------------------------------------


def _log(flags, steps, is_terminal, width=400):
    """What a Log prints of so many steps, after which the training is left."""
    printed = io.StringIO()
    printed.isatty = lambda: is_terminal
    size = SimpleNamespace(columns=width)
    numbers = {"loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 3e6}
    with redirect_stdout(printed), patch.object(hybrid.shutil, "get_terminal_size", lambda: size):
        with hybrid.Log(make_trainer(flags)) as log:
            for step in range(1, steps + 1):
                log.step(numbers | {"step": step})
    return printed.getvalue()


@on_ranks(1)
def test_some_forty_lines_are_printed_the_first_and_the_last_among_them():
    shown = lambda *args: [int(x.split()[1]) for x in _log(*args).splitlines() if x[:5] == "step "]
    default = shown("--steps 1200", 1200, False)
    assert default == [1, *range(30, 1201, 30)]
    assert shown("--steps 1200 --print-every 500", 1200, False) == [1, 500, 1000, 1200]
    assert shown("--steps 3", 3, False) == [1, 2, 3]
    assert shown("--steps 1200", 44, False) == [1, 30, 44]  # where it is left


@on_ranks(1)
def test_on_a_terminal_one_line_is_rewritten():
    text = _log("--steps 1200", 100, True, width=60)
    header, first, *rewritten = text.split("\r\033[K")[1:]
    assert header.endswith(" of the model\n") and first.startswith("step 1 of 1200  loss ")
    assert len(rewritten) == 100 and text.count("\n") == 3  # the last is printed as it is left
    assert all(len(line) == 59 for line in rewritten[:-1]) and rewritten[-1].endswith(" lr 1.00e-01\n")


@on_ranks(2)
def test_a_line_has_speeds_of_all_and_of_one_process():
    trainer = make_trainer("--steps 1200")
    per_token = hybrid.flops_per_token(trainer.config)
    line = _log("--steps 1200", 1, False)
    if dist.get_rank():
        assert line == ""
        return
    assert f"a step: {BATCH * T:,} tokens, {per_token * BATCH * T:.3g} FLOPs of the model\n" in line
    tflops = f"{1.5e6 * per_token / 1e12:.3g} TFLOP/s, "
    assert f"  3,000,000 tokens/s, each 1,500,000, {tflops}" in line


def test_flops_are_those_of_the_products_and_recomputation_is_none_of_the_models():
    config = hybrid.GPTConfig(layers=3, hidden=32, heads=4, seq_len=16, vocab_size=50)
    weights = 3 * 12 * 32 * 32 + 50 * 32
    assert hybrid.flops_per_token(config) == 6 * weights + 3 * 12 * 16 * 32
    full = hybrid.replace(config, recompute="full")
    assert hybrid.flops_per_token(full) == hybrid.flops_per_token(config)


@pytest.mark.parametrize(
    "name, flags, tflops",
    [
        ("NVIDIA H100 80GB HBM3", {"dtype": "bf16"}, 989),
        ("NVIDIA H200", {"dtype": "fp32", "tf32": True}, 494),
        ("NVIDIA A100-SXM4-80GB", {"dtype": "fp32"}, 19.5),
        ("NVIDIA H100 PCIe", {"dtype": "bf16"}, None),
    ],
)
def test_the_peak_of_a_known_gpu_is_that_of_the_dtype(name, flags, tflops):
    args, gpu = SimpleNamespace(**{"tf32": False} | flags), SimpleNamespace(type="cuda")
    with (
        patch.object(torch.cuda, "get_device_name", lambda device: name),
        patch.object(dist, "get_backend", lambda: "nccl"),
    ):
        assert hybrid.peak_tflops(args, gpu) == tflops
        assert hybrid.peak_tflops(args, CPU) is None
    with patch.object(dist, "get_backend", lambda: "gloo"):  # processes share a GPU
        assert hybrid.peak_tflops(args, gpu) is None


@pytest.mark.parametrize(
    "model, layouts",
    [
        ("", ["--zero 3", "--pp 2 --schedule dualpipe --microbatches 4 --sp --tp 2"]),
        ("--kv-heads 2", ["--tp 4"]),
        ("--experts 4", ["--tp 2 --dp 2", "--ep 4", "--ep 2 --tp 2"]),
    ],
)
def test_each_parameter_is_counted_once(model, layouts):
    ((expected, _),) = run(1, _counts, f"{model} --dp 1")
    for flags in layouts:
        assert {count for _, count in run(4, _counts, f"{model} {flags}")} == {expected}, flags


def _counts(flags):
    """Parameters of a trainer that has the whole model, and those that are said to be there."""
    trainer = make_trainer(flags)
    own = sum(parameter.numel() for chunk in trainer.chunks for parameter in chunk.parameters())
    return own, hybrid.count_parameters(trainer)


# ---- the file ------------------------------------------------------------------------------------


def _main(flags):
    with redirect_stdout(io.StringIO()):
        return hybrid.main(f"{FLAGS} --sample 0 {flags}".split())


def test_a_run_that_goes_on_cuts_off_what_it_repeats(tmp_path):
    (tmp_path / "text").write_text("All happy families are alike. " * 99)
    metrics, folder = tmp_path / "metrics", tmp_path / "checkpoints"
    flags = f"--device cpu --vocab-size 256 --data {tmp_path / 'text'} --metrics {metrics}"
    flags += f" --checkpoint {folder} --save-every 2 --eval-every 1"
    assert _main(f"{flags} --steps 4") == 0
    whole = metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in whole] == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    (folder / "step_00000004").rename(tmp_path / "gone")
    metrics.write_text("\n".join(whole[:7]) + '\n{"step": 4, "lo')  # killed in a line
    assert _main(f"{flags} --steps 5 --resume") == 0
    lines = metrics.read_text().splitlines()
    assert lines[:5] == whole[:5]
    header, *rest = map(json.loads, lines[5:])
    assert header["step"] == 2 and header["flags"]["steps"] == 5 and header["world_size"] == 1
    assert [line["step"] for line in rest] == [3, 3, 4, 4, 5, 5]


# ---- the trace -----------------------------------------------------------------------------------

TRACED = """processes | flags | lanes
1 | --microbatches 2 |
4 | --tp 2 --pp 2 --microbatches 4 | tp pp
4 | --dp 2 --cp 2 --zero 1 | cp dp
4 | --dp 4 --zero 3 --microbatches 2 | dp
4 | --dp 4 --zero 0 | dp
4 | --tp 2 --dp 2 --ep 4 --experts 4 --sp | tp ep dp
4 | --tp 2 --dp 2 --ep 2 --experts 4 | tp+ep dp
4 | --pp 4 --schedule zb-v --microbatches 8 --layers 8 | pp
3 | --dp 3 --batch-size 18 | dp
"""
TRACED = [[cell.strip() for cell in line.split("|")] for line in TRACED.splitlines()[1:]]


def _trace(flags, prepare=lambda trainer: None):
    """The file and the line of a traced step, and this rank's traffic and operations by lane."""
    trainer, operations = make_trainer(flags), defaultdict(Counter)
    prepare(trainer)
    axes, printed, file = hybrid.axes_of(trainer.mesh), io.StringIO(), io.StringIO()
    rows = trainer.args.batch_size // trainer.args.dp
    tokens = torch.randint(V, (2, rows, T), generator=torch.Generator().manual_seed(1))
    trainer.step(*tokens)
    log = hybrid.Log(trainer)

    def listen(event, operation, *messages):
        if event == "begin" and operation.name != "wait":
            operations[axes.get(operation.group)][operation.name] += 1

    with redirect_stdout(printed), hybrid.traced(trainer, log, file):
        with count_bytes() as traffic, observe(listen):
            trainer.step(*tokens)
            with torch.no_grad():  # so that a rank sends other bytes than it receives
                trainer.run(trainer.evaluation, *tokens)
    sent = defaultdict(lambda: (0, 0))
    for group, axis in axes.items():
        messages, nbytes = sent[axis]
        sent[axis] = messages + traffic.messages(group=group), nbytes + traffic.bytes(group=group)
    operations.pop(None, None)
    return file.getvalue(), printed.getvalue(), dict(sent), dict(operations)


@pytest.mark.parametrize("processes, flags, lanes", TRACED)
def test_lanes_have_every_operation_and_its_bytes_and_the_parts_add_up(processes, flags, lanes):
    found = run(int(processes), _trace, flags)
    trace = json.loads(found[0][0])
    lanes = lanes.split()
    for rank, (_, _, sent, operations) in enumerate(found):
        spans = [e for e in trace["traceEvents"] if e["pid"] == rank and e["ph"] == "X"]
        assert {e["cat"] for e in spans} == {"compute", *lanes}
        for lane in lanes:
            own = [e for e in spans if e["cat"] == lane]
            assert Counter(e["name"] for e in own) == operations[lane]
            totals = [sum(e["args"][what] for e in own) for what in ("messages", "bytes")]
            assert tuple(totals) == sent[lane]
        _assert_nested(spans)
        parts = trace["otherData"]["seconds"][rank]
        assert min(parts.values()) >= 0 and parts["compute"] > 0
        assert max(e["ts"] + e["dur"] for e in spans) <= sum(parts.values()) * 1e6 * (1 + 1e-9)
    _assert_line(found[0][1], trace["otherData"]["seconds"])
    assert not any(file or printed for file, printed, *_ in found[1:])


def _assert_nested(spans):
    """What the viewers ask of spans in one row."""
    rows = defaultdict(list)
    for event in sorted(spans, key=lambda e: (e["tid"], e["ts"], -e["dur"])):
        row, end = rows[event["tid"]], event["ts"] + event["dur"]
        while row and row[-1] <= event["ts"]:
            row.pop()
        assert not row or end <= row[-1] + 1e-3
        row.append(end)


def _assert_line(line, parts):
    """It has the means, and its numbers add up within rounding."""
    total, rest = line.removeprefix("the last step took ").split(" ms: ")
    named = [part.rsplit(" ", 1) for part in rest.split(" (means of ")[0].split(", ")]
    assert [name for name, _ in named] == list(parts[0])
    numbers = [float(number) for _, number in named]
    assert sum(numbers) == pytest.approx(float(total), abs=0.01 * len(numbers))


def _slowed(flags):
    """The parts of a step of which rank 0 is late with one forward and with the optimizer."""
    late = lambda *_: time.sleep(0.1 * (dist.get_rank() == 0))

    def prepare(trainer):
        trainer.chunks[0].transformer["h"].register_forward_pre_hook(late)
        trainer.chunks[0].register_forward_pre_hook(late)
        step = trainer.optimizer.step
        trainer.optimizer.step = lambda: late() or step()

    (file, *_) = _trace(flags, prepare)
    return file and json.loads(file)["otherData"]["seconds"]


@pytest.mark.soak  # by the clock
@pytest.mark.parametrize("flags, part", [("--pp 2", "bubble"), ("--tp 2", "tp"), ("--dp 2", "dp")])
def test_a_rank_that_is_late_shows_in_its_compute_and_in_what_others_wait_for(flags, part):
    slow, other = run(2, _slowed, f"{flags} --microbatches 2")[0]
    assert slow["compute"] > 0.2 and slow["rest"] > 0.1
    assert other[part] > 0.2 and other["compute"] < 0.1
