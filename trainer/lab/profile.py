"""`--profile N`: torch's profiler over N steady steps of rank 0, as a trace in `RUN_DIR/profile`.

It could go if a run were profiled by a program around it.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Final

from torch.profiler import ProfilerActivity, profile, schedule

from trainer.config.schema import FIRST_PROFILED
from trainer.metrics.logger import get_logger
from trainer.training.extension import Extension
from trainer.wording import counted

if TYPE_CHECKING:
    from trainer.training.run import Run

logger = get_logger(__name__)

FOLDER: Final = "profile"  # of the run directory
TRACE: Final = "trace.json.gz"
WARM_UP = 2  # steps with the profiler on that are not recorded
SETTLING = FIRST_PROFILED - 1 - WARM_UP  # steps before: models are compiled, caches are filled


class StepProfile(Extension):
    """Records steps on rank 0, in the place of an earlier profile of the run; then it is off."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._folder, self._first_step = run.run_dir.path / FOLDER, run.position.step + FIRST_PROFILED
        self._num_steps = run.config.metrics.profile
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
        path = self._folder / TRACE
        with self.run.tracker.outside():
            recorded.export_chrome_trace(str(path))
        self._is_done = True
        steps = counted(self._num_steps, "step")
        logger.info("profile of %s from step %d on: %s, for https://ui.perfetto.dev", steps, self._first_step, path)
