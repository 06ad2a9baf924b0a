"""Arrays made on the host, brought to the device without waiting for it.

A plan is made while the device computes the micro-batch before. Copying from ordinary host memory
to a GPU would make the host wait until all of that is done, and the GPU then waits for the host; a
copy from pinned memory is only queued. torch keeps the pinned memory until the copy is over.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def on_device(values: np.ndarray[Any, Any] | Tensor, device: torch.device) -> Tensor:
    """``values`` of the host as a tensor on ``device``."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
