"""Properties of the metrics: payloads survive the trip, reductions do not depend on how values are dealt out."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.metrics.aggregate import Recorder, SumCount, Value, _combine, _pack, rank_operations
from trainer.metrics.catalog.lookup import CATALOG, lookup
from trainer.metrics.payload_contract import (
    PayloadError,
    build_payload,
    build_restart,
    encode_payload,
    json_schema,
    parse_line,
    parse_payload,
    validate_payload,
    validate_stream,
)
from trainer.metrics.tracker import Ema

settings.register_profile("metrics", derandomize=True, max_examples=150, deadline=None)
profile = settings.get_profile("metrics")

numbers = st.one_of(st.floats(), st.integers(-(2**70), 2**70))
finite = st.floats(-1e6, 1e6)
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
    st.none() | st.dictionaries(keys, json_values, max_size=3),
)
def test_any_metrics_survive_the_trip_as_one_strict_line(
    mode: Any, step: int, metrics: dict[str, float], context: dict[str, Any] | None
) -> None:
    line = encode_payload(build_payload(mode, step, metrics, context=context))
    assert "\n" not in line
    assert line.isascii()
    json.loads(line, parse_constant=lambda token: pytest.fail(token))
    parsed = parse_payload(line.encode())
    assert (parsed.mode, parsed.global_step) == (mode, step)
    assert parsed.values().keys() == metrics.keys()
    assert all(same(parsed.values()[key], metrics[key]) for key in metrics)
    assert parsed.sections.get("context") == context


@profile
@given(st.binary(max_size=60) | st.text(max_size=60) | json_values.map(json.dumps))
def test_no_line_breaks_the_parser(line: str | bytes) -> None:
    with contextlib.suppress(PayloadError):
        parse_line(line)


def accepts(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    """The part of JSON Schema that the contract uses; numbers are JSON's, so that 1.0 is an integer to it."""
    kinds: dict[str, Any] = {"object": dict, "number": (int, float), "integer": (int, float), "array": list}
    checks = {
        "$ref": lambda ref: accepts(root["$defs"][ref.rsplit("/", 1)[1]], value, root),
        "type": lambda kind: (
            isinstance(value, kinds[kind])
            and not isinstance(value, bool)
            and (kind != "integer" or float(value).is_integer())
        ),
        "required": lambda names: not isinstance(value, dict) or all(name in value for name in names),
        "properties": lambda parts: (
            not isinstance(value, dict)
            or all(accepts(part, value[name], root) for name, part in parts.items() if name in value)
        ),
        "additionalProperties": lambda part: (
            part is True or not isinstance(value, dict) or all(accepts(part, item, root) for item in value.values())
        ),
        "propertyNames": lambda part: not isinstance(value, dict) or all(accepts(part, name, root) for name in value),
        "minLength": lambda least: not isinstance(value, str) or len(value) >= least,
        "minimum": lambda least: not isinstance(value, int | float) or value >= least,
        "minProperties": lambda least: not isinstance(value, dict) or len(value) >= least,
        "const": lambda wanted: not isinstance(value, bool) and value == wanted,
        "enum": lambda words: isinstance(value, str) and value in words,
        "not": lambda part: not accepts(part, value, root),
        "anyOf": lambda parts: any(accepts(part, value, root) for part in parts),
        "oneOf": lambda parts: sum(accepts(part, value, root) for part in parts) == 1,
        "title": lambda _: True,
        "description": lambda _: True,
        "$schema": lambda _: True,
        "$defs": lambda _: True,
    }
    return all(checks[word](argument) for word, argument in schema.items())


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
    schema = json_schema()
    try:
        validate_payload(obj)
        is_valid = True
    except PayloadError:
        is_valid = False
    assert accepts(schema, obj, schema) == is_valid


@profile
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=25))
def test_a_stream_is_refused_exactly_where_a_step_falls(rows: list[tuple[bool, int]]) -> None:
    lines, expected, last = [], [], 0
    for number, (is_restart, step) in enumerate(rows, start=1):
        lines.append(encode_payload(build_restart(step) if is_restart else build_payload("train", step, {"a": 1})))
        if not is_restart and step < last:
            expected.append(number)
        last = step
    assert [violation.line for violation in validate_stream(lines)] == expected


micro_steps = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "grad_norm": finite,
            "ledger/cold_starts": st.integers(0, 100).map(float),
            "loss_spike": st.sampled_from([0.0, 1.0]),
            "loss": st.tuples(finite, st.integers(1, 50).map(float)),
            "ledger/live_groups": finite,
        },
    ),
    max_size=12,
)


@profile
@given(micro_steps)
def test_a_window_equals_its_definition(micros: list[dict[str, Any]]) -> None:
    window = Recorder()
    for values in micros:
        window.add(values)
    result = window.drain_metrics()
    seen = {key: [values[key] for values in micros if key in values] for values in micros for key in values}
    assert result.keys() == seen.keys()
    for key, values in seen.items():
        expected: Any = {
            "grad_norm": lambda v: sum(v) / len(v),
            "ledger/cold_starts": sum,
            "loss_spike": max,
            "ledger/live_groups": lambda v: v[-1],
            "loss": lambda v: (sum(t for t, _ in v), sum(c for _, c in v)),
        }[key](values)
        assert result[key] == pytest.approx(expected, rel=1e-12, abs=1e-9)


@profile
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=30))
def test_counters_are_never_lost_whenever_one_logs(steps: list[tuple[int, bool]]) -> None:
    recorder, reported = Recorder(), 0.0
    for count, logs in [*steps, (0, True)]:
        recorder.add({"ledger/cold_starts": float(count)} if count else {})
        if logs:
            reported += recorder.drain_metrics().get("ledger/cold_starts", 0.0)  # type: ignore[operator]
    assert reported == sum(count for count, _ in steps)


PLAN = rank_operations(spec.name for spec in CATALOG if not spec.is_pattern)
rank_values = st.lists(
    st.dictionaries(st.sampled_from(sorted(PLAN)), finite, max_size=12), min_size=1, max_size=5
)  # fmt: skip


def combine(ranks: list[dict[str, Value]]) -> dict[str, float]:
    return _combine(np.stack([_pack(local, PLAN, "cpu").numpy() for local in ranks]), PLAN)


def near(values: dict[str, float]) -> dict[str, Any]:
    """Up to rounding. A standard error comes from squares of numbers up to 1e6, which cancel."""
    return {
        key: pytest.approx(value, rel=1e-9, abs=0.1 if key.endswith("_se") else 1e-6) for key, value in values.items()
    }


@profile
@given(rank_values, st.randoms(use_true_random=False))
def test_a_reduction_equals_its_definition_in_any_order_of_ranks(ranks: list[dict[str, float]], random: Any) -> None:
    reduced = combine(list(ranks))  # type: ignore[arg-type]
    expected: dict[str, float] = {}
    for key, operation in PLAN.items():
        values = [local[key] for local in ranks if key in local]
        if not values:
            continue
        if operation == "sum_and_worst":
            expected[f"{key}_max"] = max(values)
        expected[key] = {"min": min, "max": max}.get(operation, sum)(values)
        if "mean" in operation:
            expected[key] /= len(values)
        if operation == "mean_and_error" and len(values) > 1:
            expected[f"{key}_se"] = statistics.stdev(values) / math.sqrt(len(values))
    assert reduced == near(expected)
    shuffled = list(ranks)
    random.shuffle(shuffled)
    assert combine(shuffled) == near(reduced)  # type: ignore[arg-type]
    assert combine([*ranks, {}]) == reduced, "a rank with nothing changes nothing"  # type: ignore[list-item]
    assert all(lookup(key) for key in reduced), "whatever comes out is in the catalog"


def test_a_mean_over_nothing_is_left_out_though_it_is_nan() -> None:
    assert combine([{"loss": SumCount(math.nan, 0.0)}, {"loss": SumCount(4.0, 2.0)}]) == {"loss": 2.0}


@profile
@given(st.lists(st.lists(st.tuples(finite, st.integers(1, 1000)), min_size=1, max_size=6), min_size=1, max_size=4))
def test_the_loss_is_that_of_the_same_tokens_in_one_batch(ranks: list[list[tuple[float, int]]]) -> None:
    def windowed(micros: list[tuple[float, int]]) -> dict[str, Value]:
        window = Recorder()
        for mean, count in micros:
            window.add({"loss": SumCount(mean * count, count)})
        return window.drain_metrics()

    everything = [pair for micros in ranks for pair in micros]
    expected = math.fsum(mean * count for mean, count in everything) / sum(count for _, count in everything)
    assert combine([windowed(micros) for micros in ranks])["loss"] == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert combine([windowed(everything)])["loss"] == pytest.approx(expected, rel=1e-9, abs=1e-6)


@profile
@given(st.lists(finite, min_size=1, max_size=30), st.floats(0.01, 1.0))
def test_an_average_equals_its_closed_form_and_stays_among_its_samples(samples: list[float], alpha: float) -> None:
    ema = Ema(alpha)
    for sample in samples:
        ema.update(sample)
    n = len(samples)
    weights = [(1 - alpha) ** (n - 1)] + [alpha * (1 - alpha) ** (n - 1 - i) for i in range(1, n)]
    value = ema.read()
    assert value == pytest.approx(math.fsum(w * s for w, s in zip(weights, samples, strict=True)), rel=1e-9, abs=1e-6)
    assert min(samples) - 1e-6 <= value <= max(samples) + 1e-6
