"""MetricsTracker: the per-step centre of all metrics.

tracker = MetricsTracker(log_interval=10, num_devices=world_size, device=device, rank=rank, flops_per_token=flops)
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

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec

import torch

from trainer.metrics.aggregate import Scalar, UnloggedCounters, Value, as_value
from trainer.metrics.best_effort import BestEffort, Diagnostics
from trainer.metrics.catalog.lookup import EVAL_PREFIX, UnknownMetric, is_known, lookup_or_gauge
from trainer.metrics.logger import get_logger
from trainer.metrics.memory import MemoryStats, get_memory_stats
from trainer.metrics.mfu import compute_mfu, resolve_peak_tflops
from trainer.metrics.payload_contract import Mode, build_payload, build_restart
from trainer.metrics.sinks.base import Sink
from trainer.metrics.smoothing import Ema
from trainer.metrics.values import LeaveOut, checked
from trainer.wording import message_of

logger = get_logger(__name__)
P = ParamSpec("P")
# Speed and MFU follow from tokens and time: an average of rates would be above the tokens over the time.
_SMOOTHED = ("loss", "tokens", "step_time")


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


def _read(value: Value) -> float:
    """A value as a number; waits for its device."""
    return float(value[0]) / float(value[1]) if isinstance(value, tuple) else float(value)


class MetricsTracker:
    """Times steps, smooths, and sends payloads to the sinks on logging steps.

    Nothing waits for the device outside logging steps: `loss`, `grad_norm` and `tokens_in_step` may be 0-dim tensors
    and are read only when a step is logged, while the smoothing sees every step.
    """

    def __init__(
        self,
        *,
        log_interval: int,
        num_devices: int,
        device: torch.device | str,
        flops_per_token: float = 0.0,
        peak_tflops: float = 0.0,
        smoothing_alpha: float = 0.1,
        sinks: Iterable[Sink] = (),
        rank: int = 0,
        counters: tuple[str, ...] = (),
        strict_keys: bool = False,
        diagnostics: Diagnostics | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Build a tracker; `sinks` may also come later through `init_backends`.

        Args:
            log_interval: steps between two logged ones; step 1 is always logged.
            num_devices: devices that share the work (the world size).
            device: this rank's device, for memory and its peak.
            flops_per_token: real FLOPs of forward and backward; 0 if unknown (no MFU).
            peak_tflops: peak of one device; 0 takes it from the device's name, where known.
            smoothing_alpha: weight of the newest step in the smoothed values.
            rank: only rank 0 may have sinks.
            counters: counter keys in `extra` that are reported as 0 until something is counted.
            strict_keys: a key that is not in the catalog raises `UnknownMetric` instead of one warning.
            diagnostics: guards of everything here but the record; shared with the loop's other diagnostics.
            clock: monotonic seconds.
        """
        if log_interval < 1:
            raise ValueError(f"log_interval must be >= 1, got {log_interval}")
        self._log_interval = log_interval
        self._num_devices = num_devices
        self._device = torch.device(device)
        self._flops_per_token = flops_per_token
        self._peak_tflops = resolve_peak_tflops(self._device, peak_tflops)
        self._rank = rank
        self._strict_keys = strict_keys
        self.diagnostics = diagnostics or Diagnostics()
        self._clock = clock
        self._smoothed = {name: Ema(smoothing_alpha) for name in _SMOOTHED}
        self._extra = UnloggedCounters(counters)
        self._tokens_seen: Scalar = 0
        self._outside_sec = 0.0
        self._open: deque[_OpenStep] = deque()
        self._checked_keys: set[str] = set()
        # What all ranks have is said once.
        self._leave_out: LeaveOut = BestEffort("tracker").leave_out if rank == 0 else lambda *_: None
        self._sinks: list[tuple[Sink, BestEffort | None]] = []
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
        """Start the step's clock, and stop that of the step before it.

        A step may start before the one before it has ended, whose numbers come later. Its time does not depend on when they
        come, and no time counts twice.
        """
        now = self._clock()
        if self._open:
            self._open[-1].stop = now
        self._open.append(_OpenStep(now))

    @property
    def step_start(self) -> float:
        """When the step that ends next started, by the tracker's clock.

        Raises:
            IndexError: no step is open.
        """
        return self._open[0].start

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Times a part of the step started last (`data`, `forward_backward`, `optimizer`); entered twice, it adds up."""
        parts, began, outside = self._open[-1].parts if self._open else {}, self._clock(), self._outside_sec
        yield
        parts[name] = parts.get(name, 0.0) + self._clock() - began - (self._outside_sec - outside)

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

        Args:
            loss: the step's loss over all ranks, per token; None for a step without a target.
            grad_norm: before clipping; None if it is not computed.
            tokens_in_step: target tokens over all ranks; speeds follow from them.
            tokens_trained: those that count in `tokens_seen`: 0 for a step whose update was skipped. None: all of them.
            extra: other values over all ranks, by catalog key. What counters count on a step that is not logged is in the next
                one that is; of other keys the logged step's own values are reported. What is no number, or has the name of
                something that the tracker reports itself (`loss`, `mfu`, times of sections), is left out with one warning.
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
        tokens_per_sec = tokens_in_step / step_time if step_time > 0.0 else None
        self._tokens_seen = self._tokens_seen + (tokens_in_step if tokens_trained is None else tokens_trained)
        is_logged = force_log or self.will_log(step)
        guard = self.diagnostics.best_effort
        guard("smoothing").run(self._smooth, (loss, tokens_in_step, step_time))
        if extra:
            guard("extra").run(self._add_extra, extra)
        if not is_logged:
            return None
        # The allocator keeps the peak itself, so that reading it on logging steps loses nothing.
        memory = guard("memory").run(get_memory_stats, self._device)
        mfu = None if tokens_per_sec is None else self._mfu(tokens_per_sec)
        metrics = _step_metrics(loss, grad_norm, lr, tokens_per_sec, mfu, step_time, memory)
        self._emit("train", step, self._collect(metrics, tokens_in_step, ended.parts))
        return metrics

    def _add_extra(self, extra: Mapping[str, Value]) -> None:
        self._extra.add(checked(extra, self._leave_out, as_value))

    def _smooth(self, samples: tuple[Scalar | None, ...]) -> None:
        for name, sample in zip(_SMOOTHED, samples, strict=True):
            if sample is not None:
                self._smoothed[name].update(sample)

    def _read_smoothed(self) -> dict[str, float | None]:
        return {name: average.read() for name, average in self._smoothed.items()}

    def _smoothed_values(self) -> dict[str, float | None]:
        """The averages that are reported; the speed is the averaged tokens over the averaged time."""
        loss, tokens, seconds = self._read_smoothed().values()
        speed = tokens / seconds if tokens is not None and seconds else None
        return {"loss": loss, "tokens_per_sec": speed, "step_time": seconds}

    def _mfu(self, tokens_per_sec: Scalar) -> Scalar | None:
        return self.diagnostics.best_effort("mfu").run(
            compute_mfu,
            tokens_per_sec=tokens_per_sec,
            flops_per_token=self._flops_per_token,
            num_devices=self._num_devices,
            peak_tflops=self._peak_tflops,
        )

    def _collect(self, metrics: StepMetrics, tokens_in_step: Scalar, parts: Mapping[str, float]) -> dict[str, float]:
        """All values of a logged step by catalog key; what is unknown is left out."""
        memory = ("allocated_gb", "peak_gb", "reserved_gb", "total_gb", "mem_utilization")
        found: dict[str, float | None] = {
            (f"gpu/{name}" if name in memory else name): value for name, value in vars(metrics).items()
        }
        found["tokens_in_step"] = _read(tokens_in_step)
        found["tokens_seen"] = _read(self._tokens_seen)
        guard = self.diagnostics.best_effort
        smoothed = guard("smoothing").run(self._smoothed_values) or {}
        found |= {f"smoothed/{name}": smoothed.get(name) for name in ("loss", "tokens_per_sec", "step_time")}
        speed = smoothed.get("tokens_per_sec")
        mfu = None if speed is None else self._mfu(speed)
        found["smoothed/mfu"] = None if mfu is None else _read(mfu)
        for part, seconds in parts.items():
            found[f"time/{part}_sec"] = seconds
            found[f"time/{part}_share"] = seconds / metrics.step_time_sec if metrics.step_time_sec > 0.0 else None
        extra = guard("extra").run(self._extra.drain) or {}
        for key in sorted(extra.keys() & found.keys()):
            self._leave_out(key, "the name is one of the tracker's own")
        found |= self._read_all({key: value for key, value in extra.items() if key not in found})
        return {key: value for key, value in found.items() if value is not None}

    def _read_all(self, values: Mapping[str, Value | None]) -> dict[str, float | None]:
        """The values as numbers; waits for their devices. A mean over nothing is None."""
        found: dict[str, float | None] = {}
        for key, value in values.items():
            try:
                found[key] = None if value is None else _read(value)
            except ZeroDivisionError:
                found[key] = None
            except Exception as error:  # noqa: BLE001 - one value must not cost the others
                self._leave_out(key, message_of(error))
        return found

    def log_eval(self, metrics: Mapping[str, Value], step: int) -> None:
        """Send evaluation values; the smoothing stays as it is.

        `eval_` is put in front of plain keys without it (`loss`). A key with a namespace (`moe/aux_loss`) is the caller's.
        What is no number is left out with one warning.
        """
        values = self.diagnostics.best_effort("log_eval").run(checked, metrics, self._leave_out, as_value) or {}
        found = self._read_all(values)
        self._emit("eval", step, {_eval_key(key): value for key, value in found.items() if value is not None})

    def log_restart(self, step: int, **details: Any) -> None:
        """Say in every stream that the run continues after this checkpointed step, so that steps may repeat."""
        self.log_event(build_restart(step, **details))

    def log_event(self, event: Mapping[str, Any]) -> None:
        """Send an event to the sinks; each takes those that it has a use for."""
        for sink, guard in self._sinks:
            _call(guard, sink.event, event)

    def _emit(self, mode: Mode, step: int, metrics: dict[str, float]) -> None:
        for key in metrics.keys() - self._checked_keys:
            self._check_key(key)
        if not self._sinks or not metrics:
            return
        payload = build_payload(mode, step, metrics)
        for sink, guard in self._sinks:
            _call(guard, sink.log, payload)

    def _check_key(self, key: str) -> None:
        if self._strict_keys and not is_known(key):
            raise UnknownMetric(key)
        lookup_or_gauge(key)
        self._checked_keys.add(key)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run continues from: tokens seen and the smoothed values."""
        return {
            "tokens_seen": int(self._tokens_seen),
            "smoothed": self.diagnostics.best_effort("smoothing").run(self._read_smoothed) or dict.fromkeys(_SMOOTHED),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._tokens_seen = state["tokens_seen"]
        for name, average in self._smoothed.items():
            average.load(state["smoothed"][name])

    def close(self) -> None:
        """Close the sinks, each of them even if one fails; the failure is raised then."""
        with ExitStack() as stack:
            while self._sinks:
                sink, guard = self._sinks.pop(0)
                stack.callback(_call, guard, sink.close)


def _call(guard: BestEffort | None, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call a sink: an essential one as it is, any other one under its guard."""
    if guard is None:
        function(*args, **kwargs)
    else:
        guard.run(function, *args, **kwargs)


def _eval_key(key: str) -> str:
    return key if "/" in key or key.startswith(EVAL_PREFIX) else EVAL_PREFIX + key


def _step_metrics(
    loss: Scalar | None,
    grad_norm: Scalar | None,
    lr: float,
    tokens_per_sec: Scalar | None,
    mfu: Scalar | None,
    step_time: float,
    memory: MemoryStats | None,
) -> StepMetrics:
    return StepMetrics(
        loss=None if loss is None else _read(loss),
        grad_norm=None if grad_norm is None else _read(grad_norm),
        lr=float(lr),
        tokens_per_sec=None if tokens_per_sec is None else _read(tokens_per_sec),
        mfu=None if mfu is None else _read(mfu),
        step_time_sec=step_time,
        allocated_gb=memory.allocated_gb if memory else None,
        peak_gb=memory.peak_gb if memory else None,
        reserved_gb=memory.reserved_gb if memory else None,
        total_gb=memory.total_gb if memory else None,
        mem_utilization=memory.mem_utilization if memory else None,
    )
