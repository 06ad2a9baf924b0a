"""Settings of an attention plan that can't be done exactly, refused before anything is planned."""

import contextlib
import math
import operator
from typing import Any

import torch

FLOAT_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def whole_number(name: str, value: Any) -> int:
    """``value`` as an int; any integer type.

    Raises:
        ValueError: for anything else (True and 2.0 are no whole numbers).
    """
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise ValueError(f"{name} {value!r} must be a whole number")


def positive(name: str, value: Any) -> int:
    """``value`` as an int of at least 1.

    Raises:
        ValueError: for anything else.
    """
    number = whole_number(name, value)
    if number < 1:
        raise ValueError(f"{name} {value} must be at least 1")
    return number


def check_window(window: Any, causal: bool) -> int | None:
    """The window as an int, or None.

    Raises:
        ValueError: for one that is no positive whole number or comes without causality, naming
            value and cure.
    """
    if window is None:
        return None
    try:
        number = positive("window", window)
    except ValueError as error:
        raise ValueError(f"{error} (1: each token sees itself); or None") from None
    if not causal:
        raise ValueError(
            f"window {window} means keys j with 0 <= i - j < window and so needs causal=True; "
            "pass window=None for bidirectional attention"
        )
    return number


def check_settings(head_dim: Any, *, scale: Any, dtype: Any, max_exchange_bytes: Any) -> None:
    """Refuse what kernels would take and answer with nonsense.

    Raises:
        ValueError: naming setting, value and rule.
    """
    positive("head_dim", head_dim)
    positive("max_exchange_bytes", max_exchange_bytes)
    if dtype not in FLOAT_TYPES:
        names = ", ".join(str(kind) for kind in FLOAT_TYPES)
        raise ValueError(f"dtype {dtype} must be one of {names}")
    if scale is not None and not (isinstance(scale, int | float) and 0.0 < scale < math.inf):
        raise ValueError(
            f"scale {scale!r} must be a finite number above 0 (a mask of -inf times 0 is NaN); "
            "None means 1 / sqrt(head_dim)"
        )
