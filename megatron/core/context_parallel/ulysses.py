"""Ulysses (a2a): trade a shard of the sequence for a shard of the heads, and back.

::

    sequence shards [B, s, all heads, D]  --all-to-all-->  head shards [B * U * s, own heads, D]

U neighbouring ranks each hold a piece of a ring shard; after one packed all-to-all of q, k and v
each holds the whole ring shard for its heads (Jacobs et al., DeepSpeed Ulysses, 2023). A row on
the wire is the concatenation of everything one receiver needs of that token, so for one batch
row what arrives is already the fused rows that attention reads as strided views, without
unpacking.

Query heads are divided as evenly as they go (the first ranks take one more). A KV head goes to
the ranks whose query heads read it and to no other; with fewer KV heads than ranks it goes to
several, and their gradients, partial sums then, come back in float32 and are added. If the query
heads of a rank do not read its KV heads equally often, KV is expanded to one head per query head
after the all-to-all.

Cost per rank: (U-1)/U of the local q, k, v out and as much in, the output the same way. The
bound on U is the number of query heads.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron.core.context_parallel.channel import Channel
from megatron.core.context_parallel.integrity import Audit
from megatron.core.context_parallel.placing import on_device


@dataclasses.dataclass(frozen=True)
class HeadSplit:
    """Which query and KV heads each of U ranks computes."""

    num_heads: int
    num_kv_heads: int
    size: int

    def query(self, rank: int) -> range:
        """Query heads of a rank."""
        share, more = divmod(self.num_heads, self.size)
        start = rank * share + min(rank, more)
        return range(start, start + share + (rank < more))

    def kv(self, rank: int) -> range:
        """KV heads that a rank's query heads read."""
        group = self.num_heads // self.num_kv_heads
        heads = self.query(rank)
        return range(heads.start // group, (heads.stop - 1) // group + 1)

    def expansion(self, rank: int) -> tuple[int, ...] | None:
        """Local KV head of each local query head, or None where plain grouping gives the same."""
        group = self.num_heads // self.num_kv_heads
        heads, kv = self.query(rank), self.kv(rank)
        local = tuple(head // group - kv.start for head in heads)
        ratio, odd = divmod(len(heads), len(kv))
        if not odd and local == tuple(index // ratio for index in range(len(heads))):
            return None
        return local

    @property
    def shares_kv(self) -> bool:
        """Some KV head is read by several ranks, so its gradient arrives in parts."""
        return sum(len(self.kv(rank)) for rank in range(self.size)) > self.num_kv_heads


def make_head_split(num_heads: int, num_kv_heads: int, ulysses_size: int) -> HeadSplit:
    """Check that heads can be divided.

    Raises:
        ValueError: if KV heads do not divide query heads, or a rank would get no query head.
    """
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"query heads {num_heads} must be a multiple of KV heads {num_kv_heads} "
            "(--num-attention-heads, --num-query-groups, both per tensor-parallel rank)"
        )
    if ulysses_size > num_heads:
        raise ValueError(
            f"ulysses size {ulysses_size} must not exceed the query heads of a "
            f"tensor-parallel rank ({num_heads}); use --hierarchical-context-parallel-sizes with "
            f"{num_heads} or less as the first number, and a larger ring"
        )
    return HeadSplit(num_heads, num_kv_heads, ulysses_size)


class Ulysses:
    """One rank's all-to-alls. Size one: views, nothing moves."""

    def __init__(self, split: HeadSplit, channel: Channel) -> None:
        assert split.size == channel.size
        self.split = split
        self.channel = channel
        self.rank = channel.rank

    def to_heads(
        self, parts: Sequence[tuple[Tensor, str]], audit: Audit | None = None
    ) -> list[Tensor]:
        """One all-to-all from sequence shards to head shards.

        Args:
            parts: ([B, s, heads, ...], "query" or "kv"), the first in the wire type; others may
                be wider. ``s`` and B are equal on all ranks.
            audit: of a checked iteration.

        Returns:
            For each part its own heads of the whole ring shard, flat: [B * U * s, heads, ...].
        """
        if self.channel.size == 1:
            return [_dense_heads(part).flatten(0, 1) for part, _ in parts]
        wire = parts[0][0].dtype
        batch, local = parts[0][0].shape[:2]
        rows = [
            torch.cat(
                [
                    _bits(part[:, :, _slice(self._heads(kind, peer))], wire).flatten(2)
                    for part, kind in parts
                ],
                dim=2,
            )
            for peer in range(self.channel.size)
        ]
        width = rows[self.rank].shape[2]
        sent = torch.cat([row.reshape(-1) for row in rows])
        received = sent.new_empty(self.channel.size * batch * local * width)
        splits = [row.numel() for row in rows]
        evenly = [batch * local * width] * self.channel.size
        pending = self.channel.all_to_all(received, sent, evenly, splits, "Ulysses heads", audit)
        pending.wait()
        table = received.view(self.channel.size, batch, local, width)
        flat = table.transpose(0, 1).reshape(
            batch * self.channel.size * local, width
        )  # a view for one batch row
        return self._columns(flat, parts, wire)

    def _columns(
        self, flat: Tensor, parts: Sequence[tuple[Tensor, str]], wire: torch.dtype
    ) -> list[Tensor]:
        """Split fused rows [rows, width] into the parts."""
        result, offset = [], 0
        for part, kind in parts:
            heads, inner = len(self._heads(kind, self.rank)), part.shape[3:]
            factor = part.element_size() // flat.element_size()
            width = heads * inner.numel() * factor
            columns = flat[:, offset : offset + width]
            offset += width
            if part.dtype != wire:
                columns = columns.clone(memory_format=torch.contiguous_format).view(part.dtype)
            result.append(columns.unflatten(1, (heads, *inner)))
        return result

    def to_sequence(
        self,
        parts: Sequence[tuple[Tensor, str]],
        shape: tuple[int, int],
        wire: torch.dtype,
        audit: Audit | None = None,
    ) -> list[Tensor]:
        """One all-to-all from head shards to sequence shards; the transpose of ``to_heads``.

        Args:
            parts: (flat [B * U * s, own heads, ...], "query" or "kv"), of the wire type or wider.
            shape: (B, s).
            wire: type on the wire.
            audit: of a checked iteration.

        Returns:
            For each part [B, s, all heads, ...]; where several ranks hold a KV head, the sum.
        """
        size = self.channel.size
        if size == 1:
            return [part.view(*shape, *part.shape[1:]) for part, _ in parts]
        batch, local = shape
        flat = torch.cat([_bits(part, wire).flatten(1) for part, _ in parts], dim=1)
        width = flat.shape[1]
        sent = flat.view(batch, size, local, width).transpose(0, 1).reshape(-1)
        widths = [self._wire_width(parts, peer, wire) for peer in range(size)]
        splits = [batch * local * w for w in widths]
        received = sent.new_empty(sum(splits))
        evenly = [batch * local * width] * size
        self.channel.all_to_all(received, sent, splits, evenly, "Ulysses sequence", audit).wait()
        pieces = [
            piece.view(batch, local, w)
            for piece, w in zip(received.split(splits), widths, strict=True)
        ]
        return self._assemble(pieces, parts, wire)

    def _assemble(
        self, pieces: Sequence[Tensor], parts: Sequence[tuple[Tensor, str]], wire: torch.dtype
    ) -> list[Tensor]:
        """Put every rank's heads in place, adding where a KV head comes from several."""
        batch, local, _ = pieces[0].shape
        offsets = [0] * len(pieces)
        result = []
        for part, kind in parts:
            total = self.split.num_heads if kind == "query" else self.split.num_kv_heads
            inner = part.shape[2:]
            whole = part.new_empty(batch, local, total, *inner)
            filled = 0
            for peer, piece in enumerate(pieces):
                heads = self._heads(kind, peer)
                width = len(heads) * inner.numel() * part.element_size() // piece.element_size()
                columns = piece[:, :, offsets[peer] : offsets[peer] + width]
                offsets[peer] += width
                if part.dtype != wire:
                    columns = columns.clone(memory_format=torch.contiguous_format).view(part.dtype)
                values = columns.unflatten(2, (len(heads), *inner))
                again = max(0, filled - heads.start)  # heads that an earlier rank filled
                whole[:, :, heads.start : heads.start + again] += values[:, :, :again]
                whole[:, :, heads.start + again : heads.stop] = values[:, :, again:]
                filled = heads.stop
            result.append(whole)
        return result

    def _wire_width(self, parts: Sequence[tuple[Tensor, str]], peer: int, wire: torch.dtype) -> int:
        """Wire elements of one row from a peer."""
        size = torch.empty((), dtype=wire).element_size()
        return sum(
            len(self._heads(kind, peer)) * part.shape[2:].numel() * part.element_size() // size
            for part, kind in parts
        )

    def _heads(self, kind: str, rank: int) -> range:
        return self.split.query(rank) if kind == "query" else self.split.kv(rank)


def _dense_heads(x: Tensor) -> Tensor:
    """x [..., heads, D] with each row's heads in one piece, as kernels read it."""
    dense = x.stride(-1) == 1 and (x.shape[-2] == 1 or x.stride(-2) >= x.shape[-1])
    return x if dense else x.contiguous()


def expand_kv(x: Tensor, expansion: Sequence[int] | None) -> Tensor:
    """One KV head per query head: x [rows, kv_heads, D] -> [rows, heads, D]."""
    if expansion is None:
        return x
    return x.index_select(1, on_device(np.array(expansion), x.device))


def reduce_kv(grad: Tensor, expansion: Sequence[int] | None, kv_heads: int) -> Tensor:
    """The transpose of ``expand_kv``: sum the gradients of one KV head."""
    if expansion is None:
        return grad
    index = on_device(np.array(expansion), grad.device)
    total = grad.new_zeros(grad.shape[0], kv_heads, *grad.shape[2:])
    return total.index_add_(1, index, grad)


def _slice(heads: range) -> slice:
    return slice(heads.start, heads.stop)


def _bits(x: Tensor, wire: torch.dtype) -> Tensor:
    """The same bits as elements of the wire type (the last dim grows for wider types)."""
    if x.dtype == wire:
        return x
    return x.contiguous().view(wire)
