"""Text is tokenized once per node, before the ranks meet, and what is read does not change by it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.grouped import train
from tests.support.runs import TIMEOUT_SEC, command, environment, losses, write_tiny_config

pytestmark = pytest.mark.distributed
tokenizers = pytest.importorskip("tokenizers", reason="extra tokenizers")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a run on more text than is tokenized where it is read, with a tokenizer.json."""
    path = write_tiny_config(tmp_path)
    lines = "".join(f"{json.dumps({'text': f'line {i} of some words ' * 20})}\n" for i in range(2500))
    for number in range(4):
        (tmp_path / "corpus" / "a" / f"stream{number}.jsonl").write_text(lines)
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    words.train_from_iterator(["line of some words"], trainer)
    words.save(str(tmp_path / "tokenizer.json"))
    path.write_text(path.read_text().replace("[data]\n", f'[data]\ntokenizer = "{tmp_path}/tokenizer.json"\n'))
    return path


def fresh(config: Path, name: str, *more: str, nproc: int | None = None) -> subprocess.CompletedProcess[str]:
    """A run in processes of its own, which may have others for the tokenizing."""
    line = command(("--config", config, "--run-dir", config.parent / name, "--steps", 3, *more), nproc=nproc)
    env = environment({"XDG_CACHE_HOME": str(config.parent / "cache")})
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=TIMEOUT_SEC, check=False)


@pytest.mark.parametrize("nproc", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_one_process_tokenizes_for_all_runs_and_says_so(config: Path, nproc: int | None) -> None:
    first = fresh(config, "first", nproc=nproc)
    assert first.returncode == 0, first.stderr
    assert first.stderr.count("INFO tokenizing source first (") == 1, first.stderr
    assert "tokenizing source second" not in first.stderr  # little text
    # A process of the tests' server may have no others: it reads what is there, or tokenizes what it reads.
    cached = {"XDG_CACHE_HOME": str(config.parent / "cache")}
    assert "tokenizing" not in train(config, config.parent / "again", "train.steps=3", nproc=nproc, extra=cached)
    train(config, config.parent / "whole", "train.steps=3", nproc=nproc)
    first, again, whole = (losses(config.parent / name / "metrics.jsonl") for name in ("first", "again", "whole"))
    assert first == again == whole
    assert len(whole) == 3
    for name, extra in (("ended", cached), ("ended_whole", {})):
        train(config, config.parent / name, "train.steps=3", "data.eod=7", nproc=nproc, extra=extra)
    ended, whole = (losses(config.parent / name / "metrics.jsonl") for name in ("ended", "ended_whole"))
    assert ended == whole != first, "those of the cache are without the id that ends documents"
