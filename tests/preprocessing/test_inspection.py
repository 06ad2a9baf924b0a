"""Looking into token files: tables, picture, samples, checks."""

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.preprocessing.inspection import (
    document_lengths,
    length_histogram,
    longer_than,
    scan_ids,
)
from megatron.core.datasets.preprocessing.progress import Progress
from tests.preprocessing.corpora import run_preprocess, run_tool, write_jsonl

Lengths = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 1 << 33)), max_size=30)


@given(Lengths)
@settings(deadline=None, max_examples=200)
def test_histogram(values: list[int]) -> None:
    buckets = length_histogram(np.array(values, dtype=np.int64))
    for bucket in buckets:
        inside = [value for value in values if bucket.low <= value < bucket.high]
        assert (bucket.documents, bucket.tokens) == (len(inside), sum(inside))
        assert bucket.high == max(2 * bucket.low, 1)
    assert sum(bucket.documents for bucket in buckets) == len(values)


@given(Lengths, st.lists(st.integers(0, 1 << 33), max_size=5))
@settings(deadline=None, max_examples=200)
def test_longer_than(values: list[int], limits: list[int]) -> None:
    for row in longer_than(np.array(values, dtype=np.int64), limits):
        above = [value for value in values if value > row.limit]
        assert (row.documents, row.tokens) == (len(above), sum(above))
        assert row.share == pytest.approx(sum(above) / max(sum(values), 1))


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "p", np.int32) as builder:
        builder.add_document([1, 2, 3], [1, 2])
        builder.add_document([], [])
        builder.add_document([70000])
    dataset = IndexedDataset(tmp_path / "p")
    assert document_lengths(dataset).tolist() == [3, 0, 1]
    assert (scan_ids(dataset).smallest, scan_ids(dataset).largest) == (1, 70000)
    done = run_tool("inspect_dataset.py", "--input", tmp_path / "p")
    assert done.code == 0, done.err
    assert "3 documents, 3 sequences, 4 tokens of int32" in done.out


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Three documents of bytes."""
    texts = ["a" * 3000, "hello world", "z" * 1500]
    run_preprocess(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "o")
    return tmp_path / "o_text_document"


def test_command(prefix: Path, tmp_path: Path) -> None:
    png = tmp_path / "lengths.png"
    done = run_tool(
        "inspect_dataset.py", "--input", f"{prefix}.idx", "--png", png, "--documents", 1,
        "--tokenizer-type", "ByteTokenizer", "--longer-than", 1500, 100, "--max-tokens", 5,
    )  # fmt: skip
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.splitlines()]
    assert ["2,048-4,095", "1", "3,000", "66.5%"] in rows
    assert ["8-15", "1", "11", "0.2%"] in rows
    assert ["1,500", "1", "3,000", "66.5%"] in rows
    assert ["100", "2", "4,500", "99.8%"] in rows
    assert "ids 32..122: all inside the vocabulary of 257" in done.out
    assert "--- document 1: 11 tokens, the first 5 shown\nhello\n" in done.out
    from PIL import Image

    with Image.open(png) as picture:
        assert picture.size[0] > 1000
        assert len(set(picture.convert("RGB").resize((200, 80)).getdata())) > 20  # not blank


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vocab-size", "100"], "ids 32..122 are not all inside the vocabulary of 100"),
        (["--show", "1"], "give --tokenizer-type"),
        (["--tokenizer-type", "ByteTokenizer", "--documents", "3"], "must be in 0..2"),
    ],
)
def test_errors(arguments: list[str], message: str, prefix: Path) -> None:
    done = run_tool("inspect_dataset.py", "--input", prefix, *arguments)
    assert done.code == 1
    assert message in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--show", "-1"], "--show -1 must be at least 0"),
        (["--max-tokens", "-3"], "--max-tokens -3 must be at least 1"),
        (["--vocab-size", "0"], "--vocab-size 0 must be at least 1"),
        (["--longer-than", "64", "-5"], "--longer-than -5 must be at least 0"),
    ],
)
def test_numbers_out_of_range(arguments: list[str], message: str, prefix: Path) -> None:
    done = run_tool("inspect_dataset.py", "--input", prefix, *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_a_picture_that_can_not_be_written_is_refused_first(prefix: Path) -> None:
    done = run_tool("inspect_dataset.py", "--input", prefix, "--png", f"{prefix}.bin/x.png")
    assert (done.code, done.out) == (1, "")
    assert "--png" in done.err and "can't be written" in done.err


def test_floats_are_no_ids(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "f", np.float32) as builder:
        builder.add_document([1.0, 2.5])
    assert run_tool("inspect_dataset.py", "--input", tmp_path / "f").code == 0
    done = run_tool("inspect_dataset.py", "--input", tmp_path / "f", "--vocab-size", "100")
    assert done.code == 1
    assert "f.bin: holds float32, not token ids" in done.err


def test_damaged_pairs(prefix: Path) -> None:
    tokens = Path(f"{prefix}.bin")
    tokens.write_bytes(tokens.read_bytes()[:-1])
    done = run_tool("inspect_dataset.py", "--input", prefix)
    assert done.code == 1
    assert "1 too short" in done.err
    done = run_tool("inspect_dataset.py", "--input", f"{prefix}x")
    assert done.code == 1
    assert "No such file" in done.err


def test_progress_line() -> None:
    progress = Progress(100, io.StringIO())
    progress.add(25, 5, 1000)
    line = progress.line(progress.start + 10)
    assert line == " 25.0 % |  5 documents, 0/s | 0.00 MB/s | 1,000 tokens | 0:00:30 left".replace(
        "|  5", "| 5"
    )


def test_progress_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    progress = Progress(1_000_000, stream)
    progress._last -= 10
    progress.add(500_000, 7, 1234)
    progress._bar.refresh()
    progress.close()
    text = stream.getvalue()
    assert "50%" in text
    assert "1,234 tokens" in text
    assert "documents/s" in text
