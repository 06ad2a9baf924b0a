"""``rope_inv_freq``: the frequencies that a stage's RoPE tables are made from.

The result is float64, and the angles ``position * inv_freq`` must be made in float64 too:
a float32 angle is wrong by up to 0.06 rad at position 1M. cos and sin may then be rounded.
The frequencies are never saved in a checkpoint: they follow from the configuration.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.core.config.values import read_float
from megatron.core.context_extension import rope_rules
from megatron.core.context_extension.rope_scaling import read_scaling

if TYPE_CHECKING:
    import torch


def rotary_dim(head_dim: int, rotary_percent: float = 1.0) -> int:
    """Dimension of a head that RoPE turns: ``int(head_dim * rotary_percent)``, which must be even.

    Raises:
        ValueError: if it is odd or 0, or ``rotary_percent`` isn't in (0, 1].
    """
    if not 0 < rotary_percent <= 1:
        raise ValueError(f"--rotary-percent {rotary_percent} must be in (0, 1]")
    if head_dim < 2:
        raise ValueError(f"head dimension {head_dim} must be at least 2: RoPE turns pairs")
    dim = int(head_dim * rotary_percent)
    if dim < 2 or dim % 2:
        raise ValueError(
            f"--rotary-percent {rotary_percent} of head dimension {head_dim} rotates {dim} "
            "dimensions; RoPE turns pairs, so it must be even and at least 2; use "
            f"--rotary-percent {max(2, dim - dim % 2) / head_dim:g}"
        )
    return dim


def rope_frequencies(
    head_dim: int,
    rotary_base: float,
    scaling: Mapping[str, Any] | None = None,
    seq_length: int | None = None,
) -> tuple[list[float], float]:
    """:func:`rope_inv_freq` as a list of Python floats, without torch: for checks before start.

    Raises:
        ValueError: for a base, a mapping or a dimension that :func:`rope_inv_freq` refuses.
    """
    theta = read_float(rotary_base)
    if not theta > 1:
        raise ValueError(f"--rotary-base {rotary_base} must be greater than 1; usual is 10000")
    read = read_scaling(scaling)
    if read.get("rope_theta", theta) != theta:
        raise ValueError(
            f"rope_scaling: rope_theta {read['rope_theta']:g} contradicts the rotary base "
            f"{theta:g}; remove one or make them equal"
        )
    dim = rotary_dim(head_dim, read.get("partial_rotary_factor", 1.0))
    return rope_rules.frequencies(dim, theta, read, seq_length)


def rope_inv_freq(
    head_dim: int,
    rotary_base: float,
    scaling: Mapping[str, Any] | None = None,
    seq_length: int | None = None,
) -> "tuple[torch.Tensor, float]":
    """Inverse frequencies of RoPE and the factor that multiplies both cos and sin.

    Args:
        head_dim: dimension of a head (its rotated part, when only a part is rotated).
        rotary_base: theta.
        scaling: Hugging Face's ``rope_scaling`` mapping: ``rope_type`` one of ``default,
            linear, ntk, dynamic, yarn, llama3, longrope`` and the rule's keys. With
            ``partial_rotary_factor`` p only ``int(p * head_dim)`` dimensions are rotated.
        seq_length: tokens of a row; ``dynamic`` and ``longrope`` depend on it (None: the
            original length).

    Returns:
        (float64 CPU tensor [head_dim/2], attention factor).

    Raises:
        ValueError: for an odd dimension, a theta not above 1, or a mapping that is wrong.
    """
    import torch

    frequencies, factor = rope_frequencies(head_dim, rotary_base, scaling, seq_length)
    return torch.tensor(frequencies, dtype=torch.float64), factor
