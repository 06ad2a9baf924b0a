"""A model out of a checkpoint, whole, in one process: for evaluation.

Everything comes from the checkpoint's own record: the model's flags, its tokenizer, and of the
RoPE the theta and rule of the stage that the last finished step belonged to. A theta given by the
caller wins, as everywhere (command line, then stage, then checkpoint). Any layout of ranks may
have written it. Memory: the weights once; the optimizer's tensors are not read.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core.config import RunConfig
from megatron.core.context_extension import Stage
from megatron.core.dist_checkpointing import (
    CheckpointError,
    choose_checkpoint,
    iteration_folder,
    make_pieces,
    read_pieces,
    verify_checkpoint,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.prepare import compute_dtype
from megatron.training.checkpointing import VOCABULARY_TENSORS
from megatron.training.saved_state import read_saved_state


@dataclasses.dataclass
class LoadedModel:
    """A model to evaluate and where it comes from."""

    model: GPTModel
    config: RunConfig
    """The configuration of the run that wrote it."""
    stage: Stage
    """The stage of its last step."""
    iteration: int
    rotary_base: float
    """theta in force."""
    folder: Path
    note: str | None = None
    """What differs from the checkpoint, to be said."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.output_weight().device

    def set_length(self, length: int) -> None:
        """Make RoPE tables for rows of ``length``; matters for rules that depend on it."""
        if self.config.model.position_embedding_type == "rope":
            self.model.set_rope(self.rotary_base, self.stage.rope_scaling, length)


def load_model(
    root: Path,
    *,
    iteration: int | None = None,
    rotary_base: float | None = None,
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """The model of a checkpoint folder, in evaluation mode.

    Args:
        root: what ``--save`` of the run said.
        iteration: which checkpoint; None: the latest whole one.
        rotary_base: theta to use instead of the checkpoint's.
        device: where to put it.

    Raises:
        CheckpointError: if there is no whole checkpoint, or it is damaged.
        ValueError: for a theta given to a model without RoPE.
    """
    with _alone() as group:
        chosen, warning = choose_checkpoint(root, iteration=iteration, group=group)
        if chosen is None:
            raise CheckpointError(f"--load {root} holds no whole checkpoint; check the folder")
        folder = iteration_folder(root, chosen)
        verify_checkpoint(folder, group=group)
        record = read_saved_state(folder).record
        config = record.config
        model = GPTModel(config.model, seed=config.training.seed, device="cpu")
        assert config.model.vocab_size is not None
        rows = dict.fromkeys(VOCABULARY_TENSORS, config.model.vocab_size)
        named = [(f"model.{name}", parameter) for name, parameter in model.named_parameters()]
        read_pieces(folder, make_pieces(named, rows), group=group)
    model.to(device=device, dtype=compute_dtype(config.model)).eval().requires_grad_(False)
    stage = record.schedule.stage_at_iteration(max(0, chosen - 1))
    loaded = LoadedModel(model, config, stage, chosen, stage.rotary_base, folder, warning)
    if rotary_base is not None and rotary_base != stage.rotary_base:
        loaded.rotary_base = rotary_base
        loaded.note = (
            f"--rotary-base {rotary_base:g} is used; the checkpoint was trained with "
            f"{stage.rotary_base:g}"
        )
        if config.model.position_embedding_type != "rope":
            raise ValueError(
                f"--rotary-base {rotary_base:g} has no effect on a model with "
                f"--position-embedding-type {config.model.position_embedding_type}; leave it out"
            )
    loaded.set_length(stage.seq_length)
    return loaded


@contextlib.contextmanager
def _alone() -> Iterator[dist.ProcessGroup]:
    """A gloo group of this process alone, for functions that are collective."""
    if dist.is_initialized():
        yield dist.new_group([dist.get_rank()], backend="gloo")
        return
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
