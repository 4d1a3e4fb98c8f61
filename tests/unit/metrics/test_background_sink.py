"""A sink in the background: nobody waits for it, and what it did not get is counted."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from trainer.metrics.best_effort import BestEffort
from trainer.metrics.payload_contract import build_payload
from trainer.metrics.sinks import BackgroundSink, PayloadStream, StdoutSink


class Recorder:
    """Takes rows as long as it may."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.may_take = threading.Event()
        self.may_take.set()
        self.num_closed = 0

    def log(self, payload: Mapping[str, Any]) -> None:
        assert self.may_take.wait(30)
        self.rows.append(payload)

    event = log

    def close(self) -> None:
        self.num_closed += 1


def in_background(sink: Any, **options: Any) -> BackgroundSink:
    return BackgroundSink(sink, name="it", guard=BestEffort("it"), **options)


def test_everything_arrives_in_order_before_it_is_closed() -> None:
    recorder = Recorder()
    sink = in_background(recorder)
    rows = [{"row": number} for number in range(300)]
    for row in rows:
        sink.log(row) if row["row"] % 2 else sink.event(row)
    sink.close()
    sink.close()
    assert recorder.rows == rows
    assert (recorder.num_closed, sink.num_dropped) == (1, 0)


def test_what_a_full_queue_has_no_room_for_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    recorder.may_take.clear()
    sink = in_background(recorder, capacity=10)
    for number in range(100):  # a call that waited would wait for ever
        sink.log({"row": number})
    recorder.may_take.set()
    sink.close()
    assert len(recorder.rows) + sink.num_dropped == 100
    assert 10 <= len(recorder.rows) <= 12
    assert f"it: {sink.num_dropped} rows were dropped" in capsys.readouterr().err


def test_closing_waits_for_a_slow_sink_and_not_for_one_that_hangs() -> None:
    class Slow(Recorder):
        def log(self, payload: Mapping[str, Any]) -> None:
            time.sleep(0.05)
            super().log(payload)

    slow = in_background(Slow(), patience_sec=60.0)
    for number in range(30):
        slow.log({"row": number})
    slow.close()
    assert slow.num_dropped == 0
    hanging = Recorder()
    hanging.may_take.clear()
    sink = in_background(hanging, patience_sec=0.2)
    for number in range(5):
        sink.log({"row": number})
    sink.close()
    hanging.may_take.set()
    assert sink.num_dropped == 5


def test_a_reader_that_does_not_read_holds_up_nobody() -> None:
    """A real descriptor that stays full: the thread waits in the write, the caller does not."""
    reading, writing = os.pipe()
    sink = in_background(StdoutSink("json", stream=PayloadStream(writing)), capacity=50, patience_sec=0.2)
    try:
        row = build_payload("train", 1, {f"blend/share/{number}": 1.0 for number in range(500)})
        for _ in range(200):  # a call that waited would wait for ever
            sink.log(row)
        sink.close()
        assert sink.num_dropped > 100
    finally:
        os.close(reading)
