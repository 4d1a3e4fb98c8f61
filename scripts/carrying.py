"""What carrying is worth, and what the arrangement of rows costs: the table of docs/mixing.md, "Spread".

The same model and tokens in steps of 32 rows, with documents whose next row comes 1, 4, 16 or 64 steps later, and with single
rows in shuffled order from a zero state ("single"), which carry nothing. Held-out documents are read whole.

    python scripts/carrying.py                               # text: m = 1, 2, 8, three seeds, 300 steps
    python scripts/carrying.py --steps 1200 --micros 8
    python scripts/carrying.py --recall data/smoke_matrix/recall
"""

from __future__ import annotations

import statistics
from pathlib import Path

from experiments import Results, Setting, markdown, rows_of, study_parser, train

ROWS = 32
SPREADS = ("1", "4", "16", "64", "single")
CONFIG = """
[run]
name = "carrying"

[train]
steps = {steps}
micro_batches = {m}

[data]
seq_len = {length}
max_group_cells = {cells}

[data.mixing]
batch_size = {rows}
{spread}

[[data.source]]
name = "text"
root = "{corpus}"

[eval]
every = {steps}
batches = 1000000
holdout_fraction = 0.02

[model]
dim = 96
num_layers = 2

[optimizer]
lr = 4e-3

[scheduler]
warmup_steps = 20
min_lr_ratio = 0.1
"""


def run(setting: Setting, seed: int, corpus: Path, work: Path) -> dict[str, float]:
    """Train once; the held-out loss, and the training loss of the last tenth."""
    _, steps, m, spread = setting.corpus.split()
    is_single = spread == "single"
    given = {"steps": steps, "m": m, "rows": ROWS // int(m), "cells": int(is_single), "corpus": corpus}
    given["spread"] = "" if is_single or spread == "none" else f"spread = {spread}"
    length = 6 if setting.corpus.startswith("recall") else 128
    run_dir, seconds = train(setting, seed, CONFIG.format(length=length, **given), work)
    last = rows_of(run_dir, "eval")[-1]
    trained = [row["loss"] for row in rows_of(run_dir, "train")]
    late = statistics.fmean(trained[-max(len(trained) // 10, 1) :])
    found = {"held_out": last["eval_loss"], "trained": late, "seconds": seconds}
    return found | {key: last[key] for key in last if key.startswith("eval_accuracy")}


def main() -> None:
    parser = study_parser(__doc__, "carrying")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--micros", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--spreads", nargs="+", default=SPREADS)
    parser.add_argument("--recall", type=Path, help="a key-recall corpus, instead of the text")
    args = parser.parse_args()
    name, corpus = ("recall", args.recall) if args.recall else ("text", args.text)
    results = Results(args.out)
    settings = [Setting(f"{name} {args.steps} {m} {spread}") for m in args.micros for spread in args.spreads]
    results.complete(settings, args.seeds, lambda each, seed: run(each, seed, corpus.resolve(), args.work), args.jobs)
    rows = []
    for m in args.micros:
        cells = [f"{ROWS // m} x {m}"]
        for spread in args.spreads:
            mean, error = results.mean(Setting(f"{name} {args.steps} {m} {spread}"), "held_out") or (0.0, 0.0)
            cells.append(f"{mean:.3f} +- {error:.3f}")
        rows.append(cells)
    print(markdown(("rows x m", *args.spreads), rows))


if __name__ == "__main__":
    main()
