"""RMSNorm and LayerNorm with statistics in at least fp32, whatever the type of the activations.

    LayerNorm  y = (x - mean) * rstd * weight + bias        (Ba et al., arXiv 1607.06450)
    RMSNorm    y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps)   (arXiv 1910.07467)

The weights are replicated over tensor-parallel ranks. Where a rank normalizes only a part of the
activations (a sequence shard, its own heads), ``partial`` says that the weight gradient must be
summed over tp, in fp32. On the CPU its summands are fp32 too; CUDA's kernels sum over the tokens in
fp32 and give a bf16 weight its gradient in bf16.

RMSNorm on the CPU: torch has a fused forward and no fused backward (five elementwise passes).
LayerNorm's fused backward with mean 0 gives RMSNorm's dweight, and its dx but for one term:

    dx_rms = dx_layer + rstd * mean(dy * weight)

so the backward is that kernel, one matrix-vector product and one in-place update.

Cost: saves x and one (RMSNorm) or two numbers a row. It does not: fuse the residual addition.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.config import ModelConfig
from megatron.core.tensor_parallel import TensorParallel, local
from megatron.core.tensor_parallel.initialization import ONES


class RMSNorm(nn.Module):
    """Root-mean-square normalization of the last dim.

    Args:
        size: length of the last dim.
        tp: tensor-parallel context.
        name: global name of the module; its parameter is ``name.weight``.
        eps: added to the mean square.
        partial: this tp rank sees a part of the activations only.
    """

    def __init__(
        self, size: int, tp: TensorParallel, *, name: str, eps: float, partial: bool
    ) -> None:
        super().__init__()
        self.size, self.eps, self.partial = size, eps, partial
        self.weight = tp.parameter(f"{name}.weight", (size,), init=ONES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size] of the same type."""
        if x.device.type == "cpu":
            # A low-precision weight's gradient leaves the backward kernel unrounded, in fp32, and
            # is rounded once, after its sum over tp.
            stored = self.weight.dtype
            wide = torch.promote_types(stored, torch.float32)
            weight = local(self.weight, partial=self.partial, dtype=wide)
            return _RMSNormCPU.apply(x, weight, self.eps, stored)
        return F.rms_norm(x, (self.size,), local(self.weight, partial=self.partial), self.eps)

    def extra_repr(self) -> str:
        """Size and epsilon."""
        return f"{self.size}, eps={self.eps}"


class LayerNorm(nn.Module):
    """Layer normalization of the last dim, with bias. Arguments as :class:`RMSNorm`."""

    def __init__(
        self, size: int, tp: TensorParallel, *, name: str, eps: float, partial: bool
    ) -> None:
        super().__init__()
        self.size, self.eps, self.partial = size, eps, partial
        self.weight = tp.parameter(f"{name}.weight", (size,), init=ONES)
        self.bias = tp.parameter(f"{name}.bias", (size,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size] of the same type."""
        # torch's CPU kernel sums a bf16 weight's gradient over the tokens in bf16 (7 % off) and
        # rounds the statistics that backward reads; CUDA's does neither.
        widen = x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)
        dtype = torch.float32 if widen else None
        weight = local(self.weight, partial=self.partial, dtype=dtype)
        bias = local(self.bias, partial=self.partial, dtype=dtype)
        y = F.layer_norm(x.float() if widen else x, (self.size,), weight, bias, self.eps)
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        """Size and epsilon."""
        return f"{self.size}, eps={self.eps}"


def make_norm(
    config: ModelConfig, tp: TensorParallel, *, name: str, size: int, partial: bool
) -> nn.Module:
    """The norm that ``config.normalization`` names."""
    kind = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    return kind(size, tp, name=name, eps=config.norm_epsilon, partial=partial)


class _RMSNormCPU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, stored: torch.dtype
    ) -> torch.Tensor:
        # The kernel is twice as fast on a weight of x's type; back to that nothing is lost.
        y, rstd = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight.to(stored), eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, weight, rstd = ctx.saved_tensors
        dtype, wide, size = x.dtype, rstd.dtype, x.shape[-1]
        x, dy, scale = x.to(wide), grads[0].to(wide).contiguous(), weight.to(wide)
        dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
            dy, x, [size], torch.zeros_like(rstd), rstd, scale, None, [True, True, False]
        )
        mean = (dy @ (scale / size)).unsqueeze(-1)
        return dx.addcmul_(rstd, mean).to(dtype), dweight.to(weight.dtype), None, None
