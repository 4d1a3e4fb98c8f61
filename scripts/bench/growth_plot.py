"""Plots time against size on log-log scales, with a linear slope for comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt


def draw(series: Mapping[tuple[str, str], Sequence[tuple[int, float]]], path: Path) -> None:
    """Write a PNG with one panel per entry of (what grows, unit) -> [(size, value)]."""
    figure, panels = plt.subplots(1, len(series), figsize=(3.2 * len(series), 3.0), squeeze=False)
    for axes, ((what, unit), points) in zip(panels[0], series.items(), strict=True):
        sizes = [size for size, _ in points]
        values = [value for _, value in points]
        axes.loglog(sizes, values, marker="o", color="tab:blue", label="measured")
        axes.loglog(sizes, [values[0] * size / sizes[0] for size in sizes], color="0.7", linestyle=":", label="linear")
        axes.set_ylim(min(values) / 2, max(values) * 4)
        axes.set_xlabel(what)
        axes.set_ylabel(unit)
        axes.grid(alpha=0.3)
    panels[0][0].legend(loc="upper left", fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
