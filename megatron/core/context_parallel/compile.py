"""Compiling a batch of packings into steps: tasks, kernel programs, row indices, schedules.

This is where pure schedules (``rows``, ``spread``) meet a kernel and a device. Nothing
communicates: every rank computes the schedule of the whole ring.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core.context_parallel.documents import IntArray
from megatron.core.context_parallel.exchange import AHEAD, ExchangePlan, StagePlan
from megatron.core.context_parallel.kernels.base import BlockKernel
from megatron.core.context_parallel.layout import Layout
from megatron.core.context_parallel.placing import on_device
from megatron.core.context_parallel.ring import RingPlan
from megatron.core.context_parallel.rows import (
    NO_TASKS,
    ExchangeStage,
    RowTasks,
    exchange_stages,
    make_row_tasks,
    remap_keys,
    ring_source,
    task_pairs,
)
from megatron.core.context_parallel.spread import fill_steps, spread_tasks
from megatron.core.context_parallel.steps import RowIndex, StepPlan


@dataclasses.dataclass(frozen=True, eq=False)
class BatchPlan:
    """The compiled part of a plan for one number of batch rows."""

    steps: StepPlan | RingPlan | ExchangePlan
    query_ids: Tensor | None
    """int64 ids of the query rows, for dropout."""
    tasks: int
    """Tasks of this rank."""
    pairs: tuple[int, ...]
    """Visible pairs of each ring rank."""


@dataclasses.dataclass(frozen=True, eq=False)
class Compiler:
    """What compiling depends on besides the packings."""

    layout: Layout
    kernel: BlockKernel
    device: torch.device
    rank: int
    """Own ring rank."""
    outer: str
    """none, p2p or all_gather."""
    causal: bool
    window: int | None
    with_ids: bool
    """Dropout wants to know global positions."""
    stage_rows: int
    """Most remote rows that fit the memory of one exchange stage."""

    def compile(self, packings: Sequence[IntArray]) -> BatchPlan:
        """The steps of this rank for batch rows with these packings."""
        tasks = make_row_tasks(self.layout, packings, self.window, self.causal)
        own = tasks.tasks(self.rank, self.rank)
        shard = np.arange(tasks.rows, dtype=np.int64)
        ids = self._ids(self.rank, shard)
        steps: StepPlan | RingPlan | ExchangePlan
        if self.outer == "p2p":
            steps = self._ring(tasks, own, ids)
        elif self.outer == "all_gather":
            steps = self._exchange(tasks, own, ids)
        else:
            steps = self._steps([own], ids, _nothing_visited(tasks))[0]
        ring = range(self.layout.ring_size)
        count = sum(len(tasks.tasks(self.rank, source)) for source in ring)
        return BatchPlan(steps, ids, count, tuple(tasks.pairs(rank) for rank in ring))

    def _ring(self, tasks: RowTasks, own: IntArray, ids: Tensor | None) -> RingPlan:
        ring = self.layout.ring_size
        visited = _nothing_visited(tasks)
        sources = tuple(ring_source(tasks, source) for source in range(ring))
        steps = self._steps([own], ids, visited)
        for hop in range(1, ring):
            source = (self.rank - hop) % ring
            walk = sources[source]
            mapped = remap_keys(tasks.tasks(self.rank, source), walk.runs, walk.starts)
            key_ids = self._ids(source, walk.rows[: walk.counts[hop]])
            steps += self._steps([mapped], key_ids, visited)
        halves = spread_tasks(own, fill_steps(task_pairs(own), (0, 0)))
        first, last = self._steps(halves, ids, _nothing_visited(tasks))
        leaving = RowIndex.of(sources[self.rank].rows, self.device)
        return RingPlan(steps=tuple(steps), halves=(first, last), sources=sources, own=leaving)

    def _exchange(self, tasks: RowTasks, own: IntArray, ids: Tensor | None) -> ExchangePlan:
        staged = exchange_stages(tasks, self.rank, self.stage_rows)
        work = [task_pairs(stage.tasks) for stage in staged]
        forward = [own, *(NO_TASKS for _ in staged)]
        backward = [*forward, NO_TASKS]
        if len(staged) > AHEAD:
            forward = spread_tasks(own, fill_steps(task_pairs(own), (0, *work)))
        if staged:
            backward = spread_tasks(own, fill_steps(task_pairs(own), (0, *work, 0)))
        visited = _nothing_visited(tasks)  # in the order of forward
        own_forward = self._steps(forward[:1], ids, visited)
        stages = []
        for stage, part in zip(staged, forward[1:], strict=True):
            stages.append(self._stage(stage, visited))
            own_forward += self._steps([part], ids, visited)
        own_backward = self._steps(backward, ids, _nothing_visited(tasks))
        return ExchangePlan(tuple(stages), tuple(own_forward), tuple(own_backward))

    def _stage(self, stage: ExchangeStage, visited: Any) -> StagePlan:
        ids = None
        if self.with_ids:
            parts = [self._ids(source, rows) for source, rows in enumerate(stage.recv_rows)]
            ids = torch.cat([part for part in parts if part is not None])
        (step,) = self._steps([stage.tasks], ids, visited)
        leaving = tuple(RowIndex.of(rows, self.device) for rows in stage.send_rows)
        return StagePlan(step, leaving, tuple(len(rows) for rows in stage.recv_rows))

    def _steps(self, parts: Sequence[IntArray], ids: Tensor | None, visited: Any) -> list[StepPlan]:
        """A step for each part; ``visited`` notes query rows in the order of the steps."""
        return [StepPlan(self.kernel.compile(part, visited, self.device), ids) for part in parts]

    def _ids(self, source: int, rows: IntArray) -> Tensor | None:
        """Ids (batch row * seq_length + position) of flat rows of a source."""
        if not self.with_ids:
            return None
        positions = self.layout.ring_positions(source).numpy()
        batch, row = np.divmod(rows, self.layout.ring_length)
        ids = batch * self.layout.seq_length + positions[row]
        return on_device(ids, self.device)


def _nothing_visited(tasks: RowTasks) -> Any:
    return np.zeros(tasks.rows, dtype=bool)
