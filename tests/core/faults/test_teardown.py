"""Teardown never aborts: eight gloo ranks, from rendezvous over steps to the end, twenty times in a row."""

from __future__ import annotations

import pytest

from tests.support.fault_runs import ARGUMENTS, end_with, keep, make_config

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]
TIMES = 20


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_eight_ranks_end_in_peace_twenty_times_in_a_row(tmp_path, strategy):
    config = make_config(tmp_path, "")
    for time in range(TIMES):
        arguments = ("--config", config, "--run-dir", tmp_path / f"run{time}", *ARGUMENTS, "--steps", 2)
        arguments += ("--set", f'distributed.strategy="{strategy}"')
        end_with(0, arguments, tmp_path / f"logs{time}", world_size=8)
    shards = "" if strategy == "ddp" else " with shards (fsdp)"
    keep(5, f"teardown of 8 gloo ranks in a row{shards}", times=TIMES)
