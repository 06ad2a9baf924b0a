"""Longer contexts in one run: RoPE rules, proposals for theta, and the schedule of stages."""

from megatron.core.context_extension.rope import rope_frequencies, rope_inv_freq, rotary_dim

__all__ = ["rope_frequencies", "rope_inv_freq", "rotary_dim"]
