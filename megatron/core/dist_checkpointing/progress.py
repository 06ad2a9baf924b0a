"""How a save or a load says that it gets on: a function that it calls for each block of a file.

Whoever watches for hangs passes one in; how long a save takes as a whole says nothing.
"""

from collections.abc import Callable

Progress = Callable[[], None]


def no_progress() -> None:
    """Nobody watches."""
