"""A run that is out of memory says what took it; a trace of steady steps."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from tests.support.in_process import train_here
from tests.support.runs import FULL_ROWS, losses, train, write_tiny_config

FULL = """
import itertools, torch
from trainer.model import build as build_ours

def build(vocab_size, dim, num_layers):
    model, calls = build_ours(vocab_size, dim=dim, num_layers=num_layers), itertools.count()
    def fill(_, args, kwargs):
        if next(calls) == 7:
            torch.empty(1 << 50, dtype=torch.uint8, device=kwargs["tokens"].device)
    model.register_forward_pre_hook(fill, with_kwargs=True)
    return model
"""


@pytest.mark.cuda
def test_a_run_out_of_memory_says_what_took_it(tmp_path, device, monkeypatch, caplog):
    (tmp_path / "full_model.py").write_text(FULL)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = [f"train.device={device.type}", "model.target=full_model:build", "model.dim=128", "model.contract=false"]
    own += ["train.compile=false", "train.cuda_graph=false", FULL_ROWS, "ledger.capacity=0"]
    train_here(write_tiny_config(tmp_path), tmp_path / "run", *own, "train.precision=fp32", "train.ema=0.9", code=1)
    said = re.search(r"out of memory at step \d+, rank 0: (.*); docs/memory.md", caplog.text)
    assert said is not None, caplog.text
    sizes = {name: float(size.replace(",", "")) for name, size in re.findall(r"([a-z ]+) ([\d,.]+) MB", said[1])}
    assert 0 < sizes["weights"] == sizes[" gradients"] == sizes[" averages"]
    assert sizes[" ledger"] < 1, "4,096 groups, the capacity without lanes, take 4.2 MB"
    assert sizes[" optimizer"] == pytest.approx(2 * sizes["weights"], rel=0.02)


def profiled(directory: Path, steps: int) -> tuple[Path, str]:
    """The directory of a run, and what it said."""
    run_dir = directory / "run"
    return run_dir, train(write_tiny_config(directory), run_dir, f"train.steps={steps}", more=("--profile", 3))


@pytest.mark.distributed
def test_the_trace_has_the_steps_and_no_loss_changes(tmp_path):
    run_dir, said = profiled(tmp_path, 16)
    train(tmp_path / "tiny.toml", tmp_path / "plain", "train.steps=16")
    assert losses(tmp_path / "plain" / "metrics.jsonl") == losses(run_dir / "metrics.jsonl")
    events = json.loads(gzip.decompress((run_dir / "profile" / "trace.json.gz").read_bytes()))["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep#")}
    assert len(steps) == 3
    assert said.count("profile of 3 steps from step 11 on") == 1


def test_a_run_that_ends_before_says_that_there_is_no_profile(tmp_path):
    run_dir, said = profiled(tmp_path, 12)
    assert "metrics.profile: the run ended before steps 11 to 13 were recorded: they have no profile" in said
    assert not any((run_dir / "profile").iterdir())
