"""The needed-rows exchange: stages under a memory cap, traffic, overlap order."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.context_parallel import Workspace, make_layout, prepare_attention
from tests.utils.ranks import run_ranks
from tools.attention_grid import Case, case_tensors
from tools.dense_attention import dense_with_grads

ROW_BYTES = 2 * 2 * 8 * 8
"""K and V of 2 KV heads x 8 in float64."""


def exchange_plan(layout: Any, bounds: Any, **options: Any) -> Any:
    given = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.float64, **options}
    return prepare_attention(
        layout=layout, cu_seqlens=bounds, ring_group=dist.group.WORLD, ulysses_group=None,
        cp_comm_type="all_gather", device="cpu", **given,
    )  # fmt: skip


def staged(rank: int, world: int, kind: str, rows: int, window: int | None) -> tuple[float, int]:
    """(largest error, stages) with at most ``rows`` remote rows at a time."""
    case = Case(1, world, kind, "all_gather", (4, 2), 12 * world, ("padding", "random"), seed=8)
    bounds = case.bounds()
    layout = make_layout(kind, case.length, world, 1, [torch.tensor(b) for b in bounds])
    workspace = Workspace()
    plan = exchange_plan(
        layout, [torch.tensor(b) for b in bounds], max_exchange_bytes=rows * ROW_BYTES,
        window=window, workspace=workspace,
    )  # fmt: skip
    q, k, v, grad_out = case_tensors(case)
    whole = dense_with_grads(q, k, v, grad_out, bounds, window=window)
    at = layout.positions(rank)
    mine = [x[:, at].clone().requires_grad_() for x in (q, k, v)]
    out, lse = plan(*mine, return_lse=True)
    grads = torch.autograd.grad(out, mine, grad_out[:, at])
    wanted = (whole[0][:, at], whole[1][:, :, at], *(g[:, at] for g in whole[2:]))
    worst = max(float((a - b).abs().max()) for a, b in zip((out, lse, *grads), wanted, strict=True))
    stages = plan.compiled(2)[0].steps.stages
    assert all(sum(stage.arriving) <= rows for stage in stages)
    return worst, len(stages)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped", "balanced"])
@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_stages(kind: str, rows: int) -> None:
    answers = run_ranks(3, staged, kind, rows, 4 if kind == "striped" else None)
    assert max(error for error, _ in answers) < 1e-10
    stages = {count for _, count in answers}
    assert len(stages) == 1
    assert (stages.pop() > 4) == (rows < 5) or rows == 5


def traffic(rank: int, world: int, bounds: list[int] | None) -> tuple[int, int, int]:
    layout = make_layout("contiguous", 16 * world, world)
    plan = exchange_plan(layout, None if bounds is None else torch.tensor(bounds))
    q = torch.randn(1, 16, 4, 8, dtype=torch.float64).requires_grad_()
    k, v = (torch.randn(1, 16, 2, 8, dtype=torch.float64).requires_grad_() for _ in range(2))
    out, _ = plan(q, k, v)
    forward = plan.stats.bytes_sent
    out.sum().backward()
    return forward, plan.stats.bytes_sent - forward, plan.stats.calls


def test_only_needed_rows_travel() -> None:
    # A document [27, 40) crosses the border of ranks 1 and 2: five rows out, five gradients home.
    answers = run_ranks(4, traffic, [0, 16, 27, 40, 48, 64])
    assert [a[0] for a in answers] == [0, 5 * ROW_BYTES, 0, 0]
    assert [a[1] for a in answers] == [0, 5 * ROW_BYTES, 5 * ROW_BYTES, 0]
    assert all(a[2] == 2 for a in answers)
    assert [a[:2] for a in run_ranks(4, traffic, [0, 16, 32, 48, 64])] == [(0, 0)] * 4


def order_of_events(rank: int, world: int) -> list[str]:
    """What happens when, in forward and backward."""
    from megatron.core.context_parallel import channel
    from megatron.core.context_parallel.kernels.cpu_flash import CpuFlashKernel

    events: list[str] = []
    post, wait = channel.Channel.all_to_all, channel.Pending.wait
    forward, backward = CpuFlashKernel.forward, CpuFlashKernel.backward

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return function(*args, **kwargs)

        return call

    channel.Channel.all_to_all = noted("post", post)  # type: ignore[method-assign]
    channel.Pending.wait = noted("wait", wait)  # type: ignore[method-assign]
    CpuFlashKernel.forward = noted("compute", forward)  # type: ignore[method-assign]
    CpuFlashKernel.backward = noted("compute", backward)  # type: ignore[method-assign]
    layout = make_layout("striped", 16 * world, world)
    plan = exchange_plan(layout, None, max_exchange_bytes=8 * ROW_BYTES)
    q = torch.randn(1, 16, 4, 8, dtype=torch.float64).requires_grad_()
    k, v = (torch.randn(1, 16, 2, 8, dtype=torch.float64).requires_grad_() for _ in range(2))
    out, _ = plan(q, k, v)
    events.append("backward")
    out.sum().backward()
    return events


def test_transfers_are_posted_before_compute_and_awaited_after() -> None:
    events, _ = run_ranks(2, order_of_events)
    cut = events.index("backward")
    # Two stages of eight rows, both under way before anything is computed.
    own, stages = ["post", "post", "compute"], ["wait", "compute", "wait", "compute"]
    assert events[:cut] == own + stages
    back = events[cut + 1 :]
    assert back[:3] == own
    # A stage's gradients leave when it is computed, and are awaited at the very end.
    middle = [event for event in back[3:-2] if event != "compute"]
    assert middle == ["wait", "post", "wait", "post"] and back[-3:] == ["compute", "wait", "wait"]
