"""RoPE as attention applies it: rotation, far positions, and that no old theta survives."""

import pytest
import torch

from megatron.core.transformer import RotaryEmbedding
from megatron.core.transformer.heads import place_heads, place_key_value


def _complex(x: torch.Tensor, positions: torch.Tensor, theta: float, rotated: int) -> torch.Tensor:
    """The same rotation as a product of complex numbers, in fp64; x [s, B, h, D]."""
    half = rotated // 2
    frequency = theta ** -(torch.arange(half, dtype=torch.float64) * 2 / rotated)
    angle = positions.t()[:, :, None, None].double() * frequency
    turned = torch.complex(x[..., :half], x[..., half:rotated]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat((turned.real, turned.imag, x[..., rotated:]), -1)


@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_rotation_and_gradient(percent: float) -> None:
    rotary = RotaryEmbedding(12, rotary_percent=percent, rotary_base=777.0)
    positions = torch.tensor([[0, 1, 2, 90001], [5, 0, 1, 2]])
    x = torch.randn(4, 2, 3, 12, dtype=torch.float64, requires_grad=True)
    table = rotary.table(positions, torch.float64)
    out = place_heads(x, table)
    assert out.is_contiguous()
    expected = _complex(x, positions, 777.0, int(12 * percent)).transpose(0, 1)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    upstream = torch.randn_like(out)
    (actual,) = torch.autograd.grad(out, x, upstream)
    (wanted,) = torch.autograd.grad(expected, x, upstream)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(lambda y: place_heads(y, table), (x,))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rotary", [RotaryEmbedding(6, rotary_base=50.0), None], ids=["rope", "no"])
def test_keys_are_rotated_and_values_are_not(batch: int, rotary: RotaryEmbedding | None) -> None:
    """One row and several, since a single row is passed on as a view where nothing turns."""
    positions = torch.tensor([[3, 0, 1, 7], [0, 1, 2, 3]])[:batch]
    table = None if rotary is None else rotary.table(positions, torch.float64)
    fused = torch.randn(4, batch, 2, 2, 6, dtype=torch.float64, requires_grad=True)
    k, v = place_key_value(fused, table)
    wanted = fused[..., 0, :] if rotary is None else _complex(fused[..., 0, :], positions, 50.0, 6)
    torch.testing.assert_close(k, wanted.transpose(0, 1), rtol=0, atol=1e-12)
    assert torch.equal(v, fused[..., 1, :].transpose(0, 1))
    assert v.is_contiguous() == (batch > 1), "a view of one row, batch first of several"
    up_k, up_v = torch.randn_like(k), torch.randn_like(v)
    (actual,) = torch.autograd.grad((k, v), fused, (up_k, up_v))
    moved = (wanted.transpose(0, 1), fused[..., 1, :].transpose(0, 1))
    (right,) = torch.autograd.grad(moved, fused, (up_k, up_v))
    torch.testing.assert_close(actual, right, rtol=0, atol=1e-12)


def test_attention_factor_multiplies_cos_and_sin() -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    rotary = RotaryEmbedding(8, scaling=scaling)
    assert rotary.attention_factor > 1.1
    x = torch.randn(3, 1, 2, 8, dtype=torch.float64)
    out = place_heads(x, rotary.table(torch.tensor([[0, 7, 40]]), torch.float64))
    torch.testing.assert_close(
        out.transpose(0, 1).norm(dim=-1), x.norm(dim=-1) * rotary.attention_factor
    )


@pytest.mark.parametrize("position", [8191, 131071, 1_048_575])
def test_far_positions_in_a_bf16_model(position: int) -> None:
    """Fault 11: bf16 positions are off by radians here; fp32 angles by up to 0.06 at 1M."""
    rotary = RotaryEmbedding(64)
    table = rotary.table(torch.tensor([[position]]), torch.bfloat16)
    assert table.cos.dtype == table.sin.dtype == torch.float32
    frequency = 10000.0 ** -(torch.arange(32, dtype=torch.float64) / 32)
    for actual, wanted in ((table.cos, torch.cos), (table.sin, torch.sin)):
        error = (actual.double().flatten() - wanted(position * frequency)).abs().max()
        assert error < 1e-7
    x = torch.randn(1, 1, 1, 64).to(torch.bfloat16)
    out = place_heads(x, table)
    assert out.dtype == torch.bfloat16
    exact = _complex(x.double(), torch.tensor([[position]]), 10000.0, 64)
    assert (out.double() - exact).abs().max() <= exact.abs().max() * 2**-8  # rounded once


def test_set_rope_leaves_nothing_of_the_old() -> None:
    """Fault 12: nothing derived from theta outlives a change of it."""
    rotary = RotaryEmbedding(16, rotary_base=1e4)
    positions = torch.arange(5000, 5003)[None]
    rotary.table(positions, torch.float32)
    rotary.set_rope(1e6)
    fresh = RotaryEmbedding(16, rotary_base=1e6)
    for changed, new in zip(
        vars(rotary.table(positions, torch.float32)).values(),
        vars(fresh.table(positions, torch.float32)).values(),
        strict=True,
    ):
        assert torch.equal(changed, new)


def test_odd_rotation_is_refused() -> None:
    with pytest.raises(ValueError, match="--rotary-percent 0.3"):
        RotaryEmbedding(10, rotary_percent=0.3)
