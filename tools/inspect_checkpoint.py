"""Look into a folder of checkpoints: which are whole, what is in one, are its bytes sound.

  python tools/inspect_checkpoint.py runs/first/checkpoints            the list
  python tools/inspect_checkpoint.py runs/first/checkpoints --iteration 2000 --tensors
  python tools/inspect_checkpoint.py runs/first/checkpoints --verify   checksums of all

A checkpoint's own folder (``.../iter_0002000``, or ``.`` in it) may be given too; ``--tensors``
alone means the latest. Nothing is unpickled and no tensor is loaded, so a stranger's file is
safe to look at. ``--verify`` reads every byte once.

Exit codes: 0 sound; 1 damaged, incomplete or missing; 2 wrong command line.
"""

import json
import math
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.core.dist_checkpointing import directory
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.listing import read_metadata_safely
from megatron.training.saved_state import read_saved_state
from tools.command import Parser, run


def main() -> int:
    """Parse, list or show, verify."""
    args = _parser().parse()
    root, iteration = Path(args.folder), args.iteration
    match = re.fullmatch(r"iter_([0-9]{7,18})", Path(os.path.abspath(root)).name)
    if match:
        root, iteration = Path(os.path.abspath(root)).parent, int(match.group(1))
    try:
        return 0 if _inspect(root, iteration, tensors=args.tensors, verify=args.verify) else 1
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _inspect(root: Path, iteration: int | None, *, tensors: bool, verify: bool) -> bool:
    """Whether all that was looked at is sound."""
    if not root.is_dir():
        kind = "is a file" if root.exists() else "doesn't exist"
        raise CheckpointError(f"{root} {kind}; give the --save folder of a run")
    iterations = directory.all_iterations(root)
    if not iterations:
        raise CheckpointError(
            f"no checkpoint in {root}: it has no folder like iter_0000100; give the --save folder "
            "of a run"
        )
    if tensors and iteration is None:
        iteration, warning = directory.latest_iteration(root)
        if warning:
            print(f"warning: {warning}")
        if iteration is None:
            raise CheckpointError(f"no whole checkpoint in {root}")
    if iteration is None:
        _list(root, iterations)
    elif iteration not in iterations:
        raise CheckpointError(f"no checkpoint of iteration {iteration} in {root}")
    sound = True
    for number in iterations if iteration is None else [iteration]:
        folder = directory.iteration_folder(root, number)
        try:
            if iteration is not None:
                problems = directory.missing_parts(folder)
                if problems:
                    print(f"error: incomplete: never loaded ({_some(problems)})", file=sys.stderr)
                    sound = False
                _show(folder, tensors=tensors)
            if verify:
                sound &= _verify(folder)
        except (CheckpointError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            sound = False
    return sound


def _list(root: Path, iterations: list[int]) -> None:
    try:
        latest, warning = directory.latest_iteration(root)
    except CheckpointError as error:
        latest, warning = None, f"{error}"
    print(f"{'iteration':>10}  {'GB':>8}  state")
    for number in iterations:
        folder = directory.iteration_folder(root, number)
        problems = directory.missing_parts(folder)
        text = f"incomplete: never loaded ({_some(problems)})" if problems else "whole"
        print(
            f"{number:>10}  {_bytes(folder) / 1e9:>8.3f}  "
            f"{text}{', the latest' if number == latest else ''}"
        )
    if warning:
        print(f"warning: {warning}")


def _some(problems: list[str]) -> str:
    return "; ".join(problems[:2]) + (f"; {len(problems) - 2} more" if len(problems) > 2 else "")


def _bytes(folder: Path) -> int:
    """Of the files that can be looked at."""
    total = 0
    try:
        for path in folder.iterdir():
            if path.is_file():
                total += path.stat().st_size
    except OSError:
        pass
    return total


def _show(folder: Path, *, tensors: bool) -> None:
    state = read_saved_state(folder)
    print(f"{folder}")
    for name in ("iteration", "stage", "consumed_samples", "consumed_tokens", "skipped", "run_id"):
        print(f"  {name:<18} {getattr(state.train_state, name)}")
    print(f"  {'saved by':<18} {state.world_size} ranks")
    print(f"  {'optimizer state':<18} {'yes' if state.has_optimizer else 'no'}")
    listing = {
        name: entry
        for name, entry in read_metadata_safely(folder / ".metadata").state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)  # nothing else is ever listed
    }
    kinds: dict[str, list[int]] = {}
    for name, entry in listing.items():
        entry_bytes = math.prod(entry.size) * entry.properties.dtype.itemsize
        kinds.setdefault(name.split(".")[0], []).append(entry_bytes)
    for kind, sizes in sorted(kinds.items()):
        print(f"  {kind:<18} {len(sizes):,} tensors, {sum(sizes) / 1e9:.3f} GB")
    if tensors:
        for name, entry in sorted(listing.items()):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            print(f"    {name}  {dtype}{list(entry.size)}  in {len(entry.chunks)} pieces")
        print(json.dumps(state.config, indent=1))


def _verify(folder: Path) -> bool:
    problems = directory.damaged_files(folder, sorted(directory.read_checksums(folder)))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems:
        print(f"{folder}: all checksums match")
    return not problems


def _parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("folder", help="the --save folder, or one checkpoint in it")
    parser.add_argument("--iteration", type=int, help="show this checkpoint")
    parser.add_argument(
        "--tensors",
        action="store_true",
        help="every tensor, and the flags, of one checkpoint; default: the latest",
    )
    parser.add_argument("--verify", action="store_true", help="check the crc32 of every file")
    return parser


if __name__ == "__main__":
    run(main)
