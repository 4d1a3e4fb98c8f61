"""`--profile N`: torch's profiler over N steady steps of rank 0, into the run directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from trainer.extensions.profile.record import FOLDER, TRACE, write_summary
from trainer.extensions.profile.trace import read_trace, summarize
from trainer.metrics.best_effort import BestEffort
from trainer.metrics.logger import get_logger
from trainer.metrics.tracker import MetricsTracker
from trainer.wording import counted

logger = get_logger(__name__)
SETTLING = 8  # steps before, in which models are compiled, buckets are built and caches are filled
WARM_UP = 2  # steps with the profiler on that are not recorded
FIRST_PROFILED = SETTLING + WARM_UP + 1  # step of a run
SHOWN = 8


class StepProfile:
    """Records steps, and sums them up when the last one is recorded; then it is off.

    Args:
        run_dir: gets the folder `profile`; an earlier one is replaced.
        num_steps: to record.
        start: steps before the first one of this process.
        guard: a profiler that fails costs one warning.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        num_steps: int,
        start: int,
        device: torch.device,
        tracker: MetricsTracker,
        guard: BestEffort,
    ) -> None:
        self._folder, self._first_step = run_dir / FOLDER, start + FIRST_PROFILED
        self._num_steps, self._tracker, self._guard = num_steps, tracker, guard
        self._is_done = False
        self._profiler: profile | None = guard.run(self._begin, device)

    def step(self) -> None:
        """After each step of the loop."""
        if self._profiler is not None:
            self._guard.run(self._profiler.step)
            if self._is_done:
                self.close()

    def close(self) -> None:
        """Stop recording. Without effect once it has stopped."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._guard.run(profiler.stop)
        if not self._is_done and self._guard.enabled:
            text = "--profile: the run ended before steps %d to %d were recorded: there is no profile"
            logger.warning(text, self._first_step, self._first_step + self._num_steps - 1)

    def _begin(self, device: torch.device) -> profile:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        plan = schedule(wait=SETTLING, warmup=WARM_UP, active=self._num_steps, repeat=1)
        profiler = profile(activities=activities, schedule=plan, on_trace_ready=self._write)
        profiler.start()
        return profiler

    def _write(self, recorded: profile) -> None:
        if self._profiler is None:  # stopped before the last step
            return
        with self._tracker.outside():
            recorded.export_chrome_trace(str(self._folder / TRACE))
            found = summarize(read_trace(self._folder / TRACE))
            write_summary(self._folder, found, first_step=self._first_step)
        self._is_done = True
        what = "kernel" if found.is_of_device else "operator"
        logger.info(
            "profile of %s in %s: %.1f ms a step, no %s runs in %.0f %% of it; by %s:",
            counted(found.num_steps, "step"), self._folder, found.step_ms, what, 100 * found.idle_share, what,
        )  # fmt: skip
        for kernel in found.kernels[:SHOWN]:
            logger.info("  %5.1f %%  %6d calls  %s", 100 * kernel.share, kernel.calls, kernel.name[:90])
