"""The full trainer on one rank, in this process, for the benchmarks that look at its steps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from trainer.cli.parts import PARTS
from trainer.config.load import load_config
from trainer.distributed.env import RankInfo
from trainer.training.extension import Extension, Step
from trainer.training.loop import run_loop
from trainer.training.open_run import Launch, open_run
from trainer.training.plan import Plan, make_plan

LOG_INTERVAL = 10
ALONE = RankInfo()
GPU_CONFIG = Path(__file__).resolve().parents[2] / "train_configs" / "gpu_1x.toml"
# For a rehearsal of the config above on the CPU.
TINY = (
    *("data.seq_len=64", "data.mixing.batch_size=4", "data.mixing.num_streams_mixed=2"),
    *("model.dim=32", "model.num_layers=2", "ledger.capacity=64"),
    *("train.micro_batches=2", "train.compile=false"),
)

CONFIG = """\
[run]
name = "bench"
[train]
micro_batches = 2
[data]
seq_len = 128
[data.mixing]
num_streams_mixed = 4
batch_size = 4
[[data.source]]
name = "first"
root = "{corpus}"
modalities = ["a"]
weight = 3.0
[[data.source]]
name = "second"
root = "{corpus}"
modalities = ["b"]
weight = {{ schedule = "linear", unit = "step", points = {{ 0 = 3.0, 100 = 1.0 }} }}
[model]
dim = 384
num_layers = 6
[ledger]
capacity = 1024
"""


class StepWatcher:
    """Gets each finished step. This one ignores it."""

    def update(self, step: int, loss: float, tokens: int) -> None:
        """A step is finished, which trained on so many tokens."""


class WatchSteps(Extension):
    """Passes each finished step to the watcher of the benchmark, which was made before the run."""

    watcher = StepWatcher()

    def settled(self, step: Step, sums: Sequence[float] | None) -> None:
        WatchSteps.watcher.update(step.number, step.outcome.loss, step.outcome.tokens)


def write_corpus(root: Path) -> None:
    """Two modalities of four streams of words, about 200 kB per stream."""
    rng = np.random.default_rng(0)
    words = np.array(["the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with"])
    for modality in ("a", "b"):
        folder = root / modality
        folder.mkdir(parents=True)
        for stream in range(4):
            texts = [" ".join(rng.choice(words, int(rng.integers(200, 2000)))) for _ in range(40)]
            lines = [json.dumps({"text": text}) for text in texts]
            (folder / f"{stream}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_config(folder: Path) -> Path:
    """A config with a model of 10 M parameters, and its corpus. It needs the `overrides`."""
    write_corpus(folder / "corpus")
    path = folder / "bench.toml"
    path.write_text(CONFIG.format(corpus=folder / "corpus"), encoding="utf-8")
    return path


def plan_of(folder: Path, given: Path | None, *, steps: int, device: str, sets: Sequence[str] = ()) -> Plan:
    """The run to measure: from the given config, or from that of `write_config`, with settings."""
    given = given or write_config(folder)
    watched = 'extension=[{target="trainer_run:WatchSteps"}]'
    config = load_config(given, [*overrides(steps, device), watched, *sets])
    return make_plan(config, ALONE.world_size, parts=PARTS)


def overrides(steps: int, device: str) -> list[str]:
    """Settings of a run that is measured: nothing but steps, and a record."""
    quiet = ["eval.every=0", "checkpoint.every=0", 'metrics.wandb.mode="disabled"', "metrics.tensorboard=false"]
    # A warm-up of the learning rate longer than the run would be refused.
    whole = [f"train.steps={steps}", f"metrics.log_interval={LOG_INTERVAL}", f"scheduler.warmup_steps={min(steps, 10)}"]
    return [*whole, f'train.device="{device}"', 'metrics.stdout="json"', *quiet]


def run_trainer(plan: Plan, folder: Path, device: torch.device, watcher: StepWatcher) -> None:
    """Run the full trainer from its first to its last step; its payloads go nowhere."""
    with open("/dev/null", "w") as nowhere, contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        WatchSteps.watcher = watcher
        run = open_run(plan, Launch(run_dir=str(folder / "run")), ALONE, device, stack, stack)
        assert run is not None
        run_loop(run)
        if failed := run.view.diagnostics.summary():  # the watcher's own failure costs the run nothing, either
            raise RuntimeError("; ".join(failed))
