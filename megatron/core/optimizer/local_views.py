"""An optimizer that takes plain tensors alone, over parameters that may be DTensors.

The fused kernels of apex and Transformer Engine know nothing of placements. AdamW and SGD work
element by element, so each rank may update its own shard as a tensor like any other: a *view* is a
plain parameter over a parameter's local storage. The optimizer inside sees views; the one outside
shows parameters, and state with their placements over the same storage, as checkpoints want it.

Cost: no copy; for each parameter and step one assignment of its gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

Groups = list[dict[str, Any]]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, sharing its storage."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class LocalViews(torch.optim.Optimizer):
    """Runs ``build(groups of views)`` for ``groups`` of parameters, plain or DTensors.

    Gradients must have the placements of their parameters. Settings of ``param_groups`` (the
    learning rate, a step count) and tensors of ``state`` may be read and set between steps.
    """

    def __init__(self, build: Callable[[Groups], torch.optim.Optimizer], groups: Groups) -> None:
        views = [[nn.Parameter(local_part(p)) for p in group["params"]] for group in groups]
        self._inner = build([{**group, "params": v} for group, v in zip(groups, views)])
        super().__init__(
            [
                {**inner, "params": group["params"]}
                for inner, group in zip(self._inner.param_groups, groups)
            ],
            {},
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        assert closure is None, "gradients are there before a step"
        pairs = []
        for outer, inner in zip(self.param_groups, self._inner.param_groups):
            inner.update({key: value for key, value in outer.items() if key != "params"})
            pairs += list(zip(outer["params"], inner["params"]))
        for parameter, view in pairs:
            self._hand_over(parameter, view)
        self._inner.step()
        for outer, inner in zip(self.param_groups, self._inner.param_groups):
            outer.update({key: value for key, value in inner.items() if key != "params"})
        for parameter, view in pairs:
            view.grad = None
            self._show_state(parameter, view)

    def _hand_over(self, parameter: nn.Parameter, view: nn.Parameter) -> None:
        """Give the view what its parameter has now: storage, gradient, state that was loaded."""
        view.data = local_part(parameter)
        grad = parameter.grad
        if isinstance(grad, DTensor):
            assert isinstance(parameter, DTensor) and grad.placements == parameter.placements
        # Kernels over many tensors need not cope with the empty shard of a small parameter.
        view.grad = None if grad is None or not view.numel() else local_part(grad)
        if not self._inner.state[view]:
            self._inner.state[view] = {
                key: local_part(value)
                for key, value in self.state[parameter].items()
                if key != "step"  # counted in the group
            }

    def _show_state(self, parameter: nn.Parameter, view: nn.Parameter) -> None:
        shown = self.state[parameter]
        for key, value in self._inner.state[view].items():
            if key not in shown and isinstance(value, torch.Tensor):
                shown[key] = _placed_like(parameter, value)


def _placed_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` as this rank's part of a tensor with the shape and placements of ``parameter``."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
