"""Rank identity, the lifetime of the process group, and values that all ranks agree on.

Branch only on agreed values: every rank must reach every collective.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from textwrap import shorten
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainer.errors import UserError
from trainer.files import parse_count

T = TypeVar("T")


@dataclass(frozen=True)
class RankInfo:
    """Identity of a process among the ranks."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes everything that is written once."""
        return self.rank == 0

    def data_shards(self, num_shards: int) -> list[RankInfo]:
        """The neighbouring data shards that this rank runs, each as a rank of its own."""
        each = num_shards // self.world_size
        return [RankInfo(self.rank * each + i, self.local_rank, num_shards) for i in range(each)]


def rank_info() -> RankInfo:
    """The identity by torchrun's variables; without them a single process."""
    environ = os.environ
    if "RANK" not in environ:
        return RankInfo()
    try:
        rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local_rank = int(environ.get("LOCAL_RANK", rank))
        if not 0 <= rank < world_size or local_rank < 0 or int(environ.get("LOCAL_WORLD_SIZE", world_size)) < 1:
            raise ValueError(f"rank {rank} of {world_size}, LOCAL_RANK {local_rank}")
        # As `socket` encodes the name of a host.
        if world_size > 1 and not (environ["MASTER_ADDR"].encode("idna") and 0 < int(environ["MASTER_PORT"]) < 2**16):
            raise ValueError("MASTER_ADDR and MASTER_PORT are no address")
        return RankInfo(rank, local_rank, world_size)
    except (KeyError, ValueError) as error:
        problem = f"and other variables of the environment are not as torchrun sets them: {error}"
        raise UserError("RANK", problem, "launch with torchrun") from None


def num_nodes(info: RankInfo) -> int:
    """How many machines the ranks are on, by what torchrun says; 1 where it says nothing."""
    local = parse_count(os.environ.get("LOCAL_WORLD_SIZE", "")) or info.world_size
    return max(info.world_size // local, 1)


def pick_device(wanted: str, info: RankInfo = RankInfo(), *, key: str = "--device") -> torch.device:
    """The device of this rank, made torch's current one if it is CUDA, which `auto` is where
    available. Raises UserError of `key`: there is none."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if info.local_rank >= torch.cuda.device_count():
        problem = f"local rank {info.local_rank} has no CUDA device: torch finds {torch.cuda.device_count()} here"
        fewer = "start fewer ranks on this node, or " * bool(torch.cuda.device_count())
        raise UserError(key, problem, f'{fewer}use "cpu"')
    device = torch.device("cuda", info.local_rank)
    torch.cuda.set_device(device)
    return device


def rendezvous_store(info: RankInfo, *, timeout: timedelta) -> dist.Store:
    """The key-value store for the rendezvous of the ranks, fresh for every torchrun restart."""
    environ = os.environ
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        # Rank 0 hosts it, and does not wait for the others here, where Python handles no signal.
        place = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        return dist.TCPStore(*place, info.world_size, info.is_main, timeout, wait_for_workers=False)
    store, _, _ = next(dist.rendezvous("env://", info.rank, info.world_size, timeout=timeout))
    assert isinstance(store, dist.Store)
    # torchrun keeps one store for all its restarts (torch 2.13): a rank may read an address of the
    # previous attempt there, and fail to connect. On one node all ranks have the same restart count,
    # which separates the attempts. On several nodes they have not; there scripts/slurm sets
    # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for the launcher, which gives each attempt a new store.
    if environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return store
    return dist.PrefixStore(f"attempt_{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _answers(info: RankInfo) -> bool:
    """Whether somebody hosts the store; rank 0 may have given up, or not begun."""
    if info.is_main:
        return True
    with suppress(OSError), socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 1.0):
        return True
    return False


CHECK_EVERY_SEC = 0.1


class GroupError(Exception):
    """The ranks cannot start together: one has ended, or does not answer."""


@contextmanager
def process_group(
    info: RankInfo, *, timeout_sec: float, device: torch.device, is_stopped: Callable[[], bool]
) -> Iterator[None]:
    """The process group of the run, from rendezvous to teardown; a no-op for a single process.

    References to the group outside of cycles are the caller's to drop. `is_stopped`: whether to
    give up while the ranks start. A GroupError if another rank has ended then, or does not answer.
    """
    if info.world_size == 1:
        yield
        return
    # The group must be gone before the interpreter exits: a gloo thread that releases a tensor then
    # aborts the process (torch 2.13; one in several dozen short runs). Imported while a group exists,
    # as DDP does, this would keep a reference to it.
    importlib.import_module("torch._dynamo")
    end = time.monotonic() + timeout_sec

    def wait_until(happens: Callable[[], bool]) -> None:
        # Polled, since Python handles no signal during a blocking wait. A rank that is stopped does
        # not begin one: the other one may have given up.
        while is_stopped() or not happens():
            if is_stopped() or time.monotonic() > end:
                raise GroupError("not all ranks have started")
            time.sleep(CHECK_EVERY_SEC)

    try:
        wait_until(lambda: _answers(info))
        store = rendezvous_store(info, timeout=timedelta(seconds=timeout_sec))
        if store.add("started", 1) > info.world_size:
            raise GroupError("the store is that of an earlier attempt: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
        wait_until(lambda: store.add("started", 0) == info.world_size)
        how: dict[str, Any] = {"backend": "gloo"}
        if device.type == "cuda":
            how = {"backend": "nccl", "device_id": device}
        timeout = timedelta(seconds=timeout_sec)
        dist.init_process_group(store=store, timeout=timeout, rank=info.rank, world_size=info.world_size, **how)
    except RuntimeError as error:  # torch's DistError is one
        raise GroupError(shorten(str(error), 150)) from error
    try:
        yield
        gc.collect()
        # A rank that closes its connections while another still waits on them aborts the other
        # (gloo, four ranks or more). After an error the others may be gone: no barrier then.
        dist.barrier()
    except UserError as error:
        # Found by this rank in the middle of the run, not by all of them together.
        error.speaker = info.rank if error.speaker is None else error.speaker
        raise
    finally:
        gc.collect()  # reference cycles with the group: DDP's reducer
        dist.destroy_process_group()


def gather_from_ranks(value: T, *, world_size: int) -> list[T]:
    """`value` of every rank, in rank order, on every rank. For small objects."""
    if world_size == 1:
        return [value]
    values = [value] * world_size
    dist.all_gather_object(values, value)
    return values


def from_main_rank(value: T, *, world_size: int) -> T:
    """`value` of rank 0, on every rank. For small plain objects, outside the step."""
    if world_size == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


@contextmanager
def raise_on_all_ranks(*, world_size: int) -> Iterator[None]:
    """Raise a UserError that any rank finds in the block, the lowest rank's, on all ranks.

    The block must hold no collective of its own.
    """
    own: UserError | None = None
    try:
        yield
    except UserError as error:
        own = error
    for speaker, found in enumerate(gather_from_ranks(own, world_size=world_size)):
        if found is not None:
            found.speaker = speaker
            raise found from None
