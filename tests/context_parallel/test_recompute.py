"""Activation recompute that keeps attention: one forward, no communication again, same bits."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.core.context_parallel import KeptAttention, make_layout, prepare_attention
from tests.utils.ranks import run_ranks
from tools.attention_grid import make_groups

HEADS, KV, DIM = 4, 2, 8


def layer(x: torch.Tensor, weights: list[torch.Tensor], plan: Any, kept: Any) -> torch.Tensor:
    """A small layer: projections, attention, projection. x [B, s, H]."""
    q, k, v = (torch.tanh(x @ w).unflatten(2, (-1, DIM)) for w in weights[:3])
    out, _ = plan(q, k, v, kept=kept)
    return x + torch.tanh(out.flatten(2) @ weights[3])


def train(
    rank: int, world: int, ulysses: int, ring: int, comm: str, recompute: bool, dtype: str
) -> dict[str, Any]:
    """Loss gradients of three layers, and how often kernels and transfers ran."""
    from megatron.core.context_parallel.channel import Channel
    from megatron.core.context_parallel.kernels.cpu_flash import CpuFlashKernel

    counts = {"attention": 0, "ring or exchange": 0}
    ring_group, ulysses_group = make_groups(ulysses, ring)
    tile_forward, swap, a2a = CpuFlashKernel.forward, Channel.swap, Channel.all_to_all

    def counted(name: str, function: Any, group: Any = None) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if group is None or self.group is group:
                counts[name] += 1
            return function(self, *args, **kwargs)

        return call

    CpuFlashKernel.forward = counted("attention", tile_forward)  # type: ignore[method-assign]
    Channel.swap = counted("ring or exchange", swap)  # type: ignore[method-assign]
    if ring_group is not None:
        Channel.all_to_all = counted(  # type: ignore[method-assign]
            "ring or exchange", a2a, ring_group
        )
    length = 32
    bounds = torch.tensor([0, 5, 20, 32])
    layout = make_layout("zigzag", length, ring, ulysses, bounds)
    kind = getattr(torch, dtype)
    plan = prepare_attention(
        layout=layout, cu_seqlens=bounds, num_heads=HEADS, num_kv_heads=KV, head_dim=DIM,
        ring_group=ring_group, ulysses_group=ulysses_group, cp_comm_type=comm, dtype=kind,
        device="cpu",
    )  # fmt: skip
    torch.manual_seed(0)
    width = HEADS * DIM
    shapes = [(width, width), (width, KV * DIM), (width, KV * DIM), (width, width)]
    layers = [
        [(torch.randn(*shape) * 0.3).to(kind).requires_grad_() for shape in shapes]
        for _ in range(3)
    ]
    x = torch.randn(2, length, width).to(kind)[:, layout.positions(*divmod(rank, ulysses))]
    x.requires_grad_()
    hidden = x
    for weights in layers:
        if recompute:
            kept = KeptAttention()  # outside the checkpointed function
            hidden = checkpoint(layer, hidden, weights, plan, kept, use_reentrant=False)
        else:
            hidden = layer(hidden, weights, plan, None)
    forward = dict(counts)
    hidden.float().square().sum().backward()
    grads = [x.grad, *(w.grad for weights in layers for w in weights)]
    return {"forward": forward, "all": dict(counts), "grads": grads, "out": hidden.detach()}


SPLITS = [(1, 2, "p2p"), (1, 2, "all_gather"), (2, 1, "a2a"), (2, 2, "a2a+p2p"), (1, 1, "auto")]


@pytest.mark.parametrize(("ulysses", "ring", "comm"), SPLITS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recompute_keeps_attention(ulysses: int, ring: int, comm: str, dtype: str) -> None:
    world = ulysses * ring
    plain = run_ranks(world, train, ulysses, ring, comm, False, dtype)
    kept = run_ranks(world, train, ulysses, ring, comm, True, dtype)
    for a, b in zip(plain, kept, strict=True):
        assert torch.equal(a["out"], b["out"])
        assert all(torch.equal(x, y) for x, y in zip(a["grads"], b["grads"], strict=True))
        # Not one kernel call or key transfer more than without recompute.
        assert a["all"] == b["all"] and a["forward"] == b["forward"]
        assert a["forward"]["attention"] > 0


def test_cell_holds_what_it_should() -> None:
    layout = make_layout("contiguous", 12, 1)
    plan = prepare_attention(
        layout=layout, cu_seqlens=None, num_heads=2, num_kv_heads=1, head_dim=8, ring_group=None,
        ulysses_group=None, dtype=torch.bfloat16, device="cpu",
    )  # fmt: skip
    q = torch.randn(1, 12, 2, 8).bfloat16().requires_grad_()
    k, v = (torch.randn(1, 12, 1, 8).bfloat16().requires_grad_() for _ in range(2))
    cell = KeptAttention()
    assert not cell.filled
    out, lse = plan(q, k, v, kept=cell, return_lse=True)
    assert cell.filled and cell.out is not None and not cell.out.requires_grad
    calls = plan.calls
    again, lse_again = plan(q, k, v, kept=cell, return_lse=True)
    assert torch.equal(out, again) and torch.equal(lse, lse_again) and plan.calls == calls
    assert again.requires_grad and not lse_again.requires_grad
    first = torch.autograd.grad(out.float().sum(), (q, k, v))
    second = torch.autograd.grad(again.float().sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_kept_call_takes_any_strides() -> None:
    layout = make_layout("contiguous", 12, 1)
    plan = prepare_attention(
        layout=layout, cu_seqlens=None, num_heads=2, num_kv_heads=2, head_dim=8, ring_group=None,
        ulysses_group=None, dtype=torch.float64, device="cpu",
    )  # fmt: skip
    leaf = torch.randn(1, 12, 8, 2, dtype=torch.float64, requires_grad=True)
    grads = []
    for cell in (None, KeptAttention()):
        q = leaf.transpose(2, 3)
        out, _ = plan(q, q, q, kept=cell)
        grads += torch.autograd.grad(out.sum(), leaf)
    assert torch.equal(*grads)
