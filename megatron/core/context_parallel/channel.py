"""Transfers inside one process group: posted without waiting, timed, and sealed when checked.

The ring and the exchange state who sends what to whom; this file is the only one that calls
``torch.distributed`` for payloads. Peers are given as ranks of the group and translated to global
ranks, which is what p2p operations want. Empty messages are not sent. All messages of a swap go in
one batch, so no order of sends and receives can deadlock.

Statistics: bytes sent, transfers, and exposed wait. On CPU the wait is the time spent in
``wait()``; on CUDA, where ``wait()`` only makes the stream wait, it is taken by events around it
and read later.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.context_parallel.integrity import SEAL_SIZE, Audit, seal


class Message(NamedTuple):
    """A contiguous payload to or from a rank of the group."""

    payload: Tensor
    peer: int


@dataclasses.dataclass
class CommStats:
    """What context-parallel communication of this rank has cost so far."""

    bytes_sent: int = 0
    transfers: int = 0
    host_wait: float = 0.0
    events: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)

    def exposed_wait(self) -> float:
        """Seconds in which compute waited for communication; synchronises on CUDA."""
        for start, end in self.events:
            end.synchronize()
            self.host_wait += start.elapsed_time(end) / 1000.0
        self.events.clear()
        return self.host_wait


class Pending:
    """A posted transfer."""

    def __init__(
        self,
        works: Sequence[Any],
        stats: CommStats,
        device: torch.device,
        checks: Sequence[tuple[Tensor, Tensor, int, int, str]] = (),
        audit: Audit | None = None,
        keep: Sequence[Tensor] = (),
    ) -> None:
        self._works = works
        self._stats = stats
        self._device = device
        self._checks = checks
        self._audit = audit
        self._keep = keep

    def wait(self) -> None:
        """Return when receives have arrived and send buffers may be written again."""
        if not self._works:
            return
        if self._device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for work in self._works:
                work.wait()
            end.record()
            self._stats.events.append((start, end))
        else:
            begin = time.perf_counter()
            for work in self._works:
                work.wait()
            self._stats.host_wait += time.perf_counter() - begin
        self._works, self._keep = (), ()
        for payload, sealed, stamp, peer, what in self._checks:
            assert self._audit is not None
            self._audit.compare(payload, sealed, stamp, peer, what)


class Channel:
    """One rank's end of a group. ``group`` None is a group of one: nothing is ever sent."""

    def __init__(self, group: dist.ProcessGroup | None, stats: CommStats) -> None:
        self.group = group
        self.stats = stats
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._global = [] if group is None else dist.get_process_group_ranks(group)

    def swap(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        what: str,
        audit: Audit | None = None,
    ) -> Pending:
        """Post all messages as one batch of isend and irecv."""
        sends = [m for m in sends if m.payload.numel()]
        receives = [m for m in receives if m.payload.numel()]
        number = 0 if audit is None else audit.next_number()
        ops: list[Any] = []
        checks, keep = [], []
        device = torch.device("cpu")
        for operation, messages in ((dist.isend, sends), (dist.irecv, receives)):
            order: dict[int, int] = {}
            for payload, peer in messages:
                assert payload.is_contiguous() and peer != self.rank
                device, target = payload.device, self._global[peer]
                tag = order.get(peer, 0)
                order[peer] = tag + 1
                ops.append(dist.P2POp(operation, payload, target, self.group, 2 * tag))
                if audit is not None:
                    stamp = audit.stamp(what, number * 8 + tag)
                    if operation is dist.isend:
                        sealed = seal(payload, stamp)
                        keep.append(sealed)
                    else:
                        sealed = torch.empty(SEAL_SIZE, dtype=torch.int64, device=device)
                        checks.append((payload, sealed, stamp, target, what))
                    ops.append(dist.P2POp(operation, sealed, target, self.group, 2 * tag + 1))
        works = dist.batch_isend_irecv(ops) if ops else []
        self.stats.transfers += len(sends)
        self.stats.bytes_sent += sum(m.payload.nbytes for m in sends)
        return Pending(works, self.stats, device, checks, audit, keep)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_splits: Sequence[int],
        sent_splits: Sequence[int],
        what: str,
        audit: Audit | None = None,
    ) -> Pending:
        """Post an uneven all-to-all; splits count items of dim 0. All ranks must call it."""
        assert self.group is not None
        works = [
            dist.all_to_all_single(
                received,
                sent,
                list(received_splits),
                list(sent_splits),
                group=self.group,
                async_op=True,
            )
        ]
        checks, keep = [], [sent]
        if audit is not None:
            stamp = audit.stamp(what, audit.next_number())
            seals = torch.stack([seal(part, stamp) for part in sent.split(list(sent_splits))])
            theirs = torch.empty_like(seals)
            works.append(dist.all_to_all_single(theirs, seals, group=self.group, async_op=True))
            keep.append(seals)
            checks = [
                (part, theirs[peer], stamp, self._global[peer], what)
                for peer, part in enumerate(received.split(list(received_splits)))
                if peer != self.rank
            ]
        elsewhere = sum(sent_splits) - sent_splits[self.rank]
        self.stats.transfers += sum(
            1 for peer, size in enumerate(sent_splits) if size and peer != self.rank
        )
        if len(sent):
            self.stats.bytes_sent += elsewhere * (sent.nbytes // len(sent))
        return Pending(works, self.stats, sent.device, checks, audit, keep)
