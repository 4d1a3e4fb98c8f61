"""The pages of the docs that are made of rules and of the metric catalog; `scripts/make_docs.py` writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tests.support.runs import ROOT
from trainer.metrics.catalog import CATALOG
from trainer.metrics.catalog_rows import MetricSpec
from trainer.tools import limits
from trainer.tools.diagnostics.diagnose import RULES


def render_diagnosis_markdown(page: str, calibration: Mapping[str, Any]) -> str:
    """docs/diagnosis.md with the sections on the rules and the results of the calibration made anew.

    Args:
        page: the present one, whose text before `## Rules` is kept.
        calibration: output of `scripts/calibrate_diagnosis.py`.
    """
    lines = [f"{page.partition('## Rules')[0]}## Rules", ""]
    text = (ROOT / "trainer" / "tools" / "reference" / "rules.md").read_text(encoding="utf-8")
    sections = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    assert sections.keys() == {rule.name for rule in RULES}
    for rule in RULES:
        parts = re.split(r"\n\n|\nChange: ", sections[rule.name].format(limits=limits).strip())
        condition, reason, change = (" ".join(part.split()).rstrip(".") for part in parts)
        lines += [f"### {rule.name} ({rule.severity})", "", f"{condition}. {reason}.", "", f"Change: {change}.", ""]
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
    faults = calibration["faults"]
    found, runs = (sum(fault[key] for fault in faults) for key in ("found", "runs"))
    lines.append(f"- {len(faults)} injected faults, one or more for each rule: found in {found} of {runs} runs")
    return "\n".join(lines) + "\n"


def render_catalog_markdown() -> str:
    """docs/training/METRICS_LOSSES.md: every metric of the catalog; keys that mean the same share an entry."""
    parts = [(ROOT / "trainer" / "tools" / "reference" / "metrics.md").read_text(encoding="utf-8")]
    for group in dict.fromkeys(spec.group for spec in CATALOG):
        parts.append(f"\n## {group}\n\n")
        alike: dict[tuple[str, ...], list[MetricSpec]] = {}
        for spec in CATALOG:
            if spec.group == group:
                alike.setdefault((spec.description, spec.healthy, spec.pathological), []).append(spec)
        for (meaning, healthy, pathological), specs in alike.items():
            ways = [f"{spec.unit}, " * bool(spec.unit) + f"{spec.window}/{spec.ranks}" for spec in specs]
            how = ways[0] if len(set(ways)) == 1 else "; ".join(ways)
            names = ", ".join(f"`{spec.name}`" for spec in specs)
            parts.append(f"- {names} ({how}): {meaning} *Healthy:* {healthy} *Pathological:* {pathological}\n")
    return "".join(parts)
