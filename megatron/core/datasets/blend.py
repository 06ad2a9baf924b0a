"""What the user says about a blend, as numbers: weights, splits, length buckets.

Pure parsing and arithmetic; no file is opened here.
"""

import dataclasses
import math
import os
from collections.abc import Sequence

from megatron.core.config.values import read_int
from megatron.core.datasets.index_format import DatasetError

PARTS = ("train", "valid", "test")


def parse_blend(
    data_path: Sequence[str], flag: str = "--data-path"
) -> tuple[list[str], list[float] | None]:
    """``w1 p1 w2 p2 ...`` or ``p1 p2 ...`` -> (prefixes, weights or None).

    Weights are shares of the tokens and need not sum to 1; those of zero are kept. Without
    weights (None) every corpus weighs as many tokens as it has.

    Raises:
        DatasetError: on no path, a bad weight or weights that are all zero.
    """
    values = [os.fspath(value) for value in data_path]
    if not values:
        raise DatasetError(f"{flag} is empty; give a prefix, or weight prefix weight prefix ...")
    numbers = [_number(value) for value in values[::2]]
    if len(values) % 2 or all(number is None for number in numbers):
        stray = next((v for v in values if _number(v) is not None and not _exists(v)), None)
        if stray is not None:
            raise DatasetError(
                f"{flag} {' '.join(values)}: {stray} looks like a weight, but weights and "
                f"prefixes don't alternate; give weight prefix weight prefix ..., or prefixes only"
            )
        return values, None
    weights = []
    for value, number in zip(values[::2], numbers):
        if number is None or not math.isfinite(number) or number < 0:
            raise DatasetError(
                f"{flag}: weight {value} must be a number >= 0; give weight prefix weight "
                f"prefix ..., or prefixes only"
            )
        weights.append(number)
    if not sum(weights) > 0:
        raise DatasetError(f"{flag}: all weights are zero; at least one must be > 0")
    return values[1::2], weights


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _exists(prefix: str) -> bool:
    return os.path.exists(prefix + ".idx")


def parse_split(split: str) -> tuple[float, float, float]:
    """``"969,30,1"`` -> shares (train, valid, test) that sum to 1.

    Raises:
        DatasetError: if it isn't one to three numbers >= 0, one of them > 0.
    """
    values = [_number(value) for value in split.replace("/", ",").split(",") if value.strip()]
    shares = [value for value in values if value is not None]
    bad = len(shares) != len(values) or not 1 <= len(shares) <= 3
    if bad or any(not math.isfinite(s) or s < 0 for s in shares) or not sum(shares) > 0:
        raise DatasetError(
            f"--split {split} must be up to three numbers >= 0, not all zero: train,valid,test "
            f"(e.g. 969,30,1)"
        )
    shares += [0.0] * (3 - len(shares))
    train, valid, test = (share / sum(shares) for share in shares)
    return train, valid, test


def split_range(shares: Sequence[float], part: str, num_documents: int) -> tuple[int, int]:
    """[begin, end) of the documents of ``part``: consecutive, disjoint, all covered.

    The bounds are Megatron's: cumulative shares times documents, rounded.
    """
    index = PARTS.index(part)
    begin, end = (int(round(sum(shares[:i]) * num_documents)) for i in (index, index + 1))
    return begin, end


@dataclasses.dataclass(frozen=True)
class LengthBucket:
    """Documents of ``low <= tokens < high``, and how much oftener than by nature they come."""

    low: int
    high: int | None
    weight: float

    def __str__(self) -> str:
        return f"{self.low}+" if self.high is None else f"{self.low}-{self.high}"


def parse_upsampling(rules: Sequence[str] | None) -> list[LengthBucket]:
    """``["16384:2", "65536:4"]`` -> buckets from 0 tokens up; below the first the weight is 1.

    A weight is relative to a document's natural frequency, within its corpus: the shares
    between corpora stay as the blend says (per-source length upsampling, Fu et al., "Data
    Engineering for Scaling Language Models to 128K Context", 2024).

    Raises:
        DatasetError: on a malformed rule, a length given twice or nothing left.
    """
    weights: dict[int, float] = {0: 1.0}
    seen: set[int] = set()
    for rule in rules or ():
        low_text, _, weight_text = rule.partition(":")
        weight = _number(weight_text)
        try:
            low = read_int(low_text)
        except ValueError:
            low = -1
        if low < 0 or weight is None or not math.isfinite(weight):
            raise DatasetError(
                f"--long-document-upsampling {rule} must be MIN_TOKENS:WEIGHT (e.g. 16384:2)"
            )
        if low in seen or weight < 0:
            problem = "this length is given twice" if low in seen else "the weight must be >= 0"
            raise DatasetError(f"--long-document-upsampling {rule}: {problem}")
        seen.add(low)
        weights[low] = weight
    if not any(weight > 0 for weight in weights.values()):
        raise DatasetError("--long-document-upsampling: all weights are zero; nothing is left")
    lows = sorted(weights)
    highs: list[int | None] = [*lows[1:], None]
    return [LengthBucket(low, high, weights[low]) for low, high in zip(lows, highs)]
