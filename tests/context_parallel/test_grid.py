"""Context-parallel attention against dense float64 over the grid of cases.

Each run draws a random sample and prints its seed; ``--slow`` runs the whole grid, and so does
``tools/benchmark_attention.py --check --full``.
"""

import os
import random
import time

import pytest

from tests.utils.ranks import run_ranks
from tools import attention_grid, benchmark_attention
from tools.attention_grid import (
    HEADS,
    LAYOUTS,
    PACKINGS,
    SPLITS,
    WINDOWS,
    Case,
    comm_types,
    full_grid,
    lengths,
    run_cases,
    sample_case,
)

SEED = int(os.environ.get("GRID_SEED", time.time_ns() % 1_000_000))


def check(split: tuple[int, int], cases: list, timeout: float) -> None:
    answers = run_ranks(split[0] * split[1], run_cases, split, cases, timeout=timeout)
    bad = sorted({line for answer in answers for line in answer})
    assert not bad, f"{len(bad)} of {len(cases)} cases (seed {SEED}):\n" + "\n".join(bad[:10])


@pytest.mark.parametrize("split", SPLITS, ids=lambda s: f"u{s[0]}r{s[1]}")
def test_sample(split: tuple[int, int]) -> None:
    print(f"grid seed {SEED}")
    rng = random.Random(f"{SEED} {split}")
    count = 40 if split[0] * split[1] <= 4 else 16
    check(split, [sample_case(rng, split) for _ in range(count)], timeout=180)


def test_grid_is_whole() -> None:
    """Every value of every axis occurs with every layout and communication."""
    for split in ((1, 2), (2, 2)):
        cases = list(full_grid(split))
        for layout in LAYOUTS:
            for comm in comm_types(*split):
                mine = [c for c in cases if (c.layout, c.comm) == (layout, comm)]
                assert {c.length for c in mine} == set(lengths(layout, *split))
                assert {(c.heads, c.packings[0], c.window) for c in mine} >= {
                    (h, p, w) for h in HEADS for p in PACKINGS for w in WINDOWS
                }
                assert {c.dtype for c in mine} == {"float64", "float32"}
                assert {c.backend for c in mine} == {"auto", "reference"}
                assert {len(c.packings) for c in mine} == {1, 2}


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("split", SPLITS, ids=lambda s: f"u{s[0]}r{s[1]}")
def test_full_grid(split: tuple[int, int]) -> None:
    check(split, list(full_grid(split)), timeout=7000)


def test_benchmark_tool_checks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``tools/benchmark_attention.py --check`` runs the same cases and says how many are bad."""
    monkeypatch.setattr(attention_grid, "SPLITS", ((1, 1), (2, 1)))
    assert benchmark_attention.main(["--check", "--check-cases", "3", "--seed", "5"]) == 0
    printed = capsys.readouterr().out
    assert "seed 5" in printed and "6 cases, 0 bad" in printed
    monkeypatch.setattr(attention_grid, "sample_case", lambda rng, split: broken(split))
    assert benchmark_attention.main(["--check", "--check-cases", "1"]) == 1


def broken(split: tuple[int, int]) -> Case:
    """bfloat16 cannot meet the tolerance of float32."""
    return Case(*split, "zigzag", "auto", (4, 4), 16, ("none",), dtype="bfloat16")
