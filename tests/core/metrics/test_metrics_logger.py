"""Log lines for people and the numbers in them."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest

from trainer.metrics.logger import add_log_file, format_number, format_train_line, get_logger, remove_log_file

NUMBERS = {"999": 999, "1.0M": 999_951, "3.0B": 3_000_000_000, "0.0100": 0.01, "9.99e-03": 0.00999}
NUMBERS |= {"-3.00e-04": -3e-4, "1.50e+06": 1.5e6, "nan": math.nan, "-inf": -math.inf}


def test_numbers_are_written_for_people() -> None:
    assert list(map(format_number, NUMBERS.values())) == list(NUMBERS)


def test_the_tracker_line_is_exactly_the_documented_one() -> None:
    metrics = {
        "loss": 2.34, "grad_norm": 1.25, "lr": 3e-4, "tokens_per_sec": 125_000.0, "mfu": 0.523,
        "gpu/allocated_gb": 10.0, "gpu/peak_gb": 71.2, "gpu/total_gb": 80.1, "step_time_sec": 1.25,
    }  # fmt: skip
    assert format_train_line(1000, metrics) == (
        "[step 1000] loss=2.3400 | lr=3.00e-04 | grad_norm=1.250 | tok/s=125,000 | mfu=52.3% | mem=71.2/80GB"
        " | step_time=1.25s"
    )


def test_a_terminal_gets_colour_unless_no_color_is_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for no_color, wanted in ((None, r"\x1b\[33mWARNING\x1b\[0m"), ("1", "WARNING")):
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("RANK", "0" if no_color else "a")  # which the launch refuses, on a line like these
        if no_color:
            monkeypatch.setenv("NO_COLOR", no_color)
        get_logger("tint").warning("x")
        assert re.fullmatch(rf"\[rank 0\] {wanted} x\n", capsys.readouterr().err)


def test_a_log_file_has_the_records_from_its_opening_to_its_closing_with_tracebacks(tmp_path: Path) -> None:
    get_logger("part").info("before")
    handler = add_log_file(tmp_path / "it.log")
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        get_logger("part").exception("went wrong")
    remove_log_file(handler)
    get_logger("part").info("after")
    lines = (tmp_path / "it.log").read_text().splitlines()
    assert re.fullmatch(r"\S+Z \[rank 0\] ERROR went wrong", lines[0])
    assert (lines[1].startswith("Traceback"), lines[-1]) == (True, "ZeroDivisionError")
