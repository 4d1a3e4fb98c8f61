"""Sources of a blend: included files, multiplied weights, and what is refused before a run starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.in_process import plan_of
from tests.support.runs import make_corpus
from trainer.config.load import load_config
from trainer.data.weights import ConstantWeight, ScheduledWeight
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.training.build import make_dataset
from trainer.training.plan import Plan, Source, resolve_sources

HEAD = "[train]\nsteps = 10\nmicro_batches = 2\n"
SCHEDULE = '{ schedule = "linear", points = { 0 = 4.0, 10 = 2.0 } }'


@pytest.fixture(autouse=True)
def in_a_directory_with_a_corpus(tmp_path, monkeypatch):
    make_corpus(tmp_path / "corpus", streams=2)
    monkeypatch.chdir(tmp_path)


def resolve(sources: str, **files: str) -> list[Source]:
    for name, text in files.items():
        path = Path("sets", f"{name}.toml")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    Path("x.toml").write_text(HEAD + sources)
    return resolve_sources(load_config("x.toml"), 1)


def planned(*sets: str, tables: str) -> Plan:
    Path("x.toml").write_text(HEAD + tables)
    return plan_of(Path("x.toml"), *sets)


def source(name: str, body: str, table: str = "data.source") -> str:
    return f'[[{table}]]\nname = "{name}"\n{body}\n'


def test_weights_multiply_on_the_way_down_and_paths_are_relative_to_the_file_that_names_them():
    inner = source("leaf", 'root = "corpus"\nweight = 0.5', "source")
    flat_one = source("flat", 'paths = ["corpus/a/stream0.jsonl"]', "source")
    middle = source("deep", 'include = "inner.toml"\nweight = 3', "source") + flat_one
    outer = source("outer", f'include = "sets/middle.toml"\nweight = {SCHEDULE}') + source("own", 'root = "corpus"')
    found = resolve(outer, inner=inner, middle=middle)
    assert [each.name for each in found] == ["outer.deep.leaf", "outer.flat", "own"]
    deep, flat, own = (each.weight for each in found)
    assert isinstance(deep, ScheduledWeight)
    assert [deep.evaluate(x) for x in (0, 5, 10)] == [6.0, 4.5, 3.0]
    assert [flat.evaluate(x) for x in (0, 5, 10)] == [4.0, 3.0, 2.0]
    assert own == ConstantWeight(1.0)
    assert [len(each.streams) for each in found] == [4, 1, 4]


@pytest.mark.parametrize(
    ("sources", "files", "message"),
    [
        (
            source("outer", f'include = "sets/a.toml"\nweight = {SCHEDULE}'),
            {"a": source("inner", f'root = "corpus"\nweight = {SCHEDULE}', "source")},
            "outer.inner.weight: is a schedule, and so is the weight of outer above it",
        ),
        (source("o", 'include = "sets/a.toml"'), {"a": source("i", 'include = "a.toml"', "source")}, "includes itself"),
        (source("a", 'include = "b.toml"'), {}, "^x.toml: b.toml: cannot be read: No such file or directory; check"),
        (source("a", 'root = "nowhere"'), {}, "make it .train data build pytext --out nowhere"),
        (source("a", 'root = "corpus"\nmodalities = ["c"]'), {}, "has no modality 'c'"),
        (source("a", 'paths = ["corpus/*.txt"]'), {}, "has no stream files"),
        (source("a", 'root = "s3://b/c"'), {}, "source a: root: s3://b/c is a URL, and data is read from files; mount"),
        (source("a", 'paths = ["s3://b/*.txt"]'), {}, "source a: paths: s3://b/.*.txt is a URL, and data"),
        (source("a", 'root = "corpus"\nweight = 0'), {}, "all weights are zero at batch 0"),
        (
            source(
                "a", 'root = "corpus"\nweight = { schedule = "step", unit = "step", points = { 1 = 1, 4 = 0, 6 = 1 } }'
            ),
            {},
            "all weights are zero at batch 6, of 20 that a data shard has",
        ),
    ],
)
def test_what_cannot_be_mixed_is_refused(sources, files, message):
    with pytest.raises(UserError, match=message):
        resolve(sources, **files)


def test_coordinates_beyond_the_vocabulary_are_refused_by_the_plan():
    with pytest.raises(UserError, match="its last bin is token 269, beyond the vocabulary of 257"):
        planned("objective.coord={first_token=250, num_bins=20, sigma=1.0}", tables=source("a", 'root = "corpus"'))


def test_blocks_between_blank_lines_are_documents_where_a_source_says_so():
    Path("notes").mkdir()
    Path("notes/a.txt").write_text("one\n\ntwo\n\nthree, which is longer\n")
    plan = planned(tables=source("t", 'paths = ["notes/a.txt"]\ntext_split = "blank_line"'))
    dataset = make_dataset(plan, plan.sources[0], RankInfo())
    assert dataset.open(dataset.streams[0]).groups.num_groups == 3
    with pytest.raises(UserError, match="text_split"):
        load_config("x.toml", ["data.source.t.text_split=line"])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("eod = 0", "eod: is 0, but there are no npy or bin files; remove it"),
        ('dtype = "uint16"', 'dtype: is "uint16", but there are no bin files; remove it'),
    ],
)
def test_options_of_token_files_are_refused_where_there_are_none(keys, message):
    Path("notes").mkdir()
    Path("notes/a.txt").write_text("one")
    for paths in ('root = "corpus"', 'paths = ["notes/a.txt"]'):
        with pytest.raises(UserError) as refused:
            planned(tables=source("t", f"{paths}\n{keys}"))
        assert refused.value.message == f"source t: {message}"


@pytest.mark.parametrize(("tokenizer", "eod"), [("ids", 500), ("bytes", 257)])
def test_an_eod_outside_the_vocabulary_is_refused_by_the_plan(tokenizer, eod):
    Path("tokens").mkdir()
    np.save("tokens/a.npy", np.array([1, 2]))
    own = source("t", f'paths = ["tokens/a.npy"]\neod = {eod}')
    data = f'[data]\ntokenizer = "{tokenizer}"\n' + ("vocab_size = 500\n" if tokenizer == "ids" else "")
    with pytest.raises(UserError, match=rf"source t: eod: {eod} is outside the vocabulary"):
        planned(tables=data + own)
    assert len(planned(f"data.source.t.eod={eod - 1}", tables=data + own).sources[0].streams) == 1
    with pytest.raises(UserError, match=rf"data.eod: {eod} is outside the vocabulary"):
        planned(f"data.source.t.eod={eod - 1}", f"data.eod={eod}", tables=data + own)
