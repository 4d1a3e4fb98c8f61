"""The training objective and the diagnostics that share its numbers."""

from trainer.objective.components import IGNORE_INDEX, CoordSettings, ObjectiveError, Term
from trainer.objective.compose import Objective, ObjectiveOutput
from trainer.objective.token_types import TokenTypeMismatch, TokenTypeSums, token_type_sums

__all__ = [
    "IGNORE_INDEX",
    "CoordSettings",
    "Objective",
    "ObjectiveError",
    "ObjectiveOutput",
    "Term",
    "TokenTypeMismatch",
    "TokenTypeSums",
    "token_type_sums",
]
