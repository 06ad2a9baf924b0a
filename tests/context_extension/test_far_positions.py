"""cos and sin far out, against 50 digits; and no table that outlives its theta."""

import json
from pathlib import Path
from typing import Any

import mpmath
import pytest
import torch

from megatron.core.config import ModelConfig
from megatron.core.context_extension import rope_inv_freq
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import RotaryEmbedding
from megatron.training.long_context_eval.rows import row_batch

POSITIONS = [0, 1, 4097, 131071, 2**20 - 1, 5_000_011, 2**24 - 1, 2**24]
CASES: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "rope_reference.json").read_text(encoding="utf-8")
)["cases"]


@pytest.mark.parametrize("theta", [1e4, 5e5, 5e7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_tables_up_to_16_million(theta: float, dtype: torch.dtype) -> None:
    dim = 32
    table = RotaryEmbedding(dim, rotary_base=theta).table(torch.tensor([POSITIONS]), dtype)
    with mpmath.workdps(50):
        for place, position in enumerate(POSITIONS):
            for pair in range(dim // 2):
                angle = position * mpmath.mpf(theta) ** (-mpmath.mpf(2 * pair) / dim)
                cos = table.cos[place, 0, 0, pair].item()
                sin = table.sin[place, 0, 0, pair].item()
                assert abs(cos - mpmath.cos(angle)) < 1e-6, (position, pair)
                assert abs(sin - mpmath.sin(angle)) < 1e-6, (position, pair)


@pytest.mark.parametrize("name", CASES)
def test_every_rule_up_to_16_million(name: str) -> None:
    """The table's angles are exact products: the frequencies of the rule in 50 digits."""
    config = CASES[name]["config"]
    scaling = dict(config["rope_parameters"])
    theta = scaling.pop("rope_theta")
    scaling["max_position_embeddings"] = config["max_position_embeddings"]
    dim, length = config["head_dim"], CASES[name]["seq_len"]
    inv_freq, factor = rope_inv_freq(dim, theta, scaling, length)
    rotary = RotaryEmbedding(dim, rotary_base=theta, scaling=scaling, seq_length=length)
    table = rotary.table(torch.tensor([POSITIONS]), torch.float32)
    with mpmath.workdps(50):
        for place, position in enumerate(POSITIONS):
            for pair in range(0, len(inv_freq), 5):
                angle = position * mpmath.mpf(inv_freq[pair].item())
                for got, function in ((table.cos, mpmath.cos), (table.sin, mpmath.sin)):
                    error = got[place, 0, 0, pair].item() - factor * function(angle)
                    assert abs(error) < 1e-6 * factor


def test_a_model_forgets_its_old_theta() -> None:
    """The same shape, another theta: back and forth, always the model that was built with it."""

    def model(theta: float) -> GPTModel:
        config = ModelConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=2,
            vocab_size=50,
            position_embedding_type="rope",
            rotary_base=theta,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            params_dtype="float64",
        )
        return GPTModel(config, seed=7).eval()

    tokens = torch.arange(41)[None] * 11 % 50
    batch = row_batch(tokens[:, :-1], tokens[:, 1:])
    batch.position_ids += torch.arange(40) * 125  # up to position 4914
    changing = model(1e4)
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    seen = []
    for theta, scaling in ((1e4, None), (1e6, None), (1e6, yarn), (1e4, None), (1e6, None)):
        changing.set_rope(theta, scaling, 40)
        logits = changing.logits(batch)
        fresh = model(theta)
        fresh.set_rope(theta, scaling, 40)
        assert torch.equal(logits, fresh.logits(batch))
        seen.append(logits)
    assert torch.equal(seen[0], seen[3]) and torch.equal(seen[1], seen[4])
    assert not torch.allclose(seen[0], seen[1]) and not torch.allclose(seen[1], seen[2])
