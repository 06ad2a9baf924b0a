"""Rotary position embedding (RoPE): tables once per micro-batch, rotation in at least fp32.

RoFormer (arXiv 2104.09864), with the pairs (i, i + rot/2) that Llama, Hugging Face and
Megatron rotate: ``out = x * cos + rotate_half(x) * sin``.

The angle ``position * inv_freq`` is built in float64 from the position ids that travel in the
batch: fp32 angles are off by 0.06 rad at position 1M, and bf16 holds only 1409 different
positions below 131072. Its cos and sin, times the attention factor of the scaling rule, are kept in
fp32 (fp64 for an fp64 model), and the rotation is done in that type whatever the model's.

The rotation is orthogonal up to the factor, so its gradient is the same kernel with -sin; the
autograd functions that call it (``heads``) save nothing but the table.

Legend: B batch, s local sequence, h heads, D head dim, r rotated dims (r <= D).
Cost: a table of 2 * s * B * r/2 numbers a micro-batch, shared by all layers; six multiply-adds a
rotated pair. It never asks its rank: positions were fixed before the row was sharded.
Not a parameter or a buffer: frequencies are never saved, so a checkpoint cannot bring back an old
theta; they live here until ``set_rope`` replaces them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from megatron.core.context_extension import rope_inv_freq, rotary_dim


@dataclasses.dataclass(frozen=True)
class RotaryTable:
    """cos and sin of one micro-batch."""

    cos: torch.Tensor
    """[s, B, 1, r/2], fp32 or fp64."""
    sin: torch.Tensor
    """[s, B, 1, r/2], fp32 or fp64."""


class RotaryEmbedding:
    """The frequencies in force, and the tables made from them.

    Args:
        head_dim: D.
        rotary_percent: part of D that is rotated (the first dims).
        rotary_base: theta.
        scaling: a RoPE scaling rule with Hugging Face's keys, or None.
        seq_length: length of the rows, for rules that depend on it (dynamic, longrope).
    """

    def __init__(
        self,
        head_dim: int,
        *,
        rotary_percent: float = 1.0,
        rotary_base: float = 10000.0,
        scaling: Mapping[str, Any] | None = None,
        seq_length: int | None = None,
    ) -> None:
        self.dims = rotary_dim(head_dim, rotary_percent)
        self.set_rope(rotary_base, scaling, seq_length)

    def set_rope(
        self,
        rotary_base: float,
        scaling: Mapping[str, Any] | None = None,
        seq_length: int | None = None,
    ) -> None:
        """Replace base and rule; the next table uses them. Nothing else holds the old ones."""
        inv_freq, factor = rope_inv_freq(self.dims, rotary_base, scaling, seq_length)
        self.inv_freq = torch.as_tensor(inv_freq, dtype=torch.float64)
        self.attention_factor = float(factor)

    def table(self, position_ids: torch.Tensor, dtype: torch.dtype) -> RotaryTable:
        """cos and sin for ``position_ids`` [B, s] on their device, in at least fp32."""
        kept = torch.promote_types(dtype, torch.float32)
        inv_freq = self.inv_freq.to(position_ids.device, non_blocking=True)
        angles = position_ids.t().to(torch.float64)[:, :, None, None] * inv_freq
        factor = self.attention_factor
        return RotaryTable((angles.cos() * factor).to(kept), (angles.sin() * factor).to(kept))


def rotate(
    x: torch.Tensor,
    out: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    backward: bool = False,
) -> None:
    """Write the rotation of ``x`` [s, B, h, D] to ``out``, of any strides; no autograd.

    Args:
        x: what to rotate, or with ``backward`` the gradient of the result.
        out: of the same shape, not overlapping ``x``.
        cos, sin: as in :class:`RotaryTable`.
        backward: multiply with the transposed rotation.
    """
    half, sign = cos.shape[-1], -1.0 if backward else 1.0
    x1, x2 = x[..., :half], x[..., half : 2 * half]
    out1, out2 = out[..., :half], out[..., half : 2 * half]
    if x.dtype == cos.dtype:
        torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-sign)
        torch.mul(x2, cos, out=out2).addcmul_(x1, sin, value=sign)
    else:  # low precision: rotate in the table's type, round once
        out1.copy_((x1 * cos).addcmul_(x2, sin, value=-sign))
        out2.copy_((x2 * cos).addcmul_(x1, sin, value=sign))
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :].copy_(x[..., 2 * half :])
