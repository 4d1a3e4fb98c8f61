"""The program in a shell: completion, and colours that can be turned off."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.runs import PROGRAM, TIMEOUT_SEC, command, environment, write_tiny_config

pty = pytest.importorskip("pty")
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")


def complete(words: str, position: int) -> list[str]:
    """What bash is told for the word at `position`."""
    env = environment({"_TRAIN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(position)})
    result = subprocess.run(
        [sys.executable, str(PROGRAM)], env=env, capture_output=True, text=True, timeout=TIMEOUT_SEC, check=False
    )
    return result.stdout.split()


def test_completion_knows_options():
    assert complete("train export r --format saf", 4) == ["safetensors"]


def test_install_completion_writes_what_bash_can_source(tmp_path):
    env = {**environment({"HOME": str(tmp_path)}), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    line = [sys.executable, str(PROGRAM), "--install-completion", "bash"]
    result = subprocess.run(line, env=env, capture_output=True, text=True, timeout=TIMEOUT_SEC, check=False)
    assert result.returncode == 0, result.stderr
    assert str(tmp_path / ".bash_completions" / "train.sh") in (tmp_path / ".bashrc").read_text()
    # Bash itself takes the script, and the function that it defines completes a word.
    script = f"""
        PATH={tmp_path}:$PATH
        source {tmp_path}/.bash_completions/train.sh
        COMP_WORDS=(train prev) COMP_CWORD=1
        _train_completion train
        echo "${{COMPREPLY[@]}}"
    """
    wrapper = tmp_path / "train"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} {PROGRAM} "$@"\n')
    wrapper.chmod(0o755)
    shell = subprocess.run(
        ["bash", "-c", script], env=environment(), capture_output=True, text=True, timeout=TIMEOUT_SEC, check=False
    )
    assert shell.stdout.split() == ["preview"], shell.stderr


def shown(arguments: list[object], cwd: Path, extra: dict[str, str]) -> str:
    """Everything that the program writes on a terminal of its own."""
    own, child_side = pty.openpty()
    env = {k: v for k, v in environment().items() if k != "NO_COLOR"}
    env |= {"TERM": "xterm-256color", "COLUMNS": "150", **extra}
    process = subprocess.Popen(command(arguments), env=env, cwd=cwd, stdout=child_side, stderr=child_side)
    os.close(child_side)
    pieces = []
    deadline = time.monotonic() + TIMEOUT_SEC
    while time.monotonic() < deadline:
        try:
            piece = os.read(own, 65536)
        except OSError:
            break
        if not piece:
            break
        pieces.append(piece)
    os.close(own)
    process.wait(timeout=TIMEOUT_SEC)
    return b"".join(pieces).decode("utf-8", errors="replace")


@pytest.mark.slow
def test_no_color_takes_the_colours_away_everywhere(tmp_path):
    config = write_tiny_config(tmp_path)
    for arguments in (["--config", config, "--run-dir", "run"], ["ls", "."], ["--help"]):
        where: list[object] = [*arguments]
        plain = shown(where, tmp_path, {"NO_COLOR": "1"})
        assert len(plain) > 200
        assert not COLOUR.search(plain), arguments
        if arguments[0] == "--config":
            (tmp_path / "run").rename(tmp_path / "first")
        assert COLOUR.search(shown(where, tmp_path, {})), f"{arguments}: the test sees no colour at all"


def test_a_run_whose_standard_streams_are_closed_is_like_any_other(tmp_path):
    """The files of a run must not take the place of a closed stream, and get what is meant for people."""
    config = write_tiny_config(tmp_path)
    line = 'exec "$@" <&- >&- 2>&-'
    words = command(["--config", config, "--run-dir", tmp_path / "run", "--steps", 2])
    code = subprocess.run(
        ["sh", "-c", line, "sh", *words], env=environment(), timeout=TIMEOUT_SEC, check=False
    ).returncode
    assert code == 0
    assert '"state": "done"' in (tmp_path / "run" / "status.json").read_text()
    for name in ("metrics.jsonl", "events.jsonl"):
        assert all(row.startswith("{") for row in (tmp_path / "run" / name).read_text().splitlines())
