"""`--profile N`: torch's profiler over N steady steps of rank 0, and where their time goes by its trace.

The trace is in `RUN_DIR/profile`. Steps are the spans that `torch.profiler.profile.step` leaves.
Of a run on the CPU there are no kernels: the trace has its operators. It could go if traces were
read by other tools alone.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch.profiler import ProfilerActivity, profile, schedule

from trainer.config.schema import FIRST_PROFILED
from trainer.metrics.logger import get_logger
from trainer.training.extension import Extension
from trainer.wording import counted

if TYPE_CHECKING:
    from trainer.training.run import Run

logger = get_logger(__name__)

FOLDER: Final = "profile"  # of the run directory, with the trace
TRACE: Final = "trace.json.gz"
WARM_UP = 2  # steps with the profiler on that are not recorded
SETTLING = FIRST_PROFILED - 1 - WARM_UP  # steps before: models are compiled, caches are filled
SHOWN = 8

STEP_PREFIX = "ProfilerStep#"
ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})
# An event is waited for on purpose: a step's numbers are read so, once the next one is launched.
SYNCHRONIZING = frozenset({
    "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaMemcpy", "cudaMemcpy2D", "cudaMemcpyToSymbol",
    "cudaMemcpyFromSymbol", "cuCtxSynchronize", "cuStreamSynchronize",
})  # fmt: skip

Span = tuple[float, float]  # from, to, in microseconds


@dataclass(frozen=True)
class TraceSummary:
    """Sums over the profiled steps, from the first start to the last end on the host."""

    num_steps: int
    step_ms: float  # mean length of a step
    idle_share: float  # of that time, in which no kernel runs, on any stream; on the CPU all of it
    kernels: tuple[tuple[str, int, float], ...]  # (name, calls, share of all), the longest first
    synchronizations: Counter[str]  # calls that wait for the device, on any thread


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace that was exported compressed."""
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


def summarize(events: Iterable[Mapping[str, Any]]) -> TraceSummary:
    """Sum up the events of a trace. Raises ValueError: no step was profiled."""
    whole = [event for event in events if event.get("ph") == "X"]
    marks = [event for event in whole if event.get("cat") == "user_annotation"]
    steps = [_span(event) for event in marks if str(event["name"]).startswith(STEP_PREFIX)]
    if not steps:
        raise ValueError("the trace has no profiled step")
    start, end = min(step[0] for step in steps), max(step[1] for step in steps)
    calls, lengths, spans = Counter[str](), Counter[str](), []
    synchronizations = Counter[str]()
    for event in whole:
        name, (begun, done) = str(event["name"]), _span(event)
        if event.get("cat") in RUNTIME and name in SYNCHRONIZING and start <= begun < end:
            synchronizations[name] += 1
        begun, done = max(begun, start), min(done, end)
        if event.get("cat") in ON_DEVICE and begun < done:
            calls[name] += 1
            lengths[name] += done - begun  # type: ignore[assignment]
            spans.append((begun, done))
    total = sum(lengths.values())
    return TraceSummary(
        num_steps=len(steps),
        step_ms=(end - start) / len(steps) / 1e3,
        idle_share=sum(gaps(spans, start, end)) / (end - start),
        kernels=tuple((name, calls[name], length / total) for name, length in lengths.most_common()),
        synchronizations=synchronizations,
    )


def _span(event: Mapping[str, Any]) -> Span:
    start = float(event["ts"])
    return start, start + float(event.get("dur", 0.0))


def gaps(spans: Iterable[Span], start: float, end: float) -> Iterator[float]:
    """Lengths of the times between `start` and `end` in which no span runs, in order."""
    covered_to = start
    for begun, done in sorted([*spans, (end, end)]):
        if begun > covered_to:
            yield begun - covered_to
        covered_to = max(covered_to, done)


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
            found = summarize(read_trace(self._folder / TRACE))
        self._is_done = True
        text = "profile of %s in %s: %.1f ms a step, no kernel runs in %.0f %% of it"
        logger.info(text, counted(found.num_steps, "step"), self._folder, found.step_ms, 100 * found.idle_share)
        for name, calls, share in found.kernels[:SHOWN]:
            logger.info("  %5.1f %%  %6d calls  %s", 100 * share, calls, name[:90])
