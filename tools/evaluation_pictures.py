"""The two pictures of ``evaluate``: loss over position, and the passkey grid (depth x length)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron.training.long_context_eval.position_loss import PositionLoss
from megatron.training.long_context_eval.retrieval import RetrievalGrid


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_position_losses(
    results: Mapping[str, PositionLoss],
    trained: Mapping[str, int],
    path: Path,
    *,
    title: str,
) -> None:
    """One curve a model.

    Args:
        results: by model.
        trained: the sequence length of each model's last stage; marked as vertical lines.
        path: PNG to write.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8.5, 5), layout="constrained")
    for name, result in results.items():
        middles = [(bucket.low + bucket.high) / 2 for bucket in result.buckets]
        losses = np.array([bucket.loss for bucket in result.buckets])
        errors = np.nan_to_num(np.array([bucket.error for bucket in result.buckets]))
        (line,) = axes.plot(middles, losses, "o-", markersize=4, linewidth=1.5, label=name)
        axes.fill_between(
            middles, losses - errors, losses + errors, color=line.get_color(), alpha=0.2
        )
    longest = max(result.length for result in results.values())
    for length in sorted({value for value in trained.values() if value < longest}):
        axes.axvline(length, color="gray", linestyle="--", linewidth=1)
        axes.annotate(
            f"trained to {length:,}",
            (length, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -12),
            textcoords="offset points",
            fontsize=8,
            color="gray",
        )
    axes.set_xlim(0, longest)
    axes.set_xlabel("position in the document (tokens)")
    axes.set_ylabel("loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    axes.set_title(title, fontsize=11)
    _save(pyplot, figure, path)


def draw_grids(grids: Mapping[str, RetrievalGrid], path: Path, *, title: str) -> None:
    """A panel a model: length to the right, depth downward, colour and number the accuracy."""
    pyplot = _pyplot()
    first = next(iter(grids.values()))
    wide = max(3.6, 1.2 + 0.75 * len(first.lengths))
    figure, panels = pyplot.subplots(
        1,
        len(grids),
        figsize=(wide * len(grids) + 1.2, 1.8 + 0.42 * len(first.depths)),
        squeeze=False,
        layout="constrained",
    )
    image: Any = None
    for axes, (name, grid) in zip(panels[0], grids.items(), strict=True):
        values = np.array(grid.accuracy).T
        image = axes.imshow(values, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(grid.lengths)), [f"{length:,}" for length in grid.lengths])
        axes.set_yticks(range(len(grid.depths)), [f"{depth:.0%}" for depth in grid.depths])
        for (y, x), value in np.ndenumerate(values):
            colour = "black" if 0.15 < value < 0.85 else "white"
            axes.text(x, y, f"{value:.0%}", ha="center", va="center", fontsize=9, color=colour)
        axes.set_xlabel("length (tokens)")
        axes.set_title(name, fontsize=10)
    panels[0][0].set_ylabel("depth of the key")
    figure.colorbar(image, ax=panels, label="all digits right")
    figure.suptitle(title, fontsize=11)
    _save(pyplot, figure, path)


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
