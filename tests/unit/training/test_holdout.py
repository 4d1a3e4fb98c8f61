"""The held-out micro-batches of an evaluation."""

from __future__ import annotations

import torch

from tests.support.runs import make_corpus, write_tiny_config
from trainer.config.load import load_config
from trainer.distributed.env import RankInfo
from trainer.training.setup.data import holdout_batches
from trainer.training.setup.plan import make_plan


def test_an_evaluation_has_as_many_batches_as_configured_also_after_a_source_has_ended(tmp_path):
    make_corpus(tmp_path / "corpus", streams=2, documents=20)
    config = write_tiny_config(tmp_path)

    def labels(wanted: int) -> list[str]:
        overrides = [f"eval.batches={wanted}", "eval.every=1", "eval.holdout_fraction=0.3", "data.mixing.batch_size=12"]
        overrides.append("ledger.capacity=4096")
        plan = make_plan(load_config(config, overrides), config, 1)
        batches = holdout_batches(plan, RankInfo(), torch.device("cpu"))
        assert batches is not None
        return [batch["dataset_labels"][0] for batch in batches()]

    everything = labels(1000)
    assert everything[:4] == ["first", "second", "first", "second"]
    assert everything[-3:] == ["second"] * 3  # its batches are smaller: it ends later
    for wanted in range(1, len(everything) + 1, 3):
        assert labels(wanted) == everything[:wanted]
