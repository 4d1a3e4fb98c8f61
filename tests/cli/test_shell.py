"""The program in a shell: completion, colours that can be turned off, and verbs that start at once, without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forks import Forked
from tests.support.runs import PROGRAM, TIMEOUT_SEC, command, environment, write_tiny_config
from tests.support.terminal import Terminal
from trainer.metrics.payload_contract import build_payload, encode_payload

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


LOADED = """
import sys
from trainer.cli.main import run
try:
    run()
    code = 0
except SystemExit as ended:
    code = ended.code
print(*sorted({"torch", "numpy", "pydantic", "wandb"} & {*sys.modules}), file=sys.stderr)
sys.exit(code)
"""


def started(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", LOADED, *arguments]
    return subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("verb", "loaded"),
    [
        ("--help", ""),  # of any other verb typer itself loads pydantic
        ("diagnose {run}", "pydantic"),
        ("ls {run}", "pydantic"),
        ("data inspect {data}", "numpy pydantic"),
        ("data build text --out {new} --modality prose={data}/*.txt", "numpy pydantic"),
        ("init {data} --out {new} --minutes 0", "numpy pydantic"),
    ],
)
def test_a_verb_that_looks_at_files_needs_no_torch(tmp_path: Path, verb: str, loaded: str) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    for number in range(3):
        (data / f"{number}.txt").write_text(f"Some text, number {number}.\n" * 50, encoding="utf-8")
    run.mkdir()
    rows = [build_payload("train", step, {"loss": 2.0}) for step in range(1, 9)]
    (run / "metrics.jsonl").write_text("".join(encode_payload(row) + "\n" for row in rows), encoding="utf-8")
    arguments = [part.format(data=data, run=run, new=tmp_path / "new") for part in verb.split()]
    ended = started(arguments)
    assert ended.returncode == 0, ended.stderr
    assert {*ended.stderr.splitlines()[-1].split()} <= {*loaded.split()}, ended.stderr


def test_a_path_that_does_not_exist_is_told_before_torch_is_loaded(tmp_path: Path) -> None:
    run, near = tmp_path / "my_run", tmp_path / "myrun"
    run.mkdir()
    ended = started(["eval", str(run), "--source", f"x={near}"])
    assert ended.returncode == 2
    said, loaded = ended.stderr.splitlines()
    assert f"--source: {near}: no such file or directory; did you mean {run}?" in said
    assert "torch" not in loaded
