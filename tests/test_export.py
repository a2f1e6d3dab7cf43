"""Files of GPT-2: what --export writes and --init-from reads, and --generate."""

import io
import os
import resource
from contextlib import redirect_stdout
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hybrid
from ranks import on_ranks, run
from reference_gpt import ReferenceGPT
from test_hybrid import FLAGS, HEADS, HIDDEN, LAYERS, SIZES, T, V, make_trainer, own_batch

ARGUMENTS = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": HIDDEN, "block_size": T, "bias": True}
ARGUMENTS |= {"vocab_size": V, "dropout": 0.0}
LAYOUTS = [
    (1, ""),
    (2, "--tp 2 --sp"),
    (2, "--pp 2 --microbatches 2 --zero 1"),
    (3, "--dp 3 --batch-size 15 --zero 1"),
    (4, "--cp 2 --pp 2 --schedule dualpipe --microbatches 4"),
    (8, "--tp 2 --pp 2 --dp 2 --microbatches 2"),
]


class Conv1D(nn.Module):
    """Hugging Face's linear layer: its weight is (in, out)."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = nn.Parameter(linear.weight.detach().t().clone()), linear.bias

    def forward(self, x):
        return x @ self.weight + self.bias


def nanogpt(dtype=torch.float64, seq_len=T, seed=0):
    """nanoGPT's layout of a GPT, with random values that no two parameters share."""
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    model = ReferenceGPT(LAYERS, HIDDEN, HEADS, seq_len, V)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.1, 0.5)
    torch.set_default_dtype(torch.float32)
    return model


def hugging_face(*arguments):
    """The same GPT in Hugging Face's layout."""
    model = nanogpt(*arguments)
    for layer in model.transformer.h:
        for module in (layer.attn, layer.mlp):
            for name, linear in list(module.named_children()):
                setattr(module, name, Conv1D(linear))
    return model


def _compiled(state):
    return {f"_orig_mod.{name}": value for name, value in state.items()}


def _of_hugging_face(state, prefix="transformer."):
    """Its files have no head, and the masks of older versions."""
    masks = {"h.0.attn.bias": torch.ones(1, 1, T, T), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    masks = {f"transformer.{name}": mask for name, mask in masks.items()}
    named = {name: value for name, value in state.items() if name != "lm_head.weight"}
    return {prefix + n.removeprefix("transformer."): value for n, value in (named | masks).items()}


FILES = {  # what nanoGPT and Hugging Face write
    "nanoGPT": lambda: {
        "model": nanogpt().state_dict(), "model_args": ARGUMENTS, "iter_num": 3, "config": {"a": 1}
    },
    "nanoGPT, compiled": lambda: {"model": _compiled(nanogpt().state_dict())},
    "a state dict of nanoGPT": lambda: nanogpt().state_dict(),
    "GPT2LMHeadModel": lambda: _of_hugging_face(hugging_face().state_dict()),
    "GPT2Model": lambda: _of_hugging_face(hugging_face().state_dict(), prefix=""),
}


def _logits(trainer, tokens):
    """Of one process."""
    trainer.chunks[0].eval()
    with torch.no_grad():
        return trainer.chunks[0](tokens).transpose(0, 1)


@pytest.mark.parametrize("name", FILES)
@on_ranks(1)
def test_a_file_of_nanogpt_or_hugging_face_gives_the_same_logits_here(name, tmp_path):
    tokens, model = torch.randint(V, (3, T)), nanogpt()
    old = name == "GPT2Model"  # as OpenAI's weights are stored
    torch.save(FILES[name](), tmp_path / "it", _use_new_zipfile_serialization=not old)
    found = _logits(make_trainer(f"--init-from {tmp_path / 'it'}", torch.float64), tokens)
    torch.testing.assert_close(found, model(tokens), rtol=1e-12, atol=1e-12)


@on_ranks(1)
def test_nanogpts_models_without_bias_and_of_more_positions_give_the_same_logits(tmp_path):
    model = nanogpt(seq_len=T + 4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(not name.endswith("bias"))
    state = {name: p for name, p in model.state_dict().items() if not name.endswith("bias")}
    torch.save({"model": state}, tmp_path / "it")
    tokens = torch.randint(V, (3, T))
    found = _logits(make_trainer(f"--init-from {tmp_path / 'it'}", torch.float64), tokens)
    torch.testing.assert_close(found, model(tokens), rtol=1e-12, atol=1e-12)


def _train_and_export(flags, path):
    """A few steps from the file at `path`, and the model written there again."""
    trainer = make_trainer(f"{flags} --init-from {path}.first", torch.float64)
    for step in range(2):
        trainer.step(*own_batch(trainer, step))
    hybrid.export(trainer, path)
    return hybrid.gather_state(trainer)


@pytest.mark.parametrize("world_size, flags", LAYOUTS)
def test_what_any_layout_exports_nanogpt_and_hugging_face_load_with_equal_logits(
    world_size, flags, tmp_path
):
    path, tokens = str(tmp_path / "it"), torch.randint(V, (3, T))
    torch.save(hugging_face().state_dict(), f"{path}.first")
    state = run(world_size, _train_and_export, flags, path)[0]
    file, plain = torch.load(path, weights_only=True), nanogpt(seed=1)
    assert file["model_args"] == ARGUMENTS and sorted(os.listdir(tmp_path)) == ["it", "it.first"]
    plain.load_state_dict(state)
    expected = plain(tokens)
    assert not torch.equal(expected, nanogpt()(tokens))  # it was trained
    theirs, flat = nanogpt(seed=2), hugging_face(torch.float64, T, 2)
    theirs.load_state_dict(file["model"])
    missing = flat.load_state_dict(file, strict=False)
    assert missing == ([], ["model", "model_args"])
    for model in (theirs, flat):
        torch.testing.assert_close(model(tokens), expected, rtol=1e-12, atol=1e-12)
    parameters = sum(p.numel() for p in plain.parameters())
    assert os.path.getsize(path) < 8 * parameters + 40_000  # no value twice


def _state_from(flags, path):
    """What a layout has of a file, and how many elements its ranks took from there."""
    taken, take = [], hybrid.loaded_value
    count = lambda *place, **options: taken.append(take(*place, **options)) or taken[-1]
    with patch.object(hybrid, "loaded_value", count):
        trainer = make_trainer(f"{flags} --init-from {path}", torch.float64)
    parameters = [p for chunk in trainer.chunks for p in chunk.parameters()]
    held = sum(getattr(p, "whole_shape", p.shape).numel() for p in parameters)  # before ZeRO's cut
    assert sum(part.numel() for part in taken) == held
    return hybrid.gather_state(trainer)


@pytest.mark.parametrize("world_size, flags", LAYOUTS)
def test_every_layout_loads_the_same_bits_and_a_rank_reads_what_it_holds(
    world_size, flags, tmp_path
):
    path, expected = str(tmp_path / "it"), nanogpt().state_dict()
    torch.save(hugging_face().state_dict(), path)
    state = run(world_size, _state_from, flags, path)[0]
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())


# ---- the command line ----------------------------------------------------------------------------

LINE = f"{FLAGS} --device cpu"
WRONG = """flags | what is wrong
--init-from MISSING | --init-from MISSING: No such file or directory
--init-from . | --init-from .: Is a directory
--init-from TEXT | --init-from TEXT: not a GPT-2 that torch.save wrote
--init-from HALF | --init-from HALF: not a GPT-2 that torch.save wrote
--init-from LIST | --init-from LIST: not a GPT-2 that torch.save wrote
--init-from CODE | --init-from CODE: not a GPT-2 that torch.save wrote
--init-from NO_WTE | wte.weight is not there, in the model it is (67, 32)
--init-from OTHER | --init-from OTHER: not a GPT-2 that torch.save wrote
--init-from FILE --vocab-size 80 | \
--init-from FILE: transformer.wte.weight is (67, 32), in the model it is (80, 32)
--init-from FILE --vocab-size 60 | wte.weight is (67, 32), in the model it is (60, 32)
--init-from FILE --hidden 64 | wte.weight is (67, 32), in the model it is (67, 64)
--init-from FILE --seq-len 13 | wpe.weight is (12, 32), in the model it is (13, 32)
--init-from FILE --layers 5 | h.4.ln_1.weight is not there, in the model it is (32,)
--init-from FILE --layers 3 | h.3.ln_1.weight is (32,), in the model it is not there
--init-from FILE --ffn 64 | c_fc.weight is (128, 32), in the model it is (64, 32)
--init-from FILE --heads 4 | --init-from FILE: its model has --heads 8, not 4
--init-from UNTIED | --init-from UNTIED: its lm_head.weight is not its wte.weight
--init-from FILE --experts 2 | FILE needs GPT-2's architecture, without --experts
--init-from FILE --kv-heads 2 | FILE needs GPT-2's architecture, as many --kv-heads as --heads
--export OUT --experts 2 | --export OUT needs GPT-2's architecture, without --experts
--export OUT --kv-heads 4 | needs GPT-2's architecture, as many --kv-heads as --heads
--export no/such | --export no/such: cannot write into
--export TEXT/such | --export TEXT/such: cannot write into
--export . | --export .: exists, and is no file
--export /dev/null | --export /dev/null: exists, and is no file
--generate 5 | --generate 5 needs --init-from
--init-from FILE --generate 5 --export OUT | --export OUT needs training, not --generate
--init-from FILE --generate 5 --metrics OUT | --metrics OUT needs training, not --generate
--init-from FILE --generate Hello | \
--generate Hello: not tokens of --vocab-size 67, such as 5,0
--init-from FILE --generate 5,67 | --generate 5,67: not tokens of --vocab-size 67
--init-from FILE --generate 5,,6 | --generate 5,,6: not tokens of --vocab-size 67
--init-from FILE --generate= | --generate  must not be empty
--init-from= | --init-from  must not be empty
--export= | --export  must not be empty
--sample -1 | --sample -1 must not be negative
"""


def _write_files():
    state = nanogpt(torch.float32).state_dict()
    torch.save({"model": state, "model_args": ARGUMENTS}, "FILE")
    torch.save(state | {"lm_head.weight": torch.zeros(V, HIDDEN)}, "UNTIED")
    torch.save({name: state[name] for name in state if "wte" not in name}, "NO_WTE")
    torch.save([1, 2], "LIST")
    torch.save({"model": io.StringIO}, "CODE")
    torch.save(nn.Linear(2, 2).state_dict(), "OTHER")
    with open("FILE", "rb") as file, open("HALF", "wb") as half, open("TEXT", "w") as text:
        half.write(file.read()[:100_000])
        text.write("a text" * 1000)


@pytest.mark.parametrize("line", WRONG.splitlines()[1:])
def test_what_does_not_fit_is_refused_in_one_line_before_any_group(
    line, tmp_path, monkeypatch, capsys
):
    flags, message = line.split(" | ")
    monkeypatch.chdir(tmp_path)
    _write_files()
    begin = lambda *arguments, **options: pytest.fail("began to wait")
    monkeypatch.setattr(dist, "init_process_group", begin)
    assert hybrid.main(f"{LINE} {flags}".split()) == 2
    (complaint,) = capsys.readouterr().err.splitlines()
    assert complaint.startswith("hybrid.py: error: ") and message in complaint
    assert not os.path.exists("OUT")


def _export_with_little_room(flags, path):
    """What export() raises where files of 64 KB are the largest."""
    trainer = make_trainer(flags)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        hybrid.export(trainer, path)
    except hybrid.TrainingError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_where_there_is_no_room_all_ranks_say_so_and_the_file_of_before_stays(tmp_path):
    path = tmp_path / "it"
    path.write_text("before")
    faults = run(2, _export_with_little_room, "--tp 2", str(path))
    assert faults == 2 * [f"{path}: File too large"]
    assert os.listdir(tmp_path) == ["it"] and path.read_text() == "before"


def _generate(flags):
    printed = io.StringIO()
    args = hybrid.parse_args(f"{LINE} {flags}".split(), dist.get_world_size())
    mesh = hybrid.mesh_of(args)
    with redirect_stdout(printed):
        hybrid.generate(args, mesh, torch.device("cpu"))
    return printed.getvalue()


def test_what_is_generated_does_not_depend_on_the_layout_but_on_the_prompt(tmp_path):
    torch.save(nanogpt(torch.float32).state_dict(), tmp_path / "it")
    flags = f"--init-from {tmp_path / 'it'} --sample 9 --generate"
    (printed,) = run(1, _generate, f"{flags} 5,0,66")
    prompt, continuation = printed.split("---- prompt\n")[1].split("\n---- continuation\n")
    assert prompt == "[5, 0, 66]" and continuation.count(",") == 8
    for world_size, layout in ((2, "--tp 2 --sp"), (3, "--cp 3"), (4, "--pp 2 --dp 2 --zero 1")):
        others = run(world_size, _generate, f"{flags} 5,0,66 {layout}")
        assert others == [printed] + (world_size - 1) * [""], layout
    assert continuation not in run(1, _generate, f"{flags} 5,0,65")[0]


def test_with_256_tokens_a_prompt_is_its_bytes():
    args = lambda prompt: hybrid.parse_args(["--init-from", "F", "--generate", prompt], 1)
    assert hybrid.prompt_tokens(args("né 7")) == [110, 195, 169, 32, 55]


def test_hybrid_trains_from_a_file_and_writes_one_and_continues_a_prompt_from_it(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("The quick brown fox. " * 100)
    sizes = "--layers 1 --hidden 8 --heads 2 --seq-len 16 --batch-size 2 --device cpu".split()
    train = [*sizes, "--data", "text", "--steps", "2", "--sample", "0"]
    assert hybrid.main([*train, "--export", "first"]) == 0
    assert "continuation" not in capfd.readouterr().out
    assert hybrid.main([*train, "--init-from", "first", "--export", "first", "--lr", "0"]) == 0
    prompt = ["--init-from", "first", "--generate", "The qu", "--sample", "5"]
    assert hybrid.main([*sizes, *prompt]) == 0
    printed = capfd.readouterr().out
    assert "---- prompt\nThe qu\n---- continuation\n" in printed
