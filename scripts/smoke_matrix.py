"""Runs the smoke matrix: trains its configs on two ranks, diagnoses each run, and checks that each shows only its own fault.

    make smoke-matrix
    python scripts/smoke_matrix.py --pictures docs/images    # also those of docs/smoke_matrix.md

Exit code 0: every run shows exactly the expected findings; 1: one does not, or did not finish.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from experiments import program
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support import smoke_matrix as matrix  # noqa: E402
from tests.support.smoke_matrix import CASES, Case, Judgement  # noqa: E402
from tests.support.wandb_file import find_wandb_file, read_history  # noqa: E402 - needs the path above
from trainer.config.load import load_config  # noqa: E402
from trainer.metrics.catalog import lookup  # noqa: E402
from trainer.tools.runs.load import load_run  # noqa: E402

CONFIGS = ROOT / "train_configs" / "diagnostics"
OUT = Path("runs/smoke_matrix")  # which is replaced
HEALTHY_OR_FINDINGS = (0, 3)
WIDTH = 140  # if stdout is not a terminal
# The key that shows each fault.
SIGNALS = {
    "diag_imbalanced_bs": "stream_mixing/active/steps_since_pick_max",
    "diag_exhaust_spike": "stream_mixing/refill/exhaust_events",
    "diag_stale_false_evict": "ledger/false_evictions/stale",
}
LEFT, TOP, RIGHT, BOTTOM = 50, 44, 440, 170  # of the plot in a picture of 450 x 206


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, help="directory of the pictures; default: that of the runs")
    options = parser.parse_args()
    begin = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    for case in CASES:
        train(case, OUT / case.name)
    diagnoses = {}
    for case in CASES:
        said = program("diagnose", OUT / case.name, "--json", codes=HEALTHY_OR_FINDINGS)
        diagnoses[case.name] = json.loads(said.stdout)
    (OUT / "diagnoses.json").write_text(json.dumps(diagnoses, indent=2) + "\n", encoding="utf-8")
    steps = load_config(CONFIGS / "healthy.toml").train.steps
    judgements = matrix.judge_all(CASES, diagnoses, steps=steps)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(verdict_table(judgements, damages(OUT)))
    program("report", *(OUT / case.name for case in CASES), "--out", OUT / "report.html", "--force")
    for name, key in SIGNALS.items():
        path = (options.pictures or OUT) / f"smoke_matrix_{name}.svg"
        path.write_text(picture(key, *(OUT / each for each in ("healthy", name))), encoding="utf-8")
    print(f"the report is in {OUT / 'report.html'}", file=sys.stderr)
    print(f"to wandb: wandb sync {OUT}/*/wandb/offline-run-*", file=sys.stderr)
    is_green, seconds = matrix.is_green(judgements), time.monotonic() - begin
    color = "green" if is_green else "RED"
    console.print(f"{color}: {len(CASES)} runs in {seconds:.0f} s", highlight=False)
    return 0 if is_green else 1


def train(case: Case, run_dir: Path) -> None:
    """Train one case; its console output goes to a file next to the run."""
    print(f"training {case.name}", file=sys.stderr, flush=True)
    overrides = [argument for override in case.overrides for argument in ("--set", override)]
    config = CONFIGS / f"{case.config_name}.toml"
    recorded = ("--set", "metrics.wandb.mode=offline")
    done = program("--nproc", 2, "--config", config, "--run-dir", run_dir, *recorded, *overrides)
    run_dir.with_suffix(".log").write_text(done.stderr, encoding="utf-8")


def damages(out: Path) -> dict[str, tuple[float, float] | None]:
    """The loss damage of each case that has a control."""
    runs = {case.name: load_run(out / case.name) for case in CASES}
    return {case.name: matrix.measure_damage(runs[case.name], runs[case.control]) for case in CASES if case.control}


def verdict_table(judgements: Sequence[Judgement], found: Mapping[str, tuple[float, float] | None]) -> Table:
    table = Table(title="Smoke matrix", title_justify="left")
    for heading in ("run", "provokes", "expected", "found", "recall loss", "of its control", "damage", ""):
        table.add_column(heading, overflow="fold")
    for judgement in judgements:
        case = judgement.case
        damage = found.get(case.name)
        cost = ("", "", "")
        if damage is not None:
            loss, control = damage
            cost = f"{loss:.3f}", f"{control:.3f} ({case.control})", f"{loss - control:+.3f} nats"
        notes = [*sorted(judgement.found), *(f"({name}: the machine)" for name in sorted(judgement.speed))]
        verdict = "right" if judgement.is_right else "WRONG"
        if not judgement.is_whole:
            verdict = "NOT WHOLE"
        expected = ", ".join(sorted(case.expected)) or "none"
        table.add_row(case.name, case.provokes, expected, ", ".join(notes) or "none", *cost, verdict)
    return table


def picture(key: str, *run_dirs: Path) -> str:
    """A key of two runs over the steps, as wandb recorded it, as SVG; a counter as its running total."""
    is_counter, curves = lookup(key).window == "sum", []
    for run_dir in run_dirs:
        rows = [(row["_step"], float(row[key])) for row in read_history(find_wandb_file(run_dir)) if key in row]
        steps, values = zip(*rows, strict=True)
        curves.append((steps, [*(accumulate(values) if is_counter else values)]))
    last, highest = (max(max(curve[axis]) for curve in curves) for axis in (0, 1))
    texts = [(8, 18, "start", f"{key}{', running total' * is_counter}"), (LEFT - 6, TOP + 4, "end", f"{highest:g}")]
    texts += [(LEFT - 6, BOTTOM + 4, "end", "0"), (LEFT, BOTTOM + 16, "middle", "0")]
    texts += [(RIGHT, BOTTOM + 16, "end", f"{last}"), ((LEFT + RIGHT) // 2, BOTTOM + 28, "middle", "optimizer step")]
    parts = [f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" stroke="#888"/>']
    for row, (run_dir, curve, color) in enumerate(zip(run_dirs, curves, ("#0072b2", "#d55e00"), strict=True)):
        scaled = ((step / last, value / max(highest, 1)) for step, value in zip(*curve, strict=True))
        points = " ".join(f"{LEFT + (RIGHT - LEFT) * x:.0f},{BOTTOM - (BOTTOM - TOP) * y:.1f}" for x, y in scaled)
        parts.append(f'<polyline points="{points}" stroke="{color}" stroke-width="1.5"/>')
        parts.append(f'<path d="M{LEFT + 8 + 90 * row} 32h20" stroke="{color}" stroke-width="3"/>')
        texts.append((LEFT + 32 + 90 * row, 36, "start", run_dir.name))
    words = [f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>' for x, y, anchor, text in texts]
    top = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 450 206" width="450" height="206" fill="none">'
    frame = '<rect width="450" height="206" fill="#fff"/>'
    text = '<g font-family="sans-serif" font-size="12" fill="#333">'
    return "\n".join([top, frame, *parts, text, *words, "</g>", "</svg>", ""])


if __name__ == "__main__":
    sys.exit(main())
