"""tools/inspect_checkpoint.py on sound and damaged folders; the benchmark's arithmetic runs."""

import json
import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import iteration_folder, latest_iteration
from megatron.core.dist_checkpointing.directory import POINTER, complete_iterations
from tests.faults.small import saving
from tests.utils.jobs import run_job
from tools import benchmark_checkpoint, inspect_checkpoint


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of one rank with checkpoints of 1 and 2."""
    folder = tmp_path_factory.mktemp("run")
    run_job(1, saving(folder, "run", "--train-iters=2", "--save-interval=1")).check()
    yield folder / "run"


def inspect(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["inspect_checkpoint.py", *argv])
    return inspect_checkpoint.main()


def test_list_and_show(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect(monkeypatch, str(run), "--verify") == 0
    text = capsys.readouterr().out
    assert "whole, the latest" in text and text.count("all checksums match") == 2
    assert inspect(monkeypatch, str(iteration_folder(run, 2)), "--tensors") == 0
    text = capsys.readouterr().out
    assert "consumed_tokens    256" in text and "saved by           1 ranks" in text
    assert "model.embedding.word_embeddings.weight  float32[97, 16]  in 1 pieces" in text
    assert inspect(monkeypatch, str(run), "--iteration", "7") == 1
    assert "no checkpoint of iteration 7" in capsys.readouterr().err


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def test_damage_is_named(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = copy, iteration_folder(copy, 1)
    shard = next(folder.glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[-200] ^= 1
    shard.write_bytes(data)
    assert inspect(monkeypatch, str(run), "--verify") == 1
    captured = capsys.readouterr()
    assert f"{shard} has crc32" in captured.err
    assert f"{iteration_folder(run, 2)}: all checksums match" in captured.out
    (folder / "checksums.json").unlink()
    assert inspect(monkeypatch, str(run)) == 0
    assert "incomplete: never loaded" in capsys.readouterr().out


def test_folders_by_any_name(
    copy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = copy
    shutil.rmtree(iteration_folder(root, 1))
    monkeypatch.chdir(iteration_folder(root, 2))
    for name in (".", "../iter_0000002", "./"):
        assert inspect(monkeypatch, name) == 0
        assert "consumed_tokens    256" in capsys.readouterr().out
    assert inspect(monkeypatch, "..", "--verify") == 0
    assert "whole, the latest" in capsys.readouterr().out
    assert inspect(monkeypatch, "..", "--tensors") == 0
    assert "word_embeddings.weight  float32[97, 16]" in capsys.readouterr().out
    assert inspect(monkeypatch, f"{tmp_path}/none") == 1
    assert f"{tmp_path}/none doesn't exist" in capsys.readouterr().err
    assert inspect(monkeypatch, f"{tmp_path}") == 1
    assert f"no checkpoint in {tmp_path}" in capsys.readouterr().err
    assert inspect(monkeypatch, f"{iteration_folder(root, 2)}/state.json") == 1
    assert "state.json is a file" in capsys.readouterr().err


KINDS = ("folder", "deep", "empty", "list", "infinite", "fifo", "dangling", "random")


def damage(path: Path, kind: str) -> None:
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "dangling":
        path.symlink_to("/nonexistent")
    else:
        data = {"deep": b"[" * 100000, "empty": b"", "list": b"[]", "random": bytes(range(256))}
        infinite = b'{"files":{"a":{"crc32":Infinity,"bytes":1}},"crc32":0}'
        path.write_bytes(data.get(kind, infinite))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["checksums.json", "state.json", ".metadata", "__0_0.distcp"])
def test_one_bad_file_leaves_the_others_usable(
    copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    kind: str,
) -> None:
    root = copy
    path = iteration_folder(root, 2) / name
    damage(path, kind)
    assert complete_iterations(root) == [1]
    chosen, warning = latest_iteration(root)
    assert chosen == 1 and warning is not None and str(path) in warning
    assert inspect(monkeypatch, str(root), "--verify") == 1
    captured = capsys.readouterr()
    assert "incomplete: never loaded" in captured.out and str(path) in captured.out
    assert str(path) in captured.err
    assert f"{iteration_folder(root, 1)}: all checksums match" in captured.out
    assert inspect(monkeypatch, str(root), "--iteration", "2", "--tensors") == 1
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_pointer_leaves_all_usable(
    copy: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    root = copy
    damage(root / POINTER, kind)
    chosen, warning = latest_iteration(root)
    assert chosen == 2 and warning is not None and str(root / POINTER) in warning
    assert inspect(monkeypatch, str(root), "--verify") == 0


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("code of a stranger ran",)


def test_a_strangers_listing_is_not_run(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (iteration_folder(copy, 2) / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert inspect(monkeypatch, str(copy), "--iteration", "2") == 1
    captured = capsys.readouterr()
    assert "stranger ran" not in captured.out
    assert "refused" in captured.err


def test_benchmark_measures_everything(tmp_path: Path) -> None:
    """At a size where figures mean nothing; whether bars are met isn't asked here."""
    record = tmp_path / "figures.json"
    argv = ["--ranks=1", "--megabytes=8", "--repeats=1", f"--folder={tmp_path}"]
    assert benchmark_checkpoint.main([*argv, f"--json={record}"]) in (0, 1)
    figures = json.loads(record.read_text())
    assert set(figures["seconds"]) == set(benchmark_checkpoint.KINDS)
    assert figures["bytes"] == 8 << 20
