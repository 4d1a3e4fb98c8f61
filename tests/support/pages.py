"""The pages of the docs that are made of rules and of the metric catalog; `scripts/make_docs.py` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.runs import ROOT
from trainer.metrics.catalog.lookup import CATALOG
from trainer.tools.diagnostics.diagnose import RULES


def _as_code(key: str) -> str:
    """A key as code; a description of some events has its own marks."""
    return key if " " in key else f"`{key}`"


def render_diagnosis_markdown(page: str, calibration: Mapping[str, Any]) -> str:
    """docs/diagnosis.md with the sections on the rules and the results of the calibration made anew.

    Args:
        page: the present one, whose text before `## Rules` is kept.
        calibration: output of `scripts/calibrate_diagnosis.py`.
    """
    lines = [f"{page.partition('## Rules')[0]}## Rules", ""]
    for rule in RULES:
        keys = ", ".join(map(_as_code, (*rule.needs, *rule.uses)))
        lines += [f"### {rule.name} ({rule.severity})", "", f"- Reads: {keys}"]
        lines += [*map("- {}: {}".format, ("Condition", "Why", "Change"), rule.texts), ""]
    lines += ["## False alarms and injected faults", ""]

    def names(kind: str, part: str) -> int:
        found = calibration[part].values()
        return sum(len({each.split(":")[0] for each in of_size[kind]}) for of_size in found)

    for what, part in (("synthetic, 300 steps", "synthetic"), ("real, 20 to 60 steps", "short")):
        sizes, runs = ", ".join(calibration[part]), sum(of_size["runs"] for of_size in calibration[part].values())
        lines.append(
            f"- healthy, {what}, on {sizes} ranks: a false alarm in {names('false_alarms', part)} of {runs} runs, wrong "
            f"advice in {names('false_advice', part)}, a finding about speed (not judged) in {names('about_speed', part)}"
        )
    real, faults = calibration["real"]["runs"], calibration["faults"]
    alarms = sum(bool(each["false_alarms"]) for each in real)
    lines.append(f"- healthy, real, 120 steps of each family: a false alarm in {alarms} of {len(real)} runs")
    found, runs = (sum(fault[key] for fault in faults) for key in ("found", "runs"))
    lines.append(f"- {len(faults)} injected faults, one or more for each rule: found in {found} of {runs} runs")
    return "\n".join(lines) + "\n"


def render_catalog_markdown() -> str:
    """docs/training/METRICS_LOSSES.md: every metric of the catalog."""
    parts = [(ROOT / "trainer" / "tools" / "reference" / "metrics.md").read_text(encoding="utf-8")]
    for group in dict.fromkeys(spec.group for spec in CATALOG):
        parts.append(f"\n## {group}\n\n")
        parts.append("| key | unit | steps/ranks | meaning | healthy | pathological |\n|---|---|---|---|---|---|\n")
        for spec in CATALOG:
            if spec.group == group:
                how = f"{spec.window}/{spec.ranks}"
                cells = (f"`{spec.name}`", spec.unit or "-", how, spec.description, spec.healthy, spec.pathological)
                parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)
