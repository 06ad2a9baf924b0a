"""Standard streams that a job was started without (``2>&-``, some schedulers' prologues).

The next file or socket that the process opens gets the number of a closed stream: words of a
signal handler or of torch's C++ that are meant for stderr would go into a checkpoint, or into a
connection to another rank. And ``faulthandler`` refuses to work without a ``sys.stderr``.
"""

import os
import sys


def open_missing_streams() -> None:
    """Connect closed standard streams with ``/dev/null``."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, this one
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
