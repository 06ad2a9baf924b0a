"""An attention plan: everything about one micro-batch's attention that does not depend on values.

Tasks, kernel programs, row indices and communication schedules are made once per micro-batch and
used by every layer, forward and backward. Equal packings find their plan in the workspace.
Making a plan does not communicate.

    plan = prepare_attention(layout=..., cu_seqlens=..., ...)
    out, _ = plan(q, k, v, layer_number=3)
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.context_parallel.autograd import AttentionCall, KeptAttention, run_attention
from megatron.core.context_parallel.channel import Channel, CommStats
from megatron.core.context_parallel.checks import check_settings, check_window
from megatron.core.context_parallel.choice import outer_communication
from megatron.core.context_parallel.cost_model import AttentionShape
from megatron.core.context_parallel.documents import normalize_packings
from megatron.core.context_parallel.kernels.select import select_kernel
from megatron.core.context_parallel.layout import Layout
from megatron.core.context_parallel.planned import PlannedAttention
from megatron.core.context_parallel.ulysses import Ulysses, make_head_split
from megatron.core.context_parallel.workspace import Workspace


class AttentionPlan(PlannedAttention):
    """Made by :func:`prepare_attention`; called once per layer."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer_number: int | None = None,
        dropout_seed: int | None = None,
        kept: KeptAttention | None = None,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of one layer, differentiable in q, k and v.

        Args:
            q: [B, s, heads, D]; s is the local length of a (ring, ulysses) rank.
            k, v: [B, s, kv_heads, D].
            layer_number: for messages of the integrity check.
            dropout_seed: equal on all ranks of the context-parallel grid; needed with dropout.
            kept: a :class:`KeptAttention` cell for activation recompute.
            return_lse: give lse too (one more float32 per query head on the wire of Ulysses).

        Returns:
            (out [B, s, heads, D] in q's type, lse [B, heads, s] in at least float32, or None).
            lse has no gradient.

        Raises:
            ValueError: for shapes, types or a device other than planned, or a missing seed.
            IntegrityError: in a checked iteration, if a transfer went wrong.
        """
        self.check_inputs(q, k, v, dropout_seed)
        call = AttentionCall(self, q.shape[0], layer_number, dropout_seed, kept, return_lse)
        return run_attention(q, k, v, call)

    def check_inputs(self, q: Tensor, k: Tensor, v: Tensor, dropout_seed: int | None) -> None:
        """Refuse tensors other than planned.

        Raises:
            ValueError: naming what was given and what was planned.
        """
        heads, kv_heads = self.split.num_heads, self.split.num_kv_heads
        batch = q.shape[0] if q.ndim else 0
        for name, x, count in (("q", q, heads), ("k", k, kv_heads), ("v", v, kv_heads)):
            expected = (batch, self.layout.local_length, count, self.head_dim)
            if tuple(x.shape) != expected:
                raise ValueError(
                    f"{name} has shape {list(x.shape)} but the plan wants {list(expected)} "
                    "[batch, local sequence, heads, head dim]"
                )
            if x.dtype != self.dtype or x.device.type != self.device.type:
                raise ValueError(
                    f"{name} is {x.dtype} on {x.device} but the plan was made for {self.dtype} on "
                    f"{self.device}; make another plan"
                )
        if self.dropout_p > 0 and dropout_seed is None:
            raise ValueError(
                f"--attention-dropout {self.dropout_p} needs dropout_seed, the same on all ranks"
            )


def prepare_attention(
    *,
    layout: Layout,
    cu_seqlens: Any,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    ring_group: dist.ProcessGroup | None,
    ulysses_group: dist.ProcessGroup | None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    cp_comm_type: str = "auto",
    backend: str = "auto",
    dropout_p: float = 0.0,
    dtype: torch.dtype,
    device: torch.device | str,
    workspace: Workspace | None = None,
    max_exchange_bytes: int = 256 << 20,
    check_iteration: int | None = None,
) -> AttentionPlan:
    """Plan the attention of one micro-batch; once for all layers.

    Args:
        layout: of the row, made from the same cu_seqlens if balanced.
        cu_seqlens: document boundaries of the whole row, or a list, one per batch row; None: one.
        num_heads, num_kv_heads, head_dim: local heads of the tensor-parallel rank, and D.
        ring_group, ulysses_group: groups of the layout's sizes, or None for size one. An NCCL
            ``ring_group`` must have its communicator (``parallel_state.make_communicator``): a hop
            may have messages for some of its ranks only.
        causal, window: keys j with j <= i, and with i - j < window; False: both directions.
        scale: of the scores, above 0; default 1 / sqrt(D).
        cp_comm_type, backend: as the flags --cp-comm-type and --attention-backend.
        dropout_p: attention dropout; only the reference kernel has it.
        dtype, device: of q, k and v.
        workspace: hand in one for all plans of a process, to reuse buffers; default a new one.
        max_exchange_bytes: most remote K and V that a rank holds per stage of the exchange.
        check_iteration: number of the iteration if its transfers are to be checked.

    Raises:
        ValueError: for whatever cannot be done exactly as asked.
    """
    check_settings(head_dim, scale=scale, dtype=dtype, max_exchange_bytes=max_exchange_bytes)
    window = check_window(window, causal)
    packings = normalize_packings(cu_seqlens, layout.seq_length)
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, dtype.itemsize)
    outer = outer_communication(cp_comm_type, layout, packings, window, causal, shape)
    split = make_head_split(num_heads, num_kv_heads, layout.ulysses_size)
    device = torch.device(device)
    kernel = select_kernel(
        backend, dtype=dtype, device=device, head_dim=head_dim, dropout_p=dropout_p
    )
    comm = CommStats()
    ring = _channel("ring", ring_group, layout.ring_size, comm)
    ulysses = _channel("ulysses", ulysses_group, layout.ulysses_size, comm)
    return AttentionPlan(
        layout=layout, packings=packings, split=split, head_dim=head_dim, kernel=kernel,
        outer=outer, causal=causal, window=window, dropout_p=dropout_p, dtype=dtype,
        device=device, scale=head_dim**-0.5 if scale is None else scale, ring=ring, comm=comm,
        ulysses=Ulysses(split, ulysses), workspace=workspace or Workspace(),
        max_exchange_bytes=max_exchange_bytes, check_iteration=check_iteration,
    )  # fmt: skip


def _channel(axis: str, group: dist.ProcessGroup | None, size: int, comm: CommStats) -> Channel:
    channel = Channel(group, comm)
    if channel.size != size:
        raise ValueError(
            f"the layout has {axis} size {size} but {axis}_group has {channel.size} ranks; make "
            "the layout with the sizes of the groups"
        )
    return channel
