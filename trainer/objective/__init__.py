"""The training objective, and loss and accuracy by token type."""

from trainer.objective.components import CoordSettings, ObjectiveError, Term
from trainer.objective.compose import Objective, ObjectiveOutput
from trainer.objective.token_types import TokenTypeMismatch, TokenTypeSums, token_type_sums

__all__ = [
    "CoordSettings",
    "Objective",
    "ObjectiveError",
    "ObjectiveOutput",
    "Term",
    "TokenTypeMismatch",
    "TokenTypeSums",
    "token_type_sums",
]
