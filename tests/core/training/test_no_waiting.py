"""What a step that does not log queues reads nothing from its device.

The device is `meta`, whose tensors have no data: reading one is an error, be it a number, a copy or a mask's size; copies
to it are watched. So a step that runs there does not wait for a device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from trainer.data.loader import Loader
from trainer.distributed.strategy import Strategy
from trainer.lab.extensions import LayerNumbers
from trainer.ledger import Ledger, LedgerOptions
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.gradient_noise import GradientNoiseScale
from trainer.metrics.noise_scale import NUM_SUMS
from trainer.model.encoder import build
from trainer.objective import Objective
from trainer.on_device import HostCopy
from trainer.options import CoordOptions, ObjectiveOptions
from trainer.training.extension import Extensions
from trainer.training.step import HEAD, TrainStep

ROWS, LENGTH, VOCABULARY, MICROS = 4, 12, 11, 2
META = torch.device("meta")


class NoBlockingCopies(TorchFunctionMode):
    """Counts copies of the host's data to `meta`, and fails where CUDA would wait for one."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.to, torch.Tensor.copy_) and result.is_meta:
            source = args[1] if func is torch.Tensor.copy_ else args[0]
            is_from_host = not (isinstance(source, torch.Tensor) and source.is_meta)
            is_free = bool((kwargs or {}).get("non_blocking"))
            assert is_free or not is_from_host, f"{func.__name__} waits"
            self.count += is_from_host
        return result


class GuardedSgd(torch.optim.SGD):
    """Stands for a fused optimizer, which torch does not have for `meta`."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self._step_supports_amp_scaling = True

    def step(self, closure: None = None) -> None:
        flag = self.__dict__.pop("found_inf")  # SGD itself refuses it
        super().step(closure)
        self.found_inf = flag


def batches() -> Iterator[dict[str, np.ndarray]]:
    """Groups begin, continue and end, and some rows have none."""
    for step, micro in itertools.product(range(8), range(MICROS)):
        tokens = np.zeros((ROWS, LENGTH), np.int64)
        groups = np.array([10 * micro, 10 * micro + 1, 100 + 2 * step + micro, -1])
        last = np.array([False, step % 3 == 2, False, False])
        rows = {"group_ids": groups, "cell_index": np.array([step, step % 3, 0, 0]), "is_last": last}
        rows |= {"tokens": tokens, "targets": tokens, "resets": tokens > 0, "token_types": tokens.astype(np.int8)}
        yield rows


def make_step(wipe_mode: Any, *, has_layers: bool) -> TrainStep:
    model = build(VOCABULARY, dim=8, num_layers=2).to(META)
    optimizer, gns = GuardedSgd(model.parameters()), GradientNoiseScale(model)
    sizes = {"capacity": ROWS if wipe_mode == "lru" else 64, "stale_threshold": 2, "wipe_every": 2}
    run: Any = SimpleNamespace(model=model, strategy=Strategy())
    diagnostics = Diagnostics()
    diagnostics.write_with(lambda event: pytest.fail(str(event)))  # what reads is turned off
    extensions = Extensions(diagnostics, device=META, world_size=1)
    if has_layers:
        extensions.add({"layers": LayerNumbers(run)})
    return TrainStep(
        model=model,
        ledgers=[Ledger(LedgerOptions(wipe_mode=wipe_mode, **sizes), state_width=16, device=META)],
        objective=Objective(ObjectiveOptions(z_loss=1e-2, coord=CoordOptions(first_token=2, num_bins=4, sigma=1.0))),
        optimizer=optimizer,
        gns=gns,
        max_tokens_per_micro=ROWS * LENGTH,
        clip_grad_norm=1.0,
        world_size=1,
        device=META,
        autocast=nullcontext,
        extensions=extensions,
        diagnostics=diagnostics,
    )


@pytest.fixture
def numbers_of_a_good_step(monkeypatch):
    """What the host is told, since `meta` has no numbers; whoever reads them elsewhere fails."""
    read: list[torch.Tensor] = []

    def numbers(self: HostCopy) -> list[float]:
        read.append(self._values)
        values = [0.0] * self._values.numel()
        values[:2], values[-1] = [50.0, 100.0], 2.0
        return values

    monkeypatch.setattr(HostCopy, "read", numbers)
    return read


@pytest.mark.parametrize(
    ("wipe_mode", "is_logged"), [("lru", False), ("full", False), ("periodic_stale", False), ("lru", True)]
)
def test_a_step_reads_nothing_but_the_step_before(numbers_of_a_good_step, wipe_mode, is_logged):
    """A logged one measures its layers without waiting."""
    step = make_step(wipe_mode, has_layers=is_logged)
    launched = None
    with NoBlockingCopies() as copies:
        loader = Loader(batches(), device=META, prefetch=0)
        for number in range(1, 9):
            step.accumulate(number, [next(loader) for _ in range(MICROS)], is_logged=is_logged)
            previous, launched = launched, step.launch(lr=0.1)
            assert (launched.measured is not None) == is_logged
            if previous is not None and not is_logged:
                assert step.finish(previous).loss == 2.0
    assert copies.count == 8 * MICROS * 3  # the batch, and the slots that are read and written
    if not is_logged:
        assert [values.shape for values in numbers_of_a_good_step] == [(HEAD + NUM_SUMS + 1,)] * 7
