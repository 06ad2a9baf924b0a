"""Rules of the learning rate hold however the length of a run is given."""

import pytest

from megatron.training.arguments import check_command_line
from tests.arguments.good import command_line

# All three are 10 steps of 16 rows of 1,024 tokens; the last is rounded up to them.
LENGTHS = ("--train-iters 10", "--train-samples 160", f"--train-tokens {160 * 1024 - 7}")


def check(words: str) -> None:
    check_command_line(command_line(words, "--train-iters"), world_size=1)


@pytest.mark.parametrize("length", LENGTHS)
def test_warmup_ends_before_the_run(length: str) -> None:
    check(f"{length} --lr-warmup-iters 9")
    with pytest.raises(ValueError, match="--lr-warmup-iters 10 must be less than the run's 10"):
        check(f"{length} --lr-warmup-iters 10")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("warmup", ["--lr-warmup-iters 4", "--lr-warmup-fraction 0.4"])
def test_the_last_phase_of_wsd_fits_behind_warmup(length: str, warmup: str) -> None:
    wsd = f"{length} {warmup} --lr-decay-style WSD --lr-wsd-decay-iters"
    check(f"{wsd} 6")
    with pytest.raises(ValueError, match="--lr-wsd-decay-iters 7 must .* the 6 steps"):
        check(f"{wsd} 7")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("flag", ["--global-batch-size", "--micro-batch-size", "--seq-length"])
def test_sizes_of_zero_are_refused_by_name(length: str, flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag} 0 must be at least 1"):
        check(f"{length} --lr-warmup-iters 9 {flag} 0")
