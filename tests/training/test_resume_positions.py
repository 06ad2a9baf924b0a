"""Faults 24, 26 and 27: the place in the data and the learning rate after a resume."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets import IndexedDatasetBuilder
from megatron.training.metrics_file import read_metrics
from tests.utils.corpus import write_corpus
from tests.utils.jobs import TINY, metrics_of, run_job

BASE = [
    *(flag for flag in TINY if not flag.startswith(("--mock-data", "--num-layers", "--seq"))),
    "--num-layers=2",
    "--seq-length=16",
    "--params-dtype=float64",
    "--micro-batch-size=1",
    "--lr-decay-style=constant",
]
KEYS = ("iteration", "lm_loss", "grad_norm", "consumed_samples", "consumed_tokens")


def essence(path: Path) -> list[dict[str, Any]]:
    return [{key: record[key] for key in KEYS} for record in metrics_of(path)]


def flags(folder: Path, name: str, load: str, *more: str) -> list[str]:
    where = [f"--save={folder}/{name}", f"--load={folder}/{load}"]
    return [*BASE, *where, f"--metrics-file={folder}/{name}.jsonl", *more]


@pytest.mark.parametrize(
    "ranks, rows, iterations, stops",
    [(1, 2, 15, 5), (3, 3, 10, 4)],
    ids=["stopped at epoch ends", "3 ranks and 10 rows"],
)
def test_three_epochs(tmp_path: Path, ranks: int, rows: int, iterations: int, stops: int) -> None:
    """Fault 24: 10 documents of one row each, three times over."""
    with IndexedDatasetBuilder(str(tmp_path / "ten"), np.uint16) as builder:
        for document in range(10):
            builder.add_document((np.arange(16) * (document + 1) + document) % 97)
    more = [f"--data-path={tmp_path}/ten", "--split=100,0,0", "--packing=best-fit"]
    more += [f"--global-batch-size={rows}", f"--train-iters={iterations}"]
    run_job(ranks, flags(tmp_path, "whole", "whole", *more)).check()
    expected = essence(tmp_path / "whole.jsonl")
    assert [record["iteration"] for record in expected] == list(range(1, iterations + 1))
    for _ in range(-(-iterations // stops)):
        run_job(ranks, flags(tmp_path, "parts", "parts", *more, f"--exit-interval={stops}")).check()
    assert essence(tmp_path / "parts.jsonl") == expected


def test_the_place_in_the_data_survives_other_ranks(tmp_path: Path) -> None:
    """Fault 26: from 4 data-parallel ranks to 2, 1, 8 and to context parallel 2."""
    corpus = write_corpus(f"{tmp_path}/c", documents=200, vocab_size=97, longest=40)
    more = [f"--data-path={corpus}", "--split=100,0,0", "--global-batch-size=8", "--train-iters=4"]
    run_job(4, flags(tmp_path, "whole", "whole", *more)).check()
    run_job(4, flags(tmp_path, "half", "half", *more, "--exit-interval=2")).check()
    expected = essence(tmp_path / "whole.jsonl")[2:]
    for ranks, cp in ((2, 1), (1, 1), (8, 1), (4, 2)):
        name = f"on{ranks}-{cp}"
        grid = f"--context-parallel-size={cp}"
        run_job(ranks, flags(tmp_path, name, "half", *more, grid)).check()
        got = essence(tmp_path / f"{name}.jsonl")
        assert len(got) == len(expected) == 2
        for here, there in zip(got, expected, strict=True):
            for key in KEYS:
                assert abs(here[key] - there[key]) <= 1e-10 * abs(there[key]), (name, key)


def test_files_replaced_under_their_name_are_refused(tmp_path: Path) -> None:
    corpus = write_corpus(f"{tmp_path}/c", documents=60, vocab_size=97, longest=40)
    more = [f"--data-path={corpus}", "--split=100,0,0", "--global-batch-size=4", "--train-iters=4"]
    run_job(2, flags(tmp_path, "run", "run", *more, "--exit-interval=2")).check()
    for suffix in ("bin", "idx"):
        (tmp_path / f"c.{suffix}").rename(tmp_path / f"old.{suffix}")
    write_corpus(f"{tmp_path}/c", documents=61, vocab_size=97, longest=40, seed=5)
    result = run_job(2, flags(tmp_path, "run", "run", *more)).check(2)
    assert "was begun on other documents" in result.errors[0]
    assert "--allow-changed data_path" in result.errors[0]
    assert len(metrics_of(tmp_path / "run.jsonl")) == 2
    for suffix in ("bin", "idx"):
        (tmp_path / f"c.{suffix}").rename(tmp_path / f"new.{suffix}")
        (tmp_path / f"old.{suffix}").rename(tmp_path / f"c.{suffix}")
    more[0] = f"--data-path={tmp_path}/new"
    run_job(2, flags(tmp_path, "run", "run", *more, "--allow-changed=data_path")).check()
    assert len(metrics_of(tmp_path / "run.jsonl")) == 4


def rates(folder: Path, name: str) -> list[float]:
    return [r["learning_rate"] for r in read_metrics(f"{folder}/{name}.jsonl") if "lm_loss" in r]


def test_the_learning_rate_goes_on(tmp_path: Path) -> None:
    """Fault 27: cosine from 6e-4 to 6e-5 over 100 steps, stopped at 40."""
    more = ["--mock-data", "--global-batch-size=1", "--num-layers=1", "--train-iters=100"]
    cosine = [*more, "--lr=6e-4", "--min-lr=6e-5", "--lr-decay-style=cosine"]
    run_job(1, flags(tmp_path, "whole", "whole", *cosine)).check()
    run_job(1, flags(tmp_path, "start", "start", *cosine, "--exit-interval=40")).check()
    run_job(1, flags(tmp_path, "end", "start", *cosine)).check()
    whole = rates(tmp_path, "whole")
    assert rates(tmp_path, "start") + rates(tmp_path, "end") == whole
    assert whole[0] == 6e-4 and whole[50] == pytest.approx((6e-4 + 6e-5) / 2)

    other = [*more, "--lr=3e-4", "--min-lr=3e-5", "--lr-decay-style=cosine"]
    refused = run_job(1, flags(tmp_path, "no", "start", *other)).check(2)
    assert "--override-opt-param-scheduler" in refused.errors[0]
    other.append("--override-opt-param-scheduler")
    run_job(1, flags(tmp_path, "new", "start", *other)).check()
    assert rates(tmp_path, "new") == pytest.approx([rate / 2 for rate in whole[40:]], rel=1e-12)
