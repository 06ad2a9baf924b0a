"""Activation recompute: what is kept, what is computed again, and which layers it covers.

``full``, a span of layers (``checkpointed``)::

    forward:   x --[norm, qkv, rope]--[attention]--[proj, mlp]--> y      nothing inside is saved
    kept:      x                       out, lse
    backward:  x --[norm, qkv, rope]--[ the kept out ]--[proj, mlp]      then ordinary backward

Attention's ``out`` and ``lse`` stay in a ``KeptAttention`` cell that is made once per call,
outside the checkpoint: the recomputed forward finds it filled and runs no attention kernel, no
ring step and no exchange. (A plain checkpoint and torch's selective policy both enter the
function's forward a second time.) ``recompute_attention`` leaves the cell out: less memory,
attention twice.

``selective``: ``mlp`` checkpoints the MLP; ``layernorm`` lets the output of the norms go and
rebuilds it from the norm's input when a linear layer's backward asks for it
(``rebuilt_in_backward``); ``core_attn`` is what the attention kernels always do (they save q, k,
v, out, lse and no scores).

Kept per local token and layer with ``full``: hidden + heads * head_dim numbers and heads fp32 for
lse. Costs one forward without attention. Tensor-parallel collectives do run again.

Dropout needs no saved generator: its masks are a function of a key (``tensor_parallel``).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from megatron.core.config import ModelConfig

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive layers of one pipeline stage, by local index: ``range(start, stop)``."""

    start: int
    stop: int
    recompute: bool


def recompute_spans(num_layers: int, config: ModelConfig) -> list[Span]:
    """How ``full`` recompute divides a stage's layers, as Megatron's methods do.

    ``uniform``: spans of ``recompute_num_layers`` layers, each keeping its first input alone.
    ``block``: the first ``recompute_num_layers`` layers one by one, the others not at all.
    Without a method: every layer one by one.

    Raises:
        ValueError: for a number of layers below 1.
    """
    each = config.recompute_num_layers
    if each is not None and each < 1:
        raise ValueError(f"--recompute-num-layers {each} must be at least 1")
    if config.recompute_granularity != "full":
        return [Span(i, i + 1, recompute=False) for i in range(num_layers)]
    if config.recompute_method == "block":
        covered = 1 if each is None else each
        return [Span(i, i + 1, recompute=i < covered) for i in range(num_layers)]
    step = 1 if each is None or config.recompute_method is None else each
    starts = range(0, num_layers, step)
    return [Span(i, min(i + step, num_layers), recompute=True) for i in starts]


def recomputes(config: ModelConfig, module: str) -> bool:
    """Whether ``selective`` recompute covers ``module`` (core_attn, mlp or layernorm)."""
    return config.recompute_granularity == "selective" and module in config.recompute_modules


def checkpointed(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """``function(*args)`` that saves its arguments alone and runs again in backward.

    Without gradients it is an ordinary call.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


class _Rebuilt:
    """A tensor that several saved views refer to; made again once for all of them."""

    def __init__(self, rebuild: Callable[[], torch.Tensor]) -> None:
        self.rebuild = rebuild
        self.views = 0
        self.served = 0
        self.tensor: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        if self.tensor is None:
            with torch.no_grad():
                self.tensor = self.rebuild()
        tensor = self.tensor
        self.served += 1
        if self.served % self.views == 0:  # every view had it: let it go
            self.tensor = None
        return tensor


@dataclasses.dataclass(frozen=True)
class _View:
    source: _Rebuilt
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextlib.contextmanager
def rebuilt_in_backward(
    tensor: torch.Tensor, rebuild: Callable[[], torch.Tensor]
) -> Iterator[None]:
    """Operations inside save a note in place of ``tensor`` (or a view of it).

    ``rebuild()`` must return the same values with the same strides; it is called in backward,
    without gradients, once for all operations that saved it. Not for use inside a checkpoint:
    torch applies the innermost hooks only, so these would keep what the checkpoint drops.
    """
    source = _Rebuilt(rebuild)
    storage = tensor.untyped_storage()._cdata

    def pack(saved: torch.Tensor) -> torch.Tensor | _View:
        if saved.untyped_storage()._cdata != storage:
            return saved.detach()  # itself would be a cycle where an operation saves its output
        source.views += 1
        return _View(source, saved.size(), saved.stride(), int(saved.storage_offset()))

    def unpack(packed: torch.Tensor | _View) -> torch.Tensor:
        if isinstance(packed, _View):
            return packed.source.get().as_strided(packed.size, packed.stride, packed.offset)
        return packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def after_norm(
    norm: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    use: Callable[[torch.Tensor], Result],
    *,
    discard: bool,
) -> Result:
    """``use(norm(x))``; with ``discard`` what ``use`` saves of the norm is rebuilt from x."""
    y = norm(x)
    if not discard or not torch.is_grad_enabled():
        return use(y)
    source = x.detach()
    with rebuilt_in_backward(y, lambda: norm(source)):
        return use(y)
