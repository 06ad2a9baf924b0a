"""Write and read one checkpoint, together with all ranks.

Every function with a ``group`` is collective: all ranks call it, and a failure on one rank
raises :class:`CheckpointError` on all. ``group`` is a gloo group of the whole world; saves in
the background use one of their own.

Cost of a save: each rank writes its pieces once (chunks held by several ranks once over all)
and their checksums are taken while writing. Cost of a load: each file is read once by one rank
for its checksum (unless told not to), then each rank reads what overlaps its pieces.
"""

import dataclasses
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from megatron.core.dist_checkpointing import directory, owner
from megatron.core.dist_checkpointing.errors import (
    CheckpointError,
    describe,
    kind_of,
    on_all_ranks,
)
from megatron.core.dist_checkpointing.listing import read_metadata_safely
from megatron.core.dist_checkpointing.pieces import Piece
from megatron.core.dist_checkpointing.planners import PieceLoadPlanner, PieceSavePlanner
from megatron.core.dist_checkpointing.progress import Progress, no_progress
from megatron.core.dist_checkpointing.storage import ChecksumWriter, SafeReader

SPACE_RESERVE = 64 << 20
"""Bytes that must stay free beside a checkpoint (listing, state, metrics)."""
LISTING = ".metadata"
"""torch's name for it."""


@dataclasses.dataclass(frozen=True)
class SaveFolder:
    """Where a run's checkpoints go, and how many stay there."""

    root: Path
    """Folder of all checkpoints of the run."""
    run: owner.Owner | None = None
    """The owner of ``root`` that this process belongs to; None: a new one takes it at each save."""
    keep: int = 0
    """How many newest checkpoints stay (0: all)."""


def _on_first(action: Callable[[], None], group: dist.ProcessGroup, what: str) -> None:
    on_all_ranks(lambda: action() if dist.get_rank(group) == 0 else None, group, what)


def _bytes_to_write(pieces: Mapping[str, Piece], group: dist.ProcessGroup) -> int:
    """Stored bytes of all ranks together, chunks that several ranks hold counted once."""
    mine = {(n, p.offsets): p.nbytes for n, p in pieces.items()}
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    merged: dict[Any, int] = {}
    for part in gathered:
        merged.update(part)
    return sum(merged.values())


def write_checkpoint(
    target: SaveFolder,
    iteration: int,
    pieces: Mapping[str, Piece],
    state: Mapping[str, Any],
    *,
    group: dist.ProcessGroup,
    progress: Progress = no_progress,
) -> Path:
    """Write a checkpoint and, once all of it is on disk, point to it. Collective.

    Args:
        target: folder of the run's checkpoints, its owner, and how many stay.
        iteration: number of finished steps.
        pieces: this rank's part of every tensor, by global name.
        state: what isn't a tensor; JSON; rank 0's counts.
        group: gloo group of the whole world.
        progress: called as this rank gets on, block by block.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: on all ranks; the checkpoints that were there stay untouched. Also if
            another run has taken the folder over.
    """
    root = target.root
    run = target.run or owner.take_on_all_ranks(root, group=group)[0]
    needed = _bytes_to_write(pieces, group) + SPACE_RESERVE
    saving = directory.saving_folder(root, iteration, run.token)

    def spared(leaving: Path) -> bool:
        progress()
        owner.require(root, run)  # else it may be the newer run's
        return owner.may_be_written(leaving, run)

    def prepare() -> None:
        owner.require(root, run)
        directory.open_saving_folder(saving, spared=spared)
        directory.check_free_space(root, needed)

    try:
        _on_first(prepare, group, f"preparing {saving}")
        files = _write_tensors(saving, dict(pieces), group, progress)
        _on_first(
            lambda: _complete(
                saving, iteration, state, files, keep=target.keep, run=run, progress=progress
            ),
            group,
            f"completing {saving}",
        )
    except CheckpointError:
        if dist.get_rank(group) == 0:
            directory.remove_tree(saving)
        raise
    return directory.iteration_folder(root, iteration)


def _complete(
    saving: Path,
    iteration: int,
    state: Mapping[str, Any],
    files: dict[str, tuple[int, int]],
    *,
    keep: int,
    run: owner.Owner,
    progress: Progress,
) -> None:
    """From written tensors to the latest checkpoint; on the first rank."""
    root = saving.parent

    def may() -> None:
        progress()
        owner.require(root, run)

    may()
    body = json.dumps(state, indent=1).encode()
    directory.write_atomically(saving / directory.STATE_FILE, body, sync_entry=False)
    files[directory.STATE_FILE] = (zlib.crc32(body), len(body))
    directory.write_checksums(saving, files)
    may()  # writing may have taken long
    problems = directory.missing_parts(saving)
    if problems:
        raise CheckpointError(f"not what the ranks wrote: {'; '.join(problems)}")
    directory.publish(saving, iteration, may=may)
    directory.add_to_past(root, iteration, may=may)
    directory.write_pointer(root, iteration, may=may)
    directory.prune(root, keep, iteration, may=may)


def _write_tensors(
    folder: Path, pieces: dict[str, Piece], group: dist.ProcessGroup, progress: Progress
) -> dict[str, tuple[int, int]]:
    writer = ChecksumWriter(folder, progress)
    try:
        dcp_save(
            dict(pieces),
            storage_writer=writer,
            planner=PieceSavePlanner(pieces),
            process_group=group,
        )
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"writing {folder} failed on {describe(error)}") from error
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, writer.written, group=group)
    return {name: entry for part in gathered for name, entry in part.items()}


def read_state(folder: Path) -> dict[str, Any]:
    """The part of a checkpoint that isn't tensors.

    Raises:
        CheckpointError: if it is missing or damaged.
    """
    path = directory.checked_file(folder, directory.STATE_FILE)
    try:
        state = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from None
    except RecursionError:
        raise CheckpointError(f"{path} is nested too deeply") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no mapping")
    return state


def verify_checkpoint(
    folder: Path, *, group: dist.ProcessGroup, progress: Progress = no_progress
) -> None:
    """Check the crc32 of every file, each file by one rank. Collective.

    Raises:
        CheckpointError: naming each damaged file, on all ranks.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)

    def check() -> None:
        names = sorted(directory.read_checksums(folder))
        for name in (LISTING, directory.STATE_FILE):
            if name not in names:
                raise CheckpointError(f"{folder / directory.CHECKSUM_FILE} doesn't speak of {name}")
        problems = directory.damaged_files(folder, names[rank::world], progress)
        if problems:
            raise CheckpointError("; ".join(problems))

    on_all_ranks(check, group, f"verifying {folder}")


def read_listing(folder: Path, *, group: dist.ProcessGroup) -> Metadata:
    """Which tensors lie where in a checkpoint, checked. Collective.

    Raises:
        CheckpointError: on all ranks, if the listing is damaged.
    """
    return on_all_ranks(lambda: read_metadata_safely(folder / LISTING), group, f"reading {folder}")


def read_pieces(
    folder: Path,
    pieces: Mapping[str, Piece],
    *,
    group: dist.ProcessGroup,
    listing: Metadata | None = None,
    progress: Progress = no_progress,
) -> None:
    """Read this rank's pieces from a checkpoint of any layout, in place. Collective.

    Args:
        folder: of the checkpoint.
        pieces: where to read to, by global name.
        group: gloo group of the whole world.
        listing: of :func:`read_listing`, if it was read already.
        progress: called as this rank gets on.

    Raises:
        CheckpointMismatch: if a name, a shape or a type differs, naming it, on all ranks.
        CheckpointError: if a file is damaged, or holds something other than its tensors.
    """
    live = dict(pieces)
    listing = listing or read_listing(folder, group=group)
    try:
        dcp_load(
            dict(live),
            storage_reader=SafeReader(folder, listing),
            planner=PieceLoadPlanner(live, progress),
            process_group=group,
        )
    except (Exception, CheckpointException) as error:
        raise kind_of(error)(f"reading {folder} failed on {describe(error)}") from error


def choose_checkpoint(
    root: Path, *, iteration: int | None, group: dist.ProcessGroup
) -> tuple[int | None, str | None]:
    """(iteration to load or None, warning or None), the same on all ranks. Collective.

    Raises:
        CheckpointError: if the asked ``iteration`` has no whole checkpoint under ``root``.
    """
    answer: list[Any] = [None]

    def choose() -> None:
        if iteration is None:
            answer[0] = directory.latest_iteration(root)
            return
        if not directory.is_complete(directory.iteration_folder(root, iteration)):
            whole = directory.complete_iterations(root)
            raise CheckpointError(
                f"--ckpt-step {iteration} has no whole checkpoint in {root}; there are {whole}"
            )
        answer[0] = (iteration, None)

    _on_first(choose, group, f"choosing a checkpoint in {root}")
    dist.broadcast_object_list(answer, group_src=0, group=group)
    chosen: tuple[int | None, str | None] = tuple(answer[0])
    return chosen
