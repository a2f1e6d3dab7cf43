"""Write the golden files beside this file with Hugging Face's transformers, in fp64.

    pip install torch==2.13.0 transformers==5.24.0 && python tests/data/golden.py

This has been run once; tests/test_weights.py reads the files. A tiny Llama and a tiny Mixtral have
a checkpoint, as save_pretrained() writes it, and numbers.npz: tokens (B, T), logits (B, T, V), and
the gradient of the mean loss for each tensor of the checkpoint, by name. All weights are bf16
numbers, so the checkpoint holds them without rounding.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

FOLDER = Path(__file__).parent
SIZES = {"vocab_size": 23, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 16, "rms_norm_eps": 1e-5}
SIZES |= {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}
SIZES |= {"bos_token_id": None, "eos_token_id": None, "attn_implementation": "eager"}
OF_LLAMA = {"hidden_size": 32, "intermediate_size": 18}
OF_MIXTRAL = {"hidden_size": 16, "intermediate_size": 10, "experts_implementation": "eager"}
OF_MIXTRAL |= {"num_local_experts": 4, "num_experts_per_tok": 2}


def saved(model, tensors, folder, **options):
    """Save tensors in place of a model's weights; return them under the names in the files."""
    model.save_pretrained(folder, state_dict=tensors, **options)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}


def write(name, model, shard_size):
    """Write a model's checkpoint and numbers."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.normal_(1.0, 0.3)
        else:
            parameter.data.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
    rounded = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
    model.load_state_dict(rounded)
    saved(model, rounded, FOLDER / name, max_shard_size=shard_size)
    tokens = torch.randint(model.config.vocab_size, (3, 12))
    logits = model(tokens).logits
    cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients = saved(model, gradients, FOLDER / "gradients")
    shutil.rmtree(FOLDER / "gradients")
    numbers = {"tokens": tokens, "logits": logits.detach()} | gradients
    np.savez(FOLDER / name / "numbers.npz", **{name: x.numpy() for name, x in numbers.items()})


if __name__ == "__main__":
    # transformers computes norms, softmaxes and angles in fp32, also in a model of fp64.
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    write("llama", LlamaForCausalLM(LlamaConfig(**SIZES, **OF_LLAMA)), "1GB")
    write("mixtral", MixtralForCausalLM(MixtralConfig(**SIZES, **OF_MIXTRAL)), "8KB")
