"""Training data: what a file holds is read or refused, and every token is checked."""

import gzip
import io
import json
import os
import re
import shlex
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

WIDER = [("int32", GPT2, 30_000), ("int64", GPT2, 30_000), ("int64", LLAMA, 128_000)]
WIDER += [("uint32", 65536, most) for most in (3, 256, 65536, 100_000, 127_999)]


@pytest.mark.parametrize("header", [0, 4096])
@pytest.mark.parametrize("kind, vocab_size, most", WIDER)
def test_wider_integers_are_refused(kind, vocab_size, most, header, tmp_path):
    """Numbers below 128,000 in 32 bits look like pairs of tokens, of which the second is 0 or 1."""
    tokens = np.random.default_rng(shifted(1)).integers(0, most, 20_000).astype(kind)
    path = tmp_path / "x.bin"
    path.write_bytes(np.arange(header // 2, dtype=np.uint16).tobytes() + tokens.tobytes())
    with pytest.raises(ValueError) as error:
        hybrid.load_data(path, 16, vocab_size)
    needed = "uint32" if vocab_size == LLAMA else "uint16"
    assert str(error.value) == f"x.bin is of a wider type than {needed}"


@pytest.mark.parametrize("vocab_size", [GPT2, LLAMA])
def test_ordinary_tokens_are_not_taken_for_another_type(vocab_size, tmp_path):
    """They are few or many, and as seldom as words: the n-th is 1/n as frequent as the first."""
    seldom = np.random.default_rng(shifted(2)).zipf(1.2, 200_000)
    kinds = [TOKENS % most for most in (1, 3, 256, 50_000)] + [seldom[seldom < 50_000]]
    kinds += [seldom[seldom < 50_000][begin : begin + 100] for begin in range(0, 5000, 100)]
    for number, tokens in enumerate(kinds):
        tokens = tokens.astype(np.uint16 if vocab_size == GPT2 else np.uint32)
        path = tmp_path / f"{number}.bin"
        path.write_bytes(tokens.tobytes())
        np.testing.assert_array_equal(joined(hybrid.load_data(path, 4, vocab_size)), tokens)


# ---- files that are something else ---------------------------------------------------------------


def saved(save, *arguments):
    """Return what save(file, *arguments) writes."""
    file = io.BytesIO()
    save(file, *arguments)
    return file.getvalue()


def of_llmc(magic, kind):
    """Return a file of llm.c, whose header has 256 int32."""
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, len(TOKENS)
    return header.tobytes() + TOKENS.astype(kind).tobytes()


SENTENCE = "Gr\u00fc\u00dfe, \u4f60\u597d. " * 500
WRONG = {  # {name: (content, what the error says after the name)}
    "a.npy": (saved(np.save, TOKENS), "is binary, not text"),
    "a.pt": (saved(lambda file: torch.save(TOKENS, file)), "is binary"),
    "a.gz": (gzip.compress(SENTENCE.encode()), "is binary"),
    "a.jsonl": (gzip.compress(b'{"text": "x"}'), "is binary"),
    "a.txt": (SENTENCE.encode("utf-16"), "is binary"),
    "b.txt": ("To be. ".encode("utf-16-le") * 99, "is binary"),
    "b.jsonl": ('{"text": "x"}\n'.encode("utf-16"), "is binary"),
    "a.bin": (SENTENCE.encode(), "is text, so its name should not end with .bin"),
    "plain.bin": (b"All happy families are alike. " * 999, "is text"),
    "gpt2.bin": (of_llmc(20240520, np.uint16), "begins with llm.c's header"),
    "llama3.bin": (of_llmc(20240801, np.uint32), "begins with llm.c's header"),
    "odd.bin": (TOKENS.astype(np.uint16).tobytes()[:-1], ""),
    "empty.bin": (b"", ""),
    "empty.txt": (b"", ""),
    "few.txt": (b"x" * 30, "27 tokens to train on and 3 for validation are too few"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_file_of_another_kind_ends_all_ranks_with_one_line_that_names_it(name, tmp_path):
    content, told = WRONG[name]
    (tmp_path / name).write_bytes(content)
    path = tmp_path / name
    flags = f"--data {quoted(path)} --seq-len 4 --vocab-size {GPT2}"
    for status, line in run(2, _refused, flags):
        assert status == 2 and "\n" not in line and line.startswith(f"--data {path}: ")
        assert told in line


def _refused(flags):
    """Return how a run ends before its model exists: (status, sentence)."""
    args = hybrid.parse(shlex.split(flags), dist.get_world_size())
    with patch.object(hybrid, "Trainer", None), pytest.raises(hybrid.TrainingError) as error:
        hybrid.train(args, CPU)
    return error.value.status, str(error.value)


def test_tokens_of_megatron_are_refused_as_only_their_index_says_of_what_type_they_are(tmp_path):
    (tmp_path / "x.idx").touch()
    (tmp_path / "x.bin").write_bytes(TOKENS.astype(np.uint16).tobytes())
    with pytest.raises(ValueError, match="^x.bin is Megatron's: "):
        hybrid.load_data(tmp_path / "x.bin", 16, GPT2)


def test_a_folder_is_read_in_order_and_a_file_in_it_that_is_not_text_is_refused(tmp_path):
    for name, text in ("b.py", "second, " * 3), ("a", "first"), (".hidden", "no"), ("c.txt", ""):
        (tmp_path / name).write_text(text)
    (tmp_path / "latin1.txt").write_text(SENTENCE[:5], "latin1")
    (tmp_path / "sub").mkdir()
    os.mkfifo(tmp_path / "pipe")
    expected = b"first\nsecond, second, second, \n" + SENTENCE[:5].encode("latin1")
    assert bytes(joined(hybrid.load_data(tmp_path, 1))) == expected
    (tmp_path / "z.npy").write_bytes(WRONG["a.npy"][0])
    with pytest.raises(ValueError, match="^z.npy is binary"):
        hybrid.load_data(tmp_path, 1)
    with pytest.raises(ValueError, match="^there is no file or folder .*pipe"):
        hybrid.load_data(tmp_path / "pipe", 1)


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


def _read(path, flags, per_node=None, rank=None):
    """Return the digest or the error of read_data() on every rank. rank: the one that has path."""
    if dist.get_rank() == rank:
        path = path.with_name("other.bin")
    words = shlex.split(f"--seq-len 8 --data {quoted(path)} {flags}")
    try:
        _, found = hybrid.read_data(hybrid.parse(words, dist.get_world_size(), per_node))
    except hybrid.TrainingError as error:
        found = error.status, str(error)
    return hybrid.gather_objects(found)


def _digests(folder):
    """Check that a bad token is found wherever it is, and return the digests of good tokens."""
    tokens = np.arange(100, dtype=np.uint16) % 64
    path = folder / f"{dist.get_world_size()}.bin"
    for place in (0, 33, 89, 90, 99, None):
        if dist.get_rank() == 0:
            np.where(np.arange(100) == place, 64, tokens).astype(np.uint16).tofile(path)
        dist.barrier()
        found = {*_read(path, "--vocab-size 64")}
        sentence = f"--data {path}: token 64 (read as uint16) is outside --vocab-size 64"
        assert place is None or found == {(2, sentence)}
        dist.barrier()
    return found


def test_a_token_outside_the_vocabulary_is_found_anywhere_and_the_digest_depends_on_no_layout(
    tmp_path,
):
    (digest,) = {digest for size in (1, 2, 3) for found in run(size, _digests, tmp_path)
                 for digest in found}  # fmt: skip
    assert re.fullmatch("[0-9a-f]{64}", digest)


def _unlike(folder):
    """Return what ranks find of which one has other data, if each is a node or all share one."""
    if dist.get_rank() == 0:
        tokens = TOKENS.astype(np.uint16)
        tokens.tofile(folder / "own.bin")
        tokens[-1] ^= 1
        tokens.tofile(folder / "other.bin")
    dist.barrier()
    path = folder / "own.bin"
    return _read(path, "--vocab-size 65536", 1, 1), _read(path, "--vocab-size 65536", 1)


def test_nodes_whose_data_differ_in_one_token_are_refused(tmp_path):
    for unlike, alike in run(2, _unlike, tmp_path):
        assert {status for status, _ in unlike} == {2}
        has = r"has --data with digest \w+"
        sentence = rf"--data \S+: rank 1 {has}, rank 0 {has}"
        assert all(re.fullmatch(sentence, line) for _, line in unlike)
        assert len({*alike}) == 1 and isinstance(alike[0], str)


@on_ranks(2)
def test_a_run_with_a_token_outside_the_vocabulary_ends_before_its_model_exists(tmp_path):
    if dist.get_rank() == 0:
        tokens = np.arange(1000, dtype=np.uint16) % 64
        tokens.tofile(tmp_path / "train.bin")
        tokens[777] = 64
        tokens.tofile(tmp_path / "val.bin")
    dist.barrier()
    status, line = _refused(f"--seq-len 8 --vocab-size 64 --data {quoted(tmp_path)}")
    assert status == 2 and re.search("token 64 .* --vocab-size 64", line)
