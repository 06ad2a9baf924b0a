"""The heat map of ``simulate_balance``: attention time over ideal compute, layout by layout.

One panel per size when there are at most four (a column per mix), else one per mix (a column per
size). Colour runs from 1 (ideal, green) over 2 (yellow) to 4 and beyond (red), on a log scale; the
numbers are the mean and, in brackets, the worst.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

Samples = dict[str, dict[str, list[float]]]

AUTO = "balanced, auto"
WORST_COLOUR = 4.0


def lines_of(samples: Samples) -> dict[str, list[float]]:
    """Line label -> values: one per layout and communication."""
    lines: dict[str, list[float]] = {}
    for row, columns in samples.items():
        if row in ("a2a", "auto"):
            name = "a2a (Ulysses alone)" if row == "a2a" else AUTO
            lines[name] = columns[row]
        else:
            for comm in ("p2p", "all_gather"):
                lines[f"{row}, {comm}"] = columns[comm]
    return lines


def draw(
    results: dict[tuple[str, str], Samples],
    points: Sequence[str],
    mixes: Sequence[str],
    title: str,
    path: str,
) -> None:
    """Write the PNG.

    Args:
        results: (size, mix) -> samples.
        points, mixes: their names, in the order to draw.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_size = len(points) <= 4
    panels, columns = (points, mixes) if by_size else (mixes, points)
    cells = {key: lines_of(samples) for key, samples in results.items()}
    labels = list(dict.fromkeys(label for lines in cells.values() for label in lines))
    wide = 1 if len(panels) == 1 or len(columns) > 12 else 2
    tall = -(-len(panels) // wide)
    size = (wide * (2.6 + 0.95 * len(columns)) + 1.2, tall * (1.2 + 0.46 * len(labels)) + 0.8)
    size = (max(size[0], 9.5), size[1])
    figure, grid = pyplot.subplots(tall, wide, figsize=size, squeeze=False, layout="constrained")
    image: Any = None
    for axes, panel in zip(grid.flat, panels):
        keys = [(panel, column) if by_size else (column, panel) for column in columns]
        image = draw_panel(axes, [cells[key] for key in keys], labels, columns)
        axes.set_title(f"{panel} ranks" if by_size else panel, fontsize=11, fontweight="bold")
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    bar = figure.colorbar(image, ax=grid, shrink=0.8 / tall**0.5, pad=0.02, extend="max")
    bar.set_ticks([1, 1.1, 1.25, 1.5, 2, 3, 4], labels=["1", "1.1", "1.25", "1.5", "2", "3", "4"])
    bar.ax.minorticks_off()
    bar.set_label("time / ideal compute")
    figure.suptitle(title.replace("; ", "\n"), fontsize=11)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def draw_panel(
    axes: Any,
    lines: Sequence[dict[str, list[float]]],
    labels: Sequence[str],
    columns: Sequence[str],
) -> Any:
    """One table of coloured cells; returns its image for the colour bar."""
    means = np.full((len(labels), len(columns)), np.nan)
    for x, column in enumerate(lines):
        for y, label in enumerate(labels):
            values = column.get(label)
            if not values:
                axes.text(x, y, "-", ha="center", va="center", fontsize=8, color="grey")
                continue
            means[y, x] = np.mean(values)
            pale = 1.2 < means[y, x] < 3.2
            worst = f" ({number(max(values))})" if len(values) > 1 else ""
            axes.text(
                x,
                y,
                number(means[y, x]) + worst,
                ha="center",
                va="center",
                fontsize=8,
                color="black" if pale else "white",
                fontweight="bold" if label == AUTO else "normal",
            )
    from matplotlib.colors import LogNorm

    scale = LogNorm(1.0, WORST_COLOUR, clip=True)
    image = axes.imshow(means, cmap="RdYlGn_r", norm=scale, aspect="auto")
    axes.set_xticks(range(len(columns)), columns, fontsize=9)
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    if len(columns) > 6:
        axes.tick_params(axis="x", rotation=45)
    axes.set_xticks(np.arange(len(columns) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(labels) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="both", length=0)
    return image


def number(value: float) -> str:
    """Three digits or so."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"
