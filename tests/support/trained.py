"""A run of the program that must end as it should, in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.runs import run


def overrides(*sets: str) -> list[str]:
    """`--set` for each."""
    return [word for each in sets for word in ("--set", each)]


def train(config: Path, run_dir: Path, *sets: str, more: tuple[object, ...] = (), code: int = 0, **options: Any) -> str:
    """Train into `run_dir`; returns stderr.

    Args:
        sets: overrides of the config.
        more: further words of the command line.
        code: how it must end.
        options: of `runs.run`.
    """
    line = ("--config", config, "--run-dir", run_dir, "--stdout", "off", *overrides(*sets), *more)
    done = run(*line, **options)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stderr
