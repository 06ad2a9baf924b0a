"""One optimizer step over a global batch.

The loss is the sum of token losses over the whole global batch (micro-batches x data x context
ranks) divided once by its number of loss tokens, so gradients, norm and loss don't depend on
how the batch was cut. Costs beside forward and backward: two all-reduces of a few numbers over
the ranks that share weights, two over all ranks, for the norm and for whether all is finite.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.core.context_parallel.integrity import check_same_batch
from megatron.core.distributed import clip_gradients, finalize_gradients, gradient_norm
from megatron.core.models.gpt.flops import visible_pairs
from megatron.core.models.gpt.prepare import prepare_batch
from megatron.core.optimizer import set_learning_rate
from megatron.core.packed_batch import PackedBatch
from megatron.core.parallel_state import assert_same_over_ranks
from megatron.core.tensor_parallel import DropoutKey
from megatron.training.learning_rate import learning_rate
from megatron.training.rerun_check import compute_twice
from megatron.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Numbers of one step, equal on all ranks."""

    loss: float
    """Sum of token losses / loss tokens, over the global batch."""
    loss_tokens: int
    grad_norm: float
    learning_rate: float
    pairs: int
    """Visible (query, key) pairs of the global batch, for FLOPs."""
    applied: bool
    """False if the update was skipped because something wasn't finite."""


def due(interval: int, iteration: int) -> bool:
    """Whether a check of this interval (0: never) falls on the iteration."""
    return interval > 0 and iteration % interval == 0


def check_batches(trainer: Trainer, batches: Sequence[PackedBatch], iteration: int) -> None:
    """Compare what the ranks of one replica are about to train on. Collective.

    Raises:
        ValueError: if ranks stand at different places of the stream.
        IntegrityError: if a context-, tensor- or pipeline-parallel group reads different rows.
    """
    parallel, state = trainer.parallel, trainer.state
    assert_same_over_ranks(
        {
            "iteration": state.iteration,
            "consumed samples": state.consumed_samples,
            "consumed tokens": state.consumed_tokens,
            "position in the data": state.data,
        }
    )
    rows = {
        "rows": [batch.sample_ids for batch in batches],
        "contents of the rows": [batch.row_hashes for batch in batches],
        "document boundaries": [batch.cu_seqlens for batch in batches],
    }
    local = {**rows, "tokens": [batch.tokens for batch in batches]}
    check_same_batch(rows, parallel.cp_group, iteration=iteration, device=trainer.device)
    for group in (parallel.tp_group, parallel.pp_group):
        check_same_batch(local, group, iteration=iteration, device=trainer.device)


def prepare(
    trainer: Trainer, batches: Sequence[PackedBatch], *, training: bool
) -> list[PackedBatch]:
    """Move micro-batches to the device and plan their attention."""
    parallel = trainer.parallel
    iteration = trainer.state.iteration + 1
    checked = training and due(trainer.config.parallel.cp_check_interval, iteration)
    return [
        prepare_batch(
            batch.to(trainer.device, non_blocking=True),
            trainer.config.model,
            ring_group=parallel.ring_group,
            ulysses_group=parallel.ulysses_group,
            tp_size=parallel.tp_size,
            cp_comm_type=trainer.config.parallel.cp_comm_type,
            training=training,
            workspace=trainer.workspace,
            check_iteration=iteration if checked else None,
        )
        for batch in batches
    ]


def global_counts(trainer: Trainer, batches: Sequence[PackedBatch]) -> tuple[int, int]:
    """(loss tokens, visible pairs) of the global batch, from this rank's micro-batches."""
    parallel = trainer.parallel
    tokens = sum(int(batch.num_loss_tokens) for batch in batches)
    # Each context-parallel rank knows the whole rows; one of them counts their pairs.
    pairs = 0
    if parallel.cp_rank == 0:
        window = trainer.config.model.window_size
        pairs = sum(visible_pairs(batch.cu_seqlens, window) for batch in batches)
    counts = torch.tensor([tokens, pairs], dtype=torch.int64, device=trainer.device)
    dist.all_reduce(counts, group=parallel.dpcp_group)
    loss_tokens, all_pairs = counts.tolist()
    return loss_tokens, all_pairs


def summed_loss(trainer: Trainer, local: torch.Tensor) -> float:
    """The sum of token losses over the ranks that share weights."""
    total = local.detach().to(torch.float64).clone()
    dist.all_reduce(total, group=trainer.parallel.dpcp_group)
    return float(total)


def dropout_keys(trainer: Trainer, count: int) -> list[DropoutKey]:
    """Where in the run and in the grid each micro-batch's dropout masks are drawn."""
    key = DropoutKey(
        trainer.config.training.seed,
        iteration=trainer.state.iteration,
        dp=trainer.parallel.dp_rank,
        cp=trainer.parallel.cp_rank,
    )
    return [key.at(micro_batch=index) for index in range(count)]


def forward_backward(
    trainer: Trainer, batches: Sequence[PackedBatch], loss_tokens: int
) -> tuple[float, float]:
    """Gradients of the mean loss into the parameters; returns (mean loss, gradient norm)."""
    trainer.optimizer.zero_grad()
    scale = trainer.loss_provider(loss_tokens)
    keys = dropout_keys(trainer, len(batches))
    loss = summed_loss(trainer, trainer.runner.run(batches, scale, keys)) * scale
    finalize_gradients(
        trainer.parameters,
        tied_weight=trainer.tied_weight,
        embedding_group=trainer.parallel.embedding_group,
    )
    exclude = () if trainer.tied_copy is None else (trainer.tied_copy,)
    norm = gradient_norm(trainer.parameters, group=trainer.parallel.world_group, exclude=exclude)
    return loss, norm


def finite_everywhere(trainer: Trainer, loss: float, norm: float) -> bool:
    """Whether loss and norm are finite on every rank, so that all update or none."""
    bad = torch.tensor(
        [not (math.isfinite(loss) and math.isfinite(norm))],
        dtype=torch.int32,
        device=trainer.device,
    )
    dist.all_reduce(bad, group=trainer.parallel.world_group)
    return not bool(bad.item())


def train_step(trainer: Trainer, batches: Sequence[PackedBatch]) -> StepResult:
    """Forward, backward, clip, update; the update is skipped if anything isn't finite."""
    iteration = trainer.state.iteration + 1
    rate = learning_rate(trainer.config.optimizer, trainer.schedule, iteration - 1)
    if due(trainer.config.parallel.cp_check_interval, iteration):
        check_batches(trainer, batches, iteration)
    loss_tokens, pairs = global_counts(trainer, batches)
    if loss_tokens == 0:
        return StepResult(math.nan, 0, math.nan, rate, pairs, applied=False)
    prepared = prepare(trainer, batches, training=True)

    def gradients() -> tuple[float, float]:
        return forward_backward(trainer, prepared, loss_tokens)

    if due(trainer.config.training.rerun_check_interval, iteration):
        loss, norm = compute_twice(
            gradients,
            trainer.chunks,
            trainer.parameters,
            iteration=iteration,
            pp_rank=trainer.parallel.pp_rank,
            pp_size=trainer.parallel.pp_size,
        )
    else:
        loss, norm = gradients()
    trainer.attention.add(prepared)
    applied = finite_everywhere(trainer, loss, norm)
    if applied:
        clip_gradients(trainer.parameters, norm, trainer.config.optimizer.clip_grad)
        set_learning_rate(trainer.optimizer, rate)
        trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return StepResult(loss, loss_tokens, norm, rate, pairs, applied)
