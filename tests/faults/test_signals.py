"""Signals at bad moments: during a save, twice, at the last step."""

import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing import latest_iteration
from tests.faults import injection
from tests.faults.injection import at_call
from tests.faults.small import SMALL, numbers, saving
from tests.utils.jobs import Job, run_job


def send(job: Job, rank: int, number: int = signal.SIGTERM) -> None:
    pid = job.processes[rank].pid
    assert pid is not None
    os.kill(pid, number)


def wait_for_file(path: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)


def signalled_in(name: str, call: int) -> Any:
    """A hook: a signal to rank 1 in a call of a function that the training loop calls."""
    place = {"module": "megatron.training.loop", "name": name, "call": call}
    return partial(injection.signalled_in, victim=1, **place)


def without(argv: list[str], *flags: str) -> list[str]:
    return [word for word in argv if word.split("=")[0] not in flags]


@pytest.mark.parametrize("more", [(), ("--async-save",)], ids=["sync", "async"])
def test_a_signal_during_a_save(tmp_path: Path, more: tuple[str, ...]) -> None:
    marker = tmp_path / "saving"
    hook = partial(injection.slow_saves, seconds=0.7, marker=str(marker))
    argv = saving(tmp_path, "run", "--save-interval=2", *more)
    job = Job(2, argv, hook=hook)
    wait_for_file(marker)
    send(job, 1, signal.SIGUSR1)
    result = job.result(60).check(99)
    iteration, warning = latest_iteration(tmp_path / "run")
    assert iteration is not None and iteration >= 2 and warning is None
    assert f"leaving after iteration {iteration}" in result.output[0]
    assert not list((tmp_path / "run").glob(".saving_*"))
    run_job(2, argv, timeout=60).check()
    run_job(2, saving(tmp_path, "whole"), timeout=60).check()
    assert numbers(tmp_path, "run") == numbers(tmp_path, "whole")


SCHEDULE = """
stages:
  - {seq_length: 32, train_iters: 3, rotary_base: 1.0e4}
  - {seq_length: 64, train_iters: 3, rotary_base: 2.0e4, global_batch_size: 2}
"""


@pytest.mark.parametrize("stage", [0, 1])
def test_a_signal_at_the_start_of_a_stage_leaves_before_its_first_step(
    tmp_path: Path, stage: int
) -> None:
    schedule = tmp_path / "schedule.yaml"
    schedule.write_text(SCHEDULE)
    more = (f"--context-schedule={schedule}", "--eval-interval=3", "--eval-iters=1")
    hook = signalled_in("enter_stage", stage)
    argv = without(saving(tmp_path, "run", *more), "--train-iters", "--seq-length")
    result = run_job(2, argv, hook=hook, timeout=60).check(99)
    assert f"a signal came: leaving after iteration {3 * stage}" in result.output[0]
    assert latest_iteration(tmp_path / "run")[0] == (3 if stage else None)
    assert ("evaluation" in result.output[0]) == bool(stage)
    run_job(2, argv, timeout=60).check()
    argv = without(saving(tmp_path, "whole", *more), "--train-iters", "--seq-length")
    run_job(2, argv, timeout=60).check()
    assert numbers(tmp_path, "run") == numbers(tmp_path, "whole")


def test_a_signal_saves_before_an_evaluation(tmp_path: Path) -> None:
    """An evaluation may take longer than what a batch system gives between signal and end."""
    argv = saving(tmp_path, "run", "--save-interval=2", "--eval-interval=2", "--eval-iters=1")
    hook = signalled_in("train_step", 1)
    text = run_job(2, argv, hook=hook, timeout=60).check(99).output[0]
    saved, evaluated = text.index("checkpoint of iteration 2"), text.index("at iteration 2")
    assert saved < evaluated < text.index("leaving after iteration 2")
    assert text.count("checkpoint of iteration 2") == 1


def test_a_signal_in_the_last_step_still_finishes(tmp_path: Path) -> None:
    """All is saved; the requeued job finds nothing to do and ends with 0."""
    hook = signalled_in("train_step", 5)
    argv = saving(tmp_path, "run")
    run_job(2, argv, hook=hook, timeout=60).check(99)
    assert latest_iteration(tmp_path / "run") == (6, None)
    assert "nothing to do" in run_job(2, argv, timeout=60).check().output[0]


def test_a_second_signal_kills_and_the_others_name_the_rank(tmp_path: Path) -> None:
    hook = partial(at_call, victim=1, action=injection.slow, last=1000)
    argv = saving(tmp_path, "run", "--train-iters=1000", "--save-interval=2")
    job = Job(2, argv, hook=partial(_slow_and_saves_slowly, hook))
    job.wait_for("iteration      3/", seconds=60)
    send(job, 1)
    job.wait_for("saving after this step", rank=1)  # two that arrive as one would be the first
    send(job, 1)
    job.processes[1].join(20)
    result = job.result(60)
    # The system's code, or ours where the main thread stayed outside of Python for too long.
    assert result.codes[1] in (-signal.SIGTERM, 128 + signal.SIGTERM), result.text
    assert result.codes[0] == 1
    assert "rank 1 no longer answers" in result.errors[0], result.text
    last_word = r"rank 1, last seen (the save of )?iteration \d+, ended by a second SIGTERM"
    assert re.search(last_word, result.errors[0]), result.text
    iteration, _ = latest_iteration(tmp_path / "run")
    assert iteration is not None and iteration >= 2


def test_a_second_signal_ends_a_rank_that_is_stuck_outside_of_python() -> None:
    """Rank 0 waits for rank 1 in a collective, where no handler of Python's would run."""
    hook = partial(at_call, victim=1, action=injection.stuck_on_purpose, first=3)
    job = Job(2, SMALL, hook=hook)
    job.wait_for("iteration      1/", seconds=60)
    time.sleep(1)
    for _ in range(2):
        send(job, 0)
        time.sleep(0.1)
    job.processes[0].join(15)
    code = job.processes[0].exitcode
    job.kill()
    job.result(10)
    assert code in (128 + signal.SIGTERM, -signal.SIGTERM)


@pytest.mark.parametrize("waits", [0, 1])
def test_a_signal_ends_a_rank_that_waits_for_others(tmp_path: Path, waits: int) -> None:
    """In the rendezvous, where the main thread is outside of Python."""
    marker = tmp_path / "meeting"
    hook = partial(injection.comes_late, victim=1 - waits, marker=str(marker))
    job = Job(2, SMALL, hook=hook)
    wait_for_file(marker)
    time.sleep(0.5)
    send(job, waits)
    job.processes[waits].join(5)
    code, error = job.processes[waits].exitcode, job.read(waits, "err")
    job.kill()
    job.result(10)
    assert code == 128 + signal.SIGTERM, error
    said = [line for line in error.splitlines() if "SIGTERM" in line]
    assert len(said) == 1 and said[0].startswith(f"pretrain: SIGTERM while rank {waits} of 2,")


def _slow_and_saves_slowly(hook: partial[None], rank: int) -> None:
    hook(rank)
    injection.slow_saves(rank, seconds=0.5)


def test_signals_can_be_left_to_the_system(tmp_path: Path) -> None:
    hook = partial(at_call, victim=0, action=injection.slow, last=1000)
    argv = saving(tmp_path, "run", "--no-exit-signal-handler", "--train-iters=1000")
    job = Job(2, argv, hook=hook)
    job.wait_for("iteration      1/", seconds=60)
    send(job, 1)
    result = job.result(60)
    assert result.codes == [1, -signal.SIGTERM], result.text
    assert "rank 1 no longer answers" in result.errors[0]


def test_a_time_limit_of_one_rank_saves_and_leaves_with_0(tmp_path: Path) -> None:
    argv = saving(tmp_path, "run", "--exit-duration-in-mins=1")
    result = run_job(2, argv, hook=partial(injection.late, victim=1), timeout=60).check(0)
    assert "--exit-duration-in-mins 1: leaving" in result.output[0]
    assert latest_iteration(tmp_path / "run") == (1, None)
