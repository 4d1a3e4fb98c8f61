"""MetricsTracker: the per-step centre of all metrics.

options = TrackerOptions(log_interval=10)
tracker = MetricsTracker(options, num_devices=world_size, device=device, rank=rank, flops_per_token=flops)
tracker.init_backends([StdoutSink("json"), JsonlSink(run_dir / "metrics.jsonl")])      # rank 0 only
for step in range(1, steps + 1):
    tracker.start_step()
    with tracker.section("data"):
        batch = next(batches)
    ...
    tracker.end_step(step, loss=loss, grad_norm=grad_norm, lr=lr, tokens_in_step=tokens)
tracker.close()
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.metrics.aggregate import Recorder, Scalar, Value
from trainer.metrics.best_effort import BestEffort, Diagnostics, LeaveOut, as_number, checked
from trainer.metrics.catalog.lookup import EVAL_PREFIX, UnknownMetric, is_known, lookup_or_gauge
from trainer.metrics.catalog.rows_data import EPOCHS
from trainer.metrics.device import compute_mfu, get_memory_stats, resolve_peak_tflops
from trainer.metrics.payload_contract import Mode, build_payload, build_restart
from trainer.metrics.sinks import Sink
from trainer.options import TrackerOptions
from trainer.wording import message_of

# Speed and MFU follow from tokens and time: an average of rates would be above the tokens over the time.
_SMOOTHED = ("loss", "tokens", "step_time")
_OF_MEMORY = ("allocated_gb", "peak_gb", "reserved_gb", "total_gb", "mem_utilization")


class Ema:
    """`value = alpha * sample + (1 - alpha) * value`, from the first sample on.

    Samples are numbers or 0-dim tensors; a tensor is averaged on its device and read only by `read`. A sample that is
    not finite is passed over: one bad step would otherwise spoil the average for good.
    """

    def __init__(self, alpha: float) -> None:
        if not 0.0 < alpha <= 1.0:
            raise ValueError(f"alpha must be in (0, 1], got {alpha}")
        self.alpha = alpha
        self._value: Scalar | None = None

    def update(self, sample: Scalar) -> None:
        """Take in one sample."""
        if isinstance(sample, torch.Tensor):
            self._value = self._on_device(sample)
        elif isinstance(self._value, torch.Tensor):
            self._value = self._on_device(self._value.new_full((), sample))
        elif math.isfinite(sample):
            value = self._value
            self._value = sample if value is None else self.alpha * sample + (1.0 - self.alpha) * value

    def _on_device(self, sample: torch.Tensor) -> torch.Tensor:
        sample = sample.detach().to(torch.float64)
        if self._value is None:
            # A copy: the caller may reuse its tensor. NaN marks that nothing finite has been seen yet.
            return torch.where(torch.isfinite(sample), sample, torch.nan)
        value = self._value if isinstance(self._value, torch.Tensor) else sample.new_full((), self._value)
        mixed = torch.where(torch.isnan(value), sample, torch.lerp(value, sample, self.alpha))
        return torch.where(torch.isfinite(sample), mixed, value)

    def read(self) -> float | None:
        """The average as a number (waits for the device if it is a tensor); None before the first finite sample."""
        if self._value is None:
            return None
        value = float(self._value)
        return None if math.isnan(value) else value

    def load(self, value: float | None) -> None:
        """Continue from a saved average."""
        self._value = value


@dataclass(frozen=True)
class StepMetrics:
    """Raw values of one logged step; None where a thing is unknown or does not exist on the device.

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
    stop: float | None = None
    """When the next step started; None: it has not."""
    parts: dict[str, float] = field(default_factory=dict)
    """Section -> seconds."""


@dataclass
class _Since:
    """The steps since the last payload."""

    steps: int = 0
    seconds: float = 0.0
    tokens: Scalar = 0
    parts: Counter[str] = field(default_factory=Counter)
    """Section -> seconds."""


class MetricsTracker:
    """Times steps, smooths, and sends payloads to the sinks on logging steps.

    Nothing waits for the device outside logging steps: `loss`, `grad_norm` and `tokens_in_step` may be 0-dim tensors
    and are read only when a step is logged, while the smoothing sees every step.
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
        strict_keys: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Build a tracker; `sinks` may also come later through `init_backends`.

        Args:
            options: how often it logs, and what it smooths by; see `TrackerOptions`.
            num_devices: devices that share the work (the world size).
            flops_per_token: real FLOPs of forward and backward; 0 if unknown (no MFU).
            rank: only rank 0 may have sinks.
            strict_keys: a key that is not in the catalog raises `UnknownMetric` instead of one warning.
            clock: monotonic seconds.
        """
        self._log_interval = options.log_interval
        self._device = torch.device(device)
        self._num_devices = num_devices
        peak = resolve_peak_tflops(self._device, options.peak_tflops)
        self._mfu_per_speed: Any = compute_mfu(
            tokens_per_sec=1.0, flops_per_token=flops_per_token, num_devices=num_devices, peak_tflops=peak
        )
        self._rank = rank
        self._strict_keys = strict_keys
        self._clock = clock
        self.diagnostics = Diagnostics()
        """Guards of everything here but the record; the loop's other diagnostics share them."""
        self._smoothed = {name: Ema(options.smoothing_alpha) for name in _SMOOTHED}
        # What all ranks have is said once.
        self._leave_out: LeaveOut = BestEffort("tracker").leave_out if rank == 0 else lambda *_: None
        self._extra = Recorder(leave_out=self._leave_out)
        self._tokens_seen: Scalar = 0
        self._epochs: dict[str, float | None] = {}  # by key, since the start; None: a part of it is not known
        self._outside_sec = 0.0
        self._open: deque[_OpenStep] = deque()
        self._since = _Since()
        self._checked_keys: set[str] = set()
        self._sinks: list[tuple[Sink, BestEffort | None]] = []
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
            name = getattr(sink, "name", type(sink).__name__)
            is_essential = getattr(sink, "is_essential", False)
            self._sinks.append((sink, None if is_essential else self.diagnostics.best_effort(f"sink {name}")))

    def will_log(self, step: int) -> bool:
        """Whether `end_step` of this step logs by itself."""
        return step % self._log_interval == 0 or step == 1

    def start_step(self) -> None:
        """Start the step's clock, and stop that of the step before it, whose numbers may come later: no time counts twice."""
        now = self._clock()
        if self._open:
            self._open[-1].stop = now
        self._open.append(_OpenStep(now))

    @property
    def step_start(self) -> float:
        """When the step that ends next started, by the tracker's clock."""
        return self._open[0].start

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Times a part of the step started last (`data`, `forward_backward`, `optimizer`); entered twice, it adds up."""
        parts, began, outside = self._open[-1].parts if self._open else {}, self._clock(), self._outside_sec
        yield
        parts[name] = parts.get(name, 0.0) + self._clock() - began - (self._outside_sec - outside)

    def times(self) -> dict[str, float]:
        """Seconds of each section, a step, since the last payload and with the step that ends next; for `extra`, where ranks
        combine them."""
        found = {}
        for part, seconds in (self._since.parts + Counter(self._open[0].parts)).items():
            found[f"time/{part}_sec"] = seconds / (self._since.steps + 1)
        return found

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Takes a part out of the times of the step and of its sections: what measures a step is not work of that step."""
        began = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - began
            if self._open:
                self._open[-1].start += seconds
            self._outside_sec += seconds

    def end_step(
        self,
        step: int,
        *,
        loss: Scalar | None,
        grad_norm: Scalar | None,
        lr: float,
        tokens_in_step: Scalar,
        tokens_trained: Scalar | None = None,
        extra: Mapping[str, Value] | None = None,
        force_log: bool = False,
    ) -> StepMetrics | None:
        """Close the step: timing, MFU, memory, smoothing, and on logging steps logging.

        Times and speeds of a payload are those of all steps since the last one.

        Args:
            loss: the step's loss over all ranks, per token; None for a step without a target.
            grad_norm: before clipping; None if it is not computed.
            tokens_in_step: target tokens over all ranks; speeds follow from them.
            tokens_trained: those that count in `tokens_seen`: 0 for a step whose update was skipped. None: all of them.
            extra: other values over all ranks, by catalog key. The catalog says how those since the last logged step combine:
                counters add up, means are taken. None is left out. What is no number, or has the name of something that the
                tracker reports itself (`loss`, `mfu`), is left out with one warning. Times of sections are those of all ranks.
            force_log: log this step whatever the interval says (the last step, an evaluation step).

        Returns:
            The raw values on logging steps, None otherwise.

        Raises:
            RuntimeError: `start_step` was not called.
            UnknownMetric: `strict_keys` is set and a key is not in the catalog.
            OSError: an essential sink could not write.
        """
        if not self._open:
            raise RuntimeError("end_step without start_step")
        ended = self._open.popleft()
        step_time = (self._clock() if ended.stop is None else ended.stop) - ended.start
        since = self._since
        since.steps, since.seconds, since.tokens = (
            since.steps + 1,
            since.seconds + step_time,
            since.tokens + tokens_in_step,
        )
        since.parts.update(ended.parts)
        self._tokens_seen = self._tokens_seen + (tokens_in_step if tokens_trained is None else tokens_trained)
        guard = self.diagnostics.best_effort
        for average, sample in zip(self._smoothed.values(), (loss, tokens_in_step, step_time), strict=True):
            if sample is not None:
                average.update(sample)
        if extra:
            guard("extra").run(self._extra.add, extra)
        if not (force_log or self.will_log(step)):
            return None
        # The allocator keeps the peak itself, so that reading it on logging steps loses nothing.
        memory = guard("memory").run(get_memory_stats, self._device) if self._device.type == "cuda" else None
        self._since, step_time = _Since(), since.seconds / since.steps
        speed = float(since.tokens / since.seconds) if since.seconds > 0.0 else None
        metrics = StepMetrics(
            loss=None if loss is None else float(loss),
            grad_norm=None if grad_norm is None else float(grad_norm),
            lr=float(lr),
            tokens_per_sec=speed,
            mfu=None if speed is None or self._mfu_per_speed is None else speed * self._mfu_per_speed,
            step_time_sec=step_time,
            **{name: getattr(memory, name, None) for name in _OF_MEMORY},
        )
        values: dict[str, float | None] = {}
        for name, value in vars(metrics).items():
            values[f"gpu/{name}" if name in _OF_MEMORY else name] = value
        values |= {"tokens_in_step": float(tokens_in_step), "tokens_seen": float(self._tokens_seen)}
        values["tokens_per_sec_per_device"] = None if speed is None else speed / self._num_devices
        self._add_averages(values)
        shares = set(map("time/{}_share".format, since.parts))
        self._add_extras(values, reserved={*values, *shares})
        for key in {*self._epochs, *[key for key in values if key.startswith(EPOCHS)]}:
            before, more = self._epochs.get(key, 0.0), values.get(key)
            total = None if before is None or more is None else before + more
            self._epochs[key] = total
            values[key] = total and round(total, 9)  # whole epochs are whole numbers
        for part, seconds in since.parts.items():
            own = values.setdefault(f"time/{part}_sec", seconds / since.steps)
            values[f"time/{part}_share"] = own / step_time if own is not None and step_time > 0.0 else None
        self._emit("train", step, values)
        return metrics

    def _add_averages(self, values: dict[str, float | None]) -> None:
        loss, tokens, seconds = map(Ema.read, self._smoothed.values())
        # The averaged tokens over the averaged time.
        speed = tokens / seconds if tokens is not None and seconds else None
        mfu = None if speed is None or self._mfu_per_speed is None else speed * self._mfu_per_speed
        values |= {"smoothed/loss": loss, "smoothed/tokens_per_sec": speed, "smoothed/step_time": seconds}
        values["smoothed/mfu"] = mfu

    def _add_extras(self, values: dict[str, float | None], *, reserved: Collection[str]) -> None:
        """Add what was reported since the last logged step; waits for its devices."""
        for key, value in (self.diagnostics.best_effort("extra").run(self._extra.drain_metrics) or {}).items():
            if key in reserved:
                self._leave_out(key, "the name is one of the tracker's own")
            elif value is not None:
                try:
                    total, weight = map(float, value) if isinstance(value, tuple) else (float(value), 1.0)
                except Exception as error:  # noqa: BLE001 - one value must not cost the others
                    self._leave_out(key, message_of(error))
                else:
                    values[key] = total / weight if weight else None

    def log_eval(self, metrics: Mapping[str, Value], step: int) -> None:
        """Send evaluation values; the smoothing stays as it is.

        `eval_` is put in front of plain keys without it (`loss`). A key with a namespace (`moe/aux_loss`) is the caller's.
        What is no number is left out with one warning.
        """
        found = self.diagnostics.best_effort("log_eval").run(checked, metrics, self._leave_out, _read) or {}
        prefixes = {key: "" if "/" in key or key.startswith(EVAL_PREFIX) else EVAL_PREFIX for key in found}
        self._emit("eval", step, {prefixes[key] + key: value for key, value in found.items()})

    def log_restart(self, step: int) -> None:
        """The run continues after this checkpointed step, so that steps may repeat: tell the sinks, and say so in the next
        payload."""
        self._restart = {"from_step": step}
        self.log_event(build_restart(step))

    def log_event(self, event: Mapping[str, Any]) -> None:
        """Send an event to the sinks; each takes those that it has a use for."""
        self._send("event", event)

    def _emit(self, mode: Mode, step: int, values: Mapping[str, float | None]) -> None:
        metrics: dict[str, float] = {}
        for key, value in values.items():
            if value is None:
                continue
            metrics[key] = value
            if key not in self._checked_keys:
                if self._strict_keys and not is_known(key):
                    raise UnknownMetric(key)
                lookup_or_gauge(key)
                self._checked_keys.add(key)
        if self._sinks and metrics:
            restart, self._restart = self._restart, None
            self._send("log", build_payload(mode, step, metrics, restart=restart))

    def _send(self, method: str, *args: Any) -> None:
        """Call the sinks: an essential one as it is, any other one under its guard."""
        for sink, guard in self._sinks:
            call = getattr(sink, method)
            if guard is None:
                call(*args)
            else:
                guard.run(call, *args)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run continues from: tokens seen and the smoothed values."""
        return {
            "tokens_seen": int(self._tokens_seen),
            "epochs": self._epochs.copy(),
            "smoothed": {name: average.read() for name, average in self._smoothed.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._tokens_seen = state["tokens_seen"]
        self._epochs = dict(state["epochs"])
        for name, average in self._smoothed.items():
            average.load(state["smoothed"][name])

    def close(self) -> None:
        """Close all sinks; a failure is raised then."""
        with ExitStack() as stack:
            while self._sinks:
                sink, guard = self._sinks.pop(0)
                stack.callback(sink.close) if guard is None else stack.callback(guard.run, sink.close)


def _read(value: Any) -> float | None:
    """A number, or a pair's total over its weight; waits for its device. A mean over nothing is None."""
    if isinstance(value, tuple) and len(value) == 2:
        weight = as_number(value[1])
        return as_number(value[0]) / weight if weight else None
    return as_number(value)
