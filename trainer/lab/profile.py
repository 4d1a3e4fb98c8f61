"""`--profile N`: torch's profiler over N steady steps of rank 0, into the run directory."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from torch.profiler import ProfilerActivity, profile, schedule

from trainer.config.schema import FIRST_PROFILED
from trainer.lab.trace import FOLDER, TRACE, read_trace, summarize, write_summary
from trainer.metrics.logger import get_logger
from trainer.training.extension import Extension
from trainer.wording import counted

if TYPE_CHECKING:
    from trainer.training.run import Run

logger = get_logger(__name__)
WARM_UP = 2  # steps with the profiler on that are not recorded
SETTLING = FIRST_PROFILED - 1 - WARM_UP  # steps before: models are compiled, buckets are built, caches are filled
SHOWN = 8


class StepProfile(Extension):
    """Records steps on rank 0 into the folder `profile` of the run's directory, where it replaces an earlier one, and sums them
    up when the last one is recorded; then it is off."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._folder, self._first_step = run.run_dir.path / FOLDER, run.position.step + FIRST_PROFILED
        self._num_steps = run.config.metrics.profile or 0
        self._is_done = False
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (run.device.type == "cuda")
        plan = schedule(wait=SETTLING, warmup=WARM_UP, active=self._num_steps, repeat=1)
        self._profiler: profile | None = profile(activities=activities, schedule=plan, on_trace_ready=self._write)
        self._profiler.start()

    def step_launched(self, step: int) -> None:
        """Tell the profiler that a step has passed."""
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
            write_summary(self._folder, found, first_step=self._first_step)
        self._is_done = True
        what = "kernel" if found.is_of_device else "operator"
        logger.info(
            "profile of %s in %s: %.1f ms a step, no %s runs in %.0f %% of it; by %s:",
            counted(found.num_steps, "step"), self._folder, found.step_ms, what, 100 * found.idle_share, what,
        )  # fmt: skip
        for kernel in found.kernels[:SHOWN]:
            logger.info("  %5.1f %%  %6d calls  %s", 100 * kernel.share, kernel.calls, kernel.name[:90])
