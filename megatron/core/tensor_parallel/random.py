"""Dropout as a pure function of a key.

A mask is drawn from a generator that is seeded by where in the run, in the model and in the
grid it is needed: (seed, iteration, micro-batch, layer, site, dp, cp, tp). So

- a recomputed layer draws the same mask without saving any random state,
- the backward pass draws it again and nothing is kept in memory for it,
- a resumed run needs no random state in its checkpoint,
- ranks that hold different tokens or heads differ, because their coordinates do; ranks that
  hold the SAME activation (tensor parallel without sequence parallelism) leave ``tp`` at 0
  and agree.

The grid's coordinates are part of the key, so another layout draws other masks: layouts are
equal only with dropout 0. Cost: one generator and one SHA-256 (about 10 us) a call; nothing
when p is 0. A CPU generator uses 32 bits of the seed (a clash only repeats a mask
elsewhere in the run, with probability 2^-32 a pair).
"""

import dataclasses
import hashlib
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class DropoutKey:
    """Where a mask is needed. ``dp``, ``cp`` (ulysses + U * ring) and ``tp`` are ranks."""

    seed: int
    iteration: int = 0
    micro_batch: int = 0
    layer: int = -1
    site: str = ""
    dp: int = 0
    cp: int = 0
    tp: int = 0

    def at(self, **changes: Any) -> "DropoutKey":
        """A copy with other fields: ``key.at(layer=3, site="mlp", tp=tp_rank)``."""
        return dataclasses.replace(self, **changes)

    def to_seed(self) -> int:
        """A 63-bit seed, the same on every machine and in every process."""
        words = "/".join(str(word) for word in dataclasses.astuple(self))
        digest = hashlib.sha256(words.encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1


def dropout_mask(shape: torch.Size, p: float, seed: int, device: torch.device) -> torch.Tensor:
    """Boolean mask, True = kept, each with probability 1 - p."""
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    mask = torch.empty(shape, dtype=torch.bool, device=device)
    return mask.bernoulli_(1.0 - p, generator=generator)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
        ctx.args = (p, seed)
        return _drop(x, p, seed)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _drop(grad, *ctx.args), None, None


def _drop(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    mask = dropout_mask(x.shape, p, seed, x.device)
    return torch.where(mask, x * (1.0 / (1.0 - p)), 0.0)


def dropout(
    x: torch.Tensor, p: float, key: DropoutKey | None, training: bool = True
) -> torch.Tensor:
    """Zero each element with probability ``p``, scale the rest by 1 / (1 - p).

    Args:
        x: any shape; the mask depends on the shape and the key, not on strides or dtype.
        key: may be None when ``p`` is 0 or ``training`` is False.

    Raises:
        ValueError: ``p`` is outside [0, 1), or ``key`` is missing where a mask is needed.
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability {p} must lie in [0, 1)")
    if p == 0.0 or not training:
        return x
    if key is None:
        raise ValueError(f"dropout with p={p} in training needs a DropoutKey; none was given")
    return _Dropout.apply(x, p, key.to_seed())
