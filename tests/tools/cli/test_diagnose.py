"""`train diagnose` as a program: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.in_process import Ended, program
from tests.support.records import write_record
from trainer.metrics.run_status import take_lock
from trainer.tools.diagnostics.diagnose import RULES

Diagnosed = Callable[..., Ended]


@pytest.fixture
def diagnosed(capsys: pytest.CaptureFixture[str]) -> Diagnosed:
    """Runs `train diagnose <arguments>`."""
    return lambda *arguments: program(["diagnose", *arguments], capsys)


def write(directory: Path, false_evictions: float) -> Path:
    losses = [2.0 + 0.01 * (step % 3) for step in range(40)]
    return write_record(directory, {"loss": losses, "ledger/false_evictions/stale": [false_evictions] * 40})


def test_a_run_that_most_rules_could_not_judge_is_not_called_healthy(tmp_path: Path, diagnosed: Diagnosed) -> None:
    done = diagnosed(write(tmp_path, 0.0))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[-1].startswith(f"nothing wrong in what was measured; 4 of {len(RULES)} rules judged the run, ")
    names = [line.split()[0] for line in lines if line]
    assert {rule.name for rule in RULES} <= set(names)
    assert names.index("restarts") < names.index("cold_starts"), "what could not be judged comes last"
    assert re.search("^cold_starts .*needs ledger/cold_starts", done.stdout, re.M)
    found = json.loads(diagnosed(tmp_path / "metrics.jsonl", "--json").stdout)
    assert (found["verdict"], 4 + len(found["rules_not_judged"])) == ("no_findings", len(RULES))


def test_a_short_run_says_what_could_not_be_judged_yet(tmp_path: Path, diagnosed: Diagnosed) -> None:
    rows = {"loss": {1: 2.0, 10: 2.0}, "time/data_sec": {1: 0.1, 10: 0.1}, "step_time_sec": {1: 1.0, 10: 1.0}}
    write_record(tmp_path, rows, config={"optimizer": {"lr": 0.1}}, status={"state": "running"})
    with take_lock(tmp_path):
        done = diagnosed(tmp_path)
        rules = json.loads(diagnosed(tmp_path, "--json").stdout)["rules"]
    assert done.returncode == 0
    assert re.search(r"^loss_spikes +not yet +needs 17 logged losses, has 2", done.stdout, re.M)
    assert re.search(r"^data_bound +not yet +needs 8 rows after warm-up, has 1", done.stdout, re.M)
    assert re.search(r"^ending +not yet +the run is running", done.stdout, re.M)
    assert "judged the run, 3 could not yet, " in done.stdout.splitlines()[-1]
    assert [rule["rule"] for rule in rules if rule["not_yet"]] == ["loss_spikes", "data_bound", "ending"]


def test_findings_exit_with_3_and_say_where_and_what_to_turn(tmp_path: Path, diagnosed: Diagnosed) -> None:
    path = write(tmp_path, 2.0)
    with (path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('damaged\n{"schema_version":1,"mo')
    done = diagnosed(tmp_path)
    assert done.returncode == 3
    assert "1 damaged line, the first at line 41" in done.stdout
    assert "error false_evictions_stale: 80 evicted states " in done.stdout
    assert "ledger/false_evictions/stale: step 1: 2" in done.stdout
    assert "twice as many" in done.stdout
    (tmp_path / "config.resolved.toml").write_text("[ledger]\nstale_threshold = 5\n", encoding="utf-8")
    assert "try ledger.stale_threshold = 10 (now 5)" in diagnosed(tmp_path).stdout
    found = json.loads(diagnosed(tmp_path, "--json").stdout)
    assert (found["diagnosis_version"], found["verdict"]) == (2, "findings")
    assert found["findings"] == ["false_evictions_stale"]
    assert [rule["rule"] for rule in found["rules"]] == [rule.name for rule in RULES]
    ruling = next(rule for rule in found["rules"] if rule["rule"] == "false_evictions_stale")
    assert (ruling["severity"], ruling["needs"]) == ("error", ["ledger/false_evictions/stale"])
    assert ruling["evidence"][0]["steps"][0] == 1
    assert ruling["knob"]["key"] == "ledger.stale_threshold"
    assert ruling["fix"].startswith("try ledger.stale_threshold = 10 (now 5)")


@pytest.mark.parametrize("verb", ["diagnose", "ls", "compare", "eval", "data at", "check --config"])
def test_json_that_is_asked_for_is_printed_also_where_there_is_no_run(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = program([*verb.split(), tmp_path, "--json"], capsys)
    assert done.returncode == 2
    assert json.loads(done.stdout) == {"error": done.stderr.rstrip()}
    (tmp_path / "metrics.jsonl").touch()  # a run without rows
    done = program([*verb.split(), tmp_path, "--json"], capsys)
    assert json.loads(done.stdout, parse_constant=pytest.fail)


def test_a_mistake_and_that_stdout_is_full_are_said_where_stdout_is_full(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(os, "dup2", replaced := Mock())
    monkeypatch.setattr("trainer.cli.terminal.typer.echo", Mock(side_effect=OSError(28, "full")))
    mistake, full = (program(line, capsys).mistake for line in (["diagnose", tmp_path, "--json"], ["--version"]))
    assert ("train ls DIR lists them" in mistake, full) == (True, "cannot write: full\n")
    assert [call.args[1] for call in replaced.mock_calls] == [1, 1], "which Python would flush at its end"


EVALUATION = '{"schema_version":1,"mode":"eval","global_step":5,"metrics":{"eval_loss":1.0}}\n'


def test_what_has_no_rows_exits_with_2_and_a_failed_run_with_3(tmp_path: Path, diagnosed: Diagnosed) -> None:
    for content in ("not a payload\n", EVALUATION, ""):
        (tmp_path / "metrics.jsonl").write_text(content, encoding="utf-8")
        done = diagnosed(tmp_path)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    done = diagnosed(tmp_path, "--json")
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (2, None)
    assert "has no training rows to diagnose; wait for" in done.stderr
    (tmp_path / "status.json").write_text('{"state": "failed", "reason": "KeyError: 1", "last_step": 0}')
    assert "error ending: the run failed: KeyError: 1" in diagnosed(tmp_path).stdout
    done = diagnosed(tmp_path, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["verdict"], found["findings"], found["steps"]) == (3, "findings", ["ending"], None)
    assert (found["state"], found["reason"]) == ("failed", "KeyError: 1")
    # A finished run that lacks its rows is not waited for.
    (tmp_path / "status.json").write_text('{"state": "done", "reason": "all steps are done", "last_step": 20}')
    missing = "metrics.jsonl is missing or has no training row, though the run reached step 20"
    done = diagnosed(tmp_path, "--json")
    assert done.stderr.endswith(f": has no training rows to diagnose: the run is done; {missing}\n")
    found = json.loads(done.stdout)
    assert (found["verdict"], found["state"], found["notes"]) == (None, "done", [missing])
    keys = ("beyond_cell/carry_gain", "64/loss", "64/loss_from_zero", "64/carry_gain")
    row = {f"eval/depth/{key}{error}": 0.001 for key in keys for error in ("", "_se")}
    assert "advice context_unused: " in diagnosed(write_record(tmp_path, {}, dict.fromkeys((1, 2, 3), row))).stdout


def test_values_that_are_not_finite_stay_strict_json(tmp_path: Path, diagnosed: Diagnosed) -> None:
    write_record(tmp_path, {"loss": [2.0, 2.0, float("nan"), *[2.0] * 9]})
    assert '"nan"' in json.dumps(json.loads(diagnosed(tmp_path, "--json").stdout, parse_constant=pytest.fail))
