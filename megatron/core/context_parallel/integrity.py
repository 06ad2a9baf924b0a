"""Checks that context-parallel ranks exchange what they mean to exchange.

In an iteration that is checked (``--cp-check-interval``) each transfer is accompanied by a seal:
a checksum of the payload and a stamp of what it is (iteration, layer, phase, transfer number).
The receiver seals what it got and compares. That catches corrupted payloads, buffers overwritten
while in flight, buffers sent again from an earlier step, and swapped messages. A rank that sees
a mismatch goes on with the communication of its call, so that nobody hangs, and at the end of
the call all ranks of the context-parallel grid learn of it and raise together.

``check_same_batch`` compares what ranks of one context-parallel group believe to be the same
batch.

Cost of a checked call: a hash of each payload on either side (some ten passes over it), a 32-byte
message beside each transfer and one tiny all-gather per group; nothing in other iterations.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SEAL_SIZE = 4
"""int64 numbers in a seal: two checksums, length, stamp."""

_MASK = (1 << 63) - 1
_LANES = (torch.int32, torch.int16, torch.uint8)
"""What payloads are looked at as; never as something larger, which alignment would not allow."""
_BLOCK = 1 << 20
"""Elements hashed at a time."""
_GOLDEN, _FIRST, _SECOND = (
    value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""The constants of splitmix64, as int64."""


class IntegrityError(RuntimeError):
    """Ranks did not receive what was sent, or did not read the same batch."""


def checksum(payload: Tensor) -> Tensor:
    """int64 [2] of a contiguous tensor: sums of a hash of each element's bits and its place.

    The hash is the finalizer of splitmix64 (Steele et al. 2014), a bijection, so a single changed
    element always shows; any other change goes unseen with odds of about 2^-64.
    """
    bits = payload.detach().reshape(-1)
    lane = next(kind for kind in _LANES if kind.itemsize <= bits.element_size())
    bits = bits.view(lane)
    total = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _BLOCK):
        part = bits[start : start + _BLOCK].to(torch.int64)
        place = torch.arange(start + 1, start + len(part) + 1, device=bits.device)
        mixed = part.add_(place.mul_(_GOLDEN))
        for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
            mixed = _shifted(mixed, shift).mul_(factor)
        total[0] += mixed.sum()
        total[1] += _shifted(mixed.mul_(_FIRST), 32).sum()
    return total


def _shifted(x: Tensor, shift: int) -> Tensor:
    """x ^ (x >> shift), zeros coming in from the left."""
    return (x >> shift).bitwise_and_((1 << (64 - shift)) - 1).bitwise_xor_(x)


def seal(payload: Tensor, stamp: int) -> Tensor:
    """int64 [4] that accompanies a payload."""
    rest = torch.tensor([payload.numel(), stamp], dtype=torch.int64, device=payload.device)
    return torch.cat((checksum(payload), rest))


@dataclasses.dataclass
class Audit:
    """Seals and compares the transfers of one attention call of a checked iteration."""

    iteration: int
    layer: int | None
    phase: str
    """forward or backward."""
    faults: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    """(peer's global rank, what was received) of each mismatch on this rank."""
    count: int = 0

    def stamp(self, what: str, number: int) -> int:
        """A number that both sides of a transfer compute alike."""
        text = f"{self.iteration} {self.layer} {self.phase} {what} {number}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) & _MASK

    def next_number(self) -> int:
        """Transfers of a call are numbered in the order all ranks make them."""
        self.count += 1
        return self.count

    def compare(self, payload: Tensor, sealed: Tensor, stamp: int, peer: int, what: str) -> None:
        """Note a fault unless the payload and stamp are those that the peer sealed."""
        if not torch.equal(seal(payload, stamp), sealed):
            self.faults.append((peer, what))

    def finish(self, groups: Sequence[dist.ProcessGroup | None], device: torch.device) -> None:
        """Tell all ranks of the grid; raise on all of them if any saw a fault.

        Raises:
            IntegrityError: naming iteration, layer, phase, the rank that saw it and its peer.
        """
        if all(group is None for group in groups):
            return  # one rank alone: nothing was sent
        me = dist.get_rank()
        report = [1, me, self.faults[0][0]] if self.faults else [0, 0, 0]
        for group in groups:
            if group is None:
                continue
            own = torch.tensor(report, dtype=torch.int64, device=device)
            every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(every, own, group=group)
            report = next((x for x in (e.tolist() for e in every) if x[0]), report)
        if not report[0]:
            return
        layer = "unnumbered layer" if self.layer is None else f"layer {self.layer}"
        where = f"iteration {self.iteration}, {layer}, {self.phase}"
        if self.faults:
            seen = "; ".join(f"{what} from rank {peer}" for peer, what in self.faults)
            raise IntegrityError(
                f"context-parallel transfer check failed at {where}: rank {me} received {seen}, "
                "which is not what was sealed by the sender (corrupted, stale or swapped buffer)"
            )
        raise IntegrityError(
            f"context-parallel transfer check failed at {where}: rank {report[1]} reported a bad "
            f"transfer from rank {report[2]}"
        )


def check_same_batch(
    fields: Mapping[str, Any],
    group: dist.ProcessGroup | None,
    *,
    iteration: int,
    device: Any = "cpu",
) -> None:
    """Compare a hash of each field over the ranks of a context-parallel group.

    Args:
        fields: name -> tensor, number, string, None, or lists of these; same names on every rank.
        group: the context-parallel group; None does nothing.
        iteration: for the message.
        device: where the group communicates from.

    Raises:
        IntegrityError: on every rank, naming the field and the ranks that differ from the first.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    own = torch.tensor([_hash(fields[name]) for name in fields], dtype=torch.int64, device=device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    ranks = dist.get_process_group_ranks(group)
    for index, name in enumerate(fields):
        values = [int(hashes[index]) for hashes in every]
        odd = [rank for rank, value in zip(ranks, values, strict=True) if value != values[0]]
        if odd:
            raise IntegrityError(
                f"ranks of one context-parallel group read different batches at iteration "
                f"{iteration}: {name} of ranks {odd} differs from that of rank {ranks[0]}"
            )


def _hash(value: Any) -> int:
    """63 bits of a value's content."""
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, value)
    return int.from_bytes(digest.digest()) & _MASK


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}".encode())
        for item in value:
            _feed(digest, item)
    else:
        digest.update(f"{type(value).__name__}{value!r}".encode())
