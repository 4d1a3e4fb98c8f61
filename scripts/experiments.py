"""Runs of the program for the studies in this directory, whose results are kept in a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUN_LIMIT_SEC = 1200


def program(*arguments: object, codes: Collection[int] = (0,)) -> subprocess.CompletedProcess[str]:
    """Run `train` with these arguments. Raises RuntimeError: it ended with none of the exit codes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}
    command = [sys.executable, "-m", "trainer", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_LIMIT_SEC, check=False)
    if done.returncode not in codes:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done


class Results:
    """What runs gave, by setting (which has a `name`) and seed, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, dict[str, dict[str, Any]]] = {}
        if path.exists():
            self._found = json.loads(path.read_text(encoding="utf-8"))

    def complete(self, settings: Sequence[Any], seeds: int, run: Callable[..., dict[str, Any]], jobs: int) -> None:
        """Run what is missing: all settings of one seed before the next seed."""
        missing = [
            (setting, seed)
            for seed in range(seeds)
            for setting in dict.fromkeys(settings)
            if str(seed) not in self._found.get(setting.name, {})
        ]
        with ThreadPoolExecutor(jobs) as pool:
            found = pool.map(lambda job: run(*job), missing)
            for number, ((setting, seed), each) in enumerate(zip(missing, found, strict=True), start=1):
                self._found.setdefault(setting.name, {})[str(seed)] = each
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text(json.dumps(self._found, indent=1) + "\n", encoding="utf-8")
                said = ", ".join(f"{key} {value:.4g}" for key, value in each.items() if isinstance(value, float))
                print(f"{number} of {len(missing)}: {setting.name}, seed {seed}: {said}", file=sys.stderr, flush=True)

    def of(self, setting: Any, seed: int) -> dict[str, Any]:
        return self._found[setting.name][str(seed)]


def markdown(columns: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)
