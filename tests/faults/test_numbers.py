"""Numbers that went wrong on one rank: all ranks notice at the same step, and lose nothing."""

import json
import math
import os
import random
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import iteration_folder, read_state
from megatron.training.health import LossSpikes
from tests.faults import injection
from tests.faults.injection import at_call
from tests.faults.small import SMALL, numbers, saving
from tests.utils.jobs import metrics_of, run_job, tensors_of

DP2 = ("--use-distributed-optimizer",)


def test_a_nan_on_one_rank_skips_the_update_on_all(tmp_path: Path) -> None:
    """Calls 2 and 3 of a rank are its micro-batches of iteration 2."""
    hook = partial(at_call, victim=1, action=injection.poison, first=3)
    result = run_job(2, saving(tmp_path, "faulty", *DP2), hook=hook, timeout=60).check()
    assert "iteration 2: update skipped, not finite" in result.errors[0]
    run_job(2, saving(tmp_path, "told", *DP2, "--iterations-to-skip", "2"), timeout=60).check()
    faulty = metrics_of(tmp_path / "faulty.jsonl")
    assert [record["skipped"] for record in faulty] == [0, 1, 1, 1, 1, 1]
    assert faulty[1]["lm_loss"] is None
    assert numbers(tmp_path, "faulty")[2:] == numbers(tmp_path, "told")[1:]
    assert read_state(iteration_folder(tmp_path / "faulty", 6))["train_state"]["skipped"] == 1
    told = tensors_of(iteration_folder(tmp_path / "told", 6))
    for name, value in tensors_of(iteration_folder(tmp_path / "faulty", 6)).items():
        assert torch.equal(value, told[name]), name


@pytest.mark.parametrize(
    "grid",
    [
        ("--tensor-model-parallel-size=2", "--sequence-parallel"),
        ("--pipeline-model-parallel-size=2",),
        ("--context-parallel-size=2", "--cp-comm-type=p2p"),
    ],
    ids=["tp", "pp", "ring"],
)
def test_a_nan_anywhere_in_the_grid(tmp_path: Path, grid: tuple[str, ...]) -> None:
    """An infinite loss or gradient of one rank is one of all: none updates alone."""
    hook = partial(at_call, victim=1, action=injection.poison, first=4, last=7)
    argv = saving(tmp_path, "run", *grid, "--train-iters=3")
    run_job(2, argv, hook=hook, timeout=60).check()
    assert [record["skipped"] for record in metrics_of(tmp_path / "run.jsonl")] == [0, 1, 1]


def test_too_many_in_a_row_stop_with_state_and_position(tmp_path: Path) -> None:
    hook = partial(at_call, victim=1, action=injection.poison, first=4, last=100)
    argv = saving(tmp_path, "run", "--max-skipped-iterations=2")
    stopped = run_job(2, argv, hook=hook, timeout=60).check(3)
    assert "stopping at token 512 of the stream" in stopped.errors[0]
    state = read_state(iteration_folder(tmp_path / "run", 4))["train_state"]
    assert (state["iteration"], state["consumed_tokens"], state["skipped"]) == (4, 512, 2)
    # Started again without the fault, told to pass over the next rows, it goes on.
    run_job(2, [*argv, "--iterations-to-skip", "5"], timeout=60).check()
    run_job(2, saving(tmp_path, "told", "--iterations-to-skip", "3", "4", "5")).check()
    assert numbers(tmp_path, "run")[-1] == numbers(tmp_path, "told")[-1]


GRIDS = {
    "data": (2, [], "backward"),
    "pipeline": (4, ["--pipeline-model-parallel-size=2"], "backward"),
    "ring": (2, ["--context-parallel-size=2", "--cp-comm-type=p2p"], "backward"),
    "tensor": (2, ["--tensor-model-parallel-size=2", "--sequence-parallel"], "forward"),
    "zero 3": (2, ["--data-parallel-sharding-strategy=optim_grads_params"], "forward"),
}


SEED = int(os.environ.get("TEST_SEED", random.SystemRandom().randrange(10**6)))


@pytest.mark.parametrize("name", random.Random(SEED).sample(list(GRIDS), 2))
def test_a_flipped_bit_is_found_and_the_rank_named(tmp_path: Path, name: str) -> None:
    print(f"TEST_SEED={SEED}")
    flipped_bit(tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRIDS)
def test_a_flipped_bit_on_every_grid(tmp_path: Path, name: str) -> None:
    flipped_bit(tmp_path, name)


def flipped_bit(tmp_path: Path, name: str) -> None:
    world, grid, phase = GRIDS[name]
    # Iteration 2 is computed twice; the flip is in the first computation of iteration 4.
    per_step = 2 if name in ("data", "pipeline", "zero 3") else 4
    calls = per_step * (1 + 2 + 1)
    action = injection.flip_backward if phase == "backward" else injection.flip_forward
    hook = partial(at_call, victim=1, action=action, first=calls)
    argv = saving(tmp_path, "run", *grid, "--rerun-check-interval=2", "--params-dtype=float64")
    found = run_job(world, argv, hook=hook, timeout=90).check(4)
    assert "at iteration 4: rank 1 computed other bits" in found.errors[0], found.errors[0]
    assert phase in found.errors[0]
    assert "the fault came and went" in found.errors[0]
    assert read_state(iteration_folder(tmp_path / "run", 3))["train_state"]["iteration"] == 3
    run_job(world, argv, timeout=90).check()
    plain = saving(tmp_path, "plain", *grid, "--params-dtype=float64")
    run_job(world, plain, timeout=90).check()
    assert numbers(tmp_path, "run") == numbers(tmp_path, "plain")


def test_a_rerun_of_everything_changes_nothing(tmp_path: Path) -> None:
    grid = (
        "--num-layers=4",
        "--pipeline-model-parallel-size=2",
        "--num-layers-per-virtual-pipeline-stage=1",
        "--recompute-granularity=full",
        "--hidden-dropout=0.1",
        "--train-iters=3",
    )
    run_job(4, saving(tmp_path, "plain", *grid), timeout=90).check()
    checks = ("--rerun-check-interval=1", "--cp-check-interval=1")
    run_job(4, saving(tmp_path, "checked", *grid, *checks), timeout=90).check()
    assert numbers(tmp_path, "plain") == numbers(tmp_path, "checked")


@pytest.mark.parametrize("kind", [["--cp-comm-type=p2p"], ["--cp-comm-type=a2a"]], ids=str)
def test_a_corrupted_transfer_is_named(kind: list[str]) -> None:
    grid = ["--context-parallel-size=2", *kind, "--cp-check-interval=2"]
    hook = partial(injection.corrupt_transfer, victim=1, transfer=3)
    result = run_job(4, [*SMALL, *grid], hook=hook, timeout=60).check(1)
    assert "transfer check failed at iteration 2" in result.errors[1]
    assert "rank 1" in result.errors[0]


@pytest.mark.parametrize(
    "grid",
    [["--context-parallel-size=2"], ["--tensor-model-parallel-size=2"], []],
    ids=["cp", "tp", "dp"],
)
def test_a_rank_that_lost_its_place_in_the_data_is_caught(grid: list[str]) -> None:
    hook = partial(injection.reads_one_step_ahead, victim=1)
    argv = [*SMALL, *grid, "--cp-check-interval=1"]
    result = run_job(2, argv, hook=hook, timeout=60)
    assert result.codes in ([1, 1], [2, 2]), result.text
    assert "rank" in result.errors[0] and "1" in result.errors[0]
    assert "different batches" in result.errors[0] or "different settings" in result.errors[0]


def test_two_runs_are_bit_equal(tmp_path: Path) -> None:
    grid = ("--context-parallel-size=2", "--deterministic-mode", "--hidden-dropout=0.1")
    for name in ("one", "two"):
        run_job(2, saving(tmp_path, name, *grid), timeout=60).check()
    assert numbers(tmp_path, "one") == numbers(tmp_path, "two")
    one, two = (tensors_of(iteration_folder(tmp_path / name, 6)) for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    hook = partial(at_call, victim=1, action=injection.slow, last=1000)
    argv = saving(tmp_path, "run", "--log-interval=3")
    result = run_job(2, argv, hook=hook, timeout=60).check()
    records = metrics_of(tmp_path / "run.jsonl")
    assert [record["slowest_rank"] for record in records] == [1, 1]
    for record in records:
        assert record["step_time_min"] < record["step_time_max"] < 1.2 * record["iteration_time"]
    assert "slowest rank 1: busy" in result.output[0]


def test_loss_spikes() -> None:
    spikes = LossSpikes()
    assert all(spikes.look(5.0 - 0.01 * i + 0.02 * (i % 3)) is None for i in range(50))
    text = spikes.look(8.0)
    assert text is not None and "loss spike: 8.0000" in text
    assert spikes.look(math.nan) is None
    spikes.reset()
    assert spikes.look(100.0) is None


def test_metrics_stay_json_with_a_nan(tmp_path: Path) -> None:
    hook = partial(at_call, victim=0, action=injection.poison, first=0)
    run_job(1, saving(tmp_path, "run", "--train-iters=1"), hook=hook, timeout=60).check()
    assert json.loads((tmp_path / "run.jsonl").read_text())["grad_norm"] is None
