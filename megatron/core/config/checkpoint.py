"""Saving, loading and what a resume may change."""

import dataclasses

from megatron.core.config.flags import flag


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and how one is loaded."""

    save: str | None = flag(None, "Folder to save checkpoints in.", metavar="DIR")
    load: str | None = flag(None, "Folder to load a checkpoint from.", metavar="DIR")
    save_interval: int | None = flag(None, "Steps between saves.")
    async_save: bool = flag(False, "Write checkpoints in the background.")
    keep_checkpoints: int = flag(0, "Keep this many newest checkpoints (0: all).")
    ckpt_step: int | None = flag(None, "Load this iteration instead of the latest.")
    finetune: bool = flag(False, "Load weights only and start at iteration 0.")
    no_save_optim: bool = flag(False, "Don't save optimizer state.")
    no_load_optim: bool = flag(False, "Don't load optimizer state.")
    no_load_rng: bool = flag(False, "Don't load random-number states.")
    load_fallback: bool = flag(
        False, "If the newest checkpoint is damaged, load the one before it."
    )
    allow_changed: str = flag(
        "", "Comma-separated names that a resume may change, e.g. seq_length,rotary_base."
    )
