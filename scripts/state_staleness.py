"""What carried states are worth and how stale they are, against everything that could matter: the table of docs/ledger.md.

Trains small runs on key recall (`train data synth key-recall`) and on text (`make data`), reads the probes' keys from their
metrics.jsonl, and keeps the means in a JSON file.

    python scripts/state_staleness.py

A run takes ten to thirty seconds of one core; all of them about a quarter of an hour on two idle cores.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments import Results, Setting, markdown, program, rows_of, study_parser, train

PROBES = ("state_age", "state_drift", "carry_gain", "stale_gap")
TEXT, RECALL = "text", "key recall"
# Constant after the warm-up: with a decaying learning rate, drift would be that of an unknown mixture of rates.
CONFIG = """
[train]
steps = {steps}

[data]
seq_len = {cell}
max_group_cells = 16

[data.mixing]
num_streams_mixed = 32
batch_size = 8

[[data.source]]
name = "documents"
root = "{root}"

[model]
dim = 96
num_layers = 2

[optimizer]
lr = 3e-3

[scheduler]
name = "constant"
warmup_steps = 20

[eval]
holdout_fraction = 0.05
batches = 32
"""
CELLS = {TEXT: 64, RECALL: 6}
OWN: Mapping[str, Mapping[str, object]] = {
    TEXT: {"data.source.0.modalities": '["python"]'},
    RECALL: {"optimizer.weight_decay": 0.0},
}
STEPS = {TEXT: 320, RECALL: 480}
K, LR, TBPTT = "data.mixing.num_streams_mixed", "optimizer.lr", "train.tbptt_cells"
WIPE = "ledger.wipe_mode"


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
        *_axes_of(TEXT, rates=(3e-4, 1e-3, 3e-3, 1e-2)),
        *_axes_of(RECALL, rates=(3e-4, 1e-3, 3e-3)),
    ]


def _axes_of(corpus: str, *, rates: Sequence[float]) -> Iterator[Axis]:
    base = {K: 32, LR: 3e-3, TBPTT: 1}

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
    cells = [(f"{k}", at(**{TBPTT: k}, **({"data.mixing.batch_size": 8 // k} if k > 1 else {}))) for k in (1, 2, 4, 8)]
    yield Axis(f"{corpus}: gradient through k cells, K = 32, the same tokens per step", "k", cells)


def run(setting: Setting, seed: int, folders: Mapping[str, Path], work: Path) -> dict[str, float]:
    """Train once; the means of the probes over the second half of the run, and the losses at its end."""
    steps = STEPS[setting.corpus]
    sets = {
        "eval.every": steps,
        "ledger.capacity": 4096,
        "ledger.probe_every": 10,
        "ledger.probe_cells": 16,
        **OWN[setting.corpus],
    }
    config = CONFIG.format(steps=steps, cell=CELLS[setting.corpus], root=folders[setting.corpus])
    run_dir, seconds = train(setting, seed, config, work, sets)
    rows = [row for row in rows_of(run_dir, "train") if row["global_step"] > steps / 2]
    found = {"seconds": seconds, "loss": statistics.fmean(row["loss"] for row in rows)}
    for probe in PROBES:
        values = [row[f"ledger/{probe}"] for row in rows if f"ledger/{probe}" in row]
        if values:
            found[probe] = statistics.fmean(values)
    return {**found, "eval_loss": rows_of(run_dir, "eval")[-1]["eval_loss"]}


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
    rows = []
    for label, setting in axis.settings:
        cells = [label]
        for key, _, form in COLUMNS:
            found = results.mean(setting, key)
            if found is None:
                cells.append("")
            elif key == "seconds" or math.isnan(found[1]):
                cells.append(f"{found[0]:{form}}")
            else:
                cells.append(f"{found[0]:{form}} +- {found[1]:{form}}")
        rows.append(cells)
    return f"**{axis.title}**\n\n{markdown([axis.column, *(name for _, name, _ in COLUMNS)], rows)}\n"


def main() -> None:
    """Run what is missing, and print the tables."""
    parser = study_parser(__doc__, "state_staleness")
    parser.add_argument("--only", default="", help="only the tables whose title contains this")
    args = parser.parse_args()
    recall = args.work / "recall"
    if not recall.exists():
        program("data", "synth", "key-recall", "--out", str(recall), "--streams", "64")
    folders = {TEXT: args.text, RECALL: recall}
    found, results = [axis for axis in axes() if args.only in axis.title], Results(args.out)
    settings = [setting for axis in found for _, setting in axis.settings]
    results.complete(settings, args.seeds, lambda setting, seed: run(setting, seed, folders, args.work), args.jobs)
    for axis in found:
        print(table(axis, results))


if __name__ == "__main__":
    main()
