"""Sums after the last backward pass: two copies of a tied embedding, and Partial gradients."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from megatron.core.distributed import finalize_gradients
from tests.utils.ranks import run_ranks

KINDS = {
    "float64": (torch.float64, False),
    "bfloat16": (torch.bfloat16, False),
    "strided": (torch.float32, True),
}


def _summed(rank: int, world: int, kind: str) -> None:
    dtype, strided = KINDS[kind]
    values = torch.arange(12, dtype=dtype).view(3, 4) - 5
    weight = nn.Parameter(torch.zeros(3, 4, dtype=dtype))
    own = (rank + 1) * values
    weight.grad = own.t().contiguous().t() if strided else own
    assert weight.grad.is_contiguous() != strided
    finalize_gradients([], tied_weight=weight, embedding_group=dist.group.WORLD)
    assert torch.equal(weight.grad, 3 * values)
    # A rank whose copy got no gradient still takes part in the sum.
    weight.grad = None if rank == 0 else values.clone()
    finalize_gradients([], tied_weight=weight, embedding_group=dist.group.WORLD)
    assert weight.grad is not None and torch.equal(weight.grad, values)


@pytest.mark.parametrize("kind", KINDS)
def test_both_copies_get_the_sum(kind: str) -> None:
    run_ranks(2, _summed, kind)


def _partial_sum(rank: int, world: int) -> None:
    """256 on one rank and 1 on three: bfloat16 holds 256 + 1 as 256, and 259 rounded is 260."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    place = {"device_mesh": mesh, "run_check": False}
    zeros = torch.zeros(world, dtype=torch.bfloat16)
    norm = nn.Parameter(DTensor.from_local(zeros, placements=[Replicate()], **place))
    own = torch.ones(world, dtype=torch.bfloat16)
    own[rank] = 256
    norm.grad = DTensor.from_local(own, placements=[Partial()], **place)
    finalize_gradients([norm])
    assert isinstance(norm.grad, DTensor) and norm.grad.placements == (Replicate(),)
    assert norm.grad.dtype == torch.bfloat16
    assert norm.grad.to_local().tolist() == [260.0] * world


def test_partial_gradients_are_summed_in_float32_and_rounded_once() -> None:
    run_ranks(4, _partial_sum)


def test_ranks_between_and_single_ranks_have_nothing_to_sum() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    finalize_gradients([weight], tied_weight=weight, embedding_group=None)
    assert torch.equal(weight.grad, torch.ones(2))
