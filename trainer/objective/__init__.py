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

__all__ = [
    "Objective",
    "ObjectiveError",
    "ObjectiveOutput",
    "Term",
    "TokenTypeMismatch",
    "TokenTypeSums",
    "token_type_sums",
]
