"""Synthetic runs on disk, read by the real reader."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.records import write_record
from trainer.tools.runs.load import RunRecord, load_run

MakeRun = Callable[..., RunRecord]


@pytest.fixture
def make_run(tmp_path) -> MakeRun:
    """`make_run(name, train={key: values}, evals={step: {key: value}}, config={...})`: steps count from 1."""

    def make(name, train, evals=None, config=None, environment=None) -> RunRecord:
        return load_run(write_record(tmp_path / name, train, evals, config=config or {}, env=environment or {}))

    return make
