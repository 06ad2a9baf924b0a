"""What a layer's attention costs in time, and the choice of communication that follows from it.

All is pure and made from (layout, cu_seqlens), so every rank computes the same answer without
talking. With c tokens a rank, d = heads x head_dim and P visible pairs of a rank:

    FLOPs          forward 4 P d, backward 10 P d (five matmuls for two: scores again)
    ring hop       forward K and V: 2 x c x kv_heads x head_dim x 2 bytes in ONE direction;
                   backward K, V and their fp32 gradients: three times that
    ring           lock-step: step t costs the slowest of its R ranks, each the longer of its
                   compute and its hop; the sum over steps
    exchange       no neighbour to wait for: each rank takes the longest of its compute, its traffic
                   in the fuller direction, and the start and end of the pipeline of stages, where
                   only one stage's transfer or compute is left to run alone
    ulysses        its all-to-alls stand before and after the compute and are not hidden

So a forward hop hides when c >= FLOPS / bandwidth, whatever d, divided by heads / kv_heads under
grouped-query attention. Not modelled: kernel launches and efficiency of small tasks, topology
(one bandwidth for all), the merge of partial results.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.context_parallel.documents import IntArray, normalize_packings
from megatron.core.context_parallel.layout import Layout
from megatron.core.context_parallel.work import pair_matrix, remote_rows

FORWARD_FLOPS = 4
BACKWARD_FLOPS = 10
"""Per visible pair and head channel; backward computes the scores again."""
BACKWARD_ROWS = 3
"""Bytes of a row's KV plus its fp32 gradient, in units of its bf16 KV."""

RING_BONUS = 1.02
"""A ring slower by no more than this is preferred: its memory does not grow with the row."""


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One rank's means."""

    flops_per_second: float = 500e12
    bytes_per_second: float = 50e9
    """In each direction."""
    latency_seconds: float = 10e-6
    """Of one ring step or one exchange stage."""


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Heads of one layer on one tensor-parallel rank, before Ulysses divides them."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    bytes_per_element: int = 2

    def flops(self, pairs: Any) -> Any:
        """Forward FLOPs of some visible pairs over all heads."""
        return pairs * float(FORWARD_FLOPS * self.num_heads * self.head_dim)

    @property
    def row_bytes(self) -> float:
        """Bytes of one token's K and V."""
        return 2.0 * self.num_kv_heads * self.head_dim * self.bytes_per_element


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one layer's attention."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclasses.dataclass(frozen=True)
class AttentionWork:
    """Work and traffic of one packing under a layout, the input of all cost functions."""

    layout: Layout
    pairs: IntArray
    """[query ring rank, source ring rank] visible pairs."""
    fetched: IntArray
    """[ring ranks] remote rows that each needs."""
    served: IntArray
    """[ring ranks] rows that each sends, once per receiver."""

    @property
    def balance(self) -> float:
        """Largest over mean work of a ring rank."""
        load = self.pairs.sum(axis=1)
        return float(load.max() / load.mean())

    @property
    def lock_step(self) -> float:
        """Compute of a lock-step ring over ideal compute, communication left out."""
        return float(_steps(self.pairs).max(axis=1).sum() / self.pairs.sum(axis=1).mean())

    @property
    def remote_share(self) -> float:
        """Mean share of a full ring's remote rows that a rank needs."""
        full = self.layout.seq_length - self.layout.ring_length
        return float(self.fetched.mean() / full) if full else 0.0


def measure(
    layout: Layout, cu_seqlens: Any = None, *, window: int | None = None, causal: bool = True
) -> AttentionWork:
    """Count one packing's work and rows (exact, no tasks are made)."""
    pairs = pair_matrix(layout, cu_seqlens, window=window, causal=causal)
    fetched, served = remote_rows(layout, cu_seqlens, window=window, causal=causal)
    return AttentionWork(layout, pairs, fetched, served)


def ideal_time(work: AttentionWork, shape: AttentionShape, hardware: Hardware) -> StepTime:
    """Compute spread evenly over all ranks, nothing else."""
    ranks = work.layout.ring_size * work.layout.ulysses_size
    seconds = shape.flops(float(work.pairs.sum())) / ranks / hardware.flops_per_second
    return StepTime(seconds, seconds * BACKWARD_FLOPS / FORWARD_FLOPS)


def ring_time(work: AttentionWork, shape: AttentionShape, hardware: Hardware) -> StepTime:
    """The lock-step ring; its backward has one hop more, which brings dK and dV home."""
    layout = work.layout
    compute = _compute(_steps(work.pairs).max(axis=1), layout, shape, hardware)
    hop = _transfer(layout.ring_length, layout, shape, hardware)
    hops = np.where(np.arange(layout.ring_size) < layout.ring_size - 1, hop, 0.0)
    if layout.ring_size == 1:
        return StepTime(*_with_ulysses(compute[0], compute[0] * 2.5, layout, shape, hardware))
    latency = hardware.latency_seconds
    forward = math.fsum(np.maximum(compute, hops + latency))
    hops = np.full(layout.ring_size, BACKWARD_ROWS * hop)
    backward = math.fsum(np.maximum(2.5 * compute, hops + latency))
    return StepTime(*_with_ulysses(forward, backward, layout, shape, hardware))


def exchange_time(
    work: AttentionWork, shape: AttentionShape, hardware: Hardware, stages: int = 8
) -> StepTime:
    """The needed-rows exchange: each rank fetches what its queries see, in overlapped stages."""
    layout = work.layout
    load = _compute(work.pairs.sum(axis=1), layout, shape, hardware)
    remote = load - _compute(np.diagonal(work.pairs), layout, shape, hardware)
    fetch = _transfer(work.fetched, layout, shape, hardware)
    serve = _transfer(work.served, layout, shape, hardware)
    latency = hardware.latency_seconds * stages * (work.fetched > 0)
    forward = _pipeline(load, remote, np.maximum(fetch, serve) + latency, stages)
    # In: KV of fetched rows and fp32 gradients of served rows; out: the other way round.
    traffic = np.maximum(fetch + 2 * serve, serve + 2 * fetch)
    backward = _pipeline(2.5 * load, 2.5 * remote, traffic + latency, stages)
    return StepTime(
        *_with_ulysses(float(forward.max()), float(backward.max()), layout, shape, hardware)
    )


def _pipeline(load: Any, remote: Any, traffic: Any, stages: int) -> npt.NDArray[np.float64]:
    """Local tasks first, then the stages in turn: the first transfer may be waited for before all
    remote work, the last one before the last stage's work."""
    waits = np.maximum(traffic / stages + remote, traffic + remote / stages)
    return np.where(traffic > 0, np.maximum(load, waits), load)


def _steps(pairs: IntArray) -> IntArray:
    """[step, rank]: pairs of each rank at each ring step, source = rank - step."""
    rank = np.arange(len(pairs))
    return np.stack([pairs[rank, (rank - step) % len(pairs)] for step in range(len(pairs))])


def _compute(pairs: Any, layout: Layout, shape: AttentionShape, hardware: Hardware) -> Any:
    """Forward seconds of some pairs on one rank's share of the heads."""
    return shape.flops(pairs) / layout.ulysses_size / hardware.flops_per_second


def _transfer(rows: Any, layout: Layout, shape: AttentionShape, hardware: Hardware) -> Any:
    """Seconds for K and V of some rows, of the KV heads a rank holds after Ulysses."""
    heads = max(1.0, shape.num_kv_heads / layout.ulysses_size)
    return rows * (shape.row_bytes * heads / shape.num_kv_heads) / hardware.bytes_per_second


def _with_ulysses(
    forward: float, backward: float, layout: Layout, shape: AttentionShape, hardware: Hardware
) -> tuple[float, float]:
    """Add the all-to-alls: q, k, v in and out back; backward the same amount the other way."""
    ulysses = layout.ulysses_size
    if ulysses == 1:
        return forward, backward
    copies = 2 * shape.num_heads + 2 * max(shape.num_kv_heads, ulysses)
    sent = layout.local_length * (ulysses - 1) / ulysses * copies * shape.head_dim
    seconds = sent * shape.bytes_per_element / hardware.bytes_per_second
    seconds += 2 * hardware.latency_seconds
    return forward + seconds, backward + seconds


def choose_comm_type(
    layout: Layout,
    cu_seqlens: Any = None,
    *,
    window: int | None = None,
    causal: bool = True,
    shape: AttentionShape | None = None,
    hardware: Hardware | None = None,
) -> str:
    """What ``--cp-comm-type auto`` means for these rows: p2p, a2a, all_gather, a2a+p2p or
    a2a+all_gather, the same on every rank.

    Rules first: no ring, a2a; one document in every row and no window, p2p; rows of documents none
    of which fills half of its row, all_gather. The rest (one giant among others, windows, striped
    packed rows) by the modelled time of forward plus backward, summed over the rows.

    Args:
        cu_seqlens: boundaries of the whole row, or a list of them, one per batch row.
    """
    if layout.ring_size == 1:
        return "a2a" if layout.ulysses_size > 1 else "p2p"
    prefix = "a2a+" if layout.ulysses_size > 1 else ""
    packings = normalize_packings(cu_seqlens, layout.seq_length)
    longest = max(int(np.diff(bounds).max()) for bounds in packings)
    if window is None and all(len(bounds) == 2 for bounds in packings):
        return prefix + "p2p"
    if layout.kind != "striped" and 2 * longest <= layout.seq_length:
        return prefix + "all_gather"
    shape, hardware = shape or AttentionShape(), hardware or Hardware()
    works = [measure(layout, bounds, window=window, causal=causal) for bounds in packings]
    ring = math.fsum(ring_time(work, shape, hardware).total for work in works)
    exchange = math.fsum(exchange_time(work, shape, hardware).total for work in works)
    return prefix + ("p2p" if ring <= RING_BONUS * exchange else "all_gather")


def comm_time(
    comm_type: str, work: AttentionWork, shape: AttentionShape, hardware: Hardware
) -> StepTime:
    """Time of a communication type other than auto under the work's layout."""
    if comm_type.endswith("all_gather"):
        return exchange_time(work, shape, hardware)
    return ring_time(work, shape, hardware)
