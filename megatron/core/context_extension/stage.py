"""A stage of a context schedule, what it may take from the flags, and its learning-rate rule.

Data only: a stage's place in the run is given by ``schedule``, its text is read by
``schedule_file``.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

LENGTH_KEYS = ("train_iters", "train_samples", "train_tokens")


@dataclasses.dataclass(frozen=True)
class LearningRateRule:
    """How a stage's learning rate relates to the run's own curve.

    ``continue``: the run's curve goes on as if there were no stages, scaled to the stage's own
    ``peak`` and ``min`` where given. ``constant``: ``peak`` throughout. ``rewarm``: linear from
    ``min`` to ``peak`` over ``warmup_iters`` steps, then ``decay_style`` down to ``min`` at the
    stage's end. Where None, ``peak``, ``min`` and ``decay_style`` are the flags'.
    """

    rule: str = "continue"
    peak: float | None = None
    min: float | None = None
    warmup_iters: int = 0
    decay_style: str | None = None


@dataclasses.dataclass(frozen=True)
class StageDefaults:
    """What a stage takes from the flags for the keys that it lacks."""

    seq_length: int | None = None
    train_iters: int | None = None
    train_samples: int | None = None
    train_tokens: int | None = None
    rotary_base: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    context_parallel: tuple[int, int] = (1, 1)
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    data_path: tuple[str, ...] | None = None
    long_document_upsampling: tuple[str, ...] | None = None
    packing: str = "concat"
    dpcp_size: int | None = None
    """Ranks over which data and context are split (world / (tp * pp)); gives a stage without a
    global batch size the one of a single micro-batch."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage, every key resolved, and its place in the run."""

    index: int
    """From 0; messages to people say ``number``, from 1."""
    name: str
    seq_length: int
    rotary_base: float
    rope_scaling: Mapping[str, Any] | None
    """Hugging Face's mapping, or None for plain RoPE."""
    context_parallel: tuple[int, int]
    """(ulysses, ring)."""
    micro_batch_size: int | None
    global_batch_size: int | None
    data_path: tuple[str, ...] | None
    long_document_upsampling: tuple[str, ...] | None
    packing: str
    lr: LearningRateRule = LearningRateRule()
    train_iters: int | None = None
    train_samples: int | None = None
    train_tokens: int | None = None
    start_iteration: int = 0
    end_iteration: int = 0
    start_samples: int = 0
    end_samples: int = 0
    start_tokens: int = 0
    end_tokens: int = 0

    @property
    def number(self) -> int:
        """The stage's number as messages give it: from 1."""
        return self.index + 1

    @property
    def ulysses_size(self) -> int:
        """Ulysses ranks of the stage."""
        return self.context_parallel[0]

    @property
    def ring_size(self) -> int:
        """Ring ranks of the stage."""
        return self.context_parallel[1]

    @property
    def context_parallel_size(self) -> int:
        """Ranks that share a row."""
        return self.ulysses_size * self.ring_size

    @property
    def iterations(self) -> int:
        """Steps of the stage."""
        return self.end_iteration - self.start_iteration

    @property
    def tokens_per_step(self) -> int:
        """Positions of one step's rows."""
        assert self.global_batch_size is not None
        return self.global_batch_size * self.seq_length
