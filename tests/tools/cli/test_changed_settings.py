"""Settings that a resume changed: what the run's directory keeps of them, and what its readers say."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.support.grouped import train
from tests.support.in_process import program
from tests.support.runs import write_tiny_config
from trainer.tools.report.run_summary import config_differences
from trainer.tools.runs.load import load_run
from trainer.tools.verbs.records import entry_of


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps, `plain`, and `changed`, resumed from there to step 12 with another learning rate."""
    directory = tmp_path_factory.mktemp("changed")
    config = write_tiny_config(directory, "[checkpoint]\nevery = 4\n[optimizer]\nlr = 0.01\n")
    train(config, directory / "changed", "train.steps=8")
    shutil.copytree(directory / "changed", directory / "plain")
    changes = ("train.steps=12", "optimizer.lr=0.5", "data.prefetch=5")
    train(config, directory / "changed", *changes, more=("--resume", "auto"))
    return directory


def test_every_launch_keeps_its_config_and_the_restart_says_what_changed(resumed: Path) -> None:
    first, last = (resumed / "changed" / f"config.resolved{number}.toml" for number in (".1", ""))
    assert [tomllib.loads(each.read_text())["optimizer"]["lr"] for each in (first, last)] == [0.01, 0.5]
    lines = [*map(json.loads, (resumed / "changed" / "events.jsonl").read_text().splitlines())]
    [event] = [line for line in lines if line["event"] == "restart"]
    assert event["global_step"] == 8
    assert event["changed"]["optimizer.lr"] == {"before": 0.01, "after": 0.5}
    assert sorted(event["changed"]) == ["data.prefetch", "optimizer.lr", "train.steps"]
    rows = [*map(json.loads, (resumed / "changed" / "metrics.jsonl").read_text().splitlines())]
    assert [row.get("restart") for row in rows if "restart" in row or "mode" not in row] == [{"from_step": 8}]
    [restart] = load_run(resumed / "changed").restarts
    assert restart.details["changed"] == event["changed"]


def test_compare_names_a_setting_that_differed_for_some_of_the_steps(resumed, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = program(["compare", resumed / "plain", resumed / "changed"], capsys).stdout
    [line] = [line for line in shown.splitlines() if "optimizer.lr" in line]
    assert "0.01; 0.5 from step 9 on" in line
    content = json.loads(program(["compare", resumed / "plain", resumed / "changed", "--json"], capsys).stdout)
    values = {row["key"]: row["values"] for row in content["config"]}
    assert values["optimizer.lr"] == [0.01, {"1": 0.01, "9": 0.5}]


def test_ls_and_report_show_that_settings_changed(resumed, tmp_path, capsys, monkeypatch):
    assert entry_of(resumed / "plain", now=0.0).changed == []
    assert entry_of(resumed / "changed", now=0.0).changed == ["data.prefetch", "optimizer.lr", "train.steps"]
    monkeypatch.setenv("COLUMNS", "200")
    assert "3 settings" in program(["ls", resumed], capsys).stdout
    for runs in (["changed"], ["plain", "changed"]):
        page = tmp_path / f"{len(runs)}.html"
        assert not program(["report", *(resumed / name for name in runs), "--out", page], capsys).returncode
        assert "0.01; 0.5 from step 9 on" in page.read_text()


Lines = list[tuple[int, dict[str, tuple[float, float]] | None]]


def record(directory: Path, lines: Lines, lr: float, last_step: int) -> Path:
    """A run of these rows (step, None) and restarts (step, {key: (before, after)}), with the config of its last launch."""
    directory.mkdir()
    texts, events = list[dict[str, object]](), list[dict[str, object]]()
    for step, changed in lines:
        if changed is None:
            texts.append({"schema_version": 1, "mode": "train", "global_step": step, "metrics": {"loss": 1.0}})
        else:
            pairs = {key: {"before": one, "after": other} for key, (one, other) in changed.items()}
            events.append({"event": "restart", "global_step": step, "changed": pairs})
    for name, found in (("metrics", texts), ("events", events)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))
    (directory / "config.resolved.toml").write_text(f"[optimizer]\nlr = {lr}\n")
    (directory / "status.json").write_text(json.dumps({"state": "stopped", "last_step": last_step}))
    return directory


def rows(first: int, last: int) -> Lines:
    return [(step, None) for step in range(first, last + 1)]


LR = "optimizer.lr"


@pytest.mark.parametrize(
    ("lines", "lr", "last_step", "wanted"),
    [
        ([*rows(1, 30), (30, {LR: (1.0, 2.0)}), *rows(31, 40)], 2.0, 40, {1: 1.0, 31: 2.0}),
        # Back to an earlier checkpoint: what was trained beyond it no longer counts.
        ([*rows(1, 30), (10, {LR: (1.0, 2.0)}), *rows(11, 30)], 2.0, 30, {1: 1.0, 11: 2.0}),
        ([*rows(1, 30), (30, {LR: (1.0, 2.0)}), *rows(31, 40), (30, {}), *rows(31, 40)], 1.0, 40, 1.0),
        # Launches that trained no step, in the middle and at the end.
        ([*rows(1, 30), (30, {LR: (1.0, 2.0)}), (30, {LR: (1.0, 3.0)}), *rows(31, 40)], 3.0, 40, {1: 1.0, 31: 3.0}),
        ([*rows(1, 30), (30, {LR: (1.0, 2.0)})], 2.0, 30, 1.0),
        # Steps without a row of their own.
        ([*rows(1, 30), (30, {LR: (1.0, 2.0)}), (35, {}), *rows(40, 40)], 2.0, 40, {1: 1.0, 31: 2.0}),
        # A run that begins as the branch of another one.
        ([(30, {LR: (1.0, 2.0)}), *rows(31, 40)], 2.0, 40, {1: 1.0, 31: 2.0}),
    ],
)
def test_settings_are_read_by_step(tmp_path, lines, lr, last_step, wanted):
    found = load_run(record(tmp_path / "found", lines, lr, last_step))
    other = load_run(record(tmp_path / "other", rows(1, 40), 7.0, 40))
    assert config_differences([found, other]) == [(LR, [wanted, 7.0])]
