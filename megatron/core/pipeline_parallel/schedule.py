"""Pipeline schedules as data: what each rank computes and what it sends, slot by slot. Pure.

A schedule is made in two steps. First each rank gets its order of passes, as in Megatron-LM:
1F1B (PipeDream-Flush, arXiv:2006.09503) or interleaved 1F1B (arXiv:2104.04473)::

    4 ranks, 5 micro-batches, 1F1B           F0 = forward of micro-batch 0
    rank 0  F0 F1 F2 F3 -- -- -- B0 F4 B1 -- B2 ...
    rank 3  -- -- -- F0 B0 F1 B1 F2 B2 ...

Then all ranks are played in lock-step: in each slot a rank runs its next pass if what the pass
needs was made in an earlier slot. This yields the transfers: what is made in slot t and needed by
another rank is sent and received *between slots t and t+1*, in one batch a rank. Since every rank
posts its batches in slot order, both ends of each transfer are posted at the same place of the same
sequence: no order of sends and receives can deadlock, with gloo or with NCCL. A rank waits for a
transfer only when a pass needs it, so ranks need not run in lock-step in fact.

Any number of micro-batches works, multiples of the ranks or not. With P ranks, V chunks a rank and
M >= P micro-batches the idle slots are the fewest possible, 2 (P - 1) beside 2 M V with work; with
M < P a step takes 2 (V P + M - 1) slots. However large M is, the received tensors that wait for
their pass are at most 2 (V = 1), about P / 2 (V > 1, M a multiple of P) or 2 P (V > 1, any M).
"""

import dataclasses
import functools
from collections.abc import Sequence

FORWARD, BACKWARD = "F", "B"


@dataclasses.dataclass(frozen=True, order=True)
class Pass:
    """Forward or backward of one micro-batch through one virtual stage."""

    kind: str
    stage: int
    """Virtual stage: chunk * pipeline ranks + pipeline rank."""
    micro_batch: int


@dataclasses.dataclass(frozen=True, order=True)
class Transfer:
    """The result of a pass on its way to the rank that needs it: activation, or its gradient."""

    made_by: Pass
    needed_by: Pass
    source: int
    target: int


@dataclasses.dataclass(frozen=True)
class Slot:
    """What one rank does in one slot: a pass or nothing, then its batch of transfers."""

    work: Pass | None
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


def rank_order(
    rank: int, ranks: int, chunks: int, micro_batches: int, backward: bool = True
) -> list[Pass]:
    """Order of the passes of one rank."""
    forwards, backwards = [], []
    for group in _groups(micro_batches, ranks if chunks > 1 else 1):
        for chunk in range(chunks):
            forwards += [Pass(FORWARD, chunk * ranks + rank, m) for m in group]
            last = chunks - 1 - chunk
            backwards += [Pass(BACKWARD, last * ranks + rank, m) for m in group]
    if not backward:
        return forwards
    if chunks == 1:
        warmup = ranks - rank - 1
    else:
        largest = max(len(group) for group in _groups(micro_batches, ranks))
        warmup = (chunks - 1) * largest + 2 * (ranks - rank - 1)
    warmup = min(warmup, len(forwards))
    order = forwards[:warmup]
    for steady, done in zip(forwards[warmup:], backwards, strict=False):
        order += [steady, done]
    return order + backwards[len(forwards) - warmup :]


def _groups(micro_batches: int, ranks: int) -> list[range]:
    """Micro-batches in groups of at least ``ranks``, as even as possible, in order."""
    count = max(1, micro_batches // ranks)
    bounds = [micro_batches * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


def _needs(work: Pass, last_stage: int) -> list[Pass]:
    """Passes that must come before ``work``."""
    before = []
    if work.kind == FORWARD:
        if work.stage > 0:
            before.append(dataclasses.replace(work, stage=work.stage - 1))
    else:
        before.append(dataclasses.replace(work, kind=FORWARD))
        if work.stage < last_stage:
            before.append(dataclasses.replace(work, stage=work.stage + 1))
    return before


def _transfer(work: Pass, ranks: int, last_stage: int, backward: bool) -> Transfer | None:
    """Where the result of ``work`` goes, if to another pass."""
    step = 1 if work.kind == FORWARD else -1
    stage = work.stage + step
    if not 0 <= stage <= last_stage:
        return None
    assert work.kind == FORWARD or backward
    needed_by = dataclasses.replace(work, stage=stage)
    return Transfer(work, needed_by, work.stage % ranks, stage % ranks)


def play(orders: Sequence[Sequence[Pass]], chunks: int, backward: bool = True) -> list[list[Slot]]:
    """Play all ranks in lock-step; ``slots[rank][t]``.

    The orders must be free of deadlock, which a test checks for all sizes up to some bound.
    """
    ranks = len(orders)
    last_stage = ranks * chunks - 1
    position = [0] * ranks
    done: set[Pass] = set()
    slots: list[list[Slot]] = [[] for _ in range(ranks)]
    while any(position[r] < len(orders[r]) for r in range(ranks)):
        works: list[Pass | None] = []
        for rank, order in enumerate(orders):
            work = order[position[rank]] if position[rank] < len(order) else None
            if work is not None and not all(w in done for w in _needs(work, last_stage)):
                work = None
            works.append(work)
        assert any(works), "the orders of the ranks deadlock"
        sends: list[list[Transfer]] = [[] for _ in range(ranks)]
        receives: list[list[Transfer]] = [[] for _ in range(ranks)]
        for rank, work in enumerate(works):
            if work is None:
                continue
            position[rank] += 1
            done.add(work)
            transfer = _transfer(work, ranks, last_stage, backward)
            if transfer is not None:
                sends[transfer.source].append(transfer)
                receives[transfer.target].append(transfer)
        for rank in range(ranks):
            slots[rank].append(Slot(works[rank], tuple(sends[rank]), tuple(receives[rank])))
    return slots


@functools.lru_cache(maxsize=64)
def make_schedule(
    ranks: int, chunks: int, micro_batches: int, backward: bool = True
) -> tuple[tuple[Slot, ...], ...]:
    """The slots of every rank; kept for the sizes that a run uses."""
    orders = [rank_order(rank, ranks, chunks, micro_batches, backward) for rank in range(ranks)]
    return tuple(tuple(slots) for slots in play(orders, chunks, backward))


def idle_fraction(ranks: int, chunks: int, micro_batches: int) -> float:
    """Part of a step that a pipeline rank spends idle, were all passes equally long."""
    slots = len(make_schedule(ranks, chunks, micro_batches)[0])
    return 1.0 - 2 * micro_batches * chunks / slots
