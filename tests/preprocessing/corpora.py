"""Corpora to preprocess, and the commands run on them."""

import dataclasses
import functools
import gzip
import importlib
import json
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from megatron.core.datasets import IndexedDataset
from megatron.core.datasets.preprocessing.pipeline import (
    PreprocessSettings,
    Report,
    preprocess,
)
from megatron.core.tokenizers import build_tokenizer
from tools.command import run

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ROOT = Path(__file__).resolve().parents[2]
BYTES = functools.partial(build_tokenizer, "ByteTokenizer")


def null(size: int) -> Any:
    """A factory of a tokenizer of written-out ids."""
    return functools.partial(build_tokenizer, "NullTokenizer", None, size)


@functools.cache
def documents(count: int, seed: int = 0, longest: int = 400) -> list[str]:
    """Random texts of many alphabets and lengths, never empty."""
    draw = random.Random(seed)
    letters = 'abc \n\t"\\{}[]\u00e9\u4e2d\U0001f600\r\x00\u2028\ufeff'
    texts = []
    for _ in range(count):
        length = int(longest ** draw.random())
        texts.append("x" + "".join(draw.choice(letters) for _ in range(length)))
    return texts


def write_jsonl(path: Path, texts: Sequence[Any], **more: Sequence[Any]) -> Path:
    """One object a line, with ``text`` and further keys; compressed as the suffix says."""
    rows = [
        json.dumps({"id": i, "text": text, **{key: more[key][i] for key in more}})
        for i, text in enumerate(texts)
    ]
    data = "".join(row + "\n" for row in rows).encode()
    path.write_bytes(compressed(path, data))
    return path


def compressed(path: Path, data: bytes) -> bytes:
    """``data`` in the format of the suffix."""
    if path.suffix == ".gz":
        return gzip.compress(data, 1)
    return zstandard.ZstdCompressor().compress(data) if path.suffix == ".zst" else data


def write_parquet(path: Path, column: pa.Array | pa.ChunkedArray, rows: int) -> Path:
    """A column ``text`` in row groups of ``rows``."""
    pq.write_table(pa.table({"n": list(range(len(column))), "text": column}), path, rows)
    return path


def run_preprocess(
    inputs: Path | Sequence[Path | str], prefix: Path, factory: Any = BYTES, **settings: Any
) -> tuple[Report, list[str]]:
    """Preprocess in this process (with real workers); the report and the warnings."""
    paths = (inputs,) if isinstance(inputs, Path) else inputs
    warnings: list[str] = []
    report = preprocess(
        PreprocessSettings(tuple(map(str, paths)), str(prefix), **settings),
        factory,
        warnings.append,
    )
    return report, warnings


def read_texts(prefix: Path | str) -> list[str]:
    """The documents of a pair made with bytes."""
    dataset = IndexedDataset(prefix)
    return [np.asarray(ids).astype(np.uint8).tobytes().decode() for ids in dataset[:]]


def pair_bytes(prefix: Path | str) -> tuple[bytes, bytes]:
    """Both files."""
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@dataclasses.dataclass(frozen=True)
class Done:
    """A command that ended."""

    code: int
    out: str
    err: str


def command(name: str, *arguments: Any) -> list[str]:
    """A tool's command line."""
    return [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]


def run_here(capsys: Any, name: str, *arguments: Any) -> Done:
    """Run a tool inside this process (its worker processes are real): no start-up to wait for.

    A tool ends its process without unwinding it, which here would end pytest without a word.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    argv, sys.argv = sys.argv, [name, *map(str, arguments)]
    capsys.readouterr()
    try:
        with mock.patch("tools.command.leave", sys.exit):
            run(importlib.import_module(f"tools.{name.removesuffix('.py')}").main)
    except SystemExit as end:
        out, err = capsys.readouterr()
        return Done(int(end.code or 0), out, err)
    finally:
        sys.argv = argv
        for number, handler in before.items():
            signal.signal(number, handler)
    raise AssertionError("a command always leaves")


def run_tool(name: str, *arguments: Any, timeout: float = 120, **options: Any) -> Done:
    """Run a tool."""
    done = subprocess.run(
        command(name, *arguments), capture_output=True, text=True, timeout=timeout, **options
    )
    return Done(done.returncode, done.stdout, done.stderr)
