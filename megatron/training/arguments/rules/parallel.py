"""Rules of the parallel axes: what must divide what, and who talks to whom."""

import math
from collections.abc import Iterator

from megatron.core.config.flags import flag_name
from megatron.core.config.parallel import effective_layout, layout_multiple
from megatron.training.arguments.rules.facts import Facts, divisors_below, near


def positive_sizes(facts: Facts) -> Iterator[str]:
    """Every axis has at least one rank."""
    parallel = facts.config.parallel
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        "context_parallel_size",
    ):
        value = getattr(parallel, name)
        if value is not None and value < 1:
            yield f"{flag_name(name)} {value} must be at least 1; use 1 for no splitting"
    if parallel.cp_check_interval < 0:
        yield (
            f"--cp-check-interval {parallel.cp_check_interval} must be at least 0; use 0 for never"
        )
    if not parallel.distributed_timeout_minutes > 0:
        yield (
            f"--distributed-timeout-minutes {parallel.distributed_timeout_minutes:g} must be "
            "greater than 0; usual is 10"
        )


def heads_divide(facts: Facts) -> Iterator[str]:
    """Tensor-parallel ranks share the query heads evenly."""
    tensor = facts.config.parallel.tensor_model_parallel_size
    if facts.heads is not None and tensor > 0 and facts.heads % tensor:
        yield (
            f"--num-attention-heads {facts.heads} must be a multiple of "
            f"--tensor-model-parallel-size {tensor}; use a tensor size of "
            f"{divisors_below(facts.heads, facts.heads)}"
        )


def kv_heads_divide(facts: Facts) -> Iterator[str]:
    """KV heads are shared by, or copied to, the tensor-parallel ranks evenly."""
    tensor, kv_heads = facts.config.parallel.tensor_model_parallel_size, facts.kv_heads
    if not facts.config.model.group_query_attention or kv_heads is None or tensor < 1:
        return
    if kv_heads % tensor and tensor % kv_heads:
        yield (
            f"--num-query-groups {kv_heads} must be a multiple or a divisor of "
            f"--tensor-model-parallel-size {tensor}; use {tensor} groups, or a tensor size of "
            f"{divisors_below(kv_heads, kv_heads)}"
        )


def width_divides(facts: Facts) -> Iterator[str]:
    """Tensor-parallel ranks share the MLP evenly."""
    model, tensor = facts.config.model, facts.config.parallel.tensor_model_parallel_size
    if model.hidden_size is None or model.hidden_size < 1 or tensor < 1:
        return
    if model.ffn_size % tensor:
        yield (
            f"--ffn-hidden-size {model.ffn_size} must be a multiple of "
            f"--tensor-model-parallel-size {tensor}; {near(model.ffn_size, tensor)}"
        )


def vocabulary_divides(facts: Facts) -> Iterator[str]:
    """Tensor-parallel ranks share the padded vocabulary evenly."""
    model, tensor = facts.config.model, facts.config.parallel.tensor_model_parallel_size
    multiple = model.make_vocab_size_divisible_by
    if multiple < 1 or tensor < 1:
        return
    rows = model.padded_vocab_size if model.vocab_size is not None else multiple
    if rows % tensor:
        size = f" (vocabulary {rows})" if model.vocab_size is not None else ""
        yield (
            f"--make-vocab-size-divisible-by {multiple}{size} must pad the vocabulary to a "
            f"multiple of --tensor-model-parallel-size {tensor}; use {math.lcm(multiple, tensor)}"
        )


def layers_divide(facts: Facts) -> Iterator[str]:
    """Pipeline stages have equal numbers of layers, virtual stages too."""
    parallel, layers = facts.config.parallel, facts.config.model.num_layers
    pipeline = parallel.pipeline_model_parallel_size
    if layers is None or layers < 1 or pipeline < 1:
        return
    if layers % pipeline:
        yield (
            f"--num-layers {layers} must be a multiple of --pipeline-model-parallel-size "
            f"{pipeline}; {near(layers, pipeline)} layers, or a pipeline size of "
            f"{divisors_below(layers, layers)}"
        )
        return
    virtual = parallel.num_layers_per_virtual_pipeline_stage
    if virtual is None or virtual < 1:
        return
    if pipeline == 1:
        yield (
            f"--num-layers-per-virtual-pipeline-stage {virtual} needs a pipeline; add "
            "--pipeline-model-parallel-size 2 or more, or remove it"
        )
    elif (layers // pipeline) % virtual:
        yield (
            f"--num-layers-per-virtual-pipeline-stage {virtual} must divide the "
            f"{layers // pipeline} layers of a pipeline stage; use "
            f"{divisors_below(layers // pipeline, layers)}"
        )


def split_matches_size(facts: Facts) -> Iterator[str]:
    """Ulysses x ring is the context-parallel size."""
    parallel = facts.config.parallel
    sizes = parallel.hierarchical_context_parallel_sizes
    if sizes is None:
        return
    if min(sizes) < 1:
        yield (
            f"--hierarchical-context-parallel-sizes {sizes[0]} {sizes[1]} must be at least 1 each; "
            "use 1 for an axis that isn't wanted"
        )
    elif math.prod(sizes) != parallel.context_parallel_size:
        yield (
            f"--hierarchical-context-parallel-sizes {sizes[0]} {sizes[1]} must multiply to "
            f"--context-parallel-size {parallel.context_parallel_size}; use "
            f"--context-parallel-size {math.prod(sizes)}"
        )


def comm_type_fits(facts: Facts) -> Iterator[str]:
    """a2a is ulysses alone; p2p and all_gather are the ring alone."""
    kind = facts.config.parallel.cp_comm_type
    for stage in facts.stages:
        ulysses, ring = stage.context_parallel
        name = facts.name(stage, "context_parallel")
        if not facts.from_file:
            name = "--hierarchical-context-parallel-sizes"
        if kind == "a2a" and ring > 1:
            yield (
                f"--cp-comm-type a2a is ulysses alone, but {name} {ulysses} {ring} has a ring of "
                f"{ring}; use --cp-comm-type a2a+p2p or sizes {ulysses * ring} 1"
            )
        if kind in ("p2p", "all_gather") and ulysses > 1:
            yield (
                f"--cp-comm-type {kind} has no ulysses ranks, but {name} {ulysses} {ring} has "
                f"{ulysses}; use --cp-comm-type a2a+{kind} or sizes 1 {ulysses * ring}"
            )


def heads_for_ulysses(facts: Facts) -> Iterator[str]:
    """Each ulysses rank has at least one query head of its tensor-parallel rank."""
    tensor = facts.config.parallel.tensor_model_parallel_size
    if facts.heads is None or tensor < 1 or facts.heads % tensor:
        return
    local = facts.heads // tensor
    for stage in facts.stages:
        if stage.ulysses_size > local:
            yield (
                f"{facts.prefix(stage)}ulysses size {stage.ulysses_size} must not be more than "
                f"the {local} query heads of a tensor-parallel rank (--num-attention-heads "
                f"{facts.heads} / --tensor-model-parallel-size {tensor}); use ulysses x ring sizes "
                f"{_split_cure(stage.context_parallel_size, local)}"
            )


def _split_cure(size: int, heads: int) -> str:
    ulysses = max(number for number in range(1, heads + 1) if size % number == 0)
    return f"{ulysses} x {size // ulysses}"


def length_divides(facts: Facts) -> Iterator[str]:
    """A row can be cut as the layout and sequence parallelism cut it."""
    parallel = facts.config.parallel
    for stage in facts.stages:
        kind = effective_layout(parallel.cp_layout, stage.ring_size)
        multiple = layout_multiple(kind, stage.ring_size, stage.ulysses_size)
        why = (
            f"the {kind} layout with ulysses size {stage.ulysses_size} and ring size "
            f"{stage.ring_size}"
        )
        whole = multiple
        if parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1:
            pieces = stage.context_parallel_size * parallel.tensor_model_parallel_size
            whole = math.lcm(multiple, pieces)
            why += (
                f" and --sequence-parallel over {parallel.tensor_model_parallel_size} "
                "tensor-parallel ranks"
            )
        if stage.seq_length % whole:
            yield (
                f"{facts.name(stage, 'seq_length')} {stage.seq_length} must be a multiple of "
                f"{whole} for {why}; {near(stage.seq_length, whole)}"
            )


RULES = (
    positive_sizes,
    heads_divide,
    kv_heads_divide,
    width_divides,
    vocabulary_divides,
    layers_divide,
    split_matches_size,
    comm_type_fits,
    heads_for_ulysses,
    length_divides,
)
