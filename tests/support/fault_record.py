"""What the fault tests injected and what was lost, for the table in docs/reliability.md."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from tests.support.runs import ROOT

RECORDS = ROOT / "build" / "faults"


@dataclass(frozen=True)
class Injected:
    """One row of the table; made by a test that passed."""

    promise: int
    """Number of the promise in docs/reliability.md."""
    what: str
    times: int
    lost: str
    outcome: str

    def keep(self, case: str) -> None:
        """Write the row down under the name of its case."""
        RECORDS.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        (RECORDS / f"{case}.json").write_text(text + "\n", encoding="utf-8")
