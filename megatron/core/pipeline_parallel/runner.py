"""One training or evaluation step over micro-batches, with and without a pipeline.

``runner.run(batches, loss_scale)`` runs forward and backward of every micro-batch and leaves the
gradients of ``loss_scale * sum of token losses`` in the parameters (added to what is there);
``runner.evaluate(batches)`` runs the forward passes alone. Both return the sum of the token losses
of this rank's micro-batches, the same on all its pipeline ranks.

torch.distributed.pipelining is not used: it allocates the receive buffers of all micro-batches for
the whole run (128 micro-batches of 32K x 4096 in bf16: 32 GiB twice), runs the first micro-batch
twice whenever shapes, or training and evaluation, change, aborts when told of neither, and never
overlaps FSDP's gradient reduction with the backward pass. Here a micro-batch's activation exists
while it is under way; changed lengths need nothing; the reduction overlaps the last backward pass.

It has no zero-bubble schedules.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.packed_batch import PackedBatch
from megatron.core.parallel_state import make_communicator
from megatron.core.pipeline_parallel.schedule import BACKWARD, FORWARD, Pass, make_schedule
from megatron.core.pipeline_parallel.transport import Transport

BeforeBackward = Callable[[nn.Module, bool], None]
"""Called as ``f(module, last)`` before each backward pass of a chunk (FSDP's gradient sync)."""
AfterEvaluation = Callable[[nn.Module], None]


@dataclasses.dataclass(frozen=True)
class ActivationShape:
    """What travels between pipeline ranks: [s / sequence_shards, B, hidden_size] of ``dtype``.

    ``sequence_shards`` is the tensor-parallel size with sequence parallelism, else 1.
    """

    hidden_size: int
    dtype: torch.dtype
    sequence_shards: int = 1

    def of(self, batch: PackedBatch) -> tuple[int, int, int]:
        """Shape for one micro-batch."""
        rows, length = batch.tokens.shape
        assert length % self.sequence_shards == 0, (length, self.sequence_shards)
        return length // self.sequence_shards, rows, self.hidden_size


class Runner(Protocol):
    """What the training loop calls."""

    def run(
        self,
        batches: Sequence[PackedBatch],
        loss_scale: float | torch.Tensor,
        dropout_keys: Sequence[Any] | None = None,
    ) -> torch.Tensor:
        """Forward and backward; returns the summed loss, fp64 scalar.

        ``loss_scale`` is a float or an fp64 scalar tensor, the same on all ranks: normally
        1 / (loss tokens of the global batch).
        """

    def evaluate(self, batches: Sequence[PackedBatch]) -> torch.Tensor:
        """Forward alone, in eval mode; returns the summed loss, fp64 scalar."""


def make_runner(
    chunks: Sequence[nn.Module],
    *,
    pp_group: dist.ProcessGroup | None,
    activation: ActivationShape,
    device: torch.device,
    before_backward: BeforeBackward | None = None,
    after_evaluation: AfterEvaluation | None = None,
) -> Runner:
    """The runner for this rank's model chunks.

    Args:
        chunks: modules called as ``chunk(x, batch, dropout_key=key)`` in the order of their virtual
            stages; where FSDP is used, each is an FSDP root.
        pp_group: None or of size 1 without a pipeline.
    """
    if pp_group is None or dist.get_world_size(pp_group) == 1:
        assert len(chunks) == 1
        return SingleStageRunner(chunks[0], device, before_backward, after_evaluation)
    return PipelineRunner(
        chunks,
        pp_group=pp_group,
        activation=activation,
        device=device,
        before_backward=before_backward,
        after_evaluation=after_evaluation,
    )


class SingleStageRunner:
    """Gradient accumulation over the micro-batches of a model that is whole on this rank."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        before_backward: BeforeBackward | None = None,
        after_evaluation: AfterEvaluation | None = None,
    ) -> None:
        self._module = module
        self._device = device
        self._before_backward = before_backward or _nothing_before
        self._after_evaluation = after_evaluation or _nothing_after

    def run(
        self,
        batches: Sequence[PackedBatch],
        loss_scale: float | torch.Tensor,
        dropout_keys: Sequence[Any] | None = None,
    ) -> torch.Tensor:
        """See :class:`Runner`."""
        _check_scale(loss_scale)
        keys = _keys(batches, dropout_keys)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, (batch, key) in enumerate(zip(batches, keys, strict=True)):
            loss = self._module(None, batch, dropout_key=key)
            self._before_backward(self._module, index == len(batches) - 1)
            torch.autograd.backward(loss, _scale_like(loss_scale, loss))
            total += loss.detach()
        return total

    def evaluate(self, batches: Sequence[PackedBatch]) -> torch.Tensor:
        """See :class:`Runner`."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        with _evaluating([self._module], self._after_evaluation):
            for batch in batches:
                total += self._module(None, batch, dropout_key=None)
        return total


class PipelineRunner:
    """1F1B, or interleaved 1F1B with several chunks, over the pipeline group."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        *,
        pp_group: dist.ProcessGroup,
        activation: ActivationShape,
        device: torch.device,
        before_backward: BeforeBackward | None = None,
        after_evaluation: AfterEvaluation | None = None,
    ) -> None:
        self._chunks = list(chunks)
        self._group = pp_group
        self._rank, self._ranks = dist.get_rank(pp_group), dist.get_world_size(pp_group)
        self._last_stage = self._ranks * len(chunks) - 1
        self._activation = activation
        self._device = device
        self._before_backward = before_backward or _nothing_before
        self._after_evaluation = after_evaluation or _nothing_after
        make_communicator(pp_group)  # the first batch of transfers involves some ranks only

    def run(
        self,
        batches: Sequence[PackedBatch],
        loss_scale: float | torch.Tensor,
        dropout_keys: Sequence[Any] | None = None,
    ) -> torch.Tensor:
        """See :class:`Runner`."""
        _check_scale(loss_scale)
        step = _Step(self, batches, _keys(batches, dropout_keys), loss_scale)
        return self._play(step, backward=True)

    def evaluate(self, batches: Sequence[PackedBatch]) -> torch.Tensor:
        """See :class:`Runner`."""
        step = _Step(self, batches, [None] * len(batches), None)
        with _evaluating(self._chunks, self._after_evaluation):
            return self._play(step, backward=False)

    def _play(self, step: "_Step", backward: bool) -> torch.Tensor:
        schedule = make_schedule(self._ranks, len(self._chunks), len(step.batches), backward)
        transport = Transport(self._group, step.empty)
        for slot in schedule[self._rank]:
            made = None
            if slot.work is not None and slot.work.kind == FORWARD:
                made = step.forward(slot.work, transport)
            elif slot.work is not None:
                made = step.backward(slot.work, transport)
            transport.exchange(slot, made)
        transport.finish()
        dist.broadcast(step.total, group=self._group, group_src=self._ranks - 1)
        return step.total


class _Step:
    """State of one step: losses so far, and graphs that wait for their backward pass."""

    def __init__(
        self,
        runner: PipelineRunner,
        batches: Sequence[PackedBatch],
        keys: Sequence[Any],
        loss_scale: float | torch.Tensor | None,
    ) -> None:
        self.batches = batches
        self.total = torch.zeros((), dtype=torch.float64, device=runner._device)
        self._runner = runner
        self._keys = keys
        self._loss_scale = loss_scale
        self._waiting: dict[
            tuple[int, int], tuple[torch.Tensor | None, torch.Tensor | GradientEdge]
        ] = {}

    def empty(self, needed_by: Pass) -> torch.Tensor:
        """Buffer for the activation or gradient that a pass needs."""
        spec = self._runner._activation
        shape = spec.of(self.batches[needed_by.micro_batch])
        return torch.empty(shape, dtype=spec.dtype, device=self._runner._device)

    def forward(self, work: Pass, transport: Transport) -> torch.Tensor | None:
        """Run a forward pass; returns what goes to the next stage."""
        runner, index = self._runner, work.micro_batch
        x = None
        if work.stage > 0:
            x = transport.take(work).requires_grad_(torch.is_grad_enabled())
        chunk = runner._chunks[work.stage // runner._ranks]
        out: torch.Tensor = chunk(x, self.batches[index], dropout_key=self._keys[index])
        if work.stage == runner._last_stage:
            assert out.ndim == 0, out.shape
            self.total += out.detach()
            if out.requires_grad:
                self._waiting[work.stage, index] = (x, out)
            return None
        expected = runner._activation
        assert out.dtype == expected.dtype, (out.dtype, expected.dtype)
        assert tuple(out.shape) == expected.of(self.batches[index]), (out.shape, expected)
        if out.requires_grad:
            # The edge keeps the graph but not the output, which is freed once it is sent.
            self._waiting[work.stage, index] = (x, get_gradient_edge(out))
        return out.detach().contiguous()

    def backward(self, work: Pass, transport: Transport) -> torch.Tensor | None:
        """Run a backward pass; returns the gradient that goes to the previous stage."""
        runner, index = self._runner, work.micro_batch
        assert work.kind == BACKWARD
        x, root = self._waiting.pop((work.stage, index))
        if isinstance(root, torch.Tensor):
            assert self._loss_scale is not None
            gradient = _scale_like(self._loss_scale, root)
        else:
            gradient = transport.take(work)
        chunk = runner._chunks[work.stage // runner._ranks]
        runner._before_backward(chunk, index == len(self.batches) - 1)
        torch.autograd.backward(root, gradient)
        if x is None:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad.contiguous()


def _keys(batches: Sequence[PackedBatch], keys: Sequence[Any] | None) -> Sequence[Any]:
    assert len(batches) > 0
    if keys is None:
        return [None] * len(batches)
    assert len(keys) == len(batches), (len(keys), len(batches))
    return keys


def _check_scale(loss_scale: float | torch.Tensor) -> None:
    # 1 / (a count of tokens) is an fp32 tensor by default, which would round every fp64 gradient.
    assert isinstance(loss_scale, float) or (
        isinstance(loss_scale, torch.Tensor) and loss_scale.dtype == torch.float64
    ), loss_scale


def _scale_like(loss_scale: float | torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """The gradient of ``loss_scale * loss`` with respect to ``loss``."""
    if isinstance(loss_scale, torch.Tensor):
        return loss_scale.to(device=loss.device, dtype=loss.dtype).reshape(loss.shape)
    return torch.full_like(loss, loss_scale, requires_grad=False)


@contextmanager
def _evaluating(chunks: Sequence[nn.Module], after: AfterEvaluation) -> Iterator[None]:
    """Eval mode without autograd; the modules' modes come back afterwards."""
    training = [chunk.training for chunk in chunks]
    try:
        for chunk in chunks:
            chunk.eval()
        with torch.no_grad():
            yield
    finally:
        for chunk, mode in zip(chunks, training, strict=True):
            chunk.train(mode)
    for chunk in chunks:
        after(chunk)


def _nothing_before(module: nn.Module, last: bool) -> None:
    return None


def _nothing_after(module: nn.Module) -> None:
    return None
