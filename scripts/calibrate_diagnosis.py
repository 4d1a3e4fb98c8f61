"""Calibrates the rules of `train diagnose`: false alarms over healthy runs, and the delay until injected faults are found.

The runs are those of `tests/support/metric_streams.py` (real data, ledger and noise scale, synthetic loss and clock) and
real runs of the trainer. The results go to docs/diagnosis_calibration.json, from which `make docs` generates the tables of
docs/diagnosis.md. Takes a few minutes.

    python scripts/calibrate_diagnosis.py
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.injected_faults import FAULTS, Fault, detected_after  # noqa: E402 - needs the path above
from tests.support.metric_streams import healthy_scenario, write_run  # noqa: E402
from tests.support.real_runs import REAL_RUNS  # noqa: E402
from trainer.diagnostics.diagnose import diagnose  # noqa: E402
from trainer.diagnostics.smoke_matrix import SPEED_RULES  # noqa: E402
from trainer.runs.load import load_run  # noqa: E402

RESULT = ROOT / "docs" / "diagnosis_calibration.json"


def measure_healthy(count: int, directory: Path) -> dict[str, Any]:
    """False alarms over synthetic healthy runs."""
    alarms: list[str] = []
    advice: list[str] = []
    for seed in range(count):
        found = diagnose(load_run(write_run(healthy_scenario(seed), directory / f"healthy-{seed}")))
        alarms += [f"seed {seed}: {ruling.rule.name}" for ruling in found.findings]
        advice += [f"seed {seed}: {ruling.rule.name}" for ruling in found.advice]
    return {"runs": count, "false_alarms": alarms, "false_advice": advice}


def measure_real(directory: Path) -> dict[str, Any]:
    """Findings in healthy real runs, except those about speed, which depends on the machine."""
    rows = []
    for name, start in REAL_RUNS.items():
        found = diagnose(load_run(start(directory / name)))
        alarms = [r.rule.name for r in found.findings if r.rule.name not in SPEED_RULES]
        rows.append({"run": name, "false_alarms": alarms, "advice": [r.rule.name for r in found.advice]})
    return {"runs": rows}


def measure_fault(fault: Fault, count: int, directory: Path) -> dict[str, Any]:
    """In how many of `count` runs the fault was found, and after how many steps at most."""
    delays: list[int | None] = []
    others: dict[str, int] = {}
    for seed in range(count):
        run_dir = fault.make(seed, directory / f"{fault.rule}-{fault.what[:12]}-{seed}".replace(" ", "-"))
        delays.append(detected_after(fault, run_dir))
        found = diagnose(load_run(run_dir))
        ignored = {fault.rule, *(SPEED_RULES if fault.is_real else ())}
        for name in {ruling.rule.name for ruling in found.findings} - ignored:
            others[name] = others.get(name, 0) + 1
    known = [delay for delay in delays if delay is not None]
    return {
        "rule": fault.rule,
        "what": fault.what,
        "runs": count,
        "found": len(known),
        "worst": max(known, default=None),
        "within": fault.within,
        "others": others,
    }


def main() -> int:
    """Measure everything and write the results; returns 1 if a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--healthy", type=int, default=40)
    parser.add_argument("--faults", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        faults = []
        for fault in FAULTS:
            faults.append(measure_fault(fault, options.faults, directory))
            print(faults[-1], flush=True)
        healthy = measure_healthy(options.healthy, directory)
        real = measure_real(directory)
    result = {"healthy": healthy, "real": real, "faults": faults}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    alarms = len(healthy["false_alarms"]) + sum(len(run["false_alarms"]) for run in real["runs"])
    missed = [row for row in faults if row["found"] < row["runs"] or row["worst"] > row["within"]]
    print(f"{alarms} false alarms; {len(missed)} kinds of fault missed or late; wrote {RESULT.relative_to(ROOT)}")
    return 1 if alarms > 1 or missed else 0


if __name__ == "__main__":
    sys.exit(main())
