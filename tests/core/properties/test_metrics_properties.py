"""Properties of the metrics: payloads survive the trip, and reductions over steps and ranks are what they are defined as."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.runs import ROOT
from trainer.files import read_json
from trainer.metrics.aggregate import Recorder, _combine, _pack, rank_operations
from trainer.metrics.best_effort import BestEffort
from trainer.metrics.payload_contract import (
    PayloadError,
    build_payload,
    encode_payload,
    parse_payload,
    validate_payload,
    validate_stream,
)

settings.register_profile("metrics", derandomize=True, max_examples=150, deadline=None)
profile = settings.get_profile("metrics")

numbers = st.one_of(st.floats(), st.integers(-(2**70), 2**70))
keys = st.text(min_size=1, max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


@profile
@given(
    st.sampled_from(["train", "eval"]),
    st.integers(0, 2**60),
    st.dictionaries(keys, numbers, min_size=1, max_size=8),
    st.dictionaries(keys, json_values, max_size=3),
)
def test_any_metrics_survive_the_trip_as_one_strict_line(
    mode: Any, step: int, metrics: dict[str, float], context: dict[str, Any]
) -> None:
    line = encode_payload({**build_payload(mode, step, metrics), "context": context})
    assert "\n" not in line
    assert line.isascii()
    json.loads(line, parse_constant=lambda token: pytest.fail(token))
    parsed = parse_payload(line.encode())
    assert (parsed.mode, parsed.global_step) == (mode, step)
    assert parsed.values().keys() == metrics.keys()
    assert all(same(parsed.values()[key], metrics[key]) for key in metrics)
    assert parsed.sections["context"] == context


@profile
@given(st.binary(max_size=60) | st.text(max_size=60) | json_values.map(json.dumps))
def test_no_line_breaks_the_parser(line: str | bytes) -> None:
    with contextlib.suppress(PayloadError):
        parse_payload(line)


SCHEMA = jsonschema.Draft202012Validator(read_json(ROOT / "docs" / "payload.v1.schema.json"))
mostly_good = st.fixed_dictionaries(
    {},
    optional={
        "schema_version": st.sampled_from([1, 1, 1, 1, 2, 0, True, "1", None, 1.5]),
        "mode": st.sampled_from(["train", "eval", "test", 3, None]),
        "global_step": st.sampled_from([0, 1, 7, -1, True, "1", 2.5, None]),
        "metrics": st.dictionaries(st.sampled_from(["a", "b", ""]), st.sampled_from([1, 0.5, True, None, "x"]))
        | st.sampled_from([[], None]),
        "non_finite": st.dictionaries(st.sampled_from(["c", ""]), st.sampled_from(["nan", "inf", "NaN", 1])),
        "other": json_values,
    },
)  # fmt: skip


@settings(profile, max_examples=400)
@given(mostly_good)
def test_the_json_schema_and_the_validator_agree(obj: dict[str, Any]) -> None:
    try:
        validate_payload(obj)
        is_valid = True
    except PayloadError:
        is_valid = False
    assert SCHEMA.is_valid(obj) == is_valid


@profile
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=25), st.integers(0, 30))
def test_a_stream_is_refused_exactly_where_a_step_falls(rows: list[tuple[bool, int]], start: int) -> None:
    lines, expected, last = [], [], 0
    for number, (is_restart, step) in enumerate(rows, start=1):
        section = {"from_step": start} if is_restart else None
        lines.append(encode_payload(build_payload("train", step, {"a": 1}, restart=section)))
        if step < (start if is_restart else last):
            expected.append(number)
        last = step
    assert [violation.line for violation in validate_stream(lines)] == expected


GUARD = BestEffort("reduction")
GAUGE, LEAST, SUMMED = "eval/score", "stream_mixing/active/remaining_min", "stream_mixing/active/modalities/python"
COUNTER, POOL_COUNTER = "ledger/cold_starts", "stream_mixing/refill/exhaust_events"
FLAG, WEIGHTED = "loss_spike", "accuracy"
KEYS = rank_operations([GAUGE, LEAST, SUMMED, COUNTER, POOL_COUNTER, FLAG, WEIGHTED])
# What is logged: of which key, how the values of a rank become one, and those of the ranks.
REDUCTIONS: dict[str, tuple[str, Callable[[list[Any]], float], Callable[[list[Any]], float]]] = {
    GAUGE: (GAUGE, statistics.fmean, statistics.fmean),
    LEAST: (LEAST, itemgetter(-1), min),
    SUMMED: (SUMMED, itemgetter(-1), sum),
    COUNTER: (COUNTER, sum, sum),
    f"{COUNTER}_max": (COUNTER, sum, max),
    POOL_COUNTER: (POOL_COUNTER, sum, sum),
    FLAG: (FLAG, max, max),
}
small, counts = st.floats(-1e3, 1e3), st.integers(0, 9).map(float)
report = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys((GAUGE, LEAST), small),
        **dict.fromkeys((SUMMED, COUNTER, POOL_COUNTER), counts),
        FLAG: st.sampled_from([0.0, 1.0]),
        # A micro-batch without a token has a sum of nothing.
        WEIGHTED: st.just((0.0, 0.0)) | st.tuples(small, st.integers(1, 9).map(float)),
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

    window = {key: [values for rank in reports if (values := seen(rank, key))] for key in KEYS}
    expected = {
        name: over([within(values) for values in window[key]])
        for name, (key, within, over) in REDUCTIONS.items()
        if window[key]
    }
    pairs = [pair for values in window[WEIGHTED] for pair in values]
    if sum(count for _, count in pairs):
        expected[WEIGHTED] = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
    return expected


@settings(profile, max_examples=120)
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
            packed = [_pack(recorder.drain_metrics(), KEYS, "cpu", GUARD).numpy() for recorder in recorders]
            logged = _combine(np.stack(packed), KEYS)
            assert logged == pytest.approx(brute_force(reports, since, step), rel=1e-9, abs=1e-9)
            since = step + 1
