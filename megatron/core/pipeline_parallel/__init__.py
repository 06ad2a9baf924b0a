"""Pipeline parallelism: layer split, schedules, and the runners that execute a step."""

from megatron.core.pipeline_parallel.layers import layer_ids, num_chunks
from megatron.core.pipeline_parallel.runner import (
    ActivationShape,
    PipelineRunner,
    Runner,
    SingleStageRunner,
    make_runner,
)
from megatron.core.pipeline_parallel.schedule import idle_fraction, make_schedule

__all__ = [
    "ActivationShape",
    "PipelineRunner",
    "Runner",
    "SingleStageRunner",
    "idle_fraction",
    "layer_ids",
    "make_runner",
    "make_schedule",
    "num_chunks",
]
