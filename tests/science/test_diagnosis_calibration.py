"""The promises of docs/diagnosis.md: healthy runs are called healthy, and every injected fault is found in time."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.healthy_runs import SECONDS_PER_RUN, WORLD_SIZES, make_healthy_runs
from tests.support.injected_faults import FAULTS, Fault, detected_after
from tests.support.metric_streams import healthy_scenario, write_run
from tests.support.runs import ROOT
from tests.support.smoke_matrix import SPEED_RULES
from trainer.tools.diagnostics.diagnose import RULES, diagnose
from trainer.tools.runs.load import load_run

HEALTHY_RUNS = 40
RUNS_PER_FAULT = 10
THIN_SEED = 3
FAULT_NAMES = [f"{fault.rule}: {fault.what}" for fault in FAULTS]


def synthetic_runs(seeds: range, directory: Path, **changes: Any) -> list[Path]:
    return [write_run(healthy_scenario(seed, **changes), directory / f"run-{seed}") for seed in seeds]


def false_alarms(runs: Iterable[Path], *, but: Collection[str] = ()) -> list[str]:
    rulings = [(run.name, ruling) for run in runs for ruling in diagnose(load_run(run)).findings]
    return [f"{run}: {each.rule.name}: {each.outcome.sentence}" for run, each in rulings if each.rule.name not in but]


def test_every_rule_has_a_fault() -> None:
    assert {fault.rule for fault in FAULTS} == {rule.name for rule in RULES}


def test_a_few_healthy_runs_raise_no_alarm(tmp_path: Path) -> None:
    assert false_alarms(synthetic_runs(range(6), tmp_path)) == []


@pytest.mark.parametrize("seeds", [[THIN_SEED], pytest.param(range(RUNS_PER_FAULT), marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", FAULTS, ids=FAULT_NAMES)
def test_a_fault_is_found_in_time(fault: Fault, seeds: Iterable[int], tmp_path: Path) -> None:
    for seed in seeds:
        delay = detected_after(fault, fault.make(seed, tmp_path / f"run-{seed}"))
        assert delay is not None, f"seed {seed}: {fault.what} was not found"
        assert delay <= fault.within, f"seed {seed}: {fault.what} was found after {delay} steps"


def test_the_table_in_the_docs_keeps_the_promises() -> None:
    table = json.loads((ROOT / "docs" / "diagnosis_calibration.json").read_text(encoding="utf-8"))
    for world_size in WORLD_SIZES:
        for found in (table["synthetic"][str(world_size)], table["short"][str(world_size)]):
            assert found["runs"] >= HEALTHY_RUNS
            assert len(found["false_alarms"]) <= 1
    assert [(row["rule"], row["what"]) for row in table["faults"]] == [(fault.rule, fault.what) for fault in FAULTS]
    for row in table["faults"]:
        assert row["runs"] >= RUNS_PER_FAULT
        assert row["found"] == row["runs"]
        assert row["worst"] <= row["within"]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_healthy_runs_raise_at_most_one_alarm_in_all(world_size: int, tmp_path: Path) -> None:
    alarms = false_alarms(synthetic_runs(range(HEALTHY_RUNS), tmp_path, world_size=world_size))
    assert len(alarms) <= 1, alarms


@pytest.mark.distributed
@pytest.mark.timeout(SECONDS_PER_RUN * HEALTHY_RUNS)
@pytest.mark.parametrize(
    ("world_size", "runs"),
    [(2, 2), *(pytest.param(size, HEALTHY_RUNS, marks=pytest.mark.slow) for size in WORLD_SIZES)],
)
def test_short_real_runs_raise_at_most_one_alarm_in_all(world_size: int, runs: int, tmp_path: Path) -> None:
    alarms = false_alarms(make_healthy_runs(tmp_path, world_size, range(runs)), but=SPEED_RULES)
    assert len(alarms) <= (runs == HEALTHY_RUNS), alarms
