"""What looks wrong in a run that goes on: a loss that jumps, a rank that is slower than others."""

import math
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

WINDOW = 100
"""Losses that a new one is compared with."""
FEWEST = 10
DEVIATIONS = 6.0
SHARE = 0.05
"""A spike is ``DEVIATIONS`` standard deviations and this share of the mean above the mean."""
SLOWNESS = 1.3
"""A rank this much above the mean busy time is named in the log ..."""
NOTICEABLE_S = 0.2
"""... if it has kept the others waiting this long since the last line."""


class LossSpikes:
    """Tells a jump of the loss from its noise; forgets what it knew at a new stage."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def reset(self) -> None:
        """Start anew: longer rows have another loss."""
        self._losses.clear()

    def look(self, loss: float) -> str | None:
        """Note a loss; a text if it is far above the last ones."""
        if not math.isfinite(loss):
            return None
        text = None
        if len(self._losses) >= FEWEST:
            mean = sum(self._losses) / len(self._losses)
            variance = sum((value - mean) ** 2 for value in self._losses) / len(self._losses)
            if loss > mean + max(DEVIATIONS * math.sqrt(variance), SHARE * abs(mean)):
                text = (
                    f"loss spike: {loss:.4f} after a mean of {mean:.4f} (standard deviation "
                    f"{math.sqrt(variance):.4f}) over {len(self._losses)} steps"
                )
        self._losses.append(loss)
        return text


def step_time_spread(busy_seconds: float, steps: int) -> dict[str, Any]:
    """Busy time per step over ranks (waits for other ranks left out), and the slowest. Collective.

    In step with the others, a slow rank is the one that never waits.
    """
    mine = torch.tensor([busy_seconds / max(1, steps)], dtype=torch.float64)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    every = torch.cat(gathered)
    return {
        "step_time_min": float(every.min()),
        "step_time_mean": float(every.mean()),
        "step_time_max": float(every.max()),
        "slowest_rank": int(every.argmax()),
    }


def straggler(spread: dict[str, Any], steps: int) -> str | None:
    """A text if one rank works much longer than the mean."""
    mean, most = spread["step_time_mean"], spread["step_time_max"]
    if most <= SLOWNESS * mean or (most - mean) * steps < NOTICEABLE_S:
        return None
    return (
        f"slowest rank {spread['slowest_rank']}: busy {most * 1e3:.1f} ms a step, mean "
        f"{mean * 1e3:.1f} ms"
    )
