"""A short real run of train_configs/gpu_1x.toml: model FLOPs utilization, speed, and the time from launch to the first step.

The run is a process of `train` like any other, once compiled and once not. MFU and speed are those of its own payloads, the
median over the logged steps after the first, which compiles. On the CPU the model is tiny.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_table import Figure, bench_parser, print_figures
from trainer_run import GPU_CONFIG, TINY, overrides

ROOT = Path(__file__).resolve().parents[2]
FEWEST = (*TINY, "model.num_layers=1")  # to compile takes long
STEPS = {"cuda": 41, "cpu": 21}
STEPS_TO_COMPARE = {"cuda": 11, "cpu": 11}


@dataclass(frozen=True)
class Measured:
    """What a run said, and how long its first step took to come."""

    first_step_sec: float
    payloads: list[dict[str, Any]]
    """Metrics of the logged steps after the first."""

    def median(self, key: str) -> float | None:
        """Of a metric; None if the run has not reported it."""
        values = [metrics[key] for metrics in self.payloads if key in metrics]
        return statistics.median(values) if values else None


def run(folder: Path, sets: Sequence[str]) -> Measured:
    """Train.

    Raises:
        RuntimeError: the run failed.
    """
    words = [word for each in sets for word in ("--set", each)]
    command = [
        sys.executable,
        str(ROOT / "train"),
        "--config",
        str(GPU_CONFIG),
        "--run-dir",
        str(folder / "run"),
        *words,
    ]
    errors = folder / "stderr"
    began, first, payloads = time.perf_counter(), 0.0, []
    with errors.open("w", encoding="utf-8") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, cwd=ROOT, env=os.environ, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            payload = json.loads(line)
            if payload.get("mode") == "train":
                first = first or time.perf_counter() - began
                payloads.append(payload["metrics"])
    if process.wait() != 0:
        said = errors.read_text(encoding="utf-8").strip().splitlines()
        raise RuntimeError(next((line for line in reversed(said) if " ERROR " in line), said[-1]))
    return Measured(first, payloads[1:])


def measure(device: str, sets: Sequence[str]) -> list[Figure]:
    """Figures of both runs."""
    own = [*overrides(STEPS[device], device), *(FEWEST if device == "cpu" else ()), *sets]
    found = []
    can_compile = device == "cuda" or shutil.which("g++") is not None  # as torch's compiler for the CPU needs
    for is_compiled in (True, False) if can_compile else (False,):
        with tempfile.TemporaryDirectory() as name:
            steps = STEPS[device] if is_compiled else STEPS_TO_COMPARE[device]
            settings = [*own, f"train.steps={steps}", f"train.compile={str(is_compiled).lower()}"]
            measured = run(Path(name), settings)
        title = "compiled" if is_compiled else "not compiled"
        found.append(Figure(f"{title}: launch to first step", measured.first_step_sec, "s"))
        metrics = (("mfu", "MFU", ""), ("tokens_per_sec", "tokens per second", ""), ("step_time_sec", "step", "s"))
        for key, what, unit in metrics:
            value = measured.median(key)
            if value is not None:  # MFU is not known of a device whose peak is not
                found.append(Figure(f"{title}: {what}", value, unit))
    return found


def main() -> None:
    """Measure and print."""
    parser = bench_parser(__doc__, device="cuda", sets=True)
    args = parser.parse_args()
    print_figures("mfu", measure(args.device, args.sets), args)


if __name__ == "__main__":
    main()
