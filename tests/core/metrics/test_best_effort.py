"""A diagnostic's failure costs that diagnostic, is said once, and never reaches the run."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from trainer.metrics.best_effort import BestEffort, SkipBatch


def fail() -> NoReturn:
    raise ValueError("no such thing")


def skip() -> NoReturn:
    raise SkipBatch("lengths differ")


def test_a_skipped_batch_is_silent_and_the_next_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    guard = BestEffort("x")
    assert guard.run(skip) is None
    assert guard.enabled
    assert guard.num_skipped == 1
    assert guard.run(max, 1, 2) == 2
    assert capsys.readouterr() == ("", "")


def test_an_unexpected_failure_warns_once_records_an_event_and_turns_it_off(capsys: pytest.CaptureFixture[str]) -> None:
    events: list[dict[str, Any]] = []
    guard = BestEffort("token_type", on_event=events.append)
    calls = []

    def diagnostic() -> None:
        calls.append(1)
        fail()

    for _ in range(3):
        assert guard.run(diagnostic) is None
    assert len(calls) == 1
    assert not guard.enabled
    assert capsys.readouterr().err.count("token_type failed and is off from now on: ValueError: no such thing") == 1
    (event,) = events
    assert (event["event"], event["name"], event["error"]) == (
        "diagnostic_disabled",
        "token_type",
        "ValueError: no such thing",
    )
    assert "in fail" in event["traceback"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_a_stop_is_not_held_back(kind: type[BaseException]) -> None:
    guard = BestEffort("x")

    def stop() -> NoReturn:
        raise kind

    with pytest.raises(kind):
        guard.run(stop)
    assert guard.enabled


class Mute(Exception):
    """One that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class MuteSkip(Mute, SkipBatch):
    """One that cannot say why it skips."""


def test_an_error_that_cannot_be_shown_is_reported_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    events: list[dict[str, Any]] = []

    def raise_it(error: type[Exception]) -> NoReturn:
        raise error

    def refuse(event: dict[str, Any]) -> None:
        events.append(event)
        raise Mute

    guard = BestEffort("x", on_event=refuse)
    assert guard.run(raise_it, MuteSkip) is None
    assert guard.enabled
    assert guard.last_skip == "(no message: its __str__ raised RuntimeError)"
    assert guard.run(raise_it, Mute) is None
    assert not guard.enabled
    told = capsys.readouterr().err
    text = "Mute: (no message: its __str__ raised RuntimeError)"
    assert f"x failed and is off from now on: {text}" in told
    assert "Logging error" not in told
    assert events[0]["error"] == text
