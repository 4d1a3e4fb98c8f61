"""Families of models, or optimizers, at equal parameters, tokens and data: the figures of docs/models.md.

Each is as wide as gives it the wanted number of parameters, and trains on text (`make data`) with the same number of tokens per
step. The Transformer runs with a context of one cell and of four; the others carry their state over all cells of a group. The
held-out loss is that of whole held-out documents. The better of two learning rates, on the first seed, is that of all seeds.

    python scripts/compare_families.py
    python scripts/compare_families.py --of optimizers     # of the first family

About twenty and ten minutes on two idle cores.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from experiments import Results, Setting, markdown, mean_of, rows_of, study_parser, train

from trainer.cli.parts import PARTS
from trainer.config.schema import ModelTable
from trainer.training.setup.plan import build_model, size_of

PARAMETERS = 600_000
VOCAB = 257
CELL, TOKENS_PER_BATCH = 128, 1024
LAYERS, STEPS = 3, 300
RATES = (1e-3, 3e-3)
OPTIMIZERS = {"adamw": RATES, "muon": RATES, "sgd": (0.1, 0.3)}
WIDTHS = range(32, 513, 4)
# With their heads, and cells in a row.
FAMILIES = (("rglru", 0, 1), ("gated_delta", 2, 1), ("transformer", 2, 1), ("transformer", 2, 4), ("mamba2", 0, 1))
CONFIG = """
[train]
steps = {steps}
micro_batches = 2

[data]
max_group_cells = 16

[data.mixing]
num_streams_mixed = 8

[[data.source]]
name = "python"
root = "{text}"
modalities = ["python"]

[scheduler]
name = "cosine"
warmup_steps = 50

[eval]
holdout_fraction = 0.01
batches = 100000
"""


Row = tuple[str, float, Setting]
"""What the first column says, the parameters, and the setting."""


def optimizers() -> list[Row]:
    dim = width_for("rglru", 0)
    found, parameters = [], parameters_of("rglru", 0, dim)
    for name, rate in ((name, rate) for name, rates in OPTIMIZERS.items() for rate in rates):
        own = {**sizes(dim, CELL, rate), "optimizer.name": f'"{name}"'}
        found.append((name, parameters, Setting(name, tuple(own.items()))))
    return found


def families() -> list[Row]:
    found = []
    for (family, heads, cells), rate in product(FAMILIES, RATES):
        label = f"{family}, {CELL * cells} tokens" if family == "transformer" else family
        dim, args = width_for(family, heads), f"{{heads={heads}}}" if heads else "{}"
        keys = {"model.family": f'"{family}"', "model.args": args, **sizes(dim, CELL * cells, rate)}
        found.append((label, parameters_of(family, heads, dim), Setting(label, tuple(keys.items()))))
    return found


def sizes(dim: int, length: int, rate: float) -> dict[str, object]:
    """Settings that differ between rows of the table."""
    keys = {"model.dim": dim, "model.num_layers": LAYERS, "data.seq_len": length}
    return {**keys, "data.mixing.batch_size": TOKENS_PER_BATCH // length, "optimizer.lr": rate}


def width_for(family: str, heads: int) -> int:
    """The width whose number of parameters is nearest to `PARAMETERS`."""
    return min(WIDTHS, key=lambda dim: abs(parameters_of(family, heads, dim) - PARAMETERS))


def parameters_of(family: str, heads: int, dim: int) -> float:
    """Of a model of this width; infinite where the family cannot have it."""
    table = ModelTable(family=family, dim=dim, num_layers=LAYERS, args={"heads": heads} if heads else {})
    if family == "mamba2" and dim % 16:
        return float("inf")
    with torch.device("meta"):
        return size_of(build_model(table, VOCAB, parts=PARTS))[0]


def run(setting: Setting, seed: int, text: Path, work: Path) -> dict[str, float]:
    """Train once; the held-out loss at the end, and the time."""
    run_dir, seconds = train(setting, seed, CONFIG.format(steps=STEPS, text=text), work, {"eval.every": STEPS})
    step_sec = statistics.median(row["step_time_sec"] for row in rows_of(run_dir, "train"))
    return {"eval_loss": rows_of(run_dir, "eval")[-1]["eval_loss"], "step_sec": step_sec, "seconds": seconds}


def at_the_better_rate(found: Sequence[Row], results: Results) -> list[Row]:
    """For each model, the row whose learning rate gave the lower held-out loss on the first seed."""
    rows: dict[str, list[Row]] = {}
    for row in found:
        rows.setdefault(row[0], []).append(row)
    return [min(choices, key=lambda row: float(results.of(row[2], 0)["eval_loss"])) for choices in rows.values()]


def table(found: Sequence[Row], results: Results, seeds: int) -> str:
    """A Markdown table. A seed also decides which documents are held out, so models are compared seed by seed."""
    first = f"minus {found[0][0]}'s"
    names = ("trained", "width", "parameters", "lr", "held-out loss, nats per byte", first, "seconds per step")
    rows = []

    def losses(setting: Setting) -> list[float]:
        return [results.of(setting, seed)["eval_loss"] for seed in range(seeds)]

    reference = losses(found[0][2])
    for label, number, setting in found:
        keys = dict(setting.overrides)
        loss, seconds = results.mean(setting, "eval_loss"), results.mean(setting, "step_sec")
        assert loss is not None
        assert seconds is not None
        gaps = [one - other for one, other in zip(losses(setting), reference, strict=True)]
        gap = "{:+.3f} +- {:.3f}".format(*mean_of(gaps)) if setting is not found[0][2] else ""
        known = (label, keys["model.dim"], f"{number:,.0f}", keys["optimizer.lr"])
        rows.append((*known, f"{loss[0]:.3f}", gap, f"{seconds[0]:.2f}"))
    return markdown(names, rows) + "\n"


def main() -> None:
    parser = study_parser(__doc__, "compare_families")
    parser.add_argument("--of", choices=["families", "optimizers"], default="families")
    args = parser.parse_args()
    results = Results(args.out)

    def complete(found: Sequence[Row], seeds: int) -> None:
        settings = [setting for *_, setting in found]
        results.complete(settings, seeds, lambda setting, seed: run(setting, seed, args.text, args.work), args.jobs)

    found = families() if args.of == "families" else optimizers()
    complete(found, seeds=1)
    best = at_the_better_rate(found, results)
    complete(best, args.seeds)
    print(table(best, results, args.seeds))


if __name__ == "__main__":
    main()
