"""The one error of this room, and how a rank's failure reaches all ranks."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the file or the rank."""


def describe(error: BaseException) -> str:
    """Type and message of ``error`` in one line, with the reasons of torch's checkpoint error."""
    failures = getattr(error, "failures", None)
    if failures:
        parts = [f"rank {rank}: {describe(wrapped[0])}" for rank, wrapped in failures.items()]
        return "; ".join(sorted(parts))
    return f"{type(error).__name__}: {error}"


def on_all_ranks(action: Callable[[], T], group: dist.ProcessGroup | None, what: str) -> T:
    """Run ``action`` on every rank of ``group``; if it fails on one, raise on all.

    Raises:
        CheckpointError: on every rank, naming each rank that failed and why.
    """
    result: T | None = None
    message: str | None = None
    try:
        result = action()
    except Exception as error:
        message = describe(error)
    messages: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, message, group=group)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(messages) if text]
    if failed:
        raise CheckpointError(f"{what} failed on {'; '.join(failed)}")
    return result  # type: ignore[return-value]
