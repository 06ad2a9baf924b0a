"""Leaving in good order: a signal sets a flag, the loop acts on it at the end of a step.

The handler must stand before torch is imported (a signal during the import would otherwise
kill the process and lose the requeue), so this module imports nothing heavy and the entry
point installs it first. A second signal is meant: it gets the default, deadly treatment; so does
the first one while the ranks meet, where there is nothing to save.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

REQUEUE_EXIT_CODE: Final = 99
"""Exit code of a run that saved because of a signal and wants to be started again."""

_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)
STUCK_SECONDS: Final = 2.0
"""How long the main thread may take to act on a second signal."""


class ExitSignals:
    """Remembers the first SIGTERM or SIGUSR1; lets the second one kill."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._pipe: tuple[int, int] | None = None
        self._arrived: list[tuple[int, float]] = []
        self._deadly: str | None = None
        self._leaving = threading.Lock()
        self.before_dying: Callable[[int], None] | None = None
        """Called with the second signal before it kills."""

    def install(self) -> "ExitSignals":
        """Install the handler for SIGTERM and SIGUSR1; returns self."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)
        return self

    def notice_from_threads(self) -> None:
        """Let other threads see signals while the main one is stuck outside of Python."""
        if self._pipe is not None:
            return
        self._pipe = os.pipe()
        for descriptor in self._pipe:
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)

    @contextlib.contextmanager
    def deadly(self, what: str) -> Iterator[None]:
        """While ``what`` goes on, any signal ends the process at once, with 128 + its number.

        For waits without anything to save. A thread sees to it, since the main one may stand
        outside of Python for minutes.
        """
        self.notice_from_threads()
        self._deadly = what
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.1):
                self._read()
                if self._arrived:
                    self._leave(self._arrived[0][0])

        thread = threading.Thread(target=watch, name="signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._deadly = None
            over.set()
            thread.join()

    def _leave(self, number: int) -> None:
        what = self._deadly
        if what is None:
            return
        if not self._leaving.acquire(blocking=False):
            time.sleep(1)  # the other thread is about to end the process
            return
        name = signal.Signals(number).name
        os.write(2, f"pretrain: {name} while {what}: leaving, nothing to save\n".encode())
        os._exit(128 + number)

    def _read(self) -> None:
        assert self._pipe is not None
        now = time.monotonic()
        try:
            numbers = os.read(self._pipe[0], 64)
        except BlockingIOError:
            return
        self._arrived += [(number, now) for number in numbers if number in _SIGNALS]

    def overdue(self) -> int | None:
        """The second signal, if the main thread hasn't died of it in time; for other threads.

        Python runs handlers in the main thread alone, between its instructions: in a
        communication that doesn't end, neither the first nor the second signal would do a thing.
        """
        if self._pipe is None:
            return None
        self._read()
        if len(self._arrived) > 1 and time.monotonic() - self._arrived[1][1] > STUCK_SECONDS:
            return self._arrived[1][0]
        return None

    def uninstall(self) -> None:
        """Give both signals their default treatment back."""
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def give_up(self) -> None:
        """Leave signals to the system (--no-exit-signal-handler), also one that came already."""
        self.uninstall()
        if self.received is not None:
            os.kill(os.getpid(), self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._leave(number)
        if self.received is not None:
            if self.before_dying is not None:
                self.before_dying(number)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.received = number
        name = signal.Signals(number).name
        os.write(2, f"{name}: saving after this step, then leaving\n".encode())

    @property
    def name(self) -> str:
        """Name of the signal that came, or an empty string."""
        return "" if self.received is None else signal.Signals(self.received).name
