"""Short real runs of the trainer, drawn by a seed, with nothing wrong that diagnosis could find."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from tests.support.runs import make_corpus, run

WORLD_SIZES = (1, 2, 4)
SECONDS_PER_RUN = 60  # on a busy machine


def healthy_config(seed: int, world_size: int, directory: Path) -> dict[str, Any]:
    """The config of a tiny run on a corpus that is made below `directory`; all of its settings are sound.

    A slice has enough groups for several picks, and every rank several streams: less is what `exhaust_churn` is there for.
    """
    rng = random.Random(f"healthy {seed} {world_size}")
    readers = rng.choice((2, 3, 4))
    has_own_pools = world_size > 1 and rng.random() < 0.3
    is_closed = rng.random() < 0.5  # as many streams as readers: nothing refills the pool before the first one ends
    streams = readers * (world_size if has_own_pools else 1) * (1 if is_closed else 3)
    modalities = rng.choice((("a",), ("a", "b")))
    documents = rng.choice((10, 20, 40)) * (1 if has_own_pools else world_size)
    corpus = directory / f"corpus-{seed}"
    make_corpus(corpus, streams=-(-streams // len(modalities)), documents=documents, seed=seed)
    if rng.random() < 0.5:  # modality b is learnt in no time
        for path in (corpus / "b").iterdir():
            words = [len(json.loads(line)["text"].split()) for line in path.read_text(encoding="utf-8").splitlines()]
            path.write_text("".join(json.dumps({"text": "so " * number}) + "\n" for number in words), encoding="utf-8")
    mixing = {
        "num_streams_mixed": readers,
        "batch_size": rng.choice((2, 4)),
        "batching_mode": "device_per_stream" if has_own_pools else "per_stream",
        "pick_mode": rng.choice(("weighted", "weighted", "round_robin", "uniform")),
    }
    weights = [1.0, rng.choice((0.1, 0.3, 1.0))]
    parts = [[each] for each in modalities] if rng.random() < 0.5 else [list(modalities)]
    return {
        "run": {"name": "healthy", "dir": str(directory), "seed": seed},
        "train": {"steps": rng.choice((20, 30, 40, 60)), "micro_batches": rng.choice((1, 2, 3)), "device": "cpu"},
        "data": {
            "seq_len": 16,
            "max_group_cells": rng.choice((8, 32)),
            "mixing": mixing,
            "source": [
                {"name": "".join(part), "root": str(corpus), "modalities": part, "weight": weight}
                for part, weight in zip(parts, weights, strict=False)
            ],
        },
        "model": {"dim": 16, "num_layers": 2},
        "ledger": {"capacity": 128},
        "optimizer": {"lr": rng.choice((1e-3, 3e-3, 1e-2))},
        "scheduler": {"warmup_steps": rng.choice((2, 10))},
        "metrics": {"log_interval": rng.choice((1, 1, 2, 5)), "stdout": "off", "per_layer": rng.random() < 0.3},
    }


def make_healthy_runs(directory: Path, world_size: int, seeds: Sequence[int]) -> list[Path]:
    """Train a run for each seed, one after another; gives the directories.

    Raises:
        RuntimeError: a run failed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    found = []
    for seed in seeds:
        config, run_dir = directory / f"{seed}.toml", directory / f"run-{seed}"
        config.write_text(tomli_w.dumps(healthy_config(seed, world_size, directory)), encoding="utf-8")
        done = run("--config", config, "--run-dir", run_dir, nproc=world_size if world_size > 1 else None)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        found.append(run_dir)
    return found
