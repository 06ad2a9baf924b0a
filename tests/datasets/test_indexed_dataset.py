"""Corpus files: Megatron's bytes both ways, damage found at open, offsets in 64 bits."""

import json
import os
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets import (
    DatasetError,
    IndexedDataset,
    IndexedDatasetBuilder,
    merged_dtype,
    token_dtype,
)
from megatron.core.datasets.index_format import pack_index, sequence_pointers

GOLDEN = Path(__file__).parent.parent / "data" / "golden_idx"
CASES = ("u16", "i32", "u16_multiseq", "i32_emptydoc")
FACTS: dict[str, Any] = json.loads((GOLDEN / "golden.json").read_text())


def build(prefix: Path, documents: list[list[int]], dtype: Any = np.int32) -> Path:
    builder = IndexedDatasetBuilder(prefix, dtype)
    for document in documents:
        builder.add_document(document)
    builder.finalize()
    return prefix


def bytes_of(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_reads_megatron_files(case: str) -> None:
    dataset, facts = IndexedDataset(GOLDEN / case), FACTS[case]
    assert dataset.dtype == np.dtype(facts["dtype"])
    assert [dataset[i].tolist() for i in range(len(dataset))] == facts["read_back"]
    assert dataset.sequence_lengths.tolist() == facts["sequence_lengths"]
    assert dataset.document_indices.tolist() == facts["document_indices"]
    for i, tokens in enumerate(facts["read_back"]):
        for offset in range(len(tokens) + 1):
            assert dataset.get(i, offset).tolist() == tokens[offset:]
            assert dataset.get(i, 0, offset).tolist() == tokens[:offset]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["list", "array", "tensor"])
def test_writes_megatron_bytes(case: str, kind: str, tmp_path: Path) -> None:
    facts = FACTS[case]
    builder = IndexedDatasetBuilder(tmp_path / case, np.dtype(facts["dtype"]))
    documents = facts.get("sequences_by_document") or [[d] for d in facts["documents"]]
    for document in documents:
        flat: Any = [token for sequence in document for token in sequence]
        if kind == "array":
            flat = np.array(flat, dtype=np.int64)
        elif kind == "tensor":
            flat = torch.tensor(flat, dtype=torch.int64)
        lengths = [len(sequence) for sequence in document]
        builder.add_document(flat, lengths if len(lengths) > 1 else None)
    builder.finalize()
    assert bytes_of(tmp_path / case) == bytes_of(GOLDEN / case)
    assert Path(f"{tmp_path / case}.idx").read_bytes().hex() == facts["idx_hex"]
    assert sorted(os.listdir(tmp_path)) == [f"{case}.bin", f"{case}.idx"]


def test_documents_of_several_sequences_are_read_as_one() -> None:
    dataset, facts = IndexedDataset(GOLDEN / "u16_multiseq"), FACTS["u16_multiseq"]
    flat = [[t for s in document for t in s] for document in facts["sequences_by_document"]]
    assert [dataset.get_document(i).tolist() for i in range(dataset.num_documents)] == flat
    assert dataset.document_lengths.tolist() == [len(document) for document in flat]
    assert dataset.get_document(2, 1, 3).tolist() == flat[2][1:4]


def test_index_arithmetic_is_64_bit() -> None:
    assert sequence_pointers(np.array([2**31 - 100, 123], np.int32), 4).tolist() == [0, 8589934192]
    many = sequence_pointers(np.full(5, 2**31 - 1, np.int32), 2)
    assert np.all(np.diff(many) == 2 * (2**31 - 1))


def test_a_sparse_file_beyond_4_gib_is_read(tmp_path: Path) -> None:
    lengths = np.array([2**31 - 100, 123], np.int32)
    (tmp_path / "big.idx").write_bytes(pack_index(np.int32, lengths, [0, 1, 2]))
    with open(tmp_path / "big.bin", "wb") as file:
        file.seek(8589934192)
        file.write(np.arange(123, dtype=np.int32).tobytes())
    dataset = IndexedDataset(tmp_path / "big")
    assert dataset[1].tolist() == list(range(123))
    assert dataset.get(0, 2**31 - 101).tolist() == [0]
    assert dataset.num_tokens == 2**31 + 23


def damage(prefix: Path, extension: str, change: Any) -> None:
    path = Path(f"{prefix}.{extension}")
    path.write_bytes(change(path.read_bytes()))


def put(offset: int, form: str, *values: int) -> Any:
    return lambda data: (
        data[:offset] + struct.pack(form, *values) + data[offset + struct.calcsize(form) :]
    )


DAMAGE = {
    "bin 1 byte short": ("bin", lambda data: data[:-1], "129 bytes, 1 too short"),
    "bin 2 bytes long": ("bin", lambda data: data + b"xx", "132 bytes, 2 too long"),
    "bin empty": ("bin", lambda data: b"", "0 bytes, 130 too short"),
    "idx 8 bytes short": ("idx", lambda data: data[:-8], "134 bytes.*need 142 .cut short"),
    "idx long": ("idx", lambda data: data + bytes(8), "too long"),
    "idx with modes": ("idx", lambda data: data + bytes(5), "multimodal"),
    "idx empty": ("idx", lambda data: b"", "shorter than the 34 B header"),
    "magic": ("idx", put(0, "<B", 0), "not a Megatron index"),
    "version": ("idx", put(9, "<Q", 2), "version 2"),
    "type": ("idx", put(17, "<B", 9), "type code 9"),
    "counts": ("idx", put(18, "<Q", 6), "6 sequences"),
    "no documents": ("idx", put(26, "<Q", 0), "document count field is 0"),
    "negative length": ("idx", put(34, "<i", -5), "sequence 0 has negative length -5"),
    "length": ("idx", put(38, "<i", 2), "sequence 2 is said to start at byte 12.*byte 14"),
    "last length": ("idx", put(50, "<i", 4), "2 too short"),
    "pointer": ("idx", put(62, "<q", 12), "sequence 1 is said to start at byte 12"),
    "documents end": ("idx", put(134, "<q", 4), "documents span sequences 0..4"),
    "documents order": ("idx", put(110, "<q", 5), "document 2 starts at|after the next"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_at_open(name: str, tmp_path: Path) -> None:
    for extension in ("bin", "idx"):
        shutil.copy(GOLDEN / f"u16.{extension}", tmp_path / f"d.{extension}")
    extension, change, message = DAMAGE[name]
    damage(tmp_path / "d", extension, change)
    with pytest.raises(DatasetError, match=message) as raised:
        IndexedDataset(tmp_path / "d")
    assert str(tmp_path / "d") in str(raised.value)


def test_missing_files_say_so(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no.idx: No such file"):
        IndexedDataset(tmp_path / "no")
    build(tmp_path / "d", [[1]])
    with pytest.raises(DatasetError, match=r"give the prefix without extension: .*/d$"):
        IndexedDataset(tmp_path / "d.bin")
    os.unlink(tmp_path / "d.bin")
    with pytest.raises(DatasetError, match="d.bin: No such file.*though"):
        IndexedDataset(tmp_path / "d")


def test_an_empty_corpus_opens(tmp_path: Path) -> None:
    dataset = IndexedDataset(build(tmp_path / "e", []))
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (0, 0, 0)


def test_reads_outside_are_refused() -> None:
    dataset = IndexedDataset(GOLDEN / "u16")
    assert dataset[-1].tolist() == [9, 8, 7]
    assert [s.tolist() for s in dataset[0:2]] == [[1, 2, 3, 4, 5], [7]]
    for index in (5, -6):
        with pytest.raises(IndexError, match="there are 5"):
            dataset[index]
    with pytest.raises(IndexError, match="no document 5"):
        dataset.get_document(5)
    for offset, length in ((0, 6), (5, 1), (-1, 2), (3, -1)):
        with pytest.raises(ValueError, match="not inside sequence 0, which has 5"):
            dataset.get(0, offset, length)


def test_uint16_only_when_every_id_fits() -> None:
    assert token_dtype(65535) == np.uint16
    assert token_dtype(65536) == np.int32
    assert token_dtype(65536 - 1) == np.uint16  # a vocabulary of 65536
    assert token_dtype(65537 - 1) == np.int32  # a vocabulary of 65537
    with pytest.raises(DatasetError):
        token_dtype(2**31)


def test_ids_that_do_not_fit_are_never_wrapped(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "u", np.uint16)
    builder.add_document([65535])
    for bad in ([65536], [-1], np.array([1, 70000]), torch.tensor([1 << 40])):
        with pytest.raises(DatasetError, match="doesn't fit uint16"):
            builder.add_document(bad)
    with pytest.raises(DatasetError, match="must be integers"):
        builder.add_document([1.5])
    with pytest.raises(DatasetError, match="flat"):
        builder.add_document([[1, 2]])
    with pytest.raises(DatasetError, match="don't add up"):
        builder.add_document([1, 2, 3], [1, 1])
    for lengths in ([1.7, 1.2], [1.0, 1.0], [[1, 1]], ["1", "1"]):
        for add in (builder.add_document, builder.add_documents):
            with pytest.raises(DatasetError, match="lengths must be a flat list of whole numbers"):
                add([1, 2], lengths)
    with pytest.raises(DatasetError, match="no code"):
        IndexedDatasetBuilder(tmp_path / "v", np.uint32)
    builder.finalize()
    assert IndexedDataset(tmp_path / "u")[0].tolist() == [65535]


def test_nothing_is_added_after_the_end(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "u", np.uint16)
    builder.add_document([1])
    builder.finalize()
    for late in (
        lambda: builder.add_document([2]),
        lambda: builder.add_documents([2], [1]),
        lambda: builder.add_index(tmp_path / "u"),
        builder.finalize,
    ):
        with pytest.raises(DatasetError, match="already finalized; begin another builder"):
            late()
    assert [tokens.tolist() for tokens in IndexedDataset(tmp_path / "u")] == [[1]]


def test_ids_outside_the_vocabulary_are_refused_at_read(tmp_path: Path) -> None:
    prefix = build(tmp_path / "d", [[1, 2], [3, 70000, 4], [-1]])
    dataset = IndexedDataset(prefix, vocab_size=50257)
    assert dataset[0].tolist() == [1, 2]
    with pytest.raises(DatasetError, match=r"token 1 of sequence 1 is id 70000.*of 50257"):
        dataset.get(1, 1, 1)
    assert dataset.get(1, 2).tolist() == [4]
    with pytest.raises(DatasetError, match="is id -1"):
        dataset[2]
    assert IndexedDataset(prefix, vocab_size=70001)[1].tolist() == [3, 70000, 4]


def test_merge_equals_writing_the_concatenation(tmp_path: Path) -> None:
    sets: list[list[list[list[int]]]] = [
        [[[1, 2], [3]], [[4]]],
        [],
        [[[5]], [[6, 7], [8], [9, 9]], [[]]],
    ]
    whole = IndexedDatasetBuilder(tmp_path / "whole", np.uint16)
    merged = IndexedDatasetBuilder(tmp_path / "merged", np.uint16)
    for number, documents in enumerate(sets):
        part = IndexedDatasetBuilder(tmp_path / str(number), np.uint16)
        for document in documents:
            flat = [token for sequence in document for token in sequence]
            for builder in (whole, part):
                builder.add_document(flat, [len(sequence) for sequence in document])
        part.finalize()
        merged.add_index(tmp_path / str(number))
    whole.finalize()
    merged.finalize()
    assert bytes_of(tmp_path / "merged") == bytes_of(tmp_path / "whole")
    assert IndexedDataset(tmp_path / "merged").document_indices.tolist() == [0, 2, 3, 4, 7, 8]


def test_merge_promotes_or_refuses_types(tmp_path: Path) -> None:
    narrow = build(tmp_path / "narrow", [[1, 65535]], np.uint16)
    wide = build(tmp_path / "wide", [[70000]], np.int32)
    assert merged_dtype([np.dtype(np.uint16), np.dtype(np.int32)]) == np.int32
    assert merged_dtype([np.dtype(np.uint16), np.dtype(np.uint16)]) == np.uint16
    assert merged_dtype([np.dtype(np.uint16), np.dtype(np.int16)]) == np.int32
    for mixture in (["int32", "float32"], []):
        with pytest.raises(DatasetError):
            merged_dtype([np.dtype(name) for name in mixture])
    builder = IndexedDatasetBuilder(tmp_path / "both", np.int32)
    builder.add_index(narrow)
    builder.add_index(wide)
    builder.finalize()
    assert [s.tolist() for s in IndexedDataset(tmp_path / "both")[:]] == [[1, 65535], [70000]]
    refusing = IndexedDatasetBuilder(tmp_path / "no", np.uint16)
    with pytest.raises(DatasetError, match="its int32 tokens may not fit uint16"):
        refusing.add_index(wide)
    refusing.abort()


def test_unfinished_files_never_look_whole(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "d", np.int32)
    builder.add_document([1, 2, 3])
    assert os.listdir(tmp_path) == ["d.bin.partial"]
    del builder  # as if killed: a rerun starts over
    build(tmp_path / "d", [[4]])
    assert IndexedDataset(tmp_path / "d")[0].tolist() == [4]
    with pytest.raises(RuntimeError), IndexedDatasetBuilder(tmp_path / "e", np.int32) as failing:
        failing.add_document([1])
        raise RuntimeError
    with IndexedDatasetBuilder(tmp_path / "f", np.int32) as clean:
        clean.add_document([1])
    assert sorted(os.listdir(tmp_path)) == ["d.bin", "d.idx", "f.bin", "f.idx"]
    with pytest.raises(DatasetError, match="already finalized"):
        clean.finalize()


def test_two_writers_of_one_prefix_do_not_mix(tmp_path: Path) -> None:
    first = IndexedDatasetBuilder(tmp_path / "d", np.int32)
    first.add_document([1])
    second = IndexedDatasetBuilder(tmp_path / "d", np.int32)
    second.add_document([2, 2])
    with pytest.raises(DatasetError, match="another process"):
        first.finalize()
    first.abort()
    second.finalize()
    assert IndexedDataset(tmp_path / "d")[0].tolist() == [2, 2]


def test_a_dataset_travels_to_other_processes(tmp_path: Path) -> None:
    dataset = IndexedDataset(build(tmp_path / "d", [[1, 2], [3]]), vocab_size=10)
    again = pickle.loads(pickle.dumps(dataset))
    assert [s.tolist() for s in again[:]] == [[1, 2], [3]]
    assert again.vocab_size == 10
    assert len(pickle.dumps(dataset)) < 1000
