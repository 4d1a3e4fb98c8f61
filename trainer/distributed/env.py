"""Who this process is among the ranks, and the life of the process group."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.distributed.startup import answer_ready, claim_message
from trainer.errors import UserError


@dataclass(frozen=True)
class RankInfo:
    """Identity of a process in the run."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0


def rank_info(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """The identity that torchrun gives in the environment; a single process without it.

    Raises:
        UserError: the variables are there but are no numbers, or do not fit together.
    """
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return RankInfo()
    values = {}
    for name, default in (("RANK", None), ("WORLD_SIZE", None), ("LOCAL_RANK", environ.get("RANK"))):
        text = environ.get(name, default)
        if text is None or not text.isascii() or not text.isdigit():
            raise UserError(name, f"must be a whole number in the environment, got {text!r}", "launch with torchrun")
        values[name] = int(text)
    if values["RANK"] >= values["WORLD_SIZE"]:
        raise UserError(
            "RANK", f"{values['RANK']} is not below WORLD_SIZE {values['WORLD_SIZE']}", "launch with torchrun"
        )
    return RankInfo(values["RANK"], values["LOCAL_RANK"], values["WORLD_SIZE"])


def pick_device(wanted: str, info: RankInfo) -> torch.device:
    """The device of this rank: `auto` is CUDA where there is one.

    Raises:
        UserError: CUDA is asked for and absent, or the node has fewer devices than ranks.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("train.device", '"cuda" is asked for, and torch sees no CUDA device', 'use "auto" or "cpu"')
    if info.local_rank >= torch.cuda.device_count():
        problem = f"local rank {info.local_rank} has no device; this node has {torch.cuda.device_count()}"
        raise UserError("train.device", problem, "lower --nproc_per_node")
    device = torch.device("cuda", info.local_rank)
    torch.cuda.set_device(device)
    return device


def pick_backend(wanted: str, device: torch.device) -> str:
    """nccl on CUDA and gloo on the CPU, unless the config says otherwise."""
    if wanted != "auto":
        return wanted
    return "nccl" if device.type == "cuda" else "gloo"


def rendezvous_store(info: RankInfo, *, timeout: timedelta, environ: Mapping[str, str] = os.environ) -> dist.Store:
    """The key-value store through which the ranks find each other, fresh for every restart of torchrun's.

    torchrun keeps one store for all its restarts (torch 2.13), so after a restart a rank may read the address that a rank
    of the attempt before had left there, and fail to connect. On one node the number of the restart is the same for all
    ranks and separates the attempts. On several nodes it is not; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the
    launcher's environment makes it use a new store each time (scripts/slurm sets it).
    """
    store, _, _ = next(dist.rendezvous("env://", info.rank, info.world_size, timeout=timeout))
    assert isinstance(store, dist.Store)
    if environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return store
    return dist.PrefixStore(f"attempt_{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


@contextmanager
def process_group(info: RankInfo, *, backend: str, timeout_sec: float, device: torch.device) -> Iterator[None]:
    """The process group of the run, from rendezvous to teardown; nothing at all for a single process.

    Leaving it in peace, all ranks meet in a barrier before anyone destroys the group: a rank that tears down its
    connections while another still waits on them aborts the other (gloo, four ranks or more). After an error the others
    may be gone, so there is no barrier.

    The group must also be gone, with its threads, before the interpreter ends: a gloo thread that lets go of a tensor
    while the interpreter is taken down aborts the process (torch 2.13; seen once in some dozens of short runs). Two things
    keep a destroyed group alive: objects in reference cycles that hold on to it (DDP's reducer), which are collected
    here, and `torch._dynamo`, which takes the group in for good if it is imported while there is one. DDP imports it, so
    it is imported here before the group exists. What a caller still holds outside of cycles it must drop itself.
    """
    if info.world_size == 1:
        yield
        return
    importlib.import_module("torch._dynamo")
    store = rendezvous_store(info, timeout=timedelta(seconds=timeout_sec))
    answer_ready(store, rank=info.rank, world_size=info.world_size, timeout_sec=timeout_sec)
    dist.init_process_group(
        backend,
        store=store,
        timeout=timedelta(seconds=timeout_sec),
        rank=info.rank,
        world_size=info.world_size,
        device_id=device if backend == "nccl" else None,
    )
    try:
        yield
        gc.collect()
        dist.barrier()
    except UserError as error:
        if error.speaker is None:  # found by this rank in the middle of the run, not by all of them together
            error.speaker = claim_message(store, error.message, rank=info.rank)
        raise
    finally:
        gc.collect()
        dist.destroy_process_group()
