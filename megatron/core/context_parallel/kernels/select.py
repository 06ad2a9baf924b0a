"""Choosing a block kernel: by name, or by rule for ``auto``; logged once per choice."""

import functools
import logging

import torch

from megatron.core.context_parallel.kernels.base import BlockKernel
from megatron.core.context_parallel.kernels.cpu_flash import CpuFlashKernel
from megatron.core.context_parallel.kernels.cuda_flash import CudaFlashKernel
from megatron.core.context_parallel.kernels.cudnn import CudnnKernel
from megatron.core.context_parallel.kernels.reference import ReferenceKernel

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "flash", "cudnn", "reference")


def select_kernel(
    backend: str, *, dtype: torch.dtype, device: torch.device, head_dim: int, dropout_p: float
) -> BlockKernel:
    """The kernel for a backend name.

    ``auto`` takes flash where it can run (CPU: any float type; CUDA: float16 and bfloat16 with a
    head dim that is a multiple of 8 up to 256, from compute capability 8.0 on) and the reference
    elsewhere, which is slow.

    Raises:
        ValueError: for an unknown name, or a backend that cannot do what is asked.
    """
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"--attention-dropout {dropout_p} must be in [0, 1)")
    if backend not in BACKENDS:
        raise ValueError(f"--attention-backend {backend} must be one of {', '.join(BACKENDS)}")
    if backend == "reference":
        return ReferenceKernel()
    why_not = _obstacle(backend, dtype, device, head_dim, dropout_p)
    if backend == "auto":
        chosen = "flash" if why_not is None else "reference"
        _log_choice(chosen, device.type, str(dtype), head_dim, why_not)
        if why_not is not None:
            return ReferenceKernel()
    elif why_not is not None:
        raise ValueError(f"--attention-backend {backend} {why_not}; use auto or reference")
    if backend == "cudnn":
        return CudnnKernel()
    return CpuFlashKernel() if device.type == "cpu" else CudaFlashKernel()


def _obstacle(
    backend: str, dtype: torch.dtype, device: torch.device, head_dim: int, dropout_p: float
) -> str | None:
    """Why a flash-like kernel cannot run, or None."""
    name = "cudnn" if backend == "cudnn" else "flash"
    if dropout_p > 0:
        return f"has no attention dropout (--attention-dropout {dropout_p})"
    if device.type == "cpu":
        return "needs a CUDA device" if name == "cudnn" else None
    if device.type != "cuda":
        return f"does not run on {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16 on CUDA, not {dtype}"
    limit = 128 if name == "cudnn" else 256
    if head_dim % 8 or head_dim > limit:
        return f"needs a head dim that is a multiple of 8 up to {limit}, not {head_dim}"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"needs a GPU of compute capability 8.0 (Ampere) or more, not {major}.{minor}"
    return None


@functools.lru_cache(maxsize=64)
def _log_choice(
    chosen: str, device_type: str, dtype: str, head_dim: int, why_not: str | None
) -> None:
    """One log line per distinct choice."""
    reason = "" if why_not is None else f": flash {why_not}"
    logger.info(
        "attention backend auto -> %s (%s, %s, head dim %d)%s",
        chosen,
        device_type,
        dtype,
        head_dim,
        reason,
    )
