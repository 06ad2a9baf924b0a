"""Everything a running job holds, built once by ``build`` and handed around explicitly."""

import dataclasses

import torch
from torch import nn

from megatron.core.config import RunConfig
from megatron.core.context_extension import ContextSchedule, Stage
from megatron.core.context_parallel import Workspace
from megatron.core.datasets import BatchLoader
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel import Runner
from megatron.core.tokenizers import Tokenizer
from megatron.training.attention_meter import AttentionMeter
from megatron.training.checkpointing import Checkpointer
from megatron.training.providers import DataProvider, LossProvider
from megatron.training.reporting import Reporter
from megatron.training.signals import ExitSignals
from megatron.training.train_state import TrainState


@dataclasses.dataclass
class Trainer:
    """The parts of a run on this rank."""

    config: RunConfig
    schedule: ContextSchedule
    device: torch.device
    parallel: ParallelState
    tokenizer: Tokenizer
    chunks: list[nn.Module]
    """Model chunks of this pipeline rank, in the order of their virtual stages."""
    named_parameters: list[tuple[str, nn.Parameter]]
    """Parameters of all chunks under global names."""
    tied_weight: nn.Parameter | None
    """This rank's copy of embeddings that first and last pipeline rank share."""
    tied_copy: nn.Parameter | None
    """The same where it is the second copy, which the gradient norm leaves out."""
    optimizer: torch.optim.Optimizer
    runner: Runner
    data_provider: DataProvider
    loss_provider: LossProvider
    checkpointer: Checkpointer
    reporter: Reporter
    signals: ExitSignals
    state: TrainState
    workspace: Workspace = dataclasses.field(default_factory=Workspace)
    """Buffers of context-parallel attention, used again by every micro-batch."""
    attention: AttentionMeter = dataclasses.field(default_factory=AttentionMeter)
    """Work and traffic of attention since the last log line."""
    stage: Stage | None = None
    """The stage whose loaders and groups are in place; None before the first."""
    loader: BatchLoader | None = None
    eval_loaders: dict[str, BatchLoader | None] = dataclasses.field(default_factory=dict)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of all chunks."""
        return [parameter for _, parameter in self.named_parameters]

    @property
    def current_stage(self) -> Stage:
        """The stage in place."""
        assert self.stage is not None, "enter_stage comes first"
        return self.stage
