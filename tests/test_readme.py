"""The README says what is counted, and its commands are ones that run."""

import os
import re
import shlex
import subprocess
import sys

import pytest

import bench
import claims
import hybrid
import pipeline
from ranks import PROJECT

TEXT = claims.README.read_text()
LINES = re.sub(r" *\\\n +", " ", TEXT).splitlines()
COMMANDS = [
    shlex.split(re.sub(r" \[.*| \.\.\.$", "", line.split("&& ")[-1]))
    for line in LINES
    if re.match(r"    (srun |pip .*&& )?(torchrun|python [a-z/]+\.py) ?", line)
]
OF_HYBRID = [words for words in COMMANDS if "hybrid.py" in words]
UNTRAINED = {"--verify", "--plan", "--rehearse"}
ON_A_CPU = [
    words
    for words in OF_HYBRID
    if UNTRAINED & {*words} or not {"srun", "bf16", "--init-from", "$SLURM_NNODES"} & {*words}
]


def _world_size(words):
    number = lambda flag: int(words[words.index(flag) + 1]) if flag in words else 1
    nodes = [2 if word == "$SLURM_NNODES" else word for word in words]
    return int(nodes[nodes.index("--nnodes") + 1] if "--nnodes" in nodes else 1) * number(
        "--nproc-per-node"
    )


def test_the_tables_are_what_is_counted_now():
    for name, make in claims.BLOCKS.items():
        assert make() in TEXT, f"{name}: python tests/claims.py --write"


def test_each_claim_is_what_is_counted_and_names_its_test():
    for claim, _, value, counted, file, words in claims.rows():
        assert counted == pytest.approx(value, abs=0.01), claim
        source = (PROJECT / f"tests/test_{file}.py").read_text()
        tests = re.findall(r"^def (test_\w+)", source, re.M)
        assert any(words in name for name in tests), claim


def test_no_line_of_code_needs_scrolling():
    assert all(len(line) <= 100 for line in TEXT.splitlines() if line.startswith("    "))


def test_every_command_is_known():
    assert len(OF_HYBRID) >= 5 and len(COMMANDS) >= 8
    for words in OF_HYBRID:
        if "--plan" in words:
            hybrid.plan_args(words[2:])
            continue
        flags = words[words.index("hybrid.py") + 1 :]
        size = _world_size(words)
        verify = hybrid.proof_flags(size) if "--verify" in flags else []
        args = hybrid.parse_args([*verify, *flags], size)
        assert args.world_size == (args.gpus or size)
    for words in COMMANDS:
        if "tests/bench.py" in words:
            assert set(words[2:]) <= {*bench.BENCHMARKS}
        if words[:2] == ["python", "pipeline.py"]:
            assert words[words.index("--schedule") + 1] in pipeline.SCHEDULES
    named = {word for words in COMMANDS for word in words if word.endswith(".py")}
    assert all((PROJECT / name).is_file() for name in named)


@pytest.mark.soak
@pytest.mark.parametrize("words", ON_A_CPU, ids=" ".join)
def test_commands_that_fit_one_machine_run(words, tmp_path):
    words = [str(tmp_path / "DIR") if word == "DIR" else word for word in words]
    short = [] if UNTRAINED & {*words} else ["--steps", "2", "--sample", "1"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher = launcher if words[0] == "torchrun" else [sys.executable]
    command = [*launcher, *words[1:], *short]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=PROJECT, env=environment, timeout=1200, check=True)
