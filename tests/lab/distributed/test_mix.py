"""`train mix`: weights that change in a live run hold from the announced step on, and a resume repeats them bit for bit."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.grouped import train
from tests.support.in_process import program
from tests.support.late import events
from tests.support.ranks import Ranks, checkpoint_differences, last_logged
from tests.support.runs import ROOT, overrides, read_rows, write_tiny_config
from trainer.tools.runs.load import load_run, settings_by_step
from trainer.training.extension import Extension

pytestmark = pytest.mark.distributed

STEPS = 24
FIRST, SECOND = "data.source.first.weight", "data.source.second.weight"
# Two at once, of which the later counts; one of a source that comes back; and one that would leave nothing to read.
ASKED = {4: [[f"{FIRST}=5"], [f"{FIRST}=0"], [f"{SECOND}=0"]], 16: [[f"{FIRST}=2", f"{SECOND}=0.5"]]}
ASKS = json.dumps(json.dumps({"at": ASKED}))
SETS = (f"train.steps={STEPS}", "metrics.per_source=true", "metrics.digests=write", "checkpoint.every=1")
CASES = {
    "alone": (None, ("data.prefetch=5",)),
    "ranks": (2, ("distributed.shards=4", "metrics.log_interval=4", "data.prefetch=1", "train.micro_batches=1")),
    "growing": (None, ("train.micro_batches={schedule='step', points={0=1, 8=3}}", f"{FIRST}=3")),
}


class Asks(Extension):
    """Asks rank 0 at the end of some steps, as `train mix` does."""

    def __init__(self, run, at):
        super().__init__(run)
        self.at = json.loads(at)["at"]

    def step_finished(self, taken, outcome):
        if self.run.info.is_main and "trainer-replay" not in str(self.run.run_dir.path):
            with (self.run.run_dir.path / "mix.jsonl").open("a") as file:
                for number, settings in enumerate(self.at.get(str(taken.step), ())):
                    file.write(json.dumps({"id": f"{taken.step}.{number}", "set": settings}) + "\n")


def changes(run_dir: Path) -> list[dict]:
    return [event for event in events(run_dir) if event["event"] == "mix" and "changed" in event]


def digests(run_dir: Path) -> dict[int, str]:
    rows = map(json.loads, (run_dir / "digests.jsonl").read_text().splitlines())
    return {row["global_step"]: row["batch"] for row in rows}


@pytest.mark.parametrize("case", ["alone", "ranks", pytest.param("growing", marks=pytest.mark.slow)])
def test_a_change_holds_from_its_step_on_and_every_resume_repeats_it(tmp_path, verb, case):
    nproc, more = CASES[case]
    config, whole = write_tiny_config(tmp_path, "[checkpoint]\nkeep_last = 99\n"), tmp_path / "whole"
    asks = f'extension=[{{target="tests.lab.distributed.test_mix:Asks", args={{at={ASKS}}}}}]'
    train(config, whole, *SETS, *more, asks, nproc=nproc)
    said = {event["request"]: event for event in events(whole) if event["event"] == "mix"}
    assert said["4.2"]["problem"].startswith("all weights would be zero from micro-batch")
    assert said["4.0"]["global_step"] == said["4.1"]["global_step"]
    off, on = (said[each]["global_step"] for each in ("4.1", "16.0"))
    assert 4 < off < 16 < on <= STEPS - 2
    assert said["16.0"]["changed"] == {FIRST: {"before": 0.0, "after": 2.0}, SECOND: {"before": 1.0, "after": 0.5}}
    rows = {step: row for (_, step), row in read_rows(whole / "metrics.jsonl").items()}
    if case != "ranks":  # which does not log every step
        for step, row in rows.items():
            assert (row["blend/weight/first"] == 0) == (off <= step < on)
            assert "source/first/loss" not in row or not off <= step < on
        assert any("source/first/loss" in rows[step] for step in range(off - 2, off))
        assert any("source/first/loss" in rows[step] for step in range(on, on + 3))
    assert rows[STEPS]["blend/weight/first"] == 0.8
    assert list(settings_by_step(load_run(whole))[FIRST]) == [1, off, on]

    # In a repeated step, whose directory is another one, from a checkpoint before the change.
    early = tmp_path / "early"
    shutil.copytree(whole, early, symlinks=True)
    for saved in (early / "checkpoints").glob("step_*"):
        if saved.name > "step_00000003":
            shutil.rmtree(saved)
    done = verb("replay", early, "--step", off + 1, "--trust-code", "--json", cwd=ROOT)
    assert json.loads(done.stdout)["is_equal"], done.stdout[-2000:]
    found = json.loads(verb("data", "at", early, off + 1, "--trust-code", "--json", cwd=ROOT).stdout)["rows"]
    places = ("shard", "micro_batch", "row", "source", "documents")
    assert [[row[key] for key in places] for row in found] == [
        [row[key] for key in places] for row in json.loads(done.stdout)["rows"]
    ]

    # In its own directory, whose events have what came after the checkpoint; and in another one, with what the checkpoint has.
    for step, last in ((3, STEPS), (off - 1, on - 1), (on + 1, STEPS)):
        resumed, saved = tmp_path / f"from {step}", whole / "checkpoints" / f"step_{step:08d}"
        if step == 3:
            shutil.copytree(whole, resumed, symlinks=True)
            (resumed / "digests.jsonl").unlink()
            saved = resumed / "checkpoints" / saved.name
        train(config, resumed, *SETS, *more, more=("--resume", saved), nproc=nproc)
        found, expected = (
            {at: batch for at, batch in digests(each).items() if step < at <= last} for each in (resumed, whole)
        )
        assert found == expected
        if last == STEPS:
            ends = [each / "checkpoints" / f"step_{last:08d}" for each in (whole, resumed)]
            assert checkpoint_differences(*ends) == []


REFUSED = {
    f"{FIRST}=-1": "must be 0 or a number within",
    "data.source.third.weight=1": "where NAME is first or second",
    "data.seq_len=8": "is not the weight of a source",
    f"{SECOND}=0": "all weights would be zero",
    "data.source.off.weight=1": "where NAME is first or second",
}


def test_the_verb_asks_a_live_run_and_refuses_what_cannot_be(tmp_path, capsys, monkeypatch):
    off = '[[data.source]]\nname = "off"\npaths = ["nowhere.txt"]\nweight = 0\n'
    config, run_dir = write_tiny_config(tmp_path, off), tmp_path / "run"
    sets = overrides("train.steps=100000", "metrics.log_interval=2", "metrics.per_source=true")
    with Ranks(("--config", config, "--run-dir", run_dir, *sets), logs=tmp_path / "logs") as ranks:
        assert ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") > 0)
        told = program(["mix", run_dir, "--set", f"{FIRST}=0", "--set", f"{SECOND}=2.5"], capsys)
        assert told.returncode == 0, told.stderr
        (event,) = changes(run_dir)
        step = event["global_step"]
        assert told.stdout.splitlines()[1:] == [
            f"{SECOND}: 1 -> 2.5",
            f"from step {step} on (micro-batch {2 * (step - 1)} of each data shard)",
        ]
        assert ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") > step)
        row = read_rows(run_dir / "metrics.jsonl")["train", step + step % 2]
        assert [row[f"blend/weight/{name}"] for name in ("first", "second", "off")] == [0, 1, 0]
        for setting, problem in REFUSED.items():
            done = program(["mix", run_dir, "--set", setting], capsys)
            assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
            assert problem in done.stderr
        ranks.signal(signal.SIGKILL)
        ranks.wait()
    done = program(["mix", run_dir, "--set", f"{FIRST}=1"], capsys)
    assert done.returncode == 2
    assert "is not training (died)" in done.stderr
    monkeypatch.setattr("trainer.tools.verbs.data.run_state", lambda _: {"state": "running"})
    (run_dir / "config.resolved.toml").write_text('[[data.source]]\nname = "first"\nroot = "x"\n[train]\nsteps = 2\n')
    assert "has one source, whose" in program(["mix", run_dir, "--set", f"{FIRST}=1"], capsys).stderr
