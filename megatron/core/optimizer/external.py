"""What the adapters of apex and Transformer Engine share: both name their classes alike."""

from typing import Any

import torch

from megatron.core.config import OptimizerConfig
from megatron.core.optimizer.local_views import Groups, LocalViews, local_part

DEVICES = ("cuda",)
"""Where their kernels run."""


def build_fused(
    module: Any, config: OptimizerConfig, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """``FusedAdam`` (decoupled weight decay) or ``FusedSGD`` of ``module`` over ``groups``.

    Raises:
        ValueError: when this rank's part of a parameter is no fp32 CUDA tensor: their kernels take
            no other kind, and with bf16 weights read optimizer state as fp32, whatever it is.
    """
    for group in groups:
        for parameter in group["params"]:
            part = local_part(parameter)
            if part.dtype != torch.float32 or part.device.type not in DEVICES:
                raise ValueError(
                    f"--optimizer-impl {config.optimizer_impl} updates float32 weights on CUDA, "
                    f"not {part.dtype} on {part.device.type}; use --params-dtype float32 (--bf16 "
                    "keeps such master weights), or --optimizer-impl torch"
                )
    return LocalViews(lambda views: _fused(module, config, views), groups)


def _fused(module: Any, config: OptimizerConfig, groups: Groups) -> torch.optim.Optimizer:
    built: torch.optim.Optimizer
    if config.optimizer == "adam":
        built = module.FusedAdam(
            groups,
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            adam_w_mode=True,
        )
    else:
        built = module.FusedSGD(groups, lr=config.lr, momentum=config.sgd_momentum)
    return built
