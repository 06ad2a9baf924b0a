"""The ring: no hang, right peers, K and V not mixed up, nothing sent that nobody needs."""

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.context_parallel import make_layout, prepare_attention
from tests.utils.ranks import run_ranks
from tools.attention_grid import Case, case_errors, make_groups, run_case

LIMIT_SECONDS = 20.0


def ring_plan(layout: Any, group: Any, bounds: Any = None, **options: Any) -> Any:
    given = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.float64, **options}
    return prepare_attention(
        layout=layout, cu_seqlens=bounds, ring_group=group, ulysses_group=None,
        cp_comm_type="p2p", device="cpu", **given,
    )  # fmt: skip


def errors_of(rank: int, world: int, cases: list[Case]) -> list[dict[str, float]]:
    groups = make_groups(1, world)
    return [case_errors(case, groups) for case in cases]


def repeat(ring: int, times: int) -> None:
    rng = random.Random(ring)
    for number in range(times):
        length = 2 * ring * rng.randint(1, 4)
        cases = [
            Case(1, ring, layout, "p2p", (4, 2), length, ("random",), seed=number)
            for layout in ("zigzag", "striped")
        ]
        begin = time.monotonic()
        answers = run_ranks(ring, errors_of, cases, timeout=LIMIT_SECONDS)
        assert time.monotonic() - begin < LIMIT_SECONDS
        worst = max(error for rank in answers for case in rank for error in case.values())
        assert worst < 1e-10


@pytest.mark.parametrize("ring", [2, 3, 8])
def test_no_hang(ring: int) -> None:
    repeat(ring, 2)


@pytest.mark.slow
@pytest.mark.parametrize("ring", [2, 3, 8])
def test_no_hang_fifty_times(ring: int) -> None:
    repeat(ring, 50)


def large_messages(rank: int, world: int) -> float:
    """8 MiB a hop: more than any socket buffer holds, so a wrong order of sends would hang."""
    layout = make_layout("zigzag", 2048 * world, world)
    plan = ring_plan(
        layout, dist.group.WORLD, num_heads=8, num_kv_heads=8, head_dim=64, dtype=torch.float32
    )
    q, k, v = (torch.randn(1, 2048, 8, 64).requires_grad_() for _ in range(3))
    out, _ = plan(q, k, v)
    out.sum().backward()
    return float(v.grad.sum() if v.grad is not None else 0.0)


@pytest.mark.parametrize("ring", [2, 3])
def test_large_messages(ring: int) -> None:
    sums = run_ranks(ring, large_messages, timeout=LIMIT_SECONDS * 3)
    assert sum(sums) == pytest.approx(2048 * ring * 8 * 64, rel=1e-4)  # each row's weights sum to 1


def subgroup_errors(rank: int, world: int) -> dict[str, float]:
    """Rings [0, 2] and [1, 3]: peers are global ranks, not ranks of the group."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    case = Case(1, 2, "zigzag", "p2p", (4, 2), 16, ("random",), seed=rank % 2)
    group = groups[rank % 2]
    layout = make_layout("zigzag", 16, 2, 1, torch.tensor(case.bounds()[0]))
    from tools.attention_grid import case_tensors
    from tools.dense_attention import dense_with_grads

    q, k, v, grad_out = case_tensors(case)
    whole = dense_with_grads(q, k, v, grad_out, case.bounds())
    at = layout.positions(rank // 2)
    plan = ring_plan(layout, group, torch.tensor(case.bounds()[0]), num_heads=4, num_kv_heads=2)
    mine = [x[:, at].clone().requires_grad_() for x in (q, k, v)]
    out, lse = plan(*mine, return_lse=True)
    grads = torch.autograd.grad(out, mine, grad_out[:, at])
    wanted = (whole[0][:, at], whole[1][:, :, at], *(g[:, at] for g in whole[2:]))
    return {
        str(i): float((a - b).abs().max())
        for i, (a, b) in enumerate(zip((out, lse, *grads), wanted, strict=True))
    }


def test_subgroups() -> None:
    for errors in run_ranks(4, subgroup_errors):
        assert max(errors.values()) < 1e-10


def marked_values(rank: int, world: int) -> list[float]:
    """K all zero, V = 1000 + position: a swap of K and V, or of sources, shows at once."""
    layout = make_layout("contiguous", 4 * world, world)
    positions = layout.positions(rank)
    q = torch.ones(1, 4, 2, 8, dtype=torch.float64)
    k = torch.zeros_like(q)
    v = (1000.0 + positions.double())[None, :, None, None].expand(1, 4, 2, 8)
    out, _ = ring_plan(layout, dist.group.WORLD)(q, k, v)
    want = 1000.0 + positions.double() / 2
    return (out[0, :, 0, 0] - want).tolist()


@pytest.mark.parametrize("ring", [2, 3, 4])
def test_keys_and_values_are_not_swapped(ring: int) -> None:
    for difference in run_ranks(ring, marked_values):
        assert difference == pytest.approx([0.0] * 4, abs=1e-9)


def bytes_sent(rank: int, world: int, kind: str, bounds: list[int] | None) -> tuple[int, int]:
    layout = make_layout(kind, 16 * world, world)
    plan = ring_plan(layout, dist.group.WORLD, None if bounds is None else torch.tensor(bounds))
    q, k, v = (torch.randn(1, 16, 2, 8, dtype=torch.float64).requires_grad_() for _ in range(3))
    out, _ = plan(q, k, v)
    forward = plan.stats.bytes_sent
    out.sum().backward()
    return forward, plan.stats.bytes_sent - forward


def test_only_needed_rows_travel() -> None:
    row = 2 * 2 * 8 * 8  # K and V, 2 heads x 8, float64
    sent = run_ranks(4, bytes_sent, "contiguous", None)
    # Rank r's keys go to ranks above it alone; the last rank's go nowhere.
    assert [s[0] for s in sent] == [16 * row, 32 * row, 48 * row, 0]
    sent = run_ranks(4, bytes_sent, "contiguous", [0, 16, 32, 48, 64])
    assert sent == [(0, 0)] * 4
    # One document crosses the border of ranks 1 and 2: five rows go one hop and come home.
    sent = run_ranks(4, bytes_sent, "contiguous", [0, 16, 27, 40, 48, 64])
    assert [s[0] for s in sent] == [0, 5 * row, 0, 0]
    assert [s[1] for s in sent] == [0, 5 * row, 5 * row, 0]


def test_dense_zigzag_sends_each_row_once_a_hop() -> None:
    row = 2 * 2 * 8 * 8
    sent = run_ranks(3, bytes_sent, "zigzag", None)
    # Two hops of 16 rows; of rank 0's keys only the first chunk is ever seen by others.
    assert sum(s[0] for s in sent) == (16 + 16 + 8) * 2 * row
    assert sum(s[1] for s in sent) == (16 + 16 + 8) * (2 + 2) * row


def outputs_twice(rank: int, world: int) -> bool:
    """The same plan and buffers, used for other values in between, give the same bits again."""
    case = Case(1, world, "zigzag", "p2p", (4, 2), 12 * world, ("random", "padding"), seed=3)
    layout = make_layout("zigzag", case.length, world, 1, [torch.tensor(b) for b in case.bounds()])
    bounds = [torch.tensor(b) for b in case.bounds()]
    plan = ring_plan(layout, dist.group.WORLD, bounds, num_heads=4, num_kv_heads=2)
    torch.manual_seed(rank)
    layers = [
        [torch.randn(2, 12, n, 8, dtype=torch.float64).requires_grad_() for n in (4, 2, 2)]
        for _ in range(3)
    ]

    def run_all(order: list[int]) -> dict[int, list[torch.Tensor]]:
        outs = {i: plan(*layers[i])[0] for i in order}
        # Backward of all layers after the forward of all: saved tensors must not be buffers.
        return {
            i: [outs[i].detach(), *torch.autograd.grad(outs[i].square().sum(), layers[i])]
            for i in reversed(order)
        }

    first, second = run_all([0, 1, 2]), run_all([2, 0, 1])
    alone = run_all([1])[1]
    same = all(
        torch.equal(a, b) for i in range(3) for a, b in zip(first[i], second[i], strict=True)
    )
    return same and all(torch.equal(a, b) for a, b in zip(first[1], alone, strict=True))


@pytest.mark.parametrize("ring", [2, 3])
def test_buffers_are_reused_safely(ring: int) -> None:
    assert all(run_ranks(ring, outputs_twice))


def test_one_rank_needs_no_group() -> None:
    case = Case(1, 1, "zigzag", "auto", (6, 3), 38, ("random", "ones"), window=5, seed=2)
    assert max(case_errors(case, (None, None)).values()) < 1e-10
    assert run_case(case, (None, None))[0].shape == (2, 38, 6, 8)
