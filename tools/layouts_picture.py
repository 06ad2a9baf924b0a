"""The picture of ``benchmark_layouts``: tokens per second of each layout and communication."""

from collections.abc import Sequence
from typing import Any

COLOURS = {
    "contiguous": "#8c8c8c",
    "zigzag": "#4c72b0",
    "striped": "#dd8452",
    "balanced": "#55a868",
    "any": "#8172b3",
}


def draw(rows: Sequence[dict[str, Any]], base: str, title: str, path: str) -> None:
    """Write a PNG: bars from the fastest down; the hatched part is what exposed wait costs.

    Args:
        rows: of the table, fastest first.
        base: name of the trial that speedups refer to.
        title: what was run.
        path: file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=(10, 1.6 + 0.34 * len(rows)), layout="constrained")
    speeds = [row["tokens_per_second"] for row in rows]
    places = list(range(len(rows)))
    colours = [COLOURS[row["trial"].split()[0]] for row in rows]
    axes.barh(places, speeds, color=colours)
    lost = [speed * row["exposed_share"] for speed, row in zip(speeds, rows)]
    starts = [speed - part for speed, part in zip(speeds, lost)]
    axes.barh(places, lost, left=starts, color="none", edgecolor="white", hatch="////", linewidth=0)
    least = [speed - row["step_seconds"] * speed / row["step_seconds_most"]
             for speed, row in zip(speeds, rows)]  # fmt: skip
    most = [row["step_seconds"] * speed / row["step_seconds_least"] - speed
            for speed, row in zip(speeds, rows)]  # fmt: skip
    axes.errorbar(speeds, places, xerr=[least, most], fmt="none", ecolor="black", capsize=2)
    reach = max(speed + part for speed, part in zip(speeds, most))
    for place, row in zip(places, rows):
        text = f"{row['speedup']:.2f}x, balance {row['balance']:.2f}"
        axes.text(reach * 1.02, place, text, va="center", fontsize=8)
    baseline = next(row["tokens_per_second"] for row in rows if row["trial"] == base)
    axes.axvline(baseline, color="black", linestyle=":", linewidth=1)
    names = [row["trial"] + ("  (baseline)" if row["trial"] == base else "") for row in rows]
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, reach * 1.25)
    axes.set_xlabel("tokens per second (bars: median; lines: slowest and fastest step)")
    shown = list(dict.fromkeys(row["trial"].split()[0] for row in rows))
    handles = [Patch(color=COLOURS[kind], label=kind) for kind in shown]
    handles.append(Patch(facecolor="#cccccc", edgecolor="white", hatch="////", label="waiting"))
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=len(handles))
    axes.set_title(title, fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
