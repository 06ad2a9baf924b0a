"""Tensor-parallel parameters: DTensors as storage, local tensors in the forward pass.

A parameter is a DTensor on the 1-D tp mesh (sharded along one dim, or replicated), so that
FSDP2, clipping and distributed checkpoints know its global shape; the layers compute on its
local tensor, reached through `local` alone. With tp = 1 (no mesh, or a mesh of one rank)
parameters are plain, which saves about 0.17 ms of host time a parameter and micro-batch.
Making one never communicates.

**The one trap.** A replicated parameter that is used on a *part* of the activations
(norm weights on sequence shards, biases after a reduce-scatter, QK-norms on head shards,
KV projections shared by several ranks) has on each rank only a part of its gradient.
Forgetting the sum over tp is silent and wrong; ``local(parameter, partial=True)`` does it:

- fp32 and fp64 parameters: the gradient is a DTensor with placement Partial. It accumulates
  locally over micro-batches and FSDP2 sums it over tp when it reduces. Without FSDP2,
  call `megatron.core.distributed.finalize_gradients` after backward.
- bf16 and fp16 (FSDP2 with ``param_dtype=bfloat16``): FSDP2 would sum that Partial in bf16
  whenever it reduces after a single micro-batch. Instead the sum is taken at once, in the
  backward pass, in fp32, and rounded once; FSDP2 then accumulates in its ``reduce_dtype``.
  Price: one small all-reduce a parameter and micro-batch. Pass ``dtype=torch.float32`` when
  the computation is in fp32 anyway (norms): the summands are then not rounded either.
"""

import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from megatron.core.collectives import copy_to_region
from megatron.core.tensor_parallel.initialization import ZEROS, Init, fill_shard

_LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """What every tensor-parallel layer needs to know; made once per model.

    ``tp_mesh`` is the 1-D tp slice of the root mesh or None; ``sequence_parallel`` shards the
    activations between tensor-parallel regions along the sequence; ``seed``, ``dtype`` and
    ``device`` are those of the parameters.
    """

    tp_mesh: DeviceMesh | None = None
    sequence_parallel: bool = False
    seed: int = 1234
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    @property
    def size(self) -> int:
        """Tensor-parallel size."""
        return 1 if self.tp_mesh is None else self.tp_mesh.size()

    @property
    def rank(self) -> int:
        """This rank's place on the tp axis."""
        return 0 if self.tp_mesh is None else self.tp_mesh.get_local_rank()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The tp group, or None when there is nothing to communicate."""
        return None if self.tp_mesh is None or self.size == 1 else self.tp_mesh.get_group()

    @property
    def shards_sequence(self) -> bool:
        """Whether activations outside tensor-parallel regions are sequence shards."""
        return self.sequence_parallel and self.size > 1

    def parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        init: Init = ZEROS,
        shard_dim: int | None = None,
    ) -> nn.Parameter:
        """A parameter of global ``shape``, sharded over tp along ``shard_dim``.

        Values depend on the seed, ``name`` (the parameter's global name) and ``shape`` alone. On
        the meta device there are none. No communication takes place.

        Args:
            name: global name.
            shape: global shape.
            init: rule of the initial values.
            shard_dim: the dim that is cut into equal contiguous pieces; None replicates.

        Raises:
            ValueError: the tensor-parallel size does not divide the sharded dim.
        """
        if self.tp_mesh is None or self.size == 1:
            plain = torch.empty(shape, dtype=self.dtype, device=self.device)
            if not plain.is_meta:
                fill_shard(plain, shape, init, name=name, seed=self.seed)
            return nn.Parameter(plain)
        local_shape = list(shape)
        placement: Placement = Replicate()
        offset = 0
        if shard_dim is not None:
            shard_dim %= len(shape)
            if shape[shard_dim] % self.size:
                raise ValueError(
                    f"{name}: dim {shard_dim} of shape {shape} must be a multiple of "
                    f"--tensor-model-parallel-size {self.size}; use a size that divides it"
                )
            local_shape[shard_dim] //= self.size
            offset = self.rank * local_shape[shard_dim]
            placement = Shard(shard_dim)
        shard = torch.empty(local_shape, dtype=self.dtype, device=self.device)
        if not shard.is_meta:
            fill_shard(
                shard, shape, init, name=name, seed=self.seed, shard_dim=shard_dim, offset=offset
            )
        stride = torch.empty(shape, device="meta").stride()
        return nn.Parameter(
            DTensor.from_local(
                shard,
                self.tp_mesh,
                [placement],
                run_check=False,
                shape=torch.Size(shape),
                stride=stride,
            )
        )


def local(
    parameter: torch.Tensor, *, partial: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """This rank's tensor of a parameter, for use in the forward pass.

    Args:
        partial: the parameter is replicated, and this rank uses it on a part of the
            activations only: sum the gradient over tp (see the module's docstring).
        dtype: cast to this; with ``partial`` the gradient is summed in it, never below fp32.
    """
    if not isinstance(parameter, DTensor):
        return parameter if dtype is None else parameter.to(dtype)
    assert parameter.device_mesh.ndim == 1, "FSDP has not unsharded this parameter"
    if not partial:
        tensor = parameter.to_local()
        return tensor if dtype is None else tensor.to(dtype)
    placement = parameter.placements[0]
    assert placement.is_replicate(), f"partial use of a parameter placed {placement}"
    if parameter.dtype not in _LOW_PRECISION:
        tensor = parameter.to_local(grad_placements=[Partial()])
        return tensor if dtype is None else tensor.to(dtype)
    tensor = parameter.to_local()
    if dtype is not None:
        tensor = tensor.to(dtype)
    group = parameter.device_mesh.get_group()
    wide = torch.float32 if tensor.dtype in _LOW_PRECISION else None
    return copy_to_region(tensor, group, reduce_dtype=wide)
