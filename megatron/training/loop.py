"""The training loop: steps, stages, evaluations, saves, and every reason to stop.

After each step all ranks agree (one all-reduce of three numbers) whether to stop or save, so a
signal to one rank, or a failed background save on one, acts on all of them at the same step.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron.core.context_extension import Stage
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.models.gpt.flops import training_flops
from megatron.training.evaluation import evaluate
from megatron.training.health import LossSpikes, step_time_spread, straggler
from megatron.training.reporting import Record, peak_tflops
from megatron.training.rerun_check import RerunMismatch
from megatron.training.signals import REQUEUE_EXIT_CODE
from megatron.training.stage_switch import enter_stage, leave_stage, stage_record
from megatron.training.train_step import StepResult, train_step
from megatron.training.trainer import Trainer
from megatron.training.watchdog import Watchdog

SKIPPED_TOO_OFTEN = 3
"""Exit code of a run that stopped because too many steps in a row weren't finite."""
OTHER_BITS = 4
"""Exit code of a run whose step gave other bits when it was computed again."""


@dataclasses.dataclass
class Interval:
    """What happened since the last log line."""

    started: float
    steps: int = 0
    tokens: int = 0
    flops: int = 0
    busy: float = 0.0
    """Seconds of work, without waits for other ranks, before the last interruption."""


class TrainingLoop:
    """Runs a trainer to the end of its schedule, or to the first reason to stop."""

    def __init__(self, trainer: Trainer, watchdog: Watchdog, *, started: float) -> None:
        self._t = trainer
        self._watchdog = watchdog
        self._spikes = LossSpikes()
        self._started = started
        name = None
        if trainer.device.type == "cuda":
            name = torch.cuda.get_device_name(trainer.device)
        self._peak = peak_tflops(trainer.config.logging.peak_tflops, name)
        self._interval = Interval(time.perf_counter())

    def run(self) -> int:
        """Train; returns the exit code."""
        trainer, state = self._t, self._t.state
        total = trainer.schedule.total_iterations
        if state.iteration >= total:
            trainer.reporter.say(f"nothing to do: {state.iteration} of {total} iterations are done")
            trainer.checkpointer.finish()
            return 0
        code = 0
        while state.iteration < total:
            stage = trainer.schedule.stage_at_iteration(state.iteration)
            stop = self._enter(stage) if stage is not trainer.stage else None
            if stop is None:
                self._watchdog.doing(f"iteration {state.iteration + 1}")
                stop = self._step()
                if stop is None:
                    stop = self._after_step()
            if stop is not None:
                code = stop
                break
        with self._watchdog.unlimited("the end of the run"):
            self._finish(finished=state.iteration >= total)
        return code

    def _enter(self, stage: Stage) -> int | None:
        """Start a stage; returns an exit code if a signal came in the meantime.

        Building, loading and opening data may take longer than a signal leaves time for, and so
        may the first evaluation and the first step.
        """
        with self._watchdog.unlimited(f"the start of stage {stage.number}"):
            enter_stage(self._t, stage)
            signal, _, _ = self._agree()
        if signal:
            return self._leave_for(signal)
        self._watchdog.limit(True)
        self._spikes.reset()
        self._first_evaluation()
        self._new_interval()
        return None

    def _new_interval(self) -> None:
        self._watchdog.busy.take()
        self._interval = Interval(time.perf_counter())

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Leave what happens inside out of the interval's times."""
        interval, busy = self._interval, self._watchdog.busy
        interval.busy += busy.take()
        began = time.perf_counter()
        yield
        interval.started += time.perf_counter() - began
        busy.take()

    def _first_evaluation(self) -> None:
        """The loss of the untrained model, so that later evaluations have a start."""
        if self._t.state.iteration == 0 and self._evaluates():
            evaluate(self._t)

    def _evaluates(self) -> bool:
        training = self._t.config.training
        return training.eval_iters > 0 and training.eval_interval > 0

    def _step(self) -> int | None:
        """Read a global batch and train on it; returns an exit code to stop with, or None."""
        trainer, state = self._t, self._t.state
        assert trainer.loader is not None
        batches = trainer.loader.next_step()
        stage = trainer.current_stage
        number = state.iteration + 1
        result: StepResult | None = None
        if number in trainer.config.training.iterations_to_skip:
            trainer.reporter.say(f"iteration {number}: skipped (--iterations-to-skip)")
            state.skipped += 1
            state.skipped_in_a_row = 0
        else:
            try:
                result = train_step(trainer, batches)
            except RerunMismatch as error:
                # Nothing was updated: the state is still that of the step before.
                trainer.optimizer.zero_grad()
                trainer.reporter.warn(f"{error}; stopping after iteration {state.iteration}")
                return OTHER_BITS
            self._count(result, number)
        state.iteration = number
        state.stage = stage.index
        state.data = trainer.loader.state
        state.consumed_samples = trainer.loader.consumed_samples
        state.consumed_tokens = trainer.loader.consumed_tokens
        self._interval.steps += 1
        self._interval.tokens += stage.tokens_per_step
        if result is not None:
            self._interval.flops += training_flops(
                trainer.config.model, stage.tokens_per_step, result.pairs
            )
        if number % trainer.config.logging.log_interval == 0 and result is not None:
            trainer.reporter.training(self._record(result), trainer.schedule.total_iterations)
        return None

    def _count(self, result: StepResult, number: int) -> None:
        state = self._t.state
        if result.applied:
            state.optimizer_steps += 1
            state.skipped_in_a_row = 0
            spike = self._spikes.look(result.loss)
            if spike is not None:
                self._t.reporter.warn(f"iteration {number}: {spike}")
            return
        state.skipped += 1
        state.skipped_in_a_row += 1
        why = "no token has a loss" if result.loss_tokens == 0 else "not finite"
        self._t.reporter.warn(
            f"iteration {number}: update skipped, {why} (loss {result.loss}, gradient norm "
            f"{result.grad_norm}; {state.skipped_in_a_row} in a row)"
        )

    def _record(self, result: StepResult) -> Record:
        trainer, state, interval = self._t, self._t.state, self._interval
        now = time.perf_counter()
        elapsed = max(now - interval.started, 1e-9)
        tflops = interval.flops / elapsed / 1e12 / dist.get_world_size()
        spread = step_time_spread(interval.busy + self._watchdog.busy.take(), interval.steps)
        slow = straggler(spread, interval.steps)
        if slow is not None:
            trainer.reporter.say(slow)
        record: Record = {
            "iteration": state.iteration,
            **stage_record(trainer.current_stage),
            "consumed_samples": state.consumed_samples,
            "consumed_tokens": state.consumed_tokens,
            "lm_loss": result.loss,
            "loss_tokens": result.loss_tokens,
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "iteration_time": elapsed / interval.steps,
            "tokens_per_second": interval.tokens / elapsed,
            "tflops_per_device": tflops,
            "mfu": tflops / self._peak if self._peak else None,
            "skipped": state.skipped,
            **spread,
            **trainer.attention.take(interval.steps),
        }
        self._new_interval()
        return record

    def _after_step(self) -> int | None:
        """Evaluate, save, decide; returns an exit code to stop with, or None."""
        trainer, state = self._t, self._t.state
        training = trainer.config.training
        signal, overtime, failed = self._agree()
        if failed:
            self._raise_failure()
        saves = trainer.checkpointer.saves
        if signal and saves:
            self._save()  # first: the evaluation may take longer than the signal leaves
        if self._evaluates() and state.iteration % training.eval_interval == 0:
            with self._apart():
                evaluate(trainer)
        interval = trainer.config.checkpoint.save_interval
        if saves and not signal and interval and state.iteration % interval == 0:
            self._save()
        if signal:
            return self._leave_for(signal)
        if overtime:
            minutes = training.exit_duration_in_mins
            trainer.reporter.say(f"--exit-duration-in-mins {minutes}: leaving")
            return 0
        if training.exit_interval and state.iteration % training.exit_interval == 0:
            trainer.reporter.say(f"--exit-interval {training.exit_interval}: leaving")
            return 0
        if state.skipped_in_a_row >= training.max_skipped_iterations > 0:
            trainer.reporter.warn(
                f"{state.skipped_in_a_row} steps in a row were not finite "
                f"(--max-skipped-iterations {training.max_skipped_iterations}); stopping at "
                f"token {state.consumed_tokens:,} of the stream"
            )
            return SKIPPED_TOO_OFTEN
        return None

    def _leave_for(self, signal: int) -> int:
        """Say so; the exit code says whether the same command goes on from here."""
        trainer = self._t
        options = trainer.config.checkpoint
        leaving = f"a signal came: leaving after iteration {trainer.state.iteration}"
        if not trainer.checkpointer.saves:
            trainer.reporter.warn(f"{leaving}; nothing was saved, there is no --save")
            return 128 + signal
        if options.load is None:
            leaving += f"; to go on from here, add --load {options.save}"
        trainer.reporter.say(leaving)
        return REQUEUE_EXIT_CODE

    def _agree(self) -> tuple[int, bool, bool]:
        """(number of a signal that came to a rank or 0, overtime, a failed save)."""
        trainer = self._t
        minutes = trainer.config.training.exit_duration_in_mins
        overtime = minutes is not None and time.time() - self._started > minutes * 60
        heeds = trainer.config.training.exit_signal_handler
        flags = torch.tensor(
            [
                (trainer.signals.received or 0) if heeds else 0,
                overtime,
                trainer.checkpointer.failure() is not None,
            ],
            dtype=torch.int32,
        )
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        signal, late, failed = flags.tolist()
        return signal, bool(late), bool(failed)

    def _raise_failure(self) -> None:
        failure = self._t.checkpointer.failure()
        raise failure or CheckpointError("the background save failed on another rank")

    def _save(self) -> None:
        trainer = self._t
        began = time.perf_counter()
        saving = f"the save of iteration {trainer.state.iteration}"
        with self._apart(), self._watchdog.limited(saving):
            trainer.checkpointer.save(trainer.state)
        seconds = time.perf_counter() - began
        how = "snapshot" if trainer.config.checkpoint.async_save else "saved"
        trainer.reporter.say(
            f"checkpoint of iteration {trainer.state.iteration}: {how} in {seconds:.2f} s, "
            f"{trainer.config.checkpoint.save}"
        )

    def _finish(self, *, finished: bool) -> None:
        trainer, state = self._t, self._t.state
        training = trainer.config.training
        if finished and training.eval_iters > 0:
            if training.eval_interval <= 0 or state.iteration % training.eval_interval:
                evaluate(trainer)
            evaluate(trainer, "test")
        checkpointer = trainer.checkpointer
        if checkpointer.saves and checkpointer.last_saved != state.iteration > 0:
            self._save()
        with self._watchdog.limited("the end of the last save"):
            checkpointer.finish()
        leave_stage(trainer)
        if finished:
            trainer.reporter.say(
                f"finished: {state.iteration} iterations, {state.consumed_tokens:,} tokens"
            )
