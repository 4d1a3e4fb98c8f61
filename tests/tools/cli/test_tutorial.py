"""What README and docs/tutorial.md show works as it stands there."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys

import pytest

from tests.support.in_process import program
from tests.support.runs import PROGRAM, ROOT, environment, read_rows, run

TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
# The same commands, smaller: what they show does not depend on the size.
SMALLER = [
    (r"train init (.*)", r"train init \1 && sed -i 's/^seq_len = [0-9]*/seq_len = 64/' mine.toml"),
    (r"(train --config mine\.toml)", r"\1 --set model.dim=16 --set model.num_layers=1"),
    (r" --set model\.dim=64", ""),
    (r"--steps 120", "--steps 12"),
    (r"--steps 140", "--steps 16"),
    (r"--steps 60", "--steps 30"),
]


def blocks(language: str, page: str = TUTORIAL) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


@pytest.mark.slow
def test_the_commands_run_and_find_what_the_tutorial_says(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "train").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{PROGRAM}" "$@"\n')
    (programs / "train").chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    script = "set -eu\n"
    for number, block in enumerate(blocks("bash")):
        for pattern, replacement in SMALLER:
            block = re.sub(pattern, replacement, block)
        script += f"{{\n{block}}} > out{number} 2>&1 || {{ echo failed: block {number}; cat out{number}; exit 1; }}\n"
    env = environment({"PATH": f"{programs}:/usr/bin:/bin", "COLUMNS": "120"})
    result = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    outputs = [
        path.read_text(encoding="utf-8") for path in sorted(tmp_path.glob("out*"), key=lambda p: int(p.name[3:]))
    ]
    build, init, check, _, healthy, forgetful, listed, sample, resumed = outputs
    assert re.search(r"mail: \d+ documents, 1 stream, ", build)
    (excerpt,) = blocks("toml")
    comments = re.findall(r"   # (.*)", excerpt)[1:]  # the first counts the passes over data that differ with Python
    assert len(comments) == 2
    for comment in comments:
        assert comment in (tmp_path / "mine.toml").read_text(encoding="utf-8")
    assert "next: train check --config mine.toml" in init
    assert "mine.toml is valid. Derived values for 1 rank" in check
    assert re.search(r"\d+ of \d+ rules judged the run, \d+ could not yet, \d+ had nothing to measure", healthy)
    assert "error false_evictions_stale" in forgetful
    assert "try ledger.stale_threshold = " in forgetful
    assert re.search(r"runs/mine-forgetful.*false_evictions_stale", listed)
    assert sample.startswith("def ")
    assert "done at step 16 of 16" in resumed
    assert (tmp_path / "both.html").stat().st_size > (tmp_path / "mine.toml").stat().st_size


README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_shortest_config_trains_on_a_corpus_of_one_s_own(tmp_path):
    files = tmp_path / "files"
    (files / "a").mkdir(parents=True)
    for number in range(40):
        (files / "a" / f"{number}.txt").write_text(f"Note {number} in plain words. " * 50)
    glob = f"words={files}/**/*.*"
    built = run("data", "build", "text", "--out", "data/mine", "--modality", glob, cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    (config,) = blocks("toml", README)
    (tmp_path / "mine.toml").write_text(config)
    small = ["--steps", "20", "--set", "model.dim=16", "--set", "data.seq_len=16", "--set", "eval.every=10"]
    result = run("--config", "mine.toml", *small, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    rows = read_rows(run_dir / "metrics.jsonl")
    assert rows["train", 20]["loss"] < rows["train", 1]["loss"]
    assert "eval_loss" in rows["eval", 20]


def test_the_names_in_readme_and_architecture_are_there():
    """Names of code import, and every program of examples/ is linked."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tops = "|".join(path.stem for path in (ROOT / "trainer").iterdir() if path.stem.isidentifier())
    walks = re.findall(rf"`((?:{tops})(?:\.[A-Za-z_]+)+)`", page.replace(".toml", ""))
    assert len(walks) > 50
    for name in [*re.findall(r"`(trainer\.[\w.]+)`", README), *(f"trainer.{walk}" for walk in walks)]:
        pkgutil.resolve_name(name.removesuffix(".resolved"))
    for example in (ROOT / "examples").glob("*.py"):
        assert f"(examples/{example.name})" in README


def test_the_tour_names_verbs_and_options_that_there_are(capsys):
    (tour,) = (block for block in blocks("", README) if "train init" in block)
    lines = [line.split("#")[0] for line in tour.splitlines() if line.startswith("train ")]
    assert len(lines) == 8
    for line in lines:
        words = line.split()[1:]
        verb = [word for word in words[:3] if re.fullmatch("[a-z]+", word)]
        shown = program([*verb, "--help"], capsys)
        assert shown.returncode == 0, line
        for option in (word for word in words if word.startswith("--")):
            assert option in shown.stdout, line
