"""Gradient norm and clipping on their own: counting once, non-finite values, refusals."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from megatron.core.distributed import clip_gradients, finalize_gradients, gradient_norm
from megatron.core.parallel_state import ParallelState
from tests.utils.ranks import run_ranks


def _with_grad(value, mesh=None, placements=()):
    parameter = nn.Parameter(torch.zeros_like(value))
    if mesh is None:
        parameter.grad = value
        return parameter
    local = torch.zeros_like(value)
    parameter = nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False))
    parameter.grad = DTensor.from_local(value.clone(), mesh, placements, run_check=False)
    return parameter


def test_norm_and_factor_of_one_process():
    parameters = [_with_grad(torch.tensor([3.0, 0.0])), _with_grad(torch.tensor([[4.0]]))]
    assert gradient_norm(parameters, group=None) == 5.0
    assert gradient_norm(parameters, group=None, exclude=parameters[1:]) == 3.0
    assert gradient_norm([nn.Parameter(torch.ones(2))], group=None) == 0.0
    assert clip_gradients(parameters, 5.0, 0.0) == 1.0
    assert clip_gradients(parameters, 5.0, 10.0) == 1.0
    assert torch.equal(parameters[1].grad, torch.tensor([[4.0]]))
    factor = clip_gradients(parameters, 5.0, 1.0)
    assert factor == pytest.approx(1 / (5 + 1e-6))
    torch.testing.assert_close(parameters[0].grad, torch.tensor([0.6, 0.0]))
    half = [_with_grad(torch.full((100,), 0.1, dtype=torch.bfloat16)), parameters[0]]
    value = float(torch.tensor(0.1).bfloat16())
    assert gradient_norm(half, group=None) == pytest.approx(math.hypot(10 * value, 0.6), rel=1e-6)


def _once(rank, world):
    state = ParallelState(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    mesh = state.mesh["dpcp", "tp"]
    one = torch.ones(2, dtype=torch.float64)
    sharded = _with_grad(one, mesh, [Shard(0), Shard(0)])  # 8 elements over 4 ranks
    norm_weight = _with_grad(one, mesh, [Shard(0), Replicate()])  # 4 elements
    replicated = _with_grad(one, mesh, [Replicate(), Replicate()])  # 2 elements
    tied = _with_grad(one, mesh, [Shard(0), Shard(0)])  # 8 elements, on both pipeline ranks
    parameters = [sharded, norm_weight, replicated, tied]
    exclude = [tied] if state.is_pipeline_last_stage else []
    norm = gradient_norm(parameters, group=state.world_group, exclude=exclude)
    assert norm == pytest.approx(math.sqrt(2 * (8 + 4 + 2) + 8), rel=1e-15)
    clip_gradients(parameters, norm, 1e-3)
    after = gradient_norm(parameters, group=state.world_group, exclude=exclude)
    assert after == pytest.approx(1e-3, rel=1e-5)
    # One bad number on one rank is seen by all.
    for bad in (float("nan"), float("inf")):
        if rank == 5:
            norm_weight.grad.to_local()[0] = bad
        found = gradient_norm(parameters, group=state.world_group)
        assert not math.isfinite(found)
        if rank == 5:
            norm_weight.grad.to_local()[0] = 1.0
    return norm


def test_each_element_counts_once_and_all_ranks_agree():
    assert len(set(run_ranks(8, _once))) == 1


def _finalize(rank, world):
    state = ParallelState(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    mesh = state.tp_mesh
    value = torch.full((2, 3), float(rank))
    partial = _with_grad(value, mesh, [Replicate()])
    partial.grad = DTensor.from_local(value.clone(), mesh, [Partial()], run_check=False)
    half = _with_grad(value.bfloat16(), mesh, [Replicate()])
    half.grad = DTensor.from_local(value.bfloat16(), mesh, [Partial()], run_check=False)
    with pytest.raises(AssertionError, match="finalize_gradients comes first"):
        gradient_norm([partial], group=None)
    tied = _with_grad(torch.full((2,), 10.0 + rank), mesh, [Shard(0)])
    if rank == 3:
        tied.grad = None  # a step without loss tokens on this rank
    finalize_gradients(
        [partial, half, tied], tied_weight=tied, embedding_group=state.embedding_group
    )
    pair = rank // 2 * 2
    assert partial.grad.placements == (Replicate(),) and half.grad.dtype == torch.bfloat16
    assert torch.equal(partial.grad.to_local(), torch.full((2, 3), 2.0 * pair + 1))
    assert torch.equal(half.grad.to_local().float(), torch.full((2, 3), 2.0 * pair + 1))
    twin = {0: 10 + 12, 2: 10 + 12, 1: 11, 3: 11}[rank]
    assert torch.equal(tied.grad.to_local(), torch.full((2,), float(twin)))
    finalize_gradients([partial, half])  # complete gradients are left alone
    assert torch.equal(partial.grad.to_local(), torch.full((2, 3), 2.0 * pair + 1))
    dist.barrier()


def test_partial_and_tied_gradients_are_completed():
    run_ranks(4, _finalize)
