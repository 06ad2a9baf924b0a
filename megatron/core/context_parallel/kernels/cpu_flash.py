"""Adapter of torch's CPU flash attention: the only place that knows its signature and its traps.

Found by trying (torch 2.13): it takes [n, heads, rows, D] with any strides and native GQA, works
for any D, and its backward wants lse of shape [n, heads, rows]. Empty tiles kill the process,
causal is aligned top-left, a row that its mask hides wholly gets lse 0, dropout raises. Tiles
here are never empty, causal ones are square, and no row of a tile is wholly hidden (all three
are asserted).

bfloat16 and float16 are computed in float32: partial results then really are float32 (the op
returns its input type), forward takes the same time, and backward is several times faster on
processors without bfloat16 matrix units. Cost: a float32 copy of the rows at hand.

Rows of one head lie far apart in [rows, heads, D]; long tiles walk through them again and again,
so they are copied head by head first (measured at 8K rows: a few percent of forward, about a
tenth of backward; short tiles lose by it). Cost: the rows of one call once more.
"""

import torch
from torch import Tensor

from megatron.core.context_parallel.kernels.tiled import TileCall, TiledKernel, TileUpstream

HEAD_MAJOR_ROWS = 4096
"""Tiles with at least so many rows are copied head by head."""


class CpuFlashKernel(TiledKernel):
    """``torch.ops.aten._scaled_dot_product_flash_attention_for_cpu`` and its backward."""

    name = "flash"

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if dtype == torch.float64 else torch.float32

    def tile_forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: TileCall
    ) -> tuple[Tensor, Tensor]:
        causal, mask = _mask(q, call)
        q, k, v = _head_major(call, q, k, v)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=call.scale
        )
        return out, lse

    def tile_backward(
        self, up: TileUpstream, q: Tensor, k: Tensor, v: Tensor, call: TileCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        causal, mask = _mask(q, call)
        grad_out, q, k, v, out = _head_major(call, up.grad_out, q, k, v, up.out)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, up.lse, 0.0, causal, attn_mask=mask, scale=call.scale
        )
        return dq, dk, dv


def _head_major(call: TileCall, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tiles [n, heads, rows, D], contiguous if they are long."""
    if max(call.band.q_len, call.band.k_len) < HEAD_MAJOR_ROWS:
        return tensors
    return tuple(tensor.contiguous() for tensor in tensors)


def _mask(q: Tensor, call: TileCall) -> tuple[bool, Tensor | None]:
    """(is_causal, additive mask) of a tile."""
    band = call.band
    assert call.dropout is None, "the flash kernel has no dropout"
    assert min(q.shape[0], band.q_len, band.k_len) > 0, "an empty tile would kill the process"
    if band.is_full:
        return False, None
    if band.is_causal:
        return True, None
    assert band.lo <= 0 and band.hi >= band.q_len - band.k_len, "a row without a visible key"
    return False, call.masks.get(band, q.dtype, q.device)
