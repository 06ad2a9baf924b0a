"""AdamW and SGD against their formulas; weight-decay groups; adapters of optional packages."""

import logging
import sys
import types

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.core.config import OptimizerConfig
from megatron.core.optimizer import (
    build_optimizer,
    parameter_groups,
    set_learning_rate,
)
from megatron.training.checkpointing import set_optimizer_step
from tests.optimizer.stand_in import MODULE


class Model(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(6, dtype=dtype)
        self.linear = nn.Linear(6, 4, dtype=dtype)
        self.unused = nn.Parameter(torch.ones(3, 3, dtype=dtype), requires_grad=False)


def _adamw(weight, gradients, rates, decay, betas=(0.9, 0.95), eps=1e-8):
    """Loshchilov and Hutter, algorithm 2, decoupled decay."""
    weight, m, v = weight.double(), 0.0, 0.0
    for t, (gradient, lr) in enumerate(zip(gradients, rates), start=1):
        gradient = gradient.double()
        weight = weight * (1 - lr * decay)
        m = betas[0] * m + (1 - betas[0]) * gradient
        v = betas[1] * v + (1 - betas[1]) * gradient**2
        corrected = (v / (1 - betas[1] ** t)).sqrt() + eps
        weight = weight - lr * (m / (1 - betas[0] ** t)) / corrected
    return weight


def _sgd(weight, gradients, rates, decay, momentum=0.9):
    weight, buffer = weight.double(), None
    for gradient, lr in zip(gradients, rates):
        gradient = gradient.double() + decay * weight
        buffer = gradient if buffer is None else momentum * buffer + gradient
        weight = weight - lr * buffer
    return weight


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_steps_equal_the_formula(kind, dtype, tolerance, caplog):
    model = Model(dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = OptimizerConfig(optimizer=kind, lr=1.0, weight_decay=0.1, adam_beta2=0.95)
    with caplog.at_level(logging.INFO, logger="megatron"):
        optimizer = build_optimizer(config, model.named_parameters())
    assert f"optimizer {kind}: torch's fused kernels" in caplog.text
    rates = [1e-2, 2e-2, 5e-3, 0.0]
    gradients = {name: [] for name in before}
    generator = torch.Generator().manual_seed(1)
    for lr in rates:
        set_learning_rate(optimizer, lr)
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
                gradients[name].append(p.grad.clone())
        optimizer.step()
        optimizer.zero_grad()
    formula = {"adam": _adamw, "sgd": _sgd}[kind]
    for name, p in model.named_parameters():
        if not p.requires_grad:
            assert torch.equal(p, before[name])
            continue
        decay = 0.1 if p.ndim > 1 else 0.0
        expected = formula(before[name], gradients[name], rates, decay)
        assert p.dtype == dtype
        torch.testing.assert_close(p.double(), expected, rtol=0, atol=tolerance)
        for state in optimizer.state[p].values():
            assert state is None or state.ndim == 0 or state.dtype == dtype


def test_no_weight_decay_on_norms_and_biases():
    model = Model(torch.float32)
    groups = parameter_groups(model.named_parameters(), 0.3)
    by_decay = {group["weight_decay"]: group["params"] for group in groups}
    assert set(by_decay) == {0.3, 0.0}
    assert [p is model.linear.weight for p in by_decay[0.3]] == [True]
    assert {id(p) for p in by_decay[0.0]} == {
        id(p) for p in (model.norm.weight, model.norm.bias, model.linear.bias)
    }
    # A tied parameter that has two names is updated once.
    twice = [("a.weight", model.linear.weight), ("b.weight", model.linear.weight)]
    assert sum(len(group["params"]) for group in parameter_groups(twice, 0.1)) == 1


def _config(impl, kind="adam"):
    return OptimizerConfig(optimizer=kind, optimizer_impl=impl, lr=1e-3)


def test_absent_packages_are_refused_with_an_install_hint(monkeypatch):
    model = Model(torch.float32)
    for impl, package in (("apex", "apex"), ("te", "transformer_engine")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        monkeypatch.delitem(sys.modules, package, raising=False)
        with pytest.raises(
            ValueError, match=f"--optimizer-impl {impl}: .* is not installed; .*install"
        ):
            build_optimizer(_config(impl), model.named_parameters())


def test_the_unrelated_apex_of_pypi_is_refused_by_name(monkeypatch, tmp_path):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    with pytest.raises(ValueError, match="apex has no apex.optimizers; it is PyPI's unrelated"):
        build_optimizer(_config("apex"), Model(torch.float32).named_parameters())
    sys.modules.pop("apex", None)


def test_a_broken_transformer_engine_is_refused(monkeypatch, tmp_path):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise RuntimeError('no core')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    with pytest.raises(ValueError, match=r"can't be imported \(no core\); pip install"):
        build_optimizer(_config("te"), Model(torch.float32).named_parameters())
    sys.modules.pop("transformer_engine", None)


@pytest.mark.parametrize(
    ("impl", "name"), [("apex", "apex.optimizers"), ("te", "transformer_engine.pytorch.optimizers")]
)
def test_adapters_refuse_parameters_their_kernels_cannot_take(impl, name, monkeypatch):
    adapter = f"megatron.core.optimizer.{impl}_adapter"
    monkeypatch.setattr(f"{adapter}.probe", lambda: types.ModuleType(name))
    with pytest.raises(ValueError, match=f"--optimizer-impl {impl} updates float32 weights"):
        build_optimizer(_config(impl), Model(torch.float32).named_parameters())


def _fused(monkeypatch, dtype=torch.float32):
    """The adapter over the stand-in, on a parameter of a GPU that isn't there."""
    monkeypatch.setattr("megatron.core.optimizer.apex_adapter.probe", lambda: MODULE)
    with FakeTensorMode():
        weight = nn.Parameter(torch.zeros(4, 4, dtype=dtype, device="cuda"))
        weight.grad = torch.zeros_like(weight)
    return weight, build_optimizer(_config("apex"), [("weight", weight)])


def test_fused_optimizers_clear_gradients_and_keep_their_count_over_a_resume(monkeypatch):
    weight, optimizer = _fused(monkeypatch)
    for _ in range(3):
        optimizer.step()
    optimizer.zero_grad()
    assert weight.grad is None
    resumed = _fused(monkeypatch)[1]
    set_optimizer_step(resumed, 3)
    for each in (optimizer, resumed):
        each.step()
        assert [group["step"] for group in each.param_groups] == [4]


def test_fused_optimizers_refuse_weights_whose_state_they_would_misread(monkeypatch):
    with pytest.raises(ValueError, match="use --params-dtype float32"):
        _fused(monkeypatch, torch.bfloat16)
