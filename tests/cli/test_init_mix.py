"""The mix that `train init` writes: each modality is drawn in the share that was asked for, and the run ends in minutes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.in_process import program
from tests.unit.preview.test_forecast import real_run
from trainer.config.load import load_config
from trainer.data.layout import discover_nested
from trainer.tools.init.sizing import MIXES, choose_sizes, parts_of
from trainer.tools.verbs.init import init
from trainer.training.setup.plan import make_plan

LENGTHS = {"long": [6000] * 15, "few": [9000, 700, 300], "short": [120] * 160}
"""Tokens of the documents of a modality: full rows, rows that few documents leave empty, cells that are half padding."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("mix")
    generator = np.random.Generator(np.random.Philox(3))
    for modality, lengths in LENGTHS.items():
        (root / "data" / modality).mkdir(parents=True)
        for stream in range(2):
            texts = ["".join(map(chr, generator.integers(97, 123, length))) for length in lengths]
            lines = [json.dumps({"text": text}) for text in texts]
            (root / "data" / modality / f"{stream}.jsonl").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture
def written(corpus, monkeypatch, capsys) -> None:
    """`x.toml` in the working directory, for the whole corpus."""
    monkeypatch.chdir(corpus)
    init(["data"], out="x.toml", force=True, minutes=0)
    capsys.readouterr()


def drawn(config: Path) -> dict[str, float]:
    """Share of each source in the target tokens that the real pipeline draws."""
    plan = make_plan(load_config(config, ["train.steps=1500", "train.micro_batches=2"]), config, 1)
    tokens = real_run(plan, 1).tokens
    return {name: count / sum(tokens.values()) for name, count in tokens.items()}


@pytest.mark.parametrize("mix", MIXES)
def test_the_tokens_that_are_drawn_have_the_shares_that_were_asked_for(corpus, monkeypatch, mix):
    monkeypatch.chdir(corpus)
    init(["data"], out="x.toml", force=True, weights=mix, minutes=0)
    plan = make_plan(load_config("x.toml"), Path("x.toml"), 1)
    found = discover_nested(Path("data"))
    lengths = [np.array(LENGTHS[stream.modality]) for stream in found]
    sizes = choose_sizes(found, lengths)
    tokens = {part.modality: part.tokens for part in parts_of(found, lengths, sizes, mix)}
    power = {"tokens": 1.0, "sqrt": 0.5, "equal": 0.0}[mix]
    asked = {name: math.pow(count, power) for name, count in tokens.items()}
    assert [source.table.weight for source in plan.sources] != [1.0] * 3
    for name, share in drawn(Path("x.toml")).items():
        # 3,000 draws: the standard error of the largest share is 1 %, of the smallest about 4 % of itself.
        assert share == pytest.approx(asked[name] / sum(asked.values()), rel=0.1, abs=0.01)


@pytest.mark.usefixtures("written")
def test_equal_weights_draw_another_mix_which_preview_and_check_show_and_warn_about(capsys):
    ones = [part for name in LENGTHS for part in ("--set", f"data.source.{name}.weight=1.0")]
    good = program(["check", "--config", "x.toml"], capsys)
    assert "of what is drawn;" not in " ".join((good.stdout + good.stderr).split())
    assert re.search(r"#     long: \d\d\.\d% of the corpus, \d\d\.\d% of what is drawn", good.stdout)
    for verb in ("preview", "check"):
        skewed = program([verb, "--config", "x.toml", *ones], capsys)
        said = " ".join((skewed.stdout + skewed.stderr).split())
        assert re.search(r"data\.source\.weight: .*few is \d+\.\d% of the corpus and .* of what is drawn", said)
        suggested = dict(re.findall(r"(few|long|short) = ([\d.]+)", said.partition("come from the weights")[2]))
    assert suggested.keys() == LENGTHS.keys()
    asked = {source.name: source.weight for source in load_config("x.toml").data.source}
    assert {name: float(weight) for name, weight in suggested.items()} == pytest.approx(asked, rel=0.01)


@pytest.mark.usefixtures("written")
def test_an_underdrawn_modality_alone_is_warned_about(capsys):
    weights = {source.name: source.weight for source in load_config("x.toml").data.source}
    few = ["--set", f"data.source.few.weight={weights['few'] / 5}"]
    shown = json.loads(
        program(["preview", "--config", "x.toml", "--json", *few], capsys).stdout.partition("\nwrote")[0]
    )
    (found,) = [each for each in shown["warnings"] if each["key"] == "data.source.weight"]
    assert found["problem"].startswith("few is ")
    assert "long is" not in found["problem"]


@pytest.mark.usefixtures("written")
def test_a_blend_that_is_meant_to_change_gives_no_warning(capsys):
    fading = 'data.source.few.weight={schedule="linear",points={0=1.0,50=0.0}}'
    assert "of what is drawn;" not in " ".join(
        program(["preview", "--config", "x.toml", "--set", fading], capsys).stdout.split()
    )


def test_paths_that_name_one_modality_each_become_sources_and_others_stay_one(corpus, monkeypatch):
    monkeypatch.chdir(corpus)
    init(["data/long/*", "data/short/0.jsonl", "data/short/1.jsonl"], out="x.toml", force=True, minutes=0)
    sources = load_config("x.toml").data.source
    assert {source.name: source.paths for source in sources} == {
        "long": ["data/long/*"],
        "short": ["data/short/0.jsonl", "data/short/1.jsonl"],
    }
    init(["data/*/*"], out="x.toml", force=True, minutes=0)
    (whole,) = load_config("x.toml").data.source
    assert (whole.paths, whole.weight) == (["data/*/*"], 1.0)


@pytest.mark.usefixtures("written")
def test_a_run_ends_in_minutes_as_a_few_timed_steps_say(capsys):
    whole = load_config("x.toml").train.steps
    assert program(["init", "data", "--out", "x.toml", "--force", "--minutes", "0.02"], capsys).returncode == 0
    found = re.search(r"steps = (\d+) .* on this machine \(([\d.]+) s per step\)", Path("x.toml").read_text())
    assert found is not None
    steps, a_step = int(found[1]), float(found[2])
    assert steps == load_config("x.toml").train.steps < whole
    assert steps == 20 or steps * a_step <= 1.4


def test_a_trial_that_fails_is_said_and_costs_the_prediction_alone(corpus, monkeypatch, capsys):
    monkeypatch.chdir(corpus)
    monkeypatch.setattr("sys.executable", "/bin/false")
    ended = program(["init", "data"], capsys)
    assert ended.returncode == 0
    assert "# Note: the time of a step could not be measured: " in ended.stdout
    assert "on this machine" not in ended.stdout
