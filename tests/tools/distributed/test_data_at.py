"""`train data at`: the documents that a step has read, of runs on ranks, on shards, and resumed with other settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.core.distributed.test_data_shards import EXTRA as EVERY_FOURTH
from tests.support.runs import FULL_ROWS, train, write_tiny_config
from trainer.training.extension import Extension

pytestmark = pytest.mark.distributed

EXTRA = f"{EVERY_FOURTH}keep_last = 9\n"
NOTES = 'extension=[{target="tests.tools.distributed.test_data_at:Notes"}]'
SETS = ("train.steps=8", "metrics.log_interval=3", NOTES)
# Ranks, the step, settings.
CASES: Mapping[str, tuple[int | None, int, tuple[str, ...]]] = {
    "shards": (2, 6, ("distributed.shards=4", "data.mixing.batch_size=2")),
    "full rows": (2, 6, (FULL_ROWS, "data.seq_len=256", "distributed.shards=4")),
    "growing": (None, 6, ("train.micro_batches={schedule='step', points={0=1, 5=2}}",)),
    "from the start": (None, 3, ("train.tokens=900", "train.steps=0")),
}


class Notes(Extension):
    """Writes down what each step reads, by shard."""

    every_step = True

    def settled(self, step, sums):
        with (self.run.run_dir.path / f"read_{self.run.info.rank}.jsonl").open("a") as file:
            for micro in step.window:
                number = self.run.state.shards[micro.shard].number
                file.write(json.dumps([step.number, number, json.loads(str(micro.located))["rows"]]) + "\n")


def has_read(run_dir: Path, step: int) -> list[list[Any]]:
    """The documents of each row of a step, with the shard, as `Notes` wrote them last."""
    lines = [json.loads(line) for file in run_dir.glob("read_*.jsonl") for line in file.read_text().splitlines()]
    by_shard: dict[int, list[Any]] = {}
    for at, shard, rows in lines:
        if at == step:
            by_shard.setdefault(shard, []).extend(rows)
    return [[shard, row] for shard in sorted(by_shard) for row in by_shard[shard]]


def data_at(verb: Callable[..., Any], run_dir: Path, step: int, *more: str) -> Any:
    done = verb("data", "at", run_dir, step, "--trust-code", "--json", *more)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def documents_of(rows: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
    return [[row["shard"], row["documents"]] for row in rows]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_tiny_config(tmp_path_factory.mktemp("at"), EXTRA)


@pytest.mark.parametrize("case", CASES)
def test_the_rows_are_those_that_the_step_has_read(config, tmp_path, verb, case):
    ranks, step, sets = CASES[case]
    train(config, tmp_path / "run", *SETS, *sets, nproc=ranks)
    found = data_at(verb, tmp_path / "run", step)
    assert found["from_step"] == (4 if step > 4 else 0)
    assert documents_of(found["rows"]) == has_read(tmp_path / "run", step) != []
    with_text = data_at(verb, tmp_path / "run", step, "--text")["rows"]
    for row in with_text:
        assert sum(each["stop"] - each["start"] for each in row["documents"]) == row["tokens"]
        for each in row["documents"]:
            lines = (config.parent / "corpus" / each["stream"]).read_text().splitlines()
            text = json.loads(lines[each["document"]])["text"]
            assert each["text"] == text[each["start"] : each["stop"]]
    assert case != "full rows" or any(len(row["documents"]) > 1 for row in with_text)
    shown = verb("data", "at", tmp_path / "run", step, "--text", "--trust-code").stdout
    assert f"read from step {found['from_step']}" in " ".join(shown.split())
    beyond = verb("data", "at", tmp_path / "run", 99, "--trust-code").stderr
    assert ("trained 8 steps on record" in beyond) == (case == "from the start")
    assert f"document {with_text[0]['documents'][0]['document']}: " in shown


def test_what_cannot_be_read_is_refused(tmp_path, verb):
    config = write_tiny_config(tmp_path, EXTRA)
    train(config, tmp_path / "run", *SETS)
    assert "--trust-code" in verb("data", "at", tmp_path / "run", 3).mistake
    assert "has the steps 1 to 8, not 9" in verb("data", "at", tmp_path / "run", 9, "--trust-code").mistake
    file = next((tmp_path / "corpus" / "a").glob("*.jsonl"))
    file.write_text(file.read_text().replace("the", "The"))
    said = verb("data", "at", tmp_path / "run", 6, "--trust-code").mistake
    assert "the data changed" in said
    assert said.endswith("put the data back\n")


def test_a_resumed_run_is_read_with_the_settings_of_each_launch(config, tmp_path, verb):
    second = "data.source.second.weight={}".format
    train(config, tmp_path / "trunk", *SETS, "train.steps=4")
    branch = ("--resume", tmp_path / "trunk" / "checkpoints" / "step_00000004")
    train(config, tmp_path / "run", *SETS, second(9), "checkpoint.every=2", more=branch)
    train(config, tmp_path / "run", *SETS, "train.steps=10", second(0.1), more=("--resume", "auto"))
    for step, origin in ((6, 4), (9, 8)):  # from the trunk's checkpoint, and from its own
        found = data_at(verb, tmp_path / "run", step)
        assert found["from_step"] == origin
        assert documents_of(found["rows"]) == has_read(tmp_path / "run", step) != []
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000008")
    assert "other settings since step 8" in verb("data", "at", tmp_path / "run", 9, "--trust-code").mistake
    shutil.rmtree(tmp_path / "trunk")
    assert "step_00000004" in verb("data", "at", tmp_path / "run", 5, "--trust-code").mistake
