"""The held-out micro-batches of an evaluation."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tests.support.runs import write_tiny_config
from trainer.config.load import load_config
from trainer.distributed.env import RankInfo
from trainer.training.setup.evaluation import eval_sets
from trainer.training.setup.plan import make_plan


@pytest.mark.parametrize(("pack", "batches"), [("true", 100000), ("false", 100000), ("false", 1)])
def test_every_rank_has_as_many_batches_however_uneven_the_documents_are(tmp_path, pack, batches):
    """Ranks that hold shards of a model must run as many forwards, or wait for ever."""
    generator = np.random.default_rng(1)
    for modality in "ab":
        (tmp_path / "uneven" / modality).mkdir(parents=True)
        for stream in range(3):
            texts = [json.dumps({"text": "x y" * int(generator.integers(1, 400))}) for _ in range(7)]
            (tmp_path / "uneven" / modality / f"{stream}.jsonl").write_text("\n".join(texts) + "\n")
    config = write_tiny_config(tmp_path)
    source = f'data.source=[{{name="u", root="{tmp_path / "uneven"}"}}]'
    overrides = [source, "eval.every=1", "eval.holdout_fraction=0.4", f"eval.batches={batches}", f"data.pack={pack}"]
    plan = make_plan(load_config(config, overrides), config, 3)
    held_out = [eval_sets(plan, RankInfo(rank, rank, 3), torch.device("cpu")) for rank in range(3)]
    ranks = [list(each.batches(None)) for (each,) in held_out]
    has_targets = [sum(bool((batch.targets != -100).any()) for batch in batches) for batches in ranks]
    assert len(set(has_targets)) > 1, "all ranks have as much to read: nothing is shown"
    assert len({len(batches) for batches in ranks}) == 1
