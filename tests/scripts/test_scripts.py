"""Scripts: what those of the noise scale and of the families say."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path

import pytest

from scripts import families
from scripts.gns_bias import Setting, run
from tests.support.in_process import program
from tests.support.runs import write_tiny_config

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs the extra families"
)


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
        assert "set model.contract = false" in line
    sys.modules.pop("wrapped", None)


FEW = {"length": 16, "documents": 768, "files": 48, "trained": 10, "steps": 24}


@pytest.mark.cuda
@pytest.mark.parametrize(
    "setting",
    [
        Setting("carried", rows=4, m=4, sizes=(2.0, 4.3), spread=4, **FEW),
        Setting("aligned, 2 shards", rows=2, m=4, sizes=(0.6, 2.3), spread=8, shards=2, runs_on=False, **FEW),
    ],
    ids=lambda setting: setting.name,
)
def test_it_is_that_of_independent_rows_and_its_bounds_hold(setting, device):
    found = run(setting, str(device), seeds=6, num_rows=1200)
    assert found["spread"] == setting.spread
    away = abs(found["b"] - found["truth"])
    assert away < 0.15 * found["truth"] + 2 * (found["b_se"] ** 2 + found["truth_se"] ** 2) ** 0.5, found
    # Of 12 or so, in pairs of one run, against a truth that has an error itself.
    assert sum(found["inside"]) >= 0.6 * len(found["inside"]) > 4, found


def test_where_documents_are_too_few_there_is_no_value():
    found = run(Setting("few", rows=4, m=4, length=16, documents=32, files=8, steps=6), seeds=1, num_rows=40)
    assert found["groups"] < 4
    assert "b" not in found
    assert "rows of the same document" in found["reason"]
