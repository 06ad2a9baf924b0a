"""Schedules as data: complete, in order, free of deadlock, with the fewest idle slots."""

import random

import pytest

from megatron.core.pipeline_parallel.schedule import (
    BACKWARD,
    FORWARD,
    Pass,
    idle_fraction,
    make_schedule,
    rank_order,
)


def _check(ranks, chunks, micro_batches, backward):
    slots = make_schedule.__wrapped__(ranks, chunks, micro_batches, backward)
    stages = ranks * chunks
    kinds = (FORWARD, BACKWARD) if backward else (FORWARD,)
    when = {}
    for rank in range(ranks):
        assert len(slots[rank]) == len(slots[0])
        for t, slot in enumerate(slots[rank]):
            if slot.work is not None:
                assert slot.work not in when and slot.work.stage % ranks == rank
                when[slot.work] = t
    assert set(when) == {
        Pass(k, s, m) for k in kinds for s in range(stages) for m in range(micro_batches)
    }
    sent, received, waiting = [], [], [set() for _ in range(ranks)]
    most_waiting = 0
    for t in range(len(slots[0])):
        for rank in range(ranks):
            slot = slots[rank][t]
            if slot.work is not None:
                waiting[rank].discard(slot.work)
            for transfer in slot.sends:
                assert transfer.source == rank and transfer.made_by == slot.work
                sent.append((t, transfer))
            for transfer in slot.receives:
                assert transfer.target == rank and when[transfer.needed_by] > t
                received.append((t, transfer))
                waiting[rank].add(transfer.needed_by)
            most_waiting = max(most_waiting, len(waiting[rank]))
            # At most one tensor a direction between two ranks in a batch: order can't matter.
            assert len(slot.sends) <= 1
            assert len({r.source for r in slot.receives}) == len(slot.receives)
    # Both ends of a transfer are posted in the same slot.
    assert sorted(sent) == sorted(received)
    assert len(sent) == len(kinds) * micro_batches * (stages - 1)
    if chunks == 1:
        assert most_waiting <= 2
    else:
        assert most_waiting <= (2 * ranks if micro_batches % ranks else max(4, ranks // 2 + 2))
    for work, t in when.items():
        if work.kind == BACKWARD:
            assert when[Pass(FORWARD, work.stage, work.micro_batch)] < t
    if backward:
        _check_length(len(slots[0]), ranks, chunks, micro_batches)
        _check_memory(slots, ranks, chunks, micro_batches)


def _check_length(length, ranks, chunks, micro_batches):
    """The shortest possible for these orders: see the module docstring."""
    if micro_batches >= ranks:
        assert length == 2 * micro_batches * chunks + 2 * (ranks - 1)
    else:
        assert length == 2 * ranks * chunks + 2 * (micro_batches - 1)


def _check_memory(slots, ranks, chunks, micro_batches):
    """Forward passes waiting for their backward: no more than the warm-up plus one."""
    for rank in range(ranks):
        alive = most = 0
        for slot in slots[rank]:
            if slot.work is not None:
                alive += 1 if slot.work.kind == FORWARD else -1
                most = max(most, alive)
        if chunks == 1:
            assert most == min(micro_batches, ranks - rank)
        elif micro_batches % ranks == 0:
            warmup = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
            assert most == min(micro_batches * chunks, warmup + 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_schedules_of_all_small_sizes(ranks):
    for chunks in range(1, 4):
        for micro_batches in range(1, 2 * ranks + 4):
            for backward in (True, False):
                if ranks > 1 or chunks == 1:
                    _check(ranks, chunks, micro_batches, backward)


def test_schedules_of_random_large_sizes():
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(8):
        _check(rng.randint(2, 16), rng.randint(1, 6), rng.randint(1, 60), rng.random() < 0.8)


def test_orders_by_hand():
    def text(order):
        return " ".join(f"{p.kind}{p.micro_batch}" for p in order)

    assert text(rank_order(0, 4, 1, 5)) == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"
    assert text(rank_order(3, 4, 1, 5)) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"
    interleaved = rank_order(1, 2, 2, 2)
    assert [(p.kind, p.stage, p.micro_batch) for p in interleaved] == [
        ("F", 1, 0),
        ("F", 1, 1),
        ("F", 3, 0),
        ("B", 3, 0),
        ("F", 3, 1),
        ("B", 3, 1),
        ("B", 1, 0),
        ("B", 1, 1),
    ]


def test_idle_fraction():
    assert idle_fraction(1, 1, 7) == 0
    assert idle_fraction(4, 1, 4) == pytest.approx(6 / 14)
    assert idle_fraction(4, 2, 4) == pytest.approx(6 / 22)
    assert idle_fraction(4, 1, 1) == pytest.approx(6 / 8)
