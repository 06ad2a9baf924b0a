"""What the Python side of apex's and Transformer Engine's fused classes does, on plain tensors."""

import types
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class FusedAdam(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, algorithm 2) that counts steps in its groups."""

    def __init__(self, params: Any, lr: float, betas: Any, eps: float, adam_w_mode: bool) -> None:
        assert adam_w_mode
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": 0.0})

    def zero_grad(self) -> None:  # type: ignore[override]
        """As apex's: without an argument."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Refuses what a kernel can't take."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                for tensor in (parameter, parameter.grad):
                    assert not isinstance(tensor, DTensor) and tensor.numel()
                if not self.state[parameter]:
                    self.state[parameter] = {
                        "exp_avg": torch.zeros_like(parameter).float(),
                        "exp_avg_sq": torch.zeros_like(parameter).float(),
                    }
                self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, gradient, (beta1, beta2) = self.state[parameter], parameter.grad, group["betas"]
        if parameter.is_cuda:
            return  # of a fake tensor: counted only
        assert gradient is not None
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        corrected = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt_() + group["eps"]
        rate = group["lr"] / (1 - beta1 ** group["step"])
        parameter.addcdiv_(state["exp_avg"], corrected, value=-rate)


class FusedSGD(torch.optim.SGD):
    """Momentum as torch's; refuses what a kernel can't take."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """As torch's."""
        for group in self.param_groups:
            for parameter in group["params"]:
                assert not isinstance(parameter, DTensor)
        super().step()


MODULE = types.SimpleNamespace(FusedAdam=FusedAdam, FusedSGD=FusedSGD)


def installed(rank: int) -> None:
    """A job's hook: apex is there, and its kernels take tensors of the CPU."""
    from megatron.core.optimizer import apex_adapter, external

    apex_adapter.probe = lambda: MODULE  # type: ignore[assignment]
    external.DEVICES = ("cpu",)
