"""The catalog and real runs agree: every key of the catalog is emitted by some run, and no run emits another."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.support.runs import FULL_ROWS, make_corpus, read_rows, train, write_tiny_config
from trainer.metrics.catalog import CATALOG, family, is_known

# What follows `[metrics]` of the tiny config.
EXTRA = Path(__file__).with_name("every_key.toml").read_text(encoding="utf-8")
# The device's memory.
ON_CUDA = {f"gpu/{name}" for name in ("allocated_gb", "peak_gb", "reserved_gb", "total_gb", "mem_utilization")}

# Saves that take at least a known time, on one rank.
SLOW_SAVES = """
import os, time
import numpy as np
from trainer.model.encoder import build
from trainer.training import saved_state

if os.environ.get("RANK") == "1":
    write = saved_state.write_part
    def slow(path, value):
        time.sleep(0.02)
        write(path, value)
    saved_state.write_part = slow

def batches(seq_len, **_):
    return [{"tokens": np.zeros((1, seq_len), dtype=np.int64), "targets": np.zeros((1, seq_len), dtype=np.int64)}]

def evaluate(**_):
    return {"score": 1.0, "task/score": 2.0}
"""
Rows = dict[tuple[str, int], dict[str, float]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Two ranks until the data are exhausted, on one of them before the other."""
    directory = tmp_path_factory.mktemp("every_key")
    (directory / "slow_saves.py").write_text(SLOW_SAVES)
    (directory / "mine.jsonl").write_text('{"text": "to be or not to be"}\n' * 40)
    make_corpus(directory / "corpus", documents=14)
    sets = (
        "data.mixing.repeat=false",
        "model.target=slow_saves:build",
        "metrics.log_interval=3",
        "train.steps=500",
        'train.micro_batches={ schedule = "step", points = { 0 = 2, 500 = 3 } }',
    )
    config, run_dir = write_tiny_config(directory, EXTRA), directory / "run"
    said = train(config, run_dir, *sets, nproc=2, cwd=directory, is_alone=True)
    assert "data exhausted" in said
    return read_rows(run_dir / "metrics.jsonl")


@pytest.fixture(scope="module")
def long_rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """One rank that hardly learns, so that the noise scale does not drift and all its bounds become known."""
    directory = tmp_path_factory.mktemp("long")
    make_corpus(directory / "corpus", documents=160)
    sets = ('data.mixing={batching_mode="per_row", batch_size=4}', "train.micro_batches=4", "optimizer.lr=1e-6")
    sets += ("ledger.capacity=0", "data.max_group_cells=0")
    sets += ("train.steps=80", "metrics.log_interval=2", "model.num_layers=1", "train.spike_sigma=6")
    train(write_tiny_config(directory), directory / "run", *sets)
    return read_rows(directory / "run" / "metrics.jsonl")


def test_every_key_of_the_catalog_is_emitted_and_no_other(rows: Rows, long_rows: Rows, tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text('{"text": "a question and its answer", "mask": [[15, 25]]}\n' * 40)
    masked = f'data.source=[{{name="chat", paths=["{tmp_path}/chat.jsonl"], loss_mask="mask"}}]'
    train(write_tiny_config(tmp_path), tmp_path / "run", FULL_ROWS, "train.steps=2", masked)
    full_rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    emitted = {key for row in (*rows.values(), *long_rows.values(), *full_rows.values()) for key in row}
    assert [key for key in emitted if not is_known(key)] == []
    assert {spec.name for spec in CATALOG} - {family(key) for key in emitted} == ON_CUDA


def test_the_parts_of_the_loss_add_up_to_it_with_their_weights(rows: Rows) -> None:
    """The cross-entropy and the z-loss apply to all tokens, the third part to those that are bins."""
    last = max(step for mode, step in rows if mode == "train")  # logged when the data had ended: without its parts
    for (mode, step), row in rows.items():
        if (mode, step) == ("train", last):
            continue
        prefix = "eval_" if mode == "eval" else ""
        ce, z_loss, coord = (row[f"{prefix}objective/{name}"] for name in ("token_ce", "z_loss", "coord"))
        assert ce + z_loss < row[f"{prefix}loss"] < (ce + z_loss + coord) * (1 + 1e-6)  # all may be bins


def test_save_sec_sums_the_saves_since_the_last_row(rows: Rows) -> None:
    """A row of step n has the saves of the steps before it: those of a step come after its row."""
    logged = [step for mode, step in rows if mode == "train"]
    for before, step in itertools.pairwise(logged):
        saves = [saved for saved in range(before, step) if saved % 2 == 0]
        seconds = rows["train", step].get("checkpoint/save_sec", 0.0)
        assert 0.02 * len(saves) <= seconds
        assert bool(saves) == (seconds > 0.0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_keys_of_cuda_are_emitted_there(tmp_path: Path) -> None:
    train(write_tiny_config(tmp_path), tmp_path / "run", "train.device=cuda")
    assert all(row.keys() >= ON_CUDA for row in read_rows(tmp_path / "run" / "metrics.jsonl").values())
