"""Log lines for people and the numbers in them."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path

import pytest

from trainer.metrics.logger import add_log_file, format_number, format_train_line, get_logger, remove_log_file


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (999, "999"),
        (999_951, "1.0M"),
        (3_000_000_000, "3.0B"),
        (0.01, "0.0100"),
        (0.00999, "9.99e-03"),
        (-3e-4, "-3.00e-04"),
        (1.5e6, "1.50e+06"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_are_written_for_people(value: float, text: str) -> None:
    assert format_number(value) == text


def test_the_tracker_line_is_exactly_the_documented_one() -> None:
    metrics = {
        "loss": 2.34, "grad_norm": 1.25, "lr": 3e-4, "tokens_per_sec": 125_000.0, "mfu": 0.523,
        "gpu/allocated_gb": 10.0, "gpu/peak_gb": 71.2, "gpu/total_gb": 80.1, "step_time_sec": 1.25,
    }  # fmt: skip
    assert format_train_line(1000, metrics) == (
        "[step 1000] loss=2.3400 | lr=3.00e-04 | grad_norm=1.250 | tok/s=125,000 | mfu=52.3% | mem=71.2/80GB"
        " | step_time=1.25s"
    )


def test_records_go_to_stderr_with_rank_and_level(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    get_logger("some.part").info("hello %d", 3)
    get_logger("trainer.other").warning("look")
    assert capsys.readouterr() == ("", "[rank 0] INFO hello 3\n[rank 0] WARNING look\n")
    assert get_logger("some.part").name == "trainer.some.part"


def test_other_ranks_are_silent_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "2")
    get_logger("quiet").error("unheard")
    get_logger("loud", rank_zero_only=False).info("heard")
    assert capsys.readouterr().err == "[rank 2] INFO heard\n"
    get_logger("loud").info("unheard again")
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_colour_unless_no_color_is_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    handler = next(h for h in logging.getLogger("trainer").handlers if type(h).__name__ == "_StderrHandler")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for no_color, wanted in ((None, r"\x1b\[33mWARNING\x1b\[0m"), ("1", "WARNING")):
        monkeypatch.delenv("NO_COLOR", raising=False)
        if no_color:
            monkeypatch.setenv("NO_COLOR", no_color)
        handler.setFormatter(None)  # as with a stream that it has not seen yet
        get_logger("tint").warning("x")
        assert re.fullmatch(rf"\[rank 0\] {wanted} x\n", capsys.readouterr().err)
    handler.setFormatter(None)


def test_what_was_logged_before_the_log_file_is_open_stands_in_it_once(tmp_path: Path) -> None:
    remove_log_file(add_log_file(tmp_path / "earlier.log"))  # takes what other tests have logged
    numbers = [1]
    get_logger("part").warning("changed: %s", numbers)
    try:
        numbers.append(1 // 0)
    except ZeroDivisionError:
        get_logger("part").exception("went wrong")
    numbers.clear()
    for name in ("one", "two"):
        handler = add_log_file(tmp_path / f"{name}.log")
        get_logger("part").info("now")
        remove_log_file(handler)
    lines = (tmp_path / "one.log").read_text().splitlines()
    assert "[rank 0] WARNING changed: [1]" in lines[0]
    assert "ERROR went wrong" in lines[1]
    assert lines[2].startswith("Traceback")
    assert lines[-1].endswith("now")
    assert len((tmp_path / "two.log").read_text().splitlines()) == 1
