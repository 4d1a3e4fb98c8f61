"""Writes docs/faults.csv and its sums in docs/reliability.md from the records of `make test-faults`."""

from __future__ import annotations

import csv
import itertools
import json
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "build" / "faults"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN = "<!-- begin of what make test-faults wrote -->"
END = "<!-- end of what make test-faults wrote -->"
HEAD = "| promise | times | lost |\n|---|---|---|\n"


def read_records(directory: Path) -> list[dict[str, Any]]:
    """The records, sorted by promise and fault."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in directory.glob("*.json")]
    return sorted(records, key=lambda record: (record["promise"], record["what"]))


def render(records: list[dict[str, Any]]) -> str:
    """The table in Markdown: a row for all faults of a promise."""
    rows = []
    for promise, group in itertools.groupby(records, key=itemgetter("promise")):
        same = list(group)
        lost = "; ".join(dict.fromkeys(record["lost"] for record in same))
        rows.append(f"| {promise} | {sum(record['times'] for record in same)} | {lost} |\n")
    return HEAD + "".join(rows)


def replace_table(text: str, table: str) -> str:
    """The page with its generated table replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} lacks the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table}{END}{after}"


def main() -> int:
    records = read_records(RECORDS)
    promises = {record["promise"] for record in records}
    missing = sorted(set(range(1, 11)) - promises)
    if missing:
        print(f"no records for promises {missing} in {RECORDS}; run make test-faults", file=sys.stderr)
        return 1
    with PAGE.with_name("faults.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ("promise", "what", "times", "lost"), lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(records)
    PAGE.write_text(replace_table(PAGE.read_text(encoding="utf-8"), render(records)), encoding="utf-8")
    print(f"wrote {len(records)} rows into {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
