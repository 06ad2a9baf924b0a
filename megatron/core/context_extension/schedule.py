"""A schedule of stages with growing context, and which stage a run is in: pure arithmetic.

::

    stage 1: 4K           stage 2: 16K          stage 3: 64K
    |--------------------|---------------------|------------------|
    0 tokens             end_tokens of 1       end_tokens of 2    total_tokens

A stage is a half-open interval of the run: it holds the steps ``start_iteration <= i <
end_iteration`` (i = steps done before) and the tokens ``start_tokens <= t < end_tokens``.
Tokens count every position of the rows: one step of a stage is ``global_batch_size *
seq_length`` tokens. A length given in samples or tokens is rounded UP to whole steps, so a
stage never sees less than was asked for, and its boundary in tokens is exactly
that of its last step. A run without a schedule file is a schedule of one stage.

What a stage doesn't say comes from the flags (``StageDefaults``). Reading YAML lives in
``schedule_file``; whether a stage fits the cluster is checked by the training room.
"""

import bisect
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.context_extension.schedule_file import load_yaml, read_stages
from megatron.core.context_extension.stage import LearningRateRule, Stage, StageDefaults


def _steps(stage: Stage) -> int:
    assert stage.global_batch_size is not None
    if stage.train_iters is not None:
        return stage.train_iters
    if stage.train_samples is not None:
        return -(-stage.train_samples // stage.global_batch_size)
    assert stage.train_tokens is not None
    return -(-stage.train_tokens // stage.tokens_per_step)


def _batch_of(stage: Stage, dpcp_size: int | None) -> int | None:
    """The stage's global batch: its own, or one micro-batch on each data-parallel rank."""
    if stage.global_batch_size is not None:
        return stage.global_batch_size
    if stage.micro_batch_size is None or dpcp_size is None:
        return None
    return stage.micro_batch_size * max(1, dpcp_size // stage.context_parallel_size)


@dataclasses.dataclass(frozen=True)
class ContextSchedule:
    """The stages of a run in order. Made by ``from_yaml``, ``from_mapping`` or ``single``."""

    stages: tuple[Stage, ...]

    @classmethod
    def from_yaml(
        cls, path: str | Path, defaults: StageDefaults | None = None
    ) -> "ContextSchedule":
        """Read a schedule file.

        Args:
            path: YAML file with a list ``stages``.
            defaults: what the stages take from the flags.

        Raises:
            ValueError: every fault of the file: stage number, key and cure, a line each.
        """
        stages, problems = read_stages(load_yaml(path), defaults or StageDefaults())
        if problems:
            raise ValueError("\n".join(f"{path}: {problem}" for problem in problems))
        return cls.from_stages(stages, defaults)

    @classmethod
    def from_mapping(
        cls, document: Mapping[str, Any], defaults: StageDefaults | None = None
    ) -> "ContextSchedule":
        """A schedule from what a YAML file would hold. Raises ValueError as ``from_yaml``."""
        stages, problems = read_stages(document, defaults or StageDefaults())
        if problems:
            raise ValueError("\n".join(problems))
        return cls.from_stages(stages, defaults)

    @classmethod
    def single(cls, defaults: StageDefaults) -> "ContextSchedule":
        """The schedule of a run without a file: one stage, all of it from the flags.

        Raises:
            ValueError: if the flags leave out the sequence length or the train length, or give
                two train lengths.
        """
        return cls.from_mapping({"stages": [{"name": "the whole run"}]}, defaults)

    @classmethod
    def from_stages(
        cls, stages: "list[Stage] | tuple[Stage, ...]", defaults: StageDefaults | None = None
    ) -> "ContextSchedule":
        """Place resolved stages one after the other.

        A stage whose batch size is unknown (a file read without flags) still has a place in
        tokens when its length is given in tokens or samples, not rounded then; a length in
        iterations needs the batch.

        Raises:
            ValueError: for a length in iterations without a global batch size.
        """
        dpcp = defaults.dpcp_size if defaults else None
        placed: list[Stage] = []
        iteration = samples = tokens = 0
        for stage in stages:
            stage = dataclasses.replace(stage, global_batch_size=_batch_of(stage, dpcp))
            if stage.global_batch_size is not None:
                steps = _steps(stage)
                rows = steps * stage.global_batch_size
                length = rows * stage.seq_length
            elif stage.train_iters is None:
                steps = 0
                length = stage.train_tokens or (stage.train_samples or 0) * stage.seq_length
                rows = -(-length // stage.seq_length)
            else:
                raise ValueError(
                    f"stage {stage.number}: global_batch_size is missing, so {stage.train_iters} "
                    "iterations have no length in tokens; add global_batch_size to the stage or "
                    "pass --global-batch-size"
                )
            placed.append(
                dataclasses.replace(
                    stage,
                    start_iteration=iteration,
                    end_iteration=iteration + steps,
                    start_samples=samples,
                    end_samples=samples + rows,
                    start_tokens=tokens,
                    end_tokens=tokens + length,
                )
            )
            iteration, samples, tokens = iteration + steps, samples + rows, tokens + length
        return cls(tuple(placed))

    @classmethod
    def from_record(cls, record: "list[dict[str, Any]]") -> "ContextSchedule":
        """The schedule that :meth:`to_record` wrote down, JSON in between or not."""
        stages = []
        for entry in record:
            values: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in entry.items()
            }
            scaling = values["rope_scaling"]
            if scaling is not None:
                values["rope_scaling"] = {
                    key: tuple(value) if isinstance(value, list) else value
                    for key, value in scaling.items()
                }
            values["lr"] = LearningRateRule(**values["lr"])
            stages.append(Stage(**values))
        return cls(tuple(stages))

    def to_record(self) -> "list[dict[str, Any]]":
        """The resolved stages as JSON-able data, to be saved with a checkpoint."""
        return [dataclasses.asdict(stage) for stage in self.stages]

    @property
    def total_iterations(self) -> int:
        """Steps of the whole run; LR decay takes this long unless a flag says otherwise."""
        return self.stages[-1].end_iteration

    @property
    def total_samples(self) -> int:
        """Rows of the whole run."""
        return self.stages[-1].end_samples

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole run: where it ends."""
        return self.stages[-1].end_tokens

    @property
    def splits(self) -> tuple[tuple[int, int], ...]:
        """Each different (ulysses, ring), in order of first use: the groups to make at start."""
        return tuple(dict.fromkeys(stage.context_parallel for stage in self.stages))

    def stage_at(self, consumed_tokens: int) -> Stage:
        """The stage that the token after ``consumed_tokens`` tokens belongs to.

        A boundary belongs to the later stage. At and beyond the end: the last stage
        (``consumed_tokens >= total_tokens`` says that the run is over).

        Raises:
            ValueError: for a negative count.
        """
        return self._find(consumed_tokens, [stage.end_tokens for stage in self.stages], "tokens")

    def stage_at_iteration(self, iteration: int) -> Stage:
        """The stage of the step after ``iteration`` steps; at the end, the last stage.

        Raises:
            ValueError: for a negative count.
        """
        ends = [stage.end_iteration for stage in self.stages]
        return self._find(iteration, ends, "iterations")

    def tokens_at(self, iteration: int) -> int:
        """Tokens consumed after ``iteration`` steps."""
        stage = self.stage_at_iteration(iteration)
        done = min(iteration, stage.end_iteration) - stage.start_iteration
        return stage.start_tokens + done * stage.tokens_per_step

    def _find(self, done: int, ends: list[int], unit: str) -> Stage:
        if done < 0:
            raise ValueError(f"consumed {unit} {done} must be at least 0")
        return self.stages[min(bisect.bisect_right(ends, done), len(self.stages) - 1)]
