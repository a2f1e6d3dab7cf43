"""hybrid.py's checkpoints: the same bits in any layout, after a signal, a kill and a full disk."""

import functools
import io
import itertools
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

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import hybrid

from ranks import PROJECT, on_ranks, run
from tensor_parallel import boxes_of

T, V, BATCH, STEPS = 12, 67, 12, 4
FLAGS = f"--layers 4 --hidden 32 --heads 8 --kv-heads 2 --seq-len {T} --vocab-size {V}"
FLAGS += f" --batch-size {BATCH} --warmup 2 --steps {STEPS} --seed 3"
MIXTURE = "--layers 2 --experts 4 --balance bias --shared-experts 1"

# ---- boxes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(7,), (3, 4), (5, 1), (1, 6), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)]
)
def test_a_range_of_a_flat_tensor_is_a_few_boxes_in_order(shape):
    flat = torch.arange(math.prod(shape))
    for begin, end in itertools.combinations_with_replacement(range(len(flat) + 1), 2):
        boxes = list(boxes_of(shape, begin, end))
        places = [tuple(slice(p, p + n) for p, n in zip(*box)) for box in boxes]
        found = [flat.view(shape)[place].flatten() for place in places]
        assert all(map(len, found)) and len(boxes) <= 2 * len(shape) - 1
        assert torch.equal(torch.cat([flat[:0], *found]), flat[begin:end])


# ---- any layout ----------------------------------------------------------------------------------


def _trainer(flags):
    args = hybrid.parse_args(flags.split(), dist.get_world_size())
    sizes = args.pp, args.dp, args.cp, args.tp, args.ep
    mesh = hybrid.make_mesh(*sizes, replicate=args.replicate)
    return hybrid.Trainer(args, mesh, torch.device("cpu"))


def _data():
    tokens = np.random.default_rng(1).integers(0, V, (2, 500)).astype(np.uint8)
    return hybrid.Data(*tokens, is_text=False)


def _train(flags, folder, dtype=torch.float64, resume=False, prepare=lambda _: None):
    """Train to the end, or from the checkpoint in the folder on, which is saved again, elsewhere.

    Returns on rank 0 the weights by name, and on each how many elements it saved.
    """
    torch.set_default_dtype(dtype)
    trainer = _trainer(f"{FLAGS} --checkpoint {folder} --save-every 2 {flags}")
    prepare(trainer)
    with redirect_stdout(io.StringIO()), hybrid.Checkpoints(trainer) as checkpoints:
        if resume:
            checkpoints.folder = folder / "again"
            checkpoints.save(trainer.steps_done)
            checkpoints.wait()
            checkpoints.folder = folder
        hybrid.run_steps(trainer, _data(), hybrid.Log(trainer), checkpoints)
    saved = sum(box.numel() for box in checkpoints.memory.values())
    return hybrid.gather_state(trainer), saved


def _resume(world_size, flags, source, folder, dtype=torch.float64):
    """Train on from a checkpoint; returns the folder with that, saved again, and with the end."""
    shutil.copytree(source, folder / source.name)
    run(world_size, _train, flags, folder, dtype, resume=True)
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


SOAK = pytest.mark.soak
LAYOUTS = [  # model, world size, flags
    ("", 3, "--dp 3 --zero 0"),
    (MIXTURE, 4, "--tp 2 --pp 2 --ep 2 --zero 3"),
    pytest.param("", 4, "--pp 2 --tp 2 --schedule zb-v --microbatches 4 --zero 3", marks=SOAK),
    pytest.param(MIXTURE, 4, "--tp 2 --dp 2 --ep 2", marks=SOAK),
    pytest.param("", 3, "--dp 3 --zero 1", marks=SOAK),
    pytest.param("", 4, "--tp 4 --sp", marks=SOAK),  # two ranks have the same keys and values
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
    state, saved = run(1, _train, model, Path(folder.name))[0]
    whole = read(Path(folder.name) / "step_00000004")
    assert saved == sum(map(torch.numel, whole.values()))
    weights = {name: t for name, t in state.items() if name != "lm_head.weight"}
    assert all(torch.equal(whole[f"model {name}"], t) for name, t in weights.items())
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
    assert [(run["skipped"], run["skipped_in_a_row"]) for run in numbers] == [(1, 0)] * 2


def test_bf16_keeps_its_masters_and_goes_on_in_fp32(tmp_path):
    run(2, _train, "--zero 0 --dtype bf16", tmp_path / "own", torch.float32)
    source = tmp_path / "own" / "step_00000002"
    on = _resume(2, "--zero 0 --dtype bf16", source, tmp_path / "on", torch.float32)
    assert_same_bits(on / "step_00000004", tmp_path / "own" / "step_00000004")
    other = _resume(2, "--tp 2", source, tmp_path / "other", torch.float32)
    assert_same_bits(other / "again" / "step_00000002", source)
    assert any(t.bfloat16().float().ne(t).any() for t in read(source).values())


@pytest.mark.parametrize(
    "flags, most",
    [
        ("--dp 4 --zero 0", 1.05),
        (f"--dp 4 --ep 2 {MIXTURE}", 1.05),
        ("--tp 2 --pp 2 --schedule dualpipe --microbatches 6", 1.3),
    ],
)
def test_ranks_share_out_what_is_to_be_saved(flags, most, tmp_path):
    """Each element is in the memory of one rank, and each has about as many."""
    saved = [saved for _, saved in run(4, _train, flags, tmp_path)]
    whole = sum(map(torch.numel, read(tmp_path / "step_00000004").values()))
    assert sum(saved) == whole and max(saved) < most * whole / 4


# ---- while it trains -----------------------------------------------------------------------------


def _complete(folder):
    return sorted(path.name for path in folder.iterdir())


def _last_steps(flags, folder, disturb):
    """Train with something done before each step; returns how it ended, and what was said."""
    torch.set_default_dtype(torch.float32)
    trainer = _trainer(f"{FLAGS} {flags} --checkpoint {folder}")
    step = trainer.step

    def disturbed(*batch):
        disturb(trainer, checkpoints)
        return step(*batch)

    trainer.step, said, ended = disturbed, io.StringIO(), None
    handler = signal.getsignal(signal.SIGTERM)
    with redirect_stdout(io.StringIO()), redirect_stderr(said):
        try:
            with hybrid.Checkpoints(trainer) as checkpoints:
                hybrid.run_steps(trainer, _data(), hybrid.Log(trainer), checkpoints)
        except hybrid.TrainingError as error:
            ended = error
    _limit_files()
    assert signal.getsignal(signal.SIGTERM) is handler
    found = ended and (ended.status, str(ended)), said.getvalue(), trainer.steps_done
    return *found, _complete(folder)


def _terminate(trainer, checkpoints):
    if trainer.steps_done == 1 and dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_at_one_rank_saves_and_ends_all_after_the_same_step(tmp_path):
    for ended, said, steps, _ in run(3, _last_steps, "--dp 3", tmp_path, _terminate):
        assert steps == 2 and not said
        assert ended == (143, f"--checkpoint {tmp_path} has step 2")
    assert _complete(tmp_path) == ["step_00000002"]


def _limit_files(limit=None):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit or hard, hard))


def _fill_the_disk(trainer, checkpoints):
    """No file of rank 1 can be larger than a page, from the first save until the next one's end."""
    checkpoints.wait()
    if dist.get_rank() == 1 and trainer.steps_done in (2, 4):
        _limit_files(4096 if trainer.steps_done == 2 else None)


@pytest.mark.parametrize("steps", [6, 4])
def test_a_full_disk_costs_a_line_and_one_checkpoint(steps, tmp_path):
    """After the last step it ends all ranks, since it costs the result."""
    flags = f"--dp 2 --steps {steps} --save-every 2"
    found = run(2, _last_steps, flags, tmp_path, _fill_the_disk)
    (ended, said, _, complete), (other, nothing, _, _) = found
    path = tmp_path / "step_00000004"
    assert said == f"hybrid.py: error: --checkpoint {path}: rank 1: [Errno 27] File too large\n"
    assert not nothing and ended == other
    if steps == 6:
        assert not ended and complete == ["step_00000002", "step_00000006"]
    else:
        assert ended == (1, f"--checkpoint {tmp_path} lacks the last step, 4")
        assert complete == ["step_00000002"]


def test_streams_to_a_full_disk_fail_where_python_flushes_them():
    with pytest.raises(OSError, match="No space left"):
        with hybrid.Stream(io.FileIO("/dev/full", "wb")) as stream:
            assert stream.write(bytes(10**6)) == 10**6
            with pytest.raises(OSError, match="No space left"):
                stream.flush()


def _raise(trainer, checkpoints):
    if trainer.steps_done == 2:
        raise hybrid.TrainingError("the end")


def test_an_error_of_all_ranks_waits_for_the_save_under_way(tmp_path):
    flags = "--dp 2 --save-every 2"
    ended, said, steps, complete = run(2, _last_steps, flags, tmp_path, _raise)[0]
    assert ended == (1, "the end") and not said and complete == ["step_00000002"]


def _end_on(flags, folder, damage):
    """How a run ends that finds this in its last checkpoint."""
    if dist.get_rank() == 0:
        damage(folder)
    dist.barrier()
    return _last_steps(f"{flags} --resume", folder, lambda *_: None)


def _lose_a_file(folder):
    (folder / "step_00000004" / "__1_0.distcp").unlink()


def test_a_damaged_checkpoint_ends_all_ranks_with_a_line(tmp_path):
    run(2, _train, "--dp 2", tmp_path)
    for ended, said, steps, _ in run(2, _end_on, "--dp 2 --steps 6", tmp_path, _lose_a_file):
        status, line = ended
        assert status == 1 and steps == 4 and "\n" not in line and not said
        assert line.startswith(f"--resume: {tmp_path}/step_00000004: rank ")
        assert "No such file" in line


def _flags(flags, folder):
    return hybrid.parse_args(f"{FLAGS} {flags} --checkpoint {folder}".split(), 1)


def test_resume_wants_the_same_model_and_names_what_else_has_changed(tmp_path):
    run(1, _train, "", tmp_path)
    last = tmp_path / "step_00000004"
    for flags, message in {
        "": f"{last} is there already: --resume, or another --checkpoint",
        "--resume --hidden 64": f"--hidden 64, but {last} has --hidden 32",
        "--resume --kv-heads 4": f"--kv-heads 4, but {last} has --kv-heads 2",
        "--resume --experts 2": f"--experts 2, but {last} has --experts 0",
    }.items():
        with pytest.raises(ValueError, match=f"^({message})$"):
            hybrid.prepare_checkpoints(_flags(flags, tmp_path))
    (tmp_path / "step_00000006.partial").mkdir()  # what a killed save leaves
    changed = _flags("--resume --seed 7 --steps 9", tmp_path)
    assert hybrid.prepare_checkpoints(changed) == last
    assert _complete(tmp_path) == ["step_00000002", "step_00000004"]
    text = hybrid.changed_flags(json.loads((last / "run.json").read_text()), changed)
    assert text == "; changed: --steps 9 (was 4), --seed 7 (was 3)"
    with pytest.raises(ValueError, match="^--generate: .*/none has no checkpoint$"):
        hybrid.prepare_checkpoints(_flags("--resume --generate 5", tmp_path / "none"))


# ---- under torchrun ------------------------------------------------------------------------------


def _undisturbed(flags):
    trainer = _trainer(flags)
    with redirect_stdout(io.StringIO()), hybrid.Checkpoints(trainer) as checkpoints:
        data = hybrid.load_data(trainer.args.data, T)
        hybrid.run_steps(trainer, data, hybrid.Log(trainer), checkpoints)


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
        begins = re.match(r"resumed from .*/step_(\d+)|step +(1) ", line)
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
    process = _start(tmp_path, command, f"{flags} --checkpoint {tmp_path / 'own'} --resume")
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
    said = f"hybrid.py: terminated: --checkpoint {folder} has step {step}\n"
    assert (tmp_path / "errors").read_text() == said
