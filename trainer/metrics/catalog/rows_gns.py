"""Catalog rows of the gradient noise scale, and of layers and the optimizer's parameter groups (docs/gns.md)."""

from __future__ import annotations

from functools import partial
from typing import Final

from trainer.metrics.catalog.spec import MetricSpec

ONE_BATCH_SIZE: Final = "one micro-batch per step on one rank has a single batch size, and two are compared"
"""Why some runs have none of these keys."""

_Row = partial(MetricSpec, group="Gradient noise scale", window="last")
_Sequences = partial(_Row, unit="sequences")
_AsBSimple = partial(_Row, healthy="As gns/b_simple.", pathological="As gns/b_simple.")
_Ratio = partial(_Row, unit="ratio")
_DEPENDENT = "Far from gns/b_now: rows share streams or documents."
_NOISE_SCALES = (
    (
        "b_simple",
        "Noise scale B_simple",
        "tr(Sigma) / |G|^2: batch size at which gradient noise equals signal.",
        "Grows slowly as the loss falls.",
        "Far below the batch: averaging wastes compute.",
    ),
    (
        "b_now",
        "Noise scale now",
        "The noise scale at this step, by a line through recent ones.",
        "As gns/b_simple, and above it while growing.",
        "As gns/b_simple.",
    ),
    (
        "b_drawn",
        "Noise scale as drawn",
        "Noise of a step's gradient over |G|^2, times its sequences.",
        "Close to gns/b_now.",
        _DEPENDENT,
    ),
    (
        "b_independent",
        "Noise scale of independent rows",
        "Noise scale of sequences drawn independently from all data.",
        "Close to gns/b_now.",
        _DEPENDENT,
    ),
)

ROWS: tuple[MetricSpec, ...] = (
    *(
        row
        for name, title, description, healthy, pathological in _NOISE_SCALES
        for row in (
            _Sequences(
                name=f"gns/{name}",
                title=title,
                description=description,
                healthy=healthy,
                pathological=pathological,
            ),
            _Sequences(
                name=f"gns/{name}_low",
                title=f"{title}, lower bound",
                description="Its lower bound (97.5 %).",
                healthy="Close to it.",
                pathological="Above ten times gns/b_big: batch too small."
                if name == "b_simple"
                else "As gns/b_simple_low.",
            ),
            _Sequences(
                name=f"gns/{name}_high",
                title=f"{title}, upper bound",
                description="Its upper bound (99.99 %).",
                healthy="Within a factor of two.",
                pathological="Absent for long: batch far too small." if name == "b_simple" else "As gns/b_simple_high.",
            ),
        )
    ),
    _Sequences(
        name="gns/b_simple_se",
        title="Standard error of B_simple",
        description="Standard error of gns/b_simple on its larger side.",
        healthy="A small fraction of gns/b_simple.",
        pathological="As large as gns/b_simple: average over more steps.",
    ),
    _Row(
        name="gns/b_now_steps",
        unit="steps",
        title="Steps behind B now",
        description="Steps that gns/b_now comes from: half of those without visible curvature.",
        healthy="Grows with the run.",
        pathological="Small late in the run: noise or signal changes quickly.",
    ),
    *(
        _Ratio(
            name=f"gns/noise_from_{part}",
            title=f"Noise from the {part}",
            description=f"Share of a sequence's gradient noise from its {part}.",
            healthy=healthy,
            pathological=pathological,
        )
        for part, healthy, pathological in (
            ("stream", "Near 0.", "Large: use more streams at a time, not more rows."),
            ("group", "0 to 0.3.", "Large: use rows of more documents."),
            ("row", "0.6 to 1.", "Far below 1: rows of a step are not independent."),
        )
    ),
    _AsBSimple(
        name="gns/b_simple_tokens",
        unit="tokens",
        title="Noise scale in tokens",
        description="gns/b_simple times the target tokens per sequence.",
    ),
    _Row(
        name="gns/tr_sigma",
        title="Gradient noise tr(Sigma)",
        description="Trace of the covariance of a sequence's gradient, averaged.",
        healthy="Positive and steady.",
        pathological="Negative for long: dependent micro-batches.",
    ),
    _Row(
        name="gns/grad_sq",
        title="Gradient signal |G|^2",
        description="Squared norm of the true gradient, without noise, averaged.",
        healthy="Falls during training.",
        pathological="Negative for long: batch far below the noise scale.",
    ),
    _Ratio(
        name="gns/consistency",
        title="Consistency",
        description="Noise between ranks over that within them (one rank: first over second half).",
        band=(0.5, 2.0),
        healthy="1.",
        pathological="0: ranks read the same data. Large: micro-batches are reused, or ranks differ.",
    ),
    _Ratio(
        name="gns/consistency_se",
        title="Standard error of consistency",
        description="Standard error of gns/consistency on its larger side.",
        healthy="Well below 1.",
        pathological="1 or more: gns/consistency says nothing yet.",
    ),
    _Sequences(
        name="gns/b_small",
        title="Small batch",
        description="Effective sequences of a micro-batch on one rank.",
        healthy="Constant.",
        pathological="Far below the rows of a micro-batch: uneven weights.",
    ),
    _Sequences(
        name="gns/b_big",
        title="Big batch",
        description="Effective sequences of the whole step.",
        healthy="Constant.",
        pathological="Far below the rows of a step: uneven weights.",
    ),
    _Ratio(
        name="gns/batch_ratio",
        title="Batch over noise scale",
        description="Sequences of a step divided by gns/b_simple.",
        band=(0.1, 4.0),
        healthy="0.1 to 4.",
        pathological="Below 0.1: larger batches take fewer steps. Above 4: smaller ones learn nearly as much per step.",
    ),
    _Row(
        name="gns/skipped",
        unit="steps",
        kind="counter",
        window="sum",
        ranks="max",
        title="Skipped windows",
        description="Steps without a usable estimate.",
        band=(0.0, 0.0),
        healthy="0.",
        pathological="Grows: non-finite micro-gradients, or hooks run twice.",
    ),
    _AsBSimple(
        name="gns/gns_mu",
        unit="micro-batches",
        title="Noise scale in micro-batches",
        description="gns/b_simple over the sequences of a micro-batch on all ranks.",
    ),
    _Sequences(
        name="gns/Bsimple_from_mu",
        title="B_simple from mu",
        description="gns/b_simple by the name of an older recipe.",
        healthy="Equals gns/b_simple.",
        pathological="As gns/b_simple.",
    ),
)

_LayerRow = partial(MetricSpec, group="Layers", window="last")

LAYER_ROWS: tuple[MetricSpec, ...] = tuple(
    row
    for prefix, of in (("layer/<name>/", "layer"), ("param_group/<name>/", "parameter group"))
    for row in (
        _LayerRow(
            name=f"{prefix}grad_norm",
            title=f"Gradient norm by {of}",
            description=f"L2 norm of the gradient of one {of} before clipping.",
            healthy="Within a factor of a hundred.",
            pathological="0: no gradient reaches it. Nearly all of grad_norm: clipping shrinks the others."
            if of == "layer"
            else "As for layers.",
        ),
        _LayerRow(
            name=f"{prefix}update_ratio",
            unit="ratio",
            title=f"Update over weight by {of}",
            description=f"L2 norm of the weight update of one {of} over that of its weights.",
            healthy="1e-4 to 1e-2 at the peak learning rate; follows the schedule."
            if of == "layer"
            else "As for layers.",
            pathological="Far below the others: it stands still. Above 0.1: too fast."
            if of == "layer"
            else "As for layers.",
        ),
        _LayerRow(
            name=f"{prefix}b_simple",
            unit="sequences",
            title=f"Noise scale by {of}",
            description=f"B_simple of one {of}, over logged steps.",
            healthy="Within a factor of ten of gns/b_simple.",
            pathological="Far above the batch: mostly noise.",
        ),
    )
)
