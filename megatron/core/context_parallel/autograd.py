"""The autograd node of context-parallel attention, and what activation recompute keeps of it.

::

    q, k, v [B, s, heads, D]          sequence shards
        | Ulysses all-to-all (U > 1)
    flat rows of a ring shard         own heads
        | local, ring or exchange steps: kernel calls folded into (out, lse) in float32
    out, rounded once
        | Ulysses all-to-all back
    out [B, s, heads, D]

One node holds all of it: backward goes the same way with the global out and lse, sends keys
round again rather than keeping remote ones, and keeps dq, dk, dv in float32 until they are
complete.

Activation recompute: a :class:`KeptAttention` cell made outside the checkpointed region keeps
out and lse, so that a recomputed layer runs neither attention nor any communication in its
second forward. Its backward then moves q, k, v (and out) through the Ulysses all-to-all once
more, in the one that grad_out takes anyway: what was dropped has to come from somewhere.

Memory kept for backward: q, k, v, out (head shards when U > 1), lse. lse is returned without
gradient.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.context_parallel.compile import BatchPlan
from megatron.core.context_parallel.integrity import Audit
from megatron.core.context_parallel.kernels.base import (
    Dropout,
    Grads,
    GradSum,
    Inputs,
    Softmax,
    Upstream,
)
from megatron.core.context_parallel.merge import accumulation_dtype, row_delta
from megatron.core.context_parallel.planned import PlannedAttention
from megatron.core.context_parallel.steps import OwnGrads, Step
from megatron.core.context_parallel.ulysses import expand_kv, reduce_kv


class KeptAttention:
    """Out and lse of one layer's attention, kept over activation recompute.

    Make one per layer call, outside the checkpointed function. The first forward fills it; a later
    forward of the same call returns what it holds and computes nothing.
    """

    def __init__(self) -> None:
        self.out: Tensor | None = None
        """[B, s, heads, D], detached."""
        self.lse: Tensor | None = None
        """[B * ring shard, own heads], detached: the form backward needs."""
        self.returned_lse: Tensor | None = None
        """[B, heads, s] where the caller asked for it."""

    @property
    def filled(self) -> bool:
        """Whether the first forward has run."""
        return self.out is not None


@dataclasses.dataclass
class AttentionCall:
    """What one layer's call carries besides tensors; see :meth:`AttentionPlan.__call__`."""

    plan: PlannedAttention
    batch: int
    layer_number: int | None
    dropout_seed: int | None
    kept: KeptAttention | None
    return_lse: bool

    @contextlib.contextmanager
    def audited(self, phase: str) -> Iterator[Audit | None]:
        """An audit for one phase of a checked iteration, finished at the end."""
        plan = self.plan
        plan.calls += 1
        if plan.check_iteration is None:
            yield None
            return
        audit = Audit(plan.check_iteration, self.layer_number, phase)
        yield audit
        audit.finish((plan.ring.group, plan.ulysses.channel.group), plan.device)

    @property
    def expansion(self) -> tuple[int, ...] | None:
        return self.plan.split.expansion(self.plan.ulysses.rank)


class _Saved(NamedTuple):
    """What forward leaves for backward: head shards, or with a cell sequence shards but for lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def run_attention(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor | None]:
    """One differentiable call of a plan; see :meth:`AttentionPlan.__call__`."""
    out, lse = _Attention.apply(q, k, v, call)
    return out, lse


class _Attention(torch.autograd.Function):
    """The whole of context-parallel attention as one autograd node."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor | None]:
        ctx.call = call
        kept = call.kept
        if kept is not None and kept.filled:
            assert kept.out is not None and kept.lse is not None
            out, returned = kept.out.detach(), kept.returned_lse
            ctx.save_for_backward(q, k, v, out, kept.lse)
        else:
            out, returned, saved = _forward(call, q, k, v)
            if kept is not None:
                kept.out, kept.lse, kept.returned_lse = out.detach(), saved.lse, returned
                saved = _Saved(q, k, v, out, saved.lse)
            ctx.save_for_backward(*saved)
        if returned is not None:
            returned = returned.detach()
            ctx.mark_non_differentiable(returned)
        return out, returned

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_out: Tensor, grad_lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        dq, dk, dv = _backward(ctx.call, grad_out, _Saved(*ctx.saved_tensors))
        return dq, dk, dv, None


def _forward(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor | None, _Saved]:
    """(out, lse to return, what to save)."""
    plan, ulysses = call.plan, call.plan.ulysses
    with call.audited("forward") as audit:
        heads = ulysses.to_heads(((q, "query"), (k, "kv"), (v, "kv")), audit)
        own_q, own_k, own_v = heads
        total, lse = _attend(call, own_q, own_k, own_v, audit)
        own_out = total.to(q.dtype)
        parts = [(own_out, "query")] + ([(lse, "query")] if call.return_lse else [])
        back = ulysses.to_sequence(parts, (call.batch, plan.layout.local_length), q.dtype, audit)
    returned = back[1].transpose(1, 2).contiguous() if call.return_lse else None
    return back[0], returned, _Saved(own_q, own_k, own_v, own_out, lse)


def _attend(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, audit: Audit | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of flat rows, at least float32."""
    plan = call.plan
    compiled, source = plan.compiled(call.batch)
    kind = plan.kernel.compute_dtype(q.dtype)
    state = Softmax(len(q), q.shape[1], q.shape[2], accumulation_dtype(q.dtype), q.device)
    compute_q = _as_type(plan, "q", q, kind)
    for step in source.forward(k, v, audit):
        inputs = _inputs(call, compiled, compute_q, step, kind)
        plan.kernel.forward(step.plan.program, inputs, state)
    return state.tensors()


def _backward(
    call: AttentionCall, grad_out: Tensor, saved: _Saved
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv as sequence shards, in the inputs' type."""
    plan, ulysses = call.plan, call.plan.ulysses
    q, k, v, out, lse = saved
    kind = q.dtype
    with call.audited("backward") as audit:
        if call.kept is None:
            (own_grad,) = ulysses.to_heads(((grad_out, "query"),), audit)
        else:
            rows = ((grad_out, "query"), (q, "query"), (k, "kv"), (v, "kv"), (out, "query"))
            own_grad, q, k, v, out = ulysses.to_heads(rows, audit)
            saved = _Saved(q, k, v, out, lse)
        dq, own = _attend_backward(call, own_grad, saved, audit)
        dk, dv = own.dk.total(), own.dv.total()
        if not plan.split.shares_kv:  # complete: nothing is added any more
            dk, dv = dk.to(kind), dv.to(kind)
        parts = ((dq.to(kind), "query"), (dk, "kv"), (dv, "kv"))
        back = ulysses.to_sequence(parts, (call.batch, plan.layout.local_length), kind, audit)
    return back[0], back[1].to(kind), back[2].to(kind)


def _attend_backward(
    call: AttentionCall, grad_out: Tensor, saved: _Saved, audit: Audit | None
) -> tuple[Tensor, OwnGrads]:
    """dq and the gradients of the own keys, flat, at least float32; all in head shards."""
    plan = call.plan
    q, k, v, out, lse = saved
    compiled, source = plan.compiled(call.batch)
    kind = plan.kernel.compute_dtype(q.dtype)
    upstream = Upstream(
        _as_type(plan, "grad_out", grad_out, kind),
        _as_type(plan, "out", out, kind),
        lse,
        row_delta(grad_out, out) if plan.kernel.needs_delta else None,
    )
    compute_q = _as_type(plan, "q", q, kind)
    dq = GradSum(tuple(q.shape), accumulation_dtype(q.dtype), q.device)
    own = OwnGrads.like(k)
    for step in source.backward(k, v, own, audit):
        assert step.dk is not None and step.dv is not None
        inputs = _inputs(call, compiled, compute_q, step, kind)
        if call.expansion is None:
            grads = Grads(dq, step.dk, step.dv)
            plan.kernel.backward(step.plan.program, inputs, upstream, grads)
            continue
        wide = [GradSum(tuple(inputs.k.shape), dq.dtype, q.device) for _ in range(2)]
        plan.kernel.backward(step.plan.program, inputs, upstream, Grads(dq, *wide))
        step.dk.add_all(reduce_kv(wide[0].total(), call.expansion, k.shape[1]))
        step.dv.add_all(reduce_kv(wide[1].total(), call.expansion, k.shape[1]))
    return dq.total(), own


def _inputs(
    call: AttentionCall, compiled: BatchPlan, q: Tensor, step: Step, kind: torch.dtype
) -> Inputs:
    """Kernel inputs of one step."""
    plan = call.plan
    k = expand_kv(_as_type(plan, "k", step.k, kind), call.expansion)
    v = expand_kv(_as_type(plan, "v", step.v, kind), call.expansion)
    dropout = None
    if plan.dropout_p > 0:
        assert call.dropout_seed is not None
        assert compiled.query_ids is not None and step.plan.key_ids is not None
        first = plan.split.query(plan.ulysses.rank).start
        dropout = Dropout(
            plan.dropout_p, call.dropout_seed, compiled.query_ids, step.plan.key_ids, first
        )
    return Inputs(q, k, v, plan.scale, dropout)


def _as_type(plan: PlannedAttention, role: str, x: Tensor, kind: torch.dtype) -> Tensor:
    """x in the kernel's type; a converted copy lives in the workspace until the next step."""
    if x.dtype == kind:
        return x
    return plan.workspace.get(f"compute.{role}", tuple(x.shape), kind, x.device).copy_(x)
