"""Disks that are full, unwritable or rotten, at the level of whole jobs."""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import iteration_folder, latest_iteration
from megatron.core.dist_checkpointing.directory import POINTER, all_iterations, complete_iterations
from tests.faults import injection
from tests.faults.small import SMALL, numbers, saving
from tests.utils.jobs import run_job


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of six iterations with checkpoints of 2, 4 and 6, and one stopped after 4."""
    folder = tmp_path_factory.mktemp("runs")
    run_job(2, saving(folder, "whole", "--save-interval=2"), timeout=90).check()
    run_job(2, saving(folder, "four", "--save-interval=2", "--exit-interval=4"), timeout=90).check()
    yield folder


def copied(runs: Path, folder: Path) -> list[str]:
    """Flags that go on with a copy of the run that was stopped after four iterations."""
    shutil.copytree(runs / "four", folder / "four")
    shutil.copy(runs / "four.jsonl", folder)
    return saving(folder, "four")


def same_as_unbroken(runs: Path, folder: Path) -> bool:
    return numbers(folder, "four") == numbers(runs, "whole")


@pytest.mark.parametrize("more", [(), ("--async-save",)], ids=["sync", "async"])
def test_a_full_disk_on_one_rank(tmp_path: Path, runs: Path, more: tuple[str, ...]) -> None:
    hook = partial(injection.disk_full, victim=1, save=1)
    argv = saving(tmp_path, "four", "--save-interval=2", *more)
    result = run_job(2, argv, hook=hook, timeout=60).check(1)
    assert "rank 1" in result.errors[0] and "No space left on device" in result.errors[0]
    assert "Traceback" not in result.text
    assert latest_iteration(tmp_path / "four") == (2, None)
    assert all_iterations(tmp_path / "four") == [2]
    run_job(2, argv, timeout=60).check()
    assert same_as_unbroken(runs, tmp_path)


def test_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = run_job(2, [*SMALL, f"--save={tmp_path}/file/x", "--save-interval=2"], timeout=60)
    assert 0 not in result.codes
    assert f"{tmp_path}/file" in result.errors[0]
    assert "Traceback" not in result.text


@pytest.mark.parametrize("damage", ["flip", "truncate", "missing"])
def test_a_damaged_shard(tmp_path: Path, runs: Path, damage: str) -> None:
    argv = copied(runs, tmp_path)
    shard = sorted(iteration_folder(tmp_path / "four", 4).glob("*.distcp"))[-1]
    data = bytearray(shard.read_bytes())
    if damage == "missing":
        shard.unlink()
    elif damage == "truncate":
        shard.write_bytes(data[:-100])
    else:
        data[len(data) // 2] ^= 16
        shard.write_bytes(data)
    if damage == "flip":
        # Its size is right, so the folder counts as whole until its bytes are read.
        refused = run_job(2, argv, timeout=60).check(1)
        assert str(shard) in refused.errors[0] and "crc32" in refused.errors[0]
        assert "--load-fallback" in refused.errors[0]
        assert "Traceback" not in refused.text
        argv = [*argv, "--load-fallback"]
    result = run_job(2, argv, timeout=60).check()
    assert "warning" in result.errors[0]
    assert "iter_0000002: going on after iteration 2" in result.output[0]
    assert same_as_unbroken(runs, tmp_path)


@pytest.mark.parametrize("text", [b"\x00\xffgarbage", b"123456"])
def test_a_garbage_pointer(tmp_path: Path, runs: Path, text: bytes) -> None:
    argv = copied(runs, tmp_path)
    (tmp_path / "four" / POINTER).write_bytes(text)
    result = run_job(2, argv, timeout=60).check()
    assert "newest whole checkpoint, 4" in result.errors[0]
    assert same_as_unbroken(runs, tmp_path)


def test_leftovers_of_killed_saves(tmp_path: Path, runs: Path) -> None:
    argv = copied(runs, tmp_path)
    root = tmp_path / "four"
    shutil.copytree(iteration_folder(root, 4), iteration_folder(root, 6))
    (iteration_folder(root, 6) / "checksums.json").unlink()
    (root / ".saving_iter_0000006").mkdir()
    (root / ".saving_iter_0000006" / "__0_0.distcp").write_bytes(b"half")
    result = run_job(2, argv, timeout=60).check()
    assert "going on after iteration 4" in result.output[0]
    assert complete_iterations(root) == [2, 4, 6]
    assert not list(root.glob(".saving_*"))
    assert same_as_unbroken(runs, tmp_path)


def test_only_the_newest_stay(tmp_path: Path) -> None:
    argv = saving(tmp_path, "run", "--save-interval=1", "--keep-checkpoints=2", "--async-save")
    run_job(2, argv, timeout=60).check()
    assert complete_iterations(tmp_path / "run") == [5, 6]
