"""Each autograd collective alone: its gradient against finite differences across the ranks.

The numerical derivative is taken of the global loss: one element of one rank's input (or of
the replicated input, on all ranks) is moved, all ranks run forward, and their losses are added
up (sharded) or counted once (replicated). So a missing or an extra reduction shows as a
factor of the group size.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from megatron.core import collectives as C
from tests.utils.ranks import run_ranks

Op = Callable[[torch.Tensor, C.Group], torch.Tensor]


def _loss(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # Transposed, so that the gradient that enters the collective is not contiguous.
    return (torch.tanh(y.transpose(-1, -2)) * weight.transpose(-1, -2)).sum()


def _check(op: Op, group: C.Group, *, same_input: bool, same_loss: bool, shape=(6, 2, 12)) -> None:
    size, rank = C.group_size(group), C.group_rank(group)
    peers = dist.get_process_group_ranks(group)
    seed = torch.Generator().manual_seed(7 if same_input else 100 + dist.get_rank())
    # Stored transposed: the input is not contiguous either.
    x = torch.randn(shape[::-1], generator=seed, dtype=torch.float64).permute(2, 1, 0)
    assert not x.is_contiguous()
    x.requires_grad_()
    y = op(x, group)
    seed = torch.Generator().manual_seed(9 if same_loss else 200 + dist.get_rank())
    weight = torch.randn(y.shape, generator=seed, dtype=torch.float64)
    (grad,) = torch.autograd.grad(_loss(y, weight), x)

    def total(value: torch.Tensor) -> float:
        with torch.no_grad():
            loss = _loss(op(value, group), weight)
        if same_loss:
            return float(loss)
        dist.all_reduce(loss, group=group)
        return float(loss)

    step = 1e-6
    indices = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(3))[:12]
    for index in indices.tolist():
        for mover in range(1 if same_input else size):
            moves = same_input or mover == rank
            values = []
            for sign in (1.0, -1.0):
                moved = x.detach().clone(memory_format=torch.contiguous_format)
                if moves:
                    moved.view(-1)[index] += sign * step
                values.append(total(moved))
            if moves:
                numeric = (values[0] - values[1]) / (2 * step)
                exact = float(grad.reshape(-1)[index])
                assert abs(numeric - exact) < 1e-8, (peers, mover, index, numeric, exact)


CASES = {
    "copy": (lambda x, g: C.copy_to_region(x, g), True, False),
    "reduce": (lambda x, g: C.reduce_from_region(x, g), False, True),
    "gather0": (lambda x, g: C.gather_along(x, g, 0), False, False),
    "gather1": (lambda x, g: C.gather_along(x, g, 1), False, False),
    "gather-1": (lambda x, g: C.gather_along(x, g, -1), False, False),
    "gather0 replicated": (lambda x, g: C.gather_along(x, g, 0, replicated=True), False, True),
    "gather2 replicated": (lambda x, g: C.gather_along(x, g, 2, replicated=True), False, True),
    "reduce_scatter0": (lambda x, g: C.reduce_scatter_along(x, g, 0), False, False),
    "reduce_scatter2": (lambda x, g: C.reduce_scatter_along(x, g, 2), False, False),
    "scatter0": (lambda x, g: C.scatter_along(x, g, 0), True, False),
    "scatter-1": (lambda x, g: C.scatter_along(x, g, -1), True, False),
    "all_to_all 2 to 0": (lambda x, g: C.all_to_all_along(x, g, 2, 0), False, False),
    "all_to_all 0 to 1": (lambda x, g: C.all_to_all_along(x, g, 0, 1), False, False),
}


def _all_cases(rank: int, world: int, groups: list[list[int]] | None) -> None:
    group: C.Group = dist.group.WORLD
    if groups is not None:
        made = [dist.new_group(members) for members in groups]
        group = next(g for g, members in zip(made, groups, strict=True) if rank in members)
    for name, (op, same_input, same_loss) in CASES.items():
        if world == 4 and groups is None:
            shape = (4, 2, 8)
        else:
            shape = (6, 2, 12)
        try:
            _check(op, group, same_input=same_input, same_loss=same_loss, shape=shape)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize(
    ("world", "groups"), [(2, None), (3, None), (4, None), (4, [[0, 2], [1, 3]])]
)
def test_gradient_of_each_collective(world: int, groups: list[list[int]] | None) -> None:
    run_ranks(world, _all_cases, groups)


def _values(rank: int, world: int) -> None:
    group = dist.group.WORLD
    full = torch.arange(24, dtype=torch.float64).view(4, 2, 3)
    for dim in (0, 1):
        piece = C.scatter_along(full, group, dim)
        assert torch.equal(piece, full.chunk(world, dim)[rank])
        assert piece.is_contiguous() and piece.untyped_storage().nbytes() == piece.numel() * 8
        assert torch.equal(C.gather_along(piece, group, dim), full)
        summed = C.reduce_scatter_along(full * (rank + 1), group, dim)
        assert torch.equal(summed, 3 * full.chunk(world, dim)[rank])
    assert torch.equal(C.reduce_from_region(full * (rank + 1), group), 3 * full)
    kept = full.clone()
    C.reduce_from_region(kept, group)
    assert torch.equal(kept, full), "the input must not be overwritten"
    # Head scatter, sequence gather: rank r gets every rank's r-th half, in rank order.
    heads = C.all_to_all_along(full + 100 * rank, group, 1, 0)
    assert torch.equal(heads, torch.cat([full, full + 100])[:, rank : rank + 1])
    assert torch.equal(C.all_to_all_along(heads, group, 0, 1), full + 100 * rank)
    integers = torch.arange(4) + 10 * rank
    assert C.gather_along(integers, group).tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    with pytest.raises(ValueError, match="size 3, which 2 ranks do not divide"):
        C.reduce_scatter_along(full, group, 2)
    with pytest.raises(ValueError, match="size 3, which 2 ranks do not divide"):
        C.scatter_along(full, group, -1)
    with pytest.raises(ValueError, match="must differ"):
        C.all_to_all_along(full, group, 1, -2)


def test_values_shapes_and_refusals() -> None:
    run_ranks(2, _values)


def _bf16_sums(rank: int, world: int) -> None:
    """bf16: a sum in fp32 is rounded once; in bf16 it may be rounded at every hop."""
    group = dist.group.WORLD
    values = torch.randn(world, 4096, generator=torch.Generator().manual_seed(0))
    values = values.to(torch.bfloat16)
    right = values.double().sum(0).to(torch.bfloat16)
    mine = values[rank]
    wide = torch.float32
    assert torch.equal(C.reduce_from_region(mine, group, reduce_dtype=wide), right)
    assert torch.equal(C.all_reduce(mine, group, wide), right)
    piece = C.reduce_scatter_along(mine, group, 0, reduce_dtype=wide)
    assert piece.dtype == torch.bfloat16 and torch.equal(piece, right.chunk(world)[rank])
    x = torch.zeros(4096, dtype=torch.bfloat16, requires_grad=True)
    C.copy_to_region(x, group, reduce_dtype=wide).backward(mine)
    assert x.grad is not None and x.grad.dtype == torch.bfloat16 and torch.equal(x.grad, right)
    plain = C.reduce_from_region(mine, group)
    assert plain.dtype == torch.bfloat16
    error = (plain.double() - values.double().sum(0)).abs().max()
    assert error <= world * 2**-8 * values.double().abs().sum(0).max()


def test_bf16_sums_state_their_dtype() -> None:
    run_ranks(4, _bf16_sums)


def test_no_group_is_the_identity() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    for op, _, _ in CASES.values():
        assert op(x, None) is x
    assert C.group_size(None) == 1 and C.group_rank(None) == 0


def _size_one(rank: int, world: int) -> None:
    groups = [dist.new_group([r]) for r in range(world)]
    x = torch.randn(3, 5, 2, requires_grad=True)
    for op, _, _ in CASES.values():
        assert op(x, groups[rank]) is x


def test_group_of_one_is_the_identity() -> None:
    run_ranks(2, _size_one)
