"""MetricsTracker: the per-step centre of all metrics; a loop with it: examples/tracker_wandb.py."""

from __future__ import annotations

import math
import operator
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.metrics.aggregate import Recorder, Scalar, Value
from trainer.metrics.best_effort import BestEffort, Diagnostics, LeaveOut, as_number, checked
from trainer.metrics.catalog import EVAL_PREFIX, lookup_or_gauge
from trainer.metrics.catalog_rows import SHARE_ERRORS
from trainer.metrics.payload_contract import RESTART, Mode, build_payload
from trainer.metrics.sinks import Sink
from trainer.on_device import compute_mfu, get_memory_stats, peak_tflops_of
from trainer.options import TrackerOptions

_SMOOTHED = ("loss", "tokens", "step_time")
SMOOTHING = 0.1  # weight of the newest value in `smoothed/*`
_OF_MEMORY = ("allocated_gb", "peak_gb", "reserved_gb", "total_gb", "mem_utilization")


class Ema:
    """`value = alpha * sample + (1 - alpha) * value`, from the first sample on.

    Samples are numbers or 0-dim tensors, which only `read` waits for. A sample that is not finite
    is passed over: it would spoil the average for good.
    """

    def __init__(self, alpha: float, value: float | None = None) -> None:
        self._alpha, self._value = alpha, value
        self._unread: list[Scalar] = []

    def update(self, sample: Scalar) -> None:
        if isinstance(sample, torch.Tensor):
            sample = sample.detach().clone()  # the caller may reuse its tensor
        self._unread.append(sample)

    def read(self) -> float | None:
        """The average as a number, None without a finite sample."""
        for sample in filter(math.isfinite, map(float, self._unread)):
            if self._value is None:
                self._value = sample
            else:
                self._value = self._alpha * sample + (1.0 - self._alpha) * self._value
        self._unread.clear()
        return self._value


@dataclass(frozen=True)
class StepMetrics:
    """Raw values of one logged step; None where unknown, or where the device has none.

    Units: tokens per second over all ranks, seconds, GB (1e9 bytes), fractions.
    """

    loss: float | None
    grad_norm: float | None
    lr: float
    tokens_per_sec: float | None
    mfu: float | None
    step_time_sec: float
    allocated_gb: float | None
    peak_gb: float | None
    reserved_gb: float | None
    total_gb: float | None
    mem_utilization: float | None


@dataclass
class _OpenStep:
    """A step that was started and has not ended, by the tracker's clock."""

    start: float
    stop: float | None = None  # start of the next step, if it has started
    parts: dict[str, float] = field(default_factory=dict)  # section -> seconds


@dataclass
class _Since:
    steps: int = 0
    seconds: float = 0.0
    tokens: Scalar = 0
    parts: Counter[str] = field(default_factory=Counter)  # section -> seconds


class MetricsTracker:
    """Times steps, smooths, and sends payloads to the sinks on logging steps.

    Only logging steps wait for the device: `loss`, `grad_norm` and `tokens_in_step` may be 0-dim
    tensors, which are read when a step is logged, while the smoothing sees every step.

    Attributes:
        diagnostics: guards of all but the record, which the loop's other diagnostics share.
    """

    def __init__(
        self,
        options: TrackerOptions = TrackerOptions(),  # noqa: B008 - immutable
        *,
        num_devices: int,
        device: torch.device | str,
        flops_per_token: float = 0.0,
        sinks: Iterable[Sink] = (),
        rank: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Only rank 0 may have `sinks`, which may also come later through `init_backends`.

        `flops_per_token`: real FLOPs of forward and backward; 0 if unknown (no MFU).
        """
        self._log_interval, self._per_source = options.log_interval, options.per_source
        self._device = torch.device(device)
        self._num_devices, self._rank = num_devices, rank
        peak = options.peak_tflops or peak_tflops_of(self._device)
        self._mfu_per_speed = compute_mfu(
            tokens_per_sec=1.0, flops_per_token=flops_per_token, num_devices=num_devices, peak_tflops=peak
        )
        self._clock = clock
        self.diagnostics = Diagnostics()
        self._smoothed = {name: Ema(SMOOTHING) for name in _SMOOTHED}
        # All ranks have the same values: rank 0 alone warns about them.
        self._leave_out: LeaveOut = BestEffort("tracker").leave_out if rank == 0 else lambda *_: None
        self._extra = Recorder(leave_out=self._leave_out)
        self._tokens_seen: Scalar = 0
        # Two at a time: the next step is launched before the numbers of this one are read.
        self._open: deque[_OpenStep] = deque()
        self._since = _Since()
        self._last: list[Any] = []  # loss, norm, learning rate and tokens of the step that ended last
        self._sinks: list[tuple[Sink, Callable[..., object]]] = []  # with what calls its methods
        self._named = Counter[str]()  # how many guarded ones have a name
        self._seen_keys = set[str]()
        self._restart: dict[str, int] | None = None  # for the next payload
        self.init_backends(sinks)

    def init_backends(self, sinks: Iterable[Sink]) -> None:
        """Add sinks, once the process group exists and a restored run id is known; rank 0 only.

        A sink without `is_essential` is guarded: its failure costs that sink, with one warning.
        """
        sinks = list(sinks)
        if sinks and self._rank != 0:
            raise ValueError(f"sinks belong to rank 0, this is rank {self._rank}")
        for sink in sinks:
            run: Callable[..., object] = operator.call
            if not getattr(sink, "is_essential", False):
                name = getattr(sink, "name", type(sink).__name__)
                self._named[name] += 1
                number = f" {self._named[name]}" * (self._named[name] > 1)  # guards go by name
                run = self.diagnostics.best_effort(f"sink {name}{number}").run
            self._sinks.append((sink, run))

    def will_log(self, step: int) -> bool:
        """Whether `end_step` of this step logs by itself."""
        return step % self._log_interval == 0 or step == 1

    def start_step(self) -> None:
        """Start the step's clock and stop that of the step before, whose numbers may come later.
        RuntimeError: two steps have not ended; each that is started needs its `end_step`."""
        if len(self._open) == 2:
            raise RuntimeError("start_step without end_step")
        now = self._clock()
        if self._open:
            self._open[-1].stop = now
        self._open.append(_OpenStep(now))

    @property
    def step_start(self) -> float:
        """Start of the step that ends next, by the tracker's clock."""
        return self._open[0].start

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Times a part of the step started last, such as `data`; entered twice, it adds up."""
        parts, began = self._open[-1].parts, self._clock()
        yield
        parts[name] = parts.get(name, 0.0) + self._clock() - began

    def measured(self) -> dict[str, float | None]:
        """Seconds per step of each section, since the last payload and with the step that ends
        next, and memory of a CUDA device; for `extra`, in which ranks combine them."""
        found = self._memory() if self._device.type == "cuda" else {}
        for part, seconds in (self._since.parts + Counter(self._open[0].parts)).items():
            found[f"time/{part}_sec"] = seconds / (self._since.steps + 1)
        return found

    def _memory(self) -> dict[str, float | None]:
        # The allocator keeps the peak itself, so that reading it on logging steps loses nothing.
        found = self.diagnostics.best_effort("memory").run(get_memory_stats, self._device) or {}
        return {f"gpu/{name}": found.get(name) for name in _OF_MEMORY}

    def end_step(
        self,
        step: int,
        *,
        loss: Scalar | None,
        grad_norm: Scalar | None,
        lr: float,
        tokens_in_step: Scalar,
        tokens_trained: Scalar | None = None,
        extra: Mapping[str, Value | None] | None = None,
        force_log: bool = False,
    ) -> StepMetrics | None:
        """Close the step: timing, MFU, memory, smoothing, and on logging steps logging.

        Args:
            loss: the step's loss over all ranks, per token; None for a step without a target.
            grad_norm: before clipping; None if it is not computed.
            tokens_in_step: target tokens over all ranks; speeds follow from them.
            tokens_trained: those that count in `tokens_seen`: 0 for a skipped update; None: all.
            extra: other values over all ranks, by catalog key, which says how those since the last
                logged step combine: counters add up, means are taken. None is left out; with one
                warning so is what is no number, or has a name of the tracker's own (`loss`, `mfu`).
            force_log: log this step whatever the interval says (the last step, an evaluation step).

        Returns:
            The raw values on logging steps, None otherwise.

        Raises:
            RuntimeError: without `start_step`. OSError: an essential sink could not write.
        """
        if not self._open:
            raise RuntimeError("end_step without start_step")
        ended, since = self._open.popleft(), self._since
        step_time = (self._clock() if ended.stop is None else ended.stop) - ended.start
        since.steps += 1
        since.seconds += step_time
        since.tokens = since.tokens + tokens_in_step  # not in place: it may be the caller's tensor
        since.parts.update(ended.parts)
        if tokens_trained is None:
            tokens_trained = tokens_in_step
        if isinstance(tokens_trained, torch.Tensor):  # float32 could not hold the total
            tokens_trained = tokens_trained.long()
        self._tokens_seen = self._tokens_seen + tokens_trained
        for average, sample in zip(self._smoothed.values(), (loss, tokens_in_step, step_time), strict=True):
            if sample is not None:
                average.update(sample)
        if extra:
            self.diagnostics.best_effort("extra").run(self._extra.add, extra)
        self._last = [loss, grad_norm, lr, tokens_in_step]
        for place, value in enumerate(self._last):
            if isinstance(value, torch.Tensor):  # which the caller may use again
                self._last[place] = value.detach().clone()
        return self._log(step) if force_log or self.will_log(step) else None

    def log_last(self, step: int, extra: Mapping[str, Value | None]) -> None:
        """Log the step that ended last, unless it was: the run ends with it. `extra`: see `end_step`."""
        if self._since.steps:
            self.diagnostics.best_effort("extra").run(self._extra.add, extra)
            self._log(step)

    def _log(self, step: int) -> StepMetrics:
        """Log the step that ended last; see `end_step`."""
        since, (loss, grad_norm, lr, tokens_in_step) = self._since, self._last
        # Times and speeds of a payload are those of all steps since the last one.
        self._since, step_time = _Since(), since.seconds / since.steps
        speed, mfu = self._rates(since.tokens, max(since.seconds, 0.0))
        values: dict[str, float | None] = {
            "loss": None if loss is None else float(loss),
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "lr": float(lr),
            "tokens_per_sec": speed,
            "mfu": mfu,
            "step_time_sec": step_time,
            "tokens_in_step": float(tokens_in_step),
            "tokens_seen": float(self._tokens_seen),
        }
        values["tokens_per_sec_per_device"] = None if speed is None else speed / self._num_devices
        smooth_loss, smooth_tokens, smooth_time = map(Ema.read, self._smoothed.values())
        # The averaged tokens over the averaged time: an average of speeds would be above it.
        smooth_speed, smooth_mfu = self._rates(smooth_tokens, smooth_time)
        values |= {
            "smoothed/loss": smooth_loss,
            "smoothed/tokens_per_sec": smooth_speed,
            "smoothed/step_time": smooth_time,
            "smoothed/mfu": smooth_mfu,
        }
        shares = set(map("time/{}_share".format, since.parts))
        self._add_extras(values, reserved={*values, *shares})
        for part, seconds in since.parts.items():
            own = values.setdefault(f"time/{part}_sec", seconds / since.steps)
            if own is not None and step_time > 0.0:
                values[f"time/{part}_share"] = own / step_time
        if self._device.type == "cuda" and "gpu/peak_gb" not in values:  # the caller has reduced none over ranks
            values |= self._memory()
        self._emit("train", step, values)
        memory = {name: values.get(f"gpu/{name}") for name in _OF_MEMORY}
        return StepMetrics(values["loss"], values["grad_norm"], float(lr), speed, mfu, step_time, **memory)

    def _rates(self, tokens: Scalar | None, seconds: float | None) -> tuple[float | None, float | None]:
        """Tokens per second, and MFU; None where unknown."""
        if tokens is None or not seconds:
            return None, None
        speed = float(tokens / seconds)
        return speed, None if self._mfu_per_speed is None else speed * self._mfu_per_speed

    def _add_extras(self, values: dict[str, float | None], *, reserved: Collection[str]) -> None:
        """Add the values reported since the last logged step; waits for their devices."""
        drained = self.diagnostics.best_effort("extra").run(self._extra.drain_metrics) or {}
        for key, value in drained.items():
            if key in reserved:
                self._leave_out(key, "the name is one of the tracker's own")
            elif value is not None:
                pair = value if isinstance(value, tuple) else (value, 1.0)
                try:
                    total, weight = map(float, pair)
                    values[key] = total / weight if weight else None
                except Exception as error:  # noqa: BLE001 - one value must not cost the others
                    self._leave_out(key, str(error))
        errors = {
            key: abs(value) for key, value in values.items() if key.startswith(SHARE_ERRORS) and value is not None
        }
        if errors:
            values["blend/max_share_error"] = max(errors.values())
        if not self._per_source:
            for key in errors:
                del values[key]

    def log_eval(self, metrics: Mapping[str, Value], step: int) -> None:
        """Send evaluation values; the smoothing stays as it is.

        Plain keys (`loss`) get the prefix `eval_` if they lack it; one with a namespace
        (`moe/aux_loss`) is the caller's. A value that is no number is left out with one warning.
        """
        found = self.diagnostics.best_effort("log_eval").run(checked, metrics, self._leave_out, _read) or {}
        values = {}
        for key, value in found.items():
            is_plain = "/" not in key and not key.startswith(EVAL_PREFIX)
            values[f"{EVAL_PREFIX}{key}" if is_plain else key] = value
        self._emit("eval", step, values)

    def log_restart(self, step: int) -> None:
        """Tell the sinks that the run continues after this step: later ones may repeat."""
        self._restart = {"from_step": step}
        self.log_event({"event": RESTART, "global_step": step})

    def log_event(self, event: Mapping[str, Any]) -> None:
        """Send an event to the sinks, which ignore those that they do not support."""
        self._send("event", event)

    def _emit(self, mode: Mode, step: int, values: Mapping[str, float | None]) -> None:
        metrics = {key: value for key, value in values.items() if value is not None}
        for key in metrics.keys() - self._seen_keys:
            lookup_or_gauge(key)  # which warns, once, of a key without a row
        self._seen_keys |= metrics.keys()
        if self._sinks and metrics:
            restart, self._restart = self._restart, None
            self._send("log", build_payload(mode, step, metrics, restart=restart))

    def _send(self, method: str, *args: Any) -> None:
        for sink, run in self._sinks:
            run(operator.methodcaller(method, *args), sink)

    def state_dict(self) -> dict[str, Any]:
        """The state of a resumed run: tokens seen and the smoothed values."""
        return {
            "tokens_seen": int(self._tokens_seen),
            "smoothed": {name: average.read() for name, average in self._smoothed.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._tokens_seen = state["tokens_seen"]
        self._smoothed = {name: Ema(SMOOTHING, state["smoothed"][name]) for name in _SMOOTHED}

    def close(self) -> None:
        """Close all sinks, also failed ones, the last added first; raises what an essential one does."""
        with ExitStack() as stack:
            while self._sinks:
                sink, run = self._sinks.pop(0)
                if run is not operator.call:  # the guard of one that has failed is off
                    run = BestEffort(f"end of sink {type(sink).__name__}").run
                stack.callback(run, sink.close)


def _read(value: Any) -> float | None:
    """A number, or a pair's total over its weight (None over nothing); waits for its device."""
    if isinstance(value, tuple) and len(value) == 2:
        weight = as_number(value[1])
        return as_number(value[0]) / weight if weight else None
    return as_number(value)
