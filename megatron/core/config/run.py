"""The whole configuration of one run."""

import dataclasses

from megatron.core.config.checkpoint import CheckpointConfig
from megatron.core.config.data import DataConfig, TokenizerConfig
from megatron.core.config.logging import LoggingConfig
from megatron.core.config.model import ModelConfig
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.parallel import ParallelConfig
from megatron.core.config.training import TrainingConfig


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One dataclass per concern; what flags and checkpoints are made of."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = dataclasses.field(default_factory=TokenizerConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
