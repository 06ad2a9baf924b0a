"""Which device a rank takes, and what a GPU asks of a run's start and end."""

import dataclasses
import os
import resource
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.config import RunConfig
from megatron.training import initialize
from megatron.training.initialize import (
    OPEN_FILES,
    RendezvousError,
    initialize_distributed,
    leave_groups,
    pick_device,
    raise_file_limit,
    set_determinism,
)
from megatron.training.launch_env import LaunchEnvironment

GPU = torch.device("cuda", 0)


def env(local_rank: int = 0) -> LaunchEnvironment:
    return LaunchEnvironment(local_rank, 4, local_rank, 4, "127.0.0.1", 0, "single")


def config(section: str, **changes: Any) -> RunConfig:
    plain = RunConfig()
    changed = dataclasses.replace(getattr(plain, section), **changes)
    return dataclasses.replace(plain, **{section: changed})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A machine of eight GPUs; notes those that are taken, and the backends of groups."""
    taken: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: taken.append(backend))
    return taken


@pytest.mark.parametrize(("visible", "index"), [(8, 3), (4, 3), (1, 0)])
def test_a_rank_takes_its_own_gpu(
    gpus: list[Any], visible: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all that it sees, or the one that Slurm shows to each task alone."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert pick_device(env(3)) == torch.device("cuda", index)
    assert gpus == [index]


def test_more_ranks_than_gpus_are_refused(gpus: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RendezvousError, match="local rank 3 has no GPU: this node shows 2"):
        pick_device(env(3))


def test_the_gpu_is_taken_before_the_groups_are_made(gpus: list[Any]) -> None:
    assert initialize_distributed(env(2), RunConfig()) == torch.device("cuda", 2)
    assert gpus == [2, "cpu:gloo,cuda:nccl"]


def test_gloo_trains_on_the_cpu_of_a_machine_with_gpus(gpus: list[Any]) -> None:
    chosen = config("parallel", distributed_backend="gloo")
    assert initialize_distributed(env(2), chosen) == torch.device("cpu")
    assert gpus == ["gloo"]


def test_a_gpu_compares_bits_in_deterministic_mode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    set_determinism(config("training", rerun_check_interval=5), torch.device("cpu"))
    with pytest.raises(ValueError, match="--rerun-check-interval 5 .* add --deterministic-mode"):
        set_determinism(config("training", rerun_check_interval=5), GPU)
    assert not asked and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    chosen = config("training", rerun_check_interval=5, deterministic_mode=True)
    set_determinism(chosen, GPU)
    assert asked == [True] and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"),
    [
        (1024, 4096, 4096),
        (1024, resource.RLIM_INFINITY, OPEN_FILES),
        (1024, 1024, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
        (1 << 20, 1 << 20, None),
    ],
)
def test_files_for_the_connections_of_many_ranks(
    soft: int, hard: int, wanted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    raise_file_limit()
    assert given == ([] if wanted is None else [(wanted, hard)])


@pytest.mark.parametrize(
    ("device", "failed", "taken_apart"),
    [("cpu", False, True), ("cpu", True, True), ("cuda", False, True), ("cuda", True, False)],
)
def test_a_failed_run_does_not_wait_for_nccl(
    device: str, failed: bool, taken_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    destroyed: list[bool] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(initialize, "group_device", lambda: torch.device(device))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(True))
    leave_groups(failed=failed)
    assert bool(destroyed) is taken_apart
