"""Which checkpoint a run goes on from."""

from __future__ import annotations

import pytest

from trainer.errors import UserError
from trainer.training.checkpointing.checkpoint import find


def test_a_checkpoint_that_is_not_there_is_called_so(tmp_path):
    with pytest.raises(UserError, match="typo: no such directory; name a checkpoint, such as"):
        find(tmp_path, str(tmp_path / "typo"))


def test_a_directory_that_is_no_checkpoint_is_not_complete(tmp_path):
    with pytest.raises(UserError, match="is not complete"):
        find(tmp_path, str(tmp_path))
