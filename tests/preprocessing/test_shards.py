"""Shares of the input and their merge: contiguous, complete, byte for byte a single run."""

import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.preprocessing.inputs import find_inputs, open_sources
from megatron.core.datasets.preprocessing.merging import merge
from megatron.core.datasets.preprocessing.records import CorpusError
from megatron.core.datasets.preprocessing.shares import (
    Share,
    parts_of,
    records_between,
    units_of,
)
from tests.preprocessing.corpora import (
    ROOT,
    documents,
    null,
    pair_bytes,
    run_preprocess,
    run_tool,
    write_jsonl,
    write_parquet,
)


@given(st.integers(1, 10**6), st.integers(0, 500), st.lists(st.integers(0, 10**6), max_size=8))
@settings(deadline=None, max_examples=200)
def test_records_are_each_in_one_part(size: int, records: int, cuts: list[int]) -> None:
    edges = sorted({0, size, *(cut for cut in cuts if cut < size)})
    place = 0
    for start, end in zip(edges, edges[1:]):
        first, last = records_between(start, end, size, records)
        assert first == place <= last
        place = last
    assert place == records


def test_a_record_belongs_where_its_first_byte_lies() -> None:
    """Four records of ten bytes start at 0, 2.5, 5 and 7.5."""
    assert records_between(0, 10, 10, 4) == (0, 4)
    assert records_between(1, 5, 10, 4) == (1, 2)
    assert records_between(3, 5, 10, 4) == (2, 2)
    assert records_between(5, 8, 10, 4) == (2, 4)


def _everything(folder: Path, seed: int) -> list[str]:
    """Inputs of all formats, some empty, in random sizes."""
    draw = random.Random(seed)
    import datasets

    inputs = []
    for number in range(6):
        texts = documents(draw.choice((0, 1, 3, 40)), seed + number)
        kind = draw.choice(("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt", "folder"))
        path = folder / f"{number}.{kind}"
        if kind.startswith("jsonl"):
            write_jsonl(path, texts)
        elif kind == "parquet":
            write_parquet(path, pa.array(texts, pa.string()), 5)
        elif kind == "folder":
            datasets.Dataset.from_dict(
                {"text": texts}, features=datasets.Features({"text": datasets.Value("string")})
            ).save_to_disk(str(path))
        else:
            path.write_bytes("".join(texts).encode())
        inputs.append(str(path))
    return inputs


def _read(inputs: list[str], share: Share) -> list[str]:
    parts = parts_of(open_sources(find_inputs(inputs), ("text",)), share)
    return [r.texts[0] for unit in units_of(parts) for r in unit.records(("text",)) if r.texts]


@pytest.mark.parametrize("unit_bytes", [200, 1 << 19])
def test_shares_joined_are_the_whole(
    unit_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("jsonl", "text_files", "arrow_rows"):
        name = f"megatron.core.datasets.preprocessing.{module}.UNIT_BYTES"
        monkeypatch.setattr(name, unit_bytes)
    for _ in range(4):
        seed = random.randrange(1 << 30)
        print("seed", seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        inputs = _everything(folder, seed)
        whole = _read(inputs, Share())
        for count in (2, 3, 7, 50):
            shares = [_read(inputs, Share(index, count)) for index in range(count)]
            assert [text for share in shares for text in share] == whole, seed


def test_shares_are_balanced(tmp_path: Path) -> None:
    texts = ["x" * 1000] * 1000
    for path in (
        write_jsonl(tmp_path / "a.jsonl", texts),
        write_jsonl(tmp_path / "b.jsonl.gz", texts),
    ):
        counts = [len(_read([str(path)], Share(index, 7))) for index in range(7)]
        assert sum(counts) == 1000
        assert max(counts) - min(counts) <= 2


def test_one_long_line_belongs_to_one_share(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["short", "y" * 500_000, "last"])
    shares = [_read([str(path)], Share(index, 8)) for index in range(8)]
    assert [len(share) for share in shares] == [2, 0, 0, 0, 0, 0, 0, 1]
    assert [text[:5] for share in shares for text in share] == ["short", "yyyyy", "last"]


def _shards(path: Path, folder: Path, count: int, **settings: Any) -> None:
    for index in range(count):
        run_preprocess(path, folder / f"s{index}", share=Share(index, count), **settings)


def test_merged_shards_are_a_single_run(tmp_path: Path) -> None:
    texts = documents(12, 4)
    texts[3] = " "
    path = write_jsonl(tmp_path / "a.jsonl", texts, title=["1"] * 12)
    run_preprocess(path, tmp_path / "one", append_eod=True, keys=("text", "title"))
    _shards(path, tmp_path / "shards", 11, append_eod=True, keys=("text", "title"))
    merged = merge(str(tmp_path / "shards"), str(tmp_path / "m"), ["text", "title"])
    assert [len(each.parts) for each in merged] == [11, 11]
    for key in ("text", "title"):
        assert pair_bytes(tmp_path / f"m_{key}_document") == pair_bytes(
            tmp_path / f"one_{key}_document"
        )


def test_empty_shards_are_whole_and_said(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x", "y"])
    warned = []
    for index in range(4):
        _, warnings = run_preprocess(path, tmp_path / "s" / str(index), share=Share(index, 4))
        warned += warnings
        assert IndexedDataset(tmp_path / "s" / f"{index}_text_document").num_documents <= 1
    assert len([w for w in warned if "has no documents" in w]) == 2
    [merged] = merge(str(tmp_path / "s"), str(tmp_path / "m"))
    assert (merged.documents, merged.tokens) == (2, 2)


def test_empty_and_multi_sequence_sets_merge_as_one(tmp_path: Path) -> None:
    sets: list[list[list[list[int]]]] = [
        [[[1, 2, 3]], [[4], [5, 6]]],
        [],
        [[[7], [8], [9, 10]], [[11]], []],
    ]
    (tmp_path / "in").mkdir()
    whole = IndexedDatasetBuilder(tmp_path / "whole", np.uint16)
    for number, each in enumerate(sets):
        part = IndexedDatasetBuilder(tmp_path / "in" / f"p{number * 5}", np.uint16)
        for document in each:
            tokens = [token for sequence in document for token in sequence]
            for builder in (part, whole):
                builder.add_document(tokens, [len(sequence) for sequence in document])
        part.finalize()
    whole.finalize()
    merge(str(tmp_path / "in"), str(tmp_path / "m"))  # p0, p5, p10
    assert pair_bytes(tmp_path / "m") == pair_bytes(tmp_path / "whole")


def test_types_are_widened(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, dtype, ids in (("a", np.uint16, [1, 65535]), ("b", np.int32, [70000])):
        with IndexedDatasetBuilder(tmp_path / "in" / name, dtype) as builder:
            builder.add_document(ids)
    [merged] = merge(str(tmp_path / "in"), str(tmp_path / "m"))
    assert merged.dtype == "int32"
    assert [list(ids) for ids in IndexedDataset(tmp_path / "m")[:]] == [[1, 65535], [70000]]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three finished shards."""
    path = write_jsonl(tmp_path / "a.jsonl", documents(30))
    _shards(path, tmp_path / "shards", 3)
    return tmp_path / "shards"


def _change_note(shards: Path, number: int, **changes: Any) -> None:
    path = shards / f"s{number}_text_document.shard.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _damage(kind: str, shards: Path) -> None:
    """One thing that goes wrong with shards."""
    first = shards / "s0_text_document"
    if kind == "missing":
        for path in shards.glob("s1_*"):
            path.unlink()
    elif kind == "unfinished":
        Path(f"{first}.idx").unlink()
        shutil.move(f"{first}.bin", f"{first}.bin.partial")
    elif kind == "no index":
        Path(f"{first}.idx").unlink()
    elif kind == "no tokens":
        Path(f"{first}.bin").unlink()
    elif kind == "short tokens":
        data = Path(f"{first}.bin").read_bytes()
        Path(f"{first}.bin").write_bytes(data[:-1])
    elif kind == "short index":
        data = Path(f"{first}.idx").read_bytes()
        Path(f"{first}.idx").write_bytes(data[:-8])
    elif kind == "twice":
        for path in shards.glob("s1_*"):
            shutil.copy(path, shards / path.name.replace("s1", "copy"))
    elif kind == "stranger":
        with IndexedDatasetBuilder(shards / "other", np.uint16) as builder:
            builder.add_document([1])
    elif kind == "other tokenizer":
        _change_note(shards, 1, vocab_size=300)
    elif kind == "other count":
        _change_note(shards, 1, num_shards=4)
    elif kind == "other key":
        _change_note(shards, 1, key="title")
    elif kind == "broken note":
        (shards / "s2_text_document.shard.json").write_text("{")
    elif kind == "older note":
        _change_note(shards, 1, documents=3)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "1 of 3 shards missing: 1; run those tasks again"),
        ("unfinished", "s0_text_document: unfinished: no .idx file"),
        ("no index", "s0_text_document: unfinished: no .idx file"),
        ("no tokens", "s0_text_document: unfinished: no .bin file"),
        ("short tokens", "1 too short"),
        ("short index", "cut short"),
        ("twice", "shard 1 is there twice"),
        ("stranger", "other is not"),
        ("other tokenizer", "shards differ in vocab_size"),
        ("other count", "shards differ in num_shards"),
        ("other key", "shards differ in key: .*choose with --json-keys"),
        ("broken note", "not a shard note"),
        ("older note", "its .shard.json says 3"),
    ],
)
def test_a_set_that_is_not_whole_is_refused(kind: str, message: str, shards: Path) -> None:
    _damage(kind, shards)
    output = shards.parent / "out" / "m"
    with pytest.raises(ValueError, match=message):
        merge(str(shards), str(output))
    assert list(output.parent.iterdir()) == []


def test_merging_into_the_same_folder_again(shards: Path) -> None:
    """The result is not taken for a shard."""
    merge(str(shards), str(shards / "all"))
    first = pair_bytes(shards / "all")
    merge(str(shards), str(shards / "all"))
    assert pair_bytes(shards / "all") == first


def test_leftovers_of_a_later_run_are_said(shards: Path) -> None:
    (shards / "s0_text_document.bin.partial").write_bytes(b"x")
    warnings: list[str] = []
    merge(str(shards), str(shards.parent / "m"), None, warnings.append)
    assert len(warnings) == 1
    assert "left .partial" in warnings[0]


def test_a_shard_does_not_overwrite_another(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", documents(30))
    run_preprocess(path, tmp_path / "o", share=Share(0, 2))
    run_preprocess(path, tmp_path / "o", share=Share(0, 2))  # itself it may
    with pytest.raises(CorpusError, match="holds shard 0 of 2; this is shard 1 of 2"):
        run_preprocess(path, tmp_path / "o", share=Share(1, 2))
    run_preprocess(path, tmp_path / "o")
    assert not list(tmp_path.glob("*.shard.json"))  # a whole corpus is no shard


def test_old_output_survives_a_failed_merge(shards: Path) -> None:
    merge(str(shards), str(shards.parent / "m"))
    before = pair_bytes(shards.parent / "m")
    _damage("short tokens", shards)
    with pytest.raises(ValueError, match="too short"):
        merge(str(shards), str(shards.parent / "m"))
    assert pair_bytes(shards.parent / "m") == before


def test_command(shards: Path, tmp_path: Path) -> None:
    run_preprocess(tmp_path / "a.jsonl", tmp_path / "one")
    done = run_tool("merge_datasets.py", "--input", shards, "--output-prefix", tmp_path / "m")
    assert (done.code, done.err) == (0, "")
    assert "3 parts, 30 documents" in done.out
    assert pair_bytes(tmp_path / "m") == pair_bytes(tmp_path / "one_text_document")
    empty = tmp_path / "empty"
    empty.mkdir()
    for wrong, message in (
        (empty, "no pair of .bin and .idx files"),
        (tmp_path / "nowhere", "no such folder"),
    ):
        done = run_tool("merge_datasets.py", "--input", wrong, "--output-prefix", tmp_path / "x")
        assert done.code == 1
        assert message in done.err
        assert "Traceback" not in done.err


def _array_task(index: int, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    import os
    import sys

    return subprocess.run(
        ["bash", "examples/slurm/preprocess_array.sbatch"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "SLURM_ARRAY_TASK_ID": str(index),
            "SLURM_CPUS_PER_TASK": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_slurm_array_and_merge(tmp_path: Path) -> None:
    """The scripts as an array would run them, without Slurm."""
    import os
    import sys

    for number in (2, 10):
        write_jsonl(tmp_path / f"in {number}.jsonl.gz", documents(20, number))
    environment = {
        "INPUT": f"{tmp_path}/in*.jsonl.gz",
        "OUTPUT": f"{tmp_path}/out/books",
        "TOKENIZER_TYPE": "ByteTokenizer",
        "SLURM_ARRAY_TASK_COUNT": "3",
        "SLURM_ARRAY_TASK_MIN": "0",
        "SLURM_ARRAY_TASK_MAX": "2",
    }
    for index in (2, 0, 1):
        done = _array_task(index, environment)
        assert done.returncode == 0, done.stderr
    merged = subprocess.run(
        ["bash", "examples/slurm/preprocess_merge.sbatch"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "OUTPUT": environment["OUTPUT"]},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert merged.returncode == 0, merged.stderr
    run_preprocess([environment["INPUT"]], tmp_path / "one", append_eod=True)
    assert pair_bytes(tmp_path / "out" / "books_text_document") == pair_bytes(
        tmp_path / "one_text_document"
    )
    done = _array_task(1, {**environment, "SLURM_ARRAY_TASK_MIN": "1"})
    assert done.returncode == 2
    assert "set NUM_SHARDS" in done.stderr
    done = _array_task(1, {**environment, "SLURM_ARRAY_TASK_COUNT": "1", "NUM_SHARDS": "3"})
    assert done.returncode == 0, done.stderr


def test_vocabulary_in_the_note(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["1 2", "3"])
    run_preprocess(path, tmp_path / "o", null(77), share=Share(0, 2))
    note = json.loads((tmp_path / "o_text_document.shard.json").read_text())
    assert note == {
        "shard_index": 0,
        "num_shards": 2,
        "key": "text",
        "vocab_size": 77,
        "documents": 1,
        "tokens": 2,
    }
