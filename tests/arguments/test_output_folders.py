"""Folders that can't be made or written are refused at once, not at the first save."""

from pathlib import Path

import pytest

from megatron.training.arguments import check_command_line
from tests.arguments.good import command_line

BAD = {
    "proc": ("/proc/x", "/proc is on no disk"),
    "a link to nowhere": ("{0}/dangling", "is a link to {0}/nowhere, which doesn't exist"),
    "below a link to nowhere": ("{0}/dangling/run", "is a link to {0}/nowhere, which doesn't"),
    "links in a loop": ("{0}/loop", "Too many levels of symbolic links"),
    "below links in a loop": ("{0}/loop/run", "Too many levels of symbolic links"),
    "a long name": ("{0}/" + "x" * 300, "File name too long"),
    "a long path": ("{0}" + "/y" * 2500, "File name too long"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "pool")
    (tmp_path / "pool").symlink_to(tmp_path / "loop")
    return tmp_path


@pytest.mark.parametrize("flags", ["--save", "--metrics-file", "--load {0} --save", "--load"])
@pytest.mark.parametrize("what", BAD)
def test_a_path_that_cannot_be_is_refused(folder: Path, what: str, flags: str) -> None:
    path, reason = (text.format(folder) for text in BAD[what])
    if flags.startswith("--load {0}"):
        flags = f"--load {path} --save"
    with pytest.raises(ValueError) as caught:
        check_command_line(command_line(f"{flags} {path}"), world_size=1)
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"{flags.split()[-1]} {path[:5]}"), lines
    if flags != "--load" or what != "proc":
        assert reason in lines[0]


def test_links_to_folders_are_fine(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    check_command_line(command_line(f"--save {tmp_path}/runs/new/run"), world_size=1)
    check_command_line(command_line(f"--save {tmp_path}/runs"), world_size=1)
