"""Extensions of a run, called at named moments of the loop behind a guard, and what they see of it.

docs/extensions.md has an example. A moment that no extension overrides costs the loop a look at an
empty list. An extension that fails is off from then on, with one warning and an event; the run
continues without it, unless a moment says otherwise.

An extension must not communicate by itself: if it failed on one rank, the others would wait for it.
The return value of `updated` is summed over ranks for `settled`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag, auto
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.config.schema import RunConfig
from trainer.data.loader import MicroBatch
from trainer.distributed.env import RankInfo
from trainer.distributed.strategy import Strategy
from trainer.distributed.watchdog import Watchdog
from trainer.errors import UserError
from trainer.metrics.aggregate import Recorder, Reported
from trainer.metrics.best_effort import BestEffort, Diagnostics
from trainer.metrics.sinks import EventWriter
from trainer.objective import Auxiliary, ObjectiveOutput
from trainer.on_device import HostCopy
from trainer.training import Found
from trainer.training.plan import Plan
from trainer.training.run_dir import RunDir
from trainer.training.tensor_files import pack, unpack
from trainer.training.train_state import Position, TrainState
from trainer.wording import short_repr

if TYPE_CHECKING:
    from trainer.training.evaluator import Evaluator


class Flag(IntFlag):
    """What a rank says with a step."""

    NONE = 0
    STOP = auto()  # it was asked to stop
    SAVE = auto()  # by its clock, the time between two saves has passed
    EXHAUSTED = auto()  # it had no batch of its own, only masked copies


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step."""

    flags: Flag
    """`STOP` and `SAVE` if any rank says so. `EXHAUSTED` if all do: nothing was changed."""
    is_finite: bool  # False: the step was skipped; weights and optimizer are as before
    loss: float
    """Token-weighted over all micro-batches and ranks, nats per token; NaN without a token."""
    tokens: int
    """Target tokens over all ranks. 0: all targets were masked, and nothing was changed."""
    tokens_trained: int  # 0 for a step that was skipped
    grad_norm: float
    """Norm of the true gradient before clipping."""
    grad_factor: float
    """c, where the gradient before the update was c times that of the mean loss."""

    @property
    def is_taken(self) -> bool:
        """Whether the weights were updated."""
        return self.is_finite and self.tokens > 0


@dataclass(frozen=True)
class Step:
    """A step whose numbers are known."""

    number: int
    window: Sequence[MicroBatch]  # of this rank
    is_logged: bool
    outcome: StepOutcome


@dataclass(kw_only=True, eq=False, repr=False)
class RunView:
    """What an extension sees of its run."""

    plan: Plan
    config: RunConfig
    info: RankInfo
    device: torch.device
    strategy: Strategy
    state: TrainState
    run_dir: RunDir
    events: EventWriter | None = None  # of rank 0, once the record is open
    recorder: Recorder  # of the metrics since the last logged step
    first_step: int  # the last one before the run: 0, or that of the checkpoint
    position: Position
    found: Found | None  # the checkpoint that the run continues
    auxiliary: Auxiliary  # losses and metrics of the model's output
    evaluator: Evaluator | None = None
    watchdog: Watchdog = field(init=False)  # an extension that takes long tells it
    failure: str = ""
    """Set by an extension, on all ranks alike, to end the run before anything more is saved; at the
    boundary of the last step, after the last save."""

    @property
    def model(self) -> nn.Module:
        """The model itself, without DDP."""
        return self.state.model

    @property
    def diagnostics(self) -> Diagnostics:
        """Guards of what only measures or shows: its failure costs one warning, never the run."""
        return self.state.tracker.diagnostics

    def record(self, name: str, value: Reported) -> None:
        """Count a metric on this rank until the next logged step, which reports it.

        The catalog says how the values between two logged steps and those of all ranks combine
        (`trainer.metrics.catalog.register` adds metrics). `value`: a number, a tensor of one element, a
        weighted mean's pair (sum, weight), or None if unknown; what is no number is left out.
        """
        self.recorder.add({name: value})

    def event(self, event: Mapping[str, Any]) -> None:
        """Write to events.jsonl (rank 0; other ranks do nothing)."""
        if self.events is not None:
            self.diagnostics.best_effort("events.jsonl").run(self.events.write, event)


class Extension:
    """Measures or shows something of a run. Override the moments it needs; all ranks call them.

    Args:
        run: what it sees of the run. A class that overrides `__init__` also takes the `args` of
            its `[[extension]]`.

    Attributes (those about sums and steps are the same on all ranks):
        metric_keys: the names of the metrics that it drains, or that have no row of their own.
        num_sums: how many numbers `updated` returns; 0: it sums nothing over ranks.
        every_step: `micro_done` to `updated` are called at all steps, not only at logged ones.
        boundary_every: the next step also waits for `at_boundary` after multiples of this; 0: none.
    """

    metric_keys: Sequence[str] = ()
    num_sums: int = 0
    every_step: bool = False
    boundary_every: int = 0

    def __init__(self, run: RunView) -> None:
        self.run = run

    def micro_done(self, micro: MicroBatch, result: ObjectiveOutput) -> None:
        """After a backward pass."""

    def gradient_ready(self, squares: Mapping[nn.Parameter, Tensor]) -> None:
        """Before clipping and the update, with each gradient's squared norm (a shard's share)."""

    def optimizer_done(self, is_rejected: Tensor) -> None:
        """After the optimizer, which changed nothing if `is_rejected` (bool [], on the device).

        For what makes a result of the run, which must not be missing: a failure ends the run.
        """

    def updated(self) -> Tensor | None:
        """After the update. Returns float64 [num_sums], to be summed over ranks."""

    def settled(self, step: Step, sums: Sequence[float] | None) -> None:
        """The step's numbers are known, usually after the next step is launched.

        `sums`: what `updated` returned, over ranks; None if it was not called.
        """

    def drain_metrics(self) -> Mapping[str, Reported]:
        """On a logged step: the metrics that it does not `record` itself."""
        return {}

    def at_boundary(self, step: int, *, is_last: bool) -> None:
        """After a step that the next one waits for: logged, every `boundary_every`-th, others; if a
        signal stops the run, as it resumes. Once more, with `is_last`, if the data end with it."""

    def state_dict(self) -> dict[str, Any]:
        """For a resumed run: plain values in dicts, lists and tuples; the same on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. A failure ends the run before its first step."""

    def closed(self) -> None:
        """The run ends, also by an error. Not called for an extension that has failed."""


MOMENTS = [name for name in vars(Extension) if callable(getattr(Extension, name)) and name[0] != "_"]


@dataclass(frozen=True)
class _Guarded:
    """An extension and its guard."""

    name: str
    extension: Extension
    guard: BestEffort

    def has(self, moment: str) -> bool:
        return getattr(type(self.extension), moment) is not getattr(Extension, moment)

    def call(self, moment: str, *args: Any, **kwargs: Any) -> Any:
        return self.guard.run(getattr(self.extension, moment), *args, **kwargs)

    def fill(self, part: Tensor) -> None:
        """Write 1 and the result of `updated` into its part [1 + num_sums] of the sums."""
        sums, length = self.extension.updated(), self.extension.num_sums
        if sums is None:
            raise TypeError(f"updated() gave None, and num_sums is {length}")
        part[1:] = sums.reshape(length)  # too few would be broadcast
        part[0].fill_(1.0)  # `= 1.0` would copy it from the host, and wait


class Measured(NamedTuple):
    """The sums of a step on their way to the host."""

    extensions: list[_Guarded]
    numbers: HostCopy


class Extensions:
    """The extensions of a run, each behind its guard. Sums are reduced on `device`."""

    def __init__(self, diagnostics: Diagnostics, *, device: torch.device, world_size: int) -> None:
        self._all: list[_Guarded] = []
        self._diagnostics, self._device, self._world_size = diagnostics, device, world_size
        self._states: dict[str, Any] = {}  # the last ones, also of extensions that failed
        self.periods: set[int] = set()
        """The next step waits for a boundary after steps that are multiples of one of these."""
        self._arrange()

    def add(self, extensions: Mapping[str, Extension]) -> None:
        """Add some, by name. Those that sum must be the same on all ranks."""
        for name, extension in extensions.items():
            # All calls of an extension share one guard: one failure switches it off.
            added = _Guarded(name, extension, self._diagnostics.best_effort(name))
            if added.has("updated") and not extension.num_sums:
                problem = f"{name} has updated() but num_sums = 0"
                raise UserError("extension", problem, "set num_sums to its length")
            self._all.append(added)
            self.periods |= {extension.boundary_every} - {0}
        self._arrange()

    def _arrange(self) -> None:
        """Sort the extensions by moment, between two steps: none measures."""
        self._always = [each for each in self._all if each.extension.every_step]
        # A moment that no extension overrides has an empty list.
        self._by_moment = {each: [one for one in self._all if one.has(each)] for each in MOMENTS}
        self._measure(())

    @property
    def metric_keys(self) -> list[str]:
        """The names of all their metrics on this rank."""
        return [key for each in self._all for key in each.extension.metric_keys]

    def call(self, moment: str, *args: Any, **kwargs: Any) -> None:
        """Call a moment of all extensions that have it."""
        for each in self._by_moment[moment]:
            each.call(moment, *args, **kwargs)

    def begin_step(self, *, is_logged: bool) -> None:
        """Note which extensions measure the step."""
        # By shared settings: one that failed, here or elsewhere, keeps its place in the sums.
        measuring = self._all if is_logged else self._always
        if measuring or self._measuring:
            self._measure(measuring)

    def _measure(self, measuring: Sequence[_Guarded]) -> None:
        self._measuring = list(measuring)
        self.on_micro, self.on_gradient = self._calls("micro_done"), self._calls("gradient_ready")

    def _calls(self, moment: str) -> list[Callable[..., Any]]:
        """What calls a moment of the extensions that measure the step."""
        return [partial(each.call, moment) for each in self._measuring if each.has(moment)]

    def sum_up(self, is_rejected: Tensor) -> Measured | None:
        """Call `optimizer_done` and `updated`, and start to sum; None: nothing is summed."""
        for each in self._measuring:
            if each.guard.enabled and each.has("optimizer_done"):
                each.extension.optimizer_done(is_rejected)  # half a result is worse than none
        summing, parts = [], []
        for each in self._measuring:
            if each.extension.num_sums:
                part = torch.zeros(1 + each.extension.num_sums, dtype=torch.float64, device=self._device)
                each.guard.run(each.fill, part)
                summing.append(each)
                parts.append(part)
        if not summing:
            return None
        packed = torch.cat(parts)
        # One collective for all: the first number of each part counts the ranks on which it worked.
        if self._world_size > 1:
            dist.all_reduce(packed)
        return Measured(summing, HostCopy(packed))

    def settle(self, step: Step, measured: Measured | None) -> None:
        """Pass on a step and its sums; an extension that gave none on a rank is off on all."""
        found: dict[str, Sequence[float]] = {}
        if measured is not None:
            found = self._read(measured, step)
        for each in self._by_moment["settled"]:
            each.call("settled", step, found.get(each.name))

    def _read(self, measured: Measured, step: Step) -> dict[str, Sequence[float]]:
        """The sums by name."""
        found: dict[str, Sequence[float]] = {}
        numbers = measured.numbers.read()
        for each in measured.extensions:
            length = 1 + each.extension.num_sums
            (num_ranks, *sums), numbers = numbers[:length], numbers[length:]
            if num_ranks == self._world_size:
                found[each.name] = sums
            else:  # off here too; rank 0 records it
                if not dist.is_initialized() or dist.get_rank() == 0:
                    each.guard.fail(RuntimeError(f"it gave no sums on a rank, at step {step.number}"))
                each.guard.enabled = False
        return found

    def drained(self) -> dict[str, Reported]:
        """The metrics of all; None for those of one that has failed."""
        found: dict[str, Reported] = {}
        for each in self._by_moment["drain_metrics"]:
            drained = each.call("drain_metrics")
            if isinstance(drained, Mapping):
                found |= drained
            elif drained is not None:
                each.guard.fail(TypeError(f"drain_metrics() gave {short_repr(drained)}, no mapping"))
        for each in self._all:
            if not each.guard.enabled:
                found |= dict.fromkeys(each.extension.metric_keys)
        return found

    def close(self) -> None:
        """Close and release all of them: they refer to the run."""
        self.call("closed")
        self._all.clear()
        self._arrange()

    def state_dict(self) -> dict[str, Any]:
        """The states by name; of an extension that is off, its last."""
        for each in self._by_moment["state_dict"]:
            each.guard.run(self._keep_state, each)
        return dict(self._states)

    def _keep_state(self, each: _Guarded) -> None:
        state = each.extension.state_dict()
        kept, tensors = pack(state)
        if tensors or not isinstance(state, dict):
            raise TypeError(f"state_dict() gave {short_repr(state)}, no dict of plain values")
        self._states[each.name] = kept

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Continue from saved states; an extension without one starts anew."""
        self._states |= states
        no_tensors: dict[str, Tensor] = {}
        for each in self._by_moment["load_state_dict"]:
            if each.name in states:
                # Unguarded: a state that cannot be restored is the checkpoint's fault.
                each.extension.load_state_dict(unpack(states[each.name], no_tensors.__getitem__))
