"""Sequences of numbers: examples/sensors, float targets with unknown values, against plain PyTorch."""

from __future__ import annotations

import importlib
import json
import re
import sys
from itertools import islice

import numpy as np
import pytest
import torch

from tests.support.in_process import plan_of, train_here
from tests.support.runs import EXAMPLES, overrides, read_rows, train
from trainer.config.data_tables import DataTable, SourceTable
from trainer.data import BytesTokenizer, ReadOptions, load_documents
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.files import parse_json
from trainer.lab.numbers import Series
from trainer.training.build import make_blend

SHORT = ('metrics={log_interval=1,stdout="off"}', "model.contract=false", "train.steps=8", "eval.every=4")
SHORT += ("eval.depth=true", 'scheduler.name="constant"', "train.clip_grad_norm=0")
CONFIG = EXAMPLES / "sensors" / "sensors.toml"


@pytest.fixture
def sensors(monkeypatch):
    """The module of the example, which its config names."""
    monkeypatch.setattr(sys, "path", [str(CONFIG.parent), *sys.path])
    monkeypatch.delitem(sys.modules, "sensors", raising=False)
    return importlib.import_module("sensors")


def squared_errors(model, features, targets, state=None):
    """The sum over known values, their number, and the state, in plain PyTorch."""
    output = model(torch.as_tensor(features, dtype=torch.float32), state)
    wanted = torch.as_tensor(targets, dtype=torch.float32)
    known = ~wanted.isnan()
    return (output.logits[known] - wanted[known]).square().sum(), int(known.sum()), output.state


def test_the_example_trains_to_exact_numbers_resumes_and_is_evaluated(sensors, tmp_path, verb):
    checked = verb("check", "--config", CONFIG)
    assert ": a data set of your own; share 100.0% at first\n" in checked.stdout, checked.stderr
    assert "held: forward, purity, soak, carry, causality, isolation, gradient" in checked.stdout
    assert "align" not in checked.stdout, "whose rows are its own"
    judged = verb("doctor", "--model", "sensors:Model")
    assert judged.returncode == 3
    assert re.search("forward needs features, .*: train check --config judges it on the first batch", judged.stdout)
    train_here(CONFIG, tmp_path / "whole", *SHORT)
    train_here(CONFIG, tmp_path / "parts", *SHORT, "train.steps=5")
    train_here(CONFIG, tmp_path / "parts", *SHORT, 'checkpoint.resume="auto"')
    whole, parts = (read_rows(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    for step in range(1, 9):
        assert whole["train", step]["loss"] == parts["train", step]["loss"]
    first, last, evaluated = whole["train", 1], whole["train", 8], whole["eval", 8]
    assert not [key for key in {*last, *evaluated} if re.search("bits_per|accuracy|perplexity|token_type", key)]
    # The first step: both of its micro-batches begin series.
    torch.manual_seed(0)
    model = sensors.Model(vocab_size=257, dim=32, num_layers=4)
    batches = islice(sensors.Sensors(rank=0, world_size=1, seed=0, seq_len=16), 2)
    sums, counts, _ = zip(*(squared_errors(model, each["features"], each["targets"]) for each in batches), strict=True)
    loss = sum(sums) / sum(counts)
    loss.backward()
    norm = torch.cat([each.grad.flatten() for each in model.parameters()]).norm()
    assert first["tokens_in_step"] == sum(counts) < 2 * 4 * 16 * 4
    assert (first["loss"], first["grad_norm"]) == pytest.approx((float(loss), float(norm)), rel=2e-6)
    assert {"gns/tr_sigma", "eval/held/depth/beyond_cell/carry_gain"} <= {*last, *evaluated}
    assert last.get("gns/left_out", 0) == 0  # which consecutive cells of a series would be
    ended = verb("eval", tmp_path / "whole", "--trust-code", "--json")
    assert json.loads(ended.stdout)["metrics"] == evaluated
    refused = verb("sample", tmp_path / "whole", "--trust-code")
    assert "whole: cannot call the model with tokens, state: missing a required argument: 'features'" in refused.mistake
    # The evaluation: series by series, with the error of a ratio of sums over them.
    weights = importlib.import_module("trainer.tools.saved_model").read_checkpoint(tmp_path / "whole").weights
    model.load_state_dict(weights)
    units, states = {}, {}
    for each in sensors.Sensors(rank=0, world_size=1, seed=1, seq_len=16, batches=60):
        for row, group in enumerate(each["group_ids"]):
            features, targets = (each[key][row : row + 1] for key in ("features", "targets"))
            with torch.no_grad():
                total, count, states[group] = squared_errors(model, features, targets, states.get(group))
            units[group] = units.get(group, 0) + np.array([float(total), count])
    table = np.array([*units.values()])
    assert evaluated["eval/held/loss"] == pytest.approx(table[:, 0].sum() / table[:, 1].sum(), rel=2e-6)
    residuals = table[:, 0] - evaluated["eval/held/loss"] * table[:, 1]
    plain = np.sqrt((residuals**2).sum() * 40 / 39) / table[:, 1].sum()
    assert evaluated["eval/held/loss_se"] == pytest.approx(plain, rel=0.05)  # t of 39 for the normal


MISTAKES = """
import torch
from sensors import Model, Sensors
from trainer.model.protocol import ModelOutput

class Looks(Model):
    def forward(self, features, state=None):
        return super().forward(features + features.mean(1, keepdim=True), state)

class Needy(Model):
    state_width = 1
    def forward(self, tokens, foo, state=None): ...

class Plain:
    def __call__(self, output, targets):
        return (output - targets).square()

def holes(**given):
    for batch in Sensors(**given):
        yield {**batch, "features": batch["features"] * float("nan")}

def infinite(**given):
    for batch in Sensors(**given):
        yield {**batch, "targets": batch["targets"] * float("inf")}

def late(key, value, **given):
    for number, batch in enumerate(Sensors(**given)):
        yield batch if number < 4 else {**batch, key: batch[key] * float(value)}

def short(**given):
    for batch in Sensors(**given):
        yield {**batch, "features": batch["features"][:, 3:]}

def narrow(**given):
    for batch in Sensors(**given):
        yield {**batch, "features": batch["features"][:, :, 1:]}
def misspelt(**given):
    for batch in Sensors(**given):
        yield {**batch, "feature": batch.pop("features")}

class Nested(torch.nn.GRU):
    def __init__(self, **_):
        super().__init__(4, 4, batch_first=True)
    def forward(self, features, state=None):
        return ModelOutput(*super().forward(features))
"""
BAD = "numbers of the batch are not finite: features"
ONE_ROW = "data.mixing.batch_size=1"
NARROW = (
    "model.target: forward fails on the first batch (features float32 [4, 16, 3], targets float32 [4, 16, 4]): Runt"
)
INCLUDED = "[[source]]\nname = 'b'\ntarget = 'mistakes:holes'\n"


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("model.target='mistakes:Looks'", "mistakes:Looks: breaks causality: changing the tokens from position"),
        ("objective.target='mistakes:Plain'", "the gradient is not finite: compute with targets.nan_to_num()"),
        ("data.source=[{name='a', target='mistakes:holes'}]", f"the loss is nan; {BAD}"),
        ("data.source=[{name='a', include='HERE/more.toml'}]", f"the loss is nan; {BAD}"),
        ("data.source=[{name='a', target='mistakes:infinite'}]", "numbers of the batch are not finite: targets"),
        (
            "data.source=[{name='a', target='mistakes:short'}]",
            "objective.target: fails on the first batch (features float32 [4, 13, 4], targets float32 [4, 16, 4]): ",
        ),
        ("objective={}", "objective.target: is not set, and the targets are floats"),
        (
            "model.target='mistakes:Needy' and data.source=[{name='t', paths=['HERE/*.py']}] and eval={} and "
            + ONE_ROW,
            "model.target: forward needs foo, which the data do not have; give a default, or read data of your own",
        ),
        ("data.source=[{name='a', target='mistakes:narrow'}]", NARROW),
        ("eval.source=[{name='a', target='mistakes:holes', args={rank=0}}]", "eval source a: args: names rank, which"),
        ("model.target='mistakes:Nested' and data.source=[{name='a', target='mistakes:narrow'}]", NARROW),
        (
            "data.source=[{name='a', target='mistakes:misspelt'}]",
            "source a: batch key feature: neither an input of the model nor a batch extra; there are features, ",
        ),
    ],
)
def test_the_model_and_the_loss_are_judged_on_the_first_batch(sensors, tmp_path, monkeypatch, verb, setting, problem):
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    (tmp_path / "more.toml").write_text(INCLUDED)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    settings = [each.replace("HERE", str(tmp_path)) for each in overrides(*setting.split(" and "))]
    assert problem in verb("check", "--config", CONFIG, *settings).mistake


def test_what_is_not_finite_or_not_known_in_a_later_step_is_named(sensors, tmp_path, monkeypatch, capsys):
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    source = "data.source=[{name='a', target='mistakes:late', args={key='%s', value='%s'}}]"
    train_here(CONFIG, tmp_path / "bad", *SHORT, source % ("features", "inf"), code=1)
    assert BAD in capsys.readouterr().err
    train_here(CONFIG, tmp_path / "unknown", *SHORT, source % ("targets", "nan"))
    assert "steps trained no token: all targets were masked, or not known" in capsys.readouterr().err


# Series in files.

SIZES = (5, 12, 1, 9, 16, 7)  # rows of each
MODEL = """
import torch
from trainer.model.protocol import ModelOutput

class Model(torch.nn.Module):
    state_width = 8
    def __init__(self, *, width=3, out=3, **_):
        super().__init__()
        self.gru, self.head = torch.nn.GRU(width, 8, batch_first=True), torch.nn.Linear(8, out)
    def forward(self, features, state=None):
        out, end = self.gru(features, None if state is None else state[None].contiguous())
        return ModelOutput(self.head(out), end[0])
"""


@pytest.fixture
def series(tmp_path, monkeypatch):
    """Walks of three numbers, one per file, and a config that reads them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "of_series", raising=False)
    (tmp_path / "of_series.py").write_text(MODEL)
    (tmp_path / "series").mkdir()
    random = np.random.default_rng(0)
    documents = [random.normal(size=(size, 3)).cumsum(0) for size in SIZES]
    for number, rows in enumerate(documents):
        np.save(tmp_path / "series" / f"{number}.npy", rows)
    (tmp_path / "series.toml").write_text(
        """
[train]
steps = 100
device = "cpu"
[data]
seq_len = 4
features = 3
mixing = { batch_size = 2, repeat = false }
source = [{ name = "walks", paths = ["series/*"] }]
[eval]
every = 100
source = [{ name = "again", paths = ["series/*"] }]
[model]
target = "of_series:Model"
[objective]
target = "trainer.lab.numbers:SquaredError"
[optimizer]
lr = 1e-30
[metrics]
log_interval = 1
stdout = "off"
[checkpoint]
every = 2
keep_last = 99
"""
    )
    return documents


OTHERS = ("data.targets=[1]", "model.args={width=2,out=1}")


@pytest.mark.parametrize(("sets", "ranks"), [((), None), (OTHERS, None), pytest.param((), 2, marks=pytest.mark.slow)])
def test_an_epoch_of_series_has_the_loss_of_whole_documents(series, tmp_path, sets, ranks):
    if sets:  # a target may be unknown, where it is no input
        series[1][3, 1] = series[4][:5, 1] = np.nan
        for number in (1, 4):
            np.save(tmp_path / "series" / f"{number}.npy", series[number])
    if ranks is None:
        train_here(tmp_path / "series.toml", tmp_path / "run", *sets)
    else:
        train(tmp_path / "series.toml", tmp_path / "run", *sets, nproc=ranks, extra={"PYTHONPATH": str(tmp_path)})
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    model = importlib.import_module("of_series").Model(width=3 - bool(sets), out=1 if sets else 3)
    model.load_state_dict(
        importlib.import_module("trainer.tools.saved_model").read_checkpoint(tmp_path / "run").weights
    )
    total = count = 0
    for document in series:
        features, targets = np.concatenate([np.zeros((1, 3)), document[:-1]]), document
        if sets:
            features, targets = document[:, [0, 2]], document[:, [1]]
        with torch.no_grad():
            error, known, _ = squared_errors(model, features[None], targets[None])
        total, count = total + float(error), count + known
    trained = [row for (mode, _), row in rows.items() if mode == "train"]
    assert sum(row["tokens_in_step"] for row in trained) == count
    positions = np.array([row["data/fill"] for row in trained]) * 8 * (ranks or 1)  # known or not
    assert sum(positions) == pytest.approx(sum(SIZES))
    known = positions @ [row["data/trained"] for row in trained] * (1 if sets else 3)
    assert known == pytest.approx(count)
    found = sum(row["loss"] * row["tokens_in_step"] for row in trained)
    assert found / count == pytest.approx(total / count, rel=2e-6)
    (evaluated,) = [row for (mode, _), row in rows.items() if mode == "eval"]
    assert evaluated["eval/again/loss"] == pytest.approx(total / count, rel=2e-6)


def read_on(blend, number):
    return [next(blend) for _ in range(number)]


@pytest.mark.parametrize("align", ["stream", "document"])
def test_rows_of_series_follow_each_other_and_resume_exactly(series, tmp_path, align):
    names = [f"series/{number}.npy" for number in range(len(SIZES))]
    sets = [f'data.align="{align}"', "data.mixing.repeat=true", "data.mixing.spread=1", "model.contract=false"]
    plan = plan_of(tmp_path / "series.toml", *sets)
    made = [make_blend(plan, RankInfo()) for _ in range(2)]
    seen = {}
    for batch in read_on(made[0], 9):
        at = parse_json(str(batch["instability_meta_json"]))
        for row, segments in enumerate(at["rows"]):
            place = 0
            for each in segments:
                document, size = series[names.index(each["stream"])], each["stop"] - each["start"]
                before = np.concatenate([np.zeros((1, 3)), document])[each["start"] : each["stop"]]
                there = slice(place, place + size)
                np.testing.assert_array_equal(batch["features"][row, there], before.astype(np.float32))
                wanted = document[each["start"] : each["stop"]].astype(np.float32)
                np.testing.assert_array_equal(batch["targets"][row, there], wanted)
                place, seen[each["stream"]] = place + size, seen.get(each["stream"], 0) + size
            assert np.isnan(batch["targets"][row, place:]).all()
            assert not batch["features"][row, place:].any()
    assert len(seen) == len(SIZES)
    made[1].load_state_dict(made[0].state_dict())
    for one, other in zip(*(read_on(each, 6) for each in made), strict=True):
        assert all(np.array_equal(one[key], other[key], equal_nan=key == "targets") for key in ("features", "targets"))


def save_parquet(path, columns):
    pyarrow = pytest.importorskip("pyarrow")
    importlib.import_module("pyarrow.parquet").write_table(pyarrow.table(columns), path)


def test_columns_of_lists_are_rows_and_null_is_unknown(tmp_path):
    path = tmp_path / "a.parquet"
    save_parquet(path, {"b": [[1.5, None], [], [3]], "a": [[4, 5], [], [6]], "text": ["x", "y", "z"]})
    found = reader(columns=["a", "b"], targets=[1]).load(path, "parquet", None)
    np.testing.assert_array_equal(found.tokens, np.array([[4, 1.5], [5, np.nan], [6, 3]], np.float32))
    assert (found.starts.tolist(), found.lengths.tolist()) == ([0, 2, 2], [2, 0, 1])
    with pytest.raises(UserError, match=r"needs one column b, .*; for series of numbers write data.features, "):
        load_documents(path, ReadOptions(BytesTokenizer(), column="b"))
    save_parquet(path, {"b": [[1.5]], "a": [[4, 5]]})
    with pytest.raises(UserError, match=r"a.parquet: has a row whose a, b are of unequal length"):
        reader(columns=["a", "b"]).load(path, "parquet", None)
    save_parquet(path, {"b": [1.5], "a": [4.0]})
    with pytest.raises(UserError, match=r"a.parquet: a holds no lists; write a series as one row of lists"):
        reader(columns=["a", "b"]).load(path, "parquet", None)
    with pytest.raises(UserError, match=r"a.parquet: has no field c \(its fields: b, a\)"):
        reader(columns=["a", "c"]).load(path, "parquet", None)
    pyarrow = importlib.import_module("pyarrow")
    save_parquet(path, {"a": pyarrow.array([], pyarrow.list_(pyarrow.float64()))})
    with pytest.raises(UserError, match=r"a.parquet: has no documents"):
        load_documents(path, ReadOptions(reader(features=1, columns=["a"])))


def reader(features=2, **more):
    return Series(DataTable(source=[SourceTable(name="s", paths=["x"])], features=features, **more))


ROWS = np.ones((4, 2), np.float32)


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (ROWS.astype(int), r"must be floats \[T, 2\].* got <i8 \[4, 2\]"),
        (ROWS[:, 0], r"got <f4 \[4\]"),
        (np.ones((4, 3)), r"got <f8 \[4, 3\]"),
        (np.asfortranarray(ROWS), r"got <f4 \[4, 2\] in Fortran order"),
        (ROWS[:0], "has no rows; remove the file"),
        (ROWS.astype(">f4"), r"got >f4 \[4, 2\]"),
    ],
)
def test_a_file_that_is_no_series_is_refused_in_a_line(tmp_path, array, problem):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(UserError, match=rf"a.npy: {problem}|a.npy: must be floats .*{problem}") as caught:
        reader().load(tmp_path / "a.npy", "npy", None)
    assert "\n" not in caught.value.message


def test_numbers_that_no_model_can_take_are_refused_with_their_place(series, tmp_path, verb):
    ended = verb("init", "series")
    assert (ended.returncode, "write data.features, model.target and objective.target (" in ended.stderr) == (2, True)
    series[4][15, 2] = np.nan  # of the last row, which is no input
    np.save(tmp_path / "series" / "4.npy", series[4])
    problem = r"series/4.npy: document 0, row 15, column 2: is nan, and .*; fill it in"
    with pytest.raises(UserError, match=problem):
        train_here(tmp_path / "series.toml", tmp_path / "run", "model.contract=false")
    for sources in ("eval.every=0", "data.source=[{name='ok',paths=['series/1.npy']}]"):
        ended = verb("check", "--config", "series.toml", "--set", sources)
        assert (ended.returncode, bool(re.search(problem, ended.stderr))) == (2, True)
    ended = verb("check", "--config", "series.toml", "--set", "data.features=4")
    assert (ended.returncode, "must be floats [T, 4]" in ended.stderr) == (2, True)
    with pytest.raises(UserError, match=r"row 0, column 1: is 1e\+39, and"):  # infinite in float32
        reader().refuse_unfit("x.npy", 0, 0, np.array([[0.0, 1e39]]))
    for setting in ("data.targets=[3]", "data.columns=['a']", "data.tokenizer=ids"):
        ended = verb("check", "--config", "series.toml", "--set", setting)
        key = setting.partition("=")[0]
        assert ended.returncode == 2
        assert re.search(f"{key}[^:]*: does not fit data.features = 3", ended.stderr)
