"""A data file that is cut while a run has it mapped, and a rank that such a cut ends."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.fault_runs import LOST, keep
from tests.support.ranks import Launched, Ranks, last_logged, status
from tests.support.runs import TIMEOUT_SEC, write_tiny_config

pytestmark = pytest.mark.distributed


def make_config(tmp_path):
    """Two sources of text that is mapped as it is."""
    for modality in ("a", "b"):
        directory = tmp_path / "corpus" / modality
        directory.mkdir(parents=True)
        for number in range(2):
            (directory / f"{number}.txt").write_bytes(b"what the model reads, again and again\n" * 20_000)
    return write_tiny_config(tmp_path)


def run_that_is_cut(folder, world_size):
    """The directory of a run whose files are cut after its second step, and what it said."""
    folder.mkdir()
    config, run_dir = make_config(folder), folder / "run"
    arguments = ("--config", config, "--run-dir", run_dir, "--steps", 100_000, "--set", "distributed.timeout_sec=30")
    with Ranks(arguments, logs=folder / "logs", world_size=world_size) as ranks:
        assert ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") >= 2), ranks.said()
        for path in (folder / "corpus").glob("*/*.txt"):
            os.truncate(path, 10)
        codes, said = ranks.wait(), ranks.said()
    assert all(code > 0 for code in codes) or "Bus error" in said, said
    return run_dir, said


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_file_that_is_cut_under_a_run_ends_it_with_the_file_and_the_reason(tmp_path, world_size):
    # A cut between the look at a file's size and the read that follows is a bus error: rare, and what the next test is about.
    for attempt in range(3):
        run_dir, said = run_that_is_cut(tmp_path / str(attempt), world_size)
        if "Bus error" not in said:
            break
    ended = status(run_dir)
    assert ended["state"] == "failed"
    for told in (said, ended["reason"]):
        assert ".txt: was cut from 760000 to 10 bytes during the run" in told
    assert "Bus error" not in said
    on = "one rank" if world_size == 1 else f"{world_size} ranks"
    keep(7, f"every data file cut to 10 bytes under a run on {on}", lost=LOST)


@pytest.mark.slow
def test_a_rank_that_a_signal_ends_leaves_its_stack_and_the_launcher_the_reason(tmp_path):
    config, run_dir = write_tiny_config(tmp_path), tmp_path / "run"
    fault = {"what": "signal", "name": "SIGBUS", "step": 3}
    with Launched(config, run_dir, fault=fault) as launched:
        _, said = launched.process.communicate(timeout=TIMEOUT_SEC)
    assert launched.process.returncode == 1
    assert "Fatal Python error: Bus error" in said
    assert "faulty_model.py" in said
    ended = status(run_dir)
    assert ended["state"] == "failed"
    assert signal.SIGBUS.name in ended["reason"]
    assert "a data file was cut while it was read" in ended["reason"]
    assert ended["reason"] in said
    keep(5, "SIGBUS in one rank of two under `train --nproc`", lost=LOST)
