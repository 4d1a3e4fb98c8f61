"""Catalog rows of the gradient noise scale, of layers and of parameter groups (docs/gns.md)."""

from __future__ import annotations

from functools import partial
from typing import Final

from trainer.metrics.catalog.spec import MetricSpec, row_of

ONE_BATCH_SIZE: Final = "one micro-batch per step on one rank has a single batch size, and two are compared"
"""Why some runs have none of these keys."""

_Row = partial(row_of, group="Gradient noise scale", window="last")
_Sequences = partial(_Row, unit="sequences")
_AsBSimple = partial(_Row, healthy="As gns/b_simple.", pathological="As gns/b_simple.")
_Ratio = partial(_Row, unit="ratio")
_BATCH_TOO_SMALL = ("Above ten times gns/b_big: batch too small.", "Absent for long: batch far too small.")
_AS_B_SIMPLE = ("As gns/b_simple_low.", "As gns/b_simple_high.")
_DEPENDENT = "Far from gns/b_now: rows share streams or documents."


def _with_bounds(
    name: str, title: str, texts: tuple[str, str, str], bounds: tuple[str, str] = _AS_B_SIMPLE
) -> tuple[MetricSpec, ...]:
    """The rows of a noise scale: its texts, and what is pathological of its bounds."""
    low, high = bounds
    return (
        _Sequences(f"gns/{name}", title)(*texts),
        _Sequences(f"gns/{name}_low", f"{title}, lower bound")("Its lower bound (97.5 %).", "Close to it.", low),
        _Sequences(f"gns/{name}_high", f"{title}, upper bound")(
            "Its upper bound (99.99 %).", "Within a factor of two.", high
        ),
    )


ROWS: tuple[MetricSpec, ...] = (
    *_with_bounds(
        "b_simple",
        "Noise scale B_simple",
        (
            "tr(Sigma) / |G|^2: batch size at which gradient noise equals signal.",
            "Grows slowly as the loss falls.",
            "Far below the batch: averaging wastes compute.",
        ),
        _BATCH_TOO_SMALL,
    ),
    *_with_bounds(
        "b_now",
        "Noise scale now",
        (
            "The noise scale at this step, by a line through recent ones.",
            "As gns/b_simple, and above it while growing.",
            "As gns/b_simple.",
        ),
    ),
    *_with_bounds(
        "b_drawn",
        "Noise scale as drawn",
        ("Noise of a step's gradient over |G|^2, times its sequences.", "Close to gns/b_now.", _DEPENDENT),
    ),
    *_with_bounds(
        "b_independent",
        "Noise scale of independent rows",
        ("Noise scale of sequences drawn independently from all data.", "Close to gns/b_now.", _DEPENDENT),
    ),
    _Sequences("gns/b_simple_se", "Standard error of B_simple")(
        "Standard error of gns/b_simple on its larger side.",
        "A small fraction of gns/b_simple.",
        "As large as gns/b_simple: average over more steps.",
    ),
    _Row("gns/b_now_steps", "Steps behind B now", unit="steps")(
        "Steps that gns/b_now comes from: half of those without visible curvature.",
        "Grows with the run.",
        "Small late in the run: noise or signal changes quickly.",
    ),
    *(
        _Ratio(f"gns/noise_from_{part}", f"Noise from the {part}")(
            f"Share of a sequence's gradient noise from its {part}.", healthy, pathological
        )
        for part, healthy, pathological in (
            ("stream", "Near 0.", "Large: use more streams at a time, not more rows."),
            ("group", "0 to 0.3.", "Large: use rows of more documents."),
            ("row", "0.6 to 1.", "Far below 1: rows of a step are not independent."),
        )
    ),
    _AsBSimple("gns/b_simple_tokens", "Noise scale in tokens", unit="tokens")(
        "gns/b_simple times the target tokens per sequence."
    ),
    _Row("gns/tr_sigma", "Gradient noise tr(Sigma)")(
        "Trace of the covariance of a sequence's gradient, averaged.",
        "Positive and steady.",
        "Negative for long: dependent micro-batches.",
    ),
    _Row("gns/grad_sq", "Gradient signal |G|^2")(
        "Squared norm of the true gradient, without noise, averaged.",
        "Falls during training.",
        "Negative for long: batch far below the noise scale.",
    ),
    _Ratio("gns/consistency", "Consistency", band=(0.5, 2.0))(
        "Noise between ranks over that within them (one rank: first over second half).",
        "1.",
        "0: ranks read the same data. Large: micro-batches are reused, or ranks differ.",
    ),
    _Ratio("gns/consistency_se", "Standard error of consistency")(
        "Standard error of gns/consistency on its larger side.",
        "Well below 1.",
        "1 or more: gns/consistency says nothing yet.",
    ),
    _Sequences("gns/b_small", "Small batch")(
        "Effective sequences of a micro-batch on one rank.",
        "Constant.",
        "Far below the rows of a micro-batch: uneven weights.",
    ),
    _Sequences("gns/b_big", "Big batch")(
        "Effective sequences of the whole step.", "Constant.", "Far below the rows of a step: uneven weights."
    ),
    _Ratio("gns/batch_ratio", "Batch over noise scale", band=(0.1, 4.0))(
        "Sequences of a step divided by gns/b_simple.",
        "0.1 to 4.",
        "Below 0.1: larger batches take fewer steps. Above 4: smaller ones learn nearly as much per step.",
    ),
    _Row("gns/skipped", "Skipped windows", unit="steps", kind="counter", window="sum", ranks="max", band=(0.0, 0.0))(
        "Steps without a usable estimate.", "0.", "Grows: non-finite micro-gradients, or hooks run twice."
    ),
    _AsBSimple("gns/gns_mu", "Noise scale in micro-batches", unit="micro-batches")(
        "gns/b_simple over the sequences of a micro-batch on all ranks."
    ),
    _Sequences("gns/Bsimple_from_mu", "B_simple from mu")(
        "gns/b_simple by the name of an older recipe.", "Equals gns/b_simple.", "As gns/b_simple."
    ),
)

_LayerRow = partial(row_of, group="Layers", window="last")

LAYER_ROWS: tuple[MetricSpec, ...] = tuple(
    row
    for prefix, of in (("layer/<name>/", "layer"), ("param_group/<name>/", "parameter group"))
    for row in (
        _LayerRow(f"{prefix}grad_norm", f"Gradient norm by {of}")(
            "L2 norm of its gradient before clipping.",
            "Within a factor of a hundred.",
            "0: no gradient reaches it. Nearly all of grad_norm: clipping shrinks the others.",
        ),
        _LayerRow(f"{prefix}update_ratio", f"Update over weight by {of}", unit="ratio")(
            "L2 norm of its weight update over that of its weights.",
            "1e-4 to 1e-2 at the peak learning rate; follows the schedule.",
            "Far below the others: it stands still. Above 0.1: too fast.",
        ),
        _LayerRow(f"{prefix}b_simple", f"Noise scale by {of}", unit="sequences")(
            "Its B_simple, over logged steps.",
            "Within a factor of ten of gns/b_simple.",
            "Far above the batch: mostly noise.",
        ),
    )
)
