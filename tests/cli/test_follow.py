"""`train report --follow` in a real browser, while a process goes on writing the run's record."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.support.browser import opened
from tests.support.in_process import program
from tests.support.runs import ROOT, environment
from trainer.metrics.payload_contract import build_payload, encode_payload
from trainer.metrics.run_status import take_lock

PATIENCE_MS = 60_000


def row(step):
    keys = {"loss": 5.0 - 0.01 * step, "grad_norm": 1.0 + step % 7, "tokens_per_sec": 1000.0 + step, "lr": 0.001 * step}
    keys |= {"ledger/fill_fraction": 0.001 * step, "accuracy": 0.01 * step, "step_time_sec": 1.0 + 0.1 * (step % 3)}
    return encode_payload(build_payload("train", step, keys)) + "\n"


def append(directory, *texts):
    with (directory / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(texts)


@contextmanager
def following(*runs):
    """(process, its URL) of a server that is ended with Ctrl-C, as its users do."""
    command = [sys.executable, str(ROOT / "train"), "report", *map(str, runs), "--follow"]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        assert " at http://127.0.0.1:" in line, line + process.stderr.read()
        yield process, line.partition(" at ")[2].split()[0]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(30)
        process.stderr.close()


def plot_of(page, title):
    return page.locator(f'[data-name$=": {title}"] .plot')


def wait_for_points(page, title, number):
    page.wait_for_function(
        "([name, n]) => document.querySelector(`[data-name$=': ${name}'] .plot`)?.data?.[0]?.x?.length === n",
        arg=[title, number], timeout=PATIENCE_MS,
    )  # fmt: skip


def range_of(page, title):
    return plot_of(page, title).evaluate("plot => plot._fullLayout.xaxis.range")


def test_a_reader_keeps_place_zoom_and_smoothing_while_rows_come_and_learns_that_the_server_ended(tmp_path):
    append(tmp_path, *map(row, range(1, 21)))
    (tmp_path / "status.json").write_text(json.dumps({"state": "running", "reason": "", "last_step": 1}))
    # A run that says that it runs counts as dead unless somebody holds it.
    with take_lock(tmp_path), following(tmp_path) as (process, url), opened(url) as seen:
        page = seen.page
        page.locator("html[data-drawn=all]").wait_for()
        assert "running at step 20" in page.locator("#live").inner_text()
        plot_of(page, "Gradient norm").focus()
        page.keyboard.press("+")
        page.get_by_role("button", name="Strong").click()
        zoom = range_of(page, "Gradient norm")
        plot_of(page, "Step time").scroll_into_view_if_needed()
        scrolled = page.evaluate("scrollY")
        assert scrolled > 0
        append(tmp_path, *map(row, range(21, 31)), row(31)[:40])  # a partial line is no row yet
        wait_for_points(page, "Loss", 30)
        wait_for_points(page, "Step time", 30)
        page.locator("html[data-drawn=all]").wait_for()
        assert page.evaluate("scrollY") == pytest.approx(scrolled, abs=100)
        assert range_of(page, "Gradient norm") == zoom
        assert plot_of(page, "Gradient norm").evaluate("plot => plot.data.length") == 2  # still smoothed
        assert "30 rows, steps 1 to 30" in page.locator("#outcome").inner_text()
        assert seen.complaints == []
        assert seen.requests == []
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr.read() == "no longer following\n"
        page.locator("#live", has_text="No answer from train report --follow since").wait_for(timeout=PATIENCE_MS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--follow", "--out", "x.html"], "--out: "),
        (["--port", "8000"], "--port: "),
        (["--follow", "--port", "99999"], "--port"),
    ],
)
def test_mistakes_are_one_line(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    append(tmp_path, row(1))
    done = program(["report", tmp_path, *options], capsys)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert message in done.stderr
