"""Every warning of the preview appears for a harmful setting, and disappears when its suggestion is followed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.runs import make_corpus, write_tiny_config
from trainer.config.load import load_config
from trainer.tools.preview.config_warnings import ConfigWarning, find_warnings, rank_warnings
from trainer.tools.preview.summary import Preview, make_preview
from trainer.training.setup.plan import make_plan

FAULTS = {
    "ledger.stale_threshold": ["ledger.wipe_mode=periodic_stale", "ledger.stale_threshold=1", "train.steps=40"],
    "ledger.wipe_mode": ["ledger.wipe_mode=full", "ledger.wipe_every=2"],
    "ledger.capacity": ["ledger.capacity=10000000"],
    "data.mixing.repeat": ["data.mixing.repeat=false", "train.steps=500"],
    "eval.every": ["eval.every=100", "eval.holdout_fraction=0.1"],
    "metrics.log_interval": ["metrics.log_interval=50"],
    "data.seq_len": ["data.seq_len=1000"],
}


def preview_of(tmp_path: Path, *overrides: str, world_size: int = 2) -> tuple[Preview, list[ConfigWarning]]:
    if not (tmp_path / "corpus").exists():
        make_corpus(tmp_path / "corpus", streams=4, documents=40)
    config_path = write_tiny_config(tmp_path)
    plan = make_plan(load_config(config_path, overrides), config_path, world_size)
    preview = make_preview(plan, world_size)
    return preview, find_warnings(plan, preview)


def test_one_of_many_ranks_that_never_reads_a_source_is_a_warning(tmp_path: Path) -> None:
    preview, _ = preview_of(tmp_path)
    config_path = tmp_path / "tiny.toml"
    plan = make_plan(load_config(config_path), config_path, 2)
    few = replace(preview.sources[0], idle_share=0.02, rank_token_shares=(0.3, 0.3, 0.4))
    assert not list(rank_warnings(plan, replace(preview, sources=(few,))))
    never = replace(few, rank_token_shares=(0.5, 0.5, 0.0))
    (warning,) = rank_warnings(plan, replace(preview, sources=(never,)))
    assert "1 of 3 ranks never read it" in warning.problem


def source(corpus: Path, rest: str, modalities: str = '["a", "b"]') -> str:
    return f'data.source=[{{name="one",layout="nested",root="{corpus}",modalities={modalities},{rest}}}]'


def keys(warnings: list[ConfigWarning]) -> set[str]:
    return {each.key for each in warnings}


@pytest.mark.parametrize("key", FAULTS)
def test_a_harmful_setting_is_named_and_its_suggestion_helps(tmp_path: Path, key: str) -> None:
    _, warnings = preview_of(tmp_path, *FAULTS[key])
    found = [each for each in warnings if each.key == key]
    assert found
    assert found[0].settable
    _, after = preview_of(tmp_path, *FAULTS[key], f"{key}={found[0].value}")
    assert key not in keys(after)


def test_a_good_config_has_no_warnings(tmp_path: Path) -> None:
    _, warnings = preview_of(tmp_path, "train.steps=40")
    assert [each.message for each in warnings] == []


def test_slices_of_few_picks_cause_churn(tmp_path: Path) -> None:
    short = ["data.mixing.batch_size=100", "ledger.capacity=400", "data.max_group_cells=1"]
    preview, warnings = preview_of(tmp_path, *short)
    assert preview.sources[0].picks_per_slice[1] <= 4  # type: ignore[index]
    assert any("a reader lasts" in each.problem for each in warnings)
    _, warnings = preview_of(tmp_path, "data.mixing.batch_size=4", "data.max_group_cells=1")
    assert not any("a reader lasts" in each.problem for each in warnings)


def test_uneven_batch_sizes_in_one_pool_name_the_modality_that_waits(tmp_path: Path) -> None:
    overrides = [
        source(tmp_path / "corpus", "weight=1.0"),
        "data.mixing.batch_size_by_modality={a=1,b=16}",
        "data.mixing.num_streams_mixed=4",
        "ledger.capacity=64",
        "train.steps=100",
        "data.max_group_cells=2",
    ]
    preview, warnings = preview_of(tmp_path, *overrides)
    found = next(each for each in warnings if each.key == "data.mixing.batch_size_by_modality")
    assert found.problem.startswith("b has 16 and a 1 in one pool: b has few picks and waits")
    waits = {view.name: view.longest_wait_steps for view in preview.sources[0].modalities}
    assert waits["b"] > 2 * waits["a"]  # it is the large batch that waits
    assert found.value == "{ a = 8 }"


def test_an_absent_modality_is_named(tmp_path: Path) -> None:
    one = [source(tmp_path / "corpus", "weight=1.0"), "train.steps=200"]
    _, warnings = preview_of(tmp_path, *one, "data.mixing.num_streams_mixed=1")
    found = next(each for each in warnings if each.key == "source one: mixing.num_streams_mixed")
    assert "without an active reader" in found.problem
    _, warnings = preview_of(tmp_path, *one, "data.mixing.num_streams_mixed=8", "ledger.capacity=64")
    assert not any("without an active reader" in each.problem for each in warnings)


def test_points_beyond_the_run_and_tiny_weights_are_named(tmp_path: Path) -> None:
    weight = 'weight={schedule="linear",unit="step",points={0=1.0,500=0.0}}'
    _, warnings = preview_of(tmp_path, source(tmp_path / "corpus", weight), "ledger.capacity=64")
    found = next(each for each in warnings if each.key == "source one: weight.points")
    assert "a point at 500, but the run has 6 steps" in found.problem
    root = tmp_path / "corpus"
    two = (
        f'data.source=[{{name="one",layout="nested",root="{root}",modalities=["a"]}},'
        f'{{name="two",layout="nested",root="{root}",modalities=["b"],weight=0.01}}]'
    )
    _, warnings = preview_of(tmp_path, two)
    assert any(each.key == "source two: weight" and "hardly ever read" in each.problem for each in warnings)


def test_repeated_epochs_idle_ranks_and_empty_lanes_are_named(tmp_path: Path) -> None:
    _, warnings = preview_of(tmp_path, "train.steps=2000")
    assert any("epochs" in each.problem for each in warnings)
    _, warnings = preview_of(tmp_path, "data.mixing.batch_size=100", "ledger.capacity=400")
    assert any("average batch has" in each.problem for each in warnings)
    _, warnings = preview_of(tmp_path, "data.mixing.batch_size=64", "ledger.capacity=400", world_size=30)
    assert any(each.key.endswith("mixing.batching_mode") for each in warnings)


@pytest.mark.parametrize(("num_files", "is_advised"), [(60, True), (3, False)])
def test_pools_of_their_own_are_advised_only_where_all_ranks_have_files(
    tmp_path: Path, num_files: int, is_advised: bool
) -> None:
    corpus = tmp_path / "small" / "a"
    corpus.mkdir(parents=True)
    for number in range(num_files):  # one group each
        (corpus / f"{number:02}.txt").write_text("x" * (60 + number), encoding="utf-8")
    overrides = [source(tmp_path / "small", "weight=1.0", '["a"]'), "data.mixing.batch_size_by_modality={}"]
    preview, warnings = preview_of(tmp_path, *overrides, world_size=8)
    (view,) = preview.sources
    assert sum(view.rank_token_shares) == pytest.approx(1.0)
    assert view.masked_share["per_stream"] > 0.8
    found = next(each for each in warnings if each.key == "source one: mixing.batching_mode")
    assert ('set it to "device_per_stream"' in found.value) == is_advised
    assert "fewer ranks" in found.value
    alone, after = preview_of(tmp_path, *overrides, "data.mixing.batching_mode=device_per_stream", world_size=8)
    assert alone.sources[0].rank_token_shares == view.rank_token_shares
    assert any(each.key == found.key for each in after) == (not is_advised)


def test_a_batch_that_is_planned_beyond_the_run_is_named(tmp_path: Path) -> None:
    only = source(tmp_path / "corpus", "weight=1")
    for setting, problem in (
        ("{0=1,6=2,7=4}", "a point at 7, but the run has 6 steps"),
        ("{0=1,9999=2},unit='tokens'", "a point at 9,999, but the run has 768 tokens"),
    ):
        _, warnings = preview_of(tmp_path, only, f"train.micro_batches={{schedule='step',points={setting}}}")
        found = next(each for each in warnings if each.key == "train.micro_batches.points")
        assert problem in found.problem
    _, warnings = preview_of(tmp_path, only, "train.micro_batches={schedule='step',points={0=1,6=2}}")
    assert not [each for each in warnings if each.key.startswith("train.micro_batches")]
