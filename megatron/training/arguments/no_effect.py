"""Settings that differ from their default but mean nothing in this run: a line each in the log.

A setting that contradicts another is refused by a rule; one that merely waits for another (Adam's
betas beside ``--optimizer sgd``) is common in scripts that serve several runs, so it is said.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.config import RunConfig
from megatron.core.config.flags import flag_name
from megatron.core.context_extension import Stage


def settings_without_effect(config: RunConfig, stages: Sequence[Stage]) -> Iterator[str]:
    """One text for each such setting.

    Args:
        config: a configuration without faults.
        stages: its stages.
    """
    optimizer, model, parallel = config.optimizer, config.model, config.parallel
    if optimizer.optimizer == "sgd":
        for name in ("adam_beta1", "adam_beta2", "adam_eps"):
            yield from _unused(optimizer, name, "with --optimizer sgd")
    else:
        yield from _unused(optimizer, "sgd_momentum", f"with --optimizer {optimizer.optimizer}")
    if optimizer.lr_decay_style != "WSD":
        yield from _unused(optimizer, "lr_wsd_decay_style", "without --lr-decay-style WSD")
    if optimizer.lr_decay_style == "constant":
        yield from _unused(optimizer, "min_lr", "with --lr-decay-style constant")
    if model.position_embedding_type != "rope":
        kind = f"with --position-embedding-type {model.position_embedding_type}"
        for name in ("rotary_base", "rotary_percent"):
            yield from _unused(model, name, kind)
    if all(stage.context_parallel_size == 1 for stage in stages):
        for name in ("cp_comm_type", "cp_layout"):
            yield from _unused(parallel, name, "with a context-parallel size of 1")
    yield from _without_checkpoints(config)
    end = stages[-1].end_iteration
    late = [number for number in config.training.iterations_to_skip if number > end]
    if late:
        yield (
            f"--iterations-to-skip {' '.join(map(str, late))} has no effect: the run ends after "
            f"iteration {end}"
        )


def _without_checkpoints(config: RunConfig) -> Iterator[str]:
    """What loads or saves less than usual, where nothing is loaded or saved."""
    checkpoint = config.checkpoint
    if checkpoint.load is None:
        for name in ("no_load_optim", "no_load_rng", "allow_changed"):
            yield from _unused(checkpoint, name, "without --load")
        yield from _unused(config.optimizer, "override_opt_param_scheduler", "without --load")
    if checkpoint.save is None:
        yield from _unused(checkpoint, "no_save_optim", "without --save")


def _unused(section: Any, name: str, why: str) -> Iterator[str]:
    default = next(field.default for field in dataclasses.fields(section) if field.name == name)
    value = getattr(section, name)
    if value != default:
        given = flag_name(name) if value is True else f"{flag_name(name)} {value}"
        yield f"{given} has no effect {why}"
