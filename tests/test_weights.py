"""gpt2.py converts files of nanoGPT and Hugging Face to checkpoints that train, and the reverse."""

import io
import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gpt2
import hybrid
import verify
from ranks import on_ranks, run
from reference_gpt import ReferenceGPT

LAYERS, HIDDEN, HEADS, T, V = 3, 32, 4, 12, 67
ARGUMENTS = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": HIDDEN, "block_size": T, "bias": True}
ARGUMENTS |= {"vocab_size": V, "dropout": 0.0}
FLAGS = f"--layers {LAYERS} --hidden {HIDDEN} --heads {HEADS} --seq-len {T} --vocab-size {V}"


class Conv1D(nn.Module):
    """Hugging Face's linear layer, whose weight is (in, out)."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = nn.Parameter(linear.weight.detach().t().clone()), linear.bias

    def forward(self, x):
        return x @ self.weight + self.bias


def nanogpt(seq_len=T, seed=0):
    """Return a GPT in nanoGPT's layout, with random values in all parameters."""
    torch.manual_seed(seed)
    model = ReferenceGPT(LAYERS, HIDDEN, HEADS, seq_len, V)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.1, 0.3)
    return model


def hugging_face(**options):
    """Return the same GPT in Hugging Face's layout."""
    model = nanogpt(**options)
    for layer in model.transformer.h:
        for module in (layer.attn, layer.mlp):
            for name, linear in list(module.named_children()):
                setattr(module, name, Conv1D(linear))
    return model


def of_hugging_face(prefix):
    """Return the state dict of an old file, with masks and without a head; prefix each name."""
    state = hugging_face().state_dict()
    state |= {"transformer.h.0.attn.bias": torch.ones(1, 1, T, T)}
    state |= {"transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}
    del state["lm_head.weight"]
    return {prefix + name.removeprefix("transformer."): value for name, value in state.items()}


FILES = {  # {the model that was saved: its file's content}
    "nanoGPT": lambda: {"model": nanogpt().state_dict(), "model_args": ARGUMENTS, "iter_num": 3},
    "DDP": lambda: {f"_orig_mod.module.{name}": x for name, x in nanogpt().state_dict().items()},
    "compiled": lambda: {f"_orig_mod.{name}": x for name, x in nanogpt().state_dict().items()},
    "GPT2LMHeadModel": lambda: of_hugging_face("transformer."),
    "GPT2Model": lambda: of_hugging_face(""),
}


# ---- import --------------------------------------------------------------------------------------


def trainer_of(flags, folder):
    """Return a Trainer in a layout, resumed from the last checkpoint."""
    args = hybrid.parse(f"{FLAGS} {flags}".split(), dist.get_world_size())
    trainer = hybrid.Trainer(args, hybrid.make_mesh(args), torch.device("cpu"))
    hybrid.resume(trainer, folder)
    return trainer


def logits_of(folder, tokens):
    """Return the logits of hybrid.py on one process, from the last checkpoint."""
    (chunk,) = trainer_of("", folder).chunks
    with torch.no_grad():
        return chunk.eval()(tokens).transpose(0, 1)


def imported(state, folder, *flags, **options):
    """Import a state that torch.save() writes; return the checkpoint's folder."""
    torch.save(state, folder / "it", **options)
    assert not gpt2.main(["import", str(folder / "it"), str(folder / "new"), *flags])
    return folder / "new"


@pytest.mark.parametrize("name", FILES)
@on_ranks(1)
def test_a_file_of_nanogpt_or_hugging_face_gives_the_same_logits_in_hybrid(name, tmp_path):
    tokens, model = torch.randint(V, (3, T)), nanogpt()
    heads = [] if name == "nanoGPT" else ["--heads", str(HEADS)]
    old = name == "GPT2Model"  # OpenAI's weights have the old format
    folder = imported(FILES[name](), tmp_path, *heads, _use_new_zipfile_serialization=not old)
    torch.testing.assert_close(logits_of(folder, tokens), model(tokens), rtol=1e-5, atol=1e-5)


@on_ranks(1)
def test_a_bf16_model_without_biases_cut_to_fewer_positions_gives_the_same_logits(tmp_path):
    model, tokens = nanogpt(seq_len=T + 4).bfloat16(), torch.randint(V, (3, T))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(not name.endswith("bias"))
    state = {name: p for name, p in model.state_dict().items() if not name.endswith("bias")}
    folder = imported(state, tmp_path, "--heads", str(HEADS), "--seq-len", str(T))
    expected = model.float()(tokens)
    torch.testing.assert_close(logits_of(folder, tokens), expected, rtol=1e-5, atol=1e-5)


def safetensors(state):
    """Return the bytes of a .safetensors file, as its format is published."""
    header = {"__metadata__": {"format": "pt"}}
    content = b""
    for name, tensor in state.items():
        own = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        place = [len(content), len(content) + len(own)]
        dtype = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": place}
        content += own
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(1)
def test_a_safetensors_file_gives_the_same_logits(dtype, tmp_path):
    model = nanogpt()
    tokens = torch.randint(V, (3, T))
    state = {name: value.to(dtype) for name, value in of_hugging_face("").items()}
    state["h.0.attn.bias"] = torch.ones(1, 1, T, T, dtype=torch.uint8)  # a mask
    (tmp_path / "model.safetensors").write_bytes(safetensors(state))
    words = f"import {tmp_path}/model.safetensors {tmp_path}/new --heads {HEADS}"
    assert not gpt2.main(words.split())
    if dtype == torch.bfloat16:
        model = model.bfloat16().float()
    logits = logits_of(tmp_path / "new", tokens)
    torch.testing.assert_close(logits, model(tokens), rtol=0, atol=1e-5)


# ---- export --------------------------------------------------------------------------------------


def train(flags, folder):
    """Train two steps and save; return the weights."""
    trainer = trainer_of(flags, folder)
    for step in range(2):
        trainer.step(*verify.batch_of(trainer.args, step, trainer.own_rows()))
    with hybrid.Saver(trainer, folder) as saver:
        saver.save()
    return verify.gathered(trainer)


def test_nanogpt_and_hugging_face_load_an_exported_checkpoint_with_equal_logits(tmp_path):
    path, file = tmp_path / "out", {"model": nanogpt().state_dict(), "model_args": ARGUMENTS}
    folder = imported(file, tmp_path)
    state, tokens = run(2, train, "--tp 2 --sp", folder)[0], torch.randint(V, (3, T))
    assert not gpt2.main(["export", str(folder), str(path)])
    plain, theirs, flat = nanogpt(seed=1), nanogpt(seed=2), hugging_face(seed=3)
    plain.load_state_dict(state, strict=False)
    assert not torch.equal(plain(tokens), nanogpt()(tokens))  # training has changed it
    file = torch.load(path, weights_only=True)
    assert file["model_args"] == ARGUMENTS
    theirs.load_state_dict(file["model"])
    assert flat.load_state_dict(file, strict=False) == ([], ["model", "model_args"])
    for model in (theirs, flat):
        torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-6, atol=1e-6)
    # The file stores each weight once.
    assert path.stat().st_size < 4 * sum(p.numel() for p in plain.parameters()) + 40_000


def test_the_printed_command_trains_and_its_checkpoint_is_exported(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("12 + 30 = 42, " * 100)
    imported(nanogpt().state_dict(), tmp_path, "--heads", str(HEADS))
    program, *flags = capfd.readouterr().out.split()
    more = "--data text --steps 1 --batch-size 2 --sample 0 --device cpu".split()
    assert program == "hybrid.py" and hybrid.main([*flags, *more]) == 0
    assert "step_00000000" in capfd.readouterr().out
    assert not gpt2.main(["export", "new", "out"])
    assert capfd.readouterr().out == "out is new/step_00000001\n"


# ---- errors --------------------------------------------------------------------------------------

WRONG = """command | what is wrong
 | import FILE DIR [--heads N] [--seq-len T], or export DIR FILE
import MISSING new | not a GPT-2 that torch.save() wrote: FileNotFoundError
import CODE new | CODE new: not a GPT-2 that torch.save() wrote
import OTHER new | OTHER new: not a GPT-2 that torch.save() wrote: KeyError('transformer.h.0
import NO_LN new | Missing key(s) in state_dict: "transformer.h.1.ln_2.weight"
import UNTIED new | UNTIED new: its lm_head.weight is not its wte.weight
import FILE new --layers 2 | Unexpected key(s) in state_dict: "transformer.h.2.ln_1.weight"
import FILE new --heads 5 | --hidden 32 is not divisible by --heads 5
import FILE there | there/step_00000000 is there already
export MISSING OUT | MISSING/step_*/run.json
export there no/such | no/such
export experts OUT | --experts 4 --kv-heads 4 is no GPT-2
export groups OUT | --experts 0 --kv-heads 2 is no GPT-2
export empty OUT | empty/step_00000000/run.json does not hold the flags of a run
import EMPTY.safetensors new | EMPTY.safetensors new: not a GPT-2 that torch.save() wrote
export bare OUT | bare/step_00000000/.metadata
"""


def write_files():
    state = nanogpt().state_dict()
    torch.save({"model": state, "model_args": ARGUMENTS}, "FILE")
    torch.save(state | {"lm_head.weight": torch.zeros(V, HIDDEN)}, "UNTIED")
    torch.save({name: state[name] for name in state if "1.ln_2" not in name}, "NO_LN")
    torch.save({"model": io.StringIO}, "CODE")
    torch.save(nn.Linear(2, 2).state_dict(), "OTHER")
    assert not gpt2.main(["import", "FILE", "there"])
    text = Path("there/step_00000000/run.json").read_text()
    for name, other in {
        "experts": json.dumps(json.loads(text) | {"experts": 4}),
        "groups": json.dumps(json.loads(text) | {"kv_heads": 2}),
        "empty": "{}",
        "bare": text,
    }.items():
        shutil.copytree("there", name)
        Path(name, "step_00000000", "run.json").write_text(other)
    Path("bare/step_00000000/.metadata").unlink()


@pytest.mark.parametrize("line", WRONG.splitlines()[1:])
def test_an_error_is_one_line_and_changes_no_file(line, tmp_path, monkeypatch, capsys):
    words, message = line.split(" | ")
    monkeypatch.chdir(tmp_path)
    write_files()
    before, _ = sorted(tmp_path.rglob("*")), capsys.readouterr()
    assert gpt2.main(words.split()) == 2
    (complaint,) = capsys.readouterr().err.splitlines()
    assert complaint.startswith("gpt2.py: error: ") and message in complaint
    assert set(before) <= set(tmp_path.rglob("*")) and not Path("OUT").exists()


@pytest.mark.parametrize("size", [100, 3000, 40_000])  # at the file's first write, and later ones
def test_a_full_disk_is_the_reason_given_and_leaves_no_file(size, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_files()
    before, _ = sorted(tmp_path.rglob("*")), capsys.readouterr()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for words in ("export there OUT", "import FILE new"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            status = gpt2.main(words.split())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        (complaint,) = capsys.readouterr().err.splitlines()
        assert status == 2 and complaint.endswith("[Errno 27] File too large")  # a disk's is 28
    shutil.rmtree("new", ignore_errors=True)
    assert sorted(tmp_path.rglob("*")) == before
