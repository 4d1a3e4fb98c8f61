"""Records of runs without a model: the data, the ledger and the noise scale are the real ones; loss and clock are made up.

A `Scenario` says what kind of run it is. `write_run` gives a run directory as the trainer leaves one, one row a logged
step; hooks put faults in, either into a real part (a reader that is never picked) or into the rows (a slow machine).
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.noise_windows import window_of
from tests.support.records import Rows, write_record
from tests.support.runs import make_corpus
from tests.support.streams import mixing_dataset
from trainer.data import BlendDataset, BlendSource, BytesTokenizer, ConstantWeight, ScheduledWeight, discover_nested
from trainer.lab.stream_mixing import StreamMixingDataset
from trainer.ledger import Ledger, LedgerOptions
from trainer.metrics.aggregate import Recorder, reduce_over_ranks
from trainer.metrics.catalog_rows import SHARE_ERRORS
from trainer.metrics.noise_scale import NoiseScaleAverage, Window
from trainer.metrics.payload_contract import encode_payload
from trainer.options import MicroBatches

SEQ_LEN = 16
PARAMETERS = 4000  # of the made-up model whose gradients the noise scale sees


@dataclass(frozen=True)
class Scenario:
    """The settings of a made-up run; the names are the config's where it has them."""

    seed: int
    steps: int = 300
    log_interval: int = 5
    micro_batches: int = 2
    world_size: int = 1
    num_streams_mixed: int = 4
    pick_mode: str = "weighted"
    batching_mode: str = "per_stream"
    batch_size: int = 4
    batch_size_by_modality: Mapping[str, int] = field(default_factory=dict, hash=False)
    repeat: bool = True
    num_sources: int = 1
    streams: int = 6
    documents: int = 24
    max_group_cells: int = 8
    wipe_mode: str = "lru"
    capacity: int = 64
    stale_threshold: int = 0
    wipe_every: int = 0
    noise_scale: float = 8.0
    step_sec: tuple[float, float] = (0.05, 2.0)  # bounds of the time of a step
    has_same_data: bool = False  # all ranks read the same batches
    first_loss: float = 5.5
    last_loss: float = 1.3
    # Called before each step with every source of every rank; with the states before they are stored; with all rows.
    on_dataset: Callable[[int, StreamMixingDataset], None] | None = None
    on_states: Callable[[int, torch.Tensor], None] | None = None
    on_rows: Callable[[Rows], None] | None = None


def healthy_scenario(seed: int, **changes: Any) -> Scenario:
    """Settings drawn by the seed, all of them sound."""
    rng = random.Random(f"scenario {seed}")
    settings: dict[str, Any] = {
        "log_interval": rng.choice((1, 2, 5)),
        "micro_batches": rng.choice((1, 2, 4)),
        "world_size": rng.choice((1, 1, 2)),
        "num_streams_mixed": rng.choice((2, 4, 6)),
        "batching_mode": rng.choice(("per_stream", "device_per_stream")),
        "num_sources": rng.choice((1, 1, 2)),
        "documents": rng.choice((16, 32, 48)),
        "last_loss": rng.uniform(0.05, 3.0),
        "seed": seed,
        **changes,
    }
    batch = 4.0 * settings["micro_batches"] * settings["world_size"]
    return Scenario(**{"noise_scale": batch * rng.choice((0.6, 1.0, 4.0)), **settings})


def write_run(scenario: Scenario, directory: Path) -> Path:
    """Make the run, and leave its record in `directory`."""
    rows = {step: dict(row) for step, row in _make_rows(replace(scenario, on_rows=None)).items()}
    if scenario.on_rows is not None:
        scenario.on_rows(rows)
    environment, status = {"world_size": scenario.world_size}, {"state": "done", "last_step": scenario.steps}
    columns: dict[str, dict[int, float]] = {}
    for step, row in rows.items():
        for key, value in row.items():
            columns.setdefault(key, {})[step] = value
    return write_record(directory, columns, config=_config(scenario), env=environment, status=status)


def add_restarts(directory: Path, restarts: list[tuple[int, int]]) -> None:
    """Rewrite a record as if the run had died after some steps and gone on from others: (died after, went on after)."""
    path = directory / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line)["global_step"] for line in lines]
    out: list[str] = []
    at = 0
    for died, resumed in [*restarts, (steps[-1], 0)]:
        part = [line for line, step in zip(lines, steps, strict=True) if at < step <= died]
        if out:
            part[0] = encode_payload({**json.loads(part[0]), "restart": {"from_step": at}})
        out += part
        at = resumed
    path.write_text("\n".join(out) + "\n", encoding="utf-8")


def _config(scenario: Scenario) -> dict[str, Any]:
    mixing = {
        key: getattr(scenario, key)
        for key in ("num_streams_mixed", "pick_mode", "batching_mode", "batch_size", "repeat")
    }
    mixing["batch_size_by_modality"] = dict(scenario.batch_size_by_modality)
    return {
        "train": {"micro_batches": scenario.micro_batches, "steps": scenario.steps, "precision": "fp32"},
        "data": {"mixing": mixing, "prefetch": 2, "source": [{"name": n, "weight": 1.0} for n in _names(scenario)]},
        "model": {"target": "trainer.model:build", "dim": 64, "num_layers": 2},
        "ledger": {"capacity": scenario.capacity, "stale_threshold": scenario.stale_threshold},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"every": 50},
    }


def _names(scenario: Scenario) -> list[str]:
    return [f"s{i}" for i in range(scenario.num_sources)]


@lru_cache
def _corpus(streams: int, documents: int, seed: int) -> tempfile.TemporaryDirectory[str]:
    directory = tempfile.TemporaryDirectory()
    make_corpus(Path(directory.name), streams=streams, documents=documents, seed=seed)
    return directory


class _Rank:
    """One rank's data and ledger."""

    def __init__(self, scenario: Scenario, corpus: Path, rank: int) -> None:
        self.sources: list[StreamMixingDataset] = []
        for index, name in enumerate(_names(scenario)):
            modalities = ["a", "b"] if scenario.num_sources == 1 else [["a", "b"][index]]
            self.sources.append(
                mixing_dataset(
                    discover_nested(corpus, modalities),
                    name=name,
                    tokenizer=BytesTokenizer(),
                    seq_len=SEQ_LEN,
                    num_streams_mixed=scenario.num_streams_mixed,
                    pick_mode=scenario.pick_mode,
                    batching_mode=scenario.batching_mode,
                    batch_size=scenario.batch_size,
                    batch_size_by_modality=scenario.batch_size_by_modality,
                    max_group_cells=scenario.max_group_cells,
                    repeat=scenario.repeat,
                    seed=scenario.seed,
                    rank=rank,
                    world_size=scenario.world_size,
                )
            )
        weights: list[ConstantWeight | ScheduledWeight] = [
            ConstantWeight(1.0),
            ScheduledWeight("linear", {0: 1.0, scenario.steps: 2.0}),
        ]
        if not scenario.repeat:
            weights = [ConstantWeight(1.0), ConstantWeight(1.0)]
        named = zip(_names(scenario), self.sources, weights, strict=False)
        blend = [BlendSource(name, source, weight) for name, source, weight in named]
        micro_batches = MicroBatches.constant(scenario.micro_batches)
        self.blend = BlendDataset(blend, seed=scenario.seed, micro_batches=micro_batches)
        self.ledger = Ledger(LedgerOptions.of(scenario), state_width=2)
        self.recorder = Recorder()

    def step(self, scenario: Scenario, step: int) -> int:
        """One optimizer step; gives its tokens."""
        self.ledger.begin_step(step)
        tokens = 0
        for _ in range(scenario.micro_batches):
            batch = next(self.blend, None)
            is_masked = float(batch is None or not (batch["targets"] != -100).any())
            self.recorder.add({"stream_mixing/masked_share": is_masked})
            if batch is None:
                continue
            self.recorder.add(self.blend.drain_step_metrics())
            tokens += int((batch["targets"] != -100).sum())
            groups, cells, last = (np.asarray(batch[key]) for key in ("group_ids", "cell_index", "is_last"))
            self.ledger.lookup(groups, cells)
            states = torch.ones(len(groups), 2)
            if scenario.on_states is not None:
                scenario.on_states(step, states)
            self.ledger.store(groups, cells, last, states)
        return tokens

    def drain(self) -> dict[str, Any]:
        """What this rank reports on a logging step."""
        return {**self.recorder.drain_metrics(), **self.ledger.drain_metrics()}


def _over_ranks(by_rank: list[dict[str, Any]]) -> dict[str, float]:
    merged = reduce_over_ranks(by_rank, {*by_rank[0]}.union(*by_rank), device="cpu", world_size=1)
    errors = [abs(merged.pop(key)) for key in list(merged) if key.startswith(SHARE_ERRORS)]
    return {**merged, "blend/max_share_error": max(errors)}


def _noise_window(rng: np.random.Generator, scenario: Scenario, scale: float) -> Window:
    """A window of gradients whose noise scale is `scale`: mean of square norm 1, noise of trace `scale` an example."""
    micros, ranks, rows = scenario.micro_batches, scenario.world_size, scenario.batch_size
    if micros * ranks == 1:
        micros, rows = 2, max(rows // 2, 1)
    mean = np.full(PARAMETERS, 1.0 / math.sqrt(PARAMETERS))
    sigma = math.sqrt(scale / PARAMETERS / rows)
    grads = mean + sigma * rng.standard_normal((ranks, micros, PARAMETERS))
    if scenario.has_same_data:
        grads[:] = grads[0]
    return window_of([[(grad, 1.0 / micros, 1.0 / rows) for grad in of_rank] for of_rank in grads])


def _loss_at(scenario: Scenario, step: int) -> float:
    return scenario.last_loss + (scenario.first_loss - scenario.last_loss) * float((1 + step / 10) ** -0.9)


@lru_cache(32)  # many faults are changes of the same healthy run
def _make_rows(scenario: Scenario) -> Rows:
    rng = random.Random(f"clock {scenario.seed}")
    noise = np.random.default_rng(scenario.seed)
    corpus = Path(_corpus(scenario.streams, scenario.documents, scenario.seed % 4).name)
    ranks = [_Rank(scenario, corpus, rank) for rank in range(scenario.world_size)]
    gns = NoiseScaleAverage(0.95)
    rows: Rows = {}
    spread = rng.uniform(0.01, 0.08)
    base = rng.uniform(*scenario.step_sec)
    for step in range(1, scenario.steps + 1):
        if scenario.on_dataset is not None:
            for rank in ranks:
                for source in rank.sources:
                    scenario.on_dataset(step, source)
        done = [rank.step(scenario, step) for rank in ranks]
        tokens = sum(done)
        if not tokens:
            break
        gns.update(_noise_window(noise, scenario, scenario.noise_scale * (0.7 + 0.6 * step / scenario.steps)))
        if step != 1 and step % scenario.log_interval and step != scenario.steps:
            continue
        loss = _loss_at(scenario, step) * math.exp(spread * _heavy_tail(rng))
        full = scenario.world_size * scenario.micro_batches * scenario.batch_size * SEQ_LEN
        seconds = base * (5.0 if step == 1 else 1.0) * math.exp(0.08 * _heavy_tail(rng)) * (0.2 + tokens / full)
        own = [seconds * rng.uniform(0.55, 0.65) for _ in ranks]
        row = {
            "loss": loss,
            "grad_norm": math.exp(0.3 * rng.gauss(0, 1)),
            "lr": 1e-3,
            "tokens_in_step": float(tokens),
            "step_time_sec": seconds,
            "tokens_per_sec": tokens / seconds,
            "time/data_sec": seconds * rng.expovariate(1 / 0.01),
            "non_finite_steps": 0.0,
            **_over_ranks([rank.drain() for rank in ranks]),
            **gns.drain_metrics(),
        }
        if scenario.world_size > 1:
            row.update({"time/slowest_rank_sec": max(own), "time/fastest_rank_sec": min(own)})
        rows[step] = row
    return rows


def _heavy_tail(rng: random.Random) -> float:
    """Student's t with 8 degrees of freedom: one value in 5,000 lies beyond 5."""
    return rng.gauss(0, 1) / math.sqrt(rng.gammavariate(4.0, 0.25))
