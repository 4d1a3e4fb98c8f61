"""Unknown keys: the fix names the key to write instead, or says why there is none."""

from __future__ import annotations

import pytest

from trainer.config.load import load_dataset_file
from trainer.config.messages import EXPLAINED, OTHER_NAMES, hint, keys_of
from trainer.config.schema import RunConfig
from trainer.errors import UserError

MIXING = "data.mixing.batch_size or data.source.mixing.batch_size"


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        ("gpu_peak_tflops", "did you mean metrics.peak_tflops?"),  # a name of the requests
        ("train.grad_accum", "did you mean train.micro_batches?"),  # of other trainers
        ("train.Log-Interval", "did you mean metrics.log_interval?"),  # of another table
        ("data.mixing.num_stream_mixed", "did you mean num_streams_mixed?"),  # misspelt
        ("optimizer.learnig_rate", "did you mean optimizer.lr?"),  # and of others
        ("train.batch_size", f"did you mean {MIXING}?"),
        ("eval.batch_size", f"did you mean {MIXING} or batches?"),
        ("checkpoint.zzz", "known keys: background, every, every_minutes, keep_every, keep_last, remote, resume"),
        ("data.num_workers", EXPLAINED["num_workers"]),
    ],
)
def test_the_key_or_the_keys_that_may_be_meant(written, fix):
    assert hint(tuple(written.split(".")), RunConfig) == fix


def exists(key: str) -> bool:
    *table, name = key.split(".")
    return name in keys_of(RunConfig, tuple(table))


def test_the_keys_that_are_named_exist_and_the_unknown_ones_do_not():
    assert [key for key in OTHER_NAMES if not exists(key)] == []
    names = [name for names in OTHER_NAMES.values() for name in names.split()]
    assert len({*names, *EXPLAINED}) == len(names) + len(EXPLAINED)
    assert [name for name in (*names, *EXPLAINED) if "." in name and exists(name)] == []


def test_a_dataset_file_knows_its_own_keys(tmp_path):
    path = tmp_path / "d.toml"
    path.write_text('[[source]]\nname = "a"\nroot = "r"\n')
    assert load_dataset_file(path).source[0].root == "r"
    path.write_text('[[source]]\nname = "a"\nroot = "r"\nbatch_size = 4\n')
    with pytest.raises(UserError, match=r"d\.toml:4: source\.0\.batch_size: unknown key; did you mean source\.mixing"):
        load_dataset_file(path)
