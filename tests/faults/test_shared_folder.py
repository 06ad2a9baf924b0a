"""Two runs in one --save folder: the newer one goes on, the older one fails and harms nothing."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing import directory, iteration_folder
from tests.faults.small import saving
from tests.utils.jobs import Job, run_job

COMMON = ("--keep-checkpoints=1", "--exit-interval=3", "--lr-decay-style=constant")


def wait_before(rank: int, *, name: str, marker: str, go: str) -> None:
    """Rank 0 says that it got to a function of ``directory`` and waits there for ``go``."""
    if rank != 0:
        return
    original = getattr(directory, name)

    def waiting(*args: Any, **kwargs: Any) -> Any:
        Path(marker).touch()
        while not Path(go).exists():
            time.sleep(0.02)
        return original(*args, **kwargs)

    setattr(directory, name, waiting)


def drop_a_file(rank: int) -> None:
    """Before the checksums are written, a file of tensors loses its end."""
    original = directory.write_checksums

    def write_checksums(folder: Path, files: Any) -> None:
        path = sorted(folder.glob("*.distcp"))[0]
        path.write_bytes(path.read_bytes()[:-1])
        original(folder, files)

    directory.write_checksums = write_checksums


def sound(root: Path) -> list[int]:
    """The checkpoints there, each checked byte by byte."""
    for iteration in directory.complete_iterations(root):
        folder = iteration_folder(root, iteration)
        assert directory.damaged_files(folder, directory.read_checksums(folder)) == []
    return directory.complete_iterations(root)


def started(job: Job, marker: Path) -> Job:
    deadline = time.monotonic() + 60
    while not marker.exists():
        assert time.monotonic() < deadline, job.read(0) + job.read(0, "err")
        time.sleep(0.02)
    return job


@pytest.mark.parametrize("where", ["write_checksums", "publish", "write_pointer", "prune"])
def test_the_older_run_is_overtaken_in_its_save(tmp_path: Path, where: str) -> None:
    """Wherever it stands in completing its checkpoint, the newer run's is the one that counts."""
    root = tmp_path / "run"
    argv = saving(tmp_path, "run", *COMMON)
    run_job(1, [*argv, "--exit-interval=2"], timeout=60).check()
    marker, go = tmp_path / "there", tmp_path / "go"
    hook = partial(wait_before, name=where, marker=str(marker), go=str(go))
    old = started(Job(2, [*argv, f"--metrics-file={tmp_path}/old"], hook=hook), marker)
    new = run_job(2, [*argv, "--exit-interval=4"], timeout=60).check()
    assert "another run that may still be alive" in new.errors[0]
    assert directory.latest_iteration(root) == (4, None)
    go.touch()
    result = old.result(60)
    assert "Traceback" not in result.text
    if where == "prune":  # its own was whole and named before the other came; nothing is left
        result.check()
    else:
        assert "was taken over by another run" in result.check(1).text
    assert directory.latest_iteration(root) == (4, None)
    assert 4 in sound(root)
    assert not list(root.glob(".saving_*"))


def test_the_newer_run_is_overtaken_by_no_one(tmp_path: Path) -> None:
    """The older one comes to its save while the newer one writes: it fails, nothing is mixed."""
    root = tmp_path / "run"
    argv = saving(tmp_path, "run", *COMMON)
    run_job(1, [*argv, "--exit-interval=2"], timeout=60).check()
    old_at, old_go, new_at, new_go = (tmp_path / name for name in ("oa", "og", "na", "ng"))
    hook = partial(wait_before, name="open_saving_folder", marker=str(old_at), go=str(old_go))
    old = started(Job(2, [*argv, f"--metrics-file={tmp_path}/old"], hook=hook), old_at)
    hook = partial(wait_before, name="write_checksums", marker=str(new_at), go=str(new_go))
    new = started(Job(2, argv, hook=hook), new_at)
    old_go.touch()
    failed = old.result(60).check(1)
    assert "was taken over by another run" in failed.text and "Traceback" not in failed.text
    assert sound(root) == [2] and directory.latest_iteration(root) == (2, None)
    new_go.touch()
    new.result(60).check()
    assert sound(root) == [3] and directory.latest_iteration(root) == (3, None)
    assert not list(root.glob(".saving_*"))


def late_load(rank: int, *, marker: str, go: str) -> None:
    """The first rank waits between choosing a checkpoint and taking the folder over."""
    if rank != 0:
        return
    from megatron.training.checkpointing import Checkpointer

    original = Checkpointer._own

    def own(self: Any) -> None:
        Path(marker).touch()
        while not Path(go).exists():
            time.sleep(0.02)
        original(self)

    Checkpointer._own = own  # type: ignore[method-assign]


def test_what_the_older_run_has_just_finished_is_loaded(tmp_path: Path) -> None:
    """It publishes 3 and prunes 2 after the newer one has chosen 2."""
    argv = saving(tmp_path, "run", *COMMON)
    run_job(1, [*argv, "--exit-interval=2"], timeout=60).check()
    marker, go = tmp_path / "chosen", tmp_path / "go"
    new = started(Job(2, argv, hook=partial(late_load, marker=str(marker), go=str(go))), marker)
    run_job(2, [*argv, f"--metrics-file={tmp_path}/old"], timeout=60).check()
    assert sound(tmp_path / "run") == [3]
    go.touch()
    assert "iter_0000003: going on after iteration 3" in new.result(60).check().output[0]


def test_a_run_that_is_refused_takes_nothing(tmp_path: Path) -> None:
    argv = saving(tmp_path, "run", *COMMON)
    run_job(1, [*argv, "--exit-interval=2"], timeout=60).check()
    marker, go = tmp_path / "there", tmp_path / "go"
    hook = partial(wait_before, name="publish", marker=str(marker), go=str(go))
    old = started(Job(2, argv, hook=hook), marker)
    run_job(2, [*argv, "--seed=9"], timeout=60).check(2)
    go.touch()
    old.result(60).check()
    assert sound(tmp_path / "run") == [3]


def test_files_that_are_not_what_the_ranks_wrote_are_not_published(tmp_path: Path) -> None:
    root = tmp_path / "run"
    argv = saving(tmp_path, "run", *COMMON)
    run_job(1, [*argv, "--exit-interval=2"], timeout=60).check()
    failed = run_job(1, argv, hook=drop_a_file, timeout=60).check(1)
    assert "not what the ranks wrote" in failed.errors[0] and "bytes instead of" in failed.errors[0]
    assert sound(root) == [2] and directory.latest_iteration(root) == (2, None)
