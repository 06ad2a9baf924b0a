"""The summary of a run, from its metrics."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.report import summary

ROOT = Path(__file__).resolve().parents[2]


def record(iteration: int, **more: Any) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "consumed_tokens": iteration * 1000,
        "stage": 1,
        "seq_length": 64,
        "rotary_base": 1e4,
        **more,
    }


def test_steps_after_the_last_log_line_are_counted() -> None:
    train = [record(5, lm_loss=4.0), record(10, lm_loss=3.0)]
    lines = summary([*train, record(12, eval_lm_loss=2.5)], None).splitlines()
    assert lines[0].startswith("steps 12, tokens 12,000, ")
    assert lines[1] == "training loss    4.000 -> 3.000"


def test_a_run_without_evaluation() -> None:
    assert summary([record(5, lm_loss=4.0)], None).startswith("steps 5, tokens 5,000, ")


def run_report(*words: Any) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "tools" / "report.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=150)


LINE = json.dumps(record(1, lm_loss=4.0)).encode() + b"\n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "has no training records yet"),
        (LINE[:-1], "has no training records yet"),
        (LINE[:20] + b"\n" + LINE, "m.jsonl:1: not a line of a metrics file: Invalid"),
        (LINE + b"\0\0\n", "m.jsonl:2: not a line of a metrics file: Expecting value"),
        (LINE + b'{"iteration": "\xe9"}\n', "m.jsonl:2: not a line of a metrics file: 'utf-8'"),
        (LINE + b"[1]\n", "m.jsonl:2: not a line of a metrics file: no object"),
        (LINE + b'{"lm_loss": 1}\n', "m.jsonl:2: not a line of a metrics file: no object"),
        (b'{"iteration": 7, "lm_loss": 1}\n', "iteration 7 has no number consumed_tokens, stage"),
        (LINE.replace(b"4.0", b'"x"'), "iteration 1 has no number lm_loss"),
    ],
)
def test_a_file_that_is_no_metrics_file_is_one_line(
    tmp_path: Path, data: bytes, words: str
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(data)
    done = run_report("--metrics", path)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_picture_that_can_not_be_written_is_refused_first(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(LINE)
    for output, words in ((tmp_path, "end the name in .png"), (path / "x.png", "can't be written")):
        done = run_report("--metrics", path, "--output", output)
        assert done.returncode == 1 and words in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
    assert run_report("--metrics", path, "--output", tmp_path / "deep" / "x.png").returncode == 0
    assert (tmp_path / "deep" / "x.png").stat().st_size > 1000
