"""Longer contexts in one run: RoPE rules, proposals for theta, and the schedule of stages."""

from megatron.core.context_extension.rope import rope_frequencies, rope_inv_freq, rotary_dim
from megatron.core.context_extension.schedule import ContextSchedule
from megatron.core.context_extension.stage import LearningRateRule, Stage, StageDefaults
from megatron.core.context_extension.suggest import Suggestion, suggest_theta

__all__ = [
    "ContextSchedule",
    "LearningRateRule",
    "Stage",
    "StageDefaults",
    "Suggestion",
    "rope_frequencies",
    "rope_inv_freq",
    "rotary_dim",
    "suggest_theta",
]
