"""TensorBoard and wandb: nice to have, never able to stop or slow a run.

Each logger lives on a daemon thread with a queue. Whatever it does (raise, hang in its
initialisation, hang at the end), training goes on; the first failure is said once and the
logger is off from then. Rank 0 alone has loggers.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from megatron.core.config import LoggingConfig, RunConfig

FINISH_SECONDS = 15.0
"""How long the end of a run waits for a logger to write what it has."""


class Sink(Protocol):
    """What a logging library is reduced to."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record ``values`` at ``step``."""
        ...

    def finish(self) -> None:
        """Flush and close."""
        ...


class BackgroundLogger:
    """Runs a sink on its own daemon thread and contains its failures."""

    def __init__(self, name: str, make: Callable[[], Sink], warn: Callable[[str], None]) -> None:
        self._name, self._make, self._warn = name, make, warn
        self._queue: queue.Queue[tuple[dict[str, float], int] | None] = queue.Queue(10_000)
        self._failed = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-logger", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            sink = self._make()
            while (item := self._queue.get()) is not None:
                sink.log(*item)
            sink.finish()
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            self._warn(f"{self._name} logging is off from here on ({why}); training goes on")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Hand ``values`` over; returns at once."""
        if self._failed:
            return
        try:
            self._queue.put_nowait((dict(values), step))
        except queue.Full:
            self._fail("it has not taken 10,000 records")

    def finish(self, seconds: float = FINISH_SECONDS) -> None:
        """Let the sink write what it has, for at most ``seconds``."""
        if self._failed:
            return
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            self._fail("it has not taken 10,000 records")
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._fail(f"it did not finish within {seconds:.0f} s")


class _TensorBoardSink:
    def __init__(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class _WandbSink:
    def __init__(self, config: RunConfig, run_id: str, flat: Mapping[str, Any]) -> None:
        import wandb

        settings = config.logging
        self._run = wandb.init(
            project=settings.wandb_project,
            name=settings.wandb_exp_name,
            dir=settings.wandb_save_dir,
            id=run_id,
            resume="allow",
            config=dict(flat),
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


def make_loggers(
    config: RunConfig, *, run_id: str, flat: Mapping[str, Any], warn: Callable[[str], None]
) -> list[BackgroundLogger]:
    """The loggers that the flags ask for; call on rank 0 only.

    ``run_id`` is kept in checkpoints, so a requeued job continues the same wandb run.
    """
    settings: LoggingConfig = config.logging
    loggers = []
    if settings.tensorboard_dir:
        folder = settings.tensorboard_dir
        loggers.append(BackgroundLogger("TensorBoard", lambda: _TensorBoardSink(folder), warn))
    if settings.wandb_project:
        loggers.append(BackgroundLogger("wandb", lambda: _WandbSink(config, run_id, flat), warn))
    return loggers
