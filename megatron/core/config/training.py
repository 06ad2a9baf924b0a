"""How long training runs, on batches of which size, and reproducibly."""

import dataclasses

from megatron.core.config.flags import flag


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Batch sizes, length of the run, seed."""

    micro_batch_size: int | None = flag(None, "Rows per micro-batch and data-parallel rank.")
    global_batch_size: int | None = flag(
        None, "Rows per step over all ranks. Default: micro batch size * data-parallel size."
    )
    train_iters: int | None = flag(None, "Steps to train.")
    train_samples: int | None = flag(None, "Rows to train (instead of --train-iters).")
    train_tokens: int | None = flag(None, "Tokens to train (instead of --train-iters).")
    seq_length: int | None = flag(None, "Tokens per row.")
    context_schedule: str | None = flag(
        None, "YAML file of stages with growing context.", metavar="FILE"
    )
    seed: int = flag(1234, "Seed of weights, dropout and data order.")
    deterministic_mode: bool = flag(False, "Two runs give the same bits.")
    exit_interval: int | None = flag(None, "Save and exit after an iteration divisible by this.")
    exit_duration_in_mins: int | None = flag(None, "Save and exit after this many minutes.")
    exit_signal_handler: bool = flag(
        True, "On SIGTERM or SIGUSR1: all ranks save the same step and leave."
    )
    iterations_to_skip: tuple[int, ...] = flag(
        (), "Iterations whose batch is read but not trained on.", nargs="+"
    )
    max_skipped_iterations: int = flag(
        10, "Stop after this many skipped (non-finite) steps in a row."
    )
    rerun_check_interval: int = flag(
        0, "Every N iterations compute the step twice and compare bits (0: never)."
    )
    eval_interval: int = flag(1000, "Steps between evaluations.")
    eval_iters: int = flag(100, "Steps of one evaluation (0: none).")
    dry_run: bool = flag(False, "Check everything, build without weights, print, exit.")
    dry_run_world_size: int | None = flag(
        None, "Number of ranks that --dry-run pretends to have.", metavar="N"
    )
