"""A run that stops and resumes gives the numbers of the run that didn't, bit for bit."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing import iteration_folder, latest_iteration
from tests.utils.corpus import write_corpus
from tests.utils.jobs import TINY, Job, metrics_of, run_job, tensors_of

STAGES = """
stages:
  - {seq_length: 32, train_iters: 3, rotary_base: 1e4, context_parallel: [1, 1],
     global_batch_size: 8, micro_batch_size: 1}
  - {seq_length: 64, train_iters: 2, rotary_base: 5e4, context_parallel: [2, 1],
     global_batch_size: 4, micro_batch_size: 1}
  - {seq_length: 128, train_iters: 2, rotary_base: 5e5, context_parallel: [2, 2],
     global_batch_size: 2, micro_batch_size: 1}
"""
SAME = (
    "iteration",
    "stage",
    "seq_length",
    "rotary_base",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "consumed_tokens",
    "consumed_samples",
    "loss_tokens",
)


def flags(folder: Path, name: str, *more: str) -> list[str]:
    schedule = folder / "stages.yaml"
    schedule.write_text(STAGES)
    corpus = folder / "corpus"
    if not corpus.with_suffix(".idx").exists():
        write_corpus(str(corpus), documents=300, vocab_size=97, longest=60)
    leave_out = ("--mock-data", "--seq-length", "--train-iters", "--global", "--micro")
    return [
        *(flag for flag in TINY if not flag.startswith(leave_out)),
        f"--context-schedule={schedule}",
        f"--data-path={corpus}",
        "--split=80,20,0",
        "--use-distributed-optimizer",
        "--hidden-dropout=0.1",
        f"--save={folder}/{name}",
        f"--load={folder}/{name}",
        f"--metrics-file={folder}/{name}.jsonl",
        *more,
    ]


def essence(path: Path) -> list[dict[str, Any]]:
    return [{key: record[key] for key in SAME} for record in metrics_of(path)]


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_stopped_after_every_iteration(tmp_path: Path, packing: str) -> None:
    more = (f"--packing={packing}",)
    run_job(4, flags(tmp_path, "whole", *more)).check()
    expected = essence(tmp_path / "whole.jsonl")
    assert [record["stage"] for record in expected] == [1, 1, 1, 2, 2, 3, 3]
    for _ in range(7):
        run_job(4, flags(tmp_path, "parts", *more, "--exit-interval=1")).check()
    assert essence(tmp_path / "parts.jsonl") == expected
    whole = tensors_of(iteration_folder(tmp_path / "whole", 7))
    parts = tensors_of(iteration_folder(tmp_path / "parts", 7))
    for name, value in whole.items():
        if not name.startswith("rng."):
            assert torch.equal(parts[name], value), name
    # A finished run says so and leaves with 0.
    again = run_job(4, flags(tmp_path, "parts", *more)).check()
    assert "nothing to do" in again.output[0]


def test_other_layout_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    double = ("--params-dtype=float64", "--hidden-dropout=0")
    run_job(4, flags(tmp_path, "whole", *double)).check()
    expected = essence(tmp_path / "whole.jsonl")
    run_job(4, flags(tmp_path, "parts", *double, "--exit-interval=4")).check()
    grid = ("--tensor-model-parallel-size=2", "--sequence-parallel")
    run_job(8, flags(tmp_path, "parts", *double, *grid, "--async-save")).check()
    got = essence(tmp_path / "parts.jsonl")
    for here, there in zip(got, expected, strict=True):
        assert abs(here["lm_loss"] - there["lm_loss"]) < 1e-10 * there["lm_loss"]
        assert here["consumed_tokens"] == there["consumed_tokens"]


@pytest.mark.parametrize("when", ["early", "during"])
def test_a_signal_to_one_rank_saves_on_all(tmp_path: Path, when: str) -> None:
    more = ("--params-dtype=float64",)
    run_job(4, flags(tmp_path, "whole", *more)).check()
    job = Job(4, flags(tmp_path, "parts", *more))
    if when == "during":
        job.wait_for("iteration      2/", seconds=60)
    else:
        job.wait_for("world 4", seconds=60)
    pid = job.processes[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGUSR1)
    result = job.result(60)
    assert result.codes in ([99] * 4, [0] * 4), result.text
    if result.codes[0] == 99:
        iteration, _ = latest_iteration(tmp_path / "parts")  # none before the first step
        assert f"leaving after iteration {iteration or 0}" in result.output[0]
        run_job(4, flags(tmp_path, "parts", *more)).check()
    assert essence(tmp_path / "parts.jsonl") == essence(tmp_path / "whole.jsonl")


def test_changed_past_is_refused_and_allowed_on_request(tmp_path: Path) -> None:
    run_job(4, flags(tmp_path, "run", "--exit-interval=2")).check()
    argv = flags(tmp_path, "run", "--exit-interval=1")
    (tmp_path / "stages.yaml").write_text(STAGES.replace("1e4", "2e4"))
    refused = run_job(4, argv).check(2)
    assert "--allow-changed rotary_base" in refused.errors[0]
    assert "Traceback" not in refused.text
    run_job(4, [*argv, "--allow-changed=rotary_base"]).check()


def test_a_torn_metrics_line_is_cut(tmp_path: Path) -> None:
    run_job(4, flags(tmp_path, "run", "--exit-interval=2")).check()
    path = tmp_path / "run.jsonl"
    path.write_text(path.read_text() + '{"iteration": 3, "lm_lo')
    run_job(4, flags(tmp_path, "run")).check()
    lines = path.read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == list(range(1, 8))


def test_load_of_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    began = time.monotonic()
    result = run_job(1, [*TINY, f"--load={tmp_path}/nowhere"])
    assert result.codes == [2]
    assert "--load" in result.errors[0]
    assert time.monotonic() - began < 50  # sooner than any wait for other ranks ends (60 s)
