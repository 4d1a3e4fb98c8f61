"""Verbs that only look at files start at once: torch, whose import takes seconds, is not loaded for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import environment

PROGRAM = """
import sys
from trainer.cli.main import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print("torch" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "verb",
    [
        "data inspect {data}",
        "data verify {data}",
        "data build text --out {new} --modality prose={data}/*.txt",
        "data synth key-recall --out {new} --groups 8 --streams 2",
        "init {data} --out {new}",
        "config docs",
    ],
)
def test_a_verb_that_looks_at_files_needs_no_torch(tmp_path: Path, verb: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number in range(3):
        (data / f"{number}.txt").write_text(f"Some text, number {number}.\n" * 50, encoding="utf-8")
    arguments = [part.format(data=data, new=tmp_path / "new") for part in verb.split()]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], env=environment(), capture_output=True, text=True, check=False
    )
    assert ended.stderr.splitlines()[-1:] == ["False"], ended.stderr
