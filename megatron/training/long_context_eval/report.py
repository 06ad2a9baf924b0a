"""The results of long-context evaluations as text tables and as JSON."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.training.long_context_eval.position_loss import PositionLoss
from megatron.training.long_context_eval.retrieval import RetrievalGrid


def position_table(results: Mapping[str, PositionLoss]) -> str:
    """One line a bucket, one column a model; losses in nats a token."""
    names = list(results)
    width = max(9, *(len(name) for name in names))
    first = results[names[0]]
    lines = [
        f"loss by position over {first.documents} documents of {first.length:,} tokens",
        f"{'positions':>17}" + "".join(f"  {name:>{width}}" for name in names),
    ]
    for index, bucket in enumerate(first.buckets):
        cells = (results[name].buckets[index].loss for name in names)
        label = f"{bucket.low:,}..{bucket.high - 1:,}"
        lines.append(f"{label:>17}" + "".join(f"  {loss:>{width}.4f}" for loss in cells))
    means = "".join(f"  {results[name].mean():>{width}.4f}" for name in names)
    return "\n".join([*lines, f"{'all':>17}{means}"])


def grid_table(name: str, grid: RetrievalGrid) -> str:
    """One line a length, one column a depth; share of right answers."""
    lines = [
        f"passkey retrieval of {name}: {grid.trials} trials a cell, every digit right",
        f"{'length':>10}" + "".join(f"  d={depth:<5.2f}" for depth in grid.depths) + "   all",
    ]
    for length, row in zip(grid.lengths, grid.accuracy, strict=True):
        cells = "".join(f"  {value:>6.0%} " for value in row)
        lines.append(f"{length:>10,}{cells}{grid.mean(length):>6.1%}")
    return "\n".join(lines)


def as_json(
    losses: Mapping[str, PositionLoss], grids: Mapping[str, RetrievalGrid]
) -> dict[str, Any]:
    """Plain values of all results."""
    return {
        "loss_by_position": {name: dataclasses.asdict(value) for name, value in losses.items()},
        "passkey": {name: dataclasses.asdict(value) for name, value in grids.items()},
    }
