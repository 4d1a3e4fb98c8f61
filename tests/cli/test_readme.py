"""What README shows works as it stands there."""

from __future__ import annotations

import importlib
import re

from tests.support.in_process import program
from tests.support.runs import ROOT, make_corpus, read_rows, run

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_shortest_config_trains_on_a_corpus_of_one_s_own(tmp_path):
    files = tmp_path / "files"
    make_corpus(files)
    (files / "a" / "note.txt").write_text("A note in plain words. " * 50)
    glob = f"words={files}/**/*.*"
    built = run("data", "build", "text", "--out", "data/mine", "--modality", glob, cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    (config,) = blocks("toml")
    (tmp_path / "mine.toml").write_text(config)
    small = ["--steps", "20", "--set", "model.dim=16", "--set", "data.seq_len=16", "--set", "eval.every=10"]
    result = run("--config", "mine.toml", *small, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    rows = read_rows(run_dir / "metrics.jsonl")
    assert rows["train", 20]["loss"] < rows["train", 1]["loss"]
    assert "eval_loss" in rows["eval", 20]


def test_links_lead_somewhere():
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        ROOT / "examples/README.md",
    ]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_parts_are_where_the_table_says():
    """`trainer...` names import, and every program of examples/ is linked."""
    for name in re.findall(r"`(trainer\.[\w.]+)`", README):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    for example in (ROOT / "examples").glob("*.py"):
        assert f"(examples/{example.name})" in README


def test_the_tour_names_verbs_and_options_that_there_are(capsys):
    (tour,) = (block for block in blocks("") if "train init" in block)
    lines = [line.split("#")[0] for line in tour.splitlines() if line.startswith("train ")]
    assert len(lines) == 8
    for line in lines:
        words = line.split()[1:]
        verb = [word for word in words[:3] if re.fullmatch("[a-z]+", word)]
        shown = program([*verb, "--help"], capsys)
        assert shown.returncode == 0, line
        for option in (word for word in words if word.startswith("--")):
            assert option in shown.stdout, line
