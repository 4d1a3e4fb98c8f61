"""A pseudo-terminal."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.support.runs import TIMEOUT_SEC

pty = pytest.importorskip("pty")


class Terminal:
    """A pseudo-terminal, and everything that is written to it."""

    def __init__(self) -> None:
        self._own, self._child_side = pty.openpty()
        self.path = Path(os.ttyname(self._child_side))
        self.shown = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._own, 65536)
            except OSError:  # the other side has closed
                return
            if not piece:
                return
            self.shown += piece

    def text(self) -> str:
        """What was shown, after the program has ended."""
        os.close(self._child_side)
        self._reader.join(TIMEOUT_SEC)
        os.close(self._own)
        return self.shown.decode("utf-8")
