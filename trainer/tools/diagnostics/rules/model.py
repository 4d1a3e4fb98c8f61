"""Rules about the model: breaches of its contract that the config trusts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.tools.diagnostics.facts import has_own_model
from trainer.tools.diagnostics.outcome import Evidence, Knob, Outcome, finding, healthy, not_measured
from trainer.tools.diagnostics.rules.rule import Rule
from trainer.tools.runs.load import RunRecord


def check_contract(run: RunRecord) -> Outcome:
    """Breaches found before the run or a resume began."""
    events = [event for event in run.events if event.get("event") == "contract"]
    if not events:
        if "model" in run.config and not has_own_model(run):
            return healthy("a built-in model, which the tests prove")
        return not_measured("the run has no record of a check of its model (trainer.contracts.check_model)")
    broken: dict[str, str] = {}
    ignored = ""
    starts: dict[int, float] = {}  # step -> number of breaches found there
    for event in events:
        for verdict in _verdicts(event):
            if verdict.get("status") != "broken":
                continue
            if verdict.get("check") == "resets" and run.setting("data.pack", None) is False:
                ignored = str(verdict.get("text"))  # no row has one inside
            else:
                broken.setdefault(str(verdict.get("check")), str(verdict.get("text")))
                step = int(event.get("global_step", 0))
                starts[step] = starts.get(step, 0.0) + 1.0
    if broken:
        trusted = run.setting("model.trust", events[-1].get("trusted")) or []
        sentence = "; ".join(f"the model breaks {check}: {text}" for check, text in broken.items())
        evidence = Evidence("breaches of the contract", tuple(starts), tuple(starts.values()))
        if not broken.keys() & set(trusted):
            return finding(f"{sentence}; fix the model (docs/contracts.md)", evidence=[evidence])
        return finding(
            sentence, evidence=[evidence], knob=Knob("model.trust", trusted, [], "with a model that keeps it")
        )
    if why := _why_unchecked(events):
        return not_measured(f"the model was not checked: {why}")
    kept = "the model keeps the contract, as far as it could be tested"
    if ignored:
        return healthy(f"{kept}; that it breaks resets ({ignored}) has no effect with data.pack = false")
    return healthy(kept)


def _why_unchecked(events: Sequence[Mapping[str, Any]]) -> str:
    """Why the contract was not judged at any start; empty if it was at one."""
    why = ""
    for event in events:
        verdicts = {verdict.get("check"): verdict for verdict in _verdicts(event)}
        causality = verdicts.get("causality", {})  # which every model can be judged for
        if verdicts and causality.get("status") != "not testable here":
            return ""
        why = str(causality.get("text") or event.get("not_tried") or "unknown reason")
    return why


def _verdicts(event: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = event.get("verdicts", [])
    return [verdict for verdict in found if isinstance(verdict, Mapping)] if isinstance(found, list) else []


RULES = (
    Rule(
        name="model_contract",
        uses=("the `contract` events of events.jsonl",),
        threshold="a check of the model was broken when the run or a resume began (`resets`: with `data.pack = true`)",
        why="A model that drops its state, sees later tokens or mixes rows trains without another symptom. `model.trust` lets "
        "such a run begin; what it learns stays in doubt. See [contracts.md](contracts.md).",
        knob="the model; then empty `model.trust` where it names something",
        severity="warning",
        check=check_contract,
    ),
)
