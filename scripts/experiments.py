"""Runs of the program for the studies in this directory, whose results are kept in a file."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUN_LIMIT_SEC = 1200
# Of every run, unless the study or the setting says otherwise.
SETS: Mapping[str, object] = {
    "train.device": '"cpu"',
    "gns.enabled": "false",
    "metrics.log_interval": 10,
    "metrics.stdout": '"off"',
}


@dataclass(frozen=True)
class Setting:
    """A config by name, with some keys changed."""

    corpus: str
    overrides: tuple[tuple[str, object], ...] = ()

    @property
    def name(self) -> str:
        """In the file of results."""
        return "; ".join([self.corpus, *(f"{key}={value}" for key, value in self.overrides)])


def study_parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path("data/pytext"), help="made by `make data`")
    parser.add_argument("--out", type=Path, default=Path(f"build/{name}.json"), help="the results, kept")
    parser.add_argument("--work", type=Path, default=Path(f"build/{name}"), help="directory of the runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one core each")
    return parser


def program(*arguments: object, codes: Collection[int] = (0,)) -> subprocess.CompletedProcess[str]:
    """Run `train` with these arguments. Raises RuntimeError: it ended with none of the exit codes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}
    command = [sys.executable, "-m", "trainer", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_LIMIT_SEC, check=False)
    if done.returncode not in codes:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done


def train(
    setting: Setting, seed: int, config: str, work: Path, sets: Mapping[str, object] | None = None
) -> tuple[Path, float]:
    """Train once in a directory of `work`, with `sets` and what the setting changes: the run's directory,
    and its seconds. Raises RuntimeError: the run failed."""
    folder = f"{zlib.crc32(f'{setting.name}, seed {seed}'.encode()):08x}"
    sets = {"run.seed": seed, **SETS, **(sets or {}), **dict(setting.overrides)}
    path, run_dir = work / f"{folder}.toml", work / folder
    shutil.rmtree(run_dir, ignore_errors=True)  # of a call that was cut short
    work.mkdir(parents=True, exist_ok=True)
    path.write_text(config, encoding="utf-8")
    overrides = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    began = time.perf_counter()
    program("--config", str(path), "--run-dir", str(run_dir), *overrides)
    return run_dir, time.perf_counter() - began


def rows_of(run_dir: Path, mode: str) -> list[dict[str, Any]]:
    """The metrics of the rows of a mode, with their step as `global_step`."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [{**row["metrics"], "global_step": row["global_step"]} for row in rows if row.get("mode") == mode]


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

    def mean(self, setting: Any, key: str) -> tuple[float, float] | None:
        """(mean, standard error over the seeds); None if no run has the key."""
        values = [found[key] for found in self._found.get(setting.name, {}).values() if key in found]
        return mean_of(values) if values else None


def mean_of(values: Sequence[float]) -> tuple[float, float]:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def markdown(columns: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)
