"""What the comparisons share: ranks, inputs, ours against theirs (run in the peers' venv)."""

import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

TOLERANCE = 1e-5
"""float32, relative to the largest magnitude: both sides round on their own."""


def run_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(rank, world, *args)`` in gloo ranks; the results by rank."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        queue = context.Queue()
        processes = [
            context.Process(target=_worker, args=(queue, rank, world, store, function, args))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        answers = [queue.get(timeout=900) for _ in processes]
        for process in processes:
            process.join()
    for rank, failure, _ in answers:
        if failure:
            raise RuntimeError(f"rank {rank}:\n{failure}")
    return [value for _, _, value in sorted(answers, key=lambda answer: answer[0])]


def _worker(
    queue: Any, rank: int, world: int, store: str, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        queue.put((rank, "", function(rank, world, *args)))
    except Exception:
        queue.put((rank, traceback.format_exc(), None))
    dist.barrier()
    dist.destroy_process_group()


def inputs(length: int, heads: int, kv_heads: int, dim: int, batch: int = 1) -> list[torch.Tensor]:
    """Global q, k, v, grad_out, equal on all ranks."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(batch, length, count, dim, generator=generator)
        for count in (heads, kv_heads, kv_heads, heads)
    ]


def leaves(tensors: list[torch.Tensor], at: Any) -> list[torch.Tensor]:
    """This rank's rows of q, k, v as leaves."""
    return [x[:, at].clone().requires_grad_() for x in tensors[:3]]


def differences(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> dict[str, float]:
    """Largest difference of out, dq, dk, dv relative to the largest magnitude."""
    return {
        name: float((a - b).abs().max() / b.abs().max())
        for name, a, b in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True)
    }


def report(results: dict[str, list[dict[str, float]]]) -> None:
    """Print each case's worst differences as JSON; exit 1 if one is beyond the tolerance."""
    worst = {
        case: {name: max(rank[name] for rank in ranks) for name in ranks[0]}
        for case, ranks in results.items()
    }
    print(json.dumps(worst, indent=1))
    bad = [case for case, errors in worst.items() if not max(errors.values()) <= TOLERANCE]
    sys.exit(f"beyond {TOLERANCE}: {', '.join(bad)}" if bad else 0)
