"""Real runs on full rows: their losses are those of whole documents, and a resume on any number of ranks loses nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support.checkpoints import weights
from tests.support.in_process import plan_of
from tests.support.ranks import checkpoint_differences
from tests.support.runs import make_corpus, read_rows, train, write_tiny_config
from trainer.training.build import make_model

pytestmark = pytest.mark.distributed

EXTRA = """
[checkpoint]
every = 4
keep_last = 99

[optimizer]
lr = 1e-30
"""
PER_ROW = (
    'data.mixing={batching_mode="per_row", batch_size=4, num_streams_mixed=2, repeat=false}',
    "data.max_group_cells=0",
    "train.steps=1000",
    "metrics.per_source=true",
)
# Ranks, settings.
CASES: Mapping[str, tuple[int | None, tuple[str, ...]]] = {
    "rglru": (None, ()),
    "rglru, documents, 2 ranks": (2, ('data.align="document"', "data.seq_len=8")),
    "gated_delta, 2 of 4 shards": (2, ("model.family=gated_delta", "distributed.shards=4")),
    "gru": (None, ("model.family=gru",)),
}
REPEATS = ("rglru, documents, 2 ranks", "gru")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    make_corpus(folder / "corpus", documents=5)
    return write_tiny_config(folder, EXTRA)


@pytest.fixture(scope="module")
def ran(config) -> Callable[[str], Path]:
    """The run of a case, which is made once."""

    @cache
    def make(case: str) -> Path:
        ranks, sets = CASES[case]
        train(config, config.parent / case, *PER_ROW, *sets, nproc=ranks)
        return config.parent / case

    return make


def uncut(config: Path, path: Path, sets: tuple[str, ...]) -> tuple[float, int]:
    """(sum of the losses of all tokens of whole documents, run from zero, and their number)."""
    plan = plan_of(config, *PER_ROW, *sets)
    model = make_model(plan)
    model.load_state_dict(weights(path))
    total, count = 0.0, 0
    for file in sorted((config.parent / "corpus").rglob("*.jsonl")):
        for line in file.read_text().splitlines():
            document = list(json.loads(line)["text"].encode())
            tokens = torch.tensor([[plan.tokenizer.bos_id, *document[:-1]]])
            with torch.no_grad():
                logits = model(tokens=tokens, state=None).logits[0].double()
            total += float(F.cross_entropy(logits, torch.tensor(document), reduction="sum"))
            count += len(document)
    return total, count


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in REPEATS)) for case in CASES])
def test_an_epoch_has_the_loss_of_its_documents_run_whole(config, ran, case):
    """At a learning rate that changes nothing: states follow their documents, over rows, ranks and shards."""
    path, (ranks, sets) = ran(case), CASES[case]
    expected, num_tokens = uncut(config, path, sets)
    rows = [row for (mode, _), row in read_rows(path / "metrics.jsonl").items() if mode == "train"]
    assert sum(row["tokens_in_step"] for row in rows) == num_tokens
    found = math.fsum(row["loss"] * row["tokens_in_step"] for row in rows if row["tokens_in_step"])
    assert found / num_tokens == pytest.approx(expected / num_tokens, rel=1e-6)
    for row in rows:
        assert row["ledger/cold_starts"] == 0
        assert row["ledger/false_evictions/lru"] == 0
    assert rows[-1]["ledger/live_groups"] == 0
    fills, tokens = ([row[key] for row in rows] for key in ("data/fill", "tokens_in_step"))
    assert len(rows) > 10
    if ranks is None and case != "gru":
        assert set(fills[: len(fills) * 3 // 4]) == {1.0}
    per_fill = [t / f for t, f in zip(tokens, fills, strict=True) if f]
    assert per_fill == pytest.approx([tokens[0] / fills[0]] * len(tokens))


def test_a_resumed_run_is_the_uncut_one_and_on_other_ranks_reads_the_rest(config, ran, tmp_path):
    whole, middle = ran("rglru"), ran("rglru") / "checkpoints"
    sets = (*PER_ROW, *CASES["rglru"][1])
    start = middle / "step_00000008"
    assert "full rows, align = stream: " in train(config, tmp_path / "same", *sets, more=("--resume", start))
    last = (middle / "latest").resolve().name
    assert checkpoint_differences(middle / last, tmp_path / "same" / "checkpoints" / last) == []
    first = [row for (_, step), row in read_rows(whole / "metrics.jsonl").items() if step <= 8]
    before, done = (math.fsum(row["tokens_in_step"] * row.get(key, 1) for row in first) for key in ("", "loss"))
    expected, num_tokens = uncut(config, whole, ())
    row = [*read_rows(whole / "metrics.jsonl").values()][-1]
    assert row["data/epochs_least"] == row["data/epochs_most"] == 1
    for ranks, more in ((3, ()), (2, ("data.mixing.batch_size=1",))):
        path = tmp_path / f"on_{ranks}"
        train(config, path, *sets, *more, nproc=ranks, more=("--resume", start))
        rows = [row for _, row in read_rows(path / "metrics.jsonl").items()]
        assert sum(row["tokens_in_step"] for row in rows) == num_tokens - before
        rest = math.fsum(row["loss"] * row["tokens_in_step"] for row in rows if row["tokens_in_step"])
        assert (done + rest) / num_tokens == pytest.approx(expected / num_tokens, rel=1e-6)
        assert sum(row["ledger/cold_starts"] for row in rows) == 0
