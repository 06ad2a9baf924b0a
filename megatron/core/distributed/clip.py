"""Global gradient norm and clipping over tensor, data, context and pipeline ranks.

Each element of the global gradient is counted once: what n ranks hold alike counts 1/n on each, so
that a NaN in any copy is seen; a tied embedding's second copy is excluded by the caller. Squares
are summed in fp64 with one all-reduce of one number, so every rank gets the same bits, and a NaN or
infinity anywhere makes the norm non-finite everywhere.
"""

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from megatron.core.compat import group_device

_HALF = (torch.bfloat16, torch.float16)


def gradient_norm(
    parameters: Iterable[nn.Parameter],
    *,
    group: dist.ProcessGroup | None,
    exclude: Collection[nn.Parameter] = (),
) -> float:
    """2-norm of the gradient of the whole model.

    Plain (not DTensor) gradients count on the rank that holds them: such parameters exist only
    where tp and dpcp have one rank.

    Args:
        parameters: this rank's parameters of all its pipeline chunks; those without gradient count
            as zero.
        group: all ranks of the model, pp x dpcp x tp; None for a single process.
        exclude: parameters that another rank counts (the tied output weight of the last pipeline
            rank).
    """
    skipped = {id(parameter) for parameter in exclude}
    by_copies: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = _local_gradient(parameter)
        if gradient is None or id(parameter) in skipped:
            continue
        if gradient.dtype in _HALF:
            gradient = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        by_copies.setdefault(_copies(parameter), []).append(gradient)
    square = torch.zeros((), dtype=torch.float64)
    for copies, gradients in by_copies.items():
        norm = torch.nn.utils.get_total_norm(gradients)
        square = square.to(norm.device) + norm.double().square() / copies
    if group is not None and dist.get_world_size(group) > 1:
        square = square.to(group_device(group))
        dist.all_reduce(square, group=group)
    return float(square.sqrt())


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> float:
    """Scale all gradients by ``min(1, max_norm / (norm + 1e-6))``; returns that factor.

    ``norm`` is the result of :func:`gradient_norm`, finite, the same on every rank;
    ``max_norm`` 0 means no clipping.
    """
    if max_norm <= 0:
        return 1.0
    factor = min(1.0, max_norm / (norm + 1e-6))
    if factor == 1.0:
        return factor
    gradients = [g for p in parameters if (g := _local_gradient(p)) is not None]
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    with torch.no_grad():
        for tensors in by_kind.values():
            torch._foreach_mul_(tensors, factor)
    return factor


def _local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    grad = parameter.grad
    if not isinstance(grad, DTensor):
        return grad
    with torch.no_grad():
        return grad.to_local()


def _copies(parameter: nn.Parameter) -> int:
    """Number of ranks that hold this local gradient alike."""
    grad, copies = parameter.grad, 1
    if isinstance(grad, DTensor):
        for dim, placement in enumerate(grad.placements):
            assert not isinstance(placement, Partial), "finalize_gradients comes first"
            if isinstance(placement, Replicate):
                copies *= grad.device_mesh.size(dim)
    return copies
