"""Proposals for theta."""

import pytest

from megatron.core.context_extension import rope_inv_freq, suggest_theta
from megatron.core.context_extension.suggest import PUBLISHED


def test_the_formula_slows_the_lowest_frequency_by_the_stretch():
    proposal = suggest_theta(32768, current_length=4096, current_theta=1e4, head_dim=128)
    assert proposal.ntk_aware == pytest.approx(1e4 * 8 ** (128 / 126))
    old, _ = rope_inv_freq(128, 1e4)
    new, _ = rope_inv_freq(128, proposal.ntk_aware)
    assert (old[-1] / new[-1]).item() == pytest.approx(8)


def test_published_values_are_those_of_the_next_length_and_have_sources():
    assert [entry.length for entry in PUBLISHED] == sorted(entry.length for entry in PUBLISHED)
    assert all(entry.source.startswith("arXiv ") for entry in PUBLISHED)
    proposal = suggest_theta(2**20, current_length=4096, current_theta=1e4, head_dim=128)
    assert [entry.theta for entry in proposal.published] == [5e7]
    assert "Large World Model 1M" in str(proposal) and "NTK-aware" in str(proposal)
    beyond = suggest_theta(2**24, current_length=4096, current_theta=1e4, head_dim=128)
    assert beyond.published == proposal.published


def test_the_target_must_be_longer():
    with pytest.raises(ValueError, match="must be longer than the current length 4096"):
        suggest_theta(4096, current_length=4096, current_theta=1e4, head_dim=128)
