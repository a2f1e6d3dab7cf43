"""Training data: each file is read for what it is or refused, and every token is checked."""

import gzip
import hashlib
import io
import json
import os
import re
import shlex
import struct
from contextlib import redirect_stdout
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hybrid
from ranks import on_ranks, quoted, run, shifted

CPU = torch.device("cpu")
TOKENS = np.random.default_rng(shifted(0)).integers(0, 50257, 20_000)
GPT2 = 50304  # a vocabulary whose tokens fit in 16 bits
LLAMA = 128256  # and one whose tokens do not


def joined(data):
    return np.concatenate([data.train, data.validation])


# ---- files of tokens -----------------------------------------------------------------------------


def saved(save, *arguments):
    """Return what save(file, *arguments) writes."""
    file = io.BytesIO()
    save(file, *arguments)
    return file.getvalue()


def index_of_megatron(code):
    """Return an .idx file that says which type the tokens have."""
    return b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, 1, 2) + bytes(100)


UNLIKE = {  # {(file's name, vocabulary): (type of the tokens, what the error calls the file)}
    ("x.bin", GPT2, "int32"): "x.bin is of int32, not uint16",
    ("x.bin", GPT2, "int64"): "x.bin is of int64, not uint16",
    ("x.bin", LLAMA, "int64"): "x.bin is of int64, not uint32",
    ("x.npy", GPT2, "int16"): "x.npy is a NumPy array, not text",
}


@pytest.mark.parametrize("file, vocab_size, kind", UNLIKE)
def test_tokens_of_another_type_are_refused_and_the_error_says_how_to_convert_them(
    file, vocab_size, kind, tmp_path, monkeypatch
):
    tokens = TOKENS % 30_000
    if vocab_size == LLAMA:
        tokens = tokens + 70_000  # no token fits in 16 bits
    tokens = tokens.astype(kind)
    path = tmp_path / file
    path.write_bytes(saved(np.save, tokens) if file.endswith("npy") else tokens.tobytes())
    check_conversion(path, vocab_size, tokens, UNLIKE[file, vocab_size, kind], monkeypatch)


def check_conversion(path, vocab_size, tokens, said, monkeypatch):
    """Check that load_data() refuses a file, and that the command in its error gives the tokens."""
    with pytest.raises(ValueError) as error:
        hybrid.load_data(path, 16, vocab_size)
    sentence, command = str(error.value).split(": ")
    assert sentence.startswith(said)
    monkeypatch.chdir(path.parent)
    eval(command, {"np": np, "FILE": path})
    found = joined(hybrid.load_data(path.parent / "train.bin", 16, vocab_size))
    np.testing.assert_array_equal(found, tokens)


@pytest.mark.parametrize("code, kind", [(4, "int32"), (8, "uint16")])
def test_tokens_of_megatron_are_told_by_their_index(code, kind, tmp_path, monkeypatch):
    (tmp_path / "x.idx").write_bytes(index_of_megatron(code))
    (tmp_path / "x.bin").write_bytes(TOKENS.astype(kind).tobytes())
    said = "x.bin is Megatron's, as it has an x.idx"
    check_conversion(tmp_path / "x.bin", GPT2, TOKENS, said, monkeypatch)


@pytest.mark.parametrize("magic, kind", [(20240520, np.uint16), (20240801, np.uint32)])
@pytest.mark.parametrize("vocab_size", [GPT2, LLAMA])
def test_the_header_of_llm_c_says_which_type_the_tokens_have_and_is_no_token(
    magic, kind, vocab_size, tmp_path
):
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, len(TOKENS)
    content = header.tobytes() + TOKENS.astype(kind).tobytes()
    path = tmp_path / "fineweb_train_000001.bin"
    path.write_bytes(content)
    np.testing.assert_array_equal(joined(hybrid.load_data(path, 16, vocab_size)), TOKENS)
    path.write_bytes(content[:-8])
    with pytest.raises(ValueError, match="000001.bin has 1999. tokens, not 20000 as its header"):
        hybrid.load_data(path, 16, vocab_size)


@pytest.mark.parametrize("vocab_size", [GPT2, LLAMA])
def test_ordinary_tokens_are_not_taken_for_another_type(vocab_size, tmp_path):
    for number, most in enumerate((3, 256, 50_000)):  # with few tokens, many words are 0
        tokens = (TOKENS % most).astype(np.uint16 if vocab_size == GPT2 else np.uint32)
        path = tmp_path / f"{number}.bin"
        path.write_bytes(tokens.tobytes())
        np.testing.assert_array_equal(joined(hybrid.load_data(path, 16, vocab_size)), tokens)


# ---- files that are not text ---------------------------------------------------------------------

SENTENCE = "Gr\u00fc\u00dfe, \u4f60\u597d. " * 500
NO_TEXT = {  # {name: (content, what the error says)}
    "a.npy": (saved(np.save, TOKENS), "a.npy is a NumPy array, not text: np.load(FILE)"),
    "a.pt": (saved(lambda file: torch.save(TOKENS, file)), "a.pt is a zip archive, as of torch"),
    "a.npz": (saved(lambda file: np.savez(file, TOKENS)), "a.npz is a zip archive"),
    "a.gz": (gzip.compress(SENTENCE.encode()), "a.gz is compressed, not text: gunzip it"),
    "a.jsonl.gz": (gzip.compress(b'{"text": "x"}'), "a.jsonl.gz is compressed"),
    "a.idx": (index_of_megatron(8), "a.idx is Megatron's index, not text"),
    "a.txt": (SENTENCE.encode("utf-16"), "a.txt is UTF-16, not text: iconv -f UTF-16 -t UTF-8"),
    "b.txt": ("To be. ".encode("utf-16-le") * 99, "b.txt is binary, not text"),
    "b.jsonl": ('{"text": "x"}\n'.encode("utf-16"), "b.jsonl is UTF-16"),
    "a.bin": (SENTENCE.encode(), "a.bin is text, not tokens: its name should not end with .bin"),
    "b.bin": (saved(np.save, TOKENS), "b.bin is a NumPy array, not tokens"),
    "model.bin": (saved(lambda file: torch.save(TOKENS, file)), "model.bin is a zip archive"),
}  # fmt: skip


def test_text_is_recognized_where_its_beginning_ends_inside_a_character(tmp_path):
    (tmp_path / "a.bin").write_bytes(SENTENCE.encode())
    for head in range(3, 9):
        with (
            patch.object(hybrid, "FIRST_BYTES", head),
            pytest.raises(ValueError, match="a.bin is text, not tokens"),
        ):
            hybrid.load_data(tmp_path / "a.bin", 4, GPT2)


@pytest.mark.parametrize("name", NO_TEXT)
def test_a_file_that_holds_neither_text_nor_tokens_is_told_by_what_it_is(name, tmp_path):
    content, sentence = NO_TEXT[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        hybrid.load_data(tmp_path / name, 4, GPT2)


def test_a_folder_names_what_it_skips_and_without_a_text_it_says_where_tokens_belong(tmp_path):
    for name in ("a.npy", "a.gz", "a.idx", "a.txt"):
        (tmp_path / name).write_bytes(NO_TEXT[name][0])
    (tmp_path / "late.txt").write_bytes(b"x" * hybrid.FIRST_BYTES + b"\0")
    (tmp_path / "sub").mkdir()
    os.mkfifo(tmp_path / "zpipe")
    with pytest.raises(ValueError, match="^no text, but a.gz, a.idx, a.npy and 4 more: .*train.b"):
        hybrid.load_data(tmp_path, 4)
    (tmp_path / "latin1.txt").write_text(SENTENCE[:5] * 99, "latin1")
    data = hybrid.load_data(tmp_path, 4)
    assert bytes(joined(data)) == (SENTENCE[:5] * 99).encode("latin1")
    assert data.skipped == ("a.gz", "a.idx", "a.npy", "a.txt", "late.txt", "sub/", "zpipe")
    line = f"--data {tmp_path}: skips a.gz, a.idx, a.npy and 4 more, not text\n"
    for printed in run(2, _printed, f"--data {quoted(tmp_path)} --seq-len 4"):
        assert printed == [line, ""]


def _printed(flags):
    """Return what each rank prints when it reads the data."""
    with redirect_stdout(io.StringIO()) as printed:
        hybrid.read_data(hybrid.parse(shlex.split(flags), dist.get_world_size()))
    return hybrid.gather_objects(printed.getvalue())


# ---- .jsonl --------------------------------------------------------------------------------------


def test_jsonl_files_are_read_as_their_texts_with_a_byte_between_them_that_utf8_never_has(tmp_path):
    texts = ["first\nline", SENTENCE[:20], "", "\u2028 no end of a line", "\x00"]
    lines = [json.dumps({"id": 1, "text": text}) for text in texts]
    lines[1] = json.dumps({"text": texts[1]}, ensure_ascii=False)
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n\n", "utf-8")
    tokens = bytes(joined(hybrid.load_data(path, 2)))
    assert [part.decode() for part in tokens.split(b"\xff")] == texts
    (tmp_path / "b.txt").write_text("plain")
    (tmp_path / "c.jsonl").write_text('{"text": "last"}')
    tokens = bytes(joined(hybrid.load_data(tmp_path, 2)))
    assert [part.decode() for part in tokens.split(b"\xff")] == [*texts, "plain", "last"]


BAD_LINES = ["{", "[]", '"text"', "{}", '{"text": 5}', '{"text": null}', '{"text": "\\ud800"}']
BAD_LINES += ["[" * 100_000, "7"]


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_of_a_jsonl_file_is_named(line, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "right"}\n\n' + line)
    with pytest.raises(ValueError, match='^a.jsonl: line 3 is no JSON object with a "text"$'):
        hybrid.load_data(tmp_path / "a.jsonl", 2)


# ---- every token ---------------------------------------------------------------------------------


def _check(data, vocab_size):
    """Return the digest, or the error, of every rank."""
    with patch.object(hybrid, "TOKENS_AT_ONCE", 7):
        try:
            found = hybrid.check_tokens(data, vocab_size, "X: ")
        except hybrid.TrainingError as error:
            found = error.status, str(error)
    return hybrid.gather_objects(found)


def _checks():
    """Check that a bad token is found wherever it is, and return the digest of good tokens."""
    tokens = np.arange(40, dtype=np.uint16)
    for place in (0, 24, 25, 39):
        bad = tokens.copy()
        bad[place] = 64
        sentence = "X: token 64 (read as uint16) is outside --vocab-size 64"
        assert {*_check(hybrid.Data(bad[:25], bad[25:]), 64)} == {(2, sentence)}
    assert {*_check(hybrid.Data(bad[:25], bad[25:]), 65)} & {(2, sentence)} == set()
    return _check(hybrid.Data(tokens[:25], tokens[25:]), 64)


def test_a_token_outside_the_vocabulary_is_found_on_any_rank_and_the_digest_is_of_all_tokens():
    parts = np.arange(25, dtype=np.uint16), np.arange(25, 40, dtype=np.uint16)
    chunks = [part[i : i + 7] for part in parts for i in range(0, len(part), 7)]
    whole = hashlib.sha256()
    for chunk in chunks:
        whole.update(hashlib.sha256(chunk.tobytes()).digest())
    for world_size in (1, 2, 3):
        for digests in run(world_size, _checks):
            assert digests == world_size * [whole.hexdigest()]


class NotCompared(np.ndarray):
    """Tokens that must not be compared with the vocabulary."""

    def max(self, *_):
        raise AssertionError


@on_ranks(1)
def test_tokens_that_cannot_be_outside_the_vocabulary_are_not_compared_with_it():
    tokens = np.arange(40, dtype=np.uint8).view(NotCompared)
    data = hybrid.Data(tokens, tokens)
    hybrid.check_tokens(data, 256, "")
    with pytest.raises(AssertionError):
        hybrid.check_tokens(data, 255, "")


@on_ranks(2)
def test_a_run_with_a_token_outside_the_vocabulary_ends_before_its_model_exists(tmp_path):
    if dist.get_rank() == 0:
        tokens = np.arange(1000, dtype=np.uint16) % 64
        tokens.tofile(tmp_path / "train.bin")
        tokens[777] = 64
        tokens.tofile(tmp_path / "val.bin")
    dist.barrier()
    args = hybrid.parse(shlex.split(f"--seq-len 8 --vocab-size 64 --data {quoted(tmp_path)}"), 2)
    with (
        pytest.raises(hybrid.TrainingError, match="token 64 .* --vocab-size 64") as error,
        patch.object(hybrid, "Trainer", None),
    ):
        hybrid.train(args, torch.device("cpu"))
    assert error.value.status == 2


@on_ranks(2)
def test_a_batch_that_no_memory_holds_is_one_error_on_all_ranks():
    args = hybrid.parse("--batch-size 2000000000 --seq-len 9999".split(), 2)
    with pytest.raises(hybrid.TrainingError, match="^--batch-size 2000000000: .*GiB") as error:
        hybrid.train(args, torch.device("cpu"))
    assert error.value.status == 2


@pytest.mark.parametrize("dp", [1, 2])
def test_a_ranks_tokens_of_a_batch_must_take_less_than_all_memory(dp, monkeypatch):
    """A rank holds its examples as windows, inputs and targets, and all starts, in int64."""
    args = hybrid.parse(f"--batch-size 6 --seq-len 9 --dp {dp}".split(), dp)
    size = 3 * 8 * (6 // dp) * (9 + 1) + 8 * 6
    memory = {"SC_PHYS_PAGES": size + 1, "SC_PAGE_SIZE": 1}
    monkeypatch.setattr(hybrid.os, "sysconf", memory.get)
    monkeypatch.setattr(hybrid, "least_weights", lambda args: 0)
    hybrid.check_memory(args, CPU)
    memory["SC_PHYS_PAGES"] = size
    with pytest.raises(ValueError, match="^--batch-size 6: a rank's tokens take 0 GiB of 0 GiB"):
        hybrid.check_memory(args, CPU)


HUGE = """a model that no memory holds
--hidden 1000000
--hidden 2147483644 --ffn 2147483647 --vocab-size 2147483647
--vocab-size 2147483647 --hidden 100000
--experts 2147483647
--experts 4 --shared-experts 2147483647
"""


@pytest.mark.parametrize("flags", HUGE.splitlines()[1:])
@on_ranks(2)
def test_a_model_that_no_memory_holds_is_one_error_on_all_ranks_which_names_its_sizes(flags):
    args = hybrid.parse(flags.split(), 2)
    with pytest.raises(hybrid.TrainingError) as error:
        hybrid.train(args, CPU)
    assert error.value.status == 2 and ": weights of 2 ranks take " in str(error.value)
    assert all(f"{name} " in str(error.value) for name in flags.split()[::2])


def test_the_weights_of_all_ranks_of_a_machine_must_take_less_than_its_memory(monkeypatch):
    args = hybrid.parse("--tp 2 --batch-size 1".split(), 2)
    size = 2 * 4 * hybrid.least_weights(args)
    memory = {"SC_PHYS_PAGES": size + 1, "SC_PAGE_SIZE": 1}
    monkeypatch.setattr(hybrid.os, "sysconf", memory.get)
    hybrid.check_memory(args, CPU)
    memory["SC_PHYS_PAGES"] = size
    with pytest.raises(ValueError, match="^--layers 4 --hidden 128 .*: weights of 2 ranks take"):
        hybrid.check_memory(args, CPU)


ALL_KINDS = "--layers 4 --hidden 16 --ffn 24 --experts 8 --shared-experts 1 --moe-every 2"


@pytest.mark.parametrize("flags", ["", "--block llama --kv-heads 2 --head tied", ALL_KINDS])
@on_ranks(1)
def test_the_weights_that_a_rank_has_at_least_are_all_matrices_if_it_is_alone(flags):
    args = hybrid.parse(flags.split(), 1)
    trainer = hybrid.Trainer(args, hybrid.make_mesh(args), CPU)
    weights = {row.name: row.tensor for row in trainer.originals() if row.tensor.dim() > 1}
    matrices = sum(weight.numel() for name, weight in weights.items() if ".wpe" not in name)
    assert hybrid.least_weights(args) == matrices
