"""Rules about layers: one that stands still, and one that takes all of the gradient's norm."""

from __future__ import annotations

from fnmatch import fnmatchcase
from statistics import median
from typing import Any, Final

from trainer.tools.diagnostics.facts import lower_lr
from trainer.tools.diagnostics.outcome import Knob, Outcome, finding, healthy, not_measured, not_yet
from trainer.tools.diagnostics.rules.rule import Rule, unlogged
from trainer.tools.diagnostics.series import Series, aligned, series
from trainer.tools.runs.load import RunRecord
from trainer.wording import number_text

PREFIX: Final = "layer/"
UPDATE: Final = "/update_ratio"
NORM: Final = "/grad_norm"
WHOLE: Final = "grad_norm"
MIN_LAYERS = 3
MIN_ROWS = 5
STANDS_STILL = 1e-3
TAKES_ALL = 0.9999
HINT: Final = "set metrics.per_layer = true"


def check_still(run: RunRecord) -> Outcome:
    """Layers whose update over weight, in the median of the second half of the rows, is far below that of the others."""
    columns = _second_halves(run, UPDATE)
    if isinstance(columns, Outcome):
        return columns
    middles = {name: median(column.values) for name, column in columns.items()}
    typical = median(middles.values())
    if typical <= 0.0:
        return not_measured("most layers do not move: the learning rate is 0, or nothing reaches them")
    still = {name: value / typical for name, value in middles.items() if value < STANDS_STILL * typical}
    if not still:
        slowest = min(middles, key=middles.__getitem__)
        return healthy(
            f"the slowest layer, {slowest}, has {number_text(middles[slowest] / typical)} of the median update"
        )
    names = ", ".join(f"{name} ({number_text(share)} of the median)" for name, share in still.items())
    cut_off = [name for name in still if not any(series(run, f"{PREFIX}{name}{NORM}").values)]
    reason = f"; no gradient reaches {', '.join(cut_off)}" if cut_off else ""
    return finding(
        f"{names} {'stands' if len(still) == 1 else 'stand'} still: the update over weight of the median layer is "
        f"{number_text(typical)}{reason}",
        evidence=[columns[name].evidence() for name in still],
        knob=_knob(run, next(iter(still))),
    )


def check_dominant(run: RunRecord) -> Outcome:
    """A layer with nearly all of the gradient's squared norm, in the median of the second half of the rows."""
    columns = _second_halves(run, NORM)
    if isinstance(columns, Outcome):
        return columns
    whole = series(run, WHOLE)
    shares = {name: _share(column, whole) for name, column in columns.items()}
    largest = max(shares, key=shares.__getitem__)
    if shares[largest] <= TAKES_ALL:
        return healthy(f"the largest gradient, of {largest}, has {shares[largest]:.1%} of the squared norm")
    clip = run.setting("train.clip_grad_norm", None)
    clipped = (
        f", and clipping to {number_text(clip)} shrinks all others with it" if isinstance(clip, float) and clip else ""
    )
    return finding(
        f"{largest} has {shares[largest]:.4%} of the gradient's squared norm{clipped}",
        evidence=[columns[largest].evidence(), whole.since(columns[largest].steps[0]).evidence()],
        knob=lower_lr(run),
    )


def _second_halves(run: RunRecord, what: str) -> dict[str, Series] | Outcome:
    """The second half of the rows of each layer."""
    keys = [key for key in run.train.keys if key.startswith(PREFIX) and key.endswith(what)]
    if not keys:
        return unlogged(run, [f"{PREFIX}<name>{what}"], HINT)
    if len(keys) < MIN_LAYERS:
        return not_measured(f"the model has fewer than {MIN_LAYERS} layers to compare")
    columns = {key.removeprefix(PREFIX).removesuffix(what): series(run, key) for key in keys}
    last = max(column.steps[-1] for column in columns.values())
    first = min(column.steps[0] for column in columns.values())
    late = {name: column.since((first + last) // 2) for name, column in columns.items()}
    late = {name: column for name, column in late.items() if len(column) >= MIN_ROWS}
    if len(late) < MIN_LAYERS:
        return not_yet(f"needs {MIN_ROWS} rows with layers in the second half of the run")
    return late


def _share(column: Series, whole: Series) -> float:
    own, total = aligned(column, whole)
    return median((a / b) ** 2 if b > 0.0 else 0.0 for a, b in zip(own.values, total.values, strict=True))


def _knob(run: RunRecord, layer: str) -> Knob:
    """The group of the optimizer that slows the layer down, if one does; otherwise the model."""
    groups: list[dict[str, Any]] = run.setting("optimizer.group", []) or []
    for group in groups:
        if fnmatchcase(f"{layer}.weight", str(group.get("match", ""))):
            if group.get("lr_scale", 1.0) < 1.0:
                return Knob("optimizer.group.lr_scale", group["lr_scale"], 1.0)
            break
    return Knob("model", None, f"a model in which the gradient reaches {layer}")


RULES = (
    Rule(
        name="still_layer",
        uses=("layer/<name>/update_ratio", "layer/<name>/grad_norm"),
        threshold="over the second half of the run, the median of a layer's update over weight is below "
        f"{STANDS_STILL:g} of the median over all layers (at least {MIN_LAYERS} layers, {MIN_ROWS} rows)",
        why="In healthy runs of all families, with AdamW, Muon and SGD, the slowest layer has at least a tenth of the median. "
        "A layer a hundred times slower than that keeps the weights that it began with: its gradient is cut off, or a group's "
        "lr_scale is wrong.",
        knob="the model, where the gradient is cut off (`detach`, `no_grad`); or `lr_scale` of its `[[optimizer.group]]`",
        severity="warning",
        check=check_still,
    ),
    Rule(
        name="dominant_layer",
        uses=("layer/<name>/grad_norm", WHOLE),
        threshold=f"over the second half of the run, the median of a layer's share of the squared gradient norm is above "
        f"{TAKES_ALL:.2%} (at least {MIN_LAYERS} layers, {MIN_ROWS} rows)",
        why="The norm of all other layers together is then below 1 % of the whole: clipping sees that layer alone, and shrinks "
        "the others with it. In healthy runs of all families one layer, mostly the output layer or a tied embedding, reaches "
        "99.9 %.",
        knob="the scale at which that layer is initialized or its output multiplied; `optimizer.lr`: half",
        severity="warning",
        check=check_dominant,
    ),
)
