"""Imports of torch and what needs it: most of the time that a short run takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import without garbage collections, and leave what was imported out of all that follow: it stays anyway.

    Some 20 % of the time that importing torch takes, and most of that of each later collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
