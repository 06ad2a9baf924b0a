"""The blended stream: exact weights, each document once an epoch, one position."""

import heapq
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets import DatasetError, MockCorpus, build_document_source
from megatron.core.datasets.document_source import DocumentSource
from megatron.core.datasets.document_stream import Component, StreamReader
from megatron.core.datasets.shuffle import draw, stream_key
from tests.datasets.corpora import documents_of, source_of, write_corpora


def by_hand(source: DocumentSource, count: int) -> list[tuple[int, int]]:
    """(corpus, document) of the stream, one document at a time from a heap."""
    drawn, tokens = [0] * len(source.components), [0] * len(source.components)
    heap: list[tuple[float, int, int, int]] = []

    def push(i: int) -> None:
        component = source.components[i]
        while True:
            key = stream_key("order", source.seed, component.name)
            place = int(draw(drawn[i], 1, len(component.documents), key)[0])
            drawn[i] += 1
            document = int(component.documents[place])
            length = int(component.corpus.document_lengths[document])
            if length:
                break
        due = (tokens[i] + length - length / 2) / component.weight
        tokens[i] += length
        heapq.heappush(heap, (due, i, component.corpus_number, document))

    for i in range(len(source.components)):
        push(i)
    result = []
    for _ in range(count):
        _, i, corpus, document = heapq.heappop(heap)
        result.append((corpus, document))
        push(i)
    return result


def test_the_stream_is_fair_queueing(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    corpora = [rng.integers(0, 40, n).tolist() for n in (7, 30, 100)]
    paths = write_corpora(tmp_path, corpora)
    blend = [text for pair in zip(("0.2", "0.5", "0.3"), paths) for text in pair]
    source = build_document_source(blend, seed=9, long_document_upsampling=["20:2"])
    assert source is not None
    coming = source.reader().upcoming(3000)
    pairs = list(zip(coming.corpus.tolist(), coming.document.tolist()))
    assert pairs == by_hand(source, 3000)


def test_every_document_comes_once_an_epoch_in_ever_new_order(tmp_path: Path) -> None:
    lengths = [3, 0, 5, 1, 0, 2, 8, 4]
    source = source_of(tmp_path, lengths)
    per_epoch = sum(1 for length in lengths if length)
    coming = source.reader().upcoming(per_epoch * 50).document.reshape(50, per_epoch)
    wanted = [i for i, length in enumerate(lengths) if length]
    for epoch in coming.tolist():
        assert sorted(epoch) == wanted
    assert len({tuple(epoch) for epoch in coming.tolist()}) > 40


def test_weights_are_exact_in_tokens_at_any_moment() -> None:
    corpora = [
        MockCorpus(2000, seed=1),
        MockCorpus(500, seed=2, median=60000, sigma=1.0),
        MockCorpus(3, seed=3),
    ]
    weights = (0.7, 0.299, 0.001)
    components = [
        Component(str(i), corpus, i, range(corpus.num_documents), corpus.num_tokens, weight)
        for i, (corpus, weight) in enumerate(zip(corpora, weights))
    ]
    coming = StreamReader(components, 1).upcoming(50_000)
    total = np.cumsum(coming.length)
    largest = max(int(corpus.document_lengths.max()) for corpus in corpora)
    for i, weight in enumerate(weights):
        mine = np.cumsum(np.where(coming.corpus == i, coming.length, 0))
        assert np.abs(mine - weight * total).max() <= 1.5 * largest
        assert mine[-1] / total[-1] == pytest.approx(weight, abs=1e-3)


def test_a_saved_position_goes_on_exactly(tmp_path: Path) -> None:
    source = source_of(tmp_path, [3, 1, 0, 7, 2], [5] * 11, [40])
    whole = documents_of(source, 400)
    reader, state = source.reader(), None
    steps = np.random.default_rng(0).integers(0, 9, 80)
    for step in steps.tolist():
        reader = source.reader(state)
        reader.upcoming(step + 3)
        reader.advance(step)
        state = json.loads(json.dumps(reader.position().state()))
    done = int(steps.sum())
    assert state is not None and state["documents"] == done
    assert documents_of(source, 400 - done, state) == whole[done:]


def test_looking_ahead_changes_nothing(tmp_path: Path) -> None:
    source = source_of(tmp_path, [3, 1, 7, 2], [5] * 11)
    hasty, patient = source.reader(), source.reader()
    hasty.upcoming(5000)
    for _ in range(20):
        hasty.advance(7)
        patient.upcoming(7)
        patient.advance(7)
        assert hasty.position().state() == patient.position().state()
        assert hasty.upcoming(9).document.tolist() == patient.upcoming(9).document.tolist()


def test_another_blend_goes_on_where_each_corpus_stood(tmp_path: Path) -> None:
    first, second, third = write_corpora(tmp_path, [[2] * 40, [3] * 40, [4] * 40])

    def source(*blend: str) -> DocumentSource:
        built = build_document_source(list(blend), seed=3)
        assert built is not None
        return built

    seen: list[list[int]] = []

    def consume(built: DocumentSource, count: int, state: dict | None) -> dict:
        seen.extend(documents_of(built, count, state))
        reader = built.reader(state)
        reader.upcoming(count)
        reader.advance(count)
        return json.loads(json.dumps(reader.position().state()))

    state = consume(source("1", first, "1", second), 30, None)
    state = consume(source("1", third, "3", first), 25, state)
    state = consume(source("9", second, "1", third), 10, state)
    state = consume(source("1", first), 1, state)
    assert state["documents"] == 66
    assert len({tuple(document) for document in seen}) == 66
    # Up to the end of the first epoch, then a new order.
    left = 40 - sum(len(document) == 2 for document in seen)
    consume(source("1", first), left, state)
    assert sum(len(document) == 2 for document in seen) == 40
    assert len({tuple(document) for document in seen if len(document) == 2}) == 40


def test_shares_hold_again_from_a_change_of_blend_on(tmp_path: Path) -> None:
    first, second = write_corpora(tmp_path, [[2] * 100, [2] * 100])
    before = build_document_source(["99", first, "1", second])
    after = build_document_source(["1", first, "1", second])
    assert before is not None and after is not None
    reader = before.reader()
    reader.upcoming(1000)
    reader.advance(1000)
    coming = after.reader(reader.position().state()).upcoming(100)
    assert np.bincount(coming.corpus).tolist() == [50, 50]


def test_the_order_depends_on_contents_not_on_folders(tmp_path: Path) -> None:
    paths = write_corpora(tmp_path, [[3, 1, 7, 2] * 5, [5] * 11])
    (tmp_path / "moved").mkdir()
    moved = []
    for path in paths:
        name = Path(path).name
        for extension in (".bin", ".idx"):
            shutil.copy(path + extension, tmp_path / "moved" / (name + extension))
        moved.append(str(tmp_path / "moved" / name))
    here, there = build_document_source(paths), build_document_source(moved)
    assert here is not None and there is not None
    assert documents_of(here, 100) == documents_of(there, 100)
    assert build_document_source(paths, seed=5) is not None


def test_seeds_give_other_orders_and_never_mix(tmp_path: Path) -> None:
    one, two = source_of(tmp_path, [3] * 50, seed=1), source_of(tmp_path, [3] * 50, seed=2)
    assert documents_of(one, 50) != documents_of(two, 50)
    state = one.reader().position().state()
    with pytest.raises(DatasetError, match="belongs to seed 1, but --seed is 2.*pass --seed 1"):
        two.reader(state)
    del state["drawn"]
    with pytest.raises(DatasetError, match="lacks .'drawn'."):
        one.reader(state)


class _Huge:
    """One-document corpora of 2^30 tokens that are never read."""

    name = identity = "huge"
    num_documents, num_tokens = 5, 5 << 30
    document_lengths = np.full(5, 1 << 30, dtype=np.int32)


def test_counts_beyond_32_bits_stay_right() -> None:
    component = Component("huge", _Huge(), 0, range(5), 5 << 30, 1.0)  # type: ignore[arg-type]
    reader = StreamReader([component], 1)
    for passed in range(1, 20):
        reader.upcoming(1)
        reader.advance(1)
        assert reader.position().state()["tokens"] == [passed << 30]
