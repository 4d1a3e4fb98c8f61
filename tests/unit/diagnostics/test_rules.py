"""Every rule on healthy, faulty and absent rows; the numbers are written by hand."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.metric_streams import Scenario, write_run
from trainer.metrics.catalog.lookup import is_known
from trainer.metrics.payload_contract import Restart
from trainer.tools import diagnostics
from trainer.tools.diagnostics.diagnose import Ruling, diagnose
from trainer.tools.diagnostics.facts import batches_through, micro_batches
from trainer.tools.diagnostics.outcome import KNOBS, Outcome
from trainer.tools.diagnostics.rules.all_rules import RULES
from trainer.tools.diagnostics.rules.stability import find_spikes
from trainer.tools.diagnostics.series import MAX_EVIDENCE, aligned, series
from trainer.tools.runs.load import RunRecord, load_run
from trainer.tools.runs.table import RowTable

BY_NAME = {rule.name: rule for rule in RULES}
POOL = "stream_mixing/active/"
MASKED = "stream_mixing/masked_share"
ENDED = "stream_mixing/refill/exhaust_events"
MIXING = {"num_streams_mixed": 4, "pick_mode": "weighted", "batching_mode": "per_stream", "batch_size": 8}
CONFIG = {
    "train": {"micro_batches": 2},
    "data": {"mixing": MIXING, "prefetch": 2},
    "model": {"family": "rglru", "dim": 1024, "num_layers": 4},
    "ledger": {"capacity": 64, "stale_threshold": 5, "wipe_mode": "lru"},
    "optimizer": {"lr": 1e-3},
    "checkpoint": {"every": 40},
}


def make_run(columns: Mapping[str, Mapping[int, float] | list[float]], **changes: Any) -> RunRecord:
    """A run with these columns: step -> value, or values of steps 1, 2, ..."""
    table = RowTable(merge_same_step=False)
    named = {k: v if isinstance(v, Mapping) else dict(enumerate(v, start=1)) for k, v in columns.items()}
    for step in sorted({step for column in named.values() for step in column}):
        row = {key: column[step] for key, column in named.items() if step in column}
        table.add(step, 0, tuple(row), row.values())
    settings: dict[str, Any] = {"config": CONFIG, "environment": {"world_size": 1}, **changes}
    return RunRecord(Path("synthetic"), table, RowTable(merge_same_step=True), **settings)


def mixed(**changes: Any) -> dict[str, Any]:
    """The config with other keys of `[data.mixing]`."""
    return {**CONFIG, "data": {**CONFIG["data"], "mixing": {**MIXING, **changes}}}


def check(name: str, run: RunRecord) -> Outcome:
    return BY_NAME[name].apply(run)


def pool_rows(count: int = 60, **changes: Any) -> dict[str, Any]:
    """A pool of four readers with 50 picks each, drained at the same rate."""
    left = [50 - 0.5 * i for i in range(count)]
    return {
        f"{POOL}remaining_min": left,
        f"{POOL}remaining_max": [min(value + 2, 50) for value in left],
        f"{POOL}remaining_fraction_min": [value / 50 for value in left],
        f"{POOL}remaining_fraction_max": [min(value + 2, 50) / 50 for value in left],
        f"{POOL}steps_since_pick_max": [12.0] * count,
        f"{POOL}pick_surprise_max": [3.0] * count,
        f"{POOL}modalities/a": [2.0] * count,
        f"{POOL}modalities/b": [2.0] * count,
        ENDED: [0.0] * count,
        **changes,
    }


def noisy(level: float, count: int, relative: float = 0.02) -> list[float]:
    """A level with deterministic noise."""
    return [level * (1 + relative * math.sin(12.9898 * i * i)) for i in range(count)]


def contract_event(status: str, *, step: int = 0) -> dict[str, Any]:
    verdict = {"check": "carry", "status": status, "text": "cells after the first start from zero"}
    return {"event": "contract", "global_step": step, "trusted": ["carry"], "verdicts": [verdict]}


FALSE = {mode: f"ledger/false_evictions/{mode}" for mode in ("lru", "stale")}
LEDGER = {"ledger/live_groups": [64.0] * 60, "ledger/fill_fraction": [1.0] * 60}
SPEED = noisy(1000.0, 100)
GNS = {
    "gns/b_now": [20.0] * 40,
    "gns/b_now_low": [16.0] * 40,
    "gns/b_now_high": [24.0] * 40,
    "gns/b_now_steps": [30.0] * 40,
}


def same_data(consistency: float | None, error: float = 0.0005, *, noise: float = 0.4, micro_batches: int = 3) -> Any:
    """Two ranks; noise between them relative to that within."""
    values = {"tr_sigma": noise, "grad_sq": 0.05, "b_small": 4.0, "b_big": 8.0 * micro_batches}
    if consistency is not None:
        values |= {"consistency": consistency, "consistency_se": error}
    return {f"gns/{key}": [value] * 40 for key, value in values.items()}


def probes(*, gain: float, gap: float, error: float = 0.01, count: int = 20) -> dict[str, dict[int, float]]:
    """A probe at every fifth of the steps, with deterministic noise of its error."""
    steps = [5 * n for n in range(1, count + 1)]
    noise = {step: error * math.sin(7.7 * step) for step in steps}
    return {
        "ledger/carry_gain": {step: gain + noise[step] for step in steps},
        "ledger/carry_gain_se": dict.fromkeys(steps, error),
        "ledger/stale_gap": {step: gap - noise[step] for step in steps},
        "ledger/stale_gap_se": dict.fromkeys(steps, error),
        "ledger/state_age": dict.fromkeys(steps, 12.0),
        "ledger/state_drift": dict.fromkeys(steps, 0.4),
    }


def layer_rows(what: str, values: Mapping[str, float], count: int = 20) -> dict[str, list[float]]:
    return {f"layer/{name}/{what}": [value] * count for name, value in values.items()}


def norm_rows(*others: float) -> dict[str, list[float]]:
    """The head's gradient is 1, and the whole's is that of all."""
    norms = {"head": 1.0, **{f"blocks.{number}": norm for number, norm in enumerate(others)}}
    return {**layer_rows("grad_norm", norms), "grad_norm": [math.hypot(*norms.values())] * 20}


RATIOS = {"embedding": 2e-5, "blocks.0": 1e-3, "blocks.1": 2e-3, "head": 5e-3}

HEALTHY: dict[str, RunRecord] = {
    "false_evictions_lru": make_run({FALSE["lru"]: [0.0] * 9}),
    "false_evictions_stale": make_run({FALSE["stale"]: [0.0] * 9}),
    "cold_starts": make_run({"ledger/cold_starts": [0.0] * 9}),
    "ledger_thrash": make_run({**LEDGER, "ledger/evictions/lru": [1.0] * 60, **pool_rows()}),
    "ledger_oversize": make_run({"ledger/fill_fraction": {1: 0.1, 200: 0.6}}, environment={"state_width": 4096}),
    "refused_rows": make_run({"ledger/refused_rows": [0.0] * 9}),
    "carry_worthless": make_run(probes(gain=0.05, gap=0.0)),
    "stale_states": make_run(probes(gain=0.5, gap=-0.04)),
    "model_contract": make_run({"loss": [1.0]}, events=[contract_event("held")]),
    "stuck_reader": make_run(pool_rows(**{f"{POOL}pick_surprise_max": [11.5] * 60})),
    "uneven_slices": make_run(pool_rows()),
    "closed_pool_imbalance": make_run(pool_rows()),
    "starved_modality": make_run(pool_rows(**{ENDED: [1.0] * 60, f"{POOL}modalities/b": [2.0, 0.0, 0.0] * 20})),
    "exhaust_churn": make_run(pool_rows(**{ENDED: [0.04] * 60})),
    "masked_ranks": make_run({MASKED: [0.0, 0.2] * 20}),
    "shares": make_run({"blend/max_share_error": {10: 0.2, 1000: 0.01}}),
    "repeated_data": make_run(same_data(1.0), environment={"world_size": 2}),
    "batch_size": make_run({**GNS, "gns/b_big": [16.0] * 40}),
    "still_layer": make_run(layer_rows("update_ratio", RATIOS)),
    "dominant_layer": make_run(norm_rows(0.02, 0.01)),
    "non_finite": make_run({"loss": [2.0] * 9, "grad_norm": [1.0] * 9, "non_finite_steps": [0.0] * 9}),
    "loss_spikes": make_run({"loss": noisy(2.0, 60)}),
    "throughput_regression": make_run({"tokens_per_sec": SPEED}),
    "data_bound": make_run({"time/data_sec": [0.01] * 40, "step_time_sec": [1.0] * 40}),
    "straggling_rank": make_run(
        {"time/slowest_rank_sec": [0.6] * 80, "time/fastest_rank_sec": [0.5] * 80, "step_time_sec": [1.0] * 80},
        environment={"world_size": 2},
    ),
    "restarts": make_run({"loss": [1.0] * 100}, restarts=[Restart(50)], steps_redone=[2]),
    "ending": make_run({"loss": [1.0]}, status={"state": "done"}),
}
FAULTY: dict[str, RunRecord] = {
    "false_evictions_lru": make_run({FALSE["lru"]: [0.0, 0.0, 1.0]}),
    "false_evictions_stale": make_run({FALSE["stale"]: [0.0, 0.0, 1.0]}),
    "cold_starts": make_run({"ledger/cold_starts": [0.0, 2.0], FALSE["lru"]: [0.0, 1.0]}),
    "ledger_thrash": make_run({**LEDGER, "ledger/evictions/lru": [16.0] * 60, **pool_rows()}),
    "ledger_oversize": make_run(
        {"ledger/fill_fraction": {1: 0.01, 200: 0.01}},
        config={**CONFIG, "ledger": {"capacity": 100_000}},
        environment={"state_width": 4096},
    ),
    "refused_rows": make_run({"ledger/refused_rows": [0.0, 1.0]}),
    "carry_worthless": make_run(probes(gain=0.0, gap=0.0, error=0.001)),
    "stale_states": make_run(probes(gain=0.5, gap=-0.06)),
    "model_contract": make_run({"loss": [1.0]}, events=[contract_event("broken"), contract_event("held", step=40)]),
    "stuck_reader": make_run(pool_rows(**{f"{POOL}pick_surprise_max": [3.0] * 59 + [11.9]})),
    "uneven_slices": make_run(pool_rows(**{f"{POOL}remaining_max": [2000.0] * 60})),
    "closed_pool_imbalance": make_run(
        pool_rows(
            **{
                f"{POOL}remaining_{end}": [left - 0.8 * i for i in range(60)]
                for end, left in (("min", 50), ("max", 200))
            }
        ),
        config=mixed(pick_mode="uniform"),
    ),
    "starved_modality": make_run(pool_rows(**{ENDED: [1.0] * 60, f"{POOL}modalities/b": [2.0] * 20 + [0.0] * 40})),
    "exhaust_churn": make_run(pool_rows(**{ENDED: [0.6] * 60})),
    "masked_ranks": make_run({MASKED: [0.4] * 40}),
    "shares": make_run({"blend/max_share_error": {10: 0.2, 1000: 0.1}}),
    "repeated_data": make_run(same_data(-4e-17), environment={"world_size": 2}),
    "batch_size": make_run({**GNS, "gns/b_big": [100.0] * 40}),
    "still_layer": make_run(layer_rows("update_ratio", {**RATIOS, "blocks.1": 1e-7})),
    "dominant_layer": make_run(norm_rows(0.005, 0.004)),
    "non_finite": make_run({"loss": [2.0, math.nan, 2.0]}),
    "loss_spikes": make_run({"loss": [*noisy(2.0, 40), 3.0, *noisy(2.0, 10)]}),
    "throughput_regression": make_run({"tokens_per_sec": SPEED[:60] + [0.7 * value for value in SPEED[60:]]}),
    "data_bound": make_run({"time/data_sec": [0.2] * 80, "step_time_sec": [1.0] * 80}),
    "straggling_rank": make_run(
        {"time/slowest_rank_sec": [0.9] * 80, "time/fastest_rank_sec": [0.5] * 80, "step_time_sec": [1.0] * 80},
        environment={"world_size": 2},
        config=mixed(batching_mode="device_per_stream"),
    ),
    "restarts": make_run({"loss": [1.0] * 100}, restarts=[Restart(50)], steps_redone=[6]),
    "ending": make_run({"loss": [1.0]}, status={"state": "failed", "reason": "a reason", "last_step": 1}),
}


def data_bound(waits: list[float], tokenizer: str = "bytes", sources: str = "", **stages: list[float]) -> Ruling:
    """The ruling on these waits; `stages`: the seconds of all sources in a stage."""
    named = [{"name": name} for name in sources.split()]
    config = {**CONFIG, "data": {**CONFIG["data"], "tokenizer": tokenizer, "prefetch": 2, "source": named}}
    rows = {"time/data_sec": waits, "step_time_sec": [0.6 + wait for wait in waits]}
    rows |= {f"time/{stage}/all": seconds for stage, seconds in stages.items()}
    return next(each for each in diagnose(make_run(rows, config=config)).rulings if each.rule.name == "data_bound")


def test_the_wait_of_the_first_step_is_told_apart() -> None:
    slow = data_bound([43.9] + [0.003] * 80)
    assert slow.outcome.verdict == "healthy"
    assert slow.outcome.sentence == (
        "0.5% of the logged step time was spent waiting for data, without 43.91 s before step 6, while the data was opened"
    )
    assert "while" not in data_bound([0.3] + [0.003] * 80).outcome.sentence


def test_reading_ahead_is_advised_only_where_it_helps() -> None:
    """A producer that is slower than the step stays slower, however far it reads ahead."""
    bursts = data_bound([0.0, 0.0, 0.0, 4.0] * 20)
    assert "in single steps" in bursts.outcome.sentence
    assert bursts.fix.startswith("try data.prefetch = 4 (now 2)")
    steady = data_bound([0.3] * 80, "tokenizer.json")
    assert "a batch takes longer to read than to train on" in steady.outcome.sentence
    assert "prefetch" not in steady.fix
    assert "train data tokenize" in steady.fix
    assert "tokenize" not in data_bound([0.3] * 80).fix


def test_the_stage_that_took_the_time_decides_what_helps() -> None:
    waits = [0.3] * 80
    only = data_bound(waits, "tokenizer.json", "books", open=[0.3] * 80, read=[0.1] * 80)
    assert "75% of the time of reading went into opening the files of source books" in only.outcome.sentence
    assert "fewer, larger files" in only.fix
    several = data_bound(waits, sources="books code", open=[0.1] * 80, own_code=[0.3] * 80)
    assert "the own code (metrics.per_source = true names the source)" in several.outcome.sentence
    other = data_bound(waits, sources="books", read=[0.1] * 80)
    assert "went into" not in other.outcome.sentence, "the time that was spent reading does not explain the wait"
    first = data_bound([9.0, *waits], sources="books", tokenize=[20.0] + [0.0] * 80, read=[0.3] * 81)
    assert "100% of the time of reading went into reading" in first.outcome.sentence, "not what the first rows took"


def test_reading_ahead_is_not_advised_for_files_that_take_as_long_as_many_steps() -> None:
    bursts = [0.0, 0.0, 0.0, 4.0] * 20
    assert "train data tokenize" in data_bound(bursts, tokenize=bursts).fix
    assert data_bound(bursts, read=bursts).fix.startswith("try data.prefetch = 4")


def test_a_source_that_ended_is_named_with_its_step() -> None:
    rows = {"blend/max_share_error": [0.0] * 40, "blend/ended_sources": [0.0] * 20 + [1.0] * 20}
    events = [{"event": "source_ended", "global_step": 21, "sources": ["small"]}]

    def shares(events: list[dict[str, Any]], num_rows: int = 40) -> Outcome:
        run = make_run({key: values[:num_rows] for key, values in rows.items()}, events=events)
        return next(each.outcome for each in diagnose(run).rulings if each.rule.name == "shares")

    found = shares(events)
    assert (found.verdict, found.severity) == ("finding", "advice")
    assert found.sentence.startswith("source small exhausted at step 21")
    assert shares([]).sentence.startswith("1 source exhausted, the first by step 21")
    assert shares([], num_rows=20).verdict == "healthy"


def test_every_key_to_change_is_also_known_in_words() -> None:
    """A loop without a config gets the words. Every `Knob` names its key where it is made."""
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(diagnostics.__file__).parent.rglob("*.py"))
    named = set(re.findall(r"\bKnob\(\s*\"([^\"]+)", sources)) | {"data.mixing.batch_size"}  # chosen by a condition
    assert named == set(KNOBS)
    assert sources.count("Knob(key,") == 1
    for run in FAULTY.values():
        for ruling in diagnose(run).findings:
            if ruling.outcome.knob is not None:
                assert ruling.fix.startswith(f"try {ruling.outcome.knob.key} = ")


@pytest.mark.parametrize("name", BY_NAME)
def test_without_a_config_no_fix_and_no_reason_names_a_key_of_one(name: str) -> None:
    key = re.compile(r"(?<!trainer\.)\b(gns|metrics|train|data|ledger|optimizer|checkpoint)\.[a-z_]+\b|train preview")
    for run in (FAULTY[name], make_run({"loss": [1.0]})):
        for ruling in diagnose(replace(run, config={})).rulings:
            assert not key.search(ruling.outcome.sentence + ruling.fix.replace("metrics.jsonl", "")), ruling
            if ruling.rule.name == name and run is FAULTY[name] and ruling.outcome.knob is not None:
                assert ruling.fix.startswith("for the ")


def test_every_rule_has_a_healthy_and_a_faulty_case() -> None:
    assert list(HEALTHY) == list(FAULTY) == [rule.name for rule in RULES]


@pytest.mark.parametrize("name", BY_NAME)
def test_healthy_rows_are_healthy(name: str) -> None:
    outcome = check(name, HEALTHY[name])
    assert outcome.verdict == "healthy", outcome.sentence
    assert not outcome.evidence


@pytest.mark.parametrize("name", BY_NAME)
def test_a_fault_is_reported_with_evidence_and_a_knob(name: str) -> None:
    outcome = check(name, FAULTY[name])
    assert outcome.verdict == "finding", outcome.sentence
    assert any(evidence.steps for evidence in outcome.evidence)
    if name != "ending":
        assert outcome.knob is not None
        assert outcome.knob.suggested not in (None, outcome.knob.current)


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"restarts"}))
def test_absent_keys_are_not_measured(name: str) -> None:
    assert check(name, make_run({"unknown/key": [1.0] * 100}, config={}, environment={})).verdict == "not_measured"


@pytest.mark.parametrize("name", BY_NAME)
def test_a_fault_is_found_without_the_config(name: str) -> None:
    faulty = FAULTY[name]
    kept = {"status": faulty.status, "events": faulty.events}
    run = RunRecord(faulty.path, faulty.train, faulty.evals, faulty.restarts, faulty.steps_redone, **kept)
    outcome = check(name, run)
    # Only the config has the size of a state.
    assert outcome.verdict == ("not_measured" if name == "ledger_oversize" else "finding"), outcome.sentence


@pytest.mark.parametrize(("width", "dtype", "verdict"), [(4_000, "float32", "finding"), (4_000, "bfloat16", "healthy")])
def test_the_size_of_a_state_is_what_the_run_recorded(width: int, dtype: str, verdict: str) -> None:
    """99 % of 100,000 rows unused: 1.6 GB or 0.8 GB, of which 1 GB is too much."""
    config = {"model": {"target": "my_parts:build"}, "ledger": {"capacity": 100_000, "dtype": dtype}}
    rows = {"ledger/fill_fraction": {1: 0.01, 200: 0.01}}
    assert (
        check("ledger_oversize", make_run(rows, config=config, environment={"state_width": width})).verdict == verdict
    )
    assert check("ledger_oversize", make_run(rows, config=config)).verdict == "not_measured"


@pytest.mark.parametrize("name", BY_NAME)
def test_a_single_row_raises_no_exception(name: str) -> None:
    for source in (HEALTHY[name], FAULTY[name]):
        row = {key: {7: column[1][0]} for key in source.train.keys if (column := source.train.column(key))[1]}
        check(name, make_run(row))


def test_rules_read_keys_of_the_catalog() -> None:
    for rule in RULES:
        for key in (*rule.needs, *rule.uses):
            assert " " in key or key.endswith(".json") or is_known(key.replace("<", "").replace(">", "")), key


def test_cold_starts_caused_by_false_evictions_are_explained() -> None:
    run = make_run({"ledger/cold_starts": [0.0, 3.0], FALSE["lru"]: [0.0, 1.0], FALSE["stale"]: [0.0, 2.0]})
    assert check("cold_starts", run).verdict == "explained"


def test_cold_starts_without_evictions_suggest_no_larger_capacity() -> None:
    """After skipped steps, for one: states that were not finite explain them, and no capacity would have kept these."""
    skipped = {"ledger/cold_starts": [0.0, 3.0], "ledger/refused_rows": [3.0, 0.0], "non_finite_steps": [1.0, 0.0]}
    assert check("cold_starts", make_run(skipped)).verdict == "explained"
    outcome = check("cold_starts", make_run({**skipped, "ledger/cold_starts": [0.0, 4.0]}))
    assert (outcome.verdict, outcome.knob) == ("finding", None)
    outcome = check("cold_starts", make_run({"ledger/cold_starts": [0.0, 4.0], "ledger/evictions/lru": [9.0, 0.0]}))
    assert outcome.knob is not None
    assert outcome.knob.key == "ledger.capacity"


def test_cold_starts_after_wipes_suggest_another_wipe_mode() -> None:
    run = make_run({"ledger/cold_starts": [0.0, 3.0], "ledger_wipe_count": [0.0, 1.0]})
    knob = check("cold_starts", run).knob
    assert knob is not None
    assert knob.key == "ledger.wipe_mode"


def test_thrash_with_false_evictions_is_explained() -> None:
    rows = {**LEDGER, "ledger/evictions/lru": [16.0] * 60, **pool_rows(), FALSE["lru"]: [1.0] * 60}
    assert check("ledger_thrash", make_run(rows)).verdict == "explained"


def test_the_suggested_stale_threshold_is_two_k_n_over_micro_batches() -> None:
    knob = check("false_evictions_stale", make_run({FALSE["stale"]: [1.0] * 60, **pool_rows()})).knob
    assert knob is not None
    assert knob.suggested == 2 * 4 * (50 + 1) // 2


def test_the_suggested_stale_threshold_is_that_of_the_source_that_waits_longest() -> None:
    """Shares 0.75 and 0.25, the second with a schedule; readers are 3 and 1 of the 4 that the rows count."""
    weight = {"schedule": "linear", "scale": 0.5, "points": {"0": 3.0, "9": 1.0}}
    tables = [{"weight": 3.0}, {"weight": weight, "mixing": {"num_streams_mixed": 1}}]
    rows = {FALSE["stale"]: [1.0] * 60, **pool_rows(), "blend/max_share_error": [0.1] * 60}
    config = {**CONFIG, "data": {"mixing": MIXING, "source": tables}}

    def suggested(**changes: Any) -> Any:
        knob = check("false_evictions_stale", make_run(rows, config={**config, **changes})).knob
        assert knob is not None
        return knob.suggested

    assert suggested() == 2 * 3 * (50 + 1) / 0.75 / 2
    alone = [{**table, "mixing": {"num_streams_mixed": 1}} for table in tables]
    lone = math.ceil(math.log(1e-9) / math.log1p(-0.25) / 2)
    assert suggested(data={"mixing": MIXING, "source": alone}) == lone == 37
    assert suggested(data={"mixing": MIXING, "source": [{"include": "x.toml"}, *tables]}) == 4 * 5, "not known"
    beyond = {**config["ledger"], "stale_threshold": 500}
    assert suggested(ledger=beyond) == 2 * 500, "the bound was too low"


@pytest.mark.parametrize("name", BY_NAME)
def test_no_fix_is_what_the_run_has_already(name: str) -> None:
    """Follow the advice of a rule until it has none left: it never suggests the value that is already set."""
    run = FAULTY[name]
    for _ in range(12):
        knob = check(name, run).knob
        if knob is None or knob.current is None:
            break
        assert knob.suggested != knob.current
        assert not str(knob.suggested).startswith(f"{knob.current},"), "a condition belongs into `condition`"
        config = copy.deepcopy(dict(run.config))
        *path, last = knob.key.split(".")
        table = config
        for part in path:
            table = table.setdefault(part, {})
        table[last] = knob.suggested
        run = replace(run, config=config)


@pytest.mark.parametrize(
    ("world_size", "current", "suggested"), [(1, 12, 24), (2, 6, 12), (None, None, "twice as many")]
)
def test_the_ledger_of_a_loop_without_a_config_is_suggested_by_rank(world_size, current, suggested) -> None:
    """Live groups are a sum over ranks; where nobody says how many there are, no number is made up."""
    rows = {FALSE["lru"]: [0.0, 3.0], "ledger/live_groups": [6.0, 12.0], "ledger/fill_fraction": [0.5, 1.0]}
    status = {"state": "done", "loop": "own", **({"world_size": world_size} if world_size else {})}
    knob = check("false_evictions_lru", make_run(rows, config={}, environment={}, status=status)).knob
    assert knob is not None
    assert (knob.current, knob.suggested) == (current, suggested)


def test_what_no_setting_would_mend_gets_no_setting() -> None:
    times = {"time/slowest_rank_sec": [0.9] * 80, "time/fastest_rank_sec": [0.5] * 80, "step_time_sec": [1.0] * 80}
    found = check("straggling_rank", make_run(times, environment={"world_size": 2}))
    assert (found.verdict, found.knob) == ("finding", None)
    assert found.sentence.endswith("look at the machine of the slowest")
    other = check("straggling_rank", FAULTY["straggling_rank"]).knob
    assert other is not None
    assert str(other).startswith("data.mixing.batching_mode = per_stream (now device_per_stream), if ranks read")

    again = make_run({"loss": [1.0] * 1000}, restarts=[Restart(50)] * 3, steps_redone=[1, 1, 1])
    assert check("restarts", again).knob is None, "every start fails at one step, however many checkpoints there are"

    weighted = replace(FAULTY["closed_pool_imbalance"], config=CONFIG)
    uneven = check("closed_pool_imbalance", weighted)
    assert (uneven.verdict, uneven.knob) == ("finding", None)
    assert uneven.sentence.endswith("although picks are weighted")

    one = {**mixed(batch_size=1), "train": {"micro_batches": 1}}
    wasteful = check("batch_size", make_run({**GNS, "gns/b_big": [100.0] * 40}, config=one))
    assert (wasteful.verdict, wasteful.knob) == ("finding", None)

    still = layer_rows("update_ratio", {**RATIOS, "blocks.1": 1e-7})
    groups = [{"match": "blocks.*", "weight_decay": 0.0, "lr_scale": 1.0}, {"match": "blocks.1.*", "lr_scale": 1e-6}]
    cut = check("still_layer", make_run(still, config={**CONFIG, "optimizer": {"group": groups}})).knob
    assert cut is not None
    assert cut.key == "model", "the first group that matches counts, and it does not slow the layer down"


@pytest.mark.parametrize(
    ("rows", "world_size", "verdict"),
    [
        (same_data(0.0), 2, "finding"),
        (same_data(0.0), 1, "finding"),  # the two halves of a step
        (same_data(0.0), None, "finding"),
        (same_data(0.3), 2, "healthy"),  # slices of one stream
        (same_data(0.0, error=0.05), 2, "healthy"),  # not known well enough
        (same_data(None), 2, "not_measured"),  # ranks may be equal, or not
        (same_data(None), 1, "healthy"),
        (same_data(None, micro_batches=1), 2, "healthy"),
        (same_data(None, micro_batches=1, noise=1e-9), 2, "finding"),
        (same_data(None, noise=-1e-9), 1, "finding"),
        ({**same_data(None, noise=0.0), "gns/grad_sq": [0.0] * 40}, 1, "not_measured"),
    ],
)
def test_the_same_data_on_all_ranks_are_seen_by_the_noise_between_them(rows, world_size, verdict) -> None:
    run = make_run({**GNS, **rows}, environment={"world_size": world_size})
    assert check("repeated_data", run).verdict == verdict
    assert (check("batch_size", run).verdict == "explained") == (verdict == "finding")


@pytest.mark.parametrize(("value", "error"), [(3.58, 0.31), (3.58, 0.6), (1.4, 0.01)])
def test_a_loop_that_measures_other_gradients_than_it_makes_is_warned(value: float, error: float) -> None:
    rows = {**GNS, **same_data(value, error)}
    own = check("repeated_data", make_run(rows, config={}, environment={}))
    if value - 3 * error > 2:
        assert (own.verdict, own.severity) == ("finding", "warning")
        assert "clipped or scaled before they were measured" in own.sentence
    else:
        assert own.verdict == "healthy"
    assert check("repeated_data", make_run(rows, environment={"world_size": 2})).verdict == "healthy"


@pytest.mark.parametrize(("batch", "suggested"), [(100.0, "less"), (16.0, None), (1.0, "more")])
def test_the_batch_is_compared_with_the_bounds_of_the_noise_scale(batch: float, suggested: str | None) -> None:
    outcome = check("batch_size", make_run({**GNS, "gns/b_big": [batch] * 40}))
    assert "20 (16 to 24)" in outcome.sentence
    if suggested is None:
        assert outcome.verdict == "healthy"
    else:
        assert outcome.knob is not None
        assert suggested == ("less" if outcome.knob.suggested < outcome.knob.current else "more")


def test_a_wide_confidence_interval_prevents_a_finding_about_the_batch() -> None:
    wide = {**GNS, "gns/b_now_high": [38.0] * 40, "gns/b_big": [100.0] * 40}
    assert check("batch_size", make_run(wide)).verdict == "healthy"


def test_the_last_row_counts_and_is_named() -> None:
    rows = {**GNS, "gns/b_now": [500.0] * 39 + [20.0], "gns/b_now_low": [400.0] * 39 + [16.0], "gns/b_big": [16.0] * 40}
    outcome = check("batch_size", make_run(rows))
    assert outcome.verdict == "healthy"
    assert "gns/b_now at step 40, from the last 30 steps" in outcome.sentence


def test_the_noise_scale_of_the_batch_as_drawn_goes_before_that_of_independent_micro_batches() -> None:
    drawn = {"gns/b_drawn": [2.0] * 40, "gns/b_drawn_low": [1.0] * 40, "gns/b_drawn_high": [3.0] * 40}
    outcome = check("batch_size", make_run({**GNS, **drawn, "gns/b_big": [16.0] * 40}))
    assert outcome.verdict == "finding"
    assert "gns/b_drawn" in outcome.sentence


def test_records_of_earlier_versions_have_their_average_judged() -> None:
    rows = {"gns/b_simple": [20.0] * 40, "gns/b_simple_low": [16.0] * 40, "gns/b_simple_high": [24.0] * 40}
    outcome = check("batch_size", make_run({**rows, "gns/b_big": [100.0] * 40}))
    assert outcome.verdict == "finding"
    assert "gns/b_simple at step 40" in outcome.sentence


@pytest.mark.parametrize(
    ("value", "error", "doubts"), [(0.6, 0.05, True), (0.6, 0.2, False), (0.9, 0.01, False), (-0.1, 0.1, True)]
)
def test_micro_batches_that_depend_on_each_other_raise_a_doubt(value: float, error: float, doubts: bool) -> None:
    rows = {**GNS, "gns/b_big": [16.0] * 40, "gns/consistency": [value] * 40, "gns/consistency_se": [error] * 40}
    outcome = check("batch_size", make_run(rows))
    assert outcome.verdict == "healthy"
    assert ("components_every" in outcome.sentence) == doubts


def test_the_larger_the_noise_scale_the_more_a_dependence_matters() -> None:
    rows = {**GNS, "gns/consistency": [0.9] * 40, "gns/consistency_se": [0.01] * 40}
    sentences = [check("batch_size", make_run({**rows, "gns/b_big": [size] * 40})).sentence for size in (16.0, 8.0)]
    assert ["components_every" in sentence for sentence in sentences] == [False, True]


def test_a_noise_scale_of_a_few_steps_is_not_judged() -> None:
    outcome = check("batch_size", make_run({**GNS, "gns/b_now_steps": [12.0] * 40, "gns/b_big": [100.0] * 40}))
    assert outcome.verdict == "not_measured"


@pytest.mark.parametrize(("batch", "verdict"), [(1.0, "finding"), (2.0, "not_measured"), (1000.0, "not_measured")])
def test_a_lower_bound_alone_tells_a_batch_that_is_too_small(batch: float, verdict: str) -> None:
    rows = {"gns/b_now_low": [16.0] * 40, "gns/b_now_steps": [30.0] * 40, "gns/b_big": [batch] * 40}
    outcome = check("batch_size", make_run(rows))
    assert outcome.verdict == verdict
    assert "at least 16" in outcome.sentence


def test_a_noise_scale_that_the_last_row_does_not_know_is_not_measured() -> None:
    rows = {"gns/b_big": [1.0] * 40, "gns/b_now": {30: 500.0}, "gns/b_now_low": {30: 400.0}}
    assert check("batch_size", make_run(rows)).verdict == "not_measured"


def test_fp16_may_reject_a_few_steps() -> None:
    rows = {"loss": [2.0] * 100, "non_finite_steps": [1.0] * 5 + [0.0] * 95}
    half = {**CONFIG, "train": {"precision": "fp16"}}
    assert check("non_finite", make_run(rows, config=half)).verdict == "healthy"
    assert check("non_finite", make_run(rows)).verdict == "finding"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"on_non_finite": "skip"}, "2 steps skipped, "),
        ({"on_non_finite": "stop", "precision": "fp16"}, "40 steps skipped, "),
        ({"on_non_finite": "stop"}, "the loss or the gradient of 1 step was not finite, "),
        ({}, "the loss or the gradient of 2 steps was not finite, "),
    ],
)
def test_only_a_run_that_skips_steps_is_said_to_have_skipped_them(table: dict[str, str], words: str) -> None:
    count = int(re.findall(r"\d+", words)[0])
    rows = {"loss": [2.0] * 50, "non_finite_steps": [1.0] * count + [0.0] * (50 - count)}
    assert check("non_finite", make_run(rows, config={"train": table})).sentence.startswith(words)


def test_a_blend_whose_sources_differ_has_no_spikes() -> None:
    losses = [(2.6 if i % 7 == 0 else 1.4) + 0.02 * math.sin(i * i) for i in range(200)]
    assert check("loss_spikes", make_run({"loss": losses})).verdict == "healthy"


def test_a_loss_that_falls_steeply_has_no_spikes() -> None:
    losses = [6.0 / (1 + i / 5) + 0.05 * math.sin(i * i) for i in range(200)]
    assert check("loss_spikes", make_run({"loss": losses})).verdict == "healthy"


@pytest.mark.parametrize(("rise", "verdict"), [(0.5, "healthy"), (2.0, "finding")])
def test_a_spike_undoes_a_share_of_the_improvement(rise: float, verdict: str) -> None:
    losses = [*noisy(6.0, 20, 0.001), *noisy(2.0, 40, 0.001), 2.0 + rise, *noisy(2.0, 9, 0.001)]
    assert check("loss_spikes", make_run({"loss": losses})).verdict == verdict


def test_a_spike_in_a_loss_that_falls_steeply_is_found() -> None:
    losses = [6.0 / (1 + i / 10) + 0.01 * math.sin(i * i) for i in range(40)]
    losses[32] += 2.0
    outcome = check("loss_spikes", make_run({"loss": losses}))
    assert outcome.verdict == "finding"
    assert 33 in outcome.evidence[0].steps
    assert "33" in outcome.sentence


@pytest.mark.parametrize(("rise", "verdict"), [(3.0, "healthy"), (6.0, "finding")])
def test_the_first_batch_of_a_rare_source_in_a_short_run_is_no_spike(rise: float, verdict: str) -> None:
    """It is no worse than the untrained model was, while a spike may be."""
    losses = [6.0 / (1 + i / 10) + 0.01 * math.sin(i * i) for i in range(30)]
    losses[22] += rise
    assert check("loss_spikes", make_run({"loss": losses})).verdict == verdict


def test_a_source_that_returns_every_hundred_rows_is_no_spike() -> None:
    losses = [6.0 if i < 5 else (4.0 if i % 100 == 25 else 2.0) + 0.02 * math.sin(i * i) for i in range(400)]
    assert check("loss_spikes", make_run({"loss": losses})).verdict == "healthy"


def test_a_spike_between_two_rows_is_found_by_its_flag_unless_flags_return() -> None:
    """A source that is rarely drawn, and whose losses differ, is flagged again and again."""

    def flagged(*rows: int, every: int = 10) -> Outcome:
        steps = range(every, 41 * every, every)
        losses, flags = noisy(2.0, 40, 0.001), [float(row in rows) for row in range(40)]
        columns = {"loss": dict(zip(steps, losses, strict=True)), "loss_spike": dict(zip(steps, flags, strict=True))}
        return check("loss_spikes", make_run(columns))

    assert flagged().verdict == "healthy"
    outcome = flagged(30)
    assert outcome.verdict == "finding"
    assert "1 flagged between two rows" in outcome.sentence
    assert flagged(20).verdict == "healthy", "a source that is read for the first time"
    assert flagged(*range(4, 40, 4)).verdict == "healthy"
    assert flagged(30, every=1).verdict == "healthy", "the row's own loss says more than the flag"


def test_neighboring_spikes_are_found_and_a_lasting_level_is_not_one_spike_per_row() -> None:
    two = [*noisy(2.0, 40, 0.001), 4.0, 4.0, *noisy(2.0, 9, 0.001)]
    assert {41, 42} <= set(check("loss_spikes", make_run({"loss": two})).evidence[0].steps)
    assert len(find_spikes([*noisy(2.0, 40, 0.001), *noisy(4.0, 60, 0.001)])) < 12


def test_aligned_columns_have_the_common_steps_only() -> None:
    run = make_run({"a": {1: 10.0, 2: 20.0, 4: 40.0}, "b": {2: 2.0, 3: 3.0, 4: 4.0}, "c": {2: 0.2, 4: 0.4, 5: 0.5}})
    columns = aligned(*(series(run, key) for key in "abc"))
    assert [list(column.steps) for column in columns] == [[2, 4]] * 3
    assert [list(column.values) for column in columns] == [[20.0, 40.0], [2.0, 4.0], [0.2, 0.4]]


def test_evidence_is_spread_over_all_hits_and_includes_both_ends() -> None:
    evidence = series(make_run({"a": [float(n) for n in range(100)]}), "a").evidence()
    assert len(evidence.steps) == MAX_EVIDENCE
    assert (evidence.steps[0], evidence.steps[-1]) == (1, 100)
    assert evidence.values == tuple(step - 1 for step in evidence.steps)


def test_an_absence_that_the_share_of_a_modality_explains_is_healthy() -> None:
    # Of 64 readers 40 % have modality b; a gap of 20 has a probability of up to 0.002, the limit is 0.0005.
    rows = pool_rows(**{ENDED: [1.0] * 60, f"{POOL}modalities/b": [2.0] * 20 + [0.0] * 20 + [2.0] * 20})
    assert check("starved_modality", make_run(rows)).verdict == "healthy"


def test_several_pools_in_one_key_are_not_compared() -> None:
    rows = pool_rows(**{"blend/max_share_error": [0.01] * 60, f"{POOL}remaining_max": [2000.0] * 60})
    assert check("uneven_slices", make_run(rows)).verdict == "not_measured"
    assert check("closed_pool_imbalance", make_run(rows)).verdict == "not_measured"


def test_two_sources_whose_shares_are_exact_in_every_row_are_two_pools() -> None:
    rows = {**pool_rows(**{f"{POOL}remaining_max": [2000.0] * 60}), "blend/max_share_error": [0.0] * 60}
    two = {**CONFIG, "data": {**CONFIG["data"], "source": [{"name": "a"}, {"name": "b"}]}}
    assert check("uneven_slices", make_run(rows)).verdict == "finding"
    assert check("uneven_slices", make_run(rows, config=two)).verdict == "not_measured"


def test_slices_of_unequal_length_on_several_ranks_are_no_imbalance(tmp_path: Path) -> None:
    """A rank whose slice is shorter than the longest has read it before the others."""
    settings: dict[str, Any] = {
        "steps": 60,
        "log_interval": 1,
        "micro_batches": 1,
        "batch_size": 1,
        "max_group_cells": 1000,
    }
    for seed in range(3):
        scenario = Scenario(seed=seed, world_size=4, documents=12, streams=2, **settings)
        found = check("closed_pool_imbalance", load_run(write_run(scenario, tmp_path / f"{seed}")))
        assert found.verdict == "healthy", found.sentence
    own = replace(FAULTY["closed_pool_imbalance"], config=mixed(pick_mode="uniform", batching_mode="device_per_stream"))
    assert check("closed_pool_imbalance", own).verdict == "finding", "on one rank there is one pool"
    several = replace(own, environment={"world_size": 2})
    assert check("closed_pool_imbalance", several).verdict == "not_measured", "a pool of one's own drains by itself"


def test_uneven_streams_are_advice_and_uneven_batches_a_warning() -> None:
    rows = pool_rows(**{f"{POOL}remaining_max": [2000.0] * 60})
    uneven = {**CONFIG, "data": {"mixing": {**MIXING, "batch_size_by_modality": {"a": 1}}}}
    assert check("uneven_slices", make_run(rows)).severity == "advice"
    assert check("uneven_slices", make_run(rows, config=uneven)).severity == "warning"


def test_an_exhausted_source_is_named_as_the_cause_of_shares_that_are_off() -> None:
    rows = {"blend/max_share_error": [0.4] * 900, "blend/ended_sources": [0.0] * 300 + [1.0] * 600}
    found = check("shares", make_run(rows))
    assert "1 source exhausted, the first by step 301" in found.sentence
    assert found.knob is not None
    assert found.knob.key == "data.mixing.repeat"


def test_a_modality_whose_source_is_exhausted_does_not_starve() -> None:
    gone = {ENDED: [1.0] * 60, f"{POOL}modalities/b": [2.0] * 20 + [0.0] * 40}
    assert check("starved_modality", make_run(pool_rows(**gone))).verdict == "finding"
    ended = {"blend/ended_sources": [0.0] * 20 + [1.0] * 40}
    assert check("starved_modality", make_run(pool_rows(**gone, **ended))).verdict == "healthy"
    assert check("starved_modality", make_run(pool_rows(**gone, **{"blend/ended_sources": [1.0] * 60}))).knob is None


def test_more_ranks_may_be_masked_in_turn_before_one_is_called_idle() -> None:
    rows = {MASKED: [0.4] * 40}
    assert check("masked_ranks", make_run(rows, environment={"world_size": 2})).verdict == "finding"
    assert check("masked_ranks", make_run(rows, environment={"world_size": 8})).verdict == "healthy"
    assert check("masked_ranks", make_run({MASKED: [1.0] * 40}, environment={"world_size": 64})).verdict == "finding"
    # What is over does not hide what is now.
    late = {MASKED: [0.0] * 20 + [1.0] * 21}
    assert check("masked_ranks", make_run(late, environment={"world_size": 2})).verdict == "finding"


def test_repeated_restarts_from_one_step_are_found_though_they_repeat_few_steps() -> None:
    run = make_run({"loss": [1.0] * 1000}, restarts=[Restart(50)] * 3, steps_redone=[1, 1, 1])
    assert check("restarts", run).verdict == "finding"
    assert (
        check("restarts", make_run({"loss": [1.0] * 1000}, restarts=[Restart(50)], steps_redone=[1])).verdict
        == "healthy"
    )


LIVE = [
    4571,
    1232,
    17736,
    39624,
    47541,
    61104,
    6406,
    1708,
    1991,
    64872,
    41493,
    42488,
    34731,
    42549,
    41901,
    35297,
    48217,
    61953,
]
LIVE += [62799, 62239, 63529, 69276, 69518, 71434, 987, 5742, 9391, 6029, 9479, 8428, 9124]


def test_a_drop_of_throughput_is_dated_to_the_row_and_shown_from_there_on() -> None:
    """The run's blocks of four rows lie across the drop, and three rows long before it were slow too."""
    steps = [1, *range(5, 151, 5)]
    outcome = check("throughput_regression", make_run({"tokens_per_sec": dict(zip(steps, LIVE, strict=True))}))
    assert outcome.sentence == "throughput dropped by 81%: 45,045 tokens/s before step 120, 8,428 from there on"
    assert outcome.evidence[0].steps[:4] == (115, 120, 125, 130)
    assert str(outcome.knob) == (
        "data.prefetch = 4 (now 2), if steps wait longer for data than before; otherwise look at the machine"
    )


@pytest.mark.parametrize("drop", range(20, 90, 7))
def test_the_row_of_a_drop_is_found_wherever_the_blocks_lie(drop: int) -> None:
    speed = [*SPEED[:drop], *(0.6 * value for value in SPEED[drop:])]
    speed[15] = 300.0
    speed[95] = 1000.0
    sentence = check("throughput_regression", make_run({"tokens_per_sec": speed})).sentence
    assert f"before step {drop + 1}," in sentence


def test_fewer_tokens_per_step_are_not_a_throughput_regression() -> None:
    slower = [*SPEED[:60], *(0.5 * value for value in SPEED[60:])]
    times = {"step_time_sec": [1.0] * 100}
    assert check("throughput_regression", make_run({"tokens_per_sec": slower, **times})).verdict == "explained"
    longer = {"step_time_sec": [2.0] * 60 + [4.0] * 40}
    assert check("throughput_regression", make_run({"tokens_per_sec": slower, **longer})).verdict == "finding"


def test_a_machine_that_is_busy_for_some_seconds_is_not_called_slow_yet() -> None:
    speed = [*SPEED[:60], *(0.5 * value for value in SPEED[60:])]
    for row_sec, verdict in ((0.1, "not_measured"), (2.0, "finding")):
        times = {"step_time_sec": [row_sec] * 60 + [2 * row_sec] * 40}
        slow = check("throughput_regression", make_run({"tokens_per_sec": speed, **times}))
        ranks = {"time/slowest_rank_sec": [0.9 * row_sec] * 100, "time/fastest_rank_sec": [0.4 * row_sec] * 100}
        late = check("straggling_rank", make_run({**ranks, **times}, environment={"world_size": 2}))
        waits = check("data_bound", make_run({"time/data_sec": [0.5 * row_sec] * 100, **times}))
        assert [slow.verdict, late.verdict, waits.verdict] == [verdict] * 3
    every_tenth = {10 * row: value for row, value in enumerate(speed, start=1)}
    times = {10 * row: 0.2 if row <= 60 else 0.4 for row in range(1, 101)}
    rows = {"tokens_per_sec": every_tenth, "step_time_sec": times}
    assert check("throughput_regression", make_run(rows)).verdict == "finding", "steps without a row count too"


def test_a_single_rank_has_no_straggler() -> None:
    times = {"time/slowest_rank_sec": [0.9] * 80, "time/fastest_rank_sec": [0.5] * 80, "step_time_sec": [1.0] * 80}
    assert check("straggling_rank", make_run(times)).verdict == "not_measured"


def test_a_gain_that_the_probes_are_too_few_to_see_is_not_called_nothing() -> None:
    """0.001 +- 0.01 nats: it may as well be 0.03, which would be worth the ledger."""
    assert check("carry_worthless", make_run(probes(gain=0.001, gap=0.0, error=0.01))).verdict == "healthy"
    assert check("carry_worthless", make_run(probes(gain=0.003, gap=0.0, error=0.0005))).verdict == "healthy"
    ignored = check("carry_worthless", make_run(probes(gain=0.0, gap=0.0, error=0.0)))
    assert ignored.verdict == "finding"
    assert ignored.severity is None  # advice


def test_a_state_that_is_worse_than_none_is_a_warning() -> None:
    outcome = check("carry_worthless", make_run(probes(gain=-0.1, gap=0.1)))
    assert (outcome.verdict, outcome.severity) == ("finding", "warning")
    assert "do better from a state of zero" in outcome.sentence
    assert outcome.knob is not None
    assert outcome.knob.key == "optimizer.lr"


def test_a_model_that_learnt_to_carry_late_is_judged_by_the_second_half() -> None:
    early, after = probes(gain=0.0, gap=-0.3, error=0.001), probes(gain=1.0, gap=0.0, error=0.001)
    rows = {
        key: {step: (early if step <= 50 else after)[key][step] for step in column} for key, column in early.items()
    }
    assert check("carry_worthless", make_run(rows)).verdict == "healthy"
    assert check("stale_states", make_run(rows)).verdict == "healthy"


@pytest.mark.parametrize("gap", [-0.2, 0.2])
def test_a_stale_gap_of_either_sign_is_found_and_says_what_it_does(gap: float) -> None:
    outcome = check("stale_states", make_run(probes(gain=0.5, gap=gap)))
    assert outcome.verdict == "finding"
    assert ("training looks better" in outcome.sentence) == (gap < 0)
    assert ("below" in outcome.sentence) == (gap < 0)
    assert "12 steps old, 40% off" in outcome.sentence
    assert outcome.knob is not None
    assert (outcome.knob.key, outcome.knob.suggested) == ("data.mixing.num_streams_mixed", 2)


@pytest.mark.parametrize(
    ("gain", "gap", "error"),
    [
        (0.5, -0.049, 0.0001),  # a tenth of the gain
        (0.0, -0.0009, 0.00001),  # too small to matter, whatever carrying is worth
        (0.01, -0.1, 0.2),  # within the error
    ],
)
def test_a_gap_that_is_small_or_not_certain_is_no_finding(gain: float, gap: float, error: float) -> None:
    assert check("stale_states", make_run(probes(gain=gain, gap=gap, error=error))).verdict == "healthy"


def test_one_stream_in_flight_cannot_be_halved() -> None:
    config = {**CONFIG, "data": {"mixing": {**MIXING, "num_streams_mixed": 1}}}
    knob = check("stale_states", make_run(probes(gain=0.5, gap=-0.2), config=config)).knob
    assert knob is not None
    assert knob.key == "optimizer.lr"


def test_probes_whose_streams_differ_are_judged_by_their_scatter() -> None:
    """Each probe is sure of its gap, but they contradict each other: the mean is not known to 10 %."""
    rows = probes(gain=0.5, gap=0.0, error=0.001)
    rows["ledger/stale_gap"] = {step: -0.4 + (0.6 if step % 10 else -0.6) for step in rows["ledger/stale_gap"]}
    assert check("stale_states", make_run(rows)).verdict == "healthy"


@pytest.mark.parametrize("rule", ["carry_worthless", "stale_states"])
def test_few_probes_and_probes_that_are_not_finite_are_not_judged(rule: str) -> None:
    assert check(rule, make_run(probes(gain=0.0, gap=-1.0, error=0.001, count=7))).verdict == "finding"
    assert check(rule, make_run(probes(gain=0.0, gap=-1.0, error=0.001, count=6))).verdict == "not_measured"
    rows = probes(gain=0.0, gap=-1.0, error=0.001, count=7)
    for key in ("ledger/carry_gain", "ledger/stale_gap"):
        rows[key][35] = math.nan
    assert check(rule, make_run(rows)).verdict == "not_measured"


def test_a_model_that_could_not_be_tried_is_not_called_healthy() -> None:
    event = {"event": "contract", "global_step": 0, "trusted": [], "not_tried": "too large"}
    config = {"model": {"target": "mine:build"}}
    assert (
        "too large"
        in (outcome := check("model_contract", make_run({"loss": [1.0]}, events=[event], config=config))).sentence
    )
    assert outcome.verdict == "not_measured"
    assert check("model_contract", make_run({"loss": [1.0]}, config=config)).verdict == "not_measured"
    assert check("model_contract", make_run({"loss": [1.0]})).verdict == "healthy"  # the built-in model


def contract_run(*verdicts: tuple[str, str, str], trust: tuple[str, ...] = (), pack: bool = False) -> RunRecord:
    """A run of one start with these verdicts: (check, status, text)."""
    found = [dict(zip(("check", "status", "text"), verdict, strict=True)) for verdict in verdicts]
    event = {"event": "contract", "global_step": 0, "trusted": list(trust), "verdicts": found}
    config = {"model": {"target": "mine:build", "trust": list(trust)}, "data": {"pack": pack}}
    return make_run({"loss": [1.0]}, events=[event], config=config)


def test_a_breach_that_nothing_trusts_suggests_no_setting() -> None:
    broken = ("gradient", "broken", "half of it arrives")
    outcome = check("model_contract", contract_run(broken))
    assert (outcome.verdict, outcome.knob) == ("finding", None)
    assert outcome.sentence == "the model breaks gradient: half of it arrives; fix the model (docs/contracts.md)"
    assert check("model_contract", contract_run(broken, trust=("carry",))).knob is None
    knob = check("model_contract", contract_run(broken, ("carry", "broken", "x"), trust=("carry",))).knob
    assert str(knob) == "model.trust = [] (now ['carry']), with a model that keeps it"


def test_broken_resets_matter_with_packed_rows_alone() -> None:
    held, broken = ("causality", "held", ""), ("resets", "broken", "the reset does nothing")
    outcome = check("model_contract", contract_run(held, broken))
    assert outcome.verdict == "healthy"
    assert "it breaks resets (the reset does nothing) has no effect with data.pack = false" in outcome.sentence
    assert check("model_contract", contract_run(held, broken, pack=True)).verdict == "finding"
    both = check("model_contract", contract_run(broken, ("gradient", "broken", "none arrives")))
    assert (both.verdict, "resets" in both.sentence) == ("finding", False)


def test_a_model_of_which_nothing_could_be_judged_is_not_called_healthy() -> None:
    verdicts = ("forward", "held", ""), ("causality", "not testable here", "the logits are not finite")
    outcome = check("model_contract", contract_run(*verdicts))
    assert outcome.verdict == "not_measured"
    assert outcome.sentence == "the model was not checked: the logits are not finite"


def test_a_gap_of_states_that_were_lost_is_explained() -> None:
    rows = probes(gain=0.5, gap=-0.2)
    assert check("stale_states", make_run({**rows, "ledger/cold_starts": {5: 3.0, 80: 0.0}})).verdict == "finding"
    assert check("stale_states", make_run({**rows, "ledger/cold_starts": {5: 0.0, 80: 3.0}})).verdict == "explained"


def test_a_layer_that_no_gradient_reaches_is_named_with_the_group_that_slows_it() -> None:
    rows = layer_rows("update_ratio", {**RATIOS, "norm": 1e-3, "blocks.0": 0.0, "blocks.1": 1e-9})
    norms = layer_rows("grad_norm", {**RATIOS, "blocks.0": 0.0})
    groups = [{"match": "head.*", "lr_scale": 2.0}, {"match": "blocks.0.*", "lr_scale": 1e-6}]
    outcome = check("still_layer", make_run({**rows, **norms}, config={**CONFIG, "optimizer": {"group": groups}}))
    assert outcome.sentence.startswith("blocks.0 (0 of the median), blocks.1 (")
    assert outcome.sentence.endswith("; no gradient reaches blocks.0")
    assert outcome.knob is not None
    assert (outcome.knob.key, outcome.knob.current) == ("optimizer.group.lr_scale", 1e-6)


def test_layers_that_all_stand_still_are_not_judged() -> None:
    """A learning rate of 0."""
    assert (
        check("still_layer", make_run(layer_rows("update_ratio", dict.fromkeys(RATIOS, 0.0)))).verdict == "not_measured"
    )


def test_layers_are_judged_by_the_second_half_and_not_by_few_rows() -> None:
    early = {"layer/head/update_ratio": [1e-9] * 9 + [1e-3] * 11}
    rows = layer_rows("update_ratio", RATIOS)
    assert check("still_layer", make_run({**rows, **early})).verdict == "healthy"
    few = layer_rows("update_ratio", {**RATIOS, "head": 0.0}, count=5)
    assert check("still_layer", make_run(few)).verdict == "not_measured"
    assert check("still_layer", make_run(layer_rows("update_ratio", {"a": 1.0, "b": 0.0}))).verdict == "not_measured"


def test_a_layer_that_takes_all_is_said_to_shrink_the_others_where_clipping_is_on() -> None:
    clipped = make_run(norm_rows(0.001, 0.001), config={**CONFIG, "train": {"clip_grad_norm": 1.0}})
    assert "clipping to 1 shrinks all others" in check("dominant_layer", clipped).sentence
    free = make_run(norm_rows(0.001, 0.001), config={**CONFIG, "train": {"clip_grad_norm": 0.0}})
    assert "clipping" not in check("dominant_layer", free).sentence


def test_a_share_is_of_the_squared_norm() -> None:
    """Others with 1.2 % of the norm, which is 0.0145 % of its square, and with 0.9 %."""
    assert check("dominant_layer", make_run(norm_rows(0.015))).verdict == "not_measured"  # two layers
    assert check("dominant_layer", make_run(norm_rows(0.009, 0.008))).verdict == "healthy"
    assert check("dominant_layer", make_run(norm_rows(0.007, 0.006))).verdict == "finding"


def test_a_batch_that_grew_counts_with_what_it_was_at_each_step() -> None:
    config = {**CONFIG, "train": {"micro_batches": {"schedule": "auto", "start": 1}}}
    run = make_run({"train/micro_batches": {1: 1.0, 10: 1.0, 20: 2.0, 30: 4.0}}, config=config)
    assert [batches_through(run, step) for step in (1, 10, 15, 20, 30, 40)] == [1, 10, 20, 30, 70, 110]
    assert [micro_batches(run, since=step) for step in (0, 11, 30)] == [1, 2, 4]
    assert batches_through(make_run({"loss": [1.0]}), 7) == 14


def test_advice_on_a_batch_with_a_schedule_names_the_schedule() -> None:
    config = {**CONFIG, "train": {"micro_batches": {"schedule": "step", "points": {"0": 1, "20": 4}}}}
    columns = {**GNS, "gns/b_big": [1.0] * 40, "train/micro_batches": [1.0] * 20 + [4.0] * 20}
    knob = check("batch_size", make_run(columns, config=config)).knob
    assert knob is not None
    assert (knob.key, knob.current) == ("train.micro_batches", 4)
    assert str(knob.suggested).startswith("a schedule that reaches ")


@pytest.mark.parametrize(
    ("judged", "verdict"), [(0, "no_findings"), (1, "no_findings"), (2, "healthy"), (3, "healthy")]
)
def test_a_run_is_healthy_if_at_least_half_of_the_rules_judged_it(judged: int, verdict: str) -> None:
    rules = [BY_NAME[name] for name in ("non_finite", "refused_rows", "cold_starts", "shares")]
    columns = {rule.needs[0]: [0.0] * 5 for rule in rules[:judged]} or {"lr": [0.1]}
    found = diagnose(make_run(columns), rules)
    assert (found.verdict, found.num_judged) == (verdict, judged)
    assert found.coverage == f"{judged} of 4 rules judged the run, {4 - judged} had nothing to measure"


def test_a_batch_of_a_loop_that_does_not_log_its_micro_batches_is_suggested_in_sequences() -> None:
    small = {**GNS, "gns/b_big": [1.0] * 40}
    assert diagnose(make_run(small, config={}), [BY_NAME["batch_size"]]).advice[0].fix == (
        "for the number of micro-batches per step, try as many as give 10 sequences per step"
    )
    logged = {**small, "train/micro_batches": [3.0] * 40}
    assert diagnose(make_run(logged, config={}), [BY_NAME["batch_size"]]).advice[0].fix.endswith("try 30 (now 3)")
    large = {**GNS, "gns/b_big": [100.0] * 40}
    assert "20 sequences" in diagnose(make_run(large, config={}), [BY_NAME["batch_size"]]).advice[0].fix
