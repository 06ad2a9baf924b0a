"""Optimizers of plain tensors over sharded parameters: as torch's, in steps and over resumes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megatron.core.optimizer.local_views import LocalViews
from megatron.training.checkpointing import ensure_optimizer_state, set_optimizer_step
from tests.optimizer.stand_in import FusedAdam, FusedSGD, installed
from tests.utils.jobs import TINY, metrics_of, run_job
from tests.utils.ranks import run_ranks

ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2, bias=False))  # 2 rows on 3 ranks
    fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
    return model


def _optimizer(model: nn.Module, kind: str, views: bool) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    if kind == "adam":
        if not views:
            return torch.optim.AdamW(groups, **ADAM)
        return LocalViews(lambda g: FusedAdam(g, adam_w_mode=True, **ADAM), groups)
    options = {"lr": 1e-2, "momentum": 0.9}
    if not views:
        return torch.optim.SGD(groups, **options)
    return LocalViews(lambda g: FusedSGD(g, **options), groups)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        model(torch.full((1, 6), step + 1.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _whole(values: Any) -> list[torch.Tensor]:
    return [value.full_tensor() if isinstance(value, DTensor) else value for value in values]


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    names = ("exp_avg", "exp_avg_sq", "momentum_buffer")
    states = [optimizer.state[p] for p in model.parameters()]
    return _whole(state[name] for state in states for name in names if state.get(name) is not None)


def steps_and_a_resume(rank: int, world: int, kind: str) -> None:
    expected, model = _model(), _model()
    plain, views = _optimizer(expected, kind, False), _optimizer(model, kind, True)
    _train(expected, plain, range(4))
    _train(model, views, range(2))
    for state in views.state.values():
        assert all(isinstance(value, DTensor) for value in state.values())
    # A fresh optimizer goes on with the moments and the count, as after loading a checkpoint.
    ensure_optimizer_state(views)  # of empty shards
    resumed = _optimizer(model, kind, True)
    ensure_optimizer_state(resumed)
    for p in model.parameters():
        for name, value in views.state[p].items():
            if name != "step":
                resumed.state[p][name].copy_(value)
    set_optimizer_step(resumed, 2)
    _train(model, resumed, range(2, 4))
    ensure_optimizer_state(plain), ensure_optimizer_state(resumed)
    pairs = list(zip(_whole(model.parameters()), _whole(expected.parameters())))
    pairs += list(zip(_moments(model, resumed), _moments(expected, plain), strict=True))
    assert len(pairs) == (9 if kind == "adam" else 6)
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_views_of_shards_step_as_torch_does(kind: str) -> None:
    run_ranks(3, steps_and_a_resume, kind)


def test_a_job_on_all_axes_trains_saves_and_resumes(tmp_path: Path) -> None:
    """apex's class, over tensor, context, pipeline and data ranks, then torch's on one rank."""
    axes = [
        "--tensor-model-parallel-size=2",
        "--pipeline-model-parallel-size=2",
        "--context-parallel-size=2",
        "--use-distributed-optimizer",
    ]
    places = [f"--save={tmp_path}/c", f"--load={tmp_path}/c"]

    def losses(world: int, *more: str, **job: Any) -> list[tuple[float, float]]:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        flags = [*TINY, "--seed=7", f"--metrics-file={file}", *more]
        run_job(world, flags, timeout=120, **job).check()
        return [(record["lm_loss"], record["grad_norm"]) for record in metrics_of(file)]

    apex = "--optimizer-impl=apex"
    expected = losses(1)
    got = losses(8, *axes, *places, apex, "--exit-interval=2", hook=installed)
    got += losses(8, *axes, *places, apex, "--exit-interval=3", hook=installed)
    got += losses(1, *places)
    for found, wanted in zip(got, expected, strict=True):
        assert found == pytest.approx(wanted, rel=2e-5)


def test_bf16_keeps_float32_weights_that_are_updated(tmp_path: Path) -> None:
    found = []
    for more, hook in (([], None), (["--optimizer-impl=apex"], installed)):
        file = tmp_path / f"{len(found)}.jsonl"
        flags = [*TINY, "--bf16", "--use-distributed-optimizer", f"--metrics-file={file}", *more]
        job = {} if hook is None else {"hook": hook}
        run_job(2, flags, timeout=60, **job).check()
        found.append([record["lm_loss"] for record in metrics_of(file)])
    # Updates differ in the last bit, which may be another bf16 weight.
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0][-1] < found[0][0]
