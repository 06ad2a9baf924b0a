"""Norms against their formulas in fp64, and their statistics in low precision."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.config import ModelConfig
from megatron.core.tensor_parallel import TensorParallel
from megatron.core.transformer.norm import LayerNorm, RMSNorm, make_norm
from tests.utils.ranks import run_ranks

EPS = 1e-5


def _norm(kind: Any, size: int, dtype: torch.dtype) -> Any:
    norm = kind(size, TensorParallel(dtype=dtype), name="norm", eps=EPS, partial=False)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(0.5, 1.5)
    return norm


def _formula(norm: Any, x: torch.Tensor, parameters: list[torch.Tensor]) -> torch.Tensor:
    if isinstance(norm, RMSNorm):
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * parameters[0]
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + EPS) * parameters[0] + parameters[1]


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)],
    ids=str,
)
def test_output_and_gradients(kind: Any, dtype: torch.dtype, tolerance: float) -> None:
    norm = _norm(kind, 40, dtype)
    generator = torch.Generator().manual_seed(0)
    # Strided as a slice of K and V is; large mean, so that bf16 statistics would be far off.
    stored = torch.randn(600, 2, 3, 2, 40, generator=generator, dtype=torch.float64)
    stored = (stored + 3).to(dtype).requires_grad_()
    upstream = torch.randn(600, 2, 3, 40, generator=generator, dtype=torch.float64).to(dtype)
    y = norm(stored[..., 0, :])
    assert y.dtype == dtype
    y.backward(upstream)

    exact = stored.detach().double().requires_grad_()
    parameters = [p.detach().double().requires_grad_() for p in norm.parameters()]
    expected = _formula(norm, exact[..., 0, :], parameters)
    expected.backward(upstream.double())
    pairs = [(y, expected), (stored.grad, exact.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(norm.parameters(), parameters, strict=True)]
    for actual, wanted in pairs:
        error = (actual.double() - wanted).abs().max() / wanted.abs().max()
        assert error <= tolerance


def test_rms_norm_gradcheck() -> None:
    norm = _norm(RMSNorm, 5, torch.float64)
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, (x,))


def test_statistics_are_fp32_in_bf16() -> None:
    """Squares of 1000 elements near 1 are lost in a bf16 sum (it stops at 256)."""
    norm = _norm(RMSNorm, 4096, torch.bfloat16)
    with torch.no_grad():
        norm.weight.fill_(1.0)
    y = norm(torch.ones(1, 4096, dtype=torch.bfloat16))
    assert y.float().sub(1.0).abs().max() < 1e-2


def _partial_sum(rank: int, world: int, kind: Any) -> None:
    """Each rank's part of the weight gradient is 2^8 + 1 or its near opposite: 9 bits."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    tp = TensorParallel(mesh, True, dtype=torch.bfloat16)
    norm = kind(2, tp, name="norm", eps=0.0, partial=True)
    # +1 and -1 have mean 0 and mean square 1: y = x * weight, exactly, in both norms.
    x = torch.tensor([[1.0, -1.0]] * 2, dtype=torch.bfloat16)
    upstream = torch.tensor([[256.0] * 2, [1.0] * 2] if rank == 0 else [[-256.0] * 2, [0.0] * 2])
    norm(x).backward(upstream.bfloat16())
    grad = norm.weight.grad
    assert grad.dtype == torch.bfloat16
    assert torch.equal(grad.to_local().float(), torch.tensor([1.0, -1.0])), grad.to_local()


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_a_partial_weight_gradient_is_summed_over_ranks_unrounded(kind: Any) -> None:
    """257 - 256 = 1; bf16, which keeps 8 bits, makes 256 of 257 and the sum 0."""
    run_ranks(2, _partial_sum, kind)


def test_config_names_the_norm() -> None:
    for name, kind in (("LayerNorm", LayerNorm), ("RMSNorm", RMSNorm)):
        config = ModelConfig(normalization=name, norm_epsilon=0.25)
        norm = make_norm(config, TensorParallel(), name="n", size=8, partial=False)
        assert type(norm) is kind and norm.eps == 0.25
