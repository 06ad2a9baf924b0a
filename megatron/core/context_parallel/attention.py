"""Context-parallel attention as one function: plan and run in one go."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron.core.context_parallel.layout import Layout
from megatron.core.context_parallel.plan import prepare_attention


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    ring_group: dist.ProcessGroup | None = None,
    ulysses_group: dist.ProcessGroup | None = None,
    cu_seqlens: Any = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    cp_comm_type: str = "auto",
    backend: str = "auto",
    return_lse: bool = False,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
) -> Any:
    """Exact attention over a sequence that is split over ranks; differentiable in q, k, v.

    Plans and runs in one go. Inside a model make the plan once per micro-batch instead
    (:func:`prepare_attention`).

    Args:
        q: [batch, s_local, heads, head_dim]: rows ``layout.positions(ring, ulysses)`` of the
            sequence.
        k, v: [batch, s_local, kv_heads, head_dim]; kv_heads divides heads.
        layout: from ``make_layout``, of the groups' sizes.
        ring_group, ulysses_group: process groups, or None for one rank. An NCCL ``ring_group``
            must have its communicator, see :func:`prepare_attention`.
        cu_seqlens: int32 [documents + 1] over the global sequence, or a list, one per batch row;
            documents do not see each other. None: one document.
        causal: False for attention in both directions inside each document.
        window: keys j with 0 <= i - j < window.
        scale: of the scores, above 0; default 1 / sqrt(head_dim).
        cp_comm_type: auto, p2p, a2a, a2a+p2p, all_gather, a2a+all_gather.
        backend: auto, flash, cudnn, reference.
        return_lse: return (out, lse).
        dropout_p, dropout_seed: attention dropout, and its seed, the same on all ranks.

    Returns:
        out [batch, s_local, heads, head_dim] in q's type, or (out, lse [batch, heads, s_local] in
        at least float32, without gradient).

    Raises:
        ValueError: for whatever cannot be done exactly as asked.
    """
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(
            f"q and k have {q.dim()} and {k.dim()} dims; they must be "
            "[batch, s_local, heads, head_dim]"
        )
    plan = prepare_attention(
        layout=layout, cu_seqlens=cu_seqlens, num_heads=q.shape[2], num_kv_heads=k.shape[2],
        head_dim=q.shape[3], ring_group=ring_group, ulysses_group=ulysses_group, causal=causal,
        window=window, scale=scale, cp_comm_type=cp_comm_type, backend=backend,
        dropout_p=dropout_p, dtype=q.dtype, device=q.device,
    )  # fmt: skip
    out, lse = plan(q, k, v, dropout_seed=dropout_seed, return_lse=return_lse)
    return (out, lse) if return_lse else out
