"""What is said of a loss that jumps and of a rank that is slow, and what is let pass."""

import math

import pytest

from megatron.training.health import FEWEST, NOTICEABLE_S, SHARE, SLOWNESS, LossSpikes, straggler


def test_a_flat_loss_may_rise_by_the_share_and_no_more() -> None:
    """Without noise any rise is many standard deviations; the share of the mean decides."""
    spikes = LossSpikes()
    assert all(spikes.look(2.0) is None for _ in range(FEWEST))
    assert spikes.look(2.0 * (1 + SHARE) - 1e-6) is None
    text = spikes.look(2.0 * (1 + 2 * SHARE))
    assert text is not None and text.startswith("loss spike: 2.2000 after a mean of 2.00")


def test_a_noisy_loss_may_rise_by_six_deviations() -> None:
    """Losses 1 and 3 in turn: mean 2, standard deviation 1."""
    spikes = LossSpikes()
    for step in range(20):
        assert spikes.look(1.0 if step % 2 else 3.0) is None
    assert spikes.look(7.9) is None
    spikes.reset()
    for step in range(20):
        spikes.look(1.0 if step % 2 else 3.0)
    text = spikes.look(8.1)
    assert text is not None and "standard deviation 1.0000) over 20 steps" in text


def test_a_few_losses_say_nothing_and_a_nan_is_not_counted() -> None:
    spikes = LossSpikes()
    assert all(spikes.look(2.0) is None for _ in range(FEWEST - 1))
    assert spikes.look(math.inf) is None and spikes.look(math.nan) is None
    assert spikes.look(100.0) is None, "the tenth loss is compared with nine"
    assert spikes.look(2.0) is None, "the mean is finite"


@pytest.mark.parametrize(
    ("mean", "most", "steps", "named"),
    [
        (1.0, SLOWNESS - 0.01, 100, False),
        (1.0, SLOWNESS + 0.01, 1, True),
        (0.001, 0.002, 10, False),  # twice the mean, but 10 ms in all
        (0.001, 0.002, round(NOTICEABLE_S / 0.001) + 1, True),
    ],
)
def test_a_straggler_is_slow_by_a_factor_and_by_a_time(
    mean: float, most: float, steps: int, named: bool
) -> None:
    spread = {"step_time_mean": mean, "step_time_max": most, "slowest_rank": 3}
    text = straggler(spread, steps)
    assert (text is not None) == named
    if text is not None:
        assert text == f"slowest rank 3: busy {most * 1e3:.1f} ms a step, mean {mean * 1e3:.1f} ms"
