"""The type of a diagnosis rule: a pure function of a run record, and its documentation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from trainer.tools.diagnostics.outcome import Outcome, Severity, not_measured, not_yet
from trainer.tools.runs.load import RunRecord
from trainer.wording import listed

REPORTED_BY: Final[Mapping[str, str]] = {
    "ledger/carry_gain": "trainer.ledger.CarryProbe",
    "ledger/stale_gap": "trainer.ledger.CarryProbe",
    "ledger/": "trainer.ledger.Ledger",
    "stream_mixing/active/": "trainer.data.StreamMixingDataset",
    "stream_mixing/refill/": "trainer.data.StreamMixingDataset",
    "blend/": "trainer.data.BlendDataset",
    "gns/": "trainer.metrics.GradientNoiseScale",
    "layer/": "trainer.extensions.per_layer.PerLayer",
    "time/data_sec": 'MetricsTracker.section("data")',
}
"""The beginnings of keys, and what reports these keys in a loop without a config. The first that fits counts."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of the table of rules.

    Attributes:
        name: stable id, used in JSON and in the smoke matrix.
        needs: metric keys without which nothing can be measured.
        hint: what makes a run log them.
        due: for a run that lacks them and will log them, what has to happen first; empty for others.
        uses: other keys and files that the rule reads if they are there.
        threshold: the condition for a finding, in words.
        why: the reason for the threshold.
        knob: what to change.
        severity: of a finding, unless its `Outcome` has another.
        check: the outcome for a run that has all keys in `needs`.
    """

    name: str
    needs: tuple[str, ...] = ()
    hint: str = ""
    due: Callable[[RunRecord], str] = lambda run: ""
    uses: tuple[str, ...] = ()
    threshold: str
    why: str
    knob: str
    severity: Severity
    check: Callable[[RunRecord], Outcome]

    def apply(self, run: RunRecord) -> Outcome:
        """The outcome for any run."""
        missing = [key for key in self.needs if not run.column(key)[0]]
        if not missing:
            return self.check(run)
        due = self.due(run)
        return not_yet(due) if due else unlogged(run, missing, self.hint)


def unlogged(run: RunRecord, keys: Sequence[str], hint: str = "") -> Outcome:
    """The outcome for a run without some keys. `hint`: what makes a run log them; a run without a config has no use for it."""
    words = f"needs {listed(keys)}"
    if run.config:
        return not_measured(f"{words}; {hint}" if hint else words)
    part = next((part for start, part in REPORTED_BY.items() if keys[0].startswith(start)), None)
    return not_measured(f"{words}, from {part}" if part else words)
