"""Verbs that only look at files start at once: torch, whose import takes seconds, is not loaded for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import environment
from trainer.metrics.payload_contract import build_payload, encode_payload

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
