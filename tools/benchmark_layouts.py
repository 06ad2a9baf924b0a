"""Train a few steps of your own model with each context-parallel layout and communication.

    torchrun --nproc-per-node 8 tools/benchmark_layouts.py --output layouts.png -- FLAGS
    srun python tools/benchmark_layouts.py --steps 5 --output layouts.png -- FLAGS

FLAGS are those of pretrain_gpt.py, with ``--context-parallel-size`` above 1 (or a context schedule,
of which ``--stage`` picks one). Every layout is tried with every communication that the context
ranks and heads admit; the model is built once. Learning rate is zero and each trial reads the same
rows, so all must have the same loss and gradient norm: a trial that differs is said to, and the
command fails (with dropout nothing is compared: its masks depend on the layout).
Nothing is saved. The contiguous ring and what FLAGS say are always among the trials. All take
turns over ``--rounds``; medians are compared:

    tokens/s        whole steps, data and optimizer included, of all ranks together
    speedup         over the contiguous ring (p2p), and the hours it saves in 1,000 steps
    exposed wait    mean seconds a step in which the rank that waited longest stood still in
                    attention, and their share of the mean step
    balance         attention work of the fullest ring rank over the mean (1.00: balanced)

Exit codes: 0 done; 1 numbers differ, or a rank failed; 2 the command line is wrong.
"""

import dataclasses
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from megatron.core.config import RunConfig
from megatron.core.config.parallel import CP_LAYOUTS, effective_layout
from megatron.core.config.record import replace_values
from megatron.core.context_extension import ContextSchedule, Stage
from megatron.training.arguments import ResolvedRun, check_command_line, find_problems, refusal
from megatron.training.launch_env import LaunchEnvironment, launch_environment
from tools.command import Parser, run, writable

PROGRAM = "benchmark_layouts.py"
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 2e-2}
"""Of the loss, relative, between trials."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One layout with one communication."""

    layout: str
    comm: str
    split: tuple[int, int]
    """(ulysses, ring)."""
    yours: bool = False
    """What FLAGS say."""

    @property
    def name(self) -> str:
        where = f"{self.split[0]}x{self.split[1]}"
        return f"{'any' if self.split[1] == 1 else self.layout} {self.comm} {where}"

    @property
    def flags(self) -> str:
        """What to write on the command line."""
        sizes = f"{self.split[0]} {self.split[1]}"
        return (
            f"--cp-layout {self.layout} --cp-comm-type {self.comm} "
            f"--hierarchical-context-parallel-sizes {sizes}"
        )


@dataclasses.dataclass
class Outcome:
    """What a trial measured, equal on all ranks."""

    trial: Trial
    seconds: list[float] = dataclasses.field(default_factory=list)
    """One per timed step: of the slowest rank."""
    loss: float = math.nan
    """Of the first step, before anything is updated, as is the norm."""
    grad_norm: float = math.nan
    comm_type: str = ""
    balance: float = math.nan
    waits: list[float] = dataclasses.field(default_factory=list)
    """Exposed wait a step, one per round."""
    sent: float = 0.0
    peak_bytes: int | None = None
    """Largest of the ranks; GPUs only."""

    @property
    def name(self) -> str:
        """The trial's, with what ``auto`` meant."""
        meant = "" if self.trial.comm != "auto" else f" ({self.comm_type})"
        return self.trial.name + meant

    @property
    def step(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)


def candidates(size: int) -> Iterator[Trial]:
    """Every layout and communication of ``size`` context-parallel ranks, the baseline first."""
    for layout in ("contiguous", *(kind for kind in CP_LAYOUTS if kind != "contiguous")):
        for ulysses in (number for number in range(1, size + 1) if size % number == 0):
            ring = size // ulysses
            if ring == 1:
                if layout == "contiguous":  # with one ring rank there is nothing to deal
                    yield Trial(layout, "a2a", (size, 1))
                continue
            prefix = "a2a+" if ulysses > 1 else ""
            for outer in ("p2p", "all_gather"):
                yield Trial(layout, prefix + outer, (ulysses, ring))


def trial_config(config: RunConfig, trial: Trial, stage: Stage) -> RunConfig:
    """The configuration of a trial as a run without a schedule file, for the rules to look at."""
    return replace_values(
        config,
        {
            "cp_layout": trial.layout,
            "cp_comm_type": trial.comm,
            "context_parallel_size": math.prod(trial.split),
            "hierarchical_context_parallel_sizes": trial.split,
            "context_schedule": None,
            "seq_length": stage.seq_length,
            "micro_batch_size": stage.micro_batch_size,
            "global_batch_size": stage.global_batch_size,
            "train_iters": 1000,
            "train_samples": None,
            "train_tokens": None,
            "lr_decay_iters": None,
            "save": None,
            "load": None,
            "save_interval": None,
            "async_save": False,
        },
    )


def choose_trials(
    resolved: ResolvedRun, stage: Stage, ranks_per_node: int, options: Any
) -> tuple[list[Trial], list[tuple[Trial, str]]]:
    """(trials that can run, trials that can't with the reason)."""
    good, refused = [], []
    size, parallel = stage.context_parallel_size, resolved.config.parallel
    layout = effective_layout(parallel.cp_layout, stage.ring_size)
    own = Trial(layout, parallel.cp_comm_type, stage.context_parallel)
    tries = list(candidates(size))
    for trial in tries if own in tries else [*tries, own]:
        named = trial.layout in options.layouts or trial.split[1] == 1
        named &= trial.comm in (options.comm_types or [trial.comm])
        if not named and trial not in (tries[0], own):
            continue
        trial = dataclasses.replace(trial, yours=trial == own)
        problems = find_problems(
            trial_config(resolved.config, trial, stage), resolved.world_size, ranks_per_node
        )
        if problems:
            refused.append((trial, problems[0]))
        else:
            good.append(trial)
    return good, refused


def read_command_line(
    argv: Sequence[str] | None, env: LaunchEnvironment
) -> tuple[Any, ResolvedRun, Stage]:
    """Own options, the run that FLAGS describe, and the stage to try.

    Raises:
        ValueError: for wrong FLAGS, or a run without context parallelism.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    options = _parser().parse(words[:at])
    for name in ("steps", "rounds", "warmup"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)} must be at least 1")
    for name in ("output", "json"):
        path = getattr(options, name)
        if path:  # on every rank: if one alone left, the others would wait for it
            writable(f"--{name}", path)
    if not words[at + 1 :]:
        raise ValueError("no flags of a training run; write them after --, as for pretrain_gpt.py")
    resolved = check_command_line(
        words[at + 1 :], world_size=env.world_size, ranks_per_node=env.ranks_per_node
    )
    stages = resolved.schedule.stages
    number = len(stages) if options.stage is None else options.stage
    if not 1 <= number <= len(stages):
        raise ValueError(f"--stage {number} must be from 1 to {len(stages)}, the schedule's stages")
    stage = stages[number - 1]
    if stage.context_parallel_size == 1:
        raise ValueError(
            "--context-parallel-size 1 (of the stage) leaves nothing to compare; use 2 or more"
        )
    return options, resolved, stage


def trial_schedule(stage: Stage, trials: Sequence[Trial]) -> ContextSchedule:
    """One long stage for each split, so that all process groups exist from the start."""
    splits = list(dict.fromkeys(trial.split for trial in trials))
    return ContextSchedule.from_stages(
        [
            dataclasses.replace(
                stage, index=index, context_parallel=split,
                train_iters=10**6, train_samples=None, train_tokens=None,
            )
            for index, split in enumerate(splits)
        ]
    )  # fmt: skip


class Bench:
    """The model, built once, and how a trial runs on it."""

    def __init__(
        self, resolved: ResolvedRun, stage: Stage, trials: list[Trial], env: LaunchEnvironment
    ) -> None:
        import pretrain_gpt
        from megatron.training.build import build_trainer, open_tokenizer
        from megatron.training.initialize import initialize_distributed
        from megatron.training.signals import ExitSignals

        config = trial_config(resolved.config, trials[0], stage)
        config = replace_values(config, {"lr": 0.0, "min_lr": 0.0})
        still = dataclasses.replace(stage, lr=type(stage.lr)())
        resolved = dataclasses.replace(
            resolved, config=config, schedule=trial_schedule(still, trials)
        )
        resolved, tokenizer = open_tokenizer(resolved)
        device = initialize_distributed(env, resolved.config)
        self.trainer = build_trainer(
            resolved,
            tokenizer,
            device,
            ExitSignals(),
            model_provider=pretrain_gpt.model_provider,
            data_provider=pretrain_gpt.data_provider,
            loss_provider=pretrain_gpt.loss_provider,
        )
        self.trainer.reporter.say = lambda text: None  # type: ignore[method-assign]
        self._stages = {stage.context_parallel: stage for stage in resolved.schedule.stages}

    def try_out(self, outcome: Outcome, steps: int, warmup: int) -> None:
        """Add one round of a trial to its outcome. Collective."""
        import torch

        from megatron.training.stage_switch import enter_stage, leave_stage
        from megatron.training.train_step import train_step

        trainer, trial = self.trainer, outcome.trial
        trainer.config = replace_values(
            trainer.config, {"cp_layout": trial.layout, "cp_comm_type": trial.comm}
        )
        enter_stage(trainer, self._stages[trial.split])
        assert trainer.loader is not None
        gpu = trainer.device.type == "cuda"
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        for number in range(warmup + steps):
            if number == warmup:
                trainer.attention.take(1)
            began = self._together()
            result = train_step(trainer, trainer.loader.next_step())
            seconds = self._together() - began
            if number == 0:
                outcome.loss, outcome.grad_norm = result.loss, result.grad_norm
            if number >= warmup:
                outcome.seconds.append(self._largest(seconds))
        record = trainer.attention.take(steps)
        outcome.comm_type = record["cp_comm_type"]
        outcome.balance = record["cp_work_balance"]
        outcome.waits.append(record["cp_exposed_wait"])
        outcome.sent = record["cp_bytes_sent"]
        if gpu:
            outcome.peak_bytes = int(self._largest(float(torch.cuda.max_memory_allocated())))
        leave_stage(trainer)

    def _together(self) -> float:
        """The time at which all ranks have come here, devices included."""
        import torch
        import torch.distributed as dist

        if self.trainer.device.type == "cuda":
            torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(1))
        return time.perf_counter()

    def _largest(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        holder = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(holder, op=dist.ReduceOp.MAX)
        return float(holder)


def same_losses(outcomes: Sequence[Outcome], config: RunConfig) -> list[str]:
    """A line for each trial whose first loss or gradient norm isn't the baseline's.

    None with dropout: masks differ between layouts.
    """
    if config.model.attention_dropout or config.model.hidden_dropout:
        return []
    dtype = "bfloat16" if config.model.bf16 else config.model.params_dtype or "float32"
    base, lines = outcomes[0], []
    for what, factor in (("loss", 1), ("grad_norm", 10)):
        right = getattr(base, what)
        for outcome in outcomes:
            seen = getattr(outcome, what)
            if not abs(seen - right) <= factor * TOLERANCE[dtype] * abs(right):
                lines.append(
                    f"{outcome.trial.name}: {what} {seen:.10g} instead of {right:.10g} "
                    f"({base.trial.name})"
                )
    return lines


def table(outcomes: Sequence[Outcome], stage: Stage) -> list[dict[str, Any]]:
    """Rows of the table, fastest first."""
    base = outcomes[0].step
    rows: list[dict[str, Any]] = []
    for outcome in sorted(outcomes, key=lambda outcome: outcome.step):
        wait, mean = statistics.fmean(outcome.waits), statistics.fmean(outcome.seconds)
        rows.append(
            {
                "trial": outcome.name,
                "yours": outcome.trial.yours,
                "flags": outcome.trial.flags,
                "step_seconds": outcome.step,
                "step_seconds_least": min(outcome.seconds),
                "step_seconds_most": max(outcome.seconds),
                "tokens_per_second": stage.tokens_per_step / outcome.step,
                "speedup": base / outcome.step,
                "hours_saved_per_1000_steps": (base - outcome.step) * 1000 / 3600,
                "exposed_wait": wait,
                "exposed_share": wait / mean,
                "balance": outcome.balance,
                "bytes_sent": outcome.sent,
                "peak_bytes": outcome.peak_bytes,
                "loss": outcome.loss,
                "grad_norm": outcome.grad_norm,
            }
        )
    return rows


def print_table(rows: Sequence[dict[str, Any]], base: str) -> None:
    """The rows for people."""
    print(
        f"\n{'layout, comm, ulysses x ring':<36}{'step s':>8}{'(least..most)':>17}{'tokens/s':>12}"
        f"{'speedup':>9}{'wait s':>8}{'wait %':>8}{'balance':>9}{'MB sent':>9}{'h/1000 steps':>14}"
    )
    for row in rows:
        spread = f"({row['step_seconds_least']:.3f}..{row['step_seconds_most']:.3f})"
        memory = f"  peak {row['peak_bytes'] / 2**30:.2f} GiB" if row["peak_bytes"] else ""
        print(
            f"{row['trial']:<36}{row['step_seconds']:>8.3f}{spread:>17}"
            f"{row['tokens_per_second']:>12,.0f}{row['speedup']:>9.2f}{row['exposed_wait']:>8.3f}"
            f"{row['exposed_share']:>8.1%}{row['balance']:>9.2f}{row['bytes_sent'] / 1e6:>9.2f}"
            f"{row['hours_saved_per_1000_steps']:>+14.3f}{memory}"
            + ("   <- baseline" if row["trial"] == base else "")
            + ("   <- your flags" if row["yours"] else "")
        )
    print(f"fastest: {rows[0]['flags']}", flush=True)


def measure(bench: Bench, trials: Sequence[Trial], options: Any, *, speaks: bool) -> list[Outcome]:
    """All rounds of all trials, saying how far it is."""
    outcomes = [Outcome(trial) for trial in trials]
    began, total = time.monotonic(), options.rounds * len(trials)
    done = 0
    for _ in range(options.rounds):
        for outcome in outcomes:
            bench.try_out(outcome, options.steps, options.warmup)
            done += 1
            elapsed = time.monotonic() - began
            if speaks:
                print(
                    f"[{done}/{total}] {outcome.trial.name}: {outcome.seconds[-1]:.3f} s a step, "
                    f"loss {outcome.loss:.6f}, about {elapsed / done * (total - done):.0f} s left",
                    flush=True,
                )
    return outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of every rank; returns the exit code."""
    try:
        env = launch_environment()
        options, resolved, stage = read_command_line(argv, env)
        trials, refused = choose_trials(resolved, stage, env.ranks_per_node, options)
        if len(trials) < 2 or trials[0].comm != "p2p" or trials[0].layout != "contiguous":
            why = "\n".join(f"{trial.name}: {problem}" for trial, problem in refused)
            raise ValueError(why or "fewer than two trials are left; name more layouts")
    except ValueError as error:
        if int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == 0:
            print(refusal(error, PROGRAM), file=sys.stderr)
        return 2
    import torch.distributed as dist

    from tools.layouts_picture import draw

    speaks = env.rank == 0
    if speaks:
        print(
            f"{time.strftime('%Y-%m-%d')}: {len(trials)} trials on {env.world_size} ranks, seq "
            f"length {stage.seq_length}, micro batch {stage.micro_batch_size}, global batch "
            f"{stage.global_batch_size}, {options.rounds} rounds of {options.steps} steps"
        )
        for trial, problem in refused:
            print(f"  left out: {trial.name}: {problem}", flush=True)
    bench = Bench(resolved, stage, trials, env)
    try:
        outcomes = measure(bench, trials, options, speaks=speaks)
    finally:
        dist.destroy_process_group()
    different = same_losses(outcomes, resolved.config)
    if speaks:
        rows = table(outcomes, stage)
        print_table(rows, outcomes[0].trial.name)
        for line in different:
            print(f"NOT EXACT: {line}", file=sys.stderr)
        if options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
        if options.output:
            title = (
                f"seq length {stage.seq_length:,}, {env.world_size} ranks, context parallel size "
                f"{stage.context_parallel_size}"
            )
            draw(rows, outcomes[0].trial.name, title, options.output)
            print(f"picture: {options.output}")
    return 1 if different else 0


def _parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a trial and round")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--rounds", type=int, default=2, help="turns of every trial")
    parser.add_argument("--stage", type=int, help="of the context schedule, from 1 (default: last)")
    parser.add_argument(
        "--layouts", nargs="+", default=CP_LAYOUTS, choices=CP_LAYOUTS,
        help="values of --cp-layout to try (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--comm-types", nargs="+", default=None,
        choices=("p2p", "all_gather", "a2a", "a2a+p2p", "a2a+all_gather"),
        help="values of --cp-comm-type to try (default: all that the split admits)",
    )  # fmt: skip
    parser.add_argument("--output", help="PNG to draw")
    parser.add_argument("--json", help="file for the table's numbers")
    return parser


if __name__ == "__main__":
    run(main)
