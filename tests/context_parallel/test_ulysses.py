"""Ulysses: which heads go where, how much is sent, and that back is the transpose of forth."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.context_parallel import make_layout, prepare_attention
from megatron.core.context_parallel.channel import Channel, CommStats
from megatron.core.context_parallel.ulysses import (
    HeadSplit,
    Ulysses,
    expand_kv,
    make_head_split,
    reduce_kv,
)
from tests.utils.ranks import run_ranks
from tools.attention_grid import (
    Case,
    case_errors,
    case_tensors,
    make_groups,
    run_case,
    shard,
)
from tools.dense_attention import dense_with_grads

SPLITS = [(8, 8, 4), (8, 2, 4), (8, 1, 8), (6, 2, 4), (6, 3, 4), (12, 4, 5), (7, 7, 3), (32, 8, 16)]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), SPLITS)
def test_head_split(heads: int, kv_heads: int, size: int) -> None:
    split = make_head_split(heads, kv_heads, size)
    ranges = [split.query(rank) for rank in range(size)]
    assert [h for each in ranges for h in each] == list(range(heads))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    group = heads // kv_heads
    for rank in range(size):
        assert set(split.kv(rank)) == {h // group for h in split.query(rank)}
        local = [h // group - split.kv(rank).start for h in split.query(rank)]
        expansion = split.expansion(rank)
        ratio = len(local) // len(split.kv(rank))
        if expansion is None:
            assert local == [i // ratio for i in range(len(local))]
        else:
            assert list(expansion) == local


def test_kv_head_goes_to_the_ranks_that_read_it() -> None:
    split = HeadSplit(8, 2, 4)
    assert [list(split.kv(rank)) for rank in range(4)] == [[0], [0], [1], [1]]
    assert split.shares_kv and not HeadSplit(8, 8, 4).shares_kv
    assert HeadSplit(6, 2, 2).expansion(0) is None
    assert HeadSplit(6, 3, 2).expansion(0) == (0, 0, 1)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="must not exceed the query heads"):
        make_head_split(4, 2, 8)
    with pytest.raises(ValueError, match="multiple of KV heads"):
        make_head_split(6, 4, 2)


def test_expansion_and_its_transpose() -> None:
    x, y = torch.randn(5, 3, 4), torch.randn(5, 4, 4)
    expansion = (0, 0, 1, 2)
    left = (expand_kv(x, expansion) * y).sum()
    assert torch.allclose(left, (x * reduce_kv(y, expansion, 3)).sum())


def transpose_holds(rank: int, world: int, heads: int, kv_heads: int) -> list[float]:
    """sum over ranks of <to_heads(x), y> - <x, to_sequence(y)>, and what came back of ones."""
    group = dist.group.WORLD
    ulysses = Ulysses(make_head_split(heads, kv_heads, world), Channel(group, CommStats()))
    torch.manual_seed(rank)
    q = torch.randn(2, 3, heads, 5, dtype=torch.float64)
    k = torch.randn(2, 3, kv_heads, 5, dtype=torch.float64)
    own_q, own_k = ulysses.to_heads(((q, "query"), (k, "kv")))
    y, z = torch.randn_like(own_q), torch.randn_like(own_k)
    back_q, back_k = ulysses.to_sequence(((y, "query"), (z, "kv")), (2, 3), torch.float64)
    sides = torch.stack(
        ((own_q * y).sum(), (q * back_q).sum(), (own_k * z).sum(), (k * back_k).sum())
    )
    dist.all_reduce(sides)
    again, _ = ulysses.to_sequence(((own_q, "query"), (own_k, "kv")), (2, 3), torch.float64)
    return [float(sides[0] - sides[1]), float(sides[2] - sides[3]), float((again - q).abs().max())]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "world"), [(8, 2, 4), (6, 3, 4), (7, 1, 3), (4, 4, 2)]
)
def test_back_is_the_transpose_of_forth(heads: int, kv_heads: int, world: int) -> None:
    """No missing or extra reduction: exact for every head count, shared KV heads included."""
    for differences in run_ranks(world, transpose_holds, heads, kv_heads):
        assert max(map(abs, differences)) < 1e-12


def wide_parts(rank: int, world: int) -> bool:
    """bfloat16 with a float32 part on one wire: every bit arrives."""
    ulysses = Ulysses(make_head_split(4, 2, world), Channel(dist.group.WORLD, CommStats()))
    torch.manual_seed(rank)
    q = torch.randn(1, 1, 4, 3).bfloat16()  # odd D, one row: the worst alignment
    lse = torch.randn(1, 1, 4)
    own_q, own_lse = ulysses.to_heads(((q, "query"), (lse, "query")))
    back_q, back_lse = ulysses.to_sequence(
        ((own_q, "query"), (own_lse, "query")), (1, 1), torch.bfloat16
    )
    return torch.equal(back_q, q) and torch.equal(back_lse, lse) and back_lse.dtype == lse.dtype


def test_wide_parts_on_a_narrow_wire() -> None:
    assert all(run_ranks(2, wide_parts))


def two_models(rank: int, world: int) -> list[float]:
    """Two head counts in one process, alternating: neither disturbs the other (known fault)."""
    groups = make_groups(world, 1)
    cases = [
        Case(world, 1, "zigzag", "a2a", heads, 16, ("random",), seed=i)
        for i, heads in enumerate([(8, 2), (6, 2), (8, 2), (6, 3)])
    ]
    return [max(case_errors(case, groups).values()) for case in cases]


def test_two_models_in_one_process() -> None:
    for errors in run_ranks(4, two_models):
        assert max(errors) < 1e-10


def traffic(rank: int, world: int) -> tuple[int, int]:
    layout = make_layout("contiguous", 16 * world, 1, world)
    plan = prepare_attention(
        layout=layout, cu_seqlens=None, num_heads=8, num_kv_heads=2, head_dim=4, ring_group=None,
        ulysses_group=dist.group.WORLD, dtype=torch.float64, device="cpu",
    )  # fmt: skip
    q = torch.randn(1, 16, 8, 4, dtype=torch.float64).requires_grad_()
    k, v = (torch.randn(1, 16, 2, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
    out, _ = plan(q, k, v)
    forward = plan.stats.bytes_sent
    out.sum().backward()
    return forward, plan.stats.transfers


def test_kv_heads_are_not_over_replicated() -> None:
    """To each of 3 others: 2 query heads, 1 K and 1 V; then 2 output heads back."""
    head = 16 * 4 * 8
    for forward, transfers in run_ranks(4, traffic):
        assert forward == 3 * (2 + 2) * head + 3 * 2 * head
        assert transfers == 4 * 3  # one all-to-all in and one out, forward and backward


def rounded_once(rank: int, world: int) -> float:
    """Share of dV's elements that are the float64 gradient rounded to bfloat16, bit for bit.

    The reference kernel computes in float32, and dV = P^T dO knows no rounded ``out``.
    """
    case = Case(
        world, 1, "zigzag", "a2a", (8, 1), 32, ("whole",), dtype="bfloat16", backend="reference",
        seed=1,
    )  # fmt: skip
    got = run_case(case, make_groups(world, 1))[4]
    want = shard(case, dense_with_grads(*case_tensors(case), case.bounds()))[4]
    return float((got == want.to(torch.bfloat16)).double().mean())


def test_shared_kv_gradients_are_added_in_float32() -> None:
    """A KV head shared by four ranks: the sum is rounded, not each part."""
    for share in run_ranks(4, rounded_once):
        assert share > 0.99
