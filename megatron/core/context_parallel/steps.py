"""What attention computes between two waits, whoever brings the keys.

A *source of steps* (local, ring, exchange) yields one step after another: keys that are here now
and the kernel program over them. It posts the next transfer before it yields and waits after, so
communication runs behind the compute of the step. Backward yields the same steps with places for
dK and dV, and sees to it that they get home.
"""

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.core.context_parallel.documents import IntArray
from megatron.core.context_parallel.integrity import Audit
from megatron.core.context_parallel.kernels.base import GradSum
from megatron.core.context_parallel.merge import accumulation_dtype
from megatron.core.context_parallel.placing import on_device


@dataclasses.dataclass(frozen=True, eq=False)
class StepPlan:
    """One step of a rank: which rows its keys are, and the kernel program over them."""

    program: Any
    """Kernel program, with ``tasks`` and ``pairs``."""
    key_ids: Tensor | None
    """int64 ids (batch row * seq_length + position) of the step's key rows, for dropout."""


@dataclasses.dataclass
class Step:
    """Keys at hand and what to compute with them."""

    plan: StepPlan
    k: Tensor
    v: Tensor
    """[rows, kv_heads, D]"""
    dk: GradSum | None = None
    dv: GradSum | None = None
    """Backward only: where this step's gradients go."""


class StepSource(abc.ABC):
    """Brings keys to queries, and their gradients home."""

    @abc.abstractmethod
    def forward(self, k: Tensor, v: Tensor, audit: Audit | None) -> Iterator[Step]:
        """Steps over own and remote keys. k, v [rows, kv_heads, D]: the own shard."""

    @abc.abstractmethod
    def backward(
        self, k: Tensor, v: Tensor, own: "OwnGrads", audit: Audit | None
    ) -> Iterator[Step]:
        """The same steps with places for gradients; ``own`` is complete when the iterator ends."""


@dataclasses.dataclass
class OwnGrads:
    """dK and dV of the own shard, at least float32."""

    dk: GradSum
    dv: GradSum

    @classmethod
    def like(cls, k: Tensor) -> "OwnGrads":
        """Empty sums for keys and values shaped like k."""
        kind = accumulation_dtype(k.dtype)
        return cls(*(GradSum(tuple(k.shape), kind, k.device) for _ in range(2)))

    def add_fused(self, rows: "RowIndex", values: Tensor) -> None:
        """Add values [n, 2, kv_heads, D] to the given rows, which are distinct."""
        dk, dv = self.dk.total(), self.dv.total()
        if rows.slice is not None:
            dk[rows.slice].add_(values[:, 0])
            dv[rows.slice].add_(values[:, 1])
        else:
            dk.index_add_(0, rows.index, values[:, 0])
            dv.index_add_(0, rows.index, values[:, 1])


@dataclasses.dataclass(frozen=True, eq=False)
class RowIndex:
    """Rows of a shard: a slice when they are one run, an index otherwise."""

    count: int
    slice: slice | None
    index: Tensor

    @classmethod
    def of(cls, rows: IntArray, device: torch.device) -> "RowIndex":
        """From row numbers in the order wanted."""
        count = len(rows)
        run = None
        if count and int(rows[-1] - rows[0]) == count - 1 and (rows[1:] == rows[:-1] + 1).all():
            run = slice(int(rows[0]), int(rows[0]) + count)
        return cls(count, run, on_device(rows, device))

    def pack(self, k: Tensor, v: Tensor, into: Tensor) -> None:
        """Copy the rows of k and v [rows, kv_heads, D] into [n, 2, kv_heads, D]."""
        for half, x in enumerate((k, v)):
            if self.slice is not None:
                into[:, half].copy_(x[self.slice])
            elif self.count:
                torch.index_select(x, 0, self.index, out=into[:, half])


def grad_places(fused: Tensor) -> tuple[GradSum, GradSum]:
    """dK and dV sums that live in a zeroed fused buffer [n, 2, kv_heads, D]."""
    shape = (fused.shape[0], *fused.shape[2:])
    return (
        GradSum(shape, fused.dtype, fused.device, fused[:, 0]),
        GradSum(shape, fused.dtype, fused.device, fused[:, 1]),
    )


class LocalSteps(StepSource):
    """All keys are here already: one step, no communication."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan

    def forward(self, k: Tensor, v: Tensor, audit: Audit | None) -> Iterator[Step]:
        yield Step(self.plan, k, v)

    def backward(self, k: Tensor, v: Tensor, own: OwnGrads, audit: Audit | None) -> Iterator[Step]:
        yield Step(self.plan, k, v, own.dk, own.dv)
