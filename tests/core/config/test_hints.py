"""Unknown keys: the fix names the key to write; what is refused is refused in our own words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.in_process import program
from tests.support.runs import write_tiny_config
from trainer.config.load import hint, load_config
from trainer.config.schema import RunConfig
from trainer.errors import UserError


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        ("data.batch_size", "did you mean data.mixing.batch_size or data.source.mixing.batch_size?"),
        ("metrics.interval", "did you mean log_interval?"),
        ("train.log_interval", "did you mean metrics.log_interval?"),  # of another table
        ("data.mixing.num_stream_mixed", "did you mean num_streams_mixed?"),  # misspelt
        ("checkpoint.zzz", "known keys: every, every_minutes, keep_best, keep_every, keep_last, remote, resume"),
    ],
)
def test_the_key_or_the_keys_that_may_be_meant(written, fix):
    assert hint(tuple(written.split(".")), RunConfig) == fix


def test_dotted_options_set_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = ["check", "--config", write_tiny_config(tmp_path)]
    said = program([*check, "--optimizer.lrr", "1e-3"], capsys).mistake
    assert "optimizer.lrr: unknown key; did you mean lr?" in said
    assert "optimizer.lr: must be greater than 0, got -1" in program([*check, "--optimizer.lr=-1"], capsys).mistake
    assert "--optimizer.lr: has no value" in program([*check, "--optimizer.lr"], capsys).mistake


def test_a_dataset_file_knows_its_own_keys(tmp_path):
    config = write_tiny_config(tmp_path, "[[data.source]]\nname = 'more'\ninclude = 'd.toml'\n")
    path = tmp_path / "d.toml"
    path.write_text('[[source]]\nname = "a"\nroot = "r"\nbatch_size = 4\n')
    with pytest.raises(UserError, match=r"d\.toml:4: source\.0\.batch_size: unknown key; did you mean source\.mixing"):
        load_config(config)
