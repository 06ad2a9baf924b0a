"""A short loss curve that a refactor must not change.

fp64, one rank, best-fit rows of short documents, warmup and cosine decay. The tolerance allows
for other sums of another processor's matrix kernels in double precision, and nothing else.
"""

from pathlib import Path

import pytest

from tests.utils.corpus import write_corpus
from tests.utils.jobs import TINY, metrics_of, run_job

GOLDEN = [
    (4.601247295301371, 0.5848172335491261),
    (4.5927028286562335, 0.5592137217413357),
    (4.514345796016465, 0.6211434344569843),
    (4.3933188100815, 0.9625376772157803),
    (4.1911294987931145, 0.8278273570573863),
    (4.0056855398636735, 1.2121880372386193),
    (3.7689457099274093, 0.8148526722070858),
    (3.5891078992700645, 0.6545497770249097),
    (3.462114481439923, 0.6496703473236048),
    (3.3698818631379437, 0.6128179428992403),
    (3.3041770672395954, 0.6192037990637168),
    (3.276278021771684, 0.5800186186729814),
]
"""(loss, gradient norm) of iterations 1 to 12."""


@pytest.mark.parametrize(
    "grid",
    [[], ["--tensor-model-parallel-size=2", "--context-parallel-size=2", "--sequence-parallel"]],
    ids=["one rank", "four ranks"],
)
def test_loss_curve(tmp_path: Path, grid: list[str]) -> None:
    corpus = write_corpus(f"{tmp_path}/c", documents=300, vocab_size=97, longest=60, seed=3)
    flags = [flag for flag in TINY if flag != "--mock-data"]
    flags += [f"--data-path={corpus}", "--split=100,0,0", "--params-dtype=float64"]
    flags += ["--train-iters=12", "--lr-decay-style=cosine", "--lr-warmup-iters=3"]
    flags += ["--packing=best-fit", f"--metrics-file={tmp_path}/m.jsonl", *grid]
    run_job(4 if grid else 1, flags).check()
    records = metrics_of(tmp_path / "m.jsonl")
    assert len(records) == len(GOLDEN)
    for record, (loss, norm) in zip(records, GOLDEN, strict=True):
        assert record["lm_loss"] == pytest.approx(loss, rel=1e-9)
        assert record["grad_norm"] == pytest.approx(norm, rel=1e-8)
