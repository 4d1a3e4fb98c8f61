"""The inverses of what was changed, so that steps can be taken back, the newest first."""

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
        # How many inverses there were when each of the steps began that are not final.
        self._begins: list[int] = []

    @property
    def has_open_step(self) -> bool:
        """Whether a step has begun that is not final."""
        return bool(self._begins)

    def add(self, inverse: Callable[[], object]) -> None:
        """Note the inverse of a change."""
        if self.is_kept:
            self._inverses.append(inverse)

    def begin(self) -> None:
        """A step begins: `undo` goes back to here."""
        if self.is_kept:
            self._begins.append(len(self._inverses))

    def commit(self) -> None:
        """All changes so far are final."""
        self._inverses.clear()
        self._begins.clear()

    def confirm(self) -> None:
        """The oldest open step is final."""
        if len(self._begins) < 2:
            self.commit()
            return
        end = self._begins[1]
        del self._inverses[:end]
        self._begins = [begin - end for begin in self._begins[1:]]

    def undo(self) -> None:
        """Take back the newest open step; without one, everything since the last commit.

        Raises:
            RuntimeError: no inverses are kept.
        """
        if not self.is_kept:
            raise RuntimeError("the ledger keeps no undo journal: construct it with keep_undo=True")
        begin = self._begins.pop() if self._begins else 0
        while len(self._inverses) > begin:
            self._inverses.pop()()
