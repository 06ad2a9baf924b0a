"""Ring attention (p2p): keys walk round the ring, their gradients walk home.

::

    step        0           1            2              R-1
    rank r    own KV     KV of r-1    KV of r-2  ...   KV of r+1
    posted    own ->     KV ->        KV ->            (nothing)
    backward             dKV(r-1) ->  dKV(r-2) ->      dKV(r+1) -> home

K and V of a hop are one buffer [rows, 2, kv_heads, D] and one message; two buffers alternate.
The transfer for step t+1 is posted before the compute of step t and waited for after it (Liu,
Zaharia & Abbeel, Ring Attention, 2023). Only rows that some later rank still needs travel on,
and nothing travels when nobody needs it (see ``rows.ring_source``).

In backward the KV walk again, and each rank adds its share to a float32 buffer of dK and dV that
follows one step behind. The last rank that uses a source's keys sends the sum straight home. The
own share never travels; one half of it is computed first and the other last, so that neither the
first keys nor the last gradients are waited for in idleness. All transfers of a step are one
batch, so a ring of two (one peer on both sides) is no special case.

Cost per rank, forward: ``(R-1) * 2 * rows * kv_heads * D`` elements sent; backward adds as many
float32. Memory: two KV buffers (the first starts with the own keys), and in backward three
gradient buffers (two alternate between compute and sending, one receives), whatever R is.
"""

import dataclasses
from collections.abc import Iterator

from torch import Tensor

from megatron.core.context_parallel.channel import Channel, Message
from megatron.core.context_parallel.integrity import Audit
from megatron.core.context_parallel.merge import accumulation_dtype
from megatron.core.context_parallel.rows import RingSource
from megatron.core.context_parallel.steps import (
    OwnGrads,
    RowIndex,
    Step,
    StepPlan,
    StepSource,
    grad_places,
)
from megatron.core.context_parallel.workspace import Workspace


@dataclasses.dataclass(frozen=True, eq=False)
class RingPlan:
    """Steps and walks of one rank."""

    halves: tuple[StepPlan, StepPlan]
    """Backward: the own keys in two parts, one behind the first transfer, one behind the last."""
    steps: tuple[StepPlan, ...]
    """Step t works on the keys of source (rank - t) mod R."""
    sources: tuple[RingSource, ...]
    """By source, equal on all ranks."""
    own: RowIndex
    """Own rows that leave, in the order of the buffer."""


class RingSteps(StepSource):
    """One rank's ring."""

    def __init__(self, plan: RingPlan, channel: Channel, workspace: Workspace) -> None:
        self.plan = plan
        self.channel = channel
        self.workspace = workspace
        self.size, self.rank = channel.size, channel.rank

    def forward(self, k: Tensor, v: Tensor, audit: Audit | None) -> Iterator[Step]:
        buffer = self._pack(k, v)
        for hop in range(self.size):
            arriving, pending = buffer, None
            if hop + 1 < self.size:
                sends, receives, arriving = self._keys_on(hop, buffer)
                pending = self.channel.swap(sends, receives, f"ring hop {hop + 1}", audit)
            here = (k, v) if hop == 0 else (buffer[:, 0], buffer[:, 1])
            if self.plan.steps[hop].program.tasks:
                yield Step(self.plan.steps[hop], *here)
            if pending is not None:
                pending.wait()
            buffer = arriving

    def backward(self, k: Tensor, v: Tensor, own: OwnGrads, audit: Audit | None) -> Iterator[Step]:
        buffer = self._pack(k, v)
        travelling: Tensor | None = None
        for hop in range(self.size + 1):
            sends, receives, arriving = self._keys_on(hop, buffer)
            grads = self._grads_on(hop, travelling, buffer)
            sends, receives = sends + grads.sends, receives + grads.receives
            pending = self.channel.swap(sends, receives, f"ring hop {hop + 1}", audit)
            share = None
            if hop == 0:
                yield Step(self.plan.halves[0], k, v, own.dk, own.dv)
            elif hop == self.size:
                yield Step(self.plan.halves[1], k, v, own.dk, own.dv)
            elif self.plan.steps[hop].program.tasks:
                share = self._zeroed_share(hop, buffer)
                here = (buffer[:, 0], buffer[:, 1])
                yield Step(self.plan.steps[hop], *here, *grad_places(share[: len(buffer)]))
            pending.wait()
            if grads.home is not None:
                own.add_fused(self.plan.own, grads.home)
            if grads.partial is not None:
                share = self._zeroed_share(hop, buffer) if share is None else share
                share.add_(grads.partial)
            travelling = share
            buffer = arriving

    def _held(self, hop: int, rank: int | None = None) -> RingSource:
        """The source whose keys a rank (default: this one) holds at a hop."""
        rank = self.rank if rank is None else rank
        return self.plan.sources[(rank - hop) % self.size]

    def _pack(self, k: Tensor, v: Tensor) -> Tensor:
        """Own leaving rows [n, 2, kv_heads, D]."""
        shape = (self.plan.own.count, 2, *k.shape[1:])
        buffer = self.workspace.get("ring.keys.0", shape, k.dtype, k.device)
        self.plan.own.pack(k, v, buffer)
        return buffer

    def _keys_on(self, hop: int, buffer: Tensor) -> tuple[list[Message], list[Message], Tensor]:
        """Messages that bring the keys of hop + 1, and the buffer they arrive in."""
        if hop + 1 >= self.size:
            return [], [], buffer
        leaving = buffer[: self._held(hop).counts[hop + 1]]
        count = self._held(hop + 1).counts[hop + 1]
        arriving = self.workspace.get(
            f"ring.keys.{(hop + 1) % 2}", (count, *buffer.shape[1:]), buffer.dtype, buffer.device
        )
        send = Message(leaving, (self.rank + 1) % self.size)
        return [send], [Message(arriving, (self.rank - 1) % self.size)], arriving

    def _zeroed_share(self, hop: int, like: Tensor) -> Tensor:
        """Float32 place for this rank's share of the held source's dK and dV."""
        name, rows = f"ring.share.{hop % 2}", len(self._held(hop).rows)
        return self._grad_buffer(name, rows, like).zero_()

    def _grad_buffer(self, name: str, rows: int, like: Tensor) -> Tensor:
        shape = (rows, *like.shape[1:])
        return self.workspace.get(name, shape, accumulation_dtype(like.dtype), like.device)

    def _grads_on(self, hop: int, travelling: Tensor | None, like: Tensor) -> "_GradMessages":
        """Messages of gradients that hop - 1 completed, posted with the keys of hop + 1."""
        done = hop - 1
        messages = _GradMessages([], [], None, None)
        if done < 1:
            return messages
        held = self._held(done)
        if held.first_hop <= done <= held.last_hop:
            assert travelling is not None
            source = (self.rank - done) % self.size
            onward = (self.rank + 1) % self.size
            messages.sends.append(Message(travelling, source if done == held.last_hop else onward))
        ours = self.plan.sources[self.rank]
        if hop < self.size:
            coming = self._held(hop)
            if coming.first_hop <= done < coming.last_hop:
                partial = self._grad_buffer("ring.partial", len(coming.rows), like)
                messages.receives.append(Message(partial, (self.rank - 1) % self.size))
                messages.partial = partial
        if ours.last_hop == done:
            role = "ring.partial" if messages.partial is None else "ring.home"
            messages.home = self._grad_buffer(role, len(ours.rows), like)
            messages.receives.append(Message(messages.home, (self.rank + done) % self.size))
        return messages


@dataclasses.dataclass
class _GradMessages:
    """Gradient messages of one hop and where they arrive."""

    sends: list[Message]
    receives: list[Message]
    partial: Tensor | None
    """Sum of earlier ranks' shares for the source held now."""
    home: Tensor | None
    """Finished sum of all other ranks' shares for the own keys."""
