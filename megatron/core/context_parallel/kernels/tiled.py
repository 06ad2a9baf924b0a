"""Shared machinery of kernels that take a batch of equally shaped tiles [n, heads, rows, D].

A library adapter supplies one forward and one backward of such a batch; grouping tasks into calls,
views and gathers, merging, scattering gradients and padding are here once.
"""

import abc
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.context_parallel.calls import Call, CallList, make_calls
from megatron.core.context_parallel.documents import IntArray
from megatron.core.context_parallel.kernels.base import (
    BlockKernel,
    Grads,
    Inputs,
    Softmax,
    Upstream,
)
from megatron.core.context_parallel.prefix import is_causal_square, is_full_band


class Band(NamedTuple):
    """Pair (i, j) of a tile is visible iff lo <= i - j <= hi."""

    q_len: int
    k_len: int
    lo: int
    hi: int

    @property
    def is_full(self) -> bool:
        return bool(is_full_band(self.q_len, self.k_len, self.lo, self.hi))

    @property
    def is_causal(self) -> bool:
        return bool(is_causal_square(self.q_len, self.k_len, self.lo, self.hi))

    def visible(self, device: torch.device) -> Tensor:
        """bool [q_len, k_len]."""
        rows = torch.arange(self.q_len, device=device)[:, None]
        gap = rows - torch.arange(self.k_len, device=device)[None]
        return (gap >= self.lo) & (gap <= self.hi)


class TileDropout(NamedTuple):
    """Dropout of one call: ids of its rows."""

    rate: float
    seed: int
    q_ids: Tensor
    """int64 [n, q_len]"""
    k_ids: Tensor
    """int64 [n, k_len]"""
    first_head: int


class MaskCache:
    """Additive masks of the band tiles of one program, made when first needed."""

    def __init__(self) -> None:
        self._masks: dict[Any, Tensor] = {}

    def get(self, band: Band, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[q_len, k_len]: 0 where visible, -inf elsewhere."""
        key = (band, dtype, device)
        if key not in self._masks:
            mask = torch.zeros(band.q_len, band.k_len, dtype=dtype, device=device)
            self._masks[key] = mask.masked_fill_(~band.visible(device), -torch.inf)
        return self._masks[key]


class TiledProgram(NamedTuple):
    """Calls and the masks they share."""

    calls: tuple[Call, ...]
    tasks: int
    pairs: int
    masks: MaskCache


class TiledKernel(BlockKernel):
    """A kernel made of one op pair on [n, heads, rows, D] tiles."""

    tile = 256
    """Rows of the masked tiles that bands are cut into."""

    @abc.abstractmethod
    def tile_forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: "TileCall"
    ) -> tuple[Tensor, Tensor]:
        """(out [n, heads, q_len, D], lse [n, heads, q_len]) of a batch of tiles."""

    @abc.abstractmethod
    def tile_backward(
        self, up: "TileUpstream", q: Tensor, k: Tensor, v: Tensor, call: "TileCall"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv), each shaped like its input, from the global out, lse and delta."""

    def group(self, tasks: IntArray, visited: Any) -> CallList:
        """Calls for a task list."""
        return make_calls(tasks, visited, tile=self.tile)

    def compile(self, tasks: IntArray, visited: Any, device: torch.device) -> TiledProgram:
        listed = self.group(tasks, visited).to(device)
        return TiledProgram(listed.calls, listed.tasks, listed.pairs, MaskCache())

    def forward(self, program: TiledProgram, inputs: Inputs, state: Softmax) -> None:
        for call in program.calls:
            q, k, v = _tiles(call, inputs)
            out, lse = self.tile_forward(q, k, v, _tile_call(call, inputs, program.masks))
            state.fold(call, out.transpose(1, 2), lse.transpose(1, 2))

    def backward(
        self, program: TiledProgram, inputs: Inputs, upstream: Upstream, grads: Grads
    ) -> None:
        for call in program.calls:
            q, k, v = _tiles(call, inputs)
            up = _tile_upstream(call, upstream)
            dq, dk, dv = self.tile_backward(up, q, k, v, _tile_call(call, inputs, program.masks))
            grads.dq.add(call.q, dq.transpose(1, 2), call.q_keep)
            # Padding repeats a tile's last row: as a key it is seen by padded queries alone, whose
            # gradient is zero, so k and q keep the same positions (padded tiles are squares).
            grads.dk.add(call.k, dk.transpose(1, 2), call.q_keep)
            grads.dv.add(call.k, dv.transpose(1, 2), call.q_keep)


class TileCall(NamedTuple):
    """Everything about a batch of tiles but its tensors."""

    band: Band
    scale: float
    masks: MaskCache
    dropout: TileDropout | None


class TileUpstream(NamedTuple):
    """Upstream rows of a batch of tiles: [n, heads, q_len(, D)]."""

    grad_out: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor | None


def _tiles(call: Call, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as [n, heads, rows, D]."""
    q = call.q.view(inputs.q).transpose(1, 2)
    return q, call.k.view(inputs.k).transpose(1, 2), call.k.view(inputs.v).transpose(1, 2)


def _tile_call(call: Call, inputs: Inputs, masks: MaskCache) -> TileCall:
    band = Band(call.q.length, call.k.length, call.lo, call.hi)
    dropout = None
    if inputs.dropout is not None:
        given = inputs.dropout
        q_ids, k_ids = call.q.view(given.q_ids), call.k.view(given.k_ids)
        dropout = TileDropout(given.rate, given.seed, q_ids, k_ids, given.first_head)
    return TileCall(band, inputs.scale, masks, dropout)


def _tile_upstream(call: Call, upstream: Upstream) -> TileUpstream:
    grad_out = call.q.view(upstream.grad_out)
    delta = None if upstream.delta is None else call.q.view(upstream.delta)
    if call.q_keep is not None:
        kept = torch.zeros(grad_out.shape[:2], dtype=torch.bool, device=grad_out.device)
        kept.view(-1)[call.q_keep] = True
        grad_out = grad_out.masked_fill(~kept[..., None, None], 0.0)
        delta = None if delta is None else delta.masked_fill(~kept[..., None], 0.0)
    return TileUpstream(
        grad_out.transpose(1, 2),
        call.q.view(upstream.out).transpose(1, 2),
        call.q.view(upstream.lse).transpose(1, 2),
        None if delta is None else delta.transpose(1, 2),
    )
