"""`run` and `train` of tests.support.runs, for runs that need no process of their own.

All those of a process of tests take place in one standing group of ranks. Not for code that changes the package or its
process for good, nor for wandb, whose service stays.
"""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

from tests.support.many_runs import Group
from tests.support.runs import overrides


@functools.cache
def _group() -> Group:
    return Group(2)


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """As `tests.support.runs.run`, on at most two ranks."""
    return _group().run(*arguments, **options)


def train(config: Path, run_dir: Path, *sets: str, more: tuple[object, ...] = (), code: int = 0, **options: Any) -> str:
    """As `tests.support.runs.train`, on at most two ranks."""
    done = run("--config", config, "--run-dir", run_dir, "--stdout", "off", *overrides(*sets), *more, **options)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stderr
