"""hybrid.py's checkpoints: the same bits in any layout, after a signal, a kill and a full disk."""

import functools
import io
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import hybrid
from collectives import gather_objects
from ranks import PROJECT, on_ranks, run

T, V, BATCH, STEPS = 12, 67, 12, 4
CPU = torch.device("cpu")
FLAGS = f"--layers 4 --hidden 32 --heads 8 --kv-heads 4 --seq-len {T} --vocab-size {V}"
FLAGS += f" --batch-size {BATCH} --warmup 2 --steps {STEPS} --seed 3"
MIXTURE = "--layers 2 --experts 4 --balance bias --shared-experts 1"

# ---- any layout ----------------------------------------------------------------------------------


def _train(flags, folder, dtype=torch.float64, prepare=lambda _: None):
    """Train to the end, from the last checkpoint of the folder on, which is saved again elsewhere."""
    torch.set_default_dtype(dtype)
    words = f"{FLAGS} --checkpoint {folder} --save-every 2 {flags}".split()
    args = hybrid.parse(words, dist.get_world_size())
    trainer = hybrid.Trainer(args, hybrid.make_mesh(args), CPU)
    data = hybrid.Data(*np.random.default_rng(1).integers(0, V, (2, 500)), is_text=False)
    prepare(trainer)
    with redirect_stdout(io.StringIO()):
        hybrid.go_on(trainer, folder)
    if trainer.steps_done:
        hybrid.save(trainer, folder / "again")
    for step in range(trainer.steps_done, args.steps):
        trainer.step(*data.batch(step, BATCH, T, args.seed, trainer.own_rows()))
        if trainer.steps_done % args.save_every == 0:
            hybrid.save(trainer, folder)


def _resume(world_size, flags, source, folder, dtype=torch.float64):
    """Train on from a checkpoint; returns the folder with that, saved again, and with the end."""
    shutil.copytree(source, folder / source.name)
    run(world_size, _train, flags, folder, dtype)
    return folder


def read(path):
    """{name: whole tensor} of a checkpoint, by PyTorch's own reader."""
    file = path.parent / f"{path.name}.pt"
    dcp_to_torch_save(path, file)
    state = torch.load(file)
    return {f"{kind} {name}": t for kind, tensors in state.items() for name, t in tensors.items()}


def assert_same_bits(path, other):
    found, expected = read(path), read(other)
    assert found.keys() == expected.keys() and len(found) > 20
    assert not [name for name, t in expected.items() if not torch.equal(found[name], t)]


def assert_close(path, other, tolerance=1e-9):
    found, expected = read(path), read(other)
    D = len(expected["model transformer.ln_f.weight"])
    for name, tensor in expected.items():
        difference = found[name] - tensor
        if name.endswith("c_attn.bias"):  # that of the keys has no gradient but rounding error
            difference[D : (D + len(difference)) // 2] = 0
        assert difference.norm() <= tolerance * tensor.norm(), name


@on_ranks(6)
def test_a_rank_whose_shards_are_padding_saves_and_goes_on(tmp_path):
    flags = "--pp 3 --layers 1 --hidden 4 --heads 1 --kv-heads 1 --vocab-size 16 --seq-len 8"
    args = hybrid.parse(f"{FLAGS} {flags}".split(), 6)
    trainer, other = (hybrid.Trainer(args, hybrid.make_mesh(args), CPU) for _ in range(2))
    held = sum(whole.boxes != {} for whole in hybrid.boxes_of(trainer).values())
    assert not all(gather_objects(held))
    tokens = torch.arange(BATCH * 8).view(BATCH, 8)[trainer.own_rows()] % 16
    trainer.step(tokens, tokens)
    hybrid.save(trainer, tmp_path)
    hybrid.go_on(other, tmp_path)
    assert trainer.step(tokens, tokens) == other.step(tokens, tokens)


SOAK = pytest.mark.soak
LAYOUTS = [  # model, world size, flags
    ("", 3, "--dp 3 --zero 0"),
    (MIXTURE, 4, "--tp 2 --pp 2 --ep 2 --zero 3"),
    pytest.param("", 4, "--pp 2 --tp 2 --schedule zb-v --microbatches 4 --zero 3", marks=SOAK),
    pytest.param(MIXTURE, 4, "--tp 2 --dp 2 --ep 2", marks=SOAK),
    pytest.param("", 3, "--dp 3 --zero 1", marks=SOAK),
    pytest.param("", 4, "--tp 2 --sp --dp 2", marks=SOAK),
    pytest.param("", 4, "--pp 2 --dp 2 --schedule dualpipe --microbatches 6", marks=SOAK),
    pytest.param("", 4, "--pp 2 --cp 2 --schedule interleaved --zero 3", marks=SOAK),
    pytest.param("", 4, "--tp 2 --dp 2 --zero 2", marks=SOAK),
    pytest.param("", 4, "--dp 4 --replicate 2", marks=SOAK),
    pytest.param("", 6, "--pp 3 --dp 2 --zero 0", marks=SOAK),
    pytest.param(MIXTURE, 4, "--dp 4 --ep 2 --zero 0", marks=SOAK),
    pytest.param(MIXTURE, 4, "--dp 4 --ep 2", marks=SOAK),
    pytest.param(MIXTURE, 4, "--tp 4", marks=SOAK),  # all ranks have the same experts
    pytest.param(MIXTURE, 3, "--dp 3 --replicate 3", marks=SOAK),
]


@functools.cache
def _alone(model):
    """The folder of one process's checkpoints; they end with this process."""
    folder = tempfile.TemporaryDirectory()
    run(1, _train, model, Path(folder.name))
    return folder


@pytest.mark.parametrize("model, world_size, flags", LAYOUTS)
def test_what_one_layout_saves_another_loads_to_the_bit_and_trains_on_from(
    model, world_size, flags, tmp_path
):
    """In the layout that saved to the same bits, in others to 1e-9 in fp64."""
    flags, own, alone = f"{model} {flags}", tmp_path / "own", Path(_alone(model).name)
    run(world_size, _train, flags, own)
    assert_close(own / "step_00000004", alone / "step_00000004")
    into = _resume(world_size, flags, alone / "step_00000002", tmp_path / "into")
    back = _resume(1, model, own / "step_00000002", tmp_path / "back")
    same = _resume(world_size, flags, own / "step_00000002", tmp_path / "same")
    assert_same_bits(into / "again" / "step_00000002", alone / "step_00000002")
    assert_same_bits(back / "again" / "step_00000002", own / "step_00000002")
    assert_same_bits(same / "step_00000004", own / "step_00000004")
    assert_close(into / "step_00000004", alone / "step_00000004")
    assert_close(back / "step_00000004", alone / "step_00000004")


def _skip_the_first_step(trainer):
    clip, nan = trainer.clip_gradients, torch.tensor(math.nan)
    trainer.clip_gradients = lambda: clip() if trainer.steps_done else nan


def test_a_skipped_step_is_not_one_of_the_optimizers_after_a_restart_either(tmp_path):
    own, flags = tmp_path / "own", "--dp 2 --skip-nonfinite 3 --save-every 1"
    run(2, _train, flags, own, prepare=_skip_the_first_step)
    on = _resume(2, flags, own / "step_00000003", tmp_path / "on")
    assert_same_bits(on / "step_00000004", own / "step_00000004")
    numbers = [json.loads((folder / "step_00000004/run.json").read_text()) for folder in (own, on)]
    assert [run["skipped"] for run in numbers] == [1, 1]


def test_bf16_keeps_its_masters_and_goes_on_in_fp32(tmp_path):
    run(2, _train, "--zero 0 --dtype bf16", tmp_path / "own", torch.float32)
    source = tmp_path / "own" / "step_00000002"
    on = _resume(2, "--zero 0 --dtype bf16", source, tmp_path / "on", torch.float32)
    assert_same_bits(on / "step_00000004", tmp_path / "own" / "step_00000004")
    other = _resume(2, "--tp 2", source, tmp_path / "other", torch.float32)
    assert_same_bits(other / "again" / "step_00000002", source)
    assert any(t.bfloat16().float().ne(t).any() for t in read(source).values())


@pytest.mark.parametrize(
    "flags",
    [
        "--dp 4 --zero 0",
        f"--dp 4 --ep 2 {MIXTURE}",
        "--tp 2 --pp 2 --schedule dualpipe --microbatches 6",
    ],
)
def test_ranks_share_out_what_is_to_be_saved(flags, tmp_path):
    """Each element is written by one rank, and each writes about as many."""
    run(4, _train, f"{flags} --hidden 64", tmp_path)
    whole = sum(t.numel() * t.itemsize for t in read(tmp_path / "step_00000004").values())
    files = (tmp_path / "step_00000004").glob("*.distcp")
    sizes = {file.name: file.stat().st_size for file in files}
    assert len(sizes) == 4 and sum(sizes.values()) < 1.3 * whole  # each box has a header
    assert max(sizes.values()) < 1.5 * sum(sizes.values()) / 4


# ---- while it trains -----------------------------------------------------------------------------


def _complete(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def _end(flags, folder, disturb=lambda trainer: None):
    """Run train(), with something done before each step; returns how it ended, and what was said."""
    step, said, ended = hybrid.Trainer.step, io.StringIO(), None
    text, handler = folder.parent / f"{folder.name}.text", signal.getsignal(signal.SIGTERM)
    if dist.get_rank() == 0:
        text.write_bytes(bytes(9999))
    dist.barrier()
    words = f"{FLAGS} --data {text} --sample 0 --checkpoint {folder} {flags}".split()
    args = hybrid.parse(words, dist.get_world_size())
    disturbed = lambda trainer, *batch: (disturb(trainer), step(trainer, *batch))[1]
    with redirect_stdout(said), redirect_stderr(said), patch.object(hybrid.Trainer, "step", disturbed):
        try:
            hybrid.train(args, CPU)
        except hybrid.TrainingError as error:
            ended = error.status, str(error)
    signal.signal(signal.SIGTERM, handler)
    resource.setrlimit(resource.RLIMIT_FSIZE, 2 * resource.getrlimit(resource.RLIMIT_FSIZE)[1:])
    return ended, said.getvalue()


def _terminate(trainer):
    if trainer.steps_done == 1 and dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_at_one_rank_saves_and_ends_all_after_the_same_step(tmp_path):
    folder = tmp_path / "own"
    for ended, _ in run(3, _end, "--dp 3", folder, _terminate):
        assert ended == (143, f"SIGTERM; --checkpoint {folder} has step 2")
    assert _complete(folder) == ["step_00000002"]


def _fill_the_disk(trainer):
    """No file of rank 1 can be larger than a page from the third step on."""
    if dist.get_rank() == 1 and trainer.steps_done == 2:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))


def test_a_full_disk_ends_all_ranks_with_a_line_and_the_checkpoint_before_is_intact(tmp_path):
    folder = tmp_path / "own"
    flags = "--dp 2 --save-every 2"
    (ended, _), (other, _) = run(2, _end, flags, folder, _fill_the_disk)
    status, line = ended
    assert ended == other and status == 1 and "\n" not in line
    assert line.startswith(f"--checkpoint {folder / 'step_00000004'}: rank 1: ")
    assert [name for name in _complete(folder) if "partial" not in name] == ["step_00000002"]
    assert run(2, _end, flags, folder)[0][0] is None  # it goes on from that
    assert _complete(folder) == ["step_00000002", "step_00000004"]


def _damage(folder, file, content):
    path = folder / "step_00000004" / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)


DAMAGES = [
    ("__1_0.distcp", None, "No such file"),
    ("__1_0.distcp", b"half", ""),
    (".metadata", None, "No such file"),
    (".metadata", b"", ""),
    (".metadata", b"\x80\x04garbage", ""),
    ("run.json", None, "No such file"),
    ("run.json", b"{\"layers\": 4", "run.json has not the flags of a run"),
    ("run.json", b"\xff\xfe", "run.json has not the flags of a run"),
    ("run.json", b"[]", "run.json has not the flags of a run"),
    ("run.json", b"{}", "run.json has not the flags of a run"),
]


@pytest.mark.parametrize("file, content, message", DAMAGES)
@on_ranks(2)
def test_a_damaged_checkpoint_ends_all_ranks_with_a_line_that_names_it(
    file, content, message, tmp_path
):
    folder = tmp_path / "own"
    _train("--dp 2", folder)
    if dist.get_rank() == 0:
        _damage(folder, file, content)
    dist.barrier()
    (status, line), _ = _end("--dp 2 --steps 6", folder)
    assert status == 2 and "\n" not in line and message in line
    assert "step_00000004" in line
    assert len(_complete(folder)) == 2  # nothing is deleted


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--hidden 64", "--hidden 64, but {} has --hidden 32"),
        ("--kv-heads 8", "--kv-heads 8, but {} has --kv-heads 4"),
        ("--experts 2", "--experts 2, but {} has --experts 0"),
    ],
)
@on_ranks(1)
def test_a_checkpoint_of_another_model_is_refused_by_names_and_values(flags, named, tmp_path):
    folder = tmp_path / "own"
    _train("", folder)
    named = named.format(folder / "step_00000004")
    assert _end(flags, folder)[0] == (2, named)
    assert _complete(folder) == ["step_00000002", "step_00000004"]
    (folder / "step_00000003.partial").mkdir()  # what a killed save leaves
    _train("--steps 6", folder)
    assert _complete(folder) == ["again", "step_00000004", "step_00000006"]


# ---- under torchrun ------------------------------------------------------------------------------


def _undisturbed(flags):
    with redirect_stdout(io.StringIO()):
        hybrid.train(hybrid.parse(flags.split(), dist.get_world_size()), CPU)


FORKED = """
import multiprocessing
import sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
import hybrid

world_size, kills = map(int, sys.argv[1:3])
multiprocessing.set_forkserver_preload(["hybrid"])  # has no threads, whose locks a fork would keep
options = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "monitor_interval": 0.1}
config = LaunchConfig(1, 1, world_size, max_restarts=kills, start_method="forkserver", **options)
elastic_launch(config, hybrid.main)(sys.argv[3:])
"""


def _start(folder, command, flags):
    """hybrid.py, its output through a pipe; its errors in a file of the folder."""
    return subprocess.Popen(
        [sys.executable, *map(str, command), *flags.split()],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(PROJECT)},
        stdout=subprocess.PIPE,
        stderr=open(folder / "errors", "w"),
        text=True,
    )


def _kill_ranks(process, at_steps, generator):
    """kill -9 one of the ranks soon after each of these steps, of which rank 0 prints a line.

    Yields the steps at which a rank was killed, and from which the next attempt went on.
    """
    killed = None
    for line in process.stdout:
        begins = re.match(r"goes on from .*/step_(\d+)|step +(1) ", line)
        if killed is not None and begins:
            yield killed, int(begins[1] or 0)
            killed = None
        step = re.match(r"step +(\d+) ", line)
        if at_steps and killed is None and step and int(step[1]) >= at_steps[0]:
            killed = at_steps.pop(0)
            moment = time.perf_counter() + generator.uniform(0, 0.05)
            while time.perf_counter() < moment:  # a step takes 10 ms, a save 30
                pass
            launched = _children(process.pid)
            ranks = sum(map(_children, launched), []) or launched  # a fork server's, or torchrun's
            os.kill(int(generator.choice(ranks)), signal.SIGKILL)


def _children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize(
    "kills, world_size, flags",
    [
        # under torchrun's agent, which forks: that is sooner there than what torchrun starts
        (3, 2, "--dp 2 --dropout 0.1"),
        pytest.param(20, 2, "--dp 2 --dropout 0.1", marks=SOAK),
        pytest.param(20, 4, "--tp 2 --dp 2 --zero 3 --dropout 0.1", marks=SOAK),
    ],
)
def test_a_run_of_which_ranks_are_killed_ends_with_the_bits_of_one_left_alone(
    kills, world_size, flags, tmp_path
):
    text, steps = tmp_path / "text", 1 + 6 * kills
    text.write_text("All happy families are alike. " * 99)
    flags = f"{FLAGS} --data {text} {flags} --vocab-size 256 --steps {steps} --save-every 3"
    flags += " --sample 0 --print-every 1"
    run(world_size, _undisturbed, f"{flags} --checkpoint {tmp_path / 'alone'}", timeout=120)
    command = ["-c", FORKED, world_size, kills]
    if kills > 3 and world_size == 2:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        command += [f"--max-restarts={kills}", "--monitor-interval=0.1", PROJECT / "hybrid.py"]
    process = _start(tmp_path, command, f"{flags} --checkpoint {tmp_path / 'own'}")
    generator = random.Random(kills)
    at_steps = [1] + sorted(generator.sample(range(2, steps - 6), kills - 1))
    found = list(_kill_ranks(process, list(at_steps), generator))
    assert process.wait(60) == 0, (tmp_path / "errors").read_text()
    assert [killed for killed, _ in found] == at_steps
    assert all(resumed >= killed - 6 for killed, resumed in found)  # one save was under way
    names = [f"step_{step:08d}" for step in (steps - 1, steps)]
    assert _complete(tmp_path / "own") == _complete(tmp_path / "alone") == names
    for name in names:
        assert_same_bits(tmp_path / "own" / name, tmp_path / "alone" / name)


def test_sigterm_ends_a_process_with_its_status_and_its_checkpoint(tmp_path):
    folder = tmp_path / "own"
    flags = f"{FLAGS} --vocab-size 256 --steps 100000 --checkpoint {folder} --device cpu"
    process = _start(tmp_path, [PROJECT / "hybrid.py"], flags)
    lines = [next(process.stdout)]
    process.terminate()
    lines += process.stdout
    step = int(lines[-1].split()[1])
    assert process.wait(60) == 128 + signal.SIGTERM and _complete(folder) == [f"step_{step:08d}"]
    said = f"hybrid.py: error: SIGTERM; --checkpoint {folder} has step {step}\n"
    assert (tmp_path / "errors").read_text() == said
