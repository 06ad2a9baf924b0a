"""Rules of batches and length; those of the world size stand last, in ``WORLD_RULES``."""

from collections.abc import Iterator

from megatron.core.config.flags import flag_name
from megatron.core.context_extension.stage import LENGTH_KEYS
from megatron.training.arguments.rules.facts import Facts, divisors_below, near, ranks_near


def sequence_length(facts: Facts) -> Iterator[str]:
    """A run without a schedule says how long its rows are."""
    training = facts.config.training
    if training.seq_length is None:
        if training.context_schedule is None:
            yield "--seq-length is missing; give the tokens of a row (or a --context-schedule)"
    elif training.seq_length < 1:
        yield f"--seq-length {training.seq_length} must be at least 1; usual is 4096"


def one_train_length(facts: Facts) -> Iterator[str]:
    """A run without a schedule has exactly one length."""
    training = facts.config.training
    given = {key: getattr(training, key) for key in LENGTH_KEYS}
    given = {key: value for key, value in given.items() if value is not None}
    for key, value in given.items():
        if value < 1:
            yield f"{flag_name(key)} {value} must be at least 1; raise it"
    if len(given) > 1:
        flags = " and ".join(f"{flag_name(key)} {given[key]}" for key in given)
        yield f"{flags} are both given; keep exactly one train length"
    elif not given and training.context_schedule is None:
        yield (
            "the train length is missing; give one of --train-iters, --train-samples, "
            "--train-tokens (or a --context-schedule)"
        )


def batch_sizes(facts: Facts) -> Iterator[str]:
    """Batches have at least one row."""
    training = facts.config.training
    if training.micro_batch_size is None and training.context_schedule is None:
        yield "--micro-batch-size is missing; give the rows that fit a rank's memory, e.g. 1"
    for name in ("micro_batch_size", "global_batch_size"):
        value = getattr(training, name)
        if value is not None and value < 1:
            yield f"{flag_name(name)} {value} must be at least 1; raise it"


def intervals(facts: Facts) -> Iterator[str]:
    """Intervals are at least 1; counts that may be 0 (never) at least 0."""
    training = facts.config.training
    for name in ("exit_interval", "exit_duration_in_mins", "eval_interval"):
        value = getattr(training, name)
        if value is not None and value < 1:
            never = "use --eval-iters 0" if name == "eval_interval" else "leave it out"
            yield f"{flag_name(name)} {value} must be at least 1; {never} for never"
    for name in ("eval_iters", "max_skipped_iterations", "rerun_check_interval"):
        value = getattr(training, name)
        if value < 0:
            yield f"{flag_name(name)} {value} must be at least 0; use 0 for none"
    if training.seed < 0:
        yield f"--seed {training.seed} must be at least 0; choose another"
    for iteration in training.iterations_to_skip:
        if iteration < 1:
            yield f"--iterations-to-skip {iteration} must be at least 1: iterations count from 1"


def dry_run(facts: Facts) -> Iterator[str]:
    """The pretended world belongs to a dry run."""
    training = facts.config.training
    size = training.dry_run_world_size
    if size is None:
        return
    if not training.dry_run:
        yield f"--dry-run-world-size {size} has no effect without --dry-run; add that flag"
    if size < 1:
        yield f"--dry-run-world-size {size} must be at least 1; give the ranks of the cluster"


def world_holds_replica(facts: Facts) -> Iterator[str]:
    """The world size is a multiple of tensor x pipeline."""
    parallel = facts.config.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if tensor < 1 or pipeline < 1 or facts.world_size < 1:
        return
    if facts.dpcp is None:
        yield (
            f"world size {facts.world_size} must be a multiple of --tensor-model-parallel-size "
            f"{tensor} x --pipeline-model-parallel-size {pipeline} = {tensor * pipeline}; start "
            f"{ranks_near(facts.world_size, tensor * pipeline)}, or lower a size"
        )


def world_holds_context(facts: Facts) -> Iterator[str]:
    """What tensor and pipeline leave of the world is a multiple of each stage's context split."""
    if facts.dpcp is None:
        return
    parallel = facts.config.parallel
    replica = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    for stage in facts.stages:
        size = stage.context_parallel_size
        if facts.dpcp % size:
            whole = replica * size
            name = (
                f"context_parallel {stage.ulysses_size} x {stage.ring_size}"
                if facts.from_file
                else f"--context-parallel-size {size}"
            )
            yield (
                f"{facts.prefix(stage)}world size {facts.world_size} must be a multiple of "
                f"--tensor-model-parallel-size {parallel.tensor_model_parallel_size} x "
                f"--pipeline-model-parallel-size {parallel.pipeline_model_parallel_size} x {name} "
                f"= {whole}; start {ranks_near(facts.world_size, whole)}, or use "
                f"a context size of {divisors_below(facts.dpcp, facts.dpcp)}"
            )


def batch_divides(facts: Facts) -> Iterator[str]:
    """The global batch is a whole number of micro-batches on each data-parallel rank."""
    for stage in facts.stages:
        data_parallel = facts.data_parallel(stage)
        micro, batch = stage.micro_batch_size, stage.global_batch_size
        if data_parallel is None or micro is None or batch is None or micro < 1 or batch < 1:
            continue
        if batch % (micro * data_parallel):
            yield (
                f"{facts.name(stage, 'global_batch_size')} {batch} must be a multiple of micro "
                f"batch size {micro} x data-parallel size {data_parallel} (world size "
                f"{facts.world_size}) = {micro * data_parallel}; "
                f"{near(batch, micro * data_parallel)}, or another --micro-batch-size"
            )


def micro_batches_fill_pipeline(facts: Facts) -> Iterator[str]:
    """A pipeline needs as many micro-batches as it has stages; interleaving, whole rounds."""
    parallel = facts.config.parallel
    pipeline = parallel.pipeline_model_parallel_size
    if pipeline <= 1:
        return
    for stage in facts.stages:
        data_parallel, micro = facts.data_parallel(stage), stage.micro_batch_size
        if data_parallel is None or micro is None or micro < 1:
            continue
        rows = micro * data_parallel
        batch = rows if stage.global_batch_size is None else stage.global_batch_size
        if batch < 1 or batch % rows:
            continue
        count = batch // rows
        name = facts.name(stage, "global_batch_size")
        if count < pipeline:
            yield (
                f"{name} {batch} gives {count} micro-batches, but --pipeline-model-parallel-size "
                f"{pipeline} needs at least {pipeline}; use {name.split()[-1]} {rows * pipeline} "
                "or more, or a smaller --micro-batch-size"
            )
        elif parallel.num_layers_per_virtual_pipeline_stage and count % (count // pipeline):
            good = next(
                n for n in range(count + 1, 2 * count + 2 * pipeline) if _whole(n, pipeline)
            )
            yield (
                f"{name} {batch} gives {count} micro-batches, which the interleaved schedule over "
                f"{pipeline} pipeline stages can't deal in {count // pipeline} equal rounds; use "
                f"{name.split()[-1]} {rows * good}"
            )


def _whole(count: int, pipeline: int) -> bool:
    return count % max(1, count // pipeline) == 0


RULES = (sequence_length, one_train_length, batch_sizes, intervals, dry_run)
WORLD_RULES = (
    world_holds_replica,
    world_holds_context,
    batch_divides,
    micro_batches_fill_pipeline,
)
