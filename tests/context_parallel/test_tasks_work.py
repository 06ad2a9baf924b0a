"""Work and row counts equal the sums over the tasks, closed forms included."""

import random

import numpy as np
import pytest

from megatron.core.context_parallel.layout import make_layout
from megatron.core.context_parallel.prefix import band_pairs, visible_before
from megatron.core.context_parallel.tasks import rank_tasks
from megatron.core.context_parallel.work import pair_matrix, remote_rows
from tests.context_parallel.test_tasks import dense_mask, random_case


def check_counts(kind, seq_length, ring, ulysses, cu_seqlens, window, causal):
    layout = make_layout(kind, seq_length, ring, ulysses, cu_seqlens)
    pairs = np.zeros((ring, ring), dtype=np.int64)
    fetched, served = np.zeros(ring, dtype=np.int64), np.zeros(ring, dtype=np.int64)
    for rank in range(ring):
        tables = rank_tasks(layout, rank, cu_seqlens, window=window, causal=causal)
        pairs[rank] = [table.pairs for table in tables]
        for source, table in enumerate(tables):
            if source != rank:
                fetched[rank] += np.diff(table.key_rows()).sum()
                served[source] += np.diff(table.key_rows()).sum()
    assert np.array_equal(pair_matrix(layout, cu_seqlens, window=window, causal=causal), pairs)
    got = remote_rows(layout, cu_seqlens, window=window, causal=causal)
    assert np.array_equal(got[0], fetched) and np.array_equal(got[1], served)


def test_counts_equal_sums_over_tasks():
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(400):
        case = random_case(rng)
        try:
            check_counts(*case)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, case {case}") from error


def test_prefix_work_equals_the_mask():
    rng = random.Random(5)
    for _ in range(200):
        _, seq_length, _, _, cu_seqlens, window, causal = random_case(rng)
        mask = dense_mask(cu_seqlens, seq_length, window, causal)
        want = np.concatenate(([0], np.cumsum(mask.sum(axis=1))))
        at = np.arange(seq_length + 1)
        assert np.array_equal(visible_before(np.array(cu_seqlens), at, window, causal), want)


@pytest.mark.parametrize("q_len", [1, 2, 5])
@pytest.mark.parametrize("k_len", [1, 3, 4])
def test_band_pairs_equals_counting(q_len, k_len):
    ahead = np.arange(q_len)[:, None] - np.arange(k_len)[None]
    for lo in range(-8, 9):
        for hi in range(lo - 1, 10):
            assert band_pairs(q_len, k_len, lo, hi) == ((lo <= ahead) & (ahead <= hi)).sum()
