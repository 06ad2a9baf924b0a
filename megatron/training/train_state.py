"""Where a run stands: what a resume needs beside weights, optimizer state and random states."""

import dataclasses
import uuid
from typing import Any


@dataclasses.dataclass
class TrainState:
    """Counters and positions after the last finished step; the same on every rank."""

    iteration: int = 0
    """Finished steps."""
    stage: int = 0
    """Index of the stage that the last finished step belonged to."""
    consumed_samples: int = 0
    """Rows read."""
    consumed_tokens: int = 0
    """Input tokens of the stream read; padding is not counted."""
    data: dict[str, Any] | None = None
    """Position in the document stream; None at the start."""
    optimizer_steps: int = 0
    """Updates that the optimizer's state has seen: applied steps since it started from nothing."""
    skipped: int = 0
    """Steps whose update was skipped."""
    skipped_in_a_row: int = 0
    """Non-finite steps since the last applied one."""
    began: list[str] = dataclasses.field(default_factory=list)
    """Flags with which a start of the run began with something else than its latest checkpoint."""
    run_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:12])
    """wandb's id, so that a requeued job continues the same run."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TrainState":
        """The inverse of ``to_json``; unknown keys are refused."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"the checkpoint's train state has unknown entries {unknown}")
        return cls(**values)
