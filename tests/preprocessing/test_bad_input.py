"""A table of things that go wrong: exit code, what the message names, and its cure.

Each case runs the command (its worker is a real process). No message may be a traceback, and
nothing may be left behind.
"""

import gzip
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.preprocessing.corpora import (
    read_texts,
    run_here,
    run_preprocess,
    run_tool,
    write_jsonl,
    write_parquet,
)

Arguments = list[str]
BYTES = ["--tokenizer-type", "ByteTokenizer"]


def _file(folder: Path, name: str, data: bytes) -> str:
    path = folder / name
    path.write_bytes(data)
    return str(path)


def _good(folder: Path) -> str:
    return str(write_jsonl(folder / "good.jsonl", ["one", "two"]))


def _parquet(folder: Path, column: pa.Array) -> str:
    return str(write_parquet(folder / "p.parquet", column, 10))


def _cut_parquet(folder: Path) -> str:
    whole = Path(_parquet(folder, pa.array(["x"] * 100))).read_bytes()
    return _file(folder, "cut.parquet", whole[:-20])


def _damaged_parquet(folder: Path) -> str:
    texts = pa.array([f"{i}" * 50 for i in range(500)])
    whole = bytearray(Path(_parquet(folder, texts)).read_bytes())
    for place in range(4, len(whole) // 2):
        whole[place] ^= 0xFF
    return _file(folder, "damaged.parquet", bytes(whole))


def _empty_folder(folder: Path) -> str:
    (folder / "empty").mkdir()
    return str(folder / "empty")


def _tar(folder: Path) -> str:
    text = _file(folder, "plain.txt", b"nothing but text")
    with tarfile.open(folder / "a.tar", "w") as archive:
        archive.add(text, "plain.txt")
    return str(folder / "a.tar")


def _twin_columns(folder: Path) -> str:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, folder / "twins.parquet")
    return str(folder / "twins.parquet")


def _broken_dataset(folder: Path) -> str:
    (folder / "ds").mkdir()
    (folder / "ds" / "state.json").write_text("{")
    return str(folder / "ds")


def _unwritable(folder: Path) -> str:
    _file(folder, "file", b"")
    return str(folder / "file" / "prefix")


CASES: dict[str, tuple[Callable[[Path], Arguments], int, str]] = {
    "no such file": (lambda f: ["--input", f"{f}/no.jsonl"], 1, "no.jsonl: no such file or folder"),
    "pattern without match": (lambda f: ["--input", f"{f}/*.gz"], 1, "pattern matches nothing"),
    "empty folder": (lambda f: ["--input", _empty_folder(f)], 1, "the folder has no files"),
    "empty file": (lambda f: ["--input", _file(f, "a.jsonl", b"")], 1, "no document is left"),
    "only blank": (
        lambda f: ["--input", _file(f, "a.jsonl", b"\n \n\n")],
        1,
        "skipped: 3 blank line",
    ),
    "truncated JSON": (
        lambda f: ["--input", _file(f, "a.jsonl", b'{"text": "x"}\n{"text": "y\n{"text": "z"}\n')],
        1,
        "a.jsonl:2: invalid JSON: .*--skip-bad-lines",
    ),
    "half-written last line": (
        lambda f: ["--input", _file(f, "a.jsonl", b'{"text": "x"}\n{"te')],
        1,
        "a.jsonl:2: invalid JSON: .*half written",
    ),
    "missing key": (
        lambda f: ["--input", _file(f, "a.jsonl", b'{"content": "x"}\n')],
        1,
        r"a.jsonl:1: missing key: no key 'text' \(there: 'content'\); see --json-keys",
    ),
    "null": (lambda f: ["--input", _file(f, "a.jsonl", b'{"text": null}')], 1, ":1: null: 'text'"),
    "number": (
        lambda f: ["--input", _file(f, "a.jsonl", b'{"text": 1.5}')],
        1,
        ":1: not text: 'text' is a JSON number, not a string",
    ),
    "array": (
        lambda f: ["--input", _file(f, "a.jsonl", b'[{"text": "x"}]')],
        1,
        ":1: not a JSON object: it is a JSON array",
    ),
    "many lines": (
        lambda f: ["--input", _file(f, "a.json", b'{\n  "text": "x"\n}\n')],
        1,
        ":1: invalid JSON: .*one object a line: jq -c",
    ),
    "deep": (
        lambda f: ["--input", _file(f, "a.jsonl", b"[" * 200_000)],
        1,
        ":1: invalid JSON: nested too deeply",
    ),
    "long number": (
        lambda f: ["--input", _file(f, "a.jsonl", b'{"n": ' + b"9" * 5000 + b', "text": "x"}')],
        1,
        ":1: invalid JSON: Exceeds the limit",
    ),
    "latin-1": (
        lambda f: ["--input", _file(f, "a.jsonl", '{"text": "caf\u00e9"}'.encode("latin-1"))],
        1,
        ":1: not UTF-8: byte 13 of the line is 0xe9",
    ),
    "UTF-16 jsonl": (
        lambda f: ["--input", _file(f, "a.jsonl", '{"text": "x"}\n'.encode("utf-16"))],
        1,
        ":1: not UTF-8: .*UTF-16 byte order mark; convert it: iconv",
    ),
    "UTF-16 text": (
        lambda f: ["--input", _file(f, "a.txt", "hello".encode("utf-16"))],
        1,
        "a.txt: not UTF-8: .*iconv",
    ),
    "binary": (
        lambda f: ["--input", _file(f, "image", b"abc\x89PNG\r\n")],
        1,
        "image: not UTF-8: byte 3 is 0x89",
    ),
    "not gzip": (
        lambda f: ["--input", _file(f, "a.jsonl.gz", b'{"text": "x"}')],
        1,
        "a.jsonl.gz: damaged",
    ),
    "cut gzip": (
        lambda f: ["--input", _file(f, "a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99)[:-9])],
        1,
        "a.jsonl.gz: cut short",
    ),
    "not zstd": (
        lambda f: ["--input", _file(f, "a.jsonl.zst", b"plain text here")],
        1,
        "a.jsonl.zst: damaged",
    ),
    "tar of texts": (
        lambda f: ["--input", _tar(f)],
        1,
        "--input .*a.tar: an archive; unpack it and give the folder",
    ),
    "compressed tar": (
        lambda f: ["--input", _file(f, "a.TAR.gz", gzip.compress(Path(_tar(f)).read_bytes()))],
        1,
        "a.TAR.gz: an archive",
    ),
    "bzip2, skipping bad lines": (
        lambda f: ["--input", _good(f), _file(f, "a.jsonl.bz2", b"BZh9"), "--skip-bad-lines"],
        1,
        "a.jsonl.bz2: a compression that isn't read; .* as .gz or .zst",
    ),
    "two columns of one name": (
        lambda f: ["--input", _twin_columns(f)],
        1,
        "twins.parquet: 2 columns are called 'text'; keep or rename one",
    ),
    "cut parquet": (lambda f: ["--input", _cut_parquet(f)], 1, "cut.parquet: not a whole parquet"),
    "damaged parquet": (lambda f: ["--input", _damaged_parquet(f)], 1, "damaged.parquet: row"),
    "no column": (
        lambda f: ["--input", _parquet(f, pa.array(["x"])), "--json-keys", "body"],
        1,
        "no column 'body' .there: 'n', 'text'.; see --json-keys",
    ),
    "numbers in a column": (
        lambda f: ["--input", _parquet(f, pa.array([1, 2]))],
        1,
        "column 'text' is int64, not strings",
    ),
    "null in a column": (
        lambda f: ["--input", _parquet(f, pa.array(["x", None, "y"]))],
        1,
        r"p.parquet: row 1 \(counted from 0\): null: 'text' is null",
    ),
    "broken dataset folder": (lambda f: ["--input", _broken_dataset(f)], 1, "can't load it"),
    "texts beside data": (
        lambda f: ["--input", str(Path(_good(f)).parent), _file(f, "README.md", b"read me")],
        1,
        r"holds data files \(.*good.jsonl\) and others \(.*README.md\); say what to read with a "
        r"pattern: --input '.*jsonl'",
    ),
    "pipe": (lambda f: ["--input", "/dev/null"], 1, "/dev/null: not a regular file"),
    "left over": (lambda f: ["--input", _file(f, "a.bin.partial", b"x")], 1, "not raw text"),
    "token files": (lambda f: ["--input", _file(f, "a.bin", b"x")], 1, "a.bin: not raw text"),
    "text with two keys": (
        lambda f: ["--input", _file(f, "a.txt", b"x"), "--json-keys", "a", "b"],
        1,
        "a text file has one text, but --json-keys names 2",
    ),
    "key twice": (
        lambda f: ["--input", _good(f), "--json-keys", "text", "text"],
        1,
        "--json-keys text text: each key once",
    ),
    "key with a slash": (
        lambda f: ["--input", _good(f), "--json-keys", "a/b"],
        1,
        "--json-keys 'a/b' can't be part of a file name",
    ),
    "prefix is a folder": (
        lambda f: ["--input", _good(f), "--output-prefix", f"{f}/out/"],
        1,
        "ends in a folder; add a name: .*out/corpus",
    ),
    "folder can't be made": (
        lambda f: ["--input", _good(f), "--output-prefix", _unwritable(f)],
        1,
        "--output-prefix .*File exists|Not a directory",
    ),
    "no workers": (lambda f: ["--input", _good(f), "--workers", "-1"], 1, "--workers -1 must"),
    "shard outside": (
        lambda f: ["--input", _good(f), "--shard-index", "4", "--num-shards", "4"],
        1,
        r"--shard-index 4 must be in 0..3 \(--num-shards 4\)",
    ),
    "no shards": (lambda f: ["--input", _good(f), "--num-shards", "0"], 1, "--num-shards 0 must"),
    "no tokenizer file": (
        lambda f: ["--input", _good(f), "--tokenizer-type", "SentencePieceTokenizer"],
        1,
        "needs --tokenizer-model FILE",
    ),
    "wrong tokenizer file": (
        lambda f: [
            "--input", _good(f), "--tokenizer-type", "HuggingFaceTokenizer",
            "--tokenizer-model", _good(f),
        ],
        1,
        "good.jsonl is not a tokenizer.json",
    ),
    "null tokenizer without size": (
        lambda f: ["--input", _good(f), "--tokenizer-type", "NullTokenizer"],
        1,
        "NullTokenizer needs --vocab-size",
    ),
    "null tokenizer with text": (
        lambda f: ["--input", _good(f), "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"],
        1,
        "good.jsonl:1: refused by the tokenizer: 'one' is not a token id",
    ),
    "end of document that isn't": (
        lambda f: [
            "--input", _good(f), "--tokenizer-type", "NullTokenizer", "--vocab-size", "9",
            "--append-eod",
        ],
        1,
        "--append-eod: NullTokenizer.9. has no end-of-document token",
    ),
    "unknown flag": (lambda f: ["--inputs", _good(f), "--input", "x"], 2, "did you mean --input?"),
    "unknown tokenizer": (
        lambda f: ["--input", _good(f), "--tokenizer-type", "GPT2BPETokenizer"],
        2,
        "invalid choice: 'GPT2BPETokenizer'",
    ),
    "no input": (lambda f: [], 2, "required: --input"),
    "partitions": (
        lambda f: ["--input", _good(f), "--partitions", "4"],
        2,
        "--partitions is not supported: use --shard-index and --num-shards",
    ),
    "sentences": (
        lambda f: ["--input", _good(f), "--split-sentences"],
        2,
        "--split-sentences is not supported",
    ),
    "abbreviated flag": (lambda f: ["--input", _good(f), "--append"], 2, "unknown --append"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_bad_input(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, code, message = CASES[name]
    arguments = make(tmp_path)
    output = tmp_path / "out"
    given = ["--output-prefix", str(output / "o")]
    flags = (*given, *BYTES, "--workers", "1", *arguments)
    done = run_here(capsys, "preprocess_data.py", *flags)
    assert done.code == code, done
    assert "Traceback" not in done.err
    last = [line for line in done.err.splitlines() if "error: " in line]
    assert len(last) == 1, done.err
    assert re.search(message, last[0]), last[0]
    assert not output.exists() or os.listdir(output) == []
    assert done.out == ""


def test_the_real_command(tmp_path: Path) -> None:
    """One of the table as a user runs it."""
    path = _file(tmp_path, "a.jsonl", b'{"text": null}')
    done = run_tool(
        "preprocess_data.py", "--input", path, "--output-prefix", tmp_path / "o", *BYTES
    )
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1


def test_the_table_is_long_enough() -> None:
    assert len(CASES) >= 20


def test_file_damage_is_not_skipped(tmp_path: Path) -> None:
    """--skip-bad-lines leaves out records, never the rest of a broken file."""
    path = _file(tmp_path, "a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99)[:-9])
    done = run_tool(
        "preprocess_data.py", "--input", path, "--output-prefix", tmp_path / "o", *BYTES,
        "--skip-bad-lines",
    )  # fmt: skip
    assert done.code == 1
    assert "cut short" in done.err


def test_unreadable_file(tmp_path: Path) -> None:
    path = Path(_good(tmp_path))
    path.chmod(0)
    if os.access(path, os.R_OK):  # root reads everything
        path.unlink()
        path.symlink_to(tmp_path / "nowhere")
        done = run_tool(
            "preprocess_data.py", "--input", tmp_path, "--output-prefix", tmp_path / "o", *BYTES
        )
        assert "the folder has no files" in done.err
    else:
        done = run_tool(
            "preprocess_data.py", "--input", path, "--output-prefix", tmp_path / "o", *BYTES
        )
        assert "no permission to read" in done.err
    assert done.code == 1


@pytest.mark.parametrize(
    ("tool", "arguments", "code", "message"),
    [
        ("train_tokenizer.py", ["--vocab-size", "10"], 1, "--vocab-size 10 must be above"),
        ("train_tokenizer.py", ["--vocab-size", "90000"], 1, "use at most"),
        ("train_tokenizer.py", ["--json-keys", "body"], 1, "good.jsonl:1: missing key"),
        ("train_tokenizer.py", ["--model-type", "word"], 2, "invalid choice"),
        ("train_tokenizer.py", ["--vocab-sise", "1"], 2, "did you mean --vocab-size"),
    ],
)
def test_training(
    tool: str,
    arguments: Arguments,
    code: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, prefix = _good(tmp_path), tmp_path / "out" / "t"
    done = run_here(capsys, tool, "--input", path, "--output-prefix", prefix, *arguments)
    assert done.code == code, done.err
    assert message in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists() or os.listdir(tmp_path / "out") == []


def test_duplicate_keys_in_an_object_are_json(tmp_path: Path) -> None:
    """As every JSON reader does: the last one counts."""
    path = _file(tmp_path, "a.jsonl", b'{"text": 5, "text": "x"}')
    run_preprocess(Path(path), tmp_path / "o")
    assert read_texts(tmp_path / "o_text_document") == ["x"]
