"""The loss on held-out rows: whose mean it is, on any layout, and that training doesn't notice."""

from pathlib import Path
from typing import Any

import pytest

from megatron.training.metrics_file import read_metrics
from tests.utils.corpus import write_corpus
from tests.utils.jobs import TINY, run_job

FLAGS = [
    *(flag for flag in TINY if flag != "--mock-data"),
    "--num-layers=1",
    "--params-dtype=float64",
    "--eval-iters=2",
    "--eval-interval=2",
    "--lr=0",  # every step sees the same weights
]


def outcome(folder: Path, name: str, world: int, *more: str) -> tuple[list[Any], list[Any]]:
    """(training records, evaluation records) of a run."""
    path = f"{folder}/{name}.jsonl"
    run_job(world, [*FLAGS, *more, f"--metrics-file={path}"], timeout=60).check()
    records = read_metrics(path)
    return (
        [record for record in records if "lm_loss" in record],
        [record for record in records if "eval_lm_loss" in record],
    )


def test_evaluation_is_the_mean_over_tokens_of_the_same_rows(tmp_path: Path) -> None:
    """Held-out and training data are one corpus here, so the rows are those of the first steps.

    Rows have unequally many loss tokens: a mean of means would be another number.
    """
    corpus = write_corpus(f"{tmp_path}/c", documents=300, vocab_size=97, longest=40, seed=3)
    data = (f"--train-data-path={corpus}", f"--valid-data-path={corpus}")
    steps, evaluations = outcome(tmp_path, "one", 1, *data)
    assert [record["iteration"] for record in evaluations] == [0, 2, 4]
    first = steps[:2]
    assert first[0]["loss_tokens"] != first[1]["loss_tokens"]
    tokens = sum(record["loss_tokens"] for record in first)
    mean = sum(record["lm_loss"] * record["loss_tokens"] for record in first) / tokens
    for record in evaluations:  # from the start of the data each time
        assert record["loss_tokens"] == tokens and record["split"] == "valid"
        assert record["eval_lm_loss"] == pytest.approx(mean, rel=1e-12)

    dropping = ("--hidden-dropout=0.4", "--attention-dropout=0.4")
    grid = ("--context-parallel-size=2", "--cp-comm-type=p2p")
    other_steps, others = outcome(tmp_path, "four", 4, *data, *dropping, *grid)
    for here, there in zip(others, evaluations, strict=True):
        assert here["loss_tokens"] == there["loss_tokens"]
        assert here["eval_lm_loss"] == pytest.approx(there["eval_lm_loss"], rel=1e-10)
    assert other_steps[0]["lm_loss"] != pytest.approx(steps[0]["lm_loss"], rel=1e-3), "dropout"
    undisturbed, none = outcome(tmp_path, "alone", 4, *data, *dropping, *grid, "--eval-iters=0")
    assert none == []
    for key in ("lm_loss", "grad_norm", "consumed_tokens"):
        assert [r[key] for r in undisturbed] == [r[key] for r in other_steps], key


def test_missing_validation_data_is_said_once(tmp_path: Path) -> None:
    corpus = write_corpus(f"{tmp_path}/c", documents=50, vocab_size=97, longest=40)
    flags = [*FLAGS, f"--data-path={corpus}", "--split=100,0,0"]
    text = run_job(1, flags, timeout=60).check().output[0]
    assert text.count("no validation data") == 1
    assert "evaluation on" not in text
