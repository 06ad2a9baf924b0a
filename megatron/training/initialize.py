"""From a launch environment to a world of ranks, with errors that say who could not meet whom."""

import contextlib
import datetime
import logging
import os
import resource

import torch
import torch.distributed as dist

from megatron.core.compat import group_device
from megatron.core.config import RunConfig
from megatron.training.launch_env import LaunchEnvironment

logger = logging.getLogger("megatron")

OPEN_FILES = 1 << 16
"""Enough for the groups of 10,000 ranks."""


class RendezvousError(RuntimeError):
    """The ranks of the job did not meet."""


def pick_device(env: LaunchEnvironment) -> torch.device:
    """The device of this rank: its own GPU, or the CPU.

    Raises:
        RendezvousError: if this node has fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # With --gpus-per-task each rank sees its own GPU alone, as device 0.
    index = 0 if count == 1 else env.local_rank
    if index >= count:
        raise RendezvousError(
            f"local rank {env.local_rank} has no GPU: this node shows {count}; start one task per "
            "GPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def set_determinism(config: RunConfig, device: torch.device) -> None:
    """Make torch deterministic if the flags say so.

    Raises:
        ValueError: where a step is to be compared with itself, but wouldn't give the same bits.
    """
    training = config.training
    if training.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    elif training.rerun_check_interval > 0 and device.type == "cuda":
        raise ValueError(
            f"--rerun-check-interval {training.rerun_check_interval} compares bits, but on a GPU "
            "the backward pass of attention adds up in no fixed order; add --deterministic-mode"
        )


def leave_groups(*, failed: bool) -> None:
    """Take the process groups apart at the end of a run.

    Not NCCL's after a failure: that waits for operations which a rank that is gone never
    finishes. They go with the process.
    """
    if not dist.is_initialized() or (failed and group_device().type == "cuda"):
        return
    dist.destroy_process_group()


def raise_file_limit() -> None:
    """Let the process open as many files as it may, up to ``OPEN_FILES``.

    gloo opens a connection to each other rank in each group, beside NCCL too: with some 250 ranks
    the groups of the whole world pass the usual limit of 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # what is missing shows when groups are made
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def set_threads(env: LaunchEnvironment) -> None:
    """On a CPU, share the cores between the ranks of a node unless OMP_NUM_THREADS is set.

    More threads than cores makes many ranks on few cores about twice as slow.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // max(1, env.ranks_per_node)))


def initialize_distributed(env: LaunchEnvironment, config: RunConfig) -> torch.device:
    """Create the world's process group; returns this rank's device.

    Raises:
        RendezvousError: with host, port, rank and world size, if the ranks don't meet within
            ``--distributed-timeout-minutes``.
    """
    backend = config.parallel.distributed_backend
    if backend == "gloo" and torch.cuda.is_available():
        logger.info("--distributed-backend gloo moves no GPU tensors: this run is on the CPU")
    device = torch.device("cpu") if backend == "gloo" else pick_device(env)
    set_threads(env)
    raise_file_limit()
    if backend is None:
        # gloo beside NCCL: checkpoints and small agreements are made on the CPU.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl":
        if device.type != "cuda":
            raise RendezvousError("--distributed-backend nccl needs GPUs; none is visible")
        backend = "cpu:gloo,cuda:nccl"
    timeout = datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes)
    if env.launcher == "single":
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return device
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{env.master_addr}:{env.master_port}",
            rank=env.rank,
            world_size=env.world_size,
            timeout=timeout,
        )
    except Exception as error:
        raise RendezvousError(
            f"{env.describe()}: the ranks did not meet within "
            f"{config.parallel.distributed_timeout_minutes:g} minutes "
            f"(--distributed-timeout-minutes): {str(error).splitlines()[0]}. Check that all "
            f"{env.world_size} ranks were started and that {env.master_addr} answers on port "
            f"{env.master_port}"
        ) from error
    return device
