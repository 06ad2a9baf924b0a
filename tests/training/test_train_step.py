"""Whether a step is applied is one answer of all ranks."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.training.train_step import due, finite_everywhere
from tests.utils.ranks import run_ranks

CASES = [
    ((1.0, 1.0), (1.0, 1.0), True),
    ((1.0, 1.0), (math.nan, 1.0), False),
    ((math.inf, 1.0), (1.0, 1.0), False),
    ((1.0, 1.0), (1.0, math.inf), False),
    ((-1.0, 0.0), (0.0, 0.0), True),
]


def answers(rank: int, world: int) -> list[bool]:
    parallel = SimpleNamespace(world_group=dist.group.WORLD)
    trainer: Any = SimpleNamespace(device=torch.device("cpu"), parallel=parallel)
    return [finite_everywhere(trainer, *case[rank]) for case in CASES]


def test_what_one_rank_cannot_apply_none_applies() -> None:
    """Also where loss or norm are finite on the others."""
    wanted = [case[2] for case in CASES]
    assert run_ranks(2, answers) == [wanted, wanted]


@pytest.mark.parametrize(
    ("interval", "iterations"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (7, [])]
)
def test_checks_fall_on_multiples_of_their_interval(interval: int, iterations: list[int]) -> None:
    assert [number for number in range(1, 7) if due(interval, number)] == iterations
