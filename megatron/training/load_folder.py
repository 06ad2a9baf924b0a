"""What a start loads: known from the folders and the flags, before ranks meet.

A typing error in a path or a step should cost seconds, not the queue, the rendezvous and the model.
Looked at are the names, the listing and the file sizes of one checkpoint, by each rank on its own;
what is in the files is checked when they are loaded.

A command that was interrupted is given again as it was. If it began with something else than
the latest checkpoint of ``--save`` (other weights, an earlier step, a fresh optimizer), what it
has saved since says so in its train state (``began``), and the second start goes on from there.

    --load       --save holds                        the start
    = --save     nothing                             begins fresh
    = --save     checkpoints                         goes on, or is set back by --ckpt-step N
    P            nothing                             begins with P
    P            checkpoints begun by this command   goes on from --save
    P, or none   other checkpoints                   is refused
"""

import dataclasses
from pathlib import Path

from megatron.core.config.checkpoint import CheckpointConfig
from megatron.core.dist_checkpointing.checkpoint_io import read_state
from megatron.core.dist_checkpointing.directory import (
    POINTER,
    all_iterations,
    complete_iterations,
    is_complete,
    iteration_folder,
    latest_iteration,
    missing_parts,
)
from megatron.core.dist_checkpointing.errors import CheckpointError


def starts_fresh_when_empty(options: CheckpointConfig) -> bool:
    """Whether ``--load`` is where the run saves: its first start finds nothing there yet."""
    if options.load is None or options.save is None:
        return False
    return Path(options.load).resolve() == Path(options.save).resolve()


def beginning(options: CheckpointConfig) -> str:
    """The flags with which a start doesn't simply go on from ``--save``; empty when it does."""
    if options.load is None:
        return ""
    words = []
    if not starts_fresh_when_empty(options):
        words.append(f"--load {Path(options.load).resolve()}")
    if options.ckpt_step is not None:
        words.append(f"--ckpt-step {options.ckpt_step}")
    for flag, given in (
        ("--finetune", options.finetune),
        ("--no-load-optim", options.no_load_optim),
        ("--no-load-rng", options.no_load_rng),
    ):
        if given:
            words.append(flag)
    return " ".join(words)


def what_to_load(options: CheckpointConfig) -> tuple[CheckpointConfig, str | None]:
    """(options of loading as they apply to this start, a line for the log or None).

    Raises:
        CheckpointError: if ``--save`` is to be gone on from and can't be.
    """
    note = beginning(options)
    if not note or options.save is None:
        return options, None
    save = Path(options.save)
    try:
        iteration, _ = latest_iteration(save)
        if iteration is None:
            return options, None
        body = read_state(iteration_folder(save, iteration))
        begun = note in body["train_state"].get("began", ())
    except (CheckpointError, KeyError, AttributeError, TypeError):
        if starts_fresh_when_empty(options):
            return options, None  # maybe --ckpt-step names the one that is whole
        raise
    if not begun:
        return options, None
    going_on = dataclasses.replace(
        options,
        load=options.save,
        ckpt_step=None,
        finetune=False,
        no_load_optim=options.no_load_optim and not body.get("has_optimizer"),
        no_load_rng=False,
    )
    return going_on, (
        f"{note}: --save {save} holds what this command began, up to iteration {iteration}; going "
        "on from there. To begin again, give another --save"
    )


def refuse_missing_checkpoint(options: CheckpointConfig) -> None:
    """Refuse to start when there is no checkpoint of the kind that the flags ask for.

    Also when ``--save`` holds checkpoints that this run doesn't go on from: it would replace and
    prune them.

    Raises:
        ValueError: with flag, value, what is there and a cure.
    """
    try:
        effective, _ = what_to_load(options)
        if effective.load is not None:
            root = Path(effective.load)
            try:
                problem = _problem(root, effective)
            except OSError as error:
                problem = (
                    f"--load {root} can't be read: {error}; give a folder that this user may read"
                )
            if problem:
                raise ValueError(problem)
        problem = _no_pointer(effective) or _in_the_way(effective)
    except CheckpointError as error:
        raise ValueError(f"{error}") from None
    if problem:
        raise ValueError(problem)


def _no_pointer(options: CheckpointConfig) -> str | None:
    """What keeps a save from naming itself the latest."""
    if options.save is None:
        return None
    pointer = Path(options.save) / POINTER
    if not pointer.is_dir() or pointer.is_symlink():
        return None
    return f"--save {options.save}: {pointer.name} in it must be a file, not a folder; move it away"


def _in_the_way(options: CheckpointConfig) -> str | None:
    """What is wrong with saving into a folder that the run doesn't go on from."""
    if options.save is None or starts_fresh_when_empty(options):
        return None
    save = Path(options.save)
    try:
        whole = complete_iterations(save)
    except OSError as error:
        return f"--save {save} can't be read: {error}; give a folder that this user may read"
    if not whole:
        return None
    other = "" if options.load is None else f", and not of a run begun by {beginning(options)}"
    return (
        f"--save {save} already holds checkpoints, up to iteration {whole[-1]}{other}; give --load "
        f"{save} to go on from them, or another --save"
    )


def _problem(root: Path, options: CheckpointConfig) -> str | None:
    step = options.ckpt_step
    if step is not None:
        if is_complete(iteration_folder(root, step)):
            return None
        whole = complete_iterations(root)
        cure = (
            "give one of these, or leave --ckpt-step out for the latest"
            if whole
            else "check --load"
        )
        return (
            f"--ckpt-step {step} has no whole checkpoint in --load {root}{_why_not(root, step)}; "
            f"there are {whole or 'none'}: {cure}"
        )
    if latest_iteration(root)[0] is not None:
        return None
    begun = all_iterations(root)
    why = _why_not(root, begun[-1]) if begun else ""
    if options.finetune:
        return (
            f"--finetune needs weights, but --load {root} holds no whole checkpoint{why}; give the "
            "folder of the run to start from"
        )
    if starts_fresh_when_empty(options):
        return None
    return (
        f"--load {root} holds no whole checkpoint{why}; check the folder, leave --load out to "
        "start fresh, or give the same folder as --save to go on from what this run saves"
    )


def _why_not(root: Path, iteration: int) -> str:
    """What makes a checkpoint folder that is there not whole, in brackets; empty without one."""
    folder = iteration_folder(root, iteration)
    if not folder.is_dir():
        return ""
    problems = missing_parts(folder)
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f" ({problems[0]}{more})" if problems else ""
