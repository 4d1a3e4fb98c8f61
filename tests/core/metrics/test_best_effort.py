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
