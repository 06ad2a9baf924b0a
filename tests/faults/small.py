"""A job that is as small as it can be with every axis, and what to compare of its numbers."""

from pathlib import Path
from typing import Any

from tests.utils.jobs import TINY, metrics_of

SMALL = [
    *TINY,
    "--num-layers=2",
    "--hidden-size=16",
    "--ffn-hidden-size=32",
    "--num-attention-heads=2",
    "--num-query-groups=2",
    "--seq-length=32",
    "--global-batch-size=4",
    "--train-iters=6",
]
"""4 rows a step: with two data-parallel ranks two calls of a layer a step and rank."""


def saving(folder: Path, name: str, *more: str) -> list[str]:
    """SMALL with a folder to save to and resume from, and a metrics file."""
    return [
        *SMALL,
        f"--save={folder}/{name}",
        f"--load={folder}/{name}",
        f"--metrics-file={folder}/{name}.jsonl",
        *more,
    ]


def numbers(folder: Path, name: str) -> list[tuple[Any, ...]]:
    """What must be bit-equal, by iteration; of a line that was written twice the last."""
    last = {record["iteration"]: record for record in metrics_of(folder / f"{name}.jsonl")}
    keys = ("iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_tokens", "stage")
    return [tuple(record[key] for key in keys) for _, record in sorted(last.items())]
