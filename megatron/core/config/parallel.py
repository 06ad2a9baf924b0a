"""How the world is split: tensor x context (ulysses x ring) x pipeline x data."""

import dataclasses
import math

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
        None,
        "Default: nccl with GPUs, gloo without. With gloo a run is on the CPU.",
        choices=("nccl", "gloo"),
    )
    distributed_timeout_minutes: float = flag(
        10.0,
        "Time limit of a collective, and of a rank without progress: a layer, or a block of a "
        "file that it saves or loads. How long a save takes as a whole isn't limited.",
    )


def effective_layout(kind: str, ring_size: int) -> str:
    """The layout of a run: with a ring of one rank there is nothing to deal, so any length fits."""
    return kind if ring_size > 1 else "contiguous"


def layout_multiple(kind: str, ring_size: int, ulysses_size: int = 1) -> int:
    """The number that a row's length must be a multiple of, for a layout ``kind``.

    Zigzag and balanced layouts deal 2 x ring equal chunks; every layout cuts a row in
    ring x ulysses equal pieces.

    Raises:
        ValueError: for an unknown kind or a size below 1.
    """
    if kind not in CP_LAYOUTS:
        raise ValueError(f"--cp-layout {kind!r} must be one of {', '.join(CP_LAYOUTS)}")
    if ring_size < 1 or ulysses_size < 1:
        raise ValueError(
            f"ring size {ring_size} and ulysses size {ulysses_size} must be at least 1"
        )
    if kind in ("contiguous", "striped"):
        return ring_size * ulysses_size
    return math.lcm(2 * ring_size, ring_size * ulysses_size)
