"""Writes the generated documents; with --check, fails if one is out of date or a link is broken (`make docs`, `make check`)."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
sys.path.insert(0, str(DOCS.parent))

from tests.support.pages import render_catalog_markdown, render_diagnosis_markdown  # noqa: E402 - needs the path above
from trainer.tools.reference_docs import render_config_markdown, render_config_schema  # noqa: E402


def documents() -> dict[str, str]:
    """Path below docs/ -> text."""
    calibration = json.loads((DOCS / "diagnosis_calibration.json").read_text("utf-8"))
    judged = {}
    if "--check" not in sys.argv:  # the tests check it
        judged["contract_models.csv"] = importlib.import_module("tests.support.leaks").render_table()
    return judged | {
        "diagnosis.md": render_diagnosis_markdown((DOCS / "diagnosis.md").read_text("utf-8"), calibration),
        "training/METRICS_LOSSES.md": render_catalog_markdown(),
        "config.md": render_config_markdown(),
        "config.schema.json": render_config_schema(),
    }


def broken() -> list[str]:
    """Links of pages, and pages that code names, that lead nowhere."""
    root, found = DOCS.parent, []
    pages = [*DOCS.rglob("*.md"), *root.glob("*.md"), root / "examples" / "README.md"]
    for path in [*pages, *root.glob("trainer/**/*.py"), *root.glob("scripts/**/*.py")]:
        pattern = r"\]\((?!https?:)([^)]+)" if path in pages else r"(?<![\w/])(docs/[\w/]+\.md[#\w-]*)"
        for link in re.findall(pattern, path.read_text("utf-8")):
            target, _, anchor = link.partition("#")
            page = path if not target else (path.parent if path in pages else root) / target
            text = page.read_text("utf-8") if anchor and page.exists() else ""
            titles = re.findall("^#+ (.+)", text, re.M)
            slugs = [re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in titles]
            if anchor not in ["", *slugs] or not (page.exists() or page.name == "benchmarks-gpu.md"):
                found.append(f"{path.relative_to(root)}: {link}")
    return found


def main() -> str | None:
    stale = {name: text for name, text in documents().items() if (DOCS / name).read_text("utf-8") != text}
    if lost := broken():
        return f"links that lead nowhere: {'; '.join(lost)}"
    if "--check" in sys.argv:
        return f"out of date: {', '.join(stale)}; run make docs" if stale else None
    for name, text in stale.items():
        (DOCS / name).write_text(text, encoding="utf-8")
        print(f"wrote docs/{name}")
    return None


if __name__ == "__main__":
    sys.exit(main())
