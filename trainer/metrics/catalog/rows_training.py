"""Catalog rows of training: objective, gradient, safety; speed, time in a step, device memory and smoothed copies."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from trainer.metrics.catalog.spec import MetricSpec, RankReduction

_Row = partial(MetricSpec, group="Training")
_TokenMean = partial(_Row, window="weighted_mean", ranks="weighted_mean")
_TokenTypeMean = partial(_TokenMean, group="Token types")
_SafetyRow = partial(MetricSpec, group="Safety")
_MustBeZero = partial(_SafetyRow, band=(0.0, 0.0), healthy="0.")
_SpeedRow = partial(MetricSpec, group="Speed", ranks="max")
_TimeRow = partial(MetricSpec, group="Time in a step", ranks="max")
_MemoryRow = partial(MetricSpec, group="Device memory", unit="GB", window="max", ranks="max")

_RANK_TIMES: tuple[tuple[str, RankReduction, str], ...] = (
    ("slowest", "max", "Far above the fastest in most steps."),
    ("fastest", "min", "Far below the slowest in most steps."),
)

_DEPTH = (
    ("loss", "Loss at a depth", "Cross-entropy of targets with <bucket> to 2 <bucket> - 1 tokens before.", "Falls."),
    (
        "loss_from_zero",
        "Loss at a depth, from zero",
        "The same with the state reset at each cell.",
        "Above the former.",
    ),
    ("carry_gain", "Gain of carrying at a depth", "Their difference (`beyond_cell`: all later cells).", "Positive."),
)
_OF_A_SET: tuple[MetricSpec, ...] = (
    _TokenMean(
        name="loss",
        unit="nats/token",
        title="Loss",
        description="Objective per target token.",
        healthy="Falls fast at first, then more and more slowly.",
        pathological="Jumps (bad batch, learning rate too high), or stays at ln(vocabulary size).",
    ),
    _Row(
        name="loss_se",
        unit="nats/token",
        window="last",
        ranks="max",
        title="Loss, standard error",
        description="Standard error of an evaluation's loss over the documents drawn; absent if all are read.",
        healthy="Small against differences between runs.",
        pathological="As large as those: raise eval.batches.",
    ),
    _TokenMean(
        name="accuracy",
        unit="fraction",
        title="Accuracy",
        description="Fraction of target tokens predicted correctly.",
        healthy="Rises while the loss falls.",
        pathological="Flat while the loss falls; 1 early on (targets leak into inputs).",
    ),
    _Row(
        name="perplexity",
        window="last",
        ranks="max",
        title="Perplexity",
        description="exp of the cross-entropy per token.",
        healthy="Falls towards a floor set by the data.",
        pathological="At or above the vocabulary size.",
    ),
    _TokenMean(
        name="bits_per_byte",
        unit="bits/byte",
        title="Bits per byte",
        description="Cross-entropy of the tokens that stand for text, in bits per byte of that text.",
        band=(None, 8.0),
        healthy="Below 8 at once; small models reach 1 to 2 on text.",
        pathological="8 or more: random guessing.",
    ),
)

ROWS: tuple[MetricSpec, ...] = (
    *_OF_A_SET,
    *(
        replace(
            row,
            name=f"eval/<name>/{row.name}",
            title=f"{row.title}, by validation set",
            group="Evaluation",
            description=f"The {row.title.lower()} on one validation set.",
            healthy=f"As {row.name}.",
            pathological="Worse while training improves: overfitting.",
        )
        for row in _OF_A_SET
    ),
    *(
        MetricSpec(
            name=f"eval/{where}/{name}",
            unit="nats/token",
            ranks="mean_and_error",
            group="Evaluation",
            title=f"{title}{' of a set' if '<name>' in where else ''}",
            description=text,
            healthy=good,
            pathological="A gain of 0: context is not used. One that falls: states were never trained that long.",
        )
        for where in ("depth/<bucket>", "<name>/depth/<bucket>")
        for name, title, text, good in _DEPTH
    ),
    *(
        MetricSpec(
            name=name,
            group="Evaluation",
            title="Tasks of your own",
            description="Result of a custom task (eval.target).",
            healthy="As the task defines it.",
            pathological="As the task defines it.",
        )
        for name in ("eval/<name>/<metric>", "eval/<metric>")
    ),
    _TokenMean(
        name="train/depth/<bucket>/loss",
        unit="nats/token",
        title="Training loss at a depth",
        description="Cross-entropy of a logged step's targets at a depth (metrics.per_depth).",
        healthy="Falls with depth.",
        pathological="Rises with depth: longer context is of no use.",
    ),
    _Row(
        name="train/micro_batches",
        window="last",
        ranks="max",
        title="Micro-batches per step",
        description="Micro-batches per step and rank, if not constant.",
        healthy="As scheduled, or doubling with the noise scale.",
        pathological="auto never grows although gns/b_now_low exceeds twice gns/b_big.",
    ),
    _Row(
        name="grad_norm",
        title="Gradient norm",
        description="L2 norm of the whole gradient before clipping.",
        healthy="Settles within a few hundred steps.",
        pathological="Spikes before loss spikes; steady growth; 0 (no gradient reaches the parameters).",
    ),
    _Row(
        name="lr",
        window="last",
        ranks="max",
        title="Learning rate",
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
        description="Target tokens of the step, even if skipped.",
        healthy="Close to batch size times sequence length; lower with padding.",
        pathological="Far lower: padding, or ranks without data.",
    ),
    _Row(
        name="tokens_seen",
        unit="tokens",
        window="last",
        ranks="max",
        title="Tokens seen",
        description="Target tokens trained on so far, without skipped steps.",
        healthy="Grows linearly.",
        pathological="Restarts at zero after a resume.",
    ),
    _TokenMean(
        name="objective/<name>",
        unit="nats/token",
        group="Objective",
        title="Objective component",
        description="One component of the loss, with its weight, per token (or row) that it applies to.",
        healthy="Falls, or stays relatively small.",
        pathological="A regularizer outgrows the cross-entropy.",
    ),
    _TokenTypeMean(
        name="token_type/<type>/loss",
        unit="nats/token",
        title="Loss by token type",
        description="Cross-entropy over the target tokens of one type.",
        healthy="Falls for each type.",
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
        description="Steps rejected for a non-finite loss or gradient.",
        pathological="More than a few: lower the learning rate; batches: events.jsonl.",
    ),
    _MustBeZero(
        name="loss_spike",
        kind="flag",
        window="max",
        ranks="max",
        title="Loss spike",
        description="1 if a loss was train.spike_sigma above its average; batches: events.jsonl.",
        pathological="1 repeatedly on the same sources: bad data.",
    ),
    _SafetyRow(
        name="grad_scale",
        window="last",
        ranks="min",
        title="Loss scale",
        description="Factor of dynamic loss scaling (fp16 only).",
        healthy="Powers of two, rarely halved.",
        pathological="Falls towards 1: gradients overflow.",
    ),
    _SafetyRow(
        name="checkpoint/save_sec",
        unit="s",
        window="sum",
        ranks="max",
        title="Checkpoint time",
        description="Time in which saves block training, slowest rank.",
        healthy="Far below the checkpoint interval.",
        pathological="Grows: disk full or slow.",
    ),
    _SpeedRow(
        name="tokens_per_sec",
        unit="tokens/s",
        window="last",
        title="Tokens per second",
        description="Target tokens of the step over its time.",
        healthy="Flat after the first steps.",
        pathological="Falls over time (leak, throttling) or oscillates (data).",
    ),
    _SpeedRow(
        name="tokens_per_sec_per_device",
        unit="tokens/s",
        window="last",
        title="Tokens per second and device",
        description="tokens_per_sec over the number of ranks.",
        healthy="The same for any number of ranks.",
        pathological="Falls as ranks are added: communication, or ranks that wait for each other.",
    ),
    _SpeedRow(
        name="mfu",
        unit="fraction",
        window="last",
        title="Model FLOPs utilization",
        description="Model FLOPs per second over the devices' peak, without recomputation.",
        band=(0.3, 0.6),
        healthy="0.3 to 0.6 for large matrices on one node.",
        pathological="Above 1: wrong peak or FLOP count. Below 0.1: data, kernel launches or communication dominate.",
    ),
    _SpeedRow(
        name="step_time_sec",
        unit="s",
        title="Step time",
        description="Time of the logged step, without evaluation and checkpoints.",
        healthy="Flat.",
        pathological="Single slow steps: see time/*.",
    ),
    *(
        _TimeRow(
            name=f"time/{part}_sec",
            unit="s",
            window="sum",
            title=f"Time: {words}",
            description=f"Host time in {words}.",
            healthy=healthy,
            pathological=pathological,
        )
        for part, words, healthy, pathological in (
            ("data", "waiting for data", "Far below the compute time.", "Close to the compute time: data is too slow."),
            ("forward_backward", "forward and backward", "Most of the step.", "Uneven: uneven batches or a slow rank."),
            ("optimizer", "clipping and the optimizer", "A few percent.", "Large: tiny batch or an unfused optimizer."),
        )
    ),
    *(
        _TimeRow(
            name=f"time/{stage}/<source>",
            unit="s",
            kind="counter",
            window="sum",
            title=f"Reading: {words}",
            description=f"Time in {words}, waited for or not.",
            healthy="Far below the time of the steps.",
            pathological=f"Close to it: {fix}.",
        )
        for stage, words, fix in (
            ("open", "opening files", "many small files"),
            ("tokenize", "tokenizing", "tokenize ahead"),
            ("read", "reading opened files and making batches", "the disk is slow"),
            ("own_code", "the user's data set or format", "its code is slow"),
        )
    ),
    _TimeRow(
        name="time/probe_sec",
        unit="s",
        window="last",
        title="Time: probe of carry",
        description="Time of the ledger's probe, in no other time.",
        healthy="A few steps long.",
        pathological="Longer: raise ledger.probe_every.",
    ),
    *(
        _TimeRow(
            name=f"time/{part}_share",
            unit="fraction",
            window="last",
            title=f"Share: {words}",
            description=f"time/{part}_sec divided by step_time_sec.",
            band=band,
            healthy="Flat.",
            pathological="Grows.",
        )
        for part, words, band in (
            ("data", "waiting for data", (None, 0.05)),
            ("forward_backward", "forward and backward", None),
            ("optimizer", "optimizer", None),
        )
    ),
    *(
        _TimeRow(
            name=f"time/{rank}_rank_sec",
            unit="s",
            window="last",
            ranks=ranks,
            title=f"Time of the {rank} rank",
            description=f"Host time of the {rank} rank before the gradient reduction, without waits.",
            healthy="Slowest and fastest are close.",
            pathological=pathological,
        )
        for rank, ranks, pathological in _RANK_TIMES
    ),
    *(
        _MemoryRow(name=f"gpu/{name}", title=title, description=description, healthy=healthy, pathological=pathological)
        for name, title, description, healthy, pathological in (
            (
                "allocated_gb",
                "Allocated",
                "Memory of tensors when the step is logged (1 GB = 1e9 bytes).",
                "Flat.",
                "Grows: something keeps tensors alive.",
            ),
            (
                "peak_gb",
                "Peak",
                "Largest allocated memory since the process started.",
                "Reached within the first steps.",
                "Grows late: longer batches.",
            ),
            (
                "reserved_gb",
                "Reserved",
                "Memory reserved by the caching allocator.",
                "Slightly above the peak.",
                "Far above the peak: fragmentation.",
            ),
            ("total_gb", "Total", "Memory of the device.", "Constant.", "Less than the card has: it is shared."),
        )
    ),
    _MemoryRow(
        name="gpu/mem_utilization",
        unit="fraction",
        title="Peak share",
        description="gpu/peak_gb divided by gpu/total_gb.",
        band=(0.6, 0.95),
        healthy="0.6 to 0.95.",
        pathological="Above 0.97: the next long batch may not fit.",
    ),
    *(
        MetricSpec(
            name=f"smoothed/{name}",
            unit=unit,
            window="last",
            group="Smoothed",
            title=f"{title} (EMA)",
            description=f"Exponential average of {source} over all steps.",
            healthy="Follows the raw curve.",
            pathological="As the raw curve.",
        )
        for name, source, unit, title in (
            ("loss", "loss", "nats/token", "Loss"),
            ("tokens_per_sec", "tokens_per_sec", "tokens/s", "Tokens per second"),
            ("mfu", "mfu", "fraction", "Model FLOPs utilization"),
            ("step_time", "step_time_sec", "s", "Step time"),
        )
    ),
)
