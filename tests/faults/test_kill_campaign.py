"""A few trials of the kill campaign, with a printed seed; ``kill_campaign.py`` runs more."""

import os
import random

import pytest

from tests.faults.kill_campaign import run_campaign

SEED = int(os.environ.get("TEST_SEED", random.SystemRandom().randrange(10**6)))


@pytest.mark.timeout(900)
def test_some_trials() -> None:
    print(f"TEST_SEED={SEED}")
    assert run_campaign(10, SEED) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_trials() -> None:
    assert run_campaign(100, SEED) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_trials_under_torchrun() -> None:
    assert run_campaign(5, SEED, launcher="torchrun") == []
