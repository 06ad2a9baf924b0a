"""Learning-rate values, worked out by hand or by a scheduler written as a loop."""

import math

import pytest

from megatron.core.config import OptimizerConfig
from megatron.core.optimizer import LRSchedule, lr_at, make_lr_schedule


class ReferenceScheduler:
    """Megatron-LM's stateful scheduler, advanced one step at a time (counts samples)."""

    def __init__(self, style, max_lr, min_lr, warmup, decay, wsd=0, wsd_style="exponential"):
        self.style, self.max_lr, self.min_lr = style, max_lr, min_lr
        self.batch = 16
        self.warmup, self.decay, self.wsd = warmup * 16, decay * 16, wsd * 16
        self.wsd_style = wsd_style
        self.samples = 0

    def step(self):
        self.samples += self.batch

    def rate(self):
        if self.warmup > 0 and self.samples <= self.warmup:
            return self.max_lr * float(self.samples) / float(self.warmup)
        if self.style == "constant":
            return self.max_lr
        if self.samples > self.decay:
            return self.min_lr
        if self.style == "inverse-square-root":
            warm, done = max(self.warmup, 1), max(self.samples, 1)
            return max(self.min_lr, self.max_lr * warm**0.5 / done**0.5)
        ratio = (self.samples - self.warmup) / (self.decay - self.warmup)
        delta = self.max_lr - self.min_lr
        if self.style == "linear":
            coefficient = 1.0 - ratio
        elif self.style == "cosine":
            coefficient = 0.5 * (math.cos(math.pi * ratio) + 1.0)
        else:
            start = self.decay - self.wsd
            if self.samples <= start:
                coefficient = 1.0
            else:
                ratio = float(self.samples - start) / float(self.wsd)
                coefficient = {
                    "linear": 1.0 - ratio,
                    "cosine": 0.5 * (math.cos(math.pi * ratio) + 1.0),
                    "exponential": 2.0 * math.pow(0.5, ratio) - 1.0,
                    "minus_sqrt": 1.0 - math.sqrt(ratio),
                }[self.wsd_style]
        return self.min_lr + coefficient * delta


CASES = [
    ("constant", 10, 100, 0, "exponential"),
    ("linear", 10, 100, 0, "exponential"),
    ("linear", 0, 7, 0, "exponential"),
    ("cosine", 10, 100, 0, "exponential"),
    ("cosine", 2.5, 50, 0, "exponential"),
    ("inverse-square-root", 10, 100, 0, "exponential"),
    ("WSD", 10, 100, 30, "exponential"),
    ("WSD", 10, 100, 30, "linear"),
    ("WSD", 0, 100, 100, "cosine"),
    ("WSD", 10, 100, 1, "minus_sqrt"),
]


@pytest.mark.parametrize(("style", "warmup", "decay", "wsd", "wsd_style"), CASES)
def test_rates_equal_the_stateful_scheduler(style, warmup, decay, wsd, wsd_style):
    reference = ReferenceScheduler(style, 6e-4, 6e-5, warmup, decay, wsd, wsd_style)
    schedule = LRSchedule(6e-4, 6e-5, style, warmup, decay, wsd, wsd_style)
    for step in range(decay + 20):
        assert lr_at(schedule, step) == pytest.approx(reference.rate(), rel=1e-12, abs=1e-18), step
        reference.step()


def test_values_by_hand():
    cosine = LRSchedule(6e-4, 6e-5, "cosine", 0, 100)
    assert lr_at(cosine, 0) == pytest.approx(6e-4)
    assert lr_at(cosine, 50) == pytest.approx(3.3e-4)
    assert lr_at(cosine, 25) == pytest.approx(6e-5 + 5.4e-4 * (1 + math.sqrt(0.5)) / 2)
    assert lr_at(cosine, 100) == pytest.approx(6e-5) and lr_at(cosine, 101) == 6e-5
    warm = LRSchedule(1.0, 0.0, "linear", 4, 12)
    assert [lr_at(warm, s) for s in (0, 1, 4, 8, 12, 13)] == [0, 0.25, 1, 0.5, 0, 0]
    wsd = LRSchedule(1.0, 0.0, "WSD", 2, 20, 10, "exponential")
    assert lr_at(wsd, 10) == 1.0
    assert lr_at(wsd, 15) == pytest.approx(2 * 0.5**0.5 - 1)
    assert lr_at(wsd, 20) == pytest.approx(0.0)
    root = LRSchedule(1.0, 0.1, "inverse-square-root", 4, 1000)
    assert lr_at(root, 16) == pytest.approx(0.5) and lr_at(root, 900) == pytest.approx(0.1)


def test_a_stopped_run_goes_on_with_the_rates_of_the_unbroken_one():
    """Stop at 40 of 100 and resume: nothing but the step number is carried over."""
    config = OptimizerConfig(
        lr=6e-4, min_lr=6e-5, lr_decay_style="cosine", lr_warmup_iters=5, lr_decay_iters=100
    )
    unbroken = [lr_at(make_lr_schedule(config, 100), step) for step in range(100)]
    resumed = [lr_at(make_lr_schedule(config, 100), step) for step in range(40, 100)]
    assert resumed == unbroken[40:]


def test_decay_defaults_to_the_whole_run_and_warmup_may_be_a_fraction():
    config = OptimizerConfig(lr=1.0, lr_warmup_fraction=0.1, lr_decay_style="cosine")
    schedule = make_lr_schedule(config, 250)
    assert schedule.decay_steps == 250 and schedule.warmup_steps == pytest.approx(25)
    assert lr_at(schedule, 25) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": None}, "--lr is missing"),
        ({"min_lr": 2.0}, "--min-lr 2.0 must be at most --lr 1.0"),
        ({"lr": -1.0}, "must not be negative"),
        ({"lr_decay_iters": 0}, "--lr-decay-iters 0 must be at least 1"),
        ({"lr_warmup_iters": 100}, "must be less than the steps to decay over"),
        ({"lr_warmup_iters": -1}, "--lr-warmup-iters -1 must not be negative"),
        ({"lr_warmup_iters": 3, "lr_warmup_fraction": 0.1}, "give one of them"),
        ({"lr_warmup_fraction": 1.0}, r"--lr-warmup-fraction 1.0 must be in \[0, 1\)"),
        ({"lr_decay_style": "WSD"}, "needs --lr-wsd-decay-iters"),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 95, "lr_warmup_iters": 10},
            "--lr-wsd-decay-iters 95 must be between 1",
        ),
    ],
)
def test_wrong_settings_name_the_flag(changes, message):
    values = {"lr": 1.0, "min_lr": 0.0, **changes}
    with pytest.raises(ValueError, match=message):
        make_lr_schedule(OptimizerConfig(**values), 100)
