"""The RoPE rules as plain arithmetic in double precision: one function a rule.

RoPE turns the pair (2i, 2i+1) of a head by ``position * inv_freq[i]``, with
``inv_freq[i] = theta ** (-2i/d)`` (Su et al., RoFormer, arXiv 2104.09864, eq. 15). Each rule
for longer contexts gives other ``inv_freq``, and some multiply cos and sin by a factor:

======== ======================================================================================
default  the formula above; a larger theta ("base change") is this rule too
linear   every frequency divided by the factor (position interpolation, arXiv 2306.15595)
ntk      theta times ``factor ** (d/(d-2))`` (NTK-aware: lowest frequency as in linear, the
         highest unchanged)
dynamic  ntk with a factor that follows the sequence length
yarn     per frequency between linear and unchanged; cos and sin scaled (arXiv 2309.00071)
llama3   long waves divided, short ones kept, smooth between (Llama 3.1 reference code)
longrope a searched factor for each frequency; cos and sin scaled (arXiv 2402.13753)
======== ======================================================================================

Each function takes the rotated dimension ``dim``, ``theta`` and a mapping made by
``rope_scaling.read_scaling``, and returns ``dim/2`` frequencies and the factor of cos and sin.
Cost: microseconds. Positions, angles and tables are not made here.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

Frequencies = tuple[list[float], float]


def _plain(dim: int, theta: float) -> list[float]:
    return [theta ** (-(2 * pair) / dim) for pair in range(dim // 2)]


def _original_length(scaling: Mapping[str, Any]) -> int:
    original = scaling.get("original_max_position_embeddings")
    return int(original if original is not None else scaling["max_position_embeddings"])


def _factor(scaling: Mapping[str, Any]) -> float:
    """The given factor, else new length / old length; 1 when only one length is known."""
    if "factor" in scaling:
        return float(scaling["factor"])
    original = _original_length(scaling)
    return float(scaling.get("max_position_embeddings", original) / original)


def ntk_theta(dim: int, theta: float, factor: float) -> float:
    """theta of NTK-aware scaling: the lowest frequency becomes ``factor`` times slower.

    ``theta' ** (-(d-2)/d) = theta ** (-(d-2)/d) / factor`` gives
    ``theta' = theta * factor ** (d/(d-2))``.

    Raises:
        ValueError: for a rotated dimension of 2, whose one frequency is 1 for every theta.
    """
    if dim <= 2:
        raise ValueError(
            f"NTK-aware scaling needs a rotated dimension of at least 4, not {dim}; "
            "use rope_type linear"
        )
    return float(theta * factor ** (dim / (dim - 2)))


def _default(dim: int, theta: float, _: Mapping[str, Any], __: int | None) -> Frequencies:
    return _plain(dim, theta), 1.0


def _linear(dim: int, theta: float, scaling: Mapping[str, Any], _: int | None) -> Frequencies:
    return [frequency / scaling["factor"] for frequency in _plain(dim, theta)], 1.0


def _ntk(dim: int, theta: float, scaling: Mapping[str, Any], _: int | None) -> Frequencies:
    return _plain(dim, ntk_theta(dim, theta, scaling["factor"])), 1.0


def _dynamic(
    dim: int, theta: float, scaling: Mapping[str, Any], seq_length: int | None
) -> Frequencies:
    original, factor = _original_length(scaling), scaling["factor"]
    length = max(seq_length or original, original)
    stretch = factor * length / original - (factor - 1)
    return _plain(dim, ntk_theta(dim, theta, stretch)), 1.0


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """``0.1 ln(s) + 1`` (YaRN eq. 22), or DeepSeek's ratio of two such terms."""
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])

    def term(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if numerator and denominator:
        return term(numerator) / term(denominator)
    return term(1.0)


def _yarn_range(dim: int, theta: float, scaling: Mapping[str, Any]) -> tuple[float, float]:
    """Pairs between which YaRN goes from unchanged (beta_fast turns) to divided (beta_slow)."""

    def pair_of(turns: float) -> float:
        length = _original_length(scaling)
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_of(scaling.get("beta_fast", 32.0))
    high = pair_of(scaling.get("beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn(dim: int, theta: float, scaling: Mapping[str, Any], _: int | None) -> Frequencies:
    factor = _factor(scaling)
    low, high = _yarn_range(dim, theta, scaling)
    frequencies = []
    for pair, frequency in enumerate(_plain(dim, theta)):
        divided = min(max((pair - low) / (high - low), 0.0), 1.0)
        frequencies.append(frequency / factor * divided + frequency * (1 - divided))
    return frequencies, _yarn_attention_factor(scaling, factor)


def _llama3(dim: int, theta: float, scaling: Mapping[str, Any], _: int | None) -> Frequencies:
    factor, original = scaling["factor"], _original_length(scaling)
    low, high = scaling.get("low_freq_factor", 1.0), scaling.get("high_freq_factor", 4.0)
    frequencies = []
    for frequency in _plain(dim, theta):
        turns = original * frequency / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        frequencies.append(frequency / factor * (1 - kept) + frequency * kept)
    return frequencies, 1.0


def _longrope(
    dim: int, theta: float, scaling: Mapping[str, Any], seq_length: int | None
) -> Frequencies:
    original = _original_length(scaling)
    for name in ("long_factor", "short_factor"):
        if len(scaling[name]) != dim // 2:  # the one not used now may be in a later stage
            raise ValueError(
                f"rope_scaling: {name} has {len(scaling[name])} factors; it must have one for each "
                f"of the {dim // 2} rotated pairs"
            )
    factors = scaling["long_factor" if seq_length and seq_length > original else "short_factor"]
    frequencies = [
        frequency / factor for frequency, factor in zip(_plain(dim, theta), factors, strict=True)
    ]
    if "attention_factor" in scaling:
        return frequencies, float(scaling["attention_factor"])
    factor = _factor(scaling)
    if factor <= 1:
        return frequencies, 1.0
    return frequencies, math.sqrt(1 + math.log(factor) / math.log(original))


_RULES: dict[str, Callable[[int, float, Mapping[str, Any], int | None], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


def frequencies(
    dim: int, theta: float, scaling: Mapping[str, Any], seq_length: int | None
) -> Frequencies:
    """``dim/2`` inverse frequencies and the factor of cos and sin, by ``scaling``'s rule.

    Args:
        dim: rotated dimension of a head, even.
        theta: RoPE base, > 1.
        scaling: a mapping made by ``rope_scaling.read_scaling``.
        seq_length: tokens of a row; ``dynamic`` and ``longrope`` depend on it.
    """
    return _RULES[scaling["rope_type"]](dim, theta, scaling, seq_length)
