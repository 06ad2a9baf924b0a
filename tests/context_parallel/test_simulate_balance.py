"""The simulator as a command: table, picture, flags, refusals."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tools.simulate_balance import main, packing

ROOT = Path(__file__).parents[2]


def test_table_and_picture(tmp_path, capsys):
    out = tmp_path / "balance.png"
    sizes = ["--seq-length", "16K", "32768", "--ranks", "4", "8", "--ulysses", "2"]
    assert main([*sizes, "--seeds", "1", "--output", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.count("tokens on") == 16  # 4 sizes x 4 mixes
    for word in ("16K tokens on 4 ranks", "32K tokens on 8 ranks", "long-mix", "striped", "auto"):
        assert word in text
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_many_sizes_draw_a_panel_per_mix(tmp_path):
    out = tmp_path / "grid.png"
    sizes = ["--seq-length", "8K", "16K", "--ranks", "2", "4", "8", "--mixes", "web"]
    assert main([*sizes, "--seeds", "1", "--layouts", "zigzag", "--output", str(out)]) == 0
    assert out.stat().st_size > 10000


def test_flags_of_the_cost_model_matter(capsys):
    size = ["--seq-length", "64K", "--ranks", "8", "--mixes", "dense", "--layouts", "zigzag"]
    main(size)
    fast = capsys.readouterr().out
    main([*size, "--bandwidth", "0.5"])
    assert fast != capsys.readouterr().out


@pytest.mark.parametrize(
    "flags,words",
    [
        (["--ranks", "12", "--ulysses", "8"], "--ranks 12 must be a positive multiple"),
        (["--seq-length", "1G"], "--seq-length 1G must be a positive number"),
        (["--ranks", "64", "--ulysses", "64"], "must not exceed --num-attention-heads 32"),
        (["--bandwidth", "nan"], "--bandwidth nan must be a number above 0"),
        (["--kv-channels", "0"], "--kv-channels 0 must be a number above 0"),
        (["--latency", "-1"], "--latency -1.0 must be a number of at least 0"),
        (["--seed", "-1"], "--seed -1 must be a number of at least 0"),
        (["--num-attention-heads", "5"], "5 must be a multiple of --num-query-groups 8"),
        (["--output", "/proc/no/a.png"], "--output /proc/no/a.png can't be written"),
        (["--seq-length", "1000", "--ranks", "32", "--mixes", "dense"], "must be a multiple of 64"),
    ],
)
def test_refusals(flags, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_as_a_command():
    command = [sys.executable, "tools/simulate_balance.py", "--seq-length", "8K", "--ranks", "4"]
    done = subprocess.run(
        [*command, "--seeds", "1"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "books: 8K tokens on 4 ranks" in done.stdout
    assert "8K x 4 web" in done.stderr  # progress
    wrong = subprocess.run(
        [*command, "--seed-count", "1"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert wrong.returncode == 2 and "did you mean" in wrong.stderr


def test_packings_are_seeded_and_whole():
    for mix in ("dense", "web", "books"):
        bounds = packing(mix, 100_000, 3)
        assert bounds[0] == 0 and bounds[-1] == 100_000 and (np.diff(bounds) > 0).all()
        assert np.array_equal(bounds, packing(mix, 100_000, 3))
