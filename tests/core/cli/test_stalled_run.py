"""A run without progress ends and says why; one that takes its time, however long, goes on. tests/faults has several ranks."""

from __future__ import annotations

import os

from tests.support.ranks import Ranks, status
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


def test_a_run_that_works_or_waits_for_less_than_the_timeout_is_not_ended(tmp_path):
    """Longer than the timeout of work in a data set, and as long a wait in an evaluation of the user's own."""
    own = ("eval.target=tests.support.stalling_data:evaluate_slowly", "eval.every=4", "eval.holdout_fraction=0")
    sets = [word for each in (*own, f"eval.args={{seconds={1.2 * TIMEOUT_SEC}}}") for word in ("--set", each)]
    stall = {"how": "work", "seconds": 1.2 * TIMEOUT_SEC}
    with start(tmp_path, "--steps", 4, *sets, timeout_sec=TIMEOUT_SEC, **stall) as ranks:
        assert ranks.wait(240) == [0], ranks.said()
    assert status(tmp_path / "run")["state"] == "done"
