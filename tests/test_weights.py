"""weights.py converts files of nanoGPT and Hugging Face to checkpoints, and the reverse."""

import io
import json
import resource
import shlex
import shutil
from contextlib import chdir
from dataclasses import field, make_dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import hybrid
import verify
import weights
from ranks import PROJECT, on_ranks, quoted, run, shifted
from reference_gpt import ReferenceGPT, reference_gpt

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
    torch.manual_seed(shifted(seed))
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
    return resumed(f"{FLAGS} {flags}", folder)


def resumed(flags, folder):
    """Return a Trainer with exactly these flags, resumed from the last checkpoint."""
    args = hybrid.parse(shlex.split(flags), dist.get_world_size())
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
    assert not weights.main(["import", str(folder / "it"), str(folder / "new"), *flags])
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
    folder = quoted(tmp_path)
    words = f"import {folder}/model.safetensors {folder}/new --heads {HEADS}"
    assert not weights.main(shlex.split(words))
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
    assert not weights.main(["export", str(folder), str(path)])
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
    program, *flags = shlex.split(capfd.readouterr().out)
    more = "--data text --steps 1 --batch-size 2 --sample 0 --device cpu".split()
    assert program == "hybrid.py" and hybrid.main([*flags, *more]) == 0
    assert "step_00000000" in capfd.readouterr().out
    assert not weights.main(["export", "new", "out"])
    assert capfd.readouterr().out == "out is new/step_00000001\n"


# ---- Llama and Mixtral ---------------------------------------------------------------------------
#
# data/llama and data/mixtral have been written by Hugging Face's transformers (data/golden.py).

DATA = PROJECT / "tests" / "data"
GOLDEN = "llama", "mixtral"


def golden(name):
    """Return transformers' tokens, logits, and {name: gradient} of the mean loss, in fp64."""
    numbers = np.load(DATA / name / "numbers.npz")
    gradients = {key: torch.from_numpy(value) for key, value in numbers.items()}
    return gradients.pop("tokens"), gradients.pop("logits"), gradients


def next_tokens(tokens):
    """Return the targets of tokens, (B, T); the last ones do not count."""
    targets = tokens.roll(-1, 1)
    targets[:, -1] = hybrid.IGNORE_INDEX
    return targets


def assert_close(found, expected, bound):
    """Compare tensors by name, each relative to its norm."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (found[name] - tensor).norm() / tensor.norm()
        assert error <= bound, f"{name} differs by {error:.1e}"


def printed(words, capsys):
    """Run a command that must succeed, and return what it prints."""
    assert not weights.main(list(map(str, words)))
    return capsys.readouterr().out.rstrip("\n")


@pytest.mark.parametrize("name", GOLDEN)
def test_the_reference_has_the_logits_and_gradients_of_transformers(name):
    tokens, logits, gradients = golden(name)
    state, flags = weights.read(DATA / name)
    words = " ".join(hybrid.as_typed(*flag) for flag in flags.items())
    losses = " --balance none" if name == "mixtral" else ""
    args = hybrid.parse(f"{words}{losses}".split(), 1)
    model = reference_gpt(args).double()
    model.load_state_dict(weights.weights_of(state, args), strict=False)  # it has no router.bias
    found = model(tokens)
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-12)
    targets = next_tokens(tokens).flatten()
    nn.functional.cross_entropy(found.flatten(0, 1), targets).backward()
    own = {key: parameter.grad for key, parameter in model.named_parameters()}
    assert_close(weights.in_hugging_face(own, args), gradients, 1e-12)


def _logits_and_gradients(flags, folder, tokens):
    """Return a layout's logits, if one rank has them, and its gradients, under our names."""
    trainer = resumed(flags, folder)
    logits = None
    if dist.get_world_size() == 1:
        with torch.no_grad():
            logits = trainer.chunks[0].eval()(tokens).transpose(0, 1)
    trainer.forward_backward(tokens, next_tokens(tokens))
    return logits, verify.gathered(trainer, lambda parameter: parameter.grad)


OF_LAYOUTS = [("llama", 1, ""), ("mixtral", 1, ""), ("llama", 2, "--tp 2 --sp")]
OF_LAYOUTS += [("mixtral", 2, "--tp 2 --ep 2")]


@pytest.mark.parametrize("name, world_size, layout", OF_LAYOUTS)
def test_hybrid_has_the_logits_and_gradients_of_transformers(
    name, world_size, layout, tmp_path, capsys
):
    tokens, logits, gradients = golden(name)
    words = ["import", DATA / name, tmp_path, "--seq-len", tokens.shape[1]]
    if name == "mixtral":
        words += ["--balance", "none"]
    program, _, _, *flags = shlex.split(printed(words, capsys))
    flags = " ".join([*flags, "--batch-size", str(len(tokens)), layout])
    (found, own), *_ = run(world_size, _logits_and_gradients, flags, tmp_path, tokens)
    assert program == "hybrid.py"
    if found is not None:
        torch.testing.assert_close(found.double(), logits, rtol=0, atol=3e-5)
    args = hybrid.parse(flags.split(), world_size)
    assert_close(weights.in_hugging_face(own, args), gradients, 1e-5)


@pytest.mark.parametrize("name", GOLDEN)
def test_an_exported_folder_has_the_names_weights_and_sizes_of_the_imported_one(
    name, tmp_path, capsys
):
    out = tmp_path / "out"
    command = printed(["import", DATA / name, tmp_path / "a"], capsys)
    exported = printed(["export", tmp_path / "a", out], capsys)
    assert exported == f"{out} is {tmp_path}/a/step_00000000"
    theirs, own = weights.read_folder(DATA / name), weights.read_folder(out)
    assert own.keys() == theirs.keys() and {x.dtype for x in own.values()} == {torch.float32}
    assert all(torch.equal(own[key], theirs[key].float()) for key in own)
    before = json.loads((DATA / name / "config.json").read_text())
    after = json.loads((out / "config.json").read_text())
    same = "architectures", "model_type", "hidden_act", "rms_norm_eps", "vocab_size", "hidden_size"
    assert all(after[key] == before[key] for key in same)
    assert after["rope_theta"] == before["rope_parameters"]["rope_theta"]
    again = printed(["import", out, tmp_path / "b"], capsys)
    assert again == command.replace(str(tmp_path / "a"), str(tmp_path / "b"))
    header = int.from_bytes((out / "model.safetensors").read_bytes()[:8], "little")
    assert header % 8 == 0  # so tensors are aligned


def changed(name, folder, config=(), drop=(), **tensors):
    """Write a golden folder as one unsharded file, with some keys and tensors changed or gone."""
    state = {key: value.clone() for key, value in weights.read_folder(DATA / name).items()}
    state = {key: value for key, value in state.items() if key not in drop} | tensors
    keys = json.loads((DATA / name / "config.json").read_text()) | dict(config)
    keys = {key: value for key, value in keys.items() if value != "GONE"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(keys))
    (folder / "model.safetensors").write_bytes(safetensors(state))
    return folder


EMBEDDING = "model.embed_tokens.weight"
TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize("has_head", [False, True])
def test_a_tied_llama_has_no_head_of_its_own(has_head, tmp_path, capsys):
    embedding = weights.read_folder(DATA / "llama")[EMBEDDING]
    head = {"lm_head.weight": embedding} if has_head else {}
    folder = changed("llama", tmp_path / "tied", TIED, ["lm_head.weight"], **head)
    command = printed(["import", folder, tmp_path / "a"], capsys)
    assert " --head tied " in command
    printed(["export", tmp_path / "a", tmp_path / "out"], capsys)
    own = weights.read_folder(tmp_path / "out")
    assert "lm_head.weight" not in own and torch.equal(own[EMBEDDING], embedding.float())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]


OLDER = {"rope_parameters": "GONE", "rope_theta": 300.0, "head_dim": "GONE"}
ALIKE = [  # config.json of other versions of transformers, and of other writers
    OLDER,
    OLDER | {"rope_theta": 300, "rope_scaling": None},
    OLDER | {"rope_scaling": {"type": "default"}, "attention_bias": "GONE", "mlp_bias": "GONE"},
    {"head_dim": None, "hidden_act": "GONE", "tie_word_embeddings": "GONE"},
]


@pytest.mark.parametrize("config", ALIKE)
def test_older_and_newer_config_files_say_the_same(config, tmp_path, capsys):
    expected = printed(["import", DATA / "llama", tmp_path / "a"], capsys)
    folder = changed("llama", tmp_path / "older", config)
    found = printed(["import", folder, tmp_path / "b"], capsys)
    assert found == expected.replace(str(tmp_path / "a"), str(tmp_path / "b"))


@pytest.mark.parametrize("name, theta", [("llama", 10000.0), ("mixtral", 1000000.0)])
def test_a_config_file_without_rope_theta_has_that_of_transformers(name, theta, tmp_path, capsys):
    folder = changed(name, tmp_path / "older", {"rope_parameters": "GONE"})
    assert f"--rope-theta {theta}" in printed(["import", folder, tmp_path / "a"], capsys)


@pytest.mark.parametrize("name, kv_heads", [("llama", None), ("mixtral", 8)])
def test_a_config_file_without_kv_heads_has_those_of_transformers(name, kv_heads):
    """A Llama then has as many as heads, which is also the default of hybrid.py."""
    config = json.loads((DATA / name / "config.json").read_text())
    del config["num_key_value_heads"]
    assert weights.flags_of_config(config).get("kv_heads") == kv_heads


def test_a_gpt2_with_a_head_of_its_own_is_imported_if_asked_for(tmp_path, capsys):
    head = torch.randn(V, HIDDEN)
    torch.save(nanogpt().state_dict() | {"lm_head.weight": head}, tmp_path / "it")
    flags = ["--heads", HEADS, "--head", "untied"]
    command = printed(["import", tmp_path / "it", tmp_path / "new", *flags], capsys)
    assert command.endswith(" --head untied")
    (found,) = run(1, _head_of, shlex.join(shlex.split(command)[3:]), tmp_path / "new")
    assert torch.equal(found, head)


def _head_of(flags, folder):
    (chunk,) = resumed(flags, folder).chunks
    return chunk.lm_head.weight.detach()


def test_a_folder_of_a_gpt2_gives_its_heads(tmp_path, capsys):
    keys = {"model_type": "gpt2", "n_layer": LAYERS, "n_head": HEADS, "n_embd": HIDDEN}
    keys |= {"n_positions": T, "vocab_size": V, "n_inner": None, "layer_norm_epsilon": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    (tmp_path / "model.safetensors").write_bytes(safetensors(of_hugging_face("")))
    (tmp_path / "bare").mkdir()
    shutil.copy(tmp_path / "config.json", tmp_path / "bare")
    state = {name: x for name, x in of_hugging_face("").items() if name != "wpe.weight"}
    (tmp_path / "bare" / "model.safetensors").write_bytes(safetensors(state))
    assert weights.main(["import", str(tmp_path / "bare"), str(tmp_path / "no")]) == 2
    assert "transformer.wpe.weight is missing" in capsys.readouterr().err
    folder = tmp_path / "a new one"
    found = hybrid.parse(shlex.split(printed(["import", tmp_path, folder], capsys))[1:], 1)
    expected = hybrid.parse(shlex.split(f"{FLAGS} --head tied --checkpoint {quoted(folder)}"), 1)
    assert found == expected


# Each row: a folder, what changes in config.json, and what is wrong.
CONFIGS = """llama {"rms_norm_eps": 1e-06} | rms_norm_eps 1e-06 is not 1e-05
llama {"rms_norm_eps": "GONE"} | rms_norm_eps 1e-06 is not 1e-05
llama {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}} | rope_scaling {"rope_type": "llama3
llama {"rope_scaling": {"type": "linear"}} | rope_scaling {"type": "linear"} is not null
llama {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}} | rope_parameters {"rope_type":
llama {"rope_scaling": 8} | rope_scaling 8 is not null or of the type "default"
llama {"rope_parameters": {"rope_theta": 0}} | --rope-theta
llama {"sliding_window": 4096} | sliding_window 4096 is not null
mixtral {"sliding_window": 4096} | sliding_window 4096 is not null
llama {"attention_bias": true} | attention_bias true is not false
llama {"mlp_bias": true} | mlp_bias true is not false
llama {"hidden_act": "gelu"} | hidden_act "gelu" is not "silu"
llama {"head_dim": 16} | head_dim 16 is not 8.0
llama {"quantization_config": {"bits": 4}} | quantization_config {"bits": 4} is not null
llama {"model_type": "qwen2"} | model_type "qwen2" is none of gpt2, llama, mixtral
llama {"model_type": "mixtral"} | num_local_experts null is not a size
llama {"model_type": "gpt2"} | n_layer null is not a size
llama {"hidden_size": "GONE"} | hidden_size null is not a size
llama {"hidden_size": "32"} | hidden_size "32" is not a size
llama {"num_attention_heads": 0} | num_attention_heads 0 is not a size
llama {"num_hidden_layers": 3} | model.layers.2.input_layernorm.weight is missing
llama {"num_hidden_layers": 1} | model.layers.1.input_layernorm.weight has no place in the model
llama {"num_key_value_heads": 4} | self_attn.k_proj.weight is (16, 32), and not (32, 32)
llama {"intermediate_size": 20} | mlp.gate_proj.weight is (18, 32), and not (20, 32)
llama {"tie_word_embeddings": true} | lm_head.weight is not the embedding's weight
mixtral {"num_experts_per_tok": 1} | --top-k 1 is no Mixtral
mixtral {"num_experts_per_tok": 5} | --experts 4 --top-k 5: 
mixtral {"num_local_experts": 8} | block_sparse_moe.experts.4.w1.weight is missing
"""


@pytest.mark.parametrize("line", CONFIGS.splitlines())
def test_what_a_config_file_says_and_hybrid_cannot_hold_is_refused_by_name(line, tmp_path, capsys):
    words, message = line.split(" | ")
    name, _, text = words.partition(" ")
    folder = changed(name, tmp_path / "it", json.loads(text))
    assert weights.main(["import", str(folder), str(tmp_path / "new")]) == 2
    (complaint,) = capsys.readouterr().err.splitlines()
    assert complaint.startswith("weights.py: error: ") and message in complaint
    assert not (tmp_path / "new").exists()


# ---- errors --------------------------------------------------------------------------------------

WRONG = """command | what is wrong
 | import PATH DIR [flags of hybrid.py], or export DIR PATH
import MISSING new | No such file or directory: 'MISSING'
import CODE new | CODE new: not the weights of a GPT-2 or Llama: UnpicklingError
import OTHER new | OTHER new: not the weights of a GPT-2 or Llama: KeyError('transformer.h.0
import NO_LN new | NO_LN new: transformer.h.1.ln_2.weight is missing
import UNTIED new | UNTIED new: lm_head.weight is not the embedding's weight
import FILE new --layers 2 | transformer.h.2.attn.c_attn.bias has no place in the model
import FILE new --heads 5 | --hidden 32 --heads 5: 
import FILE new --block llama | --block llama differs from the file's, gpt2
import FILE new --experts 4 | transformer.h.0.mlp.experts.w_in is missing
import FILE new --sequence 5 | unrecognized arguments: --sequence 5
import FILE there | there/step_00000000 is there already
export MISSING OUT | MISSING/step_*/SHA256SUMS
export there no/such | no/such
export experts OUT | --experts 4 is no GPT-2
export groups OUT | --kv-heads 2 is no GPT-2
export untied OUT | --head untied is no GPT-2
export empty OUT | empty/step_00000000/run.json has changed since it was saved
import EMPTY.safetensors new | No such file or directory: 'EMPTY.safetensors'
import FILE.safetensors new | FILE.safetensors is not a safetensors file: JSONDecodeError: E
import TORCH.safetensors new | UnicodeDecodeError: 'utf-32-be' codec can't decode bytes in pos
export there OUT.safetensors | a GPT-2 is exported to a file of torch.save(), which has its n_head
export bare OUT | bare/step_00000000/.metadata
import LLAMA new --block gpt2 | --block gpt2 differs from the file's, llama
import LLAMA new --rope-theta 5 | --rope-theta 5.0 differs from the file's, 300.0
import LLAMA new --head tied | --head tied differs from the file's, untied
import MIXTRAL new --shared-experts 1 | --shared-experts 1 is no Mixtral
import MIXTRAL new --balance bias | --balance bias is no Mixtral
import MIXTRAL new --moe-every 2 | --moe-every 2 is no Mixtral
import LLAMA/model.safetensors new | a Llama's sizes are in its config.json
import EMPTY new | No such file or directory: 'EMPTY/config.json'
import CONFIG new | CONFIG/config.json is not an object in JSON
import SHORT new | SHORT/model.safetensors is not a safetensors file
import LOST new | No such file or directory: 'LOST/model-00002-of-00002.safetensors'
import SWAPPED new | SWAPPED/model-00002-of-00002.safetensors lacks model.layers.1.block
export llama OUT.pt | a Llama is exported to a folder
export llama there | there is there already
export shared OUT | --shared-experts 1 is no Mixtral
export biased OUT | --balance bias is no Mixtral
export full OUT | --capacity-factor 1.5 is no Mixtral
export one OUT | --top-k 1 is no Mixtral
"""


def write_folders():
    for name in GOLDEN:
        shutil.copytree(DATA / name, name.upper())
    for name in ("EMPTY", "CONFIG", "SHORT", "LOST", "SWAPPED"):
        shutil.copytree("MIXTRAL" if name in ("LOST", "SWAPPED") else "LLAMA", name)
    Path("EMPTY/config.json").unlink()
    Path("CONFIG/config.json").write_text("[1]")
    content = Path("LLAMA/model.safetensors").read_bytes()
    Path("SHORT/model.safetensors").write_bytes(content[:-9])
    Path("LOST/model-00002-of-00002.safetensors").unlink()
    first, second = sorted(Path("SWAPPED").glob("*.safetensors"))
    second.write_bytes(first.read_bytes())


def write_checkpoint(name, source, **flags):
    """Copy a checkpoint of a Llama and change flags in its run.json."""
    shutil.copytree(source, name)
    path = Path(name, "step_00000000")
    run = json.loads((path / "run.json").read_text()) | flags
    others = [file for file in path.iterdir() if file.name not in ("run.json", "SHA256SUMS")]
    hybrid.write_run(path, run, hybrid.digests_of(others))


def write_files():
    state = nanogpt().state_dict()
    torch.save({"model": state, "model_args": ARGUMENTS}, "FILE")
    torch.save(state | {"lm_head.weight": torch.zeros(V, HIDDEN)}, "UNTIED")
    torch.save({name: state[name] for name in state if "1.ln_2" not in name}, "NO_LN")
    torch.save({"model": io.StringIO}, "CODE")
    torch.save(nn.Linear(2, 2).state_dict(), "OTHER")
    assert not weights.main(["import", "FILE", "there"])
    write_checkpoint("experts", "there", experts=4)
    write_checkpoint("groups", "there", kv_heads=2)
    write_checkpoint("untied", "there", head="untied")
    write_checkpoint("bare", "there")
    Path("bare/step_00000000/.metadata").unlink()
    write_checkpoint("empty", "there")
    Path("empty/step_00000000/run.json").write_text("{}")
    Path("FILE.safetensors").write_bytes(b"12345678{")
    shutil.copy("FILE", "TORCH.safetensors")


def write_llamas():
    write_folders()
    assert not weights.main(["import", "LLAMA", "llama"])
    assert not weights.main(["import", "MIXTRAL", "mixtral"])
    write_checkpoint("shared", "mixtral", shared_experts=1)
    write_checkpoint("biased", "mixtral", balance="bias")
    write_checkpoint("full", "mixtral", capacity_factor=1.5)
    write_checkpoint("one", "mixtral", top_k=1)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder with files and checkpoints. No command of a test changes any of them."""
    folder = tmp_path_factory.mktemp("files")
    with chdir(folder):
        write_files()
        write_llamas()
    return folder


@pytest.mark.parametrize("block", ["gpt2", "llama"])
def test_an_option_that_no_format_knows_is_refused_unless_it_has_its_default(block, monkeypatch):
    option = [("window", int | None, field(default=None))]
    Config = make_dataclass("Config", option, bases=(hybrid.GPTConfig,), frozen=True)
    monkeypatch.setattr(hybrid, "GPTConfig", Config)
    assert weights.kind_of(Config(block=block, kv_heads=4)) == block
    with pytest.raises(ValueError, match="--window 5 is no "):
        weights.kind_of(Config(block=block, kv_heads=4, window=5))


@pytest.mark.parametrize("line", WRONG.splitlines()[1:])
def test_an_error_is_one_line_and_changes_no_file(line, files, monkeypatch, capsys):
    words, message = line.split(" | ")
    monkeypatch.chdir(files)
    before = sorted(files.rglob("*"))
    assert weights.main(words.split()) == 2
    (complaint,) = capsys.readouterr().err.splitlines()
    assert complaint.startswith("weights.py: error: ") and message in complaint
    assert sorted(files.rglob("*")) == before


@pytest.mark.parametrize("words", ["--help", "import -h", "export DIR --help"])
def test_help_is_printed_wherever_it_is_asked_for(words, capsys):
    assert not weights.main(shlex.split(words))
    assert "export DIR PATH" in capsys.readouterr().out


@pytest.mark.parametrize("size", [100, 3000, 40_000])  # at the file's first write, and later ones
def test_a_full_disk_is_the_reason_given_and_leaves_no_file(size, files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    before = sorted(files.rglob("*"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    commands = ["export there OUT", "import FILE new", "export llama OUT", "import LLAMA new"]
    for words in commands:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            status = weights.main(words.split())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        (complaint,) = capsys.readouterr().err.splitlines()
        assert status == 2 and complaint.endswith("[Errno 27] File too large")  # a disk's is 28
    shutil.rmtree("new", ignore_errors=True)
    assert sorted(files.rglob("*")) == before
