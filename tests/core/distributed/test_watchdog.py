"""Whether all ranks start, and which is missing, from the heartbeats of all; a real hang ends the run with all stacks."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from trainer.distributed.env import SILENT, GroupError, RankInfo, answer_ready, answer_refusal
from trainer.distributed.watchdog import HangDetector, Heartbeat, Watchdog, is_of_a_collective
from trainer.errors import UserError

LIMIT = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_detector(world_size: int = 3, *, grace: float = math.inf) -> tuple[HangDetector, Clock]:
    clock = Clock()
    return HangDetector(world_size, LIMIT, grace, clock), clock


def beat(
    collectives: int, activity: str, count: int, *, progress: int | None = None, is_asked: bool = False
) -> Heartbeat:
    """A heartbeat; with progress since the last one, unless told otherwise."""
    return Heartbeat(collectives, activity, count if progress is None else progress, is_asked, count)


def watch(detector: HangDetector, clock: Clock, seconds: float, heartbeats_at) -> str | None:
    """Update with the heartbeats each second; the first hang."""
    for _ in range(int(seconds)):
        clock.now += 1.0
        hang = detector.update(heartbeats_at(int(clock.now)))
        if hang is not None:
            return hang
    return None


def test_ranks_that_go_on_together_are_never_a_hang():
    detector, clock = make_detector()
    assert watch(detector, clock, 500, lambda t: [beat(t // 3, f"step {t}", t)] * 3) is None


def test_a_long_phase_without_a_collective_is_no_hang_while_there_is_progress_in_it():
    detector, clock = make_detector()
    assert watch(detector, clock, 500, lambda t: [beat(7, "step 1: forward and backward", t)] * 3) is None


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_that_all_wait_without_progress_are_a_hang_after_the_limit_and_not_before(world_size):
    detector, clock = make_detector(world_size)

    def heartbeats(t: int) -> list[Heartbeat]:
        return [beat(7, "step 2: data, reading micro-batch 3", t, progress=1)] * world_size

    assert watch(detector, clock, LIMIT + 1, heartbeats) is None
    hang = watch(detector, clock, 1, heartbeats)
    where = "makes no progress: step 2: data, reading micro-batch 3, for 11.0 s"
    assert hang == "; ".join(f"rank {rank} {where}" for rank in range(world_size))


def test_one_rank_without_progress_is_a_hang_although_the_others_work_and_none_waits_for_it():
    detector, clock = make_detector(2)
    hang = watch(detector, clock, 30, lambda t: [beat(7, f"step {t}", t), beat(7, "step 2: data", t, progress=1)])
    assert hang == "rank 1 makes no progress: step 2: data, for 11.0 s"


@pytest.mark.parametrize(
    ("waiting", "working", "hang"),
    [
        # Who waits for a rank that works does not end the run, nor does one that works itself.
        (beat(8, "step 2: optimizer", 1, is_asked=True), True, None),
        (beat(8, "step 2: optimizer", 1, is_asked=True), False, "asked to stop, but rank 1 is missing: step 2: data"),
        (beat(7, "step 2: data", 1, is_asked=True), True, None),
        (beat(7, "step 2: data", 1, is_asked=True), False, "asked to stop, but rank 0 makes no progress: step 2: data"),
        (beat(7, "step 2: data", 1), False, None),
    ],
)
def test_a_run_that_was_asked_to_stop_ends_once_nobody_makes_progress(waiting, working, hang):
    detector, clock = make_detector(2, grace=3.0)
    found = watch(detector, clock, 8, lambda t: [waiting, beat(7, "step 2: data", t, progress=t if working else 1)])
    assert found is None if hang is None else found is not None and found.startswith(hang)


def test_the_rank_that_entered_fewer_collectives_is_named_after_the_limit_and_not_before():
    detector, clock = make_detector()

    def heartbeats(t: int) -> list[Heartbeat]:
        return [beat(8, "step 2: optimizer", t), beat(7, "step 2: data", t), beat(8, "step 2: optimizer", t)]

    # Seen first after a second, so that the limit is over at the twelfth.
    assert watch(detector, clock, LIMIT + 1, heartbeats) is None
    hang = watch(detector, clock, 1, heartbeats)
    where = "step 2: data, for 11.0 s"
    assert hang == f"rank 1 is missing: {where} (it entered 7 collectives, the others 8)"


def test_a_rank_that_is_slow_but_comes_is_no_hang():
    detector, clock = make_detector(2)
    assert watch(detector, clock, 300, lambda t: [beat(t // 9 + 1, "a", t), beat(t // 9, "b", t)]) is None


def test_a_rank_without_a_heartbeat_is_reported_as_such_and_one_that_never_had_one_too():
    detector, clock = make_detector()
    hang = watch(detector, clock, 30, lambda t: [beat(8, "x", t), beat(7, "y", 1), None])
    assert hang is not None
    first, second = hang.split("; ")
    assert first.startswith("rank 1 is missing: no heartbeat for ")
    assert second == "rank 2 is missing: no heartbeat since the run began"


def test_what_comes_of_the_process_group_is_told_from_what_does_not():
    assert is_of_a_collective(dist.DistBackendError("x"))
    assert is_of_a_collective(RuntimeError("[/pytorch/third_party/gloo/...] Connection closed by peer"))
    assert not is_of_a_collective(ValueError("x"))


def make_watchdogs(tmp_path, world_size: int, *, timeout_sec: float) -> list[Watchdog]:
    """On one store, in this process."""
    store = dist.HashStore()
    return [
        Watchdog(
            store,
            RankInfo(rank, rank, world_size),
            timeout_sec=timeout_sec,
            log=tmp_path / f"{rank}.log",
            collectives=lambda: 0,
            on_end=lambda reason: None,
        )
        for rank in range(world_size)
    ]


@pytest.fixture
def pair(tmp_path):
    dogs = make_watchdogs(tmp_path, 2, timeout_sec=600)
    for dog in dogs:
        dog._interval = 0.02
    yield dogs
    for dog in dogs:
        dog.close()


def test_a_rank_that_fails_tells_the_others_why(pair):
    assert pair[1].explain(ValueError("bad line")) == "ValueError: bad line"
    assert pair[0].explain(RuntimeError("gloo: connection closed")) == "rank 1 failed: ValueError: bad line"


def test_a_rank_that_is_gone_is_named_alone_also_by_who_notices_after_the_others_have_ended(tmp_path):
    first, second, gone = make_watchdogs(tmp_path, 3, timeout_sec=2)
    gone.close()
    closed = RuntimeError("gloo: connection closed by peer")
    assert second.explain(closed).startswith("rank 2 is gone (")
    second.close()
    assert first.explain(closed).startswith("rank 2 is gone (")
    first.close()


def answer(store, rank: int, world_size: int, *, message: str, gives_up=lambda: False) -> int | None:
    """The speaker, if this rank refuses with a message or hears that another does; None if it starts."""
    if message:
        return answer_refusal(store, message, rank=rank, world_size=world_size, gives_up=gives_up)
    try:
        answer_ready(store, rank=rank, world_size=world_size, timeout_sec=60)
    except UserError as error:
        return error.speaker
    return None


@pytest.mark.parametrize("messages", [("", "", ""), ("x", "x", "x"), ("", "x", "x"), ("x", "", "y")])
def test_no_rank_starts_if_one_refuses_and_each_message_is_printed_once(messages):
    for order in ((0, 1, 2), (2, 0, 1)):
        store = dist.HashStore()
        with ThreadPoolExecutor(3) as ranks:
            heard = {rank: ranks.submit(answer, store, rank, 3, message=messages[rank]) for rank in order}
            found = [heard[rank].result(timeout=60) for rank in range(3)]
        refuses = any(messages)
        assert [each == SILENT for each in found] == [refuses and not message for message in messages]
        for message in {*messages} - {""}:
            speakers = [rank for rank in range(3) if messages[rank] == message and found[rank] == rank]
            assert len(speakers) == 1
        assert refuses or found == [None] * 3


def test_a_rank_that_gives_up_on_another_speaks_and_the_late_one_does_not_start():
    store = dist.HashStore()
    assert answer(store, 1, 2, message="x", gives_up=lambda: True) == 1
    assert answer(store, 0, 2, message="") == SILENT


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(GroupError, match="rank 1, 2 did not start in time"):
        answer_ready(dist.HashStore(), rank=0, world_size=3, timeout_sec=0)
