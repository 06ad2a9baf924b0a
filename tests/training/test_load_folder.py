"""What --load and --ckpt-step ask for is looked for before any rank waits for another."""

from pathlib import Path

import pytest

from megatron.core.config.checkpoint import CheckpointConfig
from megatron.core.dist_checkpointing.directory import (
    POINTER,
    iteration_folder,
    write_checksums,
)
from megatron.training import initialize
from megatron.training.load_folder import refuse_missing_checkpoint
from tests.utils.jobs import TINY, run_job


def checkpoints(root: Path, *iterations: int) -> Path:
    """Folders that count as whole checkpoints; nothing is in them."""
    for iteration in iterations:
        folder = iteration_folder(root, iteration)
        folder.mkdir(parents=True)
        write_checksums(folder, {})
    return root


def refused(**options: object) -> str:
    values = {key: str(v) if isinstance(v, Path) else v for key, v in options.items()}
    with pytest.raises(ValueError) as caught:
        refuse_missing_checkpoint(CheckpointConfig(**values))  # type: ignore[arg-type]
    return str(caught.value)


def test_an_absent_step_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    root = checkpoints(tmp_path, 20, 100)
    iteration_folder(root, 60).mkdir()  # a save that was cut short
    for step in (60, 70):
        text = refused(load=root, ckpt_step=step)
        assert f"--ckpt-step {step} has no whole checkpoint in --load {root}" in text
        assert "[20, 100]: give one of these" in text
    assert "there are none" in refused(load=tmp_path / "empty", ckpt_step=1)
    refuse_missing_checkpoint(CheckpointConfig(load=str(root), ckpt_step=20))
    refuse_missing_checkpoint(CheckpointConfig(load=str(root), finetune=True))


def test_a_folder_without_checkpoints_is_refused_unless_the_run_saves_there(tmp_path: Path) -> None:
    iteration_folder(tmp_path, 60).mkdir()
    for save in (None, tmp_path / "other"):
        assert f"--load {tmp_path} holds no whole checkpoint" in refused(load=tmp_path, save=save)
    assert "--finetune needs weights" in refused(load=tmp_path, save=tmp_path, finetune=True)
    refuse_missing_checkpoint(CheckpointConfig(load=str(tmp_path), save=f"{tmp_path}/"))
    refuse_missing_checkpoint(CheckpointConfig())


def test_what_makes_a_checkpoint_not_whole_is_named(tmp_path: Path) -> None:
    folder = iteration_folder(checkpoints(tmp_path), 60)
    folder.mkdir()
    (folder / "a.distcp").write_bytes(b"1234")
    write_checksums(folder, {"a.distcp": (0, 5), "b.distcp": (0, 5)})
    for options in ({"ckpt_step": 60}, {"finetune": True}, {}):
        text = refused(load=tmp_path, **options)
        assert "a.distcp has 4 bytes instead of 5, and 1 more" in text
    assert "a.distcp" not in refused(load=tmp_path, ckpt_step=61)


def test_a_folder_in_the_place_of_the_pointer_is_refused_before_work_is_lost(
    tmp_path: Path,
) -> None:
    """Loading would do without it, but no save could say that it is the latest."""
    checkpoints(tmp_path, 20)
    (tmp_path / POINTER).mkdir()
    for load in (None, tmp_path):
        assert f"{POINTER} in it must be a file" in refused(load=load, save=tmp_path)
    refuse_missing_checkpoint(CheckpointConfig(load=str(tmp_path)))


def test_a_folder_that_cannot_be_listed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(Path, "iterdir", denied)  # the tests may run as root
    text = refused(load=tmp_path)
    assert f"--load {tmp_path} can't be read" in text and "Permission denied" in text


def no_rendezvous(rank: int) -> None:
    def met(*_: object) -> None:
        raise AssertionError("the ranks have met")

    initialize.initialize_distributed = met  # type: ignore[assignment]


@pytest.mark.parametrize("more", [[], ["--dry-run", "--dry-run-world-size=1"]])
def test_the_job_ends_before_the_ranks_meet(tmp_path: Path, more: list[str]) -> None:
    root = checkpoints(tmp_path, 20)
    job = run_job(1, [*TINY, f"--load={root}", "--ckpt-step=3", *more], hook=no_rendezvous)
    job.check(2)
    assert "--ckpt-step 3 has no whole checkpoint" in job.errors[0]
    assert "Traceback" not in job.text


def test_a_fresh_start_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    argv = [*TINY, f"--load={folder}", f"--save={folder}", "--train-iters=1"]
    line = f"--load {folder} holds no whole checkpoint yet: starting fresh"
    assert line in run_job(1, argv).check().text
    assert line not in run_job(1, argv).check().text
