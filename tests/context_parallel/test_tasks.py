"""Tasks against the explicit S x S mask: every layout, packing, window, source."""

import random
import time

import numpy as np
import pytest

from megatron.core.config.parallel import layout_multiple
from megatron.core.context_parallel.layout import make_layout
from megatron.core.context_parallel.tasks import Task, rank_tasks, split_band

KINDS = ("contiguous", "zigzag", "striped", "balanced")


def dense_mask(cu_seqlens, seq_length, window, causal):
    """bool [S, S]: the definition, with no cleverness."""
    document = np.zeros(seq_length, dtype=int)
    for bound in cu_seqlens[1:-1]:
        document[bound:] += 1
    position = np.arange(seq_length)
    ahead = position[:, None] - position[None]
    mask = document[:, None] == document[None]
    if causal:
        mask &= ahead >= 0
    if window is not None:
        mask &= ahead < window
    return mask


def task_mask(task):
    """bool [q_len, k_len] of one task."""
    ahead = np.arange(task.q_len)[:, None] - np.arange(task.k_len)[None]
    return (task.lo <= ahead) & (ahead <= task.hi)


def painted(tasks, q_rows, k_rows):
    """How often each pair is computed by a list of tasks: [q_rows, k_rows]."""
    count = np.zeros((q_rows, k_rows), dtype=int)
    for task in tasks:
        count[task.q_start : task.q_end, task.k_start : task.k_end] += task_mask(task)
    return count


def random_case(rng):
    ring, ulysses = rng.randint(1, 8), rng.choice((1, 1, 2, 3))
    kind = rng.choice(KINDS)
    multiple = layout_multiple(kind, ring, ulysses)
    seq_length = multiple * rng.randint(1, max(1, 96 // multiple))
    style = rng.choice(("one", "ones", "random", "edges", "padding"))
    if style == "one":
        cuts = set()
    elif style == "ones":
        cuts = set(range(seq_length))
    elif style == "padding":
        cuts = {rng.randint(1, seq_length)}
    elif style == "edges":
        edge = seq_length // (2 * ring) or 1
        cuts = {edge * rng.randint(0, 2 * ring) + rng.choice((-1, 0, 1)) for _ in range(4)}
    else:
        cuts = {rng.randint(1, seq_length) for _ in range(rng.randint(0, 12))}
    cuts = sorted(cut for cut in cuts if 0 < cut < seq_length)
    causal = rng.random() < 0.8
    window = rng.choice((None, 1, 2, 7, rng.randint(1, seq_length + 3))) if causal else None
    return kind, seq_length, ring, ulysses, [0, *cuts, seq_length], window, causal


def check_case(kind, seq_length, ring, ulysses, cu_seqlens, window, causal):
    layout = make_layout(kind, seq_length, ring, ulysses, cu_seqlens)
    mask = dense_mask(cu_seqlens, seq_length, window, causal)
    for rank in range(ring):
        q_at = layout.ring_positions(rank).numpy()
        tables = rank_tasks(layout, rank, cu_seqlens, window=window, causal=causal)
        assert len(tables) == ring
        for source, table in enumerate(tables):
            want = mask[np.ix_(q_at, layout.ring_positions(source).numpy())]
            got = painted(table, *want.shape)
            assert np.array_equal(got, want.astype(int)), (rank, source, list(table))
            assert table.pairs == want.sum()
            seen = np.zeros(want.shape[1], dtype=bool)
            for first, last in table.key_rows():
                seen[first:last] = True
            assert np.array_equal(seen, want.any(axis=0))
            for task in table:
                check_normal(task)
                check_split(task, 1 + (task.q_start + task.hi) % 9)
        if kind != "striped" and window is None:
            # Two rectangles of one source never share their rows, nor touch with the same keys.
            for table in tables:
                full = [task for task in table if task.is_full]
                for one, two in zip(full, full[1:]):
                    assert (one.q_end, one.k_start, one.k_end) != (two.q_start, *two[2:4])


def check_normal(task):
    visible = task_mask(task)
    assert visible.any(axis=0).all() and visible.any(axis=1).all(), task
    assert task.lo >= 1 - task.k_len and task.hi <= task.q_len - 1
    assert task.pairs == visible.sum()
    assert task.is_full == bool(visible.all())
    causal = np.tril(np.ones_like(visible))
    assert task.is_causal == (visible.shape[0] == visible.shape[1] and (visible == causal).all())


def check_split(task, tile):
    pieces = split_band(task, tile)
    whole = painted([task], task.q_end, task.k_end)
    assert np.array_equal(painted(pieces, task.q_end, task.k_end), whole), (task, tile, pieces)
    width = task.hi - task.lo + 1
    for piece in pieces:
        check_normal(piece)
        if not (piece.is_full or piece.is_causal):
            assert piece.q_len <= tile and piece.k_len <= tile + width


def test_a_window_is_a_masked_tile_a_rectangle_and_a_causal_square_per_block():
    """The near edge needs no mask: kernels know a causal square by themselves."""
    pieces = split_band(Task(0, 1024, 0, 1024, 0, 511), 256)
    last = [piece for piece in pieces if piece.q_start == 768]
    kinds = ["full" if p.is_full else "causal" if p.is_causal else "masked" for p in last]
    assert kinds == ["masked", "full", "causal"]
    assert [(p.k_start, p.k_end) for p in last] == [(257, 512), (512, 768), (768, 1024)]


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_any_length_on_two_ranks(kind):
    """Fault 6: boundaries divided by the number of ranks lose the last token of odd lengths."""
    check_case(kind, 12, 2, 1, [0, 7, 12], None, True)
    for first in range(1, 18):
        for second in (1, 5, 12):
            seq_length = -(-(first + second) // 4) * 4
            bounds = sorted({0, first, first + second, seq_length})
            check_case(kind, seq_length, 2, 1, bounds, None, True)


def test_random_cases_equal_the_dense_mask():
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    until = time.monotonic() + 15
    cases = 0
    while time.monotonic() < until and cases < 3000:
        case = random_case(rng)
        try:
            check_case(*case)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, case {case}") from error
        cases += 1
    print(f"{cases} cases")
    assert cases > 100


@pytest.mark.slow
def test_many_random_cases_equal_the_dense_mask():
    rng = random.Random(20240607)
    for _ in range(10000):
        check_case(*random_case(rng))
