"""Writes the generated documents; with --check, fails if one is out of date (`make docs`, `make check`)."""

from __future__ import annotations

import importlib
import json
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


def main() -> str | None:
    """Write or compare; returns what is wrong."""
    stale = {name: text for name, text in documents().items() if (DOCS / name).read_text("utf-8") != text}
    if "--check" in sys.argv:
        return f"out of date: {', '.join(stale)}; run make docs" if stale else None
    for name, text in stale.items():
        (DOCS / name).write_text(text, encoding="utf-8")
        print(f"wrote docs/{name}")
    return None


if __name__ == "__main__":
    sys.exit(main())
