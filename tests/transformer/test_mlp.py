"""The MLP: its gradients, its tp-independent layout, its chunks and what they keep."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core.tensor_parallel import TensorParallel
from megatron.core.transformer.mlp import MLP, interleave_gate_up, split_gate_up, swiglu
from tests.models.helpers import small_config

DOUBLE = TensorParallel(dtype=torch.float64)


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


def _run(config: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mlp = MLP(config, DOUBLE, name="mlp")
    x = x.clone().requires_grad_()
    y = mlp(x, _identity, checkpointed_outside=False)
    y.square().sum().backward()
    return y.detach(), x.grad, *(p.grad for p in mlp.parameters())


def test_swiglu_gradcheck() -> None:
    gate, up = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True).unbind()
    assert torch.autograd.gradcheck(swiglu, (gate, up))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_formula(gated: bool, bias: bool) -> None:
    mlp = MLP(small_config(swiglu=gated, add_bias_linear=bias), DOUBLE, name="mlp")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.normal_()
    x = torch.randn(5, 2, 32, dtype=torch.float64)
    w1, b1 = mlp.linear_fc1.weight, mlp.linear_fc1.bias
    if gated:
        halves = [x @ w.t() for w in split_gate_up(w1)]
        if bias:
            halves = [h + b for h, b in zip(halves, split_gate_up(b1), strict=True)]
        active = halves[0] * torch.sigmoid(halves[0]) * halves[1]
    else:
        hidden = x @ w1.t() + (b1 if bias else 0.0)
        active = 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5))
    expected = active @ mlp.linear_fc2.weight.t() + (mlp.linear_fc2.bias if bias else 0.0)
    actual = mlp(x, _identity, checkpointed_outside=False)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_gate_and_up_stay_together_in_any_cut() -> None:
    gate, up = torch.randn(2, 24, 7).unbind()
    stored = interleave_gate_up(gate, up)
    for tp in (1, 2, 3, 4, 8, 24):
        pieces = [split_gate_up(piece) for piece in stored.chunk(tp)]
        assert torch.equal(torch.cat([piece[0] for piece in pieces]), gate)
        assert torch.equal(torch.cat([piece[1] for piece in pieces]), up)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 6, 13, 22, 1000])
def test_chunks_equal_the_whole(chunk: int, gated: bool) -> None:
    x = torch.randn(11, 2, 32, dtype=torch.float64)
    fields = {"swiglu": gated, "add_bias_linear": True}
    whole = _run(small_config(**fields), x)
    for actual, expected in zip(
        _run(small_config(mlp_chunk_size=chunk, **fields), x), whole, strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_chunks_keep_and_make_nothing_of_ffn_size_beyond_a_chunk() -> None:
    """Every tensor of an operation, forward and backward, by a dispatch mode."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (48,):
                    self.rows = max(self.rows, tensor.numel() // 48)
            return out

    x = torch.randn(64, 2, 32, dtype=torch.float64)
    found = []
    for chunk in (0, 16):
        with Largest() as seen:
            _run(small_config(mlp_chunk_size=chunk), x)
        found.append(seen.rows)
    assert found[0] == 128
    assert found[1] <= 32  # the weights' own 32 rows, a chunk's 16 tokens


def test_ffn_that_tp_does_not_divide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorParallel, "size", property(lambda self: 5))
    with pytest.raises(ValueError, match="--ffn-hidden-size 48 must be a multiple of"):
        MLP(small_config(), DOUBLE, name="mlp")


def test_gelu_is_exact() -> None:
    x = torch.linspace(-4, 4, 9, dtype=torch.float64)
    torch.testing.assert_close(F.gelu(x), x * torch.special.ndtr(x))
