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
}


def preview_of(tmp_path: Path, *overrides: str, world_size: int = 2) -> tuple[Preview, list[ConfigWarning]]:
    """ROOT in an override is the corpus."""
    if not (tmp_path / "corpus").exists():
        make_corpus(tmp_path / "corpus", streams=4, documents=40)
    config_path = write_tiny_config(tmp_path)
    config = load_config(config_path, [each.replace("ROOT", str(tmp_path / "corpus")) for each in overrides])
    plan = make_plan(config, config_path, world_size)
    preview = make_preview(plan)
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


def sources(*each: str, root: str = "ROOT") -> str:
    """`[[data.source]]`: name, modalities and more of each."""
    tables = (f'{{layout="nested",root="{root}",{rest}}}' for rest in each)
    return f"data.source=[{','.join(tables)}]"


BOTH = 'name="one",modalities=["a","b"],'
ONE = sources(BOTH + "weight=1.0")
LATE = sources(BOTH + 'weight={schedule="linear",unit="step",points={0=1.0,500=0.0}}')
TINY = sources('name="one",modalities=["a"]', 'name="two",modalities=["b"],weight=0.01')
FEW_PICKS = ("data.mixing.batch_size=100", "ledger.capacity=400", "data.max_group_cells=1")
GROWN = "train.micro_batches={schedule='step',points=%s}"


@pytest.mark.parametrize("key", FAULTS)
def test_a_harmful_setting_is_named_and_its_suggestion_helps(tmp_path: Path, key: str) -> None:
    _, warnings = preview_of(tmp_path, *FAULTS[key])
    found = [each for each in warnings if each.key == key]
    assert found
    assert found[0].settable
    _, after = preview_of(tmp_path, *FAULTS[key], f"{key}={found[0].value}")
    assert key not in {each.key for each in after}


def test_a_good_config_has_no_warnings(tmp_path: Path) -> None:
    full_rows = 'data.mixing={batching_mode="per_row",batch_size=4,num_streams_mixed=2}'
    _, warnings = preview_of(tmp_path, "train.steps=40", full_rows, "data.max_group_cells=0")
    assert [each.message for each in warnings] == []


@pytest.mark.parametrize(
    ("overrides", "world_size", "key", "problem"),
    [
        (FEW_PICKS, 2, "mixing.batch_size", "before it ends"),
        (
            (ONE, "train.steps=200", "data.mixing.num_streams_mixed=1"),
            2,
            "num_streams_mixed",
            "open streams at a time leave",
        ),
        ((LATE, "ledger.capacity=64"), 2, "source one: weight.points", "a point at 500, but the run has 6 steps"),
        ((TINY,), 2, "source two: weight", "hardly ever read"),
        (("train.steps=2000",), 2, "", "epochs"),
        (
            ("data.mixing.batch_size=100", "ledger.capacity=400"),
            2,
            "batching_mode",
            "of the positions of full rows hold",
        ),
        (("data.mixing.batch_size=64", "ledger.capacity=400"), 30, "mixing.batching_mode", ""),
        (
            (ONE, GROWN % "{0=1,9999=2},unit='tokens'"),
            2,
            "train.micro_batches.points",
            "a point at 9,999, but the run has 768 tokens",
        ),
    ],
)
def test_what_the_forecast_makes_doubtful_is_named(
    tmp_path: Path, overrides: tuple[str, ...], world_size: int, key: str, problem: str
) -> None:
    _, warnings = preview_of(tmp_path, *overrides, world_size=world_size)
    assert [each for each in warnings if each.key.endswith(key) and problem in each.problem]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("data.mixing.batch_size=4", "data.max_group_cells=1"), "before it ends"),
        (
            (ONE, "train.steps=200", "data.mixing.num_streams_mixed=8", "ledger.capacity=64"),
            "open streams at a time leave",
        ),
        ((ONE, GROWN % "{0=1,6=2}"), "a point at"),
    ],
)
def test_what_is_harmless_is_not_named(tmp_path: Path, overrides: tuple[str, ...], problem: str) -> None:
    assert not [each for each in preview_of(tmp_path, *overrides)[1] if problem in each.problem]


def test_uneven_batch_sizes_in_one_pool_name_the_modality_that_waits(tmp_path: Path) -> None:
    overrides = [
        ONE,
        "data.mixing.batch_size_by_modality={a=1,b=16}",
        "data.mixing.num_streams_mixed=4",
        "ledger.capacity=64",
        "train.steps=100",
        "data.max_group_cells=2",
    ]
    preview, warnings = preview_of(tmp_path, *overrides)
    found = next(each for each in warnings if each.key == "data.mixing.batch_size_by_modality")
    assert found.problem.startswith("b has 16 and a 1: b has fewer batches, so that its documents wait")
    waits = {view.name: view.longest_wait_steps for view in preview.sources[0].modalities}
    assert waits["b"] > 2 * waits["a"]  # it is the large batch that waits
    assert found.value == "{ a = 8 }"


@pytest.mark.parametrize(("num_files", "is_advised"), [(60, True), (3, False)])
def test_pools_of_their_own_are_advised_only_where_all_ranks_have_files(
    tmp_path: Path, num_files: int, is_advised: bool
) -> None:
    corpus = tmp_path / "small" / "a"
    corpus.mkdir(parents=True)
    for number in range(num_files):  # one group each
        (corpus / f"{number:02}.txt").write_text("x" * (60 + number), encoding="utf-8")
    only = sources('name="one",modalities=["a"],weight=1.0', root=str(tmp_path / "small"))
    overrides = [only, "data.mixing.batch_size_by_modality={}"]
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
