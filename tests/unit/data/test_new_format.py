"""A new format is one row of the table: nothing else knows formats by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.runs import ROOT, losses
from trainer.data import formats as registry
from trainer.data.documents import Kind
from trainer.data.formats import Format, file_kind, takes_option
from trainer.data.layout import discover, discover_direct
from trainer.data.token_formats import load_npy
from trainer.tools.inspection.survey import guess

# Runs the program several times in one process, with a row more in the table.
SCRIPT = """
import json, sys
from trainer.data import formats as registry
from trainer.data.token_formats import load_npy
registry.FORMATS = {**registry.FORMATS, "ids": registry.Format((".ids",), load_npy, kind="ids", options=("eod",))}
from trainer.cli.main import run
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["train", *arguments]
    try:
        run()
    except SystemExit as end:
        assert not end.code, (arguments, end.code)
"""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two modalities of ids below 200, 0 ending a document, in files of an extension that no format has."""
    generator = np.random.default_rng(0)
    for number in range(4):
        path = tmp_path / "corpus" / "ab"[number % 2] / f"s{number}.ids"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.save(file, np.where(np.arange(4000) % 50, generator.integers(1, 200, 4000), 0).astype(np.uint8))
    return tmp_path / "corpus"


@pytest.fixture
def ids_format(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Format((".ids",), load_npy, kind="ids", options=("eod",))
    monkeypatch.setattr(registry, "FORMATS", {**registry.FORMATS, "ids": row})


@pytest.mark.usefixtures("ids_format")
def test_layout_and_guess_follow_the_table(corpus: Path) -> None:
    found = discover([str(corpus)])
    assert [stream.relative_path for stream in found.streams] == ["a/s0.ids", "a/s2.ids", "b/s1.ids", "b/s3.ids"]
    assert len(discover_direct([str(corpus / "**")])) == 4
    guessed = guess(found.streams)
    assert (guessed.kind, guessed.formats, guessed.dtype) == ("ids", ("ids",), None)
    assert takes_option("ids", "eod")
    assert not takes_option("ids", "dtype")


def test_the_program_reads_inspects_inits_and_trains_it(corpus: Path, tmp_path: Path) -> None:
    config, run = tmp_path / "x.toml", tmp_path / "run"
    short = ["--set", "eval.every=0", "--set", "scheduler.warmup_steps=1", "--set", "metrics.log_interval=1"]
    reading = ["--tokenizer", "ids", "--vocab-size", "200", "--eod", "0"]
    commands = [
        ["data", "inspect", str(corpus), *reading, "--json"],
        ["data", "verify", str(corpus), *reading],
        ["init", str(corpus), "--out", str(config), "--eod", "0", "--minutes", "0"],
        ["--config", str(config), "--run-dir", str(run), "--steps", "3", "--stdout", "off", *short],
    ]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    inspected, end = json.JSONDecoder().raw_decode(done.stdout)
    assert inspected["totals"]["tokens"] == 16_000
    assert {stream["format"] for stream in inspected["streams"]} == {"ids"}
    assert "4 streams, 324 documents, 16,000 tokens: no damage" in done.stdout[end:]
    text = config.read_text()
    assert 'tokenizer = "ids"' in text
    assert "vocab_size = 200" in text
    assert len(losses(run / "metrics.jsonl")) == 3


def test_every_format_has_a_row_in_the_docs() -> None:
    page = (ROOT / "docs" / "mixing.md").read_text(encoding="utf-8")
    assert [name for name in registry.FORMATS if f"\n| `{name}` | " not in page] == []


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("text", b"{}", "text"),
        ("jsonl", b'\n{"text": "a"}\n{"tokens": [1]}\n', "text"),
        ("jsonl", b'{"tokens": [1]}\n', "ids"),
        ("jsonl", b"{not JSON", "text"),
        ("jsonl", b"[1]", "text"),
        ("npy", b"", "ids"),
        ("bin", b"", "ids"),
        ("megatron", b"", "ids"),
        ("my_package.formats:load", b"", "text"),
    ],
)
def test_the_kind_of_a_file_is_its_formats_or_what_its_first_record_holds(
    tmp_path: Path, name: str, content: bytes, kind: Kind
) -> None:
    (tmp_path / "file").write_bytes(content)
    assert file_kind(tmp_path / "file", name) == kind
