"""The program in a shell: completion, and colours that can be turned off."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.forks import Forked
from tests.support.runs import PROGRAM, TIMEOUT_SEC, command, environment, write_tiny_config
from tests.support.terminal import Terminal

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


def shown(arguments: list[object], cwd: Path, **extra: str) -> str:
    """Everything that the program writes on a terminal of its own."""
    terminal = Terminal()
    env = {name: value for name, value in environment().items() if name != "NO_COLOR"}
    env |= {"TERM": "xterm-256color", "COLUMNS": "150", **extra}
    Forked(arguments, env, cwd=cwd, out=terminal.path, err=terminal.path).wait(TIMEOUT_SEC)
    return terminal.text()


def test_no_color_takes_the_colours_away_everywhere(tmp_path):
    lines: list[list[object]] = [["--config", write_tiny_config(tmp_path)], ["ls", "runs"], ["--help"]]
    for arguments in lines:
        plain = shown(arguments, tmp_path, NO_COLOR="1")
        assert len(plain) > 200
        assert not COLOUR.search(plain), arguments
        assert COLOUR.search(shown(arguments, tmp_path)), f"{arguments}: the test sees no colour at all"


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
