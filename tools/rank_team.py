"""Processes that run a module's functions together on command: the ranks of a benchmark.

Each process keeps a dictionary ``jobs`` between calls, has its own number of threads and, with more
than one rank, a gloo world.
"""

import importlib
import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta
from typing import Any


class Team:
    """Processes that run jobs together when told, and are idle otherwise."""

    def __init__(self, module: str, ranks: int, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._pipes = []
        self._processes = []
        for rank in range(ranks):
            here, there = context.Pipe()
            process = context.Process(
                target=_work, args=(there, module, rank, ranks, threads, store), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def call(self, name: str, *args: Any) -> list[Any]:
        """What ``name(jobs, rank, ranks, *args)`` of the module gives, by rank."""
        for pipe in self._pipes:
            pipe.send((name, args))
        answers = [pipe.recv() for pipe in self._pipes]
        for ok, value in answers:
            if not ok:
                raise RuntimeError(f"a rank failed:\n{value}")
        return [value for _, value in answers]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(timeout=10)
        self._folder.cleanup()


def _work(pipe: Any, module: str, rank: int, ranks: int, threads: int, store: str) -> None:
    """A team's process: run what comes through the pipe until None."""
    import torch
    import torch.distributed as dist

    from megatron.training.leave import leave

    torch.set_num_threads(threads)
    if ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(minutes=20),
        )
    functions = importlib.import_module(module)
    jobs: dict[str, Any] = {}
    while (message := pipe.recv()) is not None:
        name, args = message
        try:
            pipe.send((True, getattr(functions, name)(jobs, rank, ranks, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    if ranks > 1:
        dist.destroy_process_group()
    leave(0)
