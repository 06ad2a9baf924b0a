"""Floating-point operations of a GPT's training step, for TFLOP/s and MFU.

A multiply-add is two operations, backward is twice forward, and recompute is never counted: MFU
asks how fast the model was trained, not how busy the machine was (PaLM, arXiv 2204.02311,
appendix B). Attention counts the pairs that are visible: documents are isolated, so a row of short
documents costs far less than ``S * S / 2``; a sliding window counts its band.

    forward per token  = 2 * (matrix weights of the layers + the output head)
    forward per pair   = 4 * head_dim * query heads * layers     (scores and their use)

Left out, as everywhere: norms, activations, RoPE, softmax, the embedding look-up (below 1 %).
Pure arithmetic; counts are of the whole model, over all ranks.
"""

from collections.abc import Iterable, Sequence

import torch

from megatron.core.config import ModelConfig


def matmul_weights(config: ModelConfig) -> int:
    """Number of weights that each token is multiplied with: layers and output head, no biases.

    The head counts the vocabulary that is really used; rows of padding do no useful work.
    """
    assert config.num_layers and config.hidden_size and config.num_attention_heads
    hidden, head_dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_kv_heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = hidden * config.ffn_size * (3 if config.swiglu else 2)
    vocab = config.vocab_size or 0
    return config.num_layers * (attention + mlp) + vocab * hidden


def visible_pairs(
    cu_seqlens: Iterable[torch.Tensor | Sequence[int]], window: int | None = None
) -> int:
    """Visible (query, key) pairs of rows packed with documents, causal.

    A document of n tokens has ``n(n+1)/2``, or the band of a window.

    Args:
        cu_seqlens: document boundaries [documents + 1] of each row.
        window: keys that a query sees at most, itself included; None: all of its document.
    """
    total = 0
    for row in cu_seqlens:
        lengths = torch.as_tensor(row, dtype=torch.int64).diff()
        seen = lengths if window is None else lengths.clamp(max=window)
        band = 0 if window is None else window * (lengths - seen)
        total += int((seen * (seen + 1) // 2 + band).sum())
    return total


def training_flops(config: ModelConfig, tokens: int, pairs: int) -> int:
    """Operations of forward and backward over ``tokens`` input tokens with ``pairs`` visible pairs.

    ``pairs`` as :func:`visible_pairs` counts them over the same rows; both may be sums over
    micro-batches and ranks.
    """
    assert config.num_layers and config.num_attention_heads
    per_pair = 4 * config.head_dim * config.num_attention_heads * config.num_layers
    return 3 * (2 * matmul_weights(config) * tokens + per_pair * pairs)
