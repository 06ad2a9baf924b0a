"""Saves, in the step or in the background.

A background save copies this rank's pieces to the CPU (the only time training waits), then a
thread writes them over a process group of its own, so it never mixes with the collectives of
training. Its failure is kept until :meth:`CheckpointSaver.failure` is asked, once a step.
The copy's memory stays for the next save: as many bytes on the host as the rank's pieces have.
"""

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import owner
from megatron.core.dist_checkpointing.checkpoint_io import SaveFolder, write_checkpoint
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.pieces import Piece
from megatron.core.dist_checkpointing.progress import Progress, no_progress


class CheckpointSaver:
    """Writes the checkpoints of one run, one at a time.

    Args:
        root: folder of the run's checkpoints.
        group: gloo group of the whole world that nothing else uses.
        background: whether writing goes on while training does.
        keep: how many newest checkpoints stay (0: all).
        job_id: the scheduler's, for other runs that find this one in the folder.
    """

    def __init__(
        self,
        root: Path,
        *,
        group: dist.ProcessGroup,
        background: bool = False,
        keep: int = 0,
        job_id: str = "",
    ) -> None:
        self.root = root
        self._group = group
        self._background = background
        self._keep = keep
        self.thread: threading.Thread | None = None
        """Writes in the background; None before the first save and after ``wait``."""
        self.progress: Progress = no_progress
        """Called as a save gets on, by the thread that writes."""
        self._error: CheckpointError | None = None
        self._snapshot: dict[str, Piece] = {}
        self._job_id = job_id
        self._run: owner.Owner | None = None

    def own(self) -> str | None:
        """Become the run that saves in ``root``; a warning if another may still do. Collective."""
        self._run, warning = owner.take_on_all_ranks(
            self.root, group=self._group, job_id=self._job_id
        )
        return warning

    def release(self) -> None:
        """Say in the folder that this run has left; call it after ``wait``."""
        if self._run is not None and dist.get_rank(self._group) == 0:
            with contextlib.suppress(OSError):  # it only spares the next run a warning
                owner.release(self.root, self._run)

    def save(self, iteration: int, pieces: Mapping[str, Piece], state: Mapping[str, Any]) -> None:
        """Save; in the background after a snapshot, else at once. Collective.

        Raises:
            CheckpointError: if this save, or an earlier one in the background, failed.
        """
        self.wait()
        if self._run is None:
            self.own()
        if not self._background:
            self._write(iteration, pieces, state)
            return
        self._snapshot = self._copied(pieces)
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.thread = threading.Thread(
            target=self._write_quietly,
            args=(iteration, self._snapshot, dict(state), device),
            name=f"the save of iteration {iteration} in the background",
            daemon=True,
        )
        self.thread.start()

    def _copied(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        before = self._snapshot
        return {
            name: piece.copied(before[name].tensor if name in before else None)
            for name, piece in pieces.items()
        }

    def _write(self, iteration: int, pieces: Mapping[str, Piece], state: Mapping[str, Any]) -> None:
        write_checkpoint(
            SaveFolder(self.root, self._run, self._keep),
            iteration,
            pieces,
            state,
            group=self._group,
            progress=self.progress,
        )

    def _write_quietly(
        self,
        iteration: int,
        pieces: Mapping[str, Piece],
        state: Mapping[str, Any],
        device: int | None,
    ) -> None:
        try:
            if device is not None:
                # A thread starts on GPU 0, and torch's writer asks for its stream: every rank of a
                # node would keep a CUDA context there.
                torch.cuda.set_device(device)
            self._write(iteration, pieces, state)
        except CheckpointError as error:
            self._error = error
        except Exception as error:
            self._error = CheckpointError(f"saving iteration {iteration}: {error}")

    def failure(self) -> CheckpointError | None:
        """Why the last background save failed, or None; doesn't wait."""
        return self._error

    def wait(self) -> None:
        """Wait for the save in the background.

        Raises:
            CheckpointError: if it failed.
        """
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
