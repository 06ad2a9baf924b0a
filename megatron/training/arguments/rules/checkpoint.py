"""Rules of checkpoints and logging."""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from megatron.core.config.flags import flag_name
from megatron.training.arguments.resume import allowed_name_problems
from megatron.training.arguments.rules.facts import Facts


def saving(facts: Facts) -> Iterator[str]:
    """Options of saving go with --save."""
    checkpoint = facts.config.checkpoint
    interval = checkpoint.save_interval
    if interval is not None and interval < 1:
        yield f"--save-interval {interval} must be at least 1; leave it out to save at the end only"
    if checkpoint.keep_checkpoints < 0:
        yield f"--keep-checkpoints {checkpoint.keep_checkpoints} must be at least 0; use 0 for all"
    if checkpoint.save is None and not facts.config.training.dry_run:
        for flag, given in (
            (f"--save-interval {interval}", interval is not None),
            ("--async-save", checkpoint.async_save),
            (f"--keep-checkpoints {checkpoint.keep_checkpoints}", checkpoint.keep_checkpoints > 0),
        ):
            if given:
                yield f"{flag} has no effect without --save; add --save DIR"
    elif checkpoint.save is not None:
        yield from _unusable("--save", Path(checkpoint.save), dry=facts.config.training.dry_run)


def loading(facts: Facts) -> Iterator[str]:
    """Options of loading go with --load, whose folder exists unless a fresh run will make it."""
    checkpoint = facts.config.checkpoint
    step = checkpoint.ckpt_step
    if step is not None and step < 1:
        yield f"--ckpt-step {step} must be at least 1; give the iteration of a checkpoint"
    if checkpoint.load is None:
        for flag, given in (
            (f"--ckpt-step {step}", step is not None),
            ("--finetune", checkpoint.finetune),
            ("--load-fallback", checkpoint.load_fallback),
        ):
            if given:
                yield f"{flag} has no effect without --load; add --load DIR"
        return
    folder, same = Path(checkpoint.load), _same(checkpoint.load, checkpoint.save)
    unknown = _cannot_be_known(folder)
    if unknown:
        if not same:  # else --save says it
            yield f"--load {folder} can't be read: {unknown}; give a folder with checkpoints"
    elif folder.is_dir():
        if not os.access(folder, os.R_OK | os.X_OK):
            yield f"--load {folder} can't be read by this user; give another, or its permissions"
    elif folder.exists():
        if not same:  # else --save says it
            yield f"--load {folder} is a file; give the folder that holds the checkpoints"
    elif step is not None:
        yield (
            f"--load {folder} doesn't exist, so --ckpt-step {step} can't be loaded; give the "
            "folder with that checkpoint, or leave --ckpt-step out"
        )
    elif checkpoint.finetune:
        yield (
            f"--load {folder} doesn't exist, but --finetune needs its weights; give the folder "
            "of the run to start from"
        )
    elif not same:
        yield (
            f"--load {folder} doesn't exist; give a folder with checkpoints, or the same "
            "folder as --save to start fresh when it is empty"
        )


def _cannot_be_known(path: Path) -> str | None:
    """Why the system can't follow a path at all: links in a loop or to nowhere, a long name."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or f"{error}"
    for part in (path, *path.parents):
        if part.is_symlink() and not part.exists():
            return f"{part} is a link to {os.readlink(part)}, which doesn't exist"
    return None


def _unusable(flag: str, path: Path, *, dry: bool = False) -> Iterator[str]:
    """The folder ``path`` is there or can be made, and lets us write; ``dry``: never mind that."""
    unknown = _cannot_be_known(path)
    if unknown:
        yield f"{flag} {path} can't be a folder: {unknown}; give another"
    elif path.is_file():
        yield f"{flag} {path} is a file; give a folder"
    elif not dry:
        yield from _unwritable(flag, path)


def _unwritable(flag: str, path: Path) -> Iterator[str]:
    """The nearest folder that exists on the way to ``path`` lets us write."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        yield f"{flag} {path} can't be made: {there} is a file; give a path below a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"{flag} {path} can't be written: {there} is read-only for this user; give another"
    elif os.statvfs(there).f_blocks == 0:  # /proc and its like, where root may write all the same
        yield f"{flag} {path} can't be written: {there} is on no disk; give a folder on one"


def one_checkpoint(facts: Facts) -> Iterator[str]:
    """--load is the folder of all checkpoints, not one of them."""
    load = facts.config.checkpoint.load
    match = re.fullmatch(r"iter_(\d+)", Path(load).name) if load is not None else None
    if load is not None and match is not None and os.path.isdir(load):
        yield (
            f"--load {load} is one checkpoint; use --load {Path(load).parent} "
            f"--ckpt-step {int(match[1])}"
        )


def _same(load: str, save: str | None) -> bool:
    return save is not None and Path(load).absolute() == Path(save).absolute()


def allowed_changes(facts: Facts) -> Iterator[str]:
    """--allow-changed names things that a resume compares."""
    yield from allowed_name_problems(facts.config.checkpoint.allow_changed)


def logging(facts: Facts) -> Iterator[str]:
    """Intervals and peaks are positive, the metrics file can be written."""
    settings = facts.config.logging
    file = settings.metrics_file
    unknown = None if file is None else _cannot_be_known(Path(file))
    if unknown:
        yield f"--metrics-file {file} can't be written: {unknown}; give another"
    elif file is not None and Path(file).is_dir():
        yield f"--metrics-file {file} is a folder; give a file, e.g. {Path(file) / 'metrics.jsonl'}"
    elif file is not None and not facts.config.training.dry_run:
        yield from _unwritable("--metrics-file", Path(file).parent)
    if settings.log_interval < 1:
        yield f"--log-interval {settings.log_interval} must be at least 1; use 1 for every step"
    peak = settings.peak_tflops
    if peak is not None and not (peak > 0 and math.isfinite(peak)):
        yield f"--peak-tflops {peak:g} must be greater than 0; give the TFLOP/s of one device"
    if settings.wandb_project is None:
        for name in ("wandb_exp_name", "wandb_save_dir"):
            if getattr(settings, name) is not None:
                yield f"{flag_name(name)} has no effect without --wandb-project; add it"


RULES = (saving, loading, one_checkpoint, allowed_changes, logging)
