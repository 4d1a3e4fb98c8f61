"""The held-out micro-batches of an evaluation."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tests.support.runs import make_corpus, write_tiny_config
from trainer.config.load import load_config
from trainer.distributed.env import RankInfo
from trainer.training.setup.evaluation import eval_sets
from trainer.training.setup.plan import make_plan


def test_an_evaluation_has_as_many_batches_as_configured_also_after_a_source_has_ended(tmp_path):
    make_corpus(tmp_path / "corpus", streams=2, documents=20)
    config = write_tiny_config(tmp_path)

    def labels(wanted: int) -> list[str]:
        overrides = [f"eval.batches={wanted}", "eval.every=1", "eval.holdout_fraction=0.3", "data.mixing.batch_size=12"]
        overrides.append("ledger.capacity=4096")
        plan = make_plan(load_config(config, overrides), config, 1)
        (held_out,) = eval_sets(plan, RankInfo(), torch.device("cpu"))
        return [batch.extras["dataset_labels"][0] for batch in held_out.batches(None)]

    everything = labels(1000)
    assert everything[:4] == ["first", "second", "first", "second"]
    assert everything[-3:] == ["second"] * 3  # its batches are smaller: it ends later
    for wanted in range(1, len(everything) + 1, 3):
        assert labels(wanted) == everything[:wanted]


@pytest.mark.parametrize("pack", ["true", "false"])
def test_every_rank_has_as_many_batches_however_uneven_the_documents_are(tmp_path, pack):
    """Ranks that hold shards of a model must run as many forwards, or wait for ever."""
    generator = np.random.default_rng(1)
    for modality in "ab":
        (tmp_path / "uneven" / modality).mkdir(parents=True)
        for stream in range(3):
            texts = [json.dumps({"text": "x y" * int(generator.integers(1, 400))}) for _ in range(7)]
            (tmp_path / "uneven" / modality / f"{stream}.jsonl").write_text("\n".join(texts) + "\n")
    config = write_tiny_config(tmp_path)
    source = f'data.source=[{{name="u", root="{tmp_path / "uneven"}"}}]'
    overrides = [source, "eval.every=1", "eval.holdout_fraction=0.4", "eval.batches=100000", f"data.pack={pack}"]
    plan = make_plan(load_config(config, overrides), config, 3)
    held_out = [eval_sets(plan, RankInfo(rank, rank, 3), torch.device("cpu")) for rank in range(3)]
    ranks = [list(each.batches(None)) for (each,) in held_out]
    has_targets = [sum(bool((batch.targets != -100).any()) for batch in batches) for batches in ranks]
    assert len(set(has_targets)) > 1, "all ranks have as much to read: nothing is shown"
    assert len({len(batches) for batches in ranks}) == 1
