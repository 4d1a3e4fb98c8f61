"""Start-up time: `train --help`, and from launch to the first trained step on one rank.

The time to the first step is split into importing torch (in a process that only does that), importing the loop, and the rest up
to the payload of step 1. Numbers are medians over fresh processes with files in the page cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench_table import Figure, bench_parser, in_turns, median_figure, run_bench, seconds_of
from trainer_run import overrides, write_config

MAX_HELP_SEC = 0.4
PROGRAM = str(Path(__file__).resolve().parents[2] / "train")


def seconds(command: Sequence[str]) -> float:
    environ = {**os.environ, "NO_COLOR": "1"}
    return seconds_of(lambda: subprocess.run(command, check=True, capture_output=True, env=environ), "cpu")


def seconds_to_first_step(command: Sequence[str]) -> float:
    """Time from the launch of a run to the payload of its first step on stdout."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        spent = time.perf_counter() - began
        process.stdout.read()
    assert b'"global_step": 1' in line or b'"global_step":1' in line, line
    return spent


def measure(args: argparse.Namespace) -> list[Figure]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sets = [f"--set={each}" for each in (*overrides(1, "cpu"), f'run.dir="{folder}/runs"')]
        run = [sys.executable, PROGRAM, "--config", str(write_config(folder)), *sets]
        commands = {
            "python alone": [sys.executable, "-c", "pass"],
            "train --help": [sys.executable, PROGRAM, "--help"],
            "import torch": [sys.executable, "-c", "import torch"],
            "import trainer": [sys.executable, "-c", "import trainer.training.main"],
        }
        actions = {title: partial(seconds, command) for title, command in commands.items()}
        times = in_turns({**actions, "first step": partial(seconds_to_first_step, run)}, args.rounds)
    python, _, torch, trainer, first_step = map(statistics.median, times.values())
    return [
        median_figure("train --help", times["train --help"], "s", at_most=MAX_HELP_SEC),
        median_figure("launch to first step", times["first step"], "s"),
        Figure("  of which python itself", python, "s"),
        Figure("  of which importing torch", torch - python, "s"),
        Figure("  of which importing the trainer and its dependencies", trainer - torch, "s"),
        Figure("  of which config, data, model, sinks, step 1", first_step - trainer, "s"),
    ]


if __name__ == "__main__":
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    run_bench("start-up", parser, measure)
