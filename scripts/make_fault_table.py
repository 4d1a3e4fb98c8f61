"""Writes the table of docs/reliability.md from the records of `make test-faults` in build/faults.

If records are missing, they are named and nothing is written; --partial writes the available rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "build" / "faults"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN = "<!-- begin of what make test-faults wrote -->"
END = "<!-- end of what make test-faults wrote -->"
HEAD = "| promise | injected fault | times | lost |\n|---|---|---|---|\n"


def read_records(directory: Path) -> list[dict[str, Any]]:
    """The records, sorted by promise and fault."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in directory.glob("*.json")]
    return sorted(records, key=lambda record: (record["promise"], record["what"]))


def some(cases: list[str], most: int = 3) -> list[str]:
    """The first of many, and how many more."""
    return cases if len(cases) <= most else [*cases[: most - 1], f"{len(cases) - most + 1} more"]


def render(records: list[dict[str, Any]]) -> str:
    """The table in Markdown: a row for all faults of a promise that cost the same."""
    alike: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for record in records:
        alike.setdefault((record["promise"], record["lost"]), []).append(record)
    rows = []
    for (promise, lost), same in alike.items():
        cases: dict[str, list[str]] = {}  # what stands before a colon is shared: "checkpoint damage: empty file"
        for record in same:
            kind, _, case = record["what"].partition(": ")
            cases.setdefault(kind, []).append(case)
        kinds = [": ".join(filter(None, (kind, ", ".join(some(each))))) for kind, each in cases.items()]
        what = "; ".join(some(kinds))
        times = str(sum(record["times"] for record in same))
        cells = (str(promise), what, times, lost)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return HEAD + "".join(rows)


def replace_table(text: str, table: str) -> str:
    """The page with its generated table replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} lacks the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table}{END}{after}"


def main() -> int:
    """Write the table, or name the missing records."""
    records = read_records(RECORDS)
    promises = {record["promise"] for record in records}
    missing = sorted(set(range(1, 11)) - promises)
    if missing and "--partial" not in sys.argv:
        print(f"no records for promises {missing} in {RECORDS}; run make test-faults", file=sys.stderr)
        return 1
    PAGE.write_text(replace_table(PAGE.read_text(encoding="utf-8"), render(records)), encoding="utf-8")
    print(f"wrote {len(records)} rows into {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
