"""Sums that gradients still lack after the last backward pass, before norm and clipping.

Two of them, both Megatron-LM's ``finalize_model_grads``:

- a parameter that is replicated over tp but used on one rank's part of the activations (norms with
  sequence parallelism, KV heads shared by ranks) has a ``Partial`` gradient. FSDP2 sums it when it
  reduces; where FSDP2 isn't needed (one dpcp rank) it is summed here, in one bucket, in fp32.
- tied embeddings live twice when the pipeline has several ranks: on the first and on the last.
  Both copies get the sum of both gradients, so that they stay equal.

Cost: one all-reduce of the replicated parameters over tp, one of the embedding's shard over two
ranks. It doesn't touch gradients that are complete.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

_HALF = (torch.bfloat16, torch.float16)


def finalize_gradients(
    parameters: Iterable[nn.Parameter],
    *,
    tied_weight: nn.Parameter | None = None,
    embedding_group: dist.ProcessGroup | None = None,
) -> None:
    """Complete the gradients of ``parameters`` in place.

    Args:
        tied_weight: this rank's copy of a tied embedding, on the first and on the last pipeline
            rank; None elsewhere, with untied weights, and without a pipeline.
        embedding_group: those two ranks; None on the ranks between.
    """
    with torch.no_grad():
        _sum_partial(parameters)
        if tied_weight is not None and embedding_group is not None:
            _sum_tied(tied_weight, embedding_group)


def _partial_dim(grad: DTensor) -> int | None:
    places = [i for i, placement in enumerate(grad.placements) if isinstance(placement, Partial)]
    assert len(places) <= 1, grad.placements
    return places[0] if places else None


def _sum_partial(parameters: Iterable[nn.Parameter]) -> None:
    buckets: dict[tuple[DeviceMesh, int, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and (dim := _partial_dim(grad)) is not None:
            buckets.setdefault((grad.device_mesh, dim, grad.dtype), []).append(parameter)
    for (mesh, dim, dtype), members in buckets.items():
        grads = [parameter.grad for parameter in members]
        local = [grad.to_local() for grad in grads if isinstance(grad, DTensor)]
        wide = torch.float32 if dtype in _HALF else dtype
        flat = torch.cat([tensor.reshape(-1).to(wide) for tensor in local])
        dist.all_reduce(flat, group=mesh.get_group(dim))
        pieces = flat.to(dtype).split([tensor.numel() for tensor in local])
        for parameter, tensor, piece in zip(members, local, pieces, strict=True):
            grad = parameter.grad
            assert isinstance(grad, DTensor)
            placements = list(grad.placements)
            placements[dim] = Replicate()
            parameter.grad = DTensor.from_local(
                piece.view(tensor.shape),
                mesh,
                placements,
                run_check=False,
                shape=grad.shape,
                stride=grad.stride(),
            )


def _sum_tied(weight: nn.Parameter, group: dist.ProcessGroup) -> None:
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    grad = weight.grad
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    wide = local.float() if local.dtype in _HALF else local.contiguous()
    dist.all_reduce(wide, group=group)
    if wide is not local:
        local.copy_(wide)
