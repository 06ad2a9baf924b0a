"""What the adapters of apex and Transformer Engine share: both name their classes alike."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron.core.config import OptimizerConfig


def build_fused(
    module: Any, config: OptimizerConfig, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """``FusedAdam`` (decoupled weight decay) or ``FusedSGD`` of ``module`` over ``groups``.

    Raises:
        ValueError: when a parameter is not a plain fp32 CUDA tensor: their kernels take no other
            kind, and with bf16 weights read optimizer state as fp32, whatever it is.
    """
    for group in groups:
        for parameter in group["params"]:
            plain = not isinstance(parameter, DTensor) and parameter.dtype == torch.float32
            if not plain or parameter.device.type != "cuda":
                raise ValueError(
                    f"--optimizer-impl {config.optimizer_impl} works on plain CUDA parameters, "
                    "without tensor parallelism, sharding over data or context ranks, or --bf16, "
                    "and with --params-dtype float32 alone; use --optimizer-impl torch"
                )
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
