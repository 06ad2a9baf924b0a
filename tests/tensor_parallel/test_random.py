"""Dropout is a function of its key."""

import dataclasses
import hashlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.core.tensor_parallel import DropoutKey, dropout

GOLDEN = 4200415042880955905
KEY = DropoutKey(seed=1234, iteration=7, micro_batch=2, layer=3, site="mlp", dp=1, cp=2, tp=1)


def test_every_field_matters() -> None:
    x = torch.ones(64, 33)
    first = dropout(x, 0.3, KEY)
    assert torch.equal(first, dropout(x, 0.3, KEY.at()))
    seen = {KEY.to_seed()}
    for field in dataclasses.fields(DropoutKey):
        changed = KEY.at(**{field.name: "x" if field.name == "site" else 99})
        seen.add(changed.to_seed())
        assert not torch.equal(first, dropout(x, 0.3, changed)), field.name
    assert len(seen) == 1 + len(dataclasses.fields(DropoutKey))
    assert all(0 <= seed < 2**63 for seed in seen)


def test_no_two_nearby_keys_share_a_seed() -> None:
    seeds = {
        DropoutKey(1, iteration=i, layer=layer, dp=dp, cp=cp, tp=tp).to_seed()
        for i in range(4)
        for layer in range(12)
        for dp in range(4)
        for cp in range(12)
        for tp in range(8)
    }
    assert len(seeds) == 4 * 12 * 4 * 12 * 8


def test_seeds_are_fixed_for_ever() -> None:
    """The same in every process, whatever its hash seed, and in every later version."""
    words = "1234/7/0/-1/mlp/0/0/0"
    right = int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "little") >> 1
    assert DropoutKey(seed=1234, iteration=7, site="mlp").to_seed() == right == GOLDEN


def test_rate_scale_and_untouched_global_generator() -> None:
    x = torch.full((400, 500), 3.0, dtype=torch.float64)
    before = torch.get_rng_state()
    y = dropout(x, 0.2, KEY)
    assert torch.equal(before, torch.get_rng_state())
    kept = y != 0
    assert abs(float(kept.double().mean()) - 0.8) < 0.005
    torch.testing.assert_close(y[kept], x[kept] / 0.8, rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_backward_uses_the_same_mask_and_saves_nothing(dtype: torch.dtype) -> None:
    x = torch.randn(32, 5, 7).to(dtype).requires_grad_()
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = dropout(x, 0.4, KEY)
    assert not saved and y.dtype == dtype
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad != 0, y != 0)
    assert torch.equal(x.detach() * x.grad, y.detach()) or dtype != torch.float64
    # The mask belongs to positions, not to memory: strides do not change it.
    turned = x.detach().transpose(0, 2).contiguous().transpose(0, 2)
    assert torch.equal(dropout(turned, 0.4, KEY), y)


def test_recompute_draws_the_same_mask() -> None:
    x = torch.randn(16, 16, dtype=torch.float64, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return dropout(torch.tanh(dropout(x, 0.5, KEY)) ** 2, 0.1, KEY.at(site="out"))

    (plain,) = torch.autograd.grad(layer(x).sum(), x)
    y = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
    torch.rand(100)
    (again,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(plain, again)


def test_nothing_to_drop_is_free() -> None:
    x = torch.randn(3, requires_grad=True)
    assert dropout(x, 0.0, KEY) is x
    assert dropout(x, 0.0, None) is x
    assert dropout(x, 0.5, None, training=False) is x
    for p in (1.0, -0.1, 1.5):
        with pytest.raises(ValueError, match=r"must lie in \[0, 1\)"):
            dropout(x, p, KEY)
    with pytest.raises(ValueError, match="needs a DropoutKey"):
        dropout(x, 0.5, None)
