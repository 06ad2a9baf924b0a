"""Faults on purpose: hooks for ``tests.utils.jobs.Job``, called with the rank before the job.

Each is a module-level function used through ``functools.partial``, so that it can be sent to
the ranks. ``at_call`` acts in the n-th forward call (from 0) of the first layer's MLP on one
rank; a step has as many calls as the rank has micro-batches.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

Action = Callable[[torch.Tensor], torch.Tensor | None]


def poison(output: torch.Tensor) -> torch.Tensor:
    """A NaN in an activation."""
    output = output.clone()
    output.view(-1)[0] = float("nan")
    return output


def flip_forward(output: torch.Tensor) -> torch.Tensor:
    """One flipped bit in an activation."""
    output = output.clone()
    output.detach().view(-1)[:1].view(torch.int32 if output.itemsize == 4 else torch.int64)[0] ^= (
        1 << 29
    )
    return output


def flip_backward(output: torch.Tensor) -> None:
    """One flipped bit in a gradient."""

    def flip(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        kind = torch.int32 if grad.itemsize == 4 else torch.int64
        grad.view(-1)[3:4].view(kind)[0] ^= 1 << 20
        return grad

    output.register_hook(flip)


def stuck_on_purpose(output: torch.Tensor) -> None:
    """A computation that never ends."""
    while True:
        time.sleep(0.1)


def frozen(output: torch.Tensor) -> None:
    """A process that the machine stopped."""
    os.kill(os.getpid(), signal.SIGSTOP)


def killed(output: torch.Tensor) -> None:
    """A process that the machine killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def raising(output: torch.Tensor) -> None:
    """A bug on one rank."""
    raise RuntimeError("a bug on purpose")


def slow(output: torch.Tensor) -> None:
    """A slow machine."""
    time.sleep(0.15)


def _install(model: torch.nn.Module, action: Action, first: int, last: int) -> None:
    calls = iter(range(1 << 30))
    layers = model.decoder.layers  # type: ignore[union-attr]
    mlp = next(iter(layers.children())).mlp  # type: ignore[union-attr,operator]

    def act(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return action(output) if first <= next(calls) <= last else None

    mlp.register_forward_hook(act)  # type: ignore[union-attr,operator]


def at_call(
    rank: int, *, victim: int, action: Action, first: int = 0, last: int | None = None
) -> None:
    """``action`` in the calls ``first`` to ``last`` (default: ``first`` alone) on one rank."""
    if rank != victim:
        return
    import pretrain_gpt

    provider = pretrain_gpt.model_provider

    def faulty(config: Any, **placement: Any) -> Any:
        model = provider(config, **placement)
        _install(model, action, first, first if last is None else last)
        return model

    pretrain_gpt.model_provider = faulty


def reads_one_step_ahead(rank: int, *, victim: int) -> None:
    """One rank lost a step of the stream."""
    if rank != victim:
        return
    from megatron.core.datasets import BatchLoader

    original = BatchLoader.next_step
    calls = iter(range(1 << 30))

    def next_step(self: Any) -> Any:
        if next(calls) == 1:
            state = self.state, self.consumed_samples, self.consumed_tokens
            original(self)
            del state
        return original(self)

    BatchLoader.next_step = next_step  # type: ignore[method-assign]


def in_folder_of_its_own(rank: int, *, folder: str) -> None:
    """Each rank in ``folder/rank``: nodes of one rank with disks of their own."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.chdir(Path(folder) / str(rank))


def comes_late(rank: int, *, victim: int, marker: str) -> None:
    """One rank never comes to the rendezvous; ``marker`` is created when another begins to wait."""
    import torch.distributed as dist

    if rank == victim:
        time.sleep(60)
    original = dist.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        Path(marker).touch()
        original(*args, **kwargs)

    dist.init_process_group = init_process_group


def disk_full(rank: int, *, victim: int, save: int) -> None:
    """The n-th save (from 0) finds no space for one rank's tensors."""
    if rank != victim:
        return
    from megatron.core.dist_checkpointing import checkpoint_io

    saves = iter(range(1 << 30))
    original = checkpoint_io.ChecksumWriter.write_data

    def write_data(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(saves) >= save:
            raise OSError(28, "No space left on device")
        return original(self, *args, **kwargs)

    checkpoint_io.ChecksumWriter.write_data = write_data  # type: ignore[method-assign]


def slow_saves(rank: int, *, seconds: float, marker: str | None = None) -> None:
    """Writing takes a while; ``marker`` is created when it begins."""
    from megatron.core.dist_checkpointing import checkpoint_io

    original = checkpoint_io.ChecksumWriter.write_data

    def write_data(self: Any, *args: Any, **kwargs: Any) -> Any:
        if marker is not None and rank == 0:
            Path(marker).touch()
        time.sleep(seconds)
        return original(self, *args, **kwargs)

    checkpoint_io.ChecksumWriter.write_data = write_data  # type: ignore[method-assign]


def slow_disk(rank: int, *, victim: int, seconds: int) -> None:
    """On one rank the first blocks of a save take a second each, ``seconds`` in all."""
    if rank != victim:
        return
    from megatron.core.dist_checkpointing import storage

    original = storage._ChecksumStream.write
    writes = iter(range(1, 1 << 30))

    def write(self: Any, data: Any) -> int:
        number = next(writes)
        if number <= seconds:
            time.sleep(1)
        if number == seconds:
            print(f"wrote for {seconds} s", flush=True)
        return original(self, data)

    storage._ChecksumStream.write = write  # type: ignore[method-assign]


def corrupt_transfer(rank: int, *, victim: int, transfer: int) -> None:
    """What one rank receives in its n-th sealed transfer is not what was sent."""
    if rank != victim:
        return
    from megatron.core.context_parallel.integrity import Audit

    calls = iter(range(1 << 30))
    original = Audit.compare

    def compare(self: Any, payload: Any, sealed: Any, *rest: Any, **named: Any) -> None:
        if next(calls) == transfer:
            payload.view(-1)[0] += 1
        original(self, payload, sealed, *rest, **named)

    Audit.compare = compare  # type: ignore[method-assign]


def draws_random_numbers(rank: int) -> None:
    """After each step a rank draws rank + 1 numbers from torch's generator and prints the last."""
    from megatron.training import loop

    original = loop.train_step

    def train_step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        print("drew", [float(torch.rand(())) for _ in range(rank + 1)][-1], flush=True)
        return result

    loop.train_step = train_step


def late(rank: int, *, victim: int) -> None:
    """One rank's clock says that the job has run for two minutes."""
    if rank != victim:
        return
    from megatron.training import loop

    clock = SimpleNamespace(time=lambda: time.time() + 120, perf_counter=time.perf_counter)
    loop.time = clock  # type: ignore[attr-defined]


def signalled_in(rank: int, *, victim: int, module: str, name: str, call: int = 0) -> None:
    """A signal comes to one rank in its call number ``call`` of ``module.name``."""
    if rank != victim:
        return
    import importlib

    room = importlib.import_module(module)
    original = getattr(room, name)
    calls = iter(range(1 << 30))

    def signalled(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGUSR1)
        return original(*args, **kwargs)

    setattr(room, name, signalled)
