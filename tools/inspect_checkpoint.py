"""Look into a folder of checkpoints: which are whole, what is in one, are its bytes sound.

  python tools/inspect_checkpoint.py runs/first/checkpoints            the list
  python tools/inspect_checkpoint.py runs/first/checkpoints --iteration 2000 --tensors
  python tools/inspect_checkpoint.py runs/first/checkpoints --verify   checksums of all

A checkpoint's own folder (``.../iter_0002000``) may be given too. Nothing is unpickled but the
listing of tensors, by a reader that refuses everything else, so a stranger's file is safe to
look at. ``--verify`` reads every byte once.

Exit codes: 0 sound; 1 damaged, incomplete or missing; 2 wrong command line.
"""

import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.core.dist_checkpointing import directory
from megatron.core.dist_checkpointing.checkpoint_io import read_state
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.listing import read_metadata_safely
from tools.command import Parser, run


def main() -> int:
    """Parse, list or show, verify."""
    args = _parser().parse()
    root, iteration = Path(args.folder), args.iteration
    match = re.fullmatch(r"iter_(\d{7,})", root.name)
    if match:
        root, iteration = root.parent, int(match.group(1))
    iterations = directory.all_iterations(root)
    if iteration is not None:
        iterations = [i for i in iterations if i == iteration]
    if not iterations:
        print(f"error: no checkpoint{_of(iteration)} in {root}", file=sys.stderr)
        return 1
    if iteration is None:
        _list(root)
    sound = True
    for number in iterations:
        folder = directory.iteration_folder(root, number)
        try:
            if iteration is not None:
                _show(folder, tensors=args.tensors)
            if args.verify:
                sound &= _verify(folder)
        except CheckpointError as error:
            print(f"error: {error}", file=sys.stderr)
            sound = False
    return 0 if sound else 1


def _of(iteration: int | None) -> str:
    return "" if iteration is None else f" of iteration {iteration}"


def _list(root: Path) -> None:
    latest, warning = directory.latest_iteration(root)
    print(f"{'iteration':>10}  {'GB':>8}  state")
    for number in directory.all_iterations(root):
        folder = directory.iteration_folder(root, number)
        size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        whole = directory.is_complete(folder)
        text = "whole" if whole else "incomplete: never loaded"
        print(
            f"{number:>10}  {size / 1e9:>8.3f}  {text}{', the latest' if number == latest else ''}"
        )
    if warning:
        print(f"warning: {warning}")


def _show(folder: Path, *, tensors: bool) -> None:
    state = read_state(folder)
    train: dict[str, Any] = state["train_state"]
    print(f"{folder}")
    for name in ("iteration", "stage", "consumed_samples", "consumed_tokens", "skipped", "run_id"):
        print(f"  {name:<18} {train[name]}")
    print(f"  {'saved by':<18} {state['world_size']} ranks")
    print(f"  {'optimizer state':<18} {'yes' if state['has_optimizer'] else 'no'}")
    listing = {
        name: entry
        for name, entry in read_metadata_safely(folder / ".metadata").state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)  # nothing else is ever read
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
        print(json.dumps(state["config"], indent=1))


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
        "--tensors", action="store_true", help="with one checkpoint: every tensor, and the flags"
    )
    parser.add_argument("--verify", action="store_true", help="check the crc32 of every file")
    return parser


if __name__ == "__main__":
    run(main)
