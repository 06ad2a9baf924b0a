"""Leaving in good order: a signal sets a flag, the loop acts on it at the end of a step.

The handler must stand before torch is imported (a signal during the import would otherwise
kill the process and lose the requeue), so this module imports nothing heavy and the entry
point installs it first. A second signal is meant: it gets the default, deadly treatment.
"""

import os
import signal
from types import FrameType
from typing import Final

REQUEUE_EXIT_CODE: Final = 99
"""Exit code of a run that saved because of a signal and wants to be started again."""

_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)


class ExitSignals:
    """Remembers the first SIGTERM or SIGUSR1; lets the second one kill."""

    def __init__(self) -> None:
        self.received: int | None = None

    def install(self) -> "ExitSignals":
        """Install the handler for SIGTERM and SIGUSR1; returns self."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)
        return self

    def uninstall(self) -> None:
        """Give both signals their default treatment back."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def give_up(self) -> None:
        """Leave signals to the system (--no-exit-signal-handler), also one that came already."""
        self.uninstall()
        if self.received is not None:
            os.kill(os.getpid(), self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
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
