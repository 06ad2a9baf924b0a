"""``--dry-run``: the whole run on paper, for any number of ranks, in one process without a GPU.

The process groups are made on torch's fake backend and the model on the meta device, by the same
code as a real run; what FSDP would shard is counted instead of sharded. Printed are the grid, the
stages, and for each pipeline rank the bytes of weights, gradients and optimizer state that a rank
holds. Activations aren't counted: they depend on recompute and on the documents of a row.

Cost: a few seconds for 512 ranks, most of it importing torch.
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.config import RunConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.prepare import compute_dtype
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel import layer_ids
from megatron.training.arguments import ResolvedRun

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclasses.dataclass(frozen=True)
class PipelineRankBytes:
    """What one rank of a pipeline stage holds (all its tensor and data ranks hold as much)."""

    pipeline_rank: int
    layers: tuple[int, ...]
    parameters: int
    """Of this tensor-parallel rank, before data-parallel sharding."""
    weights: int
    gradients: int
    optimizer: int
    in_step: int
    """Unsharded weights and gradients that a step makes besides, at most."""

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.weights + self.gradients + self.optimizer + self.in_step


def _readable(size: float) -> str:
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError(size)


def _local_shape(parameter: nn.Parameter) -> torch.Size:
    data = parameter.data
    return data.to_local().shape if isinstance(data, DTensor) else data.shape


def _sharded_elements(shape: torch.Size, ranks: int) -> int:
    """Elements of the largest shard when FSDP cuts dim 0 over ``ranks``."""
    rows = shape[0] if shape else 1
    return -(-rows // ranks) * (shape.numel() // max(1, rows))


def _optimizer_slots(config: RunConfig) -> int:
    """Tensors of optimizer state a weight."""
    if config.optimizer.optimizer == "adam":
        return 2
    return 1 if config.optimizer.sgd_momentum > 0 else 0


def _in_step(config: RunConfig, units: list[int], dpcp: int) -> int:
    """Bytes of unsharded weights and gradients, given the elements of each layer, ascending.

    Weights are gathered in the type of the computation, gradients summed in at least fp32.
    Sharded parameters are gathered a layer ahead; see ``megatron.core.distributed.sharding``.
    """
    strategy, wide = config.parallel.data_parallel_sharding_strategy, compute_dtype(config.model)
    gradient_bytes = max(4, wide.itemsize)
    if strategy == "no_shard" or dpcp == 1:
        return sum(units) * wide.itemsize if config.model.bf16 else 0
    gathered = sum(units[-2:]) if strategy == "optim_grads_params" else sum(units)
    unreduced = sum(units) if strategy == "optim" else units[-1]
    return gathered * wide.itemsize + unreduced * gradient_bytes


def _count(
    config: RunConfig, chunks: list[nn.Module], pipeline_rank: int, layers: list[int], dpcp: int
) -> PipelineRankBytes:
    strategy = config.parallel.data_parallel_sharding_strategy
    ranks = 1 if strategy == "no_shard" else dpcp
    parameters = weights = 0
    per_unit: dict[str, int] = {}
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            shape = _local_shape(parameter)
            parameters += shape.numel()
            weights += _sharded_elements(shape, ranks) * parameter.element_size()
            unit = ".".join(name.split(".")[:3]) if name.startswith("decoder.layers.") else ""
            key = f"{number}:{unit}"
            per_unit[key] = per_unit.get(key, 0) + shape.numel()
    return PipelineRankBytes(
        pipeline_rank=pipeline_rank,
        layers=tuple(layers),
        parameters=parameters,
        weights=weights,
        gradients=weights,
        optimizer=weights * _optimizer_slots(config),
        in_step=_in_step(config, sorted(per_unit.values()), dpcp),
    )


def pipeline_bytes(config: RunConfig, parallel: ParallelState) -> Iterator[PipelineRankBytes]:
    """The bytes of each pipeline rank, from its chunks built on the meta device."""
    assert config.model.num_layers is not None
    pipeline = parallel.pp_size
    virtual = config.parallel.num_layers_per_virtual_pipeline_stage
    for rank, ids in enumerate(layer_ids(config.model.num_layers, pipeline, virtual)):
        chunks: list[nn.Module] = [
            GPTModel(
                config.model,
                tp_mesh=parallel.tp_mesh,
                sequence_parallel=config.parallel.sequence_parallel and parallel.tp_size > 1,
                layer_ids=layers,
                pre_process=rank == 0 and number == 0,
                post_process=rank == pipeline - 1 and number == len(ids) - 1,
                device="meta",
            )
            for number, layers in enumerate(ids)
        ]
        yield _count(config, chunks, rank, sum(ids, []), parallel.dpcp_size)


def _stage_lines(resolved: ResolvedRun, parallel: ParallelState) -> Iterator[str]:
    yield (
        f"{'stage':>5} {'seq length':>11} {'theta':>9} {'scaling':>8} {'ulysses':>7} {'ring':>5} "
        f"{'dp':>5} {'batch':>6} {'micro':>6} {'per rank':>9} {'steps':>8} {'tokens':>18}"
    )
    for stage in resolved.schedule.stages:
        grid = parallel.grids[stage.context_parallel]
        assert stage.global_batch_size and stage.micro_batch_size
        per_rank = stage.global_batch_size // (stage.micro_batch_size * grid.dp)
        scaling = stage.rope_scaling["rope_type"] if stage.rope_scaling else "-"
        tokens = stage.end_tokens - stage.start_tokens
        yield (
            f"{stage.number:>5} {stage.seq_length:>11,} {stage.rotary_base:>9.3g} {scaling:>8} "
            f"{grid.ulysses:>7} {grid.ring:>5} {grid.dp:>5} {stage.global_batch_size:>6} "
            f"{stage.micro_batch_size:>6} {per_rank:>9} {stage.iterations:>8,} {tokens:>18,}"
        )
    yield "(batch: rows a step; micro: rows a micro-batch; per rank: micro-batches a step)"


def _layers_text(layers: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return " ".join(f"{a}-{b}" if a != b else str(a) for a, b in runs)


def _byte_lines(config: RunConfig, counted: list[PipelineRankBytes]) -> Iterator[str]:
    strategy = config.parallel.data_parallel_sharding_strategy
    yield f"a rank holds (sharding: {strategy}; activations not counted):"
    yield (
        f"{'pp':>4} {'layers':>14} {'parameters':>14} {'weights':>12} {'gradients':>12} "
        f"{'optimizer':>12} {'in a step':>12} {'sum':>12}"
    )
    for part in counted:
        sizes = (part.weights, part.gradients, part.optimizer, part.in_step, part.total)
        yield (
            f"{part.pipeline_rank:>4} {_layers_text(part.layers):>14} {part.parameters:>14,} "
            + " ".join(f"{_readable(size):>12}" for size in sizes)
        )
    yield "(in a step: unsharded weights and gradients that a step makes besides, at most)"


def report(resolved: ResolvedRun, parallel: ParallelState) -> str:
    """What a dry run prints."""
    config, schedule = resolved.config, resolved.schedule
    lines = [parallel.describe(), ""]
    lines += _stage_lines(resolved, parallel)
    lines += [
        "",
        f"the run: {schedule.total_iterations:,} steps, {schedule.total_samples:,} rows, "
        f"{schedule.total_tokens:,} tokens",
        "",
    ]
    lines += _byte_lines(config, list(pipeline_bytes(config, parallel)))
    if resolved.notes:
        lines += ["", *(f"note: {note}" for note in resolved.notes)]
    return "\n".join(lines)


def _with_vocabulary(config: RunConfig) -> RunConfig:
    """``config`` with the tokenizer's vocabulary size where no flag gives one."""
    if config.model.vocab_size is not None:
        return config
    from megatron.core.tokenizers import build_tokenizer

    assert config.tokenizer.tokenizer_type is not None
    tokenizer = build_tokenizer(
        config.tokenizer.tokenizer_type, config.tokenizer.tokenizer_model, None
    )
    model = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
    return dataclasses.replace(config, model=model)


def dry_run(resolved: ResolvedRun, write: Callable[[str], object] = print) -> int:
    """Build the run on the fake backend, print it, and return 0.

    Args:
        resolved: a checked run; its ``world_size`` is the number of ranks to pretend.
        write: where the text goes.

    Raises:
        ValueError: if something that only building shows doesn't fit.
    """
    resolved = dataclasses.replace(resolved, config=_with_vocabulary(resolved.config))
    parallel_config = resolved.config.parallel
    dist.init_process_group("fake", rank=0, world_size=resolved.world_size)
    try:
        parallel = ParallelState(
            tensor_model_parallel_size=parallel_config.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel_config.pipeline_model_parallel_size,
            splits=resolved.schedule.splits,
        )
        write(report(resolved, parallel))
        write(f"dry run of {resolved.world_size} ranks: fine")
    finally:
        dist.destroy_process_group()
    return 0
