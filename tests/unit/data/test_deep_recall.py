"""The corpus whose answers need depth: an oracle that sees k bytes reaches the closed form, and a small model learns."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.support.in_process import program, train_here
from tests.support.runs import read_rows, write_tiny_config
from trainer.tools.corpus.builders import NUM_SYMBOLS, best_recall_loss, build_deep_recall

MEMORIES = (1, 63, 64, 100, 128, 500, 1024, 4096, 16383, 16384)


def texts_of(corpus: Path) -> list[str]:
    return [json.loads(line)["text"] for path in corpus.rglob("*.jsonl") for line in path.read_text().splitlines()]


def seen(text: str, at: int, memory: int) -> str:
    """The answer at a place, by the letters that stand there in records before, `memory` bytes back at most; empty: unseen."""
    back = range(at - 64, max(at - memory, 0) - 1, -64)
    return next((str("ABCDEFGH".index(text[place])) for place in back if text[place] in "ABCDEFGH"), "")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    out = tmp_path_factory.mktemp("deep") / "data"
    build_deep_recall(out)
    return texts_of(out)


def test_an_oracle_with_a_memory_of_k_bytes_reaches_the_closed_form(texts: list[str]) -> None:
    answers = [(text, at) for text in texts for at in range(len(text)) if text[at].isdigit()]
    assert len(answers) == 64 * 16 * 8
    for memory in MEMORIES:
        found = [seen(text, at, memory) for text, at in answers]
        # What it sees is right, and what it does not see it cannot know: the symbols are independent and even.
        assert all(guess in ("", text[at]) for guess, (text, at) in zip(found, answers, strict=True))
        unseen = Counter(text[at] for guess, (text, at) in zip(found, answers, strict=True) if not guess)
        assert all(abs(n - unseen.total() / 8) < 5 * math.sqrt(unseen.total() / 8) + 1 for n in unseen.values())
        loss, best = math.log(NUM_SYMBOLS) * unseen.total() / len(answers), best_recall_loss(memory)
        share = best / math.log(NUM_SYMBOLS)
        assert abs(loss - best) < 4 * math.log(NUM_SYMBOLS) * math.sqrt(share * (1 - share) / len(answers)) + 1e-12
    assert best_recall_loss(63) == pytest.approx(math.log(8))
    assert best_recall_loss(16384) == 0
    harmonic = [np.sum(1 / np.arange(1, n + 1)) for n in (16, 256)]
    assert best_recall_loss(1024) == pytest.approx(math.log(8) * (1 - harmonic[0] / harmonic[1]))


def test_a_document_is_made_of_fields_that_store_and_ask_in_turn(texts: list[str]) -> None:
    for text in texts[:8]:
        for key in range(8):
            fields = [text[at : at + 8] for at in range(8 * key, len(text), 64)]
            assert {field[0] for field in fields} == {"abcdefgh"[key]}
            assert {field[3:] for field in fields} == {"....."}
            assert "".join(field[1] for field in fields).replace(".", "") == "!?" * 16
        assert any(char.isdigit() for char in text[-64:])


def test_a_small_model_learns_what_is_near(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--shortest=6", "--keys=1", "--longest=12", "--asks=40", "--streams=2", "--documents=32")
    assert not program(["data", "synth", "deep-recall", "--out", str(tmp_path / "data"), *sizes], capsys).returncode
    sets = (
        *(f'data.source=[{{name="recall", layout="nested", root="{tmp_path / "data"}"}}]', "data.seq_len=24"),
        *("data.mixing={num_streams_mixed=2, batch_size=16}", "model.dim=48", "model.num_layers=1"),
        *("objective.token_types=true", "optimizer.lr=1e-2", "train.micro_batches=1", "gns.enabled=false"),
        *("train.steps=250", "metrics.log_interval=50", "ledger.probe_every=0"),
    )
    train_here(write_tiny_config(tmp_path), tmp_path / "run", *sets)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert rows["train", 1]["token_type/digit/loss"] > best_recall_loss(5, 6, 12)
    assert rows["train", 250]["token_type/digit/loss"] < 0.5 * best_recall_loss(5, 6, 12)


@pytest.mark.parametrize("option", ["--keys=22", "--longest=100", "--documents=3", "--streams=0"])
def test_impossible_sizes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    refused = program(["data", "synth", "deep-recall", "--out", str(tmp_path / "data"), option], capsys)
    assert refused.returncode == 2
    assert option.partition("=")[0] in refused.stderr
