"""A process that is done ends with its own exit code, whatever its threads are in."""

import signal
import subprocess
import sys

BUSY = """
import atexit, sys, threading, time, torch
from concurrent.futures import ThreadPoolExecutor
from megatron.training.leave import leave

matrix = torch.ones(600, 600)
started = threading.Event()

def work():
    while True:
        torch.mm(matrix, matrix)
        started.set()

threading.Thread(target=work, daemon=True).start()
started.wait()
"""


def _run(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", BUSY + code], capture_output=True, text=True, timeout=150
    )


def test_a_plain_end_aborts_with_a_thread_inside_torch() -> None:
    # If this no longer holds, leave() has lost its reason. Between two operations it may end well.
    assert any(_run("sys.exit(7)").returncode == -signal.SIGABRT for _ in range(5))


def test_leaving_gives_the_code_and_runs_what_a_plain_end_runs() -> None:
    done = _run(
        "atexit.register(lambda: print('hook'))\n"
        "threading.Timer(0.5, lambda: print('thread')).start()\n"
        "pool = ThreadPoolExecutor(1)\n"
        "pool.submit(time.sleep, 0)\n"
        "sys.stdout.write('unfinished line ')\n"
        "leave(7)\n"
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout.split() == ["unfinished", "line", "thread", "hook"]
    assert done.stderr == ""


def test_leaving_survives_a_hook_that_fails_and_a_closed_stream() -> None:
    done = _run("atexit.register(lambda: 1 / 0)\nsys.stdout.close()\nleave(99)\n")
    assert done.returncode == 99
    assert "ZeroDivisionError" in done.stderr


def test_a_training_job_ends_by_it() -> None:
    done = _run(
        "import runpy\n"
        "import megatron.training\n"
        "megatron.training.pretrain = lambda *args, **kwargs: 99\n"
        "runpy.run_module('pretrain_gpt', run_name='__main__')\n"
    )
    assert done.returncode == 99, done.stderr


def test_a_tool_ends_by_it() -> None:
    done = _run("import tools.command\ntools.command.run(lambda: 1)\n")
    assert done.returncode == 1, done.stderr
