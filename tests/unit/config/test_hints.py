"""Unknown keys: the fix names the key to write instead, or says why there is none."""

from __future__ import annotations

import pytest

from trainer.config.load import load_dataset_file
from trainer.config.messages import EXPLAINED, OTHER_NAMES, hint, keys_of
from trainer.config.schema import RunConfig
from trainer.errors import UserError

WANDB = 'set metrics.wandb.mode to "auto", "online", "offline" or "disabled"'


def fix_for(key: str) -> str:
    return hint(tuple(key.split(".")), RunConfig)


@pytest.mark.parametrize(
    ("written", "key"),
    [
        # Names of the requests.
        ("train.max_steps", "train.steps"),
        ("gpu_peak_tflops", "metrics.peak_tflops"),
        ("ledger_wipe_mode", "ledger.wipe_mode"),
        # Names of other trainers.
        ("train.grad_accum", "train.micro_batches"),
        # A key of another table.
        ("data.wipe_mode", "ledger.wipe_mode"),
        ("train.Log-Interval", "metrics.log_interval"),
        # A misspelt key of this table.
        ("metrics.log_intervall", "log_interval"),
        ("data.mixing.num_stream_mixed", "num_streams_mixed"),
    ],
)
def test_one_key_is_meant(written, key):
    assert fix_for(written) == f"did you mean {key}?"


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        ("train.batch_size", "did you mean data.mixing.batch_size or data.source.mixing.batch_size?"),
        ("eval.batch_size", "did you mean data.mixing.batch_size or data.source.mixing.batch_size or batches?"),
        ("eval.steps", "did you mean eval.every or train.steps?"),
        ("ledger.every", "did you mean wipe_every?"),
        ("checkpoint.zzz", "known keys: background, every, every_minutes, keep_every, keep_last, remote, resume"),
        ("metrics.enable_wandb", WANDB),
        ("data.num_workers", EXPLAINED["num_workers"]),
    ],
)
def test_several_keys_or_none_are_meant(written, fix):
    assert fix_for(written) == fix


def exists(key: str) -> bool:
    *table, name = key.split(".")
    return name in keys_of(RunConfig, tuple(table))


def test_the_keys_that_are_named_exist_and_the_unknown_ones_do_not():
    assert [key for key in OTHER_NAMES if not exists(key)] == []
    names = [name for names in OTHER_NAMES.values() for name in names.split()]
    assert len(set(names)) == len(names)
    assert not set(names) & EXPLAINED.keys()
    assert [name for name in (*names, *EXPLAINED) if "." in name and exists(name)] == []


def test_a_dataset_file_knows_its_own_keys(tmp_path):
    path = tmp_path / "d.toml"
    path.write_text('[[source]]\nname = "a"\nroot = "r"\nbatch_size = 4\n')
    with pytest.raises(
        UserError, match=r"d\.toml:4: source\.0\.batch_size: unknown key; did you mean source\.mixing\."
    ):
        load_dataset_file(path)
