"""`train payload validate`, as its users run it: on what shipped configs write, through torchrun, and on bad lines."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_process import program
from tests.support.runs import ROOT, make_corpus, overrides, read_rows, run
from trainer.metrics.catalog import lookup

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
def test_what_a_shipped_config_writes_is_valid_and_in_the_catalog(config, corpus, tmp_path, capsys):
    """A small run, with everything on that the config has on."""
    roots = [f"data.source.{name}.root={corpus}" for name in ROOTS[config.stem]]
    changes = overrides(*SMALL.split(), *roots, "metrics.per_source=true")
    result, metrics = run("--config", config, "--run-dir", tmp_path / "run", *changes), tmp_path / "run/metrics.jsonl"
    assert result.returncode == 0, result.stderr
    on_file = program(["payload", "validate", metrics], capsys)
    assert (on_file.returncode, on_file.stdout) == (0, "")
    assert "every line is a valid payload" in on_file.stderr
    rows = read_rows(metrics)
    assert len(rows) == 6, "4 steps and 2 evaluations"
    keys = {key for row in rows.values() for key in row}
    assert len(keys) > 50
    assert [key for key in keys if lookup(key).name != key] == []


def text(**changes: Any) -> bytes:
    row = {"schema_version": 1, "mode": "train", "global_step": 7, "metrics": {"loss": 1.5}, **changes}
    return json.dumps({key: value for key, value in row.items() if value is not ...}).encode()


GOOD = text()
RESUMED = text(global_step=4, restart={"from_step": 3})


def test_the_first_bad_line_is_named_with_key_and_reason(tmp_path, capsys):
    file = tmp_path / "stream.jsonl"
    file.write_bytes(b"\n".join([GOOD, RESUMED, text(global_step=2), GOOD, b"{}", b""]))
    found = program(["payload", "validate", file], capsys)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith(f"{file}:3: global_step: falls from 4 to 2 without a restart")


def test_a_stream_is_read_from_stdin_with_prefixes_line_ends_and_restarts(monkeypatch, capsys):
    good = [b"[default0]:" + GOOD, b"[default0]: " + GOOD + b"\r", RESUMED, text(mode="eval")]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n".join(good)), encoding="utf-8"))
    found = program(["payload", "validate", "-"], capsys)
    assert (found.returncode, found.stderr) == (0, "-: every line is a valid payload\n")
