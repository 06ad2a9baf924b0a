"""The same numbers on every layout: loss, gradient norm and weights of one rank.

Rows hold several documents, micro-batches hold two rows, no tensor-parallel size divides the
vocabulary. fp64 is compared at 1e-10 of the largest magnitude (sums in another order), fp32
losses and norms at 1e-5 with SGD and 1e-4 with Adam (which amplifies rounding noise).
"""

import functools
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing import iteration_folder
from tests.utils.corpus import write_corpus
from tests.utils.jobs import TINY, metrics_of, run_job, tensors_of

Grid = tuple[int, int, int, int, int]
"""(tp, ulysses, ring, pp, dp)"""

GRIDS: list[Grid] = [
    (2, 1, 1, 1, 1),
    (1, 2, 1, 1, 1),
    (1, 1, 2, 1, 1),
    (1, 1, 1, 2, 1),
    (1, 1, 1, 1, 2),
    (2, 2, 2, 1, 1),
    (2, 1, 2, 2, 1),
    (2, 2, 1, 2, 1),
    (1, 2, 2, 1, 2),
    (1, 1, 4, 2, 1),
    (2, 1, 1, 2, 2),
    (4, 1, 1, 1, 2),
]
CORPUS_FOLDER = tempfile.TemporaryDirectory()


@functools.cache
def base() -> list[str]:
    """Flags over a corpus of documents of 1 to 40 tokens: several in each row of 64."""
    corpus = write_corpus(
        f"{CORPUS_FOLDER.name}/short", documents=400, vocab_size=97, longest=40, seed=5
    )
    return [*BASE, f"--data-path={corpus}", "--split=100,0,0"]


BASE = [
    *(flag for flag in TINY if flag != "--mock-data"),
    "--train-iters=5",
    "--micro-batch-size=2",
    "--global-batch-size=8",
    "--untie-embeddings-and-output-weights",
    "--clip-grad=0.5",
]
VARIATIONS: dict[str, list[str]] = {
    "plain": [],
    "tied": ["--no-untie-embeddings-and-output-weights"],
    "recompute": ["--recompute-granularity=full"],
    "recompute attention": ["--recompute-granularity=full", "--recompute-attention"],
    "chunks": ["--mlp-chunk-size=24", "--loss-chunk-size=17"],
    "selective": [
        "--recompute-granularity=selective",
        "--recompute-modules",
        "mlp",
        "layernorm",
        "core_attn",
    ],
    "zero 3": ["--data-parallel-sharding-strategy=optim_grads_params"],
    "zero 1": ["--use-distributed-optimizer"],
    "balanced": ["--cp-layout=balanced"],
    "striped": ["--cp-layout=striped"],
    "contiguous": ["--cp-layout=contiguous"],
    "window": ["--window-size=9"],
    "best-fit": ["--packing=best-fit"],
    "gelu and biases": [
        "--no-swiglu",
        "--add-bias-linear",
        "--normalization=LayerNorm",
        "--qk-layernorm",
    ],
    "learned positions": [
        "--position-embedding-type=learned_absolute",
        "--max-position-embeddings=64",
    ],
}
SEED = int(os.environ.get("TEST_SEED", random.SystemRandom().randrange(10**6)))


def grid_flags(grid: Grid) -> tuple[int, list[str]]:
    tp, ulysses, ring, pp, dp = grid
    flags = [
        f"--tensor-model-parallel-size={tp}",
        f"--pipeline-model-parallel-size={pp}",
        f"--context-parallel-size={ulysses * ring}",
        "--hierarchical-context-parallel-sizes",
        str(ulysses),
        str(ring),
    ]
    if tp > 1:
        flags.append("--sequence-parallel")
    return tp * ulysses * ring * pp * dp, flags


def outcome(world: int, flags: list[str]) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        where = [f"--metrics-file={root}/m.jsonl", f"--save={root}/ck"]
        run_job(world, [*base(), *flags, *where]).check()
        tensors = tensors_of(iteration_folder(root / "ck", 5))
        weights = {name: value for name, value in tensors.items() if name.startswith("model.")}
        return metrics_of(root / "m.jsonl"), weights


@functools.cache
def alone(flags: tuple[str, ...]) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    return outcome(1, list(flags))


def same(grid: Grid, flags: list[str], *, tolerance: float, weights: bool) -> None:
    expected_metrics, expected = alone(tuple(flags))
    world, more = grid_flags(grid)
    metrics, got = outcome(world, [*flags, *more])
    assert len(metrics) == len(expected_metrics) == 5
    for here, there in zip(metrics, expected_metrics, strict=True):
        for key in ("lm_loss", "grad_norm"):
            assert abs(here[key] - there[key]) <= tolerance * abs(there[key]), (key, here, there)
        assert here["loss_tokens"] == there["loss_tokens"]
        assert here["consumed_tokens"] == there["consumed_tokens"]
    assert got.keys() == expected.keys()
    if weights:
        for name, value in expected.items():
            scale = value.abs().max()
            error = (got[name] - value).abs().max() / scale
            assert error <= tolerance, (name, float(error))


def optimizer_flags(name: str) -> list[str]:
    return ["--optimizer=sgd", "--lr=0.1"] if name == "sgd" else ["--optimizer=adam"]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_double_precision(grid: Grid, optimizer: str) -> None:
    flags = ["--params-dtype=float64", *optimizer_flags(optimizer)]
    same(grid, flags, tolerance=1e-10, weights=True)


FP32_SAMPLE = random.Random(SEED).sample(GRIDS, 3)


@pytest.mark.parametrize("grid", FP32_SAMPLE, ids=str)
@pytest.mark.parametrize(("optimizer", "tolerance"), [("sgd", 1e-5), ("adam", 1e-4)])
def test_single_precision(grid: Grid, optimizer: str, tolerance: float) -> None:
    print(f"TEST_SEED={SEED}")
    same(grid, optimizer_flags(optimizer), tolerance=tolerance, weights=False)


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(("optimizer", "tolerance"), [("sgd", 1e-5), ("adam", 1e-4)])
def test_single_precision_everywhere(grid: Grid, optimizer: str, tolerance: float) -> None:
    same(grid, optimizer_flags(optimizer), tolerance=tolerance, weights=False)


def _variation(name: str, grid: Grid) -> None:
    flags = ["--params-dtype=float64", *optimizer_flags("adam"), *VARIATIONS[name]]
    same(grid, flags, tolerance=1e-10, weights=True)


_choose = random.Random(SEED + 1)
VARIED = [(name, _choose.choice(GRIDS[5:])) for name in VARIATIONS if name != "plain"]


@pytest.mark.parametrize(("name", "grid"), VARIED, ids=str)
def test_variations(name: str, grid: Grid) -> None:
    print(f"TEST_SEED={SEED}")
    _variation(name, grid)


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", VARIATIONS)
def test_variations_everywhere(name: str, grid: Grid) -> None:
    _variation(name, grid)


@pytest.mark.parametrize("grid", [(1, 1, 1, 2, 1), (2, 1, 2, 2, 1), (1, 2, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_interleaved_pipeline(grid: Grid, tied: bool) -> None:
    flags = ["--params-dtype=float64", "--micro-batch-size=1"]
    flags += ["--no-untie-embeddings-and-output-weights"] if tied else []
    expected_metrics, expected = alone(tuple(flags))
    world, more = grid_flags(grid)
    metrics, got = outcome(world, [*flags, *more, "--num-layers-per-virtual-pipeline-stage=1"])
    for here, there in zip(metrics, expected_metrics, strict=True):
        assert abs(here["lm_loss"] - there["lm_loss"]) <= 1e-10 * there["lm_loss"]
        assert abs(here["grad_norm"] - there["grad_norm"]) <= 1e-10 * there["grad_norm"]
    for name, value in expected.items():
        assert (got[name] - value).abs().max() <= 1e-10 * value.abs().max(), name
