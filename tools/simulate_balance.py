"""How well each context-parallel layout and communication would run packed rows, without a GPU.

    python tools/simulate_balance.py --output balance.png
    python tools/simulate_balance.py --seq-length 128K 1M 16M --ranks 8 64 1024 --seeds 5
    python tools/simulate_balance.py --mixes web --bandwidth 12.5 --tflops 300 --ulysses 8

Rows are packed with documents of log-normal length (dense: one document), seeded. For each mix and
size the exact attention work and traffic of every layout are counted (no token is enumerated) and a
cost model turns them into times; see megatron/core/context_parallel/cost_model.py. The columns:

    work       largest over mean work of a rank (1.00: balanced)
    lock-step  compute of a ring whose every step costs its slowest rank, over ideal compute
    rows       remote KV rows a rank needs, of those in a full ring
    p2p, all_gather   forward + backward time over ideal compute, of the ring and of the exchange

each as the mean and, in brackets, the worst over the packings. Ulysses alone (a2a) is always
balanced; its row shows what its all-to-alls cost. The last row, auto, is --cp-comm-type auto with
the balanced layout. The ring is a full one: every KV row goes round. Ranks = ring x
ulysses. Whole grids (128K-16M tokens on 8-4,096 ranks) take long: a balanced deal to thousands of
ranks costs tens of seconds.
"""

import dataclasses
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from megatron.core.config.parallel import layout_multiple
from megatron.core.context_parallel.cost_model import (
    AttentionShape,
    AttentionWork,
    Hardware,
    choose_comm_type,
    comm_time,
    ideal_time,
    measure,
)
from megatron.core.context_parallel.layout import make_layout
from tools.command import Parser, run, writable

MIXES = {"web": (665.0, 1.2), "long-mix": (4900.0, 1.8), "books": (60000.0, 1.0)}
"""Median and sigma of log-normal document lengths."""
LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")
POSITIVE = (
    "seeds", "tflops", "bandwidth", "num_attention_heads", "num_query_groups", "kv_channels"
)  # fmt: skip
COLUMNS = ("work", "lock-step", "rows", "p2p", "all_gather")


def packing(mix: str, seq_length: int, seed: int) -> np.ndarray:
    """Document boundaries of one row; the last document is cut at the row's end."""
    if mix == "dense":
        return np.array([0, seq_length])
    median, sigma = MIXES[mix]
    rng = np.random.default_rng(seed)
    ends = np.zeros(1, dtype=np.int64)
    while ends[-1] < seq_length:
        lengths = np.exp(rng.normal(np.log(median), sigma, size=4096)).astype(np.int64) + 1
        ends = np.concatenate((ends, ends[-1] + np.cumsum(lengths)))
    return np.append(ends[ends < seq_length], seq_length)


@dataclasses.dataclass(frozen=True)
class Point:
    """One size of the grid."""

    seq_length: int
    ranks: int
    ulysses: int

    @property
    def name(self) -> str:
        return f"{short(self.seq_length)} x {self.ranks}"


Samples = dict[str, dict[str, list[float]]]
"""Row of the table -> column -> one value per packing."""


def simulate(
    point: Point,
    bounds: np.ndarray,
    layouts: Sequence[str],
    shape: AttentionShape,
    hardware: Hardware,
) -> dict[str, dict[str, float]]:
    """One packing on every layout: row of the table -> column -> value."""
    ring = point.ranks // point.ulysses
    rows: dict[str, dict[str, float]] = {}
    auto: dict[str, float] = {}
    for kind in layouts:
        layout = make_layout(kind, point.seq_length, ring, point.ulysses, bounds)
        rows[kind] = row_of(measure(layout, bounds), ("p2p", "all_gather"), shape, hardware)
        if kind == "balanced":
            comm = choose_comm_type(layout, bounds, shape=shape, hardware=hardware)
            column = "all_gather" if comm.endswith("all_gather") else "p2p"
            auto = {"auto": rows[kind][column]}
    if 1 < point.ranks <= shape.num_heads:
        layout = make_layout("contiguous", point.seq_length, 1, point.ranks)
        rows["a2a"] = row_of(measure(layout, bounds), ("a2a",), shape, hardware)
    return {**rows, "auto": auto} if auto else rows


def row_of(
    work: AttentionWork, comms: Sequence[str], shape: AttentionShape, hardware: Hardware
) -> dict[str, float]:
    """Columns of one layout."""
    ideal = ideal_time(work, shape, hardware).total
    values = {"work": work.balance, "lock-step": work.lock_step, "rows": work.remote_share}
    for comm in comms:
        values[comm] = comm_time(comm, work, shape, hardware).total / ideal
    return values


def collect(
    point: Point, mix: str, options: Any, shape: AttentionShape, hardware: Hardware, progress: Any
) -> Samples:
    """All packings of one mix at one size."""
    samples: Samples = {}
    for seed in range(1 if mix == "dense" else options.seeds):
        progress(point, mix, seed)
        bounds = packing(mix, point.seq_length, options.seed + seed)
        for row, values in simulate(point, bounds, options.layouts, shape, hardware).items():
            for column, value in values.items():
                samples.setdefault(row, {}).setdefault(column, []).append(value)
    return samples


def print_table(point: Point, mix: str, samples: Samples) -> None:
    """Mean and worst of each column."""
    print(f"\n{mix}: {short(point.seq_length)} tokens on {point.ranks} ranks", flush=True)
    print(f"{'layout':<12}" + "".join(f"{column:>20}" for column in COLUMNS))
    for row, columns in samples.items():
        cells = []
        for column in COLUMNS:
            values = columns.get(column)
            if row in ("a2a", "auto"):  # one time, in the last column
                values = columns[row] if column == COLUMNS[-1] else None
            cells.append(f"{cell(column, values):>20}")
        print(f"{row:<12}" + "".join(cells), flush=True)


def cell(column: str, values: list[float] | None) -> str:
    """ "mean (worst)"."""
    if not values:
        return "-"
    if column == "rows":
        return f"{100 * np.mean(values):.1f}% ({100 * np.max(values):.1f}%)"
    return f"{np.mean(values):.2f} ({np.max(values):.2f})"


def short(tokens: int) -> str:
    """1048576 -> 1M."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens % unit == 0:
            return f"{tokens // unit}{letter}"
    return str(tokens)


def tokens_of(text: str) -> int:
    """1M -> 1048576."""
    scale = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper(), 1)
    digits = text[:-1] if scale > 1 else text
    if not digits.isdigit() or int(digits) == 0:
        raise ValueError(f"--seq-length {text} must be a positive number, K and M allowed: 128K")
    return int(digits) * scale


def make_points(options: Any, num_heads: int) -> list[Point]:
    """The grid, checked."""
    points = []
    for tokens in map(tokens_of, options.seq_length):
        for ranks in options.ranks:
            if ranks < 1 or options.ulysses < 1 or ranks % options.ulysses:
                raise ValueError(
                    f"--ranks {ranks} must be a positive multiple of --ulysses {options.ulysses}"
                )
            if options.ulysses > num_heads:
                raise ValueError(
                    f"--ulysses {options.ulysses} must not exceed --num-attention-heads {num_heads}"
                )
            ring = ranks // options.ulysses
            multiple = max(layout_multiple(k, ring, options.ulysses) for k in options.layouts)
            if tokens % multiple:
                raise ValueError(
                    f"--seq-length {tokens} must be a multiple of {multiple} on --ranks {ranks}"
                )
            points.append(Point(tokens, ranks, options.ulysses))
    return points


def parse(arguments: Sequence[str] | None) -> Any:
    """The command line."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--seq-length", nargs="+", default=["1M"], metavar="TOKENS", help="K and M allowed")
    add("--ranks", nargs="+", type=int, default=[32], help="context-parallel ranks")
    add("--ulysses", type=int, default=1, help="of which Ulysses divides heads")
    add("--mixes", nargs="+", default=["dense", *MIXES], choices=["dense", *MIXES])
    add("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    add("--seeds", type=int, default=20, help="packings of each mix")
    add("--seed", type=int, default=0, help="seed of the first packing")
    add("--tflops", type=float, default=500.0, help="attention TFLOP/s of a rank")
    add("--bandwidth", type=float, default=50.0, help="GB/s of a rank in each direction")
    add("--latency", type=float, default=10.0, help="microseconds of a ring step or stage")
    add("--num-attention-heads", type=int, default=32)
    add("--num-query-groups", type=int, default=8, help="KV heads")
    add("--kv-channels", type=int, default=128, help="head dim")
    add("--output", metavar="PNG", help="draw a heat map")
    options = parser.parse(arguments)
    for name in POSITIVE:
        value = getattr(options, name)
        if not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} {value} must be a number above 0")
    for name in ("latency", "seed"):
        value = getattr(options, name)
        if not 0 <= value < math.inf:
            parser.error(f"--{name} {value} must be a number of at least 0")
    heads, groups = options.num_attention_heads, options.num_query_groups
    if heads % groups:
        parser.error(
            f"--num-attention-heads {heads} must be a multiple of --num-query-groups {groups}"
        )
    try:
        if options.output:
            writable("--output", options.output)
        options.points = make_points(options, heads)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print, draw."""
    options = parse(arguments)
    shape = AttentionShape(
        options.num_attention_heads, options.num_query_groups, options.kv_channels
    )
    hardware = Hardware(options.tflops * 1e12, options.bandwidth * 1e9, options.latency * 1e-6)
    points = options.points
    seeds = [1 if mix == "dense" else options.seeds for mix in options.mixes]
    total, done = len(points) * sum(seeds), 0
    started = time.monotonic()

    def progress(point: Point, mix: str, seed: int) -> None:
        nonlocal done
        done += 1
        end = "\r" if sys.stderr.isatty() else "\n"
        if sys.stderr.isatty() or seed == 0:
            spent = time.monotonic() - started
            what = f"[{done}/{total}] {spent:6.0f} s  {point.name} {mix} packing {seed}   "
            print(what, end=end, file=sys.stderr)

    results: dict[tuple[str, str], Samples] = {}
    for point in points:
        for mix in options.mixes:
            samples = collect(point, mix, options, shape, hardware, progress)
            results[point.name, mix] = samples
            print_table(point, mix, samples)
    if options.output:
        from tools.balance_picture import draw

        title = (
            f"Attention time over ideal compute ({options.tflops:g} TFLOP/s, "
            f"{options.bandwidth:g} GB/s, heads {shape.num_heads}:{shape.num_kv_heads} x "
            f"{shape.head_dim}); mean of {options.seeds} packings, worst in brackets"
        )
        draw(results, [point.name for point in points], options.mixes, title, options.output)
        print(f"\nwrote {options.output}")
    return 0


if __name__ == "__main__":
    run(main)
