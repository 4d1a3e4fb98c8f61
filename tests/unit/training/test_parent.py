"""A process that its launcher leaves behind: it stops, and ends if it cannot."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.launched import wait_for_end
from tests.support.runs import ROOT, environment
from trainer.training.signals import PARENT, stop_with_parent

CHILD = """
import os, sys, time
from trainer.training.signals import PARENT, stop_with_parent
from pathlib import Path
stop_with_parent(lambda: Path(sys.argv[1]).write_text("stopping"), within_sec=0.2)
assert PARENT not in os.environ
print(os.getpid(), flush=True)
time.sleep(600)
"""
LAUNCHER = f"""
import os, subprocess, sys, time
os.environ["{PARENT}"] = str(os.getpid())
subprocess.Popen([sys.executable, "-c", {CHILD!r}, sys.argv[1]])
time.sleep(600)
"""


def test_a_process_that_hangs_stops_and_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path / "said")]
    with subprocess.Popen(command, env=environment({"PYTHONPATH": str(ROOT)}), stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        child = int(launcher.stdout.readline())
        launcher.kill()
        wait_for_end([child], 60)
    assert (tmp_path / "said").read_text() == "stopping"


def test_a_process_without_a_launcher_watches_no_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARENT, raising=False)
    before = threading.active_count()
    stop_with_parent(lambda: None, within_sec=0.2)
    assert threading.active_count() == before
