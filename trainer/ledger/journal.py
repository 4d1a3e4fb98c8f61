"""The inverses of what was changed, so that a step can be taken back."""

from __future__ import annotations

from collections.abc import Callable


class Journal:
    """Inverses of changes in the order of the changes, since the last commit; or, disabled, none.

    Args:
        is_kept: keep inverses. Callers ask before they gather what an inverse needs.
    """

    def __init__(self, *, is_kept: bool) -> None:
        self.is_kept = is_kept
        self._inverses: list[Callable[[], object]] = []

    def add(self, inverse: Callable[[], object]) -> None:
        """Note the inverse of a change."""
        if self.is_kept:
            self._inverses.append(inverse)

    def commit(self) -> None:
        """Keep all changes so far for good."""
        self._inverses.clear()

    def undo(self) -> None:
        """Take back all changes since the last commit.

        Raises:
            RuntimeError: no inverses are kept.
        """
        if not self.is_kept:
            raise RuntimeError("the ledger keeps no undo journal: construct it with keep_undo=True")
        while self._inverses:
            self._inverses.pop()()
