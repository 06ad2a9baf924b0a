"""What the rules look at, and the words they share."""

import dataclasses

from megatron.core.config import RunConfig
from megatron.core.config.flags import flag_name
from megatron.core.context_extension import Stage


@dataclasses.dataclass(frozen=True)
class Facts:
    """A configuration under check. Stages are unplaced; only those that could be read are here."""

    config: RunConfig
    world_size: int
    stages: tuple[Stage, ...]
    from_file: bool
    """Whether the stages come from a schedule file (else: one stage from the flags)."""
    dpcp: int | None
    """Ranks that share data and context; None when the world size doesn't divide."""
    steps: tuple[int | None, ...] = ()
    """Iterations of each stage; None where its batch isn't known."""

    def name(self, stage: Stage, key: str) -> str:
        """How a message names a stage's value: by stage and key, or by flag."""
        if self.from_file:
            return f"stage {stage.number}: {key}"
        return flag_name(key)

    def prefix(self, stage: Stage) -> str:
        """``stage 2: `` for a stage of a file, else nothing."""
        return f"stage {stage.number}: " if self.from_file else ""

    def data_parallel(self, stage: Stage) -> int | None:
        """Data-parallel size in ``stage``; None when its context split doesn't divide."""
        if self.dpcp is None or self.dpcp % stage.context_parallel_size:
            return None
        return self.dpcp // stage.context_parallel_size

    @property
    def heads(self) -> int | None:
        """Query heads, when given and positive."""
        heads = self.config.model.num_attention_heads
        return heads if heads is not None and heads > 0 else None

    @property
    def kv_heads(self) -> int | None:
        """Key/value heads, when known and positive."""
        if self.heads is None:
            return None
        kv_heads = self.config.model.num_kv_heads
        return kv_heads if kv_heads > 0 else None

    @property
    def head_dim(self) -> int | None:
        """Head dimension, when it can be known and is positive."""
        model = self.config.model
        if model.kv_channels is not None:
            return model.kv_channels if model.kv_channels > 0 else None
        if self.heads is None or model.hidden_size is None or model.hidden_size % self.heads:
            return None
        return model.hidden_size // self.heads or None


def ranks_near(value: int, multiple: int) -> str:
    """``6 or 9 ranks``: the world sizes beside ``value`` that are multiples."""
    return near(value, multiple).removeprefix("use ") + " ranks"


def near(value: int, multiple: int) -> str:
    """``use 96 or 104``: the multiples beside ``value``, leaving out 0."""
    below = value // multiple * multiple
    if below <= 0:
        return f"use {multiple}"
    return f"use {below} or {below + multiple}"


def divisors_below(value: int, limit: int) -> str:
    """``1, 2, 4``: the divisors of ``value`` up to ``limit``, at most the 6 largest."""
    found = [number for number in range(1, min(value, limit) + 1) if value % number == 0]
    return ", ".join(map(str, found[-6:]))
