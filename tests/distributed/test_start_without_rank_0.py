"""Rank 0, which hosts the ranks' store, is killed while they start: the others end in time, with one line."""

from __future__ import annotations

import signal

import pytest

from tests.support.ranks import Ranks
from tests.support.runs import write_tiny_config

pytestmark = pytest.mark.distributed
START_TIMEOUT_SEC = 5
MOMENTS = {
    "before it opens the store": "trainer.distributed.env:rendezvous_store",
    "before it answers": "trainer.distributed.env:answer_ready",
    "before the first collective": "trainer.training.setup.record:choose_run_dir",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_others_end_in_time_and_say_why_in_one_line(tmp_path, moment):
    arguments = ("--config", write_tiny_config(tmp_path), "--run-dir", tmp_path / "run")
    with Ranks(
        (*arguments, "--set", f"distributed.timeout_sec={START_TIMEOUT_SEC}"),
        logs=tmp_path / "logs",
        extra={"KILL_AT": MOMENTS[moment]},
    ) as ranks:
        codes = ranks.wait(START_TIMEOUT_SEC + 60)
        said = ranks.said(1)
    assert codes == [-signal.SIGKILL, 1], said
    assert "Traceback" not in said
    assert len([line for line in said.splitlines() if "rank 1: another rank has ended or does not answer" in line]) == 1
