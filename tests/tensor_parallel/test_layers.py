"""Tensor-parallel layers against one process and against plain dense formulas."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron.core import collectives
from megatron.core.config import ModelConfig
from megatron.core.distributed import finalize_gradients
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    NormalInit,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
)
from tests.tensor_parallel.tiny import HIDDEN, VOCAB, Tiny, batch
from tests.utils.ranks import run_ranks

F64 = torch.float64


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _run(tp: TensorParallel, kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Loss, token losses, weights and gradients of one step, gathered."""
    model = Tiny(tp, **kwargs)
    ids, labels = batch()
    loss = model(ids, labels)
    (loss / 7).backward()
    finalize_gradients(model.parameters())
    found = {"loss": loss.detach(), "tokens": model(ids, labels, tokens=True)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert parameter.grad is not None, name
        if isinstance(parameter, DTensor):
            assert parameter.grad.placements == parameter.placements
        found[name] = _full(parameter.detach())
        found[f"{name} grad"] = _full(parameter.grad)
    return found


def _compare(rank: int, world: int, kwargs: dict[str, Any]) -> None:
    tp_mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    right = _run(TensorParallel(dtype=F64), kwargs)
    for sequence_parallel in (False, True):
        tp = TensorParallel(tp_mesh, sequence_parallel, dtype=F64)
        found = _run(tp, kwargs)
        assert found.keys() == right.keys()
        for name, value in right.items():
            if name.endswith("grad") or name in ("loss", "tokens"):
                error = (found[name] - value).abs().max() / value.abs().max()
                assert error < 1e-12, (name, sequence_parallel, float(error))
            else:
                assert torch.equal(found[name], value), f"{name} depends on the layout"
        padding = found["embedding.weight grad"][VOCAB:]
        assert torch.count_nonzero(padding) == 0
        assert torch.count_nonzero(found["embedding.weight"][VOCAB:]) == 0


@pytest.mark.parametrize(
    ("world", "kwargs"),
    [
        (2, {"kv_heads": 2}),
        (2, {"kv_heads": 1, "tied": True}),
        (4, {"kv_heads": 4, "bias": False}),
        (4, {"kv_heads": 2, "tied": True}),
        (4, {"kv_heads": 1}),
    ],
)
def test_equals_one_process(world: int, kwargs: dict[str, Any]) -> None:
    """Loss, token losses and every gradient; weights bit-equal."""
    run_ranks(world, _compare, kwargs)


def _pair(rank: int, world: int, sequence_parallel: bool) -> None:
    """Column then row against dense linears, gradients of the input included."""
    tp_mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    tp = TensorParallel(tp_mesh, sequence_parallel, dtype=F64)
    init = NormalInit(1.0)
    column = ColumnParallelLinear(6, 8, tp, name="column", init=init)
    row = RowParallelLinear(8, 10, tp, name="row", init=init)
    for layer in (column, row):
        assert layer.bias is not None
        with torch.no_grad():
            layer.bias.to_local().copy_(
                torch.arange(layer.bias.to_local().numel()) + 10 * (layer is column) * rank
            )
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(4, 3, 6, dtype=F64, generator=generator, requires_grad=True)
    upstream = torch.randn(4, 3, 10, dtype=F64, generator=generator)
    params = [
        p.full_tensor().detach().requires_grad_() for p in (*column.parameters(), *row.parameters())
    ]
    dense = F.linear(torch.tanh(F.linear(full, *params[:2])), *params[2:])
    right = torch.autograd.grad(dense, [full, *params], upstream)

    group = tp.group if sequence_parallel else None
    x = collectives.own_piece(full.detach(), group).transpose(0, 1).contiguous().transpose(0, 1)
    assert not x.is_contiguous()
    x.requires_grad_()
    y = row(torch.tanh(column(x)))
    torch.testing.assert_close(y, collectives.own_piece(dense.detach(), group), rtol=0, atol=1e-12)
    y.backward(collectives.own_piece(upstream, group))
    finalize_gradients(row.parameters())
    found = [x.grad, *(p.grad.full_tensor() for p in (*column.parameters(), *row.parameters()))]
    expected = [collectives.own_piece(right[0], group), *right[1:]]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column_then_row_equals_dense(sequence_parallel: bool) -> None:
    run_ranks(2, _pair, sequence_parallel)


def _saved_shapes(rank: int, world: int) -> None:
    """Sequence parallelism keeps input shards, and frozen parameters cost no communication."""
    tp_mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    tp = TensorParallel(tp_mesh, True)
    column = ColumnParallelLinear(6, 8, tp, name="column", init=NormalInit(1.0))
    saved: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    x = torch.randn(4, 1, 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = column(x)
    assert y.shape == (8, 1, 4)
    assert (4, 1, 6) in saved and (8, 1, 6) not in saved
    for parameter in column.parameters():
        parameter.requires_grad_(False)
    column(x).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    for parameter in column.parameters():
        parameter.requires_grad_(True)
    frozen = x.detach()
    column(frozen).sum().backward()
    full = collectives.all_gather(frozen, tp.group)
    expected = full.sum((0, 1)).expand(4, 6)
    torch.testing.assert_close(column.weight.grad.to_local(), expected)


def test_column_saves_sequence_shards_only() -> None:
    run_ranks(2, _saved_shapes)


def _refusals(rank: int, world: int) -> None:
    tp_mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    tp = TensorParallel(tp_mesh, True)
    init = NormalInit(1.0)
    flag = "--tensor-model-parallel-size 4"
    with pytest.raises(ValueError, match=f"fc1: 10 output features .* {flag}"):
        ColumnParallelLinear(8, 10, tp, name="fc1", init=init)
    with pytest.raises(ValueError, match=f"fc2: 10 input features .* {flag}"):
        RowParallelLinear(10, 8, tp, name="fc2", init=init)
    with pytest.raises(ValueError, match=f"6 key/value heads and {flag}.*--num-query-groups"):
        ColumnParallelLinear(8, 12, tp, name="kv", init=init, blocks=6)
    with pytest.raises(ValueError, match=f"3 key/value heads and {flag}"):
        ColumnParallelLinear(8, 12, tp, name="kv", init=init, blocks=3)
    with pytest.raises(ValueError, match="5 blocks do not divide 12"):
        ColumnParallelLinear(8, 12, tp, name="kv", init=init, blocks=5)
    with pytest.raises(ValueError, match="padded vocabulary 30 .*--make-vocab-size-divisible-by"):
        VocabParallelEmbedding(29, 30, 8, tp, name="embedding", std=1.0)
    with pytest.raises(ValueError, match="w: dim 1 of shape"):
        tp.parameter("w", (4, 6), init=init, shard_dim=1)
    row = RowParallelLinear(8, 8, tp, name="row", init=init)
    with pytest.raises(ValueError, match="size 6, which 4 ranks do not divide"):
        row(torch.randn(6, 1, 2))


def test_shapes_that_do_not_fit_are_refused() -> None:
    run_ranks(4, _refusals)


@pytest.mark.parametrize("bad", [-1, VOCAB, VOCAB + 1, 31, 10**6])
def test_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    embedding = VocabParallelEmbedding(
        VOCAB, 32, HIDDEN, TensorParallel(), name="embedding", std=1.0
    )
    ids = torch.zeros(1, 4, dtype=torch.int64)
    assert embedding(ids).shape == (4, 1, HIDDEN)
    ids[0, 2] = bad
    with pytest.raises(ValueError, match=f"token id {bad} is outside .* {VOCAB}"):
        embedding(ids)
    assert embedding(ids[:, :0]).shape == (0, 1, HIDDEN)


def test_padded_vocabulary() -> None:
    sizes = [ModelConfig(vocab_size=size).padded_vocab_size for size in (1, 128, 129, 50257)]
    assert sizes == [128, 128, 256, 50304]
    with pytest.raises(ValueError, match="below --vocab-size 33"):
        VocabParallelEmbedding(33, 32, 8, TensorParallel(), name="embedding", std=1.0)


def _bf16_embedding(rank: int, world: int) -> None:
    """One summand is not zero, so the bf16 sum is the bf16 row itself."""
    tp_mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    ids = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
    made = {}
    for mesh in (None, tp_mesh):
        tp = TensorParallel(mesh, True, dtype=torch.bfloat16)
        made[mesh] = VocabParallelEmbedding(VOCAB, 32, HIDDEN, tp, name="e", std=1.0)(ids)
    assert torch.equal(made[tp_mesh], made[None].chunk(world)[rank])
    dist.barrier()


def test_bf16_embedding_is_exact() -> None:
    run_ranks(4, _bf16_embedding)
