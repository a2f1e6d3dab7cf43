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
import torch.distributed as dist
from torch import nn

import bench
import claims
import ddp
import hybrid
import plan
import rehearse
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


@pytest.mark.soak
def test_the_example_of_what_a_rank_sends_is_what_a_rank_sends():
    _, _, sent = rehearse.rehearse(hybrid.parse("--tp 2 --pp 2".split(), 8), 0)
    dist.destroy_process_group()
    said = {}
    for axis in ("tp", "pp", "dp"):
        (elements,) = re.findall(rf"^    {axis} .* ([\d,]+) elements,", TEXT, re.M)
        said[axis] = int(elements.replace(",", ""))
    assert sent["dp"]["sent"] / 4 == pytest.approx(said["dp"], rel=1e-3)
    counted = (sent["tp"]["sent"] + sent["pp"]["sent"]) / 4
    (more,) = re.findall(r"([\d,]+) elements more over tp and pp", TEXT)
    assert counted == pytest.approx(said["tp"] + said["pp"] + int(more.replace(",", "")), rel=1e-3)


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
    hidden = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(*hidden, nn.Linear(64, 1))


class Attention(nn.Module):
    """The model of own_context.py, with PyTorch's attention to all positions."""

    def __init__(self):
        super().__init__()
        self.of_token = nn.Embedding(32, 64)
        self.of_position = nn.Embedding(64, 64)
        self.qkv = nn.Linear(64, 3 * 64, bias=False)
        self.head = nn.Linear(64, 32)

    def forward(self, tokens):
        x = self.of_token(tokens) + self.of_position.weight
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + y.transpose(1, 2).flatten(2))


def loss_of_sums(model, streams):
    """Return the loss of own_grid.py, own_experts.py and own_pipeline.py."""
    x = torch.cat([torch.randn(32, 64, generator=stream) for stream in streams])
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def loss_of_next_tokens(model, streams):
    """Return the loss of own_context.py."""
    tokens = torch.cat([torch.randint(32, (16, 8), generator=stream) for stream in streams])
    tokens = torch.cat([tokens] * 9, 1)[:, :65]
    return nn.functional.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:])


@pytest.mark.soak
@pytest.mark.parametrize(
    "name, draw, loss_of, num_batches, rate",
    [
        ("own_grid.py", mlp, loss_of_sums, 2, 1e-3),
        ("own_experts.py", mixture, loss_of_sums, 4, 1e-3),
        ("own_pipeline.py", layers, loss_of_sums, 2, 1e-3),
        ("own_context.py", Attention, loss_of_next_tokens, 2, 1e-2),
    ],
)
def test_a_script_of_ones_own_has_the_losses_and_weights_of_one_process(
    name, draw, loss_of, num_batches, rate, tmp_path
):
    assert f"(tests/tools/{name})" in TEXT
    torch.manual_seed(0)  # not shifted: as in the scripts
    model = draw()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    streams = [torch.Generator() for _ in range(num_batches)]
    for number, stream in enumerate(streams, 1):
        stream.manual_seed(number)  # not shifted: as in the scripts
    for _ in range(200):
        loss = loss_of(model, streams)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    expected = [loss.item(), loss_of(model, streams).item()]
    losses = losses_of(4, PROJECT / "tests/tools" / name, tmp_path / "weights.pt")
    assert len(losses) == (2 if name == "own_pipeline.py" else 1)  # it also validates
    assert losses == pytest.approx(expected[: len(losses)], rel=1e-3)
    saved = torch.load(tmp_path / "weights.pt")
    saved.pop("1.router.bias", None)  # a buffer
    for found, whole in zip(saved.values(), model.parameters(), strict=True):
        torch.testing.assert_close(found, whole.detach(), rtol=1e-2, atol=1e-3)


def losses_of(world_size, *words):
    """Return the losses that the ranks of a script print."""
    done = torchrun(world_size, *words)
    assert done.returncode == 0, done.stderr
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", done.stdout)]
