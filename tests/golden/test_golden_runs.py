"""Small runs over the trainer's paths, equal to the last bit to those that golden_runs.json was recorded from.

Per run: the exit codes, a digest of the final weights and of the optimizer's moments, the events in order, and per metric a
digest of its values over all rows (measured times aside). A change that only moves code leaves all of them as they are. One
that changes a number on purpose says so in CHANGELOG.md and records the file again:

    python -m tests.golden.test_golden_runs --record

The runs use instruction sets that every x86-64 processor has, so that the digests do not depend on the machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import model_content
from tests.support.runs import ROOT, overrides, read_rows, run, write_tiny_config

GOLDEN = Path(__file__).with_name("golden_runs.json")
PORTABLE = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "DNNL_MAX_CPU_ISA": "SSE41",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    "OPENBLAS_CORETYPE": "Nehalem",
    "OMP_NUM_THREADS": "1",
}
MEASURED = ("time/", "smoothed/tokens", "smoothed/step", "step_time", "tokens_per_sec", "checkpoint/", "mfu", "gpu/")
STEPS = 12
EXTRA = """
[eval]
every = 6
batches = 2
holdout_fraction = 0.2

[checkpoint]
every = 6
"""


@dataclass(frozen=True)
class Case:
    """One run, or several in one directory.

    Attributes:
        sets: `--set` of every launch.
        launches: per launch the ranks and the arguments of its own.
        config: one of the diagnostic configs; empty: the tiny one.
        fault: see `tests.support.faulty_model`.
    """

    sets: tuple[str, ...] = ()
    launches: tuple[tuple[int, tuple[str, ...]], ...] = ((2, ()),)
    config: str = ""
    fault: str = "{}"


def _ranks(number: int) -> tuple[tuple[int, tuple[str, ...]], ...]:
    return ((number, ()),)


def _resumed(first: int, then: int) -> tuple[tuple[int, tuple[str, ...]], ...]:
    return ((first, ("--steps", "6")), (then, ("--resume", "auto")))


FAULTY = ("model.target=tests.support.faulty_model:build", "model.contract=false")
NAN = '{"what": "nan", "rank": 1, "step": 5}'
RECALL = 'data.source=[{name="streams",layout="direct",paths=["recall/recall/*"]}]'
MIXED = 'data.source=[{name="streams",layout="direct",paths=["recall/recall/*", "code/cpp/*"]}]'
CASES: dict[str, Case] = {
    "one_rank": Case(("gns.components_every=4", "metrics.per_layer=true", "metrics.per_source=true"), _ranks(1)),
    "ddp": Case(("ledger.probe_every=4", "sample.every=6", "sample.tokens=12", "metrics.per_layer=true")),
    "fsdp": Case(("distributed.strategy=fsdp", "ledger.probe_every=4")),
    "hsdp": Case(("distributed.strategy=hsdp", "distributed.replicas=2", "distributed.accumulate=whole"), _ranks(4)),
    "packed": Case(("data.pack=true", "objective.z_loss=1e-4", "objective.chunk_tokens=16")),
    "tbptt_burn_in": Case(("train.tbptt_cells=2", "train.activation_checkpointing=cell")),
    "exchange": Case(("ledger.ownership=exchange", "ledger.wipe_mode=periodic_stale", "ledger.stale_threshold=3")),
    "resumed_on_fewer_ranks": Case((), _resumed(2, 1)),
    "resumed_on_more_ranks": Case(("checkpoint.background=true", "distributed.strategy=fsdp"), _resumed(2, 3)),
    "resumed_in_tokens": Case(
        ("train.steps=0", "train.tokens=1200", "scheduler.name=wsd"),
        ((2, ("--set", "train.tokens=700")), (2, ("--resume", "auto"))),
    ),
    "skipped_steps": Case((*FAULTY, "train.on_non_finite=skip"), fault=NAN),
    "stopped_by_nan": Case(FAULTY, fault=NAN),
    "growing_batch": Case(
        ('train.micro_batches={schedule="step", points={0=1, 5=2, 9=4}, lr="sqrt"}', "optimizer.name=muon")
    ),
    "exhausted": Case(("data.mixing.repeat=false", "data.mixing.pick_mode=round_robin", "train.steps=400")),
    "device_per_stream": Case(
        ("data.mixing.batching_mode=device_per_stream", "ledger.dtype=bfloat16", "train.precision=bf16")
    ),
    "gated_delta": Case(("model.family=gated_delta", "optimizer.name=sgd"), _ranks(1)),
    "transformer": Case(("model.family=transformer", "ledger.wipe_mode=full", "ledger.wipe_every=5"), _ranks(1)),
    "own_model": Case(("model.target=examples.own_parts.my_parts:build_model", "model.num_layers=1"), _ranks(1)),
    "diag_healthy": Case((MIXED,), config="healthy"),
    "diag_exhaust_spike": Case((RECALL,), config="diag_exhaust_spike"),
    "diag_imbalanced_bs": Case((MIXED,), config="diag_imbalanced_bs"),
    "diag_stale_false_evict": Case((MIXED, "ledger.stale_threshold=1"), config="diag_stale_false_evict"),
}


def measure(case: Case, folder: Path, tiny: Path) -> dict[str, Any]:
    """What a case's run leaves, in digests."""
    config = ROOT / "train_configs" / "diagnostics" / f"{case.config}.toml" if case.config else tiny
    codes = []
    for ranks, own in case.launches:
        steps = () if "--steps" in own or any("steps=" in each for each in case.sets) else ("--steps", STEPS)
        done = run(
            *("--config", config, "--run-dir", folder, "--stdout", "off"),
            *overrides(*case.sets),
            *steps,
            *own,
            nproc=ranks if ranks > 1 else None,
            cwd=tiny.parent if case.config else ROOT,
            extra={"FAULT": case.fault},
        )
        codes.append(done.returncode)
        if done.returncode not in (0, 1):
            raise AssertionError(done.stderr[-3000:])
    rows = read_rows(folder / "metrics.jsonl")
    found: dict[str, Any] = {"exit_codes": codes, "events": _events(folder), "metrics": _columns(rows)}
    if (folder / "checkpoints" / "latest").exists():
        found["model"] = _digest(model_content(folder / "checkpoints" / "latest"))
    return found


def _events(folder: Path) -> list[str]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return [f"{event['event']} {event.get('global_step')}" for event in events]


def _columns(rows: Mapping[tuple[str, int], Mapping[str, float]]) -> dict[str, str]:
    """Metric -> digest of the rows that have it and of its values there."""
    columns: dict[str, Any] = defaultdict(hashlib.sha256)
    for (mode, step), row in sorted(rows.items()):
        for key, value in row.items():
            if not key.startswith(MEASURED):
                columns[key].update(f"{mode} {step} ".encode() + struct.pack("<d", value))
    return {key: columns[key].hexdigest()[:10] for key in sorted(columns)}


def _digest(value: Any) -> str:
    """Of a tree of tensors and plain values."""
    digest = hashlib.sha256()

    def add(node: Any) -> None:
        if isinstance(node, Mapping):
            for key in sorted(node, key=str):
                digest.update(f"{key}:".encode())
                add(node[key])
        elif isinstance(node, torch.Tensor):
            digest.update(
                f"{node.dtype} {tuple(node.shape)} ".encode() + node.reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        else:
            digest.update(repr(node).encode())

    add(value)
    return digest.hexdigest()[:16]


def measure_all(folder: Path, names: list[str]) -> dict[str, Any]:
    """What each named case leaves; its runs are made below `folder`."""
    tiny = write_tiny_config(folder, EXTRA)
    done = run("data", "synth", "key-recall", "--out", folder / "recall", "--groups", 768, "--cells", 3, "--streams", 8)
    assert done.returncode == 0, done.stderr
    shutil.copytree(folder / "corpus" / "b", folder / "code" / "cpp")
    return {name: measure(CASES[name], folder / name, tiny) for name in names}


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    # A process of its own: torch chooses its instruction set once, before the first computation.
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden.test_golden_runs"],
        env={**os.environ, **PORTABLE},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_case_is_recorded():
    assert json.loads(GOLDEN.read_text()).keys() == CASES.keys()


@pytest.mark.distributed
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="recorded on x86-64; others round differently"
)
@pytest.mark.parametrize("name", CASES)
def test_run_is_the_golden_one(measured, name):
    assert measured[name] == json.loads(GOLDEN.read_text())[name]


def main() -> None:
    """Measure the named cases, or all; print them, or with --record write them."""
    names = [name for name in sys.argv[1:] if name != "--record"] or list(CASES)
    if "--record" in sys.argv and not PORTABLE.items() <= os.environ.items():
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.golden.test_golden_runs", *sys.argv[1:]],
            {**os.environ, **PORTABLE},
        )
    with tempfile.TemporaryDirectory() as folder:
        found = measure_all(Path(folder), names)
    if "--record" in sys.argv:
        known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        found = {name: {**known, **found}[name] for name in CASES if name in {**known, **found}}
        GOLDEN.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    else:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
