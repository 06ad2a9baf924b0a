"""Cost of checkpoints: a save against plain torch.save of the same bytes, background saves, loads.

    python tools/benchmark_checkpoint.py --ranks 2 --megabytes 512

Each rank holds half the megabytes as weights of its own and the other half as a tensor that
all ranks hold alike (of which each byte is written once). Everything is measured in one run,
in turn, ``--repeats`` times; the median counts:

- plain: each rank calls ``torch.save`` on the bytes it would write here, into a new file, with an
  fsync at the end and the file before it removed then, as here, and waits for the others;
  ``plain, no fsync`` leaves the fsync out;
- sync: ``CheckpointSaver.save``: plan, write, checksums, fsync, publish, pointer;
- async: how long ``save`` keeps the training thread, and until all is on disk;
- load: checksums verified and tensors read in place.

Bars: sync at least 0.5 of plain's throughput; async blocks for at most 15 % of sync's time.
Exit codes: 0 both bars met; 1 not.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from tools.command import writable
from tools.rank_team import Team

BLOCKS = 32
"""Tensors per rank."""
KINDS = ("plain", "plain, no fsync", "sync", "async blocks", "async whole", "load")


def set_up(jobs: dict[str, Any], rank: int, ranks: int, root: str, megabytes: int) -> None:
    """Tensors of this rank, and a saver of each kind."""
    import torch
    import torch.distributed as dist

    from megatron.core.dist_checkpointing import CheckpointSaver, Piece, make_pieces

    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=0, world_size=1)
    rows = megabytes * (1 << 20) // 4 // BLOCKS // 1024 // 2
    generator = torch.Generator().manual_seed(rank)
    own, shared = [], []
    for number in range(BLOCKS):
        own.append((f"own.{number}", torch.randn(rows, 1024, generator=generator)))
        shared.append((f"shared.{number}", torch.full((rows, 1024), float(number))))
    pieces = {name: Piece(tensor, (rank * rows, 0), (ranks * rows, 1024)) for name, tensor in own}
    jobs["pieces"] = pieces | make_pieces(shared, {})
    mine = [tensor for number, (_, tensor) in enumerate(shared) if number % ranks == rank]
    jobs["plain"] = [tensor for _, tensor in own] + mine
    jobs["root"] = Path(root)
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    jobs["sync"] = CheckpointSaver(Path(root) / "sync", group=groups[0], keep=1)
    jobs["async"] = CheckpointSaver(Path(root) / "async", group=groups[1], background=True, keep=1)
    jobs["group"] = groups[0]
    jobs["iteration"] = 0


def bytes_written(jobs: dict[str, Any], rank: int, ranks: int) -> int:
    """Bytes that this rank writes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in jobs["plain"])


def measure(jobs: dict[str, Any], rank: int, ranks: int, kind: str) -> dict[str, float]:
    """Seconds of one save or load, waiting for all ranks where they would."""
    import torch.distributed as dist

    os.sync()
    dist.barrier()
    began = time.perf_counter()
    if kind in ("plain", "plain, no fsync"):
        _plain(jobs, rank, sync=kind == "plain")
    elif kind == "load":
        _load(jobs)
    else:
        jobs["iteration"] += 1
        saver = jobs["sync" if kind == "sync" else "async"]
        saver.save(jobs["iteration"], jobs["pieces"], {"iteration": jobs["iteration"]})
        if kind != "sync":
            blocked = time.perf_counter() - began
            saver.wait()
            return {"async blocks": blocked, "async whole": time.perf_counter() - began}
    dist.barrier()
    return {kind: time.perf_counter() - began}


def _plain(jobs: dict[str, Any], rank: int, *, sync: bool) -> None:
    import torch

    old = jobs.get("plain path")
    jobs["iteration"] += 1
    path = jobs["plain path"] = jobs["root"] / f"plain_{rank}_{jobs['iteration']}.pt"
    with path.open("wb") as file:
        torch.save(jobs["plain"], file)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    if old is not None:
        old.unlink()


def _load(jobs: dict[str, Any]) -> None:
    from megatron.core.dist_checkpointing import latest_iteration, read_pieces, verify_checkpoint
    from megatron.core.dist_checkpointing.directory import iteration_folder

    root = jobs["root"] / "sync"
    iteration, _ = latest_iteration(root)
    assert iteration is not None, "the synchronous saves came before"
    folder = iteration_folder(root, iteration)
    verify_checkpoint(folder, group=jobs["group"])
    read_pieces(folder, jobs["pieces"], group=jobs["group"])


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        if args.json:
            writable("--json", args.json)
    except ValueError as error:
        parser.error(str(error))
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(dir=args.folder) as root:
        team = Team("tools.benchmark_checkpoint", args.ranks, args.threads)
        try:
            team.call("set_up", root, args.megabytes)
            total = sum(team.call("bytes_written"))
            for number in range(args.repeats + 1):
                for kind in ("plain", "sync", "async", "load", "plain, no fsync"):
                    answers = team.call("measure", kind)
                    for name in answers[0]:
                        if number:  # the first round warms up
                            seconds[name].append(max(answer[name] for answer in answers))
        finally:
            team.close()
    median = {kind: statistics.median(times) for kind, times in seconds.items()}
    for kind in KINDS:
        print(f"{kind:<16} {median[kind]:8.3f} s  {total / median[kind] / 1e9:7.2f} GB/s")
    throughput = median["plain"] / median["sync"]
    blocked = median["async blocks"] / median["sync"]
    print(f"sync / plain torch.save, throughput: {throughput:.2f} (bar: 0.5)")
    print(f"sync / plain without fsync:          {median['plain, no fsync'] / median['sync']:.2f}")
    print(f"async blocks / sync time:            {blocked:.3f} (bar: 0.15)")
    record = {"bytes": total, "ranks": args.ranks, "seconds": median}
    record |= {"throughput_ratio": throughput, "blocked_share": blocked}
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1))
    return 0 if throughput >= 0.5 and blocked <= 0.15 else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes that save together")
    parser.add_argument("--megabytes", type=int, default=512, help="tensors a rank holds")
    parser.add_argument("--threads", type=int, default=1, help="threads a rank")
    parser.add_argument("--repeats", type=int, default=3, help="saves and loads per median")
    parser.add_argument("--folder", help="where to write; default: the system's temporary folder")
    parser.add_argument("--json", help="file for the figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
