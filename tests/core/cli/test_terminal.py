"""What a terminal shows and what a pipe carries: lines for people beside whole payload lines, never mixed."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest

from tests.support.runs import TIMEOUT_SEC, evaluating, run, write_tiny_config
from tests.support.terminal import Terminal
from trainer.metrics.payload_contract import PayloadError, parse_payload, validate_stream
from trainer.metrics.sinks import StdoutSink

STEPS = 6
BAR = re.compile(r"step \d/\d")
HUMAN = re.compile(
    r"\[step (\d+)\] loss=\d\.\d{4} \| lr=\d\.\d\de-\d\d \| grad_norm=\d+\.\d{3} \| tok/s=[\d,]+ \| step_time=[\d.]+s"
)
EVALUATION = re.compile(r"\[step (\d+)\] eval_\S+=[\d.e+-]+( \| eval_\S+=[\d.e+-]+)*")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
EVAL = evaluating(3)


def train(tmp_path: Path, out: Path, err: Path, *arguments: object) -> None:
    """A run on these streams."""
    config = write_tiny_config(tmp_path, EVAL)
    line = ("--config", config, "--run-dir", tmp_path / "run", "--steps", STEPS, *arguments)
    assert run(*line, extra={"TERM": "xterm", "COLUMNS": "200"}, is_alone=True, out=out, err=err).returncode == 0


@contextmanager
def pipe(path: Path) -> Iterator[list[str]]:
    """A pipe that is read in the background; what came through, once it is closed."""
    os.mkfifo(path)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(path.read_bytes().decode("utf-8")), daemon=True)
    reader.start()
    with path.open("wb"):  # held open: between two writers there is no end
        yield found
    reader.join(TIMEOUT_SEC)


class Recorded:
    """A stream, and what is written to it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.written = stream, list[str]()

    def write(self, text: str) -> int:
        self.written.append(text)
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def steps_of(lines: Sequence[str], form: re.Pattern[str]) -> list[int]:
    return [int(found[1]) for line in lines if (found := form.fullmatch(line))]


def test_with_stdout_piped_the_terminal_shows_lines_and_the_pipe_holds_only_payloads(tmp_path: Path) -> None:
    terminal, path = Terminal(), tmp_path / "pipe"
    with pipe(path) as piped:
        train(tmp_path, path, terminal.path)
    [stdout], shown = piped, terminal.text()
    assert not list(validate_stream(stdout.splitlines()))
    assert stdout == (tmp_path / "run" / "metrics.jsonl").read_text()
    lines = CONTROL.sub("", shown).replace("\r", "\n").splitlines()
    assert steps_of(lines, HUMAN) == [*range(1, STEPS + 1)]
    assert steps_of(lines, EVALUATION) == [3, 6]
    assert "schema_version" not in shown
    bars = [line for line in lines if BAR.search(line)]
    assert re.search(rf"step {STEPS}/{STEPS} .* loss \d\.\d{{4}}, [\d,]+ tokens/s", bars[-1]), bars
    assert shown.rindex("\x1b[2K") > shown.rindex(f"{STEPS}/{STEPS}"), "the bar is erased at the end"
    assert "\x1b[?25l" not in shown, "the cursor is hidden, for ever if the process is killed"


def test_on_one_terminal_a_row_goes_the_way_of_the_messages_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    with terminal.path.open("w") as out, terminal.path.open("w") as err:
        above = Recorded(err)
        monkeypatch.setattr("sys.stderr", above)
        monkeypatch.setenv("TERM", "xterm")
        StdoutSink("line", stream=out).log({"mode": "train", "global_step": 3, "metrics": {"loss": 2.0}})
        other = Terminal()
        with other.path.open("w") as elsewhere:
            StdoutSink("line", stream=elsewhere).log({"mode": "train", "global_step": 4, "metrics": {"loss": 2.0}})
    assert (above.written, terminal.text().splitlines()) == (["[step 3] loss=2.0000\n"], ["[step 3] loss=2.0000"])
    assert other.text().splitlines() == ["[step 4] loss=2.0000"]


def test_with_two_terminals_stdout_holds_only_whole_lines_for_people(tmp_path: Path) -> None:
    out, err = Terminal(), Terminal()
    train(tmp_path, out.path, err.path)
    stdout, stderr = out.text(), err.text()
    lines = stdout.splitlines()
    assert all(HUMAN.fullmatch(line) or EVALUATION.fullmatch(line) for line in lines), lines
    assert steps_of(lines, HUMAN) == [*range(1, STEPS + 1)]
    assert "[step" not in stderr, "the line is on stdout already"


CHATTY = """
from trainer.metrics.logger import get_logger
from trainer.model import build as build_ours

def build(vocab_size, dim, num_layers):
    model = build_ours(vocab_size, dim=dim, num_layers=num_layers)
    logger = get_logger("chatty", rank_zero_only=False)
    model.register_forward_hook(lambda *_: logger.info("chat %s end", "x" * 700))
    return model
"""


@pytest.mark.distributed
def test_four_ranks_on_one_pipe_break_no_line(tmp_path: Path) -> None:
    """All ranks talk into the pipe that also carries the payloads, as under a launcher that merges the streams."""
    (tmp_path / "chatty.py").write_text(CHATTY)
    config = write_tiny_config(tmp_path, "per_source = true\n")
    steps, path = 10, tmp_path / "pipe"
    line = ["--config", config, "--run-dir", tmp_path / "run", "--steps", steps]
    line += ["--set", "model.target=chatty:build", "--set", "model.contract=false"]
    with pipe(path) as merged:
        done = run(*line, nproc=4, extra={"PYTHONPATH": str(tmp_path)}, is_alone=True, out=path, err=path)
    assert done.returncode == 0, merged[0][-3000:]
    payloads, chats = [], 0
    for text in merged[0].splitlines():
        if re.fullmatch(r"\[rank [0-3]\] INFO chat x{700} end", text):
            chats += 1
        elif not re.fullmatch(r"\[rank 0\] INFO [^{}]*", text):
            try:
                payloads.append(parse_payload(text))
            except PayloadError as error:
                raise AssertionError(f"{error}: {text!r}") from None
    assert [payload.global_step for payload in payloads] == [*range(1, steps + 1)]
    assert chats == 4 * 2 * steps
