"""From tasks of (rank, source) pairs to flat rows and communication schedules (pure arithmetic).

Attention runs on *flat* rows: batch row b, ring-local row i is flat row ``b * ring_length + i``,
of queries and of each source's keys alike. What travels are flat key rows, chosen and ordered
here:

    ring       a source's rows are ordered by the last hop that still needs them, so each hop
               forwards a prefix of what came in and drops the rest; a hop that nobody needs is none
    exchange   each receiver's needed rows, nearest source first, are cut into stages of at most
               ``cap`` rows; both sides compute the same cuts

Tasks are then rewritten from rows of the source to rows of the buffer they arrive in. Every rank
computes the schedule of the whole ring from layout and packings, without talking.

Cost: the tasks of every rank, O(ring_size) times the cost of one, per packing.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from megatron.core.context_parallel.documents import IntArray
from megatron.core.context_parallel.layout import Layout
from megatron.core.context_parallel.prefix import band_pairs, expand_ranges, is_full_band
from megatron.core.context_parallel.tasks import TaskTable, join_runs, rank_tasks, trim_tasks

NO_TASKS = np.zeros((0, 6), dtype=np.int64)

PIPELINE_STAGES = 8
STAGE_ROWS = 8192
"""Below this many rows a stage is not worth another all-to-all."""


@dataclasses.dataclass(frozen=True, eq=False)
class RowTasks:
    """Tasks of all ring ranks over a batch of rows, in flat rows."""

    layout: Layout
    tables: tuple[tuple[tuple[TaskTable, ...], ...], ...]
    """[batch row][query rank][source]."""

    @property
    def rows(self) -> int:
        """Flat rows of one ring shard."""
        return len(self.tables) * self.layout.ring_length

    def tasks(self, rank: int, source: int) -> IntArray:
        """[n, 6] tasks of one rank against one source."""
        parts = [NO_TASKS]
        for index, table in enumerate(self.tables):
            offset = index * self.layout.ring_length
            shift = np.array([offset, offset, offset, offset, 0, 0])
            parts.append(table[rank][source].array + shift)
        return np.concatenate(parts)

    def key_rows(self, rank: int, source: int) -> IntArray:
        """[runs, 2] flat rows of the source that the rank's tasks read."""
        parts = [
            table[rank][source].key_rows() + index * self.layout.ring_length
            for index, table in enumerate(self.tables)
        ]
        return join_runs(np.concatenate([NO_TASKS[:, :2], *parts]))

    def pairs(self, rank: int) -> int:
        """Visible pairs of one rank."""
        return sum(table.pairs for row in self.tables for table in row[rank])


def make_row_tasks(
    layout: Layout, packings: Sequence[IntArray], window: int | None, causal: bool
) -> RowTasks:
    """Tasks of all ring ranks; rows with the same packing share them."""
    made: dict[bytes, tuple[tuple[TaskTable, ...], ...]] = {}
    tables = []
    for bounds in packings:
        key = bounds.tobytes()
        if key not in made:
            made[key] = tuple(
                rank_tasks(layout, rank, bounds, window=window, causal=causal)
                for rank in range(layout.ring_size)
            )
        tables.append(made[key])
    return RowTasks(layout, tuple(tables))


def remap_keys(tasks: IntArray, runs: IntArray, starts: IntArray) -> IntArray:
    """Rewrite tasks whose keys live in ``runs`` [n, 2] (sorted, disjoint) to buffer rows.

    Row ``runs[i, 0] + x`` of the source is row ``starts[i] + x`` of the buffer. Keys outside all
    runs are cut away; a task over several runs becomes several.
    """
    if len(tasks) == 0 or len(runs) == 0:
        return NO_TASKS
    first = np.searchsorted(runs[:, 1], tasks[:, 2], side="right")
    last = np.searchsorted(runs[:, 0], tasks[:, 3], side="left")
    which, run = expand_ranges(first, last)
    pieces = tasks[which].copy()
    low = np.maximum(pieces[:, 2], runs[run, 0])
    high = np.minimum(pieces[:, 3], runs[run, 1])
    cut = low - pieces[:, 2]  # columns dropped on the left shift i - j
    pieces[:, 4] += cut
    pieces[:, 5] += cut
    pieces[:, 2] = starts[run] + low - runs[run, 0]
    pieces[:, 3] = pieces[:, 2] + high - low
    return trim_tasks(pieces)


def join_keys(tasks: IntArray) -> IntArray:
    """Join full tasks of the same query rows whose keys follow each other in the buffer."""
    if len(tasks) < 2:
        return tasks
    q0, q1, k0, k1, lo, hi = tasks.T
    full = is_full_band(q1 - q0, k1 - k0, lo, hi)
    rest, tasks = tasks[~full], tasks[full]
    if len(tasks) == 0:
        return rest
    tasks = tasks[np.lexsort((tasks[:, 2], tasks[:, 1], tasks[:, 0]))]
    ahead, behind = tasks[1:], tasks[:-1]
    joins = (ahead[:, [0, 1, 2]] == behind[:, [0, 1, 3]]).all(axis=1)
    opens = np.concatenate(([True], ~joins))
    closes = np.concatenate((opens[1:], [True]))
    joined = tasks[opens]
    joined[:, 3] = tasks[closes, 3]
    joined[:, 4] = 1 - (joined[:, 3] - joined[:, 2])
    return np.concatenate((rest, joined))


def _count(runs: IntArray) -> int:
    """Rows in runs [n, 2]."""
    return int((runs[:, 1] - runs[:, 0]).sum())


def task_pairs(tasks: IntArray) -> int:
    """Visible pairs of tasks [n, 6]."""
    q0, q1, k0, k1, lo, hi = tasks.T
    return int(band_pairs(q1 - q0, k1 - k0, lo, hi).sum())


def run_rows(runs: IntArray) -> IntArray:
    """Every row of runs [n, 2], in order."""
    return expand_ranges(runs[:, 0], runs[:, 1])[1]


@dataclasses.dataclass(frozen=True, eq=False)
class RingSource:
    """One source's rows as they travel round the ring."""

    rows: IntArray
    """Flat rows in the order of the buffer: the longest needed first."""
    counts: tuple[int, ...]
    """counts[t]: rows that still travel to hop t (t = 1 .. ring_size - 1); counts[0] unused."""
    first_hop: int
    """First and last hop whose rank uses any row; 0 when nobody does."""
    last_hop: int
    runs: IntArray
    starts: IntArray
    """Sorted runs of source rows and where they start in the buffer."""


def ring_source(tasks: RowTasks, source: int) -> RingSource:
    """How far each row of a source must travel."""
    ring = tasks.layout.ring_size
    last = np.zeros(tasks.rows, dtype=np.int64)
    used = []
    for hop in range(1, ring):
        runs = tasks.key_rows((source + hop) % ring, source)
        for start, end in runs.tolist():
            last[start:end] = hop
        if len(runs):
            used.append(hop)
    order = np.argsort(-last, kind="stable")
    rows = order[: int((last > 0).sum())]
    counts = tuple(int((last >= max(1, hop)).sum()) for hop in range(ring))
    place = np.argsort(rows, kind="stable")
    runs, starts = _runs_of(rows[place], place)
    ends = (used[0], used[-1]) if used else (0, 0)
    return RingSource(rows, counts, ends[0], ends[1], runs, starts)


def _runs_of(rows: IntArray, place: IntArray) -> tuple[IntArray, IntArray]:
    """Runs of ascending rows that are also adjacent in the buffer, and their buffer starts."""
    if len(rows) == 0:
        return np.zeros((0, 2), dtype=np.int64), np.zeros(0, dtype=np.int64)
    breaks = (np.diff(rows) != 1) | (np.diff(place) != 1)
    opens = np.concatenate(([True], breaks))
    closes = np.concatenate((breaks, [True]))
    return np.stack((rows[opens], rows[closes] + 1), axis=1), place[opens]


@dataclasses.dataclass(frozen=True, eq=False)
class ExchangeStage:
    """What one rank sends and receives in one stage, in rank order."""

    send_rows: tuple[IntArray, ...]
    """Own flat rows for each receiver."""
    recv_rows: tuple[IntArray, ...]
    """Flat rows of each source, in the order they arrive."""
    tasks: IntArray
    """Tasks that these rows make possible, with keys in rows of the arriving buffer."""


def exchange_stages(tasks: RowTasks, rank: int, cap: int) -> list[ExchangeStage]:
    """Stages of the needed-rows exchange of one rank; equally many on every rank.

    Stages are smaller than memory asks where much is fetched, so that transfers run behind compute:
    up to ``PIPELINE_STAGES`` of at least ``STAGE_ROWS`` rows.

    Args:
        tasks: of all ranks.
        rank: own ring rank.
        cap: most rows that a rank may receive in one stage.
    """
    ring = tasks.layout.ring_size
    most = max(
        sum(_count(tasks.key_rows(j, source)) for source in range(ring) if source != j)
        for j in range(ring)
    )
    cap = min(cap, max(STAGE_ROWS, -(-most // PIPELINE_STAGES)))
    cuts = [_receiver_cuts(tasks, receiver, cap) for receiver in range(ring)]
    stages = []
    for stage in range(max(len(receiver) for receiver in cuts)):
        mine = cuts[rank][stage] if stage < len(cuts[rank]) else {}
        send = [
            cuts[j][stage].get(rank, NO_TASKS[:, :2]) if stage < len(cuts[j]) else NO_TASKS[:, :2]
            for j in range(ring)
        ]
        pieces, offset, recv = [NO_TASKS], 0, []
        for source in range(ring):
            runs = mine.get(source, NO_TASKS[:, :2])
            sizes = runs[:, 1] - runs[:, 0]
            starts = offset + np.cumsum(sizes) - sizes
            if len(runs):
                pieces.append(remap_keys(tasks.tasks(rank, source), runs, starts))
            recv.append(run_rows(runs))
            offset += int(sizes.sum())
        listed = join_keys(np.concatenate(pieces))
        stages.append(ExchangeStage(tuple(run_rows(r) for r in send), tuple(recv), listed))
    return stages


def _receiver_cuts(tasks: RowTasks, receiver: int, cap: int) -> list[dict[int, IntArray]]:
    """For each stage, the runs of each source that a receiver gets."""
    ring = tasks.layout.ring_size
    stages: list[dict[int, IntArray]] = []
    filled = 0
    for distance in range(1, ring):
        source = (receiver - distance) % ring
        for start, end in tasks.key_rows(receiver, source).tolist():
            while start < end:
                stage, room = divmod(filled, cap)
                taken = min(end - start, cap - room)
                if stage == len(stages):
                    stages.append({})
                run = np.array([[start, start + taken]], dtype=np.int64)
                have = stages[stage].get(source)
                stages[stage][source] = run if have is None else np.concatenate((have, run))
                start += taken
                filled += taken
    return stages
