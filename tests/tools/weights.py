"""Convert GPT-2's weights between files of nanoGPT or Hugging Face and checkpoints of hybrid.py.

    python tests/tools/gpt2.py import FILE DIR [--heads N] [--seq-len T]
    python tests/tools/gpt2.py export DIR FILE

import converts FILE to an fp32 checkpoint of step 0 and prints the command that trains it further,
in any layout. FILE is a .safetensors file, or torch.save() has written it. Its weights are those of
nanoGPT, GPT2Model or GPT2LMHeadModel, also compiled or inside DDP, or come from export. A state
dict does not contain the number of heads: --heads defaults to hidden / 64. --seq-len drops later
positions. export writes the last checkpoint in DIR, of any layout, for nanoGPT and for
GPT2LMHeadModel's load_state_dict(torch.load(FILE), strict=False). A model with experts, or with
fewer kv-heads than heads, is no GPT-2. An error is one line, with exit status 2.
"""

import json
import re
import shutil
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support"), str(TESTS / "tools")]

import torch
import torch.distributed.checkpoint as dcp

import hybrid
from reference_gpt import reference_gpt

TRANSPOSED = "c_attn.weight", "c_proj.weight", "c_fc.weight"  # by Hugging Face's Conv1D
WTE, WPE, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"


DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_safetensors(path):
    """Return the {name: tensor} of a .safetensors file; masks, which are not floats, are left out.

    The file has the length of a header in 8 bytes, the header in JSON, and the tensors' bytes.
    """
    content = bytearray(Path(path).read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    state = {}
    for name, entry in json.loads(content[8:begin]).items():
        if name != "__metadata__" and entry["dtype"] in DTYPES:
            first, end = entry["data_offsets"]
            memory = memoryview(content)[begin + first : begin + end]
            tensor = torch.frombuffer(memory, dtype=DTYPES[entry["dtype"]])
            state[name] = tensor.view(entry["shape"])
    return state


def read(path):
    """Return a file's weights, {name: tensor} in nanoGPT's layout, and its sizes, {flag: value}."""
    if path.endswith(".safetensors"):
        file = read_safetensors(path)
    else:
        file = torch.load(path, map_location="cpu", weights_only=True)
    state = {}
    for name, value in file.get("model", file).items():
        if torch.is_tensor(value) and not name.endswith((".attn.bias", ".attn.masked_bias")):
            name = re.sub(r"^((_orig_mod|module)\.)*(transformer\.)?", "", name)
            state[name if name == HEAD else f"transformer.{name}"] = value
    rows, columns = state["transformer.h.0.attn.c_attn.weight"].shape  # never square
    turned = [name for name in state if columns > rows and name.endswith(TRANSPOSED)]
    state |= {name: state[name].t() for name in turned} | {HEAD: state.get(HEAD, state[WTE])}
    (vocab_size, hidden), ffn = state[WTE].shape, len(state["transformer.h.0.mlp.c_fc.weight"])
    heads = file.get("model_args", {}).get("n_head", max(1, hidden // 64))
    sizes = {"layers": sum(name.endswith("ln_1.weight") for name in state), "hidden": hidden}
    sizes |= {"ffn": ffn, "heads": heads, "seq_len": len(state[WPE]), "vocab_size": vocab_size}
    return state, sizes


def take(path, folder, more):
    """Write a checkpoint of step 0; return the command that resumes it. more: additional flags."""
    try:
        state, sizes = read(path)
    except Exception as error:  # a pickle may raise anything
        raise ValueError(f"not a GPT-2 that torch.save() wrote: {error!r}") from None
    typed = lambda values: " ".join(hybrid.as_typed(name, values[name]) for name in sizes)
    args = hybrid.parse([*typed(sizes).split(), *more], 1)
    weights = (model := reference_gpt(args)).state_dict()
    # A model without biases is one whose biases are zero.
    zeros = {name: 0 * weights[name] for name in weights if name.endswith("bias")}
    model.load_state_dict(zeros | state | {WPE: state[WPE][: args.seq_len]})
    if not torch.equal(weights.pop(HEAD), state[WTE].float()):  # the head shares wte's memory
        raise ValueError("its lm_head.weight is not its wte.weight")
    for there in Path(folder).glob("step_????????"):
        raise ValueError(f"{there} is there already")
    unfinished = Path(folder, "step_00000000.partial")
    try:
        dcp.save({"model": weights}, checkpoint_id=unfinished)
        digests = hybrid.digests_of([*unfinished.iterdir()])
        hybrid.write_run(unfinished, hybrid.flags_of(args) | {"sha256": digests})
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    unfinished.rename(unfinished.with_suffix(""))
    return f"hybrid.py --checkpoint {folder} {typed(vars(args))}"


def give(folder, path):
    """Write the last checkpoint's weights to a file; return a line that says so."""
    checkpoint = max(Path(folder).glob("step_????????"), default=Path(folder, "step_*"))
    try:
        args = SimpleNamespace(**json.loads((checkpoint / "run.json").read_bytes()))
        weights = reference_gpt(args).state_dict()
    except (ValueError, TypeError, AttributeError) as error:
        reason = f"does not hold the flags of a run: {error}"
        raise ValueError(f"{checkpoint}/run.json {reason}") from None
    if args.experts or args.kv_heads != args.heads:
        raise ValueError(f"--experts {args.experts} --kv-heads {args.kv_heads} is no GPT-2")
    sizes = {"n_layer": args.layers, "n_head": args.heads, "n_embd": args.hidden, "bias": True}
    sizes |= {"block_size": args.seq_len, "vocab_size": args.vocab_size, "dropout": args.dropout}
    (checkpoint / ".metadata").stat()  # an older torch's error does not name the missing file
    dcp.load({"model": {n: w for n, w in weights.items() if n != HEAD}}, checkpoint_id=checkpoint)
    flat = {n: w.t() if n.endswith(TRANSPOSED) else w for n, w in weights.items()}
    write(flat | {"model": weights, "model_args": sizes}, path)
    return f"{path} is {checkpoint}"


def write(file, path):
    """Let torch.save() write a file. If that fails, leave nothing behind."""
    part = Path(f"{path}.part")
    try:
        with part.open("wb") as stream:
            torch.save(file, stream)
        part.replace(path)
    except BaseException:
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
        match argv:
            case ["import", path, folder, *more]:
                return print(take(path, folder, more))
            case ["export", folder, path]:
                return print(give(folder, path))
            case ["--help" | "-h"]:
                return print(__doc__)
        raise ValueError("import FILE DIR [--heads N] [--seq-len T], or export DIR FILE")
    except (OSError, ValueError, RuntimeError, dcp.api.CheckpointException) as error:
        cause = getattr(error, "failures", {0: [error]})[0][0]
        parts = "gpt2.py: error", " ".join(argv[1:3]), str(reason_of(cause))
        text = ": ".join(filter(None, parts))
        print(" ".join(text.split())[:400], file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
