"""Plans reach a GPU by copies that the host doesn't wait for."""

import numpy as np
import pytest
import torch

from megatron.core.context_parallel.placing import on_device


def test_on_the_cpu_nothing_is_copied() -> None:
    values = np.arange(5)
    placed = on_device(values, torch.device("cpu"))
    assert placed.tolist() == [0, 1, 2, 3, 4]
    assert placed.data_ptr() == values.ctypes.data


@pytest.mark.parametrize("values", [np.arange(3), torch.arange(3)])
def test_a_gpu_is_given_pinned_memory_and_not_waited_for(
    values: np.ndarray | torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        made.append("pinned")
        return tensor

    def to(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        made.append((device, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    gpu = torch.device("cuda", 1)
    assert on_device(values, gpu).tolist() == [0, 1, 2]
    assert made == ["pinned", (gpu, True)]
