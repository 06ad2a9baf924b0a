"""One background thread that keeps a few results ready.

Reads of a memory map and numpy's copies let other threads run, so a thread is enough; a
process would copy every batch. What was made ahead of what was asked for is thrown away when
the prefetcher closes: the caller takes its position from what it got.
"""

import os
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Calls ``produce`` in a thread, up to ``depth`` results ahead; ``get`` gives them in order.

    An exception in ``produce`` is raised by the ``get`` that would have had its result, and by
    every later one.
    """

    def __init__(self, produce: Callable[[], T], depth: int) -> None:
        self._results: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._process = os.getpid()
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=_run, args=(produce, self._results, self._closed), daemon=True, name="data"
        )
        self._thread.start()

    def get(self) -> T:
        """The next result; waits for it."""
        if self._error is None:
            assert not self._closed.is_set(), "the prefetcher is closed"
            result, self._error = self._results.get()
        if self._error is not None:
            raise self._error
        return result  # type: ignore[return-value]

    def close(self) -> None:
        """Stop the thread and wait for it. Does nothing in a fork, which has no such thread."""
        if self._process != os.getpid():
            return
        self._closed.set()
        while True:  # make room in case it waits to put
            try:
                self._results.get_nowait()
            except queue.Empty:
                break
        if self._thread is not threading.current_thread():
            self._thread.join()


def _run(
    produce: Callable[[], T],
    results: "queue.Queue[tuple[T | None, BaseException | None]]",
    closed: threading.Event,
) -> None:
    while not closed.is_set():
        try:
            item: tuple[T | None, BaseException | None] = (produce(), None)
        except BaseException as error:
            item = (None, error)
        while not closed.is_set():
            try:
                results.put(item, timeout=0.1)
                break
            except queue.Full:
                continue
        if item[1] is not None:
            return
