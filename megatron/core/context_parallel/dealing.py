"""The balanced layout's dealer: equal chunks, nearly equal attention work, few remote rows.

The row is cut in m = 2Rk equal chunks. Work and traffic pull apart: whole documents on one rank
need no traffic, but a document's late rows cost as much as its length. The deal is built in three
moves, from cu_seqlens alone:

1. Sweep. Split the chunks into heavy and light ones, both in row order, and give each rank in turn
   a run of heavy and a run of light chunks, as many of each as brings the total so far nearest to
   its share. Errors do not add up, and a rank's chunks stay in two runs.
2. Search (``deal_search``). Swap single chunks until no rank is slower than ``GOAL`` x the mean
   under a cost model of work and traffic, then until fewer rows travel.
3. Refine. If a coarse cut cannot be balanced (a chunk may hold more work than a rank's share),
   halve the chunks, keep the owners, search again.

One document is dealt in zigzag, which is perfect for it; a plain contiguous or zigzag deal is kept
whenever it is within the goal. More than ``GROUP`` ranks are searched in groups of neighbours (the
sweep already gives every group its share), then among the slowest and fastest of all.

Cost: 1M tokens on 32 ranks take 50-200 ms on one core, mostly search; time grows with the number
of ranks. The model does not know windows (a windowed model is balanced as if it had none).
"""

import numpy as np

from megatron.core.context_parallel.deal_search import DealSearch, FloatArray
from megatron.core.context_parallel.documents import IntArray, document_bounds
from megatron.core.context_parallel.prefix import visible_before

ROW_PAIRS = 2500.0
"""Visible pairs a rank computes while one KV row arrives: (bytes of a row / bandwidth) over (FLOPs
of a pair / FLOPS) = (kv heads / heads) x (bytes per element / 2) x (FLOPS / bandwidth); here 32
heads, 8 KV heads, bf16, 500 TFLOP/s and 50 GB/s."""
GOAL = 1.01
"""Time of the slowest rank over the mean that is good enough."""
GATHER_CAP = 1.02
"""What that time may become again for the sake of fewer rows."""
GROUP = 32
"""Ranks searched together."""
EXTREME_ROUNDS = 2
"""Searches per group among the slowest and the fastest ranks of the whole ring."""
START_K = 8
"""Chunks per rank / 2 of the first cut."""
SMALLEST_CHUNK = 64
"""Chunks of fewer tokens are not made only for the sake of balance: kernels would starve."""
HEAVY = 0.7
"""A chunk is heavy with more than this share of the mean chunk's work: found by trial, few rows."""
BALANCE_STEPS = 6
GATHER_STEPS = 2
"""Search steps per rank."""


def deal_balanced(
    packings: list[IntArray], seq_length: int, ring_size: int, row_pairs: float = ROW_PAIRS
) -> IntArray:
    """Owner of each of the 2 x ring_size x k equal chunks of the row.

    Args:
        packings: document boundaries of each batch row (checked); their work is summed.
        seq_length: tokens of a row, a multiple of 2 x ring_size.
        ring_size: ranks to deal to.
        row_pairs: visible pairs worth the transfer of one KV row.
    """
    zigzag = zigzag_owners(ring_size)
    if ring_size == 1 or all(len(bounds) == 2 for bounds in packings):
        return zigzag
    simple = _Deal(packings, seq_length, ring_size, 1, row_pairs)
    plain = [np.repeat(np.arange(ring_size, dtype=np.int64), 2), zigzag]
    times = [simple.search(owners).slowest for owners in plain]
    best = int(np.argmin(times))
    if times[best] <= GOAL:
        return plain[best]
    owners, slowest = _deal_finely(packings, seq_length, ring_size, row_pairs)
    return owners if slowest < times[best] else plain[best]


def _deal_finely(
    packings: list[IntArray], seq_length: int, ring_size: int, row_pairs: float
) -> tuple[IntArray, float]:
    """Sweep, search, and refine while that can help; owners and time of the slowest rank."""
    per_rank = seq_length // (2 * ring_size)
    k = START_K
    while per_rank % k:
        k //= 2
    deal = _Deal(packings, seq_length, ring_size, k, row_pairs)
    owners = sweep(deal.work, ring_size)
    while True:
        owners, slowest, heaviest = deal.improve(owners)
        finer = per_rank % (2 * k) == 0 and per_rank // (2 * k) >= SMALLEST_CHUNK and k < 16
        # Smaller chunks mend work, not traffic.
        if slowest <= GATHER_CAP * 1.001 or heaviest < 0.9 * slowest or not finer:
            return owners, slowest
        k *= 2
        deal = _Deal(packings, seq_length, ring_size, k, row_pairs)
        owners = np.repeat(owners, 2)


def zigzag_owners(ring_size: int) -> IntArray:
    """Chunks r and 2R-1-r to rank r."""
    ranks = np.arange(ring_size, dtype=np.int64)
    return np.concatenate((ranks, ranks[::-1]))


def sweep(work: FloatArray, ring_size: int) -> IntArray:
    """Deal runs of heavy and of light chunks, in row order, so that the running total is fair."""
    per_rank = len(work) // ring_size
    total = work.sum()
    heavy = np.flatnonzero(work * len(work) > HEAVY * total)
    light = np.flatnonzero(work * len(work) <= HEAVY * total)
    heavy_sum = np.concatenate(([0.0], np.cumsum(work[heavy])))
    light_sum = np.concatenate(([0.0], np.cumsum(work[light])))
    owners = np.empty(len(work), dtype=np.int64)
    dealt = 0.0
    h = g = 0  # heavy and light chunks dealt so far
    for rank in range(ring_size):
        fewest = max(0, per_rank - (len(light) - g))
        take = np.arange(fewest, min(per_rank, len(heavy) - h) + 1)
        gain = heavy_sum[h + take] - heavy_sum[h] + light_sum[g + per_rank - take] - light_sum[g]
        best = int(np.abs(gain - (total * (rank + 1) / ring_size - dealt)).argmin())
        dealt += gain[best]
        more = int(take[best])
        owners[heavy[h : h + more]] = rank
        owners[light[g : g + per_rank - more]] = rank
        h, g = h + more, g + per_rank - more
    return owners


class _Deal:
    """The chunks of one cut: work and first visible row, and the search over their owners."""

    def __init__(
        self,
        packings: list[IntArray],
        seq_length: int,
        ring_size: int,
        k: int,
        row_pairs: float,
    ) -> None:
        self.ring_size, self.row_pairs = ring_size, row_pairs
        self.length = seq_length // (2 * ring_size * k)
        edges = np.arange(2 * ring_size * k + 1, dtype=np.int64) * self.length
        self.first = edges[:-1]
        pairs = [np.diff(visible_before(bounds, edges)) for bounds in packings]
        self.work = np.sum(pairs, axis=0).astype(np.float64)
        self.seen = np.stack([document_bounds(bounds, self.first)[0] for bounds in packings])

    def improve(self, owners: IntArray) -> tuple[IntArray, float, float]:
        """Search from a deal: better owners, time of the slowest rank, work of the heaviest."""
        whole = self.search(owners)
        if self.ring_size <= GROUP:
            _run(whole)
            return whole.owners, whole.slowest, float(whole.load.max())
        groups = -(-self.ring_size // GROUP)
        for group in np.array_split(np.arange(self.ring_size), groups):
            whole = self._improve_some(whole, group)
        for _ in range(EXTREME_ROUNDS * groups):
            order = np.argsort(whole.time, kind="stable")
            extremes = np.sort(np.concatenate((order[: GROUP // 2], order[-GROUP // 2 :])))
            better = self._improve_some(whole, extremes)
            if better.slowest > 0.999 * whole.slowest or whole.slowest <= GOAL:
                break
            whole = better
        return whole.owners, whole.slowest, float(whole.load.max())

    def _improve_some(self, whole: DealSearch, ranks: IntArray) -> DealSearch:
        """Search among some ranks (ascending) only; the whole deal after it, if no slower."""
        here = np.flatnonzero(np.isin(whole.owners, ranks))
        owners = np.searchsorted(ranks, whole.owners[here])
        inside = self.search(owners, here)
        outside = whole.cover[here] - inside.cover
        part = self.search(owners, here, served_outside=outside)
        if part.slowest * part.mean <= GOAL * whole.mean:
            return whole
        _run(part)
        changed = whole.owners.copy()
        changed[here] = ranks[part.owners]
        result = self.search(changed)
        return result if result.slowest <= whole.slowest else whole

    def search(
        self,
        owners: IntArray,
        chunks: IntArray | None = None,
        served_outside: FloatArray | None = None,
    ) -> DealSearch:
        """The search over all chunks, or over some of them on ranks counted from 0."""
        at = slice(None) if chunks is None else chunks
        return DealSearch(
            self.work[at],
            self.first[at],
            self.seen[:, at],
            self.length,
            owners,
            row_pairs=self.row_pairs,
            served_outside=served_outside,
        )


def _run(search: DealSearch) -> None:
    for row_weight in (2.0, 0.05):  # thrifty first, then at any price
        search.balance(BALANCE_STEPS * search.ranks, GOAL, row_weight)
    search.gather(GATHER_STEPS * search.ranks, max(GATHER_CAP, search.slowest))
