"""What a plan of attention is made of: groups, kernel, layout, and compiled programs by batch size.

A program is made when a batch of that many rows first comes, or taken from the workspace if equal
packings were compiled before.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.context_parallel.channel import Channel, CommStats
from megatron.core.context_parallel.compile import BatchPlan, Compiler
from megatron.core.context_parallel.documents import IntArray
from megatron.core.context_parallel.exchange import ExchangePlan, ExchangeSteps
from megatron.core.context_parallel.kernels.base import BlockKernel
from megatron.core.context_parallel.layout import Layout
from megatron.core.context_parallel.ring import RingPlan, RingSteps
from megatron.core.context_parallel.steps import LocalSteps, StepSource
from megatron.core.context_parallel.ulysses import HeadSplit, Ulysses
from megatron.core.context_parallel.workspace import Workspace


@dataclasses.dataclass(frozen=True)
class AttentionStats:
    """What attention of one plan amounts to, and has cost this rank so far."""

    communication: str
    tasks: int
    """Tasks of this rank per layer."""
    pairs: int
    """Visible (query, key) pairs of this rank per layer."""
    ring_pairs: tuple[int, ...]
    """The same of every ring rank."""
    bytes_sent: int
    transfers: int
    exposed_wait: float
    """Seconds in which compute waited for communication."""
    calls: int
    """Forward and backward calls so far."""


@dataclasses.dataclass(eq=False)
class PlannedAttention:
    """The parts of a plan and its programs; ``AttentionPlan`` makes it callable."""

    layout: Layout
    packings: list[IntArray]
    """One for all batch rows, or one per batch row."""
    split: HeadSplit
    """Query and KV heads of the tensor-parallel rank over the Ulysses ranks."""
    head_dim: int
    kernel: BlockKernel
    outer: str
    """none, p2p or all_gather."""
    causal: bool
    window: int | None
    scale: float
    dropout_p: float
    dtype: torch.dtype
    device: torch.device
    ring: Channel
    ulysses: Ulysses
    comm: CommStats
    workspace: Workspace
    max_exchange_bytes: int
    check_iteration: int | None
    calls: int = 0
    _batches: dict[int, tuple[BatchPlan, StepSource]] = dataclasses.field(default_factory=dict)

    @property
    def communication(self) -> str:
        """The resolved type, by the names of ``--cp-comm-type`` (or none)."""
        parts = ["a2a"] if self.split.size > 1 else []
        return "+".join(parts + ([self.outer] if self.outer != "none" else [])) or "none"

    @property
    def stats(self) -> AttentionStats:
        """Counts of this rank; reading the exposed wait synchronises on CUDA."""
        batch, _ = self.compiled(max(self._batches, default=len(self.packings)))
        return AttentionStats(
            communication=self.communication,
            tasks=batch.tasks,
            pairs=batch.pairs[self.ring.rank],
            ring_pairs=batch.pairs,
            bytes_sent=self.comm.bytes_sent,
            transfers=self.comm.transfers,
            exposed_wait=self.comm.exposed_wait(),
            calls=self.calls,
        )

    def compiled(self, batch: int) -> tuple[BatchPlan, StepSource]:
        """The plan for a number of batch rows, made on first use.

        Raises:
            ValueError: if there are packings for another number of rows.
        """
        if batch not in self._batches:
            many = len(self.packings) > 1
            if many and batch != len(self.packings):
                raise ValueError(
                    f"cu_seqlens lists {len(self.packings)} packings for {batch} batch rows; give "
                    "one packing for all rows, or one per row"
                )
            packings = self.packings if many else self.packings * batch
            made = self.workspace.plan(
                self._key(packings), lambda: self._compiler().compile(packings)
            )
            self._batches[batch] = (made, self._source(made))
        return self._batches[batch]

    def _key(self, packings: Sequence[IntArray]) -> tuple[Any, ...]:
        heads = (self.kv_heads, self.head_dim, self.dtype, self.max_exchange_bytes)
        return (
            self.layout.key, tuple(bounds.tobytes() for bounds in packings), self.ring.rank,
            self.outer, self.kernel.name, self.device, self.causal, self.window,
            self.dropout_p > 0, heads,
        )  # fmt: skip

    @property
    def kv_heads(self) -> int:
        """KV heads of this Ulysses rank."""
        return len(self.split.kv(self.ulysses.rank))

    def _source(self, made: BatchPlan) -> StepSource:
        if isinstance(made.steps, RingPlan):
            return RingSteps(made.steps, self.ring, self.workspace)
        if isinstance(made.steps, ExchangePlan):
            return ExchangeSteps(made.steps, self.ring, self.workspace)
        return LocalSteps(made.steps)

    def _compiler(self) -> Compiler:
        row_bytes = 2 * self.kv_heads * self.head_dim * self.dtype.itemsize
        return Compiler(
            layout=self.layout, kernel=self.kernel, device=self.device, rank=self.ring.rank,
            outer=self.outer, causal=self.causal, window=self.window,
            with_ids=self.dropout_p > 0, stage_rows=max(1, self.max_exchange_bytes // row_bytes),
        )  # fmt: skip
