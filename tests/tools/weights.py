"""Convert weights between files of nanoGPT or Hugging Face and checkpoints of hybrid.py.

    python tests/tools/weights.py import PATH DIR [flags of hybrid.py]
    python tests/tools/weights.py export DIR PATH

import converts PATH to an fp32 checkpoint of step 0 and prints the command that trains it further,
in any layout. PATH is one of these:

    a folder   that Hugging Face's save_pretrained() has written for a GPT-2, Llama or Mixtral: its
               config.json decides, and the weights are in .safetensors files
    a file     of a GPT-2 that torch.save() has written, or a .safetensors file. Its weights are
               those of nanoGPT, GPT2Model or GPT2LMHeadModel, also compiled or inside DDP, or come
               from export. It does not contain the number of heads, so --heads defaults to
               hidden / 64

--seq-len drops later positions of a GPT-2, and sets the length of training sequences in any case.

export converts the last checkpoint in DIR, of any layout. For --block llama, PATH becomes such a
folder, of a Llama or Mixtral, for from_pretrained(PATH). For a GPT-2, PATH becomes a file for
nanoGPT and for GPT2LMHeadModel's load_state_dict(torch.load(PATH), strict=False).

What a format cannot hold is refused by name: Llama 3.1's rope_scaling, for example, or, in a GPT-2,
experts or fewer kv-heads than heads. An error is one line, with exit status 2.
"""

import json
import mmap
import re
import shlex
import shutil
import sys
import warnings
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support"), str(TESTS / "tools")]

import torch
import torch.distributed.checkpoint as dcp

import hybrid
from progress import progress
from reference_gpt import reference_gpt

USAGE = "import PATH DIR [flags of hybrid.py], or export DIR PATH"
WTE, WPE, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"

# ---- safetensors ---------------------------------------------------------------------------------
#
# A .safetensors file has the length of a header in 8 bytes, the header in JSON, and the tensors'
# bytes. The header is {name: {"dtype", "shape", "data_offsets": [begin, end]}}.

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_safetensors(path):
    """Return the {name: tensor} of a file's floats, which stay on the disk until they are used.

    Masks are left out, as they are no floats. Raises ValueError if the file is damaged.
    """
    state = {}
    with open(path, "rb") as stream:
        try:
            content = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY))
            begin = 8 + int.from_bytes(content[:8], "little")
            for name, entry in json.loads(bytes(content[8:begin])).items():
                if name != "__metadata__" and entry["dtype"] in DTYPES:
                    first, end = entry["data_offsets"]
                    memory = content[begin + first : begin + end]
                    tensor = torch.frombuffer(memory, dtype=DTYPES[entry["dtype"]])
                    state[name] = tensor.view(entry["shape"])
        except Exception as error:  # a damaged file may raise anything
            reason = f"{type(error).__name__}: {error}"  # a repr may quote the whole file
            raise ValueError(f"{path} is not a safetensors file: {reason}") from None
    return state


def write_safetensors(state, path):
    """Write {name: fp32 tensor} to a file."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in state.items():
        begin, end = end, end + 4 * tensor.numel()
        shape = list(tensor.shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    with open(path, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in state.values():
            stream.write(tensor.contiguous().numpy().data)


def read_folder(folder):
    """Return the {name: tensor} of a folder's safetensors files. An index lists several files."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_safetensors(folder / "model.safetensors")
    places = read_json(index).get("weight_map", {})
    files = {name: read_safetensors(folder / name) for name in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in files[file]:
            raise ValueError(f"{folder / file} lacks {name}, which is in the index")
    return {name: files[file][name] for name, file in places.items()}


def read_json(path):
    """Return the object in a JSON file."""
    content = path.read_bytes()
    try:
        return dict(json.loads(content))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not an object in JSON: {error}") from None


# ---- config.json ---------------------------------------------------------------------------------

NAMES = {"gpt2": "GPT-2", "llama": "Llama", "mixtral": "Mixtral"}  # {model_type: name}
OF_GPT2 = {
    "layers": "n_layer", "hidden": "n_embd", "ffn": "n_inner", "heads": "n_head",
    "seq_len": "n_positions", "vocab_size": "vocab_size",
}  # fmt: skip
OF_LLAMA = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "ffn": "intermediate_size",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "seq_len": "max_position_embeddings", "vocab_size": "vocab_size",
}  # fmt: skip
OF_MIXTRAL = OF_LLAMA | {"experts": "num_local_experts", "top_k": "num_experts_per_tok"}
KEYS = {"gpt2": OF_GPT2, "llama": OF_LLAMA, "mixtral": OF_MIXTRAL}  # {flag: key of config.json}
OF_RUN = "dropout", "sp", "recompute", "recompute_layers", "topk_nodes"  # each run chooses them
BY_VALUE = "block", "head", "rope_theta", "kv_heads", "balance"  # see kind_of() and config_of()

# HELD: the only values with which hybrid.py computes. UNSAID: what a missing key means.
HELD = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
HELD |= {"sliding_window": None, "quantization_config": None}
HELD_BY_GPT2 = {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
HELD_BY_GPT2 |= {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
HELD_BY_GPT2 |= {"quantization_config": None}
UNSAID = {
    "gpt2": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
    "mixtral": {"tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
    | {"num_key_value_heads": 8},
}


def flags_of_config(config):
    """Return {flag: value} of the model that a config.json describes.

    Raises ValueError, which names the key and its value, if hybrid.py has no such model.
    """
    kind = config.get("model_type")
    if kind not in NAMES:
        raise ValueError(f"model_type {json.dumps(kind)} is none of {', '.join(NAMES)}")
    config = UNSAID[kind] | config
    flags = {}
    for name, key in KEYS[kind].items():
        value = config.get(key)
        if value is None and name in ("ffn", "kv_heads"):
            continue  # the default is that of hybrid.py
        if type(value) is not int or value < 1:
            raise ValueError(f"{key} {json.dumps(value)} is not a size")
        flags[name] = value
    for key, value in (HELD_BY_GPT2 if kind == "gpt2" else HELD).items():
        require(config, key, value)
    flags["head"] = "tied" if config["tie_word_embeddings"] else "untied"
    if kind == "gpt2":
        return flags
    if config.get("head_dim") is not None:
        require(config, "head_dim", flags["hidden"] / flags["heads"])
    return {"block": "llama"} | flags | {"rope_theta": rope_theta_of(config)}


def require(config, key, held):
    """Raise ValueError if a key has another value than `held`, with which hybrid.py computes."""
    value = config.get(key, held)
    if value != held:
        raise ValueError(f"{key} {json.dumps(value)} is not {json.dumps(held)}")


def rope_theta_of(config):
    """Return the base of the rotation's angles, which newer files have in rope_parameters."""
    theta = config["rope_theta"]
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key) or {}
        kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else rope
        if kind not in (None, "default"):
            raise ValueError(f'{key} {json.dumps(rope)} is not null or of the type "default"')
        theta = rope.get("rope_theta", theta)
    return theta


def config_of(args, kind):
    """Return the config.json of a Llama or Mixtral."""
    config = {"model_type": kind, "architectures": [f"{NAMES[kind]}ForCausalLM"]}
    config |= {key: getattr(args, name) for name, key in KEYS[kind].items()}
    config |= {key: value for key, value in HELD.items() if value is not None}
    config |= {"rope_theta": args.rope_theta, "tie_word_embeddings": args.is_tied}
    return config | {"bos_token_id": None, "eos_token_id": None, "torch_dtype": "float32"}


def kind_of(args):
    """Return the model_type of a model; raise ValueError if Hugging Face has none for it."""
    kind = "mixtral" if args.is_llama and args.experts else args.block
    wrong = {  # {flag: whether the format cannot hold its value}
        field.name: getattr(args, field.name) != field.default
        for field in fields(hybrid.GPTConfig)
        if field.name not in {*KEYS[kind], *OF_RUN, *BY_VALUE}
    }
    if kind == "gpt2":
        wrong["kv_heads"] = args.kv_heads != args.heads
        wrong["head"] = not args.is_tied
    if kind == "mixtral":
        wrong["balance"] = args.balance == "bias"
        wrong["top_k"] = args.top_k == 1  # Mixtral's one expert would have the weight 1
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(f"{hybrid.as_typed(name, getattr(args, name))} is no {NAMES[kind]}")
    return kind


# ---- names ---------------------------------------------------------------------------------------


def empty_weights(args):
    """Return {name: fp32 tensor} of a checkpoint's model: biases are 0, and others are not set."""
    with torch.device("meta"):
        model = reference_gpt(args)
    weights = {name: torch.empty(p.shape) for name, p in model.named_parameters()}
    for name, weight in weights.items():
        if name.endswith("bias"):
            weight.zero_()
    routers = {name.replace("bias", "router.bias"): bias for name, bias in model.named_buffers()}
    return weights | {name: torch.zeros(bias.shape) for name, bias in routers.items()}


def in_hugging_face(weights, args):
    """Return {name in a Llama's or Mixtral's files: view of a part of `weights`}.

    Hugging Face stores q, k and v, and gate and up, as matrices of their own. Its rotation pairs
    elements as that of hybrid.py does, so no rows change places.
    """
    views = {"model.embed_tokens.weight": weights[WTE]}
    views["model.norm.weight"] = weights["transformer.ln_f.weight"]
    if not args.is_tied:
        views[HEAD] = weights[HEAD]
    width = args.hidden // args.heads
    rows = [args.heads * width, args.kv_heads * width, args.kv_heads * width]
    for layer in range(args.layers):
        own, theirs = f"transformer.h.{layer}.", f"model.layers.{layer}."
        views[f"{theirs}input_layernorm.weight"] = weights[f"{own}ln_1.weight"]
        views[f"{theirs}post_attention_layernorm.weight"] = weights[f"{own}ln_2.weight"]
        for letter, part in zip("qkv", weights[f"{own}attn.c_attn.weight"].split(rows)):
            views[f"{theirs}self_attn.{letter}_proj.weight"] = part
        views[f"{theirs}self_attn.o_proj.weight"] = weights[f"{own}attn.c_proj.weight"]
        if args.experts:
            views[f"{theirs}block_sparse_moe.gate.weight"] = weights[f"{own}mlp.router.weight"]
            w_in, w_out = weights[f"{own}mlp.experts.w_in"], weights[f"{own}mlp.experts.w_out"]
            for expert in range(args.experts):
                gate, up = w_in[expert].chunk(2)
                parts = {"w1": gate, "w3": up, "w2": w_out[expert]}
                for name, part in parts.items():
                    views[f"{theirs}block_sparse_moe.experts.{expert}.{name}.weight"] = part
        else:
            gate, up = weights[f"{own}mlp.c_fc.weight"].chunk(2)
            views[f"{theirs}mlp.gate_proj.weight"] = gate
            views[f"{theirs}mlp.up_proj.weight"] = up
            views[f"{theirs}mlp.down_proj.weight"] = weights[f"{own}mlp.c_proj.weight"]
    return views


TRANSPOSED = "c_attn.weight", "c_proj.weight", "c_fc.weight"  # by Hugging Face's Conv1D


def in_nanogpt(state):
    """Return the weights in a GPT-2's file, {name: tensor}, with nanoGPT's names and layout."""
    found = {}
    for name, value in state.items():
        if torch.is_tensor(value) and not name.endswith((".attn.bias", ".attn.masked_bias")):
            name = re.sub(r"^((_orig_mod|module)\.)*(transformer\.)?", "", name)
            found[name if name == HEAD else f"transformer.{name}"] = value
    rows, columns = found["transformer.h.0.attn.c_attn.weight"].shape  # never square
    turned = [name for name in found if columns > rows and name.endswith(TRANSPOSED)]
    return found | {name: found[name].t() for name in turned}


def flags_of_weights(state, arguments):
    """Return {flag: value} of a GPT-2 in nanoGPT's layout. arguments: its model_args, or {}."""
    (vocab_size, hidden), ffn = state[WTE].shape, len(state["transformer.h.0.mlp.c_fc.weight"])
    heads = arguments.get("n_head", max(1, hidden // 64))
    flags = {"layers": sum(name.endswith("ln_1.weight") for name in state), "hidden": hidden}
    return flags | {
        "ffn": ffn, "heads": heads, "seq_len": len(state[WPE]), "vocab_size": vocab_size
    }  # fmt: skip


def fill(views, state):
    """Copy a file's tensors to the views of the same names; raise ValueError if they do not fit."""
    for name in sorted(views.keys() - state.keys()):
        raise ValueError(f"{name} is missing")
    for name in sorted(state.keys() - views.keys()):
        raise ValueError(f"{name} has no place in the model")
    for name, view in views.items():
        if view.shape != state[name].shape:
            shapes = f"{tuple(state[name].shape)}, and not {tuple(view.shape)}"
            raise ValueError(f"the shape of {name} is {shapes}")
        view.copy_(state[name])


# ---- import and export ---------------------------------------------------------------------------


def read(path):
    """Return the weights in a file or folder, {name: tensor}, and the flags of their model.

    A GPT-2's weights have the names of nanoGPT, and those of a Llama the names of Hugging Face.
    """
    try:
        if path.is_dir():
            flags = flags_of_config(read_json(path / "config.json"))
            state = read_folder(path)
            if "block" in flags:
                return {n: x for n, x in state.items() if not n.endswith("inv_freq")}, flags
            return in_nanogpt(state), flags
        if path.suffix == ".safetensors":
            file = read_safetensors(path)
        else:
            file = torch.load(path, map_location="cpu", weights_only=True)
        state = file.get("model", file)
        if "model.embed_tokens.weight" in state:
            raise ValueError("a Llama's sizes are in its config.json, so import the whole folder")
        state = in_nanogpt(state)
        return state, flags_of_weights(state, file.get("model_args", {}))
    except (OSError, ValueError):
        raise
    except Exception as error:  # a pickle may raise anything
        raise ValueError(f"not the weights of a GPT-2 or Llama: {error!r}") from None


def weights_of(state, args):
    """Return the weights of a checkpoint, {name: tensor}, which are those that read() returns."""
    weights = empty_weights(args)
    head = state.pop(HEAD, None) if args.is_tied else None
    if args.block == "llama":
        kind_of(args)
        fill(in_hugging_face(weights, args), state)
    else:
        biases = {name: x for name, x in weights.items() if name.endswith("bias")}
        state = biases | state  # a model without biases is one whose biases are zero
        positions = {WPE: state[WPE][: args.seq_len]} if WPE in state else {}
        fill(weights, state | positions)
    if head is not None and not torch.equal(head.float(), weights[WTE]):
        raise ValueError(f"{HEAD} is not the embedding's weight, so it needs --head untied")
    return weights


def take(path, folder, more):
    """Write a checkpoint of step 0; return the command that resumes it. more: additional flags."""
    state, flags = read(path)
    typed = vars(hybrid.Parser().parse_args(more))
    block = {"block": flags.get("block", "gpt2")}
    decided = flags | block if path.is_dir() else block
    for name in decided.keys() & typed.keys() - {"seq_len"}:
        if typed[name] != decided[name]:
            shown = hybrid.as_typed(name, typed[name])
            raise ValueError(f"{shown} differs from the file's, {decided[name]}")
    words = " ".join(hybrid.as_typed(name, value) for name, value in flags.items()).split()
    args = hybrid.parse([*words, *more], 1)
    weights = weights_of(state, args)
    for there in folder.glob("step_????????"):
        raise ValueError(f"{there} is there already")
    with unfinished(folder / "step_00000000") as part:
        dcp.save({"model": weights}, checkpoint_id=part)
        run = hybrid.flags_of(args) | {"step": 0}
        hybrid.write_run(part, run, hybrid.digests_of([*part.iterdir()]))
    words = ["hybrid.py", "--checkpoint", str(folder)]
    for name in flags | typed:
        words += hybrid.as_typed(name, getattr(args, name)).split(" ", 1)
    return shlex.join(words)


def give(folder, path):
    """Write the last checkpoint's weights to a file or folder; return a line that says so."""
    checkpoint = max(folder.glob("step_????????"), default=folder / "step_*")
    run = hybrid.read_run(checkpoint)
    flags = {field.name for field in fields(hybrid.GPTConfig)} & run.keys()
    args = hybrid.GPTConfig(**{name: run[name] for name in flags})
    kind = kind_of(args)
    weights = empty_weights(args)
    dcp.load({"model": weights}, checkpoint_id=checkpoint)
    if kind == "gpt2":
        write_gpt2(weights, args, path)
    else:
        write_folder(in_hugging_face(weights, args), config_of(args, kind), path)
    return f"{path} is {checkpoint}"


def write_gpt2(weights, args, path):
    """Write a file for nanoGPT and Hugging Face."""
    if path.suffix == ".safetensors":
        raise ValueError("a GPT-2 is exported to a file of torch.save(), which has its n_head")
    sizes = {"n_layer": args.layers, "n_head": args.heads, "n_embd": args.hidden, "bias": True}
    sizes |= {"block_size": args.seq_len, "vocab_size": args.vocab_size, "dropout": args.dropout}
    weights = weights | {HEAD: weights[WTE]}
    flat = {n: w.t() if n.endswith(TRANSPOSED) else w for n, w in weights.items()}
    with unfinished(path) as part, part.open("wb") as stream:
        torch.save(flat | {"model": weights, "model_args": sizes}, stream)


def write_folder(state, config, path):
    """Write a folder for from_pretrained()."""
    if path.suffix in (".pt", ".bin", ".safetensors"):
        raise ValueError(f"a {NAMES[config['model_type']]} is exported to a folder")
    if path.exists():
        raise ValueError(f"{path} is there already")
    with unfinished(path) as part:
        part.mkdir()
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        write_safetensors(state, part / "model.safetensors")


@contextmanager
def unfinished(path):
    """Yield another path, which becomes this one when all is written, or is deleted on an error."""
    part = Path(f"{path}.partial")
    try:
        yield part
        part.replace(path)
    except BaseException:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        part.unlink(missing_ok=True)
        raise


def reason_of(error):
    """Return the OSError, such as a full disk, that caused torch.save() to raise this error."""
    origin = error.__context__
    return origin if isinstance(error, RuntimeError) and isinstance(origin, OSError) else error


def main(argv):
    """Run the command; return the exit status, or None for 0."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    try:
        if "" in argv:
            raise ValueError("a word is empty (is a shell variable not set?)")
        if "--help" in argv or "-h" in argv:
            return print(__doc__)
        match argv:
            case ["import", path, folder, *more]:
                with progress(f"imports {path}"):
                    return print(take(Path(path), Path(folder), more))
            case ["export", folder, path]:
                with progress(f"exports {folder}"):
                    return print(give(Path(folder), Path(path)))
        raise ValueError(USAGE)
    except (OSError, ValueError, RuntimeError, dcp.api.CheckpointException) as error:
        cause = getattr(error, "failures", {0: [error]})[0][0]
        parts = "weights.py: error", " ".join(argv[1:3]), str(reason_of(cause))
        text = ": ".join(filter(None, parts))
        print(" ".join(text.split())[:400], file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
