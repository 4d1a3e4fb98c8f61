"""All ranks start, or all refuse and one of them prints why.

Every rank answers once through the rendezvous store: `process_group` that it is ready, or the command line that it refuses.
The last answer decides. No rank proceeds before that: a rank that exits makes torchrun kill the others, one of which may
have the message to print.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import torch.distributed as dist

from trainer.errors import UserError

NOBODY = "nobody"


class GroupError(Exception):
    """The ranks cannot start together: one has ended, or does not answer."""


# Polled: during a blocking wait Python handles no signals, and the wait warns when it times out.
CHECK_EVERY_SEC = 0.1


def answer_ready(store: dist.Store, *, rank: int, world_size: int, timeout_sec: float) -> None:
    """Wait until all ranks are ready.

    Raises:
        UserError: a rank refuses to start; that rank prints why.
        GroupError: a rank did not answer in time, and none refuses.
    """
    end = time.monotonic() + timeout_sec
    speaker = _answer(store, "ready", rank=rank, world_size=world_size, gives_up=lambda: time.monotonic() > end)
    if speaker is not None:
        error = UserError(f"rank {speaker}", "refuses to start", "see its message")
        error.speaker = speaker
        raise error


def answer_refusal(store: dist.Store, *, rank: int, world_size: int, gives_up: Callable[[], bool]) -> int:
    """Refuse to start. Returns the rank that prints its message: the lowest that refuses.

    Args:
        gives_up: asked again and again; when true, ranks that have not answered are not waited for.
    """
    speaker = _answer(store, "refused", rank=rank, world_size=world_size, gives_up=gives_up)
    assert speaker is not None
    return speaker


def claim_message(store: dist.Store, message: str, *, rank: int) -> int:
    """The rank that prints a message found while the ranks run: the first that claims it. Does not wait for others."""
    digest = hashlib.sha256(message.encode()).hexdigest()
    try:
        return int(dist.PrefixStore("messages", store).compare_set(digest, "", str(rank)))
    except (dist.DistError, RuntimeError):  # the store is gone, and with it the rank that kept it
        return rank


def _answer(store: dist.Store, answer: str, *, rank: int, world_size: int, gives_up: Callable[[], bool]) -> int | None:
    """Answer, and wait for the others. Returns the rank that prints its message; None: all are ready."""
    store = dist.PrefixStore("startup", store)
    store.set(f"{answer}_{rank}", "")
    is_last = store.add("answers", 1) == world_size
    while not (is_last or store.check(["speaker"]) or gives_up()):
        time.sleep(CHECK_EVERY_SEC)
    _decide(store, world_size)
    speaker = store.get("speaker").decode()
    if speaker == NOBODY:
        return None
    store.add("read", 1)
    if rank == 0:  # it may be the host of the store, which must stay until the others have read
        while store.add("read", 0) < store.add("answers", 0) and not gives_up():
            time.sleep(CHECK_EVERY_SEC)
    return int(speaker)


def _decide(store: dist.Store, world_size: int) -> None:
    """Choose the rank that prints, atomically and once; the choice also holds for ranks that arrive later."""
    if store.check(["speaker"]):
        return
    refusing = [rank for rank in range(world_size) if store.check([f"refused_{rank}"])]
    missing = [rank for rank in range(world_size) if rank not in refusing and not store.check([f"ready_{rank}"])]
    if missing and not refusing:
        raise GroupError(f"rank {', '.join(map(str, missing))} did not start in time")
    store.compare_set("speaker", "", str(refusing[0]) if refusing else NOBODY)
