"""Frozen configuration dataclasses, one file per concern."""

from megatron.core.config.checkpoint import CheckpointConfig
from megatron.core.config.data import DataConfig, TokenizerConfig
from megatron.core.config.logging import LoggingConfig
from megatron.core.config.model import ModelConfig
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.parallel import ParallelConfig
from megatron.core.config.run import RunConfig
from megatron.core.config.training import TrainingConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "TokenizerConfig",
    "TrainingConfig",
]
