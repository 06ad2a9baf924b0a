"""Killed at any moment: nothing looks whole, nobody is left, a rerun gives the same bytes."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.preprocessing.corpora import (
    command,
    documents,
    pair_bytes,
    run_preprocess,
    run_tool,
    write_jsonl,
)

SECONDS = 20.0
"""Within which everything must be over on a busy machine (alone: a tenth of a second)."""


class Run:
    """preprocess_data.py on a corpus whose end it doesn't reach by itself for a while."""

    def __init__(self, corpus: Path, prefix: Path, workers: int = 2) -> None:
        self.prefix = prefix
        self.process = subprocess.Popen(
            command(
                "preprocess_data.py", "--input", corpus, "--output-prefix", prefix,
                "--tokenizer-type", "ByteTokenizer", "--workers", workers, "--append-eod",
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self._workers = workers
        self.workers: list[psutil.Process] = []

    def started(self) -> "Run":
        """Wait until all workers exist and tokens are being written."""
        partial = Path(f"{self.prefix}_text_document.bin.partial")
        end = time.monotonic() + 60
        while time.monotonic() < end:
            self.workers = psutil.Process(self.process.pid).children(recursive=True)
            if len(self.workers) == self._workers and partial.exists():
                return self
            time.sleep(0.01)
        raise AssertionError("the run did not start")

    def ended(self) -> tuple[int, str]:
        """Its code and stderr; asserts that no worker outlives it."""
        _, errors = self.process.communicate(timeout=SECONDS)
        _, alive = psutil.wait_procs(self.workers, timeout=SECONDS)
        assert alive == []
        return self.process.returncode, errors

    def names(self) -> set[str]:
        """What is in the output folder."""
        folder = self.prefix.parent
        return {path.name for path in folder.iterdir()} if folder.exists() else set()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 20 MB: some seconds of work."""
    texts = documents(500, seed=11, longest=1000) * 200
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "a.jsonl", texts)


@pytest.fixture(scope="module")
def whole(corpus: Path) -> tuple[bytes, bytes]:
    """The files of an unbroken run."""
    run_preprocess(corpus, corpus.parent / "whole", append_eod=True)
    return pair_bytes(corpus.parent / "whole_text_document")


@pytest.fixture
def run(corpus: Path, tmp_path: Path) -> Iterator[Run]:
    started = Run(corpus, tmp_path / "out" / "o").started()
    yield started
    for process in [*started.workers, started.process]:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            process.kill()


def test_killed_worker_ends_the_run(run: Run) -> None:
    run.workers[1].kill()
    begin = time.monotonic()
    code, errors = run.ended()
    assert time.monotonic() - begin < SECONDS
    assert code == 1
    assert "killed by SIGKILL (out of memory?)" in errors
    assert "Traceback" not in errors
    assert run.names() == set()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_signals_end_it_cleanly(run: Run, number: signal.Signals, code: int) -> None:
    run.process.send_signal(number)
    assert run.ended() == (code, f"ended by {number.name}\n")
    assert run.names() == set()


def test_nohup_is_respected(tmp_path: Path) -> None:
    """A signal that was ignored at the start stays ignored."""
    path = write_jsonl(tmp_path / "a.jsonl", documents(500, longest=1000) * 8)
    process = subprocess.Popen(
        command(
            "preprocess_data.py", "--input", path, "--output-prefix", tmp_path / "o",
            "--tokenizer-type", "ByteTokenizer", "--workers", 1,
        ),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    for _ in range(5):
        time.sleep(0.1)
        process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 0


def test_killed_main_leaves_no_orphan(run: Run, corpus: Path, whole: tuple[bytes, bytes]) -> None:
    run.process.kill()
    assert run.ended()[0] == -signal.SIGKILL
    assert run.names() == {"o_text_document.bin.partial"}
    again = run_tool(
        "preprocess_data.py", "--input", corpus, "--output-prefix", run.prefix,
        "--tokenizer-type", "ByteTokenizer", "--workers", 1, "--append-eod",
    )  # fmt: skip
    assert again.code == 0
    assert pair_bytes(f"{run.prefix}_text_document") == whole
    assert run.names() == {"o_text_document.bin", "o_text_document.idx"}


def _kill_at_random_moments(corpus: Path, whole: tuple[bytes, bytes], folder: Path, n: int) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)
    for number in range(n):
        run = Run(corpus, folder / str(number) / "o", workers=draw.choice((1, 2)))
        time.sleep(draw.random() * 3)
        with_children = psutil.Process(run.process.pid)
        try:
            run.workers = with_children.children(recursive=True)
        except psutil.NoSuchProcess:
            run.workers = []
        run.process.send_signal(draw.choice((signal.SIGKILL, signal.SIGTERM)))
        run.ended()
        if "o_text_document.idx" in run.names():  # it was quicker: then it must be whole
            assert pair_bytes(f"{run.prefix}_text_document") == whole, seed


def test_killed_at_any_moment(corpus: Path, whole: tuple[bytes, bytes], tmp_path: Path) -> None:
    _kill_at_random_moments(corpus, whole, tmp_path, 3)


@pytest.mark.slow
def test_killed_at_many_moments(corpus: Path, whole: tuple[bytes, bytes], tmp_path: Path) -> None:
    _kill_at_random_moments(corpus, whole, tmp_path, 60)


def test_a_signal_between_the_two_files_waits(tmp_path: Path) -> None:
    """SIGTERM while files get their names: all of them get theirs, then the signal is obeyed."""
    from megatron.core.datasets.preprocessing.output import signals_held

    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with signals_held():
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == []
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_full_disk_names_itself(tmp_path: Path) -> None:
    """Writes fail beyond 64 KB (a file size limit stands for a full disk)."""
    import resource

    path = write_jsonl(tmp_path / "a.jsonl", documents(500, longest=1000) * 8)
    done = run_tool(
        "preprocess_data.py", "--input", path, "--output-prefix", tmp_path / "out" / "o",
        "--tokenizer-type", "ByteTokenizer", "--workers", 1,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)),
    )  # fmt: skip
    assert done.code == 1
    assert "File too large" in done.err
    assert "Traceback" not in done.err
    assert list((tmp_path / "out").iterdir()) == []
