"""`[alert]`: what is reported of a run, and that no service can hold it up."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_process import train_here
from tests.support.runs import write_tiny_config
from trainer.config.load import load_config
from trainer.lab import alert as alerts


def test_a_command_hears_of_spikes_and_of_every_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(alerts, "_tell", lambda command, told: said.append(told))
    config, hears = write_tiny_config(tmp_path), "alert.command=['true']"
    train_here(config, tmp_path / "done", hears, "train.steps=60", "train.spike_sigma=0.01", "optimizer.lr=1e-6")
    train_here(config, tmp_path / "failed", hears, "optimizer.lr=1e38", code=1)
    spike, *_, done, failed = said
    assert [each["event"] for each in said if each["event"] != "spike"] == ["done", "failed"]
    assert (spike["event"], spike["state"], spike["last_step"] > 20) == ("spike", "running", True)
    assert done["text"] == "tiny: done at step 60: all steps are done"
    status = json.loads((tmp_path / "failed" / "status.json").read_text())
    assert [failed[key] for key in ("state", "reason", "last_step")] == [*status.values()][:3]


def test_a_service_that_hangs_or_fails_costs_seconds_and_a_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(alerts.logger.parent, "propagate", True)
    monkeypatch.setattr(alerts, "WAIT_SEC", 1.0)
    hears, hangs = f"alert.command=['tee', '{tmp_path}/heard']", "alert.command=['sleep', '60']"
    fails = "alert.command=['false']"
    for setting, wait_sec in ((hears, 5.0), (hangs, 0.0), (hangs, 5.0), (fails, 5.0)):
        config, begun = load_config(write_tiny_config(tmp_path), [setting, "run.name=refused"]), time.monotonic()
        alerts.alert(config, tmp_path, "stopped", reason="SIGTERM", step=3, wait_sec=wait_sec)
        assert time.monotonic() - begun < max(wait_sec - 1.0, 0.9)
    assert json.loads((tmp_path / "heard").read_text())["last_step"] == 3
    assert [each.getMessage().split(" did ")[0] for each in caplog.records] == ["the alert of stopped"] * 3
