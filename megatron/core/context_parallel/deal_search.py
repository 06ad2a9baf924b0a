"""Local search over deals: swap chunks between ranks until none is slower than the mean.

A deal gives each of R ranks the same number of chunks. Its cost is the time of the slowest rank in
the needed-rows exchange, forward plus backward, in units of the mean work:

    load      visible pairs of the rank's queries                      / mean pairs of a rank
    fetched   KV rows it needs and does not hold x pairs a row's transfer is worth / mean pairs
    served    the same for rows that it sends to others
    time      (max(load, fetched, served)
               + max(2.5 load, max(fetched, served) + fetched + served)) / 3.5

(forward overlaps compute with both directions of traffic; backward computes 2.5 times as much,
fetches KV again and sends fp32 gradients of twice the bytes back the same way, so the fuller
direction carries max(f, s) + f + s.)

Each step takes one rank, weighs all its swaps with a few partners at once by first-order changes,
measures the best of them exactly and keeps the winner if the energy falls. ``balance`` lowers the
slowest ranks (energy: 16th powers of the times), ``gather`` then lowers the rows on the wire while
no time grows beyond a cap.

Every rank of a job runs this for itself and must get the same answer, so decisions use only
correctly rounded elementwise arithmetic, sums of whole numbers and comparisons with ties broken by
index: no sum whose order, and no function whose rounding, depends on the processor.

Cost: a step is some 30 numpy calls on partners x (chunks per rank)^2 and tries x chunks elements.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.context_parallel.documents import IntArray

FloatArray = npt.NDArray[np.float64]
Pressure = Callable[[Any], Any]

PARTNERS = 5
"""Ranks that a step trades with."""
TRIES = 8
"""Swaps that a step measures exactly."""
PATIENCE = 24
"""Steps in vain, or half the steps without half a percent gained, after which to give up."""
UNIT = float(1 << 18)
"""Energies are summed as whole multiples of 1 / UNIT."""


def exchange_time(load: Any, fetched: Any, served: Any) -> Any:
    """Forward plus backward time over 3.5, all in units of the mean work (module docstring)."""
    traffic = np.maximum(fetched, served)
    forward = np.maximum(load, traffic)
    backward = np.maximum(2.5 * load, traffic + fetched + served)
    return (forward + backward) / 3.5


def sixteenth_power(time: Any) -> Any:
    """By squaring, which rounds alike everywhere; a straight line from 3 on keeps sums finite."""
    square = np.minimum(time, 3.0) ** 2
    return np.square(np.square(np.square(square))) + 2.5e8 * np.maximum(0.0, time - 3.0)


class DealSearch:
    """One deal under improvement: chunks 0..m-1 in ascending order on ranks 0..R-1.

    Args:
        work: [m] visible pairs of each chunk's queries (whole numbers).
        first: [m] global position of each chunk.
        seen: [packings, m] first global row that each chunk's first query sees.
        length: tokens of a chunk.
        owners: [m] rank of each chunk, every rank as often.
        row_pairs: pairs that could be computed while one KV row is transferred.
        served_outside: [m] rows of each chunk fetched by ranks that take no part.
    """

    def __init__(
        self,
        work: FloatArray,
        first: IntArray,
        seen: IntArray,
        length: int,
        owners: IntArray,
        *,
        row_pairs: float,
        served_outside: FloatArray | None = None,
    ) -> None:
        self.count = len(work)
        self.ranks = int(owners.max()) + 1
        self.per_rank = self.count // self.ranks
        self.length = length
        self.mean = float(work.sum()) / self.ranks
        self.work = work / self.mean
        self.row_cost = row_pairs / self.mean
        end = np.int64(first[-1] + length)
        # A sentinel chunk behind the last one needs nothing.
        self._first = np.append(first, end)
        self._seen = np.concatenate((seen, np.full((len(seen), 1), end)), axis=1)
        at = np.searchsorted(first, self._seen, side="right") - 1
        inside = np.minimum(self._seen - first[np.maximum(at, 0)], length)
        # The same in rows of these chunks alone: where served rows are counted.
        self._seen_here = np.where(at < 0, 0, at * length + inside)
        self.owners = owners.copy()
        self.chunks = np.argsort(owners, kind="stable").reshape(self.ranks, -1)
        self.outside = np.zeros(self.count) if served_outside is None else served_outside
        self.cover = self.outside + self._cover(self.chunks[None])[0]
        self.fetched = self._fetched(self.chunks)
        self.served = np.bincount(owners, self.cover, self.ranks)
        self.load = np.bincount(owners, self.work, self.ranks)
        self.time = self._time(self.load, self.fetched, self.served)

    @property
    def slowest(self) -> float:
        """Time of the slowest rank in units of the mean work."""
        return float(self.time.max())

    @property
    def rows(self) -> float:
        """KV rows fetched by all ranks."""
        return float(self.fetched.sum())

    def balance(self, steps: int, goal: float, row_weight: float) -> None:
        """Lower the slowest ranks until none is above ``goal`` or nothing helps.

        Args:
            row_weight: energy of one rank's traffic as long as its mean work; small: at any price.
        """
        stuck = np.zeros(self.ranks, dtype=np.int64)
        rounds = min(3, -(-(self.ranks - 1) // PARTNERS))
        failed, mark = 0, self.slowest
        for step in range(steps):
            if step and step % (2 * PATIENCE) == 0:
                if self.slowest > 0.995 * mark:
                    return
                mark = self.slowest
            open_time = np.where(stuck < rounds, self.time, -1.0)
            rank = int(open_time.argmax())
            if open_time[rank] < 0 or self.slowest <= goal or failed >= PATIENCE:
                return
            order = np.argsort(self.time, kind="stable")
            order = order[order != rank]
            partners = order[stuck[rank] * PARTNERS : (stuck[rank] + 1) * PARTNERS]
            if self._step(rank, partners, sixteenth_power, row_weight):
                stuck[:] = failed = 0
            else:
                stuck[rank] += 1
                failed += 1

    def gather(self, steps: int, cap: float) -> None:
        """Fetch fewer rows while no rank's time grows beyond ``cap``."""
        closed = np.zeros(self.ranks, dtype=bool)

        def pressure(time: Any) -> Any:
            return 50.0 * np.maximum(0.0, time - cap)

        for _ in range(steps):
            rank = int(np.where(closed, -1.0, self.fetched).argmax())
            if closed[rank]:
                return
            own = self.chunks[rank]
            beside = np.concatenate((np.maximum(own - 1, 0), np.minimum(own + 1, self.count - 1)))
            meets = np.bincount(self.owners[beside], minlength=self.ranks)
            meets[rank] = 0
            partners = np.argsort(-meets, kind="stable")[:PARTNERS]
            partners = partners[meets[partners] > 0]
            closed[rank] = not (len(partners) and self._step(rank, partners, pressure, 1.0))

    def _time(self, load: Any, fetched: Any, served: Any) -> Any:
        return exchange_time(load, fetched * self.row_cost, served * self.row_cost)

    def _step(self, rank: int, partners: IntArray, pressure: Pressure, row_weight: float) -> bool:
        """Make the best swap between a rank and its partners, if any lowers the energy."""
        give, partner, take = self._propose(rank, partners, pressure, row_weight)
        trial = self._measure(rank, give, partner, take)
        before = self._energy(self.time[None], self.fetched[None], pressure, row_weight)[0]
        energy = self._energy(trial["time"], trial["fetched"], pressure, row_weight)
        best = int(energy.argmin())
        if energy[best] >= before:
            return False
        other = partner[best]
        self.chunks[rank], self.chunks[other] = trial["chunks"][best]
        self.owners[give[best]], self.owners[take[best]] = other, rank
        self.load, self.fetched = trial["load"][best], trial["fetched"][best]
        self.served, self.cover = trial["served"][best], trial["cover"][best]
        self.time = trial["time"][best]
        return True

    def _energy(
        self, time: FloatArray, fetched: FloatArray, pressure: Pressure, row_weight: float
    ) -> IntArray:
        """[tries] of [tries, ranks], as whole numbers so that the order of the sum is nothing."""
        parts = pressure(time) + (row_weight * self.row_cost) * fetched
        return np.rint(np.minimum(parts, 1e11) * UNIT).astype(np.int64).sum(axis=-1)

    def _propose(
        self, rank: int, partners: IntArray, pressure: Pressure, row_weight: float
    ) -> tuple[IntArray, IntArray, IntArray]:
        """The most promising (own chunk, partner, partner's chunk), taking changes as additive."""
        own, theirs = self.chunks[rank], self.chunks[partners]
        leave_own, leave_theirs = self._removal(own[None])[0], self._removal(theirs)
        take = self._insertion(theirs.reshape(1, -1), own[None]).reshape(theirs.shape)
        give = self._insertion(np.broadcast_to(own, theirs.shape), theirs)
        # [partners, own chunk, their chunk]
        work = self.work[theirs][:, None, :] - self.work[own][None, :, None]
        cover = self.cover[theirs][:, None, :] - self.cover[own][None, :, None]
        rows_own = take[:, None, :] - leave_own[None, :, None]
        rows_theirs = give[:, :, None] - leave_theirs[:, None, :]
        at = partners[:, None, None]
        time_own = self._time(
            self.load[rank] + work, self.fetched[rank] + rows_own, self.served[rank] + cover
        )
        time_theirs = self._time(
            self.load[at] - work, self.fetched[at] + rows_theirs, self.served[at] - cover
        )
        score = pressure(time_own) + pressure(time_theirs) - pressure(self.time[at])
        score = (score + row_weight * self.row_cost * (rows_own + rows_theirs)).reshape(-1)
        tries = min(TRIES, score.size)
        limit = np.partition(score, tries - 1)[tries - 1]
        which = np.flatnonzero(score <= limit)[:tries]
        index = np.unravel_index(which, work.shape)
        return own[index[1]], partners[index[0]], theirs[index[0], index[2]]

    def _measure(
        self, rank: int, give: IntArray, partner: IntArray, take: IntArray
    ) -> dict[str, Any]:
        """Exact state after each of several swaps, one per leading index."""
        tries = np.arange(len(give))
        old = np.stack((np.broadcast_to(self.chunks[rank], (len(give), self.per_rank)),
                        self.chunks[partner]), axis=1)  # fmt: skip
        new = np.where(old == give[:, None, None], take[:, None, None], old)
        new[:, 1] = np.where(old[:, 1] == take[:, None], give[:, None], old[:, 1])
        new.sort(axis=-1)
        cover = self.cover + self._cover(new) - self._cover(old)
        owners = np.broadcast_to(self.owners, cover.shape).copy()
        owners[tries, give], owners[tries, take] = partner, rank
        slots = (owners + tries[:, None] * self.ranks).reshape(-1)
        served = np.bincount(slots, cover.reshape(-1), len(tries) * self.ranks)
        load = np.broadcast_to(self.load, (len(tries), self.ranks)).copy()
        change = self.work[take] - self.work[give]
        load[:, rank] = load[:, rank] + change
        load[tries, partner] = load[tries, partner] - change
        fetched = np.broadcast_to(self.fetched, load.shape).copy()
        fetched[tries[:, None], np.stack((np.full_like(partner, rank), partner), axis=1)] = (
            self._fetched(new)
        )
        served = served.reshape(load.shape)
        time = self._time(load, fetched, served)
        return {"chunks": new, "cover": cover, "served": served, "load": load,
                "fetched": fetched, "time": time}  # fmt: skip

    def _need(self, chunk: IntArray, before: IntArray) -> FloatArray:
        """Rows fetched in front of a chunk when ``before`` (-1: none) is the own chunk before."""
        held = np.where(before < 0, 0, self._first[before] + self.length)
        rows = np.maximum(0, self._first[chunk] - np.maximum(self._seen[:, chunk], held))
        return rows.sum(axis=0).astype(np.float64)

    def _fetched(self, chunks: IntArray) -> FloatArray:
        before = np.concatenate((np.full_like(chunks[..., :1], -1), chunks[..., :-1]), axis=-1)
        return self._need(chunks, before).sum(axis=-1)

    def _removal(self, chunks: IntArray) -> FloatArray:
        """[k, n]: rows no longer fetched when each chunk alone leaves its rank's list."""
        edge = np.full_like(chunks[:, :1], -1)
        before = np.concatenate((edge, chunks[:, :-1]), axis=1)
        after = np.concatenate((chunks[:, 1:], edge + 1 + self.count), axis=1)
        return self._need(chunks, before) + self._need(after, chunks) - self._need(after, before)

    def _insertion(self, chunks: IntArray, lists: IntArray) -> FloatArray:
        """[k, q]: rows fetched more when each chunk alone joins the list of its row."""
        rows = np.arange(len(lists))[:, None]
        edge = np.full_like(lists[:, :1], -1)
        ends = np.concatenate((edge, lists, edge + 1 + self.count), axis=1)
        stride = self.count + 2
        keys = (ends[:, 1:-1] + rows * stride).reshape(-1)
        at = np.searchsorted(keys, chunks + rows * stride) - rows * self.per_rank
        before, after = ends[rows, at], ends[rows, at + 1]
        return self._need(chunks, before) + self._need(after, chunks) - self._need(after, before)

    def _cover(self, chunks: IntArray) -> FloatArray:
        """[tries, m]: fetches that fall on each chunk's rows, of the ranks in [tries, ranks, n]."""
        tries, m = len(chunks), self.count
        held = np.concatenate((np.zeros_like(chunks[..., :1]), chunks[..., :-1] + 1), axis=-1)
        to = chunks * self.length
        start = np.minimum(to, np.maximum(self._seen_here[:, chunks], held * self.length))
        base = np.arange(tries).reshape(-1, 1, 1) * m
        chunk, offset = np.divmod(start, self.length)
        size = tries * m
        opens = (base + np.minimum(chunk, m - 1)).reshape(-1)
        closes = np.bincount((base + chunks).reshape(-1), minlength=size) * len(start)
        change = np.bincount(opens, minlength=size) - closes
        part = np.bincount(opens, offset.reshape(-1), size)
        return np.cumsum(change.reshape(tries, m), axis=1) * self.length - part.reshape(tries, m)
