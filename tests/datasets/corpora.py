"""Small corpora whose token ids say where they come from."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.core.datasets import DocumentSource, build_document_source
from megatron.core.datasets.index_format import pack_index
from megatron.core.datasets.row_planner import DataPosition


def write_corpus(prefix: Path, lengths: Sequence[int], first_id: int = 0) -> Path:
    """Documents of these lengths; ids count up over the whole corpus from ``first_id``."""
    total = sum(lengths)
    Path(f"{prefix}.idx").write_bytes(
        pack_index(np.int32, np.array(lengths, np.int32), np.arange(len(lengths) + 1))
    )
    Path(f"{prefix}.bin").write_bytes(
        np.arange(first_id, first_id + total, dtype=np.int32).tobytes()
    )
    return prefix


def write_corpora(folder: Path, corpora: Sequence[Sequence[int]]) -> list[str]:
    """Several corpora with ids that never repeat."""
    prefixes, first = [], 0
    for number, lengths in enumerate(corpora):
        prefixes.append(str(write_corpus(folder / f"c{number}", lengths, first)))
        first += sum(lengths)
    return prefixes


def source_of(folder: Path, *corpora: Sequence[int], seed: int = 1) -> DocumentSource:
    """A source of these corpora, blended by size."""
    source = build_document_source(write_corpora(folder, corpora), seed=seed)
    assert source is not None
    return source


def documents_of(source: DocumentSource, count: int, state: dict | None = None) -> list[list[int]]:
    """Token ids of the next ``count`` documents of the stream."""
    coming = source.reader(state).upcoming(count)
    result = []
    for corpus, document in zip(coming.corpus.tolist(), coming.document.tolist()):
        begin = int(source.corpora[corpus].document_starts(np.array([document]))[0])
        length = int(source.corpora[corpus].document_lengths[document])
        result.append(source.corpora[corpus].read(begin, begin + length).tolist())
    return result


def pending_ids(position: DataPosition) -> list[int]:
    """Token ids that were drawn from the stream but not put into rows yet."""
    ids: list[int] = []
    pieces = position.pending
    for i in range(len(pieces)):
        corpus = position.corpora[int(pieces.corpus[i])]
        begin = int(corpus.document_starts(pieces.document[i : i + 1])[0]) + int(pieces.start[i])
        ids += corpus.read(begin, begin + int(pieces.length[i])).tolist()
    return ids
