"""Who is at fault, judged from beats alone."""

import pytest

from megatron.training.verdict import Beat, Failure, Judge, Strand, Verdict, is_consequence

LOST = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer"


class Ranks:
    """Beats of some ranks by hand, on a clock of their own."""

    def __init__(self, size: int) -> None:
        self.judge = Judge(size, limit=10, patience=2, now=0.0)
        self.beats = [Beat() for _ in range(size)]
        self.now = 0.0

    def go(self, seconds: float, *, silent: tuple[int, ...] = ()) -> Verdict | None:
        """Half-second steps, in which all but ``silent`` ranks beat."""
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            for rank, beat in enumerate(self.beats):
                if rank not in silent:
                    beat.number += 1
                    self.judge.hear(rank, Beat.from_json(beat.to_json()), self.now)
            verdict = self.judge.decide(self.now)
            if verdict is not None:
                return verdict
        return None


def failure(text: str, code: int = 1) -> Failure:
    return Failure(text, code, is_consequence(text))


@pytest.mark.parametrize(
    "text",
    [
        LOST,
        "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp, remote process exited",
        "RuntimeError: Application timeout caused pair closure",
        "CheckpointError: writing x failed on rank 1: RuntimeError: Connection reset by peer",
    ],
)
def test_consequences(text: str) -> None:
    assert is_consequence(text)
    assert not is_consequence("OSError: No space left on device")


def test_nothing_is_wrong() -> None:
    ranks = Ranks(3)
    for _ in range(20):
        for beat in ranks.beats:
            beat.limited = True
            beat.ticks += 1
        assert ranks.go(5) is None
    for beat in ranks.beats:
        beat.limited = False
    assert ranks.go(60) is None


def test_the_rank_that_raised_is_named_alone() -> None:
    ranks = Ranks(4)
    ranks.beats[2].failure = failure("OSError: disk on fire")
    ranks.beats[0].failure = failure(LOST)
    verdict = ranks.go(10)
    assert verdict == Verdict("rank 2 failed: OSError: disk on fire", 1)


def test_an_error_of_all_ranks_is_told_once() -> None:
    ranks = Ranks(3)
    for beat in ranks.beats:
        beat.failure = failure("--load x holds no checkpoint", 2)
    assert ranks.go(1) == Verdict("--load x holds no checkpoint", 2, shared=True)


def test_errors_that_differ_are_all_told() -> None:
    ranks = Ranks(3)
    ranks.beats[0].failure = failure("A: a")
    ranks.beats[1].failure = ranks.beats[2].failure = failure("B: b")
    verdict = ranks.go(1)
    assert verdict is not None
    assert verdict.message == "rank 0 failed: A: a\nranks 1, 2 failed: B: b"


def test_a_killed_rank_is_named_once_another_lost_it() -> None:
    ranks = Ranks(3)
    ranks.go(2)
    ranks.beats[1].doing = "iteration 7"
    ranks.go(1)
    assert ranks.go(1, silent=(1,)) is None
    ranks.beats[0].failure = failure(LOST)
    verdict = ranks.go(5, silent=(1,))
    assert verdict is not None
    assert verdict.message.startswith("rank 1 no longer answers")
    assert "iteration 7" in verdict.message


def test_a_silent_rank_is_named_after_the_limit() -> None:
    ranks = Ranks(3)
    ranks.go(1)
    assert ranks.go(9, silent=(2,)) is None
    verdict = ranks.go(10, silent=(2,))
    assert verdict is not None and "rank 2 no longer answers" in verdict.message


def test_the_rank_that_does_not_wait_is_stuck() -> None:
    ranks = Ranks(3)
    for rank, beat in enumerate(ranks.beats):
        beat.limited, beat.waits, beat.doing = True, rank != 1, "iteration 3"
        beat.stack = f"stack of {rank}"
    assert ranks.go(9) is None
    verdict = ranks.go(6)
    assert verdict is not None
    assert verdict.message.startswith("rank 1 makes no progress at iteration 3")
    assert "stack of 1" in verdict.message and "stack of 0" not in verdict.message


def test_a_rank_may_wait_long_for_one_that_gets_on() -> None:
    """A slow save: one rank writes, the other waits; then that one has work of its own."""
    ranks = Ranks(2)
    for beat in ranks.beats:
        beat.limited, beat.stack = True, "a stack"
    writing, waiting = ranks.beats
    waiting.waits = True
    for _ in range(10):
        writing.ticks += 1
        assert ranks.go(5) is None
    waiting.waits, writing.waits = False, True
    assert ranks.go(9) is None
    verdict = ranks.go(6)
    assert verdict is not None
    assert verdict.message.startswith("rank 1 makes no progress")
    assert "rank 0 makes" not in verdict.message


def test_a_writer_that_hangs_is_named_while_the_ranks_train_on() -> None:
    ranks = Ranks(2)
    ranks.beats[1].writer = Strand(doing="the save of iteration 4", limited=True, stack="in write")
    ranks.beats[0].writer = Strand(limited=True, stack="in gather", waits=True)
    verdict = None
    for _ in range(20):
        for beat in ranks.beats:
            beat.limited, beat.stack = True, "training"
            beat.ticks += 1
        verdict = verdict or ranks.go(1)
    assert verdict is not None
    assert verdict.message.startswith("rank 1 makes no progress at the save of iteration 4")
    assert "in write" in verdict.message and "rank 0 makes" not in verdict.message


def test_a_writer_ends_and_the_next_has_a_clock_of_its_own() -> None:
    ranks = Ranks(1)
    beat = ranks.beats[0]
    beat.writer.limited = True
    assert ranks.go(9) is None
    beat.writer.limited = False
    assert ranks.go(30) is None
    beat.writer.limited = True
    assert ranks.go(9) is None
    beat.writer.stack = "in write"
    assert ranks.go(6) is not None


def test_all_wait_for_each_other() -> None:
    ranks = Ranks(2)
    for rank, beat in enumerate(ranks.beats):
        beat.limited, beat.waits, beat.stack = True, True, f"stack of {rank}"
        beat.ticks = 5 + rank
    verdict = ranks.go(20)
    assert verdict is not None
    assert "furthest behind: ranks [0]" in verdict.message and "stack of 0" in verdict.message


def test_lost_connections_without_a_culprit_end_the_run_too() -> None:
    ranks = Ranks(2)
    ranks.beats[0].failure = failure(LOST)
    ranks.beats[1].waits = True
    verdict = ranks.go(20)
    assert verdict is not None and "rank 0 failed" in verdict.message
