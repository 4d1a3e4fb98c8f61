"""The catalog: its rows are complete, and look-up resolves patterns, prefixes and siblings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainer.metrics.catalog import CATALOG, UnknownMetric, family, is_known, lookup, lookup_or_gauge, register


@pytest.mark.parametrize(
    "key",
    ["", "los", "eval_", "eval_eval_loss", "loss_max", "objective/", "objective/a/b", "objective/<name>x/y",
     "token_type/letter", "gns/skipped_max", "ledger/live_groups_max", "train/loss", "eval_los", "ema/ema/loss"],
)  # fmt: skip
def test_an_unknown_key_is_refused(key: str) -> None:
    assert not is_known(key)
    with pytest.raises(UnknownMetric, match="is not in the catalog"):
        lookup(key)


def test_names_are_unique_and_rows_complete() -> None:
    assert len({spec.name for spec in CATALOG}) == len(CATALOG)
    for spec in CATALOG:
        for text in (spec.description, spec.healthy, spec.pathological):
            assert text.endswith("."), f"{spec.name}: {text!r} is not a sentence"
        assert spec.title
        assert spec.group


def test_kinds_and_reductions_fit_together() -> None:
    for spec in CATALOG:
        low, high = spec.band or (0.0, 0.0)
        assert low is not None or high is not None, spec.name
        assert low is None or high is None or low <= high, spec.name
        how = {"counter": ("sum",), "flag": ("max",)}.get(spec.kind, (spec.window,))
        assert spec.window in how, spec.name
        assert spec.ranks != "sum_and_worst" or spec.window == "sum", spec.name
        assert spec.ranks not in ("weighted_mean", "max_over_sum") or spec.is_ratio, spec.name
        if spec.has_error:
            assert family(f"{spec.name}_se") == family(spec.name)


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("loss", "loss"),
        ("eval_loss", "loss"),
        ("token_type/digit/loss", "token_type/<type>/loss"),
        ("eval_token_type/digit/loss", "token_type/<type>/loss"),
        ("objective/z_loss", "objective/<name>"),
        ("ledger/cold_starts_max", "ledger/cold_starts"),
        ("stream_mixing/active/remaining_max", "stream_mixing/active/remaining_max"),
    ],
)
def test_the_family_of_a_key_is_its_row(key, found):
    assert family(key) == found


def test_registered_rows_are_found_like_the_catalog_s():
    row = replace(lookup("loss"), name="moe/aux_loss", ranks="max")
    pattern = replace(row, name="moe/<own-expert>/load", kind="counter", ranks="sum_and_worst")
    register(row, pattern)
    register(row, pattern)  # a module that is imported again
    assert lookup("moe/aux_loss") == row
    assert family("moe/7/load") == "moe/<own-expert>/load"
    assert lookup_or_gauge("moe/7/load_max").ranks == "max"
    with pytest.raises(ValueError, match="'loss' is in the catalog already, with another row"):
        register(replace(row, name="loss"))
