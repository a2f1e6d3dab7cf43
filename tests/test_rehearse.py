"""rehearse.py counts what real ranks hold and send, and takes three minutes at most."""

import math
import re
import threading
import time
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import hybrid
import progress
import rehearse
from collectives import all_reduce, observe
from expert_parallel import Router
from gpu_counts import fused_rms_norm, nccl_over_gloo, turns_in_same_modes
from layouts import soak_but
from models import GPUS
from ranks import run, soak
from tensor_parallel import attention
from trace import axes_of

SIZES = "--layers 2 --hidden 32 --heads 4 --seq-len 32 --vocab-size 67 --batch-size 16"
PAIRS = "--layers 4 --pp 2 --dp 2 --ep 2 --experts 4 --microbatches 4 --overlap"
LAYOUTS = [  # (GPUs per node, flags)
    (2, "--dp 2 --tp 2 --sp --zero 2 --microbatches 2"),
    (2, "--layers 4 --pp 4 --microbatches 4 --recompute selective"),
    (2, "--dp 4 --ep 4 --topk-nodes 1 --experts 8 --shared-experts 1 --zero 0"),
    (2, "--pp 2 --dp 2 --ep 2 --experts 4 --moe-every 2 --dtype bf16 --microbatches 2"),
    (4, "--dp 4 --zero 0"),
    (1, "--dp 4 --zero 1 --microbatches 2 --dtype bf16"),
    (4, "--dp 2 --cp 2 --zero 3 --replicate 2"),
    (1, "--tp 4 --recompute full --dropout 0.1"),
    (4, "--pp 2 --cp 2 --cp-method allgather --schedule zb-h1 --microbatches 4"),
    (1, "--layers 4 --pp 2 --tp 2 --schedule zb-v --kv-heads 2 --microbatches 4"),
    (4, "--layers 4 --pp 2 --dp 2 --schedule interleaved --microbatches 2 --dtype bf16"),
    (1, "--layers 4 --pp 4 --schedule dualpipe --microbatches 8"),
    (1, "--dp 2 --cp 2 --cp-method ulysses --ep 4 --experts 8 --topk-nodes 1 --zero 1"),
    (4, "--dp 2 --tp 2 --ep 2 --experts 4 --zero 3 --recompute full --microbatches 2"),
    (4, "--block llama --kv-heads 2 --pp 2 --tp 2 --sp --microbatches 2 --dtype bf16"),
    (2, "--block llama --dp 2 --ep 2 --experts 4 --shared-experts 1 --cp 2 --zero 2"),
    (4, f"{PAIRS} --schedule dualpipe-v --recompute full --expert-parts 2"),
    (4, f"{PAIRS} --schedule dualpipe --zero 2"),
    (2, f"{PAIRS} --schedule dualpipe-v --dp 4 --ep 4 --topk-nodes 1 --recompute full"),
]


def even_choice(router, scores):
    """Stand in for Router.choose() with even loads; a token's experts are on --topk-nodes nodes."""
    tokens, experts, k = len(scores), scores.shape[1], router.top_k
    if router.topk_group == 1 and router.n_group > 1:
        per_node = experts // router.n_group
        first = torch.arange(tokens) % router.n_group * per_node
        within = torch.arange(tokens) // router.n_group * k
        return first.unsqueeze(1) + (within.unsqueeze(1) + torch.arange(k)) % per_node
    return (torch.arange(tokens * k) % experts).view(tokens, k)


def _real(flags, per_node):
    """Take two steps with real tensors, over gloo; return what the rank holds and sends."""
    args = hybrid.parse(flags.split(), dist.get_world_size(), per_node)
    watch, fused = rehearse.Watch(), lambda q, k, v, dropout: attention(q, k, v)
    with (
        nccl_over_gloo(),
        turns_in_same_modes(),
        patch.object(Router, "choose", even_choice),
        patch.object(hybrid, "attention", fused),
        patch.object(torch.nn.functional, "rms_norm", fused_rms_norm),
        patch.object(rehearse, "PER_NODE", per_node),
    ):
        mesh = hybrid.make_mesh(args)
        with watch:
            trainer = hybrid.Trainer(args, mesh, torch.device("cpu"))
            tokens = torch.zeros(args.batch_size // args.dp, args.seq_len, dtype=torch.int64)
            built, watch.axes = len(watch.log), axes_of(mesh)
            with observe(watch.listen):
                trainer.step(tokens, tokens)
                held = rehearse.most_memory(trainer, watch, built)
                watch.sent.clear()  # the first step also compares parameters
                trainer.step(tokens, tokens)
    return held, dict(watch.sent)


def _rehearsed(flags, rank, world_size=4, per_node=4):
    """Rehearse the same step; return the same figures."""
    args = hybrid.parse(flags.split(), world_size, per_node)
    with patch.object(rehearse, "PER_NODE", per_node):
        _, held, sent = rehearse.rehearse(args, rank)
    dist.destroy_process_group()
    return held, dict(sent)


@pytest.mark.parametrize("per_node, flags", soak_but(lambda i, _: i == 3, LAYOUTS))
def test_the_counts_are_those_of_real_ranks(per_node, flags):
    degrees = dict(re.findall(r"--([dpct]p) (\d+)", flags))  # of two equal flags the last holds
    world_size = math.prod(map(int, degrees.values()))
    for rank, (held, sent) in enumerate(run(world_size, _real, f"{SIZES} {flags}", per_node)):
        found, found_sent = _rehearsed(f"{SIZES} {flags}", rank, world_size, per_node)
        assert found_sent == sent, rank
        if "--zero 3" in flags:  # real storages are resized without a dispatched operation
            del held["activations"], held["all at once"], held["parameters"]
        assert {kind: found[kind] for kind in held} == pytest.approx(held, rel=0.02), rank


@pytest.mark.parametrize(
    "zero, total", [soak("1 --replicate 8", 14), ("1", 7), soak("2", 3.5), ("3", 1.5)]
)
def test_a_rank_of_8_holds_few_bytes_per_parameter_with_moments_in_bf16(zero, total):
    """Gradients are those that a rank keeps; their peak is reached when a unit is summed."""
    flags = f"{SIZES} --hidden 256 --dp 8 --zero {zero} --dtype bf16 --moments bf16"
    trainer, held, _ = rehearse.rehearse(hybrid.parse(flags.split(), 8), 0)
    dist.destroy_process_group()
    parameters = sum(math.prod(weight.whole_shape) for weight in trainer.parameters())
    gradients = 4 if zero[0] == "1" else 0.5
    found = (held["parameters"] + held["optimizer"]) / parameters + gradients
    assert found == pytest.approx(total, rel=0.01)
    assert rehearse.formulas(trainer)["optimizer"] == parameters * (8 if "replicate" in zero else 1)


def test_all_chunks_of_a_pipeline_together_hold_two_whole_gradients():
    """They also hold shards of the sums. Messages need a part of a third block."""
    flags = f"{SIZES} --layers 16 --vocab-size 8 --pp 2 --dp 2 --zero 2 --microbatches 2"
    flags += " --schedule interleaved --chunks 8"
    trainer, held, _ = rehearse.rehearse(hybrid.parse(flags.split(), 4, 4), 1)
    dist.destroy_process_group()
    flats = [flat for stage in trainer.stages for flat in stage.flats]
    shards = sum(4 * flat.layout.shard_size for flat in flats)
    block = max(4 * flat.layout.length for flat in flats)
    assert held["gradients"] - shards < 3 * block


ZERO = ["--zero 1", "--zero 2", "--zero 1 --microbatches 2", "--zero 3 --microbatches 2 --pp 2"]
ZERO += ["--zero 2 --microbatches 4 --pp 2 --schedule interleaved --layers 8", "--zero 3 --tp 2"]
ZERO += ["--zero 2 --microbatches 4 --pp 2 --schedule interleaved --block llama --layers 4"]
ZERO += ["--zero 2 --block llama --experts 2 --ep 2", "--zero 1 --block llama --microbatches 2"]


@pytest.mark.parametrize("flags", soak_but(lambda i, _: i == 2, zip(ZERO)))
def test_the_peak_of_gradients_with_zero_is_that_of_the_formula(flags):
    trainer, held, _ = rehearse.rehearse(hybrid.parse(flags.split(), 4, 4), 0)
    claimed = rehearse.formulas(trainer)
    dist.destroy_process_group()
    assert held["gradients"] == pytest.approx(claimed["gradients"], rel=1e-3)


def test_an_additional_activation_and_an_additional_message_are_counted():
    flags, forward = f"{SIZES} --dp 4 --microbatches 2", hybrid.MLP.forward
    held, sent = _rehearsed(flags, 0)

    def hoard(self, x):
        self.hoarded = x.detach().clone()
        return forward(self, x)

    with patch.object(hybrid.MLP, "forward", hoard):
        found, found_sent = _rehearsed(flags, 0)
    assert found["activations"] - held["activations"] == 2 * (32 * 2 * 32 * 4)  # 2 layers
    assert found_sent == sent

    def chatter(self):
        all_reduce(torch.zeros(128), group=self.mesh.dp_group)

    with patch.object(hybrid.Trainer, "sum_shared_gradients", chatter):
        _, found = _rehearsed(flags, 0)
    extra = {what: found["dp"][what] - sent["dp"][what] for what in found["dp"]}
    assert extra == {"sent": 128 * 4 * 3, "batches": 1, "between": 0}  # to 3 other ranks


OF_DP = ["--dp 4 --replicate 2", "--dp 4 --zero 1", "--dp 4 --zero 3", "--dp 4"]
OF_DP += ["--pp 2 --dp 2 --schedule dualpipe", "--dp 4 --block llama --kv-heads 2"]


@pytest.mark.parametrize("flags", soak_but(lambda i, _: i == 4, zip(OF_DP)))
def test_a_step_sends_over_dp_and_pp_what_the_formulas_say(flags):
    flags = f"{SIZES} --layers 4 --hidden 256 --zero 2 --microbatches 4 {flags}"
    args = hybrid.parse(flags.split(), 4, 4)
    trainer, _, sent = rehearse.rehearse(args, 1)
    claimed = rehearse.formulas(trainer)
    dist.destroy_process_group()
    claimed["pp"] += trainer.replicated * sum(p.grad.nbytes for p in trainer.parameters())
    for axis in ("dp", "pp"):
        assert sent[axis]["sent"] == pytest.approx(claimed[axis], rel=1e-3)


# ---- large layouts -------------------------------------------------------------------------------

# The degrees are from the reports on Llama 3 and DeepSeek-V3, and so is DeepSeek-V3's batch. The
# microbatches are chosen here. SMALL is Llama 3's layout with a small model.
LLAMA = "--model llama3-405b --gpus 16384 --tp 8 --pp 16 --sp --dtype bf16 --batch-size 2048"
DEEPSEEK = "--model deepseek-v3 --gpus 2048 --pp 16 --ep 64 --balance bias --dtype bf16"
DEEPSEEK += " --schedule dualpipe --batch-size 15360 --microbatches 40"
MIXTRAL = "--model mixtral-8x22b --gpus 128 --tp 4 --pp 4 --sp --ep 8 --zero 1 --dtype bf16"
SMALL = "--gpus 16384 --pp 16 --tp 8 --sp --layers 16 --seq-len 128 --hidden 2048 --heads 8"
ROWS = [
    (f"{SMALL} --dtype bf16 --rank 4711", "rank 4711 of 16384, layers 4"),
    (f"{LLAMA} --microbatches 16 --rank 4711", "rank 4711 of 16384, layers 31 32"),
    (f"{DEEPSEEK} --rank 1000", "rank 1000 of 2048, layers 27 28 29 30 31"),
    (f"{MIXTRAL} --batch-size 128 --microbatches 8", "rank 0 of 128, layers 0 1 2"),
]


@pytest.mark.parametrize("flags, title", soak_but(lambda *_: False, ROWS))
def test_a_large_layout_takes_three_minutes_at_most_and_agrees_with_the_papers(capsys, flags, title):
    began = time.process_time()
    assert rehearse.main(flags.split()) == 0
    assert time.process_time() - began < 180
    found, _, *lines = capsys.readouterr().out.splitlines()
    assert found.startswith(title)
    numbers = lambda line: line[20:].replace(",", "").replace("%", "").split()
    rows = {line[:20].strip(): numbers(line) for line in lines}
    for what in {"parameters, MB", "gradients, MB", "optimizer, MB", "dp, MB sent"} & {*rows}:
        assert abs(float(rows[what][2])) < 2, rows


def test_a_line_says_how_much_leaves_a_node_of_8_gpus(capsys):
    """On 16 GPUs, the two stages are two nodes, and the ranks of tp and of dp are in one node."""
    assert rehearse.main(f"--gpus 16 --pp 2 --dp 4 --tp 2 {SIZES}".split()) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "between" in line]
    sent = {line[0].rstrip(","): (line[3], line[line.index("between") - 1]) for line in lines}
    assert sent.keys() == {"tp", "pp", "dp"} and all(whole != "0.000" for whole, _ in sent.values())
    far = {axis: beyond for axis, (_, beyond) in sent.items()}
    assert far == {"tp": "0.000", "pp": sent["pp"][0], "dp": "0.000"}


# ---- the command line ----------------------------------------------------------------------------


def test_a_command_says_what_it_is_doing_and_names_memory_that_no_gpu_has(capsys):
    said = []

    @contextmanager
    def recorded(what):
        said.append(what)
        yield said.append

    small = {"a100": GPUS["a100"]._replace(memory=0)}
    with patch.object(rehearse, "progress", recorded), patch.object(rehearse, "GPUS", small):
        assert rehearse.main(f"--gpus 2 --tp 2 {SIZES}".split()) == 0
    assert said[0] == "builds the model" and "step 1, action 2 of 2" in said
    out = capsys.readouterr().out
    assert re.search(r"\nno listed GPU has 0 GB: a100 has most, 0 GB\n$", out)


def test_what_takes_long_is_said_on_stderr_until_it_ends(capsys):
    told = threading.Event()

    def tell(*words, **options):
        print(*words, **options)
        told.set()

    with (
        patch.object(progress, "EVERY", 1e-3),
        patch.object(progress, "print", tell, create=True),
        progress.progress("reads FILE"),
    ):
        assert told.wait(timeout=60)
    out, err = capsys.readouterr()
    assert out == "" and re.match(r"\d+ s: reads FILE\n", err)


def test_a_model_of_the_literature_has_its_published_sizes_unless_flags_override_them():
    flags = "--model mixtral-8x22b --layers 9 --gpus 64 --rank 20 --ep 8 --pp 4 --heads 16"
    args, rank = rehearse.parse(flags.split())
    assert (rank, args.dp, args.per_node, args.world_size) == (20, 16, 8, 64)
    assert (args.layers, args.heads, args.hidden, args.experts) == (9, 16, 6144, 8)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--rank 8 --gpus 8", "--rank 8 is not one of --gpus 8"),
        ("--gpus 8 --tp 3", "--pp 1 --dp 2 --cp 1 --tp 3: "),
        ("--model gpt-5", "--model: invalid choice: 'gpt-5'"),
    ],
)
def test_an_invalid_flag_is_one_line(capsys, flags, message):
    assert rehearse.main(flags.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"rehearse.py: error: {message}") and err.count("\n") == 1
