"""The one interface of block kernels, and the state they write into.

A kernel computes attention of a task list (see ``tasks``) between flat query rows and flat key
rows, and folds it into a running softmax; its backward adds the task list's share of the
gradients, given the GLOBAL ``out`` and ``lse``, to running sums. Neither knows who sent the
rows.

    q [Nq, heads, D]      k, v [Nk, kv_heads, D], any strides with a dense last dim
    out [Nq, heads, D]    lse [Nq, heads], at least float32, natural logarithm
    dq like q             dk, dv like k, v, at least float32

Heads are grouped as usual: query head h reads KV head ``h // (heads // kv_heads)``.

Results are adopted rather than copied where one call makes all of them (a dense row on one rank):
``Softmax.out`` and the gradients start as None.
"""

import abc
import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core.context_parallel.calls import Call, Rows
from megatron.core.context_parallel.documents import IntArray
from megatron.core.context_parallel.merge import accumulation_dtype, merge_


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Attention dropout whose mask is a pure function of seed, head and global positions."""

    rate: float
    seed: int
    q_ids: Tensor
    """int64 [Nq]: batch row * seq_length + global position of each query row."""
    k_ids: Tensor
    """int64 [Nk]: the same for key rows."""
    first_head: int = 0
    """Global index of the first local query head."""


@dataclasses.dataclass
class Softmax:
    """Running attention of all local query rows: ``out`` and ``lse`` so far."""

    rows: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    """Type of the running values (at least float32)."""
    device: torch.device
    out: Tensor | None = None
    lse: Tensor | None = None

    def tensors(self) -> tuple[Tensor, Tensor]:
        """(out, lse); rows that saw no key are (0, -inf)."""
        if self.out is None or self.lse is None:
            shape = (self.rows, self.heads)
            self.out = torch.zeros(*shape, self.head_dim, dtype=self.dtype, device=self.device)
            self.lse = torch.full(shape, -torch.inf, dtype=self.dtype, device=self.device)
        return self.out, self.lse

    def fold(self, call: Call, out: Tensor, lse: Tensor) -> None:
        """Merge the result of a call: out [count, q_len, heads, D], lse [count, q_len, heads]."""
        rows = call.q
        whole = rows.index is None and rows.start == 0 and rows.count * rows.length == self.rows
        if self.out is None and whole and (rows.count == 1 or rows.step == rows.length):
            self.out = out.to(self.dtype).reshape(self.rows, self.heads, self.head_dim)
            self.lse = lse.to(self.dtype).reshape(self.rows, self.heads)
            return
        all_out, all_lse = self.tensors()
        if rows.index is None:
            old_out, old_lse = rows.view(all_out), rows.view(all_lse)
            if call.fresh:
                old_out.copy_(out)
                old_lse.copy_(lse)
            else:
                merge_(old_out, old_lse, out, lse)
            return
        out, lse, index = out.flatten(0, 1), lse.flatten(0, 1), rows.index
        if call.q_keep is not None:
            out, lse = out.index_select(0, call.q_keep), lse.index_select(0, call.q_keep)
            index = index.index_select(0, call.q_keep)
        out, lse = out.to(self.dtype), lse.to(self.dtype)
        if not call.fresh:
            old_out, old_lse = all_out.index_select(0, index), all_lse.index_select(0, index)
            merge_(old_out, old_lse, out, lse)
            out, lse = old_out, old_lse
        all_out.index_copy_(0, index, out)
        all_lse.index_copy_(0, index, lse)


@dataclasses.dataclass
class GradSum:
    """A running gradient of flat rows; ``tensor`` may be given (zeroed) or made when needed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    tensor: Tensor | None = None

    def total(self) -> Tensor:
        """The sum so far; zeros where nothing was added."""
        if self.tensor is None:
            self.tensor = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return self.tensor

    def add_all(self, values: Tensor) -> None:
        """Add to every row."""
        self.total().add_(values)

    def add(self, rows: Rows, values: Tensor, keep: Tensor | None = None) -> None:
        """Add values [count, length, ...] to the rows of a call; rows may overlap."""
        if rows.index is not None:
            values, index = values.flatten(0, 1), rows.index
            if keep is not None:
                values, index = values.index_select(0, keep), index.index_select(0, keep)
            self.total().index_add_(0, index, values.to(self.dtype))
            return
        whole = rows.start == 0 and rows.count * rows.length == self.shape[0]
        if self.tensor is None and whole and (rows.count == 1 or rows.step == rows.length):
            self.tensor = values.to(self.dtype).reshape(self.shape)
            return
        if rows.count == 1 or rows.step >= rows.length:
            rows.view(self.total()).add_(values)
        elif rows.step == 0:
            self.total()[rows.start : rows.start + rows.length].add_(values.sum(dim=0))
        else:
            passes = -(-rows.length // rows.step)
            for phase in range(min(passes, rows.count)):
                part = values[phase::passes]
                start = rows.start + phase * rows.step
                spaced = Rows(rows.length, len(part), start, rows.step * passes)
                spaced.view(self.total()).add_(part)


@dataclasses.dataclass
class Grads:
    """Running gradients of one backward call."""

    dq: GradSum
    dk: GradSum
    dv: GradSum


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """Flat rows and what a kernel needs besides the task list."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    dropout: Dropout | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Upstream:
    """What backward needs of the whole row: all global, flat [Nq, ...]."""

    grad_out: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor | None
    """rowsum(grad_out * out), for kernels that do not make it themselves."""


class BlockKernel(abc.ABC):
    """Attention of a task list. Kernels hold no state; programs are made once per micro-batch."""

    name: str

    needs_delta = False
    """Whether backward wants ``Upstream.delta``; libraries make it themselves."""

    @abc.abstractmethod
    def compile(self, tasks: IntArray, visited: Any, device: torch.device) -> Any:
        """A program for tasks [n, 6] in flat rows; ``visited`` (bool [Nq]) is updated.

        Programs have ``tasks`` and ``pairs`` (ints).
        """

    @abc.abstractmethod
    def forward(self, program: Any, inputs: Inputs, state: Softmax) -> None:
        """Fold the attention of the program's tasks into ``state``."""

    @abc.abstractmethod
    def backward(self, program: Any, inputs: Inputs, upstream: Upstream, grads: Grads) -> None:
        """Add the program's share of dq, dk, dv."""

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Type that q, k, v, out and grad_out should be given in."""
        return dtype

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tasks: IntArray,
        *,
        scale: float,
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of a task list on its own: the kernel as a plain function."""
        kind = self.compute_dtype(q.dtype)
        inputs = Inputs(q.to(kind), k.to(kind), v.to(kind), scale, dropout)
        total = accumulation_dtype(q.dtype)
        state = Softmax(len(q), q.shape[1], q.shape[2], total, q.device)
        program = self.compile(tasks, np.zeros(len(q), dtype=bool), q.device)
        self.forward(program, inputs, state)
        return state.tensors()

    def attend_backward(
        self,
        upstream: Upstream,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tasks: IntArray,
        *,
        scale: float,
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of a task list on its own, from the global out and lse."""
        kind = self.compute_dtype(q.dtype)
        inputs = Inputs(q.to(kind), k.to(kind), v.to(kind), scale, dropout)
        upstream = dataclasses.replace(
            upstream, grad_out=upstream.grad_out.to(kind), out=upstream.out.to(kind)
        )
        total = accumulation_dtype(q.dtype)
        grads = Grads(*(GradSum(tuple(x.shape), total, x.device) for x in (q, k, v)))
        program = self.compile(tasks, np.zeros(len(q), dtype=bool), q.device)
        self.backward(program, inputs, upstream, grads)
        return grads.dq.total(), grads.dk.total(), grads.dv.total()
