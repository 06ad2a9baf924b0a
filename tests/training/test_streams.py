"""A job that is started with closed streams, or with its log on a full disk."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Flags that are refused show where words go; then what a running job does: it opens files, a
# signal handler writes to stderr, faulthandler is enabled.
START = """
import contextlib, faulthandler, os, sys
from megatron.training import pretrain
from megatron.training.leave import leave
code = pretrain(None, None, None, argv=["--foo"], environ={})
os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
with contextlib.suppress(OSError):
    os.write(1, b"for stdout")
    os.write(2, b"for stderr")
faulthandler.enable()
leave(code)
"""


@pytest.mark.parametrize("streams", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
def test_a_job_without_streams_writes_into_no_file_of_its_own(streams: str, tmp_path: Path) -> None:
    file = tmp_path / "opened"
    done = subprocess.run(
        ["bash", "-c", f'exec "$0" -c "$1" "$2" {streams}', sys.executable, START, str(file)],
        cwd=ROOT, stdout=subprocess.DEVNULL, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, file.read_bytes()) == (2, b"")
