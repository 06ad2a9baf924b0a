"""Optimizers and the learning-rate rule."""

from megatron.core.optimizer.build import build_optimizer, parameter_groups, set_learning_rate
from megatron.core.optimizer.lr_schedule import LRSchedule, lr_at, make_lr_schedule

__all__ = [
    "LRSchedule",
    "build_optimizer",
    "lr_at",
    "make_lr_schedule",
    "parameter_groups",
    "set_learning_rate",
]
