"""Adapter of torch's CPU flash attention: the only place that knows its signature and its traps.

Found by trying (torch 2.13): it takes [n, heads, rows, D] with any strides and native GQA, works
for any D, and its backward wants lse of shape [n, heads, rows]. Empty tiles kill the process,
causal is aligned top-left, a row that its mask hides wholly gets lse 0, dropout raises. Tiles
here are never empty, causal ones are square, and no row of a tile is wholly hidden (all three
are asserted).

bfloat16 and float16 are computed in float32: partial results then really are float32 (the op
returns its input type), forward takes the same time, and backward is several times faster on
processors without bfloat16 matrix units. Cost: a float32 copy of the rows at hand.
"""

import torch
from torch import Tensor

from megatron.core.context_parallel.kernels.tiled import TileCall, TiledKernel, TileUpstream


class CpuFlashKernel(TiledKernel):
    """``torch.ops.aten._scaled_dot_product_flash_attention_for_cpu`` and its backward."""

    name = "flash"

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if dtype == torch.float64 else torch.float32

    def tile_forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: TileCall
    ) -> tuple[Tensor, Tensor]:
        causal, mask = _mask(q, call)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=call.scale
        )
        return out, lse

    def tile_backward(
        self, up: TileUpstream, q: Tensor, k: Tensor, v: Tensor, call: TileCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        causal, mask = _mask(q, call)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            up.grad_out, q, k, v, up.out, up.lse, 0.0, causal, attn_mask=mask, scale=call.scale
        )
        return dq, dk, dv


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
