"""Settings that a resume changed: what the run's directory keeps of them, and what its readers say."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import weights
from tests.support.in_process import program, train_here
from tests.support.runs import losses, read_rows, train, write_tiny_config
from trainer.tools.runs.load import load_run


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps, `plain`, and `changed`, resumed from there to step 12 with another learning rate."""
    directory = tmp_path_factory.mktemp("changed")
    config = write_tiny_config(directory, "[checkpoint]\nevery = 4\n[optimizer]\nlr = 0.01\n")
    train(config, directory / "changed", "train.steps=8")
    shutil.copytree(directory / "changed", directory / "plain")
    changes = ("train.steps=12", "optimizer.lr=0.5", "data.prefetch=5")
    said = train(config, directory / "changed", *changes, more=("--resume", "auto"))
    (directory / "stderr.txt").write_text(said)
    return directory


def test_the_log_and_the_restart_say_what_changed(resumed: Path) -> None:
    log = (resumed / "stderr.txt").read_text()
    assert log.count("the learning rate jumps from ") == 1
    assert ": the schedule spans the whole run" in log
    last = (resumed / "changed" / "config.resolved.toml").read_text()
    assert tomllib.loads(last)["optimizer"]["lr"] == 0.5
    lines = [*map(json.loads, (resumed / "changed" / "events.jsonl").read_text().splitlines())]
    [event] = [line for line in lines if line["event"] == "restart"]
    assert event["global_step"] == 8
    assert event["changed"]["optimizer.lr"] == {"before": 0.01, "after": 0.5}
    assert sorted(event["changed"]) == ["data.prefetch", "optimizer.lr", "train.steps"]
    rows = [*map(json.loads, (resumed / "changed" / "metrics.jsonl").read_text().splitlines())]
    assert [row.get("restart") for row in rows if "restart" in row or "mode" not in row] == [{"from_step": 8}]
    [restart] = load_run(resumed / "changed").restarts
    assert restart.details["changed"] == event["changed"]


def test_every_reader_says_what_the_resume_changed(resumed, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = "optimizer.lr: 0.01 -> 0.5"
    shown = program(["compare", resumed / "plain", resumed / "changed"], capsys).stdout
    [line] = [line for line in shown.splitlines() if words in line]
    assert "changed: settings changed after step 8: " in line
    assert re.search("optimizer.lr +0.01 +0.5", shown)
    page = tmp_path / "page.html"
    assert not program(["report", resumed / "changed", "--out", page], capsys).returncode
    assert words.replace(">", "&gt;") in page.read_text()


def test_a_decay_branch_equals_bit_for_bit_a_run_that_decays_so(tmp_path: Path) -> None:
    config = write_tiny_config(tmp_path, "[checkpoint]\nevery = 4\n")
    decay = ("scheduler.name=wsd", "scheduler.decay_fraction=0.25", "train.steps=8")
    trunk, whole, branch = (tmp_path / name for name in ("trunk", "whole", "branch"))
    train_here(config, trunk, "scheduler.name=constant", "train.steps=5")
    train_here(config, whole, *decay)
    train_here(config, branch, *decay, f"checkpoint.resume={trunk / 'checkpoints' / 'step_00000004'}")
    rates = [row["lr"] for row in read_rows(whole / "metrics.jsonl").values()]
    assert rates[3] == rates[5] > rates[6] > rates[7]
    wanted = losses(whole / "metrics.jsonl")
    assert losses(branch / "metrics.jsonl") == {step: wanted[step] for step in (5, 6, 7, 8)}
    found, wanted = (weights(each / "checkpoints" / "step_00000008") for each in (branch, whole))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
