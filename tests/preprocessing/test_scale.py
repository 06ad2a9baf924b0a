"""Huge documents cost what their size says; memory does not grow with the corpus."""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets import IndexedDataset
from megatron.core.tokenizers import build_tokenizer
from tests.preprocessing.corpora import command, documents, read_texts, run_preprocess, write_jsonl
from tests.tokenizers.models import hugging_face_file, sentencepiece_model, sources, tiktoken_file


def _long(megabytes: float) -> str:
    """Real text without a newline."""
    text = "".join(sources(1.0)).replace("\n", " ")
    return (text * (int(megabytes * 1e6 / len(text)) + 1))[: int(megabytes * 1e6)]


def _seconds(kind: str, model: str | None, text: str, parts: int) -> float:
    """CPU time of a text in so many documents, by a tokenizer that has seen nothing yet."""
    tokenizer = build_tokenizer(kind, model)
    tokenizer.tokenize(text[:100_000])
    step = -(-len(text) // parts)
    start = time.process_time()
    for place in range(0, len(text), step):
        tokenizer.tokenize(text[place : place + step])
    return time.process_time() - start


KINDS = {
    "SentencePieceTokenizer": sentencepiece_model,
    "HuggingFaceTokenizer": hugging_face_file,
    "TikTokenizer": tiktoken_file,
    "ByteTokenizer": lambda: None,
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_long_document_is_not_superlinear(kind: str) -> None:
    """CPU time of 1 MB in one document against 10 documents: at most 1.7 times (noise)."""
    model = KINDS[kind]()  # type: ignore[operator]
    small, large = (min(_seconds(kind, model, _long(1.1), n) for _ in range(2)) for n in (10, 1))
    assert large < 1.7 * small + 0.01, (small, large)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_sixteen_megabytes(kind: str, tmp_path: Path) -> None:
    model = KINDS[kind]()  # type: ignore[operator]
    small, large = (_seconds(kind, model, _long(16), n) for n in (160, 1))
    print(kind, f"{16 / small:.2f} MB/s in 100 KB documents, {16 / large:.2f} in one")
    assert large < 2 * small + 0.1, (small, large)


def test_sixteen_megabytes_through_the_pipeline(tmp_path: Path) -> None:
    """One line of 16 MB between short ones, in a plain and a compressed file."""
    long = _long(16)
    texts = ["first", long, "last"]
    for name in ("a.jsonl", "a.jsonl.zst"):
        path = write_jsonl(tmp_path / name, texts)
        run_preprocess(path, tmp_path / "out", workers=2)
        assert read_texts(tmp_path / "out_text_document") == texts
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert dataset.sequence_lengths.tolist() == [5, 16_000_000, 4]


_PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def _peak_megabytes(corpus: Path, prefix: Path) -> float:
    """Largest resident size of any process of a run."""
    tool = command(
        "preprocess_data.py", "--input", corpus, "--output-prefix", prefix,
        "--tokenizer-type", "ByteTokenizer", "--workers", 2,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, *tool], capture_output=True, text=True, check=True
    )
    return int(done.stdout) / 1024


def test_memory_is_flat(tmp_path: Path) -> None:
    """Eight times the corpus (36 MB more), at most 8 MB more memory."""
    texts = documents(300, seed=3, longest=1500)
    peaks = []
    for times in (10, 80):
        path = write_jsonl(tmp_path / f"{times}.jsonl.gz", texts * (times * 3))
        peaks.append(_peak_megabytes(path, tmp_path / f"out{times}"))
    size = (tmp_path / "out80_text_document.bin").stat().st_size
    assert size > 20e6
    assert peaks[1] < peaks[0] + 8, peaks
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0


def test_many_tiny_documents(tmp_path: Path) -> None:
    """100,000 documents of a few bytes: the cost a document stays small (here: below 0.1 ms)."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": str(i)}) + "\n" for i in range(100_000)))
    start = time.process_time()
    report, _ = run_preprocess(path, tmp_path / "out")
    assert time.process_time() - start < 10  # this process's part
    assert report.documents == [100_000]
    lengths = IndexedDataset(tmp_path / "out_text_document").sequence_lengths
    assert lengths.tolist() == [len(str(i)) for i in range(100_000)]
    assert np.issubdtype(lengths.dtype, np.int32)
