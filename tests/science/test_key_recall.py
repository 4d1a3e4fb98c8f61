"""What losing states costs, where it can be seen: the shipped key-recall config under different ledgers.

The runs are real ones, assembled from `train_configs/key_recall.toml`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.support.in_process import program, train_here
from tests.support.runs import ROOT, read_rows
from trainer.tools.corpora import REVEALED, build_key_recall
from trainer.tools.diagnostics.diagnose import diagnose
from trainer.tools.runs.load import load_run

CONFIG = ROOT / "train_configs" / "key_recall.toml"
FALSE = "ledger/false_evictions/stale"
COLD = "ledger/cold_starts"
ANSWERS = "token_type/digit/loss"
STALE = ("ledger.wipe_mode=periodic_stale", "ledger.stale_threshold=5", "ledger.capacity=4096")
SMALL = ("model.dim=64", "optimizer.lr=4e-3")


class Result(NamedTuple):
    """Loss of the answers over the last 100 steps, and counters over the whole run."""

    loss: float
    counts: dict[str, float]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("key_recall") / "data"
    build_key_recall(out)
    return out


def source_override(corpus: Path) -> str:
    return f'data.source=[{{name="recall",root="{corpus}"}}]'


def train(corpus: Path, directory: Path, *sets: str, steps: int) -> Result:
    """Train the shipped config, changed by `sets`."""
    own = ("eval.every=0", "checkpoint.every=0", "metrics.log_interval=1", f"train.steps={steps}")
    train_here(CONFIG, directory / "run", source_override(corpus), *own, *sets)
    rows = [row for (mode, _), row in read_rows(directory / "run" / "metrics.jsonl").items() if mode == "train"]
    counts = {key: sum(row[key] for row in rows) for key in rows[0] if key.startswith("ledger")}
    answers = [row[ANSWERS] for row in rows[-100:] if ANSWERS in row]  # a step may have none
    return Result(sum(answers) / len(answers), counts)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_with_its_state_the_model_learns_to_answer(corpus: Path, tmp_path: Path) -> None:
    healthy = train(corpus, tmp_path, steps=750)
    assert healthy.loss < 0.05
    assert healthy.counts[COLD] == 0


def test_a_stale_threshold_that_is_too_short_shows_in_loss_and_counts(corpus: Path, tmp_path: Path) -> None:
    stale = train(corpus, tmp_path, *STALE, *SMALL, steps=250)
    assert stale.loss > 0.5
    assert stale.counts[COLD] == stale.counts[FALSE] > 200


def test_without_state_nothing_is_learned_and_wipes_are_cold_starts_alone(corpus: Path, tmp_path: Path) -> None:
    forgetful = train(corpus, tmp_path, *SMALL, "ledger.wipe_mode=full", "ledger.wipe_every=1", steps=150)
    assert 1.9 < forgetful.loss < 2.5
    assert forgetful.counts["ledger_wipe_count"] == 150
    assert forgetful.counts[FALSE] == forgetful.counts["ledger/false_evictions/lru"] == 0
    assert forgetful.counts[COLD] > 100


def test_the_shipped_config_runs_on_what_the_program_synthesises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = program(["data", "synth", "key-recall", "--out", tmp_path / "data", "--groups", 256], capsys)
    assert made.returncode == 0, made.stderr
    assert "2.0794 nats each without carried state" in made.stderr
    train_here(CONFIG, tmp_path / "run", source_override(tmp_path / "data"), "train.steps=20")
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert "token_type/digit/loss" in rows["train", 20]
    assert rows["train", 20][COLD] == 0


IGNORES = """
from trainer.model import build as build_ours

def build(vocab_size, dim, num_layers):
    model = build_ours(vocab_size, dim=dim, num_layers=num_layers)
    forward = model.forward
    model.forward = lambda tokens, state=None: forward(tokens, state=None)
    return model
"""


@pytest.mark.parametrize("carries", [True, False])
def test_carrying_is_worth_what_the_answers_are(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carries: bool
) -> None:
    """A cell has two answers among its six bytes, each worth up to ln 8: at most 0.69 nats per token, and more from zero, where
    a model that is used to knowing the answer is sure of a wrong one. To a model that ignores its state nothing."""
    (tmp_path / "ignores.py").write_text(IGNORES)
    monkeypatch.syspath_prepend(tmp_path)
    steps, own = (250, ()) if carries else (100, ('model.target="ignores:build"', "model.contract=false"))
    sets = (source_override(corpus), f"eval.every={steps // 5}", "eval.depth=true", "eval.holdout_fraction=0.1")
    train_here(CONFIG, tmp_path / "run", *sets, f"train.steps={steps}", *own)
    row = read_rows(tmp_path / "run" / "metrics.jsonl")["eval", steps]
    gain, error = (row[f"eval/depth/beyond_cell/carry_gain{end}"] for end in ("", "_se"))
    assert gain > max(0.5, 4 * error) if carries else gain == 0.0
    rulings = {ruling.rule.name: ruling for ruling in diagnose(load_run(tmp_path / "run")).rulings}
    assert rulings["context_unused"].outcome.verdict == ("healthy" if carries else "finding")


def test_only_answers_are_digits_and_cells_give_nothing_away(corpus: Path, tmp_path: Path) -> None:
    documents = [
        json.loads(line)["text"]
        for stream in sorted((corpus / "recall").iterdir())
        for line in stream.read_text(encoding="utf-8").splitlines()
    ]
    assert len(documents) == 1024
    pairs = Counter()
    for text in documents:
        cells = [text[start : start + 6] for start in range(0, len(text), 6)]
        first, second = (REVEALED.index(letter) for letter in cells[0][1:3])
        assert cells == [f"<{REVEALED[first]}{REVEALED[second]}>.\n"] + [f"a{first}b{second}.\n"] * 15
        pairs[first, second] += 1
    # All pairs of two independent, even symbols: 16 of each expected.
    assert len(pairs) == 64
    assert max(pairs.values()) < 40
    build_key_recall(tmp_path / "again")
    assert (tmp_path / "again" / "manifest.json").read_bytes() == (corpus / "manifest.json").read_bytes()
