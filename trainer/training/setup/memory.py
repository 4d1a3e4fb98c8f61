"""Memory of a rank, predicted by running its steps without numbers: what tensors exist together at the worst moment.

The steps are the run's own, on tensors that have a size and no content (`FakeTensorMode`). A dispatch mode sees each tensor
come into being, and a weak reference sees it go. So recomputation, the loss in chunks, mixed precision and models of the
user's own need no formula; only DDP's buckets, which need a process group, are put in its place.
"""

from __future__ import annotations

import itertools
import math
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.metrics.noise_scale.hooks import GradientNoiseScale
from trainer.training.setup.data import max_tokens_per_micro
from trainer.training.setup.parts import autocast_context, in_cells, make_model, model_and_loss
from trainer.training.setup.plan import Plan, width_of
from trainer.training.setup.plausible import ledger_bytes
from trainer.training.step.microbatch import MicroBatch
from trainer.training.step.optimizer import build_optimizer
from trainer.training.step.step import StepSettings, TrainStep

MOST_SECONDS = 10.0
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Memory:
    """Bytes of the tensors of one rank."""

    weights: int
    optimizer: int
    """Its state, after the first step."""
    ledger: int
    """States on the device."""
    buckets: int
    """DDP's, where it averages gradients over ranks."""
    peak: int
    """Most that exist together: the above, and gradients and activations at the worst moment of a step."""

    def parts(self) -> dict[str, int]:
        """What exists all the time, without what there is none of."""
        named = {"weights": self.weights, "optimizer": self.optimizer, "ledger": self.ledger, "buckets": self.buckets}
        return {name: size for name, size in named.items() if size}


def resident_bytes() -> int:
    """Memory of this process that is in use, as a run has it before its first tensor; 0 where it is not known."""
    file = Path("/proc/self/status")
    return int(file.read_text(encoding="utf-8").partition("VmRSS:")[2].split()[0]) * 1024 if file.exists() else 0


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that exist, each from the operation on that returns it.

    Args:
        most_seconds: after which an operation raises instead.
    """

    def __init__(self, most_seconds: float = math.inf) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._until = time.monotonic() + most_seconds
        self._seen: dict[int, weakref.ref[Any]] = {}

    @property
    def is_over(self) -> bool:
        """Whether the time is."""
        return time.monotonic() > self._until

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count what it returns.

        Raises:
            TimeoutError: the time is over.
        """
        if self.is_over:
            raise TimeoutError("it would take long")
        returned = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(returned):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return returned

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def forget(_: Any) -> None:
            del self._seen[key]
            self.now -= size

        self._seen[key] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)


def predict_memory(plan: Plan, *, most_seconds: float = MOST_SECONDS) -> Memory:
    """Memory of a rank's tensors from the second step on, without what is beside the steps (evaluations, saving).

    Raises:
        Exception: of any kind, where the user's model or optimizer cannot run without numbers, or needs inputs of its own; a
            `TimeoutError` if it takes long.
    """
    live = LiveBytes(most_seconds)
    try:
        return _predict(plan, live)
    except Exception:
        if live.is_over:  # whatever the error was made into on its way through the user's code
            raise TimeoutError("it would take long") from None
        raise


def _predict(plan: Plan, live: LiveBytes) -> Memory:
    config = plan.config
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True), live:
        model = make_model(config, config.model, plan.vocab_size)
        sizes = [live.now]
        if plan.facts.world_size > 1:
            average_into_buckets(model)
        sizes.append(live.now)
        step = _make_step(plan, model)
        _fill_gradients(model)
        step.launch(lr=config.optimizer.lr, stop=False, saved=False)  # makes the optimizer's state
        sizes.append(live.now)
        if config.train.micro_batches > 1:  # the last of them is the worst: the gradients of the others are there
            _fill_gradients(model)
        live.peak = live.now
        step.accumulate(1, [_micro_batch(plan)], details=None)
        step.launch(lr=config.optimizer.lr, stop=False, saved=False)
    weights, buckets, optimizer = (after - before for before, after in itertools.pairwise([0, *sizes]))
    table = config.ledger
    slab = 0 if table.placement == "host" else ledger_bytes(table, width_of(model))
    return Memory(weights, optimizer, slab, buckets, live.peak + slab)


def average_into_buckets(model: nn.Module) -> None:
    """Do to memory what DDP does in a window's last backward: gradients become views of its buckets, which always exist."""
    buckets = {parameter: torch.empty_like(parameter) for parameter in model.parameters() if parameter.requires_grad}

    def accumulated(parameter: Tensor) -> None:
        parameter.grad = buckets[parameter]  # type: ignore[index]

    for parameter in buckets:
        parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]


def _fill_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)


def _make_step(plan: Plan, model: nn.Module) -> TrainStep:
    config = plan.config
    cell_model, loss = model_and_loss(model, config, None)
    return TrainStep(
        model=in_cells(cell_model, config),
        ledger=None,  # its states are counted by their number; a model without one makes as many zeros as are looked up
        objective=loss,
        optimizer=build_optimizer(model, config.optimizer),
        gns=GradientNoiseScale(model) if config.gns.enabled else None,
        scaler=torch.amp.GradScaler("cpu", enabled=False),  # one that is on reads numbers, and takes none to speak of
        settings=StepSettings(1, max_tokens_per_micro(plan), config.train.clip_grad_norm),
        world_size=1,
        device=CPU,
        autocast=autocast_context(config, CPU),
    )


def _micro_batch(plan: Plan) -> MicroBatch:
    """The largest micro-batch of the run's sources."""
    length = plan.config.row_tokens
    rows = max_tokens_per_micro(plan) // length
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    inputs = {"tokens": tokens}
    if plan.config.data.pack:
        inputs["resets"] = torch.zeros(rows, length, dtype=torch.bool)
    if burn_in := plan.config.ledger.burn_in:
        inputs["tokens_before"] = torch.zeros(rows, burn_in, dtype=torch.int64)
        inputs["continues"] = torch.ones(rows, dtype=torch.bool)
    return MicroBatch(inputs, torch.zeros_like(tokens), None, {})
