"""Activations and their gradients between pipeline ranks, one batch a slot, waited for lazily.

A receive is posted as soon as the schedule says that the tensor is being made, into a buffer made
for it, and waited for only when a pass takes it. A sent tensor is kept until two slots later. So
memory is that of the few tensors under way, not of all micro-batches, and shapes may differ from
step to step and from micro-batch to micro-batch: both ends compute them from the batch.
"""

import collections
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.pipeline_parallel.schedule import Pass, Slot

_KEEP_SENT_SLOTS = 2


class Transport:
    """Sends and receives of one step on one rank.

    Args:
        group: the pipeline group; ranks in it are those of the schedule.
        empty: makes the buffer for what a pass needs.
    """

    def __init__(self, group: dist.ProcessGroup, empty: Callable[[Pass], torch.Tensor]) -> None:
        self._group = group
        self._empty = empty
        self._received: dict[Pass, tuple[torch.Tensor, list[Any]]] = {}
        self._sent: collections.deque[tuple[int, list[Any], torch.Tensor]] = collections.deque()
        self._slot = 0

    def exchange(self, slot: Slot, made: torch.Tensor | None) -> None:
        """Post this slot's batch; ``made`` is the result of the slot's pass.

        All ranks post their batches in slot order, so both ends of a transfer are at the same place
        of the same sequence. Waiting here for sends of two slots ago cannot deadlock: their
        receivers post them before anything that could wait for this slot.
        """
        ops, buffers = [], []
        for transfer in slot.sends:
            assert made is not None
            ops.append(self._op(dist.isend, made, transfer.target))
        for transfer in slot.receives:
            buffer = self._empty(transfer.needed_by)
            buffers.append(buffer)
            ops.append(self._op(dist.irecv, buffer, transfer.source))
        if ops:
            works = dist.batch_isend_irecv(ops)
            # NCCL returns one handle for the batch, gloo one for each operation.
            per_op = [[work] for work in works] if len(works) == len(ops) else [works] * len(ops)
            sends = len(slot.sends)
            if sends:
                assert made is not None
                self._sent.append((self._slot, [w for ws in per_op[:sends] for w in ws], made))
            for transfer, buffer, handles in zip(
                slot.receives, buffers, per_op[sends:], strict=True
            ):
                self._received[transfer.needed_by] = (buffer, handles)
        self._slot += 1
        while self._sent and self._sent[0][0] < self._slot - _KEEP_SENT_SLOTS:
            self._wait_oldest()

    def take(self, needed_by: Pass) -> torch.Tensor:
        """The tensor that ``needed_by`` needs, once it is here."""
        buffer, handles = self._received.pop(needed_by)
        for handle in handles:
            handle.wait()
        return buffer

    def finish(self) -> None:
        """Wait for the last sends; everything received must have been taken."""
        while self._sent:
            self._wait_oldest()
        assert not self._received

    def _wait_oldest(self) -> None:
        _, handles, _ = self._sent.popleft()
        for handle in handles:
            handle.wait()

    def _op(self, kind: Callable[..., Any], tensor: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, group=self._group, group_peer=peer)
