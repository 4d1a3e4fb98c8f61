"""The table of all rules, in the order in which they are shown."""

from __future__ import annotations

from typing import Final

from trainer.diagnostics import (
    batch_rules,
    blend_rules,
    ledger_rules,
    mixing_rules,
    record_rules,
    speed_rules,
    stability_rules,
)
from trainer.diagnostics.rule import Rule

RULES: Final[tuple[Rule, ...]] = (
    *ledger_rules.RULES,
    *mixing_rules.RULES,
    *blend_rules.RULES,
    *batch_rules.RULES,
    *stability_rules.RULES,
    *speed_rules.RULES,
    *record_rules.RULES,
)
