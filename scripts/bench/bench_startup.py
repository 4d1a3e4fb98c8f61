"""Start-up time: `train --help`, and from launch to the first trained step on one rank.

The time to the first step is split into importing torch (in a process that only does that), importing the loop, and the rest up
to the payload of step 1. Numbers are medians over fresh processes with files in the page cache.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench_table import Figure, bench_parser, parse, print_figures
from trainer_run import CONFIG, LOG_INTERVAL, write_corpus

MAX_HELP_SEC = 0.4
PROGRAM = str(Path(__file__).resolve().parents[2] / "train")


def seconds(command: Sequence[str]) -> float:
    """Run time of a process."""
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "NO_COLOR": "1"})
    return time.perf_counter() - began


def seconds_to_first_step(config: Path, runs: Path) -> float:
    """Time from the launch of a run to the payload of its first step on stdout."""
    command = [sys.executable, PROGRAM, "--config", str(config), "--set", f'run.dir="{runs}"']
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        spent = time.perf_counter() - began
        process.stdout.read()
    assert b'"global_step": 1' in line or b'"global_step":1' in line, line
    return spent


def measure(rounds: int) -> list[Figure]:
    """All figures, measured in turn."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus")
        config = folder / "bench.toml"
        text = CONFIG.format(steps=1, device="cpu", log_interval=LOG_INTERVAL, corpus=folder / "corpus")
        config.write_text(text.replace("dim = 512\nnum_layers = 6", "dim = 64\nnum_layers = 2"), encoding="utf-8")
        commands = {
            "python alone": [sys.executable, "-c", "pass"],
            "train --help": [sys.executable, PROGRAM, "--help"],
            "import torch": [sys.executable, "-c", "import torch"],
            "import trainer": [sys.executable, "-c", "import trainer.training.main"],
        }
        times: dict[str, list[float]] = {name: [] for name in [*commands, "first step"]}
        for _ in range(rounds + 1):  # the first round fills the caches
            for title, command in commands.items():
                times[title].append(seconds(command))
            times["first step"].append(seconds_to_first_step(config, folder / "runs"))
    whole = {title: statistics.quantiles(each[1:], n=4) for title, each in times.items()}
    python, torch, trainer = (whole[title][1] for title in ("python alone", "import torch", "import trainer"))
    first_step = whole["first step"][1]
    return [
        *(
            Figure(name, middle, "s", low, high, at_most=at_most)
            for name, (low, middle, high), at_most in (
                ("train --help", whole["train --help"], MAX_HELP_SEC),
                ("launch to first step", whole["first step"], None),
            )
        ),
        Figure("  of which python itself", python, "s"),
        Figure("  of which importing torch", torch - python, "s"),
        Figure("  of which importing the trainer and its dependencies", trainer - torch, "s"),
        Figure("  of which config, data, model, sinks, step 1", first_step - trainer, "s"),
    ]


def main() -> None:
    """Measure and print."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    args = parse(parser)
    print_figures("start-up", measure(args.rounds), args)


if __name__ == "__main__":
    main()
