"""A user's code that changes the working directory: everything is still read and written where the program was started."""

from __future__ import annotations

import json

import pytest

from tests.support.grouped import run
from tests.support.runs import make_corpus, read_rows

pytestmark = pytest.mark.distributed

# It leaves when it is imported, when it is built and in step 3.
MODEL = """
import os
from pathlib import Path
from torch import nn
from trainer.model import build as build_ours

HERE = Path(__file__).parent
def leave(name):
    (HERE / "away" / name).mkdir(parents=True, exist_ok=True)
    os.chdir(HERE / "away" / name)
leave("import")

class Leaving(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls, self.state_width = inner, 0, inner.state_width
        leave("init")
    def forward(self, tokens, state=None):
        self.calls += 1
        if self.calls >= 5:
            leave(f"forward{self.calls % 3}")
        return self.inner(tokens, state=state)

def build(vocab_size, dim, num_layers):
    return Leaving(build_ours(vocab_size, dim=dim, num_layers=num_layers))
"""
FORMAT = """
import os
from pathlib import Path
import numpy as np
from trainer.data.documents import TokenTable
(Path(__file__).parent / "away" / "format").mkdir(parents=True, exist_ok=True)
os.chdir(Path(__file__).parent / "away" / "format")

def load(path, options):
    tokens = np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64)
    return TokenTable(tokens, np.array([0]), np.array([len(tokens)]))
"""
CONFIG = """
[run]
name = "left"
[train]
steps = 6
micro_batches = 2
device = "cpu"
[data]
seq_len = 16
[data.mixing]
num_streams_mixed = 2
batch_size = 4
[[data.source]]
name = "own"
paths = ["own/*.bytes"]
format = "own_format:load"
[[data.source]]
name = "nested"
root = "corpus"
[[data.source]]
name = "direct"
paths = ["corpus/a/*.jsonl"]
[model]
target = "leaving:build"
dim = 16
num_layers = 2
[eval]
every = 3
batches = 1
[[eval.source]]
name = "val"
paths = ["val.txt"]
[metrics]
log_interval = 1
[sample]
every = 4
tokens = 4
[checkpoint]
every = 2
keep_last = 9
"""


@pytest.fixture
def project(tmp_path):
    make_corpus(tmp_path / "corpus")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "x.bytes").write_bytes(b"to be or not to be " * 200)
    (tmp_path / "val.txt").write_text("that is the question " * 50)
    (tmp_path / "leaving.py").write_text(MODEL)
    (tmp_path / "own_format.py").write_text(FORMAT)
    (tmp_path / "x.toml").write_text(CONFIG)
    return tmp_path


def ended(directory, *arguments, code=0, **options):
    before = {path.name for path in directory.iterdir()}
    result = run(*arguments, cwd=directory, **options)
    assert result.returncode == code, result.stderr
    away = [path for path in (directory / "away").rglob("*") if not path.is_dir()]
    assert not away, "written where the user's code went"
    return result, sorted(path.name for path in directory.iterdir() if path.name not in before)


def test_a_run_stays_in_one_directory_and_resumes(project):
    config = ("--config", "x.toml")
    _, made = ended(project, *config, nproc=2)
    assert "runs" in made
    (run_dir,) = (project / "runs").iterdir()
    assert json.loads((run_dir / "status.json").read_text())["state"] == "done"
    assert {step for _, step in read_rows(run_dir / "metrics.jsonl")} == {1, 2, 3, 4, 5, 6}
    assert sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))[-1] == "step_00000006"
    assert (run_dir / "config.toml").read_text() == CONFIG
    assert 'root = "corpus"' in (run_dir / "config.resolved.toml").read_text(), "kept as it was written"
    saved = f"runs/{run_dir.name}/checkpoints/step_00000004"
    ended(project, *config, "--resume", saved, "--run-dir", "again", nproc=2)
    assert {step for _, step in read_rows(project / "again" / "metrics.jsonl")} == {5, 6}


def test_other_verbs_read_and_write_where_they_were_started(project):
    ended(project, "--config", "x.toml", "--run-dir", "run")
    resume = ("--set", "checkpoint.resume=run/checkpoints/latest")
    ended(project, "check", "--config", "x.toml", *resume)
    # The mistake is found after the model was built, and its line is still known.
    refused, _ = ended(project, "check", "--config", "x.toml", "--set", "optimizer.group=[{match='none'}]", code=2)
    assert refused.stderr.splitlines()[-1].startswith("--set optimizer.group=[{match='none'}]: optimizer.group")
    ended(project, "eval", "run", "--trust-code")
    assert ended(project, "export", "run", "--out", "exported")[1] == ["exported"]
    ended(project, "sample", "exported", "--tokens", "4", "--trust-code")
    weights = ("--set", "model.weights=exported/model.safetensors", "--run-dir", "warm")
    assert ended(project, "--config", "x.toml", *weights)[1] == ["warm"]
