"""An optimizer that starts anew, or hasn't started yet, is saved and resumed as what it is."""

from functools import partial
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import iteration_folder, read_state
from tests.faults.injection import at_call, poison
from tests.faults.small import SMALL, numbers, saving
from tests.utils.jobs import run_job, tensors_of

CONSTANT = "--lr-decay-style=constant"


def same_tensors(one: Path, other: Path) -> bool:
    first, second = tensors_of(one), tensors_of(other)
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("source", ["with", "without"])
def test_steps_of_a_fresh_optimizer_count_from_nothing(tmp_path: Path, source: str) -> None:
    more = [] if source == "with" else ["--no-save-optim"]
    first = [*SMALL, CONSTANT, "--train-iters=4", f"--save={tmp_path}/first", *more]
    run_job(1, first, timeout=60).check()
    fresh = [
        *saving(tmp_path, "fresh", CONSTANT, "--train-iters=8", "--save-interval=2"),
        f"--load={tmp_path}/first",
        "--no-load-optim",
    ]
    run_job(1, fresh, timeout=60).check()
    state = read_state(iteration_folder(tmp_path / "fresh", 6))["train_state"]
    assert (state["iteration"], state["optimizer_steps"]) == (6, 2)
    plain = [
        *saving(tmp_path, "plain", CONSTANT, "--train-iters=8"),
        f"--load={tmp_path}/fresh",
        "--ckpt-step=6",
    ]
    run_job(1, plain, timeout=60).check()
    assert numbers(tmp_path, "plain") == numbers(tmp_path, "fresh")[2:]
    folders = (iteration_folder(tmp_path / name, 8) for name in ("fresh", "plain"))
    assert same_tensors(*folders)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("why", ["told", "nan"])
def test_a_save_before_the_first_update_can_be_resumed(
    tmp_path: Path, why: str, optimizer: str
) -> None:
    more = ["--train-iters=4", f"--optimizer={optimizer}"]
    more += ["--iterations-to-skip", "1", "2"] if why == "told" else []
    hook = None if why == "told" else partial(at_call, victim=1, action=poison, last=3)
    extra = {} if hook is None else {"hook": hook}
    run_job(2, saving(tmp_path, "whole", *more), timeout=60, **extra).check()
    parts = saving(tmp_path, "parts", *more)
    run_job(2, [*parts, "--exit-interval=2"], timeout=60, **extra).check()
    assert read_state(iteration_folder(tmp_path / "parts", 2))["train_state"]["skipped"] == 2
    run_job(2, parts, timeout=60).check()
    assert numbers(tmp_path, "parts")[-2:] == numbers(tmp_path, "whole")[-2:]
    folders = (iteration_folder(tmp_path / name, 4) for name in ("whole", "parts"))
    assert same_tensors(*folders)
