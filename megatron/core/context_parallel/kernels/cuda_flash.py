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

from megatron.core.context_parallel.calls import disjoint_rows, trim_tasks
from megatron.core.context_parallel.documents import IntArray
from megatron.core.context_parallel.kernels.base import (
    BlockKernel,
    Grads,
    Inputs,
    Softmax,
    Upstream,
)
from megatron.core.context_parallel.merge import merge_
from megatron.core.context_parallel.prefix import band_pairs


class VarlenCall(NamedTuple):
    """Tasks of one band that run as one varlen call; their query rows are disjoint."""

    q_index: Tensor | None
    """int64 [total_q]; None when the call takes all query rows in order."""
    k_index: Tensor
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
            rows = [
                x if call.q_index is None else x.index_select(0, call.q_index)
                for x in (upstream.grad_out, upstream.out, upstream.lse)
            ]
            given = (rows[0].to(q.dtype), rows[1].to(q.dtype), rows[2].transpose(0, 1).contiguous())
            dq, dk, dv = self._backward(given, q, k, v, call, inputs.scale)
            if call.q_index is None:
                grads.dq.total().add_(dq)
            else:
                grads.dq.total().index_add_(0, call.q_index, dq.to(grads.dq.dtype))
            grads.dk.total().index_add_(0, call.k_index, dk.to(grads.dk.dtype))
            grads.dv.total().index_add_(0, call.k_index, dv.to(grads.dv.dtype))


def _varlen_call(
    tasks: IntArray, band: tuple[int, int], visited: Any, device: torch.device
) -> VarlenCall:
    q_len, k_len = tasks[:, 1] - tasks[:, 0], tasks[:, 3] - tasks[:, 2]
    q_index = np.concatenate([np.arange(a, b) for a, b in tasks[:, :2].tolist()])
    k_index = np.concatenate([np.arange(a, b) for a, b in tasks[:, 2:4].tolist()])
    fresh = not visited[q_index].any()
    visited[q_index] = True
    whole = len(q_index) == len(visited) and (np.diff(q_index) == 1).all()
    return VarlenCall(
        None if whole else torch.from_numpy(q_index).to(device),
        torch.from_numpy(k_index).to(device),
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
    return torch.from_numpy(ends).to(device)


def _pick(call: VarlenCall, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Packed q, k, v of a call."""
    q = inputs.q if call.q_index is None else inputs.q.index_select(0, call.q_index)
    return q, inputs.k.index_select(0, call.k_index), inputs.v.index_select(0, call.k_index)


def _fold(state: Softmax, call: VarlenCall, out: Tensor, lse: Tensor) -> None:
    """Merge packed results into the running softmax."""
    all_out, all_lse = state.tensors()
    out, lse = out.to(state.dtype), lse.to(state.dtype)
    if call.q_index is None:
        if call.fresh:
            all_out.copy_(out)
            all_lse.copy_(lse)
        else:
            merge_(all_out, all_lse, out, lse)
        return
    if not call.fresh:
        old_out = all_out.index_select(0, call.q_index)
        old_lse = all_lse.index_select(0, call.q_index)
        merge_(old_out, old_lse, out, lse)
        out, lse = old_out, old_lse
    all_out.index_copy_(0, call.q_index, out)
    all_lse.index_copy_(0, call.q_index, lse)
