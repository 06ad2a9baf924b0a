"""Packing against brute force, and what each packing promises."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets import DatasetError, MockCorpus, build_document_source
from megatron.core.datasets.document_source import DocumentSource
from megatron.core.datasets.fragments import Fragments, PackedRows
from megatron.core.datasets.packing import pack_best_fit, pack_concat, pack_rows
from tests.datasets.corpora import source_of

Piece = tuple[int, int, int, bool]  # document, start, length, ends its document


def pieces_of(rows: PackedRows) -> list[list[Piece]]:
    result = []
    for row in range(rows.num_rows):
        p = rows.row(row)
        columns = (p.document, p.start, p.length, p.ends_document)
        result.append(list(zip(*(column.tolist() for column in columns))))
    return result


def concat_by_hand(lengths: list[tuple[int, int]], rows: int, seq_length: int) -> list[list[Piece]]:
    result: list[list[Piece]] = []
    coming = [(document, 0, length) for document, length in lengths]
    for _ in range(rows):
        row, room = [], seq_length
        while room:
            document, start, left = coming.pop(0)
            take = min(room, left)
            row.append((document, start, take, take == left))
            if take < left:
                coming.insert(0, (document, start + take, left - take))
            room -= take
        result.append(row)
    return result


def best_fit_by_hand(
    lengths: list[tuple[int, int]], rows: int, seq_length: int, window: int
) -> list[list[Piece]]:
    """The rule of the packing module, read literally."""
    coming = [(document, 0, length, True) for document, length in lengths]
    view: list[tuple[int, int, int, bool]] = []
    result = []
    for _ in range(rows):
        while len(view) < window:
            view.append(coming.pop(0))
        row, room = [], seq_length
        if view[0][2] > seq_length:
            document, start, left, ends = view[0]
            result.append([(document, start, seq_length, False)])
            view[0] = (document, start + seq_length, left - seq_length, ends)
            continue
        while view and view[0][2] <= room:
            piece = view.pop(0)
            room -= piece[2]
            row.append(piece)
        while room:
            over = [left if left < seq_length else left % seq_length for _, _, left, _ in view]
            fitting = [n for n in over if 0 < n <= room]
            if not fitting:
                break
            at = over.index(max(fitting))
            document, start, left, ends = view[at]
            take = over[at]
            row.append((document, start + left - take, take, ends))
            if take == left:
                view.pop(at)
            else:
                view[at] = (document, start, left - take, False)
            room -= take
        result.append(row)
    return result


LENGTHS = [5, 1, 40, 9, 16, 3, 17, 2, 2, 31, 100, 8, 7]


@pytest.fixture
def source(tmp_path: Path) -> DocumentSource:
    return source_of(tmp_path, LENGTHS)


def order_of(source: DocumentSource, count: int) -> list[tuple[int, int]]:
    coming = source.reader().upcoming(count)
    return list(zip(coming.document.tolist(), coming.length.tolist()))


@pytest.mark.parametrize("seq_length", [1, 7, 16, 64, 500])
@pytest.mark.parametrize("rows_at_once", [1, 3, 20])
def test_concat_is_the_stream_cut_at_row_ends(
    source: DocumentSource, seq_length: int, rows_at_once: int
) -> None:
    reader, pending, got = source.reader(), Fragments.empty(), []
    for _ in range(20 // rows_at_once):
        rows, pending = pack_concat(reader, pending, num_rows=rows_at_once, seq_length=seq_length)
        got += pieces_of(rows)
    assert got == concat_by_hand(order_of(source, 1000), len(got), seq_length)
    assert len(pending) <= 1


@pytest.mark.parametrize("seq_length", [1, 7, 16, 64, 500])
@pytest.mark.parametrize("rows_at_once", [1, 3, 60])
@pytest.mark.parametrize("window", [1, 2, 8, 50])
def test_best_fit_does_what_it_says(
    source: DocumentSource, seq_length: int, rows_at_once: int, window: int
) -> None:
    reader, pending, got = source.reader(), Fragments.empty(), []
    for _ in range(60 // rows_at_once):
        rows, pending = pack_best_fit(
            reader, pending, num_rows=rows_at_once, seq_length=seq_length, window=window
        )
        got += pieces_of(rows)
        assert len(pending) <= window
    assert got == best_fit_by_hand(order_of(source, 5000), len(got), seq_length, window)


@pytest.mark.parametrize("seq_length", [8, 16, 64])
def test_best_fit_cuts_only_documents_longer_than_the_row(
    source: DocumentSource, seq_length: int
) -> None:
    rows, pending = pack_best_fit(
        source.reader(), Fragments.empty(), num_rows=500, seq_length=seq_length
    )
    for row in pieces_of(rows):
        assert 0 < sum(length for _, _, length, _ in row) <= seq_length
        for document, start, length, ends in row:
            if LENGTHS[document] <= seq_length:
                assert (start, length, ends) == (0, LENGTHS[document], True)
            else:
                assert start % seq_length == 0
                assert length == min(seq_length, LENGTHS[document] - start)
                assert ends == (start + length == LENGTHS[document])


def test_padding_is_the_last_document_of_a_row() -> None:
    nothing = np.zeros(2, dtype=np.int64)
    pieces = Fragments(nothing, nothing, nothing, np.array([3, 2]), np.array([True, True]))
    rows = PackedRows(pieces, np.array([0, 2]), 8)
    assert rows.cu_seqlens(0).tolist() == [0, 3, 5, 8]
    assert rows.cu_seqlens(0).dtype == np.int32
    assert PackedRows(pieces, np.array([0, 2]), 5).cu_seqlens(0).tolist() == [0, 3, 5]


def mock_source(count: int, median: float, sigma: float) -> DocumentSource:
    source = build_document_source(None, corpora=[MockCorpus(count, median=median, sigma=sigma)])
    assert source is not None
    return source


@pytest.mark.parametrize(("median", "sigma"), [(665, 1.2), (4900, 1.8), (60000, 1.0)])
@pytest.mark.parametrize("seq_length", [8192, 131072])
def test_best_fit_pads_less_than_one_percent(median: float, sigma: float, seq_length: int) -> None:
    source = mock_source(20_000, median, sigma)
    rows, _ = pack_best_fit(
        source.reader(), Fragments.empty(), num_rows=1000, seq_length=seq_length
    )
    padding = 1 - rows.num_tokens / (1000 * seq_length)
    assert padding < (0.001 if seq_length == 8192 else 0.005), padding


def test_packings_follow_each_other_without_loss(source: DocumentSource) -> None:
    reader, pending, seen = source.reader(), Fragments.empty(), Counter()
    rng = np.random.default_rng(3)
    for _ in range(40):
        packing = ("concat", "best-fit")[int(rng.integers(2))]
        seq_length, count = int(rng.integers(1, 60)), int(rng.integers(1, 5))
        rows, pending = pack_rows(packing, reader, pending, num_rows=count, seq_length=seq_length)
        for row in pieces_of(rows):
            for document, start, length, ends in row:
                seen.update((document, i) for i in range(start, start + length))
                assert ends == (start + length == LENGTHS[document])
    for document, start, length in zip(pending.document, pending.start, pending.length):
        seen.update((int(document), int(i)) for i in range(start, start + length))
    drawn = source.reader().upcoming(reader.position().documents).document.tolist()
    assert seen == Counter((d, i) for d in drawn for i in range(LENGTHS[d]))


def test_an_unknown_packing_is_refused(source: DocumentSource) -> None:
    with pytest.raises(DatasetError, match="--packing first-fit must be one of concat, best-fit"):
        pack_rows("first-fit", source.reader(), Fragments.empty(), num_rows=1, seq_length=8)


def test_a_billion_tokens_pack_in_seconds_and_below_a_gigabyte() -> None:
    """A million documents for 128K tokens, in a process of its own to see its memory."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "tools/benchmark_data.py", "--only", "packing", "open", "--json"]
    done = subprocess.run(
        [*command, "--seq-lengths", "131072"], cwd=root, check=True, capture_output=True, text=True
    )
    result = json.loads(done.stdout)
    packing = result["packing"]
    assert packing["documents"] == 1_000_000 and packing["tokens"] > 0.99e9
    # CPU time: other work on the machine doesn't count.
    assert packing["concat_131072"]["cpu_seconds"] < 1
    assert packing["best-fit_131072"]["cpu_seconds"] < 5
    assert packing["best-fit_131072"]["padding"] < 0.001
    assert packing["peak_rss_mb"] < 1000
    assert result["open"]["open_cpu_ms"] < 50
