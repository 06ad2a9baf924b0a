"""Which run saves in a folder: the one that came last, and no other.

A requeued job may start while the one before it still writes its last checkpoint. Each run has
a token and writes it into ``owner.json`` once it has loaded; whoever finds another's token there
has been followed by a newer run and must not publish, point or prune any more. Saving folders
carry the token, so two runs never write into the same one.

Between looking and renaming there is a moment in which a newer run may come: what is renamed then
is a whole checkpoint all the same. Nothing here locks: network file systems seldom can.
"""

import dataclasses
import json
import os
import socket
import time
import uuid
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.core.dist_checkpointing import directory
from megatron.core.dist_checkpointing.errors import CheckpointError, on_all_ranks

OWNER_FILE = "owner.json"
RECENT_S = 3600.0
"""A run on another machine that gave no sign for longer counts as dead."""


@dataclasses.dataclass(frozen=True)
class Owner:
    """A started run, by its first rank's process."""

    token: str
    host: str
    pid: int
    started: float
    """Seconds since 1970."""
    job_id: str = ""
    """Of the scheduler, where there is one."""
    ended: bool = False
    """Whether it left in good order: nothing of it writes any more."""
    follows: str = ""
    """Token of the run that it took the folder from and that may still be alive."""

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        job = f"job {self.job_id}, " if self.job_id else ""
        return f"{job}process {self.pid} on {self.host}, started {when}"


def read_owner(root: Path) -> Owner | None:
    """The run that saves in ``root``; None when there is none, or the file is no such file."""
    try:
        return Owner(**json.loads((root / OWNER_FILE).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _write(root: Path, owner: Owner) -> None:
    body = json.dumps(dataclasses.asdict(owner), indent=1).encode()
    directory.write_atomically(root / OWNER_FILE, body)


def _runs(pid: int) -> bool:
    """Whether a process of this machine runs; one that waits to be collected doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def _may_live(root: Path, other: Owner) -> bool:
    if other.ended:
        return False
    if other.host == socket.gethostname():
        return other.pid != os.getpid() and _runs(other.pid)
    try:
        return time.time() - (root / OWNER_FILE).stat().st_mtime < RECENT_S
    except OSError:
        return False


def take(root: Path, owner: Owner) -> tuple[Owner, str | None]:
    """Make ``owner`` the run that saves in ``root``.

    Returns:
        The owner as written, and a warning if another run may still save there.
    """
    before = read_owner(root)
    if before is None or not _may_live(root, before):
        _write(root, owner)
        return owner, None
    owner = dataclasses.replace(owner, follows=before.token)
    _write(root, owner)
    return owner, (
        f"{root} was the folder of another run that may still be alive: {before}. This run takes "
        "it over; the other one will fail at its next save"
    )


def require(root: Path, owner: Owner) -> None:
    """Go on only while ``owner`` is the one that saves in ``root``; leaves a sign of life.

    Raises:
        CheckpointError: naming the run that took over.
    """
    if not (root / OWNER_FILE).exists():
        _write(root, owner)  # somebody tidied up; a newer run would have left its own
    now = read_owner(root)
    if now is None or now.token != owner.token:
        raise CheckpointError(
            f"{root} was taken over by another run ({now or 'its owner.json is unreadable'}), so "
            f"this one ({owner}) saves nothing more there; stop one of them, or give it another "
            "--save"
        )
    os.utime(root / OWNER_FILE)


def release(root: Path, owner: Owner) -> None:
    """Say that ``owner`` left in good order, unless another has taken over."""
    now = read_owner(root)
    if now is not None and now.token == owner.token:
        _write(root, dataclasses.replace(owner, ended=True))


def may_be_written(leaving: Path, owner: Owner) -> bool:
    """Whether the run before ``owner`` may still write this saving folder."""
    if not owner.follows or not leaving.name.endswith(f".{owner.follows}"):
        return False
    try:
        times = [path.stat().st_mtime for path in (leaving, *leaving.iterdir())]
    except OSError:
        return False
    return time.time() - max(times) < RECENT_S


def take_on_all_ranks(
    root: Path, *, group: dist.ProcessGroup, job_id: str = ""
) -> tuple[Owner, str | None]:
    """(this run as the owner of ``root``, a warning or None), the same everywhere. Collective.

    Raises:
        CheckpointError: if the folder can't be written.
    """
    answer: list[Any] = [None]

    def begin() -> None:
        if dist.get_rank(group) == 0:
            root.mkdir(parents=True, exist_ok=True)
            owner = Owner(
                uuid.uuid4().hex[:12], socket.gethostname(), os.getpid(), time.time(), job_id
            )
            answer[0] = take(root, owner)

    on_all_ranks(begin, group, f"taking {root} to save in")
    dist.broadcast_object_list(answer, group_src=0, group=group)
    owner, warning = answer[0]
    return owner, warning
