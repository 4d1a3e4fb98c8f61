"""Whether all ranks start, and who prints if not: settled by what each answers, in whatever order and time they come."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from trainer.distributed.env import GroupError, answer_ready, answer_refusal, claim_message
from trainer.errors import UserError


def answer(store, rank: int, world_size: int, *, refuses: bool, gives_up=lambda: False) -> int | None:
    """The speaker that this rank hears of; None if it starts."""
    if refuses:
        return answer_refusal(store, rank=rank, world_size=world_size, gives_up=gives_up)
    try:
        answer_ready(store, rank=rank, world_size=world_size, timeout_sec=60)
    except UserError as error:
        return error.speaker
    return None


@pytest.mark.parametrize("refusing", [set(), {0}, {1}, {2}, {1, 2}, {0, 1, 2}])
def test_all_ranks_hear_of_the_lowest_that_refuses_in_whatever_order_they_come(refusing):
    for order in itertools.permutations(range(3)):
        store = dist.HashStore()
        with ThreadPoolExecutor(3) as ranks:
            heard = [ranks.submit(answer, store, rank, 3, refuses=rank in refusing) for rank in order]
            assert {each.result(timeout=60) for each in heard} == {min(refusing, default=None)}


def test_a_rank_that_gives_up_on_another_speaks_and_the_late_one_is_silent():
    store = dist.HashStore()
    assert answer(store, 1, 2, refuses=True, gives_up=lambda: True) == 1
    assert answer(store, 0, 2, refuses=True, gives_up=lambda: True) == 1
    assert answer(dist.HashStore(), 1, 2, refuses=True, gives_up=lambda: True) == 1


def test_a_rank_that_is_late_does_not_start_beside_one_that_refused():
    store = dist.HashStore()
    assert answer(store, 1, 2, refuses=True, gives_up=lambda: True) == 1
    assert answer(store, 0, 2, refuses=False) == 1


def test_of_ranks_that_give_up_at_once_exactly_one_speaks():
    for _ in range(3):
        store, together = dist.HashStore(), threading.Barrier(4)

        def come(rank, store=store, together=together):
            together.wait()
            return answer(store, rank, 5, refuses=True, gives_up=lambda: True)

        with ThreadPoolExecutor(4) as ranks:
            assert len(set(ranks.map(come, range(1, 5)))) == 1


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(GroupError, match="rank 1, 2 did not start in time"):
        answer_ready(dist.HashStore(), rank=0, world_size=3, timeout_sec=0)


def test_a_message_is_claimed_by_one_rank():
    store = dist.HashStore()
    assert [claim_message(store, "x: is damaged", rank=rank) for rank in (2, 0, 1)] == [2, 2, 2]
    assert claim_message(store, "y: is damaged", rank=0) == 0
