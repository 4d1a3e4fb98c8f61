"""What `train check` says of the sources, and what fills rows, against the real lanes on real files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.runs import write_tiny_config
from trainer.config.load import load_config
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.tools import content
from trainer.tools.content import contents, lane_doubts
from trainer.training.setup.plan import Plan, make_plan
from trainer.training.setup.sources import make_blend


def drawn(seed: int, count: int, least: int, most: int) -> list[int]:
    return np.random.Generator(np.random.Philox(seed)).integers(least, most, count).tolist()


# Source -> the lengths of the documents of each file.
CORPORA: Mapping[str, Mapping[str, Sequence[Sequence[int]]]] = {
    "one document a file": {"one": [[size] for size in drawn(1, 50, 40, 400)]},
    "many a file": {"one": [drawn(seed, 40, 40, 400) for seed in range(4)]},
    "two sources": {
        "one": [drawn(seed, 7, 300, 900) for seed in range(3)],
        "two": [drawn(seed, 100, 5, 60) for seed in range(3)],
    },
    "one huge document": {"one": [[6000], drawn(1, 30, 40, 100)]},
    "more rows than documents": {"one": [[300], [280], [350]]},
}
HUGE, FEW = "one huge document", "more rows than documents"
ROWS, T = 4, 16


def plan_of(folder: Path, corpus: str, *overrides: str, world_size: int = 1) -> Plan:
    sources = []
    for name, files in CORPORA[corpus].items():
        root = folder / corpus / name
        root.mkdir(parents=True, exist_ok=True)
        for number, lengths in enumerate(files):
            texts = [json.dumps({"text": "x" * size}) for size in lengths]
            (root / f"{number}.jsonl").write_text("\n".join(texts) + "\n")
        sources.append(f'{{name="{name}",paths=["{root}/*"],weight={2.0 if name == "two" else 1.0}}}')
    sets = [
        f"data.source=[{','.join(sources)}]",
        f'data.mixing={{batching_mode="per_row",batch_size={ROWS},num_streams_mixed=3}}',
        "data.max_group_cells=0",
        "train.steps=60",
        "metrics.log_interval=5",
    ]
    path = write_tiny_config(folder)
    return make_plan(load_config(path, [*sets, *overrides]), path, world_size)


def fill(plan: Plan) -> float:
    """The share of positions with a token in the real lanes of all shards."""
    tokens = longest = 0
    num_shards = plan.facts.data_shards
    for shard in range(num_shards):
        blend = make_blend(plan, RankInfo(rank=shard, local_rank=0, world_size=num_shards))
        for index in range(2 * plan.config.train.steps):
            if (batch := next(blend, None)) is None:
                break
            tokens += int((batch["segment_ids"] >= 0).sum())
            longest = max(longest, index + 1)
    return tokens / (longest * num_shards * plan.config.data.mixing.batch_size * T)


def test_more_rows_than_documents_are_named_and_the_setting_helps(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, FEW, "data.mixing.batch_size=16", "train.steps=200")
    (found,) = lane_doubts(plan, contents(plan))
    assert found.key == "data.mixing.batch_size"
    assert found.problem == "3 documents for 16 rows: a step has several of one document"
    assert found.fix == "set it to 3, or add data"
    after = plan_of(tmp_path, FEW, "data.mixing.batch_size=3", "train.steps=200")
    assert not list(lane_doubts(after, contents(after)))


@pytest.mark.parametrize("corpus", [HUGE, FEW])
def test_neither_few_nor_huge_documents_leave_rows_empty(tmp_path: Path, corpus: str) -> None:
    assert fill(plan_of(tmp_path, corpus, "data.mixing.batch_size=16", "train.steps=200")) == 1.0


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("corpus", [*CORPORA][:3])
def test_a_sound_corpus_fills_rows_and_has_no_doubt(tmp_path: Path, corpus: str, world_size: int) -> None:
    plan = plan_of(tmp_path, corpus, world_size=world_size)
    assert not list(lane_doubts(plan, contents(plan)))
    assert fill(plan) == 1.0


def test_small_data_are_counted_and_large_data_go_by_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(tmp_path, "two sources")
    for name, found in contents(plan).items():
        sizes = [size for lengths in CORPORA["two sources"][name] for size in lengths]
        assert (found.tokens, found.documents, found.longest) == (sum(sizes), len(sizes), max(sizes))
    monkeypatch.setattr(content, "OPENED_BYTES", 1)
    for source in plan.sources:
        found = contents(plan)[source.name]
        assert found.tokens == sum(Path(stream.path).stat().st_size for stream in source.streams)
        assert found.documents == 0
    np.save(tmp_path / "ids.npy", np.arange(250, dtype=np.uint16))
    ids = plan_of(tmp_path, FEW, f'data.source=[{{name="ids",paths=["{tmp_path}/ids.npy"],eod=3}}]')
    assert contents(ids)["ids"].tokens == 250


def test_a_data_set_of_ones_own_is_not_opened(tmp_path: Path) -> None:
    plan_of(tmp_path, FEW)  # writes it
    own, files = '{name="own",target="nowhere:nothing"}', f'{{name="one",paths=["{tmp_path}/{FEW}/one/*"]}}'
    assert contents(plan_of(tmp_path, FEW, f"data.source=[{own},{files}]")).keys() == {"one"}


def test_a_source_without_documents_is_refused(tmp_path: Path) -> None:
    plan_of(tmp_path, FEW)
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    plan = plan_of(tmp_path, FEW, f'data.source=[{{name="one",paths=["{tmp_path}/empty.jsonl"]}}]')
    with pytest.raises(UserError, match="source one: has no document to train on"):
        contents(plan)
