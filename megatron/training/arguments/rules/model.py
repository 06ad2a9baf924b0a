"""Rules of the model: its sizes, positions, precision and recompute."""

from collections.abc import Iterator

from megatron.core.config.flags import flag_name
from megatron.core.context_extension import rope_frequencies, rotary_dim
from megatron.training.arguments.rules.facts import Facts, near

MAX_HEAD_DIM = 8192


def required_sizes(facts: Facts) -> Iterator[str]:
    """The three sizes that have no default."""
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if getattr(facts.config.model, name) is None:
            yield f"{flag_name(name)} is missing; give it, as it has no default"


def positive_sizes(facts: Facts) -> Iterator[str]:
    """Sizes that must be at least 1."""
    for name in (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "ffn_hidden_size",
        "num_query_groups",
        "kv_channels",
        "max_position_embeddings",
        "original_max_position_embeddings",
        "window_size",
        "vocab_size",
        "make_vocab_size_divisible_by",
        "recompute_num_layers",
    ):
        value = getattr(facts.config.model, name)
        if value is not None and value < 1:
            yield f"{flag_name(name)} {value} must be at least 1; raise it or leave it out"


def mlp_width(facts: Facts) -> Iterator[str]:
    """The default width of a SwiGLU MLP is rounded down to a multiple of 64: not to 0."""
    model = facts.config.model
    if model.swiglu and model.ffn_hidden_size is None and (model.hidden_size or 0) >= 1:
        if model.ffn_size < 1:
            yield (
                f"--hidden-size {model.hidden_size} with --swiglu gives an MLP of width 0 (8/3 of "
                "it, down to a multiple of 64); give --ffn-hidden-size"
            )


def chunk_sizes(facts: Facts) -> Iterator[str]:
    """Chunks are 0 (off) or more."""
    for name in ("loss_chunk_size", "mlp_chunk_size"):
        value = getattr(facts.config.model, name)
        if value < 0:
            yield f"{flag_name(name)} {value} must be at least 0; use 0 for no chunks"


def probabilities(facts: Facts) -> Iterator[str]:
    """Dropouts lie in [0, 1)."""
    for name in ("attention_dropout", "hidden_dropout"):
        value = getattr(facts.config.model, name)
        if not 0 <= value < 1:
            yield f"{flag_name(name)} {value} must be at least 0 and below 1; use 0 for none"


def positive_numbers(facts: Facts) -> Iterator[str]:
    """Epsilon and initial standard deviation are positive."""
    for name in ("norm_epsilon", "init_method_std"):
        value = getattr(facts.config.model, name)
        if not value > 0:
            usual = {"norm_epsilon": "1e-5", "init_method_std": "0.02"}[name]
            yield f"{flag_name(name)} {value} must be greater than 0; usual is {usual}"


def heads_divide_hidden(facts: Facts) -> Iterator[str]:
    """Without --kv-channels, heads share the hidden size."""
    model = facts.config.model
    if facts.heads is None or model.hidden_size is None or model.kv_channels is not None:
        return
    if model.hidden_size % facts.heads:
        yield (
            f"--hidden-size {model.hidden_size} must be a multiple of --num-attention-heads "
            f"{facts.heads}; {near(model.hidden_size, facts.heads)}, or give --kv-channels"
        )


def head_size(facts: Facts) -> Iterator[str]:
    """A head is of a size that can be meant."""
    if facts.head_dim is not None and facts.head_dim > MAX_HEAD_DIM:
        model = facts.config.model
        given = (
            f"--hidden-size {model.hidden_size} over --num-attention-heads {facts.heads}"
            if model.kv_channels is None
            else f"--kv-channels {model.kv_channels}"
        )
        yield f"{given}: heads of {facts.head_dim} are larger than {MAX_HEAD_DIM}; use e.g. 128"


def groups_divide_heads(facts: Facts) -> Iterator[str]:
    """Each key/value head serves the same number of query heads."""
    model = facts.config.model
    if not model.group_query_attention:
        if model.num_query_groups != 1:
            yield (
                f"--num-query-groups {model.num_query_groups} has no effect without "
                "--group-query-attention; add that flag"
            )
    elif facts.heads is not None and facts.kv_heads and facts.heads % facts.kv_heads:
        yield (
            f"--num-attention-heads {facts.heads} must be a multiple of --num-query-groups "
            f"{facts.kv_heads}; {near(facts.heads, facts.kv_heads)} heads, or other groups"
        )


def rotary_part(facts: Facts) -> Iterator[str]:
    """RoPE turns pairs of dimensions by a base above 1."""
    model = facts.config.model
    if model.position_embedding_type != "rope":
        return
    if not model.rotary_base > 1:
        yield f"--rotary-base {model.rotary_base:g} must be greater than 1; usual is 10000"
    if facts.head_dim is not None:
        try:
            rotary_dim(facts.head_dim, model.rotary_percent)
        except ValueError as error:
            yield str(error)


def rope_scaling(facts: Facts) -> Iterator[str]:
    """Each stage's RoPE rule can be computed for this head dimension."""
    model = facts.config.model
    if model.position_embedding_type != "rope" or facts.head_dim is None:
        return
    if facts.head_dim > MAX_HEAD_DIM:
        return
    try:
        dim = rotary_dim(facts.head_dim, model.rotary_percent)
    except ValueError:
        return
    if model.rope_scaling_type is None and not facts.from_file:
        if model.rope_scaling_factor != type(model).rope_scaling_factor:
            yield (
                f"--rope-scaling-factor {model.rope_scaling_factor:g} has no effect without "
                "--rope-scaling-type; add that flag (Megatron's --use-rope-scaling is llama3)"
            )
    if model.rope_scaling_type is not None and not facts.from_file:
        if model.rope_scaling_type == "longrope":
            yield (
                "--rope-scaling-type longrope needs lists of factors, which flags don't hold; give "
                "rope_scaling with short_factor and long_factor in a stage of --context-schedule"
            )
            return
        if model.original_max_position_embeddings is None and model.max_position_embeddings is None:
            if model.rope_scaling_type not in ("linear", "ntk"):
                yield (
                    f"--rope-scaling-type {model.rope_scaling_type} needs the length before the "
                    "extension; add --original-max-position-embeddings"
                )
                return
    for stage in facts.stages:
        try:
            if stage.rotary_base > 1:
                rope_frequencies(dim, stage.rotary_base, stage.rope_scaling, stage.seq_length)
        except ValueError as error:
            flag = f"--rope-scaling-type {model.rope_scaling_type}: "
            yield facts.prefix(stage) + ("" if facts.from_file else flag) + str(error)


def rope_without_rope(facts: Facts) -> Iterator[str]:
    """RoPE settings mean something with RoPE only."""
    model = facts.config.model
    kind = model.position_embedding_type
    if kind == "rope":
        return
    if model.rope_scaling_type is not None:
        yield (
            f"--rope-scaling-type {model.rope_scaling_type} has no effect with "
            f"--position-embedding-type {kind}; use --position-embedding-type rope"
        )
        return
    for stage in facts.stages:
        if stage.rotary_base != model.rotary_base or stage.rope_scaling is not None:
            yield (
                f"stage {stage.number}: rotary_base and rope_scaling have no effect with "
                f"--position-embedding-type {kind}; use --position-embedding-type rope"
            )


def learned_positions(facts: Facts) -> Iterator[str]:
    """A learned position table holds every position."""
    model = facts.config.model
    if model.position_embedding_type != "learned_absolute":
        return
    table = model.max_position_embeddings
    if table is None:
        yield (
            "--max-position-embeddings is missing; --position-embedding-type learned_absolute "
            "needs the size of its table (or use --position-embedding-type rope)"
        )
        return
    for stage in facts.stages:
        if stage.seq_length > table:
            yield (
                f"{facts.name(stage, 'seq_length')} {stage.seq_length} must not be more than "
                f"--max-position-embeddings {table}; use --max-position-embeddings "
                f"{stage.seq_length} or --position-embedding-type rope"
            )


def precision(facts: Facts) -> Iterator[str]:
    """--bf16 means bfloat16 arithmetic over fp32 master weights."""
    model = facts.config.model
    if model.bf16 and model.params_dtype not in (None, "float32"):
        cure = "remove --bf16" if model.params_dtype == "float64" else "remove one of the two"
        yield (
            f"--bf16 keeps float32 master weights and contradicts --params-dtype "
            f"{model.params_dtype}; {cure}"
        )


def recompute(facts: Facts) -> Iterator[str]:
    """Recompute options go with their granularity."""
    model = facts.config.model
    kind = model.recompute_granularity
    if kind != "full":
        for flag, given in (
            ("--recompute-method", model.recompute_method is not None),
            ("--recompute-num-layers", model.recompute_num_layers is not None),
            ("--recompute-attention", model.recompute_attention),
        ):
            if given:
                yield f"{flag} has no effect without --recompute-granularity full; add that flag"
    if kind != "selective" and model.recompute_modules != ("core_attn",):
        yield (
            f"--recompute-modules {' '.join(model.recompute_modules)} has no effect without "
            "--recompute-granularity selective; add that flag"
        )
    if kind == "full" and model.recompute_num_layers is not None and model.recompute_method is None:
        yield "--recompute-num-layers needs --recompute-method; add --recompute-method block"
    if model.recompute_method == "block" and model.recompute_num_layers is None:
        yield "--recompute-method block needs --recompute-num-layers; say how many layers"


def recompute_layers(facts: Facts) -> Iterator[str]:
    """Not more layers are recomputed than a pipeline stage has."""
    model, pipeline = facts.config.model, facts.config.parallel.pipeline_model_parallel_size
    if not model.num_layers or not model.recompute_num_layers or pipeline < 1:
        return
    layers = model.num_layers // pipeline
    if model.recompute_num_layers > layers > 0:
        yield (
            f"--recompute-num-layers {model.recompute_num_layers} must not be more than the "
            f"{layers} layers of a pipeline stage; lower it"
        )


def dropout_backend(facts: Facts) -> Iterator[str]:
    """Attention dropout exists in the reference kernel alone."""
    model = facts.config.model
    if model.attention_dropout > 0 and model.attention_backend in ("flash", "cudnn"):
        yield (
            f"--attention-backend {model.attention_backend} has no dropout, but "
            f"--attention-dropout is {model.attention_dropout}; use --attention-dropout 0 or "
            "--attention-backend auto"
        )


RULES = (
    required_sizes,
    positive_sizes,
    mlp_width,
    chunk_sizes,
    probabilities,
    positive_numbers,
    heads_divide_hidden,
    head_size,
    groups_divide_heads,
    rotary_part,
    rope_scaling,
    rope_without_rope,
    learned_positions,
    precision,
    recompute,
    recompute_layers,
    dropout_backend,
)
