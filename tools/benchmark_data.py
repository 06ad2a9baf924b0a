"""How fast the data room is: opening, packing, and random reads next to megatron-core's.

    python tools/benchmark_data.py
    python tools/benchmark_data.py --megatron-python /path/to/venv/bin/python

The second form also reads with ``GPTDataset`` of the megatron-core package in that environment
(megatron-core and torch of the same versions as here), on the same files, taking turns with
ours so that both see the same machine. It is run as it is fastest: no attention mask, and its
cached loss mask and positions, which know of no documents; ours are computed for each row.

Figures are the median of several rounds.
"""

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

import numpy as np
import torch

from megatron.core.datasets import BatchLoader, IndexedDataset, build_document_source
from megatron.core.datasets.document_source import DocumentSource
from megatron.core.datasets.fragments import Fragments
from megatron.core.datasets.index_format import pack_index
from megatron.core.datasets.packing import PACKINGS, pack_rows
from megatron.core.datasets.row_reader import RowReader, Share
from megatron.core.packed_batch import IGNORE_INDEX

ROUNDS = 7

PEER = """
import json, random, sys, tempfile, time, types
import numpy, torch
torch.set_num_threads(1)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
request = json.loads(sys.stdin.readline())
tokenizer = types.SimpleNamespace(
    eod=0, pad=-1, unique_identifiers={}, vocab_size=request["vocab_size"])
config = GPTDatasetConfig(
    random_seed=1, sequence_length=request["seq_length"], blend=([request["prefix"]], None),
    split="1,0,0", path_to_cache=request["cache"], tokenizer=tokenizer,
    reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    create_attention_mask=False)
files = IndexedDataset(request["prefix"], multimodal=False, mmap=True)
documents = numpy.arange(len(files), dtype=numpy.int32)
dataset = GPTDataset(files, request["prefix"], documents, None, Split.train, config)
for index in range(request["rows"]):
    dataset[index]
print("ready", flush=True)
for line in sys.stdin:
    start, cpu = time.perf_counter(), time.process_time()
    for index in range(request["rows"]):
        dataset[index]
    print(time.perf_counter() - start, time.process_time() - cpu, flush=True)
"""


def log_normal_lengths(documents: int, tokens: int) -> Any:
    """Document lengths of a web-like corpus (sigma 1.2), scaled to a number of tokens."""
    raw = np.exp(1.2 * np.random.default_rng(0).standard_normal(documents))
    return np.maximum(1, raw * (tokens / raw.sum())).astype(np.int32)


def write_lengths(prefix: str, lengths: np.ndarray) -> None:
    """A corpus with these documents whose ``.bin`` is a hole in the disk (zeros)."""
    with open(prefix + ".idx", "wb") as file:
        file.write(pack_index(np.uint16, lengths, np.arange(len(lengths) + 1)))
    with open(prefix + ".bin", "wb") as file:
        file.truncate(2 * int(lengths.sum(dtype=np.int64)))


def write_tokens(prefix: str, lengths: np.ndarray) -> None:
    """A corpus with random tokens."""
    write_lengths(prefix, lengths)
    total = int(lengths.sum(dtype=np.int64))
    np.random.default_rng(0).integers(1, 32000, total).astype(np.uint16).tofile(prefix + ".bin")


def timed(action: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    start, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - start, time.process_time() - cpu


def source_of(prefix: str, **more: Any) -> DocumentSource:
    """All documents of one corpus."""
    source = build_document_source([prefix], **more)
    assert source is not None
    return source


def measure_open(prefix: str) -> dict[str, Any]:
    """Opening a large corpus."""
    walls, cpus = zip(*(timed(lambda: IndexedDataset(prefix)) for _ in range(ROUNDS)))
    return {
        "open_ms": 1e3 * statistics.median(walls),
        "open_cpu_ms": 1e3 * statistics.median(cpus),
    }


def measure_packing(prefix: str, seq_lengths: list[int]) -> dict[str, Any]:
    """Packing one epoch for several lengths."""
    source = source_of(prefix)
    result: dict[str, Any] = {"documents": source.num_documents, "tokens": source.num_tokens}
    for seq_length in seq_lengths:
        for packing in PACKINGS:
            rows = source.num_tokens // seq_length
            start, cpu = time.perf_counter(), time.process_time()
            packed, _ = pack_rows(
                packing,
                source.reader(),
                Fragments.empty(),
                num_rows=rows,
                seq_length=seq_length,
            )
            result[f"{packing}_{seq_length}"] = {
                "seconds": time.perf_counter() - start,
                "cpu_seconds": time.process_time() - cpu,
                "padding": 1 - packed.num_tokens / (rows * seq_length),
            }
    result["peak_rss_mb"] = peak_rss_mb()
    return result


def peak_rss_mb() -> float:
    """Peak memory of this program in MB.

    ``getrusage`` would not do: Linux starts it at the size of the process that forked this one.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class OurReads:
    """Rows of shuffled documents, planned beforehand as GPTDataset's are, read and labelled."""

    def __init__(self, prefix: str, seq_length: int, rows: int) -> None:
        source = source_of(prefix, vocab_size=32000)
        packed, _ = pack_rows(
            "concat", source.reader(), Fragments.empty(), num_rows=rows, seq_length=seq_length
        )
        self._rows = [packed.row(row) for row in range(rows)]
        self._reader = RowReader(source.corpora, vocab_size=32000)
        self._share = Share.of(np.arange(seq_length))
        self._seq_length = seq_length

    def read_all(self) -> None:
        """Tokens, labels, loss mask and positions of every row, as tensors."""
        for row in self._rows:
            tokens, labels, positions = self._reader.read(row, self._share, self._seq_length)
            mask = np.empty(labels.shape, dtype=np.float32)
            np.not_equal(labels, IGNORE_INDEX, out=mask)
            for values in (tokens, labels, positions, mask):
                torch.from_numpy(values)


class Peer:
    """``GPTDataset`` in another environment, told when to read."""

    def __init__(self, python: str, prefix: str, seq_length: int, rows: int) -> None:
        self._cache = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [python, "-c", PEER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self._cache.name,  # not where our package would be found
        )
        request = {
            "prefix": os.path.abspath(prefix),
            "seq_length": seq_length,
            "rows": rows,
            "cache": self._cache.name,
            "vocab_size": 32000,
        }
        self._say(json.dumps(request))
        while (line := self._hear()) != "ready":
            print(f"  peer: {line}", file=sys.stderr)

    def read_all(self) -> tuple[float, float]:
        """One pass over its rows: wall and CPU seconds."""
        self._say("go")
        wall, cpu = self._hear().split()
        return float(wall), float(cpu)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._cache.cleanup()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"benchmark_data: the peer ended with code {self._process.wait()}")
        return line.strip()


def take_steps(loader: BatchLoader, steps: int) -> None:
    """The first global batches, planned and read (as always the same rows, like the others)."""
    loader.rewind()
    for _ in range(steps):
        loader.next_step()


def measure_reads(
    prefix: str, seq_lengths: list[int], megatron_python: str | None
) -> dict[str, Any]:
    """Microseconds a row at several lengths: reading planned rows, planning and reading with a
    loader, and megatron-core's; CPU time too, which other work on the machine disturbs less."""
    result: dict[str, Any] = {}
    for seq_length in seq_lengths:
        rows = max(64, (1 << 24) // seq_length)
        ours = OurReads(prefix, seq_length, rows)
        loader = BatchLoader(
            source_of(prefix, vocab_size=32000),
            seq_length=seq_length,
            micro_batch_size=1,
            global_batch_size=8,
        )
        contenders: dict[str, Callable[[], tuple[float, float]]] = {
            "read": functools.partial(timed, ours.read_all),
            "loader": functools.partial(timed, functools.partial(take_steps, loader, rows // 8)),
        }
        if megatron_python:
            peer = Peer(megatron_python, prefix, seq_length, rows)
            contenders["megatron"] = peer.read_all
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for turn in range(ROUNDS + 1):
            for name, read in contenders.items():
                if turn:  # the first warms up
                    times[name].append(read())
                else:
                    read()
        if megatron_python:
            peer.close()
        result[str(seq_length)] = {
            f"{name}_{kind}us": round(1e6 * statistics.median(t[i] for t in values) / rows, 1)
            for name, values in times.items()
            for i, kind in enumerate(("", "cpu_"))
        }
    return result


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=1_000_000, help="Of the packed corpus.")
    parser.add_argument("--tokens", type=int, default=1_000_000_000, help="Of the packed corpus.")
    parser.add_argument(
        "--read-tokens", type=int, default=100_000_000, help="Of the corpus that is read."
    )
    parser.add_argument(
        "--seq-lengths", type=int, nargs="+", default=[8192, 131072], help="Tokens of a row."
    )
    parser.add_argument(
        "--only", nargs="+", choices=("open", "packing", "reads"), help="Leave out the rest."
    )
    parser.add_argument(
        "--megatron-python", metavar="PATH", help="Python of an environment with megatron-core."
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    args = parser.parse_args()
    chosen = args.only or ("open", "packing", "reads")
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        prefix = os.path.join(folder, "lengths")
        if {"open", "packing"} & set(chosen):
            write_lengths(prefix, log_normal_lengths(args.documents, args.tokens))
        if "open" in chosen:
            result["open"] = measure_open(prefix)
        if "packing" in chosen:
            result["packing"] = measure_packing(prefix, args.seq_lengths)
        if "reads" in chosen:
            prefix = os.path.join(folder, "tokens")
            write_tokens(prefix, log_normal_lengths(args.read_tokens // 1000, args.read_tokens))
            result["reads"] = measure_reads(prefix, args.seq_lengths, args.megatron_python)
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
