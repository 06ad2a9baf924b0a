"""``suggest_theta``: proposals for the RoPE base of a longer context, each with its source.

Three kinds, side by side, because none of them is a law:

* the NTK-aware formula, ``theta * s ** (d/(d-2))`` for a context ``s`` times longer: the slowest
  pair turns as far over the new length as it did over the old one;
* the published fit of the smallest base that still retrieves over a length,
  ``0.0424 * L ** 1.628`` (Men et al., Base of RoPE Bounds Context Length, arXiv 2405.14591,
  figure 1);
* what published long-context models used at the nearest length that is at least as long.

Pure arithmetic; it doesn't choose for you and no other part of the framework calls it.
"""

import dataclasses

from megatron.core.context_extension.rope_rules import ntk_theta


@dataclasses.dataclass(frozen=True)
class Published:
    """A model that was trained at ``length`` tokens with RoPE base ``theta``."""

    model: str
    length: int
    theta: float
    source: str


PUBLISHED = (
    Published("Llama 3", 8192, 5e5, "arXiv 2407.21783, and its published config"),
    Published("Code Llama", 16384, 1e6, "arXiv 2308.12950, section 2.4"),
    Published("ProLong 64K", 65536, 8e6, "arXiv 2410.02660, train_64K.sh of its repository"),
    Published(
        "Large World Model 128K",
        131072,
        1e7,
        "arXiv 2402.08268, run_eval_needle.sh of its repository",
    ),
    Published("Qwen2.5-1M", 262144, 1e7, "arXiv 2501.15383"),
    Published("ProLong 512K", 524288, 1.28e8, "arXiv 2410.02660, train_512K.sh of its repository"),
    Published("Large World Model 1M", 1048576, 5e7, "arXiv 2402.08268"),
)
"""Sorted by length. The length is the one trained at; some retrieve over longer contexts. Llama 3
kept its theta up to 128K and scaled frequencies instead."""


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """Proposals for one target length."""

    target_length: int
    ntk_aware: float
    """theta by the NTK-aware formula."""
    lower_bound: float
    """The fitted smallest base for the target length."""
    published: tuple[Published, ...]
    """Models trained at the smallest published length >= the target (the longest, beyond all)."""

    def __str__(self) -> str:
        lines = [
            f"RoPE base for {self.target_length:,} tokens:",
            f"  {self.ntk_aware:.3g}  NTK-aware formula",
            f"  {self.lower_bound:.3g}  fitted lower bound (arXiv 2405.14591)",
        ]
        lines += [
            f"  {entry.theta:.3g}  {entry.model}, {entry.length:,} tokens ({entry.source})"
            for entry in self.published
        ]
        return "\n".join(lines)


def suggest_theta(
    target_length: int, *, current_length: int, current_theta: float, head_dim: int
) -> Suggestion:
    """Proposals for the RoPE base when the context grows from ``current_length``.

    Args:
        target_length: tokens of a row after the extension.
        current_length: tokens of a row before it.
        current_theta: RoPE base before it.
        head_dim: rotated dimension of a head.

    Raises:
        ValueError: if the target is not longer than the current length.
    """
    if not 0 < current_length < target_length:
        raise ValueError(
            f"target length {target_length} must be longer than the current length "
            f"{current_length}; a shorter context needs no other theta"
        )
    near = min(
        (entry.length for entry in PUBLISHED if entry.length >= target_length),
        default=PUBLISHED[-1].length,
    )
    return Suggestion(
        target_length=target_length,
        ntk_aware=ntk_theta(head_dim, current_theta, target_length / current_length),
        lower_bound=0.0424 * target_length**1.628,
        published=tuple(entry for entry in PUBLISHED if entry.length == near),
    )
