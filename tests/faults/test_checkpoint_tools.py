"""tools/inspect_checkpoint.py on sound and damaged folders; the benchmark's arithmetic runs."""

import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import iteration_folder
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


def test_damage_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = iteration_folder(run, 1)
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


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("code of a stranger ran",)


def test_a_strangers_listing_is_not_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (iteration_folder(run, 2) / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert inspect(monkeypatch, str(run), "--iteration", "2") == 1
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
