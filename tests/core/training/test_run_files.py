"""Run directories, checkpoints on disk, stop requests."""

from __future__ import annotations

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.checkpoints import file_content, make_checkpoint
from tests.support.records import write_lock
from tests.support.runs import TINY
from trainer.config.load import load_config, to_toml
from trainer.ending import SAME_REQUEST_SEC, StopRequest
from trainer.errors import UserError
from trainer.metrics.payload_contract import build_payload, encode_payload
from trainer.metrics.sinks import EventWriter, JsonlSink
from trainer.training import checkpoint as files
from trainer.training.record import check_config
from trainer.training.run_dir import RunDir, choose_run_dir
from trainer.training.tensor_files import CheckpointError, model_file, rank_file


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text(TINY.format(runs=tmp_path / "runs", corpus="corpus"), encoding="utf-8")
    return load_config(path)


def test_a_checkpoint_reads_back_and_latest_points_to_it(tmp_path):
    path = make_checkpoint(tmp_path, 5)
    assert files.verify(path)["step"] == 5
    assert (tmp_path / "latest").resolve() == path
    assert torch.equal(file_content(path / model_file(0))["w"], torch.ones(100))
    assert not list(tmp_path.glob(".tmp*"))


def killed(monkeypatch, function, *arguments, by="rename"):
    """Call a function, and end it when it renames, or replaces, for the second time."""
    renames = iter([getattr(Path, by)])
    with monkeypatch.context() as patch:
        patch.setattr(Path, by, lambda *names: next(renames)(*names))
        with pytest.raises(StopIteration):
            function(*arguments)


def test_a_kill_while_a_step_is_saved_again_costs_no_checkpoint(tmp_path, monkeypatch):
    make_checkpoint(tmp_path, 5)
    killed(monkeypatch, make_checkpoint, tmp_path, 5)
    files.discard_staging(tmp_path)
    assert files.find(tmp_path, "auto") is not None
    assert [make_checkpoint(tmp_path, 5)] == files.complete_checkpoints(tmp_path)


def in_marker(change):
    """A damage that changes the marker's content."""

    def damage(path):
        marker = json.loads((path / files.MARKER).read_text())
        change(marker)
        (path / files.MARKER).write_text(json.dumps(marker))

    return damage


def flip(path):
    file = path / model_file(0)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES = {
    "no marker": lambda path: (path / files.MARKER).unlink(),
    "half a marker": lambda path: (path / files.MARKER).write_text("{"),
    "a list as marker": lambda path: (path / files.MARKER).write_text("[]"),
    "another version": in_marker(lambda marker: marker.update(format_version=99)),
    "no files listed": in_marker(lambda marker: marker.update(files={})),
    "a file elsewhere": in_marker(lambda marker: marker["files"].update({"../a": marker["files"][model_file(0)]})),
    "the directory above": in_marker(lambda marker: marker["files"].update({"..": marker["files"][model_file(0)]})),
    "an unlisted shard": in_marker(lambda marker: marker["files"].pop(rank_file(0))),
    "cut": lambda path: os.truncate(path / model_file(0), (path / model_file(0)).stat().st_size - 1),
    "a flipped bit": flip,
    "a missing file": lambda path: (path / model_file(0)).unlink(),
    "another state": lambda path: (path / files.STATE_FILE).write_text("{}"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_seen_auto_falls_back_one_a_path_is_refused_and_of_none_that_is_whole_auto(tmp_path, damage):
    assert files.find(tmp_path, "auto") is files.find(tmp_path, "off") is None
    make_checkpoint(tmp_path, 5)
    newest = make_checkpoint(tmp_path, 10)
    damage(newest)
    with pytest.raises(CheckpointError, match="step_00000010"):
        files.verify(newest)
    with pytest.raises(UserError, match="--resume"):
        files.find(tmp_path, str(newest))
    found = files.find(tmp_path, "auto")
    assert files.step_of(found[0]) == 5
    shutil.rmtree(found[0])
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole"):
        files.find(tmp_path, "auto")


def test_the_newest_and_every_nth_are_kept(tmp_path, monkeypatch, caplog):
    for step in range(10, 80, 10):
        make_checkpoint(tmp_path, step)
        if step == 10:
            (tmp_path / "step_00000010").rename(tmp_path / "step_00000010_mine")  # somebody's own name
        files.prune(tmp_path, keep_last=2, keep_every=40)
    assert (tmp_path / "step_00000010_mine").exists()
    with monkeypatch.context() as broken:
        broken.setattr(files, "remove_tree", os.rmdir)
        files.prune(tmp_path, keep_last=1, keep_every=40)
    assert "step_00000060 cannot be removed: Directory not empty" in caplog.text
    assert [files.step_of(path) for path in files.complete_checkpoints(tmp_path)] == [70, 60, 40]
    (tmp_path / ".tmp_step_00000080").mkdir()
    os.mkfifo(tmp_path / ".tmp_step_00000081")  # opening it would wait for ever
    files.discard_staging(tmp_path)
    assert not list(tmp_path.glob(".tmp*"))


def test_a_new_run_gets_a_directory_of_its_own(config, tmp_path):
    # Launched in the same second, by processes that all look before any of them writes.
    names = [choose_run_dir(config, None, "off", now=1.7e9) for _ in range(3)]
    for run in names:
        run.claim()
    first = names[0].path.name
    assert [run.path.name for run in names] == [first, f"{first}-2", f"{first}-3"]
    assert names[2].metrics.parent == names[2].path == tmp_path / "runs" / f"{first}-3"


@pytest.mark.parametrize(("rows", "step"), [(0, None), (1, None), (0, 5)])
def test_a_directory_is_used_again_only_if_its_run_left_no_row_and_no_checkpoint(config, tmp_path, rows, step):
    run, other = RunDir(tmp_path / "run"), make_checkpoint(tmp_path / "other" / "checkpoints", 5)
    run.create()
    run.resolved_config.write_text(to_toml(config).replace('resume = "off"', 'resume = "x"'))
    run.metrics.write_text(rows * (encode_payload(build_payload("train", 1, {"loss": 1.0})) + "\n"))
    if step is not None:
        make_checkpoint(run.checkpoints, step)
        own = str(run.path / ".." / "run" / "checkpoints" / "latest")
        assert choose_run_dir(config, str(run.path), own).path == run.path
    for resume in ("off", str(other), "auto"):
        if {"auto": step is None}.get(resume, rows or step is not None):
            for restarted in (False, resume == "off"):  # by torchrun, after the first attempt was refused
                with pytest.raises(UserError, match=r"a run (already; continue .* auto|that .* nothing; begin .* x),"):
                    choose_run_dir(config, str(run.path), resume, is_restarted=restarted)
        else:
            assert choose_run_dir(config, str(run.path), resume).path == run.path


def test_auto_goes_on_in_the_newest_unfinished_run_of_the_name(config, tmp_path):
    runs = tmp_path / "runs"
    states = {"tiny-20260101": "running", "tiny-20260102": "stopped", "tiny-20260103": "done"}
    for name, state in (states | {"tiny-other-20260104": "running", "tiny-9-20261120": "running"}).items():
        run = RunDir(runs / f"{name}-000000")
        make_checkpoint(run.checkpoints, 5)
        run.write_status(state, reason="", step=5)
    (runs / "tiny-20260105-000000").mkdir()  # it has not saved yet, and torchrun restarts it alone
    assert choose_run_dir(config, None, "auto", is_restarted=True).is_new
    assert choose_run_dir(config, None, "auto").path.name == "tiny-20260102-000000"
    by_path = runs / "tiny-20260101-000000" / "checkpoints" / "step_00000005"
    assert choose_run_dir(config, None, str(by_path)).path.name == "tiny-20260101-000000"


def test_changed_keys_are_named_and_breaking_ones_refused(config, tmp_path, caplog):
    saved = config.model_dump(mode="json")
    check_config(saved, config)
    ranks = [load_config(tmp_path / "x.toml", ["train.tokens=3000", f"train.steps={steps}"]) for steps in (24, 12)]
    check_config(ranks[0].model_dump(mode="json"), ranks[1])  # the same tokens on twice the ranks
    assert not caplog.records
    check_config({**saved, "optimizer": {**saved["optimizer"], "lr": 5.0}, "run": {**saved["run"], "dir": "x"}}, config)
    assert caplog.messages == ["resuming with another config: optimizer.lr: 5.0 -> 0.001"]
    # A key that is gone since then is named, and refuses nothing.
    check_config({**saved, "ledger": {**saved["ledger"], "index": "auto"}}, config)
    assert "ledger.index" in caplog.records[-1].getMessage()
    with pytest.raises(UserError, match=r"model\.dim: 8 -> 16"):
        check_config({**saved, "model": {**saved["model"], "dim": 8}}, config)


def test_the_first_signal_asks_a_late_second_one_ends(monkeypatch):
    now, exits = [100.0], []
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr("trainer.ending.time", SimpleNamespace(monotonic=lambda: now[0]))
    request = StopRequest()
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        assert request.install()
        assert not request.install()
        assert not request.requested
        signal.raise_signal(signal.SIGUSR1)
        assert request.requested
        assert request.signal_name == "SIGUSR1"
        now[0] += SAME_REQUEST_SEC - 0.1
        signal.raise_signal(signal.SIGTERM)  # torchrun's echo of a Ctrl-C
        assert not exits
        now[0] += 0.2
        signal.raise_signal(signal.SIGTERM)
        assert exits == [128 + signal.SIGTERM]
    finally:
        request.uninstall()
    assert {number: signal.getsignal(number) for number in previous} == previous


@pytest.mark.parametrize("is_over", [False, True])
def test_a_run_that_was_taken_over_writes_nothing_more(tmp_path, is_over):
    run = RunDir(tmp_path / "run")
    run.create()
    with run.lock(600.0):
        sink, events = JsonlSink(run.metrics), EventWriter(run.events)
        run.write_status("running", reason="", step=1)
        sink.append("{}")
        write_lock(run.path, {"is_over": is_over})
        before = {path: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
        ended = partial(run.write_status, "done", reason="", step=2)
        for write in (partial(sink.append, "{}"), partial(events.write, {"event": "x"}), ended, run.create):
            with pytest.raises((OSError, UserError), match="process 1 on elsewhere has taken over this run"):
                write()
    assert {path: path.read_bytes() for path in run.path.iterdir() if path.is_file()} == before


def test_going_back_sets_the_other_branch_aside_so_that_auto_does_not_return_to_it(tmp_path, monkeypatch):
    for step in (5, 10, 15):
        make_checkpoint(tmp_path, step)
    own = tmp_path / "step_00000005"
    assert files.set_aside_after(tmp_path, 5, own) == files.set_aside_after(tmp_path, 5, tmp_path / "latest") == own
    assert files.find(tmp_path, "auto")[0] == own
    # Back to a branch that was abandoned: no checkpoint here is of it, also none of an earlier step.
    killed(monkeypatch, files.set_aside_after, tmp_path, 10, tmp_path / "abandoned" / "step_00000010")
    assert files.find(tmp_path, "auto")[1]["step"] == 10
    back = files.set_aside_after(tmp_path, 10, tmp_path / "abandoned" / "step_00000010")
    assert files.complete_checkpoints(tmp_path) == [back]
    for resume in ("auto", str(tmp_path / "abandoned" / "step_00000010")):  # the second: by the same command again
        assert files.find(tmp_path, resume) == (back, files.verify(tmp_path / "step_00000010"))
    make_checkpoint(tmp_path, 15)
    killed(monkeypatch, files.set_aside_after, tmp_path, 15, tmp_path / "abandoned" / "step_00000015", by="replace")
    assert files.set_aside_after(tmp_path, 15, files.find(tmp_path, "auto")[0]) == tmp_path / "step_00000015"
    assert {path.name[11:] for path in tmp_path.glob("abandoned/step*")} == {"05", "10", "15_again"}


def test_a_run_is_not_taken_for_a_checkpoint_and_nothing_is_written(config, tmp_path, monkeypatch):
    newest = make_checkpoint(tmp_path / "run" / "checkpoints", 5)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for wrong in (tmp_path / "run", newest.parent, tmp_path / "ran"):
        with pytest.raises(UserError, match="is no checkpoint of a run; "):
            choose_run_dir(config, None, str(wrong))
        with pytest.raises(UserError, match="is no checkpoint; "):
            files.find(tmp_path, str(wrong))
    with pytest.raises(UserError, match="kept/step_00000005 is no checkpoint of a run; "):
        choose_run_dir(config, None, str(make_checkpoint(tmp_path / "kept", 5)))
