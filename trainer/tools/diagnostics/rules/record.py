"""Rules about the run as a whole: how it ended, and how often it restarted."""

from __future__ import annotations

from array import array

from trainer.tools.diagnostics.outcome import Evidence, Knob, Outcome, finding, healthy, not_measured, not_yet
from trainer.tools.diagnostics.rules.rule import Rule
from trainer.tools.diagnostics.series import Series
from trainer.tools.runs.load import RunRecord
from trainer.wording import counted

LOST_SHARE = 0.05
REPEATED = 2


def check_restarts(run: RunRecord) -> Outcome:
    """Restarts that repeat steps, or that repeat themselves without progress."""
    if not run.restarts:
        return healthy("no restarts")
    lost = sum(run.steps_redone)
    total = run.steps[-1] if run.steps else 0
    starts = [restart.global_step for restart in run.restarts]
    repeated = max(starts.count(step) for step in starts)
    words = f"{counted(len(starts), 'restart')}, {counted(lost, 'step')} repeated"
    if lost <= LOST_SHARE * total and repeated <= REPEATED:
        return healthy(words)
    every = run.setting("checkpoint.every")
    suggested = max(every // 4, 1) if isinstance(every, int) and every else max(total // 50, 1)
    # More checkpoints do not help a run that keeps failing at the same step, or one that saves at every step.
    more_would_help = lost > LOST_SHARE * total and suggested != every
    why = f"; {repeated} restarts from step {max(starts, key=starts.count)}" if repeated > REPEATED else ""
    restarts = Series("restart", array("q", starts), array("d", run.steps_redone))
    return finding(
        f"{words} of {total:,}{why}",
        evidence=[restarts.evidence()],
        knob=Knob("checkpoint.every", every, suggested) if more_would_help else None,
    )


def check_ending(run: RunRecord) -> Outcome:
    """The final state of the run, from status.json and whether its process is there."""
    state = run.status.get("state")
    if state is None:
        hint = "" if run.config else " (trainer.metrics.run_status.run_status writes it)"
        return not_measured(f"needs status.json beside the metrics{hint}")
    if state in ("running", "unknown"):
        return not_yet("status.json says that the run has not ended")
    if state not in ("failed", "died"):
        return healthy(f"the run is {state}")
    step = run.status.get("last_step")
    steps = (step,) if isinstance(step, int) else ()
    return finding(
        f"the run {state}: {run.status.get('reason') or 'unknown reason'}",
        evidence=[Evidence("status.json", steps, tuple(map(float, steps)))],
    )


RULES = (
    Rule(
        name="restarts",
        uses=("the `restart` events of metrics.jsonl",),
        threshold=f"more than {LOST_SHARE:.0%} of the steps were repeated, or the run restarted more than {REPEATED} times "
        "from the same step",
        why="Resuming after a planned stop repeats no step. Repeated steps are wasted compute, and repeated restarts from one "
        "step are a crash loop.",
        knob="`checkpoint.every`: a quarter",
        severity="warning",
        check=check_restarts,
    ),
    Rule(
        name="ending",
        uses=("status.json",),
        threshold="the state is `failed`, or `running` while the process is gone",
        why="status.json has the reason even where torchrun replaced the exit code with 1.",
        knob="depends on the reason",
        severity="error",
        check=check_ending,
    ),
)
