"""The payload contract by example: what is built, what is refused and with which words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainer.metrics.payload_contract import (
    PayloadError,
    Restart,
    build_payload,
    encode_payload,
    parse_payload,
    validate_payload,
    validate_stream,
)


def good(**changes: Any) -> dict[str, Any]:
    return {"schema_version": 1, "mode": "train", "global_step": 3, "metrics": {"loss": 1.5}, **changes}


@pytest.mark.parametrize("value", [True, "1", None, [1], 1j, np.bool_(True), 10**400])
def test_what_is_not_a_number_cannot_be_built(value: Any) -> None:
    with pytest.raises(PayloadError, match=r"metrics\.x: must be a (finite )?number"):
        build_payload("train", 1, {"x": value})


@pytest.mark.parametrize(
    ("obj", "key", "reason"),
    [
        (good(schema_version=None), "schema_version", "must be 1, got None"),
        (good(schema_version=True), "schema_version", "must be 1, got True"),
        (good(schema_version=2), "schema_version", "must be 1, got 2"),
        ({"schema_version": 1}, "mode", "missing"),
        (good(mode="test"), "mode", "must be one of train, eval, got 'test'"),
        (good(global_step=-1), "global_step", "at least 0, got -1"),
        (good(metrics={}), "metrics", "must not be empty"),
        (good(metrics=[1]), "metrics", "must be an object, got list"),
        (good(metrics={"": 1}), "metrics", "keys must be non-empty strings"),
        (good(metrics={"a": True}), "metrics.a", "must be a finite number, got True"),
        (good(metrics={"a": 10**400}), "metrics.a", "must be a finite number"),
        (good(non_finite={"b": "NaN"}), "non_finite.b", "must be one of nan, inf, -inf"),
        (good(non_finite={"loss": "nan"}), "non_finite.loss", "appears in metrics as well"),
        ([], "line", "must be an object, got list"),
    ],
)  # fmt: skip
def test_a_breach_is_named_by_key_and_reason(obj: Any, key: str, reason: str) -> None:
    with pytest.raises(PayloadError) as caught:
        validate_payload(obj)
    assert caught.value.key == key
    assert reason in caught.value.reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"schema_version":1,"mode":"train","global_step":1,"metrics":{"a":NaN}}', "NaN is not JSON"),
        (b'{"schema_version":1,"mode":"train","global_step":1,"metrics":{"a":1e999}}', "finite number, got inf"),
        (b'{"schema_version":1,"mode":"train","global_step":1,"metrics":{"a":1,"a":2}}', "appears twice"),
        (b'{"schema_version":1,"mode":"tr', "not one JSON object"),
        (b'{"schema_version":1,"mode":"train","global_step":1,"metrics":{"a":1}} {}', "not one JSON object"),
        (b'{"schema_version":1,"mode":"\xff"}', "not UTF-8 at byte"),
        (b"null", "must be an object, got NoneType"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_line_is_refused_with_its_reason(line: bytes, reason: str) -> None:
    with pytest.raises(PayloadError) as caught:
        parse_payload(line)
    assert reason in str(caught.value)


def test_a_section_that_json_cannot_say_is_refused_when_encoded() -> None:
    with pytest.raises(PayloadError, match="not representable in JSON"):
        encode_payload(build_payload("train", 1, {"a": 1.0}, restart={"from_step": 0, "x": float("nan")}))


def test_a_restart_says_from_which_step() -> None:
    assert parse_payload(encode_payload(good(restart={"from_step": 2}))).restart == Restart(2)
    for section in (50, {}, {"from_step": -1}, {"from_step": True}):
        with pytest.raises(PayloadError, match=r"restart(\.from_step)?: must be"):
            parse_payload(encode_payload(good(restart=section)))


def lines_of(*steps: int) -> list[str]:
    return [encode_payload(good(global_step=step)) for step in steps]


def test_every_breach_of_a_stream_is_reported_with_its_line() -> None:
    stream: list[str | bytes] = ["hello\n", *lines_of(1), b"\xff\n", "\n", "[1]", '{"schema_version":2}']
    found = [(violation.line, violation.key) for violation in validate_stream(stream)]
    assert found == [(1, "line"), (3, "line"), (4, "line"), (5, "line"), (6, "schema_version")]
