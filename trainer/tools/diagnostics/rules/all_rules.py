"""The table of all rules, in display order."""

from __future__ import annotations

from typing import Final

from trainer.tools.diagnostics.rules import batch, blend, carry, layers, ledger, mixing, model, record, speed, stability
from trainer.tools.diagnostics.rules.rule import Rule

RULES: Final[tuple[Rule, ...]] = (
    *ledger.RULES,
    *carry.RULES,
    *model.RULES,
    *mixing.RULES,
    *blend.RULES,
    *batch.RULES,
    *layers.RULES,
    *stability.RULES,
    *speed.RULES,
    *record.RULES,
)
