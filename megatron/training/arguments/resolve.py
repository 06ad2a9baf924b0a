"""From flags to what a run does: the (ulysses, ring) split, the schedule, every default filled in.

Pure: the world size and the number of ranks on a node are arguments. The rules in ``rules``
say what is wrong with a configuration; here it is assumed to be right, or as right as needed.
"""

import dataclasses
from typing import Any

from megatron.core.config import RunConfig
from megatron.core.config.record import replace_values
from megatron.core.context_extension import ContextSchedule, StageDefaults
from megatron.core.rank_grid import default_split

DEFAULT_RANKS_PER_NODE = 8
"""Ranks on a node when nobody says (a dry run): the usual number of GPUs."""

_ULYSSES_ONLY, _RING_ONLY = ("a2a",), ("p2p", "all_gather")


def flag_split(config: RunConfig, ranks_per_node: int) -> tuple[int, int]:
    """(ulysses, ring) that the flags ask for, the default rule applied.

    ``--hierarchical-context-parallel-sizes`` says it; without, ``a2a`` means ulysses alone, ``p2p``
    and ``all_gather`` the ring alone, and the other types share as
    :func:`megatron.core.rank_grid.default_split`.
    """
    parallel = config.parallel
    sizes = parallel.hierarchical_context_parallel_sizes
    if sizes is not None and len(sizes) == 2:
        return sizes[0], sizes[1]
    size = max(1, parallel.context_parallel_size)
    if parallel.cp_comm_type in _ULYSSES_ONLY:
        return size, 1
    if parallel.cp_comm_type in _RING_ONLY:
        return 1, size
    return default_split(
        size,
        tensor_model_parallel_size=max(1, parallel.tensor_model_parallel_size),
        ranks_per_node=max(1, ranks_per_node),
        num_query_heads=max(1, config.model.num_attention_heads or 1),
    )


def dpcp_size(config: RunConfig, world_size: int) -> int | None:
    """Ranks over which data and context are split; None when the world doesn't divide."""
    parallel = config.parallel
    replica = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    if replica < 1 or world_size < 1 or world_size % replica:
        return None
    return world_size // replica


def stage_defaults(config: RunConfig, world_size: int, ranks_per_node: int) -> StageDefaults:
    """What a stage takes from the flags.

    With a schedule file the micro-batch size is 1 where neither stage nor flag says more.
    """
    training, data = config.training, config.data
    micro = training.micro_batch_size
    if micro is None and training.context_schedule is not None:
        micro = 1
    return StageDefaults(
        seq_length=training.seq_length,
        train_iters=training.train_iters,
        train_samples=training.train_samples,
        train_tokens=training.train_tokens,
        rotary_base=config.model.rotary_base,
        rope_scaling=config.model.rope_scaling,
        context_parallel=flag_split(config, ranks_per_node),
        micro_batch_size=micro,
        global_batch_size=training.global_batch_size,
        data_path=data.train_data_path or data.data_path,
        long_document_upsampling=data.long_document_upsampling,
        packing=data.packing,
        dpcp_size=dpcp_size(config, world_size),
    )


def resolve_schedule(
    config: RunConfig, *, world_size: int, ranks_per_node: int = DEFAULT_RANKS_PER_NODE
) -> ContextSchedule:
    """The run's schedule: from ``--context-schedule``, or one stage made of the flags.

    Raises:
        ValueError: for a schedule file that is wrong, or flags without a length.
    """
    defaults = stage_defaults(config, world_size, ranks_per_node)
    path = config.training.context_schedule
    if path is not None:
        return ContextSchedule.from_yaml(path, defaults)
    return ContextSchedule.single(defaults)


def finalize(
    config: RunConfig, world_size: int, ranks_per_node: int = DEFAULT_RANKS_PER_NODE
) -> RunConfig:
    """``config`` with every default that doesn't need the device or the tokenizer filled in.

    Filled: head dimension, MLP width, parameter type, RoPE's original length, recompute method,
    the (ulysses, ring) split, sharding strategy, steps of decay; without a
    schedule file also the global batch size and the train length in iterations (with one, those
    are the stages'). Finalizing twice changes nothing. Not filled: the vocabulary
    size of a tokenizer, the backend, the device's peak.

    Args:
        config: a configuration without faults (``check``).
        world_size: ranks of the run.
        ranks_per_node: ranks that share fast links.
    """
    schedule = resolve_schedule(config, world_size=world_size, ranks_per_node=ranks_per_node)
    model, parallel, training = config.model, config.parallel, config.training
    split = flag_split(config, ranks_per_node)
    values: dict[str, Any] = {
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn_size,
        "params_dtype": model.params_dtype or "float32",
        "context_parallel_size": split[0] * split[1],
        "hierarchical_context_parallel_sizes": split,
    }
    if model.rope_scaling_type is not None:
        values["original_max_position_embeddings"] = (
            model.original_max_position_embeddings or model.max_position_embeddings
        )
    if model.recompute_granularity == "full" and model.recompute_method is None:
        values["recompute_method"] = "uniform"
    if (
        parallel.use_distributed_optimizer
        and parallel.data_parallel_sharding_strategy == "no_shard"
    ):
        values["data_parallel_sharding_strategy"] = "optim"
    if training.context_schedule is None:
        values["global_batch_size"] = schedule.stages[0].global_batch_size
        values["train_iters"] = schedule.total_iterations
        values["train_samples"] = values["train_tokens"] = None
    elif training.micro_batch_size is None:
        values["micro_batch_size"] = 1
    if config.tokenizer.tokenizer_type is None:
        values["tokenizer_type"] = "NullTokenizer"
    if config.optimizer.lr_decay_iters is None:
        values["lr_decay_iters"] = schedule.total_iterations
    return replace_values(config, values)


@dataclasses.dataclass(frozen=True)
class ResolvedRun:
    """A checked run: what the training room builds from."""

    config: RunConfig
    """Every default filled in."""
    schedule: ContextSchedule
    notes: tuple[str, ...]
    """Lines for the log, once."""
    world_size: int
    """Ranks that it was checked for (of a dry run: the pretended ones)."""
