"""The errors of this room, and how a rank's failure reaches all ranks."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the file or the rank."""


class CheckpointMismatch(CheckpointError):
    """A sound checkpoint that isn't of this run: other flags are needed, not another checkpoint."""


def describe(error: BaseException) -> str:
    """Type and message of ``error`` in one line, with the reasons of torch's checkpoint error."""
    failures = getattr(error, "failures", None)
    if failures:
        return _by_rank({rank: describe(wrapped[0]) for rank, wrapped in failures.items()})
    if isinstance(error, CheckpointError):
        return f"{error}"
    return f"{type(error).__name__}: {error}"


def is_mismatch(error: BaseException) -> bool:
    """Whether nothing but mismatches led to ``error``."""
    failures = getattr(error, "failures", None)
    if failures:
        return all(is_mismatch(wrapped[0]) for wrapped in failures.values())
    return isinstance(error, CheckpointMismatch)


def kind_of(error: BaseException) -> type[CheckpointError]:
    """What to raise in the place of ``error``."""
    return CheckpointMismatch if is_mismatch(error) else CheckpointError


def _by_rank(texts: Mapping[int, str]) -> str:
    """``rank 0: why; ranks 1, 2: why``: the same reason once."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"{_ranks(found)}: {text}" for text, found in ranks.items())


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"


def on_all_ranks(action: Callable[[], T], group: dist.ProcessGroup | None, what: str) -> T:
    """Run ``action`` on every rank of ``group``; if it fails on one, raise on all.

    Raises:
        CheckpointError: on every rank, naming each rank that failed and why;
            :class:`CheckpointMismatch` if all that failed met one.
    """
    result: T | None = None
    failure: tuple[str, bool] | None = None
    try:
        result = action()
    except Exception as error:
        failure = describe(error), is_mismatch(error)
    failures: list[tuple[str, bool] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group=group)
    failed = {rank: entry for rank, entry in enumerate(failures) if entry}
    if failed:
        kind = CheckpointMismatch if all(entry[1] for entry in failed.values()) else CheckpointError
        reasons = _by_rank({rank: text for rank, (text, _) in failed.items()})
        raise kind(f"{what} failed on {reasons}")
    return result  # type: ignore[return-value]
