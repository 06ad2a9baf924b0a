"""Every call of this codebase into private parts of torch, in one place.

Torch is pinned to one minor version (``setup.py``); when the pin moves, this file is what has to
be read again. Each function says what it reaches for and why no public call does it.
"""

import datetime
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy


def replicate_module(
    module: nn.Module, *, mesh: "DeviceMesh", mp_policy: "MixedPrecisionPolicy"
) -> None:
    """Replicate ``module`` over a 1-D ``mesh`` with FSDP2's machinery (gradients all-reduced).

    ``replicate`` on top of FSDP2 has no public name yet. Parameters become DTensors with a
    Replicate placement; mixed precision and accumulation work as with ``fully_shard``.
    """
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(module, mesh=mesh, mp_policy=mp_policy)


def reduce_gradients_in_reduce_dtype(module: nn.Module) -> None:
    """Cast gradients to the reduce dtype before anything is summed over ranks.

    FSDP2 sums a ``Partial`` gradient of a tensor-parallel DTensor in the parameter's compute dtype
    (bf16) when the step has one micro-batch, and in the reduce dtype (fp32) when it accumulates.
    This makes it always the latter, by moving the cast that accumulation does before the sum, in
    groups that hold such a parameter. ``module`` is one FSDP module; children wrapped on their own
    are not touched.
    """
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(module, FSDPModule)
    for group in module._get_fsdp_state()._fsdp_param_groups:
        specs = [param._unsharded_dtensor_spec for param in group.fsdp_params]
        if not any(place.is_replicate() for spec in specs if spec for place in spec.placements):
            continue
        for param in group.fsdp_params:
            accumulate = param.accumulate_unsharded_grad_if_needed
            cast = param.to_accumulated_grad_if_needed

            def accumulate_then_cast(
                accumulate: Callable[[], None] = accumulate,
                cast: Callable[[], None] = cast,
                param: Any = param,
            ) -> None:
                accumulate()
                if hasattr(param, "_unsharded_param"):
                    cast()

            vars(param)["accumulate_unsharded_grad_if_needed"] = accumulate_then_cast


def group_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Device of tensors that ``group`` can communicate: the current GPU for NCCL, else the CPU."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def set_group_timeout(group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
    """Time limit of the operations of ``group`` from here on.

    ``init_device_mesh`` takes none and gives its groups torch's default.
    """
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timeout, group)


def is_fake(group: dist.ProcessGroup | None = None) -> bool:
    """Whether ``group`` belongs to the fake backend, which moves no data (dry runs)."""
    return dist.get_backend(group) == "fake"
