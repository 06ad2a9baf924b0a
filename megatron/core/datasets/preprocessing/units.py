"""Units of work: small pieces of the input that a worker process reads and tokenizes.

A ``Source`` is an input file (or folder); it cuts its share into ``Unit`` s of about
``UNIT_BYTES`` of text, in order. A unit is sent to a worker: where the worker can read for itself
(plain jsonl, text files) it is only a place; where reading is sequential (compressed files,
record batches) it carries the bytes. A document is never cut: one of 16 MB makes a unit of 16 MB.
"""

from collections.abc import Iterator
from typing import Protocol

from megatron.core.datasets.preprocessing.records import Record

UNIT_BYTES = 1 << 19
"""About a tenth of a second of tokenizing: small enough to balance, large beside its overhead."""


class Unit(Protocol):
    """A piece of the input."""

    @property
    def weight(self) -> int:
        """Its part of the source's size, for the progress bar."""

    def records(self, keys: tuple[str, ...]) -> Iterator[Record]:
        """What it holds, in order (called in a worker)."""

    def locate(self, index: int) -> str:
        """``file:line`` (or the like) of its record ``index`` (called where it was made)."""


class Source(Protocol):
    """An input."""

    @property
    def path(self) -> str:
        """As the user would name it."""

    @property
    def size(self) -> int:
        """Its length on the axis of all inputs (bytes, at least 1)."""

    def units(self, start: int, end: int) -> Iterator[Unit]:
        """The documents that start in ``[start, end)`` of ``size``, in order."""
