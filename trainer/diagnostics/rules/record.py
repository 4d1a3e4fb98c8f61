"""Rules about the run as a whole: how it ended, and how often it began again."""

from __future__ import annotations

from trainer.diagnostics.outcome import Evidence, Knob, Outcome, finding, healthy, not_applicable
from trainer.diagnostics.rules.rule import Rule
from trainer.diagnostics.series import count_of, thin
from trainer.runs.load import Run

LOST_SHARE = 0.05
REPEATED = 2


def check_restarts(run: Run) -> Outcome:
    """Restarts that cost steps, or that follow each other without progress."""
    if not run.restarts:
        return healthy("no restarts")
    lost = run.steps_redone
    total = run.steps[-1] if run.steps else 0
    starts = [restart.global_step for restart in run.restarts]
    repeated = max(starts.count(step) for step in starts)
    words = f"{count_of(len(starts), 'restart')}, {count_of(sum(lost), 'step')} done twice"
    if sum(lost) <= LOST_SHARE * total and repeated <= REPEATED:
        return healthy(words)
    shown = thin(range(len(starts)))
    every = run.setting("checkpoint.every")
    suggested = max(every // 4, 1) if isinstance(every, int) and every else max(total // 50, 1)
    why = f"; {repeated} times from step {max(starts, key=starts.count)}" if repeated > REPEATED else ""
    return finding(
        f"{words} of {total:,}{why}",
        evidence=[Evidence("restart", tuple(starts[i] for i in shown), tuple(float(lost[i]) for i in shown))],
        knob=Knob("checkpoint.every", every, suggested),
    )


def check_ending(run: Run) -> Outcome:
    """What status.json says of the run's end."""
    state = run.status.get("state")
    if state is None:
        return not_applicable("there is no status.json beside the metrics")
    if state != "failed":
        return healthy(f"the run is {state}")
    reason = str(run.status.get("reason") or "no reason was left")
    step = run.status.get("last_step")
    steps = (step,) if isinstance(step, int) else ()
    return finding(
        f"the run failed: {reason}",
        evidence=[Evidence("status.json", steps, tuple(float(s) for s in steps))],
        knob=None,
    )


RULES = (
    Rule(
        name="restarts",
        looks_at=("the `restart` events of metrics.jsonl",),
        threshold=f"more than {LOST_SHARE:.0%} of the steps done twice, or more than {REPEATED} restarts from one step",
        why="A resume after a planned stop repeats nothing. Steps done twice are paid for twice, and starting from one step "
        "again and again is a crash that repeats.",
        knob="`checkpoint.every`: a quarter",
        severity="warning",
        check=check_restarts,
    ),
    Rule(
        name="ending",
        looks_at=("status.json",),
        threshold="the state is `failed`",
        why="It says why, also where torchrun turned the exit code into 1.",
        knob="as the reason says",
        severity="error",
        check=check_ending,
    ),
)
