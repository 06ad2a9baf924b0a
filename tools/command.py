"""What all tools share: how a command ends.

Exit codes: 0 done; 1 the data, the files or a tokenizer can't be worked with (one line on stderr
says which, and the cure); 2 the command line is wrong; 128 + N ended by signal N, having removed
what was half written.
"""

import argparse
import difflib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from megatron.core.datasets.preprocessing.records import WorkerDied
from megatron.training.leave import leave


class Ended(BaseException):
    """A signal asked the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Parser(argparse.ArgumentParser):
    """No abbreviations; an unknown flag is answered with the nearest known one."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse(self, args: Sequence[str] | None = None) -> argparse.Namespace:
        """As argparse's ``parse_args``, with suggestions."""
        found, unknown = self.parse_known_args(args)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            name = unknown[0].split("=")[0]
            near = difflib.get_close_matches(name, flags, 1)
            self.error(f"unknown {name}" + (f"; did you mean {near[0]}?" if near else ""))
        return found

    def at_least(self, smallest: int, args: argparse.Namespace, *names: str) -> None:
        """End with 2 if a number given for one of the flags ``names`` is smaller."""
        for name in names:
            given = getattr(args, name.replace("-", "_"))
            for number in given if isinstance(given, list) else [given]:
                if number is not None and number < smallest:
                    self.error(f"--{name} {number} must be at least {smallest}")

    def refuse(self, flag: str, why: str) -> None:
        """A flag of Megatron's that is known and not supported."""
        self.add_argument(flag, nargs="*", action=_Refuse, help=argparse.SUPPRESS, const=why)


class _Refuse(argparse.Action):
    def __call__(self, parser: Any, *rest: Any) -> NoReturn:
        parser.error(f"{rest[-1]} is not supported: {self.const}")
        raise AssertionError("error() leaves")


def writable(flag: str, path: str) -> None:
    """Make the folder of a file that a long command will write at its end.

    Raises:
        ValueError: if the file can't be written, naming flag and reason.
    """
    folder, reason = os.path.dirname(os.path.abspath(path)), None
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        reason = error.strerror or f"{error}"
    if os.path.isdir(path):
        reason = "Is a directory"
    elif reason is None and not os.access(path if os.path.exists(path) else folder, os.W_OK):
        reason = "no permission"
    if reason:
        raise ValueError(f"{flag} {path} can't be written: {reason}")


def cores() -> int:
    """How many processes may run at once here (a batch job may own a part of its node)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def handle_signals(handler: Any) -> None:
    """Set what SIGTERM, SIGINT and SIGHUP do; one that is ignored (nohup) stays ignored."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def run(command: Callable[[], int | None]) -> NoReturn:
    """Run a command and leave with its exit code; user errors become one line."""
    handle_signals(_end)
    try:
        code = command() or 0
        sys.stdout.flush()
    except Ended as end:
        print(f"ended by {signal.Signals(end.number).name}", file=sys.stderr)
        code = 128 + end.number
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (ValueError, OSError, WorkerDied) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    leave(code)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    handle_signals(signal.SIG_IGN)  # cleaning up is not interrupted again
    raise Ended(number)
