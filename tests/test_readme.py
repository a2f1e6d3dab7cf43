"""README and RESULTS.md have the numbers that are counted, and README's commands run."""

import inspect
import os
import re
import shlex
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import bench
import claims
import ddp
import hybrid
import plan
from pipeline import SCHEDULES
from ranks import PROJECT, torchrun

TEXT = (PROJECT / "README.md").read_text()
SLURM = (PROJECT / "tests/tools/slurm.sh").read_text()
LINES = re.sub(r" *\\\n +", " ", TEXT + SLURM).splitlines()
COMMAND = r"(?:torchrun|python [a-z0-9/_]+\.py|pytest)[^|`]*"
IN_CODE = re.compile(rf"(?:    |\| `|srun )((?:pip .*&& )?{COMMAND})")
COMMANDS = [
    shlex.split(re.sub(r" \[.*| \.\.\.$", "", match[1].split("&& ")[-1]))
    for match in map(IN_CODE.match, LINES)
    if match
]
OF_HYBRID = [words for words in COMMANDS if "hybrid.py" in words]
NOT_RUN = {"bf16", "DIR", "FILE", "mine.py", "pytest", "--write", "gpu"}
RUN = [words for words in COMMANDS if not NOT_RUN & {*words}]


def _world_size(words):
    number = lambda flag: int(words[words.index(flag) + 1]) if flag in words else 1
    nodes = 2 if "--nnodes" in words else 1
    return nodes * number("--nproc-per-node")


def test_results_have_the_numbers_that_are_counted_now():
    assert claims.RESULTS.read_text() == claims.text(), "python tests/tools/claims.py --write"


def test_each_claim_agrees_with_its_count_and_names_its_test():
    for claim, _, value, counted, file, words in claims.rows():
        assert counted == pytest.approx(value, abs=0.01), claim
        source = (PROJECT / f"tests/test_{file}.py").read_text()
        tests = re.findall(r"^def (test_\w+)", source, re.M)
        assert any(words in name for name in tests), claim
        if f"{value:,.0f}" not in TEXT:
            assert f"{value:,.0f}" in claims.RESULTS.read_text()


def test_sizes_are_the_published_ones():
    for what, _, published, found, _ in claims.sizes():
        decimals = len(f"{published:g}".partition(".")[2])
        assert round(found, decimals) == published, what


def test_llama_3s_18_interruptions_are_in_one_class_each_which_names_its_tests():
    assert len(claims.INTERRUPTIONS) == 18 and sum(claims.INTERRUPTIONS.values()) == 419
    causes = [cause for of in claims.CLASSES for cause in of.causes]
    assert sorted(causes) == sorted(claims.INTERRUPTIONS)
    for of in claims.CLASSES:
        for file, words in of.tests:
            source = (PROJECT / f"tests/test_{file}.py").read_text()
            tests = re.findall(r"^def (test_\w+)", source, re.M)
            assert any(words in name for name in tests), (of.name, words)


def test_the_recap_has_the_columns_of_the_rule_of_thumb():
    (header,) = [line for line in LINES if line.startswith("| technique |")]
    for column in ("synchronises", "memory", "sends", "batch"):
        assert column in header
    assert "gradient accumulation" in TEXT


def test_the_number_of_schedules_is_right():
    words = "seven eight nine ten eleven twelve".split()
    assert f"{words[len(SCHEDULES) - 7]} schedules as data" in TEXT


def test_the_files_have_about_as_many_lines_as_the_reading_table_says():
    rows = re.findall(r"^\| `(\w+\.py)` \|.*\| ([\d,]+), (\d+) \|", TEXT, re.M)
    assert len(rows) == 8
    for name, *said in rows:
        text = (PROJECT / name).read_text()
        floor, _ = text.split("# ==== upper floor ")
        for number, part in zip(said, (text, floor)):
            assert int(number.replace(",", "")) == pytest.approx(part.count("\n"), rel=0.1), name


def test_the_code_of_data_parallelism_is_that_of_its_file():
    shown = "def average_gradients" + TEXT.split("    def average_gradients")[1].split("\n\n")[0]
    docstring = f'    """{inspect.getdoc(ddp.average_gradients)}"""\n'
    code = inspect.getsource(ddp.average_gradients).replace(docstring, "")
    assert textwrap.indent(code.rstrip(), "    ").strip() == shown


def test_every_command_names_a_file_and_has_valid_flags():
    assert len(OF_HYBRID) >= 5 and len(COMMANDS) >= 12
    for words in OF_HYBRID:
        flags = words[words.index("hybrid.py") + 1 :]
        assert hybrid.parse(flags, _world_size(words)).world_size == _world_size(words)
    for words in COMMANDS:
        if "tests/tools/bench.py" in words:
            assert set(words[2:]) <= {*bench.BENCHMARKS}
        if "tests/tools/plan.py" in words:
            assert plan.parse(words[2:])
    named = {word for words in COMMANDS for word in words if word.endswith(".py")}
    assert all((PROJECT / name).is_file() for name in named - {"mine.py"})


@pytest.mark.soak
@pytest.mark.parametrize("words", RUN, ids=" ".join)
def test_commands_that_fit_one_machine_run(words):
    short = []
    if "hybrid.py" in words:
        short = ["--steps", "2"]
    if "tests/tools/bench.py" in words:
        short = ["--rounds", "1"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher = launcher if words[0] == "torchrun" else [sys.executable]
    command = [*launcher, *words[1:], *short]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=PROJECT, env=environment, timeout=1200, check=True)


@pytest.mark.soak
def test_a_run_that_is_done_writes_if_its_command_has_a_prompt(tmp_path):
    (words,) = [words for words in OF_HYBRID if "--pp" in words and "DATA" in words]
    paths = {"DATA": PROJECT / "README.md", "DIR": tmp_path / "checkpoints"}
    flags = [paths.get(word, word) for word in words[words.index("hybrid.py") + 1 :]]
    flags += ["--steps", "2", "--save-every", "1", "--sample", "5"]
    for prompt in [], ["--prompt", "def "]:
        done = torchrun(4, PROJECT / "hybrid.py", *flags, *prompt)
        assert done.returncode == 0, done.stderr
    assert "\nstep " not in done.stdout
    assert "\nsample after step 2:\ndef " in done.stdout


@pytest.mark.soak
def test_the_script_of_ones_own_trains(tmp_path):
    script = re.search(r"own\.py`.*\n\n((?:    .*\n|\n)+)", TEXT)[1]
    (tmp_path / "own.py").write_text(textwrap.dedent(script))
    losses = losses_of(2, tmp_path / "own.py")
    assert len(losses) == 2 and max(losses) < 0.1  # README says 0.02


def split_linear(inputs, outputs):
    """Draw a linear layer as ColumnParallelLinear and RowParallelLinear do."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
    layer.weight.data = torch.randn(outputs, inputs) * inputs**-0.5
    layer.bias.data.zero_()
    return layer


def mlp():
    """Draw the whole model of own_grid.py."""
    heads = nn.Unflatten(1, (8, 32)), nn.LayerNorm(32), nn.Flatten()
    return nn.Sequential(
        split_linear(64, 256), *heads, nn.GELU(), split_linear(256, 64), nn.Linear(64, 1)
    )


class Mixture(nn.Module):
    """Every expert computes every token; the two best count."""

    def __init__(self):
        super().__init__()
        self.router = nn.Parameter(torch.randn(8, 64) * 64**-0.5)
        self.w_in = nn.Parameter(torch.randn(8, 128, 64) * 64**-0.5)
        self.w_out = nn.Parameter(torch.randn(8, 64, 128) * 128**-0.5)

    def forward(self, x):
        scores = (x @ self.router.T).softmax(1)
        is_best = torch.zeros_like(scores).scatter(1, scores.topk(2).indices, 1.0)
        weights = scores * is_best / (scores * is_best).sum(1, keepdim=True)
        hidden = nn.functional.gelu(torch.einsum("nd,efd->nef", x, self.w_in), approximate="tanh")
        return torch.einsum("nef,edf,ne->nd", hidden, self.w_out, weights)


def mixture():
    """Draw the whole model of own_experts.py."""
    moe = Mixture()
    return nn.Sequential(nn.Linear(64, 64), moe, nn.Linear(64, 1))


def layers():
    """Draw the whole model of own_pipeline.py."""
    hidden = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(64, 1))


@pytest.mark.soak
@pytest.mark.parametrize(
    "name, draw, world_size, batches",
    [
        ("own_grid.py", mlp, 4, 2),
        ("own_experts.py", mixture, 4, 4),
        ("own_pipeline.py", layers, 2, None),
    ],
)
def test_a_script_of_ones_own_has_the_loss_and_weights_of_one_process(
    name, draw, world_size, batches, tmp_path
):
    assert f"(tests/tools/{name})" in TEXT
    torch.manual_seed(0)  # not shifted: as in the scripts
    model = draw()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    streams = [torch.default_generator]  # a pipeline draws batches after weights, others anew
    if batches:
        streams = [torch.Generator() for _ in range(batches)]
        for number, stream in enumerate(streams, 1):
            stream.manual_seed(number)  # not shifted: as in the scripts
    for _ in range(200):
        x = torch.cat([torch.randn(32, 64, generator=stream) for stream in streams])
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses = losses_of(world_size, PROJECT / "tests/tools" / name, tmp_path / "weights.pt")
    assert losses == pytest.approx([loss.item()], rel=1e-3)
    if batches:
        saved = torch.load(tmp_path / "weights.pt")
        saved.pop("1.router.bias", None)  # a buffer
        for found, expected in zip(saved.values(), model.parameters(), strict=True):
            torch.testing.assert_close(found, expected.detach(), rtol=1e-2, atol=1e-3)


def losses_of(world_size, *words):
    """Return the losses that the ranks of a script print."""
    done = torchrun(world_size, *words)
    assert done.returncode == 0, done.stderr
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", done.stdout)]
