"""The shape and arithmetic of the GPT model."""

import dataclasses
from typing import Any

from megatron.core.config.flags import flag


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture, precision, recompute and chunking of a GPT model."""

    num_layers: int | None = flag(None, "Number of transformer layers.")
    hidden_size: int | None = flag(None, "Width of the residual stream.")
    ffn_hidden_size: int | None = flag(
        None,
        "Width of the MLP. Default: 4 * hidden size, or with --swiglu 8/3 * hidden size "
        "rounded down to a multiple of 64 (as Megatron-LM).",
    )
    num_attention_heads: int | None = flag(None, "Number of query heads.")
    group_query_attention: bool = flag(False, "Use grouped-query attention.")
    num_query_groups: int = flag(1, "Number of key/value heads with --group-query-attention.")
    kv_channels: int | None = flag(None, "Head dimension. Default: hidden size / heads.")
    normalization: str = flag("LayerNorm", "Normalization layer.", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(1e-5, "Epsilon of the normalization layers.")
    swiglu: bool = flag(False, "Use the SwiGLU activation instead of GELU.")
    add_bias_linear: bool = flag(
        True, "Add a bias to every linear layer.", off_name="--disable-bias-linear"
    )
    add_qkv_bias: bool = flag(False, "Add a bias to the QKV projection alone.")
    qk_layernorm: bool = flag(False, "Normalize queries and keys per head before attention.")
    untie_embeddings_and_output_weights: bool = flag(
        False, "Give the output layer weights of its own."
    )
    position_embedding_type: str = flag(
        "learned_absolute",
        "Position embedding.",
        choices=("learned_absolute", "rope", "none"),
    )
    max_position_embeddings: int | None = flag(
        None, "Size of the learned position table, and the length a RoPE rule starts from."
    )
    rotary_base: float = flag(10000.0, "RoPE base (theta).")
    rotary_percent: float = flag(1.0, "Part of the head dimension that RoPE rotates.")
    rope_scaling_type: str | None = flag(
        None,
        "RoPE scaling rule.",
        choices=("linear", "ntk", "dynamic", "yarn", "llama3", "longrope"),
    )
    rope_scaling_factor: float = flag(8.0, "Factor of the RoPE scaling rule.")
    original_max_position_embeddings: int | None = flag(
        None, "Context length before RoPE scaling. Default: --max-position-embeddings."
    )
    window_size: int | None = flag(
        None,
        "Sliding window: a query sees this many latest keys, itself included "
        "(Megatron's left,right is read too: 127,0 is 128).",
    )
    attention_dropout: float = flag(0.1, "Dropout on attention probabilities.")
    hidden_dropout: float = flag(0.1, "Dropout on the residual branches and the embedding.")
    init_method_std: float = flag(0.02, "Standard deviation of the normal initialization.")
    vocab_size: int | None = flag(
        None, "Vocabulary size. Default: the tokenizer's; exact with NullTokenizer."
    )
    make_vocab_size_divisible_by: int = flag(
        128, "Pad the vocabulary to a multiple of this; padded rows never get probability."
    )
    bf16: bool = flag(False, "Compute in bfloat16; master weights and reductions in fp32.")
    params_dtype: str | None = flag(
        None,
        "Type that parameters are stored in. Default: float32.",
        choices=("float32", "float64", "bfloat16"),
    )
    recompute_granularity: str | None = flag(
        None,
        "Activation recompute: full keeps the layer input and attention's out and lse; "
        "selective recomputes the modules of --recompute-modules.",
        choices=("full", "selective"),
    )
    recompute_attention: bool = flag(
        False, "With full recompute: drop attention's out and lse too and run it again."
    )
    recompute_method: str | None = flag(
        None,
        "Which layers full recompute covers: uniform (all) or block (the first "
        "--recompute-num-layers of each pipeline stage).",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(None, "Number of layers for --recompute-method.")
    recompute_modules: tuple[str, ...] = flag(
        ("core_attn",),
        "Modules that selective recompute covers.",
        choices=("core_attn", "mlp", "layernorm"),
        nargs="+",
    )
    loss_chunk_size: int = flag(
        2048, "Tokens per chunk of the LM head and cross-entropy (0: all at once)."
    )
    mlp_chunk_size: int = flag(0, "Tokens per chunk of the MLP (0: all at once).")
    attention_backend: str = flag(
        "auto",
        "Attention kernel.",
        choices=("auto", "reference", "flash", "cudnn"),
    )
    transformer_impl: str = flag(
        "local", "Implementation of the layers.", choices=("local", "transformer_engine")
    )

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads."""
        assert self.num_attention_heads is not None
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Dimension of one attention head."""
        if self.kv_channels is not None:
            return self.kv_channels
        assert self.hidden_size is not None and self.num_attention_heads is not None
        return self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width of the MLP, the default rule applied."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        assert self.hidden_size is not None
        if self.swiglu:
            return int((4 * self.hidden_size * 2 / 3) / 64) * 64
        return 4 * self.hidden_size

    @property
    def rope_scaling(self) -> dict[str, Any] | None:
        """The scaling rule that the flags name, with Hugging Face's keys; None for plain RoPE."""
        if self.rope_scaling_type is None:
            return None
        rule = {"rope_type": self.rope_scaling_type, "factor": self.rope_scaling_factor}
        original = self.original_max_position_embeddings or self.max_position_embeddings
        length = {} if original is None else {"original_max_position_embeddings": original}
        return rule | length

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary rounded up to ``make_vocab_size_divisible_by``; independent of tp."""
        assert self.vocab_size is not None
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple
