"""A run that is done ends, whatever a user's code has left behind, with its own exit code."""

from __future__ import annotations

import signal

import pytest

from tests.support.fault_runs import keep
from tests.support.ranks import Ranks, status
from tests.support.runs import write_tiny_config


def start_lingering(tmp_path, is_fresh=False, **extra):
    own = ("--set", "model.target=tests.support.lingering:build", "--set", "model.contract=false")
    arguments = ("--config", write_tiny_config(tmp_path), "--run-dir", tmp_path / "run", "--steps", 2, *own)
    return Ranks(arguments, logs=tmp_path / "logs", world_size=1, extra=extra, is_fresh=is_fresh)


@pytest.mark.parametrize("what", ["thread", "handler"])
def test_a_run_that_is_done_names_what_keeps_its_process_and_leaves_without_it(tmp_path, what):
    with start_lingering(tmp_path, is_fresh=what == "handler", LINGERING=what) as ranks:
        codes, said = ranks.wait(120), ranks.said()
    assert codes == [0], said
    assert status(tmp_path / "run")["state"] == "done"
    name = "the threads uploads (in " if what == "thread" else "a handler of the program's exit, in "
    for verb in ("waiting up to 1 s for", "leaving without"):
        assert f"train: {verb} {name}" in said
    assert "lingering.py:" in said
    kept_by = "a thread of the user's that is no daemon" if what == "thread" else "a handler of the exit that hangs"
    keep(5, f"{kept_by}, in a run that is done")


def test_a_signal_ends_a_process_that_is_kept_at_once_with_the_exit_code_of_its_run(tmp_path):
    with start_lingering(tmp_path, LINGERING="thread", LINGERING_WAIT_SEC="3600") as ranks:
        assert ranks.until(lambda: "waiting up to 3600 s" in ranks.said()), ranks.said()
        ranks.signal(signal.SIGTERM)
        assert ranks.wait(60) == [0], ranks.said()
