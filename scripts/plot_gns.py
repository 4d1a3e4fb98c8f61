"""Plots the noise scales of runs between their bounds, their batch size, and the consistency, from metrics.jsonl.

python scripts/plot_gns.py --out docs/images/gns_run.png runs/a/metrics.jsonl runs/b/metrics.jsonl --labels a b
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

Series = dict[str, list[float]]
SCALES = ("gns/b_now", "gns/b_independent")  # drawn, with their bounds
PRINTED = ("gns/b_simple", "gns/b_now", "gns/b_drawn", "gns/b_independent")
OTHERS = ("gns/consistency", "gns/consistency_se", *(f"gns/noise_from_{name}" for name in ("stream", "group", "row")))


def read(path: Path) -> Series:
    """Steps and noise scale keys of every logged training step; NaN where a key is absent. The last row of a step counts."""
    rows: dict[int, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        payload = json.loads(line)
        if payload.get("mode") == "train" and "metrics" in payload:
            rows[payload["global_step"]] = payload["metrics"]
    keys = sorted({key for row in rows.values() for key in row if key.startswith("gns/")})
    steps = sorted(rows)
    return {"step": [float(s) for s in steps], **{key: [rows[s].get(key, math.nan) for s in steps] for key in keys}}


def band(axes: Axes, steps: list[float], value: list[float], low: list[float], high: list[float], label: str) -> None:
    """Plot the value between its bounds."""
    (line,) = axes.plot(steps, value, label=label, linewidth=1.2)
    axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def median_of(values: list[float]) -> str:
    """Median of the known values, and their number."""
    known = [v for v in values if not math.isnan(v)]
    return f"{statistics.median(known):.2f} (in {len(known)} of {len(values)} rows)" if known else "absent"


def main() -> None:
    """Plot, and print the medians of the first and the last third of each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path, nargs="+")
    parser.add_argument("--labels", nargs="+", help="one per run")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    labels = args.labels or [path.parent.name for path in args.metrics]
    figure, panels = plt.subplots(3, 1, figsize=(7.0, 7.6), sharex=True, layout="constrained")
    runs = [read(path) for path in args.metrics]
    for series, label in zip(runs, labels, strict=True):
        steps, unknown = series["step"], [math.nan] * len(series["step"])
        for axes, key in zip(panels, SCALES, strict=False):
            value, low, high = (series.get(f"{key}{end}", unknown) for end in ("", "_low", "_high"))
            band(axes, steps, value, low, high, label)
        value, error = series["gns/consistency"], series["gns/consistency_se"]
        lower, upper = ([v + sign * 2 * e for v, e in zip(value, error, strict=True)] for sign in (-1, 1))
        band(panels[2], steps, value, lower, upper, label)
        third = len(steps) // 3
        for key in (*(f"{scale}{end}" for scale in PRINTED for end in ("", "_low", "_high")), *OTHERS):
            if key in series:
                first, last = median_of(series[key][:third]), median_of(series[key][-third:])
                print(f"{label} {key}: first third {first}, last {last}")
    panels[0].plot(runs[0]["step"], runs[0]["gns/b_big"], color="grey", linewidth=0.8, label="batch of the run")
    for axes, key in zip(panels, SCALES, strict=False):
        axes.set(ylabel=f"{key}, sequences", yscale="log")
    panels[0].legend()
    panels[2].axhline(1.0, color="grey", linewidth=0.8)
    panels[2].set(xlabel="step", ylabel="gns/consistency", ylim=(-0.5, 2.5))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
