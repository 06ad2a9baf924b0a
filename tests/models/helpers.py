"""Small models and batches, and the way from Hugging Face's weights to ours."""

from typing import Any

import torch

from megatron.core.config import ModelConfig
from megatron.core.packed_batch import IGNORE_INDEX, PackedBatch
from megatron.core.transformer.mlp import interleave_gate_up


def small_config(**changes: Any) -> ModelConfig:
    """A Llama of 2 layers in fp64 without dropout."""
    fields: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "rope",
        "vocab_size": 61,
        "make_vocab_size_divisible_by": 16,
        "params_dtype": "float64",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": 0.2,
        "loss_chunk_size": 7,
    }
    return ModelConfig(**(fields | changes))


def gpt2_fields(**changes: Any) -> dict[str, Any]:
    """What turns :func:`small_config` into a GPT-2."""
    fields = {
        "group_query_attention": False,
        "normalization": "LayerNorm",
        "swiglu": False,
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": False,
        "position_embedding_type": "learned_absolute",
        "max_position_embeddings": 64,
    }
    return fields | changes


def whole_batch(
    documents: list[list[int]], *, vocab_size: int = 61, seed: int = 0, ignored: int = 3
) -> PackedBatch:
    """Rows packed with documents of the given lengths, labels shifted, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    length = sum(documents[0])
    stream = torch.randint(0, vocab_size, (len(documents), length + 1), generator=generator)
    labels = stream[:, 1:].clone()
    for _ in range(ignored):
        row, column = (int(torch.randint(0, n, (1,), generator=generator)) for n in labels.shape)
        labels[row, column] = IGNORE_INDEX
    cu_seqlens, positions = [], []
    for row, lengths in enumerate(documents):
        assert sum(lengths) == length
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        labels[row, bounds[1:] - 1] = IGNORE_INDEX
        cu_seqlens.append(bounds.to(torch.int32))
        positions.append(torch.cat([torch.arange(n) for n in lengths]))
    return PackedBatch(
        tokens=stream[:, :-1].clone(),
        labels=labels,
        loss_mask=(labels != IGNORE_INDEX).float(),
        position_ids=torch.stack(positions),
        cu_seqlens=cu_seqlens,
        seq_length=length,
        sample_ids=list(range(len(documents))),
    )


def local_part(batch: PackedBatch, layout: Any, ring_rank: int, ulysses_rank: int) -> PackedBatch:
    """What one (ring, ulysses) rank holds of a whole batch."""
    at = layout.positions(ring_rank, ulysses_rank)
    return PackedBatch(
        tokens=batch.tokens[:, at],
        labels=batch.labels[:, at],
        loss_mask=batch.loss_mask[:, at],
        position_ids=batch.position_ids[:, at],
        cu_seqlens=batch.cu_seqlens,
        seq_length=batch.seq_length,
        layout=layout,
    )


def document_mask(batch: PackedBatch, window: int | None = None) -> torch.Tensor:
    """bool [B, 1, S, S]: what each query sees, written down plainly."""
    rows = []
    for bounds in batch.cu_seqlens:
        at = torch.arange(batch.seq_length)
        document = torch.bucketize(at, bounds[1:].long(), right=True)
        seen = (document[:, None] == document[None]) & (at[:, None] >= at[None])
        if window is not None:
            seen &= at[:, None] - at[None] < window
        rows.append(seen)
    return torch.stack(rows)[:, None]


def from_llama(tensors: dict[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Llama / Qwen tensors (weights or gradients) under our names and in our layouts."""
    kv_heads, dim, padded = config.num_kv_heads, config.head_dim, config.padded_vocab_size

    def padded_rows(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x.new_zeros(padded - x.shape[0], *x.shape[1:])))

    def key_value(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        pair = [x.unflatten(0, (kv_heads, dim)) for x in (key, value)]
        return torch.stack(pair, dim=1).flatten(0, 2)

    ours = {
        "embedding.word_embeddings.weight": padded_rows(tensors["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": tensors["model.norm.weight"],
    }
    if config.untie_embeddings_and_output_weights:
        ours["output_layer.weight"] = padded_rows(tensors["lm_head.weight"])
    for index in range(config.num_layers or 0):
        theirs, here = f"model.layers.{index}", f"decoder.layers.{index}"
        attention, mine = f"{theirs}.self_attn", f"{here}.self_attention"
        for kind in ("weight", "bias"):
            if f"{attention}.q_proj.{kind}" in tensors:
                ours[f"{mine}.linear_q.{kind}"] = tensors[f"{attention}.q_proj.{kind}"]
                ours[f"{mine}.linear_kv.{kind}"] = key_value(
                    tensors[f"{attention}.k_proj.{kind}"], tensors[f"{attention}.v_proj.{kind}"]
                )
        ours[f"{mine}.linear_proj.weight"] = tensors[f"{attention}.o_proj.weight"]
        for which in ("q", "k"):
            if f"{attention}.{which}_norm.weight" in tensors:
                norm = tensors[f"{attention}.{which}_norm.weight"]
                ours[f"{mine}.{which}_layernorm.weight"] = norm
        ours[f"{here}.input_layernorm.weight"] = tensors[f"{theirs}.input_layernorm.weight"]
        ours[f"{here}.pre_mlp_layernorm.weight"] = tensors[
            f"{theirs}.post_attention_layernorm.weight"
        ]
        ours[f"{here}.mlp.linear_fc1.weight"] = interleave_gate_up(
            tensors[f"{theirs}.mlp.gate_proj.weight"], tensors[f"{theirs}.mlp.up_proj.weight"]
        )
        ours[f"{here}.mlp.linear_fc2.weight"] = tensors[f"{theirs}.mlp.down_proj.weight"]
    return ours


def from_gpt2(tensors: dict[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """GPT-2 tensors (weights or gradients) under our names and in our layouts."""
    heads, dim, padded = config.num_kv_heads, config.head_dim, config.padded_vocab_size
    words = tensors["transformer.wte.weight"]
    ours = {
        "embedding.word_embeddings.weight": torch.cat(
            (words, words.new_zeros(padded - words.shape[0], words.shape[1]))
        ),
        "embedding.position_embeddings.weight": tensors["transformer.wpe.weight"],
        "decoder.final_layernorm.weight": tensors["transformer.ln_f.weight"],
        "decoder.final_layernorm.bias": tensors["transformer.ln_f.bias"],
    }
    for index in range(config.num_layers or 0):
        theirs, here = f"transformer.h.{index}", f"decoder.layers.{index}"
        for kind in ("weight", "bias"):
            fused = tensors[f"{theirs}.attn.c_attn.{kind}"]
            query, key, value = (fused.t() if kind == "weight" else fused).chunk(3)
            pair = [x.unflatten(0, (heads, dim)) for x in (key, value)]
            ours[f"{here}.self_attention.linear_q.{kind}"] = query
            ours[f"{here}.self_attention.linear_kv.{kind}"] = torch.stack(pair, 1).flatten(0, 2)
            for mine, name in (
                ("self_attention.linear_proj", "attn.c_proj"),
                ("mlp.linear_fc1", "mlp.c_fc"),
                ("mlp.linear_fc2", "mlp.c_proj"),
            ):
                tensor = tensors[f"{theirs}.{name}.{kind}"]
                ours[f"{here}.{mine}.{kind}"] = tensor.t() if kind == "weight" else tensor
            ours[f"{here}.input_layernorm.{kind}"] = tensors[f"{theirs}.ln_1.{kind}"]
            ours[f"{here}.pre_mlp_layernorm.{kind}"] = tensors[f"{theirs}.ln_2.{kind}"]
    return ours


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    """Largest difference relative to the largest magnitude of what is expected."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} for {expected.shape}"
    scale = max(expected.abs().max().item(), 1e-30)
    error = (actual.double() - expected.double()).abs().max().item() / scale
    assert error <= tolerance, f"{what}: relative error {error:.2e} > {tolerance:.0e}"


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A plain model's gradients by name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
