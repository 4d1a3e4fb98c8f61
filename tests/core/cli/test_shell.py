"""The program in a shell: completion, colours that can be turned off, and verbs that start at once, without torch."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.support.runs import fresh, run, write_tiny_config
from tests.support.terminal import Terminal
from trainer.metrics.payload_contract import build_payload, encode_payload

COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")


EACH_IN_TURN = """
import os, sys
from trainer.cli.main import main
for line in os.environ["COMMANDS"].splitlines():
    sys.argv = ["train", *line.split()]
    try:
        main()
    except SystemExit as ended:
        print(f"<{ended.code}>", flush=True)
"""


def shown(lines: list[str], cwd: Path, **extra: str) -> list[str]:
    """Everything that the program writes on a terminal of its own, for each of these command lines, which end with 0."""
    terminal = Terminal()
    extra = {"NO_COLOR": "", "TERM": "xterm-256color", "COLUMNS": "150", "COMMANDS": "\n".join(lines), **extra}
    run(code=EACH_IN_TURN, cwd=cwd, extra=extra, is_alone=True, out=terminal.path, err=terminal.path)
    return terminal.text().split("<0>")[:-1]


def test_no_color_takes_the_colours_away_everywhere(tmp_path):
    lines = [f"--config {write_tiny_config(tmp_path)}", "ls runs", "--help"]
    both = shown(lines, tmp_path, NO_COLOR="1"), shown(lines, tmp_path)
    for arguments, plain, coloured in zip(lines, *both, strict=True):
        assert len(plain) > 200
        assert not COLOUR.search(plain), arguments
        assert COLOUR.search(coloured), f"{arguments}: the test sees no colour at all"


# What each verb may load; of any but the first, typer itself loads pydantic.
LOADS = {
    "--help": "",
    "diagnose {run}": "pydantic",
    "ls {run}": "pydantic",
    "data build text --out {new} --modality prose={data}/*.txt": "numpy pydantic",
    "init {data} --out {new}": "numpy pydantic",
    "eval {near}": "numpy pydantic",
}
LOADED = """
import sys
from trainer.cli.main import main
for line in sys.argv[1:]:
    sys.argv = ["train", *line.split()]
    try:
        main()
    except SystemExit as ended:
        print(ended.code, *sorted({"torch", "numpy", "pydantic", "wandb"} & {*sys.modules}), file=sys.stderr)
import trainer.ending, trainer.tools.launcher
assert "torch" not in sys.modules, "ranks are said to start before it is imported"
"""


def test_what_looks_at_files_or_refuses_a_path_needs_no_torch(tmp_path: Path) -> None:
    """In one process, the verbs that need least first."""
    data, run, near = tmp_path / "data", tmp_path / "my_run", tmp_path / "myrun"
    data.mkdir()
    for number in range(3):
        (data / f"{number}.txt").write_text(f"Some text, number {number}.\n" * 50, encoding="utf-8")
    run.mkdir()
    rows = [build_payload("train", step, {"loss": 2.0}) for step in range(1, 9)]
    (run / "metrics.jsonl").write_text("".join(encode_payload(row) + "\n" for row in rows), encoding="utf-8")
    lines = [line.format(data=data, run=run, near=near, new=tmp_path / f"new{i}") for i, line in enumerate(LOADS)]
    ended = fresh([sys.executable, "-c", LOADED, *lines])
    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stderr.splitlines() if re.fullmatch(r"\d( \w+)*", line)]
    for line, found, loaded in zip(lines, said, LOADS.values(), strict=True):
        code, *modules = found.split()
        assert (code, {*modules} <= {*loaded.split()}) == ("2" if "myrun" in line else "0", True), (line, ended.stderr)
