"""Every function that only measures or shows may fail: one warning, and the run computes what it would have."""

from __future__ import annotations

import re
from itertools import groupby

import pytest

from tests.support.broken_diagnostics import find_diagnostics, losses, train_with_broken
from tests.support.runs import read_rows, write_tiny_config
from trainer.ledger import COUNTER_KEYS, GAUGE_KEYS

pytestmark = pytest.mark.distributed

EXTRA = """
per_source = true
per_layer = true
peak_tflops = 1.0
tensorboard = true
stdout = "line"

[objective]
token_types = true

[eval]
every = 3
batches = 2
holdout_fraction = 0.2

[checkpoint]
every = 4

[sample]
every = 3
tokens = 4

[distributed]
timeout_sec = 60
"""
COUNTED = (*COUNTER_KEYS, *GAUGE_KEYS)
# What is absent from the last row, and not 0, where a function is broken.
ABSENT = {
    "trainer.ledger.ledger.Ledger.drain_metrics": COUNTED,
    "trainer.metrics.noise_scale.hooks.GradientNoiseScale._measure": "gns/",
    "trainer.metrics.noise_scale.estimate.NoiseScaleAverage.drain_metrics": "gns/",
    "trainer.lab.per_layer.LayerNumbers.gradient_ready": "layer/",
    "trainer.lab.per_layer.LayerNumbers.summed": "layer/",
    "trainer.training.step.core_extensions.StepDetails.drain_metrics": (
        *("accuracy", "objective/", "token_type/", "source/", "modality/"),
    ),
}
NEEDED = [
    "trainer.ledger.ledger.Ledger.lookup",
    "trainer.ledger.ledger.Ledger.store",
    "trainer.data.blend.BlendDataset.__next__",
    "trainer.data.mixing.StreamMixingDataset.__next__",
    "trainer.objective.loss.Objective.__call__",
    "trainer.metrics.sinks.JsonlSink.log",
    "trainer.metrics.aggregate.reduce_over_ranks",
]


ALL = "all of them"


def holder(name):
    return name.rpartition(".")[0]


def last_row(directory, name):
    rows = read_rows(directory / f"run {name}" / "metrics.jsonl")
    return rows[max(place for place in rows if place[0] == "train")]


def make_config(directory):
    config = write_tiny_config(directory, EXTRA)
    text = config.read_text().replace("log_interval = 1", "log_interval = 2").replace("[eval]", "[eval]\ndepth = true")
    config.write_text(text.replace("[train]", "[train]\nspike_sigma = 6"))
    return config


def check(directory, outcomes, breaks_on):
    """Every run ends well, with the losses of the one that nothing was broken in.

    Where something was broken, each part that it belongs to (each source's pool, say) is off with one warning.
    """
    expected = losses(directory, "")
    problems = []
    for name, ranks in outcomes.items():
        if any(each.code != 0 for each in ranks):
            problems.append(f"{name}: {[(each.code, each.said[-1500:]) for each in ranks]}")
            continue
        if losses(directory, name) != expected:
            problems.append(f"{name}: other losses")
        for rank, each in enumerate(ranks):
            off = re.findall(r"WARNING (.*) failed and is off", each.said)
            if len(off) != len(set(off)) or (rank not in breaks_on and off):
                problems.append(f"{name}: rank {rank} warns of {off}")
    assert not problems, "\n".join(problems)


def train(directory, cases, world_size, breaks_on):
    """Trains without and with each case, and checks all of it; the outcomes."""
    outcomes = train_with_broken(directory, make_config(directory), cases, world_size=world_size, breaks_on=breaks_on)
    check(directory, outcomes, breaks_on)
    return outcomes


def test_all_may_fail_at_once_and_one_that_fails_alone_leaves_its_own_metrics_absent(tmp_path):
    diagnostics = list(find_diagnostics())
    assert {*diagnostics} >= ABSENT.keys()
    outcomes = train(tmp_path, {ALL: diagnostics, **{name: [name] for name in ABSENT}}, 1, [0])
    assert outcomes.keys() == {"", ALL, *ABSENT}
    whole = last_row(tmp_path, "")
    for name, prefix in ABSENT.items():
        missing = {key for key in whole if key.startswith(prefix)}
        assert missing, prefix
        assert last_row(tmp_path, name).keys() == whole.keys() - missing, name


def test_what_fails_to_be_measured_on_one_rank_is_absent_on_all(tmp_path):
    prefixes = {
        "trainer.metrics.noise_scale.hooks.GradientNoiseScale._measure": "gns/",
        "trainer.lab.per_layer.LayerNumbers.updated": "layer/",
    }
    outcomes = train(tmp_path, {ALL: list(find_diagnostics()), **{name: [name] for name in prefixes}}, 2, [1])
    assert ALL in outcomes
    for name, prefix in prefixes.items():
        assert any(key.startswith(prefix) for key in last_row(tmp_path, ""))
        assert not any(key.startswith(prefix) for key in last_row(tmp_path, name))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("world_size", "breaks_on"), [(1, [0]), (2, [1]), (2, [0, 1])], ids=["alone", "one of two", "both"]
)
def test_each_of_them_may_fail_alone(tmp_path, world_size, breaks_on):
    """On both ranks those of a class, or a module's functions, at once."""
    names = sorted(find_diagnostics(), key=holder)
    cases = {name: [name] for name in names}
    if breaks_on == [0, 1]:
        cases = {name: list(those) for name, those in groupby(names, key=holder)}
    train(tmp_path, {ALL: names, **cases}, world_size, breaks_on)


def test_what_is_no_diagnostic_ends_the_run(tmp_path):
    cases = {name: [name] for name in NEEDED}
    outcomes = train_with_broken(tmp_path, make_config(tmp_path), cases, world_size=1, breaks_on=[0])
    assert outcomes.keys() == {"", *NEEDED}
    assert [name for name, (alone,) in outcomes.items() if alone.code == 0] == [""]
