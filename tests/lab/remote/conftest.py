"""A checkpoint directory of real shape without a run, and stores in memory."""

from __future__ import annotations

import hashlib
import json
import uuid
from pathlib import Path

import pytest

from trainer.training.checkpointing.checkpoint import FORMAT_VERSION, MARKER, checkpoint_name


def make_checkpoint(checkpoints: Path, step: int, *, num_bytes: int = 1000, branch: int = 0) -> Path:
    """A complete checkpoint of two files, whose content follows from the arguments."""
    path = checkpoints / checkpoint_name(step)
    path.mkdir(parents=True)
    files = {}
    for name in ("model_000.safetensors", "state.json"):
        content = (f"{name} {step} {branch} ".encode() * (num_bytes // 8))[:num_bytes]
        (path / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / MARKER).write_text(json.dumps({"format_version": FORMAT_VERSION, "step": step, "files": files}))
    return path


@pytest.fixture
def url():
    """A store of its own, in memory."""
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture
def checkpoints(tmp_path):
    directory = tmp_path / "run" / "checkpoints"
    directory.mkdir(parents=True)
    return directory
