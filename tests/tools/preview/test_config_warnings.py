"""Every warning of the preview appears for a harmful setting, and disappears when its suggestion is followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import make_corpus, write_tiny_config
from trainer.cli.parts import PARTS
from trainer.config.load import load_config
from trainer.tools.preview.config_warnings import ConfigWarning, find_warnings
from trainer.tools.preview.summary import Preview, make_preview
from trainer.training.setup.plan import make_plan

FULL_ROWS = 'data.mixing={batching_mode="per_row",batch_size=4,num_streams_mixed=2}'
FAULTS = {
    "ledger.stale_threshold": ["ledger.wipe_mode=periodic_stale", "ledger.stale_threshold=1", "train.steps=40"],
    "ledger.wipe_mode": ["ledger.wipe_mode=full", "ledger.wipe_every=2"],
    "ledger.capacity": ["ledger.capacity=10000000"],
    "data.mixing.repeat": [FULL_ROWS, "data.mixing.repeat=false", "train.steps=500"],
    "eval.every": ["eval.every=100", "eval.holdout_fraction=0.1"],
    "metrics.log_interval": ["metrics.log_interval=50"],
}


def preview_of(tmp_path: Path, *overrides: str, world_size: int = 2) -> tuple[Preview, list[ConfigWarning]]:
    """ROOT in an override is the corpus."""
    if not (tmp_path / "corpus").exists():
        make_corpus(tmp_path / "corpus", streams=4, documents=40)
    config_path = write_tiny_config(tmp_path)
    config = load_config(config_path, [each.replace("ROOT", str(tmp_path / "corpus")) for each in overrides])
    plan = make_plan(config, config_path, world_size, parts=PARTS)
    preview = make_preview(plan)
    return preview, find_warnings(plan, preview)


def sources(*each: str, root: str = "ROOT") -> str:
    """`[[data.source]]`: name, modalities and more of each."""
    tables = (f'{{root="{root}",{rest}}}' for rest in each)
    return f"data.source=[{','.join(tables)}]"


BOTH = 'name="one",modalities=["a","b"],'
ONE = sources(BOTH + "weight=1.0")
LATE = sources(BOTH + 'weight={schedule="linear",unit="step",points={0=1.0,500=0.0}}')
TINY = sources('name="one",modalities=["a"]', 'name="two",modalities=["b"],weight=0.01')
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
    _, warnings = preview_of(tmp_path, "train.steps=40", FULL_ROWS, "data.max_group_cells=0")
    assert [each.message for each in warnings] == []


@pytest.mark.parametrize(
    ("overrides", "key", "problem"),
    [
        ((LATE, "ledger.capacity=64"), "source one: weight.points", "a point at 500, but the run has 6 steps"),
        ((TINY,), "source two: weight", "hardly ever read"),
        ((FULL_ROWS, "train.steps=2000"), "", "epochs"),
        ((FULL_ROWS, TINY, "train.steps=200"), "data.source.weight", "of the corpus and"),
        (
            (ONE, GROWN % "{0=1,9999=2},unit='tokens'"),
            "train.micro_batches.points",
            "a point at 9,999, but the run has 768 tokens",
        ),
    ],
)
def test_what_is_doubtful_is_named(tmp_path: Path, overrides: tuple[str, ...], key: str, problem: str) -> None:
    _, warnings = preview_of(tmp_path, *overrides)
    assert [each for each in warnings if each.key.endswith(key) and problem in each.problem]


def test_a_point_within_the_run_is_not_named(tmp_path: Path) -> None:
    assert not [each for each in preview_of(tmp_path, ONE, GROWN % "{0=1,6=2}")[1] if "a point at" in each.problem]
