"""Many runs as a table with seeds grouped, for terminals and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trainer.cli.terminal import COLOURS, output
from trainer.tools.diagnostics.diagnose import Diagnosis
from trainer.tools.fitted_table import Column, fitted_table, needed_width
from trainer.tools.report.run_summary import value_text
from trainer.tools.report.seed_groups import ERRORS_WIDE, Excess, SeedGroup, Spread, excess, reservations, seed_groups
from trainer.wording import few, number_text

# By importance; of a narrow terminal the last are left out first.
_LOSSES: Final = ("Held-out loss", "Final loss", "Best held-out loss", "Best loss")
_IF_ANY: Final = ("Cold starts", "False evictions", "Rejected steps", "Restarts")
_FIRST_METRIC, _FIRST_SETTING = 50, 10


def print_groups(diagnoses: Sequence[Diagnosis], window: int | None) -> None:
    """The table, ranked, and below it why rows may not compare."""
    label, groups = seed_groups(diagnoses, window=window)
    columns = _columns(label, groups)
    console = output(needed_width=needed_width(columns))
    console.print(_table(label, columns, console.width), highlight=False)
    for remark in reservations(label, groups):
        console.print(Text(remark, style=COLOURS["warning"]))


def _table(label: str, columns: Sequence[Column], width: int) -> Table:
    title = (
        f"By {label.lower()}: mean ± standard deviation over seeds (n - 1).\n"
        f"Above the best: ± standard error of the difference; within {ERRORS_WIDE:g} of them it may be chance"
    )
    return fitted_table(columns, width=width, hint="; --json has all", title=title, title_justify="left")


def _columns(label: str, groups: Sequence[SeedGroup]) -> list[Column]:
    labels = [label, *(name for name in _LOSSES if name != label), "Speed", "Noise scale", *_IF_ANY]
    settings = [
        Column(
            escape(key).replace(".", ".\n"),
            [escape(value_text(group.settings[key])) for group in groups],
            leave_out=_FIRST_SETTING + place,
        )
        for place, key in enumerate(groups[0].settings)
    ]
    metrics = [
        Column(
            "\n".join(filter(None, (name.replace(" loss", "\nloss"), _unit(name, groups)))),
            [_spread_text(group.outcome.get(name), group) for group in groups],
            "right",
            leave_out=0 if name == label else _FIRST_METRIC + place,
        )
        for place, name in enumerate(labels)
        if any(name in group.outcome and (name not in _IF_ANY or group.outcome[name].mean) for group in groups)
    ]
    above = [_excess_text(found) for found in _excesses(label, groups)]
    return [
        Column("row", [str(number) for number in range(1, len(groups) + 1)], "right"),
        *settings,
        Column("seeds", [str(len(group.seeds)) for group in groups], "right"),
        *metrics[:1],
        Column("above\nthe best", above, "right"),
        Column("steps", [_range(group, "Steps") for group in groups], "right", leave_out=_FIRST_METRIC),
        Column("tokens", [_range(group, "Tokens seen") for group in groups], "right", leave_out=_FIRST_METRIC + 20),
        *metrics[1:],
        Column("verdict", [_verdicts(group) for group in groups], leave_out=_FIRST_METRIC + 21),
        Column("runs", [escape(few([run.name for run in group.runs])) for group in groups], leave_out=9, wraps=True),
    ]


def _unit(label: str, groups: Sequence[SeedGroup]) -> str:
    return next((group.units[label] for group in groups if group.units.get(label)), "")


def _excesses(label: str, groups: Sequence[SeedGroup]) -> list[Excess | None]:
    """Of each row against the first; None for the first, and where either has no value."""
    best = groups[0].outcome.get(label)
    rest = (group.outcome.get(label) for group in groups[1:])
    return [None, *(None if best is None or each is None else excess(best, each) for each in rest)]


def _spread_text(spread: Spread | None, group: SeedGroup) -> str:
    if spread is None:
        return "–"
    mean = number_text(spread.mean, 5)
    around = "" if spread.deviation is None else f" ± {number_text(spread.deviation, 2)}"
    return mean + around + (f" (n = {spread.n})" if spread.n < len(group.seeds) else "")


def _excess_text(found: Excess | None) -> str:
    if found is None:
        return ""
    difference = f"+{number_text(found.difference, 3)}"
    if found.error is None:
        return f"{difference}\nno error bar"
    within = "" if found.is_resolved else f"\nwithin {ERRORS_WIDE:g} errors"
    return f"{difference} ± {number_text(found.error, 2)}{within}"


def _range(group: SeedGroup, label: str) -> str:
    """The value of all runs, or the lowest and highest."""
    ends = group.values(label)
    return " to ".join(dict.fromkeys(f"{end:,.0f}" for end in (min(ends), max(ends)))) if ends else "–"


def _verdicts(group: SeedGroup) -> str:
    verdicts = [diagnosis.verdict for diagnosis in group.diagnoses]
    if len(verdicts) == 1:
        return "findings" if group.diagnoses[0].findings else group.diagnoses[0].brief.replace(" by ", " by\n")
    few_rules = verdicts.count("no_findings")
    unsure = f",\n{few_rules} without finding by few rules" if few_rules else ""
    return f"{verdicts.count('healthy')} of {len(verdicts)} healthy{unsure}"


def groups_as_json(diagnoses: Sequence[Diagnosis], window: int | None) -> dict[str, Any]:
    """Everything that `print_groups` shows, and what it leaves out to fit."""
    label, groups = seed_groups(diagnoses, window=window)
    return {
        "ranked_by": label,
        "window": window,
        "groups": [_group_as_json(group, found) for group, found in zip(groups, _excesses(label, groups), strict=True)],
        "reservations": reservations(label, groups),
    }


def _group_as_json(group: SeedGroup, found: Excess | None) -> dict[str, Any]:
    outcome = [
        {"label": name, "unit": group.units[name], "mean": of.mean, "standard_deviation": of.deviation, "n": of.n}
        for name, of in group.outcome.items()
    ]
    return {
        "settings": dict(group.settings),
        "seeds": len(group.seeds),
        "runs": [
            {
                "name": diagnosis.run.name,
                "path": str(diagnosis.run.path),
                "seed": diagnosis.run.setting("run.seed"),
                "verdict": diagnosis.verdict,
                "rules_judged": diagnosis.num_judged,
                "notes": diagnosis.run.notes,
            }
            for diagnosis in group.diagnoses
        ],
        "outcome": outcome,
        "above_best": None if found is None else {**asdict(found), "is_resolved": found.is_resolved},
    }
