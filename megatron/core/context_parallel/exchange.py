"""Needed-rows exchange (all_gather): each rank fetches just the remote keys its queries see.

A ring couples its ranks: each hop costs the slowest of them, and every rank handles every key.
With packed documents a rank needs few remote keys, so here an uneven all-to-all brings exactly
those, in stages of bounded memory. Two stages are under way from the start, behind the compute
of own keys; the next is posted when the buffer of a computed one is free.

In backward the keys come again, and the float32 dK and dV of a stage go back to their owners by
the same plan reversed, behind later stages and the rest of the own keys. An owner adds what
comes back stage by stage and receiver by receiver; rows of one receiver are distinct, so the sum
has one order.

Own keys are spread over the steps (see ``spread``) where there are more stages than are posted
ahead, and in backward, so that all ranks, which do equal work in total, come to each transfer at
about the same time.

Cost per rank: needed rows x 2 x kv_heads x D elements in, the same out on average; backward adds
as many float32. Memory: two stages of keys and two of gradients, each sent and received.
"""

import dataclasses
from collections.abc import Iterator

from torch import Tensor

from megatron.core.context_parallel.channel import Channel, Pending
from megatron.core.context_parallel.integrity import Audit
from megatron.core.context_parallel.merge import accumulation_dtype
from megatron.core.context_parallel.steps import (
    OwnGrads,
    RowIndex,
    Step,
    StepPlan,
    StepSource,
    grad_places,
)
from megatron.core.context_parallel.workspace import Workspace

AHEAD = 2
"""Stages under way at a time."""


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

    stages: tuple[StagePlan, ...]
    own_forward: tuple[StepPlan, ...]
    """Own keys before the first stage and after each."""
    own_backward: tuple[StepPlan, ...]
    """The same, and at the end, behind the last gradients."""


class ExchangeSteps(StepSource):
    """One rank's exchange."""

    def __init__(self, plan: ExchangePlan, channel: Channel, workspace: Workspace) -> None:
        self.plan = plan
        self.channel = channel
        self.workspace = workspace

    def forward(self, k: Tensor, v: Tensor, audit: Audit | None) -> Iterator[Step]:
        coming = [self._fetch(number, k, v, audit) for number in range(self._ahead)]
        yield Step(self.plan.own_forward[0], k, v)
        for number, stage in enumerate(self.plan.stages):
            pending, keys = coming[number]
            pending.wait()
            if stage.step.program.tasks:
                yield Step(stage.step, keys[:, 0], keys[:, 1])
            if number + AHEAD < len(self.plan.stages):
                coming.append(self._fetch(number + AHEAD, k, v, audit))
            if self.plan.own_forward[number + 1].program.tasks:
                yield Step(self.plan.own_forward[number + 1], k, v)

    def backward(self, k: Tensor, v: Tensor, own: OwnGrads, audit: Audit | None) -> Iterator[Step]:
        coming = [self._fetch(number, k, v, audit) for number in range(self._ahead)]
        returning: list[tuple[Pending, Tensor]] = []
        yield Step(self.plan.own_backward[0], k, v, own.dk, own.dv)
        for number, stage in enumerate(self.plan.stages):
            pending, keys = coming[number]
            pending.wait()
            if number >= AHEAD:  # whose buffers come round again
                self._collect(number - AHEAD, returning, own)
            share = self._grads("exchange.share", number, sum(stage.arriving), keys).zero_()
            if stage.step.program.tasks:
                yield Step(stage.step, keys[:, 0], keys[:, 1], *grad_places(share))
            returning.append(self._return(number, share, audit))
            if number + AHEAD < len(self.plan.stages):
                coming.append(self._fetch(number + AHEAD, k, v, audit))
            if self.plan.own_backward[number + 1].program.tasks:
                yield Step(self.plan.own_backward[number + 1], k, v, own.dk, own.dv)
        yield Step(self.plan.own_backward[-1], k, v, own.dk, own.dv)
        for number in range(max(0, len(returning) - AHEAD), len(returning)):
            self._collect(number, returning, own)

    @property
    def _ahead(self) -> int:
        """Stages that are posted before anything is computed."""
        return min(AHEAD, len(self.plan.stages))

    def _fetch(
        self, number: int, k: Tensor, v: Tensor, audit: Audit | None
    ) -> tuple[Pending, Tensor]:
        """Post the keys of a stage."""
        stage = self.plan.stages[number]
        row = (2, *k.shape[1:])
        leaving = self.workspace.get(
            f"exchange.leaving.{number % AHEAD}", (sum(stage.sent), *row), k.dtype, k.device
        )
        arriving = self.workspace.get(
            f"exchange.keys.{number % AHEAD}", (sum(stage.arriving), *row), k.dtype, k.device
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

    def _collect(self, number: int, returning: list[tuple[Pending, Tensor]], own: OwnGrads) -> None:
        """Add what receivers sent back for the own rows of a stage."""
        pending, back = returning[number]
        pending.wait()
        stage = self.plan.stages[number]
        for rows, part in zip(stage.leaving, back.split(list(stage.sent)), strict=True):
            if rows.count:
                own.add_fused(rows, part)

    def _grads(self, role: str, number: int, rows: int, like: Tensor) -> Tensor:
        """A float32 buffer [rows, 2, kv_heads, D], alternating between stages."""
        kind = accumulation_dtype(like.dtype)
        return self.workspace.get(
            f"{role}.{number % AHEAD}", (rows, *like.shape[1:]), kind, like.device
        )
