"""Buffers that are used over and over: over ring steps, layers, micro-batches and iterations.

A fresh large buffer costs page faults or allocator traffic at every layer. A workspace keeps one
flat buffer per (name, type, device), grown when needed, and hands out views. A view is valid
until the same name is asked for again, so names are per role, and a transfer must be over before
its role comes round (the ring alternates two). Tensors that autograd saves or that callers get
are never taken from here.

Small results of planning are kept as well, so equal packings (all dense rows) are planned once.
"""

import collections
import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


class Workspace:
    """Reusable buffers and recent plans of one process; hand the same one to every plan.

    Not for use from several threads at once.
    """

    def __init__(self, recent_plans: int = 8) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._plans: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
        self._recent_plans = recent_plans

    def get(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """An uninitialised contiguous tensor; earlier views of the same name become invalid."""
        size = math.prod(shape)
        key = (name, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=dtype, device=device)
            self._buffers[key] = buffer
        return buffer[:size].view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def clear(self) -> None:
        """Give all buffers back, for instance at a stage with longer rows."""
        self._buffers.clear()
        self._plans.clear()

    def plan(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """A recent result for ``key``, or a new one."""
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key]
        made = make()
        self._plans[key] = made
        while len(self._plans) > self._recent_plans:
            self._plans.popitem(last=False)
        return made
