"""Reference block kernel: plain tensor operations, any float type, with attention dropout.

Scores are made block by block (at most ``BLOCK_ELEMENTS`` of them at a time, so memory does not
grow with the square of the sequence), in at least float32, and blocks are merged by log-sum-exp.
It is the yardstick for the other kernels, the only one with dropout, and slow: about a tenth of
flash speed.

The dropout mask is a hash of (seed, query head, query position, key position), all global: forward
and backward, any layout and any number of ranks draw the same mask, and no mask is stored.
"""

import torch
from torch import Tensor

from megatron.core.context_parallel.kernels.tiled import (
    TileCall,
    TiledKernel,
    TileDropout,
    TileUpstream,
)
from megatron.core.context_parallel.merge import accumulation_dtype, merge_

BLOCK_ELEMENTS = 1 << 22
"""Scores held at once."""


class ReferenceKernel(TiledKernel):
    """Blockwise attention in tensor operations."""

    name = "reference"
    needs_delta = True

    def tile_forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: TileCall
    ) -> tuple[Tensor, Tensor]:
        kind = accumulation_dtype(q.dtype)
        out = torch.zeros(q.shape, dtype=kind, device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=kind, device=q.device)
        for rows, columns in _blocks(q, k, call):
            scores = _scores(q, k, call, rows, columns)
            top = scores.amax(dim=-1, keepdim=True)
            top = top.masked_fill(top == -torch.inf, 0.0)
            weight = torch.exp(scores - top)
            total = weight.sum(dim=-1, keepdim=True)
            block_lse = (top + torch.log(total)).squeeze(-1).flatten(1, 2)
            weight = weight / total.masked_fill(total == 0, 1.0)
            if call.dropout is not None:
                weight = weight * _keep(call.dropout, q.shape[1], k.shape[1], rows, columns, kind)
            part = weight @ v[:, :, None, columns].to(kind)
            merge_(out[:, :, rows], lse[:, :, rows], part.flatten(1, 2), block_lse)
        return out, lse

    def tile_backward(
        self, up: TileUpstream, q: Tensor, k: Tensor, v: Tensor, call: TileCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = accumulation_dtype(q.dtype)
        dq, dk, dv = (torch.zeros(x.shape, dtype=kind, device=x.device) for x in (q, k, v))
        kv_heads = k.shape[1]
        assert up.delta is not None
        for rows, columns in _blocks(q, k, call):
            lse = _grouped(up.lse[:, :, rows, None], kv_heads).to(kind)
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)
            weight = torch.exp(_scores(q, k, call, rows, columns) - lse)
            grad_out = _grouped(up.grad_out[:, :, rows], kv_heads).to(kind)
            grad_weight = grad_out @ v[:, :, None, columns].to(kind).transpose(-1, -2)
            dropped = weight
            if call.dropout is not None:
                keep = _keep(call.dropout, q.shape[1], kv_heads, rows, columns, kind)
                dropped, grad_weight = weight * keep, grad_weight * keep
            delta = _grouped(up.delta[:, :, rows, None], kv_heads).to(kind)
            grad_score = weight * (grad_weight - delta) * call.scale
            dv[:, :, columns] += (dropped.transpose(-1, -2) @ grad_out).sum(dim=2)
            block_q = _grouped(q[:, :, rows], kv_heads).to(kind)
            dk[:, :, columns] += (grad_score.transpose(-1, -2) @ block_q).sum(dim=2)
            dq[:, :, rows] += (grad_score @ k[:, :, None, columns].to(kind)).flatten(1, 2)
        return dq, dk, dv


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[n, heads, ...] -> [n, kv_heads, heads // kv_heads, ...]."""
    return x.unflatten(1, (kv_heads, x.shape[1] // kv_heads))


def _blocks(q: Tensor, k: Tensor, call: TileCall) -> list[tuple[slice, slice]]:
    """(row slice, column slice) of the blocks in which something is visible."""
    q_len, k_len, lo, hi = call.band
    budget = max(1, BLOCK_ELEMENTS // (q.shape[0] * q.shape[1]))
    rows = max(1, min(q_len, 512, budget))
    columns = max(1, min(k_len, budget // rows))
    return [
        (slice(top, min(top + rows, q_len)), slice(left, min(left + columns, k_len)))
        for top in range(0, q_len, rows)
        for left in range(0, k_len, columns)
        if min(top + rows, q_len) - 1 - left >= lo and top - (min(left + columns, k_len) - 1) <= hi
    ]


def _scores(q: Tensor, k: Tensor, call: TileCall, rows: slice, columns: slice) -> Tensor:
    """Scaled scores [n, kv_heads, group, rows, columns], -inf where not visible."""
    kind = accumulation_dtype(q.dtype)
    block_q = _grouped(q[:, :, rows], k.shape[1]).to(kind)
    scores = (block_q @ k[:, :, None, columns].to(kind).transpose(-1, -2)) * call.scale
    if call.band.is_full:
        return scores
    gap = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
    gap = gap - torch.arange(columns.start, columns.stop, device=q.device)[None]
    return scores.masked_fill_((gap < call.band.lo) | (gap > call.band.hi), -torch.inf)


def _keep(
    dropout: TileDropout, heads: int, kv_heads: int, rows: slice, columns: slice, kind: torch.dtype
) -> Tensor:
    """Factor of each weight [n, kv_heads, group, rows, columns]: 0, or 1 / (1 - rate)."""
    head = torch.arange(heads, device=dropout.q_ids.device) + dropout.first_head
    seed = (dropout.seed * 0x9E3779B1 + (1 << 63)) % (1 << 64) - (1 << 63)  # wraps as int64 does
    bits = _mix(_mix(head + seed)[None, :, None] + dropout.q_ids[:, None, rows])
    bits = _mix(bits[..., None] + dropout.k_ids[:, None, None, columns])
    uniform = (bits >> 11 & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53
    keep = (uniform >= dropout.rate).to(kind) / (1.0 - dropout.rate)
    return _grouped(keep, kv_heads)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 with wrap-around (Steele, Lea & Flood 2014)."""
    x = x + -7046029254386353131
    x = (x ^ (x >> 30 & ((1 << 34) - 1))) * -4658895280553007687
    x = (x ^ (x >> 27 & ((1 << 37) - 1))) * -7723592293110705685
    return x ^ (x >> 31 & ((1 << 33) - 1))
