"""Two ranks of which one has read all its data, or never had any: the run continues with masked rows, resumed or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import status
from tests.support.runs import losses, read_rows, run, train, write_tiny_config

pytestmark = pytest.mark.distributed

MASKED = "stream_mixing/masked_share"
ENDLESS = ("train.steps=9999", "data.mixing.repeat=false")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, Path]:
    """A run to the end of its data, whose ranks have pools and streams of their own; every step is saved."""
    directory = tmp_path_factory.mktemp("whole")
    corpus = directory / "corpus" / "a"
    corpus.mkdir(parents=True)
    for name, characters in (("one", 150), ("two", 600)):  # one group each
        (corpus / f"{name}.txt").write_text("abcdefghij" * (characters // 10), encoding="utf-8")
    config = write_tiny_config(directory, "[checkpoint]\nevery = 1\nkeep_last = 99\n")
    source = f'data.source=[{{name="only",root="{directory / "corpus"}"}}]'
    sets = ("data.mixing.batching_mode=device_per_stream", "data.max_group_cells=64", "train.micro_batches=1")
    train(config, directory / "run", source, *sets, "data.mixing.batch_size_by_modality={}", *ENDLESS, nproc=2)
    return directory / "run" / "config.resolved.toml", directory / "run"


def resumed(whole: tuple[Path, Path], run_dir: Path, step: int, *sets: str) -> str:
    config, before = whole
    more = ("--resume", before / "checkpoints" / f"step_{step:08d}")
    return train(config, run_dir, *ENDLESS, *sets, more=more, nproc=2)


def test_a_rank_that_had_read_everything_at_the_checkpoint_continues_masked(uninterrupted, tmp_path):
    _, before = uninterrupted
    rows = {step: row for (_, step), row in read_rows(before / "metrics.jsonl").items()}
    masked = [step for step, row in rows.items() if row[MASKED] == 1.0]
    assert masked == list(range(masked[0], max(rows) + 1))
    assert 1 < masked[0] < max(rows) - 5
    step = masked[0] + 2
    said = resumed(uninterrupted, tmp_path / "run", step)
    assert "of 2 has nothing to read, and runs fully masked batches" in said
    whole = losses(before / "metrics.jsonl")
    assert losses(tmp_path / "run" / "metrics.jsonl") == {at: loss for at, loss in whole.items() if at > step}
    assert (status(tmp_path / "run")["state"], status(tmp_path / "run")["reason"]) == ("done", "data exhausted")


def test_a_run_that_had_read_everything_ends_as_it_did_or_continues_with_another_epoch(uninterrupted, tmp_path):
    last = status(uninterrupted[1])["last_step"]
    resumed(uninterrupted, tmp_path / "run", last)
    found = status(tmp_path / "run")
    assert (found["state"], found["reason"], found["last_step"]) == ("done", "data exhausted", last)
    resumed(uninterrupted, tmp_path / "more", last, "data.mixing.repeat=true", f"train.steps={last + 4}")
    rows = {step: row for (_, step), row in read_rows(tmp_path / "more" / "metrics.jsonl").items()}
    assert [(step, row["blend/ended_sources"]) for step, row in rows.items()] == [(last + k, 0) for k in range(1, 5)]


def test_a_source_that_ends_is_a_finding(tmp_path):
    config = write_tiny_config(tmp_path)
    for number in (1, 2, 3):
        (tmp_path / "corpus" / "b" / f"stream{number}.jsonl").unlink()
    text = config.read_text()
    once = text.replace('modalities = ["b"]', 'modalities = ["b"]\nweight = 5.0\nmixing = { repeat = false }')
    assert once != text
    config.write_text(once)
    train(config, tmp_path / "run", "train.steps=120")
    said = run("diagnose", tmp_path / "run", "--json")
    assert "1 source without further documents, the first by step" in said.stdout
