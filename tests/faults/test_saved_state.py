"""``state.json`` that was damaged or made up, and checkpoints that are sound but of another run."""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing import CheckpointError, iteration_folder
from megatron.core.dist_checkpointing.directory import write_checksums
from megatron.core.dist_checkpointing.errors import CheckpointMismatch
from megatron.training.saved_state import read_saved_state
from tests.faults.small import SMALL, saving
from tests.utils.jobs import run_job


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of one rank with checkpoints of 2 and 4."""
    folder = tmp_path_factory.mktemp("run")
    argv = saving(folder, "run", "--save-interval=2", "--train-iters=4")
    run_job(1, argv).check()
    yield folder / "run"


def copied(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "run"))


def sealed(folder: Path) -> None:
    """Give every file the checksum it has now: checksums are no protection from a stranger."""
    files = {}
    for path in folder.iterdir():
        if path.name != "checksums.json":
            data = path.read_bytes()
            files[path.name] = zlib.crc32(data), len(data)
    write_checksums(folder, files)


def edited(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "state.json"
    body = json.loads(path.read_text())
    edit(body)
    path.write_text(json.dumps(body))
    sealed(folder)


def train(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda body: body["train_state"].update(values)


def flags(section: str, **values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda body: body["config"]["config"][section].update(values)


EDITS = {
    "iteration as text": (train(iteration="4"), "train_state.iteration is '4'"),
    "iteration below zero": (train(iteration=-7), "train_state.iteration is or holds -7"),
    "a truth": (train(skipped=True), "train_state.skipped is True"),
    "another iteration": (train(iteration=2), "train_state.iteration is 2, in the folder"),
    "another iteration outside": (lambda b: b.update(iteration=2), "iteration is 2, in the folder"),
    "no tokens": (train(consumed_tokens=None), "train_state.consumed_tokens is None"),
    "infinite": (train(optimizer_steps=float("inf")), "train_state.optimizer_steps is inf"),
    "a fraction": (train(consumed_samples=1.5), "train_state.consumed_samples is 1.5"),
    "too large": (train(consumed_samples=10**30), "train_state.consumed_samples is or holds 1000"),
    "no such stage": (train(stage=3), "train_state.stage is 3, of 1 stages"),
    "another position": (train(data={"x": 1}), "'stream' is missing in train_state.data"),
    "no position after a step": (train(data=None), "train_state.data is None"),
    "a piece of a negative length": (
        lambda b: b["train_state"]["data"].update(pieces=[[0, 0, 0, -1, 0]]),
        "train_state.data is or holds -1",
    ),
    "a share that is no number": (
        lambda b: b["train_state"]["data"]["stream"].update(blend=[["x", float("nan")]]),
        "train_state.data is or holds nan",
    ),
    "other tokens than the position": (
        train(consumed_tokens=1),
        "train_state.consumed_tokens is 1, train_state.data.consumed_tokens",
    ),
    "no position": (train(data=5), "train_state.data is 5"),
    "a path": (train(run_id="../../x; rm"), "train_state.run_id is '../../x; rm'"),
    "unknown key": (train(evil=1), "the key 'evil' in train_state is unknown"),
    "unknown key outside": (lambda b: b.update(evil=1), "the key 'evil' is unknown"),
    "missing key": (lambda b: b["train_state"].pop("stage"), "'stage' is missing in train_state"),
    "no train state": (lambda b: b.pop("train_state"), "the key 'train_state' is missing"),
    "a list": (lambda b: b.update(train_state=[]), "train_state is a list"),
    "no config": (lambda b: b.pop("config"), "the key 'config' is missing"),
    "an empty config": (lambda b: b.update(config={}), "'config' is missing in config"),
    "config 5": (lambda b: b.update(config=5), "config is 5 instead of a mapping"),
    "no stages": (lambda b: b["config"].update(stages=[]), "config.stages"),
    "empty stages": (lambda b: b["config"].update(stages=[{}]), "config.stages[0]"),
    "a flag of text": (flags("model", num_layers="2"), "config.model.num_layers is '2'"),
    "an unknown flag": (flags("model", evil=2), "evil"),
    "no ranks": (lambda b: b.update(world_size=0), "world_size is 0"),
    "a text for truth": (lambda b: b.update(has_optimizer="yes"), "has_optimizer is 'yes'"),
    "no version": (lambda b: b.pop("format_version"), "'format_version' is missing"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_state_is_refused(run: Path, tmp_path: Path, name: str) -> None:
    folder = iteration_folder(copied(run, tmp_path), 4)
    read_saved_state(folder)
    edit, words = EDITS[name]
    edited(folder, edit)
    with pytest.raises(CheckpointError) as caught:
        read_saved_state(folder)
    assert str(caught.value).startswith(f"{folder / 'state.json'}: ")
    assert words in str(caught.value)
    assert not isinstance(caught.value, CheckpointMismatch)


@pytest.mark.parametrize("data", [b"", b"[1]", b"[" * 100000, b"\xff", b"{", None])
def test_other_files_are_refused(run: Path, tmp_path: Path, data: bytes | None) -> None:
    folder = iteration_folder(copied(run, tmp_path), 4)
    path = folder / "state.json"
    if data is None:
        path.unlink()
        os.mkfifo(path)
    else:
        path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        read_saved_state(folder)


def test_a_damaged_state_ends_a_job_like_other_damage(run: Path, tmp_path: Path) -> None:
    """Exit 1 and one line; --load-fallback goes back past it."""
    root = copied(run, tmp_path)
    edited(iteration_folder(root, 4), lambda body: body.update(config=5))
    argv = [*SMALL, f"--load={root}", "--train-iters=4"]
    refused = run_job(1, argv, timeout=60).check(1)
    assert "state.json: config is 5" in refused.errors[0] and "Traceback" not in refused.text
    assert "--load-fallback" in refused.errors[0]
    result = run_job(1, [*argv, "--load-fallback"], timeout=60).check()
    assert "iter_0000002: going on after iteration 2" in result.output[0]


def test_the_fallback_is_for_damage_alone(run: Path, tmp_path: Path) -> None:
    """A sound checkpoint that other flags are needed for is refused, with these flags."""
    root = copied(run, tmp_path)
    argv = [*SMALL, f"--load={root}", f"--save={root}"]
    run_job(1, [*argv, "--train-iters=5", "--no-save-optim"], timeout=60).check()
    refused = run_job(1, [*argv, "--load-fallback"], timeout=60).check(1)
    assert "--no-load-optim" in refused.errors[0] and "Traceback" not in refused.text
    assert "--load-fallback" not in refused.errors[0]
    more = ["--finetune", "--ffn-hidden-size=48", "--load-fallback", "--train-iters=1"]
    refused = run_job(1, [*SMALL, f"--load={root}", *more], timeout=60).check(1)
    assert "give the model flags it was saved with" in refused.errors[0]
    assert "trying iteration" not in refused.text and "Traceback" not in refused.text
    more = ["--finetune", "--params-dtype=float64", "--load-fallback", "--train-iters=1"]
    refused = run_job(1, [*SMALL, f"--load={root}", *more], timeout=60).check(1)
    assert "float32 in the checkpoint and float64 in this run" in refused.errors[0]
    assert "--params-dtype" in refused.errors[0] and "trying iteration" not in refused.text


@pytest.mark.parametrize("before", ["0", "0.9"])
def test_momentum_belongs_to_the_optimizers_flags(tmp_path: Path, before: str) -> None:
    argv = saving(tmp_path, "run", "--optimizer=sgd", "--train-iters=2")
    now = {"0": "0.9", "0.9": "0"}[before]
    run_job(1, [*argv, f"--sgd-momentum={before}", "--exit-interval=1"], timeout=60).check()
    refused = run_job(1, [*argv, f"--sgd-momentum={now}", "--load-fallback"], timeout=60).check(2)
    assert f"--sgd-momentum was {before} in the checkpoint's run, now {now}" in refused.errors[0]
    assert "--no-load-optim" in refused.errors[0] and "model flags" not in refused.errors[0]
    run_job(1, [*argv, f"--sgd-momentum={now}", "--no-load-optim"], timeout=60).check()
