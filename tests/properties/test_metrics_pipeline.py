"""From micro-steps over steps and ranks to payloads: whatever is reported when and where, against sums over raw reports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.metrics.aggregate import Recorder, _combine, _pack, rank_operations
from trainer.metrics.tracker import MetricsTracker

settings.register_profile("pipeline", derandomize=True, max_examples=120, deadline=None)
profile = settings.get_profile("pipeline")

GAUGE, LEAST, SUMMED = "eval/score", "stream_mixing/active/remaining_min", "stream_mixing/active/modalities/python"
COUNTER, POOL_COUNTER, FLAG, WEIGHTED = (
    "ledger/cold_starts",
    "stream_mixing/refill/exhaust_events",
    "loss_spike",
    "accuracy",
)
PLAN = rank_operations([GAUGE, LEAST, SUMMED, COUNTER, POOL_COUNTER, FLAG, WEIGHTED])
numbers = st.floats(-1e3, 1e3)
counts = st.integers(0, 9).map(float)
report = st.fixed_dictionaries(
    {},
    optional={
        GAUGE: numbers,
        LEAST: numbers,
        SUMMED: counts,
        COUNTER: counts,
        POOL_COUNTER: counts,
        FLAG: st.sampled_from([0.0, 1.0]),
        # A micro-batch without a token has a sum of nothing.
        WEIGHTED: st.just((0.0, 0.0)) | st.tuples(numbers, st.integers(1, 9).map(float)),
    },
)
Report = dict[str, Any]
micros = st.lists(report, max_size=4)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[list[list[Report]]], list[bool]]:
    """reports[rank][step] is a list of micro-steps' reports; and which steps are logged."""
    num_ranks, num_steps = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    reports = [[draw(micros) for _ in range(num_steps)] for _ in range(num_ranks)]
    return reports, [draw(st.booleans()) for _ in range(num_steps)]


def brute_force(reports: list[list[list[Report]]], since: int, step: int) -> dict[str, float]:
    """What the payload of `step` must hold when the one before it was that of the step before `since`."""

    def seen(rank: list[list[Report]], key: str) -> list[Any]:
        return [micro[key] for micros in rank[since : step + 1] for micro in micros if key in micro]

    window = {key: [seen(rank, key) for rank in reports] for key in PLAN}
    expected: dict[str, float] = {}
    means = [sum(values) / len(values) for values in window[GAUGE] if values]
    if means:
        expected[GAUGE] = sum(means) / len(means)
    lasts = [values[-1] for values in window[LEAST] if values]
    if lasts:
        expected[LEAST] = min(lasts)
    sizes = [values[-1] for values in window[SUMMED] if values]
    if sizes:
        expected[SUMMED] = sum(sizes)
    if any(window[COUNTER]):
        expected[COUNTER] = sum(sum(values) for values in window[COUNTER])
        expected[f"{COUNTER}_max"] = max(sum(values) for values in window[COUNTER] if values)
    if any(window[POOL_COUNTER]):
        expected[POOL_COUNTER] = sum(sum(values) for values in window[POOL_COUNTER])
    if any(window[FLAG]):
        expected[FLAG] = max(max(values) for values in window[FLAG] if values)
    pairs = [pair for values in window[WEIGHTED] for pair in values]
    if sum(count for _, count in pairs):
        expected[WEIGHTED] = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
    return expected


@profile
@given(runs())
def test_what_is_logged_equals_sums_over_the_raw_reports(run: tuple[list[list[list[Report]]], list[bool]]) -> None:
    reports, logs = run
    recorders = [Recorder() for _ in reports]
    since = 0
    for step, is_logged in enumerate(logs):
        for rank, recorder in zip(reports, recorders, strict=True):
            for micro in rank[step]:
                recorder.add(micro)
        if is_logged:
            packed = [_pack(recorder.drain_metrics(), PLAN, "cpu").numpy() for recorder in recorders]
            logged = _combine(np.stack(packed), PLAN)
            assert logged == pytest.approx(brute_force(reports, since, step), rel=1e-9, abs=1e-9)
            since = step + 1


class KeepingSink:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def log(self, payload: Any) -> None:
        self.rows[payload["global_step"]] = dict(payload["metrics"])

    def event(self, event: Any) -> None:
        """None come here."""

    def close(self) -> None:
        """Nothing is open."""


@profile
@given(
    st.integers(1, 7),
    st.lists(st.tuples(counts, st.sampled_from([0.0, 1.0]), numbers, st.booleans()), min_size=1, max_size=25),
)
def test_each_payload_holds_what_was_counted_since_the_one_before(
    interval: int, steps: list[tuple[float, float, float, bool]]
) -> None:
    sink = KeepingSink()
    tracker = MetricsTracker(log_interval=interval, num_devices=1, device="cpu", sinks=[sink], strict_keys=True)
    counted, raised, gauges, logged = 0.0, 0.0, [], {}
    for step, (count, flag, gauge, force) in enumerate(steps, start=1):
        tracker.start_step()
        # Sparse: a step on which nothing was counted does not say 0.
        extra = {GAUGE: gauge, **({COUNTER: count} if count else {}), **({FLAG: flag} if flag else {})}
        values = {"loss": 1.0, "grad_norm": None, "lr": 0.1, "tokens_in_step": 1}
        tracker.end_step(step, **values, extra=extra, force_log=force)  # type: ignore[arg-type]
        counted, raised = counted + count, max(raised, flag)
        gauges.append(gauge)
        if force or step == 1 or step % interval == 0:
            logged[step] = {COUNTER: counted, FLAG: raised, GAUGE: pytest.approx(sum(gauges) / len(gauges))}
            counted, raised, gauges = 0.0, 0.0, []
    assert sink.rows.keys() == logged.keys()
    for step, expected in logged.items():
        row = sink.rows[step]
        assert {COUNTER: row.get(COUNTER, 0.0), FLAG: row.get(FLAG, 0.0), GAUGE: row[GAUGE]} == expected
