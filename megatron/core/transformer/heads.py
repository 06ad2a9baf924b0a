"""From projections [s, B, features] to heads [B, s, h, D], rotated on the way.

Layers work sequence first, attention batch first. The rotation reads every element anyway, so it
writes its result where attention wants it, and backward writes the gradients where the
projections want them: one pass each, and no concatenation of dK and dV. For one row (B = 1) the
two orders are the same memory, and what isn't rotated is passed on as a view.

    q  [s, B, h, D]      --rotate-->  [B, s, h, D]
    kv [s, B, kv, 2, D]  --rotate k, move v-->  k, v [B, s, kv, D]

Cost: nothing is saved but the table.
"""

from typing import Any

import torch

from megatron.core.transformer.rotary import RotaryTable, rotate

Table = tuple[torch.Tensor, torch.Tensor] | tuple[None, None]


def place_heads(x: torch.Tensor, rotary: RotaryTable | None) -> torch.Tensor:
    """[s, B, h, D] -> [B, s, h, D], rotated with a table."""
    return _Place.apply(x, *_table(rotary))


def place_key_value(
    x: torch.Tensor, rotary: RotaryTable | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[s, B, kv, 2, D] -> k (rotated with a table) and v [B, s, kv, D]."""
    return _PlaceKeyValue.apply(x, *_table(rotary))


def _table(rotary: RotaryTable | None) -> Table:
    return (None, None) if rotary is None else (rotary.cos, rotary.sin)


def _forward(x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
    if cos is not None and sin is not None:
        s, batch, heads, dim = x.shape
        out = x.new_empty(batch, s, heads, dim)
        rotate(x, out.transpose(0, 1), cos, sin)
        return out
    moved = x.transpose(0, 1)
    return moved if x.shape[1] == 1 else moved.contiguous()


def _backward(
    grad: torch.Tensor, out: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None
) -> None:
    """Write the gradient of x [s, B, h, D] to ``out``."""
    if cos is not None and sin is not None:
        rotate(grad.transpose(0, 1), out, cos, sin, backward=True)
    else:
        out.copy_(grad.transpose(0, 1))


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: Any, sin: Any) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _forward(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        (grad,) = grads
        batch, s, heads, dim = grad.shape
        dx = grad.new_empty(s, batch, heads, dim)
        _backward(grad, dx, cos, sin)
        return dx, None, None


class _PlaceKeyValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: Any, sin: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        key, value = x.unbind(3)
        return _forward(key, cos, sin), _forward(value, None, None)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        dkey, dvalue = grads
        batch, s, heads, dim = dkey.shape
        dx = dkey.new_empty(s, batch, heads, 2, dim)
        _backward(dkey, dx[..., 0, :], cos, sin)
        _backward(dvalue, dx[..., 1, :], None, None)
        return dx, None, None
