"""Rank 0 is killed right after a launcher has started it: launcher and ranks end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.fault_record import Injected
from tests.support.runs import ROOT, command, environment, write_tiny_config

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
PATIENCE_SEC = 240


def ranks_below(launcher: int) -> dict[str, int]:
    """Rank -> process id of the launcher's children that know their rank."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            variables = dict(v.partition("=")[::2] for v in (path / "environ").read_text().split("\0"))
        except OSError:
            continue
        if parent == launcher and "RANK" in variables:
            found[variables["RANK"]] = int(path.name)
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("seconds", [0.0, 0.4, 4.0])
@pytest.mark.parametrize("with_torchrun", [True, False])
def test_rank_0_killed_as_it_starts_ends_the_launch(tmp_path, with_torchrun, seconds):
    line = ["--config", write_tiny_config(tmp_path), "--run-dir", tmp_path / "run", "--steps", 100_000]
    line += ["--set", "distributed.timeout_sec=20"]
    arguments = command(line, nproc=2) if with_torchrun else command(["--nproc", 2, *line])
    with (tmp_path / "said").open("w") as said:
        launcher = subprocess.Popen(arguments, env=environment(), cwd=ROOT, stdout=said, stderr=said)
    try:
        end = time.monotonic() + PATIENCE_SEC
        while len(ranks := ranks_below(launcher.pid)) < 2:
            assert launcher.poll() is None
            assert time.monotonic() < end
        time.sleep(seconds)  # the moment of the fault
        os.kill(ranks["0"], signal.SIGKILL)
        assert launcher.wait(PATIENCE_SEC) != 0
        assert not Path(f"/proc/{ranks['1']}").exists()
    finally:
        for pid in (launcher.pid, *ranks_below(launcher.pid).values()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        launcher.wait()
    by = "torchrun" if with_torchrun else "`train --nproc`"
    what = f"SIGKILL of rank 0 {seconds} s after {by} has started two ranks"
    Injected(5, what, 1, "0", "the launcher ended the other, and ended").keep(f"launched_{with_torchrun}_{seconds}")
