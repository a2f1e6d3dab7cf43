"""hybrid.py's sample: one text in every layout, prompts, temperature, output, and no traces."""

import io
from contextlib import redirect_stdout
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hybrid
from collectives import gather_objects
from layouts import FLAGS, SEED, T, V, make_trainer, own_batch, soak_but, train_on_text
from pipeline import SCHEDULES
from ranks import on_ranks, run, shifted, soak
from reference_gpt import reference_gpt
from verify import gathered

PROMPT = [5, 0, 66]
COUNT = T + 2  # the text is longer than a row
STEP = 7  # as if so many steps had been taken


def _sharpen(trainer):
    """Change the weights so that the best token depends on its position and is clearly best."""
    for chunk in trainer.chunks:
        for name, parameter in chunk.named_parameters():
            parameter.data *= 40 if name.endswith("wpe.weight") else 4


def _samples(flags, temperatures, dtype=torch.float64):
    """Return samples of a layout at these temperatures, and the model's weights."""
    trainer = make_trainer(flags, dtype)
    _sharpen(trainer)
    trainer.steps_done = STEP
    texts = []
    for temperature in temperatures:
        trainer.args = replace(trainer.args, temperature=temperature)
        texts.append(hybrid.sample(trainer, PROMPT, COUNT))
    return texts, gathered(trainer)


def _logits_alone(args, weights):
    """Return a function of a text that returns the next token's logits, on one plain process."""
    model = reference_gpt(args).double().eval()
    state = {name: tensor for name, tensor in weights.items() if "router.bias" not in name}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] * args.is_tied, [])
    return lambda tokens: model(torch.tensor([tokens[-T:]]))[0, -1].detach()


def _text_alone(args, weights, temperature):
    """Return the sample of one plain process, with the noise that hybrid.py documents."""
    next_logits = _logits_alone(args, weights)
    random, tokens = np.random.default_rng([SEED, STEP]), list(PROMPT)
    for _ in range(COUNT):
        logits = next_logits(tokens).numpy() + temperature * random.gumbel(size=V)
        tokens.append(int(logits.argmax()))
    return tokens[len(PROMPT) :]


LAYOUTS = [
    (1, ""),
    (2, "--tp 2 --sp --recompute full --dropout 0.1"),
    (4, "--tp 4"),
    (2, "--dp 2 --zero 3 --recompute selective"),
    *((4, f"--dp 4 --zero {zero} --replicate {1 + (zero > 0)}") for zero in (0, 1, 2)),
    *((2, f"--cp 2 --cp-method {method}") for method in hybrid.CP_METHODS),
    (3, "--cp 3 --zero 3"),
    *((2, f"--pp 2 --microbatches 4 --schedule {schedule}") for schedule in SCHEDULES),
    (4, "--pp 4 --microbatches 4 --layers 2"),
    (8, "--tp 2 --sp --cp 2 --pp 2 --schedule zb-v --microbatches 4"),
    (8, "--dp 2 --tp 2 --pp 2 --schedule dualpipe --microbatches 4 --zero 2"),
]
MIXTURE = "--experts 4 --top-k 2 --ffn 40 --layers 2"
OF_EXPERTS = [
    (1, f"{MIXTURE} --balance bias --shared-experts 1"),
    (2, f"{MIXTURE} --dp 2 --ep 2"),
    (4, f"{MIXTURE} --tp 2 --dp 2 --ep 4 --balance none"),
    (8, f"{MIXTURE} --tp 2 --sp --cp 2 --pp 2 --ep 4 --moe-every 2"),
]
OF_LLAMA = [
    (2, "--block llama --cp 2"),
    (4, "--block llama --tp 2 --sp --pp 2 --microbatches 4 --schedule zb-v"),
    (2, f"--block llama {MIXTURE} --dp 2 --ep 2"),
]
PLAIN = [
    (2, "--block llama --cp 2"),
    (2, "--tp 2 --sp --recompute full --dropout 0.1"),
    (2, "--pp 2 --microbatches 4 --schedule dualpipe"),
    (2, f"{MIXTURE} --dp 2 --ep 2"),
]


@pytest.mark.parametrize(
    "world_size, flags", soak_but(lambda i, row: row in PLAIN, LAYOUTS + OF_EXPERTS + OF_LLAMA)
)
def test_every_layout_writes_the_text_of_one_process_also_beyond_the_length_of_a_row(
    world_size, flags
):
    args = hybrid.parse(f"{FLAGS} {flags}".split(), world_size)
    temperatures = 0, 0.8
    ranks = run(world_size, _samples, flags, temperatures)
    weights = ranks[0][1]
    expected = [_text_alone(args, weights, temperature) for temperature in temperatures]
    assert min(len(set(text)) for text in expected) > 4
    for texts, _ in ranks:
        assert texts == expected


@pytest.mark.parametrize("world_size, flags", [(2, "--dp 2"), (2, "--pp 2 --dtype bf16")])
def test_below_fp64_a_greedy_token_is_the_best_one_or_within_rounding_of_it(world_size, flags):
    ((tokens,), weights), *_ = run(world_size, _samples, flags, [0], torch.float32)
    args = hybrid.parse(f"{FLAGS} {flags}".split(), world_size)
    next_logits = _logits_alone(args, weights)
    for i, token in enumerate(tokens):
        logits = next_logits(PROMPT + tokens[:i])
        rounding = (0.05 if args.dtype == "bf16" else 1e-5) * logits.abs().max()
        assert logits[token] >= logits.max() - rounding


@on_ranks(2)
def test_the_lowest_of_equal_tokens_wins_also_if_tp_splits_the_vocabulary():
    trainer = make_trainer("--tp 2 --temperature 0")
    chunk = trainer.chunks[0]
    torch.nn.init.zeros_(chunk.transformer["ln_f"].weight)  # its output is then its bias
    torch.nn.init.ones_(chunk.transformer["ln_f"].bias)
    weight = torch.nn.init.zeros_(chunk.lm_head.weight)
    for token in (V - 1, V // 2 + 5, 20, 9):
        place = token - chunk.lm_head.start
        if 0 <= place < len(weight):
            weight.data[place] = 1
            assert token == 9 or dist.get_rank() == (token > 20)
        assert set(hybrid.sample(trainer, PROMPT, 2)) == {token}


@on_ranks(2)
def test_replicas_whose_rounding_differs_write_the_text_of_rank_0():
    trainer = make_trainer("--dp 2 --zero 0")
    for parameter in trainer.chunks[0].parameters():
        parameter.data += dist.get_rank() * torch.rand_like(parameter)
    texts = gather_objects(hybrid.sample(trainer, PROMPT, 5))
    assert texts[0] == texts[1]


def test_temperature_draws_from_the_softmax():
    """A share differs from its probability by less than five standard deviations."""
    logits = torch.tensor([0.5, -1.0, 2.0, 1.5], dtype=torch.float64)
    for temperature in (0.5, 1.0, 3.0):
        random, n = np.random.default_rng(shifted(0)), 4000
        drawn = [hybrid.choose_token(logits, temperature, random).item() for _ in range(n)]
        shares = torch.tensor(drawn).bincount(minlength=4) / n
        expected = torch.softmax(logits / temperature, 0)
        deviation = (expected * (1 - expected) / n).sqrt()
        assert ((shares - expected).abs() < 5 * deviation).all()
    assert hybrid.choose_token(torch.tensor([1.0, 3.0, 3.0]), 0, random) == 1


# ---- no traces -----------------------------------------------------------------------------------


def _state(trainer):
    """Return copies of everything that a sample could change on this rank."""
    tensors = [torch.get_rng_state()]
    tensors += [layer.losses.tally for layer in trainer.mixtures.values()]
    tensors += [moment for state in trainer.optimizer.state.values() for moment in state.values()]
    for chunk in trainer.chunks:
        tensors += chunk.state_dict().values()
    return [tensor.clone() for tensor in tensors]


@pytest.mark.parametrize(
    "flags",
    [
        "--tp 2 --sp --dropout 0.1 --experts 4 --balance bias",
        "--cp 2 --zero 2 --dtype bf16",
        "--pp 2 --schedule dualpipe --microbatches 4",
    ],
)
@on_ranks(2)
def test_training_does_not_notice_a_sample(flags):
    trainer, other = make_trainer(flags), make_trainer(flags)
    for step in range(2):
        assert trainer.step(*own_batch(trainer, step)) == other.step(*own_batch(other, step))
        before = _state(trainer)
        hybrid.sample(trainer, [1], 3)
        assert all(map(torch.equal, before, _state(trainer)))
    assert all(map(torch.equal, _state(trainer), _state(other)))


# ---- prompts and output --------------------------------------------------------------------------

BAD_PROMPTS = """data | flags | what is wrong
text | --prompt=zap | --prompt: token 122 is outside --vocab-size 67
a.bin | --prompt=zap | --prompt: invalid literal for int() with base 10: 'zap'
a.bin | --prompt=, | --prompt: invalid literal for int() with base 10: ''
a.bin | --prompt=3,67 | --prompt: token 67 is outside --vocab-size 67
a.bin | --prompt=-1 | --prompt: token -1 is outside --vocab-size 67
"""


@on_ranks(1, soak(8))
def test_a_wrong_prompt_is_the_same_error_on_all_ranks_before_the_first_step(tmp_path):
    for line in BAD_PROMPTS.splitlines()[1:]:
        name, flags, message = line.split(" | ")
        if dist.get_rank() == 0:
            (tmp_path / name).write_bytes(bytes(2000) if name == "a.bin" else b"\n" * 2000)
        dist.barrier()
        words = [*FLAGS.split(), "--batch-size=16", "--data", str(tmp_path / name), flags]
        args = hybrid.parse(words, dist.get_world_size())
        never = patch.object(hybrid, "Trainer", lambda *_: pytest.fail("began to train"))
        with pytest.raises(hybrid.TrainingError) as found, never:
            hybrid.train(args, torch.device("cpu"))
        assert (found.value.status, str(found.value)) == (2, message)


def _output(flags, folder):
    """Return the metrics of samples and what is printed after the first validation."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        lines = train_on_text(f"--steps 2 --eval-every 1 {flags}", folder)
    samples = [line for line in lines if "sample" in line]
    return samples, printed.getvalue().partition("validation loss")[2]


def test_every_validation_ends_with_a_sample_and_the_metrics_have_it(tmp_path):
    (samples, printed), other = run(2, _output, "--sample 30 --prompt 1+2", tmp_path)
    assert other == ([], "")
    assert [line["step"] for line in samples] == [1, 2]
    assert [line["prompt"] for line in samples] == ["1+2", "1+2"]
    assert {len(line["sample"]) for line in samples} == {30}  # tokens below 67 are ASCII
    text = "1+2" + samples[1]["sample"]
    assert printed.endswith(f"after step 2\nsample after step 2:\n{text}\n")
    assert run(1, _output, "--sample 0", tmp_path)[0][0] == []


def test_text_has_a_sample_by_default_and_bin_data_only_if_a_flag_asks_for_one():
    text = hybrid.Data(*2 * [np.full(9, 7, np.uint8)])
    tokens = hybrid.Data(*2 * [np.full(9, 7, np.uint16)])
    cases = [
        (text, [], 200, [7]),
        (text, ["--sample", "5", "--prompt", "a\u20ac"], 5, [97, 0xE2, 0x82, 0xAC]),
        (text, ["--sample", "0"], 0, [7]),
        (tokens, [], 0, [7]),
        (tokens, ["--sample", "5"], 5, [7]),
        (tokens, ["--prompt", "3,0,5"], 200, [3, 0, 5]),
    ]
    for data, flags, size, prompt in cases:
        args = hybrid.parse(flags, 1)
        assert (hybrid.sample_size(args, data), hybrid.prompt_of(args, data)) == (size, prompt)


def test_what_is_no_byte_or_not_utf8_is_replaced():
    assert hybrid.text_of([*"a\n\u00e9".encode(), 0xFF, 300, 0xE2]) == "a\n\u00e9" + 3 * "\ufffd"
