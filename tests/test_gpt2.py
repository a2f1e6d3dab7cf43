"""gpt2.py: files of nanoGPT and Hugging Face become checkpoints that train on, and the reverse."""

import io
import os
import resource
from functools import partial

import pytest
import torch
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
LAYOUTS = [
    (1, ""),
    (2, "--tp 2 --sp"),
    (2, "--pp 2 --microbatches 2 --zero 1"),
    (3, "--dp 3 --batch-size 15 --zero 3"),
    (4, "--cp 2 --pp 2 --schedule dualpipe --microbatches 4"),
    pytest.param(8, "--tp 2 --pp 2 --dp 2 --microbatches 2", marks=pytest.mark.soak),
]


class Conv1D(nn.Module):
    """Hugging Face's linear layer: its weight is (in, out)."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = nn.Parameter(linear.weight.detach().t().clone()), linear.bias

    def forward(self, x):
        return x @ self.weight + self.bias


def nanogpt(seq_len=T, seed=0):
    """nanoGPT's layout of a GPT, with random values that no two parameters share."""
    torch.manual_seed(seed)
    model = ReferenceGPT(LAYERS, HIDDEN, HEADS, seq_len, V)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.1, 0.3)
    return model


def hugging_face(**options):
    """The same GPT in Hugging Face's layout."""
    model = nanogpt(**options)
    for layer in model.transformer.h:
        for module in (layer.attn, layer.mlp):
            for name, linear in list(module.named_children()):
                setattr(module, name, Conv1D(linear))
    return model


def compiled(state):
    return {f"_orig_mod.{name}": value for name, value in state.items()}


def of_hugging_face(prefix):
    """Its files may have no head, and have the masks of older versions."""
    state = hugging_face().state_dict()
    state |= {"transformer.h.0.attn.bias": torch.ones(1, 1, T, T)}
    state |= {"transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}
    del state["lm_head.weight"]
    return {prefix + name.removeprefix("transformer."): value for name, value in state.items()}


FILES = {  # what nanoGPT and Hugging Face write
    "nanoGPT": lambda: {
        "model": nanogpt().state_dict(), "model_args": ARGUMENTS, "iter_num": 3, "config": {"a": 1}
    },
    "nanoGPT, compiled": lambda: {"model": compiled(nanogpt().state_dict())},
    "a state dict of nanoGPT": lambda: nanogpt().state_dict(),
    "GPT2LMHeadModel": lambda: of_hugging_face("transformer."),
    "GPT2Model": lambda: of_hugging_face(""),
}


def logits_of(flags, folder, tokens):
    """Of what hybrid.py, one process, goes on from."""
    trainer = make_trainer(flags, folder)
    trainer.chunks[0].eval()
    with torch.no_grad():
        return trainer.chunks[0](tokens).transpose(0, 1)


def make_trainer(flags, folder):
    args = hybrid.parse(f"{FLAGS} {flags}".split(), torch.distributed.get_world_size())
    trainer = hybrid.Trainer(args, hybrid.make_mesh(args), torch.device("cpu"))
    hybrid.load(trainer, hybrid.latest(folder))
    return trainer


@pytest.mark.parametrize("name", FILES)
@on_ranks(1)
def test_a_file_of_nanogpt_or_hugging_face_gives_the_same_logits_here(name, tmp_path, capsys=None):
    tokens, model = torch.randint(V, (3, T)), nanogpt()
    old = name == "GPT2Model"  # as OpenAI's weights are stored
    torch.save(FILES[name](), tmp_path / "it", _use_new_zipfile_serialization=not old)
    heads = [] if name == "nanoGPT" else ["--heads", str(HEADS)]
    assert gpt2.main(["import", str(tmp_path / "it"), str(tmp_path / "folder"), *heads]) == 0
    found = logits_of("", tmp_path / "folder", tokens)
    torch.testing.assert_close(found, model(tokens), rtol=1e-5, atol=1e-5)
