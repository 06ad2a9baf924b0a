"""Plans: refusals, auto choices, statistics, dropout, shapes and types of what is returned."""

import logging
from typing import Any

import pytest
import torch

from megatron.core.context_parallel import (
    Workspace,
    choice,
    context_parallel_attention,
    make_layout,
    prepare_attention,
)
from megatron.core.context_parallel.kernels import select
from tests.utils.ranks import run_ranks
from tools.attention_grid import make_groups
from tools.dense_attention import dense_with_grads


def plan_of(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "layout": make_layout("zigzag", 16, 1), "cu_seqlens": None, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 8, "ring_group": None, "ulysses_group": None,
        "dtype": torch.float32, "device": "cpu", **changes,
    }  # fmt: skip
    return prepare_attention(**given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cp_comm_type": "ring"}, "--cp-comm-type ring must be one of"),
        ({"layout": make_layout("zigzag", 16, 2, 2), "cp_comm_type": "p2p"}, "use a2a\\+p2p"),
        ({"layout": make_layout("zigzag", 16, 2, 2), "cp_comm_type": "all_gather"}, "a2a\\+all"),
        ({"layout": make_layout("zigzag", 16, 2), "cp_comm_type": "a2a"}, "ring size 2"),
        ({"layout": make_layout("zigzag", 16, 2)}, "ring_group has 1 ranks"),
        ({"layout": make_layout("contiguous", 16, 1, 2)}, "ulysses_group has 1 ranks"),
        ({"num_kv_heads": 3}, "multiple of KV heads"),
        ({"layout": make_layout("contiguous", 16, 1, 8)}, "must not exceed the query heads"),
        ({"window": 0}, "window 0"),
        ({"window": 1.5}, "window 1.5 must be a whole number"),
        ({"window": True}, "window True must be a whole number"),
        ({"window": float("nan")}, "window nan must be a whole number"),
        ({"scale": 0.0}, "scale 0.0 must be a finite number above 0"),
        ({"scale": -0.2}, "scale -0.2 must be"),
        ({"scale": float("nan")}, "scale nan must be"),
        ({"head_dim": 0}, "head_dim 0 must be at least 1"),
        ({"max_exchange_bytes": 0}, "max_exchange_bytes 0 must be at least 1"),
        ({"max_exchange_bytes": 0.5}, "max_exchange_bytes 0.5 must be a whole number"),
        ({"dtype": torch.complex64}, "dtype torch.complex64 must be one of"),
        ({"dtype": torch.int32}, "dtype torch.int32 must be one of"),
        ({"cu_seqlens": torch.tensor([0, 16], device="meta")}, "meta device"),
        ({"window": 4, "causal": False}, "causal"),
        ({"cu_seqlens": [0, 5, 12]}, "must run from 0 to the sequence length"),
        ({"cu_seqlens": [0, 9, 5, 16]}, "must not decrease"),
        ({"dropout_p": 1.0}, "--attention-dropout 1.0"),
        (
            {"dropout_p": 0.1, "backend": "flash"},
            "--attention-backend flash has no attention dropout",
        ),
        ({"backend": "fast"}, "--attention-backend fast must be one of"),
    ],
)
def test_refusals(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan_of(**changes)


def test_call_refusals() -> None:
    q, k = torch.randn(1, 16, 4, 8), torch.randn(1, 16, 2, 8)
    plan = plan_of()
    for args, words in (
        ((q[:, :8], k, k), "q has shape"),
        ((q, k[:, :, :1], k), "k has shape"),
        ((q, k, k.double()), "v is torch.float64"),
    ):
        with pytest.raises(ValueError, match=words):
            plan(*args)
    with pytest.raises(ValueError, match="needs dropout_seed"):
        plan_of(dropout_p=0.1)(q, k, k)
    two = plan_of(cu_seqlens=[[0, 16], [0, 4, 16]])
    with pytest.raises(ValueError, match="2 packings for 1 batch rows"):
        two(q, k, k)
    with pytest.raises(ValueError, match="must be \\[batch"):
        context_parallel_attention(q[0], k, k, layout=plan.layout)


def test_returns() -> None:
    q, k = torch.randn(2, 16, 4, 8).bfloat16(), torch.randn(2, 16, 2, 8).bfloat16()
    layout = make_layout("zigzag", 16, 1)
    out = context_parallel_attention(q, k, k, layout=layout)
    assert out.shape == q.shape and out.dtype == q.dtype
    out, lse = context_parallel_attention(q, k, k, layout=layout, return_lse=True)
    assert lse.shape == (2, 4, 16) and lse.dtype == torch.float32
    assert plan_of(dtype=torch.bfloat16)(q, k, k)[1] is None
    empty = context_parallel_attention(q[:0], k[:0], k[:0], layout=layout)
    assert empty.shape == (0, 16, 4, 8)


def test_sequence_first_tensors_are_fine() -> None:
    """Views of [s, B, heads, D], as the model has them, and a fused q/k/v projection."""
    torch.manual_seed(0)
    fused = torch.randn(16, 2, 8, 8, dtype=torch.float64, requires_grad=True)
    layout = make_layout("zigzag", 16, 1)
    q, k, v = (x.transpose(0, 1) for x in fused.split([4, 2, 2], dim=2))
    out = context_parallel_attention(q, k, v, layout=layout)
    plain = context_parallel_attention(*(x.contiguous() for x in (q, k, v)), layout=layout)
    assert torch.equal(out, plain)
    (a,) = torch.autograd.grad(out.square().sum(), fused)
    (b,) = torch.autograd.grad(plain.square().sum(), fused)
    assert torch.equal(a, b)


def test_choices_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    choice._log_choice.cache_clear()
    select._log_choice.cache_clear()
    layout = make_layout("zigzag", 4096, 4)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            for bounds in ([0, 4096], [0, 100, 900, 2000, 3000, 4096]):
                choice.outer_communication(
                    "auto", layout, plan_of(cu_seqlens=None).packings[:0] or _bounds(bounds),
                    None, True, _shape(),
                )  # fmt: skip
            plan_of(dropout_p=0.1)
    lines = [record.getMessage() for record in caplog.records]
    assert sum("auto -> p2p" in line for line in lines) == 1
    assert sum("auto -> all_gather" in line for line in lines) == 1
    assert sum("-> reference" in line and "dropout" in line for line in lines) == 1


def _bounds(bounds: list[int]) -> Any:
    from megatron.core.context_parallel.documents import normalize_packings

    return normalize_packings(bounds, bounds[-1])


def _shape() -> Any:
    from megatron.core.context_parallel.cost_model import AttentionShape

    return AttentionShape(32, 8, 128, 2)


def test_equal_packings_are_planned_once() -> None:
    workspace = Workspace()
    first = plan_of(workspace=workspace).compiled(2)[0]
    assert plan_of(workspace=workspace).compiled(2)[0] is first
    assert plan_of(workspace=workspace, window=3).compiled(2)[0] is not first
    assert plan_of(workspace=workspace).compiled(1)[0] is not first


def measured(rank: int, world: int) -> Any:
    ring_group, _ = make_groups(1, world)
    layout = make_layout("contiguous", 16 * world, world)
    plan = plan_of(layout=layout, ring_group=ring_group, cp_comm_type="p2p")
    q, k = torch.randn(1, 16, 4, 8), torch.randn(1, 16, 2, 8)
    plan(q, k, k)
    plan(q, k, k)
    return plan.stats


def test_statistics() -> None:
    stats = run_ranks(2, measured)
    assert [s.pairs for s in stats] == [136, 136 + 256]
    assert [s.tasks for s in stats] == [1, 2]
    assert stats[0].ring_pairs == stats[1].ring_pairs == (136, 392)
    assert [s.bytes_sent for s in stats] == [2 * 16 * 2 * 2 * 8 * 4, 0]
    assert all(s.calls == 2 and s.exposed_wait >= 0 and s.communication == "p2p" for s in stats)
    assert stats[0].exposed_wait + stats[1].exposed_wait > 0


def dropped(rank: int, world: int, ulysses: int, ring: int, comm: str) -> Any:
    """Outputs and gradients with attention dropout, by global position."""
    ring_group, ulysses_group = make_groups(ulysses, ring)
    bounds = torch.tensor([0, 7, 24])
    layout = make_layout("balanced", 24, ring, ulysses, bounds)
    at = layout.positions(*divmod(rank, ulysses))
    torch.manual_seed(0)
    whole = [torch.randn(2, 24, n, 8, dtype=torch.float64) for n in (4, 2, 2, 4)]
    q, k, v, grad = (x[:, at].clone() for x in whole)
    mine = [x.requires_grad_() for x in (q, k, v)]
    out = context_parallel_attention(
        *mine, layout=layout, ring_group=ring_group, ulysses_group=ulysses_group,
        cu_seqlens=bounds, cp_comm_type=comm, dropout_p=0.3, dropout_seed=11,
    )  # fmt: skip
    return at, [out.detach(), *torch.autograd.grad(out, mine, grad)]


@pytest.mark.parametrize(
    ("ulysses", "ring", "comm"), [(1, 3, "p2p"), (1, 2, "all_gather"), (2, 2, "a2a+p2p")]
)
def test_dropout_does_not_depend_on_the_split(ulysses: int, ring: int, comm: str) -> None:
    ((at, want),) = run_ranks(1, dropped, 1, 1, "auto")
    assert torch.equal(at, torch.arange(24))
    for at, got in run_ranks(ulysses * ring, dropped, ulysses, ring, comm):
        for a, b in zip(got, want, strict=True):
            assert torch.allclose(a, b[:, at], atol=1e-12)


def test_any_strides() -> None:
    """Expanded gradients (of a sum), transposed and expanded inputs."""
    torch.manual_seed(0)
    layout = make_layout("zigzag", 16, 1)
    base = torch.randn(2, 16, 8, 4, dtype=torch.float64)
    q = base.transpose(2, 3).detach().requires_grad_()  # heads last in memory
    k = torch.randn(2, 16, 1, 8, dtype=torch.float64).expand(2, 16, 2, 8).detach().requires_grad_()
    v = torch.randn(1, 16, 2, 8, dtype=torch.float64).expand(2, 16, 2, 8).detach().requires_grad_()
    bounds = [0, 3, 16]
    out = context_parallel_attention(q, k, v, layout=layout, cu_seqlens=bounds)
    want = dense_with_grads(q, k, v, torch.ones(out.shape), [bounds, bounds])
    grads = torch.autograd.grad(out.sum(), (q, k, v))  # an expanded scalar comes back
    for got, right in zip((out, *grads), (want[0], *want[2:]), strict=True):
        assert torch.allclose(got, right, atol=1e-12)
