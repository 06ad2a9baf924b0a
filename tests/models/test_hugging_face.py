"""Logits and every gradient equal Hugging Face's models with the same weights, in fp64.

Hugging Face computes norms and RoPE angles in fp32 whatever the model's type; the two patches
here bring them to fp64, or the comparison could not see differences below 1e-7.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from megatron.core.config import ModelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_batch import PackedBatch
from tests.models.helpers import (
    assert_close,
    document_mask,
    from_gpt2,
    from_llama,
    gpt2_fields,
    gradients,
    small_config,
    whole_batch,
)

DOCUMENTS = [[5, 1, 14], [20], [8, 12]]
THETA = 500.0


def _exact(model: Any) -> Any:
    """Norms and rotary angles in fp64."""

    def norm(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
            return module.weight * x * rstd

        return forward

    def rotary(x: torch.Tensor, position_ids: torch.Tensor, **_: Any) -> Any:
        dim = model.config.head_dim
        freq = THETA ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = position_ids[..., None].double() * freq
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm(module)
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = rotary
    return model


def _randomized(model: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
            if parameter.dim() == 1:
                parameter.add_(1.0)
    return model


def _compare(theirs: Any, config: ModelConfig, convert: Any, batch: PackedBatch) -> None:
    model = GPTModel(config)
    model.load_state_dict(convert(theirs.state_dict(), config), strict=True)

    mask = document_mask(batch, config.window_size)
    logits = theirs(
        input_ids=batch.tokens,
        position_ids=batch.position_ids,
        attention_mask=torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf),
        use_cache=False,
    ).logits
    expected = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    expected.backward()

    assert_close(model.logits(batch), logits, 1e-12, "logits")
    loss = model(None, batch)
    loss.backward()
    assert_close(loss, expected, 1e-12, "loss")
    losses = F.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")
    assert_close(model.token_losses(batch), losses, 1e-12, "token losses")
    wanted = convert({name: p.grad for name, p in theirs.named_parameters()}, config)
    actual = gradients(model)
    assert actual.keys() == wanted.keys()
    for name, gradient in actual.items():
        assert_close(gradient, wanted[name], 1e-10, name)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_llama(tied: bool, kv_heads: int) -> None:
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            rms_norm_eps=1e-5,
            tie_word_embeddings=tied,
            head_dim=8,
            attn_implementation="sdpa",
        )
    )
    config = small_config(
        num_query_groups=kv_heads,
        untie_embeddings_and_output_weights=not tied,
        rotary_base=THETA,
    )
    _compare(_exact(_randomized(theirs, 1)), config, from_llama, whole_batch(DOCUMENTS))


def test_qwen3_qk_norm_with_a_head_dim_of_its_own() -> None:
    theirs = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
    )
    config = small_config(kv_channels=12, qk_layernorm=True, rotary_base=THETA)
    _compare(_exact(_randomized(theirs, 2)), config, from_llama, whole_batch(DOCUMENTS))


def test_qwen2_qkv_bias() -> None:
    theirs = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
    )
    theirs.config.head_dim = 8
    config = small_config(add_qkv_bias=True, rotary_base=THETA)
    _compare(_exact(_randomized(theirs, 3)), config, from_llama, whole_batch(DOCUMENTS))


def test_sliding_window() -> None:
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            head_dim=8,
            attn_implementation="sdpa",
        )
    )
    config = small_config(window_size=6, rotary_base=THETA)
    _compare(_exact(_randomized(theirs, 4)), config, from_llama, whole_batch(DOCUMENTS))


def test_gpt2() -> None:
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=61,
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_inner=48,
            activation_function="gelu",
            attn_implementation="sdpa",
        )
    )
    config = small_config(**gpt2_fields())
    _compare(_randomized(theirs, 5), config, from_gpt2, whole_batch(DOCUMENTS))
