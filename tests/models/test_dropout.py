"""Dropout: a function of its key, the same when recomputed, other masks on other shards."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import DropoutKey, TensorParallel
from megatron.core.transformer.layer import hidden_dropout
from tests.models.helpers import gradients, small_config, whole_batch
from tests.transformer.test_recompute import KINDS
from tests.utils.ranks import run_ranks

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
KEY = DropoutKey(seed=5, iteration=7, micro_batch=1)
DOCUMENTS = [[7, 1, 24], [32]]


def _step(key: DropoutKey, **changes: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = GPTModel(small_config(**{**DROPOUT, **changes}))
    loss = model(None, whole_batch(DOCUMENTS), dropout_key=key)
    loss.backward()
    return loss.detach(), gradients(model)


def test_a_key_is_a_mask() -> None:
    loss, _ = _step(KEY)
    assert torch.equal(_step(KEY)[0], loss)
    others = [KEY.at(iteration=8), KEY.at(micro_batch=0), KEY.at(dp=1), KEY.at(seed=6)]
    assert len({float(_step(key)[0]) for key in (KEY, *others)}) == 5


@pytest.mark.parametrize("only", ["hidden_dropout", "attention_dropout"])
def test_each_kind_drops(only: str) -> None:
    without, _ = _step(KEY, hidden_dropout=0.0, attention_dropout=0.0)
    other = {name: 0.0 for name in DROPOUT if name != only}
    assert not torch.equal(_step(KEY, **other)[0], without)


def test_context_ranks_share_the_mask_of_attention() -> None:
    """Keys travel between them: a pair of positions is dropped whoever computes it."""
    alone = {"hidden_dropout": 0.0}
    loss, _ = _step(KEY, **alone)
    assert torch.equal(_step(KEY.at(cp=1), **alone)[0], loss)
    assert not torch.equal(_step(KEY.at(dp=1), **alone)[0], loss)


@pytest.mark.parametrize("name", list(KINDS))
def test_recompute_draws_the_same_masks(name: str) -> None:
    chunk = {"mlp_chunk_size": KINDS[name].get("mlp_chunk_size", 0)}
    loss, expected = _step(KEY, **chunk)
    again, actual = _step(KEY, **KINDS[name])
    assert torch.equal(loss, again)
    for key, gradient in actual.items():
        assert torch.equal(gradient, expected[key]), key


def test_gradient_is_that_of_the_dropped_function() -> None:
    """Directional derivative in fp64 with the masks held by the key."""
    model = GPTModel(small_config(**DROPOUT))
    batch = whole_batch(DOCUMENTS)
    model(None, batch, dropout_key=KEY).backward()
    generator = torch.Generator().manual_seed(1)
    slope, steps = 0.0, []
    for parameter in model.parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        steps.append(direction)
        slope += float((parameter.grad * direction).sum())
    values = []
    with torch.no_grad():
        for size in (1e-6, -2e-6):
            for parameter, direction in zip(model.parameters(), steps, strict=True):
                parameter += size * direction
            values.append(float(model(None, batch, dropout_key=KEY)))
    assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, rel=1e-6)


def test_training_needs_a_key_and_evaluation_none() -> None:
    model, batch = GPTModel(small_config(**DROPOUT)), whole_batch(DOCUMENTS)
    with pytest.raises(ValueError, match="need a dropout_key in training"):
        model(None, batch)
    plain = GPTModel(small_config())
    expected = plain(None, batch)
    assert torch.equal(model.eval()(None, batch), expected)
    assert torch.equal(model(None, batch, dropout_key=KEY), expected)
    assert torch.equal(model.train().logits(batch), plain.logits(batch))


def _masks(rank: int, world: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    masks = []
    for sequence_parallel in (False, True):
        tp = TensorParallel(tp_mesh=mesh, sequence_parallel=sequence_parallel)
        for cp in (0, 1):
            x = torch.ones(16, 2, 8)
            key = KEY.at(cp=cp)
            masks.append(hidden_dropout(x, 0.5, key, tp, layer=3, site="mlp_output").numpy())
    return masks


def test_masks_over_shards() -> None:
    """tp ranks agree on a shared activation, differ on their own shards; cp ranks differ."""
    ranks = run_ranks(2, _masks)
    shared, shared_cp, own, own_cp = range(4)
    assert (ranks[0][shared] == ranks[1][shared]).all()
    assert (ranks[0][own] != ranks[1][own]).any()
    for first, second in ((shared, shared_cp), (own, own_cp)):
        assert (ranks[0][first] != ranks[0][second]).any()
