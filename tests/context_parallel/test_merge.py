"""Merging of partial softmax results: exact, order-free, safe at every extreme."""

import itertools
import math

import pytest
import torch

from megatron.core.context_parallel.merge import merge_, merge_weight, row_delta


def parts(scores: torch.Tensor, values: torch.Tensor, cuts: list[int]) -> list:
    """(out, lse) of each block of keys; scores [rows, keys], values [keys, D]."""
    result = []
    for a, b in itertools.pairwise(cuts):
        lse = torch.logsumexp(scores[:, a:b], dim=-1)
        weight = torch.exp(scores[:, a:b] - lse.masked_fill(lse == -torch.inf, 0.0)[:, None])
        result.append((weight @ values[a:b], lse))
    return result


def fold(blocks: list, kind: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.zeros_like(blocks[0][0], dtype=kind)
    lse = torch.full_like(blocks[0][1], -torch.inf, dtype=kind)
    for new_out, new_lse in blocks:
        merge_(out, lse, new_out, new_lse)
    return out, lse


@pytest.mark.parametrize(("first", "second"), [(0.0, 100.0), (-100.0, 0.0), (0.0, 1e4), (80, 90)])
def test_far_apart_blocks(first: float, second: float) -> None:
    out, lse = torch.zeros(1, 2), torch.tensor([float(first)])
    merge_(out, lse, torch.ones(1, 2), torch.tensor([float(second)]))
    assert lse.item() == pytest.approx(second + math.log1p(math.exp(first - second)))
    share = 1.0 / (1.0 + math.exp(first - second))
    assert torch.allclose(out, torch.full((1, 2), share))
    assert torch.isfinite(out).all()


def test_rows_without_keys_change_nothing() -> None:
    out, lse = torch.zeros(3, 2), torch.tensor([-torch.inf, -torch.inf, 1.0])
    out[2] = 5.0
    new_out, new_lse = torch.full((3, 2), 7.0), torch.tensor([-torch.inf, 2.0, -torch.inf])
    new_out[0] = new_out[2] = 0.0
    merge_(out, lse, new_out, new_lse)
    assert torch.equal(out, torch.tensor([[0.0, 0.0], [7.0, 7.0], [5.0, 5.0]]))
    assert torch.equal(lse, torch.tensor([-torch.inf, 2.0, 1.0]))


@pytest.mark.parametrize("spread", [1.0, 300.0])
def test_any_order_equals_one_shot(spread: float) -> None:
    torch.manual_seed(0)
    scores = torch.randn(7, 40, dtype=torch.float64) * spread
    scores[3, 10:30] = -torch.inf
    scores[5] = -torch.inf
    values = torch.randn(40, 4, dtype=torch.float64)
    want_out, want_lse = parts(scores, values, [0, 40])[0]
    blocks = parts(scores, values, [0, 1, 10, 20, 30, 40])
    for order in itertools.permutations(range(5)):
        out, lse = fold([blocks[i] for i in order])
        assert torch.allclose(out, want_out, atol=1e-14)
        assert torch.allclose(lse, want_lse, atol=1e-12)
    assert torch.equal(out[5], torch.zeros(4, dtype=torch.float64)) and lse[5] == -torch.inf


def test_half_types_are_merged_in_float32() -> None:
    """A thousand hops of one value each: bfloat16 state would stall, float32 does not."""
    values = torch.randn(1000, 1, dtype=torch.bfloat16)
    blocks = [(v.expand(1, 1), torch.zeros(1)) for v in values]
    out, lse = fold(blocks, torch.float32)
    assert out.item() == pytest.approx(values.double().mean().item(), abs=1e-5)
    assert lse.item() == pytest.approx(math.log(1000), abs=1e-5)


def test_weight_of_nothing_is_zero() -> None:
    nothing = torch.tensor([-torch.inf])
    assert merge_weight(nothing, nothing).item() == 0.0


def test_delta() -> None:
    grad, out = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    assert torch.allclose(row_delta(grad, out), (grad * out).sum(-1))
    half = row_delta(grad.bfloat16(), out.bfloat16())
    assert half.dtype == torch.float32
    # Products of bfloat16 are exact in float32; rounded to bfloat16 they would be off by 2^-9.
    exact = (grad.bfloat16().double() * out.bfloat16().double()).sum(-1)
    assert torch.allclose(half.double(), exact, rtol=0, atol=1e-6)
