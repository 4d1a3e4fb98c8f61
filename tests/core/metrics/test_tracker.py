"""The tracker: timing, MFU, memory, smoothing, logging, in that order, and nothing lost between logged steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.core.metrics.test_aggregate import BAD
from trainer.metrics import tracker
from trainer.metrics.aggregate import reduce_over_ranks
from trainer.metrics.payload_contract import encode_payload, parse_payload
from trainer.metrics.tracker import MetricsTracker, StepMetrics
from trainer.options import TrackerOptions


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.payloads: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.num_closed = 0

    def log(self, payload: Mapping[str, Any]) -> None:
        parse_payload(encode_payload(payload))
        self.payloads.append(dict(payload))

    def event(self, event: Mapping[str, Any]) -> None:
        self.events.append(dict(event))

    def close(self) -> None:
        self.num_closed += 1


class Run:
    """A tracker with a clock and a recorder, and a step in one call."""

    def __init__(self, **options: Any) -> None:
        self.clock = Clock()
        self.sink = Recorder()
        own = {name: options.pop(name) for name in vars(TrackerOptions()) if name in options}
        defaults = {"num_devices": 2, "device": "cpu", "clock": self.clock, "sinks": [self.sink]}
        self.tracker = MetricsTracker(TrackerOptions(**own), **{**defaults, **options})

    def step(self, step: int, *, seconds: float = 0.5, **values: Any) -> StepMetrics | None:
        self.tracker.start_step()
        self.clock.now += seconds
        defaults = {"loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "tokens_in_step": 1000}
        return self.tracker.end_step(step, **{**defaults, **values})

    def metrics(self, index: int = -1) -> dict[str, float]:
        return dict(self.sink.payloads[index]["metrics"])


def test_the_first_step_and_every_interval_are_logged() -> None:
    run = Run(log_interval=10)
    logged = [step for step in range(1, 31) if run.step(step) is not None]
    assert logged == [1, 10, 20, 30]
    assert [payload["global_step"] for payload in run.sink.payloads] == logged
    assert [step for step in range(1, 31) if run.tracker.will_log(step)] == logged


def test_smoothing_sees_steps_that_do_not_log() -> None:
    run = Run(log_interval=3)
    expected = {"loss": 0.0, "step_time": 0.0}
    for step in range(1, 7):
        samples = {"loss": 1.0 / step, "step_time": 0.1 * step}
        for name, sample in samples.items():
            expected[name] = sample if step == 1 else 0.1 * sample + 0.9 * expected[name]
        run.step(step, loss=torch.tensor(1.0 / step, dtype=torch.float64), seconds=0.1 * step)
        if step in (1, 3, 6):
            for name, value in expected.items():
                assert run.metrics()[f"smoothed/{name}"] == pytest.approx(value)
            assert run.metrics()["smoothed/tokens_per_sec"] == pytest.approx(1000 / expected["step_time"])
    assert run.metrics()["loss"] == pytest.approx(1 / 6), "raw values are not smoothed"
    loss = torch.tensor(5.0)
    run.step(7, loss=loss)
    loss.zero_()  # the caller uses it again
    run.tracker.log_last(7, {})
    assert run.metrics()["loss"] == 5.0
    plain = {"loss", "grad_norm", "lr", "tokens_per_sec", "step_time_sec", "tokens_in_step", "tokens_seen"}
    smoothed = {f"smoothed/{name}" for name in ("loss", "tokens_per_sec", "step_time")}
    assert run.metrics().keys() == plain | smoothed | {"tokens_per_sec_per_device"}


def test_tensors_are_read_on_logging_steps_only() -> None:
    run = Run(log_interval=10)
    unreadable = {key: torch.empty((), device="meta") for key in ("loss", "grad_norm", "tokens_in_step")}
    assert run.step(2, **unreadable, extra={"ledger/cold_starts": torch.empty((), device="meta")}) is None
    with pytest.raises((RuntimeError, NotImplementedError)):
        run.step(10, **unreadable)


def test_times_are_means_over_the_steps_since_the_last_payload() -> None:
    run = Run()
    run.step(1, seconds=100.0)
    run.clock.now += 1000.0  # evaluation and checkpoints between two steps do not count
    for step, seconds in ((9, 7.0), (10, 1.0)):
        run.tracker.start_step()
        for _ in range(2):
            with run.tracker.section("data"):
                run.clock.now += seconds
        with run.tracker.section("optimizer"):
            run.clock.now += 2.0
        run.tracker.end_step(step, loss=1.0, grad_norm=None, lr=0.1, tokens_in_step=1)
    found = run.metrics()
    assert (found["time/data_sec"], found["time/optimizer_sec"], found["step_time_sec"]) == (8.0, 2.0, 10.0)
    assert (found["time/data_share"], found["time/optimizer_share"]) == (0.8, 0.2)
    assert found["tokens_per_sec"] == 0.1
    assert "time/forward_backward_sec" not in found
    assert "grad_norm" not in found


def test_what_all_ranks_measure_replaces_what_this_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "get_memory_stats", lambda _: {"allocated_gb": 2.0, "peak_gb": 3.0})
    run = Run(device="cuda", peak_tflops=1.0)
    run.tracker.start_step()
    with run.tracker.section("data"):
        run.clock.now += 1.0
    own = run.tracker.measured()
    assert own["time/data_sec"] == 1.0
    other = {**own, "time/data_sec": 3.0, "gpu/allocated_gb": 1.0, "gpu/peak_gb": 4.0}
    extra = reduce_over_ranks([own, other], list(own), device="cpu", world_size=1)
    run.clock.now += 3.0
    step = run.tracker.end_step(10, loss=1.0, grad_norm=None, lr=0.1, tokens_in_step=1, extra=extra)
    run.step(20)
    assert step is not None
    assert (step.allocated_gb, step.peak_gb) == (2.0, 4.0)
    assert [run.metrics(row)["gpu/peak_gb"] for row in (0, 1)] == [4.0, 3.0], "this rank's, if no others are given"
    assert (run.metrics(0)["time/data_sec"], run.metrics(0)["time/data_share"]) == (3.0, 0.75)


def test_neither_a_non_finite_loss_nor_an_evaluation_whose_keys_are_prefixed_touches_the_smoothing() -> None:
    run = Run(log_interval=1)
    run.step(1, loss=2.0)
    run.step(2, loss=torch.tensor(math.nan))
    assert run.sink.payloads[-1]["non_finite"] == {"loss": "nan"}
    assert run.metrics()["smoothed/loss"] == 2.0
    run.tracker.log_eval({"loss": torch.tensor(9.0), "eval_accuracy": 0.5, "moe/aux_loss": (6.0, 3.0)}, 1)
    payload = run.sink.payloads[-1]
    assert (payload["mode"], payload["global_step"]) == ("eval", 1)
    assert payload["metrics"] == {"eval_loss": 9.0, "eval_accuracy": 0.5, "moe/aux_loss": 2.0}
    run.step(10, loss=2.0)
    assert run.metrics()["smoothed/loss"] == 2.0


def test_an_unknown_key_warns_once_and_is_still_logged(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run()
    for step in (1, 2):
        run.tracker.log_eval({"my/own_one": 1.0}, step)
    assert run.metrics() == {"my/own_one": 1.0}
    for step in (3, 10):
        run.step(step, extra={"my/own_two": float(step)})
    assert run.metrics()["my/own_two"] == 6.5, "a gauge is averaged over the steps since the last logged one"
    warnings = capsys.readouterr().err
    assert warnings.count("'my/own_one' is not in the catalog") == warnings.count("'my/own_two' is not in the") == 1


def test_other_ranks_time_and_return_but_hold_no_sinks() -> None:
    run = Run(rank=1, sinks=[])
    assert run.step(1) is not None
    with pytest.raises(ValueError, match="sinks belong to rank 0, this is rank 1"):
        run.tracker.init_backends([Recorder()])
    late, later = Recorder(), Run(sinks=[])
    later.tracker.init_backends([late])
    later.step(7, force_log=True)
    assert len(late.payloads) == 1


def test_a_resumed_tracker_goes_on_where_the_other_stopped() -> None:
    whole, first, second = (Run(log_interval=4, per_source=True) for _ in range(3))
    for step in range(1, 9):
        whole.step(step, loss=float(step))
        if step == 5:
            second.tracker.load_state_dict(first.tracker.state_dict())
        (first if step < 5 else second).step(step, loss=float(step))
    assert second.metrics() == whole.metrics()
    assert second.metrics()["tokens_seen"] == 8000


class Broken(Recorder):
    """Can neither write nor close."""

    def log(self, payload: Mapping[str, Any]) -> None:
        raise OSError("disk gone")

    def close(self) -> None:
        raise OSError("disk gone")


class Essential(Broken):
    is_essential = True


def test_a_sink_that_fails_costs_one_warning_and_an_essential_one_stops_the_run_with_all_closed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, last, full = Recorder(), Recorder(), Recorder()
    vars(full)["log"] = Broken().log  # of the class of the others, whose guards are their own
    run = Run(sinks=[Broken(), full, last], log_interval=1)
    for step in (1, 2):
        run.step(step)
    assert [payload["global_step"] for payload in last.payloads] == [1, 2]
    assert capsys.readouterr().err.count("sink Broken failed and is off") == 1
    run.tracker.close()
    assert (full.num_closed, last.num_closed) == (1, 1)
    run = Run(sinks=[first, Essential(), last])
    for call in (lambda: run.step(1), run.tracker.close):
        with pytest.raises(OSError, match="disk gone"):
            call()
    run.tracker.close()
    assert (first.num_closed, last.num_closed) == (1, 2)


def test_a_step_may_end_after_the_next_has_started_and_no_time_counts_twice() -> None:
    run = Run(log_interval=1)
    numbers = {"grad_norm": 1.0, "lr": 1e-3, "tokens_in_step": 1000}
    run.tracker.start_step()
    with run.tracker.section("data"):
        run.clock.now += 1.0
    began = run.tracker.step_start
    run.clock.now += 2.0
    run.tracker.start_step()
    with run.tracker.section("data"):
        run.clock.now += 4.0
    assert run.tracker.step_start == began
    run.tracker.end_step(1, loss=1.0, **numbers)
    run.clock.now += 8.0
    run.tracker.end_step(2, loss=2.0, **numbers)
    rows = [payload["metrics"] for payload in run.sink.payloads]
    found = [(row["loss"], row["step_time_sec"], row["time/data_sec"]) for row in rows]
    assert found == [(1.0, 3.0, 1.0), (2.0, 12.0, 4.0)]
    with pytest.raises(RuntimeError, match="end_step without start_step"):
        run.tracker.end_step(3, loss=1.0, **numbers)
    with pytest.raises(RuntimeError, match="start_step without end_step"):
        [run.tracker.start_step() for _ in range(3)]


@pytest.mark.parametrize("key", ["loss", "smoothed/mfu", "time/data_share", "tokens_per_sec"])
def test_the_tracker_s_own_names_are_kept(key: str, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(log_interval=2, flops_per_token=1e9, peak_tflops=2.0)
    for step in range(1, 7):
        run.tracker.start_step()
        with run.tracker.section("data"):
            run.clock.now += 1.0
        extra = {key: -9.0, "accuracy": 0.5}
        run.tracker.end_step(step, loss=2.0, grad_norm=None, lr=0.1, tokens_in_step=10, extra=extra)
    assert run.metrics()["accuracy"] == 0.5
    assert -9.0 not in run.metrics().values()
    (record,) = caplog.records
    assert f"metric {key!r} is left out: the name is one of the tracker's own" in record.getMessage()


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: type(bad).__name__)
def test_a_value_that_is_no_number_is_left_out_with_one_warning(bad: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(log_interval=2)
    for step in range(1, 5):
        run.step(step, extra={"my/own": bad, "accuracy": 0.5, "ledger/cold_starts": 1.0, "ledger/refused_rows": bad})
        run.tracker.log_eval({"loss": bad, "accuracy": 0.5}, step)
        assert run.metrics() == {"eval_accuracy": 0.5}
    counted = [row["metrics"].get("ledger/cold_starts") for row in run.sink.payloads if row["mode"] == "train"]
    assert counted == [1, 1, 2]
    rows = [{**row["metrics"], **row.get("non_finite", {})} for row in run.sink.payloads]
    assert not any({"my/own", "ledger/refused_rows", "eval_loss"} & row.keys() for row in rows)
    assert (caplog.text.count("is left out: "), "pair" in caplog.text) == (3, bad is BAD[-1])


def test_what_is_no_longer_known_is_absent_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(log_interval=3)
    run.step(1, extra={})
    run.step(2, extra={"gns/b_now": 5.0, "gns/b_now_low": 4.0, "gns/b_now_high": 9.0})
    run.step(3, extra={"gns/b_now": None, "gns/b_now_low": 6.0, "gns/b_now_high": None, "accuracy": (0.0, 0.0)})
    assert {key: value for key, value in run.metrics().items() if key.startswith("gns/")} == {"gns/b_now_low": 6.0}
    assert "accuracy" not in run.metrics()
    assert not caplog.records


def test_sources_are_named_where_that_is_asked_for() -> None:
    parts = {"blend/share_error/a": (-3, 10), "blend/share_error/b": (2, 10)}
    for per_source in (False, True):
        run = Run(log_interval=1, per_source=per_source)
        run.step(1, extra=parts)
        assert run.metrics()["blend/max_share_error"] == 0.3
        assert run.metrics().keys() & parts.keys() == (parts.keys() if per_source else set())


def test_tokens_of_skipped_steps_are_not_seen() -> None:
    run = Run(log_interval=1)
    for step, trained in enumerate((None, 0, torch.tensor(1000)), start=1):
        run.step(step, tokens_trained=trained)
    assert [row["metrics"]["tokens_seen"] for row in run.sink.payloads] == [1000, 1000, 2000]
    assert [row["metrics"]["tokens_per_sec"] for row in run.sink.payloads] == [2000.0] * 3
