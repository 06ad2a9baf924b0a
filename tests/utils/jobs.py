"""Run whole training jobs on N ranks, as ``torchrun`` would, from a warm forkserver.

``run_job(4, ["--num-layers", "2", ...])`` starts four processes that call ``pretrain`` with the
providers of ``pretrain_gpt.py`` and returns exit codes and output. Nothing but the process
launcher differs from the command line; a job of a tiny model takes one to three seconds.
"""

import contextlib
import dataclasses
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from megatron.core.dist_checkpointing import Piece
from megatron.core.dist_checkpointing.listing import read_metadata_safely
from megatron.core.dist_checkpointing.planners import PieceLoadPlanner
from megatron.core.dist_checkpointing.storage import SafeReader
from megatron.training.metrics_file import read_metrics
from tests.utils.ranks import forkserver

TINY = [
    "--num-layers=4",
    "--hidden-size=32",
    "--num-attention-heads=4",
    "--group-query-attention",
    "--num-query-groups=2",
    "--swiglu",
    "--normalization=RMSNorm",
    "--disable-bias-linear",
    "--position-embedding-type=rope",
    "--attention-dropout=0",
    "--hidden-dropout=0",
    "--seq-length=64",
    "--micro-batch-size=1",
    "--global-batch-size=8",
    "--train-iters=4",
    "--lr=1e-2",
    "--vocab-size=97",
    "--tokenizer-type=NullTokenizer",
    "--mock-data",
    "--log-interval=1",
    "--eval-iters=0",
    "--num-workers=0",
    "--distributed-timeout-minutes=1",
]
"""Flags of a small GPT on made-up documents; later flags win."""


@dataclasses.dataclass
class JobResult:
    """What a job left: exit codes and output by rank."""

    codes: list[int | None]
    output: list[str]
    errors: list[str]

    @property
    def text(self) -> str:
        """Output and errors of all ranks, for messages."""
        return "\n".join(
            f"--- rank {rank} (exit {code})\n{out}{err}"
            for rank, (code, out, err) in enumerate(
                zip(self.codes, self.output, self.errors, strict=True)
            )
        )

    def check(self, code: int = 0) -> "JobResult":
        """Assert that every rank ended with ``code``; returns self."""
        assert self.codes == [code] * len(self.codes), self.text[-6000:]
        return self


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank_main(rank: int, world: int, port: int, folder: str, argv: list[str], extra: Any) -> None:
    for number, name in ((1, "out"), (2, "err")):
        descriptor = os.open(f"{folder}/{rank}.{name}", os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(descriptor, number)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        **extra.get("environ", {}),
    )
    torch.set_num_threads(1)
    code = 1
    try:
        import pretrain_gpt
        from megatron.training import pretrain
        from megatron.training.signals import ExitSignals

        if "hook" in extra:
            extra["hook"](rank)
        argv = argv + list(extra.get("by_rank", {}).get(rank, []))
        signals = ExitSignals().install()
        code = pretrain(
            pretrain_gpt.model_provider,
            pretrain_gpt.data_provider,
            pretrain_gpt.loss_provider,
            argv=argv,
            signals=signals,
        )
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Job:
    """A running job; see ``run_job``."""

    def __init__(self, world_size: int, argv: list[str], **extra: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        port = free_port()
        context = forkserver()
        self.processes = [
            context.Process(
                target=_rank_main,
                args=(rank, world_size, port, self._folder.name, argv, extra),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def read(self, rank: int, name: str = "out") -> str:
        """What a rank has printed so far."""
        path = Path(self._folder.name) / f"{rank}.{name}"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, text: str, *, rank: int = 0, seconds: float = 60) -> None:
        """Wait until a rank has printed ``text``."""
        deadline = time.monotonic() + seconds
        while text not in self.read(rank) + self.read(rank, "err"):
            if time.monotonic() > deadline or not self.processes[rank].is_alive():
                raise TimeoutError(f"no {text!r} in: {self.read(rank)}{self.read(rank, 'err')}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL every rank that still runs."""
        for process in self.processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    def result(self, timeout: float) -> JobResult:
        """Wait for all ranks (killing them after ``timeout``) and collect what they left."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        self.kill()
        for process in self.processes:
            process.join()
        ranks = range(len(self.processes))
        result = JobResult(
            [process.exitcode for process in self.processes],
            [self.read(rank) for rank in ranks],
            [self.read(rank, "err") for rank in ranks],
        )
        self._folder.cleanup()
        assert not late, f"ranks {late} still ran after {timeout} s\n{result.text[-6000:]}"
        return result


def run_job(world_size: int, argv: list[str], *, timeout: float = 120, **extra: Any) -> JobResult:
    """Run a job to its end.

    Args:
        argv: flags of ``pretrain_gpt.py``.
        extra: ``environ`` (variables for all ranks), ``by_rank`` ({rank: more flags}), ``hook``
            (module-level function called with the rank before the job).
    """
    return Job(world_size, argv, **extra).result(timeout)


def metrics_of(path: Path) -> list[dict[str, Any]]:
    """Training records of a metrics file."""
    return [record for record in read_metrics(str(path)) if "lm_loss" in record]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole, read by one process."""
    metadata = read_metadata_safely(folder / ".metadata")
    tensors = {
        name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
    }
    pieces = {
        name: Piece(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    dcp_load(
        dict(pieces),
        storage_reader=SafeReader(folder, metadata),
        planner=PieceLoadPlanner(pieces),
        no_dist=True,
    )
    return tensors
