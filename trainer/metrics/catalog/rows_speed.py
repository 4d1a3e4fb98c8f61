"""Catalog rows of speed, time within a step, device memory and smoothed copies."""

from __future__ import annotations

from functools import partial

from trainer.metrics.catalog.spec import MetricSpec, RankReduction

_SpeedRow = partial(MetricSpec, group="Speed", ranks="max")
_TimeRow = partial(MetricSpec, group="Time in a step", ranks="max")
_MemoryRow = partial(MetricSpec, group="Device memory", unit="GB", window="max", ranks="max", precision=2)

_RANK_TIMES: tuple[tuple[str, RankReduction, str], ...] = (
    ("slowest", "max", "Far above time/fastest_rank_sec in most steps: all others wait for one rank."),
    ("fastest", "min", "Far below time/slowest_rank_sec in most steps: it waits for the slowest."),
)

ROWS: tuple[MetricSpec, ...] = (
    _SpeedRow(
        name="tokens_per_sec",
        unit="tokens/s",
        window="last",
        title="Tokens per second",
        precision=0,
        description="Target tokens of the step over all ranks, divided by the step time.",
        healthy="Flat after the first steps.",
        pathological="Falls over time (leak, throttling) or oscillates (data).",
    ),
    _SpeedRow(
        name="mfu",
        unit="fraction",
        window="last",
        title="Model FLOPs utilization",
        description="The model's own FLOPs per second over the devices' peak; absent if the peak is unknown. Only trained "
        "tokens count: not what activation checkpointing or burn-in computes again.",
        band=(0.3, 0.6),
        healthy="0.3 to 0.6 for large matrices on one node.",
        pathological="Above 1: wrong peak or FLOP count. Below 0.1: bound by data, kernel launches or communication.",
    ),
    _SpeedRow(
        name="step_time_sec",
        unit="s",
        title="Step time",
        description="Time from start_step to end_step of the logged step, without evaluation and checkpoints.",
        healthy="Flat.",
        pathological="Single slow steps: time/* shows which part was slow.",
    ),
    *(
        _TimeRow(
            name=f"time/{part}_sec",
            unit="s",
            window="sum",
            title=f"Time: {words}",
            description=f"Host time of the logged step in {words}.",
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
            description=f"Time since the last logged step in {words}, on the slowest rank, also while the step did not wait; "
            "all sources together, or each (with metrics.per_source).",
            healthy="Far below the time of the steps.",
            pathological=f"Close to it, while time/data_sec is large: {fix}.",
        )
        for stage, words, fix in (
            ("open", "opening files", "there are many small ones, or text that can be tokenized ahead"),
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
        description="Time of the probe in the logged step, on the slowest rank; no other time of the step includes it.",
        healthy="A few steps long: divided by ledger.probe_every steps, below 1 % of the run.",
        pathological="Longer: raise ledger.probe_every, or lower ledger.probe_cells.",
    ),
    *(
        _TimeRow(
            name=f"time/{part}_share",
            unit="fraction",
            window="last",
            precision=3,
            title=f"Share: {words}",
            description=f"time/{part}_sec divided by step_time_sec.",
            band=band,
            healthy="Flat.",
            pathological="Grows: this part slows the steps down.",
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
            description=f"Host time of the {rank} rank from the start of the step to the backward that reduces the gradient. "
            "It excludes waiting for other ranks and (on CUDA) work that is still queued on the device.",
            healthy="Close to the other one of slowest and fastest.",
            pathological=pathological,
        )
        for rank, ranks, pathological in _RANK_TIMES
    ),
    *(
        _MemoryRow(
            name=f"gpu/{name}",
            title=title,
            description=description,
            healthy=healthy,
            pathological=pathological,
        )
        for name, title, description, healthy, pathological in (
            (
                "allocated_gb",
                "Allocated",
                "Memory allocated by tensors when the step is logged (1 GB = 1e9 bytes).",
                "Flat.",
                "Grows step by step: something keeps tensors alive.",
            ),
            (
                "peak_gb",
                "Peak",
                "Largest allocated memory since the process started.",
                "Reached within the first steps.",
                "Grows late: longer batches than before, fragmentation next.",
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
            precision=precision,
            description=f"Exponential moving average of {source} over every step, logged or not"
            + (", tokens and time each on their own." if unit in ("tokens/s", "fraction") else "."),
            healthy="A smooth version of the raw curve.",
            pathological="Drifts away from its early level.",
        )
        for name, source, unit, title, precision in (
            ("loss", "loss", "nats/token", "Loss", 4),
            ("tokens_per_sec", "tokens_per_sec", "tokens/s", "Tokens per second", 0),
            ("mfu", "mfu", "fraction", "Model FLOPs utilization", 4),
            ("step_time", "step_time_sec", "s", "Step time", 4),
        )
    ),
)
