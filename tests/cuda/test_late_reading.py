"""Steps that do not log never make the host wait for the device, in real runs of all kinds, and what is copied is pinned.

On the CPU nothing can wait; there these are the same runs, and tests/core/training/test_no_waiting.py forbids the reading.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.support.fault_runs import events
from tests.support.on_device import around_steps, synchronization_forbidden, train_here
from tests.support.runs import FULL_ROWS
from trainer.data.loader import Loader
from trainer.on_device import HostCopy
from trainer.training.loop import Order

pytestmark = pytest.mark.cuda
WARM_UP = 2  # the first steps make the optimizer's state and ask what libraries want to know

RUNS = {
    "plain": (),
    "bf16": ("train.precision=bf16",),
    "full rows": (FULL_ROWS,),
    "skipping": ("train.on_non_finite=skip",),
    "layers": ("metrics.per_layer=true",),
    "bf16 states": ('ledger.dtype="bfloat16"',),
    "stale states": ('ledger.wipe_mode="periodic_stale"', "ledger.stale_threshold=5"),
    "sgd": ('optimizer.name="sgd"',),
    "muon": ('optimizer.name="muon"',),
    "loss in chunks": ("objective.chunk_tokens=16",),
    "z-loss, token types": ("objective.z_loss=1e-4", "objective.token_types=true"),
    "delta rule": ('model.family="gated_delta"',),
}


@pytest.mark.parametrize("kind", RUNS)
def test_steps_that_do_not_log_do_not_wait(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if device.type != "cuda" and kind not in ("plain", "bf16 states"):
        pytest.skip("nothing can wait on the CPU; other tests run these")
    watched: list[int] = []

    def around(order: Order) -> AbstractContextManager[None]:
        # A step that is read at once also finishes the one before it.
        if order.number <= WARM_UP or order.is_read_at_once:
            return nullcontext()
        watched.append(order.number)
        return synchronization_forbidden(device)

    around_steps(monkeypatch, around)
    run_dir = train_here(
        tmp_path, device, "train.steps=16", "metrics.log_interval=8", "checkpoint.every=0", *RUNS[kind]
    )
    assert watched == [3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15]
    # A guard would keep the error of a diagnostic that waits.
    assert [event for event in events(run_dir) if event["event"] == "diagnostic_disabled"] == []


def test_the_check_sees_what_waits(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("torch finds synchronization on CUDA alone")
    value = torch.ones(3, device=device)
    for waits in (
        lambda: value[0].item(),
        lambda: value.cpu(),
        lambda: value[value > 0],
        lambda: torch.ones(3).to(device),
    ):
        with synchronization_forbidden(device), pytest.raises(RuntimeError, match="synchroniz"):
            waits()


class CopiesFromHost(TorchFunctionMode):
    """Collects copies of the host's tensors to the device: whether each is from pinned memory, and waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.are_free: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.to, torch.Tensor.copy_, torch.Tensor.cuda) and result.device.type == self.device.type:
            source = args[1] if func is torch.Tensor.copy_ else args[0]
            if isinstance(source, torch.Tensor) and source.device.type == "cpu":
                is_asked = bool((kwargs or {}).get("non_blocking"))
                self.are_free.append(is_asked and source.is_pinned())
        return result


def test_batches_reach_the_device_through_pinned_memory_unchanged(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    made = [{"tokens": rng.integers(0, 99, (4, 16)), "targets": rng.integers(0, 99, (4, 16))} for _ in range(5)]
    with CopiesFromHost(device) as copies:
        loader = Loader([dict(batch) for batch in made], device=device, prefetch=0)
        found = [{"tokens": micro.inputs["tokens"], "targets": micro.targets} for micro in loader]
    for before, after in zip(made, found, strict=True):
        assert all(after[key].device.type == device.type for key in before)
        assert all(np.array_equal(after[key].cpu().numpy(), before[key]) for key in before)
    if device.type == "cuda":
        assert copies.are_free == [True] * 5


def test_batches_that_a_thread_prefetches_are_whole_when_they_are_used(device: torch.device) -> None:
    """The thread's copies are still on their way when the batch is handed over: what uses them must come after."""
    made = [{"tokens": np.full((64, 4096), number), "targets": np.zeros((64, 4096), np.int64)} for number in range(20)]
    with closing(Loader([dict(batch) for batch in made], device=device, prefetch=2)) as loader:
        sums = [micro.inputs["tokens"].sum() for micro in loader]
    assert torch.stack(sums).tolist() == [64 * 4096 * number for number in range(20)]


def test_numbers_are_read_as_they_were_when_they_were_copied(device: torch.device) -> None:
    values = torch.arange(4.0, device=device)
    with synchronization_forbidden(device):
        copy = HostCopy(values.clone())
        values.fill_(-1.0)
    assert copy.read() == [0.0, 1.0, 2.0, 3.0]
