"""What the fault tests injected and what was lost, for the table in docs/reliability.md."""

from __future__ import annotations

import hashlib
import json

from tests.support.runs import ROOT

RECORDS = ROOT / "build" / "faults"
LOST = "steps since the last checkpoint"


def keep(promise: int, what: str, *, lost: str = "0", times: int = 1) -> None:
    """Write down a fault that a test has injected, once it has seen the promise kept.

    Args:
        promise: its number in docs/reliability.md.
        lost: what a resume does not give back.
    """
    RECORDS.mkdir(parents=True, exist_ok=True)
    row = {"promise": promise, "what": what, "times": times, "lost": lost}
    name = hashlib.sha256(what.encode()).hexdigest()[:16]
    (RECORDS / f"{name}.json").write_text(json.dumps(row, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
