"""Refusals as a user meets them: through pretrain_gpt.py, quick and without a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arguments.good import command_line
from tests.arguments.test_wrong_configurations import WRONG, processor_seconds

ROOT = Path(__file__).parents[2]
CASES = (
    "no lr",
    "heads by tp",
    "length by layout",
    "batch by dp",
    "layers by pp",
    "window",
    "world by tp",
    "schedule missing",
)


def start(argv, world):
    environ = dict(os.environ, RANK="0", WORLD_SIZE=str(world), LOCAL_RANK="0")
    began = processor_seconds()
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *argv],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done, processor_seconds() - began


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_command_line_ends_quickly_in_one_message(name):
    drop, add, world, texts = WRONG[name]
    done, took = start(command_line(add, drop), world)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert all(text in done.stderr for text in texts), done.stderr
    assert took < 5, f"{took:.1f} s"


def test_help_is_printed_with_code_0():
    done, _ = start(["--help"], 1)
    assert done.returncode == 0 and "--context-parallel-size N" in done.stdout
