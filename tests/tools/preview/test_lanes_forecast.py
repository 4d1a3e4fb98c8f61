"""The forecast of full rows, against the real lanes on real files: exact where it counts, within 2 % beyond."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.runs import write_tiny_config
from trainer.config.load import load_config
from trainer.distributed.env import RankInfo
from trainer.tools.preview.config_warnings import ConfigWarning, find_warnings
from trainer.tools.preview.summary import Preview, make_preview
from trainer.training.setup.plan import Plan, make_plan
from trainer.training.setup.sources import make_blend


def drawn(seed: int, count: int, least: int, most: int) -> list[int]:
    return np.random.Generator(np.random.Philox(seed)).integers(least, most, count).tolist()


# Source -> the lengths of the documents of each file.
CORPORA: Mapping[str, Mapping[str, Sequence[Sequence[int]]]] = {
    "one document a file": {"one": [[size] for size in drawn(1, 50, 40, 400)]},
    "many a file": {"one": [drawn(seed, 40, 40, 400) for seed in range(4)]},
    "short documents": {"one": [drawn(seed, 300, 1, 30) for seed in range(3)]},
    "two sources": {
        "one": [drawn(seed, 7, 300, 900) for seed in range(3)],
        "two": [drawn(seed, 100, 5, 60) for seed in range(3)],
    },
    "one huge document": {"one": [[6000], drawn(1, 30, 40, 100)]},
    "more rows than documents": {"one": [[300], [280], [350]]},
}
HUGE, FEW, SHORT = "one huge document", "more rows than documents", "short documents"
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


def read(plan: Plan) -> tuple[float, Counter[tuple[str, str]], int]:
    """(fill, tokens by source and modality, steps) of the real lanes of all shards."""
    tokens: Counter[tuple[str, str]] = Counter()
    longest, num_shards = 0, plan.facts.data_shards
    for shard in range(num_shards):
        blend = make_blend(plan, RankInfo(rank=shard, local_rank=0, world_size=num_shards))
        for index in range(plan.num_batches):
            if (batch := next(blend, None)) is None:
                break
            sizes = np.bincount(batch["segment_ids"].ravel() + 1)[1:].tolist()
            for label, modality, size in zip(batch["dataset_labels"], batch["dataset_segments"], sizes, strict=True):
                tokens[label, modality] += size
            longest = max(longest, index + 1)
    steps = -(-longest // plan.config.train.micro_batches)
    full = steps * plan.config.train.micro_batches * num_shards * plan.config.data.mixing.batch_size * T
    return tokens.total() / full, tokens, steps


@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.parametrize(
    ("align", "world_size", "repeat"),
    [("stream", 1, "true"), ("document", 1, "true"), ("stream", 3, "true"), ("document", 2, "false")],
)
def test_the_forecast_is_what_the_lanes_then_read(
    tmp_path: Path, corpus: str, align: str, world_size: int, repeat: str
) -> None:
    sets = (f'data.align="{align}"', f"data.mixing.repeat={repeat}", f"train.steps={300 if repeat == 'false' else 60}")
    plan = plan_of(tmp_path, corpus, *sets, world_size=world_size)
    fill, tokens, steps = read(plan)
    preview = make_preview(plan)
    assert preview.is_counted
    assert preview.fill is not None
    assert preview.fill.mean == pytest.approx(fill)
    assert preview.fill.full_tokens == 2 * ROWS * T * world_size
    views = {(source.name, view.name): view.tokens for source in preview.sources for view in source.modalities}
    assert views == tokens
    assert (preview.ends_at_step or plan.config.train.steps) >= steps
    for source in preview.sources:
        assert sum(source.rank_token_shares) == pytest.approx(1.0)
        sizes = [size for lengths in CORPORA[corpus][source.name] for size in lengths]
        assert sum(view.corpus_tokens for view in source.modalities) == sum(sizes)
        if repeat == "false" and preview.ends_at_step:
            assert source.epochs == pytest.approx(1.0)
            assert sum(view.picks for view in source.modalities) == len(sizes)
            assert sum(view.exhausts for view in source.modalities) >= len(CORPORA[corpus][source.name])
    if align == "stream" and repeat == "true" and corpus not in (HUGE, FEW):
        assert fill == 1.0
    elif align == "document" and repeat == "true" and corpus not in (HUGE, FEW, "two sources"):
        expected = sum(sizes) / sum(-(-size // T) * T for size in sizes)
        assert fill == pytest.approx(expected, abs=0.02)
        assert preview.fill.padding == pytest.approx(1 - expected)
    ledger = preview.ledger
    assert ledger is not None
    assert (ledger.wait_bound_steps, ledger.groups_in_flight) == (1, ROWS)


@pytest.mark.parametrize("corpus", CORPORA)
def test_beyond_what_is_counted_the_forecast_is_right_within_2_percent(tmp_path: Path, corpus: str) -> None:
    plan = plan_of(tmp_path, corpus, "train.steps=400", world_size=2)
    fill, tokens, _ = read(plan)
    preview = make_preview(plan, most=6400 if corpus == HUGE else 2400)  # the longest document, at least
    assert not preview.is_counted
    assert preview.fill is not None
    assert preview.fill.mean == pytest.approx(fill, abs=0.02)
    found = sum(source.tokens or 0 for source in preview.sources)
    assert found == pytest.approx(tokens.total(), abs=0.02 * tokens.total() / fill)
    for source in preview.sources:
        own = sum(count for (name, _), count in tokens.items() if name == source.name)
        assert source.tokens == pytest.approx(own, rel=0.1)


def test_the_end_of_data_without_repeat_is_found_though_it_is_not_counted(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "many a file", "train.steps=2000", "data.mixing.repeat=false")
    whole, short = make_preview(plan), make_preview(plan, most=800)
    assert whole.is_counted > short.is_counted
    assert short.ends_at_step == pytest.approx(whole.ends_at_step, rel=0.05)
    assert [source.epochs for source in short.sources] == [1.0]


def warned(folder: Path, corpus: str, *overrides: str, world_size: int = 1) -> tuple[Preview, list[ConfigWarning]]:
    plan = plan_of(folder, corpus, *overrides, world_size=world_size)
    preview = make_preview(plan)
    return preview, find_warnings(plan, preview)


BIG = "data.mixing.batch_size=16"


@pytest.mark.parametrize(
    ("corpus", "overrides", "key", "words"),
    [
        (HUGE, (BIG,), "data.mixing.batch_size", "the longest document has 6,000 tokens"),
        (FEW, (BIG,), "data.mixing.batch_size", "a run has 3 documents for 16 rows"),
        (
            "many a file",
            ("model.target=tests.support.models:dropout", "data.seq_len=256"),
            "data.seq_len",
            "pads documents",
        ),
        (SHORT, ('data.align="document"',), "data.align", "pads documents"),
    ],
)
def test_low_fill_is_named_and_the_setting_helps(
    tmp_path: Path, corpus: str, overrides: tuple[str, ...], key: str, words: str
) -> None:
    before, warnings = warned(tmp_path, corpus, *overrides)
    (found,) = [each for each in warnings if each.key == key and words in each.problem]
    assert found.settable
    after, left = warned(tmp_path, corpus, *overrides, f"{key}={found.value}")
    assert before.fill is not None
    assert after.fill is not None
    assert before.fill.mean < 0.9 <= after.fill.mean
    assert key not in {each.key for each in left}


@pytest.mark.parametrize("corpus", [*CORPORA][:4])
def test_full_rows_of_a_sound_corpus_have_no_warnings(tmp_path: Path, corpus: str) -> None:
    _, warnings = warned(tmp_path, corpus, "train.steps=20", world_size=2)
    assert [each.message for each in warnings] == []


def test_a_data_set_of_ones_own_is_not_opened_and_its_batches_are_not_counted(tmp_path: Path) -> None:
    plan_of(tmp_path, "many a file")  # writes it
    own, files = '{name="own",target="nowhere:nothing"}', f'{{name="one",paths=["{tmp_path}/many a file/one/*"]}}'
    preview = make_preview(plan_of(tmp_path, "many a file", f"data.source=[{own},{files}]"))
    assert [source.tokens is None for source in preview.sources] == [True, False]
    assert preview.fill is not None
    assert preview.fill.mean == 1.0
    assert preview.fill.full_tokens == pytest.approx(2 * ROWS * T / 2, rel=0.2)
    assert make_preview(plan_of(tmp_path, "many a file", f"data.source=[{own}]")).fill is None
