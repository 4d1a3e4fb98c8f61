"""The seam for what rides on a run: own extensions, the guard around them, and what is imported when they are off."""

from __future__ import annotations

import gc
import json
import re
import sys
import weakref

import pytest

from tests.support.in_process import train_here
from tests.support.runs import read_rows, run, write_tiny_config
from trainer.errors import UserError
from trainer.training import main
from trainer.training.main import UnexpectedExit

OWN = '''
import torch
from trainer.metrics.catalog import register
from trainer.metrics.catalog_rows import MetricSpec
from trainer.training.extension import Extension

TEXTS = dict.fromkeys(("group", "title", "unit", "description", "healthy", "pathological"), "")
for name in ("own/recorded", "own/micro_done"):
    register(MetricSpec(name=name, **TEXTS, window="sum", ranks="sum"))


class Counts(Extension):
    """Reports, sums and keeps what it has counted."""

    metric_keys = ("own/micros", "own/sum")

    def __init__(self, run, *, scale=1.0, num_sums=1):
        super().__init__(run)
        self.scale, self.num_sums, self.steps = scale, num_sums, 0

    def micro_done(self, micro, result):
        self.run.record("own/micros", self.scale)

    def updated(self):
        return torch.full((1,), self.run.info.rank + 1.0, dtype=torch.float64)

    def settled(self, step, sums):
        self.steps += 1
        if sums is not None:
            self.run.record("own/sum", sums[0])

    def state_dict(self):
        return {"steps": self.steps, "keys": {1: (2, float("inf"))}}

    def load_state_dict(self, state):
        self.steps = state["steps"] * (state["keys"] == {1: (2, float("inf"))})


class Records(Extension):
    metric_keys = ("own/recorded",)

    def micro_done(self, micro, result):
        self.run.record("own/recorded", 1.0 / (1 - self.run.info.rank))
        self.run.record("loss", 7.0)


class Exits(Counts):
    def __init__(self, run):
        raise SystemExit(3)


def make(run):
    """Forgets to return what it makes."""


class Breaks(Extension):
    """Raises on one rank in one of its moments, or returns too many sums."""

    num_sums = 1

    def __init__(self, run, *, at, rank=0):
        super().__init__(run)
        self.at, self.rank = at, rank
        self.metric_keys = {"names": ("own/names", 3), "a text": "own/text"}.get(at, (f"own/{at}",))

    def breaks(self, moment):
        if moment == self.at and self.run.info.rank == self.rank:
            raise RuntimeError("broken on purpose")

    def micro_done(self, micro, result):
        self.breaks("micro_done")
        self.run.record(self.metric_keys[0], 1.0)

    def updated(self):
        self.breaks("updated")
        return torch.zeros(1 + (self.at == "sums" and self.run.info.rank == self.rank), dtype=torch.float64)

    def settled(self, step, sums):
        self.breaks("settled")

    def drain_metrics(self):
        self.breaks("drain_metrics")
        return 3 if self.at == "a number" else {self.metric_keys[0]: 1.0}

    def state_dict(self):
        return {"no mapping": 3, "no JSON": {"steps": {1}}}.get(self.at, {})

    def at_boundary(self, step, *, is_last):
        if step == self.at:
            self.run.failure = "on purpose"
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The tiny config, beside a module with the extensions."""
    (tmp_path / "own_extensions.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_extensions", raising=False)
    return write_tiny_config(tmp_path)


def table(name: str, **args: object) -> str:
    given = ", ".join(f"{key} = {json.dumps(value)}" for key, value in args.items())
    return f'{{target = "own_extensions:{name}", args = {{{given}}}}}'


MOMENTS = ("micro_done", "updated", "sums", "settled", "drain_metrics")


@pytest.mark.distributed
def test_they_report_sum_and_resume_beside_others_that_fail_on_one_rank(own, tmp_path, capsys):
    place = tmp_path / "run"
    tables = [table("Counts", scale=2.5), table("Records"), *(table("Breaks", at=at, rank=1) for at in MOMENTS)]
    words = [f"extension=[{', '.join(tables)}]", "train.steps=6", "checkpoint.every=4"]
    options = [word for each in words for word in ("--set", each)]
    ended = run("--config", own, "--run-dir", place, *options, nproc=2, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("failed and is off from now on: RuntimeError: broken on purpose") == len(MOMENTS) - 1
    assert ended.stderr.count("off from now on: RuntimeError: it gave no sums on a rank") == len(MOMENTS)  # by rank 0
    assert (place / "events.jsonl").read_text().count("it gave no sums on a rank") >= len(MOMENTS)
    rows = read_rows(place / "metrics.jsonl")
    assert rows["train", 6]["own/micros"] == 2.5
    assert "metric 'loss' is left out: the name is one of the tracker's own" in ended.stderr
    assert rows["train", 6]["own/sum"] == 3.0  # 1 of rank 0 and 2 of rank 1
    assert not any({"own/recorded", "own/micro_done"} & row.keys() for row in rows.values())  # of rank 0 alone

    def kept(step: int) -> list[object]:
        state = json.loads((place / "checkpoints" / f"step_{step:08d}" / "state.json").read_text())
        return [each["steps"] for each in state["extensions"].values() if "steps" in each]

    assert kept(6) == [6]
    # In another order: a state belongs to a target.
    tables = [*(table("Breaks", at=at) for at in ("a number", "no mapping", "no JSON")), table("Counts")]
    capsys.readouterr()
    train_here(own, place, f"extension=[{', '.join(tables)}]", "train.steps=8", "checkpoint.resume=auto")
    assert kept(8) == [8]
    assert capsys.readouterr().err.count("failed and is off from now on: ") == 3


@pytest.mark.parametrize(("at", "saved"), [(4, 2), (6, 6)])
def test_one_that_finds_a_failure_at_a_boundary_ends_the_run_before_it_is_saved(own, tmp_path, at, saved):
    sets = ("checkpoint.every=2", f"extension=[{table('Breaks', at=at)}]")
    train_here(own, tmp_path / "run", *sets, code=1)
    assert (tmp_path / "run" / "checkpoints" / "latest").resolve().name == f"step_{saved:08d}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ('{target = "own_extensions:Absent"}', "own_extensions"),
        ('{target = "own_extensions:Counts", args = {other = 1}}', "other"),
        (table("Counts", num_sums=0), "but num_sums = 0"),
        (table("Counts", num_sums=-1), "own_extensions:Counts.*num_sums and boundary_every must be counts"),
        *((table("Breaks", at=at), "own_extensions:Breaks.*a tuple of texts") for at in ("names", "a text")),
        ('{target = "own_extensions:make"}', "must make an Extension, got None"),
        ('{target = "own_extensions:Exits"}', r"sys.exit\(3\) was called"),
    ],
)
def test_one_that_cannot_be_made_is_refused_before_the_first_step_and_the_record_says_so(own, given, message):
    with pytest.raises((UserError, UnexpectedExit), match=message):
        train_here(own, own.parent / "run", f"extension=[{given}]")
    ended = json.loads((own.parent / "run" / "status.json").read_text())
    assert (ended["state"], ended["last_step"]) == ("failed", 0)
    assert re.search(message, ended["reason"])


def test_a_run_that_is_done_is_freed_without_a_collection(tmp_path, monkeypatch):
    # It would keep the process group, whose threads can abort the process at exit or disturb the next group.
    runs = []
    run_loop = main.run_loop

    def watched(run):
        runs.append(weakref.ref(run))
        return run_loop(run)

    monkeypatch.setattr(main, "run_loop", watched)
    sets = ["train.steps=4", "metrics.per_layer=true", "sample.every=2"]
    gc.disable()
    try:
        train_here(write_tiny_config(tmp_path), tmp_path / "run", *sets)
        assert runs[0]() is None
    finally:
        gc.enable()
