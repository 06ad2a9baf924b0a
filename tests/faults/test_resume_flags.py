"""What a load takes over: --finetune, --no-load-optim, --no-load-rng, --ckpt-step and kin."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import iteration_folder, read_state
from tests.faults import injection
from tests.faults.small import SMALL, numbers, saving
from tests.utils.jobs import run_job, tensors_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of six iterations with checkpoints of 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("run")
    run_job(2, saving(folder, "run", "--save-interval=2"), timeout=90).check()
    yield folder


def loading(run: Path, folder: Path, name: str, *more: str) -> list[str]:
    return [
        *SMALL,
        f"--load={run}/run",
        f"--save={folder}/{name}",
        f"--metrics-file={folder}/{name}.jsonl",
        *more,
    ]


def test_a_chosen_step(run: Path, tmp_path: Path) -> None:
    run_job(2, loading(run, tmp_path, "next", "--ckpt-step=4"), timeout=60).check()
    assert numbers(tmp_path, "next") == numbers(run, "run")[4:]
    refused = run_job(2, loading(run, tmp_path, "next", "--ckpt-step=3"), timeout=60).check(2)
    assert "--ckpt-step 3 has no whole checkpoint" in refused.errors[0]
    assert "[2, 4, 6]" in refused.errors[0]


def test_finetune_takes_weights_alone(run: Path, tmp_path: Path) -> None:
    """Another length, another optimizer, iteration 0: nothing of it is refused."""
    more = ("--finetune", "--seq-length=64", "--optimizer=sgd", "--lr=0", "--train-iters=1")
    run_job(2, loading(run, tmp_path, "next", *more), timeout=60).check()
    state = read_state(iteration_folder(tmp_path / "next", 1))["train_state"]
    assert (state["iteration"], state["consumed_samples"]) == (1, 4)
    before = tensors_of(iteration_folder(run / "run", 6))
    after = tensors_of(iteration_folder(tmp_path / "next", 1))
    for name, value in after.items():
        if name.startswith("model."):
            assert torch.equal(value, before[name]), name


def test_without_optimizer_state(run: Path, tmp_path: Path) -> None:
    """Moments start from zero: the first step is as large as Adam's first step ever is."""
    more = ("--ckpt-step=4", "--no-load-optim", "--no-load-rng")
    run_job(2, loading(run, tmp_path, "next", *more), timeout=60).check()
    got, expected = numbers(tmp_path, "next"), numbers(run, "run")[4:]
    assert got[0] == expected[0], "the first loss and gradient are those of the weights"
    assert got[1] != expected[1]


def test_a_checkpoint_without_optimizer_state(run: Path, tmp_path: Path) -> None:
    argv = saving(tmp_path, "run", "--no-save-optim", "--exit-interval=4")
    run_job(2, argv, timeout=60).check()
    assert not any(
        "optimizer" in name for name in tensors_of(iteration_folder(tmp_path / "run", 4))
    )
    refused = run_job(2, argv, timeout=60).check(1)
    assert "--no-load-optim" in refused.errors[0] and "Traceback" not in refused.text
    run_job(2, [*argv, "--no-load-optim"], timeout=60).check()


def test_flags_that_change_the_weights_are_refused(run: Path, tmp_path: Path) -> None:
    more = ("--finetune", "--num-layers=1")
    refused = run_job(2, loading(run, tmp_path, "next", *more), timeout=60)
    assert 0 not in refused.codes
    assert "decoder.layers.1" in refused.errors[0] and "Traceback" not in refused.text
    more = ("--finetune", "--num-layers=4")
    refused = run_job(2, loading(run, tmp_path, "next", *more), timeout=60)
    assert 0 not in refused.codes
    assert "decoder.layers." in refused.errors[0] and "Traceback" not in refused.text


def drawn(output: list[str]) -> list[list[str]]:
    """By rank, what ``draws_random_numbers`` printed."""
    return [[line for line in text.splitlines() if line.startswith("drew")] for text in output]


def test_each_rank_gets_its_own_random_state_back(tmp_path: Path) -> None:
    hook = injection.draws_random_numbers
    whole = drawn(run_job(2, saving(tmp_path, "whole"), hook=hook, timeout=60).check().output)
    assert whole[0] != whole[1]
    argv = saving(tmp_path, "parts", "--save-interval=1")
    first = drawn(run_job(2, [*argv, "--exit-interval=3"], hook=hook, timeout=60).check().output)
    fresh = ["--no-load-rng", "--ckpt-step=3", f"--save={tmp_path}/elsewhere"]
    other = drawn(run_job(2, [*argv, *fresh], hook=hook, timeout=60).check().output)
    # On another number of ranks each starts from (seed, iteration, rank): twice the same.
    four = []
    for name in ("one", "two"):
        more = [f"--save={tmp_path}/{name}", "--ckpt-step=3"]
        four.append(drawn(run_job(4, [*argv, *more], hook=hook).check().output))
    rest = drawn(run_job(2, argv, hook=hook, timeout=60).check().output)
    assert [a + b for a, b in zip(first, rest, strict=True)] == whole
    assert other != rest
    assert four[0] == four[1] and len({str(draws) for draws in four[0]}) == 4
