"""The table of all rules, in the order in which they are shown."""

from __future__ import annotations

from typing import Final

from trainer.diagnostics.rules import batch as batch_rules
from trainer.diagnostics.rules import blend as blend_rules
from trainer.diagnostics.rules import ledger as ledger_rules
from trainer.diagnostics.rules import mixing as mixing_rules
from trainer.diagnostics.rules import record as record_rules
from trainer.diagnostics.rules import speed as speed_rules
from trainer.diagnostics.rules import stability as stability_rules
from trainer.diagnostics.rules.rule import Rule

RULES: Final[tuple[Rule, ...]] = (
    *ledger_rules.RULES,
    *mixing_rules.RULES,
    *blend_rules.RULES,
    *batch_rules.RULES,
    *stability_rules.RULES,
    *speed_rules.RULES,
    *record_rules.RULES,
)
