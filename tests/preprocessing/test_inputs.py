"""Every format gives the same documents, in the same order."""

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard

from megatron.core.datasets.preprocessing.inputs import find_inputs, natural_key, open_sources
from megatron.core.datasets.preprocessing.records import CorpusError
from megatron.core.datasets.preprocessing.shares import Share, parts_of, units_of
from megatron.core.datasets.preprocessing.units import Unit
from tests.preprocessing.corpora import (
    compressed,
    documents,
    pair_bytes,
    read_texts,
    run_preprocess,
    write_jsonl,
    write_parquet,
)

TEXTS = documents(60, seed=1)


def _columns() -> dict[str, Any]:
    half = len(TEXTS) // 2
    return {
        "string": pa.array(TEXTS, pa.string()),
        "large string": pa.array(TEXTS, pa.large_string()),
        "dictionary": pa.array(TEXTS, pa.string()).dictionary_encode(),
        "dictionary of large": pa.array(TEXTS, pa.large_string()).dictionary_encode(),
        "view": pa.array(TEXTS, pa.string_view()),
        "chunks": pa.chunked_array([TEXTS[:half], TEXTS[half:]]),
    }


def _records(paths: list[str], keys: tuple[str, ...] = ("text",)) -> list[str]:
    """All first texts, read in this process."""
    parts = parts_of(open_sources(find_inputs(paths), keys), Share())
    return [record.texts[0] for unit in units_of(parts) for record in unit.records(keys)]


@pytest.fixture(scope="module")
def from_jsonl(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    folder = tmp_path_factory.mktemp("jsonl")
    run_preprocess(write_jsonl(folder / "a.jsonl", TEXTS), folder / "out")
    assert read_texts(folder / "out_text_document") == TEXTS
    return pair_bytes(folder / "out_text_document")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.json", "a.ndjson"])
def test_json_lines(name: str, from_jsonl: tuple[bytes, bytes], tmp_path: Path) -> None:
    run_preprocess(write_jsonl(tmp_path / name, TEXTS), tmp_path / "out")
    assert pair_bytes(tmp_path / "out_text_document") == from_jsonl


@pytest.mark.parametrize("kind", list(_columns()))
def test_parquet(kind: str, from_jsonl: tuple[bytes, bytes], tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", _columns()[kind], 7)
    run_preprocess(tmp_path / "a.parquet", tmp_path / "out")
    assert pair_bytes(tmp_path / "out_text_document") == from_jsonl


def test_dataset_folder(from_jsonl: tuple[bytes, bytes], tmp_path: Path) -> None:
    import datasets

    order = list(range(len(TEXTS)))
    mixed = [*reversed(order)]
    dataset = datasets.Dataset.from_dict({"text": [TEXTS[i] for i in mixed], "n": mixed})
    dataset.select(mixed).save_to_disk(str(tmp_path / "saved"))  # a selection is honoured
    dataset = dataset.sort("n")
    datasets.DatasetDict({"train": dataset}).save_to_disk(str(tmp_path / "splits"))
    for number, folder in enumerate(("saved", "splits/train")):
        run_preprocess(tmp_path / folder, tmp_path / f"out{number}")
        assert pair_bytes(tmp_path / f"out{number}_text_document") == from_jsonl
    with pytest.raises(CorpusError, match=r"several splits \(train\); name one: --input .*train"):
        run_preprocess(tmp_path / "splits", tmp_path / "out")


def test_folder_of_text_files(from_jsonl: tuple[bytes, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "9deeper").mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        where = folder / "9deeper" if 9 < number < 20 else folder
        suffix = (".txt", "", ".md", ".txt.gz", ".zst")[number % 5]
        path = where / f"{number if where == folder else number}{suffix}"
        if where != folder:
            path = where / f"part{number}{suffix}"
        path.write_bytes(compressed(path, text.encode()))
    (folder / ".hidden").write_text("not read")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("not read")
    run_preprocess(folder, tmp_path / "out", workers=2)
    assert pair_bytes(tmp_path / "out_text_document") == from_jsonl


def test_mixed_inputs_in_the_order_given(from_jsonl: tuple[bytes, bytes], tmp_path: Path) -> None:
    write_parquet(tmp_path / "z.parquet", pa.array(TEXTS[:20]), 6)
    for number in (2, 10):
        low = 20 if number == 2 else 30
        write_jsonl(tmp_path / f"part{number}.jsonl.zst", TEXTS[low : low + 10])
    (tmp_path / "one.txt").write_bytes(TEXTS[40].encode())
    write_jsonl(tmp_path / "a.jsonl", TEXTS[41:])
    inputs = [str(tmp_path / name) for name in ("z.parquet", "part*.zst", "one.txt", "a.jsonl")]
    run_preprocess(inputs, tmp_path / "out", workers=2)
    assert pair_bytes(tmp_path / "out_text_document") == from_jsonl


def test_several_members_and_frames(tmp_path: Path) -> None:
    lines = [f'{{"text": "{i}"}}\n'.encode() for i in range(100)]
    pieces = [b"".join(lines[:33]), b"", b"".join(lines[33:50]) + lines[50][:5]]
    pieces.append(lines[50][5:] + b"".join(lines[51:]))
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, pieces)) + b"\0" * 512)
    compress = zstandard.ZstdCompressor().compress
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(map(compress, pieces)))
    for name in ("a.jsonl.gz", "a.jsonl.zst"):
        assert _records([str(tmp_path / name)]) == [str(i) for i in range(100)]


@pytest.mark.parametrize("size", [1, 16_000, 16_384, 50_000])
def test_padding_between_gzip_members_of_any_size(size: int, tmp_path: Path) -> None:
    """Tapes and block devices pad with NULs; the reader must not stumble over its own block."""
    members = [gzip.compress(f'{{"text": "{i}"}}\n'.encode()) for i in range(3)]
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes((b"\0" * size).join([*members, b""]))
    assert _records([str(path)]) == ["0", "1", "2"]
    path.write_bytes(b"\0" * size + members[0])
    with pytest.raises(CorpusError, match="damaged"):
        _records([str(path)])


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_every_cut_of_a_compressed_file_is_found(suffix: str, tmp_path: Path) -> None:
    whole = write_jsonl(tmp_path / f"a.jsonl{suffix}", documents(20)).read_bytes()
    path = tmp_path / f"cut.jsonl{suffix}"
    for end in range(1, len(whole), 7):
        path.write_bytes(whole[:end])
        with pytest.raises(CorpusError, match=r"cut\.jsonl.*(cut short|damaged)"):
            _records([str(path)])


def test_units_are_small_and_never_cut_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("jsonl", "text_files", "arrow_rows"):
        monkeypatch.setattr(f"megatron.core.datasets.preprocessing.{module}.UNIT_BYTES", 1000)
    texts = documents(200, seed=2, longest=3000)
    paths = [
        write_jsonl(tmp_path / "a.jsonl", texts),
        write_jsonl(tmp_path / "a.jsonl.gz", texts),
        write_parquet(tmp_path / "a.parquet", pa.array(texts), 64),
    ]
    for path in paths:
        sources = open_sources(find_inputs([str(path)]), ("text",))
        units: list[Unit] = list(units_of(parts_of(sources, Share())))
        assert len(units) > 10
        assert [r.texts[0] for unit in units for r in unit.records(("text",))] == texts
        place = 0
        for unit in units:  # every record can be found again
            for record in unit.records(("text",)):
                expected = f":{place + 1}" if "jsonl" in path.name else f"row {place} "
                assert expected in unit.locate(record.index) + " "
                place += 1


def test_parquet_of_many_batches(tmp_path: Path) -> None:
    texts = [f"{i:06d}" * 300 for i in range(5000)]  # 9 MB in one row group
    write_parquet(tmp_path / "a.parquet", pa.array(texts), 5000)
    assert _records([str(tmp_path / "a.parquet")]) == texts


def test_natural_order() -> None:
    names = ["a10", "a2", "b1", "a", "a02b", "10", "9"]
    assert sorted(names, key=natural_key) == ["9", "10", "a", "a2", "a02b", "a10", "b1"]


def test_a_link_in_a_circle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("x")
    (tmp_path / "in" / "b").symlink_to(tmp_path / "in")
    with pytest.raises(CorpusError, match="leads back"):
        find_inputs([str(tmp_path / "in")])
