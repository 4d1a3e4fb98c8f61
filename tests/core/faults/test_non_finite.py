"""NaN in the loss on one rank of three, infinity in a gradient on another: all stop at the same step, or skip it together."""

from __future__ import annotations

import json

import pytest

from tests.support.fault_runs import ARGUMENTS, keep, make_config
from tests.support.ranks import Ranks, status
from tests.support.runs import read_rows
from trainer.training.checkpointing.tensor_files import read_rank

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
CONFIG = "\n[checkpoint]\nevery = 1\nkeep_last = 50\n"
KINDS = [("nan", 1, 0), ("inf_gradient", 2, 1)]


def run_with(tmp_path, fault, *more):
    run_dir = tmp_path / "run"
    arguments = ("--config", make_config(tmp_path, CONFIG), "--run-dir", run_dir, *ARGUMENTS, "--steps", 12, *more)
    with Ranks(arguments, logs=tmp_path / "logs", world_size=3, fault=fault) as ranks:
        return run_dir, ranks.wait(), ranks.said()


def ledgers(checkpoint):
    return [read_rank(checkpoint, rank)["ledger"] for rank in range(3)]


@pytest.mark.parametrize(("what", "rank", "micro"), KINDS)
def test_all_ranks_stop_at_the_step(tmp_path, what, rank, micro):
    fault = {"what": what, "rank": rank, "step": 5, "micro": micro}
    run_dir, codes, said = run_with(tmp_path, fault)
    assert codes == [1, 1, 1], said
    ended = status(run_dir)
    assert (ended["state"], ended["last_step"]) == ("failed", 5)
    assert ended["reason"].startswith("step 5: loss")
    assert max(step for mode, step in read_rows(run_dir / "metrics.jsonl") if mode == "train") == 5
    # Nothing after the last good step is kept.
    assert not (run_dir / "checkpoints" / "step_00000005").exists()
    assert (run_dir / "checkpoints" / "step_00000004" / "COMPLETE").exists()
    (event,) = [e for e in map(json.loads, (run_dir / "events.jsonl").open()) if e["event"] == "non_finite"]
    assert [len(batches) for batches in event["batches"]] == [2, 2, 2]
    keep(4, f"{'NaN in the loss' if what == 'nan' else 'inf in a gradient'} on one rank of three, `stop`")


def test_a_loss_spike_is_written_down_with_its_batches(tmp_path):
    fault = {"what": "spike", "rank": 1, "step": 40, "micro": 1}
    run_dir, codes, said = run_with(tmp_path, fault, "--steps", 45, "--set", "train.spike_sigma=6")
    assert codes == [0, 0, 0], said
    (event,) = [e for e in map(json.loads, (run_dir / "events.jsonl").open()) if e["event"] == "loss_spike"]
    assert event["global_step"] == 40
    assert event["loss"] > event["mean"] + 6 * event["sigma"]
    metas = list(map(json.loads, event["batches"]))
    assert len(metas) == 2
    assert all({"stream", "position", "group_ids"} <= meta.keys() for meta in metas)
    assert event["see"] == f"train data at {run_dir} 40"
    keep(4, "a loss spike on one rank of three")
