"""The exception for mistakes that a user can fix.

The command line prints a `UserError` once, without a traceback, and exits with code 2.
"""

from __future__ import annotations

import os
import re

from trainer.wording import printable


class UserError(ValueError):
    """A user's mistake: the problem and its fix.

    Args:
        key: the subject: a config key (`data.mixing.pick_mode`), an option (`--steps`) or a path.
        problem: what is wrong, with the value found ("must be >= 1, got 0").
        fix: what to do, as an imperative; may be empty if the problem already implies it.
        where: file and line (`x.toml:14`) or option (`--set train.steps=0`), where the key is set.

    `str()` gives the message on one `printable` line, with relative paths: `x.toml:14: train.steps:
    must be >= 1, got 0; set it to ...`.
    """

    speaker: int | None = None
    """The rank that prints it; None while the ranks have not agreed on one."""

    def __init__(self, key: str, problem: str, fix: str = "", where: str = "") -> None:
        # With all arguments, so that a worker process can pickle it.
        super().__init__(key, problem, fix, where)
        self.key = key
        self.problem = problem
        self.fix = fix
        self.where = where

    def __str__(self) -> str:
        return self.message

    @property
    def message(self) -> str:
        """The message on one line."""
        text = ": ".join(filter(None, [self.where, self.key, self.problem]))
        return printable(relative_paths("; ".join(filter(None, [text, self.fix]))))


class UserErrors(UserError):
    """Several mistakes found together, printed one per line."""

    def __init__(self, errors: list[UserError]) -> None:
        first, self.errors = errors[0], errors
        super().__init__(first.key, first.problem, first.fix, first.where)
        self.args = (errors,)

    @property
    def message(self) -> str:
        """All messages, one per line."""
        return "\n".join(error.message for error in self.errors)


def raise_found(errors: list[UserError]) -> None:
    """Raise the mistakes that were found, if there are any: a single one, or all as one."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise UserErrors(errors)


def relative_paths(text: str) -> str:
    """The text, with paths relative to the working directory if they are inside."""
    try:
        here = os.path.join(os.getcwd(), "")
    except FileNotFoundError:  # somebody has removed it
        return text
    # A directory at the start of a path, not within another one or at its end.
    return re.sub(rf"(?<![^\s\"'(=,:]){re.escape(here)}(?=[^\s/])", "", text)
