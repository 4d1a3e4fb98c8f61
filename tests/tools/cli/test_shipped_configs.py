"""What shipped configs write is valid, and in the catalog."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import ROOT, make_corpus, overrides, read_rows, run
from trainer.metrics.catalog import lookup
from trainer.metrics.payload_contract import validate_stream

SHIPPED = sorted((ROOT / "train_configs").glob("*.toml"))
ROOTS = {
    "smoke": ("python", "other"),
    "pytext": ("python", "cpp", "prose"),
    "gpu_1x": ("code", "prose"),
    "gpu_8x": ("code", "prose"),
    "gpu_4x8": ("corpus",),
    "key_recall": ("recall",),
}
SMALL = """
train.steps=4 train.device=cpu train.compile=false data.seq_len=32 data.max_group_cells=8
data.mixing.batch_size=4 data.mixing.num_streams_mixed=2 eval.every=2 eval.batches=2 eval.holdout_fraction=0.2
model.dim=16 model.num_layers=1 scheduler.warmup_steps=1 metrics.log_interval=1 metrics.wandb.mode=disabled
checkpoint.every=2
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    for seed, modality in enumerate(("python", "cpp", "prose")):
        made = make_corpus(root / f"made{seed}", seed=seed)
        (made / "a").rename(root / modality)
    return root


@pytest.mark.parametrize("config", SHIPPED, ids=lambda path: path.stem)
def test_what_a_shipped_config_writes_is_valid_and_in_the_catalog(config, corpus, tmp_path):
    """A small run, with everything on that the config has on."""
    roots = [f"data.source.{name}.root={corpus}" for name in ROOTS[config.stem]]
    changes = overrides(*SMALL.split(), *roots, "metrics.per_source=true")
    result, metrics = run("--config", config, "--run-dir", tmp_path / "run", *changes), tmp_path / "run/metrics.jsonl"
    assert result.returncode == 0, result.stderr
    assert not list(validate_stream(metrics.read_bytes().splitlines()))
    rows = read_rows(metrics)
    assert len(rows) == 6, "4 steps and 2 evaluations"
    keys = {key for row in rows.values() for key in row}
    assert len(keys) > 50
    assert [key for key in keys if lookup(key).name != key] == []
