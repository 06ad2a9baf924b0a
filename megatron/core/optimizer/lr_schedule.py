"""The learning rate as a pure function of the step.

``lr_at(schedule, step)`` depends on nothing else, so a resumed run can't take an old rate from a
checkpoint. The values are those of Megatron-LM's ``OptimizerParamScheduler``: ``step`` is the
number of steps done before, so iteration 1 trains with ``lr_at(schedule, 0)`` (0 under warmup).

It has no per-group rates; the caller writes the rate into all groups (``set_learning_rate``).
"""

import dataclasses
import math

from megatron.core.config import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class LRSchedule:
    """A learning-rate rule, all numbers resolved.

    ``warmup_steps`` may be fractional (from ``--lr-warmup-fraction``), as in Megatron-LM.
    """

    max_lr: float
    min_lr: float = 0.0
    decay_style: str = "linear"
    warmup_steps: float = 0.0
    decay_steps: int = 1
    wsd_decay_steps: int = 0
    wsd_decay_style: str = "exponential"


def lr_at(schedule: LRSchedule, step: int) -> float:
    """Learning rate of the iteration that has ``step`` iterations before it (step >= 0).

    Linear warmup from 0 to ``max_lr``; then the decay style down to ``min_lr`` at ``decay_steps``;
    ``min_lr`` afterwards. ``constant`` stays at ``max_lr``. ``WSD`` (warmup, stable, decay; Hu et
    al., arXiv:2404.06395) stays at ``max_lr`` until its last ``wsd_decay_steps``.
    """
    s = schedule
    assert step >= 0
    if s.warmup_steps > 0 and step <= s.warmup_steps:
        return s.max_lr * step / s.warmup_steps
    if s.decay_style == "constant":
        return s.max_lr
    if step > s.decay_steps:
        return s.min_lr
    if s.decay_style == "inverse-square-root":
        return max(s.min_lr, s.max_lr * math.sqrt(max(s.warmup_steps, 1) / max(step, 1)))
    if s.decay_style == "WSD":
        start = s.decay_steps - s.wsd_decay_steps
        if step <= start:
            return s.max_lr
        part, style = (step - start) / s.wsd_decay_steps, s.wsd_decay_style
    else:
        part = (step - s.warmup_steps) / (s.decay_steps - s.warmup_steps)
        style = s.decay_style
    return s.min_lr + _left(style, part) * (s.max_lr - s.min_lr)


def _left(style: str, part: float) -> float:
    """What is left of ``max_lr - min_lr`` after ``part`` (0 to 1) of the decay."""
    if style == "linear":
        return 1.0 - part
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * part) + 1.0)
    if style == "exponential":
        return 2.0 * 0.5**part - 1.0
    assert style == "minus_sqrt", style
    return 1.0 - math.sqrt(part)


def make_lr_schedule(config: OptimizerConfig, total_steps: int) -> LRSchedule:
    """The rule of a run of ``total_steps`` steps.

    Raises:
        ValueError: naming the flags when they contradict each other.
    """
    decay = config.lr_decay_iters if config.lr_decay_iters is not None else total_steps
    if config.lr is None:
        raise ValueError("--lr is missing; give the peak learning rate, e.g. --lr 3e-4")
    if config.lr < 0 or config.min_lr < 0:
        raise ValueError(f"--lr {config.lr} and --min-lr {config.min_lr} must not be negative")
    if config.min_lr > config.lr:
        raise ValueError(f"--min-lr {config.min_lr} must be at most --lr {config.lr}; lower it")
    if decay < 1:
        raise ValueError(f"--lr-decay-iters {decay} must be at least 1")
    warmup: float = config.lr_warmup_iters
    if warmup < 0:
        raise ValueError(f"--lr-warmup-iters {config.lr_warmup_iters} must not be negative")
    if config.lr_warmup_fraction is not None:
        if config.lr_warmup_iters:
            raise ValueError(
                f"--lr-warmup-fraction {config.lr_warmup_fraction} and --lr-warmup-iters "
                f"{config.lr_warmup_iters} say the same thing twice; give one of them"
            )
        if not 0 <= config.lr_warmup_fraction < 1:
            raise ValueError(f"--lr-warmup-fraction {config.lr_warmup_fraction} must be in [0, 1)")
        warmup = config.lr_warmup_fraction * decay
    if warmup >= decay:
        raise ValueError(
            f"--lr-warmup-iters {warmup:g} must be less than the steps to decay over ({decay}); "
            "lower it or raise --lr-decay-iters"
        )
    wsd = 0
    if config.lr_decay_style == "WSD":
        if config.lr_wsd_decay_iters is None:
            raise ValueError(
                "--lr-decay-style WSD needs --lr-wsd-decay-iters, the steps of its decay phase; "
                "give it, usually a tenth of the run"
            )
        wsd = config.lr_wsd_decay_iters
        if not 1 <= wsd <= decay - warmup:
            raise ValueError(
                f"--lr-wsd-decay-iters {wsd} must be between 1 and the steps after warmup "
                f"({decay - warmup:g})"
            )
    return LRSchedule(
        max_lr=config.lr,
        min_lr=config.min_lr,
        decay_style=config.lr_decay_style,
        warmup_steps=warmup,
        decay_steps=decay,
        wsd_decay_steps=wsd,
        wsd_decay_style=config.lr_wsd_decay_style,
    )
