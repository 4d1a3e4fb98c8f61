"""Rules about the model: breaches of its contract that the config trusts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.diagnostics.facts import has_own_model
from trainer.diagnostics.outcome import Evidence, Knob, Outcome, finding, healthy, not_measured
from trainer.diagnostics.rules.rule import Rule
from trainer.runs.load import RunRecord


def check_contract(run: RunRecord) -> Outcome:
    """Breaches found before the run or a resume began."""
    events = [event for event in run.events if event.get("event") == "contract"]
    if not events:
        if "model" in run.config and not has_own_model(run):
            return healthy("a built-in model, which the tests prove")
        return not_measured("the run has no record of a check of its model (trainer.contracts.check_model)")
    broken: dict[str, str] = {}
    starts: dict[int, float] = {}  # step -> number of breaches found there
    for event in events:
        for verdict in _verdicts(event):
            if verdict.get("status") == "broken":
                broken.setdefault(str(verdict.get("check")), str(verdict.get("text")))
                step = int(event.get("global_step", 0))
                starts[step] = starts.get(step, 0.0) + 1.0
    if broken:
        trusted = run.setting("model.trust", None)
        sentence = "; ".join(f"the model breaks {check}: {text}" for check, text in broken.items())
        evidence = Evidence("breaches of the contract", tuple(starts), tuple(starts.values()))
        return finding(
            sentence, evidence=[evidence], knob=Knob("model.trust", trusted, "[], with a model that keeps it")
        )
    if not any(_verdicts(event) for event in events):
        return not_measured(f"the model was not checked: {events[-1].get('not_tried', 'unknown reason')}")
    return healthy("the model keeps the contract, as far as it could be tested")


def _verdicts(event: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = event.get("verdicts", [])
    return [verdict for verdict in found if isinstance(verdict, Mapping)] if isinstance(found, list) else []


RULES = (
    Rule(
        name="model_contract",
        uses=("the `contract` events of events.jsonl",),
        threshold="a check of the model was broken when the run or one of its resumes began",
        why="A model that drops its state, sees later tokens or mixes rows trains without another symptom. `model.trust` lets "
        "such a run begin; what it learns stays in doubt. See [contracts.md](contracts.md).",
        knob="the model; then empty `model.trust`",
        severity="warning",
        check=check_contract,
    ),
)
