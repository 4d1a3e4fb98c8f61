"""Catalog rows of the gradient noise scale."""

from __future__ import annotations

from functools import partial

from trainer.metrics.catalog.spec import MetricSpec

_Row = partial(MetricSpec, group="Gradient noise scale", window="last")
_Sequences = partial(_Row, unit="sequences")
_AsBSimple = partial(_Row, healthy="As gns/b_simple.", pathological="As gns/b_simple.")
_Ratio = partial(_Row, unit="ratio", precision=3)

ROWS: tuple[MetricSpec, ...] = (
    _Sequences(
        name="gns/b_simple",
        title="Noise scale B_simple",
        precision=1,
        description="tr(Sigma) / |G|^2: the batch size at which gradient noise equals signal; absent without an upper bound.",
        healthy="Grows slowly as the loss falls.",
        pathological="Far below the batch size: averaging wastes compute.",
    ),
    _Sequences(
        name="gns/b_simple_low",
        title="Lower bound of B_simple",
        precision=1,
        description="Lower bound of the noise scale by Fieller: in 97.5 % of steps the true one is larger.",
        healthy="Close to gns/b_simple.",
        pathological="More than ten times gns/b_big: the batch is too small, whether gns/b_simple is known or not.",
    ),
    _Sequences(
        name="gns/b_simple_high",
        title="Upper bound of B_simple",
        precision=1,
        description="Upper bound of the noise scale by Fieller: in 99.99 % of steps the true one is smaller; absent if none.",
        healthy="Within a factor of two of gns/b_simple.",
        pathological="Absent for long: the batch is far below the noise scale, or too few steps are averaged.",
    ),
    _Sequences(
        name="gns/b_simple_se",
        title="Standard error of B_simple",
        precision=1,
        description="Standard error of gns/b_simple on its larger side: (gns/b_simple_high - gns/b_simple) / t of that bound.",
        healthy="A small fraction of gns/b_simple.",
        pathological="As large as gns/b_simple: average over more steps.",
    ),
    _Sequences(
        name="gns/b_now",
        title="Noise scale now",
        precision=1,
        description="The noise scale at this step, by a line through the last gns/b_now_steps; absent without an upper bound.",
        healthy="Grows slowly as the loss falls; above gns/b_simple while it grows.",
        pathological="As gns/b_simple.",
    ),
    _Sequences(
        name="gns/b_now_low",
        title="Lower bound of B now",
        precision=1,
        description="Lower bound of gns/b_now by Fieller: in 97.5 % of steps the true one is larger.",
        healthy="Close to gns/b_now.",
        pathological="As gns/b_simple_low.",
    ),
    _Sequences(
        name="gns/b_now_high",
        title="Upper bound of B now",
        precision=1,
        description="Upper bound of gns/b_now by Fieller: in 99.99 % of steps the true one is smaller; absent if none.",
        healthy="Within a factor of two of gns/b_now.",
        pathological="As gns/b_simple_high.",
    ),
    _Row(
        name="gns/b_now_steps",
        unit="steps",
        title="Steps behind B now",
        precision=0,
        description="The last steps that gns/b_now was computed from: half of those over which no curvature is visible.",
        healthy="Grows with the run.",
        pathological="Small late in the run: gradient noise or signal changes quickly.",
    ),
    _AsBSimple(
        name="gns/b_simple_tokens",
        unit="tokens",
        title="Noise scale in tokens",
        precision=0,
        description="gns/b_simple times the target tokens per sequence.",
    ),
    _Row(
        name="gns/tr_sigma",
        unit="",
        title="Gradient noise tr(Sigma)",
        description="Trace of the covariance of one sequence's gradient, averaged; may be negative by chance.",
        healthy="Positive and steady.",
        pathological="Negative for long: the micro-batches are not independent.",
    ),
    _Row(
        name="gns/grad_sq",
        unit="",
        title="Gradient signal |G|^2",
        precision=6,
        description="Squared norm of the true gradient, corrected for noise and averaged; may be negative by chance.",
        healthy="Falls during training.",
        pathological="Negative for long: the batch size is far below the noise scale.",
    ),
    _Ratio(
        name="gns/consistency",
        title="Consistency",
        description="Noise measured between ranks over noise measured within them (one rank: first over second half).",
        band=(0.5, 2.0),
        healthy="1.",
        pathological="0: ranks read the same data. Large: micro-batches are reused or ranks read different distributions.",
    ),
    _Ratio(
        name="gns/consistency_se",
        title="Standard error of consistency",
        description="Standard error of gns/consistency on its larger side.",
        healthy="Well below 1.",
        pathological="1 or more: gns/consistency is not yet meaningful; average over more steps.",
    ),
    _Sequences(
        name="gns/b_small",
        title="Small batch",
        precision=2,
        description="Effective sequences of a micro-batch on one rank.",
        healthy="Constant.",
        pathological="Far below the rows of a micro-batch: uneven weights.",
    ),
    _Sequences(
        name="gns/b_big",
        title="Big batch",
        precision=2,
        description="Effective sequences of the whole step.",
        healthy="Constant.",
        pathological="Far below the rows of a step: uneven weights.",
    ),
    _Ratio(
        name="gns/batch_ratio",
        title="Batch over noise scale",
        description="Sequences of a step divided by gns/b_simple.",
        band=(0.1, 1.0),
        healthy="0.1 to 1.",
        pathological="Far above 1: a smaller batch would learn as much per step.",
    ),
    _Row(
        name="gns/skipped",
        unit="steps",
        kind="counter",
        window="sum",
        ranks="max",
        precision=0,
        title="Skipped windows",
        description="Steps without a usable estimate since the last logged step.",
        band=(0.0, 0.0),
        healthy="0.",
        pathological="Grows: non-finite micro-gradients, or hooks that run more than once.",
    ),
    _AsBSimple(
        name="gns/gns_mu",
        unit="micro-batches",
        title="Noise scale in micro-batches",
        precision=3,
        description="gns/b_simple divided by the sequences of one micro-batch over all ranks.",
    ),
    _Sequences(
        name="gns/Bsimple_from_mu",
        title="B_simple from mu",
        precision=1,
        description="gns/b_simple by the name of an older recipe: gns/gns_mu times the sequences that it was divided by.",
        healthy="Equals gns/b_simple, by construction.",
        pathological="As gns/b_simple.",
    ),
)
