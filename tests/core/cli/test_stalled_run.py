"""A run without progress ends and says why; one that takes its time, however long, goes on. tests/faults has several ranks."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.fault_runs import keep
from tests.support.ranks import Ranks, last_logged, status
from tests.support.runs import write_tiny_config
from tests.support.stalling_data import stalling_arguments

TIMEOUT_SEC = 5


def start(tmp_path, *more: object, timeout_sec: float = 600.0, after: int = 4, **args: object) -> Ranks:
    """One rank, in `tmp_path`/run, on a data set that stalls."""
    arguments = stalling_arguments(tmp_path, tmp_path / "run", after=after, prefetch=2, timeout_sec=timeout_sec, **args)
    return Ranks((*arguments, *more), logs=tmp_path / "logs", world_size=1, extra={"STARTED": str(tmp_path)})


def test_a_single_rank_that_waits_for_data_for_ever_ends_within_the_timeout(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with start(tmp_path, how="fifo", timeout_sec=TIMEOUT_SEC) as ranks:
        codes, said = ranks.wait(TIMEOUT_SEC + 90), ranks.said()
    assert codes == [1], said
    ended = status(tmp_path / "run")
    assert ended["state"] == "failed"
    assert "rank 0 makes no progress: step 3: data, reading micro-batch 5 from source own, for" in ended["reason"]
    assert ended["reason"] in said


def test_one_signal_ends_a_single_rank_that_waits_for_data_with_its_last_step_saved(tmp_path):
    run_dir = tmp_path / "run"
    with start(tmp_path, how="sleep") as ranks:
        assert ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") >= 2), ranks.said()
        ranks.signal(signal.SIGTERM)
        assert ranks.wait(90) == [0], ranks.said()
    assert (status(run_dir)["state"], status(run_dir)["last_step"]) == ("stopped", 2)
    assert (run_dir / "checkpoints" / "step_00000002" / "COMPLETE").exists()


def test_a_run_that_works_or_waits_for_less_than_the_timeout_is_not_ended(tmp_path):
    """Longer than the timeout of work in a data set, and as long a wait in an evaluation of the user's own."""
    own = ("eval.target=tests.support.stalling_data:evaluate_slowly", "eval.every=4", "eval.holdout_fraction=0")
    sets = [word for each in (*own, f"eval.args={{seconds={1.2 * TIMEOUT_SEC}}}") for word in ("--set", each)]
    stall = {"how": "work", "seconds": 1.2 * TIMEOUT_SEC}
    with start(tmp_path, "--steps", 4, *sets, timeout_sec=TIMEOUT_SEC, **stall) as ranks:
        assert ranks.wait(240) == [0], ranks.said()
    assert status(tmp_path / "run")["state"] == "done"


def start_lingering(tmp_path, is_fresh=False, **extra):
    own = ("--set", "model.target=tests.support.lingering:build", "--set", "model.contract=false")
    arguments = ("--config", write_tiny_config(tmp_path), "--run-dir", tmp_path / "run", "--steps", 2, *own)
    return Ranks(arguments, logs=tmp_path / "logs", world_size=1, extra=extra, is_fresh=is_fresh)


@pytest.mark.parametrize("what", ["thread", "handler"])
def test_a_run_that_is_done_leaves_without_what_keeps_its_process(tmp_path, what):
    with start_lingering(tmp_path, is_fresh=what == "handler", LINGERING=what) as ranks:
        codes, said = ranks.wait(120), ranks.said()
    assert codes == [0], said
    assert status(tmp_path / "run")["state"] == "done"
    assert f"train: leaving without {'uploads' if what == 'thread' else 'a handler of the program'}" in said
    kept_by = "a thread of the user's that is no daemon" if what == "thread" else "a handler of the exit that hangs"
    keep(5, f"{kept_by}, in a run that is done")
