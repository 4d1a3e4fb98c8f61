"""Catalog rows of speed, time within a step, device memory and smoothed copies."""

from __future__ import annotations

from trainer.metrics.catalog.spec import MetricSpec, RankReduction

_SPEED = "Speed"
_TIME = "Time in a step"
_MEMORY = "Device memory"
_SMOOTHED = "Smoothed"

_RANK_TIMES: tuple[tuple[str, RankReduction, str], ...] = (
    ("slowest", "max", "Far above time/fastest_rank_sec in most steps: a rank that all others wait for."),
    ("fastest", "min", "Far below time/slowest_rank_sec in most steps: it waits for the slowest."),
)

ROWS: tuple[MetricSpec, ...] = (
    MetricSpec(
        name="tokens_per_sec",
        unit="tokens/s",
        window="last",
        ranks="max",
        group=_SPEED,
        title="Tokens per second",
        precision=0,
        description="Target tokens of the step over all ranks, divided by the step's time.",
        healthy="Level after the first steps.",
        pathological="Falls over time (leak, throttling) or in waves (data).",
    ),
    MetricSpec(
        name="mfu",
        unit="fraction",
        window="last",
        ranks="max",
        group=_SPEED,
        title="Model FLOPs utilisation",
        description="The model's own FLOPs per second over the devices' peak; absent where the peak is unknown.",
        band=(0.3, 0.6),
        healthy="0.3 to 0.6 for large matrices on one node.",
        pathological="Above 1: peak or FLOP count is wrong. Below 0.1: bound by data, launches or communication.",
    ),
    MetricSpec(
        name="step_time_sec",
        unit="s",
        window="mean",
        ranks="max",
        group=_SPEED,
        title="Step time",
        description="Time from start_step to end_step of the logged step; evaluation and checkpoints are outside.",
        healthy="Level.",
        pathological="Single slow steps: see time/* for the part that took it.",
    ),
    *(
        MetricSpec(
            name=f"time/{part}_sec",
            unit="s",
            window="sum",
            ranks="max",
            group=_TIME,
            title=f"Time: {words}",
            description=f"Host time of the logged step in {words}.",
            healthy=healthy,
            pathological=pathological,
        )
        for part, words, healthy, pathological in (
            ("data", "waiting for data", "Far below the compute.", "Comparable with the compute: reading is too slow."),
            ("forward_backward", "forward and backward", "Most of the step.", "Waves: uneven batches or a slow rank."),
            ("optimizer", "clipping and the optimizer", "A few percent.", "Large: tiny batch or an unfused optimizer."),
        )
    ),
    *(
        MetricSpec(
            name=f"time/{part}_share",
            unit="fraction",
            window="last",
            ranks="max",
            group=_TIME,
            precision=3,
            title=f"Share: {words}",
            description=f"time/{part}_sec over step_time_sec.",
            band=band,
            healthy="Level.",
            pathological="Grows: this part makes the steps slow.",
        )
        for part, words, band in (
            ("data", "waiting for data", (None, 0.05)),
            ("forward_backward", "forward and backward", None),
            ("optimizer", "optimizer", None),
        )
    ),
    *(
        MetricSpec(
            name=f"time/{rank}_rank_sec",
            unit="s",
            window="last",
            ranks=ranks,
            group=_TIME,
            title=f"Time of the {rank} rank",
            description="Host time from the step's start to the backward that reduces the gradient over ranks, on the "
            f"{rank} rank. Waiting for other ranks is not in it, nor (CUDA) what the device has queued.",
            healthy="Near the other one of slowest and fastest.",
            pathological=pathological,
        )
        for rank, ranks, pathological in _RANK_TIMES
    ),
    *(
        MetricSpec(
            name=f"gpu/{name}",
            unit=unit,
            window="max",
            ranks="max",
            group=_MEMORY,
            title=title,
            precision=2,
            description=description,
            band=(0.6, 0.95) if name == "mem_utilization" else None,
            healthy=healthy,
            pathological=pathological,
        )
        for name, unit, title, description, healthy, pathological in (
            (
                "allocated_gb",
                "GB",
                "Allocated",
                "Memory held by tensors when the step is logged (1 GB = 1e9 bytes).",
                "Level.",
                "Grows step by step: something keeps tensors alive.",
            ),
            (
                "peak_gb",
                "GB",
                "Peak",
                "Largest allocated memory since the process started.",
                "Reached within the first steps.",
                "Grows late: longer batches than before, fragmentation next.",
            ),
            (
                "reserved_gb",
                "GB",
                "Reserved",
                "Memory that the caching allocator holds.",
                "A little above the peak.",
                "Far above the peak: fragmentation.",
            ),
            ("total_gb", "GB", "Total", "Memory of the device.", "Constant.", "Smaller than the card: it is shared."),
            (
                "mem_utilization",
                "fraction",
                "Peak share",
                "gpu/peak_gb over gpu/total_gb.",
                "0.6 to 0.95.",
                "Above 0.97: the next long batch may not fit.",
            ),
        )
    ),
    *(
        MetricSpec(
            name=f"smoothed/{name}",
            unit=unit,
            window="last",
            ranks="mean",
            group=_SMOOTHED,
            title=f"{title} (EMA)",
            precision=precision,
            description=f"Exponential moving average of {of} over every step, logged or not.",
            healthy="A calm version of the raw curve.",
            pathological="Drifts away from its early level.",
        )
        for name, of, unit, title, precision in (
            ("loss", "loss", "nats/token", "Loss", 4),
            ("tokens_per_sec", "tokens_per_sec", "tokens/s", "Tokens per second", 0),
            ("mfu", "mfu", "fraction", "Model FLOPs utilisation", 4),
            ("step_time", "step_time_sec", "s", "Step time", 4),
        )
    ),
)
