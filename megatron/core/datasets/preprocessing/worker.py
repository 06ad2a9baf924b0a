"""Worker processes and the pool that keeps their results in order.

A worker is a fresh interpreter (not a fork: no inherited locks or threads, and no helper process
beside it) with one socket to the main process. It takes a unit, sends the result, takes the next:
one message at a time each way, so neither side ever waits for the other to read.

Whatever dies is noticed. A worker that is gone closes its socket: the pool raises at once. A main
process that is gone, by any signal, takes its workers along: the kernel kills them (Linux), and
elsewhere their socket ends. So there are no orphans and no endless waits.

Memory: at most ``WINDOW`` units a worker are under way or waiting for an earlier one.
"""

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron.core.datasets.preprocessing.encoder import (
    Encoded,
    EncoderSettings,
    TokenizerFactory,
    TokenizerFacts,
)
from megatron.core.datasets.preprocessing.records import CorpusError, WorkerDied
from megatron.core.datasets.preprocessing.units import Unit

WINDOW = 4
_READY, _DONE, _REFUSED, _CRASHED = "ready", "done", "refused", "crashed"
_BOOT = "import sys; sys.path[:] = {path!r}; from {module} import serve; serve({descriptor}, {pid})"
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class _Worker:
    """One process and its socket."""

    def __init__(self, number: int) -> None:
        self.number = number
        ours, theirs = socket.socketpair()
        try:
            boot = _BOOT.format(
                path=sys.path, module=__name__, descriptor=theirs.fileno(), pid=os.getpid()
            )
            self.process = subprocess.Popen(
                [sys.executable, "-c", boot],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,
            )
        finally:
            theirs.close()
        self.connection = Connection(ours.detach())

    def obituary(self) -> str:
        """How it ended."""
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code >= 0:
            return f"ended with code {code}"
        name = signal.Signals(-code).name
        return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")

    def stop(self) -> None:
        """End it now."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


class WorkerPool:
    """``workers`` processes; ``encode`` maps units to results, in order. A context manager."""

    def __init__(self, workers: int, factory: TokenizerFactory, settings: EncoderSettings) -> None:
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._results: dict[int, Encoded] = {}
        self.facts: TokenizerFacts | None = None
        try:
            for number in range(workers):
                self._workers.append(_Worker(number))
                self._workers[-1].connection.send_bytes(pickle.dumps((factory, settings)))
            while self.facts is None:
                self._receive()
        except BaseException:
            self.close()
            raise

    def encode(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, Encoded]]:
        """Each unit with its result, in the order of the units.

        Raises:
            CorpusError: what a worker can't read or tokenize.
            WorkerDied: if a worker is gone.
        """
        source = iter(units)
        under_way: dict[int, Unit] = {}
        sent = wanted = 0
        upcoming = next(source, None)
        while upcoming is not None or wanted < sent:
            window = wanted + WINDOW * len(self._workers)
            while upcoming is not None and self._idle and sent < window:
                self._send(self._idle.pop(), (sent, upcoming))
                under_way[sent] = upcoming
                sent += 1
                upcoming = next(source, None)
            if wanted in self._results:
                yield under_way.pop(wanted), self._results.pop(wanted)
                wanted += 1
            else:
                self._receive()

    def close(self) -> None:
        """End all workers."""
        while self._workers:
            self._workers.pop().stop()

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, worker: _Worker, message: Any) -> None:
        try:
            worker.connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except OSError:
            raise self._death(worker) from None

    def _receive(self) -> None:
        """Take what the workers have to say, waiting until one has something."""
        by_connection = {worker.connection: worker for worker in self._workers}
        for connection in wait(list(by_connection)):
            worker = by_connection[connection]  # type: ignore[index]
            try:
                kind, *content = pickle.loads(worker.connection.recv_bytes())
            except (EOFError, OSError):
                raise self._death(worker) from None
            if kind == _REFUSED:
                raise CorpusError(content[0])
            if kind == _CRASHED:
                raise RuntimeError(f"worker {worker.number} failed:\n{content[0]}")
            if kind == _DONE:
                self._results[content[0]] = content[1]
            elif self.facts is None:
                self.facts = content[0]
            self._idle.append(worker)

    def _death(self, worker: _Worker) -> WorkerDied:
        return WorkerDied(
            f"worker {worker.number} (process {worker.process.pid}) {worker.obituary()}; nothing "
            f"was written under the final names; run again, with fewer --workers if memory ran out"
        )


def serve(descriptor: int, parent: int) -> None:
    """A worker's life (called in its process)."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            _serve(connection)
        except (ValueError, OSError) as error:
            if isinstance(error, BrokenPipeError | ConnectionResetError):
                raise
            connection.send_bytes(pickle.dumps((_REFUSED, str(error))))
        except Exception:
            connection.send_bytes(pickle.dumps((_CRASHED, traceback.format_exc())))


def _serve(connection: Connection) -> None:
    from megatron.core.datasets.preprocessing.encoder import Encoder

    factory, settings = pickle.loads(connection.recv_bytes())
    encoder = Encoder(factory, settings)
    connection.send_bytes(pickle.dumps((_READY, encoder.facts)))
    while True:
        number, unit = pickle.loads(connection.recv_bytes())
        reply = (_DONE, number, encoder(unit))
        connection.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends (Linux; else the socket's end)."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
