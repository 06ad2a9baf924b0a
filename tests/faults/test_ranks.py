"""A rank that hangs, freezes, dies, raises or was started wrongly: all end, and name it."""

import re
import shutil
import time
from functools import partial
from pathlib import Path

import pytest

from tests.faults import injection
from tests.faults.injection import at_call
from tests.faults.moments import strike
from tests.faults.small import SMALL, saving
from tests.utils.corpus import write_corpus
from tests.utils.jobs import Job, JobResult, run_job

TIMEOUT_S = 15.0
LIMIT = f"--distributed-timeout-minutes={TIMEOUT_S / 60}"


def ended(job: Job, *, within: float, frozen: int | None = None) -> JobResult:
    """The result once all ranks but a frozen one have left, which is then killed."""
    deadline = time.monotonic() + within
    for rank, process in enumerate(job.processes):
        if rank != frozen:
            process.join(max(0.0, deadline - time.monotonic()))
    alive = [r for r, process in enumerate(job.processes) if process.is_alive() and r != frozen]
    job.kill()
    result = job.result(5)
    assert not alive, f"ranks {alive} still ran\n{result.text[-5000:]}"
    return result


def test_hung_and_frozen_ranks_are_named() -> None:
    """Four jobs side by side, since all they do is wait."""
    argv = [*SMALL, LIMIT]
    jobs = {
        (action, victim): Job(2, argv, hook=partial(at_call, victim=victim, action=action, first=3))
        for action in (injection.stuck_on_purpose, injection.frozen)
        for victim in (0, 1)
    }
    for job in jobs.values():
        job.wait_for("iteration      1/", seconds=120)
    began = time.monotonic()
    for (action, victim), job in jobs.items():
        other = 1 - victim
        if action is injection.frozen:
            result = ended(job, within=TIMEOUT_S + 25, frozen=victim)
            assert f"rank {victim} no longer answers" in result.errors[other], result.text
        else:
            result = ended(job, within=TIMEOUT_S + 25)
            for error in result.errors:
                assert f"rank {victim} makes no progress at iteration 2" in error, result.text
                assert "stuck_on_purpose" in error
        assert result.codes[other] not in (0, None), result.text
    assert time.monotonic() - began < TIMEOUT_S + 25


def test_a_rank_that_hangs_in_a_save_or_a_load_is_named(tmp_path: Path) -> None:
    """In the step, in the background (writing, or completing on rank 0), alone, and in a load."""
    run_job(1, saving(tmp_path, "load", "--train-iters=1"), timeout=60).check()
    cases = {
        "sync": (2, 1, "before writing tensors", "the save of iteration 2", ()),
        "async": (2, 1, "before writing tensors", "the save of iteration 2", ("--async-save",)),
        "first": (2, 0, "before the checksums", "the save of iteration 2", ("--async-save",)),
        "alone": (1, 0, "before writing tensors", "the save of iteration 2", ()),
        "load": (2, 1, "reading tensors", "loading a checkpoint", ()),
    }
    jobs = {}
    for name, (ranks, victim, moment, _, more) in cases.items():
        argv = saving(tmp_path, name, "--save-interval=2", "--train-iters=1000", *more)
        marker = str(tmp_path / f"{name}.reached")
        hook = partial(strike, moment=moment, count=0, victim=victim, marker=marker)
        jobs[name] = Job(ranks, [*argv, "--distributed-timeout-minutes=0.15"], hook=hook)
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"{name}.reached").exists() for name in cases):
        assert time.monotonic() < deadline, [job.read(0, "err") for job in jobs.values()]
        time.sleep(0.1)
    for name, (ranks, victim, _, doing, _) in cases.items():
        result = ended(jobs[name], within=25)
        for rank in range(ranks):
            error = result.errors[rank]
            assert f"rank {victim} makes no progress at {doing}" in error, f"{name}\n{result.text}"
            assert "in struck" in error, "the stack of the thread that hangs"
            assert f"rank {1 - victim} makes" not in error
            assert result.codes[rank] == 1


def test_a_slow_save_may_take_longer_than_the_limit(tmp_path: Path) -> None:
    """Rank 1 writes for 15 s, a block a second; a rank counts as stuck after 4.8 s."""
    argv = ["--save-interval=2", "--train-iters=2", "--distributed-timeout-minutes=0.1"]
    hook = partial(injection.slow_disk, victim=1, seconds=15)
    jobs = [
        Job(2, saving(tmp_path, name, *argv, *more), hook=hook)
        for name, more in {"sync": (), "async": ("--async-save",)}.items()
    ]
    for job in jobs:
        result = job.result(60).check()
        assert "wrote for 15 s" in result.output[1], result.text


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_ends_the_others_soon(victim: int) -> None:
    hook = partial(at_call, victim=victim, action=injection.killed, first=3)
    job = Job(4, [*SMALL, "--pipeline-model-parallel-size=2"], hook=hook)
    job.processes[victim].join(90)
    began = time.monotonic()
    result = ended(job, within=30)
    assert time.monotonic() - began < 30
    assert result.codes[victim] == -9
    for rank in {0, 1, 2, 3} - {victim}:
        assert result.codes[rank] not in (0, None), result.text
        assert f"rank {victim} no longer answers" in result.errors[rank], result.text


def test_a_bug_on_one_rank_ends_all_and_shows_its_traceback() -> None:
    hook = partial(at_call, victim=1, action=injection.raising, first=3)
    result = run_job(3, [*SMALL, "--global-batch-size=6"], hook=hook, timeout=60).check(1)
    for error in result.errors:
        assert "rank 1 failed: RuntimeError: a bug on purpose" in error, result.text
    assert "Traceback" in result.errors[1] and "injection.py" in result.errors[1]
    assert "Traceback" not in result.errors[0]


def test_another_configuration_on_one_rank() -> None:
    by_rank = {1: ["--seq-length=64", "--lr=2e-3"]}
    result = run_job(3, [*SMALL, "--global-batch-size=6"], by_rank=by_rank, timeout=60).check(2)
    assert "seq_length: 32 on rank 0, 2; 64 on rank 1" in result.errors[0]
    assert "lr: 0.01 on rank 0, 2; 0.002 on rank 1" in result.errors[0]
    assert "Traceback" not in result.text
    assert len(result.errors[0].strip().splitlines()) == 3, "one line for each flag"


def test_another_schedule_file_on_one_rank(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        stage = f"{{seq_length: 32, train_iters: 2, rotary_base: {[1e4, 5e4][rank]}}}"
        (tmp_path / str(rank) / "stages.yaml").write_text(f"stages:\n  - {stage}\n")
    hook = partial(injection.in_folder_of_its_own, folder=str(tmp_path))
    argv = [*SMALL, "--context-schedule=stages.yaml"]
    result = run_job(2, argv, hook=hook, timeout=60).check(2)
    line = "stages.yaml: stage 1: rotary_base: 10000.0 on rank 0; 50000.0 on rank 1"
    assert result.errors[0].strip().splitlines()[1:] == [f"  {line}"], result.text


@pytest.mark.parametrize("what", ["other", "missing"])
def test_another_data_file_on_one_rank(tmp_path: Path, what: str) -> None:
    """Nodes with disks of their own: the same path holds something else on one."""
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
        seed = 1 if what == "other" and rank == 2 else 0
        prefix = str(tmp_path / str(rank) / "corpus")
        write_corpus(prefix, documents=200, vocab_size=97, longest=40, seed=seed)
    if what == "missing":
        shutil.move(tmp_path / "2" / "corpus.bin", tmp_path / "2" / "corpus.old")
    hook = partial(injection.in_folder_of_its_own, folder=str(tmp_path))
    argv = [*(f for f in SMALL if f != "--mock-data"), "--data-path=corpus", "--split=100,0,0"]
    argv += ["--global-batch-size=6", "--distributed-timeout-minutes=0.2"]
    result = run_job(3, argv, hook=hook, timeout=60)
    assert 0 not in result.codes, result.text
    error = result.errors[0]
    if what == "other":
        assert "ranks read different train data" in error
        assert "ranks 0, 1: corpus (" in error and "ranks 2: corpus (" in error
    else:
        # It never came to the rendezvous: it says why, the others say that it didn't.
        assert "rank 2: " in result.errors[2] and "corpus.bin" in result.errors[2], result.text
        assert "the ranks did not meet" in error
        who = r"rank 0 of 3, local rank 0, rendezvous 127\.0\.0\.1:(\d+) "
        match = re.search(who, error)
        assert match, error
        assert f"all 3 ranks were started and that 127.0.0.1 answers on port {match[1]}" in error
