"""Several token files become one, in the order of a single run.

All pairs of a folder are joined. Shards that ``preprocess_data.py`` wrote carry notes: they are
ordered by their index, and a set with one missing, twice there, or made by another tokenizer is
refused. Pairs without notes go by the natural order of their names. Cost: one copy of the tokens;
memory 12 bytes a document.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence

from megatron.core.datasets.index_format import merged_dtype
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.core.datasets.preprocessing.inputs import natural_key
from megatron.core.datasets.preprocessing.output import (
    NOTE_SUFFIX,
    ShardNote,
    check_output,
    pair_prefix,
    read_note,
    signals_held,
)
from megatron.core.datasets.preprocessing.records import CorpusError
from megatron.core.datasets.preprocessing.shares import Share


@dataclasses.dataclass(frozen=True)
class Merged:
    """One file made of several."""

    prefix: str
    parts: list[str]
    documents: int
    tokens: int
    dtype: str


def merge(
    folder: str,
    output_prefix: str,
    keys: Sequence[str] | None = None,
    log: Callable[[str], None] = print,
) -> list[Merged]:
    """Join the pairs of ``folder``.

    Args:
        folder: where the pairs are (folders inside it are not looked at).
        output_prefix: writes ``P.bin/.idx``; with ``keys``, ``P_KEY_document.bin/.idx`` of each.
        keys: JSON keys whose pairs (``..._KEY_document``) are joined apart.

    Raises:
        ValueError: naming what is missing, unfinished, damaged or doesn't belong together.
    """
    if not os.path.isdir(folder):
        raise CorpusError(f"--input {folder}: no such folder")
    check_output(output_prefix, tuple(keys or ()), Share())
    outputs = [pair_prefix(output_prefix, key) for key in keys] if keys else [output_prefix]
    found = _pairs(folder, {os.path.realpath(prefix) for prefix in outputs}, log)
    merged = []
    for output, key in zip(outputs, keys or (None,)):
        parts = [p for p in found if key is None or p.endswith(f"_{key}_document")]
        if not parts:
            raise CorpusError(
                f"--input {folder}: no pair of .bin and .idx files"
                + (f" for key {key}" if key else "")
            )
        merged.append((output, _in_order(folder, parts)))
    return [_join(output, parts) for output, parts in merged]


def _pairs(folder: str, outputs: set[str], log: Callable[[str], None]) -> list[str]:
    """Prefixes of the whole pairs in a folder, by natural order of their names."""
    names = {entry.name for entry in os.scandir(folder)}
    stems = {name.removesuffix(".partial")[:-4] for name in names if _is_part(name)}
    prefixes = []
    for stem in sorted(stems, key=natural_key):
        prefix = os.path.join(folder, stem)
        if os.path.realpath(prefix) in outputs:
            continue
        if stem + ".idx" not in names or stem + ".bin" not in names:
            raise CorpusError(
                f"{prefix}: unfinished: no {'.idx' if stem + '.idx' not in names else '.bin'} "
                f"file; write it again, or move what is left of it away"
            )
        if {stem + ".bin.partial", stem + ".idx.partial"} & names:
            log(f"warning: {prefix}: whole, but a later unfinished run left .partial")
        prefixes.append(prefix)
    return prefixes


def _is_part(name: str) -> bool:
    return name.endswith((".bin", ".idx", ".bin.partial", ".idx.partial"))


def _in_order(folder: str, prefixes: list[str]) -> list[str]:
    """The parts in the order of a single run.

    Raises:
        CorpusError: if notes say that they are not one complete set.
    """
    noted = [(read_note(prefix), prefix) for prefix in prefixes]
    notes = [(note, prefix) for note, prefix in noted if note is not None]
    if not notes:
        return prefixes
    if len(notes) < len(noted):
        without = next(prefix for note, prefix in noted if note is None)
        raise CorpusError(
            f"{folder}: {notes[0][1]} is a shard, {without} is not (no {NOTE_SUFFIX} beside it); "
            f"merge them apart"
        )
    for what in ("key", "num_shards", "vocab_size"):
        values = {getattr(note, what): prefix for note, prefix in notes}
        if len(values) > 1:
            cure = "; choose with --json-keys" if what == "key" else ""
            listed = ", ".join(f"{value} ({prefix})" for value, prefix in values.items())
            raise CorpusError(f"{folder}: shards differ in {what}: {listed}{cure}")
    _check_complete(folder, notes)
    return [prefix for _, prefix in sorted(notes, key=lambda item: item[0].shard_index)]


def _check_complete(folder: str, notes: list[tuple[ShardNote, str]]) -> None:
    count = notes[0][0].num_shards
    by_index: dict[int, str] = {}
    for note, prefix in notes:
        if note.shard_index in by_index:
            raise CorpusError(
                f"{folder}: shard {note.shard_index} is there twice: "
                f"{by_index[note.shard_index]} and {prefix}"
            )
        by_index[note.shard_index] = prefix
    missing = [index for index in range(count) if index not in by_index]
    if missing:
        raise CorpusError(
            f"{folder}: {len(missing)} of {count} shards missing: "
            f"{', '.join(map(str, missing[:20]))}; run those tasks again (--shard-index)"
        )


def _join(output: str, parts: list[str]) -> Merged:
    datasets = [IndexedDataset(prefix) for prefix in parts]
    documents = sum(dataset.num_documents for dataset in datasets)
    tokens = sum(dataset.num_tokens for dataset in datasets)
    if not documents:
        raise CorpusError(f"{output}: the {len(parts)} pairs hold no document; nothing was written")
    dtype = merged_dtype([dataset.dtype for dataset in datasets])
    for prefix, dataset in zip(parts, datasets):
        _check_note(prefix, dataset)
    del datasets
    builder = IndexedDatasetBuilder(output, dtype)
    try:
        for prefix in parts:
            builder.add_index(prefix)
        with signals_held():
            if os.path.exists(output + NOTE_SUFFIX):
                os.unlink(output + NOTE_SUFFIX)
            builder.finalize()
    except BaseException:
        builder.abort()
        raise
    return Merged(output, parts, documents, tokens, str(dtype))


def _check_note(prefix: str, dataset: IndexedDataset) -> None:
    note = read_note(prefix)
    if note is None:
        return
    there = (dataset.num_documents, dataset.num_tokens)
    if there != (note.documents, note.tokens):
        raise CorpusError(
            f"{prefix}: {there[0]} documents and {there[1]} tokens, but its {NOTE_SUFFIX} says "
            f"{note.documents} and {note.tokens}; write the shard again"
        )
