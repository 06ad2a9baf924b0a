"""Adapter of cuDNN attention as torch exposes it: the only place that knows its signature.

Dense batches of tiles [n, heads, rows, D]; bands get an additive mask; lse is [n, heads, rows], in
some builds of torch with a dim of 1 behind. Half types only. KV heads are repeated to the query
heads (cuDNN's own GQA is not relied on), and their gradients summed in float32. Not measured on a
GPU.
"""

import functools

import torch
from torch import Tensor

from megatron.core.context_parallel.kernels.tiled import TileCall, TiledKernel, TileUpstream


class CudnnKernel(TiledKernel):
    """``torch.ops.aten._scaled_dot_product_cudnn_attention`` and its backward."""

    name = "cudnn"

    def tile_forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: TileCall
    ) -> tuple[Tensor, Tensor]:
        causal, mask = _mask(q, call)
        result = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, *_repeat(q, k, v), mask, True, 0.0, causal, False, scale=call.scale
        )
        return result[0], result[1].reshape(q.shape[:3])

    def tile_backward(
        self, up: TileUpstream, q: Tensor, k: Tensor, v: Tensor, call: TileCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        causal, mask = _mask(q, call)
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        lse = up.lse.contiguous()
        if _lse_dims(q.device, q.dtype) == 4:
            lse = lse.unsqueeze(-1)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            up.grad_out.to(q.dtype).contiguous(),
            q,
            *_repeat(q, k, v),
            up.out.to(q.dtype),
            lse,
            state,
            state,
            mask,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            scale=call.scale,
        )
        group = q.shape[1] // k.shape[1]
        if group > 1:
            dk = dk.float().unflatten(1, (k.shape[1], group)).sum(dim=2)
            dv = dv.float().unflatten(1, (k.shape[1], group)).sum(dim=2)
        return dq, dk, dv


@functools.lru_cache(maxsize=8)
def _lse_dims(device: torch.device, dtype: torch.dtype) -> int:
    """Dims of the lse that forward gives, which backward wants back: 3 or 4."""
    x = torch.zeros(1, 1, 64, 64, dtype=dtype, device=device)
    lse = torch.ops.aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)[1]
    return int(lse.dim())


def _repeat(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """KV heads repeated to the query heads."""
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return k, v
    return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def _mask(q: Tensor, call: TileCall) -> tuple[bool, Tensor | None]:
    """(is_causal, additive mask [n, heads, q_len, k_len]) of a tile."""
    band = call.band
    assert call.dropout is None, "the cudnn kernel has no dropout"
    if band.is_full:
        return False, None
    if band.is_causal:
        return True, None
    mask = call.masks.get(band, q.dtype, q.device)
    return False, mask.expand(q.shape[0], q.shape[1], -1, -1)
