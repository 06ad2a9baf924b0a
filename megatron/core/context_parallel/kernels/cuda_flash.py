"""Adapter of torch's CUDA flash attention (varlen): the only place that knows its signature.

Tasks of one band become one call over packed rows [total, heads, D] with cumulative lengths, so
many documents cost one launch. The library aligns causal masks and windows bottom-right::

    key j of a task is visible to row i iff  i + (K - Q) - left <= j <= i + (K - Q) + right

so a task's band (lo <= i - j <= hi) is ``left = hi + K - Q``, ``right = Q - K - lo``, with -1
for no limit; both are >= 0 for tasks whose rows and columns all see something, and bands need no
cutting. lse comes as [heads, total]. Half types, D a multiple of 8 up to 256. GQA is native.

The library functions are given to the constructor, so the grouping is tested on CPU against a
stand-in with the same alignment. Not measured on a GPU.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.core.context_parallel.calls import disjoint_rows
from megatron.core.context_parallel.documents import IntArray
from megatron.core.context_parallel.kernels.base import (
    BlockKernel,
    Grads,
    GradSum,
    Inputs,
    Softmax,
    Upstream,
)
from megatron.core.context_parallel.merge import merge_
from megatron.core.context_parallel.placing import on_device
from megatron.core.context_parallel.prefix import band_pairs
from megatron.core.context_parallel.tasks import trim_tasks


class VarlenCall(NamedTuple):
    """Tasks of one band that run as one varlen call; their query rows are disjoint."""

    q_rows: slice | Tensor
    k_rows: slice | Tensor
    """Flat rows in packed order: a slice when they are one run, else int64 [total]."""
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    left: int
    right: int
    fresh: bool


class VarlenProgram(NamedTuple):
    """The calls of a task list."""

    calls: tuple[VarlenCall, ...]
    tasks: int
    pairs: int


def _library_forward(
    q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        call.cu_q,
        call.cu_k,
        call.max_q,
        call.max_k,
        0.0,
        call.left < 0 and call.right == 0,
        False,
        scale=scale,
        window_size_left=call.left,
        window_size_right=call.right,
    )
    if tuple(lse.shape) != (q.shape[1], q.shape[0]):
        raise RuntimeError(
            f"flash attention returned lse of shape {tuple(lse.shape)}, expected "
            f"{(q.shape[1], q.shape[0])}: this torch build has another varlen layout; "
            "use --attention-backend cudnn or reference"
        )
    return out, lse


def _library_backward(
    upstream: tuple[Tensor, Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: VarlenCall,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, out, lse = upstream
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse,
        call.cu_q,
        call.cu_k,
        call.max_q,
        call.max_k,
        0.0,
        call.left < 0 and call.right == 0,
        unused,
        torch.empty(0, device=q.device),
        scale=scale,
        window_size_left=call.left,
        window_size_right=call.right,
    )
    return dq, dk, dv


class CudaFlashKernel(BlockKernel):
    """``torch.ops.aten._flash_attention_forward`` and ``_backward`` over packed rows."""

    name = "flash"

    def __init__(
        self,
        forward: Callable[..., tuple[Tensor, Tensor]] = _library_forward,
        backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = _library_backward,
    ) -> None:
        self._forward = forward
        self._backward = backward

    def compile(self, tasks: IntArray, visited: Any, device: torch.device) -> VarlenProgram:
        tasks = trim_tasks(tasks)
        q0, q1, k0, k1, lo, hi = tasks.T
        q_len, k_len = q1 - q0, k1 - k0
        left = np.where(hi >= q_len - 1, -1, hi + k_len - q_len)
        right = np.where(lo <= 1 - k_len, -1, q_len - k_len - lo)
        bands = np.stack((left, right), axis=1)
        calls = []
        # Causal bands first: they visit every row, so their calls write instead of merging.
        for key in sorted({tuple(band) for band in bands.tolist()}, key=lambda b: b[1] < 0):
            chosen = tasks[(bands == key).all(axis=1)]
            for part in disjoint_rows(chosen):
                calls.append(_varlen_call(part, key, visited, device))
        pairs = int(band_pairs(q_len, k_len, lo, hi).sum()) if len(tasks) else 0
        return VarlenProgram(tuple(calls), len(tasks), pairs)

    def forward(self, program: VarlenProgram, inputs: Inputs, state: Softmax) -> None:
        for call in program.calls:
            q, k, v = _pick(call, inputs)
            out, lse = self._forward(q, k, v, call, inputs.scale)
            _fold(state, call, out, lse.transpose(0, 1))

    def backward(
        self, program: VarlenProgram, inputs: Inputs, upstream: Upstream, grads: Grads
    ) -> None:
        for call in program.calls:
            q, k, v = _pick(call, inputs)
            rows = [x[call.q_rows] for x in (upstream.grad_out, upstream.out, upstream.lse)]
            given = (rows[0].to(q.dtype), rows[1].to(q.dtype), rows[2].transpose(0, 1).contiguous())
            dq, dk, dv = self._backward(given, q, k, v, call, inputs.scale)
            _add(grads.dq, call.q_rows, dq)
            _add(grads.dk, call.k_rows, dk)
            _add(grads.dv, call.k_rows, dv)


def _varlen_call(
    tasks: IntArray, band: tuple[int, int], visited: Any, device: torch.device
) -> VarlenCall:
    q_len, k_len = tasks[:, 1] - tasks[:, 0], tasks[:, 3] - tasks[:, 2]
    q_index = np.concatenate([np.arange(a, b) for a, b in tasks[:, :2].tolist()])
    k_index = np.concatenate([np.arange(a, b) for a, b in tasks[:, 2:4].tolist()])
    fresh = not visited[q_index].any()
    visited[q_index] = True
    return VarlenCall(
        _slice_or_index(q_index, device),
        _slice_or_index(k_index, device),
        _cumulative(q_len, device),
        _cumulative(k_len, device),
        int(q_len.max()),
        int(k_len.max()),
        band[0],
        band[1],
        fresh,
    )


def _cumulative(lengths: IntArray, device: torch.device) -> Tensor:
    """int32 [tasks + 1] on the device."""
    ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return on_device(ends, device)


def _slice_or_index(rows: IntArray, device: torch.device) -> slice | Tensor:
    if (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return on_device(rows, device)


def _pick(call: VarlenCall, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Packed q, k, v of a call."""
    return inputs.q[call.q_rows], inputs.k[call.k_rows], inputs.v[call.k_rows]


def _add(total: GradSum, rows: slice | Tensor, values: Tensor) -> None:
    """Add packed gradients to their rows; key rows may occur several times."""
    if isinstance(rows, slice):
        if total.tensor is None and rows == slice(0, total.shape[0]):
            total.tensor = values.to(total.dtype)  # all rows at once: adopted
        else:
            total.total()[rows].add_(values)
    else:
        total.total().index_add_(0, rows, values.to(total.dtype))


def _fold(state: Softmax, call: VarlenCall, out: Tensor, lse: Tensor) -> None:
    """Merge packed results into the running softmax."""
    out, lse = out.to(state.dtype), lse.to(state.dtype)
    whole = isinstance(call.q_rows, slice) and call.q_rows == slice(0, state.rows)
    if state.out is None and whole:
        state.out, state.lse = out, lse  # all rows at once: adopted
        return
    all_out, all_lse = state.tensors()
    if not call.fresh:
        old_out, old_lse = all_out[call.q_rows], all_lse[call.q_rows]  # copies if indexed
        merge_(old_out, old_lse, out, lse)
        out, lse = old_out, old_lse
    if call.fresh or not isinstance(call.q_rows, slice):
        all_out[call.q_rows] = out
        all_lse[call.q_rows] = lse
