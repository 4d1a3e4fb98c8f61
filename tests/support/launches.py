"""Counts the Python programs and the groups of ranks that tests start: most of the suite's time goes into them."""

from __future__ import annotations

import collections
import os
import sys
from typing import Any

LAUNCHES: collections.Counter[str] = collections.Counter()
"""Test file -> launches in this process. What a shared fixture starts counts for the file that asked first."""


def count_launch() -> None:
    """Count one program, or one group of ranks."""
    if test := os.environ.get("PYTEST_CURRENT_TEST"):  # not the workers of pytest-xdist
        LAUNCHES[test.partition("::")[0]] += 1


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and os.path.basename(str(arguments[0])) in _PROGRAMS:
        count_launch()


# Shells and torchrun start the rest.
_PROGRAMS = {os.path.basename(sys.executable), "bash", "sh", "train", "torchrun"}


def watch() -> None:
    """Count what `subprocess` starts from now on, too."""
    sys.addaudithook(_audit)
