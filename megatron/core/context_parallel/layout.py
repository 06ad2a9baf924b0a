"""Layouts: which context-parallel rank holds which positions of a sequence.

A layout is the one source of truth for the split of a row of ``seq_length`` tokens over
``ring_size x ulysses_size`` ranks. It is pure arithmetic: no process group, equal on all ranks.

    contiguous   ring rank r holds the r-th of R equal pieces
    zigzag       2R chunks, ring rank r holds chunks r and 2R-1-r (equal causal work, one document)
    striped      token i lives on ring rank i mod R (Striped Attention, Brandon et al. 2023)
    balanced     2Rk chunks dealt by attention work of the documents (see ``dealing``)

Two invariants that everything else builds on: all ranks hold the same number of tokens, and the
local order of a ring shard is the order of global positions. The ring shard is cut into
``ulysses_size`` contiguous pieces, so that after the Ulysses all-to-all a rank holds the whole ring
shard for its share of the heads.

Cost: chunk layouts keep one owner per chunk (2Rk numbers), striped keeps nothing; positions are
made only when asked for. A layout says nothing of masks or communication.
"""

import dataclasses
import functools
import hashlib
from typing import Any

import numpy as np
import torch

from megatron.core.config.parallel import layout_multiple
from megatron.core.context_parallel.checks import whole_number
from megatron.core.context_parallel.dealing import deal_balanced
from megatron.core.context_parallel.documents import IntArray, normalize_packings


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """An invertible map from (ring rank, ulysses rank, local index) to global position.

    Made by :func:`make_layout`. Layouts are equal, and hash equal, when they place every token
    alike under the same kind and sizes.
    """

    kind: str
    seq_length: int
    ring_size: int
    ulysses_size: int
    chunk_owners: IntArray | None
    """Ring rank of each of the equal chunks of the row; None when striped."""

    @property
    def ring_length(self) -> int:
        """Tokens of one ring shard."""
        return self.seq_length // self.ring_size

    @property
    def local_length(self) -> int:
        """Tokens of one (ring, ulysses) rank."""
        return self.ring_length // self.ulysses_size

    @property
    def chunk_length(self) -> int:
        """Tokens of one chunk (1 when striped)."""
        return 1 if self.chunk_owners is None else self.seq_length // len(self.chunk_owners)

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """A small hashable value, equal exactly for equal layouts, equal on every rank."""
        owners = b"" if self.chunk_owners is None else self.chunk_owners.tobytes()
        digest = hashlib.blake2b(owners, digest_size=16).hexdigest()
        return (self.kind, self.seq_length, self.ring_size, self.ulysses_size, digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        chunks = "" if self.chunk_owners is None else f", chunks={len(self.chunk_owners)}"
        return (
            f"Layout({self.kind}, seq_length={self.seq_length}, ring_size={self.ring_size}, "
            f"ulysses_size={self.ulysses_size}{chunks})"
        )

    @functools.cached_property
    def chunks_of_rank(self) -> IntArray:
        """[ring_size, chunks per rank]: the chunks of each ring rank, ascending."""
        assert self.chunk_owners is not None, "a striped layout has no chunks"
        order = np.argsort(self.chunk_owners, kind="stable")
        return order.reshape(self.ring_size, -1).astype(np.int64)

    def intervals(self, ring_rank: int) -> list[tuple[int, int]]:
        """Global runs [start, end) of a ring shard in local order, adjacent runs joined.

        A striped layout over more than one rank has runs of one token: as many as it has tokens.
        """
        return [(int(start), int(end)) for start, end in self.interval_array(ring_rank)]

    def interval_array(self, ring_rank: int) -> IntArray:
        """The same as an array [runs, 2]."""
        self.check_rank(ring_rank)
        if self.chunk_owners is None:
            starts = np.arange(ring_rank, self.seq_length, self.ring_size, dtype=np.int64)
            length = 1
        else:
            length = self.chunk_length
            starts = self.chunks_of_rank[ring_rank] * length
        opens = np.concatenate(([True], starts[1:] != starts[:-1] + length))
        closes = np.concatenate((opens[1:], [True]))
        return np.stack((starts[opens], starts[closes] + length), axis=1)

    def ring_positions(self, ring_rank: int) -> torch.Tensor:
        """int64 [ring_length]: global positions of a whole ring shard in local order."""
        self.check_rank(ring_rank)
        if self.chunk_owners is None:
            return torch.arange(ring_rank, self.seq_length, self.ring_size)
        starts = torch.from_numpy(self.chunks_of_rank[ring_rank] * self.chunk_length)
        return (starts[:, None] + torch.arange(self.chunk_length)).reshape(-1)

    def positions(self, ring_rank: int, ulysses_rank: int = 0) -> torch.Tensor:
        """int64 [local_length]: global positions of one rank in local order."""
        self.check_rank(ring_rank, ulysses_rank)
        start = ulysses_rank * self.local_length
        return self.ring_positions(ring_rank)[start : start + self.local_length].clone()

    def locate(self, positions: Any) -> tuple[IntArray, IntArray, IntArray]:
        """Inverse of :meth:`positions`: (ring rank, ulysses rank, local index) of each position.

        Raises:
            ValueError: for a position outside the row.
        """
        at = np.asarray(positions, dtype=np.int64)
        if at.size and (at.min() < 0 or at.max() >= self.seq_length):
            raise ValueError(
                f"positions {at.min()}..{at.max()} must lie in 0..{self.seq_length - 1}"
            )
        if self.chunk_owners is None:
            ring = at % self.ring_size
        else:
            ring = self.chunk_owners[at // self.chunk_length]
        row = self.rows_of(at)
        return ring, row // self.local_length, row % self.local_length

    def rows_of(self, positions: IntArray) -> IntArray:
        """Row of each global position inside its own ring shard."""
        if self.chunk_owners is None:
            return positions // self.ring_size
        chunk, offset = np.divmod(positions, self.chunk_length)
        return self._chunk_rank[chunk] * self.chunk_length + offset

    def rows_below(self, ring_rank: int, positions: IntArray) -> IntArray:
        """How many rows of a ring shard lie before each global position (0..seq_length).

        As local order is global order, this is also the local index where the position would
        stand, and rows of a global interval [s, e) are the local range rows_below(s)..(e).
        """
        if self.chunk_owners is None:
            return np.maximum(0, -((ring_rank - positions) // self.ring_size))
        chunk, offset = np.divmod(positions, self.chunk_length)
        full = np.searchsorted(self.chunks_of_rank[ring_rank], chunk) * self.chunk_length
        owner = self.chunk_owners[np.minimum(chunk, len(self.chunk_owners) - 1)]
        return full + np.where(owner == ring_rank, offset, 0)

    def rows_below_all(self, positions: IntArray) -> IntArray:
        """[ring_size, positions]: :meth:`rows_below` of every ring rank at once."""
        ranks = np.arange(self.ring_size, dtype=np.int64)[:, None]
        if self.chunk_owners is None:
            return np.maximum(0, -((ranks - positions[None]) // self.ring_size))
        count = len(self.chunk_owners)
        chunk, offset = np.divmod(positions, self.chunk_length)
        below = np.searchsorted(self._rank_chunk_keys, ranks * (count + 1) + chunk[None])
        full = (below - ranks * self.chunks_of_rank.shape[1]) * self.chunk_length
        owner = self.chunk_owners[np.minimum(chunk, count - 1)]
        return full + np.where(owner[None] == ranks, offset[None], 0)

    @functools.cached_property
    def _chunk_rank(self) -> IntArray:
        """For each chunk its index among its owner's chunks."""
        index = np.empty(self.chunks_of_rank.size, dtype=np.int64)
        index[self.chunks_of_rank.reshape(-1)] = np.tile(
            np.arange(self.chunks_of_rank.shape[1], dtype=np.int64), self.ring_size
        )
        return index

    @functools.cached_property
    def _rank_chunk_keys(self) -> IntArray:
        """(owner, chunk) of all chunks in one ascending array, for a search over all ranks."""
        chunks = self.chunks_of_rank
        ranks = np.arange(self.ring_size, dtype=np.int64)[:, None]
        return (ranks * (chunks.size + 1) + chunks).reshape(-1)

    def check_rank(self, ring_rank: int, ulysses_rank: int = 0) -> None:
        """Raise ValueError for a rank outside the layout."""
        if not (0 <= ring_rank < self.ring_size and 0 <= ulysses_rank < self.ulysses_size):
            raise ValueError(
                f"rank (ring {ring_rank}, ulysses {ulysses_rank}) must lie inside "
                f"ring size {self.ring_size} x ulysses size {self.ulysses_size}"
            )


def make_layout(
    kind: str,
    seq_length: int,
    ring_size: int,
    ulysses_size: int = 1,
    cu_seqlens: Any = None,
) -> Layout:
    """Make the layout of a row.

    Args:
        kind: contiguous, zigzag, striped or balanced.
        seq_length: tokens of the whole row.
        ring_size: ranks between which the sequence stays split during attention.
        ulysses_size: ranks that trade sequence for heads; multiplies the split outside attention.
        cu_seqlens: document boundaries [documents + 1] of the whole row; a list of them gives one
            layout for all rows, from their summed work. Only balanced looks at them (all check
            them); None means one document.

    Raises:
        ValueError: for an unknown kind, a length that does not divide, bad boundaries.
    """
    seq_length = whole_number("--seq-length", seq_length)
    ring_size = whole_number("ring size", ring_size)
    ulysses_size = whole_number("ulysses size", ulysses_size)
    multiple = layout_multiple(kind, ring_size, ulysses_size)
    if seq_length < 1 or seq_length % multiple:
        below = max(0, seq_length) // multiple * multiple
        good = f"{below} or {below + multiple}" if below else f"{multiple}"
        raise ValueError(
            f"--seq-length {seq_length} must be a multiple of {multiple} for the {kind} layout "
            f"with ring size {ring_size} and ulysses size {ulysses_size}; use {good}"
        )
    packings = normalize_packings(cu_seqlens, seq_length)
    owners: IntArray | None
    if kind == "striped":
        owners = None
    elif kind == "contiguous":
        owners = np.arange(ring_size, dtype=np.int64)
    elif kind == "zigzag":
        ranks = np.arange(ring_size, dtype=np.int64)
        owners = np.concatenate((ranks, ranks[::-1]))
    else:
        owners = deal_balanced(packings, seq_length, ring_size)
    return Layout(kind, seq_length, ring_size, ulysses_size, owners)
