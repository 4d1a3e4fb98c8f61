"""Every rule on healthy, faulty and absent rows; the numbers are written by hand."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.support.records import record_of
from trainer.metrics.payload_contract import Restart
from trainer.tools.diagnostics.diagnose import RULES, Ruling, diagnose
from trainer.tools.diagnostics.rule import Outcome, batches_through, micro_batches
from trainer.tools.diagnostics.state import FALSE_EVICTIONS
from trainer.tools.runs.load import RunRecord

BY_NAME = {rule.name: rule for rule in RULES}
POOL = "stream_mixing/active/"
ENDED = "stream_mixing/refill/exhaust_events"
ABSENCE = "stream_mixing/refill/absence"
FILL = "data/fill"
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
    settings = {"config": CONFIG, "environment": {"world_size": 1}, **changes}
    return record_of(columns, **settings)


def mixed(**changes: Any) -> dict[str, Any]:
    """The config with other keys of `[data.mixing]`."""
    return {**CONFIG, "data": {**CONFIG["data"], "mixing": {**MIXING, **changes}}}


def full_rows(model: Mapping[str, Any] = {}, **data: Any) -> dict[str, Any]:
    """The config of full rows, with these keys of `[data]`."""
    mixing = {**MIXING, "batching_mode": "per_row"}
    return {**CONFIG, "model": {**model}, "data": {"align": "auto", "seq_len": 64, "mixing": mixing, **data}}


def check(name: str, run: RunRecord) -> Outcome:
    return BY_NAME[name].apply(run)


def pool_rows(count: int = 60, **changes: Any) -> dict[str, Any]:
    """A pool of four readers with 50 picks each, drained at the same rate."""
    left = [50 - 0.5 * i for i in range(count)]
    return {
        f"{POOL}remaining_min": left,
        f"{POOL}remaining_max": [min(value + 2, 50) for value in left],
        f"{POOL}remaining_fraction_min": [value / 50 for value in left],
        f"{POOL}pick_surprise_max": [3.0] * count,
        f"{POOL}picks": [2.0] * count,
        f"{POOL}modalities/a": [2.0] * count,
        f"{POOL}modalities/b": [2.0] * count,
        f"{ABSENCE}/a": [0.0] * count,
        f"{ABSENCE}/b": [0.7] * count,
        ENDED: [0.0] * count,
        **changes,
    }


def noisy(level: float, count: int, relative: float = 0.02) -> list[float]:
    """A level with deterministic noise."""
    return [level * (1 + relative * math.sin(12.9898 * i * i)) for i in range(count)]


def contract_event(status: str, *, step: int = 0, check: str = "carry") -> dict[str, Any]:
    verdict = {"check": check, "status": status, "text": "cells after the first start from zero"}
    return {"event": "contract", "global_step": step, "verdicts": [verdict]}


FALSE = {mode: f"ledger/false_evictions/{mode}" for mode in ("lru", "stale")}
GNS = {
    f"gns/b_now{end}": [value] * 40 for end, value in {"": 20.0, "_low": 16.0, "_high": 24.0, "_steps": 30.0}.items()
}


def same_data(consistency: float | None, error: float = 0.0005, *, noise: float = 0.4, micro_batches: int = 3) -> Any:
    """Two ranks; noise between them relative to that within."""
    values = {"tr_sigma": noise, "grad_sq": 0.05, "b_small": 4.0, "b_big": 8.0 * micro_batches}
    if consistency is not None:
        values |= {"consistency": consistency, "consistency_se": error}
    return {f"gns/{key}": [value] * 40 for key, value in values.items()}


def depths(*gains: float, error: float = 0.001, count: int = 3, name: str = "") -> dict[str, dict[int, float]]:
    """Gains of carrying from 64, 128, ... tokens on, in so many evaluations."""
    front, steps = f"eval/{name}depth", range(10, 10 * count + 1, 10)
    values = {f"{front}/beyond_cell/carry_gain": gains[0]}
    for index, gain in enumerate(gains):
        key = f"{front}/{64 << index}"
        values |= {f"{key}/loss": 2.0, f"{key}/loss_from_zero": 2.0 + gain, f"{key}/carry_gain": gain}
    values |= {f"{key}_se": error for key in list(values)}
    return {key: dict.fromkeys(steps, value) for key, value in values.items()}


BUSY = {"time/slowest_rank_sec": [0.9] * 80, "time/fastest_rank_sec": [0.5] * 80, "step_time_sec": [1.0] * 80}
BATCH = {**GNS, "gns/b_big": [100.0] * 40}
STALE, LONGER = {"stale_threshold": 5, "wipe_mode": "periodic_stale"}, "longer streams: merge files"

HEALTHY: dict[str, RunRecord] = {
    "false_evictions_lru": make_run({FALSE["lru"]: [0.0] * 9}),
    "false_evictions_stale": make_run({FALSE["stale"]: [0.0] * 9}),
    "cold_starts": make_run({"ledger/cold_starts": [0.0] * 9}),
    "refused_rows": make_run({"ledger/refused_rows": [0.0] * 9}),
    "context_unused": make_run(depths(0.02, 0.05, 0.06)),
    "loss_rises_with_depth": make_run(depths(0.02, 0.05, 0.04)),
    "model_contract": make_run({"loss": [1.0]}, events=[contract_event("held")]),
    "stuck_reader": make_run(pool_rows(**{f"{POOL}pick_surprise_max": [11.5] * 60})),
    "uneven_slices": make_run(pool_rows()),
    # Of 64 streams that were opened, and two modalities: ln(66 / 0.001) = 11.097.
    "starved_modality": make_run(pool_rows(**{ENDED: [1.0] * 60, f"{ABSENCE}/b": [0.7] * 59 + [11.0]})),
    "exhaust_churn": make_run(pool_rows(**{ENDED: [0.04] * 60})),
    "low_fill": make_run({FILL: [0.85, 0.99] * 20}),
    "shares": make_run({"blend/max_share_error": {10: 0.2, 1000: 0.1}, "blend/longest_share": {10: 0.2, 1000: 0.04}}),
    "repeated_data": make_run(same_data(1.0), environment={"world_size": 2}),
    "batch_size": make_run({**GNS, "gns/b_big": [16.0] * 40}),
    "non_finite": make_run({"loss": [2.0] * 9, "grad_norm": [1.0] * 9, "non_finite_steps": [0.0] * 9}),
    "loss_spikes": make_run({"loss": noisy(2.0, 60)}),
    "data_bound": make_run({"time/data_sec": [0.01] * 40, "step_time_sec": [1.0] * 40}),
    "straggling_rank": make_run({**BUSY, "time/slowest_rank_sec": [0.6] * 80}, environment={"world_size": 2}),
    "restarts": make_run({"loss": [1.0] * 100}, restarts=[Restart(50)], steps_redone=2),
    "ending": make_run({"loss": [1.0]}, status={"state": "done"}),
}
FAULTY: dict[str, RunRecord] = {
    "false_evictions_lru": make_run({FALSE["lru"]: [0.0, 0.0, 1.0]}),
    "false_evictions_stale": make_run({FALSE["stale"]: [0.0, 0.0, 1.0]}, config={"ledger": STALE}),
    "cold_starts": make_run({"ledger/cold_starts": [0.0, 2.0], FALSE["lru"]: [0.0, 1.0]}),
    "refused_rows": make_run({"ledger/refused_rows": [0.0, 1.0]}),
    "context_unused": make_run(depths(0.0, 0.001, 0.002)),
    "loss_rises_with_depth": make_run(depths(0.02, 0.05, 0.01)),
    "model_contract": make_run({"loss": [1.0]}, events=[contract_event("broken"), contract_event("held", step=40)]),
    "stuck_reader": make_run(pool_rows(**{f"{POOL}pick_surprise_max": [3.0] * 59 + [11.9]})),
    "uneven_slices": make_run(pool_rows(**{f"{POOL}remaining_max": [2000.0] * 60})),
    "starved_modality": make_run(pool_rows(**{ENDED: [1.0] * 60, f"{ABSENCE}/b": [0.7] * 59 + [11.2]})),
    "exhaust_churn": make_run(pool_rows(**{ENDED: [0.6] * 60})),
    "low_fill": make_run({FILL: [0.6] * 40}),
    "shares": make_run({"blend/max_share_error": {10: 0.2, 1000: 0.1}}),
    "repeated_data": make_run(same_data(-4e-17), environment={"world_size": 2}),
    "batch_size": make_run(BATCH),
    "non_finite": make_run({"loss": [2.0, math.nan, 2.0]}),
    "loss_spikes": make_run({"loss": [*noisy(2.0, 40), 3.0, *noisy(2.0, 10)]}),
    "data_bound": make_run({"time/data_sec": [0.2] * 80, "step_time_sec": [1.0] * 80}),
    "straggling_rank": make_run(BUSY, environment={"world_size": 2}, config=mixed(batching_mode="device_per_stream")),
    "restarts": make_run({"loss": [1.0] * 100}, restarts=[Restart(50)], steps_redone=6),
    "ending": make_run({"loss": [1.0]}, status={"state": "failed", "reason": "a reason", "last_step": 1}),
}


def test_every_rule_has_a_healthy_and_a_faulty_case() -> None:
    assert list(HEALTHY) == list(FAULTY) == list(BY_NAME)
    assert {f"false_evictions_{mode}" for mode in FALSE_EVICTIONS} <= set(BY_NAME)


@pytest.mark.parametrize("name", BY_NAME)
def test_healthy_rows_are_healthy_and_a_fault_is_reported_with_evidence_and_a_knob(name: str) -> None:
    outcome = check(name, HEALTHY[name])
    assert (outcome.verdict, list(outcome.evidence)) == ("healthy", []), outcome.sentence
    outcome = check(name, FAULTY[name])
    assert outcome.verdict == "finding", outcome.sentence
    assert any(evidence.steps for evidence in outcome.evidence)
    assert name in ("cold_starts", "ending", "straggling_rank", "model_contract") or outcome.knob is not None
    assert not outcome.knob or outcome.knob.in_words or tomllib.loads(str(outcome.knob).partition(" (now ")[0])
    without = check(name, replace(FAULTY[name], config={}, environment={}))
    assert without.verdict == "finding", without.sentence


def of_ranks(columns: Mapping[str, Any], world_size: int | None) -> RunRecord:
    return make_run(columns, environment={"world_size": world_size})


def changed(name: str, **config: Any) -> RunRecord:
    """The faulty run of a rule with other tables of the config."""
    return replace(FAULTY[name], config={**CONFIG, **config})


def losses(*values: float) -> RunRecord:
    return make_run({"loss": list(values)})


def falling(count: int, at: int, rise: float) -> RunRecord:
    """A steeply falling loss with a rise in one row."""
    return losses(*(6.0 / (1 + i / 10) + 0.01 * math.sin(i * i) + rise * (i == at) for i in range(count)))


def contract_run(check: str) -> RunRecord:
    """A run of full rows whose own model breaks this check."""
    config = full_rows({"target": "mine:build"})
    return make_run({"loss": [1.0]}, events=[contract_event("broken", check=check)], config=config)


def wide(share_error: float, **changes: Any) -> RunRecord:
    """One slice with 2,000 picks left and one with 50; an error of the shares shows several pools."""
    columns = pool_rows(**{f"{POOL}remaining_max": [2000.0] * 60, "blend/max_share_error": [share_error] * 60})
    return make_run(columns, **changes)


PLATEAU, AFTER_IT = [*noisy(6.0, 20, 0.001), *noisy(2.0, 40, 0.001)], noisy(2.0, 9, 0.001)
LOST = {"ledger/cold_starts": [0.0, 3.0]}
SKIPPED = {"ledger/refused_rows": [3.0, 0.0], "non_finite_steps": [1.0, 0.0]}
REJECTED = {"loss": [2.0] * 100, "non_finite_steps": [1.0] * 5 + [0.0] * 95}
UNKNOWN = {"gns/b_big": [1.0] * 40, "gns/b_now": {30: 500.0}, "gns/b_now_low": {30: 400.0}}
MORE_PICKS = pool_rows(**{f"{POOL}pick_surprise_max": [11.9] * 60, f"{POOL}picks": [4.0] * 60})
LOW = {"gns/b_now_low": [16.0] * 40, "gns/b_now_steps": [30.0] * 40}

VERDICTS: Mapping[str, Mapping[str, RunRecord]] = {
    "explained": {
        "cold_starts: lost by evictions": make_run({**LOST, FALSE["lru"]: [0.0, 1.0], FALSE["stale"]: [0.0, 2.0]}),
        "cold_starts: cells lost with states that were not finite": make_run({**LOST, **SKIPPED}),
        "batch_size: a batch with no noise scale": of_ranks({**GNS, **same_data(0.0)}, 2),
    },
    "finding": {
        # Documents are picked, of however many tokens.
        "stuck_reader: full rows": replace(FAULTY["stuck_reader"], config=full_rows()),
        # Two ranks and the noise between them; without it, they may be equal or not.
        "repeated_data: equal ranks": of_ranks(same_data(0.0), 2),
        "repeated_data: dependent full rows": replace(of_ranks(same_data(1.5, error=0.1), 2), config=full_rows()),
        "repeated_data: no noise": of_ranks(same_data(None, micro_batches=1, noise=1e-09), 2),
        "batch_size: below a lower bound": make_run({**LOW, "gns/b_big": [1.0] * 40}),
        "non_finite: rejected steps": make_run(REJECTED),
        "non_finite: an evaluation": record_of({"loss": [2.0] * 9}, {8: {"eval_loss": math.nan}}, config=CONFIG),
        "non_finite: of a key of training": record_of({"loss": [2.0], "a/loss": [1.0]}, {8: {"a/loss": math.nan}}),
        "loss_spikes: a rise by half the improvement": losses(*PLATEAU, 4.0, *AFTER_IT),
        "loss_spikes: a spike in a steep fall": falling(40, 32, 2.0),
        "loss_spikes: worse than untrained": falling(30, 22, 6.0),
        "restarts: a crash loop": make_run({"loss": [1.0] * 1000}, restarts=[Restart(50)] * 3, steps_redone=3),
        # In rows of several documents.
        "model_contract: broken resets": contract_run("resets"),
    },
    "healthy": {
        "stuck_reader: more picks": make_run(MORE_PICKS),
        "repeated_data: one micro-batch each": of_ranks(same_data(None, micro_batches=1), 2),
        "loss_spikes: a rise far below the improvement": losses(*PLATEAU, 2.5, *AFTER_IT),
        "repeated_data: slices of one stream": of_ranks(same_data(0.3), 2),
        "repeated_data: full rows in the error": replace(of_ranks(same_data(1.5, error=0.2), 2), config=full_rows()),
        "repeated_data: noise between ranks that is not known": of_ranks(same_data(0.0, error=0.05), 2),
        "repeated_data: one rank": of_ranks(same_data(None), 1),
        "batch_size: a wide interval": make_run({**BATCH, "gns/b_now_high": [38.0] * 40}),
        "loss_spikes: a blend": losses(*((2.6 if i % 7 == 0 else 1.4) + 0.02 * math.sin(i * i) for i in range(200))),
        # In a short run the first batch of a rare source is no worse than the untrained model was, while a spike may be.
        "loss_spikes: a rare source": falling(30, 22, 3.0),
    },
    "not_measured": {
        "uneven_slices: full rows": replace(FAULTY["uneven_slices"], config=full_rows()),
        "exhaust_churn: full rows": replace(FAULTY["exhaust_churn"], config=full_rows()),
        "low_fill: data of the user's own": changed("low_fill", data={"source": [{"target": "mine:data"}, {}]}),
        "repeated_data: ranks without a measure": of_ranks(same_data(None), 2),
        "repeated_data: a measure of before": of_ranks({**same_data(0.0), "gns/consistency": [0.0] * 9}, 2),
        "repeated_data: no gradient": of_ranks({**same_data(None, noise=0.0), "gns/grad_sq": [0.0] * 40}, 1),
        "batch_size: few documents": make_run({**BATCH, "data/documents": [60.0] * 40}),
        "batch_size: a noise scale of few steps": make_run({**BATCH, "gns/b_now_steps": [12.0] * 40}),
        "batch_size: near a lower bound": make_run({**LOW, "gns/b_big": [2.0] * 40}),
        "batch_size: unknown in the last row": make_run(UNKNOWN),
        "uneven_slices: uneven slices of several pools": wide(0.01),
        "model_contract: no record of a check": make_run({"loss": [1.0]}, config={"model": {"target": "mine:build"}}),
    },
}


@pytest.mark.parametrize(("verdict", "case"), [(verdict, case) for verdict, runs in VERDICTS.items() for case in runs])
def test_the_verdict_at_the_edges_of_a_rule(verdict: str, case: str) -> None:
    outcome = check(case.partition(":")[0], VERDICTS[verdict][case])
    assert outcome.verdict == verdict, outcome.sentence


def knob_of(name: str, run: RunRecord) -> tuple[str, Any, Any] | None:
    knob = check(name, run).knob
    return None if knob is None else (knob.key, knob.current, knob.suggested)


ONE_SEQUENCE, MANY_ROWS = ({**mixed(batch_size=rows), "train": {"micro_batches": 1}} for rows in (1, 512))
LARGE, RAISED = {**BATCH, "gns/b_big": [6000.0] * 40}, {"changed": {"ledger.capacity": {"before": 32, "after": 64}}}
OWN_MODEL = full_rows({"target": "mine:build"})
PADDED_BY_MODEL = replace(FAULTY["low_fill"], config=OWN_MODEL, environment={"align": "document"})
PADDED = full_rows({"target": "mine:build"}, align="document")
MORE_DOCUMENTS = "more and shorter documents (train check: what limits lanes)"
UNPADDED = "stream, with a model that takes resets; or a shorter data.seq_len"


def own_mixing(**own: Any) -> dict[str, Any]:
    """A source with keys of its own."""
    return {**CONFIG, "data": {**CONFIG["data"], "source": [{"name": "a", "mixing": own}]}}


OWN_PICKS = replace(FAULTY["stuck_reader"], config=own_mixing(pick_mode="uniform"))
KNOBS_OF: list[tuple[str, RunRecord, tuple[str, Any, Any] | None]] = [
    ("cold_starts", make_run({**SKIPPED, "ledger/cold_starts": [0.0, 4.0]}), None),  # no capacity would have kept these
    ("cold_starts", make_run({**LOST, "ledger/evictions/lru": [9.0, 0.0]}), None),
    ("cold_starts", make_run({**LOST, "ledger_wipe_count": [0.0, 1.0]}), None),  # a resume has set "lru"
    ("cold_starts", make_run({**LOST, "ledger_wipe_count": [0.0, 1.0]}, config={}), ("ledger.wipe_mode", None, "lru")),
    ("false_evictions_lru", make_run({FALSE["lru"]: [3.0, 0.0]}, restarts=[Restart(1, RAISED)]), None),
    ("false_evictions_stale", FAULTY["false_evictions_stale"], ("ledger.stale_threshold", 5, 10)),
    ("false_evictions_stale", changed("false_evictions_stale"), None),  # a resume has set "lru"
    ("stuck_reader", FAULTY["stuck_reader"], ("data.mixing.pick_mode", "weighted", "round_robin")),
    ("starved_modality", FAULTY["starved_modality"], ("data.source", None, "a source of its own for the modality")),
    ("stuck_reader", OWN_PICKS, ("data.source.a.mixing.pick_mode", "uniform", "round_robin")),
    ("low_fill", FAULTY["low_fill"], ("data.mixing.batching_mode", "per_stream", "per_row")),
    ("low_fill", replace(FAULTY["low_fill"], config=full_rows()), ("data.mixing.batch_size", 8, 4)),
    ("low_fill", replace(FAULTY["low_fill"], config=PADDED), ("data.align", "document", UNPADDED)),
    ("low_fill", PADDED_BY_MODEL, ("data.align", "auto", UNPADDED)),
    ("restarts", changed("restarts", checkpoint={"every": 0}), ("checkpoint.every", 0, 5)),
    ("restarts", changed("restarts", checkpoint={"every": 8}), ("checkpoint.every", 8, 5)),
    ("restarts", changed("restarts", checkpoint={"every": 4}), None),  # it went back further than one
    # Every start fails at one step, however many checkpoints there are.
    ("restarts", VERDICTS["finding"]["restarts: a crash loop"], None),
    ("repeated_data", of_ranks(same_data(0.0), 1), ("data.source", None, "data of its own for every micro-batch")),
    ("repeated_data", VERDICTS["finding"]["repeated_data: dependent full rows"], ("data.source", None, MORE_DOCUMENTS)),
    ("batch_size", make_run(BATCH, config=ONE_SEQUENCE), None),
    ("batch_size", make_run(LARGE, config=MANY_ROWS), ("data.mixing.batch_size", 512, 51)),
    ("non_finite", changed("non_finite", optimizer={"lr": 0.1}), ("optimizer.lr", 0.1, 0.05)),
    ("non_finite", losses(math.nan, 2.0), None),  # with the first weights
    ("refused_rows", make_run({"ledger/refused_rows": [1.0, 1.0]}), None),
    ("exhaust_churn", FAULTY["exhaust_churn"], ("data.mixing.batch_size", 8, 2)),
    ("exhaust_churn", replace(FAULTY["exhaust_churn"], config=own_mixing(batch_size=4)), ("data.source", None, LONGER)),
    ("batch_size", make_run(LARGE, config={**own_mixing(batch_size=4), "train": {"micro_batches": 1}}), None),
    ("shares", make_run({"blend/max_share_error": [0.4] * 9, "blend/longest_share": [0.0] * 9}), None),
]


@pytest.mark.parametrize(("name", "run", "knob"), KNOBS_OF)
def test_a_finding_suggests_what_would_help_and_nothing_otherwise(name, run, knob) -> None:
    assert check(name, run).verdict in ("finding", "healthy")
    assert knob_of(name, run) == knob


@pytest.mark.parametrize(("value", "error"), [(3.58, 0.31), (3.58, 0.6), (1.4, 0.01)])
def test_a_loop_that_measures_other_gradients_than_it_makes_is_warned(value: float, error: float) -> None:
    rows = {**GNS, **same_data(value, error)}
    own = check("repeated_data", make_run(rows, config={}, environment={}))
    assert (own.verdict, own.severity) == (("finding", "warning") if value - 3 * error > 2 else ("healthy", None))
    assert check("repeated_data", of_ranks(rows, 2)).verdict == "healthy"


@pytest.mark.parametrize(
    ("name", "run", "severity"),
    [
        ("uneven_slices", wide(0.0), "advice"),
        ("low_fill", FAULTY["low_fill"], "advice"),
        ("low_fill", replace(FAULTY["low_fill"], config=full_rows()), None),
        ("uneven_slices", wide(0.0, config=mixed(batch_size_by_modality={"a": 1})), None),
        ("uneven_slices", wide(0.0, config=own_mixing(batch_size=1)), "advice"),
    ],
)
def test_a_finding_is_as_severe_as_its_cause(name: str, run: RunRecord, severity: str) -> None:
    assert check(name, run).severity == severity


def test_a_source_that_ended_is_advice_unless_it_moves_the_shares() -> None:
    rows = {"blend/max_share_error": [0.0] * 40, "blend/ended_sources": [0.0] * 20 + [1.0] * 20}
    ended = check("shares", make_run(rows))
    assert (ended.severity, ended.sentence) == ("advice", "1 source without further documents, the first by step 21")
    own, b = {"name": "a", "mixing": {"repeat": False}}, {"name": "b", "mixing": {"repeat": True}}
    for repeat, sources, knob in (
        (False, [], "data.mixing.repeat = true (now false)"),
        (True, [own, {}], "data.source.a.mixing.repeat = true (now false)"),
        (False, [own, b], "data.source.a.mixing.repeat = true (now false)"),
        (False, [own, {}], "data.source: mixing.repeat = true for what ended"),  # either may have
        (True, [{"target": "my:data"}], "data.source: more data"),
    ):
        run = make_run(rows, config={"data": {"mixing": {"repeat": repeat}, "source": sources}})
        assert str(check("shares", run).knob) == knob
    off = make_run({**rows, "blend/max_share_error": dict.fromkeys(range(100, 4001, 100), 0.5)})
    assert (check("shares", off).severity, (knob_of("shares", off) or ("",))[0]) == (None, "data.mixing.repeat")


@pytest.mark.parametrize(("row_sec", "verdict"), [(0.1, "not_measured"), (2.0, "finding")])
def test_a_machine_that_is_busy_for_some_seconds_is_not_called_slow_yet(row_sec: float, verdict: str) -> None:
    times = {"step_time_sec": [row_sec] * 60 + [2 * row_sec] * 40}
    late = {"time/slowest_rank_sec": [0.9 * row_sec] * 100, "time/fastest_rank_sec": [0.4 * row_sec] * 100}
    assert check("straggling_rank", of_ranks({**late, **times}, 2)).verdict == verdict
    assert check("data_bound", make_run({"time/data_sec": [0.5 * row_sec] * 100, **times})).verdict == verdict


def data_bound(waits: list[float], prefetch: int = 2, **stages: list[float]) -> Ruling:
    """The ruling on these waits; `stages`: the seconds of all sources in a stage."""
    config = {**CONFIG, "data": {**CONFIG["data"], "prefetch": prefetch}}
    rows = {"time/data_sec": waits, "step_time_sec": [0.6 + wait for wait in waits]}
    rows |= {f"time/{stage}/all": seconds for stage, seconds in stages.items()}
    return diagnose(make_run(rows, config=config), [BY_NAME["data_bound"]]).rulings[0]


def test_the_stage_that_took_the_time_decides_what_helps() -> None:
    waits = [0.3] * 80
    found = data_bound(waits, open=[0.3] * 80, read=[0.1] * 80)
    assert found.outcome.sentence.endswith("; of the stages of reading, time/open/all took most")
    assert "fewer, larger files" in found.fix
    first = data_bound([9.0, *waits], open=[20.0] + [0.0] * 80, read=[0.3] * 81)
    assert "time/read/all took most" in first.outcome.sentence, "not what the first rows took"
    assert "fewer, larger files" in data_bound(waits, open=[0.1] * 80, read=[0.1] * 80).fix, "all stages together"
    assert data_bound(waits, read=[0.1] * 80).fix == "try data.prefetch = 4 (now 2)", "reading explains less"
    assert data_bound(waits, prefetch=1, read=[0.3] * 80).fix == "try data.prefetch = 2 (now 1)", "which takes turns"
    assert data_bound([43.9, *[0.002] * 98]).outcome.verdict == "healthy", "the data was opened"


@pytest.mark.parametrize(
    ("rule", "verdict", "rows"),
    [
        ("context_unused", "not_measured", depths(0.0, 0.0, count=2)),
        ("context_unused", "healthy", depths(0.0, 0.0, error=0.003)),  # too few documents to tell
        ("context_unused", "healthy", depths(0.05, 0.0, -0.05)),  # it rises
        ("context_unused", "finding", depths(0.0, 0.0, name="books/")),
        ("loss_rises_with_depth", "healthy", depths(0.05, 0.01, error=0.01)),  # within its errors
        ("loss_rises_with_depth", "healthy", depths(0.001, 0.0, -0.002, error=0.0001)),  # too small to matter
        ("loss_rises_with_depth", "finding", depths(-0.02, -0.03)),
        ("loss_rises_with_depth", "finding", depths(0.05, 0.2, 0.2, 0.09, name="books/")),
        ("loss_rises_with_depth", "not_measured", depths(0.1, math.nan)),
    ],
)
def test_gains_by_depth_are_judged_with_their_errors(rule: str, verdict: str, rows: Any) -> None:
    assert check(rule, make_run(rows)).verdict == verdict


def test_why_gains_by_depth_are_not_judged() -> None:
    def why(columns: Any, **settings: Any) -> str:
        return check("context_unused", make_run(columns, config={"eval": settings})).sentence

    assert "or one not finite" in why(depths(0.1, math.nan))
    assert why({"loss": [1.0]}, depth=True, every=5) == "needs 3 evaluations, has 0"
    assert "needs eval/depth" in why({"loss": [1.0]}, depth=False, every=5)


def test_depths_are_named_and_wipes_are_not_counted_over_ranks() -> None:
    assert "no context beyond 256 tokens: " in check("context_unused", make_run(depths(0.02, 0.01, 0.0, 0.0))).sentence
    risen = check("loss_rises_with_depth", FAULTY["loss_rises_with_depth"]).sentence
    assert "0.0500 +- 0.0020 (95 %) from 128 tokens on, 0.0100 +- 0.0020 (95 %) from 256 on" in risen
    assert check("cold_starts", make_run({**LOST, "ledger_wipe_count": [0.0, 8.0]})).sentence.endswith("was wiped")


def test_the_evidence_of_spikes_is_the_spikes() -> None:
    found = check("loss_spikes", losses(*noisy(2.0, 40), 3.0, *[4.0, *noisy(2.0, 30)] * 13))
    assert [*found.evidence[0].values] == [3.0] + [4.0] * 11, "spread over 14"
    assert "after 2." in found.sentence  # not of the spikes


def test_a_batch_that_grew_counts_with_what_it_was_at_each_step() -> None:
    config = {**CONFIG, "train": {"micro_batches": {"schedule": "step", "points": {"0": 1, "20": 2}}}}
    run = make_run({"train/micro_batches": {1: 1.0, 10: 1.0, 20: 2.0, 30: 4.0}}, config=config)
    assert [batches_through(run, step) for step in (1, 10, 15, 20, 30, 40)] == [1, 10, 20, 30, 70, 110]
    assert [micro_batches(run, since=step) for step in (0, 11, 30)] == [1, 2, 4]
    grown = Restart(20, {"changed": {"train.micro_batches": {"before": 1}}})
    assert [micro_batches(make_run({}, restarts=[grown]), since=step) for step in (0, 21)] == [1, 2]
    assert batches_through(make_run({"loss": [1.0]}), 7) == 14


@pytest.mark.parametrize(("judged", "verdict"), [(0, "no_findings"), (1, "no_findings"), (2, "healthy")])
def test_a_run_is_healthy_if_at_least_half_of_the_rules_judged_it(judged: int, verdict: str) -> None:
    rules = [BY_NAME[name] for name in ("non_finite", "refused_rows", "cold_starts", "shares")]
    columns = {rule.needs[0]: [0.0] * 5 for rule in rules[:judged]} or {"lr": [0.1]}
    found = diagnose(make_run(columns), rules)
    assert (found.verdict, found.num_judged) == (verdict, judged)


BEGINNING = [5.65, 1149.66, 1065.48, 839.62, 660.03, 273.9, 250.46, 186.39, 219.65, 241.45, 205.26, 193.46]
DIVERGED = [*BEGINNING, 175.14, 213.38, 154.48, 188.93, 171.28, 174.89, 130.96, 171.62, 188.84]  # lr 30
LATE = [*(5.5 / (1 + row / 20) for row in range(400)), *(11.5 + 0.1 * math.sin(row) for row in range(16))]


@pytest.mark.parametrize(("rows", "end"), [(DIVERGED, "171.6"), (DIVERGED[:5], "839.6"), (LATE, "11.5")])
def test_a_run_that_ends_above_its_first_loss_diverged(rows: list[float], end: str) -> None:
    outcome = check("loss_spikes", losses(*rows))
    assert (outcome.severity, str(outcome.knob)) == ("error", "optimizer.lr = 0.0005 (now 0.001)")
    assert f"and is {end}" in outcome.sentence
    assert {1, len(rows)} <= set(outcome.evidence[0].steps)
    assert check("loss_spikes", losses(*rows[:4])).is_early, "fewer than five rows"
    below = check("loss_spikes", losses(-1.0, *map(float, range(50))))
    assert (below.severity, below.sentence) == (None, "no spike behind row 16"), "0 or less has no multiples"
