"""Code of the user's that ends ranks with 0 fails the run."""

from __future__ import annotations

import pytest

from tests.support.fault_runs import LOST, keep, make_config
from tests.support.ranks import Launched, status

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
TIMEOUT_SEC = 12
GRACE_SEC = 60
TIMEOUT = ("--set", f"distributed.timeout_sec={TIMEOUT_SEC}")


def name_of(is_torchrun: bool) -> str:
    return "torchrun" if is_torchrun else "`train --nproc`"


@pytest.mark.parametrize("is_torchrun", [False, True])
@pytest.mark.parametrize(("what", "rank"), [("sys.exit", 0), ("sys.exit", None), ("exit of C", 1)])
def test_code_that_ends_ranks_with_0_fails_the_run(tmp_path, what, rank, is_torchrun):
    run_dir = tmp_path / "run"
    fault = {"what": what, "rank": rank, "step": 7}
    with Launched(make_config(tmp_path), run_dir, *TIMEOUT, is_torchrun=is_torchrun, fault=fault) as launched:
        _, said = launched.process.communicate(timeout=GRACE_SEC + TIMEOUT_SEC)
    assert launched.process.returncode == 1, said
    found = status(run_dir)
    assert found["state"] == "failed", (found, said)
    if what != "exit of C":
        assert f"{what}(0) was called after step 6" in found["reason"]
    where = "both ranks" if rank is None else f"rank {rank} of two"
    keep(
        10,
        f"`{what}(0)` at step 7 on {where} under {name_of(is_torchrun)}".replace("`exit of C(0)`", "C's `_exit(0)`"),
        lost=LOST,
    )
