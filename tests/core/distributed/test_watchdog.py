"""Which rank is missing or makes no progress, from the heartbeats of all; and what the ranks tell each other of an end."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from trainer.distributed.env import RankInfo
from trainer.distributed.watchdog import Heartbeat, Watchdog, find_hang, is_of_a_collective

LIMIT = 10.0


def beat(collectives: int, *, stayed: float = 0.0, idle: float = 0.0) -> Heartbeat:
    return Heartbeat(collectives, "step 2: data", stayed, idle)


LONG = {"stayed": 11.0, "idle": 11.0}
STUCK = "makes no progress: step 2: data, for 11.0 s"
TABLE = {
    "ranks that go on together": ([beat(7), beat(7), beat(7)], None),
    "a long phase with progress": ([beat(7, stayed=500)] * 3, None),
    "a wait up to the limit": ([beat(8, stayed=10, idle=10), beat(7, stayed=10, idle=10)], None),
    "all wait for something else": ([beat(7, **LONG)] * 2, f"rank 0 {STUCK}; rank 1 {STUCK}"),
    "one waits, others work": ([beat(7), beat(7, **LONG)], f"rank 1 {STUCK}"),
    "others wait for one": (
        [beat(8, **LONG), beat(7, stayed=11.0), beat(8, **LONG)],
        "rank 1 is missing: step 2: data, for 11.0 s (it entered 7 collectives, the others 8)",
    ),
    "a slow rank that makes progress": ([beat(8, **LONG), beat(7, stayed=3.0), beat(8, **LONG)], None),
    "a slow rank, and one that makes no progress": (
        [beat(8, **LONG), beat(7, stayed=3.0), beat(7, stayed=11.0)],
        "rank 2 is missing: step 2: data, for 11.0 s (it entered 7 collectives, the others 8)",
    ),
    "a rank that comes late": ([beat(8, stayed=9, idle=9), beat(7, stayed=20)], None),
    "a rank that never was": (
        [beat(8, **LONG), None],
        "rank 1 is missing: it has not begun, or has ended; see its own log",
    ),
}


@pytest.mark.parametrize(("beats", "hang"), TABLE.values(), ids=TABLE)
def test_a_hang_is_what_the_heartbeats_say(beats, hang):
    assert find_hang(beats, limit_sec=LIMIT) == hang


def test_what_comes_of_the_process_group_is_told_from_what_does_not():
    assert is_of_a_collective(dist.DistBackendError("x"))
    assert is_of_a_collective(RuntimeError("[/pytorch/third_party/gloo/...] Connection closed by peer"))
    assert not is_of_a_collective(ValueError("x"))


def test_a_rank_that_fails_tells_the_others_why(tmp_path):
    store, how = dist.HashStore(), {"timeout_sec": 600, "collectives": lambda: 0, "on_end": lambda reason: None}
    pair = [Watchdog(store, RankInfo(rank, rank, 2), log=tmp_path / f"{rank}.log", **how) for rank in range(2)]
    for dog in pair:
        dog._interval = 0.02
    closed = RuntimeError("gloo: connection closed")
    assert pair[0].explain(closed).startswith("another rank has ended without a word")
    assert pair[1].explain(ValueError("bad line")) == "ValueError: bad line"
    assert pair[0].explain(closed) == "rank 1 failed: ValueError: bad line"
    for dog in pair:
        dog.close()
    with open("/dev/full", "wb", 0) as pair[0]._log:
        pair[0].write("details that a full disk costs")
