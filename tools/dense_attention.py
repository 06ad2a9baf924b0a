"""Dense attention in float64 over a whole row: the independent answer for tests."""

import torch
from torch import Tensor


def visible_pairs(bounds: list[int], causal: bool = True, window: int | None = None) -> Tensor:
    """bool [S, S]: which (query, key) pairs of a packed row see each other."""
    length = bounds[-1]
    at = torch.arange(length)
    ends = torch.tensor(bounds[1:])
    document = torch.bucketize(at, ends, right=True)
    gap = at[:, None] - at[None]
    mask = document[:, None] == document[None]
    if causal:
        mask &= gap >= 0
    if window is not None:
        mask &= (gap >= 0) & (gap < window)
    return mask


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packings: list[list[int]],
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [B, S, h, D], lse [B, h, S]) in q's type; rows without a visible key: 0, -inf."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    mask = torch.stack([visible_pairs(bounds, causal, window) for bounds in packings])[:, None]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (
        q.shape[3] ** -0.5 if scale is None else scale
    )
    scores = scores.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weight = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("bhij,bjhd->bihd", weight, v), lse


def dense_with_grads(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, packings: list[list[int]], **options: object
) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv) in float64 from tensors of any type."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out, lse = dense_attention(q, k, v, packings, **options)  # type: ignore[arg-type]
    grads = torch.autograd.grad(out, (q, k, v), grad_out.double())
    return out.detach(), lse.detach(), *grads
