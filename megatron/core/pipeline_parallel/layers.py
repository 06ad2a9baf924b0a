"""Which layers each pipeline rank and chunk holds, and which pipelines are possible. Pure.

Plain pipeline, 8 layers, 4 ranks::

    rank 0: 0 1    rank 1: 2 3    rank 2: 4 5    rank 3: 6 7

Interleaved (Megatron-LM, arXiv:2104.04473), one layer a virtual stage, so two chunks a rank::

    rank 0: 0 | 4  rank 1: 1 | 5  rank 2: 2 | 6  rank 3: 3 | 7

Chunk c of rank r is virtual stage ``c * ranks + r``; virtual stages hold consecutive layers.
"""


def num_chunks(
    num_layers: int,
    pipeline_model_parallel_size: int,
    num_layers_per_virtual_pipeline_stage: int | None = None,
) -> int:
    """Model chunks a rank: 1, or more with the interleaved schedule.

    Raises:
        ValueError: when the layers don't divide evenly.
    """
    pp, per_virtual = pipeline_model_parallel_size, num_layers_per_virtual_pipeline_stage
    if pp < 1:
        raise ValueError(f"--pipeline-model-parallel-size {pp} must be >= 1")
    if num_layers % pp:
        below, above = num_layers // pp * pp, (num_layers // pp + 1) * pp
        raise ValueError(
            f"--num-layers {num_layers} must be a multiple of --pipeline-model-parallel-size {pp}; "
            f"use {f'{below} or {above}' if below else above} layers"
        )
    if per_virtual is None:
        return 1
    if pp == 1:
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage {per_virtual} needs "
            "--pipeline-model-parallel-size of at least 2; drop it"
        )
    per_rank = num_layers // pp
    if per_virtual < 1 or per_rank % per_virtual:
        divisors = [d for d in range(1, per_rank + 1) if per_rank % d == 0]
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage {per_virtual} must divide the {per_rank} "
            f"layers of a pipeline rank (--num-layers {num_layers} / "
            f"--pipeline-model-parallel-size {pp}); use one of {divisors}"
        )
    return per_rank // per_virtual


def layer_ids(
    num_layers: int,
    pipeline_model_parallel_size: int,
    num_layers_per_virtual_pipeline_stage: int | None = None,
) -> list[list[list[int]]]:
    """Global layer indices, ``ids[pipeline rank][chunk]``; ValueError as :func:`num_chunks`."""
    pp = pipeline_model_parallel_size
    chunks = num_chunks(num_layers, pp, num_layers_per_virtual_pipeline_stage)
    size = num_layers // (pp * chunks)
    return [
        [
            list(range((chunk * pp + rank) * size, (chunk * pp + rank + 1) * size))
            for chunk in range(chunks)
        ]
        for rank in range(pp)
    ]
