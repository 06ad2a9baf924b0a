"""The learning rate of a step: a pure function of the configuration, schedule and iteration.

The run has one curve (``--lr-decay-style`` over the sum of the stages); a stage may follow it
(``continue``), hold its own constant rate, or rewarm and decay inside itself.
"""

import dataclasses

from megatron.core.config import OptimizerConfig
from megatron.core.context_extension import ContextSchedule, Stage
from megatron.core.optimizer import LRSchedule, lr_at, make_lr_schedule


def learning_rate(config: OptimizerConfig, schedule: ContextSchedule, iteration: int) -> float:
    """Rate of the step that has ``iteration`` steps before it."""
    stage = schedule.stage_at_iteration(iteration)
    rule = stage.lr
    run = make_lr_schedule(config, schedule.total_iterations)
    peak = run.max_lr if rule.peak is None else rule.peak
    floor = run.min_lr if rule.min is None else rule.min
    if rule.rule == "constant":
        return peak
    if rule.rule == "rewarm":
        return _rewarmed(stage, iteration - stage.start_iteration, run, peak, floor)
    return lr_at(dataclasses.replace(run, max_lr=peak, min_lr=floor), iteration)


def _rewarmed(stage: Stage, step: int, run: LRSchedule, peak: float, floor: float) -> float:
    rule = stage.lr
    if step < rule.warmup_iters:
        return floor + (peak - floor) * step / rule.warmup_iters
    own = dataclasses.replace(
        run,
        max_lr=peak,
        min_lr=floor,
        decay_style=rule.decay_style or run.decay_style,
        warmup_steps=0,
        decay_steps=max(1, stage.iterations - rule.warmup_iters),
    )
    return lr_at(own, step - rule.warmup_iters)
