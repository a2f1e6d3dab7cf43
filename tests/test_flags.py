"""Flags of hybrid.py: each has an effect or is refused, alone and in random sets; processes."""

import ast
import gc
import hashlib
import io
import itertools
import json
import math
import os
import re
import signal
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from random import Random
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hybrid
import verify
from collectives import observe
from pipeline import NUM_CHUNKS, SCHEDULES
from ranks import PROJECT, RanksFailed, on_ranks, run, shifted, soak, spawn, torchrun

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
--eval-every 1 | | output
--sample 3 | | output
--prompt abc | | output
--temperature 0 | | output
--print-every 3 | | output
--metrics file | | output
--timeout 7 | | patience
--peak-tflops 5 | | output
"""
ROWS = [line.split(" | ") for line in EFFECTS.replace("| |", "|  |").splitlines()[1:]]
TINY = "--layers 1 --hidden 16 --heads 4 --seq-len 8"
TINY += f" --batch-size 4 --steps 4 --warmup 1 --data ../text --sample 9 --seed {shifted(2)}"


def _name(typed):
    return typed.split()[0].removeprefix("--").replace("-", "_")


def test_every_flag_is_read_somewhere():
    """Plain pytest observes the effects of a few flags only, and soak those of all."""
    tree = ast.parse((PROJECT / "hybrid.py").read_text())
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    keys = [node.slice for node in ast.walk(tree) if isinstance(node, ast.Subscript)]
    read |= {key.value for key in keys if isinstance(key, ast.Constant)}
    assert {*hybrid.FLAGS} <= read


def test_every_flag_has_a_row_in_the_table():
    assert {_name(typed) for typed, *_ in ROWS} == {*hybrid.FLAGS}


OFF = {"lr_decay != 'none'": "--lr-decay none", "sample != 0": "--sample 0"}  # of what is on


@pytest.mark.parametrize("typed, needed, _", ROWS)
def test_a_flag_is_refused_without_what_it_needs(typed, needed, _):
    name = _name(typed)
    if needed or name in hybrid.NEEDS:
        with pytest.raises(ValueError) as error:
            hybrid.parse(f"{OFF.get(hybrid.NEEDS[name], '')} {typed}".split(), 1)
        assert re.match(f"{typed}(.0)? needs [a-z]", str(error.value))
        named = re.findall("[a-z_]+", str(error.value).split(" needs ")[1])
        assert not needed or {*named} & {_name(word) for word in re.findall("--[a-z-]+", needed)}


@pytest.mark.parametrize("name", SCHEDULES)
def test_chunks_is_accepted_with_the_schedules_whose_caller_chooses_them(name):
    flags = f"--pp 2 --microbatches 4 --layers 8 --chunks 3 --schedule {name}".split()
    if NUM_CHUNKS[name] is None:
        assert hybrid.parse(flags, 2).chunks == 3
    else:
        with pytest.raises(ValueError, match="--chunks 3 needs schedule in .*interleaved"):
            hybrid.parse(flags, 2)


NOTHING = "--shared-experts 0 --balance none --moe-every 1 --ep 1 --expert-parts 1 --schedule 1f1b"
NOTHING += " --chunks 1 --replicate 1 --recompute-layers 1 --collectives ours"


@pytest.mark.parametrize("typed", re.findall(r"--\S+ \S+", NOTHING))
def test_a_flag_is_accepted_without_what_it_needs_if_its_value_asks_for_nothing(typed):
    args = hybrid.parse(typed.split(), 1)
    assert hybrid.as_typed(_name(typed), getattr(args, _name(typed))) == typed


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


@pytest.mark.parametrize("part", [slice(0, None, 24), soak(slice(1, None))])
def test_each_flag_changes_what_the_table_says(part, tmp_path):
    for name in ("text", "other"):
        (tmp_path / name).write_text(name * 100)
    again = [("", what) for what in ("bits", "messages", "memory", "output", "patience")]
    rows = [("", "", what) for _, what in again]  # nothing changes by itself
    rows += [row for row in ROWS if row[2] != "refused"][part]
    unchanged, _ = run(2, _unchanged, rows, tmp_path, timeout=240)
    assert unchanged == again


def test_main_sets_the_environment_that_gpus_need_unless_it_is_set_and_no_collection(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv("NCCL_MAX_P2P_NCHANNELS", "4")
    seen = {}
    assert hybrid.main([], lambda args, device: seen.update(os.environ, gc=gc.isenabled())) == 0
    assert not seen["gc"]  # train() collects garbage
    assert seen["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert seen["NCCL_MAX_P2P_NCHANNELS"] == "4"
    for name, value in hybrid.ENVIRONMENT.items():
        assert f"`{name}={value}`" in (PROJECT / "README.md").read_text()


EMPTY = [name for name, each in hybrid.FLAGS.items() if each.type is not bool]


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_value_is_refused_as_a_shell_variable_that_is_not_set_gives_it(name):
    with pytest.raises(ValueError, match=f"^{hybrid.as_typed(name)}: "):
        hybrid.parse([hybrid.as_typed(name), ""], 1)


# ---- wrong flags and files -----------------------------------------------------------------------

WRONG_FLAGS = """processes | flags | what the line names
4 | --dp 3 | --dp 3, 4
2 | --dp 2 --ep 2 | --ep 2, experts > 0
3 | --experts 4 --ep 2 | --dp 3, --ep 2
4 | --zero 1 --replicate 3 | --dp 4, --replicate 3
2 | --pp 2 --replicate 2 | --replicate 2, zero > 0
4 | --dtype bf16 --zero 0 | --dtype bf16, --zero 0
1 | --dtype bf16 --replicate 3 | --dp 1, --replicate 3
2 | --experts 5 --ep 2 | --experts 5, --ep 2
2 | --experts 4 --pp 2 --schedule dualpipe --overlap | --overlap, --ep 1
2 | --experts 4 --ep 2 --topk-nodes 3 | --topk-nodes 3, only 1 nodes
1 | --experts 2 --top-k 3 | --top-k 3, --experts 2
4/2 | --experts 4 --ep 4 --topk-nodes 1 --top-k 3 | --topk-nodes 1, --top-k 3, --experts 4
1 | --experts 2 --moe-every 9 --layers 8 | --moe-every 9, --layers 8
2 | --experts 2 --tp 2 --seq-len 7 | --seq-len 7, --tp 2
4 | --cp 4 --seq-len 12 | --seq-len 12, --cp 4
6 | --cp 2 --tp 3 --sp --seq-len 8 --heads 3 --hidden 6 | --seq-len 8, --cp 2, --tp 3
2 | --cp 2 --dropout 0.1 | --dropout 0.1, --cp 2
4 | --cp 2 --tp 2 --heads 2 --cp-method ulysses | --heads 2, --tp 2, --cp 2
3 | --cp 3 --heads 6 --kv-heads 2 --hidden 12 --seq-len 12 --cp-method ulysses | --kv-heads 2
1 | --heads 3 | --hidden 128, --heads 3
3 | --tp 3 | --kv-heads 4, --tp 3
2 | --tp 2 --ffn 27 | --ffn 27, --tp 2
4 | --tp 4 --vocab-size 3 | --tp 4, --vocab-size 3
1 | --kv-heads 3 | --heads 4, --kv-heads 3
1 | --min-lr 1 | --min-lr 1, --lr 0.003
1 | --steps 20 --warmup 5 --decay-steps 16 | --decay-steps 16, --steps 20, --warmup 5
1 | --block llama --hidden 12 | --block llama, --hidden 12, --heads 4
4 | --pp 4 --layers 1 | --layers 1, 4 stages
2 | --pp 2 --schedule interleaved --microbatches 3 | --schedule interleaved, --microbatches 3
3 | --pp 3 --schedule dualpipe | --schedule dualpipe, --pp 3
2 | --pp 2 --schedule interleaved --chunks 99999999 | --layers 4, --chunks 99999999
2 | --pp 2 --batch-size 5 --microbatches 2 | --batch-size 5, --microbatches 2
8 | --recompute full --recompute-layers 5 | --recompute-layers 5, 4
1 | --checkpoint DIR --keep 0 | --keep, 0
1 | --dropout 1 | --dropout, 1
1 | --block llama --rope-theta 0 | --rope-theta, 0
1 | --sample -1 | --sample, -1
1 | --temperature -0.1 | --temperature, -0.1
1 | --temperature inf | --temperature, inf
1 | --steps 9999999999 | --steps, 9999999999
8 | --layers 100000 | --layers, 100000
8 | --pp 8 --microbatches 100000 | --microbatches, 100000
1 | --block mistral | --block, mistral
1 | --moments fp16 | --moments, fp16
1 | --zero 4 | --zero, 4
1 | --lr fast | --lr, fast
1 | --batch 8 | --batch 8
1 | --seq_len=8 | --seq_len=8
1 | --resume-step 5 | --resume-step 5
"""


@pytest.mark.parametrize("line", WRONG_FLAGS.splitlines()[1:])
def test_wrong_flags_are_one_line_that_names_them(line):
    world_size, flags, names = line.split(" | ")
    with pytest.raises(ValueError) as error:
        _parse(flags, world_size)
    assert "\n" not in str(error.value)
    for name in names.split(", "):
        assert name in str(error.value)


def _parse(flags, world_size):
    """Parse flags for so many processes, such as "4", or "4/2" if two of them share a node."""
    return hybrid.parse(flags.split(), *map(int, world_size.split("/")))


def test_every_rule_refuses_a_row_of_the_table():
    refused = set()
    holds = hybrid.holds
    with patch.object(hybrid, "holds", lambda *asked: _noted(holds, *asked, refused)):
        for line in WRONG_FLAGS.splitlines()[1:]:
            world_size, flags, _ = line.split(" | ")
            with pytest.raises(ValueError):
                _parse(flags, world_size)
    assert refused >= {*hybrid.RULES}


def _noted(holds, rule, args, refused):
    answer = holds(rule, args)
    if not answer:
        refused.add(rule)
    return answer


WRONG_FILES = """flags | what the line names
--data MISSING | --data MISSING
--data HALF | val.bin
--data PIPE | --data PIPE
--data /dev/zero | --data /dev/zero
--checkpoint TEXT | --checkpoint TEXT
--metrics no/such/folder/log | --metrics no/such/folder/log
"""


@pytest.mark.parametrize("line", WRONG_FILES.splitlines()[1:])
@on_ranks(2)
def test_a_wrong_file_is_the_same_error_on_all_ranks_before_the_first_step(line, tmp_path):
    flags, named = line.split(" | ")
    os.chdir(tmp_path)
    if dist.get_rank() == 0:
        Path("TEXT").write_text("text")
        os.mkfifo("PIPE")
        Path("HALF").mkdir()
        Path("HALF/train.bin").write_bytes(bytes(2000))
    dist.barrier()
    no_step = patch.object(hybrid.Trainer, "step", None)
    with pytest.raises(hybrid.TrainingError) as found, no_step, redirect_stdout(io.StringIO()):
        hybrid.train(hybrid.parse(flags.split(), 2), torch.device("cpu"))
    os.chdir("/")
    line = str(found.value)
    assert found.value.status == 2 and named in line and "\n" not in line


# ---- defaults ------------------------------------------------------------------------------------


def test_without_flags_any_number_of_processes_trains_the_same_model():
    one = hybrid.parse([], 1)
    for world_size in range(1, 65):
        args = hybrid.parse([], world_size)
        assert args.batch_size % world_size == 0 and 16 <= args.batch_size < 16 + world_size
        changed = {name for name in vars(one) if getattr(args, name) != getattr(one, name)}
        assert changed <= {"dp", "batch_size", "world_size", "per_node", "zero"}
        assert args.zero == (world_size > 1)
    assert hybrid.parse(["--dtype", "bf16"], 1).zero == 1  # which keeps the fp32 weights
    degrees = "--tp 1 --pp 1 --cp 1 --ep 1 --zero 1"  # valid for any number of processes
    assert [hybrid.parse(degrees.split(), n).dp for n in (1, 2, 3)] == [1, 2, 3]


DEFAULTS = """processes | flags | microbatches | batch
1 | | 1 | 16
2 | --pp 2 | 8 | 16
64 | --pp 8 --tp 2 | 16 | 64
3 | --pp 3 --layers 6 --schedule interleaved --batch-size 12 | 12 | 12
16 | --pp 8 --schedule dualpipe | 16 | 32
2 | --pp 2 --batch-size 1 | 1 | 1
4 | --pp 2 --batch-size 28 | 2 | 28
1 | --batch-size 7 | 1 | 7
"""


@pytest.mark.parametrize("line", DEFAULTS.splitlines()[1:])
def test_a_pipeline_has_up_to_four_microbatches_per_stage_if_its_batch_allows(line):
    world_size, flags, microbatches, batch_size = line.split("|")
    args = hybrid.parse(f"--layers 32 {flags}".split(), int(world_size))
    assert (args.microbatches, args.batch_size) == (int(microbatches), int(batch_size))


# ---- processes -----------------------------------------------------------------------------------


def _main(folder, flags, work=lambda *_: None, per_node=None, **environment):
    """Run main() on this rank as torchrun does; return (status, what it printed).

    flags: those of each rank. per_node: the number of ranks on each rank's node.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / "store"), world_size)
    per_node = per_node or [world_size] * world_size
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % per_node[rank]}
    place |= {"LOCAL_WORLD_SIZE": per_node[rank]} | environment
    place = {name: str(value) for name, value in place.items() if value is not None}
    with (
        patch.dict(os.environ, place),
        patch.object(dist, "rendezvous", lambda *_, **__: iter([(store, rank, world_size)])),
        redirect_stdout(io.StringIO()) as printed,
        redirect_stderr(printed),
    ):
        try:
            status = hybrid.main(flags[rank].split(), work)
        except SystemExit as end:
            status = end.code
    if dist.is_initialized():  # after --help, or what has gone wrong
        dist.destroy_process_group()
    # the ranks of a test leave a group at their end
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return status, printed.getvalue()


UNLIKE = """a flag of rank 2 | what the only line names
--layers 0 | rank 2, --layers
--dp 5 | rank 2, --dp 5
--zero 3 | rank 2, --zero 3, rank 0, --zero 1
--lr 1 | rank 2, --lr 1.0, rank 0, --lr 0.003
--device cuda | rank 2, --device cuda
--timeout 5 | rank 2, --timeout 5, rank 0, --timeout 600
--checkpoint own | rank 2, --checkpoint PATH, rank 0, no --checkpoint
"""


@pytest.mark.parametrize("line", UNLIKE.splitlines()[1:])
def test_wrong_flags_on_one_rank_end_all_ranks_with_one_line_and_status_2(line, tmp_path):
    flag, names = line.split(" | ")
    ended = run(3, _main, tmp_path, ["", "", flag])
    assert [status for status, _ in ended] == [2, 2, 2]
    (complaint,) = "".join(printed for _, printed in ended).splitlines()
    assert all(name in complaint for name in (": error: ", *names.split(", ")))


def _gpu_on_rank_1(folder, kind):
    """Run main() where rank 1 finds a GPU and rank 0 does not."""
    device = torch.device("cuda" if dist.get_rank() == 1 else "cpu")
    with patch.object(hybrid, "choose_device", lambda *_: device):
        return _main(folder, 2 * [f"--device {kind}"])


def test_machines_with_and_without_gpus_are_unlike(tmp_path):
    ended = run(2, _gpu_on_rank_1, tmp_path, "auto")
    assert [status for status, _ in ended] == [2, 2]
    assert "rank 1 has --device auto (cuda), rank 0 has --device auto (cpu)" in ended[0][1]


def _see(args, device):
    """Print what a rank has agreed on with the others."""
    world = dist.distributed_c10d._get_default_group()
    timeout = world._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    print(args.per_node, device, dist.get_backend(), timeout, args.checkpoint)


NODES = [([2, 2, 4, 4, 4, 4], 2), ([4, 4, 4, 4, 2, 2], 2), ([1, 1, 2, 2, 2, 2], 1), ([3] * 6, 3)]


@pytest.mark.parametrize("per_node, agreed", NODES)
def test_ranks_agree_on_nodes_and_have_a_gloo_group_with_the_timeout_of_the_flag(
    per_node, agreed, tmp_path
):
    """Paths may differ, and the flag's timeout holds from the first message on."""
    flags = [f"--timeout 7 --checkpoint {rank}" for rank in range(6)]
    for rank, ended in enumerate(run(6, _main, tmp_path, flags, _see, per_node)):
        assert ended == (0, f"{agreed} cpu gloo 7.0 {rank}\n")


def _fail(status):
    raise hybrid.TrainingError("the disk is full", status)


def test_an_error_that_all_ranks_raise_is_printed_once_and_gives_the_status(tmp_path):
    ended = run(2, _main, tmp_path, ["", ""], _fail_with_status_3)
    assert [status for status, _ in ended] == [3, 3]
    assert "".join(printed for _, printed in ended).endswith(": error: the disk is full\n")
    assert ended[1][1] == ""


def _fail_with_status_3(*_):
    _fail(3)


def _fault_of_rank_1(error):
    if dist.get_rank() == 1:
        raise error


@pytest.mark.parametrize("error", [ValueError(), ValueError(" \n"), OSError(), OSError("a\nb")])
@on_ranks(2)
def test_an_error_of_one_rank_is_one_line_on_all_ranks_even_if_it_has_no_text(error):
    line = str(error).strip().split("\n")[0] or re.escape(repr(error))
    with pytest.raises(hybrid.TrainingError, match=f"^--flag: rank 1: {line}$"):
        hybrid.on_all_ranks(_fault_of_rank_1, error, prefix="--flag: ")


@on_ranks(2)
def test_an_error_that_all_ranks_raise_keeps_its_status_inside_another_check():
    with pytest.raises(hybrid.TrainingError, match="^the disk is full$") as error:
        hybrid.on_all_ranks(_fail, 3, prefix="--flag: ")
    assert error.value.status == 3


def _die_at(phase, folder):
    """Run main() on ranks of which the last one dies when it comes to this function."""
    function = getattr(hybrid, phase)
    is_last = dist.get_rank() == dist.get_world_size() - 1

    def die(*arguments, **options):
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    with patch.object(hybrid, phase, die):
        return _main(folder, ["--timeout 2 --dp 3"] * 3, _make_mesh)


def _make_mesh(args, device):
    hybrid.make_mesh(args, device=device)


@pytest.mark.parametrize("phase", [soak("join"), "agree"])
def test_a_rank_that_dies_before_flags_are_agreed_on_ends_the_others_with_a_line(phase, tmp_path):
    *others, dead = spawn(3, _die_at, phase, tmp_path, check=False)
    assert dead.exitcode == -signal.SIGKILL
    assert [outcome.result[0] for outcome in others] == [1, 1]
    printed = [outcome.result[1] for outcome in others]
    assert all(line.count("\n") <= 1 for line in printed) and any(printed)
    assert all(re.match(r"\S+: error: rank \d: ", line) for line in printed if line)


@pytest.mark.soak
def test_a_rank_that_dies_while_groups_connect_ends_the_others_and_one_shows_where(tmp_path):
    *others, dead = spawn(3, _die_at, "make_mesh", tmp_path, check=False)
    assert dead.exitcode == -signal.SIGKILL
    told = [outcome.error_text or outcome.result[1] for outcome in others]
    assert sorted(told)[0] == "" and "RuntimeError: " in sorted(told)[1]


def test_a_variable_of_torchrun_that_is_missing_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert hybrid.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ": error: " in line and "WORLD_SIZE" in line


def _fail_on_rank_2(args, device):
    if dist.get_rank() == 2:
        raise IndexError("a fault of the program")
    dist.barrier()


def test_an_error_of_one_rank_is_its_traceback_and_what_follows_on_others_is_not_printed(tmp_path):
    *others, faulty = spawn(3, _main, tmp_path, [""] * 3, _fail_on_rank_2, check=False)
    assert "IndexError: a fault of the program" in faulty.error_text
    assert [outcome.result for outcome in others] == [(1, ""), (1, "")]


def _fail_after_it_is_lost(args, device):
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        say = hybrid.say
        hybrid.say = lambda line: (say(line), store.set("rank 0", line))
        hybrid.barrier(dist.new_group(timeout=timedelta(seconds=1)))
    dist.new_group()
    store.get("rank 0")  # it has waited in vain and said so
    raise OSError("the cause")


def test_the_cause_is_told_even_if_another_rank_has_lost_this_one_before(tmp_path):
    other, faulty = spawn(2, _main, tmp_path, [""] * 2, _fail_after_it_is_lost, check=False)
    assert other.result[0] == 1 and ": error: rank 0: " in other.result[1]
    assert "OSError: the cause" in faulty.error_text


def _die_on_rank_2(args, device):
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_at_the_end_of_its_work_ends_the_others_with_a_line(tmp_path):
    *others, _ = spawn(3, _main, tmp_path, [""] * 3, _die_on_rank_2, check=False)
    assert [outcome.result[0] for outcome in others] == [1, 1]
    (line,) = "".join(outcome.result[1] for outcome in others).splitlines()
    assert re.match(r"\S+: error: rank \d: .* lost rank \d", line)


def _print_device(args, device):
    print(device)


def _gpus_without_local_rank(folder):
    """Run main() on two nodes of two GPUs each, by a launcher that sets no LOCAL_RANK."""
    choose = lambda args, local_rank, per_node: torch.device("cuda", local_rank)
    with patch.object(hybrid, "choose_device", choose):
        return _main(folder, [""] * 4, _print_device, [2] * 4, LOCAL_RANK=None)


def test_without_local_rank_processes_of_a_node_take_its_gpus_in_turn(tmp_path):
    found = run(4, _gpus_without_local_rank, tmp_path)
    assert found == [(0, "cuda:0\n"), (0, "cuda:1\n")] * 2


@on_ranks(2)
def test_a_group_of_the_mesh_waits_for_other_ranks_as_long_as_the_flag_says():
    mesh = hybrid.make_mesh(hybrid.parse("--dp 2 --timeout 7".split(), 2))
    gloo = mesh.dp_cp_group._get_backend(torch.device("cpu"))
    assert gloo.options._timeout.total_seconds() == 7


def test_processes_have_one_gpu_each_with_nccl_or_share_gpus_with_gloo(monkeypatch):
    def choose(gpus, kind, *place):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        args = hybrid.parse(["--device", kind], 1)
        device = hybrid.choose_device(args, *place)
        return f"{device} {'nccl' if hybrid.over_nccl(args, device) else 'gloo'}"

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for kind in ("cuda", "shared"):
        with pytest.raises(ValueError, match=f"--device {kind}: there is no GPU"):
            choose(0, kind, 0, 1)
    with pytest.raises(ValueError, match="2 GPUs for 4 .*--device cuda if .*--device shared if"):
        choose(2, "auto", 3, 4)
    assert choose(0, "auto", 0, 1) == "cpu gloo"
    assert choose(2, "auto", 1, 2) == "cuda:1 nccl"
    assert choose(2, "shared", 3, 4) == "cuda:1 gloo"
    assert choose(2, "cpu", 0, 1) == "cpu gloo"
    assert choose(1, "cuda", 3, 4) == "cuda:0 nccl"  # each process sees only its own GPU
    with pytest.raises(ValueError, match="--dtype tf32 needs a GPU"):
        hybrid.choose_device(hybrid.parse(["--dtype", "tf32", "--device", "cpu"], 1))


@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 6, 8])
def test_a_node_group_of_experts_never_spans_two_nodes(per_node):
    """Also if nodes cut tp groups, as 3 ranks on a node do with tp 2."""
    for tp, dp, ep in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 3, 4, 6), (2, 3, 4, 6, 8, 12)):
        if dp * tp % ep or dp * tp % per_node:
            continue
        sizes = f"--tp {tp} --dp {dp} --ep {ep} --experts {ep} --heads {tp} --hidden {2 * tp}"
        sizes += f" --seq-len {2 * tp} --ffn {tp} --batch-size {dp} --top-k 1"
        args = hybrid.parse(sizes.split(), dp * tp, per_node)
        groups = hybrid.slices_of(1, dp, 1, tp, ep, args.ep_nodes)["node_group"]
        nodes = groups // per_node
        assert (nodes == nodes[:, :1]).all(), (tp, dp, ep)


# ---- random flags --------------------------------------------------------------------------------

# A random set of flags is a small model, a layout that verify.layouts() draws, and some lines of
# MORE that fit them. To one set in five comes a line that does not fit, or one of WRONG.
SMALL = "--hidden 64 --heads 8 --ffn 128 --seq-len 16 --vocab-size 67 --steps 3 --warmup 1"
SMALL += " --data ../tokens.bin --sample 3 --metrics log --timeout 120"
MORE = """
--hidden 32
--hidden 60
--heads 4
--kv-heads 1
--ffn 36
--seq-len 8
--seq-len 12
--seq-len 15
--vocab-size 64
--layers 4 --recompute full --recompute-layers 2
--recompute-layers 2
--block llama
--block llama --rope-theta 100
--rope-theta 100
--head untied
--head tied
--dropout 0.2
--experts 4
--experts 8 --top-k 8
--experts 3
--capacity-factor 1.0
--topk-nodes 1
--ep 2
--expert-parts 2
--expert-parts 3
--layers 6 --schedule interleaved --chunks 3
--chunks 1
--chunks 2
--collectives backend
--replicate 4
--microbatches 3
--batch-size 24
--batch-size 4
--batch-size 7
--steps 1
--steps 5 --decay-steps 2
--lr 0.01
--warmup 0
--lr-decay linear
--lr-decay none
--min-lr 0.001
--weight-decay 0.5
--grad-clip 0
--grad-clip 0.05
--seed 5
--dtype bf16
--moments bf16
--device cpu
--data ../text --vocab-size 128
--data ../text --vocab-size 128 --prompt abc
--checkpoint saved
--checkpoint saved --save-every 1 --keep 1
--save-every 2
--keep 1
--eval-every 1
--sample 0
--sample 20
--prompt 1,2,3
--temperature 0
--print-every 1
--peak-tflops 5
--timeout 90
""".strip().splitlines()
WRONG = """
--hidden 0
--heads 3
--vocab-size 4
--zero 4
--decay-steps 9
--lr fast
--min-lr 1
--dtype tf32
--device cuda
--data ../text
--data ../missing
--prompt 1,99
--prompt abc
--temperature -1
--metrics no/folder/log
--unknown 1
""".strip().splitlines()
# One process does without these flags, as they change no result.
WITHOUT_EFFECT = "dp tp cp pp zero replicate cp_method schedule overlap chunks microbatches ep"
WITHOUT_EFFECT = {*f"{WITHOUT_EFFECT} topk_nodes expert_parts collectives sp".split()}
WITHOUT_EFFECT |= {"recompute", "recompute_layers", "checkpoint", "save_every", "keep"}
SETS = int(os.environ.get("FLAG_SETS", "24"))  # for each number of processes


def _draw(world_size, count):
    """Yield sets of flags, each as (words, processes of a node)."""
    seed = 1000 * world_size
    random = Random(shifted(seed))
    layouts = verify.layouts(world_size, world_size, SMALL.split(), count, shifted(seed))
    for layout, per_node in layouts:
        words = [*SMALL.split(), *layout]
        wrong = list(WRONG)
        for line in random.sample(MORE, 9):
            longer = [*words, *line.split()]  # if it has a flag twice, the later one counts
            try:
                hybrid.parse(longer, world_size, per_node)
            except ValueError:
                wrong.append(line)
            else:
                words = longer
        if random.random() < 0.2:
            words += random.choice(wrong).split()
        yield words, per_node


def test_every_flag_is_among_the_random_ones():
    random = Random(shifted(1))
    layouts = [flag for _ in range(200) for flag in verify.draw(random, 4)[:-1]]
    names = re.findall("--[a-z-]+", " ".join([SMALL, *MORE, *layouts]))
    assert {_name(typed) for typed in names} == {*hybrid.FLAGS}


def _accepted(words, world_size, per_node):
    """Return the Args, or None if the flags, the files or the machine do not allow the run."""
    try:
        args = hybrid.parse(words, world_size, per_node)
        hybrid.choose_device(args)
    except ValueError:
        return None
    is_text = args.data == "../text"
    largest_token = ord("z") if is_text else 63
    is_prompt = args.prompt in (None, "1,2,3") or is_text
    files_exist = args.data != "../missing" and args.metrics == "log"
    return args if files_exist and is_prompt and largest_token < args.vocab_size else None


def _train_in_fp64(args, device):
    """Train with fp64 in place of fp32, so that layouts can be compared closely."""
    torch.set_default_dtype(torch.float64 if args.dtype == "fp32" else torch.float32)
    hybrid.train(args, device)


def _train_with_rows_of_the_first_replica(args, device):
    """Train with a fault: all replicas get the same rows."""
    rows = slice(args.batch_size // args.dp)
    with patch.object(hybrid.Trainer, "own_rows", lambda _: rows):
        _train_in_fp64(args, device)


def _train_without_a_sum(args, device):
    """Train with a fault: gradients of weights with several copies are not summed."""
    with patch.object(hybrid.Trainer, "sum_shared_gradients", lambda _: None):
        _train_in_fp64(args, device)


def _run_main(folder, words, per_node, work):
    """Run main() in a folder; return (status, what it printed)."""
    size = dist.get_world_size()
    os.chdir(folder)
    ended = _main(Path(), [" ".join(words)] * size, work, [per_node] * size)
    os.chdir("/")
    return ended


def _of_one_process(args, words):
    """Return flags with which one process trains the same model on the same batches."""
    given = vars(hybrid.Parser().parse_args(words))
    given = {name: value for name, value in given.items() if name not in WITHOUT_EFFECT}
    given["batch_size"] = args.batch_size
    if args.experts and args.balance == "aux":
        given["microbatches"] = args.microbatches  # each has a balance loss of its own
    return [word for flag in given.items() for word in hybrid.as_typed(*flag).split()]


def _incomparable(args):
    """Return why the results depend on the layout, or ""."""
    is_whole = args.world_size == args.microbatches == 1
    if args.dropout > 0 and not is_whole:
        return "dropout"
    if not args.experts:
        return ""
    if args.capacity_factor is not None and not is_whole:
        return "capacity"
    if args.topk_nodes < args.ep_nodes:
        return "topk-nodes"
    if args.balance == "aux" and args.dp > 1 and args.microbatches > 1:
        return "balance losses"  # a microbatch of one process has other rows
    if args.dtype == "bf16":
        return "choices of experts in bf16"
    return ""


def _numbers(folder):
    """Return {what and step: number or tokens} of a run's metrics."""
    found = {}
    for line in map(json.loads, (folder / "log").read_text().splitlines()):
        for name in ("loss", "grad_norm", "expert_load", "validation_loss", "sample"):
            if name in line:
                found[f"{name} {line['step']}"] = line[name]
    return found


def _difference(found, expected, args, precision="fp64"):
    """Return the first of a run's numbers that is not the expected one, or ""."""
    if args.dtype == "bf16":
        precision = "bf16"
    bound = verify.BOUNDS[precision]
    if args.moments == "bf16":
        bound = max(bound, 1e-4)  # rounding may take a moment up in one run and down in the other
    if found.keys() != expected.keys():
        return f"{found.keys() ^ expected.keys()} are not in both"
    for name, value in expected.items():
        if name.startswith("sample"):
            is_same = found[name] == value or bound > 1e-9  # rounding may change a token
        else:
            is_same = abs(found[name] - value) <= bound * abs(value)
        if not is_same:
            return f"{name}: {found[name]}, one process has {value}"
    return ""


def _judge(folder, words, world_size, per_node, work):
    """Run main() with these flags; return how it ended, and what is wrong, or ""."""
    folder.mkdir()
    args = _accepted(words, world_size, per_node)
    try:
        ended = run(world_size, _run_main, folder, words, per_node, work, timeout=90)
    except RanksFailed as error:
        return "failed", str(error)
    statuses = [status for status, _ in ended]
    printed = "".join(printed for _, printed in ended)
    if args is None:
        lines = printed.splitlines()
        if len(lines) == 1 and ": error: " in lines[0] and statuses == [2] * world_size:
            return "refused", ""
        return "refused", f"statuses {statuses}, printed {printed}"
    if any(statuses) or "Traceback" in printed:
        return "ran", f"statuses {statuses}, printed {printed}"
    found = _numbers(folder)
    losses = [value for name, value in found.items() if not name.startswith("sample")]
    if not all(map(math.isfinite, losses)):
        return "ran", f"not finite: {found}"
    if why := _incomparable(args):
        return f"incomparable for {why}", ""
    alone = folder / "one"
    alone.mkdir()
    for name in ("tokens.bin", "text"):
        (folder / name).symlink_to(folder.parent / name)
    flags = _of_one_process(args, words)
    ((status, printed),) = run(1, _run_main, alone, flags, 1, _train_in_fp64, timeout=90)
    if status:
        return "ran", f"one process: {printed}"
    return "compared", _difference(found, _numbers(alone), args)


@pytest.fixture
def corpora(tmp_path):
    """Provide a folder with the two files of data that random flags name."""
    tokens = np.random.default_rng(shifted(1)).integers(64, size=4000, dtype=np.uint16)
    (tmp_path / "tokens.bin").write_bytes(tokens.tobytes())
    (tmp_path / "text").write_text("a lazy fox and a quick dog\n" * 100)
    return tmp_path


def _judged(world_size, corpora, count, work=_train_in_fp64):
    """Yield (how it ended, what is wrong with it) of so many sets of flags."""
    for number, (words, per_node) in enumerate(_draw(world_size, count)):
        end, wrong = _judge(corpora / str(number), words, world_size, per_node, work)
        flags = " ".join(words).removeprefix(SMALL)
        yield end, wrong and f"{world_size}/{per_node} processes,{flags}: {wrong}"


@pytest.mark.parametrize("world_size", [soak(1), soak(2), soak(4)])
def test_random_flags_are_refused_in_one_line_or_train_as_one_process_does(world_size, corpora):
    """FLAG_SETS in the environment is the number of sets, TEST_SEED draws others, -s shows counts.
    """
    ends = Counter()
    faults = []
    for end, wrong in _judged(world_size, corpora, SETS):
        ends[end] += 1
        if wrong:
            faults.append(wrong)
    print(f"{world_size} processes, {ends.total()} sets of flags:", dict(ends))
    assert not faults, "\n".join(faults)
    assert ends["compared"] and ends["refused"]


FAULTS = [_train_with_rows_of_the_first_replica, _train_without_a_sum]


@pytest.mark.parametrize("work", [soak(work) for work in FAULTS])
def test_random_flags_show_a_fault_of_some_layouts(work, corpora):
    seen = set()
    for _, wrong in _judged(2, corpora, 100, work):
        seen.add(bool(wrong))
        if len(seen) == 2:
            break
    assert seen == {True, False}


@pytest.mark.soak
def test_random_flags_train_under_torchrun_as_one_process_does(corpora):
    for world_size in (1, 2, 4):
        for words, _ in _draw(world_size, 12):
            args = _accepted(words, world_size, world_size)
            if args is not None and not _incomparable(args):
                break
        folder, alone = corpora / str(world_size), corpora / f"{world_size} alone"
        done = []
        for place, size, flags in (
            (folder, world_size, words), (alone, 1, _of_one_process(args, words))
        ):
            place.mkdir()
            done.append(torchrun(size, PROJECT / "hybrid.py", *flags, cwd=place))
        assert [each.returncode for each in done] == [0, 0], done
        assert "Traceback" not in done[0].stderr
        assert not _difference(_numbers(folder), _numbers(alone), args, "fp32"), words


# ---- --help --------------------------------------------------------------------------------------


def test_help_lists_every_flag_and_what_it_needs(tmp_path):
    ((status, text),) = run(1, _main, tmp_path, ["--help"])
    assert status == 0
    listed = re.findall(r"^  --([\w-]+)", text, re.M)
    assert listed == [name.replace("_", "-") for name in hybrid.FLAGS]
    for needs in hybrid.NEEDS.values():
        assert f"needs {needs}" in re.sub(r"\s+", " ", text)
