"""Runs of the program for the studies in this directory, whose results are kept in a file."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUN_LIMIT_SEC = 1200
# Of every run, unless the study says otherwise.
SETS: Mapping[str, object] = {
    "train.device": '"cpu"',
    "gns.enabled": "false",
    "metrics.log_interval": 10,
    "metrics.stdout": '"off"',
}


def program(*arguments: object, codes: Collection[int] = (0,)) -> subprocess.CompletedProcess[str]:
    """Run `train` with these arguments. Raises RuntimeError: it ended with none of the exit codes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}
    command = [sys.executable, "-m", "trainer", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_LIMIT_SEC, check=False)
    if done.returncode not in codes:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done


def train(name: str, seed: int, config: str, work: Path, sets: Mapping[str, object]) -> Path:
    """Train once in a directory of `work`, which is returned, with `sets`. Raises RuntimeError: the run failed."""
    folder = f"{zlib.crc32(f'{name}, seed {seed}'.encode()):08x}"
    sets = {"run.seed": seed, **SETS, **sets}
    path, run_dir = work / f"{folder}.toml", work / folder
    shutil.rmtree(run_dir, ignore_errors=True)  # of a call that was cut short
    work.mkdir(parents=True, exist_ok=True)
    path.write_text(config, encoding="utf-8")
    overrides = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    program("--config", str(path), "--run-dir", str(run_dir), *overrides)
    return run_dir


def rows_of(run_dir: Path, mode: str) -> list[dict[str, Any]]:
    """The metrics of the rows of a mode, with their step as `global_step`."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [{**row["metrics"], "global_step": row["global_step"]} for row in rows if row.get("mode") == mode]


class Results:
    """What runs gave, by name and seed, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, dict[str, dict[str, Any]]] = {}
        if path.exists():
            self._found = json.loads(path.read_text(encoding="utf-8"))

    def complete(self, names: Sequence[str], seeds: int, run: Callable[[str, int], dict[str, Any]], jobs: int) -> None:
        """Run what is missing: all names of one seed before the next seed."""
        every = [(name, seed) for seed in range(seeds) for name in names]
        missing = [(name, seed) for name, seed in every if str(seed) not in self._found.get(name, {})]
        with ThreadPoolExecutor(jobs) as pool:
            found = pool.map(lambda job: run(*job), missing)
            for number, ((name, seed), each) in enumerate(zip(missing, found, strict=True), start=1):
                self._found.setdefault(name, {})[str(seed)] = each
                self._path.parent.mkdir(parents=True, exist_ok=True)
                lines = (f"{json.dumps(name)}: {json.dumps(runs)}" for name, runs in self._found.items())
                self._path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
                said = ", ".join(f"{key} {value:.4g}" for key, value in each.items() if isinstance(value, float))
                print(f"{number} of {len(missing)}: {name}, seed {seed}: {said}", file=sys.stderr, flush=True)

    def of(self, name: str, seeds: int) -> list[dict[str, Any]]:
        """What the runs of the first seeds gave."""
        return [self._found[name][str(seed)] for seed in range(seeds)]


def mean_of(values: Sequence[float]) -> tuple[float, float]:
    """(mean, its standard error; NaN for one value)."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def markdown(columns: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    header, *lines = (f"| {' | '.join(map(str, cells))} |" for cells in (columns, *rows))
    return "\n".join([header, "|---" * len(columns) + "|", *lines])
