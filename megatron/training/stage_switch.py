"""Going from one stage of the context schedule to the next, inside the run.

What changes: the data loader (it goes on at the same document and token), the RoPE tables, and
how the ranks that share weights are split into data, ring and ulysses ranks. What doesn't move:
weights, gradients, optimizer state. The first stage is entered by the same code.
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron.core.config.parallel import effective_layout
from megatron.core.context_extension import Stage
from megatron.core.context_parallel import make_layout
from megatron.core.datasets import BatchLoader, DocumentSource
from megatron.training.arguments import allowed_names
from megatron.training.same_data import check_same_documents, compare_data
from megatron.training.trainer import Trainer

LayoutFn = Callable[[list[torch.Tensor]], Any]


def enter_stage(trainer: Trainer, stage: Stage) -> None:
    """Put ``stage`` in place; says so in one line. Every rank calls it at the same step."""
    leave_stage(trainer)
    trainer.parallel.set_split(stage.ulysses_size, stage.ring_size)
    for chunk in trainer.chunks:
        if trainer.config.model.position_embedding_type == "rope":
            set_rope: Any = chunk.set_rope
            set_rope(stage.rotary_base, stage.rope_scaling, stage.seq_length)
    source = _source(trainer, "train", stage)
    assert source is not None
    if trainer.state.data is not None and trainer.state.iteration > stage.start_iteration:
        allowed = allowed_names(trainer.config.checkpoint.allow_changed)
        check_same_documents(source, trainer.state.data, allowed)
    trainer.loader = make_loader(
        trainer, stage, source, trainer.state.data, trainer.config.data.num_workers
    )
    trainer.stage = stage
    trainer.reporter.say(describe(trainer, stage))
    for line in source.describe().splitlines():
        trainer.reporter.say(f"  {line}")


def leave_stage(trainer: Trainer) -> None:
    """Stop the readers of the stage in place and free what only it needed."""
    if trainer.loader is not None:
        trainer.loader.close()
        trainer.loader = None
    for loader in trainer.eval_loaders.values():
        if loader is not None:
            loader.close()
    trainer.eval_loaders.clear()
    trainer.workspace.clear()
    if trainer.device.type == "cuda":
        # Activations of another length leave blocks of sizes that the next stage can't use.
        torch.cuda.empty_cache()


def describe(trainer: Trainer, stage: Stage) -> str:
    """The line that announces a stage."""
    parallel = trainer.parallel
    scaling = stage.rope_scaling["rope_type"] if stage.rope_scaling else "none"
    return (
        f"stage {stage.number}/{len(trainer.schedule.stages)} '{stage.name}': seq length "
        f"{stage.seq_length}, theta {stage.rotary_base:g}, rope scaling {scaling}, "
        f"ulysses {parallel.ulysses_size} x ring {parallel.ring_size} x data {parallel.dp_size}, "
        f"micro batch {stage.micro_batch_size}, global batch {stage.global_batch_size}, "
        f"packing {stage.packing}, iterations {stage.start_iteration + 1} to "
        f"{stage.end_iteration}, from token {trainer.state.consumed_tokens:,}"
    )


def eval_loader(trainer: Trainer, part: str) -> BatchLoader | None:
    """The loader of an evaluation part in the current stage; None without such data."""
    if part not in trainer.eval_loaders:
        stage = trainer.current_stage
        source = _source(trainer, part, stage)
        if source is None and part == "valid":
            trainer.reporter.say(
                "no validation data (--valid-data-path, or the second part of --split): "
                "nothing is evaluated"
            )
        trainer.eval_loaders[part] = (
            None if source is None else make_loader(trainer, stage, source, None, 0)
        )
    return trainer.eval_loaders[part]


def _source(trainer: Trainer, part: str, stage: Stage) -> DocumentSource | None:
    source = trainer.data_provider(
        trainer.config,
        part,
        eod_token=trainer.tokenizer.eod,
        data_path=stage.data_path,
        long_document_upsampling=stage.long_document_upsampling,
    )
    compare_data(source, part)
    return source


def make_loader(
    trainer: Trainer,
    stage: Stage,
    source: DocumentSource,
    state: dict[str, Any] | None,
    num_workers: int,
) -> BatchLoader:
    """A loader of this rank's share of the stage's rows, from ``state`` on."""
    parallel, data = trainer.parallel, trainer.config.data
    return BatchLoader(
        source,
        state,
        packing=stage.packing,
        num_workers=num_workers,
        seq_length=stage.seq_length,
        micro_batch_size=stage.micro_batch_size,
        global_batch_size=stage.global_batch_size,
        dp_rank=parallel.dp_rank,
        dp_size=parallel.dp_size,
        ring_rank=parallel.ring_rank,
        ulysses_rank=parallel.ulysses_rank,
        layout_fn=layout_fn(trainer.config.parallel.cp_layout, stage),
        eod_token=trainer.tokenizer.eod,
        eod_mask_loss=data.eod_mask_loss,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
    )


def layout_fn(kind: str, stage: Stage) -> LayoutFn:
    """From a micro-batch's document boundaries to who holds which positions."""
    kind = effective_layout(kind, stage.ring_size)
    if kind == "balanced":
        return lambda cu_seqlens: make_layout(
            kind, stage.seq_length, stage.ring_size, stage.ulysses_size, cu_seqlens
        )
    fixed = make_layout(kind, stage.seq_length, stage.ring_size, stage.ulysses_size)
    return lambda cu_seqlens: fixed


def stage_record(stage: Stage) -> dict[str, Any]:
    """What metrics lines say of the stage."""
    return {
        "stage": stage.number,
        "seq_length": stage.seq_length,
        "rotary_base": stage.rotary_base,
        "context_parallel_size": stage.context_parallel_size,
    }
