"""Checks before the first step that a sharded model calls every module whose parameters it uses.

It could go if FSDP gathered parameters wherever they are used.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn

from trainer.distributed.strategy import Strategy, bypassed
from trainer.model.protocol import evaluating
from trainer.model.wrappers import run_few_tokens


def refuse_bypassed_units(strategy: Strategy, model: nn.Module, device: torch.device, seq_len: int) -> None:
    """Refuse a sharded model that uses parts of a module without calling it, and so without their parameters.

    Runs a few tokens to find out. Every rank must call it.
    """
    if strategy.whole(model) is not None:
        return
    try:
        inspect.signature(model.forward).bind(tokens=None, state=None)
    except TypeError:  # it takes inputs that only the data have
        return
    fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    try:
        with evaluating(model), torch.no_grad(), fork:
            run_few_tokens(model, device, seq_len=seq_len)
    except RuntimeError as error:
        raise bypassed(error) or error from None
    finally:
        strategy.reshard(model)
