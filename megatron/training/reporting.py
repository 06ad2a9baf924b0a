"""What a run says: the log line, the metrics record, and where both go.

Rank 0 alone writes. A record carries plain numbers; the log line is made from the record, so
the two can't disagree.
"""

import contextlib
import re
import sys
import time
from typing import Any, TextIO

from megatron.core.config import RunConfig
from megatron.training.loggers import BackgroundLogger, make_loggers
from megatron.training.metrics_file import MetricsFile

Record = dict[str, Any]

KNOWN_PEAK_TFLOPS = {
    "A100": 312.0,
    "A800": 312.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H200": 989.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "GB200": 2500.0,
    "L40S": 362.0,
    "A40": 149.7,
    "A10": 125.0,
    "V100": 125.0,
}
"""Dense bf16 (V100: fp16) tensor-core peaks from NVIDIA's data sheets, longest name first."""


def peak_tflops(given: float | None, device_name: str | None) -> float | None:
    """Peak of one device: the flag's value, else the known one, else None (a CPU)."""
    if given is not None:
        return given
    if device_name is None:
        return None
    words = re.split(r"[^A-Za-z0-9]+", device_name)  # "A40" is not in "RTX A4000"
    for name in sorted(KNOWN_PEAK_TFLOPS, key=len, reverse=True):
        if all(part in words for part in name.split()):
            return KNOWN_PEAK_TFLOPS[name]
    return None


def format_training_line(record: Record, total_iterations: int) -> str:
    """One readable line of a training record."""
    parts = [
        f"iteration {record['iteration']:>6}/{total_iterations}",
        f"stage {record['stage']}",
        f"seq length {record['seq_length']}",
        f"cp {record['context_parallel_size']}",
        f"consumed tokens {record['consumed_tokens']:,}",
        f"lm loss {_number(record['lm_loss'], '.6E')}",
        f"grad norm {_number(record['grad_norm'], '.3f')}",
        f"learning rate {_number(record['learning_rate'], '.3E')}",
        f"time per iteration (ms) {record['iteration_time'] * 1e3:.1f}",
        f"tokens/s {record['tokens_per_second']:,.0f}",
        f"TFLOP/s/device {record['tflops_per_device']:.3g}",
        f"MFU {'-' if record['mfu'] is None else format(record['mfu'], '.1%')}",
    ]
    if record["context_parallel_size"] > 1 and "cp_comm_type" in record:
        parts.append(f"cp {record['cp_comm_type']} balance {record['cp_work_balance']:.2f}")
        parts.append(f"cp wait (ms) {record['cp_exposed_wait'] * 1e3:.1f}")
    if record.get("skipped"):
        parts.append(f"skipped {record['skipped']}")
    return " | ".join(parts)


def _number(value: float | None, spec: str) -> str:
    return "nan" if value is None else format(value, spec)


def _print(text: str, stream: TextIO | None) -> None:
    """Print, or don't: a log on a full disk or without a reader stops no run."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=stream, flush=True)


class Reporter:
    """Log, metrics file, TensorBoard and wandb of one run; silent on ranks other than 0."""

    def __init__(self, config: RunConfig, *, rank: int, flat: Record) -> None:
        self._rank = rank
        self._file: MetricsFile | None = None
        self._lost = False
        self._loggers: list[BackgroundLogger] = []
        self._config = config
        self._flat = flat

    def open(self, *, run_id: str, resumed: bool) -> None:
        """Open the sinks; on a resume the metrics file goes on, else it starts anew.

        ``run_id`` is wandb's, kept in checkpoints.
        """
        if self._rank != 0:
            return
        if self._config.logging.metrics_file:
            self._file = MetricsFile(self._config.logging.metrics_file, fresh=not resumed)
        self._loggers = make_loggers(self._config, run_id=run_id, flat=self._flat, warn=self.warn)

    def say(self, text: str) -> None:
        """Print lines with the time, on rank 0."""
        if self._rank == 0:
            stamp = time.strftime("[%Y-%m-%d %H:%M:%S]")
            for line in text.splitlines():
                _print(f"{stamp} {line}", sys.stdout)

    def warn(self, text: str) -> None:
        """Print a warning to standard error, on rank 0."""
        if self._rank == 0:
            _print(f"warning: {text}", sys.stderr)

    def training(self, record: Record, total_iterations: int) -> None:
        """Report a training record."""
        self.say(format_training_line(record, total_iterations))
        self._write(record)

    def evaluation(self, record: Record) -> None:
        """Report an evaluation record (``eval_lm_loss``, ``split``)."""
        self.say(
            f"evaluation on {record['split']} at iteration {record['iteration']} | "
            f"lm loss {_number(record['eval_lm_loss'], '.6E')} | loss tokens "
            f"{record['loss_tokens']:,}"
        )
        self._write(record)

    def _write(self, record: Record) -> None:
        if self._file is not None:
            try:
                self._file.write(record)
                self._lost = False
            except OSError as error:  # said when it begins; the next line may fit again
                if not self._lost:
                    self.warn(
                        f"--metrics-file {self._config.logging.metrics_file}: {error.strerror}; "
                        "lines are lost until it can be written again; training goes on"
                    )
                self._lost = True
        scalars = {
            key: float(value)
            for key, value in record.items()
            if isinstance(value, int | float) and key != "iteration"
        }
        for logger in self._loggers:
            logger.log(scalars, int(record["iteration"]))

    def close(self) -> None:
        """Let loggers finish (for a bounded time) and close the file."""
        for logger in self._loggers:
            logger.finish()
        self._loggers = []
        if self._file is not None:
            self._file.close()
            self._file = None
