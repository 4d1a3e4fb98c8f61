"""Which checkpoint a run goes on from."""

from __future__ import annotations

import pytest

from tests.support.runs import write_tiny_config
from trainer.config.load import load_config
from trainer.errors import UserError
from trainer.training.checkpointing.checkpoint import find
from trainer.training.run_dir import choose_run_dir


def test_a_checkpoint_that_is_not_there_is_called_so(tmp_path):
    with pytest.raises(UserError, match="typo: no such directory; name a checkpoint, such as"):
        find(tmp_path, str(tmp_path / "typo"))


def test_a_run_is_not_taken_for_a_checkpoint_and_nothing_is_written(tmp_path, monkeypatch):
    config = load_config(write_tiny_config(tmp_path))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for wrong, message in (
        (tmp_path / "run", "is a run, not a checkpoint; continue it with --resume auto --run-dir "),
        (tmp_path / "ran", r"no such directory; did you mean .*run\?"),
    ):
        with pytest.raises(UserError, match=message):
            choose_run_dir(config, None, str(wrong))
        with pytest.raises(UserError, match=message):
            find(tmp_path, str(wrong))


def test_a_directory_that_is_no_checkpoint_is_not_complete(tmp_path):
    with pytest.raises(UserError, match="is not complete"):
        find(tmp_path, str(tmp_path))
