"""Field metadata from which command-line flags are generated.

A config is a frozen dataclass; each field is one flag. ``hidden_size`` becomes
``--hidden-size``; a ``bool`` becomes ``--x`` and ``--no-x``. The metadata made here says
what argparse needs to know and nothing else: checks between fields live elsewhere.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

METADATA_KEY = "flag"


@dataclasses.dataclass(frozen=True)
class FlagInfo:
    """What a generated flag shows and accepts."""

    help: str
    choices: tuple[str, ...] | None = None
    metavar: str | tuple[str, ...] | None = None
    nargs: str | int | None = None
    off_name: str | None = None
    """For a bool: one more name of the flag that turns it off, beside ``--no-<name>``."""


def flag(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    metavar: str | tuple[str, ...] | None = None,
    nargs: str | int | None = None,
    off_name: str | None = None,
) -> Any:
    """A dataclass field with a default and the metadata of its flag."""
    info = FlagInfo(help, tuple(choices) if choices else None, metavar, nargs, off_name)
    return dataclasses.field(default=default, metadata={METADATA_KEY: info})


def flag_info(field: "dataclasses.Field[Any]") -> FlagInfo | None:
    """The flag metadata of ``field``, or None for a field without a flag."""
    info = field.metadata.get(METADATA_KEY)
    assert info is None or isinstance(info, FlagInfo)
    return info


def flag_name(field_name: str) -> str:
    """``hidden_size`` -> ``--hidden-size``."""
    return "--" + field_name.replace("_", "-")


def off_names(field_name: str, info: FlagInfo) -> tuple[str, ...]:
    """The flags that turn a bool off: the ``off_name`` first, then ``--no-<name>``.

    A field that is itself named ``no_...`` is turned off by the name without it.
    """
    if field_name.startswith("no_"):
        plain = flag_name(field_name.removeprefix("no_"))
    else:
        plain = flag_name("no_" + field_name)
    return (info.off_name, plain) if info.off_name else (plain,)
