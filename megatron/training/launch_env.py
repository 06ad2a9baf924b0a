"""Who this process is: rank, world size and rendezvous, from torchrun or from Slurm.

torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; ``srun`` with one
task per rank sets SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID and SLURM_JOB_NODELIST. Without
either the world is one process. This module is read once, by the entry point, and imports
nothing heavy.
"""

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Mapping

SLURM_PORT_BASE = 20000
SLURM_PORT_RANGE = 12000
"""Ends below the ports that Linux hands out to connections, from 32,768 on."""
SLURM_STEP_DISTANCE = 997
SLURM_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""From here on step ids are no steps of tasks: the shell of ``salloc``, a batch script."""


@dataclasses.dataclass(frozen=True)
class LaunchEnvironment:
    """Rank and rendezvous of one process."""

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: int
    master_addr: str
    master_port: int
    launcher: str
    """``torchrun``, ``slurm`` or ``single``."""

    def describe(self) -> str:
        """One line for error messages and the log."""
        return (
            f"rank {self.rank} of {self.world_size}, local rank {self.local_rank}, "
            f"rendezvous {self.master_addr}:{self.master_port} ({self.launcher})"
        )


def slurm_port(job_id: int, step_id: int = 0) -> int:
    """A rendezvous port that differs between the jobs of a node and between a job's steps."""
    return SLURM_PORT_BASE + (job_id + SLURM_STEP_DISTANCE * step_id) % SLURM_PORT_RANGE


def first_host(node_list: str) -> str:
    """First host of a Slurm node list such as ``gpu[03-07,9],login1`` -> ``gpu03``.

    ``scontrol show hostnames`` is asked where it exists (it knows every form); the usual
    forms are understood without it.

    Raises:
        ValueError: for a list that names no host.
    """
    if shutil.which("scontrol"):
        answer = subprocess.run(
            ["scontrol", "show", "hostnames", node_list],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if answer.returncode == 0 and answer.stdout.strip():
            return answer.stdout.split()[0]
    # Text and bracketed ranges take turns up to the first comma outside brackets.
    match = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+(?=,|$)", node_list.strip())
    if match is None:
        raise ValueError(f"node list {node_list!r} of the Slurm job names no host")
    return re.sub(r"\[([^-,\]]*)[^\]]*\]", r"\1", match.group())


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in environ:
        if default is not None:
            return default
        raise ValueError(f"{name} is not set, though others of its launcher are; set it too")
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"{name}={environ[name]!r} must be a whole number") from None


def _same_on_every_node(per_node: str) -> int | None:
    """Tasks on each node from ``4``, ``4(x2)`` or ``4,4``; None when nodes differ."""
    counts = set(re.sub(r"\(x\d+\)", "", per_node).split(","))
    count = counts.pop()
    return int(count) if not counts and count.isdigit() else None


def _slurm_ranks_per_node(environ: Mapping[str, str], world_size: int) -> int:
    # The step's own first: SLURM_NTASKS_PER_NODE may be that of the job, which srun -n undercuts.
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_NTASKS_PER_NODE")
    named = [name for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if environ.get(name)]
    nodes = _integer(environ, named[0]) if named else 1
    if per_node is None:
        if nodes < 1 or world_size % nodes:
            raise ValueError(
                f"SLURM_NTASKS={world_size} tasks don't divide over {nodes} nodes; start the "
                "same number on each node (--ntasks-per-node)"
            )
        return world_size // nodes
    count = _same_on_every_node(per_node)
    if count is None or count * nodes != world_size:
        raise ValueError(
            f"SLURM_NTASKS={world_size} is not {nodes} nodes x {per_node} tasks per node; "
            "start one task per device on every node (--nodes, --ntasks-per-node)"
        )
    return count


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process; the shell of a job has variables of Slurm too."""
    if "SLURM_PROCID" not in environ:
        return False
    if "SLURM_STEP_ID" not in environ:  # a batch script is no step; a container may hide a step's
        return environ.get("ENVIRONMENT") != "BATCH"
    return _integer(environ, "SLURM_STEP_ID") < SLURM_FIRST_SPECIAL_STEP


def _check_slurm_devices(environ: Mapping[str, str], per_node: int) -> None:
    devices = environ.get("SLURM_GPUS_ON_NODE")
    if devices and devices.isdigit() and int(devices) not in (0, per_node):
        if "SLURM_GPUS_PER_TASK" in environ:
            return
        raise ValueError(
            f"{per_node} tasks on this node but SLURM_GPUS_ON_NODE={devices} GPUs; start one "
            f"task per GPU (--ntasks-per-node={devices})"
        )


def launch_environment(environ: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Read rank and rendezvous from the environment of torchrun, srun or neither.

    Raises:
        ValueError: when the variables contradict each other.
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank, world = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
        env = LaunchEnvironment(
            rank,
            world,
            _integer(environ, "LOCAL_RANK", rank),
            _integer(environ, "LOCAL_WORLD_SIZE", world),
            environ.get("MASTER_ADDR", "127.0.0.1"),
            _integer(environ, "MASTER_PORT", 29500),
            "torchrun",
        )
    elif _is_slurm_task(environ):
        world = _integer(environ, "SLURM_NTASKS")
        per_node = _slurm_ranks_per_node(environ, world)
        _check_slurm_devices(environ, per_node)
        # Rank 0 is on the first node of the step, which may be a part of the job.
        lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        nodes = next((environ[name] for name in lists if environ.get(name)), "")
        port = _integer(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else None
        env = LaunchEnvironment(
            _integer(environ, "SLURM_PROCID"),
            world,
            _integer(environ, "SLURM_LOCALID", 0),
            per_node,
            environ.get("MASTER_ADDR") or first_host(nodes),
            port
            or slurm_port(_integer(environ, "SLURM_JOB_ID"), _integer(environ, "SLURM_STEP_ID", 0)),
            "slurm",
        )
    else:
        _check_alone(environ)
        env = LaunchEnvironment(0, 1, 0, 1, "127.0.0.1", 0, "single")
    if env.launcher != "torchrun":
        _check_no_mpi(environ, env.world_size)
    _check(env)
    return env


def _check_alone(environ: Mapping[str, str]) -> None:
    """With one of RANK and WORLD_SIZE, each process would train alone, all of them as rank 0."""
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name in environ and (name, environ[name]) != ("WORLD_SIZE", "1"):
            raise ValueError(
                f"{name}={environ[name]} is set without {other}; set both (torchrun does), or "
                "neither for one process"
            )


def _check_no_mpi(environ: Mapping[str, str], world_size: int) -> None:
    """Processes of ``mpirun`` would each be rank 0 of 1, or several of them the same rank."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):  # srun sets the second too, to its tasks
        if name in environ and _integer(environ, name) != world_size:
            raise ValueError(
                f"{name}={environ[name]}: mpirun started this process, but its variables aren't "
                f"read and the world would be of {world_size}; start with torchrun or srun, or set "
                "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            )


def _check(env: LaunchEnvironment) -> None:
    if env.world_size < 1:
        raise ValueError(
            f"WORLD_SIZE={env.world_size} must be at least 1; unset it for one process"
        )
    if not 0 <= env.rank < env.world_size:
        raise ValueError(
            f"rank {env.rank} must lie in 0..{env.world_size - 1} (world size {env.world_size}); "
            "ranks count from 0"
        )
    if not 0 <= env.local_rank < env.ranks_per_node:
        raise ValueError(
            f"local rank {env.local_rank} must lie in 0..{env.ranks_per_node - 1} (ranks of this "
            f"node: {env.ranks_per_node}); LOCAL_RANK and LOCAL_WORLD_SIZE, or the SLURM_* of "
            "tasks, contradict each other"
        )
    if not env.master_addr:
        raise ValueError("MASTER_ADDR is empty; give the host of rank 0")
    if not (env.launcher == "single" or 1 <= env.master_port <= 65535):
        raise ValueError(f"MASTER_PORT={env.master_port} must lie in 1..65535; choose a free port")
