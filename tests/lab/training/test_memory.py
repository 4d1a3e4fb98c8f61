"""A run that is out of memory says what took it; a process gives back what it has freed; a trace of steady steps."""

from __future__ import annotations

import gzip
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.in_process import train_here
from tests.support.runs import ROOT, losses, train, write_tiny_config

FREED = """
import ctypes
from pathlib import Path
from trainer.cli.launch import give_back_freed_blocks

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
give_back_freed_blocks()
libc.free(libc.malloc(16 * 2**20))
before, blocks = resident(), []
for _ in range(20):
    blocks.append(libc.malloc(6 * 2**20))
    ctypes.memset(blocks[-1], 1, 6 * 2**20)
    libc.malloc(500_000)  # stays behind it, so that none is at the end of the heap
for block in blocks:
    libc.free(block)
print(resident() - before)
"""


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
    own += ["train.compile=false", "train.cuda_graph=false"]
    train_here(write_tiny_config(tmp_path), tmp_path / "run", *own, "train.precision=fp32", code=1)
    said = re.search(r"out of memory at step \d+, rank 0: (.*); docs/memory.md", caplog.text)
    assert said is not None, caplog.text
    sizes = {name: float(size.replace(",", "")) for name, size in re.findall(r"([a-z ]+) ([\d,.]+) MB", said[1])}
    assert 0 < sizes["weights"] == sizes[" gradients"]
    assert sizes[" optimizer"] == pytest.approx(2 * sizes["weights"], rel=0.02)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("kept", [False, True])
def test_freed_blocks_are_given_back_unless_the_user_wants_otherwise(kept):
    environment = {**os.environ, **({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432"} if kept else {})}
    found = subprocess.run([sys.executable, "-c", FREED], env=environment, capture_output=True, check=True, cwd=ROOT)
    assert (int(found.stdout) > 100e6) == kept


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
    assert "USDT" not in said  # torch's own log of its profiler


def test_a_run_that_ends_before_says_that_there_is_no_profile(tmp_path):
    run_dir, said = profiled(tmp_path, 12)
    assert "the run ended before steps 11 to 13 were recorded: there is no profile" in said
    assert not any((run_dir / "profile").iterdir())
