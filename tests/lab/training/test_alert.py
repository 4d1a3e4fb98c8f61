"""`[alert]`: what is reported of a run, and that no service can hold it up."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_process import train_here
from tests.support.runs import write_tiny_config
from trainer.config.load import load_config
from trainer.lab import alert as alerts

said: list[dict[str, Any]] = []


class Hook(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        said.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(500 if said[-1]["run"] == "refused" else 200)
        self.end_headers()


@pytest.fixture
def url():
    said.clear()
    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'alert.url="http://127.0.0.1:{server.server_port}/hook"'
        server.shutdown()


def test_a_webhook_hears_of_spikes_and_of_every_end(tmp_path: Path, url: str) -> None:
    config = write_tiny_config(tmp_path)
    train_here(config, tmp_path / "done", url, "train.steps=60", "train.spike_sigma=0.01", "optimizer.lr=1e-6")
    train_here(config, tmp_path / "failed", url, "optimizer.lr=1e38", code=1)
    spike, *_, done, failed = said
    assert [each["event"] for each in said if each["event"] != "spike"] == ["done", "failed"]
    assert (spike["event"], spike["state"], spike["last_step"] > 20) == ("spike", "running", True)
    assert done["text"] == "tiny: done at step 60: all steps are done"
    status = json.loads((tmp_path / "failed" / "status.json").read_text())
    assert [failed[key] for key in ("state", "reason", "last_step")] == [*status.values()][:3]


def test_a_service_that_hangs_or_fails_costs_seconds_and_a_warning(tmp_path, url, caplog, monkeypatch):
    monkeypatch.setattr(alerts.logger.parent, "propagate", True)
    monkeypatch.setattr(alerts, "WAIT_SEC", 1.0)
    hears, hangs = f"alert.command=['tee', '{tmp_path}/heard']", "alert.command=['sleep', '60']"
    for setting, wait_sec in ((hears, 5.0), (hangs, 0.0), (hangs, 5.0), (url, 5.0)):
        config, begun = load_config(write_tiny_config(tmp_path), [setting, "run.name=refused"]), time.monotonic()
        alerts.alert(config, tmp_path, "stopped", reason="SIGTERM", step=3, wait_sec=wait_sec)
        assert time.monotonic() - begun < max(wait_sec - 1.0, 0.9)
    assert json.loads((tmp_path / "heard").read_text())["last_step"] == 3
    assert [each.getMessage().split(" did ")[0] for each in caplog.records] == ["the alert of stopped"] * 3
