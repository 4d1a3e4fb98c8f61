"""Catalog rows of training itself: the objective, the gradient, safety."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from trainer.metrics.catalog.spec import MetricSpec

_Row = partial(MetricSpec, group="Training")
_TokenMean = partial(_Row, window="weighted_mean", ranks="weighted_mean")
_TokenTypeMean = partial(_TokenMean, group="Token types")
_SafetyRow = partial(MetricSpec, group="Safety")
_MustBeZero = partial(_SafetyRow, precision=0, band=(0.0, 0.0), healthy="0.")

_OF_A_SET: tuple[MetricSpec, ...] = (
    _TokenMean(
        name="loss",
        unit="nats/token",
        title="Loss",
        description="Objective per target token, weighted by tokens over all micro-batches and ranks.",
        healthy="Falls fast at first, then more and more slowly; its noise shrinks with the batch size.",
        pathological="Jumps (bad batch, learning rate too high), is flat from the start, or equals ln(vocabulary size).",
    ),
    _TokenMean(
        name="accuracy",
        unit="fraction",
        title="Accuracy",
        description="Fraction of target tokens whose most probable prediction is correct.",
        healthy="Rises while the loss falls.",
        pathological="Flat while the loss falls (only confidence changes), or 1 early on (targets leak into inputs).",
    ),
    _Row(
        name="perplexity",
        unit="",
        window="last",
        ranks="max",
        title="Perplexity",
        precision=3,
        description="exp of the cross-entropy per token.",
        healthy="Falls towards a floor that depends on the data.",
        pathological="At or above the vocabulary size: nothing is learned.",
    ),
    _TokenMean(
        name="bits_per_byte",
        unit="bits/byte",
        title="Bits per byte",
        description="Cross-entropy in bits per byte of text; comparable between tokenizers.",
        band=(None, 8.0),
        healthy="Below 8 at once; small models reach 1 to 2 on text.",
        pathological="8 or more: worse than guessing bytes at random.",
    ),
)

ROWS: tuple[MetricSpec, ...] = (
    *_OF_A_SET,
    *(
        replace(row, name=f"eval/<name>/{row.name}", title=f"{row.title}, by validation set", group="Evaluation")
        for row in _OF_A_SET
    ),
    *(
        MetricSpec(
            name=name,
            unit="",
            group="Evaluation",
            title="Tasks of your own",
            description="What a task of the user's own (eval.target) returned.",
            healthy="As the task defines it.",
            pathological="As the task defines it.",
        )
        for name in ("eval/<name>/<metric>", "eval/<metric>")
    ),
    _Row(
        name="train/micro_batches",
        unit="",
        window="last",
        ranks="max",
        precision=0,
        title="Micro-batches per step",
        description="Micro-batches of the step on each rank, where train.micro_batches is a schedule or auto; events.jsonl "
        "has the reason of each change.",
        healthy="Changes where it was planned, or doubles as the noise scale grows.",
        pathological="auto stays at its start although gns/b_now_low is more than twice gns/b_big: see events.jsonl for a "
        "noise scale that failed.",
    ),
    _Row(
        name="grad_norm",
        unit="",
        title="Gradient norm",
        description="L2 norm of the whole gradient before clipping.",
        healthy="Settles within the first few hundred steps and drifts slowly.",
        pathological="Spikes before loss spikes; steady growth; 0 (no gradient reaches the parameters).",
    ),
    _Row(
        name="lr",
        unit="",
        window="last",
        ranks="max",
        title="Learning rate",
        precision=8,
        description="Learning rate of the step.",
        healthy="Follows the configured schedule.",
        pathological="Deviates from the schedule after a resume.",
    ),
    _Row(
        name="tokens_in_step",
        unit="tokens",
        window="sum",
        ranks="sum",
        title="Tokens in the step",
        precision=0,
        description="Target tokens of the step over all micro-batches and ranks, also of a step that was skipped.",
        healthy="Close to batch size times sequence length; lower with padding.",
        pathological="Far lower: mostly padding, or ranks without data.",
    ),
    _Row(
        name="tokens_seen",
        unit="tokens",
        window="last",
        ranks="max",
        title="Tokens seen",
        precision=0,
        description="Target tokens trained on so far, including steps before a resume, without those of skipped steps.",
        healthy="Grows linearly.",
        pathological="Restarts at zero after a resume.",
    ),
    _TokenMean(
        name="objective/<name>",
        unit="nats/token",
        group="Objective",
        title="Objective component",
        description="One component of the loss, per token that it applies to, as it enters the loss: its weight included.",
        healthy="Each component falls or stays small relative to the main one.",
        pathological="A regularizer outgrows the cross-entropy.",
    ),
    _TokenTypeMean(
        name="token_type/<type>/loss",
        unit="nats/token",
        title="Loss by token type",
        description="Cross-entropy over the target tokens of one type.",
        healthy="Falls for each type; easy types (whitespace) are lower.",
        pathological="One type rises while the total falls.",
    ),
    _TokenTypeMean(
        name="token_type/<type>/accuracy",
        unit="fraction",
        title="Accuracy by token type",
        description="Fraction of correct predictions over the target tokens of one type.",
        healthy="Rises for each type.",
        pathological="Stays at chance level for one type.",
    ),
    _MustBeZero(
        name="non_finite_steps",
        unit="steps",
        kind="counter",
        window="sum",
        ranks="max",
        title="Rejected steps",
        description="Steps rejected because of a non-finite loss or gradient.",
        pathological="More than a few: lower the learning rate, or look up the batch in events.jsonl.",
    ),
    _MustBeZero(
        name="loss_spike",
        unit="",
        kind="flag",
        window="max",
        ranks="max",
        title="Loss spike",
        description="1 if the loss of a step since the last logged one was train.spike_sigma above its average; "
        "events.jsonl names the batches.",
        pathological="1 repeatedly on the same sources: bad data.",
    ),
    _SafetyRow(
        name="grad_scale",
        unit="",
        window="last",
        ranks="min",
        title="Loss scale",
        precision=0,
        description="Factor of dynamic loss scaling (fp16 only).",
        healthy="Powers of two, rarely halved.",
        pathological="Falls towards 1: gradients overflow all the time.",
    ),
    _SafetyRow(
        name="checkpoint/save_sec",
        unit="s",
        window="sum",
        ranks="max",
        title="Checkpoint time",
        precision=3,
        description="Time that saves have blocked training since the last logged step, summed, on the slowest rank.",
        healthy="Small relative to the checkpoint interval.",
        pathological="Grows: disk full or slow.",
    ),
)
