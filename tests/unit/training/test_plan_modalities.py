"""A batch size for a modality that no stream has is refused: it would change nothing, silently."""

from __future__ import annotations

import pytest

from tests.support.runs import write_tiny_config
from trainer.config.load import load_config
from trainer.errors import UserError
from trainer.training.setup.plan import make_plan


def plan(tmp_path, *overrides: str) -> None:
    path = write_tiny_config(tmp_path)
    make_plan(load_config(path, list(overrides)), path, 1)


@pytest.mark.parametrize("name", ["c", "../../x"])
def test_a_modality_that_no_stream_has_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=rf"no stream has the modality '{name}'; there are a, b"):
        plan(tmp_path, f'data.mixing.batch_size_by_modality={{"{name}"=2}}')


def test_a_source_s_own_table_is_held_against_its_own_streams(tmp_path):
    path = write_tiny_config(tmp_path)
    text = path.read_text().replace(
        'modalities = ["b"]', 'modalities = ["b"]\nmixing = { batch_size_by_modality = { a = 2 } }'
    )
    path.write_text(text)
    with pytest.raises(
        UserError, match=r"source second: mixing\.batch_size_by_modality: no stream has the modality 'a'; there are b"
    ):
        make_plan(load_config(path), path, 1)


def test_what_exists_is_taken(tmp_path):
    plan(tmp_path, "data.mixing.batch_size_by_modality={a=3, b=2}")
