"""Whether a batch that grows saves optimizer steps: see docs/gns.md, "Letting the batch grow".

For each seed three runs of the program on text (`make data`), with the same tokens, the same peak learning rate and a cosine
over tokens: a constant batch; a batch that is planned to double after 60 % of the tokens; and one that grows by itself
("auto"). All begin with the batch of the constant run, and their rate is its best of a grid on the first seed. The bar: the
held-out loss of the constant run, in at least 15 % fewer optimizer steps.

    python scripts/batch_growth.py                    # 5 seeds, 17 runs, about a quarter of an hour on one idle core
    python scripts/batch_growth.py --seeds 1 --lr 8e-3

Results are kept in a file: the script can be stopped and started again.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from experiments import Results, Setting, markdown, steps_to, study_parser, train

from trainer.tools.runs.load import load_run

TOKENS, START = 1_000_000, 2
CONSTANT, PLANNED, AUTO = "constant", "planned", "auto"
SIZES: Mapping[str, str] = {
    CONSTANT: f"{START}",
    PLANNED: f'{{ schedule = "step", unit = "tokens", points = {{ 0 = {START}, {TOKENS * 3 // 5} = {2 * START} }}, '
    'lr = "sqrt" }',
    AUTO: f'{{ schedule = "auto", start = {START}, max = {8 * START}, multiple = 4.0, every = 100, lr = "sqrt" }}',
}
RATES = (4e-3, 8e-3, 1.6e-2)
BAR = 0.15
CONFIG = """
[run]
name = "growth"

[train]
tokens = {tokens}
micro_batches = {size}

[data]
seq_len = 128
max_group_cells = 32

[data.mixing]
num_streams_mixed = 64
batch_size = 4

[[data.source]]
name = "text"
root = "{corpus}"

[eval]
every = 50
batches = 64
holdout_fraction = 0.02

[model]
dim = 64
num_layers = 2

[scheduler]
name = "cosine"
warmup_tokens = 50000
min_lr_ratio = 0.1
"""


@dataclass(frozen=True)
class Curve:
    """A run's held-out loss."""

    steps: list[int]  # of the evaluations, the last step among them
    losses: list[float]  # nats per byte
    changes: list[tuple[int, int]]  # the first step with another number of micro-batches, and that number
    tokens: int


def run(setting: Setting, seed: int, text: Path, work: Path) -> dict[str, object]:
    """Train once; its `Curve`."""
    config = CONFIG.format(tokens=TOKENS, size=SIZES[setting.corpus], corpus=text)
    record = load_run(train(setting, seed, config, work, {"gns.enabled": "true"})[0])
    steps, losses = record.evals.column("eval_loss")
    changes = {int(e["global_step"]): int(e["to"]) for e in record.events if e.get("event") == "micro_batches"}
    tokens = int(record.train.column("tokens_seen")[1][-1])
    return asdict(Curve(list(steps), list(losses), sorted(changes.items()), tokens))


def report(curves: Mapping[str, Sequence[Curve]]) -> None:
    """Print the table, and whether the bar is met."""
    columns = ("seed", "batch", "steps", "tokens", "held-out loss", "steps to the constant run's loss", "of its steps")
    rows = []
    saved: dict[str, list[float | None]] = {name: [] for name in curves if name != CONSTANT}
    for seed, constant in enumerate(curves[CONSTANT]):
        for name, of_seeds in curves.items():
            curve = of_seeds[seed]
            reached = steps_to(constant.losses[-1], curve.steps, curve.losses)
            share = None if reached is None else reached / constant.steps[-1]
            sizes = ", ".join([str(START), *(f"{m} from step {step:,}" for step, m in map(tuple, curve.changes))])
            if name != CONSTANT:
                saved[name].append(None if share is None else 1.0 - share)
            when = ("never", "") if reached is None else (f"{reached:,.0f}", f"{share:.0%}")
            cells = (seed, name, f"{curve.steps[-1]:,}", f"{curve.tokens:,}", f"{curve.losses[-1]:.4f}")
            rows.append((*cells, *when, sizes))
    print(markdown((*columns, "micro-batches"), rows))
    for name, found in saved.items():
        pairs = list(zip(curves[name], curves[CONSTANT], strict=True))
        differences = [own.losses[-1] - flat.losses[-1] for own, flat in pairs]
        spread = f" (standard deviation {statistics.stdev(differences):.4f})" if len(differences) > 1 else ""
        fewer = [1 - own.steps[-1] / flat.steps[-1] for own, flat in pairs]
        known = [each for each in found if each is not None]
        met = len(known) == len(found) and statistics.fmean(known) >= BAR
        text = f"{statistics.fmean(known):.1%} fewer steps on average" if known else "no seed"
        print(
            f"{name}: reaches the constant run's loss in {len(known)} of {len(found)} seeds, {text}; at equal tokens "
            f"{statistics.fmean(fewer):.1%} fewer steps, held-out loss {statistics.fmean(differences):+.4f}{spread}: "
            f"the bar of {BAR:.0%} is {'met' if met else 'not met'}"
        )
    print(f"{platform.platform()}, torch {torch.__version__}")


def main() -> None:
    parser = study_parser(__doc__, "batch_growth")
    parser.set_defaults(seeds=5, jobs=1)
    parser.add_argument("--lr", type=float, help="peak learning rate of all runs, instead of the best of a grid")
    args = parser.parse_args()
    results = Results(args.out)

    def curves(settings: Sequence[Setting], seeds: int) -> list[list[Curve]]:
        text = args.text.resolve()
        results.complete(settings, seeds, lambda setting, seed: run(setting, seed, text, args.work), args.jobs)
        return [[Curve(**results.of(setting, seed)) for seed in range(seeds)] for setting in settings]

    lr = args.lr
    if lr is None:
        tried = curves([Setting(CONSTANT, (("optimizer.lr", rate),)) for rate in RATES], 1)
        lr = min(zip(RATES, tried, strict=True), key=lambda each: each[1][0].losses[-1])[0]
    print(f"peak learning rate {lr:g}")
    found = curves([Setting(name, (("optimizer.lr", lr),)) for name in SIZES], args.seeds)
    report(dict(zip(SIZES, found, strict=True)))


if __name__ == "__main__":
    main()
