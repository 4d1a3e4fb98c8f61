"""The reference model with one fault built in, for `[model] target`; what, where and when is in the environment.

FAULT is JSON: {"what": "nan", "rank": 1, "step": 5, "steps": 1, "micro": 1}. `step` counts this process's own training
windows from 1, `micro` the micro-batches of a window from 0 (FAULT_MICRO_BATCHES a window), `steps` is for how many steps it
goes on. The weights, their names and what is computed without a fault are the reference model's.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

import torch
from torch import Tensor

from trainer.model import build as build_reference
from trainer.model.encoder import RecurrentEncoder
from trainer.model.protocol import ModelOutput

FACTORS = {"nan": float("nan"), "spike": 40.0}
EXITS = {"sys.exit": sys.exit, "exit of C": ctypes.CDLL(None)._exit}


class _Spoil(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return torch.full_like(gradients[0], float("inf"))


class Fault:
    """What happens in this process, and when."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.micro_batches = int(os.environ.get("FAULT_MICRO_BATCHES", "2"))
        self.count = {"train": 0, "eval": 0}
        self.is_here = settings.get("rank") in (None, int(os.environ.get("RANK", "0")))

    def __deepcopy__(self, memo: dict[int, Any]) -> Fault:
        """Copies have no fault: the check of the contract runs on them before the run begins."""
        return Fault({})

    def strikes(self, mode: str) -> bool:
        """Whether this forward pass is one of those meant; counts it."""
        step, micro = divmod(self.count[mode], self.micro_batches)
        self.count[mode] += 1
        wanted = self.settings
        if not self.is_here or wanted.get("mode", "train") != mode or micro != wanted.get("micro", 0):
            return False
        return wanted["step"] <= step + 1 < wanted["step"] + wanted.get("steps", 1)

    def spoil(self, output: ModelOutput) -> ModelOutput:
        """The output with the fault in it."""
        what = self.settings["what"]
        if what in FACTORS:
            return output._replace(logits=output.logits * FACTORS[what])
        if what == "inf_gradient":
            return output._replace(logits=_Spoil.apply(output.logits))  # type: ignore[no-untyped-call]
        if what == "nan_state":  # of the first row alone; the loss stays finite
            assert output.state is not None
            state = output.state.clone()
            state[0] = float("nan")
            return output._replace(state=state)
        if what == "sleep":
            while True:
                time.sleep(3600)
        if what == "slow":
            time.sleep(self.settings["seconds"])
        if what == "stop":  # no signal can end it but SIGKILL
            os.kill(os.getpid(), signal.SIGSTOP)
        if what in EXITS:
            EXITS[what](0)
        if what == "interrupt":
            raise KeyboardInterrupt
        if what == "signal":
            os.kill(os.getpid(), getattr(signal, self.settings.get("name", "SIGTERM")))
        return output


class FaultyEncoder(RecurrentEncoder):
    """The reference encoder, and its fault."""

    fault: Fault

    def forward(self, tokens: Tensor, state: Tensor | None = None, resets: Tensor | None = None) -> ModelOutput:
        output = super().forward(tokens, state, resets)
        if "what" in self.fault.settings and self.fault.strikes("train" if self.training else "eval"):
            return self.fault.spoil(output)
        return output


def build(vocab_size: int, dim: int, num_layers: int, **args: Any) -> RecurrentEncoder:
    """For `[model] target`."""
    model = build_reference(vocab_size, dim, num_layers, **args)
    model.__class__ = FaultyEncoder
    assert isinstance(model, FaultyEncoder)
    model.fault = Fault(json.loads(os.environ.get("FAULT", "{}")))
    return model
