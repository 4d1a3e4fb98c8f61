"""docs/diagnosis.md, made from the table of rules and from what the calibration measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.diagnostics.rules.all_rules import RULES

_HEAD = """\
# Diagnosis

`train diagnose RUN_DIR` asks every rule below about one run. It reads metrics.jsonl and, where they are, events.jsonl,
status.json, env.json and config.resolved.toml; a metrics.jsonl alone will do. torch is not needed.

    train diagnose runs/smoke-20261121-005620
    train diagnose runs/smoke-20261121-005620 --json

| verdict | meaning |
|---|---|
| healthy | looked at, and as it should be |
| error, warning | a finding: what was seen, the steps that are the evidence, the knob to turn and a value to try |
| advice | costs time or tokens and does no harm |
| explained | the symptom is there, and another finding is its cause |
| not measured | the run has not the keys, or too few rows. It is never called healthy |

Exit code 0: no error and no warning. 3: findings. 2: there is no such run, or nothing in it can be read.

`--json` prints one object: `diagnosis_version` (1), `verdict` (`healthy` or `findings`), `findings` and `advice` (names of
rules), `rules` (each with `rule`, `verdict`, `severity`, `sentence`, `evidence`: steps and values by key, `knob`: key, current
and suggested value), `steps`, `num_rows` and `notes`. Later versions only add keys, or count the version up.

In a program, without torch:

```python
from trainer.diagnostics.diagnose import diagnose
from trainer.runs.load import load_run

for ruling in diagnose(load_run("runs/smoke-20261121-005620")).findings:
    print(ruling.rule.name, ruling.outcome.sentence, ruling.outcome.knob)
```

What happens to such files in life is no obstacle: a last line that is cut off, damaged lines and lines of another schema
version are passed over and counted (`notes`); of a step that stands twice the later row counts; unknown keys pass. A file
without one row that can be read is refused.

## Rules
"""

_CALIBRATION_HEAD = """\
## Calibration

`python scripts/calibrate_diagnosis.py` repeats it. Made-up runs have real parts where that is cheap: their streams are mixed by
`StreamMixingDataset` and `BlendDataset`, their states kept by `Ledger`, their noise scale estimated by `NoiseScaleAverage` from
drawn gradients. Loss and times are drawn, with heavy tails. Settings (readers, ranks, micro-batches, sources, log
interval, batching mode) differ from seed to seed. Real runs are the trainer's own, of 120 steps on a small corpus; the rules
about speed are left out there, since a machine that others use is slow at times and saying so is no false alarm.
"""


def render_diagnosis_markdown(calibration: Mapping[str, Any]) -> str:
    """The whole page.

    Args:
        calibration: what `scripts/calibrate_diagnosis.py` wrote.
    """
    return "\n".join([_HEAD, *_rules(), _CALIBRATION_HEAD, *_healthy(calibration), *_faults(calibration)]) + "\n"


def _rules() -> list[str]:
    lines = []
    for rule in RULES:
        keys = ", ".join(f"`{key}`" if " " not in key else key for key in rule.looks_at)
        lines += [
            f"### {rule.name} ({rule.severity})",
            "",
            f"- Looks at: {keys}",
            f"- Fires: {rule.threshold}",
            f"- Why: {rule.why}",
            f"- Knob: {rule.knob}",
            "",
        ]
    return lines


def _healthy(calibration: Mapping[str, Any]) -> list[str]:
    made_up, real = calibration["healthy"], calibration["real"]["runs"]
    alarms = len(made_up["false_alarms"]) + sum(len(run["false_alarms"]) for run in real)
    names = [
        *made_up["false_alarms"],
        *(f"{run['run']}: {', '.join(run['false_alarms'])}" for run in real if run["false_alarms"]),
    ]
    listed = f" ({'; '.join(names)})" if names else ""
    return [
        f"False alarms in {made_up['runs']} made-up and {len(real)} real healthy runs: **{alarms}**{listed}. "
        f"Advice that was wrong: {len(made_up['false_advice'])}.",
        "",
    ]


def _faults(calibration: Mapping[str, Any]) -> list[str]:
    lines = [
        "Each fault was put into runs of different seeds. *After* is the most steps from where the fault begins to the first "
        "logged step with which it is found; *promised* is what the tests hold it to.",
        "",
        "| rule | fault | found | after | promised | other findings |",
        "|---|---|---|---|---|---|",
    ]
    for row in calibration["faults"]:
        others = ", ".join(f"{name} ({count})" for name, count in row["others"].items()) or "none"
        cells = (row["rule"], row["what"], f"{row['found']} of {row['runs']}", row["worst"], row["within"], others)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines
