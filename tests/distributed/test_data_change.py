"""Data that changed between stop and resume: refused by name, or read anew on purpose."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.fault_record import Injected
from tests.support.runs import losses, make_corpus, run, write_tiny_config
from trainer.tools.runs.load import load_run
from trainer.training.checkpointing.tensor_files import read_rank

pytestmark = pytest.mark.distributed
RUN = "\n[checkpoint]\nevery = 4\n"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of 8 steps whose checkpoint after step 4 is resumed."""
    directory = tmp_path_factory.mktemp("stopped")
    config = write_tiny_config(directory, RUN)
    ended = run("--config", config, "--run-dir", directory / "run", "--steps", "8")
    assert ended.returncode == 0, ended.stderr
    shutil.copytree(directory / "corpus", directory / "kept")
    return directory


@pytest.fixture
def resume(stopped, tmp_path):
    """Resumes after step 4, on a corpus that the test has changed; the corpus is put back afterwards."""

    def go(*arguments: str, name: str = "run", nproc: int | None = None):
        checkpoint = stopped / "run" / "checkpoints" / "step_00000004"
        options = ("--resume", checkpoint, "--run-dir", tmp_path / name, "--steps", "8")
        return run("--config", stopped / "tiny.toml", *options, *arguments, nproc=nproc)

    yield go
    shutil.rmtree(stopped / "corpus")
    shutil.copytree(stopped / "kept", stopped / "corpus")


def test_copied_and_touched_files_resume_bit_for_bit(stopped, resume, tmp_path):
    shutil.rmtree(stopped / "corpus")
    shutil.copytree(stopped / "kept", stopped / "corpus", copy_function=shutil.copyfile)
    ended = resume()
    assert ended.returncode == 0, ended.stderr
    whole = losses(stopped / "run" / "metrics.jsonl")
    assert losses(tmp_path / "run" / "metrics.jsonl") == {step: whole[step] for step in range(5, 9)}


def replaced(corpus: Path) -> None:
    shutil.rmtree(corpus)
    make_corpus(corpus, seed=1)


def appended(corpus: Path) -> None:
    with (corpus / "a" / "stream1.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')


def cut(corpus: Path) -> None:
    path = corpus / "b" / "stream2.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:4]))


def one_letter(corpus: Path) -> None:
    path = corpus / "b" / "stream0.jsonl"
    path.write_text(path.read_text().replace("and", "AND", 1))


def moved(corpus: Path) -> None:
    (corpus / "a" / "stream3.jsonl").rename(corpus / "a" / "stream9.jsonl")


CHANGES = [
    (
        replaced,
        "source first: 4 changed (a/stream0.jsonl, a/stream1.jsonl, a/stream2.jsonl and 1 more); source second: ",
    ),
    (appended, "source first: 1 changed (a/stream1.jsonl);"),
    (cut, "source second: 1 changed (b/stream2.jsonl);"),
    (one_letter, "source second: 1 changed (b/stream0.jsonl);"),
    (moved, "source first: 1 missing (a/stream3.jsonl), 1 new (a/stream9.jsonl);"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_a_change_is_refused_by_name_and_accepted_on_purpose(stopped, resume, tmp_path, change, message):
    change(stopped / "corpus")
    refused = resume()
    assert refused.returncode == 2
    assert message in refused.stderr
    assert "--accept-data-change" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
    accepted = resume("--accept-data-change")
    assert accepted.returncode == 0, accepted.stderr
    assert "--accept-data-change: source " in accepted.stderr
    assert "the others continue" in accepted.stderr
    (event,) = [event for event in load_run(tmp_path / "run").events if event["event"] == "data_changed"]
    assert event["global_step"] == 4
    assert event["change"] in refused.stderr
    assert sorted(losses(tmp_path / "run" / "metrics.jsonl")) == [5, 6, 7, 8]
    # Its checkpoints know the data as it is now.
    again = run("--config", stopped / "tiny.toml", "--run-dir", tmp_path / "run", "--resume", "auto", "--steps", "9")
    assert again.returncode == 0, again.stderr
    assert "changed" not in again.stderr
    Injected(
        1,
        f"data changed between stop and resume: {change.__name__.replace('_', ' ')}",
        1,
        "0",
        "refused with the files' names; `--accept-data-change` restarted the changed sources alone",
    ).keep(f"data_{change.__name__}")


def test_two_ranks_name_a_change_once_and_accept_it(stopped, resume):
    moved(stopped / "corpus")
    refused = resume(nproc=2)
    assert refused.stderr.count("1 missing (a/stream3.jsonl)") == 1
    accepted = resume("--accept-data-change", name="two", nproc=2)
    assert accepted.returncode == 0, accepted.stderr
    assert accepted.stderr.count("--accept-data-change: source first: ") == 1


def test_accepting_nothing_changes_nothing(stopped, resume, tmp_path):
    ended = resume("--accept-data-change", "--verify-data")
    assert ended.returncode == 0, ended.stderr
    assert "no data changed: every stream continues" in ended.stderr
    assert "the checkpoint has sizes and samples only" in ended.stderr
    whole = losses(stopped / "run" / "metrics.jsonl")
    assert losses(tmp_path / "run" / "metrics.jsonl") == {step: whole[step] for step in range(5, 9)}


SECOND = """
[[data.source]]
name = "second"
layout = "nested"
root = "{corpus}"
modalities = ["b"]
"""


def edited(stopped: Path, tmp_path: Path, *, second: str) -> Path:
    """The config with another second source."""
    text = (stopped / "tiny.toml").read_text()
    before = SECOND.format(corpus=stopped / "corpus")
    assert text.count(before) == 1
    path = tmp_path / "edited.toml"
    text = text.replace(before, second)
    path.write_text(text if second else text.replace("batch_size_by_modality = { b = 2 }", ""))
    return path


def data_state(run_dir: Path, step: int) -> dict:
    return read_rank(run_dir / "checkpoints" / f"step_{step:08d}", 0)["data"]


@pytest.mark.parametrize("nproc", [None, 2])
def test_a_source_that_was_removed_is_refused_by_name_and_left_out_on_purpose(stopped, resume, tmp_path, nproc):
    config = edited(stopped, tmp_path, second="")
    refused = resume("--config", config, nproc=nproc)
    assert refused.returncode == 2 or nproc
    assert refused.stderr.count("source second: not in the config") == 1
    for word in ("weight = 0", "its old name", "--accept-data-change"):
        assert word in refused.stderr
    shutil.rmtree(stopped / "corpus" / "b")
    accepted = resume("--config", config, "--accept-data-change", nproc=nproc)
    assert accepted.returncode == 0, accepted.stderr
    (event,) = [event for event in load_run(tmp_path / "run").events if event["event"] == "data_changed"]
    assert (event["global_step"], event["change"]) == (4, "source second: not in the config")
    assert sorted(losses(tmp_path / "run" / "metrics.jsonl")) == [5, 6, 7, 8]
    assert data_state(tmp_path / "run", 8)["names"] == ["first"]
    again = run("--config", config, "--run-dir", tmp_path / "run", "--resume", "auto", "--steps", "9", nproc=nproc)
    assert again.returncode == 0, again.stderr
    assert "changed" not in again.stderr
    Injected(
        1,
        "a source removed from the config, and its data from the disk, before a resume",
        1,
        "0",
        "refused by name; `--accept-data-change` continued without it, the other sources at their places",
    ).keep("data_source_removed")


@pytest.mark.parametrize("nproc", [None, 2])
def test_a_source_of_weight_0_needs_no_data_and_keeps_its_place(stopped, resume, tmp_path, nproc):
    """Nothing of it is looked at, not even by check and preview; when its weight is back, it continues where it was."""
    off = edited(stopped, tmp_path, second=SECOND.format(corpus=tmp_path / "nowhere") + "weight = 0.0\n")
    for verb in ("check", "preview"):
        said = run(verb, "--config", off)
        assert said.returncode == 0, said.stderr
    shutil.rmtree(stopped / "corpus" / "b")
    ended = resume("--config", off, nproc=nproc)
    assert ended.returncode == 0, ended.stderr
    assert "source second has weight 0: nothing of it is read" in ended.stderr
    again = resume("--config", off, "--run-dir", tmp_path / "run", "--resume", "auto", "--steps", "9", nproc=nproc)
    assert again.returncode == 0, again.stderr
    shutil.copytree(stopped / "kept" / "b", stopped / "corpus" / "b")
    back = ("--run-dir", tmp_path / "run", "--resume", "auto", "--steps", "20")
    ended = resume(*back, nproc=nproc)
    assert ended.returncode == 0, ended.stderr
    assert "changed" not in ended.stderr
    before, after = data_state(stopped / "run", 4), data_state(tmp_path / "run", 20)
    assert before["names"] == after["names"] == ["first", "second"]
    position = before["sources"][1]["batch_index"], after["sources"][1]["batch_index"]
    assert 0 < position[0] < position[1]
    Injected(
        1,
        "the data of a source gone at a resume, its weight 0",
        1,
        "0",
        "resumed; with its data and weight back it continued where it had been",
    ).keep("data_source_off")
    one_letter(stopped / "corpus")
    assert "source second: 1 changed (b/stream0.jsonl);" in resume(*back, nproc=nproc).stderr


def test_a_byte_between_the_samples_is_seen_by_verify_data(tmp_path):
    config = write_tiny_config(tmp_path, RUN)
    large = tmp_path / "corpus" / "a" / "large.jsonl"
    large.write_text(json.dumps({"text": "x" * 300_000}) + "\n")
    first = run("--config", config, "--run-dir", tmp_path / "run", "--steps", "4", "--verify-data")
    assert first.returncode == 0, first.stderr
    with large.open("r+b") as file:
        file.seek(10_000)
        file.write(b"y")
    options = ("--config", config, "--run-dir", tmp_path / "run", "--resume", "auto")
    assert run(*options, "--steps", "6").returncode == 0
    # Contents that an earlier checkpoint had hashed stay known.
    verified = run(*options, "--steps", "8", "--verify-data")
    assert verified.returncode == 2
    assert "source first: 1 changed (a/large.jsonl)" in verified.stderr


def test_a_tokenizer_with_other_ids_of_the_same_number_is_refused(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")

    def write(words: str) -> None:
        vocabulary = {word: number for number, word in enumerate(["[UNK]", *words.split()])}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save(str(tmp_path / "tokenizer.json"))

    write("the of and to in is")
    config = write_tiny_config(tmp_path, RUN)
    options = ("--config", config, "--set", f"data.tokenizer={tmp_path}/tokenizer.json", "--run-dir", tmp_path / "run")
    assert run(*options, "--steps", "4").returncode == 0
    write("is in to and of the")
    refused = run(*options, "--steps", "8", "--resume", "auto")
    assert refused.returncode == 2
    assert "the tokenizer.json changed" in refused.stderr
    accepted = run(*options, "--steps", "8", "--resume", "auto", "--accept-data-change")
    assert accepted.returncode == 0, accepted.stderr
    assert "source first: 4 streams read from the beginning (a/stream0.jsonl, " in accepted.stderr
    assert os.path.exists(tmp_path / "run" / "checkpoints" / "step_00000008")
