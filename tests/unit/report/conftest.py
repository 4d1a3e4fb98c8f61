"""Synthetic runs on disk, read by the real reader."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from trainer.metrics.payload_contract import build_payload, encode_payload
from trainer.tools.runs.load import RunRecord, load_run

MakeRun = Callable[..., RunRecord]


@pytest.fixture
def make_run(tmp_path) -> MakeRun:
    """`make_run(name, train={key: values}, evals={step: {key: value}}, config={...})`: steps count from 1."""

    def make(
        name: str,
        train: Mapping[str, list[float | None]],
        evals: Mapping[int, Mapping[str, float]] | None = None,
        config: Mapping[str, Any] | None = None,
        environment: Mapping[str, Any] | None = None,
    ) -> RunRecord:
        directory: Path = tmp_path / name
        directory.mkdir(parents=True)
        lines = []
        for step in range(1, 1 + max(map(len, train.values()), default=0)):
            row = {key: values[step - 1] for key, values in train.items() if len(values) >= step}
            known = {key: value for key, value in row.items() if value is not None}
            if known:
                lines.append(encode_payload(build_payload("train", step, known)))
            if evals and step in evals:
                lines.append(encode_payload(build_payload("eval", step, evals[step])))
        (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (directory / "config.resolved.toml").write_bytes(tomli_w.dumps(config or {}).encode())
        (directory / "env.json").write_text(json.dumps(environment or {}), encoding="utf-8")
        return load_run(directory)

    return make
