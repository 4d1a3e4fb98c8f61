"""Times a few steps of a first config, so that the run it describes ends in minutes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from trainer.files import write_file
from trainer.tools.init.starter import Starter, render_starter
from trainer.wording import counted

TRIED_STEPS = 4  # the first is slower than the others, and is left out
TIMEOUT_SEC = 60.0
FEWEST_STEPS = 20
QUIET = (
    *("eval.every=0", "metrics.log_interval=1", "metrics.stdout=off", "metrics.wandb.mode=disabled"),
    *("checkpoint.every=0", "scheduler.warmup_steps=0"),
)


def timed(starter: Starter, minutes: float) -> Starter:
    """The starter with at most as many steps as take `minutes` on one rank of this machine, and the predicted time in words.

    The time is that of a few real steps, in a process of its own; a note says why, if they cannot be timed.
    """
    try:
        seconds = _seconds_per_step(starter)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        last = said.strip().splitlines()[-1] if said.strip() else type(error).__name__
        return replace(starter, notes=[*starter.notes, f"the time of a step could not be measured: {last}"])
    sizes = starter.sizes
    steps = min(sizes.steps, max(int(minutes * 60 / seconds), FEWEST_STEPS))
    passes = sizes.passes * steps / sizes.steps
    length = f"about {counted(round(passes, 2), 'pass')} over the data on 1 rank, {_duration(steps * seconds)}"
    length += f" on this machine ({seconds:.2g} s per step)"
    return replace(starter, sizes=replace(sizes, steps=steps, passes=passes), length=length)


def _seconds_per_step(starter: Starter) -> float:
    """The median time of the steps after the first of a short run.

    Raises:
        OSError, SubprocessError: the run fails, or takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        config, run_dir = Path(folder, "x.toml"), Path(folder, "run")
        write_file(config, render_starter(starter, schema=None).encode(), sync=False)
        line = [sys.executable, "-m", "trainer", "--config", str(config), "--run-dir", str(run_dir)]
        line += [part for setting in QUIET for part in ("--set", setting)]
        line += ["--steps", str(TRIED_STEPS)]
        subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_SEC, check=True)
        rows = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    times: list[float] = [row["metrics"]["step_time_sec"] for row in rows if row.get("mode") == "train"]
    return statistics.median(times[1:])


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"about {counted(round(seconds / 60), 'minute')}"
