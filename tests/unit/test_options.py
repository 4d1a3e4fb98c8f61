"""The options of the parts: each class is a table of the config, and checks its values as pydantic does."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from typing import Any

import pytest

from trainer.config.data_tables import MixingTable
from trainer.config.schema import CoordTable, DistributedTable, LedgerTable, MetricsTable, ObjectiveTable, Table
from trainer.options import Options

TABLES = (CoordTable, DistributedTable, LedgerTable, MetricsTable, MixingTable, ObjectiveTable)
NUMBERS = (-1, 0, 1, 2, 10**6, 10**7, 10**9, 10**10, 0.5, 1.0, float("nan"), 1e9, 1e12)
OTHERS = (True, "lru", "weighted", {"a": 0}, {"a": 1})


def is_refused(make: type, settings: dict[str, Any]) -> bool:
    with suppress(ValueError):
        return not make(**settings)
    return True


@pytest.mark.parametrize("table", TABLES)
def test_options_accept_what_the_table_accepts(table: type[Table]) -> None:
    (own,) = (base for base in table.__bases__ if issubclass(base, Options))
    needed = {"first_token": 1, "num_bins": 2, "sigma": 1.0} if table is CoordTable else {}
    for each in fields(own):
        assert table.model_fields[each.name].description or each.name == "coord"
        values = [value for value in (*NUMBERS, *OTHERS) if each.name != "coord"]
        refused = [is_refused(own, {**needed, each.name: value}) for value in values]
        assert refused == [is_refused(table, {**needed, each.name: value}) for value in values], each.name
