"""Where a thread of this process is, told from another thread.

A thread that waits for other ranks is told from one that works by its innermost Python frame:
it stands in torch's collectives, or on a line that calls ``.wait()`` on a communication, or joins
the thread that writes a checkpoint (which is watched itself). The look costs some ten
microseconds and disturbs nothing. On GPUs the host runs ahead of the device: a wait inside a
kernel is not seen.
"""

import linecache
import sys
import threading
import time
import traceback
from types import FrameType

_COLLECTIVE_FILES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/c10d_logger.py",
    "torch/distributed/nn/functional.py",
)
_JOINING_FILE = "megatron/core/dist_checkpointing/saver.py"
_THREADING_FILE = threading.Thread.join.__code__.co_filename
DEEPEST_FRAMES = 25
"""Frames shown of a stack, innermost last."""


def frame_of(thread: threading.Thread) -> FrameType | None:
    """The innermost Python frame of a thread; None if it has ended."""
    return sys._current_frames().get(thread.ident or 0)


def waits_for_ranks(frame: FrameType | None) -> bool:
    """Whether the thread of ``frame`` stands in a communication with other ranks."""
    if frame is None:
        return False
    code = frame.f_code
    if _path(frame).endswith(_COLLECTIVE_FILES):
        return True
    if code.co_filename == _THREADING_FILE:
        outer: FrameType | None = frame
        while outer is not None and outer.f_code.co_filename == _THREADING_FILE:
            outer = outer.f_back
        return outer is not None and _path(outer).endswith(_JOINING_FILE)
    return ".wait(" in linecache.getline(code.co_filename, frame.f_lineno or 0)


def _path(frame: FrameType) -> str:
    return frame.f_code.co_filename.replace("\\", "/")


def stack_of(frame: FrameType | None) -> str:
    """The stack of ``frame`` as text, innermost frame last."""
    if frame is None:
        return "(the thread has ended)"
    return "".join(traceback.format_stack(frame)[-DEEPEST_FRAMES:])


class BusyTime:
    """How long the main thread has worked rather than waited for others, by sampling.

    ``sample()`` is called from a background thread, ``take()`` from the main one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy = 0
        self._samples = 0
        self._since = time.perf_counter()

    def sample(self) -> None:
        """Look once at what the main thread does."""
        waits = waits_for_ranks(frame_of(threading.main_thread()))
        with self._lock:
            self._samples += 1
            self._busy += not waits

    def take(self) -> float:
        """Busy seconds since the last call, and start anew."""
        now = time.perf_counter()
        with self._lock:
            share = self._busy / self._samples if self._samples else 1.0
            seconds = share * (now - self._since)
            self._busy = self._samples = 0
            self._since = now
        return seconds
