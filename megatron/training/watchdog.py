"""No rank waits for ever for one that died, raised or hangs.

Each rank has a thread that tells a store on rank 0, twice a second, what the rank does and how
far it is. Rank 0's thread judges (``verdict``); when it has a verdict, a second thread of every
rank prints it and leaves with its code, also where the main thread is stuck in a communication.

The main thread says what it does (``doing``), ticks whenever it gets on (each layer, forward and
backward), and hands an exception that would end the run to ``conclude``. Saves and loads tick for
each block of a file, so they may take any time as long as they get on; the thread that writes in
the background is watched beside the main one. While ``limited``, a thread that neither ticks nor
waits for others within 0.8 x ``--distributed-timeout-minutes`` ends the run, before the
communications of training time out.

Cost: two requests per rank and half second to one store, and one look at the main thread's
frame every 20 ms (for the straggler report). It doesn't restart anything.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.training.rerun_check import register_hook
from megatron.training.signals import ExitSignals
from megatron.training.stacks import BusyTime, frame_of, stack_of, waits_for_ranks
from megatron.training.verdict import Beat, Failure, Judge, Strand, Verdict, is_consequence

SAMPLE_SECONDS = 0.02
LIMIT_SHARE = 0.8
"""Part of --distributed-timeout-minutes after which a rank counts as stuck."""
_EXPECTED = ("CheckpointError", "CheckpointMismatch", "IntegrityError")
"""Errors that say all there is to say; by name, since importing them costs seconds."""


def make_store(host: str, timeout_s: float) -> Any:
    """A key-value store on rank 0 of its own port, apart from the one of the process groups."""
    if dist.get_world_size() == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]
    first = dist.get_rank() == 0
    timeout = timedelta(seconds=timeout_s)
    port: list[int] = [0]
    store: Any = None
    if first:
        store = TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
        port[0] = store.port
    dist.broadcast_object_list(port, src=0)
    if not first:
        store = TCPStore(host, port[0], None, False, timeout, wait_for_workers=False)
    return store


class Watchdog:
    """Watches the ranks of a run; one on each rank.

    Args:
        store: shared by all ranks, and used by nothing else.
        timeout_s: ``--distributed-timeout-minutes`` in seconds.
        signals: a second signal that the main thread can't act on ends the process from here.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        timeout_s: float,
        signals: ExitSignals | None = None,
    ) -> None:
        self._store = store
        self._signals = signals
        self._rank = rank
        self._world = world_size
        self._poll = min(0.5, timeout_s / 40)
        self._patience = max(4 * self._poll, min(2.0, timeout_s / 10))
        self._limit = LIMIT_SHARE * timeout_s
        self._beat = Beat()
        self._writer: Callable[[], threading.Thread | None] = lambda: None
        self._send_stack = False
        self._closing = False
        self._concluding = False
        self._verdict: Verdict | None = None
        self._decided = threading.Event()
        self.busy = BusyTime()
        self._found: Verdict | None = None
        self._heard = time.monotonic()
        self._threads = [
            threading.Thread(target=target, name="watchdog", daemon=True)
            for target in (self._talk, self._guard)
        ]

    def start(self) -> "Watchdog":
        """Start watching; returns self. Collective."""
        if self._rank == 0:
            self._store.set("orders", json.dumps({"stacks": False, "verdict": None}))
            for rank in range(self._world):
                self._store.set(f"beat/{rank}", json.dumps(Beat().to_json()))
        dist.all_reduce(torch.zeros(1))
        self._heard = time.monotonic()
        if self._signals is not None:
            self._signals.notice_from_threads()
            self._signals.before_dying = self._last_word
        for thread in self._threads:
            thread.start()
        return self

    def doing(self, what: str) -> None:
        """Say what the main thread does from here on; counts as a tick."""
        self._beat.doing = what
        self._beat.ticks += 1

    def tick(self, *_: Any) -> None:
        """Note progress."""
        self._beat.ticks += 1

    def progress(self) -> None:
        """Note progress of a save or a load; called from the main thread or from the writer."""
        if threading.current_thread() is threading.main_thread():
            self._beat.ticks += 1
        else:
            self._beat.writer.ticks += 1

    def watch_writer(self, writer: Callable[[], threading.Thread | None]) -> None:
        """Watch the thread that ``writer()`` gives, while it lives, as well as the main one."""
        self._writer = writer

    def limit(self, on: bool) -> None:
        """Whether ticks must come within the limit from here on."""
        self._beat.ticks += 1
        self._beat.limited = on

    def unlimited(self, what: str) -> contextlib.AbstractContextManager[None]:
        """For work of unknown length that can't tick, such as opening data."""
        return self._phase(what, limited=False)

    def limited(self, what: str) -> contextlib.AbstractContextManager[None]:
        """For work of unknown length that ticks, such as writing a checkpoint."""
        return self._phase(what, limited=True)

    @contextlib.contextmanager
    def _phase(self, what: str, *, limited: bool) -> Iterator[None]:
        doing, before = self._beat.doing, self._beat.limited
        self.doing(what)
        self.limit(limited)
        try:
            yield
        finally:
            self.limit(before)
            self.doing(doing)

    def follow(self, chunks: list[nn.Module]) -> None:
        """Tick at each layer of ``chunks``, in forward and in backward passes."""

        def forward(module: nn.Module, args: Any, output: Any) -> None:
            self.tick()
            if isinstance(output, torch.Tensor) and output.requires_grad:
                register_hook(output, self.tick)

        for chunk in chunks:
            for holder in chunk.modules():
                if isinstance(holder, nn.ModuleDict | nn.ModuleList):
                    for layer in holder.children():
                        layer.register_forward_hook(forward)

    def leaving(self) -> None:
        """The run is over on this rank: the others' end is no fault from here on."""
        self._beat.limited = False
        self._closing = True

    def close(self) -> None:
        """Stop watching."""
        self._closing = True
        self._decided.set()
        for thread in self._threads:
            thread.join(timeout=5)

    def conclude(self, error: BaseException, code: int) -> int:
        """Tell the others of the exception that ends this rank; returns the exit code.

        Waits for the verdict and prints it: on every rank, or on the first alone if all ranks
        failed alike. An unexpected error's traceback is printed by its own rank.
        """
        expected = code == 2 or type(error).__name__ in _EXPECTED
        text = f"{error}" if expected else f"{type(error).__name__}: {error}"
        consequence = is_consequence(text) and code != 2
        self._concluding = True
        self._closing = False
        self._beat.failure = Failure(text, code, consequence)
        self._decided.wait(timeout=10 * self._patience + 20)
        verdict = self._verdict or Verdict(f"rank {self._rank} failed: {text}", code)
        if not expected and not consequence:
            traceback.print_exception(error)
        self._print(verdict)
        if self._rank == 0:
            # The others read the verdict from this rank's store.
            time.sleep(3 * self._poll)
        self.close()
        return verdict.code

    def _print(self, verdict: Verdict) -> None:
        if verdict.shared and self._rank != 0:
            return
        where = "" if verdict.shared or self._world == 1 else f" (rank {self._rank})"
        print(f"pretrain{where}: {verdict.message}", file=sys.stderr, flush=True)

    def _talk(self) -> None:
        """Exchange beats and orders with the store; it may block if rank 0 is frozen."""
        judge = None
        if self._rank == 0:
            judge = Judge(
                self._world, limit=self._limit, patience=self._patience, now=time.monotonic()
            )
        while not self._decided.is_set():
            try:
                self._found = self._exchange(judge)
            except Exception as error:
                if not self._closing:
                    self._found = self._lost_the_first(str(error).splitlines()[0])
                return
            self._heard = time.monotonic()
            if self._found is not None:
                return
            self._decided.wait(self._poll)

    def _guard(self) -> None:
        """Sample the main thread; act on what the talking thread found, or on its silence."""
        while not self._decided.wait(SAMPLE_SECONDS):
            self.busy.sample()
            overdue = self._signals.overdue() if self._signals is not None else None
            if overdue is not None:
                self._last_word(overdue)
                os._exit(128 + overdue)
            silence = time.monotonic() - self._heard
            if self._found is None and silence > self._limit and not self._closing:
                self._found = self._lost_the_first(f"silent for {silence:.0f} s")
            if self._found is not None:
                self._end(self._found)
                return

    def _lost_the_first(self, why: str) -> Verdict:
        return Verdict(
            "rank 0 no longer answers (killed, frozen, out of memory, or its machine is gone): "
            f"{why}",
            1,
        )

    def _send(self) -> None:
        beat = self._beat
        beat.number += 1
        self._look(beat, threading.main_thread())
        writer = self._writer()
        if writer is not None and writer.is_alive():
            beat.writer.limited, beat.writer.doing = True, writer.name
            self._look(beat.writer, writer)
        else:
            beat.writer = Strand(ticks=beat.writer.ticks)
        self._store.set(f"beat/{self._rank}", json.dumps(beat.to_json()))

    def _last_word(self, number: int) -> None:
        """Tell the first rank, if it answers, what this one did when a second signal ended it."""

        def send() -> None:
            with contextlib.suppress(RuntimeError):  # no store any more
                self._send()

        self._beat.doing += f", ended by a second {signal.Signals(number).name}"
        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        sender.join(1.0)

    def _look(self, strand: Strand, thread: threading.Thread) -> None:
        frame = frame_of(thread)
        strand.waits = waits_for_ranks(frame)
        strand.stack = stack_of(frame) if self._send_stack and frame is not None else None

    def _exchange(self, judge: Judge | None) -> Verdict | None:
        self._send()
        if judge is not None:
            return self._judge(judge)
        orders = json.loads(self._store.get("orders"))
        self._send_stack = orders["stacks"]
        return Verdict(**orders["verdict"]) if orders["verdict"] else None

    def _judge(self, judge: Judge) -> Verdict | None:
        for rank in range(self._world):
            beat = Beat.from_json(json.loads(self._store.get(f"beat/{rank}")))
            judge.hear(rank, beat, time.monotonic())
        verdict = judge.decide(time.monotonic())
        self._send_stack = judge.wants_stacks
        orders = {"stacks": judge.wants_stacks, "verdict": None}
        if verdict is not None:
            orders["verdict"] = vars(verdict)  # type: ignore[assignment]
        self._store.set("orders", json.dumps(orders))
        return verdict

    def _end(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._decided.set()
        if self._concluding or self._closing:
            return
        # The main thread may be stuck in a communication: give it a moment, then leave for it.
        if self._rank == 0:
            time.sleep(3 * self._poll)
        if self._concluding:
            return
        self._print(verdict)
        sys.stdout.flush()
        os._exit(verdict.code)
