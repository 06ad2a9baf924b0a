"""Moments of a run at which a kill campaign strikes, and what happens there.

``strike(rank, moment=..., count=..., victim=..., marker=...)`` is a hook for
``tests.utils.jobs.Job``: in the ``count``-th call (from 0) of the moment's function the victim
kills itself (``marker`` None), or creates ``marker`` and waits there for whoever kills all.
"""

import dataclasses
import importlib
import os
import signal
import time
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Moment:
    """A function of the product, and whether the kill comes before or after its work."""

    module: str
    name: str
    after: bool = False
    only_first_rank: bool = False
    """Rank 0 alone gets there."""
    in_resume: bool = False
    """It comes in a run that loads."""
    most: int = 3
    """``count`` is below this."""


MOMENTS = {
    "reading a step's rows": Moment("megatron.core.datasets.BatchLoader", "next_step", most=7),
    "forward and backward": Moment("megatron.training.train_step", "forward_backward", most=7),
    "after the gradients": Moment(
        "megatron.training.train_step", "forward_backward", after=True, most=7
    ),
    "after an update": Moment("megatron.training.loop", "train_step", after=True, most=7),
    "stage boundary": Moment("megatron.training.loop", "enter_stage"),
    "after a stage boundary": Moment("megatron.training.loop", "enter_stage", after=True),
    "evaluation": Moment("megatron.training.loop", "evaluate"),
    "before writing tensors": Moment(
        "megatron.core.dist_checkpointing.checkpoint_io.ChecksumWriter", "write_data"
    ),
    "after writing tensors": Moment(
        "megatron.core.dist_checkpointing.checkpoint_io.ChecksumWriter", "write_data", after=True
    ),
    "before the checksums": Moment(
        "megatron.core.dist_checkpointing.directory", "write_checksums", only_first_rank=True
    ),
    "before the rename": Moment(
        "megatron.core.dist_checkpointing.directory", "publish", only_first_rank=True
    ),
    "between rename and pointer": Moment(
        "megatron.core.dist_checkpointing.directory", "write_pointer", only_first_rank=True
    ),
    "between pointer and pruning": Moment(
        "megatron.core.dist_checkpointing.directory", "prune", only_first_rank=True
    ),
    "after pruning": Moment(
        "megatron.core.dist_checkpointing.directory", "prune", after=True, only_first_rank=True
    ),
    "choosing a checkpoint": Moment(
        "megatron.training.checkpointing", "choose_checkpoint", in_resume=True, most=1
    ),
    "verifying a checkpoint": Moment(
        "megatron.training.checkpointing", "verify_checkpoint", in_resume=True, most=1
    ),
    "reading tensors": Moment(
        "megatron.training.checkpointing", "read_pieces", in_resume=True, most=1
    ),
    "after reading tensors": Moment(
        "megatron.training.checkpointing", "read_pieces", after=True, in_resume=True, most=1
    ),
}


def _holder(path: str) -> Any:
    """A module, or a class in one."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, name = path.rsplit(".", 1)
        return getattr(importlib.import_module(module), name)


def strike(rank: int, *, moment: str, count: int, victim: int, marker: str | None) -> None:
    """Arm one kill; see the module."""
    if rank != victim:
        return
    spec = MOMENTS[moment]
    holder = _holder(spec.module)
    original = getattr(holder, spec.name)
    calls = iter(range(1 << 30))

    def kill() -> None:
        if marker is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            Path(marker).touch()
            time.sleep(60)

    def struck(*args: Any, **kwargs: Any) -> Any:
        now = next(calls) == count
        if now and not spec.after:
            kill()
        result = original(*args, **kwargs)
        if now and spec.after:
            kill()
        return result

    setattr(holder, spec.name, struck)
