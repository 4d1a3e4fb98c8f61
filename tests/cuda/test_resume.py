"""Resume on the device, bit for bit: a run that was killed or stopped ends with the bits of one that was not."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.support.on_device import settings, train_here
from tests.support.ranks import Ranks, checkpoint_differences, last_logged
from tests.support.runs import losses, write_tiny_config

pytestmark = pytest.mark.cuda
STEPS = 40
EVERY = "\n[checkpoint]\nevery = 5\nkeep_last = 20\n"
CASES = {
    "killed": (signal.SIGKILL, ()),
    "stopped": (signal.SIGTERM, ()),
    "killed, bf16": (signal.SIGKILL, ("train.precision=bf16",)),
    "killed, compiled": (signal.SIGKILL, ("train.compile=true",)),
}


def last_checkpoint(run_dir: Path) -> Path:
    """The newest one."""
    return run_dir / "checkpoints" / f"step_{STEPS:08d}"


def test_the_same_run_twice_has_the_same_bits(tmp_path: Path, chosen_device: torch.device) -> None:
    """Where this fails, some operation of the device is not deterministic, and no resume can be exact."""
    runs = [train_here(tmp_path / name, chosen_device, f"train.steps={STEPS}", extra=EVERY) for name in ("one", "two")]
    # The corpora are equal, their places are not.
    assert losses(runs[0] / "metrics.jsonl") == losses(runs[1] / "metrics.jsonl")
    assert checkpoint_differences(*map(last_checkpoint, runs)) == []


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_ends_with_the_bits_of_the_whole_one(
    tmp_path: Path, chosen_device: torch.device, case: str
) -> None:
    number, own = CASES[case]
    sets = (f"train.steps={STEPS}", *own)
    whole = train_here(tmp_path / "whole", chosen_device, *sets, extra=EVERY)
    config, run_dir = write_tiny_config(tmp_path / "whole", EVERY), tmp_path / "whole" / "cut"
    words = [word for each in settings(chosen_device, *sets) for word in ("--set", each)]
    arguments = ("--config", config, "--run-dir", run_dir, "--resume", "auto", *words)
    with Ranks(arguments, logs=tmp_path / "first", world_size=1) as ranks:
        assert ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") >= 12), ranks.said()
        ranks.signal(number)
        codes = ranks.wait()
    assert codes == ([-signal.SIGKILL] if number == signal.SIGKILL else [0])
    assert 12 <= last_logged(run_dir / "metrics.jsonl") < STEPS
    with Ranks(arguments, logs=tmp_path / "second", world_size=1) as ranks:
        assert ranks.wait() == [0], ranks.said()
    assert "resum" in ranks.said()
    assert losses(run_dir / "metrics.jsonl") == losses(whole / "metrics.jsonl")
    found = checkpoint_differences(last_checkpoint(whole), last_checkpoint(run_dir))
    assert [each for each in found if "_sec" not in each] == []  # how long saving took is kept, too
