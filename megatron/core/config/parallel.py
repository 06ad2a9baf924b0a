"""How the world is split: tensor x context (ulysses x ring) x pipeline x data."""

import dataclasses

from megatron.core.config.flags import flag

CP_COMM_TYPES = ("auto", "p2p", "a2a", "a2a+p2p", "all_gather", "a2a+all_gather")
CP_LAYOUTS = ("zigzag", "balanced", "striped", "contiguous")


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the parallel axes and how context parallelism communicates."""

    tensor_model_parallel_size: int = flag(1, "Tensor-parallel size.")
    pipeline_model_parallel_size: int = flag(1, "Pipeline-parallel size.")
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "Layers per virtual stage; turns the interleaved schedule on."
    )
    context_parallel_size: int = flag(1, "Context-parallel size (ulysses x ring).")
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = flag(
        None,
        "Ulysses size (inside a node) and ring size (between nodes).",
        nargs=2,
        metavar=("U", "R"),
    )
    cp_comm_type: str = flag(
        "auto", "Communication of context-parallel attention.", choices=CP_COMM_TYPES
    )
    cp_layout: str = flag(
        "zigzag", "Which positions a context-parallel rank holds.", choices=CP_LAYOUTS
    )
    cp_check_interval: int = flag(
        0, "Checksum context-parallel transfers and batches every N iterations (0: never)."
    )
    sequence_parallel: bool = flag(
        False, "Shard activations between tensor-parallel regions along the sequence."
    )
    use_distributed_optimizer: bool = flag(
        False, "Shard optimizer state over the data- and context-parallel ranks (ZeRO)."
    )
    data_parallel_sharding_strategy: str = flag(
        "no_shard",
        "What is sharded over data and context ranks: nothing, optimizer state, "
        "gradients too, parameters too. --use-distributed-optimizer alone means optim.",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    distributed_backend: str | None = flag(
        None, "Default: nccl with GPUs, gloo without.", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: float = flag(10.0, "Time limit of a collective.")
