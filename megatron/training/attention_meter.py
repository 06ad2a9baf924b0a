"""What context-parallel attention did since the last log line, for metrics.

Each micro-batch has a plan that knows its work and counts its traffic; the meter adds them up on
this rank, and once per log line all ranks compare.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.config.parallel import CP_COMM_TYPES
from megatron.core.context_parallel import AttentionStats
from megatron.core.packed_batch import PackedBatch

COMM_TYPES = ("none", *(kind for kind in CP_COMM_TYPES if kind != "auto"))


class AttentionMeter:
    """Sums over the micro-batches of the steps since the last :meth:`take`."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._types: set[str] = set()
        self._micro_batches = 0
        self._largest = 0.0
        """Pairs of the fullest ring rank, summed over micro-batches: what the ring waits for."""
        self._mean = 0.0
        self._bytes = 0
        self._wait = 0.0
        self._tasks = 0

    def add(self, batches: Iterable[PackedBatch]) -> None:
        """Count micro-batches that a step is done with. Synchronises with the device."""
        for batch in batches:
            stats: AttentionStats = batch.attention_plan.stats
            self._types.add(stats.communication)
            self._micro_batches += 1
            self._largest += max(stats.ring_pairs)
            self._mean += sum(stats.ring_pairs) / len(stats.ring_pairs)
            self._bytes += stats.bytes_sent
            self._wait += stats.exposed_wait
            self._tasks += stats.tasks

    def take(self, steps: int) -> dict[str, Any]:
        """The metrics of ``steps`` steps, equal on all ranks; then counts anew. Collective.

        ``cp_comm_type``: what ``--cp-comm-type`` meant, on any rank: ``auto`` may take several.
        ``cp_work_balance``: attention work of the fullest ring rank over the mean, 1 is perfect.
        ``dp_work_balance``: work of the fullest data-parallel rank over the mean, likewise.
        ``cp_tasks``: kernel tasks of one layer and micro-batch on the rank that has most.
        ``cp_bytes_sent``: bytes a rank and step, mean of the ranks (a step that is computed twice,
        ``--rerun-check-interval``, sends twice).
        ``cp_exposed_wait``, ``cp_exposed_wait_mean``: seconds a step in which attention waited for
        other ranks; of the rank that waited longest, and the mean.
        """
        count = max(1, self._micro_batches)
        values = [self._largest, self._mean, self._tasks / count, self._bytes, self._wait]
        values += [float(kind in self._types) for kind in COMM_TYPES]
        mine = torch.tensor(values, dtype=torch.float64)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        largest, mean, tasks, sent, wait, *used = torch.stack(gathered).T
        types = "/".join(kind for kind, by in zip(COMM_TYPES, used, strict=True) if by.any())
        self._reset()
        steps = max(1, steps)
        work = float(mean.sum())
        return {
            "cp_comm_type": types,
            "cp_work_balance": float(largest.sum()) / work if work else 1.0,
            "dp_work_balance": float(mean.max()) * len(mean) / work if work else 1.0,
            "cp_tasks": float(tasks.max()),
            "cp_bytes_sent": float(sent.mean()) / steps,
            "cp_exposed_wait": float(wait.max()) / steps,
            "cp_exposed_wait_mean": float(wait.mean()) / steps,
        }
