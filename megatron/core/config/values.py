"""Reading values that people write: in flags, in YAML files and in mappings.

A value comes as text (a flag, a quoted YAML scalar, YAML's ``5e6``) or already typed. It is
read by the type that the field wants, or refused: never truncated, never guessed.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


def read_int(value: Any) -> int:
    """An integer from ``8``, ``"8"``, ``"1_000_000"``, ``1e9`` or ``"1e9"``.

    Raises:
        ValueError: for a bool, a fraction, an infinite number or other text.
    """
    if isinstance(value, bool):
        raise ValueError(f"{value} is not an integer")
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        text = value.strip()
        try:
            return int(text)
        except ValueError:
            pass
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not an integer") from None
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    raise ValueError(f"{value!r} is not an integer")


def read_float(value: Any) -> float:
    """A finite number from a number or from text.

    Raises:
        ValueError: for a bool, NaN, infinity or other text.
    """
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a number")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def read_bool(value: Any) -> bool:
    """A bool from ``True`` or from true/false, yes/no, on/off, 1/0 in any case.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"{value!r} is neither true nor false")


def suggestion(word: str, known: Iterable[str]) -> str:
    """``"; did you mean x?"`` for the known word nearest to ``word``, else ``""``."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def unknown_keys(given: Mapping[Any, Any], known: Iterable[str]) -> list[str]:
    """One text for each key of ``given`` that isn't known, with the nearest known one."""
    names = list(known)
    return [
        f"unknown key {key}{suggestion(str(key), names)} (known: {', '.join(sorted(names))})"
        for key in given
        if key not in names
    ]
