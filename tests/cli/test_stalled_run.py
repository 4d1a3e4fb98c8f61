"""A run without progress ends and says why; one that takes its time, however long, goes on. tests/faults has several ranks."""

from __future__ import annotations

import os
import signal

from tests.support.ranks import Ranks, last_logged, status
from tests.support.stalling_data import stalling_arguments

TIMEOUT_SEC = 5


def test_a_single_rank_that_waits_for_data_for_ever_ends_within_the_timeout(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    run_dir = tmp_path / "run"
    arguments = stalling_arguments(tmp_path, run_dir, after=4, how="fifo", prefetch=2, timeout_sec=TIMEOUT_SEC)
    with Ranks(arguments, logs=tmp_path / "logs", world_size=1) as ranks:
        codes, said = ranks.wait(TIMEOUT_SEC + 90), ranks.said()
    assert codes == [1], said
    ended = status(run_dir)
    assert ended["state"] == "failed"
    assert "rank 0 makes no progress: step 3: data, reading micro-batch 5 from source own, for" in ended["reason"]
    assert ended["reason"] in said


def test_one_signal_ends_a_single_rank_that_waits_for_data_with_its_last_step_saved(tmp_path):
    run_dir = tmp_path / "run"
    arguments = stalling_arguments(tmp_path, run_dir, after=4, how="sleep", prefetch=2, timeout_sec=600)
    with Ranks(arguments, logs=tmp_path / "logs", world_size=1) as ranks:
        assert ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") >= 2), ranks.said()
        ranks.signal(signal.SIGTERM)
        assert ranks.wait(90) == [0], ranks.said()
    assert (status(run_dir)["state"], status(run_dir)["last_step"]) == ("stopped", 2)
    assert (run_dir / "checkpoints" / "step_00000002" / "COMPLETE").exists()


def test_one_signal_ends_a_run_that_waits_for_ever_as_it_starts(tmp_path):
    """Before there is a run: nothing is lost."""
    world_size = 2
    arguments = stalling_arguments(tmp_path, tmp_path / "run", after=-1, how="start", prefetch=2, timeout_sec=600)
    with Ranks(arguments, logs=tmp_path / "logs", world_size=world_size, extra={"STARTED": str(tmp_path)}) as ranks:
        assert ranks.until(lambda: len(list(tmp_path.glob("started_*"))) == world_size), ranks.said()
        ranks.signal(signal.SIGTERM)
        codes, said = ranks.wait(90), ranks.said()
    assert codes == [128 + signal.SIGTERM] * world_size, said
    assert "SIGTERM: nothing has been done for" in said


def test_a_run_that_works_or_waits_for_less_than_the_timeout_is_not_ended(tmp_path):
    """Longer than the timeout of work in a data set, and as long a wait in an evaluation of the user's own."""
    arguments = stalling_arguments(
        tmp_path, tmp_path / "run", after=4, how="work", seconds=1.2 * TIMEOUT_SEC, prefetch=2, timeout_sec=TIMEOUT_SEC
    )
    own = "tests.support.stalling_data:evaluate_slowly"
    arguments += ("--set", f"eval.target={own}", "--set", "eval.every=4", "--steps", 4)
    arguments += ("--set", f"eval.args={{seconds={1.2 * TIMEOUT_SEC}}}", "--set", "eval.holdout_fraction=0")
    with Ranks(arguments, logs=tmp_path / "logs", world_size=1) as ranks:
        assert ranks.wait(240) == [0], ranks.said()
    assert status(tmp_path / "run")["state"] == "done"
