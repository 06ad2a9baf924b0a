"""Is what ``--load`` and ``--ckpt-step`` ask for there? Known from the folder, before ranks meet.

A typing error in a path or a step should cost seconds, not the queue, the rendezvous and the model.
Looked at are the names, the listing and the file sizes of one checkpoint, by each rank on its own;
what is in the files is checked when they are loaded.
"""

from pathlib import Path

from megatron.core.config.checkpoint import CheckpointConfig
from megatron.core.dist_checkpointing.directory import (
    all_iterations,
    complete_iterations,
    is_complete,
    iteration_folder,
)


def starts_fresh_when_empty(options: CheckpointConfig) -> bool:
    """Whether ``--load`` is where the run saves: its first start finds nothing there yet."""
    if options.load is None or options.save is None:
        return False
    return Path(options.load).resolve() == Path(options.save).resolve()


def refuse_missing_checkpoint(options: CheckpointConfig) -> None:
    """Refuse to start when there is no checkpoint of the kind that the flags ask for.

    Raises:
        ValueError: with flag, value, what is there and a cure.
    """
    if options.load is None:
        return
    root = Path(options.load)
    try:
        problem = _problem(root, options)
    except OSError as error:
        problem = f"--load {root} can't be read: {error}; give a folder that this user may read"
    if problem:
        raise ValueError(problem)


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
            f"--ckpt-step {step} has no whole checkpoint in --load {root}; "
            f"there are {whole or 'none'}: {cure}"
        )
    if any(is_complete(iteration_folder(root, i)) for i in reversed(all_iterations(root))):
        return None
    if options.finetune:
        return (
            f"--finetune needs weights, but --load {root} holds no whole checkpoint; give the "
            "folder of the run to start from"
        )
    if starts_fresh_when_empty(options):
        return None
    return (
        f"--load {root} holds no whole checkpoint; check the folder, leave --load out to start "
        "fresh, or give the same folder as --save to go on from what this run saves"
    )
