"""How a process ends: its own exit hooks run, the interpreter is not taken apart.

While Python takes itself apart, a thread of C++ that then needs the interpreter lock (one of
gloo that drops the last reference to a tensor, one in the middle of a torch operation) is
unwound through frames that must not throw: ``terminate called without an active exception``,
exit by SIGABRT, after a run that was whole. Rare: the thread must come late.
"""

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End the process with ``code`` after what a plain end would do for its user.

    Waits for threads that aren't daemons, runs ``atexit`` hooks, writes out stdout and stderr.
    Destructors don't run: leave process groups and close files before.
    """
    with contextlib.suppress(KeyboardInterrupt):
        threading._shutdown()  # type: ignore[attr-defined]  # wakes and joins executors' threads
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or no reader
            stream.flush()
    os._exit(code)
