"""`train preview` as its users meet it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.in_process import program
from tests.support.runs import make_corpus, write_tiny_config
from trainer.config.load import load_config
from trainer.tools.preview.show import print_preview
from trainer.tools.preview.summary import make_preview
from trainer.training.setup.plan import make_plan

FULL_ROWS = 'data.mixing={batching_mode="per_row",batch_size=4,num_streams_mixed=2}'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    make_corpus(tmp_path / "corpus", documents=40)
    return write_tiny_config(tmp_path)


Previewed = Callable[..., str]


@pytest.fixture
def previewed(config: Path, capsys: pytest.CaptureFixture[str]) -> Previewed:
    """What `train preview` of the config on two ranks with these arguments prints."""

    def preview(*arguments: object) -> str:
        done = program(["preview", "--config", config, "--world-size", 2, *arguments], capsys)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return preview


def test_the_terminal_shows_sources_pools_and_ledger(config: Path, previewed: Previewed) -> None:
    shown = previewed()
    assert "tiny: 6 steps of 2 micro-batches on 2 ranks" in shown
    for part in (
        "Sources",
        "Modalities",
        "Ledger",
        "first",
        "at most 256 tokens per step",
        "forecast of full rows only",
    ):
        assert part in shown
    assert "has a point at 20, but the run has 6 steps" in " ".join(shown.split())
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 120
    assert not (config.parent / "runs").exists()


def test_full_rows_show_their_fill_and_documents(previewed: Previewed) -> None:
    shown = " ".join(previewed("--set", FULL_ROWS, "--set", "data.max_group_cells=0").split())
    assert "256 tokens per step of 256 (fill 100.0%, by step 100.0% to 100.0%)" in shown
    for part in ("documents", "at most 4 states (one per row)", "1 step from one chunk", "fewest"):
        assert part in shown


def test_shares_are_expected_ones_and_only_full_rows_have_tokens(previewed: Previewed) -> None:
    for sets, has_tokens in ((), False), (("--set", FULL_ROWS), True):
        content = json.loads(previewed(*sets, "--json"))
        assert content["schema_version"] == 2
        weights = [3.0 - step * 0.1 for step in range(1, 7)]
        share = sum(weight / (weight + 1) for weight in weights) / len(weights)
        assert [each["batch_share"] for each in content["sources"]] == pytest.approx([share, 1 - share])
        assert [each["tokens"] is not None for each in content["sources"]] == [has_tokens] * 2
        assert content["ledger"]["groups_in_flight"] <= content["ledger"]["capacity"]
        assert content["ledger"]["capacity_to_change_ranks"] == 3 * content["ledger"]["groups_in_flight"]


def test_no_number_is_cut_on_a_narrow_screen(config: Path) -> None:
    width = 60
    plan = make_plan(load_config(config, [FULL_ROWS]), config, 2)
    found = make_preview(plan)
    file = io.StringIO()
    print_preview(found, [], Console(file=file, width=width))
    shown = file.getvalue()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    for source in found.sources:
        assert source.tokens is not None
        assert f" {source.tokens:,.0f} " in shown
        for view in source.modalities:
            assert f" {view.picks:,.0f} " in shown


def test_all_warnings_are_shown_once_and_counted(
    config: Path, previewed: Previewed, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "source second: mixing.num_streams_mixed"
    setting = ("--set", "data.source.second.mixing.num_streams_mixed=5")
    found = json.loads(previewed(*setting, "--json"))["warnings"]
    assert key in [each["key"] for each in found]
    shown = previewed(*setting)
    assert " ".join(shown.split()).count(f"warning: {key}: 5 readers") == 1
    assert shown.splitlines()[-1] == f"{len(found)} warnings"
    (config.parent / "corpus" / "a" / "x.csv").write_text("a,b")
    beside = program(["preview", "--config", config, "--world-size", 2, *setting], capsys)
    assert "does not read 1 file (.csv): a/x.csv" in beside.stderr
    assert "5 readers" not in beside.stderr
    assert beside.stdout.splitlines()[-1] == f"{len(found) + 1} warnings, 1 of them above the tables"
