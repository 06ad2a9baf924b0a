"""Where checkpoints lie, which of them are whole, and which one is the latest.

    DIR/owner.json               the run that saves here; see ``owner``
    DIR/.saving_iter_0000100.T/  a save in progress of the run with token T; by one rename
    DIR/iter_0000100/            the checkpoint of an iteration
        __0_0.distcp ...         tensors, one file or more per rank
        .metadata                which tensor lies where
        state.json               everything that isn't a tensor
        checksums.json           written last: crc32 and size of every file above
    DIR/past.json                iterations that led to the latest one: a run that was set back
                                 leaves others behind, which lie beside its past, not in it
    DIR/latest_checkpointed_iteration.txt    replaced atomically after checksums.json

A folder without ``checksums.json``, or whose files are missing or shorter than it says, is not
a checkpoint. Nothing here needs a process group.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.progress import Progress, no_progress

POINTER = "latest_checkpointed_iteration.txt"
STATE_FILE = "state.json"
PAST_FILE = "past.json"
CHECKSUM_FILE = "checksums.json"
_SAVING_PREFIX = ".saving_"
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
_MOVE_AWAY = "put a whole one back, or move the folder away to start fresh"
_FOLDER = re.compile(r"^iter_([0-9]{7,18})$")


def iteration_folder(root: Path, iteration: int) -> Path:
    """Folder of one iteration's checkpoint."""
    return root / f"iter_{iteration:07d}"


def _unasked() -> None:
    """Nobody else may write."""


def write_atomically(
    path: Path, data: bytes, *, sync_entry: bool = True, may: Callable[[], None] = _unasked
) -> None:
    """Write a temporary file beside ``path``, flush it to disk, rename it over ``path``.

    Args:
        sync_entry: also flush the folder; False where a later write to it does.
        may: called right before the rename; raises if it must not happen.
    """
    # Process ids are no names: in containers many jobs have the same one.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        may()
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if sync_entry:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_checksums(folder: Path, files: dict[str, tuple[int, int]]) -> None:
    """Write ``checksums.json``: name -> (crc32, bytes); this makes the folder a checkpoint."""
    listing = {name: {"crc32": crc, "bytes": size} for name, (crc, size) in sorted(files.items())}
    body = json.dumps(listing, sort_keys=True)
    record = {"files": listing, "crc32": zlib.crc32(body.encode())}
    write_atomically(folder / CHECKSUM_FILE, json.dumps(record, indent=1).encode())


def checked_file(folder: Path, name: str) -> Path:
    """The path of a checkpoint's file: a plain file that lies in the folder.

    Raises:
        CheckpointError: if it is missing, no plain file, or a link that leads out of the folder.
    """
    path = folder / name
    if name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
        raise CheckpointError(f"{folder} can't hold a file named {name[:200]!r}: it is outside")
    try:
        if path.is_symlink() and path.resolve().parent != folder.resolve():
            raise CheckpointError(
                f"{path} is a link to {os.readlink(path)}, outside of the checkpoint; it is refused"
            )
        if not path.is_file():
            there = path.exists() or path.is_symlink()
            raise CheckpointError(f"{path} is {'no plain file' if there else 'missing'}")
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} can't be read: {error}") from None
    return path


def read_checksums(folder: Path) -> dict[str, tuple[int, int]]:
    """Name -> (crc32, bytes) of a checkpoint's files.

    Raises:
        CheckpointError: if the list is missing or damaged.
    """
    path = folder / CHECKSUM_FILE
    if folder.is_dir() and not path.exists() and not path.is_symlink():
        raise CheckpointError(f"{folder} is not a whole checkpoint: no {CHECKSUM_FILE}")
    checked_file(folder, CHECKSUM_FILE)
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
        listing = record["files"]
        if zlib.crc32(json.dumps(listing, sort_keys=True).encode()) != record["crc32"]:
            raise ValueError("its own checksum does not match")
        files = {name: (entry["crc32"], entry["bytes"]) for name, entry in listing.items()}
        for name, numbers in files.items():
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise ValueError(f"what it says of {name[:200]!r} are no numbers")
        return files
    except _UNREADABLE as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else f"{error}"
        raise CheckpointError(f"{path} is damaged: {reason}") from None


def missing_parts(folder: Path) -> list[str]:
    """Why a folder is no whole checkpoint, one line each; empty if it is. Reads no tensor."""
    try:
        files = read_checksums(folder)
    except CheckpointError as error:
        return [f"{error}"]
    return wrong_sizes(folder, files)


def wrong_sizes(folder: Path, files: dict[str, tuple[int, int]]) -> list[str]:
    """Which of ``files`` (name -> (crc32, bytes)) aren't there in full, one line each."""
    problems = []
    for name, (_, size) in files.items():
        try:
            found = checked_file(folder, name).stat().st_size
            if found != size:
                problems.append(f"{folder / name} has {found} bytes instead of {size}")
        except (CheckpointError, OSError) as error:
            problems.append(f"{error}")
    return problems


def is_complete(folder: Path) -> bool:
    """Whether the folder has its checksums and all files at their full size."""
    return not missing_parts(folder)


def file_crc32(path: Path, progress: Progress = no_progress) -> tuple[int, int]:
    """(crc32, bytes) of a file, read in pieces of 8 MiB."""
    crc = size = 0
    with path.open("rb") as file:
        while block := file.read(8 << 20):
            crc = zlib.crc32(block, crc)
            size += len(block)
            progress()
    return crc, size


def damaged_files(
    folder: Path, names: Iterable[str], progress: Progress = no_progress
) -> list[str]:
    """What is wrong with the named files of a checkpoint, one line each; empty if nothing."""
    expected = read_checksums(folder)
    problems = []
    for name in names:
        crc, size = expected[name]
        path = folder / name
        try:
            found_crc, found_size = file_crc32(checked_file(folder, name), progress)
        except CheckpointError as error:
            problems.append(f"{error}")
            continue
        except OSError as error:
            problems.append(f"{path} can't be read: {error}")
            continue
        if found_size != size:
            problems.append(f"{path} has {found_size} bytes instead of {size}")
        elif found_crc != crc:
            problems.append(f"{path} has crc32 {found_crc:08x} instead of {crc:08x}")
    return problems


def all_iterations(root: Path) -> list[int]:
    """Iterations that have a folder, whole or not, in ascending order."""
    if not root.is_dir():
        return []
    found = []
    for entry in root.iterdir():
        match = _FOLDER.match(entry.name)
        # Other zeros or digits before the number: not ours.
        if match and entry.is_dir() and entry == iteration_folder(root, int(match.group(1))):
            found.append(int(match.group(1)))
    return sorted(found)


def complete_iterations(root: Path) -> list[int]:
    """Iterations with a whole checkpoint, in ascending order."""
    return [i for i in all_iterations(root) if is_complete(iteration_folder(root, i))]


def _known_past(root: Path) -> set[int] | None:
    """What ``past.json`` lists; None without a usable one."""
    try:
        values = json.loads((root / PAST_FILE).read_bytes())
        return {value for value in values if type(value) is int}
    except _UNREADABLE:
        return None


def past_iterations(root: Path, of: int) -> list[int]:
    """Iterations with a folder that led to ``of``, newest first; all below where it isn't known."""
    below = [i for i in reversed(all_iterations(root)) if i < of]
    known = _known_past(root)
    return below if known is None or of not in known else [i for i in below if i in known]


def begin_past(root: Path, goes_on_from: int) -> None:
    """Note what led to the iteration that a run goes on from (0: nothing that is here)."""
    past = [*reversed(past_iterations(root, goes_on_from)), goes_on_from] if goes_on_from else []
    write_atomically(root / PAST_FILE, json.dumps(past).encode())


def add_to_past(root: Path, iteration: int, *, may: Callable[[], None] = _unasked) -> None:
    """Note that a run went on to ``iteration``; ``may`` raises if it must not be noted."""
    below = [i for i in all_iterations(root) if i < iteration]
    known = _known_past(root)
    past = below if known is None else [i for i in below if i in known]
    write_atomically(root / PAST_FILE, json.dumps([*past, iteration]).encode(), may=may)


def write_pointer(root: Path, iteration: int, *, may: Callable[[], None] = _unasked) -> None:
    """Atomically name ``iteration`` as the latest checkpoint; ``may`` raises if it must not be."""
    write_atomically(root / POINTER, f"{iteration}\n".encode(), may=may)


def _pointed(pointer: Path) -> tuple[int | None, str]:
    """(what the pointer file names or None, what is wrong with the file)."""
    if pointer.exists() and not pointer.is_file():
        return None, f"{pointer} is no file"
    try:
        text = pointer.read_bytes()[:64].decode(errors="replace").strip()
    except FileNotFoundError:
        return None, f"{pointer} is missing"
    except OSError as error:
        return None, f"{pointer} can't be read ({error.strerror})"
    if text.isascii() and text.isdecimal():
        return int(text), ""
    return None, f"{pointer} says {text!r}, which is no iteration"


def latest_iteration(root: Path) -> tuple[int | None, str | None]:
    """(latest whole checkpoint or None, a warning or None).

    The pointer file is believed. If what it names isn't whole, the newest whole checkpoint that
    led to it counts: others may be of a past that the run was set back from. Without a usable
    pointer the newest whole one counts. The warning says which.

    Raises:
        CheckpointError: if there is a pointer, but no whole checkpoint at or before it.
    """
    pointer = root / POINTER
    named, problem = _pointed(pointer)
    problems = [] if named is None else missing_parts(iteration_folder(root, named))
    if named is not None and not problems:
        return named, None
    before = all_iterations(root)[::-1] if named is None else past_iterations(root, named)
    newest = next((i for i in before if is_complete(iteration_folder(root, i))), None)
    if named is None:
        if newest is not None:
            return newest, f"{problem}: unusable; taking the newest whole checkpoint, {newest}"
        if not os.path.lexists(pointer):
            return None, None
        raise CheckpointError(
            f"{problem}, and there is no whole checkpoint in {root}; {_MOVE_AWAY}"
        )
    reason = f"{'; '.join(problems[:4])}{'; ...' if len(problems) > 4 else ''}"
    says = f"{pointer} says {named}, which is no whole checkpoint here ({reason})"
    if newest is not None:
        return newest, f"{says}; taking the newest whole checkpoint, {newest}, of those before it"
    others = complete_iterations(root)
    if others:
        raise CheckpointError(
            f"{says}, nor is there one that led to it; the others, {others}, may be of a past that "
            "the run was set back from: give one as --ckpt-step to go on from it"
        )
    raise CheckpointError(f"{says}, nor is there any other; {_MOVE_AWAY}")


def remove_tree(path: Path) -> None:
    """Remove a folder, or the link to one alone; what can't be removed stays."""
    if path.is_symlink():
        with contextlib.suppress(OSError):
            path.unlink()
        return
    shutil.rmtree(path, ignore_errors=True)


def prune(root: Path, keep: int, latest: int, *, may: Callable[[], None] = _unasked) -> list[int]:
    """Remove all but the ``keep`` newest whole checkpoints (0: keep all); returns what went.

    Counted from ``latest`` backwards through its past. Newer ones, left by a run that was set
    back with ``--ckpt-step``, are neither counted nor removed; older ones that it left, and broken
    folders older than ``latest``, go too. Of a link to a folder elsewhere only the link goes.
    ``may`` is called before each removal and raises if it must not happen.
    """
    if keep <= 0:
        return []
    whole = [i for i in past_iterations(root, latest) if is_complete(iteration_folder(root, i))]
    kept = set(whole[: keep - 1])
    gone = [i for i in all_iterations(root) if i < latest and i not in kept]
    for iteration in gone:
        may()
        folder = iteration_folder(root, iteration)
        if not folder.is_symlink():
            # Without its checksums the folder is no checkpoint: a kill in between can't mislead.
            (folder / CHECKSUM_FILE).unlink(missing_ok=True)
        remove_tree(folder)
    return gone


def saving_folder(root: Path, iteration: int, token: str) -> Path:
    """Where the run with ``token`` collects the checkpoint of an iteration."""
    return root / f"{_SAVING_PREFIX}{iteration_folder(root, iteration).name}.{token}"


def open_saving_folder(saving: Path, *, spared: Callable[[Path], bool]) -> None:
    """A fresh folder for a save in progress; leavings of interrupted saves are removed.

    Args:
        saving: of ``saving_folder``.
        spared: whether a leaving may be of a run that still writes it.
    """
    saving.parent.mkdir(parents=True, exist_ok=True)
    for leaving in saving.parent.glob(f"{_SAVING_PREFIX}*"):
        if leaving == saving or not spared(leaving):
            remove_tree(leaving)
    saving.mkdir()


def publish(saving: Path, iteration: int, *, may: Callable[[], None] = _unasked) -> Path:
    """Give a finished save its final name; an older folder of that name makes room first.

    ``may`` is called right before and raises if it must not happen.
    """
    root = saving.parent
    final = iteration_folder(root, iteration)
    old = root / f"{_SAVING_PREFIX}old_{saving.name.removeprefix(_SAVING_PREFIX)}"
    may()
    if os.path.lexists(final):
        os.replace(final, old)
    os.replace(saving, final)
    sync_folder(root)
    if os.path.lexists(old):
        remove_tree(old)
    return final


def check_free_space(root: Path, needed: int) -> None:
    """Refuse a save that the disk can't hold.

    Raises:
        CheckpointError: if fewer than ``needed`` bytes are free under ``root``.
    """
    free = shutil.disk_usage(root).free
    if free < needed:
        raise CheckpointError(
            f"{root} has {free / 1e9:.2f} GB free and the checkpoint needs {needed / 1e9:.2f} GB; "
            "free some space, lower --keep-checkpoints or save elsewhere (--save)"
        )
