"""Checkpoints of hybrid.py have the same bits in any layout, and survive signals and full disks."""

import functools
import io
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent import futures
from contextlib import nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import fields
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import hybrid
from collectives import gather_objects
from layouts import assert_alike, soak_but, train_on_text
from ranks import PROJECT, limit_files, on_ranks, quoted, run, shifted, soak, spawn

T, V, BATCH, STEPS = 12, 67, 12, 4
SEED = shifted(3)
CPU = torch.device("cpu")
FLAGS = f"--layers 2 --hidden 32 --heads 8 --kv-heads 4 --seq-len {T} --vocab-size {V}"
FLAGS += f" --batch-size {BATCH} --warmup 2 --steps {STEPS} --seed {SEED} --sample 0"
MIXTURE = "--experts 4 --balance bias --shared-experts 1"

# ---- any layout ----------------------------------------------------------------------------------


def save(trainer, folder):
    """Save a checkpoint, and return when it is complete."""
    with hybrid.Saver(trainer, folder) as saver:
        saver.save()


def _train(flags, folder, dtype=torch.float64, prepare=lambda _: None):
    """Resume from the folder's last checkpoint, save it again in folder/again, and train on."""
    torch.set_default_dtype(dtype)
    words = shlex.split(f"{FLAGS} --checkpoint {quoted(folder)} --save-every 2 {flags}")
    args = hybrid.parse(words, dist.get_world_size())
    trainer = hybrid.Trainer(args, hybrid.make_mesh(args), CPU)
    data = hybrid.Data(*np.random.default_rng(shifted(1)).integers(0, V, (2, 500)))
    prepare(trainer)
    with redirect_stdout(io.StringIO()):
        hybrid.resume(trainer, folder)
    if trainer.steps_done:
        save(trainer, folder / "again")
    with hybrid.Saver(trainer, folder) as saver:
        for step in range(trainer.steps_done, args.steps):
            trainer.step(*data.batch(step, BATCH, T, args.seed, trainer.own_rows()))
            if trainer.steps_done % args.save_every == 0:
                saver.save()


def _resume(world_size, flags, source, folder, dtype=torch.float64):
    """Train on from a copy of a checkpoint; return the folder with the copy and the new ones."""
    shutil.copytree(source, folder / source.name)
    run(world_size, _train, flags, folder, dtype)
    return folder


def read(path):
    """Return {name: whole tensor} of a checkpoint, read by PyTorch."""
    file = path.parent / f"{path.name}.pt"
    dcp_to_torch_save(path, file)
    state = torch.load(file)
    return {f"{kind} {name}": t for kind, tensors in state.items() for name, t in tensors.items()}


def assert_same_bits(path, other):
    found, expected = read(path), read(other)
    assert found.keys() == expected.keys() and len(found) > 20
    assert not [name for name, t in expected.items() if not torch.equal(found[name], t)]


@on_ranks(6)
def test_a_rank_whose_shards_are_only_padding_saves_and_resumes(tmp_path):
    flags = "--pp 3 --layers 1 --hidden 4 --heads 1 --kv-heads 1 --vocab-size 16 --seq-len 8"
    args = hybrid.parse(f"{FLAGS} {flags}".split(), 6)
    trainer, other = (hybrid.Trainer(args, hybrid.make_mesh(args), CPU) for _ in range(2))
    held = sum(hybrid.boxes_of(row, row.tensor).boxes != {} for row in trainer.originals())
    assert not all(gather_objects(held))
    tokens = torch.arange(BATCH * 8).view(BATCH, 8)[trainer.own_rows()] % 16
    trainer.step(tokens, tokens)
    save(trainer, tmp_path)
    hybrid.resume(other, tmp_path)
    assert trainer.step(tokens, tokens) == other.step(tokens, tokens)


LAYOUTS = [  # (model, world size, flags)
    ("", 3, "--dp 3 --zero 0"),
    (MIXTURE, 4, "--tp 2 --pp 2 --ep 2 --zero 3"),
    ("", 4, "--pp 2 --tp 2 --schedule zb-v --microbatches 4 --zero 3"),
    ("", 3, "--dp 3 --zero 1"),
    ("", 4, "--tp 2 --sp --dp 2"),
    ("", 4, "--pp 2 --dp 2 --schedule dualpipe --microbatches 6"),
    ("", 4, "--pp 2 --cp 2 --schedule interleaved --zero 3"),
    ("", 4, "--dp 4 --replicate 2 --zero 2"),
    ("", 6, "--pp 3 --dp 2 --zero 0"),
    (MIXTURE, 4, "--dp 4 --ep 2 --zero 0"),
    (MIXTURE, 4, "--tp 2 --dp 2 --ep 2"),
    (MIXTURE, 4, "--tp 4"),  # all ranks have the same experts
    (MIXTURE, 3, "--dp 3 --replicate 3"),
    ("--block llama", 4, "--pp 2 --tp 2 --schedule dualpipe-v --microbatches 4 --zero 3"),
    ("--block llama --head tied", 2, "--pp 2 --zero 0"),
]


@functools.cache
def _alone(model):
    """Train on one process; return the folder of its checkpoints, which exists until the end."""
    folder = tempfile.TemporaryDirectory()
    run(1, _train, model, Path(folder.name))
    return folder


@pytest.mark.parametrize("model, world_size, flags", soak_but(lambda i, _: i == 1, LAYOUTS))
def test_a_checkpoint_loads_with_the_same_bits_in_any_layout_which_trains_on(
    model, world_size, flags, tmp_path
):
    """The layout that saved it trains on with the same bits, others to 1e-9 in fp64."""
    flags, own, alone = f"{model} {flags}", tmp_path / "own", Path(_alone(model).name)
    run(world_size, _train, flags, own)
    expected = read(alone / "step_00000004")
    assert_alike(read(own / "step_00000004"), expected, 1e-9)
    into = _resume(world_size, flags, alone / "step_00000002", tmp_path / "into")
    back = _resume(1, model, own / "step_00000002", tmp_path / "back")
    same = _resume(world_size, flags, own / "step_00000002", tmp_path / "same")
    assert_same_bits(into / "again" / "step_00000002", alone / "step_00000002")
    assert_same_bits(back / "again" / "step_00000002", own / "step_00000002")
    assert_same_bits(same / "step_00000004", own / "step_00000004")
    assert_alike(read(into / "step_00000004"), expected, 1e-9)
    assert_alike(read(back / "step_00000004"), expected, 1e-9)


@pytest.mark.parametrize("replicate", [1, soak(2)])
def test_a_checkpoint_of_bf16_has_the_fp32_weights_and_resumes_also_in_fp32(tmp_path, replicate):
    flags = f"--replicate {replicate} --dtype bf16"
    run(2, _train, flags, tmp_path / "own", torch.float32)
    source = tmp_path / "own" / "step_00000002"
    on = _resume(2, flags, source, tmp_path / "on", torch.float32)
    assert_same_bits(on / "step_00000004", tmp_path / "own" / "step_00000004")
    other = _resume(2, "--tp 2", source, tmp_path / "other", torch.float32)
    assert_same_bits(other / "again" / "step_00000002", source)
    assert any(t.bfloat16().float().ne(t).any() for t in read(source).values())


def test_moments_take_the_dtype_of_the_run_that_loads_them(tmp_path):
    narrow, wide = "--zero 1 --moments bf16", "--tp 2 --moments fp32"
    run(2, _train, narrow, tmp_path / "narrow", torch.float32)
    source = tmp_path / "narrow" / "step_00000002"
    same = _resume(2, narrow, source, tmp_path / "same", torch.float32)
    assert_same_bits(same / "step_00000004", tmp_path / "narrow" / "step_00000004")
    other = _resume(2, wide, source, tmp_path / "other", torch.float32)
    back = _resume(2, narrow, other / "step_00000004", tmp_path / "back", torch.float32)
    pairs = (other / "again" / source.name, source), (back / "again" / "step_00000004",
                                                      other / "step_00000004")  # fmt: skip
    for (loaded, saved), dtype in zip(pairs, (torch.float32, torch.bfloat16)):
        loaded, saved = read(loaded), read(saved)
        for name, tensor in saved.items():
            expected = tensor.to(dtype) if name.startswith("exp_avg") else tensor
            assert loaded[name].dtype == expected.dtype and torch.equal(loaded[name], expected)


@pytest.mark.parametrize(
    "flags", [soak("--dp 4 --zero 0"), "--tp 2 --pp 2 --schedule dualpipe --microbatches 6"]
)
def test_ranks_divide_a_checkpoint_evenly(flags, tmp_path):
    """Each element is written by one rank, and all ranks write about equally many."""
    run(4, _train, f"{flags} --hidden 64", tmp_path)
    whole = sum(t.numel() * t.itemsize for t in read(tmp_path / "step_00000004").values())
    files = (tmp_path / "step_00000004").glob("*.distcp")
    sizes = {file.name: file.stat().st_size for file in files}
    assert len(sizes) == 4 and sum(sizes.values()) < 1.3 * whole  # boxes have headers
    assert max(sizes.values()) < 1.5 * sum(sizes.values()) / 4


# ---- other optimizers ----------------------------------------------------------------------------


class Signs(torch.optim.Optimizer):
    """An optimizer of a user: it steps by the signs of a mean that it keeps, as Lion does."""

    elementwise = True

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                state.setdefault("mean", torch.zeros_like(weight)).lerp_(weight.grad, 0.1)
                state["step"] = state.get("step", 0) + 1  # a number that is no tensor
                weight.sub_(state["mean"].sign() / state["step"], alpha=group["lr"])


class Undeclared(Signs):
    elementwise = False


class Copied(Signs):
    """An optimizer of another name with the same state."""


class Factors(Signs):
    """An optimizer whose state has another shape than its weight."""

    def step(self):
        for weight in self.param_groups[0]["params"]:
            self.state[weight] = {"factor": weight.new_zeros(2, 3)}


class Hidden(Signs):
    """An optimizer whose mean is not in its state."""

    def __init__(self, groups, lr):
        super().__init__(groups, lr)
        self.means = {}

    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            self.means.setdefault(weight, torch.zeros_like(weight)).lerp_(weight.grad, 0.1)


class Nested(Signs):
    """An optimizer that leaves its steps to another one."""

    def __init__(self, groups, lr):
        super().__init__(groups, lr)
        self.inner = [torch.optim.AdamW(self.param_groups, lr)]

    def step(self):
        self.inner[0].step()


class Counting(Signs):
    """An optimizer that counts its steps in its groups, as Apex does."""

    def step(self):
        super().step()
        self.param_groups[0]["step"] = self.param_groups[0].get("step", 0) + 1


class Attribute(Signs):
    """An optimizer that counts its steps in an attribute."""

    steps = 0

    def step(self):
        super().step()
        self.steps += 1


class Late(Signs):
    """An optimizer with state that it creates in its third step."""

    def step(self):
        super().step()
        for weight, state in self.state.items():
            if state["step"] == 3:
                state["slow"] = weight.clone()


class Skipping(Signs):
    """An optimizer whose weights have not taken the same steps."""

    def step(self):
        super().step()
        self.state[self.param_groups[0]["params"][0]]["step"] -= 1


class Misnamed(Signs):
    """An optimizer whose state has the name under which weights are saved."""

    def step(self):
        super().step()
        for state in self.state.values():
            state["model"] = state["mean"]


def _muon(groups, lr):
    matrices = [weight for group in groups for weight in group["params"] if weight.ndim == 2]
    return torch.optim.Muon(matrices, lr)


OPTIMIZERS = {
    "sgd": lambda groups, lr: torch.optim.SGD(groups, lr, momentum=0.9),
    "plain sgd": torch.optim.SGD,
    "fused sgd": lambda groups, lr: torch.optim.SGD(groups, lr, momentum=0.9, fused=True),
    "amsgrad": lambda groups, lr: torch.optim.AdamW(groups, lr, amsgrad=True),
    "rmsprop": lambda groups, lr: torch.optim.RMSprop(groups, lr, momentum=0.9, centered=True),
    **{name: getattr(torch.optim, name) for name in ("Adagrad", "Rprop")},
    "signs": Signs,
    "undeclared": Undeclared,
    "muon": _muon,
}
OTHERS = [name for name in OPTIMIZERS if name not in ("undeclared", "muon")]
LOST = {  # {optimizer: what checkpoints would lose}
    Factors: "factor", Hidden: "means", Nested: "inner", Counting: "step", Skipping: "step",
    Misnamed: "model", Attribute: "steps",
    torch.optim.NAdam: "mu_product", torch.optim.ASGD: "eta, mu",
}  # fmt: skip


def _with_optimizer(make, flags, folder, printed=None):
    """Run train() with another optimizer, as _end() does."""
    with patch.object(hybrid, "adamw", lambda args, groups: make(groups, args.lr)):
        return _end(flags, folder, printed=printed)


@pytest.mark.parametrize("name", soak_but(lambda *_: False, [[name] for name in OTHERS]))
@on_ranks(2)
def test_a_run_with_another_optimizer_continues_in_any_layout(name, tmp_path):
    """From step 2, which --tp 2 saved, it ends with the weights of a run that did not stop."""
    folder, other = tmp_path / "own", tmp_path / "other"
    flags = "--lr 1e-3 --save-every 2"
    optimizer = OPTIMIZERS[name]
    assert _with_optimizer(optimizer, f"{flags} --tp 2", folder) is None
    for layout in "--tp 2", "--dp 2 --zero 3", "--dp 2 --zero 0":
        if dist.get_rank() == 0:
            shutil.rmtree(other, ignore_errors=True)
            shutil.copytree(folder / "step_00000002", other / "step_00000002")
        dist.barrier()
        assert _with_optimizer(optimizer, f"{flags} {layout}", other) is None
        if dist.get_rank() == 0 and layout == "--tp 2":
            assert read(folder / "step_00000004").keys() == read(other / "step_00000004").keys()
        if dist.get_rank() == 0:
            assert_alike(read(other / "step_00000004"), read(folder / "step_00000004"), 1e-9)
        dist.barrier()


@on_ranks(2)
def test_an_optimizer_that_needs_whole_matrices_is_refused_where_they_are_cut(tmp_path):
    with pytest.raises(ValueError, match="^Muon is wrong on shards"):
        _with_optimizer(OPTIMIZERS["muon"], "--tp 2", tmp_path / "own")
    assert not (tmp_path / "own").exists()
    for cut in "--tp 2", "--zero 1":
        with pytest.warns(UserWarning, match="^Undeclared on shards "):
            assert _with_optimizer(Undeclared, cut, tmp_path / cut) is None
    with warnings.catch_warnings(action="error"):  # nothing is cut
        assert _with_optimizer(Undeclared, "--zero 0", tmp_path / "whole") is None


@on_ranks(1)
def test_an_optimizer_with_state_that_checkpoints_would_lose_is_refused_by_the_first_save(tmp_path):
    for optimizer, lost in LOST.items():
        status, line = _with_optimizer(optimizer, "--save-every 2", tmp_path)
        assert status == 1 and "\n" not in line
        assert f": {optimizer.__name__} keeps {lost}: checkpoints have only " in line
        assert _complete(tmp_path) == []


@on_ranks(1)
def test_a_run_with_another_optimizer_than_that_of_the_checkpoint_is_refused_or_says_so(tmp_path):
    folder, printed = tmp_path / "own", io.StringIO()
    assert _with_optimizer(Signs, "", folder) is None
    status, line = _end("--steps 6", folder)
    assert status == 2 and "step_00000004: " in line and line.endswith(" has no mean")
    assert _with_optimizer(torch.optim.SGD, "", tmp_path / "other") is None  # without state
    status, line = _end("--steps 6", tmp_path / "other")
    assert status == 2 and "step_00000004: " in line and "exp_avg" in line
    assert _with_optimizer(Copied, "--steps 6", folder, printed) is None
    assert "--optimizer Copied (was Signs)" in printed.getvalue()


@on_ranks(1)
def test_a_run_whose_optimizer_would_not_load_all_of_its_state_is_refused(tmp_path):
    assert _with_optimizer(Late, "", tmp_path) is None
    status, line = _with_optimizer(Late, "--steps 6", tmp_path)
    assert status == 2 and "after its first step, the optimizer has no slow" in line


@on_ranks(1)
def test_a_step_that_is_not_finite_changes_no_weight_with_any_optimizer(tmp_path):
    args = hybrid.parse(f"{FLAGS} --lr 1".split(), 1)
    for name in "sgd", "fused sgd", "signs":
        make = lambda args, groups: OPTIMIZERS[name](groups, args.lr)
        with patch.object(hybrid, "adamw", make):
            trainer = hybrid.Trainer(args, hybrid.make_mesh(args), CPU)
        weights = [weight.clone() for weight in trainer.parameters()]
        trainer.parameters()[-1].data.fill_(math.nan)
        tokens = torch.ones(BATCH, T, dtype=torch.long)
        with pytest.raises(hybrid.TrainingError, match="step 1 is not finite"):
            trainer.step(tokens, tokens)
        assert all(map(torch.equal, trainer.parameters()[:-1], weights[:-1]))


# ---- during training -----------------------------------------------------------------------------


def _complete(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


class Saver(hybrid.Saver):
    """A Saver that a test can find."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        Saver.last = self


def _await_save():
    """Wait until the save under way has ended, whether it failed or not."""
    futures.wait([Saver.last.pending])


def _end(flags, folder, disturb=lambda trainer: None, printed=None):
    """Run train() with disturb() before each step; return its error (status, sentence), or None."""
    step, ended = hybrid.Trainer.step, None
    disturbed = lambda trainer, *batch: (disturb(trainer), step(trainer, *batch))[1]
    with (
        redirect_stdout(printed or io.StringIO()),
        patch.object(hybrid.Trainer, "step", disturbed),
        patch.object(hybrid, "Saver", Saver),
    ):
        try:
            train_on_text(f"{FLAGS} --checkpoint {quoted(folder)} {flags}", folder.parent)
        except hybrid.TrainingError as error:
            ended = error.status, str(error)
    limit_files(None)
    return ended


def _terminate(trainer):
    if trainer.steps_done == 1 and dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_on_one_rank_saves_and_ends_all_ranks_after_the_same_step(tmp_path):
    folder = tmp_path / "own"
    for ended in run(3, _end, "--dp 3", folder, _terminate):
        assert ended == (143, f"SIGTERM; --checkpoint {folder} has step 2")
    assert _complete(folder) == ["step_00000002"]


def _hold_first_save(flags, folder, release):
    """Run train(); hold the first save until release(trainer) is true before a step.

    Meanwhile the save's state has been copied, but nothing has been written.
    """
    event, write = threading.Event(), hybrid.write_checkpoint

    def held(*arguments):
        assert event.wait(30), "training waits for the save"
        write(*arguments)

    def disturb(trainer):
        if release(trainer):
            event.set()

    with patch.object(hybrid, "write_checkpoint", held):
        return _end(flags, folder, disturb)


def _at_step_four(trainer):
    return trainer.steps_done == 3


WHILE_SAVING = [["--dp 2 --zero 0"], ["--tp 2"], ["--dp 2 --zero 3"]]


@pytest.mark.parametrize("flags", soak_but(lambda i, _: i == 2, WHILE_SAVING))
def test_training_continues_during_a_save_which_has_the_bits_of_its_own_step(flags, tmp_path):
    flags += " --save-every 2"
    assert run(2, _hold_first_save, flags, tmp_path / "own", _at_step_four) == [None, None]
    assert run(2, _end, flags, tmp_path / "other") == [None, None]
    for name in ("step_00000002", "step_00000004"):
        assert_same_bits(tmp_path / "own" / name, tmp_path / "other" / name)


@on_ranks(1)
def test_a_second_save_waits_for_the_first_before_it_copies(tmp_path):
    events, waits = [], threading.Event()
    copy, write, wait = hybrid.copy_to_host, hybrid.write_checkpoint, hybrid.Saver.wait

    def copy_and_note(state):
        events.append("copied")
        return copy(state)

    def write_and_note(state, path, *arguments):
        assert waits.wait(30)
        write(state, path, *arguments)
        events.append(path.name)

    def wait_and_note(saver):
        if "copied" in events:
            waits.set()
        wait(saver)

    with (
        patch.object(hybrid, "copy_to_host", copy_and_note),
        patch.object(hybrid, "write_checkpoint", write_and_note),
        patch.object(hybrid.Saver, "wait", wait_and_note),
    ):
        assert not _end("--save-every 2", tmp_path / "own")
    assert events == ["copied", "step_00000002", "copied", "step_00000004"]


def _terminate_during_save(trainer):
    if trainer.steps_done == 3 and dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return trainer.steps_done == 3


def test_sigterm_during_a_save_waits_for_it_and_for_the_last_one(tmp_path):
    folder, flags = tmp_path / "own", "--dp 3 --save-every 2 --steps 6"
    for ended in run(3, _hold_first_save, flags, folder, _terminate_during_save):
        assert ended == (143, f"SIGTERM; --checkpoint {folder} has step 4")
    assert _complete(folder) == ["step_00000002", "step_00000004"]


def _flip_a_bit(trainer):
    """Change one weight of rank 1 in its lowest bit, before the third step."""
    if dist.get_rank() == 1 and trainer.steps_done == 2:
        weight = trainer.chunks[0].transformer["h"]["1"].ln_1.weight
        weight.detach().view(torch.int64)[-1] ^= 1


def test_unequal_replicas_end_all_ranks_before_they_are_saved(tmp_path):
    folder, flags = tmp_path / "own", "--dp 2 --zero 0 --save-every 2"
    weight = "transformer.h.1.ln_1.weight"
    for status, line in run(2, _end, flags, folder, _flip_a_bit):
        assert status == 1 and f"{weight} at [0] on rank 1 differs from its copy" in line
    assert _complete(folder) == ["step_00000002"]
    assert run(2, _end, flags, folder) == [None, None]  # it resumes from step 2
    for status, line in run(2, _end, "--dp 2 --zero 0", tmp_path / "other", _flip_a_bit):
        assert status == 1 and weight in line  # also at the end


def _fill_the_disk(folder):
    """Train with files of rank 1 limited to a page from step 4 on; return (error, last step)."""
    last_step = None

    def disturb(trainer):
        nonlocal last_step
        last_step = trainer.steps_done + 1
        if last_step in (4, 5):
            _await_save()
        if last_step == 4 and dist.get_rank() == 1:
            limit_files(4096)

    return _end("--dp 2 --save-every 2 --steps 8", folder, disturb), last_step


def test_a_full_disk_ends_all_ranks_with_one_line_by_the_next_step(tmp_path):
    folder = tmp_path / "own"
    ended, other = run(2, _fill_the_disk, folder)
    (status, line), last_step = ended
    assert ended == other and status == 1 and "\n" not in line and last_step == 5
    assert line.startswith(f"--checkpoint {folder / 'step_00000004'}: rank 1: ")
    assert [name for name in _complete(folder) if "partial" not in name] == ["step_00000002"]
    assert run(2, _end, "--dp 2 --save-every 2", folder)[0] is None  # it resumes from step 2
    assert _complete(folder) == ["step_00000002", "step_00000004"]


@on_ranks(1)
def test_a_save_fails_wherever_the_disk_fills_up(tmp_path):
    """The limit falls into the headers, the numbers, or the ends of what torch.save() writes."""
    state = {"model": {"a": torch.ones(50), "b": torch.ones(3000)}}
    for limit in range(0, 14000, 200):
        limit_files(limit)
        with pytest.raises(hybrid.TrainingError):
            hybrid.write_checkpoint(state, tmp_path / "step_00000001", {"keep": 1}, None)
        limit_files(None)
        assert hybrid.checkpoints_of(tmp_path) == []
    hybrid.write_checkpoint(state, tmp_path / "step_00000001", {"keep": 1}, None)
    assert hybrid.checkpoints_of(tmp_path) == [tmp_path / "step_00000001"]


def _lose_rank_1(folder):
    """Train until rank 1 dies; return what SIGTERM does before and after that."""
    before = signal.getsignal(signal.SIGTERM)

    def die(trainer):
        if trainer.steps_done == 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError) as error:
        _end("--dp 2", folder, die)
    assert isinstance(error.value, dist.DistError)
    return before, signal.getsignal(signal.SIGTERM)


def test_sigterm_ends_a_process_that_has_lost_another_at_once(tmp_path):
    """torchrun sends it to those that are left, and waits for them."""
    alive, dead = spawn(2, _lose_rank_1, tmp_path / "own", check=False)
    assert dead.exitcode == -signal.SIGKILL
    assert alive.result == (signal.SIG_DFL, signal.SIG_DFL)


def _fail_at(step, folder):
    """Train with a loss that is not finite in this step, and hold the save before it till then."""

    def fail(trainer):
        if trainer.steps_done == step - 1:
            next(trainer.chunks[0].parameters()).data.fill_(math.nan)
        return trainer.steps_done == step - 1

    return _hold_first_save("--dp 2 --save-every 2", folder, fail)


def test_a_step_that_fails_during_a_save_lets_it_end(tmp_path):
    for status, line in run(2, _fail_at, 3, tmp_path / "own"):
        assert status == 1 and line.startswith("step 3 is not finite")
    assert _complete(tmp_path / "own") == ["step_00000002"]


PHASES = {  # what the killed rank has begun: (rank, object, name of its function)
    "storage": (1, dcp.FileSystemWriter, "write_data"),
    "digests": (1, hybrid, "digests_of"),
    "sync": (0, os, "sync"),
    "rename": (0, Path, "rename"),
    "delete": (0, os, "rmdir"),  # the files of an old checkpoint are gone, the folder is not
}


def _killed(phase, flags, folder):
    """Train until a rank kills itself in this phase of the third save."""
    rank, place, name = PHASES[phase]
    function = getattr(place, name)

    def kill(*arguments, **options):
        if (folder / "step_00000004").exists() and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    with patch.object(place, name, kill):
        return _end(flags, folder)


@pytest.mark.parametrize("phase", soak_but(lambda i, _: i == 1, [[phase] for phase in PHASES]))
def test_kill_9_in_any_phase_of_a_save_ends_all_ranks_and_loses_no_checkpoint(phase, tmp_path):
    flags, folder = "--dp 2 --save-every 2 --steps 8", tmp_path / "own"
    outcomes = spawn(2, _killed, phase, flags, folder, check=False, timeout=60)
    assert outcomes[PHASES[phase][0]].exitcode == -signal.SIGKILL
    assert all(outcome.exitcode is not None for outcome in outcomes)
    found = hybrid.checkpoints_of(folder)
    steps = (4, 6) if phase == "delete" else (2, 4)
    assert found == [folder / f"step_0000000{step}" for step in steps]
    assert all((path / "run.json").exists() for path in found)
    assert run(2, _end, flags, folder) == [None, None]
    assert run(2, _end, flags, tmp_path / "other") == [None, None]
    assert _complete(folder) == ["step_00000006", "step_00000008"]
    for name in _complete(folder):
        assert_same_bits(folder / name, tmp_path / "other" / name)


# ---- which checkpoints there are -----------------------------------------------------------------


@on_ranks(1)
def test_a_run_keeps_as_many_checkpoints_as_the_flag_says(tmp_path):
    for keep, first in (1, 4), (3, 2):
        folder = tmp_path / f"{keep}"
        assert not _end(f"--save-every 1 --keep {keep}", folder)
        assert _complete(folder) == [f"step_{step:08d}" for step in range(first, STEPS + 1)]


@on_ranks(2)
def test_training_continues_if_the_metrics_file_cannot_be_written(tmp_path):
    step, printed = hybrid.Trainer.step, io.StringIO()

    def fill_the_disk(trainer, *batch):
        if trainer.steps_done == 1 and dist.get_rank() == 0:
            limit_files((tmp_path / "metrics").stat().st_size)
        return step(trainer, *batch)

    with patch.object(hybrid.Trainer, "step", fill_the_disk), redirect_stdout(printed):
        lines = train_on_text("", tmp_path)
    limit_files(None)
    if dist.get_rank() == 0:
        assert [line.get("step") for line in lines] == [None, 1]
        assert printed.getvalue().count("warning: --metrics ends here: ") == 1
        assert "validation loss" in printed.getvalue()


@on_ranks(1)
def test_a_run_with_no_step_left_says_so_and_validates(tmp_path):
    printed = io.StringIO()
    for flags in "--save-every 2", "--steps 2":
        with redirect_stdout(printed):
            train_on_text(f"{FLAGS} --checkpoint {quoted(tmp_path / 'own')} {flags}", tmp_path)
    *_, sentence, validation = printed.getvalue().splitlines()
    assert sentence == "--steps 2: nothing to train, step 4 is saved"
    assert validation.startswith("validation loss ") and validation.endswith(" after step 4")


DAMAGES = {
    "gone": lambda data: None,
    "flipped": lambda data: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:],
    "flipped first": lambda data: bytes([data[0] ^ 4]) + data[1:],
    "cut": lambda data: data[:-9],
    "other steps": lambda data: json.dumps(json.loads(data) | {"steps": 5}).encode(),
    "new": lambda data: b"",
}
CHANGED = "has changed since it was saved"
UNKNOWN = "is not among the files that were saved"
DAMAGED = [
    ("__1_0.distcp", "gone", "No such file"),
    ("__0_0.distcp", "flipped", f"__0_0.distcp {CHANGED}"),
    (".metadata", "flipped", f".metadata {CHANGED}"),
    ("run.json", "gone", "No such file"),
    ("run.json", "cut", f"run.json {CHANGED}"),
    ("run.json", "other steps", f"run.json {CHANGED}"),
    ("SHA256SUMS", "gone", "No such file"),
    ("SHA256SUMS", "flipped", f"run.json {UNKNOWN}"),
    ("SHA256SUMS", "flipped first", CHANGED),
    ("SHA256SUMS", "cut", f"run.json {UNKNOWN}"),
    ("__2_0.distcp", "new", f"__2_0.distcp {UNKNOWN}"),
]


@pytest.mark.parametrize("file, damage, message", soak_but(lambda i, _: i in (1, 5, 8), DAMAGED))
@on_ranks(2)
def test_a_damaged_checkpoint_ends_all_ranks_with_one_line_that_names_it(
    file, damage, message, tmp_path
):
    folder = tmp_path / "own"
    _train("--dp 2", folder)
    if dist.get_rank() == 0:
        path = folder / "step_00000004" / file
        content = DAMAGES[damage](path.read_bytes() if path.exists() else b"")
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
    dist.barrier()
    status, line = _end("--dp 2 --steps 6", folder)
    assert status == 2 and "\n" not in line and message in line and "step_00000004" in line
    assert len(_complete(folder)) == 2  # no checkpoint is deleted


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_together_check_every_file_of_a_checkpoint(world_size, tmp_path):
    path = tmp_path / "step_00000004"
    path.mkdir()
    files = [path / name for name in (".metadata", "__0_0.distcp", "__1_0.distcp")]
    for file in files:
        file.write_text(file.name)
    hybrid.write_run(path, {"step": 4}, hybrid.digests_of(files))
    for file in files:
        file.write_text("other bytes")
        refused = 0
        for rank in range(world_size):
            try:
                hybrid.read_run(path, rank, world_size)
            except ValueError as error:
                assert f"{file.name} {CHANGED}" in str(error)
                refused += 1
        assert refused == 1  # one rank reads this file, and no other one does
        file.write_text(file.name)


@on_ranks(1)
def test_a_file_that_nfs_has_added_to_a_checkpoint_changes_nothing(tmp_path):
    _train("", tmp_path)
    (tmp_path / "step_00000004" / ".nfs00000001").write_text("x")
    assert _end("--steps 6", tmp_path) is None
    assert "step_00000006" in _complete(tmp_path)


@on_ranks(1)
def test_sha256sum_of_the_system_agrees_with_the_digests_of_a_checkpoint(tmp_path):
    _train("", tmp_path)
    path = tmp_path / "step_00000004"
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(command, cwd=path, capture_output=True, text=True)
    files = {file.name for file in path.iterdir()} - {"SHA256SUMS"}
    assert done.returncode == 0 and len(done.stdout.splitlines()) == len(files) == 3


@on_ranks(2)
def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path):
    folder = tmp_path / "own"
    _train("--dp 2", folder)
    if dist.get_rank() == 0:
        (folder / "step_00000004").rename(folder / "step_00000006")
    dist.barrier()
    status, line = _end("--dp 2 --steps 8", folder)
    path = folder / "step_00000006"
    assert (status, line) == (2, f"{path} has been renamed, as its run.json is of step 4")


@on_ranks(1)
def test_a_checkpoint_of_another_model_is_an_error_that_names_the_flag(tmp_path):
    folder = tmp_path / "own"
    _train("", folder)
    path = folder / "step_00000004"
    for own, saved in (
        ("--hidden 64", "--hidden 32"), ("--experts 2", "--experts 0"),
        ("--block llama", "--block gpt2"), ("--head untied", "--head tied"),
    ):  # fmt: skip
        assert _end(own, folder) == (2, f"{own}, but {path} has {saved}")
    assert _complete(folder) == ["step_00000002", "step_00000004"]
    (folder / "step_00000003.partial").mkdir()  # a save that was killed leaves this
    (folder / "step_9").mkdir()  # the name of no checkpoint
    _train("--steps 6", folder)
    assert _complete(folder) == ["again", "step_00000004", "step_00000006", "step_9"]


@on_ranks(1)
def test_files_of_a_killed_save_are_not_in_the_checkpoint_that_takes_its_name(tmp_path):
    """The killed run had more ranks, whose files the next save of this step does not replace."""
    killed = tmp_path / "step_00000002.partial"
    killed.mkdir()
    (killed / "__1_0.distcp").write_bytes(b"boxes of a second rank")
    _train("--steps 2", tmp_path)
    path = tmp_path / "step_00000002"
    assert hybrid.read_run(path)["step"] == 2
    assert not (path / "__1_0.distcp").exists()


@on_ranks(1)
def test_only_flags_that_no_weight_depends_on_may_change_when_a_run_continues():
    args = hybrid.parse([], 1)
    free = "dropout sp recompute recompute_layers capacity_factor topk_nodes".split()
    for name in [each.name for each in fields(hybrid.GPTConfig)]:
        saved = hybrid.flags_of(args) | {name: "another"}
        refused = pytest.raises(ValueError, match=f"{hybrid.as_typed(name)} another")
        with (
            patch.object(hybrid, "read_run", lambda *_: saved),
            nullcontext() if name in free else refused,
        ):
            hybrid.check_checkpoint(Path("folder"), args)


@on_ranks(2)
def test_ranks_that_see_different_checkpoints_resume_from_that_of_the_first_rank(tmp_path):
    """A network file system may show a folder later on one node than on another."""
    _train("", tmp_path)
    args = hybrid.parse(shlex.split(FLAGS), 2)
    trainer = hybrid.Trainer(args, hybrid.make_mesh(args), CPU)
    seen = hybrid.checkpoints_of
    late = lambda folder: seen(folder)[: 1 if dist.get_rank() == 1 else None]
    with patch.object(hybrid, "checkpoints_of", late):
        hybrid.resume(trainer, tmp_path)
    assert trainer.steps_done == 4


@on_ranks(1)
def test_no_flag_has_the_name_of_another_entry_of_run_json(tmp_path):
    _train("", tmp_path)
    run = json.loads((tmp_path / "step_00000004" / "run.json").read_bytes())
    others = {"step", "optimizer", "data_digest"}
    assert {*run} - {*hybrid.FLAGS} == others


def _continues(flags, folder, replaced_text=None):
    """Run train(); return the line that says how it differs from the run that it continues."""
    printed = io.StringIO()
    if replaced_text is not None and dist.get_rank() == 0:
        folder.with_name("other").write_text(replaced_text)
    dist.barrier()
    assert _end(f"--save-every 2 --keep 9 {flags}", folder, printed=printed) is None
    (lines,), *_ = gather_objects([printed.getvalue().splitlines()])
    resumes = [number for number, line in enumerate(lines) if line.startswith("resumes from")]
    if not resumes:
        return None
    line = lines[resumes[0] + 1]
    return line.removeprefix("continues with ") if line.startswith("continues with ") else ""


@on_ranks(2)
def test_a_run_says_how_it_differs_from_the_one_that_it_continues(tmp_path):
    folder, text, other = tmp_path / "own", tmp_path / "text", tmp_path / "other"
    assert _continues("", folder) is None
    assert _continues("", folder) == ""
    expected = f"--batch-size 6 (was 12), --seed {SEED + 1} (was {SEED})"
    assert _continues(f"--seed {SEED + 1} --batch-size 6", folder) == expected
    found = _continues(f"--data {quoted(other)}", folder, "0 4567 " * 99)
    assert found == f"other data (was {text})"
    # nothing has been trained or saved since the first run
    expected = "--dp 1 (was 2), --tp 2 (was 1), --zero 0 (was 1), "
    expected += "--steps 6 (was 4), --decay-steps 4 (was 2)"
    assert _continues(f"--data {quoted(text)} --steps 6 --tp 2", folder) == expected


@on_ranks(1)
def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(tmp_path):
    found = []
    with patch.object(os, "sync", lambda: found.extend(tmp_path.glob("*/run.json"))):
        _train("--steps 2", tmp_path)
    assert found == [tmp_path / "step_00000002.partial" / "run.json"]


@on_ranks(1)
def test_a_second_run_cannot_use_the_folder_of_a_live_run(tmp_path):
    lock = hybrid.claim(tmp_path)  # that of another run, as far as the system knows
    assert _end("", tmp_path) == (2, f"--checkpoint {tmp_path}: another run is using this folder")
    lock.close()
    assert not _end("", tmp_path)


@on_ranks(2)
def test_a_folder_that_ranks_do_not_share_is_refused_before_the_first_step(tmp_path):
    """It may exist on each node, and have the lock of a former run."""
    folder = tmp_path / f"of rank {dist.get_rank()}"
    hybrid.claim(folder).close()
    with patch.object(hybrid.Trainer, "step", None):
        status, line = _end("--dp 2", folder)
    fault = "it is not the folder that rank 0 uses: all nodes must share it"
    assert status == 2 and line == f"--checkpoint {folder}: rank 1: {fault}"


@on_ranks(1)
def test_a_folder_that_cannot_be_locked_is_said(tmp_path):
    no_locks = patch.object(hybrid.fcntl, "flock", side_effect=OSError("no locks"))
    with no_locks, redirect_stderr(io.StringIO()) as printed:
        hybrid.claim(tmp_path).close()
    sentence = f"warning: --checkpoint {tmp_path} is not safe from a second run: no locks"
    assert printed.getvalue().endswith(f": {sentence}\n")


@on_ranks(1)
def test_the_folder_of_a_run_that_has_lost_another_stays_locked_while_its_thread_writes(tmp_path):
    args = hybrid.parse(FLAGS.split(), 1)
    trainer = hybrid.Trainer(args, hybrid.make_mesh(args), CPU)
    release, write = threading.Event(), hybrid.write_checkpoint

    def held(*arguments):
        assert release.wait(30)
        write(*arguments)

    with patch.object(hybrid, "write_checkpoint", held):
        with suppress(RuntimeError), hybrid.Saver(trainer, tmp_path) as saver:
            saver.save()
            raise RuntimeError("rank 0 lost rank 1")
        with pytest.raises(ValueError, match="another run is using this folder"):
            hybrid.claim(tmp_path)
        release.set()
        saver.executor.shutdown()
    hybrid.claim(tmp_path).close()


# ---- under torchrun ------------------------------------------------------------------------------


def _undisturbed(flags):
    with redirect_stdout(io.StringIO()):
        hybrid.train(hybrid.parse(shlex.split(flags), dist.get_world_size()), CPU)


def _start(*words, **options):
    """Start torchrun; return its process, whose output is a pipe."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **options)


def _kill_ranks(process, at_steps, generator):
    """Kill -9 a rank soon after rank 0 has printed the line of each of these steps.

    Yield (the step of the kill, the step from which the next attempt resumed).
    """
    killed = None
    for line in process.stdout:
        begins = re.match(r"resumes from .*/step_(\d+)|step +(1) ", line)
        if killed is not None and begins:
            yield killed, int(begins[1] or 0)
            killed = None
        step = re.match(r"step +(\d+) ", line)
        if at_steps and killed is None and step and int(step[1]) >= at_steps[0]:
            killed = at_steps.pop(0)
            moment = time.perf_counter() + generator.uniform(0, 0.05)
            while time.perf_counter() < moment:  # a step takes 10 ms, and a save 30 ms
                pass
            os.kill(generator.choice(_ranks_of(process)), signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.parametrize(
    "kills, world_size, flags",
    [(2, 2, "--dp 2 --dropout 0.1"), (20, 4, "--tp 2 --dp 2 --zero 3 --dropout 0.1")],
)
def test_a_run_whose_ranks_are_killed_ends_with_the_bits_of_an_undisturbed_run(
    kills, world_size, flags, tmp_path
):
    text, steps = tmp_path / "text", 1 + 6 * kills
    text.write_text("All happy families are alike. " * 99)
    flags = f"{FLAGS} --data {quoted(text)} {flags} --vocab-size 256 --steps {steps} --save-every 3"
    flags += " --print-every 1"
    run(world_size, _undisturbed, f"{flags} --checkpoint {quoted(tmp_path / 'alone')}", timeout=120)
    words = [f"--nproc-per-node={world_size}", f"--max-restarts={kills}", "--monitor-interval=0.1"]
    words += [PROJECT / "hybrid.py", "--checkpoint", tmp_path / "own", *shlex.split(flags)]
    process = _start(*words, stderr=open(tmp_path / "errors", "w"))
    generator = random.Random(shifted(kills))
    at_steps = [1] + sorted(generator.sample(range(4, steps - 6), kills - 1))  # step 3 is saved
    found = list(_kill_ranks(process, list(at_steps), generator))
    assert process.wait(60) == 0, (tmp_path / "errors").read_text()
    assert [killed for killed, _ in found] == at_steps
    assert all(resumed >= killed - 6 for killed, resumed in found)  # two saves may be incomplete
    names = [f"step_{step:08d}" for step in (steps - 1, steps)]
    assert _complete(tmp_path / "own") == _complete(tmp_path / "alone") == names
    for name in names:
        assert_same_bits(tmp_path / "own" / name, tmp_path / "alone" / name)


def _ranks_of(process):
    """Return the process ids of torchrun's ranks."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children]


@pytest.mark.soak
@pytest.mark.parametrize("checkpoint", ["", "--checkpoint DIR --save-every 2"])
def test_after_a_kill_all_processes_end_within_seconds_and_one_says_why(checkpoint, tmp_path):
    words = checkpoint.replace("DIR", str(tmp_path / "own")).split()
    words = ["--nproc-per-node=4", PROJECT / "hybrid.py", *FLAGS.split(), *words]
    with open(tmp_path / "errors", "w") as errors:
        flags = "--vocab-size=256", "--steps=1000000", "--print-every=1"
        process = _start(*words, *flags, stderr=errors)
    next(line for line in process.stdout if line.startswith("step 5 "))
    began = time.monotonic()
    os.kill(_ranks_of(process)[2], signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == 1 and time.monotonic() - began < 5
    own = [line for line in (tmp_path / "errors").read_text().splitlines() if "hybrid.py: " in line]
    assert len(own) == 1 and " lost rank 2: " in own[0]


@pytest.mark.soak
def test_processes_exit_when_torchrun_is_killed():
    words = ["--nproc-per-node=2", PROJECT / "hybrid.py", *FLAGS.split(), "--vocab-size=256"]
    process = _start(*words, "--steps=1000000")
    next(line for line in process.stdout if line.startswith("step 1 "))
    ranks = _ranks_of(process)
    process.kill()
    try:
        process.communicate(timeout=30)  # returns when the last process has closed the pipe
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
