"""Schedules of ring and exchange as pure arithmetic, up to 1,024 ranks in one process."""

import random

import numpy as np
import pytest
import torch

from megatron.core.context_parallel.layout import make_layout
from megatron.core.context_parallel.rows import (
    exchange_stages,
    join_keys,
    make_row_tasks,
    remap_keys,
    ring_source,
    run_rows,
    task_pairs,
)
from megatron.core.context_parallel.spread import fill_steps, spread_tasks
from tools.attention_grid import LAYOUTS, packing

FAR = 1 << 40


def pairs_of(tasks: np.ndarray, rows: int, columns: int) -> torch.Tensor:
    """How often each pair is covered."""
    seen = torch.zeros(rows, columns, dtype=torch.int64)
    i, j = torch.arange(rows)[:, None], torch.arange(columns)[None]
    for q0, q1, k0, k1, lo, hi in tasks.tolist():
        gap = (i - q0) - (j - k0)
        inside = (i >= q0) & (i < q1) & (j >= k0) & (j < k1)
        seen += inside & (gap >= lo) & (gap <= hi)
    return seen


def random_tasks(rng: random.Random, size: int) -> np.ndarray:
    tasks = []
    for _ in range(rng.randint(1, 6)):
        a, b = sorted(rng.sample(range(size + 1), 2))
        c, d = sorted(rng.sample(range(size + 1), 2))
        low = rng.choice((-FAR, 0, rng.randint(-9, 9)))
        tasks.append((a, b, c, d, low, rng.choice((FAR, low + rng.randint(0, 12)))))
    return np.array(tasks, dtype=np.int64)


def test_remapped_keys_cover_the_same_pairs() -> None:
    rng = random.Random(5)
    for _ in range(300):
        tasks = random_tasks(rng, 20)
        edges = sorted(rng.sample(range(21), 2 * rng.randint(1, 4)))
        runs = np.array(edges).reshape(-1, 2)
        sizes = runs[:, 1] - runs[:, 0]
        order = np.array(rng.sample(range(len(runs)), len(runs)))
        starts = np.empty(len(runs), dtype=np.int64)
        starts[order] = np.cumsum(sizes[order]) - sizes[order]
        mapped = remap_keys(tasks, runs, starts)
        want = pairs_of(tasks, 20, 20)
        got = pairs_of(mapped, 20, int(sizes.sum()))
        for (first, last), start in zip(runs.tolist(), starts.tolist(), strict=True):
            assert torch.equal(got[:, start : start + last - first], want[:, first:last])
        assert torch.equal(pairs_of(join_keys(mapped), 20, int(sizes.sum())), got)


def test_spread_parts_cover_the_same_pairs() -> None:
    rng = random.Random(6)
    for _ in range(200):
        tasks = random_tasks(rng, 24)
        parts = spread_tasks(tasks, [rng.uniform(0, 150) for _ in range(rng.randint(1, 5))])
        seen = sum(pairs_of(part, 24, 24) for part in parts)
        assert torch.equal(seen, pairs_of(tasks, 24, 24))


def test_spread_meets_its_shares() -> None:
    """Large tasks are cut near the share; small ones are given out whole."""
    large = np.array([(0, 8192, 0, 8192, 0, 8191), (8192, 10000, 0, 4000, -3999, 1807)])
    total = task_pairs(large)
    shares = [0.3 * total, 0.0, 0.2 * total, 0.5 * total]
    got = [task_pairs(part) for part in spread_tasks(large, shares)]
    assert sum(got) == total
    for mine, share in zip(got, shares, strict=True):
        assert abs(mine - share) < 0.05 * total
    lengths = np.array([300] * 100)
    starts = np.cumsum(lengths) - lengths
    many = np.stack((starts, starts + 300, starts, starts + 300, 0 * starts, lengths - 1), 1)
    got = [len(part) for part in spread_tasks(many, [task_pairs(many) / 4] * 4)]
    assert sum(got) == 100 and max(got) - min(got) <= 1


def test_steps_are_filled_like_water() -> None:
    assert fill_steps(10, (0, 0)) == [5.0, 5.0]
    assert fill_steps(10, (0, 20, 0)) == [5.0, 0.0, 5.0]
    assert fill_steps(30, (0, 20, 10)) == [20.0, 0.0, 10.0]
    assert fill_steps(0, (3, 4)) == [0.0, 0.0]


def world_tasks(kind: str, ring: int, length: int, seed: int, window: int | None) -> object:
    rng = random.Random(seed)
    bounds = [np.array(packing(name, length, ring, rng)) for name in ("random", "edges")]
    layout = make_layout(kind, length, ring, 1, [torch.tensor(b) for b in bounds])
    return make_row_tasks(layout, bounds, window, True)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("window", [None, 5])
def test_ring_walks_carry_what_later_ranks_need(kind: str, window: int | None) -> None:
    for ring, length in ((2, 16), (3, 36), (5, 40), (8, 64)):
        tasks = world_tasks(kind, ring, length, ring, window)
        for source in range(ring):
            walk = ring_source(tasks, source)
            assert len(np.unique(walk.rows)) == len(walk.rows) == walk.counts[min(1, ring - 1)]
            needs = [
                set(run_rows(tasks.key_rows((source + hop) % ring, source)).tolist())
                for hop in range(ring)
            ]
            for hop in range(1, ring):
                here = set(walk.rows[: walk.counts[hop]].tolist())
                assert here == set().union(*needs[hop:])
            used = [hop for hop in range(1, ring) if needs[hop]]
            assert (walk.first_hop, walk.last_hop) == ((used[0], used[-1]) if used else (0, 0))


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("cap", [1, 3, 7, 1000])
def test_exchange_sides_agree(kind: str, cap: int) -> None:
    for ring, length in ((2, 16), (3, 36), (8, 64)):
        tasks = world_tasks(kind, ring, length, ring + 1, None)
        stages = [exchange_stages(tasks, rank, cap) for rank in range(ring)]
        assert len({len(each) for each in stages}) == 1
        for number in range(len(stages[0])):
            for a in range(ring):
                assert sum(len(r) for r in stages[a][number].recv_rows) <= cap
                for b in range(ring):
                    sent = stages[a][number].send_rows[b]
                    assert np.array_equal(sent, stages[b][number].recv_rows[a])
        for rank in range(ring):
            for source in range(ring):
                got = [stage.recv_rows[source] for stage in stages[rank]]
                rows = np.concatenate(got) if got else np.zeros(0, dtype=np.int64)
                want = run_rows(tasks.key_rows(rank, source)) if source != rank else rows[:0]
                assert sorted(rows.tolist()) == want.tolist()


def test_dense_zigzag_keeps_one_task_a_hop() -> None:
    """One document: one causal call on the diagonal and one rectangle a hop, as in Megatron."""
    layout = make_layout("zigzag", 4096, 8)
    tasks = make_row_tasks(layout, [np.array([0, 4096])], None, True)
    for rank in range(8):
        for hop in range(8):
            source = (rank - hop) % 8
            walk = ring_source(tasks, source)
            mapped = remap_keys(tasks.tasks(rank, source), walk.runs, walk.starts)
            assert len(tasks.tasks(rank, source)) == 1
            assert hop == 0 or len(mapped) == 1
    assert ring_source(tasks, 0).counts[1] == 256  # rank 0's second chunk is nobody's business
    assert ring_source(tasks, 3).counts[7] == 512


def test_contiguous_ring_stops_when_nobody_needs_more() -> None:
    layout = make_layout("contiguous", 64, 4)
    tasks = make_row_tasks(layout, [np.array([0, 64])], None, True)
    assert [ring_source(tasks, s).counts[1:] for s in range(4)] == [
        (16, 16, 16),
        (16, 16, 0),
        (16, 0, 0),
        (0, 0, 0),
    ]


def test_schedule_of_a_large_world() -> None:
    """1,024 ranks, one million tokens, in one process; only two ranks' sides are made."""
    rng = random.Random(1)
    length, ring = 1 << 20, 64
    bounds = [0]
    while bounds[-1] < length:
        bounds.append(min(length, bounds[-1] + 1 + int(rng.lognormvariate(6.5, 1.2))))
    layout = make_layout("balanced", length, ring, 16, torch.tensor(bounds))
    tasks = make_row_tasks(layout, [np.array(bounds)], None, True)
    first, second = exchange_stages(tasks, 0, 1 << 16), exchange_stages(tasks, 1, 1 << 16)
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a.send_rows[1], b.recv_rows[0])
        assert np.array_equal(b.send_rows[0], a.recv_rows[1])
