"""Renders docs/diagnosis.md from the table of rules and the results of the calibration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.tools.diagnostics.rules.all_rules import RULES

_HEAD = """\
# Diagnosis

`train diagnose RUN_DIR` applies every rule below to one run. It reads metrics.jsonl and, if they exist, events.jsonl,
status.json, env.json and config.resolved.toml; a metrics.jsonl alone is enough. It does not need torch.

    train diagnose runs/smoke-20261121-005620
    train diagnose runs/smoke-20261121-005620 --json

| verdict | meaning |
|---|---|
| healthy | measured, and within bounds |
| error, warning | a finding: what was measured, the steps to look at, the config key to change and a value to try |
| advice | a finding that costs time or tokens but does no harm |
| explained | the symptom is present, but another finding is its cause |
| not yet | the run has too few rows or steps so far; the rule says how many it needs |
| not measured | the run lacks the keys, which the rule names, or the rule does not apply to it |

The line `nothing to measure` names the rules that are not measured; with `--all` each has a line that says what it needs.

The last line gives the verdict on the run and how many rules judged it. A run without a finding is `healthy` if at least
half of the rules judged it. Otherwise the verdict is `nothing wrong in what was measured`: a loop that logs little is
judged by few rules.

Exit code 0: no error and no warning in what could be judged. 3: findings. 2: the run does not exist, or cannot be read.

`--json` prints one object: `diagnosis_version` (2), `verdict` (`healthy`, `no_findings`: fewer than half of the rules
judged the run, or `findings`), `findings` and `advice` (names of rules), `rules_judged` (their number) and
`rules_not_judged` (names), `rules` (each with `rule`, `verdict`, `severity`, `not_yet`, `sentence`, `evidence`: steps
and values by key, `knob`: key, current and suggested value, and a `condition` if there is one, `fix`: the same as text,
`needs`: keys), `steps`, `num_rows` and `notes`. Later versions only add keys, or increase `diagnosis_version`.

Config keys are named for runs that have a config (config.resolved.toml). For the record of [another loop](your_loop.md) the
fix is given in words, and a rule that lacks keys names the part that reports them.

From Python, without torch:

```python
from trainer.tools.diagnostics.diagnose import diagnose
from trainer.tools.runs.load import load_run

for ruling in diagnose(load_run("runs/smoke-20261121-005620")).findings:
    print(ruling.rule.name, ruling.outcome.sentence, ruling.outcome.knob)
```

Damaged files are read as far as possible. A truncated last line, damaged lines and lines of another schema version are skipped
and counted in `notes`; if a step was logged twice, the later row counts; unknown keys are ignored. A file without any valid row
is refused.

## Rules
"""

_CALIBRATION_HEAD = """\
## Calibration

Measured by `python scripts/calibrate_diagnosis.py`. Synthetic runs use real components where that is cheap:
`StreamMixingDataset` and `BlendDataset` mix their streams, `Ledger` keeps their states, and `NoiseScaleAverage` estimates their
noise scale from random gradients. Losses and times are random, with heavy tails. The seed determines the settings (readers,
micro-batches, sources, log interval, batching mode). Real runs are the trainer itself on small corpora: 20 to 60 steps with
settings drawn by the seed (open and closed pools, packing, several cells per gradient, sources of unlike difficulty), and 120
steps of each family. The faults of layers are real runs of 40 steps. Real runs are not judged by the rules about speed: a
shared machine is slow at times, and reporting that is not a false alarm.
"""


def render_diagnosis_markdown(calibration: Mapping[str, Any]) -> str:
    """The page; `calibration` is the output of `scripts/calibrate_diagnosis.py`."""
    return "\n".join([_HEAD, *_rules(), _CALIBRATION_HEAD, *_healthy(calibration), *_faults(calibration)]) + "\n"


def _rules() -> list[str]:
    lines = []
    for rule in RULES:
        keys = ", ".join(f"`{key}`" if " " not in key else key for key in (*rule.needs, *rule.uses))
        lines += [
            f"### {rule.name} ({rule.severity})",
            "",
            f"- Reads: {keys}",
            f"- Condition: {rule.threshold}",
            f"- Why: {rule.why}",
            f"- Change: {rule.knob}",
            "",
        ]
    return lines


def _healthy(calibration: Mapping[str, Any]) -> list[str]:
    lines = ["False alarms in healthy runs, of all rules together:", ""]
    lines += [
        "| runs | ranks | runs with a false alarm | about speed, not judged | wrong advice |",
        "|---|---|---|---|---|",
    ]
    for what, part in (("synthetic, 300 steps", "synthetic"), ("real, 20 to 60 steps", "short")):
        for world_size, found in calibration[part].items():
            cells = []
            for listed in (found["false_alarms"], found["about_speed"], found["false_advice"]):
                number = len({each.split(":")[0] for each in listed})
                cells.append(", ".join([f"{number} of {found['runs']}", *listed]))
            lines.append(f"| {what} | {world_size} | {' | '.join(cells)} |")
    real = calibration["real"]["runs"]
    alarms = ", ".join(
        [str(sum(bool(run["false_alarms"]) for run in real)), *(n for r in real for n in r["false_alarms"])]
    )
    return [
        *lines,
        f"| real, 120 steps | 1 or 2 | {alarms} of {len(real)} | | {sum(bool(r['advice']) for r in real)} |",
        "",
    ]


def _faults(calibration: Mapping[str, Any]) -> list[str]:
    lines = [
        "Each fault was injected into runs of different seeds. *Within* is the largest number of steps from the onset of the "
        "fault to the first logged step at which it is found; *limit* is the number that the tests allow.",
        "",
        "| rule | fault | found | within | limit | other findings |",
        "|---|---|---|---|---|---|",
    ]
    for row in calibration["faults"]:
        others = ", ".join(f"{name} ({count})" for name, count in row["others"].items()) or "none"
        cells = (row["rule"], row["what"], f"{row['found']} of {row['runs']}", row["worst"], row["within"], others)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines
