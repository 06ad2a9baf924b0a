"""The length histogram and the tokens in long documents, as a picture."""

import numpy as np

from megatron.core.datasets.preprocessing.inspection import (
    Int64Array,
    length_histogram,
    longer_than,
)

_POINTS = 400


def short_number(value: int) -> str:
    """1024 -> 1K, 1048576 -> 1M; below that as it is."""
    for size, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if value >= size and value % size == 0:
            return f"{value // size}{letter}"
    return str(value)


def plot_lengths(lengths: dict[str, Int64Array], path: str) -> None:
    """Write a PNG: left documents by length, right the share of tokens in longer documents.

    Args:
        lengths: tokens of each document, by name of the corpus.
        path: of the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    longest = max((int(each.max()) for each in lengths.values() if len(each)), default=1)
    ticks = _ticks(longest)
    width = 0.8 / max(len(lengths), 1)
    for number, (name, each) in enumerate(lengths.items()):
        buckets = [bucket for bucket in length_histogram(each) if bucket.low]
        places = [np.log2(bucket.low) + 0.1 + width * (number + 0.5) for bucket in buckets]
        left.bar(places, [bucket.documents for bucket in buckets], width, label=name)
        limits = np.unique(np.geomspace(1, max(longest, 2), _POINTS).astype(np.int64))
        shares = [100 * row.share for row in longer_than(each, [int(limit) for limit in limits])]
        right.plot(np.log2(limits), shares, label=name)
    left.set_ylabel("documents")
    left.set_xlabel("tokens in the document (a bar: from a tick to the next power of two)")
    right.set_ylabel("% of all tokens")
    right.set_xlabel("in documents longer than this many tokens")
    right.set_ylim(0, 103)
    for axes in (left, right):
        axes.set_xticks([np.log2(tick) for tick in ticks], [short_number(tick) for tick in ticks])
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    left.legend(frameon=False)
    figure.savefig(path, dpi=120)


def _ticks(longest: int) -> list[int]:
    top = max(int(longest).bit_length(), 1)
    step = 1 if top <= 11 else 2
    return [1 << power for power in range(0, top + 1, step)]
