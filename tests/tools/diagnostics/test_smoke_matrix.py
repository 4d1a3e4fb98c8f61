"""The judgement of the smoke matrix, on recorded diagnoses of its runs."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import ROOT
from tests.support.smoke_matrix import CASES, SPEED_RULES, Case, is_green, judge_all
from trainer.config.load import load_config
from trainer.tools.diagnostics.diagnose import RULES
from trainer.tools.runs.load import load_run

CONFIGS = ROOT / "train_configs" / "diagnostics"
STEPS = 200


@pytest.fixture
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "tests" / "golden" / "smoke_matrix_diagnoses.json").read_text())
    return found


def test_the_recorded_runs_show_exactly_what_is_expected(recorded: dict[str, Any]) -> None:
    judgements = judge_all(CASES, recorded, steps=STEPS)
    assert [j.case.name for j in judgements if not j.is_right] == []
    assert is_green(judgements)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_extra_or_a_missing_finding_or_an_early_end_turns_it_red(recorded: dict[str, Any], case: Case) -> None:
    def is_green_with(**changes: Any) -> bool:
        changed = {**recorded, case.name: {**recorded[case.name], **changes}}
        return is_green(judge_all(CASES, changed, steps=STEPS))

    found = recorded[case.name]["findings"]
    assert is_green_with(findings=[*found, "straggling_rank"]), "speed is not judged"
    assert not is_green_with(findings=[*found, "stuck_reader"])
    assert not any(is_green_with(findings=[each for each in found if each != name]) for name in case.expected)
    assert not any(is_green_with(steps=steps) for steps in ([1, STEPS - 1], None))


def test_every_expectation_is_a_rule_and_every_config_exists() -> None:
    names = {rule.name for rule in RULES}
    assert names >= SPEED_RULES.union(*(case.expected for case in CASES))
    assert {case.config_name for case in CASES} == {path.stem for path in CONFIGS.glob("*.toml")}
    assert {case.control for case in CASES if case.expected} <= {case.name for case in CASES if not case.expected}
    for case in CASES:
        assert load_config(CONFIGS / f"{case.config_name}.toml", case.overrides).train.steps == STEPS


def test_the_faulty_configs_differ_from_the_healthy_one_only_in_their_fault() -> None:
    healthy = load_config(CONFIGS / "healthy.toml").model_dump()
    changed = {}
    for case in CASES[1:4]:
        own = load_config(CONFIGS / f"{case.name}.toml").model_dump()
        changed[case.name] = {key for key in own if own[key] != healthy[key]} - {"run"}
    assert changed == {
        "diag_imbalanced_bs": {"data", "ledger"},  # larger batches need a larger ledger
        "diag_exhaust_spike": {"data"},
        "diag_stale_false_evict": {"ledger"},
    }


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_the_whole_matrix_is_green_and_a_swap_of_its_table_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built = {path.parent.name for path in (ROOT / "data" / "smoke_matrix").glob("*/manifest.json")}
    assert built >= {"recall", "short", "long"}, "make test-slow"
    monkeypatch.syspath_prepend(ROOT / "scripts")  # of its own imports
    script = importlib.import_module("smoke_matrix")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["smoke_matrix.py"])
    monkeypatch.setattr(script, "OUT", tmp_path / "runs")
    assert script.main() == 0
    assert "green: 5 runs" in capsys.readouterr().out
    diagnoses = json.loads((tmp_path / "runs" / "diagnoses.json").read_text())
    healthy, imbalanced, *rest = CASES
    swapped = [replace(healthy, expected=imbalanced.expected), replace(imbalanced, expected=healthy.expected), *rest]
    assert not is_green(judge_all(swapped, diagnoses, steps=STEPS))
    found = script.damages(tmp_path / "runs")
    for name in ("diag_stale_false_evict", "diag_imbalanced_bs"):
        assert found[name][0] - found[name][1] > 0.1
    for name, key in script.SIGNALS.items():
        _, values = load_run(tmp_path / "runs" / name).column(key)
        highest = max(values) if key.endswith("_max") else sum(values)
        assert f">{highest:g}</text>" in (tmp_path / "runs" / f"smoke_matrix_{name}.svg").read_text()
