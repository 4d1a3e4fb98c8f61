"""scripts/families.py: what it says of a report, and of models that are installed wherever the extra is."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path

import pytest

from scripts import families
from tests.support.in_process import program
from tests.support.runs import write_tiny_config

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs the extra families"
)


def row(name: str) -> tuple[str, str, str]:
    return families.row_of(name, dict(families.families())[name])


def test_torch_s_own_layers_are_exact():
    assert row("nn.GRU")[:2] == ("nn.GRU", "exact")
    assert row("nn.LSTM")[:2] == ("nn.LSTM", "exact")


def test_the_table_has_every_family():
    with families.TABLE.open(encoding="utf-8", newline="") as file:
        names = [name for name, *_ in csv.reader(file)]
    assert names[1:-1] == [*dict(families.families()), *families.NOT_TRIED]


@needs_transformers
@pytest.mark.parametrize(
    "family", ["mamba", *(pytest.param(n, marks=pytest.mark.slow) for n in ("falcon_mamba", "mamba2"))]
)
def test_check_refuses_hugging_face_s_mamba_in_one_sentence(family: str, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(families._SMALL, "vocab_size", 257)
    text = "from scripts import families\n"
    text += "def build(vocab_size, dim, num_layers, family):\n    return families.hugging_face(family)\n"
    (tmp_path / "wrapped.py").write_text(text)
    monkeypatch.setattr(sys, "path", list(sys.path))
    options = ["--set", "model.target=wrapped:build", "--set", f'model.args={{family="{family}"}}']
    ended = program(["check", "--config", write_tiny_config(tmp_path), *options], capsys)
    assert ended.returncode == (0 if family == "mamba2" else 2), ended.stderr
    if ended.returncode:
        line = next(line for line in ended.stderr.splitlines() if "model.target=wrapped:build: model.target: " in line)
        assert "breaks carry: cells of 6 tokens differ" in line
        assert 'set model.trust = ["carry"]' in line
    sys.modules.pop("wrapped", None)
