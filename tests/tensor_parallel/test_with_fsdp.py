"""Tensor parallelism inside FSDP2: one root mesh (dpcp, tp), gradients of one process."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron.core.tensor_parallel import ONES, TensorParallel, local
from tests.tensor_parallel.tiny import Tiny, batch
from tests.utils.ranks import run_ranks


def _sum_gradients(module: nn.Module, mesh: DeviceMesh, **kwargs: Any) -> None:
    fully_shard(module, mesh=mesh, **kwargs)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def _step(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor, rows: list[int]) -> None:
    """One micro-batch a row; gradients are reduced after the last."""
    for index, row in enumerate(rows):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(index == len(rows) - 1)
        (model(ids[row : row + 1], labels[row : row + 1]) / 11).backward()


def _two_dims(rank: int, world: int, tp_size: int, kv_heads: int, tied: bool) -> None:
    mesh = init_device_mesh("cpu", (world // tp_size, tp_size), mesh_dim_names=("dpcp", "tp"))
    ids, labels = batch(rows=4)
    single = Tiny(TensorParallel(dtype=torch.float64), kv_heads=kv_heads, tied=tied)
    _step(single, ids, labels, [0, 1, 2, 3])
    right = {name: p.grad for name, p in single.named_parameters()}

    tp = TensorParallel(mesh["tp"], True, dtype=torch.float64)
    data = mesh["dpcp"]
    model = Tiny(
        tp, kv_heads=kv_heads, tied=tied, shard_fn=lambda block: _sum_gradients(block, data)
    )
    _sum_gradients(model, data)
    here = data.get_local_rank()
    share = 4 // data.size()
    _step(model, ids, labels, list(range(here * share, (here + 1) * share)))
    names = dict(model.named_parameters())
    assert names.keys() == right.keys()
    for name, parameter in names.items():
        grad = parameter.grad
        assert isinstance(grad, DTensor) and grad.placements == parameter.placements
        scale = right[name].abs().max()
        error = (grad.full_tensor() - right[name]).abs().max() / scale
        assert error < 1e-12, (name, float(error))


@pytest.mark.parametrize(
    ("tp_size", "kv_heads", "tied"), [(2, 2, False), (2, 1, True), (1, 2, False), (4, 2, True)]
)
def test_gradients_equal_one_process(tp_size: int, kv_heads: int, tied: bool) -> None:
    """Row-wise data, two micro-batches a rank (four at tp 4), sequence parallel."""
    run_ranks(4, _two_dims, tp_size, kv_heads, tied)


class _Scale(nn.Module):
    """y = x * w on sequence shards, the weight in fp32 as norms use it."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.weight = tp.parameter("w", (64,), init=ONES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * local(self.weight, partial=True, dtype=torch.float32)


def _mixed_precision(rank: int, world: int) -> None:
    """bf16 parameters, fp32 reduction: the tp sum happens in fp32, before the only rounding.

    The two tp ranks' parts are about 1,000 and cancel to about 1. Left to FSDP2, which sums
    a bf16 Partial, the result would be off by up to 4.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dpcp", "tp"))
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(2, 2, 64, generator=generator) * 1000
    parts[:, 1] = torch.randn(2, 64, generator=generator) - parts[:, 0]
    data, tp_rank = mesh["dpcp"].get_local_rank(), mesh["tp"].get_local_rank()
    model = _Scale(TensorParallel(mesh["tp"], True))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    _sum_gradients(model, mesh["dpcp"], mp_policy=policy)
    for _ in range(2):
        model(parts[data, tp_rank]).sum().backward()
    assert model.weight.dtype == torch.float32
    grad = model.weight.grad.full_tensor().double()
    right = 2 * parts.double().sum((0, 1))
    bound = 2 * 2**-8 * parts.double().sum(1).abs().sum(0) + 1e-3
    assert ((grad - right).abs() <= bound).all(), float((grad - right).abs().max())


def test_partial_sums_are_fp32_under_mixed_precision() -> None:
    run_ranks(4, _mixed_precision)
