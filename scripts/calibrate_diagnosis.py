"""Calibrates the rules of `train diagnose`: false alarms over healthy runs, and the delay until injected faults are found.

The runs are those of `tests/support/metric_streams.py` (real data, ledger and noise scale, synthetic loss and clock) and
real runs of the trainer. The results go to docs/diagnosis_calibration.json, from which `make docs` generates the tables of
docs/diagnosis.md. Takes some ten minutes.

    python scripts/calibrate_diagnosis.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.healthy_runs import WORLD_SIZES, make_healthy_runs  # noqa: E402 - needs the path above
from tests.support.injected_faults import FAULTS, Fault, detected_after  # noqa: E402
from tests.support.metric_streams import healthy_scenario, write_run  # noqa: E402
from tests.support.smoke_matrix import SPEED_RULES  # noqa: E402
from trainer.tools.diagnostics.diagnose import diagnose  # noqa: E402
from trainer.tools.runs.load import load_run  # noqa: E402

HEALTHY_RUNS, RUNS_OF_A_FAULT = 40, 10  # of each kind
RESULT = ROOT / "docs" / "diagnosis_calibration.json"


def measure_healthy(runs: Iterable[Path], *, is_real: bool = False) -> dict[str, Any]:
    """False alarms over healthy runs; of real ones, those about speed apart, which depends on the machine."""
    found: dict[str, Any] = {"runs": 0, "false_alarms": [], "false_advice": [], "about_speed": []}
    for diagnosis in map(diagnose, map(load_run, runs)):
        found["runs"] += 1
        for ruling in [*diagnosis.findings, *diagnosis.advice]:
            part = "false_advice" if ruling.severity == "advice" else "false_alarms"
            part = "about_speed" if is_real and ruling.rule.name in SPEED_RULES else part
            found[part].append(f"{diagnosis.run.name}: {ruling.rule.name}")
    return found


def measure_synthetic(count: int, world_size: int, directory: Path) -> dict[str, Any]:
    """Over synthetic runs of some ranks."""
    scenarios = (healthy_scenario(seed, world_size=world_size) for seed in range(count))
    return measure_healthy(write_run(each, directory / f"seed-{each.seed}-of-{world_size}") for each in scenarios)


def measure_short(count: int, world_size: int, directory: Path) -> dict[str, Any]:
    return measure_healthy(make_healthy_runs(directory / f"short-{world_size}", world_size, range(count)), is_real=True)


def measure_fault(fault: Fault, count: int, directory: Path) -> dict[str, Any]:
    """In how many of `count` runs the fault was found, and after how many steps at most."""
    delays: list[int | None] = []
    others: dict[str, int] = {}
    for seed in range(count):
        run_dir = fault.make(seed, directory / f"{fault.rule}-{fault.what[:12]}-{seed}".replace(" ", "-"))
        delays.append(detected_after(fault, run_dir))
        found = diagnose(load_run(run_dir))
        for name in {ruling.rule.name for ruling in found.findings} - {fault.rule}:
            others[name] = others.get(name, 0) + 1
    known = [delay for delay in delays if delay is not None]
    found_in = {"runs": count, "found": len(known), "worst": max(known, default=None)}
    return {"rule": fault.rule, "what": fault.what, **found_in, "within": fault.within, "others": others}


def main() -> int:
    """Measure everything and write the results; returns 1 if a promise does not hold."""
    result: dict[str, Any] = {"synthetic": {}, "short": {}, "faults": []}
    with tempfile.TemporaryDirectory() as name:
        for part, measure in (("synthetic", measure_synthetic), ("short", measure_short)):
            for world_size in WORLD_SIZES:
                result[part][str(world_size)] = measure(HEALTHY_RUNS, world_size, Path(name))
                print(part, world_size, result[part][str(world_size)], flush=True)
        for fault in FAULTS:
            result["faults"].append(measure_fault(fault, RUNS_OF_A_FAULT, Path(name)))
            print(result["faults"][-1], flush=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    healthy = [*result["synthetic"].values(), *result["short"].values()]
    many = [found for found in healthy if len(found["false_alarms"]) > 1]
    missed = [row for row in result["faults"] if row["found"] < row["runs"] or row["worst"] > row["within"]]
    print(f"more than one false alarm in {len(many)} kinds of healthy runs; {len(missed)} kinds of fault missed")
    return 1 if many or missed else 0


if __name__ == "__main__":
    sys.exit(main())
