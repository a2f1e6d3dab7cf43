"""Every flag of hybrid.py has an effect or is refused; warnings and --help."""

import hashlib
import io
import os
import re
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hybrid
from collectives import observe
from pipeline import SCHEDULES
from ranks import PROJECT, run, shifted, soak, torchrun

# ---- every flag ----------------------------------------------------------------------------------

# What changes: `bits` of the weights, `messages`, `memory` that autograd holds, `output` (what is
# printed, and which files are written), the `patience` of a group, or the run is `refused`. Two
# processes are too few for --overlap, which test_pairs.py compares with a run without it.
EFFECTS = """a flag | flags that it needs | what changes
--layers 3 | | bits
--hidden 32 | | bits
--heads 2 | | bits
--seq-len 16 | | bits
--vocab-size 300 | | bits
--dropout 0.1 | | bits
--kv-heads 2 | | bits
--block llama | | bits
--rope-theta 100.0 | --block llama | bits
--head untied | | bits
--sp | --tp 2 | messages
--recompute full | | memory
--recompute-layers 2 | --recompute full --layers 2 | memory
--ffn 32 | | bits
--experts 4 | | bits
--top-k 1 | --experts 4 | bits
--shared-experts 1 | --experts 4 | bits
--capacity-factor 0.5 | --experts 4 | bits
--balance bias | --experts 4 | bits
--moe-every 2 | --layers 2 --experts 4 | bits
--topk-nodes 1 | --experts 4 --ep 2 | bits
--dp 3 | | refused
--tp 2 | | messages
--cp 2 | | messages
--pp 2 | | messages
--zero 3 | | messages
--replicate 2 | | messages
--cp-method allgather | --cp 2 | messages
--schedule gpipe | --pp 2 --microbatches 4 | memory
--overlap | | refused
--chunks 3 | --layers 4 --pp 2 --schedule interleaved | messages
--microbatches 2 | | memory
--ep 2 | --experts 4 | messages
--expert-parts 2 | --experts 4 --ep 2 | messages
--collectives backend | | messages
--batch-size 8 | | bits
--steps 5 | | bits
--lr 0.01 | | bits
--warmup 0 | | bits
--lr-decay linear | | bits
--decay-steps 1 | | bits
--min-lr 0.001 | | bits
--weight-decay 0.5 | | bits
--grad-clip 0.01 | | bits
--seed 1 | | bits
--dtype bf16 | | bits
--moments bf16 | | bits
--device cuda | | refused
--data ../other | | bits
--checkpoint folder | | output
--save-every 1 | --checkpoint folder | output
--keep 1 | --checkpoint folder --save-every 1 | output
--resume-step 1 | | refused
--eval-every 1 | | output
--sample 3 | | output
--prompt abc | | output
--temperature 0 | | output
--print-every 3 | | output
--metrics file | | output
--timeout 7 | | patience
"""
ROWS = [line.split(" | ") for line in EFFECTS.replace("| |", "|  |").splitlines()[1:]]
TINY = "--layers 1 --hidden 16 --heads 4 --seq-len 8"
TINY += f" --batch-size 4 --steps 4 --warmup 1 --data ../text --sample 9 --seed {shifted(2)}"


def _name(typed):
    return typed.split()[0].removeprefix("--").replace("-", "_")


def test_every_flag_has_a_row_in_the_table():
    assert {_name(typed) for typed, *_ in ROWS} == {flag.name for flag in hybrid.FLAGS}


NEEDS = {flag.name: flag.metadata["needs"] for flag in hybrid.FLAGS if "needs" in flag.metadata}
OFF = {"--lr-decay cosine or linear": "--lr-decay none"}  # how to lack what is on by default


@pytest.mark.parametrize("typed, needed, _", ROWS)
def test_a_flag_is_refused_without_what_it_needs(typed, needed, _):
    name = _name(typed)
    if needed or name in NEEDS:
        with pytest.raises(ValueError) as error:
            hybrid.parse(f"{OFF.get(NEEDS[name], '')} {typed}".split(), 1)
        assert str(error.value) == f"{typed} needs {NEEDS[name]}"


def test_a_flag_may_need_a_number():
    args = hybrid.parse("--zero 0 --pp 2".split(), 4)
    assert hybrid.is_met(args, "--zero 0 or 2") and not hybrid.is_met(args, "--zero 1")


@pytest.mark.parametrize("name", SCHEDULES)
def test_chunks_is_accepted_with_the_schedules_whose_caller_chooses_them(name):
    flags = f"--pp 2 --microbatches 4 --layers 8 --chunks 3 --schedule {name}".split()
    if SCHEDULES[name].v is None:
        assert hybrid.parse(flags, 2).chunks == 3
    else:
        with pytest.raises(ValueError, match="--chunks 3 needs --schedule interleaved"):
            hybrid.parse(flags, 2)


@pytest.mark.parametrize("name", NEEDS)
def test_a_flag_is_accepted_without_what_it_needs_if_its_value_means_that_it_is_off(name):
    (flag,) = [flag for flag in hybrid.FLAGS if flag.name == name]
    if (neutral := flag.metadata.get("neutral")) is not None:
        args = hybrid.parse(hybrid.as_typed(name, neutral).split(), 1)
        assert getattr(args, name) == neutral


class Saved:
    """A tensor that autograd has saved for backward. Counts the bytes of all such tensors."""

    held = peak = 0

    def __init__(self, tensor):
        self.tensor = tensor
        Saved.held += tensor.nbytes
        Saved.peak = max(Saved.peak, Saved.held)

    def __del__(self):
        Saved.held -= self.tensor.nbytes


def _observe(flags, folder):
    """Train in a new folder, and return what EFFECTS says may change. Every process is a node."""
    messages = []
    trainers = []
    Saved.held = Saved.peak = 0
    forward_backward = hybrid.Trainer.forward_backward

    def listen(event, operation, sends=(), receives=()):
        messages.extend((operation.name, peer, tensor.nbytes) for tensor, peer in sends)

    def with_hooks(trainer, *batch):
        trainers[:] = [trainer]
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            return forward_backward(trainer, *batch)

    args = hybrid.parse(f"{TINY} {flags}".split(), dist.get_world_size(), per_node=1)
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    with (
        patch.object(hybrid, "evaluate", lambda *_: 0.0),
        patch.object(hybrid.Trainer, "forward_backward", with_hooks),
        observe(listen),
        redirect_stdout(io.StringIO()) as printed,
    ):
        hybrid.train(args, torch.device("cpu"))
    files = sorted(str(path) for path in Path().rglob("*"))
    os.chdir("/")
    (trainer,) = trainers
    weights = [weight.detach() for weight in trainer.parameters()]
    digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights))
    gloo = trainer.mesh.pp_group._get_backend(torch.device("cpu"))
    return {
        "bits": digest.hexdigest(),
        "messages": sorted(messages),  # threads post some of them
        "memory": Saved.peak,
        "output": (re.sub(r"[-+.,:\d]+(e[-+]\d+)?", "0", printed.getvalue()), files),
        "patience": gloo.options._timeout,
    }


def _unchanged(rows, folder):
    """Return the rows, without what they need, whose flag changes nothing on this rank."""
    without = {}
    found = []
    for number, (typed, needed, what) in enumerate(rows):
        if needed not in without:
            without[needed] = _observe(needed, folder / f"without {number}")
        if _observe(f"{needed} {typed}", folder / str(number))[what] == without[needed][what]:
            found.append((typed, what))
    return found


@pytest.mark.parametrize("part", [slice(0, None, 12), soak(slice(1, None))])
def test_each_flag_changes_what_the_table_says(part, tmp_path):
    for name in ("text", "other"):
        (tmp_path / name).write_text(name * 100)
    again = [("", what) for what in ("bits", "messages", "memory", "output", "patience")]
    rows = [("", "", what) for _, what in again]  # nothing changes by itself
    rows += [row for row in ROWS if row[2] != "refused"][part]
    unchanged, _ = run(2, _unchanged, rows, tmp_path, timeout=240)
    assert unchanged == again


@pytest.mark.parametrize("typed", [typed for typed, _, what in ROWS if what == "refused"])
def test_flags_that_fit_one_machine_only_are_refused_elsewhere(typed, monkeypatch, capsys):
    monkeypatch.setattr(hybrid, "launched", lambda: (0, 2, 0, 2))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hybrid.main(typed.split()) == 2
    assert typed in capsys.readouterr().err


def test_main_sets_the_environment_that_gpus_need_unless_it_is_set(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv("NCCL_MAX_P2P_NCHANNELS", "4")
    seen = {}
    assert hybrid.main([], lambda args, device: seen.update(os.environ)) == 0
    assert seen["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert seen["NCCL_MAX_P2P_NCHANNELS"] == "4"
    for name, value in hybrid.ENVIRONMENT.items():
        assert f"  {name}={value}  " in hybrid.EPILOG


EMPTY = [flag.name for flag in hybrid.FLAGS if flag.type is not bool]


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_value_is_refused_as_a_shell_variable_that_is_not_set_gives_it(name):
    with pytest.raises(ValueError, match=f"^{hybrid.as_typed(name)}: "):
        hybrid.parse([hybrid.as_typed(name), ""], 1)


# ---- the launcher's environment ------------------------------------------------------------------

COMPLETE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
LOCAL = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
WRONG_ENVIRONMENTS = """variables | what is wrong
WORLD_SIZE=2 | the environment has no RANK, MASTER_ADDR, MASTER_PORT: torchrun sets all of RANK, \
WORLD_SIZE, MASTER_ADDR, MASTER_PORT
RANK= | has no RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: torchrun
RANK=0 WORLD_SIZE=1 | the environment has no MASTER_ADDR, MASTER_PORT: torchrun
RANK=0 MASTER_ADDR=host MASTER_PORT=29500 | the environment has no WORLD_SIZE: torchrun
RANK=0 WORLD_SIZE= MASTER_ADDR=host MASTER_PORT=29500 | the environment has no WORLD_SIZE: torchrun
RANK=2 WORLD_SIZE=2 MASTER_ADDR=host MASTER_PORT=29500 | RANK 2 is not below WORLD_SIZE 2
RANK=x WORLD_SIZE=2 MASTER_ADDR=host MASTER_PORT=29500 | RANK is not a number: 'x'
RANK=-1 WORLD_SIZE=2 MASTER_ADDR=host MASTER_PORT=29500 | RANK is not a number: '-1'
RANK=1 WORLD_SIZE=2 MASTER_ADDR=host MASTER_PORT=tcp://10.0.0.1:80 | MASTER_PORT is not a number: 't
RANK=1 WORLD_SIZE=2 MASTER_ADDR=host MASTER_PORT=65536 | MASTER_PORT is not below 65536
LOCAL_RANK= | LOCAL_RANK is not a number: ''
LOCAL_WORLD_SIZE=0 | LOCAL_WORLD_SIZE is 0
"""


def _set(monkeypatch, variables):
    for name in (*COMPLETE, *LOCAL):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("line", WRONG_ENVIRONMENTS.splitlines()[1:])
def test_an_incomplete_environment_is_one_line_and_nothing_is_waited_for(line, monkeypatch, capsys):
    variables, message = line.split(" | ")
    _set(monkeypatch, dict(word.split("=", 1) for word in variables.split()))
    monkeypatch.setattr(hybrid, "join", lambda *_: pytest.fail("began to wait"))
    assert hybrid.main([]) == 2
    (complaint,) = capsys.readouterr().err.splitlines()
    assert ": error: " in complaint and message in complaint


def test_without_a_launcher_a_process_is_alone_and_with_one_it_has_its_place(monkeypatch):
    _set(monkeypatch, {"MASTER_ADDR": "host", "MASTER_PORT": "tcp://a-service-of-kubernetes"})
    assert hybrid.launched() == (0, 1, 0, 1)
    _set(monkeypatch, COMPLETE)
    assert hybrid.launched() == (1, 4, 0, 4)
    _set(monkeypatch, COMPLETE | LOCAL)
    assert hybrid.launched() == (1, 4, 1, 2)


@pytest.mark.parametrize("flags", ["", "--layers 0"])
def test_a_process_whose_peers_do_not_come_ends_with_a_line(flags, monkeypatch, capsys):
    _set(monkeypatch, COMPLETE)
    monkeypatch.setattr(hybrid, "choose_device", lambda *_: (torch.device("cpu"), "gloo"))
    nobody = Mock(side_effect=dist.DistNetworkError("timed out\nframe #0"))
    monkeypatch.setattr(dist, "rendezvous", nobody)
    status = hybrid.main(flags.split())
    said = capsys.readouterr().err
    if flags:  # rank 0 says what is wrong with them
        assert (status, said) == (2, "")
    else:
        line = "error: rank 1 has not met all others at host:29500: timed out\n"
        assert status == 1 and said.endswith(line) and said.count("\n") == 1


def _take_memory_of_torch(*_):
    torch.empty(2**60)


def _take_memory_of_numpy(*_):
    np.zeros(2**60, np.uint8)


@pytest.mark.parametrize("work", [_take_memory_of_torch, _take_memory_of_numpy])
def test_a_rank_without_memory_says_so_in_one_line(work, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert hybrid.main([], work) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: rank 0 has no memory left: " in line and "allocate" in line
    dist.destroy_process_group()


# ---- --help --------------------------------------------------------------------------------------


def _help(monkeypatch, capsys, rank):
    """Return what a rank prints for --help."""
    monkeypatch.setattr(hybrid, "launched", lambda: (rank, 2, rank, 2))
    with pytest.raises(SystemExit) as end:
        hybrid.main(["--help"])
    assert end.value.code == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def test_help_is_in_groups_and_is_printed_by_one_rank(monkeypatch, capsys):
    text = _help(monkeypatch, capsys, 0)
    assert _help(monkeypatch, capsys, 1) == ""
    groups = re.split(r"\n(\w+):\n", text.split("\n\nA flag that")[0])
    sections = zip(groups[3::2], groups[4::2], strict=True)
    flags_of = {title: re.findall(r"^  --([\w-]+)", body, re.M) for title, body in sections}
    assert list(flags_of) == ["model", "experts", "layout", "optimisation", "run"]
    assert flags_of["experts"][:2] == ["experts", "top-k"]
    assert {"ffn", "dropout"} <= {*flags_of["model"]} and {"sp", "pp"} <= {*flags_of["layout"]}
    listed = sum(flags_of.values(), [])
    assert sorted(listed) == sorted(flag.name.replace("_", "-") for flag in hybrid.FLAGS)
    for variable, value in hybrid.ENVIRONMENT.items():
        assert f"{variable}={value} " in text
    for needs in NEEDS.values():
        assert f"needs {needs}" in re.sub(r"\s+", " ", text)
    assert "needs --ep > 1; needs --schedule dualpipe or" in re.sub(r"\s+", " ", text)


def _train(flags):
    with patch.object(hybrid, "evaluate", lambda *_: 0.0), redirect_stdout(io.StringIO()):
        hybrid.train(hybrid.parse(flags, dist.get_world_size()), torch.device("cpu"))


@pytest.mark.soak
def test_the_example_in_help_runs():
    launch, number, world_size, file, *flags = re.search("torchrun --n.*", hybrid.EPILOG)[0].split()
    assert (launch, number, file) == ("torchrun", "--nproc-per-node", "hybrid.py")
    run(int(world_size), _train, [*flags, "--steps", "1"])


@pytest.mark.soak
def test_torchrun_prints_help_once():
    done = torchrun(4, PROJECT / "hybrid.py", "--help")
    assert done.returncode == 0 and done.stdout.count("usage:") == 1


# ---- warnings ------------------------------------------------------------------------------------

# In units of F = W = 1 and B = 2, or 3 with recomputation. For p = m = 4, 1F1B is idle for
# (p - 1)(F + B) = 9 of 9 + 4 x 3, and ZB-H1 for (p - 1)(F + B - 2W) = 3 of 15, or 6 of 22.
WARNINGS = """processes, per node, flags | warning
8 8 --tp 8 --heads 8 |
8 4 --tp 8 --heads 8 | --tp 8 leaves a node of 4 processes: every layer waits for sums between nodes
8 4 --tp 4 --heads 8 |
12 6 --tp 4 | --tp 4 leaves a node of 6 processes: every layer waits for sums between nodes
4 4 --pp 4 --microbatches 8 |
4 4 --pp 4 --microbatches 4 | --schedule 1f1b a rank is idle for 43% of a step
4 4 --pp 4 --microbatches 4 --recompute full | --schedule 1f1b a rank is idle for 43% of a step
4 4 --pp 4 --microbatches 1 | --microbatches 1 is fewer than 2 * --pp 4: with --schedule 1f1b \
a rank is idle for 75% of a step
4 4 --pp 4 --microbatches 4 --schedule gpipe | a rank is idle for 43% of a step
4 4 --pp 4 --microbatches 4 --schedule naive | a rank is idle for 75% of a step
4 4 --pp 4 --microbatches 4 --schedule interleaved --layers 8 | a rank is idle for 27% of a step
4 4 --pp 4 --microbatches 4 --schedule zb-h1 | a rank is idle for 20% of a step
4 4 --pp 4 --microbatches 4 --schedule zb-h1 --recompute full | a rank is idle for 27% of a step
4 4 --pp 4 --microbatches 4 --schedule zb-h2 | a rank is idle for 25% of a step
4 4 --pp 4 --microbatches 4 --schedule zb-v --layers 8 | a rank is idle for 20% of a step
4 4 --pp 4 --microbatches 8 --schedule dualpipe --layers 8 |
4 4 --experts 4 --ep 4 |
4 2 --experts 4 --ep 4 | --ep 4 spans 2 nodes: without --topk-nodes, a token may use experts on 2 \
of them
4 2 --experts 4 --ep 4 --topk-nodes 1 |
4 2 --experts 4 --ep 4 --top-k 1 |
4 2 --experts 4 --ep 2 |
"""


@pytest.mark.parametrize("line", WARNINGS.splitlines()[1:])
def test_a_slow_choice_is_warned_of_in_one_line(line):
    choice, _, warning = line.partition(" |")
    world_size, per_node, flags = choice.split(" ", 2)
    found = hybrid.warnings_of(hybrid.parse(flags.split(), int(world_size), int(per_node)))
    assert len(found) == bool(warning)
    assert not warning or warning.strip() in found[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_prints_warnings_before_the_run_begins(rank, monkeypatch, capsys):
    monkeypatch.setattr(hybrid, "launched", lambda: (rank, 4, rank, 2))
    monkeypatch.setattr(hybrid, "meet", lambda _: (dist.HashStore(), 0, 1))
    monkeypatch.setattr(hybrid, "join", lambda *_: None)
    monkeypatch.setattr(hybrid, "barrier", lambda *_: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    said = []
    work = lambda *_: said.append(capsys.readouterr().err)
    assert hybrid.main("--tp 4 --device cpu".split(), work) == 0
    lines = said[0].splitlines()
    assert [": warning: --tp 4 leaves a node" in line for line in lines] == [True] * (rank == 0)
