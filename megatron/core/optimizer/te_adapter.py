"""Transformer Engine's fused optimizers: the only place that knows their names.

Without its torch part, ``transformer-engine`` is an empty package whose import fails. The kernels
take plain CUDA tensors; ``local_views`` gives them this rank's part of each parameter.
"""

import importlib
import importlib.util
from typing import Any

import torch

from megatron.core.config import OptimizerConfig
from megatron.core.optimizer.external import build_fused

INSTALL_HINT = (
    'pip install --no-build-isolation "transformer-engine[pytorch]" on a machine with CUDA, '
    "or use --optimizer-impl torch, whose fused kernels do the same"
)


def probe() -> Any:
    """The module ``transformer_engine.pytorch.optimizers``.

    Raises:
        ValueError: when Transformer Engine or its torch part is missing.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(
            f"--optimizer-impl te: transformer-engine is not installed; {INSTALL_HINT}"
        )
    try:
        return importlib.import_module("transformer_engine.pytorch.optimizers")
    except Exception as error:
        raise ValueError(
            f"--optimizer-impl te: transformer-engine can't be imported ({error}); {INSTALL_HINT}"
        ) from error


def build(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The fused optimizer over ``groups``; ValueError when it can't be had (see `build_fused`)."""
    return build_fused(probe(), config, groups)
