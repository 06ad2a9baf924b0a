"""FLOPs against the matrix products that run and pairs that are written out."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.flops import matmul_weights, training_flops, visible_pairs
from tests.models.helpers import document_mask, gpt2_fields, small_config, whole_batch


@pytest.mark.parametrize("window", [None, 1, 3, 9, 100])
def test_pairs_equal_the_mask(window: int | None) -> None:
    batch = whole_batch([[7, 1, 24], [32], [9, 10, 13]])
    wanted = int(document_mask(batch, window).sum())
    assert visible_pairs(batch.cu_seqlens, window) == wanted
    assert visible_pairs([row.tolist() for row in batch.cu_seqlens], window) == wanted


def test_pairs_of_a_million_tokens() -> None:
    assert (
        visible_pairs([torch.tensor([0, 1 << 20], dtype=torch.int32)])
        == (1 << 20) * ((1 << 20) + 1) // 2
    )


class _Products(TorchDispatchMode):
    """Counts 2 m k n of every matrix product, in-place and ``out=`` forms included."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split(".")[0] in ("aten::mm", "aten::addmm", "aten::addmm_"):
            left, right = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
            self.flops += 2 * left.numel() * right.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fields", [{}, gpt2_fields(), {"recompute_granularity": "full"}])
def test_matrix_products_are_those_that_run(fields: dict[str, Any]) -> None:
    config, batch = small_config(loss_chunk_size=16, **fields), whole_batch([[32], [32]])
    model = GPTModel(config)
    with _Products() as counter:
        model(None, batch).backward()
    wanted = training_flops(config, 64, 0)
    assert wanted == 6 * 64 * matmul_weights(config)
    if "recompute_granularity" in fields:
        assert counter.flops > wanted  # recompute runs and isn't counted
    else:
        assert counter.flops == wanted


def test_llama_3_8b() -> None:
    """The published shape: 8.03e9 parameters, of which 0.53e9 are the embedding's."""
    config = small_config(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        ffn_hidden_size=14336,
        vocab_size=128256,
    )
    assert matmul_weights(config) == 8_030_261_248 - 128256 * 4096 - 65 * 4096
    attention = 12 * 4096 * 32 * 8193 / 2
    flops = training_flops(config, 8192, visible_pairs([[0, 8192]]))
    assert flops / 8192 == 6 * matmul_weights(config) + attention
