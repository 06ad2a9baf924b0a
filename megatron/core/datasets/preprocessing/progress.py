"""How far a long run is: documents/s, MB/s, tokens and the time left, on one line.

On a terminal a bar that is redrawn; elsewhere (log files of batch jobs) a line every 30 seconds.
"""

import sys
import time
from typing import Any, TextIO

_LOG_SECONDS = 30.0
_DRAW_SECONDS = 0.25


class Progress:
    """Counts work; ``total`` is in bytes of input."""

    def __init__(self, total: int, stream: TextIO | None = None, unit: str = "tokens") -> None:
        self._stream = sys.stderr if stream is None else stream
        self._unit = unit
        self._total = max(total, 1)
        self._done = self._documents = self._tokens = 0
        self.start = self._last = time.monotonic()
        self._bar: Any = None
        if self._stream.isatty():
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # no thread of its own
            self._bar = tqdm(
                total=self._total,
                file=self._stream,
                unit="B",
                unit_scale=True,
                mininterval=_DRAW_SECONDS,
                dynamic_ncols=True,
            )

    def add(self, done: int, documents: int, tokens: int) -> None:
        """``done`` more bytes of input are finished."""
        self._done += done
        self._documents += documents
        self._tokens += tokens
        now = time.monotonic()
        if self._bar is not None:
            if now - self._last >= _DRAW_SECONDS:
                rate = self._documents / max(now - self.start, 1e-9)
                self._bar.set_postfix_str(
                    f"{rate:,.0f} documents/s, {self._tokens:,} {self._unit}", refresh=False
                )
                self._last = now
            self._bar.update(done)
        elif now - self._last >= _LOG_SECONDS:
            self._last = now
            print(self.line(now), file=self._stream, flush=True)

    def line(self, now: float) -> str:
        """The state in words."""
        seconds = max(now - self.start, 1e-9)
        left = seconds * (self._total - self._done) / max(self._done, 1)
        return (
            f"{100 * self._done / self._total:5.1f} % | {self._documents:,} documents, "
            f"{self._documents / seconds:,.0f}/s | {self._done / 1e6 / seconds:.2f} MB/s | "
            f"{self._tokens:,} {self._unit} | {_clock(left)} left"
        )

    def close(self) -> None:
        """Leave the terminal in order."""
        if self._bar is not None:
            self._bar.close()


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
