"""May this run go on from that checkpoint? Compares what was with what is, and says it.

A checkpoint keeps a :class:`RunRecord`: the configuration and the resolved schedule of the run
that wrote it. What a resume may do:

* the past may not change: the sequence length, theta, scaling, batch, data and packing of every
  token already consumed, the seed and the document split. A difference is an error that says
  what to pass (``--allow-changed seq_length,rotary_base``);
* weights must fit: no flag allows another width;
* learning-rate settings change with ``--override-opt-param-scheduler`` only. A decay length that
  just followed from the run's length may follow a new length;
* all else is free (parallel sizes, intervals, the later part of the schedule) and is logged.

The command line always wins over the checkpoint; nothing is taken from the record silently.
"""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from megatron.core.config import RunConfig
from megatron.core.config.flags import flag_name
from megatron.core.config.record import (
    config_fields,
    config_from_json,
    config_to_json,
    diff,
    value_of,
)
from megatron.core.config.values import suggestion
from megatron.core.context_extension import ContextSchedule, Stage

STAGE_KEYS = (
    "seq_length",
    "rotary_base",
    "rope_scaling",
    "global_batch_size",
    "data_path",
    "long_document_upsampling",
    "packing",
)
"""What a stage did to its tokens."""

RUN_KEYS = (
    "seed",
    "split",
    "mock_data",
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "tokenizer_type",
    "tokenizer_model",
    "norm_epsilon",
    "rotary_percent",
    "window_size",
)
"""What the whole run did to all tokens."""

WEIGHT_KEYS = (
    "num_layers",
    "hidden_size",
    "ffn_size",
    "num_attention_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "swiglu",
    "normalization",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "position_embedding_type",
)
"""Properties of the model that its weights depend on."""

LR_KEYS = (
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_warmup_iters",
    "lr_warmup_fraction",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_style",
)
_QUIET = {"load", "save", "allow_changed", "override_opt_param_scheduler", "finetune", "ckpt_step"}
_DERIVED = {"kv_channels", "ffn_hidden_size", "num_query_groups", "group_query_attention"}


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A run as a checkpoint remembers it."""

    config: RunConfig
    schedule: ContextSchedule

    def to_json(self) -> str:
        """JSON text to save."""
        return json.dumps(
            {
                "config": json.loads(config_to_json(self.config)),
                "stages": self.schedule.to_record(),
            },
            sort_keys=True,
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> "RunRecord":
        """The record of :meth:`to_json`.

        Raises:
            ValueError: for text that is no such record.
        """
        try:
            document = json.loads(text)
            config, stages = json.dumps(document["config"]), document["stages"]
            return cls(config_from_json(config), ContextSchedule.from_record(stages))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"the checkpoint's run record can't be read: {error!r}") from None


@dataclasses.dataclass(frozen=True)
class ResumeReport:
    """The outcome of :func:`check_resume`."""

    problems: tuple[str, ...]
    """Why the run must not go on; empty when it may."""
    notes: tuple[str, ...]
    """Differences that are allowed, for the log."""


def allowed_names(text: str) -> list[str]:
    """The names in ``--allow-changed seq_length,rotary_base``."""
    return [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]


def allowed_name_problems(text: str) -> Iterator[str]:
    """What is wrong with the value of ``--allow-changed``."""
    known = (*STAGE_KEYS, *RUN_KEYS)
    for name in allowed_names(text):
        if name not in known:
            hint = suggestion(name, known)
            if name in WEIGHT_KEYS:
                hint = "; weights of another shape can't be loaded"
            yield (
                f"--allow-changed {name} names nothing that a resume may change{hint} "
                f"(names: {', '.join(known)})"
            )


def check_resume(
    saved: RunRecord,
    current: RunRecord,
    *,
    consumed_tokens: int,
    allow_changed: str | None = None,
) -> ResumeReport:
    """Compare a checkpoint's run with the one that wants to go on from it.

    Args:
        saved: the run that wrote the checkpoint.
        current: this run.
        consumed_tokens: tokens (positions of rows) trained on when it was written.
        allow_changed: names as in ``--allow-changed``; default: the current configuration's.

    Returns:
        Problems and notes; raises nothing. With ``--finetune`` only the weights must fit.
    """
    if allow_changed is None:
        allow_changed = current.config.checkpoint.allow_changed
    problems = list(_weight_problems(saved.config, current.config))
    if current.config.checkpoint.finetune:
        return ResumeReport(tuple(problems), ())
    allowed = set(allowed_names(allow_changed))
    past = dict(_changed_run_keys(saved.config, current.config)) if consumed_tokens else {}
    past |= _changed_past(saved.schedule, current.schedule, consumed_tokens)
    notes = [f"allowed by --allow-changed: {text}" for key, text in past.items() if key in allowed]
    refused = {key: text for key, text in past.items() if key not in allowed}
    if refused:
        names = ",".join(sorted(allowed | set(refused)))
        problems += refused.values()
        problems.append(
            f"the past of this run differs from the checkpoint's: set these flags back, or pass "
            f"--allow-changed {names} to go on with the new values from here"
        )
    problems += _optimizer_problems(saved.config, current.config)
    if not current.config.optimizer.override_opt_param_scheduler:
        problems += _learning_rate_problems(saved, current)
    notes += _future_notes(saved.schedule, current.schedule, consumed_tokens)
    notes += _other_notes(saved.config, current.config)
    return ResumeReport(tuple(problems), tuple(notes))


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _weight_problems(saved: RunConfig, current: RunConfig) -> Iterator[str]:
    for key in WEIGHT_KEYS:
        before, now = getattr(saved.model, key), getattr(current.model, key)
        if before != now and not (key == "vocab_size" and None in (before, now)):
            yield f"the checkpoint's model has {key} {before}, this run {now}; weights don't fit"
    if current.model.position_embedding_type == "learned_absolute":
        tables = saved.model.max_position_embeddings, current.model.max_position_embeddings
        if tables[0] != tables[1]:
            yield (
                f"the checkpoint's table of positions has {tables[0]} rows, this run's {tables[1]} "
                "(--max-position-embeddings); weights don't fit"
            )


def _changed_run_keys(saved: RunConfig, current: RunConfig) -> Iterator[tuple[str, str]]:
    for key in RUN_KEYS:
        before, now = value_of(saved, key), value_of(current, key)
        if before != now:
            yield (
                key,
                f"{key} ({flag_name(key)}) was {_show(before)} in the checkpoint's run, now "
                f"{_show(now)}",
            )


def _changed_past(
    saved: ContextSchedule, current: ContextSchedule, consumed_tokens: int
) -> dict[str, str]:
    """Stage key -> text, for the first consumed tokens that the two schedules treat otherwise."""
    ends = {stage.end_tokens for stage in (*saved.stages, *current.stages)}
    starts = sorted({0} | {end for end in ends if end < consumed_tokens}) if consumed_tokens else []
    changed: dict[str, str] = {}
    for start in starts:
        before, now = saved.stage_at(start), current.stage_at(start)
        for key in STAGE_KEYS:
            old, new = getattr(before, key), getattr(now, key)
            if old != new and key not in changed:
                changed[key] = (
                    f"{key} of the tokens from {start:,} on was {_show(old)} (stage "
                    f"{before.number}), now {_show(new)} (stage {now.number})"
                )
    return changed


def _optimizer_problems(saved: RunConfig, current: RunConfig) -> Iterator[str]:
    if current.checkpoint.no_load_optim:
        return
    kinds = saved.optimizer.optimizer, current.optimizer.optimizer
    if kinds[0] != kinds[1]:
        yield (
            f"--optimizer {kinds[1]} can't use the state that {kinds[0]} saved; pass "
            "--no-load-optim to start it fresh"
        )
        return
    momenta = saved.optimizer.sgd_momentum, current.optimizer.sgd_momentum
    if kinds[1] == "sgd" and any(momenta) and not all(momenta):
        yield (
            f"--sgd-momentum was {momenta[0]:g} in the checkpoint's run, now {momenta[1]:g}: "
            "without momentum nothing is kept of it; set it back, or pass --no-load-optim to start "
            "the optimizer fresh"
        )


def _decay(record: RunRecord) -> int | None:
    """Steps of decay when a flag gave them; None when they are just the run's length."""
    steps = record.config.optimizer.lr_decay_iters
    return None if steps == record.schedule.total_iterations else steps


def _learning_rate_problems(saved: RunRecord, current: RunRecord) -> Iterator[str]:
    pairs: list[tuple[str, Any, Any]] = [
        (key, getattr(saved.config.optimizer, key), getattr(current.config.optimizer, key))
        for key in LR_KEYS
    ]
    if _decay(saved) is not None or _decay(current) is not None:
        steps = [
            record.config.optimizer.lr_decay_iters or record.schedule.total_iterations
            for record in (saved, current)
        ]
        pairs.append(("lr_decay_iters", steps[0], steps[1]))
    changed = [
        f"--{key.replace('_', '-')} {_show(now)} (was {_show(before)})"
        for key, before, now in pairs
        if before != now
    ]
    if changed:
        yield (
            f"learning-rate settings differ from the checkpoint's: {', '.join(changed)}; set them "
            "back, or pass --override-opt-param-scheduler to use the new ones from here"
        )


def _plan(stage: Stage) -> tuple[Any, ...]:
    keys = (*STAGE_KEYS, "context_parallel", "micro_batch_size", "lr", "end_tokens")
    return tuple(getattr(stage, key) for key in keys)


def _future_notes(
    saved: ContextSchedule, current: ContextSchedule, consumed_tokens: int
) -> Iterator[str]:
    before = [_plan(stage) for stage in saved.stages if stage.end_tokens > consumed_tokens]
    now = [_plan(stage) for stage in current.stages if stage.end_tokens > consumed_tokens]
    if before != now:
        yield (
            f"the schedule after {consumed_tokens:,} tokens differs from the checkpoint's: "
            f"{saved.total_iterations} iterations in {len(saved.stages)} stages then, "
            f"{current.total_iterations} in {len(current.stages)} now"
        )


def _other_notes(saved: RunConfig, current: RunConfig) -> Iterator[str]:
    told = {*STAGE_KEYS, *RUN_KEYS, *WEIGHT_KEYS, *_QUIET, *_DERIVED}
    names = config_fields()
    changed = [
        f"--{name.replace('_', '-')} {_show(before)} -> {_show(now)}"
        for name, (before, now) in diff(saved, current).items()
        if name in names and name not in told
    ]
    if changed:
        yield "changed since the checkpoint: " + ", ".join(changed)
