"""The golden cases: small runs over the trainer's paths, and what of a run counts.

    python -m tests.golden.cases FOLDER

makes all of them below FOLDER, with whichever `trainer` Python finds.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.support.runs import ROOT, overrides, read_rows, run, write_tiny_config

MEASURED = ("time/", "smoothed/tokens", "smoothed/step", "step_time", "tokens_per_sec", "checkpoint/", "mfu", "gpu/")
STEPS = 12
EXTRA = """
[eval]
every = 6
batches = 2
holdout_fraction = 0.2
depth = true

[checkpoint]
every = 6
"""


class Case(NamedTuple):
    """One run, or one that is stopped and resumed on other ranks.

    Attributes:
        sets: `--set` of every launch.
        ranks: of each launch.
        config: one of the diagnostic configs; empty: the tiny one.
        fault: see `tests.support.faulty_model`.
        first: what ends the first of two launches.
    """

    sets: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (2,)
    config: str = ""
    fault: str = "{}"
    first: tuple[str, ...] = ("--steps", "6")


FAULTY = ("model.target=tests.support.faulty_model:build", "model.contract=false")
NAN = '{"what": "nan", "rank": 1, "step": 5}'
RECALL = 'data.source=[{name="streams",paths=["recall/recall/*"]}]'
MIXED = 'data.source=[{name="streams",paths=["recall/recall/*", "code/cpp/*"]}]'
CASES: dict[str, Case] = {
    "one_rank": Case(("metrics.per_layer=true", "metrics.per_source=true"), ranks=(1,)),
    "ddp": Case(("sample.every=6", "sample.tokens=12", "metrics.per_layer=true")),
    "fsdp": Case(("distributed.strategy=fsdp",)),
    "full_rows": Case(
        ('data.mixing={batching_mode="per_row", batch_size=4, num_streams_mixed=2}', "metrics.per_source=true")
    ),
    "full_rows_on_fewer_ranks": Case(
        ('data.mixing={batching_mode="per_row", batch_size=3, num_streams_mixed=2}', 'data.align="document"'),
        ranks=(2, 1),
    ),
    "swept": Case(("ledger.wipe_mode=periodic_stale", "ledger.stale_threshold=3")),
    "resumed_on_fewer_ranks": Case((), ranks=(2, 1)),
    "skipped_steps": Case((*FAULTY, "train.on_non_finite=skip"), fault=NAN),
    "growing_batch": Case(('train.micro_batches={schedule="step", points={0=1, 5=2, 9=4}}', "optimizer.name=muon")),
    "gated_delta": Case(("model.family=gated_delta", "optimizer.name=sgd"), ranks=(1,)),
    "diag_healthy": Case((MIXED,), config="healthy"),
    "hsdp": Case(("distributed.strategy=hsdp", "distributed.replicas=2"), ranks=(4,)),
    "chunked": Case(("objective.z_loss=1e-4", "objective.chunk_tokens=16")),
    "resumed_on_more_ranks": Case(("distributed.strategy=fsdp",), ranks=(2, 3)),
    "resumed_in_tokens": Case(
        ("train.steps=0", "train.tokens=1200", "scheduler.name=wsd"), ranks=(2, 2), first=("--set", "train.tokens=700")
    ),
    "stopped_by_nan": Case(FAULTY, fault=NAN),
    "exhausted": Case(("data.mixing.repeat=false", "data.mixing.pick_mode=round_robin", "train.steps=400")),
    "device_per_stream": Case(
        ("data.mixing.batching_mode=device_per_stream", "ledger.dtype=bfloat16", "train.precision=bf16")
    ),
    "transformer": Case(("model.family=transformer", "ledger.wipe_mode=full", "ledger.wipe_every=5"), ranks=(1,)),
    "own_model": Case(("model.target=examples.own_parts.my_parts:build_model", "model.num_layers=1"), ranks=(1,)),
    "diag_exhaust_spike": Case((RECALL,), config="diag_exhaust_spike"),
    "diag_imbalanced_bs": Case((MIXED,), config="diag_imbalanced_bs"),
    "diag_stale_false_evict": Case((MIXED, "ledger.stale_threshold=1"), config="diag_stale_false_evict"),
}


class Place(NamedTuple):
    """Of a number in the record of a run."""

    mode: str
    metric: str
    step: int


class Left(NamedTuple):
    """What the runs of a case left."""

    exit_codes: list[int]
    events: list[str]
    """Each with its step, in order."""
    numbers: Mapping[Place, float | None]
    """Without measured times. None: there is a number, which is not recorded."""


def make_runs(folder: Path, names: Iterable[str] = CASES) -> None:
    """Make the runs of cases below `folder`."""
    tiny, codes = write_tiny_config(folder, EXTRA), {}
    done = run(*f"data synth key-recall --out {folder}/recall --groups 768 --cells 3 --streams 8".split())
    assert done.returncode == 0, done.stderr
    shutil.copytree(folder / "corpus" / "b", folder / "code" / "cpp")
    for name in names:
        case = CASES[name]
        launches = [case.first, ("--resume", "auto")] if len(case.ranks) == 2 else [()]
        codes[name] = [_launch(name, ranks, own, tiny) for ranks, own in zip(case.ranks, launches, strict=True)]
    (folder / "exit_codes.json").write_text(json.dumps(codes))


def _launch(name: str, ranks: int, own: tuple[str, ...], tiny: Path) -> int:
    case = CASES[name]
    config = ROOT / "train_configs" / "diagnostics" / f"{case.config}.toml" if case.config else tiny
    steps = () if "--steps" in own or any("steps=" in each for each in case.sets) else ("--steps", STEPS)
    done = run(
        *("--config", config, "--run-dir", tiny.parent / name, "--stdout", "off"),
        *(*overrides("train.spike_sigma=6", *case.sets), *steps, *own),
        nproc=ranks if ranks > 1 else None,
        cwd=tiny.parent if case.config else ROOT,
        extra={"FAULT": case.fault},
    )
    assert done.returncode in (0, 1), f"{name}: {done.stderr[-3000:]}"
    return done.returncode


def read_case(folder: Path, name: str) -> Left:
    """What a case left below `folder`."""
    events = [json.loads(line) for line in (folder / name / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return Left(
        json.loads((folder / "exit_codes.json").read_text())[name],
        [f"{event['event']} {event.get('global_step')}" for event in events],
        {
            Place(mode, metric, step): value
            for (mode, step), row in read_rows(folder / name / "metrics.jsonl").items()
            for metric, value in row.items()
            if not metric.startswith(MEASURED)
        },
    )


if __name__ == "__main__":
    make_runs(Path(sys.argv[1]))
