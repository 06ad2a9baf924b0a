"""Initial values that ignore the layout, DTensor storage, and the sum of partial gradients."""

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.distributed import finalize_gradients
from megatron.core.tensor_parallel import (
    ONES,
    ConstantInit,
    NormalInit,
    TensorParallel,
    initialization,
    local,
)
from megatron.core.tensor_parallel.initialization import fill_shard
from tests.tensor_parallel.tiny import Tiny
from tests.utils.ranks import run_ranks

GOLDEN = [1.1596260, 0.3347073, -0.1479360]
SHAPES = [(7,), (12, 8), (8, 4, 6), ()]


def _make(shape: tuple[int, ...], **changes: object) -> torch.Tensor:
    given: dict = {"init": NormalInit(0.02), "seed": 1, "name": "layer.weight"} | changes
    init, name = given.pop("init"), given.pop("name")
    return TensorParallel(**given).parameter(name, shape, init=init).detach()


def test_values_are_fixed_for_ever() -> None:
    """A changed generator would silently change every run that is started again."""
    values = _make((3,), init=NormalInit(1.0)).tolist()
    assert values == pytest.approx(GOLDEN, abs=1e-6)


def test_values_depend_on_seed_and_name_and_nothing_else() -> None:
    values = _make((40, 50))
    assert torch.equal(values, _make((40, 50)))
    torch.manual_seed(0)
    assert torch.equal(values, _make((40, 50)))
    assert not torch.equal(values, _make((40, 50), seed=2))
    assert not torch.equal(values, _make((40, 50), name="layer.weight2"))
    for dtype in (torch.float64, torch.bfloat16):
        assert torch.equal(_make((40, 50), dtype=dtype), values.to(dtype))
    assert torch.equal(_make((4, 5), init=ConstantInit(2.5)), torch.full((4, 5), 2.5))
    large = _make((1000, 300))
    assert abs(float(large.std()) / 0.02 - 1) < 0.01 and abs(float(large.mean())) < 2e-4


def test_padding_rows_are_zero_and_change_nothing() -> None:
    plain = _make((29, 8))
    for padded in (29, 32, 64):
        values = _make((padded, 8), init=NormalInit(0.02, rows=29))
        assert torch.equal(values[:29], plain)
        assert torch.count_nonzero(values[29:]) == 0


def test_threads_do_not_change_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialization, "_BLOCK_ELEMENTS", 100)
    made = []
    for threads in (1, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        made.append(_make((100, 30)))
    assert torch.equal(*made)


@pytest.mark.parametrize("block", [1, 10, 64, 1 << 22])
def test_every_shard_is_a_slice_of_the_whole(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over block edges too: a shard may begin and end inside a block, or lie in the padding."""
    monkeypatch.setattr(initialization, "_BLOCK_ELEMENTS", block)
    for shape, rows in itertools.product([(12, 8), (24,), (8, 4, 6)], [None, 5]):
        whole = torch.full(shape, torch.nan)
        init = NormalInit(1.0, rows=rows)
        fill_shard(whole, shape, init, name="w", seed=3)
        assert not torch.isnan(whole).any()
        if rows is not None:
            assert torch.count_nonzero(whole[rows:]) == 0
        flat = whole[:rows].flatten()
        assert len(flat.unique()) == len(flat), "no two blocks draw the same numbers"
        for dim, size in itertools.product(range(len(shape)), (2, 4)):
            if shape[dim] % size:
                continue
            for rank, right in enumerate(whole.chunk(size, dim)):
                shard = torch.full(right.shape, torch.nan)
                offset = rank * right.shape[dim]
                kwargs = {"name": "w", "seed": 3, "shard_dim": dim, "offset": offset}
                fill_shard(shard, shape, init, **kwargs)
                assert torch.equal(shard, right), (shape, rows, dim, rank)


def _dtensors(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    dist.barrier()
    with CommDebugMode() as comm:
        for shape in SHAPES:
            whole = _make(shape)
            dims: list[int | None] = [None, *range(len(shape)), *([-1] if shape else [])]
            for dim in dims:
                if dim is not None and shape[dim] % world:
                    continue
                tp = TensorParallel(mesh, seed=1)
                made = tp.parameter("layer.weight", shape, init=NormalInit(0.02), shard_dim=dim)
                assert isinstance(made, DTensor) and made.requires_grad and made.is_leaf
                assert made.shape == whole.shape and made.stride() == whole.stride()
                tensor = made.to_local()
                assert tensor.is_contiguous() and tensor.storage_offset() == 0
                if dim is None:
                    assert made.placements == (Replicate(),)
                    assert torch.equal(tensor, whole)
                else:
                    assert made.placements == (Shard(dim % len(shape)),)
                    assert torch.equal(tensor, whole.chunk(world, dim)[rank])
    assert comm.get_total_counts() == 0
    tp = TensorParallel(mesh)
    assert (tp.size, tp.rank, tp.shards_sequence) == (world, rank, False)
    assert torch.equal(tp.parameter("n", (4,), init=ONES).to_local(), torch.ones(4))
    with pytest.raises(AssertionError, match="partial use"):
        local(tp.parameter("n", (4,), shard_dim=0), partial=True)


def test_dtensors_without_communication() -> None:
    run_ranks(2, _dtensors)


def test_without_a_mesh_parameters_are_plain() -> None:
    tp = TensorParallel(sequence_parallel=True)
    assert tp.group is None and (tp.size, tp.rank) == (1, 0) and not tp.shards_sequence
    parameter = tp.parameter("w", (4, 6), shard_dim=0)
    assert type(parameter) is torch.nn.Parameter
    assert local(parameter) is parameter and local(parameter, partial=True) is parameter
    assert local(parameter, dtype=torch.float64).dtype == torch.float64


def _mesh_of_one(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dpcp", "tp"))["tp"]
    tp = TensorParallel(mesh, True)
    assert tp.group is None and not tp.shards_sequence
    assert type(tp.parameter("w", (4, 6), shard_dim=0)) is torch.nn.Parameter


def test_a_mesh_of_one_rank_is_like_none() -> None:
    run_ranks(2, _mesh_of_one)


@pytest.fixture
def fake_world() -> Iterator[int]:
    """The last of 16,384 ranks, in this process; collectives move no data."""
    dist.init_process_group("fake", store=FakeStore(), rank=16383, world_size=16384)
    yield 16384
    dist.destroy_process_group()


def test_dry_run_at_16384_ranks(fake_world: int) -> None:
    """On meta: no values, no communication, and a large shape costs nothing."""
    mesh = init_device_mesh("cpu", (16, 256, 4), mesh_dim_names=("pp", "dpcp", "tp"))
    tp = TensorParallel(mesh["tp"], True, device="meta", dtype=torch.bfloat16)
    assert (tp.size, tp.rank) == (4, 3)
    with CommDebugMode() as comm:
        model = Tiny(tp, kv_heads=2)
        large = tp.parameter("large", (2**20, 2**15), init=NormalInit(1.0), shard_dim=0)
    assert comm.get_total_counts() == 0
    assert large.shape == (2**20, 2**15) and large.to_local().shape == (2**18, 2**15)
    for parameter in (large, *model.parameters()):
        assert parameter.to_local().is_meta and parameter.dtype == torch.bfloat16


def _partial_sums(rank: int, world: int) -> None:
    """The tp sum of a replicated parameter's gradient, in each dtype, for cancelling parts."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(world, 256, generator=generator, dtype=torch.float64) * 1000
    parts[-1] = torch.randn(256, generator=generator, dtype=torch.float64) - parts[:-1].sum(0)
    right = parts.sum(0)
    for dtype, bar in ((torch.float64, 1e-12), (torch.float32, 1e-3), (torch.bfloat16, 2**-8)):
        tp = TensorParallel(mesh, True, dtype=dtype)
        made = [tp.parameter(name, (256,), init=ONES) for name in ("a", "b")]
        made.append(tp.parameter("alone", (3,), init=ONES))
        wide = torch.promote_types(dtype, torch.float32)
        for parameter in made[:2]:
            used = local(parameter, partial=True, dtype=wide)
            assert used.dtype == wide
            (used * parts[rank]).sum().backward()
        finalize_gradients(made)
        for parameter in made[:2]:
            assert parameter.grad is not None and parameter.grad.dtype == dtype
            assert parameter.grad.placements == (Replicate(),)
            found = parameter.grad.to_local().double()
            if dtype == torch.bfloat16:
                # Rounded once, after the sum: within half an ulp of the sum itself. (Rounding
                # the summands, about 1,000, would be off by 2 where the sum is about 1.)
                assert ((found - right).abs() <= bar * right.abs() + 1e-3).all()
            else:
                assert (found - right).abs().max() < bar
        assert made[2].grad is None


def test_partial_gradients_are_summed_once_and_wide() -> None:
    run_ranks(4, _partial_sums)


def _bf16_use(rank: int, world: int) -> None:
    """Used in bf16: each rank's part is a bf16 number, their sum is rounded once."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    parts = torch.randn(world, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    parameter = TensorParallel(mesh, dtype=torch.bfloat16).parameter("a", (64,), init=ONES)
    used = local(parameter, partial=True)
    assert used.dtype == torch.bfloat16
    used.backward(parts[rank])
    assert torch.equal(parameter.grad.to_local(), parts.double().sum(0).bfloat16())


def test_partial_use_in_bf16() -> None:
    run_ranks(3, _bf16_use)
