"""Merging partial attention over blocks of keys, exactly and without overflow.

Attention of one query row over keys A and keys B, each normalised by itself, combines to
attention over both through the log-sum-exp of the scores (Milakov & Gimelshein 2018; Liu et al.,
Ring Attention, 2023)::

    lse = logaddexp(lse_a, lse_b)
    out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)
        = out_a + sigmoid(lse_b - lse_a) * (out_b - out_a)

Both weights lie in [0, 1], whatever the scores, so nothing can overflow. A row that has seen no
key yet has ``out = 0, lse = -inf`` and takes over the other side unchanged; two such rows merge to
the same again. All state is kept in at least float32: rounding happens once, at the end.

Cost: one pass over ``out``. Shapes: out [..., heads, D], lse [..., heads].
"""

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type partial results are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_weight(lse: Tensor, new_lse: Tensor) -> Tensor:
    """Weight in [0, 1] of the new block: ``exp(new_lse - logaddexp(lse, new_lse))``."""
    weight = torch.sigmoid(new_lse - lse)
    return weight.masked_fill_(new_lse == -torch.inf, 0.0)


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Fold a block (new_out, new_lse) into (out, lse) in place.

    Args:
        out: [..., heads, D], at least float32.
        lse: [..., heads], natural logarithm, same type as ``out``; -inf where no key was seen.
        new_out: like ``out`` (any float type); must be finite, 0 where ``new_lse`` is -inf.
        new_lse: like ``lse``.
    """
    new_lse = new_lse.to(lse.dtype)
    weight = merge_weight(lse, new_lse)
    out.lerp_(new_out.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))


def row_delta(grad_out: Tensor, out: Tensor) -> Tensor:
    """``delta = rowsum(grad_out * out)`` [..., heads] of flash attention's backward.

    With the global ``out`` and ``lse`` every block's gradient needs only its own keys:
    ``dS = P * (grad_out V^T - delta)`` (Dao et al. 2022, FlashAttention, algorithm 4).
    """
    kind = accumulation_dtype(out.dtype)
    return (grad_out.to(kind) * out.to(kind)).sum(dim=-1)
