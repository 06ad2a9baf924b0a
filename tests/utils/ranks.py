"""Run a function on N gloo ranks from a warm forkserver, under a time limit.

``run_ranks(4, fn, a, b)`` calls ``fn(rank, world_size, a, b)`` in four processes that share
a gloo world and returns their results by rank. ``fn`` must be a module-level function (it
is pickled). A failing rank's traceback is raised here; a hanging rank is named and killed.
Starting 4 ranks takes about 0.2 s once the forkserver is warm.
"""

import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any


class RankError(AssertionError):
    """A rank raised, died or ran out of time."""


_PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.testing",
    "pytest",
    "megatron.training.build",
    "megatron.training.loop",
]
"""What the forkserver imports once, so that ranks need not."""


def forkserver() -> Any:
    """The multiprocessing context whose server has the heavy imports done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _worker(conn: Any, rank: int, world: int, store: str, fn: Any, args: Any, limit: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world)
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=limit),
        )
        result = fn(rank, world, *args)
        conn.send_bytes(pickle.dumps((True, result)))  # tensors by value: this process ends soon
        dist.destroy_process_group()
    except BaseException:
        conn.send_bytes(pickle.dumps((False, traceback.format_exc())))
        conn.close()
        os._exit(1)


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0
) -> list[Any]:
    """``[fn(rank, world_size, *args) for rank in ...]``, each rank in a process of its own.

    Raises:
        RankError: with the first failing rank's traceback, or the ranks that still ran
            after ``timeout`` seconds.
    """
    context = forkserver()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pairs = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(
                target=_worker,
                args=(pairs[rank][1], rank, world_size, store, fn, args, timeout),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for _, sender in pairs:
            sender.close()
        try:
            return _collect([receiver for receiver, _ in pairs], timeout)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()
            for receiver, _ in pairs:
                receiver.close()


def _collect(receivers: list[Any], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), deadline - time.monotonic())
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} still run after {timeout} s")
        failures = []
        for receiver in ready:
            rank = waiting.pop(receiver)  # type: ignore[call-overload]
            try:
                ok, value = pickle.loads(receiver.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                ok, value = False, "the process died without a word"
            if ok:
                results[rank] = value
            else:
                failures.append(f"rank {rank}:\n{value}")
        if failures:
            raise RankError("\n".join(failures))
    return [results[rank] for rank in range(len(receivers))]
