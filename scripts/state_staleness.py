"""What carried states are worth and how stale they are, against everything that could matter: the table of docs/ledger.md.

Trains small runs on key recall (`train data synth key-recall`) and on text (`make data`), reads the probes' keys from their
metrics.jsonl, and keeps the means in a JSON file, so that a second call runs only what is missing.

    python scripts/state_staleness.py --plot docs/images/state_staleness.png

A run takes ten to thirty seconds of one core; all of them about a quarter of an hour on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUN_LIMIT_SEC = 1200
PROBES = ("state_age", "state_drift", "carry_gain", "stale_gap")
TEXT, RECALL = "text", "key recall"
# Constant after the warm-up: with a decaying learning rate, drift would be that of an unknown mixture of rates.
SHARED = """
[scheduler]
name = "constant"
warmup_steps = 20

[gns]
enabled = false

[metrics]
log_interval = 10
stdout = "off"

[eval]
holdout_fraction = 0.05
batches = 32
"""
CONFIGS = {
    TEXT: """
[train]
steps = {steps}
device = "cpu"

[data]
seq_len = 64
max_group_cells = 16

[data.mixing]
num_streams_mixed = 32
batch_size = 8

[[data.source]]
name = "python"
root = "{text}"
modalities = ["python"]

[model]
dim = 96
num_layers = 2

[optimizer]
lr = 3e-3
""",
    RECALL: """
[train]
steps = {steps}
device = "cpu"

[data]
seq_len = 6
max_group_cells = 16

[data.mixing]
num_streams_mixed = 32
batch_size = 8

[[data.source]]
name = "recall"
root = "{recall}"

[model]
dim = 96
num_layers = 2

[optimizer]
lr = 3e-3
weight_decay = 0.0
""",
}
STEPS = {TEXT: 320, RECALL: 480}
K, LR, BURN_IN, TBPTT, WIPE = (
    "data.mixing.num_streams_mixed",
    "optimizer.lr",
    "ledger.burn_in",
    "train.tbptt_cells",
    "ledger.wipe_mode",
)


@dataclass(frozen=True)
class Setting:
    """One config: the corpus's, with some keys changed."""

    corpus: str
    overrides: tuple[tuple[str, object], ...] = ()

    @property
    def name(self) -> str:
        """In the file of results."""
        return "; ".join([self.corpus, *(f"{key}={value}" for key, value in self.overrides)])


@dataclass(frozen=True)
class Axis:
    """A table: what is varied, and around what."""

    title: str
    column: str
    settings: Sequence[tuple[str, Setting]]
    """What the first column says, and the setting."""


def axes() -> list[Axis]:
    """All tables. Settings that several of them share run once."""
    return [
        *_axes_of(TEXT, cell=64, rates=(3e-4, 1e-3, 3e-3, 1e-2), burn_ins=(0, 8, 32, 63)),
        *_axes_of(RECALL, cell=6, rates=(3e-4, 1e-3, 3e-3), burn_ins=(0, 2, 5)),
    ]


def _axes_of(corpus: str, *, cell: int, rates: Sequence[float], burn_ins: Sequence[int]) -> Iterator[Axis]:
    base = {K: 32, LR: 3e-3, BURN_IN: 0, TBPTT: 1}

    def at(**changed: object) -> Setting:
        return Setting(corpus, tuple((key, value) for key, value in changed.items() if base.get(key) != value))

    def by(key: str, values: Sequence[float], **others: object) -> list[tuple[str, Setting]]:
        return [(f"{value:g}", at(**others, **{key: value})) for value in values]

    yield Axis(f"{corpus}: streams in flight", "K", by(K, (2, 8, 32)))
    yield Axis(f"{corpus}: learning rate, K = 32", "lr", by(LR, rates))
    wipes = {
        "lru": at(),
        "full, every 50 steps": at(**{WIPE: '"full"', "ledger.wipe_every": 50}),
        "periodic_stale, 20 steps": at(**{WIPE: '"periodic_stale"', "ledger.stale_threshold": 20}),
    }
    yield Axis(f"{corpus}: wipe mode, K = 32", "ledger", list(wipes.items()))
    title = f"{corpus}: burn-in, K = 32, lr {rates[-1]:g}, cells of {cell}"
    yield Axis(title, "r", by(BURN_IN, burn_ins, **{LR: rates[-1]}))
    cells = [(f"{k}", at(**{TBPTT: k}, **({"data.mixing.batch_size": 8 // k} if k > 1 else {}))) for k in (1, 2, 4, 8)]
    yield Axis(f"{corpus}: gradient through k cells, K = 32, the same tokens per step", "k", cells)


def train(name: str, config: str, sets: Mapping[str, object], work: Path) -> tuple[list[dict[str, Any]], float]:
    """Train once in a directory of `work`; the rows of its metrics.jsonl, and the seconds that it took.

    Raises:
        RuntimeError: the run failed.
    """
    folder = f"{zlib.crc32(name.encode()):08x}"
    path, run_dir = work / f"{folder}.toml", work / folder
    shutil.rmtree(run_dir, ignore_errors=True)  # of a call that was cut short
    path.write_text(config, encoding="utf-8")
    overrides = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "--config", str(path), "--run-dir", str(run_dir), *overrides],
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_SEC,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name}:\n{done.stderr[-2000:]}")
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], time.perf_counter() - began


def run(setting: Setting, seed: int, folders: Mapping[str, Path], work: Path) -> dict[str, float]:
    """Train once; the means of the probes over the second half of the run, and the losses at its end."""
    steps = STEPS[setting.corpus]
    sets = {
        "run.seed": seed,
        "eval.every": steps,
        "ledger.capacity": 4096,
        "ledger.probe_every": 10,
        "ledger.probe_cells": 16,
        **dict(setting.overrides),
    }
    config = CONFIGS[setting.corpus].format(steps=steps, **folders) + SHARED
    rows, seconds = train(f"{setting.name}, seed {seed}", config, sets, work)
    train_rows = [row["metrics"] for row in rows if row.get("mode") == "train" and row["global_step"] > steps / 2]
    found = {"seconds": seconds, "loss": statistics.fmean(row["loss"] for row in train_rows)}
    for probe in PROBES:
        values = [row[f"ledger/{probe}"] for row in train_rows if f"ledger/{probe}" in row]
        if values:
            found[probe] = statistics.fmean(values)
    found["eval_loss"] = held_out_loss(rows)
    return found


def held_out_loss(rows: Sequence[Mapping[str, Any]]) -> float:
    """Of the last evaluation."""
    return next(float(row["metrics"]["eval_loss"]) for row in reversed(rows) if row.get("mode") == "eval")


class Results:
    """Means by setting and seed, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, dict[str, dict[str, float]]] = (
            json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        )

    def missing(self, settings: Sequence[Setting], seeds: int) -> list[tuple[Setting, int]]:
        """What has not run yet: all settings of one seed before the next seed."""
        return [
            (setting, seed)
            for seed in range(seeds)
            for setting in settings
            if str(seed) not in self._found.get(setting.name, {})
        ]

    def add(self, setting: Setting, seed: int, found: dict[str, float]) -> None:
        """Keep one run's means."""
        self._found.setdefault(setting.name, {})[str(seed)] = found
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._found, indent=1) + "\n", encoding="utf-8")

    def value(self, setting: Setting, seed: int, key: str) -> float | None:
        """Of one run; None if it has not run."""
        return self._found.get(setting.name, {}).get(str(seed), {}).get(key)

    def mean(self, setting: Setting, key: str) -> tuple[float, float] | None:
        """(mean, standard error over the seeds); None if no run has the key."""
        values = [found[key] for found in self._found.get(setting.name, {}).values() if key in found]
        if not values:
            return None
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return statistics.fmean(values), error


COLUMNS = (
    ("state_age", "age, steps", ".1f"),
    ("state_drift", "drift", ".3f"),
    ("carry_gain", "gain, nats", ".4f"),
    ("stale_gap", "gap, nats", ".4f"),
    ("loss", "training loss", ".4f"),
    ("eval_loss", "held-out loss", ".4f"),
    ("seconds", "seconds", ".0f"),
)


def table(axis: Axis, results: Results) -> str:
    """A Markdown table: mean +- standard error over the seeds."""
    lines = [
        f"**{axis.title}**",
        "",
        f"| {axis.column} | {' | '.join(name for _, name, _ in COLUMNS)} |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for label, setting in axis.settings:
        cells = []
        for key, _, form in COLUMNS:
            found = results.mean(setting, key)
            if found is None:
                cells.append("")
            elif key == "seconds" or math.isnan(found[1]):
                cells.append(f"{found[0]:{form}}")
            else:
                cells.append(f"{found[0]:{form}} +- {found[1]:{form}}")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(path: Path, found: Sequence[Axis], results: Results) -> None:
    """Drift against age; the gap as a share of the gain against the learning rate and burn-in; held-out loss against k."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator

    figure, panels = plt.subplots(2, 2, figsize=(9.0, 6.4), layout="constrained")
    wanted = (
        ("streams in flight", "state_drift", "drift of the stored state", "K, streams in flight"),
        ("learning rate", "gap_share", "stale gap / carry gain", "learning rate"),
        ("burn-in", "gap_share", "stale gap / carry gain", "burn-in, share of a cell"),
        ("gradient through", "eval_loss", "held-out loss over that of k = 1", "k, cells of gradient"),
    )
    for axes, (kind, key, y_label, x_label) in zip(panels.flat, wanted, strict=True):
        ticks: set[float] = set()
        for axis in found:
            corpus, _, rest = axis.title.partition(": ")
            if not rest.startswith(kind):
                continue
            xs = [
                float(label) / ((64 if corpus == TEXT else 6) if kind == "burn-in" else 1) for label, _ in axis.settings
            ]
            points = [_point(results, setting, key) for _, setting in axis.settings]
            first = points[0][0] if key == "eval_loss" else 1.0
            ys, errors = ([each[part] / first for each in points] for part in (0, 1))
            axes.errorbar(xs, ys, yerr=errors, marker="o", markersize=3, linewidth=1.0, label=corpus)
            ticks.update(xs)
        if kind in ("streams in flight", "learning rate"):
            axes.set_xscale("log")
            axes.xaxis.set_minor_locator(NullLocator())
        if kind != "burn-in":
            axes.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
            axes.set_xticklabels([f"{tick:g}" for tick in sorted(ticks)])
        axes.axhline(1.0 if kind == "gradient through" else 0.0, color="grey", linewidth=0.6)
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _point(results: Results, setting: Setting, key: str) -> tuple[float, float]:
    """(mean, standard error) of a key; NaN if no run has it. Of a share, the gain's own error is left out."""
    nothing = (math.nan, math.nan)
    if key != "gap_share":
        return results.mean(setting, key) or nothing
    gap, gain = results.mean(setting, "stale_gap") or nothing, results.mean(setting, "carry_gain") or nothing
    return gap[0] / gain[0], gap[1] / abs(gain[0])


def main() -> None:
    """Run what is missing, print the tables, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path("data/pytext"), help="made by `make data`")
    parser.add_argument("--out", type=Path, default=Path("build/state_staleness.json"), help="the means, kept")
    parser.add_argument("--work", type=Path, default=Path("build/state_staleness"), help="directory of the runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one core each")
    parser.add_argument("--only", default="", help="only the tables whose title contains this")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if not args.text.is_dir():
        raise SystemExit(f"no corpus in {args.text}; make it with: make data")
    args.work.mkdir(parents=True, exist_ok=True)
    recall = args.work / "recall"
    if not recall.exists():
        command = ["data", "synth", "key-recall", "--out", str(recall), "--streams", "64"]
        subprocess.run(
            [sys.executable, "-m", "trainer", *command], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True
        )
    folders = {"text": args.text, "recall": recall}
    found, results = [axis for axis in axes() if args.only in axis.title], Results(args.out)
    settings = list(dict.fromkeys(setting for axis in found for _, setting in axis.settings))
    missing = results.missing(settings, args.seeds)

    def one(job: tuple[Setting, int]) -> tuple[Setting, int, dict[str, float]]:
        return *job, run(*job, folders, args.work)

    with ThreadPoolExecutor(args.jobs) as pool:
        for number, (setting, seed, means) in enumerate(pool.map(one, missing), start=1):
            results.add(setting, seed, means)
            text = ", ".join(f"{key} {value:.4g}" for key, value in means.items())
            print(f"{number} of {len(missing)}: {setting.name}, seed {seed}: {text}", file=sys.stderr, flush=True)
    for axis in found:
        print(table(axis, results))
    if args.plot:
        plot(args.plot, found, results)


if __name__ == "__main__":
    main()
