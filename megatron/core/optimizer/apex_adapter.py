"""NVIDIA apex's fused optimizers: the only place that knows their names.

PyPI's ``apex`` is an unrelated, abandoned package (a Pyramid web toolkit); the real one is built
from NVIDIA's repository. Apex's kernels take plain CUDA tensors; ``local_views`` gives them this
rank's part of each parameter.
"""

import importlib
import importlib.util
from typing import Any

import torch

from megatron.core.config import OptimizerConfig
from megatron.core.optimizer.external import build_fused

INSTALL_HINT = (
    "install NVIDIA apex from source (https://github.com/NVIDIA/apex, with --cpp_ext --cuda_ext), "
    "or use --optimizer-impl torch, whose fused kernels do the same"
)


def probe() -> Any:
    """The module ``apex.optimizers``.

    Raises:
        ValueError: when apex is missing, or is PyPI's package of the same name.
    """
    if importlib.util.find_spec("apex") is None:
        raise ValueError(f"--optimizer-impl apex: apex is not installed; {INSTALL_HINT}")
    try:
        module = importlib.import_module("apex.optimizers")
    except ModuleNotFoundError as error:
        if error.name not in ("apex", "apex.optimizers"):
            raise ValueError(
                f"--optimizer-impl apex: apex can't be imported ({error}); {INSTALL_HINT}"
            ) from error
        raise ValueError(
            "--optimizer-impl apex: the installed package apex has no apex.optimizers; it is "
            "PyPI's unrelated package of that name. Run pip uninstall apex, then "
            f"{INSTALL_HINT}"
        ) from error
    except Exception as error:
        raise ValueError(
            f"--optimizer-impl apex: apex can't be imported ({error}); {INSTALL_HINT}"
        ) from error
    return module


def build(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The fused optimizer over ``groups``; ValueError when it can't be had (see `build_fused`)."""
    return build_fused(probe(), config, groups)
