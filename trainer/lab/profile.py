"""`--profile N`: torch's profiler over N steady steps of rank 0, and what its trace shows.

The run writes both to `RUN_DIR/profile`. The summary needs the exported file alone (Chrome's trace
event format), so it works with traces of every release and of other machines. Steps are the spans
that `torch.profiler.profile.step` leaves. Of a run on the CPU there are no kernels: the trace has
its operators. It could go if traces were read by other tools alone.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch.profiler import ProfilerActivity, profile, schedule

from trainer.config.schema import FIRST_PROFILED
from trainer.files import write_json
from trainer.metrics.logger import get_logger
from trainer.training.extension import Extension
from trainer.wording import counted

if TYPE_CHECKING:
    from trainer.training.run import Run

logger = get_logger(__name__)

FOLDER: Final = "profile"  # of the run directory, with the trace and its summary
TRACE: Final = "trace.json.gz"
SUMMARY: Final = "summary.json"
MOST_KERNELS: Final = 25
WARM_UP = 2  # steps with the profiler on that are not recorded
SETTLING = FIRST_PROFILED - 1 - WARM_UP  # steps before: models are compiled, caches are filled
SHOWN = 8

STEP_PREFIX = "ProfilerStep#"
ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})
_CALLS = ("DeviceSynchronize", "StreamSynchronize", "Memcpy", "Memcpy2D", "MemcpyToSymbol", "MemcpyFromSymbol")
SYNCHRONIZING = {f"{prefix}{name}" for prefix in ("cuda", "hip") for name in _CALLS}
SYNCHRONIZING |= {"cuCtxSynchronize", "cuStreamSynchronize"}
EVENT_WAITS = frozenset({"cudaEventSynchronize", "hipEventSynchronize", "cuEventSynchronize"})


@dataclass(frozen=True)
class Span:
    """Something that ran from `start` to `end`, in microseconds."""

    name: str
    start: float
    end: float

    @property
    def length(self) -> float:
        """In microseconds."""
        return self.end - self.start


@dataclass(frozen=True)
class KernelTime:
    """A kernel's time over all profiled steps."""

    name: str
    calls: int
    total_ms: float
    share: float  # of the sum of all kernels' times


@dataclass(frozen=True)
class TraceSummary:
    """Sums over the profiled steps, from the first start to the last end on the host."""

    num_steps: int
    step_ms: float  # mean length of a step
    idle_ms: float  # mean time of a step in which no kernel runs; on the CPU all of it
    longest_gap_ms: float
    kernels: tuple[KernelTime, ...]  # those that take most of the time first
    # Step as the profiler counts them -> call that waits for the device -> how often, on any
    # thread.
    synchronizations: Mapping[int, Mapping[str, int]]
    event_waits: int  # over all steps; a step's numbers are read so, once the next one is launched

    @property
    def idle_share(self) -> float:
        return self.idle_ms / self.step_ms

    @property
    def num_synchronizations(self) -> int:
        """Calls that wait for the device, over all steps."""
        return sum(sum(calls.values()) for calls in self.synchronizations.values())


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of an exported trace, compressed (.gz) or not."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(data)["traceEvents"]
    return events


def summarize(events: Iterable[Mapping[str, Any]]) -> TraceSummary:
    """Sum up the events of a trace, in microseconds. Raises ValueError: no step was profiled."""
    whole = [event for event in events if event.get("ph") == "X"]
    steps = {
        int(event["name"].removeprefix(STEP_PREFIX)): _span(event)
        for event in whole
        if event.get("cat") == "user_annotation" and str(event["name"]).startswith(STEP_PREFIX)
    }
    if not steps:
        raise ValueError("the trace has no profiled step")
    start = min(step.start for step in steps.values())
    end = max(step.end for step in steps.values())
    on_device = [_span(event) for event in whole if event.get("cat") in ON_DEVICE]
    idle = gaps(on_device, start, end)
    calls = [_span(event) for event in whole if event.get("cat") in RUNTIME]
    return TraceSummary(
        num_steps=len(steps),
        step_ms=(end - start) / len(steps) / 1e3,
        idle_ms=sum(idle) / len(steps) / 1e3,
        longest_gap_ms=max(idle, default=0.0) / 1e3,
        kernels=_table(list(clipped(on_device, start, end))),
        synchronizations=_per_step(calls, steps),
        event_waits=sum(call.name in EVENT_WAITS and start <= call.start < end for call in calls),
    )


def _span(event: Mapping[str, Any]) -> Span:
    start = float(event["ts"])
    return Span(str(event["name"]), start, start + float(event.get("dur", 0.0)))


def _table(spans: Sequence[Span]) -> tuple[KernelTime, ...]:
    lengths: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        lengths[span.name].append(span.length)
    sums = {name: sum(own) for name, own in lengths.items()}
    whole = sum(sums.values())
    found = [KernelTime(name, len(lengths[name]), own / 1e3, own / whole) for name, own in sums.items()]
    return tuple(sorted(found, key=lambda kernel: (-kernel.total_ms, kernel.name)))


def _per_step(calls: Sequence[Span], steps: Mapping[int, Span]) -> dict[int, dict[str, int]]:
    """Synchronizing calls by the step in which they began."""
    found = {}
    for number, step in sorted(steps.items()):
        within = (each.name for each in calls if step.start <= each.start < step.end)
        found[number] = dict(Counter(name for name in within if name in SYNCHRONIZING))
    return found


def clipped(spans: Iterable[Span], start: float, end: float) -> Iterator[Span]:
    """The parts of the spans between `start` and `end`; those outside are left out."""
    for span in spans:
        inside = Span(span.name, max(span.start, start), min(span.end, end))
        if inside.length > 0:
            yield inside


def gaps(spans: Iterable[Span], start: float, end: float) -> list[float]:
    """Lengths of the times between `start` and `end` in which no span runs, in order."""
    found, covered_to = [], start
    for span in sorted(clipped(spans, start, end), key=lambda each: each.start):
        if span.start > covered_to:
            found.append(span.start - covered_to)
        covered_to = max(covered_to, span.end)
    if end > covered_to:
        found.append(end - covered_to)
    return found


class StepProfile(Extension):
    """Records steps on rank 0 into the folder `profile` of the run's directory, where it replaces
    an earlier one, and sums them up when the last one is recorded; then it is off."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._folder, self._first_step = run.run_dir.path / FOLDER, run.position.step + FIRST_PROFILED
        self._num_steps = run.config.metrics.profile or 0
        self._is_done = False
        shutil.rmtree(self._folder, ignore_errors=True)  # of an earlier process of the run
        self._folder.mkdir(parents=True)
        activities = [ProfilerActivity.CPU]
        if run.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        plan = schedule(wait=SETTLING, warmup=WARM_UP, active=self._num_steps, repeat=1)
        self._profiler: profile | None = profile(activities=activities, schedule=plan, on_trace_ready=self._write)
        self._profiler.start()

    def step_launched(self, step: int) -> None:
        if self._profiler is not None:
            self._profiler.step()
            if self._is_done:
                self.closed()

    def closed(self) -> None:
        """Stop recording. Without effect once it has stopped."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        if not self._is_done:
            text = "--profile: the run ended before steps %d to %d were recorded: there is no profile"
            logger.warning(text, self._first_step, self._first_step + self._num_steps - 1)

    def _write(self, recorded: profile) -> None:
        if self._profiler is None:  # stopped before the last step
            return
        with self.run.tracker.outside():
            recorded.export_chrome_trace(str(self._folder / TRACE))
            found = summarize(read_trace(self._folder / TRACE))  # what any other tool would read
            content = asdict(found)
            content["kernels"] = content["kernels"][:MOST_KERNELS]
            # `asdict` leaves the steps numbers, which JSON has no keys of.
            by_step = found.synchronizations.items()
            content["synchronizations"] = {str(step): dict(calls) for step, calls in by_step}
            content |= {"profile_version": 1, "first_step": self._first_step}
            content["num_kernels"] = len(found.kernels)
            write_json(self._folder / SUMMARY, content)
        self._is_done = True
        steps = counted(found.num_steps, "step")
        if not found.kernels:
            text = "profile of %s in %s: %.1f ms a step; the trace has the operators"
            logger.info(text, steps, self._folder, found.step_ms)
            return
        text = "profile of %s in %s: %.1f ms a step, no kernel runs in %.0f %% of it; by kernel:"
        logger.info(text, steps, self._folder, found.step_ms, 100 * found.idle_share)
        for each in found.kernels[:SHOWN]:
            logger.info("  %5.1f %%  %6d calls  %s", 100 * each.share, each.calls, each.name[:90])
