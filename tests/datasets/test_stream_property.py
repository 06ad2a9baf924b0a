"""The promise of the data room: whatever the sizes, ranks and interruptions, no token is lost,
repeated or torn out of its document.

Random corpora and blends run through random stages (packing, sequence length, batch sizes, data
and context parallelism, layout), read by every rank of the stage. Token ids say where they come
from, so what was consumed is compared with the stream itself, label by label.
"""

import dataclasses
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.core.context_parallel.layout import make_layout
from megatron.core.datasets import BatchLoader, DocumentSource, build_document_source
from megatron.core.datasets.row_planner import RowPlanner
from megatron.core.packed_batch import IGNORE_INDEX, PackedBatch
from tests.datasets.corpora import documents_of, pending_ids, write_corpora

PAD = 1 << 20
SETTINGS = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    "print_blob": True,
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a run and where it is interrupted (steps taken before each restart)."""

    packing: str
    seq_length: int
    micro_batch_size: int
    num_microbatches: int
    dp: int
    ring: int
    ulysses: int
    layout: str
    steps: int
    interruptions: tuple[int, ...]
    num_workers: int
    window: int

    @property
    def rows(self) -> int:
        return self.micro_batch_size * self.num_microbatches * self.dp


@st.composite
def stages(draw: Any, packings: tuple[str, ...]) -> Stage:
    ring, ulysses = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 1), (2, 2)]))
    unit = 2 * ring * ulysses
    steps = draw(st.integers(1, 4))
    return Stage(
        packing=draw(st.sampled_from(packings)),
        seq_length=unit * draw(st.integers(1, 40 // unit + 1)),
        micro_batch_size=draw(st.integers(1, 2)),
        num_microbatches=draw(st.integers(1, 2)),
        dp=draw(st.integers(1, 3)),
        ring=ring,
        ulysses=ulysses,
        layout=draw(st.sampled_from(["contiguous", "zigzag", "striped", "balanced"])),
        steps=steps,
        interruptions=tuple(draw(st.lists(st.integers(1, steps), max_size=2))),
        num_workers=draw(st.sampled_from([0, 0, 2])),
        window=draw(st.sampled_from([1, 3, 10, 50])),
    )


@st.composite
def corpora(draw: Any) -> list[list[int]]:
    length = st.one_of(st.integers(0, 6), st.integers(1, 30), st.integers(50, 130))
    found = draw(
        st.lists(st.lists(length, min_size=1, max_size=12), min_size=1, max_size=3).filter(
            lambda c: all(sum(lengths) for lengths in c)
        )
    )
    return list(found)


def loaders_of(source: DocumentSource, state: Any, stage: Stage) -> list[BatchLoader]:
    """One loader a rank: data-parallel, then ring, then ulysses."""

    def layout(cu_seqlens: Any) -> Any:
        return make_layout(stage.layout, stage.seq_length, stage.ring, stage.ulysses, cu_seqlens)

    return [
        BatchLoader(
            source,
            state,
            packing=stage.packing,
            best_fit_window=stage.window,
            seq_length=stage.seq_length,
            micro_batch_size=stage.micro_batch_size,
            global_batch_size=stage.rows,
            dp_rank=d,
            dp_size=stage.dp,
            ring_rank=r,
            ulysses_rank=u,
            layout_fn=layout,
            eod_token=PAD,
            num_workers=stage.num_workers,
        )
        for d in range(stage.dp)
        for r in range(stage.ring)
        for u in range(stage.ulysses)
    ]


def whole_rows(batches: list[list[PackedBatch]], stage: Stage) -> dict[int, np.ndarray]:
    """Row number -> [3, S]: tokens, labels and positions, put together from all ranks."""
    rows: dict[int, np.ndarray] = {}
    ranks = stage.ring * stage.ulysses
    for n, of_rank in enumerate(batches):
        r, u = divmod(n % ranks, stage.ulysses)
        for batch in of_rank:
            at = batch.layout.positions(r, u).numpy()
            for j, number in enumerate(batch.sample_ids):
                row = rows.setdefault(number, np.full((3, stage.seq_length), -1))
                assert (row[:, at] == -1).all()
                row[:, at] = [
                    tensor[j].numpy() for tensor in (batch.tokens, batch.labels, batch.position_ids)
                ]
                check_boundaries(batch.cu_seqlens[j].tolist(), at, row)
    assert all((row[:2] != -1).all() for row in rows.values())
    return rows


def check_boundaries(bounds: list[int], at: np.ndarray, row: np.ndarray) -> None:
    """Positions are those within the documents that cu_seqlens lists."""
    assert bounds[0] == 0 and bounds[-1] == row.shape[1]
    assert all(a < b for a, b in zip(bounds, bounds[1:]))
    starts = np.array(bounds)[np.searchsorted(bounds, at, "right") - 1]
    assert np.array_equal(row[2, at], at - starts)


def run_stage(
    source: DocumentSource, state: Any, stage: Stage, interrupted: bool
) -> tuple[list[np.ndarray], Any, BatchLoader]:
    """All rows of the stage in order, the state after it, and a loader that stands there."""
    ranks = loaders_of(source, state, stage)
    result: list[np.ndarray] = []
    for step in range(stage.steps):
        if interrupted and step in stage.interruptions:
            state = json.loads(json.dumps(ranks[-1].state))
            for rank in ranks:
                rank.close()
            ranks = loaders_of(source, state, stage)
        rows = whole_rows([rank.next_step() for rank in ranks], stage)
        first = ranks[0].consumed_samples - stage.rows
        assert sorted(rows) == list(range(first, first + stage.rows))
        result += [rows[number] for number in sorted(rows)]
    for rank in ranks:
        rank.close()
    states = [rank.state for rank in ranks]
    assert all(other == states[0] for other in states)
    return result, json.loads(json.dumps(states[0])), ranks[0]


def check_labels(rows: list[np.ndarray], ends: set[int]) -> None:
    """Each token predicts the next of its document (ids count up); the last one nothing."""
    for row in rows:
        real = row[0] != PAD
        tokens, labels = row[0][real], row[1][real]
        last = np.isin(tokens, list(ends))
        assert np.array_equal(labels, np.where(last, IGNORE_INDEX, tokens + 1))
        assert (row[1][~real] == IGNORE_INDEX).all()
        if not real.all():  # padding is the tail
            assert real[: int(real.sum())].all()
        # Inside a document of the row ids are consecutive.
        inside = row[2][real][1:] > 0
        assert (np.diff(tokens)[inside] == 1).all()


def run(
    lengths: list[list[int]],
    weights: list[int],
    plan: list[Stage],
    seed: int,
    upsampling: list[str] | None,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = write_corpora(Path(folder), lengths)
        blend = [text for pair in zip(map(str, weights), paths) for text in pair]
        source = build_document_source(
            blend, seed=seed, long_document_upsampling=upsampling, vocab_size=PAD + 1
        )
        assert source is not None
        consumed: list[np.ndarray] = []
        state = straight_state = None
        for stage in plan:
            rows, state, last = run_stage(source, state, stage, True)
            straight, straight_state, _ = run_stage(source, straight_state, stage, False)
            # Interruptions change nothing at all.
            assert len(rows) == len(straight) and all(map(np.array_equal, rows, straight))
            assert state == straight_state
            consumed += rows
        all_lengths = [n for corpus in lengths for n in corpus if n]
        check_labels(consumed, set((np.cumsum(all_lengths) - 1).tolist()))
        tokens = [row[0][row[0] != PAD].tolist() for row in consumed]
        flat = [token for row in tokens for token in row]
        drawn = documents_of(source, state["stream"]["documents"])
        in_stream = [token for document in drawn for token in document]
        left = pending_ids(last.position)
        if all(stage.packing == "concat" for stage in plan):
            assert flat + left == in_stream
        assert Counter(flat) + Counter(left) == Counter(in_stream)
        assert state["consumed_tokens"] == len(flat)
        assert state["padded_tokens"] == sum(row.shape[1] for row in consumed) - len(flat)
        check_epochs(source, drawn)
        check_uncut(plan, consumed, lengths)


def check_epochs(source: DocumentSource, drawn: list[list[int]]) -> None:
    """Each document exactly once an epoch of its component, whatever the weights."""
    count = Counter(document[0] for document in drawn)
    for component in source.components:
        corpus = component.corpus
        documents = np.array(list(component.documents))
        documents = documents[corpus.document_lengths[documents] > 0]
        firsts = [
            int(corpus.read(at, at + 1)[0]) for at in corpus.document_starts(documents).tolist()
        ]
        times = [count[first] for first in firsts]
        assert max(times) - min(times) <= 1


def check_uncut(plan: list[Stage], rows: list[np.ndarray], lengths: list[list[int]]) -> None:
    """If all stages are best-fit of one length, no shorter document was ever cut."""
    if any(stage.packing != "best-fit" for stage in plan):
        return
    smallest = min(stage.seq_length for stage in plan)
    all_lengths = np.array([n for corpus in lengths for n in corpus if n])
    firsts = np.cumsum(all_lengths) - all_lengths
    size = dict(zip(firsts.tolist(), all_lengths.tolist()))
    for row in rows:
        tokens = row[0][row[0] != PAD].tolist()
        at = 0
        while at < len(tokens):
            begin = max(first for first in size if first <= tokens[at])
            if size[begin] <= smallest:
                assert tokens[at : at + size[begin]] == list(range(begin, begin + size[begin]))
                at += size[begin]
            else:
                at += 1


UPSAMPLINGS = st.sampled_from([None, None, ["20:2"], ["5:1.5", "60:4"]])


@settings(max_examples=40, **SETTINGS)
@given(
    corpora(),
    st.lists(st.integers(1, 5), min_size=3, max_size=3),
    st.lists(stages(("concat",)), min_size=1, max_size=3),
    st.integers(0, 5),
    UPSAMPLINGS,
)
def test_concat_is_the_stream_in_order(
    lengths: list[list[int]],
    weights: list[int],
    plan: list[Stage],
    seed: int,
    upsampling: list[str] | None,
) -> None:
    run(lengths, weights, plan, seed, upsampling)


@settings(max_examples=40, **SETTINGS)
@given(
    corpora(),
    st.lists(st.integers(1, 5), min_size=3, max_size=3),
    st.lists(stages(("best-fit",)), min_size=1, max_size=3),
    st.integers(0, 5),
    UPSAMPLINGS,
)
def test_best_fit_loses_and_repeats_nothing(
    lengths: list[list[int]],
    weights: list[int],
    plan: list[Stage],
    seed: int,
    upsampling: list[str] | None,
) -> None:
    run(lengths, weights, plan, seed, upsampling)


@settings(max_examples=15, **SETTINGS)
@given(
    corpora(),
    st.lists(st.integers(1, 5), min_size=3, max_size=3),
    st.lists(stages(("concat", "best-fit")), min_size=2, max_size=4),
    st.integers(0, 5),
    UPSAMPLINGS,
)
def test_packings_may_change_between_stages(
    lengths: list[list[int]],
    weights: list[int],
    plan: list[Stage],
    seed: int,
    upsampling: list[str] | None,
) -> None:
    run(lengths, weights, plan, seed, upsampling)


@settings(max_examples=25, **SETTINGS)
@given(
    corpora(),
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 4), min_size=3, max_size=3),
            st.sampled_from(["concat", "best-fit"]),
            st.integers(1, 60),
            st.integers(1, 6),
        ),
        min_size=2,
        max_size=5,
    ),
)
def test_blends_may_change_between_stages(
    lengths: list[list[int]], plan: list[tuple[list[int], str, int, int]]
) -> None:
    """Each corpus goes on where it stood: its documents come once an epoch over all stages."""
    with tempfile.TemporaryDirectory() as folder:
        paths = write_corpora(Path(folder), lengths)
        state, seen = None, Counter()
        for weights, packing, seq_length, rows in plan:
            blend = [text for pair in zip(map(str, weights), paths) for text in pair]
            if not sum(weights[: len(paths)]):
                blend = paths
            source = build_document_source(blend, seed=1)
            assert source is not None
            planner = RowPlanner(
                source,
                state,
                packing=packing,
                seq_length=seq_length,
                global_batch_size=rows,
                best_fit_window=20,
            )
            pieces = planner.next_rows().pieces
            for c, d, s, n in zip(pieces.corpus, pieces.document, pieces.start, pieces.length):
                begin = int(planner.corpora[c].document_starts(np.array([d]))[0]) + int(s)
                seen.update(planner.corpora[c].read(begin, begin + int(n)).tolist())
            position = planner.position()
            state = json.loads(json.dumps(position.state()))
        seen.update(pending_ids(position))
        first = 0
        for corpus in lengths:
            times = []
            for length in corpus:
                counts = {seen[token] for token in range(first, first + length)}
                assert len(counts) <= 1  # documents stay whole
                times += counts
                first += length
            assert max(times) - min(times) <= 1


@pytest.mark.slow
@settings(max_examples=400, **SETTINGS)
@given(
    corpora(),
    st.lists(st.integers(1, 5), min_size=3, max_size=3),
    st.lists(stages(("concat", "best-fit")), min_size=1, max_size=5),
    st.integers(0, 5),
    UPSAMPLINGS,
)
def test_long_search(
    lengths: list[list[int]],
    weights: list[int],
    plan: list[Stage],
    seed: int,
    upsampling: list[str] | None,
) -> None:
    run(lengths, weights, plan, seed, upsampling)
