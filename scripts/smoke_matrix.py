"""Runs the smoke matrix: trains its configs on two ranks, diagnoses each run, and checks that each shows only its own fault.

    make smoke-matrix

Exit code 0: every run shows exactly the expected findings; 1: one does not, or did not finish.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments import program
from rich.console import Console
from rich.table import Table

from trainer.config.load import load_config
from trainer.tools.diagnostics.smoke_matrix import CASES, Case, Judgement, is_green, judge_all, measure_damage
from trainer.tools.runs.load import load_run

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "train_configs" / "diagnostics"
HEALTHY_OR_FINDINGS = (0, 3)
WIDTH = 140  # if stdout is not a terminal


def main() -> int:
    """Run everything; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/smoke_matrix"), help="directory of the runs, which is replaced"
    )
    parser.add_argument("--nproc", type=int, default=2, help="ranks")
    options = parser.parse_args()
    begin = time.monotonic()
    if options.out.exists():
        shutil.rmtree(options.out)
    options.out.mkdir(parents=True)
    for case in CASES:
        train(case, options.out / case.name, nproc=options.nproc)
    diagnoses = {}
    for case in CASES:
        said = program("diagnose", options.out / case.name, "--json", codes=HEALTHY_OR_FINDINGS)
        diagnoses[case.name] = json.loads(said.stdout)
    (options.out / "diagnoses.json").write_text(json.dumps(diagnoses, indent=2) + "\n", encoding="utf-8")
    steps = load_config(CONFIGS / "healthy.toml").train.steps
    judgements = judge_all(CASES, diagnoses, steps=steps)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(verdict_table(judgements, damages(options.out)))
    program("report", *(options.out / case.name for case in CASES), "--out", options.out / "report.html", "--force")
    print(f"the report is in {options.out / 'report.html'}", file=sys.stderr)
    print(f"to wandb: wandb sync {options.out}/*/wandb/offline-run-*", file=sys.stderr)
    green = is_green(judgements)
    console.print(
        f"{'green' if green else 'RED'}: {len(CASES)} runs in {time.monotonic() - begin:.0f} s", highlight=False
    )
    return 0 if green else 1


def train(case: Case, run_dir: Path, *, nproc: int) -> None:
    """Train one case; its console output goes to a file next to the run."""
    print(f"training {case.name}", file=sys.stderr, flush=True)
    overrides = [argument for override in case.overrides for argument in ("--set", override)]
    config = CONFIGS / f"{case.config_name}.toml"
    recorded = ("--set", "metrics.wandb.mode=offline")
    done = program("--nproc", nproc, "--config", config, "--run-dir", run_dir, *recorded, *overrides)
    run_dir.with_suffix(".log").write_text(done.stderr, encoding="utf-8")


def damages(out: Path) -> dict[str, tuple[float, float] | None]:
    """The loss damage of each case that has a control."""
    runs = {case.name: load_run(out / case.name) for case in CASES}
    return {case.name: measure_damage(runs[case.name], runs[case.control]) for case in CASES if case.control}


def verdict_table(judgements: Sequence[Judgement], found: Mapping[str, tuple[float, float] | None]) -> Table:
    """A table of expected and actual findings, and the damage."""
    table = Table(title="Smoke matrix", title_justify="left")
    for heading in ("run", "provokes", "expected", "found", "recall loss", "of its control", "damage", ""):
        table.add_column(heading, overflow="fold")
    for judgement in judgements:
        case = judgement.case
        damage = found.get(case.name)
        cost = ("", "", "") if damage is None else _cost(case, damage)
        notes = [*sorted(judgement.found), *(f"({name}: the machine)" for name in sorted(judgement.speed))]
        verdict = "right" if judgement.is_right else "WRONG"
        if not judgement.is_whole:
            verdict = "NOT WHOLE"
        expected = ", ".join(sorted(case.expected)) or "none"
        table.add_row(case.name, case.provokes, expected, ", ".join(notes) or "none", *cost, verdict)
    return table


def _cost(case: Case, damage: tuple[float, float]) -> tuple[str, str, str]:
    loss, control_loss = damage
    return f"{loss:.3f}", f"{control_loss:.3f} ({case.control})", f"{loss - control_loss:+.3f} nats"


if __name__ == "__main__":
    sys.exit(main())
