"""Exit code 99 means: start me again with the same command. Whatever the command began with."""

import itertools
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing import iteration_folder, latest_iteration, read_state
from megatron.core.dist_checkpointing.directory import complete_iterations
from tests.faults.small import SMALL, numbers, saving
from tests.utils.jobs import run_job

CONSTANT = "--lr-decay-style=constant"


def signalled(rank: int, *, step: int, number: int = signal.SIGTERM) -> None:
    """The last rank gets a signal in its n-th step (from 1)."""
    if rank != int(os.environ["WORLD_SIZE"]) - 1:
        return
    from megatron.training import loop

    original, steps = loop.train_step, itertools.count(1)

    def train_step(*args: Any, **kwargs: Any) -> Any:
        if next(steps) == step:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    loop.train_step = train_step


def run_of_four(folder: Path, name: str = "first") -> str:
    run_job(1, saving(folder, name, CONSTANT, "--train-iters=4", "--save-interval=2")).check()
    return f"--load={folder}/{name}"


BEGINNINGS = {
    "finetune": (["--finetune"], 0),
    "weights of a step": (["--finetune", "--ckpt-step=2"], 0),
    "another folder": ([], 4),
    "a step of another": (["--ckpt-step=2"], 2),
    "fresh optimizer": (["--no-load-optim", "--no-load-rng"], 4),
}


@pytest.mark.parametrize("what", BEGINNINGS)
def test_a_run_begun_elsewhere_goes_on(tmp_path: Path, what: str) -> None:
    more, start = BEGINNINGS[what]
    first = run_of_four(tmp_path)
    more = [first, CONSTANT, f"--train-iters={start + 4}", *more]
    run_job(1, [*saving(tmp_path, "whole"), *more], timeout=60).check()
    argv = [*saving(tmp_path, "parts"), *more]
    left = run_job(1, argv, hook=partial(signalled, step=2), timeout=60).check(99)
    assert f"leaving after iteration {start + 2}" in left.output[0]
    second = run_job(1, argv, timeout=60).check().output[0]
    assert f"up to iteration {start + 2}; going on from there. To begin again, give" in second
    assert numbers(tmp_path, "parts") == numbers(tmp_path, "whole")
    # A third start finds all done; another beginning must not mix with this one.
    assert "nothing to do" in run_job(1, argv, timeout=60).check().output[0]
    refused = run_job(1, [*argv, "--no-load-rng", "--no-load-optim", "--ckpt-step=4"]).check(2)
    assert f"--save {tmp_path}/parts already holds checkpoints, up to" in refused.errors[0]
    assert f"--load {tmp_path}/parts to go on" in refused.errors[0]


def test_a_run_that_was_set_back_goes_on_when_its_start_was_pruned(tmp_path: Path) -> None:
    run_of_four(tmp_path, "run")
    run_of_four(tmp_path, "whole")
    more = ["--ckpt-step=2", "--train-iters=6", "--keep-checkpoints=1"]
    run_job(1, saving(tmp_path, "whole", CONSTANT, *more), timeout=60).check()
    argv = saving(tmp_path, "run", CONSTANT, *more, "--save-interval=1")
    run_job(1, argv, hook=partial(signalled, step=1), timeout=60).check(99)
    assert complete_iterations(tmp_path / "run") == [3, 4]
    assert latest_iteration(tmp_path / "run") == (3, None)
    second = run_job(1, argv, timeout=60).check()
    assert "--ckpt-step 2: --save" in second.output[0] and "up to iteration 3" in second.output[0]
    assert numbers(tmp_path, "run") == numbers(tmp_path, "whole")
    state = read_state(iteration_folder(tmp_path / "run", 6))["train_state"]
    assert state["began"] == ["--ckpt-step 2"]


def test_a_fresh_optimizer_is_not_fresh_again(tmp_path: Path) -> None:
    for name in ("run", "whole"):
        run_of_four(tmp_path, name)
    more = [CONSTANT, "--train-iters=8", "--no-load-optim"]
    run_job(1, saving(tmp_path, "whole", *more), timeout=60).check()
    argv = saving(tmp_path, "run", *more)
    run_job(1, argv, hook=partial(signalled, step=2), timeout=60).check(99)
    run_job(1, argv, timeout=60).check()
    assert numbers(tmp_path, "run") == numbers(tmp_path, "whole")


def test_an_old_run_is_not_saved_over_by_a_forgotten_load(tmp_path: Path) -> None:
    run_of_four(tmp_path, "old")
    argv = [*SMALL, f"--save={tmp_path}/old", "--keep-checkpoints=1", "--save-interval=1"]
    refused = run_job(1, argv, timeout=60).check(2)
    assert (
        f"--save {tmp_path}/old already holds checkpoints, up to iteration 4; give --load"
        in (refused.errors[0])
    )
    assert "Traceback" not in refused.text
    assert complete_iterations(tmp_path / "old") == [2, 4]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_without_save_says_that_nothing_was_saved(number: signal.Signals) -> None:
    hook = partial(signalled, step=1, number=number)
    left = run_job(2, SMALL, hook=hook, timeout=60).check(128 + number)
    assert "leaving after iteration 1; nothing was saved, there is no --save" in left.errors[0]


def test_a_signal_without_load_says_how_to_go_on(tmp_path: Path) -> None:
    argv = [*SMALL, f"--save={tmp_path}/run"]
    left = run_job(1, argv, hook=partial(signalled, step=2), timeout=60).check(99)
    assert f"to go on from here, add --load {tmp_path}/run" in left.output[0]
    run_job(1, [*argv, f"--load={tmp_path}/run"], timeout=60).check()


def test_a_broken_checkpoint_falls_back_in_its_own_past(tmp_path: Path) -> None:
    """From 4 back to 2, then 3 and 6: the old 4 lies below 6, but didn't lead to it."""
    run_of_four(tmp_path, "run")
    argv = saving(tmp_path, "run", CONSTANT, "--train-iters=6")
    run_job(1, [*argv, "--ckpt-step=2", "--exit-interval=3"], timeout=60).check()
    run_job(1, argv, timeout=60).check()
    shard = next(iteration_folder(tmp_path / "run", 6).glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 16
    shard.write_bytes(data)
    result = run_job(1, [*argv, "--load-fallback"], timeout=60).check()
    assert "--load-fallback: trying iteration 3" in result.errors[0]
    assert "iter_0000003: going on after iteration 3" in result.output[0]
