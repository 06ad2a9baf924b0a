"""Batches: labels, positions and masks on any share of a row; the same rows on any layout."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.context_parallel.layout import make_layout
from megatron.core.datasets import (
    BatchLoader,
    DatasetError,
    DocumentSource,
    IndexedDatasetBuilder,
    build_document_source,
)
from megatron.core.datasets.corpus import IndexedCorpus
from megatron.core.datasets.fragments import Fragments
from megatron.core.datasets.row_reader import RowReader, Share
from megatron.core.packed_batch import IGNORE_INDEX, PackedBatch
from tests.datasets.corpora import source_of, write_corpus

X = IGNORE_INDEX


def fragments(*pieces: tuple[int, int, int, bool]) -> Fragments:
    """Of corpus 0: (document, start, length, ends its document)."""
    document, start, length, ends = zip(*pieces)
    return Fragments(
        np.zeros(len(pieces), np.int64), *map(np.array, (document, start, length)), np.array(ends)
    )


def shares(kind: str, seq_length: int, ring: int, ulysses: int = 1) -> list[Share]:
    layout = make_layout(kind, seq_length, ring, ulysses)
    return [Share.of(layout.positions(r, u).numpy()) for r in range(ring) for u in range(ulysses)]


def test_positions_restart_in_each_document_whatever_the_share(tmp_path: Path) -> None:
    reader = RowReader([IndexedCorpus(str(write_corpus(tmp_path / "d", [3, 5])))])
    row = fragments((0, 0, 3, True), (1, 0, 5, True))
    first, second = (reader.read(row, share, 8) for share in shares("zigzag", 8, 2))
    assert (first[0].tolist(), first[2].tolist()) == ([0, 1, 6, 7], [0, 1, 3, 4])
    assert (second[0].tolist(), second[2].tolist()) == ([2, 3, 4, 5], [2, 0, 1, 2])
    running = RowReader([IndexedCorpus(str(tmp_path / "d"))], reset_position_ids=False)
    assert running.read(row, shares("zigzag", 8, 2)[1], 8)[2].tolist() == [2, 3, 4, 5]


def test_one_token_documents_and_documents_on_chunk_edges(tmp_path: Path) -> None:
    reader = RowReader([IndexedCorpus(str(write_corpus(tmp_path / "d", [1, 1, 2, 1, 3])))])
    row = fragments(*((d, 0, n, True) for d, n in enumerate([1, 1, 2, 1, 3])))
    first, second = (reader.read(row, share, 8) for share in shares("zigzag", 8, 2))
    assert [values.tolist() for values in first] == [[0, 1, 6, 7], [X, X, 7, X], [0, 0, 1, 2]]
    assert [values.tolist() for values in second] == [[2, 3, 4, 5], [3, X, X, 6], [0, 1, 0, 0]]


def test_labels_are_shifted_before_the_split(tmp_path: Path) -> None:
    reader = RowReader([IndexedCorpus(str(write_corpus(tmp_path / "d", [8])))])
    row = fragments((0, 0, 8, True))
    first, second = (reader.read(row, share, 8) for share in shares("zigzag", 8, 2))
    assert (first[0].tolist(), first[1].tolist()) == ([0, 1, 6, 7], [1, 2, 7, X])
    assert (second[0].tolist(), second[1].tolist()) == ([2, 3, 4, 5], [3, 4, 5, 6])


def test_a_documents_last_token_in_a_row_predicts_the_first_of_another_row(tmp_path: Path) -> None:
    reader = RowReader([IndexedCorpus(str(write_corpus(tmp_path / "d", [20, 4])))])
    (whole,) = shares("contiguous", 8, 1)
    cut = reader.read(fragments((0, 8, 8, False)), whole, 8)
    assert cut[0].tolist() == list(range(8, 16)) and cut[1].tolist() == list(range(9, 17))
    last = reader.read(fragments((0, 16, 4, True), (1, 0, 4, True)), whole, 8)
    assert last[1].tolist() == [17, 18, 19, X, 21, 22, 23, X]
    assert last[2].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_padding_has_no_loss(tmp_path: Path) -> None:
    reader = RowReader([IndexedCorpus(str(write_corpus(tmp_path / "d", [3])))], pad_token=9)
    for kind in ("contiguous", "zigzag", "striped"):
        got = np.full((3, 8), -1)
        for share in shares(kind, 8, 2):
            for row, values in zip(got, reader.read(fragments((0, 0, 3, True)), share, 8)):
                row[share.positions] = values
        assert got[0].tolist() == [0, 1, 2, 9, 9, 9, 9, 9]
        assert got[1].tolist() == [1, 2, X, X, X, X, X, X]
        assert got[2].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(4))
def test_any_share_is_a_part_of_the_whole_row(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    corpora = [
        IndexedCorpus(str(write_corpus(tmp_path / str(i), rng.integers(1, 90, 30).tolist(), i * 9)))
        for i in range(2)
    ]
    reader = RowReader(corpora, pad_token=1)
    for seq_length in (64, 192, 1024):
        document = rng.integers(0, 30, 200)
        corpus = rng.integers(0, 2, 200)
        size = np.array([corpora[c].document_lengths[d] for c, d in zip(corpus, document)])
        start = rng.integers(0, size)
        length = np.minimum(rng.integers(1, 90, 200), size - start)
        count = int(np.searchsorted(np.cumsum(length), seq_length, "right"))
        row = Fragments(corpus, document, start, length, start + length == size)[:count]
        whole = reader.read(row, Share.of(np.arange(seq_length)), seq_length)
        expected_tokens, expected_labels = [], []
        for c, d, s, n in zip(row.corpus, row.document, row.start, row.length):
            text = corpora[c].dataset[int(d)].tolist() + [X]
            expected_tokens += text[s : s + n]
            expected_labels += text[s + 1 : s + n + 1]
        rest = seq_length - len(expected_tokens)
        assert whole[0].tolist() == expected_tokens + [1] * rest
        assert whole[1].tolist() == expected_labels + [X] * rest
        for kind in ("contiguous", "zigzag", "striped", "balanced"):
            for share in shares(kind, seq_length, 4, 2):
                part = reader.read(row, share, seq_length)
                for got, of_all in zip(part, whole):
                    assert np.array_equal(got, of_all[share.positions])
        scrambled = Share.of(rng.permutation(seq_length))
        for got, of_all in zip(reader.read(row, scrambled, seq_length), whole):
            assert np.array_equal(got, of_all[scrambled.positions])


def loader_of(source: DocumentSource, state: Any = None, **more: Any) -> BatchLoader:
    rules = {"seq_length": 16, "micro_batch_size": 1, "global_batch_size": 4, **more}
    return BatchLoader(source, state, **rules)


def rows_by_id(batches: Sequence[PackedBatch]) -> dict[int, list[int]]:
    return {i: b.tokens[j].tolist() for b in batches for j, i in enumerate(b.sample_ids)}


def test_fields_and_types(tmp_path: Path) -> None:
    loader = loader_of(source_of(tmp_path, [5, 9, 30]), micro_batch_size=2, packing="best-fit")
    batch = loader.next_step()[1]
    for name in ("tokens", "labels", "position_ids"):
        tensor = getattr(batch, name)
        assert tensor.dtype == torch.int64 and tensor.shape == (2, 16)
    assert batch.loss_mask.dtype == torch.float32
    assert torch.equal(batch.loss_mask != 0, batch.labels != IGNORE_INDEX)
    assert int(batch.num_loss_tokens) == int(batch.loss_mask.sum())
    assert [bounds.dtype for bounds in batch.cu_seqlens] == [torch.int32] * 2
    assert all(bounds[0] == 0 and bounds[-1] == 16 for bounds in batch.cu_seqlens)
    assert batch.sample_ids == [2, 3] and batch.seq_length == 16
    moved = batch.to("meta")
    assert moved.tokens.device.type == "meta" and moved.cu_seqlens is batch.cu_seqlens
    assert moved.sample_ids == batch.sample_ids


def test_options_of_masks_and_positions(tmp_path: Path) -> None:
    source = source_of(tmp_path, [5, 3, 4])
    plain = loader_of(source).next_step()[0]
    joined = loader_of(source, reset_attention_mask=False).next_step()[0]
    assert len(plain.cu_seqlens[0]) > 2
    assert joined.cu_seqlens[0].tolist() == [0, 16]
    # A document's last token predicts nothing from the next one, mask or no mask.
    assert torch.equal(joined.labels, plain.labels)
    assert torch.equal(joined.position_ids, plain.position_ids)
    running = loader_of(source, reset_position_ids=False).next_step()[0]
    assert running.position_ids[0].tolist() == list(range(16))
    assert torch.equal(running.cu_seqlens[0], plain.cu_seqlens[0])
    assert 0 in plain.position_ids[0, 1:]
    token = int(plain.tokens[0, plain.labels[0] != X][0])
    masked = loader_of(source, eod_token=token, eod_mask_loss=True).next_step()[0]
    is_eod = plain.tokens == token
    assert is_eod.any() and bool((masked.labels[is_eod] == X).all())
    assert torch.equal(masked.labels[~is_eod], plain.labels[~is_eod])
    assert torch.equal(masked.loss_mask, (masked.labels != X).float())
    # Without --eod-mask-loss the token is like any other.
    unmasked = loader_of(source, eod_token=token).next_step()[0]
    assert torch.equal(unmasked.labels, plain.labels)


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_rows_are_the_same_on_every_layout(packing: str, tmp_path: Path) -> None:
    source = source_of(tmp_path, [5, 9, 30, 1, 2, 17] * 20, [8] * 100)
    whole = loader_of(source, packing=packing, seq_length=32, global_batch_size=12)
    reference = [rows_by_id(whole.next_step()) for _ in range(3)]
    hashes: dict[int, int] = {}
    for dp, micro, ring, ulysses, kind in (
        (3, 2, 1, 1, "contiguous"),
        (1, 4, 2, 2, "zigzag"),
        (2, 3, 4, 1, "striped"),
        (6, 1, 2, 1, "balanced"),
    ):
        got: list[dict[int, list[int]]] = [{}, {}, {}]
        per_replica: list[set[int]] = []
        for d in range(dp):
            loaders = [
                loader_of(
                    source,
                    packing=packing,
                    seq_length=32,
                    micro_batch_size=micro,
                    global_batch_size=12,
                    dp_rank=d,
                    dp_size=dp,
                    ring_rank=r,
                    ulysses_rank=u,
                    layout_fn=lambda cu, a=ring, b=ulysses, k=kind: make_layout(k, 32, a, b, cu),
                )
                for r in range(ring)
                for u in range(ulysses)
            ]
            for step in got:
                batches = [loader.next_step() for loader in loaders]
                for m, shards in enumerate(zip(*batches)):
                    # Every rank of a replica has read the same rows; and says so.
                    assert len({tuple(b.row_hashes) for b in shards}) == 1
                    assert shards[0].sample_ids == shards[-1].sample_ids
                    first = (m * dp + d) * micro
                    local = [i % 12 for i in shards[0].sample_ids]
                    assert local == list(range(first, first + micro))
                    for j, i in enumerate(shards[0].sample_ids):
                        row = np.full(32, -1)
                        for n, shard in enumerate(shards):
                            positions = shard.layout.positions(n // ulysses, n % ulysses)
                            row[positions.numpy()] = shard.tokens[j].numpy()
                        assert i not in step
                        step[i] = row.tolist()
                        assert (
                            hashes.setdefault(i, shards[0].row_hashes[j])
                            == (shards[0].row_hashes[j])
                        )
                    per_replica.append(set(shards[0].row_hashes))
            states = [loader.state for loader in loaders]
            assert all(state == states[0] == whole.state for state in states)
        assert got == reference
        assert len(set().union(*per_replica)) == sum(map(len, per_replica)) == 36


def test_a_rank_that_read_other_rows_is_told_by_its_hash(tmp_path: Path) -> None:
    source = source_of(tmp_path, [5, 9, 30, 1, 2, 17])
    loader, ahead = loader_of(source), loader_of(source)
    ahead.next_step()
    mine, other = loader.next_step()[0], ahead.next_step()[0]
    assert mine.row_hashes != other.row_hashes
    # Same rows by number and boundaries, but from a corpus with other contents.
    (tmp_path / "other").mkdir()
    path = write_corpus(tmp_path / "other" / "c0", [5, 9, 30, 1, 2, 17], first_id=1)
    changed = build_document_source([str(path)], seed=1)
    assert changed is not None
    assert loader_of(changed).next_step()[0].row_hashes != mine.row_hashes


def test_a_rows_hash_depends_on_the_corpus_and_the_place_in_the_document(tmp_path: Path) -> None:
    """One document a corpus, cut into equal rows: number and length are those of all others."""
    hashes = []
    for first_id in (0, 1):
        path = write_corpus(tmp_path / str(first_id), [64], first_id=first_id)
        source = build_document_source([str(path)])
        assert source is not None
        hashes += [batch.row_hashes[0] for batch in loader_of(source).next_step()]
    assert len(set(hashes)) == 8


def test_ids_outside_the_vocabulary_name_their_document(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", np.int32) as builder:
        builder.add_document(list(range(10)))
        builder.add_document([1, 2, 70000, 3])
    source = build_document_source([str(tmp_path / "d")], vocab_size=50257)
    assert source is not None
    for workers in (0, 2):
        loader = loader_of(source, num_workers=workers)
        for _ in range(2):  # a failed step doesn't move the position
            with pytest.raises(DatasetError, match="token 2 of document 1 is id 70000.*of 50257"):
                for _ in range(10):
                    loader.next_step()
        loader.close()


@pytest.mark.parametrize(
    ("kind", "rank", "document", "words"),
    [
        # The rank's last label is the bad token, which another rank reads.
        ("contiguous", 0, 0, "token 32 of document 0 is id 70000"),
        ("striped", 1, 0, "token 32 of document 0 is id 70000"),
        ("contiguous", 0, 1, "token 1 of document 1 is id -7"),
        ("striped", 1, 1, "token 1 of document 1 is id -7"),
    ],
)
def test_labels_and_negative_ids_are_checked_too(
    kind: str, rank: int, document: int, words: str, tmp_path: Path
) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", np.int32) as builder:
        builder.add_document([1] * 32 + [70000] + [2] * 31)
        builder.add_document([1, -7] + [2] * 62)
    reader = RowReader([IndexedCorpus(str(tmp_path / "d"))], vocab_size=50257)
    with pytest.raises(DatasetError, match=f"{words}, outside the vocabulary of 50257"):
        reader.read(fragments((document, 0, 64, True)), shares(kind, 64, 2)[rank], 64)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"global_batch_size": 10, "micro_batch_size": 4}, r"use 8 or 12"),
        ({"global_batch_size": 3, "dp_size": 4}, r"use 4$"),
        ({"seq_length": 0}, "--seq-length 0 must be at least 1"),
        ({"micro_batch_size": 0}, "--micro-batch-size 0"),
        ({"dp_rank": 2, "dp_size": 2}, "data-parallel rank 2"),
        ({"ring_rank": 1}, "needs a layout"),
        ({"eod_mask_loss": True}, "--eod-mask-loss needs"),
        ({"packing": "x"}, "--packing x"),
        ({"num_workers": -1}, "--num-workers -1"),
    ],
)
def test_bad_arguments_are_refused(rules: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=message):
        loader_of(source_of(tmp_path, [5]), **rules)


def test_one_position_for_any_number_of_ranks(tmp_path: Path) -> None:
    """Resume dp 4 -> 2, 1, 8 and with cp 2: later rows equal the unbroken run."""
    source = source_of(tmp_path, [5, 9, 30, 1, 2, 17] * 3)
    common = {"global_batch_size": 8, "seq_length": 16}
    unbroken = loader_of(source, **common)
    steps = [rows_by_id(unbroken.next_step()) for _ in range(6)]
    first = [loader_of(source, **common, dp_rank=d, dp_size=4) for d in range(4)]
    for loader in first:
        for _ in range(2):
            loader.next_step()
    state = json.loads(json.dumps(first[3].state))
    assert all(loader.state == state for loader in first)
    assert state["consumed_samples"] == 16 and state["consumed_tokens"] == 256
    for dp, ring in ((2, 1), (1, 1), (8, 1), (2, 2)):
        ranks = [
            loader_of(
                source,
                state,
                **common,
                dp_rank=d,
                dp_size=dp,
                ring_rank=r,
                layout_fn=lambda cu, ring=ring: make_layout("contiguous", 16, ring, 1, cu),
            )
            for d in range(dp)
            for r in range(ring)
        ]
        for expected in steps[2:]:
            got: dict[int, list[int]] = {}
            for rank in ranks:
                for i, tokens in rows_by_id(rank.next_step()).items():
                    got.setdefault(i, []).extend(tokens)
            assert got == expected


@pytest.mark.parametrize("dp", [1, 3])
def test_epochs_run_on_and_every_resume_is_exact(dp: int, tmp_path: Path) -> None:
    """10 samples an epoch, 3 epochs, batch 3: each k steps + resume give the unbroken ids."""
    source = source_of(tmp_path, [16] * 10)
    common = {"global_batch_size": 3, "seq_length": 16, "dp_size": dp}

    def run(state: Any, steps: int) -> tuple[list[int], Any]:
        ranks = [loader_of(source, state, **common, dp_rank=d) for d in range(dp)]
        seen = []
        for _ in range(steps):
            rows: dict[int, list[int]] = {}
            for rank in ranks:
                rows.update(rows_by_id(rank.next_step()))
            seen += [rows[i][0] // 16 for i in sorted(rows)]
        return seen, json.loads(json.dumps(ranks[0].state))

    unbroken, _ = run(None, 10)
    for epoch in range(3):
        assert sorted(unbroken[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert unbroken[:10] != unbroken[10:20] != unbroken[20:30]
    for k in range(11):
        before, state = run(None, k)
        middle, state = run(state, (10 - k) // 2)
        after, _ = run(state, 10 - k - (10 - k) // 2)
        assert before + middle + after == unbroken


def test_pieces_begun_under_another_blend_are_finished(tmp_path: Path) -> None:
    long = str(write_corpus(tmp_path / "long", [100, 100, 100]))
    short = str(write_corpus(tmp_path / "short", [10] * 50, first_id=1000))
    first, second = (build_document_source([path]) for path in (long, short))
    assert first is not None and second is not None
    loader = loader_of(first, seq_length=30, global_batch_size=1)
    begun = loader.next_step()[0].tokens[0].tolist()
    other = loader_of(second, loader.state, seq_length=100, global_batch_size=1)
    row = other.next_step()[0].tokens[0].tolist()
    assert row[:70] == list(range(begun[-1] + 1, begun[-1] + 71))
    assert all(token >= 1000 for token in row[70:])
    state = loader.state
    Path(long + ".idx").rename(tmp_path / "gone.idx")
    with pytest.raises(DatasetError, match="documents of .*long were begun"):
        loader_of(second, state)
    write_corpus(tmp_path / "long", [100, 100, 101])
    with pytest.raises(DatasetError, match="isn't the corpus it was"):
        loader_of(second, state)
    with pytest.raises(DatasetError, match="lacks .'stream'."):
        loader_of(first, {"corpora": [], "pieces": []})


def test_padding_rate_and_token_counts(tmp_path: Path) -> None:
    source = source_of(tmp_path, [11] * 20)
    loader = loader_of(source, packing="best-fit")
    loader.next_step()
    assert loader.consumed_tokens == 44 and loader.consumed_samples == 4
    assert loader.state["padded_tokens"] == 20
    assert loader.padding_rate == 20 / 64
    assert loader.next_step()[0].cu_seqlens[0].tolist() == [0, 11, 16]


def test_a_packed_batch_of_131072_tokens_stays_below_10_mb(tmp_path: Path) -> None:
    import tracemalloc

    lengths = np.random.default_rng(0).integers(1, 1500, 1000).tolist()
    loader = loader_of(source_of(tmp_path, lengths), seq_length=131072, global_batch_size=1)
    loader.next_step()
    tracemalloc.start()
    (batch,) = loader.next_step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size = sum(
        tensor.numel() * tensor.element_size()
        for tensor in (batch.tokens, batch.labels, batch.loss_mask, batch.position_ids)
    )
    assert size + 4 * len(batch.cu_seqlens[0]) < 4e6
    assert peak < 10e6, peak


def test_a_rank_of_a_million_token_row_does_its_share_only(tmp_path: Path) -> None:
    import tracemalloc

    lengths = np.random.default_rng(0).integers(1, 1500, 3000).tolist()
    loader = loader_of(
        source_of(tmp_path, lengths),
        seq_length=1 << 20,
        global_batch_size=1,
        ring_rank=5,
        layout_fn=lambda cu: make_layout("zigzag", 1 << 20, 32, 1, cu),
    )
    loader.next_step()
    tracemalloc.start()
    (batch,) = loader.next_step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert batch.tokens.shape == (1, 1 << 15)
    assert peak < 6e6, peak  # a whole row of int64 would be 8.4e6
