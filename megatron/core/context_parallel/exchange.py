"""Needed-rows exchange (all_gather): each rank fetches just the remote keys its queries see.

A ring couples its ranks: each hop costs the slowest of them, and every rank handles every key.
With packed documents a rank needs few remote keys, so here an uneven all-to-all brings exactly
those, in stages of bounded memory, each posted before and waited for after the compute of the
stage before (own keys first). Nobody waits for a neighbour's compute, only for data.

In backward the keys come again, and the float32 dK and dV of a stage go back to their owners by
the same plan reversed, behind the next stage's compute. An owner adds what comes back receiver
by receiver, in rank order: rows of one receiver are distinct, so the sum has one order.

Cost per rank: needed rows x 2 x kv_heads x D elements in, the same out on average; backward adds
as many float32. Memory: two stages of keys and two of gradients.
"""

import dataclasses
from collections.abc import Iterator

from torch import Tensor

from megatron.core.context_parallel.channel import Channel, Pending
from megatron.core.context_parallel.integrity import Audit
from megatron.core.context_parallel.merge import accumulation_dtype
from megatron.core.context_parallel.steps import (
    OwnGrads,
    OwnPlan,
    RowIndex,
    Step,
    StepPlan,
    StepSource,
    grad_places,
)
from megatron.core.context_parallel.workspace import Workspace


@dataclasses.dataclass(frozen=True, eq=False)
class StagePlan:
    """One stage: what leaves, what arrives, what to compute with it."""

    step: StepPlan
    leaving: tuple[RowIndex, ...]
    """Own rows for each receiver, by rank."""
    arriving: tuple[int, ...]
    """Number of rows from each source, by rank."""

    @property
    def sent(self) -> tuple[int, ...]:
        return tuple(rows.count for rows in self.leaving)


@dataclasses.dataclass(frozen=True, eq=False)
class ExchangePlan:
    """Own step and stages of one rank; all ranks have equally many stages."""

    own_step: OwnPlan
    stages: tuple[StagePlan, ...]


class ExchangeSteps(StepSource):
    """One rank's exchange."""

    def __init__(self, plan: ExchangePlan, channel: Channel, workspace: Workspace) -> None:
        self.plan = plan
        self.channel = channel
        self.workspace = workspace

    def forward(self, k: Tensor, v: Tensor, audit: Audit | None) -> Iterator[Step]:
        coming = self._fetch(0, k, v, audit)
        yield Step(self.plan.own_step.whole, k, v)
        for number, stage in enumerate(self.plan.stages):
            assert coming is not None
            pending, keys = coming
            pending.wait()
            coming = self._fetch(number + 1, k, v, audit)
            if stage.step.program.tasks:
                yield Step(stage.step, keys[:, 0], keys[:, 1])

    def backward(self, k: Tensor, v: Tensor, own: OwnGrads, audit: Audit | None) -> Iterator[Step]:
        coming = self._fetch(0, k, v, audit)
        yield Step(self.plan.own_step.early, k, v, own.dk, own.dv)
        returning: tuple[Pending, Tensor] | None = None
        for number, stage in enumerate(self.plan.stages):
            assert coming is not None
            pending, keys = coming
            pending.wait()
            coming = self._fetch(number + 1, k, v, audit)
            share = self._grads("exchange.share", number, sum(stage.arriving), keys).zero_()
            if stage.step.program.tasks:
                yield Step(stage.step, keys[:, 0], keys[:, 1], *grad_places(share))
            if returning is not None:
                self._collect(number - 1, returning, own)
            returning = self._return(number, share, audit)
        yield Step(self.plan.own_step.late, k, v, own.dk, own.dv)
        if returning is not None:
            self._collect(len(self.plan.stages) - 1, returning, own)

    def _fetch(
        self, number: int, k: Tensor, v: Tensor, audit: Audit | None
    ) -> tuple[Pending, Tensor] | None:
        """Post the keys of a stage; None after the last."""
        if number == len(self.plan.stages):
            return None
        stage = self.plan.stages[number]
        row = (2, *k.shape[1:])
        leaving = self.workspace.get(
            f"exchange.leaving.{number % 2}", (sum(stage.sent), *row), k.dtype, k.device
        )
        arriving = self.workspace.get(
            f"exchange.keys.{number % 2}", (sum(stage.arriving), *row), k.dtype, k.device
        )
        for rows, part in zip(stage.leaving, leaving.split(list(stage.sent)), strict=True):
            rows.pack(k, v, part)
        what = f"K/V of exchange stage {number}"
        posted = self.channel.all_to_all(arriving, leaving, stage.arriving, stage.sent, what, audit)
        return posted, arriving

    def _return(self, number: int, share: Tensor, audit: Audit | None) -> tuple[Pending, Tensor]:
        """Post a stage's dK and dV to their owners."""
        stage = self.plan.stages[number]
        back = self._grads("exchange.back", number, sum(stage.sent), share)
        what = f"dK/dV of exchange stage {number}"
        posted = self.channel.all_to_all(back, share, stage.sent, stage.arriving, what, audit)
        return posted, back

    def _collect(self, number: int, returning: tuple[Pending, Tensor], own: OwnGrads) -> None:
        """Add what receivers sent back for the own rows of a stage."""
        pending, back = returning
        pending.wait()
        stage = self.plan.stages[number]
        for rows, part in zip(stage.leaving, back.split(list(stage.sent)), strict=True):
            if rows.count:
                own.add_fused(rows, part)

    def _grads(self, role: str, number: int, rows: int, like: Tensor) -> Tensor:
        """A float32 buffer [rows, 2, kv_heads, D], alternating between stages."""
        kind = accumulation_dtype(like.dtype)
        return self.workspace.get(
            f"{role}.{number % 2}", (rows, *like.shape[1:]), kind, like.device
        )
