"""Small real runs of the trainer that nothing is wrong with, for the calibration of the diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tests.support.runs import run, write_tiny_config
from trainer.model.families import FAMILIES


def start(directory: Path, *, overrides: tuple[str, ...], nproc: int | None = None) -> Path:
    """Train for 120 steps; gives the run's directory.

    Raises:
        RuntimeError: the run failed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    options = [part for override in ("train.steps=120", *overrides) for part in ("--set", override)]
    run_dir = directory / "run"
    done = run("--config", write_tiny_config(directory), *options, "--run-dir", run_dir, "--stdout", "off", nproc=nproc)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return run_dir


REAL_RUNS: Mapping[str, Callable[[Path], Path]] = {
    "two sources": partial(start, overrides=()),
    "two ranks": partial(start, overrides=("run.seed=1",), nproc=2),
    "own pools": partial(start, overrides=("run.seed=2", 'data.mixing.batching_mode="device_per_stream"'), nproc=2),
    "stale, safe threshold": partial(
        start, overrides=("run.seed=3", 'ledger.wipe_mode="periodic_stale"', "ledger.stale_threshold=200")
    ),
    "skipping, 4 readers": partial(
        start, overrides=("run.seed=4", "data.mixing.num_streams_mixed=4", 'train.on_non_finite="skip"')
    ),
    "probed": partial(start, overrides=("run.seed=6", "ledger.probe_every=5", "metrics.log_interval=5")),
    "packed": partial(start, overrides=("run.seed=5", "data.pack=true", "train.micro_batches=4")),
    **{
        f"layers, {family}": partial(start, overrides=("metrics.per_layer=true", f'model.family="{family}"'))
        for family in FAMILIES
    },
    "layers, sgd": partial(start, overrides=("metrics.per_layer=true", 'optimizer.name="sgd"', "optimizer.lr=0.1")),
    "layers, muon": partial(start, overrides=("metrics.per_layer=true", 'optimizer.name="muon"')),
}
