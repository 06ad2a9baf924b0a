"""From configuration to a ``torch.optim`` optimizer over this rank's parameters.

Torch's fused kernel is used where there is one for the device, dtype and kind of parameter, else
foreach; the choice is logged once. Parameters may be plain or DTensors; optimizer state has the
same placements, so with a sharding strategy each rank updates and holds its shard alone. Build it
after sharding: FSDP replaces the parameters.

Norms and biases, that is 1-D parameters, get no weight decay, as in Megatron-LM.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.config import OptimizerConfig
from megatron.core.optimizer import apex_adapter, te_adapter

logger = logging.getLogger("megatron")

_FUSED_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Groups with and without weight decay; empty ones are left out.

    A group never mixes plain parameters with DTensors, nor DTensors of different meshes, which
    torch's multi-tensor kernels refuse.
    """
    groups: dict[tuple[bool, Any], dict[str, Any]] = {}
    seen: set[int] = set()
    for name, parameter in named_parameters:
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        decays = parameter.ndim > 1 and not name.endswith(".bias")
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        group = groups.setdefault(
            (decays, mesh),
            {"params": [], "weight_decay": weight_decay if decays else 0.0},
        )
        group["params"].append(parameter)
    return list(groups.values())


def build_optimizer(
    config: OptimizerConfig, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """The optimizer of ``--optimizer`` and ``--optimizer-impl``.

    Args:
        named_parameters: of all pipeline chunks of this rank, names global, after sharding.

    Raises:
        ValueError: when the implementation is not installed or can't do what is asked.
    """
    lr = config.lr
    assert lr is not None, "make_lr_schedule refuses a missing --lr"
    groups = parameter_groups(named_parameters, config.weight_decay)
    parameters = [parameter for group in groups for parameter in group["params"]]
    if config.optimizer_impl != "torch":
        adapter = {"apex": apex_adapter, "te": te_adapter}[config.optimizer_impl]
        return adapter.build(config, groups)
    fused = _can_fuse(config.optimizer, parameters)
    kind = "fused" if fused else "foreach"
    logger.info("optimizer %s: torch's %s kernels", config.optimizer, kind)
    choice = {"fused": True} if fused else {"foreach": True}
    if config.optimizer == "adam":
        return torch.optim.AdamW(
            groups,
            lr=lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            **choice,
        )
    return torch.optim.SGD(groups, lr=lr, momentum=config.sgd_momentum, **choice)


def _can_fuse(kind: str, parameters: list[nn.Parameter]) -> bool:
    """Whether torch has a fused kernel; for SGD it has none that takes DTensors."""
    if kind == "sgd" and any(isinstance(parameter, DTensor) for parameter in parameters):
        return False
    return bool(parameters) and all(
        parameter.device.type in ("cpu", "cuda") and parameter.dtype in _FUSED_DTYPES
        for parameter in parameters
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Write ``lr`` into every group; whatever a checkpoint put there is overwritten."""
    for group in optimizer.param_groups:
        group["lr"] = lr
