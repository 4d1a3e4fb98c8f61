"""The training objective, and loss and accuracy by token type."""

from trainer.objective.loss import (
    Objective,
    ObjectiveError,
    ObjectiveOutput,
    Term,
    TokenTypeMismatch,
    TokenTypeSums,
    token_type_sums,
)
from trainer.options import CoordOptions, ObjectiveOptions

__all__ = [
    "CoordOptions",
    "Objective",
    "ObjectiveError",
    "ObjectiveOptions",
    "ObjectiveOutput",
    "Term",
    "TokenTypeMismatch",
    "TokenTypeSums",
    "token_type_sums",
]
