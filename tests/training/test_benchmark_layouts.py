"""``tools/benchmark_layouts.py``: every layout and communication on the user's own model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.config import RunConfig
from megatron.core.config.record import replace_values
from tests.utils.jobs import TINY, free_port
from tools.benchmark_layouts import Outcome, Trial, candidates, main, same_losses

ROOT = Path(__file__).resolve().parents[2]


def run_tool(ranks: int, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}",
        f"--master-port={free_port()}", "tools/benchmark_layouts.py", *argv,
    ]  # fmt: skip
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
        capture_output=True, timeout=300,
    )  # fmt: skip


def test_trials_on_ranks(tmp_path: Path) -> None:
    """Tensor 2 x context 2: table, JSON and picture; all trials have one loss."""
    done = run_tool(
        4, "--steps=1", "--rounds=1", "--layouts=balanced", f"--json={tmp_path}/l.json",
        f"--output={tmp_path}/new/l.png", "--", *TINY, "--context-parallel-size=2",
        "--tensor-model-parallel-size=2", "--sequence-parallel", "--cp-layout=zigzag",
        "--lr-warmup-iters=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "l.json").read_text())
    names = {row["trial"] for row in rows}
    # "auto" puts 2 context ranks of a node into Ulysses.
    assert names == {
        "contiguous p2p 1x2", "balanced p2p 1x2", "balanced all_gather 1x2", "any a2a 2x1",
        "any auto 2x1 (a2a)",
    }  # fmt: skip
    assert [row["trial"] for row in rows if row["yours"]] == ["any auto 2x1 (a2a)"]
    for row in rows:
        assert row["loss"] == pytest.approx(rows[0]["loss"], rel=1e-5)
        assert row["tokens_per_second"] == pytest.approx(8 * 64 / row["step_seconds"])
        assert row["bytes_sent"] > 0 and 0 < row["exposed_wait"] < row["step_seconds"]
        assert f"{row['trial']:<36}" in done.stdout
    base = next(row for row in rows if row["trial"] == "contiguous p2p 1x2")
    balanced = next(row for row in rows if row["trial"] == "balanced p2p 1x2")
    assert base["speedup"] == 1.0 and base["balance"] > balanced["balance"] >= 1.0
    assert (tmp_path / "new" / "l.png").read_bytes().startswith(b"\x89PNG")


def test_candidates_of_six() -> None:
    names = [trial.name for trial in candidates(6)]
    assert names[0] == "contiguous p2p 1x6"
    assert len(set(names)) == len(names) == 4 * 2 * 3 + 1
    assert "any a2a 6x1" in names and "striped a2a+all_gather 3x2" in names


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "write them after --"),
        (["--json=/proc/no/x", "--", *TINY], "--json /proc/no/x can't be written: "),
        (["--output=/", "--", *TINY], "--output / can't be written: Is a directory"),
        (["--steps=0", "--", *TINY], "--steps 0 must be at least 1"),
        (["--", *TINY], "--context-parallel-size 1 (of the stage) leaves nothing to compare"),
        (["--stage=2", "--", *TINY], "--stage 2 must be from 1 to 1"),
        (["--", *TINY, "--num-layers=-1"], "--num-layers -1"),
    ],
)
def test_refusals(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert told in capsys.readouterr().err


def test_a_wrong_loss_is_told() -> None:
    config = replace_values(RunConfig(), {"attention_dropout": 0.0, "hidden_dropout": 0.0})
    outcomes = [
        Outcome(Trial("contiguous", "p2p", (1, 2)), loss=2.0, grad_norm=3.0),
        Outcome(Trial("zigzag", "p2p", (1, 2)), loss=2.0 * (1 + 9e-6), grad_norm=3.0 * (1 + 9e-5)),
        Outcome(Trial("striped", "p2p", (1, 2)), loss=2.001, grad_norm=3.0),
        Outcome(Trial("balanced", "p2p", (1, 2)), loss=float("nan"), grad_norm=3.0),
        Outcome(Trial("any", "a2a", (2, 1)), loss=2.0, grad_norm=3.01),
    ]
    told = [line.split(" instead")[0] for line in same_losses(outcomes, config)]
    assert told == [
        "striped p2p 1x2: loss 2.001", "balanced p2p 1x2: loss nan", "any a2a 2x1: grad_norm 3.01",
    ]  # fmt: skip
    # Masks of dropout differ between layouts, so there is nothing to compare.
    assert same_losses(outcomes, replace_values(config, {"hidden_dropout": 0.1})) == []
