"""The probe of carry in real runs: when it measures, what it finds where nothing is learnt, and that it resumes bit for bit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support import grouped
from tests.support.fault_runs import rows_of as rows
from tests.support.runs import make_corpus, read_rows, write_tiny_config
from trainer.lab.carry_probe import SAMPLED_KEYS, SHARE_KEY

pytestmark = pytest.mark.distributed

AGE, DRIFT, GAIN, GAP = SAMPLED_KEYS
PROBES = ("ledger.probe_every=4",)
Row = dict[str, float]


def train(directory: Path, name: str, *sets: str, nproc: int | None = 2, steps: int = 12) -> Path:
    """A tiny run of two ranks; returns its directory."""
    words = (f"train.steps={steps}", "checkpoint.every=6", *sets)
    said = grouped.train(write_tiny_config(directory), directory / name, *words, nproc=nproc, cwd=directory)
    (directory / name / "stderr").write_text(said)
    return directory / name


def probed(row: Row) -> Row:
    return {key: value for key, value in row.items() if key.startswith((*SAMPLED_KEYS, SHARE_KEY))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("probe"), "whole", *PROBES)


def test_only_logged_steps_that_are_multiples_have_numbers_and_all_of_them(whole: Path) -> None:
    found = {step: probed(row) for step, row in rows(whole).items()}
    assert {step for step, row in found.items() if row} == {4, 8, 12}
    for step in (4, 8, 12):
        assert found[step].keys() == {SHARE_KEY, *SAMPLED_KEYS, *(f"{key}_se" for key in SAMPLED_KEYS)}
        assert 0 < found[step][SHARE_KEY] <= 1
        assert found[step][AGE] >= 1
        assert found[step][DRIFT] > 0
        assert all(math.isfinite(value) for value in found[step].values())
    times = {step: row.get("time/probe_sec") for (_, step), row in read_rows(whole / "metrics.jsonl").items()}
    assert {step for step, seconds in times.items() if seconds} == {4, 8, 12}


def test_a_resumed_run_probes_as_the_uninterrupted_one(whole: Path) -> None:
    middle = f'checkpoint.resume="{whole / "checkpoints" / "step_00000006"}"'
    again = rows(train(whole.parent, "again", *PROBES, middle))
    assert again == {step: row for step, row in rows(whole).items() if step > 6}
    assert probed(again[8])


def test_ages_are_known_to_readers_that_own_nothing(whole: Path) -> None:
    """With owners by hash the states come from another rank, and their ages with them."""
    by_hash = train(whole.parent, "by_hash", *PROBES, 'ledger.ownership="exchange"')
    assert {step: probed(row) for step, row in rows(by_hash).items()} == {
        step: probed(row) for step, row in rows(whole).items()
    }


def test_without_learning_nothing_drifts(tmp_path: Path) -> None:
    """A learning rate whose updates vanish in rounding, and streams of one length, whose batches keep their shape."""
    make_corpus(tmp_path / "corpus", streams=2, documents=40)
    sets = ("train.tbptt_cells=2", "train.activation_checkpointing=cell")
    run_dir = train(tmp_path, "still", *PROBES, "optimizer.lr=1e-30", *sets, nproc=None, steps=8)
    for step in (4, 8):
        row = rows(run_dir)[step]
        assert row[DRIFT] == row[GAP] == row.get(f"{DRIFT}_se", 0.0) == row.get(f"{GAP}_se", 0.0) == 0.0, row


OWN = """
import numpy as np

def own(rank, world_size, seed, seq_len):
    # Groups of four cells, on rows of their own.
    generator = np.random.default_rng(rank)
    for group in range(10**6):
        document = generator.integers(1, 50, (2, 4 * seq_len + 1))
        for cell in range(4):
            at = cell * seq_len
            batch = {
                "tokens": document[:, at : at + seq_len],
                "targets": document[:, at + 1 : at + seq_len + 1],
                "group_ids": np.array([2, 3]) * (group + 1) * 10**3 + rank,
                "cell_index": np.full(2, cell),
                "is_last": np.full(2, cell == 3),
            }
            batch["tokens_before"] = np.zeros((2, 3 * seq_len), np.int64)
            batch["tokens_before"][:, 3 * seq_len - at :] = document[:, :at]
            yield batch
"""
SOURCE = 'data.source=[{name="own",target="own:own"}]'


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def test_data_of_ones_own_are_probed(own: Path) -> None:
    found = rows(train(own, "with", *PROBES, SOURCE, "train.micro_batches=1"))
    assert {step for step, row in found.items() if probed(row)} == {4, 8, 12}
    assert found[4][SHARE_KEY] == 1.0
    assert found[4][AGE] == 1.0
